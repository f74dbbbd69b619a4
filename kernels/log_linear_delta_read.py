"""The reads of the log-linear delta rule on a Hopper GPU; the algebra is at the head of `log_linear_delta.py`.

read       a block of a head: a chunk per compute warpgroup, with its queries and outputs in registers, first inside the
           block, then over the nodes that the block reads, nearest first. A third warpgroup only issues loads.
queries    the same walk without outputs, which keeps the queries that meet each node: what the gradients are made of.

Of the nodes of a level every other one is read: the first of each pair.
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
    SPAN,
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
from efla_jax.kernels.mosaic import (
    MASKED,
    SHARED_MEMORY,
    by_column,
    by_row,
    index,
    left_operand,
    narrow_indices,
    on_grid,
    shared,
    staging,
)

GROUPS = CHUNKS  # compute warpgroups
LOADER_REGISTERS, COMPUTE_REGISTERS = 24, 240  # per thread; all that there are for three warpgroups


class Inputs(NamedTuple):
    """In global memory: q, k [B, T, G, K], u [B, T, H, K] or None, X [B, H, T, 64], gates [B, N H, rows, 128], by level
    the nodes [2, B, P, H, K, K] (N, S), and where the blocks are."""

    q: Any
    k: Any
    u: Any
    inverse: Any
    gates: Any
    levels: tuple
    places: Places


class Memory(NamedTuple):
    """Shared memory: q, k, u [2, C, K] (u or None); X [2, C, C]; gates [rows, 128]; nodes [ring, K, K]; barriers of the
    block's loads, and of each node's load and release; codes [128] or None."""

    q: Any
    k: Any
    u: Any
    inverse: Any
    gates: Any
    nodes: Any
    loaded: Any
    full: Any
    empty: Any
    codes: Any = None


class Task(NamedTuple):
    """A program: row of the batch, block and its number, head; a block reads `live` nodes, those of its number's bits.
    An empty block has a negative number, and no program."""

    row: Any
    block: Any
    number: Any
    head: Any
    sizes: Sizes
    places: Places

    @classmethod
    def here(cls, sizes: Sizes, places: Places) -> "Task":
        row, block, head = (lax.axis_index(name) for name in ("row", "block", "head"))
        number = block if places.numbers is None else places.numbers[row, block]
        return cls(row, block, number, head, sizes, places)

    @property
    def live(self):
        return sum(((self.number >> j) & 1 for j in range(self.sizes.depth)), jnp.int32(0))

    def tokens(self, chunk):
        return pl.ds(self.block * BLOCK + chunk * CHUNK, CHUNK)

    def node(self, level):
        """Which node of a level the block reads, if it reads that level."""
        if self.places.pairs is None:
            return self.number >> (level + 1) << 1
        return 2 * self.places.pairs[self.row, level, self.block]

    def kept(self, level):
        """Where its queries for a level are among those of all blocks that are kept with the level's."""
        if self.places.kept is None:
            return reader_number(self.number, level, half_of(self.sizes)) - beyond(level) * half_of(self.sizes)
        return self.places.kept[self.row, level, self.block]

    def of_group(self, level, use) -> None:
        """use(i), where i is the group of levels that this one is in."""
        for i, group in enumerate(self.sizes.groups):

            @pl.when((level >= group.start) & (level < group.stop))
            def _(i=i):
                use(i)


def lowest_level(block):
    """The number of the lowest set bit."""
    return 31 - lax.clz(block & -block)


def without_lowest(block):
    return block & (block - 1)


def load_node(task: Task, levels: tuple, kind: int, level, node, target, barrier) -> None:
    """Load N (kind 0) or S (1) of a node of a level."""
    for number, nodes in enumerate(levels):

        @pl.when(level == number)
        def _(nodes=nodes):
            plgpu.copy_gmem_to_smem(nodes.at[kind, task.row, node, task.head], target, barrier)


