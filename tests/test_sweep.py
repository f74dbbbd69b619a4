"""Sweeps: grids, runs together and alone, what is recorded, and what is not done twice."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
from absl import app, flags
from absl.testing import flagsaver

from efla_jax import metrics
from experiments import runs, sweep, usage

ROOT = Path(__file__).resolve().parent.parent

FILE = '''"""A recall task that a test can afford."""

from configs import adaptive_decay


def get_config(arg=""):
    config = adaptive_decay.get_config(arg)
    config.mesh.data = 1
    config.data.batch_size, config.data.eval_batch_size = 8, 16
    config.data.task.update(vocab_size=16, length=8, pairs=1, examples=40, test_examples=16, longer=(12,))
    config.model.update(width=8, depth=1)
    for options in config.model.mixer_options.values():
        options.update(head_dim=8, state_dim=4)
    config.train.update(steps=6, log_every=3, eval_every=4)
    return config


def get_sweep():
    return {"arguments": ("mamba2",), "grid": {"optim.learning_rate": (1e-3, 3e-3), "seed": (0, 1)}}
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "tiny.py"
    path.write_text(FILE)
    return path


def swept(*rest, **words):
    """sweep.py in this process, with flags as on a command line."""
    flags.FLAGS.mark_as_parsed()
    with flagsaver.as_parsed(**words):
        sweep.main(["sweep", *rest])


def results(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_grid_is_that_of_the_experiment_file_unless_told_otherwise(file, tmp_path):
    flags.FLAGS.mark_as_parsed()
    words = {"config": str(file), "workdir": str(tmp_path)}
    with flagsaver.as_parsed(**words):
        names = [cell.name for cell in sweep.cells([])]
        assert names == [f"mamba2_learning_rate={rate}_seed={seed}" for rate in ("0.001", "0.003") for seed in (0, 1)]
    with flagsaver.as_parsed(**words, arguments="linear,mamba2", grid="seed=7;data.task.pairs=1,2"):
        cells = sweep.cells(["--config.train.steps=5"])
        assert len(cells) == 2 * 2 * 2
        assert cells[0].point == {"optim.learning_rate": "0.001", "seed": "7", "data.task.pairs": "1"}
        assert cells[0].words[:3] == ("-m", "experiments.train", f"--config={file}:linear")
        config = sweep.read_config(cells[3])
        assert (config["train"]["steps"], config["seed"], config["data"]["task"]["pairs"]) == (5, 7, 2)
        assert config["optim"]["learning_rate"] == 3e-3 and config["model"]["mixers"] == ("log_linear_mamba2",)


@pytest.mark.parametrize(("words", "message"), [
    ({"grid": "sed=1"}, "mamba2_learning_rate=0.001_seed=0_sed=1: .*sed"),
    ({"grid": "sed=1", "together": "0"}, "mamba2_learning_rate=0.001_seed=0_sed=1: .*sed"),
    ({"grid": "optim.lr=1"}, "seed=0_lr=1: no config field is called lr in this experiment file"),
    ({"grid": "seed=1,"}, "--grid: 'seed=1,' is not field=value"),
    ({"grid": "seed=0,1,0"}, "mamba2_learning_rate=0.001_seed=0: two runs of the grid have this name"),
    ({"arguments": "linear,linear"}, "linear_learning_rate=0.001_seed=0: two runs"),
    ({"arguments": "mamba3"}, "'mamba3' is not one of"),
    ({"config": "nowhere.py"}, "--config=nowhere.py: no such experiment file"),
    ({"first": "true", "together": "0"}, "--first and --minutes go with --together"),
])  # fmt: skip
def test_what_is_no_grid_is_refused(file, tmp_path, words, message):
    with pytest.raises(app.UsageError, match=message):
        swept(**{"config": str(file), "workdir": str(tmp_path / "runs"), "together": "4", **words})
    assert not (tmp_path / "runs").exists()


def test_what_is_wrong_with_a_command_is_one_line(file, tmp_path, capsys):
    words = {"config": str(file), "workdir": str(tmp_path), "grid": "seed"}
    with flagsaver.as_parsed(**words), pytest.raises(SystemExit, match="2"):
        usage.one_line(sweep.main, ["sweep"])
    assert re.fullmatch(r"error: --grid: 'seed' is not field=value.*\n", capsys.readouterr().err)
    command = [sys.executable, "-m", "experiments.sweep", "--config=a.py", "--jobs=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (2, "error: flag --jobs=0: 0 is not a positive integer\n")


def test_runs_together_are_recorded_and_not_repeated(file, tmp_path, monkeypatch):
    words = {"config": str(file), "workdir": str(tmp_path), "together": "3", "jobs": "1", "checkpoints": "true"}
    sizes = []
    train = sweep.population.fit_population

    def counted(configs, *others, **named):
        sizes.append(len(configs))
        return train(configs, *others, **named)

    monkeypatch.setattr(sweep.population, "fit_population", counted)
    swept(**words, grid="optim.learning_rate=1e-3;seed=0,1")
    rows = results(tmp_path)
    assert sizes == [2] and [row["name"] for row in rows] == [f"mamba2_learning_rate=1e-3_seed={i}" for i in (0, 1)]
    row, folder = rows[1], tmp_path / rows[1]["name"]
    assert (row["status"], row["step"], row["together"], row["argument"]) == ("finished", 6, 2, "mamba2")
    assert row["point"] == {"optim.learning_rate": "1e-3", "seed": "1"}
    assert row["config"] == json.loads((folder / "config.json").read_text()) and row["config"]["seed"] == 1
    assert re.fullmatch(r"[0-9a-f]{40}\+?|", row["commit"]) and row["seconds"] > 0
    scored = [one for one in metrics.read_rows(folder) if "test_accuracy" in one]
    assert [one["step"] for one in scored] == [4, 6] and row["best"] == max(one["test_accuracy"] for one in scored)
    assert {f"test_{name}": value for name, value in row["scores"].items()} | {"step": 6} == scored[-1]
    assert "accuracy/12x1" in row["scores"]
    params = runs.restored(folder, "run")[3]
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(params))

    more = {**words, "grid": "optim.learning_rate=1e-3,3e-3;seed=0,1"}
    swept(**more)  # the two that are left
    assert sizes == [2, 2] and len(results(tmp_path)) == 4
    swept(**more)
    assert sizes == [2, 2]


def test_programs_take_turns_on_the_devices(file, tmp_path, monkeypatch):
    found = []

    def note(configs, folders, progress, keep, first, until):
        found.append((jax.numpy.zeros(()).device.id, [config["seed"] for config in configs]))
        raise MemoryError

    monkeypatch.setattr(sweep.population, "fit_population", note)
    with pytest.raises(SystemExit):
        swept(
            config=str(file), workdir=str(tmp_path), together="1", jobs="1", grid="seed=0,1,2;optim.learning_rate=1e-3"
        )
    assert found == [(i, [i]) for i in range(3)] and len(jax.local_devices()) == 8


def test_what_was_outrun_has_ended_for_sweeps_that_ask_for_the_first_only(file, tmp_path, monkeypatch):
    trained = []

    def end(configs, folders, progress, keep, first, until):
        trained.append(len(configs))
        for folder, config in zip(folders, configs, strict=True):
            (folder / "config.json").write_text(json.dumps(config))
        outcome = sweep.population.Outcome("finished", 6, {"accuracy": 1.0}, 1.0, 0.1, None)
        return [outcome, *[outcome._replace(status="outrun", seconds=4.0)] * (len(configs) - 1)]

    monkeypatch.setattr(sweep.population, "fit_population", end)
    words = {"config": str(file), "workdir": str(tmp_path), "together": "4", "grid": "seed=0"}
    for first in ("true", "true", "false"):
        swept(**words, first=first)
    assert trained == [2, 1] and [row["status"] for row in results(tmp_path)] == ["finished", "outrun", "finished"]
    assert [row["share"] for row in results(tmp_path)] == [2.0, 2.0, 0.1]


def test_a_program_that_fails_says_so_and_ends_with_status_1(file, tmp_path, monkeypatch):
    def fail(configs, folders, progress, keep, first, until):
        raise MemoryError("no room")

    monkeypatch.setattr(sweep.population, "fit_population", fail)
    with pytest.raises(SystemExit):
        swept(config=str(file), workdir=str(tmp_path), together="4")
    logs = sorted(tmp_path.glob("*/log.txt"))
    assert len(logs) == 4 and "MemoryError: no room" in logs[0].read_text()
    assert not (tmp_path / "results.jsonl").exists()
    assert not list(tmp_path.glob("*/done"))


def test_runs_that_diverged_have_ended(file, tmp_path, monkeypatch, capsys):
    """They fail the sweep, once, and are not counted as runs to go on with."""
    trained = []

    def diverge(configs, folders, progress, keep, first, until):
        trained.append(len(configs))
        for config, folder in zip(configs, folders, strict=True):
            (folder / "config.json").write_text(json.dumps(config))
        return [sweep.population.Outcome("diverged", 3, {}, float("nan"), 1.0, None) for _ in configs]

    monkeypatch.setattr(sweep.population, "fit_population", diverge)
    words = {"config": str(file), "workdir": str(tmp_path), "together": "4"}
    with pytest.raises(SystemExit):
        swept(**words)
    swept(**words)
    assert trained == [4] and [row["status"] for row in results(tmp_path)] == ["diverged"] * 4
    assert "have not ended" not in capsys.readouterr().out


def test_what_is_paused_goes_on_with_the_same_line(file, tmp_path, capsys):
    words = {"config": str(file), "together": "2", "jobs": "1", "grid": "optim.learning_rate=1e-3;seed=0,1"}
    swept(**words, workdir=str(tmp_path / "paused"), minutes="1e-3")  # a step, as compiling takes longer
    assert not (tmp_path / "paused" / "results.jsonl").exists()
    assert "2 runs have not ended" in capsys.readouterr().out
    swept(**words, workdir=str(tmp_path / "paused"))
    swept(**words, workdir=str(tmp_path / "whole"))
    for one, other in zip(results(tmp_path / "paused"), results(tmp_path / "whole"), strict=True):
        assert (one["name"], one["step"], one["scores"]) == (other["name"], other["step"], other["scores"])


def test_ctrl_c_pauses_programs_of_several_runs(file, tmp_path, monkeypatch):
    """Those that had not begun do not begin, and the sweep ends as soon as the others have paused."""
    begun, paused = [], []

    def train(configs, folders, progress, keep, first, until):
        begun.append(folders)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        end = time.monotonic() + 20
        while not until() and time.monotonic() < end:
            time.sleep(0.01)
        paused.append(until())
        return [sweep.population.Outcome("paused", 3, {}, 0.0, 1.0, None) for _ in configs]

    monkeypatch.setattr(sweep.population, "fit_population", train)
    with pytest.raises(KeyboardInterrupt):
        swept(config=str(file), workdir=str(tmp_path), together="2", jobs="1")
    assert len(begun) == 1 and paused == [True] and not (tmp_path / "results.jsonl").exists()


def test_a_run_that_was_told_to_stop_has_not_ended(file, tmp_path, monkeypatch, capsys):
    """It exits with status 0, as one that has: what it saved is newer than its last score."""

    def stopped(command, **_):
        (folder,) = (Path(word.partition("=")[2]) for word in command if word.startswith("--workdir="))
        (folder / "checkpoints" / "5").mkdir(parents=True)
        (folder / metrics.FILE_NAME).write_text('{"step": 4, "test_accuracy": 0.5}\n')
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(sweep.subprocess, "run", stopped)
    swept(config=str(file), workdir=str(tmp_path), grid="optim.learning_rate=1e-3;seed=0", together="0")
    assert "1 runs have not ended: the same line goes on with them" in capsys.readouterr().out
    assert not list(tmp_path.glob("**/done")) and not (tmp_path / "results.jsonl").exists()


@pytest.mark.slow
def test_a_run_alone_is_recorded_alike(file, tmp_path):
    words = {"config": str(file), "workdir": str(tmp_path), "grid": "optim.learning_rate=1e-3;seed=1"}
    swept(**words)
    (row,) = results(tmp_path)
    swept(**words, together="2")  # has ended
    both = {**words, "workdir": str(tmp_path / "other"), "grid": "optim.learning_rate=1e-3;seed=0,1"}
    swept(**both, together="1")  # each on a device of its own
    _, other = sorted(results(tmp_path / "other"), key=lambda one: one["name"])
    assert row.keys() < other.keys() and (row["step"], row["together"], other["together"]) == (6, 1, 1)
    for name, value in other["scores"].items():
        assert row["scores"][name] == pytest.approx(value, rel=2e-4, abs=2e-4), name
