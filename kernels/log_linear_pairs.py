"""What the programs of log-linear linear attention know of pairs of tokens: decays, levels and weights, over squares of
64 tokens of a block in registers, from the gates in shared memory. Letters as in `log_linear.py`."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.mosaic import MASKED, WGMMA, by_column, by_row, index

BLOCK, ROWS, TILE = 128, 64, 64  # tokens of a block; those of a warpgroup; columns of V
INSIDE = BLOCK.bit_length()  # levels of the pairs inside a block
# Rows of the gates in shared memory: G / ln 2; the decay after the token; the weights of the levels inside and of those
# of states; last the row of `fade`, which has from SINCE on the log2 decays from each state's end to the block.
SUM, AFTER, WEIGHTS, READS = 0, 1, 2, 2 + INSIDE
SINCE = 64
FINE, OTHER = 4, INSIDE - 1  # levels of the pairs in eight tokens; the level of those of a block's halves
f32 = jnp.float32


def rows_of(group):
    """The tokens of a warpgroup in a block."""
    return pl.ds(group * ROWS, ROWS)


def vector(ref) -> jax.Array:
    """A vector [64] in shared memory, one number a row."""
    return plgpu.load(ref, layout=WGMMA.reduce(1), optimized=False)


def since_state(gates, rows, level) -> jax.Array:
    """The decay [64] from the end of the state of this level until each of these rows."""
    return jnp.exp2(vector(gates.at[SUM, rows]) + gates[gates.shape[0] - 1, SINCE + level])


def zero_of(gates) -> jax.Array:
    """0, which the compiler cannot know: what depends on it is made anew for every tile. Masks and the addresses of q
    and k are the same for all tiles and would otherwise stay in registers, more than there are."""
    return (gates[SUM, 0] > -MASKED).astype(jnp.int32)


def positions(gates) -> tuple[jax.Array, jax.Array]:
    """Row and column [64, 64] int32; of the column the compiler knows which bits a thread's registers differ in."""
    return index(ROWS, ROWS, 0) + zero_of(gates), index(ROWS, ROWS, 1)


def apart(codes, group, own: bool) -> jax.Array:
    """Row xor column [64, 64] int32 from codes: below 2^l for pairs of level l or less, from 128 on for tokens of two
    documents. Rows are this warpgroup's tokens, columns its own or the others'."""
    there = rows_of(group if own else 1 - group)
    return by_row(codes.at[rows_of(group)], ROWS) ^ by_column(codes.at[there], ROWS)


def spread(x, axis: int) -> jax.Array:
    """A vector [64] along the axis of a square."""
    return lax.broadcast_in_dim(x, (ROWS, ROWS), (axis,))


def decays(gates, codes, group, *, own: bool, transposed: bool) -> jax.Array:
    """R [64 queries, 64 keys] float32 of this warpgroup's queries, or transposed that of its keys [64 keys, 64
    queries]; with its own tokens or with the others'. Between two documents too, where w is 0."""
    mine, theirs = rows_of(group), rows_of(group if own else 1 - group)
    last = 0 if transposed else 1  # the half of the block that sees the other, or is seen by it
    if codes is None and not own:  # from the key to the end of its half, and from there to the query
        rows = vector(gates.at[SUM, mine]) - gates[SUM, ROWS - 1]
        columns = gates[SUM, ROWS - 1] - plgpu.load(gates.at[SUM, theirs], layout=WGMMA.reduce(0), optimized=False)
        sign = jnp.where(group == last, -1.0 if transposed else 1.0, 0.0)
        rows, columns = jnp.exp2(rows * sign), jnp.exp2(columns * sign)
        return spread(rows, 0) * spread(jnp.where(group == last, columns, 0.0), 1)
    exponent = by_row(gates.at[SUM, mine], ROWS) - by_column(gates.at[SUM, theirs], ROWS)
    exponent = -exponent if transposed else exponent
    if own:
        row, column = positions(gates)
        return jnp.exp2(jnp.where(column >= row if transposed else column <= row, exponent, MASKED))
    return jnp.exp2(exponent + jnp.where(group == last, 0.0, MASKED))


def levels_of(codes, own: bool) -> range:
    """The levels that pairs of a warpgroup's tokens with its own or the others may have."""
    if codes is not None:
        return range(INSIDE)
    return range(OTHER) if own else range(OTHER, INSIDE)


def chosen(distance, levels: range, weight) -> jax.Array:
    """Of weight(level) that of the first of these levels with 2^level beyond the distance, else of the last."""
    found = weight(levels[-1])
    for level in reversed(levels[:-1]):
        found = jnp.where(distance < (1 << (level - levels[0])), weight(level), found)
    return found


def weights_of(gates, codes, group, *, own: bool, transposed: bool) -> jax.Array:
    """w [64, 64] of this warpgroup's tokens, the queries or transposed the keys, with its own or with the others'; 0
    between two documents."""
    by, mine = (by_column, own) if transposed else (by_row, True)
    there = rows_of(group if mine else 1 - group)

    def weight(level):
        return by(gates.at[WEIGHTS + level, there], ROWS)

    if codes is not None:
        distance = apart(codes, group, own)
        return jnp.where(distance < BLOCK, chosen(distance, range(INSIDE), weight), 0.0)
    if not own:
        return weight(OTHER)
    # Of rows and columns in one eighth of the square all pairs with another eighth have one level.
    row, column = positions(gates)
    coarse, fine = (row >> 3) ^ (column >> 3), (row & 7) ^ (column & 7)
    near = chosen(fine, range(FINE), weight)
    return jnp.where(coarse == 0, near, chosen(coarse >> 1, range(FINE, OTHER), weight))


def by_level(gates, codes, group, mixed, own: bool) -> list[jax.Array]:
    """The sums [64] over columns of mixed [64, 64], 0 where a column is behind its row, for each level that its pairs
    may have."""
    if codes is None and not own:
        return [jnp.sum(mixed, axis=1)]
    if codes is not None:
        distance = apart(codes, group, own)
        levels = [(distance >> max(level - 1, 0)) == min(level, 1) for level in range(INSIDE)]
        return [jnp.sum(jnp.where(here, mixed, 0.0), axis=1) for here in levels]
    # Levels of eighths by halving: of a row's two halves the one that it is in, and the one before it, whose pairs have
    # one level; those behind it are 0. What is left is the eighth of the row itself.
    row, eighths = index(ROWS, 8, 0) + zero_of(gates), [mixed[:, i : i + 8] for i in range(0, ROWS, 8)]
    found: list[jax.Array] = []
    while len(eighths) > 1:
        half = len(eighths) // 2
        later, before, behind = (row // 8) & half != 0, eighths[:half], eighths[half:]
        found.insert(0, jnp.sum(jnp.where(later, sum(before[1:], before[0]), 0.0), axis=1))
        eighths = [jnp.where(later, b, a) for a, b in zip(before, behind, strict=True)]
    fine = (row & 7) ^ index(ROWS, 8, 1)
    levels = [(fine >> max(level - 1, 0)) == min(level, 1) for level in range(FINE)]
    return [jnp.sum(jnp.where(here, eighths[0], 0.0), axis=1) for here in levels] + found
