"""Causal softmax attention over documents, and the keys and values that it carries from call to call."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from efla_jax.ops.chunked import product
from efla_jax.ops.dispatch import dispatch, missing_kernel, on_gpu
from efla_jax.ops.segments import mask_padding, permute_time, positions, real_first, segments
from efla_jax.ops.sharded import gathered, part, repeat_key_heads, sharded
from efla_jax.shapes import SegmentIds, check_floating, check_heads, check_segment_ids, check_shapes

QUERY_BLOCK = 256  # queries whose scores against every key are alive at once
MASKED = -0.7 * float(np.finfo("float32").max)  # the score of a key not seen; finite, as -inf - -inf is NaN


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


def softmax_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G V"],
    *,
    initial_state: KVCache | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Float[Array, "B T H V"], KVCache]:
    """Softmax attention of every token to itself and to the tokens before it in its document.

        o_t = sum_s p_ts v_s        p_ts = exp(q_t . k_s) / sum_r exp(q_t . k_r)        s, r <= t in the document of t

    q `[B, T, H, K]`, k `[B, T, G, K]`, v `[B, T, G, V]`: query head h reads key and value head h // (H // G). No
    hidden scale: scale q yourself. Scores and softmax in float32, o `[B, T, H, V]` in the dtype of v, zero at
    padding. segment_ids `[B, T]`: 0 is padding, a new id begins a document. initial_state is a `KVCache` whose tokens
    belong to the document of the row's first real token; the state returned has its capacity (T without one) and
    holds the last document's tokens.

    Capacity: a call takes at most as many tokens as the cache has slots (ValueError otherwise). A document that
    outgrows it is a ValueError too where its length is known when the op is called; under `jit` the outputs of the
    tokens that find no slot are NaN.

    Under `jax.set_mesh` with a mesh of `sharding.make_mesh` each device has its rows and heads. Without a cache, a part
    of the time becomes whole rows of a part of the heads (arXiv 2309.14509), or where these do not divide, all keys.

    implementation: "chunked" (XLA, a block of queries at a time), "auto" (on a GPU cuDNN, where that supports the
    input, then kernels that a GPU has timed, then "chunked"), "pallas" (Hopper GPUs; NotImplementedError with the
    reason for what its kernels do not cover), "triton" (no kernel yet). Raises ValueError for input that does not fit.
    Source: arXiv 1706.03762; grouped queries: arXiv 2305.13245.

    >>> import jax.numpy as jnp
    >>> q, v = jnp.zeros((1, 3, 2, 4)), jnp.array([3.0, 5.0, 1.0]).reshape(1, 3, 1, 1)
    >>> o, state = softmax_attention(q, q[:, :, :1], v)        # a zero query averages what it sees
    >>> o[0, :, 0, 0].tolist(), state.k.shape, state.length.tolist()
    ([3.0, 4.0, 3.0], (1, 3, 1, 4), [3])
    """
    check_arguments(q, k, v, initial_state, segment_ids)
    batch, time = k.shape[:2]
    if time == 0:
        state = KVCache(k, v, jnp.zeros((batch,), jnp.int32)) if initial_state is None else initial_state
        return jnp.zeros((*q.shape[:3], v.shape[-1]), v.dtype), state
    document = None
    if segment_ids is not None:
        real, _, document = segments(segment_ids)
        document = jnp.where(real, document, -1)
        q, k, v = (mask_padding(real, x) for x in (q, k, v))
    if initial_state is None:
        o, state = over_mesh(implementation, q, k, v, document, None), collected(k, v, document)
    else:
        slot = positions(batch, time, segment_ids, initial_state.length)
        check_capacity(initial_state, slot, document)
        state = extended(initial_state, k, v, document, slot)
        if time == 1:
            o = one_token(implementation, q, state, slot, document).astype(v.dtype)
        else:
            o = over_mesh(implementation, q, k, v, document, initial_state)
        # NaN of numpy: jax_debug_nans would stop at an array of jax, used or not
        o = jnp.where((slot < state.k.shape[1])[..., None, None], o, np.asarray(np.nan, v.dtype))
    return o if document is None else mask_padding(real, o), state


def check_arguments(q, k, v, cache, segment_ids) -> None:
    """Raise ValueError unless shapes and dtypes fit each other."""
    legends = {"q": (q, "BTHK"), "k": (k, "BTGK"), "v": (v, "BTGV")}
    if cache is not None:
        legends |= {"initial_state.k": (cache.k, "BMGK"), "initial_state.v": (cache.v, "BMGV")}
        legends["initial_state.length"] = (cache.length, "B")
    sizes = check_shapes(legends)
    check_floating({name: array for name, (array, _) in legends.items() if name != "initial_state.length"})
    check_heads(sizes["G"], sizes["H"])
    check_segment_ids(segment_ids, sizes["B"], sizes["T"])
    if cache is None:
        return
    if cache.length.dtype != jnp.int32:
        raise ValueError(f"initial_state.length: dtype {cache.length.dtype} is not int32; begin with init_kv_cache().")
    if sizes["T"] > sizes["M"]:
        raise ValueError(
            f"initial_state: capacity {sizes['M']} is less than the {sizes['T']} tokens of this call. Make the cache"
            " larger (a mixer's max_length), or give the tokens in several calls if their documents fit."
        )


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


def over_mesh(implementation: str, q, k, v, document: jax.Array | None, cache: KVCache | None) -> jax.Array:
    """Outputs [B, T, H, V]: every device has its rows and heads, of a part of the time whole rows of few heads. With a
    cache it has all queries, as they are few."""
    library = implementation == "auto" and on_gpu()
    # Several tokens behind a cache are a kernel that no GPU has run yet.
    kernels = ("cudnn", "pallas") if cache is None else ()
    table, auto = ({"cudnn": cudnn, **TABLE}, (*kernels, *AUTO)) if library else (TABLE, AUTO)

    def local(context, q, k, v, document, *cached):
        if context and (whole := whole_rows(context, q, k, v)):
            document = None if document is None else gathered(document, context)
            o = dispatch("softmax_attention", implementation, table, auto, (*whole, document, None, 0))
            return lax.all_to_all(o, context, 1, 2, tiled=True)
        start = part(context) * q.shape[1]
        k, v, document = (x if x is None else gathered(x, context) for x in (k, v, document))
        arguments = q, k, v, document, KVCache(*cached) if cached else None, start
        return dispatch("softmax_attention", implementation, table, auto, arguments)

    if cache is None:
        k, v = repeat_key_heads(q.shape[2], k, v)
        return sharded(local, (q, k, v, document), ("BTHK", "BTGK", "BTGV", "BT"), "BTHV")
    legends = ("BQHK", "BQGK", "BQGV", "BQ", "BMGK", "BMGV", "B")
    return sharded(local, (q, k, v, document, *cache), legends, "BQHV")


def one_token(implementation: str, q, state: KVCache, slot: jax.Array, document: jax.Array | None) -> jax.Array:
    """Outputs [B, 1, H, V] of tokens at their slots [B, 1] of the cache, which has them already: the other way round
    XLA copies the cache."""
    limit = slot[:, 0] + 1 if document is None else jnp.where(document[:, 0] < 0, 0, slot[:, 0] + 1)

    def local(_, *arrays):
        return dispatch(
            "softmax_attention", implementation, STEP_TABLE, ("pallas", *AUTO) if on_gpu() else AUTO, arrays
        )

    return sharded(local, (q, state.k, state.v, limit), ("BQHK", "BMGK", "BMGV", "B"), "BQHV")


def latest(q, k, v, limit) -> jax.Array:
    """Outputs [B, 1, H, V] in the dtype of v of one query a row that sees the first `limit` [B] slots of k [B, M, G,
    K], v [B, M, G, V]."""
    (batch, _, heads, key_dim), key_heads = q.shape, k.shape[2]
    groups = q.reshape(batch, key_heads, heads // key_heads, key_dim)
    seen = jnp.arange(k.shape[1]) < limit[:, None]
    scores = jnp.where(seen[:, None, None], product("bgrk,bmgk->bgrm", groups, k), MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return product("bgrm,bmgv->bgrv", weights, v).reshape(batch, 1, heads, v.shape[3]).astype(v.dtype)


def whole_rows(context: str, *arrays: jax.Array) -> tuple[jax.Array, ...] | None:
    """q, k, v of the whole time and of a part of the heads, from those of a part of the time; None where the devices do
    not divide the heads. They share the pairs of queries and keys evenly so, and a causal kernel serves them."""
    count, heads, key_heads = lax.axis_size(context), arrays[0].shape[2], arrays[1].shape[2]
    repeats = count // math.gcd(key_heads, count)
    if heads % (key_heads * repeats):
        return None
    wide = (x if i == 0 else jnp.repeat(x, repeats, axis=2) for i, x in enumerate(arrays))
    return tuple(lax.all_to_all(x, context, 2, 1, tiled=True) for x in wide)


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


def cudnn(q, k, v, document: jax.Array | None, cache: KVCache | None, _start=0) -> jax.Array:
    """The fused attention of cuDNN: one document per row, all real, nothing cached, a query for every key."""
    if q.shape[1] != k.shape[1]:
        raise NotImplementedError("cuDNN: queries of the whole sequence only, not of a part of it.")
    if cache is not None or document is not None:
        raise NotImplementedError("cuDNN: only whole documents, without a cache and without segment_ids.")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"cuDNN: one 16-bit dtype for q, k and v, not {q.dtype}, {k.dtype}, {v.dtype}.")
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    if key_dim != value_dim or key_dim % 8 or key_dim > 128:
        raise NotImplementedError(f"cuDNN: K = V <= 128, a multiple of 8; here K={key_dim}, V={value_dim}.")
    try:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=1.0, implementation="cudnn")
    except (RuntimeError, ValueError) as reason:  # no cuDNN, or a version or a device that it does not serve
        raise NotImplementedError(f"cuDNN: {reason}") from reason


def by_kernels(*arguments) -> jax.Array:
    """`chunked` by GPU kernels."""
    from efla_jax.ops.pallas_attention import softmax

    return softmax(*arguments)


def by_step(*arguments) -> jax.Array:
    """`latest` by a GPU kernel."""
    from efla_jax.ops.pallas_attention_cache import latest

    return latest(*arguments)


TABLE = {
    "chunked": chunked,
    "pallas": by_kernels,
    "triton": missing_kernel("softmax_attention"),
}
AUTO = ("chunked",)
STEP_TABLE = {"chunked": latest, "pallas": by_step, "triton": TABLE["triton"]}
