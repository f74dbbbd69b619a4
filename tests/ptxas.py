"""Registers and spills of Mosaic kernels on a machine without a GPU.

jax's CUDA plugin exports the function that compiles a Mosaic module to machine code. All that it asks a driver for is
the compute capability, so a stand-in for libcuda is enough, and ptxas then reports as it does on a device. Wanted:

    pip download --no-deps jax-cuda13-pjrt==<version of jax> jax-cuda13-plugin==<the same>   # unpack both in one folder
    export CUDA_PLUGIN=<that folder> CUDA_ROOT=<of a toolkit: bin/ptxas, nvvm/libdevice>

and a C compiler. MOSAIC_GPU_DUMP_PTX=1 and MOSAIC_GPU_DUMP_SASS=1 (bin/nvdisasm too) print the code as well.
"""

import ctypes
import os
import pathlib
import re
import subprocess
import tempfile
from typing import NamedTuple

import jax

from tests.lowering import MOSAIC_CALL

PLUGIN, RUNTIME = "jax_plugins/xla_cuda13/xla_cuda_plugin.so", "jax_cuda13_plugin/libmosaic_gpu_runtime.so"
COMPUTE_CAPABILITY = {75: 9, 76: 0}  # numbers of the driver's attributes: major, minor
ZERO = ("cuInit", "cuDeviceGet", "cuCtxGetDevice", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute")


class Usage(NamedTuple):
    """What ptxas says of a kernel. spilled: bytes that a thread stores; serialised: its wgmmas run one by one."""

    spilled: int
    serialised: bool


def missing() -> str | None:
    """What this machine lacks, or None."""
    for variable, file in (("CUDA_PLUGIN", PLUGIN), ("CUDA_PLUGIN", RUNTIME), ("CUDA_ROOT", "bin/ptxas")):
        if not (pathlib.Path(os.environ.get(variable, "/nonexistent")) / file).exists():
            return f"{variable}: no {file} there; see tests/ptxas.py"
    return None


def stand_in(folder: str) -> None:
    """Load a libcuda.so.1 that knows a compute capability, and calls everything else a success."""
    cases = "".join(f"case {name}: *value = {value}; break;" for name, value in COMPUTE_CAPABILITY.items())
    source = f"int cuDeviceGetAttribute(int *value, int name, int device) {{ switch (name) {{ {cases} }} return 0; }}\n"
    source += "".join(f"int {name}() {{ return 0; }}\n" for name in ZERO)
    path = pathlib.Path(folder, "libcuda.c")
    path.write_text(source)
    library = path.with_name("libcuda.so.1")
    soname = "-Wl,-soname,libcuda.so.1"  # the plugin asks for this name and finds what is loaded
    subprocess.run(["cc", "-w", "-shared", "-fPIC", soname, "-o", library, path], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def mosaic_modules(lowered: jax.stages.Lowered) -> list[bytes]:
    """The Mosaic module of every kernel, in order."""
    found: list[bytes] = []

    def walk(operation):
        for block in (block for region in operation.regions for block in region.blocks):
            for inner in block.operations:
                attributes = inner.operation.attributes
                if inner.operation.name == "stablehlo.custom_call":
                    if attributes["call_target_name"].value.startswith(MOSAIC_CALL):
                        found.append(attributes["mhlo.backend_config"]["module"].value_bytes)
                walk(inner.operation)

    walk(lowered.compiler_ir("stablehlo").operation)
    return found


def usage(lowered: jax.stages.Lowered) -> list[Usage]:
    """Of every Mosaic kernel of the program, in order. In a process of its own kind: the driver is a stand-in."""
    root = pathlib.Path(os.environ["CUDA_PLUGIN"])
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(root / RUNTIME)
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = os.environ["CUDA_ROOT"]
    with tempfile.TemporaryDirectory() as folder:
        stand_in(folder)
        build = ctypes.CDLL(str(root / PLUGIN)).MosaicGpuCompile
        build.argtypes, build.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
        found = []
        for module in mosaic_modules(lowered):
            text = printed(lambda module=module: build(module, len(module)), pathlib.Path(folder, "printed"))
            spilled = re.search(r"(\d+) bytes spill stores", text)
            assert spilled, f"ptxas did not report:\n{text}"
            found.append(Usage(int(spilled[1]), "C7510" in text or "C7512" in text))
    return found


def printed(call, path: pathlib.Path) -> str:
    """What the call writes to the process's standard output and error."""
    with path.open("wb") as file:
        kept = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            assert call(), "not compiled"
            ctypes.CDLL(None).fflush(None)
        finally:
            for old, number in zip(kept, (1, 2), strict=True):
                os.dup2(old, number)
                os.close(old)
    return path.read_text()
