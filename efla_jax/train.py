"""The training loop: a config and a folder go in; a trained model, its checkpoints, metrics and loss curve come out.

    run = fit(config, "runs/first")                  # a ConfigDict with the sections of configs/common.py
    run = fit(config, "runs/first", resume=True)     # go on from the latest checkpoint

The config is taken apart here, once: no layer ever sees it. Metrics are read one step late, so that logging never
waits.
"""

import functools
import inspect
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from ml_collections import ConfigDict

from efla_jax import data, metrics, optim
from efla_jax.checkpoint import Checkpointer
from efla_jax.evaluate import batch_sums, evaluate
from efla_jax.layers.fields import nearest
from efla_jax.model import LanguageModel, SequenceClassifier

SECTIONS = ("data", "model", "optim", "train")
# Fields of config.train and their smallest values; 0 turns the periodic ones off.
TRAIN: dict[str, int | str] = {
    "steps": 1,
    "log_every": 1,
    "eval_every": 0,
    "save_every": 0,
    "keep": 1,
    "max_skipped": 1,
    "matmul_precision": "",
}
PRECISIONS = ("tensorfloat32", "highest")  # of the float32 products of layers; operators name their own
HELD_OUT = {"text": "valid", "images": "test"}


class TrainState(NamedTuple):
    """What a step carries on and a checkpoint holds."""

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array


class Run(NamedTuple):
    """A run that has reached its last step."""

    model: nn.Module
    params: Any
    dataset: Any
    scores: dict[str, float]
    workdir: pathlib.Path


def plain(config: ConfigDict | Mapping, path: str = "config") -> dict[str, Any]:
    """A config as nested plain dicts; ValueError for a value that a command line could not have meant."""
    out = {}
    for name, value in config.items():
        where = f"{path}.{name}"
        if isinstance(value, ConfigDict | Mapping):
            out[name] = plain(value, where)
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where}: {value} is not a finite number. Write it in full or with a smaller exponent.")
        if value is None or isinstance(value, list):
            raise ValueError(f"{where}: {value!r} could not be overridden on a command line. Use a tuple or a number.")
        out[name] = value
    return out


def section(config: Mapping[str, Any], name: str, build: Callable, given: Mapping[str, Any]) -> Any:
    """build(**config[name], **given), with a ValueError that names the config field when one does not fit."""
    fields = {**config[name], **given}
    known = [field for field in inspect.signature(build).parameters if field not in ("name", "parent")]
    for field in fields:
        if field not in known:
            raise ValueError(f"config.{name}.{field}: no such field.{nearest(field, known)} Known: {', '.join(known)}.")
    try:
        return build(**fields)
    except ValueError as error:
        raise ValueError(f"config.{name}: {error}") from error


def build_dataset(config: Mapping[str, Any]) -> Any:
    """The dataset of config.data; its order is that of config.seed."""
    return data.make(section(config, "data", data.DataConfig, {"seed": config["seed"]}))


def build_model(config: Mapping[str, Any], dataset) -> nn.Module:
    """A LanguageModel for text, a SequenceClassifier for images."""
    if dataset.kind == "text":
        return section(config, "model", LanguageModel, {"vocab_size": dataset.vocab_size})
    sizes = {"num_classes": dataset.num_classes, "max_length": dataset.length}
    return section(config, "model", SequenceClassifier, sizes)


def make_state(model: nn.Module, optimizer, batch: Mapping[str, Any], seed: int) -> TrainState:
    """Parameters (float32) and optimiser state of step 0, a pure function of the seed."""
    init_key, key = jax.random.split(jax.random.key(seed))
    example = batch["tokens"] if isinstance(model, LanguageModel) else batch["pixels"]
    params = model.init(init_key, jnp.asarray(example[:1, :1] if isinstance(model, LanguageModel) else example[:1]))
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), key)


