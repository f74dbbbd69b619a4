"""Folders of checkpoints: which steps there are, and whether a step is still what was written."""

import json
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

CHECKSUMS = "checksums.json"
DESCRIPTIONS = ("metadata/metadata", "data/metadata", "state/_METADATA")  # JSON that every step has


def write_checksums(folder: Path) -> None:
    """Size and checksum of every file of `folder`, a step all of which is written but nothing has its final name."""
    # The folder of an item is still called <item>.<something> here.
    files = {"/".join((item.name.partition(".")[0], *file.relative_to(item).parts)): file
             for item in sorted(folder.iterdir()) if item.is_dir()
             for file in sorted(item.rglob("*")) if file.is_file()}  # fmt: skip
    table = dict(zip(files, _checksums(files.values()), strict=True))
    (folder / CHECKSUMS).write_text(json.dumps(table, indent=1))


def _checksums(files: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor() as threads:
        return list(threads.map(_checksum, files))


def _checksum(file: Path) -> str:
    """Size and CRC-32, against accidents; "absent" for a file that is not there."""
    if not file.is_file():
        return "absent"
    size = value = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 24):
            size, value = size + len(block), zlib.crc32(block, value)
    return f"{size} bytes, crc32 {value:08x}"


def steps_of(directory: Path) -> tuple[int, ...]:
    """The numbers of the complete steps, as the first process sees them: shared file systems lag behind."""
    folders = directory.iterdir() if directory.is_dir() else ()
    steps = np.array(sorted(int(f.name) for f in folders if f.name.isdecimal() and f.is_dir()), np.int32)
    if jax.process_count() > 1:
        count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
        mine = steps if jax.process_index() == 0 else np.zeros(count, np.int32)
        steps = multihost_utils.broadcast_one_to_all(mine) if count else mine
    return tuple(int(step) for step in steps)


def damage_of(folder: Path) -> str:
    """What is wrong with a complete step, "" if nothing: the same verdict in every process.

    Each process verifies its share of the files. A step of format 1 has no checksums; what reads is taken as whole.
    """
    problem = ""
    try:
        metadata = [json.loads((folder / name).read_text()) for name in DESCRIPTIONS][0]
        if metadata.get("format", 1) > 1 or (folder / CHECKSUMS).exists():
            known = json.loads((folder / CHECKSUMS).read_text())
            names = list(known)[jax.process_index() :: jax.process_count()]
            for name, found in zip(names, _checksums(folder / name for name in names), strict=True):
                if found != known[name]:
                    problem = f"{name} is {found}, was {known[name]}"
                    break
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if jax.process_count() > 1 and multihost_utils.process_allgather(np.array(bool(problem))).any():
        problem = problem or "found by another process"
    return problem


def require_intact(folder: Path) -> None:
    """Raise ValueError for a damaged step."""
    if reason := damage_of(folder):
        raise ValueError(f"step={folder.name} in {folder.parent} is damaged: {reason}; restore an earlier step")


def newest_intact(directory: Path, steps: tuple[int, ...]) -> tuple[int, dict[int, str]]:
    """The newest undamaged of the steps, and the damaged ones after it with the reasons."""
    damaged: dict[int, str] = {}
    for step in reversed(steps):
        damaged[step] = damage_of(directory / str(step))
        if not damaged[step]:
            del damaged[step]
            return step, damaged
    if damaged:
        reasons = "; ".join(f"step={step} in {directory} is damaged: {reason}" for step, reason in damaged.items())
        raise ValueError(f"{reasons}. There is not an earlier step; move these folders away to begin afresh")
    raise FileNotFoundError(f"directory={str(directory)!r} holds no complete checkpoint; check the path, or start a "
                            "fresh run")  # fmt: skip


def read_json(folder: Path, item: str) -> dict[str, Any]:
    """What the item of a step holds."""
    return json.loads((folder / item / "metadata").read_text())


def metrics_of(folder: Path) -> dict[str, float]:
    """The scores saved with a step; none where they cannot be read, which `restore` reports."""
    try:
        return {name: float(value) for name, value in read_json(folder, "metadata").get("metrics", {}).items()}
    except (OSError, ValueError, AttributeError):
        return {}
