"""The cases of `selfcheck`: operators, inputs, shapes and documents that it puts to the GPU kernels, and what it times.

Inputs are drawn with numpy from a fixed seed, so that a case is the same on every machine.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from efla_jax import ops


class Sizes(NamedTuple):
    """B, T, G, H, K, V."""

    batch: int
    time: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int


class Case(NamedTuple):
    """One input to both implementations: `inputs` is a name of INPUTS, `documents` one of DOCUMENTS or None. The op
    "delta_flow" is followed by its step; the fourth argument is its beta."""

    op: str
    inputs: str
    sizes: Sizes
    documents: str | None = None
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        s = self.sizes
        shape = f"B{s.batch} T{s.time} G{s.key_heads} H{s.heads} K{s.key_dim} V{s.value_dim}"
        return f"{self.op}, {self.inputs}{f', {self.documents}' if self.documents else ''}, {shape}, {self.dtype}"


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def draw(case: Case, seed: int = 0) -> tuple[tuple, tuple]:
    """((q, k, u, erase, log_decay, initial state), cotangents of o and of the final state) in the case's dtypes."""
    s, rng = case.sizes, np.random.default_rng(seed)
    keys, values = (s.batch, s.time, s.key_heads, s.key_dim), (s.batch, s.time, s.heads, s.value_dim)
    states = (s.batch, s.heads, s.key_dim, s.value_dim)
    q, k = unit(rng.normal(size=keys)), unit(rng.normal(size=keys))
    erase = 1 / (1 + np.exp(-rng.normal(size=values[:3])))
    decay = -np.log1p(np.exp(rng.normal(size=values[:3]) - 3))
    if case.inputs == "parallel keys":
        centre = unit(rng.normal(size=(s.batch, 1, s.key_heads, s.key_dim)))
        k = unit(math.sqrt(0.98) * centre + math.sqrt(0.02) * k)
        erase, decay = 1 / (1 + np.exp(-rng.normal(size=values[:3]) - 4)), decay * 0.02
    elif case.inputs == "zero keys":
        k = k * (rng.random((*keys[:3], 1)) < 0.7)
    elif case.inputs == "decay -1e4":
        decay = np.where(rng.random(values[:3]) < 0.05, -1e4, decay)
    elif case.inputs == "strong decay":
        decay = decay * 0 - 8.0
    elif case.inputs == "beta 1":
        erase, decay = erase * 0 + 1, decay * 0
    elif case.inputs == "erase up to 2":
        erase = 2 * erase
    if case.op.startswith("delta_flow"):  # raw keys
        k = k * 2 * np.exp(0.7 * rng.normal(size=(*keys[:3], 1)))
    narrow = [jnp.asarray(x, case.dtype) for x in (q, k, rng.normal(size=values))]
    wide = [jnp.asarray(x, jnp.float32) for x in (erase, decay, rng.normal(size=states) * s.key_dim**-0.5)]
    cotangents = jnp.asarray(rng.normal(size=values), case.dtype), jnp.asarray(rng.normal(size=states), jnp.float32)
    return (*narrow, *wide), cotangents


