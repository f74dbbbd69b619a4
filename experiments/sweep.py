"""Train a grid of configs, several at once, each into its own folder.

    python -m experiments.sweep --config=configs/smnist.py --arguments=efla,delta_net --workdir=runs/smnist --jobs=4 \
        --grid="optim.learning_rate=1e-3,3e-3;seed=0,1,2" -- --config.data.path=mnist.npz
    python -m experiments.sweep --config=configs/paper_mqar.py --workdir=runs/mqar --together=12 --jobs=4

--arguments are what stands behind the colon of --config; --grid crosses the values of any fields; what follows -- goes
to every run. What is not given is the experiment file's own `get_sweep()`, {"arguments": (...), "grid": {field:
(values)}}, if it has one; fields of --grid stand for its own.

Without --together every run is an `experiments.train` of its own, --jobs of them at once; on a GPU they share it: set
XLA_PYTHON_CLIENT_PREALLOCATE=false. --together=N trains up to N runs that differ in seed, learning rate and weight
decay only as one program (`train.population`), to keep a GPU busy with models of a few thousand parameters; --jobs is
then how many such programs are compiled and run at once, in one process, program after program on the next of its
devices. Such runs keep no checkpoint unless --checkpoints is given, and image classifiers among them have no curves
under corruption. Where the best of a grid is all that is asked for, --first saves what can no longer change it: with
--together, once a run has reached train.stop_at, others of its program and seed are "outrun", which no report counts
and a later sweep without --first trains.

results.jsonl gets a row for every run that has ended: its status, scores, config and commit; commands.txt has the lines
that trained them, for reports. Runs that have ended with the same command are not repeated, so a broken sweep is
started again with the same line. With --minutes=N, where time is limited, programs that still train then are paused,
and with Ctrl-C those that train; the same line goes on where they were. Exit status 1 if a run failed; what it said is
in its folder's log.txt.
"""

import datetime
import importlib.util
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple

import jax
from absl import app, flags
from ml_collections import config_flags
from tqdm import tqdm

import efla_jax
from efla_jax import metrics
from efla_jax.train import plain, population
from experiments import spent
from experiments.result_files import commit
from experiments.usage import of_field, run_in_one_line

CONFIG = flags.DEFINE_string("config", None, "experiment file, e.g. configs/smnist.py", required=True)
ARGUMENTS = flags.DEFINE_list("arguments", None, "what stands behind the colon of --config, e.g. efla,delta_net")
GRID = flags.DEFINE_string("grid", "", "field=value,value;field=value: fields to cross, without the leading 'config.'")
WORKDIR = flags.DEFINE_string("workdir", None, "folder of the runs", required=True)
JOBS = flags.DEFINE_integer("jobs", 2, "runs, or with --together programs, at once", lower_bound=1)
TOGETHER = flags.DEFINE_integer("together", 0, "most runs of one program; 0: a process for every run", lower_bound=0)
MINUTES = flags.DEFINE_float("minutes", 0.0, "with --together: pause what still trains then; 0: never", lower_bound=0.0)
FIRST = flags.DEFINE_bool("first", False, "with --together: one run of a seed at train.stop_at ends the seed's others")
CHECKPOINTS = flags.DEFINE_bool("checkpoints", False, "with --together: keep the parameters of every run")

Point = dict[str, str]
APPENDING = threading.Lock()


class Cell(NamedTuple):
    """A run of the grid. words: what stands behind `python` to train it by itself."""

    name: str
    argument: str
    point: Point
    folder: pathlib.Path
    overrides: tuple[str, ...]
    words: tuple[str, ...]

    def mark(self, status: str) -> str:
        """What `folder/done` says of a run that has ended. One that is outrun has not, for a sweep without --first."""
        return " ".join((*self.words, *["--first"] * (status == "outrun")))

    @property
    def done(self) -> bool:
        file = self.folder / "done"
        ends = ("finished", "outrun") if FIRST.value else ("finished",)
        return file.exists() and file.read_text() in map(self.mark, ends)


