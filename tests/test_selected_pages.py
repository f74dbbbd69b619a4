"""Block-sparse attention that goes on from its cache against the float64 oracle on the whole row: values and every
gradient through the cache, for any pieces, and what the cache holds."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efla_jax import ops
from efla_jax.ops.document_chunks import document_chunks
from efla_jax.ops.selected_pages import outgrown
from efla_jax.sharding import AXES, make_mesh
from tests.oracle import TOLERANCE, assert_close, block_sparse_and_gradients
from tests.oracle import document_chunks as sequential_chunks

SIZE, TIME, KEY, VALUE = 16, 93, 8, 5
NAMES = ("o", "dq", "dk", "dv", "dselected")
# Documents that end before, at and behind the border of a chunk, and padding before, in and behind them.
LENGTHS = ((5, 33, 1, 16, 38), (3, 1, 7, 48, 34))
# Pieces of each row: over many borders, at, just before and just behind one, empty, and of one token.
PIECES = ((15, 1, 16, 17, 0, 24, 20, 0), (24, 20, 24, 1, 7, 0, 4, 13))


def packed_ids() -> np.ndarray:
    rng = np.random.default_rng(5)
    ids = np.stack([np.repeat(np.arange(1, 6), lengths) for lengths in LENGTHS])
    ids[rng.random(ids.shape) < 0.1] = 0
    ids[0, -2:] = ids[1, :3] = 0
    return ids.astype(np.int32)


IDS, EVERY = packed_ids(), np.ones((2, TIME), np.int32)


def case(heads=(6, 3, 2), time=TIME, dtype=jnp.float32):
    """(q, k, v, selected) and the cotangent of o; heads of queries, of keys and of routing. Routing heads differ."""
    rng = np.random.default_rng(3)
    sizes = (heads[0], KEY), (heads[1], KEY), (heads[1], VALUE)
    q, k, v = (jnp.asarray(rng.normal(size=(2, time, *size)), dtype) for size in sizes)
    selected = rng.integers(0, 2, (2, -(-time // SIZE), heads[2]))
    assert not np.array_equal(selected[..., 0], selected[..., 1])
    cotangent = jnp.asarray(rng.normal(size=(2, time, heads[0], VALUE)), dtype)
    return (q, k, v, jnp.asarray(selected, jnp.float32)), cotangent


def empty(heads, pages, dtype=jnp.float32, batch=2):
    """A cache of documents that have not begun; what is not in use is NaN, and nobody sees it."""
    state = ops.init_selected_kv(batch, pages, SIZE, heads[1], heads[2], KEY, VALUE, dtype)
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)


def plan(ids, pieces, length):
    """How rows are fed in calls of `length` slots: index [calls, B, length] of each slot's token (-1: padding), the
    entry of `selected` that the call's first is [calls, B], and whether a document begins with the call [calls, B]."""
    calls = max(map(len, pieces))
    index = np.full((calls, len(ids), length), -1)
    entry, begins = np.zeros((calls, len(ids)), np.int32), np.zeros((calls, len(ids)), bool)
    _, _, full = sequential_chunks(ids, SIZE)
    for b, lengths in enumerate(pieces):
        ends = [np.flatnonzero(full[b] == n)[-1] for n in range(full[b].max() + 1)]
        start = 0
        for i, count in enumerate(lengths):
            index[i, b, :count] = np.arange(start, start + count)
            entry[i, b] = np.sum(np.asarray(ends) < start)
            before, here = (x[x != 0] for x in (ids[b, :start], ids[b, start : start + count]))
            begins[i, b] = before.size > 0 and here.size > 0 and before[-1] != here[0]
            start += count
        assert start == ids.shape[1]
    return index, entry, begins


