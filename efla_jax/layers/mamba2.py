"""Mamba-2: linear attention with a scalar decay per head, state-space duality (arXiv 2405.21060)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from efla_jax.layers.cache import RecurrentCache, begin, fresh_cache
from efla_jax.layers.decay import FASTEST, decay
from efla_jax.layers.fields import check_choice, check_dtype, check_least, head_width
from efla_jax.layers.projections import ACTIVATIONS, dense, gate, heads
from efla_jax.layers.reading import Reading
from efla_jax.ops import linear_attention
from efla_jax.ops.normalize import scale_values
from efla_jax.shapes import SegmentIds, check_chunk_size, check_heads


class GroupedNorm(nn.Module):
    """RMSNorm of each of `groups` runs of channels, with a scale for every channel; float32."""

    groups: int
    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], jnp.float32)
        runs = x.reshape(*x.shape[:-1], self.groups, x.shape[-1] // self.groups)
        size = jax.lax.rsqrt(jnp.mean(runs * runs, axis=-1, keepdims=True) + self.epsilon)
        return (runs * size).reshape(x.shape) * scale


class Mamba2(nn.Module):
    """S_t = exp(dt A) S_{t-1} + B (dt x)^T, y = S_t^T C + D x, then RMSNorm of y SiLU(z) over all heads and projection.

    num_heads     H; with head_dim None the inner width H V is expand * width
    head_dim      V
    state_dim     K, the length of B and C
    num_groups    G pairs (B, C), must divide num_heads
    norm_groups   groups of heads with a norm each; 1: one over all heads
    conv_width    taps of the convolutions over x, B and C; 0: none
    plain         the recurrence alone (arXiv 2605.06946): values are not multiplied by dt, A begins at 1, and there is
                  no D x, z or norm between S^T C and the projection
    kernel_init, gate_init    see `kernel_initializer`; the gate is the projection to dt
    dtype         of the products; parameters, gates and state are float32

    z, x, B, C and dt have a projection each, and x, B, C a convolution each, so that heads can be split over devices.
    In checkpoints with one in_proj their columns are [z | x | B | C | dt], and a conv1d's channels are [x | B | C].
    """

    width: int
    num_heads: int
    head_dim: int | None = None
    state_dim: int = 128
    num_groups: int = 1
    norm_groups: int = 1
    expand: float = 2.0
    conv_width: int = 4
    conv_bias: bool = True
    activation: str = "silu"
    plain: bool = False
    kernel_init: str = "lecun"
    gate_init: str = "uniform"
    init_std: float = 0.02
    norm_eps: float = 1e-5
    chunk_size: int = 64
    implementation: str = "auto"
    dtype: DTypeLike = "float32"

    def __post_init__(self):
        check_least("width", self.width, 1)
        self.sizes()
        check_choice("activation", self.activation, ACTIVATIONS)
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
        if self.norm_groups < 1 or self.num_heads % self.norm_groups:
            raise ValueError(
                f"norm_groups: {self.norm_groups} does not divide num_heads={self.num_heads}; 1 is a norm over all."
            )
        return self.num_groups, self.num_heads, self.state_dim, value_dim

    @nn.nowrap
    def init_state(self, batch_size: int) -> Any:
        """What the recurrence begins with."""
        return jnp.zeros((batch_size, *self.sizes()[1:]), jnp.float32)

    @nn.nowrap
    def init_cache(self, batch_size: int) -> RecurrentCache:
        """The cache of `batch_size` rows that have seen nothing."""
        groups, heads, key_dim, value_dim = self.sizes()
        channels = heads * value_dim, groups * key_dim, groups * key_dim
        return fresh_cache(batch_size, self.conv_width, channels, self.init_state(batch_size), self.dtype)

    @nn.nowrap
    def operator_flops(self, length: int) -> float:
        """Of the recurrence per token, whatever the length: the update B (dt x)^T and S^T C are 2 K V each a head."""
        _, heads, key_dim, value_dim = self.sizes()
        return 4.0 * heads * key_dim * value_dim

    def recurrence(self, x, q, k, u, erase, log_decay, state, segment_ids) -> tuple[jax.Array, Any]:
        """See `DeltaMixer`; there is no erase."""
        return linear_attention(
            q, k, u, log_decay,
            initial_state=state, segment_ids=segment_ids,
            chunk_size=self.chunk_size, implementation=self.implementation,
        )  # fmt: skip

    def gated_norm(self, o: jax.Array, values: jax.Array, x: jax.Array) -> jax.Array:
        """RMSNorm of (o + D values) SiLU(z) in float32, heads side by side, over all of them or each of norm_groups."""
        skip = self.param("D", nn.initializers.ones, (self.num_heads,), jnp.float32)
        o = o.astype(jnp.float32) + skip[:, None] * values.astype(jnp.float32)
        z = dense(self, "z_proj", o.shape[-2] * o.shape[-1])(x).astype(jnp.float32)
        return GroupedNorm(self.norm_groups, self.norm_eps, name="norm")(o.reshape(z.shape) * nn.silu(z))

    @nn.compact
    def __call__(
        self, x: jax.Array, segment_ids: SegmentIds | None = None, cache: RecurrentCache | None = None
    ) -> tuple[jax.Array, RecurrentCache]:
        """x [B, T, width] -> y [B, T, width] in `dtype` and the cache after each row's last real token; any T >= 0."""
        groups, num_heads, key_dim, value_dim = self.sizes()
        x, inputs, state, segment = begin(self, x, segment_ids, cache)
        values, x_inputs = heads(self, "x", x, (num_heads, value_dim), segment_ids, inputs[0:1], self.conv_bias)
        b, b_inputs = heads(self, "B", x, (groups, key_dim), segment_ids, inputs[1:2], self.conv_bias)
        c, c_inputs = heads(self, "C", x, (groups, key_dim), segment_ids, inputs[2:3], self.conv_bias)
        dt, log_decay = decay(self, gate(self, "dt_proj")(x), 1.0, 1.0 if self.plain else FASTEST)
        Reading(name="step")(dt, segment_ids)
        Reading(name="decay")(jnp.exp(log_decay), segment_ids)

        u = values if self.plain else scale_values(dt, values)
        o, state = self.recurrence(x, c, b, u, None, log_decay, state, segment_ids)
        o = o.reshape(*x.shape[:2], -1) if self.plain else self.gated_norm(o, values, x)
        y = dense(self, "out_proj", self.width)(o.astype(self.dtype))
        return y, RecurrentCache(x_inputs + b_inputs + c_inputs, state, segment)
