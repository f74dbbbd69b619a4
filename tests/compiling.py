"""Compiling for an H200 on a machine without a GPU: XLA's program, its fusions and its memory.

jax's CUDA plugin compiles for a described GPU, too. What `tests/ptxas.py` wants is wanted here, and its stand-in for
libcuda serves. Nothing is tuned, as nothing can be timed: matrix products are those of a default choice.

    compiled = compile_h200(jax.jit(step), *avals)
    compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes

A program of its own kind needs a process of its own kind: JAX_PLATFORMS=cpu, and no GPU in use.
"""

import functools
import os
import pathlib
import tempfile
from unittest import mock

import jax
from jax.sharding import SingleDeviceSharding
from jaxlib import xla_client

from efla_jax.ops import hopper
from tests import ptxas

# The figures that XLA asks of a device, in its text form.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 150000000000
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""


@functools.cache
def device():
    """A device that can be compiled for and not run on."""
    root = pathlib.Path(os.environ["CUDA_PLUGIN"])
    os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(root / ptxas.RUNTIME)
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = os.environ["CUDA_ROOT"]
    with tempfile.TemporaryDirectory() as folder:
        ptxas.stand_in(folder)
    if not xla_client.pjrt_plugin_loaded("cuda"):
        xla_client.load_pjrt_plugin_dynamically("cuda", str(root / ptxas.PLUGIN))
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    described = {"target_config": H200, "topology": "1x1x1"}
    topology = xla_client._xla.get_default_c_api_topology("cuda", "1x1x1", described)
    return topology._make_compile_only_devices()[0]


def compile_h200(function, *avals, **options) -> jax.stages.Compiled:
    """`function` compiled for one H200; avals are pytrees of arrays or ShapeDtypeStructs; options are XLA's."""
    place = SingleDeviceSharding(device())
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), avals)
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    with mock.patch.object(hopper, "device", device):
        lowered = jitted.trace(*avals).lower(lowering_platforms=("cuda",))
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_cuda_data_dir": os.environ["CUDA_ROOT"], **options}
    return lowered.compile(compiler_options=options)
