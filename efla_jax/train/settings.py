"""What a config says, checked before anything is built or compiled: fields, values, and what the mesh must divide."""

import functools
import importlib.util
import inspect
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from ml_collections import ConfigDict

from efla_jax import data, optim, sharding
from efla_jax.layers.fields import nearest
from efla_jax.model import AutoEncoder, LanguageModel, SequenceClassifier
from efla_jax.train.step import TrainState, make_state, make_step

SECTIONS = ("mesh", "data", "model", "optim", "train")
# Fields of config.train: their smallest values (0 turns the periodic ones off), or "" for text.
TRAIN: dict[str, int | float | str] = {
    "steps": 1,
    "accumulate": 1,
    "loss_chunk": 0,
    "z_loss": 0.0,
    "softmax_penalty": 0.0,
    "log_every": 1,
    "signals_every": 0,
    "eval_every": 0,
    "eval_batches": 0,
    "stop_at": 0.0,
    "save_every": 0,
    "keep": 1,
    "keep_period": 0,
    "keep_best": "",
    "max_skipped": 1,
    "profile_start": 0,
    "profile_steps": 1,
    "peak_tflops": 0.0,
    "wandb_project": "",
    "matmul_precision": "",
}
PRECISIONS = ("tensorfloat32", "highest")  # of the float32 products of layers; operators name their own
# What may differ between a run and its continuation: where and how it is computed, seen and kept, not what.
FIXED = {"steps", "z_loss", "softmax_penalty", "matmul_precision"}
FREE = {f"train.{name}" for name in TRAIN if name not in FIXED} | {
    "mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.context", "data.path", "data.paths", "data.worker_count",
    "data.eval_batch_size", "data.verify", "model.remat", "model.scan",
}  # fmt: skip


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
    for field in given:
        if field in config[name]:
            raise ValueError(f"config.{name}.{field}: {config[name][field]!r} is set by the run; remove the field.")
    fields = {**config[name], **given}
    known = [field for field in inspect.signature(build).parameters if field not in ("name", "parent")]
    for field in fields:
        if field not in known:
            raise ValueError(f"config.{name}.{field}: no such field.{nearest(field, known)} Known: {', '.join(known)}.")
    try:
        return build(**fields)
    except (TypeError, ValueError, AttributeError) as error:  # a value of another type shows as any of these
        raise ValueError(f"config.{name}: {error}") from error


def build_dataset(config: Mapping[str, Any]) -> Any:
    """The dataset of config.data; its order is that of config.seed."""
    chosen = section(config, "data", data.DataConfig, {"seed": config["seed"]})
    try:
        return data.make(chosen)
    except ValueError as error:
        raise ValueError(f"config.data: {error}") from error


def build_model(config: Mapping[str, Any], dataset) -> nn.Module:
    """A SequenceClassifier for images, an AutoEncoder for rows to reconstruct, a LanguageModel for all else."""
    if dataset.kind == "images":
        sizes = {"num_classes": dataset.num_classes, "max_length": dataset.length}
        return section(config, "model", SequenceClassifier, sizes)
    language = AutoEncoder if getattr(dataset, "reconstructs", False) else LanguageModel
    return section(config, "model", language, {"vocab_size": dataset.vocab_size})


class Parts(NamedTuple):
    """What a config is built into, before anything is computed: `begin` () -> the state of step 0, `placed` its
    shardings."""

    mesh: jax.sharding.Mesh
    dataset: Any
    model: nn.Module
    optimizer: Any
    begin: Callable
    placed: TrainState
    step: Callable


def build(config: Mapping[str, Any]) -> Parts:
    """Check every section of a plain config against the devices that are here, and build what it names."""
    check_sections(config)
    check_train(config["train"])
    mesh = section(config, "mesh", sharding.make_mesh, {})
    check_divisible(config, dict(mesh.shape))
    dataset = build_dataset(config)
    for length in getattr(dataset, "lengths", (getattr(dataset, "length", 0),)):
        if length % mesh.shape["context"]:
            raise ValueError(
                f"config.mesh.context: rows of {length} tokens or pixels are not divisible by context="
                f"{mesh.shape['context']}; set one that divides them, or 1."
            )
    model = build_model(config, dataset)
    check_penalty(config)
    steps = {"total_steps": config["train"]["steps"]}
    optimizer, schedule = section(config, "optim", optim.make_optimizer, steps)
    begin = functools.partial(make_state, model, optimizer, config["seed"])
    placed = sharding.state_shardings(mesh, jax.eval_shape(begin))
    fields = {name: config["train"][name] for name in ("accumulate", "loss_chunk", "z_loss", "softmax_penalty")}
    step = make_step(model, optimizer, schedule, shardings=placed, **fields)
    return Parts(mesh, dataset, model, optimizer, begin, placed, step)


def check_sections(config: Mapping[str, Any]) -> None:
    """Raise ValueError naming a section that is missing."""
    for name in SECTIONS:
        if name not in config:
            raise ValueError(f"config.{name}: this section is missing.{nearest(name, config)}")


