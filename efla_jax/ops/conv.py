"""Short causal convolution, one filter per channel: what mixers put before their recurrence."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from efla_jax.ops.segments import mask_padding, permute_time, real_first, segments
from efla_jax.shapes import SegmentIds, check_floating, check_segment_ids, check_shapes


def causal_conv(
    x: Float[Array, "B T D"],
    weight: Float[Array, "W D"],
    bias: Float[Array, " D"] | None = None,
    *,
    initial_state: Float[Array, "B P D"] | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B P D"]]:
    """Depthwise causal convolution over each document's real tokens; an activation is left to the caller.

        y_t = bias + sum_j weight_j x_{t - (W - 1 - j)}        j = 0 .. W - 1: the last tap is the current token

    x `[B, T, D]`, weight `[W, D]`, bias `[D]`. The state `[B, W - 1, D]` holds the last W - 1 real inputs of a
    document, oldest first, zeros before its start, in the dtype of initial_state if given, else of x. initial_state
    belongs to the document of the row's first real token; segment_ids `[B, T]`: 0 is padding, invisible wherever it
    stands, a new id begins a document. Returns y in the dtype of x (sums in float32), zero at padding, and the state
    after each row's last real token. Any T >= 0 and W >= 1. Raises ValueError for shapes or dtypes that do not fit.
    Source: Mamba (arXiv 2312.00752), section 3.4.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[[1.0], [2.0], [3.0]]])
    >>> y, state = causal_conv(x, jnp.array([[10.0], [1.0]]))        # ten times the token before, plus the token
    >>> y[0, :, 0].tolist(), state.tolist()
    ([1.0, 12.0, 23.0], [[[3.0]]])
    """
    taps = check_arguments(x, weight, bias, initial_state, segment_ids)
    if initial_state is None:
        initial_state = jnp.zeros((x.shape[0], taps - 1, x.shape[2]), x.dtype)
    if segment_ids is None:
        y = filtered(inputs_with_state(initial_state, x), weight, bias, None)
        # Joined once more, from the tail only: a slice of the array above would keep all of it alive.
        tail = x[:, max(0, x.shape[1] - (taps - 1)) :].astype(initial_state.dtype)
        return y.astype(x.dtype), jnp.concatenate([initial_state[:, tail.shape[1] :], tail], axis=1)

    real, _, document = segments(segment_ids)
    order, inverse = real_first(real)
    inputs = inputs_with_state(initial_state, permute_time(mask_padding(real, x), order, inverse))
    document = jnp.take_along_axis(document, order, axis=1)
    document = jnp.pad(document, ((0, 0), (taps - 1, 0)))  # the state's inputs belong to document 0
    y = permute_time(filtered(inputs, weight, bias, document).astype(x.dtype), inverse, order)

    last = jnp.sum(real, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(taps - 1)
    state = jnp.take_along_axis(inputs, last[..., None], axis=1)
    latest = jnp.max(document, axis=1, keepdims=True, initial=0)
    state = mask_padding(jnp.take_along_axis(document, last, axis=1) == latest, state)
    return mask_padding(real, y), state.astype(initial_state.dtype)


def check_arguments(x, weight, bias, initial_state, segment_ids) -> int:
    """The number of taps W, after checking every argument (ValueError)."""
    legends = {"x": (x, "BTD"), "weight": (weight, "WD"), "bias": (bias, "D"), "initial_state": (initial_state, "BPD")}
    sizes = check_shapes(legends)
    check_floating({name: array for name, (array, _) in legends.items()})
    check_segment_ids(segment_ids, sizes["B"], sizes["T"])
    if sizes["W"] < 1:
        raise ValueError(f"weight: shape {weight.shape} has no tap; it is [W, D] with W >= 1. Give at least one row.")
    if sizes.get("P", sizes["W"] - 1) != sizes["W"] - 1:
        raise ValueError(
            f"initial_state: shape {initial_state.shape} holds {sizes['P']} inputs, but {sizes['W']} taps need"
            f" [B, W - 1, D] = ({sizes['B']}, {sizes['W'] - 1}, {sizes['D']}). Give a state of the same convolution."
        )
    return sizes["W"]


def inputs_with_state(state: jax.Array, x: jax.Array) -> jax.Array:
    """The W - 1 inputs before the call and x, [B, W - 1 + T, D], in a dtype that holds both."""
    dtype = jnp.result_type(state, x)
    return jnp.concatenate([state.astype(dtype), x.astype(dtype)], axis=1)


@jax.checkpoint  # a product keeps its operands for the gradient: W shifted float32 copies of x, where x itself will do
def filtered(inputs: jax.Array, weight: jax.Array, bias: jax.Array | None, document: jax.Array | None) -> jax.Array:
    """y [B, T, D] float32 from inputs [B, W - 1 + T, D]; a tap reads its own document [B, W - 1 + T] only."""
    taps = weight.shape[0]
    time = inputs.shape[1] - (taps - 1)
    y = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)
    for j in range(taps):
        shifted = inputs[:, j : j + time]
        if document is not None and j < taps - 1:
            shifted = mask_padding(document[:, j : j + time] == document[:, taps - 1 :], shifted)
        y = y + weight[j].astype(jnp.float32) * shifted.astype(jnp.float32)
    return y
