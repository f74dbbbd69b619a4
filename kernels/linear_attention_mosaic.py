"""Linear attention on a Hopper GPU: three Pallas programs in Mosaic GPU, chunks of C = 64 tokens.

    O = in . Q S + (R . Q K^T) U        S' = in_C S + K^T (out . U)        D = in_C D' + Q^T (in . dO)

with the letters of `ops/chunked.py`: running log decay G inside a token's own document, R_ti = exp(G_t - G_i) for
i <= t in the same document, "in" = exp(G_t) while no document has begun, "out" = exp(G_C - G_i) for the chunk's last
document; D' and D are the state's cotangents at the end and at the start of a chunk.

walk        outputs and states, chunk after chunk. Two compute warpgroups have a tile each and share q and k (two heads
            of one key head, or two tiles of one head); one more warpgroup only issues loads. The state is kept
            transposed, S^T [64, K] float32, in registers: it is the left operand of every product it is in.
accumulate  the state alone, from k and u onwards in time, or its cotangent D, from q and dO backwards.
gradients   a chunk per program, all chunks at once, in a loop over the heads of a key head: dq and dk are summed over
            the heads in float32 registers and written once. The two compute warpgroups are mirror images: one has the
            rows of q, with dO and S, the other those of k, with u and D'.

Every program sees the channels flat: u, o, dO, dU [B, T, H V], q, k [B, T, G K], states [.., H V, K], so that a tile is
64 columns wherever it lies. Mosaic's interpreter knows neither a left operand in registers nor a store into an
accumulator; those two places ask for `interpret`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = TILE = 64
SUM, INTO, OUT, DOCUMENT = range(4)  # rows of the gates: G; in; out; document number, if there are documents
BALANCE, LEFT, KEPT = range(3)  # rows of what `gradients` says about the decays
MASKED = -1e30  # instead of a difference of log decays that must not be seen: its exponential is 0
LOADER_REGISTERS, COMPUTE_REGISTERS = 40, 232  # per thread: 40 + 2 * 232 of the 512 that three warpgroups can have
WGMMA, TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED
PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True)
accumulated = plgpu.wgmma_accumulator_load  # (acc, wait_n=n): its value once at most n later products are in flight
f32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a call: B, N, G, H, K, V and the rows of its gates (3, or 4 with documents)."""

    batch: int
    chunks: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    rows: int

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
        """Tiles walked by one program, a warpgroup each: two heads of one key head, or two tiles of one head."""
        pairs = self.per_head % 2 == 0 or (self.per_head == 1 and self.per_key % 2 == 0)
        return 2 if pairs else 1

    @property
    def heads_together(self) -> int:
        return self.together if self.per_head == 1 else 1

    @property
    def programs(self) -> int:
        """Programs of a walk over one part of the time."""
        return self.batch * self.tiles // self.together

    def key_head(self, tile):
        return lax.div(tile, self.per_key)

    def head(self, tile):
        return lax.div(tile, self.per_head)


