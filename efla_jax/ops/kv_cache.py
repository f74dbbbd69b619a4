"""The keys and values that softmax attention carries from call to call."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from efla_jax.ops.segments import mask_padding, permute_time, real_first


class KVCache(NamedTuple):
    """Keys and values of each row's current document, in slots 0 .. length - 1 of a fixed capacity M.

    k [B, M, G, K], v [B, M, G, V]: zeros from slot `length` on; length [B] int32: tokens of the document so far. A
    length above M says that the document outgrew the capacity: what it lost cannot be had back, its further outputs
    are NaN."""

    k: Float[Array, "B M G K"]
    v: Float[Array, "B M G V"]
    length: Int[Array, " B"]


def init_kv_cache(
    batch: int, capacity: int, num_key_heads: int, key_dim: int, value_dim: int, dtype: jax.typing.DTypeLike = "float32"
) -> KVCache:
    """An empty cache for `batch` rows whose documents have at most `capacity` tokens.

    >>> init_kv_cache(2, 16, num_key_heads=1, key_dim=4, value_dim=5).v.shape
    (2, 16, 1, 5)
    """
    slots = (batch, capacity, num_key_heads)
    k, v = (jnp.zeros((*slots, dim), dtype) for dim in (key_dim, value_dim))
    return KVCache(k, v, jnp.zeros((batch,), jnp.int32))


# Below, `document` [B, T] numbers the documents of the call: 0 goes on with the cache, -1 is padding. None: all 0.


def check_capacity(cache: KVCache, slot: jax.Array, document: jax.Array | None) -> None:
    """Raise ValueError where a real token finds no slot; says nothing while traced, when lengths are not known."""
    capacity = cache.k.shape[1]
    longest = jnp.max(slot if document is None else jnp.where(document < 0, -1, slot), initial=-1) + 1
    if not isinstance(longest, jax.core.Tracer) and longest > capacity:
        raise ValueError(
            f"initial_state: capacity {capacity}, but with this call a document grows to {longest} tokens (lengths"
            f" before: {cache.length.tolist()}). Make the cache larger: capacity={longest} (a mixer's max_length)."
        )


def last_document(document: jax.Array) -> jax.Array:
    """[B, 1]: the row's last document; 0 if it has no real token."""
    return jnp.maximum(jnp.max(document, axis=1, keepdims=True), 0)


def collected(k: jax.Array, v: jax.Array, document: jax.Array | None) -> KVCache:
    """The last document's tokens of k, v [B, T, G, ...], moved to the front of as many slots."""
    if document is None:
        return KVCache(k, v, jnp.full(k.shape[:1], k.shape[1], jnp.int32))
    own = document == last_document(document)
    order, inverse = real_first(own)
    k, v = (permute_time(mask_padding(own, x), order, inverse) for x in (k, v))
    return KVCache(k, v, jnp.sum(own, axis=1, dtype=jnp.int32))


def extended(cache: KVCache, k, v, document: jax.Array | None, slot: jax.Array) -> KVCache:
    """The cache after the call, where `slot` [B, T] is each token's position in its document."""
    capacity, length = cache.k.shape[1], cache.length
    own, added = slot < capacity, k.shape[1]
    if document is not None:
        last = last_document(document)
        length = jnp.where(last[:, 0] == 0, length, 0)
        live = jnp.arange(capacity) < length[:, None]
        cache = cache._replace(k=mask_padding(live, cache.k), v=mask_padding(live, cache.v))
        own, added = own & (document == last), jnp.sum(document == last, axis=1, dtype=jnp.int32)
    # The others get indices of their own beyond the end, which a scatter drops: unique indices, the simpler gradient.
    index = jnp.where(own, slot, capacity + jnp.arange(slot.shape[1]))
    rows = jnp.arange(slot.shape[0])[:, None]

    def put(slots, new):
        return slots.at[rows, index].set(new.astype(slots.dtype), mode="drop", unique_indices=True)

    return KVCache(put(cache.k, k), put(cache.v, v), length + added)
