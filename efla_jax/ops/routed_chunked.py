"""The routed delta rule a chunk at a time (XLA): the products of `chunked`, with an increment that may be dropped at a
chunk's end, and a hand-written backward.

Letters are those of `chunked`. Each full chunk has a cell of its own (`document_chunks`); with keep m and the added
part J = K^T (out . W)

    S' = in_C S + m J + x S + F        x = (1 - m) (fade_C - in_C)        J: gradient of m is <J, D>

where fade_C is the decay of a chunk rolled back: in_C, or what `fade` makes of it (then only is there an x). F is not
zero only where the first cell ends a chunk that an earlier call began at S_0, with decay a so far: F = (1 - m) (fade_C
a S_0 - fade_C S). Cells without a full chunk have m = 1. Against `chunked` the backward has m D for D where J's parts
are meant, and the decays' own part is in_C <S, D> for all m.

Without `own` O is in . Q S alone: dW is m K D, dQ lacks b K, and b is 0.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.ops.arguments import Recurrence
from efla_jax.ops.chunked import chunks, cut, gradients, inner, join, product, steps_together, written
from efla_jax.ops.document_chunks import Cells, carried, cells, most_cells, still_open
from efla_jax.ops.routed_recurrent import Routed, open_chunk
from efla_jax.ops.segments import mask_padding


class Borders(NamedTuple):
    """What happens at the ends of cells, float32: keep [M, B, H]; extra [M, B, H] (x above) or None; first [B, H, K, V]
    (F of the first cell) or None."""

    keep: jax.Array
    extra: jax.Array | None
    first: jax.Array | None


def grouped(x: Recurrence, array: Any, axis: int) -> Any:
    """The axis of heads H split into those of keys and those that read the same: G, R."""
    if array is None:
        return None
    return array.reshape(*array.shape[:axis], x.k.shape[2], -1, *array.shape[axis + 1 :])


def wide(array: jax.Array) -> jax.Array:
    return array[..., None, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def solve(x: Recurrence, b: Borders, anchor: jax.Array, size: int, own: bool):
    """(o [B, T, H, V] in the dtype of u; the final state and that at the start of cell anchor [B] <= M, [B, H, K, V]);
    T is whole cells. own: outputs read what their own cell writes, too."""
    return _forward(x, b, anchor, size, own)[0]


def _pieces(x: Recurrence, b: Borders, size: int):
    pieces = chunks(x.q, x.k, x.u, x.erase, x.log_decay, x.starts, size)
    return pieces, inner(pieces), grouped(x, b.keep, 2), grouped(x, b.extra, 2)


def _forward(x: Recurrence, b: Borders, anchor: jax.Array, size: int, own: bool):
    pieces, parts, keep, extra = _pieces(x, b, size)
    first = grouped(x, b.first, 1)
    count = keep.shape[0]

    def step(state, cell):
        index, k, u, erase, decay, inverse, keep, extra = cell
        w = written(k, u, erase, decay.into, inverse, state)
        added = product("...gck,...grcv->...grkv", k, (decay.out[..., None] * w).astype(k.dtype))
        after = decay.into[..., -1:, None] * state + wide(keep) * added
        if extra is not None:
            after += wide(extra) * state
        if first is not None:
            after += jnp.where(index == 0, first, 0.0)
        return after, (state, w)

    xs = (jnp.arange(count), pieces.k, pieces.u, pieces.erase, parts.decay, parts.inverse, keep, extra)
    initial = grouped(x, x.initial_state, 1)
    final, (starts, w) = lax.scan(step, initial, xs, unroll=steps_together())
    read = product("...gck,...grkv->...grcv", pieces.q, starts.astype(pieces.q.dtype))
    o = parts.decay.into[..., None] * read
    if own:
        o += product("...ij,...jv->...iv", parts.scores, w)
    there = starts[jnp.minimum(anchor, count - 1), jnp.arange(anchor.shape[0])]
    there = jnp.where(at(anchor, count), final, there)
    shape = x.initial_state.shape
    return (join(o, x.u), final.reshape(shape), there.reshape(shape)), (x, b, anchor, starts)


def at(anchor: jax.Array, index: jax.Array | int) -> jax.Array:
    return (anchor == index)[:, None, None, None, None]


def _backward(size: int, own: bool, saved, cotangents):
    x, b, anchor, starts = saved
    pieces, parts, keep, extra = _pieces(x, b, size)
    dtype, count = pieces.u.dtype, keep.shape[0]
    d_o = cut(cotangents[0], count, size, *starts.shape[2:4]).astype(dtype)
    d_final, d_anchor = (grouped(x, d, 1) for d in cotangents[1:])
    w = written(pieces.k, pieces.u, pieces.erase, parts.decay.into, parts.inverse, starts)

    def step(d_state, cell):
        index, q, k, erase, decay, inverse, scores, d_o, w, keep, extra = cell
        left = decay.out[..., None] * product("...gck,...grkv->...grcv", k, d_state.astype(dtype))
        d_w = wide(keep) * left
        if own:
            d_w += product("...ij,...iv->...jv", scores, d_o)
        d_u = product("...ij,...iv->...jv", inverse, d_w.astype(dtype))
        into = decay.into[..., None]
        before = into[..., -1:, :] * d_state + product("...gck,...grcv->...grkv", q, (into * d_o).astype(dtype))
        before -= product("...gck,...grcv->...grkv", k, (erase[..., None] * into * d_u).astype(dtype))
        if extra is not None:
            before += wide(extra) * d_state
        before += jnp.where(at(anchor, index), d_anchor, 0.0)
        return before, (d_state, d_u.astype(dtype), jnp.sum(left * w, (-1, -2)))

    xs = (jnp.arange(count), pieces.q, pieces.k, pieces.erase, parts.decay, parts.inverse, parts.scores, d_o, w)
    d_final += jnp.where(at(anchor, count), d_anchor, 0.0)
    d_initial, (d_ends, d_u, d_keep) = lax.scan(
        step, d_final, (*xs, keep, extra), reverse=True, unroll=steps_together()
    )
    d_pairs = d_o if own else jnp.zeros_like(d_o)
    d_q, d_k, d_u, d_erase, d_decay = gradients(pieces, parts, starts, w, d_pairs, wide(keep) * d_ends, d_u)
    if not own:
        read = parts.decay.into[..., None] * product("...cv,...kv->...ck", d_o, starts.astype(dtype))
        d_q += read.sum(-3)
        d_sums = jnp.sum(pieces.q[..., None, :, :] * read, -1)
        d_decay += lax.cumsum(d_sums, axis=d_sums.ndim - 1, reverse=True)
    aligned = jnp.sum(starts * d_ends, (-1, -2))
    d_decay += ((1 - keep) * parts.decay.into[..., -1] * aligned)[..., None]
    d_erase, d_decay = join(d_erase[..., None], x.erase), join(d_decay[..., None], x.log_decay)
    d_initial = d_initial.reshape(x.initial_state.shape)
    d_x = Recurrence(join(d_q, x.q), join(d_k, x.k), join(d_u, x.u), d_erase, d_decay, d_initial, None)
    d_extra = None if extra is None else aligned.reshape(b.keep.shape)
    d_first = None if b.first is None else d_ends[0].reshape(b.first.shape)
    return d_x, Borders(d_keep.reshape(b.keep.shape), d_extra, d_first), None


solve.defvjp(_forward, _backward)


def in_cells(x: Recurrence, found: Cells) -> Recurrence:
    """The recurrence with its tokens moved to their slots; those that stay empty are padding."""

    def moved(array):
        return carried(array, found.source, found.slot)

    starts = None if x.starts is None else moved(x.starts)
    return x._replace(
        q=moved(x.q), k=moved(x.k), u=moved(x.u), erase=moved(x.erase), log_decay=moved(x.log_decay), starts=starts
    )


def at_borders(r: Routed, x: Recurrence, entry: jax.Array, size: int) -> Borders:
    """The cells' ends, of a recurrence x in cells whose full chunks are `entry` [B, M]."""
    there = jnp.maximum(entry, 0)[..., None]

    def of_cells(array):
        return jnp.where(entry[..., None] >= 0, jnp.take_along_axis(array, there, axis=1), 1.0)

    keep, extra, first = of_cells(r.keep), None, None
    if r.fade is not None or r.start is not None:
        sums = jnp.sum(x.log_decay.reshape(*entry.shape, size, -1), axis=2)
        fade = jnp.ones_like(keep) if r.fade is None else of_cells(r.fade)
        begun = None
        if x.starts is not None:
            begun = jnp.any(x.starts.reshape(*entry.shape, size), axis=2)[..., None]

        def reach(log):
            return jnp.exp(log if begun is None else jnp.where(begun, -jnp.inf, log))

        if r.fade is not None:
            extra = jnp.moveaxis((1 - keep) * (reach(fade * sums) - reach(sums)), 1, 0)
        if r.start is not None:
            start, opened = open_chunk(r)
            rolled = wide(jnp.exp(fade[:, 0] * opened)) * start - x.initial_state
            first = wide((1 - keep[:, 0]) * reach(fade * sums)[:, 0]) * rolled
    return Borders(jnp.moveaxis(keep, 1, 0), extra, first)


