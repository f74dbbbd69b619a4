"""Table and picture of a sweep of state tracking: accuracy by length, the trained one and beyond.

A run is one line of runs.csv. Of each seed the rate counts whose accuracy at the trained length is best, as if that
were all there is to choose by: lengths beyond it are not looked at.
"""

import pathlib
import statistics
from collections.abc import Callable

from efla_jax import metrics
from experiments import runs

PLAIN = {"step": "exact", "negative_eigenvalues": False}


def read(folder: pathlib.Path) -> list[dict]:
    """One row per run that has ended, accuracies under their lengths. Raises ValueError for two that the columns do not
    tell apart, and for sweeps of different lengths."""
    rows: dict[tuple, dict] = {}
    for run in runs.ended_runs(folder, "state_tracking"):
        task, last = run.config["data"]["task"], run.scored[-1]
        row = {
            "variant": runs.variant(run.config, PLAIN), "group": task["group"], "trained": task["length"],
            "seed": run.config["seed"], "learning_rate": run.config["optim"]["learning_rate"], "steps": last["step"],
        } | {
            name.split("/")[1]: value for name, value in last.items() if name.startswith("test_accuracy/")
        }  # fmt: skip
        key = tuple(list(row.values())[:5])
        if key in rows:
            raise ValueError(f"--runs={folder}: two runs are {key}, one of them {run.name}; report them apart.")
        rows[key] = row
    found = list(rows.values())
    if len({tuple(row) for row in found}) > 1 or len({row["trained"] for row in found}) > 1:
        raise ValueError(f"--runs={folder}: the runs are of different lengths; report them apart.")
    return found


def lengths_of(row: dict) -> list[str]:
    return sorted((name for name in row if name.isdigit()), key=int)


def best(rows: list[dict]) -> dict[str, list[dict]]:
    """The chosen run of each seed, by variant, and by group where it is not parity."""
    chosen: dict[str, dict[int, dict]] = {}
    for row in rows:
        name = row["variant"].replace("negative_eigenvalues=True", "(beta to 2)")
        seeds = chosen.setdefault(name if row["group"] == "parity" else f"{name}, {row['group']}", {})
        shortest = str(row["trained"])
        if row["seed"] not in seeds or row[shortest] > seeds[row["seed"]][shortest]:
            seeds[row["seed"]] = row
    return {name: [seeds[seed] for seed in sorted(seeds)] for name, seeds in chosen.items()}


def table(rows: list[dict]) -> str:
    """A line per variant and group, a column per length: mean, smallest and largest seed, in %."""
    lengths = lengths_of(rows[0])
    text = [f"| | seeds | {' | '.join(lengths)} |", "| --- " * (2 + len(lengths)) + "|"]
    for name, own in best(rows).items():
        cells = []
        for length in lengths:
            values = [100 * row[length] for row in own]
            cells.append(f"{statistics.mean(values):.1f} [{min(values):.1f}, {max(values):.1f}]")
        text.append(f"| {name} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join(text)


def write(folder: pathlib.Path, out: pathlib.Path, draw: Callable = metrics.plot_lines) -> None:
    """runs.csv, table.md and state_tracking.png in the folder `out`."""
    rows = read(folder)
    runs.write_runs(out, rows)
    rates = ", ".join(f"{rate:g}" for rate in sorted({row["learning_rate"] for row in rows}))
    trained, lengths = rows[0]["trained"], lengths_of(rows[0])
    note = (f"Accuracy over all tokens of held-out rows by their length, in %, trained on {trained} tokens: mean"
            f" [smallest, largest] over seeds, of each the best of rates {rates} at {trained} tokens.")  # fmt: skip
    text = f"{note}\n\n{table(rows)}"
    (out / "table.md").write_text(text + "\n")
    lines = {name: ([int(n) for n in lengths], [[100 * row[n] for n in lengths] for row in own])
             for name, own in best(rows).items()}  # fmt: skip
    panel = metrics.Panel(lines, "tokens", "accuracy, %", f"trained on {trained} tokens", points=True)
    draw([panel], out / "state_tracking.png")
    print(f"{text}\n\nwritten: {out}/table.md, runs.csv, state_tracking.png")
