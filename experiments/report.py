"""Tables and pictures of finished runs. One command per kind of report; the first is meant where none is named. Below
every table stand the commands that made it and its runs, and the hours of the runs.

    python -m experiments.report corruption --runs=runs/smnist --out=experiments/results/smnist

A sweep of image classifiers: accuracy under corruption. Runs of one mixer, step and learning rate are one line, over
their seeds. Writes accuracy.csv (every run, corruption and severity), table.md (test accuracy and its mean over the
severities of each corruption) and corruption.png (one curve per line, band from worst to best seed).

    python -m experiments.report level_weights --checkpoint=runs/first --out=levels.png
    python -m experiments.report level_weights --checkpoint=runs/first/checkpoints/500 --out=levels.png \
        --text="the rule of the state" --layers=0,3 --heads=0,1

The level weights of a run with a log-linear mixer over a sequence, one panel per layer and head; grey where a token
has no such level. The sequence is of the run's held-out data (--split, --batch, --rows), or --text, or --tokens. Beside
the picture levels.npz has the arrays and levels.md the mean over live tokens by layer, head and level. More than 512
tokens are drawn as means over consecutive ones.

    python -m experiments.report recall --runs=runs/recall --out=experiments/results/recall

A sweep of associative recall (configs/adaptive_decay.py), trained length and beyond: runs.csv, table.md, recall.png.

    python -m experiments.report mqar --runs=runs/mqar --out=experiments/results/mqar

A sweep of configs/paper_mqar.py: accuracy by mixer and width at its best rate: runs.csv, sizes.csv, table.md, mqar.png.

    python -m experiments.report copying --runs=runs/copying --out=experiments/results/copying

A sweep of configs/paper_selective_copying.py, by length and kind of level weights: runs.csv, table.md, copying.png.

    python -m experiments.report mad --runs=runs/mad --out=experiments/results/mad
    python -m experiments.report state_tracking --runs=runs/parity --out=experiments/results/parity

    python -m experiments.report stiffness --runs=runs/stiffness --out=experiments/results/stiffness

Sweeps of configs/paper_mad.py, configs/parity.py and configs/stiffness.py: runs.csv, table.md and a picture.

    python -m experiments.report books --runs=runs/books --out=experiments/results/books

Language models side by side (configs/lm_books.py): table.md; training.png, losses and softmax fractions over training;
length.png, what `experiments.evaluate` found over positions and lengths of a prompt.
"""

import csv
import itertools
import json
import pathlib
import statistics
import sys

import jax
import numpy as np
from absl import app, flags

from efla_jax import evaluate, metrics
from efla_jax.train import loop
from experiments import (
    books_report,
    copying_report,
    mad_report,
    mqar_report,
    recall_report,
    spent,
    state_tracking_report,
    stiffness_report,
)
from experiments.runs import recorded, restored
from experiments.usage import run_in_one_line

RUNS = flags.DEFINE_string("runs", None, "folder whose sub-folders are finished runs; all but level_weights")
SHOW = flags.DEFINE_list("show", [], "corruption: labels to draw; all by default")
EPOCHS = flags.DEFINE_integer(
    "epochs", 0, "mad: a run broken off after this many counts as one of so many; 0: no", lower_bound=0
)
STEPS = flags.DEFINE_integer(
    "steps", 0, "copying: a run broken off after this many counts as one of so many; 0: no", lower_bound=0
)
OUT = flags.DEFINE_string("out", None, "folder to write to, or for level_weights a .png")
CHECKPOINT = flags.DEFINE_string("checkpoint", None, "level_weights: a run's folder, or that of one of its steps")
DATA = flags.DEFINE_string("data", "", "level_weights: the run's data, if no longer at its config.data.path")
SPLIT = flags.DEFINE_string("split", "", "level_weights: split of the data; by default the one that is held out")
BATCH = flags.DEFINE_integer("batch", 0, "level_weights: which held-out batch", lower_bound=0)
ROWS = flags.DEFINE_list("rows", ["0"], "level_weights: rows of that batch")
TEXT = flags.DEFINE_string("text", None, "level_weights: text in place of held-out rows, for models of bytes")
TOKENS = flags.DEFINE_list("tokens", None, "level_weights: token ids in place of held-out rows")
LAYERS = flags.DEFINE_list("layers", [], "level_weights: layers to draw, from 0; all by default")
HEAD_LIST = flags.DEFINE_list("heads", [], "level_weights: heads to draw, from 0; all by default")
MOST_PANELS, MOST_COLUMNS, MOST_NAMES = 64, 512, 48


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


def corruption() -> None:
    """accuracy.csv, table.md and corruption.png of the runs below --runs."""
    out = pathlib.Path(OUT.value)
    runs = read(pathlib.Path(RUNS.value))
    unknown = [name for name in SHOW.value if name.replace(";", ",") not in runs]
    if unknown:
        raise ValueError(f"--show: {unknown[0]!r} is not one of {list(runs)} (write ';' for the comma)")
    out.mkdir(parents=True, exist_ok=True)
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


