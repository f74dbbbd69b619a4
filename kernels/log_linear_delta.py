"""The log-linear delta rule on a Hopper GPU: sizes and configs, and the program that makes the nodes of its tree.

A block is two chunks of C = 64 tokens, a node a run of 2^j blocks: what a run does to a state, S -> (I + N) S with N
[K, K] (decay is a factor beside it), and what it writes, S [K, V]. A token reads the nodes before it, the nearest
first, by a query that every node changes as it would have changed the states behind:

    O += c_j . Q S_j        Q += Q N_j        for each set bit j of the block's number, from the lowest

c_j the token's weight of level 8 + j times the decay since the node's end. Inside a block a chunk reads itself and then
the chunk before it, with X = (I + strict(e K K^T))^-1 of the chunk that is read, w the weights of the pairs' levels,
R_ti = exp(G_t - G_i):

    P = mask(Q K^T) X        O += (w . R . P) U        Q -= P e K

Nothing is gated but at the places where O is read and S written: scalar gates commute. Every block is independent of
the others, so that the time is as parallel as the heads. K = V here: the glue pads or cuts V.

A node and its right neighbour are a pair, kept side by side on every level: pair p has 2p and 2p + 1. In a row that is
one document node i of a level is the i-th run of blocks; of other rows `Places` has the tables.

nodes    a block, and one of (N, S): with Z = (-e K, out U) of both chunks, M1 = X1 Z1, M2 = X2 (Z2 - e K2 K1^T M1),
         (N, S) = K1^T M1 + K2^T M2. Of nearly parallel keys the entries of e K2 K1^T are nearly equal, those of M1
         nearly cancel, and what the former are rounded by does not: they are multiplied in two 16-bit parts.
The tree over nodes is in `log_linear_delta_tree.py`, the reads in `log_linear_delta_read.py`, the gradients of these in
`log_linear_delta_gradients.py` and of what is inside a block in `log_linear_delta_inside.py`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels.delta_rule_mosaic import invert
from efla_jax.kernels.mosaic import (
    WGMMA,
    accumulated,
    begin,
    by_column,
    by_row,
    finish,
    left_operand,
    narrow_indices,
    parameters,
    shared,
    unsupported_keys,
)

BLOCK, CHUNK, TILE = 128, 64, 64  # tokens of a block and of a chunk; columns of a tile in shared memory
CHUNKS = BLOCK // CHUNK
INSIDE = BLOCK.bit_length()  # levels of the pairs inside a block
SPAN = 8  # blocks whose gradients of nodes a program sums up at most
# Rows of the gates: G / ln 2; -e; the weights of the levels inside; the coefficients of the levels of blocks.
SUM, ERASE, WEIGHTS, READS = 0, 1, 2, 2 + INSIDE
KEY_DIMS = (64, 128)
f32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Config:
    """How a call is cut for the GPU.

    ring: nodes loaded ahead by a reading program. automatic_barriers: Mosaic's around every store to shared memory.
    precision: 16-bit dtype of the inverse's products, as for the flat delta rule."""

    ring: int = 3
    automatic_barriers: bool = True
    precision: str = "float16"


# By device kind, K and dtype. Where a row lacks, SAFE serves: right on every Hopper GPU, tuned on none.
TABLE: dict[tuple[str, int, str], Config] = {
    ("NVIDIA H200", 128, "bfloat16"): Config(),
    ("NVIDIA H200", 64, "bfloat16"): Config(),
}
SAFE = Config(ring=2)


def config_for(device_kind: str, key_dim: int, dtype) -> Config:
    """The table's row for these sizes on this device, or the safe one."""
    return TABLE.get((device_kind, key_dim, jnp.dtype(dtype).name), SAFE)


def unsupported(key_dim: int, dtype) -> str | None:
    """Why the programs cannot serve these sizes, or None; any V is filled up or cut into tiles of K channels."""
    return unsupported_keys(key_dim, KEY_DIMS, dtype)


