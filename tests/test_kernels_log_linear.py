"""Log-linear linear attention's kernels in Mosaic's interpreter, with its race detector, against the float64 oracle;
and their lowering for CUDA."""

import os

os.environ.setdefault("NPROC", "8")  # a waiting warpgroup blocks a thread of XLA's pool: more of them than warpgroups

import functools  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from efla_jax import ops  # noqa: E402
from efla_jax.kernels import log_linear as kernel  # noqa: E402
from efla_jax.kernels import log_linear_states  # noqa: E402
from efla_jax.ops import pallas_log_linear  # noqa: E402
from efla_jax.ops.fenwick import fenwick, fenwick_level, init_fenwick_state  # noqa: E402
from efla_jax.ops.fenwick_chunked import fenwick_chunked  # noqa: E402
from tests import ptxas  # noqa: E402
from tests.cases import recurrence_case  # noqa: E402
from tests.lowering import lower_cuda, mosaic_calls  # noqa: E402
from tests.oracle import fenwick_and_gradients, relative_rms  # noqa: E402

# JAX_PLATFORMS=cuda,cpu runs the same comparisons on a Hopper GPU, by the programs themselves.
ON_GPU = os.environ.get("JAX_PLATFORMS", "").startswith("cuda")
INTERPRET = None if ON_GPU else plgpu.InterpretGPUParams(detect_races=True)
NAMES = ("o", "states", "dq", "dk", "du", "dlog_decay", "dlevel_weights")
# As for the flat operator: the same operands rounded to bfloat16 as in the chunked form, in another order. dk and du
# are sums of two gradients in bfloat16, one of pairs and one of states, half of 2^-8 / sqrt(3) each.
FLOOR, RATIO = 2.9e-3, 1.2
# With no decay products of states and their cotangents are most of dlog_decay. Both are kept in bfloat16, and the
# cotangents rounded once more as an operand, each by half of 2^-8 / sqrt(3) times 1.4 = 1.6e-3: 2.7e-3 together, beside
# the 2.4e-3 of all the rest. The chunked form keeps float32.
FLOORS = dict.fromkeys(NAMES, FLOOR) | {"dlog_decay": 3.8e-3}
FLOAT16 = 1e-3
RACE = "RACE DETECTED"
CASES = ("random", "no decay", "strong decay", "forget", "mixed decay", "zero keys", "cosine 0.99")
SHAPES = {
    "two heads of a key head": dict(batch=1, time=200, key_heads=1, heads=2, key_dim=64, value_dim=64),
    "many blocks": dict(batch=1, time=700, key_heads=1, heads=1, key_dim=64, value_dim=64),
    "whole blocks": dict(batch=2, time=512, key_heads=1, heads=1, key_dim=64, value_dim=64),
    "Mamba-2": dict(batch=1, time=300, key_heads=1, heads=2, key_dim=128, value_dim=64),
    "two tiles of a head": dict(batch=1, time=130, key_heads=2, heads=2, key_dim=128, value_dim=128),
    "less than a block": dict(batch=1, time=70, key_heads=1, heads=1, key_dim=64, value_dim=64),
}
WHOLE = kernel.Config(multiprocessors=1, waves=0.0)  # one program for all tiles of a key head
SPLIT = kernel.Config(stages=1, states=1)  # as many as there are tiles


@pytest.fixture(autouse=True)
def no_races(capfd):
    """The interpreter prints each race that it sees, and goes on."""
    yield
    assert RACE not in capfd.readouterr().out


@functools.cache
def compiled(config):
    """A jitted (arguments, cotangents) -> (o, states, gradients) by the kernels, or by the chunked form (None)."""

    def op(q, k, u, log_decay, weights):
        f = fenwick(q, k, u, None, log_decay, weights, None, None)
        return fenwick_chunked(f, 64) if config is None else pallas_log_linear.laid_out(f, config, INTERPRET)

    @jax.jit
    def run(arguments, cotangents):
        out, pull = jax.vjp(op, *arguments)
        return *out, *pull(cotangents)

    return run


