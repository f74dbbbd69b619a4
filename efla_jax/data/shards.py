"""Tokenised documents on disk: memory-mapped shards under one manifest, written atomically, checked when opened.

    manifest.json          format, tokenizer, dtype, and for each shard its counts and checksums
    train-00000.tokens     ids, little-endian uint16 (vocabularies up to 65536) or uint32; every document ends with EOS
    train-00000.offsets    int64, D + 1 of them: document d is tokens[offsets[d] : offsets[d + 1]]
    train-00000.mask       uint8 per token, 1 where it is trained on; only if some token of the shard is not

No document crosses from one shard into the next.
"""

import hashlib
import io
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from efla_jax.data.text import Corpus

FORMAT, VERSION = "efla_jax tokens", 1
MANIFEST, JOURNAL = "manifest.json", "unfinished.json"
SPLITS = ("train", "valid")
TOKENS, OFFSETS, MASK = "tokens", "offsets", "mask"
OFFSET_DTYPE, MASK_DTYPE = np.dtype("<i8"), np.dtype("u1")
REMEDY = "run prepare_data again"


@dataclass(frozen=True)
class Shard:
    """One shard: targets are the tokens trained on, target_bytes the raw text they stand for.

    next_record: the number, among all documents read, at which the next shard of the split begins.
    """

    name: str
    split: str
    tokens: int
    documents: int
    bytes: int
    targets: int
    target_bytes: int
    next_record: int
    checksums: dict[str, str]

    def sizes(self, dtype: np.dtype) -> dict[str, int]:
        """Bytes that each file of the shard must have."""
        sizes = {TOKENS: self.tokens * dtype.itemsize, OFFSETS: (self.documents + 1) * OFFSET_DTYPE.itemsize,
                 MASK: self.tokens}
        return {kind: sizes[kind] for kind in self.checksums}


@dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds. settings: the command that made it; counts: what was read and dropped."""

    tokenizer: dict[str, Any]
    dtype: str
    settings: dict[str, Any]
    counts: dict[str, int] = field(default_factory=dict)
    shards: tuple[Shard, ...] = ()

    @property
    def digest(self) -> str:
        """Short hash of the data itself: it does not change when the folder moves."""
        content = [self.tokenizer, self.dtype, [asdict(shard) for shard in self.shards]]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def total(self, name: str, split: str) -> int:
        """Sum of a number over the shards of a split."""
        return sum(getattr(shard, name) for shard in self.shards if shard.split == split)

    def write(self, file: Path) -> None:
        """Atomically: a reader sees the old file or the whole of this one."""
        temporary = file.with_name(file.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as out:
            json.dump({"format": FORMAT, "version": VERSION, **asdict(self)}, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
        sync_folder(file.parent)


def token_dtype(vocab_size: int) -> str:
    """The smaller of uint16 and uint32 that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(file: Path) -> Manifest:
    """A manifest or the journal of an unfinished one. Raises ValueError naming the file and what is wrong with it."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            raise ValueError(f"it is not marked {FORMAT!r}")
        if content["version"] != VERSION:
            raise ValueError(f"it is of version {content['version']!r} and this library reads {VERSION}")
        shards = tuple(Shard(**shard) for shard in content["shards"])
        manifest = Manifest(content["tokenizer"], content["dtype"], content["settings"], content["counts"], shards)
        wrong = manifest.dtype != token_dtype(manifest.tokenizer["vocab_size"]) or any(
            shard.split not in SPLITS or shard.tokens < 1 or shard.documents < 1 or "/" in shard.name
            or not {TOKENS, OFFSETS} <= set(shard.checksums) <= {TOKENS, OFFSETS, MASK} for shard in shards)
        known = manifest.tokenizer
        if wrong or not known["sha256"] or not 0 <= known["eos_id"] < known["vocab_size"]:
            raise ValueError("a dtype, split, name, count or token id in it cannot be")
        return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"file {str(file)!r} is not a manifest of tokenised shards ({type(error).__name__}: {error}); "
                         f"{REMEDY}") from error


@dataclass(frozen=True)
class TokenSplits:
    """An opened folder: its manifest and per split the shards, memory-mapped."""

    manifest: Manifest
    splits: dict[str, tuple[Corpus, ...]]


def open_shards(path: str, verify: bool = False) -> TokenSplits:
    """Maps the shards of a folder after checking every size and every offset against the manifest.

    verify=True also reads everything and compares checksums. Raises ValueError naming the file at fault.
    """
    folder = Path(path).expanduser()
    if not (folder / MANIFEST).is_file():
        unfinished = (folder / JOURNAL).exists()
        reason = f"is unfinished; {REMEDY} with the same settings" if unfinished else \
            f"has no {MANIFEST}; give a folder that prepare_data wrote"
        raise ValueError(f"path={path!r} {reason}")
    manifest = read_manifest(folder / MANIFEST)
    found: dict[str, list[Corpus]] = {split: [] for split in SPLITS}
    for shard in manifest.shards:
        found[shard.split].append(open_shard(folder, shard, np.dtype(manifest.dtype).newbyteorder("<")))
        if verify:
            verify_shard(folder, shard)
    return TokenSplits(manifest, {split: tuple(corpora) for split, corpora in found.items()})


def open_shard(folder: Path, shard: Shard, dtype: np.dtype) -> Corpus:
    """Maps one shard. Raises ValueError naming the file that is missing, of another size, or inconsistent."""
    arrays = {}
    for kind, expected in shard.sizes(dtype).items():
        file = folder / f"{shard.name}.{kind}"
        try:
            size = file.stat().st_size
        except OSError as error:
            raise ValueError(f"file {str(file)!r} cannot be read ({error.strerror}); restore it or {REMEDY}") from error
        if size != expected:
            raise ValueError(f"file {str(file)!r} has {size} bytes and by the manifest {expected}: truncated, or of "
                             f"another preparation; restore it or {REMEDY}")
        try:
            arrays[kind] = np.memmap(file, {TOKENS: dtype, OFFSETS: OFFSET_DTYPE, MASK: MASK_DTYPE}[kind], "r")
        except OSError as error:  # a mapped file stays open: two or three for each shard
            raise ValueError(f"file {str(file)!r} cannot be mapped ({error.strerror}); if too many are open, raise "
                             "the limit (ulimit -n), or prepare the data with a larger shard_tokens") from error
    offsets = arrays[OFFSETS]
    if offsets[0] != 0 or offsets[-1] != shard.tokens or np.any(offsets[1:] <= offsets[:-1]):
        raise ValueError(f"file {str(folder / shard.name) + '.offsets'!r}: offsets must rise strictly from 0 to the "
                         f"{shard.tokens} tokens of the shard: damaged; restore it or {REMEDY}")
    return Corpus(arrays[TOKENS], offsets, loss=arrays.get(MASK))


def verify_shard(folder: Path, shard: Shard) -> None:
    """Reads a shard and compares its checksums. Raises ValueError naming the file that differs."""
    for kind, checksum in shard.checksums.items():
        file = folder / f"{shard.name}.{kind}"
        with file.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != checksum:
                raise ValueError(f"file {str(file)!r} does not have the checksum of the manifest: damaged; restore it "
                                 f"or {REMEDY}")


class ShardWriter:
    """Collects documents under temporary names; `close` puts the finished files in place and returns the record."""

    def __init__(self, folder: Path, name: str, split: str, dtype: np.dtype):
        self._folder, self._name, self._split, self._dtype = folder, name, split, dtype
        self._out = self._temporary(TOKENS).open("wb")
        self._sha256 = hashlib.sha256()
        self._ends, self._untrained = [0], list[tuple[int, int]]()
        self._bytes = self._target_bytes = self._targets = 0

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return self._ends[-1]

    def append(self, tokens: np.ndarray, untrained: int, raw_bytes: int, target_bytes: int) -> None:
        """One document with its EOS; its first `untrained` tokens are not trained on."""
        content = np.ascontiguousarray(tokens, self._dtype).data
        self._out.write(content)
        self._sha256.update(content)
        if untrained:
            self._untrained.append((self.tokens, self.tokens + untrained))
        self._ends.append(self.tokens + len(tokens))
        # The first token of a document has no context and is never a target.
        self._targets += len(tokens) - max(untrained, 1)
        self._bytes += raw_bytes
        self._target_bytes += target_bytes

    def close(self, next_record: int) -> Shard:
        """Syncs the files and moves them to their final names."""
        _sync_and_close(self._out)
        checksums, arrays = {TOKENS: self._sha256.hexdigest()}, {OFFSETS: np.array(self._ends, OFFSET_DTYPE)}
        if self._untrained:
            arrays[MASK] = np.ones(self.tokens, MASK_DTYPE)
            for start, stop in self._untrained:
                arrays[MASK][start:stop] = 0
        for kind, array in arrays.items():
            checksums[kind] = hashlib.sha256(array.data).hexdigest()
            with self._temporary(kind).open("wb") as out:
                out.write(array.data)
                _sync_and_close(out)
        for kind in checksums:
            os.replace(self._temporary(kind), self._folder / f"{self._name}.{kind}")
        sync_folder(self._folder)
        return Shard(self._name, self._split, self.tokens, len(self._ends) - 1, self._bytes, self._targets,
                     self._target_bytes, next_record, checksums)

    def abandon(self) -> None:
        """Lets go of an unfinished shard; its temporary files are overwritten by the next attempt."""
        with suppress(OSError):  # a full disk fails here a second time
            self._out.close()

    def _temporary(self, kind: str) -> Path:
        return self._folder / f"{self._name}.{kind}.tmp"


def _sync_and_close(out: io.BufferedWriter) -> None:
    out.flush()
    os.fsync(out.fileno())
    out.close()
