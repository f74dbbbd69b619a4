"""The language model and the classifier: parameter counts, scan, remat, dropout, caches, packing, readings, errors."""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

from efla_jax import sharding
from efla_jax.flops import forward_flops_per_token
from efla_jax.layers import MIXERS, Block, Reading
from efla_jax.layers.block import swiglu_width
from efla_jax.layers.projections import float32_logits, float32_sums
from efla_jax.model import LanguageModel, SequenceClassifier
from efla_jax.train.step import make_signals
from tests.oracle import relative_rms

OPTIONS = {name: {"num_heads": 2} for name in MIXERS}
OPTIONS["nats_l"] |= {"chunk_size": 16, "implementation": "recurrent"}
OPTIONS["mamba2"]["state_dim"] = OPTIONS["log_linear_mamba2"]["state_dim"] = 8
PATTERN = ("efla", "attention")  # a recurrent state and a cache that grows
CLOSE = 2e-5  # float32 against float32, sums in another order


def model(**options):
    fields = {"vocab_size": 31, "width": 16, "depth": 4, "mixers": PATTERN} | options
    chosen = {name: OPTIONS[name] for name in fields["mixers"] if name in OPTIONS}
    return LanguageModel(**{"mixer_options": chosen, **fields})


def tokens(time=12, batch=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 31, size=(batch, time)), jnp.int32)


@functools.cache
def parameters(**options):
    params = jax.jit(model(**options).init)(jax.random.key(0), tokens())
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape).astype(np.float32), params)


def loss(params, module, *arguments, **options):
    logits, _ = module.apply(params, *arguments, **options)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0])


def tree_close(ours, theirs, tolerance=CLOSE):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert relative_rms(a, b) <= tolerance, f"{jax.tree_util.keystr(path)}: {relative_rms(a, b):.1e}"


def size(module, *arguments):
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(module.init, jax.random.key(0), *arguments)))


def test_parameter_count_of_the_340m_efla_configuration():
    """Width D = 1024, 24 blocks, 8 heads of 128, convolutions of 4, SwiGLU of 2816, 32000 tokens, untied.

    Block: q, k, v, o 4 D^2 = 4194304; beta 8 D = 8192; three convolutions 3 * 4 D = 12288; head norm 128; two norms
    2 D = 2048; SwiGLU 3 D * 2816 = 8650752; together 12867712. Model: 24 * 12867712 + 2 * 32000 D + D = 374362112."""
    options = {"vocab_size": 32000, "width": 1024, "depth": 24}
    efla = LanguageModel(mixers=("efla",), mixer_options={"efla": {"num_heads": 8}}, **options)
    assert size(efla, tokens()) == 374362112
    delta = LanguageModel(mixers=("delta_net",), mixer_options={"delta_net": {"num_heads": 8}}, **options)
    assert size(delta, tokens()) == 374362112  # the exact flow has no parameter of its own
    tied = LanguageModel(mixers=("efla",), mixer_options={"efla": {"num_heads": 8}}, tie_embeddings=True, **options)
    assert size(tied, tokens()) == 374362112 - 32000 * 1024


@pytest.mark.parametrize(
    "name, depth, heads, count",
    # The public flash-linear-attention configurations of width 2048 and 32000 tokens.
    [
        ("delta_net", 24, {"num_heads": 16}, 1365677056),
        ("gated_delta_net", 21, {"num_heads": 6, "head_dim": 256}, 1387348732),
    ],
)
def test_parameter_counts_of_published_checkpoints(name, depth, heads, count):
    big = LanguageModel(vocab_size=32000, width=2048, depth=depth, mixers=(name,), mixer_options={name: heads})
    assert size(big, tokens()) == count