def check_train(options: Mapping[str, Any]) -> None:
    """Raise ValueError unless config.train has every field of TRAIN, in range, and no other."""
    for name in options:
        if name not in TRAIN:
            raise ValueError(f"config.train.{name}: no such field.{nearest(name, TRAIN)} Known: {', '.join(TRAIN)}.")
    for name, least in TRAIN.items():
        if name not in options:
            raise ValueError(f"config.train.{name}: this field is missing; see configs/common.py.")
        if not isinstance(least, str) and options[name] < least:
            raise ValueError(f"config.train.{name}: {options[name]} is less than {least}. Set {least} or more.")
    check_best(options)
    if options["stop_at"] and not (options["stop_at"] <= 1 and options["eval_every"]):
        raise ValueError(
            f"config.train.stop_at: {options['stop_at']} is an accuracy, at most 1, that is looked at every eval_every="
            f"{options['eval_every']} steps. Set both, or 0 to train all steps."
        )
    if options["wandb_project"] and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"config.train.wandb_project: {options['wandb_project']!r} needs the package wandb, which is not installed;"
            " install efla_jax[wandb] or leave the field empty."
        )
    if options["matmul_precision"] not in PRECISIONS:
        raise ValueError(f"config.train.matmul_precision: {options['matmul_precision']!r} is not one of {PRECISIONS}.")


def check_penalty(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a penalty on the choices of a model that has none to make."""
    penalty, mixers = config["train"]["softmax_penalty"], config["model"]["mixers"]
    if penalty and "nats_l" not in mixers:
        raise ValueError(
            f"config.train.softmax_penalty: {penalty} is on the chunks that choose softmax, but no mixer of"
            f" config.model.mixers={mixers} chooses. Set 0, or name nats_l among them."
        )


def check_best(options: Mapping[str, Any]) -> None:
    """Raise ValueError for a keep_best that no checkpoint could be judged by."""
    best, scores = options["keep_best"], ("loss", "bits", "bits_per_byte", "-accuracy")
    if not best:
        return
    if best not in scores:
        raise ValueError(
            f"config.train.keep_best: {best!r} is not one of {scores}; the smallest is kept, with a minus the largest."
        )
    if not options["eval_every"] or options["save_every"] % options["eval_every"]:
        raise ValueError(
            f"config.train.keep_best: {best!r} needs scores when a checkpoint is saved, but eval_every="
            f"{options['eval_every']} does not divide save_every={options['save_every']}. Make save_every a multiple."
        )


def check_divisible(config: Mapping[str, Any], mesh: Mapping[str, int]) -> None:
    """Raise ValueError naming both numbers where the mesh (sizes by axis) does not divide batch, tokens or heads."""
    sizes, rows = config["data"], mesh["data"] * mesh["fsdp"]
    microbatches = config["train"]["accumulate"]
    faults = []
    if sizes["batch_size"] % (microbatches * rows):
        faults.append(
            f"config.data.batch_size: {sizes['batch_size']} rows are not divisible by train.accumulate={microbatches}"
            f" x data={mesh['data']} x fsdp={mesh['fsdp']}"
        )
    scored = sizes.get("eval_batch_size") or sizes["batch_size"]
    if scored % rows:
        faults.append(
            f"config.data.eval_batch_size: {scored} rows are not divisible by data={mesh['data']} x fsdp={mesh['fsdp']}"
        )
    if sizes.get("window", mesh["context"]) % mesh["context"]:
        faults.append(f"config.data.window: {sizes['window']} tokens are not divisible by context={mesh['context']}")
    if config["model"]["width"] % mesh["fsdp"]:
        faults.append(f"config.model.width: {config['model']['width']} is not divisible by fsdp={mesh['fsdp']}")
    for mixer, options in config["model"]["mixer_options"].items():
        if options.get("num_heads", 0) % mesh["tensor"]:
            faults.append(
                f"config.model.mixer_options.{mixer}.num_heads: {options['num_heads']} is not divisible by"
                f" tensor={mesh['tensor']}"
            )
    if faults:
        raise ValueError("config.mesh does not fit:\n  " + "\n  ".join(faults) + "\nChange the mesh or the sizes.")


def check_unchanged(saved: Mapping[str, Any], config: Mapping[str, Any], step: int) -> None:
    """Raise ValueError naming every field that shapes the numbers of a run, saved after `step`, and has changed.

    The number of steps may change while the rate does not depend on it: always when it is constant, and with "wsd"
    until its decay begins."""
    here = json.loads(json.dumps(config))
    schedule = here["optim"].get("schedule")
    shorter = min(saved["train"]["steps"], here["train"]["steps"])
    steady = {"constant": step, "wsd": shorter - here["optim"].get("decay_steps", 0)}
    free = FREE | ({"train.steps"} if step <= steady.get(schedule, -1) else set())
    changed = [
        f"config.{name}.{key}: {saved[name].get(key)!r} in the checkpoint, {here[name].get(key)!r} now"
        for name in SECTIONS
        for key in sorted({*saved[name], *here[name]})
        if saved[name].get(key) != here[name].get(key) and f"{name}.{key}" not in free
        # What runs of an older version lack and is off here is as it was.
        and (name != "train" or key in saved[name] or here[name][key])
    ]
    if saved["seed"] != here["seed"]:
        changed.append(f"config.seed: {saved['seed']} in the checkpoint, {here['seed']} now")
    if changed:
        raise ValueError(
            "config: the run was started with other values:\n  " + "\n  ".join(changed) + "\nGive those of the"
            " checkpoint (the run's config.json has them), or another --workdir for a run of its own."
        )
