"""Gated DeltaNet: the delta rule with a learned decay per head (arXiv 2412.06464)."""

import jax

from efla_jax.layers.decay import decay
from efla_jax.layers.delta_net import DeltaNet
from efla_jax.layers.projections import gate

SLOWEST = 1e-3  # A ~ U(0, 16), kept above this so that log A is finite


class GatedDeltaNet(DeltaNet):
    """S_t = exp(g) (I - beta k k^T) S_{t-1} + beta k v^T, unit keys, g = -exp(A_log) softplus(a_proj x + dt_bias)."""

    expand_v: float = 2.0
    output_gate: bool = True

    def log_decay(self, x: jax.Array) -> jax.Array:
        return decay(self, gate(self, "a_proj")(x), SLOWEST)[1]
