"""EFLA: the delta rule with each token's step solved exactly in continuous time (arXiv 2512.12602)."""

import jax
from flax import linen as nn

from efla_jax.layers.delta import DeltaMixer
from efla_jax.layers.fields import check_choice
from efla_jax.ops import exact_flow
from efla_jax.ops.flow_controls import STEPS, flow_control


class EFLA(DeltaMixer):
    """S_t = (I - alpha k k^T) S_{t-1} + alpha k v^T with alpha = (1 - exp(-beta |k|^2)) / |k|^2, k as it comes.

    step: "exact", or a control of `ops.flow_controls` with the same parameters. "softplus_unit" makes beta a softplus.
    """

    step: str = "exact"

    def __post_init__(self):
        check_choice("step", self.step, STEPS)
        super().__post_init__()

    def beta(self, x: jax.Array) -> jax.Array:
        return nn.softplus(self.beta_logits(x)) if self.step == "softplus_unit" else super().beta(x)

    @nn.nowrap
    def flow_step(self) -> str | None:
        return "exact" if self.step == "exact" else None

    def coefficients(self, k, v, beta, log_decay):
        unit_k, u, erase = exact_flow(k, v, beta) if self.step == "exact" else flow_control(k, v, beta, self.step)
        return unit_k, u, erase, log_decay
