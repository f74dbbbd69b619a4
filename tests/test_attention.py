"""softmax_attention and apply_rope against float64 references: caches, pieces, padding, packing, overflow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from efla_jax.layers.attention import Attention
from efla_jax.ops import KVCache, apply_rope, attention_blocks, block_sparse_attention, init_kv_cache, softmax_attention
from efla_jax.ops import attention as attention_file
from tests.oracle import TOLERANCE, assert_close

# Padding before, behind, between; several documents; an id that comes back; nothing real at all.
IDS = np.array(
    [
        [0, 0, 3, 3, 3, 3, 3],
        [5, 0, 5, 0, 0, 5, 0],
        [1, 1, 2, 2, 2, 3, 3],
        [1, 2, 1, 2, 0, 2, 1],
        [0, 0, 0, 0, 0, 0, 0],
    ],
    np.int32,
)
LENGTHS = np.array([2, 1, 2, 0, 1], np.int32)
BATCH, TIME, HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, CAPACITY = *IDS.shape, 6, 2, 3, 4, 9
EVERY = np.ones_like(IDS)
NAMES = ("o", "k", "v", "dq", "dk", "dv", "dcached_k", "dcached_v")


def reference(q, k, v, cached_k, cached_v, lengths, ids):
    """(o, k, v of the state): for every real token the list of what it sees, in order. Head h reads h // (H // G)."""
    capacity = cached_k.shape[1]
    keys, values = jnp.concatenate([cached_k, k], 1), jnp.concatenate([cached_v, v], 1)
    o = jnp.zeros((*q.shape[:3], v.shape[-1]))
    state = jnp.zeros_like(cached_k), jnp.zeros_like(cached_v)
    for b in range(ids.shape[0]):
        seen, document = list(range(lengths[b])), None
        for t in np.flatnonzero(ids[b]):
            if document not in (None, ids[b, t]):
                seen = []
            document = ids[b, t]
            seen.append(capacity + t)
            read_k, read_v = (jnp.repeat(x[b, np.array(seen)], HEADS // KEY_HEADS, axis=1) for x in (keys, values))
            weights = jax.nn.softmax(jnp.einsum("hk,nhk->hn", q[b, t], read_k), axis=-1)
            o = o.at[b, t].set(jnp.einsum("hn,nhv->hv", weights, read_v))
        kept = np.array(seen[:capacity], int)
        state = tuple(s.at[b, : len(seen)].set(x[b, kept]) for s, x in zip(state, (keys, values), strict=True))
    return o, *state


@functools.cache
def truth(packed: bool, cached: bool, dtype="float32"):
    """Values and gradients of the reference in float64, for `arguments`."""
    ids = IDS if packed else EVERY
    lengths = LENGTHS if cached else 0 * LENGTHS
    args, cotangents = arguments(CAPACITY if cached else TIME, dtype)
    with jax.enable_x64(True):
        args, cotangents = ([jnp.asarray(np.asarray(x, np.float64)) for x in xs] for xs in (args, cotangents))

        @jax.jit
        def run(args, cotangents):
            out, back = jax.vjp(lambda *a: reference(*a, lengths, ids), *args)
            return *out, *back(tuple(cotangents))

        return [np.asarray(x) for x in run(args, cotangents)]


def arguments(capacity=CAPACITY, dtype="float32"):
    """(q, k, v, cached k, cached v) and cotangents of (o, k, v of the state); the cache is empty from LENGTHS on."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, k = draw(BATCH, TIME, HEADS, KEY_DIM), draw(BATCH, TIME, KEY_HEADS, KEY_DIM)
    v = draw(BATCH, TIME, KEY_HEADS, VALUE_DIM)
    cache = draw(BATCH, capacity, KEY_HEADS, KEY_DIM), draw(BATCH, capacity, KEY_HEADS, VALUE_DIM)
    live = (np.arange(capacity) < LENGTHS[:, None])[..., None, None]
    cache = tuple(jnp.where(live, x, 0).astype(dtype) for x in cache)
    cotangents = draw(BATCH, TIME, HEADS, VALUE_DIM), draw(*cache[0].shape), draw(*cache[1].shape)
    return (q, k, v, *cache), cotangents


def nan_at_padding(x, ids):
    return jnp.where((ids == 0)[..., None, None], jnp.nan, x).astype(x.dtype)


def ids_of(ids):
    return None if ids is EVERY else jnp.asarray(ids)


def in_pieces(pieces, ids, q, k, v, cached_k, cached_v):
    """(o, k, v, length) after feeding the tokens in pieces; a row's cache is dropped where its next document begins."""
    cache, outputs, start = KVCache(cached_k, cached_v, jnp.asarray(LENGTHS)), [], 0
    for size in pieces:
        piece = slice(start, start + size)
        for b in range(BATCH):
            before, after = (row[row != 0] for row in (ids[b, :start], ids[b, piece]))
            if before.size and after.size and before[-1] != after[0]:
                cache = cache._replace(length=cache.length.at[b].set(0))
        segment_ids = None if ids is EVERY else jnp.asarray(ids[:, piece])
        tokens = (x[:, piece] for x in (q, k, v))
        o, cache = softmax_attention(*tokens, initial_state=cache, segment_ids=segment_ids)
        outputs.append(o)
        start += size
    return jnp.concatenate(outputs, 1), *cache


def run(f, args, cotangents):
    """Outputs and gradients of f(*args) -> (o, k, v, length), with a cotangent for all but the length."""

    @jax.jit
    def both(args, cotangents):
        out, back, length = jax.vjp(lambda *a: (lambda o, k, v, n: ((o, k, v), n))(*f(*a)), *args, has_aux=True)
        return (*out, *back(cotangents)), length

    return both(args, cotangents)


@pytest.mark.parametrize("ids", [EVERY, IDS], ids=["every", "packed"])
@pytest.mark.parametrize(
    ("pieces", "block"),
    [((7,), 256), ((7,), 3), ((2, 0, 5), 256), ((1,) * 7, 256)],
    ids=["whole", "blocks", "some", "ones"],
)
def test_values_and_gradients_with_a_cache_in_any_pieces(ids, pieces, block, monkeypatch):
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", block)
    args, cotangents = arguments()
    given = (*(nan_at_padding(x, ids) for x in args[:3]), *args[3:])
    cotangents = (nan_at_padding(cotangents[0], ids), *cotangents[1:])
    out, length = run(functools.partial(in_pieces, pieces, ids), given, cotangents)
    wanted = truth(ids is IDS, cached=True)
    assert_close(out[:6], wanted[:6], NAMES[:6], TOLERANCE["float32"])
    live = (np.arange(CAPACITY) < LENGTHS[:, None])[..., None, None]  # empty slots are no input
    assert_close([x * live for x in out[6:]], [x * live for x in wanted[6:]], NAMES[6:], TOLERANCE["float32"])
    for x in (out[0], *out[3:6]):
        assert not np.any(x[ids == 0])
    assert length.tolist() == ([9, 8, 9, 7, 8] if ids is EVERY else [7, 4, 2, 1, 1])
    np.testing.assert_array_equal(np.any(out[1], (2, 3)), np.arange(CAPACITY) < length[:, None])


@pytest.mark.parametrize("ids", [EVERY, IDS], ids=["every", "packed"])
@pytest.mark.parametrize("block", [256, 3])
def test_values_and_gradients_without_a_cache(ids, block, monkeypatch):
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", block)
    args, cotangents = arguments(capacity=TIME)

    def f(q, k, v):
        o, state = softmax_attention(q, k, v, segment_ids=ids_of(ids))
        return o, *state

    given = tuple(nan_at_padding(x, ids) for x in args[:3])
    out, length = run(f, given, (nan_at_padding(cotangents[0], ids), *cotangents[1:]))
    assert_close(out, truth(ids is IDS, cached=False)[:6], NAMES[:6], TOLERANCE["float32"])
    assert not any(np.any(x[ids == 0]) for x in (out[0], *out[3:6]))
    assert length.tolist() == ([7] * 5 if ids is EVERY else [5, 3, 2, 1, 0])


@pytest.mark.parametrize("block", [256, 3])
def test_bfloat16(block, monkeypatch):
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", block)
    args, cotangents = arguments(dtype="bfloat16")
    out, _ = run(functools.partial(in_pieces, (7,), IDS), args, cotangents)
    assert {x.dtype for x in out} == {jnp.dtype("bfloat16")}
    assert_close(out[:6], truth(True, True, "bfloat16")[:6], NAMES[:6], TOLERANCE["bfloat16"])


def test_a_packed_document_equals_the_document_alone_and_rows_do_not_mix():
    args, _ = arguments()
    q, k, v = (x[:2] for x in args[:3])
    op = jax.jit(softmax_attention)
    packed, state = op(q, k, v, segment_ids=jnp.array([[1, 1, 1, 2, 2, 2, 2], [0, 4, 4, 0, 4, 4, 0]]))
    alone, last = op(q[:1, 3:], k[:1, 3:], v[:1, 3:])
    assert_close((packed[:1, 3:], state.k[:1, :4]), (alone, last.k), ("o", "k"), TOLERANCE["float32"])
    real = np.array([1, 2, 4, 5])
    alone, last = op(q[1:, real], k[1:, real], v[1:, real])
    assert_close((packed[1:, real], state.v[1:, :4]), (alone, last.v), ("o", "v"), TOLERANCE["float32"])


def test_decoding_in_a_scan():
    (q, k, v, *_), _ = arguments()
    empty = init_kv_cache(BATCH, CAPACITY, KEY_HEADS, KEY_DIM, VALUE_DIM)
    whole, state = jax.jit(softmax_attention)(q, k, v, initial_state=empty)

    def step(cache, token):
        o, cache = softmax_attention(*(x[:, None] for x in token), initial_state=cache)
        return cache, o[:, 0]

    cache, o = lax.scan(step, empty, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v)))
    assert_close((jnp.moveaxis(o, 0, 1),), (whole,), ("o",), TOLERANCE["float32"])
    jax.tree.map(np.testing.assert_array_equal, cache, state)


