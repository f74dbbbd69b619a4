"""The gradients of linear attention on a Hopper GPU: one Pallas program in Mosaic GPU, all chunks at once.

With the letters of `linear_attention_mosaic.py`, given S before and D' after every chunk:

    b = R . dO U^T        dQ = in . dO S^T + b K        dK = out . U D'^T + b^T Q
    dU = (R . Q K^T)^T dO + out . K D'

A program has a chunk of a key head and loops over the tiles of 64 columns of V that read it, so that dq and dk are
summed over the value heads in float32 registers and written once. Its two compute warpgroups are mirror images, the
first with the rows of q, the second with those of k: with X, Y, M = Q, dO, S here and K, U, D' there, Z and W being X
and Y of the other side, w = "in" or "out", and R transposed on the side of k,

    b = R . Y W^T        dX += b Z + (w . Y) M        P = (R . X Z^T) W + w . X M

where P is dU on the side of k, and on that of q the output once more, which nobody stores: two equal instruction
streams end together, and q's would else be the shorter one. A third warpgroup only issues loads.

A key of 256 channels is two of 128, each with programs of its own: b has no K in it, the rest is a sum over channels,
so that each half has columns of dq and dk, and its part of dU and of the sums, in float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.linear_attention_mosaic import (
    CHUNK,
    DOCUMENT,
    INTO,
    LOADER_REGISTERS,
    TILE,
    Sizes,
    decays,
    fitting,
    launch,
)
from efla_jax.kernels.mosaic import WGMMA, accumulated, begin, by_row, finish, index, left_operand, shared, staging

BALANCE, LEFT, KEPT = range(3)  # rows of the sums about the decays
COMPUTE_REGISTERS = 240  # per thread: with LOADER_REGISTERS, twice this is what fits of the 512 for three warpgroups
QUERY, KEY, LOADER = range(3)  # warpgroups; q's side comes first wherever there are two
f32 = jnp.float32


class Inputs(NamedTuple):
    """q, k [B, T, G K]; u, d_o [B, T, H V]; gates [B, N H, rows, C]; starts, ends [B, N, H V, K]: S and D'."""

    q: Any
    k: Any
    u: Any
    d_o: Any
    gates: Any
    starts: Any
    ends: Any


class Outputs(NamedTuple):
    """See `gradients`."""

    d_q: Any
    d_k: Any
    d_u: Any
    sums: Any


class Memory(NamedTuple):
    """Shared memory: x [2, C, K], q and k; scores [2, C, C] float32, Q K^T and K Q^T; y [stages, 2, C, 64], dO and U;
    m [stages, 2, 64, K], S^T and D'^T; gates [stages, rows, C]; d_u [C, 64]; sums [2, 3, C]; the barriers of x, of a
    stage's loads and of its release; the interpreter's left operands, one of each kind per side."""

    x: Any
    scores: Any
    y: Any
    m: Any
    gates: Any
    d_u: Any
    sums: Any
    keys: Any
    full: Any
    empty: Any
    left: list


class Task(NamedTuple):
    """A program: row of the batch, chunk, key head, which half of its channels, which slice of its tiles, and how many
    those are."""

    row: Any
    chunk: Any
    key_head: Any
    half: Any
    share: Any
    tiles: int
    sizes: Sizes

    @property
    def time(self):
        return pl.ds(self.chunk * CHUNK, CHUNK)

    @property
    def channels(self):
        part = self.key_head if self.sizes.halves == 1 else self.key_head * self.sizes.halves + self.half
        return pl.ds(part * self.sizes.key_dim, self.sizes.key_dim)

    def state(self, i):
        """Where the states of a tile have this program's channels."""
        if self.sizes.halves == 1:
            return self.row, self.chunk, self.lanes(i)
        return self.row, self.chunk, self.lanes(i), pl.ds(self.half * self.sizes.key_dim, self.sizes.key_dim)

    def values(self, i):
        """Where dU has a tile."""
        place = self.row, self.time, self.lanes(i)
        return place if self.sizes.halves == 1 else (self.half, *place)

    def sums(self, i, group):
        place = self.chunk * self.sizes.tiles + self.tile(i)
        return (place if self.sizes.halves == 1 else place * self.sizes.halves + self.half) * 2 + group

    def tile(self, i):
        return self.key_head * self.sizes.per_key + self.share * self.tiles + i

    def lanes(self, i):
        return pl.ds(self.tile(i) * TILE, TILE)


