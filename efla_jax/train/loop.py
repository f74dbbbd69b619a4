"""The training loop: from config and folder to a finished run, through every checkpoint, score and interruption."""

import contextlib
import functools
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from ml_collections import ConfigDict

from efla_jax import checkpoint, data, flops, metrics, optim, sharding
from efla_jax.checkpoint import Checkpointer
from efla_jax.evaluate import evaluate, evaluate_classes, evaluate_slices, goal_accuracy
from efla_jax.model import LanguageModel
from efla_jax.train import hosts, settings
from efla_jax.train.report import Clock, Compilations, MetricLog
from efla_jax.train.step import TrainState, make_signals

HELD_OUT = {"text": "valid", "tokens": "valid", "images": "test", **dict.fromkeys(data.GENERATED, "test")}


class Run(NamedTuple):
    """A run that has reached its last step, or was told to stop (`finished` False; its state is saved)."""

    model: nn.Module
    params: Any
    dataset: Any
    scores: dict[str, float]
    workdir: pathlib.Path
    finished: bool = True


class Job(NamedTuple):
    """What does not change while a run goes on."""

    config: dict[str, Any]
    workdir: pathlib.Path
    parts: settings.Parts
    checkpointer: Checkpointer
    clock: Clock


def fit(
    config: ConfigDict | Mapping,
    workdir: str | pathlib.Path,
    *,
    resume: bool = False,
    init_from: str | pathlib.Path = "",
    init_part: str = "params",
    allow_partial: bool = False,
    cast: bool = False,
) -> Run:
    """Train to config.train.steps or stop_at and score the held-out split; everything is written below `workdir`.

    Writes config.json, parameters.txt, metrics.jsonl (and TensorBoard events), checkpoints/ and loss.png. `resume` goes
    on from the latest complete checkpoint, if there is one: the same batches, the same numbers, also on another mesh.
    `init_from` begins with the parameters of another run (its workdir, or a step's folder), or with their average
    (init_part="ema"), and a fresh optimiser.
    allow_partial and cast let a checkpoint lack or have more leaves, or have other dtypes; what was done is printed.
    SIGTERM saves and returns a Run that is not `finished`; Ctrl-C saves and is raised then.

    Raises ValueError before anything is compiled for a config that does not fit, a mesh that does not divide it, a
    folder that holds a run already or that another program trains in, or a resumed run whose config has changed;
    FloatingPointError after config.train.max_skipped steps in a row without a finite gradient."""
    clock = Clock()
    config, workdir = settings.plain(config), require_folder(workdir)
    parts = settings.build(config)
    partial = {"allow_partial": allow_partial, "cast": cast}
    kept = {"max_to_keep": "keep", "keep_period": "keep_period", "keep_best": "keep_best"}
    saving = {name: config["train"][field] for name, field in kept.items()}
    with (
        jax.default_matmul_precision(config["train"]["matmul_precision"]), jax.set_mesh(parts.mesh),
        hosts.stop_when_told() as stop, contextlib.ExitStack() as open_things, hosts.ending_together(),
    ):  # fmt: skip
        open_things.enter_context(hosts.alone_in(workdir))
        checkpointer = open_things.enter_context(Checkpointer(workdir / "checkpoints", **saving))
        rows = sharding.local_rows(parts.mesh, config["data"]["batch_size"])
        iterator = open_things.enter_context(contextlib.closing(parts.dataset.train_iterator(rows=rows)))
        state = restored(config, checkpointer, parts, iterator, resume, partial)
        if state is None:
            state = jax.jit(parts.begin, out_shardings=parts.placed)()
            if init_from:
                state = warm_start(state, init_from, init_part, partial, parts)
        job = Job(config, workdir, parts, checkpointer, clock)
        describe(job, state)
        state, scores, finished = loop(job, iterator, state, stop)
        params = optim.evaluation_params(state.params, state.opt_state)
    return Run(parts.model, params, parts.dataset, scores, workdir, finished)


