"""The tables that tell the log-linear delta rule's kernels where cells of documents are in their trees, against sets
of blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efla_jax.ops.fenwick import fenwick_level
from efla_jax.ops.log_linear_cells import cell_count, cells
from efla_jax.ops.pallas_log_linear_delta_cells import Depth, tree_of
from efla_jax.ops.segments import positions, segments

TIME = 900


@functools.partial(jax.jit, static_argnums=2)
def laid(ids, start, depth):
    """Cells, the documents [B, M] of their first tokens, and the tree."""
    found = segments(ids)
    position = positions(*ids.shape, ids, start if depth.prefix else None)
    position = jnp.where(jnp.cumsum(found.real, axis=1) > 0, position, start[:, None] - 1)
    where = cells(position, found.starts, found.real)
    number = where.place
    begun = jnp.cumsum(found.starts, axis=1)
    time = ids.shape[1]
    first = jnp.maximum(jnp.min(jnp.where(where.source >= 0, where.source, time).reshape(*number.shape, -1), 2), 0)
    document = jnp.take_along_axis(begun, jnp.minimum(first, time - 1), axis=1)
    if depth.prefix:
        before = (start // 128)[:, None]
        number = jnp.where(document == 0, depth.number(before, number - before), number)
    number = jnp.where(where.place < 0, -1, number)
    return where, document, tree_of(number, where.whole, where.code, depth)


@pytest.mark.parametrize("prefix, levels", ((False, 12), (True, 14), (True, 10), (True, 3)))
def test_cells_read_the_blocks_before_them(prefix, levels):
    """Every node is a run of the blocks of one document; a cell reads those of its bits; and the program that sums over
    the readers of a node goes through all of them, once."""
    rng, depth = np.random.default_rng(levels), Depth.of(TIME, levels, prefix)
    for lengths in ((900,), (520, 380), (129, 1, 127, 300, 64, 279), (256, 10, 20, 614)):
        ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[None].astype(np.int32)
        ids = np.where(rng.random(ids.shape) < 0.05, 0, ids)
        start = rng.integers(0, 3000, 1).astype(np.int32) * prefix
        where, document, tree = jax.tree.map(lambda a: np.asarray(a)[0], laid(ids, start, depth))
        numbers, places = tree.number, tree.places
        nodes: list = [{} for _ in range(depth.levels)]
        begin = int(depth.number(start[0] // 128, 0))
        for level in range(depth.levels * prefix):
            run = begin >> level
            if run & 1:
                nodes[level][0] = 0, frozenset(range((run - 1) << level, run << level))
        for cell in np.flatnonzero(where.whole):
            nodes[0][places.nodes[cell]] = document[cell], frozenset([numbers[cell]])
        for level in range(depth.levels - 1):
            for pair in np.flatnonzero(places.ups[level] >= 0):
                (owner, left), (other, right) = nodes[level][2 * pair], nodes[level][2 * pair + 1]
                assert owner == other and max(left) + 1 == min(right)
                assert tree.ends[level][pair] in np.flatnonzero(numbers == max(right))
                nodes[level + 1][places.ups[level][pair]] = owner, left | right
        assert (places.ups[-1] == -1).all() and (where.place >= 0).sum() <= cell_count(TIME)
        kept: list = [set(), set(), set(), set()]
        for level in range(depth.levels):
            readers = {}
            for cell in np.flatnonzero((numbers >= 0) & (numbers >> level & 1 == 1)):
                owner, blocks = nodes[level][2 * places.pairs[level, cell]]
                run = (numbers[cell] >> level) - 1
                assert owner == document[cell] and blocks == frozenset(range(run << level, (run + 1) << level))
                assert {int(fenwick_level(numbers[cell], b)) for b in blocks} == {level + 1}
                readers.setdefault(places.pairs[level, cell], []).append(cell)
                where_kept = places.kept[level, cell]
                assert where_kept not in kept[min(level, 3)]
                kept[min(level, 3)].add(where_kept)
            for pair, (first, count, beginning) in enumerate(places.readers[level]):
                assert list(range(first, first + count)) == readers.get(pair, [])
                if count:
                    assert beginning == (numbers[first] >> (level + 1) == 0)
                    assert count <= 1 << level
        room = [sum(depth.kept(j, len(numbers)) for j in range(depth.levels) if min(j, 3) == i) for i in range(4)]
        assert all(max(found, default=-1) < most for found, most in zip(kept, room, strict=True))


@pytest.mark.parametrize("time", (1, 127))
def test_a_row_below_a_block_has_a_tree_without_nodes(time):
    ids = np.arange(time, dtype=np.int32)[None] // 50 + 1
    where, _, tree = laid(ids, np.zeros(1, np.int32), Depth.of(time, 9, False))
    assert not where.whole.any() and (tree.places.nodes == -1).all()
    assert (tree.number <= 0).all() and all((readers[..., 1] == 0).all() for readers in tree.places.readers)
