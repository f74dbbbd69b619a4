"""The delta rule's forward on a Hopper GPU: two Pallas programs in Mosaic GPU, chunks of C = 64 tokens.

    A = strict(e R . K K^T)        N = (I + A)^-1 (U - e in . K S)
    O = in . Q S + (R . Q K^T) N   S' = in_C S + K^T (out . N)

with the letters of `ops/chunked.py`: running log decay G inside a token's own document, R_ti = exp(G_t - G_i) for
i <= t in the same document, "in" = exp(G_t) while no document has begun, "out" = exp(G_C - G_i) for the chunk's last
document.

invert   a chunk per program: (I + A)^-1 and the gate vectors. Block doubling, its products in 16-bit wgmma.
walk     a row and 64 columns of V per compute warpgroup, all chunks in order; one more warpgroup only issues loads.
         The state is kept transposed, S^T [64, K] float32, in registers: S^T, X^T = (U - e in . K S)^T and N^T are
         then always the left operand of a wgmma, which may come from registers, so none of them passes shared memory.
         The inverse is applied after the state's part is subtracted, so no product of it with K or U reaches memory.
The pass that summarises parts of the time is in `delta_rule_parts.py`.

Without automatic barriers (see `mosaic.py`) a warpgroup does not meet around every store to shared memory. It need not:
what is stored here is read only after a commit, which is a meeting, and no region is stored again before a later one (a
copy's wait is one, too). Documents are numbered inside a chunk (0 goes on with the state that comes in), as float32.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.delta_flow import LEAST, coefficients
from efla_jax.kernels.mosaic import (
    MASKED,
    TRANSPOSED,
    WGMMA,
    accumulated,
    by_column,
    by_row,
    index,
    left_operand,
    parameters,
    shared,
    tiled,
    transposed,
)

CHUNK = 64
GATES = 5  # rows of the gate vectors, in this order
ERASE, DOCUMENT, INTO, OUT, SUM = range(GATES)  # e in; document number; in; out; G
SCALES = 3  # vectors of a chunk's raw keys, in this order
SQUARE, AFTER, BEFORE = range(SCALES)  # |k|^2; what the inverse is multiplied by from the left and from the right


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a call: B, T, G, H, K, V and the heads of the gates; value head h reads key head h // (H // G), and has
    the gates and the inverse of h // (H // gate_heads)."""

    batch: int
    time: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    gate_heads: int

    @classmethod
    def of(cls, k: jax.Array, u: jax.Array, erase: jax.Array) -> "Sizes":
        batch, time, key_heads, key_dim = k.shape
        return cls(batch, time, key_heads, u.shape[2], key_dim, u.shape[3], erase.shape[1])

    @property
    def chunks(self) -> int:
        return self.time // CHUNK

    @property
    def wide(self) -> bool:
        """Whether a state of 64 columns takes half of a thread's registers: see `delta_rule_wide.py`."""
        return self.key_dim > 128

    def key_head(self, head):
        return lax.div(head, self.heads // self.key_heads)

    def gate_head(self, head):
        return lax.div(head, self.heads // self.gate_heads)


def per_row(vector) -> jax.Array:
    """A vector [n] in shared memory as one value per row of a matrix."""
    return plgpu.load(vector, layout=WGMMA.reduce(1), optimized=False)


# ---- invert -------------------------------------------------------------------------------------------------------


def write_gates(log_decay, erase, document, gates) -> None:
    """The gate vectors [GATES, C] of a chunk from log_decay, erase and document [C] (or None), all in shared memory."""
    row, column = index(CHUNK, CHUNK, 0), index(CHUNK, CHUNK, 1)
    seen = column <= row
    if document is not None:
        seen &= by_column(document, CHUNK) == by_row(document, CHUNK)
    total = jnp.sum(jnp.where(seen, by_column(log_decay, CHUNK), 0.0), axis=1)  # a cumulative sum has no lowering
    gates.at[SUM][...] = total
    plgpu.commit_smem()
    into, out = total, gates[SUM, CHUNK - 1] - total
    if document is not None:
        number = per_row(document)
        into = jnp.where(number == 0.0, into, MASKED)
        out = jnp.where(number == document[CHUNK - 1], out, MASKED)
        gates.at[DOCUMENT][...] = number
    else:
        gates.at[DOCUMENT][...] = plgpu.layout_cast(jnp.zeros_like(total), WGMMA.reduce(1))
    into = jnp.exp(into)
    gates.at[ERASE][...] = per_row(erase) * into
    gates.at[INTO][...] = into
    gates.at[OUT][...] = jnp.exp(out)


def solve_step(step: str, products, log_decay, beta, gates, scales) -> tuple[jax.Array, jax.Array]:
    """(s w |k| per row, 1 / |k| per column) as [C, C] of `delta_flow.py`, from the products K K^T of raw keys and what
    is in shared memory; the gate of the erase and the SCALES of the chunk are written."""
    diagonal = index(CHUNK, CHUNK, 0) == index(CHUNK, CHUNK, 1)
    square = jnp.sum(jnp.where(diagonal, products, 0.0), axis=1)
    live = square > 0.0
    inverse_norm = jnp.where(live, lax.rsqrt(jnp.where(live, square, 1.0)), 0.0)
    write, seen = coefficients(step, jnp.maximum(per_row(beta), LEAST), per_row(log_decay), square)
    written = write * (square * inverse_norm)
    gates.at[ERASE][...] = seen * per_row(gates.at[INTO])
    scales.at[SQUARE][...] = square
    scales.at[AFTER][...] = inverse_norm
    scales.at[BEFORE][...] = written
    plgpu.commit_smem()
    return lax.broadcast_in_dim(seen * written, (CHUNK, CHUNK), (0,)), by_column(scales.at[AFTER], CHUNK)


def negative_triangle(k, log_decay, erase, document, gates, step: str | None, scales) -> jax.Array:
    """-A [C, C] float32 of a chunk, and its gate vectors, written while K K^T is multiplied. k [K // 64, C, 64].
    With a step, k is raw and `erase` is beta: see `delta_flow.py`."""

    def multiply(acc):
        for part in range(k.shape[0]):
            plgpu.wgmma(acc, k.at[part], k.at[part].T)
        write_gates(log_decay, erase, document, gates)
        seen = index(CHUNK, CHUNK, 1) < index(CHUNK, CHUNK, 0)
        if document is not None:
            seen &= by_column(document, CHUNK) == by_row(document, CHUNK)
        total = gates.at[SUM]
        decay = jnp.exp(jnp.where(seen, by_row(total, CHUNK) - by_column(total, CHUNK), MASKED))
        products = accumulated(acc, wait_n=0)
        if step is None:
            return products * (decay * -by_row(erase, CHUNK))
        rows, columns = solve_step(step, products, log_decay, erase, gates, scales)
        return products * (decay * -rows * columns)

    return pl.run_scoped(multiply, plgpu.ACC((CHUNK, CHUNK), jnp.float32))


def unit_lower_inverse(negative, triangle, inverses, buffer) -> jax.Array:
    """(I + A)^-1 from -A, strictly lower triangular [C, C] float32: block doubling, 2 rows, 4, 8, ... C.

    From the inverse X of the block diagonal, the next is X + X E X, E the entries of -A that join two neighbouring
    blocks. X is block diagonal, so X E is X (-A) with the rest masked away: -A is stored once. A Neumann product would
    do with fewer steps and fail for nearly parallel keys. triangle [C, C] and inverses [2, C, C] are shared memory, in
    the dtype of the products; there are two of the latter because other warps may still read the last one."""
    dtype = triangle.dtype
    triangle[...] = negative.astype(dtype)
    row, column = index(CHUNK, CHUNK, 0), index(CHUNK, CHUNK, 1)
    inverse = jnp.where(row == column, 1.0, jnp.where((row ^ column) == 1, negative, 0.0)).astype(jnp.float32)

    def times(right, acc_left):
        def multiply(acc):
            plgpu.wgmma(acc, acc_left, right)
            return accumulated(acc, wait_n=0)

        return pl.run_scoped(multiply, plgpu.ACC((CHUNK, CHUNK), jnp.float32))

    for level in range(1, CHUNK.bit_length() - 1):
        narrow = inverse.astype(dtype)
        right = inverses.at[level % 2]
        right[...] = narrow
        plgpu.commit_smem()
        joined = times(triangle, left_operand(narrow, buffer))
        # row ^ column would serve every level, and stay in 32 registers until the last.
        joins = ((row >> level) ^ (column >> level)) == 1
        joined = left_operand(jnp.where(joins, joined, 0.0).astype(dtype), buffer)
        if buffer is not None:
            inverse = inverse + times(right, joined)
            continue

        def add(acc, inverse=inverse, joined=joined, right=right):
            acc[...] = inverse
            plgpu.wgmma(acc, joined, right)
            return accumulated(acc, wait_n=0)

        inverse = pl.run_scoped(add, plgpu.ACC((CHUNK, CHUNK), jnp.float32))
    return inverse


class InvertMemory(NamedTuple):
    """Shared memory of a program of `invert`."""

    k: Any  # [K // 64, C, 64]
    vectors: Any  # [3, C] log decay, erase, document
    gates: Any  # [GATES, C]
    triangle: Any  # [C, C]
    inverses: Any  # [2, C, C]
    loaded: Any  # barrier
    scales: Any = None  # [SCALES, C], with a step
    buffer: Any = None  # [C, C], interpreter only


def invert_scratch(key_dim: int, vectors: int, dtype, precision, raw_keys: bool, interpret: bool) -> list:
    """The fields of `InvertMemory` in their order."""
    return [
        shared(key_dim // 64, CHUNK, 64, dtype=dtype),
        plgpu.SMEM((vectors, CHUNK), jnp.float32),
        plgpu.SMEM((GATES, CHUNK), jnp.float32),
        shared(CHUNK, CHUNK, dtype=precision),
        shared(2, CHUNK, CHUNK, dtype=precision),
        plgpu.Barrier(num_arrivals=vectors + key_dim // 64),
        *[plgpu.SMEM((SCALES, CHUNK), jnp.float32)] * raw_keys,
        *[shared(CHUNK, CHUNK, dtype=precision)] * interpret,
    ]


def invert(
    k, erase, log_decay, documents, *, precision, step=None, automatic_barriers: bool = True, interpret=None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(I + A)^-1 [B, H, T, C] in the dtype of k, the gate vectors [B, H, N, GATES, C] float32 of every chunk and None;
    with a step, where k is raw and `erase` is beta, T of `delta_flow.py` and, instead of None, |k|^2 [B, H, T] float32.

    k [B, T, G, K]; erase, log_decay [B, H, T] float32; documents [B, T] float32 or None; T a multiple of C. precision
    is the 16-bit dtype of the products: float16 has the mantissa of TF32, and as long as erase times the square of
    the key's length is at most 2, the entries of every block's inverse are of the order of 1."""
    batch, time, key_heads, key_dim = k.shape
    heads = erase.shape[1]
    sizes = Sizes(batch, time, key_heads, heads, key_dim, 0, heads)
    vectors = 2 if documents is None else 3

    def delta_rule_invert(k_gmem, *refs):
        vector_gmem, refs = refs[:vectors], refs[vectors:]
        inverse_gmem, gates_gmem, *rest = refs
        square_gmem = None if step is None else rest.pop(0)
        buffer = None if interpret is None else rest.pop()
        memory = InvertMemory(*rest)._replace(buffer=buffer)
        program = lax.axis_index("program")
        row, chunk = lax.div(program, sizes.chunks), lax.rem(program, sizes.chunks)
        b, h = lax.div(row, heads), lax.rem(row, heads)
        tokens = pl.ds(chunk * CHUNK, CHUNK)
        for part in range(key_dim // 64):
            source = k_gmem.at[b, tokens, sizes.key_head(h), pl.ds(part * 64, 64)]
            plgpu.copy_gmem_to_smem(source, memory.k.at[part], memory.loaded)
        for i, ref in enumerate(vector_gmem):
            source = ref.at[b, tokens] if i == 2 else ref.at[b, h, tokens]
            plgpu.copy_gmem_to_smem(source, memory.vectors.at[i], memory.loaded)
        plgpu.barrier_wait(memory.loaded)
        document = None if documents is None else memory.vectors.at[2]
        decay, erase = memory.vectors.at[0], memory.vectors.at[1]
        negative = negative_triangle(memory.k, decay, erase, document, memory.gates, step, memory.scales)
        inverse = unit_lower_inverse(negative, memory.triangle, memory.inverses, memory.buffer)
        if step is not None:
            inverse = inverse * (by_row(memory.scales.at[AFTER], CHUNK) * by_column(memory.scales.at[BEFORE], CHUNK))
            plgpu.copy_smem_to_gmem(memory.scales.at[SQUARE], square_gmem.at[b, h, tokens])
        result = memory.k.at[0]  # the keys are no longer needed
        result[...] = inverse.astype(k.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, inverse_gmem.at[b, h, tokens])
        plgpu.copy_smem_to_gmem(memory.gates, gates_gmem.at[b, h, chunk])
        plgpu.wait_smem_to_gmem(0)

    inverse, gates, *square = plgpu.kernel(
        delta_rule_invert,
        out_type=[
            jax.ShapeDtypeStruct((batch, heads, time, CHUNK), k.dtype),
            jax.ShapeDtypeStruct((batch, heads, sizes.chunks, GATES, CHUNK), jnp.float32),
            *([] if step is None else [jax.ShapeDtypeStruct(erase.shape, jnp.float32)]),
        ],
        scratch_types=invert_scratch(key_dim, vectors, k.dtype, precision, step is not None, interpret is not None),
        grid=(batch * heads * sizes.chunks,),
        grid_names=("program",),
        compiler_params=parameters(automatic_barriers),
        interpret=interpret,
    )(k, log_decay, erase, *([] if documents is None else [documents]))
    return inverse, gates, square[0] if square else None


# ---- walk ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a walk is laid out: compute warpgroups that share q, k and the inverse (each has 64 columns of V), chunks
    whose loads are in flight, parts of the time that are walked at once; whether what the last chunk left is decayed
    early, while the new vectors are multiplied; automatic barriers or not; whether there are documents, whether the
    state at each chunk's start is kept, and whether the interpreter runs it; parts that are summarised, or None for all
    but the last."""

    sizes: Sizes
    groups: int
    stages: int
    parts: int
    early: bool
    automatic_barriers: bool
    documents: bool
    save: bool
    interpret: bool
    summaries: int | None = None

    @property
    def summarised(self) -> int:
        return self.parts - 1 if self.summaries is None else self.summaries

    @property
    def steps(self) -> int:  # chunks of a part
        return self.sizes.chunks // self.parts

    @property
    def columns(self) -> int:  # of the scores, made by one warpgroup
        return CHUNK // self.groups

    @property
    def tile(self) -> int:  # columns of V of a program
        return 64 * self.groups

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a program on the device, barriers rounded up."""
        key_dim = self.sizes.key_dim
        loads = 2 * CHUNK * (2 * key_dim + self.tile + CHUNK) + 4 * GATES * CHUNK
        own = 2 * CHUNK * (self.tile + 2 * CHUNK + (self.save or self.sizes.wide) * self.groups * key_dim)
        return self.stages * loads + own + 1024


class WalkMemory(NamedTuple):
    """Shared memory of a program of `walk` beside the loads; of what has `groups`, a warpgroup's own part."""

    o: Any  # [C, 64]
    scores: Any  # [2, groups, C, C // groups], of all; of a wide one [2, C, C], the second for what was written
    scores_there: Any  # barrier, or None
    states: Any  # [64, K], or None
    state_buffer: Any  # [64, K], interpreter only
    value_buffer: Any  # [64, C], interpreter only; of a wide one [2, 64, C]


def walk_scratch(plan: Plan, dtype) -> list:
    """Scratch of a program of `walk`, in the order that `walk_memory` reads."""
    key_dim = plan.sizes.key_dim
    states = shared(plan.groups, 64, key_dim, dtype=dtype)
    if plan.sizes.wide:
        squares = shared(2, CHUNK, CHUNK, dtype=dtype)
        return [shared(CHUNK, 64, dtype=dtype), squares, shared(64, key_dim, dtype=dtype), *[squares] * plan.interpret]
    return [
        shared(plan.groups, CHUNK, 64, dtype=dtype),
        shared(2, plan.groups, CHUNK, plan.columns, dtype=dtype),
        plgpu.Barrier(num_arrivals=plan.groups),
        *[states] * plan.save,
        *[states, shared(plan.groups, 64, CHUNK, dtype=dtype)] * plan.interpret,
    ]


def walk_memory(plan: Plan, scratch: list, group) -> WalkMemory:
    """What `walk_scratch` asked for, as this warpgroup sees it."""
    if plan.sizes.wide:
        o, squares, states, *rest = scratch
        return WalkMemory(o, squares, None, states, None, *(rest or [None]))
    o, scores, scores_there, *rest = scratch
    states = rest.pop(0).at[group] if plan.save else None
    buffers = [buffer.at[group] for buffer in rest] if plan.interpret else (None, None)
    return WalkMemory(o.at[group], scores, scores_there, states, *buffers)


class Loads(NamedTuple):
    """The shared memory of a chunk's loads."""

    q: Any  # [C, K]
    k: Any  # [C, K]
    u: Any  # [C, tile]
    inverse: Any  # [C, C]
    gates: Any  # [GATES, C]


def decayed_scores(plan: Plan, acc, x: Loads, group, wait: int) -> jax.Array:
    """(R . Q K^T)^T: this warpgroup's columns [C, C // groups], once the product K Q^T is there."""
    product = accumulated(acc, wait_n=wait)
    first, shape = group * plan.columns, (CHUNK, plan.columns)
    source, target = index(*shape, 0), index(*shape, 1) + first
    here = pl.ds(first, plan.columns)
    seen = target >= source
    if plan.documents:
        seen &= by_column(x.gates.at[DOCUMENT, here], CHUNK) == by_row(x.gates.at[DOCUMENT], plan.columns)
    exponent = by_column(x.gates.at[SUM, here], CHUNK) - by_row(x.gates.at[SUM], plan.columns)
    return product * jnp.exp(jnp.where(seen, exponent, MASKED))


class Targets(NamedTuple):
    """Where a chunk's results go in global memory: o [C, 64], S^T at its start and, of a wide walk, what is written
    [C, 64]; None if they are not saved."""

    o: Any
    state: Any = None
    written: Any = None


class Place(NamedTuple):
    """Where a program of `walk` works: batch row, value head, key head, part of the time, first chunk, and columns of V
    of the program (a tile's number) and of this warpgroup (a slice)."""

    row: Any
    head: Any
    key_head: Any
    part: Any
    first: Any
    tile: Any
    columns: Any

    @classmethod
    def of(cls, plan: Plan, program, group) -> "Place":
        sizes = plan.sizes
        tiles = sizes.value_dim // plan.tile
        rest, tile = lax.div(program, tiles), lax.rem(program, tiles)
        rest, part = lax.div(rest, plan.parts), lax.rem(rest, plan.parts)
        row, head = lax.div(rest, sizes.heads), lax.rem(rest, sizes.heads)
        columns = pl.ds(tile * plan.tile + group * 64, 64)
        return cls(row, head, sizes.key_head(head), part, part * plan.steps, tile, columns)


def send(x, memory, target, transpose: bool = False) -> None:
    """Copy registers to global memory by way of shared memory, once the last such copy has left it."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if transpose:
        memory.T[...] = plgpu.layout_cast(x, TRANSPOSED)
    else:
        memory[...] = x
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(memory, target)


def store_state(state, target) -> None:
    """S^T [64, K] in registers -> S [K, 64] in global memory, whose lines of 32 bytes are written whole."""
    target.T[...] = plgpu.layout_cast(state, TRANSPOSED)


def walk_chunk(plan: Plan, memory: WalkMemory, x: Loads, state, chunk, group, targets: Targets) -> jax.Array:
    """One chunk of one compute warpgroup: S^T [64, K] at its start -> at its end; o and S^T at its start go out.

    Products in the order of issue: K S, scores, Q S; new vectors; o; state. A wait says how many may stay behind."""
    dtype, shape = x.k.dtype, (64, CHUNK)
    gate = lambda i: by_column(x.gates.at[i], 64)  # noqa: E731

    def run(acc_known, acc_read, acc_new, acc_state, acc_scores, *fresh):
        acc_o = fresh[0] if fresh else acc_read
        narrow = state.astype(dtype)
        start = left_operand(narrow, memory.state_buffer)
        plgpu.wgmma(acc_known, start, x.k.T)
        plgpu.wgmma(acc_scores, x.k, x.q.at[pl.ds(group * plan.columns, plan.columns)].T)
        plgpu.wgmma(acc_read, start, x.q.T)
        u = transposed(x.u.at[:, pl.ds(group * 64, 64)]).astype(jnp.float32)
        missing = (u - accumulated(acc_known, wait_n=2) * gate(ERASE)).astype(dtype)
        plgpu.wgmma(acc_new, left_operand(missing, memory.value_buffer), x.inverse.T)
        scores = memory.scores.at[lax.rem(chunk, 2)]
        scores[group] = decayed_scores(plan, acc_scores, x, group, wait=2).astype(dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.scores_there)
        if plan.save:  # not before: the last chunk's o is still being copied when a chunk begins
            send(narrow, memory.states, targets.state)
        new = None if plan.early else accumulated(acc_new, wait_n=0)
        read, kept = accumulated(acc_read, wait_n=1) * gate(INTO), state * x.gates[INTO, CHUNK - 1]
        if not fresh:
            acc_o[...] = read
            acc_state[...] = kept
        new = accumulated(acc_new, wait_n=0) if plan.early else new
        written = left_operand(new.astype(dtype), memory.value_buffer)
        plgpu.barrier_wait(memory.scores_there)
        for part in range(plan.groups):
            plgpu.wgmma(acc_o.at[:, pl.ds(part * plan.columns, plan.columns)], written, scores.at[part])
        if fresh:  # the buffer of the left operand is about to be overwritten
            plgpu.wgmma_wait(0)
        plgpu.wgmma(acc_state, left_operand((new * gate(OUT)).astype(dtype), memory.value_buffer), x.k)
        o = accumulated(acc_o, wait_n=1)
        send((o + read if fresh else o).astype(dtype), memory.o, targets.o, transpose=True)
        after = accumulated(acc_state, wait_n=0)
        return after + kept if fresh else after

    sizes = [shape] * 3 + [(64, plan.sizes.key_dim), (CHUNK, plan.columns)] + [shape] * plan.interpret
    return pl.run_scoped(run, *(plgpu.ACC(size, jnp.float32) for size in sizes))


def pipeline_of(plan: Plan, first, keys: int, tile, dtype, step, compute):
    """The loads of a part's chunks from `first` on, and the walk over them: so many arrays of K channels, a tile of the
    values, the inverse, the gates."""

    def rows(columns, column=0):
        return plgpu.BlockSpec((CHUNK, columns), lambda i: (first + i, column), transforms=tiled(columns, dtype))

    return plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(plan.steps,),
        memory_registers=40,
        max_concurrent_steps=plan.stages,
        wg_axis="warpgroup",
        num_compute_wgs=plan.groups,
        compute_context=compute,
        in_specs=[
            *(rows(plan.sizes.key_dim),) * keys,
            rows(plan.tile, tile),
            rows(CHUNK),
            plgpu.BlockSpec((GATES, CHUNK), lambda i: (first + i, 0)),
        ],
    )


def walk_program(plan: Plan, dtype, over_chunk, *refs) -> None:
    """The body of `walk`: one row, one tile of V, one part of the time."""
    q, k, u, inverse, gates, initial, o, final, *rest = refs
    states = rest.pop(0) if plan.save else None
    written = rest.pop(0) if plan.save and plan.sizes.wide else None
    group = lax.axis_index("warpgroup")
    memory = walk_memory(plan, rest, group)
    place = Place.of(plan, lax.axis_index("program"), group)
    row, head, first, columns = place.row, place.head, place.first, place.columns

    def step(indices, *loads_and_state):
        *loads, state = loads_and_state
        chunk = first + indices[0]
        tokens = pl.ds(chunk * CHUNK, CHUNK)
        targets = Targets(
            o.at[row, tokens, head, columns],
            None if states is None else states.at[row, head, chunk, columns],
            None if written is None else written.at[row, tokens, head, columns],
        )
        return over_chunk(plan, memory, Loads(*loads), state, indices[0], group, targets)

    def compute(pipeline):
        state = plgpu.load(initial.at[place.part, row, head, :, columns].T, layout=TRANSPOSED, optimized=False)
        store_state(pipeline(plgpu.layout_cast(state, WGMMA)), final.at[place.part, row, head, :, columns])
        plgpu.wait_smem_to_gmem(0)

    pipeline_of(plan, first, 2, place.tile, dtype, step, compute)(
        *(x.at[row, :, place.key_head] for x in (q, k)),
        u.at[row, :, head],
        *(x.at[row, plan.sizes.gate_head(head)] for x in (inverse, gates)),
    )


def walk(
    q, k, u, inverse, gates, initial_state, *, plan: Plan, over_chunk=walk_chunk, interpret=None
) -> tuple:  # fmt: skip
    """(o [B, T, H, V], last states [parts, B, H, K, V] float32, *saved): if the plan saves, states at the chunks'
    starts [B, H, N, V, K], of a wide walk what was written [B, T, H, V], too. over_chunk: the program of one chunk.

    q, k [B, T, G, K]; u [B, T, H, V]; inverse and gates of `invert`; initial_state [parts, B, H, K, V] float32, the
    state before each part of the time, as the last states are those after each."""
    sizes, dtype = plan.sizes, k.dtype
    states = (sizes.batch, sizes.heads, sizes.chunks, sizes.value_dim, sizes.key_dim)
    types = [(u.shape, dtype), (initial_state.shape, jnp.float32), *[(states, dtype)] * plan.save]
    types += [(u.shape, dtype)] * (plan.save and sizes.wide)

    def delta_rule_walk(*refs):
        walk_program(plan, dtype, over_chunk, *refs)

    results = plgpu.kernel(
        delta_rule_walk,
        out_type=[jax.ShapeDtypeStruct(*x) for x in types],
        scratch_types=walk_scratch(plan, dtype),
        grid=(sizes.batch * sizes.heads * plan.parts * (sizes.value_dim // plan.tile),),
        grid_names=("program",),
        num_threads=plan.groups + 1,
        thread_name="warpgroup",
        compiler_params=parameters(plan.automatic_barriers),
        interpret=interpret,
    )(q, k, u, inverse, gates.reshape(*gates.shape[:2], -1, CHUNK), initial_state)
    return tuple(results)
