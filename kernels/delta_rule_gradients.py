"""The delta rule's backward on a Hopper GPU: `backward`, and its parallel part as a Pallas program in Mosaic GPU, which
takes chunks of C = 64 tokens of a row one by one, in any order.

    b = R . dO W^T        a = -strict(R . dP W^T)        X = e a        M = b . Q K^T + X . K K^T
    dQ = in . dO S^T + b K                dK = out . W D^T - e in . dP S^T + b^T Q + (X + X^T) K
    de = rowsum(a . K K^T) - rowsum(K . (in . dP S^T))

with the letters of `ops/chunked.py`: S the state at the chunk's start; D the cotangent of the state at its end, and
dP = dU, both from `delta_rule_reverse.py`; W = (I + A)^-1 (U - e in . K S) the vectors really written, made again from
what the forward saved: the inverse, the gate vectors and S.

One warpgroup issues loads, ahead as far as memory is free: what a chunk needs first is held twice, what it is done with
first is released first. Two compute: each makes W^T for its half of V; what its half of K gets from the states; one of
b and X; then its half of K of dQ and dK. Every product is of 64 x 64 tiles in shared memory, so that the interpreter
runs the program of the device.

The cotangent of the log decay is made of row and column sums of M, which nearly cancel when keys are nearly parallel:
they are taken of float32 products before anything is rounded. Only <S, D> is of rounded factors.

A key of 256 channels is two of 128: given W, which its forward saves, all of this is a sum over channels of K, but for
dQ and dK, whose columns they are. Each half of a chunk is a chunk to this program, and has all of V, tile after tile.

With raw keys (`delta_flow.py`) the same holds with s for e, T for the inverse, V for U and N for W. There is one more
vector, dV . V of each token, for d w, and dK has what the coefficients send along k.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels import delta_rule_wide as wide
from efla_jax.kernels.delta_flow import slopes
from efla_jax.kernels.delta_rule_reverse import (
    CHUNK,
    ERASE,
    GATES,
    INTO,
    OUT,
    SUM,
    TILE,
    ReverseConfig,
    Sizes,
    never_zero,
    reverse,
)
from efla_jax.kernels.mosaic import (
    MASKED,
    WGMMA,
    accumulated,
    by_column,
    by_row,
    index,
    narrow_indices,
    parameters,
    shared,
    transposed,
)

KEY_DIMS = (64, 128, 256)
VALUE_DIMS = (64, 128)  # at most two tiles, one for each compute warpgroup; with K = 256 any number
GROUPS = 2  # compute warpgroups
SLOTS = 2  # in which a chunk's or a tile's loads may lie
REGISTERS = 240, 24  # of a thread that computes, that loads: (2 * 240 + 24) * 128, what the threads start with
SUMS = 7  # vectors of one warpgroup, in this order; STATE is over rows of the state, the others over tokens
MIXED, COLUMN, READ, SEEN, LEFT, STATE, VALUE = range(SUMS)


# With K = 256: a chunk took the walk 3.4 us on an H200; the rest are estimates.
WIDE = ReverseConfig(walk=(3.4, 3.4), summary=(3.0, 3.0), combine=20.0)


class Inputs(NamedTuple):
    """Arguments of `gradients` in device memory; u is W if keys come in halves; documents may be absent, of_value and
    of_seen [B, H, T] are those of `delta_flow.Slopes`, with raw keys."""

    q: Any
    k: Any
    u: Any
    d_o: Any
    d_u: Any
    inverse: Any
    starts: Any
    ends: Any
    gates: Any
    erase: Any
    documents: Any = None
    of_value: Any = None
    of_seen: Any = None


class Memory(NamedTuple):
    """Shared memory of one program, everything in tiles of 64 columns: a slot for a chunk or for a tile of V."""

    keys: Any  # [1 + slots, K // 64, C, 64]: q, then k
    inverse: Any  # [slots, C, C]
    gates: Any  # [slots, GATES, C]
    vectors: Any  # [slots, 2 or 4, C]: erase, document; with raw keys of_value, of_seen
    u: Any  # [slots, C, 64]: u, or W
    values: Any  # [2, slots, C, 64]: dO, dP
    starts: Any  # [slots, K // 64, 64, 64]: S^T
    ends: Any  # [slots, K // 64, 64, 64]: D^T
    written: Any  # [2, 64, C]: W^T; then dQ and dK on their way out
    pairs: Any  # [2, C, C]: what W^T is made of; then b, X
    sums: Any  # [2, SUMS, C]
    results: Any  # [4, C]: d log_decay, d erase, k . (out . W D^T) of each token; with raw keys dV . V
    loaded: Any  # barriers of the loads: of k and all that is small [slots], of tiles [slots], of q
    loaded_tile: Any
    loaded_q: Any
    free: Any  # barriers of what may be overwritten, likewise
    free_tile: Any
    free_q: Any
    wrote: Any  # barriers between the two that compute
    mixed: Any
    summed: Any


class Chunk(NamedTuple):
    """Where a chunk's loads lie, and which warpgroup asks."""

    slot: Any
    tile_slots: list  # of the tiles of V
    places: list  # of the two in `pairs`, likewise
    group: Any
    place: Any  # of this warpgroup among slots and pairs
    tile: Any  # of K, that this warpgroup works on


