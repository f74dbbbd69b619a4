"""The log-linear operators: levels, states at any position, and the ladder against the float64 oracle with every
gradient."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from efla_jax import ops
from efla_jax.ops.fenwick_chunked import seen_weights
from tests.cases import SHAPE, packed_ids, recurrence_case
from tests.oracle import TOLERANCE, assert_close, fenwick_and_gradients, fenwick_parallel, relative_rms

IMPLEMENTATIONS = ("recurrent", "chunked")
NAMES = ("o", "states", "dq", "dk", "du", "derase", "dlog_decay", "dlevel_weights", "dstates")
LEVELS = 7
POSITION = (13, 6)


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
    """A jitted (arguments, ids, position, cotangents) -> ((o, states), gradients, position after)."""

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
        return (o, state.states), state.position

    @jax.jit
    def run(arguments, ids, position, cotangents):
        out, pull, after = jax.vjp(lambda *a: op(*a, ids, position), *arguments, has_aux=True)
        return out, pull(cotangents), after

    return run


def compare(
    implementation, arguments, ids, position, cotangents, dtype="float32", chunk_size=16, erases=True, fresh=False
):
    position = jnp.asarray(position, jnp.int32)
    out, gradients, _ = compiled(implementation, chunk_size, erases, fresh)(arguments, ids, position, cotangents)
    if not erases:
        arguments = (*arguments[:3], arguments[3] * 0, *arguments[4:])
    truth, slopes = fenwick_and_gradients(arguments, ids, position, cotangents)
    names, values, references = NAMES, (*out, *gradients), (*truth, *slopes)
    if not erases:
        names, values, references = (tuple(x for i, x in enumerate(y) if i != 5) for y in (names, values, references))
    slot = live(position, arguments[5].shape[-1])[:, None, :, None, None]  # a slot that is not live is no argument
    values, references = ((*x[:-1], np.asarray(x[-1]) * slot) for x in (values, references))
    assert_close(values, references, names, TOLERANCE[dtype])


@pytest.mark.identity
def test_levels_are_bit_lengths_in_integers():
    t, s = np.tril_indices(70)
    expected = [int(a ^ b).bit_length() for a, b in zip(t, s, strict=True)]
    np.testing.assert_array_equal(ops.fenwick_level(jnp.asarray(t), jnp.asarray(s)), expected)
    far = [2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1]
    assert ops.fenwick_level(jnp.asarray(far), 0).tolist() == [n.bit_length() for n in far]
    assert ops.fenwick_level(2**30, 2**30 - 1) == 31 and ops.fenwick_level(2**30 + 1, 2**30) == 1


def test_a_state_is_seen_at_the_level_of_every_position_in_it():
    start = np.arange(40)[:, None]
    t = start + np.arange(40)
    weights = jnp.broadcast_to(jnp.arange(9.0)[:, None, None], (9, *t.shape))  # the weight of a level is its number
    seen = np.asarray(seen_weights(weights, jnp.asarray(t), jnp.asarray(start[:, 0])))
    for row, level in np.argwhere(live(start[:, 0], 9)):
        first = row >> level << level
        for position in range(first, first + 2 ** (level - 1)):
            np.testing.assert_array_equal(seen[level, row], [(x ^ position).bit_length() for x in t[row].tolist()])


@pytest.mark.parametrize("name", ("random", "cosine 0.99", "strong decay", "forget", "mixed decay", "zero keys"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_delta_rule_equals_the_oracle(implementation, name):
    arguments, cotangents = case(name)
    compare(implementation, arguments, None, POSITION, cotangents)


@pytest.mark.parametrize("name", ("random", "no decay", "strong decay", "mixed decay", "zero keys"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_equals_the_oracle(implementation, name):
    arguments, cotangents = case(name)
    compare(implementation, arguments, None, POSITION, cotangents, erases=False)


@pytest.mark.parametrize("erases", (True, False))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_documents_and_padding(implementation, erases):
    arguments, cotangents = case("cosine 0.9")
    compare(implementation, arguments, packed_ids(2, SHAPE["time"]), POSITION, cotangents, erases=erases)


@pytest.mark.parametrize("levels", (1, 2, 3))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_levels_beyond_the_capacity_share_the_last(implementation, levels):
    arguments, cotangents = case("random", levels=levels)
    compare(implementation, arguments, None, POSITION, cotangents)


SHORT = ((16, 1), (16, 33))
LONG = ((16, 2), (16, 3), (64, 63), (64, 64), (64, 65), (64, 130), (64, 300), (32, 300))


@pytest.mark.parametrize("chunk_size, time", [*SHORT, *(pytest.param(*x, marks=pytest.mark.slow) for x in LONG)])
def test_chunk_sizes_and_awkward_lengths(chunk_size, time):
    """From the beginning of a document, which is cheaper, and from any position in it."""
    shape = dict(batch=1, time=time, key_heads=1, heads=2, key_dim=7, value_dim=3)
    for position in ((0,), (61,)):
        arguments, cotangents = case("cosine 0.99", position, levels=9, **shape)
        compare("chunked", arguments, None, position, cotangents, chunk_size=chunk_size, fresh=position == (0,))


@pytest.mark.parametrize("levels", (3, 8))
def test_attention_from_the_beginning(levels):
    """Fewer levels than a chunk has, and as many as the row has."""
    arguments, cotangents = case("mixed decay", (0, 0), levels=levels, time=85)
    compare("chunked", arguments, None, (0, 0), cotangents, erases=False, fresh=True)


@pytest.mark.parametrize("name", ("random", "cosine 0.99", "strong decay"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_inputs(implementation, name):
    arguments, cotangents = case(name, dtype=jnp.bfloat16)
    compare(implementation, arguments, None, POSITION, cotangents, dtype="bfloat16")
    out, gradients, _ = compiled(implementation)(arguments, None, jnp.asarray(POSITION, jnp.int32), cotangents)
    assert [x.dtype for x in (*out, *gradients)] == [jnp.bfloat16, jnp.float32] + [jnp.bfloat16] * 3 + [jnp.float32] * 4


@pytest.mark.identity
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("whole_rows", (True, False))
def test_equal_weights_and_one_level_are_the_flat_operators(implementation, whole_rows):
    """Whatever the levels, their states add up to the flat state, and equal weights to its output."""
    (q, k, u, erase, decay, weights, _), _ = case("random")
    ids = None if whole_rows else jnp.asarray(packed_ids(2, SHAPE["time"]))
    options = dict(segment_ids=ids, chunk_size=16, implementation=implementation)
    one, factor = jnp.ones_like(weights), weights[..., :1]
    for flat, op in (
        (
            ops.delta_rule(q, k, u, erase, decay, **options),
            functools.partial(ops.log_linear_delta_rule, q, k, u, erase),
        ),
        (ops.linear_attention(q, k, u, decay, **options), functools.partial(ops.log_linear_attention, q, k, u)),
    ):
        for scale, levels in ((1.0, one), (factor, factor)):
            o, state = op(decay, levels, **options)
            assert_close((o, state.states.sum(2)), (scale * flat[0], flat[1]), ("o", "state"), 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_dense_form_and_the_sum_of_weight_gradients(implementation):
    shape = dict(batch=1, time=70, key_heads=1, heads=1, key_dim=7, value_dim=3)
    arguments, (d_o, d_states) = case("cosine 0.9", (0,), levels=5, **shape)
    run = compiled(implementation)
    (o, _), slopes, _ = run(arguments, None, jnp.zeros(1, jnp.int32), (d_o, 0 * d_states))
    dense = fenwick_parallel(*(x[0, :, 0] for x in arguments[:6]))
    assert relative_rms(o[0, :, 0], dense) < TOLERANCE["float32"]
    by_level = jnp.sum(arguments[5] * slopes[5], -1)
    assert relative_rms(by_level, jnp.sum(o * d_o, -1)) < TOLERANCE["float32"]


@functools.cache
def forward(implementation, erases=True):
    def run(a, position, ids):
        state = ops.FenwickState(a[6], position)
        options = dict(initial_state=state, segment_ids=ids, chunk_size=16, implementation=implementation)
        if erases:
            return ops.log_linear_delta_rule(*a[:6], **options)
        return ops.log_linear_attention(*a[:3], *a[4:6], **options)

    return jax.jit(run)


@pytest.mark.parametrize("cuts", ((1, 9, 9, 23), (16, 32), (7, 8, 15, 33)))
@pytest.mark.parametrize("erases", (True, False))
def test_pieces_of_any_length_and_implementation_equal_the_whole(erases, cuts):
    """The state after a piece is the same from every implementation, so that each goes on where another stopped."""
    arguments, _ = case("random")
    ids = np.ones((2, SHAPE["time"]), np.int32)
    ids[0, 5:11] = 0
    position = jnp.asarray(POSITION, jnp.int32)
    whole, final = forward("recurrent", erases)(arguments, position, ids)
    state, parts = ops.FenwickState(arguments[6], position), []
    for i, (begin, end) in enumerate(zip((0, *cuts), (*cuts, SHAPE["time"]), strict=True)):
        piece = (*(x[:, begin:end] for x in arguments[:6]), state.states)
        o, state = forward(IMPLEMENTATIONS[1 - i % 2], erases)(piece, state.position, ids[:, begin:end])
        parts.append(o)
    np.testing.assert_array_equal(state.position, final.position)
    np.testing.assert_array_equal(final.position, [13 + 31, 6 + 37])
    o = jnp.concatenate(parts, 1)
    assert_close((o, state.states), (whole, final.states), ("o", "states"), TOLERANCE["float32"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slots_are_empty_where_the_bits_of_the_position_are_not_set(implementation):
    arguments, _ = case("random")
    _, state = forward(implementation)(arguments, jnp.asarray(POSITION, jnp.int32), None)
    np.testing.assert_array_equal(np.abs(state.states).sum((1, 3, 4)) > 0, live(state.position, LEVELS))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_document_packed_anywhere_equals_the_document_alone(implementation):
    (*arguments, states), _ = case("random")
    ids = np.repeat([[0, 4, 2, 0, 5]], (3, 6, 21, 2, 5), axis=1).repeat(2, 0)
    packed, _ = forward(implementation)((*arguments, states), jnp.asarray(POSITION, jnp.int32), ids)
    alone = [x[:, 9:30] for x in arguments]
    o, _ = forward(implementation)((*alone, 0 * states), jnp.zeros(2, jnp.int32), None)
    assert relative_rms(packed[:, 9:30], o) < 1e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_positions_near_the_end_of_int32(implementation):
    """Level 31 begins at 2^30: one step over it carries every slot into one."""
    position = (2**30 - 3, 2**30 - 1)
    arguments, _ = case("random", position, levels=33, time=6)
    _, state = forward(implementation)(arguments, jnp.asarray(position, jnp.int32), None)
    np.testing.assert_array_equal(np.abs(state.states).sum((1, 3, 4)) > 0, live(state.position, 33))
    _, flat = ops.delta_rule(*arguments[:5], initial_state=arguments[6].sum(2), implementation="recurrent")
    assert relative_rms(state.states.sum(2), flat) < 1e-6
    empty = (*arguments[:6], 0 * arguments[6])
    o, _ = forward(implementation)(empty, jnp.asarray(position, jnp.int32), None)
    for row, head in ((0, 1), (1, 4)):
        dense = fenwick_parallel(
            *(x[row, :, head // 3] for x in arguments[:2]), *(x[row, :, head] for x in arguments[2:6]), position[row]
        )
        assert relative_rms(o[row, :, head], dense) < TOLERANCE["float32"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_may_hold_anything_and_gets_no_gradient(implementation):
    arguments, cotangents = case("random")
    ids = packed_ids(2, SHAPE["time"])
    pad = ids == 0
    position = jnp.asarray(POSITION, jnp.int32)
    poisoned = [jnp.where(pad.reshape(pad.shape + (1,) * (x.ndim - 2)), jnp.nan, x) for x in arguments[:6]]
    run = compiled(implementation)
    clean, _, _ = run(arguments, ids, position, cotangents)
    out, gradients, _ = run((*poisoned, arguments[6]), ids, position, cotangents)
    for value, reference in zip(out, clean, strict=True):
        np.testing.assert_array_equal(value, reference)
    for gradient in gradients[:6]:
        assert np.isfinite(gradient).all() and not np.asarray(gradient)[pad].any()


@pytest.mark.parametrize("implementation", (*IMPLEMENTATIONS, "auto"))
def test_no_real_token_returns_the_state_unchanged(implementation):
    arguments, _ = case("random")
    position = jnp.asarray(POSITION, jnp.int32)
    o, state = forward(implementation)(arguments, position, np.zeros((2, SHAPE["time"]), np.int32))
    assert not np.asarray(o).any()
    np.testing.assert_array_equal(state.states, arguments[6])
    np.testing.assert_array_equal(state.position, position)
    empty = (*(x[:, :0] for x in arguments[:6]), arguments[6])
    o, state = forward(implementation)(empty, position, None)
    assert o.shape == (2, 0, 6, 5)
    np.testing.assert_array_equal(state.states, arguments[6])
    np.testing.assert_array_equal(state.position, position)


@pytest.fixture
def plain_errors():
    """Our own ValueErrors instead of the type checker's, which pytest switches on."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