def segment_ids(case: Case, seed: int = 1) -> jax.Array | None:
    """Ids [B, T] of the case's documents: 0 is padding."""
    if case.documents is None:
        return None
    batch, length = case.sizes.batch, case.sizes.time
    rng, ids = np.random.default_rng(seed), np.ones((batch, length), np.int32)
    if case.documents == "documents":  # of one token, of a few, of more than a chunk; one begins where a chunk does
        for row in range(batch):
            lengths = rng.choice([1, 2, 5, 31, 64, 90], length)
            ids[row] = np.repeat(np.arange(1, length + 1), lengths)[:length]
        ids[0, 64:] += length
    elif case.documents == "padding":  # in front, inside and behind
        ids[:, : length // 8] = 0
        ids[:, length - length // 5 :] = 0
        ids[rng.random(ids.shape) < 0.2] = 0
    return jnp.asarray(ids)


AWKWARD = ("random", "parallel keys", "zero keys", "decay -1e4", "strong decay", "beta 1", "erase up to 2")
ODD = Sizes(2, 197, 2, 4, 128, 128)  # cases of one shape share what was compiled for it


def cases() -> list[Case]:
    """Everything, shapes that share programs next to each other."""
    both, found = ("delta_rule", "linear_attention"), []
    for op in both:
        found += [Case(op, inputs, ODD) for inputs in AWKWARD if op == "delta_rule" or inputs in AWKWARD[:5]]
        found += [Case(op, "random", ODD, "documents"), Case(op, "random", ODD, "padding")]
        found += [Case(op, "parallel keys", ODD, "documents"), Case(op, "decay -1e4", ODD, "documents")]
        found += [Case(op, "random", Sizes(1, 40, 1, 2, 64, 128)), Case(op, "random", Sizes(3, 64, 3, 3, 64, 64))]
        found += [Case(op, "random", Sizes(2, 130, 1, 4, 128, 64), "documents")]
        found += [Case(op, "random", Sizes(1, 100, 1, 1, 256, 256))]
        found += [Case(op, "parallel keys", ODD, dtype="float16")]
        # Few rows and much time, which the kernels cut into parts; documents end inside some and span others.
        found += [Case(op, "random", Sizes(1, 4096, 1, 2, 128, 128)), Case(op, "random", ODD._replace(time=1))]
    found += [Case("delta_rule", "parallel keys", Sizes(1, 4096, 1, 2, 128, 128), "documents")]
    found += [Case("linear_attention", "random", Sizes(2, 4096, 1, 32, 128, 64))]
    found += [
        Case("delta_flow exact", inputs, ODD) for inputs in ("random", "parallel keys", "zero keys", "decay -1e4")
    ]
    found += [Case(f"delta_flow {step}", "random", ODD, "documents") for step in ("exact", "gated_exact", "unit")]
    found += [
        Case("delta_flow exact", "random", sizes)
        for sizes in (ODD._replace(key_dim=64), Sizes(1, 4096, 1, 2, 128, 128))
    ]
    return found + [Case("linear_attention", "random", Sizes(4, 1, 1, 32, 128, 64))]


def tiny_cases() -> list[Case]:
    """What Mosaic's interpreter computes in a minute."""
    small = Sizes(1, 130, 1, 2, 64, 64)
    found = [Case(op, "random", small, "documents") for op in ("delta_rule", "linear_attention")]
    found += [Case("delta_rule", "parallel keys", small)]
    return [*found, Case("delta_rule", "random", Sizes(2, 1, 1, 2, 16, 128))]


# What --times measures: (op, B, T, G, H, K, V), bfloat16.
TIMED = (
    ("delta_rule", Sizes(16, 2048, 16, 16, 128, 128)),
    ("delta_rule", Sizes(4, 8192, 16, 16, 128, 128)),
    ("delta_rule", Sizes(1, 32768, 16, 16, 128, 128)),
    ("delta_rule", Sizes(1, 131072, 16, 16, 128, 128)),
    ("delta_flow exact", Sizes(16, 2048, 16, 16, 128, 128)),
    ("delta_flow exact", Sizes(1, 32768, 16, 16, 128, 128)),
    ("linear_attention", Sizes(16, 2048, 1, 32, 128, 64)),
    ("linear_attention", Sizes(1, 32768, 1, 32, 128, 64)),
)


def timed_inputs(sizes: Sizes) -> tuple[tuple, jax.Array]:
    """Arguments made on the device, bfloat16 and float32, and fixed weights of a loss."""
    s, keys = sizes, iter(jax.random.split(jax.random.key(0), 7))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)  # noqa: E731
    q, k = (ops.l2_normalize(normal(s.batch, s.time, s.key_heads, s.key_dim)) for _ in range(2))
    u, weights = (normal(s.batch, s.time, s.heads, s.value_dim) for _ in range(2))
    gates = [jax.random.normal(next(keys), u.shape[:3]) for _ in range(2)]
    state = jnp.zeros((s.batch, s.heads, s.key_dim, s.value_dim), jnp.float32)
    return (q, k, u, jax.nn.sigmoid(gates[0]), -jax.nn.softplus(gates[1] - 3), state), weights
