"""Linear attention on a Hopper GPU, chunk after chunk: two Pallas programs in Mosaic GPU, chunks of C = 64 tokens.

    O = in . Q S + (R . Q K^T) U        S' = in_C S + K^T (out . U)        D = in_C D' + Q^T (in . dO)

with the letters of `ops/chunked.py`: running log decay G inside a token's own document, R_ti = exp(G_t - G_i) for
i <= t in the same document, "in" = exp(G_t) while no document has begun, "out" = exp(G_C - G_i) for the chunk's last
document; D' and D are the state's cotangents at the end and at the start of a chunk.

walk        outputs and states.
accumulate  the state alone, from k and u onwards in time, or its cotangent D, from q and dO backwards.

The columns of V are cut into tiles of 64. A program has one or two compute warpgroups with a tile each, which share q
and k (two heads of one key head, or two tiles of one head); one more warpgroup only issues loads. The state is kept
transposed, S^T [64, K] float32, in registers: it is the left operand of every product it is in. With 256 channels
of K that is half of all registers: a program has one tile then, and its state is an operand by way of shared memory.

Channels are flat: u, o, dO, dU [B, T, H V], q, k [B, T, G K], states [.., H V, K]; a tile is 64 columns wherever it
lies. Nothing here needs automatic barriers: what is stored to shared memory is read only after a commit, at which the
warpgroup meets, and is stored again only after a later one, or after the wait for a copy, at which it meets, too.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.mosaic import (
    MASKED,
    SHARED_MEMORY,
    TRANSPOSED,
    WGMMA,
    accumulated,
    begin,
    by_column,
    by_row,
    finish,
    index,
    left_operand,
    parameters,
    shared,
    staging,
    tiled,
    transposed,
)

CHUNK = TILE = 64
# Rows of the gates: G / ln 2, for a GPU has 2^x and would multiply for e^x; in; out; document number, if there are any.
SUM, INTO, OUT, DOCUMENT = range(4)
LOADER_REGISTERS = 24  # of each thread of the warpgroup that loads; the compute warpgroups share the rest
f32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a call: B, N, G, H, K, V and the rows of its gates (3, or 4 with documents). halves: 2 if a key of twice
    K channels is taken as two, by the gradients."""

    batch: int
    chunks: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    rows: int
    halves: int = 1

    @property
    def wide(self) -> bool:
        """Whether the state of a tile takes half of a thread's registers."""
        return self.key_dim > 128

    @property
    def tiles(self) -> int:
        return self.heads * self.value_dim // TILE

    @property
    def per_key(self) -> int:
        """Tiles that read the same key head."""
        return self.tiles // self.key_heads

    @property
    def per_head(self) -> int:
        return self.value_dim // TILE

    @property
    def together(self) -> int:
        """Tiles of one program: two heads of one key head, or two tiles of one head, or a single tile."""
        if self.wide:
            return 1
        pairs = self.per_head % 2 == 0 or (self.per_head == 1 and self.per_key % 2 == 0)
        return 2 if pairs else 1

    @property
    def heads_together(self) -> int:
        return self.together if self.per_head == 1 else 1

    @property
    def programs(self) -> int:
        """Programs of a walk over one part of the time."""
        return self.batch * self.tiles // self.together

    @property
    def states(self) -> tuple[int, int, int, int]:
        """Shape of the states of all chunks."""
        return self.batch, self.chunks, self.tiles * TILE, self.key_dim

    def key_head(self, tile):
        return lax.div(tile, self.per_key)

    def head(self, tile):
        return lax.div(tile, self.per_head)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a walk runs: in how many equal parts of the time, with how many chunks loaded ahead, in which direction, and
    whether it saves the state before every chunk (backwards: the cotangent after it)."""

    sizes: Sizes
    parts: int
    stages: int
    save: bool
    backwards: bool = False
    automatic_barriers: bool = True
    interpret: Any = None

    @property
    def options(self) -> dict:
        return dict(automatic_barriers=self.automatic_barriers, interpret=self.interpret)

    @property
    def steps(self) -> int:
        return self.sizes.chunks // self.parts


class Place(NamedTuple):
    """Where a warpgroup stands: row of the batch, part of the time, pair of tiles, and which of the pair is its own."""

    row: jax.Array
    part: jax.Array
    pair: jax.Array
    group: jax.Array

    @classmethod
    def here(cls) -> "Place":
        return cls(*(lax.axis_index(name) for name in cls._fields))

    def chunk(self, plan: Plan, i):
        return self.part * plan.steps + (plan.steps - 1 - i if plan.backwards else i)

    def lanes(self, sizes: Sizes):
        """This warpgroup's tile among the H V channels."""
        return pl.ds((self.pair * sizes.together + self.group) * TILE, TILE)

    def gates(self, sizes: Sizes):
        """The first of this warpgroup's rows of the gates."""
        return self.group * sizes.rows if sizes.heads_together > 1 else 0


