"""The gradients inside blocks of the log-linear delta rule on a Hopper GPU; letters as in `log_linear_delta.py`.

steps    of queries Q and the chunk that they read, their own or the one before it; dQ' is the cotangent of Q - P e K:
             V = dO U^T      dP = w . R . V - (dQ' K^T) e      H = dP X^T      dF = mask(H)      a = -strict(P^T H)
             dQ = dQ' + dF K        dK = dF^T Q - e P^T dQ' + (e a + (e a)^T) K        dU = (w . R . P)^T dO
             de = rowsum(a . K K^T) - rowsum(K . P^T dQ')        dw_l = rowsum of R . V . P over the pairs of level l
nodes    of a block's N or S, whose cotangent is D; T2 = v2 B2 - e2 L M1 with L = K2 K1^T, (v, B) = (-e, K) or (out, U):
             dT2 = X2^T K2 D        a2 = -strict(dT2 M2^T)        a21 = -dT2 M1^T        dM1 = K1 D - (e2 L)^T dT2
             dT1 = X1^T dM1         a1 = -strict(dT1 M1^T)        dB = v dT        dv = rowsum(B . dT)
             dK = M D^T, and through K K^T from a1, a2 and a21 as above

`a` is the cotangent of the triangle e K K^T, whose inverse X is made of: X itself needs no cotangent.
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
    TILE,
    WEIGHTS,
    Config,
    Sizes,
    chunk_tokens,
    columns,
    f32,
    matrix,
    multiply,
)
from efla_jax.kernels.mosaic import (
    MASKED,
    accumulated,
    begin,
    by_column,
    by_row,
    finish,
    index,
    left_operand,
    narrow_indices,
    parameters,
    shared,
    transposed,
)

SQUARE = (CHUNK, CHUNK)
OTHER = INSIDE - 1  # the level of the pairs of a block's two chunks
ROWS, COLUMNS, ERASED, LEVELS = range(4)  # rows of what `steps` sums: of the pairs by query and by key; d(-e); dw


class StepMemory(NamedTuple):
    """Shared memory of `steps`: q, k, u, dO, dQ' [C, K]; X [C, C]; gates [10, 128]; pairs [2, C, C]; sums [rows, C];
    the barrier of the loads; the interpreter's left operand."""

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
    left: Any = None


class Step(NamedTuple):
    """Queries of a chunk and the chunk that they read, `before` of their own: in a block the numbers of both."""

    row: Any
    block: Any
    head: Any
    reader: Any
    source: Any
    before: int


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


def send(ref, x, target) -> None:
    """Copy registers to global memory by way of shared memory that nothing else uses any more."""
    put(ref, x)
    plgpu.copy_smem_to_gmem(ref, target)


def masked(x, before: int, strict: bool = False) -> jax.Array:
    """x [C, C] where the key does not come after the query, or comes before it."""
    row, column = index(*SQUARE, 0), index(*SQUARE, 1)
    return x if before else jnp.where(column < row if strict else column <= row, x, 0.0)


def decays(gates, at: Step) -> jax.Array:
    """R [C, C]."""
    mine, theirs = (pl.ds(chunk * CHUNK, CHUNK) for chunk in (at.reader, at.source))
    exponent = by_row(gates.at[SUM, mine], CHUNK) - by_column(gates.at[SUM, theirs], CHUNK)
    if at.before:
        return jnp.exp2(exponent)
    return jnp.exp2(jnp.where(index(*SQUARE, 1) <= index(*SQUARE, 0), exponent, MASKED))


def weights(gates, at: Step) -> jax.Array:
    """w [C, C]."""
    mine = pl.ds(at.reader * CHUNK, CHUNK)
    weight = by_row(gates.at[WEIGHTS + OTHER - 1 + at.before, mine], CHUNK)
    if at.before:
        return weight
    apart = index(*SQUARE, 0) ^ index(*SQUARE, 1)
    for level in reversed(range(OTHER - 1)):
        weight = jnp.where(apart < (1 << level), by_row(gates.at[WEIGHTS + level, mine], CHUNK), weight)
    return weight


