"""Delta rules from raw keys: `ops.delta_flow` against the matrix of its definition, its kernels in Mosaic's interpreter
(with the race detector) against a float64 loop, and their lowering.

The bar of a kernel is the error of the coefficients in XLA and the chunked form behind them, on the same inputs."""

import os

os.environ.setdefault("NPROC", "8")  # a waiting warpgroup blocks a thread of XLA's pool: more of them than warpgroups

import functools  # noqa: E402
import importlib  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jaxtyping  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from efla_jax import layers, ops  # noqa: E402
from efla_jax.kernels import delta_flow as kernel  # noqa: E402
from efla_jax.kernels import delta_rule  # noqa: E402
from efla_jax.ops import pallas  # noqa: E402
from efla_jax.ops.arguments import recurrence  # noqa: E402
from efla_jax.ops.delta_flow import STEPS  # noqa: E402
from efla_jax.sharding import make_mesh  # noqa: E402
from tests import ptxas  # noqa: E402
from tests.cases import packed_ids, unit  # noqa: E402
from tests.lowering import lower_cuda, mosaic_calls  # noqa: E402
from tests.oracle import recurrence as oracle_recurrence  # noqa: E402
from tests.oracle import relative_rms  # noqa: E402

MODULE = importlib.import_module("efla_jax.ops.delta_flow")  # the name in the package is the function's
RACES = plgpu.InterpretGPUParams(detect_races=True)
NAMES = ("o", "state", "dq", "dk", "dv", "dbeta", "dlog_decay", "dinitial_state")
SMALL = dict(batch=1, time=100, key_heads=1, heads=2, key_dim=64, value_dim=64)
# As in the tests of the delta rule: another order of the same roundings. d beta is a sum of V products of rounded
# numbers in either form, a single number per token, of which a case has two hundred: luck, up to half as much again.
RATIO, FLOOR, LUCK = 1.2, 2.5e-3, {"dbeta": (1.5, 4e-3), "dlog_decay": (1.2, 4e-3)}


def inputs(case: str, seed: int = 0, dtype=jnp.bfloat16, **shape):
    """(q, raw k, v, beta, raw log decay, initial state) and cotangents of (o, state)."""
    s, rng = {**SMALL, **shape}, np.random.default_rng(seed)
    keys, values = (s["batch"], s["time"], s["key_heads"], s["key_dim"]), (s["batch"], s["time"], s["heads"])
    k = unit(rng.normal(size=keys))
    if case == "parallel keys":
        k = unit(np.sqrt(0.98) * unit(rng.normal(size=(*keys[:1], 1, *keys[2:]))) + np.sqrt(0.02) * k)
    norm = 2 * np.exp(0.7 * rng.normal(size=(*keys[:3], 1)))
    if case == "norms from 1e-3 to 1e2":
        norm = 10 ** rng.uniform(-3, 2, norm.shape)
    elif case == "zero keys":
        norm = norm * (rng.random(norm.shape) < 0.7)
    beta = 1 / (1 + np.exp(-rng.normal(size=values)))
    if case == "large beta":
        beta = 100 * beta
    elif case == "small beta":  # and 0, where the write is nothing and its gradient is not
        beta = np.where(rng.random(values) < 0.3, 0.0, 1e-3 * beta)
    decay = -np.log1p(np.exp(rng.normal(size=values) - 2))
    decay = np.where(rng.random(values) < 0.05, -1e4, decay) if case == "forget" else decay
    state = (s["batch"], s["heads"], s["key_dim"], s["value_dim"])
    values = (*values, s["value_dim"])
    narrow = [jnp.asarray(x, dtype) for x in (unit(rng.normal(size=keys)), norm * k, rng.normal(size=values))]
    exact = [jnp.asarray(x, jnp.float32) for x in (beta, decay, rng.normal(size=state))]
    cotangents = jnp.asarray(rng.normal(size=values), dtype), jnp.asarray(rng.normal(size=state), jnp.float32)
    return (*narrow, *exact), cotangents


