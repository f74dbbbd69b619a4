"""Log-linear linear attention on a Hopper GPU: the program that reads, and its configs, for `ops/pallas_log_linear.py`.

A block is 128 tokens. Within it all pairs are multiplied out; what is before it is read from the states of whole
blocks, one for each set bit of the block's number (a Fenwick tree over blocks):

    O = (R . w . Q K^T) U + sum over live j of c_j . Q S_j

R_ti = exp(G_t - G_i) for i <= t, G the running sum of the log decays in the block; w the query's weight of the pair's
level; c_j its weight of level 8 + j times the decay since the state's end; S_j [K, V] the sum of 2^j blocks. The states
come from `log_linear_states.py`, the vectors from XLA. Every block is then independent of the others, so the time is as
parallel as the heads, and a head's scores serve all the value heads and tiles that read them.

A program has a block of a key head and loops over the tiles of 64 columns of V that read it. Its two compute warpgroups
have 64 tokens each; a third one only issues loads. Channels are flat: u, o [B, T, H V], q, k [B, T, G K], states
[B, N, H V, K].

The number n of a block is its place in its document, its bits from `slots` - 1 on as one: states from there on share a
weight. State b is the one that ends before block b, of the level of the lowest set bit of b's number; the one of level
j that a block b reads is b - (n mod 2^j). Without documents n is b, and empty blocks, of number -1, do not exist.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.log_linear_pairs import (
    BLOCK,
    INSIDE,
    READS,
    ROWS,
    TILE,
    WEIGHTS,
    decays,
    f32,
    rows_of,
    since_state,
    vector,
    weights_of,
)
from efla_jax.kernels.mosaic import (
    SHARED_MEMORY,
    accumulated,
    begin,
    finish,
    left_operand,
    narrow_indices,
    on_grid,
    shared,
    staging,
    unsupported_keys,
    unsupported_values,
)

KEY_DIMS = (64, 128)
GROUPS = 2  # compute warpgroups
LOADER_REGISTERS, COMPUTE_REGISTERS = 24, 240  # per thread; all that there are for three warpgroups


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is cut for the GPU.

    stages: tiles loaded ahead; states: states loaded ahead; walk_stages: blocks loaded ahead by a walk.
    multiprocessors: of the GPU, each of which holds one program.
    waves: programs wanted for each of them; with fewer, several share the tiles of a key head.
    near: parts of `log_linear_adjoint.py` have 2^near blocks; with 0 cotangents of states go through whole rows.
    automatic_barriers: Mosaic's around every store to shared memory, which the program does not need."""

    stages: int = 2
    states: int = 3
    walk_stages: int = 3
    multiprocessors: int = 132
    waves: float = 4.0
    near: int = 3
    automatic_barriers: bool = True


# By device kind, K, V and dtype. Where a row lacks, SAFE serves: right on every Hopper GPU, tuned on none.
TABLE: dict[tuple[str, int, int, str], Config] = {
    ("NVIDIA H200", 128, 64, "bfloat16"): Config(),
    ("NVIDIA H200", 128, 128, "bfloat16"): Config(),
    ("NVIDIA H200", 64, 64, "bfloat16"): Config(),
}
SAFE = Config(states=2)


def config_for(device_kind: str, key_dim: int, value_dim: int, dtype) -> Config:
    """The table's row for these sizes on this device, or the safe one."""
    return TABLE.get((device_kind, key_dim, value_dim, jnp.dtype(dtype).name), SAFE)


