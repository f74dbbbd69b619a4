"""The gradients of the log-linear delta rule's reads over nodes, on a Hopper GPU; letters as in `log_linear_delta.py`.

With Q the queries that meet a node (see `queries`), dQ' their cotangent behind it and X = dO S^T:

descend    a block of a head, its nodes from the furthest to the nearest:
           dc = rowsum(Q . X)        dQ = dQ' + dQ' N^T + c . X
sums       a node, or a part of its readers: dS = Q^T (c . dO)        dN = Q^T dQ'
           The furthest node of a block changes no query that is used, and so has no dN from it: all nodes that begin
           their row have none at all.
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
    READS,
    SPAN,
    TILE,
    Config,
    Places,
    Sizes,
    add_product,
    columns,
    f32,
    matrix,
    multiply,
)
from efla_jax.kernels.log_linear_delta_read import (
    COMPUTE_REGISTERS,
    GROUPS,
    LOADER_REGISTERS,
    Task,
    beyond,
    half_of,
    in_reads,
    load_node,
)
from efla_jax.kernels.mosaic import (
    WGMMA,
    begin,
    by_column,
    by_row,
    finish,
    left_operand,
    narrow_indices,
    parameters,
    shared,
    staging,
    transposed,
)

STAGES = 2  # readers that a program of `sums` loads ahead


def highest_level(block):
    """The number of the highest set bit."""
    return 31 - lax.clz(block)


def before_it(level):
    """How many places less than its queries the cotangent of a reader's queries has in a row that is one document: that
    of a row's first node has none, and so have its readers of the levels below in the same group."""
    return (2 << level) - (1 << beyond(level))


def before_first(group: range) -> int:
    """Readers of the first node of a row at any of these levels."""
    return sum(1 << level for level in group)


class Memory(NamedTuple):
    """Shared memory of `descend`: dO, and dQ on its way out, [2, C, K]; gates [rows, 128]; nodes [ring, K, K]; Q
    [2, C, K]; dc [depth, 128]; barriers of the block's loads, of each node's load and release, of the queries'."""

    d_o: Any
    d_q: Any
    gates: Any
    nodes: Any
    q: Any
    sums: Any
    loaded: Any
    full: Any
    empty: Any
    q_full: Any
    q_empty: Any


def ring_wait(barrier, number, count: int) -> None:
    """Before load `number` into a ring of `count`."""

    @pl.when(number >= count)
    def _():
        plgpu.barrier_wait(barrier.at[lax.rem(number, count)])


def ring_drain(barrier, total, count: int) -> None:
    """Wait until everything loaded has been used: a barrier may not end with a phase that nobody waited for."""

    def released(i, _):
        plgpu.barrier_wait(barrier.at[lax.rem(i, count)])

    lax.fori_loop(lax.max(total - count, 0), total, released, None)


def load_descent(task: Task, d_o, gates, kept, levels: tuple, memory: Memory) -> None:
    """The loading warpgroup of `descend`: dO; then by node S, Q and, but for the first, N."""
    ring, live = memory.nodes.shape[0], task.live
    for chunk in range(CHUNKS):
        plgpu.copy_gmem_to_smem(d_o.at[task.row, task.tokens(chunk), task.head], memory.d_o.at[chunk], memory.loaded)
    gate_row = task.block * task.sizes.heads + task.head
    plgpu.copy_gmem_to_smem(gates.at[task.row, gate_row], memory.gates, memory.loaded)

    def load_into(kind: int, place_number, number, node):
        ring_wait(memory.empty, place_number, ring)
        place = lax.rem(place_number, ring)
        load_node(task, levels, kind, number, node, memory.nodes.at[place], memory.full.at[place])

    def level(m, left):
        number = highest_level(left)
        node = task.node(number)
        load_into(1, lax.max(2 * m - 1, 0), number, node)
        ring_wait(memory.q_empty, m, 1)
        first = task.kept(number) * BLOCK

        def load_queries(i):
            for chunk in range(CHUNKS):
                tokens = pl.ds(first + chunk * CHUNK, CHUNK)
                source, target = kept[i].at[task.row, tokens, task.head], memory.q.at[chunk]
                plgpu.copy_gmem_to_smem(source, target, memory.q_full.at[0])

        task.of_group(number, load_queries)

        @pl.when(m > 0)
        def _():
            load_into(0, 2 * m, number, node)

        return left ^ (1 << number)

    lax.fori_loop(0, live, level, task.number)
    ring_drain(memory.empty, lax.max(2 * live - 1, 0), ring)
    ring_drain(memory.q_empty, live, 1)


