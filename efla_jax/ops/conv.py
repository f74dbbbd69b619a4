"""Short causal convolution, one filter per channel: what mixers put before their recurrence."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from efla_jax.ops.dispatch import dispatch
from efla_jax.ops.pallas_conv import windowed as pallas
from efla_jax.ops.segments import BEHIND, mask_padding, permute_time, real_first, segments
from efla_jax.ops.sharded import gathered, part, sharded
from efla_jax.shapes import SegmentIds, check_floating, check_segment_ids, check_shapes

WORTH_A_KERNEL = 64  # tokens
ACTIVATIONS = (None, "silu")
PADDING = -1  # the reach of a token that neither reads nor is read


def causal_conv(
    x: Float[Array, "B T D"],
    weight: Float[Array, "W D"],
    bias: Float[Array, " D"] | None = None,
    *,
    initial_state: Float[Array, "B P D"] | None = None,
    segment_ids: SegmentIds | None = None,
    activation: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B P D"]]:
    """Depthwise causal convolution over each document's real tokens, and the activation of its result.

        y_t = f(bias + sum_j weight_j x_{t - (W - 1 - j)})        j = 0 .. W - 1: the last tap is the current token

    activation None: f(s) = s; "silu": f(s) = s / (1 + exp(-s)), of the float32 sum, which is rounded only then.
    x `[B, T, D]`, weight `[W, D]`, bias `[D]`. The state `[B, W - 1, D]` holds the last W - 1 real inputs of a
    document, oldest first, zeros before its start, in the dtype of initial_state if given, else of x. initial_state
    belongs to the document of the row's first real token; segment_ids `[B, T]`: 0 is padding, invisible wherever it
    stands, a new id begins a document. Returns y in the dtype of x (sums in float32), zero at padding, and the state
    after each row's last real token. Any T >= 0 and W >= 1. Raises ValueError for shapes or dtypes that do not fit and
    for an activation of another name.
    Under `jax.set_mesh` with a mesh of `sharding.make_mesh` each device has its rows, channels and part of the time.
    Source: Mamba (arXiv 2312.00752), section 3.4.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[[1.0], [2.0], [3.0]]])
    >>> y, state = causal_conv(x, jnp.array([[10.0], [1.0]]))        # ten times the token before, plus the token
    >>> y[0, :, 0].tolist(), state.tolist()
    ([1.0, 12.0, 23.0], [[[3.0]]])
    """
    taps = check_arguments(x, weight, bias, initial_state, segment_ids, activation)
    state = jnp.zeros((x.shape[0], taps - 1, x.shape[2]), x.dtype) if initial_state is None else initial_state
    legends, results = ("BTD", "WD", "D", "BPD", "BT"), ("BTD", "BPD")
    fresh = initial_state is None
    if segment_ids is None:
        local = functools.partial(without_documents, fresh, activation)
        return sharded(local, (x, weight, bias, state), legends[:4], results)
    real, _, document = segments(segment_ids)
    document = jnp.where(real, document, -1)
    local = functools.partial(with_documents, fresh, activation)
    return sharded(local, (x, weight, bias, state, document), legends, results)


def check_arguments(x, weight, bias, initial_state, segment_ids, activation) -> int:
    """The number of taps W, after checking every argument (ValueError)."""
    legends = {"x": (x, "BTD"), "weight": (weight, "WD"), "bias": (bias, "D"), "initial_state": (initial_state, "BPD")}
    sizes = check_shapes(legends)
    check_floating({name: array for name, (array, _) in legends.items()})
    check_segment_ids(segment_ids, sizes["B"], sizes["T"])
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is not known to causal_conv; choose one of {ACTIVATIONS}.")
    if sizes["W"] < 1:
        raise ValueError(f"weight: shape {weight.shape} has no tap; it is [W, D] with W >= 1. Give at least one row.")
    if sizes.get("P", sizes["W"] - 1) != sizes["W"] - 1:
        raise ValueError(
            f"initial_state: shape {initial_state.shape} holds {sizes['P']} inputs, but {sizes['W']} taps need"
            f" [B, W - 1, D] = ({sizes['B']}, {sizes['W'] - 1}, {sizes['D']}). Give a state of the same convolution."
        )
    return sizes["W"]


# Below, a device may have only a part of the time (see `sharded`): the last inputs of every part, at most W - 1, are
# all that a part needs of those before it. fresh: the state is of no token.


def without_documents(fresh, activation, context, x, weight, bias, state) -> tuple[jax.Array, jax.Array]:
    """y [B, T, D] and the state after all parts, every token being real and of the document of the state."""
    count = min(state.shape[1], x.shape[1])
    seen = joined(state, gathered(x[:, x.shape[1] - count :], context))
    before = lax.dynamic_slice_in_dim(seen, part(context) * count, state.shape[1], axis=1)
    y = windowed(x, weight, bias, None if fresh and context is None else before, None, activation)
    return y, seen[:, seen.shape[1] - state.shape[1] :].astype(state.dtype)


def with_documents(fresh, activation, context, x, weight, bias, state, document) -> tuple[jax.Array, jax.Array]:
    """The same where `document` [B, T] numbers the documents of all parts: 0 is the state's, -1 is padding."""
    count = state.shape[1]
    tail, owners = latest(x, document, min(count, x.shape[1]))
    seen = joined(state, gathered(tail, context))
    owners = jnp.pad(gathered(owners, context), ((0, 0), (count, 0)))  # the state's inputs belong to document 0
    before, owner = state, owners[:, :count]
    if context is not None:
        earlier = jnp.arange(seen.shape[1]) < count + part(context) * tail.shape[1]
        before, owner = latest(seen, jnp.where(earlier, owners, -1), count)
    order, inverse = (None, None) if BEHIND.get() else real_first(document >= 0)
    ordered = document if order is None else jnp.take_along_axis(document, order, axis=1)
    reach = reached(jnp.concatenate([owner, ordered], axis=1), count)
    before = None if fresh and context is None else before
    y = real_windowed(activation, x, weight, bias, before, (reach, order, inverse))
    return y, latest(seen, owners, count)[0].astype(state.dtype)


