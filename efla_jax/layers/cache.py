"""What a mixer carries from call to call, and the rule that decides whether it still counts: does the document go on?

A cache is an immutable pytree whose leaves begin with the batch axis; structure, shapes and dtypes never change, so
that it can be the carry of `lax.scan`. It remembers the id of each row's last real token (0: nothing seen yet).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from efla_jax.layers.fields import check_width
from efla_jax.ops import FenwickState
from efla_jax.ops.segments import mask_padding
from efla_jax.shapes import SegmentIds, State, check_segment_ids


class RecurrentCache(NamedTuple):
    """The cache of a recurrent mixer.

    conv     one [B, W-1, D] per convolution: the last W-1 real inputs of the document, oldest first
    state    [B, H, K, V] float32, or a FenwickState
    segment  [B] int32, id of the row's last real token; 0 before the first
    """

    conv: tuple[Array, ...]
    state: State | FenwickState
    segment: Int[Array, " B"]


def fresh_cache(
    batch: int, conv_width: int, channels: tuple[int, ...], state: State | FenwickState, dtype: DTypeLike
) -> RecurrentCache:
    """The cache of rows that have seen nothing: one convolution per entry of `channels` (none when conv_width is 0)."""
    conv = tuple(jnp.zeros((batch, conv_width - 1, size), dtype) for size in channels if conv_width)
    return RecurrentCache(conv, state, jnp.zeros((batch,), jnp.int32))


def continues(
    segment: Int[Array, " B"], segment_ids: SegmentIds | None, time: int
) -> tuple[Bool[Array, " B"], Int[Array, " B"]]:
    """(keep, segment) [B]: do these `time` tokens go on with the cached document, and the last real id after them.

    keep is False where the first real id of the call differs from a remembered one: that row's state belongs to another
    document. A row that has seen nothing keeps what it has (an initial state), and so does a row without a real token
    in this call. Without ids every token goes on with the cached document; a fresh row then gets id 1."""
    if time == 0:
        return jnp.ones(segment.shape, bool), segment
    if segment_ids is None:
        return jnp.ones(segment.shape, bool), jnp.where(segment == 0, 1, segment)
    segment_ids = jnp.asarray(segment_ids)  # an array of numpy could not be indexed by traced ones
    real = segment_ids != 0
    found = jnp.any(real, axis=1)
    rows = jnp.arange(segment_ids.shape[0])
    first = segment_ids[rows, jnp.argmax(real, axis=1)]
    last = segment_ids[rows, -1 - jnp.argmax(real[:, ::-1], axis=1)]
    keep = ~found | (segment == 0) | (first == segment)
    return keep, jnp.where(found, last, segment).astype(segment.dtype)


def carry_on(keep: Bool[Array, " B"], cached):
    """The pytree `cached` (leaves [B, ...]) with zeros, its fresh value, in the rows whose document has ended."""
    return jax.tree.map(
        lambda x: jnp.where(keep.reshape(keep.shape + (1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype)), cached
    )


def check_call(mixer, x: jax.Array, segment_ids: SegmentIds | None, cache, kind: Any = RecurrentCache) -> None:
    """Raise ValueError unless x is [B, T, width], segment_ids None or [B, T], and cache None or a `kind`, or what else
    the mixer begins with, of B rows."""
    check_width(x, mixer.width)
    check_segment_ids(segment_ids, *x.shape[:2])
    if cache is None:
        return
    if not isinstance(cache, kind):
        kind = type(jax.eval_shape(functools.partial(mixer.init_cache, 1)))
    if not isinstance(cache, kind):
        raise ValueError(
            f"cache: a {type(cache).__name__}, but {type(mixer).__name__} carries a {kind.__name__} from call to call;"
            " pass what its last call returned, or None for a fresh one."
        )
    if cache.segment.shape != x.shape[:1]:
        raise ValueError(
            f"cache: of {len(cache.segment)} rows, but x has {x.shape[0]}; a row goes on with its own. Take the cache's"
            f" rows that x has, or begin with init_cache({x.shape[0]})."
        )


def begin(mixer, x: jax.Array, segment_ids: SegmentIds | None, cache) -> tuple[jax.Array, Any, Any, Int[Array, " B"]]:
    """What a call of a recurrent mixer begins with: x [B, T, D] with zeros at padding, the convolutions' inputs and the
    state where the document goes on (none and None without a cache), and the id of each row's last real token after
    it."""
    check_call(mixer, x, segment_ids, cache)
    if segment_ids is not None:
        x = mask_padding(segment_ids != 0, x)
    # Without inputs and a state an operator knows that its rows begin, which may be cheaper.
    cache = mixer.init_cache(x.shape[0])._replace(conv=(), state=None) if cache is None else cache
    keep, segment = continues(cache.segment, segment_ids, x.shape[1])
    return x, *carry_on(keep, (cache.conv, cache.state)), segment
