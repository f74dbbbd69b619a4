"""On meshes the operators reach their GPU kernels, every device its own: lowered for CUDA on a CPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from efla_jax import ops
from efla_jax.sharding import AXES
from tests.lowering import mosaic_calls, time_limit

BATCH, TIME, HEADS, DIM = 2, 256, 4, 128
DEVICE = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
MESHES = {"rows": (2, 1, 1, 1), "heads": (1, 1, 2, 1), "time": (1, 1, 1, 2)}


def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((BATCH, TIME, *shape), dtype)


def lowered_on(sizes, op, *avals):
    """Value and gradients of the sum of an operator's outputs, lowered for two such devices."""
    mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 4, abstract_device=DEVICE)
    run = jax.value_and_grad(lambda *a: jnp.sum(op(*a).astype(jnp.float32)), argnums=tuple(range(len(avals))))
    with time_limit(120.0), jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(run).trace(*avals).lower(lowering_platforms=("cuda",))


def delta(q, k, u, erase, log_decay):
    return ops.delta_rule(q, k, u, erase, log_decay, implementation="pallas")[0]


def raw_keys(q, k, v, beta):
    return ops.delta_flow(q, k, v, beta, implementation="pallas")[0]


def log_linear(q, k, u, log_decay):
    levels = jnp.ones((*log_decay.shape, 12))
    return ops.log_linear_attention(q, k, u, log_decay, levels, implementation="pallas")[0]


def log_linear_delta(q, k, u, erase, log_decay):
    levels = jnp.ones((*log_decay.shape, 12))
    return ops.log_linear_delta_rule(q, k, u, erase, log_decay, levels, implementation="pallas")[0]


def linear(q, k, u, log_decay):
    return ops.linear_attention(q, k, u, log_decay, implementation="pallas")[0]


CASES = [
    pytest.param(name, op, marks=() if (name, op) == ("time", delta) else pytest.mark.slow)
    for name in MESHES
    for op in (delta, linear, raw_keys, log_linear, log_linear_delta)
]


@pytest.mark.parametrize("name, op", CASES)
def test_recurrences(name, op):
    gates = (shaped(HEADS, dtype=jnp.float32),) * (2 if op in (delta, log_linear_delta) else 1)
    assert mosaic_calls(lowered_on(MESHES[name], op, *(shaped(HEADS, DIM),) * 3, *gates)) >= 2  # forward and backward
