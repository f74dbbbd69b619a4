"""Softmax attention with rotary positions: the baseline, and the other half of hybrid models."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from efla_jax.layers.cache import check_call, continues
from efla_jax.layers.fields import check_dtype, head_width
from efla_jax.layers.projections import dense
from efla_jax.ops import KVCache, apply_rope, init_kv_cache, softmax_attention
from efla_jax.ops.segments import mask_padding, positions
from efla_jax.shapes import SegmentIds, check_heads


class AttentionCache(NamedTuple):
    """kv: keys (rotated) and values of each row's document; segment [B] int32: id of its last real token, or 0."""

    kv: KVCache
    segment: Int[Array, " B"]


class Attention(nn.Module):
    """o_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s over the document up to t, with grouped queries.

    num_kv_heads  G heads of keys and values, must divide num_heads; None: num_heads
    head_dim      K; None: width / num_heads
    rope_base     of the rotary positions, which count each document's real tokens; 0: no positions
    qk_norm       RMSNorm of every query and key head, before the rotation
    max_length    tokens of a document that a fresh cache has room for; after a first call of so many or more, room for
                  max_length others. Documents that outgrow it: see `ops.softmax_attention`
    kernel_init   see `kernel_initializer`
    dtype         of the products and the cache; parameters, scores and softmax are float32
    """

    width: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_base: float = 10000.0
    qk_norm: bool = False
    max_length: int = 2048
    kernel_init: str = "lecun"
    init_std: float = 0.02
    norm_eps: float = 1e-6
    implementation: str = "auto"
    dtype: DTypeLike = "float32"

    def __post_init__(self):
        _, _, head_dim = self.sizes()
        if self.rope_base < 0 or (self.rope_base and head_dim % 2):
            raise ValueError(
                f"rope_base: {self.rope_base} with head_dim={head_dim}, but it must be positive and head_dim even, as"
                " channels turn in pairs. Change one of them, or set rope_base=0.0 for no positions."
            )
        if self.max_length < 1:
            raise ValueError(f"max_length: {self.max_length} is no room for a token; set the length of a document.")
        check_dtype(self.dtype)
        super().__post_init__()

    @nn.nowrap
    def sizes(self) -> tuple[int, int, int]:
        """(G, H, K). Raises ValueError for fields that do not fit together."""
        key_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        head_dim = head_width(self.width, self.num_heads, self.head_dim)
        check_heads(key_heads, self.num_heads)
        return key_heads, self.num_heads, head_dim

    @nn.nowrap
    def init_cache(self, batch_size: int, max_length: int | None = None) -> AttentionCache:
        """The cache of `batch_size` rows that have seen nothing, for documents of up to max_length tokens."""
        key_heads, _, head_dim = self.sizes()
        capacity = self.max_length if max_length is None else max_length
        kv = init_kv_cache(batch_size, capacity, key_heads, head_dim, head_dim, self.dtype)
        return AttentionCache(kv, jnp.zeros((batch_size,), jnp.int32))

    @nn.nowrap
    def operator_flops(self, length: int) -> float:
        """Of scores and weighted values per token, mean over a document of `length`: 4 K a head and key, of which a
        token sees length / 2 (the causal half; published counts of the full square are twice as high)."""
        _, heads, head_dim = self.sizes()
        return 4.0 * heads * head_dim * length / 2

    @nn.compact
    def __call__(
        self, x: jax.Array, segment_ids: SegmentIds | None = None, cache: AttentionCache | None = None
    ) -> tuple[jax.Array, AttentionCache]:
        """x [B, T, width] -> y [B, T, width] in `dtype` and the cache after each row's last real token; any T >= 0."""
        check_call(self, x, segment_ids, cache, AttentionCache)
        key_heads, heads, head_dim = self.sizes()
        batch, time = x.shape[:2]
        if segment_ids is not None:
            x = mask_padding(segment_ids != 0, x)
        seen = jnp.zeros((batch,), jnp.int32) if cache is None else cache.segment
        keep, segment = continues(seen, segment_ids, time)
        kv = None if cache is None else cache.kv._replace(length=jnp.where(keep, cache.kv.length, 0))

        q = dense(self, "q_proj", heads * head_dim)(x).reshape(batch, time, heads, head_dim)
        k = dense(self, "k_proj", key_heads * head_dim)(x).reshape(batch, time, key_heads, head_dim)
        v = dense(self, "v_proj", key_heads * head_dim)(x).reshape(batch, time, key_heads, head_dim)
        if self.qk_norm:
            q = nn.RMSNorm(epsilon=self.norm_eps, dtype=self.dtype, name="q_norm")(q)
            k = nn.RMSNorm(epsilon=self.norm_eps, dtype=self.dtype, name="k_norm")(k)
        if self.rope_base:
            at = positions(batch, time, segment_ids, None if kv is None else kv.length)
            q, k = apply_rope(q, at, self.rope_base), apply_rope(k, at, self.rope_base)
        o, after = softmax_attention(
            q * head_dim**-0.5, k, v,
            initial_state=kv, segment_ids=segment_ids, implementation=self.implementation,
        )  # fmt: skip
        if kv is None:  # attention itself had nothing to read in a fresh cache; now there is something to keep
            more = self.max_length - time if time < self.max_length else self.max_length
            room = ((0, 0), (0, more), (0, 0), (0, 0))
            after = after._replace(k=jnp.pad(after.k, room), v=jnp.pad(after.v, room))
        y = dense(self, "o_proj", self.width)(o.reshape(batch, time, heads * head_dim))
        return y, AttentionCache(after, segment)
