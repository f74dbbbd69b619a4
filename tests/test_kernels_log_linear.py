"""Log-linear linear attention's kernels in Mosaic's interpreter, with its race detector, against the float64 oracle;
and their lowering for CUDA."""

import os

os.environ.setdefault("NPROC", "8")  # a waiting warpgroup blocks a thread of XLA's pool: more of them than warpgroups

import dataclasses  # noqa: E402
import functools  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from efla_jax import ops  # noqa: E402
from efla_jax.kernels import log_linear as kernel  # noqa: E402
from efla_jax.kernels import log_linear_pairs, log_linear_states, mosaic  # noqa: E402
from efla_jax.ops import pallas_log_linear  # noqa: E402
from efla_jax.ops.fenwick import FenwickState, fenwick, fenwick_level  # noqa: E402
from efla_jax.ops.fenwick_chunked import fenwick_chunked  # noqa: E402
from efla_jax.ops.log_linear_cells import cell_count, cells  # noqa: E402
from efla_jax.ops.segments import positions, segments  # noqa: E402
from tests import ptxas  # noqa: E402
from tests.cases import packed_ids, prefix, recurrence_case  # noqa: E402
from tests.lowering import lower_cuda, mosaic_calls  # noqa: E402
from tests.oracle import fenwick_and_gradients, relative_rms  # noqa: E402

# JAX_PLATFORMS=cuda,cpu runs the same comparisons on a Hopper GPU, by the programs themselves.
ON_GPU = os.environ.get("JAX_PLATFORMS", "").startswith("cuda")
INTERPRET = None if ON_GPU else plgpu.InterpretGPUParams(detect_races=True)
NAMES = ("o", "states", "dq", "dk", "du", "dlog_decay", "dlevel_weights", "dinitial_states")
# As for the flat operator: the same operands rounded to bfloat16 as in the chunked form, in another order. dk and du
# are sums of two gradients in bfloat16, one of pairs and one of states, half of 2^-8 / sqrt(3) each.
FLOOR, RATIO = 2.9e-3, 1.2
# With no decay products of states and their cotangents are most of dlog_decay. Both are kept in bfloat16, and the
# cotangents rounded once more as an operand, each by half of 2^-8 / sqrt(3) times 1.4 = 1.6e-3: 2.7e-3 together, beside
# the 2.4e-3 of all the rest, 3.6e-3 in all; and as tokens share what is rounded of a state, a sample is one of few
# numbers: 700 tokens of one head read 4.1e-3. The chunked form keeps float32.
FLOORS = dict.fromkeys(NAMES, FLOOR) | {"dlog_decay": 4.5e-3}
FLOAT16 = 1e-3
CASES = ("random", "no decay", "strong decay", "forget", "mixed decay", "zero keys", "cosine 0.99")
SHAPES = {
    "two heads of a key head": dict(batch=1, time=200, key_heads=1, heads=2, key_dim=64, value_dim=64),
    "many blocks": dict(batch=1, time=700, key_heads=1, heads=1, key_dim=64, value_dim=64),
    "whole blocks": dict(batch=2, time=512, key_heads=1, heads=1, key_dim=64, value_dim=64),
    "Mamba-2": dict(batch=1, time=300, key_heads=1, heads=2, key_dim=128, value_dim=64),
    "two tiles of a head": dict(batch=1, time=130, key_heads=2, heads=2, key_dim=128, value_dim=128),
    "four tiles of a key head": dict(batch=1, time=300, key_heads=1, heads=4, key_dim=64, value_dim=64),
    "less than a block": dict(batch=1, time=70, key_heads=1, heads=1, key_dim=64, value_dim=64),
}
WHOLE = kernel.Config(multiprocessors=1, waves=0.0)  # one program for all tiles of a key head
SPLIT = kernel.Config(stages=1, states=1)  # as many as there are tiles

pytestmark = pytest.mark.usefixtures("no_races")


@functools.cache
def compiled(config):
    """A jitted (arguments, states, position, ids, cotangents) -> (o, states, gradients) by the kernels, or by the
    chunked form (None)."""

    def op(q, k, u, log_decay, weights, states, position, ids):
        state = None if states is None else FenwickState(states, position)
        f = fenwick(q, k, u, None, log_decay, weights, state, ids)
        return fenwick_chunked(f, 64) if config is None else pallas_log_linear.laid_out(f, config, INTERPRET)

    @jax.jit
    def run(arguments, states, position, ids, cotangents):
        out, pull = jax.vjp(lambda *given: op(*given, position, ids), *arguments, states)
        return *out, *pull(cotangents)[: 5 + (states is not None)]

    return run


