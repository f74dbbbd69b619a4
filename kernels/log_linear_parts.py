"""The states of log-linear linear attention's blocks where a row is one document: parts of the time at once; and what
the programs for their cotangents share with these, in `log_linear_roots.py` and `log_linear_adjoint.py`.

State s ends before block s (see `log_linear_states.py`, whose `walk` goes through a row's blocks one by one and serves
all rows). A part is 2^near blocks, and a root the state that ends with a part. Two programs:

    parts    the states inside the parts, none of which reaches beyond its own, and what each part adds to its root.
             Blocks and levels of a part are unrolled, so that the states of its levels stay in registers
    carry    the roots from these sums by binary carry over the parts

Channels are flat as in `log_linear.py`; a tile is 64 columns of V, and states are [V, K].
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.log_linear import (
    COMPUTE_REGISTERS,
    LOADER_REGISTERS,
    Config,
    Gates,
    drain,
    flat,
    number_of,
    wait_for_release,
)
from efla_jax.kernels.log_linear_pairs import AFTER, BLOCK, TILE, f32
from efla_jax.kernels.log_linear_states import copy_out, loaded, multiply, time_of, trailing_ones
from efla_jax.kernels.mosaic import WGMMA, by_column, narrow_indices, on_grid, shared, staging, transposed

SPAN = 32  # blocks of a sum of `Parts.reads`
HALVES = 2  # of K, of a warpgroup each
WIDTH = 32  # columns of K of a program that goes through the roots
STAGES = 2  # blocks loaded ahead, of one part after the other
SUMS = 4  # sums of parts loaded ahead


@dataclasses.dataclass(frozen=True)
class Parts:
    """Sizes of a call: B, blocks and how many of them are whole, columns of all values, K, heads, heads that read a key
    head, slots, and levels of the states inside a part."""

    batch: int
    blocks: int
    whole: int
    values: int
    key_dim: int
    heads: int
    group: int
    slots: int
    near: int

    @property
    def size(self) -> int:
        """Blocks of a part."""
        return 1 << self.near

    @property
    def roots(self) -> int:
        return self.whole >> self.near

    @property
    def count(self) -> int:
        return -(-self.blocks // self.size)

    @property
    def ragged(self) -> bool:
        """Whether the last part has no root."""
        return self.count > self.roots

    @property
    def upper(self) -> int:
        """Levels of the roots."""
        return self.slots - self.near

    @property
    def tiles(self) -> int:
        return self.values // TILE

    @property
    def shared_by(self) -> tuple[int, int]:
        """Warpgroups of a program that share a key head, and tiles of each."""
        per_key = self.tiles // (self.heads // self.group)
        return 2 - per_key % 2, 1 + (per_key % 4 == 0)

    def head(self, tile):
        return lax.div(tile, self.tiles // self.heads)

    def lanes(self, tile):
        return pl.ds(tile * TILE, TILE)

    def channels(self, tile):
        """Of q, all key heads' side by side."""
        return lax.div(self.head(tile), self.group) * self.key_dim

    def gates(self, block, tile):
        return block * self.heads + self.head(tile)

    def level(self, root: int) -> int:
        """Of a root, among the roots' levels."""
        return min((root & -root).bit_length(), self.upper) - 1

    @functools.cached_property
    def reads(self) -> np.ndarray:
        """[programs, 4] int32 of `far`, those about the same time side by side: slot, first block, blocks, and which of
        the sums, which are in the order of the roots."""
        found = []
        for root in range(1, self.roots + 1):
            slot, first = self.near + self.level(root), root << self.near
            last = min(first + (1 << slot), self.blocks)
            found += [(slot, at, min(SPAN, last - at)) for at in range(first, last, SPAN)]
        rows = [(*row, i) for i, row in enumerate(found)]
        rows = sorted(rows, key=lambda row: (row[1] // SPAN, -row[2]))
        return np.array(rows or [(self.near, 0, 0, 0)], np.int32)

    @functools.cached_property
    def merges(self) -> np.ndarray:
        """[roots, 4] int32: level, level of what it merges into or -1, first of its sums and how many."""
        rows, first = [], 0
        for root in range(1, self.roots + 1):
            level, begins = self.level(root), root << self.near
            blocks = min(1 << (level + self.near), self.blocks - begins)
            count, into = -(-blocks // SPAN), root + (1 << level)
            rows.append((level, self.level(into) if into <= self.roots else -1, first, count))
            first += count
        return np.array(rows, np.int32)


def parts_of(q, d_o, slots: int, whole: int, config: Config) -> Parts | None:
    """Sizes of a call, or None where it has no two parts or too few levels."""
    batch, time, key_heads, key_dim = q.shape
    heads, value_dim = d_o.shape[2:]
    values, group = heads * value_dim, heads // key_heads
    sizes = Parts(batch, time // BLOCK, whole, values, key_dim, heads, group, slots, config.near)
    return sizes if config.near > 0 and sizes.upper > 0 and sizes.roots > 0 and sizes.count > 1 else None


@narrow_indices()
def launch(name: str, compute, load, x, out, memory, scratch, grid: dict, groups: int, config, interpret):
    """Run a program on the named grid: compute(x, memory, results, scratch) by so many warpgroups, load(x, memory) by
    one more."""

    def body(x, own, results, scratch):
        group = lax.axis_index("group")

        @pl.when(group == groups)
        def _():
            if groups > 1:
                plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            load(x, own)

        @pl.when(group < groups)
        def _():
            if groups > 1:
                plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            compute(x, own, results, [ref.at[lax.rem(group, groups)] for ref in scratch])
            plgpu.wait_smem_to_gmem(0)

    return on_grid(name, body, x, out, memory, scratch, grid, groups + 1, config.automatic_barriers, interpret)


class Item(NamedTuple):
    """One of the parts of a program: row of the batch, part, tile."""

    row: Any
    part: Any
    tile: Any

    @classmethod
    def of(cls, number, sizes: Parts) -> "Item":
        others = lax.div(number, sizes.tiles)
        return cls(lax.div(others, sizes.count), lax.rem(others, sizes.count), lax.rem(number, sizes.tiles))


def ones_of(place: int) -> int:
    """Trailing ones: how many states merge at the end of a part's block."""
    return (~place & (place + 1)).bit_length() - 1


def items_of(sizes: Parts, programs: int):
    """How many parts this program has, and which the nth of them is."""
    program, total = lax.axis_index("program"), sizes.batch * sizes.count * sizes.tiles
    return lax.div(total - 1 - program, programs) + 1, lambda n: Item.of(program + n * programs, sizes)


def copy_halves(source, row_and_lanes: tuple, first, target, barrier) -> None:
    """Load the channels of K from `first` on as [2, ..., K / 2]."""
    half = target.shape[-1]
    for i in range(HALVES):
        plgpu.copy_gmem_to_smem(source.at[(*row_and_lanes, pl.ds(first + i * half, half))], target.at[i], barrier)


class RootPlace(NamedTuple):
    """A program: row of the batch, tile, part of K, and their columns and channels."""

    row: Any
    tile: Any
    part: Any
    lanes: Any
    keys: Any

    @classmethod
    def here(cls, sizes: Parts) -> "RootPlace":
        row, tile, part = (lax.axis_index(name) for name in ("row", "tile", "part"))
        return cls(row, tile, part, sizes.lanes(tile), pl.ds(part * WIDTH, WIDTH))


# ---- parts ----------------------------------------------------------------------------------------------------------


class PartWrites(NamedTuple):
    """In global memory: k, u, channels flat; gates."""

    k: Any
    u: Any
    gates: Gates


class PartMemory(NamedTuple):
    """Shared memory, by stage: k [2, 128, K / 2], u, decays after a token and fade [2, 128]; barriers of loads and of
    their release."""

    k: Any
    u: Any
    fade: Any
    full: Any
    empty: Any


def load_parts(x: PartWrites, memory: PartMemory, sizes: Parts, programs: int) -> None:
    count, item_of = items_of(sizes, programs)

    def block(number, _):
        row, part, tile = item_of(lax.div(number, sizes.size))
        c = lax.min(part * sizes.size + lax.rem(number, sizes.size), sizes.blocks - 1)
        wait_for_release(memory.empty, number, STAGES)
        stage, which = lax.rem(number, STAGES), sizes.gates(c, tile)
        barrier, fade = memory.full.at[stage], memory.fade.at[stage]
        copy_halves(x.k, (row, time_of(c)), sizes.channels(tile), memory.k.at[stage], barrier)
        plgpu.copy_gmem_to_smem(x.u.at[row, time_of(c), sizes.lanes(tile)], memory.u.at[stage], barrier)
        plgpu.copy_gmem_to_smem(x.gates.vectors.at[row, which, AFTER], fade.at[0], barrier)
        plgpu.copy_gmem_to_smem(x.gates.fade.at[row, which], fade.at[1], barrier)

    lax.fori_loop(0, count * sizes.size, block, None)
    drain(memory.empty, count * sizes.size, STAGES)


def write_part(n, item: Item, memory: PartMemory, results, out, left, sizes: Parts, interpret) -> None:
    """A computing warpgroup of `parts`, of one part."""
    (states, sums, *open_states), (row, part, tile), half = results, item, lax.axis_index("group")
    width = memory.k.shape[-1]
    keys, lanes = pl.ds(half * width, width), sizes.lanes(tile)
    levels: list = [plgpu.layout_cast(jnp.zeros((TILE, width), f32), WGMMA)] * sizes.near
    for i in range(sizes.size):
        stage, c, ones = lax.rem(n * sizes.size + i, STAGES), part * sizes.size + i, ones_of(i)
        plgpu.barrier_wait(memory.full.at[stage])
        fading = transposed(memory.u.at[stage]).astype(f32) * by_column(memory.fade.at[stage, 0], TILE)
        merging = [memory.fade[stage, 1, j] * levels[j] for j in range(ones)]
        carried = sum(merging[1:], merging[0]) if merging else None
        keys_of_block = memory.k.at[stage, half]
        state = multiply(fading.astype(states.dtype), keys_of_block, left, interpret, total=carried)
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.empty.at[stage])
        whole = c < sizes.whole
        if ones == sizes.near:

            @pl.when(whole)
            def _(state=state):
                sums[row, part, lanes, keys] = state

            continue
        levels[ones] = jnp.where(whole, state, levels[ones]) if sizes.ragged else state

        @pl.when(whole & (c + 1 < sizes.blocks))
        def _(state=state, c=c):
            copy_out(state, out, states.at[row, c + 1, lanes, keys])

    if sizes.ragged:

        @pl.when(part == sizes.roots)
        def _():
            for j in range(sizes.near):
                open_states[0][row, j, lanes, keys] = levels[j]


def states_in_parts(k, u, gates: Gates, sizes: Parts, config: Config, interpret) -> list:
    """States [B, N, H V, K] in the dtype of u, with anything in that of block 0, in roots and behind the row; what
    parts add to their roots [B, roots, H V, K] float32; and, if a part has no root, the last slots inside of it [B,
    near, H V, K] float32, with anything in those that are not live."""
    dtype, half, near = u.dtype, sizes.key_dim // HALVES, sizes.near
    programs = min(config.multiprocessors, sizes.batch * sizes.count * sizes.tiles)
    memory = PartMemory(
        k=shared(STAGES, HALVES, BLOCK, half, dtype=dtype),
        u=shared(STAGES, BLOCK, TILE, dtype=dtype),
        fade=plgpu.SMEM((STAGES, 2, BLOCK), f32),
        full=plgpu.Barrier(num_arrivals=HALVES + 3, num_barriers=STAGES),
        empty=plgpu.Barrier(num_arrivals=HALVES, num_barriers=STAGES),
    )

    def compute(x: PartWrites, memory: PartMemory, results, scratch):
        (out, left), (count, item_of) = (*scratch, None)[:2], items_of(sizes, programs)

        def item(n, _):
            write_part(n, item_of(n), memory, results, out, left, sizes, interpret)

        lax.fori_loop(0, count, item, None)

    def load(x: PartWrites, memory: PartMemory):
        load_parts(x, memory, sizes, programs)

    def shape(count: int, dtype):
        return jax.ShapeDtypeStruct((sizes.batch, count, sizes.values, sizes.key_dim), dtype)

    out = [shape(sizes.blocks, dtype), shape(sizes.roots, f32), *[shape(near, f32)] * sizes.ragged]
    scratch = [shared(HALVES, TILE, half, dtype=dtype), *staging([(TILE, BLOCK)], dtype, interpret, HALVES)]
    x, grid = PartWrites(flat(k), flat(u), gates), dict(program=programs)
    return launch("log_linear_parts", compute, load, x, out, memory, scratch, grid, HALVES, config, interpret)


# ---- carry ----------------------------------------------------------------------------------------------------------


class CarryMemory(NamedTuple):
    """Shared memory: sums [ring, 64, 32] and rows of fade [ring, 128] with their barriers; the stack; a root on its way
    out."""

    sums: Any
    fade: Any
    full: Any
    empty: Any
    stack: Any
    out: Any


def load_sums(x: tuple, memory: CarryMemory, sizes: Parts) -> None:
    (sums, fade), (row, tile, _, lanes, keys) = x, RootPlace.here(sizes)

    def part(n, _):
        wait_for_release(memory.empty, n, SUMS)
        place, last = lax.rem(n, SUMS), ((n + 1) << sizes.near) - 1
        plgpu.copy_gmem_to_smem(sums.at[row, n, lanes, keys], memory.sums.at[place], memory.full.at[place])
        plgpu.copy_gmem_to_smem(fade.at[row, sizes.gates(last, tile)], memory.fade.at[place], memory.full.at[place])

    lax.fori_loop(0, sizes.roots, part, None)
    drain(memory.empty, sizes.roots, SUMS)


def carry_roots(memory: CarryMemory, roots, last, sizes: Parts) -> None:
    """The computing warpgroup of `carry`."""
    row, _, _, lanes, keys = RootPlace.here(sizes)

    def part(n, _):
        place, ones = lax.rem(n, SUMS), trailing_ones(number_of(n, sizes.upper))
        plgpu.barrier_wait(memory.full.at[place])

        def carry(j, state):
            return state + memory.fade[place, sizes.near + j] * loaded(memory.stack.at[j])

        state = lax.fori_loop(0, ones, carry, loaded(memory.sums.at[place]))
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.empty.at[place])
        memory.stack.at[lax.min(ones, sizes.upper - 1)][...] = state
        copy_out(state, memory.out, roots.at[row, n, lanes, keys])

    lax.fori_loop(0, sizes.roots, part, None)
    plgpu.commit_smem()
    for j in range(sizes.upper):
        plgpu.copy_smem_to_gmem(memory.stack.at[j], last.at[row, j, lanes, keys])


def roots_of(sums, gates: Gates, dtype, sizes: Parts, config: Config, interpret) -> tuple:
    """(Roots [B, roots, H V, K] in this dtype, the last slots from `near` on [B, upper, H V, K] float32, with anything
    in those that are not live)."""
    memory = CarryMemory(
        sums=shared(SUMS, TILE, WIDTH, dtype=f32),
        fade=plgpu.SMEM((SUMS, BLOCK), f32),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=SUMS),
        empty=plgpu.Barrier(num_arrivals=1, num_barriers=SUMS),
        stack=shared(sizes.upper, TILE, WIDTH, dtype=f32),
        out=shared(TILE, WIDTH, dtype=dtype),
    )

    def compute(_x, memory: CarryMemory, results, _scratch):
        carry_roots(memory, results[0], results[1], sizes)

    shape = jax.ShapeDtypeStruct
    out = [
        shape((sizes.batch, sizes.roots, sizes.values, sizes.key_dim), dtype),
        shape((sizes.batch, sizes.upper, sizes.values, sizes.key_dim), f32),
    ]
    grid = dict(row=sizes.batch, tile=sizes.tiles, part=sizes.key_dim // WIDTH)
    x, load = (sums, gates.fade), functools.partial(load_sums, sizes=sizes)
    roots, last = launch("log_linear_carry", compute, load, x, out, memory, [], grid, 1, config, interpret)
    return roots, last


def states_of(k, u, gates: Gates, sizes: Parts, *, config: Config, interpret=None) -> tuple:
    """(states [B, N, H V, K], roots [B, roots, H V, K] in the dtype of u, the last slots [B, slots, H V, K] float32).

    State s is that of roots at s / 2^near - 1 where that is whole, else of states at s. With anything in those that no
    block reads and in slots that are not live. k [B, T, G, K], u [B, T, H, V] of one 16-bit dtype, T a multiple of 128.
    """
    states, sums, *low = states_in_parts(k, u, gates, sizes, config, interpret)
    roots, high = roots_of(sums, gates, u.dtype, sizes, config, interpret)
    low = low or [jnp.zeros((sizes.batch, sizes.near, *high.shape[2:]), f32)]
    return states, roots, jnp.concatenate([*low, high], axis=1)
