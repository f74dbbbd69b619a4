"""The one-token kernel in Mosaic's interpreter against the float64 oracle, and its lowering for CUDA."""

import os

os.environ.setdefault("NPROC", "8")  # a waiting warpgroup blocks a thread of XLA's pool: more of them than warpgroups

import functools  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from efla_jax.kernels import delta_step  # noqa: E402
from efla_jax.ops import pallas_step  # noqa: E402
from efla_jax.ops.arguments import recurrence  # noqa: E402
from tests.cases import recurrence_case  # noqa: E402
from tests.lowering import lower_cuda, mosaic_calls  # noqa: E402
from tests.oracle import assert_close, recurrence_and_gradients  # noqa: E402

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
NAMES = ("o", "state", "dq", "dk", "du", "derase", "dlog_decay", "dinitial_state")
# The state is float32 throughout (1e-5: see oracle.TOLERANCE); the output is rounded once to u's dtype (half of 2^-8).
ERROR = {"float32": {"o": 1e-5, "state": 1e-5}, "bfloat16": {"o": 4e-3, "state": 1e-5}}
SHAPES = {
    "values as wide as the warpgroup": dict(key_heads=2, heads=4, key_dim=16, value_dim=128),
    "two rows side by side": dict(key_heads=1, heads=2, key_dim=32, value_dim=64),
    "two blocks of columns": dict(key_heads=1, heads=1, key_dim=8, value_dim=256),
}


@functools.cache
def compiled(erases: bool):
    def run(q, k, u, erase, log_decay, state, ids):
        x = recurrence(q, k, u, erase if erases else None, log_decay, state, ids)
        return pallas_step.one_token(x, INTERPRET)

    return jax.jit(run)


def case(name="random", dtype=jnp.float32, shape="values as wide as the warpgroup", batch=2, seed=0):
    return recurrence_case(name, dtype, seed, batch=batch, time=1, **SHAPES[shape])


