"""The gradients of the reads inside blocks of the log-linear delta rule on a Hopper GPU; letters as in
`log_linear_delta.py`. Those of a block's nodes are in `log_linear_delta_node_gradients.py`.

steps    of queries Q and the chunk that they read, their own or the one before it; dQ' is the cotangent of Q - P e K:
             V = dO U^T      dP = w . R . V - (dQ' K^T) e      H = dP X^T      dF = mask(H)      a = -strict(P^T H)
             dQ = dQ' + dF K        dK = dF^T Q - e P^T dQ' + (e a + (e a)^T) K        dU = (w . R . P)^T dO
             de = rowsum(a . K K^T) - rowsum(K . P^T dQ')        dw_l = rowsum of R . V . P over the pairs of level l
`a` is the cotangent of the triangle e K K^T, whose inverse X is made of: X itself needs no cotangent. Its product with
K K^T nearly cancels where keys are nearly parallel, so that H is multiplied there in two 16-bit parts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.log_linear_delta import (
    BLOCK,
    CHUNK,
    CHUNKS,
    ERASE,
    INSIDE,
    READS,
    SUM,
    WEIGHTS,
    Config,
    Places,
    Sizes,
    add_product,
    f32,
    matrix,
    multiply,
)
from efla_jax.kernels.log_linear_delta_read import distances, weight_of
from efla_jax.kernels.mosaic import (
    MASKED,
    begin,
    by_column,
    by_row,
    finish,
    index,
    left_operand,
    narrow_indices,
    parameters,
    shared,
)

SQUARE = (CHUNK, CHUNK)
OTHER = INSIDE - 1  # the level of the pairs of a block's two chunks
ROWS, COLUMNS, ERASED, LEVELS = range(4)  # rows of what `steps` sums: of the pairs by query and by key; d(-e); dw


class StepMemory(NamedTuple):
    """Shared memory of `steps`: q, k, u, dO, dQ' [C, K]; X [C, C]; gates [10, 128]; pairs [2, C, C]; sums [rows, C];
    barriers of the loads, and of what a second chunk loads first to make its queries, or None; codes [128] or None; the
    interpreter's left operand or None."""

    q: Any
    k: Any
    u: Any
    d_o: Any
    d_q: Any
    inverse: Any
    gates: Any
    pairs: Any
    sums: Any
    loaded: Any
    begun: Any
    codes: Any
    left: Any


class Step(NamedTuple):
    """Queries of a chunk and the chunk that they read, `before` of their own: in a block the numbers of both."""

    row: Any
    block: Any
    head: Any
    reader: Any
    source: Any
    before: int

    @property
    def mine(self):
        return pl.ds(self.reader * CHUNK, CHUNK)

    @property
    def theirs(self):
        return pl.ds(self.source * CHUNK, CHUNK)


def times_sum(total, terms, interpret) -> jax.Array:
    """total + the sum of the products of pairs in shared memory."""

    def run(acc):
        begin(acc, total, interpret)
        for left, right in terms:
            plgpu.wgmma(acc, left, right)
        return finish(acc, total, interpret)

    return pl.run_scoped(run, plgpu.ACC(total.shape, f32))


def put(ref, x) -> None:
    ref[...] = x.astype(ref.dtype)
    plgpu.commit_smem()


def twice(left, x, room, interpret) -> jax.Array:
    """left x [C, C], left in shared memory: of what x in registers is rounded to and of what it is rounded by."""
    put(room, x)
    total = multiply(left, room, SQUARE)
    put(room, x - x.astype(room.dtype).astype(f32))
    return add_product(total, left, room, interpret)


def send(ref, x, target) -> None:
    """Copy registers to global memory by way of shared memory that nothing else uses any more."""
    put(ref, x)
    plgpu.copy_smem_to_gmem(ref, target)


