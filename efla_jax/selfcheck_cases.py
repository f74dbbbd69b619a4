"""What the modules of cases of `efla_jax.selfcheck` share: how inputs are drawn, what an error is and which passes.

Inputs are drawn with numpy from a fixed seed, so that a case is the same on every machine.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from efla_jax import ops

# Times the error of "chunked". The kernels invert a chunk's triangle with products of float16, "chunked" in float32:
# nothing beside the rounding of all else to bfloat16, but as much as that to float16 where keys are nearly parallel.
# The aim for bfloat16 is 1.2. On an H200 dq of nearly parallel keys read 1.19 to 1.31 and dlog_decay up to 1.22, all
# else less: the backward begins from states rounded to 16 bits. In float16 dlog_decay of nearly parallel keys read 3.2
# (1.7e-3, of which the inverse has 1e-3: `kernels/delta_rule.py`), all else up to 2. A wrong kernel is off by far more.
BAR = {"bfloat16": 1.4, "float16": 3.5}
# Relative RMS of rounding normal numbers once, 1.66e-3 in bfloat16 and an eighth of it in float16, and a tenth more for
# samples of a few. An error within it is no worse than the best 16-bit output, however good "chunked" happened to be.
FLOOR = {"bfloat16": 1.8e-3, "float16": 2.3e-4}


class Timed(NamedTuple):
    """What `--times` measures: program(implementation) of the arguments, for each of the implementations."""

    name: str
    implementations: tuple[str, ...]
    program: Callable[[str], Callable]
    arguments: tuple


@runtime_checkable
class Operators(Protocol):
    """What a module of cases has: its operators' cases, how they run, and what their errors may be. Arguments are any
    pytree; outputs, gradients and errors go by their names."""

    def cases(self) -> Sequence[Any]:
        """Those for a GPU, shapes that share programs next to each other. Each has a name of its own."""

    def tiny_cases(self) -> Sequence[Any]:
        """What Mosaic's interpreter computes in seconds each."""

    def arguments_of(self, case: Any) -> Any: ...

    def run(self, case: Any, implementation: str, arguments: Any, interpret: Any = None) -> dict[str, jax.Array]:
        """interpret: what Mosaic's interpreter needs, instead of a GPU, for "pallas"."""

    def truth_of(self, case: Any, arguments: Any) -> dict[str, jax.Array]:
        """The reference, in float32."""

    def beside(self, case: Any, arguments: Any, truth: dict[str, jax.Array]) -> dict[str, float]:
        """Errors of the same algorithm in XLA."""

    def bar(self, case: Any, name: str, beside: float) -> float:
        """The largest error of the kernel that passes where that of XLA is `beside`."""

    def timed(self) -> Iterator[Timed]: ...


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


def relative_rms(value, reference) -> float:
    """RMS(difference) / RMS(reference), infinite where something is not a number; a reference near zero counts as
    1e-3."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    if not np.isfinite(value).all():
        return math.inf
    return float(np.sqrt(np.mean((value - reference) ** 2)) / max(np.sqrt(np.mean(reference**2)), 1e-3))


def errors_of(found: dict[str, jax.Array], truth: dict[str, jax.Array]) -> dict[str, float]:
    """Errors by name of what there is a reference for, outputs before gradients."""
    names = sorted(truth, key=lambda name: name.startswith("d"))
    return {name: relative_rms(found[name], truth[name]) for name in names}


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


def copied(sizes: Sizes, *keys: jax.Array) -> list[jax.Array]:
    """q or k [B, T, G, K] with a copy of its key head for every value head."""
    return [jnp.repeat(x, sizes.heads // sizes.key_heads, axis=2) for x in keys]


def summed(sizes: Sizes, gradient: jax.Array, dtype) -> jax.Array:
    """The gradient of a key head, of those of its copies, rounded to the dtype."""
    shape = (sizes.batch, sizes.time, sizes.key_heads, -1, sizes.key_dim)
    return jnp.sum(gradient.astype(jnp.float32).reshape(shape), 3).astype(dtype)


def timed_inputs(sizes: Sizes) -> tuple[tuple, jax.Array]:
    """Arguments made on the device, bfloat16 and float32, and fixed weights of a loss."""
    s, keys = sizes, iter(jax.random.split(jax.random.key(0), 7))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)  # noqa: E731
    q, k = (ops.l2_normalize(normal(s.batch, s.time, s.key_heads, s.key_dim)) for _ in range(2))
    u, weights = (normal(s.batch, s.time, s.heads, s.value_dim) for _ in range(2))
    gates = [jax.random.normal(next(keys), u.shape[:3]) for _ in range(2)]
    state = jnp.zeros((s.batch, s.heads, s.key_dim, s.value_dim), jnp.float32)
    return (q, k, u, jax.nn.sigmoid(gates[0]), -jax.nn.softplus(gates[1] - 3), state), weights
