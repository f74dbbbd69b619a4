"""Flax Linen mixers and blocks, thin over `ops`. MIXERS is the only registry: the names in a model's pattern."""

from efla_jax.layers.attention import Attention as Attention
from efla_jax.layers.block import Block as Block
from efla_jax.layers.block import SwiGLU as SwiGLU
from efla_jax.layers.delta_net import DeltaNet as DeltaNet
from efla_jax.layers.efla import EFLA as EFLA
from efla_jax.layers.gated_conv import GatedConv as GatedConv
from efla_jax.layers.gated_delta_net import GatedDeltaNet as GatedDeltaNet
from efla_jax.layers.gated_efla import GatedEFLA as GatedEFLA
from efla_jax.layers.level_weights import LevelWeights as LevelWeights
from efla_jax.layers.log_linear import LogLinearEFLA as LogLinearEFLA
from efla_jax.layers.log_linear import LogLinearGatedDeltaNet as LogLinearGatedDeltaNet
from efla_jax.layers.log_linear import LogLinearMamba2 as LogLinearMamba2
from efla_jax.layers.mamba2 import Mamba2 as Mamba2
from efla_jax.layers.nats_l import NATSL as NATSL
from efla_jax.layers.reading import Reading as Reading
from efla_jax.layers.reading import Spread as Spread
from efla_jax.layers.reading import signals as signals
from efla_jax.layers.router import Router as Router

MIXERS = {
    "attention": Attention,
    "delta_net": DeltaNet,
    "efla": EFLA,
    "gated_conv": GatedConv,
    "gated_delta_net": GatedDeltaNet,
    "gated_efla": GatedEFLA,
    "mamba2": Mamba2,
    "log_linear_mamba2": LogLinearMamba2,
    "log_linear_gated_delta_net": LogLinearGatedDeltaNet,
    "log_linear_efla": LogLinearEFLA,
    "nats_l": NATSL,
}
