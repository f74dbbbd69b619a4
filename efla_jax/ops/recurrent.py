"""Token by token: the definition of both recurrences as a `lax.scan`, in float32. Slow, exact, differentiable by
autodiff.

S_t = exp(g_t) (I - e_t k_t k_t^T) S_{t-1} + k_t u_t^T        o_t = S_t^T q_t        (e_t absent: linear attention)
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.ops.arguments import Recurrence

PRECISION = lax.Precision.HIGHEST


@functools.partial(jax.jit, static_argnums=1)
def recurrent(x: Recurrence, _chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of u and the final state [B, H, K, V] float32."""
    batch, _, key_heads, _ = x.k.shape
    heads, value_dim = x.u.shape[2:]
    group = (batch, key_heads, heads // key_heads)

    def step(state, token):
        q, k, u, erase, decay, starts = token
        if starts is not None:
            state = jnp.where(starts[:, None, None, None, None], 0.0, state)
        state = jnp.exp(decay)[..., None, None] * state
        write = (
            u if erase is None else u - erase[..., None] * jnp.einsum("bgk,bgrkv->bgrv", k, state, precision=PRECISION)
        )
        state = state + k[:, :, None, :, None] * write[..., None, :]
        return state, jnp.einsum("bgk,bgrkv->bgrv", q, state, precision=PRECISION)

    def tokens(array, *shape):
        return jnp.moveaxis(array.astype(jnp.float32), 1, 0).reshape(array.shape[1], *shape)

    xs = (
        tokens(x.q, *x.q.shape[:1], *x.q.shape[2:]),
        tokens(x.k, *x.k.shape[:1], *x.k.shape[2:]),
        tokens(x.u, *group, value_dim),
        None if x.erase is None else tokens(x.erase, *group),
        tokens(x.log_decay, *group),
        None if x.starts is None else jnp.moveaxis(x.starts, 1, 0),
    )
    state = x.initial_state.reshape(*group, *x.initial_state.shape[2:])
    state, o = lax.scan(step, state, xs)
    return jnp.moveaxis(o, 0, 1).reshape(x.u.shape).astype(x.u.dtype), state.reshape(x.initial_state.shape)
