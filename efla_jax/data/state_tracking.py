"""State tracking: the running product of a group's elements, which a recurrence has to keep (arXiv 2411.12537).

    task = StateTracking(group="parity", length=40, longer_lengths=(64, 256))
    tokens, targets = task.rows(1000, 40, np.random.default_rng(0), training=True)

    s_0 = 1;   s_t = g_t s_{t-1};   token t is g_t, uniform; its target is s_t

"parity" is the group of two elements, so the target is whether the ones so far are odd in number; "S3" are the 6
permutations of three things and "A5" the 60 even ones of five, the smallest group that is not solvable. A transition
that only shrinks, as exp(-x) >= 0 does, cannot tell odd from even beyond a bounded length; one with eigenvalue -1 can.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from efla_jax.data.generated import GeneratedDataset, Task, check_whole, fields_of

GROUPS = {"parity": 2, "S3": 6, "A5": 60}
POINTS = {"parity": 2, "S3": 3, "A5": 5}  # what the permutations move


@dataclass(frozen=True)
class StateTracking(Task):
    """Which of GROUPS, and rows of which length; examples 0: fresh ones at every step.

    test_lengths      of held-out rows; (): the training length
    longer_lengths    of those that are scored once training has ended
    """

    group: str = "parity"
    length: int = 40
    examples: int = 0
    test_lengths: tuple[int, ...] = ()
    longer_lengths: tuple[int, ...] = (64, 256)
    test_examples: int = 1000

    def __post_init__(self):
        if self.group not in GROUPS:
            raise ValueError(f"group={self.group!r} must be one of {', '.join(GROUPS)}")
        check_whole(self, {"length": 1, "examples": 0, "test_examples": 1})
        for name in ("test_lengths", "longer_lengths"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(type(one) is int and one >= 1 for one in value):
                raise ValueError(
                    f"{name}={value!r} must be a tuple of whole numbers >= 1, such as (64, 256); () for none"
                )

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return GROUPS[self.group]

    @property
    def tests(self) -> Mapping[str, int]:
        return {str(length): length for length in self.test_lengths or (self.length,)}

    @property
    def longer(self) -> Mapping[str, int]:
        return {str(length): length for length in self.longer_lengths}

    def rows(self, count: int, length: int, rng: np.random.Generator, training: bool) -> tuple[np.ndarray, np.ndarray]:
        """tokens and targets [count, length] int32 of fresh rows."""
        table = products(self.group)
        tokens = rng.integers(len(table), size=(count, length)).astype(np.int32)
        targets = np.empty_like(tokens)
        state = np.zeros(count, np.int32)
        for t in range(length):
            state = targets[:, t] = table[tokens[:, t], state]
        return tokens, targets


@lru_cache(maxsize=4)
def products(group: str) -> np.ndarray:
    """[g, s] -> the number of the element g s (first s, then g); 0 is the unit."""
    elements = [p for p in itertools.permutations(range(POINTS[group])) if group != "A5" or is_even(p)]
    number = {p: i for i, p in enumerate(elements)}
    rows = [[number[tuple(g[point] for point in s)] for s in elements] for g in elements]
    return np.array(rows, np.int32)


def is_even(permutation: tuple[int, ...]) -> bool:
    """Whether an even number of pairs stand in the wrong order."""
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0


def state_tracking_dataset(
    options: Mapping[str, Any], batch_size: int, eval_batch_size: int, seed: int, worker_count: int
) -> GeneratedDataset:
    """The dataset of a task with these fields. Raises ValueError for a name that is none, or values that do not fit."""
    task = fields_of(StateTracking, options)
    return GeneratedDataset("state_tracking", task, batch_size, eval_batch_size, seed, worker_count)
