"""The published ablations of NAtS-L: its operators without what a token's own chunk holds against the float64 oracle,
values and every gradient, and the mixer with each of them against its formulas, in pieces, and in its recipes."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import lm_nats_l
from efla_jax import ops, sharding
from efla_jax.layers import MIXERS
from efla_jax.train import settings
from tests.oracle import TOLERANCE, assert_close, block_sparse_and_gradients, relative_rms, routed_and_gradients
from tests.test_nats_l import CLOSE, check_every_gradient, hand_count, inputs, make, parameters
from tests.test_routed import ATTENTION, BEGINNING, IDS, NAMES, POSITION, QUICKLY, SIZE, TIME, attention_case, case

# Documents of 20, 62 and 9, 77 tokens between padding: over one selected chunk alone a mask has no gradient.
LONG = np.stack([np.repeat([1, 0, 2, 0], [20, 3, 62, 8]), np.repeat([0, 3, 0, 4], [2, 9, 5, 77])]).astype(np.int32)


@pytest.mark.parametrize(
    "implementation, position, ids",
    [
        ("recurrent", POSITION, IDS),
        ("chunked", BEGINNING, None),
        ("chunked", BEGINNING, IDS),
        ("chunked", POSITION, None),
        ("chunked", POSITION, IDS),
    ],
    ids=["recurrent", "every", "packed", "every from a position", "packed from a position"],
)
def test_delta_rule_of_the_chunks_before_equals_the_oracle(implementation, position, ids):
    """IDS have runs of short documents, which share cells and lie across their borders."""
    start = np.asarray(position, np.int32)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(arguments, cotangents):
        def op(q, k, u, erase, decay, keep, fade, state, begun, opened):
            initial = ops.RoutedState(state, begun, opened, jnp.asarray(start)) if any(position) else None
            o, after = ops.chunk_start_delta_rule(
                q, k, u, erase, decay, jnp.stack([keep, fade], -1), initial_state=initial,
                segment_ids=None if ids is None else jnp.asarray(ids), chunk_size=SIZE, implementation=implementation,
            )  # fmt: skip
            return o, *after[:3]

        out, pull = jax.vjp(op, *arguments)
        return out, pull(cotangents)

    for name, kept, fade in (("random", "random", 1.0), ("mixed decay", "real", 0.0), ("forget", "all", 1.0)):
        arguments, cotangents = case(name, kept, fade)
        out, slopes = run(arguments, cotangents)
        if not any(position):
            arguments = (*arguments[:7], *(0 * x for x in arguments[7:]))
        wanted, truth = routed_and_gradients(arguments, ids, start, SIZE, cotangents, own=0)
        last = 10 if any(position) else 6
        ours, theirs = ((*x[:6], *x[7:last]) for x in (slopes, truth))  # fade has no gradient
        assert_close((*out, *ours), (*wanted, *theirs), NAMES[: 4 + len(theirs)], TOLERANCE["float32"])


@pytest.mark.parametrize("ids", [None, LONG], ids=["every", "packed"])
def test_attention_to_the_chunks_before_equals_the_oracle(ids, monkeypatch):
    """Tiles of two cells, so that chunks before lie in the tile, in the list, and nowhere."""
    for name, slots in (("QUERIES", 32), ("KEYS", 32)):
        monkeypatch.setattr(sys.modules["efla_jax.ops.block_sparse_attention"], name, slots)
    segment_ids = None if ids is None else jnp.asarray(ids)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(arguments, cotangent):
        def op(*a):
            return ops.block_sparse_attention(*a, segment_ids=segment_ids, chunk_size=SIZE, own_chunk=False)[0]

        o, pull = jax.vjp(op, *arguments)
        return o, *pull(cotangent)

    for chosen in ("all", "none", "alternating", "single", "random"):
        arguments, cotangent = attention_case(chosen)
        got = run(arguments, cotangent)
        (o,), slopes = block_sparse_and_gradients(arguments, ids, SIZE, (cotangent,), own=0)
        slopes = *slopes[:3], slopes[3] * np.asarray(arguments[3])
        if chosen == "none":
            assert not any(np.any(x) for x in (*got, o, *slopes))
            continue
        count = 5
        if chosen == "single":  # a softmax over one chunk does not change with that chunk's mask
            count = 4
            np.testing.assert_allclose(got[4], np.zeros_like(got[4]), atol=1e-4)  # of some 500 terms of about 1
        assert_close(got[:count], (o, *slopes)[:count], ATTENTION[:count], TOLERANCE["float32"])


@pytest.mark.slow  # the mixer does the same below, without gradients across the calls
@pytest.mark.parametrize("op", ["attention", "delta rule"])
def test_of_the_chunks_before_any_pieces_give_the_whole(op):
    """Pieces that end before, at and behind borders, then tokens one by one; values and gradients across the calls."""
    if op == "attention":
        (*arguments, choice), cotangent = attention_case()
        call = functools.partial(ops.block_sparse_attention, own_chunk=False)
        state = ops.init_selected_kv(2, 10, SIZE, 3, 2, 8, 5)
    else:
        (*arguments, choice, _, _, _, _), (cotangent, *_) = case()
        call, state = ops.chunk_start_delta_rule, None

    def pieces(lengths, state, arguments, choice):
        outputs, start = [], 0
        for length in lengths:
            end, first = start + length, start // SIZE
            mine = choice[:, np.minimum(first + np.arange(-(-length // SIZE)), choice.shape[1] - 1)]
            some = (x[:, start:end] for x in arguments)
            o, state = call(*some, mine, initial_state=state, chunk_size=SIZE)
            outputs, start = [*outputs, o], end
        return jnp.concatenate(outputs, 1)

    def everything(lengths, state):
        o, pull = jax.vjp(functools.partial(pieces, lengths, state), arguments, choice)
        return o, *jax.tree.leaves(pull(cotangent))

    both = ((TIME,), None), ((17, 14, *(1,) * 3, TIME - 34), state)
    whole, split = (jax.jit(functools.partial(everything, *x), compiler_options=QUICKLY)() for x in both)
    assert_close(split, whole, [str(i) for i in range(len(whole))], TOLERANCE["float32"])


def test_what_ablations_have_not_says_so():
    (q, k, v, selected), _ = attention_case()
    with pytest.raises(ValueError, match="counterfactual: True without own_chunk"):
        ops.block_sparse_attention(q, k, v, selected, chunk_size=SIZE, counterfactual=True, own_chunk=False)
    (*arguments, _, _, _, _), _ = case()
    with pytest.raises(NotImplementedError, match="chunk_start_delta_rule: .*kernel"):
        ops.chunk_start_delta_rule(*arguments, chunk_size=SIZE, implementation="pallas")


# The six of the published table, three in each: an error in any one shows.
ABLATIONS = (
    {"own_chunk": "softmax", "skipped_decay": False, "merge": "inputs"},
    {"own_chunk": "linear", "output_norm": False, "merge": "none"},
)


@pytest.mark.parametrize("options", ABLATIONS, ids=["softmax", "linear"])
def test_outputs_and_every_gradient_of_the_mixer_are_those_of_its_formulas(options):
    check_every_gradient(**options)


@pytest.mark.parametrize("options", ABLATIONS, ids=["softmax", "linear"])
def test_reading_and_writing_in_pieces_is_one_pass(options):
    """Rows whose prompts end a token before a border, on it and behind it; then a piece over a border, then tokens."""
    mixer, params, lengths, more = make(**options, max_length=60), parameters(**options), np.array([15, 16, 17]), 30
    x = jnp.concatenate([inputs(), inputs(seed=5)[:1]])
    real = jnp.asarray(np.arange(17) < lengths[:, None], jnp.int32)
    rest = jnp.stack([row[n : n + more] for row, n in zip(x, lengths, strict=True)])

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(params, x, rest):
        def step(cache, token):
            y, cache = mixer.apply(params, token[:, None], None, cache)
            return cache, y[:, 0]

        y, cache = mixer.apply(params, x[:, :17], real)
        piece, cache = mixer.apply(params, rest[:, :20], None, cache)
        _, tokens = jax.lax.scan(step, cache, jnp.moveaxis(rest[:, 20:], 1, 0))
        return mixer.apply(params, x)[0], y, jnp.concatenate([piece, jnp.moveaxis(tokens, 0, 1)], axis=1)

    whole, y, later = run(params, x, rest)
    for row, n in enumerate(lengths):
        assert relative_rms(y[row, :n], whole[row, :n]) <= CLOSE
        assert relative_rms(later[row], whole[row, n : n + more]) <= CLOSE


def test_fields_that_do_not_fit_are_errors():
    for options, message in (
        ({"own_chunk": "none"}, "own_chunk: 'none' is not one of"),
        ({"merge": "query"}, "merge: 'query' .* Did you mean 'queries'"),
        ({"own_chunk": "linear", "counterfactual": True}, "counterfactual: True with own_chunk='linear'"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)


# Parameters of a nats_l layer beside the published one's: two norms, the merge's matrix, and that from inputs.
MORE = {"no_output_norm": -2 * 128, "no_merge_weights": -768 * 2 * 12, "merge_from_inputs": (1024 - 768) * 2 * 12}


@pytest.mark.parametrize("name", lm_nats_l.ABLATIONS)
def test_each_ablation_has_a_recipe(name):
    """Its one option, and the parameters it says."""
    config = settings.plain(lm_nats_l.get_config(f"nats_l_hybrid_{name}"))
    hybrid = settings.plain(lm_nats_l.get_config("nats_l_hybrid"))
    options, published = (c["model"]["mixer_options"].pop("nats_l") for c in (config, hybrid))
    assert config == hybrid
    assert {k: v for k, v in options.items() if published[k] != v} == lm_nats_l.ABLATIONS[name]
    assert len(lm_nats_l.ABLATIONS[name]) == 1

    def count(options):
        mixer = MIXERS["nats_l"](width=1024, **options)
        params = jax.eval_shape(mixer.init, jax.random.key(0), jnp.zeros((1, 1, 1024)))
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    assert count(options) - count(published) == MORE.get(name, 0)
    total = hand_count("nats_l_hybrid") + 6 * MORE.get(name, 0)
    (row,) = (line for line in lm_nats_l.__doc__.splitlines() if line.startswith(f"| nats_l_hybrid_{name} |"))
    ((field, value),) = lm_nats_l.ABLATIONS[name].items()
    shown = f'"{value}"' if isinstance(value, str) else value
    assert row.split(" | ")[1] == f"{field}={shown}" and row.endswith(f"| {total:,} |")


@pytest.mark.slow
@pytest.mark.parametrize("name", lm_nats_l.ABLATIONS)
def test_a_gradient_of_each_recipe_traces(name):
    config = settings.plain(lm_nats_l.get_config(f"nats_l_hybrid_{name}"))
    model = settings.build_model(config, types.SimpleNamespace(kind="tokens", vocab_size=32000))
    text = jax.ShapeDtypeStruct((1, config["data"]["window"]), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    sharding.specs(params)

    def loss(params, tokens, segment_ids):
        return jnp.mean(model.apply({"params": params}, tokens, segment_ids)[0].astype(jnp.float32))

    slopes = jax.eval_shape(jax.grad(loss), params, text, text)
    assert jax.tree.map(lambda x: x.shape, slopes) == jax.tree.map(lambda x: x.shape, params)


@pytest.mark.slow
@pytest.mark.parametrize("options", ABLATIONS, ids=["softmax", "linear"])
def test_on_a_mesh(options):
    """Rows and heads over devices, a row and a token behind it."""
    mixer, params, x = make(**options, num_attention_heads=4, max_length=60), parameters(**options), inputs(20)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(params, x):
        y, cache = mixer.apply(params, x[:, :-1])
        return y, mixer.apply(params, x[:, -1:], cache=cache)[0]

    alone = run(params, x)
    with jax.set_mesh(sharding.make_mesh(data=2, fsdp=1, tensor=2, context=2)):
        assert_close(run(params, x), alone, ("row", "token"), TOLERANCE["float32"])
