"""Under jax_enable_x64 the GPU kernels still lower: their indices have 32 bits, whatever Python numbers become."""

import jax
import jax.numpy as jnp
import pytest

from efla_jax import ops
from tests.lowering import lower_cuda, mosaic_calls

pytestmark = pytest.mark.identity  # Pallas changes most from one jax to the next: the newest lowers them, too

B, T, G, H = 1, 130, 1, 2


def keys(time=T, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((B, time, G, 128), dtype)


def values(size, time=T):
    return jax.ShapeDtypeStruct((B, time, H, size), jnp.bfloat16)


def float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


IDS = jax.ShapeDtypeStruct((B, T), jnp.int32)


def delta(q, k, u, erase, log_decay, ids):
    return ops.delta_rule(q, k, u, erase, log_decay, segment_ids=ids, implementation="pallas")[0]


def linear(q, k, u, log_decay, ids):
    return ops.linear_attention(q, k, u, log_decay, segment_ids=ids, implementation="pallas")[0]


def conv(x, weight, ids):
    return ops.causal_conv(x, weight, segment_ids=ids)[0]


def token(q, k, u, erase, log_decay, state):
    return ops.delta_rule(q, k, u, erase, log_decay, initial_state=state, implementation="pallas")[0]


def levels(q, k, u, log_decay, weights, ids):
    return ops.log_linear_attention(q, k, u, log_decay, weights, segment_ids=ids, implementation="pallas")[0]


def delta_levels(q, k, u, erase, log_decay, weights):
    return ops.log_linear_delta_rule(q, k, u, erase, log_decay, weights, implementation="pallas")[0]


def flow(q, k, v, beta, log_decay, ids):
    how = {"step": "gated_exact", "segment_ids": ids, "implementation": "pallas"}
    return ops.delta_flow(q, k, v, beta, log_decay, **how)[0]


def softmax(q, k, v, ids):
    return ops.softmax_attention(q, k, v, segment_ids=ids, implementation="pallas")[0]


GATE, WEIGHTS = float32(B, T, H), float32(B, T, H, 9)
CASES = {
    "raw keys": (flow, (keys(), keys(), values(128), GATE, GATE, IDS)),
    "log-linear attention": (levels, (keys(), keys(), values(64), GATE, WEIGHTS, IDS)),
    "log-linear delta rule": (delta_levels, (keys(), keys(), values(128), GATE, GATE, WEIGHTS)),
    "softmax attention": (softmax, (values(128), keys(), keys(), IDS)),
    "delta rule": (delta, (keys(), keys(), values(128), GATE, GATE, IDS)),
    "linear attention": (linear, (keys(), keys(), values(64), GATE, IDS)),
    "convolution": (conv, (jax.ShapeDtypeStruct((B, T, 256), jnp.bfloat16), float32(4, 256), IDS)),
    "one token": (token, (keys(1), keys(1), values(128, 1), *[float32(B, 1, H)] * 2, float32(B, H, 128, 128))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kernels_and_their_gradients_lower(name):
    function, avals = CASES[name]
    argnums = tuple(i for i, x in enumerate(avals) if jnp.issubdtype(x.dtype, jnp.floating))

    def loss(*arguments):
        return jnp.sum(function(*arguments).astype(jnp.float32))

    with jax.enable_x64(True):
        run = loss if name == "one token" else jax.grad(loss, argnums)  # a token's gradient is that of "recurrent"
        assert mosaic_calls(lower_cuda(run, *avals)) >= 1