def require_folder(workdir: str | pathlib.Path) -> pathlib.Path:
    """The folder of that name; ValueError if it names something else."""
    if "://" in str(workdir):
        raise ValueError(f"workdir: {workdir} is a URL; name a folder of a mounted file system.")
    if pathlib.Path(workdir).is_file():
        raise ValueError(f"workdir: {workdir} is a file; name a folder, which may not exist yet.")
    return pathlib.Path(workdir)


def restored(config, checkpointer, parts, iterator, resume: bool, partial) -> TrainState | None:
    """The state to go on from, with the data at its place; None when the folder holds no checkpoint."""
    latest = checkpointer.latest_step()
    if latest is None:
        return None
    if not resume:
        raise ValueError(
            f"workdir: {checkpointer.directory.parent} holds a run at step {latest}. Pass --resume to go on with it, or"
            " another --workdir for a fresh one."
        )
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(parts.begin), parts.placed
    )
    if partial["allow_partial"]:  # what the checkpoint lacks begins as in a fresh run
        target = jax.jit(parts.begin, out_shardings=parts.placed)()

    def check(metadata, step: int) -> None:  # a field says more than the leaves that it shapes
        settings.check_unchanged(metadata["config"], config, step)

    found = checkpointer.restore(target, **partial, check=check)
    known, here = found.metadata.get("tokenizer", ""), tokenizer_of(parts.dataset)
    if known != here:
        raise ValueError(
            f"config.data: the run was trained with tokenizer {known!r}, the data here has {here!r};"
            " its tokens mean something else. Give the data of the run."
        )
    iterator.set_state(found.data_state)
    say(found.notes)
    return found.state


def warm_start(state: TrainState, path, part: str, partial, parts) -> TrainState:
    """The state with parameters read from another run, and a report of what was loaded and what was not."""
    params, report = checkpoint.load_params(
        path, state.params, part=part, allow_partial=partial["allow_partial"], cast=partial["cast"]
    )
    say(report.lines())
    tokenizer = tokenizer_of(parts.dataset)
    known = (report.metadata or {}).get("tokenizer", tokenizer)
    if known != tokenizer and not partial["allow_partial"]:
        raise ValueError(
            f"init_from: {path} was trained with tokenizer {known!r}, the data here has {tokenizer!r}: its embeddings"
            " mean other tokens. Give data of that tokenizer, or --allow_partial to begin with them all the same."
        )
    init = jax.jit(parts.optimizer.init, out_shardings=parts.placed.opt_state)
    return state._replace(params=params, opt_state=init(params))  # an average begins at the parameters


def tokenizer_of(dataset) -> str:
    """What makes numbers of text here; empty for images."""
    return getattr(dataset, "tokenizer_hash", "")


def say(lines) -> None:
    """Print, in the first process only."""
    if jax.process_index() == 0:
        for line in [lines] if isinstance(lines, str) else lines:
            print(line, flush=True)


