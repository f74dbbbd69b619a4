"""The gradients of log-linear linear attention's reads on a Hopper GPU: two programs, laid out as in `log_linear.py`.

With the letters of that file, M = R . w the weights of the pairs, b = dO U^T and X_j = dO S_j^T:

    queries    dQ = (M . b) K + sum over j of c_j . X_j        dw_l = rowsum of R . b . Q K^T over the pairs of level l
               dc_j = rowsum(Q . X_j)
    keys       dK = (M . b)^T Q + a . U E^T        dU = (M . Q K^T)^T dO + a . K E
               column sums of M . b . Q K^T, for dG, and rowsum(U . K E), for da

a is the decay after a token until its block ends, E [K, V] the cotangent of what the block writes (`adjoint` in
`log_linear_states.py`). Of a warpgroup's 64 tokens the pairs with each other ("own") have the levels 0 to 6, those with
the other 64 level 7, unless a block has several documents, which then may lie anywhere; the latter pairs exist only if
the keys come first. dQ and dK are summed over the tiles of a program in float32 registers.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.log_linear import (
    GROUPS,
    Blocks,
    Config,
    Gates,
    Inputs,
    Memory,
    Sizes,
    Task,
    add_product,
    flat,
    launch,
    lowest_level,
    memory_for,
    without_lowest,
)
from efla_jax.kernels.log_linear_pairs import (
    AFTER,
    BLOCK,
    INSIDE,
    OTHER,
    READS,
    ROWS,
    TILE,
    WEIGHTS,
    by_level,
    decays,
    f32,
    levels_of,
    positions,
    rows_of,
    since_state,
    vector,
    weights_of,
    zero_of,
)
from efla_jax.kernels.mosaic import (
    WGMMA,
    accumulated,
    begin,
    by_row,
    finish,
    left_operand,
    shared,
    staging,
)

SQUARE = plgpu.ACC((ROWS, ROWS), f32)


def zeros(shape: tuple[int, ...]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, f32), WGMMA if len(shape) == 2 else WGMMA.reduce(1))


def products(*pairs) -> tuple[jax.Array, ...]:
    """left right of each pair [64, 64] float32, of tiles in shared memory."""

    def multiply(*accumulators):
        for acc, (left, right) in zip(accumulators, pairs, strict=True):
            plgpu.wgmma(acc, left, right)
        last = len(pairs) - 1
        return tuple(accumulated(acc, wait_n=last - i) for i, acc in enumerate(accumulators))

    return pl.run_scoped(multiply, *[SQUARE] * len(pairs))


def add_two(totals, factors, left, interpret) -> tuple[jax.Array, jax.Array]:
    """Each of two totals plus its product a right, a [64, 64] in registers."""

    def add(*accumulators):
        for acc, total in zip(accumulators, totals, strict=True):
            begin(acc, total, interpret)
        for acc, (a, right) in zip(accumulators, factors, strict=True):
            if left is not None:  # the interpreter's one buffer is about to be overwritten
                plgpu.wgmma_wait(0)
            plgpu.wgmma(acc, left_operand(a, left), right)
        first = finish(accumulators[0], totals[0], interpret, wait_n=1)
        return first, finish(accumulators[1], totals[1], interpret)

    return pl.run_scoped(add, *(plgpu.ACC(total.shape, f32) for total in totals))


# ---- queries ------------------------------------------------------------------------------------------------------


def query_pairs(memory: Memory, slot, sums, balance, group, own: bool) -> tuple[jax.Array, jax.Array]:
    """M . b [64, 64] in 16 bits of the own pairs or then of the others, while their sums by level are written; the
    balance [64] and what these sums weigh, but for pairs of a token with itself."""
    gates, codes = memory.gates.at[slot], memory.codes
    here, there = rows_of(group), rows_of(group if own else 1 - group)
    u, d_o = memory.values.at[slot, 0, there], memory.values.at[slot, 1, here]
    scores, pairs = products((memory.q.at[here], memory.k.at[there].T), (d_o, u.T))
    pairs = pairs * decays(gates, codes, group, own=own, transposed=False)
    mixed = pairs * scores
    sums_by_level = by_level(gates, codes, group, mixed, own)
    for level, total in zip(levels_of(codes, own), sums_by_level, strict=True):
        if level > 0:
            balance = balance + vector(gates.at[WEIGHTS + level, here]) * total
        if codes is not None and not own:
            total = total + plgpu.load(sums.at[level], layout=WGMMA.reduce(1), optimized=False)
        sums.at[level][...] = total
    weighted = pairs * weights_of(gates, codes, group, own=own, transposed=False)
    return weighted.astype(memory.q.dtype), balance


def query_state(so_far, q, d_o, state, gates, sums, here, level) -> tuple[jax.Array, jax.Array]:
    """dQ [64, K] and the balance with what comes by way of a state, while the sums of its level are written."""
    total, balance = so_far

    def multiply(acc):
        plgpu.wgmma(acc, d_o, state)
        decay = since_state(gates, here, level)
        weight = vector(gates.at[READS + level, here]) * decay
        seen = accumulated(acc, wait_n=0)
        product = jnp.sum(q * seen, axis=1)
        sums.at[INSIDE + level][...] = product * decay
        return total + seen * lax.broadcast_in_dim(weight, total.shape, (0,)), balance + product * weight

    return pl.run_scoped(multiply, plgpu.ACC(total.shape, f32))


def query_gradients(task: Task, memory: Memory, results, sums, balances, left, interpret) -> None:
    """A compute warpgroup of `queries`: all tiles."""
    number, stages, live, key_dim = lax.axis_index("group"), memory.values.shape[0], task.live, task.sizes.key_dim
    (d_q, sums_g, balances_g), none = results, zeros((ROWS,))
    for level in range(INSIDE, task.sizes.levels):  # states that the block does not read
        sums.at[level][...] = none
    plgpu.barrier_wait(memory.keys)

    def tile(i, total):
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(memory.full.at[slot])
        group = number + zero_of(memory.gates.at[slot])
        here = rows_of(group)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def add_pairs(total, balance, own: bool):
            pairs, balance = query_pairs(memory, slot, sums, balance, group, own)
            keys = memory.k.at[rows_of(group if own else 1 - group)]
            return add_product(total, pairs, keys, left, interpret), balance

        def without_others(*so_far):
            sums.at[OTHER][...] = none
            return so_far

        so_far = add_pairs(total, none, True)
        if memory.codes is None:  # no token of the first half reads one of the second
            so_far = lax.cond(number > 0, lambda *x: add_pairs(*x, False), without_others, *so_far)
        else:
            so_far = add_pairs(*so_far, False)
        q = plgpu.load(memory.q.at[here], layout=WGMMA, optimized=False).astype(f32)

        def read(m, carry):
            so_far, left_of = carry
            place, level = lax.rem(i * live + m, memory.states.shape[0]), lowest_level(left_of)
            plgpu.barrier_wait(memory.state_full.at[place])
            d_o, state = memory.values.at[slot, 1, here], memory.states.at[place]
            so_far = query_state(so_far, q, d_o, state, memory.gates.at[slot], sums, here, level)
            plgpu.barrier_arrive(memory.state_empty.at[place])
            return so_far, without_lowest(left_of)

        (total, balance), _ = lax.fori_loop(0, live, read, (so_far, task.number))
        balances[...] = balance
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.empty.at[slot])
        row = task.block * task.sizes.columns + task.tile(i)
        plgpu.copy_smem_to_gmem(sums, sums_g.at[task.row, row, :, rows_of(number)])
        plgpu.copy_smem_to_gmem(balances, balances_g.at[task.row, row, rows_of(number)])
        return total

    total = lax.fori_loop(0, task.tiles, tile, zeros((ROWS, key_dim)))
    time = pl.ds(task.block * BLOCK + number * ROWS, ROWS)
    d_q[task.share, task.row, time, task.channels] = total.astype(d_q.dtype)


# ---- keys ---------------------------------------------------------------------------------------------------------


def key_gradients(task: Task, memory: Memory, results, d_u_s, sums, left, interpret) -> None:
    """A compute warpgroup of `keys`: all tiles."""
    (d_k, d_u, sums_g), number, stages = results, lax.axis_index("group"), memory.values.shape[0]
    dtype, key_dim = memory.k.dtype, task.sizes.key_dim
    time = pl.ds(task.block * BLOCK + number * ROWS, ROWS)
    square, none = zeros((ROWS, ROWS)), zeros((ROWS,))
    plgpu.barrier_wait(memory.keys)

    def tile(i, total):
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(memory.full.at[slot])
        group = number + zero_of(memory.gates.at[slot])

        def add_pairs(total, written, column, own: bool):
            there = rows_of(group if own else 1 - group)
            values, narrow, found = key_pairs(memory, slot, group, own)
            factors = (values, memory.q.at[there]), (narrow, memory.values.at[slot, 1, there])
            return *add_two((total, written), factors, left, interpret), column + found

        so_far = add_pairs(total, square, none, True)
        if memory.codes is None:  # no token of the first half reads one of the second
            so_far = lax.cond(number == 0, lambda *x: add_pairs(*x, False), lambda *x: x, *so_far)
        else:
            so_far = add_pairs(*so_far, False)
        total, written, column = so_far
        total, through, decayed = through_states(memory, slot, group, total, left, interpret)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sums.at[0][...] = column
        sums.at[1][...] = decayed
        d_u_s[...] = (written + through).astype(dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.empty.at[slot])
        row = task.block * task.sizes.columns + task.tile(i)
        plgpu.copy_smem_to_gmem(sums, sums_g.at[task.row, row, :, rows_of(number)])
        plgpu.copy_smem_to_gmem(d_u_s, d_u.at[task.row, time, task.lanes(i)])
        return total

    total = lax.fori_loop(0, task.tiles, tile, zeros((ROWS, key_dim)))
    d_k[task.share, task.row, time, task.channels] = total.astype(d_k.dtype)


def key_pairs(memory: Memory, slot, group, own: bool) -> tuple[jax.Array, ...]:
    """(M . b)^T and (M . Q K^T)^T [64 keys, 64 queries] in 16 bits of the own pairs or the others, and the sums of the
    product before rounding, over the queries [64]."""
    gates, codes, here = memory.gates.at[slot], memory.codes, rows_of(group)
    there, dtype = rows_of(group if own else 1 - group), memory.k.dtype
    u, d_o = memory.values.at[slot, 0, here], memory.values.at[slot, 1, there]
    weight = decays(gates, codes, group, own=own, transposed=True)
    weight = weight * weights_of(gates, codes, group, own=own, transposed=True)
    scores, values = products((memory.k.at[here], memory.q.at[there].T), (u, d_o.T))
    values, narrow = values * weight, (scores * weight).astype(dtype)
    mixed = values * scores
    # A token's pair with itself cancels between rows and columns: left out rather than subtracted.
    row, to = positions(gates)
    column = jnp.sum(jnp.where(row != to, mixed, 0.0) if own else mixed, axis=1)
    return values.astype(dtype), narrow, column


def through_states(memory: Memory, slot, group, total, left, interpret) -> tuple[jax.Array, ...]:
    """total + a . U E^T [64, K], a . K E [64, 64] and the row sums of U . K E."""
    here, spread = rows_of(group), memory.spread.at[slot]
    (read,) = products((memory.k.at[here], spread.T))
    after = by_row(memory.gates.at[slot, AFTER, here], ROWS)
    u = plgpu.load(memory.values.at[slot, 0, here], layout=WGMMA, optimized=False).astype(f32)
    total = add_product(total, (u * after).astype(memory.k.dtype), spread, left, interpret)
    return total, read * after, jnp.sum(u * read, axis=1)


def gradients(
    q, k, u, gates: Gates, states, first, spread, d_o, where: Blocks, roots=None, *, config: Config, interpret=None
) -> tuple:
    """(dq, dk [B, T, G, K] float32, dU [B, T, H, V], of_queries [B, N H, 8 + slots, 128], balance [B, N H, 128] and
    of_keys [B, N H, 2, 128] float32), with anything in empty blocks but zeros in dq and dk.

    Arguments as in `log_linear.read_out`; d_o like u; spread [B, N, H V, K] the cotangents of what blocks write.
    of_queries: dw by level. balance: the sum of w . dw over the levels but that of a token's pair with itself. of_keys:
    the sums over queries of M . b . Q K^T without its diagonal, and da."""
    sizes, dtype = Sizes.of(k, u, gates, config), u.dtype
    batch, blocks, heads, rows = sizes.batch, sizes.blocks, sizes.heads, sizes.levels
    x = Inputs(flat(q), flat(k), (flat(u), flat(d_o)), gates)
    x, shape = x._replace(numbers=where.numbers, codes=where.codes), jax.ShapeDtypeStruct
    keys = shape((sizes.slices, *flat(k).shape), f32)
    left = staging([(ROWS, ROWS)], dtype, interpret, GROUPS)

    def queries(task, memory, results, scratch):
        query_gradients(task, memory, results, *(scratch if interpret is not None else [*scratch, None]), interpret)

    reading = x._replace(states=states, first=first, roots=roots)
    d_q, of_queries, balances = launch(
        "log_linear_queries",
        queries,
        reading,
        [keys, *(shape((batch, blocks * sizes.columns, *each, BLOCK), f32) for each in ((rows,), ()))],
        memory_for(sizes, config, reading, sizes.rows, beside=4 * BLOCK * (rows + 1)),
        [plgpu.SMEM((GROUPS, rows, ROWS), f32), plgpu.SMEM((GROUPS, ROWS), f32), *left],
        sizes,
        config,
        interpret,
    )

    def of_keys(task, memory, results, scratch):
        key_gradients(task, memory, results, *(scratch if interpret is not None else [*scratch, None]), interpret)

    writing = x._replace(spread=spread)
    d_k, d_u, of_keys_ = launch(
        "log_linear_keys",
        of_keys,
        writing,
        [keys, shape(flat(u).shape, dtype), shape((batch, blocks * sizes.columns, 2, BLOCK), f32)],
        memory_for(sizes, config, writing, READS, beside=2 * BLOCK * TILE + 8 * BLOCK),
        [shared(GROUPS, ROWS, TILE, dtype=dtype), plgpu.SMEM((GROUPS, 2, ROWS), f32), *left],
        sizes,
        config,
        interpret,
    )
    sums = (x.reshape(batch, blocks * heads, -1, *x.shape[2:]).sum(2) for x in (of_queries, balances, of_keys_))
    return d_q.sum(0).reshape(q.shape), d_k.sum(0).reshape(k.shape), d_u.reshape(u.shape), *sums
