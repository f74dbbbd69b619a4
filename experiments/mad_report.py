"""Table and picture of a sweep of MAD: each task's accuracy, macro as published and micro, by mixer and schedule.

A run is one line of runs.csv. The published protocol, for every seed: of each setting of a task the best run of all
rates and decays, of a task the mean over its settings, and the mean over tasks. Of a task that was trained for several
numbers of epochs the most are taken, and, as the rate is constant, runs that ended at the goal sooner than any of them.
"""

import pathlib
import statistics
from collections.abc import Callable

from efla_jax import metrics
from experiments import runs

TASKS = ("compression", "fuzzy_recall", "in_context_recall", "memorization", "noisy_recall", "selective_copying")
# EFLA (arXiv 2512.12602), in %: one number a task, then the printed mean; set-up and seeds not stated.
PUBLISHED = {
    "delta_net": (42.7, 22.2, 99.9, 29.9, 99.9, 99.6, 65.7),
    "efla": (43.8, 22.6, 100.0, 32.5, 100.0, 99.8, 66.4),
}
PLAIN = {"step": "exact", "negative_eigenvalues": False}
SCORES = {
    "macro": "Macro accuracy (mean over classes, as published) held out, in %, at the end of training",
    "micro": "Micro accuracy (mean over targets) held out, in %, at the end of training",
    "best": "Macro accuracy in %, the best of any evaluation: chosen by the rows that it is of",
}


def read(folder: pathlib.Path, epochs: int = 0) -> list[dict]:
    """One row per run that has ended; epochs: one that is broken off later than that is taken as a run of so many, if
    its rate is constant. Raises ValueError for two that the columns do not tell apart."""
    rows: dict[tuple, dict] = {}
    found = runs.ended_runs(folder, "mad", runs.cut_at(
        lambda config: epochs * config["data"]["task"]["examples"] // config["data"]["batch_size"]
    ))  # fmt: skip
    varied: dict[str, dict[str, set]] = {}
    for run in found:  # what tells settings of a task apart
        task = run.config["data"]["task"]
        for name, value in task.items():
            varied.setdefault(task["name"], {}).setdefault(name, set()).add(value)
    for run in found:
        task, optim, last = run.config["data"]["task"], run.config["optim"], run.scored[-1]
        settings = [f"{name}={task[name]}" for name in task if len(varied[task["name"]][name]) > 1]
        steps = run.config["train"]["steps"]
        row = {
            "variant": runs.variant(run.config, PLAIN), "schedule": optim["schedule"], "task": task["name"],
            "setting": " ".join(settings), "seed": run.config["seed"], "learning_rate": optim["learning_rate"],
            "weight_decay": optim["weight_decay"],
            "epochs": steps * run.config["data"]["batch_size"] / task["examples"], "ended_at": last["step"] / steps,
            "macro": last["test_macro_accuracy"], "micro": last["test_accuracy"], "best": run.best,
        }  # fmt: skip
        key = tuple(list(row.values())[:8])
        if key in rows:
            raise ValueError(f"--runs={folder}: two runs are {key}, one of them {run.name}; report them apart.")
        rows[key] = row
    return list(rows.values())


def best_runs(rows: list[dict], task: str, score: str) -> list[list[dict]]:
    """Of each seed the best run of every setting; seeds that lack a setting are left out."""
    own = [row for row in rows if row["task"] == task]
    most = max((row["epochs"] for row in own), default=0)
    seeds: dict[int, dict[str, dict]] = {}
    for row in own:
        if row["epochs"] == most or row["ended_at"] < 1:
            best = seeds.setdefault(row["seed"], {})
            best[row["setting"]] = max(best.get(row["setting"], row), row, key=lambda one: one[score])
    most = max(map(len, seeds.values()), default=0)
    return [list(best.values()) for _, best in sorted(seeds.items()) if len(best) == most]


def task_scores(rows: list[dict], task: str, score: str) -> list[float]:
    """Of each seed the mean over settings of the best score of a setting, in %."""
    return [100 * statistics.mean(row[score] for row in seed) for seed in best_runs(rows, task, score)]