BAD = {
    "weights": (lambda a: dict(level_weights=a["level_weights"][:, :-1]), "level_weights: shape .* T .time. is 36"),
    "no weights": (lambda a: dict(level_weights=None), "level_weights: None, but a Fenwick operator needs it"),
    "no levels": (
        lambda a: dict(level_weights=a["level_weights"][..., :0], initial_state=None),
        "level_weights: shape .* has L = 0 levels",
    ),
    "no erase": (lambda a: dict(erase=None), "erase: None, .* log_linear_attention"),
    "fewer levels in the state": (
        lambda a: dict(initial_state=a["initial_state"]._replace(states=a["initial_state"].states[:, :, 1:])),
        "initial_state.states: shape .* L .levels. is 6 here but 7 in level_weights",
    ),
    "position": (
        lambda a: dict(initial_state=a["initial_state"]._replace(position=jnp.zeros(2))),
        "initial_state.position: dtype float32 is not an integer",
    ),
    "chunk": (lambda a: dict(chunk_size=40), "chunk_size: 40 is not one of"),
}


@pytest.mark.parametrize("fault", BAD)
def test_wrong_input_is_named_before_anything_compiles(plain_errors, fault):
    change, message = BAD[fault]
    (q, k, u, erase, decay, weights, states), _ = case("random")
    arguments = dict(q=q, k=k, u=u, erase=erase, log_decay=decay, level_weights=weights)
    arguments["initial_state"] = ops.FenwickState(states, jnp.asarray(POSITION, jnp.int32))
    with pytest.raises(ValueError, match=message):
        ops.log_linear_delta_rule(**{**arguments, **change(arguments)})


def test_memory_of_the_gradient_is_linear_and_holds_no_state_per_chunk():
    """What the compiler sets aside, with short chunks and large states so that a stack of them would show."""
    key_dim, value_dim, count, chunk_size = 32, 32, 13, 16

    def temporary(time):
        token = [
            jax.ShapeDtypeStruct((1, time, *x), jnp.float32) for x in ((1, key_dim), (1, value_dim), (1,), (1, count))
        ]
        key, value, gate, weights = token

        def loss(*arguments):
            return ops.log_linear_delta_rule(*arguments, chunk_size=chunk_size, implementation="chunked")[0].sum()

        compiled = jax.jit(jax.grad(loss, range(6))).lower(key, key, value, gate, gate, weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary(1024), temporary(4096)
    assert long < 5 * short
