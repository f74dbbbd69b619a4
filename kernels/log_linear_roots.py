"""The cotangents of log-linear linear attention's states where a row is one document: parts of the time at once. Here
the first two of three programs.

State s ends before block s and has the level l of the lowest set bit of s; the blocks s to s + 2^l - 1 read it, and it
merges into state s + 2^l at the end of the last of them, or is one of the row's last. Its cotangent is

    E_s = sum over the tokens that read it of c_l q dO^T  +  f_l E_(s + 2^l), or what is given for the row's last

with the letters of `log_linear_states.py`, whose `adjoint` goes through a row's blocks one by one and serves all rows.
Parts and roots are those of `log_linear_parts.py`. Three programs:

    far      sums of c q dO^T over the blocks that read a root, at most SPAN of them a program: products alone
    roots    E of the roots from these sums, backwards; df = <S, E> of where they merge
    spread   E of all states, in `log_linear_adjoint.py`: from its root on a part needs no other one

Channels are flat as in `log_linear.py`; a tile is 64 columns of V, and states are [V, K].
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.log_linear import Config, Gates, drain, flat, wait_for_release
from efla_jax.kernels.log_linear_pairs import BLOCK, INSIDE, SINCE, SUM, TILE, f32
from efla_jax.kernels.log_linear_parts import WIDTH, Parts, RootPlace, launch
from efla_jax.kernels.log_linear_states import copy_out, loaded, time_of
from efla_jax.kernels.mosaic import (
    SHARED_MEMORY,
    WGMMA,
    accumulated,
    by_column,
    left_operand,
    shared,
    staging,
    transposed,
)

WEIGHT, SUMS, FADE = range(3)  # rows of the gates of a block


def coefficients(row, gates, slot) -> None:
    """Write to `row` [128] in shared memory the coefficient of the state of this slot, of each token: its weight, which
    is in a row of the gates, times the decay since the state's end. gates: weight, G / ln 2, fade."""
    weight, sums, fade = gates
    by_thread = plgpu.Layout.WG_STRIDED((BLOCK,), vec_size=1)
    decay = jnp.exp2(plgpu.load(sums, layout=by_thread) + fade[SINCE + slot])
    row[...] = plgpu.load(weight, layout=by_thread) * decay


def weighted(d_o, row) -> jax.Array:
    """dO^T [64, 128] times the coefficients, in 16 bits."""
    return (d_o.astype(f32) * by_column(row, TILE)).astype(d_o.dtype)


# ---- far ------------------------------------------------------------------------------------------------------------


class FarReads(NamedTuple):
    """In global memory: q, dO, channels flat; gates; `Parts.reads`."""

    q: Any
    d_o: Any
    gates: Gates
    table: Any


class FarMemory(NamedTuple):
    """Shared memory, by stage: q [128, K]; dO [tiles, 128, 64]; gates [tiles, 3, 128]; barriers of loads and of their
    release."""

    q: Any
    d_o: Any
    gates: Any
    full: Any
    empty: Any


def far_program(x: FarReads, sizes: Parts):
    """Row of the batch; slot, first block, blocks and which of the sums; first tile."""
    program, tiles = lax.axis_index("program"), math.prod(sizes.shared_by)
    return lax.axis_index("row"), [x.table[program, i] for i in range(4)], lax.axis_index("tiles") * tiles


def load_far(x: FarReads, memory: FarMemory, sizes: Parts) -> None:
    (row, (slot, first, blocks, _), tile), stages = far_program(x, sizes), memory.q.shape[0]

    def block(n, _):
        wait_for_release(memory.empty, n, stages)
        c, stage = first + n, lax.rem(n, stages)
        barrier, keys = memory.full.at[stage], pl.ds(sizes.channels(tile), sizes.key_dim)
        plgpu.copy_gmem_to_smem(x.q.at[row, time_of(c), keys], memory.q.at[stage], barrier)
        for i in range(math.prod(sizes.shared_by)):
            lanes, which, target = sizes.lanes(tile + i), sizes.gates(c, tile + i), memory.gates.at[stage, i]
            plgpu.copy_gmem_to_smem(x.d_o.at[row, time_of(c), lanes], memory.d_o.at[stage, i], barrier)
            plgpu.copy_gmem_to_smem(x.gates.levels.at[row, which, INSIDE + slot], target.at[WEIGHT], barrier)
            plgpu.copy_gmem_to_smem(x.gates.vectors.at[row, which, SUM], target.at[SUMS], barrier)
            plgpu.copy_gmem_to_smem(x.gates.fade.at[row, which], target.at[FADE], barrier)

    lax.fori_loop(0, blocks, block, None)
    drain(memory.empty, blocks, stages)


