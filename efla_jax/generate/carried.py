"""A cache as the carry of a loop over tokens, in which a token moves nothing that it does not change.

A mixer's cache shifts the inputs of its convolutions, and says again how long each row's document is and which one.
XLA can write none of it in place: for three convolutions a layer that is three programs and three copies a token, and
up to four for the numbers. Here the inputs of all convolutions of a mixer are one ring, in which a token takes the
place of the oldest; document and length are those before the first token, as tokens without ids begin no other. What
the mixers see is the same.
"""

import itertools
from collections.abc import Callable

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


def has_ring(part) -> bool:
    """Are the inputs of this mixer's convolutions one ring of the carry?"""
    if not isinstance(part, RECURRENT):
        return False
    kinds = {(inputs.shape[:-1], inputs.dtype) for inputs in part.conv}
    return len(kinds) == 1 and part.conv[0].shape[-2] > 0


def counting(change: Callable, part, *others):
    """The cache with change(count, those of others) for each count of a document's tokens."""

    def one(state, *same):
        field = COUNTS.get(type(state))
        return state._replace(**{field: change(*(getattr(x, field) for x in (state, *same)))}) if field else state

    return jax.tree.map(one, part, *others, is_leaf=lambda x: type(x) in COUNTS)


def carried(cache: tuple) -> tuple:
    """The carry of a loop before its first token: `conv` is one array [..., W - 1, channels of all], oldest first."""
    return tuple(
        part._replace(conv=(jnp.concatenate(part.conv, axis=-1),)) if has_ring(part) else part for part in cache
    )


def in_order(carry: tuple, like: tuple, count: jax.Array) -> tuple:
    """The cache that mixers know, from the carry after `count` tokens; like: what `carried` was given."""

    def one(part, own):
        if isinstance(part, CACHES):  # a row that had read nothing has begun a document, see `layers.cache.continues`
            part = part._replace(segment=jnp.where((part.segment == 0) & (count > 0), 1, part.segment))
            part = counting(lambda before: before + count, part)
        if not has_ring(own):
            return part
        ring = part.conv[0]
        places = (count + jnp.arange(ring.shape[-2])) % ring.shape[-2]
        ends = itertools.accumulate(inputs.shape[-1] for inputs in own.conv)
        inputs = jnp.split(jnp.take(ring, places, axis=-2, mode="clip"), list(ends)[:-1], axis=-1)
        return part._replace(conv=tuple(inputs))

    return tuple(one(part, own) for part, own in zip(carry, like, strict=True))


def written(carry: tuple, after: tuple, count: jax.Array) -> tuple:
    """The carry after one more token than `count`, of which `after` is the cache."""

    def one(part, new):
        if has_ring(new):
            ring = part.conv[0]
            # In the mixer's own shape XLA sees that this is the token's input, and reads it where the product wrote it.
            newest = [inputs.reshape(-1, *inputs.shape[-2:])[:, -1:] for inputs in new.conv]
            newest = jnp.concatenate(newest, axis=-1).reshape(*ring.shape[:-2], 1, ring.shape[-1])
            new = new._replace(conv=(lax.dynamic_update_slice_in_dim(ring, newest, count % ring.shape[-2], axis=-2),))
        if isinstance(new, CACHES):
            new = counting(lambda _, before: before, new._replace(segment=part.segment), part)
        return new

    return tuple(one(part, new) for part, new in zip(carry, after, strict=True))
