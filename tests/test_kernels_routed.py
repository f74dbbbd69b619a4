"""The routed delta rule's kernels: in Mosaic's interpreter (with the race detector) against the float64 oracle, whose
masks are real numbers, and their lowering. They are those of the delta rule, with a factor for each chunk."""

import os

os.environ.setdefault("NPROC", "8")  # a waiting warpgroup blocks a thread of XLA's pool: more of them than warpgroups

import functools  # noqa: E402
import importlib  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from efla_jax import ops  # noqa: E402
from efla_jax.kernels import delta_rule  # noqa: E402
from efla_jax.ops import pallas_routed  # noqa: E402
from efla_jax.ops.segments import positions_divisible  # noqa: E402
from tests.cases import recurrence_case  # noqa: E402
from tests.lowering import lower_cuda, mosaic_calls  # noqa: E402
from tests.oracle import relative_rms, routed_and_gradients  # noqa: E402

RACES = plgpu.InterpretGPUParams(detect_races=True)
MODULE = importlib.import_module("efla_jax.ops.routed_delta_rule")
NAMES = ("o", "state", "start", "dq", "dk", "du", "derase", "dlog_decay", "dkeep")
# As many key heads as value heads: see the tests of the delta rule's gradients.
SMALL = dict(batch=1, time=160, key_heads=2, heads=2, key_dim=64, value_dim=64)
WIDE = dict(time=64, key_heads=1, heads=1, key_dim=256)
RATIO, FLOOR = 1.2, 2.5e-3  # of the chunked form's error, and what rounding results once comes to
# A keep's cotangent is one number <J, D>, a d log_decay has the <S, D> of its chunk: of rounded states here, of float32
# states in the chunked form; with two chunks a matter of luck.
LUCK = {"dkeep": 6e-3, "dlog_decay": 4e-3}
KEPT = {
    "all": lambda rng, shape: np.ones(shape),
    "none": lambda rng, shape: np.zeros(shape),
    "alternating": lambda rng, shape: (np.arange(shape[1])[:, None] + np.arange(shape[2])) % 2 + np.zeros(shape),
    "real": lambda rng, shape: rng.uniform(0.2, 1.5, shape),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, capfd):
    """The kernels in the interpreter; what its race detector prints fails the test."""
    kernels = functools.partial(pallas_routed.routed_delta_rule, interpret=RACES)
    monkeypatch.setitem(MODULE.TABLE, "pallas", kernels)
    yield
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def case(name: str, kept: str, dtype=jnp.bfloat16, **shape):
    """(q, k, u, erase, log decay, keep) and cotangents of (o, state, start)."""
    sizes = {**SMALL, **shape}
    (*arguments, state), (d_o, d_state) = recurrence_case(name, dtype, **sizes)
    rng = np.random.default_rng(1)
    keep = KEPT[kept](rng, (sizes["batch"], -(-sizes["time"] // 64), sizes["heads"]))
    d_start = jnp.asarray(rng.normal(size=state.shape), jnp.float32)
    return (*arguments, jnp.asarray(keep, jnp.float32)), (d_o, d_state, d_start)


@functools.partial(jax.jit, static_argnums=0)
def run(implementation, arguments, cotangents, ids=None):
    def op(*a):
        o, after = ops.routed_delta_rule(*a, segment_ids=ids, implementation=implementation)
        return o, after.state, after.start

    out, pull = jax.vjp(op, *arguments)
    return (*out, *pull(cotangents))


def check(name="random", kept="alternating", ids=None, **shape):
    arguments, cotangents = case(name, kept, **shape)
    q, k, u, *_ = arguments
    state = jnp.zeros((q.shape[0], u.shape[2], k.shape[3], u.shape[3]))
    nothing = state, state, state[..., 0, 0]  # the state to begin with, the open chunk's start, its log decay
    whole = *arguments, jnp.ones_like(arguments[5]), *nothing
    start = np.zeros(q.shape[0], np.int32)
    truth, slopes = routed_and_gradients(whole, ids, start, 64, (*cotangents, nothing[2]))
    wrong = {}
    ids = None if ids is None else jnp.asarray(ids)
    both = (run(implementation, arguments, cotangents, ids) for implementation in ("pallas", "chunked"))
    for found, ours, theirs, exact in zip(NAMES, *both, (*truth[:3], *slopes[:6]), strict=True):
        error, other = relative_rms(ours, exact), relative_rms(theirs, exact)
        if not error <= max(RATIO * other, LUCK.get(found, FLOOR)):
            wrong[found] = f"{error:.1e}, {error / other:.2f} times that of the chunked form"
    assert not wrong, wrong


@pytest.mark.parametrize("kept", KEPT)
def test_masks(kept):
    check(kept=kept)


@pytest.mark.parametrize(
    "name", ["cosine 0.9", "forget", *(pytest.param(x, marks=pytest.mark.slow) for x in ("strong decay", "zero keys"))]
)
def test_decays_and_keys(name):
    check(name, "real")


@pytest.mark.slow
@pytest.mark.parametrize("shape", [dict(time=128, key_dim=128), dict(time=64, value_dim=192), WIDE], ids=str)
def test_whole_chunks_and_sizes(shape):
    check(**shape)


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT)
def test_documents_and_padding(kept):
    """A document of one chunk and a bit, one of a few tokens, one of a whole chunk, one that stays open; padding in all
    of them."""
    ids = np.repeat([1, 2, 3, 4], [75, 20, 80, 90])
    ids[np.random.default_rng(3).random(ids.size) < 0.1] = 0
    check("cosine 0.9", kept, ids[None].astype(np.int32), time=ids.size)


def test_where_the_open_chunk_began_costs_nothing_unasked(monkeypatch):
    """With documents it takes a second run of the kernels, forward and backward."""
    monkeypatch.undo()
    counts = []
    for asked in (False, True):

        def loss(*a, asked=asked):
            o, after = ops.routed_delta_rule(*a[:6], segment_ids=a[6], implementation="pallas")
            return jnp.sum(o.astype(jnp.float32)) + (jnp.sum(after.start) if asked else 0)

        counts.append(mosaic_calls(lower_cuda(jax.grad(loss, tuple(range(6))), *avals(), IDS)))
    assert counts == [4, 6]


@functools.partial(jax.jit, static_argnums=0)
def go_on(implementation, position, arguments, prefix, cotangents):
    """Outputs, state and gradients of rows behind a prefix (state, start of the open chunk, its log decay)."""

    def op(a, prefix):
        before = ops.RoutedState(*prefix, position)
        o, after = ops.routed_delta_rule(*a, initial_state=before, implementation=implementation)
        return o, after.state, after.start

    out, pull = jax.vjp(op, arguments, prefix)
    of_arguments, of_prefix = pull(cotangents)
    return (*out, *of_arguments, *of_prefix)


@pytest.mark.parametrize("position", [128, 100])
def test_rows_go_on(position):
    """Behind whole chunks by the kernels, behind an open one in XLA, which a value of the program decides."""
    arguments, cotangents = case("random", "real", time=90)
    rng = np.random.default_rng(5)
    state, start = (jnp.asarray(0.1 * rng.normal(size=(1, 2, 64, 64)), jnp.float32) for _ in range(2))
    opened = jnp.zeros((1, 2)) if position == 128 else jnp.full((1, 2), -0.3)
    start = state if position == 128 else start
    prefix, place = (state, start, opened), jnp.array([position], jnp.int32)
    given = *arguments, jnp.ones_like(arguments[5]), *prefix
    nothing = jnp.zeros_like(opened)
    truth, slopes = routed_and_gradients(given, None, np.asarray(place), 64, (*cotangents, nothing))
    both = [go_on(name, place, arguments, prefix, cotangents) for name in ("pallas", "chunked")]
    if position == 100:  # the same program of XLA, up to the order in which it is compiled beside another
        for ours, theirs in zip(*both, strict=True):
            np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=1e-5, atol=1e-6)
        return
    assert (both[0][0] != both[1][0]).any()  # another program has run
    exact = (*truth[:3], *slopes[:6], slopes[7] + slopes[8])  # the prefix's state is where the next chunk begins
    for found, ours, theirs, right in zip((*NAMES, "dinitial"), *(x[:10] for x in both), exact, strict=True):
        error, other = relative_rms(ours, right), relative_rms(theirs, right)
        assert error <= max(RATIO * other, LUCK.get(found, FLOOR)), (found, error, other)


@pytest.mark.slow
def test_time_in_parts(monkeypatch):
    monkeypatch.setattr(delta_rule, "SAFE", delta_rule.Config(combine=0.0))
    check(kept="real", time=192, key_heads=1, heads=1)


def test_a_chunk_rolled_back_leaves_nothing():
    """Whatever a dropped chunk wrote, nothing behind it knows; and with all chunks kept it is the delta rule."""
    (q, k, u, erase, decay, keep), cotangents = case("random", "none")
    first = run("pallas", (q, k, u, erase, decay, keep), cotangents)
    other = run("pallas", (q, k, u.at[:, :64].multiply(-3), erase, decay, keep), cotangents)
    np.testing.assert_allclose(first[0][:, 64:].astype(np.float32), other[0][:, 64:].astype(np.float32), atol=1e-18)
    np.testing.assert_allclose(first[2], 0, atol=1e-16)


DECLINED = {
    "chunk_size = 32": dict(chunk_size=32),
    "initial_state beside segment_ids": dict(
        initial_state=ops.init_routed_state(1, 2, 64, 64), segment_ids=jnp.ones((1, 160), jnp.int32)
    ),
    "keep with a second number": {},
    "K = 32": dict(),
}


@pytest.mark.parametrize("reason", DECLINED)
def test_what_kernels_do_not_serve_is_said(reason):
    (q, k, u, erase, decay, keep), _ = case("random", "all", key_dim=32 if reason == "K = 32" else 64)
    options = DECLINED[reason]
    if "chunk_size" in options:
        keep = jnp.ones((1, 5, 2))
    if "second" in reason:
        keep = jnp.stack([keep, keep], axis=-1)
    with pytest.raises(NotImplementedError, match=f"routed_delta_rule: no GPU kernel for {reason}"):
        ops.routed_delta_rule(q, k, u, erase, decay, keep, implementation="pallas", **options)
    short = (x[:, :20] for x in (q, k, u, erase, decay))
    if reason == "chunk_size = 32":
        with pytest.raises(NotImplementedError, match="T = 20: not one chunk"):
            ops.routed_delta_rule(*short, keep[:, :1], implementation="pallas")


def test_auto_takes_the_kernels():
    (q, k, u, erase, decay, keep), _ = case("random", "real")
    run = functools.partial(ops.routed_delta_rule, q, k, u, erase, decay, keep)
    taken, kernels, other = (np.asarray(run(implementation=name)[0]) for name in ("auto", "pallas", "chunked"))
    np.testing.assert_array_equal(taken, kernels)
    assert (taken != other).any()  # in the order of their sums


def avals():
    sds, f32 = jax.ShapeDtypeStruct, jnp.float32
    return *(sds((2, 300, 4, 128), jnp.bfloat16),) * 3, *(sds((2, 300, 4), f32),) * 2, sds((2, 5, 4), f32)


IDS = jax.ShapeDtypeStruct((2, 300), jnp.int32)


def test_lowers_for_cuda(monkeypatch):
    """Two programs forward and two backward, as of the delta rule."""
    monkeypatch.undo()

    def loss(*a):
        o, after = ops.routed_delta_rule(*a, implementation="pallas")
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(after.state) + jnp.sum(after.start)

    lowered = lower_cuda(jax.grad(loss, tuple(range(6))), *avals())
    assert 4 <= mosaic_calls(lowered) <= 6


def test_positions_that_are_known_to_be_whole_need_no_condition(monkeypatch):
    """Where it is said that no chunk is open, XLA's form is not even compiled; values are those of the condition."""
    arguments, cotangents = case("random", "real", time=90)
    state = jnp.asarray(0.1 * np.random.default_rng(5).normal(size=(1, 2, 64, 64)), jnp.float32)
    prefix, place = (state, state, jnp.zeros((1, 2))), jnp.array([128], jnp.int32)
    asked = go_on("pallas", place, arguments, prefix, cotangents)
    with positions_divisible(64):
        told = go_on.__wrapped__("pallas", place, arguments, prefix, cotangents)
    for ours, theirs in zip(told, asked, strict=True):
        np.testing.assert_array_equal(ours.astype(np.float32), theirs.astype(np.float32))
    monkeypatch.undo()
    texts = []
    for by in (1, 64):
        with positions_divisible(by):
            avals = arguments, prefix, cotangents
            texts.append(lower_cuda(lambda *a: go_on.__wrapped__("pallas", place, *a), *avals).as_text())
    assert ["stablehlo.case" in text for text in texts] == [True, False]
