r"""What a trained language model finds in long texts: RULER's needles, recall-intensive questions, LongBench.

    python -m experiments.evaluate ruler --run=runs/lm --haystack=essays.txt.gz --words=wordlists \
        --kinds=single_1,single_2,multikey_1,multiquery --lengths=1024,4096,16384 --count=100

Needles of RULER (efla_jax/data/needle.py), all eight kinds: what greedy decoding says in 128 tokens is searched for the
values, as the benchmark does. --depths=0,25,50,75,100 puts what is asked for there, with --count questions for each;
without, depths are drawn. --strict also asks for the likelihood of the whole answer, which is another pass. Writes
ruler.json, ruler.md, ruler.png (depth over length) and every output in ruler_outputs.jsonl.

    python -m experiments.evaluate cloze --run=runs/lm --task=squad --data=squad.jsonl.gz --lengths=512,1024,2048
    python -m experiments.evaluate cloze --run=runs/lm --task=synthetic_fda --count=200 --lengths=2048

Recall-intensive questions (efla_jax/data/cloze.py); the synthetic ones need no data. --twice tells the document two
times. Writes cloze_TASK.json, .md and _outputs.jsonl.

    python -m experiments.evaluate longbench --run=runs/lm --data=longbench --length=3500 --prompts=dataset2prompt.json

LongBench's English tasks (efla_jax/data/longbench.py), from a folder of TASK.jsonl. Writes longbench.json, .md and
_outputs.jsonl.

    python -m experiments.evaluate plot_positions --tables=a/per_position.csv,b/per_position.csv --labels=a,b \
        --out=positions.png --trained_length=4096

Draws what the command per_position wrote. All but this one keep what they have in NAME.journal.jsonl and go on from
there when they are started again; --limit=20 asks the first questions only. `add_commands` is what experiments.evaluate
calls; `python -m experiments.long_context` knows these commands alone.
"""

import argparse
import csv
import pathlib

import jax
import numpy as np

from efla_jax import metrics
from efla_jax.data import answers, cloze, longbench, needle, synthetic_pages
from experiments import language_runs
from experiments.language_runs import positive
from experiments.result_files import about, markdown, mean_of, opened, write, write_outputs
from experiments.ruler import ruler
from experiments.usage import reason


def questions_of(chosen: argparse.Namespace) -> list[cloze.Cloze]:
    """The questions of --task, from --data or made up."""
    if chosen.task in synthetic_pages.TASKS:
        if chosen.data:
            raise ValueError(f"--data={chosen.data}: {chosen.task} is made up; leave it out, or name a file's task")
        return [synthetic_pages.make(chosen.task, i, chosen.words, chosen.seed) for i in range(chosen.count)]
    if not chosen.data:
        raise ValueError(f"--data: missing; give a file of JSON lines for {chosen.task}, or take a task of"
                         f" {', '.join(synthetic_pages.TASKS)}, which needs none")  # fmt: skip
    found = cloze.read(chosen.task, chosen.data)
    kept = [question for question in found if question.extractive()] if chosen.extractive else found
    if not kept:
        raise ValueError(f"--extractive: none of the {len(found)} documents of --data={chosen.data} holds its answer")
    return kept


def ask_cloze(chosen: argparse.Namespace) -> None:
    """OUT/cloze_TASK.json, .md, _outputs.jsonl."""
    questions = questions_of(chosen)
    questions = questions[: chosen.limit or None]
    name = f"cloze_{chosen.task}{'_twice' if chosen.twice else ''}"
    run, scorer, out = opened(chosen, name)
    rows, records = [], []
    with jax.default_matmul_precision(run.precision):
        for length in chosen.lengths:
            prompts = [one.prompt(run.tokenizer.encode, length, twice=chosen.twice) for one in questions]
            outputs = scorer.generate(prompts, [cloze.STOP], cloze.TOKENS_OF_AN_ANSWER)
            scores = [answers.contains(said, one.answers) for said, one in zip(outputs, questions, strict=True)]
            by_heart = sum(not one.document for one in questions)
            rows.append({"task": name[6:], "length": length, **mean_of(scores), "without_document": by_heart})
            records += [{"length": length, "cue": one.cue, "answers": one.answers, "output": said, "score": score}
                        for one, said, score in zip(questions, outputs, scores, strict=True)]  # fmt: skip
            write(out, name, about(chosen, run, scorer), rows, markdown(rows))
            write_outputs(out, name, records)
    print(f"{markdown(rows)}\n\nwritten: {out / name}.json, .md, _outputs.jsonl")


