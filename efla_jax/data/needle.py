"""Needles in a haystack: sentences in a long text tell values that are asked for at its end (RULER, 2404.06654).

    needles = Needles("single_2", tokenizer.encode, text)
    prompt = needles.prompt(4096, depth=50, index=7)      # tokens [T], of which tokens[prompt.start :] are the answer

    kind         haystack                     key     value               keys  values of each  asked for
    single_1     one sentence over and over   words   number of 7 digits  1     1               1
    single_2     a given text                 words   number of 7 digits  1     1               1
    single_3     a given text                 words   uuid                1     1               1
    multikey_1   a given text                 words   number of 7 digits  4     1               1
    multikey_2   other needles                words   number of 7 digits  1     1               1
    multikey_3   other needles                uuid    uuid                1     1               1
    multivalue   a given text                 words   number of 7 digits  1     4               1
    multiquery   a given text                 words   number of 7 digits  4     1               4

Sentences, depths and lengths are RULER's: prompt and answers and 128 tokens more are at most `length`, and one sentence
more would not be. What differs: the haystack is filled up by sentences, not in steps of 500 words or 25 lines;
sentences end at punctuation, without nltk; the depth may be given, not drawn; no key is asked for twice or also a
distractor's; and the keys are of a short list unless RULER's two (of the package wonderwords) are given. Prompt i asks
for the same keys and values at every length and depth.
"""

import re
import uuid
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {type}s for {key} is: {value}."
TASK = (
    "{some} special magic {type} {are} hidden within the following text. Make sure to memorize it. I will quiz you"
    " about the {type} afterwards.\n{context}\nWhat {are_all} the special magic {type} for {query} mentioned in the"
    " provided text? The special magic {type} for {query} mentioned in the provided text {are}"
)
SINGULAR = {"some": "A", "are": "is", "are_all": "is"}  # where one value is asked for, and of its type without "s"
PLURAL = {"some": "Some", "are": "are", "are_all": "are all"}
ROOM = 128  # tokens that RULER lets a model say
DRAWN = "drawn"
DEPTHS = np.round(np.linspace(0, 100, num=40)).astype(int)  # of which RULER draws those of needles in a text
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
    """What needles lie in, "noise", "text" or "needles"; what they tell, of which key: "words", "number", "uuid"; how
    many keys they have, how many values each of these, and of how many keys a question asks for the values."""

    haystack: str
    key: str
    value: str
    keys: int = 1
    values: int = 1
    queries: int = 1


KINDS = {
    "single_1": Kind("noise", "words", "number"),
    "single_2": Kind("text", "words", "number"),
    "single_3": Kind("text", "words", "uuid"),
    "multikey_1": Kind("text", "words", "number", keys=4),
    "multikey_2": Kind("needles", "words", "number"),
    "multikey_3": Kind("needles", "uuid", "uuid"),
    "multivalue": Kind("text", "words", "number", values=4),
    "multiquery": Kind("text", "words", "number", keys=4, queries=4),
}


class Prompt(NamedTuple):
    """A question with its answer, tokens [T] int32 and text; tokens[start:] are the answer, which text ends with.

    question: the text without the answer, after which a model is to speak; answer: what text has beyond it. answers:
    the values asked for, and their depths, percent (none where they were left out)."""

    tokens: np.ndarray
    start: int
    text: str
    question: str = ""
    answer: str = ""
    answers: tuple[str, ...] = ()
    depths: tuple[float, ...] = ()


