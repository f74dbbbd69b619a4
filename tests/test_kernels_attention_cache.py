"""Softmax attention's kernels over a cache and over pages of selected chunks, of one token and of several, in Mosaic's
interpreter with its race detector, against float64 and against XLA; and their lowering for CUDA."""

import os

os.environ.setdefault("NPROC", "8")  # a waiting warpgroup blocks a thread of XLA's pool: more of them than warpgroups

import functools  # noqa: E402
import importlib  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from efla_jax import ops  # noqa: E402
from efla_jax.kernels import attention_decode as kernel  # noqa: E402
from efla_jax.kernels import attention_prefix  # noqa: E402
from efla_jax.kernels.mosaic import MASKED  # noqa: E402
from efla_jax.ops import pallas_attention  # noqa: E402
from efla_jax.ops import pallas_attention_cache as glue  # noqa: E402
from tests import ptxas  # noqa: E402
from tests.lowering import lower_cuda, mosaic_calls  # noqa: E402
from tests.oracle import relative_rms  # noqa: E402

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
# Weights are rounded to 16 bits before a product: 2^-9 / sqrt(3) at most of bfloat16, 2^-12 of float16, and the output
# of the ops once more.
TOLERANCE = {"bfloat16": 3e-3, "float16": 4e-4}

pytestmark = pytest.mark.usefixtures("no_races")


