"""Prompts of recall-intensive questions and of LongBench: what they say, how they are cut, and what rows they take."""

import gzip
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from efla_jax.data import cloze, longbench, synthetic_pages
from efla_jax.data.cloze import Cloze
from efla_jax.data.tokenizer import TokenizerSpec, load_tokenizer

BYTES = load_tokenizer(TokenizerSpec())


def pieces(text):
    """Words with the space in front of them, so that a prompt's tokens are not its words'."""
    return re.findall(r"\s*\S+|\s+$", text)


ROWS = {
    # task: (row, prompt, prompt with the document twice, answers)
    "swde": ({"text": "Some page. Year: 1999. director: ", "key": "director", "value": "Ann Lee "},
             "Some page. Year: 1999. Director:",
             "Information about Director. Some page. Year: 1999.\nSome page. Year: 1999. Director:", (("Ann Lee",),)),
    "fda": ({"text": "Device: X", "key": "device", "value": "X"}, "Device: X. Device:",
            "Information about Device. Device: X.\nDevice: X. Device:", (("X",),)),
    "squad": ({"text": "It rained. The team that won was the ", "value": "Broncos", "question": "Who won?"},
              "It rained. The team that won was the", "Who won? It rained.\nIt rained. The team that won was the",
              (("Broncos",),)),
    "nq": ({"context": "Men walked there. the last time was", "question": "The last time was", "orig_question": "when?",
            "answers": ["1972", "December 1972"]},
           "Men walked there. The last time was", "when? Men walked there.\nMen walked there. The last time was",
           (("1972",), ("December 1972",))),
    "triviaqa": ({"context": "[DOC] [TLE] Oslo [PAR] It lies north.", "question": "It lies", "orig_question": "Where?",
                  "answers": ["north"]},
                 "Oslo  It lies north. It lies", "Where? Oslo  It lies north.\nOslo  It lies north. It lies",
                 (("north",),)),
    "drop": ({"passage": "Ten Swedes, two Danes.", "question": "Who were there?",
              "answers": [["Swedes", "Danes"], ["12"]]},
             "Ten Swedes, two Danes.\nQuestion: Who were there?\nAnswer:",
             "Who were there? Ten Swedes, two Danes.\nTen Swedes, two Danes.\nQuestion: Who were there?\nAnswer:",
             (("Swedes", "Danes"), ("12",))),
    "squad_cloze": ({"context": "It rained. In the end the team that won was  the Broncos, again.", "question": "Who?",
                     "answers": {"text": ["the Broncos", "Broncos", "the Broncos"]}},
                    "It rained. In the end the team that won was the Broncos, again. In the end the team that won was",
                    None, (("the Broncos",),)),
}  # fmt: skip


@pytest.mark.parametrize("task", ROWS)
def test_the_prompt_of_a_row(task):
    row, prompt, twice, answers = ROWS[task]
    question = cloze.of_row(task, row, "here")
    assert question.prompt(pieces) == prompt and question.answers == answers
    assert twice is None or question.prompt(pieces, twice=True) == twice


def test_rows_as_published():
    squad = {"context": "A b c.", "question": "What?", "answers": {"text": ["b", "b"], "answer_start": [2, 2]}}
    assert cloze.of_row("squad", squad, "").prompt(pieces) == "A b c.\nQuestion: What?\nAnswer:"
    heart = cloze.of_row("nq", {"question": "who?", "answer": ["A", "B"]}, "")
    assert heart.prompt(pieces, twice=True) == "Question: who?\nAnswer:" and heart.answers == (("A",), ("B",))
    trivia = cloze.of_row("triviaqa", {"question": "who?", "answer": {"value": "A", "aliases": ["a b", "A"]}}, "")
    assert trivia.answers == (("A",), ("a b",)) and not trivia.extractive()


