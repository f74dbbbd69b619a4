"""The short convolution through GPU kernels: which input they serve, inputs before the first token, gradients.

The kernels know no token before x. The first W - 1 outputs are then summed by XLA, which writes them over the kernel's:
a few rows, and `before` keeps a dtype of its own.
"""

import functools

import jax
import jax.numpy as jnp

from efla_jax.ops.hopper import require_hopper


def windowed(x, weight, bias, before, reach, config=None, interpret=None) -> jax.Array:
    """y [B, T, D] in the dtype of x, sums in float32; a token reads itself and the inputs before it.

    x [B, T, D]; weight [W, D], the last tap is the current token's; bias [D] or None; before [B, W - 1, D], the inputs
    before x, or None: zeros; reach [B, T] int32, how many of the inputs before it a token reads, or None: all W - 1.
    config: a `kernels.causal_conv.Config` for the default; interpret: parameters of Mosaic's interpreter. Raises
    NotImplementedError, with the reason, for what the kernels do not serve."""
    if interpret is None:
        require_hopper("causal_conv")
    from efla_jax.kernels import causal_conv as kernel

    if x.size == 0:
        raise NotImplementedError(f"causal_conv: x of shape {x.shape} has nothing to convolve")
    if reason := kernel.unsupported(weight.shape[0], x.shape[2], x.dtype):
        raise NotImplementedError(f"causal_conv: no GPU kernel for {reason}")
    return _solve(x, weight, bias, before, reach, config or kernel.SAFE, interpret)


def _first(x, weight, bias, before, reach) -> jax.Array:
    """The outputs of the first tokens x [B, n, D], n < W, in float32."""
    count, time = before.shape[1], x.shape[1]
    inputs = jnp.concatenate([before.astype(jnp.float32), x.astype(jnp.float32)], axis=1)
    y = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)
    for lag in reversed(range(count + 1)):
        read = inputs[:, count - lag : count - lag + time]
        if reach is not None and lag:
            read = jnp.where((reach >= lag)[..., None], read, 0.0)
        y = y + weight[count - lag].astype(jnp.float32) * read
    return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _solve(x, weight, bias, before, reach, config, interpret):
    from efla_jax.kernels import causal_conv as kernel

    coefficients = kernel.coefficients_of(weight, bias)
    y = kernel.forward(x, coefficients, reach, config=config, interpret=interpret)
    if before is None:
        return y
    count = min(before.shape[1], x.shape[1])
    first = _first(x[:, :count], weight, bias, before, None if reach is None else reach[:, :count])
    return y.at[:, :count].set(first.astype(y.dtype))


def _forward(x, weight, bias, before, reach, config, interpret):
    return _solve(x, weight, bias, before, reach, config, interpret), (x, weight, bias, before, reach)


def _backward(config, interpret, residuals, d_y):
    from efla_jax.kernels import causal_conv as kernel

    x, weight, bias, before, reach = residuals
    coefficients = kernel.coefficients_of(weight, bias)
    d_x, total = kernel.backward(x, d_y, coefficients, reach, config=config, interpret=interpret)
    d_weight, d_bias, d_before = total[:-1], total[-1], None
    if before is not None:
        count = min(before.shape[1], x.shape[1])
        head = jnp.zeros_like(x[:, :count]), None if reach is None else reach[:, :count]
        _, pull = jax.vjp(lambda weight, before: _first(head[0], weight, None, before, head[1]), weight, before)
        d_taps, d_before = pull(d_y[:, :count].astype(jnp.float32))
        d_weight += d_taps.astype(jnp.float32)
    d_bias = None if bias is None else d_bias.astype(bias.dtype)
    return d_x, d_weight.astype(weight.dtype), d_bias, d_before, None


_solve.defvjp(_forward, _backward)