def descend_program(task: Task, memory: Memory, results, left, interpret) -> None:
    """A compute warpgroup of `descend`."""
    d_q_g, *d_kept, sums_g = results
    group, dtype, wide = lax.axis_index("group"), memory.d_o.dtype, (CHUNK, task.sizes.dim)
    here, ring = pl.ds(group * CHUNK, CHUNK), memory.nodes.shape[0]
    d_o, room = memory.d_o.at[group], memory.d_q.at[group]
    plgpu.barrier_wait(memory.loaded)

    def put(narrow) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        room[...] = narrow
        plgpu.commit_smem()

    def keep(level) -> None:
        place = task.kept(level) - (before_it(level) if task.places.kept is None else 0)
        tokens = pl.ds(place * BLOCK + group * CHUNK, CHUNK)
        task.of_group(level, lambda i: plgpu.copy_smem_to_gmem(room, d_kept[i].at[task.row, tokens, task.head]))

    def read(number, level, m, d_q):
        """d_q + c . X, and dc."""
        place = lax.rem(number, ring)
        plgpu.barrier_wait(memory.full.at[place])
        seen = multiply(d_o, memory.nodes.at[place].T, wide)
        plgpu.barrier_arrive(memory.empty.at[place])
        plgpu.barrier_wait(memory.q_full.at[0])
        memory.sums.at[level, here][...] = jnp.sum(matrix(memory.q.at[group]) * seen, axis=1)
        plgpu.commit_smem()  # what was read may be loaded over
        plgpu.barrier_arrive(memory.q_empty.at[0])
        return d_q + seen * by_row(memory.gates.at[READS + level, here], task.sizes.dim)

    def first(_, carry):
        d_q, block = carry
        level = highest_level(block)
        return read(0, level, 0, d_q), block ^ (1 << level)

    def level(m, carry):
        d_q, block = carry
        level = highest_level(block)
        narrow = d_q.astype(dtype)
        put(narrow)
        keep(level)
        d_q = read(2 * m - 1, level, m, d_q)
        place = lax.rem(2 * m, ring)
        plgpu.barrier_wait(memory.full.at[place])
        d_q = add_product(d_q, left_operand(narrow, left), memory.nodes.at[place].T, interpret)
        plgpu.barrier_arrive(memory.empty.at[place])
        return d_q, block ^ (1 << level)

    d_q = plgpu.layout_cast(jnp.zeros(wide, f32), WGMMA)
    carry = lax.fori_loop(0, lax.min(task.live, 1), first, (d_q, task.number))
    d_q, _ = lax.fori_loop(1, task.live, level, carry)
    put(d_q.astype(dtype))
    plgpu.copy_smem_to_gmem(room, d_q_g.at[task.row, task.tokens(group), task.head])
    plgpu.commit_smem()
    for number in range(task.sizes.depth):
        row = (task.block * task.sizes.heads + task.head) * task.sizes.depth + number
        plgpu.copy_smem_to_gmem(memory.sums.at[number, here], sums_g.at[task.row, row, here])