def scratch(sizes: Sizes, dtype) -> list:
    """The fields of `Memory` in their order."""
    tiles = sizes.key_tiles
    return [
        shared(1 + SLOTS, tiles, CHUNK, TILE, dtype=dtype),
        shared(SLOTS, CHUNK, CHUNK, dtype=dtype),
        plgpu.SMEM((SLOTS, GATES, CHUNK), jnp.float32),
        plgpu.SMEM((SLOTS, 2 + 2 * sizes.raw_keys, CHUNK), jnp.float32),
        shared(SLOTS, CHUNK, TILE, dtype=dtype),
        shared(2, SLOTS, CHUNK, TILE, dtype=dtype),
        shared(SLOTS, tiles, TILE, TILE, dtype=dtype),
        shared(SLOTS, tiles, TILE, TILE, dtype=dtype),
        shared(2, TILE, CHUNK, dtype=dtype),
        shared(2, CHUNK, CHUNK, dtype=dtype),
        plgpu.SMEM((2, SUMS, CHUNK), jnp.float32),
        plgpu.SMEM((4, CHUNK), jnp.float32),
        plgpu.Barrier(num_arrivals=tiles + 3 + sizes.documents + 2 * sizes.raw_keys, num_barriers=SLOTS),
        plgpu.Barrier(num_arrivals=3 + 2 * tiles, num_barriers=SLOTS),
        plgpu.Barrier(num_arrivals=tiles),
        plgpu.Barrier(num_arrivals=GROUPS, num_barriers=SLOTS),
        plgpu.Barrier(num_arrivals=GROUPS, num_barriers=SLOTS),
        plgpu.Barrier(num_arrivals=GROUPS),
        *(plgpu.Barrier(num_arrivals=GROUPS),) * 3,
    ]


def tile_slots(sizes: Sizes, slot) -> list:
    """The slots of the tiles of V, the first that of the chunk. A second tile takes the other: if they did not change
    places with every chunk, the compiler would keep every address for good, in more registers than there are."""
    return [slot, 1 - slot][: sizes.value_tiles]


