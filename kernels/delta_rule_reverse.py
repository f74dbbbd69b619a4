"""The delta rule's backward on a Hopper GPU, sequential part: the cotangent of the state, from the last chunk of C = 64
tokens to the first, a Pallas program in Mosaic GPU.

    dW = (R . Q K^T)^T dO + out . K D      dP = (I + A)^-T dW = dU      D' = in_C D + Q^T (in . dO) - K^T (e in . dP)

with the letters of `ops/chunked.py`: D the cotangent of the state at a chunk's end, D' that at its start. What the
forward saved is the inverse (I + A)^-1 and the gate vectors (e in, -, in, out, G); the scores are made again.

A program has a row and 64 columns of V per compute warpgroup; one more warpgroup only issues loads. The cotangent is
kept transposed, D^T [64, K] float32, in registers: D^T, dO^T, dW^T and dP^T are then always a wgmma's left operand.
Mosaic's interpreter knows neither a left operand in registers nor a store into an accumulator: `buffer` and `fresh`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64
TILE = 64  # columns of K or V of one tile in shared memory: 128 bytes, the widest swizzle
GATES = 5  # rows of the saved gate vectors
ERASE, INTO, OUT, SUM = 0, 2, 3, 4  # e in; in; out; G (row 1 is the forward's own)
MASKED = -1e30  # instead of a difference of log decays that must not be seen: its exponential is 0
WGMMA, TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED
PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True)
accumulated = plgpu.wgmma_accumulator_load  # (acc, wait_n=n): its value once at most n later products are in flight


@dataclasses.dataclass(frozen=True)
class ReverseConfig:
    """How the reverse walk is laid out: chunks whose loads are in flight, and compute warpgroups (64 columns of V each)
    that share them."""

    stages: int = 2
    groups: int = 2


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a call: B, T, G, H, K, V; value head h reads key head h // (H // G)."""

    batch: int
    time: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    documents: bool

    @property
    def chunks(self) -> int:
        return self.time // CHUNK

    @property
    def key_tiles(self) -> int:
        return self.key_dim // TILE

    @property
    def value_tiles(self) -> int:
        return self.value_dim // TILE

    def key_head(self, head):
        return lax.div(head, self.heads // self.key_heads)


def tiled(columns: int, dtype) -> tuple:
    """Transforms of a shared-memory array whose last axis has this many columns: what TMA and wgmma agree on."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def shared(*shape: int, dtype) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=tiled(min(shape[-1], TILE), dtype))


def per_column(vector) -> jax.Array:
    return plgpu.load(vector, layout=WGMMA.reduce(0), optimized=False)


def per_row(vector) -> jax.Array:
    return plgpu.load(vector, layout=WGMMA.reduce(1), optimized=False)


def by_column(vector, rows: int = CHUNK) -> jax.Array:
    """A vector [n] in shared memory as [rows, n], the same in every row."""
    x = per_column(vector)
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))


def by_row(vector, columns: int = CHUNK) -> jax.Array:
    """A vector [n] in shared memory as [n, columns], the same in every column."""
    return along_rows(per_row(vector), columns)


def along_rows(x: jax.Array, columns: int = CHUNK) -> jax.Array:
    return lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))


def index(rows: int, columns: int, axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (rows, columns), axis, layout=WGMMA)


def transposed(ref) -> jax.Array:
    """A 16-bit tile [m, n] in shared memory as [n, m] in the layout of wgmma."""
    return plgpu.layout_cast(plgpu.load(ref.T, layout=TRANSPOSED, optimized=False), WGMMA)


def left_operand(x, buffer):
    """x as the left operand of a wgmma: itself, or for the interpreter, which has a `buffer`, a copy in it."""
    if buffer is None:
        return x
    buffer[...] = x
    plgpu.commit_smem()
    return buffer


# ---- reverse ------------------------------------------------------------------------------------------------------


class ReverseMemory(NamedTuple):
    """Shared memory of one program of `reverse` beside the loads; the buffers are the interpreter's."""

    du: Any  # [groups, C, 64]
    ends: Any  # [groups, 64, K]
    scores: Any  # [2, groups, C, C // groups]
    scored: Any  # barrier
    end_buffer: Any = None  # [groups, 64, K]
    value_buffers: Any = None  # [4, groups, 64, C]


class Loads(NamedTuple):
    """The shared memory of a chunk's loads."""

    q: Any  # [C, K]
    k: Any  # [C, K]
    d_o: Any  # [C, 64 groups]
    inverse: Any  # [C, C]
    gates: Any  # [GATES, C]
    document: Any = None  # [C]


def decayed_scores(product, x: Loads, first, columns: int) -> jax.Array:
    """R . Q K^T [C, columns] from the product, for the keys from `first` on."""
    shape = CHUNK, columns
    here = pl.ds(first, columns)
    seen = index(*shape, 1) + first <= index(*shape, 0)
    if x.document is not None:
        seen &= by_column(x.document.at[here]) == by_row(x.document, columns)
    exponent = by_row(x.gates.at[SUM], columns) - by_column(x.gates.at[SUM, here])
    return product * jnp.exp(jnp.where(seen, exponent, MASKED))


def reverse_chunk(memory: ReverseMemory, x: Loads, end, step, group, groups: int, put_end, put_du) -> jax.Array:
    """One chunk of one compute warpgroup: D^T [64, K] at its end -> at its start; D and dU go out by put_*.

    Products in flight, oldest first: K D, scores; dW (one per warpgroup), Q^T dO; dP; K^T dP. A wait names how many may
    stay behind."""
    dtype, columns = x.k.dtype, CHUNK // groups
    gate = lambda i: by_column(x.gates.at[i])  # noqa: E731
    buffers = (None,) * 4 if memory.value_buffers is None else [memory.value_buffers.at[i, group] for i in range(4)]

    def run(acc_end, acc_scores, acc_new, acc_p, acc_state, *fresh):
        narrow = end.astype(dtype)
        plgpu.wgmma(acc_end, left_operand(narrow, memory.end_buffer), x.k.T)
        plgpu.wgmma(acc_scores, x.q, x.k.at[pl.ds(group * columns, columns)].T)
        put_end(narrow)
        d_o = transposed(x.d_o.at[:, pl.ds(group * TILE, TILE)])
        known = accumulated(acc_end, wait_n=1) * gate(OUT)
        kept = end * x.gates[INTO, CHUNK - 1]
        scores = memory.scores.at[lax.rem(step, 2)]
        scores[group] = decayed_scores(accumulated(acc_scores, wait_n=0), x, group * columns, columns).astype(dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.scored)
        if not fresh:
            acc_new[...] = known
            acc_state[...] = kept
        read = (d_o.astype(jnp.float32) * gate(INTO)).astype(dtype)
        d_o = left_operand(d_o, buffers[0])
        plgpu.barrier_wait(memory.scored)
        for part in range(groups):
            plgpu.wgmma(acc_new.at[:, pl.ds(part * columns, columns)], d_o, scores.at[part])
        plgpu.wgmma(acc_state, left_operand(read, buffers[1]), x.q)
        d_w = accumulated(acc_new, wait_n=1)
        d_w = d_w + known if fresh else d_w
        plgpu.wgmma(acc_p, left_operand(d_w.astype(dtype), buffers[2]), x.inverse)
        d_p = accumulated(acc_p, wait_n=0)
        plgpu.wgmma(acc_state, left_operand((d_p * -gate(ERASE)).astype(dtype), buffers[3]), x.k)
        put_du(d_p.astype(dtype))
        start = accumulated(acc_state, wait_n=0)
        return start + kept if fresh else start

    shape = TILE, CHUNK
    sizes = shape, (CHUNK, columns), shape, shape, (TILE, x.k.shape[1])
    fresh = (sizes[0],) if memory.end_buffer is not None else ()  # the interpreter cannot store into an accumulator
    return pl.run_scoped(run, *(plgpu.ACC(size, jnp.float32) for size in (*sizes, *fresh)))


def reverse(q, k, inverse, gates, documents, d_o, d_final, *, sizes: Sizes, config: ReverseConfig, interpret=None):
    """(du [B, T, H, V], D [B, H, N, V, K] at every chunk's end, d_initial [B, H, V, K] float32); arguments as in
    `backward`."""
    dtype = k.dtype
    groups = min(config.groups, sizes.value_tiles)
    width, tiles, last = TILE * groups, sizes.value_tiles // groups, sizes.chunks - 1
    columns = CHUNK // groups

    def body(q_gmem, k_gmem, do_gmem, inverse_gmem, gates_gmem, *refs):
        document_gmem, (final_gmem, du_gmem, ends_gmem, initial_gmem, *scratch) = (
            refs[: sizes.documents],
            refs[sizes.documents :],
        )
        program, group = lax.axis_index("program"), lax.axis_index("warpgroup")
        row, tile = lax.div(program, tiles), lax.rem(program, tiles)
        b, h = lax.div(row, sizes.heads), lax.rem(row, sizes.heads)
        g = sizes.key_head(h)
        place = pl.ds(tile * width + group * TILE, TILE)
        memory = ReverseMemory(*scratch)
        if memory.end_buffer is not None:
            memory = memory._replace(end_buffer=memory.end_buffer.at[group])

        def step(indices, *loads_and_end):
            *loads, end = loads_and_end
            chunk = last - indices[0]

            def put_end(x):  # one store may be on its way: the other kind's, issued after this buffer's last
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                memory.ends[group] = x
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(memory.ends.at[group], ends_gmem.at[b, h, chunk, place])

            def put_du(x):
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                memory.du.at[group].T[...] = plgpu.layout_cast(x, TRANSPOSED)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(memory.du.at[group], du_gmem.at[b, pl.ds(chunk * CHUNK, CHUNK), h, place])

            return reverse_chunk(memory, Loads(*loads), end, indices[0], group, groups, put_end, put_du)

        def compute(pipeline):
            end = plgpu.load(final_gmem.at[b, h, place], layout=WGMMA, optimized=False)
            initial_gmem[b, h, place] = pipeline(end)
            plgpu.wait_smem_to_gmem(0)

        def rows(columns: int, column=0):
            return plgpu.BlockSpec((CHUNK, columns), lambda i: (last - i, column), transforms=tiled(TILE, dtype))

        vector = plgpu.BlockSpec((CHUNK,), lambda i: (last - i,))
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(sizes.chunks,),
            memory_registers=40,
            max_concurrent_steps=config.stages,
            wg_axis="warpgroup",
            num_compute_wgs=groups,
            compute_context=compute,
            in_specs=[
                *(rows(sizes.key_dim),) * 2,
                rows(width, tile),
                rows(CHUNK),
                plgpu.BlockSpec((GATES, CHUNK), lambda i: (last - i, 0)),
                *(vector,) * sizes.documents,
            ],
        )(
            q_gmem.at[b, :, g],
            k_gmem.at[b, :, g],
            do_gmem.at[b, :, h],
            inverse_gmem.at[b, h],
            gates_gmem.at[b, h],
            *(x.at[b] for x in document_gmem),
        )

    scratch = [
        shared(groups, CHUNK, TILE, dtype=dtype),
        shared(groups, TILE, sizes.key_dim, dtype=dtype),
        shared(2, groups, CHUNK, columns, dtype=dtype),
        plgpu.Barrier(num_arrivals=groups),
    ]
    if interpret is not None:
        scratch += [shared(groups, TILE, sizes.key_dim, dtype=dtype), shared(4, groups, TILE, CHUNK, dtype=dtype)]
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(d_o.shape, dtype),
            jax.ShapeDtypeStruct((sizes.batch, sizes.heads, sizes.chunks, sizes.value_dim, sizes.key_dim), dtype),
            jax.ShapeDtypeStruct(d_final.shape, jnp.float32),
        ),
        scratch_types=scratch,
        grid=(sizes.batch * sizes.heads * tiles,),
        grid_names=("program",),
        num_threads=groups + 1,
        thread_name="warpgroup",
        compiler_params=PARAMETERS,
        interpret=interpret,
    )(
        q,
        k,
        d_o,
        inverse,
        gates.reshape(sizes.batch, sizes.heads, sizes.chunks * GATES, CHUNK),
        *(() if documents is None else (documents,)),
        d_final,
    )
