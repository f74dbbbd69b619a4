"""Log-linear linear attention through a GPU kernel: which input it serves, and all that XLA does around it.

The kernel reads (see `kernels/log_linear.py`); made here are the states of whole blocks of 128 tokens, their Fenwick
tree, and each token's coefficient for each state that it reads. All of that is autodiff's, so that only the kernel
needs a gradient of its own. The time is filled up with inert tokens.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from efla_jax.ops.chunked import FORGET, product
from efla_jax.ops.fenwick import Fenwick, states_of
from efla_jax.ops.fenwick_tree import times
from efla_jax.ops.pallas import require_hopper, require_one_dtype

BLOCK = 128  # tokens of a block of the kernel
INSIDE = BLOCK.bit_length()  # levels of the pairs inside a block
LN2 = math.log(2)


def in_blocks(x: jax.Array, count: int) -> jax.Array:
    """[B, T, ...] filled up with zeros to [B, count, 128, ...]."""
    missing = count * BLOCK - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2)) if missing else x
    return x.reshape(x.shape[0], count, BLOCK, *x.shape[2:])


def summed(g: jax.Array, seen: np.ndarray) -> jax.Array:
    """Sums over j of g [B, N, H, C] where seen [C, C] (i, j), in float32; each a sum of its own, no difference."""
    return jnp.einsum("bnhj,ij->bnhi", g, seen.astype(np.float32), precision=lax.Precision.HIGHEST)


def block_states(k: jax.Array, u: jax.Array, behind: jax.Array) -> jax.Array:
    """What each block adds to the state at its end, [B, N, G, H / G, V, K] float32: a product over its tokens.

    k [B, N, C, G, K]; u [B, N, C, H, V]; behind [B, N, H, C], the log decays after each token."""
    fading = (u * jnp.exp(jnp.moveaxis(behind, 2, 3))[..., None]).astype(u.dtype)
    groups, (heads, value_dim) = k.shape[3], u.shape[3:]
    fading = fading.reshape(*u.shape[:3], groups, heads // groups, value_dim)
    return times(u.dtype, "bncgrv,bncgk->bngrvk", fading, k)


def fenwick_tree(states: jax.Array, sums: jax.Array) -> list[jax.Array]:
    """By level j, the states [B, P', ...] of every other run of 2^j blocks, from those of single blocks [B, P, ...] and
    their sums of log decays, of shape [B, P, G, H / G]."""
    kept = []
    while count := states.shape[1]:
        kept.append(states[:, ::2])
        left, right = slice(0, count // 2 * 2, 2), slice(1, None, 2)
        states = jnp.exp(sums[:, right])[..., None, None] * states[:, left] + states[:, right]
        sums = sums[:, left] + sums[:, right]
    return kept


def since_states(sums: jax.Array) -> list[jax.Array]:
    """By level j, the log decay [B, N, H] from the end of the run of blocks of that level that a block reads to the
    block's start, for one block more than sums [B, P, H] has, filled up to a power of two."""
    count = 1 << sums.shape[1].bit_length()
    sums = jnp.pad(sums, ((0, 0), (0, count - sums.shape[1]), (0, 0)))
    since, found = jnp.zeros_like(sums), []
    while sums.shape[1] > 1:
        found.append(since)
        pairs = sums.reshape(sums.shape[0], -1, 2, sums.shape[2])
        before = jnp.stack([jnp.zeros_like(pairs[:, :, 0]), pairs[:, :, 0]], axis=2).reshape(sums.shape)
        since = since + jnp.repeat(before, count // before.shape[1], axis=1)
        sums = pairs[:, :, 0] + pairs[:, :, 1]
    return found


def gate_rows(total: jax.Array, weights: jax.Array, since: list[jax.Array]) -> jax.Array:
    """[B, N, H, rows, C] float32: G / ln 2, the weights of the levels inside, and for each level of blocks its weight
    times the decay since its state. total [B, N, H, C]; weights [B, N, C, H, L]; the last weight serves any further."""
    weights = jnp.moveaxis(weights, 2, 4)
    wanted = INSIDE + len(since)
    missing = max(wanted - weights.shape[3], 0)
    weights = jnp.concatenate([weights, *[weights[:, :, :, -1:]] * missing], axis=3)[:, :, :, :wanted]
    rows = [total[:, :, :, None] / LN2, weights[:, :, :, :INSIDE]]
    if since:
        decay = jnp.exp(total[:, :, :, None] + jnp.stack(since, axis=3)[..., None])
        rows.append(decay * weights[:, :, :, INSIDE:])
    return jnp.concatenate(rows, axis=3)


def last_states(tree, since, k, u, behind, time: int, levels: int) -> jax.Array:
    """[B, H, L, K, V] float32 before the token at `time`, from the tree and the tokens [B, C, ...] of the open block.

    behind [B, H, C]: the log decays after each of these tokens; since: those from each state to the block's start."""
    batch, _, heads, value_dim = u.shape
    whole = time // BLOCK
    position = whole * BLOCK + np.arange(BLOCK)
    slots = np.minimum([int(time ^ s).bit_length() for s in position], levels - 1)
    write = jnp.exp(behind)[..., None] * (slots[:, None] == np.arange(levels)).astype(np.float32)  # [B, H, C, L]
    wide = (u[..., None, :] * jnp.moveaxis(write, 1, 2)[..., None]).astype(u.dtype)
    wide = wide.reshape(batch, BLOCK, k.shape[2], -1, levels, value_dim)
    states = product("bcgk,bcgrlv->bgrlkv", k, wide).reshape(batch, heads, levels, -1, value_dim)
    after = behind[..., 0]  # of the block's tokens but the first; its own follows below
    for j, level in enumerate(tree):
        if whole >> j & 1:
            state = level[:, whole >> j + 1].reshape(batch, heads, value_dim, -1).swapaxes(2, 3)
            slot = min(INSIDE + j, levels - 1)
            states = states.at[:, :, slot].add(jnp.exp(after + since[j])[..., None, None] * state)
    return states


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def read_out(q, k, u, gates, states, config, interpret):
    """Outputs in the kernels' layout (see `kernels/log_linear.py`). interpret: parameters of Mosaic's interpreter, or
    None for a device."""
    from efla_jax.kernels import log_linear as kernel

    return kernel.read_out(q, k, u, gates, states, config=config, interpret=interpret)


def _forward(q, k, u, gates, states, config, interpret):
    return read_out(q, k, u, gates, states, config, interpret), (q, k, u, gates, states)


def _backward(config, interpret, residuals, d_o):
    from efla_jax.kernels import log_linear_gradients as kernel

    q, k, _, gates, states = residuals
    options = dict(config=config, interpret=interpret)
    d_q, d_k, d_u, sums, columns = kernel.gradients(*residuals, d_o, **options)
    blocks, weights = gates.shape[1], gates[:, :, :, 1 : 1 + INSIDE]
    depth = gates.shape[3] - 1 - INSIDE
    inside, coefficients = sums[:, :, :, :INSIDE], gates[:, :, :, 1 + INSIDE :]
    # R_ti = 2^(G_t - G_i) in the units of the row; a token's pair with itself has level 0 and no decay.
    d_total = LN2 * (jnp.sum((inside * weights)[:, :, :, 1:], axis=3) - columns)
    live = (np.arange(blocks)[:, None] >> np.arange(depth) & 1 == 1)[None, :, None, :, None]
    d_coefficients = jnp.where(live, sums[:, :, :, INSIDE:], 0.0)  # a select: nothing is written where none is read
    d_gates = jnp.concatenate([d_total[:, :, :, None], inside, d_coefficients], axis=3)
    d_states = state_gradients(q, d_o, coefficients, states)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_u, d_gates, d_states


read_out.defvjp(_forward, _backward)


def state_gradients(q, d_o, coefficients, states) -> jax.Array:
    """Cotangents of the states [B, P, H V, K], each a product over the tokens that read it: those of the run of blocks
    behind its own. coefficients [B, N, H, J, C]."""
    (batch, _, key_heads, key_dim), (heads, value_dim) = q.shape, d_o.shape[2:]
    count, total = coefficients.shape[1], states.shape[1]
    q, d_o = (x.reshape(batch, count, BLOCK, *x.shape[2:]) for x in (q, d_o))
    found = []
    for j in range(coefficients.shape[3]):
        runs, length = ((total >> j) + 1) // 2, 1 << j
        wanted = runs * 2 * length

        def readers(x, wanted=wanted, runs=runs, length=length):
            x = jnp.pad(x, ((0, 0), (0, max(wanted - count, 0))) + ((0, 0),) * (x.ndim - 2))[:, :wanted]
            return x.reshape(batch, runs, 2, length, *x.shape[2:])[:, :, 1]

        weight = jnp.moveaxis(readers(coefficients[:, :, :, j]), 3, 4)[..., None]
        scaled = (weight * readers(d_o)).astype(d_o.dtype)
        scaled = scaled.reshape(batch, runs, length * BLOCK, key_heads, heads // key_heads, value_dim)
        queries = readers(q).reshape(batch, runs, length * BLOCK, key_heads, key_dim)
        found.append(product("bntgrv,bntgk->bngrvk", scaled, queries).astype(states.dtype))
    found = [x.reshape(batch, -1, heads * value_dim, key_dim) for x in found]
    unread = total - sum(x.shape[1] for x in found)
    return jnp.concatenate([*found, jnp.zeros_like(states[:, :unread])], axis=1)


@jax.checkpoint
def prepared(f: Fenwick) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(gates and states for the kernel, states [B, H, L, K, V] behind the last token) of rows that begin at 0."""
    x, (batch, time, heads, value_dim) = f.x, f.x.u.shape
    whole, count, (key_heads, key_dim) = time // BLOCK, -(-time // BLOCK), x.k.shape[2:]
    g = jnp.moveaxis(in_blocks(jnp.maximum(x.log_decay, FORGET), whole + 1), 2, 3)
    total, behind = summed(g, np.tri(BLOCK)), summed(g, np.triu(np.ones((BLOCK, BLOCK)), 1))
    sums = total[:, :whole, :, -1]
    since = since_states(sums)
    k, u = (in_blocks(a[:, : whole * BLOCK], whole) for a in (x.k, x.u))  # no copy where there is no open block
    tree = fenwick_tree(
        block_states(k, u, behind[:, :whole]), sums.reshape(batch, whole, key_heads, heads // key_heads)
    )
    flat = [level.astype(u.dtype).reshape(batch, -1, heads * value_dim, key_dim) for level in tree]
    placed = jnp.concatenate(flat, axis=1) if flat else jnp.zeros((batch, 1, heads * value_dim, key_dim), u.dtype)
    weights, depth = in_blocks(f.level_weights, count), (count - 1).bit_length()
    gates = gate_rows(total[:, :count], weights, [level[:, :count] for level in since[:depth]])
    final = [level[:, whole] + g[:, whole, :, 0] for level in since]
    k, u = (in_blocks(a[:, whole * BLOCK :], 1)[:, 0] for a in (x.k, x.u))
    states = last_states(tree, final, k, u, behind[:, whole], time, f.level_weights.shape[3])
    return gates, placed, states


@functools.partial(jax.jit, static_argnums=(1, 2))
def laid_out(f: Fenwick, config, interpret) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] and states [B, H, L, K, V] of rows that begin at 0."""
    gates, placed, states = prepared(f)
    q, k, u = (in_blocks(a, gates.shape[1]) for a in (f.x.q, f.x.k, f.x.u))
    q, k, u = (a.reshape(a.shape[0], -1, *a.shape[3:]) for a in (q, k, u))
    o = read_out(q, k, u, gates, placed, config, interpret)
    return o[:, : f.x.u.shape[1]], states


def log_linear_attention(f: Fenwick, _chunk_size: int, config=None, interpret=None) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of u and the states [B, H, L, K, V] float32. NotImplementedError, with the
    reason, for what the kernel does not serve. config: a `kernels.log_linear.Config` instead of the table's."""
    op = "log_linear_attention"
    kind = require_hopper(op) if interpret is None else "interpreter"
    x = f.x
    if x.u.size == 0:  # no token, no row or no channel to write
        return x.u, states_of(f)
    if f.states is not None or f.real is not None:
        raise NotImplementedError(
            f"{op}: the GPU kernel takes rows that begin at 0, without initial_state and segment_ids; use"
            " implementation='chunked' or 'auto'."
        )
    from efla_jax.kernels import log_linear as kernel

    require_one_dtype(op, x)
    key_dim, value_dim, dtype = x.k.shape[-1], x.u.shape[-1], x.k.dtype
    if reason := kernel.unsupported(key_dim, value_dim, dtype):
        raise NotImplementedError(f"{op}: no GPU kernel for {reason}")
    return laid_out(f, config or kernel.config_for(kind, key_dim, value_dim, dtype), interpret)
