"""The log-linear delta rule's kernels in Mosaic's interpreter, with its race detector, against the float64 oracle; and
their lowering for CUDA."""

import os

os.environ.setdefault("NPROC", "8")  # a waiting warpgroup blocks a thread of XLA's pool: more of them than warpgroups

import functools  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from efla_jax import ops  # noqa: E402
from efla_jax.kernels import log_linear_delta as kernel  # noqa: E402
from efla_jax.kernels import log_linear_delta_gradients as gradients  # noqa: E402
from efla_jax.kernels import log_linear_delta_read as reads  # noqa: E402
from efla_jax.kernels import mosaic  # noqa: E402
from efla_jax.ops import pallas_log_linear_delta  # noqa: E402
from efla_jax.ops.fenwick import FenwickState, fenwick, fenwick_level  # noqa: E402
from efla_jax.ops.fenwick_chunked import fenwick_chunked  # noqa: E402
from tests import ptxas  # noqa: E402
from tests.cases import prefix, recurrence_case  # noqa: E402
from tests.lowering import lower_cuda, mosaic_calls  # noqa: E402
from tests.oracle import fenwick_and_gradients, relative_rms  # noqa: E402

# JAX_PLATFORMS=cuda,cpu runs the same comparisons on a Hopper GPU, by the programs themselves.
ON_GPU = os.environ.get("JAX_PLATFORMS", "").startswith("cuda")
INTERPRET = None if ON_GPU else plgpu.InterpretGPUParams(detect_races=True)
NAMES = ("o", "states", "dq", "dk", "du", "derase", "dlog_decay", "dlevel_weights", "dinitial_states")
# As for linear attention's kernels: the same operands rounded to bfloat16 as in the chunked form, in another order, and
# sums of several gradients that were each rounded.
FLOOR, RATIO = 2.9e-3, 1.2
# Nodes, their cotangents and those of the queries pass memory in bfloat16, each rounded by half of 2^-8 / sqrt(3) times
# 1.4 = 1.6e-3: 2.8e-3 together, beside the 2.5e-3 of all the rest; for erase, a sum of the gradients of the queries, of
# either kind of node and of what nodes are made of, four times: 3.3e-3. The chunked form keeps float32.
FLOORS = dict.fromkeys(NAMES, FLOOR) | {"states": 3.7e-3, "dlog_decay": 3.7e-3, "derase": 4.4e-3}
# With no decay a token's dlog_decay is a sum over all that comes later, of terms that nearly cancel: products of states
# and their cotangents, of queries and states, each factor rounded to bfloat16 as it passes memory. It read 6.3e-3 where
# the chunked form, which keeps states and cotangents in float32, has 3.8e-3.
NO_DECAY = {"dlog_decay": 7e-3}
# dk is a sum of the gradients of the reads and of either kind of node, each rounded to bfloat16 in memory, where the
# chunked form has float32; keys that are nearly parallel cancel some of it. It read up to 1.22 times that form's error.
RATIOS = dict.fromkeys(NAMES, RATIO) | {"dk": 1.3}
FLOAT16 = 1e-3
CASES = ("random", "no decay", "strong decay", "forget", "mixed decay", "zero keys", "cosine 0.99", "erase up to 2")
SHAPES = {
    "one head": dict(batch=1, time=140, key_heads=1, heads=1, key_dim=64, value_dim=64),
    "two rows": dict(batch=2, time=512, key_heads=1, heads=2, key_dim=64, value_dim=64),
    "whole blocks": dict(batch=1, time=256, key_heads=1, heads=2, key_dim=64, value_dim=64),
    "many blocks": dict(batch=1, time=700, key_heads=1, heads=1, key_dim=64, value_dim=64),
    "keys of 128": dict(batch=1, time=300, key_heads=1, heads=2, key_dim=128, value_dim=128),
    "two tiles and a part": dict(batch=2, time=256, key_heads=2, heads=2, key_dim=64, value_dim=160),
}
CONFIG = kernel.Config()

pytestmark = pytest.mark.usefixtures("no_races")


@functools.cache
def compiled(config):
    """A jitted (arguments, states, position, ids, cotangents) -> (o, states, gradients) by the kernels, or by the
    chunked form (None)."""

    def op(*arguments, position, ids):
        *arguments, states = arguments
        f = fenwick(*arguments, None if states is None else FenwickState(states, position), ids)
        return fenwick_chunked(f, 64) if config is None else pallas_log_linear_delta.laid_out(f, config, INTERPRET)

    @jax.jit
    def run(arguments, states, position, ids, cotangents):
        out, pull = jax.vjp(functools.partial(op, position=position, ids=ids), *arguments, states)
        return *out, *pull(cotangents)[: 6 + (states is not None)]

    return run


