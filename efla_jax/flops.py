"""Floating-point operations of a model by count, for model FLOP utilisation (MFU), and the peak of known accelerators.

    mfu = tokens_per_second * train_flops_per_token(model, length) / (devices * peak_flops(device))

A count, because XLA's own cost analysis counts the body of a scan once. The convention, as in most published figures:
a multiply-add is 2; the backward pass is twice the forward; what rematerialisation repeats, what a chunked form adds to
its recurrence, and elementwise work (norms, gates, activations, decays, softmax) are not counted.
"""

import re

import jax
import jax.numpy as jnp

from efla_jax.layers import MIXERS
from efla_jax.model import LanguageModel, mixer_fields

# Parameters that multiply every token: dense kernels [in, out] and convolutions' taps [W, C].
MULTIPLIES = ("kernel", "weight")

# (words of the device's name, TFLOP/s): dense tensor-core products of bfloat16 with float32 sums, from the makers' data
# sheets; of float16 where there is no bfloat16 (V100, T4). The first row whose words all occur counts.
PEAKS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 PCIe", 756.5),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("V100 SXM2", 125.0),
    ("V100 PCIE", 112.0),
    ("T4", 65.0),
)
PARTS = {"MIG", "Laptop", "D"}  # of a chip, or a smaller chip of the same name


def forward_flops_per_token(model: LanguageModel, length: int) -> float:
    """Of one token of a sequence of `length` tokens: 2 for each entry of a matrix that multiplies it (a tied table
    counts as the head it is; looking an embedding up is free), and each mixer's `operator_flops(length)`."""
    if length < 1:
        raise ValueError(f"length: {length} tokens are no sequence; pass the length of a training window.")
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    leaves = jax.tree.leaves_with_path(params)
    entries = sum(leaf.size for path, leaf in leaves if path[-1].key in MULTIPLIES)
    if model.tie_embeddings:
        entries += params["embed"]["embedding"].size
    mixers = [MIXERS[name](**mixer_fields(model, name), parent=None) for name in model.layers]
    return 2.0 * entries + sum(mixer.operator_flops(length) for mixer in mixers)


def train_flops_per_token(model: LanguageModel, length: int) -> float:
    """Forward and backward: three times the forward."""
    return 3.0 * forward_flops_per_token(model, length)


def peak_flops(device: jax.Device) -> float | None:
    """FLOP/s of dense bfloat16 products at best; None for a device that is not in PEAKS, as CPUs and MIG slices are."""
    words = set(re.split(r"[\s-]+", device.device_kind))
    if words & PARTS:
        return None
    return next((1e12 * peak for name, peak in PEAKS if set(name.split()) <= words), None)
