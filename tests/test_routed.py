"""The routed delta rule and block-sparse attention against the float64 oracle, whose masks are real numbers: values and
every gradient, those of the masks too, for any kind of choice, from any position in a chunk, packed and padded."""

import collections
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from efla_jax import ops
from efla_jax.ops.document_chunks import cells, chunk_sums, document_chunks, most_cells, still_open
from efla_jax.sharding import AXES, make_mesh
from tests.cases import recurrence_case
from tests.oracle import TOLERANCE, assert_close, block_sparse_and_gradients, relative_rms, routed_and_gradients
from tests.oracle import document_chunks as sequential_chunks

# Compilation is most of the time here; without LLVM's optimisations it takes two thirds of it.
QUICKLY = {"xla_backend_optimization_level": 0}
SIZE, TIME = 16, 93
NAMES = ("o", "state", "start", "decay")
NAMES += ("dq", "dk", "du", "derase", "dlog_decay", "dkeep", "dstate", "dstart", "ddecay")
CHOICES = ("all", "none", "alternating", "single", "random", "real")
BEGINNING, POSITION = (0, 0), (13, 32)
# Documents that end before, at and behind the border of a chunk, begin inside one, and padding before, in and behind.
LENGTHS = ((5, 33, 1, 16, 2, 36), (3, 1, 7, 48, 17, 15))


def packed_ids() -> np.ndarray:
    rng = np.random.default_rng(5)
    ids = np.stack([np.repeat(np.arange(1, 7), lengths)[:TIME] for lengths in ((*x[:5], 99) for x in LENGTHS)])
    ids[rng.random(ids.shape) < 0.1] = 0
    ids[0, -2:] = ids[1, :3] = 0
    return ids.astype(np.int32)


IDS = packed_ids()


def choice(name: str, shape, seed=2) -> np.ndarray:
    """A mask [B, N, H], of which heads and rows differ where they can."""
    rng = np.random.default_rng(seed)
    chunk = np.arange(shape[1])[None, :, None] + np.zeros(shape)
    return {
        "all": np.ones(shape),
        "none": np.zeros(shape),
        "alternating": (chunk + np.arange(shape[2])) % 2,
        "single": chunk == 2,
        "random": rng.integers(0, 2, shape),
        "real": rng.uniform(0.2, 1.5, shape),
    }[name].astype(np.float32)