def row_of(lengths, time):
    """Ids [1, T] of documents of these lengths, the last one to the end."""
    return np.repeat(np.arange(1, len(lengths) + 2), [*lengths, time])[None, :time].astype(np.int32)


def case(name: str, shape: str, levels: int, dtype=jnp.bfloat16):
    """(q, k, u, erase, log_decay, level_weights) and cotangents."""
    (*arguments, state), (d_o, _) = recurrence_case(name, dtype, **SHAPES[shape])
    rng = np.random.default_rng(1)
    weights = jnp.asarray(rng.normal(size=(*d_o.shape[:3], levels)), jnp.float32)
    d_states = jnp.asarray(rng.normal(size=(*state.shape[:2], levels, *state.shape[2:])), jnp.float32)
    return (*arguments, weights), (d_o, d_states)


def compare(arguments, cotangents, floors=FLOORS, position=None, ids=None):
    """The kernels' results, once they are as right as the chunked form. position [B]: of a prefix."""
    batch, zeros, live = arguments[0].shape[0], jnp.zeros_like(cotangents[1]), None
    start, states = np.zeros(batch, np.int32), zeros
    if position is not None:
        start = np.asarray(position, np.int32)
        states, live = prefix(start, zeros)
    more = None if position is None else states, jnp.asarray(start), None if ids is None else jnp.asarray(ids)
    out, slopes = fenwick_and_gradients((*arguments, states), ids, start, cotangents)
    truth = *out, *slopes[: 6 + (position is not None)]

    def errors_of(config):
        found = compiled(config)(arguments, *more, cotangents)
        errors = {}
        for name, result, right in zip(NAMES, found, truth, strict=False):
            if name == "dinitial_states":  # slots that the prefix has not are none of its state
                result, right = (np.where(live[:, None, :, None, None], x, 0.0) for x in (result, right))
            errors[name] = relative_rms(result, right)
        return errors

    errors, bounds = errors_of(CONFIG), dict.fromkeys(NAMES, FLOAT16)
    if arguments[2].dtype == jnp.bfloat16:
        bounds = {n: max(RATIOS[n] * error, floors[n]) for n, error in errors_of(None).items()}
    assert all(errors[n] <= bounds[n] for n in errors), {n: (errors[n], bounds[n]) for n in errors}


def test_outputs_states_and_gradients_equal_the_oracle():
    """One whole block, which the tokens of the open one read, and tokens that erase nothing, or next to nothing, whose
    derase has a form of its own; documents below, and their trees in a file of their own
    (test_kernels_log_linear_delta_tree.py)."""
    (q, k, u, erase, *rest), cotangents = case("random", "one head", 4)
    erase = erase.at[:, ::3].set(0.0).at[:, 1::9].set(0.001)
    compare((q, k, u, erase, *rest), cotangents)


@pytest.mark.slow
def test_a_document_and_a_prefix_share_a_row():
    """Documents of whole cells and of shared ones behind a prefix, which a block that goes on with it reads."""
    arguments, cotangents = case("random", "one head", 9)
    compare(arguments, cotangents, position=(1100,), ids=row_of((60,), 140))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ((), (300, 290), (129, 1, 127, 128, 64, 65), (10, 100, 60, 90)), ids=str)
@pytest.mark.parametrize("levels", (3, 12))
def test_documents_equal_the_oracle(lengths, levels):
    arguments, cotangents = case("random", "many blocks", levels)
    compare(arguments, cotangents, ids=row_of(lengths, 700))
    compare(arguments, cotangents, position=(200,), ids=row_of(lengths, 700))


@pytest.mark.slow
@pytest.mark.parametrize("levels", (1, 8, 10))
@pytest.mark.parametrize("position", ((0, 128), (5, 130), (384, 127), (1000, 4000)), ids=str)
def test_a_prefix_of_any_length_goes_on(position, levels):
    compare(*case("random", "two rows", levels), position=position)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("no decay", "forget", "cosine 0.99", "erase up to 2"))
def test_every_kind_of_input_in_packed_and_padded_rows(name):
    """Of two rows one has nothing but padding."""
    arguments, cotangents = case(name, "two rows", 10)
    ids = np.concatenate([row_of((140, 200), 512), np.zeros((1, 512), np.int32)])
    ids[:, 100:110] = 0
    floors = FLOORS | (NO_DECAY if name == "no decay" else {})
    compare(arguments, cotangents, floors, (3, 260), ids)


