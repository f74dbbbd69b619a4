"""The layout of the log-linear delta rule's kernels for packed and padded rows and for those behind a prefix.

Tokens are moved to cells (see `log_linear_cells.py`), which the kernels see as they do the blocks of a row. Nodes are
runs of a document's cells: those of a level lie in the order in which they end, in pairs, so that tables say what is
where (`kernels.log_linear_delta.Places`). A prefix's slots from 128 tokens on are nodes that change nothing, as what is
behind the prefix has changed nothing yet: the first of the first pair of every level. The slots below are read by the
tokens of the first cell, by "chunked", and the cell's own node has them when it is whole.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from efla_jax.ops.arguments import Recurrence
from efla_jax.ops.chunked import FORGET
from efla_jax.ops.document_chunks import carried
from efla_jax.ops.fenwick import Fenwick, states_of
from efla_jax.ops.fenwick_chunked import sweep
from efla_jax.ops.log_linear_blocks import BLOCK, INSIDE, slots_for, summed
from efla_jax.ops.log_linear_cells import Cells, cells
from efla_jax.ops.log_linear_nodes import Begin, Places, Static, behind_runs, gate_rows, inverse_of, solve
from efla_jax.ops.pallas_log_linear_cells import beginning, since_ends

CHUNK = 64  # tokens of a chunk of "chunked", by which open cells are gone through
PLACE_BITS = 24  # of the place of a block: positions are int32


class Tree(NamedTuple):
    """The trees of the rows. number [B, M]: of each cell, -1 if it is empty; ends by level [B, P]: the cell with which
    the right half of a pair ends, -1 if there is none; places: tables."""

    number: jax.Array
    ends: list[jax.Array]
    places: Places


class Depth(NamedTuple):
    """Levels of blocks of a call. few: below this bit of a place levels have weights of their own; top: the bit that
    stands for all higher ones, which no row carries into; whole: cells of a row that may be whole."""

    few: int
    top: int
    whole: int
    prefix: bool

    @classmethod
    def of(cls, time: int, levels: int, prefix: bool) -> "Depth":
        if not prefix:
            whole = max(1, time // BLOCK)  # a level at least: the tables and the tree are not made of nothing
            return cls(whole.bit_length(), whole.bit_length(), whole, False)
        whole = -(-time // BLOCK)
        few = min(slots_for(levels, 1 << 30) - 1, PLACE_BITS)
        return cls(few, max(few, ((1 << few) - 1 + whole).bit_length()), whole, True)

    @property
    def levels(self) -> int:
        return self.top + self.prefix

    def number(self, place, since):
        """Numbers of blocks `since` blocks after the prefix's last, at this place: the same bits, and one for all that
        share a weight."""
        if not self.prefix:
            return place + since
        low = place & ((1 << self.few) - 1)
        return jnp.where(place >> self.few > 0, low | (1 << self.top), low) + since

    def pairs(self, level: int) -> int:
        """Pairs of a level, at most: a document has one for two whole runs, or for one; the prefix has another one, and
        a run that it began."""
        return max(1, self.whole >> level) + 2 * self.prefix

    def kept(self, level: int, cells: int) -> int:
        """Blocks that read a level, at most: of a document of w whole cells, or a part of one, half of w + 1 places."""
        if self.prefix:
            return min(cells, (self.whole + 1) // 2 + (self.whole << level) // ((2 << level) - 1) + (1 << level) + 1)
        return max(1, (self.whole << level) // ((2 << level) - 1))


def by_rank(values, there, rank, count: int, otherwise: int) -> jax.Array:
    """[B, count]: of the values [B, M] that are there the one with each rank [B, M], else the other one."""
    found = there[:, None] & (rank[:, None] == np.arange(count)[:, None])
    return jnp.max(jnp.where(found, values[:, None], otherwise), axis=2)


def tree_of(number: jax.Array, whole: jax.Array, code: jax.Array, depth: Depth) -> Tree:
    """The trees over cells of these numbers [B, M], from which of them are whole."""
    from efla_jax.kernels import log_linear_delta as kernel

    batch, count = number.shape
    cell, given = np.arange(count, dtype=np.int32)[None], int(depth.prefix)
    after = number + 1
    nodes, pairs, kept, ups, ends, readers, latest, base, below = [], [], [], [], [], [], [], 0, None
    for level in range(depth.levels):
        ended = whole & (after & ((1 << level) - 1) == 0)
        right = ended & (after >> level & 1 == 0)
        left = ended & ~right
        rank = jnp.cumsum(left, axis=1, dtype=jnp.int32) - 1 + given
        node, pair = jnp.where(ended, 2 * rank + right, -1), rank - left
        if below is not None:
            ups.append(by_rank(node, *below, depth.pairs(level - 1), -1))
        below = right, rank
        ends.append(by_rank(jnp.broadcast_to(cell, number.shape), right, rank, depth.pairs(level), -1))
        reads = (number >= 0) & (number >> level & 1 == 1)
        base = base if level >= kernel.SPAN.bit_length() else 0
        kept.append(base + jnp.cumsum(reads, axis=1, dtype=jnp.int32) - reads)
        base += depth.kept(level, count)
        mine = reads[:, None] & (pair[:, None] == np.arange(depth.pairs(level))[:, None])
        begin = jnp.min(jnp.where(mine, cell[:, None], count), axis=2)
        first = jnp.any(mine & (number >> (level + 1) == 0)[:, None], axis=2)
        readers.append(jnp.stack([begin, jnp.sum(mine, axis=2, dtype=jnp.int32), first.astype(jnp.int32)], axis=2))
        nodes.append(node)
        pairs.append(jnp.maximum(pair, 0))
        latest.append(jnp.maximum(rank[:, -1], 0))
    ups.append(jnp.full((batch, depth.pairs(depth.levels - 1)), -1, jnp.int32))
    places = kernel.Places(number, code, nodes[0], jnp.stack(pairs, 1), jnp.stack(kept, 1), tuple(ups), tuple(readers))
    return Tree(number, ends, places._replace(latest=jnp.stack(latest, axis=1)))


def right_decays(sums: jax.Array, ends: list[jax.Array]) -> list[jax.Array]:
    """By level the log decays [B, P, H] over the right halves of pairs, from those of cells [B, M, H]."""
    cell, found = np.arange(sums.shape[1]), []
    for level, end in enumerate(ends):
        seen = (cell <= end[..., None]) & (cell > end[..., None] - (1 << level))
        found.append(over_cells(jnp.asarray(seen), sums))
    return found


def over_cells(seen: jax.Array, sums: jax.Array) -> jax.Array:
    """[B, P, H] sums over the cells [B, M, H] that are seen [B, P, M], by a product (see `since_ends`)."""
    return jnp.einsum("bpm,bmh->bph", seen.astype(jnp.float32), sums, precision=lax.Precision.HIGHEST)


class Ending(NamedTuple):
    """Where a row's last document ends: number [B] and cell [B] of the block that is open behind it, whether that has
    tokens [B], and which tokens of the cell are the document's [B, 128]."""

    number: jax.Array
    cell: jax.Array
    is_open: jax.Array
    own: jax.Array