class Question(NamedTuple):
    """Keys, the first of which are asked for, the values of each, and the depths [keys * values], drawn."""

    keys: list[str]
    values: list[list[str]]
    depths: list[float]


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
    room: tokens that are left for the model's words. Raises ValueError for an unknown kind, a negative seed or room,
    too few words, and a text that is missing or not wanted.
    """

    def __init__(
        self, kind: str, encode: Callable[[str], Sequence[int]], text: str = "", *, bos: int = -1, seed: int = 0,
        words: tuple[Sequence[str], Sequence[str]] = (ADJECTIVES, NOUNS), room: int = ROOM,
    ):  # fmt: skip
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
        for name, number in (("seed", seed), ("room", room)):
            if number < 0:
                raise ValueError(f"{name}={number} is negative; give 0 or more")
        self._kind, self._encode, self._bos, self._seed, self._words = KINDS[kind], encode, bos, seed, words
        self._room = room
        if bool(text.strip()) != (self._kind.haystack == "text"):
            wants = "hides its needle in a text: give a haystack" if not text.strip() else "has its own: leave it out"
            raise ValueError(f"haystack: kind={kind!r} {wants}")
        pairs = len(words[0]) * len(words[1])
        if self._kind.key == "words" and pairs <= self._kind.keys:
            raise ValueError(f"words: {pairs} pairs are too few for the keys of kind={kind!r}; give longer lists")
        self._text = " ".join(text.split())
        self._lines: list[str] = []  # distractors of the question with the index _lines_of
        self._lines_of = -1

    def prompt(self, length: int, depth: int | float | str | None = DRAWN, index: int = 0) -> Prompt:
        """Question `index`, with as much of the haystack as has room.

        depth: percent of the haystack that stands before what is asked for, or, where that is several values, before
        the first of them; the depths of the rest, and with "drawn" of all, are drawn. None: without what is asked for.
        Raises ValueError if nothing of the haystack fits into `length`, and if the haystack does not fill it."""
        if isinstance(depth, str) and depth != DRAWN:
            raise ValueError(f"depth={depth!r} must be a number, {DRAWN!r} or None")
        if depth is not None and not isinstance(depth, str) and not 0 <= depth <= 100:
            raise ValueError(f"depth={depth} must lie between 0 and 100, percent of the haystack")
        question = self._question(index)
        needles, answers = self._needles(question, depth)
        said = f" {enumerated([value for _, value in answers])}"
        budget = length - self._room

        @lru_cache(maxsize=2)  # the last two counts that are tried are those on both sides of the length
        def ids_of(count: int) -> np.ndarray:
            return self._ids(self._prompt(question, count, needles, index) + said)

        def size(count: int) -> int:
            return len(ids_of(count))

        count = self._count(size, budget, length, index)
        if not count:
            raise ValueError(f"length={length} has no room for a sentence of the haystack beside the question and its "
                             f"{self._room} tokens to answer in; give a longer one")  # fmt: skip
        text = self._prompt(question, count, needles, index)
        both, alone = ids_of(count), self._ids(text)
        least = min(len(both), len(alone))
        differs = both[:least] != alone[:least]  # a tokenizer may join the prompt's last word and what follows
        start = int(np.argmax(differs)) if differs.any() else least
        depths = () if depth is None else tuple(place for place, _ in answers)
        return Prompt(both, start, text + said, text, said, tuple(value for _, value in answers), depths)

    def _draw(self, rng: np.random.Generator, of: str) -> str:
        if of == "words":
            return "-".join(words[int(rng.integers(len(words)))] for words in self._words)
        if of == "number":
            return str(rng.integers(10**6, 10**7))
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))

    def _question(self, index: int) -> Question:
        rng, kind = np.random.default_rng((self._seed, index)), self._kind
        keys: list[str] = []
        values: list[list[str]] = []
        taken: set[str] = set()
        while len(keys) < kind.keys:
            key, told = self._draw(rng, kind.key), [self._draw(rng, kind.value) for _ in range(kind.values)]
            fresh = {key, *told}
            if len(fresh) == 1 + len(told) and not fresh & taken and not any(word in self._text for word in fresh):
                keys.append(key)
                values.append(told)
                taken |= fresh
        places = np.random.default_rng((self._seed, index, 1))
        drawn = places.permutation(DEPTHS) if kind.haystack == "text" else 100 * places.random(len(DEPTHS))
        return Question(keys, values, [float(place) for place in drawn[: kind.keys * kind.values]])

    def _needles(
        self, question: Question, depth: int | float | str | None
    ) -> tuple[list[tuple[float, str]], list[tuple[float, str]]]:
        """(depth, sentence) of each needle, and (depth, value) of each value that is asked for."""
        kind, needles, answers = self._kind, [], []
        pairs = [(which, value) for which, told in enumerate(question.values) for value in told]
        for number, ((which, value), place) in enumerate(zip(pairs, question.depths, strict=True)):
            if number == 0 and isinstance(depth, int | float):
                place = float(depth)
            if which < kind.queries:
                answers.append((place, value))
            if which >= kind.queries or depth is not None:
                needles.append((place, self._sentence(question.keys[which], value)))
        # Values of one key are told in the order in which they stand.
        return needles, sorted(answers) if kind.values > 1 else answers

    def _sentence(self, key: str, value: str) -> str:
        return NEEDLE.format(type=self._kind.value, key=key, value=value)

    @cached_property
    def _sentences(self) -> list[str]:
        return SENTENCE_END.split(self._text)

    def _haystack(self, count: int, index: int) -> list[str]:
        """Its first `count` sentences or lines."""
        kind = self._kind
        if kind.haystack == "text":
            return self._sentences[:count]
        if kind.haystack == "noise":
            return [NOISE] * count
        if self._lines_of != index:
            self._lines, self._lines_of = [], index
            self._lines_rng, self._asked = np.random.default_rng((self._seed, index, 2)), self._question(index)
        taken = {*self._asked.keys, *self._asked.values[0]}
        while len(self._lines) < count:
            key, value = self._draw(self._lines_rng, kind.key), self._draw(self._lines_rng, kind.value)
            if key not in taken and value not in taken:
                self._lines.append(self._sentence(key, value))
        return self._lines[:count]

    @cached_property
    def _ends(self) -> np.ndarray:
        """Tokens of the first sentence, of the first two, ..., each as it stands behind another."""
        alone = len(self._encode("."))
        return np.cumsum([len(self._encode(f". {sentence}")) - alone for sentence in self._sentences])

    def _count(self, size: Callable[[int], int], budget: int, length: int, index: int) -> int:
        """How many sentences fit: size(count) <= budget < size(count + 1)."""
        room = budget - size(0)
        if self._kind.haystack == "text":
            if room > self._ends[-1]:
                raise ValueError(f"haystack: its {self._ends[-1]} tokens do not fill length={length}; give a longer "
                                 "text")  # fmt: skip
            most, each = len(self._sentences), float(self._ends[-1]) / len(self._sentences)
            guess = int(np.searchsorted(self._ends, room, side="right"))
        else:
            some = self._haystack(16, index)
            most, each = max(room, 0), (size(16) - size(0)) / len(some)
            guess = int(room / each)
        return most_that_fits(size, budget, most, guess, each)

    def _prompt(self, question: Question, count: int, needles: Sequence[tuple[float, str]], index: int) -> str:
        kind, sentences = self._kind, self._haystack(count, index)
        for place, needle in sorted(needles, reverse=True):
            sentences.insert(int(count * place / 100), needle)
        one = kind.queries * kind.values == 1
        context = (" " if kind.haystack == "text" else "\n").join(sentences)
        type_, query = kind.value if one else f"{kind.value}s", enumerated(question.keys[: kind.queries])
        return TASK.format(type=type_, query=query, context=context, **(SINGULAR if one else PLURAL))

    def _ids(self, text: str) -> np.ndarray:
        first = [self._bos] if self._bos >= 0 else []
        return np.array([*first, *self._encode(text)], np.int32)


def enumerated(words: Sequence[str]) -> str:
    """Several as RULER asks for them, "a, b, and c"; one by itself."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, and {words[-1]}"


