"""Whether the device that a program is compiled for has the tensor cores that the GPU kernels are written for."""

import importlib.util
import re
from typing import Any

import jax

HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")  # in the name of a device


def device() -> Any:
    """The device that is compiled for: that of an abstract mesh, the default one, or the first."""
    return jax.sharding.get_abstract_mesh().abstract_device or default_device() or jax.devices()[0]


def default_device() -> Any:
    """What `jax.default_device` names, a device or a platform, as a device; None if nothing."""
    named = jax.config.jax_default_device
    return jax.devices(named)[0] if isinstance(named, str) else named


def require_hopper(op: str) -> str:
    """The kind of the device, if its tensor cores have wgmma: NVIDIA Hopper alone. NotImplementedError otherwise, and
    where the kernels are missing: to be called before they are imported."""
    found = device()
    if getattr(found, "compute_capability", None) != "9.0" and not HOPPER.search(found.device_kind):
        raise NotImplementedError(
            f"{op}: the GPU kernels need an NVIDIA Hopper GPU, not {found.device_kind!r}; use implementation='chunked' "
            "or 'auto'."
        )
    if importlib.util.find_spec("efla_jax.kernels") is None:
        raise NotImplementedError(
            f"{op}: the folder of GPU kernels is missing, because the link efla_jax/kernels did not survive; link it "
            "to ../kernels, or use implementation='chunked' or 'auto'."
        )
    return found.device_kind
