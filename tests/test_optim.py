"""Optimiser: the full list of learning rates, decay by name, AdamW against a float64 reference, clipping, bad steps."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from efla_jax import optim


def rates(**settings):
    rate = optim.make_schedule(**settings)
    return [float(rate(count)) for count in range(settings["total_steps"] + 2)]


def make(**settings):
    return optim.make_optimizer(**{"learning_rate": 0.1, "total_steps": 100, "schedule": "constant", **settings})


def scanned_params():
    """A model's tree as nn.scan leaves it: three layers, so that every leaf of a layer has one axis more."""
    layer = {
        "mixer": {"q_proj": {"kernel": jnp.ones((3, 4, 4)), "bias": jnp.ones((3, 4))}, "A_log": jnp.ones((3, 2)),
                  "dt_bias": jnp.ones((3, 2)), "D": jnp.ones((3, 2)), "L": jnp.ones((3, 2, 5)),
                  "q_conv": {"kernel": jnp.ones((3, 4, 4))}, "conv1d": {"kernel": jnp.ones((3, 4, 4))},
                  "convert": {"kernel": jnp.ones((3, 4, 4))}},
        "norm": {"scale": jnp.ones((3, 4))},
    }  # fmt: skip
    return {"params": {"embed": {"embedding": jnp.ones((7, 4))}, "position_embedding": {"embedding": jnp.ones((9, 4))},
                       "pos": {"embedding": jnp.ones((9, 4))}, "layers": layer}}


DECAYING = {"params/embed/embedding", "params/layers/mixer/q_proj/kernel", "params/layers/mixer/convert/kernel"}


def test_the_full_list_of_a_warmup_and_cosine():
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * i / 6)) / 2 for i in range(1, 7)]
    expected = [0.25, 0.5, 0.75, 1.0, *cosine, 0.1, 0.1]
    np.testing.assert_allclose(rates(learning_rate=1.0, total_steps=10, warmup_steps=4), expected, rtol=1e-6)
    assert expected[9] == pytest.approx(0.1)  # the last of the ten updates stands on the floor
    no_warmup = rates(learning_rate=2.0, total_steps=4, final_ratio=0.0)
    np.testing.assert_allclose(no_warmup[:4], [2 * (1 + math.cos(math.pi * i / 4)) / 2 for i in range(1, 5)], atol=1e-6)


def test_constant_schedule():
    assert rates(learning_rate=0.5, total_steps=3, schedule="constant") == [0.5] * 5
    values = rates(learning_rate=0.5, total_steps=5, schedule="constant", warmup_steps=2)
    assert values == [0.25] + [0.5] * 6


def test_the_applied_rate_is_the_logged_one():
    optimizer, rate = make(schedule="cosine", total_steps=10, warmup_steps=4, weight_decay=0.0, beta1=0.0, beta2=0.0)
    params = {"kernel": jnp.zeros(())}
    state = optimizer.init(params)
    for step in range(10):  # without memory Adam's step is the sign of the gradient
        updates, state = optimizer.update({"kernel": jnp.ones(())}, state, params)
        assert float(updates["kernel"]) == pytest.approx(-float(rate(step)), rel=1e-5)
    assert int(state.count) == 10


def test_only_matrices_decay():
    params = scanned_params()
    optimizer, _ = make(weight_decay=0.5)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    moved = {jax.tree_util.keystr(keys, simple=True, separator="/"): u for keys, u in leaves if u.any()}
    assert set(moved) == DECAYING
    np.testing.assert_allclose(moved["params/embed/embedding"], -0.1 * 0.5, rtol=1e-6)


def test_everything_decays_on_request():
    params = scanned_params()
    optimizer, _ = make(weight_decay=0.5, decay="all")
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert all(np.allclose(u, -0.05) for u in jax.tree.leaves(updates))


