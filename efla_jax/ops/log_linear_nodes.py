"""The log-linear delta rule over the nodes of its tree, with its gradient: the kernels one after the other, in their
layout (see `kernels/log_linear_delta.py`), and what XLA adds up between them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from efla_jax.ops.fenwick_tree import in_slots, times
from efla_jax.ops.log_linear_blocks import BLOCK, INSIDE, LN2
from efla_jax.ops.pallas import of_key_heads


class Begin(NamedTuple):
    """What rows begin with: states [B, levels, H, K, K] float32 of the nodes that a prefix leaves, each taken to its
    end, and first [B, H, K, K] of what the block that it left open has already, taken to that block's end."""

    states: jax.Array
    first: jax.Array


class Static(NamedTuple):
    """What a compilation depends on: kept, as `kernels.log_linear_delta.Sizes` has it, None where rows are one document
    that begins with them; by level how many nodes there are; the kernels' config, and parameters of Mosaic's
    interpreter, or None for a device."""

    kept: tuple[int, ...] | None
    counts: tuple[int, ...]
    config: Any
    interpret: Any

    @property
    def options(self) -> dict[str, Any]:
        return dict(config=self.config, interpret=self.interpret)


def gate_rows(total, erase, weights, since: list[jax.Array]) -> jax.Array:
    """[B, N, H, rows, 128] float32: G / ln 2, -e, the weights of the levels inside, and for each level of blocks its
    weight times the decay since its node's end. total and erase [B, N, H, 128]; weights [B, N, 128, H, L], of which the
    last serves any further level."""
    weights = jnp.moveaxis(weights, 2, 4)
    wanted = INSIDE + len(since)
    missing = max(wanted - weights.shape[3], 0)
    weights = jnp.concatenate([weights, *[weights[:, :, :, -1:]] * missing], axis=3)[:, :, :, :wanted]
    rows = [total[:, :, :, None] / LN2, -erase[:, :, :, None], weights[:, :, :, :INSIDE]]
    if since:
        decay = jnp.exp(total[:, :, :, None] + jnp.stack(since, axis=3)[..., None])
        rows.append(decay * weights[:, :, :, INSIDE:])
    return jnp.concatenate(rows, axis=3)


def inverse_of(k, erase, documents, config, interpret) -> jax.Array:
    """X of every chunk; erase [B, N, H, 128]. What is made of it has its gradient."""
    from efla_jax.kernels import log_linear_delta as kernel

    k, erase = lax.stop_gradient((k, erase))
    by_head = jnp.moveaxis(erase, 1, 2).reshape(erase.shape[0], erase.shape[2], -1)
    return lax.stop_gradient(kernel.solved(k, by_head, documents, config=config, interpret=interpret))


def sum_of(terms) -> jax.Array:
    """Sum in float32."""
    return functools.reduce(jnp.add, (term.astype(jnp.float32) for term in terms))


