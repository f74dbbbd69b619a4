"""The tree over the log-linear delta rule's nodes on a Hopper GPU: runs of 2^j blocks made of two halves, and back.

With the letters of `log_linear_delta.py`, L the left half, R the right one and f the decay over the right one:

merge      N = N_L + N_R + N_R N_L            S = f (S_L + N_R S_L) + S_R
unmerge    dN_L = dN + N_R^T dN + read        dS_L = f (dS + N_R^T dS) + read        df f = <S_L, f (dS + N_R^T dS)>
           dN_R = dN + f dS S_L^T + dN N_L^T  dS_R = dS

"read" is what the tokens behind give the left half, which alone is read. A pair without a right half has no parent,
and dN_L and dS_L are "read". A program has 64 columns of N or of S, kept
transposed in registers, or 64 rows of dN_R. What passes memory from level to level is two 16-bit numbers, the second
one what the first was rounded by, so that the sums keep their digits; products take the first alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.log_linear_delta import BLOCK, TILE, Config, add_product, columns, f32, matrix
from efla_jax.kernels.mosaic import (
    TRANSPOSED,
    begin,
    finish,
    left_operand,
    narrow_indices,
    parameters,
    shared,
    transposed,
)

KINDS = 2  # N, S; then what these were rounded by
CHANGE, STATE = range(KINDS)


class Cotangents(NamedTuple):
    """Of the nodes of a level: left [4, B, P, H, K, K] of the even ones (dN, dS, and what they were rounded by); of the
    odd ones change and state [2, B, P', H, K, K], each the number and what it was rounded by."""

    left: Any
    change: Any
    state: Any


class Part(NamedTuple):
    """A program: row of the batch, pair of runs, head, N or S, and its columns or rows."""

    row: Any
    pair: Any
    head: Any
    kind: Any
    tile: Any

    @classmethod
    def here(cls, tiles: int, kinds: int) -> "Part":
        row, pair, part = (lax.axis_index(name) for name in ("row", "pair", "part"))
        rest, tile = lax.div(part, tiles), lax.rem(part, tiles)
        return cls(row, pair, lax.div(rest, kinds), lax.rem(rest, kinds), tile)


def together(tiles) -> jax.Array:
    """[64, K] float32 of the columns [K, 64] of a number and of what it was rounded by, if that is there."""
    total = transposed(tiles.at[0]).astype(f32)
    return total if tiles.shape[0] == 1 else total + transposed(tiles.at[1]).astype(f32)


def send_tile(x, room, targets) -> None:
    """[64, K] in registers to columns [K, 64] in global memory: rounded, and what it was rounded by."""
    for target in targets:
        narrow = x.astype(room.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        room.T[...] = plgpu.layout_cast(narrow, TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(room, target)
        x = x - narrow.astype(f32)


def send_rows(x, room, targets) -> None:
    """As `send_tile`, of rows [64, K]."""
    for target in targets:
        narrow = x.astype(room.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        room[...] = narrow
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(room, target)
        x = x - narrow.astype(f32)


def launch(name: str, body, arguments: tuple, out, scratch: list, grid: tuple, config: Config, interpret):
    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=grid,
        grid_names=("row", "pair", "part"),
        compiler_params=parameters(config.automatic_barriers),
        interpret=interpret,
    )(*arguments)


def wide_fades(fades: jax.Array) -> jax.Array:
    """[B, P, H] as [B, P H, 128], of which a copy may take a row."""
    return jnp.broadcast_to(fades.reshape(fades.shape[0], -1, 1), (fades.shape[0], fades[0].size, BLOCK))


@narrow_indices()
def merge(nodes, rests, fades, up=None, *, count: int, config: Config, interpret=None) -> tuple[jax.Array, jax.Array]:
    """(N, S) [2, B, count, H, K, K] of the next level, and what they were rounded by, from those of a level
    [2, B, P, H, K, K] (rests: None if they are exact) and f [B, P // 2, H] float32. up [B, P // 2]: which node a pair
    becomes, -1 if none; None: its own number. Other nodes are undefined."""
    (_, batch, _, heads, dim, _), pairs, dtype = nodes.shape, nodes.shape[2] // 2, nodes.dtype
    given = [x for x in (nodes, rests) if x is not None]
    tiles, both = dim // TILE, len(given)

    def log_linear_delta_merge(fades, *refs):
        at = Part.here(tiles, KINDS)
        if up is None:
            program(at, at.pair, fades, *refs)
            return
        known, *refs = refs
        parent = known[at.row, at.pair]

        @pl.when(parent >= 0)
        def _():
            program(at, parent, fades, *refs)

    def program(at, parent, fades, *refs):
        sources, refs = refs[:both], refs[both:]
        out, out_rest, change, left, right, fade, loaded, *rest = refs
        here = columns(at.tile)
        for i, source in enumerate(sources):
            for target, node in ((left, 2 * at.pair), (right, 2 * at.pair + 1)):
                plgpu.copy_gmem_to_smem(source.at[at.kind, at.row, node, at.head, :, here], target.at[i], loaded)
        plgpu.copy_gmem_to_smem(sources[0].at[CHANGE, at.row, 2 * at.pair + 1, at.head], change, loaded)
        plgpu.copy_gmem_to_smem(fades.at[at.row, at.pair * heads + at.head], fade, loaded)
        plgpu.barrier_wait(loaded)
        faded = together(left) * jnp.where(at.kind == CHANGE, 1.0, fade[0])
        narrow = left_operand(faded.astype(dtype), rest[0] if rest else None)
        total = add_product(faded + together(right), narrow, change.T, interpret)
        targets = [ref.at[at.kind, at.row, parent, at.head, :, here] for ref in (out, out_rest)]
        send_tile(total, left.at[0], targets)
        plgpu.wait_smem_to_gmem(0)

    scratch = [
        shared(dim, dim, dtype=dtype),
        *[shared(both, dim, TILE, dtype=dtype)] * 2,
        plgpu.SMEM((BLOCK,), f32),
        plgpu.Barrier(num_arrivals=2 * both + 2),
        *[shared(TILE, dim, dtype=dtype)] * (interpret is not None),
    ]
    out = [jax.ShapeDtypeStruct((KINDS, batch, count, heads, dim, dim), dtype)] * 2
    known = [] if up is None else [up]
    grid, arguments = (batch, pairs, heads * KINDS * tiles), (wide_fades(fades), *known, *given)
    name = "log_linear_delta_merge"
    return tuple(launch(name, log_linear_delta_merge, arguments, out, scratch, grid, config, interpret))


def load_cotangent(d: Cotangents, index, kind, at: Part, window, tiles, loaded) -> None:
    """(dN or dS, and what it was rounded by) of a node of a level, a window of rows and columns, to tiles [2, ...]."""
    half = lax.div(index, 2)

    def start(source, i: int) -> None:
        plgpu.copy_gmem_to_smem(source.at[at.row, half, at.head, *window], tiles.at[i], loaded)

    for i in range(tiles.shape[0]):

        @pl.when(lax.rem(index, 2) == 0)
        def _(i=i):
            start(d.left.at[KINDS * i + kind], i)

        if d.change is None:  # a root has no other
            continue

        @pl.when((lax.rem(index, 2) == 1) & (kind == CHANGE))
        def _(i=i):
            start(d.change.at[i], i)

        @pl.when((lax.rem(index, 2) == 1) & (kind == STATE))
        def _(i=i):
            start(d.state.at[i], i)


def parent_of(at: Part, up) -> tuple[Any, Any]:
    """The parent of a pair, or any node where it has none, and whether it has one, None if all have. up [B, P] in
    global memory, or None."""
    if up is None:
        return at.pair, None
    parent = up[at.row, at.pair]
    return lax.max(parent, 0), parent >= 0


def if_there(there, x):
    """A select: what there is not may be NaN."""
    return x if there is None else jnp.where(there, x, 0.0)


def unmerge_left(nodes, fades, d: Cotangents, read, up, both: int, config: Config, interpret) -> tuple:
    """dN_L and dS_L, dS_R, and df f [B, P, H] of the P pairs."""
    (_, batch, _, heads, dim, _), pairs, dtype = nodes.shape, fades.shape[1], nodes.dtype
    tiles, given = dim // TILE, [x for x in d if x is not None]
    shape, known = jax.ShapeDtypeStruct, [] if up is None else [up]

    def log_linear_delta_unmerge_left(nodes, fades, read, *refs):
        ups, refs = (refs[0] if known else None), refs[len(known) :]
        sources, refs = Cotangents(*refs[: len(given)], *[None] * (3 - len(given))), refs[len(given) :]
        left, state, sums, change, d_tiles, kept, states, fade, part, loaded, *rest = refs
        at = Part.here(tiles, KINDS)
        here, (parent, there) = columns(at.tile), parent_of(at, ups)
        load_cotangent(sources, parent, at.kind, at, (slice(None), here), d_tiles, loaded)
        plgpu.copy_gmem_to_smem(read.at[at.row, at.pair, at.head, at.kind, :, here], kept, loaded)
        plgpu.copy_gmem_to_smem(nodes.at[at.kind, at.row, 2 * at.pair, at.head, :, here], states, loaded)
        plgpu.copy_gmem_to_smem(nodes.at[CHANGE, at.row, 2 * at.pair + 1, at.head], change, loaded)
        plgpu.copy_gmem_to_smem(fades.at[at.row, at.pair * heads + at.head], fade, loaded)
        plgpu.barrier_wait(loaded)
        faded = together(d_tiles) * jnp.where(at.kind == CHANGE, 1.0, fade[0])
        narrow = left_operand(faded.astype(dtype), rest[0] if rest else None)
        total = if_there(there, add_product(faded, narrow, change, interpret))
        part[...] = if_there(there, jnp.sum(total * transposed(states).astype(f32), axis=1))
        total = total + transposed(kept).astype(f32)
        send_tile(total, states, [left.at[KINDS * i + at.kind, at.row, at.pair, at.head, :, here] for i in range(both)])
        row = (at.pair * heads + at.head) * KINDS + at.kind
        plgpu.copy_smem_to_gmem(part, sums.at[at.row, row, here])

        @pl.when(at.kind == STATE)
        def _():
            for i in range(both):
                plgpu.copy_smem_to_gmem(d_tiles.at[i], state.at[i, at.row, at.pair, at.head, :, here])

        plgpu.wait_smem_to_gmem(0)

    left, state, sums = launch(
        "log_linear_delta_unmerge_left",
        log_linear_delta_unmerge_left,
        (nodes, wide_fades(fades), read, *known, *given),
        [
            shape((KINDS * both, batch, pairs, heads, dim, dim), dtype),
            shape((both, batch, pairs, heads, dim, dim), dtype),
            shape((batch, pairs * heads * KINDS, dim), f32),
        ],
        [
            shared(dim, dim, dtype=dtype),
            shared(2, dim, TILE, dtype=dtype),
            *[shared(dim, TILE, dtype=dtype)] * 2,
            plgpu.SMEM((BLOCK,), f32),
            plgpu.SMEM((TILE,), f32),
            plgpu.Barrier(num_arrivals=6),
            *[shared(TILE, dim, dtype=dtype)] * (interpret is not None),
        ],
        (batch, pairs, heads * KINDS * tiles),
        config,
        interpret,
    )
    return left, state, sums.reshape(batch, pairs, heads, KINDS, dim)[:, :, :, STATE].sum(-1)


def unmerge_right(nodes, fades, d: Cotangents, up, both: int, config: Config, interpret) -> jax.Array:
    """dN_R of the pairs, and what it was rounded by if it is asked for `both`; undefined where there is none."""
    (_, batch, _, heads, dim, _), pairs, dtype = nodes.shape, fades.shape[1], nodes.dtype
    tiles, given, known = dim // TILE, [x for x in d if x is not None], [] if up is None else [up]

    def log_linear_delta_unmerge_right(nodes, fades, *refs):
        at = Part.here(tiles, 1)
        parent, there = parent_of(at, refs[0] if known else None)
        if there is None:
            program(at, parent, nodes, fades, *refs)
            return

        @pl.when(there)
        def _():
            program(at, parent, nodes, fades, *refs[1:])

    def program(at, parent, nodes, fades, *refs):
        sources, refs = Cotangents(*refs[: len(given)], *[None] * (3 - len(given))), refs[len(given) :]
        out, change, state, d_change, d_state, fade, loaded, *rest = refs
        window = columns(at.tile), slice(None)
        load_cotangent(sources, parent, jnp.int32(CHANGE), at, window, d_change, loaded)
        load_cotangent(sources, parent, jnp.int32(STATE), at, window, d_state, loaded)
        plgpu.copy_gmem_to_smem(nodes.at[CHANGE, at.row, 2 * at.pair, at.head], change, loaded)
        plgpu.copy_gmem_to_smem(nodes.at[STATE, at.row, 2 * at.pair, at.head], state, loaded)
        plgpu.copy_gmem_to_smem(fades.at[at.row, at.pair * heads + at.head], fade, loaded)
        plgpu.barrier_wait(loaded)
        total = matrix(d_change.at[0]) + matrix(d_change.at[1])
        faded = (matrix(d_state.at[0]) * fade[0]).astype(dtype)

        def run(acc):
            begin(acc, total, interpret)
            plgpu.wgmma(acc, left_operand(faded, rest[0] if rest else None), state.T)
            plgpu.wgmma(acc, d_change.at[0], change.T)
            return finish(acc, total, interpret)

        x = pl.run_scoped(run, plgpu.ACC((TILE, dim), f32))
        send_rows(x, d_state.at[0], [out.at[i, at.row, at.pair, at.head, columns(at.tile)] for i in range(both)])
        plgpu.wait_smem_to_gmem(0)

    rows = shared(2, TILE, dim, dtype=dtype)
    return launch(
        "log_linear_delta_unmerge_right",
        log_linear_delta_unmerge_right,
        (nodes, wide_fades(fades), *known, *given),
        jax.ShapeDtypeStruct((both, batch, pairs, heads, dim, dim), dtype),
        [
            *[shared(dim, dim, dtype=dtype)] * 2,
            rows,
            shared(1, TILE, dim, dtype=dtype),
            plgpu.SMEM((BLOCK,), f32),
            plgpu.Barrier(num_arrivals=6),
            *[shared(TILE, dim, dtype=dtype)] * (interpret is not None),
        ],
        (batch, pairs, heads * tiles),
        config,
        interpret,
    )


@narrow_indices()
def unmerge(nodes, fades, d: Cotangents, read, up=None, *, lowest: bool, config: Config, interpret=None) -> tuple:
    """(Cotangents of the nodes of a level, df f [B, P // 2, H]) from those of the next one.

    nodes (N, S) [2, B, P, H, K, K], fades and up as in `merge`; read [B, P', H, 2, K, K], P' >= P // 2: the cotangents
    (dN, dS) of the even ones from the tokens that read them. At the lowest level nothing is kept of the rounding."""
    both = 1 if lowest else 2
    left, state, d_fades = unmerge_left(nodes, fades, d, read, up, both, config, interpret)
    return Cotangents(left, unmerge_right(nodes, fades, d, up, both, config, interpret), state), d_fades
