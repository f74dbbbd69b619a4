"""Fixed windows over a token stream: training batches by (seed, step), evaluation of every target exactly once."""

from collections.abc import Iterator, Sequence

import grain
import numpy as np

from efla_jax.data.batches import Batch, Source, endless, part_of_batch, step_batches
from efla_jax.data.text import Corpus


class TokenWindows:
    """Random-access source: item i reads tokens[i T : (i + 1) T] and predicts tokens[i T + 1 : (i + 1) T + 1].

    Items are dicts of [T] arrays: tokens int32, targets int32, mask float32 (1 where the target continues the document
    of its token and is trained on), segment_ids int32 (documents of the window counted from 1; 0 = padding). A document
    that crosses a window border goes on in the next window without its past.

    `pad_tail=False` leaves out the last, incomplete window (training). `pad_tail=True` pads it, so that every target of
    the stream has mask 1 in exactly one item; the first token of a document has no context and is never a target.
    `borders=False` leaves out segment_ids: what is scored stays the same, but a token has all before it as its past.
    """

    def __init__(self, corpus: Corpus, window: int, pad_tail: bool = False, borders: bool = True):
        offsets = np.asarray(corpus.offsets)
        if window < 1:
            raise ValueError(f"window={window} must be >= 1")
        if offsets[0] != 0 or offsets[-1] != len(corpus.tokens) or np.any(np.diff(offsets) < 1):
            raise ValueError(f"offsets from {offsets[0]} to {offsets[-1]} must rise strictly from 0 to the "
                             f"{len(corpus.tokens)} tokens: the document index does not belong to this stream")
        pairs = len(corpus.tokens) - 1
        self._length = -(-pairs // window) if pad_tail else pairs // window
        if self._length == 0:
            raise ValueError(f"window={window} is longer than the corpus: {pairs + 1} tokens, a window needs one "
                             "more than its length; use a shorter window or more text")
        self._corpus, self._window, self._borders = corpus, window, borders

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        start, window = int(index) * self._window, self._window
        piece = np.zeros(window + 1, np.int32)
        real = self._corpus.tokens[start : start + window + 1]
        piece[: len(real)] = real
        first, last = np.searchsorted(self._corpus.offsets, (start, start + len(real) - 1), side="right")
        segments = np.zeros(window + 1, np.int32)
        segments[0] = segments[self._corpus.offsets[first:last] - start] = 1  # where documents begin
        segments[: len(real)] = np.cumsum(segments[: len(real)])
        mask = (segments[:-1] == segments[1:]) & (segments[1:] > 0)
        if self._corpus.loss is not None:
            mask[: len(real) - 1] &= self._corpus.loss[start + 1 : start + len(real)] > 0
        mask = mask.astype(np.float32)
        item = {"tokens": piece[:-1], "targets": piece[1:], "mask": mask}
        return item | {"segment_ids": segments[:-1]} if self._borders else item


class Concatenated:
    """Random-access sources one after the other."""

    def __init__(self, sources: Sequence[Source]):
        self._sources, self._ends = sources, np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Batch:
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self._sources[which][int(index) - (int(self._ends[which - 1]) if which else 0)]


def training_batches(source: Source, batch_size: int, seed: int, rows: slice | None = None) -> grain.MapDataset:
    """Endless dataset of [B, T] batches: every window once per epoch, each epoch reshuffled from (seed, epoch)."""
    if not 1 <= batch_size <= len(source):
        raise ValueError(f"batch_size={batch_size} must lie between 1 and the {len(source)} windows of the train "
                         "split; use a smaller batch, a shorter window or more text")
    return step_batches(endless(source, seed), batch_size, rows)


def evaluation_batches(source: Source, batch_size: int, rows: slice | None = None) -> Iterator[Batch]:
    """Every window once, in order, as [B, T] batches; the last batch is filled up with padding rows (mask 0)."""
    if batch_size < 1:
        raise ValueError(f"eval_batch_size={batch_size} must be >= 1")
    part = part_of_batch(rows, batch_size)

    def batches() -> Iterator[Batch]:
        for start in range(0, len(source), batch_size):
            items = [source[start + row] for row in part if start + row < len(source)]
            # A process whose rows are all padding still needs the shapes.
            like = items[0] if items else source[start]
            yield {k: np.stack([item[k] for item in items] + [np.zeros_like(like[k])] * (len(part) - len(items)))
                   for k in like}

    return batches()
