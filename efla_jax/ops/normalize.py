"""Norms with a defined gradient at zero."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def vector_norm(x: Float[Array, "*rest D"]) -> Float[Array, " *rest"]:
    """|x| over the last axis in float32; value and gradient are 0 at x = 0."""
    square = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)


def l2_normalize(x: Float[Array, "*rest D"]) -> Float[Array, "*rest D"]:
    """x / |x| over the last axis, in the dtype of x; the value and the gradient at x = 0 are exactly 0.

    x may have any shape. Computed in float32. No epsilon: the result has unit length whenever the squares of its
    entries are normal float32 numbers (entries above 1e-19); a zero row, as padding leaves it, stays zero and sends no
    gradient.

    >>> import jax.numpy as jnp
    >>> l2_normalize(jnp.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    wide = x.astype(jnp.float32)
    square = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    live = square > 0
    unit = jnp.where(live, wide, 0.0) / jnp.sqrt(jnp.where(live, square, 1.0))
    return unit.astype(x.dtype)
