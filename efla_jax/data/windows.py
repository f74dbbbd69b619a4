"""Fixed windows over a token stream: training batches by (seed, step), evaluation of every target exactly once."""

from collections.abc import Iterator

import grain
import numpy as np

from efla_jax.data.batches import Batch, pad_batch
from efla_jax.data.text import Corpus


class TokenWindows:
    """Random-access source: item i reads tokens[i T : (i + 1) T] and predicts tokens[i T + 1 : (i + 1) T + 1].

    Items are dicts of [T] arrays: tokens int32, targets int32, mask float32 (1 where the target continues the document
    of its token), segment_ids int32 (documents of the window counted from 1; 0 = padding). A document that crosses a
    window border goes on in the next window without its past.

    `pad_tail=False` leaves out the last, incomplete window (training). `pad_tail=True` pads it, so that every target of
    the stream has mask 1 in exactly one item; the first token of a document has no context and is never a target.
    """

    def __init__(self, corpus: Corpus, window: int, pad_tail: bool = False):
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
        self._tokens, self._offsets, self._window = corpus.tokens, offsets, window

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        start, window = int(index) * self._window, self._window
        piece = np.zeros(window + 1, np.int32)
        real = self._tokens[start : start + window + 1]
        piece[: len(real)] = real
        documents = np.searchsorted(self._offsets, np.arange(start, start + len(real)), side="right")
        segments = np.zeros(window + 1, np.int32)
        segments[: len(real)] = documents - documents[0] + 1
        mask = (segments[:-1] == segments[1:]) & (segments[1:] > 0)
        mask = mask.astype(np.float32)
        return {"tokens": piece[:-1], "targets": piece[1:], "mask": mask, "segment_ids": segments[:-1]}

    def __getstate__(self) -> dict:
        # A pickled memmap would carry the whole file into every worker process: send its address instead.
        state = dict(self.__dict__)
        tokens = self._tokens
        if isinstance(tokens, np.memmap):
            state["_tokens"] = (str(tokens.filename), tokens.dtype, tokens.offset, tokens.shape)
        return state

    def __setstate__(self, state: dict) -> None:
        if isinstance(state["_tokens"], tuple):
            name, dtype, offset, shape = state["_tokens"]
            state = {**state, "_tokens": np.memmap(name, dtype, "r", offset, shape)}
        self.__dict__.update(state)


def training_batches(windows: TokenWindows, batch_size: int, seed: int) -> grain.MapDataset:
    """Endless dataset of [B, T] batches: every window once per epoch, each epoch reshuffled from (seed, epoch)."""
    if not 1 <= batch_size <= len(windows):
        raise ValueError(f"batch_size={batch_size} must lie between 1 and the {len(windows)} windows of the train "
                         "split; use a smaller batch, a shorter window or more text")
    # Without a number of epochs grain's length is the largest index, which batches of one would round up beyond it.
    epochs = (1 << 62) // len(windows)
    return grain.MapDataset.source(windows).seed(seed).shuffle().repeat(epochs).batch(batch_size)


def evaluation_batches(windows: TokenWindows, batch_size: int) -> Iterator[Batch]:
    """Every window once, in order, as [B, T] batches; the last batch is filled up with padding rows (mask 0)."""
    if batch_size < 1:
        raise ValueError(f"eval_batch_size={batch_size} must be >= 1")
    for start in range(0, len(windows), batch_size):
        items = [windows[i] for i in range(start, min(start + batch_size, len(windows)))]
        yield pad_batch({k: np.stack([item[k] for item in items]) for k in items[0]}, batch_size)
