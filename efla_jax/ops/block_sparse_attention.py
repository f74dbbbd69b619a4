"""Softmax attention to one's own chunk and to selected chunks before it: the softmax branch of NAtS-L (arXiv
2602.03681)."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from efla_jax.ops import pallas_attention, pallas_attention_cache
from efla_jax.ops.attention_blocks import MASKED
from efla_jax.ops.block_sparse_tiles import Places, Plan, tiles
from efla_jax.ops.dispatch import check_implementation, dispatch, missing_kernel, on_gpu
from efla_jax.ops.document_chunks import (
    DocumentChunks,
    carried,
    cells,
    document_chunks,
    most_cells,
    placed,
    still_open,
)
from efla_jax.ops.segments import mask_padding
from efla_jax.ops.selected_pages import (
    Held,
    Pool,
    SelectedKV,
    advanced,
    check_selected_kv,
    init_selected_kv,
    latest,
    outgrown,
    paged,
    with_pages,
)
from efla_jax.ops.sharded import repeat_key_heads, sharded
from efla_jax.shapes import SegmentIds, check_chunk_size, check_floating, check_heads, check_segment_ids, check_shapes

QUERIES, KEYS = 256, 512  # slots of a tile of queries and of a block of keys: scores alive at once, and work in vain
POOL = ("BMCEK", "BMCEV", "BM", "BM", "B")  # legends of a `Pool`, the first fields of a `SelectedKV`


def block_sparse_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G V"],
    selected: Float[Array, "B N R"],
    *,
    initial_state: SelectedKV | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
    counterfactual: bool = False,
    own_chunk: bool = True,
) -> tuple[Float[Array, "B T H V"], SelectedKV]:
    """Softmax attention of every token to its own chunk, causally, and to all of each selected chunk before it.

        o_t = sum_s p_ts v_s        p_ts = exp(q_t . k_s) / sum_r exp(q_t . k_r)
        s, r <= t in the document of t, and in the chunk of t or in a chunk c with selected_c = 1

    q `[B, T, H, K]`, k `[B, T, G, K]`, v `[B, T, G, V]`: query head h reads key and value head h // (H // G). No hidden
    scale: scale q yourself. selected `[B, N, R]`, 1 or 0 (above 0.5 counts as 1): R divides H, query head h asks
    selected[..., h // (H // R)]; its N = ceil(T / chunk_size) entries are those of `routed_delta_rule`: entry n is for
    the n-th chunk that fills up in the row during this call, chunks counted from each document's first real token.
    Scores and softmax in float32, o in the dtype of v, zero at padding.

    The gradient of selected is that of a real number that multiplies exp(q_t . k_s) for later chunks, of later calls
    too, float32; of entries that are 0 it is taken with `counterfactual` only (it costs all scores, and lacks later
    calls, which nothing that was not selected reaches), and else is 0. Without `own_chunk` a token sees the selected
    chunks before its own alone, and o is 0 where there are none: an ablation, by XLA and not with `counterfactual`.

    A `SelectedKV` goes on in any pieces, with the same chunk_size, R and G; without one the state returned has room for
    all that T tokens may select. A document that selects more than the room is a ValueError where that is known when
    the op is called; under `jit` the outputs of its further tokens are NaN. Work follows the part selected, memory is
    O(T). implementation: "chunked" (XLA), "pallas" (Hopper GPUs: chunks of 64, not `counterfactual`; of what its
    kernels do not cover NotImplementedError with the reason), "auto" (kernels where a GPU has timed them, else
    "chunked"), "triton" (no kernel yet). Raises ValueError for input that does not fit. Source: NAtS-L (arXiv
    2602.03681).

    >>> import jax.numpy as jnp
    >>> q, v = jnp.zeros((1, 48, 1, 4)), jnp.repeat(jnp.array([6.0, 3.0, 0.0]), 16).reshape(1, 48, 1, 1)
    >>> selected = jnp.array([1.0, 0.0, 0.0]).reshape(1, 3, 1)
    >>> o, state = block_sparse_attention(q, q, v, selected, chunk_size=16)    # a zero query averages what it sees
    >>> o[0, jnp.array([15, 31, 47]), 0, 0].tolist(), state.pages.tolist()
    ([6.0, 4.5, 3.0], [1])
    """
    options = checked(Options(chunk_size, implementation, counterfactual, own_chunk))
    check_arguments(q, k, v, selected, initial_state, segment_ids, chunk_size)
    kv = starting(k, v, selected, chunk_size) if initial_state is None else jax.tree.map(jnp.asarray, initial_state)
    if k.shape[1] == 0:
        check_implementation("block_sparse_attention", implementation, (*SOLVERS, "triton"))
        return jnp.zeros((*q.shape[:3], v.shape[-1]), v.dtype), kv
    selected = selected.astype(jnp.float32)
    if initial_state is None:
        return whole(options, q, k, v, selected, kv, segment_ids)
    lost = outgrown(kv, document_chunks(k.shape[0], k.shape[1], chunk_size, segment_ids, kv.position), selected)
    call = one_token if k.shape[1] == 1 else continued
    o, state = call(options, q, k, v, selected, kv, segment_ids)
    nan = np.asarray(np.nan, o.dtype)  # of numpy: jax_debug_nans would stop at an array of jax, used or not
    return jnp.where(lost[:, :, None, None], nan, o), state


def check_arguments(q, k, v, selected, initial_state, segment_ids, chunk_size: int) -> None:
    """Raise ValueError unless shapes and dtypes fit each other."""
    check_chunk_size(chunk_size)
    sizes = check_shapes({"q": (q, "BTHK"), "k": (k, "BTGK"), "v": (v, "BTGV"), "selected": (selected, "BNR")})
    check_floating({"q": q, "k": k, "v": v, "selected": selected})
    check_heads(sizes["G"], sizes["H"])
    time, heads, routing = sizes["T"], sizes["H"], sizes["R"]
    if routing < 1 or heads % routing:
        raise ValueError(
            f"selected: R={routing} routing heads, but they must divide the H={heads} query heads (head h asks"
            " routing head h // (H // R)). Change one of them."
        )
    if sizes["N"] != -(-time // chunk_size):
        raise ValueError(
            f"selected: shape {selected.shape} has N={sizes['N']} entries, but T={time} tokens fill at most"
            f" {-(-time // chunk_size)} chunks of {chunk_size}: N = ceil(T / chunk_size). Give one entry for each."
        )
    check_segment_ids(segment_ids, sizes["B"], time)
    if initial_state is not None:
        check_selected_kv(initial_state, q, k, v, selected, chunk_size)


class Options(NamedTuple):
    """Arguments of the op that are no arrays."""

    size: int
    implementation: str
    counterfactual: bool
    own: bool


def checked(options: Options) -> Options:
    """The same. Raises ValueError for what do not go together."""
    if options.counterfactual and not options.own:
        raise ValueError(
            "counterfactual: True without own_chunk, but where a query sees nothing an entry that is 0 has no gradient."
            " Leave one of them as it is by default."
        )
    return options


def starting(k, v, selected, size: int) -> SelectedKV:
    """An empty cache with room for all that these tokens may select."""
    (batch, time, key_heads, key_dim), routes = k.shape, selected.shape[2]
    room = time // size * routes
    kv = init_selected_kv(batch, room, size, key_heads, routes, key_dim, v.shape[3], k.dtype)
    return kv._replace(v=kv.v.astype(v.dtype), open_v=kv.open_v.astype(v.dtype))


# What a call does, from its beginning, with a cache, and for one token with a cache: (options, q, k, v, selected, kv,
# segment_ids) -> (o, state).


def whole(options: Options, q, k, v, selected, kv: SelectedKV, segment_ids) -> tuple[jax.Array, SelectedKV]:
    chunks = document_chunks(k.shape[0], k.shape[1], options.size, segment_ids)
    packed = segment_ids is not None
    if packed:
        q, k, v = (mask_padding(chunks.real, x) for x in (q, k, v))

    def local(solver, q, k, v, selected, *chunks):
        return in_cells(solver.cells, q, k, v, selected, DocumentChunks(*chunks), options, packed, packed)[0]

    keys = repeat_key_heads(q.shape[2], k, v)
    (routed,) = repeat_key_heads(q.shape[2], selected)
    # A device has whole rows (S is a letter that no mesh axis splits), and the routing heads of its heads.
    legends = ("BSHK", "BSGK", "BSGV", "BND", *("BS",) * len(chunks))
    o = over_mesh(options, local, (q, *keys, routed, *chunks), legends, "BSHV")
    return o, advanced(kv, chunks, selected, held_by(k, v, chunks, selected.shape[1], options.size))


def continued(options: Options, q, k, v, selected, kv: SelectedKV, segment_ids) -> tuple[jax.Array, SelectedKV]:
    """The open chunk's tokens stand in front of the call's, their outputs are not asked for."""
    size, (batch, time) = options.size, k.shape[:2]
    fill = kv.position % size
    front = jnp.arange(size) < fill[:, None]
    ids = jnp.ones((batch, time), jnp.int32) if segment_ids is None else segment_ids
    first = jnp.take_along_axis(ids, jnp.argmax(ids != 0, axis=1)[:, None], axis=1)
    ids = jnp.concatenate([jnp.where(front, jnp.where(first == 0, 1, first), 0), ids], axis=1)
    chunks = document_chunks(batch, size + time, size, ids, kv.position - fill)
    k, v = (jnp.concatenate([x.astype(y.dtype), y], axis=1) for x, y in ((kv.open_k, k), (kv.open_v, v)))
    q = jnp.pad(q, ((0, 0), (size, 0), (0, 0), (0, 0)))
    q, k, v = (mask_padding(chunks.real, x) for x in (q, k, v))
    packed, fields = segment_ids is not None, len(chunks)

    def local(solver, q, k, v, selected, *rest):
        chunks, pool = DocumentChunks(*rest[:fields]), Pool(*rest[fields:])
        o, log_sum = in_cells(solver.cells, q, k, v, selected, chunks, options, packed, True)
        mine = (chunks.real & (chunks.document == 0))[:, size:]
        o = o[:, size:], log_sum[:, size:], q[:, size:], mine
        o = with_pages(*o, selected.shape[2], pool, solver.pages)
        return mask_padding(chunks.real[:, size:], o)

    # Rows are split, heads are not: a page has those of one routing head, whichever that is.
    legends = ("BSQK", "BSZK", "BSZV", "BNR", *("BS",) * fields, *POOL)
    arrays = (q, k, v, selected, *chunks, *kv[:5])
    o = over_mesh(options, local, arrays, legends, "BSQV")
    return o, advanced(kv, chunks, selected, held_by(k, v, chunks, selected.shape[1], size))


def one_token(options: Options, q, k, v, selected, kv: SelectedKV, segment_ids) -> tuple[jax.Array, SelectedKV]:
    """The token takes its slot of the open chunk; nothing is laid out anew. What it may add to the pool is written
    before the pool is read, up to where it ended: the other way round XLA copies the pool."""
    size, batch = options.size, k.shape[0]
    chunks = document_chunks(batch, 1, size, segment_ids, kv.position)
    q, k, v = (mask_padding(chunks.real, x) for x in (q, k, v))
    real, fill = chunks.real[:, 0], kv.position % size
    slot = jnp.where(real, fill, size)

    def put(slots, x):
        return slots.at[jnp.arange(batch), slot].set(x[:, 0].astype(slots.dtype), mode="drop", unique_indices=True)

    open_k, open_v = put(kv.open_k, k), put(kv.open_v, v)

    def local(solver, q, open_k, open_v, selected, fill, *pool):
        if not options.own:
            nothing = jnp.zeros((*q.shape[:3], v.shape[3])), jnp.full(q.shape[:3], MASKED)
            return with_pages(*nothing, q, fill[:, None] > 0, selected.shape[2], Pool(*pool), solver.pages)
        return solver.latest(q, open_k, open_v, fill, Pool(*pool), selected.shape[2])

    state = advanced(kv, chunks, selected, Held(open_k[:, None], open_v[:, None], open_k, open_v))
    legends = ("BSQK", "BCZK", "BCZV", "BNR", "B", *POOL)
    arrays = (q, open_k, open_v, selected, jnp.where(real, fill + 1, 0), *state[:4], kv.pages)
    return over_mesh(options, local, arrays, legends, "BSQV").astype(v.dtype), state


class Solver(NamedTuple):
    """Who solves what: cells of whole rows, see `in_tiles`; pages, see `paged`; a single token, see `latest`."""

    cells: Callable
    pages: Callable
    latest: Callable


def over_mesh(options: Options, local: Callable, arrays, legends, result: str) -> jax.Array:
    """local(solver, *arrays) on every device's rows (and heads), by the implementation asked for."""
    op = "block_sparse_attention"
    auto = ("pallas", "chunked") if on_gpu() and options.own else ("chunked",)
    table: dict[str, Callable] = {name: functools.partial(local, solver) for name, solver in SOLVERS.items()}
    table["triton"] = missing_kernel(op)

    def run(_, *arrays):
        return dispatch(op, options.implementation, table, auto, arrays)

    return sharded(run, arrays, legends, result)


def held_by(k, v, chunks: DocumentChunks, count: int, size: int) -> Held:
    """The `count` chunks that fill up, and the open one behind them, of k [B, T, G, K], v [B, T, G, V]."""
    own, _ = still_open(chunks)
    batch, time = own.shape
    chunk = jnp.where(chunks.full, chunks.number, count)
    kept = chunks.full | own
    slot = jnp.where(kept, chunk * size + chunks.position % size, -1)
    slots = (count + 1) * size
    source = placed(jnp.where(kept, slot, slots + jnp.arange(time)), slots)
    k, v = (carried(x, source, slot).reshape(batch, count + 1, size, *x.shape[2:]) for x in (k, v))
    return Held(k[:, :-1], v[:, :-1], k[:, -1], v[:, -1])


def plan_of(count: int, packed: bool, options: Options) -> tuple[Plan, int]:
    """The tiles for `count` cells, and how many cells there must be for all to be whole: powers of two."""
    size = options.size
    least = 1 << (count - 1).bit_length()
    queries, keys = (min(max(slots // size, 1), least) for slots in (QUERIES, KEYS))
    whole = max(queries, keys)
    return Plan(size, queries, keys, packed, options.counterfactual, options.own), -(-count // whole) * whole


def in_cells(
    solve: Callable, q, k, v, selected, chunks: DocumentChunks, options: Options, packed: bool, moved: bool
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, V] in the dtype of v and L [B, T, H] float32. packed: rows may hold several documents; moved:
    chunks do not stand where a row without padding would begin them. solve: `in_tiles`, or another with its
    arguments."""
    (batch, time, _, _), size = q.shape, options.size
    if q.size == 0 or v.size == 0:
        return jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype), jnp.zeros(q.shape[:3], jnp.float32)
    used = most_cells(time, size, True) if packed else -(-(time - moved) // size)
    plan, count = plan_of(used, packed, options)
    document, chunk = chunks.document + 1, jnp.cumsum(chunks.real & (chunks.position % size == 0), axis=1)
    if moved:
        found = cells(chunks, size, count)
        entry = found.entry

        def laid(x):
            return carried(x, found.source, found.slot)
    else:
        entry = jnp.where(jnp.arange(count) < time // size, jnp.arange(count), -1)
        entry = jnp.broadcast_to(entry, (batch, count))

        def laid(x):
            return jnp.pad(x, ((0, 0), (0, count * size - time)) + ((0, 0),) * (x.ndim - 2))

    chosen = jnp.take_along_axis(selected, jnp.maximum(entry, 0)[..., None], axis=1)
    chosen = jnp.where(entry[..., None] >= 0, chosen, 0.0)
    o, log_sum = solve(plan, *map(laid, (q, k, v)), chosen, Places(laid(document), laid(chunk), entry >= 0))
    if moved:
        return carried(o, found.slot, found.source), carried(log_sum, found.slot, found.source)
    return o[:, :time], log_sum[:, :time]


def in_tiles(plan: Plan, q, k, v, chosen, places: Places) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, S, H, V] in the dtype of v and L [B, S, H] float32 of rows of cells, by XLA: q [B, S, H, K], k [B, S,
    G, K], v [B, S, G, V], chosen [B, M, R], places with B rows."""
    (batch, _, heads, _), routing = q.shape, chosen.shape[2]

    def rows(x):  # [B, S, heads, dim] -> [B R, heads of a routing head, S, dim]
        x = jnp.moveaxis(x, 1, 2)
        return x.reshape(batch * routing, -1, *x.shape[2:])

    key_heads = math.lcm(k.shape[2], routing)
    k, v = (jnp.repeat(x, key_heads // x.shape[2], axis=2) for x in (k, v))
    queries = rows(q)
    queries = queries.reshape(batch * routing, key_heads // routing, -1, *queries.shape[2:])
    places = Places(*(jnp.repeat(x, routing, axis=0) for x in places))
    chosen = jnp.moveaxis(chosen, 2, 1).reshape(batch * routing, -1)
    found = tiles(plan, queries, rows(k), rows(v), chosen, places)
    o, log_sum = (jnp.moveaxis(x.reshape(batch, heads, *x.shape[3:]), 1, 2) for x in found)
    return o, log_sum


def by_kernels(*arguments) -> tuple[jax.Array, jax.Array]:
    """`in_tiles` by GPU kernels."""
    return pallas_attention.block_sparse(*arguments)


def pages_by_kernels(*arguments) -> tuple[jax.Array, jax.Array]:
    """`selected_pages.paged` by GPU kernels."""
    return pallas_attention_cache.paged(*arguments)


def latest_by_kernel(*arguments) -> jax.Array:
    """`selected_pages.latest` by a GPU kernel."""
    return pallas_attention_cache.latest_of_pages(*arguments)


SOLVERS = {
    "chunked": Solver(in_tiles, paged, latest),
    "pallas": Solver(by_kernels, pages_by_kernels, latest_by_kernel),
}
