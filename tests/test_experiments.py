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
    options = ("--op=log_linear_delta_rule", "--lengths=16,32", "--repeats=1", "--heads=1", f"--out={tmp_path}")
    status, output = run("experiments.benchmark", *options, "--implementations=chunked,flat,softmax")
    assert status == 0, output
    with open(tmp_path / "benchmark.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * 2 and all(float(r["ms"]) > 0 for r in rows)
    ms = {(r["T"], r["implementation"], r["measured"]): float(r["ms"]) for r in rows}
    for r in rows:
        flat, half = ms[r["T"], "flat", r["measured"]], ms["16", r["implementation"], r["measured"]]
        assert float(r["over_flat"]) == pytest.approx(float(r["ms"]) / flat)
        assert r["over_half_T"] == "nan" if r["T"] == "16" else float(r["over_half_T"]) == float(r["ms"]) / half
    assert (tmp_path / "benchmark.png").exists() and "| 32 | chunked |" in (tmp_path / "benchmark.md").read_text()
    for name, message in (("chunky", "'chunky' is not one of"), ("flat", "'flat' is delta_rule itself")):
        status, output = run("experiments.benchmark", f"--implementations={name}", f"--out={tmp_path}")
        assert status != 0 and message in output


def test_benchmark_of_decoding_counts_states_and_caches(tmp_path):
    sizes = ("--heads=2", "--key_dim=4", "--value_dim=8", "--dtype=bfloat16", "--repeats=1", "--tokens=3")
    options = ("--op=log_linear_attention", "--decode", "--positions=6,31", *sizes, f"--out={tmp_path}")
    status, output = run("experiments.benchmark", *options)
    assert status == 0, output
    with open(tmp_path / "decode.csv", newline="") as file:
        rows = {(r["implementation"], int(r["position"])): r for r in csv.DictReader(file)}
    slot = 4 * 2 * 4 * 8
    for position, levels, live in ((6, 4, 2), (31, 6, 5)):
        row = rows["log_linear_attention", position]
        assert int(row["levels"]) == levels and int(row["state_bytes"]) == levels * slot + 4
        assert float(row["live_mib"]) == pytest.approx(live * slot / 2**20, rel=0.01)
        assert int(rows["flat", position]["state_bytes"]) == slot
        assert int(rows["softmax", position]["state_bytes"]) == 2 * 2 * 2 * 8 * (position + 1) + 4
    assert all(float(r["us_per_token"]) > 0 for r in rows.values())
    assert "| 31 | log_linear_attention | 6 |" in (tmp_path / "decode.md").read_text()


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
