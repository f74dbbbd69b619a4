"""Level weights: where they begin in whole models, their maths in numpy, untrained levels, sizes, signals."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from scipy.special import erf

from efla_jax import optim
from efla_jax.layers import MIXERS, LevelWeights, Reading, signals
from efla_jax.layers.initializers import KERNELS
from efla_jax.layers.level_weights import completed, logging, note_untrained
from efla_jax.model import LanguageModel, SequenceClassifier
from tests.oracle import relative_rms

WIDTH, TIME, LEVELS = 16, 6, 5
# One mixer of each kind that begins at an exact value, quick to compile.
QUICK = {"num_heads": 2, "levels": LEVELS, "implementation": "recurrent"}
BEGIN_EXACTLY = {
    "log_linear_mamba2": {**QUICK, "state_dim": 4, "level_kind": "mlp_softplus"},
    "log_linear_gated_delta_net": {**QUICK, "level_kind": "mlp_softmax"},
    "log_linear_efla": {**QUICK, "level_bias": True},
}
BASES = {name: name.removeprefix("log_linear_") for name in BEGIN_EXACTLY}


def initial_weights(module, *inputs):
    """Whatever LevelWeights modules return right after initialisation, in the order of the mixers."""

    def run(key):
        capture = {"capture_intermediates": lambda m, _: isinstance(m, LevelWeights), "mutable": True}
        return module.init_with_output(key, *inputs, **capture)[1]["intermediates"]

    return jax.tree.leaves(jax.jit(run)(jax.random.key(0)))


def filled(module, x, seed=3):
    """Parameters like the module's, none of them special, without a compilation."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)
    return jax.tree.map(lambda s: jnp.asarray(0.5 * rng.normal(size=s.shape), s.dtype), shapes)


@pytest.mark.parametrize("kernel_init, dtype", [("lecun", "float32"), ("normal", "bfloat16")])
def test_where_weights_begin_in_a_language_model(kernel_init, dtype):
    """What the published scripts lost by initialising once more. In every layer, for every token, head and level."""
    model = LanguageModel(
        31, WIDTH, 6, tuple(BEGIN_EXACTLY), BEGIN_EXACTLY, mlp="none", kernel_init=kernel_init, dtype=dtype
    )
    found = initial_weights(model, jnp.arange(2 * TIME).reshape(2, TIME))
    assert all(w.shape == (2, 2, TIME, 2, LEVELS) and w.dtype == jnp.float32 for w in found)
    for begun, value in zip(found, (1.0, 1 / LEVELS, 1.0), strict=True):
        np.testing.assert_allclose(begun, value, atol=1e-6)


def test_where_weights_begin_in_a_classifier():
    names = (*BEGIN_EXACTLY, "log_linear_efla")
    model = SequenceClassifier(3, WIDTH, TIME, names, BEGIN_EXACTLY)
    found = initial_weights(model, jax.random.normal(jax.random.key(1), (2, TIME, 1)))
    for begun, value in zip(found, (1.0, 1 / LEVELS, 1.0, 1.0), strict=True):
        np.testing.assert_allclose(begun, value, atol=1e-6)


@pytest.mark.parametrize("kernel_init", KERNELS)
def test_where_weights_begin_with_every_kernel(kernel_init):
    x = 3 * inputs()
    for kind, value in (("mlp_softplus", 1.0), ("mlp_softmax", 1 / 4), ("linear", 1.0)):
        weights = module(kind, kernel_init=kernel_init, level_bias=kind == "linear")
        np.testing.assert_allclose(weights.apply(weights.init(jax.random.key(0), x), x), value, atol=1e-6)


def module(kind, **options):
    return LevelWeights(num_heads=3, levels=4, level_kind=kind, level_hidden=7, **options)


@functools.cache
def perturbed(kind, **options):
    params = module(kind, **options).init(jax.random.key(0), jnp.zeros((1, 1, WIDTH)))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda p: p + rng.normal(size=p.shape).astype(np.float32), params)


def inputs(time=TIME):
    return jnp.asarray(np.random.default_rng(2).normal(size=(2, time, WIDTH)), jnp.float32)


