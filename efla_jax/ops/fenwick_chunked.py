"""Both log-linear recurrences a chunk at a time (XLA): products inside a chunk; over chunks a tree, or one pass.

Letters are those of `chunked`: per chunk Q, K, U, erase e, R_ti = exp(G_t - G_i) for i <= t in the same document (D_ti:
the same without decay, 1 or 0), "in" = exp(G_t) while no document has begun, "out" = exp(G_C - G_i) in the last one;
states S_l at the chunk's start. w(t, .) is the query's weight of the level at which it sees a token or a state.

    X = (I + strict(e D . K K^T))^-1        P = tril(Q K^T . D) X        E = X e K
    O = (w . R . P) U + sum over l of w(t, l) . in . (Q - P e K) S_l
    S'_m = in_C sum over l (l -> m) of (I - K^T E) S_l + sum over s (s -> m) of ((R . X)^T (out . K))_s u_s^T

One inverse, the one without gates, serves all: scalar gates commute. Without erase X = I and E = 0.

Whole rows that begin at 0 go through the tree of `fenwick_tree`. Continued, packed and padded ones take one pass over
their chunks with all slots: a state at the start of a chunk is a dyadic block of positions, so that every later query
sees all of it at one level; at the chunk's end each state and each token goes to the slot that the next position sees
it in. Hence chunks may begin and end at any position, and hold several documents. Of that pass only the states at the
start of every `span` of chunks are kept for the gradient, which recomputes a span and then goes through it backwards.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.ops.chunked import Chunks, chunks, cut, decays, join, unit_lower_inverse
from efla_jax.ops.fenwick import Fenwick, fenwick_level, fenwick_recurrent, meeting_slot, merge, states_of
from efla_jax.ops.fenwick_tree import Blocks, in_slots, times, tree, unstack
from efla_jax.shapes import CHUNK_SIZES


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def inverse(dtype, strict: jax.Array) -> jax.Array:
    """(I + strict)^-1, whose gradient needs nothing but itself. Two products one behind the other: for nearly parallel
    keys bfloat16 operands would lose too much, but where the rest has such, TF32 will do."""
    return unit_lower_inverse(strict)


def _inverse_forward(dtype, strict):
    x = unit_lower_inverse(strict)
    return x, x


def _inverse_backward(dtype, x, d_x):
    precision = lax.Precision.DEFAULT if dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    d_x = jnp.einsum("...ji,...jk,...lk->...il", x, d_x, x, precision=precision)
    return (-jnp.tril(d_x, -1),)


inverse.defvjp(_inverse_forward, _inverse_backward)


def at_level(weights: tuple[jax.Array, ...], level: jax.Array) -> jax.Array:
    """Of weights [..., C], one of each level, those at the levels [..., C, n]: selected, since the gradient of a gather
    is a scatter."""
    return functools.reduce(jnp.add, (jnp.where(level == i, w[..., None], 0.0) for i, w in enumerate(weights)))


class Inner(NamedTuple):
    """What chunks need that no state enters: (w . R . P) U, "in", Q - P e K, (R . X)^T (out . K) and, with erase,
    K^T E."""

    o: jax.Array
    into: jax.Array
    query: jax.Array
    write: jax.Array
    erased: jax.Array | None


def inner(x: Chunks, weights: tuple[jax.Array, ...], position: jax.Array) -> Inner:
    """q and k [..., 1, C, K] are read by all u [..., R, C, V] of their group; weights [..., R, C] of each level;
    position [..., C] of the tokens."""
    dtype, top = x.k.dtype, len(weights) - 1
    decay = decays(x.log_decay, x.document, x.before)
    query, write, erased = x.q, decay.out[..., None] * x.k, None
    scores = jnp.tril(times(dtype, "...ik,...jk->...ij", x.q, x.k))
    if x.erase is not None:
        gram = times(dtype, "...ik,...jk->...ij", x.k, x.k)
        if x.document is not None:
            same = x.document[..., :, None] == x.document[..., None, :]
            gram, scores = same * gram, same * scores
        solved = inverse(dtype, jnp.tril(x.erase[..., None] * gram, -1))
        scores = times(dtype, "...ij,...jk->...ik", jnp.broadcast_to(scores, solved.shape), solved)
        known = times(dtype, "...ij,...jk->...ik", solved, x.erase[..., None] * x.k)
        erased = times(dtype, "...ck,...cl->...kl", jnp.broadcast_to(x.k, known.shape), known)
        query = (x.q - times(dtype, "...ij,...jk->...ik", scores, x.erase[..., None] * x.k)).astype(dtype)
        write = times(dtype, "...ij,...ik->...jk", decay.pairs * solved, write)
    apart = fenwick_level(position[..., :, None], position[..., None, :])
    mixed = decay.pairs * scores * at_level(weights, jnp.minimum(apart, top))
    o = times(dtype, "...ij,...jv->...iv", mixed, x.u)
    return Inner(o, decay.into, query, write, erased)


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


def seen_weights(weights: tuple[jax.Array, ...], t: jax.Array, start: jax.Array) -> jax.Array:
    """Weights [B, G, R, C, L] of the level at which the queries at t [B, C] see each slot of the states that the token
    at start [B] would read: slot l if t and start lie in one block of 2^l tokens, else the level where they meet."""
    meet = meeting_slot(t, start[:, None], len(weights))[:, None, None, :, None]
    below = jnp.arange(len(weights)) < meet
    return jnp.where(below, at_level(weights, meet), jnp.stack(weights, -1))


def chunk(states: jax.Array, piece: tuple) -> tuple[jax.Array, jax.Array]:
    """States [B, G, R, L, K, V] after one chunk and its outputs [B, G, R, C, V]."""
    parts, u, weights, where = piece
    dtype, count = u.dtype, len(weights)
    scale = seen_weights(weights, where.position, where.start) * parts.into[..., None]
    query = scale[..., None] * parts.query[..., None, :]
    o = parts.o + times(dtype, "bgrclk,bgrlkv->bgrcv", query, states)
    if parts.erased is not None:
        states = states - times(dtype, "bgrij,bgrljv->bgrliv", parts.erased, states)
    states = merge(parts.into[..., -1, None, None, None] * states, meeting_slot(where.end, where.start, count))
    goes = meeting_slot(where.end[:, None], where.position, count)[:, None, None, None, :, None]
    write = jnp.where(goes == jnp.arange(count)[:, None, None], parts.write[..., None, :, :], 0.0)
    return states + times(dtype, "bgrlck,bgrcv->bgrlkv", write, u), o


def chunks_of(f: Fenwick, count: int, size: int) -> tuple[Chunks, tuple[jax.Array, ...]]:
    """The arguments in `count` chunks, q and k with an axis of 1 for the heads that read them, and the weights
    [N, B, G, R, C] of each level."""
    x = f.x
    fill = ((0, 0), (0, count * size - x.k.shape[1]))

    def wide(array):
        return None if array is None else jnp.pad(array, fill + ((0, 0),) * (array.ndim - 2))

    q, k, u, erase, decay, starts = map(wide, (x.q, x.k, x.u, x.erase, x.log_decay, x.starts))
    pieces = chunks(q, k, u, erase, decay, starts, size)
    weights = cut(f.level_weights, count, size, x.k.shape[2], x.u.shape[2] // x.k.shape[2])
    return pieces._replace(q=pieces.q[..., None, :, :], k=pieces.k[..., None, :, :]), unstack(weights)


def sweep(f: Fenwick, states: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Rows that begin at any position, packed or padded as they are."""
    if f.x.k.shape[1] == 1:  # not a chunk of one: XLA's GPU compiler (jax 0.11.2) fails on the gradient of that
        return fenwick_recurrent(f._replace(states=states), size)
    number = -(-f.x.k.shape[1] // size)
    span = math.isqrt(number - 1) + 1
    count = span * -(-number // span)
    pieces = *chunks_of(f, count, size), levels(f.position, f.start, count, size)

    @jax.checkpoint
    def several(states, pieces):
        x, weights, where = pieces
        parts = inner(x, weights, where.position[:, :, None, None])
        return lax.scan(chunk, states, (parts, x.u, weights, where))

    split = states.reshape(states.shape[0], f.x.k.shape[2], -1, *states.shape[2:])
    split, o = lax.scan(several, split, jax.tree.map(lambda a: a.reshape(-1, span, *a.shape[1:]), pieces))
    return join(o.reshape(count, *o.shape[2:]), f.x.u), split.reshape(states.shape)


def whole_chunks(f: Fenwick, size: int) -> tuple[jax.Array, jax.Array]:
    """Rows of whole chunks that begin at 0."""
    count = f.x.k.shape[1] // size
    x, weights = chunks_of(f, count, size)
    x, weights = jax.tree.map(lambda a: jnp.moveaxis(a, 0, 3), (x, weights))
    parts = jax.checkpoint(inner)(x, weights[: size.bit_length()], jnp.arange(size))
    state = times(x.u.dtype, "...ck,...cv->...kv", parts.write, x.u)
    lowest = min(size.bit_length(), len(weights) - 1)
    blocks = Blocks(parts.o, parts.into, parts.query, weights[lowest:], state, parts.erased)
    o, states = tree(x.u.dtype, blocks)
    return join(jnp.moveaxis(o, 3, 0), f.x.u), in_slots(states, lowest, len(weights))


@functools.partial(jax.jit, static_argnums=1)
def fenwick_chunked(f: Fenwick, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of u and the states [B, H, L, K, V] float32."""
    x, time = f.x, f.x.k.shape[1]
    if x.u.size == 0:  # no token, no row or no channel to write
        return x.u, states_of(f)
    size = min(chunk_size, next((c for c in CHUNK_SIZES if c >= time), chunk_size))
    if f.states is not None or f.real is not None or time < size:
        return sweep(f, states_of(f), size)
    whole = time - time % size
    o, states = whole_chunks(part_of(f, slice(whole)), size)
    if whole == time:
        return o, states
    rest, states = sweep(part_of(f, slice(whole, None)), states, next(c for c in CHUNK_SIZES if c >= time - whole))
    return jnp.concatenate([o, rest], axis=1), states


def part_of(f: Fenwick, part: slice) -> Fenwick:
    """Some of the tokens of rows that begin at 0."""
    cropped = {name: a[:, part] for name, a in f.x._asdict().items() if a is not None and name != "initial_state"}
    position = f.position[:, part]
    return f._replace(
        x=f.x._replace(**cropped), level_weights=f.level_weights[:, part], position=position, start=position[:, 0]
    )
