"""Both log-linear recurrences a chunk at a time (XLA): products inside a chunk, one pass over chunks for all levels.

Letters are those of `chunked`: per chunk Q, K, U, erase e, R_ti = exp(G_t - G_i) for i <= t in the same document (D_ti:
the same without decay, 1 or 0), "in" = exp(G_t) while no document has begun, "out" = exp(G_C - G_i) in the last one;
states S_l at the chunk's start. w(t, .) is the query's weight of the level at which it sees a token or a state.

    X = (I + strict(e D . K K^T))^-1        P = tril(Q K^T . D) X        E = X e K
    O = (w . R . P) U + sum over l of w(t, l) . in . (Q - P e K) S_l
    S'_m = in_C sum over l (l -> m) of (I - K^T E) S_l + sum over s (s -> m) of ((R . X)^T (out . K))_s u_s^T

One inverse, the one without gates, serves all: scalar gates commute. Without erase X = I and E = 0. A state at the
start of a chunk is a dyadic block of positions, so that every later query sees all of it at one level; at the chunk's
end each state and each token goes to the slot that the next position sees it in. Hence chunks may begin and end at any
position, and hold several documents.

Only the states at the start of every `span` of chunks are kept for the gradient: it recomputes a span, then goes
through it backwards, where the adjoint of a merge is a copy.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.ops.chunked import Chunks, chunks, cut, decays, join, product, unit_lower_inverse
from efla_jax.ops.fenwick import Fenwick, fenwick_level
from efla_jax.shapes import CHUNK_SIZES


@jax.custom_vjp
def inverse(strict: jax.Array) -> jax.Array:
    """(I + strict)^-1, whose gradient needs nothing but itself."""
    return unit_lower_inverse(strict)


def _inverse_forward(strict):
    x = unit_lower_inverse(strict)
    return x, x


def _inverse_backward(x, d_x):
    d_x = product("...ji,...jk->...ik", x, product("...jk,...lk->...jl", d_x, x))
    return (-jnp.tril(d_x, -1),)


inverse.defvjp(_inverse_forward, _inverse_backward)


class Levels(NamedTuple):
    """Where a chunk's tokens and states are seen, per chunk; the axis of heads is left out.

    position [N, B, C] of each token; start [N, B] and end [N, B]: the position of the next token before the chunk and
    after it."""

    position: jax.Array
    start: jax.Array
    end: jax.Array


def levels(position: jax.Array, start: jax.Array, count: int, size: int) -> Levels:
    """Cut positions [B, T] and chain the chunks' borders. Tokens added at the end stand where the last one does."""
    position = jnp.pad(position, ((0, 0), (0, count * size - position.shape[1])), mode="edge")
    position = position.reshape(-1, count, size).transpose(1, 0, 2)
    end = position[..., -1] + 1
    return Levels(position, jnp.concatenate([start[None], end[:-1]]), end)


