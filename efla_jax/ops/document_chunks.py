"""Chunks counted from each document's first real token: which token fills one up, what number it has, and how a row is
laid out so that each of them has a cell of its own.

Only full chunks matter to a router: nothing that follows in its document looks back at a chunk that never fills up. The
full chunks of a row are numbered in order, by the token that fills them; T tokens fill at most ceil(T / C) of them,
packed, padded or continued, so that one static number of entries serves every row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from efla_jax.ops.segments import positions, segments
from efla_jax.shapes import SegmentIds


class DocumentChunks(NamedTuple):
    """The chunks of a [B, T] batch; all fields [B, T].

    real      bool   the token is not padding
    document  int32  how many documents began in the row up to the token; 0 belongs to the initial state
    position  int32  of the token in its document, counting real tokens
    closes    bool   the token fills its chunk up
    number    int32  how many tokens before it did: the entry of the token's chunk, if that fills up
    full      bool   the token is real and its chunk fills up in this row"""

    real: Bool[Array, "B T"]
    document: Int[Array, "B T"]
    position: Int[Array, "B T"]
    closes: Bool[Array, "B T"]
    number: Int[Array, "B T"]
    full: Bool[Array, "B T"]


def document_chunks(
    batch: int, time: int, size: int, segment_ids: SegmentIds | None = None, start: Int[Array, " B"] | None = None
) -> DocumentChunks:
    """Chunks of `size` tokens; start [B]: tokens that the row's first document already has (0 without it).

    >>> import jax.numpy as jnp
    >>> chunks = document_chunks(1, 7, 2, jnp.array([[1, 1, 1, 2, 0, 2, 2]]))
    >>> chunks.number.tolist(), chunks.full.astype(int).tolist()
    ([[0, 0, 1, 1, 1, 1, 2]], [[1, 1, 0, 1, 0, 1, 0]])
    """
    position = positions(batch, time, segment_ids, start)
    if segment_ids is None:
        real, document = jnp.ones((batch, time), bool), jnp.zeros((batch, time), jnp.int32)
    else:
        found = segments(segment_ids)
        real, document = found.real, found.document
    closes = real & (position % size == size - 1)
    number = jnp.cumsum(closes, axis=1, dtype=jnp.int32) - closes
    closing = lax.cummin(jnp.where(closes, jnp.arange(time), time), axis=1, reverse=True)

    def there(x):
        return jnp.take_along_axis(x, jnp.minimum(closing, time - 1), axis=1)

    full = real & (closing < time) & (there(document) == document) & (there(position) // size == position // size)
    return DocumentChunks(real, document, position, closes, number, full)


def still_open(chunks: DocumentChunks) -> tuple[Bool[Array, "B T"], Bool[Array, "B"]]:
    """Which tokens are of the chunk that is open when the row ends, and whether it was when the row began."""
    real, document, _, closes, number, _ = chunks
    last = jnp.max(jnp.where(real, document, 0), axis=1, initial=0)
    total = jnp.sum(closes, axis=1)
    own = real & (document == last[:, None]) & (number == total[:, None])
    return own, (last == 0) & (total == 0)


class Cells(NamedTuple):
    """Where the tokens of a row go when each full chunk has a cell of C slots of its own, in order. What never fills up
    shares cells: the runs of such tokens between two full chunks.

    slot [B, T]: where a token goes, -1 for padding; source [B, M C]: the token of a slot, -1 where it stays empty (the
    last slots of a cell only); entry [B, M]: the number of the full chunk in a cell, -1 if it has none."""

    slot: Int[Array, "B T"]
    source: Int[Array, "B S"]
    entry: Int[Array, "B M"]


def most_cells(time: int, size: int, packed: bool) -> int:
    """How many cells T tokens may need: one more than ceil(T / C) when the first chunk is continued, about twice as
    many when documents end anywhere (L tokens between two full chunks take ceil(L / C))."""
    return -(-time // size) * 2 + 1 if packed else -(-(time - 1) // size) + 1


def cells(chunks: DocumentChunks, size: int, count: int) -> Cells:
    """Lay the rows out in `count` cells."""
    real, _, _, closes, number, full = chunks
    time = real.shape[1]
    rank = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    # A run begins after a full chunk, and where a full chunk follows tokens of none.
    run = 2 * number + full
    latest = lax.cummax(jnp.where(real, run, -1), axis=1)
    before = jnp.pad(latest, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    inside = rank - lax.cummax(jnp.where(real & (run != before), rank, 0), axis=1)
    cell = jnp.cumsum(real & (inside % size == 0), axis=1, dtype=jnp.int32) - 1
    slot = jnp.where(real, cell * size + inside % size, -1)
    source = placed(jnp.where(real, slot, count * size + jnp.arange(time)), count * size)
    first = source[:, ::size]
    held = jnp.take_along_axis(jnp.where(full, number, -1), jnp.maximum(first, 0), axis=1)
    return Cells(slot, source, jnp.where(first >= 0, held, -1))


def chunk_sums(x: Float[Array, "B T D"], chunks: DocumentChunks, size: int) -> Float[Array, "B N D"]:
    """Sums, float32, of x over the tokens of each full chunk, by its number: what a router pools. Entry 0 lacks what
    earlier calls had of a chunk that was open; entries without a chunk are 0."""
    batch, time, width = x.shape
    count = -(-time // size)
    slot = jnp.where(chunks.full, chunks.number * size + chunks.position % size, -1)
    elsewhere = count * size + jnp.arange(time, dtype=jnp.int32)
    laid = carried(x, placed(jnp.where(chunks.full, slot, elsewhere), count * size), slot)
    return jnp.sum(laid.reshape(batch, count, size, width), axis=2, dtype=jnp.float32)


def placed(target: Int[Array, "B I"], count: int) -> Int[Array, "B O"]:
    """The inverse of distinct targets: [B, count], -1 where nothing goes. Targets from `count` on go nowhere."""
    rows, index = jnp.arange(target.shape[0])[:, None], jnp.arange(target.shape[1], dtype=jnp.int32)
    nothing = jnp.full((target.shape[0], count), -1, jnp.int32)
    index = jnp.broadcast_to(index, target.shape)
    return nothing.at[rows, target].set(index, mode="drop", unique_indices=True)


@jax.custom_vjp
def carried(
    x: Shaped[Array, "B I *rest"], source: Int[Array, "B O"], target: Int[Array, "B I"]
) -> Shaped[Array, "B O *rest"]:
    """x[b, source[b, o]], zero where source is -1; target is where each of x goes (-1: nowhere), so that the gradient
    is a gather too."""
    wide = source.reshape(source.shape + (1,) * (x.ndim - 2))
    return jnp.where(wide >= 0, jnp.take_along_axis(x, jnp.maximum(wide, 0), axis=1), jnp.zeros((), x.dtype))


def _carried_forward(x, source, target):
    return carried(x, source, target), (source, target)


def _carried_backward(saved, cotangent):
    source, target = saved
    return carried(cotangent, target, source), None, None


carried.defvjp(_carried_forward, _carried_backward)