def test_a_decoded_token_copies_no_cache():
    cache = init_kv_cache(2, 64, KEY_HEADS, KEY_DIM, VALUE_DIM)
    shapes = (HEADS, KEY_DIM), (KEY_HEADS, KEY_DIM), (KEY_HEADS, VALUE_DIM)
    token = [jnp.zeros((2, 1, *shape)) for shape in shapes]
    jaxpr = jax.make_jaxpr(lambda cache, token: softmax_attention(*token, initial_state=cache))(cache, token)
    large = [e.primitive.name for e in jaxpr.eqns if any(v.aval.ndim == 4 and v.aval.shape[1] >= 64 for v in e.outvars)]
    assert large == ["scatter", "scatter"]


def test_memory_grows_with_time_not_with_its_square():
    def temporary(time):
        q, k = jax.ShapeDtypeStruct((1, time, 4, 8), jnp.float32), jax.ShapeDtypeStruct((1, time, 2, 8), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, time), jnp.int32)
        loss = jax.grad(lambda q, k, v, ids: softmax_attention(q, k, v, segment_ids=ids)[0].sum(), (0, 1, 2))
        return jax.jit(loss).lower(q, k, k, ids).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(1024), temporary(4096)
    assert long < 4.5 * short
    assert long < 4 * 4 * 4096 * 4096 / 2  # half of all scores