def whole(nodes: jax.Array, rests: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(N, S) [..., H, K, K] float32 of nodes [2, ...] and what they were rounded by."""
    exact = nodes.astype(jnp.float32)
    change, state = exact if rests is None else exact + rests.astype(jnp.float32)
    return change, state


def rounded(pair: tuple, dtype, both: bool) -> jax.Array:
    """[2, ...] of two arrays [...], or [4, ...] with what they were rounded by."""
    exact = jnp.stack(pair)
    narrow = exact.astype(dtype)
    return jnp.concatenate([narrow, (exact - narrow.astype(jnp.float32)).astype(dtype)]) if both else narrow


Places = Any  # `kernels.log_linear_delta.Places`


def options_of(static: Static, k, u) -> tuple[dict[str, Any], Any]:
    """What every program is told, and the `kernels.log_linear_delta.Sizes` of the call."""
    from efla_jax.kernels.log_linear_delta import Sizes

    return dict(config=static.config, interpret=static.interpret), Sizes.of(k, u, static.kept)


def with_states(nodes, rests, states: jax.Array | None):
    """Nodes of a level and what they were rounded by with the states [B, H, K, K] of a prefix, which changes nothing
    that is behind it, as the first one."""
    if states is None:
        return nodes, rests
    narrow = states.astype(nodes.dtype)
    nodes = nodes.at[:, :, 0].set(jnp.stack([jnp.zeros_like(narrow), narrow]))
    if rests is None:
        return nodes, rests
    rest = (states - narrow.astype(jnp.float32)).astype(nodes.dtype)
    return nodes, rests.at[:, :, 0].set(jnp.stack([jnp.zeros_like(rest), rest]))


def last_runs(nodes, rests, latest: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(N, S) of the nodes `latest` [B], of the last one without it."""
    if latest is None:
        return whole(nodes[:, :, -1], None if rests is None else rests[:, :, -1])

    def of(x):
        return None if x is None else x[:, np.arange(x.shape[1]), latest]

    return whole(of(nodes), of(rests))


def made(x: tuple, begin: Begin | None, places: Places, static: Static) -> tuple:
    """(o, by level the (N, S) [B, H, K, K] float32 of the last run), and the nodes of every level. x: the arguments of
    `solve`."""
    from efla_jax.kernels import log_linear_delta, log_linear_delta_read, log_linear_delta_tree

    q, k, u, inverse, gates, vectors, fades = x
    options, sizes = options_of(static, k, u)
    levels, runs, nodes, rests = [], {}, None, None
    for level, count in enumerate(static.counts):
        if level == 0:
            nodes = log_linear_delta.nodes(k, u, inverse, vectors, places.nodes, count=count, **options)
            if begin is not None:
                first, row = jnp.where(places.nodes[:, 0] < 0, count, places.nodes[:, 0]), np.arange(sizes.batch)
                nodes = nodes.at[1, row, first].add(begin.first.astype(nodes.dtype), mode="drop")
        else:
            up = None if places.ups is None else places.ups[level - 1]
            fade = jnp.exp(fades[level - 1])
            nodes, rests = log_linear_delta_tree.merge(nodes, rests, fade, up, count=count, **options)
        nodes, rests = with_states(nodes, rests, None if begin is None else begin.states[:, level])
        if places.latest is not None or count % 2:
            runs[level] = last_runs(nodes, rests, None if places.latest is None else 2 * places.latest[:, level])
        levels.append(nodes)
    read = tuple(levels[: sizes.depth])
    o = log_linear_delta_read.read_out(q, k, u, inverse, gates, read, places, sizes=sizes, **options)
    return (o, runs), levels


@functools.partial(jax.custom_vjp, nondiff_argnums=(9,))
def solve(q, k, u, inverse, gates, vectors, fades, begin: Begin | None, places: Places, static: Static):
    """(o [B, T, H, K], by level the (N, S) [B, H, K, K] float32 of the last run, where their number is odd, or with
    documents the first one of the latest pair).

    In the kernels' layout (see `kernels/log_linear_delta.py`); fades: by level the log decays [B, P, H] over the right
    half of each pair. The gradients of k and of e, in gates and vectors, are those through the inverse, too."""
    return _forward(q, k, u, inverse, gates, vectors, fades, begin, places, static)[0]


def _forward(q, k, u, inverse, gates, vectors, fades, begin, places, static):
    x = q, k, u, inverse, gates, vectors, fades
    out, levels = made(x, begin, places, static)
    return out, (x, levels, begin is not None, places)


def _backward(static, saved, cotangents):
    from efla_jax.kernels import log_linear_delta_gradients, log_linear_delta_inside, log_linear_delta_read
    from efla_jax.kernels.log_linear_delta_node_gradients import node_gradients

    (x, levels, begins, places), (d_o, d_runs) = saved, cotangents
    latest = places.latest
    (q, k, u, inverse, gates, vectors, fades) = x
    options, sizes = options_of(static, k, u)
    read, d_q, d_reads, d_levels = tuple(levels[: sizes.depth]), jnp.zeros_like(u), None, []
    where = dict(sizes=sizes, **options)
    if sizes.depth:
        kept = log_linear_delta_read.queries(q, k, inverse, gates, read, places, **where)
        d_q, d_kept, d_reads = log_linear_delta_gradients.descend(d_o, gates, kept, read, places, **where)
        d_levels = log_linear_delta_gradients.sums(d_o, gates, kept, d_kept, places, **where)
    if latest is not None:
        d_levels = [with_run(d, latest[:, level], d_runs[level]) for level, d in enumerate(d_levels)]
    d_nodes, d_fades = back_to_blocks(levels, fades, d_levels, d_runs if latest is None else {}, places, options)
    d_q, d_k, d_u, d_gates = log_linear_delta_inside.inside_gradients(
        q, k, u, inverse, gates, d_o, d_q, places, **where
    )
    d_k, d_u = [with_first_chunks(*d_k)], [with_first_chunks(*d_u)]
    d_vectors, d_begin = jnp.zeros_like(vectors), None
    if levels:
        count = static.counts[0]
        more = node_gradients(k, u, inverse, vectors, d_nodes[0], places.nodes, count=count, **options)
        of_k, of_u, d_vectors = in_nodes(more, count, places.nodes)
        d_k, d_u = [*d_k, *of_k], [*d_u, of_u]
    if begins:
        d_begin = begin_gradients(d_nodes, places)
    d_gates = gate_gradients(d_gates, d_reads, places, sizes)
    d_k, d_u = sum_of(d_k).astype(k.dtype if k.shape == u.shape else jnp.float32), sum_of(d_u).astype(u.dtype)
    d_x = of_key_heads(d_q, q), of_key_heads(d_k, k), d_u, jnp.zeros_like(inverse), d_gates, d_vectors, d_fades
    nothing = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), places)
    return *d_x, d_begin, nothing


