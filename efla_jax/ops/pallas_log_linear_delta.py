"""The log-linear delta rule through GPU kernels: which input they serve, and all that XLA does around them.

The kernels make the nodes of blocks of 128 tokens and read the tree (see `kernels/log_linear_delta.py`); made here are
the tree over the nodes and each token's coefficient for each node that it reads. What is left of a row behind its whole
blocks goes through "chunked". Channels of the values do not mix: they are filled up to whole tiles of K, and tiles
become heads that share their gates.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from efla_jax.ops.chunked import FORGET
from efla_jax.ops.fenwick import Fenwick, states_of
from efla_jax.ops.fenwick_chunked import part_of, sweep
from efla_jax.ops.fenwick_tree import in_slots, times
from efla_jax.ops.hopper import require_hopper
from efla_jax.ops.pallas import of_key_heads, require_one_dtype
from efla_jax.ops.pallas_log_linear import in_blocks, since_states, summed

BLOCK = 128  # tokens of a block of the kernels
INSIDE = BLOCK.bit_length()  # levels of the pairs inside a block
LN2 = math.log(2)


class Arguments(NamedTuple):
    """Of rows of whole blocks that begin at 0, with V = K: q, k [B, T, G, K]; u [B, T, H, K]; erase and log_decay
    [B, T, H] float32; weights [B, T, H, L] float32."""

    q: jax.Array
    k: jax.Array
    u: jax.Array
    erase: jax.Array
    log_decay: jax.Array
    weights: jax.Array


class Run(NamedTuple):
    """A run of blocks, behind which a state is decay (I + N) state + S: N, S [B, H, K, K] and log decay [B, H]."""

    change: jax.Array
    state: jax.Array
    decay: jax.Array


def merge_pairs(dtype, changes, states, sums) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs [B, 2 P, ...] two by two; float32."""
    (left, right), (first, second), (before, fades) = ((x[:, 0::2], x[:, 1::2]) for x in (changes, states, sums))
    faded = jnp.exp(fades)[..., None, None] * first
    narrow = right.astype(dtype)  # kept for the gradient, as are the others
    state = faded + second + times(dtype, "bnhkl,bnhlv->bnhkv", narrow, faded.astype(dtype))
    change = left.astype(jnp.float32) + right + times(dtype, "bnhkl,bnhlv->bnhkv", narrow, left.astype(dtype))
    return change, state, before + fades


def tree(nodes: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array, dict[int, Run]]:
    """N and S [B, P, H, K, K] of the runs that are read, level by level, from those of P blocks [2, B, P, H, K, K] and
    their sums of log decays [B, P, H]; and by level the last run of an odd number of them."""
    (changes, states), dtype, kept, odd, level = nodes, nodes.dtype, [], {}, 0
    while count := states.shape[1]:
        kept.append((changes[:, ::2].astype(dtype), states[:, ::2].astype(dtype)))
        if count % 2:
            odd[level] = Run(*(x[:, -1].astype(jnp.float32) for x in (changes, states, sums)))
            changes, states, sums = (x[:, :-1] for x in (changes, states, sums))
        if count > 1:
            changes, states, sums = merge_pairs(dtype, changes, states, sums)
            level += 1
    every_change, every_state = (jnp.concatenate(levels, axis=1) for levels in zip(*kept, strict=True))
    return every_change, every_state, odd


def last_states(dtype, odd: dict[int, Run], levels: int) -> jax.Array:
    """[B, H, L, K, K] behind the last block: every run's state, taken over the smaller runs behind it."""
    states: dict[int, jax.Array] = {}
    for level in sorted(odd, reverse=True):
        run = odd[level]
        for other, state in states.items():
            state = jnp.exp(run.decay)[..., None, None] * state
            states[other] = state + times(dtype, "bhkl,bhlv->bhkv", run.change, state)
        states[level] = run.state
    lowest = min(INSIDE, levels - 1)
    return in_slots({level: state[:, :, None, None] for level, state in states.items()}, lowest, levels)


