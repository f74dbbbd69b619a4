"""Images as pixel sequences: MNIST from a file the user has, scikit-learn's digits otherwise, and test corruptions."""

import gzip
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grain
import numpy as np

from efla_jax.data.batches import Batch, pad_batch, part_of_batch

NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")
IDX_FILES = ("train-images", "train-labels", "t10k-images", "t10k-labels")
IDX_DTYPES = {8: np.uint8}
DIGITS_TEST = 360
CORRUPTION_SEED = 42


@dataclass(frozen=True)
class ImageSplit:
    """pixels [N, T, 1] float32 in [0, 1], rows first; labels [N] int32."""

    pixels: np.ndarray
    labels: np.ndarray


def load_images(path: str = "") -> dict[str, ImageSplit]:
    """Splits "train" and "test" of an .npz (keys as keras' mnist.npz) or of a folder with the four MNIST IDX files.

    An empty path gives scikit-learn's digits (8 x 8 pixels, 16 grey levels), the last 360 of 1797 as test. No
    normalisation beyond the scale to [0, 1]. Raises ValueError naming the file when something is missing or damaged.
    """
    if not path:
        return _digits()
    root = Path(path).expanduser()
    if not root.exists():
        raise ValueError(f"path={path!r} does not exist; give mnist.npz, a folder with the MNIST IDX files, or "
                         "no path at all for scikit-learn's digits")
    arrays = [_read_idx(_idx_file(root, stem)) for stem in IDX_FILES] if root.is_dir() else _read_npz(root)
    train = _split(f"{path} (train)", arrays[0], arrays[1])
    test = _split(f"{path} (test)", arrays[2], arrays[3])
    if train.pixels.shape[1] != test.pixels.shape[1]:
        raise ValueError(f"path={path!r}: train images have {train.pixels.shape[1]} pixels, test images "
                         f"{test.pixels.shape[1]}; they must agree")
    return {"train": train, "test": test}


def _digits() -> dict[str, ImageSplit]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("path is empty and scikit-learn, which has the small digits set, is not installed: "
                          "pip install scikit-learn, or give mnist.npz as path") from error
    digits = load_digits()
    pixels, labels = (digits.images / 16).astype(np.float32), digits.target
    return {
        "train": _split("digits", pixels[:-DIGITS_TEST], labels[:-DIGITS_TEST]),
        "test": _split("digits", pixels[-DIGITS_TEST:], labels[-DIGITS_TEST:]),
    }


def _split(source: str, images: np.ndarray, labels: np.ndarray) -> ImageSplit:
    if images.size == 0 or labels.shape != images.shape[:1]:
        raise ValueError(f"{source}: images of shape {images.shape}, labels of shape {labels.shape}; need as many of "
                         "each, >= 1")
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        raise ValueError(f"{source}: labels of dtype {labels.dtype}, which must be integers >= 0")
    pixels = images.reshape(len(images), -1, 1).astype(np.float32)
    if images.dtype == np.uint8:
        pixels /= 255
    if not (pixels.min() >= 0 and pixels.max() <= 1):
        raise ValueError(f"{source}: {images.dtype} pixels from {pixels.min()} to {pixels.max()}; must be uint8, or "
                         "floats in [0, 1]")
    return ImageSplit(pixels, labels.astype(np.int32))


def _read_npz(file: Path) -> list[np.ndarray]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return [arrays[key] for key in NPZ_KEYS]
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
        # numpy takes what is no archive for pickled objects, and says how to load them all the same.
        why = "no archive of numbers" if "pickle" in str(error) else error
        raise ValueError(f"file {str(file)!r} is not an .npz with the keys {', '.join(NPZ_KEYS)} ({why})") from error


def _idx_file(folder: Path, stem: str) -> Path:
    found = sorted(f for f in folder.iterdir() if f.name.startswith(stem) and "idx" in f.name)
    if not found:
        raise ValueError(f"path={str(folder)!r} has no file {stem}-idx*-ubyte or .gz; expected the four MNIST files "
                         f"{', '.join(IDX_FILES)}")
    return found[0]


