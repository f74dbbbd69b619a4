"""The gradients of keys and values of softmax attention on a Hopper GPU: a Pallas program in Mosaic GPU.

A program has two cells of keys of one key head, a compute warpgroup each, and goes through the cells of queries that
see any of them, for every head that reads the key head; dk and dv stay in registers, no two programs write the same
place, so that the sums have one order. Cells that are seen from afar are paired with each other, so that the work
follows the list. With P = exp(score - L) and delta = <dO, O> - dL:

    dv = P^T dO        dk = D^T Q        D = P (dO V^T - delta)        factor = sum of D over queries of other cells
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.attention_mosaic import (
    CELL,
    DELTA,
    LAST,
    LOG2E,
    LOG_SUM,
    Sizes,
    launch,
    register,
    row_vector,
    split,
    spread_columns,
    spread_rows,
)
from efla_jax.kernels.mosaic import MASKED, WGMMA, accumulated, begin, finish, index, left_operand, shared, staging

f32 = jnp.float32


class Sources(NamedTuple):
    """q [B, S, H, K], k [B, S, G, K], v [B, S, G, V], d_o [B, S, H, V]; known [B, H, 2, S] float32: L / ln 2 and delta;
    marks and pairs of `attention.Seen`."""

    q: Any
    k: Any
    v: Any
    d_o: Any
    known: Any
    marks: Any
    pairs: Any


class Memory(NamedTuple):
    """Shared memory: k [2, 64, K], v [2, 64, V], last [2, 64] int32; q [stages, 64, K], d_o [stages, 64, V], known
    [stages, 2, 64]; factor [2, 64]; barriers of the keys, and of a stage's loads and release; the interpreter's left
    operands."""

    k: Any
    v: Any
    last: Any
    q: Any
    d_o: Any
    known: Any
    factor: Any
    keys: Any
    full: Any
    empty: Any
    left: list


class Pair(NamedTuple):
    """A program: row of the batch, part (one routing head of one key head), its cells (-1: none), the runs of cells of
    queries, and how many heads read it."""

    row: Any
    part: Any
    cells: tuple
    runs: tuple
    heads: int

    @property
    def steps(self):
        """Cells of queries, of one head."""
        return self.runs[1] + self.runs[3]

    def query_cell(self, j):
        begin, count, begin_next, _ = self.runs
        return jnp.where(j < count, begin + j, begin_next + j - count)

    def cell(self, group):
        return jnp.where(group == 0, *self.cells)


def at_cell(cell) -> Any:
    """The slots of a cell; of the first cell for -1, which has to be some place."""
    return pl.ds(jnp.maximum(cell, 0) * CELL, CELL)


def load(pair: Pair, x: Sources, memory: Memory, sizes: Sizes, key_head, route) -> None:
    """The loading warpgroup: the keys, then head after head the queries."""
    stages = memory.q.shape[0]
    for side, cell in enumerate(pair.cells):
        slots = at_cell(cell)
        plgpu.copy_gmem_to_smem(x.k.at[pair.row, slots, key_head], memory.k.at[side], memory.keys)
        plgpu.copy_gmem_to_smem(x.v.at[pair.row, slots, key_head], memory.v.at[side], memory.keys)
        plgpu.copy_gmem_to_smem(x.marks.at[pair.row, route, LAST, slots], memory.last.at[side], memory.keys)
    total = pair.heads * pair.steps

    def step(i, _):
        slot = lax.rem(i, stages)

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(memory.empty.at[slot])

        head = pair.part * pair.heads + lax.div(i, pair.steps)
        slots, barrier = at_cell(pair.query_cell(lax.rem(i, pair.steps))), memory.full.at[slot]
        plgpu.copy_gmem_to_smem(x.q.at[pair.row, slots, head], memory.q.at[slot], barrier)
        plgpu.copy_gmem_to_smem(x.d_o.at[pair.row, slots, head], memory.d_o.at[slot], barrier)
        plgpu.copy_gmem_to_smem(x.known.at[pair.row, head, :, slots], memory.known.at[slot], barrier)

    lax.fori_loop(0, total, step, None)

    def released(i, _):
        plgpu.barrier_wait(memory.empty.at[lax.rem(i, stages)])

    lax.fori_loop(jnp.maximum(total - stages, 0), total, released, None)


def accumulate(pair: Pair, memory: Memory, sizes: Sizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A compute warpgroup: dk [64, K], dv [64, V] and the factor's gradient [64] of its cell, float32."""
    stages, dtype, interpret = memory.q.shape[0], memory.d_o.dtype, sizes.interpret
    group = lax.axis_index("group")
    mine = pair.cell(group)
    k, v, last = memory.k.at[group], memory.v.at[group], row_vector(memory.last.at[group])
    square = plgpu.ACC((CELL, CELL), f32)

    def step(i, carry):
        d_k, d_v, factor = carry
        slot, cell = lax.rem(i, stages), pair.query_cell(lax.rem(i, pair.steps))
        q, d_o, known = memory.q.at[slot], memory.d_o.at[slot], memory.known.at[slot]
        plgpu.barrier_wait(memory.full.at[slot])

        def products(acc_scores, acc_mass):
            plgpu.wgmma(acc_scores, k, q.T)
            plgpu.wgmma(acc_mass, v, d_o.T)
            query = index(CELL, CELL, 1) + cell * CELL
            seen = (query >= index(CELL, CELL, 0) + mine * CELL) & (query <= spread_rows(last, CELL))
            scores = accumulated(acc_scores, wait_n=1) * LOG2E - spread_columns(known.at[LOG_SUM], CELL)
            mass = jnp.exp2(jnp.where(seen, scores, MASKED))
            return mass, mass * (accumulated(acc_mass, wait_n=0) - spread_columns(known.at[DELTA], CELL))

        mass, d_scores = pl.run_scoped(products, square, square)
        plgpu.commit_smem()  # what was read of shared memory is read before a copy overwrites it
        factor = factor + jnp.sum(d_scores, axis=1) * jnp.where(cell == mine, 0.0, 1.0)
        mass, d_scores = mass.astype(dtype), d_scores.astype(dtype)

        def add(acc_v, acc_k):
            begin(acc_v, d_v, interpret)
            begin(acc_k, d_k, interpret)
            plgpu.wgmma(acc_v, left_operand(mass, memory.left[0]), d_o)
            plgpu.wgmma(acc_k, left_operand(d_scores, memory.left[1]), q)
            return finish(acc_k, d_k, interpret), finish(acc_v, d_v, interpret)

        wide = (plgpu.ACC((CELL, dim), f32) for dim in (sizes.value_dim, sizes.key_dim))
        d_k, d_v = pl.run_scoped(add, *wide)
        plgpu.barrier_arrive(memory.empty.at[slot])
        return d_k, d_v, factor

    start = tuple(register(jnp.zeros((CELL, dim), f32)) for dim in (sizes.key_dim, sizes.value_dim))
    none = register(jnp.zeros((CELL,), f32), WGMMA.reduce(1))
    return lax.fori_loop(0, pair.heads * pair.steps, step, (*start, none))


