"""Softmax attention on a Hopper GPU, forward and the gradient of q: two Pallas programs in Mosaic GPU.

Slots of a row are cut into cells of 64. A program has 128 queries of one head, a tile of two cells with a compute
warpgroup each, and takes 128 keys a step:

    listed    pairs of cells from the row's list of cells that later queries see, up to the tile; the first few steps
              are masked, as a list has odd numbers of cells and documents begin anywhere
    previous  the tile before, if a chunk that is in no list goes on from there
    own       the tile itself; it comes last, so that no row has an empty sum and what masked steps left is forgotten

so that its work follows the list. One more warpgroup only issues loads. The running maximum and sum of the softmax are
kept for base 2. A key says which is the last slot that sees it, see `attention.Seen`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.mosaic import (
    MASKED,
    SHARED_MEMORY,
    WGMMA,
    accumulated,
    begin,
    finish,
    index,
    left_operand,
    narrow_indices,
    parameters,
    shared,
    staging,
)

CELL = 64
WIDTH = 2 * CELL  # queries of a program, and keys of a step
LAST, LAST_OWN = range(2)  # rows of the marks
START, MASKS, STEPS, PREVIOUS = range(4)  # of the bounds
LOG_SUM, DELTA = range(2)  # rows of what the backward knows of a query
LOADER, LOADER_REGISTERS, COMPUTE_REGISTERS = 2, 24, 240  # the third warpgroup; registers of a thread
LEAST = 1e-30  # of a sum that is divided by: one with a term is 1 or more
LOG2E = math.log2(math.e)
f32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a call: B, S, H, G, R, K, V; and how it runs."""

    batch: int
    slots: int
    heads: int
    key_heads: int
    routes: int
    key_dim: int
    value_dim: int
    stages: int = 2
    interpret: Any = None

    @property
    def cells(self) -> int:
        return self.slots // CELL

    def key_head(self, head):
        return lax.div(head, self.heads // self.key_heads)

    def route(self, head):
        return lax.div(head, self.heads // self.routes)

    def fitting(self, each: int, beside: int) -> int:
        """As many of the wanted stages of so many bytes as shared memory holds beside the rest."""
        return max(min(self.stages, (SHARED_MEMORY - 1024 - beside) // each), 1)


class Sources(NamedTuple):
    """q [B, S, H, K], k [B, S, G, K], v [B, S, G, V]; order [B, R, M], bounds [B, R, S / 128, 4], marks [B, R, 2, S]
    int32, see `attention.Seen`."""

    q: Any
    k: Any
    v: Any
    order: Any
    bounds: Any
    marks: Any


class Memory(NamedTuple):
    """Shared memory: k [stages, 128, K], v [stages, 128, V], last [stages, 128] int32; the barriers of the queries, and
    of loads and releases of k (and last) and of v."""

    k: Any
    v: Any
    last: Any
    queries: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any


class Tile(NamedTuple):
    """A program: row of the batch, head, tile; the bounds of its steps."""

    row: Any
    head: Any
    tile: Any
    start: Any
    masks: Any
    listed: Any
    steps: Any

    @classmethod
    def here(cls, x: Sources, sizes: Sizes) -> "Tile":
        row, head = lax.axis_index("row"), lax.axis_index("head")
        tile = sizes.slots // WIDTH - 1 - lax.axis_index("tile")  # the longest first
        bounds = x.bounds.at[row, sizes.route(head), tile]
        listed = bounds[STEPS]
        return cls(row, head, tile, bounds[START], bounds[MASKS], listed, listed + bounds[PREVIOUS] + 1)

    def time(self, group) -> Any:
        return pl.ds(self.tile * WIDTH + group * CELL, CELL)

    def cells(self, x: Sources, sizes: Sizes, i) -> list:
        """The two cells of keys of step i."""
        found = []
        for side in range(2):
            at = jnp.clip(self.start + 2 * i + side, 0, sizes.cells - 1)
            listed = x.order[self.row, sizes.route(self.head), at]
            found.append(jnp.where(i < self.listed, listed, 2 * (self.tile + i - self.steps + 1) + side))
        return found


def row_vector(ref) -> jax.Array:
    return plgpu.load(ref, layout=WGMMA.reduce(1), optimized=False)


def spread_rows(x: jax.Array, columns: int) -> jax.Array:
    return lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))


def spread_columns(ref, rows: int) -> jax.Array:
    x = plgpu.load(ref, layout=WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))


def load(tile: Tile, x: Sources, memory: Memory, sizes: Sizes, queries: list) -> None:
    """The loading warpgroup: the queries' arrays [B, S, H, ..] into shared memory [2, 64, ..], then step after step."""
    stages = memory.k.shape[0]
    for source, target in queries:
        for group in range(2):
            plgpu.copy_gmem_to_smem(source(group), target.at[group], memory.queries)
    head, route = sizes.key_head(tile.head), sizes.route(tile.head)

    def step(i, _):
        slot, cells = lax.rem(i, stages), tile.cells(x, sizes, i)
        previous = (i >= tile.listed) & (i < tile.steps - 1)
        marks = x.marks.at[tile.row, route, jnp.where(previous, LAST_OWN, LAST)]
        for pairs, full, empty in (
            (((x.k.at[tile.row, :, head], memory.k), (marks, memory.last)), memory.k_full, memory.k_empty),
            (((x.v.at[tile.row, :, head], memory.v),), memory.v_full, memory.v_empty),
        ):

            @pl.when(i >= stages)
            def _(empty=empty):
                plgpu.barrier_wait(empty.at[slot])

            for side, cell in enumerate(cells):
                for source, target in pairs:
                    there = target.at[slot, pl.ds(side * CELL, CELL)]
                    plgpu.copy_gmem_to_smem(source.at[pl.ds(cell * CELL, CELL)], there, full.at[slot])

    lax.fori_loop(0, tile.steps, step, None)

    def released(i, _):
        plgpu.barrier_wait(memory.k_empty.at[lax.rem(i, stages)])
        plgpu.barrier_wait(memory.v_empty.at[lax.rem(i, stages)])

    lax.fori_loop(jnp.maximum(tile.steps - stages, 0), tile.steps, released, None)


def over_steps(tile: Tile, memory: Memory, group, step: Callable, carry):
    """step(i, seen, carry) for all steps; seen(): bool [64, 128], or None where the queries see all keys."""
    shape = CELL, WIDTH
    base = tile.tile * WIDTH

    def seen(i):
        """Keys that are seen up to the queries or beyond them; there is no cell before the list's first one."""
        last = spread_columns(memory.last.at[lax.rem(i, memory.k.shape[0])], CELL)
        there = index(*shape, 1) + (tile.start + 2 * i) * CELL >= 0
        return (index(*shape, 0) + base + group * CELL <= last) & there

    def own(i):
        return seen(i) & (index(*shape, 0) + group * CELL >= index(*shape, 1))

    def masked(i, carry):
        return step(i, lambda: seen(i), carry)

    carry = lax.fori_loop(0, tile.masks, masked, carry)
    carry = lax.fori_loop(tile.masks, tile.listed, lambda i, carry: step(i, None, carry), carry)
    carry = lax.fori_loop(tile.listed, tile.steps - 1, masked, carry)
    return step(tile.steps - 1, lambda: own(tile.steps - 1), carry)


def register(x: jax.Array, layout=WGMMA) -> jax.Array:
    return plgpu.layout_cast(x, layout)


def scores_of(q, k) -> jax.Array:
    """q k^T of a cell of queries, all in shared memory."""

    def score(acc):
        plgpu.wgmma(acc, q, k.T)
        return accumulated(acc, wait_n=0)

    return pl.run_scoped(score, plgpu.ACC((CELL, k.shape[0]), f32))


def with_product(total, x, y, buffer, interpret) -> jax.Array:
    """total + x y, with x in registers (see `left_operand`) and y in shared memory."""

    def add(acc):
        begin(acc, total, interpret)
        plgpu.wgmma(acc, left_operand(x, buffer), y)
        return finish(acc, total, interpret)

    return pl.run_scoped(add, plgpu.ACC(total.shape, f32))


def nothing_seen(value_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The softmax of a cell of queries before its first key: sums of weighed values [64, V], the largest score so far
    times log2(e) [64], and sums of weights [64]. The largest is higher than a masked score times log2(e), so that a row
    that sees nothing keeps a sum of 0."""
    total_o, rows = register(jnp.zeros((CELL, value_dim), f32)), WGMMA.reduce(1)
    return total_o, register(jnp.full((CELL,), MASKED, f32), rows), register(jnp.zeros((CELL,), f32), rows)


def softmax_step(scores, total_o, top, total) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(what to weigh the values by, *what `nothing_seen` began, scaled to the largest score, without these values)."""
    largest = jnp.maximum(top, jnp.max(scores, axis=1) * LOG2E)
    shrink = jnp.exp2(top - largest)
    mass = jnp.exp2(scores * LOG2E - spread_rows(largest, scores.shape[1]))
    total = total * shrink + jnp.sum(mass, axis=1)
    return mass, total_o * spread_rows(shrink, total_o.shape[1]), largest, total


def attend(over: Callable, memory: Memory, q, o, log_sum, left, sizes: Sizes, empty: bool = False) -> None:
    """A compute warpgroup: outputs [64, V] and log sums [64] of its queries, in shared memory. over(step, carry):
    `over_steps` of a tile, or another walk; empty: it may have no steps, and then leaves 0 and MASKED."""
    stages, dtype = memory.k.shape[0], o.dtype

    def step(i, seen, carry):
        total_o, top, total = carry
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(memory.k_full.at[slot])
        scores = scores_of(q, memory.k.at[slot])
        if seen is not None:
            scores = jnp.where(seen(), scores, MASKED)
            plgpu.commit_smem()  # what was read of shared memory is read before a copy overwrites it
        plgpu.barrier_arrive(memory.k_empty.at[slot])
        mass, total_o, top, total = softmax_step(scores, total_o, top, total)
        mass = mass.astype(dtype)
        plgpu.barrier_wait(memory.v_full.at[slot])
        total_o = with_product(total_o, mass, memory.v.at[slot], left, sizes.interpret)
        plgpu.barrier_arrive(memory.v_empty.at[slot])
        return total_o, top, total

    total_o, top, total = over(step, nothing_seen(sizes.value_dim))
    some = jnp.maximum(total, LEAST) if empty else total
    o[...] = (total_o / spread_rows(some, sizes.value_dim)).astype(dtype)
    log_some = top * (1 / LOG2E) + jnp.log(some)
    log_sum[...] = jnp.where(total > 0, log_some, MASKED) if empty else log_some


@narrow_indices()
def launch(body, arguments, out, scratch, sizes: Sizes, grid):
    """Run a program on a grid of heads (or key heads), tiles (or pairs of cells) and rows, with three warpgroups.

    No automatic barriers: shared memory is stored to once, at the end, where nothing else reads."""
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=grid,
        grid_names=("head", "tile", "row"),
        num_threads=3,
        thread_name="group",
        compiler_params=parameters(False),
        interpret=sizes.interpret,
    )(*arguments)


def split(load_program: Callable, compute_program: Callable) -> None:
    """What the three warpgroups do."""
    group = lax.axis_index("group")

    @pl.when(group == LOADER)
    def _():
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
        load_program()

    @pl.when(group != LOADER)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        compute_program()


def memory_of(sizes: Sizes, dtype, copies: int, beside: int) -> list:
    """What `Memory` lists; copies: loads that the queries' barrier waits for; beside: bytes of other shared memory."""
    stages = sizes.fitting(2 * WIDTH * (sizes.key_dim + sizes.value_dim) + 4 * WIDTH, beside)
    return [
        shared(stages, WIDTH, sizes.key_dim, dtype=dtype),
        shared(stages, WIDTH, sizes.value_dim, dtype=dtype),
        plgpu.SMEM((stages, WIDTH), jnp.int32),
        plgpu.Barrier(num_arrivals=copies),
        *[plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages) for arrivals in (4, 2, 2, 2)],
    ]


