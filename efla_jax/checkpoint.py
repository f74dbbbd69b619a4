"""Checkpoints: state, data position and metadata written together, compared leaf by leaf before anything is read.

A thin wrapper around orbax's CheckpointManager. A step appears under its number only when all of it is on disk, so a
killed run leaves the last complete one. Writing happens in the background; arrays may be donated once `save` returns.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

PyTree = Any
DIFFERENCES_SHOWN = 20


class Restored(NamedTuple):
    """What `Checkpointer.restore` returns."""

    state: PyTree
    data_state: Any
    metadata: Any


class Checkpointer:
    """Saves and restores (state, data_state, metadata) by step number below `directory`.

    Keeps the newest `max_to_keep` steps, and every multiple of `keep_period` (0: none) for good. `read_only=True`, for
    evaluation, creates and deletes nothing. Use as a context manager or call `close`: both wait for the write to end.
    """

    def __init__(self, directory: str | Path, *, max_to_keep: int = 3, keep_period: int = 0, read_only: bool = False):
        if max_to_keep < 1:
            raise ValueError(f"max_to_keep={max_to_keep} must be >= 1")
        if keep_period < 0:
            raise ValueError(f"keep_period={keep_period} must be >= 0; 0 keeps only the newest")
        self.directory = Path(directory).expanduser().absolute()
        if read_only and not self.directory.is_dir():
            raise FileNotFoundError(f"directory={str(directory)!r} does not exist: no checkpoint to read there")
        if read_only:
            options = ocp.CheckpointManagerOptions(read_only=True, create=False, save_interval_steps=0)
        else:
            options = ocp.CheckpointManagerOptions(max_to_keep=max_to_keep, keep_period=keep_period or None)
        self._read_only, self._writing = read_only, False
        # Named handlers: without them a fresh manager cannot tell what an existing checkpoint holds.
        handlers = {"state": ocp.StandardCheckpointHandler(), "data": ocp.JsonCheckpointHandler(),
                    "metadata": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def latest_step(self) -> int | None:
        """The newest complete step, None if there is none; waits for a write in progress."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> tuple[int, ...]:
        """Every complete step, oldest first; waits for a write in progress."""
        self.wait()
        return tuple(sorted(self._manager.all_steps()))

    def save(self, step: int, state: PyTree, data_state: Any, metadata: Any) -> None:
        """Starts writing `step` in the background, after the write before it has ended.

        state: pytree of jax or numpy arrays; data_state and metadata: anything JSON can hold. Raises ValueError for a
        step that is not newer than the latest, a leaf that is no array, or values JSON cannot hold; and whatever
        stopped the write before it.
        """
        if self._read_only:
            raise ValueError(f"step={step} cannot be saved: the checkpointer of {self.directory} was opened read_only")
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(f"step={step} must be newer than the latest checkpoint, {latest}, in {self.directory}; "
                             "resume from it, or use another directory for a fresh run")
        leaves = jax.tree_util.tree_leaves_with_path(state)
        wrong = [f"{_path(keys)} ({type(leaf).__name__})" for keys, leaf in leaves
                 if not isinstance(leaf, jax.Array | np.ndarray)]
        if wrong:
            raise ValueError(f"state must hold jax or numpy arrays only, not {', '.join(wrong[:DIFFERENCES_SHOWN])}")
        for name, value in (("data_state", data_state), ("metadata", metadata)):
            _require_json(name, value)
        saved = self._manager.save(step, args=ocp.args.Composite(
            state=ocp.args.StandardSave(state), data=ocp.args.JsonSave({"value": data_state}),
            metadata=ocp.args.JsonSave({"value": metadata})))
        self._writing = True
        if not saved:
            raise RuntimeError(f"step={step} was not saved in {self.directory}: orbax declined without a reason")

    def restore(self, abstract_state: PyTree, step: int | None = None) -> Restored:
        """Reads `step` (None: the latest) into the structure, dtypes and shardings of `abstract_state`.

        abstract_state: pytree of arrays or ShapeDtypeStructs, e.g. from jax.eval_shape; leaves without a sharding go to
        the default device. Raises FileNotFoundError if there is no such step, and ValueError listing every leaf whose
        path, shape or dtype differs from the checkpoint (nothing is cast, dropped or invented), or naming a step that
        is damaged.
        """
        step = self._find(step)
        target = jax.tree.map(_abstract, abstract_state)
        self._compare(target, step)
        try:
            read = self._manager.restore(step, args=ocp.args.Composite(
                state=ocp.args.StandardRestore(target), data=ocp.args.JsonRestore(), metadata=ocp.args.JsonRestore()))
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(f"step={step} in {self.directory} cannot be read ({error}); if it is damaged, remove that "
                             "folder and restore an earlier step") from error
        return Restored(read["state"], read["data"]["value"], read["metadata"]["value"])

    def check_for_errors(self) -> None:
        """Raises what stopped a background write, without waiting for one in progress: call it every step."""
        # orbax's method of this name stays silent: its finalising thread keeps the exception until somebody joins it.
        if self._writing and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Returns when everything saved so far is on disk; raises what stopped it."""
        self._writing = False
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def close(self) -> None:
        """Waits for background writes and ends; raises what stopped a write."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _find(self, step: int | None) -> int:
        steps = self.all_steps()
        if not steps:
            raise FileNotFoundError(f"directory={str(self.directory)!r} holds no complete checkpoint; "
                                    "check the path, or start a fresh run")
        if step is None:
            return steps[-1]
        if step not in steps:
            raise FileNotFoundError(f"step={step} is not in {self.directory}; complete checkpoints: "
                                    f"{', '.join(map(str, steps))}")
        return step

    def _compare(self, target: PyTree, step: int) -> None:
        stored, damage = None, "it has no description of its state"
        try:
            stored = self._manager.item_metadata(step)["state"]
        except (KeyError, ValueError) as error:  # of a folder that was emptied, or copied in part
            damage = str(error)
        if stored is None:
            raise ValueError(f"step={step} in {self.directory} is damaged: {damage}; remove that folder and restore "
                             "an earlier step")
        saved, wanted = _layout(stored.tree), _layout(ocp.tree.serialize_tree(target, keep_empty_nodes=True))
        absent = "has no such leaf"
        lines = [f"  {path}: checkpoint {saved.get(path, absent)}, run {wanted.get(path, absent)}"
                 for path in sorted(saved.keys() | wanted.keys()) if saved.get(path) != wanted.get(path)]
        if lines:
            more = [f"  ... and {len(lines) - DIFFERENCES_SHOWN} more"] if len(lines) > DIFFERENCES_SHOWN else []
            head = (f"checkpoint step={step} in {self.directory} does not fit abstract_state in {len(lines)} leaves; "
                    "use the configuration of the saved run:")
            raise ValueError("\n".join([head, *lines[:DIFFERENCES_SHOWN], *more]))


def _path(keys: tuple) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _require_json(name: str, value: Any) -> None:
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must survive JSON unchanged ({error}); use dicts, lists, numbers, strings") from error
    if not same:
        raise ValueError(f"{name}={value!r} must survive JSON unchanged; use string keys, and lists for tuples")


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    # Without a sharding orbax would take the saved one, which may name devices that are not here.
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _layout(tree: PyTree) -> dict[str, str]:
    """Path to "dtype[shape]", in the words orbax stores: named tuples as dicts, typed keys as their integers."""
    layout = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        layout[_path(keys)] = f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
    return layout
