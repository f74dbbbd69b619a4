"""LongBench's English tasks (2308.14508): prompts, how they are cut, and the measure of each, for rows of its files.

    rows = cloze.read_rows("longbench/hotpotqa.jsonl")     # fields input, context, answers, all_classes, length
    prompt = shortened(prompt_of("hotpotqa", rows[0][1]), tokenizer, length=3500)
    score = score_of("hotpotqa", output, rows[0][1])

The data are the benchmark's to give: one file of JSON lines for each task. So is its wording: the templates here ask
for the same in words of ours, which moves scores a little; `read_templates` takes the benchmark's own
dataset2prompt.json, and scores that are set beside published ones need it. Measures, tokens to say and the cut are the
benchmark's.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from efla_jax.data import answers
from efla_jax.data.tokenizer import Tokenizer

BRIEF = "Reply with the answer alone, in as few words as you can."
NEXT_LINE = "Here is the beginning of a program. Write the line that comes next.\n"


def framed(opening: str, body: str, closing: str, cue: str) -> str:
    """A template: what is to be done, the text, the same again for those who forget, and what the answer follows."""
    return f"{opening}\n\n{body}\n\n{closing}\n\n{cue}"


PASSAGES = framed(
    f"Several passages follow, and then a question about them. {BRIEF}", "Passages:\n{context}",
    f"Use the passages above. {BRIEF}", "Question: {input}\nAnswer:",
)  # fmt: skip
STORY = framed(
    f"A story follows, and then a question about it. {BRIEF}", "Story: {context}",
    f"Use the story above. {BRIEF}", "Question: {input}\n\nAnswer:",
)  # fmt: skip
ARTICLE = framed(
    f"A scientific article follows, and then a question about it. {BRIEF} Say \"yes\" or \"no\" where that is what is"
    " asked, and \"unanswerable\" where the article does not tell.", "Article: {context}",
    f"Use the article above. {BRIEF}", "Question: {input}\n\nAnswer:",
)  # fmt: skip
TEXT = framed(
    f"A text follows, and then a question about it. {BRIEF}", "{context}",
    f"Use the text above. {BRIEF}", "Question: {input}\nAnswer:",
)  # fmt: skip
REPORT = framed(
    "Here is a report of a government agency. Summarise it on one page.", "Report:\n{context}",
    "Summarise the report above on one page.", "Summary:",
)  # fmt: skip
MEETING = framed(
    "Here is what was said in a meeting, and then a request about it. Reply in one sentence or a few.",
    "Transcript:\n{context}", "Reply in one sentence or a few, from the transcript above.", "Query: {input}\nAnswer:",
)  # fmt: skip
NEWS = framed(
    "Here are several reports of the news. Summarise them together on one page.", "News:\n{context}",
    "Summarise all of the reports above on one page.", "Summary:",
)  # fmt: skip
COUNT = framed(
    "Paragraphs of an encyclopedia follow, some of them more than once. Count how many different ones there are.",
    "{context}", "How many different paragraphs stand above? Reply with the number alone.", "The number is: ",
)  # fmt: skip
RETRIEVAL = framed(
    "Here are numbered paragraphs of an encyclopedia, and then a summary of one of them. Find out of which.",
    "{context}\n\nThis is the summary.\n\n{input}",
    "Reply with its paragraph alone, in the form \"Paragraph 1\".", "The paragraph is: ",
)  # fmt: skip
TYPES = "Say of which type the last question is. Questions with their types come first, as examples."
TRIVIA = f"Answer the last question from the passage in front of it. {BRIEF} Examples come first."
DIALOGUE = "Summarise the last dialogue in a few short sentences. Examples come first."


class Task(NamedTuple):
    """What is asked, with {context} and {input}, how many tokens may be said, and how it is measured."""

    template: str
    tokens: int
    measure: str
    only_first_line: bool = False


TASKS = {
    "narrativeqa": Task(STORY, 128, "f1"),
    "qasper": Task(ARTICLE, 128, "f1"),
    "multifieldqa_en": Task(TEXT, 64, "f1"),
    "hotpotqa": Task(PASSAGES, 32, "f1"),
    "2wikimqa": Task(PASSAGES, 32, "f1"),
    "musique": Task(PASSAGES, 32, "f1"),
    "gov_report": Task(REPORT, 512, "rouge_l"),
    "qmsum": Task(MEETING, 512, "rouge_l"),
    "multi_news": Task(NEWS, 512, "rouge_l"),
    "trec": Task(f"{TYPES}\n\n{{context}}\n{{input}}", 64, "classification", True),
    "triviaqa": Task(f"{TRIVIA}\n\n{{context}}\n\n{{input}}", 32, "f1", True),
    "samsum": Task(f"{DIALOGUE}\n\n{{context}}\n\n{{input}}", 128, "rouge_l", True),
    "passage_count": Task(COUNT, 32, "number"),
    "passage_retrieval_en": Task(RETRIEVAL, 32, "number"),
    "lcc": Task(f"{NEXT_LINE}{{context}}Next line of code:\n", 64, "code_similarity"),
    "repobench-p": Task(f"{NEXT_LINE}{{context}}{{input}}Next line of code:\n", 64, "code_similarity"),
}
LENGTHS = (("0-4k", 0, 4000), ("4-8k", 4000, 8000), ("8k+", 8000, 1 << 62))  # words, of LongBench-E


def named(task: str) -> Task:
    """The task of a name. Raises ValueError for another name."""
    if task not in TASKS:
        raise ValueError(f"task={task!r} must be one of {', '.join(TASKS)}")
    return TASKS[task]


def read_templates(path: str | Path) -> dict[str, str]:
    """The templates of LongBench's dataset2prompt.json: those of the tasks here. Raises ValueError for another file."""
    wanted = f"prompts={str(path)!r} must be LongBench's dataset2prompt.json"
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{wanted}, and cannot be read ({error})") from error
    templates = {task: text for task, text in found.items() if task in TASKS} if isinstance(found, dict) else {}
    if not templates or not all(isinstance(text, str) and "{context}" in text for text in templates.values()):
        raise ValueError(f"{wanted}, and has no templates with {{context}} for its tasks")
    return templates