def test_decay_table_lists_every_leaf():
    table = optim.decay_table(jax.eval_shape(scanned_params))
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert len(rows) == len(jax.tree.leaves(scanned_params()))
    assert {path for path, line in rows.items() if not line.endswith("no decay")} == DECAYING
    assert "no decay" not in optim.decay_table(scanned_params(), decay="all")
    assert "(3, 4, 4)" in rows["params/layers/mixer/q_proj/kernel"]


def test_adamw_against_float64():
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "bias": jnp.ones(2)}
    optimizer, _ = make(weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-3, clip_norm=1.5)
    state = optimizer.init(params)
    reference = {k: np.asarray(v, np.float64) for k, v in params.items()}
    m, v = ({k: np.zeros_like(x) for k, x in reference.items()} for _ in range(2))
    update = jax.jit(optimizer.update)
    for step in range(1, 5):
        grads = {k: rng.normal(size=x.shape) * step for k, x in reference.items()}
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        updates, state = update({k: jnp.asarray(g, jnp.float32) for k, g in grads.items()}, state, params)
        params = optax.apply_updates(params, updates)
        assert float(state.grad_norm) == pytest.approx(norm, rel=1e-5)  # the norm before clipping
        for k, g in grads.items():
            g = g * min(1, 1.5 / norm)
            m[k], v[k] = 0.8 * m[k] + 0.2 * g, 0.9 * v[k] + 0.1 * g**2
            direction = m[k] / (1 - 0.8**step) / (np.sqrt(v[k] / (1 - 0.9**step)) + 1e-3)
            reference[k] = reference[k] - 0.1 * (direction + (0.3 * reference[k] if k == "kernel" else 0))
            # float32 rounding over four steps of size 0.1
            np.testing.assert_allclose(params[k], reference[k], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
# 1e30 is finite, its square is not in float32: the norm overflows, and clipping by it would divide by infinity.
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_a_bad_gradient_is_skipped_and_counted(clip_norm, bad):
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    optimizer, _ = make(clip_norm=clip_norm)
    update = jax.jit(optimizer.update)
    good = jax.tree.map(lambda p: 0.1 * p, params)
    poisoned = {**good, "bias": jnp.array([0.1, bad])}
    _, before = update(good, optimizer.init(params), params)
    state, counts = before, []
    for grads in (poisoned, poisoned, poisoned, poisoned, poisoned):
        updates, state = update(grads, state, params)
        assert not any(u.any() for u in jax.tree.leaves(updates))  # no decay either
        counts.append((int(state.skipped), int(state.skipped_in_a_row)))
    assert counts == [(i, i) for i in range(1, 6)]
    assert not np.isfinite(float(state.grad_norm))
    jax.tree.map(np.testing.assert_array_equal, state.inner, before.inner)
    updates, state = update(good, state, params)
    assert all(np.isfinite(u).all() and u.any() for u in jax.tree.leaves(updates))
    assert (int(state.skipped), int(state.skipped_in_a_row), int(state.count)) == (5, 0, 7)
    # After the gap the moments continue as if it had not been.
    jax.tree.map(np.testing.assert_array_equal, state.inner, update(good, before, params)[1].inner)


def test_state_can_be_donated():
    params = {"kernel": jnp.ones((2, 2))}
    optimizer, _ = make()
    step = jax.jit(lambda state, params: optimizer.update(params, state, params)[1], donate_argnums=0)
    assert int(step(step(optimizer.init(params), params), params).count) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "linear"}, "schedule='linear' must be one of cosine, constant"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be > 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan must be > 0"),
        ({"total_steps": 0}, "total_steps=0 must be >= 1"),
        ({"warmup_steps": 100}, "warmup_steps=100 must be >= 0 and below total_steps=100"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be >= 0"),
        ({"final_ratio": 1.5}, "final_ratio=1.5 must lie between 0 and 1"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be finite and >= 0"),
        ({"clip_norm": float("inf")}, "clip_norm=inf must be finite"),
        ({"beta2": 1.0}, "beta2=1.0 must be >= 0 and < 1"),
        ({"eps": 0.0}, "eps=0.0 must be > 0"),
        ({"decay": "kernels"}, "decay='kernels' must be one of matrices, all"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)