@pytest.mark.slow
@pytest.mark.parametrize("time", (1, 63, 128))
def test_short_rows(time):
    """As one document and as two, of which neither has a whole block."""
    arguments, (d_o, d_states) = case("random", "one head", 9)
    short = tuple(a[:, :time] for a in arguments), (d_o[:, :time], d_states)
    compare(*short)
    compare(*short, ids=row_of((20,), time))


@pytest.mark.slow
def test_whole_rows_equal_the_oracle():
    compare(*case("random", "whole blocks", 11))


@pytest.mark.slow
@pytest.mark.parametrize("levels", (1, 3, 8, 10, 13))
def test_any_number_of_levels(levels):
    """Fewer than a block has, fewer than the row has, and more."""
    compare(*case("random", "many blocks", levels))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_input(name):
    compare(*case(name, "many blocks", 12), FLOORS | (NO_DECAY if name == "no decay" else {}))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, dtype):
    compare(*case("random", shape, 12, jnp.dtype(dtype)))


@pytest.mark.slow
def test_vmap_equals_one_at_a_time():
    first, cotangents = case("random", "whole blocks", 9)
    second, _ = case("mixed decay", "whole blocks", 9)
    both = [jnp.stack(pair) for pair in zip(first, second, strict=True)]
    run = compiled(CONFIG)
    mapped = jax.vmap(lambda x: run(x, None, None, None, cotangents))(both)
    for i, arguments in enumerate((first, second)):
        for value, reference in zip(mapped, run(arguments, None, None, None, cotangents), strict=True):
            assert relative_rms(value[i], reference) < 1e-6


