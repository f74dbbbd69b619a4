"""Host data: text as bytes, tokenised shards, images as pixels, synthetic tasks; batches as a function of (seed, step).

    dataset = make(DataConfig(kind="text", window=512, batch_size=16))
    for batch in dataset.train_iterator(start_step=0): ...          # endless
    for batch in dataset.eval_batches("valid"): ...                 # every target once

Both take rows=slice(start, stop), the rows of each global batch that this process wants: any number of processes,
and any worker_count, see the same data.

Text and token batches: {"tokens", "targets", "mask", "segment_ids"}, all [B, T] int32 but for the float32 mask; rows
of generated tasks are one document each and have no segment_ids, which is less work for a mixer.
Image batches: {"pixels" [B, T, 1] float32, "labels" [B] int32, "mask" [B] float32}.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from efla_jax.data import images, text, windows
from efla_jax.data.baselines import bigram_bits_per_byte, lzma_bits_per_byte
from efla_jax.data.batches import Batch, BatchIterator, Mixture, Source, pad_batch, step_batches
from efla_jax.data.images import ImageSplit, corruptions, load_images
from efla_jax.data.mad import mad_dataset
from efla_jax.data.packing import PackedRows
from efla_jax.data.recall import Recall, RecallDataset
from efla_jax.data.selective_copying import selective_copying_dataset
from efla_jax.data.shards import TokenSplits, open_shards
from efla_jax.data.state_tracking import state_tracking_dataset
from efla_jax.data.text import END_OF_DOCUMENT, VOCAB_SIZE, Corpus, TextSplits, load_text
from efla_jax.data.tokenizer import TokenizerSpec, load_tokenizer
from efla_jax.data.windows import Concatenated, TokenWindows

__all__ = [
    "END_OF_DOCUMENT", "VOCAB_SIZE", "Batch", "BatchIterator", "Corpus", "DataConfig", "ImageDataset", "ImageSplit",
    "PackedRows", "Recall", "RecallDataset", "TextDataset", "TextSplits", "TokenDataset", "TokenSplits", "TokenWindows",
    "bigram_bits_per_byte", "corruptions", "load_images", "load_text", "lzma_bits_per_byte", "make", "open_shards",
    "pad_batch",
]

# Tasks that are generated: kind -> the dataset made of (config.task, batch_size, eval_batch_size, seed, worker_count).
# Each is a language model's data with held-out `slices`, a split "test" and the attributes of RecallDataset.
GENERATED: dict[str, Callable[..., Any]] = {
    "recall": RecallDataset,
    "mad": mad_dataset,
    "state_tracking": state_tracking_dataset,
    "selective_copying": selective_copying_dataset,
}
KINDS = ("text", "images", "tokens", *GENERATED)
PACKINGS = ("windows", "first_fit", "stream")


@dataclass(frozen=True)
class DataConfig:
    """What to read. kind: one of KINDS; without a path text is Python's, images are digits.

    window is the training length T of text and tokens; eval_batch_size 0 means batch_size; valid_path and
    valid_fraction concern text; worker_count > 0 reads in that many processes and does not change the data.

    "tokens" are folders written by prepare_data: one `path`, or `paths` mixed by `weights` (none: by size). packing
    "windows" cuts the stream every T tokens, "first_fit" keeps documents whole where they fit, "stream" is "windows"
    without segment_ids: rows are read across the borders between documents. verify=True compares every checksum before
    the first batch.

    The kinds of GENERATED are generated: `task` holds the fields of the task, for "recall" those of `recall.Recall`.
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
    paths: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    packing: str = "windows"
    verify: bool = False
    task: Mapping[str, Any] = field(default_factory=dict)


def make(config: DataConfig) -> "TextDataset | ImageDataset | TokenDataset | RecallDataset":
    """Reads the data and checks that it can fill one batch. Raises ValueError naming the field at fault."""
    if config.kind not in KINDS:
        raise ValueError(f"kind={config.kind!r} must be one of {', '.join(KINDS)}")
    if not 0 <= config.seed < 1 << 32:
        raise ValueError(f"seed={config.seed} must be >= 0 and below 2^32")
    if config.eval_batch_size < 0:
        raise ValueError(f"eval_batch_size={config.eval_batch_size} must be >= 0; 0 means batch_size")
    if config.packing not in PACKINGS:
        raise ValueError(f"packing={config.packing!r} must be one of {', '.join(PACKINGS)}")
    if config.kind != "tokens" and (config.paths or config.weights or config.packing != PACKINGS[0]):
        raise ValueError(f"paths, weights and packing are for kind='tokens', and kind={config.kind!r}: leave them out")
    if config.kind in GENERATED:
        sizes = config.batch_size, config.eval_batch_size
        return GENERATED[config.kind](config.task, *sizes, config.seed, config.worker_count)
    if config.task:
        raise ValueError(f"task={dict(config.task)} is for kind={' or '.join(map(repr, GENERATED))}, and "
                         f"kind={config.kind!r}: leave it out")
    if config.kind == "tokens":
        return TokenDataset(config)
    return TextDataset(config) if config.kind == "text" else ImageDataset(config)


