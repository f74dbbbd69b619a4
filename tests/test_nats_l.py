"""NAtS-L: the router in numpy, the mixer with forced choices against its neighbours, its routing gradients against a
layer with real-valued masks in float64, documents, causality, decoding across borders, sizes.

What holds for every mixer (pieces, caches, padding, meshes, FLOPs) is tested with the others."""

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
from efla_jax.layers import MIXERS, Reading, Router, router
from efla_jax.layers.nats_l import LINEAR, SOFTMAX
from efla_jax.layers.router import straight_through
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


def routed(x):
    """What the router chooses for the full chunks of x, [B, N, R], none of them as close as rounding."""
    whole = x.shape[1] // SIZE
    pooled = np.asarray(x)[:, : whole * SIZE].reshape(len(x), whole, SIZE, WIDTH).mean(2)
    logits = (pooled @ parameters()["params"]["router"]["route_proj"]["kernel"]).reshape(len(x), whole, HEADS, 2)
    assert np.abs(logits[..., 1] - logits[..., 0]).min() > 1e-4
    return np.where(logits[..., 1] > logits[..., 0], LINEAR, SOFTMAX)


def applied(mixer, params, x):
    """Outputs, compiled anew in every call: a choice may be forced in one and not in the next."""
    return jax.jit(lambda params, x: mixer.apply(params, x)[0], compiler_options=QUICKLY)(params, x)


