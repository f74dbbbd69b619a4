"""Operators and mixers on meshes of eight simulated devices: every value and gradient is that of one device, and what
travels between devices is what has to.

A mesh is written (data, fsdp, tensor, context).
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from efla_jax.layers import MIXERS
from efla_jax.ops import attention as attention_file
from efla_jax.ops import attention_blocks, causal_conv, delta_rule, linear_attention, softmax_attention
from efla_jax.sharding import AXES, make_mesh
from tests.cases import packed_ids, recurrence_case
from tests.oracle import TOLERANCE, assert_close, recurrence_and_gradients

BATCH, TIME, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 4, 32, 3, 6, 8, 5
SHAPE = dict(batch=BATCH, time=TIME, key_heads=KEY_HEADS, heads=HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM)
NAMES = ("o", "state", "dq", "dk", "du", "derase", "dlog_decay", "dinitial_state")
CASES = ("random", "cosine 0.99", "no decay", "strong decay", "forget", "erase up to 2", "zero keys")


@functools.cache
def mesh_of(sizes):
    return make_mesh(**dict(zip(AXES, sizes, strict=True)))


def documents(time=TIME):
    """Four rows: one document; one that begins at every border of eight parts but the third and the sixth; documents
    of all lengths with padding inside; whole parts of padding in front of, in the middle of and behind a document."""
    ids = np.ones((BATCH, time), np.int32)
    ids[1] = np.repeat([1, 2, 2, 3, 4, 4, 5, 6], time // 8)
    ids[2] = packed_ids(1, time, seed=5)[0]
    ids[3] = np.repeat([0, 0, 7, 0, 7, 7, 0, 0], time // 8)
    ids[3, time * 3 // 4 - 1] = 8
    return ids


def on_mesh(sizes, run):
    """`run`, jitted, under the mesh of these sizes (None: without one)."""
    compiled = jax.jit(run)

    def call(*arguments):
        if sizes is None:
            return compiled(*arguments)
        with jax.set_mesh(mesh_of(sizes)):
            return compiled(*arguments)

    return call


def with_gradients(op):
    """(arguments, ids, cotangents) -> (results, gradients of the floating arguments)."""

    def run(arguments, ids, cotangents):
        out, pull = jax.vjp(lambda *a: op(*a, ids), *arguments)
        return out, pull(cotangents)

    return run


def recurrence(implementation, erases):
    def op(q, k, u, erase, log_decay, initial_state, ids):
        options = dict(initial_state=initial_state, segment_ids=ids, chunk_size=16, implementation=implementation)
        if erases:
            return delta_rule(q, k, u, erase, log_decay, **options)
        return linear_attention(q, k, u, log_decay, **options)

    return op


@functools.cache
def truth(case, dtype, time, packed, erases):
    """The oracle's results, which know neither chunks nor devices."""
    arguments, cotangents = recurrence_case(case, dtype, **{**SHAPE, "time": time})
    if not erases:
        arguments = (*arguments[:3], arguments[3] * 0, *arguments[4:])
    return recurrence_and_gradients(arguments, documents(time) if packed else None, cotangents)


def compare(run, case, erases, dtype="float32", time=TIME, packed=True):
    arguments, cotangents = recurrence_case(case, jnp.dtype(dtype), **{**SHAPE, "time": time})
    out, gradients = run(arguments, documents(time) if packed else None, cotangents)
    reference, slopes = truth(case, jnp.dtype(dtype), time, packed, erases)
    results = [*zip(NAMES, (*out, *gradients), (*reference, *slopes), strict=True)]
    names, values, references = zip(*(row for row in results if erases or row[0] != "derase"), strict=True)
    assert_close(values, references, names, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "sizes, implementation, time",
    [
        ((1, 1, 1, 8), "auto", 16),  # two tokens a part
        ((1, 1, 2, 4), "chunked", TIME),
        ((2, 1, 2, 2), "auto", TIME),
        ((1, 4, 2, 1), "auto", TIME),
    ],
)
@pytest.mark.parametrize("erases", (True, False))
def test_recurrences_equal_the_oracle_on_every_mesh(sizes, implementation, time, erases):
    run = on_mesh(sizes, with_gradients(recurrence(implementation, erases)))
    for case in CASES:
        compare(run, case, erases, time=time)
    if sizes == (1, 1, 2, 4):
        compare(run, "random", erases, packed=False)


@pytest.mark.parametrize("erases", (True, False))
def test_recurrences_in_bfloat16(erases):
    run = on_mesh((1, 1, 2, 4), with_gradients(recurrence("chunked", erases)))
    for case in ("random", "cosine 0.99", "strong decay"):
        compare(run, case, erases, dtype="bfloat16")