def test_large_scores_stay_finite():
    (q, k, v, *cache), _ = arguments()
    cache = KVCache(*cache, jnp.asarray(LENGTHS))
    options = {"initial_state": cache, "segment_ids": jnp.asarray(IDS)}
    slope = jax.jit(jax.grad(lambda q: softmax_attention(q, k, v, **options)[0].sum()))
    assert np.isfinite(slope(1e18 * q)).all()


def test_no_tokens():
    (q, k, v, *cache), _ = arguments()
    cache = KVCache(*cache, jnp.asarray(LENGTHS))
    none = [x[:, :0] for x in (q, k, v)]
    for segment_ids in (None, jnp.zeros((BATCH, 0), int)):
        o, state = softmax_attention(*none, initial_state=cache, segment_ids=segment_ids)
        assert o.shape == (BATCH, 0, HEADS, VALUE_DIM)
        jax.tree.map(np.testing.assert_array_equal, state, cache)
        o, state = softmax_attention(*none, segment_ids=segment_ids)
        assert o.shape == (BATCH, 0, HEADS, VALUE_DIM) and state.v.shape == (BATCH, 0, KEY_HEADS, VALUE_DIM)
        assert state.length.tolist() == [0] * BATCH


def test_a_document_that_outgrows_the_cache():
    (q, k, v, *cache), _ = arguments(capacity=7)
    cache = KVCache(*cache, jnp.asarray(LENGTHS))
    ids = jnp.array([[1] * 7, [1, 1, 1, 1, 1, 1, 2], [0] + [1] * 6, [1] * 7, [1, 1, 1, 1, 1, 1, 0]])
    with pytest.raises(ValueError, match=r"capacity 7, but .* a document grows to 9 tokens .*\[2, 1, 2, 0, 1\]"):
        softmax_attention(q, k, v, initial_state=cache, segment_ids=ids)
    op = jax.jit(lambda q, k, v, cache, ids: softmax_attention(q, k, v, initial_state=cache, segment_ids=ids))
    o, state = op(q, k, v, cache, ids)
    lost = np.zeros((BATCH, TIME), bool)
    lost[0, 5:] = lost[2, 6] = True
    np.testing.assert_array_equal(np.isnan(o), np.broadcast_to(lost[..., None, None], o.shape))
    fits, _ = op(q[:, :5], k[:, :5], v[:, :5], cache, ids[:, :5])
    assert_close((o[:, :5],), (fits,), ("o",), TOLERANCE["float32"])
    assert state.length.tolist() == [9, 1, 8, 7, 7]

    o, state = op(q[:, :2], k[:, :2], v[:, :2], state, jnp.array([[1, 1], [2, 2], [1, 5], [0, 0], [0, 1]]))
    assert np.isnan(o).any((2, 3)).tolist() == [[1, 1], [0, 0], [1, 0], [0, 0], [0, 1]]
    assert state.length.tolist() == [11, 3, 1, 7, 8]
    assert np.isfinite(state.k).all() and np.isfinite(state.v).all()


