"""Selective copying: a few tokens scattered among noise, to be told in their order at the end of the row.

    task = SelectiveCopying(length=4096)                            # Mamba, arXiv 2312.00752
    tokens, targets = task.rows(64, 4096, np.random.default_rng(0), training=True)

The last `copies` tokens of a row are markers, whose targets are the tokens to copy, in order; those stand at places
drawn without replacement from all others, which hold noise. `length` counts the whole row, markers included.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from efla_jax.data.generated import GeneratedDataset, Task, check_whole, fields_of


@dataclass(frozen=True)
class SelectiveCopying(Task):
    """How many tokens of which ids are copied from rows of which length; examples 0: fresh rows at every step.

    copied, noise     first and last id of what is copied (each uniform, repeats allowed) and of what is not
    marker            id of the places that are answered
    longer_lengths    of rows that are scored once training has ended
    """

    vocab_size: int = 16
    length: int = 4096
    copies: int = 16
    copied: tuple[int, int] = (1, 14)
    noise: tuple[int, int] = (0, 0)
    marker: int = 15
    examples: int = 0
    test_examples: int = 1000
    longer_lengths: tuple[int, ...] = ()

    def __post_init__(self):
        least = {"vocab_size": 3, "length": 2, "copies": 1, "marker": 0, "examples": 0, "test_examples": 1}
        check_whole(self, least)
        for name in ("copied", "noise"):
            value = getattr(self, name)
            whole = isinstance(value, tuple) and len(value) == 2 and all(type(one) is int for one in value)
            if not whole or not 0 <= value[0] <= value[1] < self.vocab_size:
                raise ValueError(
                    f"{name}={value!r} must be the first and the last of some ids below vocab_size={self.vocab_size}"
                )
        if self.marker >= self.vocab_size:
            raise ValueError(f"marker={self.marker} must be below vocab_size={self.vocab_size}; enlarge the vocabulary")
        ids = [set(range(first, last + 1)) for first, last in (self.copied, self.noise)] + [{self.marker}]
        if len(set.union(*ids)) < sum(map(len, ids)):
            raise ValueError(
                f"copied={self.copied}, noise={self.noise} and marker={self.marker} must have no id in common, or a"
                " row does not say what to copy"
            )
        longer = self.longer_lengths
        if not isinstance(longer, tuple) or not all(type(one) is int for one in longer):
            raise ValueError(
                f"longer_lengths={longer!r} must be a tuple of whole numbers, such as (8192,); () for none"
            )
        for length in (self.length, *longer):
            if length < 2 * self.copies:
                raise ValueError(
                    f"length={length} must be at least 2 copies = {2 * self.copies}: room for what is copied and for"
                    " its markers"
                )

    @property
    def tests(self) -> Mapping[str, int]:
        return {str(self.length): self.length}

    @property
    def longer(self) -> Mapping[str, int]:
        return {str(length): length for length in self.longer_lengths}

    def rows(self, count: int, length: int, rng: np.random.Generator, training: bool) -> tuple[np.ndarray, np.ndarray]:
        """tokens and targets [count, length] int32 of fresh rows."""
        front, copies = length - self.copies, self.copies
        tokens = np.full((count, length), self.marker, np.int32)
        tokens[:, :front] = rng.integers(self.noise[0], self.noise[1] + 1, (count, front))
        copied = rng.integers(self.copied[0], self.copied[1] + 1, (count, copies)).astype(np.int32)
        # The places of the smallest of uniform numbers are a draw without replacement.
        places = np.sort(np.argpartition(rng.random((count, front)), copies - 1, axis=1)[:, :copies], axis=1)
        np.put_along_axis(tokens, places, copied, axis=1)
        targets = np.full((count, length), -1, np.int32)
        targets[:, front:] = copied
        return tokens, targets


def selective_copying_dataset(
    options: Mapping[str, Any], batch_size: int, eval_batch_size: int, seed: int, worker_count: int
) -> GeneratedDataset:
    """The dataset of a task with these fields. Raises ValueError for a name that is none, or values that do not fit."""
    task = fields_of(SelectiveCopying, options)
    return GeneratedDataset("selective_copying", task, batch_size, eval_batch_size, seed, worker_count)