def conv_case(taps, time=TIME, batch=BATCH, width=6):
    rng = np.random.default_rng(taps)
    shapes = (batch, time, width), (taps, width), (width,), (batch, taps - 1, width)
    x, weight, bias, state = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return (x, weight, bias, state), tuple(jnp.asarray(rng.normal(size=a.shape), jnp.float32) for a in (x, state))


def conv(x, weight, bias, state, ids):
    return causal_conv(x, weight, bias, initial_state=state, segment_ids=ids)


@pytest.mark.parametrize("packed", (True, False))
@pytest.mark.parametrize(
    "sizes, taps, time",
    [((1, 1, 1, 8), 4, 16), ((1, 1, 1, 8), 7, 16), ((1, 1, 2, 4), 4, TIME), ((2, 1, 2, 2), 4, TIME)],
)
def test_conv_equals_one_device(sizes, taps, time, packed):
    """Also with parts of two tokens, shorter than what three or six taps look back."""
    arguments, cotangents = conv_case(taps, time)
    ids = documents(time) if packed else None
    out, gradients = on_mesh(sizes, with_gradients(conv))(arguments, ids, cotangents)
    expected, slopes = on_mesh(None, with_gradients(conv))(arguments, ids, cotangents)
    names = ("y", "state", "dx", "dweight", "dbias", "dstate")
    assert_close((*out, *gradients), (*expected, *slopes), names, TOLERANCE["float32"])


def attention_case(key_heads=KEY_HEADS, dtype=jnp.float32):
    rng = np.random.default_rng(key_heads)
    shapes = [(BATCH, TIME, HEADS, KEY_DIM), (BATCH, TIME, key_heads, KEY_DIM), (BATCH, TIME, key_heads, VALUE_DIM)]
    arguments = tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    shapes.append((BATCH, TIME, HEADS, VALUE_DIM))
    return arguments, tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in (shapes[3], *shapes[1:3]))


def attention(q, k, v, ids):
    o, state = softmax_attention(q, k, v, segment_ids=ids)
    return o, state.k, state.v


@pytest.mark.parametrize("packed", (True, False))
@pytest.mark.parametrize(
    "sizes, block",
    [((1, 1, 1, 8), 256), ((1, 1, 2, 4), 3), ((2, 1, 2, 2), 256), ((2, 1, 1, 2), 3), ((1, 1, 3, 2), 256)],
)
def test_softmax_attention_equals_one_device(sizes, block, packed, monkeypatch):
    """Devices that do not divide the heads left to them, and in the last two rows some that do."""
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", block)
    arguments, cotangents = attention_case()
    ids = documents() if packed else None
    out, gradients = on_mesh(sizes, with_gradients(attention))(arguments, ids, cotangents)
    expected, slopes = on_mesh(None, with_gradients(attention))(arguments, ids, cotangents)
    assert_close((*out, *gradients), (*expected, *slopes), ("o", "k", "v", "dq", "dk", "dv"), TOLERANCE["float32"])


def test_softmax_attention_in_bfloat16():
    """Against float32 on one device, from the same rounded inputs: gradients of gathered keys are summed over parts."""
    arguments, cotangents = attention_case(dtype=jnp.bfloat16)
    out, gradients = on_mesh((1, 1, 1, 8), with_gradients(attention))(arguments, documents(), cotangents)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (arguments, cotangents))
    expected, slopes = on_mesh(None, with_gradients(attention))(exact[0], documents(), exact[1])
    names = ("o", "k", "v", "dq", "dk", "dv")
    assert_close((*out, *gradients), (*expected, *slopes), names, TOLERANCE["bfloat16"])


def test_parts_of_the_time_become_heads():
    """What travels where the heads divide: q, k, v and o once, and once in the backward, no keys of all heads."""
    arguments, _ = attention_case()

    def op(q, k, v, ids):
        return (attention_file.over_mesh("chunked", q, k, v, ids, None),)

    found = collectives((1, 1, 1, 2), op, arguments, (TOKENS,) * 3, packed=False)
    assert {name for name, _ in found} == {"all-to-all"} and len(found) == 8


def test_cached_attention_splits_rows_and_heads_only():
    (q, k, v), _ = attention_case(key_heads=2)

    def run(q, k, v, ids):
        o, state = softmax_attention(q, k, v, segment_ids=ids)
        state = state._replace(length=state.length - 1)  # room for one more token, where the last one was
        more, state = softmax_attention(q[:, :1], k[:, :1], v[:, :1], initial_state=state)
        return more, state.k, state.v

    results = (on_mesh(sizes, run)(q, k, v, documents()) for sizes in ((2, 1, 2, 2), None))
    assert_close(*results, ("o", "k", "v"), TOLERANCE["float32"])


