"""What users of such libraries ran into, as tests: numbers are those of the project's list of pitfalls; "beyond" marks
weird but legal input that is not on it. Entries that another file covers are not repeated here."""

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from configs import quickstart, smnist
from efla_jax import data, metrics, ops, optim, sharding, train
from efla_jax.checkpoint import Checkpointer
from efla_jax.data import images, text
from efla_jax.generate import Sampling, sample
from efla_jax.layers import MIXERS
from efla_jax.model import LanguageModel, SequenceClassifier
from efla_jax.ops.segments import segments
from tests.cases import recurrence_case
from tests.oracle import TOLERANCE, assert_close, recurrence_and_gradients, relative_rms

ROOT = Path(__file__).resolve().parent.parent
IMPLEMENTATIONS = ("recurrent", "associative", "chunked")
NAMES = ("o", "state", "dq", "dk", "du", "derase", "dlog_decay", "dinitial_state")
CLOSE = 2e-5  # float32 against float32, sums in another order
FLOAT16 = 2e-3  # operands and results are rounded to 11 bits, 5e-4 each
WIDTH = 16
OPTIONS = {name: {"num_heads": 2} for name in MIXERS}
OPTIONS["nats_l"] |= {"chunk_size": 16, "implementation": "recurrent"}
OPTIONS["mamba2"]["state_dim"] = OPTIONS["log_linear_mamba2"]["state_dim"] = 8
HYBRID = ("efla", "attention", "mamba2")


@pytest.fixture
def unchecked():
    """Without the type checker of the test session: our own errors, and arrays of numpy."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def mixer(name, **options):
    return MIXERS[name](width=WIDTH, **{**OPTIONS[name], **options})


def model(*mixers, **options):
    return LanguageModel(
        31, WIDTH, len(mixers), mixers, {name: OPTIONS[name] for name in mixers}, mlp="none", **options
    )


def inputs(time=12, batch=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, time, WIDTH)), jnp.float32)


def tokens(time=12, batch=2):
    return jnp.asarray(np.random.default_rng(0).integers(0, 31, (batch, time)), jnp.int32)


@functools.cache
def parameters(*mixers):
    if len(mixers) == 1:
        return jax.jit(mixer(*mixers).init)(jax.random.key(0), inputs(3))
    return jax.jit(model(*mixers).init)(jax.random.key(0), tokens(3))


def tree_close(ours, theirs, tolerance=CLOSE):
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert relative_rms(a, b) <= tolerance, f"{jax.tree_util.keystr(path)}: {relative_rms(a, b):.1e}"


@functools.cache
def compiled(implementation, chunk_size=64):
    def op(q, k, u, erase, log_decay, state, ids):
        options = dict(initial_state=state, segment_ids=ids, chunk_size=chunk_size, implementation=implementation)
        return ops.delta_rule(q, k, u, erase, log_decay, **options)

    @jax.jit
    def run(arguments, ids, cotangents):
        out, pull = jax.vjp(lambda *a: op(*a, ids), *arguments)
        return out, pull(cotangents)

    return run


def compare(implementation, arguments, ids, cotangents, tolerance=TOLERANCE["float32"], chunk_size=64):
    out, gradients = compiled(implementation, chunk_size)(arguments, ids, cotangents)
    truth, slopes = recurrence_and_gradients(arguments, ids, cotangents)
    assert_close((*out, *gradients), (*truth, *slopes), NAMES, tolerance)
    return out, gradients


ONE = dict(batch=1, time=65, key_heads=1, heads=2, key_dim=5, value_dim=3)
BORDERS = np.repeat([[1, 2, 3, 4]], [57, 2, 5, 1], axis=1).astype(np.int32)
GATES = {  # erase, log decay -> what stands there instead; `odd` is every other token
    "half exactly 0": lambda e, g, odd: (e, np.where(odd, g, 0.0)),
    "-3 each": lambda e, g, odd: (e, g * 0 - 3),
    "-20 each": lambda e, g, odd: (e, g * 0 - 20),
    "-inf sometimes": lambda e, g, odd: (e, np.where(odd, g, -np.inf)),
    "-inf each": lambda e, g, odd: (e, np.full_like(g, -np.inf)),
    "growth": lambda e, g, odd: (e, -0.1 * g),
    "erase 1": lambda e, g, odd: (e * 0 + 1, g * 0),
    "erase 2": lambda e, g, odd: (e * 0 + 2, g * 0),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("ids", [None, BORDERS], ids=["one document", "tiny documents"])
def test_gates_at_their_limits(implementation, ids):
    """1, 3, 4, 9, 35: a guard zeroes exp(0); exp(a) exp(-b) overflows; masked overflow makes NaN gradients; a ragged
    chunk; documents of 1, 2 and 5 tokens. Beyond: log decays of -inf and above 0, erase exactly 1 and 2."""
    (q, k, u, erase, decay, state), cotangents = recurrence_case("random", **ONE)
    odd = np.arange(65)[None, :, None] % 2 == 1
    for change in GATES.values():
        gates = (jnp.asarray(x, jnp.float32) for x in change(np.asarray(erase), np.asarray(decay), odd))
        compare(implementation, (q, k, u, *gates, state), ids, cotangents)


def test_bfloat16_log_decays_are_summed_in_float32():
    """11: a running sum of 2048 times -0.01 in bfloat16 drifts to -20.125."""
    nothing, one = jnp.zeros((1, 2048, 1, 1)), jnp.ones((1, 1, 1, 1))
    decay = jnp.full((1, 2048, 1), -0.01, jnp.bfloat16)
    for implementation in IMPLEMENTATIONS:
        run = functools.partial(ops.linear_attention, initial_state=one, implementation=implementation)
        _, state = run(nothing, nothing, nothing, decay)
        assert np.log(float(state[0, 0, 0, 0])) == pytest.approx(-20.5, rel=1e-4)


def dots(jaxpr):
    """Every dot_general of a jaxpr and of what it calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from dots(inner)


