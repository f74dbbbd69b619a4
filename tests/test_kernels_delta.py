"""The delta rule's forward kernels and `implementation="pallas"`: Mosaic's interpreter with its race detector against
the float64 oracle, and lowering for CUDA of every row of the table of configs.

Each program that is interpreted costs seconds to compile, so that cases share shapes."""

import os

os.environ.setdefault("NPROC", "8")  # a waiting warpgroup blocks a thread of XLA's pool: more of them than warpgroups

import dataclasses  # noqa: E402
import functools  # noqa: E402
import importlib  # noqa: E402
import itertools  # noqa: E402
import types  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402

from efla_jax import ops  # noqa: E402
from efla_jax.kernels import delta_rule as kernel  # noqa: E402
from efla_jax.kernels import delta_rule_mosaic as mosaic  # noqa: E402
from efla_jax.ops import hopper, pallas  # noqa: E402
from efla_jax.ops.arguments import recurrence  # noqa: E402
from efla_jax.ops.chunked import chunked  # noqa: E402
from tests.cases import packed_ids, recurrence_case  # noqa: E402
from tests.lowering import lower_cuda, mosaic_calls  # noqa: E402
from tests.oracle import recurrence_and_gradients, relative_rms  # noqa: E402

RACES = plgpu.InterpretGPUParams(detect_races=True)
NAMES = ("o", "state", "dq", "dk", "du", "derase", "dlog_decay", "dinitial_state")
# A kernel rounds the same operands to 16 bits as the chunked form, in another order: at most 1.2 times its error. Below
# the first number (half a unit of the last place of bfloat16 is 2e-3) nothing but the rounding of the result is seen.
FLOOR, RATIO = 2.5e-3, 1.2
SMALL = dict(batch=1, time=100, key_heads=1, heads=2, key_dim=64, value_dim=64)


def by_kernel(arguments, ids):
    return pallas.delta_rule(recurrence(*arguments, ids), 64, interpret=RACES)


def by_chunked(arguments, ids):
    return chunked(recurrence(*arguments, ids), 64)


RUN = {by_kernel: jax.jit(by_kernel), by_chunked: jax.jit(by_chunked)}


def assert_as_exact_as_chunked(names, values, others, truth):
    """Every value within RATIO of the error of the chunked form in XLA, given the same inputs."""
    for name, value, other, reference in zip(names, values, others, truth, strict=True):
        error, bar = relative_rms(value, reference), max(FLOOR, RATIO * relative_rms(other, reference))
        assert error <= bar, f"{name}: {error:.1e}, {bar:.1e} allowed"


def compare(case, ids=None, dtype=jnp.bfloat16, **shape):
    arguments, cotangents = recurrence_case(case, dtype, **{**SMALL, **shape})
    truth, _ = recurrence_and_gradients(arguments, ids, cotangents)
    ids = None if ids is None else jnp.asarray(ids)
    out = RUN[by_kernel](arguments, ids)
    assert out[0].dtype == dtype and out[1].dtype == jnp.float32
    assert_as_exact_as_chunked(NAMES[:2], out, RUN[by_chunked](arguments, ids), truth)


CASES = ("random", "cosine 0.99", "no decay", "forget", "mixed decay", "erase 1", "erase up to 2", "zero keys")


@pytest.mark.parametrize("case", CASES)
def test_forward_equals_the_oracle(case):
    compare(case)


def test_no_decay_is_forgotten_where_the_state_must_be():
    """exp(-1e4) is nothing: what came before leaves no trace at all."""
    (q, k, u, erase, decay, state), _ = recurrence_case("no decay", jnp.bfloat16, **SMALL)
    decay = decay.at[:, 70].set(-1e4)
    first = RUN[by_kernel]((q, k, u, erase, decay, state), None)
    other = RUN[by_kernel]((q, k, u.at[:, :70].set(1.0), erase, decay, 5 * state), None)
    np.testing.assert_array_equal(first[0][:, 70:], other[0][:, 70:])
    np.testing.assert_array_equal(first[1], other[1])


def documents_at(*starts: int, time: int = SMALL["time"]) -> np.ndarray:
    return 1 + np.sum(np.arange(time)[None] >= np.asarray(starts)[:, None], axis=0, dtype=np.int32)[None]