def in_numpy(kind, p, x, gelu=True):
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), p["params"])
    raw = (np.asarray(x, np.float64) @ p["level_proj"]["kernel"]).reshape(*x.shape[:2], 3, 4)  # heads, then levels
    if kind == "linear":
        return np.logaddexp(p["scale"] * raw + p.get("shift", 0.0), 0)
    inner = raw @ p["hidden"]["kernel"] + p["hidden"]["bias"]
    inner = inner * (1 + erf(inner / np.sqrt(2))) / 2 if gelu else inner
    logits = inner @ p["out"]["kernel"] + p["out_bias"]
    if kind == "mlp_softplus":
        return np.logaddexp(logits, 0)
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("linear", {}), ("linear", {"level_bias": True}), ("mlp_softplus", {}), ("mlp_softmax", {}),
        ("mlp_softplus", {"level_gelu": False}), ("mlp_softmax", {"level_gelu": False}),
    ],
)  # fmt: skip
def test_weights_against_numpy(kind, options):
    params, x = perturbed(kind, **options), inputs()
    expected = in_numpy(kind, params, x, options.get("level_gelu", True))
    assert relative_rms(module(kind, **options).apply(params, x), expected) <= 1e-6
    rounded = module(kind, dtype="bfloat16", **options).apply(params, x)
    assert rounded.dtype == jnp.float32 and 1e-5 < relative_rms(rounded, expected) <= 3e-2  # of logits of size about 4


def test_linear_without_bias_is_the_published_start():
    """softplus(0) at a zero projection, and softplus of the projection itself at initialisation."""
    x = inputs()
    params = module("linear").init(jax.random.key(0), x)
    raw = (x @ params["params"]["level_proj"]["kernel"]).reshape(2, TIME, 3, 4)
    np.testing.assert_allclose(module("linear").apply(params, x), np.logaddexp(raw, 0), rtol=1e-5)
    np.testing.assert_allclose(module("linear").apply(params, 0 * x), np.log(2), rtol=1e-6)


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "name, sizes, count",
    [
        ("log_linear_mamba2", {"num_heads": 48, "head_dim": 64}, 1_106_640),
        ("log_linear_gated_delta_net", {"num_heads": 6, "head_dim": 192}, 138_330),
    ],
)
def test_published_counts_of_a_layer(name, sizes, count):
    """At width 1536 with 15 levels, over the mixer without levels."""
    x = jnp.zeros((1, 4, 1536))
    ours, base = (
        jax.eval_shape(MIXERS[mixer](width=1536, **sizes).init, jax.random.key(0), x) for mixer in (name, BASES[name])
    )
    assert size(ours) - size(base) == count


@pytest.mark.parametrize("levels, hidden, count", [(15, 64, 1999), (9, 64, 1225), (8, 64, 1096), (15, 0, 945)])
def test_published_counts_of_the_mlp(levels, hidden, count):
    """2 L hidden + hidden + L beside the projection, whatever the heads; hidden 0 is 2 L."""
    mlp = LevelWeights(num_heads=3, levels=levels, level_kind="mlp_softplus", level_hidden=hidden)
    shapes = jax.eval_shape(mlp.init, jax.random.key(0), jnp.zeros((1, 1, WIDTH)))["params"]
    assert size(shapes) - shapes["level_proj"]["kernel"].size == count


def test_levels_without_a_trained_weight():
    known = jnp.asarray([[4.0, 2.0, 1.0, 9.0], [1.0, 1.0, 3.0, 9.0], [1.0, 0.0, 0.0, 9.0]])
    tied, further = (completed(known, 3, 6, rule) for rule in ("tie", "extrapolate"))
    np.testing.assert_allclose(tied[:, 2:], [[1] * 4, [3] * 4, [0] * 4])
    np.testing.assert_allclose(further[:, 2:], [[1, 0.5, 0.25, 0.125], [3] * 4, [0] * 4])  # never growing
    np.testing.assert_array_equal(tied[:, :3], known[:, :3])
    assert completed(known, 4, 4, "extrapolate") is known
    slopes = jax.grad(lambda w: jnp.sum(completed(w, 3, 6, "extrapolate")))(known)
    assert np.isfinite(slopes).all()


