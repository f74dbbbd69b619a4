"""Rows of several documents, with padding or a prefix before them, laid out in cells of 128 tokens for the log-linear
kernels.

A piece is what a document has between two multiples of 128 of its positions. One that ends at such a multiple is whole
and has a cell of its own: its tokens become a state. The pieces between two whole ones, the end of a document and short
documents, share cells. A piece that is read together with states of its document is always the first one of its cell,
so that a cell reads the states of one document. T tokens need at most 2 (T // 128) + 3 cells.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.ops.document_chunks import placed

SIZE = 128  # tokens of a cell
FULL, LAST = 1, 2  # flags of a cell, as the kernels have them


class Cells(NamedTuple):
    """Where the tokens of [B, T] go, in M cells.

    slot [B, T]: -1 for padding; source [B, M 128]: the token of a slot or -1; place [B, M]: how many multiples of 128
    are before the cell's first document's tokens there, -1 for an empty cell; code [B, M, 128]: 128 times which
    document of its cell a token is of plus its position modulo 128, for no token more than any; whole [B, M] bool;
    last [B, M] bool: the next cell is another document's."""

    slot: jax.Array
    source: jax.Array
    place: jax.Array
    code: jax.Array
    whole: jax.Array
    last: jax.Array


def cell_count(time: int) -> int:
    return max(1, min(time, 2 * (time // SIZE) + 3))


def latest(x: jax.Array) -> jax.Array:
    """The largest so far of x [B, T] int32."""
    return lax.cummax(x, axis=1)


def cells(position: jax.Array, starts: jax.Array | None, real: jax.Array | None) -> Cells:
    """position [B, T] int32 of the real tokens in their documents; starts, real [B, T] bool: see `Fenwick`."""
    batch, time = position.shape
    index = jnp.arange(time, dtype=jnp.int32)
    real = jnp.ones((batch, time), bool) if real is None else real
    starts = jnp.zeros((batch, time), bool) if starts is None else starts & real
    place = position // SIZE
    before = jnp.pad(latest(jnp.where(real, index, -1)), ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    begins = real & (starts | (before < 0) | (position % SIZE == 0))
    piece = jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    closing = lax.cummin(jnp.where(real & (position % SIZE == SIZE - 1), index, time), axis=1, reverse=True)
    there = jnp.take_along_axis(piece, jnp.minimum(closing, time - 1), axis=1)
    whole = real & (closing < time) & (there == piece)

    slot, opens = slots(real, begins, whole, before)
    cell = jnp.cumsum(opens, axis=1, dtype=jnp.int32) - 1
    slot = jnp.where(real, cell * SIZE + slot, -1)
    count = cell_count(time)
    source = placed(jnp.where(real, slot, count * SIZE + index), count * SIZE)

    def of_tokens(x, empty):
        found = jnp.take_along_axis(x.astype(jnp.int32), jnp.maximum(source, 0), axis=1)
        return jnp.where(source >= 0, found, empty).reshape(batch, count, SIZE)

    # A cell may begin with empty slots: the first of what it holds is the least.
    document = of_tokens(jnp.cumsum(starts, axis=1, dtype=jnp.int32), time)
    first = jnp.min(document, axis=2)
    code = (document - first[..., None]) * SIZE + of_tokens(position % SIZE, 0)
    code = jnp.where(document == time, jnp.int32(1 << 24), code)
    places = jnp.max(jnp.where(document == first[..., None], of_tokens(place, -1), -1), axis=2)
    following = jnp.pad(first[:, 1:], ((0, 0), (0, 1)), constant_values=time)
    last = (first < time) & (following < time) & (following != first)
    return Cells(slot, source, places, code, jnp.any(of_tokens(whole, 0) == 1, axis=2), last)


def slots(real, begins, whole, before) -> tuple[jax.Array, jax.Array]:
    """Each token's slot in its cell, and which tokens open a cell, [B, T]. before: the index of the real one before."""

    def of_before(x, otherwise):
        return jnp.where(before < 0, otherwise, jnp.take_along_axis(x, jnp.maximum(before, 0), axis=1))

    rank = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    inside = rank - latest(jnp.where(begins, rank, 0))
    rest = real & ~whole
    begins_run = rest & of_before(whole, True)
    offset = rank - inside - latest(jnp.where(begins_run, rank, 0))  # of the piece in its run
    ends = jnp.pad(begins[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    final = lax.cummin(jnp.where(ends, rank, rank.shape[1]), axis=1, reverse=True)  # rank of the piece's last token
    length = final - rank + inside + 1
    # Pieces lie side by side as they come; one that would reach into the next cell gets one of its own.
    reaches = rest & (offset % SIZE + length > SIZE)
    group = 2 * (offset // SIZE) + reaches
    opens = begins & (whole | begins_run | (rest & (group != of_before(group, -1))))
    return jnp.where(whole | reaches, inside, offset % SIZE + inside), opens
