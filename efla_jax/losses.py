"""Cross-entropy of next tokens, summed and not averaged, in pieces of time so that all logits never exist at once."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from efla_jax.sharding import ACTIVATIONS, auto_mesh, extent

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


def class_tallies(logits: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """[3, V] float32 over the tokens of mask > 0: how often each class was the target, was guessed, and both. Add those
    of batches, then see `macro_accuracy`."""
    vocabulary = logits.shape[-1]
    real = (mask > 0).ravel()
    guess = jnp.argmax(logits, axis=-1).ravel()

    def count(ids, what):
        return jnp.zeros(vocabulary, jnp.float32).at[ids.ravel()].add(what.astype(jnp.float32), mode="drop")

    return jnp.stack([count(targets, real), count(guess, real), count(targets, real & (guess == targets.ravel()))])


def macro_accuracy(tallies) -> float:
    """Mean over classes of the part of their targets that was guessed, from `class_tallies`. A class that was neither
    target nor guess is left out; one that was only guessed counts 0."""
    asked, guessed, right = tallies
    return float((right / np.maximum(asked, 1))[(asked > 0) | (guessed > 0)].mean())


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

    logits_of: features [b, t, D] -> logits [b, t, V], token by token and without sharding constraints of its own.

    Only the logits of one piece exist at once, also in the backward pass, which computes them again: one product with
    the head more than with chunk >= T, where there is one piece. chunk counts tokens of a row on one device; 0 lets the
    float32 logits of a piece take about 256 MiB per device. Under a mesh every device goes through its own tokens with
    its own copy of the head (its part of the vocabulary, under a tensor axis): tokens stay where they are, and sums and
    the head's gradient are added over devices once, at the end, and not piece by piece.

    Raises ValueError for shapes that do not fit, targets that are not integers, and chunk or z_loss out of range.
    """
    _check(features, targets, mask, chunk, z_loss)
    # logits_of would make NaN out of 0 times NaN in the gradient of its parameters.
    features = jnp.where((mask > 0)[..., None], features, 0)
    layout = _layout(features, jax.eval_shape(logits_of, features[:, :1]).shape[-1], chunk)
    pieces = tuple(map(layout.split, (features, targets, mask)))
    head, parameters = jax.closure_convert(logits_of, pieces[0][0, 0])
    copies = [layout.spread(jnp.broadcast_to(x, (layout.rows * layout.columns, *x.shape))) for x in parameters]

    def sums(piece):
        x, ids, weights = piece
        logits = layout.spread(jax.vmap(head)(layout.spread(x), *copies), vocabulary=True)
        # Keep the logits and no exponentials of them, nor comparisons with them.
        kept = jax.checkpoint(functools.partial(weighted_sums, z_loss=z_loss))
        return jax.vmap(kept)(logits, ids, weights)

    if layout.pieces == 1:
        total = sums(tuple(piece[0] for piece in pieces))
    else:
        # Nothing of a piece is kept for the backward pass; inside a scan nothing can be merged, so no barrier either.
        again = jax.checkpoint(sums, prevent_cse=False)
        zero = Sums(*(layout.spread(jnp.zeros(layout.rows * layout.columns, jnp.float32)) for _ in Sums._fields))
        total, _ = jax.lax.scan(lambda so_far, piece: (jax.tree.map(jnp.add, so_far, again(piece)), None), zero, pieces)
    return jax.tree.map(jnp.sum, total)


class _Layout(NamedTuple):
    """Which tokens a device holds, and in which pieces it goes through them."""

    rows: int  # shards of the batch
    columns: int  # shards of time
    pieces: int  # of each shard
    chunk: int  # tokens of a row in a piece
    vocabulary: str | None  # mesh axis that splits the logits

    def split(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [pieces, rows columns, B / rows, chunk, ...], padded at each shard's end; no token moves."""
        batch, time, *rest = x.shape
        local = time // self.columns
        x = x.reshape(self.rows, batch // self.rows, self.columns, local, *rest)
        x = jnp.pad(x, [(0, 0)] * 3 + [(0, self.pieces * self.chunk - local)] + [(0, 0)] * len(rest))
        x = x.reshape(self.rows, batch // self.rows, self.columns, self.pieces, self.chunk, *rest)
        x = x.transpose(3, 0, 2, 1, 4, *range(5, x.ndim))
        return x.reshape(self.pieces, self.rows * self.columns, batch // self.rows, self.chunk, *rest)

    def spread(self, x: jax.Array, vocabulary: bool = False) -> jax.Array:
        """x [rows columns, ...] with each entry of the first axis on the device that holds those tokens."""
        axes = (*ACTIVATIONS["batch"],) * (self.rows > 1) + (ACTIVATIONS["time"],) * (self.columns > 1)
        if not axes and self.vocabulary is None:
            return x
        others: list[Any] = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        if vocabulary:
            others[-1] = self.vocabulary
        return jax.lax.with_sharding_constraint(x, PartitionSpec(axes or None, *others))


def _layout(features: jax.Array, vocabulary: int, chunk: int) -> _Layout:
    batch, time, _ = features.shape
    mesh, sizes = auto_mesh(), {"batch": batch, "time": time, "features": vocabulary}
    parts = {name: extent(mesh.shape, ACTIVATIONS[name]) if mesh else 1 for name in sizes}
    parts = {name: count if sizes[name] % count == 0 else 1 for name, count in parts.items()}
    rows, columns = parts["batch"], parts["time"]
    if not chunk:
        chunk = PIECE_BYTES // max(1, 4 * (batch // rows) * (vocabulary // parts["features"]))
    local = time // columns
    count = max(1, -(-local // max(1, chunk)))
    # As even as possible: the last piece is padded to the size of the others.
    return _Layout(rows, columns, count, -(-local // count), "tensor" if parts["features"] > 1 else None)


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
