"""Documents that begin with the row: a binary tree over blocks of tokens, one level of the Fenwick states a step.

The level at which two positions meet is that of the smallest block of 2^l tokens, at a multiple of its length, that
holds both. So a block's right half reads the whole of its left half at one level, and no other pair is left out:

    block           into_t, Q_t    reading a state S before the block: into_t Q_t S, into_t = exp(g_1 + ... + g_t)
                    S, R           a state S' before the block is into_n (I - R) S' + S behind it
    o_right        += w[level] . into_right . (Q_right S_left)
    S               = into_n (I - R_right) S_left + S_right        R = R_left + R_right - R_right R_left
    into_right     *= into_n of the left half                      Q_right -= Q_right R_left

Every step is a few products over all blocks at once, log2 of the number of blocks one behind the other, and exactly the
pairs of blocks and levels that exist are touched. Without erase there is no R and Q stays. Leaves are chunks or single
tokens. For the gradient a step keeps its inputs: the states halve in number from step to step, and of Q the halves that
read. The identity stays out of R and the decays out of Q and R, so that bfloat16 operands do not round slow forgetting
to none.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from efla_jax.ops.chunked import product
from efla_jax.ops.fenwick import Fenwick, states_of


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def times(dtype, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`product` of operands in dtype, in the gradient too; an index of one operand alone is not summed over."""
    return product(spec, a.astype(dtype), b.astype(dtype))


def _times_forward(dtype, spec, a, b):
    return times(dtype, spec, a, b), (a, b)


def _times_backward(dtype, spec, saved, cotangent):
    a, b = saved
    first, second, out = spec.replace("->", ",").split(",")
    d_a = times(dtype, f"{out},{second}->{first}", cotangent, b)
    return d_a.astype(a.dtype), times(dtype, f"{first},{out}->{second}", a, cotangent).astype(b.dtype)


times.defvjp(_times_forward, _times_backward)


class Blocks(NamedTuple):
    """M blocks of n tokens side by side; R = H // G value heads read one key head.

    o [B, G, R, M, n, V] float32: what is read so far; into [B, G, R, M, n] float32; query [B, G, 1, M, n, K], with
    erase [B, G, R, M, n, K]; weights [J, B, G, R, M, n]: the level weights of this step and the next ones, the last of
    which serves any further; state [B, G, R, M, K, V] float32; erased [B, G, R, M, K, K] float32 or None."""

    o: jax.Array
    into: jax.Array
    query: jax.Array
    weights: jax.Array
    state: jax.Array
    erased: jax.Array | None


BLOCK_AXIS = Blocks(o=3, into=3, query=3, weights=4, state=3, erased=3)


def of_blocks(x: Blocks, part) -> Blocks:
    """part(array, axis of the blocks) of each array."""
    return Blocks(*(None if a is None else part(a, axis) for a, axis in zip(x, BLOCK_AXIS, strict=True)))


def every_other(x: jax.Array, axis: int, first: int) -> jax.Array:
    return jax.lax.slice_in_dim(x, first, x.shape[axis], 2, axis)


def side_by_side(left: jax.Array, right: jax.Array) -> jax.Array:
    """[B, G, R, M, n, ...] of either half -> [B, G, R, M, 2 n, ...]."""
    return jnp.concatenate([left, right], axis=4)


@functools.partial(jax.checkpoint, static_argnums=0)
def met(dtype, state: jax.Array, into: jax.Array, query: jax.Array, weight: jax.Array, erased: jax.Array | None):
    """What blocks read of the states before them (weight [B, G, R, M, n] of its level), and those states behind
    them."""
    scale, last = (weight * into)[..., None], into[..., -1, None, None]
    if erased is None:
        key_head = "bgmnk,bgrmkv->bgrmnv"
        return scale * times(dtype, key_head, query[:, :, 0], state), last * state
    seen = times(dtype, "...nk,...kv->...nv", scale * query, state)
    return seen, last * (state - times(dtype, "...kl,...lv->...kv", erased, state))


@functools.partial(jax.checkpoint, static_argnums=0)
def erased_by_both(dtype, erased: jax.Array, query: jax.Array, right: jax.Array):
    """The queries of right halves seen from the whole, and R of the whole; erased is R of the left halves."""
    query = query - times(dtype, "...nk,...kl->...nl", query, erased).astype(query.dtype)
    return query, erased + right - times(dtype, "...kl,...lm->...km", right, erased)


