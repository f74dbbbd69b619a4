r"""The zero-shot tasks of the papers: where their questions are, how each is put, and what is counted.

Prompts and scores are those of lm-evaluation-harness 0.4: no examples, a blank between prompt and answer; acc takes the
answer with the largest log-likelihood, acc_norm the largest per character of the answer, acc_bytes per byte of it (the
first of equals). tests/test_tasks.py compares every prompt with that library's where it is installed.

    questions = read(TASKS["piqa"], "evals")     # a folder of JSON lines with the fields of the hub, or "" for the hub

Local files are named as in `files`: TASK_SPLIT.jsonl, also packed as .gz, .xz or .zst; the first that is there is read.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from efla_jax.data import cloze, readers
from efla_jax.scoring import Score, Scorer

ENDINGS = tuple(f".jsonl{packed}" for packed in readers.PACKED)


class Question(NamedTuple):
    """(context, continuation) pairs, of which number `right` is the answer; choices: what the scores are divided by the
    length of. Of a whole text the only pair is ("", text), and `size` is its (words, bytes)."""

    pairs: tuple[tuple[str, str], ...]
    right: int = 0
    choices: tuple[str, ...] = ()
    size: tuple[int, int] = (0, 0)


class Task(NamedTuple):
    """One benchmark. form: a row of its data as a Question; kind: "choice", "word" or "text"; files: its local names,
    best first, split behind the last "_"; hub: data set, configuration and split; headline: the score papers give."""

    form: Callable[[Mapping[str, Any]], Question]
    files: tuple[str, ...]
    hub: tuple[str, str, str]
    headline: str = "acc"
    kind: str = "choice"


def choose(context: str, answers: Sequence[str], right: int) -> Question:
    """One context, several answers behind a blank."""
    return Question(tuple((context, f" {answer}") for answer in answers), right, tuple(answers))


def lettered(row: Mapping[str, Any]) -> tuple[list[str], int]:
    """(answers, number of the right one) of data whose choices have labels."""
    return row["choices"]["text"], row["choices"]["label"].index(row["answerKey"].strip())


def piqa(row):
    return choose(f"Question: {row['goal']}\nAnswer:", (row["sol1"], row["sol2"]), int(row["label"]))


def hellaswag(row):
    def clean(text: str) -> str:  # what its how-to texts carry along: titles, and words in brackets
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return choose(context, [clean(ending) for ending in row["endings"]], int(row["label"]))


def winogrande(row):
    """What follows the gap is scored, after each of the two names in it."""
    before, _, after = row["sentence"].partition("_")
    filled = tuple(before + row[name] for name in ("option1", "option2"))
    return Question(tuple((text, f" {after.strip()}") for text in filled), int(row["answer"]) - 1, filled)


def arc(row):
    return choose(f"Question: {row['question']}\nAnswer:", *lettered(row))


def openbookqa(row):
    return choose(row["question_stem"], *lettered(row))


def boolq(row):
    right = int(row["label"] if "label" in row else row["answer"])
    return choose(f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", ("no", "yes"), right)


def sciq(row):
    answers = [row[name] for name in ("distractor1", "distractor2", "distractor3", "correct_answer")]
    return choose(f"{row['support'].lstrip()}\nQuestion: {row['question']}\nAnswer:", answers, 3)


def social_iqa(row):
    answers = [row[f"answer{letter}"] for letter in "ABC"]
    return choose(f"Q: {row['context']} {row['question']}\nA:", answers, int(row["label"]) - 1)


def commonsense_qa(row):
    answers, right = lettered(row)
    listed = "".join(f"\n{letter}. {answer}" for letter, answer in zip("ABCDE", answers, strict=True))
    return choose(f"Question: {row['question'].strip()}{listed}\nAnswer:", "ABCDE", right)


def lambada(row):
    context, _, word = row["text"].rpartition(" ")
    return Question(((context, f" {word}"),))


# How WikiText's tokens become text again, in this order: an exact piece of text, or ("pattern", replacement).
SPACED = [*((f" @{mark}@ ", mark) for mark in "-,."), *((f" {mark} ", f"{mark} ") for mark in ":;.!?,")]
BRACKETS = [(rf"{re.escape(a)}\s*([^{re.escape(b)}]*?)\s*{re.escape(b)}", rf"{a}\1{b}") for a, b in
            ("()", "[]", "{}", '""', "''")]  # fmt: skip
HEADINGS = [(" ".join("=" * n), "=" * n) for n in (4, 3, 2)]
REST = [(" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")]


def detokenized(page: str) -> str:
    """A page of WikiText as running text, as lm-evaluation-harness scores it."""
    for old, new in [("s '", "s'"), *SPACED]:
        page = page.replace(old, new)
    for pattern, new in BRACKETS:
        page = re.sub(pattern, new, page)
    for old, new in [*HEADINGS, *REST]:
        page = page.replace(old, new)
    return page


def wikitext(row):
    """The text is scored as running text, but words and bytes are those of the page as it was."""
    page = row["page"]
    return Question((("", detokenized(page)),), size=(len(re.split(r"\s+", page)), len(page.encode())))


def whole_text(text: str) -> Question:
    """A text as it is, its words those between white space."""
    return Question((("", text),), size=(len(text.split()), len(text.encode())))


TASKS = {
    "lambada_openai": Task(lambada, ("lambada_openai_test",), ("EleutherAI/lambada_openai", "default", "test"),
                           kind="word"),
    "piqa": Task(piqa, ("piqa_validation",), ("baber/piqa", "", "validation")),
    "hellaswag": Task(hellaswag, ("hellaswag_validation",), ("Rowan/hellaswag", "", "validation"), "acc_norm"),
    "winogrande": Task(winogrande, ("winogrande_xl_validation", "winogrande_validation"),
                       ("allenai/winogrande", "winogrande_xl", "validation")),
    "arc_easy": Task(arc, ("arc_easy_test", "arc_easy_validation"), ("allenai/ai2_arc", "ARC-Easy", "test")),
    "arc_challenge": Task(arc, ("arc_challenge_test", "arc_challenge_validation"),
                          ("allenai/ai2_arc", "ARC-Challenge", "test"), "acc_norm"),
    "boolq": Task(boolq, ("boolq_validation",), ("aps/super_glue", "boolq", "validation")),
    "openbookqa": Task(openbookqa, ("openbookqa_test", "openbookqa_validation"),
                       ("allenai/openbookqa", "main", "test"), "acc_norm"),
    "sciq": Task(sciq, ("sciq_test", "sciq_validation"), ("allenai/sciq", "", "test")),
    "social_iqa": Task(social_iqa, ("social_iqa_validation", "siqa_validation"),
                       ("lighteval/siqa", "", "validation")),
    "commonsense_qa": Task(commonsense_qa, ("commonsense_qa_validation",), ("tau/commonsense_qa", "", "validation")),
    "wikitext": Task(wikitext, ("wikitext_test", "wikitext2_raw_test_pages"),
                     ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test"), "word_perplexity", "text"),
}  # fmt: skip
# What a run of `suite` scores without --tasks: the tasks that the linear-attention papers share.
USUAL = ("wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa",
         "boolq", "openbookqa", "sciq")  # fmt: skip


def local_file(task: Task, folder: str) -> Path:
    """The file of a task in a folder, the best split that is there."""
    names = [name + ending for name in task.files for ending in ENDINGS]
    found = next((Path(folder) / name for name in names if (Path(folder) / name).is_file()), None)
    if found is None:
        raise ValueError(f"--data={folder}: none of {', '.join(task.files)} is there as .jsonl, .jsonl.gz, .xz or .zst;"
                         " add it, leave the task out of --tasks, or leave --data out to read the hub.")  # fmt: skip
    return found


def split_of(file: Path) -> str:
    """The split that a local file is of."""
    return "validation" if file.name.partition(".")[0].endswith("validation") else "test"


def read(task: Task, folder: str = "", limit: int = 0) -> tuple[list[Question], str]:
    """(questions, split) of a task out of a folder or, without one, of the hub; limit: the first so many, 0 all."""
    if folder:
        file = local_file(task, folder)
        rows, split = cloze.read_rows(file), split_of(file)
    else:
        name, config, split = task.hub
        datasets = readers.optional("datasets", f"the data set {name} without --data=FOLDER of local files", "eval")
        rows = ((f"{name}, row {number}", row) for number, row in
                enumerate(datasets.load_dataset(name, config or None, split=split)))  # fmt: skip
    questions = []
    for where, row in rows:
        if limit and len(questions) == limit:
            break
        try:
            questions.append(task.form(row))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: no question of this task ({type(error).__name__}: {error}); its fields are"
                             f" {', '.join(row)}.") from error  # fmt: skip
    if not questions:
        raise ValueError(f"--data={folder}: {task.files[0]} holds no question.")
    return questions, split


def mean(values: Sequence[float]) -> tuple[float, float]:
    """(mean, its standard error) of independent values; the error of a single one is NaN."""
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), float(error)


def ratio(tops: Sequence[float], bottoms: Sequence[float]) -> tuple[float, float]:
    """(sum of tops / sum of bottoms, its standard error) over independent pairs, by the delta method."""
    tops, bottoms = np.asarray(tops, float), np.asarray(bottoms, float)
    value, count = tops.sum() / bottoms.sum(), len(tops)
    spread = math.sqrt(((tops - value * bottoms) ** 2).sum() * count / max(1, count - 1)) / bottoms.sum()
    return float(value), spread if count > 1 else math.nan


def choice_scores(question: Question, scores: Sequence[Score]) -> dict[str, float]:
    """acc, acc_norm and acc_bytes of one question, each 0 or 1."""
    nats = np.array([score.logprob for score in scores])
    sizes = {"acc": np.ones(len(nats)), "acc_norm": np.array([len(text) for text in question.choices], float),
             "acc_bytes": np.array([len(text.encode()) for text in question.choices], float)}  # fmt: skip
    # An empty answer would be divided by 0; it is one character long instead.
    return {name: float(np.argmax(nats / np.maximum(size, 1)) == question.right) for name, size in sizes.items()}


def exponential(nats: float, error: float) -> tuple[float, float]:
    """(perplexity, its standard error) of a mean of nats and its own."""
    return (math.exp(nats), math.exp(nats) * error) if nats < 700 else (math.inf, math.nan)  # of 709 it overflows


def with_errors(values: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """{name: value, name_stderr: standard error}."""
    return {key: x for name, pair in values.items() for key, x in zip((name, f"{name}_stderr"), pair, strict=True)}


def perplexities(questions: Sequence[Question], scores: Sequence[Score]) -> dict[str, float]:
    """Per word, byte and token of whole texts; bits per byte. The standard errors are over texts."""
    nats = [-score.logprob for score in scores]
    counts = {"word": [q.size[0] for q in questions], "byte": [q.size[1] for q in questions],
              "token": [score.tokens for score in scores]}  # fmt: skip
    means = {name: ratio(nats, count) for name, count in counts.items()}
    found = {f"{name}_perplexity": exponential(*each) for name, each in means.items()}
    found["bits_per_byte"] = tuple(x / math.log(2) for x in means["byte"])
    return with_errors(found)


def evaluate(task: Task, questions: Sequence[Question], scorer: Scorer) -> tuple[dict[str, float], list[list[Score]]]:
    """(the scores of a task, each with its standard error, and "count"; the score of each pair of each question)."""
    if task.kind == "text":
        whole = scorer.rolling([question.pairs[0][1] for question in questions])
        return {**perplexities(questions, whole), "count": len(questions)}, [[score] for score in whole]
    scores = iter(scorer.loglikelihood([pair for question in questions for pair in question.pairs]))
    each = [[next(scores) for _ in question.pairs] for question in questions]
    if task.kind == "word":
        found = {"perplexity": exponential(*mean([-score.logprob for (score,) in each])),
                 "acc": mean([float(score.greedy) for (score,) in each])}  # fmt: skip
    else:
        right = [choice_scores(question, some) for question, some in zip(questions, each, strict=True)]
        found = {name: mean([one[name] for one in right]) for name in right[0]}
    return {**with_errors(found), "count": len(questions)}, each
