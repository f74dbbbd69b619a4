"""One query a row against a long list of keys on a Hopper GPU: softmax attention's decoding step, a Pallas program in
Mosaic GPU.

Keys stand in cells of 64 slots, X heads side by side in a slot: a cache of every token, or pages of selected chunks,
each with an owner. An item is a cell's keys of one of its heads; only the query heads that read it count. A tail, the
chunk that is still open, may follow: one more cell, with heads of its own. A program takes a stretch of a row's items,
so that the work is spread evenly and follows the cells in use, whoever owns them. As a tensor core multiplies 64 rows
at least, all query heads of the row are multiplied with every item, and a mask leaves those that read it: no list by
owner is needed. Two compute warpgroups take the items in turns, one more warpgroup only issues loads, and every compute
warpgroup leaves its outputs and the logarithms of its sums, which are joined outside.
Source: FlashAttention (arXiv 2307.08691), its division of the keys for decoding.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.attention_mosaic import (
    CELL,
    LEAST,
    LOG2E,
    nothing_seen,
    scores_of,
    softmax_step,
    split,
    spread_rows,
    with_product,
)
from efla_jax.kernels.mosaic import (
    MASKED,
    SHARED_MEMORY,
    index,
    narrow_indices,
    parameters,
    shared,
    staging,
)

GROUPS = 2  # compute warpgroups of a program
DIMS = (64, 128)
DTYPES = ("bfloat16", "float16")
f32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Config:
    """programs: of a call, as many as multiprocessors keep all of them busy; stages: items loaded ahead, even, where
    shared memory holds them."""

    programs: int = 132
    stages: int = 8


SAFE = Config()


class Sizes(NamedTuple):
    """Sizes of a call: query heads, slots, key heads of a slot, query heads that read one key head, key heads of the
    tail (0: none), K, V; programs of a row, stages, and how it runs."""

    heads: int
    slots: int
    key_heads: int
    readers: int
    tail_heads: int
    key_dim: int
    value_dim: int
    programs: int
    stages: int
    interpret: Any

    @property
    def rows(self) -> int:
        """Rows of the outputs that are kept."""
        return -(-self.heads // 8) * 8


class Memory(NamedTuple):
    """Shared memory: q [64, K]; k [stages, 64, K], v [stages, 64, V]; o [2, 64, V], log_sum [2, 64] float32; barriers
    of the queries, and of loads and releases; the interpreter's left operands."""

    q: Any
    k: Any
    v: Any
    o: Any
    log_sum: Any
    queries: Any
    k_full: Any
    v_full: Any
    empty: Any
    left: list


class Sources(NamedTuple):
    """q [B, 64, K]; k [B, S, X, K], v [B, S, X, V]; limits [B, 1 or 2] int32: slots in use, of the cells and of the
    tail; owners [B, S / 64] int32 or None; tail_k [B, 64, G, K], tail_v [B, 64, G, V] or None."""

    q: Any
    k: Any
    v: Any
    limits: Any
    owners: Any
    tail_k: Any
    tail_v: Any


class Stretch(NamedTuple):
    """A program: row of the batch, part of the row, its first item and how many; the row's items in cells and slots in
    use; slots of the tail in use."""

    row: Any
    part: Any
    first: Any
    items: Any
    ahead: Any
    limit: Any
    fill: Any

    @classmethod
    def here(cls, limits, sizes: Sizes) -> "Stretch":
        row, part = lax.axis_index("row"), lax.axis_index("part")
        limit = limits[row, 0]
        ahead = lax.div(limit + CELL - 1, CELL) * sizes.key_heads
        total = ahead + sizes.tail_heads
        each = lax.div(total + sizes.programs - 1, sizes.programs)
        first = jnp.minimum(part * each, total)
        fill = limits[row, 1] if sizes.tail_heads else 0
        return cls(row, part, first, jnp.minimum(each, total - first), ahead, limit, fill)

    def in_tail(self, i) -> Any:
        return self.first + i >= self.ahead

    def place(self, i, sizes: Sizes) -> tuple:
        """(cell, key head) of the stretch's item i."""
        cell = lax.div(self.first + i, sizes.key_heads)
        return cell, self.first + i - cell * sizes.key_heads

    def begin(self, cell, sizes: Sizes):
        """The first slot to load for a cell: the last cell may be cut, and is loaded from further in front."""
        return cell * CELL if sizes.slots % CELL == 0 else jnp.minimum(cell * CELL, sizes.slots - CELL)