def merged(dtype, x: Blocks) -> Blocks:
    """An even number of blocks, two by two."""
    left, right = (of_blocks(x, functools.partial(every_other, first=first)) for first in (0, 1))
    seen, state = met(dtype, left.state, right.into, right.query, right.weights[0], right.erased)
    query, erased = right.query, None
    if right.erased is not None:
        query, erased = erased_by_both(dtype, left.erased, query, right.erased)
    into = right.into * left.into[..., -1:]
    weights = x.weights[min(1, x.weights.shape[0] - 1) :]
    return Blocks(
        side_by_side(left.o, right.o + seen),
        side_by_side(left.into, into),
        side_by_side(left.query, query),
        weights.reshape(*weights.shape[:4], -1, 2 * weights.shape[5]),
        state + right.state,
        erased,
    )


def tree(dtype, x: Blocks) -> tuple[jax.Array, dict[int, jax.Array]]:
    """Outputs [B, G, R, M, n, V] of M leaves, and by j the state [B, G, R, 1, K, V] of each block of 2^j leaves that
    the leaf behind them will read: bit j of M is set."""
    shape, odd, step = x.o.shape, [], 0
    while count := x.state.shape[3]:
        if count % 2:
            odd.append((step, of_blocks(x, lambda a, axis: jax.lax.slice_in_dim(a, count - 1, count, 1, axis))))
            x = of_blocks(x, lambda a, axis: jax.lax.slice_in_dim(a, 0, count - 1, 1, axis))
        if count > 1:
            x, step = merged(dtype, x), step + 1
    states, outputs = {}, []
    for step, block in reversed(odd):
        o = block.o
        for other, state in states.items():
            weight = block.weights[min(other - step, block.weights.shape[0] - 1)]
            seen, states[other] = met(dtype, state, block.into, block.query, weight, block.erased)
            o += seen
        states[step] = block.state
        outputs.append(o.reshape(*shape[:3], -1, *shape[4:]))
    return jnp.concatenate(outputs, axis=3), states


def in_slots(states: dict[int, jax.Array], lowest: int, count: int) -> jax.Array:
    """States [B, H, L, K, V] of L = count slots from those of a tree, whose first step is the level `lowest`."""
    batch, groups, heads, _, *shape = next(iter(states.values())).shape
    slots = jnp.zeros((batch, groups * heads, count, *shape))
    for step, state in states.items():
        slots = slots.at[:, :, min(lowest + step, count - 1)].add(state.reshape(batch, -1, *shape))
    return slots


@functools.partial(jax.jit, static_argnums=1)
def fenwick_associative(f: Fenwick, _chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """A tree over single tokens, in float32: parallel in time, exact, O(T K^2) memory. A reference, not for training.
    Outputs [B, T, H, V] in the dtype of u and the states [B, H, L, K, V]."""
    if f.states is not None or f.real is not None:
        raise NotImplementedError(
            "implementation 'associative' of a Fenwick operator takes whole rows only, without initial_state and"
            " segment_ids; use 'chunked' or 'recurrent'."
        )
    x, (batch, time, groups, _) = f.x, f.x.k.shape
    if x.u.size == 0:
        return x.u, states_of(f)
    q, k, u, erase, decay, weights = (
        None if a is None else jnp.moveaxis(a.astype(jnp.float32).reshape(batch, time, groups, -1, *a.shape[3:]), 1, 3)
        for a in (x.q, x.k, x.u, x.erase, x.log_decay, f.level_weights)
    )
    weights = jnp.moveaxis(weights, -1, 0)
    lowest = min(1, weights.shape[0] - 1)
    own = weights[0] * jnp.sum(q * k, -1)
    erased = None if erase is None else (erase[..., None] * k)[..., None] * k[..., None, :]
    blocks = Blocks(
        (own[..., None] * u)[..., None, :],
        jnp.exp(decay)[..., None],
        (q if erase is None else q - (erase * jnp.sum(q * k, -1))[..., None] * k)[..., None, :],
        weights[lowest:, ..., None],
        k[..., None] * u[..., None, :],
        erased,
    )
    o, states = tree(jnp.float32, blocks)
    o = jnp.moveaxis(o[..., 0, :], 3, 1).reshape(x.u.shape).astype(x.u.dtype)
    return o, in_slots(states, lowest, weights.shape[0])
