"""causal_conv against a token-by-token float64 reference: padding anywhere, packed documents, pieces, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from efla_jax.ops import causal_conv
from tests.oracle import TOLERANCE, assert_close

# Padding before, behind, between; documents shorter than the window; an id that comes back; nothing real at all.
IDS = np.array(
    [
        [1, 1, 1, 1, 1, 1, 1],
        [0, 0, 3, 3, 3, 3, 3],
        [4, 4, 4, 4, 4, 0, 0],
        [5, 0, 5, 0, 0, 5, 5],
        [1, 1, 2, 2, 2, 3, 3],
        [0, 7, 0, 7, 8, 0, 9],
        [1, 2, 1, 2, 0, 2, 1],
        [0, 0, 0, 0, 0, 0, 0],
    ],
    np.int32,
)
BATCH, TIME, WIDTH = *IDS.shape, 3
conv = jax.jit(causal_conv)


def reference(x, weight, bias, state, ids):
    """Token by token in float64: a window that real tokens enter and a new document empties."""
    x, weight, bias, state = (np.asarray(a, np.float64) for a in (x, weight, bias, state))
    y, states = np.zeros_like(x), []
    for b in range(x.shape[0]):
        window, document = list(state[b]), None
        for t in np.flatnonzero(ids[b]):
            if document not in (None, ids[b, t]):
                window = [np.zeros(x.shape[2])] * len(window)
            document = ids[b, t]
            window.append(x[b, t])
            y[b, t] = bias + sum(w * v for w, v in zip(weight, window, strict=True))
            window = window[1:]
        states.append(np.reshape(window, (weight.shape[0] - 1, x.shape[2])))
    return y, np.stack(states)


def arguments(taps, seed=0):
    """(x, weight, bias, state), and cotangents of y and of the state."""
    rng = np.random.default_rng(seed)
    shapes = (BATCH, TIME, WIDTH), (taps, WIDTH), (WIDTH,), (BATCH, taps - 1, WIDTH)
    x, weight, bias, state = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return (x, weight, bias, state), (rng.normal(size=x.shape), rng.normal(size=state.shape))


def nan_at_padding(x, ids=IDS):
    return jnp.where((ids == 0)[..., None], jnp.nan, x)


def dropped(state, ids_before, ids):
    """What a caller does between two calls: zeros for the rows whose next real token begins another document."""
    for b in range(len(ids)):
        before, after = (row[row != 0] for row in (ids_before[b], ids[b]))
        if before.size and after.size and before[-1] != after[0]:
            state = state.at[b].set(0)
    return state


def slopes(f, args):
    """The gradient of f by central differences: exact but for rounding, since f is linear in each argument."""
    for i, a in enumerate(args):
        slope = np.zeros(a.shape)
        for index in np.ndindex(*a.shape):
            values = []
            for step in (0.5, -0.5):
                moved = a.astype(np.float64)
                moved[index] += step
                values.append(f(*args[:i], moved, *args[i + 1 :]))
            slope[index] = values[0] - values[1]
        yield slope


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients(taps, packed):
    args, cotangents = arguments(taps)
    ids = IDS if packed else np.ones_like(IDS)

    @jax.jit
    def run(args, cotangents):
        out, back = jax.vjp(lambda *a: causal_conv(*a[:3], initial_state=a[3], segment_ids=ids_of(ids, packed)), *args)
        return *out, *back(cotangents)

    def loss(*args):
        return sum(np.sum(c * out) for c, out in zip(cotangents, reference(*args, ids), strict=True))

    given = (nan_at_padding(args[0], ids), *args[1:])
    y, state, *gradients = run(given, (nan_at_padding(jnp.float32(cotangents[0]), ids), jnp.float32(cotangents[1])))
    names = ("y", "state", "dx", "dweight", "dbias", "dstate")
    wanted = (*reference(*args, ids), *slopes(loss, args))
    assert_close((y, state, *gradients), wanted, names, TOLERANCE["float32"])
    assert not np.any(y[ids == 0]) and not np.any(gradients[0][ids == 0])


@pytest.mark.parametrize("pieces", [(2, 0, 5), (6, 1), (1,) * 7])
@pytest.mark.parametrize("packed", [False, True])
def test_pieces_give_the_whole(pieces, packed):
    x, weight, bias, state = map(jnp.asarray, arguments(4)[0])
    ids = IDS if packed else np.ones_like(IDS)
    whole = conv(x, weight, bias, initial_state=state, segment_ids=ids_of(ids, packed))
    outputs, start = [], 0
    for length in pieces:
        piece = slice(start, start + length)
        state = dropped(state, ids[:, :start], ids[:, piece])
        options = {"initial_state": state, "segment_ids": ids_of(ids[:, piece], packed)}
        y, state = conv(x[:, piece], weight, bias, **options)
        outputs.append(y)
        start += length
    assert_close((jnp.concatenate(outputs, 1),), (whole[0],), ("y",), TOLERANCE["float32"])
    np.testing.assert_array_equal(state, whole[1])


@pytest.mark.parametrize("packed", [False, True])
def test_silu_is_of_the_float32_sum(packed):
    """Values and gradients of silu(causal_conv) from float32 arrays; of bfloat16 ones the sum is not rounded first."""
    args, (d_y, _) = arguments(4)
    x, weight, bias, state = map(jnp.asarray, args)
    given = nan_at_padding(x) if packed else x

    def run(activation, x, weight, bias, state):
        options = {"initial_state": state, "segment_ids": ids_of(IDS, packed), "activation": activation}
        y, _ = causal_conv(x, weight, bias, **options)
        return y if activation else jax.nn.silu(y)

    y, back = jax.vjp(lambda *a: run("silu", *a), given, weight, bias, state)
    wanted, wanted_back = jax.vjp(lambda *a: run(None, *a), x, weight, bias, state)
    names = ("y", "dx", "dweight", "dbias", "dstate")
    found = y, *back(jnp.float32(d_y))
    assert_close(found, (wanted, *wanted_back(jnp.float32(d_y))), names, TOLERANCE["float32"])
    assert not packed or not (np.any(y[IDS == 0]) or np.any(found[1][IDS == 0]))
    narrow = jnp.bfloat16(x)
    once = run("silu", narrow, weight, bias, state)
    np.testing.assert_array_equal(once, run("silu", narrow.astype(jnp.float32), weight, bias, state).astype(once.dtype))


def ids_of(ids, packed):
    return jnp.asarray(ids) if packed else None


def test_no_state_is_a_zero_state_of_the_dtype_of_x():
    x, weight, _, state = map(jnp.asarray, arguments(4)[0])
    for segment_ids in (None, jnp.asarray(IDS)):
        got = conv(x, weight, segment_ids=segment_ids)
        wanted = conv(x, weight, initial_state=jnp.zeros_like(state), segment_ids=segment_ids)
        jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_a_packed_document_equals_the_document_alone_bit_by_bit():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 12, WIDTH)), jnp.float32)
    weight = jnp.asarray(np.random.default_rng(2).normal(size=(4, WIDTH)), jnp.float32)
    # As users compile: two programs have the same bits where products and sums are contracted in both or in neither.
    as_users = {"xla_backend_optimization_level": 3, "xla_backend_extra_options": ""}
    optimised = jax.jit(causal_conv, compiler_options=as_users)
    packed, state = optimised(x, weight, segment_ids=jnp.array([[1] * 5 + [2] * 7]))
    first, second = (optimised(piece, weight) for piece in (x[:, :5], x[:, 5:]))
    np.testing.assert_array_equal(packed, jnp.concatenate([first[0], second[0]], 1))
    np.testing.assert_array_equal(state, second[1])


def test_a_row_does_not_depend_on_its_neighbours():
    x, weight, bias, state = map(jnp.asarray, arguments(4)[0])
    x, ids, rows = nan_at_padding(x), jnp.asarray(IDS), np.array([5, 3])
    y, after = conv(x, weight, bias, initial_state=state, segment_ids=ids)
    alone = conv(x[rows], weight, bias, initial_state=state[rows], segment_ids=ids[rows])
    jax.tree.map(np.testing.assert_array_equal, alone, (y[rows], after[rows]))


def test_decoding_in_a_scan():
    x, weight, bias, state = map(jnp.asarray, arguments(4)[0])

    def step(state, token):
        y, state = causal_conv(token[:, None], weight, bias, initial_state=state)
        return state, y[:, 0]

    last, y = lax.scan(step, state, jnp.moveaxis(x, 1, 0))
    whole = conv(x, weight, bias, initial_state=state)
    assert_close((jnp.moveaxis(y, 0, 1),), (whole[0],), ("y",), TOLERANCE["float32"])
    np.testing.assert_array_equal(last, whole[1])


def test_sums_are_float32_and_dtypes_are_kept():
    x = jnp.array([256.0, 1.0, 1.0, 1.0], jnp.bfloat16)[None, :, None]
    for segment_ids in (None, jnp.ones((1, 4), int)):
        y, state = conv(x, jnp.ones((4, 1)), segment_ids=segment_ids)
        assert y.dtype == state.dtype == jnp.bfloat16
        assert float(y[0, -1, 0]) == 260  # 259 rounded once; a bfloat16 sum stays at 256
        y, state = conv(x, jnp.ones((4, 1)), initial_state=jnp.full((1, 3, 1), 1 / 3), segment_ids=segment_ids)
        assert y.dtype == jnp.bfloat16 and state.dtype == jnp.float32
        _, state = conv(x[:, :1], jnp.ones((4, 1)), initial_state=jnp.full((1, 3, 1), 1 / 3))
        assert state[0, 0, 0] == jnp.float32(1 / 3)


@pytest.mark.parametrize("taps", [1, 3])
def test_no_tokens(taps):
    state = jnp.ones((BATCH, taps - 1, WIDTH))
    for segment_ids in (None, jnp.zeros((BATCH, 0), int)):
        x, weight, bias = jnp.zeros((BATCH, 0, WIDTH)), jnp.ones((taps, WIDTH)), jnp.ones(WIDTH)
        y, after = conv(x, weight, bias, initial_state=state, segment_ids=segment_ids)
        assert y.shape == (BATCH, 0, WIDTH)
        np.testing.assert_array_equal(after, state)


def test_without_segments_it_is_lean():
    x, weight = jnp.zeros((2, 64, 48)), jnp.zeros((4, 48))
    assert "gather" not in str(jax.make_jaxpr(causal_conv)(x, weight))
    _, back = jax.vjp(lambda x, weight: causal_conv(x, weight)[0], x, weight)
    saved = sum(leaf.size for leaf in jax.tree.leaves(back) if hasattr(leaf, "size"))
    assert saved < 1.2 * (x.size + weight.size)  # not one shifted copy per tap


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((2, 3, 5))}, "weight: shape .* D .* 4 here but 5"),
        ({"x": jnp.zeros((2, 7))}, "x: shape .* 2 axes"),
        ({"x": jnp.zeros((2, 7, 4), int)}, "x: dtype int32"),
        ({"weight": jnp.zeros((0, 4))}, "weight: .* no tap"),
        ({"bias": jnp.zeros(3)}, "bias: shape"),
        ({"initial_state": jnp.zeros((2, 3, 4))}, r"initial_state: shape .* 3 inputs, but 3 taps need .* \(2, 2, 4\)"),
        ({"initial_state": jnp.zeros((3, 2, 4))}, "initial_state: shape .* B .* 3 here but 2"),
        ({"segment_ids": jnp.zeros((2, 6), int)}, "segment_ids: shape"),
        ({"segment_ids": jnp.zeros((2, 7))}, "segment_ids: dtype"),
        ({"activation": "relu"}, "activation: 'relu' is not known .* 'silu'"),
    ],
)
def test_wrong_input(unchecked, change, message):
    given = {"x": jnp.zeros((2, 7, 4)), "weight": jnp.zeros((3, 4)), **change}
    with pytest.raises(ValueError, match=message):
        causal_conv(given.pop("x"), given.pop("weight"), given.pop("bias", None), **given)
