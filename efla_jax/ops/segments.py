"""Documents packed in one row: who is real, where a document begins, and where a token stands in its document.

Padding (id 0) is invisible wherever it stands: ids are compared with the previous real token's, and every result is
that of the row with its padding removed. This is the only place that interprets `segment_ids`; operators and layers use
what it returns.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from efla_jax.shapes import SegmentIds


class Segments(NamedTuple):
    """What the ids of a [B, T] batch mean.

    real      [B, T] bool   the token is not padding
    starts    [B, T] bool   a real token whose id differs from that of the real token before it (never the row's first)
    document  [B, T] int32  how many `starts` lie at or before the token; 0 belongs to the initial state
    """

    real: Bool[Array, "B T"]
    starts: Bool[Array, "B T"]
    document: Int[Array, "B T"]


def segments(segment_ids: SegmentIds) -> Segments:
    """Interpret integer ids [B, T]: 0 is padding, a change from one real token to the next begins a document."""
    real = segment_ids != 0
    time = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    latest = lax.cummax(jnp.where(real, time, -1), axis=1)
    before = jnp.pad(latest, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    id_before = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    starts = real & (before >= 0) & (segment_ids != id_before)
    return Segments(real, starts, jnp.cumsum(starts, axis=1, dtype=jnp.int32))


def mask_padding(real: Bool[Array, "B T"], x: Float[Array, "B T *rest"]) -> Float[Array, "B T *rest"]:
    """x with exact zeros (and exactly zero gradient) where a token is padding, whatever stands there."""
    return jnp.where(real.reshape(real.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def positions(
    batch: int, time: int, segment_ids: SegmentIds | None = None, start: Int[Array, " B"] | None = None
) -> Int[Array, "B T"]:
    """Position [B, T] int32 of every token in its document, counting real tokens only.

    `start` [B] is the number of tokens that the row's first document already has (0 without it). Padding gets the
    position of the token before it (or of the document's first): it is never used."""
    start = jnp.zeros((batch,), jnp.int32) if start is None else start
    if segment_ids is None:
        return start[:, None] + jnp.arange(time, dtype=jnp.int32)
    found = segments(segment_ids)
    rank = jnp.maximum(jnp.cumsum(found.real, axis=1, dtype=jnp.int32) - 1, 0)
    first = lax.cummax(jnp.where(found.starts, rank, 0), axis=1)
    return rank - first + jnp.where(found.document == 0, start[:, None], 0)


@jax.custom_vjp
def permute_time(
    x: Float[Array, "B T *rest"], order: Int[Array, "B T"], inverse: Int[Array, "B T"]
) -> Float[Array, "B T *rest"]:
    """x[b, order[b, t]]; `inverse` undoes `order`, so that the gradient is a gather too (a scatter would be slower and
    unordered)."""
    return jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), axis=1)


def _permute_forward(x, order, inverse):
    return permute_time(x, order, inverse), (order, inverse)


def _permute_backward(saved, cotangent):
    order, inverse = saved
    return permute_time(cotangent, inverse, order), None, None


permute_time.defvjp(_permute_forward, _permute_backward)


def real_first(real: Bool[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """(order, inverse) [B, T]: the permutation that moves each row's real tokens to its front, in order, and the one
    that undoes it."""
    order = jnp.argsort(~real, axis=1, stable=True).astype(jnp.int32)
    return order, jnp.argsort(order, axis=1).astype(jnp.int32)


BEHIND = contextvars.ContextVar("padding stands behind", default=False)


@contextlib.contextmanager
def padding_behind() -> Iterator[None]:
    """What is traced inside may count on each row's padding to stand behind its real tokens. Operators then do not ask
    the device, which would wait for the host at each of their conditions."""
    before = BEHIND.set(True)
    try:
        yield
    finally:
        BEHIND.reset(before)


POSITIONS = contextvars.ContextVar("divides every position", default=1)


@contextlib.contextmanager
def positions_divisible(by: int) -> Iterator[None]:
    """What is traced inside may count on each row's document to have a multiple of so many tokens before it."""
    before = POSITIONS.set(by)
    try:
        yield
    finally:
        POSITIONS.reset(before)