def case(name="random", kept="random", fade=1.0, dtype=jnp.float32, time=TIME):
    """(q, k, u, erase, log_decay, keep, fade, state, start, decay) and cotangents (o, state, start, decay)."""
    (q, k, u, erase, decay, state), (d_o, d_state) = recurrence_case(name, dtype, time=time)
    rng = np.random.default_rng(1)
    keep = jnp.asarray(choice(kept, (2, -(-time // SIZE), u.shape[2])))
    start, d_start = (jnp.asarray(rng.normal(size=state.shape), jnp.float32) for _ in range(2))
    opened, d_opened = (jnp.asarray(-rng.random(state.shape[:2]), jnp.float32) for _ in range(2))
    arguments = (q, k, u, erase, decay, keep, 0 * keep + fade, state, start, opened)
    return arguments, (d_o, d_state, d_start, d_opened)


@functools.cache
def compiled(implementation, position, fades=False, sizes=None):
    """A jitted (arguments, ids, cotangents) -> (results, gradients, position); sizes of a mesh tell programs apart."""

    def op(q, k, u, erase, decay, keep, fade, state, start, opened, ids):
        initial = ops.RoutedState(state, start, opened, jnp.asarray(position, jnp.int32))
        both = jnp.stack([keep, fade], -1) if fades else keep
        options = dict(initial_state=initial if any(position) else None, segment_ids=ids, chunk_size=SIZE)
        o, after = ops.routed_delta_rule(q, k, u, erase, decay, both, implementation=implementation, **options)
        return (o, *after[:3]), after.position

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(arguments, ids, cotangents):
        out, pull, position = jax.vjp(lambda *a: op(*a, ids), *arguments, has_aux=True)
        return out, pull(cotangents), position

    return run


def compare(
    implementation, arguments, ids, position, cotangents, tolerance=TOLERANCE["float32"], fades=False, sizes=None
):
    run = compiled(implementation, position, fades, sizes)
    out, slopes, after = run(arguments, None if ids is None else jnp.asarray(ids), cotangents)
    assert after.tolist() == stands(ids, position, arguments[0].shape[1])
    if not any(position):
        arguments = (*arguments[:7], *(0 * x for x in arguments[7:]))
    start = np.asarray(position, np.int32)
    wanted, truth = routed_and_gradients(arguments, ids, start, SIZE, cotangents)
    if fades:
        assert not np.any(slopes[6])
    slopes, truth = ((*x[:6], *x[7:]) for x in (slopes, truth))
    if not any(position):
        slopes, truth = slopes[:6], truth[:6]
    assert_close((*out, *slopes), (*wanted, *truth), NAMES[: 4 + len(truth)], tolerance)
    return out, slopes, after


def stands(ids, position, time):
    """Tokens of each row's last document."""
    if ids is None:
        return [start + time for start in position]
    counts = []
    for row, count in zip(ids, position, strict=True):
        real = row[row != 0]
        for before, now in zip([real[0], *real], real, strict=False):
            count = count + 1 if now == before else 1
        counts.append(count)
    return counts


@pytest.mark.parametrize("ids", [None, IDS], ids=["every", "packed"])
@pytest.mark.parametrize("position", [BEGINNING, POSITION], ids=["beginning", "position"])
@pytest.mark.parametrize("implementation", ["recurrent", "chunked"])
def test_delta_rule_equals_the_oracle(implementation, position, ids):
    for kept in CHOICES:
        compare(implementation, *(lambda a, c: (a, ids, position, c))(*case(kept=kept)))
    for name in ("cosine 0.99", "strong decay", "forget", "mixed decay", "zero keys", "no decay"):
        compare(implementation, *(lambda a, c: (a, ids, position, c))(*case(name)))


@pytest.mark.parametrize("implementation", ["recurrent", "chunked"])
def test_decay_over_dropped_chunks_may_be_skipped(implementation):
    arguments, cotangents = case(fade=0.0)
    compare(implementation, arguments, IDS, POSITION, cotangents, fades=True)


@pytest.mark.parametrize("name", ["every", "packed"])
def test_all_kept_is_the_delta_rule_and_none_kept_begins_every_chunk_anew(name):
    (q, k, u, erase, decay, keep, *_), _ = case()
    ids = None if name == "every" else jnp.asarray(IDS)
    routed = jax.jit(lambda keep: ops.routed_delta_rule(q, k, u, erase, decay, keep, segment_ids=ids, chunk_size=SIZE))
    o, state = routed(jnp.ones_like(keep))
    plain, after = jax.jit(ops.delta_rule)(q, k, u, erase, decay, segment_ids=ids)
    assert_close((o, state.state), (plain, after), ("o", "state"), TOLERANCE["float32"])
    o, state = routed(jnp.zeros_like(keep))
    chunk, _, _ = sequential_chunks(np.ones((2, TIME), int) if ids is None else IDS, SIZE)
    alone, _ = jax.jit(ops.delta_rule)(q, k, u, erase, decay, segment_ids=jnp.asarray(chunk + 1))
    assert_close((o,), (alone,), ("o",), TOLERANCE["float32"])


@pytest.mark.parametrize("ids", [None, IDS], ids=["every", "packed"])
def test_any_pieces_give_the_whole(ids):
    """Pieces that end at, just before and just behind the borders of chunks, and heads that choose differently."""
    (q, k, u, erase, decay, keep, *_), (d_o, *_) = case()
    number = None if ids is None else jnp.asarray(ids)
    chunks = document_chunks(2, TIME, SIZE, number)
    entry = np.asarray(chunks.number)

    def pieces(lengths, arguments):
        state, outputs, start = None, [], 0
        for length in lengths:
            piece = slice(start, start + length)
            some = [x[:, piece] for x in arguments[:5]]
            mine = entry[:, start, None] + np.arange(-(-length // SIZE))
            chosen = jnp.take_along_axis(arguments[5], jnp.minimum(mine, keep.shape[1] - 1)[..., None], axis=1)
            o, state = ops.routed_delta_rule(
                *some, chosen, initial_state=state, chunk_size=SIZE,
                segment_ids=None if ids is None else number[:, piece],
            )  # fmt: skip
            outputs.append(o)
            start += length
            if ids is not None and start < TIME:  # as a mixer does, between documents
                begun = np.array([last(ids[b, :start]) not in (0, first(ids[b, start:])) for b in range(2)])
                state = type(state)(*(jnp.where(begun.reshape(-1, *[1] * (x.ndim - 1)), 0, x) for x in state))
        return jnp.concatenate(outputs, 1), state

    def everything(lengths):
        (o, state), pull = jax.vjp(lambda *a: pieces(lengths, a), q, k, u, erase, decay, keep)
        zero = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0) if x.dtype == jnp.int32 else x, state)
        return (o, *state, *pull((d_o, zero)))

    both = (TIME,), (17, 15, 61)
    whole, split = (jax.jit(functools.partial(everything, x), compiler_options=QUICKLY)() for x in both)
    assert_close(split, whole, [str(i) for i in range(len(whole))], TOLERANCE["float32"])


def last(ids):
    return next((i for i in ids[::-1] if i), 0)


def first(ids):
    return next((i for i in ids if i), last(ids))


def test_a_choice_shows_in_later_chunks_only():
    (q, k, u, erase, decay, keep, *_), _ = case()
    run = jax.jit(lambda keep: ops.routed_delta_rule(q, k, u, erase, decay, keep, chunk_size=SIZE)[0])
    o, flipped = run(keep), run(keep.at[:, 2].set(1 - keep[:, 2]))
    np.testing.assert_array_equal(o[:, : 3 * SIZE], flipped[:, : 3 * SIZE])
    assert relative_rms(flipped[:, 3 * SIZE :], o[:, 3 * SIZE :]) > 1e-2


@pytest.mark.parametrize("ids", [np.ones((2, TIME), np.int32), IDS], ids=["every", "packed"])
def test_what_a_router_pools(ids):
    x = np.random.default_rng(4).normal(size=(2, TIME, 3)).astype(np.float32)
    chunks = document_chunks(2, TIME, SIZE, jnp.asarray(ids))
    chunk, _, entry = sequential_chunks(ids, SIZE)
    wanted = [[x[b, entry[b] == n].sum(0) for n in range(-(-TIME // SIZE))] for b in range(2)]
    assert_close((chunk_sums(jnp.asarray(x), chunks, SIZE),), (wanted,), ("sums",), TOLERANCE["float32"])
    tail, carries = still_open(chunks)
    np.testing.assert_array_equal(tail, (chunk == chunk.max(1, keepdims=True)) & (chunk >= 0) & (entry < 0))
    assert not np.any(carries)


def test_each_full_chunk_has_a_cell_of_its_own():
    """Documents of every awkward length, in as many cells as were promised."""
    rng = np.random.default_rng(0)
    size, time = 4, 40
    kinds = ((1, 2, 3, 4, 5, 9), (5,), (3,), (7, 1), (4,), (100,))
    ids = np.stack([np.repeat(np.arange(time), rng.choice(kinds[b % 6], time))[:time] + 1 for b in range(60)])
    ids = np.where(rng.random(ids.shape) < 0.2 * (np.arange(60) % 4 == 0)[:, None], 0, ids)
    chunks = document_chunks(60, time, size, jnp.asarray(ids))
    chunk, document, entry = sequential_chunks(ids, size)
    np.testing.assert_array_equal(np.where(chunks.full, chunks.number, -1), entry)
    count = most_cells(time, size, packed=True)
    found = jax.tree.map(np.asarray, cells(chunks, size, count))
    assert found.slot.max() < count * size and entry.max() < -(-time // size)
    for b in range(60):
        real = np.flatnonzero(ids[b])
        assert (np.diff(found.slot[b, real]) > 0).all() and (found.slot[b, ids[b] == 0] == -1).all()
        np.testing.assert_array_equal(found.source[b, found.slot[b, real]], real)
        np.testing.assert_array_equal(found.entry[b, found.slot[b, real] // size], entry[b, real])


ATTENTION = ("o", "dq", "dk", "dv", "dselected")


def attention_case(chosen="random", heads=(6, 3, 2), dtype=jnp.float32, time=TIME, scale=1.0):
    """(q, k, v, selected) and the cotangent of o; heads of queries, of keys and of routing."""
    rng = np.random.default_rng(3)
    sizes = (heads[0], 8), (heads[1], 8), (heads[1], 5)
    q, k, v = (jnp.asarray(rng.normal(size=(2, time, *size)), dtype) for size in sizes)
    selected = jnp.asarray(choice(chosen, (2, -(-time // SIZE), heads[2])))
    return (scale * q, k, v, selected), jnp.asarray(rng.normal(size=(2, time, heads[0], 5)), dtype)


@functools.cache
def attention(counterfactual=False, tile=None, sizes=None):
    """A jitted (arguments, ids, cotangent) -> (o, gradients); tile and mesh only tell programs apart."""

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(arguments, ids, cotangent):
        def op(*a):
            options = dict(segment_ids=ids, chunk_size=SIZE, counterfactual=counterfactual)
            return ops.block_sparse_attention(*a, **options)[0]

        o, pull = jax.vjp(op, *arguments)
        return o, *pull(cotangent)

    return run


def compare_attention(
    arguments, ids, cotangent, counterfactual=False, tile=None, tolerance=TOLERANCE["float32"], sizes=None
):
    got = attention(counterfactual, tile, sizes)(arguments, None if ids is None else jnp.asarray(ids), cotangent)
    (o,), slopes = block_sparse_and_gradients(arguments, ids, SIZE, (cotangent,))
    if not counterfactual:
        slopes = *slopes[:3], slopes[3] * np.asarray(arguments[3])
    assert_close(got, (o, *slopes), ATTENTION, tolerance)
    return got


@pytest.fixture(params=[(256, 512), (32, 64), (16, 16)], ids=["one tile", "blocks", "cells"])
def tile(request, monkeypatch):
    for name, slots in zip(("QUERIES", "KEYS"), request.param, strict=True):
        monkeypatch.setattr(sys.modules["efla_jax.ops.block_sparse_attention"], name, slots)
    return request.param


@pytest.mark.parametrize("ids", [None, IDS], ids=["every", "packed"])
def test_attention_equals_the_oracle(tile, ids):
    for chosen in CHOICES[:-1]:
        arguments, cotangent = attention_case(chosen)
        compare_attention(arguments, ids, cotangent, tile=tile)


@pytest.mark.parametrize("ids", [None, IDS], ids=["every", "packed"])
def test_masks_of_zero_have_a_gradient_where_asked_for(ids, monkeypatch):
    for name, slots in (("QUERIES", 32), ("KEYS", 32)):
        monkeypatch.setattr(sys.modules["efla_jax.ops.block_sparse_attention"], name, slots)
    for chosen in ("random", "none"):
        arguments, cotangent = attention_case(chosen)
        *_, slope = compare_attention(arguments, ids, cotangent, counterfactual=True, tile=(32, 32))
        assert np.any(np.asarray(slope)[np.asarray(arguments[3]) == 0])


@pytest.mark.parametrize("ids", [None, IDS], ids=["every", "packed"])
def test_all_selected_is_full_attention(ids):
    (q, k, v, selected), _ = attention_case("all")
    segment_ids = None if ids is None else jnp.asarray(ids)
    o, _ = jax.jit(functools.partial(ops.block_sparse_attention, segment_ids=segment_ids, chunk_size=SIZE))(
        q, k, v, selected
    )
    full, _ = jax.jit(functools.partial(ops.softmax_attention, segment_ids=segment_ids))(q, k, v)
    assert_close((o,), (full,), ("o",), TOLERANCE["float32"])


@pytest.mark.parametrize("heads", [(6, 2, 3), (4, 1, 4)], ids=str)
def test_heads_of_queries_keys_and_routing_share_as_they_like(heads):
    arguments, cotangent = attention_case(heads=heads)
    compare_attention(arguments, IDS, cotangent, tile=(256, 512))


def test_a_selection_shows_in_later_chunks_only(monkeypatch):
    for name, slots in (("QUERIES", 64), ("KEYS", 32)):
        monkeypatch.setattr(sys.modules["efla_jax.ops.block_sparse_attention"], name, slots)
    (q, k, v, selected), _ = attention_case("alternating")
    run = jax.jit(lambda selected: ops.block_sparse_attention(q, k, v, selected, chunk_size=SIZE)[0])
    o, flipped = run(selected), run(selected.at[:, 2].set(1 - selected[:, 2]))
    np.testing.assert_array_equal(o[:, : 3 * SIZE], flipped[:, : 3 * SIZE])
    assert relative_rms(flipped[:, 3 * SIZE :], o[:, 3 * SIZE :]) > 1e-2


@pytest.mark.parametrize("implementation", ["recurrent", "chunked"])
def test_bfloat16_delta_rule(implementation):
    arguments, cotangents = case(dtype=jnp.bfloat16)
    _, slopes, _ = compare(implementation, arguments, IDS, POSITION, cotangents, TOLERANCE["bfloat16"])
    assert slopes[0].dtype == jnp.bfloat16 and slopes[5].dtype == jnp.float32


def test_bfloat16_attention():
    arguments, cotangent = attention_case(dtype=jnp.bfloat16)
    got = compare_attention(arguments, IDS, cotangent, tolerance=TOLERANCE["bfloat16"])
    assert got[0].dtype == jnp.bfloat16 and got[-1].dtype == jnp.float32


def test_padding_is_invisible_whatever_stands_there():
    """The same documents alone give the same, and what stands at padding reaches nothing."""
    real = (IDS != 0)[..., None, None]
    (q, k, v, selected), cotangent = attention_case()
    spoilt = [jnp.where(real, x, jnp.nan) for x in (q, k, v)]
    clean, got = (attention()((*x, selected), jnp.asarray(IDS), cotangent) for x in ((q, k, v), spoilt))
    for x, y in zip(clean, got, strict=True):
        np.testing.assert_array_equal(x, y)
    for x in got[:4]:
        assert not np.any(np.asarray(x)[IDS == 0])
    arguments, cotangents = case()
    spoilt = [jnp.where(real if x.ndim == 4 else real[..., 0], x, jnp.nan) for x in arguments[:5]]
    run = compiled("chunked", BEGINNING)
    clean = run(arguments, jnp.asarray(IDS), cotangents)
    got = run((*spoilt, *arguments[5:]), jnp.asarray(IDS), cotangents)
    jax.tree.map(np.testing.assert_array_equal, clean, got)


def test_memory_of_the_gradient_grows_with_time_not_with_its_square():
    def temporary(time):
        shapes = (1, time, 4, 8), (1, time, 2, 8), (1, time, 2, 8), (1, time // 64, 2)
        given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        loss = jax.grad(lambda *a: ops.block_sparse_attention(*a)[0].sum(), (0, 1, 2, 3))
        return jax.jit(loss).lower(*given).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(2048), temporary(8192)
    assert long < 4.5 * short
    assert long < 4 * 4 * 8192 * 8192 / 8


def loops(function, *arguments) -> collections.Counter:
    """Primitives of the loops of a function, those that its loops call among them."""
    found = collections.Counter()

    def walk(jaxpr, inside):
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            found.update([name] if inside or name == "while" else [])
            for inner in jaxprs_in_params(equation.params):
                walk(inner, inside or name == "while")

    walk(jax.make_jaxpr(function)(*arguments).jaxpr, False)
    return found


@pytest.mark.parametrize("gpu", [False, True], ids=["row by row", "all rows"])
def test_models_under_one_vmap_take_the_loops_of_one_model(gpu, monkeypatch):
    """Bounds that differ between models would select every carry at every turn, and gather and scatter windows."""
    monkeypatch.setattr(sys.modules["efla_jax.ops.block_sparse_tiles"], "on_gpu", lambda: gpu)
    for name, slots in (("QUERIES", 32), ("KEYS", 16)):
        monkeypatch.setattr(sys.modules["efla_jax.ops.block_sparse_attention"], name, slots)

    def run(arguments, cotangent):
        o, pull = jax.vjp(lambda *a: ops.block_sparse_attention(*a, chunk_size=SIZE)[0], *arguments)
        return o, *pull(cotangent)

    members = [attention_case(chosen) for chosen in ("none", "random", "all")]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *members)
    alone, together = (loops(*given) for given in ((run, *members[0]), (jax.vmap(run), *stacked)))
    assert together == alone and alone["while"] >= 2
    one, many = (jax.jit(f, compiler_options=QUICKLY) for f in (run, jax.vmap(run)))
    found = many(*stacked)
    for i, member in enumerate(members):
        assert_close([x[i] for x in found], one(*member), ATTENTION, TOLERANCE["float32"])


def test_a_row_of_one_tile_has_no_loop_over_cells_before_it():
    """Nor a list of them: on a GPU a loop of unknown length waits for its bounds, and ends a graph of launches."""
    arguments, cotangent = attention_case()
    run = functools.partial(attention().__wrapped__, ids=None, cotangent=cotangent)
    assert not loops(run, arguments)
    text = attention().lower(arguments, None, cotangent).compile().as_text()
    assert " sort(" not in text and " while(" in text  # over rows


def test_on_a_mesh():
    """Rows and heads are split, never the time; R = 3 routing heads are repeated, as 2 devices share 6 heads."""
    sizes = (2, 1, 2, 2)
    with jax.set_mesh(make_mesh(**dict(zip(AXES, sizes, strict=True)))):
        arguments, cotangents = case()
        compare("chunked", arguments, IDS, POSITION, cotangents, sizes=sizes)
        arguments, cotangent = attention_case(heads=(6, 2, 3))
        compare_attention(arguments, IDS, cotangent, sizes=sizes)


@pytest.mark.parametrize("time", [1, 16, 17])
def test_short_rows(time):
    arguments, cotangents = case(time=time)
    compare("chunked", arguments, None, POSITION, cotangents)
    arguments, cotangent = attention_case(time=max(time, 2))  # one key: gradients are zero but for rounding
    compare_attention(arguments, None, cotangent)


@pytest.mark.parametrize("implementation", ["recurrent", "chunked"])
def test_no_tokens(implementation):
    arguments, _ = case()
    q, k, u, erase, decay, keep = (x[:, :0] for x in arguments[:6])
    given = ops.RoutedState(*arguments[7:], jnp.asarray(POSITION, jnp.int32))
    for ids in (None, jnp.zeros((2, 0), int)):
        options = dict(segment_ids=ids, chunk_size=SIZE)
        o, state = ops.routed_delta_rule(
            q, k, u, erase, decay, keep, initial_state=given, implementation=implementation, **options
        )
        assert o.shape == u.shape and state.position.tolist() == list(POSITION)
        np.testing.assert_array_equal(state.state, given.state)
        # Row 1 stands where a chunk begins.
        np.testing.assert_array_equal(state.start, jnp.stack([given.start[0], given.state[1]]))
        assert state.log_decay[1].tolist() == [0.0] * 6
        o, after = ops.block_sparse_attention(q, k, u[:, :, :2], keep[..., :2], **options)
        assert o.shape == (2, 0, 2, 5) and after.k.shape[1] == 0 and after.position.tolist() == [0, 0]


def test_large_scores_stay_finite():
    (q, k, v, selected), cotangent = attention_case("random", scale=1e18)
    for counterfactual in (False, True):
        got = attention(counterfactual)((q, k, v, selected), jnp.asarray(IDS), cotangent)
        assert all(np.isfinite(x).all() for x in got)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"erase": None}, "erase: None"),
        ({"keep": jnp.zeros((2, 2, 6))}, r"keep: shape .* N = 3: T=37 tokens fill at most"),
        ({"keep": jnp.zeros((2, 3, 6, 3))}, r"keep: shape .*\[B, N, H, 2\]"),
        ({"keep": jnp.zeros((2, 3, 5))}, "keep: shape .* H .* 5 here but 6 in u"),
        ({"keep": jnp.zeros((2, 3, 6), int)}, "keep: dtype int32"),
        ({"chunk_size": 24}, "chunk_size: 24"),
        (
            {"initial_state": ops.RoutedState(*(jnp.zeros(x) for x in ((2, 6, 8, 5), (2, 6, 8, 5), (2, 6), 2)))},
            "initial_state.position: dtype float32",
        ),
    ],
)
def test_wrong_input_of_the_delta_rule(unchecked, change, message):
    q, u, gate = jnp.zeros((2, 37, 2, 8)), jnp.zeros((2, 37, 6, 5)), jnp.zeros((2, 37, 6))
    given = dict(q=q, k=q, u=u, erase=gate, log_decay=gate, keep=jnp.zeros((2, 3, 6)), chunk_size=SIZE)
    with pytest.raises(ValueError, match=message):
        ops.routed_delta_rule(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selected": jnp.zeros((2, 3, 4))}, "selected: R=4 routing heads, but they must divide the H=6"),
        ({"selected": jnp.zeros((2, 4, 3))}, "selected: shape .* has N=4 entries, but T=37"),
        ({"k": jnp.zeros((2, 37, 4, 8))}, "v: shape .* G .* 2 here but 4 in k"),
        ({"segment_ids": jnp.zeros((2, 36), int)}, "segment_ids: shape"),
        ({"chunk_size": 24}, "chunk_size: 24"),
    ],
)
def test_wrong_input_of_the_attention(unchecked, change, message):
    given = dict(q=jnp.zeros((2, 37, 6, 8)), k=jnp.zeros((2, 37, 2, 8)), v=jnp.zeros((2, 37, 2, 5)))
    given |= dict(selected=jnp.zeros((2, 3, 3)), chunk_size=SIZE)
    with pytest.raises(ValueError, match=message):
        ops.block_sparse_attention(**{**given, **change})


def test_what_is_not_built_says_so(unchecked):
    arguments, _ = attention_case()
    for implementation in ("pallas", "triton"):
        with pytest.raises(NotImplementedError, match="block_sparse_attention"):
            ops.block_sparse_attention(*arguments, chunk_size=SIZE, implementation=implementation)
