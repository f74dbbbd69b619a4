"""NAtS-L: the router in numpy, the mixer with forced choices against its neighbours, its routing gradients against a
layer with real-valued masks in float64, documents, causality, sizes."""

import functools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from configs import lm_nats_l
from efla_jax import sharding
from efla_jax.flops import forward_flops_per_token
from efla_jax.layers import MIXERS, Reading, Router, router
from efla_jax.layers.router import chunk_means, straight_through
from efla_jax.model import LanguageModel
from efla_jax.ops.document_chunks import document_chunks
from efla_jax.train import settings
from tests import oracle
from tests.oracle import relative_rms

WIDTH, HEADS, SIZE, TIME, BATCH = 12, 2, 16, 53, 2
QUICKLY = {"xla_backend_optimization_level": 0}
CLOSE = 2e-5  # float32 against float32 or float64: other orders of sums at most 53 terms long, through two norms


def make(name="nats_l", **options):
    return MIXERS[name](**{"width": WIDTH, "num_heads": HEADS, "head_dim": 8, "chunk_size": SIZE, **options})


def inputs(time=TIME, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(BATCH, time, WIDTH)), jnp.float32)


@functools.cache
def parameters(name="nats_l", **options):
    params = jax.jit(make(name, **options).init)(jax.random.key(1), inputs(4))
    rng = np.random.default_rng(2)  # norms that are all one would hide an axis mixed up
    return jax.tree.map(lambda p: p + 0.2 * rng.normal(size=p.shape).astype(np.float32), params)


def forced(choice):
    """A context in which every router's logits are +-5 as choice [B, N, R] (1: linear) says."""

    def logits(_, noise=0.0):
        return jax.nn.one_hot(jnp.asarray(choice, jnp.int32), 2)

    return mock.patch.object(router, "straight_through", logits)


def applied(mixer, params, x):
    """Outputs, compiled anew in every call: a choice may be forced in one and not in the next."""
    return jax.jit(lambda params, x: mixer.apply(params, x)[0], compiler_options=QUICKLY)(params, x)


