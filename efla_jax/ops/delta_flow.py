"""The delta rule from raw keys, values and beta: how a token's step follows from them, and the operator of both."""

import jax
import jax.numpy as jnp

from efla_jax.ops.arguments import Recurrence, recurrence
from efla_jax.ops.delta_rule import TABLE as UNIT_KEYS
from efla_jax.ops.delta_rule import part_of_time
from efla_jax.ops.dispatch import Table, automatic, dispatch, missing_kernel
from efla_jax.ops.exact_flow import exact_flow, gated_exact_flow
from efla_jax.ops.normalize import l2_normalize, scale_values
from efla_jax.ops.pallas import delta_flow as pallas
from efla_jax.ops.sharded import recurrence_over_mesh
from efla_jax.shapes import (
    Gates,
    Keys,
    Queries,
    SegmentIds,
    State,
    Values,
    check_chunk_size,
    check_floating,
    check_shapes,
)


def unit_step(k: Keys, v: Values, beta: Gates) -> tuple[Keys, Values, Gates]:
    """(unit_k, u, erase) of DeltaNet: a step of length beta along the unit key."""
    return l2_normalize(k), scale_values(beta, v), beta


STEPS = {
    "exact": lambda k, v, beta, log_decay: (*exact_flow(k, v, beta), log_decay),
    "gated_exact": gated_exact_flow,
    "unit": lambda k, v, beta, log_decay: (*unit_step(k, v, beta), log_decay),
}


def by_coefficients(name: str):
    """The implementation `name` of `delta_rule`, or what its "auto" takes, after the step's coefficients."""

    def implementation(x: Recurrence, step: str, chunk_size: int) -> tuple[jax.Array, jax.Array]:
        k, u, erase, log_decay = STEPS[step](x.k, x.u, x.erase, x.log_decay)
        auto = automatic(k.shape[1], 4 * x.initial_state.size)
        x = x._replace(k=k, u=u, erase=erase, log_decay=log_decay)
        return dispatch("delta_rule", name, UNIT_KEYS, auto, (x, chunk_size))

    return implementation


def in_kernels(x: Recurrence, step: str, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """The coefficients made inside the kernels; before them of a single token, and in float16, whose range is too small
    for what is written per raw key."""
    if x.k.shape[1] == 1 or x.k.dtype == jnp.float16:
        return by_coefficients("pallas")(x, step, chunk_size)
    if step == "gated_exact":
        x = x._replace(log_decay=jnp.expm1(x.log_decay))
    return pallas(x, step)


TABLE: Table = {name: by_coefficients(name) for name in ("recurrent", "associative", "chunked")} | {
    "pallas": in_kernels,
    "triton": missing_kernel("delta_flow"),
}


def delta_flow(
    q: Queries,
    k: Keys,
    v: Values,
    beta: Gates,
    log_decay: Gates | None = None,
    *,
    step: str = "exact",
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[Values, State]:
    """Delta rule whose erase gates and write vectors are made of raw keys, values and beta.

        step            S_t                                                              coefficients
        "exact"         exp(g_t) (I - erase k k^T / |k|^2) S_{t-1} + k u^T / |k|         `exact_flow`
        "gated_exact"   the same with another u and g                                    `gated_exact_flow`
        "unit"          the same with erase = beta, u = beta v                           DeltaNet

    q, k `[B, T, G, K]`, k not normalised; v `[B, T, H, V]`; beta >= 0 and log_decay <= 0 (None is no decay)
    `[B, T, H]`, used in float32. A zero key writes nothing and gets no gradient. It equals `delta_rule` of the step's
    coefficients, and all else is as there: heads, states, segment_ids, what is returned (o in the dtype of v), meshes,
    chunk_size and implementation. "pallas" does not write unit keys and write vectors to memory in bfloat16;
    "auto" does, and goes on as `delta_rule` would.
    Raises ValueError for input that does not fit, NotImplementedError for what a kernel does not support. Source: EFLA
    (arXiv 2512.12602), DeltaNet (arXiv 2406.06484).

    >>> import jax.numpy as jnp
    >>> k, v = 2 * jnp.ones((1, 3, 1, 4)), jnp.ones((1, 3, 1, 5))
    >>> o, state = delta_flow(k, k, v, jnp.full((1, 3, 1), 100.0))      # saturated: reading with k gives v
    >>> o[0, 0, 0].tolist(), state.shape
    ([1.0, 1.0, 1.0, 1.0, 1.0], (1, 1, 4, 5))
    """
    check_chunk_size(chunk_size)
    if step not in STEPS:
        raise ValueError(f"step: {step!r} is not a way to take the step; choose one of {tuple(STEPS)}.")
    if beta is None:
        raise ValueError("beta: None, but a step needs one length per token; pass an array.")
    check_shapes({"q": (q, "BTGK"), "k": (k, "BTGK"), "v": (v, "BTHV"), "beta": (beta, "BTH")})
    check_floating({"v": v, "beta": beta})  # by their names here; the rest is checked with them as u and erase
    x = recurrence(q, k, v, beta, log_decay, initial_state, segment_ids)

    def run(x):
        if implementation == "auto":  # the kernels of raw keys are no faster: kernels/README.md
            return by_coefficients("auto")(x, step, chunk_size)
        return dispatch("delta_flow", implementation, TABLE, (), (x, step, chunk_size))

    def over(x, context):
        if implementation != "auto":
            raise NotImplementedError(f"delta_flow: {implementation} makes outputs and what a part does at once")
        k, u, erase, log_decay = STEPS[step](x.k, x.u, x.erase, x.log_decay)
        return part_of_time("auto", x._replace(k=k, u=u, erase=erase, log_decay=log_decay), context)

    return recurrence_over_mesh(run, x, over)