@pytest.mark.parametrize("context", ["Broncos won again.", "The team. It was Broncosish there.", "Who knows."])
def test_no_cloze_without_the_beginning_of_a_sentence(context):
    row = {"context": context, "question": "Who?", "answers": {"text": ["Broncos"]}}
    assert cloze.of_row("squad_cloze", row, "") is None


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("at", [0, 3, 250, 499])
def test_a_document_is_cut_around_its_answer(at, twice):
    words = [f"w{i}" for i in range(500)]
    question = Cloze(" ".join(words), "The word is", ((words[at].upper(),),), intro="Which word?")
    whole = question.prompt(pieces, twice=twice)
    assert len(pieces(whole)) == (500 + 3 if not twice else 2 * 500 + 5)
    assert question.prompt(pieces, len(pieces(whole)), twice=twice) == whole
    cut = question.prompt(pieces, 104, twice=twice)
    count, extra = (49, 5) if twice else (101, 3)
    assert len(pieces(cut)) == (2 * count + extra if twice else count + extra) <= 104 < 2 * 50 + 5
    shown = [word for word in cut.split() if word.startswith("w") and word[1:].isdecimal()][:count]
    numbers = [int(word[1:]) for word in shown]
    assert numbers == list(range(numbers[0], numbers[0] + count)) and at in numbers
    assert abs(numbers.index(at) - count // 2) <= 1 or numbers[0] == 0 or numbers[-1] == 499
    assert cut.endswith(" The word is") and cut.split().count(words[at]) == 1 + twice


def test_without_an_answer_in_it_a_document_keeps_its_end():
    question = Cloze("a b c d e f", "So", (("x",),))
    assert question.prompt(pieces, 4) == "d e f So"
    with pytest.raises(ValueError, match="length=1 has no room for the 2 tokens of 'So it'"):
        Cloze("a b", "So it", (("x",),)).prompt(pieces, 1)


def test_files_of_questions(tmp_path):
    rows = [ROWS["squad_cloze"][0], {"context": "Broncos.", "question": "?", "answers": {"text": ["Broncos"]}}]
    with gzip.open(tmp_path / "squad.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    assert len(cloze.read("squad_cloze", tmp_path / "squad.jsonl.gz")) == 1
    assert len(cloze.read("squad", str(tmp_path / "squad.jsonl.gz"))) == 2
    for text, message in (
        ('{"context": "a", "question": "b"}', "line 1: found no answer in None"),
        ('{"context": "a", "question": " ", "answers": ["x"]}', "line 1: expected a field 'question'"),
        ('{"context": "a"}\n', "line 1: expected a field 'question' with a text, and found None among 'context'"),
        ("\n[1]", "line 2: list is no JSON object"),
        ("{", "line 1: expected a JSON object"),
    ):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            cloze.read("squad", tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_text(json.dumps(rows[1]))
    with pytest.raises(ValueError, match="has no question for task='squad_cloze'"):
        cloze.read("squad_cloze", tmp_path / "bad.jsonl")
    with pytest.raises(ValueError, match="is no file of JSON lines"):
        cloze.read("squad", tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="task='sqad' must be one of swde"):
        cloze.read("sqad", "x")


# Published files, which this repository does not hold; rows written out by hand are tested above.
@pytest.mark.skipif(not os.environ.get("EFLA_DATA"), reason="EFLA_DATA names no folder of published questions")
def test_published_questions():
    folder = Path(os.environ["EFLA_DATA"]) / "evals"
    for task, name, count in (("squad", "squad_v1_dev_xquad_en1190", 1190), ("drop", "drop_dev_subset1000", 1000),
                              ("nq", "nq_open_validation", 3610), ("triviaqa", "triviaqa_nocontext_validation", 7993),
                              ("squad_cloze", "squad_v1_dev_xquad_en1190", 930)):  # fmt: skip
        questions = cloze.read(task, folder / f"{name}.jsonl.gz")
        assert len(questions) == count
        if task.startswith("squad"):
            assert all(question.extractive() for question in questions)
            for question in questions[::50]:
                prompt = question.prompt(str.encode, 400)
                assert len(prompt.encode()) <= 400
                assert any(spans[0].lower() in prompt.lower() for spans in question.answers)


@pytest.mark.parametrize("task", synthetic_pages.TASKS)
def test_pages_tell_their_answer_once(task):
    questions = [synthetic_pages.make(task, index, words=400) for index in range(40)]
    for question in questions:
        answer = question.answers[0][0]
        assert question.document.count(answer) == 1
        line = next(line for line in question.document.split("\n") if answer in line)
        assert question.cue[1:-1] in line  # the key stands beside it
        assert 390 < len(question.document.split()) < 440
        assert question.prompt(pieces).endswith(f"\n{question.cue}")
    assert len({question.answers for question in questions}) > 30 and len({q.cue for q in questions}) > 7
    assert questions[3] == synthetic_pages.make(task, 3, 400) != synthetic_pages.make(task, 3, 400, seed=1)
    places = [question.document.index(question.answers[0][0]) / len(question.document) for question in questions]
    assert np.std(places) > 0.15  # anywhere in the text


@pytest.mark.parametrize(("options", "message"), [
    (("swde", 0), "task='swde' must be one of synthetic_swde, synthetic_fda"),
    (("synthetic_swde", 0, 50), "words=50 is less than 120"),
    (("synthetic_fda", -1), "index=-1 is less than 0"),
])  # fmt: skip
def test_pages_that_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        synthetic_pages.make(*options)


ROW = {"context": "THE {CONTEXT}", "input": "THE INPUT", "answers": ["7"], "all_classes": ["7", "8"], "length": 4500}


@pytest.mark.parametrize("task", longbench.TASKS)
def test_longbench_prompts_hold_context_and_input_in_order(task):
    prompt = longbench.prompt_of(task, ROW)
    summary = task in ("gov_report", "multi_news", "passage_count", "lcc")
    assert prompt.count("THE {CONTEXT}") == 1 and prompt.count("THE INPUT") == (0 if summary else 1)
    assert summary or prompt.index("THE {CONTEXT}") < prompt.index("THE INPUT")
    asked = {"f1": ("Answer:", "THE INPUT"), "rouge_l": ("Summary:", "Answer:", "THE INPUT"), "number": (" is: ",),
             "classification": ("THE INPUT",), "code_similarity": ("line of code:\n",)}  # fmt: skip
    assert prompt.endswith(asked[longbench.TASKS[task].measure])
    longbench.checked(task, ROW, "")


def test_longbench_scores():
    def score(task, output, *answers):
        return longbench.score_of(task, output, {**ROW, "answers": list(answers)})

    assert score("hotpotqa", "the Cat\nand more", "dog", "cat and more") == 1
    assert score("triviaqa", "\nCat\nDog", "cat") == 1
    assert score("hotpotqa", "\nCat\nDog", "cat") == pytest.approx(2 / 3)
    assert score("trec", "7\n8", "7") == 1 and score("trec", "7 8", "7") == 0.5
    assert score("passage_retrieval_en", "Paragraph 7", "Paragraph 7") == 1
    assert score("passage_count", "7, or 8", "7") == 0.5
    assert score("gov_report", "a b c", "x", "a b d") == pytest.approx(2 / 3)
    assert score("lcc", "# no\nreturn", "return") == 1
    # What the benchmark lets a model say.
    assert {task: known.tokens for task, known in longbench.TASKS.items()} == {
        "narrativeqa": 128, "qasper": 128, "multifieldqa_en": 64, "hotpotqa": 32, "2wikimqa": 32, "musique": 32,
        "gov_report": 512, "qmsum": 512, "multi_news": 512, "trec": 64, "triviaqa": 32, "samsum": 128,
        "passage_count": 32, "passage_retrieval_en": 32, "lcc": 64, "repobench-p": 64,
    }  # fmt: skip
    assert [longbench.length_of(words) for words in (0, 3999, 4000, 8000)] == ["0-4k", "0-4k", "4-8k", "8k+"]


def test_a_long_prompt_loses_its_middle():
    prompt = "".join(chr(65 + i % 26) for i in range(100))
    assert longbench.shortened(prompt, BYTES, 0) == longbench.shortened(prompt, BYTES, 100) == prompt
    assert longbench.shortened(prompt, BYTES, 20) == prompt[:10] + prompt[-10:]
    assert longbench.shortened(prompt, BYTES, 21) == prompt[:10] + prompt[-10:]


def test_templates_of_the_benchmark(tmp_path):
    file = tmp_path / "dataset2prompt.json"
    file.write_text(json.dumps({"trec": "T {context}|{input}", "dureader": "no {context}", "lcc": "{context} {code}"}))
    templates = longbench.read_templates(file)
    assert templates.keys() == {"trec", "lcc"}
    assert longbench.prompt_of("trec", ROW, templates) == "T THE {CONTEXT}|THE INPUT"
    assert longbench.prompt_of("qmsum", ROW, templates) == longbench.prompt_of("qmsum", ROW)
    with pytest.raises(ValueError, match="the template of 'lcc' asks for 'code'"):
        longbench.prompt_of("lcc", ROW, templates)
    for text in ("[]", '{"trec": 3}', '{"x": "{context}"}', "no"):
        file.write_text(text)
        with pytest.raises(ValueError, match="must be LongBench's dataset2prompt.json"):
            longbench.read_templates(file)


@pytest.mark.parametrize(("task", "change", "message"), [
    ("trec", {"all_classes": None}, "field 'all_classes' is None; task 'trec' needs a list, as in LongBench's files"),
    ("hotpotqa", {"answers": "x"}, "here: field 'answers' is 'x'; task 'hotpotqa' needs a list"),
    ("lcc", {"context": ""}, "field 'context' is ''; task 'lcc' needs a str"),
    ("hotpot", {}, "task='hotpot' must be one of narrativeqa"),
])  # fmt: skip
def test_rows_that_are_refused(task, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        longbench.checked(task, {**ROW, **change}, "here")