def sum_levels(sums, mixed, before: int) -> None:
    """dw from R . V . P."""
    if before:
        sums.at[LEVELS][...] = jnp.sum(mixed, axis=1)
        return
    apart = index(*SQUARE, 0) ^ index(*SQUARE, 1)
    for level in range(OTHER):
        of_level = (apart >> max(level - 1, 0)) == min(level, 1)
        sums.at[LEVELS + level][...] = jnp.sum(jnp.where(of_level, mixed, 0.0), axis=1)


def step_pairs(memory: StepMemory, at: Step) -> tuple[jax.Array, jax.Array]:
    """dP float32 and w . R . P in 16 bits, while P is put into pairs[0] and what is summed of the pairs into sums."""
    dtype, gates, sums = memory.k.dtype, memory.gates, memory.sums
    scores = masked(multiply(memory.q, memory.k.T, SQUARE), at.before).astype(dtype)
    solved = multiply(left_operand(scores, memory.left), memory.inverse, SQUARE)
    put(memory.pairs.at[0], solved)
    values = multiply(memory.d_o, memory.u.T, SQUARE) * decays(gates, at)
    mixed = values * solved
    sum_levels(sums, mixed, at.before)
    weight = weights(gates, at)
    # A token's pair with itself cancels between rows and columns: left out rather than subtracted.
    mixed = masked(mixed * weight, at.before, strict=True)
    sums.at[ROWS][...] = jnp.sum(mixed, axis=1)
    sums.at[COLUMNS][...] = jnp.sum(mixed, axis=0)
    erase = by_column(gates.at[ERASE, pl.ds(at.source * CHUNK, CHUNK)], CHUNK)
    d_solved = values * weight + multiply(memory.d_q, memory.k.T, SQUARE) * erase
    return d_solved, (solved * (weight * decays(gates, at))).astype(dtype)


def step_gradients(memory: StepMemory, at: Step, results: tuple, interpret) -> None:
    """dQ, dK and dU of a step to `results`, and its sums into shared memory."""
    dtype, wide, (d_q, d_k, d_u) = memory.k.dtype, memory.q.shape, results
    d_solved, spread = step_pairs(memory, at)
    put(memory.pairs.at[1], spread)
    send(memory.u, multiply(memory.pairs.at[1].T, memory.d_o, wide), d_u)
    d_scores = multiply(left_operand(d_solved.astype(dtype), memory.left), memory.inverse.T, SQUARE)
    put(memory.pairs.at[1], d_scores)
    triangle = masked(-multiply(memory.pairs.at[0].T, memory.pairs.at[1], SQUARE), 0, strict=True)
    negative = memory.gates.at[ERASE, pl.ds(at.source * CHUNK, CHUNK)]
    own = jnp.sum(triangle * multiply(memory.k, memory.k.T, SQUARE), axis=1)
    erased = multiply(memory.pairs.at[0].T, memory.d_q, wide)
    memory.sums.at[ERASED][...] = jnp.sum(matrix(memory.k) * erased, axis=1) - own
    put(memory.pairs.at[0], triangle * -by_row(negative, CHUNK))
    put(memory.pairs.at[1], masked(d_scores, at.before))
    changed, scores = memory.pairs.at[0], memory.pairs.at[1]
    terms = (scores.T, memory.q), (changed, memory.k), (changed.T, memory.k)
    send(memory.q, times_sum(erased * by_row(negative, wide[1]), terms, interpret), d_k)
    send(memory.d_q, times_sum(matrix(memory.d_q), [(scores, memory.k)], interpret), d_q)


class StepInputs(NamedTuple):
    """In global memory; between and d_between [B, T / 2, H, K]: the queries of second chunks when they meet the first,
    and their cotangent, None where a step makes it."""

    q: Any
    k: Any
    u: Any
    d_o: Any
    d_q: Any
    inverse: Any
    gates: Any
    between: Any