def case(name: str, shape: str, levels: int, dtype=jnp.bfloat16):
    """(q, k, u, log_decay, level_weights) and cotangents."""
    (q, k, u, _, log_decay, state), (d_o, _) = recurrence_case(name, dtype, **SHAPES[shape])
    rng = np.random.default_rng(1)
    weights = jnp.asarray(rng.normal(size=(*u.shape[:3], levels)), jnp.float32)
    d_states = jnp.asarray(rng.normal(size=(*state.shape[:2], levels, *state.shape[2:])), jnp.float32)
    return (q, k, u, log_decay, weights), (d_o, d_states)


def compare(arguments, cotangents, config, position=None, ids=None):
    """The kernels' results, once they are as right as the chunked form. position [B]: of a prefix."""
    q, _, u, log_decay, _ = arguments
    states = zeros = jnp.zeros_like(cotangents[1])
    start, live = np.zeros(q.shape[0], np.int32), None
    if position is not None:
        start = np.asarray(position, np.int32)
        states, live = prefix(start, zeros)
    more = None if position is None else states, jnp.asarray(start), None if ids is None else jnp.asarray(ids)
    results = compiled(config)(arguments, *more, cotangents)
    everything = *arguments[:3], log_decay * 0, *arguments[3:], states
    out, gradients = fenwick_and_gradients(everything, ids, start, cotangents)
    truth = *out, *gradients[:3], *gradients[4:]
    others = compiled(None)(arguments, *more, cotangents) if u.dtype == jnp.bfloat16 else None
    found = {}
    for i, name in enumerate(NAMES[: len(results)]):
        result, right = np.asarray(results[i], np.float32), truth[i]
        if name == "dinitial_states":  # slots that the prefix has not are none of its state
            result, right = (np.where(live[:, None, :, None, None], x, 0.0) for x in (result, right))
        bound = FLOAT16 if others is None else max(RATIO * relative_rms(others[i], truth[i]), FLOORS[name])
        found[name] = relative_rms(result, right), bound
    assert all(error <= bound for error, bound in found.values()), found


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


# Parts of two and of four blocks: with a root each, with an open block, with more levels and with fewer than a row has.
PARTS = {
    "an open block": (1, "two heads of a key head", 300, 10),
    "no open block": (1, "whole blocks", 1024, 12),
    "the last part has no root": (2, "many blocks", 900, 13),
    "the top level is a chain": (1, "many blocks", 1300, 10),
    "K = 128": (1, "Mamba-2", 640, 11),
    "two tiles of a head": (1, "two tiles of a head", 520, 11),
    "four tiles of a key head": (1, "four tiles of a key head", 300, 10),
}


def compare_parts(near: int, shape: str, time: int, levels: int, programs: int):
    (q, k, u, _, log_decay, state), (d_o, _) = recurrence_case("random", jnp.bfloat16, **SHAPES[shape] | {"time": time})
    rng = np.random.default_rng(2)
    weights = jnp.asarray(rng.normal(size=(*u.shape[:3], levels)), jnp.float32)
    d_states = jnp.asarray(rng.normal(size=(*state.shape[:2], levels, *state.shape[2:])), jnp.float32)
    config = dataclasses.replace(WHOLE, near=near, multiprocessors=programs)
    compare((q, k, u, log_decay, weights), (d_o, d_states), config)


@pytest.mark.slow
@pytest.mark.parametrize("programs", (1, 3))
@pytest.mark.parametrize("part", PARTS)
def test_cotangents_of_states_in_any_parts(part, programs):
    compare_parts(*PARTS[part], programs)


def row_of(lengths, time):
    """Ids [1, T] of documents of these lengths, the last one to the end."""
    return np.repeat(np.arange(1, len(lengths) + 2), [*lengths, time])[None, :time].astype(np.int32)


def test_documents_of_whole_and_shared_cells_equal_the_oracle():
    arguments, cotangents = case("random", "two heads of a key head", 9)
    compare(arguments, cotangents, WHOLE, ids=row_of((150, 20), 200))


@pytest.mark.slow
@pytest.mark.parametrize("levels", (1, 8, 10))
@pytest.mark.parametrize("position", ((0, 128), (5, 130), (384, 127), (1000, 4000)), ids=str)
def test_a_prefix_of_any_length_goes_on(position, levels):
    compare(*case("random", "whole blocks", levels), WHOLE, position)


