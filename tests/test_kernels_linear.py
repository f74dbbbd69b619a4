"""Linear attention's kernels in Mosaic's interpreter, with its race detector, against the float64 oracle; and their
lowering for CUDA."""

import os

os.environ.setdefault("NPROC", "8")  # a waiting warpgroup blocks a thread of XLA's pool: more of them than warpgroups

import functools  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from efla_jax import ops  # noqa: E402
from efla_jax.kernels import linear_attention as kernel  # noqa: E402
from efla_jax.kernels import mosaic  # noqa: E402
from efla_jax.ops import pallas_linear, tuning  # noqa: E402
from efla_jax.ops.arguments import recurrence  # noqa: E402
from efla_jax.ops.chunked import chunked  # noqa: E402
from tests import ptxas  # noqa: E402
from tests.cases import packed_ids, recurrence_case  # noqa: E402
from tests.lowering import lower_cuda, mosaic_calls  # noqa: E402
from tests.oracle import recurrence_and_gradients, relative_rms  # noqa: E402

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
NAMES = ("o", "state", "dq", "dk", "du", "dlog_decay", "dinitial_state")
# The kernels round the same operands to bfloat16 as the chunked form, in another order: at most 1.2 times its error;
# below the first number nothing is told apart from the rounding of the result itself (half of 2^-8).
FLOOR, RATIO = 2.5e-3, 1.2
# With no decay <S, D'> of the states and their cotangents is most of dlog_decay. Both are saved in bfloat16, half of
# 2^-8 / sqrt(3) * 1.4 = 1.6e-3 each, where the chunked form keeps float32: 2.3e-3 beside the 1.4e-3 of all the rest.
FLOORS = dict.fromkeys(NAMES, FLOOR) | {"dlog_decay": 3.2e-3}
# float16 rounds to 11 bits, 5e-4 each; the chunked form has no such products to compare with.
FLOAT16 = 1e-3
RACE = "RACE DETECTED"
CASES = ("random", "cosine 0.99", "no decay", "strong decay", "forget", "mixed decay", "zero keys")
SHAPES = {
    "two heads of a key head": dict(batch=2, time=150, key_heads=1, heads=2, key_dim=64, value_dim=64),
    "Mamba-2": dict(batch=1, time=200, key_heads=1, heads=2, key_dim=128, value_dim=64),
    "two tiles of a head": dict(batch=1, time=70, key_heads=2, heads=2, key_dim=64, value_dim=128),
    "three tiles": dict(batch=1, time=70, key_heads=1, heads=1, key_dim=128, value_dim=192),
    "a head alone": dict(batch=1, time=70, key_heads=2, heads=2, key_dim=128, value_dim=64),
}
# Few programs and many multiprocessors: the time is split, and so are the heads in the gradients.
SPLIT = kernel.Config(stages=2, multiprocessors=8, waves=1.0)
WHOLE = kernel.Config(multiprocessors=1, waves=1.0)


def by_kernel(q, k, u, log_decay, state, ids, config=WHOLE):
    x = recurrence(q, k, u, None, log_decay, state, ids)
    return pallas_linear.linear_attention(x, 64, config, INTERPRET)


def by_chunks(q, k, u, log_decay, state, ids, _):
    return chunked(recurrence(q, k, u, None, log_decay, state, ids), 64)


pytestmark = pytest.mark.usefixtures("no_races")


@functools.cache
def compiled(op, config=None):
    """A jitted (arguments, ids, cotangents) -> ((o, state), gradients), shared by all cases of one shape."""

    @jax.jit
    def run(arguments, ids, cotangents):
        out, pull = jax.vjp(lambda *a: op(*a, ids, config), *arguments)
        return *out, *pull(cotangents)

    return run


def case(name: str, shape: str, dtype=jnp.bfloat16):
    """(q, k, u, log_decay, state) and cotangents."""
    (q, k, u, _, log_decay, state), cotangents = recurrence_case(name, dtype, **SHAPES[shape])
    return (q, k, u, log_decay, state), cotangents


def expected(arguments, ids, cotangents):
    """(o, state, dq, dk, du, dlog_decay, dinitial_state) of the oracle."""
    q, k, u, log_decay, state = arguments
    out, gradients = recurrence_and_gradients((q, k, u, log_decay * 0, log_decay, state), ids, cotangents)
    return *out, *gradients[:3], *gradients[4:]