@pytest.mark.parametrize("op", [*IMPLEMENTATIONS, "softmax"])
def test_float32_products_ask_for_full_precision(op):
    """12: TF32 by default passes on a CPU and fails on a GPU. Forward and backward."""
    (q, k, u, erase, decay, state), _ = recurrence_case("random", **ONE)

    def total(q, k, u):
        if op == "softmax":
            return jnp.sum(ops.softmax_attention(q, k, k)[0])
        o, after = ops.delta_rule(q, k, u, erase, decay, initial_state=state, implementation=op)
        return jnp.sum(o) + jnp.sum(after)

    found = list(dots(jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(q, k, u).jaxpr))
    assert len(found) >= 4
    for equation in found:
        precision = equation.params["precision"]
        assert precision is not None and set(precision) == {jax.lax.Precision.HIGHEST}, equation


def test_chained_bfloat16_products_of_ones():
    """13: the second of two bfloat16 products was wrong on a GPU. 128 t is exact in bfloat16 up to t = 64."""
    ones = jnp.ones((1, 64, 1, 128), jnp.bfloat16)
    o, _ = ops.linear_attention(ones, ones, ones[..., :64], implementation="chunked")
    np.testing.assert_array_equal(np.asarray(o[0, :, 0, 5], np.float32), 128 * np.arange(1, 65))


def test_short_lengths_are_the_beginning_of_a_long_one():
    """20, 22: lengths of 8 and less were illegal tiles, or hit an assertion in training."""
    arguments, cotangents = recurrence_case("random", **{**ONE, "time": 17})
    (truth, _), _ = recurrence_and_gradients(arguments, None, cotangents)

    def total(state, time):
        o, after = ops.delta_rule(*(x[:, :time] for x in arguments[:5]), initial_state=state)
        return jnp.sum(o * cotangents[0][:, :time]), o

    slopes = {}
    for time in (1, 2, 8, 9, 15, 16, 17):
        slopes[time], o = jax.grad(total, has_aux=True)(arguments[5], time)
        assert relative_rms(o, truth[:, :time]) <= TOLERANCE["float32"]
    assert all(np.isfinite(x).all() for x in slopes.values())