@functools.cache
def fed(packed=True, counterfactual=False, blocks=None):
    """A jitted (arguments, cotangent, ids, plan, state) -> ((o, gradients), state): one call after the other. blocks
    only tells programs apart."""

    def step(arguments, ids, state, call):
        index, entry, begins = call
        token = jnp.maximum(index, 0)
        q, k, v = (jnp.take_along_axis(x, token[..., None, None], axis=1) for x in arguments[:3])
        count = -(-index.shape[1] // SIZE)
        here = jnp.minimum(entry[:, None] + jnp.arange(count), arguments[3].shape[1] - 1)
        selected = jnp.take_along_axis(arguments[3], here[..., None], axis=1)
        ids = jnp.where(index < 0, 0, jnp.take_along_axis(ids, token, axis=1))
        q, k, v = (jnp.where((ids == 0)[..., None, None], jnp.nan, x) for x in (q, k, v))
        state = state._replace(**{x: jnp.where(begins, 0, getattr(state, x)) for x in ("pages", "position")})
        options = dict(segment_ids=ids if packed else None, chunk_size=SIZE, counterfactual=counterfactual)
        o, after = ops.block_sparse_attention(q, k, v, selected, initial_state=state, **options)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
        return after, o

    @jax.jit
    def run(arguments, cotangent, ids, calls, state):
        def whole(*arguments):
            after, o = jax.lax.scan(lambda s, c: step(arguments, ids, s, c), state, calls)
            index = jnp.moveaxis(calls[0], 1, 0).reshape(ids.shape[0], -1)
            back = jnp.argsort(jnp.where(index < 0, ids.shape[1], index), axis=1)[:, : ids.shape[1]]
            o = jnp.moveaxis(o, 1, 0).reshape(ids.shape[0], -1, *o.shape[3:])
            return jnp.take_along_axis(o, back[..., None, None], axis=1), after

        o, pull, after = jax.vjp(whole, *arguments, has_aux=True)
        return (o, *pull(cotangent)), after

    return run


def compare(run, arguments, cotangent, ids, calls, state, tolerance=TOLERANCE["float32"]):
    got, after = run(arguments, cotangent, ids, calls, state)
    (o,), slopes = block_sparse_and_gradients(arguments, ids, SIZE, (cotangent,))
    assert_close(got, (o, *slopes[:3], slopes[3] * np.asarray(arguments[3])), NAMES, tolerance)
    holds(after, arguments[1], arguments[3], ids)
    return got, after


def holds(state, k, selected, ids):
    """The cache has the last document's selected chunks, head by head and no others, and its open chunk."""
    chunk, document, entry = sequential_chunks(ids, SIZE)
    selected, heads, routes = np.asarray(selected), k.shape[2], selected.shape[2]
    repeated = np.repeat(np.asarray(k), np.lcm(heads, routes) // heads, axis=2)
    for b, row in enumerate(document):
        last = row.max()
        wanted = [
            (n, r) for n in range(entry[b].max() + 1) for r in range(routes)
            if selected[b, n, r] and row[entry[b] == n][0] == last
        ]  # fmt: skip
        assert state.pages[b] == len(wanted) and state.position[b] == np.sum(row == last)
        for page, (n, r) in enumerate(wanted):
            keys = repeated[b, entry[b] == n].reshape(SIZE, routes, -1, k.shape[3])[:, r]
            np.testing.assert_array_equal(state.k[b, page], keys)
            assert state.owner[b, page] == r and state.weight[b, page] == 1
        tail = np.asarray(k)[b, (row == last) & (entry[b] < 0)]
        np.testing.assert_array_equal(state.open_k[b, : len(tail)], tail)


def test_any_pieces_give_the_whole(monkeypatch):
    """Rows cut differently, documents that end inside and between the calls, NaN at padding; blocks of few queries
    and pages, of which the last overlaps the one before."""
    for name, size in (("QUERIES", 8), ("PAGES", 4)):
        monkeypatch.setattr(sys.modules["efla_jax.ops.selected_pages"], name, size)
    heads = (6, 3, 2)
    arguments, cotangent = case(heads)
    for ids in (EVERY, IDS):
        calls = plan(ids, PIECES, 24)
        compare(fed(blocks=(8, 4)), arguments, cotangent, ids, calls, empty(heads, 7))
    # All selected, the fourth chunk is one page too much: what follows is NaN, however the rows are cut.
    arguments = *arguments[:3], jnp.ones_like(arguments[3])
    (lost, *_), after = fed(blocks=(8, 4))(arguments, cotangent, EVERY, plan(EVERY, PIECES, 24), empty(heads, 7))
    (o,), _ = block_sparse_and_gradients(arguments, EVERY, SIZE, (cotangent,))
    assert np.isnan(lost[:, 4 * SIZE :]).all() and after.pages.tolist() == [10, 10]
    assert_close((lost[:, : 4 * SIZE],), (o[:, : 4 * SIZE],), ("o",), TOLERANCE["float32"])


def test_choices_that_were_not_made_have_the_gradient_of_their_own_call():
    """In bfloat16, without segment_ids, and one key head for two routing heads."""
    heads, pieces = (6, 2, 3), ((31,) * 3,) * 2
    arguments, cotangent = case(heads, dtype=jnp.bfloat16)
    calls, state = plan(EVERY, pieces, 31), empty(heads, 15, jnp.bfloat16)
    got, _ = fed(False, True)(arguments, cotangent, EVERY, calls, state)
    assert got[0].dtype == got[1].dtype == jnp.bfloat16 and got[4].dtype == jnp.float32
    (o,), slopes = block_sparse_and_gradients(arguments, EVERY, SIZE, (cotangent,))
    chosen, wanted = np.asarray(arguments[3]), np.zeros(arguments[3].shape)
    for start in range(0, TIME, 31):
        here = np.arange(TIME) // 31 == start // 31
        _, alone = block_sparse_and_gradients(arguments, EVERY, SIZE, (cotangent * here[:, None, None],))
        closing = SIZE * np.arange(1, wanted.shape[1] + 1) - 1
        wanted += alone[3] * ((closing >= start) & (closing < start + 31))[:, None]
    assert np.any(wanted * (1 - chosen))
    wanted = np.where(chosen > 0, slopes[3], wanted)
    assert_close(got, (o, *slopes[:3], wanted), NAMES, TOLERANCE["bfloat16"])


TOKENS = 45


def tokens(ids):
    return plan(ids, ((1,) * TOKENS,) * 2, 1)


def test_token_by_token_is_the_whole():
    """Room is just enough; rows stand at different positions; then one choice more than there is room for."""
    heads = (4, 1, 2)
    arguments, cotangent = case(heads, TOKENS)
    ids = np.where(np.arange(TOKENS) < [[0], [9]], 0, EVERY[:, :TOKENS])
    arguments = (*arguments[:3], jnp.asarray([[[1, 0], [1, 1], [0, 0]], [[0, 1], [1, 0], [0, 0]]], jnp.float32))
    (o, *_), _ = compare(fed(), arguments, cotangent, ids, tokens(ids), empty(heads, 3))
    greedy = arguments[3].at[0, 0, 1].set(1)
    (lost, *_), after = fed()((*arguments[:3], greedy), cotangent, ids, tokens(ids), empty(heads, 3))
    assert after.pages.tolist() == [4, 2]
    np.testing.assert_array_equal(lost[0, :SIZE], o[0, :SIZE])
    assert np.isfinite(lost[0, : 2 * SIZE]).all() and np.isnan(lost[0, 2 * SIZE :]).all()
    np.testing.assert_array_equal(lost[1], o[1])
    assert ops.grow_selected_kv(after, 9).pages.tolist() == [10, 2]  # what was lost stays lost


@functools.cache
def decode():
    @jax.jit
    def run(arguments, selected, state):
        def step(state, token):
            x, chosen = token
            o, state = ops.block_sparse_attention(*x, chosen, initial_state=state, chunk_size=SIZE)
            return state, o[:, 0]

        tokens = [jnp.moveaxis(x, 1, 0)[:, :, None] for x in (*arguments, selected)]
        state, o = jax.lax.scan(step, state, (tokens[:3], tokens[3]))
        return jnp.moveaxis(o, 0, 1), state

    return run


@pytest.mark.parametrize("prefix", [0, 32, 33, 47])
def test_prefill_and_decode(prefix):
    heads, steps = (6, 3, 2), 18
    (q, k, v, selected), cotangent = case(heads)
    wanted = block_sparse_and_gradients((q, k, v, selected), EVERY, SIZE, (cotangent,))[0][0]
    first = [x[:, :prefix] for x in (q, k, v)], selected[:, : -(-prefix // SIZE)]
    o, state = jax.jit(functools.partial(ops.block_sparse_attention, chunk_size=SIZE))(*first[0], first[1])
    assert state.k.shape[1] == prefix // SIZE * 2
    state = ops.grow_selected_kv(state, 8)
    behind = slice(prefix, prefix + steps)
    entry = np.arange(prefix, prefix + steps) // SIZE
    more, state = decode()([x[:, behind] for x in (q, k, v)], selected[:, entry], state)
    assert_close((jnp.concatenate([o, more], 1),), (wanted[:, : prefix + steps],), ("o",), TOLERANCE["float32"])
    holds(state, k[:, : prefix + steps], selected, EVERY[:, : prefix + steps])


def test_on_a_mesh():
    """Rows are split; a piece and a token. Prefill: tests/test_routed.py."""
    heads = 6, 2, 3
    (q, k, v, selected), cotangent = case(heads, 40)

    @jax.jit
    def run(q, k, v, selected, state):
        options = dict(chunk_size=SIZE)
        first = (x[:, :39] for x in (q, k, v, selected))
        o, state = ops.block_sparse_attention(*first, initial_state=state, **options)
        rest = (x[:, 39:] for x in (q, k, v))
        more, state = ops.block_sparse_attention(*rest, selected[:, 2:], initial_state=state, **options)
        return jnp.concatenate([o, more], 1), state

    wanted = block_sparse_and_gradients((q, k, v, selected), EVERY[:, :40], SIZE, (cotangent,))[0]
    with jax.set_mesh(make_mesh(**dict(zip(AXES, (2, 1, 2, 2), strict=True)))):
        o, state = run(q, k, v, selected, empty(heads, 5))
    assert_close((o,), wanted, ("o",), TOLERANCE["float32"])
    holds(state, k, selected, EVERY[:, :40])


def test_no_tokens_change_nothing():
    heads = (6, 3, 2)
    (q, k, v, selected), _ = case(heads)
    state = empty(heads, 4)._replace(position=jnp.asarray([5, 32], jnp.int32))
    o, after = ops.block_sparse_attention(
        *(x[:, :0] for x in (q, k, v, selected)), initial_state=state, chunk_size=SIZE
    )
    assert o.shape == (2, 0, 6, VALUE)
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_a_token_is_written_in_place():
    """Steps of decoding copy no pool, whatever its size (the token's page is written before the pool is read)."""

    def temporary(pages):
        state = jax.eval_shape(lambda: ops.init_selected_kv(2, pages, SIZE, 1, 2, KEY, VALUE))
        shapes = (2, 4, 2, KEY), (2, 4, 1, KEY), (2, 4, 1, VALUE), (2, 4, 2)
        *given, chosen = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        program = jax.jit(decode().__wrapped__, donate_argnums=2)
        return program.lower(given, chosen, state).compile().memory_analysis().temp_size_in_bytes

    assert temporary(2000) < 1.1 * temporary(200)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_cache_may_come_from_the_host(tokens, unchecked):
    """A conversation that was put away is in arrays of numpy."""
    heads = (6, 3, 2)
    (q, k, v, selected), _ = case(heads)
    state = jax.device_get(empty(heads, 4))
    o, after = ops.block_sparse_attention(
        *(x[:, :tokens] for x in (q, k, v)), selected[:, :1], initial_state=state, chunk_size=SIZE
    )
    np.testing.assert_allclose(o[:, 0], np.repeat(v[:, 0], 2, axis=1), rtol=1e-6)
    assert after.position.tolist() == [tokens, tokens]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"owner": jnp.zeros((2, 4))}, "initial_state.owner: dtype float32 is not int32"),
        ({"position": jnp.zeros((3,), jnp.int32)}, "initial_state.position: shape .* B .* 3 here but 2 in q"),
        ({"open_k": jnp.zeros((2, 32, 3, 8))}, r"initial_state.open_k: shape .* C \(chunk length\) is 32 here but 16"),
        ({"open_v": jnp.zeros((2, 16, 3, 6))}, "initial_state.open_v: shape .* V .* 6 here but 5 in v"),
        ({"weight": jnp.zeros((2, 4), int)}, "initial_state.weight: dtype int"),
        ({x: jnp.zeros((2, 4, 16, 2, n)) for x, n in (("k", 8), ("v", 5))}, "initial_state.k: pages of E=2 .* 3 each"),
        ({"pages": jnp.asarray([4, 5], jnp.int32)}, r"room for 4 pages.*selected 5.*grow_selected_kv\(state, 5\)"),
    ],
)  # fmt: skip
def test_wrong_caches(unchecked, change, message):
    state = ops.init_selected_kv(2, 4, SIZE, 3, 2, KEY, VALUE)._replace(**change)
    q, k, v = jnp.zeros((2, 1, 6, KEY)), jnp.zeros((2, 1, 3, KEY)), jnp.zeros((2, 1, 3, VALUE))
    with pytest.raises(ValueError, match=message):
        ops.block_sparse_attention(q, k, v, jnp.zeros((2, 1, 2)), initial_state=state, chunk_size=SIZE)