def load_chunk(x: Inputs, memory: Memory, sizes: Sizes, place: tuple, turn) -> None:
    """Load the chunk at place (b, h, half of K, chunk), as soon as its slots are free; `turn` counts this program's
    chunks."""
    (b, h, half, chunk), gate_head = place, sizes.gate_head(place[1])
    g, tokens, slot = sizes.key_head(h), pl.ds(chunk * CHUNK, CHUNK), lax.rem(turn, SLOTS)
    columns = [pl.ds(i * TILE, TILE) for i in range(sizes.value_tiles)]
    key_columns = [pl.ds(half * sizes.key_dim + i * TILE, TILE) for i in range(sizes.key_tiles)]

    def start(source, target, barrier):
        plgpu.copy_gmem_to_smem(source, target, barrier)

    def wait(barrier, turns_before: int):
        if turns_before:
            pl.when(turn >= turns_before)(lambda: plgpu.barrier_wait(barrier))
        else:
            plgpu.barrier_wait(barrier)

    loaded = memory.loaded.at[slot]
    wait(memory.free.at[slot], SLOTS)
    for i in range(sizes.key_tiles):
        start(x.k.at[b, tokens, g, key_columns[i]], memory.keys.at[1 + slot, i], loaded)
    start(x.inverse.at[b, gate_head, tokens], memory.inverse.at[slot], loaded)
    start(x.gates.at[b, gate_head, chunk], memory.gates.at[slot], loaded)
    start(x.erase.at[b, gate_head, tokens], memory.vectors.at[slot, 0], loaded)
    if x.documents is not None:
        start(x.documents.at[b, tokens], memory.vectors.at[slot, 1], loaded)
    for row, vector in enumerate((x.of_value, x.of_seen), 2):
        if vector is not None:
            start(vector.at[b, gate_head, tokens], memory.vectors.at[slot, row], loaded)
    slots = tile_slots(sizes, slot)
    for j in range(sizes.value_tiles):
        at = slots[j % SLOTS]
        wait(memory.free_tile.at[at], 0 if j >= SLOTS else SLOTS // len(slots))
        loaded = memory.loaded_tile.at[at]
        for i in range(sizes.key_tiles):
            start(x.starts.at[b, h, chunk, columns[j], key_columns[i]], memory.starts.at[at, i], loaded)
        start(x.u.at[b, tokens, h, columns[j]], memory.u.at[at], loaded)
        start(x.d_o.at[b, tokens, h, columns[j]], memory.values.at[0, at], loaded)
        start(x.d_u.at[b, tokens, h, columns[j]], memory.values.at[1, at], loaded)
        for i in range(sizes.key_tiles):
            start(x.ends.at[b, h, chunk, columns[j], key_columns[i]], memory.ends.at[at, i], loaded)
    wait(memory.free_q, 1)
    for i in range(sizes.key_tiles):
        start(x.q.at[b, tokens, g, key_columns[i]], memory.keys.at[0, i], memory.loaded_q)


def drain(memory: Memory, sizes: Sizes, turns: int) -> None:
    """Wait until everything loaded has been used: a barrier may not end with a phase that nobody waited for."""
    for turn in range(max(0, turns - SLOTS), turns):
        plgpu.barrier_wait(memory.free.at[turn % SLOTS])
    last = range(SLOTS) if sizes.value_tiles >= SLOTS else range(max(0, turns - SLOTS), turns)
    for slot in last:
        plgpu.barrier_wait(memory.free_tile.at[slot % SLOTS])
    plgpu.barrier_wait(memory.free_q)


def per_row(vector) -> jax.Array:
    """A vector in shared memory, one entry for each row of a matrix."""
    return plgpu.load(vector, layout=WGMMA.reduce(1), optimized=False)


def matrix(ref) -> jax.Array:
    return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)


def product(*terms) -> jax.Array:
    """Sum of the products of pairs of tiles, float32 [64, 64]."""

    def run(acc):
        for left, right in terms:
            plgpu.wgmma(acc, left, right)
        return accumulated(acc, wait_n=0)

    return pl.run_scoped(run, plgpu.ACC((CHUNK, TILE), jnp.float32))


def meet(barrier) -> None:
    """Both warpgroups have come here, and see what the other wrote."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def write_written(memory: Memory, at: Chunk, raw_keys: bool) -> None:
    """W^T of this warpgroup's 64 columns of V; with raw keys also their part of dV . V."""
    if raw_keys:
        both = matrix(memory.u.at[at.place]) * matrix(memory.values.at[1, at.place])
        memory.sums.at[at.group, VALUE][...] = jnp.sum(both, axis=1)
    dtype, k, starts = memory.u.dtype, memory.keys.at[1 + at.slot], memory.starts.at[at.place]
    known = product(*[(starts.at[i], k.at[i].T) for i in range(k.shape[0])])
    erase = by_column(memory.gates.at[at.slot, ERASE], TILE)
    missing = transposed(memory.u.at[at.place]).astype(jnp.float32) - known * erase
    room = memory.pairs.at[at.place]
    room[...] = missing.astype(dtype)
    plgpu.commit_smem()
    memory.written[at.group] = product((room, memory.inverse.at[at.slot].T)).astype(dtype)