def reached(owner: jax.Array, count: int) -> jax.Array:
    """[B, T] int32: how many of the `count` inputs before each token are of its document, PADDING for padding; owner
    [B, count + T]: the documents of all inputs in order, -1 for padding."""
    time = owner.shape[1] - count
    own = [owner[:, count - lag : count - lag + time] == owner[:, count:] for lag in range(1, count + 1)]
    reach = sum((x.astype(jnp.int32) for x in own), jnp.zeros((owner.shape[0], time), jnp.int32))
    return jnp.where(owner[:, count:] < 0, PADDING, reach)


def moving(run, x, rows):
    """run(x, move, back): move puts the real tokens of [B, T, D] in front, and back undoes it. Padding mostly stands
    behind them as it is; moving them would then be a copy of everything, and neither does anything. rows: see
    `real_windowed`. A GPU waits for the host to know; within `padding_behind` nothing is asked."""
    _, order, inverse = rows
    if order is None:
        return run(x, _as_it_is, _as_it_is)
    still = jnp.all(order == jnp.arange(order.shape[1]))
    move, back = (functools.partial(_permuted, *both) for both in ((order, inverse), (inverse, order)))
    return lax.cond(still, lambda x: run(x, _as_it_is, _as_it_is), lambda x: run(x, move, back), x)


def _as_it_is(x):
    return x