def gate_rows(total, erase, weights, since: list[jax.Array]) -> jax.Array:
    """[B, N, H, rows, 128] float32: G / ln 2, -e, the weights of the levels inside, and for each level of blocks its
    weight times the decay since its node's end. total and erase [B, N, H, 128]; weights [B, N, 128, H, L], of which the
    last serves any further level."""
    weights = jnp.moveaxis(weights, 2, 4)
    wanted = INSIDE + len(since)
    missing = max(wanted - weights.shape[3], 0)
    weights = jnp.concatenate([weights, *[weights[:, :, :, -1:]] * missing], axis=3)[:, :, :, :wanted]
    rows = [total[:, :, :, None] / LN2, -erase[:, :, :, None], weights[:, :, :, :INSIDE]]
    if since:
        decay = jnp.exp(total[:, :, :, None] + jnp.stack(since, axis=3)[..., None])
        rows.append(decay * weights[:, :, :, INSIDE:])
    return jnp.concatenate(rows, axis=3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def block_nodes(k, u, inverse, vectors, config, interpret) -> jax.Array:
    """The kernels' `nodes`. The gradients of k and of -e in `vectors` are those through the inverse, too."""
    from efla_jax.kernels import log_linear_delta as kernel

    return kernel.nodes(k, u, inverse, vectors, config=config, interpret=interpret)


def _nodes_forward(k, u, inverse, vectors, config, interpret):
    return block_nodes(k, u, inverse, vectors, config, interpret), (k, u, inverse, vectors)


def _nodes_backward(config, interpret, saved, d_nodes):
    from efla_jax.kernels import log_linear_delta_inside as kernel

    k, _, inverse, _ = saved
    d_k, d_u, d_vectors = kernel.node_gradients(*saved, d_nodes, config=config, interpret=interpret)
    return of_key_heads(sum_of(d_k), k), d_u, jnp.zeros_like(inverse), d_vectors


block_nodes.defvjp(_nodes_forward, _nodes_backward)


def sum_of(terms) -> jax.Array:
    """Sum in float32."""
    return functools.reduce(jnp.add, (term.astype(jnp.float32) for term in terms))


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def read_out(q, k, u, inverse, gates, changes, states, config, interpret) -> jax.Array:
    """The kernels' `read_out`. The gradients of k and of -e in `gates` are those through the inverse, too."""
    from efla_jax.kernels import log_linear_delta_read as kernel

    return kernel.read_out(q, k, u, inverse, gates, changes, states, config=config, interpret=interpret)


def _read_forward(*arguments):
    return read_out(*arguments), arguments[:7]


def _read_backward(config, interpret, saved, d_o):
    from efla_jax.kernels import log_linear_delta as kernel
    from efla_jax.kernels import log_linear_delta_gradients, log_linear_delta_inside, log_linear_delta_read

    q, k, u, inverse, gates, changes, states = saved
    options, sizes = dict(config=config, interpret=interpret), kernel.Sizes.of(k, u)
    kept, between = log_linear_delta_read.queries(q, k, inverse, gates, changes, **options)
    d_q, d_changes, d_states, d_reads = jnp.zeros_like(u), jnp.zeros_like(changes), jnp.zeros_like(states), None
    if sizes.depth:
        arguments = d_o, gates, changes, states, kept
        d_q, d_kept, d_reads = log_linear_delta_gradients.descend(*arguments, sizes=sizes, **options)
        arguments = d_o, gates, kept, d_kept, changes.shape[1]
        d_nodes = log_linear_delta_gradients.sums(*arguments, sizes=sizes, **options).astype(changes.dtype)
        d_changes, d_states = d_nodes[:, :, :, 0], d_nodes[:, :, :, 1]
    arguments = q, k, u, inverse, gates, between, d_o, d_q
    d_q, d_k, d_u, d_gates = log_linear_delta_inside.inside_gradients(*arguments, **options)
    # G is in units of ln 2; a select, since nothing is written where a block reads no node.
    d_gates = d_gates.at[:, :, :, 0].multiply(LN2)
    if d_reads is not None:
        live = (np.arange(sizes.blocks)[:, None] >> np.arange(sizes.depth) & 1 == 1)[None, :, None, :, None]
        d_gates = jnp.concatenate([d_gates, jnp.where(live, d_reads, 0.0)], axis=3)
    d_k, d_u = (with_first_chunks(*terms) for terms in (d_k, d_u))
    gradients = of_key_heads(d_q, q), of_key_heads(d_k, k), d_u.astype(u.dtype)
    return *gradients, jnp.zeros_like(inverse), d_gates, d_changes, d_states


read_out.defvjp(_read_forward, _read_backward)


def with_first_chunks(every: jax.Array, first: jax.Array) -> jax.Array:
    """The terms of every chunk [B, T, H, K] and those of the blocks' first chunks [B, T / 2, H, K], added; float32."""
    shape = every.shape
    every = every.reshape(shape[0], -1, 2, BLOCK // 2, *shape[2:]).astype(jnp.float32)
    first = first.reshape(shape[0], -1, 1, BLOCK // 2, *shape[2:]).astype(jnp.float32)
    return (every + jnp.pad(first, ((0, 0), (0, 0), (0, 1)) + ((0, 0),) * 3)).reshape(shape)


def whole_blocks(x: Arguments, config, interpret) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, K] and the states [B, H, L, K, K] float32 behind the last token."""
    from efla_jax.kernels import log_linear_delta as kernel

    count = x.u.shape[1] // BLOCK
    decay = jnp.moveaxis(in_blocks(jnp.maximum(x.log_decay, FORGET), count), 2, 3)
    total, behind = summed(decay, np.tri(BLOCK)), summed(decay, np.triu(np.ones((BLOCK, BLOCK)), 1))
    sums = total[..., -1]
    erase = jnp.moveaxis(in_blocks(x.erase, count), 2, 3)
    vectors = jnp.stack([-erase, jnp.exp(behind)], axis=3)
    k, e = lax.stop_gradient((x.k, x.erase))  # what is made of the inverse has its gradient
    inverse = lax.stop_gradient(kernel.solved(k, e.swapaxes(1, 2), config=config, interpret=interpret))
    changes, states, odd = tree(block_nodes(x.k, x.u, inverse, vectors, config, interpret), sums)
    since = [level[:, :count] for level in since_states(sums)[: (count - 1).bit_length()]]
    gates = gate_rows(total, erase, in_blocks(x.weights, count), since)
    o = read_out(x.q, x.k, x.u, inverse, gates, changes, states, config, interpret)
    return o, last_states(x.u.dtype, odd, x.weights.shape[3])


@functools.partial(jax.jit, static_argnums=(1, 2))
def laid_out(f: Fenwick, config, interpret) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] and states [B, H, L, K, V] of rows that begin at 0 and have a whole block."""
    x, (batch, time, heads, value_dim) = f.x, f.x.u.shape
    assert x.erase is not None
    key_dim, levels, whole = x.k.shape[3], f.level_weights.shape[3], time - time % BLOCK
    tiles = -(-value_dim // key_dim)
    u = jnp.pad(x.u[:, :whole], ((0, 0),) * 3 + ((0, tiles * key_dim - value_dim),))
    u = u.reshape(batch, whole, heads * tiles, key_dim)
    gates = [a[:, :whole] for a in (x.erase, x.log_decay, f.level_weights)]
    gates = [jnp.repeat(a, tiles, axis=2) for a in gates] if tiles > 1 else gates
    o, states = whole_blocks(Arguments(x.q[:, :whole], x.k[:, :whole], u, *gates), config, interpret)
    o = o.reshape(batch, whole, heads, -1)[..., :value_dim]
    states = jnp.moveaxis(states.reshape(batch, heads, tiles, levels, key_dim, key_dim), 2, 4)
    states = states.reshape(batch, heads, levels, key_dim, -1)[..., :value_dim]
    if whole == time:
        return o, states
    rest, states = sweep(part_of(f, slice(whole, None)), states, 64)
    return jnp.concatenate([o, rest], axis=1), states


def log_linear_delta_rule(f: Fenwick, _chunk_size: int, config=None, interpret=None) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of u and the states [B, H, L, K, V] float32. NotImplementedError, with the
    reason, for what the kernels do not serve. config: a `kernels.log_linear_delta.Config` instead of the table's."""
    op = "log_linear_delta_rule"
    kind = require_hopper(op) if interpret is None else "interpreter"
    x = f.x
    if x.u.size == 0:  # no token, no row or no channel to write
        return x.u, states_of(f)
    if f.states is not None or f.real is not None:
        raise NotImplementedError(
            f"{op}: the GPU kernels take rows that begin at 0, without initial_state and segment_ids; use"
            " implementation='chunked' or 'auto'."
        )
    if x.k.shape[1] < BLOCK:
        raise NotImplementedError(
            f"{op}: T = {x.k.shape[1]}, but the GPU kernels take rows of at least {BLOCK} tokens; use"
            " implementation='chunked' or 'auto'."
        )
    from efla_jax.kernels import log_linear_delta as kernel

    require_one_dtype(op, x)
    key_dim, dtype = x.k.shape[-1], x.k.dtype
    if reason := kernel.unsupported(key_dim, dtype):
        raise NotImplementedError(f"{op}: no GPU kernel for {reason}")
    return laid_out(f, config or kernel.config_for(kind, key_dim, dtype), interpret)