def describe(job: Job, state: TrainState) -> None:
    """Write config.json and parameters.txt, and say in a few lines what is about to be trained on what."""
    if jax.process_index():
        return
    config, workdir, mesh = job.config, job.workdir, job.parts.mesh
    workdir.mkdir(parents=True, exist_ok=True)
    for folder in (workdir, workdir / "checkpoints"):
        require_writable(folder)
    (workdir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    chosen = config["optim"]
    table = optim.decay_table(state.params, chosen.get("decay", "matrices"), chosen.get("algorithm", "adamw"))
    (workdir / "parameters.txt").write_text(table + "\n")
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    facts = ", ".join(f"{name} {value}" for name, value in job.parts.dataset.describe().items())
    say(f"{workdir}: {count:,} parameters on {mesh.size} {mesh.devices.flat[0].device_kind} of {jax.device_count()}"
        f" ({sharding.describe(mesh)}); data: {facts}")  # fmt: skip


def require_writable(folder: pathlib.Path) -> None:
    """Raise ValueError for a folder that takes no files: now, and not at the first save, hours later."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"workdir: {folder} cannot be written ({error.strerror}), so nothing could be saved; make it writable, or"
            " choose another --workdir"
        ) from error


def make_log(job: Job, writer, compilations, begin: int, params) -> MetricLog:
    """The log of a run, with what it needs to know about model, data and devices."""
    data, options = job.config["data"], job.config["train"]
    language = job.parts.model if isinstance(job.parts.model, LanguageModel) else None
    length = getattr(job.parts.dataset, "length", 0) or data["window"]
    peak = options["peak_tflops"] * 1e12 or flops.peak_flops(job.parts.mesh.devices.flat[0]) or 0.0
    return MetricLog(
        writer, job.clock, compilations,
        begin=begin, limit=options["max_skipped"], tokens=data["batch_size"] * length,
        flops_per_token=flops.train_flops_per_token(language, length) if language else 0.0,
        peak_flops=peak * job.parts.mesh.size,
        bytes_per_token=job.parts.dataset.bytes_per_token if language else 0.0,
        leaf_names=optim.leaf_names(params),
    )  # fmt: skip


def score(job: Job, state: TrainState, split: str = "") -> dict[str, float]:
    """The scores of a split, by default the held-out one, of the averaged parameters where there are some."""
    params = optim.evaluation_params(state.params, state.opt_state)
    dataset, options = job.parts.dataset, job.config["train"]
    split = split or HELD_OUT[dataset.kind]
    place = functools.partial(sharding.place, job.parts.mesh)
    limit, chunk = options["eval_batches"], options["loss_chunk"]
    evaluated = functools.partial(evaluate, job.parts.model, params, place=place, limit=limit, chunk=chunk)
    with job.clock.on("score"):
        if dataset.kind in data.GENERATED:
            scores = evaluate_slices(evaluated, dataset.slices(split))
            if getattr(dataset, "classwise", False):
                batches = dataset.eval_batches(split)
                scores |= evaluate_classes(job.parts.model, params, batches, place=place, limit=limit)
            return scores
        scores = evaluated(dataset.eval_batches(split))
    per_byte = getattr(dataset, "bytes_per_token", 0.0)
    return scores | ({"bits_per_byte": scores["bits"] / per_byte} if per_byte else {})


def held_out(job: Job, state: TrainState, step: int, end: int) -> tuple[dict[str, float], int]:
    """Held-out scores, those of "longer" rows too at the end, and where that is: here if they reach train.stop_at."""
    scores, wanted = score(job, state), job.config["train"]["stop_at"]
    reached = goal_accuracy(scores)
    if 0 < wanted <= reached and step < end:
        say(f"step {step}: held-out accuracy {reached:.4f} reaches stop_at={wanted:g}, the run ends here")
        end = step
    dataset = job.parts.dataset
    if step == end and dataset.kind in data.GENERATED and dataset.slices("longer"):
        longer = score(job, state, "longer")
        scores |= {name: value for name, value in longer.items() if "/" in name}
    return scores, end


def loop(job: Job, iterator, state: TrainState, stop: hosts.StopRequest) -> tuple[TrainState, dict[str, float], bool]:
    """Steps from where `state` stands to config.train.steps or config.train.stop_at, with logs, held-out scores and
    checkpoints on the way.

    Returns the state, the scores of its end (none when it was told to stop) and whether it reached its end."""
    options, split = job.config["train"], HELD_OUT[job.parts.dataset.kind]
    begin, end = int(state.step), options["steps"]
    scores: dict[str, float] = {}
    if begin == end or (begin and options["stop_at"] and begin % options["eval_every"] == 0):
        scores, end = held_out(job, state, begin, end)  # of a run that may have ended; its rows are there already
    compilations = Compilations()
    signals = None
    if options["signals_every"] and isinstance(job.parts.model, LanguageModel):
        signals = make_signals(job.parts.model, options["accumulate"])
    writer = metrics.Writer(
        job.workdir, start_step=begin + 1, total_steps=end, print_every=options["log_every"],
        wandb_project=options["wandb_project"], config=job.config,
    )  # fmt: skip
    done, told = begin, False
    with writer, contextlib.closing(compilations), Trace(job.workdir, options, begin) as trace:
        log = make_log(job, writer, compilations, begin, state.params)
        while done < end and not told and (batch := next_batch(job, iterator, done + 1)) is not None:
            done += 1
            is_due = {name: options[f"{name}_every"] and done % options[f"{name}_every"] == 0 for name in EVERY}
            trace.before(done)
            extra = None
            if signals and is_due["signals"]:
                log.flush()
                with job.clock.on("score"):
                    extra = jax.block_until_ready(signals(state.params, batch))
                log.restart(done - 1)
            state, report = job.parts.step(state, batch)
            if done == begin + 1:
                jax.block_until_ready(report)
                job.clock.started()
                log.restart(done)
            log.note(done, report, log=bool(is_due["log"] or extra or done in (begin + 1, end)), signals=extra)
            told = stop.reached(done)
            scores = {}
            try:
                if done == end or (is_due["eval"] and not told):
                    log.flush()
                    scores, end = held_out(job, state, done, end)
                    writer.write(done, {f"{split}_{name}": value for name, value in scores.items()})
                    log.restart(done)
            finally:  # whatever happens to the scores, the steps are not lost
                if done == end or told or is_due["save"]:
                    log.flush()
                    save(job, done, state, iterator, scores)
            job.checkpointer.check_for_errors()
        log.flush()
    if begin < done < end and not told and job.checkpointer.latest_step() != done:
        save(job, done, state, iterator, {})
    job.checkpointer.wait()
    if done < end:
        say(f"{'told to stop' if told else 'no more data'}: step {done} of {end} is saved; go on with --resume")
    draw(job)
    return state, scores, done == end


def draw(job: Job) -> None:
    """loss.png, by the first process; no losses that could be drawn need not fail a run."""
    if jax.process_index() == 0:
        try:
            runs = {job.workdir.name: job.workdir}
            metrics.plot_curves(runs, job.workdir / "loss.png", y_label="training loss, nats")
        except ValueError as error:
            say(f"no loss.png: {error}")


EVERY = ("log", "signals", "eval", "save")


def save(job: Job, step: int, state: TrainState, iterator, scores: dict[str, float]) -> None:
    """Begin to write the checkpoint of a step."""
    dataset = job.parts.dataset
    metadata = {"config": json.loads(json.dumps(job.config)), "tokenizer": tokenizer_of(dataset)}
    metadata["vocabulary"] = getattr(dataset, "vocabulary", {})  # with EOS and BOS: how scored texts begin and end
    with job.clock.on("save"):
        job.checkpointer.save(step, state, iterator.get_state(), metadata, scores or None)


def next_batch(job: Job, iterator, step: int) -> dict[str, jax.Array] | None:
    """The batch of a step on the mesh; None in every process once one of them has no more."""
    with job.clock.on("data"):
        batch = next(iterator, None)
        if not hosts.agree_on_next(step, batch is not None) or batch is None:
            return None
        return sharding.place(job.parts.mesh, batch, job.config["data"]["batch_size"])


class Trace:
    """The profiler trace of config.train.profile_steps steps from profile_start on, in the run's folder `profile`."""

    def __init__(self, workdir: pathlib.Path, options: Mapping[str, Any], begin: int):
        first = options["profile_start"]
        self.folder, self.on = workdir / "profile", False
        self.first = first if first > begin else 0
        self.last = first + options["profile_steps"] - 1

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_) -> None:
        if self.on:
            jax.profiler.stop_trace()

    def before(self, step: int) -> None:
        """Begin or end the trace where `step` asks for it."""
        if self.first and step == self.first:
            jax.profiler.start_trace(str(self.folder))
            self.on = True
        elif self.on and step > self.last:
            jax.profiler.stop_trace()
            self.on = False
