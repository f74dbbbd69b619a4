"""The cotangents of log-linear linear attention's states where a row is one document: the program `spread`, which goes
from the roots of parts (see `log_linear_roots.py`, which has the letters) to all states.

A part is 2^near blocks; from its root on it needs no other part, so that all are at work at once. Blocks and levels of
a part are unrolled, and the cotangents of its levels stay in registers. Two warpgroups have half of K each; a program
takes one part of a tile after the other, while a third warpgroup loads.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.log_linear import Config, Gates, drain, flat, wait_for_release
from efla_jax.kernels.log_linear_pairs import BLOCK, INSIDE, SUM, TILE, f32
from efla_jax.kernels.log_linear_parts import HALVES, Item, Parts, copy_halves, items_of, launch, ones_of
from efla_jax.kernels.log_linear_roots import coefficients, far_reads, root_cotangents, weighted
from efla_jax.kernels.log_linear_states import copy_out, loaded, multiply, time_of
from efla_jax.kernels.mosaic import shared, staging, transposed

STAGES, RING = 2, 2  # blocks and states loaded ahead


class PartReads(NamedTuple):
    """In global memory: q, dO, channels flat; gates; states as `log_linear.Inputs` has them; E of the roots; last as in
    `Rooted`."""

    q: Any
    d_o: Any
    gates: Gates
    states: Any
    roots: Any
    last: Any


class PartMemory(NamedTuple):
    """Shared memory: by stage q [2, 128, K / 2], dO, gates [near + 2, 128] and barriers; rings of states and of what a
    part begins with [2, 64, K / 2], and their barriers."""

    q: Any
    d_o: Any
    gates: Any
    full: Any
    empty: Any
    states: Any
    state_full: Any
    state_empty: Any
    begin: Any
    begun: Any
    free: Any


def load_parts(x: PartReads, memory: PartMemory, sizes: Parts, programs: int) -> None:
    count, item_of = items_of(sizes, programs)
    begins = 1 + sizes.near * sizes.ragged

    def item(n, _):
        row, part, tile = item_of(n)
        lanes = sizes.lanes(tile)
        for i in range(begins):
            wait_for_release(memory.free, n * begins + i, 1)
            source = (row, lax.min(part, sizes.roots - 1), lanes) if i == 0 else (row, i - 1, lanes)
            copy_halves(x.last if i else x.roots, source, 0, memory.begin, memory.begun.at[0])
        merged = n * (sizes.size - 1)
        for order, i in enumerate(reversed(range(1, sizes.size))):
            number, c = n * (sizes.size - 1) + order, lax.min(part * sizes.size + i, sizes.blocks - 1)
            wait_for_release(memory.empty, number, STAGES)
            stage, which = lax.rem(number, STAGES), sizes.gates(c, tile)
            barrier, gates = memory.full.at[stage], memory.gates.at[stage]
            copy_halves(x.q, (row, time_of(c)), sizes.channels(tile), memory.q.at[stage], barrier)
            plgpu.copy_gmem_to_smem(x.d_o.at[row, time_of(c), lanes], memory.d_o.at[stage], barrier)
            rows = x.gates.levels.at[row, which, pl.ds(INSIDE, sizes.near)]
            plgpu.copy_gmem_to_smem(rows, gates.at[pl.ds(0, sizes.near)], barrier)
            plgpu.copy_gmem_to_smem(x.gates.vectors.at[row, which, SUM], gates.at[sizes.near], barrier)
            plgpu.copy_gmem_to_smem(x.gates.fade.at[row, which], gates.at[sizes.near + 1], barrier)
            for j in range(ones_of(i)):
                wait_for_release(memory.state_empty, merged, RING)
                place = lax.rem(merged, RING)
                state = lax.min(part * sizes.size + i + 1 - (1 << j), sizes.blocks - 1)
                copy_halves(x.states, (row, state, lanes), 0, memory.states.at[place], memory.state_full.at[place])
                merged = merged + 1

    lax.fori_loop(0, count, item, None)
    drain(memory.free, count * begins, 1)
    drain(memory.empty, count * (sizes.size - 1), STAGES)
    drain(memory.state_empty, count * (sizes.size - 1), RING)


class Own(NamedTuple):
    """Of a warpgroup: E on its way out [64, K / 2]; <S, E> [2^near, 64]; coefficients [128]; the interpreter's left
    operand or None."""

    out: Any
    products: Any
    vector: Any
    left: Any


def begin_part(memory: PartMemory, n, half, part, sizes: Parts) -> tuple[jax.Array, list]:
    """E of the part's root, and the cotangents of its levels where it has none."""
    begins = []
    for _ in range(1 + sizes.near * sizes.ragged):
        plgpu.barrier_wait(memory.begun.at[0])
        begins.append(loaded(memory.begin.at[half]))
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.free.at[0])
    return begins[0], begins[1:] or [None] * sizes.near