@pytest.mark.parametrize("name", MIXERS)
def test_one_token_without_a_cache_and_calls_repeat_bit_by_bit(name, unchecked):
    """21, 52: a single token without a cache took the branch of decoding; repeated steps gave other results. Beyond:
    float16, bfloat16, float64, integer and numpy inputs are cast by the first projection."""
    run, params, x = jax.jit(mixer(name).apply), parameters(name), inputs(5)
    whole, cache = run(params, x)
    first, fresh = run(params, x[:, :1])
    assert relative_rms(first, whole[:, :1]) <= CLOSE
    assert jax.tree.structure(fresh) == jax.tree.structure(cache)
    again = run(params, x[:, :1])
    jax.tree.map(np.testing.assert_array_equal, again, (first, fresh))
    for kind in (np.float16, jnp.bfloat16, np.float64, np.int32):
        y, _ = jax.eval_shape(mixer(name).apply, params, np.asarray(x).astype(kind))
        assert y.dtype == jnp.float32


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 2, 1, 3), (1, 2, 3, 1)], ids=str)
def test_sizes_of_one(implementation, sizes):
    """23: head sizes had to be powers of two. Beyond: H = G = 1, K = 1, V = 1."""
    shape = dict(zip(("key_heads", "heads", "key_dim", "value_dim"), sizes, strict=True))
    arguments, cotangents = recurrence_case("random", batch=2, time=19, **shape)
    compare(implementation, arguments, None, cotangents, chunk_size=16)


EMPTY = [(0, 20, 1, 2, 3, 4), (0, 3, 1, 1, 1, 1), (2, 0, 1, 2, 3, 4), (1, 20, 1, 2, 3, 0), (1, 20, 1, 2, 0, 3)]


@pytest.mark.parametrize("implementation", (*IMPLEMENTATIONS, "auto"))
def test_nothing_at_all_in_the_operators(implementation):
    """Beyond: no row, no token, no channel (a batch sharded to nothing, an empty prompt)."""
    for shape in EMPTY:
        named = dict(zip(("batch", "time", "key_heads", "heads", "key_dim", "value_dim"), shape, strict=True))
        arguments, cotangents = recurrence_case("no decay", **named) if named["key_dim"] else zeros_case(named)
        for ids in (None, np.ones(shape[:2], np.int32)):
            out, gradients = compiled(implementation, 16)(arguments, ids, cotangents)
            for ours, like in zip((*out, *gradients), (*cotangents, *arguments), strict=True):
                assert ours.shape == like.shape and np.isfinite(np.asarray(ours)).all()


def zeros_case(s):
    keys, gates = (s["batch"], s["time"], s["key_heads"], s["key_dim"]), (s["batch"], s["time"], s["heads"])
    states = (s["batch"], s["heads"], s["key_dim"], s["value_dim"])
    arrays = tuple(jnp.zeros(shape) for shape in (keys, keys, (*gates, s["value_dim"]), gates, gates, states))
    return arrays, (arrays[2], arrays[5])


@pytest.mark.parametrize("batch, time", [(0, 12), (2, 0)])
def test_nothing_at_all_in_mixers_and_models(batch, time, unchecked):
    """Beyond: empty batches and prompts, with and without ids and cache, forward and gradient; a classifier of no
    token says what is wrong."""
    for ids, name in itertools.product((None, jnp.ones((batch, time), jnp.int32)), MIXERS):
        module = mixer(name)
        caches = None, module.init_cache(batch)
        # An empty batch is in every shape; an empty prompt is what documents and caches treat each in their own way.
        for cache in caches if time == 0 else caches[:1] if ids is None else caches[1:]:
            run = jax.grad(lambda p, *a, m=module: jnp.sum(m.apply(p, *a)[0]))  # noqa: B023
            jax.eval_shape(run, parameters(name), inputs(time, batch), ids, cache)
    logits, _ = jax.eval_shape(model(*HYBRID).apply, parameters(*HYBRID), tokens(time, batch), ids)
    assert logits.shape == (batch, time, 31)
    classifier = SequenceClassifier(3, WIDTH, 20, ("efla",), {"efla": OPTIONS["efla"]})
    build = functools.partial(jax.eval_shape, classifier.init, jax.random.key(0))
    if time:
        build(jnp.zeros((batch, time, 1)))
    else:
        with pytest.raises(ValueError, match="x: shape .* is not .* with at least one token"):
            build(jnp.zeros((batch, time, 1)))


