"""Batches as a pure function of the step: shuffled epochs, mixtures, a process's rows, a resumable iterator."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Protocol, runtime_checkable

import grain
import numpy as np

Batch = dict[str, np.ndarray]

# Batches are small next to a training step: a few ready ones suffice, and grain's default would keep 500.
READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)


def pad_batch(batch: Batch, size: int) -> Batch:
    """Appends zero rows (mask and segment ids 0) until every array has `size` rows, so that shapes are static."""
    missing = size - len(batch["mask"])
    return {k: np.pad(v, [(0, missing)] + [(0, 0)] * (v.ndim - 1)) for k, v in batch.items()} if missing else batch


@runtime_checkable
class Source(Protocol):
    """Random access to rows: dicts of arrays without the batch axis."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


def part_of_batch(rows: slice | None, batch_size: int) -> range:
    """The row numbers of a global batch that this process reads; None: all. Raises ValueError unless they exist."""
    if rows is None:
        return range(batch_size)
    start, stop = rows.start or 0, batch_size if rows.stop is None else rows.stop
    if not 0 <= start < stop <= batch_size or rows.step not in (None, 1):
        raise ValueError(f"rows={rows} must be a slice of step 1 and 0 <= start < stop <= {batch_size}, the batch")
    return range(start, stop)


def endless(source: Source, seed: int) -> grain.MapDataset:
    """Every item once per epoch, each epoch in its own order, a function of (seed, epoch)."""
    # Without a number of epochs grain's length is the largest index, which batches of one would round up beyond it.
    return grain.MapDataset.source(source).seed(seed).shuffle().repeat((1 << 62) // len(source))


class Mixture:
    """Endless rows of several sources: row i comes from source s with frequency weights[s], a function of (seed, i).

    Rows are dealt in blocks. Each block holds every source's share, the largest remainders rounded up, in an order
    drawn from (seed, block); the n-th row dealt to a source is the n-th of its shuffled epochs. So counts are within
    one block of the expected ones at any time, and a source that runs out begins its next epoch.
    """

    BLOCK = 1 << 14

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], seed: int):
        exact = np.asarray(weights, np.float64) / np.sum(weights) * self.BLOCK
        shares = np.floor(exact).astype(np.int64)
        shares[np.argsort(shares - exact, kind="stable")[: self.BLOCK - shares.sum()]] += 1
        if shares.min() == 0:
            raise ValueError(f"weights={tuple(weights)}: one is below 1/{self.BLOCK} of their sum, the smallest share "
                             "there is; give weights (by default they are sizes), or leave that source out")
        # Sources of equal length would otherwise be shuffled alike.
        seeds = [int(np.random.SeedSequence((seed, number)).generate_state(1)[0]) for number in range(len(sources))]
        self._rows = [endless(source, own) for source, own in zip(sources, seeds, strict=True)]
        self._shares, self._seed = shares, seed

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, index: int) -> Batch:
        block, place = divmod(int(index), self.BLOCK)
        order = dealt(tuple(self._shares.tolist()), self._seed, block)
        source = int(order[place])
        earlier = int(np.count_nonzero(order[:place] == source))
        return self._rows[source][block * int(self._shares[source]) + earlier]


@lru_cache(maxsize=8)
def dealt(shares: tuple[int, ...], seed: int, block: int) -> np.ndarray:
    """The source of each row of a block."""
    return np.random.default_rng((seed, block)).permutation(np.repeat(np.arange(len(shares)), shares))


class StepBatches:
    """Random-access source: item s stacks a process's rows of the global batch of step s."""

    def __init__(self, rows: Source, batch_size: int, part: range):
        self._rows, self._batch_size, self._part = rows, batch_size, part

    def __len__(self) -> int:
        return len(self._rows) // self._batch_size

    def __getitem__(self, step: int) -> Batch:
        items = [self._rows[int(step) * self._batch_size + row] for row in self._part]
        return {k: np.stack([item[k] for item in items]) for k in items[0]}


def step_batches(rows: Source, batch_size: int, part: slice | None = None) -> grain.MapDataset:
    """Batches [B, ...] of endless rows: batch s has rows s B ... (s + 1) B - 1, or the part of them asked for."""
    return grain.MapDataset.source(StepBatches(rows, batch_size, part_of_batch(part, batch_size)))


class BatchIterator(Iterator[Batch]):
    """Endless iterator whose batch at step s is batches[s], however it got there.

    The state is one integer and the fingerprint of the data, so neither the worker count nor the number of restarts
    changes what a step sees. `worker_count` > 0 reads in that many processes (guard the main module with
    `if __name__ == "__main__"` and parse absl flags first).
    """

    def __init__(self, batches: grain.MapDataset, fingerprint: str, start_step: int = 0, worker_count: int = 0):
        if worker_count < 0:
            raise ValueError(f"worker_count={worker_count} must be >= 0; 0 reads in this process")
        self._batches, self._fingerprint, self._worker_count = batches, fingerprint, worker_count
        self._iterator: grain.DatasetIterator | None = None
        self._seek(start_step)

    def _seek(self, step: int) -> None:
        if step < 0:
            raise ValueError(f"step={step} must be >= 0")
        self.close()
        self._next_step = step

    def __next__(self) -> Batch:
        if self._iterator is None:
            dataset = self._batches[self._next_step :].to_iter_dataset(READ_OPTIONS)
            if self._worker_count:
                dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=self._worker_count))
            self._iterator = iter(dataset)
        batch = next(self._iterator)
        self._next_step += 1
        return batch

    def get_state(self) -> dict[str, int | str]:
        """JSON-ready position: the step whose batch comes next, and the fingerprint of the data."""
        return {"next_step": self._next_step, "fingerprint": self._fingerprint}

    def set_state(self, state: dict[str, int | str]) -> None:
        """Continues at a saved position. Raises ValueError if it belongs to other data, seed, window or batch size."""
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(f"state has fingerprint={state['fingerprint']!r}, the data here {self._fingerprint!r}: "
                             "corpus, seed, window and batch size must be those of the saved run")
        self._seek(int(state["next_step"]))

    def close(self) -> None:
        """Stops reader threads and worker processes; the iterator can still be used."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None
