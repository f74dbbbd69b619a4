"""EFLA: the delta rule with each token's step solved exactly in continuous time (arXiv 2512.12602)."""

import math

import jax
from flax import linen as nn

from efla_jax.layers.delta import DeltaMixer
from efla_jax.layers.fields import check_choice
from efla_jax.ops import exact_flow
from efla_jax.ops.flow_controls import STEPS, flow_control


class EFLA(DeltaMixer):
    """S_t = (I - alpha k k^T) S_{t-1} + alpha k v^T with alpha = (1 - exp(-beta |k|^2)) / |k|^2, k as it comes.

    step: "exact", or a control of `ops.flow_controls` with the same parameters. "softplus_unit" makes beta a softplus.
    key_scale: the keys are multiplied by it, and so beta |k|^2, the stiffness of the step, by its square.
    """

    step: str = "exact"
    key_scale: float = 1.0

    def __post_init__(self):
        check_choice("step", self.step, STEPS)
        if not (math.isfinite(self.key_scale) and self.key_scale > 0):
            raise ValueError(
                f"key_scale: {self.key_scale} times the keys are none; give a number > 0, 1 to change nothing."
            )
        super().__post_init__()

    def beta(self, x: jax.Array) -> jax.Array:
        return nn.softplus(self.beta_logits(x)) if self.step == "softplus_unit" else super().beta(x)

    @nn.nowrap
    def raw_keys(self, k: jax.Array) -> jax.Array:
        return k if self.key_scale == 1 else self.key_scale * k

    @nn.nowrap
    def flow_step(self) -> str | None:
        return "exact" if self.step == "exact" else None

    def coefficients(self, k, v, beta, log_decay):
        unit_k, u, erase = exact_flow(k, v, beta) if self.step == "exact" else flow_control(k, v, beta, self.step)
        return unit_k, u, erase, log_decay
