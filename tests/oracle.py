"""The only truth: every recurrence token by token in float64, with the document rules written out sequentially, and how
to compare.

Nothing here is shared with the library. Gradients come from autodiff of these float64 loops.
"""

import functools

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


@functools.lru_cache(maxsize=2)
def _compiled(truth):
    def run(arguments, integers, cotangents):
        out, pull = jax.vjp(lambda *a: truth(*a, *integers), *arguments)
        return out, pull(cotangents)

    return jax.jit(run)


def _in_float64(truth, arguments, integers, cotangents):
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(x).astype(np.float64)) for x in arguments]
        cotangents = tuple(jnp.asarray(np.asarray(x).astype(np.float64)) for x in cotangents)
        ids, *others = integers
        ids = np.ones(wide[0].shape[:2], np.int32) if ids is None else ids
        out, gradients = _compiled(truth)(wide, [jnp.asarray(x, jnp.int32) for x in (ids, *others)], cotangents)
        return tuple(map(np.asarray, out)), tuple(map(np.asarray, gradients))


def recurrence_and_gradients(arguments, ids, cotangents):
    """((o, state), gradients) in float64 as numpy; arguments (q, k, u, erase, log_decay, initial_state) all given."""
    return _in_float64(recurrence, arguments, (ids,), cotangents)


def fenwick_and_gradients(arguments, ids, position, cotangents):
    """((o, states), gradients) in float64 as numpy; arguments (q, k, u, erase, log_decay, weights, states) all given,
    position [B] that of the states."""
    return _in_float64(fenwick, arguments, (ids, position), cotangents)