def _fingerprint(digest: str, *settings: object) -> str:
    return hashlib.sha256(repr((digest, *settings)).encode()).hexdigest()[:16]


class TextDataset:
    """Byte-level language modelling with splits "train" and "valid"; `splits` are the corpora, `vocab_size` is 256."""

    kind = "text"
    vocab_size = VOCAB_SIZE
    bytes_per_token = 1.0
    tokenizer_hash = "bytes"
    vocabulary = load_tokenizer(TokenizerSpec()).describe()

    def __init__(self, config: DataConfig):
        self._config = config
        self.splits = text.load_text(config.path, config.valid_path, config.valid_fraction)
        self._source = TokenWindows(self.splits.train, config.window)
        windows.training_batches(self._source, config.batch_size, config.seed)  # refuses what cannot fill a batch
        self.steps_per_epoch = len(self._source) / config.batch_size

    def train_iterator(self, start_step: int = 0, rows: slice | None = None) -> BatchIterator:
        """Endless iterator whose first batch is that of `start_step`; rows: the part of each batch to read."""
        config = self._config
        mark = _fingerprint(self.splits.train.digest, config.seed, config.window, config.batch_size)
        batches = windows.training_batches(self._source, config.batch_size, config.seed, rows)
        return BatchIterator(batches, mark, start_step, config.worker_count)

    def eval_batches(self, split: str = "valid", rows: slice | None = None) -> Iterator[Batch]:
        """Every target of the split exactly once, in order; padding has mask 0."""
        if split not in ("train", "valid"):
            raise ValueError(f"split={split!r} must be train or valid")
        source = TokenWindows(getattr(self.splits, split), self._config.window, pad_tail=True)
        return windows.evaluation_batches(source, self._config.eval_batch_size or self._config.batch_size, rows)

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


class TokenDataset:
    """Language modelling on folders of tokenised shards with splits "train" and "valid"; `sources` are the folders.

    bytes_per_token: raw bytes of the valid split by its targets, so that bits per byte = bits per token /
    bytes_per_token, with the convention of TextDataset (0.0: unknown). tokenizer_hash: that of the tokenizer's file;
    vocabulary: what `Tokenizer.describe` says of it, EOS and BOS among it.
    """

    kind = "tokens"

    def __init__(self, config: DataConfig):
        self._config, self.paths = config, _token_paths(config)
        self.sources = tuple(open_shards(path, config.verify) for path in self.paths)
        first = self.sources[0].manifest
        for path, source in zip(self.paths, self.sources, strict=True):
            if source.manifest.tokenizer != first.tokenizer:
                raise ValueError(f"paths mix two tokenizers: {self.paths[0]!r} has {first.tokenizer}, {path!r} has "
                                 f"{source.manifest.tokenizer}; prepare both with the same one")
        self.vocab_size = int(first.tokenizer["vocab_size"])
        self.tokenizer_hash, self.vocabulary = str(first.tokenizer["sha256"]), dict(first.tokenizer)
        targets, raw = (sum(source.manifest.total(name, "valid") for source in self.sources)
                                for name in ("targets", "target_bytes"))
        if not targets:
            raise ValueError(f"the valid split of {', '.join(map(repr, self.paths))} is empty; prepare the data with a "
                             "larger valid_fraction or a valid_path")
        self.bytes_per_token = raw / targets
        self._train = [self._rows(path, source.splits["train"]) for path, source in
                       zip(self.paths, self.sources, strict=True)]
        total = sum(map(len, self._train))
        if not 1 <= config.batch_size <= total:
            raise ValueError(f"batch_size={config.batch_size} must lie between 1 and the {total} windows of the train "
                             "split; use a smaller batch, a shorter window or more text")
        weights = config.weights or tuple(len(rows) for rows in self._train)
        self._weights = tuple(weight / sum(weights) for weight in weights)
        self.steps_per_epoch = total / config.batch_size

    def _rows(self, path: str, corpora: tuple[Corpus, ...], pad_tail: bool = False) -> Source:
        window = self._config.window
        if self._config.packing == "first_fit" and corpora:
            return PackedRows(corpora, window)
        borders = self._config.packing != "stream"
        # A shard too short for one window trains nothing; an evaluation pads it.
        long = [corpus for corpus in corpora if pad_tail or len(corpus.tokens) > window]
        if not long:
            raise ValueError(f"window={window} is longer than every train shard of path={path!r}; use a shorter "
                             "window, packing='first_fit' or more text")
        return Concatenated([TokenWindows(corpus, window, pad_tail, borders) for corpus in long])

    def train_iterator(self, start_step: int = 0, rows: slice | None = None) -> BatchIterator:
        """Endless iterator whose first batch is that of `start_step`; rows: the part of each batch to read."""
        config = self._config
        digests = [source.manifest.digest for source in self.sources]
        mark = _fingerprint("tokens", *digests, config.seed, config.window, config.batch_size, config.packing,
                            *self._weights)
        mixed = Mixture(self._train, self._weights, config.seed)
        return BatchIterator(step_batches(mixed, config.batch_size, rows), mark, start_step, config.worker_count)

    def eval_batches(self, split: str = "valid", rows: slice | None = None) -> Iterator[Batch]:
        """Every target of the split exactly once, source after source; padding has mask 0."""
        if split not in ("train", "valid"):
            raise ValueError(f"split={split!r} must be train or valid")
        sources = [self._rows(path, source.splits[split], pad_tail=True)
                   for path, source in zip(self.paths, self.sources, strict=True) if source.splits[split]]
        batch_size = self._config.eval_batch_size or self._config.batch_size
        return windows.evaluation_batches(Concatenated(sources), batch_size, rows)

    def describe(self) -> dict[str, int | float | str]:
        """Plain numbers for logs: documents and tokens per split, bytes per token, fill of packed rows."""
        numbers: dict[str, int | float | str] = {"kind": self.kind, "path": ", ".join(self.paths)}
        for split in ("train", "valid"):
            for name in ("documents", "tokens"):
                numbers[f"{split}_{name}"] = sum(source.manifest.total(name, split) for source in self.sources)
        packed = [rows for rows in self._train if isinstance(rows, PackedRows)]
        if packed:
            numbers["fill"] = sum(rows.fill * len(rows) for rows in packed) / sum(map(len, packed))
        return {**numbers, "vocab_size": self.vocab_size, "tokenizer_hash": self.tokenizer_hash,
                "bytes_per_token": self.bytes_per_token, "steps_per_epoch": self.steps_per_epoch}


