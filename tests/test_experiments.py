"""The command lines: what they refuse, what they say, and that the small ones run."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import report, sweep

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ("experiments.train", "--config=configs/quickstart.py:efla")


def run(*words):
    """(exit status, output) of python -m words."""
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


REFUSED = {
    "misspelt field": ([*TRAIN, "--config.optim.learning_rat=1e-3"], 'Did you mean "learning_rate"'),
    "misspelt section": ([*TRAIN, "--config.optm.learning_rate=1e-3"], 'Did you mean "optim"'),
    "misspelt flag": ([*TRAIN, "--workdr=x"], "Unknown command line flag 'workdr'"),
    "a word that is no flag": ([*TRAIN, "--workdir=x", "--resume", "False"], "stray argument 'False'"),
    "unlike any field": ([*TRAIN, "--workdir=x", "--config.model.zzz=1"], "no config field is called zzz"),
    "no such dtype": ([*TRAIN, "--workdir=x", "--config.model.dtype=bfloat61"], "config.model: dtype: 'bfloat61'"),
    "stray word": ([*TRAIN, "--workdir=x", "config.seed=1"], "stray argument 'config.seed=1'"),
    "exponent for an integer": ([*TRAIN, "--config.train.steps=1e3"], "invalid literal for int"),
    "infinite": (
        [*TRAIN, "--workdir=x", "--config.optim.learning_rate=1e400"],
        "config.optim.learning_rate: inf is not",
    ),
    "no workdir": (list(TRAIN), "--workdir is missing"),
    "empty workdir": ([*TRAIN, "--workdir="], "--workdir is missing"),
    "workdir is a file": ([*TRAIN, "--workdir=setup.py"], "workdir: setup.py is a file"),
    "no such file": (["experiments.train", "--config=configs/none.py", "--workdir=x"], "configs/none.py"),
    "no such mixer": (
        ["experiments.train", "--config=configs/quickstart.py:elfa", "--workdir=x"],
        "'elfa' is not one of",
    ),
    "whole section": ([*TRAIN, "--workdir=x", '--config.optim={"a": 1}'], "a section cannot be replaced"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_the_command_line_is_refused_in_one_line(fault):
    words, message = REFUSED[fault]
    status, output = run(*words)
    assert status in (1, 2) and message in output, output
    assert "Traceback" not in output and not (ROOT / "x").exists()


def test_benchmark_writes_table_and_picture(tmp_path):
    status, output = run("experiments.benchmark", "--lengths=16,32", "--repeats=1", "--heads=1", f"--out={tmp_path}")
    assert status == 0, output
    with open(tmp_path / "benchmark.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 4 * 2 and all(float(r["ms"]) > 0 for r in rows)
    assert (tmp_path / "benchmark.png").exists() and "| 32 | chunked |" in (tmp_path / "benchmark.md").read_text()
    status, output = run("experiments.benchmark", "--implementations=chunky", f"--out={tmp_path}")
    assert status != 0 and "'chunky' is not one of" in output


def test_a_grid_is_crossed_or_refused():
    points = sweep.parse_grid("optim.learning_rate=1e-3,3e-3;seed=0,1")
    assert len(points) == 4 and points[1] == {"optim.learning_rate": "1e-3", "seed": "1"}
    assert sweep.parse_grid("") == [{}]
    for text in ("seed", "seed=", "seed=1,,2", "=1"):
        with pytest.raises(ValueError, match="is not field=value"):
            sweep.parse_grid(text)


def test_report_takes_seeds_together(tmp_path):
    for seed, accuracy in ((0, 0.5), (1, 0.7)):
        folder = tmp_path / f"run{seed}"
        folder.mkdir()
        model = {"mixers": ["efla"], "mixer_options": {"efla": {"step": "euler"}}}
        (folder / "config.json").write_text(
            json.dumps({"seed": seed, "model": model, "optim": {"learning_rate": 1e-3}})
        )
        rows = [
            ("intensity", 1.0, accuracy),
            ("intensity", 2.0, accuracy / 2),
            ("noise", 0.0, accuracy),
            ("noise", 0.1, 0.1),
        ]
        with open(folder / "corruption.csv", "w", newline="") as file:
            csv.writer(file).writerows([("corruption", "severity", "accuracy"), *rows])
    runs = report.read(tmp_path)
    assert list(runs) == ["efla euler, lr 0.001"]
    assert "| efla euler, lr 0.001 | 2 | 60.0 [50.0, 70.0] | 30.0 [25.0, 35.0] | 10.0 [10.0, 10.0] |" in report.table(
        runs
    )
    shutil.copytree(tmp_path / "run1", tmp_path / "run2")
    with pytest.raises(ValueError, match="two runs are 'efla euler, lr 0.001' with seed 1, one of them in run2"):
        report.read(tmp_path)
    with pytest.raises(ValueError, match="no sub-folder holds a corruption.csv"):
        report.read(tmp_path / "run0")