def masked(x, before: int, strict: bool = False) -> jax.Array:
    """x [C, C] where the key does not come after the query, or comes before it."""
    row, column = index(*SQUARE, 0), index(*SQUARE, 1)
    return x if before else jnp.where(column < row if strict else column <= row, x, 0.0)


def of_document(codes, x, mine, theirs) -> jax.Array:
    """x [C, C] where both tokens are of one document."""
    return x if codes is None else jnp.where(distances(codes, mine, theirs) < BLOCK, x, 0.0)


def decays(memory: StepMemory, at: Step) -> jax.Array:
    """R [C, C]."""
    exponent = by_row(memory.gates.at[SUM, at.mine], CHUNK) - by_column(memory.gates.at[SUM, at.theirs], CHUNK)
    if memory.codes is not None:
        exponent = jnp.where(distances(memory.codes, at.mine, at.theirs) < BLOCK, exponent, MASKED)
    if at.before:
        return jnp.exp2(exponent)
    return jnp.exp2(jnp.where(index(*SQUARE, 1) <= index(*SQUARE, 0), exponent, MASKED))


def weights(memory: StepMemory, at: Step) -> jax.Array:
    """w [C, C]."""

    def of_level(level):
        return by_row(memory.gates.at[WEIGHTS + level, at.mine], CHUNK)

    if memory.codes is not None:
        return weight_of(distances(memory.codes, at.mine, at.theirs), of_level)
    if at.before:
        return of_level(OTHER)
    apart, weight = index(*SQUARE, 0) ^ index(*SQUARE, 1), of_level(OTHER - 1)
    for level in reversed(range(OTHER - 1)):
        weight = jnp.where(apart < (1 << level), of_level(level), weight)
    return weight


def sum_levels(memory: StepMemory, mixed, at: Step) -> None:
    """dw from R . V . P."""
    if memory.codes is None and at.before:
        memory.sums.at[LEVELS][...] = jnp.sum(mixed, axis=1)
        return
    levels = OTHER if memory.codes is None else INSIDE
    for level in range(levels):
        # Made anew for every level: a square of them more would not fit the registers.
        if memory.codes is None:
            apart = index(*SQUARE, 0) ^ index(*SQUARE, 1)
        else:
            apart = distances(memory.codes, at.mine, at.theirs)
        of_level = (apart >> max(level - 1, 0)) == min(level, 1)
        memory.sums.at[LEVELS + level][...] = jnp.sum(jnp.where(of_level, mixed, 0.0), axis=1)


def step_pairs(memory: StepMemory, at: Step) -> tuple[jax.Array, jax.Array]:
    """dP float32 and w . R . P in 16 bits, while P is put into pairs[0] and what is summed of the pairs into sums."""
    dtype, gates, sums = memory.k.dtype, memory.gates, memory.sums
    scores = masked(multiply(memory.q, memory.k.T, SQUARE), at.before)
    scores = of_document(memory.codes, scores, at.mine, at.theirs).astype(dtype)
    solved = multiply(left_operand(scores, memory.left), memory.inverse, SQUARE)
    put(memory.pairs.at[0], solved)
    values = multiply(memory.d_o, memory.u.T, SQUARE) * decays(memory, at)
    mixed = values * solved
    sum_levels(memory, mixed, at)
    weight = weights(memory, at)
    # A token's pair with itself cancels between rows and columns: left out rather than subtracted.
    mixed = masked(mixed * weight, at.before, strict=True)
    sums.at[ROWS][...] = jnp.sum(mixed, axis=1)
    sums.at[COLUMNS][...] = jnp.sum(mixed, axis=0)
    erase = by_column(gates.at[ERASE, at.theirs], CHUNK)
    d_solved = values * weight + multiply(memory.d_q, memory.k.T, SQUARE) * erase
    return d_solved, (solved * (weight * decays(memory, at))).astype(dtype)


