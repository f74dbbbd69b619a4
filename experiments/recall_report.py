"""Tables and picture of a sweep of associative recall: accuracy at the trained length and beyond, by seed.

A run is one line of runs.csv; its folder needs config.json and metrics.jsonl. A seed has collapsed when its final
accuracy is below 50 %. Best is the best score of any evaluation, which is what the published figures are.
"""

import json
import math
import pathlib
import statistics
from collections.abc import Callable

import numpy as np

from efla_jax import metrics
from experiments import runs

COLLAPSED = 0.5
# Adaptive Memory Decay (arXiv 2605.06946), in %: of its repository for 128 tokens, five seeds, best scores.
PUBLISHED = {"linear": {8: 99.4, 16: 99.3, 32: 60.9}, "mlp_softplus": {8: 99.2, 16: 99.5, 32: 99.6}}
PUBLISHED_LENGTH = 128


def variant(config: dict) -> str:
    """The mixer, or for a log-linear one its level weights; linear ones with a bias begin at 1. Hybrids: all mixers."""
    mixer, *others = config["model"]["mixers"]
    if others:
        return "+".join((mixer, *others))
    options = config["model"]["mixer_options"].get(mixer, {})
    return options.get("level_kind", mixer) + ("_one" if options.get("level_bias") else "")


def ended(last: dict, options: dict) -> bool:
    """Whether a run's last scores are those of its end."""
    return last["step"] == options["steps"] or 0 < options["stop_at"] <= last["test_accuracy"]


def read(folder: pathlib.Path) -> list[dict]:
    """One row per run below `folder` that has ended. Raises ValueError if there is none, for two that the columns do
    not tell apart, and for one of several sizes."""
    rows: dict[tuple, dict] = {}
    going = []
    for file in sorted(folder.glob("*/metrics.jsonl")):
        config = json.loads((file.parent / "config.json").read_text())
        if config["data"]["kind"] != "recall":
            continue
        task, scored = config["data"]["task"], [row for row in metrics.read_rows(file) if "test_accuracy" in row]
        if not isinstance(task["length"], int) or not isinstance(task["pairs"], int):
            raise ValueError(
                f"--runs={folder}: {file.parent.name} has length={task['length']} and pairs={task['pairs']}, but a line"
                " of the tables is one of each; report runs of one size."
            )
        if not scored or not ended(scored[-1], config["train"]):
            going.append(file.parent.name)
            continue
        last = scored[-1]
        row = {
            "variant": variant(config), "length": task["length"], "pairs": task["pairs"], "seed": config["seed"],
            "steps": last["step"], "accuracy": last["test_accuracy"],
            "longer": last.get(f"test_accuracy/{2 * task['length']}x{task['pairs']}", float("nan")),
            "best": max(row["test_accuracy"] for row in scored),
        }  # fmt: skip
        key = tuple(list(row.values())[:4])
        if key in rows:
            raise ValueError(f"--runs={folder}: two runs are {key}, one of them {file.parent.name}; report them apart.")
        rows[key] = row
    if going:
        print(f"left out, not at their end (--resume): {', '.join(going)}")
    if not rows:
        raise ValueError(f"--runs={folder}: no sub-folder is an ended run of associative recall; train some first.")
    return list(rows.values())


def cell(rows: list[dict], column: str) -> str:
    """Mean and deviation over seeds in %, and how many of them collapsed."""
    values = [100 * row[column] for row in rows if not math.isnan(row[column])]
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    fallen = sum(value < 100 * COLLAPSED for value in values)
    return f"{statistics.mean(values):.1f}{spread} ({fallen}/{len(values)})"


def table(rows: list[dict], column: str) -> str:
    """Lines of one length and number of pairs, a column for each variant."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    lines = [f"| length | pairs | {' | '.join(variants)} |", "| --- " * (2 + len(variants)) + "|"]
    for length, pairs in sorted({(row["length"], row["pairs"]) for row in rows}):
        here = [row for row in rows if (row["length"], row["pairs"]) == (length, pairs)]
        cells = [cell([row for row in here if row["variant"] == name], column) for name in variants]
        lines.append(f"| {length} | {pairs} | {' | '.join(cells)} |")
    return "\n".join(lines)


def panel(rows: list[dict], length: int, column: str, title: str) -> metrics.Panel:
    """Accuracy in % by pairs and variant: every seed, and their mean."""
    here = [row for row in rows if row["length"] == length]
    lines = {}
    for name in dict.fromkeys(row["variant"] for row in here):
        found = {(row["seed"], row["pairs"]): 100 * row[column] for row in here if row["variant"] == name}
        seeds, pairs = sorted({seed for seed, _ in found}), sorted({pairs for _, pairs in found})
        whole = [count for count in pairs if all((seed, count) in found for seed in seeds)]
        lines[name] = whole, np.array([[found[seed, count] for count in whole] for seed in seeds])
    if length == PUBLISHED_LENGTH and column == "accuracy":
        lines |= {f"{name}, published": (list(line), list(line.values())) for name, line in PUBLISHED.items()}
    return metrics.Panel(lines, "key-value pairs", "accuracy, %", title, points=True)


def write(folder: pathlib.Path, out: pathlib.Path, draw: Callable = metrics.plot_lines) -> None:
    """runs.csv, table.md and recall.png in the folder `out`."""
    rows = read(folder)
    order = {name: i for i, name in enumerate(("mamba2", "linear", "linear_one", "mlp_softplus", "mlp_softmax"))}
    rows.sort(key=lambda row: (order.get(row["variant"], len(order)), *list(row.values())[:4]))
    runs.write_runs(out, rows)
    note = "in %, mean ± deviation over seeds (collapsed seeds / seeds; collapsed: below 50 %)"
    text = "\n\n".join(f"Accuracy {what}, {note}.\n\n{table(rows, column)}" for what, column in (
        ("at the trained length when training ended", "accuracy"), ("of rows twice as long", "longer"),
        ("at its best in any evaluation, as the published figures are", "best"),
    ))  # fmt: skip
    (out / "table.md").write_text(text + "\n")
    lengths = sorted({row["length"] for row in rows})
    panels = [panel(rows, length, "accuracy", f"{length} tokens") for length in lengths]
    panels += [panel(rows, length, "longer", f"trained on {length}, scored on {2 * length}") for length in lengths]
    draw(panels, out / "recall.png")
    print(f"{text}\n\nwritten: {out}/table.md, runs.csv, recall.png")
