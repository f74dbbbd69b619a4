"""Linear attention with a scalar decay per head on NVIDIA GPUs: forward and backward for `ops/pallas_linear.py`.

    S_t = exp(g_t) S_{t-1} + k_t u_t^T        o_t = S_t^T q_t

This file has the gate vectors, the split of the time into parts and the configs; the programs are in
`linear_attention_mosaic.py` and `linear_attention_gradients.py`.

Bytes of the backward at G = 1: the forward saves the state before every chunk in 16 bits, T / 64 of them, and a pass
over q and dO adds as many cotangents of it. For K = 128 that is twice K / 64 = 4 values for each one of u, so that the
backward moves 8 of them for each of u (2 states written, 2 read, dO twice, u, dU), and dq, dk nothing to speak of: a
program sums them over the value heads. Written per value head and summed in XLA they would be 8 more.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.kernels.linear_attention_gradients import BALANCE, KEPT, LEFT, Inputs, gradients
from efla_jax.kernels.linear_attention_mosaic import CHUNK, DOCUMENT, INTO, TILE, Plan, Sizes, accumulate, walk
from efla_jax.kernels.mosaic import narrow_indices, unsupported_keys, unsupported_values

KEY_DIMS = (64, 128, 256)
LN2 = math.log(2)
LEAST, MOST = 2, 32  # chunks that a part of the time has at least; parts at most


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is cut for the GPU.

    stages: chunks loaded ahead in a walk, and tiles in the gradients; fewer where shared memory is too small.
    multiprocessors: of the GPU, each of which holds one program.
    waves: programs wanted for each of them; with fewer the time is split into parts, or the heads.
    automatic_barriers: Mosaic's around every store to shared memory, which the programs do not need."""

    stages: int = 3
    multiprocessors: int = 132
    waves: float = 2.0
    automatic_barriers: bool = True


# By device kind, K, V and dtype. Where a row lacks, SAFE serves: right on every Hopper GPU, tuned on none.
TABLE: dict[tuple[str, int, int, str], Config] = {
    ("NVIDIA H200", 128, 64, "bfloat16"): Config(),
    ("NVIDIA H200", 128, 128, "bfloat16"): Config(),
    ("NVIDIA H200", 64, 64, "bfloat16"): Config(),
    ("NVIDIA H200", 256, 256, "bfloat16"): Config(),
    ("NVIDIA H200", 256, 512, "bfloat16"): Config(),
}
SAFE = Config(stages=2)


def config_for(device_kind: str, key_dim: int, value_dim: int, dtype) -> Config:
    """The table's row for these sizes on this device, or the safe one."""
    return TABLE.get((device_kind, key_dim, value_dim, jnp.dtype(dtype).name), SAFE)


def unsupported(key_dim: int, value_dim: int, dtype) -> str | None:
    """Why the kernels cannot serve these sizes, or None."""
    return unsupported_keys(key_dim, KEY_DIMS, dtype) or unsupported_values(value_dim)


def wanted_parts(sizes: Sizes, config: Config) -> int:
    """Into how many parts a walk would like to split the time: 1, or a power of two.

    A split costs one more pass over k and u, so it must at least double the programs that run at once."""
    count = 1
    if 2 * sizes.programs > config.multiprocessors:
        return count
    most = config.waves * config.multiprocessors
    while 2 * count * sizes.programs <= most and sizes.chunks >= 2 * count * LEAST and 2 * count <= MOST:
        count *= 2
    return count


def parts(sizes: Sizes, config: Config) -> int:
    """How many parts there are: as many as are wanted, or the most that divides the chunks."""
    count = wanted_parts(sizes, config)
    while sizes.chunks % count:
        count //= 2
    return count