def numbers(flag: flags.FlagHolder, count: int) -> list[int]:
    """The whole numbers below `count` of a list flag."""
    if not all(word.strip().isdecimal() and int(word) < count for word in flag.value):
        raise ValueError(f"--{flag.name}={','.join(flag.value)}: give whole numbers from 0 to {count - 1}.")
    return [int(word) for word in flag.value]


def sequences(dataset) -> dict[str, np.ndarray]:
    """The batch whose level weights are drawn: that of --text, of --tokens, or rows of held-out data."""
    given = TEXT.value is not None or TOKENS.value is not None
    for flag in (SPLIT, BATCH, ROWS):
        if flag.present and given:
            raise ValueError(
                f"--{flag.name}: of held-out data, but --text or --tokens takes its place; give one of them."
            )
    if not ROWS.value:
        raise ValueError("--rows: empty; give at least one row.")
    if not given:
        batches = dataset.eval_batches(SPLIT.value or loop.HELD_OUT[dataset.kind])
        batch = next(itertools.islice(batches, BATCH.value, None), None)
        if batch is None:
            raise ValueError(f"--batch={BATCH.value}: the held-out data has fewer batches.")
        return {name: x[numbers(ROWS, len(x))] for name, x in batch.items()}
    if dataset.kind == "images":
        raise ValueError("--text, --tokens: the run is one of images; choose some by --batch and --rows.")
    if TEXT.value is not None and dataset.kind != "text":
        raise ValueError(f"--text: the run's data is of kind {dataset.kind!r}, not bytes; give --tokens, its ids.")
    tokens = list(TEXT.value.encode()) if TEXT.value is not None else numbers(TOKENS, dataset.vocab_size)
    if not tokens:
        raise ValueError("--text, --tokens: empty; give at least one token.")
    return {"tokens": np.array([tokens], np.int32), "segment_ids": np.ones((1, len(tokens)), np.int32)}


def names_of(row: int, batch: dict[str, np.ndarray], kind: str) -> list[str]:
    """What stands below the columns of a row of few tokens: characters of text, ids of other tokens."""
    if "tokens" not in batch or batch["tokens"].shape[1] > MOST_NAMES:
        return []
    tokens = batch["tokens"][row].tolist()
    return [chr(t) if 32 < t < 127 else "·" for t in tokens] if kind == "text" else [str(t) for t in tokens]


def means(values: np.ndarray, live: np.ndarray) -> np.ndarray:
    """Mean of values [..., T, L] over the live tokens, NaN where none is."""
    count = live.sum(axis=-2)
    return np.where(count > 0, np.where(live, values, 0).sum(axis=-2) / np.maximum(count, 1), np.nan)


