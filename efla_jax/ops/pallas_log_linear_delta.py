"""The log-linear delta rule through GPU kernels: which input they serve, and all that XLA does around them.

Made here are each token's coefficients for the nodes that it reads (see `log_linear_nodes.py`). Rows are filled up to
whole blocks with inert tokens; the states take what is behind the last whole block by "chunked". Channels of the values
do not mix: they are filled up to whole tiles of K, and tiles become heads that share their gates. Rows of documents and
those behind a prefix are laid out in `pallas_log_linear_delta_cells.py`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from efla_jax.ops.chunked import FORGET
from efla_jax.ops.fenwick import Fenwick, states_of
from efla_jax.ops.fenwick_chunked import part_of, sweep
from efla_jax.ops.hopper import require_hopper
from efla_jax.ops.log_linear_blocks import BLOCK, in_blocks, since_states, summed
from efla_jax.ops.log_linear_nodes import Static, behind_runs, gate_rows, inverse_of, solve
from efla_jax.ops.pallas import require_one_dtype
from efla_jax.ops.pallas_log_linear_delta_cells import laid_in_cells


def fading(sums: jax.Array) -> list[jax.Array]:
    """By level the log decays [B, P, H] over the right halves of pairs of runs, from those of single blocks."""
    found = []
    while sums.shape[1] > 1:
        right = sums[:, 1::2]
        found.append(right)
        sums = sums[:, : 2 * right.shape[1] : 2] + right
    return found


def run_decays(sums: jax.Array) -> dict[int, jax.Array]:
    """By level the log decay [B, H] of the last run, where their number is odd."""
    found, level = {}, 0
    while count := sums.shape[1]:
        if count % 2:
            found[level] = sums[:, -1]
        sums, level = sums[:, : count // 2 * 2 : 2] + sums[:, 1::2], level + 1
    return found


class Prepared(NamedTuple):
    """Of rows that are one document: what `solve` needs of the gates, and the log decays of whole blocks [B, P, H]."""

    gates: jax.Array
    vectors: jax.Array
    fades: list[jax.Array]
    sums: jax.Array


@jax.checkpoint
def prepared(log_decay: jax.Array, erase: jax.Array, level_weights: jax.Array) -> Prepared:
    full, count = log_decay.shape[1] // BLOCK, -(-log_decay.shape[1] // BLOCK)
    decay = jnp.moveaxis(in_blocks(jnp.maximum(log_decay, FORGET), count), 2, 3)
    total, behind = summed(decay, np.tri(BLOCK)), summed(decay, np.triu(np.ones((BLOCK, BLOCK)), 1))
    erase, sums = jnp.moveaxis(in_blocks(erase, count), 2, 3), total[:, :full, :, -1]
    since = [level[:, :count] for level in since_states(sums)[: (count - 1).bit_length()]]
    gates = gate_rows(total, erase, in_blocks(level_weights, count), since)
    return Prepared(gates, jnp.stack([-erase, jnp.exp(behind)], axis=3), fading(sums), sums)


def whole_rows(f: Fenwick, config, interpret) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, K] and the states [B, H, L, K, K] float32 behind the last token, with V = K."""
    from efla_jax.kernels import log_linear_delta as kernel

    x, time = f.x, f.x.u.shape[1]
    full, count = time // BLOCK, -(-time // BLOCK)
    row = prepared(x.log_decay, x.erase, f.level_weights)
    q, k, u = (filled_up(a, count) for a in (x.q, x.k, x.u))
    inverse = inverse_of(k, -row.vectors[:, :, :, 0], None, config, interpret)
    static = Static(None, tuple(full >> level for level in range(full.bit_length())), config, interpret)
    o, runs = solve(q, k, u, inverse, row.gates, row.vectors, row.fades, None, kernel.Places(), static)
    levels = f.level_weights.shape[3]
    states = behind_runs(x.u.dtype, runs, run_decays(row.sums), levels) if full else states_of(f)
    if full * BLOCK != time:
        _, states = sweep(part_of(f, slice(full * BLOCK, None)), states, 64)
    return o[:, :time], states


def filled_up(x: jax.Array, count: int) -> jax.Array:
    """[B, T, ...] with zeros behind it to so many blocks."""
    x = in_blocks(x, count)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


@functools.partial(jax.jit, static_argnums=(1, 2))
def laid_out(f: Fenwick, config, interpret) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] and states [B, H, L, K, V]."""
    x, (batch, time, heads, value_dim) = f.x, f.x.u.shape
    assert x.erase is not None
    key_dim, levels = x.k.shape[3], f.level_weights.shape[3]
    tiles = -(-value_dim // key_dim)
    missing = tiles * key_dim - value_dim

    def repeated(a):
        return jnp.repeat(a, tiles, axis=2) if tiles > 1 else a

    u = jnp.pad(x.u, ((0, 0),) * 3 + ((0, missing),)).reshape(batch, time, heads * tiles, key_dim)
    x = x._replace(u=u, erase=repeated(x.erase), log_decay=repeated(x.log_decay))
    states = f.states
    if states is not None:
        states = jnp.pad(states, ((0, 0),) * 4 + ((0, missing),)).reshape(*states.shape[:4], tiles, key_dim)
        states = jnp.moveaxis(states, 4, 2).reshape(batch, heads * tiles, levels, key_dim, key_dim)
    tiled = f._replace(x=x, level_weights=repeated(f.level_weights), states=states)
    serve = whole_rows if f.states is None and f.real is None else laid_in_cells
    o, states = serve(tiled, config, interpret)
    states = jnp.moveaxis(states.reshape(batch, heads, tiles, levels, key_dim, key_dim), 2, 4)
    states = states.reshape(batch, heads, levels, key_dim, -1)[..., :value_dim]
    return o.reshape(batch, time, heads, -1)[..., :value_dim], states


def log_linear_delta_rule(f: Fenwick, _chunk_size: int, config=None, interpret=None) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of u and the states [B, H, L, K, V] float32. NotImplementedError, with the
    reason, for what the kernels do not serve. config: a `kernels.log_linear_delta.Config` instead of the table's."""
    op = "log_linear_delta_rule"
    kind = require_hopper(op) if interpret is None else "interpreter"
    x = f.x
    if x.u.size == 0:  # no token, no row or no channel to write
        return x.u, states_of(f)
    from efla_jax.kernels import log_linear_delta as kernel

    require_one_dtype(op, x)
    key_dim, dtype = x.k.shape[-1], x.k.dtype
    if reason := kernel.unsupported(key_dim, dtype):
        raise NotImplementedError(f"{op}: no GPU kernel for {reason}")
    return laid_out(f, config or kernel.config_for(kind, key_dim, dtype), interpret)
