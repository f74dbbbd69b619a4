"""Saving in the background, what is kept of it, and going on from it."""

import json
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from efla_jax.checkpoint.barrier import SECONDS_BETWEEN_LOOKS, Barrier
from efla_jax.checkpoint.folder import (
    damage_of,
    metrics_of,
    newest_intact,
    read_json,
    require_intact,
    steps_of,
    write_checksums,
)
from efla_jax.checkpoint.restore import listed, path_of, read_state

PyTree = Any
FORMAT = 2  # of the metadata: 1 had no metrics, and no checksums beside it


class Restored(NamedTuple):
    """What `Checkpointer.restore` returns; `notes` say what `allow_partial` and `cast` let pass."""

    state: PyTree
    data_state: Any
    metadata: Any
    step: int
    notes: tuple[str, ...]


class Checkpointer:
    """Saves and restores (state, data_state, metadata) by step number below `directory`.

    Keeps the newest `max_to_keep` steps, every multiple of `keep_period` (0: none) and, if `keep_best` names a metric,
    the step where it was best: smallest, or largest with a minus before the name, as in "-accuracy". `read_only=True`,
    for evaluation, creates, moves and deletes nothing. Use as a context manager or call `close`: both wait for the
    write to end.
    """

    def __init__(self, directory: str | Path, *, max_to_keep: int = 3, keep_period: int = 0, keep_best: str = "",
                 read_only: bool = False):  # fmt: skip
        if max_to_keep < 1:
            raise ValueError(f"max_to_keep={max_to_keep} must be >= 1")
        if keep_period < 0:
            raise ValueError(f"keep_period={keep_period} must be >= 0; 0 keeps only the newest")
        self.directory = Path(directory).expanduser().absolute()
        if read_only and not self.directory.is_dir():
            raise FileNotFoundError(f"directory={str(self.directory)!r} does not exist: no checkpoint to read there")
        self._keep = _Keep(max_to_keep, keep_period, keep_best)
        for step in steps_of(self.directory):
            self._keep.note(step, metrics_of(self.directory / str(step)))
        self._writing: int | None = None
        self._manager: ocp.CheckpointManager | None = None
        self._barrier = Barrier() if jax.process_count() > 1 else None
        if not read_only:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self._keep,
                cleanup_tmp_directories=True,
                # Otherwise one cut file would keep the whole folder from being opened.
                lightweight_initialize=True,
                # Otherwise threads outlive a folder that cannot be made, and a failed run does not end for minutes.
                async_options=ocp.AsyncOptions(
                    create_directories_asynchronously=False, barrier_sync_fn=self._barrier
                ),
            )
            handlers = {"state": _StateHandler(), "data": ocp.JsonCheckpointHandler(),
                        "metadata": ocp.JsonCheckpointHandler()}  # fmt: skip
            self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def latest_step(self) -> int | None:
        """The newest complete step, damaged since or not, None if there is none; waits for a write in progress."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The step where the metric of `keep_best` was best, None if none has it; waits for a write in progress."""
        return self._keep.best(self.all_steps())

    def all_steps(self) -> tuple[int, ...]:
        """Every complete step, oldest first; waits for a write in progress."""
        self.wait()
        return steps_of(self.directory)

    def save(self, step: int, state: PyTree, data_state: Any, metadata: Any,
             metrics: Mapping[str, float] | None = None) -> None:  # fmt: skip
        """Starts writing `step` in the background, after the write before it has ended.

        state: pytree of jax or numpy arrays; data_state and metadata: anything JSON can hold; metrics: scores of this
        state, if there are any, among them the one `keep_best` names. Steps from this number on that are damaged are
        moved aside, with a warning. Raises ValueError for a step that is not newer than the latest undamaged one, a
        leaf that is no array, or values JSON cannot hold; RuntimeError for what stopped this write or the one before.
        """
        if self._manager is None:
            raise ValueError(f"step={step} cannot be saved: the checkpointer of {self.directory} was opened read_only")
        newer = [number for number in self.all_steps() if number >= step]
        damaged = {number: damage_of(self.directory / str(number)) for number in newer}
        intact = [number for number in newer if not damaged[number]]
        if intact:
            raise ValueError(f"step={step} must be newer than the latest checkpoint, {max(intact)}, in "
                             f"{self.directory}; resume from it, or use another directory for a fresh run")
        leaves = jax.tree_util.tree_leaves_with_path(state)
        wrong = [f"{path_of(keys)} ({type(leaf).__name__})" for keys, leaf in leaves
                 if not isinstance(leaf, jax.Array | np.ndarray)]  # fmt: skip
        if wrong:
            raise ValueError(f"state must hold jax or numpy arrays only, not {listed(wrong)}")
        scores = {name: float(value) for name, value in (metrics or {}).items()}
        if scores and self._keep.metric and self._keep.metric not in scores:
            raise ValueError(f"keep_best names the metric {self._keep.metric!r}, metrics has {listed(scores)} only")
        for name, value in (("data_state", data_state), ("metadata", metadata)):
            require_json(name, value)
        self._set_aside(damaged)
        self._keep.note(step, scores)
        texts = {name: value if math.isfinite(value) else str(value) for name, value in scores.items()}
        try:
            saved = self._manager.save(step, args=ocp.args.Composite(
                state=_SaveState(state), data=ocp.args.JsonSave({"value": data_state}),
                metadata=ocp.args.JsonSave({"format": FORMAT, "value": metadata, "metrics": texts})))  # fmt: skip
        except Exception as error:  # of any kind: orbax and tensorstore raise bare Exceptions too
            self._failed(step, error)
        if not saved:
            raise RuntimeError(f"step={step} was not saved in {self.directory}: orbax declined without a reason")
        self._writing = step

    def restore(self, abstract_state: PyTree, step: int | None = None, *, allow_partial: bool = False,
                cast: bool = False, check: Callable[[Any, int], None] | None = None) -> Restored:  # fmt: skip
        """Reads `step` into the structure, dtypes and shardings of `abstract_state`.

        step=None: the newest that is not damaged; those passed over are moved aside, to <step>.damaged, with a warning.
        abstract_state: pytree of arrays or ShapeDtypeStructs. The sharding of each leaf is the one it gets, on whatever
        devices the checkpoint was written; without one it goes to the default device, which needs a single process.
        allow_partial: leaves in one of the two only are allowed, and those that the checkpoint lacks are taken from
        abstract_state, which must hold arrays there. cast: other dtypes are allowed. check: is given the metadata and
        the number of the step before any leaf is compared, and may refuse them in words of its own.

        Raises FileNotFoundError if there is no such step, ValueError if it is damaged, naming the file, or lists every
        leaf whose path, shape or dtype differs.
        """
        steps = self.all_steps()
        if step is None:
            step, damaged = newest_intact(self.directory, steps)
        elif step not in steps:
            raise FileNotFoundError(f"step={step} is not in {self.directory}; complete checkpoints: "
                                    f"{', '.join(map(str, steps)) or 'none'}")  # fmt: skip
        else:
            damaged = {}
            require_intact(self.directory / str(step))
        folder = self.directory / str(step)
        data, metadata = (read_json(folder, item)["value"] for item in ("data", "metadata"))
        if check:
            check(metadata, step)
        state, report = read_state(folder, "", abstract_state, allow_partial, cast)
        self._set_aside(damaged)
        return Restored(state, data, metadata, step, report.lines())

    def check_for_errors(self) -> None:
        """Raises what stopped a background write, without waiting for one in progress: call it every step."""
        # orbax's method of this name stays silent: its finalising thread keeps the exception until somebody joins it.
        if self._writing is not None and not self._goes_on():
            self.wait()

    def wait(self) -> None:
        """Returns when everything saved so far is on disk; raises what stopped it."""
        if self._writing is None or self._manager is None:
            return
        while self._barrier and self._goes_on():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        step, self._writing = self._writing, None
        try:
            if self._barrier and self._barrier.failure:  # threads may be stuck: nobody joins them
                raise RuntimeError(self._barrier.failure)
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            self._failed(step, error)

    def close(self) -> None:
        """Waits for background writes and ends; raises what stopped a write."""
        try:
            self.wait()
        finally:
            if self._manager and not (self._barrier and self._barrier.failure):
                self._manager.close()

    def _goes_on(self) -> bool:
        assert self._manager is not None
        return self._manager.is_saving_in_progress() and not (self._barrier and self._barrier.broken())

    def _failed(self, step: int, error: Exception) -> NoReturn:
        assert self._manager is not None
        self._keep.forget(step)
        if jax.process_index() == 0:  # what was written so far may be what fills the disk
            for unfinished in self.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(unfinished, ignore_errors=True)
        self._manager.reload()  # what this save would have replaced is still there
        remedy = "start the job again to go on" if self._barrier else "this one can be saved again"
        raise RuntimeError(f"step={step} was not saved in {self.directory} ({error}); earlier steps are untouched, and "
                           f"once the cause is gone {remedy}") from error  # fmt: skip

    def _set_aside(self, damaged: Mapping[int, str]) -> None:
        """Frees the numbers of damaged steps; their folders stay, under another name."""
        for step, reason in damaged.items():
            folder, aside = self.directory / str(step), self.directory / f"{step}.damaged"
            if self._manager is None:
                warnings.warn(f"passed over step={step}: {folder} is damaged ({reason})", stacklevel=3)
                continue
            self._keep.forget(step)
            count = 1
            while aside.exists():
                count += 1
                aside = self.directory / f"{step}.damaged{count}"
            if jax.process_index() == 0:
                folder.rename(aside)
            warnings.warn(f"step={step}: {folder} is damaged ({reason}); it was moved to {aside}", stacklevel=3)
        if damaged and self._manager:
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("efla_jax/checkpoint/aside")
            self._manager.reload()


