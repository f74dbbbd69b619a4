"""Both recurrences a chunk at a time (XLA): products inside a chunk, a scan over chunks, a hand-written backward.

Letters: per chunk of C tokens, queries Q, keys K, write vectors U, erase e, running log decay G (from the chunk's
start), state S at its start; R_ti = exp(G_t - G_i) for i <= t in the same document, else 0; "in" = exp(G_t) while no
document has begun, "out" = exp(G_C - G_i) for the chunk's last document, else 0.

    A = strict(e R . K K^T)        W = (I + A)^-1 (U - e in . K S)        linear attention: W = U
    O = in . Q S + (R . Q K^T) W   S' = in_C S + K^T (out . W)

W holds the vectors really written. Saved for the backward: the inputs and the state at each chunk's start; the rest is
recomputed. With cotangents dO of O and D of S':

    dW = (R . Q K^T)^T dO + out . K D      dP = (I + A)^-T dW = dU      dS = in_C D + Q^T (in . dO) - K^T (e in . dP)
    b = R . dO W^T        a = -strict(R . dP W^T)        X = e a
    dQ = in . dO S^T + b K                dK = out . W D^T - e in . dP S^T + b^T Q + (X + X^T) K
    de = rowsum(a . K K^T) - rowsum(K . (in . dP S^T))
    dG = rowsum(M) - colsum(M) + rowsum(Q . (in . dO S^T)) - e rowsum(K . (in . dP S^T))
         with M = b . Q K^T + X . K K^T; the last row adds in_C <S, D>
    dg = suffix sums of dG inside the chunk, plus exclusive prefix sums of rowsum(K . (out . W D^T))

The triangle is inverted by substitution and block doubling: a Neumann product would fail for nearly parallel keys.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.ops.arguments import Recurrence
from efla_jax.ops.dispatch import on_gpu
from efla_jax.shapes import CHUNK_SIZES

FORGET = -128.0  # exp of it is 0 in float32: stronger decay changes nothing, and would cost digits in the running sum
BLOCK = 8  # rows solved one by one before block doubling takes over; 8 and 16 measured alike, smaller ones slower
GRID = 512.0  # multiples of 1/512 up to 128 tokens of 128 are exact in float32


def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum with float32 sums; float32 operands are multiplied in full precision (never TF32)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


class Decays(NamedTuple):
    """R [..., C, C], "in" and "out" [..., C], all in [0, 1]; nothing but differences <= 0 is ever exponentiated."""

    pairs: jax.Array
    into: jax.Array
    out: jax.Array


def decays(log_decay: jax.Array, document: jax.Array | None, document_before: jax.Array | None) -> Decays:
    """Decays of a chunk from log_decay [..., C], the document of each token [..., C] and of the token before the chunk
    [..., 1].

    The running sum is kept in two parts, multiples of 1/512 (exact) and remainders below 1/512, so that its differences
    keep float32 accuracy after strong decay. For the same reason "out" is a sum over the tokens behind, and a token's
    pair with itself is no difference: autodiff of either would add a large number and take it away again."""
    log_decay = jnp.maximum(log_decay, FORGET)
    coarse = jnp.round(log_decay * GRID) / GRID
    sums = jnp.cumsum(coarse, -1), jnp.cumsum(log_decay - coarse, -1)
    seen = jnp.tril(jnp.ones((log_decay.shape[-1],) * 2, bool))
    pairs = jnp.where(jnp.tril(seen, -1), sum(s[..., :, None] - s[..., None, :] for s in sums), 0.0)
    behind = jnp.pad(log_decay[..., 1:], [(0, 0)] * (log_decay.ndim - 1) + [(0, 1)])
    into, out = sum(sums), lax.cumsum(behind, axis=behind.ndim - 1, reverse=True)
    if document is not None:
        seen &= document[..., :, None] == document[..., None, :]
        into = jnp.where(document == document_before, into, -jnp.inf)
        out = jnp.where(document == document[..., -1:], out, -jnp.inf)
    return Decays(jnp.exp(jnp.where(seen, pairs, -jnp.inf)), jnp.exp(into), jnp.exp(out))


def diagonal_blocks(x: jax.Array, block: int, row: int = 0, column: int = 0, stride: int = 1) -> jax.Array:
    """[..., C, C] -> [..., n, block, block]: the blocks (row + i stride, column + i stride), i = 0 .. n - 1."""
    count = x.shape[-1] // block
    tiles = x.reshape(*x.shape[:-2], count, block, count, block)
    return jnp.stack([tiles[..., row + i, :, column + i, :] for i in range(0, count, stride)], axis=-3)


def unit_lower_inverse(strict: jax.Array) -> jax.Array:
    """(I + strict)^-1 for strictly lower triangular [..., C, C] float32, C a power of two and at least BLOCK.

    Substitution row by row inside diagonal blocks, then block doubling: from the inverses X1, X2 of two neighbouring
    blocks and the block L below the first, [[X1, 0], [-X2 L X1, X2]]."""
    size = strict.shape[-1]
    blocks = diagonal_blocks(strict, BLOCK)
    identity = jnp.eye(BLOCK, dtype=strict.dtype)
    rows = [jnp.broadcast_to(identity[0], blocks.shape[:-1])]
    for i in range(1, BLOCK):
        known = jnp.stack(rows, axis=-2)
        rows.append(identity[i] - jnp.sum(blocks[..., i, :i, None] * known, axis=-2))
    inverse = jnp.stack(rows, axis=-2)
    while inverse.shape[-1] < size:
        block = inverse.shape[-1]
        below = diagonal_blocks(strict, block, row=1, stride=2)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -product("...ij,...jk->...ik", second, product("...ij,...jk->...ik", below, first))
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
    return inverse[..., 0, :, :]


class Chunks(NamedTuple):
    """The arguments cut into chunks, the chunk axis first; R = H // G value heads read one key head.

    q, k [N, B, G, C, K]; u [N, B, G, R, C, V]; erase (or None) and log_decay [N, B, G, R, C] float32;
    document [N, B, 1, 1, C] and before [N, B, 1, 1, 1]: the document of each token and of the token before the
    chunk."""

    q: jax.Array
    k: jax.Array
    u: jax.Array
    erase: jax.Array | None
    log_decay: jax.Array
    document: jax.Array | None
    before: jax.Array | None


def cut(x: jax.Array, count: int, size: int, *shape: int) -> jax.Array:
    """[B, T, ...] -> [N, B, *shape of the heads, C, rest], padded with zeros to N = count chunks of C = size tokens."""
    x = jnp.pad(x, ((0, 0), (0, count * size - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(x.shape[0], count, size, *shape, -1)
    heads = len(shape)
    return x.transpose(1, 0, *range(3, 3 + heads), 2, 3 + heads)


def join(x: jax.Array, like: jax.Array) -> jax.Array:
    """Undo `cut`: [N, B, heads..., C, rest] -> the shape and dtype of `like` [B, T, ...]."""
    heads = x.ndim - 4
    x = x.transpose(1, 0, 2 + heads, *range(2, 2 + heads), 3 + heads)
    x = x.reshape(x.shape[0], x.shape[1] * x.shape[2], *like.shape[2:])
    return x[:, : like.shape[1]].astype(like.dtype)


def chunks(q, k, u, erase, log_decay, starts, size: int) -> Chunks:
    """Cut every argument. Tokens added at the end are no-ops of the last document."""
    count = -(-k.shape[1] // size)
    group = k.shape[2], u.shape[2] // k.shape[2]
    dtype = jnp.bfloat16 if q.dtype == k.dtype == u.dtype == jnp.bfloat16 else jnp.float32
    keys = lambda x: cut(x.astype(dtype), count, size, group[0])  # noqa: E731
    gates = lambda x: cut(x, count, size, *group)[..., 0]  # noqa: E731
    document = before = None
    if starts is not None:
        document = jnp.cumsum(cut(starts, count, size)[..., 0], axis=-1, dtype=jnp.int32)
        before = jnp.cumsum(document[..., -1:], axis=0) - document[..., -1:]
        document, before = (x[:, :, None, None] for x in (document + before, before))
    values = cut(u.astype(dtype), count, size, *group)
    erase = None if erase is None else gates(erase)
    return Chunks(keys(q), keys(k), values, erase, gates(log_decay), document, before)


def steps_together() -> int:
    """Chunks per turn of the scan: on a GPU with few rows the turns are bound by launches (8: a third faster, B=1)."""
    return 8 if on_gpu() else 1


class Inner(NamedTuple):
    """What a chunk needs that no state enters: decays, the scores R . Q K^T and the inverse (I + A)^-1 (None without
    erase)."""

    decay: Decays
    scores: jax.Array
    inverse: jax.Array | None


def inner(x: Chunks) -> Inner:
    decay = decays(x.log_decay, x.document, x.before)
    scores = decay.pairs * product("...ik,...jk->...ij", x.q, x.k)[..., None, :, :]
    if x.erase is None:
        return Inner(decay, scores.astype(x.u.dtype), None)
    gram = product("...ik,...jk->...ij", x.k, x.k)[..., None, :, :]
    inverse = unit_lower_inverse(jnp.tril(x.erase[..., None] * decay.pairs * gram, -1))
    return Inner(decay, scores.astype(x.u.dtype), inverse.astype(x.u.dtype))


def written(k, u, erase, into, inverse, state) -> jax.Array:
    """W [..., C, V]: the vectors really written, given the state at the chunk's start."""
    if erase is None:
        return u
    known = product("...gck,...grkv->...grcv", k, state.astype(k.dtype))
    return product("...ij,...jv->...iv", inverse, (u - (erase * into)[..., None] * known).astype(u.dtype)).astype(
        u.dtype
    )