def make_step(model: nn.Module, optimizer, schedule) -> Callable:
    """The jitted, donated (state, batch) -> (state, metrics): one optimiser step on the mean loss of the batch."""

    def mean_loss(params, batch, key):
        sums = batch_sums(model, params, batch, rngs={"dropout": key})
        return sums.loss / jnp.maximum(sums.weight, 1.0), sums

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(state.key, state.step)
        gradients, sums = jax.grad(mean_loss, has_aux=True)(state.params, batch, key)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        report = {
            "loss": sums.loss / jnp.maximum(sums.weight, 1.0),
            "accuracy": sums.correct / jnp.maximum(sums.weight, 1.0),
            "weight": sums.weight,
            "grad_norm": opt_state.grad_norm,
            "learning_rate": schedule(state.opt_state.count),
            "skipped": opt_state.skipped,
            "skipped_in_a_row": opt_state.skipped_in_a_row,
        }
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state, state.key), report

    return step


class MetricLog:
    """Turns step metrics into log rows one step late, and stops a run whose gradients stay non-finite."""

    def __init__(self, writer: metrics.Writer, is_text: bool, limit: int, begin: int):
        self.writer, self.is_text, self.limit = writer, is_text, limit
        self.waiting: tuple[int, int, dict] | None = None
        self.since, self.logged_at = time.perf_counter(), begin

    def note(self, step: int, tokens: int, report: dict[str, jax.Array]) -> None:
        """Log what waits, then keep this report until the next call."""
        self.flush()
        self.waiting = step, tokens, report

    def flush(self) -> None:
        """Log the report that waits, if any."""
        if self.waiting is None:
            return
        step, tokens, report = self.waiting
        self.waiting = None
        row = {name: float(value) for name, value in jax.device_get(report).items()}
        now = time.perf_counter()
        row["tokens_per_second"] = tokens * (step - self.logged_at) / max(now - self.since, 1e-9)
        self.since, self.logged_at = now, step
        if self.is_text:
            row["bits_per_byte"] = row["loss"] / math.log(2)
        bad = row.pop("skipped_in_a_row")
        self.writer.write(step, row)
        if bad >= self.limit:
            raise FloatingPointError(
                f"the gradient was not finite in the last {bad:.0f} steps before step {step}: nothing was learned from"
                " them and the run stops. Lower config.optim.learning_rate, or look at the data of these steps."
            )


def check_train(options: Mapping[str, Any]) -> None:
    """Raise ValueError unless config.train has every field of TRAIN, in range, and no other."""
    for name in options:
        if name not in TRAIN:
            raise ValueError(f"config.train.{name}: no such field.{nearest(name, TRAIN)} Known: {', '.join(TRAIN)}.")
    for name, least in TRAIN.items():
        if name not in options:
            raise ValueError(f"config.train.{name}: this field is missing; see configs/common.py.")
        if isinstance(least, int) and options[name] < least:
            raise ValueError(f"config.train.{name}: {options[name]} is less than {least}.")
    if options["matmul_precision"] not in PRECISIONS:
        raise ValueError(f"config.train.matmul_precision: {options['matmul_precision']!r} is not one of {PRECISIONS}.")


