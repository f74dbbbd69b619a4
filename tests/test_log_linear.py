"""The log-linear operators against the float64 oracle: values and every gradient, from the beginning of documents and
from any position in them, packed and padded, with any number of levels.

The tree is one way, the pass over chunks another; each has its cases, and all cases of a shape share a program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efla_jax import ops
from tests.cases import SHAPE, packed_ids, recurrence_case
from tests.oracle import TOLERANCE, assert_close, fenwick_and_gradients, fenwick_parallel, relative_rms

NAMES = ("o", "states", "dq", "dk", "du", "derase", "dlog_decay", "dlevel_weights", "dstates")
LEVELS = 7
POSITION = (13, 6)
BEGINNING = (0, 0)
# Implementation, position and tokens: 93 are five chunks of 16 in the tree, which no power of two divides, and 13 more.
WAYS = (
    ("recurrent", POSITION, 37),
    ("chunked", POSITION, 37),
    ("chunked", BEGINNING, 93),
    ("associative", BEGINNING, 37),
)
CASES = ("random", "cosine 0.99", "cosine 0.999", "strong decay", "forget", "mixed decay", "zero keys", "erase up to 2")


def live(position, levels) -> np.ndarray:
    """Whether slot l holds anything before the token at `position`, [B, L]."""
    position = np.asarray(position)[:, None]
    slots = np.arange(levels)
    bit = (position >> np.maximum(slots - 1, 0)) & 1 == 1
    top = position >> max(levels - 2, 0) > 0
    return np.where(slots == levels - 1, top, bit & (slots > 0))


def case(name, position=POSITION, levels=LEVELS, dtype=jnp.float32, **shape):
    """(q, k, u, erase, log_decay, level_weights, states) and cotangents (o, states); live slots only are not zero."""
    (q, k, u, erase, decay, state), (d_o, d_state) = recurrence_case(name, dtype, **shape)
    rng = np.random.default_rng(1)
    mask = live(position, levels)[:, None, :, None, None]
    many = (*state.shape[:2], levels, *state.shape[2:])
    states = jnp.asarray(mask * rng.normal(size=many), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(*u.shape[:3], levels)), jnp.float32)
    return (q, k, u, erase, decay, weights, states), (d_o, jnp.asarray(rng.normal(size=many), jnp.float32))


@functools.cache
def compiled(implementation, chunk_size=16, erases=True, fresh=False):
    """A jitted (arguments, ids, position, cotangents) -> ((o, states), gradients); fresh: without initial state."""

    def op(q, k, u, erase, decay, weights, states, ids, position):
        options = dict(
            initial_state=None if fresh else ops.FenwickState(states, position),
            segment_ids=ids,
            chunk_size=chunk_size,
            implementation=implementation,
        )
        if erases:
            o, state = ops.log_linear_delta_rule(q, k, u, erase, decay, weights, **options)
        else:
            o, state = ops.log_linear_attention(q, k, u, decay, weights, **options)
        return o, state.states

    @jax.jit
    def run(arguments, ids, position, cotangents):
        out, pull = jax.vjp(lambda *a: op(*a, ids, position), *arguments)
        return out, pull(cotangents)

    return run


def compare(implementation, arguments, ids, position, cotangents, dtype="float32", chunk_size=16, erases=True):
    fresh = position == BEGINNING[: len(position)]
    start = jnp.asarray(position, jnp.int32)
    out, gradients = compiled(implementation, chunk_size, erases, fresh)(arguments, ids, start, cotangents)
    if not erases:
        arguments = (*arguments[:3], arguments[3] * 0, *arguments[4:])
    truth, slopes = fenwick_and_gradients(arguments, ids, start, cotangents)
    names, values, references = NAMES, (*out, *gradients), (*truth, *slopes)
    if not erases:
        names, values, references = (tuple(x for i, x in enumerate(y) if i != 5) for y in (names, values, references))
    slot = live(position, arguments[5].shape[-1])[:, None, :, None, None]  # a slot that is not live is no argument
    values, references = ((*x[:-1], np.asarray(x[-1]) * slot) for x in (values, references))
    assert_close(values, references, names, TOLERANCE[dtype])
    return out, gradients


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation, position, time", WAYS)
def test_delta_rule_equals_the_oracle(implementation, position, time, name):
    arguments, cotangents = case(name, position, time=time)
    compare(implementation, arguments, None, position, cotangents)


@pytest.mark.parametrize("name", ("random", "no decay", "strong decay", "forget", "mixed decay", "zero keys"))
@pytest.mark.parametrize("implementation, position, time", WAYS)
def test_attention_equals_the_oracle(implementation, position, time, name):
    arguments, cotangents = case(name, position, time=time)
    compare(implementation, arguments, None, position, cotangents, erases=False)


@pytest.mark.parametrize("name", ("cosine 0.9", "mixed decay"))
@pytest.mark.parametrize("erases", (True, False))
@pytest.mark.parametrize("implementation", ("recurrent", "chunked"))
def test_packed_documents_and_padding(implementation, erases, name):
    """Documents of one token and of odd lengths begin their own levels; padding stands before, in and behind them."""
    arguments, cotangents = case(name)
    compare(implementation, arguments, packed_ids(2, SHAPE["time"]), POSITION, cotangents, erases=erases)


@pytest.mark.parametrize("levels", (1, 3))
@pytest.mark.parametrize("implementation, position, time", WAYS)
def test_levels_beyond_the_capacity_share_the_last(implementation, position, time, levels):
    shape = dict(batch=1, time=time, key_heads=1, heads=1)
    arguments, cotangents = case("random", position[:1], levels=levels, **shape)
    compare(implementation, arguments, None, position[:1], cotangents)


LENGTHS = (1, 65, 128, 192, *(pytest.param(t, marks=pytest.mark.slow) for t in (2, 63, 64, 127, 129, 1000, 4097)))


@pytest.mark.parametrize("erases", (True, pytest.param(False, marks=pytest.mark.slow)))
@pytest.mark.parametrize("time", LENGTHS)
def test_every_length(time, erases):
    """The oracle sees what is beyond `time` as padding, so that one program of it serves many lengths."""
    longest = next(t for t in (192, 1000, 4097) if t >= time)
    shape = dict(batch=1, time=longest, key_heads=1, heads=2, key_dim=7, value_dim=3)
    arguments, (d_o, d_states) = case("cosine 0.99", (0,), levels=14, **shape)
    if not erases:
        arguments = (*arguments[:3], arguments[3] * 0, *arguments[4:])
    pieces = (*(x[:, :time] for x in arguments[:6]), arguments[6])
    out = compiled("chunked", 64, erases, fresh=True)(pieces, None, jnp.zeros(1, jnp.int32), (d_o[:, :time], d_states))
    padded = (np.arange(longest) < time)[None].astype(np.int32)
    truth = fenwick_and_gradients(arguments, padded, np.zeros(1, np.int32), (d_o, d_states))
    values = [np.asarray(x) for x in (*out[0], *out[1])]
    references = [x if x.shape[1] != longest else x[:, :time] for x in (*truth[0], *truth[1])]
    chosen = [i for i, name in enumerate(NAMES) if name != "dstates" and (erases or name != "derase")]
    assert_close(*([x[i] for i in chosen] for x in (values, references, NAMES)), TOLERANCE["float32"])


@pytest.mark.parametrize(
    "chunk_size, time", [(16, 1), (32, 33), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((64, 65), (128, 300)))]
)
def test_chunk_sizes_in_the_middle_of_a_document(chunk_size, time):
    shape = dict(batch=1, time=time, key_heads=1, heads=2, key_dim=7, value_dim=3)
    arguments, cotangents = case("cosine 0.99", (61,), levels=9, **shape)
    compare("chunked", arguments, None, (61,), cotangents, chunk_size=chunk_size)


BROAD = (("recurrent", POSITION, 37), ("chunked", POSITION, 37), ("chunked", BEGINNING, 93))


@pytest.mark.parametrize("name", ("random", "cosine 0.99", "strong decay", "mixed decay", "no decay"))
@pytest.mark.parametrize("implementation, position, time", BROAD)
def test_bfloat16_inputs(implementation, position, time, name):
    arguments, cotangents = case(name, position, time=time, dtype=jnp.bfloat16)
    out, gradients = compare(implementation, arguments, None, position, cotangents, dtype="bfloat16")
    assert [x.dtype for x in (*out, *gradients)] == [jnp.bfloat16, jnp.float32] + [jnp.bfloat16] * 3 + [jnp.float32] * 4


@pytest.mark.parametrize("implementation, position, time", WAYS[1:])
def test_weights_and_decays_balance_what_is_read_and_written(implementation, position, time):
    """Per token, the sum over levels of w dw is <o, do>; the gradient of g_t is the sum from t on of <o, do> - <u, du>
    and <S, dS> of the final states."""
    arguments, (d_o, d_states) = case("cosine 0.9", position, time=time)
    run = compiled(implementation, fresh=position == BEGINNING)
    (o, states), slopes = run(arguments, None, jnp.asarray(position, jnp.int32), (d_o, d_states))
    read = jnp.sum(o * d_o, -1)
    assert relative_rms(jnp.sum(arguments[5] * slopes[5], -1), read) < TOLERANCE["float32"]
    behind = jnp.flip(jnp.cumsum(jnp.flip(read - jnp.sum(arguments[2] * slopes[2], -1), 1), 1), 1)
    kept = jnp.sum(states * d_states, (2, 3, 4))[:, None]
    assert relative_rms(slopes[4], behind + kept) < TOLERANCE["float32"]
    assert relative_rms(slopes[4], behind) > 1e-2


def test_the_dense_form():
    arguments, cotangents = case("cosine 0.9", BEGINNING, time=93)
    (o, _), _ = compiled("chunked", fresh=True)(arguments, None, jnp.zeros(2, jnp.int32), cotangents)
    dense = fenwick_parallel(*(x[1, :, 1] for x in arguments[:2]), *(x[1, :, 4] for x in arguments[2:6]))
    assert relative_rms(o[1, :, 4], dense) < TOLERANCE["float32"]
