"""Reading a state or its parameters: the whole tree is compared before anything is read."""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from efla_jax.checkpoint.folder import newest_intact, read_json, require_intact, steps_of

PyTree = Any
SHOWN = 20  # differences or names in one message
PARTS = {"params": "params", "ema": "opt_state/ema"}  # of a state, for `load_params`


class Report(NamedTuple):
    """What reading did with each leaf, by its path: `missing` were kept as given, `unused` stayed on disk; and the
    metadata that was saved with the step (None where there is none)."""

    folder: Path
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    cast: tuple[str, ...]
    metadata: Any = None

    def lines(self) -> tuple[str, ...]:
        """For people: where leaves were read, and a line for each kind of exception that was made."""
        kinds = {"not in the checkpoint, kept as given": self.missing, "in the checkpoint, not used": self.unused,
                 "cast": self.cast}
        return (f"read {len(self.loaded)} leaves from {self.folder}",
                *(f"{len(paths)} leaves {kind}: {listed(paths)}" for kind, paths in kinds.items() if paths))


def load_params(path: str | Path, abstract_params: PyTree, *, part: str = "params", allow_partial: bool = False,
                cast: bool = False) -> tuple[PyTree, Report]:  # fmt: skip
    """Parameters alone out of a checkpoint, and what was done with each leaf: to begin from another run's.

    path: a run's folder, its `checkpoints` or one step's folder; of several steps the newest that is not damaged.
    part: "params", or "ema" for their running average. abstract_params, allow_partial and cast are as in
    `Checkpointer.restore`, and so are the errors.
    """
    if part not in PARTS:
        raise ValueError(f"part={part!r} must be one of {', '.join(PARTS)}")
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"path={str(path)!r} is no folder: no parameters to read there; give a run's folder or one step's"
        )
    if (folder / "state").is_dir():
        require_intact(folder)
    else:
        root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
        step, damaged = newest_intact(root, steps_of(root))
        for number, reason in damaged.items():
            warnings.warn(f"passed over step={number}: {root / str(number)} is damaged ({reason})", stacklevel=2)
        folder = root / str(step)
    params, report = read_state(folder, PARTS[part], abstract_params, allow_partial, cast)
    return params, report._replace(metadata=read_json(folder, "metadata").get("value"))


def read_state(folder: Path, part: str, wanted: PyTree, allow_partial: bool, cast: bool) -> tuple[PyTree, Report]:
    """The leaves of `wanted` out of the state in `folder`, below the path `part`."""
    handler = ocp.PyTreeCheckpointHandler()
    try:
        stored = handler.metadata(folder / "state").tree
    except Exception as error:
        raise _unreadable(folder, error) from error
    prefix = f"{part}/" if part else ""
    # Named tuples are dicts there, and tuples lists; empty nodes hold no leaf and do not count.
    named = {prefix + path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(wanted)}
    leaves = {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(stored)}
    saved = {path: leaf for path, leaf in leaves.items() if path.startswith(prefix)}
    if part and not saved:
        raise ValueError(f"{folder} holds no leaf below {part!r}; choose another part, or another checkpoint")
    report = _compare(folder, saved, named, allow_partial, cast)
    targets = {path: _target(path, named[path]) for path in report.loaded}
    arguments = {path: ocp.checkpoint_utils.construct_restore_args(target) for path, target in targets.items()}

    def chosen(options: Mapping[str, Any], other: Any) -> PyTree:
        return jax.tree_util.tree_map_with_path(lambda keys, _: options.get(path_of(keys), other), stored)

    try:
        tree = handler.restore(folder / "state", args=ocp.args.PyTreeRestore(
            item=chosen(targets, ocp.PLACEHOLDER), restore_args=chosen(arguments, ocp.RestoreArgs())))  # fmt: skip
    except Exception as error:
        raise _unreadable(folder, error) from error
    read = {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree) if leaf is not ...}
    for path, target in targets.items():
        if not read[path].sharding.is_equivalent_to(target.sharding, target.ndim):
            raise RuntimeError(f"{path} was read as {read[path].sharding}, not as asked, {target.sharding}")
    return jax.tree_util.tree_map_with_path(lambda keys, leaf: read.get(prefix + path_of(keys), leaf), wanted), report


def _unreadable(folder: Path, error: Exception) -> ValueError:
    """For an error of any kind: tensorstore raises bare Exceptions."""
    return ValueError(f"step={folder.name} in {folder.parent} cannot be read ({error}); if it is damaged, restore an "
                      "earlier step")  # fmt: skip


def _compare(
    folder: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any], allow_partial: bool, cast: bool
) -> Report:
    """Every difference at once, before anything is read; ValueError for those that were not allowed."""
    there, here = _layout(saved), _layout(wanted)
    report = Report(
        folder,
        loaded=tuple(path for path in here if path in there),
        missing=tuple(path for path in here if path not in there),
        unused=tuple(path for path in there if path not in here),
        cast=tuple(path for path in here if path in there and here[path][0] != there[path][0]),
    )
    wrong = {path for path in report.loaded if here[path][1] != there[path][1]}
    wrong |= {path for path in report.cast if not cast or _is_key(wanted[path])}
    wrong |= {path for path in report.missing if not allow_partial or isinstance(wanted[path], jax.ShapeDtypeStruct)}
    wrong |= set() if allow_partial else set(report.unused)
    if wrong:
        lines = [f"  {path}: checkpoint {_shown(there.get(path))}, run {_shown(here.get(path))}"
                 for path in sorted(wrong)]  # fmt: skip
        more = [f"  ... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        head = (f"checkpoint step={folder.name} in {folder.parent} does not fit abstract_state in {len(lines)} leaves; "
                "use the configuration of the saved run, or allow_partial for leaves that one of them lacks (the run "
                "must have values for its own) and cast for dtypes:")  # fmt: skip
        raise ValueError("\n".join([head, *lines[:SHOWN], *more]))
    return report


def _target(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None and jax.process_count() > 1:
        raise ValueError(f"abstract_state: {path} has no sharding; with several processes each leaf needs one")
    # Without a sharding orbax would take the saved one, which may name devices that are not here.
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _layout(leaves: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Path to dtype and shape in the words orbax stores: typed keys as their integers."""
    data = {path: jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf for path, leaf in leaves.items()}
    return {path: (np.dtype(leaf.dtype).name, tuple(leaf.shape)) for path, leaf in data.items()}


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _shown(layout: tuple[str, tuple[int, ...]] | None) -> str:
    return f"{layout[0]}{list(layout[1])}" if layout else "has no such leaf"


def listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def path_of(keys: tuple) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")
