"""The one-token kernel of the log-linear operators in Mosaic's interpreter against the float64 oracle, its lowering for
CUDA, and what it leaves alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels import log_linear_step as kernel
from efla_jax.ops import pallas_log_linear_step
from efla_jax.ops.fenwick import FenwickState, fenwick, fenwick_recurrent
from tests.cases import recurrence_case
from tests.lowering import lower_cuda, mosaic_calls
from tests.oracle import assert_close, fenwick_and_gradients

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
NAMES = ("o", "states", "dq", "dk", "du", "derase", "dlog_decay", "dlevel_weights", "dinitial_states")
# The states are float32 throughout (1e-5: see oracle.TOLERANCE); o is rounded once to u's dtype (half of 2^-8).
ERROR = {"float32": {"o": 1e-5, "states": 1e-5}, "bfloat16": {"o": 4e-3, "states": 1e-5}}
SHAPES = {
    "values as wide as the warpgroup": dict(key_heads=1, heads=2, key_dim=8, value_dim=128),
    "two rows side by side": dict(key_heads=1, heads=1, key_dim=16, value_dim=64),
    "two blocks of columns": dict(key_heads=1, heads=1, key_dim=8, value_dim=256),
}


@functools.cache
def compiled(erases: bool):
    def run(q, k, u, erase, log_decay, weights, states, position, ids):
        f = fenwick(q, k, u, erase if erases else None, log_decay, weights, FenwickState(states, position), ids)
        return pallas_log_linear_step.one_token(f, INTERPRET)

    return jax.jit(run)


@pytest.fixture(params=(1, 10**9), ids=("a program for all slots", "a program for each slot"))
def shares(request, monkeypatch):
    monkeypatch.setattr(kernel, "PROGRAMS", request.param)
    compiled.cache_clear()
    yield
    compiled.cache_clear()


def case(position, levels=6, dtype=jnp.float32, shape="values as wide as the warpgroup", seed=0):
    """((q, k, u, erase, log_decay, weights, states), position) with states in the slots that the positions have."""
    position = np.asarray(position, np.int32)
    options = dict(batch=len(position), time=1, **SHAPES[shape])
    (q, k, u, erase, log_decay, state), _ = recurrence_case("random", dtype, seed, **options)
    rng, live = (
        np.random.default_rng(seed + 1),
        np.asarray(pallas_log_linear_step.live_slots(jnp.asarray(position), levels)),
    )
    states = rng.normal(size=(*state.shape[:2], levels, *state.shape[2:]))
    states *= (live[:, None] >> np.arange(levels) & 1)[:, None, :, None, None]
    weights = jnp.asarray(rng.normal(size=(*u.shape[:3], levels)), jnp.float32)
    return (q, k, u, erase, log_decay, weights, jnp.asarray(states, jnp.float32)), jnp.asarray(position)


def expected(arguments, position, erases, ids=None):
    """(o, states) of the oracle."""
    gates = arguments[3] if erases else arguments[3] * 0
    zeros = tuple(jnp.zeros(x.shape) for x in (arguments[2], arguments[6]))
    return fenwick_and_gradients((*arguments[:3], gates, *arguments[4:]), ids, np.asarray(position), zeros)[0]


@pytest.mark.slow
@pytest.mark.parametrize("erases", (True, False))
def test_one_token_equals_the_oracle(erases, shares):
    """Positions whose token merges nothing, some slots, all of them, and into the last slot that is there already."""
    arguments, position = case((4, 7, 63))
    found = compiled(erases)(*arguments, position, None)
    for name, value, reference in zip(NAMES, found, expected(arguments, position, erases), strict=False):
        assert_close((value,), (reference,), (name,), ERROR["float32"][name])


@pytest.mark.slow
@pytest.mark.parametrize("levels", (1, 2, 3, 9))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("erases", (True, False))
def test_sizes_and_levels(shape, levels, erases, shares):
    arguments, position = case((1, 6, 11), levels, shape=shape)
    truth = expected(arguments, position, erases)
    assert_close(compiled(erases)(*arguments, position, None), truth, NAMES[:2], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("erases", (True, False))
def test_sixteen_bits(erases, shares):
    arguments, position = case((5, 23), dtype=jnp.bfloat16)
    found = compiled(erases)(*arguments, position, None)
    assert found[0].dtype == jnp.bfloat16
    for name, value, reference in zip(NAMES, found, expected(arguments, position, erases), strict=False):
        assert_close((value,), (reference,), (name,), ERROR["bfloat16"][name])


def test_many_tokens_one_after_the_other():
    """From nothing on, so that every slot comes and goes."""
    (q, k, u, erase, log_decay, weights, states), position = case((0,), levels=3, shape="two rows side by side")
    rng, states = np.random.default_rng(5), states * 0
    truth = states
    for t in range(6):
        u = jnp.asarray(rng.normal(size=u.shape), u.dtype)
        o, states = compiled(True)(q, k, u, erase, log_decay, weights, states, position + t, None)
        f = fenwick(q, k, u, erase, log_decay, weights, FenwickState(truth, position + t), None)
        right, truth = fenwick_recurrent(f, 1)
        assert_close((o, states), (right, truth), NAMES[:2], 1e-5)


@pytest.mark.slow
def test_padding_leaves_the_states_alone():
    arguments, position = case((7, 7))
    o, states = compiled(True)(*arguments, position, jnp.array([[0], [7]]))
    np.testing.assert_array_equal(states[0], arguments[6][0])
    np.testing.assert_array_equal(o[0], np.zeros_like(o[0]))
    np.testing.assert_array_equal(states[1], compiled(True)(*arguments, position, None)[1][1])


@pytest.mark.slow
def test_slots_that_the_position_has_not_are_not_touched():
    """What stands there may be anything, and stays."""
    arguments, position = case((8,), levels=6)
    strange = arguments[6].at[:, :, 2].set(jnp.nan)
    o, states = compiled(True)(*arguments[:6], strange, position, None)
    right = compiled(True)(*arguments, position, None)
    np.testing.assert_array_equal(o, right[0])
    np.testing.assert_array_equal(np.delete(states, 2, axis=2), np.delete(right[1], 2, axis=2))
    assert np.isnan(states[:, :, 2]).all()


@pytest.mark.slow
def test_gradients_are_those_of_the_definition():
    arguments, position = case((3, 4))
    cotangents = jnp.ones(arguments[2].shape), jnp.ones(arguments[6].shape)
    _, pull = jax.vjp(lambda *a: compiled(True)(*a, position, None), *arguments)
    _, slopes = fenwick_and_gradients(arguments, None, np.asarray(position), cotangents)
    *found, d_states = pull(cotangents)
    *slopes, right = slopes
    live = np.asarray(arguments[6]) != 0  # slots that the position has not are none of its state
    assert_close((*found, np.where(live, d_states, 0.0)), (*slopes, np.where(live, right, 0.0)), NAMES[2:], 1e-5)


@pytest.mark.slow
def test_vmap_is_one_call_with_more_rows():
    (some, position), (others, other) = case((6,)), case((7,), seed=1)
    both = [jnp.stack(pair) for pair in zip(some, others, strict=True)]
    run = jax.vmap(lambda *a: compiled(True)(*a, None))
    o, states = run(*both, jnp.stack([position, other]))
    for i, (alone, start) in enumerate(((some, position), (others, other))):
        for value, reference in zip((o[i], states[i]), compiled(True)(*alone, start, None), strict=True):
            np.testing.assert_array_equal(value, reference)


LOWERED = [
    ((64, 1, 48, 128, 64, 15), jnp.bfloat16, False),
    ((1, 1, 48, 128, 64, 18), jnp.bfloat16, False),
    ((64, 16, 16, 128, 128, 18), jnp.bfloat16, True),
    ((1, 6, 6, 128, 384, 15), jnp.float32, True),
]


def lowered(sizes, dtype, erases):
    batch, key_heads, heads, key_dim, value_dim, levels = sizes
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    keys = jax.ShapeDtypeStruct((batch, 1, key_heads, key_dim), dtype)
    values, gate = jax.ShapeDtypeStruct((batch, 1, heads, value_dim), dtype), float32((batch, 1, heads))
    states, position = float32((batch, heads, levels, key_dim, value_dim)), jax.ShapeDtypeStruct((batch,), jnp.int32)

    def run(q, k, u, erase, log_decay, weights, states, position):
        f = fenwick(q, k, u, erase if erases else None, log_decay, weights, FenwickState(states, position), None)
        return pallas_log_linear_step.one_token(f)

    return lower_cuda(run, keys, keys, values, gate, gate, float32((batch, 1, heads, levels)), states, position)


@pytest.mark.parametrize("sizes, dtype, erases", LOWERED, ids=str)
def test_lowers_for_cuda_in_place(sizes, dtype, erases):
    program = lowered(sizes, dtype, erases)
    assert mosaic_calls(program) == 1
    # Output 1 of the call, the states, takes the buffer of the last operand.
    assert "output_operand_alias<output_tuple_indices = [1], operand_index = 6" in program.as_text()


def test_more_tokens_are_refused(monkeypatch):
    monkeypatch.setattr(pallas_log_linear_step, "require_hopper", lambda op: "NVIDIA H200")
    (q, k, u, erase, log_decay, _), _ = recurrence_case("random", batch=1, time=2, **SHAPES["two rows side by side"])
    f = fenwick(q, k, u, erase, log_decay, jnp.ones((*u.shape[:3], 3)), None, None)
    with pytest.raises(NotImplementedError, match="T = 1"):
        pallas_log_linear_step.one_token(f)
