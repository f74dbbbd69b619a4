"""One token of the delta rule or of linear attention on a Hopper GPU: the state is read and written once, in place.

    w = u - e exp(g) S^T k        S' = exp(g) S + k w^T        o = S'^T q        (without erase e: w = u)

One token moves 8 K V bytes a head for 6 K V operations, so bytes are all that counts. A program of maps and sums reads
the state twice, as w needs the whole of S before the first row of S' can be written. Here a warpgroup keeps a head's
state in its registers: thread t holds a column of it, K numbers, so that both sums over K stay inside a thread. Shared
memory and barriers are needed only for values narrower than a warpgroup, and for columns longer than a thread has
registers, which two warpgroups share; blocks hide each other's loads. Columns are independent, hence a block for every
128. Sources: DeltaNet (arXiv 2406.06484), Gated DeltaNet (arXiv 2412.06464).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.mosaic import narrow_indices

LANES = 128  # threads of a warpgroup, and columns of the state that one block holds
MOST_ROWS = 128  # registers of a thread that hold its column; 255 are all it has
TOGETHER = 8  # rows whose k and q are loaded before the first of them is stored: stores hold later loads back
SUMS = 4  # partial sums in flight, each a chain of dependent additions


def warpgroups(key_dim: int, value_dim: int) -> int:
    """How many share a block's columns: two where a column of 128 is too long for one."""
    return 2 if value_dim >= LANES and key_dim > MOST_ROWS else 1


def unsupported(key_dim: int, value_dim: int, most_warpgroups: int = 2) -> str | None:
    """Why the kernel does not cover these sizes with so many warpgroups at most, or None."""
    if value_dim != LANES // 2 and value_dim % LANES:
        return f"value dim {value_dim} is neither {LANES // 2} nor a multiple of {LANES}"
    rows = key_dim * min(value_dim, LANES) // LANES
    rows //= min(warpgroups(key_dim, value_dim), most_warpgroups)
    if rows > MOST_ROWS or rows % TOGETHER:
        return f"key dim {key_dim} needs {rows} registers a thread: not a multiple of {TOGETHER} up to {MOST_ROWS}"
    return None


