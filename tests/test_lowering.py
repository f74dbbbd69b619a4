"""The bridge that lowers kernels for CUDA on a CPU: it reaches Mosaic, and it refuses what a device would."""

import time

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax import ops
from efla_jax.ops.pallas_conv import windowed
from tests.lowering import custom_calls, lower_cuda, mosaic_calls, time_limit

PARAMETERS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def doubled(x, columns: int = 128):
    """2 x for x [64, columns] through shared memory, by one warpgroup."""

    def body(x_gmem, y_gmem, smem):
        smem[...] = 2 * plgpu.load(x_gmem, layout=plgpu.Layout.WG_STRIDED((64, columns), vec_size=4))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, y_gmem)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=dict(smem=plgpu.SMEM((64, columns), x.dtype)),
        compiler_params=PARAMETERS,
    )(x)


def test_a_kernel_becomes_one_mosaic_call():
    lowered = lower_cuda(doubled, jax.ShapeDtypeStruct((64, 128), jnp.float32))
    assert mosaic_calls(lowered) == 1, custom_calls(lowered)
    both = lower_cuda(lambda x: doubled(doubled(x)), jax.ShapeDtypeStruct((64, 128), jnp.float32))
    assert mosaic_calls(both) == 2, custom_calls(both)


def test_plain_jax_has_no_mosaic_call():
    assert mosaic_calls(lower_cuda(lambda x: jnp.sin(x) @ x.T, jnp.zeros((8, 8)))) == 0


LAYERS = {  # a layer of x [1, 128, 2, 64]
    "causal_conv": lambda x: windowed(x.reshape(1, 128, 128), jnp.ones((4, 128)), None, None, None).reshape(x.shape),
    "softmax_attention": lambda x: ops.softmax_attention(x, x, x, implementation="pallas")[0],
    "delta_rule": lambda x: ops.delta_rule(x, x, x, *2 * [jnp.zeros((1, 128, 2))], implementation="pallas")[0],
    "linear_attention": lambda x: ops.linear_attention(x, x, x, jnp.zeros((1, 128, 2)), implementation="pallas")[0],
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ("delta_rule", "linear_attention") else n for n in LAYERS]
)
def test_a_kernel_is_lowered_once_for_all_layers(name):
    """Lowering a kernel takes a second: a model of 21 blocks that are all different ones would spend minutes on it."""
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

    def calls(count: int) -> int:
        def loss(x):
            for _ in range(count):
                x = jax.checkpoint(LAYERS[name])(x)
            return jnp.sum(x.astype(jnp.float32))

        return mosaic_calls(lower_cuda(jax.grad(loss), x))

    assert calls(4) == calls(3) > 0  # the first and the last layer have fewer gradients


def test_too_much_shared_memory_is_refused():
    with pytest.raises(Exception, match="shared memory"):
        lower_cuda(lambda x: doubled(x, 1024), jax.ShapeDtypeStruct((64, 1024), jnp.float32))


def test_what_only_interpret_mode_accepts_is_refused():
    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...][:, ::-1]

    def reversed_rows(x):
        return plgpu.kernel(body, out_type=x, compiler_params=PARAMETERS)(x)

    with pytest.raises(Exception, match="rev|Unimplemented|layout|slice"):
        lower_cuda(reversed_rows, jax.ShapeDtypeStruct((64, 128), jnp.float32))


def test_a_lowering_that_does_not_end_is_stopped():
    with pytest.raises(TimeoutError, match="0.05 s"), time_limit(0.05):
        while True:
            time.sleep(0.01)
