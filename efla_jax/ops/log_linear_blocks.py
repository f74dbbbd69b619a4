"""What the log-linear kernels get and give around their programs: decays, coefficients and their gradients.

The kernels make the states of blocks of 128 tokens and read them (see `kernels/log_linear.py`); made here are all
decays and each token's coefficient for each state that it reads. That is autodiff's, so that only the kernels need a
gradient of their own (`solve`).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from efla_jax.ops.chunked import product

BLOCK = 128  # tokens of a block of the kernel
INSIDE = BLOCK.bit_length()  # levels of the pairs inside a block
SINCE = 64  # of a row of fade: where the decays since each slot's end begin
LN2 = math.log(2)


def in_blocks(x: jax.Array, count: int) -> jax.Array:
    """[B, T, ...] filled up with zeros to [B, count, 128, ...]."""
    missing = count * BLOCK - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2)) if missing else x
    return x.reshape(x.shape[0], count, BLOCK, *x.shape[2:])


def summed(g: jax.Array, seen: np.ndarray) -> jax.Array:
    """Sums over j of g [B, N, H, C] where seen [C, C] (i, j), in float32; each a sum of its own, no difference."""
    return jnp.einsum("bnhj,ij->bnhi", g, seen.astype(np.float32), precision=lax.Precision.HIGHEST)


def sums_to(g: jax.Array) -> jax.Array:
    """Sums over the last axis up to each place: a window each, of sixteenths first, and no difference of two sums."""
    return lax.cumsum(g, axis=g.ndim - 1)


def sums_behind(g: jax.Array) -> jax.Array:
    """As `sums_to`, of all that is behind each place."""
    behind = jnp.pad(g[..., 1:], ((0, 0),) * (g.ndim - 1) + ((0, 1),))
    return lax.cumsum(behind, axis=g.ndim - 1, reverse=True)


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


class Gates(NamedTuple):
    """As `kernels.log_linear.Gates` has them."""

    vectors: jax.Array
    levels: jax.Array
    fade: jax.Array


def gates_of(total, behind, weights, since: list[jax.Array], begun=None, own=None) -> Gates:
    """Gates from the running sums of the log decays and those after each token, total and behind [B, N, H, C]; weights
    [B, N, C, H, L], whose last serves any further; since: [B, N, H] by level, the log decays from the end of the state
    that a block reads to the block; begun [B, N, H]: the decay of what the first block has already; own [B, N, C]:
    which tokens read states, None for all."""
    wanted = INSIDE + len(since)
    missing = max(wanted - weights.shape[4], 0)
    weights = jnp.concatenate([weights, *[weights[..., -1:]] * missing], axis=4)[..., :wanted]
    if own is not None:
        weights = jnp.where(own[..., None, None] | (np.arange(wanted) < INSIDE), weights, 0.0)
    # A transposition of two axes, by itself.
    levels = weights.reshape(*weights.shape[:3], -1).swapaxes(2, 3).reshape(weights.shape[0], -1, wanted, BLOCK)
    vectors = jnp.stack([total / LN2, jnp.exp(behind)], axis=3).reshape(levels.shape[0], -1, 2, BLOCK)
    decays, sums = jnp.stack(since, axis=3), total[..., -1:]
    # Made once: what fills up their rows to 128 would make them for every column.
    decays, merged = lax.optimization_barrier((decays, jnp.exp(decays + sums)))
    first = [merged] + ([] if begun is None else [begun[..., None]])
    empty = jnp.zeros((*sums.shape[:3], SINCE - len(since) - len(first) + 1), jnp.float32)
    fade = jnp.concatenate([*first, empty, decays / LN2], axis=3)
    fade = jnp.pad(fade, ((0, 0),) * 3 + ((0, BLOCK - fade.shape[3]),)).reshape(-1, levels.shape[1], BLOCK)
    return Gates(vectors, levels, fade)


class Where(NamedTuple):
    """Where the blocks are in their documents, all None where each row is one document that begins with it: numbers
    [B, N] and codes [B, N, 128] as `kernels.log_linear.Blocks`, flow as `kernels.log_linear_states.Writes`, int32."""

    numbers: jax.Array | None = None
    codes: jax.Array | None = None
    flow: jax.Array | None = None


class Static(NamedTuple):
    """What a compilation depends on: how many slots there are, how many blocks are whole without `Where`, the kernels'
    config, and parameters of Mosaic's interpreter, or None for a device."""

    slots: int
    whole: int
    config: Any
    interpret: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def solve(q, k, u, gates: Gates, begin, where: Where, static: Static) -> tuple[jax.Array, jax.Array]:
    """Outputs and the last slots in the kernels' layout (see `log_linear.py` and `log_linear_states.py` there). begin:
    the slots at the start and what the first block already has [B, slots + 1, H V, K] float32, or None."""
    return _forward(q, k, u, gates, begin, where, static)[0]


