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
LN2 = math.log(2)


def in_blocks(x: jax.Array, count: int) -> jax.Array:
    """[B, T, ...] filled up with zeros to [B, count, 128, ...]."""
    missing = count * BLOCK - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2)) if missing else x
    return x.reshape(x.shape[0], count, BLOCK, *x.shape[2:])


def summed(g: jax.Array, seen: np.ndarray) -> jax.Array:
    """Sums over j of g [B, N, H, C] where seen [C, C] (i, j), in float32; each a sum of its own, no difference."""
    return jnp.einsum("bnhj,ij->bnhi", g, seen.astype(np.float32), precision=lax.Precision.HIGHEST)


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


def gate_rows(total: jax.Array, behind: jax.Array, weights: jax.Array, since: list[jax.Array]) -> jax.Array:
    """[B, N, H, rows, C] float32: G / ln 2, the decay after the token, the weights of the levels inside, and for each
    level of blocks its weight times the decay since its state. total, behind [B, N, H, C]; weights [B, N, C, H, L]; the
    last weight serves any further."""
    weights = jnp.moveaxis(weights, 2, 4)
    wanted = INSIDE + len(since)
    missing = max(wanted - weights.shape[3], 0)
    weights = jnp.concatenate([weights, *[weights[:, :, :, -1:]] * missing], axis=3)[:, :, :, :wanted]
    decay = jnp.exp(total[:, :, :, None] + jnp.stack(since, axis=3)[..., None])
    rows = [total[:, :, :, None] / LN2, jnp.exp(behind)[:, :, :, None], weights[:, :, :, :INSIDE]]
    return jnp.concatenate([*rows, decay * weights[:, :, :, INSIDE:]], axis=3)


def fade_rows(since: list[jax.Array], sums: jax.Array, begun: jax.Array | None = None) -> jax.Array:
    """[B, N H, 128] float32: the decays from each state's end to the end of the block, and `begun`. since: [B, N, H] by
    level; sums, begun [B, N, H]."""
    found = [jnp.exp(level + sums) for level in since] + ([] if begun is None else [begun])
    rows = jnp.stack(found, axis=3).reshape(sums.shape[0], -1, len(found))
    return jnp.pad(rows, ((0, 0), (0, 0), (0, BLOCK - len(found))))


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def solve(q, k, u, gates, fade, begin, where: Where, static: Static) -> tuple[jax.Array, jax.Array]:
    """Outputs and the last slots in the kernels' layout (see `log_linear.py` and `log_linear_states.py` there). begin:
    the slots at the start and what the first block already has [B, slots + 1, H V, K] float32, or None."""
    return _forward(q, k, u, gates, fade, begin, where, static)[0]


def _forward(q, k, u, gates, fade, begin, where, static):
    from efla_jax.kernels import log_linear as reads
    from efla_jax.kernels import log_linear_states as walks

    options = dict(config=static.config, interpret=static.interpret)
    sizes = dict(slots=static.slots, whole=static.whole)
    states, last = walks.walk(k, u, gates, fade, where.flow, begin, **sizes, **options)
    first = None if begin is None else begin[:, :-1].astype(u.dtype)
    o = reads.read_out(q, k, u, gates, states, first, reads.Blocks(where.numbers, where.codes), **options)
    return (o, last), (q, k, u, gates, fade, states, begin, where)


def _backward(static, residuals, cotangents):
    from efla_jax.kernels import log_linear as reads
    from efla_jax.kernels import log_linear_gradients as gradients
    from efla_jax.kernels import log_linear_states as walks

    (q, k, u, gates, fade, states, begin, where), (d_o, d_last) = residuals, cotangents
    options = dict(config=static.config, interpret=static.interpret)
    first = None if begin is None else begin[:, :-1].astype(u.dtype)
    back = walks.adjoint(q, d_o, gates, fade, states, first, d_last, where.flow, whole=static.whole, **options)
    spread, merged, d_begin = back
    blocks = reads.Blocks(where.numbers, where.codes)
    d_q, d_k, d_u, *sums = gradients.gradients(q, k, u, gates, states, first, spread, d_o, blocks, **options)
    number, whole = blocks_in_documents(where, static, gates.shape[1])
    d_gates = gate_gradients(gates, *sums, number)
    d_fade, d_begin = fade_gradients(fade, merged, begin, d_begin, number, whole)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_u, d_gates, d_fade, d_begin, Where()


solve.defvjp(_forward, _backward)


def blocks_in_documents(where: Where, static: Static, blocks: int) -> tuple[jax.Array, jax.Array]:
    """The number of each block and whether it is whole, [1 or B, N]."""
    from efla_jax.kernels.log_linear import number_of

    if where.flow is None or where.numbers is None:
        place = jnp.arange(blocks)[None]
        return number_of(place, static.slots), place < static.whole
    flow = where.flow.reshape(where.flow.shape[0], -1)[:, :blocks]
    return where.numbers, flow & 1 != 0


def gate_gradients(gates, of_queries, of_keys, number) -> jax.Array:
    """Cotangents of the gates [B, N, H, rows, C]; a select where the kernels write nothing."""
    depth = gates.shape[3] - 2 - INSIDE
    weights, inside = gates[:, :, :, 2 : 2 + INSIDE], of_queries[:, :, :, :INSIDE]
    # R_ti = 2^(G_t - G_i) in the units of the row; a token's pair with itself has level 0 and no decay.
    d_total = LN2 * (jnp.sum((inside * weights)[:, :, :, 1:], axis=3) - of_keys[:, :, :, 0])
    live = jnp.where(number[..., None] < 0, 0, number[..., None] >> jnp.arange(depth) & 1)[:, :, None, :, None] == 1
    d_coefficients = jnp.where(live, of_queries[:, :, :, INSIDE:], 0.0)
    d_gates = jnp.concatenate([d_total[:, :, :, None], of_keys[:, :, :, 1:], inside, d_coefficients], axis=3)
    return jnp.where((number >= 0)[:, :, None, None, None], d_gates, 0.0)


def fade_gradients(fade, merged, begin, d_begin, number, whole) -> tuple[jax.Array, jax.Array | None]:
    """Cotangents of the decays of merges and of what the row begins with. merged [B, N + slots, H]."""
    slots, blocks = merged.shape[1] - number.shape[1], number.shape[1]
    ones = jnp.where(whole, trailing_ones(number), 0)
    rows = []
    for j in range(slots):
        which = np.arange(blocks) - ((1 << j) - 1)
        found = jnp.where((which > 0)[None, :, None], merged[:, np.maximum(which, 0)], merged[:, blocks + j, None])
        rows.append(jnp.where((j < ones)[..., None], found, 0.0))
    d_fade = jnp.stack(rows, axis=3).reshape(merged.shape[0], -1, slots)
    d_fade = jnp.pad(d_fade, ((0, 0), (0, 0), (0, BLOCK - slots)))
    if begin is None:
        return d_fade, None
    heads = fade.shape[1] // blocks
    by_head = (begin.shape[0], heads, -1, begin.shape[3])
    live = (number[:, :1] >> jnp.arange(slots) & 1 == 1)[..., None, None]
    d_slots = jnp.where(live, d_begin[:, :slots], 0.0)
    written, begun = (x[:, slots].reshape(by_head) for x in (d_begin, begin))
    d_fade = d_fade.at[:, :heads, slots].set(jnp.sum(written * begun, axis=(2, 3)))
    d_begun = (fade[:, :heads, slots, None, None] * written).reshape(d_slots[:, :1].shape)
    return d_fade, jnp.concatenate([d_slots, d_begun], axis=1)


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