def mixer(name, **options):
    return MIXERS[name](**{"width": WIDTH, **BEGIN_EXACTLY[name], **options})


def test_what_longer_documents_read():
    """Tied levels with slots of their own read what a shared slot does; extrapolated ones do not; columns of untrained
    levels are not looked at."""
    name, x = "log_linear_efla", inputs(40)
    options = {"level_bias": False, "levels": 3}
    params = filled(mixer(name, **options), x)
    shared, tied, further = (
        jax.jit(mixer(name, **options, **more).apply)(params, x)[0]
        for more in ({}, {"max_levels": 7}, {"max_levels": 7, "untrained_levels": "extrapolate"})
    )
    assert relative_rms(tied, shared) <= 1e-5
    assert relative_rms(further[:, :4], shared[:, :4]) <= 1e-5 < 1e-3 < relative_rms(further[:, 4:], shared[:, 4:])

    def columns(leaf):  # of levels 2 and 3 of four
        return leaf.at[..., 2:].set(7.0) if leaf.shape[-1] == 4 else leaf.reshape(-1, 2, 4).at[..., 2:].set(7.0)

    wide = mixer(name, level_bias=False, levels=4, trained_levels=2)
    params = filled(wide, x)
    theirs = {"params": dict(params["params"])}
    theirs["params"]["level_weights"] = jax.tree.map(
        lambda leaf: columns(leaf).reshape(leaf.shape), params["params"]["level_weights"]
    )
    run = jax.jit(wide.apply)
    np.testing.assert_array_equal(run(params, x)[0], run(theirs, x)[0])


@pytest.mark.parametrize("name", ["log_linear_mamba2", "log_linear_gated_delta_net", "log_linear_efla"])
def test_weights_of_one_are_the_mixer_without_levels(name):
    """Output and, summed over levels, state; the parameters of the base are a part of ours."""
    ours, x = mixer(name, level_kind="linear", level_bias=True, implementation="auto"), inputs(21)
    fields = {k: v for k, v in BEGIN_EXACTLY[name].items() if k in ("num_heads", "state_dim")}
    base = MIXERS[BASES[name]](width=WIDTH, **fields)
    params, theirs = (filled(m, x)["params"] for m in (ours, base))
    assert set(params) == set(theirs) | {"level_weights"}
    levels = LevelWeights(num_heads=2, levels=LEVELS, level_bias=True).init(jax.random.key(0), x)["params"]
    y, cache = jax.jit(ours.apply)({"params": theirs | {"level_weights": levels}}, x)
    expected, after = jax.jit(base.apply)({"params": theirs}, x)
    assert relative_rms(y, expected) <= 2e-5
    assert relative_rms(np.sum(cache.state.states, axis=2), after.state) <= 2e-5