def load_step(x: StepInputs, memory: StepMemory, at: Step, sizes: Sizes) -> None:
    tokens, source = (chunk_tokens_at(at.block, chunk) for chunk in (at.reader, at.source))
    g, half = sizes.key_head(at.head), pl.ds(at.block * CHUNK, CHUNK)

    def start(from_, to) -> None:
        plgpu.copy_gmem_to_smem(from_, to, memory.loaded)

    if at.before:
        start(x.between.at[at.row, half, at.head], memory.q)
        start(x.d_q.at[at.row, tokens, at.head], memory.d_q)
    else:
        start(x.q.at[at.row, tokens, g], memory.q)

        @pl.when(at.reader == 0)
        def _():
            start(x.d_q.at[at.row, tokens, at.head], memory.d_q)

        @pl.when(at.reader > 0)
        def _():
            start(x.between.at[at.row, half, at.head], memory.d_q)

    start(x.k.at[at.row, source, g], memory.k)
    start(x.u.at[at.row, source, at.head], memory.u)
    start(x.d_o.at[at.row, tokens, at.head], memory.d_o)
    start(x.inverse.at[at.row, at.head, source], memory.inverse)
    start(x.gates.at[at.row, at.block * sizes.heads + at.head, pl.ds(0, READS)], memory.gates)
    plgpu.barrier_wait(memory.loaded)


def chunk_tokens_at(block, chunk):
    return pl.ds(block * BLOCK + chunk * CHUNK, CHUNK)


def steps(x: StepInputs, before: int, *, sizes: Sizes, config: Config, interpret=None) -> tuple:
    """Of every chunk that reads itself (before = 0) or of every second chunk that reads the first (1): (dQ, dK of the
    chunk read, dU of it, sums float32 [B, units, H, rows, C]); dQ, dK and dU are of units, [B, units C, H, K].

    x.between: with before = 1 the queries that meet the first chunks, else the cotangents dQ that this gave."""
    dtype, per_block = x.k.dtype, 1 if before else CHUNKS
    units, rows = sizes.blocks * per_block, LEVELS + (1 if before else OTHER)
    tokens, square = shared(CHUNK, sizes.dim, dtype=dtype), shared(*SQUARE, dtype=dtype)

    def log_linear_delta_steps(*refs):
        inputs, results, scratch = StepInputs(*refs[:8]), refs[8:11], refs[12:]
        memory, sums = StepMemory(*scratch), refs[11]
        row, unit, head = (lax.axis_index(name) for name in ("row", "unit", "head"))
        block, reader = (unit, jnp.int32(1)) if before else (lax.div(unit, CHUNKS), lax.rem(unit, CHUNKS))
        at = Step(row, block, head, reader, reader - before, before)
        load_step(inputs, memory, at, sizes)
        here = pl.ds(unit * CHUNK, CHUNK)
        step_gradients(memory, at, tuple(ref.at[row, here, head] for ref in results), interpret)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory.sums, sums.at[row, unit * sizes.heads + head])
        plgpu.wait_smem_to_gmem(0)

    keys = jax.ShapeDtypeStruct((sizes.batch, units * CHUNK, sizes.heads, sizes.dim), dtype)
    *gradients, sums = plgpu.kernel(
        log_linear_delta_steps,
        out_type=[keys, keys, keys, jax.ShapeDtypeStruct((sizes.batch, units * sizes.heads, rows, CHUNK), f32)],
        scratch_types=[
            *[tokens] * 5,
            square,
            plgpu.SMEM((READS, BLOCK), f32),
            shared(2, *SQUARE, dtype=dtype),
            plgpu.SMEM((rows, CHUNK), f32),
            plgpu.Barrier(num_arrivals=7),
            *[square] * (interpret is not None),
        ],
        grid=(sizes.batch, units, sizes.heads),
        grid_names=("row", "unit", "head"),
        compiler_params=parameters(config.automatic_barriers),
        interpret=interpret,
    )(*x)
    return *gradients, sums.reshape(sizes.batch, units, sizes.heads, rows, CHUNK)


