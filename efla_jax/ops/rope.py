"""Rotary position embedding."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from efla_jax.shapes import check_floating, check_shapes


def apply_rope(
    x: Float[Array, "B T H K"], positions: Int[Array, "B T"], base: float = 10000.0
) -> Float[Array, "B T H K"]:
    """Rotate pairs of channels by angles proportional to the position: dot products then depend on distances only.

        (x_i, x_{i + K/2}) <- rotation by  p base^(-2i / K)  of  (x_i, x_{i + K/2})        i = 0 .. K/2 - 1

    Channel i is paired with channel i + K/2 (halves, as in GPT-NeoX; not neighbours). x `[B, T, H, K]` with even K,
    positions p `[B, T]` integer. Angles (radians) and rotation in float32, the result in the dtype of x; -p undoes p.
    Raises ValueError for an odd K, base <= 0, and shapes or dtypes that do not fit.
    Source: RoFormer (arXiv 2104.09864).

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[[[1.0, 0.0]]]])
    >>> apply_rope(x, jnp.array([[2]])).round(4).tolist()        # (cos 2, sin 2)
    [[[[-0.416..., 0.909...]]]]
    """
    sizes = check_shapes({"x": (x, "BTHK"), "positions": (positions, "BT")})
    check_floating({"x": x})
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions: dtype {positions.dtype} is not an integer type; count tokens in int32.")
    if sizes["K"] % 2:
        raise ValueError(f"x: shape {x.shape} has an odd K (key dim), but channels turn in pairs. Use an even K.")
    if base <= 0:
        raise ValueError(f"base: {base} is not positive; use 10000.0, or leave apply_rope out for no positions at all.")
    half = sizes["K"] // 2
    frequencies = np.float64(base) ** (-np.arange(half) / max(half, 1))
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies.astype(np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
