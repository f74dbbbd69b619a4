"""Generation: rows of different lengths against single runs and re-reading everything, sampling, stopping, errors."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from efla_jax.generate import (
    Choice,
    Decoding,
    Sampling,
    decode_block,
    generate,
    likely,
    prefill,
    read_piece,
    sample,
    snapshot,
    take,
)
from efla_jax.generate.prefix import fresh, grown
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


SERVED = ("efla", "attention", "log_linear_mamba2")  # one of each kind of cache in one model


def test_pieces_give_the_tokens_of_one_pass():
    """Pieces that divide no prompt, and single tokens; the prompts end in different pieces. Equal rows of an array are
    read without segment ids."""
    module = model(*SERVED)
    run = functools.partial(generate, module, parameters(module), max_new_tokens=8, greedy=True)
    assert run(PROMPTS, piece=8) == run(PROMPTS, piece=1) == run(PROMPTS)
    one, parts = (prefill(module, parameters(module), PROMPTS, piece=piece) for piece in (16, 8))
    np.testing.assert_allclose(parts.logits, one.logits, rtol=1e-4, atol=1e-4)  # float32, other orders of sums
    assert parts.length.tolist() == [3, 7, 12]
    long = np.stack([(step * np.arange(21)) % VOCABULARY for step in (1, 7, 9)])
    assert run(long, piece=8) == run(list(long), piece=8) == run(long)


def test_a_prefix_goes_on_many_times_and_takes_rows():
    """A prompt in two calls is the prompt in one; rows are repeated and left out; the prefix stays as it was."""
    module = model(*SERVED)
    params, how = parameters(module), Choice(temperature=0.9, seed=7)
    heads, tails = [p[:2] for p in PROMPTS], [p[2:] for p in PROMPTS]
    start = prefill(module, params, heads, coming=20)

    def said(prefix, **options):
        return np.concatenate(list(Decoding(module, params, prefix, how, max_new_tokens=8, **options)), axis=1).tolist()

    for _ in range(2):
        assert said(prefill(module, params, tails, prefix=start)) == said(prefill(module, params, PROMPTS, coming=20))
    rows = [2, 0, 2]
    again = prefill(module, params, [tails[i] for i in rows], prefix=take(start, rows))
    assert said(again, streams=rows) == [said(prefill(module, params, PROMPTS, coming=20))[i] for i in rows]
    unread = prefill(module, params, [[], tails[1], []], prefix=start)
    np.testing.assert_array_equal(unread.logits[0], start.logits[0])
    assert unread.length.tolist() == [2, 7, 2]
    with pytest.raises(ValueError, match="prefix: it has 3 rows, and there are 1 prompts"):
        prefill(module, params, [[1]], prefix=start)
    with pytest.raises(ValueError, match="rows: .* from 0 to 2"):
        take(start, [3])


def test_padding_that_a_caller_passes_is_invisible():
    """On the left, on both sides and inside, in pieces too; and an earlier document in the row is forgotten."""
    module = model("efla", "attention")
    run = functools.partial(generate, module, parameters(module), max_new_tokens=8, greedy=True)
    bare = run(PROMPTS)
    tokens, ids = np.full((3, 16), 22), np.zeros((3, 16), np.int32)
    for row, (prompt, places) in enumerate(zip(PROMPTS, (range(13, 16), range(4, 11), range(16)), strict=True)):
        places = [p for p in places if row < 2 or p not in (0, 3, 7, 8)]
        tokens[row, places], ids[row, places] = prompt, 3
    assert run(tokens, segment_ids=ids) == run(tokens, segment_ids=ids, piece=6) == bare
    start = prefill(module, parameters(module), tokens[:, :15], segment_ids=ids[:, :15], coming=20)
    tails = [row[15:][on[15:] != 0] for row, on in zip(tokens, ids, strict=True)]  # of the document that is open
    read = prefill(module, parameters(module), tails, prefix=start)
    decoding = Decoding(module, parameters(module), read, Choice(0.0), max_new_tokens=8)
    assert np.concatenate(list(decoding), axis=1).tolist() == bare
    ids[1, :4] = 9
    assert run(tokens, segment_ids=ids) == bare
    with pytest.raises(ValueError, match="segment_ids: int32"):
        run(tokens, segment_ids=ids[:, 1:])


@pytest.mark.parametrize("mixer", ["gated_delta_net", pytest.param("log_linear_mamba2", marks=pytest.mark.slow)])
def test_a_piece_of_a_long_prompt_needs_constant_memory(mixer):
    """The program that reads a piece is the same for a prompt of any length where the cache does not grow, and what it
    needs is a small part of what a pass over the whole prompt would."""
    module = model(mixer)

    def temporary(time, room):
        cache = module.init_cache(1, max_length=room)
        ids = jnp.zeros((1, time), jnp.int32)
        lowered = read_piece.lower(module, parameters(module), ids, ids, jnp.zeros((1, VOCABULARY)), cache)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    piece = temporary(128, 1 << 17)
    assert piece == temporary(128, 1 << 10)
    assert temporary(2048, 1 << 11) > 8 * piece


def test_caches_grow_while_a_text_grows():
    """A prefix that was made with no room goes on beyond it."""
    module = model("attention")
    prompt = [(7 * i + 3) % VOCABULARY for i in range(60)]
    short = prefill(module, parameters(module), [prompt])
    assert short.cache[0].kv.k.shape[2] == 64
    rooms = [64, 65, 97, 1 << 16, (1 << 16) + 1]
    caches = [grown(module, fresh(module, 1, before), room, 0) for before, room in zip(rooms, rooms[1:], strict=False)]
    # By half at least where that is little: few programs while a text grows.
    assert [cache[0].kv.k.shape[2] for cache in caches] == [96, 97, 1 << 16, (1 << 16) + 4096]
    more = np.concatenate(list(Decoding(module, parameters(module), short, Choice(0.0), max_new_tokens=20)), axis=1)
    assert more[0].tolist() == reread(module, prompt, 20, 80)


@pytest.mark.slow
def test_pools_grow_while_a_text_grows():
    """A pool of NAtS-L with a single page to begin with gives what one gives that has room for all."""
    prompt = [(7 * i + 3) % VOCABULARY for i in range(60)]
    options = {"nats_l": {**OPTIONS["nats_l"], "softmax_room": 0.05}}
    tight = model("nats_l").clone(mixer_options=options)
    run = functools.partial(generate, prompts=[prompt], max_new_tokens=20, greedy=True, piece=16)
    assert tight.init_cache(1, max_length=128)[0].kv.k.shape[2] == 1
    assert run(tight, parameters(model("nats_l"))) == run(model("nats_l"), parameters(model("nats_l")))


def test_what_is_not_finite_is_an_error_that_says_where():
    module = model("efla")
    params = parameters(module)
    table = params["params"]["embed"]["embedding"].at[11].set(jnp.nan)
    broken = {"params": {**params["params"], "embed": {"embedding": table}}}
    with pytest.raises(FloatingPointError, match=r"prompts\[1\]: from its token 5 on .*rows \[1\]"):
        generate(module, broken, [[1, 2, 3], [1, 2, 3, 4, 5, 11, 6, 7]], max_new_tokens=2, piece=2)
    ids = np.array([[0, 0, 0, 1, 1, 1]])
    with pytest.raises(FloatingPointError, match=r"prompts\[0\]: from its token 2 on"):
        generate(module, broken, np.array([[0, 0, 0, 1, 2, 11]]), segment_ids=ids, max_new_tokens=2, piece=4)
    prompts = [list(PROMPTS[0]), list(PROMPTS[1])]
    fine, poisoned = generate(module, params, prompts, max_new_tokens=5, greedy=True)
    place = next(i for i, token in enumerate(poisoned) if token not in fine + sum(prompts, []) + poisoned[:i])
    table = params["params"]["embed"]["embedding"].at[poisoned[place]].set(jnp.inf)
    broken = {"params": {**params["params"], "embed": {"embedding": table}}}
    with pytest.raises(FloatingPointError, match=rf"row 1: .* 7 tokens of prompt and {place + 1} others .*rows \[1\]"):
        generate(module, broken, prompts, max_new_tokens=5, greedy=True)


def test_streams_decide_what_is_drawn():
    """Equal prompts with equal streams say the same in any place; rows that were ended leave the others alone."""
    module = model("efla", "attention")
    prefix = prefill(module, parameters(module), [PROMPTS[1]] * 3, coming=12)
    decode = functools.partial(Decoding, module, parameters(module), prefix, Choice(1.0), max_new_tokens=12)
    first, *rest = (np.concatenate(list(decode(streams=s)), axis=1).tolist() for s in ([0, 1, 0], [1, 0, 5]))
    assert first[0] == first[2] == rest[0][1] and first[1] == rest[0][0] != first[0]
    decoding, tokens = decode(streams=[0, 1, 0]), []
    for new in decoding:
        tokens.append(new)
        decoding.end([0])
    assert [part.shape[1] for part in tokens] == [1, 4, 7]
    small = list(decode(streams=[0, 1, 0], block=5))  # what is drawn does not depend on the blocks
    assert [part.shape[1] for part in small] == [1, 4, 5, 2]
    assert np.concatenate(small, axis=1).tolist() == first
    ended = np.concatenate(tokens, axis=1).tolist()
    assert ended[1:] == first[1:] and set(ended[0][1:]) == {-1}


def test_two_prompts_share_no_noise():
    """Of a model that finds every token equally likely, a text is its noise: one for each prompt and number."""
    module = model("efla")
    params = jax.tree.map(jnp.zeros_like, parameters(module))
    alone = [generate(module, params, [prompt], max_new_tokens=8)[0] for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[0])]
    assert alone[0] == alone[2] != alone[1]
    together = generate(module, params, [PROMPTS[0]] * 2, max_new_tokens=8)
    assert together[0] == alone[0] != together[1]


def test_ids_beyond_the_tokenizer_are_never_chosen():
    module = model("efla", "attention")
    prefix = prefill(module, parameters(module), PROMPTS, coming=30)
    for temperature in (0.0, 3.0):
        drawn = []
        for vocabulary in (0, 9):
            how = Choice(temperature, vocabulary=vocabulary)
            decoding = Decoding(module, parameters(module), prefix, how, max_new_tokens=30)
            drawn.append(np.concatenate(list(decoding), axis=1))
        assert drawn[0].max() >= 9 > drawn[1].max()


def test_several_stop_tokens():
    module = model("efla", "attention")
    run = functools.partial(generate, module, parameters(module), PROMPTS, max_new_tokens=10, greedy=True)
    free = run()
    stops = {free[1][4], free[2][2]}
    assert run(stop_token=sorted(stops)) == [
        row[: min((row.index(s) for s in stops if s in row), default=10)] for row in free
    ]


@pytest.mark.parametrize("mixers, dtype", [(("efla", "attention"), "float32"), (("mamba2",), "bfloat16")])
def test_a_snapshot_goes_on_as_the_prefix_does(mixers, dtype, tmp_path):
    module = model(*mixers).clone(dtype=dtype)
    params, identity = parameters(module), {"tokenizer": "bytes"}
    prefix = prefill(module, params, PROMPTS, coming=10)
    file = tmp_path / "texts" / "prefix.npz"
    snapshot.save(file, prefix, identity, PROMPTS)
    again, tokens = snapshot.load(file, module, identity)
    assert [list(row) for row in PROMPTS] == tokens and [path.name for path in file.parent.iterdir()] == [file.name]
    for old, new in zip(jax.tree.leaves(prefix), jax.tree.leaves(again), strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_array_equal(np.asarray(old, np.float64), np.asarray(new, np.float64))
    runs = [list(Decoding(module, params, p, Choice(0.7), max_new_tokens=5)) for p in (prefix, again)]
    np.testing.assert_array_equal(*(np.concatenate(run, axis=1) for run in runs))


def test_a_snapshot_of_something_else_is_refused(tmp_path):
    module, file = model("efla"), tmp_path / "prefix.npz"
    params = parameters(module)
    identity = {"model": snapshot.fingerprint(module, params), "tokenizer": "bytes"}
    snapshot.save(file, prefill(module, params, PROMPTS), identity)
    assert snapshot.load(file, module, identity)[1] is None
    kernel = params["params"]["lm_head"]["kernel"]
    other = {"params": {**params["params"], "lm_head": {"kernel": kernel.at[3, 5].multiply(1 + 2**-23)}}}
    swapped = {"params": {**params["params"], "lm_head": {"kernel": kernel[:, ::-1]}}}
    deeper = module.clone(norm_eps=1e-5)
    for changed in ((module, other), (module, swapped), (deeper, params)):
        theirs = {"model": snapshot.fingerprint(*changed)}
        assert theirs["model"] != identity["model"]
        with pytest.raises(ValueError, match="made with model"):
            snapshot.load(file, module, theirs)
    assert snapshot.fingerprint(module.clone(remat="full", dropout=0.1), params) == identity["model"]
    with pytest.raises(ValueError, match="made with tokenizer 'bytes', and this is 'abc'"):
        snapshot.load(file, module, {"tokenizer": "abc"})
    with pytest.raises(ValueError, match=r"is float32\[1, 3, 3, 16\], and the model's is float32\[1, 3, 3, 32\]"):
        snapshot.load(file, model("gated_efla").clone(width=32), {})
    whole = file.read_bytes()
    for damage in (whole[:-40], whole[:200] + b"\xff" * 40 + whole[240:], b"text"):
        file.write_bytes(damage)
        with pytest.raises(ValueError, match="cannot be read") as refused:
            snapshot.load(file, module, identity)
        assert "pickle" not in str(refused.value)
    with pytest.raises(FileNotFoundError, match="no such file"):
        snapshot.load(tmp_path / "none.npz", module, identity)


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
    free = [sample(keys[:500], jnp.broadcast_to(logits, (500, 5)), how._replace(top_k=jnp.int32(k))) for k in (0, 5)]
    np.testing.assert_array_equal(*free)  # without a limit nothing is sorted


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