def drawn(values: np.ndarray, live: np.ndarray, title: str, names: list[str]) -> metrics.Map:
    """The panel of one layer, row and head; a step of 2^n tokens, so that each level has its share of every column."""
    step = 1 << max(0, (-(-len(values) // MOST_COLUMNS) - 1).bit_length())
    fill = ((0, -len(values) % step), (0, 0))
    values, live = (np.pad(x, fill).reshape(-1, step, values.shape[1]) for x in (values, live))
    return metrics.Map(means(values, live), title, names, step)


def level_weights() -> None:
    """OUT.png, OUT.npz and OUT.md of the run --checkpoint."""
    out = pathlib.Path(OUT.value)
    if out.suffix != ".png":
        raise ValueError(f"--out={out}: name a picture to write, such as levels.png.")
    config, dataset, model, params = restored(pathlib.Path(CHECKPOINT.value), "checkpoint", DATA.value)
    batch = sequences(dataset)
    with jax.default_matmul_precision(config["train"]["matmul_precision"]):  # as it was trained
        found = evaluate.level_weights(model, params, batch)
    unknown = [word for word in LAYERS.value if word.strip() not in map(str, found)]
    if unknown:
        raise ValueError(f"--layers: {unknown[0]!r} is not one of the log-linear layers {list(found)}.")
    found = {int(word): found[int(word)] for word in LAYERS.value} or found
    rows, time, heads, _ = next(iter(found.values())).shape
    if any(weights.shape[2] != heads for weights in found.values()):
        raise ValueError(
            f"--layers: {list(found)} have different numbers of heads; draw those of one number at a time."
        )
    chosen = numbers(HEAD_LIST, heads) or list(range(heads))
    if len(found) * rows * len(chosen) > MOST_PANELS:
        raise ValueError(
            f"{len(found)} layers, {rows} rows and {len(chosen)} heads would be more than {MOST_PANELS} panels: choose"
            " some by --layers, --rows and --heads."
        )
    ids = batch.get("segment_ids", np.ones((rows, time), np.int32))
    live = {layer: evaluate.live_levels(ids, weights.shape[3]) for layer, weights in found.items()}
    maps, lines = [], []
    for (layer, weights), row in itertools.product(found.items(), range(rows)):
        here, names = live[layer][row], names_of(row, batch, dataset.kind)
        titles = [f"layer {layer}, head {head}" + (f", row {ROWS.value[row]}" if rows > 1 else "") for head in chosen]
        maps.append([drawn(weights[row, :, head], here, t, names) for head, t in zip(chosen, titles, strict=True)])
    for layer, weights in found.items():
        average = means(weights.transpose(2, 0, 1, 3).reshape(heads, -1, weights.shape[3]),
                        live[layer].reshape(-1, weights.shape[3]))  # fmt: skip
        for head in range(heads):
            cells = ("" if np.isnan(x) else f"{x:.3f}" for x in average[head])
            lines.append(f"| {layer} | {head} | {' | '.join(cells)} |")
    write(out, maps, lines, found, live, batch)


def write(out, maps, lines, found, live, batch) -> None:
    """The three files of `level_weights`."""
    step = maps[0][0].step
    metrics.plot_maps(
        maps, out, x_label="token" if step == 1 else f"token (means of {step})", y_label="level",
        scale_label="level weight",
    )  # fmt: skip
    arrays = {f"layer_{layer}": weights for layer, weights in found.items()}
    arrays |= {f"live_{layer}": mask for layer, mask in live.items()}
    np.savez_compressed(out.with_suffix(".npz"), **arrays, **{name: batch[name] for name in batch if name != "pixels"})
    count = max(weights.shape[3] for weights in found.values())
    head = f"| layer | head | {' | '.join(map(str, range(count)))} |\n{'| --- ' * (2 + count)}|"
    text = "\n".join([head, *lines])
    out.with_suffix(".md").write_text(f"Level weights, mean over the tokens that have the level.\n\n{text}\n")
    print(f"{text}\n\nwritten: {out}, .npz, .md")


def recall() -> None:
    recall_report.write(pathlib.Path(RUNS.value), pathlib.Path(OUT.value))


def mqar() -> None:
    mqar_report.write(pathlib.Path(RUNS.value), pathlib.Path(OUT.value))


def copying() -> None:
    copying_report.write(pathlib.Path(RUNS.value), pathlib.Path(OUT.value), STEPS.value)


def mad() -> None:
    mad_report.write(pathlib.Path(RUNS.value), pathlib.Path(OUT.value), EPOCHS.value)


def state_tracking() -> None:
    state_tracking_report.write(pathlib.Path(RUNS.value), pathlib.Path(OUT.value))


def stiffness() -> None:
    stiffness_report.write(pathlib.Path(RUNS.value), pathlib.Path(OUT.value))


def books() -> None:
    books_report.write(pathlib.Path(RUNS.value), pathlib.Path(OUT.value))


# Of each command: what it runs, the flags that it needs, and those that it takes too.
COMMANDS = {
    "corruption": (corruption, (RUNS, OUT), (SHOW,)),
    "recall": (recall, (RUNS, OUT), ()),
    "books": (books, (RUNS, OUT), ()),
    "mqar": (mqar, (RUNS, OUT), ()),
    "copying": (copying, (RUNS, OUT), (STEPS,)),
    "mad": (mad, (RUNS, OUT), (EPOCHS,)),
    "state_tracking": (state_tracking, (RUNS, OUT), ()),
    "stiffness": (stiffness, (RUNS, OUT), ()),
    "level_weights": (level_weights, (CHECKPOINT, OUT), (DATA, SPLIT, BATCH, ROWS, TEXT, TOKENS, LAYERS, HEAD_LIST)),
}


def main(argv: list[str]) -> None:
    name, *stray = argv[1:] or ["corruption"]
    if name not in COMMANDS:
        raise app.UsageError(f"{name!r} is not a report; the first word is one of {tuple(COMMANDS)}")
    if stray:
        raise app.UsageError(f"stray argument {stray[0]!r}: flags are written --name=value")
    run, needed, taken = COMMANDS[name]
    for flag in needed:
        if not flag.value:
            raise app.UsageError(f"--{flag.name} is missing: {name} needs it")
    own = {flag.name for flag in (*needed, *taken)}
    for _, *others in COMMANDS.values():
        for flag in itertools.chain(*others):
            if flag.present and flag.name not in own:
                raise app.UsageError(f"--{flag.name} is no flag of the report {name}")
    try:
        run()
        out, line = pathlib.Path(OUT.value), spent.command_line("report", sys.argv[1:])
        if name == "level_weights":
            spent.append(out.with_suffix(".md"), line, recorded(pathlib.Path(CHECKPOINT.value), "checkpoint")[0])
        else:
            spent.append(out / "table.md", line, pathlib.Path(RUNS.value))
    except (ValueError, OSError) as error:
        raise app.UsageError(str(error)) from None


if __name__ == "__main__":
    run_in_one_line(main)
