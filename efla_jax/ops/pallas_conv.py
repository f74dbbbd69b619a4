"""The short convolution through GPU kernels: which input they serve, inputs before the first token, gradients.

The kernels know no token before x. The first W - 1 outputs are then summed by XLA, which writes them over the kernel's,
and their gradients with them: a few rows, and `before` keeps a dtype of its own.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from efla_jax.ops.hopper import require_hopper


class How(NamedTuple):
    """activation: of the sums, None or "silu"; config: of the kernels; interpret: parameters of Mosaic's interpreter,
    or None for a device."""

    activation: str | None
    config: Any
    interpret: Any


def windowed(x, weight, bias, before, reach, activation=None, config=None, interpret=None) -> jax.Array:
    """y [B, T, D] in the dtype of x, sums and activation in float32; a token reads itself and the inputs before it.

    x [B, T, D]; weight [W, D], the last tap is the current token's; bias [D] or None; before [B, W - 1, D], the inputs
    before x, or None: zeros; reach [B, T] int32, how many of the inputs before it a token reads (-1: it is padding,
    whose x nothing reads and whose y is 0), or None: all W - 1; activation: None or "silu". config: a
    `kernels.causal_conv.Config` for the default; interpret: parameters of Mosaic's interpreter. Raises
    NotImplementedError, with the reason, for what the kernels do not serve."""
    if interpret is None:
        require_hopper("causal_conv")
    from efla_jax.kernels import causal_conv as kernel

    if x.size == 0:
        raise NotImplementedError(f"causal_conv: x of shape {x.shape} has nothing to convolve")
    if reason := kernel.unsupported(weight.shape[0], x.shape[2], x.dtype, activation):
        raise NotImplementedError(f"causal_conv: no GPU kernel for {reason}")
    return solved(x, weight, bias, before, reach, How(activation, config or kernel.SAFE, interpret))


def _first(x, weight, bias, before, reach, activation) -> jax.Array:
    """The outputs of the first tokens x [B, n, D], n < W, in float32."""
    count, time = before.shape[1], x.shape[1]
    inputs = jnp.concatenate([before.astype(jnp.float32), x.astype(jnp.float32)], axis=1)
    y = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)
    for lag in reversed(range(count + 1)):
        read = inputs[:, count - lag : count - lag + time]
        if reach is not None:
            read = jnp.where((reach >= lag)[..., None], read, 0.0)
        y = y + weight[count - lag].astype(jnp.float32) * read
    y = jax.nn.silu(y) if activation == "silu" else y
    return y if reach is None else jnp.where((reach >= 0)[..., None], y, 0.0)


def overwritten(y: jax.Array, first: jax.Array) -> jax.Array:
    """What a kernel wrote, y [B, T, D], with first [B, n, D] in front. Without the barrier XLA (of jax 0.11.2) sees one
    copy into the result of a custom call where B is 1, and refuses to compile it."""
    return jax.lax.optimization_barrier(y).at[:, : first.shape[1]].set(first.astype(y.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _solve(x, weight, bias, before, reach, how: How):
    from efla_jax.kernels import causal_conv as kernel

    y = kernel.forward(x, kernel.coefficients_of(weight, bias), reach, **how._asdict())
    if before is None:
        return y
    count = min(before.shape[1], x.shape[1])
    reach = None if reach is None else reach[:, :count]
    first = _first(x[:, :count], weight, bias, before, reach, how.activation)
    return overwritten(y, first)


def _forward(x, weight, bias, before, reach, how):
    return _solve(x, weight, bias, before, reach, how), (x, weight, bias, before, reach)


def _backward(how, residuals, d_y):
    from efla_jax.kernels import causal_conv as kernel

    x, weight, bias, before, reach = residuals
    continued, coefficients = before is not None, kernel.coefficients_of(weight, bias)
    d_x, total = kernel.backward(x, d_y, coefficients, reach, continued=continued, **how._asdict())
    d_weight, d_bias, d_before = total[:-1], total[-1], None
    if continued:
        count = min(before.shape[1], x.shape[1])
        reach = None if reach is None else reach[:, :count]

        def first(x, coefficients, before):
            return _first(x, coefficients[:-1], coefficients[-1], before, reach, how.activation)

        _, pull = jax.vjp(first, x[:, :count].astype(jnp.float32), coefficients, before)
        d_first, more, d_before = pull(d_y[:, :count].astype(jnp.float32))
        d_x = overwritten(d_x, d_first + d_x[:, :count].astype(jnp.float32))
        d_weight, d_bias = d_weight + more[:-1], d_bias + more[-1]
    d_bias = None if bias is None else d_bias.astype(bias.dtype)
    return d_x, d_weight.astype(weight.dtype), d_bias, d_before, None


_solve.defvjp(_forward, _backward)
solved = jax.jit(_solve, static_argnums=5)  # traced and lowered once for all layers of the same sizes
