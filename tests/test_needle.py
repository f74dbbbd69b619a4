"""Needles: where they lie, what is asked, how long prompts are, and how answers are told from what leads to them."""

import re

import numpy as np
import pytest

from efla_jax.data import needle
from efla_jax.data.needle import KINDS, ROOM, Needles

WORDS = np.random.default_rng(0).choice(["Law", "and", "state", "of", "the", "mind", "is", "not", "one"], (900, 7))
TEXT = "\n\n".join(" ".join(words).capitalize() + "." for words in WORDS)


def encode(text):
    """Bytes, but that a space is one token with what follows it: half as long, and joined over the answer's border."""
    return [int.from_bytes(piece.encode()) for piece in re.findall(r" ?.|\n", text)]


def needles(kind, **options):
    return Needles(kind, options.pop("encode", encode), "" if kind == "single_1" else TEXT, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0, 37, 100])
def test_a_needle_lies_at_its_depth_and_the_prompt_fills_the_length(kind, depth):
    task = needles(kind)
    for length, index in ((1200, 0), (1900, 5)):
        prompt = task.prompt(length, depth, index)
        form = r"[1-9]\d{6}" if KINDS[kind].value == "number" else r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f-]{17}"
        found = list(re.finditer(rf"One of the special magic (\w+)s for ([a-z]+-[a-z]+) is: ({form})\.", prompt.text))
        assert len(found) == 1
        noun, key, value = found[0].groups()
        assert noun == KINDS[kind].value
        head, tail = prompt.text.split(f"about the {noun} afterwards.\n")[1].split("\nWhat is the")
        asked = f" special magic {noun} for {key} mentioned in the provided text"
        assert tail == f"{asked}? The{asked} is {value}"
        assert prompt.text.startswith(f"A special magic {noun} is hidden within the following text. Make sure to")
        # Once in the haystack, once as the answer, and the prompt without the answer ends in front of it.
        assert prompt.text.count(value) == 2
        assert prompt.tokens[prompt.start :].tolist() == encode(f"is {value}")[2:]
        assert prompt.tokens.tolist() == encode(prompt.text)
        before, after = head.split(found[0][0])
        here, all_of_it = (len(re.findall(r"\.(\s|$)", x)) for x in (before, before + after))
        assert abs(here - depth / 100 * all_of_it) <= (5 if kind == "single_1" else 1)  # a line of noise has five
        one = len(encode(needle.NOISE if kind == "single_1" else max(TEXT.split("\n\n"), key=len))) + 1
        assert length - ROOM - 2 * one < len(prompt.tokens) <= length - ROOM


def test_a_question_is_a_function_of_seed_and_index():
    def answers(task, length, depth):
        return [task.prompt(length, depth, index).text.split()[-1] for index in range(4)]

    task = needles("single_2")
    first = answers(task, 1100, 0)
    assert len(set(first)) == 4
    assert first == answers(needles("single_2"), 1500, 80) == answers(task, 1100, None)
    assert first != answers(needles("single_2", seed=1), 1100, 0)
    assert task.prompt(1100, 20, 1).tokens.tolist() == needles("single_2").prompt(1100, 20, 1).tokens.tolist()


def test_without_its_needle_a_prompt_is_as_long():
    prompt = needles("single_3").prompt(1500, None, 2)
    value = prompt.text.split()[-1]
    assert prompt.text.count(value) == 1 and "One of the special magic" not in prompt.text
    assert 1500 - ROOM - 60 < len(prompt.tokens) <= 1500 - ROOM


def test_a_first_token_counts():
    plain, marked = (needles("single_1", bos=bos).prompt(1000, 50) for bos in (-1, 7))
    assert marked.tokens.tolist() == [7, *plain.tokens] and marked.start == plain.start + 1


def test_a_tokenizer_may_join_the_answer_with_what_leads_to_it():
    def joined(text):
        return list(re.sub(r"is (\d)", lambda found: chr(1000 + int(found[1])), text).encode("utf-32-le")[::4])

    prompt = needles("single_1", encode=joined).prompt(1400, 50)
    assert prompt.tokens.tolist() == joined(prompt.text) and len(prompt.tokens) - prompt.start == 7
    assert prompt.tokens[prompt.start - 1] == ord(" ")


def test_rows_end_with_their_answers():
    prompts = [needle.Prompt(np.arange(n, dtype=np.int32), start, "") for n, start in ((9, 6), (5, 4))]
    batch = needle.lay_out(prompts, 11)
    assert batch["tokens"].tolist() == [[*range(9), 0, 0], [*range(5), *[0] * 6]]
    assert batch["places"].tolist() == [[5, 6, 7], [3, 0, 0]]
    assert batch["targets"].tolist() == [[6, 7, 8], [4, 0, 0]]
    assert batch["mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_sentences_end_where_sentences_end():
    text = 'He met Mr. Brown, of St. Ives. "Yes!" she said... No? 3.5 is R. W. Emerson\'s. (So.) end. It'
    assert needle.SENTENCE_END.split(text) == [
        "He met Mr. Brown, of St. Ives.", '"Yes!" she said...', "No? 3.5 is R. W. Emerson's.", "(So.) end.", "It",
    ]  # fmt: skip


def test_words_of_a_folder(tmp_path):
    (tmp_path / "adjectivelist.txt").write_text("grim\n")
    with pytest.raises(ValueError, match="no nounlist.txt there"):
        needle.read_words(str(tmp_path))
    (tmp_path / "nounlist.txt").write_text("fox\nox\n")
    words = needle.read_words(str(tmp_path))
    assert words == (("grim",), ("fox", "ox"))
    assert re.search(" for grim-(fox|ox) is: ", needles("single_2", words=words).prompt(900, 0).text)


@pytest.mark.parametrize(("kind", "text", "length", "depth", "message"), [
    ("single_4", "", 999, 0, "kind='single_4' must be one of single_1"),
    ("single_1", TEXT, 999, 0, "haystack: kind='single_1' has its own: leave it out"),
    ("single_2", " ", 999, 0, "haystack: kind='single_2' hides its needle in a text: give a haystack"),
    ("single_2", TEXT[:500], 9999, 0, "do not fill length=9999; give a longer text"),
    ("single_1", "", 300, 0, "length=300 has no room for a sentence"),
    ("single_1", "", 999, 101, "depth=101 must lie between 0 and 100"),
])  # fmt: skip
def test_refuses(kind, text, length, depth, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Needles(kind, encode, text).prompt(length, depth)


def test_refuses_a_negative_seed():
    with pytest.raises(ValueError, match="seed=-1 is negative"):
        Needles("single_1", encode, seed=-1)
