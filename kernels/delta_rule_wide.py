"""The delta rule's walks with keys of 256 channels on a Hopper GPU: a chunk forwards, and a chunk backwards.

The algebra is that of `delta_rule_mosaic.py` and `delta_rule_reverse.py`. Of S^T [64, K] float32 every thread holds 128
of its 255 registers, so that little else fits: a program has one warpgroup that computes, its state is a product's left
operand by way of shared memory, whence it is saved, too, and products are taken in rounds whose accumulators end with
them. The forward saves what it has written, W [B, T, H, V]: given that, the gradients of the two halves of K do not ask
for each other, and are those of two keys of 128 channels (`delta_rule_gradients.py`).

Nothing here needs automatic barriers, for the reasons given in `delta_rule_mosaic.py`; besides, a warp stores those
rows of the state that its own part of a product reads.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels import delta_rule_reverse as reverse
from efla_jax.kernels.delta_rule_mosaic import (
    CHUNK,
    ERASE,
    INTO,
    OUT,
    Loads,
    Plan,
    Targets,
    WalkMemory,
    decayed_scores,
)
from efla_jax.kernels.mosaic import TRANSPOSED, accumulated, begin, by_column, finish, left_operand, transposed


def send_behind(x, memory, target, others: int) -> None:
    """Copy [64, C] in registers to [C, 64] in global memory by way of shared memory, of which the copy before has gone
    when at most so many others, issued after it, are on their way."""
    plgpu.wait_smem_to_gmem(others, wait_read_only=True)
    memory.T[...] = plgpu.layout_cast(x, TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(memory, target)


def walk_chunk(plan: Plan, memory: WalkMemory, x: Loads, state, chunk, group, targets: Targets) -> jax.Array:
    """One chunk: S^T [64, K] at its start -> at its end; o, S^T at its start and W go out in the order S, W, o."""
    dtype, square = x.k.dtype, plgpu.ACC((64, CHUNK), jnp.float32)
    gate = lambda i: by_column(x.gates.at[i], 64)  # noqa: E731
    scores, written_there = memory.scores.at[0], memory.scores.at[1]
    buffers = (None, None) if memory.value_buffer is None else (memory.value_buffer.at[0], memory.value_buffer.at[1])
    interpreted = memory.value_buffer
    if plan.save:  # W and o of the last chunk may still be on their way
        plgpu.wait_smem_to_gmem(2, wait_read_only=True)
    memory.states[...] = state.astype(dtype)
    plgpu.commit_smem()
    if plan.save:
        plgpu.copy_smem_to_gmem(memory.states, targets.state)

    def known_and_scores(acc_known, acc_scores):
        plgpu.wgmma(acc_known, memory.states, x.k.T)
        plgpu.wgmma(acc_scores, x.k, x.q.T)
        u = transposed(x.u).astype(jnp.float32)
        missing = (u - accumulated(acc_known, wait_n=1) * gate(ERASE)).astype(dtype)
        scores[...] = decayed_scores(plan, acc_scores, x, 0, wait=0).astype(dtype)
        plgpu.commit_smem()
        return missing

    missing = pl.run_scoped(known_and_scores, square, square)

    def new_and_read(acc_new, acc_read):
        plgpu.wgmma(acc_new, left_operand(missing, buffers[0]), x.inverse.T)
        plgpu.wgmma(acc_read, memory.states, x.q.T)
        new = accumulated(acc_new, wait_n=1)
        left = (new * gate(OUT)).astype(dtype)
        return new.astype(dtype), left, accumulated(acc_read, wait_n=0) * gate(INTO)

    written, left, read = pl.run_scoped(new_and_read, square, square)

    def out_and_state(acc_o, acc_state):
        begin(acc_o, read, interpreted)
        kept = state * x.gates[INTO, CHUNK - 1]
        begin(acc_state, kept, interpreted)
        plgpu.wgmma(acc_o, left_operand(written, buffers[0]), scores)
        plgpu.wgmma(acc_state, left_operand(left, buffers[1]), x.k)
        if plan.save:
            send_behind(written, written_there, targets.written, 2)
        o = finish(acc_o, read, interpreted, wait_n=1)
        send_behind(o.astype(dtype), memory.o, targets.o, 2 * plan.save)
        return finish(acc_state, kept, interpreted)

    return pl.run_scoped(out_and_state, square, plgpu.ACC((64, plan.sizes.key_dim), jnp.float32))


def reverse_chunk(plan: reverse.Plan, memory: reverse.Memory, x: reverse.Loads, end, place, targets) -> jax.Array:
    """One chunk backwards: D^T [64, K] at its end -> at its start. targets: where D^T at its end and dU [C, 64] go in
    global memory, in this order, or None of a summary."""
    dtype, square = x.k.dtype, plgpu.ACC((64, CHUNK), jnp.float32)
    gate = lambda i: by_column(x.gates.at[i], 64)  # noqa: E731
    interpreted, scores, ends = memory.value_buffers, memory.scores.at[0, 0], memory.ends.at[0]
    buffers = [None if interpreted is None else interpreted.at[i, 0] for i in range(4)]
    if targets is not None:  # dU of the last chunk may still be on its way
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    ends[...] = end.astype(dtype)
    plgpu.commit_smem()
    if targets is not None:
        plgpu.copy_smem_to_gmem(ends, targets[0])

    def known_and_scores(acc_known, acc_scores):
        plgpu.wgmma(acc_known, ends, x.k.T)
        plgpu.wgmma(acc_scores, x.q, x.k.T)
        known = accumulated(acc_known, wait_n=1) * gate(OUT)
        scores[...] = reverse.decayed_scores(accumulated(acc_scores, wait_n=0), x, 0, CHUNK).astype(dtype)
        plgpu.commit_smem()
        return known

    known = pl.run_scoped(known_and_scores, square, square)

    def new_and_state(acc_new, acc_state):
        d_o = transposed(x.d_o)
        if plan.summary:
            d_o = jnp.where(place.first < plan.sizes.value_dim, d_o.astype(jnp.float32), 0.0).astype(dtype)
        read = (d_o.astype(jnp.float32) * gate(INTO)).astype(dtype)
        kept = end * x.gates[INTO, CHUNK - 1]
        begin(acc_new, known, interpreted)
        begin(acc_state, kept, interpreted)
        plgpu.wgmma(acc_new, left_operand(d_o, buffers[0]), scores)
        plgpu.wgmma(acc_state, left_operand(read, buffers[1]), x.q)
        d_w = finish(acc_new, known, interpreted, wait_n=1).astype(dtype)

        def inverted(acc):
            plgpu.wgmma(acc, left_operand(d_w, buffers[2]), x.inverse)
            return accumulated(acc, wait_n=0)

        d_p = pl.run_scoped(inverted, square)
        plgpu.wgmma(acc_state, left_operand((d_p * -gate(ERASE)).astype(dtype), buffers[3]), x.k)
        if targets is not None:
            send_behind(d_p.astype(dtype), memory.du.at[0], targets[1], 1)
        return finish(acc_state, kept, interpreted)

    return pl.run_scoped(new_and_state, square, plgpu.ACC((64, plan.sizes.key_dim), jnp.float32))
