"""Gated short convolution: the definition token by token, its size, and the hybrid that recall models are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efla_jax.layers import MIXERS
from efla_jax.model import LanguageModel


def test_it_is_its_definition():
    """In float64, row by row; float32 sums of 5 products."""
    mixer = MIXERS["gated_conv"](width=5)
    x = np.random.default_rng(0).standard_normal((2, 7, 5))
    params = mixer.init(jax.random.key(0), jnp.asarray(x, jnp.float32))
    params = jax.tree.map(lambda p: p + 0.3 * np.random.default_rng(p.size).standard_normal(p.shape), params)
    own = params["params"]
    assert jax.tree.map(np.shape, own) == {
        "x_conv": {"weight": (3, 5), "bias": (5,)}, "z_proj": {"kernel": (5, 5), "bias": (5,)},
    }  # fmt: skip
    padded = np.concatenate([np.zeros((2, 2, 5)), x], axis=1)
    conv = sum(own["x_conv"]["weight"][lag] * padded[:, lag : lag + 7] for lag in range(3)) + own["x_conv"]["bias"]
    expected = conv * (x @ own["z_proj"]["kernel"] + own["z_proj"]["bias"]) + x
    y, cache = mixer.apply(params, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(cache.state, x[:, -2:], rtol=1e-6)
    assert cache.segment.tolist() == [1, 1]


def test_heads_change_nothing_and_one_tap_sees_its_own_token():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 4)), jnp.float32)
    params = MIXERS["gated_conv"](width=4, num_heads=1).init(jax.random.key(0), x)
    one, four = (MIXERS["gated_conv"](width=4, num_heads=heads).apply(params, x)[0] for heads in (1, 4))
    np.testing.assert_array_equal(one, four)
    mixer = MIXERS["gated_conv"](width=4, conv_width=1)
    params = mixer.init(jax.random.key(0), x)
    y, cache = mixer.apply(params, x)
    again, _ = mixer.apply(params, x[:, 3:4])
    np.testing.assert_allclose(y[:, 3:4], again, rtol=1e-6)
    assert cache.state.shape == (1, 0, 4)
    with pytest.raises(ValueError, match="conv_width: 0 is less than 1"):
        MIXERS["gated_conv"](width=4, conv_width=0)


@pytest.mark.parametrize("name", MIXERS)
def test_a_wrong_width_is_named(name):
    mixer = MIXERS[name](width=8, num_heads=2)
    params = jax.eval_shape(mixer.init, jax.random.key(0), jnp.zeros((1, 3, 8)))
    message = r"x: shape \(1, 3, 6\) has 6 channels, but the mixer has width=8"
    for call in (mixer.init, functools.partial(mixer.apply, params)):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(call, *([jax.random.key(0)] if call == mixer.init else []), jnp.zeros((1, 3, 6)))


def test_the_hybrid_has_it_in_the_first_layer():
    model = LanguageModel(11, 8, 2, ("gated_conv", "efla"), {"gated_conv": {"num_heads": 1}, "efla": {"num_heads": 2}})
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["params"]["groups"]
    assert set(params["block_0"]["mixer"]) == {"x_conv", "z_proj"} and "q_proj" in params["block_1"]["mixer"]