def forward(x: Sources, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """o [B, S, H, V] in the dtype of v and L [B, H, S] float32, the logarithm of a query's sum."""
    dtype = x.v.dtype

    def body(*refs):
        sources, (o_g, log_sum_g), (q, o, log_sum), rest = Sources(*refs[:6]), refs[6:8], refs[8:11], refs[11:]
        memory, left = Memory(*rest[:8]), rest[8:]
        tile = Tile.here(sources, sizes)

        def loads():
            load(tile, sources, memory, sizes, [(lambda w: sources.q.at[tile.row, tile.time(w), tile.head], q)])

        def compute():
            group = lax.axis_index("group")
            plgpu.barrier_wait(memory.queries)
            o_here, sum_here, buffer = o.at[group], log_sum.at[group], left[0].at[group] if left else None
            over = functools.partial(over_steps, tile, memory, group)
            attend(over, memory, q.at[group], o_here, sum_here, buffer, sizes)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_here, o_g.at[tile.row, tile.time(group), tile.head])
            plgpu.copy_smem_to_gmem(sum_here, log_sum_g.at[tile.row, tile.head, tile.time(group)])
            plgpu.wait_smem_to_gmem(0)

        split(loads, compute)

    out = [jax.ShapeDtypeStruct((*x.q.shape[:3], sizes.value_dim), dtype)]
    out.append(jax.ShapeDtypeStruct((sizes.batch, sizes.heads, sizes.slots), f32))
    beside = 2 * WIDTH * (sizes.key_dim + sizes.value_dim) + 4 * WIDTH
    scratch = [
        shared(2, CELL, sizes.key_dim, dtype=dtype),
        shared(2, CELL, sizes.value_dim, dtype=dtype),
        plgpu.SMEM((2, CELL), f32),
        *memory_of(sizes, dtype, 2, beside),
        *staging([(CELL, WIDTH)], dtype, sizes.interpret, 2),
    ]
    return tuple(launch(body, x, out, scratch, sizes, (sizes.heads, sizes.slots // WIDTH, sizes.batch)))


# ---- the gradient of q ----------------------------------------------------------------------------------------------


def query_gradient(tile: Tile, memory: Memory, q, d_o, known, left, sizes: Sizes) -> jax.Array:
    """A compute warpgroup: dq [64, K] float32; known [2, 64]: L / ln 2 and delta of its queries."""
    stages, dtype = memory.k.shape[0], d_o.dtype
    group = lax.axis_index("group")
    square = plgpu.ACC((CELL, WIDTH), f32)

    def step(i, seen, total):
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(memory.k_full.at[slot])
        plgpu.barrier_wait(memory.v_full.at[slot])

        def products(acc_scores, acc_mass):
            plgpu.wgmma(acc_scores, q, memory.k.at[slot].T)
            plgpu.wgmma(acc_mass, d_o, memory.v.at[slot].T)
            scores = accumulated(acc_scores, wait_n=1) * LOG2E - spread_rows(row_vector(known.at[LOG_SUM]), WIDTH)
            if seen is not None:
                scores = jnp.where(seen(), scores, MASKED)
                plgpu.commit_smem()
            mass = jnp.exp2(scores)
            change = accumulated(acc_mass, wait_n=0) - spread_rows(row_vector(known.at[DELTA]), WIDTH)
            return (mass * change).astype(dtype)

        d_scores = pl.run_scoped(products, square, square)
        plgpu.barrier_arrive(memory.v_empty.at[slot])
        total = with_product(total, d_scores, memory.k.at[slot], left, sizes.interpret)
        plgpu.barrier_arrive(memory.k_empty.at[slot])
        return total

    return over_steps(tile, memory, group, step, register(jnp.zeros((CELL, sizes.key_dim), f32)))


def query_gradients(x: Sources, d_o, known, sizes: Sizes) -> jax.Array:
    """dq [B, S, H, K] in the dtype of q; d_o [B, S, H, V]; known [B, H, 2, S] float32: L / ln 2 and delta."""
    dtype = x.q.dtype

    def body(*refs):
        sources, (d_o_g, known_g, d_q_g), rest = Sources(*refs[:6]), refs[6:9], refs[9:]
        (q, d_o, known), memory, left = rest[:3], Memory(*rest[3:11]), rest[11:]
        tile = Tile.here(sources, sizes)

        def loads():
            queries = [
                (lambda w: sources.q.at[tile.row, tile.time(w), tile.head], q),
                (lambda w: d_o_g.at[tile.row, tile.time(w), tile.head], d_o),
                (lambda w: known_g.at[tile.row, tile.head, :, tile.time(w)], known),
            ]
            load(tile, sources, memory, sizes, queries)

        def compute():
            group = lax.axis_index("group")
            plgpu.barrier_wait(memory.queries)
            mine = q.at[group], d_o.at[group], known.at[group], left[0].at[group] if left else None
            q.at[group][...] = query_gradient(tile, memory, *mine, sizes).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q.at[group], d_q_g.at[tile.row, tile.time(group), tile.head])
            plgpu.wait_smem_to_gmem(0)

        split(loads, compute)

    scratch = [
        shared(2, CELL, sizes.key_dim, dtype=dtype),
        shared(2, CELL, sizes.value_dim, dtype=dtype),
        plgpu.SMEM((2, 2, CELL), f32),
        *memory_of(sizes, dtype, 6, 2 * WIDTH * (sizes.key_dim + sizes.value_dim) + 16 * CELL),
        *staging([(CELL, WIDTH)], dtype, sizes.interpret, 2),
    ]
    grid = sizes.heads, sizes.slots // WIDTH, sizes.batch
    out = [jax.ShapeDtypeStruct(x.q.shape, dtype)]
    (d_q,) = launch(body, (*x, d_o, known), out, scratch, sizes, grid)
    return d_q
