"""Every mixer: pieces, documents, padding, caches, against blocks written out in numpy; identities between mixers."""

import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from efla_jax.layers import MIXERS, Reading, Spread, signals
from efla_jax.layers.cache import RecurrentCache, carry_on, continues
from efla_jax.layers.initializers import softplus_inverse
from efla_jax.layers.nats_l import NATSLCache
from efla_jax.model import LanguageModel
from efla_jax.ops import FenwickState
from tests.oracle import relative_rms

WIDTH, BATCH, TIME, ROOM = 16, 2, 21, 48
OPTIONS = {name: {"width": WIDTH, "num_heads": 2} for name in MIXERS}
LOG_LINEAR = tuple(name for name in MIXERS if name.startswith("log_linear"))
for name in ("mamba2", "log_linear_mamba2"):
    OPTIONS[name]["state_dim"] = 8
OPTIONS["nats_l"]["chunk_size"] = 16  # documents of 21 tokens fill one up
for name in LOG_LINEAR:  # four levels: documents of 21 tokens pass the last one
    OPTIONS[name]["levels"] = 4
DELTA = ("delta_net", "efla", "gated_delta_net", "gated_efla")
# One of each operator, flat and with levels, is compiled a chunk at a time where gradients are asked for: tests of the
# operators have every one of them so, and the recurrence is what compiles soon.
CHUNKED = ("gated_efla", "log_linear_mamba2")
DECAYING = ("gated_delta_net", "gated_efla", "mamba2", "log_linear_mamba2", "log_linear_gated_delta_net", "nats_l")

# Float32 against float32: another order of the same sums through norm, gate and projection, at most 21 tokens deep.
CLOSE = 2e-5


def make(name, **options):
    return MIXERS[name](**{**OPTIONS[name], **options})


def make_quickly(name):
    return make(name, **({} if name in ("attention", "gated_conv", *CHUNKED) else {"implementation": "recurrent"}))


def fresh(mixer, batch=BATCH):
    grows = "max_length" in inspect.signature(mixer.init_cache).parameters
    return mixer.init_cache(batch, **({"max_length": ROOM} if grows else {}))


def started(mixer):
    """A fresh cache whose recurrent parts hold something, as a learned or handed-over initial state would."""
    cache = fresh(mixer)
    rng = np.random.default_rng(6)
    if isinstance(cache, NATSLCache):  # rows that stand at 29 and 38: of one and two chunks, 1 and 2 pages are in use
        drawn = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), cache)
        position, owner = jnp.asarray([29, 38], jnp.int32), jnp.asarray([[1] * 6, [0, 1] * 3], jnp.int32)
        counts = {"owner": owner, "weight": jnp.ones((BATCH, 6)), "pages": jnp.asarray([1, 2], jnp.int32)}
        kv, state = drawn.kv._replace(**counts, position=position), drawn.state._replace(position=position)
        return drawn._replace(kv=kv, state=state, segment=cache.segment)
    if not isinstance(cache, RecurrentCache):
        return cache
    conv, state = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), (cache.conv, cache.state))
    if isinstance(state, FenwickState):  # rows that stand at 6 and 5, where those levels are live that their bits say
        live = jnp.asarray([[0, 0, 1, 1], [0, 1, 0, 1]], jnp.float32)
        state = FenwickState(live[:, None, :, None, None] * state.states, jnp.asarray([6, 5], jnp.int32))
    return cache._replace(conv=conv, state=state)


def in_use(cache):
    """The cache with zeros where nats_l keeps what nothing reads: behind the open chunk's tokens and the last page."""
    if not isinstance(cache, NATSLCache):
        return cache
    kv = cache.kv
    some = {
        name: jax.vmap(lambda x, n: jnp.where(jnp.arange(len(x)).reshape(-1, *(1,) * (x.ndim - 1)) < n, x, 0))(x, n)
        for names, n in (("k v owner weight", kv.pages), ("open_k open_v", kv.position % 16))
        for name, x in ((name, getattr(kv, name)) for name in names.split())
    }
    return cache._replace(kv=kv._replace(**some))


def inputs(time=TIME, batch=BATCH, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, time, WIDTH)), jnp.float32)


@functools.cache
def parameters(name, **options):
    params = jax.jit(make(name, **options).init)(jax.random.key(1), inputs(4))
    # Not as initialised: norms that are all one, and equal rates, would hide an axis mixed up.
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape).astype(np.float32), params)


@functools.cache
def applied(name):
    return jax.jit(make(name).apply)


def tree_close(ours, theirs, tolerance=CLOSE):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert relative_rms(a, b) <= tolerance, f"{jax.tree_util.keystr(path)}: {relative_rms(a, b):.1e}"


