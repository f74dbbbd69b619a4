"""Linear attention with a scalar decay per head on NVIDIA GPUs: forward and backward for `ops/pallas_linear.py`.

    S_t = exp(g_t) S_{t-1} + k_t u_t^T        o_t = S_t^T q_t

This file has the gate vectors, the split of the time into parts and the choice of tiles; the programs are in
`linear_attention_mosaic.py`. Time is a multiple of 64: the caller pads with tokens of zero k, q, u and log decay.
"""

import dataclasses

import jax
import jax.numpy as jnp

from efla_jax.kernels.linear_attention_mosaic import (
    BALANCE,
    CHUNK,
    DOCUMENT,
    INTO,
    KEPT,
    LEFT,
    TILE,
    Sizes,
    accumulate,
    gradients,
    walk,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is cut for the GPU.

    stages: chunks in flight in a walk. multiprocessors: of the GPU. waves: programs wanted for each of them in a walk;
    the time is split into parts until there are so many, but only if that makes at least twice as many."""

    stages: int = 3
    multiprocessors: int = 132
    waves: float = 2.0


def parts(sizes: Sizes, config: Config) -> int:
    """Into how many equal parts a walk splits the time: 1, or a power of two that divides the number of chunks.

    A split costs one more pass over k and u, so it must at least double the programs that can run at once."""
    count = 1
    wanted = config.waves * config.multiprocessors
    if 2 * sizes.programs > config.multiprocessors:
        return 1
    while sizes.programs * 2 * count <= wanted and sizes.chunks % (2 * count) == 0 and sizes.chunks // (2 * count) >= 2:
        count *= 2
    return count


def gate_vectors(log_decay: jax.Array, documents: jax.Array | None) -> jax.Array:
    """[B, N, H, 3, C] float32: running sum G of the log decay in a token's own document and chunk; "in" = exp(G) before
    the chunk's first document start; "out" = exp(G_C - G) for the chunk's last document. With documents a fourth row
    has their number.

    The sum starts anew at every document, so a reset costs it no precision."""
    batch, heads, time = log_decay.shape
    g = log_decay.reshape(batch, heads, time // CHUNK, CHUNK).swapaxes(1, 2)
    if documents is None:
        total = jnp.cumsum(g, axis=-1)
        rows = [total, jnp.exp(total), jnp.exp(total[..., -1:] - total)]
    else:
        number = documents.reshape(batch, time // CHUNK, 1, CHUNK)
        seen = jnp.tril(number[..., :, None] == number[..., None, :])
        total = jnp.sum(jnp.where(seen, g[..., None, :], 0.0), axis=-1)
        into = jnp.where(number == 0, jnp.exp(total), 0.0)
        last = jnp.where(number == number[..., -1:], total[..., -1:] - total, -jnp.inf)
        rows = [total, into, jnp.exp(last), jnp.broadcast_to(number, total.shape)]
    return jnp.stack(rows, axis=-2)


def sizes_of(k: jax.Array, u: jax.Array, gates: jax.Array) -> Sizes:
    batch, time, key_heads, key_dim = k.shape
    return Sizes(batch, time // CHUNK, key_heads, u.shape[2], key_dim, u.shape[3], gates.shape[3])


def flat(x: jax.Array) -> jax.Array:
    """[B, T, heads, channels] -> [B, T, heads channels]."""
    return x.reshape(*x.shape[:2], -1)


def starts_of_parts(added, gates, initial, count: int, *, backwards: bool) -> jax.Array:
    """[B, P, H V, K]: the state from which each part begins, given what each adds to a zero state [B, P, H V, K]."""
    batch, _, lanes, key_dim = added.shape
    heads = gates.shape[2]
    decay = jnp.prod(gates[..., INTO, -1].reshape(batch, count, -1, heads), axis=2)
    decay = jnp.repeat(decay, lanes // heads, axis=2)[..., None]
    state, starts = initial.reshape(batch, lanes, key_dim), []
    order = range(count - 1, -1, -1) if backwards else range(count)
    for part in order:  # at most 64 of them, and one elementwise fusion
        starts.append(state)
        state = decay[:, part] * state + added[:, part]
    return jnp.stack(starts[::-1] if backwards else starts, axis=1)


def started(x, y, gates, initial, sizes: Sizes, config: Config, *, backwards: bool, interpret) -> jax.Array:
    """[B, P, H V, K]: the states from which the parts of a walk begin."""
    count = parts(sizes, config)
    initial = initial.reshape(sizes.batch, 1, -1, sizes.key_dim)
    if count == 1:
        return initial
    zeros = jnp.zeros((sizes.batch, count, *initial.shape[2:]), jnp.float32)
    rows = gates.reshape(sizes.batch, -1, CHUNK)
    options = dict(sizes=sizes, stages=config.stages, backwards=backwards, save=False, interpret=interpret)
    added, _ = accumulate(x, y, rows, zeros, **options)
    return starts_of_parts(added, gates, initial, count, backwards=backwards)


def forward(q, k, u, log_decay, documents, initial_state, *, config: Config, save: bool, interpret=None):
    """(o [B, T, H, V], final state [B, H, V, K] float32, saved or None).

    q, k [B, T, G, K], u [B, T, H, V] of one 16-bit dtype, T a multiple of 64; log_decay [B, H, T] float32; documents
    None or [B, T] float32, how many documents have begun in the chunk up to and with the token; initial_state
    [B, H, V, K] float32. saved = (gates [B, N, H, 3 or 4, 64] float32, states before each chunk [B, N, H V, K])."""
    gates = gate_vectors(log_decay, documents)
    sizes = sizes_of(k, u, gates)
    starts = started(flat(k), flat(u), gates, initial_state, sizes, config, backwards=False, interpret=interpret)
    o, final, states = walk(
        flat(q), flat(k), flat(u), gates.reshape(sizes.batch, -1, CHUNK), starts,
        sizes=sizes, stages=config.stages, save=save, interpret=interpret,
    )  # fmt: skip
    return o.reshape(u.shape), final[:, -1].reshape(initial_state.shape), (gates, states) if save else None


def slices(sizes: Sizes, config: Config) -> int:
    """Programs that share the tiles of a key head in `gradients`: 1, or a power of two while there are few programs.

    Each slice costs dq and dk once more, in float32."""
    count, programs = 1, sizes.batch * sizes.chunks * sizes.key_heads
    while sizes.per_key % (2 * count) == 0 and 2 * count * programs <= config.waves * config.multiprocessors:
        count *= 2
    return count


def decay_gradient(sums, gates, sizes: Sizes) -> jax.Array:
    """d log_decay [B, H, T] from the sums of `gradients`: every G sums the log decays of its document so far.

    A token's "out" holds the decays behind it: its part goes to those by a sum over the tokens before them."""
    sums = sums.reshape(*sums.shape[:2], sizes.heads, sizes.per_head, 2, 3, CHUNK).sum(3)
    query, key = sums[..., 0, :, :], sums[..., 1, :, :]
    state = query[..., KEPT, :].sum(-1) + (key[..., KEPT, :].sum(-1) if sizes.key_dim > TILE else 0.0)
    ahead = query[..., LEFT, :] + query[..., BALANCE, :] - key[..., BALANCE, :]
    ahead = ahead.at[..., -1].add(gates[..., INTO, -1] * state)
    before = jnp.pad(jnp.cumsum(key[..., LEFT, :], axis=-1)[..., :-1], [(0, 0)] * 3 + [(1, 0)])
    if sizes.rows > DOCUMENT:
        number = gates[:, :, :1, DOCUMENT, :]
        seen = jnp.triu(number[..., :, None] == number[..., None, :])
        behind = jnp.sum(jnp.where(seen, ahead[..., None, :], 0.0), axis=-1)
    else:
        behind = jnp.flip(jnp.cumsum(jnp.flip(ahead, -1), axis=-1), -1)
    return (before + behind).swapaxes(1, 2).reshape(sizes.batch, sizes.heads, -1)


def backward(q, k, u, saved, d_o, d_final_state, *, config: Config, interpret=None):
    """(dq, dk [B, T, G, K], dU [B, T, H, V], d log_decay [B, H, T] float32, d initial_state [B, H, V, K] float32).

    dq and dk are summed over the value heads of a key head, in float32. Arguments as in `forward`; d_o like u."""
    gates, starts = saved
    sizes = sizes_of(k, u, gates)
    rows = gates.reshape(sizes.batch, -1, CHUNK)
    x, y = flat(q), flat(d_o)
    last = started(x, y, gates, d_final_state, sizes, config, backwards=True, interpret=interpret)
    options = dict(sizes=sizes, stages=config.stages, interpret=interpret)
    first, ends = accumulate(x, y, rows, last, backwards=True, save=True, **options)
    count = slices(sizes, config)
    d_q, d_k, d_u, sums = gradients(x, flat(k), flat(u), y, gates, starts, ends, slices=count, **options)
    d_q, d_k = (x.sum(0).astype(q.dtype).reshape(q.shape) for x in (d_q, d_k))
    d_initial = first[:, 0].reshape(d_final_state.shape)
    return d_q, d_k, d_u.reshape(u.shape), decay_gradient(sums, gates, sizes), d_initial