solve.defvjp(_forward, _backward)


def gate_gradients(d_gates, d_reads, places, sizes) -> jax.Array:
    """Of what is inside blocks, and of the coefficients of nodes: selects, since nothing is written where a block reads
    no node, nor in empty blocks."""
    d_gates = d_gates.at[:, :, :, 0].multiply(LN2)  # G is in units of ln 2
    numbers = jnp.arange(sizes.blocks)[None] if places.numbers is None else places.numbers
    if places.numbers is not None:
        d_gates = jnp.where((numbers >= 0)[..., None, None, None], d_gates, 0.0)
    if d_reads is None:
        return d_gates
    live = (numbers[..., None] >> np.arange(sizes.depth) & 1 == 1) & (numbers >= 0)[..., None]
    return jnp.concatenate([d_gates, jnp.where(live[:, :, None, :, None], d_reads, 0.0)], axis=3)


def with_run(d_level, pair, d_run: tuple) -> jax.Array:
    """Cotangents [B, P, H, 2, K, K] of the first nodes of pairs, with those of a last run, the first of `pair` [B]."""
    d = jnp.stack(d_run, axis=2).astype(d_level.dtype)
    return d_level.at[np.arange(pair.shape[0]), pair].add(d)


def in_nodes(gradients: tuple, count: int, places) -> tuple:
    """Of `node_gradients` those of every block, 0 in those that are none."""
    d_k, d_u, d_vectors = gradients

    def of(x, is_node):
        return jnp.where(is_node.reshape(*is_node.shape, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))

    blocks = d_vectors.shape[1]
    if places is None and count == blocks:
        return gradients
    is_node = (np.arange(blocks) < count)[None] if places is None else places >= 0
    of_token = jnp.repeat(is_node, BLOCK, axis=1)
    return tuple(of(x, of_token) for x in d_k), of(d_u, of_token), of(d_vectors, is_node)