def forward(x: Chunks, state: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outputs [N, B, G, R, C, V] float32, the state at each chunk's start [N, B, G, R, K, V] and the final state."""
    parts = inner(x)

    def step(state, chunk):
        k, u, erase, decay, inverse = chunk
        w = written(k, u, erase, decay.into, inverse, state)
        added = product("...gck,...grcv->...grkv", k, (decay.out[..., None] * w).astype(k.dtype))
        return decay.into[..., -1:, None] * state + added, (state, w)

    final, (starts, w) = lax.scan(step, state, (x.k, x.u, x.erase, parts.decay, parts.inverse), unroll=steps_together())
    read = product("...gck,...grkv->...grcv", x.q, starts.astype(x.q.dtype))
    o = parts.decay.into[..., None] * read + product("...ij,...jv->...iv", parts.scores, w)
    return o, starts, final


def backward(x: Chunks, starts: jax.Array, d_o: jax.Array, d_final: jax.Array) -> tuple:
    """Cotangents of q, k, u, erase, log_decay (cut) and of the initial state, from those of the outputs and of the
    final state."""
    parts = inner(x)
    dtype = x.u.dtype
    d_o = d_o.astype(dtype)

    def step(d_state, chunk):
        q, k, erase, decay, inverse, scores, d_o = chunk
        d_w = product("...ij,...iv->...jv", scores, d_o)
        d_w += decay.out[..., None] * product("...gck,...grkv->...grcv", k, d_state.astype(dtype))
        d_u = d_w if erase is None else product("...ij,...iv->...jv", inverse, d_w.astype(dtype))
        into = decay.into[..., None]
        before = into[..., -1:, :] * d_state + product("...gck,...grcv->...grkv", q, (into * d_o).astype(dtype))
        if erase is not None:
            before -= product("...gck,...grcv->...grkv", k, (erase[..., None] * into * d_u).astype(dtype))
        return before, (d_state, d_u.astype(dtype))

    xs = (x.q, x.k, x.erase, parts.decay, parts.inverse, parts.scores, d_o)
    d_initial, (d_ends, d_u) = lax.scan(step, d_final, xs, reverse=True, unroll=steps_together())
    w = written(x.k, x.u, x.erase, parts.decay.into, parts.inverse, starts)
    return *gradients(x, parts, starts, w, d_o, d_ends, d_u), d_initial


def gradients(x: Chunks, parts: Inner, starts, w, d_o, d_ends, d_u) -> tuple:
    """Cotangents of q, k, u, erase and log_decay once W, dU and the states' cotangents at the chunk ends are known."""
    dtype = x.u.dtype
    pairs, into, out = parts.decay
    start, end = starts.astype(dtype), d_ends.astype(dtype)
    q, k = x.q[..., None, :, :].astype(jnp.float32), x.k[..., None, :, :].astype(jnp.float32)
    read = into[..., None] * product("...cv,...kv->...ck", d_o, start)
    kept = out[..., None] * product("...cv,...kv->...ck", w, end)
    b = pairs * product("...iv,...jv->...ij", d_o, w)
    d_q = read.sum(-3) + product("...grij,...gjk->...gik", b.astype(dtype), x.k)
    d_k = kept.sum(-3) + product("...grij,...gik->...gjk", b.astype(dtype), x.q)
    balance = b * product("...ik,...jk->...ij", x.q, x.k)[..., None, :, :]
    left = jnp.sum(k * kept, -1)
    d_sums = jnp.sum(q * read, -1)
    d_erase = None
    if x.erase is not None:
        gram = product("...ik,...jk->...ij", x.k, x.k)[..., None, :, :]
        a = -jnp.tril(pairs * product("...iv,...jv->...ij", d_u, w), -1)
        erased = into[..., None] * product("...cv,...kv->...ck", d_u, start)
        seen = jnp.sum(k * erased, -1)
        mixed = x.erase[..., None] * a
        d_k += product("...grij,...gjk->...gik", (mixed + jnp.swapaxes(mixed, -1, -2)).astype(dtype), x.k)
        d_k -= jnp.sum(x.erase[..., None] * erased, -3)
        d_erase = jnp.sum(a * gram, -1) - seen
        balance += mixed * gram
        d_sums -= x.erase * seen
    balance = jnp.tril(balance, -1)  # the diagonal cancels: leave it out rather than subtract it from itself
    d_sums += jnp.sum(balance, -1) - jnp.sum(balance, -2)
    d_sums = d_sums.at[..., -1].add(into[..., -1] * jnp.sum(starts * d_ends, (-1, -2)))
    # A token's "out" holds the decays behind it: its part goes to those by a sum over the tokens before, not by what is
    # left of a sum over all after its own was subtracted, which under strong decay is next to nothing.
    before = jnp.pad(lax.cumsum(left, axis=left.ndim - 1)[..., :-1], [(0, 0)] * (left.ndim - 1) + [(1, 0)])
    return d_q, d_k, d_u, d_erase, lax.cumsum(d_sums, axis=d_sums.ndim - 1, reverse=True) + before


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def solve(q, k, u, erase, log_decay, initial_state, starts, size: int):
    """(o [B, T, H, V] in the dtype of u, final state [B, H, K, V]) for T >= 1; see the head of this file."""
    return _forward(q, k, u, erase, log_decay, initial_state, starts, size)[0]


def _forward(q, k, u, erase, log_decay, initial_state, starts, size):
    x = chunks(q, k, u, erase, log_decay, starts, size)
    state = initial_state.reshape(*x.u.shape[1:4], *initial_state.shape[2:])
    o, states, final = forward(x, state)
    return (join(o, u), final.reshape(initial_state.shape)), (q, k, u, erase, log_decay, states, starts)


def _backward(size, saved, cotangents):
    q, k, u, erase, log_decay, states, starts = saved
    d_o, d_final = cotangents
    x = chunks(q, k, u, erase, log_decay, starts, size)
    d_q, d_k, d_u, d_erase, d_decay, d_initial = backward(
        x, states, cut(d_o, states.shape[0], size, *states.shape[2:4]), d_final.reshape(states.shape[1:])
    )
    d_erase = None if erase is None else join(d_erase[..., None], erase)
    return (
        join(d_q, q),
        join(d_k, k),
        join(d_u, u),
        d_erase,
        join(d_decay[..., None], log_decay),
        d_initial.reshape(d_final.shape),
        None,
    )


solve.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=1)
def chunked(x: Recurrence, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of u and the final state [B, H, K, V] float32."""
    time = x.k.shape[1]
    if x.u.size == 0:  # no token, no row or no channel to write
        return x.u, x.initial_state
    size = min(chunk_size, next((c for c in CHUNK_SIZES if c >= time), chunk_size))
    return solve(x.q, x.k, x.u, x.erase, x.log_decay, x.initial_state, x.starts, size)
