"""The delta rule's backward on a Hopper GPU, sequential part: the cotangent of the state, from the last chunk of C = 64
tokens to the first, a Pallas program in Mosaic GPU.

    dW = (R . Q K^T)^T dO + out . K D      dP = (I + A)^-T dW = dU      D' = in_C D + Q^T (in . dO) - K^T (e in . dP)

with the letters of `ops/chunked.py`: D the cotangent of the state at a chunk's end, D' that at its start. What the
forward saved is the inverse (I + A)^-1 and the gate vectors (e in, -, in, out, G); the scores are made again.

A program has a row and 64 columns of V per compute warpgroup; one more warpgroup only issues loads. The cotangent is
kept transposed, D^T [64, K] float32, in registers: D^T, dO^T, dW^T and dP^T are then always a wgmma's left operand.
Where rows are too few to occupy the GPU, the time is cut into parts that are walked at once. A part is an affine map of
its cotangent, D^T -> D^T M + Z: a walk from D = 0 with dO gives Z, one from the rows of the identity without dO gives
M, a few small products the cotangent behind each part, and the walk proper starts there.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.mosaic import (
    MASKED,
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
    tiled,
    transposed,
)

CHUNK = 64
TILE = 64  # columns of K or V of one tile in shared memory: 128 bytes, the widest swizzle
GATES = 5  # rows of the saved gate vectors
LEAST_KEPT = 1e-20
ERASE, INTO, OUT, SUM = 0, 2, 3, 4  # e in; in; out; G (row 1 is the forward's own)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a call: B, T, G, H, K, V; value head h reads key head h // (H // G), and the gates of h // sharing.
    raw_keys: see `delta_flow.py`. routed: chunks keep a part of what they write; see `never_zero`. halves: 2 if a
    key of twice K channels is taken as two, by the gradients."""

    batch: int
    time: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    documents: bool
    sharing: int = 1
    raw_keys: bool = False
    routed: bool = False
    halves: int = 1

    @property
    def chunks(self) -> int:
        return self.time // CHUNK

    @property
    def key_tiles(self) -> int:
        return self.key_dim // TILE

    @property
    def wide(self) -> bool:
        """Whether a state of 64 columns takes half of a thread's registers: see `delta_rule_wide.py`."""
        return self.key_dim > 2 * TILE

    @property
    def value_tiles(self) -> int:
        return self.value_dim // TILE

    def key_head(self, head):
        return lax.div(head, self.heads // self.key_heads)

    def gate_head(self, head):
        return head if self.sharing == 1 else lax.div(head, self.sharing)


def never_zero(keep: jax.Array) -> jax.Array:
    """keep, and next to nothing instead of nothing. A chunk that keeps m of what it has written, S' = in_C S + m J with
    J = K^T (out . W), is one with m "out" for "out". So m <J, D> is a sum that the backward makes anyway, of which
    <J, D>, the cotangent of m, is a quotient; what is left by 1e-20 is nothing beside a state of any size."""
    return jnp.where(jnp.abs(keep) < LEAST_KEPT, LEAST_KEPT, keep)


@dataclasses.dataclass(frozen=True)
class ReverseConfig:
    """How the backward runs, first of all its reverse walk.

    stages: chunks whose loads are in flight. parts: those of the time that are walked at once, or None to choose by the
    rest: walk and summary, microseconds that a chunk takes a program with one and with two compute warpgroups of 64
    columns each; combine, those of the product that takes a cotangent over a part; multiprocessors of the GPU, each of
    which holds one program at a time. automatic_barriers: Mosaic's around every store to shared memory, which the
    programs do not need."""

    stages: int = 2
    parts: int | None = None
    walk: tuple[float, float] = (2.6, 3.5)
    summary: tuple[float, float] = (2.2, 3.0)
    combine: float = 6.0
    multiprocessors: int = 132
    automatic_barriers: bool = True


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one walk is laid out: compute warpgroups of a program, which share q, k and the inverse; chunks whose loads
    are in flight; parts of the time; whether it summarises the parts (all but the first) instead of walking them, and
    the first, too."""

    sizes: Sizes
    groups: int
    stages: int
    parts: int
    automatic_barriers: bool
    summary: bool = False
    whole: bool = False

    @property
    def left_out(self) -> int:  # parts at the front
        return int(self.summary and not self.whole)

    @property
    def holds_ends(self) -> bool:  # in shared memory, to be stored, or to be multiplied
        return self.sizes.wide or not self.summary

    @property
    def columns(self) -> int:  # of the scores, made by one warpgroup
        return CHUNK // self.groups

    @property
    def tile(self) -> int:  # columns of V of a program
        return TILE * self.groups

    @property
    def tiles(self) -> int:  # of V, and in a summary of K behind them
        return (self.sizes.value_dim + self.summary * self.sizes.key_dim) // self.tile

    @property
    def steps(self) -> int:
        return self.sizes.chunks // self.parts

    @property
    def programs(self) -> int:
        return self.sizes.batch * self.sizes.heads * (self.parts - self.left_out) * self.tiles


def plans(config: ReverseConfig, sizes: Sizes, whole: bool = False) -> tuple[Plan, Plan | None]:
    """The walk expected to end first, and the summary that it needs if it has several parts or the whole is asked
    for."""

    def layout(groups: int, parts: int) -> tuple[Plan, Plan | None]:
        walk = Plan(sizes, groups, config.stages, parts, config.automatic_barriers)
        if parts == 1 and not whole:
            return walk, None
        return walk, dataclasses.replace(walk, groups=math.gcd(groups, sizes.key_tiles), summary=True, whole=whole)

    def microseconds(pair: tuple[Plan, Plan | None]) -> float:
        total = 0.0
        for plan, cost in zip(pair, (config.walk, config.summary), strict=True):
            if plan is not None:
                waves = -(-plan.programs // config.multiprocessors)
                total += plan.steps * cost[plan.groups - 1] * waves + plan.summary * plan.parts * config.combine
        return total

    parts = range(1, 65) if config.parts is None else (config.parts,)
    groups = [groups for groups in (2 - sizes.wide, 1) if sizes.value_tiles % groups == 0]
    return min((layout(g, p) for p in parts if sizes.chunks % p == 0 for g in groups), key=microseconds)


class Memory(NamedTuple):
    """Shared memory of a program beside the loads; the buffers are the interpreter's, du and ends no summary's."""

    scores: Any  # [2, groups, C, C // groups]
    scored: Any  # barrier
    du: Any  # [groups, C, 64]
    ends: Any  # [groups, 64, K]; a wide summary's, too
    end_buffer: Any  # [groups, 64, K]
    value_buffers: Any  # [4, groups, 64, C]


class Loads(NamedTuple):
    """The shared memory of a chunk's loads."""

    q: Any  # [C, K]
    k: Any  # [C, K]
    d_o: Any  # [C, 64 groups]
    inverse: Any  # [C, C]
    gates: Any  # [GATES, C]
    document: Any = None  # [C]


class Place(NamedTuple):
    """Where a warpgroup works; the one that loads has no rows of its own."""

    b: Any
    h: Any
    part: Any  # of the time
    tile: Any  # of the rows of D^T: of the columns of V, in a summary of K behind them
    group: Any
    first: Any  # its first row of D^T


def decayed_scores(product, x: Loads, first, columns: int) -> jax.Array:
    """R . Q K^T [C, columns] from the product, for the keys from `first` on."""
    shape = CHUNK, columns
    here = pl.ds(first, columns)
    seen = index(*shape, 1) + first <= index(*shape, 0)
    if x.document is not None:
        seen &= by_column(x.document.at[here], CHUNK) == by_row(x.document, columns)
    exponent = by_row(x.gates.at[SUM], columns) - by_column(x.gates.at[SUM, here], CHUNK)
    return product * jnp.exp(jnp.where(seen, exponent, MASKED))


def reverse_chunk(plan: Plan, memory: Memory, x: Loads, end, step, place: Place, put_end, put_du) -> jax.Array:
    """One chunk of one compute warpgroup: D^T [64, K] at its end -> at its start; D and dU go out by put_*.

    Products in flight, oldest first: K D, scores; dW (one per warpgroup), Q^T dO; dP; K^T dP. A wait names how many may
    stay behind."""
    dtype, columns, group = x.k.dtype, plan.columns, place.group
    gate = lambda i: by_column(x.gates.at[i], TILE)  # noqa: E731
    interpreted = memory.end_buffer  # None on a device
    end_buffer = None if interpreted is None else memory.end_buffer.at[group]
    buffers = [None if interpreted is None else memory.value_buffers.at[i, group] for i in range(4)]

    def run(acc_end, acc_scores, acc_new, acc_p, acc_state):
        narrow = end.astype(dtype)
        plgpu.wgmma(acc_end, left_operand(narrow, end_buffer), x.k.T)
        plgpu.wgmma(acc_scores, x.q, x.k.at[pl.ds(group * columns, columns)].T)
        put_end(narrow)
        d_o = transposed(x.d_o.at[:, pl.ds(group * TILE, TILE)])
        if plan.summary:
            d_o = jnp.where(place.first < plan.sizes.value_dim, d_o.astype(jnp.float32), 0.0).astype(dtype)
        known = accumulated(acc_end, wait_n=1) * gate(OUT)
        kept = end * x.gates[INTO, CHUNK - 1]
        scores = memory.scores.at[lax.rem(step, 2)]
        scores[group] = decayed_scores(accumulated(acc_scores, wait_n=0), x, group * columns, columns).astype(dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.scored)
        begin(acc_new, known, interpreted)
        begin(acc_state, kept, interpreted)
        read = (d_o.astype(jnp.float32) * gate(INTO)).astype(dtype)
        d_o = left_operand(d_o, buffers[0])
        plgpu.barrier_wait(memory.scored)
        for part in range(plan.groups):
            plgpu.wgmma(acc_new.at[:, pl.ds(part * columns, columns)], d_o, scores.at[part])
        plgpu.wgmma(acc_state, left_operand(read, buffers[1]), x.q)
        d_w = finish(acc_new, known, interpreted, wait_n=1)
        plgpu.wgmma(acc_p, left_operand(d_w.astype(dtype), buffers[2]), x.inverse)
        d_p = accumulated(acc_p, wait_n=0)
        plgpu.wgmma(acc_state, left_operand((d_p * -gate(ERASE)).astype(dtype), buffers[3]), x.k)
        put_du(d_p.astype(dtype))
        return finish(acc_state, kept, interpreted)

    shape = TILE, CHUNK
    sizes = shape, (CHUNK, columns), shape, shape, (TILE, x.k.shape[1])
    return pl.run_scoped(run, *(plgpu.ACC(size, jnp.float32) for size in sizes))


def pipeline_of(plan: Plan, place: Place, dtype, step, compute):
    """The loads of a part's chunks, last chunk first, and the walk over them."""
    last = place.part * plan.steps + plan.steps - 1
    tile = lax.min(place.tile, plan.sizes.value_dim // plan.tile - 1)  # columns of K have no dO

    def rows(columns: int, column=0):
        return plgpu.BlockSpec((CHUNK, columns), lambda i: (last - i, column), transforms=tiled(TILE, dtype))

    return plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(plan.steps,),
        memory_registers=40,
        max_concurrent_steps=plan.stages,
        wg_axis="warpgroup",
        num_compute_wgs=plan.groups,
        compute_context=compute,
        in_specs=[
            *(rows(plan.sizes.key_dim),) * 2,
            rows(plan.tile, tile),
            rows(CHUNK),
            plgpu.BlockSpec((GATES, CHUNK), lambda i: (last - i, 0)),
            *(plgpu.BlockSpec((CHUNK,), lambda i: (last - i,)),) * plan.sizes.documents,
        ],
    )


def here(plan: Plan) -> Place:
    program, group = lax.axis_index("program"), lax.axis_index("warpgroup")
    rest, tile = lax.div(program, plan.tiles), lax.rem(program, plan.tiles)
    row, part = lax.div(rest, plan.parts - plan.left_out), lax.rem(rest, plan.parts - plan.left_out)
    b, h = lax.div(row, plan.sizes.heads), lax.rem(row, plan.sizes.heads)
    return Place(b, h, part + plan.left_out, tile, group, tile * plan.tile + group * TILE)


def walk_part(plan: Plan, over_chunk, q, k, d_o, inverse, gates, *refs) -> None:
    """The program of `walk` and `summarise`: refs are documents if any, the cotangents behind the parts and du and the
    chunks' ends (not of a summary), the result of a part, and the scratch."""
    documents, rest = refs[: plan.sizes.documents], list(refs[plan.sizes.documents :])
    behind, du, ends = (None, None, None) if plan.summary else (rest.pop(0), rest.pop(0), rest.pop(0))
    result, scores, scored = rest.pop(0), rest.pop(0), rest.pop(0)
    d_u_room = None if plan.summary else rest.pop(0)
    ends_room = rest.pop(0) if plan.holds_ends else None
    memory, place = Memory(scores, scored, d_u_room, ends_room, *(rest or (None, None))), here(plan)
    b, h, part, _, group, first = place
    rows = pl.ds(first, TILE)

    def step(indices, *loads_and_end):
        *loads, end = loads_and_end
        chunk = part * plan.steps + plan.steps - 1 - indices[0]
        if over_chunk is not None:
            targets = None
            if not plan.summary:
                targets = ends.at[b, h, chunk, rows], du.at[b, pl.ds(chunk * CHUNK, CHUNK), h, rows]
            return over_chunk(plan, memory, Loads(*loads), end, place, targets)

        def put_end(x):  # one store may be on its way: the other kind's, issued after this buffer's last
            if ends is not None:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                memory.ends[group] = x
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(memory.ends.at[group], ends.at[b, h, chunk, rows])

        def put_du(x):
            if du is not None:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                memory.du.at[group].T[...] = plgpu.layout_cast(x, TRANSPOSED)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(memory.du.at[group], du.at[b, pl.ds(chunk * CHUNK, CHUNK), h, rows])

        return reverse_chunk(plan, memory, Loads(*loads), end, indices[0], place, put_end, put_du)

    def compute(pipeline):
        if plan.summary:  # zero for columns of V, rows of the identity for those of K
            shape = TILE, plan.sizes.key_dim
            end = (index(*shape, 0) + (first - plan.sizes.value_dim) == index(*shape, 1)).astype(jnp.float32)
        else:
            end = plgpu.load(behind.at[b, h, part, rows], layout=WGMMA, optimized=False)
        result[b, h, part - plan.left_out, rows] = pipeline(end)
        plgpu.wait_smem_to_gmem(0)

    g, gate_head = plan.sizes.key_head(h), plan.sizes.gate_head(h)
    sources = q.at[b, :, g], k.at[b, :, g], d_o.at[b, :, h], inverse.at[b, gate_head], gates.at[b, gate_head]
    pipeline_of(plan, place, k.dtype, step, compute)(*sources, *(x.at[b] for x in documents))


def launch(plan: Plan, over_chunk, arguments: tuple, behind: tuple, interpret) -> tuple:
    """What the programs of a plan write: du, the ends of the chunks (not a summary) and a part's result."""
    sizes, (q, k, d_o, inverse, gates, documents) = plan.sizes, arguments
    dtype, key_dim, groups = k.dtype, sizes.key_dim, plan.groups
    heads = sizes.batch, sizes.heads
    results = [((*heads, plan.parts - plan.left_out, plan.tiles * plan.tile, key_dim), jnp.float32)]
    scratch = [shared(2, groups, CHUNK, plan.columns, dtype=dtype), plgpu.Barrier(num_arrivals=groups)]
    if not plan.summary:
        results = [(d_o.shape, dtype), ((*heads, sizes.chunks, sizes.value_dim, key_dim), dtype), *results]
        scratch.append(shared(groups, CHUNK, TILE, dtype=dtype))
    end = shared(groups, TILE, key_dim, dtype=dtype)
    scratch += [end] * plan.holds_ends
    if interpret is not None:
        scratch += [end, shared(4, groups, TILE, CHUNK, dtype=dtype)]
    return plgpu.kernel(
        functools.partial(walk_part, plan, over_chunk),
        out_type=tuple(jax.ShapeDtypeStruct(*result) for result in results),
        scratch_types=scratch,
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=groups + 1,
        thread_name="warpgroup",
        compiler_params=parameters(plan.automatic_barriers),
        interpret=interpret,
    )(
        *(q, k, d_o, inverse, gates.reshape(*gates.shape[:2], sizes.chunks * GATES, CHUNK)),
        *(() if documents is None else (documents,)),
        *behind,
    )


def behind_parts(summary: jax.Array, last: jax.Array) -> jax.Array:
    """Cotangents behind each part [B, H, parts, V, K] from the summaries [B, H, parts - 1, V + K, K] of all but the
    first (Z and below it M) and the cotangent behind the last [B, H, V, K]."""
    value_dim = last.shape[2]
    found = [last]
    for part in reversed(range(summary.shape[2])):
        added, map_ = summary[:, :, part, :value_dim], summary[:, :, part, value_dim:]
        found.append(jnp.einsum("bhvi,bhij->bhvj", found[-1], map_, precision=lax.Precision.HIGHEST) + added)
    return jnp.stack(found[::-1], axis=2)


def composed(summary: jax.Array) -> jax.Array:
    """[B, H, parts, V + K, K]: Z and below it M of the time from the start of each part, of those of the parts."""
    value_dim = summary.shape[3] - summary.shape[4]
    found = [summary[:, :, -1]]
    for part in reversed(range(summary.shape[2] - 1)):
        added, map_ = summary[:, :, part, :value_dim], summary[:, :, part, value_dim:]
        moved = jnp.einsum("bhvi,bhij->bhvj", found[-1], map_, precision=lax.Precision.HIGHEST)
        found.append(moved.at[:, :, :value_dim].add(added))
    return jnp.stack(found[::-1], axis=2)


def behind_all(summary: jax.Array, last: jax.Array, hand_over) -> jax.Array:
    """As `behind_parts`, of the summaries of all parts, where others have the time behind this; last: behind theirs."""
    ends, value_dim = composed(summary), last.shape[2]
    added, maps = ends[:, :, :, :value_dim], ends[:, :, :, value_dim:]
    behind = hand_over(last, added[:, :, 0], maps[:, :, 0])[:, :, None]
    moved = jnp.einsum("bhvi,bhpij->bhpvj", behind[:, :, 0], maps[:, :, 1:], precision=lax.Precision.HIGHEST)
    return jnp.concatenate([moved + added[:, :, 1:], behind], axis=2)


def reverse(
    q, k, inverse, gates, documents, d_o, d_final, *,
    sizes: Sizes, config: ReverseConfig, over_chunk=None, hand_over=None, interpret=None,
) -> tuple:  # fmt: skip
    """(du [B, T, H, V], D [B, H, N, V, K] at every chunk's end, d_initial [B, H, V, K] float32); arguments as in
    `backward`. over_chunk: the program of one chunk where it is not `reverse_chunk`."""
    arguments = q, k, d_o, inverse, gates, documents
    walk, summary = plans(config, sizes, hand_over is not None)
    behind = d_final[:, :, None]
    if summary is not None:
        found = launch(summary, over_chunk, arguments, (), interpret)[0]
        behind = behind_parts(found, d_final) if hand_over is None else behind_all(found, d_final, hand_over)
    d_u, ends, starts = launch(walk, over_chunk, arguments, (behind,), interpret)
    return d_u, ends, starts[:, :, 0]