def checked(task: str, row: Mapping[str, Any], where: str) -> None:
    """Raise ValueError naming a field of a row that the task needs and that is not as in LongBench's files."""
    wanted = {"context": str, "input": str, "answers": list}
    if named(task).measure == "classification":
        wanted["all_classes"] = list
    for name, kind in wanted.items():
        value = row.get(name)
        empty = not value and name != "input"
        if not isinstance(value, kind) or empty:
            raise ValueError(f"{where}: field {name!r} is {value!r:.80}; task {task!r} needs a {kind.__name__},"
                             " as in LongBench's files")  # fmt: skip


def prompt_of(task: str, row: Mapping[str, Any], templates: Mapping[str, str] | None = None) -> str:
    """The prompt of a row, with the template of `templates` or, where it has none, ours."""
    template = (templates or {}).get(task, named(task).template)
    try:
        return template.format(context=row["context"], input=row["input"])
    except (KeyError, IndexError) as error:
        raise ValueError(f"prompts: the template of {task!r} asks for {error}; LongBench's have {{context}} and"
                         " {input} alone") from error  # fmt: skip


def shortened(prompt: str, tokenizer: Tokenizer, length: int) -> str:
    """A prompt of more than `length` tokens without those in its middle, as LongBench cuts; 0 is no limit."""
    if not length:
        return prompt
    ids, half = list(tokenizer.encode(prompt)), length // 2
    if len(ids) <= length or half == 0:
        return prompt
    return tokenizer.decode(ids[:half]) + tokenizer.decode(ids[-half:])


def score_of(task: str, output: str, row: Mapping[str, Any]) -> float:
    """The task's measure of what was said, from 0 to 1: the best over the row's answers."""
    known = named(task)
    said = answers.first_line(output) if known.only_first_line else output
    if known.measure == "classification":
        return max(answers.classification(said, answer, row["all_classes"]) for answer in row["answers"])
    return answers.best(getattr(answers, known.measure), said, row["answers"])


def length_of(words: int) -> str:
    """The range of LongBench-E that a row of so many words falls in."""
    return next(name for name, low, high in LENGTHS if low <= words < high)
