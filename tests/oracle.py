"""The only truth: every recurrence token by token in float64, with the document rules written out sequentially, and how
to compare.

Nothing here is shared with the library. Gradients come from autodiff of these float64 loops.
"""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TOLERANCE = {
    # RMS(difference) / RMS(reference) against the float64 oracle on the same (rounded) inputs
    "float32": 1e-5,  # full-precision products; sums over at most a few hundred tokens lose 1e-7 each
    "bfloat16": 2e-2,  # operands of every product are rounded to 8 bits (4e-3 each), a handful of products deep
}


def relative_rms(value, reference) -> float:
    """RMS(value - reference) / RMS(reference); a reference whose RMS is below 1e-3 counts as 1e-3 (a true zero must
    stay near zero)."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    assert value.shape == reference.shape, (value.shape, reference.shape)
    if value.size == 0:
        return 0.0
    if not np.isfinite(value).all():
        return float("inf")
    return float(np.sqrt(np.mean((value - reference) ** 2)) / max(np.sqrt(np.mean(reference**2)), 1e-3))


def assert_close(values, references, names, tolerance) -> None:
    """Every value within its tolerance, and a message with all the errors otherwise."""
    errors = {n: relative_rms(v, r) for n, v, r in zip(names, values, references, strict=True)}
    assert max(errors.values()) <= tolerance, {n: f"{e:.1e}" for n, e in errors.items()}


def recurrence_row(q, k, u, erase, log_decay, state, ids):
    """One head of one row: q, k [T, K]; u [T, V]; erase, log_decay, ids [T]; state [K, V]."""

    def step(carry, token):
        state, last_id = carry
        q, k, u, erase, log_decay, segment = token
        real = segment != 0
        begins = real & (last_id != 0) & (segment != last_id)
        before = jnp.where(begins, 0.0, state)
        after = jnp.exp(log_decay) * (before - erase * jnp.outer(k, k @ before)) + jnp.outer(k, u)
        state = jnp.where(real, after, state)
        return (state, jnp.where(real, segment, last_id)), jnp.where(real, state.T @ q, 0.0)

    (state, _), o = lax.scan(step, (state, jnp.zeros((), ids.dtype)), (q, k, u, erase, log_decay, ids))
    return o, state


def recurrence(q, k, u, erase, log_decay, state, ids):
    """All rows and heads, in the library's layout; value head h reads key head h // (H // G)."""
    repeats = u.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, repeats, axis=2) for x in (q, k))
    heads = jax.vmap(recurrence_row, in_axes=(1, 1, 1, 1, 1, 0, None), out_axes=(1, 0))
    return jax.vmap(heads)(q, k, u, erase, log_decay, state, ids)


def fenwick_row(q, k, u, erase, log_decay, weights, states, ids, position):
    """One head of one row with a state per level: weights [T, L], states [L, K, V] that the token at `position` will
    read. A binary counter: a finished token is carried into the first level that is empty, taking along all below."""
    count = weights.shape[1]

    def carried(states, position):
        moving, placed, kept = states[0], count == 1, [states[0] if count == 1 else jnp.zeros_like(states[0])]
        for level in range(1, count):
            full = (position >> (level - 1)) & 1 == 1
            if level == count - 1:
                kept.append(states[level] + jnp.where(placed, 0.0, moving))
                break
            here = jnp.logical_not(placed | full)
            kept.append(jnp.where(here, moving, jnp.where(placed, states[level], 0.0)))
            moving = moving + jnp.where(placed | here, 0.0, states[level])
            placed = placed | here
        return jnp.stack(kept)

    def step(carry, token):
        states, position, last_id = carry
        q, k, u, erase, log_decay, weights, segment = token
        real = segment != 0
        begins = real & (last_id != 0) & (segment != last_id)
        before, at = jnp.where(begins, 0.0, states), jnp.where(begins, 0, position)
        after = jnp.exp(log_decay) * (before - erase * jnp.einsum("i,j,ljv->liv", k, k, before))
        after = after.at[0].add(jnp.outer(k, u))
        o = jnp.einsum("l,k,lkv->v", weights, q, after)
        states = jnp.where(real, carried(after, at), states)
        return (states, jnp.where(real, at + 1, position), jnp.where(real, segment, last_id)), jnp.where(real, o, 0.0)

    (states, _, _), o = lax.scan(
        step, (states, position, jnp.zeros((), ids.dtype)), (q, k, u, erase, log_decay, weights, ids)
    )
    return o, states