def compare(arguments, ids, cotangents, config=WHOLE):
    """The kernels' results, once they are as right as the chunked form."""
    results = compiled(by_kernel, config)(arguments, ids, cotangents)
    truth = expected(arguments, ids, cotangents)
    errors = {n: relative_rms(r, t) for n, r, t in zip(NAMES, results, truth, strict=True)}
    bounds = dict.fromkeys(NAMES, FLOAT16)
    if arguments[2].dtype == jnp.bfloat16:
        others = compiled(by_chunks)(arguments, ids, cotangents)
        bounds = {n: max(RATIO * relative_rms(r, t), FLOORS[n]) for n, r, t in zip(NAMES, others, truth, strict=True)}
    assert all(errors[n] <= bounds[n] for n in NAMES), {n: (errors[n], bounds[n]) for n in NAMES}
    return results


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_the_oracle(name):
    shape = "two heads of a key head"
    arguments, cotangents = case(name, shape)
    compare(arguments, np.ones((SHAPES[shape]["batch"], SHAPES[shape]["time"]), np.int32), cotangents)


def test_documents_and_padding():
    """Documents that begin in every chunk and one that goes through a whole chunk; padding may hold anything."""
    shape = "two heads of a key head"
    arguments, cotangents = case("mixed decay", shape)
    ids = packed_ids(SHAPES[shape]["batch"], SHAPES[shape]["time"], seed=3)
    ids[1, 60:] = ids.max() + 1
    pad = ids == 0
    clean = compare(arguments, ids, cotangents)
    poisoned = [jnp.where(pad.reshape(pad.shape + (1,) * (x.ndim - 2)), jnp.nan, x) for x in arguments[:4]]
    results = compiled(by_kernel, WHOLE)((*poisoned, arguments[4]), ids, cotangents)
    for value, before in zip(results, clean, strict=True):  # and the same bits at every repetition
        np.testing.assert_array_equal(value, before)
    for gradient in (results[0], *results[2:6]):
        assert not np.asarray(gradient, np.float32)[pad].any()


def test_time_in_parts_and_heads_in_slices():
    """Mamba-2's shape without documents; the time is filled up until its parts are equal."""
    arguments, cotangents = case("random", "Mamba-2")
    _, k, u, *_ = arguments
    sizes = kernel.Sizes(1, 4, 1, 2, 128, 64, 3)
    assert kernel.parts(sizes, SPLIT) == 2 and kernel.slices(sizes, SPLIT) == 2
    assert kernel.padded_time(150, k, u, SPLIT) == 192 and kernel.padded_time(300, k, u, SPLIT) == 384
    compare(arguments, None, cotangents, SPLIT)


def test_a_race_would_be_seen(capfd):
    def body(o, shared):
        shared[...] = plgpu.layout_cast(jnp.zeros((128,), jnp.float32), plgpu.Layout.WG_STRIDED((128,), vec_size=1))
        o[...] = shared[...]

    options = dict(scratch_types=[plgpu.SMEM((128,), jnp.float32)], num_threads=2, thread_name="group")
    plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), interpret=INTERPRET, **options)()
    assert RACE in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("split", (False, True))
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, split, dtype):
    arguments, cotangents = case("random", shape, jnp.dtype(dtype))
    ids = packed_ids(SHAPES[shape]["batch"], SHAPES[shape]["time"]) if split else None
    compare(arguments, ids, cotangents, SPLIT if split else WHOLE)


@pytest.mark.slow
def test_vmap_equals_one_at_a_time():
    first, cotangents = case("random", "a head alone")
    second, _ = case("mixed decay", "a head alone")
    both = [jnp.stack(pair) for pair in zip(first, second, strict=True)]
    mapped = jax.vmap(compiled(by_kernel, WHOLE), (0, None, None))(both, None, cotangents)
    for i, arguments in enumerate((first, second)):
        alone = compiled(by_kernel, WHOLE)(arguments, None, cotangents)
        for value, reference in zip(mapped, alone, strict=True):
            assert relative_rms(value[i], reference) < 1e-6


