"""The controls of an exact-flow experiment: every formula of spec table 8.1 in float64, limits, gradients, errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efla_jax.ops import exact_flow, l2_normalize
from efla_jax.ops.flow_controls import STEPS, flow_control


def formulas(beta, n):
    """(erase, write scale) per control, written from the survival factors of the raw rule: e = c n^2, m = c n."""
    x = beta * n**2
    series = {f"order{m}": -sum((-x) ** j / math.factorial(j) for j in range(1, m + 1)) / n**2 for m in (2, 3, 4)}
    raw = {
        "exact": (1 - np.exp(-x)) / n**2,
        "euler": beta,
        "implicit": beta / (1 + x),
        "kaczmarz": beta / (n**2 + 1e-6),
        **series,
    }
    gate, unit = 1 - np.exp(-x), 1 - np.exp(-beta)
    direct = {
        "gate_only": (gate, gate),
        "value_times_norm": (beta, beta * n),
        "value_over_norm": (beta, beta / n),
        "normalized": (unit, unit),
        "softplus_unit": (unit, unit),
    }
    return {name: (c * n**2, c * n) for name, c in raw.items()} | direct


def keys_of_norm(n, shape=(2, 7, 2, 4)):
    k = np.random.default_rng(0).normal(size=shape)
    return k / np.linalg.norm(k, axis=-1, keepdims=True) * n


@pytest.mark.parametrize("norm", [1e-3, 0.3, 1.0, 3.0])
def test_every_control_is_its_formula(norm):
    rng = np.random.default_rng(1)
    k, v = keys_of_norm(norm), rng.normal(size=(2, 7, 4, 3))
    beta = rng.uniform(0.05, 1.0, size=(2, 7, 4))
    assert set(formulas(beta, norm)) == set(STEPS)
    for step, (erase, write) in formulas(beta, norm).items():
        unit_k, u, e = flow_control(jnp.float32(k), jnp.float32(v), jnp.float32(beta), step)
        np.testing.assert_allclose(unit_k, k / norm, rtol=2e-6, atol=1e-7, err_msg=step)
        # float32 inputs: |k|^2 carries a few roundings, and orders above 1 subtract terms of size x^j
        np.testing.assert_allclose(e, erase, rtol=3e-5, atol=1e-7, err_msg=step)
        np.testing.assert_allclose(u, write[..., None] * v, rtol=3e-5, atol=1e-7, err_msg=step)


def test_exact_is_exact_flow_and_softplus_unit_is_the_sigmoid_gate():
    rng = np.random.default_rng(2)
    k, v = jnp.float32(rng.normal(size=(1, 5, 1, 4))), jnp.float32(rng.normal(size=(1, 5, 2, 3)))
    z = jnp.float32(rng.normal(size=(1, 5, 2)))
    beta = jax.nn.sigmoid(z)
    for ours, theirs in zip(flow_control(k, v, beta, "exact"), exact_flow(k, v, beta), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    unit_k, u, erase = flow_control(k, v, jax.nn.softplus(z), "softplus_unit")
    np.testing.assert_allclose(erase, jax.nn.sigmoid(z), rtol=1e-6)
    np.testing.assert_allclose(u, jax.nn.sigmoid(z)[..., None] * v, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(unit_k, l2_normalize(k), rtol=1e-6)


@pytest.mark.parametrize("step", STEPS)
def test_zero_keys_have_finite_gradients(step):
    k, v, beta = jnp.zeros((1, 2, 1, 4)), jnp.ones((1, 2, 1, 3)), jnp.full((1, 2, 1), 0.5)

    def total(k, v, beta):
        unit_k, u, erase = flow_control(k, v, beta, step)
        return jnp.sum(unit_k) + jnp.sum(u) + jnp.sum(erase)

    for gradient in jax.grad(total, argnums=(0, 1, 2))(k, v, beta):
        assert np.isfinite(gradient).all()
    assert not np.any(jax.grad(total)(k, v, beta))


def test_unknown_step():
    with pytest.raises(ValueError, match="step: 'midpoint'.*euler"):
        flow_control(jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 1)), "midpoint")
