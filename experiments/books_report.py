"""Language models on books side by side (configs/lm_books.py): what each learned, chose, and found again.

A run's folder needs config.json and metrics.jsonl; per_position.csv, needle.csv and suite.json (`experiments.evaluate`)
are drawn and told where they are.
"""

import collections
import csv
import json
import math
import pathlib
import re
import statistics
from collections.abc import Callable
from typing import NamedTuple

from efla_jax import metrics

LAYER = re.compile(r"softmax_fraction/layer_(\d+)")
POSITIONS = "position_end", "loss", "count"
NEEDLES = "length", "depth", "accuracy", "nats", "nats_without", "count"
OTHER_TEXTS = {  # column of the table -> task of suite.json, score, its factor
    "WikiText ppl": ("wikitext", "word_perplexity", 1),
    "LAMBADA ppl": ("lambada_openai", "perplexity", 1),
    "LAMBADA %": ("lambada_openai", "acc", 100),
}


class Books(NamedTuple):
    """Of one run: its rows of metrics.jsonl, of per_position.csv and of needle.csv (empty without the file), and what
    suite.json has of other texts, by column."""

    metrics: list[dict]
    positions: list[dict]
    needles: list[dict]
    others: dict[str, float]


def read(folder: pathlib.Path) -> dict[str, Books]:
    """name -> Books of every run of text below `folder`. Raises ValueError if there is none, and for a damaged file."""
    runs = {}
    for file in sorted(folder.glob("*/metrics.jsonl")):
        config = json.loads((file.parent / "config.json").read_text())
        if config["data"]["kind"] in ("text", "tokens"):
            tables = (table_of(file.parent / f"{name}.csv", columns) for name, columns in
                      (("per_position", POSITIONS), ("needle", NEEDLES)))  # fmt: skip
            runs[file.parent.name] = Books(metrics.read_rows(file), *tables, others_of(file.parent / "suite.json"))
    if not runs:
        raise ValueError(f"--runs={folder}: no sub-folder is a run of a language model; train some there first.")
    return runs


def table_of(file: pathlib.Path, columns: tuple[str, ...]) -> list[dict]:
    """The rows of a CSV file as numbers; none, and a line that says so, without the file."""
    if not file.exists():
        print(f"{file} is missing: left out (python -m experiments.evaluate {file.stem} --run={file.parent} ...)")
        return []
    with open(file, newline="") as text:
        rows = list(csv.DictReader(text))
    lacking = [name for name in columns if not rows or name not in rows[0]]
    if lacking:
        raise ValueError(f"{file}: no column {lacking[0]!r} with a row in it; evaluate the run again.")
    return [{name: float(row[name]) for name in columns} for row in rows]


def others_of(file: pathlib.Path) -> dict[str, float]:
    """OTHER_TEXTS of a suite.json, those that are in it."""
    if not file.exists():
        return {}
    rows = {row["task"]: row for row in json.loads(file.read_text())["rows"]}
    scores = {column: (rows.get(task, {}).get(score), times) for column, (task, score, times) in OTHER_TEXTS.items()}
    return {column: times * score for column, (score, times) in scores.items() if score is not None}


