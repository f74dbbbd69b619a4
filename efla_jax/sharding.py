"""One mesh for everything: its axes, which parameter is split over which of them, and where batches and activations
stand on it.

    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):                              # `with mesh:` would switch most of this off without a word
        shardings = state_shardings(mesh, jax.eval_shape(init, key))
        state = jax.jit(init, out_shardings=shardings)(key)         # born where it stays
        batch = place(mesh, batch)

data and fsdp split the rows of a batch, context its tokens, tensor heads and inner widths; fsdp also splits every
matrix, which a step gathers layer by layer. Axes are Auto: XLA partitions what is not spelt out here.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor", "context")
# What an axis of an activation is called in `constrain`, and the mesh axes that split it.
ACTIVATIONS: Mapping[str, str | tuple[str, ...]] = {
    "batch": ("data", "fsdp"), "time": "context", "features": "tensor",
    "rows": "data", "width": "fsdp",  # of the embedding's look-up
}  # fmt: skip

# Every parameter matches exactly one rule: the end of its path, and a mesh axis (or None) per axis. Parameters that
# the depth repeats have one axis more, in front, which is never split.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"embed/embedding", (None, "fsdp")),
    (r"lm_head/kernel", ("fsdp", "tensor")),
    (r"(q|k|v|g|z|x|B|C|gate|up)_proj/kernel", ("fsdp", "tensor")),
    (r"(o|out|down)_proj/kernel", ("tensor", "fsdp")),
    (r"(a|b|dt)_proj/kernel", ("fsdp", "tensor")),
    (r"z_proj/bias", ("tensor",)),
    (r"(q|k|v|x|B|C)_conv/weight", (None, "tensor")),
    (r"(q|k|v|x|B|C)_conv/bias", ("tensor",)),
    (r"(A_log|dt_bias|b_bias|D)", ("tensor",)),
    (r"mixer(_\d+)?/norm/scale", ("tensor",)),
    # of level weights: columns are heads times levels; the MLP is one for all heads
    (r"level_proj/kernel", ("fsdp", "tensor")),
    (r"level_weights/(scale|shift)", ("tensor", None)),
    (r"level_weights/(hidden|out)/kernel", (None, None)),
    (r"level_weights/(hidden/bias|out_bias)", (None,)),
    (r"(mixer|mlp|final|o|q|k|linear|softmax)_norm/(scale|bias)", (None,)),
    # of nats_l: columns of mix_proj are attention heads times two; those of the router are few
    (r"mix_proj/kernel", ("fsdp", "tensor")),
    (r"router/route_proj/kernel", ("fsdp", None)),
    # Decoder of AutoEncoder, and SequenceClassifier: small, and its rows are what is split
    (r"(front|params/head|decoder/dense_\d)/kernel", (None, None)),
    (r"decoder/(dense|norm)_\d/(scale|bias)", (None,)),
    (r"params/(head/bias|norm/(scale|bias))", (None,)),
    (r"params/position", (None, None)),
)
REPEATED = re.compile(r"(^|/)(groups|last)/")


def mesh_sizes(devices: int, *, data: int = -1, fsdp: int = 1, tensor: int = 1, context: int = 1) -> dict[str, int]:
    """Size of each axis; a single -1 takes the devices that the others leave. Raises ValueError naming the sizes."""
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor, "context": context}
    for name, size in sizes.items():
        if size != -1 and size < 1:
            raise ValueError(f"mesh.{name}={size} must be >= 1, or -1 for the devices that the other axes leave")
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"mesh: {' and '.join(open_axes)} are all -1; only one axis can take the devices left over")
    named = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        if devices % named:
            raise ValueError(
                f"mesh: {_product(sizes)} = {named} does not divide the {devices} devices that are here; change it"
            )
        sizes[open_axes[0]] = devices // named
    elif named > devices:
        raise ValueError(f"mesh: {_product(sizes)} = {named} devices are asked for, {devices} are here; ask for fewer")
    return sizes


def _product(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size not in (-1, 1)) or "1"


def make_mesh(
    *, data: int = -1, fsdp: int = 1, tensor: int = 1, context: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """The mesh of these sizes, Auto axes, over `devices` (default: all of the job); enter it with `jax.set_mesh`.

    Sizes as in `mesh_sizes`; a product below the number of devices takes the first of them, in a job of one process
    only. Neighbours in the list are neighbours along context, then tensor: what communicates most stays closest."""
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes(len(devices), data=data, fsdp=fsdp, tensor=tensor, context=context)
    count = math.prod(sizes.values())
    if count != len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"mesh: {_product(sizes)} = {count} devices, but the {jax.process_count()} processes of this job have"
            f" {len(devices)}: every one must be used. Set one axis to -1."
        )
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * 4, devices=devices[:count])


def auto_mesh() -> AbstractMesh | None:
    """The mesh of `jax.set_mesh` if it is one of ours, has more than one device and XLA partitions all of its axes.

    None otherwise: without a mesh, on one device, and inside a `jax.shard_map`, where everything is local."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(AXES) <= set(mesh.axis_names) or not mesh.are_all_axes_auto or mesh.size == 1:
        return None
    return mesh


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """x, standing on the mesh as named: one name of ACTIVATIONS or None per axis of x.

    Does nothing without a mesh (see `auto_mesh`); an axis of x that its mesh axes do not divide stays whole, as one
    token or an odd batch in decoding does."""
    mesh = auto_mesh()
    if mesh is None:
        return x
    if len(axes) != x.ndim:
        raise ValueError(f"axes: {axes} name {len(axes)} axes, but x has shape {x.shape}; give one name, or None, each")
    wanted = [ACTIVATIONS[name] if name else None for name in axes]
    spec = [axis if size % extent(mesh.shape, axis) == 0 else None for axis, size in zip(wanted, x.shape, strict=True)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def extent(sizes: Mapping[str, int], axis: str | tuple[str, ...] | None) -> int:
    """Into how many parts a mesh of these sizes splits what stands on `axis`."""
    names = (axis,) if isinstance(axis, str) else axis or ()
    return math.prod(sizes[name] for name in names)


def path_of(keys: tuple) -> str:
    """Path of a leaf with slashes."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def specs(tree: Any) -> Any:
    """PartitionSpec of every leaf: a parameter, or a statistic of the optimiser that ends in a parameter's path.

    Scalars and random keys are whole. Raises ValueError with a table of all leaves that match no rule of RULES, or
    more than one, or a rule with another number of axes."""
    faults: list[tuple[str, str, str]] = []

    def spec(keys, leaf):
        path = path_of(keys)
        if leaf.ndim == 0:
            return PartitionSpec()
        found = [(rule, axes) for rule, axes in RULES if re.search(rf"(?:^|/)(?:{rule})$", path)]
        lead = (None,) if REPEATED.search(path) else ()
        if len(found) == 1 and len(lead + found[0][1]) == leaf.ndim:
            return PartitionSpec(*lead, *found[0][1])
        rules = ", ".join(rule for rule, _ in found)
        faults.append((path, str(tuple(leaf.shape)), f"another rank than {rules}" if len(found) == 1 else rules))
        return PartitionSpec()

    result = jax.tree_util.tree_map_with_path(spec, tree)
    if faults:
        wide, long = (max(len(row[i]) for row in faults) for i in (0, 1))
        table = "\n".join(f"  {path:<{wide}}  {shape:<{long}}  {rules or 'no rule'}" for path, shape, rules in faults)
        raise ValueError(
            f"sharding: {len(faults)} parameters do not match exactly one rule of sharding.RULES; add or sharpen one:\n"
            + table
        )
    return result


def state_shardings(mesh: Mesh, tree: Any) -> Any:
    """NamedSharding of every leaf of a state (see `specs`), for `jax.jit(init, out_shardings=...)`.

    Raises ValueError naming the leaves whose sizes the mesh does not divide."""
    wanted, faults = specs(tree), []
    sizes = dict(mesh.shape)
    for (keys, leaf), spec in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(wanted, is_leaf=_is_spec), strict=True
    ):
        for size, axis in zip(leaf.shape, spec, strict=False):
            if size % extent(sizes, axis):
                faults.append(f"  {path_of(keys)} {tuple(leaf.shape)}: {size} is not divisible by {axis}={sizes[axis]}")
    if faults:
        raise ValueError(
            "mesh: these parameters cannot be split evenly; change mesh or sizes (a tied vocabulary is not split):\n"
            + "\n".join(faults)
        )
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), wanted, is_leaf=_is_spec)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def batch_spec(ndim: int) -> PartitionSpec:
    """Rows over data and fsdp, tokens (the second axis) over context, anything else whole."""
    return PartitionSpec(*(ACTIVATIONS["batch"], ACTIVATIONS["time"])[:ndim], *(None,) * (ndim - 2))


def local_rows(mesh: Mesh, batch_size: int) -> slice:
    """The rows of a global batch that the devices of this process hold: what its loader has to read."""
    sharding = NamedSharding(mesh, batch_spec(1))
    rows = [index[0] for index in sharding.addressable_devices_indices_map((batch_size,)).values() if index]
    starts = [row.start or 0 for row in rows]
    stops = [batch_size if row.stop is None else row.stop for row in rows]
    return slice(min(starts), max(stops))


def place(mesh: Mesh, batch: Mapping[str, np.ndarray], batch_size: int | None = None) -> dict[str, jax.Array]:
    """Numpy arrays as arrays on the mesh: the rows of `local_rows` of a batch of batch_size; None: a whole batch, which
    every process holds."""
    return {name: _placed(mesh, leaf, batch_size) for name, leaf in batch.items()}


def _placed(mesh: Mesh, leaf: np.ndarray, batch_size: int | None) -> jax.Array:
    rows = leaf.shape[0] if batch_size is None else batch_size
    first = 0 if batch_size is None else local_rows(mesh, rows).start

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        row, *rest = index or (slice(None),)
        start, stop = row.start or 0, rows if row.stop is None else row.stop
        return leaf[(slice(start - first, stop - first), *rest)]

    sharding = NamedSharding(mesh, batch_spec(leaf.ndim))
    return jax.make_array_from_callback((rows, *leaf.shape[1:]), sharding, part)


def describe(mesh: Mesh) -> str:
    """The axes that split something, for a log line."""
    return ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1) or "one device"