@narrow_indices()
def descend(
    d_o, gates, kept: list, levels: tuple, places: Places, *, sizes: Sizes, config: Config, interpret=None
) -> tuple:
    """(dQ [B, T, H, K] of the queries that leave their block, those behind every node like `kept` but for `before_it`,
    dc [B, N, H, depth, 128] float32). Undefined where a block does not read a level or reads it last, and in empty
    blocks.

    d_o [B, T, H, K]; kept: the queries of `queries`; the rest as in `read_out`. At least one level."""
    dtype, rows, depth = d_o.dtype, gates.shape[3], sizes.depth
    count = [kept[i].shape[1] for i in range(len(kept))]
    if places.kept is None:
        count = [max(n - BLOCK * before_first(group), BLOCK) for n, group in zip(count, sizes.groups, strict=True)]
    behind = [jax.ShapeDtypeStruct((sizes.batch, n, sizes.heads, sizes.dim), dtype) for n in count]
    tokens = shared(CHUNKS, CHUNK, sizes.dim, dtype=dtype)
    memory = [
        *[tokens] * 2,
        plgpu.SMEM((rows, BLOCK), f32),
        shared(config.ring, sizes.dim, sizes.dim, dtype=dtype),
        tokens,
        plgpu.SMEM((depth, BLOCK), f32),
        plgpu.Barrier(num_arrivals=CHUNKS + 1),
        plgpu.Barrier(num_arrivals=1, num_barriers=config.ring),
        plgpu.Barrier(num_arrivals=GROUPS, num_barriers=config.ring),
        plgpu.Barrier(num_arrivals=CHUNKS, num_barriers=1),
        plgpu.Barrier(num_arrivals=GROUPS, num_barriers=1),
    ]
    given, inputs = jax.tree.flatten((kept, levels, in_reads(places)._replace(codes=None)))
    shape, many = jax.ShapeDtypeStruct, 2 + len(behind)

    def log_linear_delta_descend(d_o, gates, *refs):
        (kept, nodes, where), refs = inputs.unflatten(refs[: len(given)]), refs[len(given) :]
        results, refs = refs[:many], refs[many:]
        own, left = Memory(*refs[: len(memory)]), refs[len(memory) :]
        task, group = Task.here(sizes, where), lax.axis_index("group")

        @pl.when((group == GROUPS) & (task.number >= 0))
        def _():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            load_descent(task, d_o, gates, kept, nodes, own)

        @pl.when((group < GROUPS) & (task.number >= 0))
        def _():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            descend_program(task, own, results, left[0].at[group] if left else None, interpret)
            plgpu.wait_smem_to_gmem(0)

    sums = shape((sizes.batch, sizes.blocks * sizes.heads * depth, BLOCK), f32)
    d_q, *d_kept, sums = plgpu.kernel(
        log_linear_delta_descend,
        out_type=[shape(d_o.shape, dtype), *behind, sums],
        scratch_types=[*memory, *staging([(CHUNK, sizes.dim)], dtype, interpret, GROUPS)],
        grid=(sizes.batch, sizes.blocks, sizes.heads),
        grid_names=("row", "block", "head"),
        num_threads=GROUPS + 1,
        thread_name="group",
        compiler_params=parameters(config.automatic_barriers),
        interpret=interpret,
    )(d_o, gates.reshape(sizes.batch, -1, *gates.shape[3:]), *given)
    return d_q, d_kept, sums.reshape(sizes.batch, sizes.blocks, sizes.heads, depth, BLOCK)


# ---- sums ---------------------------------------------------------------------------------------------------------


