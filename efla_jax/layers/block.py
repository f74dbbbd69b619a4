"""What stands around a mixer in a deep model: normed residual branches and the gated MLP."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from jax.typing import DTypeLike

from efla_jax.layers.projections import dense
from efla_jax.shapes import SegmentIds
from efla_jax.sharding import constrain

NORMS: Mapping[str, type[nn.Module]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
NORM_POSITIONS = ("pre", "post")


def swiglu_width(width: int, ratio: float) -> int:
    """Inner width of a SwiGLU that costs what a plain MLP of `ratio` times the width would: 2/3 of it, rounded up to
    whole tiles (256, as published configurations do; 32 for models below width 1024)."""
    tile = 256 if width >= 1024 else 32
    return tile * math.ceil(int(width * ratio * 2 / 3) / tile)


class SwiGLU(nn.Module):
    """down_proj(SiLU(gate_proj x) * up_proj x)."""

    width: int
    inner: int
    kernel_init: str = "lecun"
    init_std: float = 0.02
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gated = nn.silu(dense(self, "gate_proj", self.inner)(x)) * dense(self, "up_proj", self.inner)(x)
        gated = constrain(gated, *("batch", "time")[: x.ndim - 1], "features")
        return dense(self, "down_proj", self.width)(gated)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); "post": norm(x + mixer(x)), then norm(x + mlp(x)).

    No MLP when mlp_width is 0. Dropout on both branches, given an rng."""

    mixer_class: type[nn.Module]
    mixer_fields: Mapping[str, Any]
    width: int
    mlp_width: int
    norm: str = "rms"
    norm_position: str = "pre"
    norm_eps: float = 1e-6
    dropout: float = 0.0
    kernel_init: str = "lecun"
    init_std: float = 0.02
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: SegmentIds | None = None, cache=None) -> tuple[jax.Array, Any]:
        mixer = self.mixer_class(**self.mixer_fields, name="mixer")
        x, cache = self.branch("mixer_norm", lambda x: mixer(x, segment_ids, cache), x)
        if self.mlp_width:
            mlp = SwiGLU(self.width, self.mlp_width, self.kernel_init, self.init_std, self.dtype, name="mlp")
            x, _ = self.branch("mlp_norm", lambda x: (mlp(x), None), x)
        return x, cache

    def branch(self, name: str, layer: Callable, x: jax.Array) -> tuple[jax.Array, Any]:
        """x with the first output of `layer` added, and its second."""
        norm = NORMS[self.norm](epsilon=self.norm_eps, dtype=self.dtype, name=name)
        drop = nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))
        pre = self.norm_position == "pre"
        y, state = layer(norm(x) if pre else x)
        x = x + drop(y).astype(x.dtype)  # a mixer may have a dtype of its own
        return constrain(x if pre else norm(x), "batch", "time", None), state
