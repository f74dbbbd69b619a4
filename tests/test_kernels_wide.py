"""The kernels of both recurrences with keys of 256 channels, whose states take half of a thread's registers: Mosaic's
interpreter with its race detector against the float64 oracle, lowering for CUDA, and what ptxas says of registers."""

import os

os.environ.setdefault("NPROC", "8")  # a waiting warpgroup blocks a thread of XLA's pool: more of them than warpgroups

import functools  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from efla_jax.ops import pallas, pallas_linear  # noqa: E402
from efla_jax.ops.arguments import recurrence  # noqa: E402
from efla_jax.ops.chunked import chunked  # noqa: E402
from tests.cases import packed_ids, recurrence_case  # noqa: E402
from tests.oracle import recurrence_and_gradients, relative_rms  # noqa: E402

RACES = plgpu.InterpretGPUParams(detect_races=True)
NAMES = ("o", "state", "dq", "dk", "du", "derase", "dlog_decay", "dinitial_state")
# The kernels round the same operands to 16 bits as the chunked form, in another order: at most 1.2 times its error.
# Below the first number nothing is told apart from the rounding of a result (half of 2^-8); <S, D> of a chunk, which
# all of its tokens' dlog_decay share, is of rounded states here: with two chunks its error is a matter of luck.
RATIO, FLOOR = 1.2, 2.5e-3
FLOORS = dict.fromkeys(NAMES, FLOOR) | {"dlog_decay": 4e-3}
SMALL = dict(batch=1, time=100, key_heads=1, heads=1, key_dim=256, value_dim=64)
LARGE = dict(batch=1, time=192, key_heads=1, heads=2, key_dim=256, value_dim=256)
# ptxas keeps addresses that no chunk changes in memory, of which a chunk reads as many again.
SPILLED = 192


def by_kernel(op: str, arguments, ids, config):
    q, k, u, erase, log_decay, state = arguments
    if op == "delta_rule":
        return pallas.delta_rule(recurrence(q, k, u, erase, log_decay, state, ids), 64, config, RACES)
    return pallas_linear.linear_attention(recurrence(q, k, u, None, log_decay, state, ids), 64, config, RACES)


def by_chunks(op: str, arguments, ids, _):
    q, k, u, erase, log_decay, state = arguments
    return chunked(recurrence(q, k, u, erase if op == "delta_rule" else None, log_decay, state, ids), 64)


@functools.cache
def compiled(run, op: str, config=None):
    """(arguments, ids, cotangents) -> (o, state, *gradients), shared by all cases of one shape."""

    @jax.jit
    def both(arguments, ids, cotangents):
        out, pull = jax.vjp(lambda *a: run(op, a, ids, config), *arguments)
        return *out, *pull(cotangents)[0:]

    return both


@pytest.fixture(autouse=True)
def no_races(capfd):
    """The detector prints what it finds and goes on."""
    yield
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def compare(op: str, case: str, ids, config=None, dtype=jnp.bfloat16, **shape):
    """Every result within its bound: that of the chunked form, given the same inputs."""
    arguments, cotangents = recurrence_case(case, dtype, **{**SMALL, **shape})
    results = compiled(by_kernel, op, config)(arguments, jnp.asarray(ids), cotangents)
    others = compiled(by_chunks, op)(arguments, jnp.asarray(ids), cotangents)
    exact = arguments if op == "delta_rule" else (*arguments[:3], arguments[3] * 0, *arguments[4:])
    out, gradients = recurrence_and_gradients(exact, np.asarray(ids), cotangents)
    wrong = {}
    for name, value, other, truth in zip(NAMES, results, others, (*out, *gradients), strict=True):
        if op == "linear_attention" and name == "derase":
            continue
        error, bound = relative_rms(value, truth), max(RATIO * relative_rms(other, truth), FLOORS[name])
        if not error <= bound:
            wrong[name] = error, bound
    assert not wrong, wrong
    padding = np.asarray(ids) == 0
    for value in (results[0], *results[2:7]):
        assert not np.asarray(value, np.float32)[padding].any()


@pytest.mark.parametrize("op", ("delta_rule", "linear_attention"))
def test_outputs_and_gradients_equal_the_oracle(op):
    """Documents, padding, an initial state and cotangents of both results."""
    compare(op, "cosine 0.9", packed_ids(1, SMALL["time"]))