# ids of two rows: documents of 1, 2 and many tokens; padding in front, inside a document, between documents, behind
IDS = np.array(
    [
        [0, 1, 1, 0, 1, 2, 3, 3, 0, 0, 4, 4, 4, 4, 4, 0, 4, 4, 4, 4, 4],
        [5, 5, 5, 5, 5, 5, 5, 5, 0, 5, 5, 5, 7, 0, 9, 9, 9, 9, 9, 0, 0],
    ],
    np.int32,
)


# In pieces these differ from one beside them in coefficients only, which are pointwise in time.
ALIKE = ("delta_net", "gated_delta_net", "log_linear_efla")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in MIXERS]
)
def test_pieces_of_any_length_are_one_pass_with_gradients(name):
    """A prefill, then a scan over pieces of fewer tokens than the convolution has taps: outputs, cache and every
    gradient, the initial cache's included, are those of one pass."""
    mixer, params, x, ids = make_quickly(name), parameters(name), inputs(), jnp.asarray(IDS)
    weight = inputs(seed=3)
    prefill, some_tokens = (9, 2) if name != "nats_l" else (0, 3)  # one program less of the largest

    def one_pass(params, x, cache):
        return mixer.apply(params, x, ids, cache)

    def pieces(params, x, cache):
        def some(cache, now):
            y, cache = mixer.apply(params, *now, cache)
            return cache, y

        outputs = []
        if prefill:
            cache, y = some(cache, (x[:, :prefill], ids[:, :prefill]))
            outputs.append(y)
        rest = (a[:, prefill:].reshape(BATCH, -1, some_tokens, *a.shape[2:]) for a in (x, ids))
        cache, later = jax.lax.scan(some, cache, tuple(jnp.moveaxis(a, 1, 0) for a in rest))
        return jnp.concatenate([*outputs, *later], axis=1), cache

    def floating(tree):
        return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def results(run):
        def total(params, x, cache):
            y, after = run(params, x, cache)
            after = in_use(after)
            return jnp.sum(y * weight) + sum(jnp.sum(jnp.sin(leaf)) for leaf in floating(after)), (y, after)

        grad = jax.grad(total, argnums=(0, 1, 2), has_aux=True, allow_int=True)
        return jax.jit(grad)(params, x, started(mixer))

    whole_gradients, whole = results(one_pass)
    gradients, after = results(pieces)
    tree_close(after, whole)
    tree_close(floating(gradients), floating(whole_gradients), 10 * CLOSE)  # sums of 42 tokens' terms of either sign


@pytest.mark.parametrize("name", MIXERS)
def test_without_ids_every_token_goes_on_with_the_cached_document(name):
    params, x = parameters(name), inputs()
    y, cache = applied(name)(params, x, jnp.ones((BATCH, TIME), jnp.int32), fresh(make(name)))
    y_plain, cache_plain = applied(name)(params, x, None, fresh(make(name)))
    tree_close((y_plain, in_use(cache_plain)), (y, in_use(cache)))
    y_alone, _ = applied(name)(params, x)
    assert relative_rms(y_alone, y) <= CLOSE


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_structure_shapes_and_dtypes_of_the_cache_never_change(name, dtype):
    mixer = make(name, dtype=dtype)
    cache = fresh(mixer)
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), cache)
    calls = ((1, False), (20, True), (0, True), (3, True), (20, False))
    for time, with_ids in calls if dtype == "bfloat16" else calls[:2]:  # in float32 a wrong dtype seldom shows
        ids = jnp.ones((BATCH, time), jnp.int32) if with_ids else None
        y, after = jax.eval_shape(mixer.apply, parameters(name), inputs(time), ids, cache)
        assert (y.shape, y.dtype) == ((BATCH, time, WIDTH), jnp.dtype(dtype))
        assert jax.tree.structure(after) == jax.tree.structure(cache)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == shapes
    if name != "attention":
        assert jax.tree.leaves(cache.state)[0].dtype == jnp.float32


@pytest.mark.parametrize("name", MIXERS)
def test_decoding_is_a_scan_and_no_tokens_change_nothing(name):
    mixer, params, x = make(name), parameters(name), inputs()

    @jax.jit
    def decode(params, x, cache):
        def step(cache, token):
            y, cache = mixer.apply(params, token[:, None], None, cache)
            return cache, y[:, 0]

        cache, y = jax.lax.scan(step, cache, jnp.moveaxis(x, 1, 0))
        return jnp.moveaxis(y, 0, 1), cache

    whole = applied(name)(params, x, None, fresh(mixer))
    y, after = decode(params, x, fresh(mixer))
    tree_close((y, in_use(after)), (whole[0], in_use(whole[1])))
    y, after = applied(name)(params, x[:, :0], None, whole[1])
    assert y.shape == (BATCH, 0, WIDTH)
    tree_close(after, whole[1], 0.0)


