"""Both recurrences as an associative scan over affine maps: parallel in time, exact, O(T K^2) memory. A reference, not
for training.

Token t is the map S -> A_t S + X_t with A_t = exp(g_t) (I - e_t k_t k_t^T), a scalar for linear attention, and X_t =
k_t u_t^T; a document's first token has A_t = 0. Maps compose by (A2, X2) o (A1, X1) = (A2 A1, A2 X1 + X2).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.ops.arguments import Recurrence

PRECISION = lax.Precision.HIGHEST


@functools.partial(jax.jit, static_argnums=1)
def associative(x: Recurrence, _chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of u and the final state [B, H, K, V] float32."""
    if x.k.shape[1] == 0:
        return x.u, x.initial_state
    repeats = x.u.shape[2] // x.k.shape[2]
    k = jnp.repeat(x.k.astype(jnp.float32), repeats, axis=2)
    q = jnp.repeat(x.q.astype(jnp.float32), repeats, axis=2)
    decay = x.log_decay if x.starts is None else jnp.where(x.starts[..., None], -jnp.inf, x.log_decay)
    keep = jnp.exp(decay)[..., None, None]
    write = k[..., :, None] * x.u.astype(jnp.float32)[..., None, :]
    compose: Callable[..., jax.Array] = jnp.multiply
    if x.erase is None:
        transition = keep
    else:
        outer = k[..., :, None] * k[..., None, :]
        transition = keep * (jnp.eye(k.shape[-1], dtype=jnp.float32) - x.erase[..., None, None] * outer)
        compose = functools.partial(jnp.matmul, precision=PRECISION)

    def combine(first, second):
        return compose(second[0], first[0]), compose(second[0], first[1]) + second[1]

    transition, added = lax.associative_scan(combine, (transition, write), axis=1)
    states = compose(transition, x.initial_state[:, None]) + added
    o = jnp.einsum("bthk,bthkv->bthv", q, states, precision=PRECISION)
    return o.astype(x.u.dtype), states[:, -1]
