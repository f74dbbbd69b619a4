"""The log-linear operators: one state per Fenwick level, weighed token by token (arXiv 2506.04761)."""

from typing import Any

from jaxtyping import Array, Float

from efla_jax.ops.delta_rule import TABLE as FLAT
from efla_jax.ops.dispatch import Table, automatic, dispatch, missing_kernel
from efla_jax.ops.fenwick import Fenwick, FenwickState, fenwick, fenwick_recurrent
from efla_jax.ops.fenwick_chunked import fenwick_chunked
from efla_jax.ops.fenwick_parts import fenwick_over_mesh
from efla_jax.ops.fenwick_tree import fenwick_associative
from efla_jax.ops.pallas_log_linear import log_linear_attention as log_linear_attention_kernel
from efla_jax.ops.pallas_log_linear_delta import log_linear_delta_rule as log_linear_delta_rule_kernel
from efla_jax.ops.pallas_log_linear_step import one_token
from efla_jax.shapes import Gates, Keys, Queries, SegmentIds, Values, check_chunk_size

LevelWeights = Float[Array, "B T H L"]


KERNELS = {"log_linear_delta_rule": log_linear_delta_rule_kernel, "log_linear_attention": log_linear_attention_kernel}


def table(op: str) -> Table:
    return {
        "recurrent": fenwick_recurrent,
        "associative": fenwick_associative,
        "chunked": fenwick_chunked,
        "pallas": lambda f, size: one_token(f) if f.x.k.shape[1] == 1 and f.x.u.size else KERNELS[op](f, size),
        "triton": missing_kernel(op),
    }


TABLES = {op: table(op) for op in KERNELS}


def run(op: str, f: Fenwick, chunk_size: int, implementation: str) -> tuple[Any, FenwickState]:
    check_chunk_size(chunk_size)
    time, state = f.x.k.shape[1], f.x.k.shape[3] * f.x.u.shape[3]
    auto = automatic(time, 4 * state * f.level_weights.size)  # of one token: [B, 1, H, L]

    def flat(x):  # of parts of the time only
        return dispatch("delta_rule", implementation, FLAT, automatic(x.k.shape[1]), (x, chunk_size))

    return fenwick_over_mesh(lambda f: dispatch(op, implementation, TABLES[op], auto, (f, chunk_size)), flat, f)


def log_linear_delta_rule(
    q: Queries,
    k: Keys,
    u: Values,
    erase: Gates,
    log_decay: Gates,
    level_weights: LevelWeights,
    *,
    initial_state: FenwickState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[Values, FenwickState]:
    """Delta rule over Fenwick states: as many states as the position has bits, each weighed by the query's token.

        S_t^(l) = exp(g_t) (I - e_t k_t k_t^T) merge(S_{t-1})^(l) + [l = 0] k_t u_t^T
        o_t = sum over l of level_weights_t[l] (S_t^(l))^T q_t

    The token at position s is in level bit_length(t xor s) of the query at t (`fenwick_level`); positions count the
    real tokens of each document. level_weights `[B, T, H, L]` (used in float32): levels from L - 1 on share weight and
    slot L - 1, so L = 1 is `delta_rule` times its weight, and so is any L with equal weights. All else is as in
    `delta_rule`, but the state: a `FenwickState` of any prefix goes on in any pieces. A mesh splits the time of rows
    that begin at 0 without segment_ids into parts of a power of two; other rows are whole, with fewer heads a device.
    "chunked" costs least where rows begin at 0 without segment_ids (a tree over chunks; elsewhere every chunk works on
    all slots), and "associative" takes such rows only. Source: Log-Linear Attention (arXiv 2506.04761).

    >>> import jax.numpy as jnp
    >>> k, gates = jnp.ones((1, 5, 1, 4)) / 2, jnp.ones((1, 5, 2))
    >>> levels = jnp.ones((1, 5, 2, 4))
    >>> o, state = log_linear_delta_rule(k, k, jnp.ones((1, 5, 2, 3)), gates, 0 * gates, levels)
    >>> o.shape, state.states.shape, state.position.tolist(), o[0, :, 0, 0].tolist()
    ((1, 5, 2, 3), (1, 2, 4, 4, 3), [5], [1.0, 1.0, 1.0, 1.0, 1.0])
    """
    if erase is None:
        raise ValueError("erase: None, but the delta rule needs one gate per token; call log_linear_attention instead.")
    f = fenwick(q, k, u, erase, log_decay, level_weights, initial_state, segment_ids)
    return run("log_linear_delta_rule", f, chunk_size, implementation)


def log_linear_attention(
    q: Queries,
    k: Keys,
    u: Values,
    log_decay: Gates,
    level_weights: LevelWeights,
    *,
    initial_state: FenwickState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[Values, FenwickState]:
    """Linear attention with decay over Fenwick states, each weighed by the query's token.

        S_t^(l) = exp(g_t) merge(S_{t-1})^(l) + [l = 0] k_t u_t^T
        o_t = sum over l of level_weights_t[l] (S_t^(l))^T q_t

    Shapes, levels, state and errors are those of `log_linear_delta_rule` without `erase`; Mamba-2 is q = C, k = B, u =
    dt x, log_decay = dt A. Source: Log-Linear Attention (arXiv 2506.04761).

    >>> import jax.numpy as jnp
    >>> k = jnp.ones((1, 5, 1, 4)) / 2
    >>> only_itself = jnp.zeros((1, 5, 2, 4)).at[..., 0].set(1.0)
    >>> o, _ = log_linear_attention(k, k, jnp.ones((1, 5, 2, 3)), jnp.zeros((1, 5, 2)), only_itself)
    >>> o[0, :, 0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    f = fenwick(q, k, u, None, log_decay, level_weights, initial_state, segment_ids)
    return run("log_linear_attention", f, chunk_size, implementation)