@pytest.mark.slow
@pytest.mark.parametrize("levels", (3, 9, 12))
@pytest.mark.parametrize("lengths", ((), (300, 290), (129, 1, 127, 128, 64, 65), (10, 100, 60, 90)), ids=str)
def test_documents_behind_a_prefix(lengths, levels):
    arguments, cotangents = case("random", "many blocks", levels)
    compare(arguments, cotangents, SPLIT, (200,), row_of(lengths, 700))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_input_in_packed_and_padded_rows(name):
    """Of two rows one has nothing but padding."""
    arguments, cotangents = case(name, "whole blocks", 10)
    ids = np.concatenate([row_of((140, 200), 512), np.zeros((1, 512), np.int32)])
    ids[:, 100:110] = 0
    compare(arguments, cotangents, WHOLE, (3, 260), ids)
    compare(arguments, cotangents, WHOLE, ids=packed_ids(2, 512))


def test_a_row_of_padding_passes_on_what_it_began_with():
    """And the cotangents of its states: no program meets a token there."""
    compare(*case("random", "less than a block", 10), WHOLE, (260,), np.zeros((1, 70), np.int32))


def some_ids(rng, batch, time):
    """Documents of lengths around one, a few and a cell, and padding."""
    lengths = rng.choice([[1, 2, 3], [129, 128, 1], [60, 70, 127, 200], [129, 1, 127]][rng.integers(4)], (batch, time))
    ids = np.stack([np.repeat(np.arange(1, time + 1), row)[:time] for row in lengths])
    return np.where(rng.random(ids.shape) < 0.2 * rng.integers(2), 0, ids).astype(np.int32)


@pytest.mark.parametrize("seed", range(3))
def test_cells_hold_each_token_once_and_read_one_document(seed):
    rng = np.random.default_rng(seed)
    batch, time = 2, int(rng.choice([1, 5, 127, 128, 129, 300, 700, 1000]))
    ids, start = some_ids(rng, batch, time), rng.integers(0, 400, batch).astype(np.int32)
    real, position = ids != 0, np.asarray(positions(batch, time, jnp.asarray(ids), jnp.asarray(start)))
    starts = segments(jnp.asarray(ids)).starts
    before = np.where(np.cumsum(real, axis=1) > 0, position, start[:, None] - 1)
    found = jax.tree.map(np.asarray, cells(jnp.asarray(before), starts, jnp.asarray(real)))
    document = np.cumsum(np.asarray(starts), axis=1)
    for row in range(batch):
        tokens, slot = np.flatnonzero(real[row]), found.slot[row]
        assert (slot[~real[row]] == -1).all() and (np.diff(slot[tokens]) > 0).all()
        assert (found.source[row][slot[tokens]] == tokens).all() and (found.source[row] >= 0).sum() == len(tokens)
        cell, pieces = slot // 128, list(zip(document[row], position[row] // 128, strict=True))
        used = len(set(cell[tokens]))
        assert (found.place[row, used:] == -1).all() and used <= cell_count(time)
        for number in range(used):
            inside = tokens[cell[tokens] == number]
            first = inside[0]
            assert found.place[row, number] == position[row, first] // 128
            held = {pieces[t] for t in inside}
            assert all(where == 0 or (name, where) == pieces[first] for name, where in held)
            assert {t for t in tokens if pieces[t] in held} == set(inside)
            whole = bool((position[row, inside] % 128 == 127).any())
            assert found.whole[row, number] == whole and (len(held) == 1 or not whole)
            code = (document[row, inside] - document[row, first]) * 128 + position[row, inside] % 128
            assert (found.code[row, number, slot[inside] % 128] == code).all()
            following = tokens[cell[tokens] == number + 1]
            ends = len(following) > 0 and document[row, following[0]] != document[row, first]
            assert found.last[row, number] == ends


@pytest.mark.slow
def test_vmap_equals_one_at_a_time():
    first, cotangents = case("random", "less than a block", 9)
    second, _ = case("mixed decay", "less than a block", 9)
    both = [jnp.stack(pair) for pair in zip(first, second, strict=True)]
    mapped = jax.vmap(compiled(WHOLE), (0, None, None, None, None))(both, None, None, None, cotangents)
    for i, arguments in enumerate((first, second)):
        for value, reference in zip(mapped, compiled(WHOLE)(arguments, None, None, None, cotangents), strict=True):
            assert relative_rms(value[i], reference) < 1e-6