def curve(rows: list[dict], name: str) -> tuple[list, list]:
    """(steps, values) of a metric where it was written."""
    found = [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
    return [step for step, _ in found], [value for _, value in found]


def fractions(runs: dict[str, Books]) -> dict[str, tuple[list, list]]:
    """A line for every routed layer of every run."""
    routed = {name: sorted({key for row in run.metrics for key in row if LAYER.fullmatch(key)})
              for name, run in runs.items()}  # fmt: skip
    several = sum(map(bool, routed.values())) > 1
    return {
        (f"{name}, " if several else "") + f"layer {int(key[-2:])}": curve(runs[name].metrics, key)
        for name, keys in routed.items() for key in keys
    }  # fmt: skip


def by_length(needles: list[dict], column: str) -> dict[int, float]:
    """The mean of a column over the depths, weighted by questions, for each length."""
    sums, counts = collections.defaultdict(float), collections.defaultdict(float)
    for row in needles:
        sums[int(row["length"])] += row["count"] * row[column]
        counts[int(row["length"])] += row["count"]
    return {length: sums[length] / counts[length] for length in sorted(counts)}


def window_of(positions: list[dict], end: int) -> float:
    """Mean loss over the second half of the positions up to `end`, NaN where that is not known."""
    some = [row for row in positions if end / 2 < row["position_end"] <= end]
    if not some or some[-1]["position_end"] != end:
        return math.nan
    return sum(row["loss"] * row["count"] for row in some) / sum(row["count"] for row in some)


def beside_median(lines: dict[str, tuple[list, list]]) -> dict[str, tuple[list, list]]:
    """Curves less the median of them all, at the steps that all of them have: losses of one recipe are a few hundredths
    apart."""
    found = {name: dict(zip(*line, strict=True)) for name, line in lines.items()}
    steps = sorted(set.intersection(*map(set, found.values())))
    middle = {step: statistics.median(values[step] for values in found.values()) for step in steps}
    return {name: (steps, [values[step] - middle[step] for step in steps]) for name, values in found.items()}


def over_training(runs: dict[str, Books]) -> list[metrics.Panel]:
    """Training and held-out losses, and what routed layers chose: those that some run has."""
    training = {name: (steps, metrics.smooth(values, 0.8)) for name, run in runs.items()
                for steps, values in [curve(run.metrics, "loss")] if steps}  # fmt: skip
    held_out = {name: found for name, run in runs.items() if (found := curve(run.metrics, "valid_loss"))[0]}
    drawn = [metrics.Panel(training, "step", "nats a token", "training loss")] * bool(training)
    if len(held_out) > 2 and (apart := beside_median(held_out))[next(iter(held_out))][0]:
        drawn.append(metrics.Panel(apart, "step", "nats a token above the median model", "held-out loss"))
    elif held_out:
        drawn.append(metrics.Panel(held_out, "step", "nats a token", "held-out loss"))
    chosen = fractions(runs)
    return drawn + [metrics.Panel(chosen, "step", "part of the chunks", "that chose softmax")] * bool(chosen)


def over_length(runs: dict[str, Books]) -> list[metrics.Panel]:
    """Losses by position and answers by length of the prompt: those that some run has."""
    lines = {name: tuple(zip(*((row["position_end"], row["loss"]) for row in run.positions), strict=True))
             for name, run in runs.items() if run.positions}  # fmt: skip
    words = "position", "nats a token", "loss by position, long books"
    drawn = [metrics.Panel(lines, *words, logarithmic=True)] if lines else []
    for title, column, label, scale in (
        ("needle", "accuracy", "exact answers, %", 100), ("needle", "nats", "nats a token of the answer", 1)
    ):  # fmt: skip
        found = {name: by_length(run.needles, column) for name, run in runs.items() if run.needles}
        if any(value for one in found.values() for value in one.values()):  # no answer at all: the table says so
            curves = {name: (list(one), [scale * value for value in one.values()]) for name, one in found.items()}
            drawn.append(metrics.Panel(curves, "tokens of the prompt", label, title))
    return drawn


def table(runs: dict[str, Books]) -> str:
    """A line for each run: held-out loss at its end, softmax fraction, losses by position, needles by length."""
    ends = sorted({int(row["position_end"]) for run in runs.values() for row in run.positions})
    ends = [end for end in ends if end >= 1024 and end & (end - 1) == 0]
    lengths = sorted({int(row["length"]) for run in runs.values() for row in run.needles})
    told = [column for column in OTHER_TEXTS if any(column in run.others for run in runs.values())]
    head = ["model", "step", "held-out nats", "bits a byte", "softmax", *told]
    head += [f"{end // 2} to {end}" for end in ends] + [f"needle {length}" for length in lengths]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for name, run in runs.items():
        last = {key: curve(run.metrics, key)[1][-1:] for key in
                ("valid_loss", "valid_bits_per_byte", "softmax_fraction_mean")}  # fmt: skip
        cells = [name, str(run.metrics[-1]["step"]), *("".join(f"{x:.3f}" for x in values) for values in last.values())]
        cells += [f"{run.others[column]:,.1f}" if column in run.others else "" for column in told]
        losses = (window_of(run.positions, end) for end in ends)
        cells += ["" if math.isnan(loss) else f"{loss:.3f}" for loss in losses]
        right, nats = (by_length(run.needles, column) for column in ("accuracy", "nats"))
        without = by_length(run.needles, "nats_without")
        for length in lengths:
            known = length in right
            cells.append(f"{100 * right[length]:.0f} ({nats[length]:.2f}, {without[length]:.2f})" if known else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(runs: pathlib.Path, out: pathlib.Path, draw: Callable = metrics.plot_lines) -> None:
    """table.md, training.png and length.png in the folder `out`."""
    found = read(runs)
    text = table(found)
    out.mkdir(parents=True, exist_ok=True)
    note = (
        "Nats a token: of the held-out books at the last step, and by position in long ones. Softmax: part of the"
        " chunks that chose it.\nWikiText: perplexity a word of WikiText-2's raw test pages; LAMBADA: of the last word,"
        " and how many are right.\nNeedle at a length of the prompt: exact answers in % (nats a token of the answer,"
        " and without the needle in the prompt)."
    )
    (out / "table.md").write_text(f"{note}\n\n{text}\n")
    written = ["table.md"]
    for name, panels in (("training.png", over_training(found)), ("length.png", over_length(found))):
        if panels:
            draw(panels, out / name)
            written.append(name)
    print(f"{text}\n\nwritten to {out}: {', '.join(written)}")
