"""Recall-intensive prompts: a document, and words that its answer, which stands in the document, would complete.

    questions = read("squad", "squad.jsonl.gz")
    prompt = questions[0].prompt(tokenizer.encode, length=2048)    # the document cut around the answer

    task         prompt                                                     fields of a row
    swde, fda    text. Key:                                                 text, key, value
    squad        text, which breaks off in a sentence                       text, value, question
    drop, nq,    context. question, made a cloze of                         context, question, answers, orig_question
      triviaqa
    all four,    context (line break) Question: .. (line break) Answer:     of SQuAD (context, question, answers), DROP
      published                                                             (passage), NQ-open, TriviaQA (answer)
    squad_cloze  context, then the beginning of the answer's sentence       of SQuAD
                 again, up to the answer

The first three are the prompts of the JRT paper (2407.05483), whose rows are data sets of hazyresearch on the hub; for
swde and fda, which exist nowhere else, `synthetic_pages` makes stand-ins. Rows of NQ-open and TriviaQA as published
have no context: they ask what a model knows by heart. An answer is right where it is part of the output
(`answers.contains`), which ends at a line break or after 48 tokens.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from efla_jax.data import readers
from efla_jax.data.needle import SENTENCE_END, most_that_fits

TOKENS_OF_AN_ANSWER = 48
STOP = "\n"
LEAST_WORDS = 4  # of a sentence before its answer, for squad_cloze: fewer say nothing about what is wanted
MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")  # of TriviaQA's documents
PAIRS, TEXTS, QUESTIONS = ("swde", "fda"), ("squad",), ("drop", "nq", "triviaqa")
TASKS = (*PAIRS, *TEXTS, "squad_cloze", *QUESTIONS)


class Cloze(NamedTuple):
    """A document ("": none), the words at the end that want the answer, and the answers, each of one span or more.

    joint stands between document and cue; intro is what the prompt begins with where the document is told twice."""

    document: str
    cue: str
    answers: tuple[tuple[str, ...], ...]
    joint: str = " "
    intro: str = ""

    def prompt(self, encode: Callable[[str], Sequence[int]], length: int = 0, *, twice: bool = False) -> str:
        """The prompt, of at most `length` tokens (0: any number).

        Where it is longer, the document is cut at both ends, to the words around the first place where an answer
        stands, or to its last words if there is none. twice: the intro, the document two times, the cue. Raises
        ValueError where not even the cue has room."""
        words = self.document.split(" ")
        place = self.place()

        def told(count: int) -> str:
            if not count:
                return self.cue
            first = min(max(0, place - count // 2), len(words) - count)
            document = " ".join(words[first : first + count])
            shown = f"{self.intro} {document}\n{document}".strip() if twice else document
            return f"{shown}{self.joint}{self.cue}"

        def size(count: int) -> int:
            return len(encode(told(count)))

        count = len(words) if self.document else 0
        if not length:
            return told(count)
        if size(0) > length:
            raise ValueError(f"length={length} has no room for the {size(0)} tokens of {self.cue!r}; give a longer one")
        whole = size(count)
        if count and whole > length:
            each = (whole - size(0)) / count
            count = most_that_fits(size, length, count, int((length - size(0)) / each), each)
        return told(count)

    def place(self) -> int:
        """The number of the document's word where an answer stands first; that of its last word if none does."""
        low = self.document.lower()
        found = [low.find(spans[0].lower()) for spans in self.answers]
        first = min((at for at in found if at >= 0), default=-1)
        return self.document.count(" ", 0, first) if first >= 0 else self.document.count(" ")

    def extractive(self) -> bool:
        """Whether all of an answer stands in the document."""
        low = self.document.lower()
        return any(all(span.lower() in low for span in spans) for spans in self.answers)


def read(task: str, path: str | Path) -> list[Cloze]:
    """The questions of a file of JSON lines (plain, .gz, .xz, .zst); for squad_cloze those that it can be made of.

    Raises ValueError for an unknown task, naming file and line for a row without the fields, and if nothing is left."""
    if task not in TASKS:
        raise ValueError(f"task={task!r} must be one of {', '.join(TASKS)}")
    questions = [of_row(task, row, where) for where, row in read_rows(path)]
    kept = [question for question in questions if question is not None]
    if not kept:
        raise ValueError(f"path={str(path)!r} has no question for task={task!r}; give another file")
    return kept


