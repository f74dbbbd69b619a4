"""The learned decay that Gated DeltaNet, Gated EFLA and Mamba-2 share. Called inside a mixer's compact method."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from efla_jax.layers.initializers import log_uniform, step_bias

FASTEST = 16.0  # A ~ U(slowest, fastest) at initialisation


def decay(mixer, logits: jax.Array, slowest: float, fastest: float = FASTEST) -> tuple[jax.Array, jax.Array]:
    """(dt, log decay) [B, T, H] float32 from logits [B, T, H]; gives the mixer its parameters A_log and dt_bias [H].

        dt = softplus(logits + dt_bias)        log decay = -exp(A_log) dt <= 0
    """
    heads = logits.shape[-1:]
    a_log = mixer.param("A_log", log_uniform(slowest, fastest), heads)
    dt_bias = mixer.param("dt_bias", step_bias(), heads)
    dt = nn.softplus(logits.astype(jnp.float32) + dt_bias)
    return dt, -jnp.exp(a_log) * dt
