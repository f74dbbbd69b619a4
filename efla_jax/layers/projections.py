"""From the width of the model to heads and back. Called in a mixer's compact method: the sub-modules are the mixer's.

`mixer` is the module that calls; its fields (see `DeltaMixer`) say how a projection begins and computes.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from efla_jax.layers.conv import CausalConv
from efla_jax.layers.initializers import kernel_initializer

ACTIVATIONS = {"silu": nn.silu, "none": lambda x: x}


def float32_sums(x, kernel, dimensions, precision=None) -> jax.Array:
    """`lax.dot_general` with sums and result in float32, whatever the dtype of the operands."""
    return lax.dot_general(x, kernel, dimensions, precision=precision, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def float32_logits(x, kernel, dimensions, precision=None) -> jax.Array:
    """`float32_sums` whose cotangent is rounded to the operands' dtype: logits are the widest array of a model, and
    their two backward products would be of float32 with bfloat16, several times slower."""
    return float32_sums(x, kernel, dimensions, precision)


def _logits_forward(x, kernel, dimensions, precision):
    return float32_sums(x, kernel, dimensions, precision), (x, kernel)


def _logits_backward(dimensions, precision, saved, cotangent):
    x, kernel = saved
    _, pull = jax.vjp(lambda x, kernel: lax.dot_general(x, kernel, dimensions, precision=precision), x, kernel)
    return pull(cotangent.astype(jnp.result_type(x, kernel)))


float32_logits.defvjp(_logits_forward, _logits_backward)


def rows_of_products(x, kernel, dimensions, precision=None, product=lax.dot_general) -> jax.Array:
    """`product` of x [..., D] and kernel [D, N]. One row, as a token of one text is, has a row of zeros beside it: a
    vector times a matrix is two programs of XLA's on a GPU (jax 0.11.2), one of which writes all D N products to memory
    for the other to add up."""
    if x.size != x.shape[-1] or x.ndim < 2:
        return product(x, kernel, dimensions, precision=precision)
    rows = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0)))
    y = product(rows, kernel, (((1,), (0,)), ((), ())), precision=precision)
    return y[:1].reshape(*x.shape[:-1], -1)


float32_rows = functools.partial(rows_of_products, product=float32_sums)
float32_logit_rows = functools.partial(rows_of_products, product=float32_logits)


def dense(mixer, name: str, features: int) -> nn.Dense:
    """A projection without bias: products and result in the mixer's dtype."""
    init = kernel_initializer(mixer.kernel_init, mixer.init_std)
    return nn.Dense(
        features, use_bias=False, kernel_init=init, dtype=mixer.dtype, dot_general=rows_of_products, name=name
    )


def gate(mixer, name: str) -> nn.Dense:
    """A projection to one number per head, without bias: products in the mixer's dtype, sums and result in float32."""
    init = kernel_initializer(mixer.gate_init, mixer.init_std)
    return nn.Dense(
        mixer.num_heads, use_bias=False, kernel_init=init, dtype=mixer.dtype, dot_general=float32_rows, name=name
    )


def heads(mixer, name, x, shape, segment_ids, inputs, conv_bias=False) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Projection, convolution and activation of x [B, T, D], as [B, T, *shape], and the convolution's next inputs.

    `inputs` and the next inputs are one array [B, W-1, C] in a tuple, empty when the mixer has no convolution."""
    y = dense(mixer, f"{name}_proj", shape[0] * shape[1])(x)
    if mixer.conv_width:
        activation = None if mixer.activation == "none" else mixer.activation
        conv = CausalConv(mixer.conv_width, conv_bias, mixer.dtype, activation, name=f"{name}_conv")
        y, after = conv(y, segment_ids, *inputs)
        inputs = (after,)
    else:
        y = ACTIVATIONS[mixer.activation](y)
    return y.reshape(*y.shape[:2], *shape), inputs


def merge_heads(mixer, o: jax.Array, x: jax.Array) -> jax.Array:
    """Norm per head, gate from x [B, T, D] and projection of the outputs o [B, T, H, V], as [B, T, width]."""
    if mixer.output_norm:
        o = nn.RMSNorm(epsilon=mixer.norm_eps, dtype=jnp.float32, name="o_norm")(o)
    return read_out(mixer, o, x)


def read_out(mixer, o: jax.Array, x: jax.Array) -> jax.Array:
    """Gate from x [B, T, D] and projection of the outputs o [B, T, H, V], as [B, T, width]."""
    shape = o.shape
    if mixer.output_gate:
        o *= nn.silu(dense(mixer, "g_proj", shape[2] * shape[3])(x).astype(jnp.float32)).reshape(shape)
    y = o.astype(mixer.dtype).reshape(*shape[:2], shape[2] * shape[3])
    return dense(mixer, "o_proj", mixer.width)(y) if mixer.output_projection else y