def decays(gates, first, *, documents: bool, sign) -> jax.Array:
    """R [C, C] float32 (sign 1) or R^T (-1) from gates in shared memory whose rows begin at `first`."""
    total = gates.at[first + SUM]
    difference = by_row(total, CHUNK) - by_column(total, CHUNK)
    seen = (index(CHUNK, CHUNK, 0) - index(CHUNK, CHUNK, 1)) * sign >= 0
    if documents:
        number = gates.at[first + DOCUMENT]
        seen &= by_column(number, CHUNK) == by_row(number, CHUNK)
    scale = float(sign) if isinstance(sign, int) else sign.astype(f32)
    return jnp.exp2(jnp.where(seen, difference * scale, MASKED))


def launch(body, arguments, out, scratch, grid, threads: int, *, automatic_barriers: bool, interpret):
    """Run a program on a grid of rows, parts of the time and pairs of tiles, with so many warpgroups."""
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=grid,
        grid_names=Place._fields[:3],
        num_threads=threads,
        thread_name=Place._fields[3],
        compiler_params=parameters(automatic_barriers),
        interpret=interpret,
    )(*arguments)


def fitting(stages: int, each: int, beside: int) -> int:
    """As many of the wanted stages of so many bytes as shared memory holds beside the rest of a program; at least 1."""
    return max(min(stages, (SHARED_MEMORY - 1024 - beside) // each), 1)  # 1024: barriers, and what starts aligned


def pipeline(plan: Plan, place: Place, step, keys, values, gates, initial, final) -> None:
    """Carry the state of every tile over its part of the time: step(i, *keys, values, gates, state) -> state.

    keys: references to [B, T, G K]; values [B, T, H V]; gates [B, N H rows, C]; initial, final [B, P, H V, K]."""
    sizes, dtype = plan.sizes, values.dtype
    count, here = sizes.together, sizes.heads_together
    tile = place.pair * count
    lanes = place.lanes(sizes)
    each = CHUNK * (2 * (len(keys) * sizes.key_dim + TILE * count) + 4 * here * sizes.rows)
    # The largest that a walk has beside: outputs, pairs and states.
    held = sizes.key_dim * (plan.save or sizes.wide)
    beside = 2 * count * TILE * (held + (2 * CHUNK if len(keys) > 1 else sizes.key_dim))

    def compute(over_chunks):
        start = plgpu.load(initial.at[place.row, place.part, lanes], layout=WGMMA, optimized=False)
        final[place.row, place.part, lanes] = over_chunks(start)
        plgpu.wait_smem_to_gmem(0)

    def gate_block(i):
        return place.chunk(plan, i) * (sizes.heads // here) + lax.div(sizes.head(tile), here), 0

    def key_block(i):
        return place.chunk(plan, i), sizes.key_head(tile)

    def value_block(i):
        return place.chunk(plan, i), place.pair

    plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(plan.steps,),
        memory_registers=LOADER_REGISTERS,
        max_concurrent_steps=fitting(plan.stages, each, beside),
        wg_axis="group",
        num_compute_wgs=count,
        compute_context=compute,
        in_specs=[
            *[plgpu.BlockSpec((CHUNK, sizes.key_dim), key_block, transforms=tiled(sizes.key_dim, dtype)) for _ in keys],
            plgpu.BlockSpec((CHUNK, TILE * count), value_block, transforms=tiled(TILE, dtype)),
            plgpu.BlockSpec((here * sizes.rows, CHUNK), gate_block),
        ],
    )(*(x.at[place.row] for x in (*keys, values, gates)))


# ---- walk ---------------------------------------------------------------------------------------------------------


class WalkMemory(NamedTuple):
    """Shared memory of one warpgroup: its outputs [C, 64], its (R . Q K^T)^T [C, C], the state [64, K] to be saved,
    and the interpreter's left operands."""

    o: Any
    pairs: Any
    state: Any
    left: list


def walk_chunk(plan: Plan, place: Place, memory: WalkMemory, loads, state, put_state, put_o) -> jax.Array:
    """The state after a chunk from that before it; loads: q, k, u and gates in shared memory.

    Two rounds of products. No accumulator is given a value while others are in flight (ptxas would run all products one
    by one), and Q S is taken as soon as it is there: its left operand is then free before the decays need registers."""
    q, k, u, gates = loads
    dtype, first = u.dtype, place.gates(plan.sizes)

    def read_and_pair(acc_read, acc_pairs):
        rounded = state.astype(dtype)
        plgpu.wgmma(acc_read, left_operand(rounded, memory.left[0]), q.T)
        plgpu.wgmma(acc_pairs, k, q.T)
        if plan.save:
            memory.state[...] = rounded
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(memory.state, put_state)
        values = transposed(u.at[:, pl.ds(place.group * TILE, TILE)])
        fading = (values.astype(f32) * by_column(gates.at[first + OUT], TILE)).astype(dtype)
        read = accumulated(acc_read, wait_n=1) * by_column(gates.at[first + INTO], TILE)
        decay = decays(gates, first, documents=plan.sizes.rows > DOCUMENT, sign=-1)
        memory.pairs[...] = (accumulated(acc_pairs, wait_n=0) * decay).astype(dtype)
        plgpu.commit_smem()
        return values, fading, read

    square, wide = plgpu.ACC((TILE, CHUNK), f32), plgpu.ACC((TILE, plan.sizes.key_dim), f32)
    values, fading, read = pl.run_scoped(read_and_pair, square, square)

    def add(acc_o, acc_state):
        carried = state * gates[first + INTO, CHUNK - 1]
        begin(acc_o, read, plan.interpret)
        begin(acc_state, carried, plan.interpret)
        plgpu.wgmma(acc_o, left_operand(values, memory.left[1]), memory.pairs)
        plgpu.wgmma(acc_state, left_operand(fading, memory.left[2]), k)
        o = finish(acc_o, read, plan.interpret, wait_n=1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        memory.o.T[...] = plgpu.layout_cast(o.astype(dtype), TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory.o, put_o)
        return finish(acc_state, carried, plan.interpret)

    return pl.run_scoped(add, square, wide)


def wide_chunk(plan: Plan, place: Place, memory: WalkMemory, loads, state, put_state, put_o) -> jax.Array:
    """`walk_chunk` of a wide state. Two copies may be on their way, S before o: a wait leaves the younger."""
    q, k, u, gates = loads
    dtype, first = u.dtype, place.gates(plan.sizes)
    if plan.save:
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    memory.state[...] = state.astype(dtype)
    plgpu.commit_smem()
    if plan.save:
        plgpu.copy_smem_to_gmem(memory.state, put_state)

    def read_and_pair(acc_read, acc_pairs):
        plgpu.wgmma(acc_pairs, k, q.T)
        plgpu.wgmma(acc_read, memory.state, q.T)
        decay = decays(gates, first, documents=plan.sizes.rows > DOCUMENT, sign=-1)
        memory.pairs[...] = (accumulated(acc_pairs, wait_n=1) * decay).astype(dtype)
        plgpu.commit_smem()
        return accumulated(acc_read, wait_n=0) * by_column(gates.at[first + INTO], TILE)

    square, wide = plgpu.ACC((TILE, CHUNK), f32), plgpu.ACC((TILE, plan.sizes.key_dim), f32)
    read = pl.run_scoped(read_and_pair, square, square)

    def add(acc_o, acc_state):
        values = transposed(u)
        fading = (values.astype(f32) * by_column(gates.at[first + OUT], TILE)).astype(dtype)
        carried = state * gates[first + INTO, CHUNK - 1]
        begin(acc_o, read, plan.interpret)
        begin(acc_state, carried, plan.interpret)
        plgpu.wgmma(acc_o, left_operand(values, memory.left[0]), memory.pairs)
        plgpu.wgmma(acc_state, left_operand(fading, memory.left[1]), k)
        o = finish(acc_o, read, plan.interpret, wait_n=1)
        plgpu.wait_smem_to_gmem(int(plan.save), wait_read_only=True)
        memory.o.T[...] = plgpu.layout_cast(o.astype(dtype), TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory.o, put_o)
        return finish(acc_state, carried, plan.interpret)

    return pl.run_scoped(add, square, wide)


def walk(q, k, u, gates, initial, plan: Plan):
    """(o [B, T, H V], states after each part [B, P, H V, K] float32, states before each chunk [B, N, H V, K] or None).

    q, k [B, T, G K], u [B, T, H V] of one 16-bit dtype; gates [B, N H rows, C]; initial [B, P, H V, K] float32: the
    states from which the P parts of the time begin."""
    sizes, dtype = plan.sizes, u.dtype
    count = sizes.together

    def body(q_g, k_g, u_g, gates_g, initial_g, o_g, final_g, *rest):
        starts_g, rest = (rest[0], rest[1:]) if plan.save else (None, rest)
        place = Place.here()
        o_s, pairs_s, *rest = (x.at[place.group] for x in rest)
        state_s, left = (rest[0], rest[1:]) if plan.save or sizes.wide else (None, rest)
        memory = WalkMemory(o_s, pairs_s, state_s, left or [None] * 3)
        over_chunk = wide_chunk if sizes.wide else walk_chunk
        lanes = place.lanes(sizes)

        def step(at, *loads_and_state):
            *loads, state = loads_and_state
            chunk = place.chunk(plan, at[0])
            put_state = starts_g.at[place.row, chunk, lanes] if plan.save else None
            put_o = o_g.at[place.row, pl.ds(chunk * CHUNK, CHUNK), lanes]
            return over_chunk(plan, place, memory, loads, state, put_state, put_o)

        pipeline(plan, place, step, (q_g, k_g), u_g, gates_g, initial_g, final_g)

    state = (TILE, sizes.key_dim)
    out = [jax.ShapeDtypeStruct(u.shape, dtype), jax.ShapeDtypeStruct(initial.shape, f32)]
    scratch = [shared(count, CHUNK, TILE, dtype=dtype), shared(count, CHUNK, CHUNK, dtype=dtype)]
    if plan.save:
        out.append(jax.ShapeDtypeStruct(sizes.states, dtype))
    scratch += [shared(count, *state, dtype=dtype)] * (plan.save or sizes.wide)
    scratch += staging([state][sizes.wide :] + [(TILE, CHUNK)] * 2, dtype, plan.interpret, count)
    grid = sizes.batch, plan.parts, sizes.tiles // count
    o, final, *starts = launch(body, (q, k, u, gates, initial), out, scratch, grid, count + 1, **plan.options)
    return o, final, starts[0] if plan.save else None


# ---- accumulate ---------------------------------------------------------------------------------------------------


def accumulate_chunk(plan: Plan, place: Place, loads, state, state_s, left, put_state) -> jax.Array:
    """The state after a chunk from that before it, or backwards the cotangent before it from that after it."""
    x, y, gates = loads
    dtype, first = y.dtype, place.gates(plan.sizes)

    def products(acc):
        if plan.save:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            state_s[...] = state.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(state_s, put_state)
        values = transposed(y.at[:, pl.ds(place.group * TILE, TILE)]).astype(f32)
        weight = by_column(gates.at[first + (INTO if plan.backwards else OUT)], TILE)
        carried = state * gates[first + INTO, CHUNK - 1]
        begin(acc, carried, plan.interpret)
        plgpu.wgmma(acc, left_operand((values * weight).astype(dtype), left), x)
        return finish(acc, carried, plan.interpret)

    return pl.run_scoped(products, plgpu.ACC((TILE, plan.sizes.key_dim), f32))


def accumulate(x, y, gates, initial, plan: Plan):
    """(states after each part [B, P, H V, K] float32, states before each chunk [B, N, H V, K] or None).

    x = k, y = u: S' = in_C S + K^T (out . U). Backwards x = q, y = dO, from the last chunk of each part to its first:
    D = in_C D' + Q^T (in . dO), and D' is what is saved. Shapes are those of `walk`."""
    sizes, dtype = plan.sizes, y.dtype
    count = sizes.together

    def body(x_g, y_g, gates_g, initial_g, final_g, *rest):
        saved_g, rest = (rest[0], rest[1:]) if plan.save else (None, rest)
        place = Place.here()
        state_s, left = [x.at[place.group] for x in rest] if len(rest) > 1 else (rest[0].at[place.group], None)
        lanes = place.lanes(sizes)

        def step(at, *loads_and_state):
            *loads, state = loads_and_state
            put_state = saved_g.at[place.row, place.chunk(plan, at[0]), lanes] if plan.save else None
            return accumulate_chunk(plan, place, loads, state, state_s, left, put_state)

        pipeline(plan, place, step, (x_g,), y_g, gates_g, initial_g, final_g)

    out = [jax.ShapeDtypeStruct(initial.shape, f32)]
    out += [jax.ShapeDtypeStruct(sizes.states, dtype)] if plan.save else []
    scratch = [shared(count, TILE, sizes.key_dim, dtype=dtype)]
    scratch += staging([(TILE, CHUNK)], dtype, plan.interpret, count)
    grid = sizes.batch, plan.parts, sizes.tiles // count
    final, *saved = launch(body, (x, y, gates, initial), out, scratch, grid, count + 1, **plan.options)
    return final, saved[0] if plan.save else None