def case(name: str, shape: str, levels: int, dtype=jnp.bfloat16):
    """(q, k, u, log_decay, level_weights) and cotangents."""
    (q, k, u, _, log_decay, state), (d_o, _) = recurrence_case(name, dtype, **SHAPES[shape])
    rng = np.random.default_rng(1)
    weights = jnp.asarray(rng.normal(size=(*u.shape[:3], levels)), jnp.float32)
    d_states = jnp.asarray(rng.normal(size=(*state.shape[:2], levels, *state.shape[2:])), jnp.float32)
    return (q, k, u, log_decay, weights), (d_o, d_states)


def compare(arguments, cotangents, config):
    """The kernels' results, once they are as right as the chunked form."""
    q, k, u, log_decay, weights = arguments
    results = compiled(config)(arguments, cotangents)
    states, zero = jnp.zeros_like(cotangents[1]), log_decay * 0
    everything = q, k, u, zero, log_decay, weights, states
    out, gradients = fenwick_and_gradients(everything, None, np.zeros(q.shape[0], np.int32), cotangents)
    truth = *out, *gradients[:3], *gradients[4:6]
    errors = {n: relative_rms(r, t) for n, r, t in zip(NAMES, results, truth, strict=True)}
    bounds = dict.fromkeys(NAMES, FLOAT16)
    if u.dtype == jnp.bfloat16:
        others = compiled(None)(arguments, cotangents)
        bounds = {n: max(RATIO * relative_rms(r, t), FLOORS[n]) for n, r, t in zip(NAMES, others, truth, strict=True)}
    assert all(errors[n] <= bounds[n] for n in NAMES), {n: (errors[n], bounds[n]) for n in NAMES}


