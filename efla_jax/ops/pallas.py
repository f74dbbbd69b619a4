"""The delta rule through GPU kernels: which input they serve, their layout, and their gradients.

The kernels are in `efla_jax/kernels` and imported inside functions only. They want the time a multiple of 64, gates as
[B, H, T] and documents numbered inside each chunk. Time is filled up with inert tokens (zero k, q, u, erase and log
decay). Autodiff of this layout is exact: only the kernels need a gradient of their own.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from efla_jax.ops.arguments import Recurrence
from efla_jax.ops.chunked import FORGET
from efla_jax.ops.hopper import require_hopper
from efla_jax.ops.pallas_step import one_token
from efla_jax.ops.sharded import cotangent_over, part, state_over

CHUNK = 64  # tokens of a chunk in every kernel


def whole_chunks(x: jax.Array) -> jax.Array:
    """x [B, T, ...] filled up with zeros to whole chunks."""
    missing = -x.shape[1] % CHUNK
    return jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2)) if missing else x


def chunk_documents(starts: jax.Array | None) -> jax.Array | None:
    """[B, T] bool -> [B, T filled up] float32: how many documents began in the chunk up to and including the token."""
    if starts is None:
        return None
    inside = whole_chunks(starts).reshape(starts.shape[0], -1, CHUNK)
    return jnp.cumsum(inside, axis=-1, dtype=jnp.float32).reshape(starts.shape[0], -1)


def gates_by_head(x: jax.Array) -> jax.Array:
    """[B, T, H] -> [B, H, T filled up]."""
    return whole_chunks(x).swapaxes(1, 2)


def require_one_dtype(op: str, x: Recurrence) -> None:
    """NotImplementedError unless q, k and u have one dtype: a tensor core multiplies like with like."""
    if not x.q.dtype == x.k.dtype == x.u.dtype:
        raise NotImplementedError(f"{op}: kernels take q, k, u of one dtype, not {x.q.dtype}, {x.k.dtype}, {x.u.dtype}")


class How(NamedTuple):
    """How a delta rule is computed. config: of the kernels; step: None, or how raw keys, values and beta, in the places
    of k, u and erase, become one; interpret: parameters of Mosaic's interpreter, or None for a device; context: the
    mesh axis over which devices have parts of the time, or None."""

    config: Any
    step: str | None
    interpret: Any
    context: str | None = None

    def of_forward(self) -> dict[str, Any]:
        over = None if self.context is None else functools.partial(state_over, self.context)
        return dict(config=self.config, step=self.step, interpret=self.interpret, hand_over=over)


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def solve(q, k, u, erase, log_decay, documents, keep, initial_state, how: How):
    """(o, final state) in the kernels' layout (see `kernels/delta_rule.py`)."""
    from efla_jax.kernels import delta_rule as kernel

    arguments = q, k, u, erase, log_decay, documents, initial_state
    return kernel.forward(*arguments, save=False, keep=keep, **how.of_forward())[:2]


def _forward(q, k, u, erase, log_decay, documents, keep, initial_state, how):
    from efla_jax.kernels import delta_rule as kernel

    arguments = q, k, u, erase, log_decay, documents, initial_state
    o, final, saved = kernel.forward(*arguments, save=True, keep=keep, **how.of_forward())
    return (o, final), (arguments[:6], keep, saved)


def _backward(how, residuals, cotangents):
    from efla_jax.kernels import delta_rule_gradients as kernel

    (q, k, u, erase, log_decay, documents), keep, (inverse, gates, states, *more) = residuals
    d_o, d_final = cotangents
    tiles = u.shape[2] // erase.shape[1]

    def repeated(x):
        return jnp.repeat(x, tiles, axis=1) if tiles > 1 else x

    def of_gates(x):
        return jnp.sum(x.reshape(*erase.shape[:2], tiles, -1), axis=2) if tiles > 1 else x

    if how.step is not None:  # the squares of the keys' lengths
        more = list(map(repeated, more))
    saved = repeated(inverse), repeated(gates), states, *more
    arguments = q, k, u, repeated(erase), repeated(log_decay), documents, saved, d_o, d_final.swapaxes(2, 3)
    kept = None if keep is None else repeated(keep)
    over = None if how.context is None else functools.partial(cotangent_over, how.context)
    options = dict(step=how.step, keep=kept, hand_over=over, interpret=how.interpret)
    d_q, d_k, d_u, d_erase, d_decay, *d_keep, d_initial = kernel.backward(*arguments, **options)
    d_documents = None if documents is None else jnp.zeros_like(documents)
    d_keys = of_key_heads(d_q, q), of_key_heads(d_k, q)
    d_kept = of_gates(*d_keep) if d_keep else None
    if how.context is not None:  # what every device says of a state that all share is summed
        d_initial = jnp.where(part(how.context) == 0, d_initial, 0.0)
    return *d_keys, d_u, of_gates(d_erase), of_gates(d_decay), d_documents, d_kept, d_initial.swapaxes(2, 3)