def step_gradients(memory: StepMemory, at: Step, results: tuple, interpret) -> None:
    """dQ, dK and dU of a step to `results`, and its sums into shared memory."""
    dtype, wide, (d_q, d_k, d_u) = memory.k.dtype, memory.q.shape, results
    d_solved, spread = step_pairs(memory, at)
    put(memory.pairs.at[1], spread)
    send(memory.u, multiply(memory.pairs.at[1].T, memory.d_o, wide), d_u)
    d_scores = multiply(left_operand(d_solved.astype(dtype), memory.left), memory.inverse.T, SQUARE)
    triangle = masked(-twice(memory.pairs.at[0].T, d_scores, memory.pairs.at[1], interpret), 0, strict=True)
    triangle = of_document(memory.codes, triangle, at.theirs, at.theirs)
    negative = memory.gates.at[ERASE, at.theirs]
    own = jnp.sum(triangle * multiply(memory.k, memory.k.T, SQUARE), axis=1)
    erased = multiply(memory.pairs.at[0].T, memory.d_q, wide)
    memory.sums.at[ERASED][...] = jnp.sum(matrix(memory.k) * erased, axis=1) - own
    put(memory.pairs.at[0], triangle * -by_row(negative, CHUNK))
    put(memory.pairs.at[1], of_document(memory.codes, masked(d_scores, at.before), at.mine, at.theirs))
    changed, scores = memory.pairs.at[0], memory.pairs.at[1]
    terms = (scores.T, memory.q), (changed, memory.k), (changed.T, memory.k)
    send(memory.q, times_sum(erased * by_row(negative, wide[1]), terms, interpret), d_k)
    send(memory.d_q, times_sum(matrix(memory.d_q), [(scores, memory.k)], interpret), d_q)


class StepInputs(NamedTuple):
    """In global memory; d_between [B, T / 2, H, K]: the cotangent of the queries of second chunks when they meet the
    first, None where a step makes it; numbers and codes as of `Places`."""

    q: Any
    k: Any
    u: Any
    d_o: Any
    d_q: Any
    inverse: Any
    gates: Any
    d_between: Any
    numbers: Any = None
    codes: Any = None


def load_step(x: StepInputs, memory: StepMemory, at: Step, sizes: Sizes) -> None:
    """All of a chunk that reads itself."""
    tokens, g = chunk_tokens_at(at.block, at.reader), sizes.key_head(at.head)

    def start(from_, to) -> None:
        plgpu.copy_gmem_to_smem(from_, to, memory.loaded)

    @pl.when(at.reader == 0)
    def _():
        start(x.d_q.at[at.row, tokens, at.head], memory.d_q)

    @pl.when(at.reader > 0)
    def _():
        start(x.d_between.at[at.row, pl.ds(at.block * CHUNK, CHUNK), at.head], memory.d_q)

    start(x.q.at[at.row, tokens, g], memory.q)
    start(x.k.at[at.row, tokens, g], memory.k)
    start(x.u.at[at.row, tokens, at.head], memory.u)
    start(x.d_o.at[at.row, tokens, at.head], memory.d_o)
    start(x.inverse.at[at.row, at.head, tokens], memory.inverse)
    load_gates(x, memory, at, sizes, memory.loaded)
    plgpu.barrier_wait(memory.loaded)


def load_gates(x: StepInputs, memory: StepMemory, at: Step, sizes: Sizes, barrier) -> None:
    rows = x.gates.at[at.row, at.block * sizes.heads + at.head, pl.ds(0, READS)]
    plgpu.copy_gmem_to_smem(rows, memory.gates, barrier)
    if memory.codes is not None:
        plgpu.copy_gmem_to_smem(x.codes.at[at.row, at.block], memory.codes, barrier)


