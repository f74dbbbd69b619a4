"""Operators on a mesh: every device works on its rows, its heads and its part of the time, and parts of one sequence
are put together again.

This is the only file that knows `jax.shard_map`. An operator hands `sharded` a local function and the legend of each of
its arrays ("BTHV": see `efla_jax/shapes.py`). A recurrence over a part of the time is an affine map of its state,

    S after the part = M S_in + S        o_t = (output from a zero state) + (M_t^T q_t)^T S_in

so that only (M, S) travel: LASP-2 (arXiv 2502.07563), ZeCO (arXiv 2507.01004). A device runs its part once, from a zero
state, and adds what it reads of S_in; kernels that know (M, S) before they make an output begin with S_in at once.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from efla_jax.ops.arguments import Recurrence
from efla_jax.ops.chunked import product
from efla_jax.sharding import auto_mesh

# Which mesh axes may split which letters. An axis that does not divide all the sizes it would split is not used. X and
# Y are G and H of an operator that has whole rows: so that no two devices do the same, context splits its heads.
SPLITS = (("B", ("data", "fsdp")), ("T", ("context",)), ("GHD", ("tensor",)), ("XY", ("tensor", "context")))


def sharded(
    local: Callable, arrays: Sequence[jax.Array | None], legends: Sequence[str], results: str | tuple[str, ...]
) -> Any:
    """local(context, *arrays) on every device's part of the arrays, or on the whole arrays without a mesh.

    legends, results: one letter per axis of each array, and of the result or of each in a tuple of results. Letters
    outside SPLITS are never split: an operator that needs all of an axis on every device gives it another letter.
    context is the name of the mesh axis over which `local` has only a part of the time, in order, or None."""
    mesh = auto_mesh()
    sizes = {
        letter: size
        for array, legend in zip(arrays, legends, strict=True)
        if array is not None
        for letter, size in zip(legend, array.shape, strict=True)
    }
    if mesh is None or 0 in sizes.values():  # XLA (jaxlib 0.11.2) crashes where it would split an empty array
        return local(None, *arrays)
    axes: dict[str, tuple[str, ...]] = {}
    for letters, candidates in SPLITS:
        used: tuple[str, ...] = ()
        for axis in candidates:
            parts = math.prod(mesh.shape[name] for name in (*used, axis))
            fits = all(size % parts == 0 for letter, size in sizes.items() if letter in letters)
            used += (axis,) if mesh.shape[axis] > 1 and fits else ()
        axes |= dict.fromkeys(letters, used)
    context = "context" if axes["T"] and "T" in sizes else None
    # Named somewhere, an axis of one device costs nothing; the backward sums over axes that an array does not name.
    alone = tuple(name for name, size in mesh.shape.items() if size == 1)

    def spec(legend: str) -> PartitionSpec:
        first, *rest = (axes.get(letter, ()) for letter in legend)
        return PartitionSpec((*first, *alone), *rest)

    # check_vma: a Pallas call inside would be refused.
    return jax.shard_map(
        functools.partial(local, context),
        in_specs=tuple(map(spec, legends)),
        out_specs=spec(results) if isinstance(results, str) else tuple(map(spec, results)),
        check_vma=False,
    )(*arrays)


def repeat_key_heads(heads: int, *arrays: jax.Array, whole_rows: bool = False) -> tuple[jax.Array, ...]:
    """Arrays [B, T, G, ...] read by H value heads, G repeated as far as the mesh needs to split both; whole_rows: as X
    and Y."""
    mesh = auto_mesh()
    parts = 1 if mesh is None else mesh.shape["tensor"]
    if mesh is not None and whole_rows and heads % (parts * mesh.shape["context"]) == 0:
        parts *= mesh.shape["context"]
    repeats = parts // math.gcd(arrays[0].shape[2], parts)
    if heads % parts or repeats == 1:
        return arrays
    return tuple(jnp.repeat(x, repeats, axis=2) for x in arrays)


def part(context: str | None) -> jax.Array | int:
    """Which part of the time this device has."""
    return 0 if context is None else lax.axis_index(context)


def gathered(x: jax.Array, context: str | None) -> jax.Array:
    """The x [B, T, ...] of all parts, one behind the other."""
    return x if context is None else lax.all_gather(x, context, axis=1, tiled=True)


def handed_over(apply: Callable, initial: Any, summary: Any, context: str, reverse: bool = False) -> tuple[Any, Any]:
    """(state before this device's part, state after the last part), where apply(state, summary) takes a state over the
    part that a device has summarised; reverse: a cotangent, from the last part to the first."""
    # Tiled: vmap of the gradient of an untiled one that a scan reads is refused by jax 0.11.2.
    every = jax.tree.map(lambda x: lax.all_gather(x[None], context, tiled=True), summary)

    def step(state, summary):
        return apply(state, summary), state

    final, before = lax.scan(step, initial, every, reverse=reverse)
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, part(context), keepdims=False), before), final


LEGENDS = ("BTGK", "BTGK", "BTHV", "BTH", "BTH", "BHKV", "BT")  # of a Recurrence


def recurrence_over_mesh(
    run: Callable[[Recurrence], tuple], x: Recurrence, over: Callable[[Recurrence, str], tuple] | None = None
) -> tuple[jax.Array, jax.Array]:
    """run(x) -> (outputs, final state), on every device with its rows, heads and part of the time. over(x, context) is
    that of a part whose implementation hands the states over itself, or raises NotImplementedError."""
    q, k = repeat_key_heads(x.u.shape[2], x.q, x.k)

    def local(context, *arrays):
        x = Recurrence(*arrays)
        if context is None:
            return run(x)
        if x.erase is None:
            return decayed(run, x, context)
        try:
            return erased(run, x, context) if over is None else over(x, context)
        except NotImplementedError:
            return erased(run, x, context)

    return sharded(local, tuple(x._replace(q=q, k=k)), LEGENDS, ("BTHV", "BHKV"))


def erased(run: Callable, x: Recurrence, context: str) -> tuple[jax.Array, jax.Array]:
    """A part of a delta rule. K more columns of the state that nothing is written to and that begin as the identity
    become M; their outputs are M_t^T q_t. A document that begins inside the part empties them like the others."""
    shape = x.initial_state.shape
    key_dim, value_dim = shape[2:]
    nothing = jnp.zeros((*x.u.shape[:3], key_dim), x.u.dtype)
    identity = jnp.broadcast_to(jnp.eye(key_dim, dtype=jnp.float32), (*shape[:3], key_dim))
    o, state = run(
        x._replace(
            u=jnp.concatenate([x.u, nothing], axis=-1),
            initial_state=jnp.concatenate([jnp.zeros_like(x.initial_state), identity], axis=-1),
        )
    )

    def apply(state, summary):
        return product("bhij,bhjv->bhiv", summary[..., value_dim:], state) + summary[..., :value_dim]

    before, final = handed_over(apply, x.initial_state, state, context)
    read = known(x, "bthk,bhkv->bthv", o[..., value_dim:], before)
    return (o[..., :value_dim].astype(jnp.float32) + read).astype(x.u.dtype), final


def state_over(context: str, initial: jax.Array, added: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(state before this device's part, state after the last part) [B, H, K, V], where a part takes S to M S + Z: kept
    is its M [B, H, K, K] and added its Z. For kernels that know M and Z before they make an output."""

    def apply(state, summary):
        return product("bhij,bhjv->bhiv", summary[1], state) + summary[0]

    return handed_over(apply, initial, (added, kept), context)


def cotangent_over(context: str, last: jax.Array, added: jax.Array, maps: jax.Array) -> jax.Array:
    """The cotangent D^T [B, H, V, K] of the state behind this device's part, where a part takes D^T to D^T M + Z; last:
    this device's share of that of the final state, which all devices return (see `jax.shard_map`)."""

    def apply(state, summary):
        return product("bhvi,bhij->bhvj", state, summary[1]) + summary[0]

    return handed_over(apply, lax.psum(last, context), (added, maps), context, reverse=True)[0]


def decayed(run: Callable, x: Recurrence, context: str) -> tuple[jax.Array, jax.Array]:
    """A part of linear attention: M_t = exp(g_1 + ... + g_t), 0 once a document has begun."""
    exponent = jnp.cumsum(x.log_decay, axis=1)
    if x.starts is not None:
        exponent = jnp.where(jnp.cumsum(x.starts, axis=1)[..., None] > 0, -jnp.inf, exponent)
    reach = jnp.exp(exponent)
    o, state = run(x._replace(initial_state=jnp.zeros_like(x.initial_state)))

    def apply(state, summary):
        decay, added = summary
        return decay[..., None, None] * state + added

    before, final = handed_over(apply, x.initial_state, (reach[:, -1], state), context)
    group = before.reshape(before.shape[0], x.q.shape[2], -1, *before.shape[2:])
    read = known(x, "btgk,bgrkv->btgrv", x.q, group).reshape(o.shape)
    return (o.astype(jnp.float32) + reach[..., None] * read).astype(o.dtype), final


def known(x: Recurrence, spec: str, q: jax.Array, state: jax.Array) -> jax.Array:
    """What queries read from a state, in float32. Where all that the part itself multiplies is bfloat16, TF32 will do:
    it has more digits. Never bfloat16: XLA on CPUs lacks that product in some layouts."""
    rounded = x.q.dtype == x.k.dtype == x.u.dtype == jnp.bfloat16
    precision = lax.Precision.DEFAULT if rounded else lax.Precision.HIGHEST
    return jnp.einsum(spec, q.astype(jnp.float32), state, precision=precision)
