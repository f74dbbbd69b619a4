"""Tables and picture of a sweep of associative recall over mixers, widths, learning rates and seeds.

A run is one line of runs.csv, a held-out size one of sizes.csv. The published protocol: of each mixer and width the
rate with the best mean over its seeds, among those that every seed of it has ended with. The accuracy is that of the
run's end, mean over the held-out sizes.
"""

import csv
import pathlib
import statistics
from collections.abc import Callable

from efla_jax import metrics
from experiments import runs

# Table 6 of Log-Linear Attention (arXiv 2506.04761), in %, for 256 tokens and 4 to 64 pairs, by mixer and width; 99
# stands for "at least 99".
PUBLISHED = {
    ("mamba2", 32): 75.1, ("log_linear_mamba2", 32): 76.5, ("mamba2", 64): 89.6, ("log_linear_mamba2", 64): 92.9,
    ("gated_delta_net", 32): 79.0, ("log_linear_gated_delta_net", 32): 84.4,
    ("gated_delta_net", 64): 99.0, ("log_linear_gated_delta_net", 64): 99.0,
}  # fmt: skip
PLAIN = {"step": "exact", "negative_eigenvalues": False, "level_kind": "linear"}
PREFIX = "test_accuracy/"


def read(folder: pathlib.Path) -> list[dict]:
    """One row per run that has ended, "sizes" its accuracy by held-out size. Raises ValueError for two runs that mixer,
    width, rate, seed and steps do not tell apart, and for runs of different tasks."""
    rows: dict[tuple, dict] = {}
    tasks = {}
    for run in runs.ended_runs(folder, "recall"):
        config, last = run.config, run.scored[-1]
        tasks[str(sorted(config["data"]["task"].items())), config["train"]["steps"]] = run.name
        row = {
            "mixer": runs.variant(config, PLAIN), "width": config["model"]["width"],
            "learning_rate": config["optim"]["learning_rate"], "seed": config["seed"], "ended_at": last["step"],
            "accuracy": last["test_accuracy"], "best": run.best,
            "sizes": {name.removeprefix(PREFIX): value for name, value in last.items() if name.startswith(PREFIX)},
        }  # fmt: skip
        key = tuple(list(row.values())[:4])
        if key in rows:
            raise ValueError(f"--runs={folder}: two runs are {key}, one of them {run.name}; report them apart.")
        rows[key] = row
    if len(tasks) > 1:
        raise ValueError(f"--runs={folder}: {' and '.join(list(tasks.values())[:2])} are runs of different tasks or"
                         " numbers of steps; report them from separate folders.")  # fmt: skip
    return list(rows.values())


def chosen(rows: list[dict]) -> dict[tuple[str, int], list[dict]]:
    """(mixer, width) -> its runs at the best rate, by seed."""
    found: dict[tuple[str, int], dict[float, list[dict]]] = {}
    for row in rows:
        found.setdefault((row["mixer"], row["width"]), {}).setdefault(row["learning_rate"], []).append(row)
    best = {}
    for key, rates in found.items():
        most = max(map(len, rates.values()))
        whole = [one for one in rates.values() if len(one) == most]
        best[key] = max(whole, key=lambda one: statistics.mean(row["accuracy"] for row in one))
    return best


def cell(values: list[float]) -> str:
    """Mean and deviation in %, and of how many."""
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.1f}{spread} ({len(values)})"


def tables(best: dict[tuple[str, int], list[dict]]) -> str:
    """Accuracy by mixer and width beside what is published, and by mixer, width and held-out size."""
    mixers, widths = list(dict.fromkeys(m for m, _ in best)), sorted({width for _, width in best})
    known = [width for width in widths if any((mixer, width) in PUBLISHED for mixer in mixers)]
    head = ["mixer", *map(str, widths), *(f"{width}, published" for width in known)]
    lines = [head, ["---"] * len(head)]
    for mixer in mixers:
        own = [best.get((mixer, width)) for width in widths]
        cells = [cell([row["accuracy"] for row in one]) if one else "" for one in own]
        lines.append([mixer, *cells, *(str(PUBLISHED.get((mixer, width), "")) for width in known)])
    sizes = list(dict.fromkeys(name for one in best.values() for row in one for name in row["sizes"]))
    lines += [[], ["mixer", "width", "rate", *sizes], ["---"] * (3 + len(sizes))]
    for (mixer, width), one in sorted(best.items(), key=lambda item: (mixers.index(item[0][0]), item[0][1])):
        cells = [cell([row["sizes"][name] for row in one]) for name in sizes]
        lines.append([mixer, str(width), f"{one[0]['learning_rate']:g}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" if line else "" for line in lines)


def panels(best: dict[tuple[str, int], list[dict]]) -> list[metrics.Panel]:
    """Accuracy by width, and for each width by held-out size: every seed, and their mean."""
    mixers, widths = list(dict.fromkeys(m for m, _ in best)), sorted({width for _, width in best})
    lines = {}
    for mixer in mixers:
        own = [width for width in widths if (mixer, width) in best]
        seeds = min(len(best[mixer, width]) for width in own)
        lines[mixer] = own, [[100 * best[mixer, width][seed]["accuracy"] for width in own] for seed in range(seeds)]
    found = [metrics.Panel(lines, "width", "accuracy, %", "mean over held-out sizes", points=True)]
    for width in widths:
        lines = {}
        for mixer in mixers:
            rows = best.get((mixer, width), [])
            pairs = {name: int(name.split("x")[-1]) for row in rows for name in row["sizes"]}
            if rows and len(set(pairs.values())) == len(pairs):  # else one number of pairs has several lengths
                lines[mixer] = list(pairs.values()), [[100 * row["sizes"][name] for name in pairs] for row in rows]
        if lines:
            found.append(metrics.Panel(lines, "key-value pairs", "accuracy, %", f"width {width}", points=True))
    return found


def write(folder: pathlib.Path, out: pathlib.Path, draw: Callable = metrics.plot_lines) -> None:
    """runs.csv, sizes.csv, table.md and mqar.png in the folder `out`."""
    rows = read(folder)
    best = chosen(rows)
    columns = [name for name in rows[0] if name != "sizes"]
    runs.write_runs(out, [{name: row[name] for name in columns} for row in rows])
    with open(out / "sizes.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns[:4], "size", "accuracy"])
        writer.writerows([*list(row.values())[:4], *one] for row in rows for one in row["sizes"].items())
    note = "Accuracy in %, mean ± deviation over seeds (how many), at the rate with the best mean."
    text = f"{note}\n\n{tables(best)}"
    (out / "table.md").write_text(text + "\n")
    draw(panels(best), out / "mqar.png")
    print(f"{text}\n\nwritten: {out}/table.md, runs.csv, sizes.csv, mqar.png")