@narrow_indices()
def inside_gradients(q, k, u, inverse, gates, between, d_o, d_q, *, config: Config, interpret=None) -> tuple:
    """(dq, dk, du [B, T, H, K] as lists of terms, d_gates [B, N, H, 10, 128] float32 in units of the rows).

    d_q [B, T, H, K]: the cotangent of the queries that leave their block; between: see `queries`; d_o [B, T, H, K]."""
    sizes = Sizes.of(k, u)
    options = dict(sizes=sizes, config=config, interpret=interpret)
    gate_rows = gates.reshape(sizes.batch, -1, *gates.shape[3:])
    x = StepInputs(q, k, u, d_o, d_q, inverse, gate_rows, between)
    d_between, d_k_first, d_u_first, first = steps(x, 1, **options)
    d_q, d_k, d_u, own = steps(x._replace(between=d_between), 0, **options)
    # [B, N, H, rows, 2, C] of the chunks of a block
    own = jnp.moveaxis(own.reshape(sizes.batch, sizes.blocks, CHUNKS, *own.shape[2:]), 2, 4)
    none = jnp.zeros_like(first[:, :, :, 0])

    def of_chunks(a, b):
        return jnp.stack([a, b], axis=3)

    total = own[:, :, :, ROWS] - own[:, :, :, COLUMNS]
    total += of_chunks(-first[:, :, :, COLUMNS], first[:, :, :, ROWS])
    erase = own[:, :, :, ERASED] + of_chunks(first[:, :, :, ERASED], none)
    rows = [total[:, :, :, None], erase[:, :, :, None], own[:, :, :, LEVELS:]]
    rows.append(of_chunks(none, first[:, :, :, LEVELS])[:, :, :, None])
    d_gates = jnp.concatenate(rows, axis=3).reshape(sizes.batch, sizes.blocks, sizes.heads, READS, BLOCK)
    return d_q, (d_k, d_k_first), (d_u, d_u_first), d_gates


# ---- nodes --------------------------------------------------------------------------------------------------------

ROOM = CHUNKS  # where dM and dT begin in `work`


class NodeMemory(NamedTuple):
    """Shared memory of `node_gradients`: k; k or u, both [2, C, K]; M of the chunks, then dM and dT [4, C, K]; X
    [2, C, C]; vectors [2, 128]; D [K, K]; pairs [warpgroups, 2, C, C]; sums [warpgroups + 1, 128]: dv of each one's
    columns, d(-e); barriers of the loads and of the warpgroups' meeting; the interpreter's left operand."""

    k: Any
    values: Any
    work: Any
    inverse: Any
    vectors: Any
    cotangent: Any
    pairs: Any
    sums: Any
    loaded: Any
    met: Any
    left: Any = None


def load_node(refs: tuple, memory: NodeMemory, place: tuple, sizes: Sizes) -> None:
    (k, u, inverse, vectors, *d_nodes), (row, block, head, kind) = refs, place
    g = sizes.key_head(head)

    def start(from_, to) -> None:
        plgpu.copy_gmem_to_smem(from_, to, memory.loaded)

    for chunk in range(CHUNKS):
        tokens = chunk_tokens(block, chunk)
        start(k.at[row, tokens, g], memory.k.at[chunk])
        start(inverse.at[row, head, tokens], memory.inverse.at[chunk])

        @pl.when(kind == 0)
        def _(chunk=chunk, tokens=tokens):
            start(k.at[row, tokens, g], memory.values.at[chunk])

        @pl.when(kind == 1)
        def _(chunk=chunk, tokens=tokens):
            start(u.at[row, tokens, head], memory.values.at[chunk])

    start(vectors.at[row, block * sizes.heads + head], memory.vectors)
    pair, odd = lax.div(block, 2), lax.rem(block, 2)

    @pl.when(odd == 0)
    def _():
        start(d_nodes[0].at[kind, row, pair, head], memory.cotangent)

    for number, source in enumerate(d_nodes[1:]):

        @pl.when((odd == 1) & (kind == number))
        def _(source=source):
            start(source.at[0, row, pair, head], memory.cotangent)


def products_of(terms, shape) -> jax.Array:
    """The sum of the products of pairs in shared memory."""

    def run(acc):
        for left, right in terms:
            plgpu.wgmma(acc, left, right)
        return accumulated(acc, wait_n=0)

    return pl.run_scoped(run, plgpu.ACC(shape, f32))


