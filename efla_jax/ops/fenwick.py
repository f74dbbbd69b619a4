"""Fenwick states: which tokens share a state, how states merge, and both log-linear recurrences token by token.

Token s of a document reaches the query at t through level(t, s) = bit_length(t xor s): level 0 is the token itself,
level l >= 1 is there where bit l-1 of t is set and holds 2^(l-1) tokens. When t goes up by one, the levels below the
lowest set bit of the result become the level of that bit: binary carry. Levels from L - 1 on share slot and weight L -
1, so that a state has L slots at any length.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from efla_jax.ops.arguments import Recurrence, recurrence
from efla_jax.ops.segments import mask_padding, positions
from efla_jax.shapes import check_floating, check_shapes

Positions = Int[Array | np.ndarray, "..."] | int | np.integer
PRECISION = lax.Precision.HIGHEST


class FenwickState(NamedTuple):
    """What a Fenwick operator hands to the next call.

    states [B, H, L, K, V] float32: slot l holds level l as the token at `position` will read it, merges done: slot 0 is
    empty, slot l is live where bit l-1 of position is set, the last slot collects all beyond
    position [B] int32: the tokens that the row's document has so far"""

    states: Float[Array, "B H L K V"]
    position: Int[Array, " B"]


def init_fenwick_state(batch: int, heads: int, levels: int, key_dim: int, value_dim: int) -> FenwickState:
    """The state of documents that have not begun."""
    return FenwickState(jnp.zeros((batch, heads, levels, key_dim, value_dim)), jnp.zeros((batch,), jnp.int32))


def fenwick_level(t: Positions, s: Positions) -> Int[Array, "..."]:
    """The level at which the token at position s reaches the query at position t, in integers.

        level(t, s) = bit_length(t xor s)

    Positions are int32 and broadcast; L levels serve documents of up to 2^(L-1) tokens. Source: arXiv 2506.04761.

    >>> import jax.numpy as jnp
    >>> fenwick_level(6, jnp.arange(7)).tolist()
    [3, 3, 3, 3, 2, 2, 0]
    """
    return 32 - lax.clz(jnp.bitwise_xor(jnp.asarray(t, jnp.int32), jnp.asarray(s, jnp.int32)))


class Fenwick(NamedTuple):
    """What an implementation gets: a clean recurrence (its initial state unused) and what the levels need.

    x: see `Recurrence`; level_weights [B, T, H, L] float32, zero for padding; states [B, H, L, K, V] float32, or None:
    all rows begin at 0; position [B, T] int32 of each token, of padding that of the last real token before it (start -
    1 without one); start [B] the position of the row's first real token; real [B, T] bool or None for all."""

    x: Recurrence
    level_weights: jax.Array
    states: jax.Array | None
    position: jax.Array
    start: jax.Array
    real: jax.Array | None


def states_of(f: Fenwick) -> jax.Array:
    """The states that the rows begin with."""
    if f.states is not None:
        return f.states
    shape = f.x.u.shape[0], f.x.u.shape[2], f.level_weights.shape[3], f.x.k.shape[3], f.x.u.shape[3]
    return jnp.zeros(shape, jnp.float32)


def fenwick(q, k, u, erase, log_decay, level_weights, initial_state, segment_ids) -> Fenwick:
    """Check every argument (ValueError) and return the clean form."""
    if level_weights is None or log_decay is None:
        name = "level_weights" if level_weights is None else "log_decay"
        raise ValueError(f"{name}: None, but a Fenwick operator needs it for every token; pass an array.")
    states, position = (None, None) if initial_state is None else initial_state
    sizes = check_shapes(
        {
            "q": (q, "BTGK"),
            "k": (k, "BTGK"),
            "u": (u, "BTHV"),
            "level_weights": (level_weights, "BTHL"),
            "initial_state.states": (states, "BHLKV"),
            "initial_state.position": (position, "B"),
        }
    )
    check_floating({"level_weights": level_weights, "initial_state.states": states})
    batch, time, levels = sizes["B"], sizes["T"], sizes["L"]
    if levels < 1:
        raise ValueError(f"level_weights: shape {level_weights.shape} has L = 0 levels; give at least one.")
    x = recurrence(q, k, u, erase, log_decay, None, segment_ids)
    if states is None or position is None:
        states, position = None, jnp.zeros((batch,), jnp.int32)
    if not jnp.issubdtype(position.dtype, jnp.integer):
        raise ValueError(f"initial_state.position: dtype {position.dtype} is not an integer type; use int32.")
    start = position.astype(jnp.int32)
    stands = positions(batch, time, segment_ids, start)
    weights, real = level_weights.astype(jnp.float32), None
    if segment_ids is not None:
        real = segment_ids != 0
        weights = mask_padding(real, weights)
        stands = jnp.where(jnp.cumsum(real, axis=1) > 0, stands, start[:, None] - 1)
    return Fenwick(x, weights, None if states is None else states.astype(jnp.float32), stands, start, real)


