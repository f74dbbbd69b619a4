"""Tables and pictures of a sweep of image classifiers: accuracy under corruption, seeds as mean and range.

    python -m experiments.report --runs=runs/smnist --out=experiments/results/smnist

Runs of one mixer, step and learning rate are one line, over their seeds. Writes accuracy.csv (every run, corruption and
severity), table.md (test accuracy and its mean over the severities of each corruption) and corruption.png (one curve
per line, band from worst to best seed).
"""

import csv
import json
import pathlib
import statistics

from absl import app, flags

from efla_jax import evaluate

RUNS = flags.DEFINE_string("runs", None, "folder whose sub-folders are finished runs", required=True)
OUT = flags.DEFINE_string("out", None, "folder to write to", required=True)
SHOW = flags.DEFINE_list("show", [], "labels to draw; all by default")


def label(config: dict) -> str:
    """Mixer, its step if it is not exact, and learning rate: what the lines of the report differ in."""
    mixer = config["model"]["mixers"][0]
    step = config["model"]["mixer_options"].get(mixer, {}).get("step", "exact")
    return f"{mixer}{'' if step == 'exact' else ' ' + step}, lr {config['optim']['learning_rate']:g}"


def read(folder: pathlib.Path) -> dict[str, dict[int, list[dict]]]:
    """label -> seed -> rows of corruption.csv, for every sub-folder that has one."""
    runs: dict[str, dict[int, list[dict]]] = {}
    for file in sorted(folder.glob("*/corruption.csv")):
        config = json.loads((file.parent / "config.json").read_text())
        seeds = runs.setdefault(label(config), {})
        if config["seed"] in seeds:
            raise ValueError(
                f"--runs={folder}: two runs are {label(config)!r} with seed {config['seed']}, one of them in"
                f" {file.parent.name}: they differ in what the label does not name. Report them from separate folders."
            )
        with open(file, newline="") as rows:
            seeds[config["seed"]] = list(csv.DictReader(rows))
    if not runs:
        raise ValueError(f"--runs={folder}: no sub-folder holds a corruption.csv; train image classifiers there first.")
    return dict(sorted(runs.items()))


def summary(rows: list[dict]) -> dict[str, float]:
    """Clean accuracy, and mean accuracy over the corrupted severities of each family, in %."""
    clean = {"intensity": 1.0}
    out = {}
    for family in dict.fromkeys(row["corruption"] for row in rows):
        chosen = {float(row["severity"]): 100 * float(row["accuracy"]) for row in rows if row["corruption"] == family}
        uncorrupted = clean.get(family, 0.0)
        out.setdefault("clean", chosen[uncorrupted])
        out[family] = statistics.mean(value for severity, value in chosen.items() if severity != uncorrupted)
    return out


def table(runs: dict[str, dict[int, list[dict]]]) -> str:
    """One line per label: mean over seeds, smallest and largest seed in brackets."""
    lines = []
    for name, seeds in runs.items():
        columns = [summary(rows) for rows in seeds.values()]
        cells = []
        for column in columns[0]:
            values = [c[column] for c in columns]
            cells.append(f"{statistics.mean(values):.1f} [{min(values):.1f}, {max(values):.1f}]")
        if not lines:
            lines = [f"| run | seeds | {' | '.join(columns[0])} |", "| --- " * (2 + len(columns[0])) + "|"]
        lines.append(f"| {name} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"stray argument {argv[1]!r}")
    out = pathlib.Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    try:
        runs = read(pathlib.Path(RUNS.value))
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    unknown = [name for name in SHOW.value if name.replace(";", ",") not in runs]
    if unknown:
        raise app.UsageError(f"--show: {unknown[0]!r} is not one of {list(runs)} (write ';' for the comma)")
    evaluate.write_rows(
        [
            {"run": name, "seed": seed, **row}
            for name, seeds in runs.items()
            for seed, rows in seeds.items()
            for row in rows
        ],
        out / "accuracy.csv",
    )
    text = table(runs)
    (out / "table.md").write_text(f"Test accuracy, %: mean over seeds [worst, best].\n\n{text}\n")
    shown = [name.replace(";", ",") for name in SHOW.value] or list(runs)
    evaluate.plot_corruptions({name: list(runs[name].values()) for name in shown}, out / "corruption.png")
    print(f"{text}\n\nwritten: {out}/table.md, accuracy.csv, corruption.png")


if __name__ == "__main__":
    app.run(main)