def defined(step: str, q, k, v, beta, log_decay, state, ids):
    """The definition in the dtype of its arguments: coefficients from the formulas, then the oracle's loop."""
    group = v.shape[2] // k.shape[2]
    square = jnp.repeat(jnp.sum(k * k, -1), group, axis=2)
    live = square > 0
    square = jnp.where(live, square, 1.0)

    def phi(x):
        small = x < 1e-3
        y = jnp.where(small, 1.0, x)
        return jnp.where(small, 1 - x / 2 + x**2 / 6 - x**3 / 24, -jnp.expm1(-y) / y)

    if step == "exact":
        write = seen = beta * phi(beta * square)
    elif step == "gated_exact":
        kept, log_decay = jnp.exp(log_decay), jnp.expm1(log_decay)
        x = kept * beta * square
        write, seen = beta * phi(x - log_decay), kept * beta * phi(x)
    else:
        write, seen = beta / jnp.sqrt(square), beta / square
    u = write[..., None] * v
    live = live & (ids != 0)[..., None]
    u, seen = jnp.where(live[..., None], u, 0.0), jnp.where(live, seen, 0.0)
    return oracle_recurrence(q, k, u, seen, log_decay, state, ids)


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 1})  # as the oracle
def truth_of(step, arguments, ids, cotangents):
    out, pull = jax.vjp(lambda *a: defined(step, *a, ids), *arguments)
    return (*out, *pull(cotangents))


def truth(step, arguments, ids, cotangents) -> tuple:
    """Values and gradients in float64."""
    batch, time = arguments[0].shape[:2]
    ids = np.ones((batch, time), np.int32) if ids is None else np.asarray(ids)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (arguments, cotangents))
        return jax.tree.map(np.asarray, truth_of(step, wide[0], jnp.asarray(ids), wide[1]))


def run(implementation, step, arguments, ids, cotangents):
    def op(q, k, v, beta, decay, state):
        options = dict(initial_state=state, segment_ids=ids, implementation=implementation)
        return ops.delta_flow(q, k, v, beta, decay, step=step, **options)

    out, pull = jax.vjp(op, *arguments)
    return (*out, *pull(tuple(c.astype(o.dtype) for c, o in zip(cotangents, out, strict=True))))


RUN = jax.jit(run, static_argnums=(0, 1))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, capfd):
    """The kernels in the interpreter; what its race detector prints fails the test."""
    monkeypatch.setattr(MODULE, "pallas", functools.partial(pallas.delta_flow, interpret=RACES))
    yield
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def check(step, seeds, ids=None, case="random", **shape):
    """Every value and gradient within its bar, errors as root mean squares over the seeds."""
    found = []
    for seed in range(seeds):
        arguments, cotangents = inputs(case, seed, **shape)
        reference = truth(step, arguments, ids, cotangents)
        both = (RUN(name, step, arguments, ids, cotangents) for name in ("pallas", "chunked"))
        found.append([[relative_rms(g, t) for g, t in zip(each, reference, strict=True)] for each in both])
    wrong = {}
    for name, error, other in zip(NAMES, *np.sqrt(np.mean(np.square(found), axis=0)), strict=True):
        ratio, floor = LUCK.get(name, (RATIO, FLOOR))
        if not error <= max(ratio * other, floor):
            wrong[name] = f"{error:.1e}, {error / other:.2f} times that of the chunked form"
    assert not wrong, wrong


CASES = ("random", "parallel keys", "norms from 1e-3 to 1e2", "zero keys", "large beta", "small beta", "forget")