def seen_at(t: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """The level [..., L] at which the query at t >= start sees slot l of the states that the token at start would read.

    Slot l holds positions of the block of 2^l that start is in (or, the last slot, anything before)."""
    slot = jnp.arange(count)
    block = jnp.left_shift(jnp.right_shift(start[..., None], slot), slot)
    return jnp.clip(fenwick_level(t[..., None], block), slot, count - 1)


def at_level(weights: jax.Array, level: jax.Array) -> jax.Array:
    """Weights [B, G, R, C, L] of the levels [B, C, n], or [C, n] for all rows; as a product, since the gradient of a
    gather is a scatter."""
    chosen = jax.nn.one_hot(level, weights.shape[-1])
    return product("bgrcl,bcnl->bgrcn" if level.ndim == 3 else "bgrcl,cnl->bgrcn", weights, chosen)


class Inner(NamedTuple):
    """What a chunk needs that no state enters: (w . R . P) U, in . (Q - P e K), (R . X)^T (out . K) and in_C (I - K^T
    E), without erase in_C alone."""

    o: jax.Array
    query: jax.Array
    write: jax.Array
    transition: jax.Array


def inner(x: Chunks, weights: jax.Array, position: jax.Array) -> Inner:
    """For one chunk (no chunk axis) with its tokens at position [B, C], or [C] for all rows."""
    decay = decays(x.log_decay, x.document, x.before)
    q, k = x.q[..., None, :, :], x.k[..., None, :, :]
    scores = jnp.tril(product("...ik,...jk->...ij", q, k))
    query, write = q, decay.out[..., None] * k
    transition = decay.into[..., -1:, None]
    if x.erase is not None:
        same = jnp.ones_like(scores) if x.document is None else x.document[..., :, None] == x.document[..., None, :]
        gram = product("...ik,...jk->...ij", k, k)
        solved = inverse(jnp.tril(x.erase[..., None] * same * gram, -1))
        scores = product("...ij,...jk->...ik", scores * same, solved)
        erased = x.erase[..., None] * k
        known = product("...ij,...jk->...ik", solved, erased)
        transition = transition * (jnp.eye(k.shape[-1]) - product("...ck,...cl->...kl", k, known))
        query = q - product("...ij,...jk->...ik", scores, erased)
        write = product("...ij,...ik->...jk", decay.pairs * solved, write)
    top = weights.shape[-1] - 1
    apart = fenwick_level(position[..., :, None], position[..., None, :])
    mixed = decay.pairs * scores * at_level(weights, jnp.minimum(apart, top))
    o = product("...ij,...jv->...iv", mixed, x.u)
    return Inner(o, decay.into[..., None] * query, write, transition)


def passed(transition: jax.Array, states: jax.Array) -> jax.Array:
    """States [..., K, V] after a transition [..., K, K], or [..., 1, 1] if it is a number."""
    if transition.shape[-1] == 1:
        return transition * states
    return product("...kl,...lv->...kv", transition, states)


def chunk(states: jax.Array, parts: Inner, u: jax.Array, weights: jax.Array, where: Levels):
    """States [B, G, R, L, K, V] after one chunk and its outputs [B, G, R, C, V]."""
    count = weights.shape[-1]
    seen = at_level(weights, seen_at(where.position, where.start[:, None], count))
    o = parts.o + product("bgrclk,bgrlkv->bgrcv", seen[..., None] * parts.query[..., None, :], states)
    moves = jax.nn.one_hot(seen_at(where.end, where.start, count), count)
    goes = jax.nn.one_hot(jnp.minimum(fenwick_level(where.end[:, None], where.position), count - 1), count)
    states = product("blm,bgrlkv->bgrmkv", moves, passed(parts.transition[..., None, :, :], states))
    write = goes[:, None, None, :, :, None] * parts.write[..., None, :]
    return states + product("bgrcmk,bgrcv->bgrmkv", write, u), o


def aligned_chunk(states: tuple, parts: Inner, u: jax.Array, weights: jax.Array, number: jax.Array):
    """Like `chunk` where all rows begin at 0: then whole chunks are blocks, and before chunk `number` state j of levels
    lowest + j holds 2^j chunks where bit j of number is set, and nothing otherwise. A negative number is no chunk."""
    lowest, top = lowest_level(u.shape[-2], weights.shape[-1]), len(states) - 1
    o, stepped = parts.o, []

    def read(o, state, weight):
        seen = product("bgrck,bgrkv->bgrcv", weight[..., None] * parts.query, state)
        return o + seen, passed(parts.transition, state)

    for j, state in enumerate(states):
        bits = number >> j
        live = (number >= 0) & (bits > 0 if j == top else bits & 1 == 1)
        o, state = lax.cond(live, read, lambda o, state, _: (o, state), o, state, weights[..., lowest + j])
        stepped.append(state)
    moving = product("bgrck,bgrcv->bgrkv", parts.write, u)
    depth = jnp.where(number < 0, 0, jnp.minimum(fenwick_level(number + 1, number) - 1, top))
    for j, state in enumerate(stepped):
        full = moving + state
        stepped[j] = jnp.where(j < depth, 0.0, jnp.where(j == depth, full, state))
        moving = jnp.where(j < depth, full, moving)
    return tuple(stepped), o


def lowest_level(size: int, count: int) -> int:
    """The level of a whole chunk."""
    return min(size.bit_length(), count - 1)


def spans(tree, count: int):
    """[N, ...] -> [N / count, count, ...] everywhere."""
    return jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), tree)