def test_long_and_tiny_documents_with_a_state_of_zeros():
    """42: one long and many one-token documents hung when a state was given, even of zeros."""
    (q, k, u, erase, decay, state), cotangents = recurrence_case("random", **{**ONE, "time": 95})
    ids = np.concatenate([np.ones(64), np.arange(2, 33)])[None].astype(np.int32)
    out, _ = compare("chunked", (q, k, u, erase, decay, state * 0), ids, cotangents, chunk_size=16)
    bare = ops.delta_rule(q, k, u, erase, decay, segment_ids=jnp.asarray(ids), chunk_size=16)
    assert_close(bare, out, NAMES[:2], 1e-6)


def test_second_order_gradients_and_forward_mode():
    """Beyond: Hessians of the hand-written backward are those of the definition; forward mode is refused by jax with
    a plain TypeError, and works in the definition."""
    (q, k, u, erase, decay, _), _ = recurrence_case("random", **{**ONE, "time": 19})

    def loss(scale, implementation):
        o, state = ops.delta_rule(q, k * scale, u, erase, decay, chunk_size=16, implementation=implementation)
        return jnp.sum(o**2) + jnp.sum(state**3)

    one, twice = jnp.float32(1), {}
    for implementation in ("recurrent", "chunked"):
        slope = jax.grad(loss)
        for outer in (jax.grad, jax.jacfwd):
            twice[implementation, outer] = float(jax.jit(outer(slope), static_argnums=1)(one, implementation))
    assert np.ptp(list(twice.values())) <= 1e-4 * abs(twice["recurrent", jax.grad])
    slope = jax.jvp(lambda s: loss(s, "recurrent"), (one,), (one,))[1]
    assert float(slope) == pytest.approx(float(jax.grad(loss)(one, "chunked")), rel=1e-4)
    with pytest.raises(TypeError, match="forward-mode .* custom_vjp"):
        jax.jvp(lambda s: loss(s, "chunked"), (one,), (one,))


@pytest.mark.parametrize("implementation", ("recurrent", "chunked"))
def test_float16_inputs_and_a_bfloat16_state(implementation):
    """Beyond: gates and state in 16 bits are used in float32, and their gradients come back in 16 bits."""
    arguments, cotangents = recurrence_case("random", jnp.float16, **ONE)
    halves = tuple(x.astype(jnp.float16) for x in arguments[:5])
    state = arguments[5].astype(jnp.bfloat16)
    out, gradients = compare(implementation, (*halves, state), None, cotangents, FLOAT16 * 2)  # state: 8 bits
    assert [x.dtype.name for x in (*out, *gradients)] == ["float16", "float32", *["float16"] * 5, "bfloat16"]


def test_segment_ids_of_any_integer_kind(unchecked):
    """Beyond: negative, huge, 8-bit and numpy ids, also closed over by a traced function without jit."""
    ids = np.array([[0, 1, 1, 0, 1, 2, 2, 0, 3, 3], [1] * 10], np.int32)
    expected = segments(jnp.asarray(ids))
    kinds = [np.choose(ids, [0, -7, 5, -7]), np.choose(ids, [0, 2**31 - 1, -(2**31), 2**31 - 1]).astype(np.int32)]
    kinds += [np.choose(ids, [0, 255, 1, 255]).astype(np.uint8), ids.astype(np.int8), ids.astype(np.int64)]
    for kind in kinds:
        jax.tree.map(np.testing.assert_array_equal, segments(jnp.asarray(kind)), expected)
        logits, _ = jax.eval_shape(
            lambda p, t, kind=kind: model(*HYBRID).apply(p, t, kind), parameters(*HYBRID), tokens(10)
        )
        assert logits.shape == (2, 10, 31)


