"""Generation: rows of different lengths against single runs and re-reading everything, sampling, stopping, errors."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from efla_jax.generate import Sampling, decode_block, generate, likely, read_piece, sample
from efla_jax.layers import MIXERS, Reading
from efla_jax.model import LanguageModel

VOCABULARY = 23
OPTIONS = {name: {"num_heads": 2} for name in MIXERS}
OPTIONS["nats_l"] |= {"chunk_size": 16, "implementation": "recurrent"}
OPTIONS["mamba2"]["state_dim"] = OPTIONS["log_linear_mamba2"]["state_dim"] = 8
PROMPTS = ([3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2])


def model(*mixers):
    options = {name: OPTIONS[name] for name in mixers}
    return LanguageModel(vocab_size=VOCABULARY, width=16, depth=len(mixers), mixers=mixers, mixer_options=options)


@functools.cache
def parameters(module):
    params = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    return jax.tree.map(lambda p: 3 * p, params)  # initial logits are nearly flat: decide more clearly


@functools.cache
def applied(module):
    return jax.jit(module.apply)


def reread(module, prompt, count, room=24):
    """Greedy tokens by reading the whole text again for each of them, padded to one length behind the causal mask."""
    text = list(prompt)
    for _ in range(count):
        tokens = jnp.asarray([text + [0] * (room - len(text))], jnp.int32)
        logits, _ = applied(module)(parameters(module), tokens)
        text.append(int(jnp.argmax(logits[0, len(text) - 1])))
    return text[len(prompt) :]


# One of each kind of cache, and all together: that every mixer goes on from its cache stands in test_layers.
@pytest.mark.parametrize(
    "mixers", [("attention",), ("gated_efla",), ("log_linear_mamba2",), ("efla", "attention", "mamba2")]
)
def test_rows_of_different_lengths_equal_rereading_everything(mixers):
    module = model(*mixers)
    together = generate(module, parameters(module), PROMPTS, max_new_tokens=10, greedy=True)
    assert together == [reread(module, prompt, 10) for prompt in PROMPTS]
    assert len({tuple(row) for row in together}) == 3


def test_rows_of_nats_l_decode_across_chunk_borders():
    """Prompts that end a token before a border, on it and behind it; a head of the router chooses what the other does
    not."""
    module, prompts = model("nats_l"), [[(7 * i + n) % VOCABULARY for i in range(n)] for n in (15, 16, 17)]
    together = generate(module, parameters(module), prompts, max_new_tokens=20, greedy=True)
    assert together == [reread(module, prompt, 20, 40) for prompt in prompts]
    text = jnp.asarray([prompt + row for prompt, row in zip(prompts, together, strict=True)][2:], jnp.int32)
    capture = {"capture_intermediates": lambda sub, _: isinstance(sub, Reading), "mutable": "intermediates"}
    _, told = jax.jit(functools.partial(module.apply, **capture))(parameters(module), text)
    router = told["intermediates"]["groups"]["block_0"]["mixer"]["router"]
    chosen = router["softmax_fraction"]["__call__"][0].mean[0]
    assert chosen[0] != chosen[1], chosen


@pytest.mark.parametrize("options", [{"greedy": True}, {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "seed": 4}])
def test_a_row_does_not_depend_on_the_others(options):
    """Token for token: beside other prompts, beside itself, and in whatever order."""
    module = model("efla", "attention")
    run = functools.partial(generate, module, parameters(module), max_new_tokens=10, **options)
    together = run(PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        others = [PROMPTS[0]] * 3
        others[i] = prompt
        assert run(others)[i] == together[i]
    assert run(PROMPTS) == together
    if "seed" in options:
        assert run(PROMPTS) != generate(module, parameters(module), PROMPTS, max_new_tokens=10, seed=5)
        assert len({tuple(row) for row in run([PROMPTS[0]] * 3)}) > 1  # equal prompts in one batch differ by their row


def test_one_row_equals_its_place_in_a_batch():
    module = model("efla", "attention")
    together = generate(module, parameters(module), PROMPTS, max_new_tokens=10, greedy=True)
    for prompt, row in zip(PROMPTS, together, strict=True):
        assert generate(module, parameters(module), [prompt], max_new_tokens=10, greedy=True) == [row]


def test_rows_stop_at_their_own_stop_token():
    module = model("efla", "attention")
    free = generate(module, parameters(module), PROMPTS, max_new_tokens=10, greedy=True)
    stop = free[1][4]
    stopped = generate(module, parameters(module), PROMPTS, max_new_tokens=10, greedy=True, stop_token=stop)
    assert stopped == [row[: row.index(stop)] if stop in row else row for row in free]
    assert len(stopped[1]) <= 4 and {len(row) for row in stopped} != {10}


def test_few_programs_serve_all_lengths():
    module = model("delta_net")
    before = read_piece._cache_size(), decode_block._cache_size()
    for lengths in ((1, 3, 16), (9, 2, 2), (5, 16, 11)):
        prompts = [np.arange(length) % VOCABULARY for length in lengths]
        settings = {"seed": sum(lengths), "temperature": float(lengths[0]), "top_k": lengths[1]}
        generate(module, parameters(module), prompts, max_new_tokens=3, **settings)
    assert (read_piece._cache_size(), decode_block._cache_size()) == (before[0] + 1, before[1] + 1)


def likely_in_numpy(logits, top_k, top_p):
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or len(logits)]
    weights = np.exp(np.asarray([logits[i] for i in order], np.float64))
    weights /= weights.sum()
    kept, total = [], 0.0
    for i, weight in zip(order, weights, strict=True):
        if kept and total >= top_p:
            break
        kept.append(i)
        total += weight
    return kept


@pytest.mark.parametrize("top_k", [0, 1, 4, 50])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.75, 1.0])
def test_likely_tokens_against_numpy(top_k, top_p):
    logits = np.random.default_rng(0).normal(size=(5, 17)).astype(np.float32) * 2
    logits[1, [3, 8, 9]] = logits[1].max() + 1  # ties
    mask = np.asarray(jax.jit(likely)(logits, jnp.int32(top_k), jnp.float32(top_p)))
    for row, kept in zip(logits, mask, strict=True):
        assert sorted(np.flatnonzero(kept)) == sorted(likely_in_numpy(row, top_k, top_p))


def test_samples_follow_the_tempered_distribution():
    logits = jnp.asarray([1.0, 0.0, -1.0, 2.0, -30.0])
    keys = jax.random.split(jax.random.key(0), 20000)
    how = Sampling(jnp.float32(0.5), jnp.int32(3), jnp.float32(1.0))
    drawn = jax.jit(sample)(keys, jnp.broadcast_to(logits, (20000, 5)), how)
    weights = np.exp(np.asarray(logits) / 0.5) * [1, 1, 0, 1, 0]
    share = np.bincount(np.asarray(drawn), minlength=5) / 20000
    np.testing.assert_allclose(share, weights / weights.sum(), atol=0.015)  # 4 standard errors of a share
    assert share[2] == share[4] == 0


def test_temperature_zero_is_greedy():
    module = model("efla", "attention")
    run = functools.partial(generate, module, parameters(module), PROMPTS, max_new_tokens=10)
    assert run(temperature=0.0) == run(greedy=True) == run(temperature=0.5, top_k=1) == run(top_p=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompts": []}, "prompts: there is none"),
        ({"prompts": [[1], []]}, r"prompts\[1\]: shape \(0,\)"),
        ({"prompts": [[1, VOCABULARY]]}, r"prompts\[0\]: ids from 1 to 23, but vocab_size is 23"),
        ({"prompts": [[1], [-1, 2]]}, r"prompts\[1\]: ids from -1 to 2"),
        ({"prompts": [[1.0]]}, r"prompts\[0\]: float64 is not an integer"),
        ({"prompts": [[[1]]]}, r"prompts\[0\]: shape \(1, 1\)"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0"),
        ({"temperature": -0.1}, "temperature: -0.1"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_p": 0.0}, "top_p: 0.0"),
        ({"top_p": 1.5}, "top_p: 1.5"),
        ({"top_k": -1}, "top_k: -1"),
        ({"stop_token": VOCABULARY}, "stop_token: 23"),
    ],
)
def test_wrong_settings_are_errors(options, message):
    module = model("delta_net")
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError, match=message):
            generate(module, {}, **{"prompts": [[1, 2]], "max_new_tokens": 2, **options})
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
