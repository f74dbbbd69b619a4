"""Optimiser: full lists of learning rates, decay by name, AdamW against float64, Muon's singular values and whom it
moves, clipping, bad steps, averages, norms per group."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from efla_jax import LanguageModel, optim, sharding
from efla_jax.layers import MIXERS
from efla_jax.model import SequenceClassifier


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


def test_the_full_list_of_warm_up_stable_decay():
    """Twelve updates: three to the peak, which stays until four are left; the last stands on the floor, exactly."""
    values = rates(learning_rate=2.0, total_steps=12, warmup_steps=3, schedule="wsd", decay_steps=4, final_ratio=0.2)
    down = [2 * (0.2 + 0.8 * left / 4) for left in (3, 2, 1, 0)]
    np.testing.assert_allclose(values, [2 / 3, 4 / 3] + [2.0] * 6 + down + [0.4, 0.4], rtol=1e-6)
    whole = rates(learning_rate=1.0, total_steps=4, schedule="wsd", decay_steps=4, final_ratio=0.0)
    assert whole == [0.75, 0.5, 0.25, 0.0, 0.0, 0.0]


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
        ({"schedule": "linear"}, "schedule='linear' must be one of cosine, constant, wsd"),
        ({"schedule": "wsd"}, "decay_steps=0 must be >= 1 and at most total_steps - warmup_steps = 100"),
        ({"schedule": "wsd", "decay_steps": 91, "warmup_steps": 10}, "decay_steps=91 must be >= 1 and at most .* = 90"),
        ({"decay_steps": 5}, "decay_steps=5 belongs to schedule='wsd'; set it to 0 with 'constant'"),
        ({"algorithm": "sgd"}, "algorithm='sgd' must be one of adamw, muon"),
        ({"adam_learning_rate": 0.1}, "adam_learning_rate=0.1 belongs to algorithm='muon'"),
        ({"algorithm": "muon", "adam_learning_rate": -1.0}, "adam_learning_rate=-1.0 must be finite and >= 0"),
        ({"momentum": 1.0}, "momentum=1.0 must be >= 0 and < 1"),
        ({"ema_decay": 1.0}, "ema_decay=1.0 must be >= 0 and < 1"),
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


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_parameters_below_float32_are_refused(name):
    optimizer, _ = make(algorithm=name)
    params = {"groups": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2, jnp.bfloat16)}}
    with pytest.raises(ValueError, match="params: groups/bias is bfloat16; what is optimised is float32"):
        optimizer.init(params)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_are_float32_under_a_bfloat16_gradient(name):
    params = scanned_params()
    optimizer, _ = make(algorithm=name, ema_decay=0.9)
    before = optimizer.init(params)
    rounded = jax.tree.map(lambda p: jax.random.normal(jax.random.key(0), p.shape, jnp.bfloat16), params)
    updates, state = optimizer.update(rounded, before, params)
    kinds = jax.tree.map(lambda x: x.dtype, before)
    assert jax.tree.map(lambda x: x.dtype, state) == kinds
    assert {kind.name for kind in jax.tree.leaves(kinds)} == {"float32", "int32"}
    assert {u.dtype.name for u in jax.tree.leaves(updates)} == {"float32"}
    exact = optimizer.update(jax.tree.map(lambda g: g.astype(jnp.float32), rounded), before, params)
    jax.tree.map(np.testing.assert_array_equal, (updates, state), exact)  # squares of bfloat16 are not in bfloat16


def shapes_of(model, example):
    return jax.eval_shape(model.init, jax.random.key(0), example)


def test_whom_muon_moves():
    """Of every mixer's model the projections and the MLP, and nothing else; all kernels that stay behind are named."""
    stay = {"a_proj", "b_proj", "dt_proj", "level_proj", "mix_proj", "route_proj", "lm_head", "front", "head"}
    for name in MIXERS:
        fields = {"mixers": (name,), "mixer_options": {name: {"num_heads": 2}}}
        language = LanguageModel(8, 16, 2, **fields)
        images = SequenceClassifier(3, 16, 9, **fields)
        for params in (shapes_of(language, jnp.zeros((1, 3), jnp.int32)), shapes_of(images, jnp.zeros((1, 9, 1)))):
            verdicts = dict(zip(optim.leaf_names(params), jax.tree.leaves(optim.algorithms(params)), strict=True))
            for path, verdict in verdicts.items():
                *_, module, leaf = path.split("/")
                assert (verdict == "muon") == (leaf == "kernel" and module not in stay), path
            assert "muon" in verdicts.values()
    table = optim.decay_table(scanned_params(), algorithm="muon").splitlines()
    assert [line.split()[0] for line in table if " muon " in line] == sorted(DECAYING - {"params/embed/embedding"})