def test_a_bad_row_stays_alone_and_negative_tokens_are_not_the_last_of_the_vocabulary(unchecked):
    """Beyond: NaN of one batch row must not reach another; token -1 must not embed as the last token."""
    run, x = jax.jit(model(*HYBRID).apply), tokens()
    clean, _ = run(parameters(*HYBRID), x)
    for token in (31, -1, -100, 2**31 - 1):
        logits, cache = run(parameters(*HYBRID), x.at[0, 5].set(token))
        np.testing.assert_array_equal(logits[1], clean[1])
        assert np.isnan(np.asarray(logits[0, 5:])).all()
        states = [leaf for leaf in jax.tree.leaves(cache) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        assert all(np.isfinite(np.asarray(leaf[:, 1])).all() for leaf in states)
    of_bytes = LanguageModel(256, WIDTH, 1, ("efla",), {"efla": OPTIONS["efla"]})  # 256 is no uint8
    jax.eval_shape(of_bytes.init, jax.random.key(0), jnp.zeros((1, 3), jnp.uint8))


@pytest.mark.parametrize("name", ("gated_efla", "attention"))
def test_checkpoint_and_vmap_around_a_mixer(name):
    """Beyond (98): rematerialisation changes no gradient; gradients per example add up to that of the batch."""
    params, x, ids = parameters(name), inputs(), jnp.asarray([[0, 1, 1, 2] * 3, [1] * 12], jnp.int32)

    def loss(params, x, ids):
        return jnp.sum(mixer(name).apply(params, x, ids)[0] ** 2)

    plain = jax.jit(jax.grad(loss))(params, x, ids)
    tree_close(jax.jit(jax.grad(jax.checkpoint(loss)))(params, x, ids), plain)
    each = jax.jit(jax.vmap(lambda x, ids: jax.grad(loss)(params, x[None], ids[None])))(x, ids)
    tree_close(jax.tree.map(lambda leaf: leaf.sum(0), each), plain)


def test_gradients_per_example_on_a_mesh_that_splits_time():
    """Beyond: vmap of a gradient through an operator under context parallelism was refused by jax."""
    (q, k, u, _, decay, _), _ = recurrence_case("random", **{**ONE, "batch": 2, "time": 6})

    def per_example(*arguments):
        def loss(*row):
            o, _ = ops.linear_attention(*(x[None] for x in row), implementation="recurrent")
            return jnp.sum(o**2)

        return jax.vmap(jax.grad(loss, argnums=(0, 1, 2, 3)))(*arguments)

    alone = jax.jit(per_example)(q, k, u, decay)
    with jax.set_mesh(sharding.make_mesh(data=1, context=2, devices=jax.devices()[:2])):
        spread = jax.jit(per_example)(q, k, u, decay)
    tree_close(jax.device_get(spread), alone)


@pytest.mark.parametrize("name", MIXERS)
def test_no_buffer_of_a_fresh_cache_is_another_leaf_too(name):
    """Beyond: who decodes with a mixer alone may donate its cache, and no buffer is donated twice."""
    fresh = MIXERS[name](width=WIDTH, **OPTIONS[name]).init_cache(2)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(fresh) if leaf.size]
    assert len(set(buffers)) == len(buffers)


