"""Needles: where they lie, what is asked, how long prompts are, and how answers are told from what leads to them."""

import gzip
import os
import re
from pathlib import Path

import numpy as np
import pytest

from efla_jax.data import needle
from efla_jax.data.needle import DEPTHS, KINDS, ROOM, Needles
from efla_jax.data.tokenizer import TokenizerSpec, load_tokenizer

WORDS = np.random.default_rng(0).choice(["Law", "and", "state", "of", "the", "mind", "is", "not", "one"], (900, 7))
SINGLES = [kind for kind in KINDS if kind.startswith("single")]
FORMS = {"number": r"[1-9]\d{6}", "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
         "words": r"[a-z]+-[a-z]+"}  # fmt: skip
TEXT = "\n\n".join(" ".join(words).capitalize() + "." for words in WORDS)


def encode(text):
    """Bytes, but that a space is one token with what follows it: half as long, and joined over the answer's border."""
    return [int.from_bytes(piece.encode()) for piece in re.findall(r" ?.|\n", text)]


def needles(kind, **options):
    return Needles(kind, options.pop("encode", encode), TEXT if KINDS[kind].haystack == "text" else "", **options)


@pytest.mark.parametrize("kind", SINGLES)
@pytest.mark.parametrize("depth", [0, 37, 100])
def test_a_needle_lies_at_its_depth_and_the_prompt_fills_the_length(kind, depth):
    task = needles(kind)
    for length, index in ((1200, 0), (1900, 5)):
        prompt = task.prompt(length, depth, index)
        form = FORMS[KINDS[kind].value]
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


# Of each kind: the first words, how the question asks, and how many needles there are, asked for and not.
SEVERAL = {
    "multikey_1": ("A special magic number is", "What is the special magic number for {query}", 4, 1),
    "multikey_2": ("A special magic number is", "What is the special magic number for {query}", None, 1),
    "multikey_3": ("A special magic uuid is", "What is the special magic uuid for {query}", None, 1),
    "multivalue": ("Some special magic numbers are", "What are all the special magic numbers for {query}", 4, 4),
    "multiquery": ("Some special magic numbers are", "What are all the special magic numbers for {query}", 4, 4),
}


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("depth", [needle.DRAWN, 25])
def test_several_needles_are_told_and_asked_for_as_ruler_does(kind, depth):
    begins, asks, count, values = SEVERAL[kind]
    prompt = needles(kind).prompt(2600, depth, 3)
    noun = KINDS[kind].value
    plural = noun if values == 1 else f"{noun}s"
    head, tail = prompt.text.split(f" I will quiz you about the {plural} afterwards.\n")
    assert head == f"{begins} hidden within the following text. Make sure to memorize it."
    context, tail = tail.rsplit("\n", 1)
    form = rf"One of the special magic {noun}s for ({FORMS[KINDS[kind].key]}) is: ({FORMS[noun]})\."
    told = [(found[1], found[2], found.start() / len(context)) for found in re.finditer(form, context)]
    if count is None:  # nothing but needles, one a line, most of which are asked for by nobody
        assert len(told) > 8 and all(re.fullmatch(form, line) for line in context.split("\n"))
    else:
        assert len(told) == count and len({key for key, *_ in told}) == KINDS[kind].keys
    assert len({value for _, value, _ in told}) == len(told)
    asks = re.escape(asks).replace(re.escape("{query}"), "(.*)")
    asked = re.fullmatch(rf"{asks} mentioned in the provided text\? (The .*)", tail)
    query, answer = asked[1], asked[2]
    names = re.findall(FORMS[KINDS[kind].key], query)
    assert query == (names[0] if len(names) == 1 else "{}, {}, {}, and {}".format(*names))
    assert len(names) == KINDS[kind].queries
    of = {key: [value for name, value, _ in told if name == key] for key in names}
    assert [value for key in names for value in of[key]] == list(prompt.answers) and len(prompt.answers) == values
    said = prompt.answers[0] if values == 1 else "{}, {}, {}, and {}".format(*prompt.answers)
    verb = "is" if values == 1 else "are"
    assert answer == f"The special magic {plural} for {query} mentioned in the provided text {verb} {said}"
    # Depths: those that the prompt says, in characters; the first that is asked for where it was wanted.
    where = {value: place for _, value, place in told}
    for value, place in zip(prompt.answers, prompt.depths, strict=True):
        assert abs(where[value] - place / 100) < 0.06
    assert (25 in prompt.depths) == (depth == 25)
    if depth == needle.DRAWN and KINDS[kind].haystack == "text":
        assert len(set(prompt.depths)) == values and set(prompt.depths) <= set(DEPTHS.tolist())


def test_without_what_is_asked_for_other_needles_stay():
    for kind in SEVERAL:
        prompt = needles(kind).prompt(2600, None, 3)
        assert prompt.answers == needles(kind).prompt(2600, 0, 3).answers and prompt.depths == ()
        for value in prompt.answers:
            assert prompt.text.count(value) == 1
        others = len(re.findall("One of the special magic", prompt.text))
        assert others == {"multikey_1": 3, "multivalue": 0, "multiquery": 0}.get(kind, others) and others != 1


