"""The gradients of the nodes of blocks of the log-linear delta rule on a Hopper GPU; letters as in
`log_linear_delta_inside.py`.

nodes    of a block's N or S, whose cotangent is D; T2 = v2 B2 - e2 L M1 with L = K2 K1^T, (v, B) = (-e, K) or (out, U):
             dT2 = X2^T K2 D        a2 = -strict(dT2 M2^T)        a21 = -dT2 M1^T        dM1 = K1 D - (e2 L)^T dT2
             dT1 = X1^T dM1         a1 = -strict(dT1 M1^T)        dB = v dT        dv = rowsum(B . dT)
             dK = M D^T, and through K K^T from a1, a2 and a21 as above
de has rowsum(a . K K^T), a sum over M that nearly cancels where keys are nearly parallel, unlike what M is rounded by.
As strict(K K^T) M = (T - M) / e, it is rowsum(dT . (M - T)) / e of float32 M instead, unless e is so small that the
division would cost more: then a chunk's keys cancel nothing.
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
    TILE,
    Config,
    Sizes,
    chunk_tokens,
    columns,
    f32,
    matrix,
    multiply,
)
from efla_jax.kernels.log_linear_delta_inside import SQUARE, masked, put, send, times_sum
from efla_jax.kernels.mosaic import (
    WGMMA,
    accumulated,
    by_column,
    by_row,
    left_operand,
    narrow_indices,
    parameters,
    shared,
    transposed,
)

ROOM = CHUNKS  # where dM and dT begin in `work`
LEAST = 1 / CHUNK  # e from which on it divides


class NodeMemory(NamedTuple):
    """Shared memory of `node_gradients`: k; k or u, both [2, C, K]; M of the chunks, then dM and dT [4, C, K]; X
    [2, C, C]; vectors [2, 128]; D [K, K]; pairs [warpgroups, 2, C, C]; sums [2 warpgroups + 1, 128]: dv of each one's
    columns, d(-e), dT . (M - T) of each one's columns; barriers of the loads and of the warpgroups' meeting; the
    interpreter's left operand."""

    k: Any
    values: Any
    work: Any
    inverse: Any
    vectors: Any
    cotangent: Any
    pairs: Any
    sums: Any
    loaded: Any
    met: Any
    left: Any = None


def load_node(refs: tuple, memory: NodeMemory, at: tuple, sizes: Sizes) -> None:
    (k, u, inverse, vectors, *d_nodes), (row, block, head, kind, place) = refs, at
    g = sizes.key_head(head)

    def start(from_, to) -> None:
        plgpu.copy_gmem_to_smem(from_, to, memory.loaded)

    for chunk in range(CHUNKS):
        tokens = chunk_tokens(block, chunk)
        start(k.at[row, tokens, g], memory.k.at[chunk])
        start(inverse.at[row, head, tokens], memory.inverse.at[chunk])

        @pl.when(kind == 0)
        def _(chunk=chunk, tokens=tokens):
            start(k.at[row, tokens, g], memory.values.at[chunk])

        @pl.when(kind == 1)
        def _(chunk=chunk, tokens=tokens):
            start(u.at[row, tokens, head], memory.values.at[chunk])

    start(vectors.at[row, block * sizes.heads + head], memory.vectors)
    pair, odd = lax.div(place, 2), lax.rem(place, 2)

    @pl.when(odd == 0)
    def _():
        start(d_nodes[0].at[kind, row, pair, head], memory.cotangent)

    for number, source in enumerate(d_nodes[1:]):

        @pl.when((odd == 1) & (kind == number))
        def _(source=source):
            start(source.at[0, row, pair, head], memory.cotangent)


def products_of(terms, shape) -> jax.Array:
    """The sum of the products of pairs in shared memory."""

    def run(acc):
        for left, right in terms:
            plgpu.wgmma(acc, left, right)
        return accumulated(acc, wait_n=0)

    return pl.run_scoped(run, plgpu.ACC(shape, f32))


def solve_columns(memory: NodeMemory, kind, group, interpret) -> tuple[jax.Array, jax.Array]:
    """Of 64 columns M1 and M2 into `solved`, -e L into `pairs`, what it is rounded to and what it is rounded by, and
    (M1 - T1, M2 - T2) float32."""
    dtype, here, pairs = memory.k.dtype, columns(group), memory.pairs.at[group]
    first, second = pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)
    solved, room = [memory.work.at[chunk, :, here] for chunk in range(CHUNKS)], memory.work.at[ROOM + 1, :, here]
    x = matrix(memory.inverse.at[0]) * by_column(memory.vectors.at[kind, first], CHUNK)
    left = None if memory.left is None else memory.left.at[group]
    values = memory.values.at[0, :, here]
    m = multiply(left_operand(x.astype(dtype), left), values, SQUARE)
    put(solved[0], m)
    # As the product has it: X has ones on its diagonal.
    begun = m - matrix(values) * by_row(memory.vectors.at[kind, first], TILE).astype(dtype).astype(f32)
    known = multiply(memory.k.at[1], memory.k.at[0].T, SQUARE) * by_row(memory.vectors.at[0, second], CHUNK)
    put(pairs.at[0], known)
    put(pairs.at[1], known - known.astype(dtype).astype(f32))
    start = matrix(memory.values.at[1, :, here]) * by_row(memory.vectors.at[kind, second], TILE)
    start = times_sum(start, [(pairs.at[part], solved[0]) for part in range(2)], interpret)
    put(room, start)
    m = multiply(memory.inverse.at[1], room, SQUARE)
    put(solved[1], m)
    return begun, m - start.astype(dtype).astype(f32)


