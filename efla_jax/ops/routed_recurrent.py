"""The routed delta rule token by token, its clean arguments and the state that it carries from call to call."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from efla_jax.ops.arguments import Recurrence, recurrence
from efla_jax.ops.document_chunks import DocumentChunks, document_chunks
from efla_jax.ops.sharded import repeat_key_heads, sharded
from efla_jax.shapes import check_floating, check_shapes

PRECISION = lax.Precision.HIGHEST


class RoutedState(NamedTuple):
    """What the routed delta rule hands to the next call, wherever in a chunk the call ended.

    state [B, H, K, V] float32: now; start [B, H, K, V] float32: where the open chunk began; log_decay [B, H] float32:
    the sum of the open chunk's so far; position [B] int32: tokens that the row's document has so far. With no token in
    the open chunk (position a multiple of the chunk's length) start is state and log_decay 0, whatever is given."""

    state: Float[Array, "B H K V"]
    start: Float[Array, "B H K V"]
    log_decay: Float[Array, "B H"]
    position: Int[Array, " B"]


def init_routed_state(batch: int, heads: int, key_dim: int, value_dim: int) -> RoutedState:
    """The state of documents that have not begun."""
    # Each a buffer of its own: none can be donated twice.
    state, start = (jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32) for _ in range(2))
    return RoutedState(state, start, jnp.zeros((batch, heads), jnp.float32), jnp.zeros((batch,), jnp.int32))


class Routed(NamedTuple):
    """What an implementation gets: a clean recurrence, what its chunks do and which they are.

    x: see `Recurrence`; keep [B, N, H] float32; fade [B, N, H] float32, or None: 1 everywhere; start [B, H, K, V] and
    log_decay [B, H] float32 of the open chunk, or None: every row begins a document; chunks: see `DocumentChunks`."""

    x: Recurrence
    keep: jax.Array
    fade: jax.Array | None
    start: jax.Array | None
    log_decay: jax.Array | None
    chunks: DocumentChunks