def entries(value, time=TIME):
    return np.full((BATCH, -(-time // SIZE), HEADS), value)


def test_the_pooled_mean_is_of_the_real_tokens_of_full_chunks():
    ids = np.repeat([[1, 2, 3], [1, 1, 4]], [20, 3, 30], axis=1)
    ids[0, [0, 1, 7, 30]] = 0
    x = np.asarray(inputs())
    chunk, _, entry = oracle.document_chunks(ids, SIZE)
    means = np.zeros((BATCH, 4, WIDTH))
    for b, t in zip(*np.nonzero(entry >= 0), strict=True):
        means[b, entry[b, t]] += x[b, t] / SIZE
    assert np.any(means[:, 1]) and len(set(chunk[0])) > 4
    found = jax.jit(lambda x: chunk_means(x, document_chunks(BATCH, TIME, SIZE, jnp.asarray(ids)), SIZE))(x)
    assert relative_rms(found, means) <= CLOSE
    half = chunk_means(jnp.asarray(x, jnp.bfloat16), document_chunks(BATCH, TIME, SIZE), SIZE)
    assert half.dtype == jnp.float32 and not np.any(half[:, 3])  # the last chunk does not fill up


def test_the_choice_is_hard_and_its_gradient_soft():
    logits = jnp.asarray([[1.0, 1.0], [-0.3, 0.4], [2.0, -1.0]])
    assert straight_through(logits).tolist() == [[1, 0], [0, 1], [1, 0]]  # equal: softmax
    g = jnp.asarray([[0.7, -0.2], [0.3, 0.0], [0.0, 2.0]])
    slope = jax.grad(lambda x: jnp.sum(g * straight_through(x)))(logits)
    p = np.asarray(jax.nn.softmax(logits))
    first = p[:, 0] * p[:, 1] * (g[:, 0] - g[:, 1])
    np.testing.assert_allclose(slope, np.stack([first, -first], 1), rtol=1e-5)


def test_noise_comes_with_a_dropout_rng_only_and_draws_the_softmax():
    x = jnp.ones((400, SIZE, 1))
    params = {"params": {"route_proj": {"kernel": jnp.asarray([[1.0, 0.0]])}}}
    run = Router(1, SIZE, gumbel=True).apply
    assert np.all(np.asarray(run(params, x))[..., 0] == 1)
    drawn = np.asarray(run(params, x, rngs={"dropout": jax.random.key(3)}))[..., 0]
    assert abs(drawn.mean() - 1 / (1 + np.exp(-1))) < 0.08  # 3.6 standard deviations of 400 draws
    assert np.all(np.asarray(Router(1, SIZE).apply(params, x, rngs={"dropout": jax.random.key(3)}))[..., 0] == 1)


def test_the_softmax_fraction_is_of_full_chunks_and_can_be_penalised():
    mixer, params = make(), parameters()

    def fraction(params):
        wanted = {"capture_intermediates": lambda module, _: isinstance(module, Reading), "mutable": "intermediates"}
        _, state = mixer.apply(params, inputs(), **wanted)
        told = state["intermediates"]["router"]["softmax_fraction"]["__call__"][0].mean
        return jnp.sum(told), told

    (_, told), slope = jax.jit(jax.value_and_grad(fraction, has_aux=True))(params)
    pooled = np.asarray(inputs())[:, : 3 * SIZE].reshape(BATCH, 3, SIZE, WIDTH).mean(2)
    logits = (pooled @ np.asarray(params["params"]["router"]["route_proj"]["kernel"])).reshape(BATCH, 3, HEADS, 2)
    np.testing.assert_allclose(told, (logits[..., 0] >= logits[..., 1]).mean((0, 1)), rtol=1e-6)
    assert 0 < told.mean() < 1
    assert np.abs(slope["params"]["router"]["route_proj"]["kernel"]).min() > 0


def weigh_one_branch(monkeypatch, which):
    """Let the merge take one output alone: 0 linear, 1 softmax."""

    def one(self, q, linear, attention):
        return linear if which == 0 else attention

    monkeypatch.setattr(MIXERS["nats_l"], "mixed", one)


BARE = {"output_norm": False, "output_gate": False}


@pytest.mark.parametrize("step", ["gated_delta_net", "efla"])
def test_all_linear_is_the_delta_rule(monkeypatch, step):
    name, options = ("gated_delta_net", {}) if step == "gated_delta_net" else ("gated_efla", {"step": "split"})
    weigh_one_branch(monkeypatch, 0)
    params = parameters(name, **BARE, **options)
    own = parameters(step=step, **BARE)["params"]
    shared = {"params": {**own, **params["params"]}}
    with forced(entries(1)):
        y = applied(make(step=step, **BARE), shared, inputs())
    truth = applied(make(name, **BARE, **options), params, inputs())
    assert relative_rms(y, truth) <= CLOSE
    with forced(entries(0)):
        assert relative_rms(applied(make(step=step, **BARE), shared, inputs()), truth) > 0.05


@pytest.mark.parametrize("rope_base", [0.0, 100.0])
def test_all_softmax_is_causal_attention(monkeypatch, rope_base):
    """Of the same projections, without convolution and activation, which attention has not."""
    weigh_one_branch(monkeypatch, 1)
    plain = {"conv_width": 0, "activation": "none", "expand_v": 1.0, "rope_base": rope_base, **BARE}
    mixer = make(num_attention_heads=4, **plain)
    attention = MIXERS["attention"](width=WIDTH, num_heads=4, head_dim=4, rope_base=rope_base, qk_norm=True)
    params = jax.jit(attention.init)(jax.random.key(4), inputs(4))
    shared = {"params": {**parameters(num_attention_heads=4, **plain)["params"], **params["params"]}}
    with forced(entries(0)):
        y = applied(mixer, shared, inputs())
    assert relative_rms(y, applied(attention, params, inputs())) <= CLOSE
    with forced(entries(1)):
        own = applied(mixer, shared, inputs())
    assert relative_rms(own[:, :SIZE], y[:, :SIZE]) <= CLOSE and relative_rms(own, y) > 0.05


def test_the_type_of_a_chunk_changes_nothing_up_to_its_end():
    choice = np.random.default_rng(7).integers(0, 2, (BATCH, 4, HEADS))
    outputs = []
    for flip in (0, 1):
        choice[:, 1] ^= flip
        with forced(choice):
            outputs.append(np.asarray(applied(make(), parameters(), inputs())))
    np.testing.assert_array_equal(outputs[0][:, : 2 * SIZE], outputs[1][:, : 2 * SIZE])
    assert np.all(np.abs(outputs[0] - outputs[1])[:, 2 * SIZE :].max(-1) > 0)


def test_no_token_sees_a_later_one_though_the_router_reads_whole_chunks():
    run, cut = jax.jit(make().apply), 37
    changed = inputs().at[:, cut:].set(inputs(seed=9)[:, cut:] * 3)
    y, z = (np.asarray(run(parameters(), x)[0]) for x in (inputs(), changed))
    np.testing.assert_array_equal(y[:, :cut], z[:, :cut])
    assert np.all(np.abs(y - z)[:, cut:].max(-1) > 0)


@pytest.mark.parametrize("time", [0, 1, SIZE - 1, SIZE, SIZE + 1])
def test_short_sequences_are_prefixes(time):
    y = applied(make(), parameters(), inputs()[:, :time])
    assert y.shape == (BATCH, time, WIDTH)
    if time:
        whole = applied(make(), parameters(), inputs())
        assert relative_rms(y, whole[:, :time]) <= CLOSE


def test_packed_and_padded_documents_equal_documents_alone():
    """Documents of 20, 3 and 20 tokens, begun inside chunks of the row, NaN at the padding: outputs and gradients."""
    mixer, params = make(rope_base=100.0), parameters(rope_base=100.0)
    ids = np.repeat([[0, 1, 2, 3, 0]], [2, 20, 3, 20, 8], axis=1)
    ids = np.insert(ids, [9, 40], 0, axis=1)[:, :TIME]
    real = ids[0] != 0
    x, weight = inputs()[:1], inputs(seed=3)[:1]

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def slopes(params, x, weight, ids):
        def total(params, x):
            y, _ = mixer.apply(params, x, ids)
            return jnp.sum(y * weight), y

        return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(params, x)

    (_, y), (by_params, by_x) = slopes(params, jnp.where(real[:, None], x, jnp.nan), weight, jnp.asarray(ids))
    assert not np.any(np.asarray(y)[0, ~real]) and not np.any(np.asarray(by_x)[0, ~real])
    summed = jax.tree.map(jnp.zeros_like, params)
    for document in (1, 2, 3):
        at = np.flatnonzero(ids[0] == document)
        (_, alone), (alone_params, alone_x) = slopes(params, x[:, at], weight[:, at], None)
        assert relative_rms(y[:, at], alone) <= CLOSE and relative_rms(by_x[:, at], alone_x) <= 5 * CLOSE
        summed = jax.tree.map(jnp.add, summed, alone_params)
    jax.tree.map(lambda a, b: np.testing.assert_array_less(relative_rms(a, b), 5 * CLOSE), by_params, summed)


def rms_norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def reference(p, x, counterfactual):
    """The layer from its formulas, with masks that are real numbers in the oracle's dense and sequential forms."""
    batch, time, _ = x.shape
    count = 2 * HEADS
    ids = np.ones((batch, time), np.int32)

    def projected(name):
        y = jnp.pad(x @ p[f"{name}_proj"]["kernel"], ((0, 0), (3, 0), (0, 0)))
        y = sum(y[:, i : i + time] * p[f"{name}_conv"]["weight"][i] for i in range(4))
        return jax.nn.silu(y)

    def split(x, heads):
        return x.reshape(batch, time, heads, -1)

    whole = time // SIZE
    pooled = x[:, : whole * SIZE].reshape(batch, whole, SIZE, -1).mean(2)
    soft = jax.nn.softmax((pooled @ p["router"]["route_proj"]["kernel"]).reshape(batch, whole, HEADS, 2))
    hard = jnp.stack([soft[..., 0] >= soft[..., 1], soft[..., 0] < soft[..., 1]], -1)
    choice = jnp.where(hard | counterfactual, soft - jax.lax.stop_gradient(soft), 0) + hard
    q, k, v = map(projected, "qkv")
    beta, log_decay = (
        jax.nn.sigmoid(x @ p["b_proj"]["kernel"]),
        -jnp.exp(p["A_log"]) * jax.nn.softplus(x @ p["a_proj"]["kernel"] + p["dt_bias"]),
    )
    unit_q, unit_k = (split(y, HEADS) / jnp.linalg.norm(split(y, HEADS), axis=-1, keepdims=True) for y in (q, k))
    state, none = jnp.zeros((batch, HEADS, 8, 16)), jnp.zeros((batch, HEADS))
    linear, *_ = oracle.routed(
        unit_q, unit_k, beta[..., None] * split(v, HEADS), beta, log_decay, choice[..., 1],
        jnp.ones_like(choice[..., 1]),
        state, state, none, jnp.asarray(ids), jnp.zeros(batch, jnp.int32), SIZE,
    )  # fmt: skip
    a, b = (rms_norm(split(y, count), p[f"{n}_norm"]["scale"]) for y, n in ((q, "q"), (k, "k")))
    where = map(jnp.asarray, oracle.document_chunks(ids, SIZE))
    (attention,) = oracle.block_sparse(a / 2, b, split(v, count), choice[..., 0], *where)  # 4^-1/2
    mix = jax.nn.softmax(split(q @ p["mix_proj"]["kernel"], count), axis=-1)
    y = mix[..., :1] * rms_norm(split(linear, count), p["linear_norm"]["scale"])
    y += mix[..., 1:] * rms_norm(attention, p["softmax_norm"]["scale"])
    return (y.reshape(batch, time, -1) * jax.nn.silu(x @ p["g_proj"]["kernel"])) @ p["o_proj"]["kernel"]


@pytest.mark.parametrize("counterfactual", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_outputs_and_every_gradient_are_those_of_real_valued_masks(counterfactual):
    """The router's too, which the choice hides from the outputs."""
    mixer, params, x, weight = make(counterfactual=counterfactual), parameters()["params"], inputs(), inputs(seed=3)

    def slopes(run, *arguments):
        def total(params, x, weight):
            y = run(params, x)
            return jnp.sum(y * weight), y

        (_, y), slope = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True), compiler_options=QUICKLY)(
            *arguments
        )
        return jax.tree.map(np.asarray, (y, slope))

    y, (by_params, by_x) = slopes(lambda p, x: mixer.apply({"params": p}, x)[0], params, x, weight)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (params, x, weight))
        truth, (true_params, true_x) = slopes(lambda p, x: reference(p, x, counterfactual), *wide)
    assert relative_rms(y, truth) <= CLOSE and relative_rms(by_x, true_x) <= 5 * CLOSE
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(by_params), jax.tree.leaves(true_params), strict=True):
        assert relative_rms(ours, theirs) <= 5 * CLOSE, jax.tree_util.keystr(path)
    assert np.abs(by_params["router"]["route_proj"]["kernel"]).max() > 1e-3