def test_parameter_count_of_mamba2():
    """D = 64, inner 128, 4 heads, state 16, 2 groups: z, x, B, C: D (256 + 64); dt 4 D; convs 5 * (128 + 64); A_log,
    dt_bias, D 12; norm 128; out_proj 128 D; block norm D. Model of 3 blocks and 31 tokens, tied, no MLP."""
    options = {"num_heads": 4, "state_dim": 16, "num_groups": 2}
    small = LanguageModel(31, 64, 3, ("mamba2",), {"mamba2": options}, mlp="none", tie_embeddings=True)
    assert size(small, tokens()) == 3 * (64 * 320 + 4 * 64 + 5 * 192 + 12 + 128 + 128 * 64 + 64) + 31 * 64 + 64


def test_swiglu_width():
    assert [swiglu_width(width, 4.0) for width in (1024, 1536, 2048)] == [2816, 4096, 5632]
    assert [swiglu_width(width, 4.0) for width in (64, 96)] == [192, 256]
    bare, chosen = (
        jax.eval_shape(module.init, jax.random.key(0), tokens())["params"]["groups"]["block_0"]
        for module in (model(mlp="none"), model(mlp_width=40))
    )
    assert "mlp" not in bare and chosen["mlp"]["down_proj"]["kernel"].shape == (2, 40, 16)


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_alone_in_a_model(name):
    """Logits in float32, next-token causality, and the cache that init_cache promised."""
    module, x = model(mixers=(name,), depth=2), tokens()
    params = parameters(mixers=(name,), depth=2)
    run = jax.jit(module.apply)
    logits, _ = run(params, x)
    assert (logits.shape, logits.dtype) == ((2, 12, 31), jnp.float32)
    changed, _ = run(params, x.at[:, 7].add(1) % 31)
    assert relative_rms(changed[:, :7], logits[:, :7]) <= CLOSE < relative_rms(changed[:, 7:], logits[:, 7:])
    cache = module.init_cache(2, max_length=20)
    _, after = jax.eval_shape(module.apply, params, x, None, cache)
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(lambda a: (a.shape, a.dtype), cache)


def test_pieces_of_a_hybrid_are_one_pass():
    module, params, x = model(), parameters(), tokens()
    ids = jnp.asarray([[0, 1, 1, 1, 2, 2, 0, 2, 2, 2, 2, 3], [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 0, 0]], jnp.int32)
    run = jax.jit(module.apply)
    whole, after = run(params, x, ids, module.init_cache(2, max_length=16))
    cache, outputs = module.init_cache(2, max_length=16), []
    for start, stop in ((0, 3), (3, 4), (4, 9), (9, 12)):
        logits, cache = run(params, x[:, start:stop], ids[:, start:stop], cache)
        outputs.append(logits)
    real = np.asarray(ids != 0)
    assert relative_rms(np.concatenate(outputs, axis=1)[real], np.asarray(whole)[real]) <= CLOSE
    tree_close(cache, after)


def test_packed_documents_equal_documents_alone():
    module, params, x = model(), parameters(), tokens(batch=1)
    ids = jnp.asarray([[0, 1, 1, 0, 1, 2, 2, 2, 2, 0, 2, 0]], jnp.int32)
    packed, _ = jax.jit(module.apply)(params, x, ids)
    for document in (1, 2):
        at = np.flatnonzero(np.asarray(ids[0]) == document)
        alone, _ = jax.jit(module.apply)(params, x[:, at])
        assert relative_rms(packed[:, at], alone) <= CLOSE


def test_what_stands_at_padding_does_not_matter():
    """A padding token beyond the vocabulary, NaN pixels: the same values and gradients, all finite."""

    def slopes(module, params, ids, *inputs):
        def total(params, x):
            out = module.apply(params, x, ids)
            real = (ids != 0)[..., None]
            return jnp.sum(jnp.where(real, out[0], 0.0) ** 2) if isinstance(out, tuple) else jnp.sum(out**2)

        run = jax.jit(jax.value_and_grad(total))
        return [run(params, x) for x in inputs]

    ids = jnp.asarray([[0, 1, 1, 0, 1, 2, 2, 2, 2, 0, 2, 0]], jnp.int32)
    x = tokens(batch=1)
    tree_close(*slopes(model(), parameters(), ids, jnp.where(ids == 0, 99, x), x), 0.0)
    module, ids = classifier(), jnp.minimum(ids, 1)
    pixels = jnp.asarray(np.random.default_rng(0).uniform(size=(1, 12, 1)), jnp.float32)
    params = jax.jit(module.init)(jax.random.key(0), pixels)
    tree_close(*slopes(module, params, ids, jnp.where(ids[..., None] == 0, jnp.nan, pixels), pixels), 0.0)