@pytest.mark.parametrize("name", ("random", "erase up to 2", "forget", "zero keys"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("erases", (True, False))
def test_one_token_equals_the_oracle(name, dtype, erases):
    arguments, _ = case(name, jnp.dtype(dtype))
    o, state = compiled(erases)(*arguments, None)
    assert o.dtype == jnp.dtype(dtype) and state.dtype == jnp.float32
    truth = expected(arguments, erases)
    for name, value, reference in zip(NAMES, (o, state), truth, strict=False):
        assert_close((value,), (reference,), (name,), ERROR[dtype][name])


def expected(arguments, erases):
    """(o, state) of the oracle."""
    gates = arguments[3] if erases else arguments[3] * 0
    zeros = tuple(jnp.zeros(x.shape) for x in (arguments[2], arguments[5]))
    return recurrence_and_gradients((*arguments[:3], gates, *arguments[4:]), None, zeros)[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("erases", (True, False))
def test_sizes(shape, erases):
    arguments, _ = case(shape=shape, batch=1)
    truth = expected(arguments, erases)
    assert_close(compiled(erases)(*arguments, None), truth, NAMES[:2], 1e-5)


@pytest.mark.parametrize("erases", (True, False))
def test_columns_that_two_warpgroups_share(monkeypatch, erases):
    """As for K = 256, but of 16 rows. Its warpgroups wait for each other: more threads of XLA's pool than those."""
    monkeypatch.setattr(delta_step, "MOST_ROWS", 8)
    arguments, _ = case(batch=1)
    assert delta_step.warpgroups(16, 128) == 2
    gates = arguments[3] if erases else None
    step = jax.jit(lambda q, k, u, _, *more: pallas_step.one_token(recurrence(q, k, u, gates, *more, None), INTERPRET))
    assert_close(step(*arguments), expected(arguments, erases), NAMES[:2], 1e-5)


def test_padding_leaves_the_state_alone():
    arguments, _ = case()
    o, state = compiled(True)(*arguments, jnp.array([[0], [7]]))
    np.testing.assert_array_equal(state[0], arguments[5][0])
    np.testing.assert_array_equal(o[0], np.zeros_like(o[0]))
    np.testing.assert_array_equal(state[1], compiled(True)(*arguments, None)[1][1])


def test_a_token_that_starts_a_document_forgets():
    """Only a part of a sequence on a mesh can begin with such a token: the row's first never starts."""
    arguments, _ = case()
    x = recurrence(*arguments, None)._replace(starts=jnp.array([[True], [False]]))
    o, state = jax.jit(lambda x: pallas_step.one_token(x, INTERPRET))(x)
    fresh = arguments[5].at[0].set(0.0)
    for value, reference in zip((o, state), compiled(True)(*arguments[:5], fresh, None), strict=True):
        np.testing.assert_array_equal(value, reference)


def test_gradients_are_those_of_the_definition():
    arguments, cotangents = case()
    _, pull = jax.vjp(lambda *a: compiled(True)(*a, None), *arguments)
    _, slopes = recurrence_and_gradients(arguments, None, cotangents)
    assert_close(pull(cotangents), slopes, NAMES[2:], 1e-5)


def test_vmap_is_one_call_with_more_rows():
    some, others = case(batch=1)[0], case(batch=1, seed=1)[0]
    both = [jnp.stack(pair) for pair in zip(some, others, strict=True)]
    both[1] = some[1]  # a key that all share
    run = jax.vmap(lambda *a: compiled(True)(*a, None), in_axes=(0, None, 0, 0, 0, 0))
    o, state = run(*both)
    for i, alone in enumerate((some, (others[0], some[1], *others[2:]))):
        for value, reference in zip((o[i], state[i]), compiled(True)(*alone, None), strict=True):
            np.testing.assert_array_equal(value, reference)


def avals(batch, key_heads, heads, key_dim, value_dim, dtype=jnp.bfloat16):
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    inputs = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    keys, values = (batch, 1, key_heads, key_dim), (batch, 1, heads, value_dim)
    gate, state = float32(values[:3]), float32((batch, heads, key_dim, value_dim))
    return inputs(keys), inputs(keys), inputs(values), gate, gate, state


@pytest.mark.parametrize(
    "sizes, dtype, erases",
    [
        ((256, 16, 16, 128, 128), jnp.bfloat16, True),
        ((256, 16, 16, 128, 128), jnp.float32, False),
        ((2, 1, 32, 128, 64), jnp.bfloat16, False),
        ((2, 1, 32, 128, 64), jnp.float16, True),
        ((2, 2, 4, 64, 256), jnp.bfloat16, True),
        ((2, 1, 2, 256, 128), jnp.bfloat16, True),
    ],
)
def test_lowers_for_cuda_in_place(sizes, dtype, erases):
    def run(q, k, u, erase, log_decay, state):
        return pallas_step.one_token(recurrence(q, k, u, erase if erases else None, log_decay, state, None))

    lowered = lower_cuda(run, *avals(*sizes, dtype))
    assert mosaic_calls(lowered) == 1
    # Output 1 of the call, the state, takes the buffer of the last operand.
    assert "output_operand_alias<output_tuple_indices = [1], operand_index = 4" in lowered.as_text()


@pytest.mark.parametrize("key_dim, value_dim, reason", [(512, 128, "regist"), (12, 128, "regist"), (8, 96, "of 128")])
def test_other_sizes_are_refused(monkeypatch, key_dim, value_dim, reason):
    monkeypatch.setattr(pallas_step, "require_hopper", lambda op: "NVIDIA H200")
    x = jax.eval_shape(lambda *a: recurrence(*a, None), *avals(1, 1, 1, key_dim, value_dim))
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(pallas_step.one_token, x)


def test_more_tokens_are_refused(monkeypatch):
    monkeypatch.setattr(pallas_step, "require_hopper", lambda op: "NVIDIA H200")
    arguments, _ = recurrence_case("random", batch=1, time=2, key_heads=1, heads=1, key_dim=8, value_dim=128)
    with pytest.raises(NotImplementedError, match="T = 1"):
        pallas_step.one_token(recurrence(*arguments, None))