def _read_idx(file: Path) -> np.ndarray:
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        zero, code, rank = struct.unpack_from(">HBB", data)
        shape = struct.unpack_from(f">{rank}I", data, 4)
        if zero != 0 or code not in IDX_DTYPES:
            raise ValueError(f"type code {code:#x} is not unsigned byte")
        return np.frombuffer(data, IDX_DTYPES[code], offset=4 + 4 * rank).reshape(shape)
    except (OSError, EOFError, ValueError, zlib.error, struct.error) as error:
        raise ValueError(f"file {str(file)!r} is not a complete IDX file of bytes ({error}); fetch it again") from error


class ImageExamples:
    """Random-access source of single images with mask 1."""

    def __init__(self, split: ImageSplit):
        self._split = split

    def __len__(self) -> int:
        return len(self._split.labels)

    def __getitem__(self, index: int) -> Batch:
        return {"pixels": self._split.pixels[index], "labels": self._split.labels[index], "mask": np.float32(1)}


def training_batches(
    split: ImageSplit, batch_size: int, seed: int, rows: slice | None = None
) -> grain.MapDataset:
    """Endless dataset, ceil(N / B) batches per epoch, the last one padded with mask 0; reshuffled each epoch."""
    if not 1 <= batch_size <= len(split.labels):
        raise ValueError(f"batch_size={batch_size} must lie between 1 and the {len(split.labels)} training images")
    examples = grain.MapDataset.source(ImageExamples(split)).seed(seed).shuffle().batch(batch_size)
    part = part_of_batch(rows, batch_size)
    return examples.map(lambda batch: _rows(pad_batch(batch, batch_size), part)).repeat()


def _rows(batch: Batch, part: range) -> Batch:
    return {k: v[part.start : part.stop] for k, v in batch.items()}


def evaluation_batches(split: ImageSplit, batch_size: int, rows: slice | None = None) -> Iterator[Batch]:
    """Every image once, in order; the last batch is padded with mask 0."""
    if batch_size < 1:
        raise ValueError(f"eval_batch_size={batch_size} must be >= 1")
    part = part_of_batch(rows, batch_size)

    def batches() -> Iterator[Batch]:
        for start in range(0, len(split.labels), batch_size):
            pixels, labels = split.pixels[start : start + batch_size], split.labels[start : start + batch_size]
            batch = {"pixels": pixels, "labels": labels, "mask": np.ones(len(labels), np.float32)}
            yield _rows(pad_batch(batch, batch_size), part)

    return batches()


def corruptions(pixels: np.ndarray) -> Iterator[tuple[str, float, np.ndarray]]:
    """The test-time corruptions of the published sequential-MNIST experiment: (family, severity, corrupted pixels).

    intensity  x s,            s = 1, 2, ..., 10
    noise      x + sigma z,    sigma = 0, 0.1, ..., 1, z standard normal, not clipped
    dropout    x * keep,       each pixel kept with probability 1 - p, p = 0, 0.1, ..., 1, not rescaled

    A family draws all its severities, in order, from one numpy generator seeded with 42. Source: declare-lab/EFLA.
    """
    for scale in range(1, 11):
        yield "intensity", float(scale), pixels * np.float32(scale)
    rng = np.random.default_rng(CORRUPTION_SEED)
    for tenths in range(11):
        noise = rng.standard_normal(pixels.shape, dtype=np.float32)
        yield "noise", tenths / 10, pixels + np.float32(tenths / 10) * noise
    rng = np.random.default_rng(CORRUPTION_SEED)
    for tenths in range(11):
        keep = rng.random(pixels.shape, dtype=np.float32) >= np.float32(tenths / 10)
        yield "dropout", tenths / 10, pixels * keep