def solve_back(memory: NodeMemory, kind, group, inside: tuple) -> None:
    """Of 64 columns dT of both chunks into `work`, dv and dT . (M - T) into `sums`, and dU, if that is what dB is, over
    u. inside: what `solve_columns` gave."""
    here, pairs = columns(group), memory.pairs.at[group]
    for chunk in reversed(range(CHUNKS)):
        room, values = memory.work.at[ROOM + chunk, :, here], memory.values.at[chunk, :, here]
        terms = [(memory.k.at[chunk], memory.cotangent.at[:, here])]
        if chunk == 0:
            terms += [(pairs.at[part].T, memory.work.at[ROOM + 1, :, here]) for part in range(2)]
        put(room, products_of(terms, SQUARE))
        d_start, tokens = multiply(memory.inverse.at[chunk].T, room, SQUARE), pl.ds(chunk * CHUNK, CHUNK)
        memory.sums.at[group, tokens][...] = jnp.sum(matrix(values) * d_start, axis=1)
        memory.sums.at[inside_row(memory, group), tokens][...] = jnp.sum(inside[chunk] * d_start, axis=1)
        put(room, d_start)

        @pl.when(kind == 1)
        def _(d_start=d_start, tokens=tokens, values=values):
            put(values, d_start * by_row(memory.vectors.at[kind, tokens], TILE))


def inside_row(memory: NodeMemory, group):
    """Which of `sums` has dT . (M - T) of a warpgroup's columns."""
    return memory.pairs.shape[0] + 1 + group


def meet(barrier) -> None:
    """Both warpgroups have come here, and see what the other wrote."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def per_row(vector) -> jax.Array:
    """A vector in shared memory, one entry for each row of a matrix."""
    return plgpu.load(vector, layout=WGMMA.reduce(1), optimized=False)


def erased_inside(memory: NodeMemory, tokens, direct) -> jax.Array:
    """Of a chunk's tokens rowsum(a . K K^T), which is `direct` where their e is small."""
    rows, erase = memory.pairs.shape[0], -per_row(memory.vectors.at[0, tokens])
    total = sum(per_row(memory.sums.at[inside_row(memory, group), tokens]) for group in range(rows))
    return jnp.where(erase >= LEAST, total / jnp.maximum(erase, LEAST), direct)


def send_chunk(memory: NodeMemory, chunk, kind, group, d_k, d_u, interpret) -> None:
    """dK of a chunk: through M and as B, from its own triangle, and from the pairs of both chunks; its d(-e)."""
    work, pairs, k, dtype = memory.work, memory.pairs.at[group], memory.k.at[chunk], memory.k.dtype
    here, second, wide = pl.ds(chunk * CHUNK, CHUNK), pl.ds(CHUNK, CHUNK), memory.k.shape[1:]

    @pl.when(kind == 1)
    def _():
        plgpu.copy_smem_to_gmem(memory.values.at[chunk], d_u)

    triangle = masked(-multiply(work.at[ROOM + chunk], work.at[chunk].T, SQUARE), 0, strict=True)
    put(pairs.at[1], triangle * -by_row(memory.vectors.at[0, here], CHUNK))
    own = erased_inside(memory, here, jnp.sum(triangle * multiply(k, k.T, SQUARE), axis=1))
    joined = multiply(work.at[ROOM + 1], work.at[0].T, SQUARE)  # -a21
    put(pairs.at[0], joined * by_row(memory.vectors.at[0, second], CHUNK))
    joined = jnp.sum(joined * multiply(memory.k.at[1], memory.k.at[0].T, SQUARE), axis=1)
    joined = joined * lax.convert_element_type(chunk, f32)  # they are the second chunk's
    memory.sums.at[memory.pairs.shape[0], here][...] = joined - own
    scale = by_row(memory.vectors.at[0, here], wide[1]) * lax.convert_element_type(1 - kind, f32)
    terms = (work.at[chunk], memory.cotangent.T), (pairs.at[1], k), (pairs.at[1].T, k)
    keys = times_sum(matrix(work.at[ROOM + chunk]) * scale, terms, interpret)
    # Rows of the pairs are of the second chunk, columns of the first.
    mine = jnp.where(chunk == 1, matrix(pairs.at[0]), transposed(pairs.at[0]).astype(f32))
    put(pairs.at[1], mine.astype(dtype))
    keys = times_sum(keys, [(pairs.at[1], memory.k.at[1 - chunk])], interpret)
    send(work.at[ROOM - chunk], keys, d_k)  # dT of the first chunk or M of the second one, that only this has used


