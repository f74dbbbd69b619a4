"""Softmax attention by XLA: a block of queries at a time against all keys, and one query a row against a cache."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from efla_jax.ops.chunked import product
from efla_jax.ops.kv_cache import KVCache

QUERY_BLOCK = 256  # queries whose scores against every key are alive at once
MASKED = -0.7 * float(np.finfo("float32").max)  # the score of a key not seen; finite, as -inf - -inf is NaN


# Below, `document` [B, T] numbers the documents of the call: 0 goes on with the cache, -1 is padding. None: all 0.


def attend(q, document_q, time_q, k, v, document, cache: KVCache | None) -> jax.Array:
    """Outputs [B, C, H, V] float32 of C queries at times time_q [C], of documents [B or 1, C]."""
    (batch, queries, heads, key_dim), (time, key_heads) = q.shape, k.shape[1:3]
    q = q.reshape(batch, queries, key_heads, heads // key_heads, key_dim)
    seen = (document_q[:, :, None] == document[:, None, :]) & (time_q[:, None] >= jnp.arange(time))
    scores = jnp.where(seen[:, None, None], product("bcgrk,bsgk->bgrcs", q, k), MASKED)
    if cache is not None:
        # Scores are joined, never keys: those would be copied, cache and all, for every decoded token.
        seen = (document_q == 0)[:, :, None] & (jnp.arange(cache.k.shape[1]) < cache.length[:, None])[:, None, :]
        before = jnp.where(seen[:, None, None], product("bcgrk,bmgk->bgrcm", q, cache.k), MASKED)
        scores = jnp.concatenate([before, scores], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    o = product("bgrcs,bsgv->bcgrv", weights[..., -time:], v)
    if cache is not None:
        o = o + product("bgrcm,bmgv->bcgrv", weights[..., :-time], cache.v)
    return o.reshape(batch, queries, heads, v.shape[-1])


def chunked(q, k, v, document: jax.Array | None, cache: KVCache | None, start: jax.Array | int) -> jax.Array:
    """A block of queries at a time against all keys, recomputed in the backward: memory O(T), not O(T^2). The queries
    are those of the tokens from `start` on."""
    time = q.shape[1]
    document = jnp.zeros((1, k.shape[1]), jnp.int32) if document is None else document
    document_q = lax.dynamic_slice_in_dim(document, start, time, axis=1)
    if time <= QUERY_BLOCK:
        return attend(q, document_q, start + jnp.arange(time), k, v, document, cache).astype(v.dtype)
    blocks = -(-time // QUERY_BLOCK)

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, blocks * QUERY_BLOCK - time)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], blocks, QUERY_BLOCK, *x.shape[2:]), 1, 0)

    # float32 outside, the given dtype inside: the gradients of keys and values are summed over the blocks in float32.
    given = (k, v, cache)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, given)

    @jax.checkpoint
    def block(queries):
        k, v, cache = jax.tree.map(lambda x, y: x.astype(y.dtype), wide, given)
        return attend(*queries, k, v, document, cache).astype(v.dtype)

    time_q = start + jnp.arange(blocks * QUERY_BLOCK).reshape(blocks, QUERY_BLOCK)
    o = lax.map(block, (split(q), split(document_q), time_q))
    return jnp.moveaxis(o, 0, 1).reshape(q.shape[0], blocks * QUERY_BLOCK, *o.shape[3:])[:, :time]


def latest(q, k, v, limit) -> jax.Array:
    """Outputs [B, 1, H, V] in the dtype of v of one query a row that sees the first `limit` [B] slots of k [B, M, G,
    K], v [B, M, G, V]."""
    (batch, _, heads, key_dim), key_heads = q.shape, k.shape[2]
    groups = q.reshape(batch, key_heads, heads // key_heads, key_dim)
    seen = jnp.arange(k.shape[1]) < limit[:, None]
    scores = jnp.where(seen[:, None, None], product("bgrk,bmgk->bgrm", groups, k), MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return product("bgrm,bmgv->bgrv", weights, v).reshape(batch, 1, heads, v.shape[3]).astype(v.dtype)