class Readers(NamedTuple):
    """A program of `sums`: the level, the first of the blocks that it goes through, where that block's queries and
    their cotangents are among those kept, how many blocks there are, and whether no node is before theirs in its
    document."""

    level: Any
    block: Any
    kept: Any
    behind: Any
    valid: Any
    first: Any

    @classmethod
    def of(cls, program, sizes: Sizes, lowest: int, count: int) -> "Readers":
        """In a row that is one document."""
        half = half_of(sizes)
        level, start = lowest + lax.div(program, half // count), lax.rem(program, half // count) * count
        node = start >> level
        block = (node << (level + 1)) + (1 << level) + (start & ((1 << level) - 1))
        kept = (level - beyond(level)) * half + start
        valid = lax.clamp(0, sizes.blocks - block, count)
        return cls(level, block, kept, kept - before_it(level), valid, node == 0)

    @classmethod
    def among(cls, row, program, places: Places, level: int, count: int) -> "Readers":
        """Of a pair of this level, the next so many readers."""
        parts, readers = (1 << level) // count, places.readers[level]
        pair, start = lax.div(program, parts), lax.rem(program, parts) * count
        begin, many, first = (readers[row, pair, i] for i in range(3))
        block = begin + start
        kept = places.kept[row, level, lax.min(block, places.kept.shape[2] - 1)]
        return cls(jnp.int32(level), block, kept, kept, lax.clamp(0, many - start, count), first > 0)


class SumMemory(NamedTuple):
    """Shared memory of `sums`: Q, dO and dQ' [stages, 2, C, K]; c [stages, 128]; what goes out [K // 64, 64, K]; the
    barriers of loads and of their release."""

    q: Any
    d_o: Any
    d_q: Any
    weights: Any
    room: Any
    full: Any
    empty: Any


def load_readers(x: tuple, place: tuple, readers: Readers, memory: SumMemory, sizes: Sizes) -> None:
    (d_o, gates, kept, d_kept), (row, head) = x, place

    def load(i, _):
        ring_wait(memory.empty, i, STAGES)
        slot = lax.rem(i, STAGES)
        full, block, first = memory.full.at[slot], readers.block + i, (readers.kept + i) * BLOCK
        for chunk in range(CHUNKS):
            tokens, target = pl.ds(first + chunk * CHUNK, CHUNK), (slot, chunk)
            plgpu.copy_gmem_to_smem(kept.at[row, tokens, head], memory.q.at[target], full)
            there = pl.ds(block * BLOCK + chunk * CHUNK, CHUNK)
            plgpu.copy_gmem_to_smem(d_o.at[row, there, head], memory.d_o.at[target], full)

            @pl.when(readers.first)  # any numbers will do
            def _(tokens=tokens, target=target):
                plgpu.copy_gmem_to_smem(kept.at[row, tokens, head], memory.d_q.at[target], full)

            @pl.when(jnp.logical_not(readers.first))
            def _(chunk=chunk, target=target):
                tokens = pl.ds((readers.behind + i) * BLOCK + chunk * CHUNK, CHUNK)
                plgpu.copy_gmem_to_smem(d_kept.at[row, tokens, head], memory.d_q.at[target], full)

        weights = gates.at[row, block * sizes.heads + head, READS + readers.level]
        plgpu.copy_gmem_to_smem(weights, memory.weights.at[slot], full)

    lax.fori_loop(0, readers.valid, load, None)
    ring_drain(memory.empty, readers.valid, STAGES)


def add_readers(readers: Readers, memory: SumMemory, out, left, interpret) -> None:
    """A compute warpgroup of `sums`: 64 rows of dN and dS, written to out [2, K, K]."""
    group, dtype, dim = lax.axis_index("group"), memory.q.dtype, memory.room.shape[2]
    wide = plgpu.ACC((TILE, dim), f32)

    def add(i, totals):
        slot = lax.rem(i, STAGES)
        plgpu.barrier_wait(memory.full.at[slot])
        for chunk in range(CHUNKS):
            q = transposed(memory.q.at[slot, chunk, :, columns(group)])
            weights = by_column(memory.weights.at[slot, pl.ds(chunk * CHUNK, CHUNK)], TILE)
            read = (q.astype(f32) * weights).astype(dtype)

            def both(acc_change, acc_state, q=q, read=read, totals=totals, chunk=chunk):
                begin(acc_change, totals[0], interpret)
                begin(acc_state, totals[1], interpret)
                plgpu.wgmma(acc_change, left_operand(q, left[0]), memory.d_q.at[slot, chunk])
                plgpu.wgmma(acc_state, left_operand(read, left[1]), memory.d_o.at[slot, chunk])
                change = finish(acc_change, totals[0], interpret, wait_n=1)
                return change, finish(acc_state, totals[1], interpret)

            totals = pl.run_scoped(both, wide, wide)
        plgpu.commit_smem()  # what was read may be loaded over
        plgpu.barrier_arrive(memory.empty.at[slot])
        return totals

    zero = plgpu.layout_cast(jnp.zeros((TILE, dim), f32), WGMMA)
    change, state = lax.fori_loop(0, readers.valid, add, (zero, zero))
    room = memory.room.at[group]
    for kind, total in enumerate((jnp.where(readers.first, 0.0, change), state)):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        room[...] = total.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(room, out.at[kind, columns(group)])


def part_sums(x: tuple, where, parts: int, sizes: Sizes, config: Config, interpret) -> jax.Array:
    """(dN, dS) [B, parts, H, 2, K, K], each from the readers that where(row, part, tables) gives; x: the arguments of
    `sums` for a group of levels and then the tables."""
    dtype, groups = x[0].dtype, sizes.dim // TILE
    tokens = shared(STAGES, CHUNKS, CHUNK, sizes.dim, dtype=dtype)
    given, inputs = jax.tree.flatten(x)

    def log_linear_delta_sums(*refs):
        (*arrays, tables), out = inputs.unflatten(refs[: len(given)]), refs[len(given)]
        scratch = refs[len(given) + 1 :]
        memory, left = SumMemory(*scratch[:7]), scratch[7:]
        row, part, head = (lax.axis_index(name) for name in ("row", "part", "head"))
        readers, group = where(row, part, tables), lax.axis_index("group")

        @pl.when(group == groups)
        def _():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            load_readers(tuple(arrays), (row, head), readers, memory, sizes)

        @pl.when(group < groups)
        def _():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            buffers = [ref.at[group] for ref in left] or [None, None]
            add_readers(readers, memory, out.at[row, part, head], buffers, interpret)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        log_linear_delta_sums,
        out_type=jax.ShapeDtypeStruct((sizes.batch, parts, sizes.heads, 2, sizes.dim, sizes.dim), dtype),
        scratch_types=[
            *[tokens] * 3,
            plgpu.SMEM((STAGES, BLOCK), f32),
            shared(groups, TILE, sizes.dim, dtype=dtype),
            plgpu.Barrier(num_arrivals=3 * CHUNKS + 1, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=groups, num_barriers=STAGES),
            *staging([(TILE, CHUNK)] * 2, dtype, interpret, groups),
        ],
        grid=(sizes.batch, parts, sizes.heads),
        grid_names=("row", "part", "head"),
        num_threads=groups + 1,
        thread_name="group",
        compiler_params=parameters(config.automatic_barriers),
        interpret=interpret,
    )(*given)


