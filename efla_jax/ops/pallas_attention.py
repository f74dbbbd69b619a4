"""Softmax attention through GPU kernels, plain and block-sparse: which input they serve, who sees whom, gradients.

As `pallas.py` does it for the delta rule: kernels are imported inside functions only, rows are filled up, and only the
kernels need a gradient of their own.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.ops.block_sparse_tiles import Places, Plan
from efla_jax.ops.document_chunks import placed
from efla_jax.ops.pallas import require_hopper
from efla_jax.ops.segments import permute_time, real_first

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


# ---- who sees whom --------------------------------------------------------------------------------------------------


def ends(number: jax.Array, real: jax.Array) -> jax.Array:
    """[B, S]: the last slot whose number is that of a real slot (numbers of real slots do not fall along a row); the
    slot itself where it is not real."""
    slot, most = jnp.arange(number.shape[1]), jnp.iinfo(jnp.int32).max
    following = lax.cummin(jnp.where(real, number, most), axis=1, reverse=True)
    following = jnp.pad(following[:, 1:], ((0, 0), (0, 1)), constant_values=most)
    last = lax.cummin(jnp.where(real & (following != number), slot, most), axis=1, reverse=True)
    return jnp.where(real, last, slot).astype(jnp.int32)


def who_sees_whom(document, chunk, real, picked=None) -> Any:
    """`kernels.attention.Seen` of rows [B, S] of slots: document and chunk do not fall along the real slots; picked
    [B, R, M] bool: cells, each with one full chunk, that later queries see. Without it every query sees its document,
    and chunk is not read."""
    from efla_jax.kernels.attention import Seen

    batch, slots = real.shape
    every = picked is None
    if picked is None:
        picked = jnp.ones((batch, 1, slots // CELL), bool)
    routes, count = picked.shape[1:]
    rank = jnp.cumsum(picked, axis=2, dtype=jnp.int32) - picked
    # The document in force at every slot, and the slot where it began.
    held = lax.cummax(jnp.where(real, document, 0), axis=1)
    began = jnp.where(jnp.pad(held[:, 1:] != held[:, :-1], ((0, 0), (1, 0))), jnp.arange(slots), 0)
    began = lax.cummax(began, axis=1)[:, None].astype(jnp.int32)
    if every:
        first, last = began, ends(document, real)[:, None]
        before = jnp.full_like(last, -1)
    else:
        first = CELL * jnp.take_along_axis(rank, began // CELL, axis=2)
        own = ends(chunk, real)[:, None]
        last = jnp.where(jnp.repeat(picked, CELL, axis=2), ends(document, real)[:, None], own)
        before = jnp.pad(own[..., :-WIDTH], ((0, 0), (0, 0), (WIDTH, 0)), constant_values=-1)
    marks = jnp.stack([jnp.broadcast_to(x, (batch, routes, slots)) for x in (first, last, before)], axis=2)
    order = placed(jnp.where(picked, rank, count + jnp.arange(count)).reshape(-1, count), count)
    return Seen(order.reshape(picked.shape), bounds_of(marks, rank), marks, pairs_of(picked, rank, marks[:, :, 1]))


def bounds_of(marks: jax.Array, rank: jax.Array) -> jax.Array:
    """`Seen.bounds`."""
    first, _, before = (marks[:, :, i] for i in range(3))
    end = rank[..., ::2]
    pairs = (jnp.maximum(end - first[..., ::WIDTH] // CELL, 0) + 1) // 2
    start = end - 2 * pairs
    masks = jnp.clip(-((start * CELL - first[..., WIDTH - 1 :: WIDTH]) // WIDTH), 0, pairs)
    reached = jnp.max(before.reshape(*end.shape, WIDTH), axis=3) >= WIDTH * jnp.arange(end.shape[2])
    return jnp.stack([start, masks, pairs, reached.astype(jnp.int32)], axis=3)


def pairs_of(picked: jax.Array, rank: jax.Array, last: jax.Array) -> jax.Array:
    """`Seen.pairs`: cells of the list with each other, then the others."""
    count = picked.shape[2]
    cell = jnp.arange(count)
    listed = jnp.sum(picked, axis=2, keepdims=True)
    target = jnp.where(picked, rank, listed + listed % 2 + cell - rank).reshape(-1, count)
    cells = placed(target, count + 2).reshape(*picked.shape[:2], -1, 2)
    reach = jnp.max(last.reshape(*picked.shape, CELL), axis=3) // CELL
    reach = jnp.take_along_axis(reach, jnp.maximum(cells, 0).reshape(*picked.shape[:2], -1), axis=2)
    reach = jnp.where(cells >= 0, reach.reshape(cells.shape), -1)
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
    require(op, q, k, v, interpret)
    slots, cells = q.shape[1], -(-q.shape[1] // WIDTH) * WIDTH // CELL
    q, k, v, document, chunk = map(filled, (q, k, v, places.document, places.chunk))
    chosen = jnp.moveaxis(filled(chosen, 1, 2), 2, 1)
    picked = (chosen > 0.5) & filled(places.full, 1, 2)[:, None]
    assert picked.shape[2] == cells
    from efla_jax.kernels import attention as kernel

    seen = who_sees_whom(document, chunk, document > 0, picked)
    o, log_sum = solve(q, k, v, chosen, seen, config or kernel.SAFE, interpret)
    return o[:, :slots], log_sum[:, :, :slots].swapaxes(1, 2)


def softmax(q, k, v, document, cache, start=0, config=None, interpret=None) -> jax.Array:
    """Outputs [B, T, H, V] in the dtype of v of causal attention over documents [B, T] (-1: padding; None: one)."""
    op = "softmax_attention"
    if cache is not None or q.shape[1] != k.shape[1]:
        raise NotImplementedError(f"{op}: the GPU kernels take whole rows, without a cache")
    require(op, q, k, v, interpret)
    from efla_jax.kernels import attention as kernel

    if math.prod(q.shape) == 0:
        return jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype)
    batch, time = q.shape[:2]
    real = jnp.ones((batch, time), bool) if document is None else document >= 0
    number = jnp.ones((batch, time), jnp.int32) if document is None else document + 1
    if document is not None:  # padding inside of a document would be seen by the rest of it
        order, inverse = real_first(real)
        q, k, v = (permute_time(x, order, inverse) for x in (q, k, v))
        real, number = (jnp.take_along_axis(x, order, axis=1) for x in (real, number))
    q, k, v, real, number = map(filled, (q, k, v, real, number))
    seen = who_sees_whom(number, None, real)
    factor = jnp.ones(seen.order.shape, jnp.float32)
    o = solve(q, k, v, factor, seen, config or kernel.SAFE, interpret)[0][:, :time]
    return o if document is None else permute_time(o, inverse, order)
