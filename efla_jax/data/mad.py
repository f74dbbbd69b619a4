"""The six tasks of MAD (mechanistic architecture design, arXiv 2403.17844): recall, copying, compression, memory.

    task = Mad(name="in_context_recall", vocab_size=16, length=128)
    tokens, targets = task.rows(1000, 128, np.random.default_rng(0), training=True)     # targets: -1 is none

in_context_recall    keys 0 ... V/2 - 1 and values V/2 ... V - 1 take turns. A key is drawn anew for every pair, its
                     value is the same all row long, and the last pair's key is one that was told. T = length - 1
noisy_recall         of V ids the last `noise_vocab_size` are noise; each pair but one is noise by `noise`'s chance
fuzzy_recall         keys and values are of 1 to `motif` distinct ids, held-out keys of `motif`; V - 1 fills rows up
                     from the left
selective_copying    `copies` ids among blanks (V - 2), the copy token (V - 1), then as many blanks as ids, where they
                     are asked for in order
compression          T - 1 ids and the token V - 1: all of them are to be told from the last state
memorization         keys, each followed by the token V - 1, where its value is asked for. Which value is a map that
                     never changes, of (V - 1) / 2 keys, which are the first ids

The three recall tasks train on every next token; held out, values of keys that were told before are scored, all tokens
of them. The last value of fuzzy_recall is scored in any case; 2 rows in 100 had not told it before, as in the published
code. The other tasks have the same targets in both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from efla_jax.data.generated import GeneratedDataset, Task, check_whole, fields_of

NONE = -1  # no target


@dataclass(frozen=True)
class Mad(Task):
    """Which of TASKS, its sizes, and what only some take: noise and noise_vocab_size (noisy_recall), motif
    (fuzzy_recall), copies (selective_copying), map_seed (memorization)."""

    name: str = "in_context_recall"
    vocab_size: int = 16
    length: int = 128
    examples: int = 12_800
    test_examples: int = 1280
    noise: float = 0.0
    noise_vocab_size: int = 0
    motif: int = 3
    copies: int = 16
    map_seed: int = 12345

    def __post_init__(self):
        if self.name not in TASKS:
            raise ValueError(f"name={self.name!r} must be one of {', '.join(TASKS)}")
        least = {"vocab_size": 4, "length": 4, "examples": 1, "test_examples": 1, "noise_vocab_size": 0, "motif": 1,
                 "copies": 1, "map_seed": 0}  # fmt: skip
        check_whole(self, least)
        noisy = self.name == "noisy_recall"
        if not 0 <= self.noise < 1 or bool(self.noise) != noisy or bool(self.noise_vocab_size) != noisy:
            raise ValueError(
                f"noise={self.noise} of noise_vocab_size={self.noise_vocab_size}: noisy_recall takes a probability"
                f" above 0 and below 1 and at least one id, name={self.name!r} 0 of both"
            )
        if self.vocab_size - self.noise_vocab_size < 4:
            raise ValueError(
                f"noise_vocab_size={self.noise_vocab_size} leaves no 4 of vocab_size={self.vocab_size} ids for keys and"
                " values; enlarge the vocabulary"
            )
        if self.name in ("in_context_recall", "memorization", "noisy_recall") and self.length % 2:
            raise ValueError(f"length={self.length} must be even, for {self.name} is made of pairs")
        self._check_room()

    def _check_room(self) -> None:
        keys = (self.vocab_size - 1) // 2
        if self.name == "fuzzy_recall" and (self.motif > keys or self.length < 5 * self.motif):
            raise ValueError(
                f"motif={self.motif} must be at most the {keys} keys of vocab_size={self.vocab_size}, and length="
                f"{self.length} at least {5 * self.motif}, room for the pair twice; shorten the motif"
            )
        if self.name == "selective_copying" and self.length <= 2 * self.copies + 1:
            raise ValueError(
                f"copies={self.copies} need length={self.length} to be above {2 * self.copies + 1}: twice the ids, the"
                " copy token and a blank; lengthen the row or copy fewer"
            )

    @property
    def reconstructs(self) -> bool:
        return self.name == "compression"

    @property
    def tests(self) -> Mapping[str, int]:
        return {self.name: self.length}

    @property
    def classwise(self) -> bool:
        return True

    def rows(self, count: int, length: int, rng: np.random.Generator, training: bool) -> tuple[np.ndarray, np.ndarray]:
        """tokens and targets [count, T] int32 of fresh rows, T = length, for the first two tasks length - 1."""
        return TASKS[self.name](self, count, length, rng, training)


def shifted(told: np.ndarray, asked: np.ndarray, training: bool) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and next tokens of rows that are one token longer; held out, of next tokens only those `asked` for."""
    after = told[:, 1:]
    return told[:, :-1].copy(), after.copy() if training else np.where(asked[:, 1:], after, NONE).astype(np.int32)