def _token_paths(config: DataConfig) -> tuple[str, ...]:
    if bool(config.path) == bool(config.paths):
        raise ValueError(f"kind='tokens' needs path={config.path!r} or paths={config.paths!r}, one of them: folders "
                         "that prepare_data wrote")
    paths = config.paths or (config.path,)
    if config.weights and (len(config.weights) != len(paths) or not all(0 < w < math.inf for w in config.weights)):
        raise ValueError(f"weights={config.weights} must be {len(paths)} positive numbers, one for each of the paths")
    if len({Path(path).expanduser().resolve() for path in paths}) < len(paths):
        raise ValueError(f"paths={paths} names a folder twice; give it a larger weight instead")
    return paths


class ImageDataset:
    """Images as sequences of pixels with splits "train" and "test"; `splits` holds the arrays, `length` is T."""

    kind = "images"

    def __init__(self, config: DataConfig):
        self._config = config
        self.splits = images.load_images(config.path)
        train = self.splits["train"]
        self.length = train.pixels.shape[1]
        self.num_classes = 1 + int(max(split.labels.max() for split in self.splits.values()))
        images.training_batches(train, config.batch_size, config.seed)  # refuses what cannot fill a batch
        self.steps_per_epoch = -(-len(train.labels) // config.batch_size)

    @cached_property
    def _digest(self) -> str:
        train = self.splits["train"]
        return hashlib.sha256(train.pixels.tobytes() + train.labels.tobytes()).hexdigest()

    def train_iterator(self, start_step: int = 0, rows: slice | None = None) -> BatchIterator:
        """Endless iterator whose first batch is that of `start_step`; each epoch has `steps_per_epoch` of them."""
        config = self._config
        mark = _fingerprint(self._digest, config.seed, config.batch_size)
        batches = images.training_batches(self.splits["train"], config.batch_size, config.seed, rows)
        return BatchIterator(batches, mark, start_step, config.worker_count)

    def eval_batches(self, split: str | ImageSplit = "test", rows: slice | None = None) -> Iterator[Batch]:
        """Every image of a split, or of corrupted images given as an ImageSplit, once and in order."""
        if isinstance(split, str) and split not in self.splits:
            raise ValueError(f"split={split!r} must be train or test")
        chosen = self.splits[split] if isinstance(split, str) else split
        return images.evaluation_batches(chosen, self._config.eval_batch_size or self._config.batch_size, rows)

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