def test_donated_caches_and_gradients_through_decoding():
    """Beyond: a cache may be donated from its first call on, no buffer twice (a warning is an error here); gradients
    through a prefill and a scan of steps are those of one pass."""
    pair = HYBRID[:2]
    module, params, x = model(*pair), parameters(*pair), tokens(8)
    step = jax.jit(lambda c, t: module.apply(params, t[:, None], None, c), donate_argnums=0)
    cache, logits = module.init_cache(2, max_length=8), []
    for t in range(8):
        now, cache = step(cache, x[:, t])
        logits.append(now)
    whole = jax.jit(module.apply)(params, x)[0]
    assert relative_rms(jnp.concatenate(logits, 1), whole) <= CLOSE

    module, params = model("efla"), jax.jit(model("efla").init)(jax.random.key(0), x)  # attention: see test_layers

    def decoded(params):
        first, cache = module.apply(params, x[:, :5], None, module.init_cache(2, max_length=8))

        def token(cache, now):
            logits, cache = module.apply(params, now[:, None], None, cache)
            return cache, logits

        return jnp.sum(first**2) + jnp.sum(jax.lax.scan(token, cache, x[:, 5:].T)[1] ** 2)

    slopes = jax.jit(jax.grad(lambda p: jnp.sum(module.apply(p, x)[0] ** 2)))(params)
    tree_close(jax.jit(jax.grad(decoded))(params), slopes, 10 * CLOSE)


def test_a_huge_beta_saturates():
    """Beyond: beta |k|^2 up to 1e30 erases everything along the key and stores the value; gradients stay finite."""
    (_, k, v, beta, decay, _), _ = recurrence_case("random", **ONE)
    for beta_value, norm in ((1e10, 1e-3), (1e10, 1.0), (1e10, 1e4), (1e30, 1.0)):
        beta = jnp.full_like(beta, beta_value)
        for flow in (ops.exact_flow, lambda *a: ops.gated_exact_flow(*a, decay)):
            unit, u, erase = flow(norm * k, v, beta)[:3]
            assert relative_rms(erase, np.ones(erase.shape)) <= 1e-6
            if flow is ops.exact_flow:
                assert relative_rms(norm * u, v) <= 1e-5
            slopes = jax.grad(lambda *a, f=flow: sum(jnp.sum(x) for x in f(*a)), argnums=(0, 1, 2))(norm * k, v, beta)
            assert all(np.isfinite(x).all() for x in slopes)


def test_x64_leaves_parameters_states_and_moments_in_float32():
    """7, 8, beyond: a user's jax_enable_x64 made some parameters float64, which the operators refused; 16-bit products
    keep A_log, norms and moments in float32."""
    optimizer, _ = optim.make_optimizer(learning_rate=1e-3, total_steps=9)
    for wide, dtype in ((True, "float32"), (False, "bfloat16")):
        with jax.enable_x64(wide):
            module = model(*MIXERS, dtype=dtype)
            params = jax.eval_shape(module.init, jax.random.key(0), tokens())
            slopes = jax.eval_shape(jax.grad(lambda p, m=module: jnp.sum(m.apply(p, tokens())[0])), params)
            state = jax.eval_shape(optimizer.init, params)
            _, after = jax.eval_shape(optimizer.update, slopes, state, params)
            classifier = SequenceClassifier(3, WIDTH, 9, ("efla",), {"efla": {"num_heads": 2, "beta_bias": 0.0}})
            pixels = jax.eval_shape(classifier.init, jax.random.key(0), jnp.zeros((1, 9, 1), jnp.float32))
        kinds = {leaf.dtype.name for leaf in jax.tree.leaves((params, slopes, pixels))}
        assert kinds == {"float32"} and {leaf.dtype.name for leaf in jax.tree.leaves(after)} == {"float32", "int32"}
        assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_x64_leaves_recurrences_in_float32(implementation):
    """Beyond: under jax_enable_x64 the associative form's identity had 64 bits, which no scan over float32 takes."""
    arguments, cotangents = recurrence_case("zero keys", **ONE)
    with jax.enable_x64(True):
        slopes = jax.eval_shape(compiled(implementation), arguments, BORDERS, cotangents)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(slopes)} == {"float32"}


