"""Multi-query associative recall (MQAR): key-value pairs to remember, then keys whose values are asked for.

    task = Recall(length=64, pairs=4)                               # arXiv 2312.04927
    tokens, targets = task.rows(Size(64, 4), 1000, np.random.default_rng(0))

A row begins with `pairs` distinct keys, each followed by its own value. Every key comes once more, and the target there
is its value; no other position has a target (0). Keys are 1 ... V/2 - 1, values V/2 ... V - 1, 0 is blank.
"""

import difflib
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import grain
import numpy as np

from efla_jax.data.batches import Batch, BatchIterator, pad_batch, part_of_batch

LAYOUTS = ("scattered", "packed")
BLOCK = 1000  # rows drawn from one generator, so that a larger set begins with a smaller one
TRAIN, TEST, ORDER = range(3)  # streams of random numbers that never meet
Numbers = int | tuple[int, ...]


class Size(NamedTuple):
    """Tokens and key-value pairs of a row."""

    length: int
    pairs: int

    def __str__(self) -> str:
        return f"{self.length}x{self.pairs}"


@dataclass(frozen=True)
class Recall:
    """What rows look like and how many there are. length, pairs and examples: one number, or one per training size.

    layout     "scattered" (zoology): behind the pairs are (length - 2 passes pairs) / 2 slots of two tokens; key after
               key draws one that is free, slot g with weight (g + 1)^(power - 1): near 0 most queries come early, 1
               is uniform. "packed" (adaptive memory decay): the queries are the end of the row, in random order
    answers    the token behind a query is its value; otherwise it is as any unused position
    fill       unused positions hold random tokens, which may be keys and values; otherwise blanks
    passes     how often the pairs are told
    examples   training rows of a size; 0: fresh ones at every step
    test_length, test_pairs    sizes of the held-out rows, test_examples of each; 0: those of training
    longer     lengths, with the test's pairs, that are scored once training has ended
    shuffle    rows of a size, and batches of all sizes, in an order of (seed, epoch); otherwise size after size
    """

    layout: str = "scattered"
    vocab_size: int = 8192
    length: Numbers = 64
    pairs: Numbers = 4
    examples: Numbers = 100_000
    test_length: Numbers = 0
    test_pairs: Numbers = 0
    test_examples: int = 1000
    longer: tuple[int, ...] = ()
    passes: int = 1
    power: float = 0.01
    fill: bool = True
    answers: bool = False
    shuffle: bool = True

    def __post_init__(self):
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r} must be one of {', '.join(LAYOUTS)}")
        if not isinstance(self.longer, tuple):
            raise ValueError(f"longer={self.longer!r} must be a tuple of lengths, such as (512,); () for none")
        for name in ("length", "pairs", "examples", "test_length", "test_pairs", "longer"):
            value = getattr(self, name)
            if not all(type(one) is int for one in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"{name}={value!r} must be whole numbers")
        for name, least in (("vocab_size", 4), ("test_examples", 1), ("passes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be >= {least}")
        if not self.power > 0:
            raise ValueError(f"power={self.power} must be > 0; 1 asks at uniform places, 0.01 early in the row")
        if min(self.examples_of_sizes) < 0 or len(set(map(bool, self.examples_of_sizes))) > 1:
            raise ValueError(f"examples={self.examples} must be >= 1 for every size, or 0 for all: fresh rows")
        for size in {*self.train_sizes, *self.test_sizes, *self.longer_sizes}:
            self._check(size)

    def _check(self, size: Size) -> None:
        length, pairs = size
        half, told = self.vocab_size // 2, 2 * self.passes * pairs
        if pairs < 1 or pairs >= half:
            raise ValueError(f"pairs={pairs} must lie between 1 and the {half - 1} keys of vocab_size="
                             f"{self.vocab_size}; enlarge the vocabulary or take fewer")
        if length % 2 or told + 2 * pairs > length:
            raise ValueError(f"length={length} must be even and at least {told + 2 * pairs}, room for {pairs} pairs "
                             f"told {self.passes} times and asked for once; lengthen it or take fewer pairs")
        if self.layout == "scattered" and self.vocab_size <= length:
            raise ValueError(f"vocab_size={self.vocab_size} must exceed length={length}: too many random tokens would "
                             "be keys of the row; enlarge the vocabulary")

    @property
    def train_sizes(self) -> tuple[Size, ...]:
        return tuple(Size(length, pairs) for length, pairs, _ in self._training())

    @property
    def examples_of_sizes(self) -> tuple[int, ...]:
        return tuple(examples for *_, examples in self._training())

    @property
    def test_sizes(self) -> tuple[Size, ...]:
        if not self.test_length and not self.test_pairs:
            return tuple(dict.fromkeys(self.train_sizes))
        lengths, pairs = self.test_length or self.length, self.test_pairs or self.pairs
        return tuple(Size(*row) for row in together({"test_length": lengths, "test_pairs": pairs}))

    @property
    def longer_sizes(self) -> tuple[Size, ...]:
        pairs = dict.fromkeys(size.pairs for size in self.test_sizes)
        return tuple(Size(length, count) for length in self.longer for count in pairs)

    def _training(self) -> list[tuple[int, ...]]:
        return together({"length": self.length, "pairs": self.pairs, "examples": self.examples})

    def rows(self, size: Size, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """tokens and targets [count, length] int32 of fresh rows."""
        (length, pairs), half = size, self.vocab_size // 2
        keys = 1 + draw(rng, count, half - 1, pairs)
        values = half + draw(rng, count, self.vocab_size - half, pairs)
        told = np.tile(np.stack([keys, values], -1).reshape(count, -1), self.passes)
        packed = self.layout == "packed"
        start = length - 2 * pairs if packed else told.shape[1]
        slots = (length - start) // 2
        weights = np.arange(1, slots + 1) ** (0.0 if packed else self.power - 1)
        # Who arrives first at rates `weights`: the order of successive draws without replacement.
        arrival = rng.exponential(size=(count, slots)) / weights
        places = start + 2 * np.argsort(arrival, axis=1)[:, :pairs]
        tokens = np.zeros((count, length), np.int32)
        targets = np.zeros_like(tokens)
        tokens[:, : told.shape[1]] = told
        np.put_along_axis(tokens, places, keys, 1)
        np.put_along_axis(targets, places, values, 1)
        if self.answers:
            np.put_along_axis(tokens, places + 1, values, 1)
        if self.fill:
            blank = tokens == 0
            tokens[blank] = rng.integers(int(packed), self.vocab_size, int(blank.sum()))
        return tokens, targets

    def fixed_rows(self, size: Size, count: int, stream: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The first `count` rows of a set: row i is a function of (stream, i)."""
        blocks = [self.rows(size, BLOCK, np.random.default_rng((*stream, *size, block)))
                  for block in range(-(-count // BLOCK))]
        tokens, targets = (np.concatenate(parts)[:count] for parts in zip(*blocks, strict=True))
        return tokens, targets


def recall(options: Mapping[str, Any]) -> Recall:
    """A Recall of these fields. Raises ValueError for a name that is none, and for values that do not fit."""
    known = [field.name for field in fields(Recall)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"task.{name}: no such field of recall."
                             f"{f' Did you mean {near[0]!r}?' if near else ''} Known: {', '.join(known)}")
    chosen: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
    return Recall(**chosen)


def together(columns: Mapping[str, Numbers]) -> list[tuple[int, ...]]:
    """The rows of columns that are tuples of equal lengths, or one number for all rows."""
    tall = {name: len(column) for name, column in columns.items() if isinstance(column, tuple)}
    if len(set(tall.values())) > 1 or 0 in tall.values():
        named = ", ".join(f"{name}={columns[name]}" for name in tall)
        raise ValueError(f"{named} must have one number each, or equally many: one for every size")
    height = max(tall.values(), default=1)
    return list(zip(*(c if isinstance(c, tuple) else (c,) * height for c in columns.values()), strict=True))


def draw(rng: np.random.Generator, rows: int, choices: int, count: int) -> np.ndarray:
    """[rows, count] distinct numbers below `choices`, in random order: the first swaps of a shuffle of each row."""
    deck = np.tile(np.arange(choices, dtype=np.int32), (rows, 1))
    row = np.arange(rows)
    for place in range(count):
        other = rng.integers(place, choices, rows)
        deck[row, place], deck[row, other] = deck[row, other], deck[row, place]
    return deck[:, :count]


def as_batch(tokens: np.ndarray, targets: np.ndarray) -> Batch:
    """The arrays of a language-model batch whose rows are one document each."""
    return {"tokens": tokens, "targets": targets, "mask": (targets > 0).astype(np.float32)}


@lru_cache(maxsize=4)
def epoch_order(counts: tuple[int, ...], batch_size: int, seed: int, epoch: int, shuffle: bool):
    """(rows of each size in their order, [batches, 2] the size of each batch and its number among that size's)."""
    rng = np.random.default_rng((ORDER, seed, epoch))
    rows = [rng.permutation(count) if shuffle else np.arange(count) for count in counts]
    batches = [(size, number) for size, count in enumerate(counts) for number in range(-(-count // batch_size))]
    return rows, rng.permutation(batches) if shuffle else np.array(batches)


class FixedBatches:
    """Random access to the batches of endless epochs; the last batch of a size in an epoch is padded with mask 0."""

    def __init__(self, sets, batch_size: int, seed: int, shuffle: bool, part: range):
        self._sets, self._counts = sets, tuple(len(tokens) for tokens, _ in sets)
        self._batch_size, self._seed, self._shuffle, self._part = batch_size, seed, shuffle, part

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, step: int) -> Batch:
        size = self._batch_size
        epoch, place = divmod(int(step), sum(-(-count // size) for count in self._counts))
        rows, batches = epoch_order(self._counts, size, self._seed, epoch, self._shuffle)
        which, number = batches[place]
        chosen = rows[which][number * size : (number + 1) * size][self._part.start : self._part.stop]
        tokens, targets = self._sets[which]
        return pad_batch(as_batch(tokens[chosen], targets[chosen]), len(self._part))


class FreshBatches:
    """Random access to batches whose rows occur in no other; sizes take turns."""

    def __init__(self, task: Recall, batch_size: int, seed: int, part: range):
        self._task, self._batch_size, self._seed, self._part = task, batch_size, seed, part

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, step: int) -> Batch:
        sizes = self._task.train_sizes
        size, rng = sizes[int(step) % len(sizes)], np.random.default_rng((TRAIN, self._seed, int(step)))
        tokens, targets = self._task.rows(size, self._batch_size, rng)
        return as_batch(tokens[self._part.start : self._part.stop], targets[self._part.start : self._part.stop])


class RecallDataset:
    """Associative recall with splits "train" and "test"; `length` is the mean of the training batches' lengths.

    Held-out rows of a seed are the same whatever is trained on; their `slices` are told apart by length and pairs."""

    kind = "recall"
    bytes_per_token = 0.0
    tokenizer_hash = ""

    def __init__(self, options: Mapping[str, Any], batch_size: int, eval_batch_size: int, seed: int, worker_count: int):
        self.task = task = recall(options)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be >= 1")
        self._batch_size, self._eval_batch_size = batch_size, eval_batch_size or batch_size
        self._seed, self._worker_count, self.vocab_size = seed, worker_count, task.vocab_size
        batches = [-(-examples // batch_size) for examples in task.examples_of_sizes]
        self.steps_per_epoch = sum(batches)
        self.lengths = tuple(size.length for size in task.train_sizes)
        self.length = round(float(np.average(self.lengths, weights=batches if self.steps_per_epoch else None)))
        self._tests: dict[Size, tuple[np.ndarray, np.ndarray]] = {}

    def train_iterator(self, start_step: int = 0, rows: slice | None = None) -> BatchIterator:
        """Endless iterator whose first batch is that of `start_step`; rows: the part of each batch to read."""
        task, part = self.task, part_of_batch(rows, self._batch_size)
        source: FixedBatches | FreshBatches
        if self.steps_per_epoch:
            sizes = enumerate(zip(task.train_sizes, task.examples_of_sizes, strict=True))
            sets = [task.fixed_rows(size, count, (TRAIN, self._seed, number)) for number, (size, count) in sizes]
            source = FixedBatches(sets, self._batch_size, self._seed, task.shuffle, part)
        else:
            source = FreshBatches(task, self._batch_size, self._seed, part)
        mark = hashlib.sha256(repr((task, self._batch_size, self._seed)).encode()).hexdigest()[:16]
        return BatchIterator(grain.MapDataset.source(source), mark, start_step, self._worker_count)

    def slices(self, split: str = "test") -> dict[str, Iterator[Batch]]:
        """The held-out batches of each size, named as in "128x8": those of the "test", or of "longer" rows."""
        if split not in ("test", "longer"):
            raise ValueError(f"split={split!r} must be test or longer")
        sizes = self.task.test_sizes if split == "test" else self.task.longer_sizes
        return {str(size): self._batches(size) for size in sizes}

    def eval_batches(self, split: str = "test") -> Iterator[Batch]:
        """Every row of a split once, size after size; padding has mask 0."""
        return itertools.chain.from_iterable(self.slices(split).values())

    def _batches(self, size: Size) -> Iterator[Batch]:
        if size not in self._tests:
            self._tests[size] = self.task.fixed_rows(size, self.task.test_examples, (TEST, self._seed))
        tokens, targets = self._tests[size]
        for start in range(0, len(tokens), self._eval_batch_size):
            chosen = slice(start, start + self._eval_batch_size)
            yield pad_batch(as_batch(tokens[chosen], targets[chosen]), self._eval_batch_size)

    def describe(self) -> dict[str, int | float | str]:
        """Plain numbers for logs."""
        task = self.task
        trained = ", ".join(f"{size} ({count or 'fresh'})" for size, count in
                            zip(task.train_sizes, task.examples_of_sizes, strict=True))
        tested, longer = (", ".join(map(str, sizes)) or "none" for sizes in (task.test_sizes, task.longer_sizes))
        return {"kind": self.kind, "layout": task.layout, "train": trained, "test": tested, "longer": longer,
                "test_examples": task.test_examples, "vocab_size": self.vocab_size,
                "steps_per_epoch": self.steps_per_epoch}
