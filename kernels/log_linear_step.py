"""One token of either log-linear operator on a Hopper GPU: live states are read and written once, in place.

    S'_l = exp(g) (S_l - e k (S_l^T k)^T)        o = sum over live l of w_l S'_l^T q + w_0 (k . q) u

without e for log-linear attention. Then the slots below d, the level at which the next token sees this one, and k u^T
merge into slot d (binary carry). A token has about half as many live states as its position has bits; the others are
not touched, but those that merge are left as zeros.

As in `delta_step.py`, thread t of a warpgroup has a column of the state in its registers. What merges is added up in
shared memory, where each thread reads only what it wrote. S'^T q = exp(g) (S^T q - e (k . q) S^T k), so that a state is
read by both sums before it changes. With few heads every slot has a program of its own; else a program has all slots of
a head's 128 columns. Source: Log-Linear Attention (arXiv 2506.04761).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.delta_step import LANES, TOGETHER, _total, unsupported
from efla_jax.kernels.mosaic import narrow_indices

PROGRAMS = 528  # from so many on a program has all slots: two for each of 132 multiprocessors, twice over
LAYOUT = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Rows of a state as threads hold it; rows of K side by side in one; heads that read a key head; slots, and how
    many programs share them; whether there is erase."""

    lines: int
    folds: int
    group: int
    slots: int
    shares: int
    erases: bool


@narrow_indices()
def step(q, k, u, erase, log_decay, weights, live, depth, states, *, interpret=None) -> tuple[jax.Array, jax.Array]:
    """(o [B, H, V] float32, states after the token [B, H, L, K, V] float32).

    q, k [B, G, K]; u [B, H, V]; erase (None: log-linear attention) and log_decay [B, H], weights [B, H, L] float32;
    live [B] int32: bit l for slot l; depth [B] int32: the slot that those below merge into, -1 where there is no token;
    states [B, H, L, K, V] float32, whose buffer the new ones take if the caller donates it. Value head h reads key head
    h // (H // G). interpret: parameters of Mosaic's interpreter, for a CPU. Raises NotImplementedError for sizes that
    it does not cover."""
    batch, heads, slots, key_dim, value_dim = states.shape
    if reason := unsupported(key_dim, value_dim, 1):
        raise NotImplementedError(f"one-token kernel: {reason}.")
    folds = max(LANES // value_dim, 1)
    lines = states.reshape(batch, heads, slots, key_dim // folds, value_dim * folds)
    columns = lines.shape[-1] // LANES
    shares = 1 if batch * heads * columns >= PROGRAMS else slots
    sizes = Sizes(lines.shape[3], folds, heads // k.shape[1], slots, shares, erase is not None)
    decay = jnp.exp(log_decay)
    match = jnp.repeat(jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32), axis=-1), sizes.group, axis=1)
    gates = jnp.stack([decay, match, jnp.zeros_like(decay) if erase is None else erase], axis=-1)
    mesh = plgpu.Mesh(grid=(batch * heads, columns, shares), grid_names=("head", "column", "share"))
    call = pl.kernel(
        _body(sizes, heads),
        out_type=jax.ShapeDtypeStruct((batch, heads, shares, lines.shape[-1]), jnp.float32),
        mesh=mesh,
        scratch_types=(),
        # Automatic barriers would stop the warpgroup twice at every one of the K stores.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=False if interpret is None else interpret,
        name="log_linear_step",
    )
    held = jax.new_ref(lines)
    o = call(q, k, jnp.tile(u, folds), gates, weights, jnp.stack([live, depth], axis=-1), held)
    return jnp.sum(o, axis=2)[..., :value_dim], jax.freeze(held).reshape(states.shape)


def coefficients(ref, first: int, folds: int) -> list:
    """A key's or query's numbers for the rows first, first + 1, ...: scalars, or one for each half of the threads where
    two rows lie side by side."""
    numbers = [ref[folds * first + i].astype(jnp.float32) for i in range(folds * TOGETHER)]
    if folds == 1:
        return numbers
    left = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=LAYOUT) < LANES // 2
    return [jnp.where(left, *(jnp.full((LANES,), x) for x in numbers[2 * i : 2 * i + 2])) for i in range(TOGETHER)]


