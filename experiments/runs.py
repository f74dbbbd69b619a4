"""Finished runs by their folder: what was trained, and the parameters that are scored."""

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import optax

from efla_jax import checkpoint, train
from efla_jax.train import settings


def tuples(value: Any) -> Any:
    """Lists of a JSON file as the tuples that a config had."""
    if isinstance(value, dict):
        return {name: tuples(one) for name, one in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def recorded(path: pathlib.Path, flag: str) -> tuple[pathlib.Path, dict]:
    """(folder, config) of a run, from its folder or that of one of its steps; flag: where `path` was given."""
    folder = next((f for f in (path, *path.absolute().parents[:2]) if (f / "config.json").is_file()), None)
    if folder is None:
        raise ValueError(f"--{flag}={path}: no config.json there; give a run's folder, or one of its steps.")
    config = tuples(json.loads((folder / "config.json").read_text()))
    if "data" not in config:
        raise ValueError(f"--{flag}={path}: the config.json there is of no run of experiments.train. Is it a model of"
                         " another library? python -m experiments.convert import first.")  # fmt: skip
    return folder, config


def scored_params(path: pathlib.Path, config: Mapping[str, Any], model) -> tuple[Any, str]:
    """The parameters of a run that its scores are of, the average if it kept one, and the hash of its tokenizer."""
    shapes = jax.eval_shape(functools.partial(train.make_state, model, optax.identity(), 0)).params
    part = "ema" if config["optim"].get("ema_decay") else "params"
    params, report = checkpoint.load_params(path, shapes, part=part)
    print("\n".join(report.lines()))
    return params, (report.metadata or {}).get("tokenizer", "")


def restored(path: pathlib.Path, flag: str, data: str = "") -> tuple[dict, Any, Any, Any]:
    """(config, dataset, model, scored parameters) of a run; data: where its data lies now (empty: where it did)."""
    _, config = recorded(path, flag)
    if data:
        config["data"] |= {name: () for name in ("paths", "weights") if name in config["data"]} | {"path": data}
    dataset = settings.build_dataset(config)
    model = settings.build_model(config, dataset)
    return config, dataset, model, scored_params(path, config, model)[0]
