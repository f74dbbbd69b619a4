"""Finished runs by their folder: what was trained, how it scored, and the parameters that are scored."""

import csv
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from efla_jax import checkpoint, metrics, train
from efla_jax.train import settings


def tuples(value: Any) -> Any:
    """Lists of a JSON file as the tuples that a config had."""
    if isinstance(value, dict):
        return {name: tuples(one) for name, one in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def json_object(file: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError naming the file where there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of UTF-8, or of JSON
        raise ValueError(f"{file}: not JSON ({error}); repair it, or write it anew.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: holds a {type(value).__name__} where a JSON object was expected; repair it.")
    return value


def recorded(path: pathlib.Path, flag: str) -> tuple[pathlib.Path, dict]:
    """(folder, config) of a run, from its folder or that of one of its steps; flag: where `path` was given."""
    folder = next((f for f in (path, *path.absolute().parents[:2]) if (f / "config.json").is_file()), None)
    if folder is None:
        raise ValueError(f"--{flag}={path}: no config.json there; give a run's folder, or one of its steps.")
    config = tuples(json_object(folder / "config.json"))
    if not isinstance(config.get("data"), dict) or "kind" not in config["data"]:
        raise ValueError(f"--{flag}={path}: the config.json there is of no run of experiments.train. Is it a model of"
                         " another library? python -m experiments.convert import first.")  # fmt: skip
    return folder, config


def require_sections(path: pathlib.Path, config: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError for a config.json, of the run at `path`, that lacks one of the sections."""
    if missing := [name for name in names if not isinstance(config.get(name), dict)]:
        raise ValueError(f"{path}: the config.json of this run has no section {missing[0]!r}, which experiments.train"
                         " writes; put it back.")  # fmt: skip


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
    require_sections(path, config, "model", "optim", "train")
    if data:
        config["data"] |= {name: () for name in ("paths", "weights") if name in config["data"]} | {"path": data}
    dataset = settings.build_dataset(config)
    model = settings.build_model(config, dataset)
    return config, dataset, model, scored_params(path, config, model)[0]


class Ended(NamedTuple):
    """A run that has ended: scored are its rows of metrics.jsonl with held-out scores, the last of them its result, or
    that one alone; best is the highest `goal_accuracy` of any evaluation."""

    name: str
    config: dict
    scored: list[dict]
    best: float


def cut_at(steps: Callable[[dict], int]) -> Callable[[dict], int]:
    """A `cut` of `ended_runs` for configs whose rate is constant: only of these a part is what fewer steps would be."""

    def cut(config: dict) -> int:
        constant = config["optim"]["schedule"] == "constant" and not config["optim"]["warmup_steps"]
        return steps(config) if constant else 0

    return cut


def ended_runs(folder: pathlib.Path, kind: str, cut: Callable[[dict], int] = lambda config: 0) -> list[Ended]:
    """The runs on data of this kind below `folder` that have ended, by name, as its results.jsonl and its sub-folders
    have them; tells which have not. Raises ValueError if there is none.

    cut: of a run's config the step at which one that is broken off later counts as a run of so many steps (0: none)."""
    found, diverged, going = swept_runs(folder, kind), swept_runs(folder, kind, "diverged"), []
    for file in sorted(folder.glob("*/metrics.jsonl")):
        config = json_object(file.parent / "config.json")
        if config["data"]["kind"] != kind:
            continue
        scored = [row for row in metrics.read_rows(file) if "test_accuracy" in row]
        if row := found.get(file.parent.name):  # of a sweep; the folder has its curve
            if scored and scored[-1] | row.scored[-1] == scored[-1]:
                found[row.name] = row._replace(scored=scored)
            continue
        options = config["train"]
        reached = [row.get("test_macro_accuracy", row["test_accuracy"]) for row in scored]
        if scored and (scored[-1]["step"] == options["steps"] or 0 < options["stop_at"] <= reached[-1]):
            best = max(reached)
            found[file.parent.name] = Ended(file.parent.name, config, scored, best)
        elif steps := next((row["step"] for row in scored if row["step"] == cut(config)), 0):
            count = 1 + [row["step"] for row in scored].index(steps)
            shorter = config | {"train": options | {"steps": steps}}
            found[file.parent.name] = Ended(file.parent.name, shorter, scored[:count], max(reached[:count]))
        elif file.parent.name not in diverged:
            going.append(file.parent.name)
    if lost := sorted(diverged.keys() - found.keys()):
        print(f"diverged, without a score: {', '.join(lost)}")
    if going:
        print(f"left out, not at their end (--resume): {', '.join(going)}")
    if not found:
        raise ValueError(f"--runs={folder}: no ended run of kind {kind!r} there; train some first.")
    return [found[name] for name in sorted(found)]


def swept_rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a sweep's results.jsonl, none without it. Raises ValueError naming a damaged line."""
    file, rows = folder / "results.jsonl", []
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else ()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: not JSON ({error}); remove the line.") from None
    return rows


def swept_runs(folder: pathlib.Path, kind: str, status: str = "finished") -> dict[str, Ended]:
    """Those of a sweep's results.jsonl that ended so, without the folders of its runs; of a name the last row."""
    found = {}
    for row in swept_rows(folder):
        if row["config"]["data"]["kind"] == kind and row["status"] == status:
            scores = {f"test_{name}": value for name, value in row["scores"].items()}
            found[row["name"]] = Ended(row["name"], row["config"], [{"step": row["step"], **scores}], row["best"])
    return found


def write_runs(out: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """out/runs.csv, a line for each row; rows have equal keys."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "runs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def variant(config: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """The mixers of a run and those options of the first that are not as in `plain`."""
    mixers = config["model"]["mixers"]
    options = config["model"]["mixer_options"].get(mixers[0], {})
    return " ".join(("+".join(mixers), *(f"{k}={options[k]}" for k in plain if options.get(k, plain[k]) != plain[k])))
