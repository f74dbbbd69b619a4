"""Causal softmax attention over documents."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from efla_jax.ops import pallas_attention, pallas_attention_cache
from efla_jax.ops.attention_blocks import chunked, latest
from efla_jax.ops.dispatch import check_implementation, dispatch, missing_kernel, on_gpu
from efla_jax.ops.kv_cache import KVCache, check_capacity, collected, extended
from efla_jax.ops.segments import mask_padding, positions, segments
from efla_jax.ops.sharded import gathered, part, repeat_key_heads, sharded
from efla_jax.shapes import SegmentIds, check_floating, check_heads, check_segment_ids, check_shapes


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
    check_arguments(q, k, v, initial_state, segment_ids, implementation)
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


def check_arguments(q, k, v, cache, segment_ids, implementation: str) -> None:
    """Raise ValueError unless shapes and dtypes fit each other, and for an unknown implementation."""
    check_implementation("softmax_attention", implementation, TABLE)
    legends = {"q": (q, "BTHK"), "k": (k, "BTGK"), "v": (v, "BTGV")}
    if cache is not None:
        if not isinstance(cache, KVCache):
            raise ValueError(f"initial_state: a {type(cache).__name__} is no KVCache; begin with init_kv_cache().")
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


def over_mesh(implementation: str, q, k, v, document: jax.Array | None, cache: KVCache | None) -> jax.Array:
    """Outputs [B, T, H, V]: every device has its rows and heads, of a part of the time whole rows of few heads. With a
    cache it has all queries, as they are few."""
    library = implementation == "auto" and on_gpu()
    table, auto = ({"cudnn": cudnn, **TABLE}, ("cudnn", "pallas", *AUTO)) if library else (TABLE, AUTO)

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


def whole_rows(context: str, *arrays: jax.Array) -> tuple[jax.Array, ...] | None:
    """q, k, v of the whole time and of a part of the heads, from those of a part of the time; None where the devices do
    not divide the heads. They share the pairs of queries and keys evenly so, and a causal kernel serves them."""
    count, heads, key_heads = lax.axis_size(context), arrays[0].shape[2], arrays[1].shape[2]
    repeats = count // math.gcd(key_heads, count)
    if heads % (key_heads * repeats):
        return None
    wide = (x if i == 0 else jnp.repeat(x, repeats, axis=2) for i, x in enumerate(arrays))
    return tuple(lax.all_to_all(x, context, 2, 1, tiled=True) for x in wide)


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


def by_kernels(q, k, v, document: jax.Array | None, cache: KVCache | None, start=0) -> jax.Array:
    """`chunked` by GPU kernels."""
    if cache is None:
        return pallas_attention.softmax(q, k, v, document, start)
    return pallas_attention_cache.softmax(q, k, v, document, cache, start)


def by_step(*arguments) -> jax.Array:
    """`latest` by a GPU kernel."""
    return pallas_attention_cache.latest(*arguments)


TABLE = {
    "chunked": chunked,
    "pallas": by_kernels,
    "triton": missing_kernel("softmax_attention"),
}
AUTO = ("chunked",)
STEP_TABLE = {"chunked": latest, "pallas": by_step, "triton": TABLE["triton"]}
