"""Parameters in another library's layout and back: one table per family, and every step of it can be undone.

A table says which leaves of ours make up each tensor of theirs, one below another along its first axis. That is all
that differs between the families; how a leaf lies in its rows follows from what it is:

    kernel [in, out]       a Linear's weight is [out, in]: transposed
    *_conv/weight [W, C]   a Conv1d's weight is [C, 1, W], its last tap on the current token
    all else               as it is

Nothing is computed, so that import(export(x)) == x and export(import(x)) == x bit for bit. The tables are those of
`interchange_families`; here a row of one becomes `Place`s, between which numpy arrays are copied, on disk or not.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

BLOCK = re.compile(r"groups/block_(\d+)/")
LAYER = "{layer}"


class Tensor(NamedTuple):
    """A row of a table. name: of theirs, with {layer} where there is one of each layer; leaves: of ours, one below
    another, from the block on where there is a {layer}, else from the root of the parameters.

    A row is left out when the model has none of its leaves. per_key_head: the rows of theirs are grouped by key head,
    and each group has its part of every leaf, in this order (Qwen3-Next)."""

    name: str
    leaves: tuple[str, ...]
    per_key_head: bool = False


class Place(NamedTuple):
    """Where a leaf stands: layer `group` of it (-1: all of it) is rows [start, stop) of each of `parts` equal parts of
    the tensor."""

    leaf: str
    group: int
    tensor: str
    start: int
    stop: int
    parts: int


class Layout(NamedTuple):
    """All places, those of a leaf together, and the shape of every tensor of theirs."""

    places: tuple[Place, ...]
    tensors: Mapping[str, tuple[int, ...]]

    def by_leaf(self) -> dict[str, list[Place]]:
        """{leaf: its places}, one per layer."""
        found: dict[str, list[Place]] = {}
        for place in self.places:
            found.setdefault(place.leaf, []).append(place)
        return found


def theirs(leaf: str, x: np.ndarray) -> np.ndarray:
    """One layer of a leaf as rows of a tensor: a view."""
    if leaf.endswith("/kernel"):
        return x.T
    return x.T[:, None, :] if leaf.endswith("_conv/weight") else x


def ours(leaf: str, rows: np.ndarray) -> np.ndarray:
    """The leaf that `theirs` made these rows of: a view."""
    if leaf.endswith("/kernel"):
        return rows.T
    return rows[:, 0, :].T if leaf.endswith("_conv/weight") else rows


def lay_out(table: Iterable[Tensor], shapes: Mapping[str, tuple[int, ...]], key_heads: int = 1) -> Layout:
    """Where each leaf stands in the tensors of a table.

    shapes: of the leaves of a model by path ("groups/block_0/mixer/q_proj/kernel", with its leading axis of layers), or
    of one layer by itself. key_heads: how many groups the rows of a `per_key_head` tensor have.

    Raises ValueError listing the leaves that the table has no place for."""
    blocks = 1 + max((int(found[1]) for path in shapes if (found := BLOCK.match(path))), default=-1)
    groups = next((shape[0] for path, shape in shapes.items() if BLOCK.match(path)), 0)
    places: list[Place] = []
    tensors: dict[str, tuple[int, ...]] = {}
    for tensor in table:
        layers: Iterable[int] = range(groups * blocks) if LAYER in tensor.name else (-1,)
        for layer in layers:
            group, block = divmod(layer, blocks) if layer >= 0 else (-1, 0)
            prefix = f"groups/block_{block}/" if layer >= 0 else ""
            name = tensor.name.replace(LAYER, str(layer))
            wanted = [prefix + leaf for leaf in tensor.leaves]
            if any(leaf in shapes for leaf in wanted):
                stand, tensors[name] = _stack(name, wanted, group, shapes, key_heads if tensor.per_key_head else 1)
                places += stand
    homeless = sorted(set(shapes) - {place.leaf for place in places})
    if homeless:
        raise ValueError(f"the other library's layout has no place for {', '.join(homeless)}; options of the mixer that"
                         " it does not know must be off.")  # fmt: skip
    return Layout(tuple(places), tensors)


def _stack(
    name: str, leaves: list[str], group: int, shapes: Mapping[str, tuple[int, ...]], parts: int
) -> tuple[list[Place], tuple[int, ...]]:
    """The places of one tensor's leaves, and its shape."""
    absent = [leaf for leaf in leaves if leaf not in shapes]
    if absent:
        raise ValueError(f"{name} is made of {', '.join(leaves)}, but the model has no {', '.join(absent)}.")
    places, start, rest = [], 0, set()
    for leaf in leaves:
        own = shapes[leaf][1:] if group >= 0 else shapes[leaf]
        rows, *others = theirs(leaf, np.broadcast_to(np.float32(0), own)).shape
        if rows % parts:
            raise ValueError(f"{leaf}: {rows} rows are not divisible by {parts} key heads.")
        places.append(Place(leaf, group, name, start, start + rows // parts, parts))
        start += rows // parts
        rest.add(tuple(others))
    if len(rest) > 1:
        raise ValueError(f"{name}: {', '.join(leaves)} have rows of different shapes, {sorted(rest)}.")
    return places, (start * parts, *rest.pop())


def rows_of(place: Place, tensor: np.ndarray) -> np.ndarray:
    """The rows of a tensor where a leaf stands, [parts, rows, ...]: a view, also of a file."""
    return tensor.reshape(place.parts, -1, *tensor.shape[1:])[:, place.start : place.stop]


def read(place: Place, tensor: np.ndarray) -> np.ndarray:
    """One layer of a leaf, out of a tensor of theirs."""
    rows = rows_of(place, tensor)
    return ours(place.leaf, rows.reshape(-1, *tensor.shape[1:]))


def write(place: Place, leaf: np.ndarray, tensor: np.ndarray) -> None:
    """One layer of a leaf into a tensor of theirs, in its dtype."""
    target = rows_of(place, tensor)
    target[...] = theirs(place.leaf, leaf).reshape(target.shape)


def to_leaves(layout: Layout, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The leaves of tensors that are all in memory; those of a model are stacked. Raises as `check_names`."""
    check_names(layout.tensors, {name: tensor.shape for name, tensor in tensors.items()})
    found = {}
    for leaf, places in layout.by_leaf().items():
        layers = [read(place, tensors[place.tensor]) for place in places]
        found[leaf] = np.stack(layers) if places[0].group >= 0 else np.array(layers[0])
    return found


def to_tensors(layout: Layout, leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of leaves that are all in memory."""
    dtype = {place.tensor: leaves[place.leaf].dtype for place in layout.places}
    found = {name: np.empty(shape, dtype[name]) for name, shape in layout.tensors.items()}
    for place in layout.places:
        leaf = leaves[place.leaf]
        write(place, leaf[place.group] if place.group >= 0 else leaf, found[place.tensor])
    return found


def check_names(wanted: Mapping[str, tuple[int, ...]], there: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError listing every tensor that is missing, that nothing uses, or whose shape differs."""
    lines = [f"  {name} {list(shape)}: missing" for name, shape in wanted.items() if name not in there]
    lines += [f"  {name} {list(shape)}: not used" for name, shape in there.items() if name not in wanted]
    lines += [
        f"  {name}: {list(there[name])} there, {list(shape)} by the config"
        for name, shape in wanted.items()
        if name in there and tuple(there[name]) != tuple(shape)
    ]
    if lines:
        raise ValueError("the tensors are not those of the config:\n" + "\n".join(lines) + "\nGive the config that"
                         " belongs to them, or the family they are of.")  # fmt: skip