@narrow_indices()
def step(q, k, u, erase, log_decay, state, *, interpret=None) -> tuple[jax.Array, jax.Array]:
    """(o [B, H, V] in the dtype of u, state after the token [B, H, K, V] float32).

    q, k [B, G, K]; u [B, H, V]; erase (None: linear attention) and log_decay [B, H] float32; state [B, H, K, V]
    float32, whose buffer the new state takes if the caller donates it. Value head h reads key head h // (H // G).
    interpret: parameters of Mosaic's interpreter, for a CPU. Raises NotImplementedError for sizes it does not cover."""
    batch, heads, key_dim, value_dim = state.shape
    if reason := unsupported(key_dim, value_dim):
        raise NotImplementedError(f"one-token kernel: {reason}.")
    folds = max(LANES // value_dim, 1)  # rows of the state side by side in one row of threads
    lines = state.reshape(batch, heads, key_dim // folds, value_dim * folds)
    decay = jnp.exp(log_decay)
    gates = (decay,) if erase is None else (decay, erase * decay)
    parts = warpgroups(key_dim, value_dim)
    threads: dict[str, Any] = dict(num_threads=parts, thread_name="part") if parts > 1 else {}
    grid = batch, heads, lines.shape[-1] // LANES
    mesh = plgpu.Mesh(grid=grid, grid_names=("batch", "head", "column"), **threads)
    # Not plgpu.kernel: its vmap wrapper takes no Ref, and a Ref is what makes the new state take the old one's buffer.
    call = pl.kernel(
        _body(key_dim, folds, parts, heads // k.shape[1], erase is not None),
        out_type=jax.ShapeDtypeStruct((batch, heads, lines.shape[-1]), u.dtype),
        mesh=mesh,
        scratch_types=(),
        # Automatic barriers would stop the warpgroup twice at every one of the K stores.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=False if interpret is None else interpret,
        name="delta_step",
    )
    held = jax.new_ref(lines)
    o = call(q, k, jnp.tile(u, folds), jnp.stack(gates, -1), held)
    return o[..., :value_dim], jax.freeze(held).reshape(state.shape)


def _total(terms: list) -> jax.Array:
    """Sum of many terms, in SUMS chains."""
    chains = [sum(terms[i + SUMS :: SUMS], terms[i]) for i in range(min(SUMS, len(terms)))]
    return sum(chains[1:], chains[0])


def _body(key_dim: int, folds: int, parts: int, group: int, erases: bool):
    """The program of one block: state [K / folds, LANES] of one head, as rows of threads, a part of them in each
    warpgroup."""
    layout = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
    lines = key_dim // folds // parts
    block = range(0, lines, TOGETHER)

    def coefficients(ref, first: int) -> list:
        """A key's or query's numbers for the rows first, first + 1, ...: scalars, or one for each half of the threads
        where two rows lie side by side."""
        numbers = [ref[folds * first + i].astype(jnp.float32) for i in range(folds * TOGETHER)]
        if folds == 1:
            return numbers
        left = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=layout) < LANES // 2
        return [jnp.where(left, *(jnp.full((LANES,), x) for x in numbers[2 * i : 2 * i + 2])) for i in range(TOGETHER)]

    def body(q_gmem, k_gmem, u_gmem, gates_gmem, state_gmem, o_gmem, *scratch):
        b, h, column = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("column")
        q, k = (x.at[b, lax.div(h, group)] for x in (q_gmem, k_gmem))
        rows = state_gmem.at[b, h]
        if parts > 1:
            part = lax.axis_index("part")
            q, k, rows = (x.at[pl.ds(part * lines, lines)] for x in (q, k, rows))
            across = _among_warpgroups(part, layout, *scratch)
        else:
            across = _across_halves(folds, layout)
        here = pl.ds(column * LANES, LANES)
        state = [plgpu.load(rows.at[i, here], layout=layout) for i in range(lines)]
        decay = gates_gmem[b, h, 0]
        w = plgpu.load(u_gmem.at[b, h, here], layout=layout).astype(jnp.float32)
        if erases:
            terms = [x * s for i in block for x, s in zip(coefficients(k, i), state[i : i + TOGETHER], strict=True)]
            w -= gates_gmem[b, h, 1] * across(_total(terms), 0)
        read = []
        for i in block:
            keys, queries = coefficients(k, i), coefficients(q, i)
            after = [decay * s + x * w for s, x in zip(state[i : i + TOGETHER], keys, strict=True)]
            read += [x * s for x, s in zip(queries, after, strict=True)]
            for j, s in enumerate(after):
                rows[i + j, here] = s
        o = across(_total(read), 1).astype(o_gmem.dtype)
        if parts == 1:
            o_gmem[b, h, here] = o
        else:

            @pl.when(part == 0)
            def _():
                o_gmem[b, h, here] = o

    def shared(*refs):  # what the warpgroups exchange: two sums of each
        scratch = plgpu.SMEM((2, parts, LANES), jnp.float32), plgpu.Barrier(num_arrivals=parts)
        pl.run_scoped(functools.partial(body, *refs), *scratch, collective_axes="part")

    return body if parts == 1 else shared


def _among_warpgroups(part, layout, sums, barrier):
    """across(x, use): the sum over the two warpgroups, in both, the same bits; each use once, in their order."""

    def across(x, use: int):
        sums[use, part] = x
        plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return x + plgpu.load(sums.at[use, 1 - part], layout=layout)

    return across


def _across_halves(folds: int, layout):
    """across(x, use): the sum over the two halves of the threads where they hold rows of the same columns, in both."""

    def across(part, _: int):
        if folds == 1:
            return part

        def exchange(twice):
            plgpu.commit_smem()  # waits until every thread has read what an earlier exchange left here
            twice[pl.ds(0, LANES)] = part
            twice[pl.ds(LANES, LANES)] = part
            plgpu.commit_smem()
            return part + plgpu.load(twice.at[pl.ds(LANES // 2, LANES)], layout=layout)

        return pl.run_scoped(exchange, plgpu.SMEM((2 * LANES,), jnp.float32))

    return across