@pytest.mark.parametrize("kind", ["linear", "mlp_softplus", "mlp_softmax"])
def test_every_parameter_learns(kind):
    name = "log_linear_efla"
    module, x = mixer(name, level_kind=kind, level_bias=kind == "linear"), inputs()
    params = filled(module, x)
    slopes = jax.jit(jax.grad(lambda p: jnp.sum(module.apply(p, x)[0] ** 2)))(params)["params"]["level_weights"]
    assert all(np.any(leaf) and np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


@pytest.mark.parametrize("kind", ["linear", "mlp_softplus"])
def test_what_decays_and_what_muon_leaves(kind):
    params = {"params": {"mixer": {"level_weights": perturbed(kind, level_bias=kind == "linear")["params"]}}}
    decays = dict(zip(optim.leaf_names(params), jax.tree.leaves(optim.decay_mask(params)), strict=True))
    assert {path.split("level_weights/")[1] for path, decay in decays.items() if not decay} == (
        {"scale", "shift"} if kind == "linear" else {"hidden/bias", "out_bias"}
    )
    assert set(jax.tree.leaves(optim.algorithms(params))) == {"adamw"}


def test_signals_tell_of_real_tokens_and_have_gradients_where_all_weights_are_equal():
    module, x = mixer("log_linear_efla"), inputs()
    ids = jnp.asarray([[1, 1, 1, 1, 0, 0], [1, 1, 2, 2, 2, 2]], jnp.int32)
    params = jax.jit(module.init)(jax.random.key(0), x)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def told(params):
        _, state = module.apply(
            params, x, ids, capture_intermediates=lambda m, _: isinstance(m, Reading), mutable="intermediates"
        )
        scalars = signals(state["intermediates"])
        return scalars["level_weight_mean"] + scalars["level_contrast_mean"], scalars

    (_, scalars), slopes = told(params)
    levels = {name: float(value) for name, value in scalars.items() if name.startswith("level_")}
    assert len(levels) == 10
    assert all(value == pytest.approx(1.0 if "weight" in name else 0.0, abs=1e-5) for name, value in levels.items())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))
    assert np.any(slopes["params"]["level_weights"]["shift"])
    moved = jax.tree.map(lambda p: p, params)
    moved["params"]["level_weights"]["shift"] += jnp.asarray([[0, 0, 0, 0, 9.0]])  # softplus(9.54) = 9.54
    (_, scalars), _ = told(moved)
    mean = (4 + 9.5414) / 5
    assert scalars["level_weight_mean"] == pytest.approx(mean, rel=1e-3)
    assert scalars["level_contrast_mean"] == pytest.approx(8 * (mean - 1) / 5 / mean, rel=1e-3)


def test_a_cache_of_another_number_of_levels_is_refused():
    x, few, more = inputs(4), *(mixer("log_linear_efla", levels=4, max_levels=slots) for slots in (4, 6))
    with pytest.raises(ValueError, match="cache: its states have 4 levels, but this mixer has max_levels=6; begin"):
        more.apply(filled(more, x), x, None, few.init_cache(x.shape[0]))


def test_lengths_beyond_the_trained_levels_are_said_once():
    note_untrained.cache_clear()
    module = mixer("log_linear_efla", levels=4, trained_levels=3, max_levels=6)
    run = functools.partial(jax.eval_shape, module.init, jax.random.key(0))
    with mock.patch.object(logging, "warning") as said:
        run(inputs(4))
        module.init_cache(2, max_length=4)
        assert not said.called
        run(inputs(5))
        run(inputs(5))
        assert said.call_count == 1
        module.init_cache(2, max_length=6)
        assert said.call_count == 2
    template, *values = said.call_args.args
    assert "more than 2^2 = 4 tokens reach levels beyond the 3 trained ones" in template % tuple(values)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"levels": 1}, "levels: 1 is less than 2"),
        ({"levels": 4.5}, "levels: 4.5 is not a whole number; write one that is at least 2"),
        ({"max_levels": -1}, "max_levels: -1 is less than 0"),
        ({"level_kind": "mlp_softmx"}, "level_kind: 'mlp_softmx' is not one of .*Did you mean"),
        ({"level_kind": "mlp_softmax", "level_bias": True}, "level_bias: True, but level_kind='mlp_softmax'"),
        ({"level_hidden": -1}, "level_hidden: -1 is less than 0"),
        ({"levels": 4, "trained_levels": 5}, "trained_levels: 5 is not between 1 and levels=4"),
        ({"trained_levels": 1, "untrained_levels": "extrapolate"}, "trained_levels: 1 is not between 2"),
        ({"untrained_levels": "zero"}, "untrained_levels: 'zero' is not one of"),
        ({"levels": 4, "max_levels": 3}, "max_levels: 3 slots are fewer than levels=4"),
    ],
)
def test_wrong_fields_are_errors_when_the_mixer_is_built(options, message):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        for module in (MIXERS["log_linear_efla"], LevelWeights):
            width = {"width": WIDTH} if module is not LevelWeights else {}
            with pytest.raises(ValueError, match=message):
                module(num_heads=2, **width, **options)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
