"""The report of a sweep of selective copying."""

import csv
import json

import pytest

from configs import paper_selective_copying
from efla_jax import train
from experiments import copying_report


def write(folder, arg, seed, accuracy, longer):
    config = train.plain(paper_selective_copying.get_config(arg))
    config["seed"], config["train"]["steps"] = seed, 200
    path = folder / f"{arg}_{seed}"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    name = f"test_accuracy/{2 * config['data']['task']['length']}"
    rows = [{"step": 100, "test_accuracy": 0.9}, {"step": 200, "test_accuracy": accuracy, name: longer}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_lengths_and_kinds_beside_what_is_published(tmp_path):
    runs = tmp_path / "runs"
    write(runs, "decay_1024-mlp_softplus", 0, 0.5, 0.25)
    write(runs, "decay_1024-linear", 0, 0.6, 0.1)
    write(runs, "decay_1024-linear", 1, 0.2, 0.3)
    write(runs, "decay_256-linear", 0, 0.8, 0.4)
    write(runs, "decay_256-mamba2", 0, 0.1, 0.05)
    copying_report.write(runs, tmp_path / "out")
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert lines[2:7] == [
        "| length | mamba2 | linear | mlp_softplus |",
        "| --- | --- | --- | --- |",
        "| 256 | 10.0 (1/1) | 80.0 (0/1) |  |",
        "| 1024 |  | 40.0 ± 28.3 (1/2) | 50.0 (0/1) |",
        "| published for 1024 |  | 40.6 ± 19.8 | 54.8 ± 2.3 |",
    ]
    assert "| 1024 |  | 20.0 ± 14.1 (2/2) | 25.0 (1/1) |" in lines and "| 256 | 90.0 (0/1) | 90.0 (0/1) |  |" in lines
    with open(tmp_path / "out" / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["mamba2", "linear", "linear", "linear", "mlp_softplus"]
    assert (tmp_path / "out" / "copying.png").stat().st_size > 1000
    assert copying_report.panel(copying_report.read(runs), "accuracy", "").lines["linear"] == (
        [1024], [[pytest.approx(60.0)], [pytest.approx(20.0)]],
    )  # fmt: skip
    curve = copying_report.curves(copying_report.read(runs), 1024)
    assert curve.lines["linear"][0] == [100, 200] and curve.lines["mlp_softplus"][1] == [[90.0, 50.0]]
    (runs / "twin").symlink_to(runs / "decay_256-mamba2_0")
    with pytest.raises(ValueError, match="two runs are .*'mamba2', 256, 0.*, one of them twin"):
        copying_report.read(runs)


def test_runs_that_are_broken_off_later_count_as_shorter_ones(tmp_path):
    """They have no scores of longer rows, and a schedule over their steps would have been another."""
    runs = tmp_path / "runs"
    for seed in (0, 1):
        write(runs, "decay_1024-linear", seed, 0.5, 0.3)
        file = runs / f"decay_1024-linear_{seed}" / "config.json"
        config = json.loads(file.read_text())
        config["train"]["steps"] = 300
        if seed:
            config["optim"]["schedule"] = "cosine"
        file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no ended run"):
        copying_report.read(runs)
    for steps, score in ((100, 90.0), (200, 50.0)):
        copying_report.write(runs, tmp_path / "out", steps)
        text = (tmp_path / "out" / "table.md").read_text()
        assert f"| 1024 | {score} (0/1) |" in text and f"Runs of {steps} steps were broken off later" in text
    config["optim"]["schedule"], config["seed"] = "constant", 2
    write(runs, "decay_256-linear", 0, 0.8, 0.4)
    copying_report.write(runs, tmp_path / "out", 100)
    assert "rows twice as long" not in (tmp_path / "out" / "table.md").read_text()
