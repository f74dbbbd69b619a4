"""The delta rule's backward on a Hopper GPU: `backward`, and its parallel part as a Pallas program in Mosaic GPU, which
takes a chunk of C = 64 tokens of a row.

    b = R . dO W^T        a = -strict(R . dP W^T)        X = e a        M = b . Q K^T + X . K K^T
    dQ = in . dO S^T + b K                dK = out . W D^T - e in . dP S^T + b^T Q + (X + X^T) K
    de = rowsum(a . K K^T) - rowsum(K . (in . dP S^T))

with the letters of `ops/chunked.py`: S the state at the chunk's start; D the cotangent of the state at its end, and
dP = dU, both from `delta_rule_reverse.py`; W = (I + A)^-1 (U - e in . K S) the vectors really written, made again from
what the forward saved: the inverse, the gate vectors and S.

Two warpgroups: each makes W^T for its half of V, then one of b and X, then its half of K of dQ and dK. Every product is
of 64 x 64 tiles in shared memory, so that the interpreter runs the program of the device.

The cotangent of the log decay is made of row and column sums of M, which nearly cancel when keys are nearly parallel:
they are taken of float32 products before anything is rounded. Only <S, D> is of rounded factors.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.delta_rule_reverse import CHUNK, ERASE, GATES, INTO, OUT, SUM, TILE, ReverseConfig, Sizes, reverse
from efla_jax.kernels.mosaic import MASKED, WGMMA, accumulated, by_column, by_row, index, parameters, shared, transposed

DIMENSIONS = (64, 128)  # of keys and of values: two tiles, one a warpgroup
SUMS = 6  # vectors of one warpgroup, in this order; the last is over rows of the state, the others over tokens
MIXED, COLUMN, READ, SEEN, LEFT, STATE = range(SUMS)


class Memory(NamedTuple):
    """Shared memory of one program of `gradients`, everything in tiles of 64 columns."""

    keys: Any  # [2, K // 64, C, 64]: q, k
    values: Any  # [2, V // 64, C, 64]: dO, dP
    u: Any  # [V // 64, C, 64]
    inverse: Any  # [C, C]
    starts: Any  # [V // 64, K // 64, 64, 64]: S^T; at last its first row holds dQ
    ends: Any  # [V // 64, K // 64, 64, 64]: D^T; at last its first row holds dK
    written: Any  # [V // 64, 64, C]: W^T
    pairs: Any  # [2, C, C]: what W^T is made of; then b, X
    gates: Any  # [GATES, C]
    vectors: Any  # [2, C]: erase, document
    sums: Any  # [2, SUMS, C]
    results: Any  # [3, C]: d log_decay, d erase, and room
    loaded: Any  # barriers of the loads, in the order of use
    loaded_values: Any
    loaded_ends: Any
    new: Any  # barriers between the two warpgroups
    mixed: Any
    summed: Any


def per_row(vector) -> jax.Array:
    """A vector in shared memory, one entry for each row of a matrix."""
    return plgpu.load(vector, layout=WGMMA.reduce(1), optimized=False)


def product(terms, shape=(CHUNK, CHUNK)) -> jax.Array:
    """Sum of the products of the pairs of tiles, float32 [64, 64]."""

    def run(acc):
        for left, right in terms:
            plgpu.wgmma(acc, left, right)
        return accumulated(acc, wait_n=0)

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def write_written(memory: Memory, tile) -> None:
    """W^T of 64 columns of V, while nothing else is known."""
    dtype = memory.u.dtype
    k, starts = memory.keys.at[1], memory.starts.at[tile]
    known = product([(starts.at[i], k.at[i].T) for i in range(k.shape[0])])
    missing = transposed(memory.u.at[tile]).astype(jnp.float32) - known * by_column(memory.gates.at[ERASE], CHUNK)
    room = memory.pairs.at[tile]
    room[...] = missing.astype(dtype)
    plgpu.commit_smem()
    memory.written[tile] = product([(room, memory.inverse.T)]).astype(dtype)
    plgpu.commit_smem()


def write_pairs(memory: Memory, group, documents: bool) -> None:
    """b (group 0) or X (group 1) and the sums of M = b . Q K^T + X . K K^T below the diagonal, which cancels."""
    keys, k, values = memory.keys.at[group], memory.keys.at[1], memory.values.at[group]

    def run(acc_keys, acc_values):
        for i in range(k.shape[0]):
            plgpu.wgmma(acc_keys, keys.at[i], k.at[i].T)
        for i in range(values.shape[0]):
            plgpu.wgmma(acc_values, values.at[i], memory.written.at[i])
        row, column = index(CHUNK, CHUNK, 0), index(CHUNK, CHUNK, 1)
        seen = column + group <= row  # a has no diagonal
        if documents:
            seen &= by_column(memory.vectors.at[1], CHUNK) == by_row(memory.vectors.at[1], CHUNK)
        exponent = by_row(memory.gates.at[SUM], CHUNK) - by_column(memory.gates.at[SUM], CHUNK)
        decay = jnp.exp(jnp.where(seen, exponent, MASKED))
        is_a = lax.convert_element_type(group, jnp.float32)
        pairs = accumulated(acc_values, wait_n=0) * (decay * (1.0 - 2.0 * is_a))
        erase = lax.broadcast_in_dim(per_row(memory.vectors.at[0]) * is_a + (1.0 - is_a), (CHUNK, CHUNK), (0,))
        mixed = jnp.where(column < row, pairs * accumulated(acc_keys, wait_n=0), 0.0)
        return pairs * erase, mixed, mixed * erase

    accumulator = plgpu.ACC((CHUNK, CHUNK), jnp.float32)
    pairs, mixed, weighed = pl.run_scoped(run, accumulator, accumulator)
    memory.pairs[group] = pairs.astype(memory.pairs.dtype)
    sums = memory.sums.at[group]
    sums.at[MIXED][...] = jnp.sum(mixed, axis=1)

    # A sum over rows goes through scratch memory that the warpgroups share: one after the other.
    @pl.when(group == 0)
    def _():
        sums.at[COLUMN][...] = jnp.sum(weighed, axis=0)

    plgpu.commit_smem()
    plgpu.barrier_arrive(memory.mixed)
    plgpu.barrier_wait(memory.mixed)

    @pl.when(group == 1)
    def _():
        sums.at[COLUMN][...] = jnp.sum(weighed, axis=0)


def keys_gradients(memory: Memory, tile, group) -> tuple[jax.Array, jax.Array]:
    """dQ and dK [C, 64] float32 of 64 columns of K, and their sums for the gates."""
    count = memory.values.shape[1]
    q, k = memory.keys.at[0, tile], memory.keys.at[1, tile]
    column = [(memory.starts.at[i, tile], memory.ends.at[i, tile]) for i in range(count)]
    sums = memory.sums.at[group]

    def states(acc_read, acc_erased, acc_kept):
        for i, (start, _) in enumerate(column):
            plgpu.wgmma(acc_read, memory.values.at[0, i], start)
        for i, (start, _) in enumerate(column):
            plgpu.wgmma(acc_erased, memory.values.at[1, i], start)
        for i, (_, end) in enumerate(column):
            plgpu.wgmma(acc_kept, memory.written.at[i].T, end)
        both = sum(load(start) * load(end) for start, end in column)
        sums.at[STATE][...] = jnp.sum(both, axis=1)
        read = accumulated(acc_read, wait_n=2 * count) * by_row(memory.gates.at[INTO], CHUNK)
        sums.at[READ][...] = jnp.sum(load(q) * read, axis=1)
        keys = load(k)
        erased = accumulated(acc_erased, wait_n=count) * by_row(memory.gates.at[INTO], CHUNK)
        sums.at[SEEN][...] = jnp.sum(keys * erased, axis=1)
        kept = accumulated(acc_kept, wait_n=0) * by_row(memory.gates.at[OUT], CHUNK)
        sums.at[LEFT][...] = jnp.sum(keys * kept, axis=1)
        return read, kept - erased * by_row(memory.vectors.at[0], CHUNK)

    load = lambda ref: plgpu.load(ref, layout=WGMMA, optimized=False).astype(jnp.float32)  # noqa: E731
    read, kept = pl.run_scoped(states, *(plgpu.ACC((CHUNK, TILE), jnp.float32),) * 3)
    b, x = memory.pairs.at[0], memory.pairs.at[1]
    return read + product([(b, k)]), kept + product([(b.T, q), (x, k), (x.T, k)])


def put_keys_gradients(memory: Memory, tile, d_q, d_k, dq_gmem, dk_gmem) -> None:
    """Store dQ and dK of 64 columns of K; 16-bit ones pass the memory of states that this warpgroup alone reads."""
    if dq_gmem.dtype == jnp.float32:
        dq_gmem[...], dk_gmem[...] = d_q, d_k
        return
    plgpu.commit_smem()  # no warp reads the states any more
    for x, room, target in ((d_q, memory.starts.at[0, tile], dq_gmem), (d_k, memory.ends.at[0, tile], dk_gmem)):
        room[...] = x.astype(room.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(room, target)


def gate_gradients(memory: Memory, tiles: int) -> None:
    """d log_decay and d erase of a chunk from the sums, into `results`.

    d log_decay of a token: the sums of the tokens from it on, of what the tokens before it left, and in_C <S, D>."""
    total = lambda i, count: sum(per_row(memory.sums.at[g, i]) for g in range(count))  # noqa: E731
    erase = per_row(memory.vectors.at[0])
    below, seen = per_row(memory.sums.at[1, MIXED]), total(SEEN, tiles)
    onward = per_row(memory.sums.at[0, MIXED]) - total(COLUMN, 2) + total(READ, tiles) + erase * (below - seen)
    memory.results.at[1][...] = below - seen
    memory.results.at[0][...] = onward
    memory.results.at[2][...] = total(LEFT, tiles)
    plgpu.commit_smem()
    row, column = index(CHUNK, CHUNK, 0), index(CHUNK, CHUNK, 1)
    state = sum(by_column(memory.sums.at[g, STATE], CHUNK) for g in range(tiles)) * memory.gates[INTO, CHUNK - 1]
    terms = jnp.where(column >= row, by_column(memory.results.at[0], CHUNK), by_column(memory.results.at[2], CHUNK))
    sums = jnp.sum(terms + state, axis=1)
    plgpu.commit_smem()  # every warp has read `onward`
    memory.results.at[0][...] = sums


class Inputs(NamedTuple):
    """Arguments of `gradients` in device memory; documents may be absent."""

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


def load_chunk(x: Inputs, memory: Memory, sizes: Sizes, b, h, chunk) -> None:
    """Start every load of a chunk, in the order of use."""
    g, tokens = sizes.key_head(h), pl.ds(chunk * CHUNK, CHUNK)
    tile = lambda i: pl.ds(i * TILE, TILE)  # noqa: E731

    def start(source, target, barrier):
        plgpu.copy_gmem_to_smem(source, target, barrier)

    for i in range(sizes.key_tiles):
        start(x.k.at[b, tokens, g, tile(i)], memory.keys.at[1, i], memory.loaded)
        for j in range(sizes.value_tiles):
            start(x.starts.at[b, h, chunk, tile(j), tile(i)], memory.starts.at[j, i], memory.loaded)
    for j in range(sizes.value_tiles):
        start(x.u.at[b, tokens, h, tile(j)], memory.u.at[j], memory.loaded)
    start(x.inverse.at[b, h, tokens], memory.inverse, memory.loaded)
    start(x.gates.at[b, h, chunk], memory.gates, memory.loaded)
    start(x.erase.at[b, h, tokens], memory.vectors.at[0], memory.loaded)
    if x.documents is not None:
        start(x.documents.at[b, tokens], memory.vectors.at[1], memory.loaded)
    for j in range(sizes.value_tiles):
        start(x.d_o.at[b, tokens, h, tile(j)], memory.values.at[0, j], memory.loaded_values)
        start(x.d_u.at[b, tokens, h, tile(j)], memory.values.at[1, j], memory.loaded_values)
    for i in range(sizes.key_tiles):
        start(x.q.at[b, tokens, g, tile(i)], memory.keys.at[0, i], memory.loaded_values)
    for i in range(sizes.key_tiles):
        for j in range(sizes.value_tiles):
            start(x.ends.at[b, h, chunk, tile(j), tile(i)], memory.ends.at[j, i], memory.loaded_ends)


def gradients_memory(sizes: Sizes, dtype) -> list:
    """The scratch types of `gradients`: the fields of `Memory` in their order."""
    keys, values = sizes.key_tiles, sizes.value_tiles
    return [
        shared(2, keys, CHUNK, TILE, dtype=dtype),
        shared(2, values, CHUNK, TILE, dtype=dtype),
        shared(values, CHUNK, TILE, dtype=dtype),
        shared(CHUNK, CHUNK, dtype=dtype),
        shared(values, keys, TILE, TILE, dtype=dtype),
        shared(values, keys, TILE, TILE, dtype=dtype),
        shared(values, TILE, CHUNK, dtype=dtype),
        shared(2, CHUNK, CHUNK, dtype=dtype),
        plgpu.SMEM((GATES, CHUNK), jnp.float32),
        plgpu.SMEM((2, CHUNK), jnp.float32),
        plgpu.SMEM((2, SUMS, CHUNK), jnp.float32),
        plgpu.SMEM((3, CHUNK), jnp.float32),
        plgpu.Barrier(num_arrivals=keys * (1 + values) + values + 3 + sizes.documents),
        plgpu.Barrier(num_arrivals=2 * values + keys),
        plgpu.Barrier(num_arrivals=keys * values),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=2),
    ]


def gradients(x: Inputs, sizes: Sizes, *, interpret=None) -> tuple:
    """(dq, dk [B, T, H, K], d_erase, d_log_decay [B, H, T] float32) from everything that `backward` got, du and D."""
    dtype, arrays = x.k.dtype, [array for array in x if array is not None]

    def body(*refs):
        inputs, refs = Inputs(*refs[: len(arrays)]), refs[len(arrays) :]
        dq_gmem, dk_gmem, erase_gmem, decay_gmem, *scratch = refs
        memory = Memory(*scratch)
        program, group = lax.axis_index("program"), lax.axis_index("warpgroup")
        row, chunk = lax.div(program, sizes.chunks), lax.rem(program, sizes.chunks)
        b, h = lax.div(row, sizes.heads), lax.rem(row, sizes.heads)
        tokens = pl.ds(chunk * CHUNK, CHUNK)

        @pl.when(group == 0)
        def _():
            load_chunk(inputs, memory, sizes, b, h, chunk)

        plgpu.barrier_wait(memory.loaded)

        @pl.when(group < sizes.value_tiles)
        def _():
            write_written(memory, group)

        plgpu.barrier_arrive(memory.new)
        plgpu.barrier_wait(memory.new)
        plgpu.barrier_wait(memory.loaded_values)
        write_pairs(memory, group, sizes.documents)
        plgpu.barrier_wait(memory.loaded_ends)

        @pl.when(group < sizes.key_tiles)
        def _():
            d_q, d_k = keys_gradients(memory, group, group)
            place = b, tokens, h, pl.ds(group * TILE, TILE)
            put_keys_gradients(memory, group, d_q, d_k, dq_gmem.at[place], dk_gmem.at[place])

        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.summed)

        @pl.when(group == 0)
        def _():
            plgpu.barrier_wait(memory.summed)
            gate_gradients(memory, sizes.key_tiles)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(memory.results.at[0], decay_gmem.at[b, h, tokens])
            plgpu.copy_smem_to_gmem(memory.results.at[1], erase_gmem.at[b, h, tokens])

        plgpu.wait_smem_to_gmem(0)

    summed = jnp.float32 if sizes.heads > sizes.key_heads else dtype  # a sum of heads is rounded once, at its end
    keys = jax.ShapeDtypeStruct((sizes.batch, sizes.time, sizes.heads, sizes.key_dim), summed)
    gates = jax.ShapeDtypeStruct((sizes.batch, sizes.heads, sizes.time), jnp.float32)
    return plgpu.kernel(
        body,
        out_type=(keys, keys, gates, gates),
        scratch_types=gradients_memory(sizes, dtype),
        grid=(sizes.batch * sizes.heads * sizes.chunks,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=parameters(True),
        interpret=interpret,
    )(*arrays)


def backward(
    q, k, u, erase, log_decay, documents, saved, d_o, d_final, *, config: ReverseConfig | None = None, interpret=None
) -> tuple:
    """Cotangents (dq, dk [B, T, H, K], du [B, T, H, V], d_erase, d_log_decay [B, H, T], d_initial [B, H, V, K]).

    q, k [B, T, G, K]; u and the output's cotangent d_o [B, T, H, V], all of one 16-bit dtype; erase, log_decay
    [B, H, T] float32; documents [B, T] float32 or None: how many documents have begun inside the chunk up to each
    token; saved: (inverse [B, H, T, 64], gates [B, H, N, 5, 64] float32, states at the chunks' starts [B, H, N, V, K]);
    d_final [B, H, V, K] float32, of the final state. T is a multiple of 64, K and V are in DIMENSIONS. dq and dk are of
    each value head, float32 if several read one key head: those of a key head are their sum.

    Raises NotImplementedError for other sizes."""
    inverse, gates, starts = saved
    batch, time, key_heads, key_dim = k.shape
    sizes = Sizes(batch, time, key_heads, u.shape[2], key_dim, u.shape[3], documents is not None)
    if not {sizes.key_dim, sizes.value_dim} <= set(DIMENSIONS) or sizes.time % CHUNK or k.dtype.itemsize != 2:
        raise NotImplementedError(
            f"delta rule backward: K and V must be in {DIMENSIONS}, T a multiple of {CHUNK} and k of 16 bits; got"
            f" {sizes} and {k.dtype}."
        )
    reverse_config = ReverseConfig() if config is None else config
    d_u, ends, d_initial = reverse(
        q, k, inverse, gates, documents, d_o, d_final, sizes=sizes, config=reverse_config, interpret=interpret
    )
    inputs = Inputs(q, k, u, d_o, d_u, inverse, starts, ends, gates, erase, documents)
    d_q, d_k, d_erase, d_log_decay = gradients(inputs, sizes, interpret=interpret)
    return d_q, d_k, d_u, d_erase, d_log_decay, d_initial