def test_rows_are_put_in_order_once_and_nothing_is_asked_below():
    """A device waits for the host at every condition: a training step of packed rows has none, wherever padding stands;
    and who reads intermediates token by token gets them where the tokens stand."""
    module, x = model(mixers=("gated_delta_net",), depth=2), tokens()
    ids = jnp.array([[1, 0, 1, 2, 0, 0, 2, 2, 2, 2, 3, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]], jnp.int32)
    params = parameters(mixers=("gated_delta_net",), depth=2)

    def blocks(module, name):
        return name == "__call__" and isinstance(module, Block)

    text = jax.jit(jax.grad(loss), static_argnums=1).lower(params, module, x, ids).as_text()
    assert "stablehlo.case" not in text and "stablehlo.if" not in text
    logits, _ = module.apply(params, x, ids)
    (same, _), captured = module.apply(params, x, ids, capture_intermediates=blocks, mutable="intermediates")
    np.testing.assert_allclose(
        np.where(ids[..., None] == 0, 0, logits), np.where(ids[..., None] == 0, 0, same), atol=1e-5
    )
    alone, _ = module.apply(params, x, (ids == 1).astype(jnp.int32))
    np.testing.assert_allclose(logits[1, 2:], alone[1, 2:], atol=1e-5)
    assert jax.tree.leaves(captured)


@functools.cache
def gradient(**options):
    module = model(**options)
    return jax.jit(jax.value_and_grad(lambda params: loss(params, module, tokens())))(parameters())


@pytest.mark.parametrize("options", [{"scan": False}, {"remat": "full"}, {"remat": "dots"}])
def test_scan_and_remat_change_neither_parameters_nor_gradients(options):
    # The same sums, fused differently; short queries and keys, made unit vectors, magnify the last bit: 2.4e-5.
    tree_close(gradient(**options), gradient(), 1e-4)


def test_scan_is_one_group_and_unrolled_is_all_of_them():
    def products(**options):
        return jax.jit(model(**options).apply).lower(parameters(), tokens()).as_text().count("stablehlo.dot_general")

    assert products(scan=False) > 1.5 * products()  # two groups, less the head and what groups share as one function


def test_remat_saves_memory_and_unused_caches_cost_none():
    """Bytes of temporaries and results of a compiled gradient step. A returned cache of 4096 slots would be 2 groups *
    2 rows * 4096 * 16 * (k and v) * 4 bytes = 2 MiB, far above all else."""

    def memory(use_cache=False, room=4096, **options):
        chosen = {"efla": {"num_heads": 2}, "attention": {"num_heads": 2, "max_length": room}}
        module, x = model(mixer_options=chosen, **options), tokens(64)

        def step(params):
            (value, cache), grads = jax.value_and_grad(total, has_aux=True)(params)
            return value, grads, cache if use_cache else None

        def total(params):
            logits, cache = module.apply(params, x)
            return jnp.mean(logits**2), cache

        stats = jax.jit(step).lower(parameters()).compile().memory_analysis()
        return stats.temp_size_in_bytes, stats.output_size_in_bytes

    plain = memory()
    assert memory(room=64) == plain
    assert memory(remat="full")[0] < 0.7 * plain[0]
    assert sum(memory(use_cache=True)) > sum(plain) + 2**21


