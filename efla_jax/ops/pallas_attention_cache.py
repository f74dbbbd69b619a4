"""Softmax attention to what a cache holds, every token or pages of selected chunks, through GPU kernels: one query a
row, and many.

The gradients are those of XLA's forms: what is differentiated is seldom continued."""

import functools

import jax
import jax.numpy as jnp

from efla_jax.ops import attention_blocks, selected_pages
from efla_jax.ops.attention_blocks import MASKED
from efla_jax.ops.document_chunks import placed
from efla_jax.ops.hopper import require_hopper
from efla_jax.ops.pallas_attention import CELL, WIDTH, causal, filled, require_rows
from efla_jax.ops.selected_pages import Pool


def require(op: str, q, k, v, interpret) -> None:
    """NotImplementedError, with the reason, for a device, a size or a dtype that the kernels do not serve; q [B, T, H,
    K], k [B, S, X, K], v [B, S, X, V]."""
    if interpret is None:
        require_hopper(op)
    from efla_jax.kernels import attention_decode, attention_prefix

    if not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(f"{op}: one dtype of q and of the cache, not {q.dtype}, {k.dtype}, {v.dtype}")
    sizes = q.shape[3], v.shape[3], k.shape[1], q.dtype
    one = q.shape[1] == 1
    if reason := attention_decode.unsupported(q.shape[2], *sizes) if one else attention_prefix.unsupported(*sizes):
        raise NotImplementedError(f"{op}: no kernel of {'one token' if one else 'a cache'} for {reason}")


def seen_by(mine, o, log_sum) -> tuple[jax.Array, jax.Array]:
    """o [B, T, H, V], L [B, T, H], float32, of the queries `mine` [B, T] only, of outputs and log sums [B, H, T'] of a
    kernel that had T filled up."""
    time = mine.shape[1]
    log_sum = jnp.where(mine[..., None], log_sum[..., :time].swapaxes(1, 2), MASKED)
    return jnp.where(mine[..., None, None], o[:, :time].astype(jnp.float32), 0.0), log_sum


def in_tiles(mine, counts) -> jax.Array:
    """counts [B, R] as [B, R, tiles]: 0 where no query of a tile is `mine` [B, T]."""
    any_mine = jnp.any(filled(mine).reshape(mine.shape[0], -1, WIDTH), axis=2)
    return jnp.where(any_mine[:, None], counts[..., None], 0).astype(jnp.int32)


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
    _, pull = jax.vjp(lambda *given: attention_blocks.latest(*given, limit), *arrays)
    return *pull(cotangent), None


solve_cached.defvjp(_cached_forward, _cached_backward)
solved_cached = jax.jit(solve_cached, static_argnums=4)  # traced and lowered once for all layers of the same sizes


def latest(q, k, v, limit, interpret=None) -> jax.Array:
    """`attention_blocks.latest` by the kernel."""
    require("softmax_attention", q, k, v, interpret)
    return solved_cached(q, k, v, jnp.minimum(limit, k.shape[1]), interpret)


