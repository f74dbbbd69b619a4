"""The kernels of both recurrences with keys of 256 channels, whose states take half of a thread's registers: Mosaic's
interpreter with its race detector against the float64 oracle, lowering for CUDA, and what ptxas says of registers."""

import os

os.environ.setdefault("NPROC", "8")  # a waiting warpgroup blocks a thread of XLA's pool: more of them than warpgroups

import dataclasses  # noqa: E402
import functools  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from efla_jax import ops  # noqa: E402
from efla_jax.kernels import delta_rule, delta_rule_gradients, linear_attention  # noqa: E402
from efla_jax.kernels import delta_rule_mosaic as mosaic  # noqa: E402
from efla_jax.ops import pallas, pallas_linear  # noqa: E402
from efla_jax.ops.arguments import recurrence  # noqa: E402
from efla_jax.ops.chunked import chunked  # noqa: E402
from tests import ptxas  # noqa: E402
from tests.cases import packed_ids, recurrence_case  # noqa: E402
from tests.lowering import lower_cuda, mosaic_calls  # noqa: E402
from tests.oracle import recurrence_and_gradients, relative_rms  # noqa: E402

RACES = plgpu.InterpretGPUParams(detect_races=True)
NAMES = ("o", "state", "dq", "dk", "du", "derase", "dlog_decay", "dinitial_state")
# The kernels round the same operands to 16 bits as the chunked form, in another order: at most 1.2 times its error.
# Below the first number nothing is told apart from the rounding of a result (half of 2^-8); <S, D> of a chunk, which
# all of its tokens' dlog_decay share, is of rounded states here: with two chunks its error is a matter of luck.
RATIO, FLOOR = 1.2, 2.5e-3
FLOORS = dict.fromkeys(NAMES, FLOOR) | {"dlog_decay": 4e-3}
SMALL = dict(batch=1, time=100, key_heads=1, heads=1, key_dim=256, value_dim=64)
LARGE = dict(batch=1, time=128, key_heads=1, heads=2, key_dim=256, value_dim=192)
# Bytes of addresses that no chunk changes: a thread stores them once, and a chunk reads each of them about once.
SPILLED = 320


def documents_at(start: int, time: int) -> np.ndarray:
    """Segment ids [1, T] of two documents."""
    return 1 + (np.arange(time, dtype=np.int32)[None] >= start)


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
        return *out, *pull(cotangents)

    return both


pytestmark = pytest.mark.usefixtures("no_races")


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


@pytest.mark.slow
@pytest.mark.parametrize("op", ("delta_rule", "linear_attention"))
def test_several_heads_and_tiles(op):
    """Two value heads of one key head, three tiles of V, two chunks; float16 in the second round."""
    ids = documents_at(90, LARGE["time"])
    compare(op, "mixed decay", ids, **LARGE)
    compare(op, "random", np.ones_like(ids), dtype=jnp.float16, **{**LARGE, "value_dim": 64})


@pytest.mark.slow
def test_time_in_parts_of_the_delta_rule(monkeypatch):
    """Three chunks walked at once, forwards and backwards; a document begins inside the last but one."""
    monkeypatch.setattr(delta_rule_gradients, "WIDE", dataclasses.replace(delta_rule_gradients.WIDE, parts=3))
    config = delta_rule.Config(stages=2, combine=0.0)
    assert delta_rule.layout_of(config, mosaic.Sizes(1, 192, 1, 1, 256, 64, 1)) == (1, 3)
    compare("delta_rule", "mixed decay", documents_at(100, time=192), config, time=192)


@pytest.mark.slow
def test_time_in_parts_of_linear_attention():
    config = linear_attention.Config(stages=2, multiprocessors=8, waves=1.0)
    compare("linear_attention", "random", documents_at(100, time=256), config, time=256)


def lowered(op: str, time: int, value_dim: int, dtype=jnp.bfloat16, heads: int = 4):
    """The operator's results and gradients, with documents and a state, lowered for CUDA."""
    s = jax.ShapeDtypeStruct
    gates, state = s((4, time, heads), jnp.float32), s((4, heads, 256, value_dim), jnp.float32)
    keys, values = s((4, time, 2, 256), dtype), s((4, time, heads, value_dim), dtype)
    operator = getattr(ops, op)
    arguments = (keys, keys, values, *[gates] * (1 + (op == "delta_rule")), state)

    def loss(ids, *arguments):
        *arguments, state = arguments
        options = dict(initial_state=state, segment_ids=ids, implementation="pallas")
        o, final = operator(*arguments, **options)
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(final)

    gradient = jax.grad(loss, tuple(range(1, 1 + len(arguments))))
    return lower_cuda(gradient, s((4, time), jnp.int32), *arguments)


@pytest.mark.parametrize("op", ("delta_rule", "linear_attention"))
def test_the_operator_lowers_for_cuda(op):
    """The delta rule inverts, walks, walks back and makes gradients; linear attention has one program less."""
    assert mosaic_calls(lowered(op, 4096, 128, heads=16)) == {"delta_rule": 4, "linear_attention": 3}[op]


@pytest.mark.slow
# The assembler comes with the CUDA plugin, which a machine without a GPU need not have; lowering is tested without.
@pytest.mark.skipif(ptxas.missing() is not None, reason=str(ptxas.missing()))
@pytest.mark.parametrize("op", ("delta_rule", "linear_attention"))
@pytest.mark.parametrize("time, value_dim", ((4096, 512), (32768, 64)))
def test_no_state_is_spilled(op, time, value_dim):
    for usage in ptxas.usage(lowered(op, time, value_dim)):
        assert usage.spilled <= SPILLED and not usage.serialised, usage


def test_raw_keys_of_256_channels_are_declined():
    assert "K = 256 of raw keys" in delta_rule.unsupported(256, 128, jnp.bfloat16, "exact")
    assert delta_rule.unsupported(256, 512, jnp.bfloat16) is None
    assert linear_attention.unsupported(256, 512, jnp.float16) is None
