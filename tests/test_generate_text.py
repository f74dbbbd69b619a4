"""Tokens as text while they come: the same text in whatever pieces, and cut at stop strings."""

import os
from pathlib import Path

import numpy as np
import pytest

from efla_jax.data.tokenizer import TokenizerSpec, load_tokenizer
from efla_jax.generate.text import TextStream, overlap
from experiments.generation import encode_behind

TEXT = "naïve “quotes” — 北京, Ελλάδα, 👩‍🚀 done.\n\n  two  spaces\tand a tab; ﷽ 𝒳 end"
VOCABULARIES = ("gpt2_r50k_base.tiktoken", "gpt_neox_20b_pii_special.json", "mistral_v1.model",
                "mistral_v1_tokenizer.json")  # fmt: skip


def decode_bytes(ids):
    return bytes(ids).decode(errors="replace")


def parts(ids, most, seed):
    """The ids in pieces of 1 to `most`."""
    generator, start = np.random.default_rng(seed), 0
    while start < len(ids):
        stop = start + int(generator.integers(1, most + 1))
        yield ids[start:stop]
        start = stop


def streamed(stream, ids, most=1, seed=0):
    """(what was shown after each piece, all of it)."""
    shown = [""]
    for part in parts(ids, most, seed):
        shown.append(shown[-1] + stream.add(part))
        if stream.stopped:
            break
    return shown, shown[-1] + stream.end()


@pytest.mark.parametrize("most", [1, 2, 7])
def test_characters_are_never_shown_in_halves(most):
    ids = TEXT.encode()
    shown, whole = streamed(stream := TextStream(decode_bytes), ids, most, seed=most)
    assert whole == stream.text == TEXT and stream.tokens == list(ids)
    assert all(TEXT.startswith(text) for text in shown)
    if most == 1:  # no character waits longer than it must
        assert shown == [ids[:i].decode(errors="ignore") for i in range(len(ids) + 1)]


def test_bytes_that_are_no_character_are_shown_as_such():
    generator = np.random.default_rng(0)
    for seed in range(40):
        ids = generator.choice([65, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF, 0xC3, 0xA9], size=30).tolist()
        shown, whole = streamed(TextStream(decode_bytes), ids, 3, seed)
        assert whole == decode_bytes(ids)
        assert all(whole.startswith(text) for text in shown)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_pieces_of_text_by_published_tokenizers(name):
    folder = os.environ.get("EFLA_DATA")
    if not folder:
        pytest.skip("EFLA_DATA names no folder of tokenizers")  # published files, which this repository does not hold
    try:
        tokenizer = load_tokenizer(TokenizerSpec(str(Path(folder) / "tokenizers" / name)))
    except ImportError as error:
        pytest.skip(str(error))  # the packages of extra `data`; tokenizers made here are tested without them
    generator = np.random.default_rng(0)
    texts = [list(tokenizer.encode(TEXT))]
    texts += [generator.integers(3, tokenizer.vocab_size - 300, 40).tolist() for _ in range(10)]  # what a model may say
    for ids in texts:
        for most in (1, 5):
            shown, whole = streamed(TextStream(tokenizer.decode), ids, most)
            assert whole == tokenizer.decode(ids)
            if ids is texts[0]:
                assert all(TEXT.startswith(text.removeprefix(" ")) for text in shown)
    for cut in range(1, len(texts[0])):  # behind a prompt of whole characters: no space is lost or added
        before = tokenizer.decode(texts[0][:cut])
        if not before.endswith("\ufffd"):
            _, whole = streamed(TextStream(tokenizer.decode, (), texts[0][:cut]), texts[0][cut:])
            assert before + whole == tokenizer.decode(texts[0])
    for first, second in (("Hel", "lo"), ("Hello", " world"), ("a\n", "\n b"), ("京", "北"), ("x", "\n\ny")):
        ids = [*tokenizer.encode(first), *encode_behind(tokenizer, second)]
        assert tokenizer.decode(ids).removeprefix(" ") == first + second


@pytest.mark.parametrize(
    "text, stops, wanted",
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("one\ntwo\n", ["\n\n"], "one\ntwo\n"),  # half a stop string at the end is text
        ("aab aaab", ["aaab"], "aab "),  # the match begins inside what looked like another
        ("x END y STOP", ["STOP", "END"], "x "),  # the first in the text, not in the list
        ("abcd", ["bcd", "abcd"], ""),
        ("abcd", ["abc", "bcdefg"], ""),
        ("say 北京!", ["京"], "say 北"),
        ("nothing", [], "nothing"),
    ],
)
@pytest.mark.parametrize("most", [1, 3, 100])
def test_the_text_ends_in_front_of_the_first_stop_string(text, stops, wanted, most):
    stream = TextStream(decode_bytes, stops)
    shown, whole = streamed(stream, text.encode(), most, seed=most)
    assert whole == stream.text == wanted and stream.stopped == (wanted != text)
    assert all(wanted.startswith(part) for part in shown)  # nothing of a stop string was ever shown
    if stream.stopped:
        assert stream.add(b"more") == stream.end() == "" and stream.text == wanted


def test_a_stop_string_that_ends_in_what_was_held_back():
    """The last character is whole only when the text ends: it may still complete a stop string."""
    stream = TextStream(decode_bytes, ["a\ufffd"])
    assert stream.add(b"ba") == "b" and stream.add(b"\xe2\x82") == "" and stream.end() == "" and stream.text == "b"


def test_overlaps_by_definition():
    generator = np.random.default_rng(0)
    for _ in range(300):
        text, stop = ("".join(generator.choice(["a", "b"], size)) for size in generator.integers(1, 6, 2))
        ends = [n for n in range(1, len(stop)) if n <= len(text) and text[-n:] == stop[:n]]
        assert overlap(text, stop) == max(ends, default=0)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty string"):
        TextStream(decode_bytes, ["\n", ""])