def test_implementations(monkeypatch):
    (q, k, v, *_), _ = arguments(dtype="bfloat16")
    chunked, _ = softmax_attention(q, k, v, implementation="chunked")
    monkeypatch.setattr(attention_file, "on_gpu", lambda: True)  # and no cuDNN: "auto" moves on
    np.testing.assert_array_equal(softmax_attention(q, k, v)[0], chunked)
    for name in ("pallas", "triton"):
        with pytest.raises(NotImplementedError, match="softmax_attention"):
            softmax_attention(q, k, v, implementation=name)
    with pytest.raises(ValueError, match="implementation: 'cudnn' is not known"):
        softmax_attention(q, k, v, implementation="cudnn")


@pytest.mark.parametrize(
    ("shape", "dtype", "document", "cached", "reason"),
    [
        ((2, 7, 4, 8), "float32", False, False, "16-bit"),
        ((2, 7, 4, 12), "bfloat16", False, False, "multiple of 8"),
        ((2, 7, 4, 136), "bfloat16", False, False, "<= 128"),
        ((1, 7, 4, 8), "bfloat16", True, False, "segment_ids"),
        ((1, 7, 4, 8), "bfloat16", False, True, "cache"),
    ],
)
def test_cudnn_declines(shape, dtype, document, cached, reason):
    x = jnp.zeros(shape, dtype)
    cache = init_kv_cache(shape[0], 9, 4, shape[3], shape[3]) if cached else None
    with pytest.raises(NotImplementedError, match=reason):
        attention_file.cudnn(x, x, x, jnp.zeros(shape[:2], int) if document else None, cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((2, 7, 5, 4))}, "heads: H=5 .* G=2"),
        ({"k": jnp.zeros((2, 7, 2, 3))}, "k: shape .* K .* 3 here but 4 in q"),
        ({"v": jnp.zeros((2, 7, 6, 5))}, "v: shape .* G .* 6 here but 2 in k"),
        ({"v": jnp.zeros((2, 7, 2, 5), int)}, "v: dtype int32"),
        ({"segment_ids": jnp.zeros((2, 8), int)}, "segment_ids: shape"),
        ({"initial_state": init_kv_cache(2, 6, 2, 4, 5)}, "initial_state: capacity 6 is less than the 7 tokens"),
        ({"initial_state": jnp.zeros((2, 7, 2, 4))}, "initial_state: a .* is no KVCache; begin with"),
        ({"initial_state": init_kv_cache(3, 9, 2, 4, 5)}, "initial_state.k: shape .* B .* 3 here but 2"),
        ({"initial_state": init_kv_cache(2, 9, 2, 4, 6)}, "initial_state.v: shape .* V .* 6 here but 5"),
        (
            {"initial_state": init_kv_cache(2, 9, 2, 4, 5)._replace(length=jnp.zeros(2))},
            "initial_state.length: dtype float32",
        ),
    ],
)
def test_wrong_input(unchecked, change, message):
    given = {"q": jnp.zeros((2, 7, 6, 4)), "k": jnp.zeros((2, 7, 2, 4)), "v": jnp.zeros((2, 7, 2, 5)), **change}
    with pytest.raises(ValueError, match=message):
        softmax_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_a_wrong_implementation_is_named_where_there_is_no_token():
    x = jnp.zeros((2, 0, 2, 4))
    for op, arguments in ((softmax_attention, (x, x, x)), (block_sparse_attention, (x, x, x, jnp.zeros((2, 0, 1))))):
        with pytest.raises(ValueError, match=f"implementation: 'chunky' is not known to {op.__name__}; choose one of"):
            op(*arguments, implementation="chunky")
        for implementation in ("auto", "chunked", "pallas", "triton"):
            assert op(*arguments, implementation=implementation)[0].shape == x.shape