def solve_columns(memory: NodeMemory, kind, group, interpret) -> None:
    """Of 64 columns M1 and M2 into `solved`, and -e L in 16 bits into pairs[0]."""
    dtype, here, pairs = memory.k.dtype, columns(group), memory.pairs.at[group]
    first, second = pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)
    solved, room = [memory.work.at[chunk, :, here] for chunk in range(CHUNKS)], memory.work.at[ROOM + 1, :, here]
    x = matrix(memory.inverse.at[0]) * by_column(memory.vectors.at[kind, first], CHUNK)
    left = None if memory.left is None else memory.left.at[group]
    put(solved[0], multiply(left_operand(x.astype(dtype), left), memory.values.at[0, :, here], SQUARE))
    known = multiply(memory.k.at[1], memory.k.at[0].T, SQUARE)
    put(pairs.at[0], known * by_row(memory.vectors.at[0, second], CHUNK))
    start = matrix(memory.values.at[1, :, here]) * by_row(memory.vectors.at[kind, second], TILE)
    put(room, times_sum(start, [(pairs.at[0], solved[0])], interpret))
    put(solved[1], multiply(memory.inverse.at[1], room, SQUARE))


def solve_back(memory: NodeMemory, kind, group) -> None:
    """Of 64 columns dT of both chunks into `work`, dv into `sums`, and dU, if that is what dB is, over u."""
    here, pairs = columns(group), memory.pairs.at[group]
    for chunk in reversed(range(CHUNKS)):
        room, values = memory.work.at[ROOM + chunk, :, here], memory.values.at[chunk, :, here]
        terms = [(memory.k.at[chunk], memory.cotangent.at[:, here])]
        if chunk == 0:
            terms.append((pairs.at[0].T, memory.work.at[ROOM + 1, :, here]))
        put(room, products_of(terms, SQUARE))
        d_start, tokens = multiply(memory.inverse.at[chunk].T, room, SQUARE), pl.ds(chunk * CHUNK, CHUNK)
        memory.sums.at[group, tokens][...] = jnp.sum(matrix(values) * d_start, axis=1)
        put(room, d_start)

        @pl.when(kind == 1)
        def _(d_start=d_start, tokens=tokens, values=values):
            put(values, d_start * by_row(memory.vectors.at[kind, tokens], TILE))