def test_drawn_depths_reach_everywhere():
    depths = [needles("single_1").prompt(900, needle.DRAWN, index).depths[0] for index in range(60)]
    assert min(depths) < 10 and max(depths) > 90 and len(set(depths)) == 60


def joined_in_front(text):
    """A tokenizer whose pieces of text have fewer tokens together than apart: a full stop and what follows are one."""
    return [int.from_bytes(piece.encode()) for piece in re.findall(r"[.?] ?.?|.", text, re.DOTALL)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [encode, joined_in_front])
def test_a_prompt_is_as_long_as_it_may_be(kind, tokens):
    task = needles(kind, encode=tokens)
    full = len(task.prompt(2000, 50, 1).tokens) + ROOM
    assert full <= 2000
    assert len(task.prompt(full, 50, 1).tokens) + ROOM == full
    assert len(task.prompt(full - 1, 50, 1).tokens) + ROOM < full
    longer = next(length for length in range(full + 1, full + 400)
                  if len(task.prompt(length, 50, 1).tokens) + ROOM > full)  # fmt: skip
    assert longer > 2000 and len(task.prompt(longer, 50, 1).tokens) + ROOM == longer


# Published files, which this repository does not hold; rigged tokenizers and a made-up haystack are tested above.
@pytest.mark.skipif(not os.environ.get("EFLA_DATA"), reason="EFLA_DATA names no folder of tokenizers and essays")
@pytest.mark.parametrize(("module", "file"), [
    ("tiktoken", "gpt2_r50k_base.tiktoken"), ("tokenizers", "gpt_neox_20b_pii_special.json"),
    ("tokenizers", "mistral_v1_tokenizer.json"), ("sentencepiece", "mistral_v1.model"),
])  # fmt: skip
def test_lengths_in_tokens_of_published_tokenizers(module, file):
    pytest.importorskip(module)
    folder = Path(os.environ["EFLA_DATA"])
    tokens = load_tokenizer(TokenizerSpec(str(folder / "tokenizers" / file))).encode
    essays = gzip.open(folder / "haystack_public_domain_essays.txt.gz", "rt").read()
    words = needle.read_words(str(folder / "wordlists"))
    for kind in KINDS:
        task = Needles(kind, tokens, essays if KINDS[kind].haystack == "text" else "", words=words, bos=1)
        prompt = task.prompt(4096, needle.DRAWN, 4)
        assert 4096 - ROOM - 150 < len(prompt.tokens) <= 4096 - ROOM  # the longest sentence here has some 100 words
        assert prompt.tokens.tolist() == [1, *tokens(prompt.text)]
        full = len(prompt.tokens) + ROOM
        assert len(task.prompt(full, needle.DRAWN, 4).tokens) + ROOM == full
        assert len(task.prompt(full - 1, needle.DRAWN, 4).tokens) + ROOM < full


def test_a_question_by_itself_and_the_room_to_answer_it():
    for kind in KINDS:
        prompt = needles(kind, room=64, bos=9).prompt(2000, 50, 1)
        asked = prompt.text.removesuffix(f" {needle.enumerated(prompt.answers)}")
        assert asked.endswith(("provided text is", "provided text are"))
        assert (prompt.question, prompt.question + prompt.answer) == (asked, prompt.text)
        assert 2000 - ROOM < len(prompt.tokens) + len(needle.NOISE) and len(prompt.tokens) <= 2000 - 64


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
    with pytest.raises(ValueError, match="words: 2 pairs are too few for the keys of kind='multiquery'"):
        needles("multiquery", words=words)


@pytest.mark.parametrize(("kind", "text", "length", "depth", "message"), [
    ("single_4", "", 999, 0, "kind='single_4' must be one of single_1"),
    ("single_1", TEXT, 999, 0, "haystack: kind='single_1' has its own: leave it out"),
    ("single_2", " ", 999, 0, "haystack: kind='single_2' hides its needle in a text: give a haystack"),
    ("single_2", TEXT[:500], 9999, 0, "do not fill length=9999; give a longer text"),
    ("single_1", "", 300, 0, "length=300 has no room for a sentence"),
    ("multikey_2", TEXT, 999, 0, "haystack: kind='multikey_2' has its own: leave it out"),
    ("multivalue", "", 999, 0, "haystack: kind='multivalue' hides its needle in a text: give a haystack"),
    ("multikey_3", "", 400, 0, "length=400 has no room for a sentence"),
    ("single_1", "", 999, "deep", "depth='deep' must be a number, 'drawn' or None"),
    ("single_1", "", 999, 101, "depth=101 must lie between 0 and 100"),
])  # fmt: skip
def test_refuses(kind, text, length, depth, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Needles(kind, encode, text).prompt(length, depth)


@pytest.mark.parametrize("name", ["seed", "room"])
def test_refuses_a_negative(name):
    with pytest.raises(ValueError, match=f"{name}=-1 is negative"):
        Needles("single_1", encode, **{name: -1})