class Places(NamedTuple):
    """Where the blocks of rows of documents are in their trees, int32; all None where a row is one document that begins
    with it.

    numbers [B, N]: the place of a block in its document, whose bits it reads; -1 for an empty block
    codes [B, N, 128]: of each token, 128 times which document of its block it is of plus its place modulo 128
    nodes [B, N]: which node of the lowest level the block is, -1 for none
    pairs [B, depth, N]: by level, the pair whose first node the block reads, if it reads that level
    kept [B, depth, N]: by level, where the block's queries are among those that are kept with the level's
    ups by level [B, P]: which node of the next level a pair is, -1 if it has no second node
    readers by level [B, P, 3]: of a pair, the first block that reads it and how many do, and whether no node is before
    it in its document (1 or 0)
    latest [B, depth]: by level, the last pair (no program needs it)"""

    numbers: Any = None
    codes: Any = None
    nodes: Any = None
    pairs: Any = None
    kept: Any = None
    ups: Any = None
    readers: Any = None
    latest: Any = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a call: B, blocks of T, G, H, K = V, levels of blocks that are read; value head h reads key head h //
    (H // G). kept: by level, how many blocks may read it.

    Queries are kept by groups of levels: each of the first ones by itself, so that they need not be longer than their
    sums take, then all others, summed by one program."""

    batch: int
    blocks: int
    key_heads: int
    heads: int
    dim: int
    depth: int
    kept: tuple[int, ...]

    @classmethod
    def of(cls, k, u, kept: tuple[int, ...] | None = None) -> "Sizes":
        """kept: None where rows are one document, whose last block's bits are the levels that are read."""
        blocks = k.shape[1] // BLOCK
        if kept is None:
            depth = (blocks - 1).bit_length()
            kept = (1 << max(depth - 1, 0),) * depth
        return cls(k.shape[0], blocks, k.shape[2], u.shape[2], k.shape[3], len(kept), kept)

    @property
    def groups(self) -> list[range]:
        """Of levels."""
        alone = min(self.depth, SPAN.bit_length() - 1)
        return [*(range(j, j + 1) for j in range(alone)), *[range(alone, self.depth)] * (self.depth > alone)]

    def key_head(self, head):
        return lax.div(head, self.heads // self.key_heads)


def multiply(left, right, shape) -> jax.Array:
    """left right, float32 of this shape; left in registers or shared memory."""

    def run(acc):
        plgpu.wgmma(acc, left, right)
        return accumulated(acc, wait_n=0)

    return pl.run_scoped(run, plgpu.ACC(shape, f32))


def add_product(total, left, right, interpret) -> jax.Array:
    """total + left right."""

    def run(acc):
        begin(acc, total, interpret)
        plgpu.wgmma(acc, left, right)
        return finish(acc, total, interpret)

    return pl.run_scoped(run, plgpu.ACC(total.shape, f32))


def add_in_parts(total, left, buffer, right, interpret) -> jax.Array:
    """total + left right, of float32 in registers what it is rounded to and what it is rounded by."""
    narrow = left.astype(right.dtype)
    total = add_product(total, left_operand(narrow, buffer), right, interpret)
    rest = (left - narrow.astype(f32)).astype(right.dtype)
    return add_product(total, left_operand(rest, buffer), right, interpret)


def matrix(ref) -> jax.Array:
    """A tile in shared memory as float32 in registers."""
    return plgpu.load(ref, layout=WGMMA, optimized=False).astype(f32)


def chunk_tokens(block, chunk: int):
    return pl.ds(block * BLOCK + chunk * CHUNK, CHUNK)


def columns(tile):
    return pl.ds(tile * TILE, TILE)


class NodeMemory(NamedTuple):
    """Shared memory of a program of `nodes`: k [2, K // 64, C, 64]; k or u, then M [2, C, K]; X [2, C, C]; vectors
    [2, 128]; the barrier of the loads; the interpreter's left operand."""

    k: Any
    values: Any
    inverse: Any
    vectors: Any
    loaded: Any
    left: Any = None


def node_program(sizes: Sizes, interpret, inputs: tuple, out, place, memory: NodeMemory) -> None:
    """The body of `nodes`: a block of a head, N (kind 0) or S (kind 1), which is this node of the lowest level."""
    k, u, inverse, vectors = inputs
    row, block, pair = (lax.axis_index(name) for name in ("row", "block", "pair"))
    head, kind = lax.div(pair, 2), lax.rem(pair, 2)
    g, tiles = sizes.key_head(head), sizes.dim // TILE
    for chunk in range(CHUNKS):
        tokens = chunk_tokens(block, chunk)
        for tile in range(tiles):
            plgpu.copy_gmem_to_smem(k.at[row, tokens, g, columns(tile)], memory.k.at[chunk, tile], memory.loaded)
        plgpu.copy_gmem_to_smem(inverse.at[row, head, tokens], memory.inverse.at[chunk], memory.loaded)

        @pl.when(kind == 0)
        def _(chunk=chunk, tokens=tokens):
            plgpu.copy_gmem_to_smem(k.at[row, tokens, g], memory.values.at[chunk], memory.loaded)

        @pl.when(kind == 1)
        def _(chunk=chunk, tokens=tokens):
            plgpu.copy_gmem_to_smem(u.at[row, tokens, head], memory.values.at[chunk], memory.loaded)

    plgpu.copy_gmem_to_smem(vectors.at[row, block * sizes.heads + head], memory.vectors, memory.loaded)
    plgpu.barrier_wait(memory.loaded)
    dtype, wide = memory.k.dtype, (CHUNK, sizes.dim)
    first, second = pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)

    def put(chunk: int, x):
        memory.values[chunk] = x.astype(dtype)
        plgpu.commit_smem()

    x = matrix(memory.inverse.at[0]) * by_column(memory.vectors.at[kind, first], CHUNK)
    put(0, multiply(left_operand(x.astype(dtype), memory.left), memory.values.at[0], wide))
    lower = known_keys(memory, tiles) * by_row(memory.vectors.at[0, second], CHUNK)
    start = matrix(memory.values.at[1]) * by_row(memory.vectors.at[kind, second], sizes.dim)
    put(1, add_in_parts(start, lower, memory.left, memory.values.at[0], interpret))
    put(1, multiply(memory.inverse.at[1], memory.values.at[1], wide))
    halves = [written(memory, tile, wide) for tile in range(tiles)]
    for tile, half in enumerate(halves):
        put(tile, half)
        plgpu.copy_smem_to_gmem(memory.values.at[tile], out.at[kind, row, place, head, columns(tile)])
    plgpu.wait_smem_to_gmem(0)


def known_keys(memory: NodeMemory, tiles: int) -> jax.Array:
    """K2 K1^T [64, 64] float32."""

    def run(acc):
        for tile in range(tiles):
            plgpu.wgmma(acc, memory.k.at[1, tile], memory.k.at[0, tile].T)
        return accumulated(acc, wait_n=0)

    return pl.run_scoped(run, plgpu.ACC((CHUNK, CHUNK), f32))


def written(memory: NodeMemory, tile: int, shape) -> jax.Array:
    """64 rows of K1^T M1 + K2^T M2."""

    def run(acc):
        for chunk in range(CHUNKS):
            plgpu.wgmma(acc, memory.k.at[chunk, tile].T, memory.values.at[chunk])
        return accumulated(acc, wait_n=0)

    return pl.run_scoped(run, plgpu.ACC(shape, f32))


@narrow_indices()
def solved(k, erase, documents=None, *, config: Config, interpret=None) -> jax.Array:
    """X = (I + strict(e K K^T))^-1 of every chunk, [B, H, T, 64] in the dtype of k [B, T, G, K]; erase [B, H, T];
    documents [B, T] float32: of pairs of tokens with other numbers the triangle has 0."""
    options = dict(automatic_barriers=config.automatic_barriers, interpret=interpret)
    return invert(k, erase, jnp.zeros_like(erase), documents, precision=jnp.dtype(config.precision), **options)[0]


@narrow_indices()
def nodes(k, u, inverse, vectors, places=None, *, count: int, config: Config, interpret=None) -> jax.Array:
    """(N, S) of the first `count` blocks, [2, B, count, H, K, K] in the dtype of k, or of those that `places` [B, N]
    names a node of; others are undefined.

    k [B, T, G, K]; u [B, T, H, K]; inverse [B, H, T, 64], X of every chunk, of that dtype; vectors
    [B, T / 128, H, 2, 128] float32: -e, and exp of the log decay from a token to the block's end."""
    sizes, dtype = Sizes.of(k, u, ()), k.dtype

    def log_linear_delta_nodes(*refs):
        inputs, refs = refs[:4], refs[4:]
        if places is None:
            out, *scratch = refs
            node_program(sizes, interpret, inputs, out, lax.axis_index("block"), NodeMemory(*scratch))
            return
        known, out, *scratch = refs
        place = known[lax.axis_index("row"), lax.axis_index("block")]

        @pl.when(place >= 0)
        def _():
            node_program(sizes, interpret, inputs, out, place, NodeMemory(*scratch))

    return plgpu.kernel(
        log_linear_delta_nodes,
        out_type=jax.ShapeDtypeStruct((2, sizes.batch, count, sizes.heads, sizes.dim, sizes.dim), dtype),
        scratch_types=[
            shared(CHUNKS, sizes.dim // TILE, CHUNK, TILE, dtype=dtype),
            shared(CHUNKS, CHUNK, sizes.dim, dtype=dtype),
            shared(CHUNKS, CHUNK, CHUNK, dtype=dtype),
            plgpu.SMEM((2, BLOCK), f32),
            plgpu.Barrier(num_arrivals=CHUNKS * (sizes.dim // TILE + 2) + 1),
            *[shared(CHUNK, CHUNK, dtype=dtype)] * (interpret is not None),
        ],
        grid=(sizes.batch, count if places is None else sizes.blocks, 2 * sizes.heads),
        grid_names=("row", "block", "pair"),
        compiler_params=parameters(config.automatic_barriers),
        interpret=interpret,
    )(k, u, inverse, vectors.reshape(sizes.batch, -1, 2, BLOCK), *([] if places is None else [places]))
