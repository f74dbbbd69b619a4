"""Datasets of generated rows: fixed training rows or fresh ones, and held-out rows of one or more lengths.

    dataset = GeneratedDataset("state_tracking", StateTracking(length=40), batch_size=64)

A task says what rows are; which rows a batch has is a function of (seed, step).
"""

import difflib
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import grain
import numpy as np

from efla_jax.data.batches import Batch, BatchIterator, pad_batch, part_of_batch
from efla_jax.data.recall import BLOCK, TEST, TRAIN, epoch_order


class Task:
    """What a GeneratedDataset asks of a task, a frozen dataclass.

    length       of training rows, as `rows` is asked for them; they may have a token less
    examples     training rows; 0: fresh ones at every step
    test_examples    held-out rows of each length
    """

    vocab_size: int
    length: int
    examples: int
    test_examples: int

    @property
    def tests(self) -> Mapping[str, int]:
        """Lengths of the held-out rows by the name of the slice."""
        raise NotImplementedError

    @property
    def longer(self) -> Mapping[str, int]:
        """Those that are scored once training has ended."""
        return {}

    @property
    def classwise(self) -> bool:
        """Whether scores have the macro accuracy, too: the mean over classes."""
        return False

    @property
    def reconstructs(self) -> bool:
        """Whether targets are the row itself, which wants an autoencoder."""
        return False

    def rows(self, count: int, length: int, rng: np.random.Generator, training: bool) -> tuple[np.ndarray, np.ndarray]:
        """tokens and targets [count, T] int32 of fresh rows; a target of -1 is none."""
        raise NotImplementedError


def fields_of[T](kind: type[T], options: Mapping[str, Any]) -> T:
    """kind(**options). Raises ValueError for a name that is no field of that dataclass."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"task.{name}: no such field of {kind.__name__}."
                f"{f' Did you mean {near[0]!r}?' if near else ''} Known: {', '.join(known)}"
            )
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()})


def check_whole(task: Any, least: Mapping[str, int]) -> None:
    """Raises ValueError for a field that is not a whole number of at least so much."""
    for name, smallest in least.items():
        value = getattr(task, name)
        if type(value) is not int or value < smallest:
            raise ValueError(f"{name}={value!r} must be a whole number >= {smallest}")


def fixed_rows(task: Task, count: int, length: int, stream: tuple[int, ...], training: bool):
    """tokens and targets of the first `count` rows of a set: row i is a function of (stream, length, i)."""
    blocks = [
        task.rows(BLOCK, length, np.random.default_rng((*stream, length, block)), training)
        for block in range(-(-count // BLOCK))
    ]
    tokens, targets = (np.concatenate(parts)[:count] for parts in zip(*blocks, strict=True))
    return tokens, targets


def as_batch(tokens: np.ndarray, targets: np.ndarray) -> Batch:
    """The arrays of a language-model batch whose rows are one document each."""
    return {"tokens": tokens, "targets": np.maximum(targets, 0), "mask": (targets >= 0).astype(np.float32)}


class TaskBatches:
    """Random access to the training batches of endless epochs of fixed rows, the last of an epoch padded with mask 0;
    without fixed rows to batches that occur once."""

    def __init__(self, task: Task, batch_size: int, seed: int, part: range):
        self._task, self._batch_size, self._seed, self._part = task, batch_size, seed, part
        self._set = fixed_rows(task, task.examples, task.length, (TRAIN, seed), True) if task.examples else None

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, step: int) -> Batch:
        size, task, part = self._batch_size, self._task, self._part
        if self._set is None:
            rng = np.random.default_rng((TRAIN, self._seed, int(step)))
            tokens, targets = task.rows(size, task.length, rng, True)
            return as_batch(tokens[part.start : part.stop], targets[part.start : part.stop])
        epoch, place = divmod(int(step), -(-task.examples // size))
        (rows,), batches = epoch_order((task.examples,), size, self._seed, epoch, True)
        number = batches[place][1]
        chosen = rows[number * size : (number + 1) * size][part.start : part.stop]
        return pad_batch(as_batch(self._set[0][chosen], self._set[1][chosen]), len(part))


class GeneratedDataset:
    """Rows of a task with splits "train" and "test"; held-out rows of a seed do not depend on how many are trained on.

    length: T of the training batches, the first of all `lengths`; `slices`: held-out batches by name."""

    bytes_per_token = 0.0
    tokenizer_hash = ""

    def __init__(self, kind: str, task: Task, batch_size: int, eval_batch_size: int, seed: int, worker_count: int):
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be >= 1")
        self.kind, self.task, self.vocab_size = kind, task, task.vocab_size
        self.classwise, self.reconstructs = task.classwise, task.reconstructs
        asked = dict.fromkeys((task.length, *task.tests.values(), *task.longer.values()))
        self.lengths = tuple(task.rows(1, length, np.random.default_rng(0), True)[0].shape[1] for length in asked)
        self.length = self.lengths[0]
        self.steps_per_epoch = -(-task.examples // batch_size)
        self._batch_size, self._eval_batch_size = batch_size, eval_batch_size or batch_size
        self._seed, self._worker_count = seed, worker_count
        self._held: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def train_iterator(self, start_step: int = 0, rows: slice | None = None) -> BatchIterator:
        """Endless iterator whose first batch is that of `start_step`; rows: the part of each batch to read."""
        source = TaskBatches(self.task, self._batch_size, self._seed, part_of_batch(rows, self._batch_size))
        mark = hashlib.sha256(repr((self.task, self._batch_size, self._seed)).encode()).hexdigest()[:16]
        return BatchIterator(grain.MapDataset.source(source), mark, start_step, self._worker_count)

    def slices(self, split: str = "test") -> dict[str, Iterator[Batch]]:
        """The held-out batches of each length: those of the "test", or of "longer" rows."""
        if split not in ("test", "longer"):
            raise ValueError(f"split={split!r} must be test or longer")
        lengths = self.task.tests if split == "test" else self.task.longer
        return {name: self._batches(length) for name, length in lengths.items()}

    def eval_batches(self, split: str = "test") -> Iterator[Batch]:
        """Every row of a split once, length after length; padding has mask 0."""
        return itertools.chain.from_iterable(self.slices(split).values())

    def _batches(self, length: int) -> Iterator[Batch]:
        task, size = self.task, self._eval_batch_size
        if length not in self._held:
            self._held[length] = fixed_rows(task, task.test_examples, length, (TEST, self._seed), False)
        tokens, targets = self._held[length]
        for start in range(0, len(tokens), size):
            yield pad_batch(as_batch(tokens[start : start + size], targets[start : start + size]), size)

    def describe(self) -> dict[str, int | float | str]:
        """Plain numbers for logs."""
        task = self.task
        return {
            "kind": self.kind, "task": repr(task), "test": ", ".join(task.tests), "longer": ", ".join(task.longer)
            or "none", "vocab_size": self.vocab_size, "steps_per_epoch": self.steps_per_epoch,
        }  # fmt: skip
