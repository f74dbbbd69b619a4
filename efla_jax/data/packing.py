"""First-fit packing: whole documents in rows of a fixed length, planned once from the document offsets."""

from collections.abc import Sequence

import numpy as np

from efla_jax.data.batches import Batch
from efla_jax.data.text import Corpus

# Rows are open only for the pieces of their own block: a bounded search, at a small cost in fill.
BLOCK = 4096


def first_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece: the first with room for it. lengths [P] in 1 ... capacity; rows count from 0."""
    rows, base = np.empty(len(lengths), np.int64), 0
    for start in range(0, len(lengths), BLOCK):
        block = lengths[start : start + BLOCK]
        room, used = np.full(len(block), capacity), 0
        for place, length in enumerate(block.tolist(), start=start):
            row = int((room[: used + 1] >= length).argmax())  # the row after the last used one is empty: there is a fit
            room[row] -= length
            rows[place] = base + row
            used = max(used, row + 1)
        base += used
    return rows


class PackedRows:
    """Random-access source of rows of T (token, target) pairs, documents packed first-fit; items as of TokenWindows.

    A document of n tokens is n - 1 pairs, so a row holds neither the last token of a document as an input nor a target
    without its context. A document of more than T pairs is cut into pieces of T and a rest, and a piece starts without
    the past of the one before. Every target is in exactly one row; the fields of what is left free are 0.
    `fill` is the share of places that hold a pair. The plan is made at every start: seconds per million documents.
    """

    def __init__(self, corpora: Sequence[Corpus], window: int):
        if window < 1:
            raise ValueError(f"window={window} must be >= 1")
        pieces = [_pieces(np.asarray(corpus.offsets), window) for corpus in corpora]
        shards = np.repeat(np.arange(len(corpora)), [len(starts) for starts, _ in pieces])
        starts, lengths = (np.concatenate(part) for part in zip(*pieces, strict=True))
        rows = first_fit(lengths, window)
        order = np.argsort(rows, kind="stable")
        self._pieces = np.stack([shards, starts, lengths], axis=1)[order]
        self._ends = np.cumsum(np.bincount(rows))
        self._corpora, self._window = corpora, window
        self.fill = float(lengths.sum() / (len(self._ends) * window))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Batch:
        tokens, targets, segments = (np.zeros(self._window, np.int32) for _ in range(3))
        mask, at = np.zeros(self._window, np.float32), 0
        first = int(self._ends[index - 1]) if index else 0
        pieces = self._pieces[first : self._ends[index]].tolist()
        for segment, (shard, start, length) in enumerate(pieces, start=1):
            corpus, place = self._corpora[shard], slice(at, at + length)
            tokens[place] = corpus.tokens[start : start + length]
            targets[place] = corpus.tokens[start + 1 : start + length + 1]
            mask[place] = 1 if corpus.loss is None else corpus.loss[start + 1 : start + length + 1] > 0
            segments[place] = segment
            at += length
        return {"tokens": tokens, "targets": targets, "mask": mask, "segment_ids": segments}


def _pieces(offsets: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """(first token, number of pairs) of each piece of each document, in order."""
    pairs = np.diff(offsets) - 1
    counts = -(-pairs // window)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its document
    starts = np.repeat(offsets[:-1], counts) + number * window
    return starts, np.minimum(np.repeat(pairs, counts) - number * window, window)