def load(task: Task, x: Inputs, memory: Memory) -> None:
    """The loading warpgroup: q and k once, then tile after tile, each into the stage that is free."""
    stages = memory.y.shape[0]
    plgpu.copy_gmem_to_smem(x.q.at[task.row, task.time, task.channels], memory.x.at[QUERY], memory.keys)
    plgpu.copy_gmem_to_smem(x.k.at[task.row, task.time, task.channels], memory.x.at[KEY], memory.keys)

    def step(i, _):
        slot = lax.rem(i, stages)

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(memory.empty.at[slot])

        lanes, barrier = task.lanes(i), memory.full.at[slot]
        gates = x.gates.at[task.row, task.chunk * task.sizes.heads + task.sizes.head(task.tile(i))]
        plgpu.copy_gmem_to_smem(x.d_o.at[task.row, task.time, lanes], memory.y.at[slot, QUERY], barrier)
        plgpu.copy_gmem_to_smem(x.u.at[task.row, task.time, lanes], memory.y.at[slot, KEY], barrier)
        plgpu.copy_gmem_to_smem(x.starts.at[task.state(i)], memory.m.at[slot, QUERY], barrier)
        plgpu.copy_gmem_to_smem(x.ends.at[task.state(i)], memory.m.at[slot, KEY], barrier)
        plgpu.copy_gmem_to_smem(gates, memory.gates.at[slot], barrier)

    lax.fori_loop(0, task.tiles, step, None)

    def released(i, _):
        plgpu.barrier_wait(memory.empty.at[lax.rem(i, stages)])

    lax.fori_loop(task.tiles - stages, task.tiles, released, None)


