r"""The zero-shot suite of the papers, and perplexities, of a trained language model.

    python -m experiments.evaluate suite --run=runs/lm                                  # from the hub
    python -m experiments.evaluate suite --run=runs/lm --data=evals --tasks=piqa,arc_easy --limit=200

Tasks, prompts and scores are those of experiments/tasks.py. Writes suite.json (scores with standard errors and counts,
config, commit), suite.md (one row of the scores that papers give, and their mean) and suite.png; with --samples also
suite_outputs.jsonl, every question with the log-likelihoods of its answers. What is scored is kept in
suite.journal.jsonl as it comes: the same command goes on after an interruption, and another task costs only itself.

    python -m experiments.evaluate perplexity --run=runs/lm --data=wikitext103_test.txt.gz

Perplexity per word, byte and token of texts (.txt, .jsonl, packed), each read as one document; writes perplexity.json
and .md. --max_length=0 reads whole documents from the cache, however long; the training window is the default.
"""

import argparse
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax

from efla_jax.data import readers
from experiments import language_runs, result_files, tasks

COUNTED = ("truncated", "tokens_dropped", "joined")


def names_of(word: str) -> list[str]:
    """Tasks with commas between them."""
    unknown = [name for name in word.split(",") if name not in tasks.TASKS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(tasks.TASKS)}")
    return list(dict.fromkeys(word.split(",")))


def headlines(rows: list[Mapping[str, Any]]) -> dict[str, float]:
    """The columns of the Markdown row: perplexities, accuracies in percent and the mean of those."""
    columns: dict[str, float] = {}
    accuracies = []
    for row in rows:
        name, kind = row["task"], tasks.TASKS[row["task"]].kind
        if kind == "text":
            columns[f"{name} word ppl"] = row["word_perplexity"]
            continue
        if kind == "word":
            columns[f"{name} ppl"] = row["perplexity"]
        headline = tasks.TASKS[name].headline
        accuracies.append(100 * row[headline])
        columns[f"{name} {headline}"] = accuracies[-1]
    return columns | ({"mean": sum(accuracies) / len(accuracies)} if accuracies else {})


def plot(rows: list[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Accuracies in percent with their standard errors, beside what guessing would score."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if tasks.TASKS[row["task"]].kind != "text"]
    if not shown:
        return
    figure = Figure(figsize=(2 + 0.7 * len(shown), 3.6), layout="constrained")
    axes, places = figure.subplots(), range(len(shown))
    scores = [(tasks.TASKS[row["task"]].headline, row) for row in shown]
    errors = [100 * row[f"{name}_stderr"] for name, row in scores]
    axes.bar(places, [100 * row[name] for name, row in scores], color="C0")
    axes.errorbar(places, [100 * row[name] for name, row in scores], [0 if math.isnan(e) else e for e in errors],
                  fmt="none", ecolor="0.2", capsize=3)  # fmt: skip
    axes.hlines([100 * row["chance"] for row in shown], [x - 0.4 for x in places], [x + 0.4 for x in places],
                linestyle="--", color="0.4", label="guessing")  # fmt: skip
    axes.set_xticks(places, [f"{row['task']}\n{name}" for name, row in scores], rotation=45, ha="right", fontsize=8)
    axes.set(ylabel="right, %", ylim=(0, 100))
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def scored(name: str, scorer, questions: list[tasks.Question], split: str) -> tuple[dict, list[dict]]:
    """(row of a task: its scores, what was cut for it, how long it took; a record of each question)."""
    before, started = dict(scorer.counts), time.perf_counter()
    print(f"{name}: {len(questions)} questions, {split}")
    row, each = tasks.evaluate(tasks.TASKS[name], questions, scorer)
    kind = tasks.TASKS[name].kind
    chance = sum(1 / len(question.pairs) for question in questions) / len(questions) if kind == "choice" else 0.0
    cut = {key: scorer.counts[key] - before.get(key, 0) for key in COUNTED}
    records = [{"task": name, "pairs": question.pairs, "right": question.right,
                "logprobs": [score.logprob for score in some], "greedy": [score.greedy for score in some]}
               for question, some in zip(questions, each, strict=True)]  # fmt: skip
    row = {"task": name, "split": split, **row, "chance": chance, **cut, "seconds": time.perf_counter() - started}
    return row, records


def suite(chosen: argparse.Namespace) -> None:
    """OUT/suite.json, .md, .png."""
    if chosen.data:
        for name in chosen.tasks:  # a missing file is said before anything is read or compiled
            tasks.local_file(tasks.TASKS[name], chosen.data)
    else:
        readers.optional("datasets", "the command suite without --data=FOLDER of local files", "eval")
    run, scorer, out = result_files.opened(chosen, "suite")
    rows: list[dict] = []
    records: list[dict] = []
    with jax.default_matmul_precision(run.precision):
        for name in chosen.tasks:
            questions, split = tasks.read(tasks.TASKS[name], chosen.data, chosen.limit)
            row, more = scored(name, scorer, questions, split)
            rows.append(row)
            records += more
            table = result_files.markdown([{"run": run.folder.name, "step": run.step, **headlines(rows)}])
            result_files.write(out, "suite", result_files.about(chosen, run, scorer), rows, table)
            plot(rows, out / "suite.png")
            if chosen.samples:
                result_files.write_outputs(out, "suite", records)
    print(f"{table}\n\nwritten: {out / 'suite'}.json, .md, .png")


def perplexity(chosen: argparse.Namespace) -> None:
    """OUT/perplexity.json, .md."""
    files = readers.list_files(chosen.data)
    run, scorer, out = result_files.opened(chosen, "perplexity")
    records = (record for name, file in files for record in readers.read_file(name, file))
    texts = [record.text.decode(errors="replace") for record, _ in zip(records, range(chosen.limit or 1 << 60),
                                                                      strict=False)]  # fmt: skip
    questions = [tasks.whole_text(text) for text in texts if text]
    if not questions:
        raise ValueError(f"--data={chosen.data}: there is no text in it.")
    with jax.default_matmul_precision(run.precision):
        row, _ = tasks.evaluate(tasks.TASKS["wikitext"], questions, scorer)
    table = result_files.markdown([{"run": run.folder.name, "step": run.step, **row}])
    about = result_files.about(chosen, run, scorer)
    result_files.write(out, "perplexity", about, [{"data": chosen.data, **row}], table)
    print(f"{table}\n\nwritten: {out / 'perplexity'}.json, .md")


def add_commands(commands) -> None:
    """The commands `suite` and `perplexity` of experiments.evaluate."""
    parents = [language_runs.run_arguments(), language_runs.scoring_arguments()]
    one = commands.add_parser("suite", parents=parents, allow_abbrev=False, help="zero-shot tasks of the papers")
    one.set_defaults(command=suite)
    one.add_argument("--data", default="", help="folder of JSON lines, TASK_SPLIT.jsonl; the hub without")
    one.add_argument("--tasks", type=names_of, default=list(tasks.USUAL), help=", ".join(tasks.TASKS))
    one.add_argument("--samples", action="store_true", help="also write every question and its log-likelihoods")
    one = commands.add_parser("perplexity", parents=parents, allow_abbrev=False, help="perplexity of texts")
    one.set_defaults(command=perplexity)
    one.add_argument("--data", required=True, help="file or folder of text: .txt, .jsonl, packed")