def memory_for(sizes: Sizes, config: Config, dtype, rows: int, values: bool, codes: bool) -> Memory:
    """Scratch of `Memory`, without u where there are no values and without codes where there are no documents, and as
    many nodes as fit the ring."""
    tile, node = 2 * BLOCK * sizes.dim, 2 * sizes.dim * sizes.dim
    own = (2 + values) * tile + 2 * BLOCK * CHUNK + 4 * rows * BLOCK + 2560 + tile * (not values)
    ring = max(1, min(config.ring, (SHARED_MEMORY - own) // node))
    tokens = shared(CHUNKS, CHUNK, sizes.dim, dtype=dtype)
    return Memory(
        q=tokens,
        k=tokens,
        u=tokens if values else None,
        inverse=shared(CHUNKS, CHUNK, CHUNK, dtype=dtype),
        gates=plgpu.SMEM((rows, BLOCK), f32),
        nodes=shared(ring, sizes.dim, sizes.dim, dtype=dtype),
        loaded=plgpu.Barrier(num_arrivals=CHUNKS * (3 + values) + 1 + codes),
        full=plgpu.Barrier(num_arrivals=1, num_barriers=ring),
        empty=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=ring),
        codes=plgpu.SMEM((BLOCK,), jnp.int32) if codes else None,
    )


def wait_for_release(memory: Memory, number) -> None:
    """Before load `number` into the ring."""
    ring = memory.nodes.shape[0]

    @pl.when(number >= ring)
    def _():
        plgpu.barrier_wait(memory.empty.at[lax.rem(number, ring)])


def drain(memory: Memory, total) -> None:
    """Wait until everything loaded has been used: a barrier may not end with a phase that nobody waited for."""
    ring = memory.nodes.shape[0]

    def released(i, _):
        plgpu.barrier_wait(memory.empty.at[lax.rem(i, ring)])

    lax.fori_loop(lax.max(total - ring, 0), total, released, None)


def load(task: Task, x: Inputs, memory: Memory) -> None:
    """The loading warpgroup: the block, then node after node, S before N and no N of the last."""
    g, ring = task.sizes.key_head(task.head), memory.nodes.shape[0]
    for chunk in range(CHUNKS):
        tokens = task.tokens(chunk)
        plgpu.copy_gmem_to_smem(x.q.at[task.row, tokens, g], memory.q.at[chunk], memory.loaded)
        plgpu.copy_gmem_to_smem(x.k.at[task.row, tokens, g], memory.k.at[chunk], memory.loaded)
        plgpu.copy_gmem_to_smem(x.inverse.at[task.row, task.head, tokens], memory.inverse.at[chunk], memory.loaded)
        if x.u is not None:
            plgpu.copy_gmem_to_smem(x.u.at[task.row, tokens, task.head], memory.u.at[chunk], memory.loaded)
    gates = x.gates.at[task.row, task.block * task.sizes.heads + task.head]
    plgpu.copy_gmem_to_smem(gates, memory.gates, memory.loaded)
    if memory.codes is not None:
        plgpu.copy_gmem_to_smem(x.places.codes.at[task.row, task.block], memory.codes, memory.loaded)
    live, both = task.live, 1 + (x.u is not None)

    def load_into(kind: int, number, level, node):
        wait_for_release(memory, number)
        place = lax.rem(number, ring)
        load_node(task, x.levels, kind, level, node, memory.nodes.at[place], memory.full.at[place])

    def level(m, left):
        number = lowest_level(left)
        node = task.node(number)
        if x.u is not None:
            load_into(1, both * m, number, node)

        @pl.when(m < live - 1)
        def _():
            load_into(0, both * m + both - 1, number, node)

        return without_lowest(left)

    lax.fori_loop(0, live, level, task.number)
    drain(memory, lax.max(both * live - 1, 0))


def node_of(memory: Memory, number, use) -> Any:
    """use(node), once load `number` is there; then it is released."""
    place = lax.rem(number, memory.nodes.shape[0])
    plgpu.barrier_wait(memory.full.at[place])
    result = use(memory.nodes.at[place])
    plgpu.barrier_arrive(memory.empty.at[place])
    return result


def distances(codes, mine, theirs) -> jax.Array:
    """Code xor code [64, 64] int32 of these tokens, rows, and those: below 2^l for pairs of level l or less, from 128
    on for tokens of two documents."""
    return by_row(codes.at[mine], CHUNK) ^ by_column(codes.at[theirs], CHUNK)


def weight_of(distance, weight) -> jax.Array:
    """Of weight(level) [64, 64] those of the pairs at these distances; 0 between two documents."""
    found = jnp.where(distance < BLOCK, weight(INSIDE - 1), 0.0)
    for level in reversed(range(INSIDE - 1)):
        found = jnp.where(distance < (1 << level), weight(level), found)
    return found


def pair_weights(gates, codes, group, before: int) -> jax.Array:
    """w . R [64, 64] float32 of this warpgroup's tokens and those of the chunk that is so many before its own."""
    mine, theirs = pl.ds(group * CHUNK, CHUNK), pl.ds((group - before) * CHUNK, CHUNK)
    exponent = by_row(gates.at[SUM, mine], CHUNK) - by_column(gates.at[SUM, theirs], CHUNK)
    if codes is not None:
        seen = distances(codes, mine, theirs) < BLOCK
        if not before:
            seen &= index(CHUNK, CHUNK, 1) <= index(CHUNK, CHUNK, 0)
        weight = weight_of(distances(codes, mine, theirs), lambda level: by_row(gates.at[WEIGHTS + level, mine], CHUNK))
        return jnp.exp2(jnp.where(seen, exponent, MASKED)) * weight
    if before:
        return jnp.exp2(exponent) * by_row(gates.at[WEIGHTS + INSIDE - 1, mine], CHUNK)
    row, column = index(CHUNK, CHUNK, 0), index(CHUNK, CHUNK, 1)
    apart, weight = row ^ column, by_row(gates.at[WEIGHTS + INSIDE - 2, mine], CHUNK)
    for level in reversed(range(INSIDE - 2)):
        weight = jnp.where(apart < (1 << level), by_row(gates.at[WEIGHTS + level, mine], CHUNK), weight)
    return jnp.exp2(jnp.where(column <= row, exponent, MASKED)) * weight


def inside_step(memory: Memory, group, before: int, q, o, left, interpret) -> tuple:
    """Queries and outputs of a warpgroup after the chunk that is so many before its own; without o those of its own
    alone. Of queries only, memory has no u, and o stays None."""
    dtype, gates, source, square = memory.k.dtype, memory.gates, group - before, (CHUNK, CHUNK)
    scores = multiply(left_operand(q.astype(dtype), left[0]), memory.k.at[source].T, square)
    if not before:
        scores = jnp.where(index(*square, 1) <= index(*square, 0), scores, 0.0)
    if memory.codes is not None:
        mine, theirs = pl.ds(group * CHUNK, CHUNK), pl.ds(source * CHUNK, CHUNK)
        scores = jnp.where(distances(memory.codes, mine, theirs) < BLOCK, scores, 0.0)
    solved = multiply(left_operand(scores.astype(dtype), left[1]), memory.inverse.at[source], square)
    if memory.u is not None:
        pairs = (solved * pair_weights(gates, memory.codes, group, before)).astype(dtype)
        pairs = left_operand(pairs, left[1])
        u, wide = memory.u.at[source], (CHUNK, memory.q.shape[2])
        o = multiply(pairs, u, wide) if o is None else add_product(o, pairs, u, interpret)
    known = solved * by_column(gates.at[ERASE, pl.ds(source * CHUNK, CHUNK)], CHUNK)
    return add_product(q, left_operand(known.astype(dtype), left[1]), memory.k.at[source], interpret), o


def change(memory: Memory, number, q, left, interpret) -> jax.Array:
    """Q + Q N."""
    narrow = q.astype(memory.k.dtype)
    use = lambda node: add_product(q, left_operand(narrow, left[0]), node, interpret)  # noqa: E731
    return node_of(memory, number, use)


def read_program(task: Task, memory: Memory, o_gmem, left, interpret) -> None:
    """A compute warpgroup of `read`."""
    group, dtype = lax.axis_index("group"), memory.k.dtype
    here, live = pl.ds(group * CHUNK, CHUNK), task.live
    plgpu.barrier_wait(memory.loaded)
    q, o = inside_step(memory, group, 0, matrix(memory.q.at[group]), None, left, interpret)
    step = lambda _, carry: inside_step(memory, group, 1, carry[0], carry[1], left, interpret)  # noqa: E731
    q, o = lax.fori_loop(0, group, step, (q, o))

    def read(number, q, o, block):
        weight = by_row(memory.gates.at[READS + lowest_level(block), here], task.sizes.dim)
        scaled = (q * weight).astype(dtype)
        return node_of(memory, number, lambda node: add_product(o, left_operand(scaled, left[0]), node, interpret))

    def level(m, carry):
        q, o, block = carry
        o = read(2 * m, q, o, block)
        return change(memory, 2 * m + 1, q, left, interpret), o, without_lowest(block)

    q, o, block = lax.fori_loop(0, lax.max(live - 1, 0), level, (q, o, task.number))
    o = lax.fori_loop(0, lax.min(live, 1), lambda _, o: read(2 * live - 2, q, o, block), o)
    room = memory.q.at[group]  # the queries are no longer needed
    room[...] = o.astype(dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(room, o_gmem.at[task.row, task.tokens(group), task.head])


def half_of(sizes: Sizes) -> int:
    """Blocks that may read a level of blocks, those beyond the last one counted, where a row is one document."""
    return 1 << max(sizes.depth - 1, 0)


def reader_number(block, level, half: int):
    """Where a block that reads a level is among all that read any, level by level."""
    return level * half + ((block >> (level + 1)) << level) + (block & ((1 << level) - 1))


def beyond(level):
    """The first level of the group that this one is in."""
    return jnp.minimum(level, SPAN.bit_length() - 1)


def query_program(task: Task, memory: Memory, results, left, interpret) -> None:
    """A compute warpgroup of `queries`."""
    group, room = lax.axis_index("group"), memory.q.at[lax.axis_index("group")]

    def keep(q, level) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        room[...] = q.astype(memory.k.dtype)
        plgpu.commit_smem()
        tokens = pl.ds(task.kept(level) * BLOCK + group * CHUNK, CHUNK)
        task.of_group(level, lambda i: plgpu.copy_smem_to_gmem(room, results[i].at[task.row, tokens, task.head]))

    def step(_, q):
        return inside_step(memory, group, 1, q, None, left, interpret)[0]

    def level(m, carry):
        q, block = carry
        keep(q, lowest_level(block))
        return change(memory, m, q, left, interpret), without_lowest(block)

    plgpu.barrier_wait(memory.loaded)
    q = inside_step(memory, group, 0, matrix(memory.q.at[group]), None, left, interpret)[0]
    q, live = lax.fori_loop(0, group, step, q), task.live
    q, block = lax.fori_loop(0, lax.max(live - 1, 0), level, (q, task.number))

    @pl.when(live > 0)
    def _():
        keep(q, lowest_level(block))


def launch(name: str, compute, x: Inputs, out, config: Config, sizes: Sizes, scratch: list, interpret):
    """Run compute(task, memory, results, scratch) by two warpgroups of every program, `load` by a third."""
    memory = memory_for(sizes, config, x.k.dtype, x.gates.shape[2], x.u is not None, x.places.codes is not None)

    def body(given, own, results, scratch):
        task, group = Task.here(sizes, given.places), lax.axis_index("group")

        @pl.when((group == GROUPS) & (task.number >= 0))
        def _():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            load(task, given, own)

        @pl.when((group < GROUPS) & (task.number >= 0))
        def _():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            compute(task, own, results, [ref.at[group] for ref in scratch])
            plgpu.wait_smem_to_gmem(0)

    grid = {"row": sizes.batch, "block": sizes.blocks, "head": sizes.heads}
    return on_grid(name, body, x, out, memory, scratch, grid, GROUPS + 1, config.automatic_barriers, interpret)


@narrow_indices()
def read_out(q, k, u, inverse, gates, levels: tuple, places: Places, *, sizes: Sizes, config: Config, interpret=None):
    """O [B, T, H, K] in the dtype of u; undefined in empty blocks.

    q, k [B, T, G, K], u [B, T, H, K], X = inverse [B, H, T, 64] of one 16-bit dtype, T a multiple of 128; gates
    [B, T / 128, H, rows, 128] float32; levels: the nodes of each level that is read, [2, B, P, H, K, K] (N, S)."""
    dtype = u.dtype
    left = staging([(CHUNK, sizes.dim), (CHUNK, CHUNK)], dtype, interpret, GROUPS)

    def program(task, memory, results, scratch):
        read_program(task, memory, results[0], scratch if interpret is not None else (None, None), interpret)

    x = Inputs(q, k, u, inverse, gates.reshape(sizes.batch, -1, *gates.shape[3:]), levels, in_reads(places))
    out = [jax.ShapeDtypeStruct(u.shape, dtype)]
    return launch("log_linear_delta_read", program, x, out, config, sizes, left, interpret)[0]


def in_reads(places: Places) -> Places:
    """What of it the programs that read are given."""
    return places._replace(nodes=None, ups=None, readers=None, latest=None)


@narrow_indices()
def queries(
    q, k, inverse, gates, levels: tuple, places: Places, *, sizes: Sizes, config: Config, interpret=None
) -> list[jax.Array]:
    """The Q that meet each node, as `read_out` has them on its way: by group of levels [B, kept blocks 128, H, K],
    places as of `Task.kept`. Undefined where no block reads a level."""
    dtype = k.dtype
    left = staging([(CHUNK, sizes.dim), (CHUNK, CHUNK)], dtype, interpret, GROUPS)

    def program(task, memory, results, scratch):
        query_program(task, memory, results, scratch if interpret is not None else (None, None), interpret)

    x = Inputs(q, k, None, inverse, gates.reshape(sizes.batch, -1, *gates.shape[3:]), levels, in_reads(places))
    tokens = [BLOCK * sum(sizes.kept[level] for level in group) for group in sizes.groups]
    shapes = [(sizes.batch, count, sizes.heads, sizes.dim) for count in tokens]
    out = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return launch("log_linear_delta_queries", program, x, out, config, sizes, left, interpret)
