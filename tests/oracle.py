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


@functools.lru_cache(maxsize=1)
def _compiled():
    def run(arguments, ids, cotangents):
        out, pull = jax.vjp(lambda *a: recurrence(*a, ids), *arguments)
        return out, pull(cotangents)

    return jax.jit(run)


def recurrence_and_gradients(arguments, ids, cotangents):
    """((o, state), gradients) in float64 as numpy; arguments (q, k, u, erase, log_decay, initial_state) all given."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(x).astype(np.float64)) for x in arguments]
        cotangents = tuple(jnp.asarray(np.asarray(x).astype(np.float64)) for x in cotangents)
        ids = jnp.ones(wide[0].shape[:2], jnp.int32) if ids is None else jnp.asarray(ids)
        out, gradients = _compiled()(wide, ids, cotangents)
        return tuple(map(np.asarray, out)), tuple(map(np.asarray, gradients))
