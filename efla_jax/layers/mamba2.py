"""Mamba-2: linear attention with a scalar decay per head, state-space duality (arXiv 2405.21060)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from efla_jax.layers.cache import RecurrentCache, begin, fresh_cache
from efla_jax.layers.conv import CausalConv
from efla_jax.layers.decay import decay
from efla_jax.layers.fields import check_dtype, check_least, head_width
from efla_jax.layers.projections import dense, gate
from efla_jax.layers.reading import Reading
from efla_jax.ops import linear_attention
from efla_jax.shapes import SegmentIds, check_chunk_size, check_heads


class Mamba2(nn.Module):
    """S_t = exp(dt A) S_{t-1} + B (dt x)^T, y = S_t^T C + D x, then RMSNorm of y SiLU(z) over all heads and projection.

    num_heads     H; with head_dim None the inner width H V is expand * width
    head_dim      V
    state_dim     K, the length of B and C
    num_groups    G pairs (B, C), must divide num_heads
    conv_width    taps of the convolution over x, B and C together; 0: none
    kernel_init, gate_init    see `kernel_initializer`; the gate is the projection to dt
    dtype         of the products; parameters, gates and state are float32

    Checkpoints with one in_proj for z, x B C and dt: its last H columns are dt_proj here, summed in float32.
    """

    width: int
    num_heads: int
    head_dim: int | None = None
    state_dim: int = 128
    num_groups: int = 1
    expand: float = 2.0
    conv_width: int = 4
    conv_bias: bool = True
    kernel_init: str = "lecun"
    gate_init: str = "uniform"
    init_std: float = 0.02
    norm_eps: float = 1e-5
    chunk_size: int = 64
    implementation: str = "auto"
    dtype: DTypeLike = "float32"

    def __post_init__(self):
        self.sizes()
        check_chunk_size(self.chunk_size)
        check_least("state_dim", self.state_dim, 1)
        check_least("conv_width", self.conv_width, 0)
        check_dtype(self.dtype)
        super().__post_init__()

    @nn.nowrap
    def sizes(self) -> tuple[int, int, int, int]:
        """(G, H, K, V). Raises ValueError for fields that do not fit together."""
        value_dim = head_width(round(self.expand * self.width), self.num_heads, self.head_dim)
        check_heads(self.num_groups, self.num_heads)
        return self.num_groups, self.num_heads, self.state_dim, value_dim

    @nn.nowrap
    def init_cache(self, batch_size: int) -> RecurrentCache:
        """The cache of `batch_size` rows that have seen nothing."""
        groups, heads, key_dim, value_dim = self.sizes()
        channels = (heads * value_dim + 2 * groups * key_dim,)
        return fresh_cache(batch_size, self.conv_width, channels, (heads, key_dim, value_dim), self.dtype)

    @nn.compact
    def __call__(
        self, x: jax.Array, segment_ids: SegmentIds | None = None, cache: RecurrentCache | None = None
    ) -> tuple[jax.Array, RecurrentCache]:
        """x [B, T, width] -> y [B, T, width] in `dtype` and the cache after each row's last real token; any T >= 0."""
        groups, heads, key_dim, value_dim = self.sizes()
        inner, keys = heads * value_dim, groups * key_dim
        lead = x.shape[:2]
        x, inputs, state, segment = begin(self, x, segment_ids, cache)
        z, mixed = jnp.split(dense(self, "in_proj", 2 * inner + 2 * keys)(x), (inner,), axis=-1)
        if self.conv_width:
            conv = CausalConv(self.conv_width, use_bias=self.conv_bias, dtype=self.dtype, name="conv")
            mixed, after = conv(mixed, segment_ids, *inputs)
            inputs = (after,)
        values, b, c = jnp.split(nn.silu(mixed), (inner, inner + keys), axis=-1)
        values = values.reshape(*lead, heads, value_dim)
        b, c = b.reshape(*lead, groups, key_dim), c.reshape(*lead, groups, key_dim)
        dt, log_decay = decay(self, gate(self, "dt_proj")(x), slowest=1.0)
        Reading(name="step")(dt, segment_ids)
        Reading(name="decay")(jnp.exp(log_decay), segment_ids)

        wide = values.astype(jnp.float32)
        u = (dt[..., None] * wide).astype(values.dtype)
        o, state = linear_attention(
            c, b, u, log_decay,
            initial_state=state, segment_ids=segment_ids,
            chunk_size=self.chunk_size, implementation=self.implementation,
        )  # fmt: skip
        o = o.astype(jnp.float32) + self.param("D", nn.initializers.ones, (heads,), jnp.float32)[:, None] * wide
        o = o.reshape(*lead, inner) * nn.silu(z.astype(jnp.float32))
        o = nn.RMSNorm(epsilon=self.norm_eps, dtype=jnp.float32, name="norm")(o)
        return dense(self, "out_proj", self.width)(o.astype(self.dtype)), RecurrentCache(inputs, state, segment)