# All are among the draws of the slow test below. Left to it are a large beta, as which norms up to 1e2 saturate, zero
# keys, which have a test of their own, and parallel keys, which are the delta rule's.
@pytest.mark.parametrize("case", ["random", "norms from 1e-3 to 1e2", "small beta", "forget"])
def test_an_exact_step_is_as_accurate_as_its_coefficients_before_the_chunked_form(case):
    check("exact", 1, case=case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_so_it_is_over_several_draws(case):
    check("exact", 4, case=case)


@pytest.mark.slow  # every step is programs of its own to compile
@pytest.mark.parametrize("step", [step for step in STEPS if step != "exact"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "large beta"])  # erases as much as it is long
def test_the_other_steps(step, case):
    check(step, 2, case=case)


@pytest.mark.slow  # two programs to compile for each shape
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", [dict(heads=1, key_dim=128, value_dim=64), dict(heads=1, value_dim=128)], ids=str)
def test_steps_and_sizes(step, shape):
    for case in ("random", "norms from 1e-3 to 1e2"):
        check(step, 2, case=case, **shape)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_values_in_tiles_that_share_their_gates(step):
    check(step, 2, jnp.asarray(packed_ids(1, SMALL["time"])), value_dim=192)


def test_documents_and_padding():
    check("exact", 1, jnp.asarray(packed_ids(1, SMALL["time"])))


@pytest.mark.slow
def test_time_in_parts(monkeypatch):
    monkeypatch.setattr(delta_rule, "SAFE", delta_rule.Config(combine=0.0))
    check("exact", 2, time=192, heads=1)


def test_a_key_of_length_0_writes_nothing_and_gets_no_gradient():
    arguments, cotangents = inputs("zero keys")
    _, _, _, d_k, d_v, d_beta, _, _ = RUN("pallas", "exact", arguments, None, cotangents)
    zero = ~np.any(np.asarray(arguments[1], np.float32), axis=-1)
    assert zero.any()
    for gradient in (d_k, jnp.repeat(zero, 2, axis=2)[..., None] * d_v):
        assert not np.any(np.asarray(gradient, np.float32)[zero[:, :, 0]])
    assert not np.any(np.asarray(d_beta)[zero[:, :, 0]])


@pytest.mark.parametrize("step", STEPS)
def test_coefficients_of_the_kernels(step):
    """Values and slopes in float32 against the same in float64, from keys that write next to nothing to saturation."""
    beta, log_decay, square = np.meshgrid(np.logspace(-12, 3, 16), -np.logspace(-6, 2, 9), np.logspace(-8, 6, 15))
    arguments = beta, np.expm1(log_decay), square
    found = kernel.coefficients(step, *(jnp.asarray(x, jnp.float32) for x in arguments))
    slopes = kernel.slopes(step, *(jnp.asarray(x, jnp.float32) for x in arguments))
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float32), jnp.float64) for x in arguments]
        reference = kernel.coefficients(step, *wide)
        exact = kernel.slopes(step, *wide)
    for x, y in zip((*found, slopes.of_value), (*reference, exact.of_value), strict=True):
        np.testing.assert_allclose(x, np.asarray(y), rtol=3e-5, atol=1e-30)
    again = jnp.asarray([0.0, 1e-6, 0.3, 0.499, 0.501, 4.0, 100.0], jnp.float32)
    np.testing.assert_allclose(kernel.phi(again), ops.phi(again), rtol=5e-7)
    assert not np.any(kernel.coefficients(step, again, -again / 200, 0 * again))


@pytest.mark.parametrize("step", STEPS)
def test_every_implementation_is_the_definition(step):
    shape = dict(batch=2, time=20, key_heads=1, heads=2, key_dim=8, value_dim=5)
    arguments, cotangents = inputs("zero keys", dtype=jnp.float32, **shape)
    ids = jnp.asarray(packed_ids(2, 20))
    reference = truth(step, arguments, ids, cotangents)
    for name in ("recurrent", "associative", "chunked"):
        for value, other in zip(RUN(name, step, arguments, ids, cotangents), reference, strict=True):
            assert relative_rms(value, other) < 2e-5, name  # float32, coefficients of keys of length 0.2 to 20


