"""The delta rule on a Hopper GPU: the forward of whole sequences, and the table of configs that says how to run it.

Forward is `invert` (every chunk by itself), then `walk` (a row's chunks in order). Where rows are too few to occupy the
GPU, the time is cut into parts that are walked at once: a part is an affine map of its state, S -> M S + Z, so a walk
that reads nothing gives (M, Z) of each part, a few small products the state before each, and the walk proper starts
there. The programs are in `delta_rule_mosaic.py`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.kernels import delta_rule_mosaic as mosaic

KEY_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")
SHARED_MEMORY = 227 * 1024  # bytes that a program may use on a Hopper GPU


@dataclasses.dataclass(frozen=True)
class Config:
    """How the forward runs.

    groups: compute warpgroups of a walk, each with 64 columns of V; fewer where V is no multiple of 64 groups.
    stages: chunks whose loads are in flight; fewer where shared memory or the sequence is too small.
    precision: 16-bit dtype of the inverse's products. float16 rounds to 11 bits, bfloat16 to 8. The inverse of a step
    that does not lengthen the state (erase |k|^2 <= 2) has entries of the order of 1, so that the range of float16 is
    no concern, and bfloat16 would only be less exact.
    programs: the time is cut while fewer walks than this would run; 1 never cuts.
    least: chunks that a part has at least.
    """

    groups: int = 2
    stages: int = 3
    precision: str = "float16"
    programs: int = 132  # multiprocessors of an H100 or H200, each of which holds one program
    least: int = 16


# By device kind, K, V and dtype. Where a row lacks, SAFE serves: right on every Hopper GPU, tuned on none.
TABLE: dict[tuple[str, int, int, str], Config] = {
    ("NVIDIA H200", 64, 64, "bfloat16"): Config(groups=1),
    ("NVIDIA H200", 128, 128, "bfloat16"): Config(),
    ("NVIDIA H200", 256, 256, "bfloat16"): Config(groups=1, stages=2),
}
SAFE = Config(groups=1, stages=2)


def config_for(device_kind: str, key_dim: int, value_dim: int, dtype) -> Config:
    """The table's row for these sizes on this device, or the safe one."""
    return TABLE.get((device_kind, key_dim, value_dim, jnp.dtype(dtype).name), SAFE)


def unsupported(key_dim: int, value_dim: int, dtype) -> str | None:
    """Why the kernels cannot serve these sizes, or None."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"dtype {jnp.dtype(dtype).name}: the tensor cores' transposed operands are 16-bit ({', '.join(DTYPES)})"
    if key_dim not in KEY_DIMS:
        return f"K = {key_dim}: a key head has {', '.join(map(str, KEY_DIMS))} channels"
    if value_dim < 64 or value_dim % 64:
        return f"V = {value_dim}: a warpgroup has 64 channels of the values, so V is a multiple of 64"
    return None


def parts_of(config: Config, rows: int, chunks: int) -> int:
    """Into how many equal parts the time is cut, with `rows` programs per part: as many as are wanted, while each keeps
    `least` chunks and the number divides that of the chunks."""
    wanted = min(config.programs // max(rows, 1), chunks // config.least)
    return max((parts for parts in range(1, wanted + 1) if chunks % parts == 0), default=1)


def plan_for(config: Config, sizes: mosaic.Sizes, *, documents: bool, save: bool, interpret: bool) -> mosaic.Plan:
    """The layout of a walk of these sizes: the config's, as far as V, shared memory and the number of rows allow."""
    groups = config.groups
    while sizes.value_dim % (64 * groups):
        groups -= 1
    parts = parts_of(config, sizes.batch * sizes.heads * sizes.value_dim // (64 * groups), sizes.chunks)
    for stages in range(config.stages, 1, -1):
        plan = mosaic.Plan(sizes, groups, stages, parts, documents, save, interpret)
        if plan.shared_memory <= SHARED_MEMORY:
            return plan
    return dataclasses.replace(plan, stages=1)


def forward(
    q, k, u, erase, log_decay, documents, initial_state, *, config: Config, save: bool, interpret=None
) -> tuple:
    """(o [B, T, H, V], final state [B, H, V, K] float32, saved or None); T a multiple of 64 and at least 64.

    q, k [B, T, G, K] and u [B, T, H, V] of one 16-bit dtype; erase, log_decay [B, H, T] float32; documents [B, T]
    float32, how many documents began inside the chunk up to and including the token, or None; initial_state
    [B, H, V, K] float32. saved is what the backward needs: (I + A)^-1 [B, H, T, 64] and, per chunk, the gate vectors
    [B, H, N, 5, 64] float32 and the state at the start [B, H, N, V, K], 16-bit. interpret: Mosaic's parameters."""
    sizes = mosaic.Sizes.of(k, u)
    plan = plan_for(config, sizes, documents=documents is not None, save=save, interpret=interpret is not None)
    precision = jnp.dtype(config.precision)
    inverse, gates = mosaic.invert(
        k, erase, log_decay, documents, sizes.heads, precision=precision, interpret=interpret
    )
    starts = initial_state[:, :, None]
    if plan.parts > 1:
        whole = dataclasses.replace(plan, groups=math.gcd(plan.groups, sizes.key_dim // 64))  # tiles of K, too
        starts = part_starts(mosaic.summarise(k, u, inverse, gates, plan=whole, interpret=interpret), starts)
    o, last, states = mosaic.walk(q, k, u, inverse, gates, starts, plan=plan, interpret=interpret)
    return o, last[:, :, -1], (inverse, gates, states) if save else None


def part_starts(summary: jax.Array, initial: jax.Array) -> jax.Array:
    """States before each part [B, H, parts, V, K] from the summaries [B, H, parts - 1, V + K, K] of all but the last
    (Z^T, then M^T) and the state before the first [B, H, 1, V, K]."""
    value_dim = initial.shape[-2]
    starts = [initial[:, :, 0]]
    for part in range(summary.shape[2]):
        added, kept = summary[:, :, part, :value_dim], summary[:, :, part, value_dim:]
        starts.append(jnp.einsum("bhvi,bhik->bhvk", starts[-1], kept, precision=lax.Precision.HIGHEST) + added)
    return jnp.stack(starts, axis=2)