DOCUMENTS = {
    "at a border": ("forget", documents_at(64)),
    "inside": ("cosine 0.99", documents_at(1, 30, 31, 63, 65)),
    "of one token": ("random", documents_at(63, 64, 99)),
    "packed with padding": ("cosine 0.99", packed_ids(1, SMALL["time"])),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name):
    compare(*DOCUMENTS[name])


def test_the_row_of_64_channels_changes_no_bit():
    """Its order of steps is another than that of the safe config, which the other tests have."""
    config = kernel.TABLE["NVIDIA H200", 64, 64, "bfloat16"]
    assert config.early and not kernel.SAFE.early
    arguments, _ = recurrence_case("cosine 0.99", jnp.bfloat16, **SMALL)
    ids = jnp.asarray(documents_at(30, 65))
    tuned = jax.jit(lambda *a: pallas.delta_rule(recurrence(*a, ids), 64, config, RACES))(*arguments)
    for value, other in zip(tuned, RUN[by_kernel](arguments, ids), strict=True):
        np.testing.assert_array_equal(value, other)


def test_values_wider_than_keys_and_two_warpgroups():
    compare("cosine 0.9", packed_ids(2, 70), batch=2, time=70, key_heads=2, heads=2, value_dim=128)


def test_float16_and_three_value_tiles():
    compare("random", dtype=jnp.float16, time=64, key_dim=128, heads=1, value_dim=192)


def test_time_in_parts(monkeypatch):
    """Three chunks walked at once as if after one another; a document begins inside the last but one."""
    monkeypatch.setattr(kernel, "SAFE", kernel.Config(combine=0.0))
    shape, ids = dict(SMALL, time=192, heads=1), documents_at(100, time=192)
    assert kernel.layout_of(kernel.SAFE, mosaic.Sizes(1, 192, 1, 1, 64, 64, 1)) == (1, 3)
    arguments, cotangents = recurrence_case("cosine 0.9", jnp.bfloat16, **shape)
    truth, _ = recurrence_and_gradients(arguments, ids, cotangents)
    ids = jnp.asarray(ids)
    out = jax.jit(by_kernel)(arguments, ids)
    assert_as_exact_as_chunked(NAMES[:2], out, jax.jit(by_chunked)(arguments, ids), truth)


def test_gradients_through_the_operator(monkeypatch):
    """Layout, filling up, heads of one key head, values in tiles that share gates, padding tokens: autodiff of it
    all."""
    table = importlib.import_module("efla_jax.ops.delta_rule").TABLE
    monkeypatch.setitem(table, "pallas", functools.partial(pallas.delta_rule, interpret=RACES))
    arguments, cotangents = recurrence_case("cosine 0.9", jnp.bfloat16, **{**SMALL, "value_dim": 192})
    ids = jnp.asarray(packed_ids(1, SMALL["time"]))

    def run(implementation):
        def op(q, k, u, erase, decay, state):
            options = dict(initial_state=state, segment_ids=ids, implementation=implementation)
            return ops.delta_rule(q, k, u, erase, decay, **options)

        out, pull = jax.vjp(op, *arguments)
        return (*out, *pull(cotangents))

    truth, slopes = recurrence_and_gradients(arguments, np.asarray(ids), cotangents)
    ours = jax.jit(run, static_argnums=0)("pallas")
    assert_as_exact_as_chunked(NAMES, ours, jax.jit(run, static_argnums=0)("chunked"), (*truth, *slopes))
    padding = np.asarray(ids) == 0
    for value in (ours[0], *ours[2:7]):
        assert not np.any(np.asarray(value, np.float32)[padding])


def test_repetition_is_bitwise_and_vmap_is_a_loop():
    arguments, _ = recurrence_case("random", jnp.bfloat16, **SMALL)
    other, _ = recurrence_case("random", jnp.bfloat16, seed=1, **SMALL)
    run = RUN[by_kernel]
    first, second = run(arguments, None), run(arguments, None)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    u = jnp.stack([arguments[2], other[2]])
    mapped = jax.jit(jax.vmap(lambda u: by_kernel((*arguments[:2], u, *arguments[3:]), None)))(u)
    np.testing.assert_array_equal(mapped[0][0], first[0])
    np.testing.assert_array_equal(mapped[0][1], run((*arguments[:2], other[2], *arguments[3:]), None)[0])


def test_no_token_is_no_kernel():
    (q, k, u, erase, decay, state), _ = recurrence_case("random", jnp.bfloat16, **{**SMALL, "time": 0})
    o, final = by_kernel((q, k, u, erase, decay, state), None)
    assert o.shape == u.shape
    np.testing.assert_array_equal(final, state)