def test_what_the_kernels_do_not_serve_is_named():
    def ask(dtype=jnp.bfloat16, keys=128, values=64, time=16):
        q = jnp.zeros((1, time, 1, keys), dtype)
        u = jnp.zeros((1, time, 2, values), jnp.bfloat16)
        return by_kernel(q, q, u, None, None, None)

    for reason, options in (
        ("one dtype", dict(dtype=jnp.float16)),
        ("K = 32", dict(keys=32)),
        ("V = 80", dict(values=80)),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            ask(**options)
    o, state = ask(time=0)
    assert o.shape == (1, 0, 2, 64) and not np.asarray(state).any()
    q = jnp.zeros((1, 16, 1, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="need an NVIDIA Hopper GPU"):
        ops.linear_attention(q, q, q, implementation="pallas")


def lowered(sizes, documents, dtype, config):
    """The program of value and gradients at (B, T, G, H, K, V)."""
    batch, time, key_heads, heads, key_dim, value_dim = sizes
    shape = jax.ShapeDtypeStruct
    keys, values = shape((batch, time, key_heads, key_dim), dtype), shape((batch, time, heads, value_dim), dtype)
    gates = shape((batch, time, heads), jnp.float32)
    state = shape((batch, heads, key_dim, value_dim), jnp.float32)
    ids = shape((batch, time), jnp.int32) if documents else None

    def run(arguments, ids, cotangents):
        def op(q, k, u, log_decay, state):
            x = recurrence(q, k, u, None, log_decay, state, ids)
            return pallas_linear.laid_out(x, config, None)

        return jax.vjp(op, *arguments)[1](cotangents)

    return lower_cuda(run, (keys, keys, values, gates, state), ids, (values, state))


@pytest.mark.parametrize("row", kernel.TABLE, ids=str)
def test_every_row_of_the_table_lowers(row):
    """Time in parts, with documents: every program there is, forward and backward."""
    _, key_dim, value_dim, dtype = row
    heads = 4 if key_dim > 128 else 32  # few enough programs for parts
    program = lowered((1, 32768, 1, heads, key_dim, value_dim), True, jnp.dtype(dtype), kernel.TABLE[row])
    assert mosaic_calls(program) == 5


def test_many_rows_are_not_split():
    assert mosaic_calls(lowered((16, 2048, 1, 32, 128, 64), False, jnp.bfloat16, kernel.Config())) == 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", mosaic.DTYPES)
@pytest.mark.parametrize("key_dim", kernel.KEY_DIMS)
def test_the_safe_row_lowers_for_every_size(key_dim, dtype):
    for value_dim in (64, 128, 192, 256):
        for key_heads, heads in ((1, 1), (1, 3), (4, 4), (2, 8)):
            sizes = 2, 300, key_heads, heads, key_dim, value_dim
            assert mosaic_calls(lowered(sizes, heads == 3, jnp.dtype(dtype), kernel.SAFE)) >= 3


@pytest.mark.slow
# The assembler comes with the CUDA plugin, which a machine without a GPU need not have; lowering is tested without.
@pytest.mark.skipif(ptxas.missing() is not None, reason=str(ptxas.missing()))
@pytest.mark.parametrize("documents", (False, True))
@pytest.mark.parametrize("heads", (1, 32))
@pytest.mark.parametrize("row", kernel.TABLE, ids=str)
def test_no_row_of_the_table_spills(row, heads, documents):
    """A few registers of a loop's bookkeeping at most, with K = 256 of addresses, and no wgmma that waits for the one
    before."""
    _, key_dim, value_dim, dtype = row
    program = lowered((1, 32768, 1, heads, key_dim, value_dim), documents, jnp.dtype(dtype), kernel.TABLE[row])
    for kernel_usage in ptxas.usage(program):
        assert kernel_usage.spilled <= (320 if key_dim > 128 else 32) and not kernel_usage.serialised, kernel_usage


@pytest.mark.slow
def test_every_config_that_is_tried_lowers():
    for config in tuning.candidates("linear_attention", "NVIDIA H200", 128, 64, "bfloat16"):
        assert mosaic_calls(lowered((1, 32768, 1, 32, 128, 64), True, jnp.bfloat16, config)) >= 3


def test_configs_are_looked_up():
    assert kernel.config_for("NVIDIA H200", 128, 64, jnp.bfloat16) is kernel.TABLE["NVIDIA H200", 128, 64, "bfloat16"]
    assert kernel.config_for("NVIDIA H100", 128, 64, jnp.bfloat16) is kernel.SAFE
