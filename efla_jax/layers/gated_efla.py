"""Gated EFLA: the exact flow of a gated delta rule (arXiv 2512.12602, appendix D)."""

import jax
from flax import linen as nn

from efla_jax.layers.decay import decay
from efla_jax.layers.delta import DeltaMixer
from efla_jax.layers.fields import check_choice
from efla_jax.layers.gated_delta_net import SLOWEST
from efla_jax.layers.projections import gate
from efla_jax.ops import exact_flow, gated_exact_flow, l2_normalize


class GatedEFLA(DeltaMixer):
    """One exact step of the joint flow of decay and delta rule; `ops.gated_exact_flow` has the coefficients.

    step              "joint": as said; "split": exp(g) first, then an ungated exact step
    normalize_keys    keys of unit length, whose norm no longer sets the step
    """

    expand_v: float = 2.0
    output_gate: bool = True
    step: str = "joint"
    normalize_keys: bool = False

    def __post_init__(self):
        check_choice("step", self.step, ("joint", "split"))
        super().__post_init__()

    def log_decay(self, x: jax.Array) -> jax.Array:
        return decay(self, gate(self, "a_proj")(x), SLOWEST)[1]

    @nn.nowrap
    def flow_step(self) -> str | None:
        if self.normalize_keys:
            return None
        return "exact" if self.step == "split" else "gated_exact"

    def coefficients(self, k, v, beta, log_decay):
        k = l2_normalize(k) if self.normalize_keys else k
        if self.step == "split":
            return *exact_flow(k, v, beta), log_decay
        return gated_exact_flow(k, v, beta, log_decay)