def test_fewer_routes_decide_for_several_heads_and_skipped_decay_is_a_choice():
    params = parameters(num_routes=1)
    y = applied(make(num_routes=1), params, inputs())
    kernel = params["params"]["router"]["route_proj"]["kernel"]
    twice = {"params": {**params["params"], "router": {"route_proj": {"kernel": jnp.tile(kernel, (1, HEADS))}}}}
    assert relative_rms(applied(make(), twice, inputs()), y) <= CLOSE
    choice = entries(0)
    choice[:, 0] = 1  # the second chunk is skipped; the third reads a state that it may have faded
    with forced(choice):
        kept, held = (applied(make(skipped_decay=skipped), twice, inputs()) for skipped in (True, False))
    np.testing.assert_array_equal(kept[:, : 2 * SIZE], held[:, : 2 * SIZE])
    assert relative_rms(kept[:, 2 * SIZE :], held[:, 2 * SIZE :]) > 1e-3


@pytest.mark.parametrize(
    "arg, parameters",
    [
        ("nats_l_hybrid", 380.1), ("nats_l_hybrid_760m", 793.1),
        ("nats_l", 0), ("nats_l_760m", 0), ("gdn_hybrid", 0), ("gdn_hybrid_rope_760m", 0), ("gdn", 0), ("gdn_760m", 0),
    ],
)  # fmt: skip
def test_recipes_have_the_published_parameters_and_those_counted_by_hand(arg, parameters):
    config = settings.plain(lm_nats_l.get_config(arg))
    model = settings.build_model(config, types.SimpleNamespace(kind="tokens", vocab_size=32000))
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    sharding.specs(params)
    d, inner, keys, heads = (1536, 4096, 1152, 18) if arg.endswith("760m") else (1024, 2816, 768, 12)
    delta = 2 * d * keys + 3 * 2 * d * keys + 2 * 6 * d + 4 * 4 * keys + 2 * 6
    mixers = {
        "gated_delta_net": delta + 2 * keys // 6,
        "nats_l": delta + 2 * d * 6 + keys * 2 * heads + 2 * (128 + 64),
        "attention": 4 * d * d + 2 * 64,
    }
    hand = sum(mixers[name] + 3 * d * inner + 2 * d for name in model.mixers) * (21 // len(model.mixers))
    assert count == hand + 2 * 32000 * d + d
    assert not parameters or count / 1e6 == pytest.approx(parameters, abs=0.05)
    name, column = arg.removesuffix("_760m"), 4 if arg.endswith("760m") else 3
    (row,) = (line for line in lm_nats_l.__doc__.splitlines() if line.startswith(f"| {name} |"))
    assert row.split("|")[column + 1].strip() == f"{count:,}"


def test_flops_by_hand():
    """6 K V a head; 2 (K + V) for half the own chunk and half of those before; the router once a chunk."""
    options = {"nats_l": {"num_heads": 2, "head_dim": 8, "chunk_size": 16}}
    model = LanguageModel(32, WIDTH, 1, ("nats_l",), options, mlp="none")
    dense = WIDTH * (16 + 16 + 32 + 32 + 2 + 2) + 32 * WIDTH + 4 * (16 + 16 + 32) + 16 * 8 + WIDTH * 32
    router = WIDTH * 2 * 2 / 16
    operators = 2 * (6 * 8 * 16 + 2 * (8 + 16) * (8 + (80 - 16) / 4))
    assert forward_flops_per_token(model, 80) == pytest.approx(2 * (dense + router) + operators, rel=1e-12)


@pytest.fixture
def no_type_checks():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_attention_heads": 3}, "num_attention_heads: 3 must be a multiple of num_heads=2"),
        ({"num_attention_heads": 6}, "num_attention_heads: 6 .* key dim 8 and value dim 16"),
        ({"num_key_heads": 1}, "num_key_heads: 1, but both branches"),
        ({"num_routes": 3}, "must divide"),
        ({"rope_base": 100.0, "num_attention_heads": 16}, "rope_base: 100.0 with attention heads of 1"),
        ({"step": "elfa"}, "step: 'elfa' .* Did you mean 'efla'"),
    ],
)
def test_wrong_fields_are_errors(options, message, no_type_checks):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_cache_is_refused():
    with pytest.raises(NotImplementedError, match="no cache yet"):
        make().apply(parameters(), inputs(), None, ())
    with pytest.raises(NotImplementedError, match="no cache yet"):
        make().init_cache(2)
