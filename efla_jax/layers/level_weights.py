"""How much of each Fenwick level a token reads: level weights from a block's input (arXiv 2506.04761, 2605.06946)."""

import functools
import math

import jax
import jax.numpy as jnp
from absl import logging
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from efla_jax.layers.fields import check_choice, check_least
from efla_jax.layers.initializers import kernel_initializer
from efla_jax.layers.projections import float32_logit_rows

KINDS = ("linear", "mlp_softplus", "mlp_softmax")
RULES = ("tie", "extrapolate")
ONE = math.log(math.e - 1)  # softplus(ONE) = 1


class LevelOptions(nn.Module):
    """The fields of level weights, which the mixers that have them share.

    levels            L, levels with a learned weight; documents of up to 2^(L-1) tokens have no others
    level_kind        "linear", "mlp_softplus" or "mlp_softmax", see `LevelWeights`
    level_bias        of "linear": add a bias, and begin at weight 1 for every token instead of about softplus(0) = 0.69
    level_hidden      width of the MLP; 0: twice the levels
    level_gelu        the MLP's activation is GELU; False: none
    trained_levels    levels that training documents reached, bit_length(tokens - 1) + 1; 0: all
    untrained_levels  weight of the levels from there on: "tie", that of the last trained one; "extrapolate", going on
                      from it by the ratio of the last two, or 1 if that is more
    max_levels        slots of the state, at least `levels`, for longer documents; 0: `levels`. Levels beyond the last
                      slot share its state and weight
    """

    levels: int = 15
    level_kind: str = "linear"
    level_bias: bool = False
    level_hidden: int = 64
    level_gelu: bool = True
    trained_levels: int = 0
    untrained_levels: str = "tie"
    max_levels: int = 0

    def __post_init__(self):
        check_least("levels", self.levels, 2)  # one level is the mixer without levels
        check_choice("level_kind", self.level_kind, KINDS)
        check_choice("untrained_levels", self.untrained_levels, RULES)
        for field in ("level_hidden", "trained_levels", "max_levels"):
            check_least(field, getattr(self, field), 0)
        if self.level_bias and self.level_kind != "linear":
            raise ValueError(
                f"level_bias: True, but level_kind={self.level_kind!r} has its own biases; it belongs to 'linear'."
            )
        least = 2 if self.untrained_levels == "extrapolate" else 1
        if self.trained_levels and not least <= self.trained_levels <= self.levels:
            raise ValueError(
                f"trained_levels: {self.trained_levels} is not between {least} and levels={self.levels}; 0 means all."
            )
        if self.max_levels and self.max_levels < self.levels:
            raise ValueError(
                f"max_levels: {self.max_levels} slots are fewer than levels={self.levels}; set as many, or 0."
            )
        super().__post_init__()

    @nn.nowrap
    def level_counts(self) -> tuple[int, int, int]:
        """(levels with a trained weight, slots of the state, width of the MLP: 0 without one)."""
        hidden = 0 if self.level_kind == "linear" else self.level_hidden or 2 * self.levels
        return self.trained_levels or self.levels, self.max_levels or self.levels, hidden


class LevelWeights(LevelOptions, kw_only=True):
    """Level weights [B, T, H, slots] float32 of a block's input x, each >= 0; raw = level_proj x, [B, T, H, L].

        "linear"          softplus(scale * raw [+ shift]),  scale and shift [H, L]
        "mlp_softplus"    softplus(W2 GELU(W1 raw + b1) + b2), one MLP for all heads
        "mlp_softmax"     the same with softmax over the levels

    They begin at softplus(raw) without shift; at 1 with it (level_proj begins at zero) and in "mlp_softplus", and at
    1/L in "mlp_softmax" (W2 begins at zero), whatever the input and `kernel_init`, which is that of level_proj.
    Products are in `dtype`, the rest in float32.

    They leave through `capture_intermediates=lambda module, _: isinstance(module, layers.LevelWeights)`."""

    num_heads: int
    kernel_init: str = "lecun"
    init_std: float = 0.02
    dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T H L"]:
        trained, slots, hidden = self.level_counts()
        shape = (self.num_heads, self.levels)
        # Mamba-2 has hundreds of these columns: in `dtype` with float32 sums, there and back.
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype, dot_general=float32_logit_rows)
        zeros, one = nn.initializers.zeros, nn.initializers.constant(ONE)
        init = zeros if self.level_bias else kernel_initializer(self.kernel_init, self.init_std)
        raw = dense(math.prod(shape), kernel_init=init, name="level_proj")(x).reshape(*x.shape[:2], *shape)
        if hidden:
            xavier = nn.initializers.xavier_uniform()
            inner = nn.Dense(hidden, dtype=self.dtype, kernel_init=xavier, name="hidden")(raw)
            inner = nn.gelu(inner, approximate=False) if self.level_gelu else inner
            softmax = self.level_kind == "mlp_softmax"
            logits = dense(self.levels, kernel_init=zeros, name="out")(inner)
            logits += self.param("out_bias", zeros if softmax else one, shape[1:], jnp.float32)
            weights = nn.softmax(logits) if softmax else nn.softplus(logits)
        else:
            logits = self.param("scale", nn.initializers.ones, shape, jnp.float32) * raw
            logits += self.param("shift", one, shape, jnp.float32) if self.level_bias else 0.0
            weights = nn.softplus(logits)
        return completed(weights, trained, slots, self.untrained_levels)


def completed(weights: jax.Array, trained: int, slots: int, rule: str) -> jax.Array:
    """Weights [..., slots]: the first `trained` of weights [..., L], and what the rule makes of them (LevelOptions)."""
    if trained == slots:
        return weights
    known = weights[..., :trained]
    last = known[..., -1:]
    ratio = jnp.ones_like(last)
    if rule == "extrapolate":  # a weight below 1e-15 is none, and the square of the divisor stays in range
        ratio = jnp.minimum(last / jnp.maximum(known[..., -2:-1], 1e-15), 1.0)
    return jnp.concatenate([known, last * ratio ** jnp.arange(1, slots - trained + 1)], axis=-1)


@functools.cache  # said once
def note_untrained(length: int, trained: int, rule: str) -> None:
    """Log that documents of `length` tokens, if there are any, reach levels without a trained weight."""
    logging.warning(
        "level weights: documents of more than 2^%d = %d tokens reach levels beyond the %d trained ones, and up to %d"
        " tokens come in one call; untrained_levels=%r says what those weigh.",
        trained - 1, 2 ** (trained - 1), trained, length, rule,
    )  # fmt: skip