def meet(barrier) -> None:
    """Both warpgroups have come here, and see what the other wrote."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def send_chunk(memory: NodeMemory, chunk, kind, group, d_k, d_u, interpret) -> None:
    """dK of a chunk: through M and as B, from its own triangle, and from the pairs of both chunks; its d(-e)."""
    work, pairs, k, dtype = memory.work, memory.pairs.at[group], memory.k.at[chunk], memory.k.dtype
    here, second, wide = pl.ds(chunk * CHUNK, CHUNK), pl.ds(CHUNK, CHUNK), memory.k.shape[1:]

    @pl.when(kind == 1)
    def _():
        plgpu.copy_smem_to_gmem(memory.values.at[chunk], d_u)

    triangle = masked(-multiply(work.at[ROOM + chunk], work.at[chunk].T, SQUARE), 0, strict=True)
    put(pairs.at[1], triangle * -by_row(memory.vectors.at[0, here], CHUNK))
    own = jnp.sum(triangle * multiply(k, k.T, SQUARE), axis=1)
    joined = multiply(work.at[ROOM + 1], work.at[0].T, SQUARE)  # -a21
    put(pairs.at[0], joined * by_row(memory.vectors.at[0, second], CHUNK))
    joined = jnp.sum(joined * multiply(memory.k.at[1], memory.k.at[0].T, SQUARE), axis=1)
    joined = joined * lax.convert_element_type(chunk, f32)  # they are the second chunk's
    memory.sums.at[memory.sums.shape[0] - 1, here][...] = joined - own
    scale = by_row(memory.vectors.at[0, here], wide[1]) * lax.convert_element_type(1 - kind, f32)
    terms = (work.at[chunk], memory.cotangent.T), (pairs.at[1], k), (pairs.at[1].T, k)
    keys = times_sum(matrix(work.at[ROOM + chunk]) * scale, terms, interpret)
    # Rows of the pairs are of the second chunk, columns of the first.
    mine = jnp.where(chunk == 1, matrix(pairs.at[0]), transposed(pairs.at[0]).astype(f32))
    put(pairs.at[1], mine.astype(dtype))
    keys = times_sum(keys, [(pairs.at[1], memory.k.at[1 - chunk])], interpret)
    send(work.at[ROOM - chunk], keys, d_k)  # dT of the first chunk or M of the second one, that only this has used


def node_gradient_program(sizes: Sizes, inputs: tuple, results: tuple, memory: NodeMemory, interpret) -> None:
    """The body of `node_gradients`: a block's N (kind 0) or S (kind 1) of a head."""
    (d_k, d_u, sums), group, groups = results, lax.axis_index("group"), sizes.dim // TILE
    row, block, pair = (lax.axis_index(name) for name in ("row", "block", "pair"))
    head, kind = lax.div(pair, 2), lax.rem(pair, 2)

    @pl.when(group == 0)
    def _():
        load_node(inputs, memory, (row, block, head, kind), sizes)

    plgpu.barrier_wait(memory.loaded)
    solve_columns(memory, kind, group, interpret)
    solve_back(memory, kind, group)
    meet(memory.met)

    def chunk(i, _):
        number = i * groups + group
        tokens = pl.ds(block * BLOCK + number * CHUNK, CHUNK)
        targets = d_k.at[kind, row, tokens, head], d_u.at[row, tokens, head]
        send_chunk(memory, number, kind, group, *targets, interpret)

    lax.fori_loop(0, CHUNKS // groups, chunk, None)
    meet(memory.met)

    @pl.when(group == 0)
    def _():
        plgpu.copy_smem_to_gmem(memory.sums, sums.at[kind, row, block * sizes.heads + head])

    plgpu.wait_smem_to_gmem(0)


@narrow_indices()
def node_gradients(k, u, inverse, vectors, d_nodes: tuple, *, config: Config, interpret=None) -> tuple:
    """(dk [2, B, T, H, K], its two terms; du [B, T, H, K]; d_vectors [B, N, H, 2, 128] float32) of `nodes`.

    d_nodes, in the dtype of k: (dN, dS) [2, B, P, H, K, K] of every other block, then dN and dS [1, B, P', H, K, K] of
    the rest, if there are any; the rest as in `nodes`."""
    sizes, dtype = Sizes.of(k, u), k.dtype
    tokens, count, groups = shared(CHUNKS, CHUNK, sizes.dim, dtype=dtype), 4 + len(d_nodes), sizes.dim // TILE

    def log_linear_delta_node_gradients(*refs):
        node_gradient_program(sizes, refs[:count], refs[count : count + 3], NodeMemory(*refs[count + 3 :]), interpret)

    shape = jax.ShapeDtypeStruct
    d_k, d_u, sums = plgpu.kernel(
        log_linear_delta_node_gradients,
        out_type=[
            shape((2, *u.shape), dtype),
            shape(u.shape, dtype),
            shape((2, sizes.batch, sizes.blocks * sizes.heads, groups + 1, BLOCK), f32),
        ],
        scratch_types=[
            *[tokens] * 2,
            shared(2 * CHUNKS, CHUNK, sizes.dim, dtype=dtype),
            shared(CHUNKS, *SQUARE, dtype=dtype),
            plgpu.SMEM((2, BLOCK), f32),
            shared(sizes.dim, sizes.dim, dtype=dtype),
            shared(groups, 2, *SQUARE, dtype=dtype),
            plgpu.SMEM((groups + 1, BLOCK), f32),
            plgpu.Barrier(num_arrivals=3 * CHUNKS + 2),
            plgpu.Barrier(num_arrivals=groups),
            *[shared(groups, *SQUARE, dtype=dtype)] * (interpret is not None),
        ],
        grid=(sizes.batch, sizes.blocks, 2 * sizes.heads),
        grid_names=("row", "block", "pair"),
        num_threads=groups,
        thread_name="group",
        compiler_params=parameters(config.automatic_barriers),
        interpret=interpret,
    )(k, u, inverse, vectors.reshape(sizes.batch, -1, 2, BLOCK), *d_nodes)
    starts, erase = sums[:, :, :, :groups].sum(3), sums[0, :, :, groups] + sums[1, :, :, groups]
    of_vectors = jnp.stack([starts[0] + erase, starts[1]], axis=2)
    return d_k, d_u, of_vectors.reshape(vectors.shape)
