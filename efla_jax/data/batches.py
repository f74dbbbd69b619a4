"""Batches as a pure function of the step: a resumable iterator over an index-addressed grain dataset, and padding."""

from collections.abc import Iterator

import grain
import numpy as np

Batch = dict[str, np.ndarray]

# Batches are small next to a training step: a few ready ones suffice, and grain's default would keep 500.
READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)


def pad_batch(batch: Batch, size: int) -> Batch:
    """Appends zero rows (mask and segment ids 0) until every array has `size` rows, so that shapes are static."""
    missing = size - len(batch["mask"])
    return {k: np.pad(v, [(0, missing)] + [(0, 0)] * (v.ndim - 1)) for k, v in batch.items()} if missing else batch


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
