"""Softmax attention through GPU kernels, plain and block-sparse: which input they serve, who sees whom, gradients.

As `pallas.py` does it for the delta rule: kernels are imported inside functions only, rows are filled up, and only the
kernels need a gradient of their own.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.ops.block_sparse_tiles import Places, Plan
from efla_jax.ops.document_chunks import placed
from efla_jax.ops.hopper import require_hopper

CELL, WIDTH = 64, 128  # slots of a cell, and of a kernel's tile


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def solve(q, k, v, factor, seen, config, interpret):
    """(o, L) of `kernels/attention.py`; factor [B, R, M] float32 multiplies exp(score) of a cell's keys for the queries
    of other cells: it only has a gradient, its value is that 1 or 0 which `seen` was made from."""
    from efla_jax.kernels import attention as kernel

    return kernel.forward(q, k, v, seen, config=config, interpret=interpret)


def _forward(q, k, v, factor, seen, config, interpret):
    o, log_sum = solve(q, k, v, factor, seen, config, interpret)
    return (o, log_sum), (q, k, v, factor > 0.5, seen, o, log_sum)


def _backward(config, interpret, residuals, cotangents):
    from efla_jax.kernels import attention as kernel

    q, k, v, picked, seen, o, log_sum = residuals
    arguments = q, k, v, seen, o, log_sum, *cotangents
    *gradients, d_factor = kernel.backward(*arguments, config=config, interpret=interpret)
    return *gradients, jnp.where(picked, d_factor, 0.0), None


solve.defvjp(_forward, _backward)
solved = jax.jit(solve, static_argnums=(5, 6))  # traced and lowered once for all layers of the same sizes


# ---- who sees whom --------------------------------------------------------------------------------------------------


def ends(number: jax.Array, real: jax.Array) -> jax.Array:
    """[B, S]: the last slot whose number is that of a real slot (numbers of real slots do not fall along a row); the
    slot itself where it is not real."""
    slot, most = jnp.arange(number.shape[1]), jnp.iinfo(jnp.int32).max
    following = lax.cummin(jnp.where(real, number, most), axis=1, reverse=True)
    following = jnp.pad(following[:, 1:], ((0, 0), (0, 1)), constant_values=most)
    last = lax.cummin(jnp.where(real & (following != number), slot, most), axis=1, reverse=True)
    return jnp.where(real, last, slot).astype(jnp.int32)


class Rows(NamedTuple):
    """[B, S] int32 of slots: where its document began, where that and its chunk end (the slot itself for padding), and
    bool: padding that has a slot of its document behind it."""

    began: jax.Array
    document_end: jax.Array
    chunk_end: jax.Array
    gap: jax.Array


def rows_of(document, chunk, real) -> Rows:
    """Of any rows; the numbers of documents and chunks do not fall along the real slots."""
    held = lax.cummax(jnp.where(real, document, 0), axis=1)
    slot = jnp.arange(real.shape[1], dtype=jnp.int32)
    began = jnp.where(jnp.pad(held[:, 1:] != held[:, :-1], ((0, 0), (1, 0))), slot, 0)
    gap = ~real & (slot < jnp.max(jnp.where(real, slot, -1), axis=1, keepdims=True))
    return Rows(lax.cummax(began, axis=1), ends(document, real), ends(chunk, real), gap)


def one_document(batch: int, slots: int) -> Rows:
    """Of rows with one document from their first slot on, in whole chunks. What fills the row up sees it, unseen."""
    slot = jnp.arange(slots, dtype=jnp.int32)
    fields = jnp.zeros_like(slot), jnp.full_like(slot, slots - 1), slot // CELL * CELL + CELL - 1, slot < 0
    return Rows(*(jnp.broadcast_to(x, (batch, slots)) for x in fields))


def who_sees_whom(rows: Rows, picked=None) -> Any:
    """`kernels.attention.Seen`; picked [B, R, M] bool: cells, each with one full chunk and no gaps, that later queries
    see. Without it every query sees its document."""
    from efla_jax.kernels.attention import Seen

    batch, slots = rows.began.shape
    count = slots // CELL
    own = jnp.minimum(rows.chunk_end, rows.document_end)[:, None]
    if picked is None:
        rank = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, 1, count))
        last, own, order, pairs = (
            rows.document_end[:, None],
            jnp.full_like(own, -1),
            rank,
            rank.reshape(batch, 1, -1, 2),
        )
    else:
        rank = jnp.cumsum(picked, axis=2, dtype=jnp.int32) - picked
        rows = rows._replace(gap=jnp.zeros_like(rows.gap))
        last = jnp.where(jnp.repeat(picked, CELL, axis=2), rows.document_end[:, None], own)
        order = placed(jnp.where(picked, rank, count + jnp.arange(count)).reshape(-1, count), count)
        order, pairs = order.reshape(picked.shape), paired(picked, rank)
    marks = jnp.stack([last, jnp.broadcast_to(own, last.shape)], axis=2)
    return Seen(order, bounds_of(rows, marks, rank), marks, runs_of(pairs, last))


def bounds_of(rows: Rows, marks: jax.Array, rank: jax.Array) -> jax.Array:
    """`Seen.bounds`; rank [B, R, M]: how many cells of the list lie before each."""

    def before(slots):  # [B, tiles] -> [B, R, tiles]: how many cells of the list lie before those of the slots
        return jnp.take_along_axis(rank, slots[:, None] // CELL, axis=2)

    end = rank[..., ::2]
    pairs = (jnp.maximum(end - before(rows.began[:, ::WIDTH]), 0) + 1) // 2
    start = end - 2 * pairs
    # The last query's document decides: its cells are seen by all, unless it began inside a cell.
    later = rows.began[:, WIDTH - 1 :: WIDTH]
    masks = jnp.clip((before(later) + (later % CELL != 0)[:, None] - start + 1) // 2, 0, pairs)
    gap = jnp.any(rows.gap.reshape(rows.gap.shape[0], -1, WIDTH), axis=2)
    gaps = jnp.cumsum(gap, axis=1, dtype=jnp.int32) - gap
    gaps = gaps > jnp.take_along_axis(gaps, rows.began[:, ::WIDTH] // WIDTH, axis=1)
    masks = jnp.where(gaps[:, None], pairs, masks)
    reach = jnp.max(marks[:, :, 1].reshape(*end.shape, WIDTH), axis=3)
    reached = jnp.pad(reach[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=-1) >= WIDTH * jnp.arange(end.shape[2])
    return jnp.stack([start, masks, pairs, reached.astype(jnp.int32)], axis=3)


def paired(picked: jax.Array, rank: jax.Array) -> jax.Array:
    """[B, R, P, 2]: cells of the list with each other, then the others; -1 where a cell has none."""
    count = picked.shape[2]
    listed = jnp.sum(picked, axis=2, keepdims=True)
    target = jnp.where(picked, rank, listed + listed % 2 + jnp.arange(count) - rank)
    return placed(target.reshape(-1, count), count + 2).reshape(*picked.shape[:2], -1, 2)


def runs_of(cells: jax.Array, last: jax.Array) -> jax.Array:
    """`Seen.pairs` of pairs of cells [B, R, P, 2], last [B, R, S]."""
    reach = jnp.max(last.reshape(*last.shape[:2], -1, CELL), axis=3) // CELL
    flat = jnp.maximum(cells, 0).reshape(*cells.shape[:2], -1)
    reach = jnp.where(cells >= 0, jnp.take_along_axis(reach, flat, axis=2).reshape(cells.shape), -1)
    (one, two), (to_one, to_two) = (jnp.moveaxis(x, 3, 0) for x in (cells, reach))
    begin = jnp.maximum(two, to_one + 1)
    runs = one, jnp.where(one >= 0, to_one - one + 1, 0), begin, jnp.where(two >= 0, to_two - begin + 1, 0)
    return jnp.stack([one, two, *(jnp.maximum(x, 0) for x in runs)], axis=3).astype(jnp.int32)


# ---- what the ops call ----------------------------------------------------------------------------------------------


def require(op: str, q, k, v, interpret) -> None:
    """NotImplementedError, with the reason, for a device, a size or a dtype that the kernels do not serve."""
    if interpret is None:
        require_hopper(op)
    from efla_jax.kernels import attention as kernel

    if not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(f"{op}: kernels take q, k, v of one dtype, not {q.dtype}, {k.dtype}, {v.dtype}")
    if reason := kernel.unsupported(q.shape[3], v.shape[3], q.dtype):
        raise NotImplementedError(f"{op}: no GPU kernel for {reason}")


def filled(x: jax.Array, axis: int = 1, size: int = WIDTH) -> jax.Array:
    """x [B, S, ...] filled up with zeros until S is a multiple of size."""
    missing = -x.shape[axis] % size
    return jnp.pad(x, [(0, missing * (i == axis)) for i in range(x.ndim)]) if missing else x


def block_sparse(plan: Plan, q, k, v, chosen, places: Places, config=None, interpret=None):
    """Outputs [B, S, H, V] in the dtype of v and L [B, S, H] float32 of cells of 64 slots: q [B, S, H, K], k [B, S, G,
    K], v [B, S, G, V]; chosen [B, M, R] float32; places with B rows."""
    op = "block_sparse_attention"
    if plan.size != CELL or plan.counterfactual:
        raise NotImplementedError(f"{op}: the GPU kernels have chunks of {CELL} and no counterfactual gradients")
    if not plan.own:
        raise NotImplementedError(f"{op}: in the GPU kernels a token sees its own chunk; without it, by XLA only")
    require(op, q, k, v, interpret)
    from efla_jax.kernels import attention as kernel

    slots = q.shape[1]
    q, k, v, document, chunk = map(filled, (q, k, v, places.document, places.chunk))
    chosen = jnp.moveaxis(filled(chosen, 1, 2), 2, 1)
    picked = (chosen > 0.5) & filled(places.full, 1, 2)[:, None]
    rows = rows_of(document, chunk, document > 0) if plan.packed else one_document(*document.shape)
    seen = who_sees_whom(rows, picked)
    o, log_sum = solved(q, k, v, chosen, seen, config or kernel.SAFE, interpret)
    return o[:, :slots], log_sum[:, :, :slots].swapaxes(1, 2)


def softmax(q, k, v, document, _start=0, config=None, interpret=None) -> jax.Array:
    """Outputs [B, T, H, V] in the dtype of v of causal attention over documents [B, T] (-1: padding; None: one)."""
    require_rows(q, k, v, interpret)
    if math.prod(q.shape) == 0:
        return jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype)
    return causal(q, k, v, document, config, interpret)[0]


def require_rows(q, k, v, interpret) -> None:
    """`require` of softmax attention."""
    op = "softmax_attention"
    if q.shape[1] != k.shape[1]:
        raise NotImplementedError(f"{op}: the GPU kernels take whole rows, not a part of their queries")
    require(op, q, k, v, interpret)


def causal(q, k, v, document, config, interpret) -> tuple[jax.Array, jax.Array]:
    """(o [B, T, H, V], L [B, T, H] float32) of attention within the call."""
    from efla_jax.kernels import attention as kernel

    time = q.shape[1]
    q, k, v = map(filled, (q, k, v))
    if document is None:
        rows = one_document(*q.shape[:2])
    else:
        number = filled(document + 1)
        rows = rows_of(number, number, number > 0)
    seen = who_sees_whom(rows)
    factor = jnp.ones(seen.order.shape, jnp.float32)
    o, log_sum = solved(q, k, v, factor, seen, config or kernel.SAFE, interpret)
    return o[:, :time], log_sum[..., :time].swapaxes(1, 2)