@pytest.mark.parametrize("name", MIXERS)
def test_packed_and_padded_documents_equal_documents_alone(name):
    """Three documents of five tokens in one row with padding everywhere that holds NaN: outputs, gradients, and exactly
    nothing at the padding."""
    mixer, params = make_quickly(name), parameters(name)
    ids = jnp.asarray([[0, 1, 1, 1, 1, 1, 0, 2, 2, 0, 2, 2, 2, 3, 3, 0, 3, 3, 3, 0, 0]], jnp.int32)
    real = np.asarray(ids[0] != 0)
    x, weight = inputs(batch=1), inputs(batch=1, seed=4)
    garbage = jnp.where(jnp.asarray(real)[None, :, None], x, jnp.nan)

    @jax.jit
    def slopes(params, x, weight, ids):
        def total(params, x):
            y, _ = mixer.apply(params, x, ids)
            return jnp.sum(y * weight), y

        return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(params, x)

    (_, y), (by_params, by_x) = slopes(params, garbage, weight, ids)
    assert not np.any(np.asarray(y)[0, ~real])
    assert not np.any(np.asarray(by_x)[0, ~real])
    summed = jax.tree.map(jnp.zeros_like, params)
    for document in (1, 2, 3):
        at = np.flatnonzero(np.asarray(ids[0]) == document)
        (_, y_alone), (alone_params, alone_x) = slopes(params, x[:, at], weight[:, at], None)
        tree_close((y[:, at], by_x[:, at]), (y_alone, alone_x))
        summed = jax.tree.map(jnp.add, summed, alone_params)
    tree_close(by_params, summed)


@pytest.mark.parametrize("name", MIXERS)
def test_where_padding_stands_and_who_else_is_in_the_batch_do_not_matter(name):
    params, cut = parameters(name), 8
    x = inputs()
    row = np.asarray(x[0, :cut])
    places = {"left": np.arange(TIME - cut, TIME), "right": np.arange(cut), "inside": np.r_[0, 1, 4, 6, 7, 12, 13, 18]}
    results = []
    for seed, at in enumerate(places.values()):
        padded = np.array(inputs(seed=seed + 10))  # garbage, and another row below each time
        ids = np.zeros((BATCH, TIME), np.int32)
        padded[0, at], ids[0, at], ids[1] = row, 1, 1
        y, cache = applied(name)(params, jnp.asarray(padded), jnp.asarray(ids), fresh(make(name)))
        results.append((y[0, at], jax.tree.map(lambda leaf: leaf[0], in_use(cache))))
        swapped, _ = applied(name)(params, jnp.asarray(padded[::-1]), jnp.asarray(ids[::-1]), fresh(make(name)))
        assert relative_rms(swapped[1], y[0]) <= CLOSE
    for other in results[1:]:
        tree_close(other, results[0])


@pytest.mark.parametrize("name", MIXERS)
def test_a_call_that_begins_another_document_drops_the_old_state(name):
    """Row 0 goes on with document 1, row 1 begins document 2; and a row of padding keeps what it had."""
    params, first, then = parameters(name), inputs(), inputs(seed=5)
    run, none = applied(name), fresh(make(name))
    _, cache = run(params, first, jnp.ones((BATCH, TIME), jnp.int32), none)
    ids = jnp.asarray([[1] * TIME, [2] * TIME], jnp.int32)
    y, after = run(params, then, ids, cache)
    on, on_cache = run(params, then, None, cache)
    begun, begun_cache = run(params, then, ids, none)
    after, on_cache, begun_cache = map(in_use, (after, on_cache, begun_cache))
    tree_close((y[0], jax.tree.map(lambda a: a[0], after)), (on[0], jax.tree.map(lambda a: a[0], on_cache)))
    tree_close((y[1], jax.tree.map(lambda a: a[1], after)), (begun[1], jax.tree.map(lambda a: a[1], begun_cache)))
    assert relative_rms(on[1], begun[1]) > 1e-2  # the old document would have shown
    y, kept = run(params, then, jnp.zeros((BATCH, TIME), jnp.int32), cache)
    assert not np.any(y)
    tree_close(kept, cache, 0.0)


def test_continues_and_carry_on():
    ids = jnp.asarray([[0, 2, 2], [0, 1, 0], [0, 0, 2], [0, 0, 0], [3, 4, 5]], jnp.int32)
    keep, segment = continues(jnp.asarray([0, 1, 1, 2, 3], jnp.int32), ids, 3)
    assert keep.tolist() == [True, True, False, True, True]
    assert segment.tolist() == [2, 1, 2, 2, 5]
    keep, segment = continues(jnp.asarray([0, 4], jnp.int32), None, 2)
    assert keep.tolist() == [True, True] and segment.tolist() == [1, 4]
    keep, segment = continues(jnp.asarray([0, 4], jnp.int32), None, 0)  # nothing seen: a fresh row stays fresh
    assert keep.tolist() == [True, True] and segment.tolist() == [0, 4]
    left = carry_on(jnp.asarray([True, False]), (jnp.ones((2, 3)), jnp.full((2,), jnp.nan)))
    assert left[0].tolist() == [[1, 1, 1], [0, 0, 0]] and left[1][1] == 0