def unsupported(heads: int, key_dim: int, value_dim: int, slots: int, dtype) -> str | None:
    """Why the kernel does not cover these sizes, or None."""
    if key_dim not in DIMS or value_dim not in DIMS:
        return f"K = {key_dim}, V = {value_dim}: each must be one of {DIMS}"
    if heads > CELL:
        return f"H = {heads}: up to {CELL} query heads"
    if slots < CELL or slots % 8:
        return f"{slots} slots of keys: {CELL} or more, a multiple of 8"
    if jnp.dtype(dtype).name not in DTYPES:
        return f"dtype {jnp.dtype(dtype).name}: one of {DTYPES}"
    return None


def load(stretch: Stretch, x: Sources, memory: Memory, sizes: Sizes) -> None:
    """The loading warpgroup."""
    plgpu.copy_gmem_to_smem(x.q.at[stretch.row], memory.q, memory.queries)

    def copy(k, v, slots, head, slot) -> None:
        plgpu.copy_gmem_to_smem(k.at[stretch.row, slots, head], memory.k.at[slot], memory.k_full.at[slot])
        plgpu.copy_gmem_to_smem(v.at[stretch.row, slots, head], memory.v.at[slot], memory.v_full.at[slot])

    def step(i, _):
        slot = lax.rem(i, sizes.stages)

        @pl.when(i >= sizes.stages)
        def _():
            plgpu.barrier_wait(memory.empty.at[slot])

        def of_cell():
            cell, head = stretch.place(i, sizes)
            copy(x.k, x.v, pl.ds(stretch.begin(cell, sizes), CELL), head, slot)

        if not sizes.tail_heads:
            return of_cell()
        pl.when(jnp.logical_not(stretch.in_tail(i)))(of_cell)

        @pl.when(stretch.in_tail(i))
        def _():
            copy(x.tail_k, x.tail_v, pl.ds(0, CELL), stretch.first + i - stretch.ahead, slot)

    lax.fori_loop(0, stretch.items, step, None)

    def released(i, _):
        plgpu.barrier_wait(memory.empty.at[lax.rem(i, sizes.stages)])

    lax.fori_loop(jnp.maximum(stretch.items - sizes.stages, 0), stretch.items, released, None)


def seen(stretch: Stretch, i, owner, sizes: Sizes) -> jax.Array:
    """Which rows (query heads) see which keys of an item, bool [64, 64]."""
    cell, head = stretch.place(i, sizes)
    readers: Any = sizes.readers
    reader = (owner * sizes.key_heads + head) * readers
    begin = stretch.begin(cell, sizes)
    first, last = cell * CELL - begin, stretch.limit - begin
    if sizes.tail_heads:
        tail, own = stretch.in_tail(i), sizes.heads // sizes.tail_heads
        reader = jnp.where(tail, (stretch.first + i - stretch.ahead) * own, reader)
        readers, last = jnp.where(tail, own, readers), jnp.where(tail, stretch.fill, last)
    row, column = index(CELL, CELL, 0), index(CELL, CELL, 1)
    found = (row >= reader) & (row < reader + readers) & (column < last)
    if sizes.slots % CELL == 0:
        return found
    return found & (column >= (jnp.where(tail, 0, first) if sizes.tail_heads else first))


def attend(stretch: Stretch, owners: Any, memory: Memory, sizes: Sizes) -> None:
    """A compute warpgroup: outputs [64, V] and log sums [64] of every second item, in shared memory."""
    group, dtype = lax.axis_index("group"), memory.v.dtype
    left = memory.left[0].at[group] if memory.left else None

    def owner_of(i):
        """Read one step ahead: a load from global memory takes about as long as a step."""
        if owners is None:
            return jnp.int32(0)
        cell, _ = stretch.place(jnp.minimum(i, jnp.maximum(stretch.items - 1, 0)), sizes)
        return owners[stretch.row, jnp.minimum(cell, owners.shape[1] - 1)]

    def step(j, carry):
        total_o, top, total, owner = carry
        i = GROUPS * j + group
        slot, following = lax.rem(i, sizes.stages), owner_of(i + GROUPS)
        plgpu.barrier_wait(memory.k_full.at[slot])
        scores = scores_of(memory.q, memory.k.at[slot])
        scores = jnp.where(seen(stretch, i, owner, sizes), scores, MASKED)
        mass, total_o, top, total = softmax_step(scores, total_o, top, total)
        mass = mass.astype(dtype)
        plgpu.barrier_wait(memory.v_full.at[slot])
        total_o = with_product(total_o, mass, memory.v.at[slot], left, sizes.interpret)
        plgpu.barrier_arrive(memory.empty.at[slot])
        return total_o, top, total, following

    start = nothing_seen(sizes.value_dim)
    count = lax.div(stretch.items - group + GROUPS - 1, GROUPS)
    total_o, top, total, _ = lax.fori_loop(0, count, step, (*start, owner_of(group)))
    some = jnp.maximum(total, LEAST)
    memory.o.at[group][...] = total_o / spread_rows(some, sizes.value_dim)
    memory.log_sum.at[group][...] = jnp.where(total > 0, top * (1 / LOG2E) + jnp.log(some), MASKED)


