"""Train a grid of configs, several at once, each as its own `experiments.train` in its own folder.

    python -m experiments.sweep --config=configs/smnist.py --arguments=efla,delta_net --workdir=runs/smnist --jobs=4 \
        --grid="optim.learning_rate=1e-3,3e-3;seed=0,1,2" -- --config.data.path=mnist.npz

--arguments are what stands behind the colon of --config; --grid crosses the values of any fields; what follows -- goes
to every run. Runs that have finished with the same command are not repeated, so a broken sweep is started again with
the same line. On a GPU the jobs share it: set XLA_PYTHON_CLIENT_PREALLOCATE=false. Exit status 1 if a run failed; its
output is in its folder's log.txt.
"""

import itertools
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from absl import app, flags
from tqdm import tqdm

CONFIG = flags.DEFINE_string("config", None, "experiment file, e.g. configs/smnist.py", required=True)
ARGUMENTS = flags.DEFINE_list("arguments", [""], "what stands behind the colon of --config, e.g. efla,delta_net")
GRID = flags.DEFINE_string("grid", "", "field=value,value;field=value: fields to cross, without the leading 'config.'")
WORKDIR = flags.DEFINE_string("workdir", None, "folder of the runs", required=True)
JOBS = flags.DEFINE_integer("jobs", 2, "runs at once", lower_bound=1)


def parse_grid(text: str) -> list[dict[str, str]]:
    """ "a=1,2;b=3" -> [{"a": "1", "b": "3"}, {"a": "2", "b": "3"}]. Raises ValueError for anything else."""
    fields = {}
    for part in filter(None, text.split(";")):
        name, equals, values = part.partition("=")
        if not equals or not name.strip() or not all(v.strip() for v in values.split(",")):
            raise ValueError(
                f"--grid: {part!r} is not field=value,value; write e.g. optim.learning_rate=1e-3,3e-3;seed=0,1"
            )
        fields[name.strip()] = [v.strip() for v in values.split(",")]
    return [dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]


def train(argument: str, point: dict[str, str], rest: list[str]) -> tuple[str, int]:
    """Run one point to its end; (name, exit status)."""
    name = (
        "_".join(filter(None, [argument, *(f"{field.split('.')[-1]}={value}" for field, value in point.items())]))
        or "run"
    )
    folder = pathlib.Path(WORKDIR.value) / name
    folder.mkdir(parents=True, exist_ok=True)
    config = f"--config={CONFIG.value}:{argument}" if argument else f"--config={CONFIG.value}"
    overrides = [f"--config.{field}={value}" for field, value in point.items()]
    command = [sys.executable, "-m", "experiments.train", config, f"--workdir={folder}", "--resume", *overrides, *rest]
    done = folder / "done"
    if done.exists() and done.read_text() == " ".join(command[1:]):
        return name, 0
    with open(folder / "log.txt", "a") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ).returncode
    if status == 0:
        done.write_text(" ".join(command[1:]))
    return name, status


def main(argv: list[str]) -> None:
    rest = argv[1:]
    stray = [word for word in rest if not word.startswith("--config.")]
    if stray:
        raise app.UsageError(f"stray argument {stray[0]!r}: behind -- stand overrides, --config.section.field=value")
    try:
        points = parse_grid(GRID.value)
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    work = list(itertools.product(ARGUMENTS.value, points))
    failed = []
    with ThreadPoolExecutor(JOBS.value) as pool, tqdm(total=len(work), unit="run") as bar:
        for name, status in pool.map(lambda item: train(*item, rest), work):
            bar.update()
            if status:
                failed.append(name)
                bar.write(f"failed: {name}, see {WORKDIR.value}/{name}/log.txt")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    app.run(main)