def tiled(columns: int, dtype) -> tuple:
    """Transforms of a shared-memory array whose last axis has this many columns: what TMA and wgmma agree on."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def shared(*shape: int, dtype) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=tiled(shape[-1], dtype))


def by_column(vector, rows: int) -> jax.Array:
    """A vector [n] in shared memory as [rows, n], the same in every row."""
    x = plgpu.load(vector, layout=WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))


def by_row(vector, columns: int) -> jax.Array:
    """A vector [n] in shared memory as [n, columns], the same in every column."""
    return lax.broadcast_in_dim(per_row(vector), (vector.shape[0], columns), (0,))


def per_row(vector) -> jax.Array:
    return plgpu.load(vector, layout=WGMMA.reduce(1), optimized=False)


def index(axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis, layout=WGMMA)


def left_operand(x, buffer):
    """x as the left operand of a wgmma: itself, or (in the interpreter, which gives a buffer) a copy in shared memory."""
    if buffer is None:
        return x
    buffer[...] = x
    plgpu.commit_smem()
    return buffer


def begin(acc, value, interpret) -> None:
    """Let products add to `value`; in the interpreter `finish` adds it."""
    if interpret is None:
        acc[...] = value


def finish(acc, value, interpret, wait_n: int = 0) -> jax.Array:
    total = accumulated(acc, wait_n=wait_n)
    return total if interpret is None else total + value


def transposed(tile) -> jax.Array:
    """A tile [C, 64] in shared memory as [64, C] in registers, ready to be a left operand."""
    return plgpu.layout_cast(plgpu.load(tile.T, layout=TRANSPOSED, optimized=False), WGMMA)


def staging(shapes, dtype, interpret, count: int) -> list:
    """Shared memory for the left operands of the interpreter, for each of `count` warpgroups."""
    return [] if interpret is None else [shared(count, *shape, dtype=dtype) for shape in shapes]


def pipeline_specs(sizes: Sizes, dtype, tile, chunk, inputs: int) -> list:
    """Blocks of `inputs` arrays [T, G K], one [T, H V] and the gates, for the chunk that chunk(i) names."""
    keys = plgpu.BlockSpec(
        (CHUNK, sizes.key_dim), lambda i: (chunk(i), sizes.key_head(tile)), transforms=tiled(sizes.key_dim, dtype)
    )
    values = plgpu.BlockSpec(
        (CHUNK, TILE * sizes.together),
        lambda i: (chunk(i), lax.div(tile, sizes.together)),
        transforms=tiled(TILE, dtype),
    )
    here = sizes.heads_together
    gates = plgpu.BlockSpec(
        (here * sizes.rows, CHUNK), lambda i: (chunk(i) * (sizes.heads // here) + lax.div(sizes.head(tile), here), 0)
    )
    return [keys] * inputs + [values, gates]


# ---- walk ---------------------------------------------------------------------------------------------------------


def walk(q, k, u, gates, initial, *, sizes: Sizes, stages: int, save: bool, interpret=None):
    """(o [B, T, H V], states after each part [B, P, H V, K] float32, states before each chunk [B, N, H V, K] or None).

    q, k [B, T, G K], u [B, T, H V] of one 16-bit dtype; gates [B, N H rows, C]; initial [B, P, H V, K] float32: the
    states from which the P equal parts of the time begin."""
    count, dtype, parts = sizes.together, u.dtype, initial.shape[1]
    steps = sizes.chunks // parts

    def body(q_g, k_g, u_g, gates_g, initial_g, o_g, final_g, *scratch):
        starts_g, scratch = (scratch[0], scratch[1:]) if save else (None, scratch)
        o_s, pairs_s, state_s, *buffers = scratch
        row, part, pair = (lax.axis_index(name) for name in ("row", "part", "pair"))
        group = lax.axis_index("group")
        tile = pair * count + group
        lanes = pl.ds(tile * TILE, TILE)
        own = [buffer.at[group] for buffer in buffers] or [None] * 3

        def step(at, q_s, k_s, u_s, gates_s, state):
            chunk = part * steps + at[0]
            mine = group * sizes.rows if sizes.heads_together > 1 else 0

            def products(acc_inter, acc_pairs, acc_state, acc_o):
                rounded = state.astype(dtype)
                plgpu.wgmma(acc_inter, left_operand(rounded, own[0]), q_s.T)
                plgpu.wgmma(acc_pairs, k_s, q_s.T)
                if save:
                    state_s.at[group][...] = rounded
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(state_s.at[group], starts_g.at[row, chunk, lanes])
                values = transposed(u_s.at[:, pl.ds(group * TILE, TILE)])
                fading = (values.astype(f32) * by_column(gates_s.at[mine + OUT], TILE)).astype(dtype)
                carried = state * gates_s[mine + INTO, CHUNK - 1]
                begin(acc_state, carried, interpret)
                plgpu.wgmma(acc_state, left_operand(fading, own[1]), k_s)
                decay = pair_decay(gates_s, mine, sizes.rows, transpose=True)
                pairs_s.at[group][...] = (accumulated(acc_pairs, wait_n=1) * decay).astype(dtype)
                plgpu.commit_smem()
                inter = accumulated(acc_inter, wait_n=1) * by_column(gates_s.at[mine + INTO], TILE)
                begin(acc_o, inter, interpret)
                plgpu.wgmma(acc_o, left_operand(values, own[2]), pairs_s.at[group])
                after = finish(acc_state, carried, interpret, wait_n=1)
                o = finish(acc_o, inter, interpret)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_s.at[group].T[...] = plgpu.layout_cast(o.astype(dtype), TRANSPOSED)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_s.at[group], o_g.at[row, pl.ds(chunk * CHUNK, CHUNK), lanes])
                return after

            square, wide = plgpu.ACC((TILE, CHUNK), f32), plgpu.ACC((TILE, sizes.key_dim), f32)
            return pl.run_scoped(products, square, square, wide, square)

        def compute(pipeline):
            start = plgpu.load(initial_g.at[row, part, lanes], layout=WGMMA, optimized=False)
            final_g[row, part, lanes] = pipeline(start)
            plgpu.wait_smem_to_gmem(0)

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps,),
            memory_registers=LOADER_REGISTERS,
            max_concurrent_steps=stages,
            wg_axis="group",
            num_compute_wgs=count,
            compute_context=compute,
            in_specs=pipeline_specs(sizes, dtype, pair * count, lambda i: part * steps + i, 2),
        )(q_g.at[row], k_g.at[row], u_g.at[row], gates_g.at[row])

    out = [jax.ShapeDtypeStruct(u.shape, dtype), jax.ShapeDtypeStruct(initial.shape, f32)]
    states = (sizes.batch, sizes.chunks, sizes.tiles * TILE, sizes.key_dim)
    out += [jax.ShapeDtypeStruct(states, dtype)] if save else []
    state_s = shared(count if save else 1, TILE, sizes.key_dim if save else TILE, dtype=dtype)
    shapes = [(TILE, sizes.key_dim), (TILE, CHUNK), (TILE, CHUNK)]
    o, final, *starts = launch(
        body,
        (q, k, u, gates, initial),
        out,
        [shared(count, CHUNK, TILE, dtype=dtype), shared(count, CHUNK, CHUNK, dtype=dtype), state_s]
        + staging(shapes, dtype, interpret, count),
        (sizes.batch, parts, sizes.tiles // count),
        count + 1,
        interpret,
    )
    return o, final, starts[0] if save else None


def launch(body, arguments, out, scratch, grid, threads: int, interpret):
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=grid,
        grid_names=("row", "part", "pair"),
        num_threads=threads,
        thread_name="group",
        compiler_params=PARAMETERS,
        interpret=interpret,
    )(*arguments)


def pair_decay(gates, mine, rows: int, *, transpose: bool) -> jax.Array:
    """R^T (or R) [C, C] float32 from the gates in shared memory whose rows begin at `mine`."""
    total = gates.at[mine + SUM]
    difference = by_column(total, CHUNK) - by_row(total, CHUNK)
    seen = index(1) - index(0)
    if not transpose:
        difference, seen = -difference, -seen
    seen = seen >= 0
    if rows > DOCUMENT:
        document = gates.at[mine + DOCUMENT]
        seen &= by_column(document, CHUNK) == by_row(document, CHUNK)
    return jnp.exp(jnp.where(seen, difference, MASKED))


# ---- accumulate ---------------------------------------------------------------------------------------------------


def accumulate(x, y, gates, initial, *, sizes: Sizes, stages: int, backwards: bool, save: bool, interpret=None):
    """(states after each part [B, P, H V, K] float32, states before each chunk's step [B, N, H V, K] or None).

    Forwards, x = k and y = u: S' = in_C S + K^T (out . U). Backwards, x = q and y = dO, from the last chunk of each
    part to its first: D = in_C D' + Q^T (in . dO), and what is saved is D'. Shapes are those of `walk`."""
    count, dtype, parts = sizes.together, y.dtype, initial.shape[1]
    steps = sizes.chunks // parts

    def body(x_g, y_g, gates_g, initial_g, final_g, *scratch):
        saved_g, scratch = (scratch[0], scratch[1:]) if save else (None, scratch)
        state_s, *buffers = scratch
        row, part, pair = (lax.axis_index(name) for name in ("row", "part", "pair"))
        group = lax.axis_index("group")
        lanes = pl.ds((pair * count + group) * TILE, TILE)
        own = buffers[0].at[group] if buffers else None

        def place(i):
            return part * steps + (steps - 1 - i if backwards else i)

        def step(at, x_s, y_s, gates_s, state):
            mine = group * sizes.rows if sizes.heads_together > 1 else 0

            def products(acc):
                if save:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    state_s.at[group][...] = state.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(state_s.at[group], saved_g.at[row, place(at[0]), lanes])
                values = transposed(y_s.at[:, pl.ds(group * TILE, TILE)]).astype(f32)
                weight = by_column(gates_s.at[mine + (INTO if backwards else OUT)], TILE)
                carried = state * gates_s[mine + INTO, CHUNK - 1]
                begin(acc, carried, interpret)
                plgpu.wgmma(acc, left_operand((values * weight).astype(dtype), own), x_s)
                return finish(acc, carried, interpret)

            return pl.run_scoped(products, plgpu.ACC((TILE, sizes.key_dim), f32))

        def compute(pipeline):
            start = plgpu.load(initial_g.at[row, part, lanes], layout=WGMMA, optimized=False)
            final_g[row, part, lanes] = pipeline(start)
            plgpu.wait_smem_to_gmem(0)

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps,),
            memory_registers=LOADER_REGISTERS,
            max_concurrent_steps=stages,
            wg_axis="group",
            num_compute_wgs=count,
            compute_context=compute,
            in_specs=pipeline_specs(sizes, dtype, pair * count, place, 1),
        )(x_g.at[row], y_g.at[row], gates_g.at[row])

    states = (sizes.batch, sizes.chunks, sizes.tiles * TILE, sizes.key_dim)
    out = [jax.ShapeDtypeStruct(initial.shape, f32)] + ([jax.ShapeDtypeStruct(states, dtype)] if save else [])
    final, *saved = launch(
        body,
        (x, y, gates, initial),
        out,
        [shared(count, TILE, sizes.key_dim, dtype=dtype)] + staging([(TILE, CHUNK)], dtype, interpret, count),
        (sizes.batch, parts, sizes.tiles // count),
        count + 1,
        interpret,
    )
    return final, saved[0] if save else None


# ---- gradients ----------------------------------------------------------------------------------------------------


def gradients(q, k, u, d_o, gates, starts, ends, *, sizes: Sizes, stages: int, slices: int, interpret=None):
    """(dq, dk [slices, B, T, G K], dU [B, T, H V], sums [B, N, tiles, 2, 3, C] float32).

    starts, ends [B, N, H V, K]: S before and D' after each chunk. Each program takes a slice of the tiles of a key
    head, and dq, dk are that slice's part: in the dtype of q if there is only one, else float32. sums, for the rows of
    q (0) and of k (1), per token:
        BALANCE  the row sums of strict(R . dO U^T) . Q K^T, or its column sums
        LEFT     rowsum(Q . (in . dO S^T)), or rowsum(K . (out . U D'^T))
        KEPT     (per column of V, not per token) rowsum(S^T . D'^T) over half of K; all of it in 0 if K is 64."""
    dtype, mine = u.dtype, sizes.per_key // slices
    stages = min(stages, mine)

    def body(q_g, k_g, u_g, do_g, gates_g, starts_g, ends_g, dq_g, dk_g, du_g, sums_g, *scratch):
        x_s, y_s, m_s, gates_s, du_s, sums_s, keys, full, empty, *buffers = scratch
        row, chunk, pair = (lax.axis_index(name) for name in ("row", "part", "pair"))
        group = lax.axis_index("group")
        key_head, share = lax.div(pair, slices), lax.rem(pair, slices)
        time, channels = pl.ds(chunk * CHUNK, CHUNK), pl.ds(key_head * sizes.key_dim, sizes.key_dim)

        def tile(i):
            return key_head * sizes.per_key + share * mine + i

        @pl.when(group == 2)
        def _load():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            plgpu.copy_gmem_to_smem(q_g.at[row, time, channels], x_s.at[0], keys)
            plgpu.copy_gmem_to_smem(k_g.at[row, time, channels], x_s.at[1], keys)

            def load(i, _):
                slot = lax.rem(i, stages)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                lanes, barrier = pl.ds(tile(i) * TILE, TILE), full.at[slot]
                plgpu.copy_gmem_to_smem(do_g.at[row, time, lanes], y_s.at[slot, 0], barrier)
                plgpu.copy_gmem_to_smem(u_g.at[row, time, lanes], y_s.at[slot, 1], barrier)
                plgpu.copy_gmem_to_smem(starts_g.at[row, chunk, lanes], m_s.at[slot, 0], barrier)
                plgpu.copy_gmem_to_smem(ends_g.at[row, chunk, lanes], m_s.at[slot, 1], barrier)
                plgpu.copy_gmem_to_smem(gates_g.at[row, chunk, sizes.head(tile(i))], gates_s.at[slot], barrier)

            lax.fori_loop(0, mine, load, None)
            lax.fori_loop(mine - stages, mine, lambda i, _: plgpu.barrier_wait(empty.at[lax.rem(i, stages)]), None)

        @pl.when(group < 2)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            plgpu.barrier_wait(keys)
            own = [buffer.at[group] for buffer in buffers] or [None] * 3

            def multiply(acc):
                plgpu.wgmma(acc, x_s.at[group], x_s.at[1 - group].T)
                return accumulated(acc, wait_n=0)

            scores = pl.run_scoped(multiply, plgpu.ACC((CHUNK, CHUNK), f32))

            def over_tiles(acc_x):
                def step(i, _):
                    slot = lax.rem(i, stages)
                    plgpu.barrier_wait(full.at[slot])
                    out = tile_gradient(
                        x_s, y_s.at[slot], m_s.at[slot], gates_s.at[slot], acc_x, scores, sums_s, own, sizes, interpret
                    )
                    plgpu.copy_smem_to_gmem(sums_s.at[group], sums_g.at[row, chunk, tile(i), group])

                    @pl.when(group == 1)
                    def _():
                        du_s[...] = out.astype(dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(du_s, du_g.at[row, time, pl.ds(tile(i) * TILE, TILE)])

                    plgpu.barrier_arrive(empty.at[slot])

                lax.fori_loop(0, mine, step, None)
                return accumulated(acc_x, wait_n=0)

            total = pl.run_scoped(over_tiles, plgpu.ACC((CHUNK, sizes.key_dim), f32))

            @pl.when(group == 0)
            def _():
                dq_g[share, row, time, channels] = total.astype(dq_g.dtype)

            @pl.when(group == 1)
            def _():
                dk_g[share, row, time, channels] = total.astype(dk_g.dtype)

            plgpu.wait_smem_to_gmem(0)

    summed = jax.ShapeDtypeStruct((slices, *q.shape), dtype if slices == 1 else f32)
    sums = jax.ShapeDtypeStruct((sizes.batch, sizes.chunks, sizes.tiles, 2, 3, CHUNK), f32)
    scratch = [
        shared(2, CHUNK, sizes.key_dim, dtype=dtype),
        shared(stages, 2, CHUNK, TILE, dtype=dtype),
        shared(stages, 2, TILE, sizes.key_dim, dtype=dtype),
        plgpu.SMEM((stages, sizes.rows, CHUNK), f32),
        shared(CHUNK, TILE, dtype=dtype),
        plgpu.SMEM((2, 3, CHUNK), f32),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=5, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    ]
    return launch(
        body,
        (q, k, u, d_o, gates, starts, ends),
        [summed, summed, jax.ShapeDtypeStruct(u.shape, dtype), sums],
        scratch + staging([(CHUNK, TILE), (CHUNK, CHUNK), (CHUNK, CHUNK)], dtype, interpret, 2),
        (sizes.batch, sizes.chunks, sizes.key_heads * slices),
        3,
        interpret,
    )


def tile_gradient(x_s, y_s, m_s, gates, acc_x, scores, sums_s, own, sizes: Sizes, interpret) -> jax.Array:
    """One tile on one side: adds to dX, writes the sums, returns dU [C, 64] on the side of k (and O on that of q).

    With X, Y, M = Q, dO, S on one side and K, U, D' on the other, Z and W = X and Y of the other, w = "in" or "out":
        b = R . Y W^T        dX += b Z + (w . Y) M        (R . X Z^T) W + w . X M
    where R is transposed on the side of k. scores = X Z^T."""
    dtype = y_s.dtype
    group = lax.axis_index("group")
    x, z, y, w, m = x_s.at[group], x_s.at[1 - group], y_s.at[group], y_s.at[1 - group], m_s.at[group]

    def products(acc_pairs, acc_read, acc_out):
        plgpu.wgmma(acc_pairs, y, w.T)
        plgpu.wgmma(acc_read, x, m.T)
        values = plgpu.load(y, layout=WGMMA, optimized=False).astype(f32)
        weight = by_row(gates.at[INTO + group], TILE)
        plgpu.wgmma(acc_x, left_operand((values * weight).astype(dtype), own[0]), m)
        decay = mirrored_decay(gates, group, sizes.rows)
        spread = (decay * scores).astype(dtype)
        pairs = accumulated(acc_pairs, wait_n=2) * decay
        plgpu.wgmma(acc_x, left_operand(pairs.astype(dtype), own[1]), z)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        # the diagonal cancels between the two sides: left out rather than subtracted from itself
        sums_s.at[group, BALANCE][...] = jnp.sum(jnp.where(index(0) != index(1), pairs * scores, 0.0), axis=1)
        read = accumulated(acc_read, wait_n=2) * weight
        sums_s.at[group, LEFT][...] = jnp.sum(values * read, axis=1)
        begin(acc_out, read, interpret)
        plgpu.wgmma(acc_out, left_operand(spread, own[2]), w)
        sums_s.at[group, KEPT][...] = kept(m_s, group, sizes.key_dim)
        plgpu.commit_smem()
        return finish(acc_out, read, interpret)

    square = plgpu.ACC((CHUNK, CHUNK), f32)
    return pl.run_scoped(products, square, square, square)


def kept(m_s, group, key_dim: int) -> jax.Array:
    """Row sums of S^T . D'^T over this side's half of the columns, or over all 64."""
    total = None
    for part in range(-(-key_dim // (2 * TILE))):
        columns = pl.ds((2 * part + group) * TILE if key_dim > TILE else 0, TILE)
        start, end = (
            plgpu.load(m_s.at[side, :, columns], layout=WGMMA, optimized=False).astype(f32) for side in (0, 1)
        )
        more = jnp.sum(start * end, axis=1)
        total = more if total is None else total + more
    return total


def mirrored_decay(gates, group, rows: int) -> jax.Array:
    """R [C, C] float32 on the side of q, R^T on that of k."""
    sign = 1 - 2 * group
    total = gates.at[SUM]
    difference = (by_row(total, CHUNK) - by_column(total, CHUNK)) * sign.astype(f32)
    seen = (index(0) - index(1)) * sign >= 0
    if rows > DOCUMENT:
        document = gates.at[DOCUMENT]
        seen &= by_column(document, CHUNK) == by_row(document, CHUNK)
    return jnp.exp(jnp.where(seen, difference, MASKED))
