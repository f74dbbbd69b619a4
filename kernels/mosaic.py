"""Small pieces that programs in Mosaic GPU are made of: layouts of registers and shared memory, vectors spread over a
matrix, and the two places where Mosaic's interpreter needs another form than a device.

The interpreter knows neither a left operand of a wgmma in registers (`left_operand`) nor a store into an accumulator
(`begin`, `finish`).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

SHARED_MEMORY = 227 * 1024  # bytes that a program may use on a Hopper GPU
DTYPES = ("bfloat16", "float16")  # of a wgmma's operands that may be transposed
MASKED = -1e30  # instead of a difference of log decays that must not be seen: its exponential is 0
WGMMA, TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED
accumulated = plgpu.wgmma_accumulator_load  # (acc, wait_n=n): its value once at most n later products are in flight


@contextlib.contextmanager
def narrow_indices() -> Iterator[None]:
    """Around the tracing of a program: indices of 32 bits under `jax_enable_x64` too, as those of Pallas are."""
    with jax.enable_x64(False):
        yield


def unsupported_keys(key_dim: int, key_dims: tuple[int, ...], dtype) -> str | None:
    """Why a program that takes key heads of `key_dims` channels cannot serve these, or None."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"dtype {jnp.dtype(dtype).name}: the tensor cores' transposed operands are 16-bit ({', '.join(DTYPES)})"
    if key_dim not in key_dims:
        return f"K = {key_dim}: a key head has {' or '.join(map(str, key_dims))} channels"
    return None


def unsupported_values(value_dim: int) -> str | None:
    """Why a program whose warpgroups take 64 channels of the values each cannot serve these, or None."""
    if value_dim < 64 or value_dim % 64:
        return f"V = {value_dim}: a warpgroup has 64 channels of the values, so V is a multiple of 64"
    return None


def parameters(automatic_barriers: bool) -> plgpu.CompilerParams:
    """Lane semantics, in which every layout is given. Automatic barriers let a warpgroup meet before and after every
    store to shared memory; without them a program must see to it that nothing is stored where another warp still reads,
    and commit what it reads."""
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        approx_math=True,
        unsafe_no_auto_barriers=not automatic_barriers,
    )


def on_grid(name: str, body, x, out, memory, scratch, grid: dict, threads: int, barriers: bool, interpret) -> Any:
    """Run body(x, memory, results, scratch) by so many warpgroups ("group") of every program of a grid of named axes,
    and return the results. x, memory: pytrees of arrays and of buffers, of which the body sees references; barriers:
    see `parameters`."""
    arrays, inputs = jax.tree.flatten(x)
    buffers, memories = jax.tree.flatten(memory)

    def program(*refs):
        given, refs = inputs.unflatten(refs[: len(arrays)]), refs[len(arrays) :]
        results, refs = refs[: len(out)], refs[len(out) :]
        body(given, memories.unflatten(refs[: len(buffers)]), results, refs[len(buffers) :])

    program.__name__ = name
    return plgpu.kernel(
        program,
        out_type=out,
        scratch_types=[*buffers, *scratch],
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=threads,
        thread_name="group",
        compiler_params=parameters(barriers),
        interpret=interpret,
    )(*arrays)


def tiled(columns: int, dtype) -> tuple:
    """Transforms of a shared-memory array whose last axis has this many columns: what TMA and wgmma agree on."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    tile = plgpu.TilingTransform((8, swizzle // size))  # type: ignore[abstract]
    return tile, plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


def shared(*shape: int, dtype) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=tiled(shape[-1], dtype))


def by_column(vector, rows: int) -> jax.Array:
    """A vector [n] in shared memory as [rows, n], the same in every row."""
    x = plgpu.load(vector, layout=WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))


def by_row(vector, columns: int) -> jax.Array:
    """A vector [n] in shared memory as [n, columns], the same in every column."""
    x = plgpu.load(vector, layout=WGMMA.reduce(1), optimized=False)
    return lax.broadcast_in_dim(x, (x.shape[0], columns), (0,))


def index(rows: int, columns: int, axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (rows, columns), axis, layout=WGMMA)


def transposed(tile) -> jax.Array:
    """A tile [m, n] in shared memory as [n, m] in registers, ready to be a left operand."""
    return plgpu.layout_cast(plgpu.load(tile.T, layout=TRANSPOSED, optimized=False), WGMMA)


def left_operand(x, buffer):
    """x as the left operand of a wgmma: itself; in the interpreter, which has a `buffer`, a copy in shared memory."""
    if buffer is None:
        return x
    buffer[...] = x
    plgpu.commit_smem()
    return buffer


def staging(shapes, dtype, interpret, count: int) -> list:
    """Shared memory for the left operands of the interpreter, for each of `count` warpgroups."""
    return [] if interpret is None else [shared(count, *shape, dtype=dtype) for shape in shapes]


def begin(acc, value, interpret) -> None:
    """Let products add to `value`; in the interpreter `finish` adds it."""
    if interpret is None:
        acc[...] = value


def finish(acc, value, interpret, wait_n: int = 0) -> jax.Array:
    """`value` plus the products, once at most wait_n later ones are in flight."""
    total = accumulated(acc, wait_n=wait_n)
    return total if interpret is None else total + value
