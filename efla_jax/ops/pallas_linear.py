"""Linear attention through GPU kernels: which input they serve, their layout, and their gradients.

As `pallas.py` does it for the delta rule: kernels are imported inside functions only, the time is filled up with inert
tokens, and autodiff of the layout is exact, so that only the kernels need a gradient of their own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from efla_jax.ops.arguments import Recurrence
from efla_jax.ops.chunked import FORGET
from efla_jax.ops.hopper import require_hopper
from efla_jax.ops.pallas import chunk_documents, gates_by_head, require_one_dtype
from efla_jax.ops.pallas_step import one_token


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def solve(q, k, u, log_decay, documents, initial_state, config, interpret):
    """(o, final state) in the kernels' layout (see `kernels/linear_attention.py`). interpret: parameters of Mosaic's
    interpreter, or None for a device."""
    from efla_jax.kernels import linear_attention as kernel

    arguments = q, k, u, log_decay, documents, initial_state
    return kernel.forward(*arguments, config=config, save=False, interpret=interpret)[:2]


def _forward(q, k, u, log_decay, documents, initial_state, config, interpret):
    from efla_jax.kernels import linear_attention as kernel

    arguments = q, k, u, log_decay, documents, initial_state
    o, final, saved = kernel.forward(*arguments, config=config, save=True, interpret=interpret)
    return (o, final), (q, k, u, documents, saved)


def _backward(config, interpret, residuals, cotangents):
    from efla_jax.kernels import linear_attention as kernel

    q, k, u, documents, saved = residuals
    options = dict(config=config, interpret=interpret)
    d_q, d_k, d_u, d_decay, d_initial = kernel.backward(q, k, u, saved, *cotangents, **options)
    return d_q, d_k, d_u, d_decay, None if documents is None else jnp.zeros_like(documents), d_initial


solve.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=(1, 2))
def laid_out(x: Recurrence, config, interpret) -> tuple[jax.Array, jax.Array]:
    """`solve` from and to the library's layout."""
    from efla_jax.kernels.linear_attention import padded_time

    time = x.u.shape[1]
    missing = padded_time(time, x.k, x.u, config) - time

    def filled(x):
        return None if x is None else jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))

    q, k, u, starts = filled(x.q), filled(x.k), filled(x.u), filled(x.starts)
    # What forgets all anyway is bounded, so that the running sums keep their digits.
    log_decay = gates_by_head(filled(jnp.maximum(x.log_decay, FORGET)))
    initial_state = x.initial_state.swapaxes(2, 3)
    o, final = solve(q, k, u, log_decay, chunk_documents(starts), initial_state, config, interpret)
    return o[:, :time], final.swapaxes(2, 3)


def config_for(kind: str, key_dim: int, value_dim: int, dtype) -> Any:
    """The table's config on this kind of device."""
    from efla_jax.kernels import linear_attention as kernel

    return kernel.config_for(kind, key_dim, value_dim, dtype)


def linear_attention(x: Recurrence, _chunk_size: int, config=None, interpret=None) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of u and the final state [B, H, K, V] float32. NotImplementedError, with the
    reason, for what the kernels do not serve. config: a `kernels.linear_attention.Config` instead of the table's."""
    kind = require_hopper("linear_attention") if interpret is None else "interpreter"
    if x.u.size == 0:  # no token, no row or no channel to write
        return x.u, x.initial_state
    if x.k.shape[1] == 1:
        return one_token(x, interpret)
    from efla_jax.kernels import linear_attention as kernel

    require_one_dtype("linear_attention", x)
    key_dim, value_dim, dtype = x.k.shape[-1], x.u.shape[-1], x.k.dtype
    if reason := kernel.unsupported(key_dim, value_dim, dtype):
        raise NotImplementedError(f"linear_attention: no GPU kernel for {reason}")
    return laid_out(x, config or config_for(kind, key_dim, value_dim, dtype), interpret)
