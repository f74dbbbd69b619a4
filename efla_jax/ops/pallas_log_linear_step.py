"""The GPU kernel of one token for both log-linear operators: which slots are live, gradients, vmap.

The gradient is that of "recurrent": a token that is differentiated is not decoded, and its states are not in place."""

import functools

import jax
import jax.numpy as jnp

from efla_jax.ops.fenwick import Fenwick, fenwick_recurrent, meeting_slot, states_of
from efla_jax.ops.hopper import require_hopper
from efla_jax.ops.pallas_step import more_rows


def one_token(f: Fenwick, interpret=None) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, 1, H, V] in the dtype of u and the states [B, H, L, K, V] float32 after one token per row.

    States that are donated, or carried by a loop, are updated in their buffer; slots that the position has not are
    left as they are. interpret: parameters of Mosaic's interpreter. Raises NotImplementedError for sizes that the
    kernel does not cover, another T and other GPUs."""
    if interpret is None:
        require_hopper("one-token kernel")
    from efla_jax.kernels.delta_step import unsupported

    x = f.x
    if x.u.size == 0 or x.k.shape[1] != 1:
        raise NotImplementedError(f"one-token kernel: u has shape {x.u.shape}, but it takes T = 1 and no empty axis.")
    if reason := unsupported(x.k.shape[3], x.u.shape[3], 1):
        raise NotImplementedError(f"one-token kernel: {reason}; use implementation='recurrent'.")
    return solved(f._replace(states=states_of(f)), interpret)


def live_slots(start: jax.Array, levels: int) -> jax.Array:
    """[B] int32, bit l for slot l that documents of `start` tokens have."""
    last = levels - 1
    below = (start & ((1 << max(last - 1, 0)) - 1)) << 1  # slot l for bit l - 1
    return below | jnp.where(start >> max(last - 1, 0) > 0, 1 << last, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _solve(f: Fenwick, interpret):
    from efla_jax.kernels.log_linear_step import step

    x, levels = f.x, f.level_weights.shape[3]
    depth = meeting_slot(f.start + 1, f.start, levels)
    depth = depth if f.real is None else jnp.where(f.real[:, 0], depth, -1)
    erase = None if x.erase is None else x.erase[:, 0]
    gates = x.log_decay[:, 0], f.level_weights[:, 0]
    call = more_rows(lambda *given: step(*given, interpret=interpret))
    o, states = call(x.q[:, 0], x.k[:, 0], x.u[:, 0], erase, *gates, live_slots(f.start, levels), depth, f.states)
    return o[:, None].astype(x.u.dtype), states


def _forward(f, interpret):
    return _solve(f, interpret), f


def _backward(_, f, cotangents):
    x = f.x

    def recurrent(q, k, u, erase, log_decay, weights, states):
        inputs = x._replace(q=q, k=k, u=u, erase=erase, log_decay=log_decay)
        return fenwick_recurrent(f._replace(x=inputs, level_weights=weights, states=states), 1)

    _, pull = jax.vjp(recurrent, x.q, x.k, x.u, x.erase, x.log_decay, f.level_weights, f.states)
    d_q, d_k, d_u, d_erase, d_decay, d_weights, d_states = pull(cotangents)
    d_x = x._replace(q=d_q, k=d_k, u=d_u, erase=d_erase, log_decay=d_decay, initial_state=None, starts=None)
    return (Fenwick(d_x, d_weights, d_states, None, None, None),)


_solve.defvjp(_forward, _backward)
solved = jax.jit(_solve, static_argnums=1)  # traced and lowered once for all layers of the same sizes
