"""Log-linear linear attention through GPU kernels: which input they serve, and the layout of rows that are one document
each and begin with it. The time is filled up with inert tokens."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from efla_jax.ops.chunked import FORGET
from efla_jax.ops.fenwick import Fenwick, states_of
from efla_jax.ops.hopper import require_hopper
from efla_jax.ops.log_linear_blocks import (
    BLOCK,
    Gates,
    Static,
    Where,
    add_slots,
    gates_of,
    in_blocks,
    open_states,
    since_states,
    slots_for,
    solve,
    sums_behind,
    sums_to,
)
from efla_jax.ops.pallas import require_one_dtype
from efla_jax.ops.pallas_log_linear_cells import laid_in_cells


class Row(NamedTuple):
    """What `solve` and the last states need beside q, k and u: gates; the log decays from each slot's end to the row's
    [B, H, slots] and of what is behind each token of the open block [B, H, C]."""

    gates: Gates
    final: jax.Array
    behind: jax.Array


@functools.partial(jax.checkpoint, static_argnums=(2,))
def prepared(log_decay: jax.Array, level_weights: jax.Array, slots: int) -> Row:
    """Of rows that begin at 0."""
    time = log_decay.shape[1]
    whole, count = time // BLOCK, -(-time // BLOCK)
    g = jnp.moveaxis(in_blocks(jnp.maximum(log_decay, FORGET), whole + 1), 2, 3)
    total, behind = sums_to(g), sums_behind(g)
    since = (since_states(total[:, :whole, :, -1]) or [jnp.zeros_like(total[:, :, :, -1])])[:slots]
    since = [level[:, : whole + 1] for level in since]
    before = [level[:, :count] for level in since]
    gates = gates_of(total[:, :count], behind[:, :count], in_blocks(level_weights, count), before)
    final = jnp.stack([level[:, whole] + total[:, whole, :, -1] for level in since], axis=2)
    return Row(gates, final, behind[:, whole])


@functools.partial(jax.jit, static_argnums=(1, 2))
def laid_out(f: Fenwick, config, interpret) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] and states [B, H, L, K, V]."""
    if f.states is not None or f.real is not None:
        return laid_in_cells(f, config, interpret)
    x, time, levels = f.x, f.x.u.shape[1], f.level_weights.shape[3]
    whole, count = time // BLOCK, -(-time // BLOCK)
    static = Static(slots_for(levels, whole), whole, config, interpret)
    row = prepared(x.log_decay, f.level_weights, static.slots)
    q, k, u = (in_blocks(a, count) for a in (x.q, x.k, x.u))
    q, k, u = (a.reshape(a.shape[0], -1, *a.shape[3:]) for a in (q, k, u))
    o, last = solve(q, k, u, row.gates, None, Where(), static)
    k, u = (in_blocks(a[:, whole * BLOCK :], 1)[:, 0] for a in (x.k, x.u))
    slot = np.minimum([int(time ^ s).bit_length() for s in range(whole * BLOCK, (whole + 1) * BLOCK)], levels - 1)
    states = open_states(k, u, row.behind, slot[None], levels)
    return o[:, :time], add_slots(states, last, row.final, np.int32(whole)[None])


def log_linear_attention(f: Fenwick, _chunk_size: int, config=None, interpret=None) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of u and the states [B, H, L, K, V] float32. NotImplementedError, with the
    reason, for what the kernel does not serve. config: a `kernels.log_linear.Config` instead of the table's."""
    op = "log_linear_attention"
    kind = require_hopper(op) if interpret is None else "interpreter"
    x = f.x
    if x.u.size == 0:  # no token, no row or no channel to write
        return x.u, states_of(f)
    from efla_jax.kernels import log_linear as kernel

    require_one_dtype(op, x)
    key_dim, value_dim, dtype = x.k.shape[-1], x.u.shape[-1], x.k.dtype
    if reason := kernel.unsupported(key_dim, value_dim, dtype):
        raise NotImplementedError(f"{op}: no GPU kernel for {reason}")
    return laid_out(f, config or kernel.config_for(kind, key_dim, value_dim, dtype), interpret)
