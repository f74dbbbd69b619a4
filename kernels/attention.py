"""Softmax attention on a Hopper GPU: configs, covered sizes, and what the programs know of who sees whom.

One set of programs serves block-sparse attention and plain causal attention over documents. A row has S slots in cells
of 64. A query sees its own chunk (for plain attention: its document) up to itself, and those cells of the list that lie
before it in its document; `Seen` says so in the programs' terms. Source: FlashAttention (arXiv 2205.14135, 2307.08691);
the block-sparse form: NAtS-L (arXiv 2602.03681).
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from efla_jax.kernels import attention_gradients as key_programs
from efla_jax.kernels import attention_mosaic as programs
from efla_jax.kernels.attention_mosaic import CELL, WIDTH, Sizes, Sources

DIMS = (64, 128)
DTYPES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Config:
    """stages: steps of keys that are loaded ahead, where shared memory holds them; query_stages: of queries."""

    stages: int = 2
    query_stages: int = 4


SAFE = Config()


class Seen(NamedTuple):
    """Who sees whom, int32.

    order [B, R, M]   the list: cells that later queries of their document see, in order; what follows them is not read
    bounds [B, R, S / 128, 4]   of a tile of 128 queries: where in the list its first pair of cells is (-1: the pair's
                      first cell does not count), how many pairs need a mask, how many pairs there are, and 1 if a chunk
                      goes on from the tile before
    marks [B, R, 2, S]   the last slot that sees a slot's key; the same as if it were not in the list
    pairs [B, R, P, 6]   pairs of cells of keys for their gradients (-1: none), each cell in one pair, and two runs of
                      cells of queries that see any of them: (cell, cell, begin, count, begin, count)"""

    order: jax.Array
    bounds: jax.Array
    marks: jax.Array
    pairs: jax.Array


def unsupported(key_dim: int, value_dim: int, dtype) -> str | None:
    """Why the kernels do not cover these sizes, or None."""
    if key_dim not in DIMS or value_dim not in DIMS:
        return f"K = {key_dim}, V = {value_dim}: each must be one of {DIMS}"
    if jnp.dtype(dtype).name not in DTYPES:
        return f"dtype {jnp.dtype(dtype).name}: one of {DTYPES}"
    return None


def sizes_of(q, k, v, seen: Seen, config: Config, interpret) -> Sizes:
    (batch, slots, heads, key_dim), key_heads, value_dim = q.shape, k.shape[2], v.shape[3]
    assert slots % WIDTH == 0
    routes = seen.order.shape[1]
    return Sizes(batch, slots, heads, key_heads, routes, key_dim, value_dim, config.stages, interpret)


def forward(q, k, v, seen: Seen, *, config: Config, interpret=None) -> tuple[jax.Array, jax.Array]:
    """o [B, S, H, V] in the dtype of v, L [B, H, S] float32: logarithms of the softmax's sums.

    q [B, S, H, K], k [B, S, G, K], v [B, S, G, V] of one 16-bit dtype, S a multiple of 128."""
    sizes = sizes_of(q, k, v, seen, config, interpret)
    return programs.forward(Sources(q, k, v, *seen[:3]), sizes)


def backward(q, k, v, seen: Seen, o, log_sum, d_o, d_log_sum, *, config: Config, interpret=None):
    """(dq, dk, dv in the dtypes of q, k, v; the gradient [B, R, M] float32 of a factor of exp(score) of all keys of a
    cell for the queries of other cells). o, log_sum: of `forward`; d_o, d_log_sum: their cotangents."""
    sizes = sizes_of(q, k, v, seen, config, interpret)
    delta = jnp.sum(d_o.astype(jnp.float32) * o.astype(jnp.float32), axis=3).swapaxes(1, 2) - d_log_sum
    known = jnp.stack([log_sum * math.log2(math.e), delta], axis=2)
    d_q = programs.query_gradients(Sources(q, k, v, *seen[:3]), d_o, known, sizes)
    arguments = key_programs.Sources(q, k, v, d_o, known, seen.marks, seen.pairs)
    d_k, d_v, factors = key_programs.gradients(arguments, dataclasses.replace(sizes, stages=config.query_stages))
    factors = factors.reshape(sizes.batch, sizes.routes, -1, sizes.cells, CELL)
    return d_q, of_key_heads(d_k, k), of_key_heads(d_v, v), jnp.sum(factors, axis=(2, 4))


def of_key_heads(gradient: jax.Array, like: jax.Array) -> jax.Array:
    """Gradients [B, S, X, K] of parts of the key heads, summed in float32, as `like` [B, S, G, K]."""
    if gradient.shape == like.shape:
        return gradient
    parts = gradient.reshape(*like.shape[:3], -1, like.shape[3])
    return jnp.sum(parts, axis=3, dtype=jnp.float32).astype(like.dtype)