def node_gradient_program(sizes: Sizes, inputs: tuple, results: tuple, place, memory: NodeMemory, interpret) -> None:
    """The body of `node_gradients`: N (kind 0) or S (kind 1) of a head of a block, which is this node of its level."""
    (d_k, d_u, sums), group, groups = results, lax.axis_index("group"), sizes.dim // TILE
    row, block, pair = (lax.axis_index(name) for name in ("row", "block", "pair"))
    head, kind = lax.div(pair, 2), lax.rem(pair, 2)

    @pl.when(group == 0)
    def _():
        load_node(inputs, memory, (row, block, head, kind, place), sizes)

    plgpu.barrier_wait(memory.loaded)
    solve_back(memory, kind, group, solve_columns(memory, kind, group, interpret))
    meet(memory.met)

    def chunk(i, _):
        number = i * groups + group
        tokens = pl.ds(block * BLOCK + number * CHUNK, CHUNK)
        targets = d_k.at[kind, row, tokens, head], d_u.at[row, tokens, head]
        send_chunk(memory, number, kind, group, *targets, interpret)

    lax.fori_loop(0, CHUNKS // groups, chunk, None)
    meet(memory.met)

    @pl.when(group == 0)
    def _():
        plgpu.copy_smem_to_gmem(memory.sums.at[pl.ds(0, groups + 1)], sums.at[kind, row, block * sizes.heads + head])

    plgpu.wait_smem_to_gmem(0)


@narrow_indices()
def node_gradients(
    k, u, inverse, vectors, d_nodes: tuple, places=None, *, count: int, config: Config, interpret=None
) -> tuple:
    """(dk [2, B, T, H, K], its two terms; du [B, T, H, K]; d_vectors [B, N, H, 2, 128] float32) of `nodes`. Undefined
    in blocks that are none.

    d_nodes, in the dtype of k: (dN, dS) [2, B, P, H, K, K] of every other block, then dN and dS [1, B, P', H, K, K] of
    the rest, if there are any; the rest as in `nodes`."""
    sizes, dtype = Sizes.of(k, u, ()), k.dtype
    tokens, many, groups = shared(CHUNKS, CHUNK, sizes.dim, dtype=dtype), 4 + len(d_nodes), sizes.dim // TILE

    def log_linear_delta_node_gradients(*refs):
        inputs, refs = refs[:many], refs[many:]
        if places is None:
            program(inputs, lax.axis_index("block"), *refs)
            return
        known, *refs = refs
        place = known[lax.axis_index("row"), lax.axis_index("block")]

        @pl.when(place >= 0)
        def _():
            program(inputs, place, *refs)

    def program(inputs, place, *refs):
        node_gradient_program(sizes, inputs, refs[:3], place, NodeMemory(*refs[3:]), interpret)

    shape = jax.ShapeDtypeStruct
    d_k, d_u, sums = plgpu.kernel(
        log_linear_delta_node_gradients,
        out_type=[
            shape((2, *u.shape), dtype),
            shape(u.shape, dtype),
            shape((2, sizes.batch, sizes.blocks * sizes.heads, groups + 1, BLOCK), f32),
        ],
        scratch_types=[
            *[tokens] * 2,
            shared(2 * CHUNKS, CHUNK, sizes.dim, dtype=dtype),
            shared(CHUNKS, *SQUARE, dtype=dtype),
            plgpu.SMEM((2, BLOCK), f32),
            shared(sizes.dim, sizes.dim, dtype=dtype),
            shared(groups, 2, *SQUARE, dtype=dtype),
            plgpu.SMEM((2 * groups + 1, BLOCK), f32),
            plgpu.Barrier(num_arrivals=3 * CHUNKS + 2),
            plgpu.Barrier(num_arrivals=groups),
            *[shared(groups, *SQUARE, dtype=dtype)] * (interpret is not None),
        ],
        grid=(sizes.batch, count if places is None else sizes.blocks, 2 * sizes.heads),
        grid_names=("row", "block", "pair"),
        num_threads=groups,
        thread_name="group",
        compiler_params=parameters(config.automatic_barriers),
        interpret=interpret,
    )(k, u, inverse, vectors.reshape(sizes.batch, -1, 2, BLOCK), *d_nodes, *([] if places is None else [places]))
    starts, erase = sums[:, :, :, :groups].sum(3), sums[0, :, :, groups] + sums[1, :, :, groups]
    of_vectors = jnp.stack([starts[0] + erase, starts[1]], axis=2)
    return d_k, d_u, of_vectors.reshape(vectors.shape)