def add_far(x: FarReads, memory: FarMemory, sums, vectors, left, sizes: Parts) -> None:
    """A computing warpgroup of `far`: its tiles."""
    (row, (slot, _, blocks, target), tile), group = far_program(x, sizes), lax.axis_index("group")
    each = sizes.shared_by[1]

    def add(*accumulators):
        def block(n, _):
            stage = lax.rem(n, memory.q.shape[0])
            plgpu.barrier_wait(memory.full.at[stage])
            for i in range(each):
                rows = memory.gates.at[stage, group * each + i]
                coefficients(vectors.at[i], [rows.at[kind] for kind in range(3)], slot)
            plgpu.commit_smem()
            for i, acc in enumerate(accumulators):
                values = weighted(transposed(memory.d_o.at[stage, group * each + i]), vectors.at[i])
                if left is not None:  # the interpreter's one buffer is about to be overwritten
                    plgpu.wgmma_wait(0)
                plgpu.wgmma(acc, left_operand(values, left), memory.q.at[stage])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(memory.empty.at[stage])

        lax.fori_loop(0, blocks, block, None)
        return tuple(accumulated(acc, wait_n=0) for acc in accumulators)

    totals = pl.run_scoped(add, *[plgpu.ACC((TILE, sizes.key_dim), f32)] * each)
    for i, total in enumerate(totals):
        sums[row, target, sizes.lanes(tile + group * each + i)] = total