def every_op(a, ids=None):
    """The outputs and states of all operators with a state, from one set of arguments."""
    q, k, u, erase, log_decay, state, weight, conv_state = a
    o, state = delta_rule(q, k, u, erase, log_decay, initial_state=state, segment_ids=ids)
    more, last = linear_attention(q, k, o, log_decay, initial_state=state, segment_ids=ids)
    x = more.reshape(*more.shape[:2], more.shape[2] * more.shape[3])
    y, conv_state = causal_conv(x, weight, initial_state=conv_state, segment_ids=ids)
    read, _ = softmax_attention(more, k[..., : more.shape[-1]], q, segment_ids=ids)
    return o, state, last, y, conv_state, read


def every_argument(**shape):
    arguments, _ = recurrence_case("random", **{**SHAPE, **shape})
    batch, _, heads, value_dim = arguments[2].shape
    rng = np.random.default_rng(1)
    shapes = (4, heads * value_dim), (batch, 3, heads * value_dim)
    return (*arguments, *(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes))


ALL = ("o", "state", "last", "y", "conv_state", "read")


@pytest.mark.parametrize(
    "sizes, shape",
    [
        ((1, 1, 2, 4), dict(batch=1, time=TIME - 1)),  # the time does not divide
        ((2, 2, 1, 2), dict(batch=1, time=1)),  # decoding: neither rows nor time divide
        ((2, 2, 2, 1), dict(batch=2, time=3)),  # rows divide data, but not fsdp too
        ((1, 1, 4, 2), dict(time=8)),  # six heads on four devices
        ((1, 1, 8, 1), dict(time=3, key_heads=2, heads=8)),  # more devices than key heads
        ((1, 1, 2, 4), dict(time=0)),
    ],
)
def test_what_an_axis_does_not_divide_stays_whole(sizes, shape):
    """Key heads fewer than devices (pitfall 56) are repeated; other axes that do not divide are not used."""
    arguments = every_argument(**shape)
    results = (on_mesh(where, every_op)(arguments) for where in (sizes, None))
    assert_close(*results, ALL, TOLERANCE["float32"])


def test_eager_calls_and_other_shard_maps():
    """Without jit, and where the caller has split everything already."""
    arguments = every_argument(time=8)
    expected = on_mesh(None, every_op)(arguments)
    with jax.set_mesh(mesh_of((2, 2, 1, 2))):
        assert_close(every_op(arguments), expected, ALL, TOLERANCE["float32"])
        rows = PartitionSpec(("data", "fsdp"))
        specs = (*(rows,) * 6, PartitionSpec(), rows)
        own = jax.shard_map(every_op, in_specs=(specs,), out_specs=rows, check_vma=False)
        assert_close(jax.jit(own)(arguments), expected, ALL, TOLERANCE["float32"])


def test_scanned_rematerialised_and_donated():
    """A stack of layers as a model has it: lax.scan over remat, gradients, donated arguments."""
    q, k, u, erase, log_decay, _, weight, _ = every_argument(time=16)
    ids = jnp.asarray(documents(16))

    def loss(weights, u):
        @jax.checkpoint
        def layer(u, weight):
            o, _ = delta_rule(q, k, u, erase, log_decay, segment_ids=ids, chunk_size=16)
            y, _ = causal_conv(o.reshape(*o.shape[:2], -1), weight, segment_ids=ids)
            return u + y.reshape(u.shape), None

        return jnp.sum(jnp.sin(lax.scan(layer, u, weights)[0]))

    weights = jnp.stack([weight, weight[::-1]]) / 4
    run = jax.value_and_grad(loss, argnums=(0, 1))
    expected = on_mesh(None, run)(weights, u)
    with jax.set_mesh(mesh_of((1, 2, 2, 2))):
        donated = jax.jit(run, donate_argnums=(0, 1))
        value, gradients = donated(weights + 0, u + 0)
    assert_close((value, *gradients), (expected[0], *expected[1]), ("loss", "dweights", "du"), TOLERANCE["float32"])


COLLECTIVE = re.compile(
    r"= \(?(\w+\[[\d,]*\]).*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\("
)


def collectives(sizes, op, arguments, specs, packed=True):
    """(name, shape on one device) of every collective in the compiled forward and backward of `op`."""
    mesh = mesh_of(sizes)
    ids = jnp.asarray(documents(arguments[0].shape[1])) if packed else None
    cotangents = jax.eval_shape(lambda a: op(*a, ids), arguments)
    where = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
    ids_at = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "context"))
    # Shardings of the results are left to XLA: it cannot want a collective that the operator has not asked for.
    places = tuple(where), ids_at if packed else None, None
    jitted = jax.jit(with_gradients(op), in_shardings=places)
    with jax.set_mesh(mesh):
        text = jitted.lower(arguments, ids, cotangents).compile().as_text()
    return [
        (name, tuple(map(int, re.findall(r"\d+", shape.split("[")[1])))) for shape, name in COLLECTIVE.findall(text)
    ]


