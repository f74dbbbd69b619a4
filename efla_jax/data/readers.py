"""Documents out of files, one at a time: .txt, .jsonl (plain, .gz, .xz, .zst), .parquet, or a Hugging Face dataset."""

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

PACKED = ("", ".gz", ".xz", ".zst")
TEXT_SUFFIXES = tuple(kind + packed for kind in (".txt", ".jsonl") for packed in PACKED)
SUFFIXES = (*TEXT_SUFFIXES, ".parquet")
HUB = "hf:"
RESPONSES = ("response", "completion")


class Record(NamedTuple):
    """One document: a name for reports, its text, the prompt before it, and the bytes of its file read so far."""

    name: str
    text: bytes
    prompt: bytes = b""
    position: int = 0


def list_files(path: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[tuple[str, Path]]:
    """(name relative to `path`, file) of a file or, in sorted order, of every file of a known kind in a folder."""
    root = Path(path).expanduser()
    if not root.exists():
        raise ValueError(f"path={path!r} does not exist; give a file or folder with {', '.join(suffixes)}")
    if root.is_dir():
        files = sorted(f for f in root.rglob("*") if f.is_file() and f.name.endswith(suffixes))
    else:
        files = [root]
    if not files or not all(f.name.endswith(suffixes) for f in files):
        raise ValueError(f"path={path!r} holds no text file; expected a name that ends with {', '.join(suffixes)}")
    return [(f.relative_to(root).as_posix() if f != root else f.name, f) for f in files]


def read_file(name: str, file: Path, field: str = "text") -> Iterator[Record]:
    """The documents of one file. A .txt file is one, a line of .jsonl or a row of .parquet is one.

    A line or row has the string `field`, or "prompt" and "response" (or "completion") for prompt-masked training.
    Raises ValueError naming file and line for what is damaged or lacks the fields.
    """
    try:
        with file.open("rb") as raw:
            if file.suffix == ".parquet":
                rows = _parquet_rows(file, raw, field)
            elif ".jsonl" in file.name:
                rows = _jsonl_rows(file, _unpack(file, raw))
            else:
                yield Record(name, _unpack(file, raw).read(), position=raw.tell())
                return
            for number, row in rows:
                text, prompt = _fields(row, field, f"file {str(file)!r}, line {number}")
                yield Record(f"{name}#{number}", text, prompt, raw.tell())
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"file {str(file)!r} cannot be read ({error}): damaged? fetch it again") from error


def read_hub(path: str, field: str = "text") -> Iterator[Record]:
    """The documents of "hf:NAME", "hf:NAME:CONFIG" or "hf:NAME:CONFIG:SPLIT" (split "train"), streamed in order."""
    name, config, split, *rest = path.removeprefix(HUB).split(":") + ["", ""]
    if not name or any(rest):
        raise ValueError(f"path={path!r} must be hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    datasets = optional("datasets", f"path={path!r}")
    rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    for number, row in enumerate(rows, start=1):
        text, prompt = _fields(row, field, f"{path}, row {number}")
        yield Record(f"{path}#{number}", text, prompt)


def optional(module: str, wanted_by: str, extra: str = "") -> Any:
    """An optional dependency, or ImportError saying what needs it and how to install it, by an extra of ours if it has
    one."""
    try:
        return __import__(module)
    except ImportError as error:
        package = f"'efla_jax[{extra}]'" if extra else module
        raise ImportError(f"{wanted_by} needs {module}, which is not installed: pip install {package}") from error


def _unpack(file: Path, raw: io.BufferedReader) -> io.BufferedIOBase:
    if file.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if file.suffix == ".xz":
        return lzma.LZMAFile(raw)
    if file.suffix == ".zst":
        return io.BufferedReader(_Chunks(_zstd_chunks(file, raw)), 1 << 20)
    return raw


def _zstd_chunks(file: Path, raw: io.BufferedReader) -> Iterator[bytes]:
    # Not zstandard's own stream_reader: that takes a file cut inside a frame for a complete one.
    zstandard = optional("zstandard", f"file {str(file)!r}")
    frame, packed = None, b""
    try:
        while packed := packed or raw.read(1 << 20):
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(packed)
            packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from error
    if frame is not None:
        raise EOFError("it ends inside a zstd frame")


class _Chunks(io.RawIOBase):
    """An iterator of bytes as a readable stream."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._rest = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._rest:
            try:
                self._rest = next(self._chunks)
            except StopIteration:
                return 0
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _jsonl_rows(file: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"file {str(file)!r}, line {number}: expected a JSON object "
                             f"({type(error).__name__}: {error}); repair or remove the line") from error
        yield number, row


def _parquet_rows(file: Path, raw: io.BufferedReader, field: str) -> Iterator[tuple[int, Any]]:
    optional("pyarrow", f"file {str(file)!r}")
    import pyarrow
    import pyarrow.parquet

    try:
        table, number = pyarrow.parquet.ParquetFile(raw), 0
        columns = [name for name in table.schema_arrow.names if name in (field, "prompt", *RESPONSES)]
        for batch in table.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from error


def _fields(row: Any, field: str, where: str) -> tuple[bytes, bytes]:
    """(text, prompt) of a row as UTF-8."""
    names = [name for name in RESPONSES if isinstance(row, dict) and name in row]
    chosen: tuple[str, ...]
    if isinstance(row, dict) and "prompt" in row and names:
        chosen = (names[0], "prompt")
    elif isinstance(row, dict) and field in row:
        chosen = (field,)
    else:
        found = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where}: expected an object with a field {field!r}, or 'prompt' and 'response', and found "
                         f"{found or 'no such field'}; repair or remove it, or name another field")
    for name in chosen:
        if not isinstance(row[name], str):
            raise ValueError(f"{where}: field {name!r} is {type(row[name]).__name__}, not a string")
    # JSON can spell lone surrogates, which UTF-8 cannot: they become "?".
    text, *prompt = (row[name].encode(errors="replace") for name in chosen)
    return text, prompt[0] if prompt else b""