def summed(parts: jax.Array, count: int) -> jax.Array:
    """The sums of every `count` parts."""
    own = parts.reshape(parts.shape[0], -1, count, *parts.shape[2:])
    return own[:, :, 0] if count == 1 else jnp.sum(own, axis=2, dtype=f32).astype(parts.dtype)


@narrow_indices()
def sums(
    d_o, gates, kept: list, d_kept: list, places: Places, *, sizes: Sizes, config: Config, interpret=None
) -> list[jax.Array]:
    """By level the cotangents (dN, dS) [B, P, H, 2, K, K] of the nodes that are read, the first ones of pairs, and
    zeros where there is none. Arguments as in `descend`, and what it returns."""
    gates, found, half = gates.reshape(sizes.batch, -1, *gates.shape[3:]), [], half_of(sizes)
    for i, group in enumerate(sizes.groups):
        x, count = (d_o, gates, kept[i], d_kept[i], in_sums(places)), min(1 << group.start, SPAN)
        if places.readers is None:

            def of(_row, part, _tables, group=group, count=count):
                return Readers.of(part, sizes, group.start, count)

            parts = part_sums(x, of, len(group) * half // count, sizes, config, interpret)
            split = jnp.split(parts, len(group), axis=1)
            found += [summed(own, (1 << level) // count) for level, own in zip(group, split, strict=True)]
            continue
        for level in group:
            each = (1 << level) // count

            def among(row, part, tables, level=level, count=count):
                return Readers.among(row, part, tables, level, count)

            found.append(
                summed(part_sums(x, among, places.readers[level].shape[1] * each, sizes, config, interpret), each)
            )
    return found


def in_sums(places: Places) -> Places:
    """What of it the programs that sum are given."""
    return Places(kept=places.kept, readers=places.readers)