def _permuted(order, inverse, x):
    return permute_time(x, order, inverse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def real_windowed(activation, x, weight, bias, before, rows) -> jax.Array:
    """`windowed` over the real tokens of each row, and 0 at padding, whatever stands there. rows [B, T]: the reach of
    the tokens in the order that has the real ones first, this order and its inverse (see `real_first`; None: as it is).

    Its own gradient, so that what the condition's branches compute from is kept as it is, not copied out of them."""

    def run(x, move, back):
        return back(windowed(move(x), weight, bias, before, rows[0], activation))

    return moving(run, x, rows)


def _real_windowed_forward(activation, *arguments):
    return real_windowed(activation, *arguments), arguments


def _real_windowed_backward(activation, saved, cotangent):
    x, weight, bias, before, rows = saved

    def run(both, move, back):
        x, cotangent = both
        _, pull = jax.vjp(lambda *a: windowed(*a, rows[0], activation), move(x), weight, bias, before)
        d_x, *others = pull(move(cotangent))
        return back(d_x), *others

    return *moving(run, (x, cotangent), rows), None


real_windowed.defvjp(_real_windowed_forward, _real_windowed_backward)


def windowed(x, weight, bias, before, reach, activation=None) -> jax.Array:
    """y [B, T, D] in the dtype of x; a token reads itself and the `reach` [B, T] inputs before it (None: all W - 1), of
    which the first are before [B, W - 1, D] (None: zeros). Where the reach is PADDING, y is 0 and x is not read."""
    choice = ("pallas", "shifts") if x.shape[1] >= WORTH_A_KERNEL else ("shifts",)
    return dispatch("causal_conv", "auto", {"pallas": pallas, "shifts": by_shifts}, choice,
                    (x, weight, bias, before, reach, activation))  # fmt: skip


def shifted(x: jax.Array, lag: int, before: jax.Array | None, reach: jax.Array | None) -> jax.Array:
    """The input `lag` tokens before each of x [B, T, D], in float32, 0 where that lies beyond its reach."""
    inputs, time = x, x.shape[1]
    if lag:
        inputs = jnp.pad(x, ((0, 0), (lag, 0), (0, 0))) if before is None else joined(before[:, -lag:], x)
    inputs = inputs[:, :time].astype(jnp.float32)
    return inputs if reach is None else mask_padding(reach >= lag, inputs)


def summed(x, weight, bias, before, reach) -> jax.Array:
    """What the activation is of, [B, T, D] float32."""
    taps = weight.shape[0]
    y = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)
    for j in range(taps):
        y = y + weight[j].astype(jnp.float32) * shifted(x, taps - 1 - j, before, reach)
    return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def by_shifts(x, weight, bias, before, reach, activation) -> jax.Array:
    """`windowed` through XLA. The gradient keeps x; autodiff would keep W shifted float32 copies."""
    y = summed(x, weight, bias, before, reach)
    y = jax.nn.silu(y) if activation == "silu" else y
    return (y if reach is None else mask_padding(reach >= 0, y)).astype(x.dtype)


def _by_shifts_forward(x, weight, bias, before, reach, activation):
    return by_shifts(x, weight, bias, before, reach, activation), (x, weight, bias, before, reach)


def _by_shifts_backward(activation, saved, cotangent):
    """Every input was read by its own token and by the W - 1 behind it, where they reach it."""
    x, weight, bias, before, reach = saved
    taps = weight.shape[0]
    wide = cotangent.astype(jnp.float32)
    if activation == "silu":
        _, pull = jax.vjp(jax.nn.silu, summed(*saved))
        (wide,) = pull(wide)
    d_inputs = jnp.zeros((), jnp.float32)
    for lag in range(taps):
        read = wide if reach is None else mask_padding(reach >= lag, wide)
        read = jnp.pad(read, ((0, 0), (taps - 1 - lag, lag), (0, 0)))
        d_inputs = d_inputs + weight[taps - 1 - lag].astype(jnp.float32) * read
    wide = wide if reach is None else mask_padding(reach >= 0, wide)
    d_weight = [jnp.sum(wide * shifted(x, taps - 1 - j, before, reach), axis=(0, 1)) for j in range(taps)]
    d_bias = None if bias is None else jnp.sum(wide, axis=(0, 1)).astype(bias.dtype)
    d_before, d_x = jnp.split(d_inputs, [taps - 1], axis=1)
    d_before = None if before is None else d_before.astype(before.dtype)
    return d_x.astype(x.dtype), jnp.stack(d_weight).astype(weight.dtype), d_bias, d_before, None


by_shifts.defvjp(_by_shifts_forward, _by_shifts_backward)


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
