"""What a byte bigram and lzma achieve on the held-out text, so that a model's bits per byte mean something.

All figures are bits divided by `Corpus.num_targets`, the bytes of the raw held-out text. A model and the bigram score
the same targets: for a document of n bytes its bytes 2 ... n and its end, n targets; the first byte has no context and
is neither scored nor counted. lzma has no such notion: it also pays for the first byte of each document.
"""

import lzma

import numpy as np

from efla_jax.data.text import VOCAB_SIZE, Corpus

LZMA_PRESET = 9 | lzma.PRESET_EXTREME


def _pair_counts(corpus: Corpus) -> np.ndarray:
    follows = np.ones(len(corpus.tokens), bool)
    follows[corpus.offsets[:-1]] = False
    after = np.flatnonzero(follows)
    pairs = corpus.tokens[after - 1].astype(np.int64) * VOCAB_SIZE + corpus.tokens[after]
    return np.bincount(pairs, minlength=VOCAB_SIZE**2).reshape(VOCAB_SIZE, VOCAB_SIZE)


def bigram_bits_per_byte(train: Corpus, valid: Corpus) -> float:
    """Bits per byte on `valid` of a byte bigram counted on `train`, with Witten-Bell smoothing.

        p(b | a) = (c(a b) + d(a) p(b)) / (c(a) + d(a))        p(b) = (c(b) + 1) / (n + 256)

    with c the pair and target counts inside documents of the train split, n their number and d(a) the number of
    different bytes seen after a (1 if there is none).
    """
    counts = _pair_counts(train).astype(np.float64)
    unigram = (counts.sum(axis=0) + 1) / (counts.sum() + VOCAB_SIZE)
    different = np.maximum((counts > 0).sum(axis=1, keepdims=True), 1)
    conditional = (counts + different * unigram) / (counts.sum(axis=1, keepdims=True) + different)
    return float(-(_pair_counts(valid) * np.log2(conditional)).sum() / valid.num_targets)


def lzma_bits_per_byte(valid: Corpus, train: Corpus | None = None, train_bytes: int = 1 << 22) -> float:
    """Bits per byte of `lzma` (preset 9 | EXTREME, xz container) on the held-out stream, separators included.

    With `train`, conditional on training text: size(prefix + valid) - size(prefix), the prefix being whole train
    documents, evenly spread, of about `train_bytes` bytes together (all of them if they fit).
    """
    text = valid.tokens.astype(np.uint8).tobytes()
    prefix = b"" if train is None else _spread_documents(train, train_bytes)
    size = len(lzma.compress(prefix + text, preset=LZMA_PRESET))
    if prefix:
        size -= len(lzma.compress(prefix, preset=LZMA_PRESET))
    return 8 * size / valid.num_targets


def _spread_documents(corpus: Corpus, size: int) -> bytes:
    share = min(1.0, size / len(corpus.tokens))
    # Document d is taken when floor(d share) steps up: evenly spread over the name order, the same on every machine.
    numbers = np.arange(corpus.num_documents + 1)
    taken = np.flatnonzero(np.diff(np.floor(numbers * share)) > 0)
    return b"".join(corpus.tokens[corpus.offsets[d] : corpus.offsets[d + 1]].astype(np.uint8).tobytes() for d in taken)
