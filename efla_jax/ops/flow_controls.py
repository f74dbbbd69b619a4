"""The controls of an exact-flow experiment: other ways from beta and key norm to a delta-rule step, in unit-key form.

With n = |k|, x = beta n^2 and phi(x) = (1 - exp(-x)) / x, every control is an erase gate e and a write scale m of

    S_t = (I - e k k^T / n^2) S_{t-1} + (k / n) (m v)^T

    step                  e                     m                 asks
    exact                 1 - exp(-x)           beta n phi(x)     (`exact_flow`, the reference)
    gate_only             1 - exp(-x)           e                 is the gain the gate?
    value_times_norm      beta                  beta n            is the gain the scale of the value?
    value_over_norm       beta                  beta / n          the same, as a saturated exact step writes
    euler                 x                     beta n            the step the theory argues against: unstable for x > 2
    implicit              x / (1 + x)           beta n / (1 + x)  does exactness matter?
    normalized            1 - exp(-beta)        e                 the flow of unit keys
    softplus_unit         1 - exp(-beta)        e                 the same, beta = softplus(z): DeltaNet's sigmoid(z)
    order2 order3 order4  - sum (-x)^j / j!     e / n             how many terms of the series are needed
    kaczmarz              beta n^2/(n^2 + eps)  beta n/(n^2+eps)  a step normalised by the key
"""

import math

import jax
import jax.numpy as jnp

from efla_jax.ops.exact_flow import key_norms, phi
from efla_jax.ops.normalize import scale_values
from efla_jax.shapes import Gates, Keys, Values

KACZMARZ_EPSILON = 1e-6  # keeps a vanishing key from writing without bound


def saturating(x: jax.Array) -> jax.Array:
    """1 - exp(-x) without loss of digits for small x."""
    return -jnp.expm1(-x)


def reciprocal(n: jax.Array) -> jax.Array:
    """1 / n, and 0 with gradient 0 at n = 0."""
    return jnp.where(n > 0, 1.0 / jnp.where(n > 0, n, 1.0), 0.0)


def truncated(order: int):
    """Exact flow with its series cut after `order` terms."""

    def step(beta, n):
        x = beta * n * n
        survival = sum((-x) ** j / math.factorial(j + 1) for j in range(order))
        return x * survival, beta * n * survival

    return step


def unit_flow(beta, n):
    gate = saturating(beta)
    return gate, gate


STEPS = {
    "exact": lambda beta, n: (saturating(beta * n * n), beta * n * phi(beta * n * n)),
    "gate_only": lambda beta, n: (saturating(beta * n * n),) * 2,
    "value_times_norm": lambda beta, n: (beta, beta * n),
    "value_over_norm": lambda beta, n: (beta, beta * reciprocal(n)),
    "euler": lambda beta, n: (beta * n * n, beta * n),
    "implicit": lambda beta, n: (beta * n * n / (1 + beta * n * n), beta * n / (1 + beta * n * n)),
    "normalized": unit_flow,
    "softplus_unit": unit_flow,
    "order2": truncated(2),
    "order3": truncated(3),
    "order4": truncated(4),
    "kaczmarz": lambda beta, n: (beta * n * n / (n * n + KACZMARZ_EPSILON), beta * n / (n * n + KACZMARZ_EPSILON)),
}


def flow_control(k: Keys, v: Values, beta: Gates, step: str) -> tuple[Keys, Values, Gates]:
    """Coefficients (unit_k, u, erase) of `delta_rule` for the named `step` of the table at the head of this file.

        unit_k = k / |k|      erase = e(beta, |k|)      u = m(beta, |k|) v

    k `[B, T, G, K]`, not normalised; v `[B, T, H, V]`; beta `[B, T, H]` >= 0. Returns unit_k and u in the dtypes of k
    and v, erase in float32. Raises ValueError for an unknown step and for shapes or dtypes that do not fit. Source: the
    exact flow is EFLA (arXiv 2512.12602); implicit as in Longhorn, Kaczmarz as in arXiv 2605.08587, epsilon our own.

    >>> import jax.numpy as jnp
    >>> k, v, beta = jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 1))
    >>> [float(flow_control(k, v, beta, step)[2][0, 0, 0]) for step in ("euler", "implicit", "order2")]
    [4.0, 0.800000011920929, -4.0]
    """
    if step not in STEPS:
        raise ValueError(f"step: {step!r} is not a way to take the step; choose one of {tuple(STEPS)}.")
    unit_k, norm = key_norms(k, v, {"beta": beta})
    erase, write = STEPS[step](beta.astype(jnp.float32), norm)
    return unit_k, scale_values(write, v), erase
