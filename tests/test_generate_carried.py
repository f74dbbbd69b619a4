"""What a loop over tokens carries of a cache: rings of the convolutions' inputs, and documents that stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efla_jax.generate import Sampling, decode_block
from efla_jax.generate.carried import carried, in_order, kind, written
from efla_jax.layers import MIXERS
from efla_jax.layers.cache import RecurrentCache
from efla_jax.model import LanguageModel

VOCABULARY = 23
# Of each kind of cache one; the others are slow tests.
ROUTINE = ("attention", "gated_delta_net", "log_linear_mamba2", "nats_l")
OPTIONS = {name: {"num_heads": 2} for name in MIXERS}
OPTIONS["nats_l"] |= {"chunk_size": 16, "implementation": "recurrent"}
OPTIONS["mamba2"]["state_dim"] = OPTIONS["log_linear_mamba2"]["state_dim"] = 8


def cache_of(inputs, state=0.0, segment=0):
    """A cache of two rows with leading axes as in a model of `inputs[0].shape[0]` repetitions."""
    rows = inputs[0].shape[:2] if inputs else (1, 2)
    return RecurrentCache(tuple(inputs), jnp.full((*rows, 1), state), jnp.full(rows, segment, jnp.int32))


@pytest.mark.parametrize("count", [1, 3], ids=["unrolled", "repeated"])
@pytest.mark.parametrize("taps", [2, 4, 5])
def test_a_ring_holds_what_shifted_inputs_hold(count, taps):
    """Before, within and after a turn; three mixers with two convolutions of different channels, one of another number
    of channels and so of a ring of its own, and one without any."""
    text = np.random.default_rng(0).normal(size=(3, count, 2, 3 * taps, 7)).astype(np.float32)

    def shifted(end):  # as mixers return it
        q, k, v = text[..., end - taps + 1 : end, :]
        mixers = [q[..., :4], q[..., 4:]], [v[..., :2]], [], [k[..., :4], k[..., 4:]]
        return tuple(cache_of([jnp.asarray(x) for x in inputs], state=end, segment=5) for inputs in mixers)

    like = shifted(taps - 1)
    carry = carried(like)
    assert sorted(x.shape for x in carry.rings.values()) == [(n * count, 2, taps - 1, c) for n, c in ((1, 2), (2, 7))]
    for token in range(2 * taps):
        found = in_order(carry, like, jnp.int32(token))
        jax.tree.map(np.testing.assert_array_equal, found, shifted(taps - 1 + token))
        carry = written(carry, shifted(taps + token), jnp.int32(token))


@pytest.mark.parametrize("segment, count, found", [(0, 0, 0), (0, 2, 1), (7, 0, 7), (7, 2, 7)])
def test_documents_begin_with_a_token_and_then_stay(segment, count, found):
    like = (cache_of([jnp.zeros((1, 2, 3, 4))] * 2, segment=segment),)
    assert (in_order(carried(like), like, jnp.int32(count))[0].segment == found).all()


@pytest.mark.parametrize(
    "conv",
    [(), (jnp.zeros((1, 2, 0, 4)),) * 2, (jnp.zeros((1, 2, 3, 4)), jnp.zeros((1, 2, 2, 4))), (jnp.zeros((1, 2, 4)),)],
    ids=["none", "one tap", "different taps", "the last input alone"],
)
def test_convolutions_that_are_no_ring_are_carried_as_they_are(conv):
    like = (cache_of(list(conv)),)
    carry = carried(like)
    after = written(carry, like, jnp.int32(1))
    assert carry.rings == after.rings == {} and kind(jnp.zeros(3)) is None  # what a mixer of one's own may have
    for found in (carry.parts, in_order(carry, like, jnp.int32(1)), after.parts):
        assert all(x is y for x, y in zip(found[0].conv, conv, strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ROUTINE else pytest.mark.slow) for name in MIXERS]
)
def test_a_block_of_tokens_leaves_the_cache_of_as_many_single_ones(name):
    """From a prompt of one token on, more tokens than a turn of the ring, in blocks that end within one."""
    model = LanguageModel(vocab_size=VOCABULARY, width=16, depth=2, mixers=(name,), mixer_options={name: OPTIONS[name]})
    params = jax.tree.map(lambda p: 3 * p, jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))
    step = jax.jit(lambda params, token, cache: model.apply(params, token, None, cache))
    logits, cache = step(params, jnp.array([[3], [1]]), model.init_cache(2, 16))
    begin = jax.tree.map(jnp.copy, (logits[:, 0], cache))
    expected = []
    for _ in range(6):
        expected.append(jnp.argmax(logits[:, -1], axis=-1))
        logits, cache = step(params, expected[-1][:, None], cache)
    how, nothing = Sampling(jnp.float32(1), jnp.int32(0), jnp.float32(1)), jnp.array([-1])
    going, tokens = jnp.ones(2, bool), []
    for count in (2, 4):
        given = *begin, going, None, how, nothing, jnp.int32(VOCABULARY), jnp.int32(0), jnp.int32(count)
        found, *begin, going, _ = decode_block(model, params, *given, block=4, greedy=True)
        tokens.append(found[:, :count])
    np.testing.assert_array_equal(jnp.concatenate(tokens, axis=1), jnp.stack(expected, axis=1))
    assert jax.tree.structure(begin[1]) == jax.tree.structure(cache)
    np.testing.assert_allclose(begin[0], logits[:, 0], rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), begin[1], cache)
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype and x.shape == y.shape, begin[1], cache)
    assert all(jax.tree.leaves(same))