def unsupported(key_dim: int, value_dim: int, dtype) -> str | None:
    """Why the program cannot serve these sizes, or None."""
    return unsupported_keys(key_dim, KEY_DIMS, dtype) or unsupported_values(value_dim)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a call: B, blocks, G, H, K, V, levels that have weights, `Config.near`, and how many programs share the
    tiles of a key head."""

    batch: int
    blocks: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    levels: int
    near: int
    slices: int = 1

    @property
    def slots(self) -> int:
        """States that a token may read."""
        return self.levels - INSIDE

    @property
    def rows(self) -> int:
        """Of the gates, where states are read."""
        return WEIGHTS + self.levels + 1

    @property
    def columns(self) -> int:
        """Tiles of all heads."""
        return self.heads * self.value_dim // TILE

    @property
    def tiles(self) -> int:
        """Tiles of a program."""
        return self.columns // (self.key_heads * self.slices)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.batch, self.blocks, self.key_heads * self.slices

    @classmethod
    def of(cls, k, u, gates: "Gates", config: Config) -> "Sizes":
        batch, time, key_heads, key_dim = k.shape
        heads, value_dim = u.shape[2:]
        sizes = cls(batch, time // BLOCK, key_heads, heads, key_dim, value_dim, gates.levels.shape[2], config.near)
        per_key, slices = sizes.tiles, 1
        programs = batch * sizes.blocks * key_heads
        while per_key % (2 * slices) == 0 and 2 * slices * programs <= config.waves * config.multiprocessors:
            slices *= 2
        return dataclasses.replace(sizes, slices=slices)


class Task(NamedTuple):
    """A program: row of the batch, block and its number, key head, which slice of its tiles, and how many it has."""

    row: Any
    block: Any
    number: Any
    key_head: Any
    share: Any
    tiles: Any
    sizes: Sizes

    @classmethod
    def here(cls, sizes: Sizes, numbers) -> "Task":
        row, block, pair = (lax.axis_index(name) for name in ("row", "block", "pair"))
        block = (
            sizes.blocks - 1 - block
        )  # those that read the most states are the last, and had better not be begun last
        number: Any = number_of(block, sizes.slots)
        tiles: Any = sizes.tiles
        if numbers is not None:
            number = numbers[row, block]
            tiles = jnp.where(number < 0, 0, tiles)
            number = lax.max(number, 0)
        return cls(row, block, number, lax.div(pair, sizes.slices), lax.rem(pair, sizes.slices), tiles, sizes)

    @property
    def time(self):
        return pl.ds(self.block * BLOCK, BLOCK)

    @property
    def channels(self):
        return pl.ds(self.key_head * self.sizes.key_dim, self.sizes.key_dim)

    def tile(self, i):
        return (self.key_head * self.sizes.slices + self.share) * self.sizes.tiles + i

    def lanes(self, i):
        return pl.ds(self.tile(i) * TILE, TILE)

    def gates(self, i):
        """Which of the gates [B, N H, ...] are a tile's."""
        return self.block * self.sizes.heads + lax.div(self.tile(i), self.sizes.value_dim // TILE)

    @property
    def live(self):
        """How many states the block reads: the set bits of its number."""
        return sum(((self.number >> j) & 1 for j in range(self.sizes.slots)), jnp.int32(0))


def number_of(place, slots: int):
    """The number of a block from its place in its document: the bits from `slots` - 1 on as one."""
    top = 1 << (slots - 1)
    return (place & (top - 1)) | jnp.where(place >= top, top, 0)


def lowest_level(number):
    """The place of the lowest set bit."""
    return 31 - lax.clz(number & -number)


def without_lowest(number):
    return number & (number - 1)


def state_of(block, number, level):
    """Which state of this level the block of this number reads; without a positive one it is of the initial ones."""
    return block - (number & ((1 << level) - 1))


class Memory(NamedTuple):
    """Shared memory: q, k [128, K]; values [stages, u or u and dO, 128, 64]; gates [stages, rows, 128]; barriers of q
    and k, of a stage's loads and of its release; codes [128] or None; spread [stages, 64, K] or None; states [ring, 64,
    K] and the barriers of their loads and of their release, or None."""

    q: Any
    k: Any
    values: Any
    gates: Any
    keys: Any
    full: Any
    empty: Any
    codes: Any = None
    spread: Any = None
    states: Any = None
    state_full: Any = None
    state_empty: Any = None


def memory_for(sizes: Sizes, config: Config, x: "Inputs", rows: int, *, beside: int) -> Memory:
    """`Memory` for these inputs and so many rows of the gates, beside so many bytes of other memory."""
    dtype, values = x.k.dtype, len(x.values)
    beside += 4 * BLOCK * sizes.key_dim + 2560  # 2560: barriers, codes, and what starts aligned
    state = 2 * TILE * sizes.key_dim
    tile = 2 * BLOCK * TILE * values + 4 * BLOCK * rows + (0 if x.spread is None else state)
    stages, ring = min(config.stages, sizes.tiles), 0 if x.states is None else config.states
    while beside + stages * tile + ring * state > SHARED_MEMORY and max(stages, ring) > 1:
        stages, ring = (stages, ring - 1) if ring > 2 or stages == 1 else (stages - 1, ring)
    return Memory(
        q=shared(BLOCK, sizes.key_dim, dtype=dtype),
        k=shared(BLOCK, sizes.key_dim, dtype=dtype),
        values=shared(stages, values, BLOCK, TILE, dtype=dtype),
        gates=plgpu.SMEM((stages, rows, BLOCK), f32),
        keys=plgpu.Barrier(num_arrivals=2 + (x.codes is not None)),
        full=plgpu.Barrier(num_arrivals=3 + values, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
        codes=None if x.codes is None else plgpu.SMEM((BLOCK,), jnp.int32),
        spread=None if x.spread is None else shared(stages, TILE, sizes.key_dim, dtype=dtype),
        states=shared(ring, TILE, sizes.key_dim, dtype=dtype) if ring else None,
        state_full=plgpu.Barrier(num_arrivals=1, num_barriers=ring) if ring else None,
        state_empty=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=ring) if ring else None,
    )


def wait_for_release(barriers, number, count: int) -> None:
    """Before load `number` into a ring of `count`."""

    @pl.when(number >= count)
    def _():
        plgpu.barrier_wait(barriers.at[lax.rem(number, count)])


def drain(barriers, total, count: int) -> None:
    """Wait until everything loaded has been used: a barrier may not end with a phase that nobody waited for."""

    def released(i, _):
        plgpu.barrier_wait(barriers.at[lax.rem(i, count)])

    lax.fori_loop(lax.max(total - count, 0), total, released, None)


class Gates(NamedTuple):
    """Float32, in global memory: vectors [B, N H, 2, 128]: G / ln 2 and the decay after each token; levels [B, N H, 8 +
    slots, 128]: the weights; fade [B, N H, 128]: decays of states, see `log_linear_states.Writes`, and from SINCE on
    the log2 of those from each slot's end to the block."""

    vectors: Any
    levels: Any
    fade: Any


class Inputs(NamedTuple):
    """In global memory, channels flat: q, k; u, or u and dO; gates; or None: states [B, N, H V, K] and the initial ones
    [B, slots, H V, K], cotangents of what blocks write [B, N, H V, K], numbers [B, N], and codes [B, N, 128] int32 of
    the tokens: 128 times which document of the block it is, plus its place modulo 128; roots [B, roots, H V, K]: the
    states of whole parts (see `log_linear_parts.py`)."""

    q: Any
    k: Any
    values: tuple
    gates: Gates
    states: Any = None
    first: Any = None
    spread: Any = None
    numbers: Any = None
    codes: Any = None
    roots: Any = None


def load(task: Task, x: Inputs, memory: Memory) -> None:
    """The loading warpgroup: q and k once, then tile after tile, and for each the states that the block reads."""
    stages = memory.values.shape[0]
    plgpu.copy_gmem_to_smem(x.q.at[task.row, task.time, task.channels], memory.q, memory.keys)
    plgpu.copy_gmem_to_smem(x.k.at[task.row, task.time, task.channels], memory.k, memory.keys)
    if x.codes is not None:
        plgpu.copy_gmem_to_smem(x.codes.at[task.row, task.block], memory.codes, memory.keys)
    live = task.live

    def tile(i, _):
        wait_for_release(memory.empty, i, stages)
        slot = lax.rem(i, stages)
        barrier, gates, which = memory.full.at[slot], memory.gates.at[slot], task.gates(i)
        for number, source in enumerate(x.values):
            target = memory.values.at[slot, number]
            plgpu.copy_gmem_to_smem(source.at[task.row, task.time, task.lanes(i)], target, barrier)
        plgpu.copy_gmem_to_smem(x.gates.vectors.at[task.row, which], gates.at[pl.ds(0, WEIGHTS)], barrier)
        levels = task.sizes.levels if x.spread is None else INSIDE
        weights = x.gates.levels.at[task.row, which, pl.ds(0, levels)]
        plgpu.copy_gmem_to_smem(weights, gates.at[pl.ds(WEIGHTS, levels)], barrier)
        if x.spread is None:
            plgpu.copy_gmem_to_smem(x.gates.fade.at[task.row, which], gates.at[WEIGHTS + levels], barrier)
        else:
            source = x.spread.at[task.row, task.block, task.lanes(i)]
            plgpu.copy_gmem_to_smem(source, memory.spread.at[slot], barrier)
        if x.states is not None:
            load_states(task, x, memory, i, live)

    lax.fori_loop(0, task.tiles, tile, None)
    drain(memory.empty, task.tiles, stages)
    if x.states is not None:
        drain(memory.state_empty, task.tiles * live, memory.states.shape[0])


def load_states(task: Task, x: Inputs, memory: Memory, i, live) -> None:
    """Those that the block reads for tile i."""
    ring = memory.states.shape[0]

    def state(m, left):
        wait_for_release(memory.state_empty, i * live + m, ring)
        place, level = lax.rem(i * live + m, ring), lowest_level(left)
        target, barrier = memory.states.at[place], memory.state_full.at[place]
        which = state_of(task.block, task.number, level)
        # Where else a state may be: of a whole part, or of those before the row, which have no place in it.
        part, others, where = lax.div(which, 1 << task.sizes.near), x.first, level
        is_other: Any = which <= 0
        if x.roots is not None:
            others, where, is_other = x.roots, part - 1, part << task.sizes.near == which
        if others is None:
            plgpu.copy_gmem_to_smem(x.states.at[task.row, which, task.lanes(i)], target, barrier)
            return without_lowest(left)

        @pl.when(jnp.logical_not(is_other))
        def _():
            plgpu.copy_gmem_to_smem(x.states.at[task.row, which, task.lanes(i)], target, barrier)

        @pl.when(is_other)
        def _():
            plgpu.copy_gmem_to_smem(others.at[task.row, where, task.lanes(i)], target, barrier)

        return without_lowest(left)

    lax.fori_loop(0, live, state, task.number)


@narrow_indices()
def launch(name: str, compute, x: Inputs, out, memory: Memory, scratch: list, sizes: Sizes, config, interpret):
    """Run a program on the grid: compute(task, memory, results, scratch) by two warpgroups, `load` by a third."""

    def body(x, own, results, scratch):
        group, task = lax.axis_index("group"), Task.here(sizes, x.numbers)

        @pl.when(group == GROUPS)
        def _():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            load(task, x, own)

        @pl.when(group < GROUPS)
        def _():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            compute(task, own, results, [ref.at[group] for ref in scratch])
            plgpu.wait_smem_to_gmem(0)

    grid = dict(zip(("row", "block", "pair"), sizes.grid, strict=True))
    return on_grid(name, body, x, out, memory, scratch, grid, GROUPS + 1, config.automatic_barriers, interpret)


def flat(x: jax.Array) -> jax.Array:
    """[B, T, heads, channels] -> [B, T, heads channels]."""
    return x.reshape(*x.shape[:2], -1)


def key_scores(memory: Memory, group, own: bool) -> jax.Array:
    """Q K^T [64, 64] float32 of a warpgroup's queries and its own keys or the others'."""

    def multiply(acc):
        plgpu.wgmma(acc, memory.q.at[rows_of(group)], memory.k.at[rows_of(group if own else 1 - group)].T)
        return accumulated(acc, wait_n=0)

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, ROWS), f32))