def test_token_by_token_by_vmap_and_under_remat():
    arguments, _ = inputs("random", dtype=jnp.float32, time=5, key_dim=8, value_dim=5)
    q, k, v, beta, decay, state = arguments
    whole = ops.delta_flow(*arguments[:5], initial_state=state, implementation="recurrent")
    outs = []
    for t in range(5):
        o, state = ops.delta_flow(*(x[:, t : t + 1] for x in arguments[:5]), initial_state=state)
        outs.append(o)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), whole[0], rtol=1e-5, atol=1e-6)
    mapped = jax.vmap(jax.checkpoint(lambda v: ops.delta_flow(q, k, v, beta, decay)[0]))(jnp.stack([v, -v]))
    np.testing.assert_allclose(mapped[0], -mapped[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", ["exact", pytest.param("gated_exact", marks=pytest.mark.slow)])
def test_on_a_mesh(step):
    """Heads and the time cut into parts, each of whose programs makes its own coefficients."""
    shape = dict(batch=2, time=32, key_heads=1, heads=2, key_dim=8, value_dim=5)
    arguments, cotangents = inputs("zero keys", dtype=jnp.float32, **shape)
    ids = jnp.asarray(packed_ids(2, 32))
    with jax.set_mesh(make_mesh(tensor=2, context=4)):
        found = RUN("chunked", step, arguments, ids, cotangents)
    for name, value, other in zip(NAMES, found, truth(step, arguments, ids, cotangents), strict=True):
        assert relative_rms(value, other) < 2e-5, name


def test_what_does_not_fit_is_said(monkeypatch):
    (q, k, v, beta, decay, _), _ = inputs("random", time=20)
    with pytest.raises(ValueError, match="step: 'euler' is not a way to take the step; choose one of"):
        ops.delta_flow(q, k, v, beta, step="euler")
    monkeypatch.undo()
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for wrong, message in (
        (beta[:, :, :1], r"beta: shape .* is 1 here but 2 in v"),
        (beta > 0, "beta: dtype bool is not"),
        (0.5, r"beta: 0.5 is a float, but beta is an array \[B, T, H\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.delta_flow(q, k, v, wrong)
    with pytest.raises(ValueError, match=r"v: shape .* does not fit \[B, T, H, V\]"):
        ops.delta_flow(q, k, v[:, 1:], beta)
    with pytest.raises(NotImplementedError, match="delta_flow: the GPU kernels need an NVIDIA Hopper GPU"):
        ops.delta_flow(q, k, v, beta, implementation="pallas")
    monkeypatch.setattr(pallas, "require_hopper", lambda op: "NVIDIA H200")
    with pytest.raises(NotImplementedError, match="delta_flow: no GPU kernel for dtype float32"):
        ops.delta_flow(*(x.astype(jnp.float32) for x in (q, k, v)), beta, implementation="pallas")


def test_mixers_take_the_step_that_is_theirs(monkeypatch):
    sizes = dict(width=16, num_heads=2, implementation="pallas")
    taken = {
        layers.EFLA(**sizes): "exact",
        layers.EFLA(**sizes, step="euler"): None,
        layers.GatedEFLA(**sizes): "gated_exact",
        layers.GatedEFLA(**sizes, step="split"): "exact",
        layers.GatedEFLA(**sizes, normalize_keys=True): None,
        layers.DeltaNet(**sizes): "unit",
        layers.GatedDeltaNet(**sizes): "unit",
        layers.DeltaNet(**sizes, negative_eigenvalues=True): None,
        layers.LogLinearEFLA(**sizes): None,  # another recurrence
    }
    for mixer, step in taken.items():
        assert mixer.taken_step() == step, mixer

    class Halved(layers.DeltaNet):
        def coefficients(self, k, v, beta, log_decay):
            return super().coefficients(k, v, beta / 2, log_decay)

    assert Halved(**sizes).taken_step() is None
    assert layers.EFLA(width=16, num_heads=2).taken_step() is None
    monkeypatch.setitem(MODULE.TABLE, "pallas", MODULE.TABLE["chunked"])
    monkeypatch.setitem(MODULE.UNIT_KEYS, "pallas", MODULE.UNIT_KEYS["chunked"])
    x = jax.random.normal(jax.random.key(0), (2, 20, 16))
    for mixer in (layers.EFLA(**sizes), layers.GatedEFLA(**sizes)):
        variables = jax.jit(mixer.init)(jax.random.key(1), x)

        def loss(variables, mixer=mixer):
            return jnp.sum(jnp.square(mixer.apply(variables, x)[0]))

        def slope(variables, loss=loss):
            return jax.value_and_grad(loss)(variables)

        fused, gradient = jax.jit(slope)(variables)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(mixer), "taken_step", lambda self: None)
            apart, other = jax.jit(lambda variables, slope=slope: slope(variables))(variables)
        np.testing.assert_allclose(fused, apart, rtol=1e-6)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), gradient, other)


def avals(batch, time, key_heads, heads, key_dim, value_dim):
    sds, f32, bf16 = jax.ShapeDtypeStruct, jnp.float32, jnp.bfloat16
    keys, gates = sds((batch, time, key_heads, key_dim), bf16), sds((batch, time, heads), f32)
    state = sds((batch, heads, key_dim, value_dim), f32)
    return keys, keys, sds((batch, time, heads, value_dim), bf16), gates, gates, state, sds((batch, time), jnp.int32)


AVALS = avals(16, 256, 2, 4, 128, 128)


def gradient_of(step):
    def loss(q, k, v, beta, decay, state, ids):
        o, final = ops.delta_flow(
            q, k, v, beta, decay, step=step, initial_state=state, segment_ids=ids, implementation="pallas"
        )
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(final)

    return jax.grad(loss, tuple(range(6)))


@pytest.mark.parametrize("step", ["exact", *(pytest.param(x, marks=pytest.mark.slow) for x in STEPS if x != "exact")])
def test_lowers_for_cuda(monkeypatch, step):
    """Two programs forward and two backward, whatever the step; with few rows one more each way."""
    monkeypatch.undo()
    assert mosaic_calls(lower_cuda(gradient_of(step), *AVALS)) == 4


def test_float16_has_its_coefficients_before_the_kernels(monkeypatch):
    """What is written per raw key, 1/|k|^2 at the most, may leave its range."""
    monkeypatch.undo()
    half = [jax.ShapeDtypeStruct(x.shape, jnp.float16) if x.dtype == jnp.bfloat16 else x for x in AVALS]
    assert mosaic_calls(lower_cuda(gradient_of("exact"), *half)) == 4
    with pytest.raises(NotImplementedError, match="may leave its range"):
        lower_cuda(lambda *a: pallas.delta_flow(recurrence(*a), "exact"), *half)


@pytest.mark.slow
# The assembler comes with the CUDA plugin, which a machine without a GPU need not have; lowering is tested without.
@pytest.mark.skipif(ptxas.missing() is not None, reason=str(ptxas.missing()))
def test_raw_keys_cost_no_register_more(monkeypatch):
    monkeypatch.undo()
    shape = 16, 2048, 16, 16, 128, 128

    def plain(q, k, u, erase, decay, state, ids):
        o, final = ops.delta_rule(q, k, u, erase, decay, initial_state=state, segment_ids=ids, implementation="pallas")
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(final)

    before = ptxas.usage(lower_cuda(jax.grad(plain, tuple(range(6))), *avals(*shape)))
    for step in STEPS:
        for ours, theirs in zip(ptxas.usage(lower_cuda(gradient_of(step), *avals(*shape))), before, strict=True):
            assert ours.spilled <= theirs.spilled and not ours.serialised, (step, ours, theirs)
