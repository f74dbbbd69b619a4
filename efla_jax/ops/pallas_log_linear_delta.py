"""The log-linear delta rule through GPU kernels: which input they serve, and all that XLA does around them.

The kernels make the nodes of blocks of 128 tokens, the tree over them, and read it (see `kernels/log_linear_delta.py`);
made here are the gates, and each token's coefficient for each node that it reads. What is left of a row behind its
whole blocks goes through "chunked". Channels of the values do not mix: they are filled up to whole tiles of K, and
tiles become heads that share their gates.
"""

import functools
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
from efla_jax.ops.log_linear_blocks import BLOCK, INSIDE, LN2, in_blocks, since_states, summed
from efla_jax.ops.pallas import of_key_heads, require_one_dtype


class Arguments(NamedTuple):
    """Of rows of whole blocks that begin at 0, with V = K: q, k [B, T, G, K]; u [B, T, H, K]; erase and log_decay
    [B, T, H] float32; weights [B, T, H, L] float32."""

    q: jax.Array
    k: jax.Array
    u: jax.Array
    erase: jax.Array
    log_decay: jax.Array
    weights: jax.Array


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


def last_states(dtype, runs: dict[int, tuple], decays: dict[int, jax.Array], levels: int) -> jax.Array:
    """[B, H, L, K, K] behind the last block: every last run's state, taken over the smaller runs behind it. runs: by
    level its (N, S) [B, H, K, K] float32."""
    states: dict[int, jax.Array] = {}
    for level in sorted(runs, reverse=True):
        change, own = runs[level]
        for other, state in states.items():
            state = jnp.exp(decays[level])[..., None, None] * state
            states[other] = state + times(dtype, "bhkl,bhlv->bhkv", change, state)
        states[level] = own
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


def sum_of(terms) -> jax.Array:
    """Sum in float32."""
    return functools.reduce(jnp.add, (term.astype(jnp.float32) for term in terms))