def spread_part(n, item: Item, memory: PartMemory, own: Own, results, sizes: Parts, interpret) -> None:
    """A computing warpgroup of `spread`, of one part."""
    (spread, products), (row, part, tile), half = results, item, lax.axis_index("group")
    keys, lanes = pl.ds(half * (sizes.key_dim // HALVES), sizes.key_dim // HALVES), sizes.lanes(tile)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the part before
    root, levels = begin_part(memory, n, half, part, sizes)
    merged = n * (sizes.size - 1)
    for order, i in enumerate(reversed(range(sizes.size))):
        stage, c, ones = lax.rem(n * (sizes.size - 1) + order, STAGES), part * sizes.size + i, ones_of(i)
        whole = c < sizes.whole
        if i > 0:
            plgpu.barrier_wait(memory.full.at[stage])
        cotangent = root if ones == sizes.near else levels[ones]
        out = spread.at[row, c, lanes, keys]
        if sizes.ragged:

            @pl.when(c < sizes.blocks)
            def _(cotangent=cotangent, out=out, whole=whole):
                copy_out(jnp.where(whole, cotangent, 0.0), own.out, out)
        else:
            copy_out(cotangent, own.out, out)
        for j in range(ones):
            place, fade = lax.rem(merged, RING), memory.gates[stage, sizes.near + 1, j]
            plgpu.barrier_wait(memory.state_full.at[place])
            own.products.at[i + 1 - (1 << j)][...] = jnp.sum(
                loaded(memory.states.at[place, half]).astype(f32) * cotangent, axis=1
            )
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.state_empty.at[place])
            merged = merged + 1
            below = fade * cotangent
            levels[j] = jnp.where(whole, below, levels[j]) if sizes.ragged else below
        if i > 0:
            exists = jnp.where(c < sizes.blocks, 1.0, 0.0) if sizes.ragged else None
            add_reads(memory, stage, i, levels, own, half, exists, sizes, interpret)
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.empty.at[stage])
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(own.products, products.at[row, part, tile * HALVES + half])


def add_reads(memory: PartMemory, stage, i: int, levels: list, own: Own, half, exists, sizes, interpret) -> None:
    """What the tokens of a part's block read, to the cotangents of its levels."""
    gates, d_o = memory.gates.at[stage], transposed(memory.d_o.at[stage])
    for j in (j for j in range(sizes.near) if i >> j & 1):
        coefficients(own.vector, [gates.at[row] for row in (j, sizes.near, sizes.near + 1)], j)
        plgpu.commit_smem()
        values = weighted(d_o, own.vector)
        if exists is not None:  # what is multiplied then is another block
            values = (values.astype(f32) * exists).astype(values.dtype)
        levels[j] = multiply(values, memory.q.at[stage, half], own.left, interpret, total=levels[j])


