"""The layout of log-linear attention's kernels for packed and padded rows and for those that go on behind a prefix.

Tokens are moved to cells (see `log_linear_cells.py`), whose tokens and states the kernels see as they do the blocks of
a row. A prefix's slots from 128 tokens on are the slots that the row begins with. Those below are read by the tokens of
the first cell alone, here, and its state has them when it is whole.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from efla_jax.ops.chunked import FORGET, product
from efla_jax.ops.document_chunks import carried
from efla_jax.ops.fenwick import Fenwick, meeting_slot, merge
from efla_jax.ops.fenwick_chunked import seen_weights
from efla_jax.ops.fenwick_tree import unstack
from efla_jax.ops.log_linear_blocks import (
    BLOCK,
    INSIDE,
    Static,
    Where,
    add_slots,
    gates_of,
    open_states,
    slots_for,
    solve,
    sums_behind,
    sums_to,
)
from efla_jax.ops.log_linear_cells import FULL, LAST, Cells, cells

LANES = 128  # cells of a row of what tells the kernels about them


def since_ends(sums: jax.Array, number: jax.Array, slots: int) -> list[jax.Array]:
    """By level j, the sum [B, N, H] of sums [B, M, H] over the number mod 2^j cells before the cells at [B, N], which
    are given with their numbers: `number` [B, N, 2]. By products, as the gradient of a gather adds up in any order."""
    at, number = number[..., 0], number[..., 1]
    before = np.arange(sums.shape[1])
    found = []
    for j in range(slots):
        first = at - (number & ((1 << j) - 1))
        seen = (before < at[..., None]) & (before >= first[..., None])
        found.append(jnp.einsum("bnm,bmh->bnh", seen.astype(jnp.float32), sums, precision=lax.Precision.HIGHEST))
    return found


def numbered(where: Cells, slots: int) -> jax.Array:
    """The number of each cell as the kernels count: -1 if it is empty."""
    from efla_jax.kernels.log_linear import number_of

    return jnp.where(where.place < 0, -1, number_of(jnp.maximum(where.place, 0), slots))


def for_kernels(where: Cells, number: jax.Array) -> Where:
    flow = 4 * number + FULL * where.whole + LAST * where.last
    flow = jnp.pad(flow, ((0, 0), (0, -flow.shape[1] % LANES)), constant_values=-4)
    return Where(number, where.code, flow.reshape(flow.shape[0], -1, LANES))


def beginning(states: jax.Array, start: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
    """Of the states [B, H, L, K, V] of a prefix of `start` [B] tokens: the slots that the row begins with [B, H, slots,
    K, V], and all others [B, H, L, K, V]."""
    levels, place = states.shape[2], start // BLOCK
    if levels > INSIDE:
        low = jnp.arange(levels) < INSIDE
        high = states[:, :, INSIDE : INSIDE + slots]
        high = jnp.pad(high, ((0, 0), (0, 0), (0, slots - high.shape[2]), (0, 0), (0, 0)))
        return high, jnp.where(low[:, None, None], states, 0.0)
    # The last slot has blocks of all lengths: one state of the kernels as soon as there is a whole one.
    high = (jnp.arange(levels) == levels - 1) & (place > 0)[:, None]
    high = high[:, None, :, None, None]
    return jnp.where(high, states, 0.0)[:, :, -1:], jnp.where(high, 0.0, states)


def read_low(low, q, weights, total, position, start, dtype) -> jax.Array:
    """What tokens [B, C, ...] of a row's first cell read of the slots below 128 tokens, [B, C, H, V] float32. q [B, C,
    G, K]; weights [B, C, H, L]; total [B, H, C] the log decays up to each token; position [B, C]."""
    (batch, size, groups, _), (heads, levels) = q.shape, weights.shape[2:]
    low = low.reshape(batch, groups, -1, *low.shape[2:]).astype(dtype)
    read = product("bcgk,bgrlkv->bgrclv", q, low)
    by_head = jnp.moveaxis(weights, 1, 2).reshape(batch, groups, -1, size, levels)
    seen = seen_weights(unstack(by_head), position, start) * jnp.exp(total).reshape(batch, groups, -1, size, 1)
    o = jnp.sum(seen[..., None] * read, axis=4)
    return jnp.moveaxis(o.reshape(batch, heads, size, -1), 1, 2)


def laid_in_cells(f: Fenwick, config, interpret) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] and states [B, H, L, K, V]."""
    x, (batch, time, heads, value_dim), levels = f.x, f.x.u.shape, f.level_weights.shape[3]
    place = time // BLOCK if f.states is None else 1 << 30
    slots = slots_for(levels, place)
    where = cells(f.position, x.starts, f.real)
    number, count = numbered(where, slots), where.place.shape[1]

    def laid(a):
        return carried(a, where.source, where.slot).reshape(batch, count, BLOCK, *a.shape[2:])

    q, k, u = (laid(a) for a in (x.q, x.k, x.u))
    weights, g = laid(f.level_weights), jnp.moveaxis(laid(jnp.maximum(x.log_decay, FORGET)), 2, 3)
    total, behind = sums_to(g), sums_behind(g)
    sums = total[..., -1]
    at = jnp.broadcast_to(jnp.arange(count), number.shape)
    since = since_ends(sums, jnp.stack([at, jnp.maximum(number, 0)], axis=2), slots)
    begin, low, begun = None, None, None
    if f.states is not None:
        high, low = beginning(f.states, f.start, slots)
        begun = jnp.broadcast_to(jnp.exp(sums[:, :1]), sums.shape)
        merged = jnp.concatenate([high, jnp.sum(low, axis=2, keepdims=True)], axis=2)
        begin = merged.transpose(0, 2, 1, 4, 3).reshape(batch, slots + 1, heads * value_dim, -1)
    flat = [a.reshape(batch, -1, *a.shape[3:]) for a in (q, k, u)]
    # Only a cell's first document reads states.
    gates, static = (
        gates_of(total, behind, weights, since, begun, where.code < BLOCK),
        Static(slots, 0, config, interpret),
    )
    o, last = solve(*flat, gates, begin, for_kernels(where, number), static)
    if low is not None:
        position = jnp.take_along_axis(f.position, jnp.maximum(where.source[:, :BLOCK], 0), axis=1)
        read = read_low(low, q[:, 0], weights[:, 0], total[:, 0], position, f.start, u.dtype)
        first = (where.code[:, 0] < BLOCK)[..., None, None]
        o = o.at[:, :BLOCK].add(jnp.where(first, read, 0.0).astype(o.dtype))
    states = last_states(f, where, number, slots, k, u, g, last, low)
    if f.states is not None and f.real is not None:  # of a row of padding alone the kernels give no gradient
        states = jnp.where(jnp.any(f.real, axis=1)[:, None, None, None, None], states, f.states)
    return carried(o, where.slot, where.source), states


