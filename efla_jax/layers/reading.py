"""What a mixer tells about itself, without carrying it in its result."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from efla_jax.ops.normalize import vector_norm
from efla_jax.ops.segments import mask_padding
from efla_jax.shapes import SegmentIds

QUANTILES = (0.05, 0.5, 0.95)
# Tokens that quantiles are taken from: the rank of the 95 % quantile is then right within 0.4 % (standard deviation).
SAMPLE = 4096


class Spread(NamedTuple):
    """How a quantity is spread over the real tokens of a batch, per head: each [H] float32, 0 without a real token.

    low, median and high are the quantiles of 5, 50 and 95 %, interpolated as numpy does; mean and largest of all
    tokens, the quantiles of every s-th in a row where there are more than SAMPLE (s odd: tasks alternate by twos)."""

    mean: jax.Array
    low: jax.Array
    median: jax.Array
    high: jax.Array
    largest: jax.Array


NAMES = ("mean", "p05", "p50", "p95", "max")  # of the fields of a Spread in `signals`
SOFTMAX_FRACTION = "softmax_fraction"  # of a router's chunks


def quantiles(values: jax.Array, real: jax.Array) -> tuple[jax.Array, ...]:
    """The QUANTILES, each [H], of values [N, H] where real [N], which must hold somewhere."""
    ordered = jnp.sort(jnp.where(real[:, None], values, jnp.finfo(values.dtype).max), axis=0)
    last = jnp.maximum(jnp.sum(real) - 1, 0)

    def at(quantile: float) -> jax.Array:
        place = jnp.asarray(quantile, values.dtype) * last
        below = jnp.floor(place).astype(jnp.int32)
        under, over = ordered[below], ordered[jnp.minimum(below + 1, last)]
        return under + (place - below) * (over - under)

    return tuple(at(quantile) for quantile in QUANTILES)


class Reading(nn.Module):
    """The Spread over real tokens of a quantity [B, T, H], under the name of this module.

    It leaves through `capture_intermediates=lambda module, _: isinstance(module, layers.Reading)` with
    mutable="intermediates" (see `signals`), and costs nothing in a compiled step that does not capture. The mean is
    differentiable there; the rest has no gradient."""

    @nn.compact
    def __call__(self, quantity: jax.Array, segment_ids: SegmentIds | None) -> Spread:
        quantity = quantity.astype(jnp.float32)
        batch, time, heads = quantity.shape
        real = jnp.ones((batch, time), bool) if segment_ids is None else segment_ids != 0
        mean = jnp.sum(mask_padding(real, quantity), axis=(0, 1)) / jnp.maximum(1, jnp.sum(real))
        if batch * time == 0:
            return Spread(mean, mean, mean, mean, mean)
        # Without a gradient: its residuals would be kept for every layer although nothing asks for them.
        quantity = jax.lax.stop_gradient(quantity)
        largest = jnp.max(jnp.where(real[..., None], quantity, -jnp.inf), axis=(0, 1))
        stride = -(-batch * time // SAMPLE) // 2 * 2 + 1
        some = real[:, ::stride].reshape(-1)
        spread = jnp.stack(quantiles(quantity[:, ::stride].reshape(-1, heads), some))
        low, median, high = jnp.where(jnp.any(some), spread, 0)
        return Spread(mean, low, median, high, jnp.where(jnp.any(real), largest, 0))


def read_delta_step(k, beta, erase, log_decay, segment_ids) -> None:
    """|k| of the raw keys, the stiffness beta |k|^2 of an Euler step with them, the erase gate and exp(log_decay)."""
    norm = jnp.repeat(vector_norm(k), erase.shape[2] // k.shape[2], axis=-1)
    Reading(name="key_norm")(norm, segment_ids)
    Reading(name="stiffness")(beta * norm * norm, segment_ids)
    Reading(name="erase")(erase, segment_ids)
    if log_decay is not None:
        Reading(name="decay")(jnp.exp(log_decay), segment_ids)


def read_level_weights(weights, segment_ids) -> None:
    """Level weights of all levels, and how far a token's lie apart: their mean distance from their mean, over it."""
    batch, time, heads, levels = weights.shape
    Reading(name="level_weight")(weights.reshape(batch, time, heads * levels), segment_ids)
    mean = jnp.mean(weights, axis=-1, keepdims=True)
    apart = jnp.mean(jnp.abs(weights - mean), axis=-1)  # where a standard deviation of 0 would have no gradient
    Reading(name="level_contrast")(apart / jnp.maximum(mean[..., 0], jnp.finfo(jnp.float32).tiny), segment_ids)


