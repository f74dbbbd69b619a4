"""What a mixer tells about itself, without carrying it in its result."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from efla_jax.ops.normalize import vector_norm
from efla_jax.ops.segments import mask_padding
from efla_jax.shapes import SegmentIds


class Reading(nn.Module):
    """The mean [H] over real tokens of a quantity [B, T, H], under the name of this module.

    It leaves through `capture_intermediates=lambda module, _: isinstance(module, layers.Reading)` with
    mutable="intermediates", is differentiable there, and costs nothing in a compiled step that does not capture."""

    @nn.compact
    def __call__(self, quantity: jax.Array, segment_ids: SegmentIds | None) -> jax.Array:
        quantity = quantity.astype(jnp.float32)
        if segment_ids is None:
            return jnp.sum(quantity, axis=(0, 1)) / max(1, quantity.shape[0] * quantity.shape[1])
        real = segment_ids != 0
        return jnp.sum(mask_padding(real, quantity), axis=(0, 1)) / jnp.maximum(1, jnp.sum(real))


def read_delta_step(k, beta, erase, log_decay, segment_ids) -> None:
    """|k| of the raw keys, the stiffness beta |k|^2 of an Euler step with them, the erase gate and exp(log_decay)."""
    norm = jnp.repeat(vector_norm(k), erase.shape[2] // k.shape[2], axis=-1)
    Reading(name="key_norm")(norm, segment_ids)
    Reading(name="stiffness")(beta * norm * norm, segment_ids)
    Reading(name="erase")(erase, segment_ids)
    if log_decay is not None:
        Reading(name="decay")(jnp.exp(log_decay), segment_ids)