def meeting_slot(t: jax.Array, s: jax.Array, levels: int) -> jax.Array:
    """The slot of L = levels at which positions meet: what the query at t sees the token at s in, and what all slots
    below merge into when the next position is no longer s but t."""
    return jnp.minimum(fenwick_level(t, s), levels - 1)


def merge(states: jax.Array, depth: jax.Array, more: jax.Array | float = 0.0) -> jax.Array:
    """Slots [B, ..., L, K, V] after those below slot `depth` [B] (0: none) and `more` have been added to it."""
    slots = jnp.arange(states.shape[-3])
    column = (-1,) + (1,) * (states.ndim - 4) + (slots.size, 1, 1)
    below, there = (mask(slots, depth[:, None]).reshape(column) for mask in (jnp.less, jnp.equal))
    moved = more + jnp.sum(jnp.where(below, states, 0.0), axis=-3, keepdims=True)
    return jnp.where(below, 0.0, states) + jnp.where(there, moved, 0.0)


@functools.partial(jax.jit, static_argnums=1)
def fenwick_recurrent(f: Fenwick, _chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """The definition: transition, write, read, merge for the next token. Outputs [B, T, H, V] in the dtype of u and the
    states [B, H, L, K, V] float32.

    With a = exp(g): S'^T q = a (S^T q - e (k . q) S^T k) for every slot, so that a token reads its states once, before
    they change, and then writes them once."""
    x, states = f.x, states_of(f)
    batch, time, key_heads, _ = x.k.shape
    group = (batch, key_heads, x.u.shape[2] // key_heads)
    depth = meeting_slot(f.position + 1, f.position, states.shape[2])
    depth = depth if f.real is None else jnp.where(f.real, depth, 0)

    def step(states, token):
        q, k, u, erase, keep, starts, weights, depth = token
        if starts is not None:  # a select: what another document holds may be NaN
            states = jnp.where(starts.reshape(-1, 1, 1, 1, 1, 1), 0.0, states)
        match = jnp.sum(q * k, -1)[..., None]
        seen = jnp.einsum("bgk,bgrlkv->bgrlv", q, states, precision=PRECISION)
        if erase is not None:
            known = erase[..., None, None] * jnp.einsum("bgk,bgrlkv->bgrlv", k, states, precision=PRECISION)
            seen -= match[..., None, None] * known
            states = states - k[:, :, None, None, :, None] * known[..., None, :]
        o = keep[..., None] * jnp.einsum("bgrl,bgrlv->bgrv", weights, seen, precision=PRECISION)
        o += (match * weights[..., 0])[..., None] * u
        own = (k[:, :, None, :, None] * u[..., None, :])[..., None, :, :]
        return merge(keep[..., None, None, None] * states, depth, own), o

    def tokens(array, *shape):
        return jnp.moveaxis(array.astype(jnp.float32), 1, 0).reshape(time, *shape)

    xs = (
        tokens(x.q, batch, *x.q.shape[2:]),
        tokens(x.k, batch, *x.k.shape[2:]),
        tokens(x.u, *group, x.u.shape[3]),
        None if x.erase is None else tokens(x.erase, *group),
        tokens(jnp.exp(x.log_decay), *group),
        None if x.starts is None else jnp.moveaxis(x.starts, 1, 0),
        tokens(f.level_weights, *group, f.level_weights.shape[3]),
        jnp.moveaxis(depth, 1, 0),
    )
    split, o = lax.scan(step, states.reshape(*group, *states.shape[2:]), xs)
    return jnp.moveaxis(o, 0, 1).reshape(x.u.shape).astype(x.u.dtype), split.reshape(states.shape)