def recall(task: Mad, count: int, length: int, rng, training: bool) -> tuple[np.ndarray, np.ndarray]:
    """In-context recall, with noise if the task has some."""
    ids, row = task.vocab_size - task.noise_vocab_size, np.arange(count)[:, None]
    known, slots = ids // 2, length // 2 - 1
    keys = rng.integers(known, size=(count, slots))
    value_of = rng.integers(known, ids, size=(count, known))
    noisy = rng.random((count, slots)) < task.noise
    noisy[row[:, 0], rng.integers(slots, size=count)] = False  # at least one pair
    first = np.full((count, known), slots)  # the slot in which a key is told for the first time
    for slot in reversed(range(slots)):
        tells = ~noisy[:, slot]
        first[tells, keys[tells, slot]] = slot
    probe = np.argmax(np.where(first < slots, rng.random((count, known)), -1.0), axis=1)
    pairs = np.stack([keys, np.take_along_axis(value_of, keys, 1)], axis=-1)
    if task.noise:
        pairs = np.where(noisy[..., None], rng.integers(ids, task.vocab_size, size=pairs.shape), pairs)
    last = np.stack([probe, value_of[row[:, 0], probe]], axis=-1)[:, None]
    told = np.concatenate([pairs, last], axis=1).reshape(count, length).astype(np.int32)
    again = np.concatenate([~noisy & (first[row, keys] < np.arange(slots)), np.ones((count, 1), bool)], axis=1)
    return shifted(told, np.stack([np.zeros_like(again), again], axis=-1).reshape(count, length), training)


def motifs(rng, shape: tuple[int, ...], low: int, high: int, size: int) -> np.ndarray:
    """[*shape, size] distinct ids in [low, high), every order of them as likely as any other."""
    out = np.empty((*shape, 0), np.int64)
    for taken in range(size):
        one = rng.integers(low, high - taken, size=shape)
        for other in np.moveaxis(np.sort(out, axis=-1), -1, 0):  # step over those that are taken
            one += one >= other
        out = np.concatenate([out, one[..., None]], axis=-1)
    return out


