"""Tables and picture of a sweep of selective copying: token accuracy by length of the rows and kind of level weights.

A run is one line of runs.csv. A seed has collapsed when its final accuracy is below 50 %; best is the best score of any
evaluation. Where the folders of the runs are at hand, the picture has their curves, too.
"""

import math
import pathlib
from collections.abc import Callable

from efla_jax import metrics
from experiments import runs
from experiments.recall_report import cell, variant

# Adaptive Memory Decay (arXiv 2605.06946), in %, five seeds, rows of 1024 tokens.
PUBLISHED_LENGTH, PUBLISHED = 1024, {"linear": "40.6 ± 19.8", "mlp_softplus": "54.8 ± 2.3"}
ORDER = ("mamba2", "linear", "linear_one", "mlp_softplus", "mlp_softmax")
COLUMNS = (
    ("accuracy", "at the trained length when training ended"),
    ("longer", "of rows twice as long"),
    ("best", "at its best in any evaluation"),
)
TITLES = {"accuracy": "trained length", "longer": "twice as long"}


def read(folder: pathlib.Path, steps: int = 0) -> list[dict]:
    """One row per run below `folder` that has ended, with its "curve"; steps: one that is broken off later is taken as
    a run of so many, if its rate is constant. Raises ValueError for two that the columns do not tell apart."""
    rows: dict[tuple, dict] = {}
    for run in runs.ended_runs(folder, "selective_copying", runs.cut_at(lambda config: steps)):
        length, last = run.config["data"]["task"]["length"], run.scored[-1]
        row = {
            "variant": variant(run.config), "length": length, "seed": run.config["seed"], "steps": last["step"],
            "accuracy": last["test_accuracy"], "longer": last.get(f"test_accuracy/{2 * length}", math.nan),
            "best": run.best, "curve": [(one["step"], one["test_accuracy"]) for one in run.scored],
        }  # fmt: skip
        key = tuple(list(row.values())[:3])
        if key in rows:
            raise ValueError(f"--runs={folder}: two runs are {key}, one of them {run.name}; report them apart.")
        rows[key] = row
    places = {name: place for place, name in enumerate(ORDER)}
    return sorted(rows.values(), key=lambda row: (places.get(row["variant"], len(places)), *list(row.values())[:3]))


def table(rows: list[dict], column: str) -> str:
    """A line for each length, a column for each variant."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    lines = [["length", *variants], ["---"] * (1 + len(variants))]
    for length in sorted({row["length"] for row in rows}):
        here = [row for row in rows if row["length"] == length]
        lines.append(
            [str(length), *(cell([row for row in here if row["variant"] == name], column) for name in variants)]
        )
        if length == PUBLISHED_LENGTH and column == "accuracy":
            lines.append([f"published for {length}", *(PUBLISHED.get(name, "") for name in variants)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def panel(rows: list[dict], column: str, title: str) -> metrics.Panel:
    """Accuracy in % by length and variant: every seed, and their mean, of the lengths that all seeds have."""
    lines = {}
    for name in dict.fromkeys(row["variant"] for row in rows):
        found = {(row["seed"], row["length"]): 100 * row[column] for row in rows if row["variant"] == name}
        seeds = sorted({seed for seed, _ in found})
        whole = [length for length in sorted({n for _, n in found}) if all((seed, length) in found for seed in seeds)]
        lines[name] = whole, [[found[seed, length] for length in whole] for seed in seeds]
    return metrics.Panel(lines, "tokens", "accuracy, %", title, points=True)


def curves(rows: list[dict], length: int) -> metrics.Panel:
    """Accuracy in % over training, every seed of a kind; one that has ended stays where it was."""
    lines = {}
    for name in dict.fromkeys(row["variant"] for row in rows if row["length"] == length):
        seeds = [dict(row["curve"]) for row in rows if (row["variant"], row["length"]) == (name, length)]
        steps = sorted(set().union(*seeds))
        lines[name] = steps, [[100 * one.get(n, one[max(one)]) for n in steps] for one in seeds]
    return metrics.Panel(lines, "step", "accuracy, %", f"{length} tokens")


def write(folder: pathlib.Path, out: pathlib.Path, steps: int = 0, draw: Callable = metrics.plot_lines) -> None:
    """runs.csv, table.md and copying.png in the folder `out`; steps: see `read`."""
    rows = read(folder, steps)
    runs.write_runs(out, [{name: value for name, value in row.items() if name != "curve"} for row in rows])
    shown = {column: what for column, what in COLUMNS if not any(math.isnan(row[column]) for row in rows)}
    note = "in %, mean ± deviation over seeds (collapsed seeds / seeds; collapsed: below 50 %)"
    text = "\n\n".join(f"Accuracy {what}, {note}.\n\n{table(rows, column)}" for column, what in shown.items())
    if any(row["steps"] == steps for row in rows):
        text += f"\n\nRuns of {steps} steps were broken off later than that."
    (out / "table.md").write_text(text + "\n")
    panels = [panel(rows, name, what) for name, what in TITLES.items() if name in shown]
    panels += [curves(rows, length) for length in sorted({row["length"] for row in rows if len(row["curve"]) > 1})]
    draw(panels, out / "copying.png")
    print(f"{text}\n\nwritten: {out}/table.md, runs.csv, copying.png")