def test_rope_is_a_complex_rotation():
    rng = np.random.default_rng(3)
    x, positions = rng.normal(size=(2, 5, 3, 8)).astype(np.float32), rng.integers(0, 500, (2, 5))
    angle = positions[:, :, None, None] * 10000.0 ** (-np.arange(4) / 4)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)
    got = apply_rope(jnp.asarray(x), jnp.asarray(positions))
    # An angle of 500 radians is known to 3e-5 in float32.
    assert_close((got,), (np.concatenate([turned.real, turned.imag], -1),), ("x",), 5e-5)
    assert_close((apply_rope(got, -jnp.asarray(positions)),), (x,), ("x",), TOLERANCE["float32"])
    assert apply_rope(jnp.asarray(x, jnp.bfloat16), jnp.asarray(positions)).dtype == jnp.bfloat16


def test_rope_scores_depend_on_distances_only():
    q, k = (jnp.asarray(np.random.default_rng(seed).normal(size=(1, 4, 1, 6)), jnp.float32) for seed in (4, 5))
    at = jnp.array([[0, 3, 4, 11]])

    def scores(shift, base=100.0):
        return jnp.einsum("bthk,bshk->ts", apply_rope(q, at + shift, base), apply_rope(k, at + shift, base))

    assert_close((scores(70),), (scores(0),), ("scores",), TOLERANCE["float32"])
    assert not np.allclose(scores(0), scores(0, base=10000.0), atol=1e-2)


