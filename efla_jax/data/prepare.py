"""Text to tokenised shards: read in order, deduplicated and split by content, tokenised in worker processes.

This process reads and writes; workers only tokenise. So the result depends neither on the number of workers nor on
where an earlier run was stopped: what it finished is kept, what it half wrote is written again.
"""

import fcntl
import hashlib
import logging
import multiprocessing
import os
import re
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from efla_jax.data import readers, shards
from efla_jax.data.readers import Record
from efla_jax.data.text import in_split
from efla_jax.data.tokenizer import Tokenizer, TokenizerSpec, load_tokenizer

LOCK, SCRAP = "lock", re.compile(rf"({'|'.join(shards.SPLITS)})-\d+\.\w+\.tmp")  # unfinished shards
BATCH_BYTES, BATCH_DOCUMENTS = 1 << 20, 1024


@dataclass(frozen=True)
class Preparation:
    """What to read and how. path, valid_path: a file, a folder, or "hf:NAME[:CONFIG[:SPLIT]]".

    Without a valid_path, documents are held out by the hash of their content, valid_fraction of them. deduplicate drops
    every repeated document; without it only what stands in valid_path is dropped from path. shard_tokens: a shard is
    closed when it has that many.
    """

    path: str
    tokenizer: TokenizerSpec = TokenizerSpec()
    valid_path: str = ""
    valid_fraction: float = 0.005
    text_field: str = "text"
    deduplicate: bool = True
    shard_tokens: int = 1 << 27


class Document(NamedTuple):
    """A document to tokenise: its number among all that are read, its split, and its bytes."""

    number: int
    split: str
    text: bytes
    prompt: bytes


class Encoded(NamedTuple):
    """A tokenised document: untrained is the length of BOS and prompt, if there is a prompt."""

    number: int
    split: str
    tokens: np.ndarray
    untrained: int
    raw_bytes: int
    target_bytes: int


def prepare(preparation: Preparation, folder: str, workers: int = 1, progress: bool = True) -> shards.Manifest:
    """Writes the shards of `preparation` into `folder` and returns their manifest; does nothing if that is done.

    workers=0 tokenises in this process. Raises ValueError when the folder holds something else, or shards made with
    other settings, and for whatever cannot be read.
    """
    if workers < 0:
        raise ValueError(f"workers={workers} must be >= 0; 0 tokenises in this process")
    _check(preparation)
    tokenizer, target = load_tokenizer(preparation.tokenizer), Path(folder).expanduser()
    if target.exists() and not target.is_dir():
        raise ValueError(f"folder {str(target)!r} is a file; name a folder, which may not exist yet")
    target.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        manifest, done = _begun(target, _blank(preparation, tokenizer))
        if done:
            return manifest
        counts: Counter[str] = Counter({name: 0 for name in ("documents", "duplicates", "empty", "nul_bytes")})
        with _pool(workers) as pool, _bar(preparation, progress) as bar:
            batches = _batches(preparation, manifest, counts, bar)
            encoded = _in_order(pool, preparation.tokenizer, batches, ahead=2 * workers + 2)
            manifest = _write(target, preparation, manifest, encoded)
        manifest = replace(manifest, counts=dict(counts))
        for split in shards.SPLITS[: 2 if preparation.valid_path or preparation.valid_fraction else 1]:
            if not manifest.total("documents", split):
                raise ValueError(f"the {split} split of path={preparation.path!r} is empty ({dict(counts)}, "
                                 f"valid_fraction={preparation.valid_fraction}); give more documents, another fraction "
                                 "or a valid_path, and another folder, as this one keeps its settings")
        for shard in manifest.shards:
            shards.verify_shard(target, shard)
        manifest.write(target / shards.MANIFEST)
        (target / shards.JOURNAL).unlink(missing_ok=True)
    return manifest


def _check(preparation: Preparation) -> None:
    if not 0 <= preparation.valid_fraction < 1:
        raise ValueError(f"valid_fraction={preparation.valid_fraction} must be >= 0 and below 1; 0.005 is usual")
    if preparation.shard_tokens < 1:
        raise ValueError(f"shard_tokens={preparation.shard_tokens} must be >= 1; {1 << 27} is usual")