def last_states(f: Fenwick, where: Cells, number, slots: int, k, u, g, last, low) -> jax.Array:
    """States [B, H, L, K, V] behind the row: of the last document's whole cells, of its tokens in an open one, and of a
    prefix's slots below 128 tokens while the block that they are in is open."""
    levels = f.level_weights.shape[3]
    end = f.position[:, -1] + 1
    used = jnp.sum(number >= 0, axis=1)  # cells
    cell = jnp.maximum(used - 1, 0)

    def here(a):
        return jnp.take_along_axis(a, cell.reshape(-1, *(1,) * (a.ndim - 1)), axis=1)[:, 0]

    is_open = (end % BLOCK != 0) & (used > 0)
    from efla_jax.kernels.log_linear import number_of

    at = jnp.where(is_open, cell, used)[:, None]
    ending = number_of(end // BLOCK, slots)[:, None]
    # A document that has whole cells is the first one of its open cell, and alone there behind them.
    sums, own = jnp.sum(g, axis=3), here(where.code)
    document = jnp.where(own < 1 << 24, own // BLOCK, -1)
    latest = jnp.max(document, axis=1, keepdims=True)
    mine = (document == latest) & is_open[:, None]
    opened = jnp.where(mine[:, None], here(g), 0.0)
    final = jnp.stack(since_ends(sums, jnp.stack([at, ending], axis=2), slots), axis=3)[:, 0]
    final = final + jnp.sum(opened, axis=2)[..., None]
    behind = sums_behind(opened)
    position = jnp.where(mine, (end // BLOCK * BLOCK)[:, None] + own % BLOCK, 0)
    slot = jnp.where(mine, meeting_slot(end[:, None], position, levels), -1)
    states = add_slots(open_states(here(k), here(u), behind, slot, levels), last, final, end // BLOCK)
    if low is None:
        return states
    began = jnp.zeros_like(end, bool) if f.x.starts is None else jnp.any(f.x.starts, axis=1)
    held = jnp.exp(sums[:, 0])[..., None, None, None] * low
    held = merge(held, meeting_slot(end, f.start, levels))
    still = ~began & (end // BLOCK == f.start // BLOCK)
    return states + jnp.where(still[:, None, None, None, None], held, 0.0)
