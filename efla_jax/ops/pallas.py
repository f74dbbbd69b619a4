"""The delta rule through GPU kernels: which input they serve, their layout, and their gradients.

The kernels are in `efla_jax/kernels` and imported inside functions only. They want the time a multiple of 64, gates as
[B, H, T], states transposed [B, H, V, K] and documents numbered inside each chunk. Time is filled up with inert tokens
(zero k, q, u, erase and log decay). Autodiff of this layout is exact: only the kernels need a gradient of their own.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp

from efla_jax.ops.arguments import Recurrence
from efla_jax.ops.chunked import FORGET

CHUNK = 64  # tokens of a chunk in every kernel
HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")  # in the name of a device


def device() -> Any:
    """The device that is compiled for: that of an abstract mesh, the default one, or the first."""
    return jax.sharding.get_abstract_mesh().abstract_device or default_device() or jax.devices()[0]


def default_device() -> Any:
    """What `jax.default_device` names, a device or a platform, as a device; None if nothing."""
    named = jax.config.jax_default_device
    return jax.devices(named)[0] if isinstance(named, str) else named


def require_hopper(op: str) -> str:
    """The kind of the device, if its tensor cores have wgmma: NVIDIA Hopper alone. NotImplementedError otherwise."""
    found = device()
    if getattr(found, "compute_capability", None) != "9.0" and not HOPPER.search(found.device_kind):
        raise NotImplementedError(
            f"{op}: the GPU kernels need an NVIDIA Hopper GPU, not {found.device_kind!r}; use implementation='chunked' "
            "or 'auto'."
        )
    return found.device_kind


def whole_chunks(x: jax.Array) -> jax.Array:
    """x [B, T, ...] filled up with zeros to whole chunks."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % CHUNK)) + ((0, 0),) * (x.ndim - 2))


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def solve(q, k, u, erase, log_decay, documents, initial_state, kind: str, interpret):
    """(o, final state) in the kernels' layout (see `kernels/delta_rule.py`). kind: of the device, for the configs;
    interpret: parameters of Mosaic's interpreter, or None for a device."""
    return run_forward((q, k, u, erase, log_decay, documents, initial_state), kind, interpret, save=False)[:2]


def run_forward(arguments: tuple, kind: str, interpret, save: bool) -> tuple:
    from efla_jax.kernels import delta_rule as kernel

    k, u = arguments[1:3]
    config = kernel.config_for(kind, k.shape[-1], u.shape[-1], k.dtype)
    return kernel.forward(*arguments, config=config, save=save, interpret=interpret)


def _forward(q, k, u, erase, log_decay, documents, initial_state, kind, interpret):
    arguments = q, k, u, erase, log_decay, documents, initial_state
    o, final, saved = run_forward(arguments, kind, interpret, save=True)
    return (o, final), (arguments[:6], saved)


def _backward(kind, interpret, residuals, cotangents):
    from efla_jax.kernels import delta_rule_gradients as kernel

    arguments, saved = residuals
    q, documents = arguments[0], arguments[5]
    d_q, d_k, d_u, d_erase, d_decay, d_initial = kernel.backward(*arguments, saved, *cotangents, interpret=interpret)
    d_documents = None if documents is None else jnp.zeros_like(documents)
    return of_key_heads(d_q, q), of_key_heads(d_k, q), d_u, d_erase, d_decay, d_documents, d_initial


def of_key_heads(gradient: jax.Array, like: jax.Array) -> jax.Array:
    """Gradients [B, T, H, K] of every value head summed, in float32, over those that read one key head, as `like`."""
    batch, time, key_heads, key_dim = like.shape
    if gradient.shape[2] == key_heads:
        return gradient.astype(like.dtype)
    gradient = gradient.reshape(batch, time, key_heads, -1, key_dim)
    return jnp.sum(gradient, axis=3, dtype=jnp.float32).astype(like.dtype)


solve.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=(1, 2))
def laid_out(x: Recurrence, kind: str, interpret) -> tuple[jax.Array, jax.Array]:
    """`solve` from and to the library's layout. Channels of the values do not mix: where they are many, tiles of them
    become heads that share their gates."""
    assert x.erase is not None
    batch, time, heads, value_dim = x.u.shape
    tile = 128 if value_dim % 128 == 0 else 64
    tiles = value_dim // tile
    u = whole_chunks(x.u.reshape(batch, time, heads * tiles, tile))
    # What forgets all anyway is bounded, so that the running sums keep their digits.
    gates = x.erase, jnp.maximum(x.log_decay, FORGET)
    erase, log_decay = (gates_by_head(jnp.repeat(gate, tiles, axis=2)) for gate in gates)
    initial = x.initial_state.swapaxes(2, 3)
    o, final = solve(
        whole_chunks(x.q),
        whole_chunks(x.k),
        u,
        erase,
        log_decay,
        chunk_documents(x.starts),
        initial.reshape(batch, heads * tiles, tile, -1),
        kind,
        interpret,
    )
    return o[:, :time].reshape(x.u.shape), final.reshape(initial.shape).swapaxes(2, 3)


def delta_rule(x: Recurrence, _chunk_size: int, interpret=None) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of u and the final state [B, H, K, V] float32. NotImplementedError, with the
    reason, for what the kernels do not serve."""
    kind = require_hopper("delta_rule") if interpret is None else "interpreter"
    if x.u.size == 0:  # no token, no row or no channel to write
        return x.u, x.initial_state
    from efla_jax.kernels.delta_rule import unsupported

    require_one_dtype("delta_rule", x)
    if reason := unsupported(x.k.shape[-1], x.u.shape[-1], x.k.dtype):
        raise NotImplementedError(f"delta_rule: no GPU kernel for {reason}")
    return laid_out(x, kind, interpret)