def scratch(sizes: Sizes, dtype) -> list:
    """What `Memory` lists."""
    stages = sizes.stages
    return [
        shared(CELL, sizes.key_dim, dtype=dtype),
        shared(stages, CELL, sizes.key_dim, dtype=dtype),
        shared(stages, CELL, sizes.value_dim, dtype=dtype),
        shared(GROUPS, CELL, sizes.value_dim, dtype=f32),
        plgpu.SMEM((GROUPS, CELL), f32),
        plgpu.Barrier(num_arrivals=1),
        *[plgpu.Barrier(num_arrivals=1, num_barriers=stages) for _ in range(3)],
        *staging([(CELL, CELL)], dtype, sizes.interpret, GROUPS),
    ]


def sizes_of(q, k, v, tail, routes: int, config: Config, interpret) -> Sizes:
    (batch, heads, key_dim), (slots, key_heads), value_dim = q.shape, k.shape[1:3], v.shape[3]
    readers, tail_heads = heads // (key_heads * routes), tail[0].shape[2] if tail else 0
    beside = CELL * (2 * key_dim + GROUPS * 4 * (value_dim + 1))
    fitting = (SHARED_MEMORY - 2048 - beside) // (2 * CELL * (key_dim + value_dim))
    stages = max(min(config.stages, fitting) // GROUPS * GROUPS, GROUPS)
    programs = max(min(config.programs // batch, -(-slots // CELL)), 1)
    return Sizes(heads, slots, key_heads, readers, tail_heads, key_dim, value_dim, programs, stages, interpret)


@narrow_indices()
def partial(q, k, v, owners, limits, *, tail=None, routes: int = 1, config: Config = SAFE, interpret=None):
    """(o [B, P, H, V], L [B, P, H]) float32 of P parts of a row's keys: outputs, and logarithms of the softmax's sums,
    MASKED where a head sees none of the part.

    q [B, H, K]; k [B, S, X, K], v [B, S, X, V] of one 16-bit dtype; limits [B] int32: slots in use. owners [B, S / 64]
    int32, below `routes`: query head h reads of a cell of owner r the key head x with r X + x = h // (H // (X routes));
    None: routes is 1. tail: None, or (k [B, 64, G, K], v [B, 64, G, V], slots in use [B] int32), of which query head h
    reads key head h // (H // G)."""
    sizes = sizes_of(q, k, v, tail, routes, config, interpret)
    batch, dtype = q.shape[0], v.dtype
    q = jnp.pad(q, ((0, 0), (0, CELL - sizes.heads), (0, 0)))
    limits = jnp.stack([limits, tail[2]] if tail else [limits], axis=1)
    given = Sources(q, k, v, limits, owners, *(tail[:2] if tail else (None, None)))
    arrays, tree = jax.tree.flatten(given)

    def body(*refs):
        x, (o_g, log_sum_g, *rest) = jax.tree.unflatten(tree, refs[: len(arrays)]), refs[len(arrays) :]
        memory = Memory(*rest[:9], left=list(rest[9:]))
        stretch = Stretch.here(x.limits, sizes)

        def compute():
            group = lax.axis_index("group")
            plgpu.barrier_wait(memory.queries)
            attend(stretch, x.owners, memory, sizes)
            plgpu.commit_smem()
            part, rows = stretch.part * GROUPS + group, pl.ds(0, sizes.rows)
            plgpu.copy_smem_to_gmem(memory.o.at[group, rows], o_g.at[stretch.row, part])
            plgpu.copy_smem_to_gmem(memory.log_sum.at[group], log_sum_g.at[stretch.row, part])
            plgpu.wait_smem_to_gmem(0)

        split(lambda: load(stretch, x, memory, sizes), compute)

    parts = GROUPS * sizes.programs
    out = [jax.ShapeDtypeStruct((batch, parts, sizes.rows, sizes.value_dim), f32)]
    out.append(jax.ShapeDtypeStruct((batch, parts, CELL), f32))
    o, log_sum = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch(sizes, dtype),
        grid=(sizes.programs, batch),
        grid_names=("part", "row"),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=parameters(False),
        interpret=interpret,
    )(*arrays)
    return o[:, :, : sizes.heads], log_sum[:, :, : sizes.heads]