def test_a_cache_of_another_chunk_size_is_refused_and_pools_only_grow(unchecked):
    state = ops.init_selected_kv(2, 4, 32, 3, 2, KEY, VALUE)
    q, k, v = jnp.zeros((2, 1, 6, KEY)), jnp.zeros((2, 1, 3, KEY)), jnp.zeros((2, 1, 3, VALUE))
    with pytest.raises(ValueError, match="initial_state: chunks of 32 tokens, but chunk_size=16"):
        ops.block_sparse_attention(q, k, v, jnp.zeros((2, 1, 2)), initial_state=state, chunk_size=SIZE)
    with pytest.raises(ValueError, match="pages: 3 is less than the 4"):
        ops.grow_selected_kv(state, 3)
    with pytest.raises(ValueError, match="num_routes: 0 is too small"):
        ops.init_selected_kv(2, 4, 32, 3, 0, KEY, VALUE)


def test_room_is_counted_with_the_chunk_that_fills_up():
    """Two heads select it; there is room for one page more, then for two."""
    chunks = document_chunks(2, 1, SIZE, start=jnp.full((2,), SIZE - 1, jnp.int32))
    state = ops.init_selected_kv(2, 3, SIZE, 3, 2, KEY, VALUE)._replace(pages=jnp.asarray([0, 2], jnp.int32))
    with pytest.raises(ValueError, match=r"room for 3 pages.*selected 4 chunks \(before: \[0, 2\]\)"):
        outgrown(state, chunks, jnp.ones((2, 1, 2)))
    assert not np.any(outgrown(ops.grow_selected_kv(state, 4), chunks, jnp.ones((2, 1, 2))))
