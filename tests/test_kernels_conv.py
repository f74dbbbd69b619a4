"""The short convolution's kernels in Mosaic's interpreter against loops in float64, and their lowering for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels import causal_conv as kernel
from efla_jax.ops.pallas_conv import windowed
from tests import ptxas
from tests.lowering import lower_cuda, mosaic_calls
from tests.oracle import relative_rms

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
RACE = "RACE DETECTED"
# Parts of three steps and memory for two of them, so that a few tokens take every path.
SMALL = kernel.Config(rows=2, slots=2, tokens=6, programs=1)
NAMES = ("y", "dx", "dweight", "dbias", "dbefore")
# Sums are float32: 2^-24 of each term. y and dx are rounded once to the dtype of x: half of 2^-7 (bfloat16), at most.
EXACT, ROUNDED = 1e-6, {"float32": 1e-6, "bfloat16": 4e-3, "float16": 5e-4}
CASES = {  # (B, T, D, W), dtype, reach, bias, before, activation
    "a part and a tail": ((1, 9, 128, 4), "float32", False, False, False, None),
    "four parts": ((2, 15, 128, 2), "bfloat16", False, True, False, None),
    "documents": ((3, 12, 256, 4), "bfloat16", True, True, True, None),
    "two columns": ((1, 6, 512, 3), "float32", True, True, True, "silu"),
    "fewer tokens than taps": ((2, 3, 128, 5), "float16", True, False, True, "silu"),
    "one token": ((1, 1, 128, 2), "float32", False, True, True, None),
    "more taps than a part has tokens": ((1, 15, 128, 8), "float32", False, False, False, "silu"),
    "documents through silu": ((2, 15, 128, 4), "bfloat16", True, False, False, "silu"),
    "silu goes on": ((1, 13, 128, 4), "float32", False, True, True, "silu"),
}


def case(name, seed=0):
    """(x, weight, bias, before, reach), cotangent; with a reach the last two tokens are padding."""
    (batch, time, width, taps), dtype, reached, biased, continued, _ = CASES[name]
    rng = np.random.default_rng(seed)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.normal(size=shape), dtype)

    reach = None
    if reached:
        reach = rng.integers(0, taps, size=(batch, time))
        reach[:, -2:] = kernel.PADDING
        reach = jnp.asarray(reach, jnp.int32)
    weight, bias = normal(taps, width, dtype="float32"), normal(width, dtype="float32") if biased else None
    before = normal(batch, taps - 1, width, dtype="float32") if continued else None
    return (normal(batch, time, width), weight, bias, before, reach), normal(batch, time, width)


def loops(x, weight, bias, before, reach, d_y, activation):
    """NAMES in float64, one pair of a token and an input at a time."""
    x, weight, d_y = (np.asarray(a, np.float64) for a in (x, weight, d_y))
    taps = weight.shape[0]
    early = np.zeros((x.shape[0], taps - 1, x.shape[2])) if before is None else np.asarray(before, np.float64)
    inputs = np.concatenate([early, x], axis=1)
    reach = np.full(x.shape[:2], taps - 1) if reach is None else np.asarray(reach)
    pairs = [(b, t, lag) for b, t, lag in np.ndindex(*x.shape[:2], taps) if lag <= reach[b, t]]
    sums = np.zeros_like(x) + (0 if bias is None else np.asarray(bias, np.float64))
    for b, t, lag in pairs:
        sums[b, t] += weight[taps - 1 - lag] * inputs[b, t + taps - 1 - lag]
    y, d_sums = sums, d_y
    if activation == "silu":
        sigmoid = 1 / (1 + np.exp(-sums))
        y, d_sums = sums * sigmoid, d_y * sigmoid * (1 + sums * (1 - sigmoid))
    real = (reach >= 0)[..., None]
    y, d_sums = np.where(real, y, 0), np.where(real, d_sums, 0)
    d_inputs, d_weight = np.zeros_like(inputs), np.zeros_like(weight)
    for b, t, lag in pairs:
        tap, place = taps - 1 - lag, t + taps - 1 - lag
        d_inputs[b, place] += weight[tap] * d_sums[b, t]
        d_weight[tap] += d_sums[b, t] * inputs[b, place]
    return y, d_inputs[:, taps - 1 :], d_weight, d_sums.sum((0, 1)), d_inputs[:, : taps - 1]


@functools.cache
def compiled(config=SMALL, activation=None):
    def run(arguments, d_y):
        *floating, reach = arguments
        y, pull = jax.vjp(lambda *a: windowed(*a, reach, activation, config, INTERPRET), *floating)
        return y, *pull(d_y)

    return jax.jit(run)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_the_loops(name, capfd):
    (arguments, d_y), activation = case(name), CASES[name][-1]
    found = compiled(activation=activation)(arguments, d_y)
    for what, value, truth in zip(NAMES, found, loops(*arguments, d_y, activation), strict=True):
        if value is None:
            assert arguments[{"dbias": 2, "dbefore": 3}[what]] is None
            continue
        wide = what in ("dweight", "dbias", "dbefore")
        assert value.dtype == (jnp.float32 if wide else d_y.dtype) and value.shape == truth.shape, what
        error = relative_rms(value, truth)
        assert error < (EXACT if wide else ROUNDED[d_y.dtype.name]), (what, error)
    captured = capfd.readouterr()
    assert RACE not in captured.out + captured.err


def test_what_lies_beyond_the_reach_is_not_seen():
    """A document of infinities leaves the outputs of the next one, and their gradients, as they are."""
    (x, weight, bias, _, _), d_y = case("four parts")
    reach = jnp.asarray(np.minimum(np.arange(15) % 7, 1), jnp.int32)[None].repeat(2, axis=0)  # documents of 7 tokens
    y, d_x, *_ = compiled()((x, weight, bias, None, reach), d_y)
    y_spoilt, _, *_ = compiled()((x.at[:, :7].set(jnp.inf), weight, bias, None, reach), d_y)
    _, d_x_spoilt, *_ = compiled()((x, weight, bias, None, reach), d_y.at[:, 7:].set(jnp.inf))
    np.testing.assert_array_equal(y_spoilt[:, 7:], y[:, 7:])
    np.testing.assert_array_equal(d_x_spoilt[:, :7], d_x[:, :7])


def test_what_stands_at_padding_is_not_seen():
    """Infinities there leave every output and gradient as it is, and those of padding are exactly zero."""
    (x, weight, bias, before, reach), d_y = case("documents through silu")
    padding = (reach < 0)[..., None]
    run = compiled(activation="silu")
    found = run((x, weight, bias, before, reach), d_y)
    x, d_y = jnp.where(padding, jnp.nan, x), jnp.where(padding, jnp.inf, d_y)
    for value, spoilt in zip(found[:3], run((x, weight, bias, before, reach), d_y)[:3], strict=True):
        np.testing.assert_array_equal(value, spoilt)
    assert not np.any(np.where(padding, found[0], 0)) and not np.any(np.where(padding, found[1], 0))


def test_silu_of_what_an_exponential_overflows():
    x = jnp.full((1, 2, 128), -200.0).at[0, 1].set(200.0)
    run = compiled(activation="silu")
    y, d_x, *_ = run((x, jnp.array([[0.0], [1.0]]) + jnp.zeros((2, 128)), None, None, None), jnp.ones_like(x))
    np.testing.assert_array_equal(y, jnp.maximum(x, 0))
    np.testing.assert_array_equal(d_x, x > 0)


def test_neither_repetition_nor_the_cut_of_the_time_changes_a_bit():
    """Of what is summed within a program; sums over programs differ in their order."""
    arguments, d_y = case("documents")
    first = compiled()(arguments, d_y)
    for value, again in zip(first, compiled()(arguments, d_y), strict=True):
        np.testing.assert_array_equal(value, again)
    for value, other in zip(
        first[:2], compiled(kernel.Config(rows=4, tokens=4, programs=1))(arguments, d_y), strict=False
    ):
        np.testing.assert_array_equal(value, other)


def test_vmap_equals_one_at_a_time():
    (some, d_some), (others, d_others) = case("a part and a tail"), case("a part and a tail", seed=1)
    both = tuple(jnp.stack(pair) for pair in ((some[0], others[0]), (some[1], others[1]), (d_some, d_others)))
    mapped = jax.vmap(lambda x, weight, d_y: compiled()((x, weight, None, None, None), d_y)[:3])(*both)
    for i, (arguments, d_y) in enumerate(((some, d_some), (others, d_others))):
        for value, alone in zip(mapped, compiled()(arguments, d_y)[:3], strict=True):
            np.testing.assert_array_equal(value[i], alone)


def lowered(shape, taps, dtype, reached, biased, continued, activation, config=None):
    """The program of the value and of all gradients."""
    batch, time, width = shape
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    x = jax.ShapeDtypeStruct(shape, dtype)
    floating = x, float32((taps, width)), float32((width,)) if biased else None
    before = jax.ShapeDtypeStruct((batch, taps - 1, width), dtype) if continued else None
    reach = jax.ShapeDtypeStruct((batch, time), jnp.int32) if reached else None

    def run(floating, reach, d_y):
        y, pull = jax.vjp(lambda *a: windowed(*a, reach, activation, config), *floating)
        return y, pull(d_y)

    return lower_cuda(run, (*floating, before), reach, x)


SHAPES = [
    ((16, 2048, 1024), 4, jnp.bfloat16, False, False, False, None),
    ((16, 2048, 1024), 4, jnp.bfloat16, True, False, False, "silu"),
    ((16, 2048, 1024), 4, jnp.bfloat16, True, False, True, None),
    ((1, 32768, 384), 3, jnp.float16, True, True, True, "silu"),
    ((3, 1001, 640), 8, jnp.float32, True, True, False, "silu"),
    ((2, 1, 128), 2, jnp.bfloat16, True, True, True, None),
]


@pytest.mark.parametrize("shape, taps, dtype, reached, biased, continued, activation", SHAPES)
def test_lowers_for_cuda(shape, taps, dtype, reached, biased, continued, activation):
    assert mosaic_calls(lowered(shape, taps, dtype, reached, biased, continued, activation)) == 2


@pytest.mark.slow
# The assembler comes with the CUDA plugin, which a machine without a GPU need not have; lowering is tested without.
@pytest.mark.skipif(ptxas.missing() is not None, reason=str(ptxas.missing()))
@pytest.mark.parametrize("shape, taps, dtype, reached, biased, continued, activation", SHAPES)
def test_nothing_is_spilled(shape, taps, dtype, reached, biased, continued, activation):
    for kernel_usage in ptxas.usage(lowered(shape, taps, dtype, reached, biased, continued, activation)):
        assert kernel_usage.spilled == 0


@pytest.mark.parametrize(
    "shape, taps, dtype, reason",
    [
        ((1, 4, 96), 4, jnp.float32, "multiple of 128"),
        ((1, 4, 128), 1, jnp.float32, "1 taps"),
        ((1, 4, 128), 9, jnp.float32, "9 taps"),
        ((1, 4, 128), 4, jnp.float8_e4m3fn, "float8"),
        ((0, 4, 128), 4, jnp.float32, "nothing"),
    ],
)
def test_the_rest_is_refused(shape, taps, dtype, reason):
    x, weight = jnp.zeros(shape, dtype), jnp.zeros((taps, shape[2]))
    with pytest.raises(NotImplementedError, match=reason):
        windowed(x, weight, None, None, None, None, None, INTERPRET)


def test_another_activation_is_refused():
    x, weight = jnp.zeros((1, 4, 128)), jnp.zeros((4, 128))
    with pytest.raises(NotImplementedError, match="activation 'relu'"):
        windowed(x, weight, None, None, None, "relu", None, INTERPRET)


def test_other_devices_are_refused():
    with pytest.raises(NotImplementedError, match="Hopper"):
        windowed(jnp.zeros((1, 4, 128)), jnp.zeros((4, 128)), None, None, None)