def parts_for(k, u, begin, where: Where, static: Static):
    """In which parts the programs go through the time, or None for a row as a whole."""
    from efla_jax.kernels.log_linear_parts import parts_of

    if begin is not None or where.flow is not None:
        return None
    return parts_of(k, u, static.slots, static.whole, static.config)


def _forward(q, k, u, gates, begin, where, static):
    from efla_jax.kernels import log_linear as reads
    from efla_jax.kernels import log_linear_parts
    from efla_jax.kernels import log_linear_states as walks

    options, given = dict(config=static.config, interpret=static.interpret), reads.Gates(*gates)
    parts, roots = parts_for(k, u, begin, where, static), None
    if parts is not None:
        states, roots, last = log_linear_parts.states_of(k, u, given, parts, **options)
    else:
        sizes = dict(slots=static.slots, whole=static.whole)
        states, last = walks.walk(k, u, given, where.flow, begin, **sizes, **options)
    first = None if begin is None else begin[:, :-1].astype(u.dtype)
    o = reads.read_out(q, k, u, given, states, first, reads.Blocks(where.numbers, where.codes), roots, **options)
    return (o, last), (q, k, u, gates, states, roots, begin, where)


def _backward(static, residuals, cotangents):
    from efla_jax.kernels import log_linear as reads
    from efla_jax.kernels import log_linear_adjoint as adjoints
    from efla_jax.kernels import log_linear_gradients as gradients
    from efla_jax.kernels import log_linear_states as walks

    (q, k, u, gates, states, roots, begin, where), (d_o, d_last) = residuals, cotangents
    options, given = dict(config=static.config, interpret=static.interpret), reads.Gates(*gates)
    first = None if begin is None else begin[:, :-1].astype(u.dtype)
    parts, d_begin = parts_for(k, u, begin, where, static), None
    if parts is not None:
        spread, merged = adjoints.adjoint(q, d_o, given, states, roots, d_last, parts, **options)
    else:
        back = walks.adjoint(q, d_o, given, states, first, d_last, where.flow, whole=static.whole, **options)
        spread, merged, d_begin = back
    blocks = reads.Blocks(where.numbers, where.codes)
    d_q, d_k, d_u, *sums = gradients.gradients(q, k, u, given, states, first, spread, d_o, blocks, roots, **options)
    number, whole = blocks_in_documents(where, static, k.shape[1] // BLOCK)
    d_merged, empties = merge_gradients(merged, number, whole), where.numbers is not None
    d_gates = gate_gradients(gates, *sums, d_merged, number, empties)
    if begin is not None:
        d_begin, d_begun = begin_gradients(gates.fade, begin, d_begin, number, u.shape[2])
        d_gates = d_gates._replace(fade=d_gates.fade.at[:, : u.shape[2], static.slots].set(d_begun))
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_u, d_gates, d_begin, Where()


solve.defvjp(_forward, _backward)


def blocks_in_documents(where: Where, static: Static, blocks: int) -> tuple[jax.Array, jax.Array]:
    """The number of each block and whether it is whole, [1 or B, N]."""
    from efla_jax.kernels.log_linear import number_of

    if where.flow is None or where.numbers is None:
        place = jnp.arange(blocks)[None]
        return number_of(place, static.slots), place < static.whole
    flow = where.flow.reshape(where.flow.shape[0], -1)[:, :blocks]
    return where.numbers, flow & 1 != 0


def gate_gradients(gates: Gates, of_queries, balance, of_keys, d_merged, number, empties: bool) -> Gates:
    """Cotangents of the gates, a select where the kernels write nothing, if there are empty blocks; d_merged [B, N H,
    slots] those of the decays of merges."""
    slots, d_levels = of_queries.shape[2] - INSIDE, of_queries
    # Decays are 2^(G_t - G_i) and 2^(G_t + since) in the units of the rows; a pair of a token with itself has none.
    d_vectors = jnp.stack([LN2 * (balance - of_keys[:, :, 0]), of_keys[:, :, 1]], axis=2)
    if empties:
        there = jnp.repeat(number >= 0, of_queries.shape[1] // number.shape[1], axis=1)[..., None, None]
        d_levels, d_vectors = jnp.where(there, d_levels, 0.0), jnp.where(there, d_vectors, 0.0)
    d_since = LN2 * jnp.sum(d_levels[:, :, INSIDE:] * gates.levels[:, :, INSIDE:], axis=3)
    empty = jnp.zeros((*d_merged.shape[:2], SINCE - slots), jnp.float32)
    d_fade = jnp.concatenate([d_merged, empty, d_since], axis=2)
    d_fade = jnp.pad(d_fade, ((0, 0), (0, 0), (0, BLOCK - d_fade.shape[2])))
    return Gates(d_vectors, d_levels, d_fade)


def merge_gradients(merged, number, whole) -> jax.Array:
    """Cotangents [B, N H, slots] of the decays of merges, from those by state, merged [B, N + slots, H]."""
    slots, blocks = merged.shape[1] - number.shape[1], number.shape[1]
    ones = jnp.where(whole, trailing_ones(number), 0)
    rows = []
    for j in range(slots):
        which = np.arange(blocks) - ((1 << j) - 1)
        found = jnp.where((which > 0)[None, :, None], merged[:, np.maximum(which, 0)], merged[:, blocks + j, None])
        rows.append(jnp.where((j < ones)[..., None], found, 0.0))
    return jnp.stack(rows, axis=3).reshape(merged.shape[0], -1, slots)


def begin_gradients(fade, begin, d_begin, number, heads: int) -> tuple[jax.Array, jax.Array]:
    """Cotangents of what the row begins with, and [B, H] of the decay of what its first block has already."""
    slots, by_head = begin.shape[1] - 1, (begin.shape[0], heads, -1, begin.shape[3])
    live = (number[:, :1] >> np.arange(slots) & 1 == 1) & (number[:, :1] >= 0)
    d_slots = jnp.where(live[..., None, None], d_begin[:, :slots], 0.0)
    written, begun = (x[:, slots].reshape(by_head) for x in (d_begin, begin))
    d_begun = (fade[:, :heads, slots, None, None] * written).reshape(d_slots[:, :1].shape)
    return jnp.concatenate([d_slots, d_begun], axis=1), jnp.sum(written * begun, axis=(2, 3))


def trailing_ones(number: jax.Array) -> jax.Array:
    return lax.population_count(number & ~(number + 1))


def slots_for(levels: int, place: int) -> int:
    """How many states of blocks there are up to this place in a document: those of the last slot are one."""
    return max(1, min(levels - INSIDE, place.bit_length()))


def open_states(k, u, behind, slot, levels: int) -> jax.Array:
    """[B, H, L, K, V] float32 of the tokens [B, C, ...] of an open block, in their slots [B or 1, C]; behind [B, H, C]:
    the log decays after each of them."""
    batch, size, heads, value_dim = u.shape
    write = jnp.exp(behind)[..., None] * (slot[:, None, :, None] == jnp.arange(levels))  # [B, H, C, L]
    wide = (u[..., None, :] * jnp.moveaxis(write, 1, 2)[..., None]).astype(u.dtype)
    wide = wide.reshape(batch, size, k.shape[2], -1, levels, value_dim)
    return product("bcgk,bcgrlv->bgrlkv", k, wide).reshape(batch, heads, levels, -1, value_dim)


def add_slots(states: jax.Array, last: jax.Array, final: jax.Array, place) -> jax.Array:
    """States [B, H, L, K, V] and the last slots [B, slots, H V, K] of documents with `place` [B or 1] whole blocks,
    after the log decays final [B, H, slots]."""
    from efla_jax.kernels.log_linear import number_of

    (batch, heads, levels, key_dim, value_dim), slots = states.shape, last.shape[1]
    last = last.reshape(batch, slots, heads, value_dim, key_dim).transpose(0, 2, 1, 4, 3)
    live = (number_of(place, slots)[:, None] >> np.arange(slots) & 1 == 1)[:, None, :, None, None]
    last = jnp.where(live, last, 0.0) * jnp.exp(jnp.where(live[..., 0, 0], final, 0.0))[..., None, None]
    if levels > INSIDE:  # as many slots as levels from there on, or fewer
        return states.at[:, :, INSIDE : INSIDE + slots].add(last)
    return states.at[:, :, -1].add(jnp.sum(last, axis=2))