def longbench_rows(chosen: argparse.Namespace) -> dict[str, list[dict]]:
    """The rows of each task of --tasks, by default of those that are in the folder --data, checked."""
    folder = pathlib.Path(chosen.data).expanduser()
    tasks = chosen.tasks or [task for task in longbench.TASKS if (folder / f"{task}.jsonl").is_file()]
    if not tasks:
        raise ValueError(f"--data={chosen.data}: no TASK.jsonl there; give a folder of LongBench's files, "
                         f"{', '.join(longbench.TASKS)}")  # fmt: skip
    of = {}
    for task in tasks:
        rows = cloze.read_rows(folder / f"{task}.jsonl")[: chosen.limit or None]
        for where, row in rows:
            longbench.checked(task, row, where)
        of[task] = [row for _, row in rows]
    return of


def ask_longbench(chosen: argparse.Namespace) -> None:
    """OUT/longbench.json, .md, _outputs.jsonl."""
    templates = longbench.read_templates(chosen.prompts) if chosen.prompts else {}
    of = longbench_rows(chosen)
    run, scorer, out = opened(chosen, "longbench")
    rows: list[dict] = []
    records: list[dict] = []
    with jax.default_matmul_precision(run.precision):
        for task, asked in of.items():
            prompts = [longbench.shortened(longbench.prompt_of(task, row, templates), run.tokenizer, chosen.length)
                       for row in asked]  # fmt: skip
            known = longbench.TASKS[task]
            outputs = scorer.generate(prompts, ["\n"] if task == "samsum" else [], known.tokens)
            scores = [longbench.score_of(task, said, row) for said, row in zip(outputs, asked, strict=True)]
            by_length = {name: [score for score, row in zip(scores, asked, strict=True)
                                if longbench.length_of(row.get("length", 0)) == name]
                         for name, *_ in longbench.LENGTHS}  # fmt: skip
            means = {name: float(np.mean(some)) if some else float("nan") for name, some in by_length.items()}
            wording = "LongBench's" if task in templates else "ours"
            rows.append({"task": task, "measure": known.measure, **mean_of(scores), "prompts": wording, **means})
            records += [{"task": task, "answers": row["answers"], "output": said, "score": score}
                        for row, said, score in zip(asked, outputs, scores, strict=True)]  # fmt: skip
            write(out, "longbench", about(chosen, run, scorer), rows, markdown(rows))
            write_outputs(out, "longbench", records)
    print(f"{markdown(rows)}\n\nmean of the tasks: {np.mean([row['score'] for row in rows]):.4f}\n"
          f"written: {out / 'longbench.json'}, longbench.md, longbench_outputs.jsonl")  # fmt: skip