def padded_time(time: int, k: jax.Array, u: jax.Array, config: Config) -> int:
    """The least time, a multiple of 64, at which the wanted parts are equal. k [B, T, G, K], u [B, T, H, V]."""
    chunks = -(-time // CHUNK)
    count = wanted_parts(Sizes(k.shape[0], chunks, k.shape[2], u.shape[2], k.shape[3], u.shape[3], 3), config)
    return -(-chunks // count) * count * CHUNK


def slices(sizes: Sizes, config: Config) -> int:
    """Programs that share the tiles of a key head in `gradients`: 1, or a power of two while there are few programs.

    With more than one, dq and dk are written in float32 by each and summed in XLA."""
    count, programs = 1, sizes.batch * sizes.chunks * sizes.key_heads * sizes.halves
    while sizes.per_key % (2 * count) == 0 and 2 * count * programs <= config.waves * config.multiprocessors:
        count *= 2
    return count


def sizes_of(k: jax.Array, u: jax.Array, gates: jax.Array) -> Sizes:
    batch, time, key_heads, key_dim = k.shape
    return Sizes(batch, time // CHUNK, key_heads, u.shape[2], key_dim, u.shape[3], gates.shape[3])


def flat(x: jax.Array) -> jax.Array:
    """[B, T, heads, channels] -> [B, T, heads channels]."""
    return x.reshape(*x.shape[:2], -1)


def summed(x: jax.Array, seen: jax.Array) -> jax.Array:
    """Sums over j of x [B, N, H, C] where seen [C, C] or [B, N, C, C] (i, j), in float32.

    A product with a matrix of ones is one launch on a GPU, a cumulative sum several."""
    spec = "bnhj,ij->bnhi" if seen.ndim == 2 else "bnhj,bnij->bnhi"
    return jnp.einsum(spec, x, seen.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def same_document(number: jax.Array | None) -> jax.Array:
    """[B, N, C, C] bool: tokens of one document, number [B, N, 1, C]; [C, C] if there is one document (None)."""
    if number is None:
        return jnp.ones((CHUNK, CHUNK), bool)
    return (number[..., :, None] == number[..., None, :])[:, :, 0]


def gate_vectors(log_decay: jax.Array, documents: jax.Array | None) -> jax.Array:
    """[B, N, H, 3 or 4, C] float32: G / ln 2, G the running sum of the log decay in a token's own document and chunk;
    "in" = exp(G) before the chunk's first document start; "out" = exp(G_C - G) in the chunk's last document; with
    documents their number.

    The sum starts anew at every document, so a reset costs it no precision."""
    batch, heads, time = log_decay.shape
    g = log_decay.reshape(batch, heads, time // CHUNK, CHUNK).swapaxes(1, 2)
    number = None if documents is None else documents.reshape(batch, time // CHUNK, 1, CHUNK)
    total = summed(g, jnp.tril(same_document(number)))
    into, out = total, total[..., -1:] - total
    if number is None:
        return jnp.stack([total / LN2, jnp.exp(into), jnp.exp(out)], axis=-2)
    into = jnp.where(number == 0, into, -jnp.inf)
    out = jnp.where(number == number[..., -1:], out, -jnp.inf)
    return jnp.stack([total / LN2, jnp.exp(into), jnp.exp(out), jnp.broadcast_to(number, total.shape)], axis=-2)


def starts_of_parts(added, gates, initial, *, backwards: bool) -> jax.Array:
    """[B, P, H V, K]: the state from which each part begins, given what each makes of a zero state, in that shape, and
    the first part's (backwards: the last's) initial [B, H V, K]."""
    count, heads = added.shape[1], gates.shape[2]
    decay = jnp.prod(gates[..., INTO, -1].reshape(added.shape[0], count, -1, heads), axis=2)
    decay = jnp.repeat(decay, added.shape[2] // heads, axis=2)[..., None]
    state, starts = initial, []
    for part in reversed(range(count)) if backwards else range(count):  # few, and XLA fuses them into one pass
        starts.append(state)
        state = decay[:, part] * state + added[:, part]
    return jnp.stack(starts[::-1] if backwards else starts, axis=1)


def started(x, y, gates, initial, plan: Plan) -> jax.Array:
    """[B, P, H V, K]: the states from which the parts of a walk begin, initial [B, H, V, K] that of the whole."""
    batch, _, lanes, key_dim = plan.sizes.states
    initial = initial.reshape(batch, lanes, key_dim)
    if plan.parts == 1:
        return initial[:, None]
    zeros = jnp.zeros((batch, plan.parts, lanes, key_dim), jnp.float32)
    added, _ = accumulate(x, y, gates.reshape(batch, -1, CHUNK), zeros, dataclasses.replace(plan, save=False))
    return starts_of_parts(added, gates, initial, backwards=plan.backwards)


@narrow_indices()
def forward(q, k, u, log_decay, documents, initial_state, *, config: Config, save: bool, interpret=None):
    """(o [B, T, H, V], final state [B, H, V, K] float32, saved or None).

    q, k [B, T, G, K], u [B, T, H, V] of one 16-bit dtype, T a multiple of 64; log_decay [B, H, T] float32; documents
    None or [B, T] float32, how many documents have begun in the chunk up to and with the token; initial_state
    [B, H, V, K] float32. saved = (gates [B, N, H, 3 or 4, 64] float32, states before each chunk [B, N, H V, K])."""
    gates = gate_vectors(log_decay, documents)
    sizes = sizes_of(k, u, gates)
    plan = Plan(sizes, parts(sizes, config), config.stages, save, False, config.automatic_barriers, interpret)
    starts = started(flat(k), flat(u), gates, initial_state, plan)
    o, final, states = walk(flat(q), flat(k), flat(u), gates.reshape(sizes.batch, -1, CHUNK), starts, plan)
    return o.reshape(u.shape), final[:, -1].reshape(initial_state.shape), (gates, states) if save else None


def decay_gradient(sums, gates, sizes: Sizes) -> jax.Array:
    """d log_decay [B, H, T] from the sums of `gradients`: every G sums the log decays of its document so far.

    A token's "out" holds the decays behind it: its part goes to those by a sum over the tokens before them."""
    sums = sums.reshape(sizes.batch, sizes.chunks, sizes.heads, sizes.per_head * sizes.halves, 2, 3, CHUNK).sum(3)
    query, key = sums[..., 0, :, :], sums[..., 1, :, :]
    state = query[..., KEPT, :].sum(-1) + (key[..., KEPT, :].sum(-1) if sizes.key_dim > TILE else 0.0)
    ahead = query[..., LEFT, :] + query[..., BALANCE, :] - key[..., BALANCE, :]
    ahead = ahead.at[..., -1].add(gates[..., INTO, -1] * state)
    number = gates[:, :, :1, DOCUMENT, :] if sizes.rows > DOCUMENT else None
    gradient = summed(ahead, jnp.triu(same_document(number)))
    gradient += summed(key[..., LEFT, :], jnp.tril(same_document(None), -1))
    return gradient.swapaxes(1, 2).reshape(sizes.batch, sizes.heads, -1)


@narrow_indices()
def backward(q, k, u, saved, d_o, d_final_state, *, config: Config, interpret=None):
    """(dq, dk [B, T, G, K], dU [B, T, H, V], d log_decay [B, H, T] float32, d initial_state [B, H, V, K] float32).

    dq and dk are summed over the value heads of a key head, in float32. Arguments as in `forward`; d_o like u."""
    gates, starts = saved
    sizes = sizes_of(k, u, gates)
    plan = Plan(sizes, parts(sizes, config), config.stages, True, True, config.automatic_barriers, interpret)
    x, y = flat(q), flat(d_o)
    last = started(x, y, gates, d_final_state, plan)
    first, ends = accumulate(x, y, gates.reshape(sizes.batch, -1, CHUNK), last, plan)
    rows = gates.reshape(sizes.batch, -1, *gates.shape[3:])
    inputs = Inputs(x, flat(k), flat(u), y, rows, starts, ends)
    if sizes.wide:
        sizes = dataclasses.replace(sizes, key_dim=sizes.key_dim // 2, halves=2)
    count = slices(sizes, config)
    out = gradients(inputs, sizes, stages=config.stages, slices=count, options=plan.options)
    d_q, d_k = (x.sum(0).astype(q.dtype).reshape(q.shape) for x in (out.d_q, out.d_k))
    d_initial = first[:, 0].reshape(d_final_state.shape)
    d_u = out.d_u if sizes.halves == 1 else out.d_u.sum(0).astype(u.dtype)
    return d_q, d_k, d_u.reshape(u.shape), decay_gradient(out.sums, gates, sizes), d_initial