# The blocks once more, in float64 numpy, token by token and head by head.


def silu(x):
    return x / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(x, 0)


def normed(x, scale, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def convolved(x, weight, bias=0.0):
    taps = len(weight)
    x = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    return silu(sum(weight[j] * x[j : len(x) - taps + 1 + j] for j in range(taps)) + bias)


def delta_block(p, x, name, heads=2):
    """One row x [T, D] through the mixer `name` with the parameters p."""
    q, k, v = (convolved(x @ p[f"{n}_proj"]["kernel"], p[f"{n}_conv"]["weight"]) for n in "qkv")
    beta = 1 / (1 + np.exp(-x @ p["b_proj"]["kernel"]))
    g = np.zeros_like(beta)
    if name.startswith("gated"):
        g = -np.exp(p["A_log"]) * softplus(x @ p["a_proj"]["kernel"] + p["dt_bias"])
    split = (np.split(a, heads, axis=-1) for a in (q, k, v))
    rows = []
    for h, (queries, keys, values) in enumerate(zip(*split, strict=True)):
        state, out = np.zeros((keys.shape[1], values.shape[1])), []
        for t, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
            kappa, b, decay = k @ k, beta[t, h], np.exp(g[t, h])
            if name == "efla":
                erase = write = (1 - np.exp(-b * kappa)) / kappa
            elif name == "gated_efla":
                eta = (1 - decay) + decay * b * kappa
                erase, write = (1 - np.exp(-decay * b * kappa)) / kappa, b * (1 - np.exp(-eta)) / eta
                decay = np.exp(decay - 1)
            else:
                erase, write = b / kappa, b / np.sqrt(kappa)
            state = decay * (state - erase * np.outer(k, k @ state)) + write * np.outer(k, v)
            out.append(state.T @ q / np.linalg.norm(q))
        rows.append(normed(np.stack(out), p["o_norm"]["scale"], 1e-6))
    o = np.concatenate(rows, axis=-1)
    if name.startswith("gated"):
        o = o * silu(x @ p["g_proj"]["kernel"])
    return o @ p["o_proj"]["kernel"]


def mamba_block(p, x, heads=2, state_dim=8):
    """The fused form that published checkpoints hold: one projection and one convolution."""
    inner = 2 * WIDTH
    in_proj = np.concatenate([p[f"{name}_proj"]["kernel"] for name in ("z", "x", "B", "C", "dt")], axis=1)
    conv, bias = (np.concatenate([p[f"{name}_conv"][leaf] for name in "xBC"], axis=-1) for leaf in ("weight", "bias"))
    z, mixed, dt = np.split(x @ in_proj, [inner, 2 * inner + 2 * state_dim], axis=-1)
    values, b, c = np.split(convolved(mixed, conv, bias), [inner, inner + state_dim], axis=-1)
    dt = softplus(dt + p["dt_bias"])
    rows = []
    for h, v in enumerate(np.split(values, heads, axis=-1)):
        state, out = np.zeros((state_dim, v.shape[1])), []
        for t in range(len(x)):
            state = np.exp(-dt[t, h] * np.exp(p["A_log"][h])) * state + np.outer(b[t], dt[t, h] * v[t])
            out.append(state.T @ c[t] + p["D"][h] * v[t])
        rows.append(np.stack(out))
    o = np.concatenate(rows, axis=-1) * silu(z)
    return normed(o, p["norm"]["scale"], 1e-5) @ p["out_proj"]["kernel"]


@pytest.mark.parametrize("name", [*DELTA, "mamba2"])
def test_block_against_numpy(name):
    params, x = parameters(name), inputs()
    y, _ = applied(name)(params, x)
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), params)["params"]
    block = mamba_block if name == "mamba2" else functools.partial(delta_block, name=name)
    for row in range(BATCH):
        assert relative_rms(y[row], block(wide, np.asarray(x[row], np.float64))) <= CLOSE