def by_layer(path, leaf: Any, pattern: int) -> dict[int, Any]:
    """{depth: its part} of what was captured at `path` in a model of `pattern` mixers, which blocks have stacked by
    repetition: layer g * pattern + i is entry g of block_i. Empty for a mixer that is in no model."""
    named = re.search(r"'(block|mixer)_(\d+)'", jax.tree_util.keystr(path))
    if named is None:
        return {}
    place = int(named[2])
    if named[1] == "mixer":  # of a classifier, which repeats nothing
        return {place: leaf}
    groups = jax.tree.leaves(leaf)[0].shape[0]
    return {group * pattern + place: jax.tree.map(lambda x, g=group: x[g], leaf) for group in range(groups)}


def spreads(captured) -> dict[str, list[tuple[Any, Spread]]]:
    """{quantity: (path, Spread) of each Reading of that name} in captured intermediates."""
    found: dict[str, list[tuple[Any, Spread]]] = {}
    for path, spread in jax.tree.leaves_with_path(captured, is_leaf=lambda leaf: isinstance(leaf, Spread)):
        if isinstance(spread, Spread):  # .../<quantity>/__call__/0
            found.setdefault(path[-3].key, []).append((path, spread))
    return found


def is_softmax_fraction(module: nn.Module, _) -> bool:
    """The `capture_intermediates` of a `mean_softmax_fraction`."""
    return isinstance(module, Reading) and module.name == SOFTMAX_FRACTION


def mean_softmax_fraction(captured) -> jax.Array:
    """Mean over routed layers and routing heads of the part of the chunks that chose softmax: a float32 scalar with the
    gradient of the choices."""
    return jnp.mean(jnp.concatenate([jnp.ravel(spread.mean) for _, spread in spreads(captured)[SOFTMAX_FRACTION]]))


def signals(captured, pattern: int = 1) -> dict[str, jax.Array]:
    """Scalars float32 from captured intermediates of a mixer or a model of `pattern` mixers (see `by_layer`).

    "<quantity>_mean", "_p05", "_p50" and "_p95" are means over layers and heads of a head's statistic, "<quantity>_max"
    is the largest value of all; quantities of one name are taken together. Of the softmax fraction there are also the
    means of each layer and head, softmax_fraction/layer_03 and softmax_fraction/layer_03/head_1, depth and heads from
    0. Empty when nothing was captured."""
    scalars = {}
    found = spreads(captured)
    for quantity, some in sorted(found.items()):
        for name, values in zip(NAMES, zip(*(spread for _, spread in some), strict=True), strict=True):
            together = jnp.concatenate([jnp.ravel(value) for value in values])
            scalars[f"{quantity}_{name}"] = jnp.max(together) if name == "max" else jnp.mean(together)
    for path, spread in found.get(SOFTMAX_FRACTION, ()):
        for depth, fractions in by_layer(path, spread.mean, pattern).items():
            layer = f"{SOFTMAX_FRACTION}/layer_{depth:02d}"
            scalars[layer] = jnp.mean(fractions)
            scalars |= {f"{layer}/head_{head}": fraction for head, fraction in enumerate(fractions)}
    return scalars
