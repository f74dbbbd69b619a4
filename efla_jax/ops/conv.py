"""Short causal convolution, one filter per channel: what mixers put before their recurrence."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from efla_jax.ops.segments import mask_padding, permute_time, real_first, segments
from efla_jax.ops.sharded import gathered, part, sharded
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
    Under `jax.set_mesh` with a mesh of `sharding.make_mesh` each device has its rows, channels and part of the time.
    Source: Mamba (arXiv 2312.00752), section 3.4.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[[1.0], [2.0], [3.0]]])
    >>> y, state = causal_conv(x, jnp.array([[10.0], [1.0]]))        # ten times the token before, plus the token
    >>> y[0, :, 0].tolist(), state.tolist()
    ([1.0, 12.0, 23.0], [[[3.0]]])
    """
    taps = check_arguments(x, weight, bias, initial_state, segment_ids)
    state = jnp.zeros((x.shape[0], taps - 1, x.shape[2]), x.dtype) if initial_state is None else initial_state
    legends, results = ("BTD", "WD", "D", "BPD", "BT"), ("BTD", "BPD")
    if segment_ids is None:
        return sharded(without_documents, (x, weight, bias, state), legends[:4], results)
    real, _, document = segments(segment_ids)
    x, document = mask_padding(real, x), jnp.where(real, document, -1)
    local = functools.partial(with_documents, initial_state is None)
    y, state = sharded(local, (x, weight, bias, state, document), legends, results)
    return mask_padding(real, y), state


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


# Below, a device may have only a part of the time (see `sharded`): the last inputs of every part, at most W - 1, are
# all that a part needs of those before it.


def without_documents(context, x, weight, bias, state) -> tuple[jax.Array, jax.Array]:
    """y [B, T, D] and the state after all parts, every token being real and of the document of the state."""
    count = min(state.shape[1], x.shape[1])
    seen = joined(state, gathered(x[:, x.shape[1] - count :], context))
    before = lax.dynamic_slice_in_dim(seen, part(context) * count, state.shape[1], axis=1)
    y = filtered(joined(before, x), weight, bias, None)
    return y.astype(x.dtype), seen[:, seen.shape[1] - state.shape[1] :].astype(state.dtype)


def with_documents(fresh, context, x, weight, bias, state, document) -> tuple[jax.Array, jax.Array]:
    """The same where `document` [B, T] numbers the documents of all parts: 0 is the state's, -1 is padding. fresh: the
    state is of no token."""
    count = state.shape[1]
    tail, owners = latest(x, document, min(count, x.shape[1]))
    seen = joined(state, gathered(tail, context))
    owners = jnp.pad(gathered(owners, context), ((0, 0), (count, 0)))  # the state's inputs belong to document 0
    before, owner = state, owners[:, :count]
    if context is not None:
        earlier = jnp.arange(seen.shape[1]) < count + part(context) * tail.shape[1]
        before, owner = latest(seen, jnp.where(earlier, owners, -1), count)
    order, inverse = real_first(document >= 0)
    y = filtered_documents(x, weight, bias, order, inverse, document)
    if not fresh or context is not None:
        first = order[:, :count]  # of the tokens that may read inputs of before
        own = jnp.concatenate([owner, jnp.take_along_axis(document, first, axis=1)], axis=1)
        inputs = jnp.pad(before, ((0, 0), (0, first.shape[1]), (0, 0)))
        read = filtered(inputs, weight, None, own)
        y += permute_time(jnp.pad(read, ((0, 0), (0, x.shape[1] - read.shape[1]), (0, 0))), inverse, order)
    return y.astype(x.dtype), latest(seen, owners, count)[0].astype(state.dtype)


def neighbours(x: jax.Array, lag: int, order: jax.Array, inverse: jax.Array, document: jax.Array) -> jax.Array:
    """x [B, T, D] in float32 at the real token `lag` before each one (behind, if negative), 0 where the document has
    none. Read where it stands: a permutation of the real tokens to the front would write x once more."""
    if lag == 0:
        return x.astype(jnp.float32)
    place = inverse - lag
    index = jnp.take_along_axis(order, jnp.clip(place, 0, x.shape[1] - 1), axis=1)
    own = (place >= 0) & (place < x.shape[1]) & (jnp.take_along_axis(document, index, axis=1) == document)
    found = jnp.take_along_axis(x, index[..., None], axis=1, mode="promise_in_bounds")
    return mask_padding(own, found.astype(jnp.float32))


@jax.custom_vjp
def filtered_documents(x, weight, bias, order, inverse, document) -> jax.Array:
    """`filtered` within the documents of x [B, T, D] alone. Gradients read the neighbours on the other side; autodiff
    would scatter."""
    taps = weight.shape[0]
    y = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)
    for j in range(taps):
        y = y + weight[j].astype(jnp.float32) * neighbours(x, taps - 1 - j, order, inverse, document)
    return y


def _documents_forward(*arguments):
    return filtered_documents(*arguments), arguments


def _documents_backward(saved, cotangent):
    x, weight, bias, *places = saved
    taps = weight.shape[0]
    cotangent = cotangent.astype(x.dtype)  # exact: y is rounded to it
    d_x = filtered_back(cotangent, weight, places)
    d_weight = [jnp.sum(cotangent * neighbours(x, taps - 1 - j, *places), axis=(0, 1)) for j in range(taps)]
    d_bias = None if bias is None else jnp.sum(cotangent, axis=(0, 1)).astype(bias.dtype)
    return d_x.astype(x.dtype), jnp.stack(d_weight).astype(weight.dtype), d_bias, None, None, None


def filtered_back(cotangent: jax.Array, weight: jax.Array, places) -> jax.Array:
    """The cotangent of x: every token was read by itself and by those behind it."""
    d_x = jnp.zeros((), jnp.float32)
    for lag in range(weight.shape[0]):
        d_x = d_x + weight[-1 - lag].astype(jnp.float32) * neighbours(cotangent, -lag, *places)
    return d_x


filtered_documents.defvjp(_documents_forward, _documents_backward)


def latest(inputs: jax.Array, document: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The last `count` inputs [B, count, D] of each row's latest document, oldest first, and their document; zeros and
    -1 in front where it has fewer."""
    newest = jnp.max(document, axis=1, keepdims=True, initial=0)
    own = document == newest
    place = count - lax.cumsum(own.astype(jnp.int32), axis=1, reverse=True)
    hit = own[:, None] & (place[:, None] == jnp.arange(count)[:, None])
    found = jnp.any(hit, axis=2)
    slot = jnp.max(jnp.where(hit, jnp.arange(inputs.shape[1]), 0), axis=2, initial=0)
    values = jnp.take_along_axis(inputs, slot[..., None], axis=1)
    return mask_padding(found, values), jnp.where(found, newest, -1)


def joined(state: jax.Array, x: jax.Array) -> jax.Array:
    """The W - 1 inputs before and those of x, [B, W - 1 + T, D], in a dtype that holds both."""
    dtype = jnp.promote_types(state.dtype, x.dtype)  # not result_type, where a weakly typed state does not count
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
