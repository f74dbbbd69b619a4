"""Log-linear linear attention's states and their cotangents by parts of a row: five programs in Mosaic's interpreter,
with its race detector, against the rules of states, and their tables. `test_kernels_log_linear.py`
has them in the operator."""

import os

os.environ.setdefault("NPROC", "8")  # a waiting warpgroup blocks a thread of XLA's pool: more of them than warpgroups

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from efla_jax.kernels import log_linear, log_linear_adjoint, log_linear_pairs, log_linear_parts, log_linear_states  # noqa: E402
from tests.oracle import relative_rms  # noqa: E402

# JAX_PLATFORMS=cuda,cpu runs the same comparison on a Hopper GPU, by the programs themselves.
ON_GPU = os.environ.get("JAX_PLATFORMS", "").startswith("cuda")
INTERPRET = None if ON_GPU else plgpu.InterpretGPUParams(detect_races=True)
# Factors rounded to bfloat16 once or twice, and E once more: 2^-8 / sqrt(3) / 2 each.
ROUNDED = 2e-3

pytestmark = pytest.mark.usefixtures("no_races")


def state_cotangents(q, d_o, gates, last, whole: int, slots: int) -> np.ndarray:
    """E [N, V, K] float64 of one head's blocks by the rule of states: of what reads a state and what it merges into."""
    blocks, size = q.shape[1] // 128, q.shape[3]
    q, d_o = (np.asarray(x, np.float64)[0, :, 0].reshape(blocks, 128, size) for x in (q, d_o))
    vectors, levels, fade = (np.asarray(x, np.float64)[0] for x in gates)
    spread = np.zeros((blocks + 1, d_o.shape[2], size))
    for state in range(whole, 0, -1):
        level = int(log_linear.lowest_level(jnp.int32(log_linear.number_of(state, slots))))
        after = state + (1 << level)
        found = fade[after - 1, level] * spread[after] if after <= whole else np.asarray(last, np.float64)[0, level]
        for block in range(state, min(after, blocks)):
            weight = levels[block, log_linear_pairs.INSIDE + level]
            weight = weight * np.exp2(vectors[block, 0] + fade[block, log_linear_pairs.SINCE + level])
            found = found + (d_o[block] * weight[:, None]).T @ q[block]
        spread[state] = found
    return spread[1:]


def states(k, u, gates, whole: int, slots: int) -> list:
    """The state [V, K] float64 of one head that ends before each block, and None before block 0, by binary carry."""
    blocks, size = k.shape[1] // 128, k.shape[3]
    k, u = (np.asarray(x, np.float64)[0, :, 0].reshape(blocks, 128, size) for x in (k, u))
    vectors, _, fade = (np.asarray(x, np.float64)[0] for x in gates)
    found: list = [None]
    for block in range(whole):
        state = (u[block] * vectors[block, 1][:, None]).T @ k[block]
        ones = int(log_linear_states.trailing_ones(jnp.int32(log_linear.number_of(block, slots))))
        found.append(sum((fade[block, j] * found[block + 1 - (1 << j)] for j in range(ones)), state))
    return found


SHAPES = pytest.mark.parametrize(
    "blocks, whole, slots", ((7, 6, 3), (4, 4, 2)), ids=("the last part has no root", "all have")
)


def drawn(blocks: int, slots: int, seed: int):
    """Two of q, k, u and dO, and gates: positive, so that no sum cancels."""
    rng = np.random.default_rng(seed)

    def some(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.random(shape), dtype)

    rows = 2, log_linear_pairs.INSIDE + slots
    gates = log_linear.Gates(*(some(1, blocks, count, 128) for count in rows), some(1, blocks, 128))
    return *(some(1, blocks * 128, 1, 64, dtype=jnp.bfloat16) for _ in range(2)), gates, some


@SHAPES
def test_states_by_parts_equal_binary_carry(blocks, whole, slots):
    k, u, gates, _ = drawn(blocks, slots, 1)
    config = log_linear.Config(multiprocessors=1, near=1)
    sizes = log_linear_parts.parts_of(k, u, slots, whole, config)
    run = jax.jit(lambda *x: log_linear_parts.states_of(*x, sizes, config=config, interpret=INTERPRET))
    inside, roots, last = run(k, u, gates)
    expected = states(k, u, gates, whole, slots)
    for state in range(1, whole + 1):
        if state % 2 == 0:
            assert relative_rms(roots[0, state // 2 - 1], expected[state]) < ROUNDED
        elif state < blocks:
            assert relative_rms(inside[0, state], expected[state]) < ROUNDED
    number = int(log_linear.number_of(whole, slots))
    for level in (level for level in range(slots) if number >> level & 1):
        assert relative_rms(last[0, level], expected[whole - (number & ((1 << level) - 1))]) < ROUNDED


@SHAPES
def test_cotangents_of_states_by_parts_equal_their_rule(blocks, whole, slots):
    q, d_o, gates, some = drawn(blocks, slots, 2)
    states, last = some(1, blocks, 64, 64, dtype=jnp.bfloat16), some(1, slots, 64, 64)
    roots = states[:, 2::2]
    config = log_linear.Config(multiprocessors=1, near=1)
    sizes = log_linear_parts.parts_of(q, d_o, slots, whole, config)
    run = jax.jit(lambda *x: log_linear_adjoint.adjoint(*x, sizes, config=config, interpret=INTERPRET))
    spread, merged = run(q, d_o, gates, states, roots, last)
    expected = state_cotangents(q, d_o, gates, last, whole, slots)
    assert relative_rms(spread[0], expected[:blocks]) < ROUNDED
    for state in range(1, whole):
        level = int(log_linear.lowest_level(jnp.int32(state)))
        after = state + (1 << level)
        if after <= whole:
            product = np.sum(np.asarray(states[0, state], np.float64) * expected[after - 1])
            np.testing.assert_allclose(merged[0, state, 0], product, rtol=1e-3)


def sizes_of(blocks: int, whole: int, slots: int, near: int) -> log_linear_parts.Parts:
    return log_linear_parts.Parts(1, blocks, whole, 64, 64, 1, 1, slots, near)


@pytest.mark.parametrize("blocks, open_block", ((8, 0), (21, 1), (70, 0), (300, 1)))
@pytest.mark.parametrize("slots, near", ((9, 3), (4, 3), (3, 1)))
def test_every_read_of_a_root_is_in_one_sum(blocks, open_block, slots, near):
    """By the rule of blocks and states: of every block, the levels of at least `near`."""
    sizes, found = sizes_of(blocks, blocks - open_block, slots, near), []
    into = {}
    for root, (level, above, first, count) in enumerate(sizes.merges.tolist(), 1):
        into |= dict.fromkeys(range(first, first + count), (root, level))
        upper = log_linear.lowest_level(jnp.int32(log_linear.number_of(root << near, slots)))
        assert level == int(upper) - near
        after = root + (1 << level)
        assert above == (sizes.level(after) if after <= sizes.roots else -1)
    for slot, first, count, which in sizes.reads.tolist():
        root, level = into.get(which, (0, -1))
        assert count <= log_linear_parts.SPAN and (count == 0 or slot == near + level)
        found += [(block, slot, root << near) for block in range(first, first + count)]
    expected = []
    for block in range(blocks):
        number = int(log_linear.number_of(block, slots))
        for slot in range(near, slots):
            if number >> slot & 1:
                expected.append((block, slot, log_linear.state_of(block, number, slot)))
    assert sorted(found) == sorted(expected)
