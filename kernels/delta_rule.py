"""The delta rule on a Hopper GPU: the forward of whole sequences, and the table of configs that says how to run it.

Forward is `invert` (every chunk by itself), then `walk` (a row's chunks in order). Where rows are too few to occupy the
GPU, the time is cut into parts that are walked at once: a part is an affine map of its state, S -> M S + Z, so a walk
that reads nothing gives (M, Z) of each part, a few small products the state before each, and the walk proper starts
there. The programs are in `delta_rule_mosaic.py` and `delta_rule_parts.py`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from efla_jax.kernels import delta_rule_mosaic as mosaic
from efla_jax.kernels import delta_rule_wide as wide
from efla_jax.kernels.delta_rule_parts import composed, part_starts, summarise
from efla_jax.kernels.delta_rule_reverse import never_zero
from efla_jax.kernels.mosaic import SHARED_MEMORY, narrow_indices, unsupported_keys, unsupported_values

KEY_DIMS = (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the forward runs.

    stages: chunks whose loads are in flight; fewer where shared memory or the sequence is too small.
    early: decay what the last chunk left while the new vectors are multiplied, rather than after.
    automatic_barriers: the compiler's meetings around every store to shared memory, which the programs do without.
    precision: 16-bit dtype of the inverse's products. float16 rounds to 11 bits, bfloat16 to 8. The inverse of a step
    that does not lengthen the state (erase |k|^2 <= 2) has entries of the order of 1, so that its range is no concern.
    For erase up to 1 and keys however parallel its error (1e-3) is that of rounding the result to bfloat16; for erase 2
    and cosine 0.99 it is 1e-2, where the bfloat16 of everything else costs the outputs 2e-2 already.
    walk, summary: microseconds that a chunk takes a program with one and with two compute warpgroups, each with 64
    columns of V; combine: those of the product that takes the state over a part. By these the layout is chosen. The
    defaults of walk are of a first version on an H200; those of summary and combine are estimates.
    multiprocessors: of the GPU, each of which holds one program at a time.
    """

    stages: int = 3
    early: bool = False
    automatic_barriers: bool = True
    precision: str = "float16"
    walk: tuple[float, float] = (2.4, 3.3)
    summary: tuple[float, float] = (1.7, 2.2)
    combine: float = 6.0
    multiprocessors: int = 132


# With K = 256, whose programs have one compute warpgroup. On an H200 a chunk took the walk 3.8 us, the summary 1.7.
WIDE = Config(stages=2, walk=(3.8, 3.8), summary=(1.7, 1.7), combine=20.0)
# By device kind, K, V and dtype. Where a row lacks, SAFE serves: right on every Hopper GPU, tuned on none.
# The first two rows: `benchmark --tune` on an H200 (experiments/results/kernels_h200/tune_*.json), 16 heads, 16 x 2048
# and 1 x 32768. With 64 channels an early decay took 0.89 and 0.93 of the forward's time and gave the same bits; with
# 128 nothing was 3 % faster. The others are not tuned.
TABLE: dict[tuple[str, int, int, str], Config] = {
    ("NVIDIA H200", 64, 64, "bfloat16"): Config(early=True),
    ("NVIDIA H200", 128, 128, "bfloat16"): Config(),
    ("NVIDIA H200", 256, 256, "bfloat16"): WIDE,
    ("NVIDIA H200", 256, 512, "bfloat16"): WIDE,
}
SAFE = Config(stages=2)


def config_for(device_kind: str, key_dim: int, value_dim: int, dtype) -> Config:
    """The table's row for these sizes on this device, or the safe one."""
    return TABLE.get((device_kind, key_dim, value_dim, jnp.dtype(dtype).name), SAFE)


def unsupported(key_dim: int, value_dim: int, dtype, step: str | None = None) -> str | None:
    """Why the kernels cannot serve these sizes, or None; step: of raw keys, or None."""
    if step is not None and key_dim > 128:
        return f"K = {key_dim} of raw keys: a key head has 64 or 128 channels"
    if step is not None and jnp.dtype(dtype).name == "float16":
        return "dtype float16: what is written per raw key may leave its range; use bfloat16"
    return unsupported_keys(key_dim, KEY_DIMS, dtype) or unsupported_values(value_dim)


