"""The gradients of log-linear linear attention's reads on a Hopper GPU: two programs, laid out as in `log_linear.py`.

With the letters of that file, M = R . w the weights of the pairs, b = dO U^T and X_j = dO S_j^T:

    queries    dQ = (M . b) K + sum over j of c_j . X_j        dw_l = rowsum of R . b . Q K^T over the pairs of level l
               dc_j = rowsum(Q . X_j)
    keys       dK = (M . b)^T Q        dU = (M . Q K^T)^T dO        column sums of M . b . Q K^T, for d G

Of a warpgroup's 64 tokens the pairs with each other ("own") have the levels 0 to 6, those with the other 64 level 7;
the latter exist only if the keys come first. dQ and dK are summed over the tiles of a program in float32 registers.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.log_linear import (
    BLOCK,
    GROUPS,
    INSIDE,
    READS,
    ROWS,
    SUM,
    TILE,
    WEIGHTS,
    Config,
    Inputs,
    Memory,
    Sizes,
    Task,
    f32,
    flat,
    launch,
    lowest_level,
    memory_for,
    rows_of,
    without_lowest,
)
from efla_jax.kernels.mosaic import (
    MASKED,
    WGMMA,
    accumulated,
    begin,
    by_column,
    by_row,
    finish,
    index,
    left_operand,
    shared,
    staging,
)

OTHER = INSIDE - 1  # the level of the pairs of a block's halves
SQUARE = plgpu.ACC((ROWS, ROWS), f32)


def zero_of(gates) -> jax.Array:
    """0, which the compiler cannot know: what depends on it is made anew for every tile. Masks and the addresses of q
    and k are the same for all tiles and would otherwise stay in registers, more than there are."""
    return (gates[SUM, 0] > -MASKED).astype(jnp.int32)


def positions(gates) -> tuple[jax.Array, jax.Array]:
    """Row and column [64, 64] int32."""
    zero = zero_of(gates)
    return index(ROWS, ROWS, 0) + zero, index(ROWS, ROWS, 1) + zero


def apart(gates) -> jax.Array:
    """Row xor column [64, 64] int32: below 2^l for pairs of level l or less."""
    row, column = positions(gates)
    return row ^ column


def decays(gates, group, *, own: bool, transposed: bool) -> jax.Array:
    """R [64 queries, 64 keys] float32 of this warpgroup's queries, or transposed that of its keys [64 keys, 64
    queries]; with its own tokens or with the others'."""
    mine, theirs = rows_of(group), rows_of(group if own else 1 - group)
    exponent = by_row(gates.at[SUM, mine], ROWS) - by_column(gates.at[SUM, theirs], ROWS)
    exponent = -exponent if transposed else exponent
    if own:
        row, column = positions(gates)
        return jnp.exp2(jnp.where(column >= row if transposed else column <= row, exponent, MASKED))
    last = 0 if transposed else 1  # the half of the block that sees the other, or is seen by it
    return jnp.exp2(exponent + jnp.where(group == last, 0.0, MASKED))


def own_weights(gates, group, vector) -> jax.Array:
    """w [64, 64] of a warpgroup's own pairs; vector spreads a row of the gates over them."""
    here, distance = rows_of(group), apart(gates)
    weight = vector(gates.at[WEIGHTS + OTHER - 1, here], ROWS)
    for level in reversed(range(OTHER - 1)):
        weight = jnp.where(distance < (1 << level), vector(gates.at[WEIGHTS + level, here], ROWS), weight)
    return weight


def products(*pairs) -> tuple[jax.Array, ...]:
    """left right of each pair [64, 64] float32, of tiles in shared memory."""

    def multiply(*accumulators):
        for acc, (left, right) in zip(accumulators, pairs, strict=True):
            plgpu.wgmma(acc, left, right)
        last = len(pairs) - 1
        return tuple(accumulated(acc, wait_n=last - i) for i, acc in enumerate(accumulators))

    return pl.run_scoped(multiply, *[SQUARE] * len(pairs))


def add_product(total, a, right, left, interpret) -> jax.Array:
    """total + a right, a [64, 64] in registers."""

    def add(acc):
        begin(acc, total, interpret)
        plgpu.wgmma(acc, left_operand(a, left), right)
        return finish(acc, total, interpret)

    return pl.run_scoped(add, plgpu.ACC(total.shape, f32))


# ---- queries ------------------------------------------------------------------------------------------------------