def _blank(preparation: Preparation, tokenizer: Tokenizer) -> shards.Manifest:
    """The manifest before the first shard: settings, and each input file with its size."""
    settings = asdict(preparation)
    del settings["tokenizer"]  # described by what it does, not by where its file lies
    for side in ("path", "valid_path"):
        path = getattr(preparation, side)
        if path and not path.startswith(readers.HUB):
            settings[f"{side}_files"] = [[name, file.stat().st_size] for name, file in readers.list_files(path)]
    return shards.Manifest(tokenizer.describe(), shards.token_dtype(tokenizer.vocab_size), settings)


def _begun(folder: Path, blank: shards.Manifest) -> tuple[shards.Manifest, bool]:
    """What the folder already has of this preparation, and whether that is all; unsound shards are left out."""
    for file in (folder / shards.MANIFEST, folder / shards.JOURNAL):
        if file.exists():
            found = shards.read_manifest(file)
            old, now = ({**m.settings, **m.tokenizer} for m in (found, blank))
            differ = [f"{key}={old.get(key)!r}, now {now.get(key)!r}" for key in sorted({*old, *now})
                      if old.get(key) != now.get(key)]
            if differ and not found.shards:  # a mistyped line, say: nothing is lost
                break
            if differ:
                raise ValueError(f"folder {str(folder)!r} was prepared with other settings ("
                                 f"{'; '.join(differ)[:500]}): "
                                 "give those, or another folder")
            sound = replace(found, shards=tuple(_sound(folder, found)))
            if file.name == shards.MANIFEST and sound != found:
                sound.write(folder / shards.JOURNAL)
                file.unlink()
            return sound, file.name == shards.MANIFEST and sound == found
    ours = (LOCK, shards.JOURNAL, f"{shards.JOURNAL}.tmp")
    others = sorted(file.name for file in folder.iterdir() if file.name not in ours and not SCRAP.fullmatch(file.name))
    if others:
        raise ValueError(f"folder {str(folder)!r} holds other files ({', '.join(others[:3])}); give an empty folder")
    blank.write(folder / shards.JOURNAL)
    return blank, False


def _sound(folder: Path, manifest: shards.Manifest) -> Iterator[shards.Shard]:
    """The shards of each split up to the first that is missing or damaged."""
    ended = set()
    for shard in manifest.shards:
        if shard.split in ended:
            continue
        try:
            shards.open_shard(folder, shard, np.dtype(manifest.dtype))
            shards.verify_shard(folder, shard)
            yield shard
        except ValueError as error:
            logging.warning("%s. It is made again.", error)
            ended.add(shard.split)


def _records(preparation: Preparation, bar: tqdm) -> Iterator[tuple[str, Record]]:
    """(side, record) in a fixed order, all of valid_path first, so that what it holds can be kept out of path."""
    for side in ("valid_path", "path"):
        path = getattr(preparation, side)
        if path.startswith(readers.HUB):
            for record in readers.read_hub(path, preparation.text_field):
                yield side, record
                bar.update(len(record.prompt) + len(record.text))
        elif path:
            for name, file in readers.list_files(path):
                done = bar.n
                for record in readers.read_file(name, file, preparation.text_field):
                    yield side, record
                    bar.update(done + record.position - bar.n)


def _documents(preparation: Preparation, counts: Counter[str], bar: tqdm) -> Iterator[Document]:
    """What is kept, each in its split; counts what is dropped."""
    seen: set[bytes] = set()
    for number, (side, record) in enumerate(_records(preparation, bar)):
        text, prompt = record.text.replace(b"\0", b""), record.prompt.replace(b"\0", b"")
        counts["nul_bytes"] += len(record.text) + len(record.prompt) - len(text) - len(prompt)
        key = hashlib.sha256(prompt + b"\0" + text).digest()[:16]
        if not text.strip():
            counts["empty"] += 1
            continue
        if key in seen:
            counts["duplicates"] += 1
            continue
        if preparation.deduplicate or side == "valid_path":
            seen.add(key)
        if preparation.valid_path:
            held_out = side == "valid_path"
        else:  # by content: a repeated document cannot stand on both sides
            held_out = in_split(key, preparation.valid_fraction)
        counts["documents"] += 1
        yield Document(number, "valid" if held_out else "train", text, prompt)