class _Keep:
    """Which steps survive a save; also the memory of their scores, since orbax's would not survive a cut file."""

    def __init__(self, newest: int, period: int, metric: str):
        self.newest, self.period = newest, period
        self.metric, self.sign = metric.removeprefix("-"), -1.0 if metric.startswith("-") else 1.0
        self.scores: dict[int, float] = {}

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.metric and math.isfinite(metrics.get(self.metric, math.nan)):
            self.scores[step] = self.sign * metrics[self.metric]

    def forget(self, step: int) -> None:
        self.scores.pop(step, None)

    def best(self, steps: Iterable[int]) -> int | None:
        """The newest of equals."""
        return min((step for step in steps if step in self.scores), key=lambda s: (self.scores[s], -s), default=None)

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """What orbax asks before it deletes."""
        steps = [info.step for info in checkpoints]
        kept = {self.best(steps), *steps[-self.newest:]}
        return [step in kept or bool(self.period and step % self.period == 0) for step in steps]


class _StateHandler(ocp.StandardCheckpointHandler):
    """Writes the checksums when every process has written its arrays, and before the step receives its name."""

    def finalize(self, directory) -> None:
        super().finalize(directory)
        write_checksums(Path(directory).parent)


@ocp.args.register_with_handler(_StateHandler, for_save=True)
class _SaveState(ocp.args.StandardSave):
    """orbax chooses a handler by the type of its arguments."""


@ocp.args.register_with_handler(_StateHandler, for_restore=True)
class _RestoreState(ocp.args.StandardRestore):
    """Never used, but a handler needs both."""


def require_json(name: str, value: Any) -> None:
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must survive JSON unchanged ({error}); use dicts, lists, numbers, strings") from error
    if not same:
        raise ValueError(f"{name}={value!r} must survive JSON unchanged; use string keys, and lists for tuples")
