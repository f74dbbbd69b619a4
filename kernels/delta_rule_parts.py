"""The delta rule's time in parts on a Hopper GPU: what each part does to any state, and the state before each.

A part of the time is an affine map of its state, S -> M S + Z. `summarise` walks all parts but the last at once, or all
where other devices want to know what this one's time does, reading nothing: V columns of a state that begins with
nothing become Z, and K columns of one that begins as the identity, to which nothing is written, become M. The chunks'
algebra and the shape of the programs are those of `walk` in `delta_rule_mosaic.py`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.delta_rule_mosaic import CHUNK, ERASE, INTO, OUT, Plan, pipeline_of, store_state
from efla_jax.kernels.mosaic import (
    accumulated,
    by_column,
    index,
    left_operand,
    parameters,
    shared,
    transposed,
)


def summarise_chunk(plan: Plan, buffers: tuple, loads: tuple, state, group, written) -> jax.Array:
    """S^T [64, K] of one warpgroup over one chunk. `written`: whether u counts, or nothing is written. A wide state is
    a left operand by way of shared memory on a device, too."""
    k, u, inverse, gates = loads
    dtype, shape = k.dtype, (64, CHUNK)
    gate = lambda i: by_column(gates.at[i], 64)  # noqa: E731
    state_buffer, value_buffer = buffers

    def run(acc_known, acc_new, acc_state):
        plgpu.wgmma(acc_known, left_operand(state.astype(dtype), state_buffer), k.T)
        x = transposed(u.at[:, pl.ds(group * 64, 64)]).astype(jnp.float32)
        x = jnp.where(written, x, 0.0)
        missing = (x - accumulated(acc_known, wait_n=0) * gate(ERASE)).astype(dtype)
        plgpu.wgmma(acc_new, left_operand(missing, value_buffer), inverse.T)
        kept = state * gates[INTO, CHUNK - 1]
        if not plan.interpret:
            acc_state[...] = kept
        new = (accumulated(acc_new, wait_n=0) * gate(OUT)).astype(dtype)
        plgpu.wgmma(acc_state, left_operand(new, value_buffer), k)
        after = accumulated(acc_state, wait_n=0)
        return after + kept if plan.interpret else after

    sizes = [shape, shape, (64, plan.sizes.key_dim)]
    return pl.run_scoped(run, *(plgpu.ACC(size, jnp.float32) for size in sizes))


def summarise_program(plan: Plan, dtype, *refs) -> None:
    """The body of `summarise`: one row, one part of the time, one tile of the columns of Z and then of M."""
    k, u, inverse, gates, added, kept, *scratch = refs
    sizes = plan.sizes
    group = lax.axis_index("warpgroup")
    buffers = (*(buffer.at[group] for buffer in scratch), None, None)[:2]
    tiles, writers = (sizes.value_dim + sizes.key_dim) // plan.tile, sizes.value_dim // plan.tile
    rest, tile = lax.div(lax.axis_index("program"), tiles), lax.rem(lax.axis_index("program"), tiles)
    rest, part = lax.div(rest, plan.summarised), lax.rem(rest, plan.summarised)
    row, head = lax.div(rest, sizes.heads), lax.rem(rest, sizes.heads)
    first, written = part * plan.steps, tile < writers
    column = tile * plan.tile + group * 64

    def step(_, *loads_and_state):
        *loads, state = loads_and_state
        return summarise_chunk(plan, buffers, tuple(loads), state, group, written)

    def compute(pipeline):
        shape = (64, sizes.key_dim)
        identity = index(*shape, 1) == index(*shape, 0) + (column - sizes.value_dim)
        state = pipeline(jnp.where(identity, 1.0, 0.0).astype(jnp.float32))

        @pl.when(written)
        def _():
            store_state(state, added.at[part, row, head, :, pl.ds(column, 64)])

        @pl.when(jnp.logical_not(written))
        def _():
            store_state(state, kept.at[part, row, head, :, pl.ds(column - sizes.value_dim, 64)])

        plgpu.wait_smem_to_gmem(0)

    here = lax.min(tile, writers - 1)  # of no account beyond the last
    pipeline_of(plan, first, 1, here, dtype, step, compute)(
        k.at[row, :, sizes.key_head(head)],
        u.at[row, :, head],
        *(x.at[row, sizes.gate_head(head)] for x in (inverse, gates)),
    )


def summarise(k, u, inverse, gates, *, plan: Plan, interpret=None) -> tuple[jax.Array, jax.Array]:
    """(Z [parts, B, H, K, V], M [parts, B, H, K, K]) float32 of the first `plan.summarised` parts of the time;
    arguments as in `walk`. A tile of the plan divides K and V."""
    sizes, dtype = plan.sizes, k.dtype
    shape = (plan.summarised, sizes.batch, sizes.heads, sizes.key_dim)
    tiles = (sizes.value_dim + sizes.key_dim) // plan.tile
    state_buffer = [shared(plan.groups, 64, sizes.key_dim, dtype=dtype)] * (plan.interpret or sizes.wide)
    value_buffer = [shared(plan.groups, 64, CHUNK, dtype=dtype)] * plan.interpret

    def delta_rule_summarise(*refs):
        summarise_program(plan, dtype, *refs)

    added, kept = plgpu.kernel(
        delta_rule_summarise,
        out_type=[jax.ShapeDtypeStruct((*shape, columns), jnp.float32) for columns in (sizes.value_dim, sizes.key_dim)],
        scratch_types=state_buffer + value_buffer,
        grid=(sizes.batch * sizes.heads * plan.summarised * tiles,),
        grid_names=("program",),
        num_threads=plan.groups + 1,
        thread_name="warpgroup",
        compiler_params=parameters(plan.automatic_barriers),
        interpret=interpret,
    )(k, u, inverse, gates.reshape(*gates.shape[:2], -1, CHUNK))
    return added, kept


def part_starts(added: jax.Array, kept: jax.Array, initial: jax.Array) -> jax.Array:
    """States before each part [parts, B, H, K, V] from the summaries (Z, M) of all but the last and the state before
    the first [B, H, K, V]. Unrolled: a loop on the device would cost more than its products."""
    starts = [initial]
    for z, m in zip(added, kept, strict=True):
        starts.append(jnp.einsum("bhij,bhjv->bhiv", m, starts[-1], precision=lax.Precision.HIGHEST) + z)
    return jnp.stack(starts)


def composed(added: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(Z, M) [parts, B, H, K, ...] of the time up to each part's end, from those of the parts. Unrolled as above."""
    key_dim = kept.shape[-1]
    found = [jnp.concatenate([kept[0], added[0]], axis=-1)]
    for z, m in zip(added[1:], kept[1:], strict=True):
        moved = jnp.einsum("bhij,bhjv->bhiv", m, found[-1], precision=lax.Precision.HIGHEST)
        found.append(moved.at[..., key_dim:].add(z))
    ends = jnp.stack(found)
    return ends[..., key_dim:], ends[..., :key_dim]
