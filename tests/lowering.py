"""Lowering for CUDA on a machine without a GPU: what a kernel must pass after interpret mode and before a device.

Interpret mode accepts programs that no GPU backend can build (slices of a value, a swizzle that does not fit, more
shared memory than there is), so every kernel and every row of its table of configs is lowered as well. Lowering gives
the whole Mosaic module; registers and spills are known on a device only.
"""

import contextlib
import signal

import jax
from jax.sharding import AbstractDevice, AbstractMesh

MOSAIC_CALL = "mosaic_gpu"  # the custom call that carries a Mosaic kernel begins like this


@contextlib.contextmanager
def time_limit(seconds: float):
    """Raise TimeoutError in the block after so long: Mosaic's layout inference is a search, which may not end.

    For the main thread only, which runs every test."""

    def late(*_):
        raise TimeoutError(f"not lowered within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def lower_cuda(function, *avals, device_kind: str = "NVIDIA H200", seconds: float = 120.0) -> jax.stages.Lowered:
    """Lower `function` for CUDA; avals are pytrees of arrays or ShapeDtypeStructs. Raises what lowering raises, and
    TimeoutError.

    An abstract mesh names the device, as a backend without one says "No supported GPU devices found"."""
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), avals)
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    device = AbstractDevice(device_kind=device_kind, num_cores=None, platform="cuda")
    with time_limit(seconds), jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jitted.trace(*avals).lower(lowering_platforms=("cuda",))


def custom_calls(lowered: jax.stages.Lowered) -> list[str]:
    """The targets of the module's custom calls, in order: a Mosaic kernel is one that begins with MOSAIC_CALL."""
    found: list[str] = []

    def walk(operation):
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    if inner.operation.name == "stablehlo.custom_call":
                        found.append(inner.operation.attributes["call_target_name"].value)
                    walk(inner.operation)

    walk(lowered.compiler_ir("stablehlo").operation)
    return found


def mosaic_calls(lowered: jax.stages.Lowered) -> int:
    """How many Mosaic kernels the module launches."""
    return sum(target.startswith(MOSAIC_CALL) for target in custom_calls(lowered))