def spread_parts(q, d_o, gates: Gates, states, roots, last, sizes: Parts, config: Config, interpret) -> tuple:
    """(E [B, N, H V, K] of what blocks write, 16-bit; <S, E> [B, N', H] float32 by state, N' >= N, with anything where
    the state is a root or merges into none)."""
    dtype, near, half = d_o.dtype, sizes.near, sizes.key_dim // HALVES
    programs = min(config.multiprocessors, sizes.batch * sizes.count * sizes.tiles)
    memory = PartMemory(
        q=shared(STAGES, HALVES, BLOCK, half, dtype=dtype),
        d_o=shared(STAGES, BLOCK, TILE, dtype=dtype),
        gates=plgpu.SMEM((STAGES, near + 2, BLOCK), f32),
        full=plgpu.Barrier(num_arrivals=HALVES + 4, num_barriers=STAGES),
        empty=plgpu.Barrier(num_arrivals=HALVES, num_barriers=STAGES),
        states=shared(RING, HALVES, TILE, half, dtype=dtype),
        state_full=plgpu.Barrier(num_arrivals=HALVES, num_barriers=RING),
        state_empty=plgpu.Barrier(num_arrivals=HALVES, num_barriers=RING),
        begin=shared(HALVES, TILE, half, dtype=f32),
        begun=plgpu.Barrier(num_arrivals=HALVES, num_barriers=1),
        free=plgpu.Barrier(num_arrivals=HALVES, num_barriers=1),
    )

    def compute(x: PartReads, memory: PartMemory, results, scratch):
        own = Own(*scratch, *[None] * (4 - len(scratch)))
        count, item_of = items_of(sizes, programs)

        def item(n, _):
            spread_part(n, item_of(n), memory, own, results, sizes, interpret)

        lax.fori_loop(0, count, item, None)

    def load(x: PartReads, memory: PartMemory):
        load_parts(x, memory, sizes, programs)

    x, shape = PartReads(flat(q), flat(d_o), gates, states, roots, last), jax.ShapeDtypeStruct
    out = [
        shape((sizes.batch, sizes.blocks, sizes.values, sizes.key_dim), dtype),
        shape((sizes.batch, sizes.count, sizes.tiles * HALVES, sizes.size, TILE), f32),
    ]
    scratch = [
        shared(HALVES, TILE, half, dtype=dtype),
        plgpu.SMEM((HALVES, sizes.size, TILE), f32),
        plgpu.SMEM((HALVES, BLOCK), f32),
        *staging([(TILE, BLOCK)], dtype, interpret, HALVES),
    ]
    grid = dict(program=programs)
    spread, products = launch(
        "log_linear_spread", compute, load, x, out, memory, scratch, grid, HALVES, config, interpret
    )
    products = products.reshape(sizes.batch, sizes.count, sizes.heads, -1, sizes.size, TILE).sum((3, 5))
    return spread, products.swapaxes(2, 3).reshape(sizes.batch, -1, sizes.heads)


def adjoint(q, d_o, gates: Gates, states, root_states, last, sizes: Parts, *, config: Config, interpret=None) -> tuple:
    """(E [B, N, H V, K] in the dtype of d_o, zero of blocks that are not whole; sums [B, N + slots, H] float32: <S, E>
    by the state that merged, with anything where none did), as `log_linear_states.adjoint` has them.

    q [B, T, G, K], d_o [B, T, H, V], states and root_states as `log_linear_parts.states_of` gives them, last [B, slots,
    H V, K] float32."""
    sums = far_reads(q, d_o, gates, sizes, config, interpret)
    roots, of_roots = root_cotangents(sums, last, gates, root_states, sizes, config, interpret)
    spread, merged = spread_parts(q, d_o, gates, states, roots, last, sizes, config, interpret)
    merged = jnp.pad(merged[:, : sizes.blocks], ((0, 0), (0, sizes.slots), (0, 0)))
    there = sizes.roots - (sizes.roots * sizes.size >= sizes.blocks)  # the last root may be the row's end
    merged = merged.at[:, sizes.size : sizes.size * there + 1 : sizes.size].set(of_roots[:, :there])
    return spread, merged