def across(part, twice, folds: int):
    """The sum over the two halves of the threads where they hold rows of the same columns, in both halves."""
    if folds == 1:
        return part
    plgpu.commit_smem()  # waits until every thread has read what an earlier exchange left here
    twice[pl.ds(0, LANES)] = part
    twice[pl.ds(LANES, LANES)] = part
    plgpu.commit_smem()
    return part + plgpu.load(twice.at[pl.ds(LANES // 2, LANES)], layout=LAYOUT)


class Token(NamedTuple):
    """What a program knows of its head: q, k [K] and weights [L] in global memory; gates; exp(g), k . q and e; the slot
    that merges; its columns; shared memory for what merges and for sums over halves of the threads, or None."""

    q: Any
    k: Any
    weights: Any
    decay: Any
    match: Any
    erase: Any
    depth: Any
    here: Any
    merged: Any
    twice: Any
    sizes: Sizes

    @property
    def lines(self) -> range:
        return range(self.sizes.lines)

    def products(self, ref, rows) -> list:
        """(x_i, row i) for all rows of a column."""
        pairs: list = []
        for i in range(0, self.sizes.lines, TOGETHER):
            pairs += zip(coefficients(ref, i, self.sizes.folds), rows[i : i + TOGETHER], strict=True)
        return pairs

    def against(self, ref, rows):
        """S^T x of a column."""
        return across(_total([x * s for x, s in self.products(ref, rows)]), self.twice, self.sizes.folds)


def visit(token: Token, states, level, read):
    """Slot `level` of states [L, lines, columns] after the token; `read` with what the token reads of it."""
    rows = [plgpu.load(states.at[level, i, token.here], layout=LAYOUT) for i in token.lines]
    seen = token.against(token.q, rows)
    if token.sizes.erases:
        known = token.erase * token.against(token.k, rows)
        seen -= token.match * known
        rows = [s - x * known for x, s in token.products(token.k, rows)]
    merges = level <= token.depth

    @pl.when(merges)
    def _():
        for i, s in enumerate(rows):
            token.merged[i] = plgpu.load(token.merged.at[i], layout=LAYOUT) + token.decay * s

    @pl.when(level < token.depth)
    def _():
        for i in token.lines:
            states[level, i, token.here] = jnp.zeros_like(seen)

    @pl.when(jnp.logical_not(merges))
    def _():
        for i, s in enumerate(rows):
            states[level, i, token.here] = token.decay * s

    return read + token.weights[level] * token.decay * seen


def _body(sizes: Sizes, heads: int):
    """The program of one block: a head's 128 columns, of all slots or of one."""

    def body(*refs):
        exchanged = [plgpu.SMEM((2 * LANES,), jnp.float32)] * (sizes.folds > 1)
        pl.run_scoped(functools.partial(program, *refs), plgpu.SMEM((sizes.lines, LANES), jnp.float32), *exchanged)

    def program(q_gmem, k_gmem, u_gmem, gates_gmem, weights_gmem, where_gmem, states_gmem, o_gmem, merged, twice=None):
        b, h = lax.div(lax.axis_index("head"), heads), lax.rem(lax.axis_index("head"), heads)
        share, here = lax.axis_index("share"), pl.ds(lax.axis_index("column") * LANES, LANES)
        q, k = (x.at[b, lax.div(h, sizes.group)] for x in (q_gmem, k_gmem))
        gates = [gates_gmem[b, h, i] for i in range(3)]
        live, depth = where_gmem[b, 0], where_gmem[b, 1]
        token = Token(q, k, weights_gmem.at[b, h], *gates, depth, here, merged, twice, sizes)
        u, states = plgpu.load(u_gmem.at[b, h, here], layout=LAYOUT).astype(jnp.float32), states_gmem.at[b, h]
        writes = (share == depth) if sizes.shares > 1 else (depth >= 0)

        @pl.when(writes)
        def _():
            for i, (x, _) in enumerate(token.products(k, list(token.lines))):
                merged[i] = x * u

        first, last = jnp.int32(0), jnp.int32(sizes.slots)
        if sizes.shares > 1:
            first, last = jnp.where(writes, 0, share), jnp.where(share < depth, 0, share + 1)

        def slot(level, read):
            there = (live >> level) & 1 == 1
            return lax.cond(there, functools.partial(visit, token, states), lambda _, read: read, level, read)

        read = lax.fori_loop(first, last, slot, jnp.where(writes, token.weights[0] * token.match, 0.0) * u)
        o_gmem[b, h, share, here] = read

        @pl.when(writes)
        def _():
            for i in token.lines:
                states[lax.max(depth, 0), i, here] = plgpu.load(merged.at[i], layout=LAYOUT)

    return body