def begin_gradients(d_nodes: list, places) -> Begin:
    """Of a prefix's states, from the cotangents of the nodes of every level."""

    def of(d, first):
        """dS of the nodes `first` [B] of a level."""
        row = np.arange(first.shape[0])
        left, pair = d[0], jnp.maximum(first, 0) // 2
        count = left.shape[0] // 2
        found = sum_of(left[2 * i + 1, row, pair] for i in range(count))
        if len(d) == 1:
            return found
        right = sum_of(d[2][i, row, pair] for i in range(count))
        return jnp.where((first % 2 == 1)[:, None, None, None], right, found)

    slots = jnp.zeros_like(places.nodes[:, 0])
    first = jnp.where((places.nodes[:, 0] >= 0)[:, None, None, None], of(d_nodes[0], places.nodes[:, 0]), 0.0)
    return Begin(jnp.stack([of(d, slots) for d in d_nodes], axis=1), first)


def back_to_blocks(levels: list, fades: list, d_levels: list, d_runs: dict, places, options: dict) -> tuple:
    """Cotangents of the nodes of every level, as `node_gradients` takes those of blocks, and of fades, from the highest
    level down. d_runs: of the last run where their number is odd, which is in no pair."""
    from efla_jax.kernels.log_linear_delta_tree import Cotangents, unmerge

    if not levels:
        return [], []

    def last(level: int) -> jax.Array:
        """[2 or 4, B, 1, H, K, K] of the last run of an odd number, which is read where its level is."""
        pair = tuple(x.astype(jnp.float32) for x in d_runs[level])
        if level < len(d_levels):
            read = d_levels[level][:, levels[level].shape[2] // 2]
            pair = tuple(x + read[:, :, kind] for kind, x in enumerate(pair))
        return rounded(pair, levels[level].dtype, level > 0)[:, :, None]

    top = len(levels) - 1
    if places.ups is None:
        d = Cotangents(last(top), None, None)
    else:
        pair = tuple(d_levels[top][:, :, :, kind].astype(jnp.float32) for kind in range(2))
        d = Cotangents(rounded(pair, levels[top].dtype, top > 0), None, None)
    found, d_fades = [d], []
    for level in reversed(range(top)):
        fade, up = jnp.exp(fades[level]), None if places.ups is None else places.ups[level]
        d, d_fade = unmerge(levels[level], fade, d, d_levels[level], up, lowest=level == 0, **options)
        d_fades.append(d_fade)
        if level in d_runs:
            d = d._replace(left=jnp.concatenate([d.left, last(level)], axis=2))
        found.append(d)
    return [tuple(x for x in d if x is not None) for d in reversed(found)], d_fades[::-1]


def with_first_chunks(every: jax.Array, first: jax.Array) -> jax.Array:
    """The terms of every chunk [B, T, H, K] and those of the blocks' first chunks [B, T / 2, H, K], added; float32."""
    shape = every.shape
    every = every.reshape(shape[0], -1, 2, BLOCK // 2, *shape[2:]).astype(jnp.float32)
    first = first.reshape(shape[0], -1, 1, BLOCK // 2, *shape[2:]).astype(jnp.float32)
    return (every + jnp.pad(first, ((0, 0), (0, 0), (0, 1)) + ((0, 0),) * 3)).reshape(shape)


def behind_runs(dtype, runs: dict[int, tuple], decays: dict[int, jax.Array], levels: int) -> jax.Array:
    """States [B, H, L, K, K] behind the last block: every last run's, taken over the smaller runs behind it. runs: by
    level its (N, S) [B, H, K, K] float32, zeros where a row has none; decays: likewise its log decay [B, H]."""
    states: dict[int, jax.Array] = {}
    for level in sorted(runs, reverse=True):
        change, own = runs[level]
        for other, state in states.items():
            state = jnp.exp(decays[level])[..., None, None] * state
            states[other] = state + times(dtype, "bhkl,bhlv->bhkv", change, state)
        states[level] = own
    lowest = min(INSIDE, levels - 1)
    return in_slots({level: state[:, :, None, None] for level, state in states.items()}, lowest, levels)