def state_products(memory: Memory, at: Chunk) -> tuple[jax.Array, ...]:
    """Of 64 columns of K, in . dO S^T and out . W D^T - e in . dP S^T [C, 64]; dO W^T or dP W^T [C, C]; all float32.

    The last that is read of the tiles of V. In rounds of two products, for the sake of registers."""
    gates, values, sums = memory.gates.at[at.slot], memory.values.at[at.group], memory.sums.at[at.group]
    tiles = [(memory.written.at[i], slot) for i, slot in enumerate(at.tile_slots)]
    both = sum(matrix(memory.starts.at[s, at.tile]) * matrix(memory.ends.at[s, at.tile]) for _, s in tiles)
    sums.at[STATE][...] = jnp.sum(both, axis=1)

    def of_keys(acc_erased, acc_kept):
        for _, slot in tiles:
            plgpu.wgmma(acc_erased, memory.values.at[1, slot], memory.starts.at[slot, at.tile])
        for written, slot in tiles:
            plgpu.wgmma(acc_kept, written.T, memory.ends.at[slot, at.tile])
        keys = matrix(memory.keys.at[1 + at.slot, at.tile])
        erased = accumulated(acc_erased, wait_n=len(tiles)) * by_row(gates.at[INTO], TILE)
        sums.at[SEEN][...] = jnp.sum(keys * erased, axis=1)
        kept = accumulated(acc_kept, wait_n=0) * by_row(gates.at[OUT], TILE)
        sums.at[LEFT][...] = jnp.sum(keys * kept, axis=1)
        return kept - erased * by_row(memory.vectors.at[at.slot, 0], TILE)

    def of_queries(acc_read, acc_pairs):
        for _, slot in tiles:
            plgpu.wgmma(acc_read, memory.values.at[0, slot], memory.starts.at[slot, at.tile])
        for written, slot in tiles:
            plgpu.wgmma(acc_pairs, values.at[slot], written)
        read = accumulated(acc_read, wait_n=len(tiles)) * by_row(gates.at[INTO], TILE)
        return read, accumulated(acc_pairs, wait_n=0)

    accumulators = (plgpu.ACC((CHUNK, TILE), jnp.float32),) * 2
    kept = pl.run_scoped(of_keys, *accumulators)
    read, pairs = pl.run_scoped(of_queries, *accumulators)
    return read, kept, pairs


def streamed_products(memory: Memory, at: Chunk, sizes: Sizes) -> tuple[jax.Array, ...]:
    """`state_products` of W as it was saved. Tiles of V come and go, what is made of them stays in accumulators."""
    gates, sums, vectors = memory.gates.at[at.slot], memory.sums.at[at.group], memory.vectors.at[at.slot]

    def run(acc_erased, acc_kept, acc_read, acc_pairs):
        state = []
        for i in range(sizes.value_tiles):
            slot = at.tile_slots[i % SLOTS]
            plgpu.barrier_wait(memory.loaded_tile.at[slot])
            start, end, written = memory.starts.at[slot, at.tile], memory.ends.at[slot, at.tile], memory.u.at[slot]
            plgpu.wgmma(acc_erased, memory.values.at[1, slot], start)
            plgpu.wgmma(acc_kept, written, end)
            plgpu.wgmma(acc_read, memory.values.at[0, slot], start)
            plgpu.wgmma(acc_pairs, memory.values.at[at.group, slot], written.T)
            state.append(jnp.sum(matrix(start) * matrix(end), axis=1))
            plgpu.wgmma_wait(0)
            plgpu.commit_smem()  # what was read may be loaded over
            plgpu.barrier_arrive(memory.free_tile.at[slot])
        sums.at[STATE][...] = sum(state[1:], state[0])
        keys = matrix(memory.keys.at[1 + at.slot, at.tile])
        erased = accumulated(acc_erased, wait_n=0) * by_row(gates.at[INTO], TILE)
        sums.at[SEEN][...] = jnp.sum(keys * erased, axis=1)
        kept = accumulated(acc_kept, wait_n=0) * by_row(gates.at[OUT], TILE)
        sums.at[LEFT][...] = jnp.sum(keys * kept, axis=1)
        read = accumulated(acc_read, wait_n=0) * by_row(gates.at[INTO], TILE)
        return read, kept - erased * by_row(vectors.at[0], TILE), accumulated(acc_pairs, wait_n=0)

    return pl.run_scoped(run, *(plgpu.ACC((CHUNK, TILE), jnp.float32),) * 4)


