"""Many queries a row against keys that all of them see, on a Hopper GPU: the part of softmax attention that a cache has
in a call of several tokens. A Pallas program in Mosaic GPU.

As `attention_mosaic.py`'s forward, without causality: a program has 128 queries of one head, two compute warpgroups of
64, and takes pairs of cells of 64 slots from a list: the pages that the head's owner has, or the cells of a cache of
every token. The first pair may have only one cell, and the list's first cell (the last but one place of that pair) may
be used in part, so that only the first step is masked.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.attention_mosaic import CELL, WIDTH, Memory, Sizes, attend, launch, split
from efla_jax.kernels.mosaic import index, narrow_indices, shared, staging

DIMS = (64, 128)
DTYPES = ("bfloat16", "float16")
f32 = jnp.float32


class Sources(NamedTuple):
    """q [B, T, H, K], T a multiple of 128; k [B, S, X, K], v [B, S, X, V]; order [B, R, S / 64] int32: cells that query
    heads of a routing head see; counts [B, R, T / 128] int32: how many of them those of a tile see; limits [B] int32:
    slots of the first cell of the lists that are in use, 64 where they are all."""

    q: Any
    k: Any
    v: Any
    order: Any
    counts: Any
    limits: Any


class Tile(NamedTuple):
    """A program: row of the batch, head, tile; cells of its list; its steps."""

    row: Any
    head: Any
    tile: Any
    count: Any
    steps: Any

    @classmethod
    def here(cls, x: Sources, sizes: Sizes) -> "Tile":
        row, head, tile = (lax.axis_index(name) for name in ("row", "head", "tile"))
        count = x.counts[row, sizes.route(head), tile]
        return cls(row, head, tile, count, lax.div(count + 1, 2))

    def time(self, group) -> Any:
        return pl.ds(self.tile * WIDTH + group * CELL, CELL)

    def place(self, i, side) -> Any:
        """Where in the list the cell of a step's side is; -1: nowhere."""
        return 2 * i + side - lax.rem(self.count, 2)


def unsupported(key_dim: int, value_dim: int, slots: int, dtype) -> str | None:
    """Why the kernel does not cover these sizes, or None."""
    if key_dim not in DIMS or value_dim not in DIMS:
        return f"K = {key_dim}, V = {value_dim}: each must be one of {DIMS}"
    if slots < CELL or slots % CELL:
        return f"{slots} slots of keys: a multiple of {CELL}"
    if jnp.dtype(dtype).name not in DTYPES:
        return f"dtype {jnp.dtype(dtype).name}: one of {DTYPES}"
    return None


def load(tile: Tile, x: Sources, memory: Memory, sizes: Sizes, q) -> None:
    """The loading warpgroup."""
    stages, route = memory.k.shape[0], sizes.route(tile.head)
    for group in range(2):
        plgpu.copy_gmem_to_smem(x.q.at[tile.row, tile.time(group), tile.head], q.at[group], memory.queries)
    key_heads = x.k.shape[2]
    head = lax.rem(lax.div(tile.head, sizes.heads // (key_heads * sizes.routes)), key_heads)

    def step(i, _):
        slot = lax.rem(i, stages)
        cells = [x.order[tile.row, route, jnp.maximum(tile.place(i, side), 0)] for side in range(2)]
        for source, target, full, empty in (
            (x.k, memory.k, memory.k_full, memory.k_empty),
            (x.v, memory.v, memory.v_full, memory.v_empty),
        ):

            @pl.when(i >= stages)
            def _(empty=empty):
                plgpu.barrier_wait(empty.at[slot])

            for side, cell in enumerate(cells):
                there = target.at[slot, pl.ds(side * CELL, CELL)]
                plgpu.copy_gmem_to_smem(source.at[tile.row, pl.ds(cell * CELL, CELL), head], there, full.at[slot])

    lax.fori_loop(0, tile.steps, step, None)

    def released(i, _):
        plgpu.barrier_wait(memory.k_empty.at[lax.rem(i, stages)])
        plgpu.barrier_wait(memory.v_empty.at[lax.rem(i, stages)])

    lax.fori_loop(jnp.maximum(tile.steps - stages, 0), tile.steps, released, None)


def over(tile: Tile, limit, step, carry):
    """step(i, seen, carry) for all steps: the first one is masked."""

    def seen():
        odd, column = lax.rem(tile.count, 2), index(CELL, WIDTH, 1)
        first = odd * CELL  # where the list begins in the pair
        return (column >= first) & ((column < first + limit) | (column >= first + CELL))

    first = jnp.minimum(tile.steps, 1)
    carry = lax.fori_loop(0, first, lambda i, carry: step(i, seen, carry), carry)
    return lax.fori_loop(first, tile.steps, lambda i, carry: step(i, None, carry), carry)


def scratch(sizes: Sizes, dtype) -> list:
    beside = 2 * WIDTH * (sizes.key_dim + sizes.value_dim) + 4 * WIDTH
    stages = sizes.fitting(2 * WIDTH * (sizes.key_dim + sizes.value_dim), beside)
    return [
        shared(2, CELL, sizes.key_dim, dtype=dtype),
        shared(2, CELL, sizes.value_dim, dtype=dtype),
        plgpu.SMEM((2, CELL), f32),
        shared(stages, WIDTH, sizes.key_dim, dtype=dtype),
        shared(stages, WIDTH, sizes.value_dim, dtype=dtype),
        plgpu.Barrier(num_arrivals=2),
        *[plgpu.Barrier(num_arrivals=2, num_barriers=stages) for _ in range(4)],
        *staging([(CELL, WIDTH)], dtype, sizes.interpret, 2),
    ]


@narrow_indices()
def forward(q, k, v, order, counts, limits, *, stages: int = 2, interpret=None) -> tuple[jax.Array, jax.Array]:
    """o [B, T, H, V] in the dtype of v and L [B, H, T] float32, logarithms of the softmax's sums, of keys that every
    query sees: 0 and MASKED where there are none. See `Sources`."""
    (batch, time, heads, key_dim), value_dim, routes = q.shape, v.shape[3], order.shape[1]
    sizes = Sizes(batch, time, heads, k.shape[2], routes, key_dim, value_dim, stages, interpret)

    def body(*refs):
        x, (o_g, log_sum_g), (q, o, log_sum), rest = Sources(*refs[:6]), refs[6:8], refs[8:11], refs[11:]
        memory, left = Memory(*rest[:2], None, *rest[2:7]), rest[7:]
        tile = Tile.here(x, sizes)

        def compute():
            group = lax.axis_index("group")
            plgpu.barrier_wait(memory.queries)
            walk = functools.partial(over, tile, x.limits[tile.row])
            o_here, sum_here, buffer = o.at[group], log_sum.at[group], left[0].at[group] if left else None
            attend(walk, memory, q.at[group], o_here, sum_here, buffer, sizes, empty=True)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_here, o_g.at[tile.row, tile.time(group), tile.head])
            plgpu.copy_smem_to_gmem(sum_here, log_sum_g.at[tile.row, tile.head, tile.time(group)])
            plgpu.wait_smem_to_gmem(0)

        split(lambda: load(tile, x, memory, sizes, q), compute)

    out = [jax.ShapeDtypeStruct((*q.shape[:3], value_dim), v.dtype)]
    out.append(jax.ShapeDtypeStruct((batch, heads, time), f32))
    grid = heads, time // WIDTH, batch
    return tuple(launch(body, (q, k, v, order, counts, limits), out, scratch(sizes, v.dtype), sizes, grid))