def query_pairs(memory: Memory, slot, sums, group, own: bool) -> jax.Array:
    """M . b [64, 64] in 16 bits of the own pairs or of the others, while their sums by level are written."""
    gates, here, there = memory.gates.at[slot], rows_of(group), rows_of(group if own else 1 - group)
    u, d_o = memory.values.at[slot, 0, there], memory.values.at[slot, 1, here]
    scores, pairs = products((memory.q.at[here], memory.k.at[there].T), (d_o, u.T))
    pairs = pairs * decays(gates, group, own=own, transposed=False)
    mixed = pairs * scores
    if not own:
        sums.at[OTHER][...] = jnp.sum(mixed, axis=1)
        return (pairs * by_row(gates.at[WEIGHTS + OTHER, here], ROWS)).astype(memory.q.dtype)
    for level in range(OTHER):
        distance = apart(gates) >> max(level - 1, 0)
        of_level = distance == min(level, 1)
        sums.at[level][...] = jnp.sum(jnp.where(of_level, mixed, 0.0), axis=1)
    return (pairs * own_weights(gates, group, by_row)).astype(memory.q.dtype)


def query_gradients(task: Task, memory: Memory, d_q, sums_g, sums, left, interpret) -> None:
    """A compute warpgroup of `queries`: all tiles."""
    number, stages, live, key_dim = lax.axis_index("group"), memory.values.shape[0], task.live, task.sizes.key_dim
    wide = plgpu.ACC((ROWS, key_dim), f32)
    plgpu.barrier_wait(memory.keys)

    def tile(i, total):
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(memory.full.at[slot])
        group = number + zero_of(memory.gates.at[slot])
        here = rows_of(group)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for own in (True, False):
            pairs = query_pairs(memory, slot, sums, group, own)
            keys = memory.k.at[rows_of(group if own else 1 - group)]
            total = add_product(total, pairs, keys, left, interpret)

        def read(m, carry):
            total, block = carry
            place = lax.rem(i * live + m, memory.states.shape[0])
            plgpu.barrier_wait(memory.state_full.at[place])
            level = lowest_level(block)

            def multiply(acc):
                plgpu.wgmma(acc, memory.values.at[slot, 1, here], memory.states.at[place])
                weight = by_row(memory.gates.at[slot, READS + level, here], key_dim)
                seen = accumulated(acc, wait_n=0)
                q = plgpu.load(memory.q.at[here], layout=WGMMA, optimized=False).astype(f32)
                sums.at[INSIDE + level][...] = jnp.sum(q * seen, axis=1)
                return total + seen * weight

            total = pl.run_scoped(multiply, wide)
            plgpu.barrier_arrive(memory.state_empty.at[place])
            return total, without_lowest(block)

        total, _ = lax.fori_loop(0, live, read, (total, task.block))
        plgpu.barrier_arrive(memory.empty.at[slot])
        plgpu.commit_smem()
        row = task.block * (task.sizes.heads * task.sizes.value_dim // TILE) + task.tile(i)
        plgpu.copy_smem_to_gmem(sums, sums_g.at[task.row, row, :, rows_of(number)])
        return total

    zero = plgpu.layout_cast(jnp.zeros((ROWS, key_dim), f32), WGMMA)
    total = lax.fori_loop(0, task.sizes.tiles, tile, zero)
    time = pl.ds(task.block * BLOCK + number * ROWS, ROWS)
    d_q[task.share, task.row, time, task.channels] = total.astype(d_q.dtype)


# ---- keys ---------------------------------------------------------------------------------------------------------


def key_gradients(task: Task, memory: Memory, results, d_u_s, sums, left, interpret) -> None:
    """A compute warpgroup of `keys`: all tiles."""
    (d_k, d_u, sums_g), number, stages = results, lax.axis_index("group"), memory.values.shape[0]
    dtype, key_dim = memory.k.dtype, task.sizes.key_dim
    time = pl.ds(task.block * BLOCK + number * ROWS, ROWS)
    plgpu.barrier_wait(memory.keys)

    def tile(i, total):
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(memory.full.at[slot])
        gates = memory.gates.at[slot]
        group = number + zero_of(gates)
        here = rows_of(group)
        u, d_o = memory.values.at[slot, 0, here], memory.values.at[slot, 1]
        columns, spread = [], []
        for own in (True, False):
            there = rows_of(group if own else 1 - group)
            scores, values = products((memory.k.at[here], memory.q.at[there].T), (u, d_o.at[there].T))
            weight = decays(gates, group, own=own, transposed=True)
            if own:
                weight = weight * own_weights(gates, group, by_column)
            else:
                weight = weight * by_column(gates.at[WEIGHTS + OTHER, there], ROWS)
            values, narrow = values * weight, (scores * weight).astype(dtype)
            mixed = values * scores
            # A token's pair with itself cancels between rows and columns: left out rather than subtracted.
            columns.append(jnp.sum(jnp.where(apart(gates) != 0, mixed, 0.0) if own else mixed, axis=1))
            values = values.astype(dtype)
            spread.append((narrow, d_o.at[there]))
            total = add_product(total, values, memory.q.at[there], left, interpret)

        def write(acc):
            for narrow, right in spread:
                if left is not None:  # the interpreter's one buffer is about to be overwritten
                    plgpu.wgmma_wait(0)
                plgpu.wgmma(acc, left_operand(narrow, left), right)
            return accumulated(acc, wait_n=0).astype(dtype)

        written = pl.run_scoped(write, SQUARE)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sums[...] = columns[0] + columns[1]
        d_u_s[...] = written
        plgpu.barrier_arrive(memory.empty.at[slot])
        plgpu.commit_smem()
        row = task.block * (task.sizes.heads * task.sizes.value_dim // TILE) + task.tile(i)
        plgpu.copy_smem_to_gmem(sums, sums_g.at[task.row, row, rows_of(number)])
        plgpu.copy_smem_to_gmem(d_u_s, d_u.at[task.row, time, task.lanes(i)])
        return total

    zero = plgpu.layout_cast(jnp.zeros((ROWS, key_dim), f32), WGMMA)
    total = lax.fori_loop(0, task.sizes.tiles, tile, zero)
    d_k[task.share, task.row, time, task.channels] = total.astype(d_k.dtype)


def gradients(q, k, u, gates, states, d_o, *, config: Config, interpret=None) -> tuple:
    """(dq, dk [B, T, G, K] float32, dU [B, T, H, V], sums [B, N, H, rows - 1, 128], columns [B, N, H, 128] float32).

    Arguments as in `log_linear.read_out`; d_o like u. sums: dw of the levels inside, then dc of the levels of blocks,
    with anything where a block reads none; columns: the sums over queries of M . b . Q K^T without its diagonal. dU and
    dk are those of the pairs inside blocks: what goes through the states is not in them."""
    sizes, dtype = Sizes.of(k, u, gates, states, config), u.dtype
    batch, blocks, heads = sizes.batch, sizes.blocks, sizes.heads
    tiles, rows = heads * sizes.value_dim // TILE, sizes.rows - 1
    values, flat_gates = (flat(u), flat(d_o)), gates.reshape(batch, -1, *gates.shape[3:])
    shape = jax.ShapeDtypeStruct
    keys = shape((sizes.slices, *flat(k).shape), f32)
    left = staging([(ROWS, ROWS)], dtype, interpret, GROUPS)

    def queries(task, memory, results, scratch):
        query_gradients(task, memory, *results, *(scratch if interpret is not None else [*scratch, None]), interpret)

    d_q, sums = launch(
        "log_linear_queries",
        queries,
        Inputs(flat(q), flat(k), values, flat_gates, states),
        [keys, shape((batch, blocks * tiles, rows, BLOCK), f32)],
        memory_for(sizes, config, dtype, 2, sizes.rows, states=True, beside=4 * BLOCK * rows),
        [plgpu.SMEM((GROUPS, rows, ROWS), f32), *left],
        sizes,
        config,
        interpret,
    )

    def of_keys(task, memory, results, scratch):
        key_gradients(task, memory, results, *(scratch if interpret is not None else [*scratch, None]), interpret)

    d_k, d_u, columns = launch(
        "log_linear_keys",
        of_keys,
        Inputs(flat(q), flat(k), values, flat_gates),
        [keys, shape(flat(u).shape, dtype), shape((batch, blocks * tiles, BLOCK), f32)],
        memory_for(sizes, config, dtype, 2, READS, states=False, beside=2 * BLOCK * TILE + 4 * BLOCK),
        [shared(GROUPS, ROWS, TILE, dtype=dtype), plgpu.SMEM((GROUPS, ROWS), f32), *left],
        sizes,
        config,
        interpret,
    )
    sums, columns = (x.reshape(batch, blocks, heads, -1, *x.shape[2:]).sum(3) for x in (sums, columns))
    return d_q.sum(0).reshape(q.shape), d_k.sum(0).reshape(k.shape), d_u.reshape(u.shape), sums, columns
