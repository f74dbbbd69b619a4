"""The routed delta rule through the kernels of the delta rule: a chunk's keep is a factor of what it leaves.

Chunks of the kernels have 64 tokens, and so have those that are kept or rolled back. Without documents they stand where
they are, and the tokens behind the last full one, which roll nothing back, are a delta rule of their own, in XLA. With
documents each full chunk is moved to a cell of its own (`document_chunks`). Rows that go on are served where no chunk
is open, as between the pieces of a prompt: but within `positions_divisible` only the values of their positions tell, so
XLA's form stands beside."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from efla_jax.ops.arguments import Recurrence
from efla_jax.ops.chunked import chunked
from efla_jax.ops.document_chunks import carried, cells, most_cells
from efla_jax.ops.hopper import require_hopper
from efla_jax.ops.pallas import CHUNK, config_for, laid_out, require_one_dtype
from efla_jax.ops.routed_chunked import at_borders, behind, in_cells, left_open, routed_chunked
from efla_jax.ops.routed_recurrent import Routed
from efla_jax.ops.segments import POSITIONS, mask_padding


def declined(r: Routed, size: int) -> str | None:
    """Why the kernels cannot serve this, or None."""
    time = r.x.k.shape[1]
    if size != CHUNK:
        return f"chunk_size = {size}: a chunk of the kernels has {CHUNK} tokens"
    if time < CHUNK:
        return f"T = {time}: not one chunk of {CHUNK} tokens"
    if r.start is not None and r.x.starts is not None:
        return "initial_state beside segment_ids: documents that an earlier call began are not written yet"
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
    config = config or config_for(kind, key_dim, value_dim, dtype)

    def run(x, keep):
        return laid_out(x, config, None, interpret, keep)

    if r.start is not None:
        return continued(r, run)
    return in_place(r, run) if r.x.starts is None else by_cells(r, run)


def continued(r: Routed, run: Callable) -> tuple[jax.Array, ...]:
    """Rows that go on: `in_place` if none of them has an open chunk, else in XLA."""
    if POSITIONS.get() % CHUNK == 0:
        return in_place(r, run)
    closed = jnp.all(r.chunks.position[:, 0] % CHUNK == 0)
    return jax.lax.cond(closed, lambda r: in_place(r, run), lambda r: routed_chunked(r, CHUNK), r)


def in_place(r: Routed, run: Callable) -> tuple[jax.Array, ...]:
    """Chunks where they stand, all rows from their beginning."""
    time = r.x.k.shape[1]
    whole = time // CHUNK * CHUNK

    def tokens(cut, state):
        parts = (a if a is None else a[:, cut] for a in r.x[:5])
        return Recurrence(*parts, initial_state=state, starts=None)

    o, start = run(tokens(slice(whole), r.x.initial_state), r.keep[:, : whole // CHUNK])
    decay = jnp.sum(r.x.log_decay[:, whole:], axis=1)
    if whole == time:
        return o, start, start, decay
    o_behind, state = chunked(tokens(slice(whole, None), start), CHUNK)
    return jnp.concatenate([o, o_behind], axis=1), state, start, decay


def by_cells(r: Routed, run: Callable) -> tuple[jax.Array, ...]:
    """Every full chunk in a cell. Where the open chunk began is known to a second run of the cells before it, which XLA
    leaves out if nobody asks for it."""
    found = cells(r.chunks, CHUNK, most_cells(r.x.k.shape[1], CHUNK, True))
    laid = in_cells(r.x, found)
    keep = jnp.moveaxis(at_borders(r, laid, found.entry, CHUNK).keep, 0, 1)
    o, state = run(laid, keep)
    before = jnp.arange(laid.k.shape[1]) < CHUNK * behind(found.entry)[:, None]
    assert laid.starts is not None and laid.erase is not None
    q, k, u, erase, log_decay = (mask_padding(before, a) for a in (laid.q, laid.k, laid.u, laid.erase, laid.log_decay))
    masked = Recurrence(q, k, u, erase, log_decay, laid.initial_state, laid.starts & before)
    _, anchor = run(masked, keep)
    return carried(o, found.slot, found.source), state, *left_open(r, anchor)
