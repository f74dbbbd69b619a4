"""AdamW and Muon: a schedule that starts above zero and ends on its floor, decay by parameter name, bad steps skipped,
an average of the parameters."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from efla_jax.sharding import path_of

DECAYED_NAMES = frozenset(("kernel", "embedding"))
# A short convolution's taps and position tables are kernels and embeddings by name only.
EXEMPT = re.compile(r"(^|_)(conv|pos|position|positions)(_|\d|$)")
# Kernels that are not hidden matrices: first and last layers, and gates, whose outputs are numbers per head.
OUTER = frozenset(("embed", "front", "position", "lm_head", "head"))
GATES = frozenset(("a_proj", "b_proj", "dt_proj", "level_weights", "mix_proj", "router"))
SCHEDULES = ("cosine", "constant", "wsd")
ALGORITHMS = ("adamw", "muon")
DECAYS = ("matrices", "all")
MUON_RMS = 0.2  # root mean square of an AdamW update, about; Liu et al. section 2.2
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: singular values end between 0.7 and 1.2, soon


class OptimizerState(NamedTuple):
    """State of `make_optimizer`: int32 counters, the last gradient norm (before clipping), moments and average.

    count: optimiser steps so far, skipped ones included; skipped: steps whose gradient was not finite;
    skipped_in_a_row: those since the last good step, for the caller to stop on; ema: averaged parameters in the tree of
    the parameters, () when off.
    """

    count: jax.Array  # type: ignore[assignment]  # hides tuple.count, as optax's own states do
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    grad_norm: jax.Array
    inner: optax.OptState
    ema: optax.Params = ()


def make_schedule(
    *,
    learning_rate: float,
    total_steps: int,
    warmup_steps: int = 0,
    final_ratio: float = 0.1,
    schedule: str = "cosine",
    decay_steps: int = 0,
) -> optax.Schedule:
    """Learning rate of the update with index `count` = 0 ... N - 1 (N = total_steps, W = warmup_steps, t = count + 1).

        t <= W                    peak t / W
        t > W, "cosine"           floor + (peak - floor) (1 + cos(pi (t - W) / (N - W))) / 2,   floor = final_ratio peak
        t > W, "constant"         peak
        t > W, "wsd"              floor + (peak - floor) min(1, (N - t) / decay_steps)

    So the first update has a positive rate, update W - 1 the peak, and the last one, N - 1, the floor, which later ones
    keep; "wsd" (warm-up, stable, decay) holds the peak until decay_steps updates are left. It counts optimiser steps,
    not micro-batches. Raises ValueError for values that leave this picture.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} must be one of {', '.join(SCHEDULES)}")
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"learning_rate={learning_rate} must be > 0 and finite")
    if not 0 <= final_ratio <= 1:
        raise ValueError(f"final_ratio={final_ratio} must lie between 0 and 1; it is floor / learning_rate")
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be >= 1")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must be >= 0 and below total_steps={total_steps}; "
                         "warm up less or train longer")
    if schedule == "wsd" and not 1 <= decay_steps <= total_steps - warmup_steps:
        raise ValueError(f"decay_steps={decay_steps} must be >= 1 and at most total_steps - warmup_steps = "
                         f"{total_steps - warmup_steps}; decay over the last tenth, say")
    if schedule != "wsd" and decay_steps:
        raise ValueError(f"decay_steps={decay_steps} belongs to schedule='wsd'; set it to 0 with {schedule!r}")

    def rate(count: chex.Numeric) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1
        left = jnp.ones(())
        if schedule == "cosine":
            progress = jnp.clip((step - warmup_steps) / (total_steps - warmup_steps), 0, 1)
            left = 0.5 * (1 + jnp.cos(jnp.pi * progress))
        if schedule == "wsd":
            left = jnp.clip((total_steps - step) / decay_steps, 0, 1)
        warm = jnp.minimum(step / warmup_steps, 1) if warmup_steps else 1.0
        # What decays is at its peak until the warm-up ends, so the product is either one or the other.
        return jnp.asarray(learning_rate * warm * (final_ratio + (1 - final_ratio) * left), jnp.float32)

    return rate


