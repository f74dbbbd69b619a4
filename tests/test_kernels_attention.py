"""Softmax attention's kernels, plain and block-sparse, in Mosaic's interpreter with its race detector, against the
float64 oracle; and their lowering for CUDA."""

import os

os.environ.setdefault("NPROC", "8")  # a waiting warpgroup blocks a thread of XLA's pool: more of them than warpgroups

import functools  # noqa: E402
import itertools  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from efla_jax import ops  # noqa: E402
from efla_jax.kernels import attention as kernel  # noqa: E402
from efla_jax.ops import pallas_attention, pallas_attention_cache  # noqa: E402
from tests import ptxas  # noqa: E402
from tests.lowering import lower_cuda, mosaic_calls  # noqa: E402
from tests.oracle import block_sparse_and_gradients, relative_rms  # noqa: E402

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
CHUNK = 64
DIMS = tuple(itertools.product(kernel.DIMS, kernel.DIMS))
NAMES = ("o", "dq", "dk", "dv", "dselected")
# Weights and their gradients are rounded to 16 bits before a product, results after it: half of 2^-8 / sqrt(3) * 1.4 =
# 1.6e-3 each for bfloat16, of 2^-11 for float16.
TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3}
# dselected sums P (dO V - delta) over all later queries, and delta has the rounding of o: about |dO| |o| 1.6e-3 = 4e-3
# each, times a P of some 0.5, so that the sum over 400 of them is off by 0.04, whatever is left of it (XLA's form reads
# the same: 0.06 where the kernel reads 0.08). A pair too many or too few is more than 1.
CANCELLED = 0.1

pytestmark = pytest.mark.usefixtures("no_races")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """What the ops reach as "pallas" runs in the interpreter."""
    for module, name in (
        (pallas_attention, "softmax"),
        (pallas_attention, "block_sparse"),
        (pallas_attention_cache, "softmax"),
        (pallas_attention_cache, "paged"),
    ):
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=INTERPRET))