def test_dropout_is_active_exactly_when_its_rng_is_passed():
    module, params, x = model(dropout=0.5), parameters(), tokens()
    run = jax.jit(lambda key: module.apply(params, x, rngs={"dropout": key})[0])
    plain = jax.jit(module.apply)(params, x)[0]
    tree_close(jax.jit(model().apply)(params, x)[0], plain, 0.0)
    first, again, other = run(jax.random.key(1)), run(jax.random.key(1)), run(jax.random.key(2))
    tree_close(again, first, 0.0)
    assert relative_rms(first, plain) > 0.1 < relative_rms(other, first)
    fields = {"mixer_class": MIXERS["efla"], "mixer_fields": {"width": 16, "num_heads": 2}, "width": 16, "mlp_width": 0}
    block, inside = Block(**fields, dropout=0.9), jnp.ones((1, 8, 16))
    weights = block.init(jax.random.key(0), inside)
    dropped = block.apply(weights, inside, rngs={"dropout": jax.random.key(1)})[0] - inside
    assert 0.8 < jnp.mean(dropped == 0) < 1 and jnp.all(block.apply(weights, inside)[0] - inside != 0)
    none = jax.jit(lambda key: model().apply(params, x, rngs={"dropout": key})[0])(jax.random.key(1))
    tree_close(none, plain, 0.0)


def test_embeddings_can_be_dropped_alone():
    """A block that adds nothing leaves the embedding: of the dropped one, with half of its entries, doubled, or 0."""
    own, x, rng = parameters()["params"], tokens(), {"dropout": jax.random.key(1)}
    params = {"params": own | {"groups": jax.tree.map(jnp.zeros_like, own["groups"])}}

    def stream(**rates):
        return model(**rates).apply(params, x, None, None, rngs=rng, method="mixed")[0]

    whole = np.asarray(model().apply(params, x, None, None, method="mixed")[0])
    dropped = np.asarray(stream(embedding_dropout=0.5))
    assert 0.4 < np.mean(dropped == 0) < 0.6
    np.testing.assert_allclose(dropped[dropped != 0], 2 * whole[dropped != 0], rtol=1e-6)
    np.testing.assert_array_equal(stream(dropout=0.5), dropped)  # the embedding's part of it
    np.testing.assert_array_equal(stream(dropout=0.5, embedding_dropout=0.0), whole)


def test_bfloat16_products_float32_parameters_and_logits():
    module = model(dtype="bfloat16")
    initial = jax.eval_shape(module.init, jax.random.key(0), tokens())
    assert {leaf.dtype for leaf in jax.tree.leaves(initial)} == {jnp.dtype(jnp.float32)}
    narrow, wide = jax.jit(module.apply), jax.jit(model().apply)
    assert narrow(parameters(), tokens())[0].dtype == jnp.float32
    # Four blocks of two branches, each a few roundings to 8 bits. Some rows amplify them, so that one draw reads up to
    # 0.06: the middle one of five counts.
    draws = [(narrow(parameters(), x)[0], wide(parameters(), x)[0]) for x in map(lambda i: tokens(seed=i), range(5))]
    assert np.median([relative_rms(*pair) for pair in draws]) <= 5e-2


def test_blocks_behind_the_last_repetition_know_their_depth():
    """Their parameters are laid out as those of the groups, and what is read of them has its layer's number."""
    options = {name: OPTIONS[name] for name in (*PATTERN, "nats_l")}
    module = model(tail=("nats_l",), depth=5, mixer_options=options)
    assert module.layers == PATTERN * 2 + ("nats_l",)
    params = jax.jit(module.init)(jax.random.key(0), tokens())
    groups, last = params["params"]["groups"], params["params"]["last"]
    assert set(last) == {"block_4"} and {leaf.shape[0] for leaf in jax.tree.leaves(last)} == {1}
    specs = sharding.specs(params)["params"]
    assert specs["last"]["block_4"]["mlp"] == specs["groups"]["block_0"]["mlp"]
    assert {leaf.shape[0] for leaf in jax.tree.leaves(groups)} == {2}
    told = make_signals(module)(params, {"tokens": tokens(32)})
    assert {name.split("/")[1] for name in told if "/" in name} == {"layer_04"}
    _, cache = jax.jit(module.apply)(params, tokens())
    jax.tree.map(lambda a, b: None, cache, module.init_cache(2))  # of one structure
    whole = model(mixers=module.layers, depth=5, mixer_options=options)
    assert forward_flops_per_token(module, 32) == forward_flops_per_token(whole, 32)