def before(q, mine, k, v, length, interpret) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] and L [B, T, H], float32, of attention to the first `length` [B] slots of k [B, M, G, K], v
    [B, M, G, V]: of the queries `mine` [B, T] only, 0 and MASKED of others. Without a gradient."""
    from efla_jax.kernels.attention_prefix import forward

    cells = k.shape[1] // CELL
    count = jnp.minimum(-(-length // CELL), cells)[:, None]
    order = jnp.maximum(count - 1 - jnp.arange(cells), 0)[:, None].astype(jnp.int32)  # the last one, cut, comes first
    used = (jnp.minimum(length, k.shape[1]) - (count[:, 0] - 1) * CELL).astype(jnp.int32)
    return seen_by(mine, *forward(filled(q), k, v, order, in_tiles(mine, count), used, interpret=interpret))


def softmax(q, k, v, document, cache, _start=0, config=None, interpret=None) -> jax.Array:
    """`pallas_attention.softmax` whose first document goes on with the cache."""
    require_rows(q, k, v, interpret)
    require("softmax_attention", q, cache.k, cache.v, interpret)
    if q.size == 0 or v.size == 0:
        return jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype)
    return solved_behind(q, k, v, cache, document, config, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def continued(q, k, v, cache, document, config, interpret) -> jax.Array:
    o, log_sum = causal(q, k, v, document, config, interpret)
    mine = jnp.ones(q.shape[:2], bool) if document is None else document == 0
    earlier, log_earlier = before(q, mine, cache.k, cache.v, cache.length, interpret)
    total = jnp.logaddexp(log_sum, log_earlier)
    o = jnp.exp(log_sum - total)[..., None] * o.astype(jnp.float32)
    return (o + jnp.exp(log_earlier - total)[..., None] * earlier).astype(v.dtype)


def _continued_forward(q, k, v, cache, document, config, interpret):
    return continued(q, k, v, cache, document, config, interpret), (q, k, v, cache, document)


def _continued_backward(_config, _interpret, saved, cotangent):
    q, k, v, cache, document = saved

    def by_xla(q, k, v, cache_k, cache_v):
        return attention_blocks.chunked(q, k, v, document, cache._replace(k=cache_k, v=cache_v), 0)

    _, pull = jax.vjp(by_xla, q, k, v, cache.k, cache.v)
    *gradients, d_k, d_v = pull(cotangent)
    return *gradients, cache._replace(k=d_k, v=d_v, length=None), None


continued.defvjp(_continued_forward, _continued_backward)
solved_behind = jax.jit(continued, static_argnums=(5, 6))  # traced and lowered once for all layers of the same sizes


# ---- pages of selected chunks ---------------------------------------------------------------------------------------


def require_pages(q, pool: Pool, interpret) -> None:
    op = "block_sparse_attention"
    if pool.k.shape[2] != CELL:
        raise NotImplementedError(f"{op}: the kernels have chunks of {CELL}, not of {pool.k.shape[2]}")
    require(op, q, *slots_of(pool), interpret=interpret)


def slots_of(pool: Pool) -> tuple[jax.Array, jax.Array]:
    """Keys and values of the pages side by side, [B, M C, E, K] and [B, M C, E, V]."""
    k, v = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in pool[:2])
    return k, v


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def solve_paged(q, mine, pool, routes, interpret):
    from efla_jax.kernels.attention_decode import partial
    from efla_jax.kernels.attention_prefix import forward

    batch, room, size = pool.k.shape[:3]
    if q.shape[1] == 1:
        limit = jnp.where(mine[:, 0], jnp.minimum(pool.pages, room) * size, 0)
        parts = partial(q[:, 0], *slots_of(pool), pool.owner, limit, routes=routes, interpret=interpret)
        return tuple(x[:, None] for x in joined(*parts))
    in_use = jnp.arange(room) < jnp.minimum(pool.pages, room)[:, None]
    picked = (pool.owner[:, None] == jnp.arange(routes)[:, None]) & in_use[:, None]
    rank = jnp.cumsum(picked, axis=2, dtype=jnp.int32)
    target = jnp.where(picked, rank - 1, room + jnp.arange(room))
    order = placed(target.reshape(-1, room), room).reshape(picked.shape)
    counts, whole = in_tiles(mine, rank[..., -1]), jnp.full((batch,), size, jnp.int32)
    return seen_by(mine, *forward(filled(q), *slots_of(pool), order, counts, whole, interpret=interpret))


def _paged_forward(q, mine, pool, routes, interpret):
    return solve_paged(q, mine, pool, routes, interpret), (q, mine, pool)


def _paged_backward(routes, _, saved, cotangents):
    q, mine, pool = saved

    def by_xla(q, k, v, weight):
        return selected_pages.paged(q, mine, routes, pool._replace(k=k, v=v, weight=weight))

    _, pull = jax.vjp(by_xla, q, pool.k, pool.v, pool.weight)
    d_q, d_k, d_v, d_weight = pull(cotangents)
    return d_q, None, Pool(d_k, d_v, None, d_weight, None)


solve_paged.defvjp(_paged_forward, _paged_backward)
solved_paged = jax.jit(solve_paged, static_argnums=(3, 4))  # traced and lowered once for all layers of the same sizes


def paged(q, mine, routes: int, pool: Pool, interpret=None) -> tuple[jax.Array, jax.Array]:
    """`selected_pages.paged` by a kernel."""
    require_pages(q, pool, interpret)
    return solved_paged(q, mine, pool, routes, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def solve_latest(q, open_k, open_v, fill, pool, routes, interpret):
    from efla_jax.kernels.attention_decode import partial

    limit = jnp.where(fill > 0, jnp.minimum(pool.pages, pool.k.shape[1]) * CELL, 0)
    tail = open_k, open_v, fill
    parts = partial(q[:, 0], *slots_of(pool), pool.owner, limit, tail=tail, routes=routes, interpret=interpret)
    return joined(*parts)[0][:, None].astype(open_v.dtype)


def _latest_forward(q, open_k, open_v, fill, pool, routes, interpret):
    return solve_latest(q, open_k, open_v, fill, pool, routes, interpret), (q, open_k, open_v, fill, pool)


def _latest_backward(routes, _, saved, cotangent):
    q, open_k, open_v, fill, pool = saved

    def by_xla(q, open_k, open_v, k, v, weight):
        given = pool._replace(k=k, v=v, weight=weight)
        return selected_pages.latest(q, open_k, open_v, fill, given, routes).astype(open_v.dtype)

    _, pull = jax.vjp(by_xla, q, open_k, open_v, pool.k, pool.v, pool.weight)
    *gradients, d_k, d_v, d_weight = pull(cotangent)
    return *gradients, None, Pool(d_k, d_v, None, d_weight, None)


solve_latest.defvjp(_latest_forward, _latest_backward)
solved_latest = jax.jit(solve_latest, static_argnums=(5, 6))  # traced and lowered once for all layers of the same sizes


def latest_of_pages(q, open_k, open_v, fill, pool: Pool, routes: int, interpret=None) -> jax.Array:
    """`selected_pages.latest` by the kernel."""
    require_pages(q, pool, interpret)
    if not open_k.dtype == open_v.dtype == q.dtype:
        raise NotImplementedError(f"block_sparse_attention: an open chunk of {open_k.dtype}, but q of {q.dtype}")
    return solved_latest(q, open_k, open_v, fill, pool, routes, interpret)
