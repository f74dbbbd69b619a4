"""A prefix in a file: read a long text once, and go on from it many times, also in other processes.

    identity = {"model": fingerprint(model, params), "tokenizer": tokenizer.sha256}
    save("manual.npz", prefix, identity, tokens)
    prefix, tokens = load("manual.npz", model, identity)

One .npz: the arrays of the cache and the logits, and a header in JSON. A file appears under its name only when it is
whole. It fits exactly the parameters and the tokenizer that it was made with, and says so where they are others.
"""

import dataclasses
import functools
import hashlib
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from efla_jax.generate.prefix import SHORTEST_BUCKET, Prefix
from efla_jax.model import LanguageModel

FORMAT = 1
HEADER = "header"
# Fields of a model that change no number that it computes.
INDIFFERENT = {"name", "parent", "remat", "scan", "dropout", "embedding_dropout", "kernel_init", "init_std"}


@jax.jit
def checksum(leaf: jax.Array) -> jax.Array:
    """A number that any change of one value of the array, and nearly any of several, changes: sum of bits, weighed by
    place, modulo 2^32. Integers add up to the same on every device."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf, unsigned).reshape(-1).astype(jnp.uint32)
    return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


def fingerprint(model: LanguageModel, params) -> str:
    """A hash of the model's fields and of every parameter: equal where the same tokens give the same cache."""
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    fields = {name: value for name, value in fields.items() if name not in INDIFFERENT}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sums = jax.device_get([checksum(jnp.asarray(leaf)) for _, leaf in leaves])
    named = [[jax.tree_util.keystr(path), str(leaf.dtype), list(leaf.shape), int(number)]
             for (path, leaf), number in zip(leaves, sums, strict=True)]  # fmt: skip
    text = json.dumps([fields, named], sort_keys=True, default=lambda x: dict(x) if isinstance(x, Mapping) else str(x))
    return hashlib.sha256(text.encode()).hexdigest()


def save(
    path: str | Path, prefix: Prefix, identity: Mapping[str, str], tokens: Sequence[Sequence[int]] | None = None
) -> None:
    """Write a prefix; identity: what must be equal when it is read; tokens: the ids of each row, for those who read
    it. Raises OSError where the file cannot be written; an older file of the name is then still there."""
    path = Path(path)
    named: dict[str, Any] = {}
    kinds = {}
    for name, leaf in named_leaves(prefix).items():
        array = np.asarray(leaf)
        kinds[name] = str(array.dtype)
        # .npz knows the types of numpy alone; those of two bytes that it does not know are kept as their bits.
        named[name] = array if array.dtype.kind in "biuf" else array.view(np.uint16)
    texts = None if tokens is None else [[int(i) for i in row] for row in tokens]
    header = {"format": FORMAT, "identity": dict(identity), "kinds": kinds, "tokens": texts}
    named[HEADER] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(unfinished, "wb") as file:
            np.savez(file, **named)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(
    path: str | Path, model: LanguageModel, identity: Mapping[str, str]
) -> tuple[Prefix, list[list[int]] | None]:
    """The prefix of a file, and the ids of its rows if they were kept. Raises ValueError for a file that is damaged, or
    was made with another model or tokenizer; FileNotFoundError where there is none."""
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            header = json.loads(bytes(file[HEADER]))
            arrays = {name: file[name] for name in file.files if name != HEADER}
    except FileNotFoundError:
        raise FileNotFoundError(f"snapshot={str(path)!r}: there is no such file.") from None
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError) as error:
        # numpy takes what is no archive for pickled objects, and says how to load them all the same.
        why = "no archive of numbers" if "pickle" in str(error) else error
        raise ValueError(f"snapshot={str(path)!r} cannot be read ({why}): damaged, or no snapshot.") from error
    if header.get("format") != FORMAT:
        raise ValueError(f"snapshot={str(path)!r}: format {header.get('format')}, and this version reads {FORMAT}.")
    for what, mine in identity.items():
        if header["identity"].get(what) != mine:
            raise ValueError(
                f"snapshot={str(path)!r}: made with {what} {header['identity'].get(what)!r}, and this is {mine!r}: its"
                " numbers mean something else here. Use it with the run it was made with, or make it anew."
            )
    return rebuilt(path, model, arrays, header["kinds"]), header["tokens"]


def named_leaves(prefix: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(prefix)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}


def rebuilt(path: str | Path, model: LanguageModel, arrays: dict[str, np.ndarray], kinds: Mapping[str, str]) -> Prefix:
    """The arrays as a prefix of the model, where they are one."""
    rows = len(arrays["length"])
    empty = jax.eval_shape(functools.partial(model.init_cache, rows, max_length=SHORTEST_BUCKET))
    logits: Any = jax.ShapeDtypeStruct((rows, model.vocab_size), jnp.float32)
    wanted = Prefix(logits, empty, np.zeros(rows), np.zeros(rows))
    for name, leaf in named_leaves(wanted).items():
        if name in ("length", "segment"):
            continue
        shape = arrays[name].shape if name in arrays else ()
        sizes, known = (x[:2] + x[3:] for x in (shape, leaf.shape))  # axis 2 of a cache that grows is its room
        if len(shape) != len(leaf.shape) or sizes != known or kinds[name] != str(leaf.dtype):
            raise ValueError(
                f"snapshot={str(path)!r}: {name} is {kinds.get(name)}{list(shape)}, and the model's is {leaf.dtype}"
                f"{list(leaf.shape)}. Use it with the run it was made with, or make it anew."
            )

    def restored(keys, leaf):
        name = jax.tree_util.keystr(keys, simple=True, separator="/")
        array = arrays[name]
        if name in ("length", "segment"):
            return array
        kind = jnp.dtype(kinds[name])
        return jnp.asarray(array if array.dtype == kind else array.view(kind))

    return jax.tree_util.tree_map_with_path(restored, wanted)