def muon_step(params, gradients, **settings):
    optimizer, _ = make(algorithm="muon", weight_decay=0.0, learning_rate=0.02, **settings)
    return jax.jit(optimizer.update)(gradients, optimizer.init(params), params)[0]


def test_muon_orthogonalises_each_layer_alone():
    """Singular values 0.7 to 1.2 times rate 0.2 sqrt(max(in, out)), whatever the gradient's; layers do not mix."""
    rng = np.random.default_rng(0)
    gradient = rng.normal(size=(3, 12, 20)) * np.geomspace(1, 100, 20) * np.array([1, 1e-3, 1e3])[:, None, None]
    params = {"q_proj": {"kernel": jnp.zeros((3, 12, 20))}}
    step = muon_step(params, {"q_proj": {"kernel": jnp.asarray(gradient, jnp.float32)}}, clip_norm=0.0)
    step = np.asarray(step["q_proj"]["kernel"])
    for layer in range(3):
        values = np.linalg.svd(step[layer], compute_uv=False) / (0.02 * 0.2 * math.sqrt(20))
        assert 0.65 < values.min() and values.max() < 1.25, values
        u, _, v = np.linalg.svd(-gradient[layer], full_matrices=False)
        assert np.vdot(step[layer], u @ v) > 0.97 * np.linalg.norm(step[layer]) * math.sqrt(12)  # downhill
        alone = muon_step({"q_proj": {"kernel": jnp.zeros((12, 20))}},
                          {"q_proj": {"kernel": jnp.asarray(gradient[layer], jnp.float32)}}, clip_norm=0.0)
        np.testing.assert_allclose(step[layer], alone["q_proj"]["kernel"], rtol=2e-3, atol=2e-6)


def test_muon_leaves_the_others_to_adamw_at_their_rate():
    params = scanned_params()
    gradients = jax.tree.map(lambda p: 0.1 * p, params)
    moved = muon_step(params, gradients, adam_learning_rate=0.005)
    adamw, _ = make(learning_rate=0.005, weight_decay=0.0)
    expected, _ = adamw.update(gradients, adamw.init(params), params)
    for path, ours, theirs, verdict in zip(
        optim.leaf_names(params), *map(jax.tree.leaves, (moved, expected, optim.algorithms(params))), strict=True
    ):
        assert np.allclose(ours, theirs, rtol=1e-5) == (verdict == "adamw"), path