@pytest.mark.parametrize("name", MIXERS)
def test_parameters_are_float32_and_products_may_be_bfloat16(name):
    mixer, params = make(name, dtype="bfloat16"), parameters(name)
    initial = jax.eval_shape(mixer.init, jax.random.key(0), inputs(4).astype(jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(initial)} == {jnp.dtype(jnp.float32)}
    y, cache = jax.jit(mixer.apply)(params, inputs())
    assert y.dtype == jnp.bfloat16
    # bfloat16 rounds each of about eight tensors on the way to 8 bits
    assert relative_rms(y, applied(name)(params, inputs())[0]) <= 3e-2
    named = {"A_log", "dt_bias", "D"} & set(initial["params"])
    assert named == ({"A_log", "dt_bias"} if name in DECAYING else set()) | ({"D"} if "mamba2" in name else set())


@pytest.mark.parametrize("name", ["attention", "efla", "mamba2", "log_linear_gated_delta_net"])
def test_as_an_nnx_module(name):
    params, x = parameters(name), inputs()
    wrapped = nnx.bridge.ToNNX(make(name), rngs=nnx.Rngs(0)).lazy_init(x)
    for path, leaf in jax.tree.leaves_with_path(params["params"]):
        *parents, last = (key.key for key in path)
        node = functools.reduce(lambda at, key: at[key] if isinstance(at, dict) else getattr(at, key), parents, wrapped)
        variable = node[last] if isinstance(node, dict) else getattr(node, last)
        variable.set_value(leaf)
    y = nnx.jit(lambda module, x: module(x)[0])(wrapped, x)
    assert relative_rms(y, applied(name)(params, x)[0]) <= CLOSE


@pytest.mark.parametrize("name", DECAYING)
def test_decay_parameters_begin_where_the_papers_say(name):
    mixer = make(name, num_heads=64, head_dim=2)
    p = jax.jit(mixer.init)(jax.random.key(7), inputs(2))["params"]
    rate, dt = np.exp(p["A_log"]), np.asarray(softplus(p["dt_bias"]))
    low = 1.0 if "mamba2" in name else 0.0
    assert low <= rate.min() < low + 1 and 15 < rate.max() <= 16 and abs(rate.mean() - (16 + low) / 2) < 2
    assert 1e-3 <= dt.min() * (1 + 1e-5) < 2e-3 and 0.07 < dt.max() <= 0.1 * (1 + 1e-5)
    assert abs(np.log(dt).mean() - np.log(1e-2)) < 0.4  # log-uniform in [1e-3, 0.1]


def test_softplus_inverse_keeps_its_digits():
    y = np.float32([1e-4, 1e-3, 0.1, 1.0, 20.0, 100.0])
    np.testing.assert_allclose(nn.softplus(softplus_inverse(jnp.asarray(y))), y, rtol=1e-6)
    np.testing.assert_allclose(softplus_inverse(jnp.float32(1e-3)), np.log(np.expm1(1e-3)), rtol=1e-6)


def with_decay_off(params):
    return {"params": {**params["params"], "A_log": jnp.full((2,), -jnp.inf)}}


IDENTITIES = {
    "EFLA with softplus_unit is DeltaNet": (("efla", {"step": "softplus_unit"}), ("delta_net", {}), lambda p: p),
    "Gated DeltaNet without decay is DeltaNet": (
        ("gated_delta_net", {}), ("delta_net", {"expand_v": 2.0, "output_gate": True}), with_decay_off,
    ),
    "Gated EFLA without decay is EFLA": (
        ("gated_efla", {}), ("efla", {"expand_v": 2.0, "output_gate": True}), with_decay_off,
    ),
    "split Gated EFLA without decay is EFLA": (
        ("gated_efla", {"step": "split"}), ("efla", {"expand_v": 2.0, "output_gate": True}), with_decay_off,
    ),
    "normalised EFLA is Gated EFLA with unit keys and no decay": (
        ("gated_efla", {"normalize_keys": True}),
        ("efla", {"step": "normalized", "expand_v": 2.0, "output_gate": True}), with_decay_off,
    ),
    "one key head is shared": (("efla", {"num_key_heads": 1, "head_dim": 8}), ("efla", {}), lambda p: p),
}  # fmt: skip


@pytest.mark.identity
@pytest.mark.parametrize("case", IDENTITIES)
def test_identities_between_mixers(case):
    (name, options), (other, other_options), change = IDENTITIES[case]
    x = inputs()
    params = change(jax.jit(make(name, **options).init)(jax.random.key(3), x))
    theirs = {"params": dict(params["params"])}
    if options.get("num_key_heads") == 1:  # repeat the only key head for the mixer that has two
        for part, leaf in (("q_proj", "kernel"), ("k_proj", "kernel"), ("q_conv", "weight"), ("k_conv", "weight")):
            theirs["params"][part] = {leaf: jnp.tile(params["params"][part][leaf], 2)}
    if name.startswith("gated"):
        for part in ("A_log", "dt_bias", "a_proj"):
            del theirs["params"][part]
    y, _ = jax.jit(make(name, **options).apply)(params, x)
    y_other, _ = jax.jit(make(other, **other_options).apply)(theirs, x)
    assert relative_rms(y, y_other) <= CLOSE


@functools.partial(jax.jit, static_argnums=0)
def readings(mixer, params, x, ids=None):
    _, state = mixer.apply(
        params, x, ids, capture_intermediates=lambda module, _: isinstance(module, Reading), mutable="intermediates"
    )
    return {name: value["__call__"][0] for name, value in state["intermediates"].items()}


def test_readings_are_of_real_tokens_with_gradients():
    mixer, params, x = make("efla", beta_bias=0.5), parameters("efla", beta_bias=0.5), inputs()
    told = readings(mixer, params, x, jnp.asarray(IDS))
    assert set(told) == {"key_norm", "stiffness", "erase"}
    assert all(value.shape == (2,) for spread in told.values() for value in spread)
    assert np.all(told["erase"].low > 0) and np.all(told["erase"].largest < 1)
    padded = jnp.concatenate([x[:1, :5], 100 * x[:1, 5:9]], axis=1), jnp.asarray([[1] * 5 + [0] * 4], jnp.int32)
    for name in ("efla", "gated_delta_net", "mamba2"):
        alone = readings(make(name), parameters(name), x[:1, :5])
        tree_close(readings(make(name), parameters(name), *padded), alone)
    gradient = jax.grad(lambda p: jnp.sum(readings(mixer, p, x)["stiffness"].mean))(params)["params"]
    assert np.any(gradient["k_proj"]["kernel"]) and np.any(gradient["b_bias"])
    assert not np.any(gradient["q_proj"]["kernel"])
    rest = jax.grad(lambda p: sum(jnp.sum(value) for value in readings(mixer, p, x)["stiffness"][1:]))(params)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(rest))
    assert set(readings(make("gated_efla"), parameters("gated_efla"), x)) == {"key_norm", "stiffness", "erase", "decay"}