def test_tied_embeddings_are_read_twice():
    module = model(tie_embeddings=True)
    params = {"params": {k: v for k, v in parameters()["params"].items() if k != "lm_head"}}
    logits, _ = jax.jit(module.apply)(params, tokens())
    untied = {"params": {**params["params"], "lm_head": {"kernel": params["params"]["embed"]["embedding"].T}}}
    assert relative_rms(logits, jax.jit(model().apply)(untied, tokens())[0]) <= CLOSE


@pytest.mark.parametrize("options", [{}, {"remat": "full"}, {"scan": False}])
def test_readings_leave_through_capture_with_gradients(options):
    module, x = model(**options), tokens()

    @jax.jit
    def stiffness(params):
        (logits, _), state = module.apply(
            params, x, capture_intermediates=lambda sub, _: isinstance(sub, Reading), mutable="intermediates"
        )
        told = state["intermediates"]["groups"]["block_0"]["mixer"]
        return jnp.sum(told["stiffness"]["__call__"][0].mean), (told, logits)

    (_, (told, logits)), grads = jax.jit(jax.value_and_grad(stiffness, has_aux=True))(parameters())
    assert {name: value["__call__"][0].median.shape for name, value in told.items()} == {
        "key_norm": (2, 2), "stiffness": (2, 2), "erase": (2, 2),
    }  # fmt: skip
    assert np.any(grads["params"]["groups"]["block_0"]["mixer"]["b_proj"]["kernel"])
    assert not np.any(grads["params"]["lm_head"]["kernel"])
    assert relative_rms(logits, jax.jit(module.apply)(parameters(), x)[0]) <= CLOSE


def test_as_an_nnx_module():
    wrapped = nnx.bridge.ToNNX(model(), rngs=nnx.Rngs(0)).lazy_init(tokens())
    state = nnx.to_pure_dict(nnx.state(wrapped, nnx.Param))
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, parameters()["params"])
    logits, _ = wrapped(tokens())
    assert relative_rms(logits, jax.jit(model().apply)({"params": state}, tokens())[0]) <= CLOSE


def test_initialisation_inside_a_model_is_that_of_the_mixer_alone():
    options = {"num_heads": 64, "head_dim": 1}
    module = model(mixers=("gated_delta_net",), mixer_options={"gated_delta_net": options}, depth=3)
    mixer = jax.jit(module.init)(jax.random.key(0), tokens())["params"]["groups"]["block_0"]["mixer"]
    rate, dt = np.exp(mixer["A_log"]), np.logaddexp(0, mixer["dt_bias"])
    assert rate.shape == (3, 64) and 0 < rate.min() < 1 and 15 < rate.max() <= 16
    assert 1e-3 <= dt.min() * (1 + 1e-5) and dt.max() <= 0.1 * (1 + 1e-5)
    assert relative_rms(mixer["A_log"][0], mixer["A_log"][1]) > 0.1  # layers draw their own


def classifier(name="efla", **options):
    return SequenceClassifier(
        num_classes=3, width=16, max_length=14, mixers=(name,), mixer_options={name: {**OPTIONS[name], **options}}
    )