def test_muon_decays_matrices_at_each_ones_rate():
    params = scanned_params()
    optimizer, _ = make(algorithm="muon", weight_decay=0.5, adam_learning_rate=0.02)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    moved = {path: u for path, u in zip(optim.leaf_names(params), jax.tree.leaves(updates), strict=True) if u.any()}
    assert set(moved) == DECAYING
    for path, u in moved.items():
        np.testing.assert_allclose(u, -(0.02 if "embed" in path else 0.1) * 0.5, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_split_parameters_move_as_on_one_device(name):
    """On eight devices, with every axis that sharding.RULES splits: updates, state, norms and their shardings."""
    model = LanguageModel(16, 8, 2, mixer_options={"efla": {"num_heads": 2}})
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    keys = jax.random.split(jax.random.key(1), len(jax.tree.leaves(params)))
    gradients = jax.tree.unflatten(jax.tree.structure(params), [
        jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, jax.tree.leaves(params), strict=True)])
    optimizer, _ = make(algorithm=name, ema_decay=0.9)

    def run(gradients, params):
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(gradients, state, params)
        return updates, state, optim.group_norms(gradients)

    expected = jax.jit(run)(gradients, params)
    mesh = sharding.make_mesh(fsdp=2, tensor=2, context=2)
    with jax.set_mesh(mesh):
        placed = sharding.state_shardings(mesh, params)
        born = sharding.state_shardings(mesh, jax.eval_shape(optimizer.init, params))
        split = jax.jit(run, in_shardings=(placed, placed), out_shardings=(placed, born, None))
        found = split(jax.device_put(gradients, placed), jax.device_put(params, placed))
    # Newton and Schulz's polynomial amplifies the rounding of sums split over devices.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected)
    kernel = found[1].ema["params"]["groups"]["block_0"]["mixer"]["q_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 4, 4)


def test_the_average_follows_its_formula_and_skips_bad_steps():
    params = {"kernel": jnp.full((2, 2), 3.0)}
    optimizer, _ = make(ema_decay=0.3, weight_decay=0.0)
    state = optimizer.init(params)
    average, good = 3.0, 0
    assert optim.evaluation_params(params, state) is state.ema
    for slope in (1.0, np.nan, -2.0, 0.5, np.nan, 1.0):
        updates, state = optimizer.update({"kernel": jnp.full((2, 2), slope)}, state, params)
        params = optax.apply_updates(params, updates)
        if np.isfinite(slope):
            d = min(0.3, (1 + good) / (10 + good))
            average, good = d * average + (1 - d) * float(params["kernel"][0, 0]), good + 1
        np.testing.assert_allclose(state.ema["kernel"], average, rtol=1e-6)
    assert good == 4 and average != float(params["kernel"][0, 0])
    plain, _ = make()
    assert optim.evaluation_params(params, plain.init(params)) is params
    step = jax.jit(lambda state, params: optimizer.update(params, state, params), donate_argnums=(0, 1))
    step(optimizer.init(params), params)  # the average begins at the parameters, in a buffer of its own


def test_norms_per_group():
    params = shapes_of(LanguageModel(8, 16, 2, mixer_options={"efla": {"num_heads": 2}}), jnp.zeros((1, 3), jnp.int32))
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), params)
    norms = optim.group_norms(ones)
    mlp, mixer = 3 * 16 * 64, 4 * 16 * 16 + 16 * 2 + 3 * 4 * 16
    squares = {"embed": 8 * 16, "head": 8 * 16, "mixer": 2 * mixer, "mlp": 2 * mlp, "norm": 16 + 2 * (2 * 16 + 8)}
    assert {name: pytest.approx(value, rel=1e-5) for name, value in squares.items()} == {
        name: float(norm) ** 2 for name, norm in norms.items()}
    classifier = shapes_of(SequenceClassifier(3, 8, 9, ("efla",), {"efla": {"num_heads": 2}}), jnp.zeros((1, 9, 1)))
    names = optim.group_norms(jax.tree.map(lambda leaf: jnp.ones(leaf.shape), classifier))
    assert set(names) == {"embed", "mixer", "norm", "head"}
    assert set(optim.group_norms({"A_log": jnp.ones(2)})) == {"other"}


def test_the_first_bad_leaf_is_named():
    tree = scanned_params()
    names = optim.leaf_names(tree)
    leaves, structure = jax.tree.flatten(tree)
    find = jax.jit(optim.first_bad)
    assert int(find(tree)) == -1
    for bad in ([3], [0, 5], [len(names) - 1]):
        spoilt = [leaf.at[(-1,) * leaf.ndim].set(np.nan if i % 2 else 1e30) if i in bad else leaf
                  for i, leaf in enumerate(leaves)]
        assert int(find(jax.tree.unflatten(structure, spoilt))) == bad[0]
    # Every square is finite and their sum is not.
    assert int(find({"a": jnp.array([1e19]), "b": jnp.array([1.6e19]), "c": jnp.array([1.5e19])})) == 1


def test_norms_and_names_cost_no_second_pass():
    params = {f"mixer_{i}": {"kernel": jnp.ones((64, 64))} for i in range(4)}
    optimizer, _ = make()
    state = optimizer.init(params)

    def cost(reports):
        def step(gradients, state, params):
            return optimizer.update(gradients, state, params), [report(gradients) for report in reports]

        return jax.jit(step).lower(params, state, params).compile().cost_analysis()["flops"]

    assert cost([optim.group_norms, optim.first_bad]) < cost([]) + 0.01 * 4 * 64 * 64