def most_that_fits(size: Callable[[int], int], budget: int, most: int, guess: int, each: float) -> int:
    """The count from 0 to `most` with size(count) <= budget < size(count + 1), where 0 is taken to fit.

    guess: where to begin; each: about what one of them adds to the size. What is put together may be tokenised to a few
    tokens more or fewer than its parts, so every count is measured as a whole."""
    low, high = 0, most + 1  # low fits, and high does not
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        left = budget - size(guess)
        low, high = (guess, high) if left >= 0 else (low, guess)
        guess += int(left / each)
    return low


def lay_out(prompts: Sequence[Prompt], length: int) -> dict[str, np.ndarray]:
    """A batch {"tokens" [B, length], "places", "targets", "mask" [B, A]}: what follows tokens[places] is targets, the
    answers' tokens, where mask is 1. Rows end in padding, which nothing before it sees."""
    most = max(len(prompt.tokens) - prompt.start for prompt in prompts)
    batch = {"tokens": np.zeros((len(prompts), length), np.int32), "places": np.zeros((len(prompts), most), np.int32)}
    batch |= {"targets": np.zeros_like(batch["places"]), "mask": np.zeros((len(prompts), most), np.float32)}
    for row, (tokens, start, *_) in enumerate(prompts):
        answer = len(tokens) - start
        batch["tokens"][row, : len(tokens)] = tokens
        batch["places"][row, :answer] = np.arange(start - 1, len(tokens) - 1)
        batch["targets"][row, :answer] = tokens[start:]
        batch["mask"][row, :answer] = 1
    return batch
