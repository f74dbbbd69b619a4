"""A population that was broken off, in one file: what `population.fit_population(..., until=...)` goes on from."""

import json
import os
import pathlib
import zipfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

FORMAT = 1


def is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def save(file: pathlib.Path, header: dict, leaves: Sequence[Any]) -> None:
    """Writes arrays of any dtype as their bytes, which .npz has for all, and a header that JSON knows. The file appears
    when it is whole."""
    arrays = [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in leaves]
    raw: dict[str, Any] = {
        f"leaf_{i}": np.ascontiguousarray(a).reshape(-1).view(np.uint8) for i, a in enumerate(arrays)
    }
    part = file.with_suffix(".part")
    with open(part, "wb") as stream:
        np.savez(stream, header=np.array(json.dumps(header | {"format": FORMAT})), **raw)
    os.replace(part, file)


def read_header(file: pathlib.Path) -> dict | None:
    """The header of a file, None if there is none. Raises ValueError for a file of another format."""
    if not file.is_file():
        return None
    try:
        # From an open file: numpy leaves one that is no .npz open.
        with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as stored:
            header = json.loads(str(stored["header"]))
            known = header["format"] == FORMAT
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file}: no whole file of a paused population; remove it to train from the start.") from error
    if not known:
        raise ValueError(f"{file}: format {header['format']}, known is {FORMAT}; remove it to train from the start.")
    return header


def load(file: pathlib.Path, like: Sequence[Any]) -> list[Any]:
    """The leaves of a file, of the shapes and dtypes of `like`. Raises ValueError if they are not such."""
    with np.load(file, allow_pickle=False) as stored:
        raw = [stored[name] for name in stored.files if name.startswith("leaf_")]
    kinds = [jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf for leaf in like]
    sizes = [int(np.prod(kind.shape)) * kind.dtype.itemsize for kind in kinds]
    if [one.size for one in raw] != sizes:
        raise ValueError(f"{file}: its {len(raw)} arrays are not the {len(sizes)} of this model and optimizer; remove"
                         " it to train from the start, or go on with the code that wrote it.")  # fmt: skip
    found = []
    for one, kind, leaf in zip(raw, kinds, like, strict=True):
        array = jax.numpy.asarray(one.view(kind.dtype).reshape(kind.shape))
        found.append(jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key(leaf) else array)
    return found