def far_reads(q, d_o, gates: Gates, sizes: Parts, config: Config, interpret) -> jax.Array:
    """Sums [B, programs, H V, K] float32 of c dO q^T over the blocks of each row of `Parts.reads`."""
    (groups, each), dtype, table = sizes.shared_by, d_o.dtype, sizes.reads
    count = groups * each
    stage = 2 * BLOCK * (sizes.key_dim + count * TILE) + 12 * BLOCK * count
    stages = min(config.walk_stages, (SHARED_MEMORY - 8192) // stage)
    memory = FarMemory(
        q=shared(stages, BLOCK, sizes.key_dim, dtype=dtype),
        d_o=shared(stages, count, BLOCK, TILE, dtype=dtype),
        gates=plgpu.SMEM((stages, count, 3, BLOCK), f32),
        full=plgpu.Barrier(num_arrivals=1 + 4 * count, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    )

    def compute(x: FarReads, memory: FarMemory, results, scratch):
        vectors, left = (*scratch, None)[:2]
        add_far(x, memory, results[0], vectors, left, sizes)

    x = FarReads(flat(q), flat(d_o), gates, jnp.asarray(table))
    out = [jax.ShapeDtypeStruct((sizes.batch, len(table), sizes.values, sizes.key_dim), f32)]
    scratch = [plgpu.SMEM((groups, each, BLOCK), f32), *staging([(TILE, BLOCK)], dtype, interpret, groups)]
    grid = dict(row=sizes.batch, program=len(table), tiles=sizes.tiles // count)
    load = functools.partial(load_far, sizes=sizes)
    (sums,) = launch("log_linear_far", compute, load, x, out, memory, scratch, grid, groups, config, interpret)
    return sums


# ---- roots ----------------------------------------------------------------------------------------------------------


class Rooted(NamedTuple):
    """In global memory: sums as `far_reads` gives them; last [B, slots, H V, K] float32: the cotangents of the row's
    last; fade as in `log_linear.Gates`; states [B, roots, H V, K]; `Parts.merges`."""

    sums: Any
    last: Any
    fade: Any
    states: Any
    table: Any


class RootMemory(NamedTuple):
    """Shared memory: a ring of summands [64, 32] and one of states and rows of fade, with their barriers; E of the last
    root of each level; sums on their way out."""

    summands: Any
    summand_full: Any
    summand_empty: Any
    states: Any
    fade: Any
    full: Any
    empty: Any
    stack: Any
    out: Any


SUMMANDS, STATES = 4, 2  # loaded ahead


def load_roots(x: Rooted, memory: RootMemory, sizes: Parts) -> None:
    row, tile, _, lanes, keys = RootPlace.here(sizes)

    def load_summand(number, source):
        wait_for_release(memory.summand_empty, number, SUMMANDS)
        place = lax.rem(number, SUMMANDS)
        plgpu.copy_gmem_to_smem(source, memory.summands.at[place], memory.summand_full.at[place])

    def root(n, counts):
        (summands, merged), at = counts, sizes.roots - 1 - n
        level, into, first, count = (x.table[at, i] for i in range(4))

        def summand(i, _):
            load_summand(summands + i, x.sums.at[row, first + i, lanes, keys])

        lax.fori_loop(0, count, summand, None)

        @pl.when(into < 0)
        def _():
            load_summand(summands + count, x.last.at[row, sizes.near + level, lanes, keys])

        @pl.when(into >= 0)
        def _():
            wait_for_release(memory.empty, merged, STATES)
            place, begins = lax.rem(merged, STATES), (at + 1) << sizes.near
            ends, barrier = begins + (jnp.int32(1) << (sizes.near + level)) - 1, memory.full.at[place]
            plgpu.copy_gmem_to_smem(x.states.at[row, at, lanes, keys], memory.states.at[place], barrier)
            plgpu.copy_gmem_to_smem(x.fade.at[row, sizes.gates(ends, tile)], memory.fade.at[place], barrier)

        merges = (into >= 0).astype(jnp.int32)
        return summands + count + 1 - merges, merged + merges

    summands, merged = lax.fori_loop(0, sizes.roots, root, (jnp.int32(0), jnp.int32(0)))
    drain(memory.summand_empty, summands, SUMMANDS)
    drain(memory.empty, merged, STATES)


def add_roots(x: Rooted, memory: RootMemory, spread, products, sizes: Parts) -> None:
    """The computing warpgroup of `roots`."""
    row, tile, part, lanes, keys = RootPlace.here(sizes)
    zero = plgpu.layout_cast(jnp.zeros((TILE, WIDTH), f32), WGMMA)

    def root(n, counts):
        (summands, merged), at = counts, sizes.roots - 1 - n
        level, into, _, count = (x.table[at, i] for i in range(4))
        merges = (into >= 0).astype(jnp.int32)

        def summand(i, total):
            place = lax.rem(summands + i, SUMMANDS)
            plgpu.barrier_wait(memory.summand_full.at[place])
            total = total + loaded(memory.summands.at[place])
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.summand_empty.at[place])
            return total

        total = lax.fori_loop(0, count + 1 - merges, summand, zero)

        @pl.when(merges > 0)
        def _():
            place = lax.rem(merged, STATES)
            plgpu.barrier_wait(memory.full.at[place])
            above = loaded(memory.stack.at[into])
            product = jnp.sum(loaded(memory.states.at[place]).astype(f32) * above, axis=1)
            cotangent = total + memory.fade[place, sizes.near + level] * above
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.empty.at[place])
            memory.stack.at[level][...] = cotangent
            spread[row, at, lanes, keys] = cotangent
            copy_out(product, memory.out, products.at[row, at, tile * (sizes.key_dim // WIDTH) + part])

        @pl.when(merges == 0)
        def _():
            memory.stack.at[level][...] = total
            spread[row, at, lanes, keys] = total

        return summands + count + 1 - merges, merged + merges

    lax.fori_loop(0, sizes.roots, root, (jnp.int32(0), jnp.int32(0)))


def root_cotangents(sums, last, gates: Gates, states, sizes: Parts, config: Config, interpret) -> tuple:
    """(E of the roots [B, roots, H V, K] float32; <S, E> [B, roots, H] float32 by the root that merged, with anything
    where none did)."""
    table, parts, dtype = sizes.merges, sizes.key_dim // WIDTH, states.dtype
    memory = RootMemory(
        summands=shared(SUMMANDS, TILE, WIDTH, dtype=f32),
        summand_full=plgpu.Barrier(num_arrivals=1, num_barriers=SUMMANDS),
        summand_empty=plgpu.Barrier(num_arrivals=1, num_barriers=SUMMANDS),
        states=shared(STATES, TILE, WIDTH, dtype=dtype),
        fade=plgpu.SMEM((STATES, BLOCK), f32),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=STATES),
        empty=plgpu.Barrier(num_arrivals=1, num_barriers=STATES),
        stack=shared(sizes.upper, TILE, WIDTH, dtype=f32),
        out=plgpu.SMEM((TILE,), f32),
    )

    def compute(x: Rooted, memory: RootMemory, results, _):
        add_roots(x, memory, results[0], results[1], sizes)

    x, shape = Rooted(sums, last, gates.fade, states, jnp.asarray(table)), jax.ShapeDtypeStruct
    out = [
        shape((sizes.batch, sizes.roots, sizes.values, sizes.key_dim), f32),
        shape((sizes.batch, sizes.roots, sizes.tiles * parts, TILE), f32),
    ]
    grid, load = dict(row=sizes.batch, tile=sizes.tiles, part=parts), functools.partial(load_roots, sizes=sizes)
    spread, products = launch("log_linear_roots", compute, load, x, out, memory, [], grid, 1, config, interpret)
    return spread, products.reshape(sizes.batch, sizes.roots, sizes.heads, -1).sum(3)