def fenwick(q, k, u, erase, log_decay, weights, states, ids, position):
    """All rows and heads of a log-linear recurrence: (o, states), in the library's layout."""
    repeats = u.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, repeats, axis=2) for x in (q, k))
    heads = jax.vmap(fenwick_row, in_axes=(1, 1, 1, 1, 1, 1, 0, None, None), out_axes=(1, 0))
    return jax.vmap(heads)(q, k, u, erase, log_decay, weights, states, ids, position)


def fenwick_parallel(q, k, u, erase, log_decay, weights, position=0):
    """The dense form of one document and one head, in numpy: q, k [T, K]; u [T, V]; gates [T]; weights [T, L]; the
    first token at `position`, nothing before it."""
    q, k, u, erase, log_decay, weights = (np.asarray(x, np.float64) for x in (q, k, u, erase, log_decay, weights))
    time, count = weights.shape
    at = range(position, position + time)
    level = [[min((t ^ s).bit_length(), count - 1) if s <= t else 0 for s in at] for t in at]
    seen = np.take_along_axis(weights, np.array(level), axis=1)
    sums = np.cumsum(log_decay)
    decay = np.exp(np.where(np.tri(time) > 0, sums[:, None] - sums[None], -np.inf))
    solved = np.linalg.inv(np.eye(time) + np.tril(erase[:, None] * (k @ k.T), -1))
    return ((np.tril(q @ k.T) @ solved) * decay * seen) @ u


def routed_row(q, k, u, erase, log_decay, keep, fade, state, start, decay, ids, position, size, own):
    """One head of one row of a delta rule whose full chunks of `size` tokens are kept or rolled back: keep, fade [N],
    entry n for the n-th chunk that fills up. state, start [K, V]: now and where the open chunk began; decay: the sum of
    its log decays so far; the first token stands at `position`. own: outputs read the state, else what the chunk began
    with, faded."""
    empty = position % size == 0
    start, decay = jnp.where(empty, state, start), jnp.where(empty, 0.0, decay)

    def step(carry, token):
        state, start, decay, position, last_id, full = carry
        q, k, u, erase, log_decay, segment = token
        real = segment != 0
        begins = real & (last_id != 0) & (segment != last_id)
        before, start_here, decay_here = (jnp.where(begins, 0.0, x) for x in (state, start, decay))
        at = jnp.where(begins, 0, position) + 1
        after = jnp.exp(log_decay) * (before - erase * jnp.outer(k, k @ before)) + jnp.outer(k, u)
        decay_here = decay_here + log_decay
        o = jnp.where(own, after, jnp.exp(decay_here) * start_here).T @ q
        closes = at % size == 0
        entry = jnp.minimum(full, keep.shape[0] - 1)
        rolled = jnp.exp(fade[entry] * decay_here) * start_here
        after = jnp.where(closes, rolled + keep[entry] * (after - rolled), after)
        start_here, decay_here = jnp.where(closes, after, start_here), jnp.where(closes, 0.0, decay_here)
        changed = after, start_here, decay_here, at, segment, full + closes
        kept = tuple(jnp.where(real, x, y) for x, y in zip(changed, carry, strict=True))
        return kept, jnp.where(real, o, 0.0)

    nothing = jnp.zeros((), ids.dtype)
    carry, o = lax.scan(step, (state, start, decay, position, nothing, nothing), (q, k, u, erase, log_decay, ids))
    return o, *carry[:3]


def routed(q, k, u, erase, log_decay, keep, fade, state, start, decay, ids, position, size, own=1):
    """All rows and heads of a routed delta rule: (o, state, start, decay), in the library's layout; keep, fade
    [B, N, H], decay [B, H]."""
    repeats = u.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, repeats, axis=2) for x in (q, k))
    axes = (1, 1, 1, 1, 1, 1, 1, 0, 0, 0, None, None, None, None)
    heads = jax.vmap(routed_row, in_axes=axes, out_axes=(1, 0, 0, 0))
    rows = jax.vmap(heads, in_axes=(0,) * 12 + (None,) * 2)
    return rows(q, k, u, erase, log_decay, keep, fade, state, start, decay, ids, position, size, own)