def entries(value, time=TIME):
    return np.full((BATCH, -(-time // SIZE), HEADS), value)


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
    assert np.all(np.asarray(run(params, x)[0])[..., 0] == 1)
    drawn = np.asarray(run(params, x, rngs={"dropout": jax.random.key(3)})[0])[..., 0]
    assert abs(drawn.mean() - 1 / (1 + np.exp(-1))) < 0.08  # 3.6 standard deviations of 400 draws
    plain, _ = Router(1, SIZE).apply(params, x, rngs={"dropout": jax.random.key(3)})
    assert np.all(np.asarray(plain)[..., 0] == 1)


def test_what_was_open_counts_in_the_document_that_goes_on_alone():
    """Documents of 5 tokens: one ends after 3 more, before it fills its chunk, and one goes on over a border."""
    x = inputs(20)
    ids = jnp.asarray([[1] * 3 + [2] * 17, [1] * 20], jnp.int32)
    params = jax.jit(Router(HEADS, SIZE).init)(jax.random.key(0), x)

    def chosen(pooled):
        choice, after = Router(HEADS, SIZE).apply(params, x, ids, jnp.full((BATCH,), 5), pooled)
        return jnp.sum(choice[..., 0]), after

    by_pooled, after = jax.jit(jax.grad(chosen, has_aux=True))(jnp.ones((BATCH, WIDTH)))
    assert not np.any(by_pooled[0]) and np.all(by_pooled[1] != 0)
    np.testing.assert_allclose(after, [x[0, 19], x[1, 11:].sum(0)], rtol=1e-5)


def test_the_softmax_fraction_is_of_full_chunks_and_can_be_penalised():
    mixer, params = make(), parameters()

    def fraction(params):
        wanted = {"capture_intermediates": lambda module, _: isinstance(module, Reading), "mutable": "intermediates"}
        _, state = mixer.apply(params, inputs(), **wanted)
        told = state["intermediates"]["router"]["softmax_fraction"]["__call__"][0].mean
        return jnp.sum(told), told

    (_, told), slope = jax.jit(jax.value_and_grad(fraction, has_aux=True))(params)
    np.testing.assert_allclose(told, (routed(inputs()) == SOFTMAX).mean((0, 1)), rtol=1e-6)
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


def test_packed_and_padded_documents_equal_documents_alone():
    """Documents of 20, 3 and 20 tokens with rotary positions, begun inside chunks of the row, NaN at the padding."""
    mixer, params = make(rope_base=100.0), parameters(rope_base=100.0)
    ids = np.repeat([[0, 1, 2, 3, 0]], [2, 20, 3, 20, 8], axis=1)
    ids = np.insert(ids, [9, 40], 0, axis=1)[:, :TIME]
    x = inputs()[:1]
    run = jax.jit(lambda x, ids: mixer.apply(params, x, ids)[0], compiler_options=QUICKLY)
    y = run(jnp.where(ids[..., None] != 0, x, jnp.nan), jnp.asarray(ids))
    assert not np.any(np.asarray(y)[ids == 0])
    for document in (1, 3):
        at = np.flatnonzero(ids[0] == document)
        assert relative_rms(y[:, at], run(x[:, at], None)) <= CLOSE


def test_prefill_and_decoding_across_borders_are_one_pass():
    """Rows whose prompts end a token before a border, on it and behind it, with rotary positions; the cache, that of a
    first call, holds what each head selected, and the rows go on to different borders at different steps."""
    # The step of Gated DeltaNet is in the tests over all mixers.
    mixer, params = make(step="efla", rope_base=100.0, max_length=TIME), parameters()
    lengths, steps = np.array([SIZE - 1, SIZE, SIZE + 1]), 2 * SIZE + 4
    x = jnp.concatenate([inputs(), inputs(seed=5)[:1]])
    choice = routed(x)
    assert np.all(choice.min((0, 1)) != choice.max((0, 1))) and np.any(choice[..., 0] != choice[..., 1])
    whole = applied(mixer, params, x)
    real = jnp.asarray(np.arange(SIZE + 1) < lengths[:, None], jnp.int32)
    rest = jnp.stack([row[n : n + steps] for row, n in zip(x, lengths, strict=True)])

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def decoded(params, prompt, rest):
        def step(cache, token):
            y, cache = mixer.apply(params, token[:, None], None, cache)
            return cache, y[:, 0]

        y, cache = mixer.apply(params, prompt, real)
        cache, later = jax.lax.scan(step, cache, jnp.moveaxis(rest, 1, 0))
        return y, jnp.moveaxis(later, 0, 1), cache

    y, later, cache = decoded(params, x[:, : SIZE + 1], rest)
    for row, n in enumerate(lengths):
        assert relative_rms(y[row, :n], whole[row, :n]) <= CLOSE
        assert relative_rms(later[row], whole[row, n : n + steps]) <= CLOSE
    assert cache.kv.position.tolist() == cache.state.position.tolist() == (lengths + steps).tolist()
    full = (lengths + steps) // SIZE
    assert cache.kv.pages.tolist() == [np.sum(row[:n] == SOFTMAX) for row, n in zip(choice, full, strict=True)]


def test_a_cache_has_room_for_a_part_of_what_can_be_selected():
    """ceil(room R chunks); after a first call besides what that may have selected."""

    def pages(cache):
        return cache.kv.k.shape[1]

    assert pages(make(max_length=95).init_cache(1)) == 2 * 5
    half = make(max_length=95, softmax_room=0.5, num_routes=1)
    assert pages(half.init_cache(1)) == 3 and pages(half.init_cache(1, max_length=15)) == 0
    for time, room in ((0, 3), (40, 2 + 2), (95, 5 + 3), (100, 6 + 3)):  # 100 + 95 tokens fill 12 chunks
        _, cache = jax.eval_shape(half.apply, parameters(num_routes=1), inputs(time))
        assert pages(cache) == room, time


def rms_norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def reference(p, x, counterfactual=False, skipped_decay=True, own_chunk="both", merge="queries", output_norm=True):
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
        jnp.full_like(choice[..., 1], skipped_decay),
        state, state, none, jnp.asarray(ids), jnp.zeros(batch, jnp.int32), SIZE, own_chunk != "softmax",
    )  # fmt: skip
    a, b = (rms_norm(split(y, count), p[f"{n}_norm"]["scale"]) for y, n in ((q, "q"), (k, "k")))
    where = map(jnp.asarray, oracle.document_chunks(ids, SIZE))
    (attention,) = oracle.block_sparse(  # 4^-1/2
        a / 2, b, split(v, count), choice[..., 0], *where, float(own_chunk != "linear")
    )
    linear, mix = split(linear, count), jnp.ones(2)
    if merge != "none":
        source = {"queries": q, "inputs": x}[merge]
        mix = jax.nn.softmax(split(source @ p["mix_proj"]["kernel"], count), axis=-1)
    if output_norm:
        linear, attention = rms_norm(linear, p["linear_norm"]["scale"]), rms_norm(attention, p["softmax_norm"]["scale"])
    else:
        linear *= 8**-0.5
    y = mix[..., :1] * linear + mix[..., 1:] * attention
    return (y.reshape(batch, time, -1) * jax.nn.silu(x @ p["g_proj"]["kernel"])) @ p["o_proj"]["kernel"]


def check_every_gradient(**options):
    mixer, params, x, weight = make(**options), parameters(**options)["params"], inputs(seed=3), inputs()
    # As they begin, next to nothing is left behind a chunk. Of these inputs some heads keep a chunk, pass the next over
    # and keep one again: a chunk passed over scales a state that holds but one, and norms take that out.
    params = {**params, "A_log": params["A_log"] - 4.0}

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
        truth, (true_params, true_x) = slopes(lambda p, x: reference(p, x, **options), *wide)
    assert relative_rms(y, truth) <= CLOSE and relative_rms(by_x, true_x) <= 5 * CLOSE
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(by_params), jax.tree.leaves(true_params), strict=True):
        assert relative_rms(ours, theirs) <= 5 * CLOSE, jax.tree_util.keystr(path)
    assert np.abs(by_params["router"]["route_proj"]["kernel"]).max() > 1e-3


@pytest.mark.parametrize("counterfactual", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_outputs_and_every_gradient_are_those_of_real_valued_masks(counterfactual):
    """The router's too, which the choice hides from the outputs."""
    check_every_gradient(counterfactual=counterfactual)


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
    # Two programs, whose sums XLA may fuse in different ways: the same but for roundings.
    assert relative_rms(kept[:, : 2 * SIZE], held[:, : 2 * SIZE]) <= CLOSE
    assert relative_rms(kept[:, 2 * SIZE :], held[:, 2 * SIZE :]) > 1e-3


def hand_count(arg):
    d, inner, keys, heads = (1536, 4096, 1152, 18) if arg.endswith("760m") else (1024, 2816, 768, 12)
    delta = 2 * d * keys + 3 * 2 * d * keys + 2 * 6 * d + 4 * 4 * keys + 2 * 6
    mixers = {
        "gated_delta_net": delta + 2 * keys // 6,
        "nats_l": delta + 2 * d * 6 + keys * 2 * heads + 2 * (128 + 64),
        "attention": 4 * d * d + 2 * 64,
    }
    model = lm_nats_l.get_config(arg).model
    tail = model.get("tail", ())
    pattern = model.mixers * ((21 - len(tail)) // len(model.mixers)) + tail
    layers = sum(mixers[name] + 3 * d * inner + 2 * d for name in pattern)
    return layers + 2 * 32000 * d + d


@pytest.mark.parametrize("arg", ["nats_l_hybrid", "nats_l_760m", "gdn_hybrid_rope"])
def test_recipes_have_the_parameters_counted_by_hand(arg):
    config = settings.plain(lm_nats_l.get_config(arg))
    model = settings.build_model(config, types.SimpleNamespace(kind="tokens", vocab_size=32000))
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == hand_count(arg)
    softmax = [i for i, name in enumerate(model.layers) if name != "gated_delta_net"]
    assert softmax == ([3, 7, 11, 15, 19, 20] if "hybrid" in arg else list(range(21)))
    sharding.specs(params)


def test_counts_of_the_recipes_are_those_published_and_those_they_say():
    assert hand_count("nats_l_hybrid") / 1e6 == pytest.approx(380.1, abs=0.05)
    assert hand_count("nats_l_hybrid_760m") / 1e6 == pytest.approx(793.1, abs=0.05)
    for name in lm_nats_l.MODELS:
        row, _ = (line for line in lm_nats_l.__doc__.splitlines() if line.startswith(f"| {name} |"))  # the other: cost
        assert row.endswith(f"| {hand_count(name):,} | {hand_count(name + '_760m'):,} |")


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
        ({"num_routes": 3}, "num_routes: 3, but it must divide num_heads=2"),
        ({"num_routes": 0}, "num_routes: 0, but it must divide num_heads=2"),
        ({"rope_base": 100.0, "num_attention_heads": 16}, "rope_base: 100.0 with attention heads of 1"),
        ({"step": "elfa"}, "step: 'elfa' .* Did you mean 'efla'"),
        ({"max_length": 0}, "max_length: 0 is less than 1"),
        ({"softmax_room": 0.0}, r"softmax_room: 0.0 is not in \(0, 1\]"),
    ],
)
def test_wrong_fields_are_errors(options, message, no_type_checks):
    with pytest.raises(ValueError, match=message):
        make(**options)