def swept(step, states, x: Chunks, weights: jax.Array, position: jax.Array, where):
    """lax.scan of step over chunks, as many as `filled` says, whose gradient needs memory for the states of the square
    root of their number. position: see `inner`; where: what step needs beside."""
    count = weights.shape[0]
    span = math.isqrt(count - 1) + 1

    @jax.checkpoint
    def several(states, pieces):
        x, weights, position, where = pieces
        parts = jax.vmap(inner)(x, weights, position)
        return lax.scan(lambda states, piece: step(states, *piece), states, (parts, x.u, weights, where))

    states, o = lax.scan(several, states, spans((x, weights, position, where), span))
    return states, o.reshape(count, *o.shape[2:])


def filled(count: int) -> int:
    """The number of chunks, at least count, that `swept` takes."""
    span = math.isqrt(count - 1) + 1
    return span * -(-count // span)


@functools.partial(jax.jit, static_argnums=1)
def fenwick_chunked(f: Fenwick, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of u and the states [B, H, L, K, V] float32."""
    x, time = f.x, f.x.k.shape[1]
    if x.u.size == 0:  # no token, no row or no channel to write
        return x.u, f.states
    size = min(chunk_size, next((c for c in CHUNK_SIZES if c >= time), chunk_size))
    return aligned(f, size) if f.start is None and time > size else anywhere(f, size)


def anywhere(f: Fenwick, size: int) -> tuple[jax.Array, jax.Array]:
    """Rows that begin at any position, packed or padded as they are."""
    x = f.x
    count = filled(-(-x.k.shape[1] // size))
    start = jnp.zeros_like(f.position[:, 0]) if f.start is None else f.start
    states = grouped(f.states, x)
    where = levels(f.position, start, count, size)
    states, o = swept(chunk, states, *chunks_of(f, count, size), where.position, where)
    return join(o, x.u), states.reshape(f.states.shape)


def aligned(f: Fenwick, size: int) -> tuple[jax.Array, jax.Array]:
    """Rows that begin at 0: all chunks but the last in the cheaper form."""
    whole = (f.x.k.shape[1] - 1) // size
    border, slots = whole * size, f.states.shape[2]
    head, tail = part_of(f, slice(border)), part_of(f, slice(border, None))
    lowest = lowest_level(size, slots)
    count, states = filled(whole), grouped(f.states, f.x)
    number = jnp.where(jnp.arange(count) < whole, jnp.arange(count), -1)
    used = tuple(states[..., j, :, :] for j in range(lowest, min(lowest + whole.bit_length(), slots)))
    position = jnp.broadcast_to(jnp.arange(size), (count, size))
    used, o = swept(aligned_chunk, used, *chunks_of(head, count, size), position, number)
    for j, state in enumerate(used):
        states = states.at[..., lowest + j, :, :].set(state)
    last = anywhere(tail._replace(states=states.reshape(f.states.shape), start=tail.position[:, 0]), size)
    return jnp.concatenate([join(o, head.x.u), last[0]], axis=1), last[1]


def part_of(f: Fenwick, part: slice) -> Fenwick:
    """Some of the tokens, with the states as they are."""
    x = jax.tree.map(lambda array: array[:, part], f.x)._replace(initial_state=f.x.initial_state)
    return f._replace(x=x, level_weights=f.level_weights[:, part], position=f.position[:, part])


def grouped(states: jax.Array, x) -> jax.Array:
    """States [B, H, ...] -> [B, G, R, ...]."""
    return states.reshape(states.shape[0], x.k.shape[2], -1, *states.shape[2:])


def chunks_of(f: Fenwick, count: int, size: int) -> tuple[Chunks, jax.Array]:
    """The arguments in `count` chunks, in float32, and the weights [N, B, G, R, C, L]."""
    x = f.x
    fill = ((0, 0), (0, count * size - x.k.shape[1]))

    def wide(array):
        return None if array is None else jnp.pad(array, fill + ((0, 0),) * (array.ndim - 2))

    q, k, u = (wide(array).astype(jnp.float32) for array in (x.q, x.k, x.u))
    pieces = chunks(q, k, u, wide(x.erase), wide(x.log_decay), wide(x.starts), size)
    group = x.k.shape[2], x.u.shape[2] // x.k.shape[2]
    return pieces, cut(f.level_weights, count, size, *group)
