"""Our side of an exchange: the parameters of a step read a leaf at a time, and written from arrays in files.

Reading takes twice the memory of the largest leaf, of all layers together, since orbax reads it as a whole. For
writing, leaves are laid into files first, tensor by tensor, from which orbax takes them: as much disk again as the
checkpoint while it is written, and pages of memory that the system can take back; orbax itself compresses leaves as a
whole. Measured for 1.37B parameters in bfloat16 (1.0 GiB the largest leaf): 2.6 GiB in, 2.3 GiB out.
"""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from tqdm import tqdm

from efla_jax.checkpoint import interchange
from efla_jax.checkpoint.checkpointer import Checkpointer
from efla_jax.checkpoint.folder import newest_intact, read_json, require_intact, steps_of
from efla_jax.checkpoint.interchange import Layout, Place
from efla_jax.checkpoint.restore import PARTS, path_of, read_state

ROOT = "params"  # of the variables of a Linen module


class OnDisk(np.memmap):
    """A leaf in a file. orbax copies what it saves, in case it changes meanwhile; this does not, and stays where it is.
    """

    def __deepcopy__(self, memo: Any) -> "OnDisk":
        return self


def flat(params: Any) -> dict[str, Any]:
    """{path: leaf} of the variables of a model, without their root."""
    return {path_of(keys).removeprefix(f"{ROOT}/"): x for keys, x in jax.tree_util.tree_leaves_with_path(params)}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The variables whose leaves `flat` would give."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, last = f"{ROOT}/{path}".split("/")
        functools.reduce(lambda node, name: node.setdefault(name, {}), above, tree)[last] = leaf
    return tree


class StoredParams:
    """The parameters of a run's newest undamaged step, or of the step whose folder is given; part: as `load_params`.

    `shapes` of the leaves by path, `metadata` of the step; `read` gives one leaf."""

    def __init__(self, path: str | Path, part: str = "params"):
        folder = Path(path).expanduser().absolute()
        if (folder / "state").is_dir():
            require_intact(folder)
        else:
            root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
            folder = root / str(newest_intact(root, steps_of(root))[0])
        self.folder, self._part = folder, PARTS[part]
        self.metadata = read_json(folder, "metadata").get("value") or {}
        stored = ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree
        prefix = f"{self._part}/{ROOT}/"
        named = {path_of(keys): x for keys, x in jax.tree_util.tree_leaves_with_path(stored)}
        self._leaves = {name.removeprefix(prefix): x for name, x in named.items() if name.startswith(prefix)}
        self.shapes = {name: tuple(x.shape) for name, x in self._leaves.items()}

    def read(self, leaf: str) -> np.ndarray:
        wanted = jax.ShapeDtypeStruct(self.shapes[leaf], self._leaves[leaf].dtype)
        tree, _ = read_state(self.folder, self._part, nested({leaf: wanted}), allow_partial=True, cast=False)
        return np.asarray(jax.tree.leaves(tree)[0])


def gather(layout: Layout, shapes: Mapping[str, tuple[int, ...]], tensors: Any, scratch: Path) -> dict[str, OnDisk]:
    """Every leaf in float32, in a file of the folder `scratch`, out of `tensors`, which gives arrays by name."""
    leaves = {}
    for number, (leaf, places) in enumerate(tqdm(layout.by_leaf().items(), unit="leaf")):
        array = OnDisk(scratch / f"{number}.bin", np.float32, "w+", 0, shapes[leaf])
        for place in places:
            target = array[place.group] if place.group >= 0 else array
            target[...] = interchange.read(place, tensors[place.tensor])
        array.flush()
        leaves[leaf] = array
    return leaves


def save(folder: Path, leaves: Mapping[str, np.ndarray], metadata: Any) -> None:
    """Step 0 of the checkpoints in `folder`: these parameters and nothing else."""
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(0, {"params": nested(leaves)}, None, metadata)


def scatter(layout: Layout, stored: StoredParams, tensors: Mapping[str, np.ndarray]) -> None:
    """Every leaf of a step into the tensors it belongs to, in their dtypes, each read back at once. Raises ValueError
    for a number that a dtype cannot hold, RuntimeError where the file does not hold what was written."""
    for leaf, places in tqdm(layout.by_leaf().items(), unit="leaf"):
        _scatter_leaf(stored.read(leaf), places, tensors)  # held by nobody when the next is read


def _scatter_leaf(array: np.ndarray, places: list[Place], tensors: Mapping[str, np.ndarray]) -> None:
    for place in places:
        tensor = tensors[place.tensor]
        layer = array[place.group] if place.group >= 0 else array
        with np.errstate(over="ignore"):
            wanted = layer.astype(tensor.dtype)
        if not np.array_equal(np.isfinite(wanted), np.isfinite(layer)):
            raise ValueError(f"{place.tensor}: {np.abs(layer).max():g} is beyond {tensor.dtype}; export with another"
                             " --dtype.")  # fmt: skip
        interchange.write(place, wanted, tensor)
        if not same(interchange.read(place, tensor), wanted):
            raise RuntimeError(f"{place.tensor}: the file does not hold what was written for {place.leaf}; is the disk"
                               " full?")  # fmt: skip


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays have the same bits, NaN or not."""
    bits = f"u{one.dtype.itemsize}"
    one, other = np.ascontiguousarray(one), np.ascontiguousarray(other)
    return one.shape == other.shape and bool(np.array_equal(one.view(bits), other.view(bits)))


def size_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many numbers arrays of these shapes hold."""
    return sum(map(math.prod, shapes.values()))