@pytest.mark.parametrize("slots", (1, 2, 3, 6))
def test_blocks_read_the_states_of_their_bits(slots):
    """Number and level of every state that a block reads, and what merges into it, against the levels of tokens."""
    levels = log_linear_pairs.INSIDE + slots
    stack, ends = [None] * slots, {}  # the blocks of each slot; of the state that ends before a block
    for block in range(40):
        number = int(kernel.number_of(block, slots))
        left, expected = number, {}
        for first in range(block):
            level = min(int(fenwick_level(block * 128, first * 128)), levels - 1) - log_linear_pairs.INSIDE
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
    def ask(dtype=jnp.bfloat16, keys=64, values=64, time=16):
        q, u = jnp.zeros((1, time, 1, keys), dtype), jnp.zeros((1, time, 2, values), jnp.bfloat16)
        gates, weights = jnp.zeros((1, time, 2)), jnp.zeros((1, time, 2, 5))
        f = fenwick(q, q, u, None, gates, weights, None, None)
        return pallas_log_linear.log_linear_attention(f, 64, WHOLE, INTERPRET)

    for reason, options in (
        ("one dtype", dict(dtype=jnp.float16)),
        ("K = 32", dict(keys=32)),
        ("V = 80", dict(values=80)),
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


def lowered(sizes, dtype, config, packed=False):
    """The program of value and gradients at (B, T, G, H, K, V, L); packed: of documents behind a prefix."""
    batch, time, key_heads, heads, key_dim, value_dim, levels = sizes
    shape = jax.ShapeDtypeStruct
    keys, values = shape((batch, time, key_heads, key_dim), dtype), shape((batch, time, heads, value_dim), dtype)
    gates, weights = shape((batch, time, heads), jnp.float32), shape((batch, time, heads, levels), jnp.float32)
    states = shape((batch, heads, levels, key_dim, value_dim), jnp.float32)
    ids, position = shape((batch, time), jnp.int32), shape((batch,), jnp.int32)

    def run(arguments, cotangents, states, position, ids):
        def op(q, k, u, log_decay, weights, states):
            more = (FenwickState(states, position), ids) if packed else (None, None)
            f = fenwick(q, k, u, None, log_decay, weights, *more)
            return pallas_log_linear.laid_out(f, config, None)

        out, pull = jax.vjp(op, *arguments, states)
        return out, pull(cotangents)

    return lower_cuda(run, (keys, keys, values, gates, weights), (values, states), states, position, ids)


@pytest.mark.parametrize("row", kernel.TABLE, ids=str)
def test_every_row_of_the_table_lowers(row):
    """The states' two programs and the read; the three of their cotangents, the gradients of queries and of keys."""
    _, key_dim, value_dim, dtype = row
    assert mosaic_calls(lowered((1, 32768, 1, 48, key_dim, value_dim, 15), jnp.dtype(dtype), kernel.TABLE[row])) == 8


@pytest.mark.slow
@pytest.mark.parametrize("dtype", mosaic.DTYPES)
@pytest.mark.parametrize("key_dim", kernel.KEY_DIMS)
def test_the_safe_row_lowers_for_every_size(key_dim, dtype):
    """A row of 2^20 tokens too, whose gates have the most rows."""
    for value_dim, time in ((64, 300), (128, 1 << 20), (192, 70)):
        for key_heads, heads in ((1, 1), (1, 3), (4, 4), (2, 8)):
            sizes = 1, time, key_heads, heads, key_dim, value_dim, 21
            for packed in (False, True) if time < 1 << 20 else (False,):
                parts = not packed and time > 1024
                assert mosaic_calls(lowered(sizes, jnp.dtype(dtype), kernel.SAFE, packed)) == (8 if parts else 5)


@pytest.mark.slow
# The assembler comes with the CUDA plugin, which a machine without a GPU need not have; lowering is tested without.
@pytest.mark.skipif(ptxas.missing() is not None, reason=str(ptxas.missing()))
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("heads", (1, 48))
@pytest.mark.parametrize("row", kernel.TABLE, ids=str)
def test_no_row_of_the_table_spills(row, heads, packed):
    """Some registers of bookkeeping at most, and no wgmma that waits for the one before. With documents the level of
    every pair is read from codes, which in the gradient of keys takes up to 44 registers of 240 too many. Cotangents of
    a part's levels take 32 of 240 too many: the form that ran and was measured on an H200."""
    _, key_dim, value_dim, dtype = row
    program = lowered((1, 131072, 1, heads, key_dim, value_dim, 18), jnp.dtype(dtype), kernel.TABLE[row], packed)
    for kernel_usage in ptxas.usage(program):
        assert kernel_usage.spilled <= (192 if packed else 128) and not kernel_usage.serialised, kernel_usage


def test_configs_are_looked_up():
    assert kernel.config_for("NVIDIA H200", 128, 64, jnp.bfloat16) is kernel.TABLE["NVIDIA H200", 128, 64, "bfloat16"]
    assert kernel.config_for("NVIDIA H100", 128, 64, jnp.bfloat16) is kernel.SAFE
