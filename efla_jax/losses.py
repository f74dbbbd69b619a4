"""Cross-entropy of next tokens, summed and not averaged, in pieces of time so that all logits never exist at once."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from efla_jax.sharding import ACTIVATIONS, auto_mesh, constrain, extent

PIECE_BYTES = 2**28  # float32 logits of one piece on one device when `chunk` is 0


class Sums(NamedTuple):
    """Float32 scalars over tokens: add those of micro-batches and devices, then divide once, by `weight`.

    loss: weighted negative log-likelihood, nats; weight: sum of weights; correct: weighted number of right guesses;
    z: the weighted penalty z_loss log(Z)^2, not contained in loss: what training minimises is loss + z.
    """

    loss: jax.Array
    weight: jax.Array
    correct: jax.Array
    z: jax.Array


def weighted_sums(logits: jax.Array, targets: jax.Array, mask: jax.Array, z_loss: float = 0.0) -> Sums:
    """Sums over logits [..., V] of the targets [...], each with the weight mask [...] (> 0, or it does not count).

        Z = sum_v exp(logits_v);   loss = log Z - logits_target;   z = z_loss (log Z)^2

    Whatever stands at a token that does not count, NaN included, adds zero and receives zero gradient. A target outside
    the vocabulary that does count makes sums and gradients NaN, as it would its row as a token: such a step is skipped.
    """
    vocabulary = logits.shape[-1]
    real = mask > 0
    logits = jnp.where(real[..., None], logits.astype(jnp.float32), 0)
    inside = (targets >= 0) & (targets < vocabulary)
    weights = jnp.where(real, jnp.where(inside, mask.astype(jnp.float32), jnp.nan), 0)
    # Comparisons with an iota instead of a gather and an argmax: they stay local when the vocabulary is split.
    ids = jnp.arange(vocabulary, dtype=jnp.int32)
    top = jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
    shifted = logits - top
    log_z = jnp.log(jnp.sum(jnp.exp(shifted), -1))
    hit = ids == targets[..., None]
    loss = log_z - jnp.sum(jnp.where(hit, shifted, 0), -1)
    z = z_loss * jnp.square(log_z + top[..., 0])
    guess = jnp.min(jnp.where(logits >= top, ids, vocabulary), -1)  # of equal logits the first, as argmax
    right = jnp.where(real & (guess == targets), weights, 0)
    return Sums(jnp.sum(loss * weights), jnp.sum(weights), jnp.sum(right), jnp.sum(z * weights))


def cross_entropy(
    logits_of: Callable[[jax.Array], jax.Array],
    features: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    *,
    chunk: int = 0,
    z_loss: float = 0.0,
) -> Sums:
    """`weighted_sums` of the logits of features [B, T, D] against targets and weights [B, T], `chunk` tokens at a time.

    logits_of: features [..., D] -> logits [..., V], token by token. Only the logits of one piece exist at once, also in
    the backward pass, which computes them again: one product with the head more than with chunk >= T, where there is
    one piece. chunk counts tokens of a row on one device; 0 lets the float32 logits of a piece take about 256 MiB per
    device. Under a mesh with a context axis every shard goes through its own tokens, so none is moved.

    Raises ValueError for shapes that do not fit, targets that are not integers, and chunk or z_loss out of range.
    """
    _check(features, targets, mask, chunk, z_loss)
    batch, time, _ = features.shape
    # logits_of would make NaN out of 0 times NaN in the gradient of its parameters.
    features = jnp.where((mask > 0)[..., None], features, 0)
    shards, chunk = _pieces(logits_of, features, chunk)
    local = time // shards
    count = -(-local // chunk)

    def sums(piece):
        x, ids, weights = piece
        x = constrain(x, "batch", "time", None)
        logits = constrain(logits_of(x), "batch", "time", "features")
        # Keep the logits and no exponentials of them, nor comparisons with them.
        return jax.checkpoint(functools.partial(weighted_sums, z_loss=z_loss))(logits, ids, weights)

    if count <= 1:
        return sums((features, targets, mask))
    chunk = -(-local // count)  # as even as possible: the last piece is padded to the size of the others

    def split(x):
        x = x.reshape(batch, shards, local, *x.shape[2:])
        x = jnp.pad(x, [(0, 0), (0, 0), (0, count * chunk - local)] + [(0, 0)] * (x.ndim - 3))
        x = jnp.moveaxis(x.reshape(batch, shards, count, chunk, *x.shape[3:]), 2, 0)
        return x.reshape(count, batch, shards * chunk, *x.shape[4:])

    # Nothing of a piece is kept for the backward pass; inside a scan nothing can be merged, so no barrier either.
    again = jax.checkpoint(sums, prevent_cse=False)
    start = Sums(*(jnp.zeros((), jnp.float32) for _ in Sums._fields))
    total, _ = jax.lax.scan(
        lambda total, piece: (jax.tree.map(jnp.add, total, again(piece)), None),
        start,
        (split(features), split(targets), split(mask)),
    )
    return total


def _pieces(logits_of: Callable, features: jax.Array, chunk: int) -> tuple[int, int]:
    """Over how many shards time is split, and how many tokens of each make a piece."""
    batch, time, _ = features.shape
    vocabulary = jax.eval_shape(logits_of, features[:, :1]).shape[-1]
    parts = {name: 1 for name in ACTIVATIONS}
    mesh = auto_mesh()
    if mesh is not None:
        sizes = {"batch": batch, "time": time, "features": vocabulary}
        extents = {name: extent(mesh.shape, ACTIVATIONS[name]) for name in sizes}
        parts = {name: parts if sizes[name] % parts == 0 else 1 for name, parts in extents.items()}
    if not chunk:
        row = 4 * max(1, batch // parts["batch"]) * (vocabulary // parts["features"])
        chunk = max(1, PIECE_BYTES // row)
    return parts["time"], chunk


def _check(features: jax.Array, targets: jax.Array, mask: jax.Array, chunk: int, z_loss: float) -> None:
    if features.ndim != 3:
        raise ValueError(f"features: shape {features.shape} is not [B, T, D]")
    for name, value in (("targets", targets), ("mask", mask)):
        if value.shape != features.shape[:2]:
            raise ValueError(f"{name}: shape {value.shape} is not that of the tokens, {features.shape[:2]}")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets: {targets.dtype} are not token ids; pass integers")
    if chunk < 0:
        raise ValueError(f"chunk={chunk} must be >= 0: tokens of a row per piece; 0 chooses")
    if not (0 <= z_loss < math.inf):
        raise ValueError(f"z_loss={z_loss} must be finite and >= 0; 0 turns it off")