def ending(f: Fenwick, where: Cells, number: jax.Array, depth: Depth) -> Ending:
    end = f.position[:, -1] + 1
    used = jnp.sum(number >= 0, axis=1, dtype=jnp.int32)
    is_open = (end % BLOCK != 0) & (used > 0)
    cell = jnp.where(is_open, used - 1, used)
    here = jnp.minimum(cell, number.shape[1] - 1)[:, None]
    code = jnp.take_along_axis(where.code, here[..., None], axis=1)[:, 0]
    document = jnp.where(code < 1 << 24, code // BLOCK, -1)
    own = (document == jnp.max(document, axis=1, keepdims=True)) & (document >= 0) & is_open[:, None]
    place = end // BLOCK
    if not depth.prefix:
        return Ending(place, cell, is_open, own)
    before = f.start // BLOCK
    last = jnp.where(goes_on(f), depth.number(before, place - before), place)
    return Ending(last, cell, is_open, own)


def goes_on(f: Fenwick) -> jax.Array:
    """[B]: the row's last document is the one that it begins with."""
    return jnp.ones(f.start.shape, bool) if f.x.starts is None else ~jnp.any(f.x.starts, axis=1)


def states_before(runs: dict, end: Ending, sums: jax.Array, dtype, levels: int) -> jax.Array:
    """[B, H, L, K, K]: the states of the last document at the start of its open block."""
    cell, own, decays = np.arange(sums.shape[1])[None], {}, {}
    for level, run in runs.items():
        live = end.number >> level & 1 == 1
        near, far = (end.cell - (end.number & ((1 << bit) - 1)) for bit in (level, level + 1))
        seen = (cell < near[:, None]) & (cell >= far[:, None]) & live[:, None]
        decays[level] = over_cells(seen[:, None], sums)[:, 0]
        own[level] = tuple(jnp.where(live[:, None, None, None], x, 0.0) for x in run)
    return behind_runs(dtype, own, decays, levels)


class Part(NamedTuple):
    """Tokens [B, 128, ...] of a cell, of which `own` [B, 128] are real, at these positions."""

    q: jax.Array
    k: jax.Array
    u: jax.Array
    erase: jax.Array
    log_decay: jax.Array
    weights: jax.Array
    position: jax.Array
    own: jax.Array | None = None


def through(part: Part, states: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, 128, H, K] and the states behind a cell's tokens, from those at position start [B]."""

    assert part.own is not None

    def mine(x):
        return jnp.where(part.own.reshape(*part.own.shape, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))

    q, k, u, erase, decay, weights = (mine(x) for x in part[:6])
    position = lax.cummax(jnp.where(part.own, part.position, start[:, None] - 1), axis=1)
    unused = states[:, :, 0]  # where an operator with one state has its initial one
    f = Fenwick(Recurrence(q, k, u, erase, decay, unused, None), weights, states, position, start, None)
    return sweep(f, states, CHUNK)


def laid_in_cells(f: Fenwick, config, interpret) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H, K] and states [B, H, L, K, K], with V = K."""
    x, (batch, time), levels = f.x, f.x.u.shape[:2], f.level_weights.shape[3]
    depth = Depth.of(time, levels, f.states is not None)
    where = cells(f.position, x.starts, f.real)
    count = where.place.shape[1]

    def laid(a):
        return carried(a, where.source, where.slot).reshape(batch, count, BLOCK, *a.shape[2:])

    begun = jnp.zeros((batch, time), jnp.int32) if x.starts is None else jnp.cumsum(x.starts, axis=1, dtype=jnp.int32)
    first_document = jnp.where(where.code[:, 0] < BLOCK, laid(begun)[:, 0] == 0, False)
    number = where.place
    if depth.prefix:
        before = (f.start // BLOCK)[:, None]
        goes = jnp.any((laid(begun) == 0) & (where.code < BLOCK), axis=2)
        number = jnp.where(goes, depth.number(before, where.place - before), number)
    tree = tree_of(jnp.where(where.place < 0, -1, number), where.whole, where.code, depth)

    q, k, u, erase, log_decay, weights = (
        laid(a) for a in (x.q, x.k, x.u, x.erase, jnp.maximum(x.log_decay, FORGET), f.level_weights)
    )
    decay, by_head = jnp.moveaxis(log_decay, 2, 3), jnp.moveaxis(erase, 2, 3)
    total, behind = summed(decay, np.tri(BLOCK)), summed(decay, np.triu(np.ones((BLOCK, BLOCK)), 1))
    sums = total[..., -1]
    # Only a cell's first document reads nodes.
    reads = (where.code < BLOCK)[:, :, None, None]
    at = jnp.broadcast_to(jnp.arange(count), tree.number.shape)
    since = since_ends(sums, jnp.stack([at, jnp.maximum(tree.number, 0)], axis=2), depth.levels)
    gates = gate_rows(total, by_head, weights, since)
    gates = jnp.where(reads | (np.arange(gates.shape[3]) < 2 + INSIDE)[:, None], gates, 0.0)
    vectors = jnp.stack([-by_head, jnp.exp(behind)], axis=3)
    position = jnp.take_along_axis(f.position, jnp.maximum(where.source, 0), axis=1).reshape(batch, count, BLOCK)
    parts = q, k, u, erase, log_decay, weights, position

    begin, low, read = None, None, None
    if f.states is not None:
        high, low = beginning(f.states, f.start, depth.few + 1)
        first = Part(*[a[:, 0] for a in parts])._replace(own=first_document)
        read, held = through(first._replace(u=jnp.zeros_like(first.u)), low, f.start)
        begin = Begin(at_levels(high, depth), jnp.sum(held, axis=2))
    flat = [a.reshape(batch, -1, *a.shape[3:]) for a in (q, k, u)]
    documents = (where.code // BLOCK).reshape(batch, -1).astype(jnp.float32)
    inverse = inverse_of(flat[1], by_head, documents, config, interpret)
    kept = tuple(depth.kept(level, count) for level in range(depth.levels))
    static = Static(kept, tuple(2 * depth.pairs(level) for level in range(depth.levels)), config, interpret)
    fades = right_decays(sums, tree.ends)[:-1]
    o, runs = solve(*flat, inverse, gates, vectors, fades, begin, tree.places, static)
    if read is not None:
        o = o.at[:, :BLOCK].add(jnp.where(first_document[..., None, None], read, 0.0).astype(o.dtype))
    states = last_states(f, where, tree.number, depth, parts, sums, runs, low)
    return carried(o, where.slot, where.source), states


def at_levels(high: jax.Array, depth: Depth) -> jax.Array:
    """The states of a prefix [B, H, few + 1, K, K] by level [B, levels, H, K, K]: the last one is that of the top."""
    low, last = high[:, :, : depth.few], high[:, :, depth.few :]
    between = jnp.zeros((*high.shape[:2], depth.top - depth.few, *high.shape[3:]), high.dtype)
    return jnp.concatenate([low, between, last], axis=2).swapaxes(1, 2)


def last_states(f: Fenwick, where: Cells, number, depth: Depth, parts: tuple, sums, runs: dict, low) -> jax.Array:
    """States [B, H, L, K, K] behind the row: those at the start of the last document's open block, and a prefix's slots
    below 128 tokens while the block that they are in is open, taken through the tokens of that block."""
    levels, end = f.level_weights.shape[3], ending(f, where, number, depth)
    states = states_before(runs, end, sums, f.x.u.dtype, levels) if runs else jnp.zeros_like(states_of(f))
    after = f.position[:, -1] + 1
    start = after // BLOCK * BLOCK
    if low is not None:
        still = goes_on(f) & (after // BLOCK == f.start // BLOCK)
        states = states + jnp.where(still[:, None, None, None, None], low, 0.0)
        start = jnp.where(still, f.start, start)
    here = jnp.minimum(end.cell, number.shape[1] - 1)

    def of_cell(x):
        return jnp.take_along_axis(x, here.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)[:, 0]

    return through(Part(*[of_cell(x) for x in parts])._replace(own=end.own), states, start)[1]
