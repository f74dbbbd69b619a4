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


def _times(dtype, spec, a, b):
    return product(spec, a.astype(dtype), b.astype(dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def times(dtype, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`product` of operands in dtype, in the gradient too; an index of one operand alone is not summed over."""
    return _times(dtype, spec, a, b)


def _times_forward(dtype, spec, a, b):  # products without rules of their own, so that a gradient has a jvp
    return _times(dtype, spec, a, b), (a, b)


def _times_backward(dtype, spec, saved, cotangent):
    a, b = saved
    first, second, out = spec.replace("->", ",").split(",")
    d_a = _times(dtype, f"{out},{second}->{first}", cotangent, b)
    return d_a.astype(a.dtype), _times(dtype, f"{first},{out}->{second}", a, cotangent).astype(b.dtype)


times.defvjp(_times_forward, _times_backward)


class Blocks(NamedTuple):
    """M blocks of n tokens side by side; R = H // G value heads read one key head.

    o [B, G, R, M, n, V] float32: what is read so far; into [B, G, R, M, n] float32; query [B, G, 1, M, n, K], with
    erase [B, G, R, M, n, K]; weights [B, G, R, M, n] each: of the levels of this step and the next ones, the last of
    which serves any further; state [B, G, R, M, K, V] float32; erased [B, G, R, M, K, K] float32 or None."""

    o: jax.Array
    into: jax.Array
    query: jax.Array
    weights: tuple[jax.Array, ...]
    state: jax.Array
    erased: jax.Array | None


def blocks_from(x: Blocks, first: int, last: int) -> Blocks:
    """Blocks first .. last - 1 of those side by side."""
    return jax.tree.map(lambda a: a[:, :, :, first:last], x)


def unstack(x: jax.Array) -> tuple[jax.Array, ...]:
    """x[..., 0], x[..., 1], ...: by a split, whose gradient puts them together at once."""
    return tuple(piece.squeeze(-1) for piece in jnp.split(x, x.shape[-1], axis=-1))


@functools.partial(jax.checkpoint, static_argnums=0)
def read_and_carry(
    dtype, state: jax.Array, into: jax.Array, query: jax.Array, weight: jax.Array, erased: jax.Array | None
):
    """What blocks read of the states before them (weight [B, G, R, M, n] of its level), and those states behind
    them."""
    scale, last = (weight * into)[..., None], into[..., -1, None, None]
    if query.shape[2] == state.shape[2]:
        seen = times(dtype, "...nk,...kv->...nv", scale * query, state)
    else:
        seen = scale * times(dtype, "bgmnk,bgrmkv->bgrmnv", query.squeeze(2), state)
    if erased is None:
        return seen, last * state
    return seen, last * (state - times(dtype, "...kl,...lv->...kv", erased, state))


@functools.partial(jax.checkpoint, static_argnums=0)
def erased_by_both(dtype, query: jax.Array, left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the left halves erase of the queries of the right ones, and R of the whole."""
    both = left + right - times(dtype, "...kl,...lm->...km", right, left)
    return times(dtype, "...nk,...kl->...nl", query, left), both


def halves(x: jax.Array) -> list[jax.Array]:
    """Of states [B, G, R, M, ...]: those of left and of right halves."""
    return [half.squeeze(4) for half in jnp.split(x.reshape(*x.shape[:3], -1, 2, *x.shape[4:]), 2, axis=4)]


def paired(x: jax.Array) -> jax.Array:
    """[B, G, R, M, n, ...] -> [B, G, R, M / 2, 2 n, ...]."""
    return x.reshape(*x.shape[:3], x.shape[3] // 2, -1, *x.shape[5:])


def merge_pairs(dtype, x: Blocks) -> Blocks:
    """An even number of blocks, two by two."""
    n = x.into.shape[4]
    o, into, query, weights = jax.tree.map(paired, (x.o, x.into, x.query, x.weights))

    def behind(right):  # nothing for the tokens of the left half
        return jnp.pad(right, [(0, 0)] * 4 + [(n, 0), (0, 0)])

    (left, right), erased = halves(x.state), x.erased
    if erased is not None:
        first, erased = halves(erased)
    seen, state = read_and_carry(dtype, left, into[..., n:], query[:, :, :, :, n:], weights[0][..., n:], erased)
    if erased is not None:
        less, erased = erased_by_both(dtype, query[:, :, :, :, n:], first, erased)
        query = (query - behind(less)).astype(query.dtype)
    into = jnp.concatenate([into[..., :n], into[..., n - 1 : n] * into[..., n:]], axis=4)
    return Blocks(o + behind(seen), into, query, weights[1:] or weights, state + right, erased)


def tree(dtype, x: Blocks) -> tuple[jax.Array, dict[int, jax.Array]]:
    """Outputs [B, G, R, M, n, V] of M leaves, and by j the state [B, G, R, 1, K, V] of each block of 2^j leaves that
    the leaf behind them will read: bit j of M is set."""
    shape, odd, step = x.o.shape, [], 0
    while count := x.state.shape[3]:
        if count % 2:
            odd.append((step, blocks_from(x, count - 1, count)))
            x = blocks_from(x, 0, count - 1)
        if count > 1:
            x, step = merge_pairs(dtype, x), step + 1
    states: dict[int, jax.Array] = {}
    outputs = []
    for step, block in reversed(odd):
        o = block.o
        for other, state in states.items():
            weight = block.weights[min(other - step, len(block.weights) - 1)]
            seen, states[other] = read_and_carry(dtype, state, block.into, block.query, weight, block.erased)
            o += seen
        states[step] = block.state
        outputs.append(o.reshape(*shape[:3], -1, *shape[4:]))
    return jnp.concatenate(outputs, axis=3), states


def in_slots(states: dict[int, jax.Array], lowest: int, count: int) -> jax.Array:
    """States [B, H, L, K, V] of L = count slots from those of a tree, whose first step is the level `lowest`."""
    some = next(iter(states.values()))
    slots = [jnp.zeros_like(some)] * count
    for step, state in states.items():
        slot = min(lowest + step, count - 1)
        slots[slot] = slots[slot] + state
    return jnp.concatenate(slots, axis=3).reshape(some.shape[0], -1, count, *some.shape[4:])


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

    def heads(a):
        return jnp.moveaxis(a.astype(jnp.float32).reshape(batch, time, groups, -1, *a.shape[3:]), 1, 3)

    q, k, u, decay, *weights = map(heads, (x.q, x.k, x.u, x.log_decay, *unstack(f.level_weights)))
    lowest = min(1, len(weights) - 1)
    own = weights[0] * jnp.sum(q * k, -1)
    query, erased = q, None
    if x.erase is not None:
        known = heads(x.erase)[..., None] * k
        query, erased = q - jnp.sum(q * k, -1, keepdims=True) * known, known[..., None] * k[..., None, :]
    blocks = Blocks(
        (own[..., None] * u)[..., None, :],
        jnp.exp(decay)[..., None],
        query[..., None, :],
        tuple(weight[..., None] for weight in weights[lowest:]),
        k[..., None] * u[..., None, :],
        erased,
    )
    o, states = tree(jnp.float32, blocks)
    o = jnp.moveaxis(o[..., 0, :], 3, 1).reshape(x.u.shape).astype(x.u.dtype)
    return o, in_slots(states, lowest, len(weights))
