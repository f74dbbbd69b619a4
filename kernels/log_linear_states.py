"""The states of log-linear linear attention's blocks on a Hopper GPU, and their cotangents: two walks over a row.

`walk` makes the state that ends behind each whole block (see `log_linear.py` for numbers, levels and states):

    S = K^T (a . U) + sum over the trailing ones j of the block's number of f_j . S_j        (binary carry)

a the decay after a token until its block ends, f_j the decay from the end of S_j until then. S_j is the slot of level j
in a stack in shared memory, float32, and S becomes the slot of the lowest bit that is not set.

`adjoint` goes back. What merged has the cotangent of what it became, and what blocks read is added where they read:

    E = D of the slot that the block's state went to;  D_j = f_j E;  df_j = <S_j, E>     over the trailing ones j
    D_j += sum over the block's tokens of c_j q dO^T                                    over all set bits j

E [K, V] is all that the gradients of k and u need of it. A program has 64 columns of V and some of K, of which no two
mix; one warpgroup computes and a second one loads. States are [V, K].
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.log_linear import (
    Config,
    Gates,
    drain,
    flat,
    lowest_level,
    number_of,
    state_of,
    wait_for_release,
    without_lowest,
)
from efla_jax.kernels.log_linear_pairs import AFTER, BLOCK, INSIDE, SINCE, SUM, TILE, f32
from efla_jax.kernels.mosaic import (
    SHARED_MEMORY,
    WGMMA,
    accumulated,
    begin,
    by_column,
    finish,
    left_operand,
    narrow_indices,
    on_grid,
    shared,
    staging,
    transposed,
)

FULL, LAST = 1, 2  # of a block's flags: its state is written; it is its document's last and not the row's
LANES = 128  # blocks of a row of `flow`


@dataclasses.dataclass(frozen=True)
class Walk:
    """Sizes of a call: B, blocks and how many of them are whole, columns of all values, K, the columns of K of a
    program, heads, heads that read a key head, slots, and loads ahead."""

    batch: int
    blocks: int
    whole: int
    values: int
    key_dim: int
    width: int
    heads: int
    group: int
    slots: int
    stages: int
    continued: bool

    @property
    def parts(self) -> int:
        return self.key_dim // self.width

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.batch, self.values // TILE, self.parts

    @property
    def held(self) -> int:
        """States on the stack: the slots, and what a first block that was begun before has of it."""
        return self.slots + self.continued

    @classmethod
    def of(cls, k, u, slots: int, whole: int, continued: bool, config: Config, *, beside: int, stage: int) -> "Walk":
        """As wide as fits, and then as many loads ahead. beside and stage: bytes per column of K, and per load."""
        batch, time, key_heads, key_dim = k.shape
        heads, value_dim = u.shape[2:]
        sizes = cls(
            batch, time // BLOCK, whole, heads * value_dim, key_dim, 64, heads, heads // key_heads, slots, 1, continued
        )
        for width, stages in [(64, n) for n in range(config.walk_stages, 0, -1)] + [(32, config.walk_stages), (32, 1)]:
            used = width * (4 * TILE * sizes.held + beside + 2 * BLOCK * stages) + stages * stage + 4096
            if used + 4 * -(-sizes.blocks // LANES) * LANES <= SHARED_MEMORY:
                return dataclasses.replace(sizes, width=width, stages=stages)
        raise NotImplementedError(f"no room for {slots} states of a head's tile; use implementation='chunked'.")


class Place(NamedTuple):
    """A program: row of the batch, tile of the values, part of K."""

    row: Any
    tile: Any
    part: Any
    sizes: Walk

    @classmethod
    def here(cls, sizes: Walk) -> "Place":
        row, tile, part = (lax.axis_index(name) for name in ("row", "tile", "part"))
        return cls(row, tile, part, sizes)

    @property
    def lanes(self):
        return pl.ds(self.tile * TILE, TILE)

    @property
    def head(self):
        return lax.div(self.tile * TILE, self.sizes.values // self.sizes.heads)

    @property
    def channels(self):
        """Of q and k, all key heads' side by side."""
        first = lax.div(self.head, self.sizes.group) * self.sizes.key_dim
        return pl.ds(first + self.part * self.sizes.width, self.sizes.width)

    @property
    def keys(self):
        """Of a state."""
        return pl.ds(self.part * self.sizes.width, self.sizes.width)

    def gates(self, block):
        return block * self.sizes.heads + self.head

    def number(self, flow, block) -> Any:
        return number_of(block, self.sizes.slots) if flow is None else entry(flow, block) >> 2

    def full(self, flow, block) -> Any:
        return block < self.sizes.whole if flow is None else (entry(flow, block) & FULL) != 0