def documents(batch: int, time: int, seed=0) -> np.ndarray:
    """Ids of documents that end before, at and behind the borders of chunks and tiles, and padding anywhere."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((batch, time), np.int32)
    for row in ids:
        lengths = rng.permutation([3, 64, 70, 1, 150, 40])
        row[:] = np.repeat(np.arange(1, 8), [*lengths, time])[:time]
        row[rng.random(time) < 0.1] = 0
    ids[0, -5:] = 0
    return ids


def case(time, heads, dims, dtype="bfloat16", batch=1, chosen=None, scale=0.2):
    """(q, k, v, selected) and the cotangent of o; heads of queries, keys and routing, dims of keys and values."""
    rng = np.random.default_rng(time)
    sizes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1])
    q, k, v, d_o = (rng.normal(size=(batch, time, *size)) for size in sizes)
    selected = rng.integers(0, 2, (batch, -(-time // CHUNK), heads[2])) if chosen is None else chosen
    q, k, v, d_o = (jnp.asarray(x, dtype) for x in (scale * q, k, v, d_o))
    return (q, k, v, jnp.asarray(selected, jnp.float32)), d_o


def sparse(q, k, v, selected, ids):
    return ops.block_sparse_attention(q, k, v, selected, segment_ids=ids, implementation="pallas")[0]


def full(q, k, v, _, ids):
    return ops.softmax_attention(q, k, v, segment_ids=ids, implementation="pallas")[0]


@functools.cache
def compiled(op):
    """A jitted (arguments, ids, cotangent) -> (o, *gradients)."""

    @jax.jit
    def run(arguments, ids, d_o):
        o, pull = jax.vjp(lambda *a: op(*a, ids), *arguments)
        return o, *pull(d_o)

    return run


def compare(op, arguments, ids, d_o, asked=None):
    """The results, once they equal the oracle's; those of `full` have no gradient of selected. asked: other arguments
    that must have the same results."""
    given = arguments if op is sparse else (*arguments[:3], jnp.ones_like(arguments[3]))
    results = compiled(op)(asked or given, ids, d_o)
    (o,), slopes = block_sparse_and_gradients(given, ids, CHUNK, (d_o,))
    truth = o, *slopes[:3], slopes[3] * np.asarray(given[3])
    count = len(NAMES) if op is sparse else 4
    errors = {n: relative_rms(r, t) for n, r, t in zip(NAMES[:count], results, truth, strict=False)}
    bounds = dict.fromkeys(errors, TOLERANCE[arguments[0].dtype.name])
    if errors.get("dselected", 0.0) > bounds["o"]:
        bounds["dselected"] = CANCELLED / np.sqrt(np.mean(np.square(truth[4][truth[4] != 0])))
    assert all(errors[n] <= bounds[n] for n in errors), (errors, bounds)
    return results


def test_block_sparse_attention_with_documents_and_padding():
    """Values, every gradient, that of the mask too; padding may hold anything."""
    (*arrays, selected), d_o = case(150, (2, 1, 2), (64, 64))
    ids = documents(1, 150, 10)
    pad = ids == 0
    poisoned = *(jnp.where(pad[..., None, None], jnp.nan, x) for x in arrays), selected
    results = compare(sparse, (*arrays, selected), ids, d_o, poisoned)
    assert np.count_nonzero(results[4]) == 3  # two chunks are seen from later ones: by one head, by both
    for value in results[:4]:
        assert not np.asarray(value, np.float32)[pad].any()


def test_full_attention_with_documents_and_padding():
    arguments, d_o = case(150, (1, 1, 1), (64, 64))
    compare(full, arguments, documents(1, 150, 1), d_o)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", kernel.DTYPES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("op", (full, sparse))
def test_every_size(op, dims, dtype):
    """One document: three tiles, of which the last is not full."""
    compare(op, *(lambda a, d: (a, None, d))(*case(300, (2, 1, 2), dims, dtype, batch=2)))


@pytest.mark.slow
@pytest.mark.parametrize("heads", ((6, 2, 3), (4, 4, 1), (4, 1, 4)), ids=str)
def test_heads_of_queries_keys_and_routing_share_as_they_like(heads):
    arguments, d_o = case(240, heads, (64, 64), batch=2)
    compare(sparse, arguments, documents(2, 240), d_o)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ("none", "all", "odd", "single"))
def test_every_kind_of_choice(chosen):
    number = np.arange(9)[None, :, None]
    choices = dict(none=number < 0, all=number >= 0, odd=number % 2 == 1, single=number == 2)
    arguments, d_o = case(9 * CHUNK, (1, 1, 1), (64, 64), chosen=choices[chosen])
    compare(sparse, arguments, None, d_o)


@pytest.mark.slow
@pytest.mark.parametrize("time", (1, 63, 64, 65, 128, 129, 257))
def test_every_length(time):
    for op in (full, sparse):
        compare(op, *(lambda a, d: (a, None, d))(*case(time, (1, 1, 1), (64, 64))))


@pytest.mark.slow
def test_large_scores():
    """A softmax that is nearly one-hot, scores of some hundreds: dq and dk are what is left of cancelling terms."""
    arguments, _ = case(300, (1, 1, 1), (64, 64), scale=10.0)
    o = full(*arguments, None)
    truth = ops.softmax_attention(*(x.astype(jnp.float32) for x in arguments[:3]), implementation="chunked")[0]
    assert relative_rms(o, truth) < TOLERANCE["bfloat16"]


@pytest.mark.slow
def test_the_same_bits_at_every_repetition():
    arguments, d_o = case(200, (4, 1, 2), (64, 64))
    first, second = (compiled(sparse)(arguments, None, d_o) for _ in range(2))
    for value, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.slow
def test_vmap_equals_one_at_a_time():
    pairs = [case(100, (1, 1, 1), (64, 64), scale=scale) for scale in (0.1, 0.3)]
    both, cotangents = jax.tree.map(lambda *x: jnp.stack(x), *pairs)
    mapped = jax.vmap(compiled(sparse), (0, None, 0))(both, None, cotangents)
    for i, (arguments, d_o) in enumerate(pairs):
        alone = compiled(sparse)(arguments, None, d_o)
        for value, reference in zip(mapped, alone, strict=True):
            assert relative_rms(value[i], reference) < 1e-6


@pytest.mark.slow
def test_a_text_goes_on_in_pieces():
    (q, k, v, selected), _ = case(330, (2, 1, 1), (64, 64))
    whole = ops.block_sparse_attention(q, k, v, selected)[0]
    state = ops.init_selected_kv(1, 6, CHUNK, 1, 1, 64, 64, "bfloat16")
    parts, done = [], 0
    for piece in (100, 150, 80):
        end = done + piece
        part = selected[:, done // CHUNK : done // CHUNK + -(-piece // CHUNK)]
        o, state = ops.block_sparse_attention(
            q[:, done:end], k[:, done:end], v[:, done:end], part, initial_state=state, implementation="pallas"
        )
        parts.append(o)
        done = end
    assert relative_rms(jnp.concatenate(parts, 1), whole) < TOLERANCE["bfloat16"]


def test_who_sees_whom():
    """The programs' terms, read back: every pair of slots that a query should see is met once, nothing else is, for
    outputs and for the gradients of keys; and the work follows the list."""
    rng = np.random.default_rng(0)
    slots, count = 1024, 16
    document = np.repeat([1, 2, 3, 4], [300, 20, 500, 204])
    chunk, number, held = np.zeros(slots, int), 0, 0
    for slot in range(slots):
        if slot == 0 or document[slot] != document[slot - 1] or held == CHUNK:
            number, held = number + 1, 0
        held += 1
        chunk[slot] = number
    full_cell = (chunk.reshape(count, CHUNK) == chunk.reshape(count, CHUNK)[:, :1]).all(1)
    picked = full_cell & (rng.random(count) < 0.7)
    query, key = np.arange(slots)[:, None], np.arange(slots)
    own = chunk[:, None] == chunk
    padded = np.isin(key, (5, 330, 600, 601, 1023))
    for real, every in ((~padded, True), (key >= 0, True), (key >= 0, False)):
        rows = pallas_attention.rows_of(*(jnp.asarray(x)[None] for x in (document, chunk, real)))
        seen = pallas_attention.who_sees_whom(rows, None if every else jnp.asarray(picked)[None, None])
        order, bounds, marks, pairs = (np.asarray(x)[0, 0] for x in seen)
        expected = (query >= key) & (document[:, None] == document) & (every | own | picked[key // CHUNK])
        expected = (expected & real)[real]  # what padding sees is not used
        np.testing.assert_array_equal(met_by_queries(order, bounds, marks)[real], expected)
        np.testing.assert_array_equal(met_by_keys(pairs, marks)[real], expected)
        assert {*range(count)} <= {*pairs[:, :2].ravel()} <= {*range(-1, count)}
    _, masks, _, previous = bounds.T
    # Documents begin in tiles 2 and 6; a chunk of the last one lies across the border of tile 7.
    assert max(masks[[0, 1, 3, 4, 5, 7]]) == 1 and previous.tolist() == [0] * 7 + [1]
    rows, few = pallas_attention.one_document(1, slots), jnp.asarray(rng.random((1, 2, count)) < 0.3)
    work = pallas_attention.who_sees_whom(rows, few).bounds[..., 2]
    np.testing.assert_array_equal(work, (np.cumsum(few, 2)[..., ::2] - few[..., ::2] + 1) // 2)


def met_by_queries(order, bounds, marks) -> np.ndarray:
    """How often each key is met by each query, as `over_steps` goes."""
    met = np.zeros((marks.shape[1],) * 2, int)
    column = np.arange(2 * CHUNK)
    for tile, (start, masks, steps, previous) in enumerate(bounds):
        query = tile * 2 * CHUNK + column
        later = query[:, None]
        for i in range(steps):
            place = (start + 2 * i) * CHUNK + column
            keys = order[np.clip(place // CHUNK, 0, len(order) - 1)] * CHUNK + place % CHUNK
            met[np.ix_(query, keys)] += (place >= 0) & (later <= marks[0, keys]) if i < masks else 1
        if previous:
            met[np.ix_(query, query - 2 * CHUNK)] += later <= marks[1, query - 2 * CHUNK]
        met[np.ix_(query, query)] += (later >= query) & (later <= marks[0, query])
    return met


def met_by_keys(pairs, marks) -> np.ndarray:
    met = np.zeros((marks.shape[1],) * 2, int)
    for *cells, begin, count, begin_next, count_next in pairs:
        for query_cell in (*range(begin, begin + count), *range(begin_next, begin_next + count_next)):
            query = query_cell * CHUNK + np.arange(CHUNK)[:, None]
            for cell in cells:
                if cell >= 0:
                    key = cell * CHUNK + np.arange(CHUNK)
                    met[query, key] += (query >= key) & (query <= marks[0, key])
    return met


def test_what_the_kernels_do_not_serve_is_named(monkeypatch):
    def ask(op, dims=(64, 64), dtype="bfloat16", **options):
        (q, k, v, selected), _ = case(70, (1, 1, 1), dims, dtype)
        if op is ops.block_sparse_attention:
            return op(
                q, k, v, selected[:, : -(-70 // options.get("chunk_size", 64))], implementation="pallas", **options
            )
        return op(q, k, v, implementation="pallas", **options)

    cache = ops.init_kv_cache(1, 80, 1, 64, 64, "bfloat16")
    for reason, op, options in (
        ("K = 32", ops.softmax_attention, dict(dims=(32, 64))),
        ("float32", ops.block_sparse_attention, dict(dtype="float32")),
        ("80 slots of keys", ops.softmax_attention, dict(initial_state=cache)),
        ("counterfactual", ops.block_sparse_attention, dict(counterfactual=True)),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            ask(op, **options)
    monkeypatch.undo()
    for op in (ops.softmax_attention, ops.block_sparse_attention):
        with pytest.raises(NotImplementedError, match="need an NVIDIA Hopper GPU"):
            ask(op)


def lowered(op, time, heads, dims, ids: bool, dtype=jnp.bfloat16):
    """The program of value and gradients."""
    shape = jax.ShapeDtypeStruct
    q, k, v, d_o = (shape((1, time, heads[i], dims[j]), jnp.dtype(dtype)) for i, j in ((0, 0), (1, 0), (1, 1), (0, 1)))
    chosen = shape((1, -(-time // CHUNK), heads[2]), jnp.float32)
    ids = shape((1, time), jnp.int32) if ids else None

    def run(arguments, ids, d_o):
        o, pull = jax.vjp(lambda *a: op(*a, ids), *arguments)
        return o, pull(d_o)

    return lower_cuda(run, (q, k, v, chosen), ids, d_o)


def test_it_lowers(monkeypatch):
    monkeypatch.undo()
    assert mosaic_calls(lowered(sparse, 1000, (4, 4, 2), (64, 128), True)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", kernel.DTYPES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_size_lowers_and_does_not_spill(dims, dtype, monkeypatch):
    monkeypatch.undo()
    for op, ids in ((full, True), (sparse, False)):
        program = lowered(op, 32768, (16, 4, 8), dims, ids, dtype)
        assert mosaic_calls(program) == 3
        if ptxas.missing() is None:
            for usage in ptxas.usage(program):  # a loop's bookkeeping, and of K = 128 the mask of a last step
                assert usage.spilled <= 80 and not usage.serialised, usage