@pytest.mark.parametrize("name", MIXERS)
def test_classifier_reads_the_last_real_token(name):
    module = classifier(name)
    x = jnp.asarray(np.random.default_rng(0).uniform(size=(2, 10, 1)), jnp.float32)
    params = jax.jit(module.init)(jax.random.key(0), x)
    run = jax.jit(module.apply)
    logits = run(params, x)
    assert (logits.shape, logits.dtype) == ((2, 3), jnp.float32)
    ids = np.ones((2, 13), np.int32)
    ids[0, 10:], ids[1, [0, 4, 12]] = 0, 0
    padded = np.full((2, 13, 1), 50.0, np.float32)
    padded[ids != 0] = np.asarray(x).reshape(20, 1)
    assert relative_rms(run(params, jnp.asarray(padded), jnp.asarray(ids)), logits) <= CLOSE
    ids[0, 9], ids[1, 11] = 0, 0  # one token less, by the program that is there
    assert relative_rms(run(params, jnp.asarray(padded), jnp.asarray(ids)), logits) > 1e-3


def test_classifier_of_sequential_mnist():
    """784 pixels, width 64: front end 64, positions 784 * 64, q, k, v 3 * 64^2, beta 65, LayerNorm 128, head 650."""
    recipe = {
        "num_heads": 1, "conv_width": 0, "activation": "none", "query_norm": "none", "output_norm": False,
        "output_projection": False, "kernel_init": "xavier", "beta_bias": -2.0,
    }  # fmt: skip
    module = SequenceClassifier(10, 64, 784, ("efla",), {"efla": recipe})
    assert size(module, jnp.zeros((1, 784, 1))) == 64 + 784 * 64 + 3 * 64**2 + 65 + 128 + 650


@pytest.fixture
def no_type_checks():
    """The library's own messages, not beartype's."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mixers": ("elfa",)}, "mixers: 'elfa' is not one of .* Did you mean 'efla'"),
        ({"mixers": ()}, "mixers: the pattern is empty"),
        ({"mixers": "efla"}, "mixers: 'efla' is a str; write a tuple"),
        ({"mixers": ["efla"]}, r"mixers: \['efla'\] is a list; write a tuple"),
        ({"tail": "efla"}, "tail: 'efla' is a str; write a tuple"),
        ({"mixer_options": None}, "mixer_options: None has no fields by mixer; write"),
        ({"mixer_options": {"efla": 2}}, "mixer_options: {'efla': 2} has no fields by mixer"),
        ({"mixers": ("efla",), "mixer_options": OPTIONS}, "mixer_options: there are options for 'attention'"),
        ({"mixer_options": {"efla": {"num_heads": 2}}}, r"mixer_options\['attention'\]: num_heads is missing"),
        ({"mixers": ("efla",), "mixer_options": {"efla": {"num_head": 2}}}, "'num_head' is not an option.*'num_heads'"),
        ({"mixers": ("efla",), "mixer_options": {"efla": {"num_heads": 3}}}, "width: 16 is not divisible by num_heads"),
        ({"depth": 3}, "depth: 3 blocks are not a whole number of patterns"),
        ({"depth": 0}, "depth: 0 blocks"),
        ({"tail": ("efla",)}, r"depth: 4 blocks .* and the tail \('efla',\). Choose a multiple of 2, plus 1"),
        ({"tail": ("efla",), "depth": 1}, "depth: 1 blocks are not a whole number"),
        ({"tail": ("elfa",), "depth": 5}, "mixers: 'elfa' is not one of .* Did you mean 'efla'"),
        ({"vocab_size": 0}, "vocab_size: 0 is less than 1"),
        ({"mlp_width": -1}, "mlp_width: -1 is less than 0"),
        ({"dtype": "float64"}, "dtype: 'float64' is not one of"),
        ({"mlp": "gelu"}, "mlp: 'gelu' is not one of"),
        ({"remat": "dot"}, "remat: 'dot' is not one of .*Did you mean 'dots'"),
        ({"dropout": 1.0}, "dropout: 1.0 is not in"),
        ({"embedding_dropout": -0.1}, "embedding_dropout: -0.1 is not in"),
        ({"kernel_init": "xavir"}, "kernel_init: 'xavir'.*'xavier'"),
    ],
)
def test_wrong_fields_are_errors_when_the_model_is_built(options, message, no_type_checks):
    with pytest.raises(ValueError, match=message):
        model(**options)


def test_wrong_fields_are_errors_when_the_classifier_is_built(no_type_checks):
    with pytest.raises(ValueError, match="width: 16 is not divisible by num_heads=3"):
        classifier(num_heads=3)


def test_wrong_arrays_are_errors(no_type_checks):
    with pytest.raises(ValueError, match="tokens: float32.* pass token ids"):
        model().init(jax.random.key(0), jnp.zeros((2, 4)))
    with pytest.raises(ValueError, match=re.escape("tokens: int32[4]")):
        model().init(jax.random.key(0), jnp.zeros((4,), jnp.int32))
    with pytest.raises(ValueError, match=re.escape("tokens: a list is not an integer array [B, T]; pass")):
        model().init(jax.random.key(0), [[1, 2]])
    cache = model().init_cache(2)
    for wrong in (cache[:1], cache + cache[:1], cache[0], 3):
        with pytest.raises(ValueError, match="cache: not a tuple of 2, one for each mixer"):
            model().init(jax.random.key(0), tokens(), None, wrong)
    with pytest.raises(ValueError, match="segment_ids: shape"):
        model().init(jax.random.key(0), tokens(), jnp.ones((2, 3), jnp.int32))
    with pytest.raises(ValueError, match="x: 15 tokens, but max_length=14"):
        classifier().init(jax.random.key(0), jnp.zeros((1, 15, 1)))


@pytest.mark.identity
def test_the_public_index_is_lazy_and_starts_no_backend():
    program = """