def add_product(total, a, right, left, interpret) -> jax.Array:
    """total + a right, a [64, 64] in registers."""

    def add(acc):
        begin(acc, total, interpret)
        plgpu.wgmma(acc, left_operand(a, left), right)
        return finish(acc, total, interpret)

    return pl.run_scoped(add, plgpu.ACC(total.shape, f32))


def compute(task: Task, memory: Memory, o, o_s, left, interpret) -> None:
    """A compute warpgroup: all tiles."""
    group, stages, live = lax.axis_index("group"), memory.values.shape[0], task.live
    here, square = rows_of(group), plgpu.ACC((ROWS, TILE), f32)
    plgpu.barrier_wait(memory.keys)
    scores = [key_scores(memory, group, own) for own in (True, False)]

    def tile(i, _):
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(memory.full.at[slot])
        gates = memory.gates.at[slot]

        def pairs(own):
            weight = decays(gates, memory.codes, group, own=own, transposed=False)
            weight = weight * weights_of(gates, memory.codes, group, own=own, transposed=False)
            return (scores[0 if own else 1] * weight).astype(o.dtype)

        def inside(acc):
            plgpu.wgmma(acc, left_operand(pairs(True), left), memory.values.at[slot, 0, here])
            return accumulated(acc, wait_n=0)

        def add_others(total):
            return add_product(total, pairs(False), memory.values.at[slot, 0, rows_of(1 - group)], left, interpret)

        total = pl.run_scoped(inside, square)
        if memory.codes is None:  # no token of the first half reads one of the second
            total = lax.cond(group > 0, add_others, lambda total: total, total)
        else:
            total = add_others(total)

        def read(m, carry):
            total, left_of = carry
            place = lax.rem(i * live + m, memory.states.shape[0])
            plgpu.barrier_wait(memory.state_full.at[place])

            def multiply(acc):
                plgpu.wgmma(acc, memory.q.at[here], memory.states.at[place].T)
                level = lowest_level(left_of)
                weight = vector(gates.at[READS + level, here]) * since_state(gates, here, level)
                return total + accumulated(acc, wait_n=0) * lax.broadcast_in_dim(weight, (ROWS, TILE), (0,))

            total = pl.run_scoped(multiply, square)
            plgpu.barrier_arrive(memory.state_empty.at[place])
            return total, without_lowest(left_of)

        total, _ = lax.fori_loop(0, live, read, (total, task.number))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_s[...] = total.astype(o.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.empty.at[slot])
        target = o.at[task.row, pl.ds(task.block * BLOCK + group * ROWS, ROWS), task.lanes(i)]
        plgpu.copy_smem_to_gmem(o_s, target)

    lax.fori_loop(0, task.tiles, tile, None)


