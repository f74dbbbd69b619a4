"""Decoding with every block by itself and matrices in the dtype of products: the same logits, caches and tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from efla_jax.generate import Choice, Decoding, generate, prefill
from efla_jax.generate.unrolled import GATES, apart, narrow, together, unrolled
from efla_jax.layers import MIXERS
from efla_jax.layers.projections import float32_logit_rows, float32_rows, rows_of_products
from efla_jax.model import LanguageModel
from efla_jax.sharding import path_of
from tests.oracle import relative_rms

VOCABULARY = 23
OPTIONS = {name: {"num_heads": 2} for name in MIXERS}
OPTIONS["nats_l"] |= {"chunk_size": 16, "implementation": "recurrent"}
OPTIONS["log_linear_efla"]["level_kind"] = "mlp_softplus"
OPTIONS["mamba2"]["state_dim"] = OPTIONS["log_linear_mamba2"]["state_dim"] = 8
PATTERN = ("efla", "attention")


@functools.cache
def model_of(mixers=PATTERN, depth=4, dtype="float32", tail=()):
    options = {name: OPTIONS[name] for name in mixers + tail}
    model = LanguageModel(
        vocab_size=VOCABULARY, width=16, depth=depth, mixers=mixers, mixer_options=options, dtype=dtype, tail=tail
    )
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    return model, jax.tree.map(lambda p: 3 * p, params)  # initial logits are nearly flat: decide more clearly


@pytest.mark.parametrize("tail", ((), ("attention", "efla")))
def test_blocks_by_themselves_are_the_same_model(tail):
    depth = 4 + len(tail)
    model, params = model_of(depth=depth, tail=tail)
    blocks, own = unrolled(model, params)
    assert blocks.mixers == PATTERN * 2 + tail and set(own["params"]["groups"]) == {f"block_{i}" for i in range(depth)}
    tokens = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    read = jax.jit(lambda model, params, tokens, cache: model.apply(params, tokens, None, cache), static_argnums=0)
    logits, cache = read(model, params, tokens, model.init_cache(2, 16))
    found, after = read(blocks, own, tokens, apart(model.init_cache(2, 16), 2, 2))
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)
    after = together(after, 2, 2)
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    assert max(jax.tree.leaves(jax.tree.map(relative_rms, after, cache))) <= 1e-5
    first, second = (jax.tree.leaves(cache)[0][i] for i in range(2))
    assert not np.allclose(first, second)  # or their order would not show


class Plain(LanguageModel):
    """Its parameters are under a name of its own, so that decoding leaves it as it is."""

    def init(self, *arguments):
        return self.renamed(super().init(*arguments), "groups", "own")

    def apply(self, params, *arguments, **options):
        return super().apply(self.renamed(params, "own", "groups"), *arguments, **options)

    @nn.nowrap
    def renamed(self, params, old, new):
        return {"params": {new if name == old else name: leaf for name, leaf in params["params"].items()}}


def test_a_model_of_another_build_keeps_its_cache_as_it_is():
    model, params = model_of(depth=5, tail=("efla",))
    fields = ("vocab_size", "width", "depth", "mixers", "mixer_options", "tail")
    other = Plain(**{field: getattr(model, field) for field in fields})
    own = other.renamed(params, "groups", "own")
    assert unrolled(other, own)[0] is other
    said = generate(other, own, [[3, 1, 4], [1, 5]], max_new_tokens=5, greedy=True)
    assert said == generate(model, params, [[3, 1, 4], [1, 5]], max_new_tokens=5, greedy=True)


def test_decoding_recomputes_nothing():
    model, params = model_of()
    assert unrolled(model.clone(remat="dots"), params)[0] == unrolled(model, params)[0]


def test_a_mixer_of_a_dtype_of_its_own_keeps_its_matrices():
    model, params = model_of(dtype="bfloat16")
    options = {"efla": {**OPTIONS["efla"], "dtype": "float32"}, "attention": OPTIONS["attention"]}
    model = model.clone(mixer_options=options)
    _, own = unrolled(model, params)
    for i, dtype in enumerate(("float32", "bfloat16") * 2):
        block = own["params"]["groups"][f"block_{i}"]
        assert block["mixer"]["q_proj"]["kernel"].dtype == dtype
        assert block["mlp"]["up_proj"]["kernel"].dtype == own["params"]["lm_head"]["kernel"].dtype == "bfloat16"
    assert len(generate(model, params, [[3, 1, 4]], max_new_tokens=3, greedy=True)[0]) == 3


class Gated(nn.Module):
    """A mixer from elsewhere, whose gates are of float32."""

    width: int
    num_heads: int
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x, segment_ids=None, cache=None):
        def dense(name, dtype):
            return nn.Dense(self.width, use_bias=False, dtype=dtype, name=name)(x)

        return (dense("q_proj", self.dtype) * nn.sigmoid(dense("a_proj", "float32"))).astype(x.dtype), cache


class OfFloat32(nn.Module):
    """One that takes no dtype."""

    width: int
    num_heads: int

    @nn.compact
    def __call__(self, x, segment_ids=None, cache=None):
        return nn.Dense(self.width, use_bias=False, dtype="float32", name="q_proj")(x).astype(x.dtype), cache


def test_a_mixer_from_elsewhere_keeps_what_it_may_read_in_float32(monkeypatch):
    for mixer in (Gated, OfFloat32):
        monkeypatch.setitem(MIXERS, mixer.__name__, mixer)
    names, tokens = ("Gated", "OfFloat32"), jnp.array([[3, 1, 4]])
    options = {name: {"num_heads": 1} for name in names}
    model = LanguageModel(VOCABULARY, width=16, depth=2, mixers=names, mixer_options=options, dtype="bfloat16")
    params = model.init(jax.random.key(0), tokens)
    _, own = unrolled(model, params)
    found = {name: own["params"]["groups"][f"block_{i}"]["mixer"] for i, name in enumerate(names)}
    assert found["Gated"]["q_proj"]["kernel"].dtype == "bfloat16"
    assert found["Gated"]["a_proj"]["kernel"].dtype == found["OfFloat32"]["q_proj"]["kernel"].dtype == "float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_and_cache_of_blocks_of_tokens(dtype):
    """A token at a time by the model as it is."""
    model, params = model_of(dtype=dtype)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3]]
    prefix = prefill(model, params, prompts, coming=9)
    decoding = Decoding(model, params, prefix, Choice(temperature=0), max_new_tokens=9, keep=True)
    tokens = np.concatenate(list(decoding), axis=1)
    step = jax.jit(lambda params, token, cache: model.apply(params, token, None, cache))
    logits, cache, expected = prefix.logits, prefix.cache, []
    for _ in range(9):
        expected.append(np.argmax(logits, axis=-1))
        logits, cache = step(params, jnp.asarray(expected[-1][:, None], jnp.int32), cache)
        logits = logits[:, 0]
    np.testing.assert_array_equal(tokens, np.stack(expected, axis=1))
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    assert relative_rms(decoding.logits, logits) < tolerance
    for found, wanted in zip(jax.tree.leaves(decoding.cache), jax.tree.leaves(cache), strict=True):
        if found.ndim > 2 and found.shape != wanted.shape:  # rooms differ
            found, wanted = found[:, :, : wanted.shape[2]], wanted[:, :, : found.shape[2]]
        assert found.dtype == wanted.dtype and relative_rms(found, wanted) < tolerance
    assert generate(model, params, prompts, max_new_tokens=9, greedy=True) == tokens.tolist()


@pytest.mark.parametrize("name", MIXERS)
def test_narrow_matrices_are_what_products_read(name):
    """All of them, and nothing that is read in float32: logits of both parameters have the same bits; with any other
    matrix or filter rounded, too, they would not."""
    model, params = model_of((name,), depth=1, dtype="bfloat16")
    tokens = jnp.arange(12)[None] % VOCABULARY
    read = jax.jit(lambda params: model.apply(params, tokens)[0])
    logits, small = read(params), narrow(params, "bfloat16")
    np.testing.assert_array_equal(read(small), logits)
    leaves = jax.tree_util.tree_leaves_with_path(small)
    rounded = [path_of(path) for path, leaf in leaves if leaf.dtype == jnp.bfloat16]
    others = [path_of(path) for path, leaf in leaves if leaf.dtype != jnp.bfloat16 and leaf.ndim > 2]
    assert all("route" in path or not path.endswith("kernel") for path in others), others
    assert any("lm_head" in path for path in rounded) and any("down_proj" in path for path in rounded)
    changed = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.astype("bfloat16").astype(leaf.dtype) if path_of(path) in others else leaf, params
    )
    assert not others or (read(changed) != logits).any(), f"{others}: read in bfloat16 alone, so of {GATES.pattern}"


def test_one_row_is_multiplied_as_rows_are():
    """Value and gradients of a row of its own, and no product of it for each entry of the kernel in XLA's input."""
    x, kernel = jax.random.normal(jax.random.key(0), (1, 1, 8)), jax.random.normal(jax.random.key(1), (8, 5))
    dimensions = (((2,), (0,)), ((), ()))

    def loss(product, x, kernel):
        return jnp.sum(jnp.sin(product(x, kernel, dimensions)))

    for argument in (0, 1):
        slopes = [jax.grad(loss, argument + 1)(f, x, kernel) for f in (rows_of_products, jax.lax.dot_general)]
        np.testing.assert_allclose(*slopes, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        rows_of_products(x, kernel, dimensions), jax.lax.dot_general(x, kernel, dimensions), rtol=1e-6, atol=1e-6
    )
    text = jax.jit(lambda *a: rows_of_products(*a, dimensions)).lower(x, kernel).as_text()
    assert "(tensor<2x8xf32>, tensor<8x5xf32>) -> tensor<2x5xf32>" in text
    small = x.astype("bfloat16"), kernel.astype("bfloat16")
    wide = rows_of_products(*(x.astype("float32") for x in small), dimensions)
    for product in (float32_rows, float32_logit_rows):
        found = product(*small, dimensions)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, wide, rtol=1e-6)