def test_outputs_states_and_gradients_equal_the_oracle():
    """One whole block, which the tokens of the open one read, and two heads whose gradients of q and k are summed."""
    compare(*case("random", "two heads of a key head", 9), WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize("levels", (1, 3, 8, 10, 13))
@pytest.mark.parametrize("shape", ("many blocks", "whole blocks"))
def test_any_number_of_levels(shape, levels):
    """Fewer than a block has, fewer than the row has, and more."""
    compare(*case("random", shape, levels), WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_input(name):
    compare(*case(name, "many blocks", 10), WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("config", (WHOLE, SPLIT), ids=("whole", "split"))
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, config, dtype):
    compare(*case("random", shape, 12, jnp.dtype(dtype)), config)


@pytest.mark.slow
def test_vmap_equals_one_at_a_time():
    first, cotangents = case("random", "less than a block", 9)
    second, _ = case("mixed decay", "less than a block", 9)
    both = [jnp.stack(pair) for pair in zip(first, second, strict=True)]
    mapped = jax.vmap(compiled(WHOLE), (0, None))(both, cotangents)
    for i, arguments in enumerate((first, second)):
        for value, reference in zip(mapped, compiled(WHOLE)(arguments, cotangents), strict=True):
            assert relative_rms(value[i], reference) < 1e-6


@pytest.mark.parametrize("slots", (1, 2, 3, 6))
def test_blocks_read_the_states_of_their_bits(slots):
    """Number and level of every state that a block reads, and what merges into it, against the levels of tokens."""
    levels = pallas_log_linear.INSIDE + slots
    stack, ends = [None] * slots, {}  # the blocks of each slot; of the state that ends before a block
    for block in range(40):
        number = int(kernel.number_of(block, slots))
        left, expected = number, {}
        for first in range(block):
            level = min(int(fenwick_level(block * 128, first * 128)), levels - 1) - pallas_log_linear.INSIDE
            expected.setdefault(level, []).append(first)
        while left:
            level = int(kernel.lowest_level(jnp.int32(left)))
            which = int(kernel.state_of(block, number, level))
            assert sorted(ends[which]) == expected.pop(level)
            left = int(kernel.without_lowest(left))
        assert not expected
        ones = int(log_linear_states.trailing_ones(jnp.int32(number)))
        merged = sum((stack[j] for j in range(ones)), [block])
        stack[min(ones, slots - 1)] = ends[block + 1] = merged


def test_what_the_kernels_do_not_serve_is_named():
    def ask(dtype=jnp.bfloat16, keys=64, values=64, time=16, state=None, ids=None):
        q, u = jnp.zeros((1, time, 1, keys), dtype), jnp.zeros((1, time, 2, values), jnp.bfloat16)
        gates, weights = jnp.zeros((1, time, 2)), jnp.zeros((1, time, 2, 5))
        f = fenwick(q, q, u, None, gates, weights, state, ids)
        return pallas_log_linear.log_linear_attention(f, 64, WHOLE, INTERPRET)

    for reason, options in (
        ("one dtype", dict(dtype=jnp.float16)),
        ("K = 32", dict(keys=32)),
        ("V = 80", dict(values=80)),
        ("without initial_state", dict(state=init_fenwick_state(1, 2, 5, 64, 64))),
        ("and segment_ids", dict(ids=jnp.ones((1, 16), jnp.int32))),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            ask(**options)
    o, states = ask(time=0)
    assert o.shape == (1, 0, 2, 64) and not np.asarray(states).any()
    q, gates = jnp.zeros((1, 16, 1, 64), jnp.bfloat16), jnp.zeros((1, 16, 1))
    if ON_GPU:
        return
    with pytest.raises(NotImplementedError, match="need an NVIDIA Hopper GPU"):
        ops.log_linear_attention(q, q, q, gates, gates[..., None], implementation="pallas")


def lowered(sizes, dtype, config):
    """The program of value and gradients at (B, T, G, H, K, V, L)."""
    batch, time, key_heads, heads, key_dim, value_dim, levels = sizes
    shape = jax.ShapeDtypeStruct
    keys, values = shape((batch, time, key_heads, key_dim), dtype), shape((batch, time, heads, value_dim), dtype)
    gates, weights = shape((batch, time, heads), jnp.float32), shape((batch, time, heads, levels), jnp.float32)
    states = shape((batch, heads, levels, key_dim, value_dim), jnp.float32)

    def run(arguments, cotangents):
        def op(q, k, u, log_decay, weights):
            return pallas_log_linear.laid_out(fenwick(q, k, u, None, log_decay, weights, None, None), config, None)

        out, pull = jax.vjp(op, *arguments)
        return out, pull(cotangents)

    return lower_cuda(run, (keys, keys, values, gates, weights), (values, states))


@pytest.mark.parametrize("row", kernel.TABLE, ids=str)
def test_every_row_of_the_table_lowers(row):
    """The walk and the read; the walk back, and the gradients of queries and of keys."""
    _, key_dim, value_dim, dtype = row
    assert mosaic_calls(lowered((1, 32768, 1, 48, key_dim, value_dim, 15), jnp.dtype(dtype), kernel.TABLE[row])) == 5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", kernel.DTYPES)
@pytest.mark.parametrize("key_dim", kernel.KEY_DIMS)
def test_the_safe_row_lowers_for_every_size(key_dim, dtype):
    """A row of 2^20 tokens too, whose gates have the most rows."""
    for value_dim, time in ((64, 300), (128, 1 << 20), (192, 70)):
        for key_heads, heads in ((1, 1), (1, 3), (4, 4), (2, 8)):
            sizes = 1, time, key_heads, heads, key_dim, value_dim, 21
            assert mosaic_calls(lowered(sizes, jnp.dtype(dtype), kernel.SAFE)) == 5


@pytest.mark.slow
# The assembler comes with the CUDA plugin, which a machine without a GPU need not have; lowering is tested without.
@pytest.mark.skipif(ptxas.missing() is not None, reason=str(ptxas.missing()))
@pytest.mark.parametrize("heads", (1, 48))
@pytest.mark.parametrize("row", kernel.TABLE, ids=str)
def test_no_row_of_the_table_spills(row, heads):
    """Some registers of bookkeeping at most, and no wgmma that waits for the one before."""
    _, key_dim, value_dim, dtype = row
    program = lowered((1, 131072, 1, heads, key_dim, value_dim, 18), jnp.dtype(dtype), kernel.TABLE[row])
    for kernel_usage in ptxas.usage(program):
        assert kernel_usage.spilled <= 48 and not kernel_usage.serialised, kernel_usage


def test_configs_are_looked_up():
    assert kernel.config_for("NVIDIA H200", 128, 64, jnp.bfloat16) is kernel.TABLE["NVIDIA H200", 128, 64, "bfloat16"]
    assert kernel.config_for("NVIDIA H100", 128, 64, jnp.bfloat16) is kernel.SAFE
