"""The report of a recall sweep: the best rate of every mixer and width, over its seeds."""

import csv
import json

import pytest

from configs import paper_mqar
from efla_jax import train
from experiments import mqar_report


def write(folder, mixer, width, rate, seed, accuracy, steps=40, ended=True):
    config = train.plain(paper_mqar.get_config(f"log_linear-{mixer}-{width}"))
    config["optim"]["learning_rate"], config["seed"], config["train"]["steps"] = rate, seed, steps
    path = folder / f"{mixer}_{width}_{rate}_{seed}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    sizes = {f"test_accuracy/256x{pairs}": accuracy - pairs / 1000 for pairs in paper_mqar.PAIRS}
    rows = [{"step": 20, "loss": 1.0}, {"step": 20, "test_accuracy": 0.9}]
    rows += [{"step": steps, "test_accuracy": accuracy, **sizes}] * ended
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_rate_of_the_best_mean_counts(tmp_path, capsys):
    """A rate that one seed has not ended with is none."""
    runs = tmp_path / "runs"
    for seed, (low, high, broken) in enumerate(((0.5, 0.4, 0.9), (0.6, 0.8, None))):
        write(runs, "mamba2", 32, 1e-3, seed, low)
        write(runs, "mamba2", 32, 1e-2, seed, high)
        write(runs, "mamba2", 32, 3e-2, seed, broken or 0.0, ended=broken is not None)
    write(runs, "efla", 32, 1e-3, 0, 0.25)
    write(runs, "efla", 64, 1e-3, 0, 0.75)
    mqar_report.write(runs, tmp_path / "out")
    assert "left out, not at their end (--resume): mamba2_32_0.03_1" in capsys.readouterr().out
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert lines[2] == "| mixer | 32 | 64 | 32, published | 64, published |"
    assert lines[4:6] == ["| efla | 25.0 (1) | 75.0 (1) |  |  |", "| mamba2 | 60.0 ± 28.3 (2) |  | 75.1 | 89.6 |"]
    assert lines[7] == "| mixer | width | rate | 256x4 | 256x8 | 256x16 | 256x32 | 256x64 |"
    assert lines[-1].startswith("| mamba2 | 32 | 0.01 | 59.6 ± 28.3 (2) |") and len(lines) == 12
    with open(tmp_path / "out" / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7 and {row["best"] for row in rows if row["mixer"] == "mamba2"} == {"0.9"}
    with open(tmp_path / "out" / "sizes.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 7 * 5
    assert (tmp_path / "out" / "mqar.png").stat().st_size > 1000
    by_width, first, second = mqar_report.panels(mqar_report.chosen(mqar_report.read(runs)))
    assert by_width.lines["efla"] == ([32, 64], [[25.0, 75.0]]) and second.title == "width 64"
    assert first.lines["efla"][0] == [4, 8, 16, 32, 64] and set(second.lines) == {"efla"}


def test_results_of_a_sweep_are_enough(tmp_path):
    """Its results.jsonl without the folders; the best score of any evaluation stands there."""
    write(tmp_path / "runs", "efla", 32, 1e-3, 0, 0.5)
    (path,) = (tmp_path / "runs").iterdir()
    config = json.loads((path / "config.json").read_text())
    row = {"name": "a", "status": "finished", "step": 40, "config": config, "best": 0.75}
    row["scores"] = {"accuracy": 0.5, **{f"accuracy/256x{pairs}": 0.5 - pairs / 1000 for pairs in paper_mqar.PAIRS}}
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "results.jsonl").write_text(json.dumps(row) + "\n")
    (here,), (there,) = mqar_report.read(tmp_path / "runs"), mqar_report.read(tmp_path / "swept")
    assert there == here | {"best": 0.75} and here["best"] == 0.9


def test_runs_that_do_not_belong_together_are_refused(tmp_path):
    write(tmp_path, "efla", 32, 1e-3, 0, 0.5)
    write(tmp_path, "efla", 32, 1e-3, 1, 0.5, steps=30)
    with pytest.raises(ValueError, match="are runs of different tasks or numbers of steps"):
        mqar_report.read(tmp_path)
    write(tmp_path, "efla", 32, 1e-3, 1, 0.5)
    (tmp_path / "twin").symlink_to(tmp_path / "efla_32_0.001_0")
    with pytest.raises(ValueError, match="two runs are .*'efla', 32, 0.001, 0.*, one of them twin"):
        mqar_report.read(tmp_path)
    with pytest.raises(ValueError, match="no ended run of kind .recall. there"):
        mqar_report.read(tmp_path / "twin")