def document_chunks(ids, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of ids [B, T], in numpy: the chunk of each token (-1 for padding; every chunk of a row has its own number), its
    document, and the entry of `selected` for its chunk: how many chunks of the row filled up before, or -1 if the
    chunk never does."""
    chunk, document, entry = (np.full(ids.shape, -1) for _ in range(3))
    for b, row in enumerate(ids):
        number = full = doc = -1
        held: list[int] = []
        last = 0
        for t in np.flatnonzero(row):
            if row[t] != last:
                doc, held, last = doc + 1, [], row[t]
            if not held:
                number += 1
            held.append(t)
            chunk[b, t], document[b, t] = number, doc
            if len(held) == size:
                full += 1
                entry[b, held] = full
                held = []
    return chunk, document, entry


def block_sparse(q, k, v, selected, chunk, document, entry, own=1):
    """(o,): softmax attention in which selected [B, N, R], any real number, multiplies exp(score) of the keys of a full
    chunk seen from later ones; own chunks count `own` times (1 or 0), chunks that never fill up have no later ones.
    What sees nothing is 0."""
    heads = q.shape[2]
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    weight = jnp.repeat(selected, heads // selected.shape[2], axis=2)
    weight = jnp.take_along_axis(weight, jnp.maximum(entry, 0)[..., None], axis=1)  # [B, T, H] of the keys
    time = jnp.arange(q.shape[1])
    real = chunk >= 0
    causal = (time[:, None] >= time) & (document[:, :, None] == document[:, None, :])
    causal &= real[:, :, None] & real[:, None, :]
    same = causal & (chunk[:, :, None] == chunk[:, None, :])
    scores = jnp.einsum("bthk,bshk->bhts", q, k)
    top = lax.stop_gradient(jnp.max(jnp.where(causal[:, None], scores, -jnp.inf), -1, keepdims=True))
    scores = jnp.where(causal[:, None], scores - jnp.where(jnp.isfinite(top), top, 0.0), -jnp.inf)
    mass = jnp.where(same[:, None], own, jnp.moveaxis(weight, 1, 2)[:, :, None, :]) * jnp.exp(scores)
    total = jnp.sum(mass, -1, keepdims=True)
    mass = mass / jnp.where(real[:, None, :, None] & (total != 0), total, 1.0)
    return (jnp.einsum("bhts,bshv->bthv", mass, v),)


@functools.lru_cache(maxsize=4)
def _compiled(truth):
    def run(arguments, integers, cotangents):
        out, pull = jax.vjp(lambda *a: truth(*a, *integers), *arguments)
        return out, pull(cotangents)

    # Some of LLVM's optimisations, though the test session has none: these loops take longer to run than to compile.
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 1})


_TOLD: dict = {}


def _in_float64(truth, arguments, integers, cotangents):
    """Computed once for the same numbers: several implementations, precisions and chunk sizes are held against it."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [np.asarray(x).astype(np.float64) for x in arguments]
        ids, *others = integers
        ids = np.ones(wide[0].shape[:2], np.int32) if ids is None else ids
        integers = [np.asarray(x).astype(np.int32) for x in (ids, *others)]
        given = wide, integers, tuple(np.asarray(x).astype(np.float64) for x in cotangents)
        key = truth, *((x.shape, hashlib.sha256(x.tobytes()).digest()) for x in jax.tree.leaves(given))
        if key not in _TOLD:
            _TOLD[key] = jax.tree.map(np.asarray, _compiled(truth)(*jax.tree.map(jnp.asarray, given)))
        return _TOLD[key]


def recurrence_and_gradients(arguments, ids, cotangents):
    """((o, state), gradients) in float64 as numpy; arguments (q, k, u, erase, log_decay, initial_state) all given."""
    return _in_float64(recurrence, arguments, (ids,), cotangents)


def fenwick_and_gradients(arguments, ids, position, cotangents):
    """((o, states), gradients) in float64 as numpy; arguments (q, k, u, erase, log_decay, weights, states) all given,
    position [B] that of the states."""
    return _in_float64(fenwick, arguments, (ids, position), cotangents)


def routed_and_gradients(arguments, ids, position, size, cotangents, own=1):
    """((o, state, start, decay), gradients) in float64 as numpy; arguments (q, k, u, erase, log_decay, keep, fade,
    state, start, decay) all given, position [B] that of the state."""
    return _in_float64(routed, arguments, (ids, position, size, own), cotangents)


def block_sparse_and_gradients(arguments, ids, size, cotangents, own=1):
    """((o,), gradients) in float64 as numpy; arguments (q, k, v, selected)."""
    ids = np.ones(arguments[0].shape[:2], np.int32) if ids is None else np.asarray(ids)
    return _in_float64(block_sparse, arguments, (*document_chunks(ids, size), own), cotangents)