def plot_positions(chosen: argparse.Namespace) -> None:
    """Draw tables of per_position, loss over position, into --out."""
    labels = chosen.labels or [pathlib.Path(path).parent.name or path for path in chosen.tables]
    if len(set(labels)) != len(chosen.tables):
        raise ValueError(f"--labels={','.join(labels)}: {len(chosen.tables)} different ones are wanted, one a table")
    lines = {}
    for label, path in zip(labels, chosen.tables, strict=True):
        try:
            with open(path, newline="") as file:
                rows = list(csv.DictReader(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--tables={path}: cannot be read ({reason(error)}).") from None
        if not rows or not {"position_end", "loss"} <= rows[0].keys():
            raise ValueError(f"--tables={path}: no columns position_end and loss; give what per_position wrote")
        if chosen.trained_length:
            inside = [row for row in rows if int(row["position_end"]) <= chosen.trained_length]
            beyond = [row for row in rows if int(row["position_end"]) > chosen.trained_length]
            print(f"{label}: {weighted_loss(inside)} nats up to {chosen.trained_length} tokens, {weighted_loss(beyond)}"
                  " beyond")  # fmt: skip
        lines[label] = [float(row["position_end"]) for row in rows], [float(row["loss"]) for row in rows]
    title = f"trained on {chosen.trained_length} tokens" if chosen.trained_length else ""
    panel = metrics.Panel(lines, "position, tokens", "nats per token", title)
    print(f"written: {metrics.plot_lines([panel], chosen.out)}")


def weighted_loss(rows: list[dict[str, str]]) -> str:
    """The mean loss of rows of per_position, each as often as it has targets."""
    counts = [float(row.get("count", 1)) for row in rows]
    return f"{np.average([float(row['loss']) for row in rows], weights=counts):.4f}" if rows else "no"


def words_of(*known: str):
    """A type of options: known words with commas between them."""
    def parse(word: str) -> list[str]:
        parts = word.split(",")
        unknown = [part for part in parts if known and part not in known]
        if unknown or not all(parts):
            raise argparse.ArgumentTypeError(f"{word!r} must be of {', '.join(known)}, with commas between them")
        return parts

    return parse


def depths(word: str) -> list[int | str]:
    """Percentages with commas between them, or "drawn"."""
    if word == needle.DRAWN:
        return [word]
    if not all(part.isdecimal() and int(part) <= 100 for part in word.split(",")):
        raise argparse.ArgumentTypeError(f"{word!r} must be whole numbers up to 100 with commas between them, or drawn")
    return [int(part) for part in word.split(",")]


def several(word: str) -> list[int]:
    """Whole numbers from 0 on, with commas between them."""
    if not all(part.isdecimal() for part in word.split(",")):
        raise argparse.ArgumentTypeError(f"{word!r} is not whole numbers with commas between them")
    return [int(part) for part in word.split(",")]


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Add ruler, cloze, longbench and plot_positions; each sets `command` to what it runs."""
    def asking(name: str, text: str, command) -> argparse.ArgumentParser:
        # Parents of its own, as a default changes in all parsers that share an option: a long text is read whole here,
        # not the last window of it.
        parents = [language_runs.run_arguments(), language_runs.scoring_arguments()]
        one = commands.add_parser(name, parents=parents, allow_abbrev=False, help=text)
        one.set_defaults(command=command, max_length=0)
        return one

    one = asking("ruler", "needles in a haystack, as RULER asks for them", ruler)
    one.add_argument("--kinds", type=words_of(*needle.KINDS), default=list(needle.KINDS), help="all eight by default")
    one.add_argument("--haystack", default="", help="text that needles are hidden in, for kinds that want one")
    one.add_argument("--lengths", type=several, default=[1024, 2048, 4096, 8192], help="tokens, those to answer in too")
    one.add_argument("--depths", type=depths, default=[needle.DRAWN], help="percent of the haystack; drawn by default")
    one.add_argument("--count", type=positive, default=100, help="questions of each kind, length and depth")
    one.add_argument("--tokens", type=positive, default=needle.ROOM, help="that may be said")
    one.add_argument("--seed", type=int, default=42, help="of the questions")
    one.add_argument("--words", default="", help="folder of adjectivelist.txt and nounlist.txt; a short list without")
    one.add_argument("--strict", action="store_true", help="also whether the whole answer is what is likeliest")

    one = asking("cloze", "recall-intensive questions", ask_cloze)
    one.add_argument("--task", required=True, choices=(*cloze.TASKS, *synthetic_pages.TASKS))
    one.add_argument("--data", default="", help="file of JSON lines; not for what is synthetic")
    one.add_argument("--lengths", type=several, default=[512, 1024, 2048], help="tokens of prompts; 0: uncut")
    one.add_argument("--twice", action="store_true", help="tell the document two times (JRT)")
    one.add_argument("--extractive", action="store_true", help="only questions whose answer stands in the document")
    one.add_argument("--count", type=positive, default=200, help="questions, where they are made up")
    one.add_argument("--words", type=positive, default=1200, help="of a document that is made up")
    one.add_argument("--seed", type=int, default=0, help="of what is made up")

    one = asking("longbench", "LongBench's English tasks", ask_longbench)
    one.add_argument("--data", required=True, help="folder of TASK.jsonl")
    one.add_argument("--tasks", type=words_of(*longbench.TASKS), default=[], help="those that are there by default")
    one.add_argument("--length", type=int, default=0, help="tokens of a prompt, cut in its middle; 0: uncut")
    one.add_argument("--prompts", default="", help="LongBench's dataset2prompt.json; ours without")

    one = commands.add_parser("plot_positions", allow_abbrev=False, help="draw what per_position wrote")
    one.set_defaults(command=plot_positions)
    one.add_argument("--tables", type=words_of(), required=True, help="CSV files, with commas between them")
    one.add_argument("--labels", type=words_of(), default=[], help="their names; of their folders by default")
    one.add_argument("--out", required=True, help="the picture, .png")
    one.add_argument("--trained_length", type=int, default=0, help="tokens of the rows of training")


def main(words: list[str] | None = None) -> None:
    """Run a command line (None: the program's); wrong input, files and a missing extra are one line, exit status 1."""
    whole = argparse.ArgumentParser(allow_abbrev=False, prog="python -m experiments.long_context")
    add_commands(whole.add_subparsers(required=True, metavar="ruler|cloze|longbench|plot_positions"))
    chosen = whole.parse_args(words)
    try:
        chosen.command(chosen)
    except (ValueError, OSError, ImportError, NotImplementedError, FloatingPointError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