def cell(rows: list[dict], task: str, score: str) -> str:
    """Mean and deviation over seeds, of how many, and the epochs, unless all that counts got to the goal before."""
    values = task_scores(rows, task, score)
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    epochs = {row["epochs"] for seed in best_runs(rows, task, score) for row in seed if row["ended_at"] == 1}
    return f"{statistics.mean(values):.1f}{spread} ({len(values)}{''.join(f', {n:g} epochs' for n in epochs)})"


def lines_of(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows by what is one line of the table: mixer and schedule, and the epochs, where they set the rates."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        epochs = "" if row["schedule"] == "constant" else f", {row['epochs']:g} epochs"
        found.setdefault(f"{row['variant']}, {row['schedule']}{epochs}", []).append(row)
    return found


def table(rows: list[dict], score: str) -> str:
    """A line per variant and schedule, and the published ones; the mean is over tasks, if all are there."""
    text = [f"| | {' | '.join(TASKS)} | mean | settings |", "| --- " * (len(TASKS) + 3) + "|"]
    for name, own in lines_of(rows).items():
        values = [task_scores(own, task, score) for task in TASKS]
        mean = f"{statistics.mean(map(statistics.mean, values)):.1f}" if all(values) else ""
        settings = len({(row["task"], row["setting"]) for row in own})
        cells = [cell(own, task, score) for task in TASKS]
        text.append(f"| {name} | {' | '.join(cells)} | {mean} | {settings} |")
    if score == "macro":
        for name, printed in PUBLISHED.items():
            shown = " | ".join(f"{value:.1f}" for value in printed)
            text.append(f"| {name}, published | {shown} | |")
    return "\n".join(text)


def panel(rows: list[dict], score: str) -> metrics.Panel:
    """Every seed's score by task; tasks that a line lacks are not drawn."""
    lines = {}
    for name, own in lines_of(rows).items():
        values = {i: task_scores(own, task, score) for i, task in enumerate(TASKS, 1)}
        seeds = min((len(v) for v in values.values() if v), default=0)
        values = {i: v[:seeds] for i, v in values.items() if v}
        lines[name] = list(values), list(zip(*values.values(), strict=True))
    if score == "macro":
        lines |= {f"{name}, published": (range(1, len(v)), v[:-1]) for name, v in PUBLISHED.items()}
    named = ", ".join(f"{i} {task.replace('_', ' ')}" for i, task in enumerate(TASKS, 1))
    return metrics.Panel(lines, "\n".join((named[: named.index("4") - 2], named[named.index("4") :])), f"{score}, %",
                         points=True)  # fmt: skip


def grids(rows: list[dict]) -> str:
    """Which rates and decays the runs have, task by task unless all are alike."""
    found: dict[str, str] = {}
    for task in TASKS:
        if own := [row for row in rows if row["task"] == task]:
            rates, decays = (", ".join(f"{value:g}" for value in sorted({row[name] for row in own}))
                             for name in ("learning_rate", "weight_decay"))  # fmt: skip
            found[task] = f"rates {rates} and decays {decays}"
    alike = len(set(found.values())) == 1
    return next(iter(found.values())) if alike else "; ".join(f"of {task} {grid}" for task, grid in found.items())


def write(folder: pathlib.Path, out: pathlib.Path, epochs: int = 0, draw: Callable = metrics.plot_lines) -> None:
    """runs.csv, table.md and mad.png in the folder `out`; epochs: see `read`."""
    rows = read(folder, epochs)
    runs.write_runs(out, rows)
    note = ("of each seed the best of all ended runs, mean ± deviation over seeds (how many; after how many epochs, if"
            " not all that counts got to the goal before)")  # fmt: skip
    text = "\n\n".join(f"{what}; {note}.\n\n{table(rows, score)}" for score, what in SCORES.items())
    text += f"\n\nEnded runs: {grids(rows)}. With --first others of a seed that got to the goal have not ended."
    if any(row["epochs"] == epochs for row in rows):
        text += f" Those of {epochs} epochs were broken off later than that."
    (out / "table.md").write_text(text + "\n")
    draw([panel(rows, score) for score in ("macro", "micro")], out / "mad.png")
    print(f"{text}\n\nwritten: {out}/table.md, runs.csv, mad.png")