def check_unchanged(saved: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise ValueError naming every field that shapes the numbers of a run and differs from the saved one."""
    here = json.loads(json.dumps(config))
    free = {"train.log_every", "train.eval_every", "train.save_every", "train.keep", "train.max_skipped"}
    if here["optim"].get("schedule") == "constant":
        free.add("train.steps")  # more steps of a constant rate are the same run, longer
    changed = [
        f"config.{name}.{key}: {saved[name].get(key)!r} in the checkpoint, {here[name].get(key)!r} now"
        for name in SECTIONS
        for key in sorted({*saved[name], *here[name]})
        if saved[name].get(key) != here[name].get(key) and f"{name}.{key}" not in free
    ]
    if saved["seed"] != here["seed"]:
        changed.append(f"config.seed: {saved['seed']} in the checkpoint, {here['seed']} now")
    if changed:
        raise ValueError("config: the run was started with other values:\n  " + "\n  ".join(changed))


def open_state(config: dict, checkpointer: Checkpointer, state: TrainState, iterator, resume: bool) -> TrainState:
    """The state to go on from: the given fresh one, or the latest checkpoint when resuming."""
    latest = checkpointer.latest_step()
    if latest is None:
        return state
    if not resume:
        raise ValueError(
            f"workdir: {checkpointer.directory.parent} holds a run at step {latest}. Pass --resume to go on with it, or"
            " another --workdir for a fresh one."
        )
    restored = checkpointer.restore(jax.eval_shape(lambda s: s, state))
    check_unchanged(restored.metadata["config"], config)
    iterator.set_state(restored.data_state)
    return restored.state


def describe(config: dict, workdir: pathlib.Path, dataset, state: TrainState) -> None:
    """Write config.json and parameters.txt, and say in a few lines what is about to be trained on what."""
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (workdir / "parameters.txt").write_text(
        optim.decay_table(state.params, config["optim"].get("decay", "matrices")) + "\n"
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    facts = ", ".join(f"{name} {value}" for name, value in dataset.describe().items())
    print(
        f"{workdir}: {count:,} parameters on {jax.device_count()} {jax.devices()[0].device_kind}; data: {facts}",
        flush=True,
    )


def loop(config, workdir, model, dataset, iterator, state, step, checkpointer) -> tuple[TrainState, dict[str, float]]:
    """Steps from where `state` stands to config.train.steps, with logs, held-out scores and checkpoints on the way."""
    options, is_text = config["train"], dataset.kind == "text"
    begin, end = int(state.step), options["steps"]
    with metrics.Writer(workdir, start_step=begin + 1, total_steps=end, print_every=options["log_every"]) as writer:
        log = MetricLog(writer, is_text, options["max_skipped"], begin)

        def score(at: int) -> dict[str, float]:
            log.flush()
            scores = evaluate(model, state.params, dataset.eval_batches(HELD_OUT[dataset.kind]))
            if at > begin:  # a finished run that is scored again has this row already
                writer.write(at, {f"{HELD_OUT[dataset.kind]}_{name}": value for name, value in scores.items()})
            log.since = time.perf_counter()
            return scores

        for done in range(begin + 1, end + 1):
            batch = next(iterator)
            state, report = step(state, batch)
            if done % options["log_every"] == 0 or done == end or done == begin + 1:
                log.note(done, batch["mask"].size if is_text else batch["pixels"].size, report)
            if options["eval_every"] and done % options["eval_every"] == 0 and done < end:
                score(done)
            if done == end or (options["save_every"] and done % options["save_every"] == 0):
                log.flush()
                checkpointer.save(done, state, iterator.get_state(), {"config": json.loads(json.dumps(config))})
            checkpointer.check_for_errors()
        scores = score(end)
    metrics.plot_curves({workdir.name: workdir}, workdir / "loss.png", y_label="training loss, nats")
    return state, scores


def fit(config: ConfigDict | Mapping, workdir: str | pathlib.Path, *, resume: bool = False) -> Run:
    """Train to config.train.steps and score the held-out split; everything is written below `workdir`.

    Writes config.json, parameters.txt, metrics.jsonl (and TensorBoard events), checkpoints/ and loss.png. With `resume`
    it goes on from the latest checkpoint, if there is one; a finished run is only scored again. Raises ValueError for a
    config that does not fit, a folder that already holds a run, or a resumed run whose config has changed, and
    FloatingPointError when config.train.max_skipped steps in a row have no finite gradient."""
    config = plain(config)
    for name in SECTIONS:
        if name not in config:
            raise ValueError(f"config.{name}: this section is missing.{nearest(name, config)}")
    workdir = pathlib.Path(workdir)
    if workdir.is_file():
        raise ValueError(f"workdir: {workdir} is a file; name a folder, which may not exist yet.")
    options = config["train"]
    check_train(options)
    dataset = build_dataset(config)
    model = build_model(config, dataset)
    optimizer, schedule = section(config, "optim", optim.make_optimizer, {"total_steps": options["steps"]})
    iterator = dataset.train_iterator()
    state = make_state(model, optimizer, next(iterator), config["seed"])
    iterator.set_state({**iterator.get_state(), "next_step": 0})
    precision = jax.default_matmul_precision(options["matmul_precision"])
    with precision, Checkpointer(workdir / "checkpoints", max_to_keep=options["keep"]) as checkpointer:
        state = open_state(config, checkpointer, state, iterator, resume)
        describe(config, workdir, dataset, state)
        step = make_step(model, optimizer, schedule)
        state, scores = loop(config, workdir, model, dataset, iterator, state, step, checkpointer)
    return Run(model, state.params, dataset, scores, workdir)
