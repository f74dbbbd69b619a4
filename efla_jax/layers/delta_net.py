"""DeltaNet: the delta rule with unit keys (arXiv 2406.06484)."""

from flax import linen as nn

from efla_jax.layers.delta import DeltaMixer
from efla_jax.ops import l2_normalize
from efla_jax.ops.normalize import scale_values


class DeltaNet(DeltaMixer):
    """S_t = (I - beta k k^T) S_{t-1} + beta k v^T with k of unit length.

    negative_eigenvalues: beta up to 2 instead of 1, so that a step may reflect (arXiv 2411.12537)."""

    negative_eigenvalues: bool = False

    @nn.nowrap
    def flow_step(self) -> str | None:
        return None if self.negative_eigenvalues else "unit"

    def coefficients(self, k, v, beta, log_decay):
        beta = 2 * beta if self.negative_eigenvalues else beta
        return l2_normalize(k), scale_values(beta, v), beta, log_decay
