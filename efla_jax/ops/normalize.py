"""Norms with a defined gradient at zero, and products with one number a row.

Sums over a row of channels stand behind `lax.optimization_barrier`: XLA (of jax 0.11.2, for a GPU) would merge them
with passes that share an array (lm_340m:efla on an H200: a tenth of the memory's rate), or with a transposition of
their result, in which each thread would sum rows alone.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def vector_norm(x: Float[Array, "*rest D"]) -> Float[Array, " *rest"]:
    """|x| over the last axis in float32; value and gradient are 0 at x = 0."""
    square = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)


@jax.custom_jvp
def l2_normalize(x: Float[Array, "*rest D"]) -> Float[Array, "*rest D"]:
    """x / |x| over the last axis, in the dtype of x; the value and the gradient at x = 0 are exactly 0.

    x may have any shape. Computed in float32. No epsilon: the result has unit length whenever the squares of its
    entries are normal float32 numbers (entries above 1e-19); a zero row, as padding leaves it, stays zero and sends no
    gradient.

    >>> import jax.numpy as jnp
    >>> l2_normalize(jnp.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    return (x.astype(jnp.float32) * _reciprocal_norm(x)).astype(x.dtype)


def _reciprocal_norm(x: jax.Array) -> jax.Array:
    """1 / |x| over the last axis, which is kept, in float32; 0 at x = 0."""
    square = row_sum(jnp.square(x.astype(jnp.float32)))
    live = square > 0
    return jnp.where(live, lax.rsqrt(jnp.where(live, square, 1.0)), 0.0)


@l2_normalize.defjvp
def _l2_normalize_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    scale = _reciprocal_norm(x)
    unit, moved = x.astype(jnp.float32) * scale, dx.astype(jnp.float32) * scale
    return unit.astype(x.dtype), (moved - unit * row_sum(unit * moved)).astype(x.dtype)


def row_sum(x: jax.Array) -> jax.Array:
    """The sum over the last axis, which is kept, in a pass of its own."""
    return lax.optimization_barrier(jnp.sum(x, axis=-1, keepdims=True))


def scale_values(scale: jax.Array, v: jax.Array) -> jax.Array:
    """scale [...] float32 times v [..., V], rounded once to the dtype of v."""
    scale = lax.optimization_barrier(scale)  # that of its gradient, a sum over each row, is what is wanted
    return (scale[..., None] * v.astype(jnp.float32)).astype(v.dtype)