def make_optimizer(
    *,
    learning_rate: float,
    total_steps: int,
    warmup_steps: int = 0,
    final_ratio: float = 0.1,
    schedule: str = "cosine",
    decay_steps: int = 0,
    algorithm: str = "adamw",
    adam_learning_rate: float = 0.0,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    decay: str = "matrices",
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    clip_norm: float = 1.0,
    ema_decay: float = 0.0,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimiser and its schedule: `schedule(count)` is the rate applied by the update with that index.

        g <- g min(1, clip_norm / |g|);   p <- p - rate (direction(g) + weight_decay p [p decays])
        "adamw"   direction = m_hat / (sqrt(v_hat) + eps)
        "muon"    direction = 0.2 sqrt(max(in, out)) U V^T,   U S V^T = Nesterov momentum of g, for hidden matrices
                  (see `algorithms`), each layer's its own; AdamW for the others, their rate times
                  adam_learning_rate / learning_rate (0: the same rate)
        ema <- d ema + (1 - d) p,   d = min(ema_decay, (1 + n) / (10 + n)),   n good steps before; ema_decay = 0: none

    |g| is the global norm; clip_norm = 0 leaves it. Only matrices decay (`decay_mask`), or everything with decay="all".
    Muon's factor gives its updates the size of AdamW's, so that rates and decay of an AdamW recipe hold. Parameters,
    moments and average are float32, whatever the gradient's dtype. If |g| is not finite the update is zero, moments and
    average stay and the state counts a skipped step; the schedule goes on. Nothing stops the run here: the caller reads
    `skipped_in_a_row`.

    Raises ValueError for values out of range, and at `init` for a parameter that is not float32. Sources: Loshchilov
    and Hutter, arXiv 1711.05101; Jordan, kellerjordan.github.io/posts/muon; Liu et al., arXiv 2502.16982.
    """
    rate = make_schedule(learning_rate=learning_rate, total_steps=total_steps, warmup_steps=warmup_steps,
                         final_ratio=final_ratio, schedule=schedule, decay_steps=decay_steps)
    _check({"weight_decay": weight_decay, "clip_norm": clip_norm, "adam_learning_rate": adam_learning_rate},
           {"beta1": beta1, "beta2": beta2, "momentum": momentum, "ema_decay": ema_decay}, eps)
    for name, value, known in (("decay", decay, DECAYS), ("algorithm", algorithm, ALGORITHMS)):
        if value not in known:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}")
    if algorithm == "adamw" and adam_learning_rate:
        raise ValueError(f"adam_learning_rate={adam_learning_rate} belongs to algorithm='muon'; set learning_rate")
    shrink = optax.add_decayed_weights(weight_decay, decay_mask if decay == "matrices" else None)
    steps = [optax.scale_by_adam(beta1, beta2, eps), shrink]
    if algorithm == "muon":
        adamw = optax.chain(*steps, optax.scale((adam_learning_rate or learning_rate) / learning_rate))
        steps = [optax.partition({"muon": optax.chain(_muon(momentum), shrink), "adamw": adamw}, algorithms)]
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    return _skip_bad_steps(optax.chain(clip, *steps), rate, ema_decay), rate


def _check(sizes: dict[str, float], fractions: dict[str, float], eps: float) -> None:
    for name, value in sizes.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value} must be finite and >= 0; 0 turns it off")
    for name, value in fractions.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be >= 0 and < 1")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps={eps} must be > 0 and finite: a zero gradient would divide by zero")


def _muon(momentum: float) -> optax.GradientTransformation:
    """Orthogonal direction of the momentum of each matrix [..., in, out], of the size of an AdamW update."""
    axes = optax.contrib.MuonDimensionNumbers(-2, -1)  # the axes before these are layers, each its own matrix

    def dimensions(tree):
        return jax.tree.map(lambda _: axes, tree)

    inner = optax.contrib.scale_by_muon(NEWTON_SCHULZ, beta=momentum, weight_dimension_numbers=dimensions)

    # optax keeps the polynomial in its state; ours holds what changes, one leaf per parameter.
    def init(params):
        return inner.init(params)._replace(ns_coeffs=())

    def update(gradients, state, params=None):
        coefficients = jnp.asarray(NEWTON_SCHULZ, jnp.float32)
        updates, state = inner.update(gradients, state._replace(ns_coeffs=coefficients), params)
        updates = jax.tree.map(lambda u: MUON_RMS * max(u.shape[-2:]) ** 0.5 * u, updates)
        return updates, state._replace(ns_coeffs=())

    return optax.GradientTransformation(init, update)


def _skip_bad_steps(
    inner: optax.GradientTransformation, rate: Callable, ema_decay: float
) -> optax.GradientTransformation:
    # optax.apply_if_finite lets the bad update through after some failures, and looks at leaves, not at the norm, whose
    # overflow turns clipping into a division by infinity.
    def init(params: optax.Params) -> OptimizerState:
        def zero():  # separate buffers: a donated state must not hold one twice
            return jnp.zeros((), jnp.int32)

        for name, leaf in zip(leaf_names(params), jax.tree.leaves(params), strict=True):
            if leaf.dtype != jnp.float32:
                raise ValueError(f"params: {name} is {leaf.dtype}; what is optimised is float32, for updates vanish in "
                                 "fewer bits. Cast it, and let the model's dtype choose that of the products")
        ema = jax.tree.map(lambda p: jnp.array(p, copy=True), params) if ema_decay else ()
        return OptimizerState(zero(), zero(), zero(), jnp.zeros((), jnp.float32), inner.init(params), ema)

    def update(updates, state: OptimizerState, params: optax.Params | None = None):
        updates = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        norm = jnp.sqrt(sum(_squares(updates)))
        good = jnp.isfinite(norm)

        def keep(moved, before):
            return jax.tree.map(lambda a, b: jnp.where(good, a, b), moved, before)

        steps, moved = inner.update(updates, state.inner, params)
        scale = -rate(state.count)
        steps = jax.tree.map(lambda u: jnp.where(good, scale * u, 0), steps)
        ema = state.ema
        if ema_decay:
            n = (state.count - state.skipped).astype(jnp.float32)
            blend = 1 - jnp.minimum(ema_decay, (1 + n) / (10 + n))
            ema = keep(jax.tree.map(lambda e, p, u: e + blend * (p + u - e), ema, params, steps), ema)
        bad = jnp.logical_not(good).astype(jnp.int32)
        in_a_row = bad * (state.skipped_in_a_row + 1)
        kept = keep(moved, state.inner)
        return steps, OptimizerState(state.count + 1, state.skipped + bad, in_a_row, norm, kept, ema)

    return optax.GradientTransformation(init, update)


def evaluation_params(params: optax.Params, opt_state: OptimizerState) -> optax.Params:
    """The parameters to score and to use: their average if the optimiser keeps one, else themselves."""
    return params if isinstance(opt_state.ema, tuple) else opt_state.ema


def _squares(tree: optax.Updates) -> list[jax.Array]:
    # The one pass over a gradient: within a jitted step XLA computes these sums once, whoever asks for them.
    return [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]


def leaf_names(tree: optax.Params) -> list[str]:
    """Path of each leaf, in the order of `first_bad`."""
    return [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]


def first_bad(gradients: optax.Updates) -> jax.Array:
    """Index, int32, of the first leaf that makes the gradient's norm infinite or NaN; -1 if the norm is finite.

    Traced: the host names it by `leaf_names`. Costs nothing beside the norm of the same gradient in the same step.
    """
    squares = jnp.stack(_squares(gradients))
    bad = jnp.logical_not(jnp.isfinite(squares))
    # Only their sum may overflow: then it is the largest.
    worst = jnp.where(jnp.any(bad), jnp.argmax(bad), jnp.argmax(squares))
    return jnp.where(jnp.isfinite(jnp.sum(squares)), -1, worst).astype(jnp.int32)


def group_norms(gradients: optax.Updates) -> dict[str, jax.Array]:
    """Norm of the gradient per group of parameters that is present: embed, head, mixer, mlp, norm, other.

    Their squares add up to that of the global norm. Costs nothing beside it, as `first_bad`.
    """
    total: dict[str, jax.Array] = {}
    for path, square in zip(leaf_names(gradients), _squares(gradients), strict=True):
        name = _group(path)
        total[name] = total[name] + square if name in total else square
    return {name: jnp.sqrt(square) for name, square in total.items()}


def _group(path: str) -> str:
    parts = path.split("/")
    if any(part == "norm" or part.endswith("_norm") for part in parts):
        return "norm"
    for part in parts:
        if part in OUTER:
            return "head" if part.endswith("head") else "embed"
        if part == "mlp" or re.fullmatch(r"mixer(_\d+)?", part):
            return part.split("_")[0]
    return "other"


def _decays(path: str) -> bool:
    parts = path.split("/")
    return parts[-1] in DECAYED_NAMES and not any(EXEMPT.search(part) for part in parts)


def _hidden_matrix(path: str, leaf) -> bool:
    parts = path.split("/")
    outside = any(part in OUTER or part in GATES or EXEMPT.search(part) for part in parts)
    return parts[-1] == "kernel" and leaf.ndim >= 2 and not outside


def algorithms(params: optax.Params) -> optax.Params:
    """Tree of "muon" and "adamw": what moves each parameter when the algorithm is Muon.

    Muon takes kernels of hidden layers, as its authors do. AdamW keeps embeddings and heads, whose rows are tokens and
    not directions; short convolutions, norms, biases and vectors, which are no matrices; and gates, level weights among
    them: an orthogonal update would move the gates of all heads by the same amount, however small their gradients.
    """
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: "muon" if _hidden_matrix(path_of(keys), leaf) else "adamw", params
    )


def decay_mask(params: optax.Params) -> optax.Params:
    """Tree of bools: True where weight decay applies.

    By name, never by rank, for under nn.scan a bias has two axes: leaves called kernel or embedding decay, except below
    a conv or position module. Scales, biases, A_log, dt_bias, D and every other name do not.
    """
    return jax.tree_util.tree_map_with_path(lambda keys, _: _decays(path_of(keys)), params)


def decay_table(params: optax.Params, decay: str = "matrices", algorithm: str = "adamw") -> str:
    """One line per parameter, path, shape, what moves it and whether it decays, for the log at the start of a run."""
    movers = jax.tree.leaves(algorithms(params)) if algorithm == "muon" else ["adamw"] * len(jax.tree.leaves(params))
    shapes = [str(tuple(leaf.shape)) for leaf in jax.tree.leaves(params)]
    names = leaf_names(params)
    wide, long = (max(map(len, column), default=0) for column in (names, shapes))
    lines = []
    for path, shape, mover in zip(names, shapes, movers, strict=True):
        verdict = "decay" if decay == "all" or _decays(path) else "no decay"
        lines.append(f"{path:<{wide}}  {shape:<{long}}  {mover:<5}  {verdict}")
    return "\n".join(lines)