def draw(shapes, dtype="bfloat16", seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def reference(q, k, v, owners, limits, routes):
    """(o [B, H, V], L [B, H]) in float64, one head after the other."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (batch, heads, _), (slots, key_heads) = q.shape, k.shape[1:3]
    o, log_sum = np.zeros((batch, heads, v.shape[3])), np.full((batch, heads), MASKED)
    for row, head in np.ndindex(batch, heads):
        owner, mine = divmod(head // (heads // (key_heads * routes)), key_heads)
        seen = np.arange(slots) < limits[row]
        if owners is not None:
            seen &= np.repeat(np.asarray(owners[row]), 64) == owner
        if seen.any():
            scores = k[row, seen, mine] @ q[row, head]
            weights = np.exp(scores - scores.max())
            log_sum[row, head] = scores.max() + np.log(weights.sum())
            o[row, head] = weights @ v[row, seen, mine] / weights.sum()
    return o, log_sum


# (B, slots, key heads of a slot, owners, query heads of a key head, K, V, slots in use of each row, programs of a row)
CASES = (
    (2, 7 * 64, 2, 3, 2, 64, 128, (7 * 64, 4 * 64), 3),  # pages, not all of them in use
    (1, 328, 2, 1, 4, 64, 64, (301,), 2),  # a cache whose last cell is cut, half in use
    (2, 3 * 64, 1, 2, 1, 128, 64, (0, 3 * 64), 4),  # a row that sees nothing, and more programs than items
)


@pytest.mark.parametrize("dtype", kernel.DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_are_the_softmax_over_what_their_heads_see(case, dtype):
    batch, slots, key_heads, routes, readers, key_dim, value_dim, limits, programs = case
    heads = routes * key_heads * readers
    shapes = (batch, heads, key_dim), (batch, slots, key_heads, key_dim), (batch, slots, key_heads, value_dim)
    q, k, v = draw(shapes, dtype)
    q = q * 0.3
    owners = None if routes == 1 else jnp.asarray(np.random.default_rng(1).integers(0, routes, (batch, slots // 64)))
    config = kernel.Config(programs=programs * batch, stages=4)
    parts = kernel.partial(q, k, v, owners, jnp.array(limits), routes=routes, config=config, interpret=INTERPRET)
    assert parts[0].shape == (batch, 2 * programs if programs < 4 else 6, heads, value_dim)
    found = [np.asarray(x) for x in glue.joined(*parts)]
    o, log_sum = reference(q, k, v, owners, limits, routes)
    some = log_sum > MASKED
    assert not found[0][~some].any() and (found[1][~some] < 0.9 * MASKED).all() and some.any()
    assert relative_rms(found[0], o) < TOLERANCE[dtype]
    np.testing.assert_allclose(found[1][some], log_sum[some], atol=1e-4)


@pytest.fixture
def interpreted(monkeypatch):
    """What the ops reach as "pallas" runs in the interpreter."""
    for module, name in (
        (glue, "latest"),
        (glue, "latest_of_pages"),
        (glue, "paged"),
        (pallas_attention, "softmax"),
        (glue, "softmax"),
        (pallas_attention, "block_sparse"),
    ):
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=INTERPRET))


def cached(length=(70, 0, 128), capacity=136, time=1):
    """A cache, and (q, k, v) of `time` more tokens."""
    *call, k, v = draw(((3, time, 4, 64), (3, time, 2, 64), (3, time, 2, 64), *[(3, capacity, 2, 64)] * 2))
    call[0] = call[0] * 0.3
    live = (jnp.arange(capacity) < jnp.array(length)[:, None])[..., None, None]
    return ops.KVCache(jnp.where(live, k, 0), jnp.where(live, v, 0), jnp.array(length, jnp.int32)), call


@pytest.mark.parametrize("ids", (None, [[1], [1], [0]]), ids=str)
def test_a_token_of_softmax_attention(interpreted, ids):
    cache, call = cached()
    ids = ids and jnp.array(ids)
    run = functools.partial(ops.softmax_attention, *call, initial_state=cache, segment_ids=ids)
    (o, state), (truth, expected) = run(implementation="pallas"), run(implementation="chunked")
    assert relative_rms(o, truth) < TOLERANCE["bfloat16"]
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_its_gradient_is_that_of_xla(interpreted):
    cache, call = cached()

    def loss(implementation, k, *call):
        o, _ = ops.softmax_attention(*call, initial_state=cache._replace(k=k), implementation=implementation)
        return jnp.sum(o.astype(jnp.float32) ** 2)

    slopes = [
        jax.grad(functools.partial(loss, name), argnums=(0, 1, 3))(cache.k, *call) for name in ("pallas", "chunked")
    ]
    for value, truth in zip(*slopes, strict=True):
        assert relative_rms(value, truth) < 1e-2  # of o, and 2 o is the cotangent


@functools.cache
def chosen(length=200, routes=2, time=1):
    """A cache of pages after `length` tokens in two rows, and (q, k, v, selected) of `time` more."""
    k, v, *call = draw(((2, length, 4, 64), (2, length, 4, 64), *[(2, time, 4, 64)] * 3))
    rng = np.random.default_rng(3)
    selected, more = (jnp.asarray(rng.integers(0, 2, (2, -(-n // 64), routes)), jnp.float32) for n in (length, time))
    _, state = jax.jit(ops.block_sparse_attention)(k * 0.1, k, v, selected)
    call[0] = call[0] * 0.3
    return ops.grow_selected_kv(state, 12), (*call, more)


@pytest.mark.parametrize("ids", (pytest.param(None, marks=pytest.mark.slow), [[2], [0]]), ids=str)
def test_a_token_of_block_sparse_attention(interpreted, ids):
    state, call = chosen()
    ids = ids and jnp.array(ids)
    run = functools.partial(ops.block_sparse_attention, *call, initial_state=state, segment_ids=ids)
    (o, after), (truth, expected) = run(implementation="pallas"), run(implementation="chunked")
    assert relative_rms(o, truth) < TOLERANCE["bfloat16"]
    jax.tree.map(np.testing.assert_array_equal, after, expected)


def test_auto_on_a_gpu_takes_the_kernels(interpreted, monkeypatch):
    """Of one token, to a cache and to pages, and of several."""
    state, call = chosen()
    modules = [importlib.import_module(f"efla_jax.ops.{name}") for name in ("block_sparse_attention", "attention")]
    for module in modules:
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    asked = []

    def recorded(name, function):
        return lambda *a, **options: (asked.append(name), function(*a, **options))[1]

    for module, name in ((glue, "latest_of_pages"), (glue, "paged"), (glue, "softmax"), (glue, "latest")):
        monkeypatch.setattr(module, name, recorded(name, getattr(module, name)))
    o, _ = ops.block_sparse_attention(*call, initial_state=state)
    truth, _ = ops.block_sparse_attention(*call, initial_state=state, implementation="chunked")
    assert relative_rms(o, truth) < TOLERANCE["bfloat16"] and asked == ["latest_of_pages"]
    cache, call = cached(time=2)
    ops.softmax_attention(*call, initial_state=cache)
    cache, call = cached()
    ops.softmax_attention(*call, initial_state=cache)
    assert asked == ["latest_of_pages", "softmax", "latest"]


@pytest.mark.slow
def test_its_gradients_are_those_of_xla(interpreted):
    state, call = chosen()

    def loss(implementation, k, weight, *call):
        kv = state._replace(k=k, weight=weight)
        o, _ = ops.block_sparse_attention(*call, initial_state=kv, implementation=implementation)
        return jnp.sum(o.astype(jnp.float32) ** 2)

    slopes = [
        jax.grad(functools.partial(loss, name), argnums=(0, 1, 2))(state.k, state.weight, *call)
        for name in ("pallas", "chunked")
    ]
    for value, truth in zip(*slopes, strict=True):
        assert np.abs(truth).max() > 0 and relative_rms(value, truth) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("ids", (None, ([1] * 60 + [0] * 5 + [2] * 75, [2] * 140, [0] * 100 + [1] * 40)), ids=str)
def test_tokens_of_softmax_attention_behind_a_cache(interpreted, ids):
    cache, call = cached(capacity=320, time=140)
    ids = ids and jnp.array(ids)
    run = functools.partial(ops.softmax_attention, *call, initial_state=cache, segment_ids=ids)
    (o, state), (truth, expected) = run(implementation="pallas"), run(implementation="chunked")
    assert relative_rms(o, truth) < 1.5 * TOLERANCE["bfloat16"]  # two outputs are rounded before they are joined
    jax.tree.map(np.testing.assert_array_equal, state, expected)


@pytest.mark.slow
def test_the_gradient_of_tokens_behind_a_cache_is_that_of_xla(interpreted):
    cache, call = cached(capacity=192, time=40)

    def loss(implementation, k, *call):
        o, _ = ops.softmax_attention(*call, initial_state=cache._replace(k=k), implementation=implementation)
        return jnp.sum(o.astype(jnp.float32) ** 2)

    slopes = [
        jax.grad(functools.partial(loss, name), argnums=(0, 1, 2))(cache.k, *call) for name in ("pallas", "chunked")
    ]
    for value, truth in zip(*slopes, strict=True):
        assert relative_rms(value, truth) < 1e-2


def test_every_query_sees_the_cells_of_its_list():
    """Lists of 3 cells and of none; the first cell of a list is used in part."""
    q, k, v = draw(((2, 128, 2, 64), (2, 320, 1, 64), (2, 320, 1, 128)))
    order = jnp.array([[[4, 0, 2, -1, -1], [3, -1, -1, -1, -1]]] * 2)
    counts, limits = jnp.array([[[3], [1]], [[3], [0]]]), jnp.array([17, 64])
    o, log_sum = attention_prefix.forward(q * 0.3, k, v, order, counts, limits, interpret=INTERPRET)
    for row, head in np.ndindex(2, 2):
        cells = order[row, head, : counts[row, head, 0]]
        slots = np.concatenate([64 * c + np.arange(64 if i else limits[row]) for i, c in enumerate(cells)] or [[]])
        if not slots.size:
            assert not o[row, :, head].any() and (log_sum[row, head] == MASKED).all()
            continue
        keys = (x[row : row + 1, slots.astype(int)] for x in (k, v))
        wide = jnp.broadcast_to(jnp.array(len(slots)), (128,))
        truth, sums = reference(q[row, :, head : head + 1] * 0.3, *(jnp.repeat(x, 128, 0) for x in keys), None, wide, 1)
        assert relative_rms(o[row, :, head], truth[:, 0]) < TOLERANCE["bfloat16"]
        np.testing.assert_allclose(log_sum[row, head], sums[:, 0], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ids", (None, ([1] * 60 + [0] * 5 + [2] * 75, [2] * 140)), ids=str)
def test_tokens_of_block_sparse_attention_behind_pages(interpreted, ids):
    state, call = chosen(time=140)
    ids = ids and jnp.array(ids)
    run = functools.partial(ops.block_sparse_attention, *call, initial_state=state, segment_ids=ids)
    (o, after), (truth, expected) = run(implementation="pallas"), run(implementation="chunked")
    assert int(state.pages.min()) > 0 and relative_rms(o, truth) < 1.5 * TOLERANCE["bfloat16"]
    jax.tree.map(np.testing.assert_array_equal, after, expected)


@pytest.mark.slow
def test_the_gradients_of_tokens_behind_pages_are_those_of_xla(interpreted):
    state, call = chosen(time=70)

    def loss(implementation, k, weight, *call):
        kv = state._replace(k=k, weight=weight)
        o, _ = ops.block_sparse_attention(*call, initial_state=kv, implementation=implementation)
        return jnp.sum(o.astype(jnp.float32) ** 2)

    slopes = [
        jax.grad(functools.partial(loss, name), argnums=(0, 1, 2))(state.k, state.weight, *call)
        for name in ("pallas", "chunked")
    ]
    for value, truth in zip(*slopes, strict=True):
        assert np.abs(truth).max() > 0 and relative_rms(value, truth) < 2e-2


def test_what_the_kernel_does_not_serve_is_named(interpreted):
    cache, (q, k, v) = cached(capacity=132)
    with pytest.raises(NotImplementedError, match="132 slots"):
        ops.softmax_attention(q, k, v, initial_state=cache, implementation="pallas")
    cache, _ = cached()
    with pytest.raises(NotImplementedError, match="one dtype"):
        ops.softmax_attention(q.astype(jnp.float32), k, v, initial_state=cache, implementation="pallas")
    with pytest.raises(NotImplementedError, match="136 slots"):
        ops.softmax_attention(*cached(time=2)[1], initial_state=cache, implementation="pallas")
    assert kernel.unsupported(65, 64, 64, 64, "bfloat16") and kernel.unsupported(4, 96, 64, 64, "bfloat16")


@pytest.mark.parametrize("sizes", ((1, 12288 * 64, 2, 6, 12, 64, 128), (1, 131080, 16, 1, 16, 64, 64)), ids=str)
def test_it_lowers_and_does_not_spill(sizes):
    batch, slots, key_heads, routes, heads, key_dim, value_dim = sizes
    shape, dtype = jax.ShapeDtypeStruct, jnp.bfloat16
    arrays = [(batch, heads, key_dim), (batch, slots, key_heads, key_dim), (batch, slots, key_heads, value_dim)]
    owners = shape((batch, slots // 64), jnp.int32) if routes > 1 else None
    run = functools.partial(kernel.partial, routes=routes)
    program = lower_cuda(run, *(shape(x, dtype) for x in arrays), owners, shape((batch,), jnp.int32))
    assert mosaic_calls(program) == 1
    check_registers(program)


def check_registers(program):
    if ptxas.missing() is None:
        [usage] = ptxas.usage(program)
        assert usage.spilled == 0 and not usage.serialised


@pytest.mark.parametrize("sizes", ((1, 12288 * 64, 2, 6, 12, 64, 128), (1, 131072, 16, 1, 16, 128, 128)), ids=str)
def test_several_tokens_lower_and_do_not_spill(sizes):
    batch, slots, key_heads, routes, heads, key_dim, value_dim = sizes
    shape, dtype = jax.ShapeDtypeStruct, jnp.bfloat16
    arrays = [(batch, 4096, heads, key_dim), (batch, slots, key_heads, key_dim), (batch, slots, key_heads, value_dim)]
    numbers = [(batch, routes, slots // 64), (batch, routes, 4096 // 128), (batch,)]
    given = (*(shape(x, dtype) for x in arrays), *(shape(x, jnp.int32) for x in numbers))
    program = lower_cuda(attention_prefix.forward, *given)
    assert mosaic_calls(program) == 1
    check_registers(program)
