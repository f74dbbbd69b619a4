"""The arguments of a recurrence, checked and made uniform once, so that every implementation receives the same clean
input."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from efla_jax.ops.segments import mask_padding, segments
from efla_jax.shapes import check_floating, check_heads, check_segment_ids, check_shapes


class Recurrence(NamedTuple):
    """What an implementation gets: padding is already a no-op (zero k, u, erase, log decay), nothing optional is left
    but `erase`.

    q, k [B, T, G, K]; u [B, T, H, V]; erase [B, T, H] float32 or None (linear attention); log_decay [B, T, H] float32;
    initial_state [B, H, K, V] float32; starts [B, T] bool, or None for one document: the state is dropped before such a
    token."""

    q: jax.Array
    k: jax.Array
    u: jax.Array
    erase: jax.Array | None
    log_decay: jax.Array
    initial_state: jax.Array
    starts: jax.Array | None


def recurrence(q, k, u, erase, log_decay, initial_state, segment_ids) -> Recurrence:
    """Check every argument (ValueError) and return the clean form. Gates and states become float32."""
    sizes = check_shapes(
        {
            "q": (q, "BTGK"),
            "k": (k, "BTGK"),
            "u": (u, "BTHV"),
            "erase": (erase, "BTH"),
            "log_decay": (log_decay, "BTH"),
            "initial_state": (initial_state, "BHKV"),
        }
    )
    check_floating({"q": q, "k": k, "u": u, "erase": erase, "log_decay": log_decay, "initial_state": initial_state})
    check_heads(sizes["G"], sizes["H"])
    batch, time, heads = sizes["B"], sizes["T"], sizes["H"]
    check_segment_ids(segment_ids, batch, time)
    if log_decay is None:
        log_decay = jnp.zeros((batch, time, heads), jnp.float32)
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, sizes["K"], sizes["V"]), jnp.float32)
    log_decay = log_decay.astype(jnp.float32)
    erase = None if erase is None else erase.astype(jnp.float32)
    starts = None
    if segment_ids is not None:
        found = segments(segment_ids)
        starts = found.starts
        q, k, u, log_decay = (mask_padding(found.real, x) for x in (q, k, u, log_decay))
        erase = None if erase is None else mask_padding(found.real, erase)
    return Recurrence(q, k, u, erase, log_decay, initial_state.astype(jnp.float32), starts)
