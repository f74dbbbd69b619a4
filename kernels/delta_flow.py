"""Delta rules that take raw keys: a token's coefficients from beta, its log decay and its key's squared length, for the
programs of the delta rule.

With n = |k|, a step is S <- exp(g) (I - w s k k^T) S + w k v^T, where w is the write per raw key and s what of it
erases:

    step          w                       s                        with
    exact         beta phi(beta n^2)      1                        phi(x) = (1 - exp(-x)) / x
    gated_exact   beta phi(y - g)         a phi(y) / phi(y - g)    a = 1 + g (g = exp(raw) - 1), y = a beta n^2
    unit          beta / n                1 / n                    (unit keys, erased and written by beta)

so that the vectors written are N = T (V - s in . K S) with T = diag(1/n) (I + A)^-1 diag(w n) and A in unit keys,
A_ti = s_t w_t n_t R_ti k_t.k_i / n_i, whose entries are at most 1: the walk is that of the delta rule, with T for its
inverse, s for its erase gate, V for U. A key of length 0 has w = 0: it writes nothing and gets no gradient.

Backward: dV = T^T dN; T^-1 has 1/w on its diagonal and s . strict(R . K K^T) below. So the gradients are those of the
delta rule with erase s, and beside them w dw = w^-1 dV . N = dV . V + s ds, whose way into k is along k.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

STEPS = ("exact", "gated_exact", "unit")
LEAST = 1e-12  # beta at least: d w is a quotient by w, and a smaller beta changes no sum of 16-bit numbers
SERIES_BELOW = 0.5  # above it 1 - exp(-x) has lost at most a digit, below it eight terms leave 1e-8


def phi(x: jax.Array) -> jax.Array:
    """(1 - exp(-x)) / x for x >= 0, from what both a GPU program and autodiff know; Mosaic has no expm1."""
    small = x < SERIES_BELOW
    y, z = jnp.where(small, x, 0.0), jnp.where(small, 1.0, x)
    series = jnp.full_like(x, -1 / 40320)
    for term in (1 / 5040, -1 / 720, 1 / 120, -1 / 24, 1 / 6, -1 / 2, 1.0):
        series = series * y + term
    closed = (1.0 - jnp.exp(-z)) / z
    return jnp.where(small, series, closed)


def coefficients(step: str, beta: jax.Array, log_decay: jax.Array, square: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(w, s) elementwise, float32, from beta >= LEAST, log decay g and n^2; both 0 where n^2 is."""
    live = square > 0.0
    if step == "exact":
        write, seen = beta * phi(beta * square), jnp.ones_like(square)
    elif step == "gated_exact":
        decay = 1.0 + log_decay
        x = decay * beta * square
        written = phi(x - log_decay)
        write, seen = beta * written, decay * phi(x) / written
    else:
        seen = lax.rsqrt(jnp.where(live, square, 1.0))
        write = beta * seen
    return jnp.where(live, write, 0.0), jnp.where(live, seen, 0.0)


class Slopes(NamedTuple):
    """What the backward needs of the coefficients, each [B, H, T] float32: s; the factors of k in dk that dV . V and ds
    have; and the way from those two to (d beta, d log decay)."""

    seen: jax.Array
    of_value: jax.Array
    of_seen: jax.Array
    gates: Callable


def slopes(step: str, beta: jax.Array, log_decay: jax.Array, square: jax.Array) -> Slopes:
    """From what `coefficients` had, [B, H, T]; beta may be less than LEAST."""

    def both(*arguments):
        return coefficients(step, *arguments)

    (write, seen), pull = jax.vjp(both, jnp.maximum(beta, LEAST), log_decay, square)
    one, nothing = jnp.ones_like(seen), jnp.zeros_like(seen)
    reciprocal = jnp.where(write > 0.0, 1.0 / jnp.where(write > 0.0, write, 1.0), 0.0)

    def gates(d_value: jax.Array, d_seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pull(((d_value + seen * d_seen) * reciprocal, d_seen))[:2]

    # d n^2 = 2 k dk.
    of_value = 2.0 * pull((one, nothing))[2] * reciprocal
    return Slopes(seen, of_value, seen * of_value + 2.0 * pull((nothing, one))[2], gates)