def entry(flow, block):
    return flow[lax.div(block, LANES), lax.rem(block, LANES)]


def time_of(block):
    return pl.ds(block * BLOCK, BLOCK)


def trailing_ones(number):
    return lowest_level(~number)


def multiply(left, right, buffer, interpret, total=None) -> jax.Array:
    """total + left right [64, width] float32, the left operand in registers."""

    def inside(acc):
        if total is not None:
            begin(acc, total, interpret)
        plgpu.wgmma(acc, left_operand(left, buffer), right)
        return accumulated(acc, wait_n=0) if total is None else finish(acc, total, interpret)

    return pl.run_scoped(inside, plgpu.ACC((TILE, right.shape[1]), f32))


def loaded(tile) -> jax.Array:
    return plgpu.load(tile, layout=WGMMA, optimized=False)


def copy_out(value, buffer, target) -> None:
    """By way of shared memory, once what was there has left."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    buffer[...] = value.astype(buffer.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target)


# ---- forward --------------------------------------------------------------------------------------------------------


class Writes(NamedTuple):
    """In global memory: k, u, channels flat; gates, whose fade has f_j and then the decay of the first block; flow [B,
    N / 128, 128] int32: 4 times the number plus flags; begin [B, slots + 1, H V, K] float32: the slots before the row
    and what its first block has already; the last two may be None."""

    k: Any
    u: Any
    gates: Gates
    flow: Any = None
    begin: Any = None


class WriteMemory(NamedTuple):
    """Shared memory of `walk`: by stage k, u, fade and barriers; the stack; a state on its way out; or None: flow and
    its barrier, the barrier of what the stack begins with."""

    k: Any
    u: Any
    fade: Any
    full: Any
    empty: Any
    stack: Any
    out: Any
    flow: Any = None
    known: Any = None
    begun: Any = None


def load_writes(place: Place, x: Writes, memory: WriteMemory) -> None:
    stages = place.sizes.stages

    def block(c, count):
        whole = place.full(memory.flow, c)

        @pl.when(whole)
        def _():
            wait_for_release(memory.empty, count, stages)
            slot = lax.rem(count, stages)
            barrier = memory.full.at[slot]
            plgpu.copy_gmem_to_smem(x.k.at[place.row, time_of(c), place.channels], memory.k.at[slot], barrier)
            plgpu.copy_gmem_to_smem(x.u.at[place.row, time_of(c), place.lanes], memory.u.at[slot], barrier)
            after = x.gates.vectors.at[place.row, place.gates(c), AFTER]
            plgpu.copy_gmem_to_smem(after, memory.fade.at[slot, 0], barrier)
            plgpu.copy_gmem_to_smem(x.gates.fade.at[place.row, place.gates(c)], memory.fade.at[slot, 1], barrier)

        return count + whole.astype(jnp.int32)

    count = lax.fori_loop(0, blocks_of(place, memory.flow), block, jnp.int32(0))
    drain(memory.empty, count, stages)


def blocks_of(place: Place, flow) -> int:
    """Blocks to go through: without documents the whole ones."""
    return place.sizes.whole if flow is None else place.sizes.blocks


def begin_stack(place: Place, slots, stack, begun) -> None:
    """Load what a walk begins with."""
    for j in range(slots.shape[1]):
        plgpu.copy_gmem_to_smem(slots.at[place.row, j, place.lanes, place.keys], stack.at[j], begun)
    plgpu.barrier_wait(begun)


def end_stack(place: Place, stack, out) -> None:
    """Write out as many slots as `out` has."""
    plgpu.commit_smem()
    for j in range(out.shape[1]):
        plgpu.copy_smem_to_gmem(stack.at[j], out.at[place.row, j, place.lanes, place.keys])


def walk_blocks(place: Place, memory: WriteMemory, states, left, interpret) -> None:
    """The computing warpgroup of `walk`."""
    sizes, stack, flow = place.sizes, memory.stack, memory.flow

    def block(c, count):
        whole = place.full(flow, c)

        @pl.when(whole)
        def _():
            slot, number = lax.rem(count, sizes.stages), place.number(flow, c)
            plgpu.barrier_wait(memory.full.at[slot])
            fading = transposed(memory.u.at[slot]).astype(f32) * by_column(memory.fade.at[slot, 0], TILE)
            state = multiply(fading.astype(states.dtype), memory.k.at[slot], left, interpret)
            if sizes.continued:
                begun = jnp.where(c == 0, memory.fade[slot, 1, sizes.slots], 0.0)
                state = state + begun * loaded(stack.at[sizes.slots])
            ones = trailing_ones(number)

            def carry(j, state):
                return state + memory.fade[slot, 1, j] * loaded(stack.at[j])

            state = lax.fori_loop(0, ones, carry, state)
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.empty.at[slot])
            stack.at[lax.min(ones, sizes.slots - 1)][...] = state

            @pl.when(c + 1 < sizes.blocks)
            def _():
                copy_out(state, memory.out, states.at[place.row, c + 1, place.lanes, place.keys])

        return count + whole.astype(jnp.int32)

    lax.fori_loop(0, blocks_of(place, flow), block, jnp.int32(0))


def walk(k, u, gates: Gates, flow, begin_with, *, slots: int, whole: int, config: Config, interpret=None) -> tuple:
    """(states [B, N, H V, K] in the dtype of u, the last slots [B, slots, H V, K] float32); with anything in the states
    that no block reads, and in slots that are not live.

    k [B, T, G, K], u [B, T, H, V] of one 16-bit dtype, T a multiple of 128; flow and begin_with as in `Writes`;
    whole: how many blocks are, without flow."""
    dtype, continued = u.dtype, begin_with is not None
    sizes = Walk.of(k, u, slots, whole, continued, config, beside=2 * TILE, stage=2 * BLOCK * TILE + 8 * BLOCK)
    x = Writes(flat(k), flat(u), gates, flow, begin_with)
    memory = WriteMemory(
        k=shared(sizes.stages, BLOCK, sizes.width, dtype=dtype),
        u=shared(sizes.stages, BLOCK, TILE, dtype=dtype),
        fade=plgpu.SMEM((sizes.stages, 2, BLOCK), f32),
        full=plgpu.Barrier(num_arrivals=4, num_barriers=sizes.stages),
        empty=plgpu.Barrier(num_arrivals=1, num_barriers=sizes.stages),
        stack=shared(sizes.held, TILE, sizes.width, dtype=f32),
        out=shared(TILE, sizes.width, dtype=dtype),
        flow=None if flow is None else plgpu.SMEM(flow.shape[1:], jnp.int32),
        known=None if flow is None else plgpu.Barrier(num_arrivals=1),
        begun=plgpu.Barrier(num_arrivals=slots + 1) if continued else None,
    )

    def compute(place, x, memory, results, scratch):
        walk_blocks(place, memory, results[0], scratch[0] if scratch else None, interpret)
        end_stack(place, memory.stack, results[1])

    shape = jax.ShapeDtypeStruct
    out = [
        shape((sizes.batch, sizes.blocks, sizes.values, sizes.key_dim), dtype),
        shape((sizes.batch, slots, sizes.values, sizes.key_dim), f32),
    ]
    left = staging([(TILE, BLOCK)], dtype, interpret, 1)
    return tuple(launch("log_linear_walk", compute, load_writes, x, out, memory, left, sizes, config, interpret))


@narrow_indices()
def launch(name: str, compute, load, x, out, memory, scratch: list, sizes: Walk, config, interpret):
    """Run a program on the grid: compute(place, x, memory, results, scratch) by one warpgroup, `load` by the other."""

    def body(x, own, results, scratch):
        place, group = Place.here(sizes), lax.axis_index("group")

        @pl.when(group == 1)
        def _():
            if own.flow is not None:
                plgpu.copy_gmem_to_smem(x.flow.at[place.row], own.flow, own.known)
                plgpu.barrier_wait(own.known)
            load(place, x, own)

        @pl.when(group == 0)
        def _():
            if own.flow is not None:
                plgpu.barrier_wait(own.known)
            if own.begun is not None:
                begin_stack(place, x.begin, own.stack, own.begun)
            compute(place, x, own, results, [ref.at[0] for ref in scratch])
            plgpu.wait_smem_to_gmem(0)

    grid = dict(zip(("row", "tile", "part"), sizes.grid, strict=True))
    return on_grid(name, body, x, out, memory, scratch, grid, 2, config.automatic_barriers, interpret)


# ---- backward -------------------------------------------------------------------------------------------------------


class Reads(NamedTuple):
    """In global memory: q, d_o, channels flat; gates as forward; states and first in 16
    bits, as `log_linear.Inputs` has them; begin [B, slots, H V, K] float32: the cotangents of the last slots; flow."""

    q: Any
    d_o: Any
    gates: Gates
    states: Any
    begin: Any
    flow: Any = None
    first: Any = None


class ReadMemory(NamedTuple):
    """Shared memory of `adjoint`: by stage q, dO, weights and then coefficients of states
    [slots, 128], a row of fade and one of sums [2, 128] and barriers; a ring of states and
    barriers; the stack of D; E and a sum on their way out; the barrier of what the stack begins with; flow and its
    barrier or None."""

    q: Any
    d_o: Any
    coefficients: Any
    fade: Any
    full: Any
    empty: Any
    states: Any
    state_full: Any
    state_empty: Any
    stack: Any
    out: Any
    sums: Any
    begun: Any
    flow: Any = None
    known: Any = None


RING = 2  # states loaded ahead


def load_reads(place: Place, x: Reads, memory: ReadMemory) -> None:
    sizes, total = place.sizes, place.sizes.blocks

    def block(i, counts):
        c, (count, merged) = total - 1 - i, counts
        number, whole = place.number(memory.flow, c), place.full(memory.flow, c)
        active, ones = whole | (number > 0), jnp.where(whole, trailing_ones(number), 0)

        @pl.when(active)
        def _():
            wait_for_release(memory.empty, count, sizes.stages)
            slot = lax.rem(count, sizes.stages)
            barrier = memory.full.at[slot]
            plgpu.copy_gmem_to_smem(x.q.at[place.row, time_of(c), place.channels], memory.q.at[slot], barrier)
            plgpu.copy_gmem_to_smem(x.d_o.at[place.row, time_of(c), place.lanes], memory.d_o.at[slot], barrier)
            rows = x.gates.levels.at[place.row, place.gates(c), pl.ds(INSIDE, sizes.slots)]
            plgpu.copy_gmem_to_smem(rows, memory.coefficients.at[slot], barrier)
            plgpu.copy_gmem_to_smem(x.gates.fade.at[place.row, place.gates(c)], memory.fade.at[slot, 0], barrier)
            sums = x.gates.vectors.at[place.row, place.gates(c), SUM]
            plgpu.copy_gmem_to_smem(sums, memory.fade.at[slot, 1], barrier)

        def state(j, _):
            wait_for_release(memory.state_empty, merged + j, RING)
            where = lax.rem(merged + j, RING)
            target, barrier, which = memory.states.at[where], memory.state_full.at[where], state_of(c, number, j)
            if x.first is None:
                plgpu.copy_gmem_to_smem(x.states.at[place.row, which, place.lanes, place.keys], target, barrier)
                return

            @pl.when(which > 0)
            def _():
                plgpu.copy_gmem_to_smem(x.states.at[place.row, which, place.lanes, place.keys], target, barrier)

            @pl.when(which <= 0)
            def _():
                plgpu.copy_gmem_to_smem(x.first.at[place.row, j, place.lanes, place.keys], target, barrier)

        lax.fori_loop(0, ones, state, None)
        return count + active.astype(jnp.int32), merged + ones

    count, merged = lax.fori_loop(0, total, block, (jnp.int32(0), jnp.int32(0)))
    drain(memory.empty, count, sizes.stages)
    drain(memory.state_empty, merged, RING)


def adjoint_blocks(place: Place, x: Reads, memory: ReadMemory, results, left, interpret) -> None:
    """The computing warpgroup of `adjoint`."""
    (spread, sums_g), sizes, stack = results[:2], place.sizes, memory.stack
    total = sizes.blocks
    zero = plgpu.layout_cast(jnp.zeros((TILE, sizes.width), f32), WGMMA)
    if sizes.continued:
        stack.at[sizes.slots][...] = zero

    def block(i, counts):
        c, (count, merged) = total - 1 - i, counts
        number, whole, slot = place.number(memory.flow, c), place.full(memory.flow, c), lax.rem(count, sizes.stages)
        active: Any = whole | (number > 0)
        ones: Any = jnp.where(whole, trailing_ones(number), 0)
        target = spread.at[place.row, c, place.lanes, place.keys]
        if memory.flow is not None:

            @pl.when((entry(memory.flow, c) & LAST) != 0)
            def forget():
                for j in range(sizes.slots):
                    stack.at[j][...] = zero

        @pl.when(active)
        def _():
            plgpu.barrier_wait(memory.full.at[slot])

        @pl.when(whole)
        def _():
            cotangent = loaded(stack.at[lax.min(ones, sizes.slots - 1)])
            copy_out(cotangent, memory.out, target)
            if sizes.continued:

                @pl.when(c == 0)
                def _():
                    stack.at[sizes.slots][...] = cotangent

            def unmerge(j, _):
                where, which = lax.rem(merged + j, RING), state_of(c, number, j)
                plgpu.barrier_wait(memory.state_full.at[where])
                parts = jnp.sum(loaded(memory.states.at[where]).astype(f32) * cotangent, axis=1)
                plgpu.commit_smem()
                plgpu.barrier_arrive(memory.state_empty.at[where])
                which = jnp.where(which > 0, which, total + j)
                copy_out(parts, memory.sums, sums_g.at[place.row, which, place.tile * sizes.parts + place.part])
                stack.at[j][...] = memory.fade[slot, 0, j] * cotangent

            lax.fori_loop(0, ones, unmerge, None)

        @pl.when(jnp.logical_not(whole) & (number >= 0))
        def _():
            copy_out(zero, memory.out, target)

        @pl.when(active)
        def _():
            add_reads(place, memory, slot, number, left, interpret)
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.empty.at[slot])

        return count + active.astype(jnp.int32), merged + ones

    lax.fori_loop(0, total, block, (jnp.int32(0), jnp.int32(0)))


def add_reads(place: Place, memory: ReadMemory, slot, number, left, interpret) -> None:
    """What the tokens of a block read, into the stack."""
    fade, by_thread = memory.fade.at[slot], plgpu.Layout.WG_STRIDED((BLOCK,), vec_size=1)
    sums = plgpu.load(fade.at[1], layout=by_thread)

    def coefficient(_, left_of):
        level = lowest_level(left_of)
        row = memory.coefficients.at[slot, level]
        row[...] = plgpu.load(row, layout=by_thread) * jnp.exp2(sums + fade[0, SINCE + level])
        return without_lowest(left_of)

    d_o = transposed(memory.d_o.at[slot])
    live = sum(((number >> j) & 1 for j in range(place.sizes.slots)), jnp.int32(0))

    def read(_, left_of):
        level = lowest_level(left_of)
        scaled = d_o.astype(f32) * by_column(memory.coefficients.at[slot, level], TILE)
        there = memory.stack.at[level]
        there[...] = multiply(scaled.astype(d_o.dtype), memory.q.at[slot], left, interpret, total=loaded(there))
        return without_lowest(left_of)

    lax.fori_loop(0, live, coefficient, number)
    plgpu.commit_smem()
    lax.fori_loop(0, live, read, number)


def adjoint(q, d_o, gates: Gates, states, first, d_last, flow, *, whole: int, config: Config, interpret=None) -> tuple:
    """(E [B, N, H V, K] in the dtype of d_o, zero of blocks that are not whole and anything of empty ones; sums [B, N +
    slots, H] float32: <S, E> by the state that merged, of an initial slot j at N + j, with anything where none did;
    cotangents of `Writes.begin` [B, slots + 1, H V, K] float32, or None).

    d_o like u, d_last [B, slots, H V, K] float32; the rest as forward."""
    dtype, slots, continued = d_o.dtype, d_last.shape[1], first is not None
    stage = 2 * BLOCK * TILE + 4 * BLOCK * (slots + 2)
    sizes = Walk.of(q, d_o, slots, whole, continued, config, beside=2 * TILE * (1 + RING), stage=stage)
    x = Reads(flat(q), flat(d_o), gates, states, d_last, flow, first)
    memory = ReadMemory(
        q=shared(sizes.stages, BLOCK, sizes.width, dtype=dtype),
        d_o=shared(sizes.stages, BLOCK, TILE, dtype=dtype),
        coefficients=plgpu.SMEM((sizes.stages, slots, BLOCK), f32),
        fade=plgpu.SMEM((sizes.stages, 2, BLOCK), f32),
        full=plgpu.Barrier(num_arrivals=5, num_barriers=sizes.stages),
        empty=plgpu.Barrier(num_arrivals=1, num_barriers=sizes.stages),
        states=shared(RING, TILE, sizes.width, dtype=dtype),
        state_full=plgpu.Barrier(num_arrivals=1, num_barriers=RING),
        state_empty=plgpu.Barrier(num_arrivals=1, num_barriers=RING),
        stack=shared(sizes.held, TILE, sizes.width, dtype=f32),
        out=shared(TILE, sizes.width, dtype=dtype),
        sums=plgpu.SMEM((TILE,), f32),
        begun=plgpu.Barrier(num_arrivals=slots),
        flow=None if flow is None else plgpu.SMEM(flow.shape[1:], jnp.int32),
        known=None if flow is None else plgpu.Barrier(num_arrivals=1),
    )

    def compute(place, x, memory, results, scratch):
        adjoint_blocks(place, x, memory, results, scratch[0] if scratch else None, interpret)
        if continued:
            end_stack(place, memory.stack, results[2])

    shape, tiles = jax.ShapeDtypeStruct, sizes.values // TILE * sizes.parts
    out = [
        shape((sizes.batch, sizes.blocks, sizes.values, sizes.key_dim), dtype),
        shape((sizes.batch, sizes.blocks + slots, tiles, TILE), f32),
    ]
    if continued:
        out.append(shape((sizes.batch, slots + 1, sizes.values, sizes.key_dim), f32))
    left = staging([(TILE, BLOCK)], dtype, interpret, 1)
    spread, sums, *begin_ = launch(
        "log_linear_adjoint", compute, load_reads, x, out, memory, left, sizes, config, interpret
    )
    sums = sums.reshape(sizes.batch, sizes.blocks + slots, sizes.heads, -1).sum(3)
    return spread, sums, begin_[0] if continued else None
