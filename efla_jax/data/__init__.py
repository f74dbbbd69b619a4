"""Host data: text as byte windows, images as pixel sequences; batches of numpy arrays as a function of (seed, step).

    dataset = make(DataConfig(kind="text", window=512, batch_size=16))
    for batch in dataset.train_iterator(start_step=0): ...          # endless
    for batch in dataset.eval_batches("valid"): ...                 # every target once

Text batches: {"tokens", "targets", "mask", "segment_ids"}, all [B, T] int32 but for the float32 mask.
Image batches: {"pixels" [B, T, 1] float32, "labels" [B] int32, "mask" [B] float32}.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from efla_jax.data import images, text, windows
from efla_jax.data.baselines import bigram_bits_per_byte, lzma_bits_per_byte
from efla_jax.data.batches import Batch, BatchIterator, pad_batch
from efla_jax.data.images import ImageSplit, corruptions, load_images
from efla_jax.data.text import END_OF_DOCUMENT, VOCAB_SIZE, Corpus, TextSplits, load_text
from efla_jax.data.windows import TokenWindows

__all__ = [
    "END_OF_DOCUMENT", "VOCAB_SIZE", "Batch", "BatchIterator", "Corpus", "DataConfig", "ImageDataset", "ImageSplit",
    "TextDataset", "TextSplits", "TokenWindows", "bigram_bits_per_byte", "corruptions", "load_images", "load_text",
    "lzma_bits_per_byte", "make", "pad_batch",
]

KINDS = ("text", "images")


@dataclass(frozen=True)
class DataConfig:
    """What to read. kind "text" or "images"; an empty path takes what the machine has (Python's text, digits).

    window is the training length T of text; eval_batch_size 0 means batch_size; valid_path and valid_fraction concern
    text; worker_count > 0 reads in that many processes and does not change the data.
    """

    kind: str = "text"
    path: str = ""
    valid_path: str = ""
    valid_fraction: float = 0.05
    window: int = 512
    batch_size: int = 16
    eval_batch_size: int = 0
    seed: int = 0
    worker_count: int = 0


def make(config: DataConfig) -> "TextDataset | ImageDataset":
    """Reads the data and checks that it can fill one batch. Raises ValueError naming the field at fault."""
    if config.kind not in KINDS:
        raise ValueError(f"kind={config.kind!r} must be one of {', '.join(KINDS)}")
    if config.seed < 0:
        raise ValueError(f"seed={config.seed} must be >= 0")
    if config.eval_batch_size < 0:
        raise ValueError(f"eval_batch_size={config.eval_batch_size} must be >= 0; 0 means batch_size")
    return TextDataset(config) if config.kind == "text" else ImageDataset(config)


def _fingerprint(digest: str, *settings: int) -> str:
    return hashlib.sha256(repr((digest, *settings)).encode()).hexdigest()[:16]


class TextDataset:
    """Byte-level language modelling with splits "train" and "valid"; `splits` are the corpora, `vocab_size` is 256."""

    kind = "text"
    vocab_size = VOCAB_SIZE

    def __init__(self, config: DataConfig):
        self._config = config
        self.splits = text.load_text(config.path, config.valid_path, config.valid_fraction)
        source = TokenWindows(self.splits.train, config.window)
        self._batches = windows.training_batches(source, config.batch_size, config.seed)
        self.steps_per_epoch = len(source) / config.batch_size

    def train_iterator(self, start_step: int = 0) -> BatchIterator:
        """Endless iterator whose first batch is that of `start_step`."""
        config = self._config
        mark = _fingerprint(self.splits.train.digest, config.seed, config.window, config.batch_size)
        return BatchIterator(self._batches, mark, start_step, config.worker_count)

    def eval_batches(self, split: str = "valid") -> Iterator[Batch]:
        """Every target of the split exactly once, in order; padding has mask 0."""
        if split not in ("train", "valid"):
            raise ValueError(f"split={split!r} must be train or valid")
        source = TokenWindows(getattr(self.splits, split), self._config.window, pad_tail=True)
        return windows.evaluation_batches(source, self._config.eval_batch_size or self._config.batch_size)

    def describe(self) -> dict[str, int | float | str]:
        """Plain numbers for logs: documents and bytes per split, what was removed, steps per epoch."""
        splits = self.splits
        return {
            "kind": self.kind,
            "path": self._config.path or "text shipped with Python",
            "train_documents": splits.train.num_documents,
            "train_bytes": splits.train.num_targets,
            "valid_documents": splits.valid.num_documents,
            "valid_bytes": splits.valid.num_targets,
            "nul_bytes_stripped": splits.nul_bytes,
            "duplicates_dropped": splits.duplicates,
            "steps_per_epoch": self.steps_per_epoch,
        }


class ImageDataset:
    """Images as sequences of pixels with splits "train" and "test"; `splits` holds the arrays, `length` is T."""

    kind = "images"

    def __init__(self, config: DataConfig):
        self._config = config
        self.splits = images.load_images(config.path)
        train = self.splits["train"]
        self.length = train.pixels.shape[1]
        self.num_classes = 1 + int(max(split.labels.max() for split in self.splits.values()))
        self._batches = images.training_batches(train, config.batch_size, config.seed)
        self.steps_per_epoch = -(-len(train.labels) // config.batch_size)

    @cached_property
    def _digest(self) -> str:
        train = self.splits["train"]
        return hashlib.sha256(train.pixels.tobytes() + train.labels.tobytes()).hexdigest()

    def train_iterator(self, start_step: int = 0) -> BatchIterator:
        """Endless iterator whose first batch is that of `start_step`; each epoch has `steps_per_epoch` of them."""
        config = self._config
        mark = _fingerprint(self._digest, config.seed, config.batch_size)
        return BatchIterator(self._batches, mark, start_step, config.worker_count)

    def eval_batches(self, split: str | ImageSplit = "test") -> Iterator[Batch]:
        """Every image of a split, or of corrupted images given as an ImageSplit, once and in order."""
        if isinstance(split, str) and split not in self.splits:
            raise ValueError(f"split={split!r} must be train or test")
        chosen = self.splits[split] if isinstance(split, str) else split
        return images.evaluation_batches(chosen, self._config.eval_batch_size or self._config.batch_size)

    def corrupted(self, split: str = "test") -> Iterator[tuple[str, float, ImageSplit]]:
        """(family, severity, images) for the 32 corruptions of a split: see `corruptions`."""
        chosen = self.splits[split]
        for family, severity, pixels in corruptions(chosen.pixels):
            yield family, severity, ImageSplit(pixels, chosen.labels)

    def describe(self) -> dict[str, int | float | str]:
        """Plain numbers for logs."""
        return {
            "kind": self.kind,
            "path": self._config.path or "scikit-learn digits",
            "train_images": len(self.splits["train"].labels),
            "test_images": len(self.splits["test"].labels),
            "length": self.length,
            "num_classes": self.num_classes,
            "steps_per_epoch": self.steps_per_epoch,
        }
