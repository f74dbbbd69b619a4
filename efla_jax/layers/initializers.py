"""How parameters begin. Only layers initialise, so that a layer begins the same way by itself and inside a model."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from efla_jax.layers.fields import check_choice

KERNELS = ("lecun", "xavier", "uniform", "normal")
Initializer = Callable[..., jax.Array]


def kernel_initializer(name: str, std: float) -> Initializer:
    """The initialiser of a dense kernel [in, out], or of a convolution's weight [taps, channels], whose taps are `in`.

    "lecun": normal of variance 1/in; "xavier": uniform; "uniform": within 1/sqrt(in), the habit of PyTorch; "normal":
    of standard deviation `std`. Raises ValueError for another name."""
    check_choice("kernel_init", name, KERNELS)
    if name == "lecun":
        return nn.initializers.lecun_normal()
    if name == "xavier":
        return nn.initializers.xavier_uniform()
    if name == "uniform":
        return nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
    return nn.initializers.normal(std)


def log_uniform(low: float, high: float) -> Initializer:
    """A_log = log A with A ~ U(low, high)."""

    def init(key, shape, dtype=jnp.float32):
        return jnp.log(jax.random.uniform(key, shape, dtype, low, high))

    return init


def softplus_inverse(y: jax.Array) -> jax.Array:
    """The x > -inf with softplus(x) = y > 0; log(exp(y) - 1) would lose its digits at y = 1e-3."""
    return y + jnp.log(-jnp.expm1(-y))


def step_bias(low: float = 1e-3, high: float = 0.1, floor: float = 1e-4) -> Initializer:
    """dt_bias with softplus(dt_bias) = dt, dt log-uniform in [low, high] and at least floor."""

    def init(key, shape, dtype=jnp.float32):
        exponent = jax.random.uniform(key, shape, dtype, math.log(low), math.log(high))
        return softplus_inverse(jnp.maximum(jnp.exp(exponent), floor))

    return init
