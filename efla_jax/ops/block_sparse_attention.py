"""Softmax attention to one's own chunk and to selected chunks before it: the softmax branch of NAtS-L (arXiv
2602.03681)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from efla_jax.ops.block_sparse_tiles import Places, Plan, tiles
from efla_jax.ops.dispatch import dispatch, missing_kernel
from efla_jax.ops.document_chunks import DocumentChunks, carried, cells, document_chunks, most_cells
from efla_jax.ops.segments import mask_padding
from efla_jax.ops.sharded import repeat_key_heads, sharded
from efla_jax.shapes import SegmentIds, check_chunk_size, check_floating, check_heads, check_segment_ids, check_shapes

QUERIES, KEYS = 256, 512  # slots of a tile of queries and of a block of keys: scores alive at once, and work in vain


def block_sparse_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G V"],
    selected: Float[Array, "B N R"],
    *,
    initial_state: None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = 64,
    implementation: str = "auto",
    counterfactual: bool = False,
) -> tuple[Float[Array, "B T H V"], None]:
    """Softmax attention of every token to its own chunk, causally, and to all of each selected chunk before it.

        o_t = sum_s p_ts v_s        p_ts = exp(q_t . k_s) / sum_r exp(q_t . k_r)
        s, r <= t in the document of t, and in the chunk of t or in a chunk c with selected_c = 1

    q `[B, T, H, K]`, k `[B, T, G, K]`, v `[B, T, G, V]`: query head h reads key and value head h // (H // G). No hidden
    scale: scale q yourself. selected `[B, N, R]`, 1 or 0 (above 0.5 counts as 1): R divides H, query head h asks
    selected[..., h // (H // R)]; its N = ceil(T / chunk_size) entries are those of `routed_delta_rule`: entry n is for
    the n-th chunk that fills up in the row, chunks counted from each document's first real token. Scores and softmax in
    float32, o in the dtype of v, zero at padding.

    The gradient of selected is that of a real number that multiplies exp(q_t . k_s) for later chunks, float32; of
    entries that are 0 it is taken with `counterfactual` only (it costs all scores), and else is 0.

    Work follows the part selected, memory is O(T). implementation: "chunked" (XLA), "auto"; "pallas", "triton" (no
    kernel yet). initial_state is not supported yet (NotImplementedError), and the state returned is None. Raises
    ValueError for input that does not fit. Source: NAtS-L (arXiv 2602.03681).

    >>> import jax.numpy as jnp
    >>> q, v = jnp.zeros((1, 48, 1, 4)), jnp.repeat(jnp.array([6.0, 3.0, 0.0]), 16).reshape(1, 48, 1, 1)
    >>> selected = jnp.array([1.0, 0.0, 0.0]).reshape(1, 3, 1)
    >>> o, _ = block_sparse_attention(q, q, v, selected, chunk_size=16)    # a zero query averages what it sees
    >>> o[0, jnp.array([15, 31, 47]), 0, 0].tolist()
    [6.0, 4.5, 3.0]
    """
    check_arguments(q, k, v, selected, initial_state, segment_ids, chunk_size)
    batch, time = k.shape[:2]
    if q.size == 0 or v.size == 0:
        return jnp.zeros((*q.shape[:3], v.shape[-1]), v.dtype), None
    chunks = document_chunks(batch, time, chunk_size, segment_ids)
    if segment_ids is not None:
        q, k, v = (mask_padding(chunks.real, x) for x in (q, k, v))
    packed = segment_ids is not None
    table = {"chunked": in_tiles, **{name: missing_kernel("block_sparse_attention") for name in ("pallas", "triton")}}

    def local(_, q, k, v, selected, *chunks):
        arguments = q, k, v, selected, DocumentChunks(*chunks), chunk_size, packed, counterfactual
        return dispatch("block_sparse_attention", implementation, table, ("pallas", "chunked"), arguments)

    k, v = repeat_key_heads(q.shape[2], k, v)
    (selected,) = repeat_key_heads(q.shape[2], selected.astype(jnp.float32))
    # A device has whole rows (S is a letter that no mesh axis splits), and the routing heads of its heads.
    legends = ("BSHK", "BSGK", "BSGV", "BND", *("BS",) * len(chunks))
    return sharded(local, (q, k, v, selected, *chunks), legends, "BSHV"), None


def check_arguments(q, k, v, selected, initial_state: Any, segment_ids, chunk_size: int) -> None:
    """Raise ValueError unless shapes and dtypes fit each other."""
    check_chunk_size(chunk_size)
    if initial_state is not None:
        raise NotImplementedError("block_sparse_attention: no initial_state yet; give whole documents in one call.")
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


def plan_of(count: int, size: int, packed: bool, counterfactual: bool) -> tuple[Plan, int]:
    """The tiles for `count` cells, and how many cells there must be for all to be whole: powers of two."""
    least = 1 << (count - 1).bit_length()
    queries, keys = (min(max(slots // size, 1), least) for slots in (QUERIES, KEYS))
    whole = max(queries, keys)
    return Plan(size, queries, keys, packed, counterfactual), -(-count // whole) * whole


def in_tiles(q, k, v, selected, chunks: DocumentChunks, size: int, packed: bool, counterfactual: bool) -> jax.Array:
    """Outputs [B, T, H, V] in the dtype of v."""
    (batch, time, heads, _), routing = q.shape, selected.shape[2]
    used = most_cells(time, size, packed) if packed else -(-time // size)
    plan, count = plan_of(used, size, packed, counterfactual)
    document, chunk = chunks.document + 1, jnp.cumsum(chunks.real & (chunks.position % size == 0), axis=1)
    if packed:
        found = cells(chunks, size, count)
        entry = found.entry

        def laid(x):
            return carried(x, found.source, found.slot)
    else:
        entry = jnp.where(jnp.arange(count) < time // size, jnp.arange(count), -1)
        entry = jnp.broadcast_to(entry, (batch, count))

        def laid(x):
            return jnp.pad(x, ((0, 0), (0, count * size - time)) + ((0, 0),) * (x.ndim - 2))

    def rows(x):  # [B, S, heads, dim] -> [B R, heads of a routing head, S, dim]
        x = jnp.moveaxis(laid(x), 1, 2)
        return x.reshape(batch * routing, -1, *x.shape[2:])

    def repeated(x):  # [B, ...] -> [B R, ...]
        return jnp.repeat(x, routing, axis=0)

    key_heads = math.lcm(k.shape[2], routing)
    k, v = (jnp.repeat(x, key_heads // x.shape[2], axis=2) for x in (k, v))
    queries = rows(q)
    queries = queries.reshape(batch * routing, key_heads // routing, -1, *queries.shape[2:])
    chosen = jnp.take_along_axis(selected, jnp.maximum(entry, 0)[..., None], axis=1)
    chosen = jnp.where(entry[..., None] >= 0, chosen, 0.0)
    places = Places(*map(repeated, (laid(document), laid(chunk), entry >= 0)))
    o = tiles(plan, queries, rows(k), rows(v), jnp.moveaxis(chosen, 2, 1).reshape(-1, count), places)
    o = jnp.moveaxis(o.reshape(batch, heads, *o.shape[3:]), 1, 2)
    return carried(o, found.slot, found.source) if packed else o[:, :time]