def compute(pair: Pair, memory: Memory, out: tuple, sizes: Sizes) -> None:
    """A compute warpgroup: its cell's gradients, through the shared memory that its keys and values had."""
    group = lax.axis_index("group")
    plgpu.barrier_wait(memory.keys)
    d_k, d_v, factor = accumulate(pair, memory, sizes)
    k, v, factor_here = memory.k.at[group], memory.v.at[group], memory.factor.at[group]
    k[...] = d_k.astype(k.dtype)
    v[...] = d_v.astype(v.dtype)
    factor_here[...] = factor
    plgpu.commit_smem()
    cell = pair.cell(group)
    d_k_g, d_v_g, factor_g = out

    @pl.when(cell >= 0)
    def _():
        plgpu.copy_smem_to_gmem(k, d_k_g.at[pair.row, at_cell(cell), pair.part])
        plgpu.copy_smem_to_gmem(v, d_v_g.at[pair.row, at_cell(cell), pair.part])
        plgpu.copy_smem_to_gmem(factor_here, factor_g.at[pair.row, pair.part, at_cell(cell)])

    plgpu.wait_smem_to_gmem(0)


def scratch(sizes: Sizes, dtype) -> list:
    """What `Memory` lists."""
    both = sizes.key_dim + sizes.value_dim
    stages = sizes.fitting(2 * CELL * both + 8 * CELL, 4 * CELL * both + 16 * CELL)
    return [
        shared(2, CELL, sizes.key_dim, dtype=dtype),
        shared(2, CELL, sizes.value_dim, dtype=dtype),
        plgpu.SMEM((2, CELL), jnp.int32),
        shared(stages, CELL, sizes.key_dim, dtype=dtype),
        shared(stages, CELL, sizes.value_dim, dtype=dtype),
        plgpu.SMEM((stages, 2, CELL), f32),
        plgpu.SMEM((2, CELL), f32),
        plgpu.Barrier(num_arrivals=6),
        plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        *staging([(CELL, CELL)] * 2, dtype, sizes.interpret, 2),
    ]


def gradients(x: Sources, sizes: Sizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dk [B, S, X, K], dv [B, S, X, V], rounded to the dtype of v, and the factor's gradient of every key [B, X, S]
    float32, in X = lcm(G, R) parts of the key heads, each of one routing head."""
    parts = math.lcm(sizes.key_heads, sizes.routes)
    arguments, dtype = len(Sources._fields), x.v.dtype

    def body(*refs):
        sources, out, rest = Sources(*refs[:arguments]), refs[arguments : arguments + 3], refs[arguments + 3 :]
        fixed = len(Memory._fields) - 1
        group = lax.axis_index("group")
        memory = Memory(*rest[:fixed], left=[buffer.at[group] for buffer in rest[fixed:]] or [None] * 2)
        row, part = lax.axis_index("row"), lax.axis_index("head")
        key_head, route = lax.div(part, parts // sizes.key_heads), lax.div(part, parts // sizes.routes)
        numbers = sources.pairs.at[row, route, lax.axis_index("tile")]
        first, second, *runs = (numbers[i] for i in range(6))
        pair = Pair(row, part, (first, second), tuple(runs), sizes.heads // parts)
        split(lambda: load(pair, sources, memory, sizes, key_head, route), lambda: compute(pair, memory, out, sizes))

    shape = jax.ShapeDtypeStruct
    out = [shape((*x.k.shape[:2], parts, dim), dtype) for dim in (sizes.key_dim, sizes.value_dim)]
    out.append(shape((sizes.batch, parts, sizes.slots), f32))
    grid = parts, x.pairs.shape[2], sizes.batch
    return tuple(launch(body, x, out, scratch(sizes, dtype), sizes, grid))