import sys
import efla_jax
assert not {"jax", "flax", "numpy"} & set(sys.modules), "efla_jax alone imports too much"
from efla_jax import LanguageModel, SequenceClassifier, generate, layers, ops
assert {"LanguageModel", "generate", "layers", "ops"} <= set(dir(efla_jax))
assert ops.delta_rule and layers.MIXERS and generate.generate
LanguageModel(vocab_size=8, width=8, depth=1, mixer_options={"efla": {"num_heads": 1}})
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend was started by import"
try:
    efla_jax.nothing
except AttributeError as error:
    assert "no attribute 'nothing'" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_logits_are_float32_and_their_cotangent_has_the_dtype_of_the_operands():
    """Gradients are those of the plain product, up to the rounding of one bfloat16 operand."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, kernel = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, ((2, 5, 8), (8, 11)), strict=False))
    weights, dimensions = jax.random.normal(keys[2], (2, 5, 11)), (((2,), (0,)), ((), ()))

    def gradients(product):
        return jax.grad(lambda x, k: jnp.sum(weights * product(x, k, dimensions, None)), argnums=(0, 1))(x, kernel)

    assert float32_logits(x, kernel, dimensions).dtype == jnp.float32
    for ours, plain in zip(gradients(float32_logits), gradients(float32_sums), strict=True):
        assert relative_rms(ours, plain) < 8e-3
    text = str(jax.make_jaxpr(lambda: gradients(float32_logits))())
    wide = [line for line in text.splitlines() if "dot_general" in line and "preferred_element_type=float32" in line]
    assert len(wide) <= 1  # the forward product alone


def test_the_gradient_of_a_frequent_token_is_summed_in_float32():
    """A bfloat16 sum of ones would stay at 256: the embedding's gradient is scattered into float32."""
    lm = LanguageModel(vocab_size=4, width=8, depth=1, dtype="bfloat16", mixer_options={"efla": {"num_heads": 1}})
    tokens = jnp.zeros((1, 4), jnp.int32)
    params = jax.jit(lm.init)(jax.random.key(0), tokens)

    def total(params):
        return jnp.sum(lm.apply(params, tokens, method=lm.features)[0]).astype(jnp.float32)

    text = str(jax.make_jaxpr(jax.grad(total))(params))
    scattered = re.findall(r":(\w+)\[4,8\] = scatter-add", text)
    assert scattered == ["f32"]
