"""The coefficients of the exact flow against float64: a matrix exponential, phi and its slope, limits, gradients,
identities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from efla_jax import ops
from efla_jax.ops.exact_flow import phi_slope
from efla_jax.ops.normalize import scale_values
from tests.oracle import assert_close, relative_rms

B, T, G, H, K, V = 2, 11, 2, 4, 6, 3


def inputs(seed: int = 0, norm: float = 1.0):
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(B, T, G, K)) * rng.lognormal(0, 0.7, size=(B, T, G, 1)) * norm / np.sqrt(K)
    beta, decay = rng.uniform(0.05, 1.5, (B, T, H)), -rng.uniform(0, 1.5, (B, T, H))
    q, v, state = rng.normal(size=k.shape), rng.normal(size=(B, T, H, V)), rng.normal(size=(B, H, K, V))
    return [jnp.asarray(x, jnp.float32) for x in (q, k, v, beta, decay, state)]


def flow(k, v, state, decay, rate, source, time):
    """dS/dtau = -(decay I + rate k k^T) S + source k v^T for a time, in float64, as one exponential of an augmented
    matrix."""
    block = np.zeros((K + V, K + V))
    block[:K, :K] = -(decay * np.eye(K) + rate * np.outer(k, k))
    block[:K, K:] = source * np.outer(k, v)
    exponential = scipy.linalg.expm(time * block)
    return exponential[:K, :K] @ state + exponential[:K, K:]


def by_exponentials(q, k, v, beta, decay, state):
    """Outputs and final states token by token; decay None is the ungated flow over time beta, else the gated one over
    time 1."""
    q, k, v, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, beta, state))
    o, state = np.zeros((B, T, H, V)), state.copy()
    for b, t, h in np.ndindex(B, T, H):
        key, query = k[b, t, h // (H // G)], q[b, t, h // (H // G)]
        a = 1.0 if decay is None else np.exp(float(decay[b, t, h]))
        rates = (0, 1, 1, beta[b, t, h]) if decay is None else (1 - a, a * beta[b, t, h], beta[b, t, h], 1.0)
        state[b, h] = flow(key, v[b, t, h], state[b, h], *rates)
        o[b, t, h] = state[b, h].T @ query
    return o, state


@pytest.mark.identity
def test_a_step_equals_the_matrix_exponential():
    q, k, v, beta, decay, state = inputs()
    unit_k, u, erase = ops.exact_flow(k, v, beta)
    got = ops.delta_rule(q, unit_k, u, erase, initial_state=state, chunk_size=16, implementation="chunked")
    assert_close(got, by_exponentials(q, k, v, beta, None, state), ("o", "state"), 1e-5)


def test_a_gated_step_equals_the_matrix_exponential():
    q, k, v, beta, decay, state = inputs(1)
    unit_k, u, erase, log_decay = ops.gated_exact_flow(k, v, beta, decay)
    got = ops.delta_rule(q, unit_k, u, erase, log_decay, initial_state=state, chunk_size=16, implementation="chunked")
    assert_close(got, by_exponentials(q, k, v, beta, decay, state), ("o", "state"), 1e-5)
    assert np.all(np.exp(log_decay) > 0.367) and np.all(log_decay <= 0)


def test_phi_and_its_slope_in_float32():
    """The table of errors behind the custom rule: autodiff of the quotient is wrong by a factor of 17 near 1e-7."""
    x = np.logspace(-8, 2, 4001).astype(np.float32)
    wide = x.astype(np.longdouble)
    value = -np.expm1(-wide) / wide
    series = sum(-(i * (-wide) ** (i - 1)) / np.prod(np.arange(1.0, i + 2)) for i in range(1, 14))
    slope = np.where(wide < 0.2, series, (np.exp(-wide) - value) / wide)
    assert np.max(np.abs(np.asarray(ops.phi(jnp.asarray(x))) / value - 1)) < 5e-7
    assert np.max(np.abs(np.asarray(jax.vmap(jax.grad(ops.phi))(jnp.asarray(x))) / slope - 1)) < 3e-6
    naive = jax.vmap(jax.grad(lambda x: -jnp.expm1(-x) / x))(jnp.asarray(x))
    assert np.max(np.abs(np.asarray(naive) / slope - 1)) > 1  # the fault the rule is there for
    points = jnp.asarray([0.0, 1e-6, 0.19, 0.21, 1e4], jnp.float32)
    second = jax.vmap(jax.grad(jax.grad(ops.phi)))(points)
    assert np.isfinite(second).all() and abs(float(second[0]) - 1 / 3) < 1e-6
    assert abs(float(phi_slope(jnp.float32(0.2))) - float(slope[np.argmin(np.abs(x - 0.2))])) < 1e-3


@pytest.mark.parametrize("norm", (0.0, 1e-6, 1e-3, 1.0, 100.0))
def test_key_norms_from_zero_to_a_hundred(norm):
    """Values and gradients of the coefficients against float64 finite differences of the raw rule; finite
    everywhere."""
    _, k, v, beta, decay, _ = inputs(2)
    k = ops.l2_normalize(k) * norm
    weights = [jnp.asarray(x, jnp.float32) for x in np.random.default_rng(3).normal(size=(2, B, T, H, max(K, V)))]

    def score(k, v, beta, decay):
        unit_k, u, erase, log_decay = ops.gated_exact_flow(k, v, beta, decay)
        return jnp.sum(u * weights[0][..., :V]) + jnp.sum(erase * weights[1][..., 0]) + jnp.sum(log_decay)

    gradients = jax.jit(jax.grad(score, argnums=(0, 1, 2, 3)))(k, v, beta, decay)
    assert all(np.isfinite(g).all() for g in gradients)
    a, n = (
        np.exp(np.asarray(decay, np.float64)),
        np.repeat(np.linalg.norm(np.asarray(k, np.float64), axis=-1), H // G, -1),
    )
    b = np.asarray(beta, np.float64)
    eta = 1 - a + a * b * n**2
    scale = b * n * -np.expm1(-eta) / eta
    _, u, erase, _ = ops.gated_exact_flow(k, v, beta, decay)
    assert relative_rms(erase, -np.expm1(-a * b * n**2)) < 1e-6
    assert relative_rms(u, scale[..., None] * np.asarray(v, np.float64)) < 1e-6
    d_beta_erase = a * n**2 * np.exp(-a * b * n**2)
    plain = jax.grad(lambda beta: jnp.sum(ops.gated_exact_flow(k, v, beta, decay)[2] * weights[1][..., 0]))(beta)
    assert relative_rms(plain, d_beta_erase * np.asarray(weights[1][..., 0], np.float64)) < 1e-5


def test_gradient_of_a_tiny_key_is_that_of_the_raw_rule():
    """d/dk through the unit key, whose Jacobian is 1/n, against the raw form (no division) at n = 1e-4."""
    q, k, v, beta, _, state = inputs(4, norm=1e-4)

    def unit_form(k):
        unit_k, u, erase = ops.exact_flow(k, v, beta)
        return jnp.sum(jnp.sin(ops.delta_rule(q, unit_k, u, erase, initial_state=state, implementation="recurrent")[0]))

    def raw_form(k):
        kappa = jnp.repeat(jnp.sum(k * k, -1), H // G, -1)
        alpha = beta * ops.phi(beta * kappa)
        return jnp.sum(
            jnp.sin(
                ops.delta_rule(q, k, alpha[..., None] * v, alpha, initial_state=state, implementation="recurrent")[0]
            )
        )

    assert relative_rms(jax.grad(unit_form)(k), jax.grad(raw_form)(k)) < 1e-5


def test_saturated_write_stores_the_value():
    _, k, v, _, _, state = inputs(5)
    unit_k, u, erase = ops.exact_flow(k[:, :1], v[:, :1], jnp.full((B, 1, H), 1e6))
    _, after = ops.delta_rule(unit_k, unit_k, u, erase, initial_state=state)
    read = jnp.einsum("bhk,bhkv->bhv", jnp.repeat(k[:, 0], H // G, 1), after)
    assert relative_rms(read, v[:, 0]) < 1e-5


@pytest.mark.identity
def test_softplus_beta_with_unit_keys_is_sigmoid_delta_net():
    """1 - exp(-softplus(z)) = sigmoid(z), in value and gradient."""
    q, k, v, z, _, state = inputs(6)
    k = ops.l2_normalize(k)

    def efla(z):
        unit_k, _, erase = ops.exact_flow(k, v, jax.nn.softplus(z))
        return ops.delta_rule(q, unit_k, erase[..., None] * v, erase, initial_state=state, implementation="recurrent")[
            0
        ]

    def delta_net(z):
        erase = jax.nn.sigmoid(z)
        return ops.delta_rule(q, k, erase[..., None] * v, erase, initial_state=state, implementation="recurrent")[0]

    assert_close((efla(z),), (delta_net(z),), ("o",), 1e-6)
    slopes = [jax.grad(lambda z, f=f: jnp.sum(jnp.sin(f(z))))(z) for f in (efla, delta_net)]
    assert relative_rms(*slopes) < 1e-5


@pytest.mark.identity
def test_no_decay_makes_the_gated_flow_the_flow():
    _, k, v, beta, decay, _ = inputs(7)
    *gated, log_decay = ops.gated_exact_flow(k, v, beta, decay * 0)
    assert not np.asarray(log_decay).any()
    assert_close(gated, ops.exact_flow(k, v, beta), ("k", "u", "erase"), 1e-6)


def test_small_steps_are_euler_steps():
    """To first order the exact flow is the delta rule with raw keys: erase = beta |k|^2, write beta k v^T."""
    _, k, v, beta, _, _ = inputs(8)
    tiny = beta * 1e-4
    unit_k, u, erase = ops.exact_flow(k, v, tiny)
    n = jnp.repeat(jnp.linalg.norm(k, axis=-1), H // G, -1)
    assert_close((erase, u), (tiny * n**2, (tiny * n)[..., None] * v), ("erase", "u"), 1e-3)


def test_dtypes_zero_keys_and_normalize_at_zero():
    _, k, v, beta, decay, _ = inputs(9)
    for dtype in (jnp.bfloat16, jnp.float32):
        unit_k, u, erase, log_decay = ops.gated_exact_flow(k.astype(dtype), v.astype(dtype), beta, decay)
        assert [x.dtype for x in (unit_k, u, erase, log_decay)] == [dtype, dtype, jnp.float32, jnp.float32]
    gradient = jax.grad(lambda k: sum(jnp.sum(x) for x in ops.exact_flow(k, v, beta)))(k * 0)
    assert not np.asarray(gradient).any()
    jacobian = jax.jacobian(ops.l2_normalize)(jnp.zeros(3))
    assert not np.asarray(jacobian).any()
    row = jnp.asarray([3e-7, -4e-7, 0.0])
    assert relative_rms(ops.l2_normalize(row), [0.6, -0.8, 0.0]) < 1e-6


def test_gradients_of_rows_are_those_of_the_definitions():
    """The hand-written derivatives of a unit row and of a scaled one, first and second, and their dtypes."""
    rng = np.random.default_rng(7)
    x, weight, scale = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((5, 8), (5, 8), (5,)))

    def written(x, scale):
        return jnp.sum(jnp.sin(scale_values(scale, ops.l2_normalize(x))) * weight)

    def plain(x, scale):
        return jnp.sum(jnp.sin(scale[:, None] * x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))) * weight)

    def twice(f):
        return jax.grad(lambda *a: sum(jnp.sum(jnp.square(d)) for d in jax.grad(f, (0, 1))(*a)), (0, 1))

    for found, wanted in ((jax.grad(written, (0, 1)), jax.grad(plain, (0, 1))), (twice(written), twice(plain))):
        for value, truth in zip(found(x, scale), wanted(x, scale), strict=True):
            assert relative_rms(value, truth) < 1e-6
    narrow = x.astype(jnp.bfloat16), scale.astype(jnp.bfloat16)
    assert all(d.dtype == jnp.bfloat16 for d in jax.grad(written, (0, 1))(*narrow))
    slope, (pulled,) = jax.jvp(ops.l2_normalize, (x,), (weight,))[1], jax.vjp(ops.l2_normalize, x)[1](weight)
    assert relative_rms(slope, pulled) < 1e-6  # the Jacobian is symmetric


def test_coefficients_have_a_forward_mode():
    """The slope along one direction is that of reverse mode."""
    rng = np.random.default_rng(2)
    k, v, beta = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((1, 3, 1, 4), (1, 3, 2, 5), (1, 3, 2)))
    arguments, direction = (k, v, jnp.abs(beta)), (v[..., :1, :4], v * beta[..., None], beta)

    def value(*arguments):
        return sum(jnp.sum(jnp.sin(x)) for x in ops.exact_flow(*arguments))

    slope = jax.jvp(value, arguments, direction)[1]
    gradients = jax.grad(value, (0, 1, 2))(*arguments)
    np.testing.assert_allclose(slope, sum(jnp.vdot(g, d) for g, d in zip(gradients, direction, strict=True)), rtol=1e-5)
