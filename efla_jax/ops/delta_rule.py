"""The delta rule with separate erase and write: the operator behind DeltaNet, EFLA and their gated forms."""

import jax

from efla_jax.ops.arguments import Recurrence, recurrence
from efla_jax.ops.associative import associative
from efla_jax.ops.chunked import chunked
from efla_jax.ops.dispatch import KERNELS, Table, automatic, dispatch, missing_kernel
from efla_jax.ops.pallas import delta_rule as pallas
from efla_jax.ops.pallas import delta_rule_part
from efla_jax.ops.recurrent import recurrent
from efla_jax.ops.sharded import recurrence_over_mesh
from efla_jax.shapes import Gates, Keys, Queries, SegmentIds, State, Values, check_chunk_size

TABLE: Table = {
    "recurrent": recurrent,
    "associative": associative,
    "chunked": chunked,
    "pallas": pallas,
    "triton": missing_kernel("delta_rule"),
}


def part_of_time(implementation: str, x: Recurrence, context: str) -> tuple[jax.Array, jax.Array]:
    """(outputs, final state) of a part of the time on every device of a mesh axis, by an implementation that knows what
    its part does to a state before it makes an output. NotImplementedError where `implementation` stands for none."""
    names = automatic(x.k.shape[1]) if implementation == "auto" and KERNELS.get() else (implementation,)
    if "pallas" not in names:
        raise NotImplementedError(f"delta_rule: {implementation} makes outputs and what a part does at once")
    return delta_rule_part(x, context)


def delta_rule(
    q: Queries,
    k: Keys,
    u: Values,
    erase: Gates,
    log_decay: Gates | None = None,
    *,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
) -> tuple[Values, State]:
    """Delta rule with decay: erase along the key, write a vector, read with the query.

        S_t = exp(g_t) (I - e_t k_t k_t^T) S_{t-1} + k_t u_t^T        o_t = S_t^T q_t

    q, k `[B, T, G, K]` (k of unit length for a stable step), u `[B, T, H, V]`, erase e and log_decay g <= 0 `[B, T, H]`
    (used in float32; None is no decay). Value head h reads key head h // (H // G). No hidden scale: scale q yourself.
    initial_state `[B, H, K, V]` belongs to the document of the row's first real token; segment_ids `[B, T]`: 0 is
    padding, a new id begins a document with an empty state. Returns o `[B, T, H, V]` in the dtype of u and the float32
    state after each row's last real token. Any T >= 0; differentiable in every floating argument
    in reverse mode ("chunked" has no forward mode, the others do). With "chunked" a NaN spoils its whole chunk too.
    Under `jax.set_mesh` with a mesh of `sharding.make_mesh` each device has its rows, heads and part of the time.

    implementation: "recurrent" (the definition), "associative", "chunked" (XLA), "pallas" (GPU kernels: NVIDIA Hopper,
    q, k, u all bfloat16 or all float16, K 64, 128 or 256, V a multiple of 64), "auto".
    chunk_size: 16, 32, 64 or 128 tokens solved at once by "chunked". Raises ValueError for input that does not fit,
    NotImplementedError for a kernel that does not support it. Source: DeltaNet (arXiv 2406.06484), Gated DeltaNet
    (arXiv 2412.06464), EFLA (arXiv 2512.12602).

    >>> import jax.numpy as jnp
    >>> k = jnp.ones((1, 3, 1, 4)) / 2
    >>> o, state = delta_rule(k, k, jnp.ones((1, 3, 2, 5)), jnp.ones((1, 3, 2)))   # the same pair written three times
    >>> o.shape, state.shape, o[0, :, 0, 0].tolist()
    ((1, 3, 2, 5), (1, 2, 4, 5), [1.0, 1.0, 1.0])
    """
    check_chunk_size(chunk_size)
    if erase is None:
        raise ValueError("erase: None, but the delta rule needs one gate per token; without any call linear_attention.")
    x = recurrence(q, k, u, erase, log_decay, initial_state, segment_ids)

    def run(x):
        auto = automatic(x.k.shape[1], 4 * x.initial_state.size)
        return dispatch("delta_rule", implementation, TABLE, auto, (x, chunk_size))

    def over(x, context):
        return part_of_time(implementation, x, context)

    return recurrence_over_mesh(run, x, over)