@pytest.mark.parametrize("count", (1, 2, 5, 8, 13, 32))
def test_blocks_read_the_nodes_of_their_bits(count):
    """The level of every node that a block reads, against the levels of tokens; and every reader counted once, by the
    block that reads and by the program that sums over a node's readers."""
    keys = jax.ShapeDtypeStruct((1, 128 * count, 1, 64), jnp.bfloat16)
    sizes, found = kernel.Sizes.of(keys, keys), {}
    half = reads.half_of(sizes)

    def group_of(level):
        return next(i for i, group in enumerate(sizes.groups) if level in group)

    assert sizes.depth == (count - 1).bit_length() and sizes.kept == (half,) * sizes.depth
    for block in range(count):
        task, left = reads.Task(0, jnp.int32(0), jnp.int32(block), 0, sizes, kernel.Places()), block
        while left:
            level = int(reads.lowest_level(jnp.int32(left)))
            first = left - (1 << level)
            node = int(task.node(level))
            assert node % 2 == 0 and node == first >> level
            assert set(fenwick_level(block, np.arange(first, left)).tolist()) == {level + 1}
            found[group_of(level), int(task.kept(level))] = level, block, node
            left = int(reads.without_lowest(left))
    summed, behind = {}, []
    for level in range(sizes.depth):
        each = min(1 << level, gradients.SPAN)
        for program in range(half // each):
            readers = gradients.Readers.of(jnp.int32(program), sizes, level, each)
            for i in range(int(readers.valid)):
                node = 2 * (program * each >> level)
                assert bool(readers.first) == (node == 0)
                summed[group_of(level), int(readers.kept) + i] = level, int(readers.block) + i, node
                if node:
                    behind.append((group_of(level), int(readers.behind) + i))
    assert summed == found and len(found) == sum(block.bit_count() for block in range(count))
    assert len(set(behind)) == len(behind) and all(
        0 <= place < len(group) * half - gradients.before_first(group)
        for i, group in enumerate(sizes.groups)
        for which, place in behind
        if which == i
    )


def test_what_the_kernels_do_not_serve_is_named():
    def ask(dtype=jnp.bfloat16, keys=64, time=128):
        q, u = jnp.zeros((1, time, 1, keys), dtype), jnp.zeros((1, time, 2, 64), jnp.bfloat16)
        gates, weights = jnp.zeros((1, time, 2)), jnp.zeros((1, time, 2, 5))
        f = fenwick(q, q, u, gates, gates, weights, None, None)
        return pallas_log_linear_delta.log_linear_delta_rule(f, 64, CONFIG, INTERPRET)

    for reason, options in (
        ("one dtype", dict(dtype=jnp.float16)),
        ("K = 32", dict(keys=32)),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            ask(**options)
    o, states = ask(time=0)
    assert o.shape == (1, 0, 2, 64) and not np.asarray(states).any()
    if ON_GPU:
        return
    q, gates = jnp.zeros((1, 128, 1, 64), jnp.bfloat16), jnp.zeros((1, 128, 1))
    with pytest.raises(NotImplementedError, match="need an NVIDIA Hopper GPU"):
        ops.log_linear_delta_rule(q, q, q, gates, gates, gates[..., None], implementation="pallas")


def lowered(sizes, dtype, config, packed=False):
    """The program of value and gradients at (B, T, G, H, K, V, L); packed: of documents behind a prefix."""
    batch, time, key_heads, heads, key_dim, value_dim, levels = sizes
    shape = jax.ShapeDtypeStruct
    keys, values = shape((batch, time, key_heads, key_dim), dtype), shape((batch, time, heads, value_dim), dtype)
    gates, weights = shape((batch, time, heads), jnp.float32), shape((batch, time, heads, levels), jnp.float32)
    states = shape((batch, heads, levels, key_dim, value_dim), jnp.float32)

    ids, position = shape((batch, time), jnp.int32), shape((batch,), jnp.int32)

    def run(arguments, states, position, ids, cotangents):
        def op(*arguments):
            more = (FenwickState(arguments[-1], position), ids) if packed else (None, None)
            return pallas_log_linear_delta.laid_out(fenwick(*arguments[:-1], *more), config, None)

        out, pull = jax.vjp(op, *arguments, states)
        return out, pull(cotangents)

    return lower_cuda(run, (keys, keys, values, gates, gates, weights), states, position, ids, (values, states))


def test_auto_takes_the_kernels_on_a_hopper_gpu():
    shape = jax.ShapeDtypeStruct
    keys, gates = shape((1, 128, 1, 64), jnp.bfloat16), shape((1, 128, 1), jnp.float32)
    given = keys, keys, keys, gates, gates, shape((1, 128, 1, 8), jnp.float32)
    assert mosaic_calls(lower_cuda(lambda *x: ops.log_linear_delta_rule(*x), *given)) == 3  # inverse, nodes, reads
    assert not mosaic_calls(lower_cuda(lambda *x: ops.log_linear_delta_rule(*x), *given, device_kind="NVIDIA A100"))


def kernels(time: int) -> int:
    """Of value and gradients: the inverse, the nodes, the reads; the queries, the descent, the sums over one, two, four
    and more readers; the steps of first chunks and of all, the nodes' gradients; of every level a merge and its two
    gradients."""
    depth = (-(-time // 128) - 1).bit_length()
    return 3 + 1 + (depth > 0) + min(depth, 4) + 3 + 3 * ((time // 128).bit_length() - 1)


def test_a_row_of_the_table_lowers():
    """The others, and longer rows, below."""
    row = "NVIDIA H200", 128, "bfloat16"
    assert mosaic_calls(lowered((1, 1024, 16, 16, 128, 128, 11), jnp.bfloat16, kernel.TABLE[row])) == kernels(1024)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", mosaic.DTYPES)
@pytest.mark.parametrize("key_dim", kernel.KEY_DIMS)
def test_the_safe_row_lowers_for_every_size(key_dim, dtype):
    """A row of 2^20 tokens too, whose gates have the most rows."""
    for value_dim, time, key_heads, heads in ((64, 300, 1, 3), (128, 1 << 20, 1, 1), (192, 256, 2, 8)):
        sizes = 1, time, key_heads, heads, key_dim, value_dim, 21
        assert mosaic_calls(lowered(sizes, jnp.dtype(dtype), kernel.SAFE)) == kernels(time)
    assert mosaic_calls(lowered((2, 300, 1, 3, key_dim, 96, 10), jnp.dtype(dtype), kernel.SAFE, packed=True))


@pytest.mark.slow
# The assembler comes with the CUDA plugin, which a machine without a GPU need not have; lowering is tested without.
@pytest.mark.skipif(ptxas.missing() is not None, reason=str(ptxas.missing()))
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("row", kernel.TABLE, ids=str)
def test_no_row_of_the_table_spills(row, packed):
    """Some registers of bookkeeping at most, and no wgmma that waits for the one before."""
    _, key_dim, dtype = row
    time, levels = (1000, 9) if packed else (131072, 18)
    program = lowered((1, time, 16, 16, key_dim, key_dim, levels), jnp.dtype(dtype), kernel.TABLE[row], packed)
    for kernel_usage in ptxas.usage(program):
        assert kernel_usage.spilled <= 96 and not kernel_usage.serialised, kernel_usage


def test_configs_are_looked_up():
    assert kernel.config_for("NVIDIA H200", 128, jnp.bfloat16) is kernel.TABLE["NVIDIA H200", 128, "bfloat16"]
    assert kernel.config_for("NVIDIA H100", 128, jnp.bfloat16) is kernel.SAFE
