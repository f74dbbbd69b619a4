"""Log-linear operators on a row of 2^20 tokens, through the public names and at the published sizes: that GPU kernels
take them, forward and backward, and that no array between them is more than linear in the tokens, but for log T.

Nothing runs: a million tokens are lowered for CUDA, which is as much work as for a thousand. No GPU has run it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efla_jax import ops
from tests.lowering import lower_cuda, mosaic_calls

LONG = 1 << 20
LEVELS = 21  # of 2^20 tokens, the token itself among them
# Heads and sizes of the published models: Mamba-2 with one key head, Gated DeltaNet.
SIZES = {"log_linear_attention": (1, 48, 128, 64), "log_linear_delta_rule": (16, 16, 128, 128)}


def arguments(name: str, time: int):
    key_heads, heads, key_dim, value_dim = SIZES[name]
    shape = jax.ShapeDtypeStruct
    keys, values = shape((1, time, key_heads, key_dim), jnp.bfloat16), shape((1, time, heads, value_dim), jnp.bfloat16)
    gates, weights = shape((1, time, heads), jnp.float32), shape((1, time, heads, LEVELS), jnp.float32)
    return (keys, keys, values, *[gates] * (1 + ("delta" in name)), weights)


def largest(lowered) -> int:
    """Bytes of the largest array of the module."""
    found = 0

    def walk(operation):
        nonlocal found
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    for value in inner.operation.results:
                        kind = value.type
                        if hasattr(kind, "shape") and hasattr(kind, "element_type"):
                            width = getattr(kind.element_type, "width", 64)
                            found = max(found, int(np.prod(kind.shape, dtype=np.int64)) * width // 8)
                    walk(inner.operation)

    walk(lowered.compiler_ir("stablehlo").operation)
    return found


@pytest.mark.parametrize(
    "name, backward, kernels, sizes",
    [
        ("log_linear_attention", True, 8, 1),
        ("log_linear_delta_rule", False, 15, 2),
        pytest.param("log_linear_delta_rule", True, 50, 5, marks=pytest.mark.slow),  # of every level of the tree some
    ],
)
def test_a_million_tokens_lower(name, backward, kernels, sizes):
    """kernels: how many; sizes: how large an array may be, in arrays of values [1, T, H, V]."""
    op, given = getattr(ops, name), arguments(name, LONG)

    def forward(*given):
        return op(*given, implementation="pallas")[0]

    def whole(*given):
        out, pull = jax.vjp(forward, *given)
        return out, pull(out)

    lowered = lower_cuda(whole if backward else forward, *given)
    assert mosaic_calls(lowered) == kernels
    values = given[2]
    assert largest(lowered) <= sizes * values.size * values.dtype.itemsize


def test_the_largest_array_is_seen():
    shape = jax.ShapeDtypeStruct((1024, 1), jnp.bfloat16)
    assert largest(lower_cuda(lambda x: (x @ x.T)[0], shape)) == 2 * 1024**2
