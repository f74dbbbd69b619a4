"""The legend of shapes, the jaxtyping aliases of the public signatures, and the checks every op begins with.

    B batch    T time (tokens)    G key heads    H heads (value heads; G divides H, head h reads key head h // (H // G))
    K key dim  V value dim        C chunk length N chunks    L Fenwick levels    M slots or pages of a key-value cache
    D width    W taps of a convolution, P = W - 1    R routing heads      E key heads of a page

The layout is always [batch, time, heads, dim]: never [batch, heads, time, dim].
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Queries = Float[Array, "B T G K"]
Keys = Float[Array, "B T G K"]
Values = Float[Array, "B T H V"]
Gates = Float[Array, "B T H"]
State = Float[Array, "B H K V"]
SegmentIds = Int[Array, "B T"]

CHUNK_SIZES = (16, 32, 64, 128)
AXES = {
    "B": "batch",
    "T": "time",
    "G": "key heads",
    "H": "heads",
    "K": "key dim",
    "V": "value dim",
    "D": "width",
    "W": "taps",
    "L": "levels",
    "C": "chunk length",
    "N": "chunks",
    "R": "routing heads",
    "E": "key heads of a page",
    "P": "taps - 1",
    "M": "capacity",
}


def check_shapes(arguments: Mapping[str, tuple[jax.Array | None, str]]) -> dict[str, int]:
    """Match every array against its legend, e.g. {"q": (q, "BTGK")}, and return the size of each axis letter.

    The first argument that carries a letter fixes its size. None is skipped. Raises ValueError naming the argument, its
    shape, the rule and the remedy."""
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, (array, legend) in arguments.items():
        if array is None:
            continue
        layout = "[" + ", ".join(legend) + "]"
        meaning = ", ".join(AXES.get(letter, letter) for letter in legend)
        if not hasattr(array, "ndim"):
            raise ValueError(
                f"{name}: {array!r:.40} is a {type(array).__name__}, but {name} is an array {layout} = [{meaning}]."
                f" For one value everywhere write jnp.full(shape, value)."
            )
        if array.ndim != len(legend):
            raise ValueError(
                f"{name}: shape {array.shape} has {array.ndim} axes, but {name} is {layout} = [{meaning}]."
                " Add or remove axes so that it fits."
            )
        for letter, size in zip(legend, array.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                known = ", ".join(f"{c}={sizes[c]}" for c in legend if c in sizes)
                raise ValueError(
                    f"{name}: shape {array.shape} does not fit {layout}: {letter} ({AXES.get(letter, letter)})"
                    f" is {size} here but {sizes[letter]} in {owner[letter]} (expected {known})."
                    f" The layout is [batch, time, heads, dim]; transpose or slice {name}."
                )
            owner.setdefault(letter, name)
    return sizes


def check_floating(arguments: Mapping[str, jax.Array | None]) -> None:
    """Raise ValueError unless every array given has a floating dtype of at most 32 bits."""
    for name, array in arguments.items():
        if array is None:
            continue
        if not jnp.issubdtype(array.dtype, jnp.floating) or jnp.finfo(array.dtype).bits > 32:
            raise ValueError(
                f"{name}: dtype {array.dtype} is not float32, bfloat16 or float16;"
                f" cast it, e.g. {name}.astype(jnp.float32)."
            )


def check_heads(num_key_heads: int, num_heads: int) -> None:
    """Raise ValueError unless the number of key heads G divides the number of heads H."""
    if num_key_heads < 1 or num_heads % num_key_heads:
        raise ValueError(
            f"heads: H={num_heads} value heads and G={num_key_heads} key heads, but G must divide H"
            " (value head h reads key head h // (H // G)). Change num_heads or the number of key heads."
        )


def check_chunk_size(chunk_size: int) -> None:
    """Raise ValueError unless chunk_size is one of CHUNK_SIZES. It may exceed the sequence length."""
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(
            f"chunk_size: {chunk_size!r} is not one of {CHUNK_SIZES}. Choose 64 unless you have measured another."
        )


def check_segment_ids(segment_ids: jax.Array | None, batch: int, time: int) -> None:
    """Raise ValueError unless segment_ids is None or an integer [B, T] (0 marks padding)."""
    if segment_ids is None:
        return
    if not hasattr(segment_ids, "dtype"):
        raise ValueError(
            f"segment_ids: {segment_ids!r:.40} is a {type(segment_ids).__name__}, but an array [B, T] of integers is"
            " wanted; write jnp.asarray(segment_ids)."
        )
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids: dtype {segment_ids.dtype} is not an integer type;"
            " use int32 with 0 for padding and 1, 2, ... for documents."
        )
    if segment_ids.shape != (batch, time):
        raise ValueError(f"segment_ids: shape {segment_ids.shape} is not [B, T] = ({batch}, {time}): one id per token.")