def behind(entry: jax.Array) -> jax.Array:
    """[B]: the cell after the last full chunk's; the first without one."""
    return 1 + jnp.max(jnp.where(entry >= 0, jnp.arange(entry.shape[1]), -1), axis=1)


def left_open(r: Routed, anchor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Start and log decay of the chunks that are open when the call ends; anchor is the state after the last full
    chunk of each row."""
    real, document, _, closes, _, _ = r.chunks
    start, decay = open_chunk(r)
    own, carries = still_open(r.chunks)
    decay = jnp.sum(jnp.where(own[..., None], r.x.log_decay, 0.0), axis=1) + jnp.where(carries[:, None], decay, 0.0)
    # A chunk that is open when the row ends began with its document, or where the last full chunk ended.
    same = jnp.max(jnp.where(closes, document, -1), axis=1) == jnp.max(jnp.where(real, document, 0), axis=1)
    here = jnp.where(same[:, None, None, None], anchor, 0.0)
    return jnp.where(carries[:, None, None, None], start, here), decay


def of_first_chunks(r: Routed, o: jax.Array, size: int) -> jax.Array:
    """o [B, T, H, V] without what a row's first chunks write, of which cells know too little: chunks that an earlier
    call began, and those, begun with nothing, that share cells as they never fill up."""
    x, (_, document, position, _, number, _) = r.x, r.chunks
    o = mask_padding(position >= size, o)
    if r.start is None:
        return o
    start, opened = open_chunk(r)
    carried_on = mask_padding(r.chunks.real & (document == 0) & (number == 0), x.log_decay)
    faded = jnp.exp(opened[:, None] + jnp.cumsum(carried_on, axis=1))
    q = jnp.repeat(x.q.astype(jnp.float32), o.shape[2] // x.q.shape[2], axis=2)
    read = faded[..., None] * product("bthk,bhkv->bthv", q, start)
    return jnp.where(((document == 0) & (number == 0))[..., None, None], read.astype(o.dtype), o)


@functools.partial(jax.jit, static_argnums=(1, 2))
def routed_chunked(r: Routed, size: int, own: bool = True) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of u; the state, where the open chunk began and its log decay, in float32. own:
    see `routed_recurrent`."""
    x, (batch, time) = r.x, r.chunks.real.shape
    if x.u.size == 0:  # no token, no row or no channel to write
        return x.u, x.initial_state, *open_chunk(r)
    if r.start is None and x.starts is None:  # chunks stand where they are
        count = -(-time // size)
        fill = ((0, 0), (0, count * size - time))
        tokens = {name: a for name, a in x._asdict().items() if a is not None and name != "initial_state"}
        laid = x._replace(**{name: jnp.pad(a, fill + ((0, 0),) * (a.ndim - 2)) for name, a in tokens.items()})
        entry = jnp.broadcast_to(jnp.where(jnp.arange(count) < time // size, jnp.arange(count), -1), (batch, count))
        o, state, anchor = solve(laid, at_borders(r, laid, entry, size), behind(entry), size, own)
        return o[:, :time], state, *left_open(r, anchor)
    found = cells(r.chunks, size, most_cells(time, size, x.starts is not None))
    laid = in_cells(x, found)
    o, state, anchor = solve(laid, at_borders(r, laid, found.entry, size), behind(found.entry), size, own)
    o = carried(o, found.slot, found.source)
    return o if own else of_first_chunks(r, o, size), state, *left_open(r, anchor)
