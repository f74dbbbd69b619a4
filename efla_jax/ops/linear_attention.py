"""Linear attention with a scalar decay per head: the operator behind Mamba-2 (state-space duality)."""

from efla_jax.ops.arguments import recurrence
from efla_jax.ops.associative import associative
from efla_jax.ops.chunked import chunked
from efla_jax.ops.dispatch import Table, automatic, dispatch, missing_kernel
from efla_jax.ops.pallas_linear import linear_attention as pallas
from efla_jax.ops.recurrent import recurrent
from efla_jax.ops.sharded import recurrence_over_mesh
from efla_jax.shapes import Gates, Keys, Queries, SegmentIds, State, Values, check_chunk_size

TABLE: Table = {
    "recurrent": recurrent,
    "associative": associative,
    "chunked": chunked,
    "pallas": pallas,
    "triton": missing_kernel("linear_attention"),
}


def linear_attention(
    q: Queries,
    k: Keys,
    u: Values,
    log_decay: Gates | None = None,
    *,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[Values, State]:
    """Linear attention with decay: add a key-value pair, read with the query, never erase.

        S_t = exp(g_t) S_{t-1} + k_t u_t^T        o_t = S_t^T q_t

    Shapes, state, segments, implementations and errors are those of `delta_rule` without `erase`; Mamba-2 is q = C, k =
    B, u = dt x, g = dt A. Source: Mamba-2 (arXiv 2405.21060).

    >>> import jax.numpy as jnp
    >>> k = jnp.ones((1, 3, 1, 4)) / 2
    >>> o, state = linear_attention(k, k, jnp.ones((1, 3, 2, 5)))
    >>> o.shape, state.shape, o[0, :, 0, 0].tolist()
    ((1, 3, 2, 5), (1, 2, 4, 5), [1.0, 2.0, 3.0])
    """
    check_chunk_size(chunk_size)
    x = recurrence(q, k, u, None, log_decay, initial_state, segment_ids)

    def run(x):
        return dispatch("linear_attention", implementation, TABLE, automatic(x.k.shape[1]), (x, chunk_size))

    return recurrence_over_mesh(run, x)