def fuzzy_recall(task: Mad, count: int, length: int, rng, training: bool) -> tuple[np.ndarray, np.ndarray]:
    """Recall of keys and values of several ids each."""
    ids, size = task.vocab_size - 1, task.motif
    draws = 1 + length // (2 if training else size + 1)  # the first is the pair that the row ends with
    keys, values = motifs(rng, (count, draws), 0, ids // 2, size), motifs(rng, (count, draws), ids // 2, ids, size)
    wide = rng.integers(1, size + 1, size=(2, count, draws))
    wide[0] = wide[0] if training else size
    places = rng.random(count)
    told = np.full((count, length + 1), ids, np.int32)
    asked = np.zeros_like(told, bool)
    for row in range(count):
        pairs = [(tuple(key[:a]), tuple(value[:b])) for key, value, a, b in
                 zip(keys[row].tolist(), values[row].tolist(), *wide[:, row].tolist(), strict=True)]  # fmt: skip
        tokens, scored = fuzzy_row(pairs, length, size, places[row])
        told[row, length + 1 - len(tokens) :] = tokens
        asked[row, length + 1 - len(tokens) :] = scored
    return shifted(told, asked, training)


def fuzzy_row(pairs: list, length: int, size: int, place: float) -> tuple[list[int], list[bool]]:
    """The tokens of a row and which are asked for. The probe, pairs[0], is put in once the row reaches a random place,
    unless it has come by itself, and ends the row."""
    probe, value = pairs[0]
    room = len(probe) + len(value)
    place = int(place * (length - 2 * room))
    value_of, told, others = {probe: value}, set[tuple](), iter(pairs[1:])
    tokens: list[int] = []
    scored: list[bool] = []
    while len(tokens) < length - room - 2 * size:
        key, fresh = (probe, value) if len(tokens) >= place and probe not in told else next(others)
        written = value_of.setdefault(key, fresh)
        tokens += key + written
        scored += [False] * len(key) + [key in told] * len(written)
        told.add(key)
    return [*tokens, *probe, *value], [*scored, *[False] * len(probe), *[True] * len(value)]


def selective_copying(task: Mad, count: int, length: int, rng, training: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids among blanks, none of them behind the last id, and their copy."""
    copies, blank = task.copies, task.vocab_size - 2
    ids = rng.integers(blank, size=(count, copies)).astype(np.int32)
    gaps = rng.multinomial(length - 2 * copies - 1, [1 / copies] * copies, size=count)  # in front of each id
    tokens = np.full((count, length), blank, np.int32)
    np.put_along_axis(tokens, np.cumsum(gaps, axis=1) + np.arange(copies), ids, 1)
    tokens[:, length - copies - 1] = task.vocab_size - 1
    targets = np.full_like(tokens, NONE)
    targets[:, -copies:] = ids
    return tokens, targets


def compression(task: Mad, count: int, length: int, rng, training: bool) -> tuple[np.ndarray, np.ndarray]:
    """Uniform ids and a last token that is always the same."""
    tokens = rng.integers(task.vocab_size - 1, size=(count, length)).astype(np.int32)
    tokens[:, -1] = task.vocab_size - 1
    return tokens, tokens.copy()


def value_map(vocab_size: int, seed: int) -> np.ndarray:
    """The value of each key of memorization, one to one."""
    rng, half = np.random.default_rng(seed), (vocab_size - 1) // 2
    keys, values = list(range(half)), list(range(half, vocab_size - 1))
    rng.shuffle(keys)
    rng.shuffle(values)
    value_of = np.empty(half, np.int32)
    value_of[keys] = values[:half]
    return value_of


def memorization(task: Mad, count: int, length: int, rng, training: bool) -> tuple[np.ndarray, np.ndarray]:
    """Keys and the token behind each that asks for its value."""
    value_of = value_map(task.vocab_size, task.map_seed)
    keys = rng.integers(len(value_of), size=(count, length // 2))
    asks = np.full_like(keys, task.vocab_size - 1)
    tokens = np.stack([keys, asks], axis=-1).reshape(count, -1)
    targets = np.stack([np.full_like(keys, NONE), value_of[keys]], axis=-1).reshape(count, -1)
    return tokens.astype(np.int32), targets.astype(np.int32)


TASKS = {
    "compression": compression,
    "fuzzy_recall": fuzzy_recall,
    "in_context_recall": recall,
    "memorization": memorization,
    "noisy_recall": recall,
    "selective_copying": selective_copying,
}


def mad_dataset(
    options: Mapping[str, Any], batch_size: int, eval_batch_size: int, seed: int, worker_count: int
) -> GeneratedDataset:
    """The dataset of a task with these fields. Raises ValueError for a name that is none, or values that do not fit."""
    return GeneratedDataset("mad", fields_of(Mad, options), batch_size, eval_batch_size, seed, worker_count)