def layout_of(config: Config, sizes: mosaic.Sizes, whole: bool = False) -> tuple[int, int]:
    """(compute warpgroups of a program, parts of the time) by which the walks are expected to end first.

    Two warpgroups share the loads and the scores of a row; one each makes twice the programs. Parts are walked at once,
    after a pass that summarises them, the last too if the whole is asked for; their number divides that of the
    chunks."""
    rows, value_dim, key_dim = sizes.batch * sizes.heads, sizes.value_dim, sizes.key_dim

    def waves(programs: int) -> int:
        return -(-programs // config.multiprocessors)

    def microseconds(groups: int, parts: int) -> float:
        walk = config.walk[groups - 1] * waves(rows * parts * value_dim // (64 * groups))
        if parts == 1 and not whole:
            return sizes.chunks * walk
        together = summary_groups(groups, sizes)
        programs = rows * (parts - 1 + whole) * (value_dim + key_dim) // (64 * together)
        summary = config.summary[together - 1] * waves(programs)
        return sizes.chunks // parts * (walk + summary) + parts * config.combine

    groups = [groups for groups in (1, 2 - sizes.wide) if value_dim % (64 * groups) == 0]
    parts = [parts for parts in range(1, 65) if sizes.chunks % parts == 0]
    return min(((g, p) for p in parts for g in groups), key=lambda layout: microseconds(*layout))


def summary_groups(groups: int, sizes: mosaic.Sizes) -> int:
    """Compute warpgroups of a program that summarises: its tiles are of V and of K."""
    return math.gcd(groups, sizes.key_dim // 64)


def plan_for(
    config: Config, sizes: mosaic.Sizes, *, documents: bool, save: bool, interpret: bool, whole: bool = False
) -> mosaic.Plan:
    """The layout of a walk of these sizes, with as many stages of the config as shared memory has room for."""
    groups, parts = layout_of(config, sizes, whole)
    for stages in range(config.stages, 0, -1):
        plan = mosaic.Plan(
            sizes, groups, stages, parts, config.early, config.automatic_barriers, documents, save, interpret,
            parts - 1 + whole,
        )  # fmt: skip
        if plan.shared_memory <= SHARED_MEMORY:
            break
    return plan


@narrow_indices()
def forward(
    q, k, u, erase, log_decay, documents, initial_state, *,
    config: Config, save: bool, step: str | None = None, keep=None, hand_over=None, interpret=None,
) -> tuple:  # fmt: skip
    """(o [B, T, H, V], final state [B, H, K, V] float32, saved or None); T a multiple of 64 and at least 64.

    q, k [B, T, G, K] and u [B, T, H, V] of one 16-bit dtype; erase, log_decay [B, H, T] float32, or fewer, each for
    several of the value heads that read one key head; documents [B, T] float32, how many documents began inside the
    chunk up to and including the token, or None; initial_state [B, H, K, V] float32. saved is what the backward needs:
    (I + A)^-1 [B, H, T, 64] and, per chunk, the gate vectors [B, H, N, 5, 64] float32 (for the heads of the gates) and
    the state at the start [B, H, N, V, K], 16-bit. interpret: Mosaic's parameters. step: None, or a name of
    `delta_flow.STEPS`: then k is raw, u is v, erase is beta, and saved has the |k|^2 [B, H, T] float32, too. With
    K = 256 it has what was written [B, T, H, V].
    keep: None, or for the heads of the gates [B, H, N] float32, what a chunk leaves of all that it has written.
    hand_over: None, or (initial state, Z, M) -> (the state this begins with, the final state) where this is a part of
    the time that takes a state S to M S + Z."""
    sizes = mosaic.Sizes.of(k, u, erase)
    plan = plan_for(
        config,
        sizes,
        documents=documents is not None,
        save=save,
        interpret=interpret is not None,
        whole=hand_over is not None,
    )
    inverse, gates, square = mosaic.invert(
        k,
        erase,
        log_decay,
        documents,
        precision=jnp.dtype(config.precision),
        step=step,
        automatic_barriers=config.automatic_barriers,
        interpret=interpret,
    )
    if keep is not None:
        gates = gates.at[:, :, :, mosaic.OUT].multiply(never_zero(keep)[..., None])
    starts, final = initial_state[None], None
    if plan.summarised > 0:
        together = dataclasses.replace(plan, groups=summary_groups(plan.groups, sizes))
        summaries = summarise(k, u, inverse, gates, plan=together, interpret=interpret)
        if hand_over is None:
            starts = part_starts(*summaries, initial_state)
        else:
            starts, final = starts_behind(*composed(*summaries), initial_state, hand_over)
    over_chunk = wide.walk_chunk if sizes.wide else mosaic.walk_chunk
    o, last, *states = mosaic.walk(
        q, k, u, inverse, gates, starts, plan=plan, over_chunk=over_chunk, interpret=interpret
    )
    saved = (inverse, gates, *states, *([] if step is None else [square])) if save else None
    return o, last[-1] if final is None else final, saved


def starts_behind(added: jax.Array, kept: jax.Array, initial_state: jax.Array, hand_over) -> tuple:
    """(states before each part, final state) where others have the time before this: Z and M up to the end of each."""
    before, final = hand_over(initial_state, added[-1], kept[-1])
    behind = jnp.einsum("pbhij,bhjv->pbhiv", kept[:-1], before, precision=lax.Precision.HIGHEST) + added[:-1]
    return jnp.concatenate([before[None], behind]), final
