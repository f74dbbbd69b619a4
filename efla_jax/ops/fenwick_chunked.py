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
    """Weights [B, G, R, C, L] of the levels [B, C, n]."""
    level = jnp.broadcast_to(level[:, None, None], (*weights.shape[:-1], level.shape[-1]))
    return jnp.take_along_axis(weights, level, axis=-1)


class Inner(NamedTuple):
    """What a chunk needs that no state enters: (w . R . P) U, in . (Q - P e K), E, (R . X)^T (out . K) and in_C."""

    o: jax.Array
    query: jax.Array
    known: jax.Array | None
    write: jax.Array
    keep: jax.Array


def inner(x: Chunks, weights: jax.Array, where: Levels) -> Inner:
    """For one chunk (no chunk axis)."""
    decay = decays(x.log_decay, x.document, x.before)
    q, k = x.q[..., None, :, :], x.k[..., None, :, :]
    scores = jnp.tril(product("...ik,...jk->...ij", q, k))
    query, known, write = q, None, decay.out[..., None] * k
    if x.erase is not None:
        same = jnp.ones_like(scores) if x.document is None else x.document[..., :, None] == x.document[..., None, :]
        gram = product("...ik,...jk->...ij", k, k)
        solved = inverse(jnp.tril(x.erase[..., None] * same * gram, -1))
        scores = product("...ij,...jk->...ik", scores * same, solved)
        erased = x.erase[..., None] * k
        known = product("...ij,...jk->...ik", solved, erased)
        query = q - product("...ij,...jk->...ik", scores, erased)
        write = product("...ij,...ik->...jk", decay.pairs * solved, write)
    top = weights.shape[-1] - 1
    apart = fenwick_level(where.position[..., :, None], where.position[..., None, :])
    mixed = decay.pairs * scores * at_level(weights, jnp.minimum(apart, top))
    o = product("...ij,...jv->...iv", mixed, x.u)
    return Inner(o, decay.into[..., None] * query, known, write, decay.into[..., -1])


def chunk(states: jax.Array, x: Chunks, weights: jax.Array, where: Levels) -> tuple[jax.Array, jax.Array]:
    """States [B, G, R, L, K, V] after one chunk and its outputs [B, G, R, C, V]."""
    parts = inner(x, weights, where)
    count = weights.shape[-1]
    seen = at_level(weights, seen_at(where.position, where.start[:, None], count))
    o = parts.o + product("bgrclk,bgrlkv->bgrcv", seen[..., None] * parts.query[..., None, :], states)
    if parts.known is not None:
        states = states - product("bgck,bgrclv->bgrlkv", x.k, product("bgrck,bgrlkv->bgrclv", parts.known, states))
    moves = jax.nn.one_hot(seen_at(where.end, where.start, count), count)
    goes = jax.nn.one_hot(jnp.minimum(fenwick_level(where.end[:, None], where.position), count - 1), count)
    states = product("blm,bgrlkv->bgrmkv", moves, parts.keep[..., None, None, None] * states)
    write = goes[:, None, None, :, :, None] * parts.write[..., None, :]
    return states + product("bgrcmk,bgrcv->bgrmkv", write, x.u), o


def spans(tree, count: int):
    """[N, ...] -> [N / count, count, ...] everywhere."""
    return jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), tree)


@functools.partial(jax.jit, static_argnums=1)
def fenwick_chunked(f: Fenwick, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of u and the states [B, H, L, K, V] float32."""
    x, time = f.x, f.x.k.shape[1]
    if x.u.size == 0:  # no token, no row or no channel to write
        return x.u, f.states
    size = min(chunk_size, next((c for c in CHUNK_SIZES if c >= time), chunk_size))
    count = -(-time // size)
    span = math.isqrt(count - 1) + 1
    count = span * -(-count // span)
    pieces = chunks_of(f, count, size)
    states = f.states.reshape(*pieces[0].u.shape[1:4], *f.states.shape[2:])

    @jax.checkpoint
    def one(states, piece):
        return chunk(states, *piece)

    @jax.checkpoint
    def several(states, piece):
        return lax.scan(one, states, piece)

    states, o = lax.scan(several, states, spans(pieces, span))
    return join(o.reshape(count, *o.shape[2:]), x.u), states.reshape(f.states.shape)


def chunks_of(f: Fenwick, count: int, size: int) -> tuple[Chunks, jax.Array, Levels]:
    """The arguments in `count` chunks, in float32, the weights [N, B, G, R, C, L], and where the tokens stand."""
    x = f.x
    fill = ((0, 0), (0, count * size - x.k.shape[1]))

    def wide(array):
        return None if array is None else jnp.pad(array, fill + ((0, 0),) * (array.ndim - 2))

    q, k, u = (wide(array).astype(jnp.float32) for array in (x.q, x.k, x.u))
    pieces = chunks(q, k, u, wide(x.erase), wide(x.log_decay), wide(x.starts), size)
    group = x.k.shape[2], x.u.shape[2] // x.k.shape[2]
    return pieces, cut(f.level_weights, count, size, *group), levels(f.position, f.start, count, size)