def write_pairs(memory: Memory, at: Chunk, pairs: jax.Array, documents: bool) -> None:
    """b (group 0) or X (group 1) from dO W^T or dP W^T, and the sums of M below the diagonal, which cancels."""
    k, gates, vectors = memory.keys.at[1 + at.slot], memory.gates.at[at.slot], memory.vectors.at[at.slot]
    keys, sums, group = memory.keys.at[group_keys(at)], memory.sums.at[at.group], at.group
    scores = product(*[(keys.at[i], k.at[i].T) for i in range(k.shape[0])])
    row, column = index(CHUNK, CHUNK, 0), index(CHUNK, CHUNK, 1)
    seen = column + group <= row  # a has no diagonal
    if documents:
        seen &= by_column(vectors.at[1], CHUNK) == by_row(vectors.at[1], CHUNK)
    exponent = by_row(gates.at[SUM], CHUNK) - by_column(gates.at[SUM], CHUNK)
    is_a = lax.convert_element_type(group, jnp.float32)
    pairs = pairs * (jnp.exp(jnp.where(seen, exponent, MASKED)) * (1.0 - 2.0 * is_a))
    erase = lax.broadcast_in_dim(per_row(vectors.at[0]) * is_a + (1.0 - is_a), (CHUNK, CHUNK), (0,))
    memory.pairs[at.place] = (pairs * erase).astype(memory.pairs.dtype)
    mixed = jnp.where(column < row, pairs * scores, 0.0)
    sums.at[MIXED][...] = jnp.sum(mixed, axis=1)

    # A sum over rows goes through scratch memory that the warpgroups share: one after the other.
    @pl.when(group == 0)
    def _():
        sums.at[COLUMN][...] = jnp.sum(mixed * erase, axis=0)

    meet(memory.mixed)

    @pl.when(group == 1)
    def _():
        sums.at[COLUMN][...] = jnp.sum(mixed * erase, axis=0)


def tile_products(memory: Memory, at: Chunk, sizes: Sizes) -> tuple[jax.Array, ...]:
    """`state_products`, from the loads of the tiles of V to their release."""
    for tile_slot in at.tile_slots:
        plgpu.barrier_wait(memory.loaded_tile.at[tile_slot])

    @pl.when(at.group < sizes.value_tiles)
    def _():
        write_written(memory, at, sizes.raw_keys)

    meet(memory.wrote)
    results = state_products(memory, at)
    plgpu.commit_smem()  # what was read may be loaded over
    for tile_slot in at.tile_slots:
        plgpu.barrier_arrive(memory.free_tile.at[tile_slot])
    return results


def along_keys(memory: Memory, at: Chunk, sizes: Sizes) -> jax.Array:
    """What the coefficients of raw keys send along k: 64 columns [C, 64]."""
    total = lambda i, count: sum(per_row(memory.sums.at[g, i]) for g in range(count))  # noqa: E731
    d_seen = per_row(memory.sums.at[1, MIXED]) - total(SEEN, sizes.key_tiles)
    vectors = memory.vectors.at[at.slot]
    scale = total(VALUE, sizes.value_tiles) * per_row(vectors.at[2]) + d_seen * per_row(vectors.at[3])
    return matrix(memory.keys.at[1 + at.slot, at.tile]) * lax.broadcast_in_dim(scale, (CHUNK, TILE), (0,))