def meet_first(x: StepInputs, memory: StepMemory, at: Step, sizes: Sizes, interpret) -> None:
    """All of a second chunk that reads the first: its queries as they meet that are made first, of its own keys."""
    mine, theirs = (chunk_tokens_at(at.block, chunk) for chunk in (at.reader, at.source))
    g, dtype = sizes.key_head(at.head), memory.k.dtype
    plgpu.copy_gmem_to_smem(x.q.at[at.row, mine, g], memory.q, memory.begun)
    plgpu.copy_gmem_to_smem(x.k.at[at.row, mine, g], memory.k, memory.begun)
    plgpu.copy_gmem_to_smem(x.inverse.at[at.row, at.head, mine], memory.inverse, memory.begun)
    load_gates(x, memory, at, sizes, memory.begun)
    plgpu.copy_gmem_to_smem(x.u.at[at.row, theirs, at.head], memory.u, memory.loaded)
    plgpu.copy_gmem_to_smem(x.d_o.at[at.row, mine, at.head], memory.d_o, memory.loaded)
    plgpu.copy_gmem_to_smem(x.d_q.at[at.row, mine, at.head], memory.d_q, memory.loaded)
    plgpu.barrier_wait(memory.begun)
    scores = masked(multiply(memory.q, memory.k.T, SQUARE), 0)
    scores = of_document(memory.codes, scores, at.mine, at.mine)
    solved = multiply(left_operand(scores.astype(dtype), memory.left), memory.inverse, SQUARE)
    put(memory.pairs.at[0], solved * by_column(memory.gates.at[ERASE, at.mine], CHUNK))
    put(memory.q, times_sum(matrix(memory.q), [(memory.pairs.at[0], memory.k)], interpret))
    plgpu.copy_gmem_to_smem(x.k.at[at.row, theirs, g], memory.k, memory.loaded)
    plgpu.copy_gmem_to_smem(x.inverse.at[at.row, at.head, theirs], memory.inverse, memory.loaded)
    plgpu.barrier_wait(memory.loaded)


def chunk_tokens_at(block, chunk):
    return pl.ds(block * BLOCK + chunk * CHUNK, CHUNK)


def step_memory(sizes: Sizes, rows: int, dtype, before: int, codes: bool, interpret) -> StepMemory:
    tokens, square = shared(CHUNK, sizes.dim, dtype=dtype), shared(*SQUARE, dtype=dtype)
    return StepMemory(
        q=tokens,
        k=tokens,
        u=tokens,
        d_o=tokens,
        d_q=tokens,
        inverse=square,
        gates=plgpu.SMEM((READS, BLOCK), f32),
        pairs=shared(2, *SQUARE, dtype=dtype),
        sums=plgpu.SMEM((rows, CHUNK), f32),
        loaded=plgpu.Barrier(num_arrivals=5 if before else 7 + codes),
        begun=plgpu.Barrier(num_arrivals=4 + codes) if before else None,
        codes=plgpu.SMEM((BLOCK,), jnp.int32) if codes else None,
        left=None if interpret is None else square,
    )


def steps(x: StepInputs, before: int, *, sizes: Sizes, config: Config, interpret=None) -> tuple:
    """Of every chunk that reads itself (before = 0) or of every second chunk that reads the first (1): (dQ, dK of the
    chunk read, dU of it, sums float32 [B, units, H, rows, C]); dQ, dK and dU are of units, [B, units C, H, K].
    Undefined in empty blocks.

    x.d_between: with before = 0 the dQ that before = 1 gave."""
    dtype, per_block, codes = x.k.dtype, 1 if before else CHUNKS, x.codes is not None
    units, levels = sizes.blocks * per_block, INSIDE if codes else 1 if before else OTHER
    rows = LEVELS + levels
    arrays, inputs = jax.tree.flatten(x)
    buffers, memories = jax.tree.flatten(step_memory(sizes, rows, dtype, before, codes, interpret))

    def log_linear_delta_steps(*refs):
        given, refs = inputs.unflatten(refs[: len(arrays)]), refs[len(arrays) :]
        results, memory = refs[:4], memories.unflatten(refs[4:])
        row, unit, head = (lax.axis_index(name) for name in ("row", "unit", "head"))
        block, reader = (unit, jnp.int32(1)) if before else (lax.div(unit, CHUNKS), lax.rem(unit, CHUNKS))
        at = Step(row, block, head, reader, reader - before, before)
        if not codes:
            step_program(given, memory, at, unit, results, sizes, interpret)
            return

        @pl.when(given.numbers[row, block] >= 0)
        def _():
            step_program(given, memory, at, unit, results, sizes, interpret)

    keys = jax.ShapeDtypeStruct((sizes.batch, units * CHUNK, sizes.heads, sizes.dim), dtype)
    *gradients, sums = plgpu.kernel(
        log_linear_delta_steps,
        out_type=[keys, keys, keys, jax.ShapeDtypeStruct((sizes.batch, units * sizes.heads, rows, CHUNK), f32)],
        scratch_types=buffers,
        grid=(sizes.batch, units, sizes.heads),
        grid_names=("row", "unit", "head"),
        compiler_params=parameters(config.automatic_barriers),
        interpret=interpret,
    )(*arrays)
    return *gradients, sums.reshape(sizes.batch, units, sizes.heads, rows, CHUNK)


