"""Gated short convolution: what recall models put in front of a recurrence (BaseConv, arXiv 2312.04927)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from efla_jax.layers.cache import RecurrentCache, begin
from efla_jax.layers.conv import CausalConv
from efla_jax.layers.fields import check_dtype, check_least
from efla_jax.layers.initializers import kernel_initializer
from efla_jax.shapes import SegmentIds


class GatedConv(nn.Module):
    """y = conv(x) * (W x + b) + x, with one causal filter and one bias per channel.

    num_heads     of no effect: channels mix in W only; every mixer has it
    conv_width    taps, the current token's among them
    kernel_init   of W, see `kernel_initializer`
    dtype         of the products; parameters and the cached inputs are float32
    """

    width: int
    num_heads: int = 1
    conv_width: int = 3
    kernel_init: str = "lecun"
    init_std: float = 0.02
    dtype: DTypeLike = "float32"

    def __post_init__(self):
        check_least("width", self.width, 1)
        check_least("conv_width", self.conv_width, 1)
        check_dtype(self.dtype)
        super().__post_init__()

    @nn.nowrap
    def init_cache(self, batch_size: int) -> RecurrentCache:
        """The cache of `batch_size` rows that have seen nothing; its state is the last inputs [B, W - 1, width]."""
        inputs: Any = jnp.zeros((batch_size, self.conv_width - 1, self.width), jnp.float32)
        return RecurrentCache((), inputs, jnp.zeros((batch_size,), jnp.int32))

    @nn.nowrap
    def operator_flops(self, length: int) -> float:
        """Nothing beside the projection and the taps."""
        return 0.0

    @nn.compact
    def __call__(
        self, x: jax.Array, segment_ids: SegmentIds | None = None, cache: RecurrentCache | None = None
    ) -> tuple[jax.Array, RecurrentCache]:
        """x [B, T, width] -> y [B, T, width] in `dtype` and the cache after each row's last real token; any T >= 0."""
        x, _, inputs, segment = begin(self, x, segment_ids, cache)
        x = x.astype(self.dtype)
        y, inputs = CausalConv(self.conv_width, True, self.dtype, name="x_conv")(x, segment_ids, inputs)
        init = kernel_initializer(self.kernel_init, self.init_std)
        gate = nn.Dense(self.width, kernel_init=init, dtype=self.dtype, name="z_proj")(x)
        return y * gate + x, RecurrentCache((), inputs.astype(jnp.float32), segment)
