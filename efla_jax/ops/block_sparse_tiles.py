"""Block-sparse attention a tile of queries at a time (XLA), with a hand-written backward.

Rows are laid out in cells of C slots, a full chunk in a cell of its own (`document_chunks`). The keys of the cells that
are picked stand in a list, in order; a tile of queries takes two steps:

    its own cells          all at once, masked: own chunks causally, earlier picked cells of the tile wholly
    the picked cells before   that part of the list which belongs to its documents, a block at a time, so that the
                              work follows what is picked, not the length

One softmax over both, kept as a running maximum and sum; saved and returned are the outputs and the logarithms of the
sums, L. With P = exp(score - L), dP = <dO, v> and delta = <dO, O> - dL, the gradient of a mask that multiplies
exp(score) of a cell seen from later chunks is the sum of P (dP - delta) over those pairs; `counterfactual` asks for it
where the mask is 0 too, which takes the scores of all pairs.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.ops.attention_blocks import MASKED
from efla_jax.ops.chunked import product
from efla_jax.ops.dispatch import on_gpu

LARGEST = 60.0  # of score - L of a pair that is not seen: exp of 88 overflows, and a gradient of e^60 says enough


class Plan(NamedTuple):
    """Sizes known when compiling: slots of a cell, cells of a tile of queries and of a block of the list, whether rows
    hold several documents, whether masks of 0 have a gradient, whether queries see their own chunk."""

    size: int
    queries: int
    keys: int
    packed: bool
    counterfactual: bool
    own: bool = True


class Places(NamedTuple):
    """document [P, S], chunk [P, S] int32: of each slot, 0 where it is empty; full [P, M] bool: the cell holds a full
    chunk."""

    document: jax.Array
    chunk: jax.Array
    full: jax.Array


class Listed(NamedTuple):
    """The cells in the order picked, full but not picked, others: order [P, M]; their keys [P, G, S, K], values
    [P, G, S, V] and documents [P, M]."""

    order: jax.Array
    k: jax.Array
    v: jax.Array
    document: jax.Array


def permuted(x: jax.Array, order: jax.Array) -> jax.Array:
    """The cells of x [P, G, S, K] in another order [P, M]."""
    cells = x.reshape(*x.shape[:2], order.shape[1], -1, x.shape[3])
    return jnp.take_along_axis(cells, order[:, None, :, None, None], axis=2).reshape(x.shape)


def listed(k, v, picked, places: Places, size: int) -> Listed:
    order = jnp.argsort(jnp.where(picked, 0, jnp.where(places.full, 1, 2)), axis=1, stable=True)
    document = jnp.take_along_axis(places.document[:, ::size], order, axis=1)
    return Listed(order, permuted(k, order), permuted(v, order), document)


def ranges(of: jax.Array, places: Places, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """[P, tiles]: the first of the cells `of` [P, M] that a tile's documents reach back to, and the first that does not
    lie before the tile, counted among those cells."""
    step = plan.queries
    end = (jnp.cumsum(of, axis=1, dtype=jnp.int32) - of)[:, ::step]
    if not plan.packed:
        return jnp.zeros_like(end), end
    document = places.document[:, :: plan.size]
    mine = document[:, ::step]
    gone = of[:, None, :] & (document[:, None, :] < mine[:, :, None])
    end = jnp.where(mine == 0, 0, end)  # the cells after the last token
    return jnp.minimum(jnp.sum(gone, axis=2, dtype=jnp.int32), end), end


def window(x: jax.Array, start: jax.Array | int, length: int, axis: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, length, axis)


def added(x: jax.Array, part: jax.Array, start: jax.Array | int, axis: int) -> jax.Array:
    """x with `part` added from `start` on."""
    here = window(x, start, part.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(x, here + part, start, axis)


class Row(NamedTuple):
    """What tiles read of their own cells: k, v [p, G, S, K or V]; document, chunk [p, S]; cells [p, M, 2] bool: picked,
    full. Packed rows have one empty cell more in front: a chunk that never fills up may have begun in the cell
    before."""

    k: jax.Array
    v: jax.Array
    document: jax.Array
    chunk: jax.Array
    cells: jax.Array


def row(plan: Plan, k, v, picked, places: Places) -> Row:
    arrays = k, v, places.document, places.chunk, jnp.stack([picked, places.full], axis=-1)
    if not plan.packed:
        return Row(*arrays)

    def front(x, axis, length):
        return jnp.pad(x, [(length * (i == axis), 0) for i in range(x.ndim)])

    lengths = plan.size, plan.size, plan.size, plan.size, 1
    return Row(*map(front, arrays, (2, 2, 1, 1, 1), lengths))


class Tile(NamedTuple):
    """Keys and values of a tile's own cells, which of them the queries see, and which of a full chunk before their own
    they see or would see: [p, 1, 1, Q, S']."""

    k: jax.Array
    v: jax.Array
    seen: jax.Array
    apart: jax.Array


def own_cells(r: Row, plan: Plan, i: jax.Array) -> Tile:
    size, count, extra = plan.size, plan.queries * plan.size, plan.size if plan.packed else 0
    query, key = jnp.arange(count), jnp.arange(extra + count) - extra
    k, v = (window(x, i * count, extra + count, 2) for x in (r.k, r.v))
    document, chunk = (window(x, i * count, extra + count, 1) for x in (r.document, r.chunk))
    cells = window(r.cells, i * plan.queries, plan.queries + plan.packed, 1)
    picked, full = jnp.moveaxis(jnp.repeat(cells, size, axis=1), 2, 0)[:, :, None]
    causal = key <= query[:, None]
    own = causal & (chunk[:, None, :] == chunk[:, extra:, None])
    before = (key >= 0) & causal & (document[:, None, :] == document[:, extra:, None]) & ~own
    seen = own | before & picked if plan.own else before & picked
    return Tile(k, v, *(x[:, None, None] for x in (seen, before & full)))


def scores_of(q: jax.Array, k: jax.Array) -> jax.Array:
    return product("pghqk,pgsk->pghqs", q, k)


def block_mask(list_: Listed, documents, first, end, plan: Plan, j: jax.Array) -> jax.Array:
    """[p, 1, 1, Q or 1, S']: which of the list's block j the queries of `documents` [p, Q] see."""
    cell = j * plan.keys + jnp.arange(plan.keys)
    seen = ((cell >= first[:, None]) & (cell < end[:, None]))[:, None, :]
    if plan.packed:
        seen &= window(list_.document, j * plan.keys, plan.keys, 1)[:, None, :] == documents[:, :, None]
    return jnp.repeat(seen, plan.size, axis=2)[:, None, None]


def blocks(first: jax.Array, end: jax.Array, i: jax.Array, plan: Plan, body: Callable, carry):
    """body(j, carry) for the blocks of the list that hold any of first .. end - 1 of tile i [P, tiles] of any row."""
    if end.shape[1] == 1:  # a row of one tile has no cells before it
        return carry
    first, end = first[:, i], end[:, i]
    low = jnp.min(jnp.where(first < end, first, jnp.iinfo(jnp.int32).max)) // plan.keys
    return lax.fori_loop(low, -(-jnp.max(end) // plan.keys), body, carry)


def fold(carry, scores: jax.Array, v: jax.Array):
    """One more block of keys in the running softmax (largest score, sum, weighted values)."""
    top, total, o = carry
    largest = jnp.maximum(top, jnp.max(scores, axis=-1))
    shrink, mass = jnp.exp(top - largest), jnp.exp(scores - largest[..., None])
    o = shrink[..., None] * o + product("pghqs,pgsv->pghqv", mass.astype(v.dtype), v)
    return largest, shrink * total + jnp.sum(mass, axis=-1), o


def forward_rows(plan: Plan, q, k, v, chosen, places: Places):
    """Outputs [p, G, H, S, V] in the dtype of v and L [p, G, H, S] float32 of rows p."""
    picked = chosen > 0.5
    list_ = listed(k, v, picked, places, plan.size)
    first, end = ranges(picked, places, plan)
    count, span = plan.queries * plan.size, plan.keys * plan.size
    own = row(plan, k, v, picked, places)

    def tile(i):
        queries, documents = window(q, i * count, count, 3), window(places.document, i * count, count, 1)
        keys, values, seen, _ = own_cells(own, plan, i)
        shape = queries.shape[:-1]
        starts = (shape, MASKED), (shape, 0), ((*shape, v.shape[-1]), 0)
        carry = tuple(jnp.full(*start, jnp.float32) for start in starts)
        carry = fold(carry, jnp.where(seen, scores_of(queries, keys), MASKED), values)

        def block(j, carry):
            keys, values = (window(x, j * span, span, 2) for x in (list_.k, list_.v))
            seen = block_mask(list_, documents, first[:, i], end[:, i], plan, j)
            return fold(carry, jnp.where(seen, scores_of(queries, keys), MASKED), values)

        top, total, o = blocks(first, end, i, plan, block, carry)
        o, log_sum = o / total[..., None], top + jnp.log(total)
        if not plan.own:  # then there are queries that see nothing
            o, log_sum = jnp.where((top > MASKED)[..., None], o, 0.0), jnp.where(top > MASKED, log_sum, MASKED)
        return o.astype(v.dtype), log_sum

    o, log_sum = lax.map(tile, jnp.arange(end.shape[1]))
    return tuple(jnp.moveaxis(x, 0, 3).reshape(*q.shape[:4], *x.shape[5:]) for x in (o, log_sum))


def pairs(queries, d_o, log_sum, delta, keys, values, seen):
    """(dq, dk, dv, d score) of a block of pairs."""
    scores = scores_of(queries, keys) - log_sum[..., None]
    mass = jnp.exp(jnp.where(seen, scores, -jnp.inf))
    d_scores = mass * (product("pghqv,pgsv->pghqs", d_o, values) - delta[..., None])
    narrow = d_scores.astype(queries.dtype)
    d_q = product("pghqs,pgsk->pghqk", narrow, keys)
    d_k = product("pghqs,pghqk->pgsk", narrow, queries)
    return d_q, d_k, product("pghqs,pghqv->pgsv", mass.astype(d_o.dtype), d_o), d_scores


def unseen(queries, d_o, log_sum, delta, keys, values, mask) -> jax.Array:
    """What d score of pairs that are not seen would be per unit of their mask."""
    scores = jnp.minimum(scores_of(queries, keys) - log_sum[..., None], LARGEST)
    mass = jnp.exp(jnp.where(mask, scores, -jnp.inf))
    return mass * (product("pghqv,pgsv->pghqs", d_o, values) - delta[..., None])


def per_cell(d_scores: jax.Array, size: int) -> jax.Array:
    """[p, G, H, Q, S] -> [p, cells]"""
    sums = jnp.sum(d_scores, axis=(1, 2, 3))
    return jnp.sum(sums.reshape(sums.shape[0], -1, size), axis=2)


def backward_rows(plan: Plan, q, k, v, chosen, places: Places, o, log_sum, d_o, d_log_sum):
    """Cotangents of q, k, v and chosen of rows p, float32."""
    picked = chosen > 0.5
    list_ = listed(k, v, picked, places, plan.size)
    first, end = ranges(picked, places, plan)
    dropped = places.full & ~picked
    many = jnp.sum(picked, axis=1, dtype=jnp.int32)[:, None]
    other_first, other_end = (many + x for x in ranges(dropped, places, plan))
    size, count, span = plan.size, plan.queries * plan.size, plan.keys * plan.size
    own = row(plan, k, v, picked, places)
    delta = jnp.sum(d_o.astype(jnp.float32) * o.astype(jnp.float32), axis=-1) - d_log_sum

    def tile(carry, i):
        (d_own_k, d_own_v, d_own), rest = carry
        mine = tuple(window(x, i * count, count, 3) for x in (q, d_o, log_sum, delta))
        documents = window(places.document, i * count, count, 1)
        keys, values, seen, apart = own_cells(own, plan, i)
        d_q, d_k, d_v, d_scores = pairs(*mine, keys, values, seen)
        if plan.counterfactual:
            d_scores = jnp.where(seen, d_scores, unseen(*mine, keys, values, apart))
        d_scores = jnp.where(apart, d_scores, 0.0)[..., -count:]
        d_own = added(d_own, per_cell(d_scores, size), i * plan.queries, 1)
        d_own_k, d_own_v = (added(x, d, i * count, 2) for x, d in ((d_own_k, d_k), (d_own_v, d_v)))

        def block(j, carry):
            d_q, d_k, d_v, d_chosen = carry
            keys, values = (window(x, j * span, span, 2) for x in (list_.k, list_.v))
            seen = block_mask(list_, documents, first[:, i], end[:, i], plan, j)
            more_q, more_k, more_v, d_scores = pairs(*mine, keys, values, seen)
            d_k, d_v = added(d_k, more_k, j * span, 2), added(d_v, more_v, j * span, 2)
            return d_q + more_q, d_k, d_v, added(d_chosen, per_cell(d_scores, size), j * plan.keys, 1)

        d_q, *rest = blocks(first, end, i, plan, block, (d_q, *rest))

        def other(j, d_chosen):
            keys, values = (window(x, j * span, span, 2) for x in (list_.k, list_.v))
            mask = block_mask(list_, documents, other_first[:, i], other_end[:, i], plan, j)
            return added(d_chosen, per_cell(unseen(*mine, keys, values, mask), size), j * plan.keys, 1)

        if plan.counterfactual:
            rest[2] = blocks(other_first, other_end, i, plan, other, rest[2])
        return ((d_own_k, d_own_v, d_own), tuple(rest)), d_q

    def empty(*like):
        return *(jnp.zeros(x.shape, jnp.float32) for x in like), jnp.zeros(picked.shape, jnp.float32)

    carry = empty(own.k, own.v), empty(k, v)
    ((d_own_k, d_own_v, d_own), (d_k, d_v, d_chosen)), d_q = lax.scan(tile, carry, jnp.arange(end.shape[1]))
    if end.shape[1] > 1:
        back = jnp.argsort(list_.order, axis=1)
        d_k, d_v, d_chosen = permuted(d_k, back), permuted(d_v, back), jnp.take_along_axis(d_chosen, back, axis=1)
    d_k, d_v = (x + y[:, :, -x.shape[2] :] for x, y in ((d_k, d_own_k), (d_v, d_own_v)))
    d_chosen += d_own
    if not plan.counterfactual:
        d_chosen = jnp.where(picked, d_chosen, 0.0)
    return jnp.moveaxis(d_q, 0, 3).reshape(q.shape), d_k, d_v, d_chosen


def by_rows(function: Callable, plan: Plan, *arrays):
    """function(plan, *arrays); on a CPU one row after the other, each as long as it takes (a GPU would be idle).

    Under vmap the rows of all are rows of one call: loops whose bounds differ from one to the next would select their
    whole carry at every turn, and gather and scatter what else is a slice."""

    @jax.custom_batching.custom_vmap
    def rows(*arrays):
        if on_gpu():
            return function(plan, *arrays)
        one = jax.tree.map(lambda x: x[:, None], arrays)
        return jax.tree.map(lambda x: x[:, 0], lax.map(lambda row: function(plan, *row), one))

    @rows.def_vmap
    def _(size: int, batched, *arrays):
        def merged(x, has: bool):
            x = x if has else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(size * x.shape[1], *x.shape[2:])

        found = rows(*jax.tree.map(merged, arrays, tuple(batched)))
        found = jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), found)
        return found, jax.tree.map(lambda _: True, found)

    return rows(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def tiles(plan: Plan, q, k, v, chosen, places: Places) -> tuple[jax.Array, jax.Array]:
    """Outputs [P, G, H, S, V] and L [P, G, H, S] float32 of q [P, G, H, S, K], k [P, G, S, K], v [P, G, S, V]; chosen
    [P, M] float32: cells above 0.5 are picked."""
    return by_rows(forward_rows, plan, q, k, v, chosen, places)


def _tiles_forward(plan, q, k, v, chosen, places):
    o, log_sum = tiles(plan, q, k, v, chosen, places)
    return (o, log_sum), (q, k, v, chosen, places, o, log_sum)


def _tiles_backward(plan, saved, cotangents):
    q, k, v = saved[:3]
    d_q, d_k, d_v, d_chosen = by_rows(backward_rows, plan, *saved, *cotangents)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_chosen, None


tiles.defvjp(_tiles_forward, _tiles_backward)