class Blocks(NamedTuple):
    """Which documents the blocks are of: numbers [B, N], -1 for an empty block, and codes [B, N, 128], int32; each row
    is one document if both are None."""

    numbers: Any = None
    codes: Any = None


def read_out(
    q, k, u, gates: Gates, states, first, where: Blocks, roots=None, *, config: Config, interpret=None
) -> jax.Array:
    """O [B, T, H, V] in the dtype of u; anything in empty blocks.

    q, k [B, T, G, K], u [B, T, H, V] of one 16-bit dtype, T a multiple of 128; states [B, T / 128, H V, K] and first
    [B, slots, H V, K] or None of that dtype; roots as in `Inputs`, where first is None."""
    sizes, dtype = Sizes.of(k, u, gates, config), u.dtype

    def program(task, memory, results, scratch):
        compute(task, memory, *results, *(scratch if interpret is not None else [*scratch, None]), interpret)

    x = Inputs(flat(q), flat(k), (flat(u),), gates, states, first, None, *where, roots)
    (o,) = launch(
        "log_linear_read",
        program,
        x,
        [jax.ShapeDtypeStruct(flat(u).shape, dtype)],
        memory_for(sizes, config, x, sizes.rows, beside=2 * GROUPS * ROWS * TILE),
        [shared(GROUPS, ROWS, TILE, dtype=dtype), *staging([(ROWS, ROWS)], dtype, interpret, GROUPS)],
        sizes,
        config,
        interpret,
    )
    return o.reshape(u.shape)