def test_debug_nans_meets_no_nan():
    """Beyond: jax_debug_nans on, with strong decay, zero keys, documents and a cache that has room."""
    (q, k, u, erase, decay, state), cotangents = recurrence_case("zero keys", **ONE)
    with jax.debug_nans(True):
        compiled("chunked")((q, k, u, erase, decay - 50, state), BORDERS, cotangents)
        unit, u, erase = ops.exact_flow(k, u, erase)
        assert np.isfinite(unit).all()
        cache = ops.init_kv_cache(1, 70, 1, 5, 5)
        o, _ = ops.softmax_attention(q, k, k, initial_state=cache, segment_ids=jnp.asarray(BORDERS))
        assert np.isfinite(o).all()


def test_tiny_temperature_and_top_p_take_the_most_likely_token():
    """Beyond: a temperature that underflows in float32 divided all logits to -inf and drew token 0."""
    logits = jnp.asarray([[-5.0, -3.0, -4.0], [5.0, 6.0, 7.0]])
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    for temperature, top_p in ((1e-30, 1), (1e-40, 1), (1e-60, 1), (1, 1e-7), (1, 1e-60)):
        how = Sampling(jnp.float32(temperature), jnp.int32(0), jnp.float32(top_p))
        assert sample(keys, logits, how).tolist() == [1, 2]


def test_text_of_any_bytes_and_file_names_of_any_bytes(tmp_path):
    """Beyond: unicode, binary and CRLF text keep their bytes; empty files vanish; a name that is not UTF-8 is a name;
    one document cannot be split; JSON nested too deep is named."""
    texts = ["漢字 🎉 ü".encode(), bytes(range(1, 256)), b"a\r\nb\r\n", b"x", b"", *(b"%d" % i for i in range(9))]
    for i, content in enumerate(texts):
        (tmp_path / f"{i}.txt").write_bytes(content)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_bytes(b"name")
    splits = text.load_text(str(tmp_path), valid_fraction=0.5)
    read = b"".join(corpus.tokens.tobytes() for corpus in (splits.train, splits.valid)).split(b"\0")
    assert sorted(filter(None, read)) == sorted(filter(None, [*texts, b"name"]))
    with pytest.raises(ValueError, match="split of .* is empty: 1 documents"):
        text.load_text(str(tmp_path / "0.txt"))
    (tmp_path / "deep.jsonl").write_bytes(b"[" * 100000)
    with pytest.raises(ValueError, match="deep.jsonl', line 1: expected a JSON object"):
        text.load_text(str(tmp_path / "deep.jsonl"))


def test_batches_of_one_and_the_smallest_corpus(tmp_path):
    """Beyond: grain's endless length overflowed for a batch of one; a window of one token, a document of one byte."""
    (tmp_path / "a.txt").write_bytes(b"ab")
    (tmp_path / "b.txt").write_bytes(b"c")
    config = data.DataConfig(path=str(tmp_path / "a.txt"), valid_path=str(tmp_path / "b.txt"), window=1, batch_size=1)
    dataset = data.make(config)
    iterator = dataset.train_iterator(start_step=10**6)
    pairs = sorted((int(b["tokens"][0, 0]), int(b["targets"][0, 0])) for b in (next(iterator), next(iterator)))
    iterator.close()
    assert pairs == [(97, 98), (98, 0)]
    (batch,) = dataset.eval_batches()
    assert (batch["tokens"].item(), batch["targets"].item(), batch["mask"].item()) == (99, 0, 1)
    with pytest.raises(ValueError, match="seed=-1 must be >= 0"):
        data.make(data.DataConfig(seed=-1))


@pytest.mark.parametrize("labels", ([-1, 0, 1, 2], [0.5, 1, 2, 3], [float("nan"), 1, 2, 3], list("abcd")), ids=str)
def test_labels_that_are_no_classes_are_refused(labels, tmp_path):
    """Beyond: such labels were cast to int32 and trained on."""
    pixels = np.zeros((4, 2, 2), np.uint8)
    np.savez(tmp_path / "a.npz", x_train=pixels, y_train=np.array(labels), x_test=pixels, y_test=np.arange(4))
    with pytest.raises(ValueError, match="labels of dtype .* integers >= 0"):
        images.load_images(str(tmp_path / "a.npz"))


