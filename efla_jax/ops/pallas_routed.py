"""The routed delta rule through the kernels of the delta rule: a chunk's keep is a factor of what it leaves.

Chunks of the kernels have 64 tokens, and so have those that are kept or rolled back. The tokens behind the last full
one roll nothing back: they are a delta rule of their own, in XLA."""

import jax
import jax.numpy as jnp

from efla_jax.ops.chunked import chunked
from efla_jax.ops.hopper import require_hopper
from efla_jax.ops.pallas import CHUNK, laid_out, require_one_dtype, value_tile
from efla_jax.ops.routed_recurrent import Routed


def declined(r: Routed, size: int) -> str | None:
    """Why the kernels cannot serve this, or None."""
    time = r.x.k.shape[1]
    if size != CHUNK:
        return f"chunk_size = {size}: a chunk of the kernels has {CHUNK} tokens"
    if time < CHUNK:
        return f"T = {time}: not one chunk of {CHUNK} tokens"
    if r.x.starts is not None:
        return "segment_ids: chunks counted from the middle of a kernel's chunk are not written yet"
    if r.start is not None:
        return "initial_state: a chunk that an earlier call began is not written yet"
    if r.fade is not None:
        return "keep with a second number for each chunk: the decay of what is rolled back is not written yet"
    return None


def routed_delta_rule(r: Routed, size: int, config=None, interpret=None) -> tuple[jax.Array, ...]:
    """Outputs [B, T, H, V] in the dtype of u; the state, where the open chunk began and its log decay, in float32.
    NotImplementedError, with the reason, for what the kernels do not serve. config, interpret: see `pallas.py`."""
    kind = require_hopper("routed_delta_rule") if interpret is None else "interpreter"
    from efla_jax.kernels import delta_rule as kernel

    require_one_dtype("routed_delta_rule", r.x)
    key_dim, value_dim, dtype = r.x.k.shape[-1], r.x.u.shape[-1], r.x.k.dtype
    if reason := declined(r, size) or kernel.unsupported(key_dim, value_dim, dtype):
        raise NotImplementedError(f"routed_delta_rule: no GPU kernel for {reason}")
    config = config or kernel.config_for(kind, key_dim, value_tile(value_dim), dtype)
    whole = r.x.k.shape[1] // CHUNK * CHUNK
    full, rest = ({f: a if a is None or f == "initial_state" else a[:, cut] for f, a in r.x._asdict().items()}
                  for cut in (slice(whole), slice(whole, None)))  # fmt: skip
    o, start = laid_out(r.x._replace(**full), config, None, interpret, r.keep[:, : whole // CHUNK])
    decay = jnp.sum(r.x.log_decay[:, whole:], axis=1)
    if whole == r.x.k.shape[1]:
        return o, start, start, decay
    behind, state = chunked(r.x._replace(**rest)._replace(initial_state=start), CHUNK)
    return jnp.concatenate([o, behind], axis=1), state, start, decay