def routed(q, k, u, erase, log_decay, keep, initial_state, segment_ids, size: int) -> Routed:
    """Check every argument (ValueError) and return the clean form."""
    state, start, opened, position = (None,) * 4 if initial_state is None else initial_state
    both = getattr(keep, "ndim", 3) == 4
    sizes = check_shapes(
        {
            "u": (u, "BTHV"),
            "k": (k, "BTGK"),
            "keep": (keep[..., 0] if both else keep, "BNH"),
            "initial_state.start": (start, "BHKV"),
            "initial_state.log_decay": (opened, "BH"),
            "initial_state.position": (position, "B"),
        }
    )
    check_floating({"keep": keep, "initial_state.start": start, "initial_state.log_decay": opened})
    batch, time = sizes["B"], sizes["T"]
    if sizes["N"] != -(-time // size) or both and keep.shape[3] != 2:
        raise ValueError(
            f"keep: shape {keep.shape} is not [B, N, H] or [B, N, H, 2] with N = {-(-time // size)}: T={time} tokens"
            f" fill at most ceil(T / chunk_size) chunks of {size}. Give one entry for each, used or not."
        )
    if position is not None and not jnp.issubdtype(position.dtype, jnp.integer):
        raise ValueError(f"initial_state.position: dtype {position.dtype} is not an integer type; use int32.")
    x = recurrence(q, k, u, erase, log_decay, state, segment_ids)
    keep = keep.astype(jnp.float32)
    keep, fade = (keep[..., 0], lax.stop_gradient(keep[..., 1])) if both else (keep, None)
    if position is None or start is None or opened is None:
        return Routed(x, keep, fade, None, None, document_chunks(batch, time, size, segment_ids))
    position = position.astype(jnp.int32)
    empty = position % size == 0
    start = jnp.where(empty[:, None, None, None], x.initial_state, start.astype(jnp.float32))
    opened = jnp.where(empty[:, None], 0.0, opened.astype(jnp.float32))
    return Routed(x, keep, fade, start, opened, document_chunks(batch, time, size, segment_ids, position))


def open_chunk(r: Routed) -> tuple[jax.Array, jax.Array]:
    """Start [B, H, K, V] and log decay [B, H] of the chunks that are open when the call begins."""
    if r.start is None or r.log_decay is None:
        return r.x.initial_state, jnp.zeros(r.x.initial_state.shape[:2], jnp.float32)
    return r.start, r.log_decay


# Of a Routed. A device has whole rows: the letter of their time is one that no mesh axis splits.
LEGENDS = ("BSGK", "BSGK", "BSHV", "BSH", "BSH", "BHKV", "BS", "BNH", "BNH", "BHKV", "BH", *("BS",) * 6)


def routed_over_mesh(run, r: Routed, initial_position: jax.Array | None) -> tuple[jax.Array, RoutedState]:
    """run(r) -> (outputs, state, start, log_decay), on every device with its rows and heads."""
    q, k = repeat_key_heads(r.x.u.shape[2], r.x.q, r.x.k)

    def local(_, *arrays):
        return run(Routed(Recurrence(*arrays[:7]), *arrays[7:11], DocumentChunks(*arrays[11:])))

    arrays = *r.x._replace(q=q, k=k), *r[1:5], *r.chunks
    o, state, start, decay = sharded(local, arrays, LEGENDS, ("BSHV", "BHKV", "BHKV", "BH"))
    real, position = r.chunks.real, r.chunks.position
    before = jnp.zeros(real.shape[:1], jnp.int32) if initial_position is None else initial_position.astype(jnp.int32)
    after = before if real.shape[1] == 0 else jnp.where(jnp.any(real, axis=1), position[:, -1] + 1, before)
    return o, RoutedState(state, start, decay, after)


@functools.partial(jax.jit, static_argnums=(1, 2))
def routed_recurrent(
    r: Routed, _chunk_size: int, own: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The definition: outputs [B, T, H, V] in the dtype of u; the state, where the open chunk began and its log decay,
    in float32. own: outputs read the state, else what the open chunk began with, faded."""
    x, (_, _, _, closes, number, _) = r.x, r.chunks
    batch, time, key_heads, _ = x.k.shape
    group = (batch, key_heads, x.u.shape[2] // key_heads)

    def step(carry, token):
        state, start, opened = carry
        q, k, u, erase, decay, keep, fade, closes, starts = token
        if starts is not None:
            begins = starts[:, None, None]
            state, start = (jnp.where(begins[..., None, None], 0.0, x) for x in (state, start))
            opened = jnp.where(begins, 0.0, opened)
        state = jnp.exp(decay)[..., None, None] * state
        known = jnp.einsum("bgk,bgrkv->bgrv", k, state, precision=PRECISION)
        state = state + k[:, :, None, :, None] * (u - erase[..., None] * known)[..., None, :]
        opened = opened + decay
        read = state if own else jnp.exp(opened)[..., None, None] * start
        o = jnp.einsum("bgk,bgrkv->bgrv", q, read, precision=PRECISION)
        rolled = jnp.exp(opened if fade is None else fade * opened)[..., None, None] * start
        closes = closes[:, None, None]
        state = jnp.where(closes[..., None, None], rolled + keep[..., None, None] * (state - rolled), state)
        start = jnp.where(closes[..., None, None], state, start)
        return (state, start, jnp.where(closes, 0.0, opened)), o

    def tokens(array, *shape):
        return jnp.moveaxis(array.astype(jnp.float32), 1, 0).reshape(time, *shape)

    def entries(array):
        there = jnp.minimum(number, array.shape[1] - 1)[..., None]
        return tokens(jnp.take_along_axis(array, there, axis=1), *group)

    xs = (
        tokens(x.q, batch, *x.q.shape[2:]),
        tokens(x.k, batch, *x.k.shape[2:]),
        tokens(x.u, *group, x.u.shape[3]),
        tokens(x.erase, *group),
        tokens(x.log_decay, *group),
        entries(r.keep),
        None if r.fade is None else entries(r.fade),
        jnp.moveaxis(closes, 1, 0),
        None if x.starts is None else jnp.moveaxis(x.starts, 1, 0),
    )
    shape = x.initial_state.shape
    start, decay = open_chunk(r)
    carry = (*(s.reshape(*group, *shape[2:]) for s in (x.initial_state, start)), decay.reshape(group))
    (state, start, decay), o = lax.scan(step, carry, xs)
    o = jnp.moveaxis(o, 0, 1).reshape(x.u.shape).astype(x.u.dtype)
    return o, state.reshape(shape), start.reshape(shape), decay.reshape(shape[:2])