def test_metrics_damaged_anywhere_do_not_stop_a_resumed_run(tmp_path):
    """Beyond: a line torn in the middle, bytes that are no text, a step that is no number."""
    row = [json.dumps({"step": s, "loss": 0.5}).encode() + b"\n" for s in range(6)]
    middle = [b'{"step": 2, "lo', b"\xff\xfe\n", b'{"step": null}\n', b'{"step": "2"}\n', b"12\n", b"\0\0\n"]
    for damage in middle:
        folder = tmp_path / damage.hex()
        folder.mkdir()
        (folder / "metrics.jsonl").write_bytes(row[1] + damage + row[3] + row[4] + row[5])
        if damage != middle[0] and b"step" not in damage:
            with pytest.raises(ValueError, match="line 2 is no JSON object"):
                metrics.read_rows(folder)
        with metrics.Writer(folder, start_step=5, tensorboard=False) as writer:
            writer.write(5, {"loss": 1.0})
        steps = [r["step"] for r in metrics.read_rows(folder)]
        assert steps == ([1, 4, 5] if damage == middle[0] else [1, 3, 4, 5])


def test_a_damaged_checkpoint_is_named(tmp_path):
    """Beyond: a step folder that is empty, or lost a part or the end of a file, as an interrupted copy leaves it."""
    state = {"a": jnp.ones((4, 3)), "b": jnp.ones((5,))}
    with Checkpointer(tmp_path / "good") as checkpointer:
        checkpointer.save(1, state, {"next_step": 1}, None)

    def cut(folder):
        for file in folder.rglob("*"):
            if file.is_file():
                file.write_bytes(file.read_bytes()[:5])

    damages = {
        "no state": lambda d: shutil.rmtree(d / "1" / "state"),
        "no data": lambda d: shutil.rmtree(d / "1" / "data"),
        "cut data": lambda d: cut(d / "1" / "data"),
        "cut arrays": lambda d: cut(d / "1" / "state" / "d"),
    }
    for name, damage in damages.items():
        directory = shutil.copytree(tmp_path / "good", tmp_path / name)
        damage(directory)
        with Checkpointer(directory) as checkpointer:
            with pytest.raises(ValueError, match=r"step=1 in .* damaged.* an earlier step"):
                checkpointer.restore(state)

    (tmp_path / "good" / "2").mkdir()  # newest, and nothing in it
    with Checkpointer(tmp_path / "good") as checkpointer:
        with pytest.raises(ValueError, match=r"step=2 in .* damaged.* an earlier step"):
            checkpointer.restore(state, step=2)
        with pytest.warns(UserWarning, match=r"step=2: .* is damaged .* moved to .*2\.damaged"):
            assert checkpointer.restore(state).step == 1


def test_shipped_configs_can_be_overridden_and_flag_files_are_read(tmp_path):
    """76, 79: None and lists cannot be overridden, () beside [] cannot be frozen; 78: overrides inside a --flagfile."""
    for module, arguments in ((quickstart, quickstart.MIXERS), (smnist, tuple(smnist.RATES))):
        for argument in ("", *arguments):
            train.plain(module.get_config(argument))  # raises for None and lists
    with pytest.raises(ValueError, match="config.a.b: None could not be overridden"):
        train.plain({"a": {"b": None}})
    (tmp_path / "flags").write_text(f"--config.optim.learning_rate=1e400\n--workdir={tmp_path}/run\n")
    words = ["experiments.train", "--config=configs/quickstart.py", f"--flagfile={tmp_path}/flags"]
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "config.optim.learning_rate: inf is not a finite" in done.stderr, done.stderr


def test_the_jax_with_quadratic_loops_is_excluded():
    """85: in jax 0.11.1 a loop's writes were quadratic on a CPU."""
    assert '"jax>=0.11.2,' in (ROOT / "pyproject.toml").read_text() and jax.__version_info__ >= (0, 11, 2)