def step_program(x: StepInputs, memory: StepMemory, at: Step, unit, results, sizes: Sizes, interpret) -> None:
    """The body of `steps`: a unit of a head."""
    if at.before:
        meet_first(x, memory, at, sizes, interpret)
    else:
        load_step(x, memory, at, sizes)
    *gradients, sums = results
    here = pl.ds(unit * CHUNK, CHUNK)
    step_gradients(memory, at, tuple(ref.at[at.row, here, at.head] for ref in gradients), interpret)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(memory.sums, sums.at[at.row, unit * sizes.heads + at.head])
    plgpu.wait_smem_to_gmem(0)


@narrow_indices()
def inside_gradients(
    q, k, u, inverse, gates, d_o, d_q, places: Places, *, sizes: Sizes, config: Config, interpret=None
) -> tuple:
    """(dq, dk, du [B, T, H, K], the latter two as of all chunks and of the first ones, d_gates [B, N, H, 10, 128]
    float32 in units of the rows). Undefined in empty blocks.

    d_q [B, T, H, K]: the cotangent of the queries that leave their block; d_o [B, T, H, K]."""
    options = dict(sizes=sizes, config=config, interpret=interpret)
    gate_rows = gates.reshape(sizes.batch, -1, *gates.shape[3:])
    x = StepInputs(q, k, u, d_o, d_q, inverse, gate_rows, None, places.numbers, places.codes)
    d_between, d_k_first, d_u_first, first = steps(x, 1, **options)
    d_q, d_k, d_u, own = steps(x._replace(d_between=d_between), 0, **options)
    # [B, N, H, rows, 2, C] of the chunks of a block
    own = jnp.moveaxis(own.reshape(sizes.batch, sizes.blocks, CHUNKS, *own.shape[2:]), 2, 4)
    none = jnp.zeros_like(first[:, :, :, 0])

    def of_chunks(a, b):
        return jnp.stack([a, b], axis=-2)

    total = own[:, :, :, ROWS] - own[:, :, :, COLUMNS]
    total += of_chunks(-first[:, :, :, COLUMNS], first[:, :, :, ROWS])
    erase = own[:, :, :, ERASED] + of_chunks(first[:, :, :, ERASED], none)
    levels, others = own[:, :, :, LEVELS:], first[:, :, :, LEVELS:]
    others = of_chunks(jnp.zeros_like(others), others)
    by_level = levels + others if places.codes is not None else jnp.concatenate([levels, others], axis=3)
    rows = [total[:, :, :, None], erase[:, :, :, None], by_level]
    d_gates = jnp.concatenate(rows, axis=3).reshape(sizes.batch, sizes.blocks, sizes.heads, READS, BLOCK)
    return d_q, (d_k, d_k_first), (d_u, d_u_first), d_gates