def spread_of(quantity, ids=None):
    """The Spread of quantity [B, T, H] in numpy."""
    real = np.ones(quantity.shape[:2], bool) if ids is None else ids != 0
    rows = np.asarray(quantity, np.float64)[real]
    return Spread(rows.mean(0), *np.quantile(rows, (0.05, 0.5, 0.95), axis=0), rows.max(0))


def test_a_reading_is_the_spread_over_real_tokens():
    read = jax.jit(Reading().apply)
    quantity = np.random.default_rng(8).lognormal(size=(BATCH, TIME, 3)).astype(np.float32)
    for ids in (None, IDS, np.where(IDS == 5, 5, 0)):
        garbage = quantity if ids is None else np.where(ids[..., None] != 0, quantity, np.nan)
        np.testing.assert_allclose(np.stack(read({}, garbage, ids)), np.stack(spread_of(quantity, ids)), rtol=1e-5)
    assert not np.any(np.stack(read({}, quantity, np.zeros_like(IDS))))
    assert not np.any(np.stack(read({}, quantity[:, :0], None)))


def test_quantiles_of_many_tokens_are_those_of_every_odd_th():
    """2 * 6000 tokens are three times what quantiles are taken from. Even and odd tokens differ, as keys and values of
    a recall task would: an even stride would see one kind only. The largest value stands where no sample is."""
    quantity = np.random.default_rng(9).uniform(size=(2, 6000, 1)).astype(np.float32)
    quantity[:, ::2] += 10
    quantity[0, 1] = 30
    told, truth = jax.jit(Reading().apply)({}, quantity, None), spread_of(quantity)
    assert told.largest == 30
    np.testing.assert_allclose(told.mean, truth.mean, rtol=1e-5)
    np.testing.assert_allclose(np.stack(told), np.stack(truth._replace(median=told.median)), atol=0.05)
    assert 0.9 < told.median < 10.1


def test_a_reading_costs_nothing_unless_captured_and_is_one_over_all_devices():
    """A training step through scan and remat has no sort in it, and the captured numbers do not depend on a mesh."""
    mixer = {"efla": {"num_heads": 2, "implementation": "recurrent"}}  # the quickest to compile
    model = LanguageModel(31, WIDTH, 2, ("efla",), mixer, mlp="none", remat="full")
    tokens = jnp.arange(8 * TIME).reshape(8, TIME) % 31
    params = jax.jit(model.init)(jax.random.key(0), tokens)

    def loss(params, tokens, capture):
        wanted = (lambda module, _: isinstance(module, Reading)) if capture else False
        (logits, _), state = model.apply(params, tokens, capture_intermediates=wanted, mutable="intermediates")
        return jnp.mean(logits[..., 0]), signals(state.get("intermediates", {}))

    step = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)
    assert "sort(" not in step.lower(params, tokens, False).compile().as_text()
    capturing = step.lower(params, tokens, True).compile()
    assert "sort(" in capturing.as_text()
    (_, told), _ = capturing(params, tokens)
    statistics = ("mean", "p05", "p50", "p95", "max")
    assert set(told) == {f"{name}_{value}" for name in ("key_norm", "stiffness", "erase") for value in statistics}
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread_out = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("data")))
    (_, on_mesh), _ = step(jax.device_put(params, jax.NamedSharding(mesh, jax.P())), spread_out, True)
    tree_close(on_mesh, told)


