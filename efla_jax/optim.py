"""AdamW: a schedule that starts above zero and ends on its floor, decay by parameter name, bad steps skipped."""

import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

DECAYED_NAMES = frozenset(("kernel", "embedding"))
# A short convolution's taps and position tables are kernels and embeddings by name only.
EXEMPT = re.compile(r"(^|_)(conv|pos|position|positions)(_|\d|$)")
SCHEDULES = ("cosine", "constant")
DECAYS = ("matrices", "all")


class OptimizerState(NamedTuple):
    """State of `make_optimizer`: int32 counters, the last gradient norm (before clipping) and the AdamW moments.

    count: optimiser steps so far, skipped ones included; skipped: steps whose gradient was not finite;
    skipped_in_a_row: those since the last good step, for the caller to stop on.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as optax's own states do
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    grad_norm: jax.Array
    inner: optax.OptState


def make_schedule(
    *, learning_rate: float, total_steps: int, warmup_steps: int = 0, final_ratio: float = 0.1, schedule: str = "cosine"
) -> optax.Schedule:
    """Learning rate of the update with index `count` = 0 ... N - 1 (N = total_steps, W = warmup_steps, t = count + 1).

        t <= W                    peak t / W
        t > W, "cosine"           floor + (peak - floor) (1 + cos(pi (t - W) / (N - W))) / 2,   floor = final_ratio peak
        t > W, "constant"         peak

    So the first update has a positive rate, update W - 1 the peak, and the last one, N - 1, the floor, which later ones
    keep. It counts optimiser steps, not micro-batches. Raises ValueError for values that leave this picture.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} must be one of {', '.join(SCHEDULES)}")
    if not learning_rate > 0:
        raise ValueError(f"learning_rate={learning_rate} must be > 0")
    if not 0 <= final_ratio <= 1:
        raise ValueError(f"final_ratio={final_ratio} must lie between 0 and 1; it is floor / learning_rate")
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be >= 1")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must be >= 0 and below total_steps={total_steps}; "
                         "warm up less or train longer")

    def rate(count: chex.Numeric) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1
        decayed = jnp.ones(())
        if schedule == "cosine":
            progress = jnp.clip((step - warmup_steps) / (total_steps - warmup_steps), 0, 1)
            decayed = final_ratio + (1 - final_ratio) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        warm = jnp.minimum(step / warmup_steps, 1) if warmup_steps else 1.0
        # The cosine is at its peak until the warm-up ends, so the product is either one or the other.
        return jnp.asarray(learning_rate * warm * decayed, jnp.float32)

    return rate


def make_optimizer(
    *,
    learning_rate: float,
    total_steps: int,
    warmup_steps: int = 0,
    final_ratio: float = 0.1,
    schedule: str = "cosine",
    weight_decay: float = 0.1,
    decay: str = "matrices",
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    clip_norm: float = 1.0,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW and its schedule: `schedule(count)` is the rate applied by the update with that index (see make_schedule).

        g <- g min(1, clip_norm / |g|);   p <- p - rate (m_hat / (sqrt(v_hat) + eps) + weight_decay p [p decays])

    |g| is the global norm; clip_norm = 0 leaves it. Only matrices decay (`decay_mask`), or everything with decay="all".
    If |g| is not finite the update is zero, the moments stay as they are and the state counts a skipped step; the
    schedule goes on. Nothing stops the run here: the caller reads `skipped_in_a_row`.

    Raises ValueError for values out of range. Source: Loshchilov and Hutter, arXiv 1711.05101.
    """
    rate = make_schedule(learning_rate=learning_rate, total_steps=total_steps, warmup_steps=warmup_steps,
                         final_ratio=final_ratio, schedule=schedule)
    for name, value in (("weight_decay", weight_decay), ("clip_norm", clip_norm)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name}={value} must be finite and >= 0; 0 turns it off")
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be >= 0 and < 1")
    if not eps > 0:
        raise ValueError(f"eps={eps} must be > 0: a zero gradient would divide by zero")
    if decay not in DECAYS:
        raise ValueError(f"decay={decay!r} must be one of {', '.join(DECAYS)}")
    inner = optax.chain(
        optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
        optax.scale_by_adam(beta1, beta2, eps),
        optax.add_decayed_weights(weight_decay, decay_mask if decay == "matrices" else None),
    )
    return _skip_bad_steps(inner, rate), rate


def _skip_bad_steps(inner: optax.GradientTransformation, rate: optax.Schedule) -> optax.GradientTransformation:
    # optax.apply_if_finite lets the bad update through after some failures, and looks at leaves, not at the norm, whose
    # overflow turns clipping into a division by infinity.
    def init(params: optax.Params) -> OptimizerState:
        def zero():  # separate buffers: a donated state must not hold one twice
            return jnp.zeros((), jnp.int32)

        return OptimizerState(zero(), zero(), zero(), jnp.zeros((), jnp.float32), inner.init(params))

    def update(updates, state: OptimizerState, params: optax.Params | None = None):
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), updates))
        good = jnp.isfinite(norm)
        steps, moved = inner.update(updates, state.inner, params)
        scale = -rate(state.count)
        steps = jax.tree.map(lambda u: jnp.where(good, scale * u, 0).astype(u.dtype), steps)
        kept = jax.tree.map(lambda new, old: jnp.where(good, new, old), moved, state.inner)
        bad = jnp.logical_not(good).astype(jnp.int32)
        in_a_row = bad * (state.skipped_in_a_row + 1)
        return steps, OptimizerState(state.count + 1, state.skipped + bad, in_a_row, norm, kept)

    return optax.GradientTransformation(init, update)


def _decays(path: str) -> bool:
    parts = path.split("/")
    return parts[-1] in DECAYED_NAMES and not any(EXEMPT.search(part) for part in parts)


def _path(keys: tuple) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def decay_mask(params: optax.Params) -> optax.Params:
    """Tree of bools: True where weight decay applies.

    By name, never by rank, for under nn.scan a bias has two axes: leaves called kernel or embedding decay, except below
    a conv or position module. Scales, biases, A_log, dt_bias, D and every other name do not.
    """
    return jax.tree_util.tree_map_with_path(lambda keys, _: _decays(_path(keys)), params)


def decay_table(params: optax.Params, decay: str = "matrices") -> str:
    """One line per parameter, path, shape and whether it decays, for the log at the start of a run."""
    rows = [(_path(keys), str(tuple(leaf.shape))) for keys, leaf in jax.tree_util.tree_leaves_with_path(params)]
    wide, long = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    lines = []
    for path, shape in rows:
        verdict = "decay" if decay == "all" or _decays(path) else "no decay"
        lines.append(f"{path:<{wide}}  {shape:<{long}}  {verdict}")
    return "\n".join(lines)
