"""The packed keys and values that block-sparse attention carries from call to call: a page for every chunk that a
routing head selected, in one pool that all heads of a row share, and the chunk that is still open.

Attention to pages takes a block of them at a time, each with the queries of its owner, keeps a softmax that runs over
the pages of every head, and has a hand-written backward that recomputes the scores, so that only the outputs and the
logarithms of the sums, L, are saved. Blocks beyond the last page in use are not visited.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from efla_jax.ops.attention_blocks import MASKED
from efla_jax.ops.block_sparse_tiles import added, window
from efla_jax.ops.chunked import product
from efla_jax.ops.document_chunks import DocumentChunks
from efla_jax.ops.segments import mask_padding
from efla_jax.shapes import check_chunk_size, check_floating, check_shapes

QUERIES, PAGES = 256, 128  # of a block, at most
PAIRS = 4096  # queries times pages of a block: scores alive at once


class SelectedKV(NamedTuple):
    """Keys and values that the next tokens of each row's document may see, in a pool of M pages a row.

    k [B, M, C, E, K], v [B, M, C, E, V]: pages, each a chunk of the E = lcm(G, R) / R key heads that one of R routing
    heads reads; owner [B, M] int32: that head; weight [B, M] float32: the entry of `selected` that it comes from, which
    receives its gradient; pages [B] int32: how many are in use, in order of chunks, then heads. More than M says that a
    document outgrew the pool: what it lost cannot be had back, its further outputs are NaN.
    open_k [B, C, G, K], open_v [B, C, G, V]: the open chunk, of which slots below position % C are in use; position [B]
    int32: tokens of the document so far. Zeros are an empty cache; what is not in use is arbitrary."""

    k: Float[Array, "B M C E K"]
    v: Float[Array, "B M C E V"]
    owner: Int[Array, "B M"]
    weight: Float[Array, "B M"]
    pages: Int[Array, " B"]
    open_k: Float[Array, "B C G K"]
    open_v: Float[Array, "B C G V"]
    position: Int[Array, " B"]


def init_selected_kv(
    batch: int,
    pages: int,
    chunk_size: int,
    num_key_heads: int,
    num_routes: int,
    key_dim: int,
    value_dim: int,
    dtype: jax.typing.DTypeLike = "float32",
) -> SelectedKV:
    """An empty cache with room for `pages` selections of (chunk, routing head) in each row.

    A document of T tokens fills at most (T // chunk_size) * num_routes. Raises ValueError for sizes that cannot be.

    >>> init_selected_kv(2, 6, 16, num_key_heads=2, num_routes=3, key_dim=4, value_dim=5).k.shape
    (2, 6, 16, 2, 4)
    """
    check_chunk_size(chunk_size)
    for name, size in (("pages", pages), ("num_key_heads", num_key_heads), ("num_routes", num_routes)):
        if size < (name != "pages"):
            raise ValueError(f"{name}: {size} is too small; give the number of {name.removeprefix('num_')}.")
    shared = math.lcm(num_key_heads, num_routes) // num_routes
    k, v = (jnp.zeros((batch, pages, chunk_size, shared, dim), dtype) for dim in (key_dim, value_dim))
    open_k, open_v = (jnp.zeros((batch, chunk_size, num_key_heads, dim), dtype) for dim in (key_dim, value_dim))
    owner, weight = jnp.zeros((batch, pages), jnp.int32), jnp.zeros((batch, pages), jnp.float32)
    used, position = (jnp.zeros((batch,), jnp.int32) for _ in range(2))  # two buffers, so that a cache can be donated
    return SelectedKV(k, v, owner, weight, used, open_k, open_v, position)


def grow_selected_kv(state: SelectedKV, pages: int) -> SelectedKV:
    """The same cache in a pool of `pages` pages a row.

    Rows that had outgrown the smaller pool stay so. Raises ValueError for fewer pages than it has.

    >>> state = init_selected_kv(2, 6, 16, num_key_heads=2, num_routes=3, key_dim=4, value_dim=5)
    >>> grow_selected_kv(state, 9).k.shape
    (2, 9, 16, 2, 4)
    """
    room = state.k.shape[1]
    if pages < room:
        raise ValueError(f"pages: {pages} is less than the {room} that the cache has; a pool only grows.")

    def padded(x):
        return jnp.pad(x, ((0, 0), (0, pages - room)) + ((0, 0),) * (x.ndim - 2))

    used = jnp.where(state.pages > room, state.pages + pages - room, state.pages)
    pool = {name: padded(getattr(state, name)) for name in ("k", "v", "owner", "weight")}
    return state._replace(**pool, pages=used)


def check_selected_kv(kv: SelectedKV, q, k, v, selected, chunk_size: int) -> None:
    """Raise ValueError unless the cache fits a call of the op."""
    legends = ("BMCEK", "BMCEV", "BM", "BM", "B", "BCGK", "BCGV", "B")
    fields = {f"initial_state.{name}": x for name, x in kv._asdict().items()}
    called = {"q": (q, "BTHK"), "k": (k, "BTGK"), "v": (v, "BTGV"), "selected": (selected, "BNR")}
    given = {name: (x, legend) for (name, x), legend in zip(fields.items(), legends, strict=True)}
    sizes = check_shapes(called | given)
    whole = {name: x for name, x in fields.items() if name.rpartition(".")[2] in ("owner", "pages", "position")}
    check_floating({name: x for name, x in fields.items() if name not in whole})
    for name, x in whole.items():
        if x.dtype != jnp.int32:
            raise ValueError(f"{name}: dtype {x.dtype} is not int32; begin with init_selected_kv().")
    if sizes["C"] != chunk_size:
        raise ValueError(
            f"initial_state: chunks of {sizes['C']} tokens, but chunk_size={chunk_size}. A document keeps its"
            " chunk_size: give that, or begin with init_selected_kv()."
        )
    shared = math.lcm(sizes["G"], sizes["R"]) // sizes["R"]
    if sizes["E"] != shared:
        raise ValueError(
            f"initial_state.k: pages of E={sizes['E']} key heads, but R={sizes['R']} routing heads of G={sizes['G']}"
            f" key heads read {shared} each: E = lcm(G, R) / R. Give init_selected_kv() num_routes=R."
        )


class Held(NamedTuple):
    """Keys and values of the chunks that fill up in a call, k [B, N, C, G, K], v [B, N, C, G, V], and of the one that
    is open when it ends, open_k [B, C, G, K], open_v [B, C, G, V]."""

    k: jax.Array
    v: jax.Array
    open_k: jax.Array
    open_v: jax.Array


def last_document(chunks: DocumentChunks) -> jax.Array:
    """[B]: 0 if the row has no real token."""
    return jnp.max(jnp.where(chunks.real, chunks.document, 0), axis=1, initial=0)


def outgrown(kv: SelectedKV, chunks: DocumentChunks, selected: jax.Array) -> jax.Array:
    """[B, T]: the token's document has selected more chunks before it than the pool has pages. Raises ValueError where
    a document comes to that with this call; says nothing while traced."""
    count = jnp.sum(selected > 0.5, axis=2, dtype=jnp.int32)
    sums = jnp.pad(jnp.cumsum(count, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    before, after = (jnp.take_along_axis(sums, chunks.number + more, axis=1) for more in (0, chunks.closes))
    begins = chunks.real & (chunks.document > 0) & (chunks.position == 0)
    base = jnp.where(chunks.document == 0, kv.pages[:, None], -lax.cummax(jnp.where(begins, before, 0), axis=1))
    room, most = kv.k.shape[1], jnp.max(jnp.where(chunks.real, after + base, 0), initial=0)
    if not isinstance(most, jax.core.Tracer) and most > room:
        raise ValueError(
            f"initial_state: room for {room} pages, but with this call a document's routing heads have selected {most}"
            f" chunks (before: {kv.pages.tolist()}). Make the pool larger: init_selected_kv(pages={most}), or"
            f" grow_selected_kv(state, {most}) before the call; of a mixer: max_length and softmax_room."
        )
    return chunks.real & (before + base > room)


def advanced(kv: SelectedKV, chunks: DocumentChunks, selected: jax.Array, held: Held) -> SelectedKV:
    """The cache after a call with chunks [B, T], selected [B, N, R] float32."""
    last = last_document(chunks)[:, None]
    first, total = (jnp.sum(chunks.closes & of, axis=1)[:, None] for of in (chunks.document < last, chunks.real))
    number = jnp.arange(selected.shape[1])
    closed = (number >= first) & (number < total)
    here = jnp.max(jnp.where(chunks.real & (chunks.document == last), chunks.position + 1, 0), axis=1)
    position = jnp.where(jnp.any(chunks.real, axis=1), here, kv.position)
    pages = jnp.where(last[:, 0] == 0, kv.pages, 0)
    filled = appended(kv._replace(pages=pages), closed, selected, held)
    open_k, open_v = held.open_k.astype(kv.open_k.dtype), held.open_v.astype(kv.open_v.dtype)
    return filled._replace(open_k=open_k, open_v=open_v, position=position)


def appended(kv: SelectedKV, closed: jax.Array, selected: jax.Array, held: Held) -> SelectedKV:
    """kv with a page for each (chunk, routing head) of closed [B, N], selected [B, N, R] that is selected."""
    (batch, count, routes), room = selected.shape, kv.k.shape[1]
    picked = (closed[:, :, None] & (selected > 0.5)).reshape(batch, count * routes)
    page = kv.pages[:, None] + jnp.cumsum(picked, axis=1, dtype=jnp.int32) - 1
    # The others get indices of their own beyond the end, which a scatter drops: unique indices, the simpler gradient.
    page = jnp.where(picked & (page < room), page, room + jnp.arange(count * routes))
    rows = jnp.arange(batch)[:, None]

    def put(pool, part):
        return pool.at[rows, page].set(part.astype(pool.dtype), mode="drop", unique_indices=True)

    def of_routes(x):  # [B, N, C, G, K] -> [B, N R, C, E, K]
        x = jnp.repeat(x, math.lcm(x.shape[3], routes) // x.shape[3], axis=3)
        x = x.reshape(*x.shape[:3], routes, x.shape[3] // routes, x.shape[4])
        return jnp.moveaxis(x, 3, 2).reshape(batch, count * routes, x.shape[2], *x.shape[4:])

    owner = jnp.broadcast_to(jnp.arange(routes, dtype=jnp.int32), (batch, count, routes))
    return kv._replace(
        k=put(kv.k, of_routes(held.k)),
        v=put(kv.v, of_routes(held.v)),
        owner=put(kv.owner, owner.reshape(page.shape)),
        weight=put(kv.weight, selected.reshape(page.shape)),
        pages=kv.pages + jnp.sum(picked, axis=1, dtype=jnp.int32),
    )


class Pool(NamedTuple):
    """What attention reads of a cache: fields of `SelectedKV`."""

    k: jax.Array
    v: jax.Array
    owner: jax.Array
    weight: jax.Array
    pages: jax.Array


def with_pages(o, log_sum, q, mine, routes: int, pool: Pool, solve: Callable) -> jax.Array:
    """Outputs [B, T, H, V] of one softmax over keys whose outputs are o and L [B, T, H], and the pages: of the queries
    `mine` [B, T] only, of the pages' document. solve: `paged`, or another with its arguments."""
    if pool.k.shape[1] == 0:
        return o
    of_pages, log_pages = solve(q, mine, routes, pool)
    total = jnp.logaddexp(log_sum, log_pages)
    own, others = jnp.exp(log_sum - total)[..., None], jnp.exp(log_pages - total)[..., None]
    return (own * o.astype(jnp.float32) + others * of_pages).astype(o.dtype)


def paged(q: jax.Array, mine: jax.Array, routes: int, pool: Pool) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] and L [B, T, H], float32, of attention to pages alone, by XLA; 0 and MASKED for queries that
    see none."""
    (batch, time, heads, _), room = q.shape, pool.k.shape[1]
    queries = min(time, QUERIES)
    plan = queries, max(1, min(room, PAGES, PAIRS // queries))
    fill = -time % queries
    share = pool.k.shape[3]
    split = jnp.moveaxis(q, 1, 2).reshape(batch, routes, share, heads // (routes * share), time, q.shape[3])
    split = jnp.pad(split, ((0, 0),) * 4 + ((0, fill), (0, 0)))
    found = over_pages(plan, split, *pool, jnp.pad(mine, ((0, 0), (0, fill))))
    o, log_sum = (jnp.moveaxis(x.reshape(batch, heads, *x.shape[4:]), 1, 2)[:, :time] for x in found)
    return o, log_sum


class Block(NamedTuple):
    """Some pages and who sees them: first int32; k, v; owner [B, p]; of [B, p, R] float32, 1 at the owner; seen [B, p,
    1, 1, Q, 1]."""

    first: jax.Array
    k: jax.Array
    v: jax.Array
    owner: jax.Array
    of: jax.Array
    seen: jax.Array


def block_of(pool: Pool, routes: int, mine: jax.Array, count: int, j: jax.Array) -> Block:
    """Block j of `count` pages, seen by the queries `mine` [B, Q]. The last one overlaps the one before, whose pages it
    leaves out, so that no pool is ever padded."""
    first = jnp.minimum(j * count, pool.k.shape[1] - count)
    page = first + jnp.arange(count)
    live = (page >= j * count) & (page < pool.pages[:, None])
    k, v, owner = (window(x, first, count, 1) for x in (pool.k, pool.v, pool.owner))
    seen = live[:, :, None] & mine[:, None, :]
    of = jax.nn.one_hot(owner, routes, dtype=jnp.float32)
    return Block(first, mask_padding(live, k), mask_padding(live, v), owner, of, seen[:, :, None, None, :, None])


def of_pages(x: jax.Array, b: Block) -> jax.Array:
    """[B, R, ...] -> [B, p, ...]: what belongs to the owner of each page."""
    return jnp.take_along_axis(x, b.owner.reshape(*b.owner.shape, *(1,) * (x.ndim - 2)), axis=1)


def of_owners(x: jax.Array, b: Block) -> jax.Array:
    """[B, p, ...] -> [B, R, ...]: sums over the pages of each head."""
    return product("bpr,bp...->br...", b.of, x)


def blocks_in_use(pool: Pool, mine: jax.Array, count: int) -> jax.Array:
    """How many blocks hold a page that a row with any query of `mine` sees."""
    used = jnp.where(jnp.any(mine, axis=1), jnp.minimum(pool.pages, pool.k.shape[1]), 0)
    return -(-jnp.max(used, initial=0) // count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def over_pages(plan, q, k, v, owner, weight, pages, mine) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, R, E, h, T, V] and L [B, R, E, h, T], float32, of attention to pages alone, 0 and MASKED where a
    query of q [B, R, E, h, T, K] sees none; plan: queries (dividing T) and pages of a block; mine [B, T]."""
    queries, count = plan
    pool = Pool(k, v, owner, weight, pages)

    def block(i):
        some, here = window(q, i * queries, queries, 4), window(mine, i * queries, queries, 1)

        def fold(j, carry):
            top, total, o = carry
            b = block_of(pool, q.shape[1], here, count, j)
            scores = product("bpehqk,bpsek->bpehqs", of_pages(some, b), b.k)
            page_top = jnp.max(jnp.where(b.seen, scores, MASKED), axis=-1)
            owned = (b.of > 0)[..., None, None, None]
            largest = jnp.maximum(top, jnp.max(jnp.where(owned, page_top[:, :, None], MASKED), axis=1))
            mass = jnp.exp(jnp.where(b.seen, scores - of_pages(largest, b)[..., None], -jnp.inf))
            shrink = jnp.exp(top - largest)
            values = product("bpehqs,bpsev->bpehqv", mass.astype(v.dtype), b.v)
            total = shrink * total + of_owners(jnp.sum(mass, axis=-1), b)
            return largest, total, shrink[..., None] * o + of_owners(values, b)

        shape = some.shape[:-1]
        starts = (shape, MASKED), (shape, 0), ((*shape, v.shape[-1]), 0)
        carry = tuple(jnp.full(*start, jnp.float32) for start in starts)
        top, total, o = lax.fori_loop(0, blocks_in_use(pool, here, count), fold, carry)
        any_seen = (total > 0) & here[:, None, None, None]
        total = jnp.where(any_seen, total, 1.0)
        o = jnp.where(any_seen[..., None], o / total[..., None], 0.0)
        return o, jnp.where(any_seen, top + jnp.log(total), MASKED)

    if q.shape[4] == queries:
        return block(0)
    o, log_sum = lax.map(block, jnp.arange(q.shape[4] // queries))
    o = jnp.moveaxis(o, 0, 4).reshape(*q.shape[:5], v.shape[-1])
    return o, jnp.moveaxis(log_sum, 0, 4).reshape(q.shape[:5])


def _over_pages_forward(plan, *arguments):
    o, log_sum = over_pages(plan, *arguments)
    return (o, log_sum), (*arguments, o, log_sum)


def _over_pages_backward(plan, saved, cotangents):
    queries, count = plan
    q, k, v, owner, weight, pages, mine, o, log_sum = saved
    pool = Pool(k, v, owner, weight, pages)
    d_o = cotangents[0].astype(v.dtype)
    delta = jnp.sum(d_o.astype(jnp.float32) * o, axis=-1) - cotangents[1]

    def block(carry, i):
        some = tuple(window(x, i * queries, queries, 4) for x in (q, d_o, log_sum, delta))
        here = window(mine, i * queries, queries, 1)

        def step(j, carry):
            d_q, d_k, d_v, d_weight = carry
            b = block_of(pool, q.shape[1], here, count, j)
            some_q, some_d_o, of_log_sum, of_delta = (of_pages(x, b) for x in some)
            scores = product("bpehqk,bpsek->bpehqs", some_q, b.k) - of_log_sum[..., None]
            mass = jnp.exp(jnp.where(b.seen, scores, -jnp.inf))
            d_scores = mass * (product("bpehqv,bpsev->bpehqs", some_d_o, b.v) - of_delta[..., None])
            d_scores = jnp.where(b.seen, d_scores, 0.0)
            narrow = d_scores.astype(q.dtype)
            d_q = d_q + of_owners(product("bpehqs,bpsek->bpehqk", narrow, b.k), b)
            d_k = added(d_k, product("bpehqs,bpehqk->bpsek", narrow, some_q), b.first, 1)
            d_v = added(d_v, product("bpehqs,bpehqv->bpsev", mass.astype(v.dtype), some_d_o), b.first, 1)
            return d_q, d_k, d_v, added(d_weight, jnp.sum(d_scores, axis=(2, 3, 4, 5)), b.first, 1)

        start = jnp.zeros_like(some[0], jnp.float32), *carry
        d_q, *rest = lax.fori_loop(0, blocks_in_use(pool, here, count), step, start)
        return tuple(rest), d_q

    empty = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v, weight))
    (d_k, d_v, d_weight), d_q = lax.scan(block, empty, jnp.arange(q.shape[4] // queries))
    d_q = jnp.moveaxis(d_q, 0, 4).reshape(q.shape)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None, d_weight, None, None


over_pages.defvjp(_over_pages_forward, _over_pages_backward)


def in_slots(q, k, v, used) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, 1, H, V] and L [B, 1, H], float32, of one query a row that sees the slots used [B, C] of k, v."""
    (batch, _, heads, key_dim), key_heads = q.shape, k.shape[2]
    groups = q.reshape(batch, key_heads, heads // key_heads, key_dim)
    scores = jnp.where(used[:, None, None], product("bghk,bcgk->bghc", groups, k), MASKED)
    log_sum = jax.nn.logsumexp(scores, axis=-1)
    o = product("bghc,bcgv->bghv", jnp.exp(scores - log_sum[..., None]).astype(v.dtype), v)
    return o.reshape(batch, 1, heads, v.shape[3]), log_sum.reshape(batch, 1, heads)


def latest(q, open_k, open_v, fill, pool: Pool, routes: int, pages: Callable = paged) -> jax.Array:
    """Outputs [B, 1, H, V] of one query a row that sees the first `fill` [B] slots of its open chunk, and the pages if
    there are any such slots; 0 if not. pages: `paged`, or another with its arguments."""
    used, real = jnp.arange(open_k.shape[1]) < fill[:, None], fill[:, None] > 0
    o, log_sum = in_slots(q, mask_padding(used, open_k), mask_padding(used, open_v), used)
    return mask_padding(real, with_pages(o, log_sum, q, real, routes, pool, pages))