def test_signals_are_means_over_layers_and_heads_and_the_largest_of_all():
    """Two layers stacked, one mixer alone beside them with more heads; what is no Spread is passed over."""
    stacked = Spread(*(jnp.asarray([[1.0, 2.0], [3.0, 4.0]]) + i for i in range(5)))
    single = Spread(*(jnp.asarray([2.0, 4.0, 9.0]) + 10 * i for i in range(5)))
    captured = {
        "groups": {"block_0": {"mixer": {"erase": {"__call__": (stacked,)}, "__call__": (jnp.ones(3),)}}},
        "mixer_0": {"erase": {"__call__": (single,)}, "step": {"__call__": (single,)}},
    }
    told = {name: float(value) for name, value in signals(captured).items()}
    erase = {"mean": 25 / 7, "p05": 25 / 7 + 34 / 7, "p50": 25 / 7 + 68 / 7, "p95": 25 / 7 + 102 / 7, "max": 49}
    step = {"mean": 5, "p05": 15, "p50": 25, "p95": 35, "max": 49}
    expected = {f"erase_{k}": v for k, v in erase.items()} | {f"step_{k}": v for k, v in step.items()}
    assert told == pytest.approx(expected)
    assert signals({}) == {}


def test_signals_have_the_softmax_fraction_of_every_layer_and_head():
    """Depth is counted over the whole model: two repetitions of a pattern of four; a classifier repeats nothing."""
    fractions = jnp.asarray([[0.25, 0.75], [0.0, 0.5]])
    at = {"router": {"softmax_fraction": {"__call__": (Spread(*[fractions] * 5),)}}}
    told = signals({"groups": {"block_2": {"mixer": at}}}, 4)
    each = {f"layer_{depth:02d}/head_{head}": fractions[i, head] for i, depth in enumerate((2, 6)) for head in (0, 1)}
    expected = {"layer_02": 0.5, "layer_06": 0.25} | each
    assert {name: float(told[f"softmax_fraction/{name}"]) for name in expected} == expected
    assert len(told) == 5 + 6 and told["softmax_fraction_mean"] == 0.375
    at = {"router": {"softmax_fraction": {"__call__": (Spread(*[fractions[0]] * 5),)}}}
    assert signals({"mixer_2": at}, 4)["softmax_fraction/layer_02/head_1"] == 0.75


@pytest.mark.parametrize("name", ["delta_net", "gated_delta_net"])
def test_negative_eigenvalues_let_a_step_reflect(name):
    params = parameters(name, beta_bias=20.0)  # sigmoid(20 + ...) = 1
    x = inputs()
    np.testing.assert_allclose(readings(make(name, beta_bias=20.0), params, x)["erase"], 1.0, atol=1e-4)
    mixer = make(name, beta_bias=20.0, negative_eigenvalues=True)
    np.testing.assert_allclose(readings(mixer, params, x)["erase"], 2.0, atol=1e-4)


def test_the_sequential_mnist_recipe_is_a_choice_of_fields():
    """Raw projections, recurrence, raw read-out: three square Xavier matrices and a beta head with bias -2."""
    recipe = {
        "num_heads": 1, "conv_width": 0, "activation": "none", "query_norm": "none", "output_norm": False,
        "output_projection": False, "kernel_init": "xavier", "beta_bias": -2.0,
    }  # fmt: skip
    mixer, x = make("efla", **recipe), inputs()
    params = mixer.init(jax.random.key(0), x)
    leaves = jax.tree.leaves_with_path(params)
    shapes = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}
    square = (WIDTH, WIDTH)
    assert shapes == {
        "params/q_proj/kernel": square, "params/k_proj/kernel": square, "params/v_proj/kernel": square,
        "params/b_proj/kernel": (WIDTH, 1), "params/b_bias": (1,),
    }  # fmt: skip
    p = jax.tree.map(np.asarray, params["params"])
    assert p["b_bias"] == -2 and 0.9 * np.sqrt(6 / 32) < np.abs(p["k_proj"]["kernel"]).max() <= np.sqrt(6 / 32)
    y, cache = mixer.apply(params, x)
    assert cache.conv == ()
    state = np.zeros(square)
    for token in np.asarray(x[0], np.float64):
        q, k, v = (token @ p[f"{n}_proj"]["kernel"] for n in "qkv")
        beta = 1 / (1 + np.exp(2 - token @ p["b_proj"]["kernel"]))[0]
        alpha = (1 - np.exp(-beta * k @ k)) / (k @ k)
        state += alpha * np.outer(k, v - k @ state)
    assert relative_rms(y[0, -1], state.T @ q) <= CLOSE