def group_keys(at: Chunk):
    """The slot of `keys` with q for group 0, with k for group 1."""
    return at.group * (1 + at.slot)


def put(memory: Memory, at: Chunk, x: jax.Array, target) -> None:
    """Store a gradient [C, 64]; a 16-bit one by way of shared memory."""
    if target.dtype == jnp.float32:
        target[...] = x
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    room = memory.written.at[at.group]
    room[...] = x.astype(room.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(room, target)


def gate_gradients(memory: Memory, at: Chunk, sizes: Sizes) -> None:
    """d log_decay and d erase of a chunk from the sums, into `results`; with raw keys also dV . V.

    d log_decay of a token: the sums of the tokens from it on, of what the tokens before it left, and in_C <S, D>."""
    total = lambda i, count: sum(per_row(memory.sums.at[g, i]) for g in range(count))  # noqa: E731
    erase, tiles = per_row(memory.vectors.at[at.slot, 0]), sizes.key_tiles
    below, seen = per_row(memory.sums.at[1, MIXED]), total(SEEN, tiles)
    onward = per_row(memory.sums.at[0, MIXED]) - total(COLUMN, 2) + total(READ, tiles) + erase * (below - seen)
    memory.results.at[1][...] = below - seen
    memory.results.at[0][...] = onward
    memory.results.at[2][...] = total(LEFT, tiles)
    if sizes.raw_keys:
        memory.results.at[3][...] = total(VALUE, sizes.value_tiles)
    plgpu.commit_smem()
    row, column = index(CHUNK, CHUNK, 0), index(CHUNK, CHUNK, 1)
    state = sum(by_column(memory.sums.at[g, STATE], CHUNK) for g in range(tiles))
    terms = jnp.where(column >= row, by_column(memory.results.at[0], CHUNK), by_column(memory.results.at[2], CHUNK))
    sums = jnp.sum(terms + state * memory.gates[at.slot, INTO, CHUNK - 1], axis=1)
    plgpu.commit_smem()  # every warp has read `onward`
    memory.results.at[0][...] = sums
    plgpu.commit_smem()


def compute_chunk(memory: Memory, sizes: Sizes, where: tuple, turn, group, results: tuple) -> None:
    """A chunk's gradients by the two warpgroups that compute, from loads to stores."""
    (b, h, half, chunk), slot = where, lax.rem(turn, SLOTS)
    tokens, (d_q, d_k, d_erase, d_decay, *others) = pl.ds(chunk * CHUNK, CHUNK), results
    place, tile = lax.rem(slot + group, SLOTS), group if sizes.key_tiles == GROUPS else 0
    at = Chunk(slot, tile_slots(sizes, slot), [slot, 1 - slot], group, place, tile)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_wait(memory.loaded.at[slot])
    if sizes.halves == 1:
        read, kept, pairs = tile_products(memory, at, sizes)
    else:
        meet(memory.wrote)  # nobody is a chunk ahead
        read, kept, pairs = streamed_products(memory, at, sizes)
    plgpu.barrier_wait(memory.loaded_q)
    memory.sums.at[group, READ][...] = jnp.sum(matrix(memory.keys.at[0, at.tile]) * read, axis=1)
    write_pairs(memory, at, pairs, sizes.documents)
    b_pairs, x = (memory.pairs.at[i] for i in at.places)
    q, k = memory.keys.at[0, tile], memory.keys.at[1 + slot, tile]
    column = at.tile * TILE if sizes.halves == 1 else half * sizes.key_dim + at.tile * TILE
    target, gate_target = (b, tokens, h, pl.ds(column, TILE)), (b, h * sizes.halves + half, tokens)
    gradient = read + product((b_pairs, k))

    @pl.when(group < sizes.key_tiles)
    def _():
        put(memory, at, gradient, d_q.at[target])

    gradient_k = kept + product((b_pairs.T, q), (x, k), (x.T, k))
    if sizes.raw_keys:
        gradient_k += along_keys(memory, at, sizes)

    @pl.when(group < sizes.key_tiles)
    def _():
        put(memory, at, gradient_k, d_k.at[target])

    meet(memory.summed)
    plgpu.barrier_arrive(memory.free_q)

    @pl.when(group == 0)
    def _():
        gate_gradients(memory, at, sizes)
        plgpu.copy_smem_to_gmem(memory.results.at[0], d_decay.at[gate_target])
        plgpu.copy_smem_to_gmem(memory.results.at[1], d_erase.at[gate_target])
        rows = [3] * sizes.raw_keys + [2] * sizes.routed
        for result, target in zip(rows, others, strict=True):
            plgpu.copy_smem_to_gmem(memory.results.at[result], target.at[gate_target])

    plgpu.barrier_arrive(memory.free.at[slot])


def gradients(x: Inputs, sizes: Sizes, programs: int, automatic_barriers: bool, *, interpret=None) -> tuple:
    """(dq, dk [B, T, H, K], d_erase, d_log_decay [B, H, T] float32) from everything that `backward` got, du and D; with
    raw keys dV . V, and with chunks that keep a part of what they write k . (out . W D^T), [B, H, T] float32, too. Of
    keys in halves K is that of both, and each has its part of what is [B, 2 H, T] then.

    The chunks of all rows are dealt out to so many programs, a divisor of their number."""
    dtype, names = x.k.dtype, [name for name, array in x._asdict().items() if array is not None]
    results_of = 4 + sizes.raw_keys + sizes.routed
    turns = sizes.batch * sizes.heads * sizes.halves * sizes.chunks // programs

    def body(*refs):
        inputs, refs = Inputs(**dict(zip(names, refs, strict=False))), refs[len(names) :]
        results, memory = refs[:results_of], Memory(*refs[results_of:])
        program, group = lax.axis_index("program"), lax.axis_index("warpgroup")

        def place(turn) -> tuple:
            number = turn * programs + program
            half: Any = 0
            if sizes.halves > 1:
                number, half = lax.div(number, sizes.halves), lax.rem(number, sizes.halves)
            row, chunk = lax.div(number, sizes.chunks), lax.rem(number, sizes.chunks)
            return lax.div(row, sizes.heads), lax.rem(row, sizes.heads), half, chunk

        @pl.when(group == GROUPS)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            lax.fori_loop(0, turns, lambda turn, _: load_chunk(inputs, memory, sizes, place(turn), turn), None)
            drain(memory, sizes, turns)

        @pl.when(group < GROUPS)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            step = lambda turn, _: compute_chunk(memory, sizes, place(turn), turn, group, results)  # noqa: E731
            lax.fori_loop(0, turns, step, None)
            plgpu.wait_smem_to_gmem(0)

    summed = jnp.float32 if sizes.heads > sizes.key_heads else dtype  # a sum of heads is rounded once, at its end
    keys = jax.ShapeDtypeStruct((sizes.batch, sizes.time, sizes.heads, sizes.halves * sizes.key_dim), summed)
    gates = jax.ShapeDtypeStruct((sizes.batch, sizes.heads * sizes.halves, sizes.time), jnp.float32)
    return plgpu.kernel(
        body,
        out_type=(keys, keys, *[gates] * (results_of - 2)),
        scratch_types=scratch(sizes, dtype),
        grid=(programs,),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="warpgroup",
        compiler_params=parameters(automatic_barriers),
        interpret=interpret,
    )(*(getattr(x, name) for name in names))


def require_covered(k: jax.Array, value_dim: int, step: str | None) -> None:
    """NotImplementedError for sizes that `backward` does not serve. k [B, T, G, K]."""
    (_, time, _, key_dim), dtype = k.shape, k.dtype
    of_values = value_dim % TILE == 0 if key_dim == 256 else value_dim in VALUE_DIMS
    covered = key_dim in KEY_DIMS and of_values and time % CHUNK == 0 and dtype.itemsize == 2
    if not covered or (step is not None and key_dim > 128):
        raise NotImplementedError(
            f"delta rule backward: K must be in {KEY_DIMS} (raw keys: at most 128), V in {VALUE_DIMS} (K = 256: a"
            f" multiple of {TILE}), T a multiple of {CHUNK}, k of 16 bits; got K = {key_dim}, V = {value_dim},"
            f" T = {time}, {dtype}."
        )


@narrow_indices()
def backward(
    q, k, u, erase, log_decay, documents, saved, d_o, d_final, *,
    config: ReverseConfig | None = None, step: str | None = None, keep=None, hand_over=None, interpret=None,
) -> tuple:  # fmt: skip
    """Cotangents (dq, dk [B, T, H, K], du [B, T, H, V], d_erase, d_log_decay [B, H, T], d_initial [B, H, V, K]).

    q, k [B, T, G, K]; u and the output's cotangent d_o [B, T, H, V], all of one 16-bit dtype; erase, log_decay
    [B, H, T] float32, or fewer, each for several of the value heads that read one key head, and so their cotangents;
    documents [B, T] float32 or None: how many documents have begun inside the chunk up to each token; saved:
    (inverse [B, H, T, 64] and gates [B, H, N, 5, 64] float32 for the heads of erase, states at the chunks' starts
    [B, H, N, V, K], and for K = 256 what was written [B, T, H, V]); d_final [B, H, V, K] float32, of the final state. T
    is a multiple of 64, K in KEY_DIMS, V in VALUE_DIMS or for K = 256 a multiple of 64.
    dq and dk are of each value head, float32 where they are to be summed: those of a key head are their sum.
    step and keep: those of the forward, or None. With a step, saved has the squared lengths of the keys at its end;
    with keep, its cotangent comes after d_log_decay. hand_over: None, or (d_final, Z, M) -> the cotangent behind this,
    which is a part of the time that takes a cotangent D^T to D^T M + Z.

    Raises NotImplementedError for other sizes."""
    inverse, gates, starts, *more = saved
    (batch, time, key_heads, key_dim), (heads, value_dim) = k.shape, u.shape[2:]
    require_covered(k, value_dim, step)
    if config is None:
        config = WIDE if key_dim > 128 else ReverseConfig()
    sharing = heads // erase.shape[1]
    sizes = Sizes(
        batch,
        time,
        key_heads,
        heads,
        key_dim,
        value_dim,
        documents is not None,
        sharing,
        step is not None,
        keep is not None,
    )
    over_chunk = wide.reverse_chunk if sizes.wide else None
    d_u, ends, d_initial = reverse(
        q, k, inverse, gates, documents, d_o, d_final,
        sizes=sizes, config=config, over_chunk=over_chunk, hand_over=hand_over, interpret=interpret,
    )  # fmt: skip
    if sizes.wide:
        sizes, u = dataclasses.replace(sizes, key_dim=key_dim // 2, halves=2), more.pop()
    inputs = Inputs(q, k, u, d_o, d_u, inverse, starts, ends, gates, erase, documents)
    if step is not None:
        slope = slopes(step, erase, log_decay, *more)
        inputs = inputs._replace(erase=slope.seen, of_value=slope.of_value, of_seen=slope.of_seen)
    chunks = batch * heads * sizes.halves * sizes.chunks
    programs = max(p for p in range(1, config.multiprocessors + 1) if chunks % p == 0)
    d_q, d_k, *d_gates = gradients(inputs, sizes, programs, config.automatic_barriers, interpret=interpret)
    if sharing * sizes.halves > 1:
        d_gates = [x.reshape(batch, -1, sharing * sizes.halves, time).sum(2) for x in d_gates]
    d_erase, d_decay, *others = d_gates
    if step is not None:
        d_erase, d_more = slope.gates(others.pop(0), d_erase)
        d_decay += d_more
    if keep is not None:
        others = [others[0].reshape(*keep.shape, CHUNK).sum(-1) / never_zero(keep)]
    return d_q, d_k, d_u, d_erase, d_decay, *others, d_initial