def of_key_heads(gradient: jax.Array, like: jax.Array) -> jax.Array:
    """Gradients [B, T, H, K] of every value head summed, in float32, over those that read one key head, as `like`."""
    batch, time, key_heads, key_dim = like.shape
    if gradient.shape[2] == key_heads:
        return gradient.astype(like.dtype)
    gradient = gradient.reshape(batch, time, key_heads, -1, key_dim)
    total = jnp.sum(gradient, axis=3, dtype=jnp.float32).astype(like.dtype)
    return jax.lax.optimization_barrier(total)  # XLA would merge it with sums over channels (see `normalize.py`)


solve.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 5))
def laid_out(x: Recurrence, config, step, interpret, keep=None, context=None) -> tuple[jax.Array, jax.Array]:
    """`solve` from and to the library's layout. Channels of the values do not mix: where they are many, tiles of them
    become heads that share their gates. keep [B, N, H]: see `pallas_routed.py`; context: see `How`."""
    assert x.erase is not None
    batch, time, heads, value_dim = x.u.shape
    tile = value_tile(value_dim, x.k.shape[3])
    tiles = value_dim // tile

    def state_of(x, *shape):  # [B, H, K, V] -> [B, H tiles, K, tile] and back
        return x if tiles == 1 else jnp.moveaxis(x.reshape(batch, heads, *shape), 3, 2)

    o, final = solve(
        whole_chunks(x.q),
        whole_chunks(x.k),
        whole_chunks(x.u.reshape(batch, time, heads * tiles, tile)),
        gates_by_head(x.erase),
        # What forgets all anyway is bounded, so that the running sums keep their digits.
        gates_by_head(jnp.maximum(x.log_decay, FORGET)),
        chunk_documents(x.starts),
        None if keep is None else keep.swapaxes(1, 2),
        state_of(x.initial_state, -1, tiles, tile).reshape(batch, heads * tiles, -1, tile),
        How(config, step, interpret, context),
    )
    return o[:, :time].reshape(x.u.shape), state_of(final, tiles, -1, tile).reshape(x.initial_state.shape)


def value_tile(value_dim: int, key_dim: int) -> int:
    """Channels of the values that the kernels take as one head: with K = 256 all."""
    return value_dim if key_dim > 128 else 128 if value_dim % 128 == 0 else 64


def config_for(kind: str, key_dim: int, value_dim: int, dtype) -> Any:
    """The table's config on this kind of device, by the channels of the values that the kernels take as one head."""
    from efla_jax.kernels import delta_rule as kernel

    return kernel.config_for(kind, key_dim, value_tile(value_dim, key_dim), dtype)


def by_kernels(op: str, x: Recurrence, config, step, interpret, context=None) -> tuple[jax.Array, jax.Array]:
    """What `delta_rule` and `delta_flow` do with whole sequences, or with parts of them over a mesh axis."""
    kind = require_hopper(op) if interpret is None else "interpreter"
    if x.u.size == 0:  # no token, no row or no channel to write
        return x.u, x.initial_state
    from efla_jax.kernels import delta_rule as kernel

    require_one_dtype(op, x)
    key_dim, value_dim, dtype = x.k.shape[-1], x.u.shape[-1], x.k.dtype
    if reason := kernel.unsupported(key_dim, value_dim, dtype, step):
        raise NotImplementedError(f"{op}: no GPU kernel for {reason}")
    return laid_out(x, config or config_for(kind, key_dim, value_dim, dtype), step, interpret, None, context)


def delta_rule(x: Recurrence, _chunk_size: int, config=None, interpret=None) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of u and the final state [B, H, K, V] float32. NotImplementedError, with the
    reason, for what the kernels do not serve. config: a `kernels.delta_rule.Config` instead of the table's."""
    if x.k.shape[1] == 1 and x.u.size > 0:
        return one_token(x, interpret)
    return by_kernels("delta_rule", x, config, None, interpret)


def delta_rule_part(x: Recurrence, context: str, config=None, interpret=None) -> tuple[jax.Array, jax.Array]:
    """The same where x is this device's part of the time over a mesh axis; the final state is that after the last."""
    if x.k.shape[1] == 1:
        raise NotImplementedError("delta_rule: parts of one token each")
    return by_kernels("delta_rule", x, config, None, interpret, context)


def delta_flow(x: Recurrence, step: str, config=None, interpret=None) -> tuple[jax.Array, jax.Array]:
    """`delta_rule` of raw keys, values and beta, which stand for k, u and erase in x, by a step of `ops.delta_flow`."""
    return by_kernels("delta_flow", x, config, step, interpret)