def kept(m, group, key_dim: int) -> jax.Array:
    """Row sums of S^T . D'^T [64, K] over this side's half of the columns, or over all if there are 64."""
    sums = []
    for part in range(-(-key_dim // (2 * TILE))):
        columns = pl.ds((2 * part + group) * TILE if key_dim > TILE else 0, TILE)
        start, end = (plgpu.load(m.at[side, :, columns], layout=WGMMA, optimized=False) for side in (QUERY, KEY))
        sums.append(jnp.sum(start.astype(f32) * end.astype(f32), axis=1))
    return sum(sums[1:], sums[0])


def tile_gradients(memory: Memory, slot, so_far, sizes: Sizes, put_p, interpret) -> jax.Array:
    """One tile on one side: writes the sums, hands P [C, 64] to put_p and returns dX [C, K] from the dX so far.

    w multiplies Y M afterwards, in float32: rounding w . Y instead would add a third to the error of dX. The products
    come in rounds, as an accumulator holds its registers from where its scope begins, and no accumulator is given
    a value while others are in flight (ptxas would run all products one by one)."""
    dtype, group = memory.y.dtype, lax.axis_index("group")
    x, z, m = memory.x.at[group], memory.x.at[1 - group], memory.m.at[slot, group]
    y, w = memory.y.at[slot, group], memory.y.at[slot, 1 - group]
    gates, sums, left = memory.gates.at[slot], memory.sums.at[group], memory.left
    weight = by_row(gates.at[INTO + group], TILE)
    square, wide = plgpu.ACC((CHUNK, CHUNK), f32), plgpu.ACC((CHUNK, sizes.key_dim), f32)

    def read_and_pair(acc_read, acc_pairs):
        plgpu.wgmma(acc_pairs, y, w.T)
        plgpu.wgmma(acc_read, x, m.T)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sums.at[KEPT][...] = kept(memory.m.at[slot], group, sizes.key_dim)
        decay = decays(gates, 0, documents=sizes.rows > DOCUMENT, sign=1 - 2 * group)
        read = accumulated(acc_read, wait_n=0) * weight
        values = plgpu.load(y, layout=WGMMA, optimized=False).astype(f32)
        sums.at[LEFT][...] = jnp.sum(values * read, axis=1)
        scores = plgpu.load(memory.scores.at[group], layout=WGMMA, optimized=False)
        pairs = accumulated(acc_pairs, wait_n=0) * decay
        spread = (decay * scores).astype(dtype)
        # A token's pair with itself cancels between the sides: left out rather than subtracted.
        others = index(CHUNK, CHUNK, 0) != index(CHUNK, CHUNK, 1)
        sums.at[BALANCE][...] = jnp.sum(jnp.where(others, pairs * scores, 0.0), axis=1)
        return pairs.astype(dtype), spread, read

    pairs, spread, read = pl.run_scoped(read_and_pair, square, square)

    def from_scores(acc_p):
        begin(acc_p, read, interpret)
        plgpu.wgmma(acc_p, left_operand(spread, left[0]), w)
        return finish(acc_p, read, interpret)

    p = pl.run_scoped(from_scores, square)
    if sizes.halves == 1:
        p = p.astype(dtype)
    else:  # in float32 it leaves at once: it would need too many registers
        put_p(p)

    def from_state(acc):
        plgpu.wgmma(acc, y, m)
        return so_far + accumulated(acc, wait_n=0) * by_row(gates.at[INTO + group], sizes.key_dim)

    carried = pl.run_scoped(from_state, wide)

    def from_pairs(acc):
        begin(acc, carried, interpret)
        plgpu.wgmma(acc, left_operand(pairs, left[1]), z)
        if sizes.halves == 1:
            put_p(p)
        return finish(acc, carried, interpret)

    return pl.run_scoped(from_pairs, wide)


def compute(task: Task, memory: Memory, out: Outputs, interpret) -> None:
    """A compute warpgroup: all tiles, then dq or dk."""
    sizes, group, stages = task.sizes, lax.axis_index("group"), memory.y.shape[0]
    plgpu.barrier_wait(memory.keys)

    def multiply(acc):
        plgpu.wgmma(acc, memory.x.at[group], memory.x.at[1 - group].T)
        memory.scores[group] = accumulated(acc, wait_n=0)

    pl.run_scoped(multiply, plgpu.ACC((CHUNK, CHUNK), f32))
    plgpu.commit_smem()

    def step(i, so_far):
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(memory.full.at[slot])

        def put_p(p):
            @pl.when(group == KEY)
            def _():
                memory.d_u[...] = p.astype(memory.d_u.dtype)

            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(memory.sums.at[group], out.sums.at[task.row, task.sums(i, group)])

            @pl.when(group == KEY)
            def _():
                plgpu.copy_smem_to_gmem(memory.d_u, out.d_u.at[task.values(i)])

        total = tile_gradients(memory, slot, so_far, sizes, put_p, interpret)
        plgpu.barrier_arrive(memory.empty.at[slot])
        return total

    total = lax.fori_loop(0, task.tiles, step, plgpu.layout_cast(jnp.zeros((CHUNK, sizes.key_dim), f32), WGMMA))
    for side, target in ((QUERY, out.d_q), (KEY, out.d_k)):

        @pl.when(group == side)
        def _(target=target):
            target[task.share, task.row, task.time, task.channels] = total.astype(target.dtype)

    plgpu.wait_smem_to_gmem(0)


def scratch(sizes: Sizes, stages: int, dtype, interpret) -> list:
    """What `Memory` lists."""
    return [
        shared(2, CHUNK, sizes.key_dim, dtype=dtype),
        shared(2, CHUNK, CHUNK, dtype=f32),
        shared(stages, 2, CHUNK, TILE, dtype=dtype),
        shared(stages, 2, TILE, sizes.key_dim, dtype=dtype),
        plgpu.SMEM((stages, sizes.rows, CHUNK), f32),
        shared(CHUNK, TILE, dtype=dtype if sizes.halves == 1 else f32),
        plgpu.SMEM((2, 3, CHUNK), f32),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=5, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        *staging([(CHUNK, CHUNK)] * 2, dtype, interpret, 2),
    ]


def gradients(x: Inputs, sizes: Sizes, *, stages: int, slices: int, options: dict) -> Outputs:
    """dq, dk [slices, B, T, G K]; dU [B, T, H V]; sums [B, N tiles 2, 3, C] float32. Of keys in halves K is that of
    both, and each has its part of dU [2, B, T, H V] float32 and of the sums [B, N tiles 2 2, 3, C].

    Each program takes a slice of the tiles of a key head, and its dq and dk are that slice's part: in the dtype of u if
    there is only one, else float32. options: those of a `Plan`. The sums of a chunk's tile, for the rows of q and then
    for those of k, per token:

        BALANCE  row sums of strict(b) . Q K^T for q, column sums for k
        LEFT     rowsum(Q . (in . dO S^T)) and rowsum(K . (out . U D'^T))
        KEPT     (per column of V, not per token) rowsum(S^T . D'^T) over half of K each; if K is 64, over all, twice
    """
    dtype, count = x.u.dtype, sizes.per_key // slices
    arguments, results = len(Inputs._fields), len(Outputs._fields)

    def body(*refs):
        sources, out = Inputs(*refs[:arguments]), Outputs(*refs[arguments : arguments + results])
        rest = refs[arguments + results :]
        fixed = len(Memory._fields) - 1
        row, chunk, pair = (lax.axis_index(name) for name in ("row", "part", "pair"))
        group = lax.axis_index("group")
        memory = Memory(*rest[:fixed], left=[buffer.at[group] for buffer in rest[fixed:]] or [None] * 2)
        half = 0
        if sizes.halves > 1:
            pair, half = lax.div(pair, sizes.halves), lax.rem(pair, sizes.halves)
        task = Task(row, chunk, lax.div(pair, slices), half, lax.rem(pair, slices), count, sizes)

        @pl.when(group == LOADER)
        def _():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            load(task, sources, memory)

        @pl.when(group != LOADER)
        def _():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            compute(task, memory, out, options["interpret"])

    shape = jax.ShapeDtypeStruct
    summed = shape((slices, *x.q.shape), dtype if slices == 1 else f32)
    d_u = shape(x.u.shape, dtype) if sizes.halves == 1 else shape((sizes.halves, *x.u.shape), f32)
    out = [summed, summed, d_u]
    out.append(shape((sizes.batch, sizes.chunks * sizes.tiles * sizes.halves * 2, 3, CHUNK), f32))
    grid = sizes.batch, sizes.chunks, sizes.key_heads * slices * sizes.halves
    each = 4 * (CHUNK * TILE + TILE * sizes.key_dim + sizes.rows * CHUNK)
    beside = 4 * CHUNK * (sizes.key_dim + 2 * CHUNK + 6) + 2 * sizes.halves * CHUNK * TILE
    stages = fitting(min(stages, count), each, beside)
    memory = scratch(sizes, stages, dtype, options["interpret"])
    return Outputs(*launch(body, x, out, memory, grid, 3, **options))
