"""Table and picture of a sweep of configs/stiffness.py: held-out accuracy by step and scale of the keys.

A run is one line of runs.csv, those that diverged among them: without a finite gradient for train.max_skipped steps in
a row, they have no score, and the picture has them at chance.
"""

import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax

from efla_jax import evaluate, metrics
from efla_jax.train import settings
from experiments import runs


def read(folder: pathlib.Path) -> tuple[list[dict], dict[str, Any]]:
    """(one row per run that has ended or diverged, the config of one). Raises ValueError for runs without a key_scale
    and for two that the columns do not tell apart."""
    rows: dict[tuple, dict] = {}
    ended = runs.ended_runs(folder, "images")
    diverged = runs.swept_runs(folder, "images", "diverged")
    for run in (*ended, *(run for name, run in diverged.items() if name not in {one.name for one in ended})):
        options = run.config["model"]["mixer_options"].get("efla", {})
        if "key_scale" not in options:
            raise ValueError(f"--runs={folder}: {run.name} has no key_scale; give runs of configs/stiffness.py.")
        key = options["step"], options["key_scale"], run.config["seed"]
        if key in rows:
            raise ValueError(f"--runs={folder}: two runs are {key}, one of them {run.name}; report them apart.")
        last = run.scored[-1]
        rows[key] = {
            "step": key[0], "key_scale": key[1], "seed": key[2], "learning_rate": run.config["optim"]["learning_rate"],
            "steps": last["step"], "accuracy": last.get("test_accuracy", ""),
        }  # fmt: skip
    return [rows[key] for key in sorted(rows)], ended[0].config


def stiffness(config: Mapping[str, Any]) -> tuple[float, float]:
    """Quantiles of 50 and 95 % of beta |k|^2 over held-out tokens where training begins, of keys as they come: seed 0
    of the config's model."""
    config = runs.tuples(config)
    dataset = settings.build_dataset(config)
    options = {name: dict(value) for name, value in config["model"]["mixer_options"].items()}
    options["efla"] |= {"key_scale": 1.0, "step": "exact"}
    model = settings.build_model({**config, "model": {**config["model"], "mixer_options": options}}, dataset)
    batch = jax.device_put(next(iter(dataset.eval_batches("test"))))
    params = jax.jit(model.init)(jax.random.key(0), batch["pixels"])
    found = evaluate.signals(model, params, batch)
    return found["stiffness_p50"], found["stiffness_p95"]


def cell(rows: list[dict]) -> str:
    """Mean, smallest and largest seed in %, and how many of the seeds diverged."""
    values = [100 * row["accuracy"] for row in rows if row["accuracy"] != ""]
    lost = f"{len(rows) - len(values)} of {len(rows)} diverged" if len(values) < len(rows) else ""
    scores = f"{statistics.mean(values):.1f} [{min(values):.1f}, {max(values):.1f}]" if values else ""
    return ", ".join(filter(None, (scores, lost)))


def table(rows: list[dict], stiff: Mapping[str, float]) -> str:
    """A line per step, a column per scale, and where beta |k|^2 begins."""
    scales = sorted({row["key_scale"] for row in rows})
    lines = [f"| key scale | {' | '.join(f'{scale:g}' for scale in scales)} |", "| --- " * (1 + len(scales)) + "|"]
    for name, value in stiff.items():
        lines.append(f"| beta k.k at the start, {name} | {' | '.join(f'{value * s * s:.2g}' for s in scales)} |")
    for step in dict.fromkeys(row["step"] for row in rows):
        own = [[row for row in rows if (row["step"], row["key_scale"]) == (step, scale)] for scale in scales]
        lines.append(f"| {step} | {' | '.join(map(cell, own))} |")
    return "\n".join(lines)


def write(folder: pathlib.Path, out: pathlib.Path, draw: Callable = metrics.plot_lines) -> None:
    """runs.csv, table.md and stiffness.png in the folder `out`."""
    rows, config = read(folder)
    stiff = dict(zip(("median", "95 %"), stiffness(config), strict=True))
    runs.write_runs(out, rows)
    note = ("Test accuracy, %: mean over seeds [smallest, largest]. beta k.k is the stiffness of an Euler step, which"
            " contracts below 2: quantiles over the tokens of held-out rows, where training begins.")  # fmt: skip
    text = f"{note}\n\n{table(rows, stiff)}"
    (out / "table.md").write_text(text + "\n")
    chance, lines = 1 / 10, {}
    for step in dict.fromkeys(row["step"] for row in rows):
        own = {(row["seed"], row["key_scale"]): row["accuracy"] for row in rows if row["step"] == step}
        seeds, scales = sorted({seed for seed, _ in own}), sorted({scale for _, scale in own})
        whole = [scale for scale in scales if all((seed, scale) in own for seed in seeds)]
        lines[step] = whole, [[100 * (own[seed, s] if own[seed, s] != "" else chance) for s in whole] for seed in seeds]
    panel = metrics.Panel(lines, "scale of the keys", "test accuracy, % (diverged: 10)", points=True)
    draw([panel], out / "stiffness.png")
    print(f"{text}\n\nwritten: {out}/table.md, runs.csv, stiffness.png")