def parse_fields(text: str) -> dict[str, list[str]]:
    """ "a=1,2;b=3" -> {"a": ["1", "2"], "b": ["3"]}. Raises ValueError for anything else."""
    fields = {}
    for part in filter(None, text.split(";")):
        name, equals, values = part.partition("=")
        if not equals or not name.strip() or not all(v.strip() for v in values.split(",")):
            raise ValueError(
                f"--grid: {part!r} is not field=value,value; write e.g. optim.learning_rate=1e-3,3e-3;seed=0,1"
            )
        fields[name.strip()] = [v.strip() for v in values.split(",")]
    return fields


def crossed(fields: dict[str, list[str]]) -> list[Point]:
    """Every choice of one value per field: of a=1,2;b=3 {"a": "1", "b": "3"} and {"a": "2", "b": "3"}."""
    return [dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]


def experiment(file: str) -> ModuleType:
    """The experiment file as a module."""
    spec = importlib.util.spec_from_file_location("experiment_file", file)
    if spec is None or spec.loader is None or not pathlib.Path(file).is_file():
        raise ValueError(f"--config={file}: no such experiment file; the path is seen from here.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(rest: Sequence[str]) -> list[Cell]:
    """The grid of the flags. Raises ValueError for flags that are none."""
    module = experiment(CONFIG.value)
    own = module.get_sweep() if hasattr(module, "get_sweep") else {}
    fields = {name: [str(v) for v in values] for name, values in own.get("grid", {}).items()} | parse_fields(GRID.value)
    arguments = ARGUMENTS.value if ARGUMENTS.value is not None else own.get("arguments", [""])
    found = []
    for argument, point in itertools.product(arguments, crossed(fields)):
        words = [argument, *(f"{field.split('.')[-1]}={value}" for field, value in point.items())]
        name = "_".join(filter(None, words)) or "run"
        folder = pathlib.Path(WORKDIR.value) / name
        config = f"--config={CONFIG.value}:{argument}" if argument else f"--config={CONFIG.value}"
        overrides = (*(f"--config.{field}={value}" for field, value in point.items()), *rest)
        alone = ("-m", "experiments.train", config, f"--workdir={folder}", "--resume", *overrides)
        found.append(Cell(name, argument, point, folder, overrides, alone))
    names = [cell.name for cell in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice}: two runs of the grid have this name; give every argument and value once.")
    return found


def read_config(cell: Cell) -> dict[str, Any]:
    """The cell's config as `experiments.train` would have read it. Raises ValueError for a field that does not fit."""
    own, words = flags.FlagValues(), ["sweep", *cell.overrides]
    try:
        config = experiment(CONFIG.value).get_config(cell.argument)
        holder = config_flags.DEFINE_config_dict("config", config, flag_values=own, sys_argv=words)
        own(words)
    except flags.Error as error:
        raise ValueError(f"{cell.name}: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{cell.name}: {of_field(error)}") from error
    return plain(holder.value)


def record(cell: Cell, status: str, step: int, scores: dict, more: dict) -> None:
    """A row of results.jsonl, and the mark that the cell has ended."""
    config = json.loads((cell.folder / "config.json").read_text())
    row = {
        "name": cell.name, "argument": cell.argument, "point": cell.point, "status": status, "step": step,
        "scores": scores, **more, "command": " ".join(("python", *cell.words)), "version": efla_jax.__version__,
        "commit": commit(), "date": datetime.date.today().isoformat(), "config": config,
    }  # fmt: skip
    with APPENDING, open(pathlib.Path(WORKDIR.value) / "results.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    (cell.folder / "done").write_text(cell.mark(status))


def alone(cell: Cell) -> list[str]:
    """Run one cell as a process of its own; its name if it failed."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *cell.words]
    with open(cell.folder / "log.txt", "a") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ).returncode
    if status:
        return [cell.name]
    names = ("test_macro_accuracy", "test_accuracy", "valid_accuracy")  # of the split that is held out; the goal first
    scored = [row for row in metrics.read_rows(cell.folder) if any(name in row for name in names)]
    last = dict(scored[-1]) if scored else {"step": 0}
    best = max((next(row[name] for name in names if name in row) for row in scored), default=None)
    step = int(last.pop("step"))
    if step < max((int(file.name) for file in cell.folder.glob("checkpoints/*") if file.name.isdecimal()), default=0):
        return []  # told to stop: what it saved has no scores yet
    scores = {name.partition("_")[2]: value for name, value in last.items()}
    record(cell, "finished", step, scores, {"best": best, "together": 1})
    return []


def together(group: list[Cell], tell: Callable[[int], None], until: Callable[[], bool]) -> list[str]:
    """Train the cells of a group as one program; the names of those that failed. tell: hundredths of runs done; until:
    whether it is to pause."""
    told = 0
    if until():
        return []
    configs = [read_config(cell) for cell in group]
    for cell in group:
        cell.folder.mkdir(parents=True, exist_ok=True)

    def progress(step: int, going: int) -> None:
        nonlocal told
        share = 100 * step // configs[0]["train"]["steps"] if going else 100
        if share > told:
            tell(len(group) * (share - told))
            told = share

    try:
        folders = [cell.folder for cell in group]
        found = population.fit_population(
            configs, folders, progress, keep=CHECKPOINTS.value, first=FIRST.value, until=until
        )
    except Exception:  # a program that does not fit must not end those beside it
        for cell in group:
            (cell.folder / "log.txt").write_text(traceback.format_exc())
        tell(len(group) * (100 - told))
        return [cell.name for cell in group]
    if any(outcome.status == "paused" for outcome in found):
        return []  # the rows of all come at the end
    share = max(outcome.seconds for outcome in found) / len(group)  # the program trains until its last run ends
    for cell, outcome in zip(group, found, strict=True):
        more = {
            "best": outcome.best, "seconds": round(outcome.seconds, 1), "share": round(share, 2),
            "together": len(group), "device": jax.devices()[0].device_kind,
        }  # fmt: skip
        record(cell, outcome.status, outcome.step, outcome.scores, more)
    return [cell.name for cell, outcome in zip(group, found, strict=True) if outcome.status == "diverged"]


def groups(waiting: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that can be one program, at most --together in each."""
    found: dict[str, list[Cell]] = {}
    for cell in waiting:
        found.setdefault(population.shared(read_config(cell)), []).append(cell)
    return [list(part) for group in found.values() for part in itertools.batched(group, TOGETHER.value)]


def main(argv: list[str]) -> None:
    rest = argv[1:]
    stray = [word for word in rest if not word.startswith("--config.")]
    if stray:
        raise app.UsageError(f"stray argument {stray[0]!r}: behind -- stand overrides, --config.section.field=value")
    if (FIRST.value or MINUTES.value) and not TOGETHER.value:
        raise app.UsageError("--first and --minutes go with --together: they are about runs of one program")
    end, stopped = time.monotonic() + 60 * MINUTES.value if MINUTES.value else math.inf, threading.Event()
    try:
        work = cells(rest)
        waiting = [cell for cell in work if not cell.done]
        for cell in waiting:  # before the first of them is trained
            read_config(cell)
        parts = groups(waiting) if TOGETHER.value else [[cell] for cell in waiting]
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    pathlib.Path(WORKDIR.value).mkdir(parents=True, exist_ok=True)
    spent.note_command(pathlib.Path(WORKDIR.value), spent.command_line("sweep", sys.argv[1:]))
    failed = []
    style = "{l_bar}{bar}| [{elapsed}<{remaining}]"
    with (
        ThreadPoolExecutor(JOBS.value) as pool,
        tqdm(total=100 * len(work), initial=100 * (len(work) - len(waiting)), bar_format=style) as bar,
    ):

        def run(number: int, group: list[Cell]) -> list[str]:
            if TOGETHER.value:
                devices = jax.local_devices()
                with jax.default_device(devices[number % len(devices)]):
                    return together(group, bar.update, lambda: stopped.is_set() or time.monotonic() > end)
            names = alone(group[0])
            bar.update(100)
            return names

        ended = len(work) - len(waiting)
        bar.set_description(f"{ended}/{len(work)} runs")
        try:
            for group, names in zip(parts, pool.map(run, itertools.count(), parts), strict=True):
                ended += len(group)
                bar.set_description(f"{ended}/{len(work)} runs")
                failed += names
                for name in names:
                    bar.write(f"failed: {name}, see {WORKDIR.value}/{name}")
        except KeyboardInterrupt:  # the pool waits for what it has begun
            stopped.set()
            bar.write("told to stop: programs of several runs pause after their step, and the same line goes on")
            raise
    if left := sum(not cell.done and cell.name not in failed for cell in work):
        print(f"{left} runs have not ended: the same line goes on with them")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    run_in_one_line(main)
