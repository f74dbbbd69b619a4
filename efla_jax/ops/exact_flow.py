"""Exact flow of the delta rule: coefficients of one token solved exactly in continuous time, in unit-key form.

Per token the memory follows dS/dtau = -k k^T S + k v^T for a time beta. With n = |k|, x = beta n^2 and
phi(x) = (1 - exp(-x)) / x:

    S_t = (I - s k k^T / n^2) S_{t-1} + (k / n) (m v)^T
    s = x phi(x) = 1 - exp(-x)        m = s / n = beta n phi(x)

so an EFLA step is a delta-rule step with the unit key k / n, the erase gate s in [0, 1) and the write vector m v.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from efla_jax.ops.normalize import l2_normalize, scale_values, vector_norm
from efla_jax.shapes import Gates, Keys, Values, check_floating, check_heads, check_shapes

SERIES_BELOW = 0.2  # where the closed form of phi' has lost as many digits as the series has left


@jax.custom_jvp
def phi(x: Float[Array, "*rest"]) -> Float[Array, "*rest"]:
    """(1 - exp(-x)) / x, and 1 at x = 0, elementwise for x >= 0; accurate derivatives of every x in float32.

    The derivative is (exp(-x) - phi(x)) / x, or its series below 0.2: autodiff of the quotient loses every digit as x
    -> 0.

    >>> import jax, jax.numpy as jnp
    >>> float(phi(jnp.float32(0.0))), float(jax.grad(phi)(jnp.float32(0.0)))
    (1.0, -0.5)
    """
    zero = x == 0
    return jnp.where(zero, 1.0, -jnp.expm1(-x) / jnp.where(zero, 1.0, x)).astype(x.dtype)


def phi_slope(x: Float[Array, "*rest"]) -> Float[Array, "*rest"]:
    """phi'(x), finite and differentiable from x = 0 on."""
    small = x < SERIES_BELOW
    y = jnp.where(small, x, 0.0)
    series = -1 / 2 + y * (1 / 3 + y * (-1 / 8 + y * (1 / 30 + y * (-1 / 144 + y / 840))))
    z = jnp.where(small, 1.0, x)
    return jnp.where(small, series, (jnp.exp(-z) + jnp.expm1(-z) / z) / z).astype(x.dtype)


@phi.defjvp
def _phi_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return phi(x), phi_slope(x) * dx


def key_norms(k, v, gates: dict) -> tuple[jax.Array, jax.Array]:
    """(unit keys [B, T, G, K] in the dtype of k, norms [B, T, H] float32), after checking k, v and the gates [B, T,
    H]."""
    sizes = check_shapes({"k": (k, "BTGK"), "v": (v, "BTHV"), **{name: (gate, "BTH") for name, gate in gates.items()}})
    check_floating({"k": k, "v": v, **gates})
    check_heads(sizes["G"], sizes["H"])
    return l2_normalize(k), jnp.repeat(vector_norm(k), sizes["H"] // sizes["G"], axis=-1)


def exact_flow(k: Keys, v: Values, beta: Gates) -> tuple[Keys, Values, Gates]:
    """Coefficients (unit_k, u, erase) of `delta_rule` for one exact-flow step per token.

        unit_k = k / |k|      erase = 1 - exp(-beta |k|^2)      u = beta |k| phi(beta |k|^2) v

    k `[B, T, G, K]`, not normalised: its norm sets how much is erased and written. v `[B, T, H, V]`; beta `[B, T, H]`
    >= 0, the integration time. Returns unit_k and u in the dtypes of k and v, erase in float32. A zero key writes
    nothing and gets no gradient. Raises ValueError for shapes or dtypes that do not fit. Source: EFLA (arXiv
    2512.12602), equations 8-15, in unit-key form.

    >>> import jax.numpy as jnp
    >>> k, v, beta = jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 1, 2)), jnp.full((1, 1, 1), 100.0)
    >>> unit_k, u, erase = exact_flow(k, v, beta)        # saturated: the state answers v to k
    >>> float(erase[0, 0, 0]), (u * jnp.linalg.norm(k))[0, 0, 0].tolist()
    (1.0, [1.0, 1.0])
    """
    unit_k, norm = key_norms(k, v, {"beta": beta})
    beta = beta.astype(jnp.float32)
    x = beta * norm * norm
    return unit_k, scale_values(beta * norm * phi(x), v), -jnp.expm1(-x)


def gated_exact_flow(k: Keys, v: Values, beta: Gates, log_decay: Gates) -> tuple[Keys, Values, Gates, Gates]:
    """Coefficients (unit_k, u, erase, log_decay) of `delta_rule` for one exact step of the gated flow over unit time.

    With a = exp(log_decay), the flow dS/dtau = -((1 - a) I + a beta k k^T) S + beta k v^T gives

        g = a - 1      xe = a beta |k|^2      erase = 1 - exp(-xe)      u = beta |k| phi(1 - a + xe) v

    k `[B, T, G, K]`, v `[B, T, H, V]`, beta >= 0 and log_decay <= 0 `[B, T, H]`. The decay applied, exp(g), lies in
    (0.368, 1]. Returns unit_k and u in the dtypes of k and v, erase and g in float32. log_decay = 0 gives `exact_flow`.
    Raises ValueError for shapes or dtypes that do not fit. Source: EFLA (arXiv 2512.12602), appendix D.

    >>> import jax.numpy as jnp
    >>> k, v, gate = jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 1))
    >>> [x.shape for x in gated_exact_flow(k, v, gate, -gate)]
    [(1, 1, 1, 4), (1, 1, 1, 2), (1, 1, 1), (1, 1, 1)]
    """
    unit_k, norm = key_norms(k, v, {"beta": beta, "log_decay": log_decay})
    beta, log_decay = beta.astype(jnp.float32), log_decay.astype(jnp.float32)
    decay = jnp.expm1(log_decay)
    x = jnp.exp(log_decay) * beta * norm * norm
    return unit_k, scale_values(beta * norm * phi(x - decay), v), -jnp.expm1(-x), decay