UNSUPPORTED = {
    "float32": (jnp.float32, {}, "dtype float32"),
    "small K": (jnp.bfloat16, dict(key_dim=32), "K = 32"),
    "odd V": (jnp.bfloat16, dict(value_dim=80), "V = 80"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_kernels_do_not_serve_is_said_and_auto_takes_chunked(monkeypatch, name):
    dtype, shape, reason = UNSUPPORTED[name]
    monkeypatch.setattr(pallas, "require_hopper", lambda op: "NVIDIA H200")
    (q, k, u, erase, decay, state), _ = recurrence_case("random", dtype, **{**SMALL, "time": 20, **shape})
    with pytest.raises(NotImplementedError, match=f"delta_rule: no GPU kernel for {reason}"):
        ops.delta_rule(q, k, u, erase, decay, implementation="pallas")
    auto = ops.delta_rule(q, k, u, erase, decay)
    np.testing.assert_array_equal(auto[0], ops.delta_rule(q, k, u, erase, decay, implementation="chunked")[0])


def test_mixed_dtypes_and_other_devices_are_refused(monkeypatch):
    (q, k, u, erase, _, _), _ = recurrence_case("random", jnp.bfloat16, **{**SMALL, "time": 20})
    with pytest.raises(NotImplementedError, match="need an NVIDIA Hopper GPU, not 'cpu'"):
        ops.delta_rule(q, k, u, erase, implementation="pallas")
    monkeypatch.setattr(pallas, "require_hopper", lambda op: "NVIDIA H200")
    with pytest.raises(NotImplementedError, match="q, k, u of one dtype, not bfloat16, bfloat16, float32"):
        ops.delta_rule(q, k, u.astype(jnp.float32), erase, implementation="pallas")
    for kind, served in {
        "NVIDIA H200": 1,
        "NVIDIA GH200 480GB": 1,
        "NVIDIA H100 80GB HBM3": 1,
        "NVIDIA A100": 0,
    }.items():
        assert bool(hopper.HOPPER.search(kind)) == bool(served), kind


def test_without_the_folder_of_kernels_auto_takes_chunked(monkeypatch):
    found = types.SimpleNamespace(compute_capability="9.0", device_kind="NVIDIA H200")
    monkeypatch.setattr(hopper, "device", lambda: found)
    monkeypatch.setattr(hopper.importlib.util, "find_spec", lambda name: None)
    (q, k, u, erase, _, _), _ = recurrence_case("random", jnp.bfloat16, **{**SMALL, "time": 20})
    with pytest.raises(NotImplementedError, match="the folder of GPU kernels is missing"):
        ops.delta_rule(q, k, u, erase, implementation="pallas")
    both = (ops.delta_rule(q, k, u, erase, implementation=name)[0] for name in ("auto", "chunked"))
    np.testing.assert_array_equal(*both)
    ops.causal_conv(jnp.zeros((1, 64, 128)), jnp.zeros((4, 128)))


def sized(key_dim, value_dim, dtype, rows=1, time=2048, key_heads=8, heads=16):
    s = jax.ShapeDtypeStruct
    keys, gates = s((rows, time, key_heads, key_dim), dtype), s((rows, time, heads), jnp.float32)
    return keys, keys, s((rows, time, heads, value_dim), dtype), gates, gates


TABLE = [(*row[1:], row[0]) for row in kernel.TABLE] + [
    (64, 128, "bfloat16", "NVIDIA H100 80GB HBM3"),
    (128, 64, "float16", "NVIDIA H200"),
]


@pytest.mark.parametrize("key_dim, value_dim, dtype, kind", TABLE)
def test_every_row_of_the_table_lowers(key_dim, value_dim, dtype, kind):
    """Forward alone, with documents, saving for the backward, and with the time in parts (few rows)."""
    config = kernel.config_for(kind, key_dim, value_dim, dtype)
    heads = 4 if key_dim > 128 else 16  # so few rows that a split of the time is worth its summary
    q, k, u, _, _ = sized(key_dim, value_dim, dtype, key_heads=heads // 2, heads=heads)
    s = jax.ShapeDtypeStruct
    gates, documents = s((1, heads, 2048), jnp.float32), s((1, 2048), jnp.float32)
    state = s((1, heads, key_dim, value_dim), jnp.float32)
    for save, packed, combine in ((False, False, 1e6), (True, True, 1e6), (False, True, 0.0)):

        def run(q, k, u, erase, decay, documents, state, save=save, packed=packed, combine=combine):
            changed = dataclasses.replace(config, combine=combine, early=save, automatic_barriers=not save)
            documents = documents if packed else None
            return kernel.forward(q, k, u, erase, decay, documents, state, config=changed, save=save)

        lowered = lower_cuda(run, q, k, u, gates, gates, documents, state, device_kind=kind)
        assert mosaic_calls(lowered) == (3 if combine == 0.0 else 2)


def test_the_operator_lowers_for_cuda_with_gradients_remat_and_vmap():
    q, k, u, erase, decay = sized(128, 128, jnp.bfloat16, rows=2, time=100)

    def loss(*a):
        o, state = jax.checkpoint(lambda *a: ops.delta_rule(*a, implementation="pallas"))(*a)
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(state)

    assert mosaic_calls(lower_cuda(jax.grad(loss, (0, 1, 2, 3, 4)), q, k, u, erase, decay)) >= 4
    many = (jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (q, k, u, erase, decay))
    assert mosaic_calls(lower_cuda(jax.vmap(jax.grad(loss, (0, 1, 2, 3, 4))), *many)) >= 4


def test_shards_each_run_their_kernel():
    """A head on each of two devices: no device needs what another has. (The interpreter cannot run two at once.)"""
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    heads = PartitionSpec(None, None, "tensor")
    local = jax.shard_map(
        lambda *a: ops.delta_rule(*a, implementation="pallas"),
        mesh=mesh.abstract_mesh.update(abstract_device=jax.sharding.AbstractDevice("NVIDIA H200", None, "cuda")),
        in_specs=(heads,) * 5,
        out_specs=(heads, PartitionSpec(None, "tensor")),
        check_vma=False,
    )
    lowered = lower_cuda(local, *sized(64, 64, jnp.bfloat16, time=128, key_heads=2, heads=4))
    assert mosaic_calls(lowered) == 2


def test_the_layout_follows_the_number_of_rows():
    """(compute warpgroups, parts) for the shapes that the table of the kernels' times has."""
    config = kernel.Config()
    shapes = {(16, 2048): (2, 1), (4, 8192): (1, 1), (1, 32768): (2, 8), (1, 131072): (2, 8), (1, 2048): (2, 4)}
    for (batch, time), layout in shapes.items():
        assert kernel.layout_of(config, mosaic.Sizes(batch, time, 16, 16, 128, 128, 16)) == layout, (batch, time)
    for batch, chunks, value_dim in itertools.product((1, 5, 4000), (1, 7, 96), (64, 128, 192)):
        sizes = mosaic.Sizes(batch, 64 * chunks, 1, 1, 64, value_dim, 1)
        groups, parts = kernel.layout_of(config, sizes)
        assert chunks % parts == 0 and value_dim % (64 * groups) == 0


def test_stages_are_those_that_shared_memory_holds():
    sizes = mosaic.Sizes(16, 2048, 16, 16, 128, 128, 16)
    plans = [
        kernel.plan_for(kernel.Config(), sizes, documents=True, save=save, interpret=False) for save in (False, True)
    ]
    assert [plan.stages for plan in plans] == [3, 2]
    assert all(plan.shared_memory <= kernel.SHARED_MEMORY for plan in plans)


def test_every_program_has_its_own_place():
    """Interpret mode does not catch an index out of range: every program's row, head, part and columns, counted."""
    sizes = mosaic.Sizes(3, 64 * 6, 2, 4, 64, 256, 4)
    plan = mosaic.Plan(sizes, 2, 3, 3, False, True, False, False, False)
    seen = set()
    for program, group in itertools.product(range(3 * 4 * 3 * 2), range(2)):
        place = mosaic.Place.of(plan, jnp.int32(program), jnp.int32(group))
        assert place.columns.size == 64 and place.first == place.part * 2 and place.key_head == place.head // 2
        seen.add(tuple(int(x) for x in (place.row, place.head, place.part, place.tile, place.columns.start)))
    assert seen == {
        (row, head, part, tile, 128 * tile + 64 * group)
        for row, head, part, tile, group in itertools.product(range(3), range(4), range(3), range(2), range(2))
    }
