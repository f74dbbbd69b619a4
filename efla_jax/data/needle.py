"""Needles in a haystack: one sentence in a long text tells a value that is asked for at its end (RULER, 2404.06654).

    needles = Needles("single_2", tokenizer.encode, text)
    prompt = needles.prompt(4096, depth=50, index=7)      # tokens [T], of which tokens[prompt.start :] are the answer

    kind      haystack                     key     value
    single_1  one sentence over and over   words   number of 7 digits
    single_2  a given text                 words   number of 7 digits
    single_3  a given text                 words   uuid

Sentences and lengths are RULER's: prompt and answer and 128 tokens more are at most `length`. What differs: the
haystack is filled up by sentences, not in steps of 500 words; sentences end at punctuation, without nltk; the depth is
given, not drawn; and the keys are of a short list unless RULER's two (of the package wonderwords) are given. Prompt i
asks for the same key and value at every length and depth.
"""

import re
import uuid
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {type}s for {key} is: {value}."
TASK = (
    "A special magic {type} is hidden within the following text. Make sure to memorize it. I will quiz you about the"
    " {type} afterwards.\n{context}\nWhat is the special magic {type} for {key} mentioned in the provided text?"
    " The special magic {type} for {key} mentioned in the provided text is"
)
ROOM = 128  # tokens that RULER lets a model say
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\bMr\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\bMrs\.)(?<!\b[A-Z]\.) (?=[\"'(A-Z])")
ADJECTIVES = tuple(
    "amber ancient bold brave brisk calm careful cheerful clever cosmic crimson curious dapper distant eager elegant"
    " faithful gentle golden hidden honest humble icy jolly keen lively lucky mellow mighty modest noble patient plain"
    " polite proud quaint quiet rapid rustic shiny silent sleepy solemn steady stormy sturdy subtle sunny tender tidy"
    " timid vivid wandering warm wise wooden young zealous".split()
)
NOUNS = tuple(
    "anchor apple badger barrel basket beacon bridge bucket candle canyon carpet castle cello cherry comet copper desk"
    " dolphin drum eagle engine falcon feather forest fountain garden glacier hammer harbor helmet island jacket kettle"
    " ladder lantern lemon lion marble meadow mirror mountain needlework orchard otter paddle pebble pencil pepper"
    " planet rabbit river rocket saddle sparrow temple thunder tunnel turtle valley violin walnut window".split()
)


class Kind(NamedTuple):
    """What a needle lies in, "noise" or "text", and what it tells, a "number" or a "uuid"."""

    haystack: str
    value: str


KINDS = {
    "single_1": Kind("noise", "number"),
    "single_2": Kind("text", "number"),
    "single_3": Kind("text", "uuid"),
}


class Prompt(NamedTuple):
    """A question with its answer, tokens [T] int32 and text; tokens[start:] are the answer, which text ends with."""

    tokens: np.ndarray
    start: int
    text: str


def read_words(folder: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The adjectives and nouns of adjectivelist.txt and nounlist.txt, one a line, as the package wonderwords has."""
    files = [Path(folder).expanduser() / name for name in ("adjectivelist.txt", "nounlist.txt")]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"words={folder!r}: no {missing[0].name} there; give the folder of wonderwords' two lists")
    adjectives, nouns = (tuple(file.read_text(encoding="utf-8").split("\n")) for file in files)
    return tuple(filter(None, adjectives)), tuple(filter(None, nouns))


class Needles:
    """Prompts of one kind, as a function of (seed, index, length, depth).

    encode: text to ids without special tokens; bos >= 0 is put in front. text: the haystack, for kinds that want one.
    Raises ValueError for an unknown kind, a negative seed, and a text that is missing or not wanted.
    """

    def __init__(
        self, kind: str, encode: Callable[[str], Sequence[int]], text: str = "", *, bos: int = -1, seed: int = 0,
        words: tuple[Sequence[str], Sequence[str]] = (ADJECTIVES, NOUNS),
    ):  # fmt: skip
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
        if seed < 0:
            raise ValueError(f"seed={seed} is negative; give 0 or more")
        self._kind, self._encode, self._bos, self._seed, self._words = KINDS[kind], encode, bos, seed, words
        if bool(text.strip()) != (self._kind.haystack == "text"):
            wants = "hides its needle in a text: give a haystack" if not text.strip() else "has its own: leave it out"
            raise ValueError(f"haystack: kind={kind!r} {wants}")
        self._text = " ".join(text.split())

    def prompt(self, length: int, depth: int | None, index: int = 0) -> Prompt:
        """Question `index`, with its needle before the sentence at depth percent of the haystack; None: without it.

        Raises ValueError if nothing of the haystack fits into `length`, and if the haystack does not fill it."""
        if depth is not None and not 0 <= depth <= 100:
            raise ValueError(f"depth={depth} must lie between 0 and 100, percent of the haystack")
        key, value = self._pair(index)
        budget = length - ROOM
        count = self._count(budget - len(self._tokens(self._prompt(key, value, 0, depth), value)[0]), length)
        while count > 0:
            text = self._prompt(key, value, count, depth)
            tokens, start = self._tokens(text, value)
            if len(tokens) <= budget:
                return Prompt(tokens, start, f"{text} {value}")
            count -= 1  # pieces of text may have a few tokens more together
        raise ValueError(f"length={length} has no room for a sentence of the haystack beside the question and its "
                         f"{ROOM} tokens to answer in; give a longer one")  # fmt: skip

    def _pair(self, index: int) -> tuple[str, str]:
        rng = np.random.default_rng((self._seed, index))
        while True:
            key = "-".join(words[int(rng.integers(len(words)))] for words in self._words)
            digits = str(rng.integers(10**6, 10**7))
            value = digits if self._kind.value == "number" else str(uuid.UUID(bytes=rng.bytes(16), version=4))
            if key not in self._text and value not in self._text:
                return key, value

    @cached_property
    def _sentences(self) -> list[str]:
        return SENTENCE_END.split(self._text) if self._text else [NOISE]

    @cached_property
    def _ends(self) -> np.ndarray:
        """Tokens of the first sentence, of the first two, ..., each as it stands behind another."""
        alone, joint = len(self._encode(".")), " " if self._text else "\n"
        return np.cumsum([len(self._encode(f".{joint}{sentence}")) - alone for sentence in self._sentences])

    def _count(self, room: int, length: int) -> int:
        """About how many sentences have `room` tokens together."""
        if not self._text:
            return room // int(self._ends[0])
        if room > self._ends[-1]:
            raise ValueError(f"haystack: its {self._ends[-1]} tokens do not fill length={length}; give a longer text")
        return int(np.searchsorted(self._ends, room, side="right"))

    def _prompt(self, key: str, value: str, count: int, depth: int | None) -> str:
        kind = self._kind.value
        sentences = self._sentences[:count] if self._text else self._sentences * count
        if depth is not None:
            sentences.insert(int(count * depth / 100), NEEDLE.format(type=kind, key=key, value=value))
        return TASK.format(type=kind, key=key, context=(" " if self._text else "\n").join(sentences))

    def _tokens(self, prompt: str, value: str) -> tuple[np.ndarray, int]:
        """Ids of prompt and value as one text, and where they part from those of the prompt: a tokenizer may join its
        last word and what follows."""
        first = [self._bos] if self._bos >= 0 else []
        both = np.array([*first, *self._encode(f"{prompt} {value}")], np.int32)
        alone = np.array([*first, *self._encode(prompt)], np.int32)
        size = min(len(both), len(alone))
        differs = both[:size] != alone[:size]
        return both, int(np.argmax(differs)) if differs.any() else size


def lay_out(prompts: Sequence[Prompt], length: int) -> dict[str, np.ndarray]:
    """A batch {"tokens" [B, length], "places", "targets", "mask" [B, A]}: what follows tokens[places] is targets, the
    answers' tokens, where mask is 1. Rows end in padding, which nothing before it sees."""
    most = max(len(prompt.tokens) - prompt.start for prompt in prompts)
    batch = {"tokens": np.zeros((len(prompts), length), np.int32), "places": np.zeros((len(prompts), most), np.int32)}
    batch |= {"targets": np.zeros_like(batch["places"]), "mask": np.zeros((len(prompts), most), np.float32)}
    for row, (tokens, start, _) in enumerate(prompts):
        answer = len(tokens) - start
        batch["tokens"][row, : len(tokens)] = tokens
        batch["places"][row, :answer] = np.arange(start - 1, len(tokens) - 1)
        batch["targets"][row, :answer] = tokens[start:]
        batch["mask"][row, :answer] = 1
    return batch
