"""The GPU kernel of one token, seen as an implementation of both recurrences: gates folded, gradients, vmap.

The gradient is that of "recurrent": a token that is differentiated is not decoded, and its state is not in place."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import custom_batching

from efla_jax.ops.arguments import Recurrence
from efla_jax.ops.hopper import require_hopper
from efla_jax.ops.recurrent import recurrent


def one_token(x: Recurrence, interpret=None) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, 1, H, V] in the dtype of u and the state [B, H, K, V] float32 after one token per row.

    A state that is donated, or carried by a loop, is updated in its buffer. interpret: parameters of Mosaic's
    interpreter. Raises NotImplementedError for sizes that the kernel does not cover, another T and other GPUs."""
    if interpret is None:
        require_hopper("one-token kernel")
    from efla_jax.kernels.delta_step import unsupported

    if x.u.size == 0 or x.k.shape[1] != 1:
        raise NotImplementedError(f"one-token kernel: u has shape {x.u.shape}, but it takes T = 1 and no empty axis.")
    if reason := unsupported(*x.initial_state.shape[2:]):
        raise NotImplementedError(f"one-token kernel: {reason}; use implementation='recurrent'.")
    return solved(tuple(x), interpret)


def more_rows(step: Callable) -> Callable:
    """step(*arrays) -> (o, state) of arrays [B, ...] or None, which under vmap is one call with more rows."""
    call = custom_batching.custom_vmap(step)

    @call.def_vmap
    def rule(size, batched, *arrays):
        wide = [
            None if x is None else x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_batched in zip(arrays, batched, strict=True)
        ]
        results = call(*(None if x is None else x.reshape(-1, *x.shape[2:]) for x in wide))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in results), (True, True)

    return call


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _solve(arrays, interpret):
    from efla_jax.kernels.delta_step import step

    x, call = Recurrence(*arrays), more_rows(lambda *given: step(*given, interpret=interpret))
    log_decay = x.log_decay[:, 0]
    if x.starts is not None:  # one token starts a document only where a mesh gives each device one
        log_decay = jnp.where(x.starts, -jnp.inf, log_decay)
    erase = None if x.erase is None else x.erase[:, 0]
    o, state = call(x.q[:, 0], x.k[:, 0], x.u[:, 0], erase, log_decay, x.initial_state)
    return o[:, None], state


def _forward(arrays, interpret):
    return _solve(arrays, interpret), arrays


def _backward(_, arrays, cotangents):
    *floating, starts = arrays
    _, pull = jax.vjp(lambda *given: recurrent(Recurrence(*given, starts), 1), *floating)
    return ((*pull(cotangents), None),)


_solve.defvjp(_forward, _backward)
solved = jax.jit(_solve, static_argnums=1)  # traced and lowered once for all layers of the same sizes
