"""safetensors files, read and written a tensor or a part of one at a time.

The format: eight bytes, the length of a header in JSON that gives dtype, shape and place of every tensor; their bytes
in C order. Files are mapped, so that only the rows that are asked for are read, and a file larger than memory can be
filled in any order, for which the library of that name has no call. Source: the format's description in
github.com/huggingface/safetensors.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: Mapping[str, Any] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000  # bytes: the library's own limit
ALIGNMENT = 8  # the header is filled up with blanks, so that the tensors begin at a multiple of it


def header_of(file: Path) -> tuple[dict[str, dict], int]:
    """({name: dtype, shape, data_offsets}, where the bytes begin). Raises ValueError for what is no such file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise ValueError(f"{file}: not a safetensors file, or cut short; download it again.")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file}: its header cannot be read ({error}); download it again.") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size:
        raise ValueError(f"{file}: {size} bytes, but its header speaks of {8 + length + end}; download it again.")
    return header, 8 + length


class Reader:
    """The tensors of a file, or of a folder with one file or an index: `shapes`, `dtypes` and the mapped arrays.

    Raises FileNotFoundError for a folder without such files, ValueError for damaged ones and for tensors of dtypes that
    hold no floating-point numbers when they are asked for."""

    def __init__(self, source: Path):
        self._entries: dict[str, tuple[Path, int, dict]] = {}
        for file in files_of(source):
            header, start = header_of(file)
            for name, entry in header.items():
                if name in self._entries:
                    raise ValueError(f"{name} is in {self._entries[name][0]} and in {file}; remove one of them.")
                self._entries[name] = (file, start, entry)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(entry["shape"]) for name, (_, _, entry) in self._entries.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        """By name, as the format writes them: "F32", "BF16", ..."""
        return {name: entry["dtype"] for name, (_, _, entry) in self._entries.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        file, start, entry = self._entries[name]
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} in {file}: dtype {entry['dtype']} is not one of {', '.join(DTYPES)}.")
        return mapped(file, "r", start, entry)


def mapped(file: Path, mode: Any, start: int, entry: Mapping[str, Any]) -> np.ndarray:
    """The array of a header's entry, in the file."""
    shape, offset = tuple(entry["shape"]), start + entry["data_offsets"][0]
    return np.ndarray.view(np.memmap(file, DTYPES[entry["dtype"]], mode, offset, shape), np.ndarray)


def files_of(source: Path) -> list[Path]:
    """The safetensors files of a checkpoint: a file, or a folder with an index or a single one."""
    if source.is_file():
        return [source]
    if (source / INDEX).is_file():
        weights = json.loads((source / INDEX).read_text())["weight_map"]
        files = [source / name for name in sorted(set(weights.values()))]
    else:
        files = [source / SINGLE] if (source / SINGLE).is_file() else sorted(source.glob("*.safetensors"))
        if len(files) > 1:
            raise ValueError(f"{source}: {len(files)} safetensors files, but no {INDEX} that says what they are; name"
                             " one of them, or fetch the index.")  # fmt: skip
    absent = [file.name for file in files if not file.is_file()]
    if absent or not files:
        raise FileNotFoundError(f"{source}: {', '.join(absent) or '*.safetensors'} is not there; fetch it, and save"
                                " checkpoints of other formats as safetensors first.")  # fmt: skip
    return files


def create(folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], largest: int) -> dict[str, np.ndarray]:
    """Files for `tensors`, {name: (dtype, shape)}, of at most `largest` bytes (or one tensor) each, with an index when
    they are several; their arrays, zeros, mapped for writing: what is assigned to them is in the file."""
    sizes = {name: DTYPES[code].itemsize * int(np.prod(shape)) for name, (code, shape) in tensors.items()}
    shards: list[list[str]] = [[]]
    for name in tensors:
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + sizes[name] > largest:
            shards.append([])
        shards[-1].append(name)
    one = len(shards) == 1
    files = [SINGLE if one else f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    arrays: dict[str, np.ndarray] = {}
    for file, names in zip(files, shards, strict=True):
        arrays |= _create_file(folder / file, {name: tensors[name] for name in names}, sizes)
    if not one:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return arrays


def _create_file(
    file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    entries, end = {}, 0
    # The widest dtypes first, so that every tensor begins at a multiple of its item's size, as the library wants it.
    for name in sorted(tensors, key=lambda name: -DTYPES[tensors[name][0]].itemsize):
        code, shape = tensors[name]
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [end, end + sizes[name]]}
        end += sizes[name]
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)
    return {name: mapped(file, "r+", 8 + len(header), entry) for name, entry in entries.items()}
