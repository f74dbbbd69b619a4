"""The depthwise causal convolution in front of a recurrence, with its weights."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from efla_jax.layers.initializers import kernel_initializer
from efla_jax.ops import causal_conv
from efla_jax.shapes import SegmentIds


class CausalConv(nn.Module):
    """`ops.causal_conv` with parameters weight [W, D] (last tap: the current token) and, with use_bias, bias [D].

    activation: of the result, None or "silu"."""

    taps: int
    use_bias: bool = False
    dtype: DTypeLike = "float32"
    activation: str | None = None

    @nn.compact
    def __call__(
        self, x: jax.Array, segment_ids: SegmentIds | None, state: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D], state [B, W-1, D] (None: zeros) -> y [B, T, D] in `dtype` and the next state."""
        channels = x.shape[-1]
        weight = self.param("weight", kernel_initializer("uniform", 0.0), (self.taps, channels), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (channels,), jnp.float32) if self.use_bias else None
        x = x.astype(self.dtype)
        return causal_conv(x, weight, bias, initial_state=state, segment_ids=segment_ids, activation=self.activation)
