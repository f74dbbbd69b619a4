"""A cache as the carry of a loop over tokens, in which a token moves nothing that it does not change.

A mixer's cache shifts the inputs of its convolutions, and says again how long each row's document is and which one.
XLA can write none of it in place: for three convolutions a layer that is three programs and three copies a token, and
up to four for the numbers. Here the inputs of the convolutions of all layers are one ring, in which a token takes the
place of the oldest, by one program; document and length are those before the first token, as tokens without ids begin
no other. What the mixers see is the same.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.layers.attention import AttentionCache
from efla_jax.layers.cache import RecurrentCache
from efla_jax.layers.nats_l import NATSLCache
from efla_jax.ops import FenwickState, KVCache, RoutedState, SelectedKV

RECURRENT = RecurrentCache | NATSLCache
CACHES = RECURRENT | AttentionCache
COUNTS = {FenwickState: "position", KVCache: "length", RoutedState: "position", SelectedKV: "position"}  # of tokens


class Carry(NamedTuple):
    """parts: the caches of the mixers, without the inputs of convolutions that are in rings. rings: of every kind one
    [layers, B, W - 1, channels], of all mixers in turn; channels: of all convolutions of a mixer, side by side."""

    parts: tuple
    rings: dict[tuple, jax.Array]


def kind(part) -> tuple | None:
    """(B, W - 1, channels, dtype) of the ring with the inputs of this mixer's convolutions; None: there is none."""
    if not isinstance(part, RECURRENT) or len({(inputs.shape[:-1], inputs.dtype) for inputs in part.conv}) != 1:
        return None
    if part.conv[0].ndim != 4:  # of a mixer of one's own that keeps the last input alone
        return None
    _, batch, size, _ = part.conv[0].shape
    return (batch, size, sum(inputs.shape[-1] for inputs in part.conv), str(part.conv[0].dtype)) if size else None


def beside(parts: tuple, inputs: Callable) -> dict[tuple, jax.Array]:
    """For every kind of ring, inputs [layers, B, n, channels of a convolution] of the mixers that have it."""
    rings: dict[tuple, list[jax.Array]] = {}
    for part in parts:
        if (its := kind(part)) is not None:
            rings.setdefault(its, []).append(jnp.concatenate([inputs(x) for x in part.conv], axis=-1))
    return {its: jnp.concatenate(some) for its, some in rings.items()}


def counting(change: Callable, part, *others):
    """The cache with change(count, those of others) for each count of a document's tokens."""

    def one(state, *same):
        field = COUNTS.get(type(state))
        return state._replace(**{field: change(*(getattr(x, field) for x in (state, *same)))}) if field else state

    return jax.tree.map(one, part, *others, is_leaf=lambda x: type(x) in COUNTS)


def carried(cache: tuple) -> Carry:
    """The carry of a loop before its first token: rings begin with the oldest input."""
    parts = tuple(part._replace(conv=()) if kind(part) else part for part in cache)
    return Carry(parts, beside(cache, lambda inputs: inputs))


def in_order(carry: Carry, like: tuple, count: jax.Array) -> tuple:
    """The cache that mixers know, from the carry after `count` tokens; like: what `carried` was given."""
    before = dict.fromkeys(carry.rings, 0)

    def one(part, own):
        if isinstance(part, CACHES):  # a row that had read nothing has begun a document, see `layers.cache.continues`
            part = part._replace(segment=jnp.where((part.segment == 0) & (count > 0), 1, part.segment))
            part = counting(lambda tokens: tokens + count, part)
        if (its := kind(own)) is None:
            return part
        first, size = before[its], its[1]
        before[its] += len(own.conv[0])
        places = (count + jnp.arange(size)) % size
        inputs = jnp.take(carry.rings[its][first : before[its]], places, axis=-2, mode="clip")
        ends = itertools.accumulate(x.shape[-1] for x in own.conv)
        return part._replace(conv=tuple(jnp.split(inputs, list(ends)[:-1], axis=-1)))

    return tuple(one(part, own) for part, own in zip(carry.parts, like, strict=True))


def written(carry: Carry, after: tuple, count: jax.Array) -> Carry:
    """The carry after one more token than `count`, of which `after` is the cache."""

    def newest(inputs):  # in the mixer's own shape XLA sees that this is the token's input, which a product wrote
        layers, batch, _, channels = inputs.shape
        return inputs.reshape(-1, *inputs.shape[2:])[:, -1:].reshape(layers, batch, 1, channels)

    def one(part, new):
        if not isinstance(new, CACHES):
            return new
        new = new._replace(segment=part.segment, **({"conv": ()} if kind(new) else {}))
        return counting(lambda _, tokens: tokens, new, part)

    new = beside(after, newest)
    rings = {
        its: lax.dynamic_update_slice_in_dim(ring, new[its], count % its[1], axis=-2)
        for its, ring in carry.rings.items()
    }
    return Carry(tuple(one(part, new) for part, new in zip(carry.parts, after, strict=True)), rings)
