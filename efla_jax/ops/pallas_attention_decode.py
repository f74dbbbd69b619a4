"""One query a row through the GPU kernel of decoding: over a cache of every token, and over pages of selected chunks.

The gradients are those of XLA's forms: a token that is differentiated is not decoded."""

import functools

import jax
import jax.numpy as jnp

from efla_jax.ops import attention, selected_pages
from efla_jax.ops.hopper import require_hopper
from efla_jax.ops.selected_pages import Pool


def require(op: str, q, k, v, interpret) -> None:
    """NotImplementedError, with the reason, for a device, a size or a dtype that the kernel does not serve; q [B, 1, H,
    K], k [B, S, X, K], v [B, S, X, V]."""
    if interpret is None:
        require_hopper(op)
    from efla_jax.kernels.attention_decode import unsupported

    if not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(f"{op}: one dtype of q and of the cache, not {q.dtype}, {k.dtype}, {v.dtype}")
    if reason := unsupported(q.shape[2], q.shape[3], v.shape[3], k.shape[1], q.dtype):
        raise NotImplementedError(f"{op}: no kernel of one token for {reason}")


def joined(o: jax.Array, log_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(o [B, H, V], L [B, H]) of one softmax, of the outputs [B, P, H, V] and log sums [B, P, H] of its parts."""
    top = jnp.max(log_sum, axis=1)
    mass = jnp.exp(log_sum - top[:, None])
    total = jnp.sum(mass, axis=1)
    return jnp.sum(mass[..., None] * o, axis=1) / total[..., None], top + jnp.log(total)


# ---- a cache of every token -----------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def solve_cached(q, k, v, limit, interpret):
    from efla_jax.kernels.attention_decode import partial

    return joined(*partial(q[:, 0], k, v, None, limit, interpret=interpret))[0][:, None].astype(v.dtype)


def _cached_forward(q, k, v, limit, interpret):
    return solve_cached(q, k, v, limit, interpret), (q, k, v, limit)


def _cached_backward(_, saved, cotangent):
    *arrays, limit = saved
    _, pull = jax.vjp(lambda *given: attention.latest(*given, limit), *arrays)
    return *pull(cotangent), None


solve_cached.defvjp(_cached_forward, _cached_backward)


def latest(q, k, v, limit, interpret=None) -> jax.Array:
    """`attention.latest` by the kernel."""
    require("softmax_attention", q, k, v, interpret)
    return solve_cached(q, k, v, jnp.minimum(limit, k.shape[1]), interpret)


# ---- pages of selected chunks ---------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def solve_paged(q, mine, pool, routes, interpret):
    from efla_jax.kernels.attention_decode import partial

    (batch, room, size), (k, v) = pool.k.shape[:3], pool[:2]
    limit = jnp.where(mine[:, 0], jnp.minimum(pool.pages, room) * size, 0)
    slots = (x.reshape(batch, room * size, *x.shape[3:]) for x in (k, v))
    parts = partial(q[:, 0], *slots, pool.owner, limit, routes=routes, interpret=interpret)
    return tuple(x[:, None] for x in joined(*parts))


def _paged_forward(q, mine, pool, routes, interpret):
    return solve_paged(q, mine, pool, routes, interpret), (q, mine, pool)


def _paged_backward(routes, _, saved, cotangents):
    q, mine, pool = saved
    floating = q, pool.k, pool.v, pool.weight

    def by_xla(q, k, v, weight):
        return selected_pages.paged(q, mine, routes, pool._replace(k=k, v=v, weight=weight))

    _, pull = jax.vjp(by_xla, *floating)
    d_q, d_k, d_v, d_weight = pull(cotangents)
    return d_q, None, Pool(d_k, d_v, None, d_weight, None)


solve_paged.defvjp(_paged_forward, _paged_backward)


def paged(q, mine, routes: int, pool: Pool, interpret=None) -> tuple[jax.Array, jax.Array]:
    """`selected_pages.paged` of one token by the kernel."""
    op = "block_sparse_attention"
    if pool.k.shape[2] != 64:
        raise NotImplementedError(f"{op}: the kernel of one token has chunks of 64, not of {pool.k.shape[2]}")
    slots = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in pool[:2])
    require(op, q, *slots, interpret)
    return solve_paged(q, mine, pool, routes, interpret)
