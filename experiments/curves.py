"""Curves of runs side by side: one panel per metric of metrics.jsonl, one line per run.

    python -m experiments.curves --runs=runs/efla,runs/delta_net --metrics=loss,valid_loss --out=curves.png

A run without a metric is left out of its panel. --smoothing=0.9 averages exponentially; --first leaves out the steps
before it, whose losses would set the scale.
"""

import math
import pathlib

from absl import app, flags

from efla_jax import metrics
from experiments.usage import run_in_one_line

RUNS = flags.DEFINE_list("runs", None, "workdirs, or label=workdir", required=True)
METRICS = flags.DEFINE_list("metrics", ["loss", "valid_loss"], "names in metrics.jsonl, one panel each")
OUT = flags.DEFINE_string("out", None, "PNG to write", required=True)
SMOOTHING = flags.DEFINE_float("smoothing", 0.0, "of every curve", lower_bound=0.0, upper_bound=0.999)
FIRST = flags.DEFINE_integer("first", 0, "first step that is drawn", lower_bound=0)


def panel(metric: str, runs: dict[str, list[dict]]) -> metrics.Panel:
    """The curves of one metric. Raises ValueError if no run has it."""
    lines = {}
    for label, rows in runs.items():
        points = [(r["step"], r[metric]) for r in rows if math.isfinite(r.get(metric, math.nan))]
        points = [(step, value) for step, value in points if step >= FIRST.value]
        if points:
            steps, values = zip(*points, strict=True)
            lines[label] = steps, metrics.smooth(values, SMOOTHING.value)
    if not lines:
        raise ValueError(f"--metrics: no run has a finite value of {metric!r} from step {FIRST.value} on")
    return metrics.Panel(lines, "step", metric)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"stray argument {argv[1]!r}: flags are written --name=value")
    runs = {}
    try:
        for entry in RUNS.value:
            label, _, folder = entry.rpartition("=")
            runs[label or pathlib.Path(folder).name] = metrics.read_rows(folder)
        print(metrics.plot_lines([panel(metric, runs) for metric in METRICS.value], OUT.value))
    except (ValueError, OSError) as error:
        raise app.UsageError(str(error)) from None


if __name__ == "__main__":
    run_in_one_line(main)