@pytest.fixture
def no_type_checks():
    """The library's own messages, not beartype's."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("efla", {"num_heads": 3}, "width: 16 is not divisible by num_heads=3"),
        ("efla", {"num_heads": 0}, "num_heads: 0 heads"),
        ("efla", {"num_heads": 2.0}, "num_heads: 2.0 is not a whole number"),
        ("efla", {"width": "16"}, "width: '16' is not a whole number"),
        ("attention", {"width": 0}, "width: 0 is less than 1"),
        ("mamba2", {"width": 16.0}, "width: 16.0 is not a whole number"),
        ("gated_conv", {"width": 16.0}, "width: 16.0 is not a whole number"),
        ("efla", {"num_key_heads": 4}, "G=4 key heads, but G must divide H"),
        ("efla", {"step": "eulr"}, "step: 'eulr' is not one of .* Did you mean 'euler'"),
        ("efla", {"key_scale": 0.0}, "key_scale: 0.0 times the keys"),
        ("efla", {"key_scale": float("inf")}, "key_scale: inf times the keys"),
        ("efla", {"query_norm": "l1"}, "query_norm: 'l1' is not one of"),
        ("efla", {"activation": "silo"}, "activation: 'silo'.*Did you mean 'silu'"),
        ("efla", {"beta_activation": "tanh"}, "beta_activation: 'tanh'"),
        ("efla", {"expand_v": 1.3}, "expand_v: 1.3 times the key dim 8"),
        ("efla", {"chunk_size": 48}, "chunk_size: 48"),
        ("efla", {"output_projection": False, "head_dim": 4}, "output_projection: without it 2 heads of 4"),
        ("gated_efla", {"step": "exact"}, "step: 'exact' is not one of"),
        ("efla", {"conv_width": -1}, "conv_width: -1 is less than 0"),
        ("efla", {"dtype": "bfloat61"}, "dtype: 'bfloat61' is not one of .* Did you mean 'bfloat16'"),
        ("attention", {"dtype": "int32"}, "dtype: 'int32' is not one of"),
        ("mamba2", {"state_dim": 0}, "state_dim: 0 is less than 1"),
        ("mamba2", {"num_groups": 3}, "G=3 key heads"),
        ("mamba2", {"num_heads": 5}, "width: 32 is not divisible by num_heads=5"),
    ],
)
def test_wrong_fields_are_errors_when_the_mixer_is_built(name, options, message, no_type_checks):
    with pytest.raises(ValueError, match=message):
        make(name, **options)


def test_wrong_arrays_are_errors(no_type_checks):
    with pytest.raises(ValueError, match="segment_ids: shape"):
        make("efla").init(jax.random.key(0), inputs(4), jnp.ones((1, 4), jnp.int32))
    with pytest.raises(ValueError, match="kernel_init: 'lecum'.*Did you mean 'lecun'"):
        make("efla", kernel_init="lecum").init(jax.random.key(0), inputs(4))


@pytest.mark.parametrize("name", ["gated_efla", "gated_conv", "attention", "nats_l"])
def test_wrong_ids_and_caches_are_errors(name, no_type_checks):
    """Each way of beginning a call: a recurrent mixer's, and those of the two that keep what they read."""
    mixer, x = make(name), inputs(4)
    ids = jnp.ones(x.shape[:2], jnp.int32)
    params = jax.eval_shape(mixer.init, jax.random.key(0), x)

    def call(ids=None, cache=None):
        return jax.eval_shape(functools.partial(mixer.apply, segment_ids=ids, cache=cache), params, x)

    cache, other = mixer.init_cache(len(x)), make("attention" if name != "attention" else "efla").init_cache(len(x))
    call(ids, cache)
    for wrong, message in (
        (dict(ids=ids[:, :-1]), r"segment_ids: shape \(\d, 3\) is not \[B, T\] = \(\d, 4\)"),
        (dict(ids=ids[0]), r"segment_ids: shape \(4,\) is not \[B, T\]"),
        (dict(ids=ids.tolist()), "segment_ids: .* is a list, but an array"),
        (dict(ids=ids > 0), "segment_ids: dtype bool is not an integer type"),
        (dict(ids=cache), "segment_ids: .* but an array"),
        (dict(cache=other), f"cache: a {type(other).__name__}, but .* carries a {type(cache).__name__}"),
        (dict(cache=mixer.init_cache(7)), r"cache: of 7 rows, but x has \d"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**wrong)


class Counted(NamedTuple):
    """A cache with a field of its own."""

    conv: tuple
    state: jax.Array
    segment: jax.Array
    count: jax.Array


class Counting(MIXERS["efla"]):
    """A mixer from elsewhere that carries it."""

    def init_cache(self, batch_size):
        return Counted(*super().init_cache(batch_size), jnp.zeros((batch_size,), jnp.int32))


def test_a_mixer_may_carry_a_cache_of_its_own(no_type_checks):
    mixer, x = Counting(8, 2), jnp.ones((2, 3, 8))
    params, cache = jax.eval_shape(mixer.init, jax.random.key(0), x), mixer.init_cache(2)
    call = functools.partial(jax.eval_shape, functools.partial(mixer.apply, segment_ids=None), params, x)
    call(cache=cache)
    with pytest.raises(ValueError, match="cache: a tuple, but Counting carries a Counted from call to call"):
        call(cache=tuple(cache))