ROWS, CONTEXT, TENSOR = ("data", "fsdp"), "context", "tensor"
TOKENS = (ROWS, CONTEXT, TENSOR)
RECURRENCE_SPECS = (*(TOKENS,) * 5, (ROWS, TENSOR))
CONV_SPECS = (TOKENS, (None, TENSOR), (TENSOR,), (ROWS, None, TENSOR))


@pytest.mark.parametrize("sizes", [(1, 4, 2, 1), (2, 2, 1, 1)])
@pytest.mark.parametrize("erases", (True, False))
def test_nothing_travels_where_rows_and_heads_are_split(sizes, erases):
    arguments, _ = recurrence_case("random", **{**SHAPE, "key_heads": 2})
    assert collectives(sizes, recurrence("chunked", erases), arguments, RECURRENCE_SPECS) == []


def test_fewer_key_heads_than_devices_split_the_others():
    """Pitfall 56: the one key head goes to both devices, so that values stay split; its gradient is summed."""
    arguments, _ = recurrence_case("random", **{**SHAPE, "key_heads": 1})
    whole = (ROWS, CONTEXT)
    found = collectives((1, 4, 2, 1), recurrence("chunked", True), arguments, (whole, whole, *RECURRENCE_SPECS[2:]))
    assert {name for name, _ in found} == {"all-reduce"}
    assert {size for _, size in found} <= {(1, TIME, 1, KEY_DIM), (1, TIME, KEY_DIM)}


def test_only_gradients_of_weights_are_reduced():
    """Pitfall 55: no reduction but that of the convolution's parameters."""
    found = collectives((1, 4, 2, 1), conv, conv_case(4)[0], CONV_SPECS)
    assert {name for name, _ in found} == {"all-reduce"}
    assert {shape for _, shape in found} <= {(4, 3), (3,)}


@pytest.mark.parametrize("erases", (True, False))
def test_over_time_only_summaries_travel(erases):
    """Pitfall 54: nothing that is gathered has the full time and features; states, not tokens, are."""
    shape = dict(batch=2, time=256, key_heads=2, heads=2, key_dim=8, value_dim=5)
    arguments, _ = recurrence_case("random", **shape)
    found = collectives((1, 1, 1, 8), recurrence("chunked", erases), arguments, RECURRENCE_SPECS, packed=False)
    assert {name for name, _ in found} >= {"all-gather"}
    most = 8 * 2 * 2 * 8 * (8 + 5)  # (M, S) of eight parts; q alone is 2 * 256 * 2 * 8
    assert all(256 not in size and np.prod(size) <= most for _, size in found), found


def test_convolution_hands_over_a_few_inputs():
    found = collectives((1, 1, 1, 8), conv, conv_case(4, time=256, batch=2)[0], CONV_SPECS, packed=False)
    assert found and all(np.prod(size) <= 2 * 8 * 3 * 6 for _, size in found), found


WIDTH = 16
OPTIONS = {
    "mamba2": {"state_dim": 8}, "attention": {"num_kv_heads": 1}, "gated_efla": {"num_key_heads": 1},
    "log_linear_mamba2": {"state_dim": 8, "levels": 3}, "log_linear_gated_delta_net": {"levels": 3},
    "log_linear_efla": {"levels": 3}, "nats_l": {"chunk_size": 16, "implementation": "recurrent"},
}  # fmt: skip


@pytest.mark.parametrize("name", MIXERS)
def test_mixers_equal_one_device(name):
    """Whole layers over packed documents that cross the parts: outputs, and gradients of inputs and parameters."""
    mixer = MIXERS[name](**{"width": WIDTH, "num_heads": 2, **OPTIONS.get(name, {})})
    # Rows, too, and two chunks of 16 to look back at.
    sizes, time = ((1, 2, 2, 2), 40) if name == "nats_l" else ((1, 1, 2, 4), 8)
    rng = np.random.default_rng(3)
    x, weight = (jnp.asarray(rng.normal(size=(BATCH, time, WIDTH)), jnp.float32) for _ in range(2))
    params = jax.jit(mixer.init)(jax.random.key(0), x[:, :4])
    ids = jnp.asarray(documents(time))

    def run(params, x):
        def total(params, x):
            y, _ = mixer.apply(params, x, ids)
            return jnp.sum(y * weight), y

        return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(params, x)

    (_, y), gradients = on_mesh(sizes, run)(params, x)
    (_, expected), slopes = on_mesh(None, run)(params, x)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(slopes)]
    values = (y, *jax.tree.leaves(gradients))
    # Norms and projections around the operator repeat and multiply its float32 errors.
    assert_close(values, (expected, *jax.tree.leaves(slopes)), ("y", *paths), 2 * TOLERANCE["float32"])