def test_rope_wrong_input(unchecked):
    x, positions = jnp.zeros((2, 5, 3, 4)), jnp.zeros((2, 5), int)
    for args, message in (
        ((x[..., :3], positions), "x: .* odd K"),
        ((x, positions[:, :4]), "positions: shape"),
        ((x, positions * 1.0), "positions: dtype float32"),
        ((x, positions, 0.0), "base: 0.0 is not positive"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_rope(*args)


def mixer_and_parameters(**fields):
    mixer = Attention(**{"width": 10, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "max_length": 9, **fields})
    return mixer, jax.jit(mixer.init)(jax.random.key(0), jnp.zeros((1, 1, mixer.width)))


def mix(mixer, pieces, ids, fresh, params, x):
    """(y, cache) after feeding x in pieces, from cache=None or from init_cache."""
    cache, outputs, start = None if fresh else mixer.init_cache(x.shape[0]), [], 0
    for size in pieces:
        piece = slice(start, start + size)
        y, cache = mixer.apply(params, x[:, piece], None if ids is None else jnp.asarray(ids[:, piece]), cache)
        outputs.append(y)
        start += size
    return jnp.concatenate(outputs, 1), cache


@pytest.mark.parametrize("ids", [None, IDS], ids=["every", "packed"])
def test_the_mixer_in_any_pieces(ids):
    mixer, params = mixer_and_parameters(qk_norm=ids is not None)
    x = jax.random.normal(jax.random.key(1), (5, 7, 10))
    x = x if ids is None else jnp.where((ids == 0)[..., None], jnp.nan, x)
    weight = jax.random.normal(jax.random.key(2), x.shape)

    def loss(pieces, fresh, params, x):
        y, cache = mix(mixer, pieces, ids, fresh, params, x)
        return jnp.sum(y * weight) + jnp.sum(jnp.sin(cache.kv.k)) + jnp.sum(jnp.cos(cache.kv.v)), (y, cache)

    def everything(pieces, fresh):
        slope = jax.value_and_grad(functools.partial(loss, pieces, fresh), (0, 1), has_aux=True)
        (_, (y, cache)), slopes = jax.jit(slope)(params, x)
        return jax.tree.leaves((y, cache, slopes)), cache, slopes[1]

    whole, cache, slope = everything((7,), True)
    for pieces, fresh in (((3, 0, 2, 2), True), ((1, 6), False)):
        got, after, _ = everything(pieces, fresh)
        assert_close(got, whole, [str(i) for i in range(len(whole))], TOLERANCE["float32"])
        assert jax.tree.structure(after) == jax.tree.structure(cache)
    if ids is not None:
        assert not np.any(np.asarray(slope)[ids == 0])
        assert cache.kv.length.tolist() == [5, 3, 2, 1, 0] and cache.segment.tolist() == [3, 5, 3, 1, 0]


def test_a_packed_document_equals_the_document_alone_in_the_mixer():
    mixer, params = mixer_and_parameters(num_kv_heads=None)
    apply, x = jax.jit(mixer.apply), jax.random.normal(jax.random.key(1), (1, 7, 10))
    y, cache = apply(params, x, jnp.array([[4, 4, 4, 5, 5, 5, 5]]))
    alone, after = apply(params, x[:, 3:])
    assert_close((y[:, 3:], cache.kv.k), (alone, after.kv.k), ("y", "k"), TOLERANCE["float32"])
    y, _ = apply(params, x[:, :3], jnp.array([[6, 6, 6]]), cache)  # another document
    alone, _ = apply(params, x[:, :3])
    assert_close((y,), (alone,), ("y",), TOLERANCE["float32"])


def test_positions_of_the_mixer():
    x = jnp.tile(jax.random.normal(jax.random.key(1), (1, 2, 10)), (1, 2, 1))
    for fields, differ in (({"rope_base": 0.0}, False), ({}, True)):
        mixer, params = mixer_and_parameters(**fields)
        y, _ = jax.jit(mixer.apply)(params, jnp.take(x, jnp.array([0, 1, 2, 1]), axis=1))
        swapped, _ = jax.jit(mixer.apply)(params, jnp.take(x, jnp.array([1, 0, 2, 1]), axis=1))
        assert (np.abs(y[:, 3] - swapped[:, 3]).max() > 1e-3) == differ  # the order of the past, seen or not


def test_the_cache_of_the_mixer():
    mixer, params = mixer_and_parameters(dtype="bfloat16")
    x = jnp.ones((2, 3, 10))
    cache = mixer.init_cache(2)
    apply = jax.jit(mixer.apply)
    y, after = apply(params, x, None, cache)
    assert y.dtype == after.kv.k.dtype == jnp.bfloat16
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert set(params["params"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert after.segment.tolist() == [1, 1] and mixer.init_cache(2, max_length=21).kv.v.shape == (2, 21, 2, 6)
    for time, capacity in ((8, 9), (9, 18), (12, 21)):  # a cache can always be continued
        y, long = apply(params, jnp.ones((2, time, 10)))
        assert long.kv.k.shape[1] == capacity
        assert np.isfinite(apply(params, jnp.ones((2, 1, 10)), None, long)[0]).all()
    for ids in (None, jnp.zeros((2, 0), int)):
        y, still = apply(params, x[:, :0], ids, after)
        assert y.shape == (2, 0, 10) and still.kv.length.tolist() == [3, 3]
        assert apply(params, x[:, :0], ids)[1].kv.k.shape == (2, 9, 2, 6)
    with pytest.raises(ValueError, match="max_length"):
        mixer.apply(params, jnp.ones((2, 7, 10)), None, after)


def test_training_pays_for_no_cache():
    def temporary(max_length):
        mixer, params = mixer_and_parameters(max_length=max_length)
        loss = jax.grad(lambda params, x: mixer.apply(params, x)[0].sum())
        return jax.jit(loss).lower(params, jnp.ones((2, 8, 10))).compile().memory_analysis().temp_size_in_bytes

    assert temporary(1 << 20) == temporary(8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 10, "num_heads": 4}, "width: 10 is not divisible"),
        ({"width": 8, "num_heads": 4, "num_kv_heads": 3}, "heads: H=4 .* G=3"),
        ({"width": 12, "num_heads": 4}, "rope_base: .* head_dim=3"),
        ({"width": 8, "num_heads": 2, "rope_base": -1.0}, "rope_base: -1.0"),
        ({"width": 8, "num_heads": 2, "max_length": 0}, "max_length: 0"),
    ],
)
def test_wrong_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        Attention(**fields)
