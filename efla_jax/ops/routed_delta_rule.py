"""The delta rule whose chunks may be rolled back: the linear branch of NAtS-L (arXiv 2602.03681)."""

import functools

from jaxtyping import Array, Float

from efla_jax.ops.dispatch import Table, automatic, dispatch, missing_kernel
from efla_jax.ops.pallas_routed import routed_delta_rule as pallas
from efla_jax.ops.routed_chunked import routed_chunked
from efla_jax.ops.routed_recurrent import RoutedState, routed, routed_over_mesh, routed_recurrent
from efla_jax.shapes import Gates, Keys, Queries, SegmentIds, Values, check_chunk_size

TABLE: Table = {
    "recurrent": routed_recurrent,
    "chunked": routed_chunked,
    "pallas": pallas,
    "triton": missing_kernel("routed_delta_rule"),
}
BEFORE: Table = {
    "recurrent": functools.partial(routed_recurrent, own=False),
    "chunked": functools.partial(routed_chunked, own=False),
    "pallas": missing_kernel("chunk_start_delta_rule"),
    "triton": missing_kernel("chunk_start_delta_rule"),
}


def routed_delta_rule(
    q: Queries,
    k: Keys,
    u: Values,
    erase: Gates,
    log_decay: Gates,
    keep: Float[Array, "B N H"] | Float[Array, "B N H 2"],
    *,
    initial_state: RoutedState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[Values, RoutedState]:
    """Delta rule with decay that takes back, at the end of a chunk, what the chunk has written.

        S_t = exp(g_t) (I - e_t k_t k_t^T) S_{t-1} + k_t u_t^T        o_t = S_t^T q_t
        after the last token of chunk c, where G_c is the sum of its g and S_c the state before its first token:
        S_t <- exp(G_c) S_c + keep_c (S_t - exp(G_c) S_c)

    Chunks of `chunk_size` tokens are counted from the first real token of each document. keep `[B, N, H]`, N = ceil(T /
    chunk_size), 1 (keeps) or 0 (rolls back; any real number is taken at its word): entry n is for the n-th chunk that
    fills up in the row during this call. A chunk that its document or the call ends before has no entry. Of a row
    without segment_ids from its beginning that is chunk n. The gradient of keep is that of the formula, float32; for
    the published one, of kept chunks only, give where(keep > 0.5, keep, stop_gradient(keep)). keep `[B, N, H, 2]` has a
    second number f per chunk, without gradient: rolled back is to exp(f G_c) S_c, so that f = 0 skips a dropped chunk's
    decay too.

    All else is as in `delta_rule`, but the state: a `RoutedState` of any prefix goes on in any pieces, with the same
    chunk_size; time is never split over devices. "pallas" serves chunk_size 64 and keep [B, N, H]; rows that go on
    where a chunk is open run in XLA, and documents of an initial state are declined. Source: NAtS-L (arXiv 2602.03681).

    >>> import jax.numpy as jnp
    >>> k, gates = jnp.ones((1, 40, 1, 4)) / 2, jnp.ones((1, 40, 1))
    >>> keep = jnp.array([0.0, 1.0, 0.0]).reshape(1, 3, 1)
    >>> o, state = routed_delta_rule(k, k, jnp.ones((1, 40, 1, 5)), 0 * gates, 0 * gates, keep, chunk_size=16)
    >>> o[0, jnp.array([15, 16, 31, 32]), 0, 0].tolist(), state.position.tolist()
    ([16.0, 1.0, 16.0, 17.0], [40])
    """
    arguments = q, k, u, erase, log_decay, keep
    return _solved("routed_delta_rule", TABLE, implementation, arguments, initial_state, segment_ids, chunk_size)


def chunk_start_delta_rule(
    q: Queries,
    k: Keys,
    u: Values,
    erase: Gates,
    log_decay: Gates,
    keep: Float[Array, "B N H"] | Float[Array, "B N H 2"],
    *,
    initial_state: RoutedState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[Values, RoutedState]:
    """`routed_delta_rule` whose tokens read the chunks before their own, faded, and nothing of their own.

        o_t = exp(G_t) S_c^T q_t        S_c: before the chunk c of token t; G_t: sum of g from its first token up to t

    Arguments, states and errors are those of `routed_delta_rule`; an ablation of NAtS-L (arXiv 2602.03681), without GPU
    kernels.

    >>> import jax.numpy as jnp
    >>> k, gates = jnp.ones((1, 40, 1, 4)) / 2, jnp.ones((1, 40, 1))
    >>> keep = jnp.array([0.0, 1.0, 0.0]).reshape(1, 3, 1)
    >>> o, _ = chunk_start_delta_rule(k, k, jnp.ones((1, 40, 1, 5)), 0 * gates, 0 * gates, keep, chunk_size=16)
    >>> o[0, jnp.array([15, 16, 31, 32]), 0, 0].tolist()
    [0.0, 0.0, 0.0, 16.0]
    """
    arguments = q, k, u, erase, log_decay, keep
    return _solved("chunk_start_delta_rule", BEFORE, implementation, arguments, initial_state, segment_ids, chunk_size)


def _solved(
    name: str, table: Table, implementation: str, arguments, initial_state, segment_ids, chunk_size: int
) -> tuple[Values, RoutedState]:
    check_chunk_size(chunk_size)
    q, k, u, erase, log_decay, keep = arguments
    for gate, array in (("erase", erase), ("log_decay", log_decay), ("keep", keep)):
        if array is None:
            raise ValueError(f"{gate}: None, but the routed delta rule needs it; pass an array.")
    r = routed(q, k, u, erase, log_decay, keep, initial_state, segment_ids, chunk_size)
    auto = automatic(k.shape[1])

    def run(r):
        return dispatch(name, implementation, table, auto, (r, chunk_size))

    return routed_over_mesh(run, r, None if initial_state is None else initial_state.position)