def _batches(
    preparation: Preparation, manifest: shards.Manifest, counts: Counter[str], bar: tqdm
) -> Iterator[list[Document]]:
    """Documents that no finished shard has, in portions for the workers."""
    first = {split: max((s.next_record for s in manifest.shards if s.split == split), default=0)
             for split in shards.SPLITS}
    batch, size = [], 0
    for document in _documents(preparation, counts, bar):
        if document.number >= first[document.split]:
            batch.append(document)
            size += len(document.text) + len(document.prompt)
            if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def encode(spec: TokenizerSpec, documents: list[Document]) -> list[Encoded]:
    """Tokenises documents: BOS if there is one, prompt, text, EOS. Runs in a worker, which keeps its tokenizer."""
    tokenizer, encoded = load_tokenizer(spec), []
    dtype = np.dtype(shards.token_dtype(tokenizer.vocab_size))
    start = [tokenizer.bos_id] if tokenizer.bos_id >= 0 else []
    for number, split, text, prompt in documents:
        # Apart, so that the border between prompt and response is a border between tokens.
        before, after = (tokenizer.encode(part) if part else () for part in (prompt, text))
        if after:
            tokens = np.array([*start, *before, *after, tokenizer.eos_id], dtype)
            untrained = len(start) + len(before) if prompt else 0
            encoded.append(Encoded(number, split, tokens, untrained, len(prompt) + len(text), len(text)))
    return encoded


def _in_order(
    pool: Executor | None, spec: TokenizerSpec, batches: Iterator[list[Document]], ahead: int
) -> Iterator[Encoded]:
    """encode over batches, results in the order of the batches and only `ahead` of them in memory."""
    if pool is None:
        for batch in batches:
            yield from encode(spec, batch)
        return
    pending: deque[Future[list[Encoded]]] = deque()
    for batch in batches:
        pending.append(pool.submit(encode, spec, batch))
        if len(pending) > ahead:
            yield from pending.popleft().result()
    while pending:
        yield from pending.popleft().result()


def _write(
    folder: Path, preparation: Preparation, manifest: shards.Manifest, encoded: Iterator[Encoded]
) -> shards.Manifest:
    """Fills and closes shards, noting each finished one in the journal."""
    writers: dict[str, shards.ShardWriter] = {}

    def close(split: str, next_record: int) -> None:
        nonlocal manifest
        manifest = replace(manifest, shards=(*manifest.shards, writers[split].close(next_record)))
        del writers[split]
        manifest.write(folder / shards.JOURNAL)

    last = -1
    try:
        for number, split, tokens, untrained, raw_bytes, target_bytes in encoded:
            with _disk(folder):
                if split not in writers:
                    index = sum(shard.split == split for shard in manifest.shards)
                    writers[split] = shards.ShardWriter(folder, f"{split}-{index:05d}", split, tokens.dtype)
                writers[split].append(tokens, untrained, raw_bytes, target_bytes)
                last = number
                if writers[split].tokens >= preparation.shard_tokens:
                    close(split, number + 1)
        with _disk(folder):
            for split in tuple(writers):
                close(split, last + 1)
    finally:
        for writer in writers.values():
            writer.abandon()
    return manifest


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """A full or read-only disk names the folder and says how to go on."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror} while writing shards; the same command goes on where this one stopped"
        raise OSError(error.errno, reason, str(folder)) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Refuses a second preparation of the same folder; the lock goes with its process, however that ends."""
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"folder {str(folder)!r} is being prepared by another process; wait for it") from error
        yield


@contextmanager
def _pool(workers: int) -> Iterator[Executor | None]:
    if not workers:
        yield None
        return
    # spawn: a fork would copy the reader's threads half-way. One thread each: the processes are the parallelism.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_end_with_parent)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    # A worker of a killed preparation would wait for work for ever.
    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _bar(preparation: Preparation, progress: bool) -> tqdm:
    sizes = [file.stat().st_size for path in (preparation.valid_path, preparation.path)
             if path and not path.startswith(readers.HUB) for _, file in readers.list_files(path)]
    return tqdm(total=sum(sizes) or None, unit="B", unit_scale=True, desc="read", disable=not progress)