def whole(nodes: jax.Array, rests: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(N, S) [..., H, K, K] float32 of nodes [2, ...] and what they were rounded by."""
    exact = nodes.astype(jnp.float32)
    change, state = exact if rests is None else exact + rests.astype(jnp.float32)
    return change, state


def rounded(pair: tuple, dtype, both: bool) -> jax.Array:
    """[2, ...] of two arrays [...], or [4, ...] with what they were rounded by."""
    exact = jnp.stack(pair)
    narrow = exact.astype(dtype)
    return jnp.concatenate([narrow, (exact - narrow.astype(jnp.float32)).astype(dtype)]) if both else narrow


def made(q, k, u, inverse, gates, vectors, fades, config, interpret) -> tuple:
    """(o, by level the (N, S) [B, H, K, K] float32 of the last run of an odd number), and the nodes of every level."""
    from efla_jax.kernels import log_linear_delta, log_linear_delta_read, log_linear_delta_tree

    options = dict(config=config, interpret=interpret)
    nodes, rests = log_linear_delta.nodes(k, u, inverse, vectors, **options), None
    levels, runs = [nodes], {}
    for level in range(len(fades) + 1):
        if nodes.shape[2] % 2:
            runs[level] = whole(nodes[:, :, -1], None if rests is None else rests[:, :, -1])
        if level < len(fades):
            nodes, rests = log_linear_delta_tree.merge(nodes, rests, jnp.exp(fades[level]), **options)
            levels.append(nodes)
    depth = log_linear_delta.Sizes.of(k, u).depth
    o = log_linear_delta_read.read_out(q, k, u, inverse, gates, tuple(levels[:depth]), **options)
    return (o, runs), levels


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def solve(q, k, u, inverse, gates, vectors, fades, config, interpret) -> tuple:
    """(o [B, T, H, K], by level the (N, S) [B, H, K, K] float32 of the last run of an odd number of them).

    In the kernels' layout (see `kernels/log_linear_delta.py`); fades: `fading`. The gradients of k and of e, which is
    in gates and vectors, are those through the inverse, too. interpret: parameters of Mosaic's interpreter, or None."""
    return made(q, k, u, inverse, gates, vectors, fades, config, interpret)[0]


def _forward(*arguments):
    out, levels = made(*arguments)
    return out, (arguments[:7], levels)


def _backward(config, interpret, saved, cotangents):
    from efla_jax.kernels import log_linear_delta_gradients, log_linear_delta_inside, log_linear_delta_read
    from efla_jax.kernels.log_linear_delta import Sizes

    ((q, k, u, inverse, gates, vectors, fades), levels), (d_o, d_runs) = saved, cotangents
    options, sizes = dict(config=config, interpret=interpret), Sizes.of(k, u)
    read = tuple(levels[: sizes.depth])
    kept, between = log_linear_delta_read.queries(q, k, inverse, gates, read, **options)
    d_q, d_reads, d_levels = jnp.zeros_like(u), None, []
    if sizes.depth:
        d_q, d_kept, d_reads = log_linear_delta_gradients.descend(d_o, gates, kept, read, sizes=sizes, **options)
        d_levels = log_linear_delta_gradients.sums(d_o, gates, kept, d_kept, sizes=sizes, **options)
    d_nodes, d_fades = back_to_blocks(levels, fades, d_levels, d_runs, options)
    d_q, d_k, d_u, d_gates = log_linear_delta_inside.inside_gradients(
        q, k, u, inverse, gates, between, d_o, d_q, **options
    )
    d_k_nodes, d_u_nodes, d_vectors = log_linear_delta_inside.node_gradients(k, u, inverse, vectors, d_nodes, **options)
    d_gates = d_gates.at[:, :, :, 0].multiply(LN2)  # G is in units of ln 2
    if d_reads is not None:  # a select, since nothing is written where a block reads no node
        live = (np.arange(sizes.blocks)[:, None] >> np.arange(sizes.depth) & 1 == 1)[None, :, None, :, None]
        d_gates = jnp.concatenate([d_gates, jnp.where(live, d_reads, 0.0)], axis=3)
    d_k = sum_of((with_first_chunks(*d_k), *d_k_nodes)).astype(k.dtype if k.shape == u.shape else jnp.float32)
    d_u = sum_of((with_first_chunks(*d_u), d_u_nodes)).astype(u.dtype)
    return of_key_heads(d_q, q), of_key_heads(d_k, k), d_u, jnp.zeros_like(inverse), d_gates, d_vectors, d_fades


solve.defvjp(_forward, _backward)


def back_to_blocks(levels: list, fades: list, d_levels: list, d_runs: dict, options: dict) -> tuple[tuple, list]:
    """Cotangents of the blocks' nodes, as `node_gradients` takes them, and of fades, from the highest level down."""
    from efla_jax.kernels.log_linear_delta_tree import Cotangents, unmerge

    def last(level: int) -> jax.Array:
        """[2 or 4, B, 1, H, K, K] of the last run of an odd number, which is read where its level is."""
        pair = tuple(x.astype(jnp.float32) for x in d_runs[level])
        if level < len(d_levels):
            read = d_levels[level][:, levels[level].shape[2] // 2]
            pair = tuple(x + read[:, :, kind] for kind, x in enumerate(pair))
        return rounded(pair, levels[level].dtype, level > 0)[:, :, None]

    d, d_fades = Cotangents(last(len(fades)), None, None), []
    for level in reversed(range(len(fades))):
        fade = jnp.exp(fades[level])
        d, d_fade = unmerge(levels[level], fade, d, d_levels[level], lowest=level == 0, **options)
        d_fades.append(d_fade)
        if level in d_runs:
            d = d._replace(left=jnp.concatenate([d.left, last(level)], axis=2))
    return tuple(x for x in d if x is not None), d_fades[::-1]


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
    since = [level[:, :count] for level in since_states(sums)[: (count - 1).bit_length()]]
    gates = gate_rows(total, erase, in_blocks(x.weights, count), since)
    o, runs = solve(x.q, x.k, x.u, inverse, gates, vectors, fading(sums), config, interpret)
    return o, last_states(x.u.dtype, runs, run_decays(sums), x.weights.shape[3])


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