def read_rows(path: str | Path) -> list[tuple[str, dict[str, Any]]]:
    """(where, row) of each line of a JSON-lines file. Raises ValueError for a missing or damaged one."""
    file = Path(path).expanduser()
    if not file.is_file() or ".jsonl" not in file.name:
        raise ValueError(f"path={str(path)!r} is no file of JSON lines; give one whose name ends with .jsonl, or .jsonl"
                         " and .gz, .xz or .zst")  # fmt: skip
    rows = []
    try:
        with file.open("rb") as raw:
            for number, row in readers._jsonl_rows(file, readers._unpack(file, raw)):
                if not isinstance(row, dict):
                    raise ValueError(f"file {str(path)!r}, line {number}: {type(row).__name__} is no JSON object")
                rows.append((f"file {str(path)!r}, line {number}", row))
    except (OSError, EOFError) as error:
        raise ValueError(f"file {str(path)!r} cannot be read ({error}): damaged? fetch it again") from error
    return rows


def of_row(task: str, row: dict[str, Any], where: str) -> Cloze | None:
    """The question of a row; None where squad_cloze finds no beginning of a sentence before the answer."""
    if task in PAIRS:
        return pair(field(row, "text", where), field(row, "key", where), field(row, "value", where))
    if task == "squad" and "text" in row:
        return broken_off(field(row, "text", where), field(row, "value", where), row.get("question", ""))
    context = row.get("context", row.get("passage", ""))
    question, answers = field(row, "question", where), spans(row, where)
    if task == "squad_cloze":
        return before_answer(context, question, answers)
    context = MARKS.sub("", context)
    if "orig_question" in row:
        return rephrased(context, question, row["orig_question"], answers)
    cue = f"Question: {question.strip()}\nAnswer:"
    return Cloze(context.strip(), cue, answers, "\n", question.strip())


def field(row: dict[str, Any], name: str, where: str) -> str:
    """A text of a row that must be there."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: expected a field {name!r} with a text, and found {value!r} among "
                         f"{', '.join(map(repr, row))}; repair the row, or name the task that it is of")  # fmt: skip
    return value


def spans(row: dict[str, Any], where: str) -> tuple[tuple[str, ...], ...]:
    """The answers of a row, each of one span or more: a text, a list of texts, a list of lists, or SQuAD's and
    TriviaQA's objects."""
    found = row.get("answers", row.get("answer", row.get("value")))
    if isinstance(found, dict):
        found = found.get("text") or [found.get("value"), *found.get("aliases", [])]
    listed = [found] if isinstance(found, str) else found or []
    parts = [[one] if isinstance(one, str) else list(one or []) for one in listed]
    answers = dict.fromkeys(tuple(span.strip() for span in one if span.strip()) for one in parts)
    answers.pop((), None)
    if not answers:
        raise ValueError(f"{where}: found no answer in {found!r}; repair or remove the row")
    return tuple(answers)


def without_end(text: str, end: str) -> str:
    """A text that does not end with `end`, upper or lower case, nor white space."""
    text, end = text.strip(), end.strip().lower()
    while end and text.lower().endswith(end):
        text = text[: -len(end)].rstrip()
    return text


def pair(text: str, key: str, value: str) -> Cloze:
    """Of a document that tells a value under a key."""
    cue = f"{key[0].upper()}{key[1:]}:"
    document = f"{without_end(text, f'{key}:').strip('.').strip()}."
    return Cloze(document, cue, ((value.strip(),),), intro=f"Information about {cue[:-1]}.")


def broken_off(text: str, value: str, question: str = "") -> Cloze:
    """Of a text that breaks off where the value would follow: its last sentence is the cue."""
    *rest, cue = SENTENCE_END.split(text.strip())
    return Cloze(" ".join(rest), cue, ((value.strip(),),), intro=question.strip())


def rephrased(context: str, question: str, original: str, answers: tuple[tuple[str, ...], ...]) -> Cloze:
    """Of a context, and a question that was made a cloze of."""
    document = without_end(context, question).strip(".").strip()
    return Cloze(f"{document}." if document else "", question.strip(), answers, intro=original.strip(":").strip())


def before_answer(context: str, question: str, answers: tuple[tuple[str, ...], ...]) -> Cloze | None:
    """Of a context, and the sentence in it that holds an answer, up to there; None without enough of a beginning."""
    context = " ".join(context.split())
    for sentence in SENTENCE_END.split(context):
        starts = sorted(sentence.find(one[0]) for one in answers if one[0] in sentence)
        if starts:
            cue = sentence[: starts[0]].strip()
            right = tuple(one for one in answers if sentence.startswith(one[0], starts[0]))
            enough = len(cue.split()) >= LEAST_WORDS and sentence[starts[0] - 1] == " "
            return Cloze(context, cue, right, intro=question.strip()) if enough else None
    return None
