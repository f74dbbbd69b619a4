"""What a report says about its own making: commands, and hours counted from logs."""

import json
import pathlib

import pytest
from absl import flags
from absl.testing import flagsaver

from configs import stiffness
from efla_jax.train import settings
from experiments import report, spent, stiffness_report


def write_rows(file: pathlib.Path, rows) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def runs_of(folder: pathlib.Path) -> None:
    """A run that trained by itself, two of one program of three, one of another, and one without any time."""
    write_rows(folder / "alone" / "metrics.jsonl", [
        {"step": 1, "loss": 2.0},  # compiles, and so has no speed
        {"step": 10, "step_seconds": 0.5}, {"step": 10, "valid_loss": 1.0}, {"step": 30, "step_seconds": 2.0},
    ])  # fmt: skip
    write_rows(folder / "old" / "metrics.jsonl", [{"step": 30, "loss": 1.0}])
    write_rows(folder / "a" / "metrics.jsonl", [{"step": 30, "loss": 1.0}])
    device = {"device": "NVIDIA H200"}
    write_rows(folder / "results.jsonl", [
        {"name": "a", "seconds": 9999.0, "together": 1},  # trained again below
        {"name": "a", "seconds": 600.0, "together": 3, **device},
        {"name": "b", "seconds": 300.0, "share": 200.0, "together": 3, **device},  # ended before the others
        {"name": "c", "seconds": 40.0, "together": 1, **device}, {"name": "alone", "together": 1},
    ])  # fmt: skip


def test_hours_are_those_of_steps_and_shares(tmp_path):
    runs_of(tmp_path)
    found = spent.spent(tmp_path)
    assert found == spent.Spent(5, 4, 0.5 * 9 + 2.0 * 20 + 200 + 200 + 40, ("NVIDIA H200",))
    assert spent.sentence(found) == (
        "Runs: 5, 0.13 hours of NVIDIA H200 (logged steps; of a program of several runs each its share; 1 without a"
        " record of time)."
    )
    assert spent.spent(tmp_path / "alone") == spent.Spent(1, 1, 44.5, ())
    assert spent.sentence(spent.spent(tmp_path / "alone")).startswith("Runs: 1, 0.7 minutes (logged")
    assert spent.sentence(spent.spent(tmp_path / "old")) == "Runs: 1, none with a record of its time."


def test_a_line_is_noted_once_and_can_be_typed_again(tmp_path):
    line = spent.command_line("sweep", ["--grid=seed=0;a=1,2", "--workdir=runs/x", "--", "--config.a=1"])
    assert line == "python -m experiments.sweep '--grid=seed=0;a=1,2' --workdir=runs/x -- --config.a=1"
    for one in (line, "python -m experiments.sweep", line):
        spent.note_command(tmp_path, one)
    assert (tmp_path / spent.COMMANDS).read_text() == f"{line}\npython -m experiments.sweep\n"


def test_a_report_ends_with_commands_and_hours(tmp_path, monkeypatch):
    """Through the program: one of its reports, twice, the second time with nothing doubled."""
    config = settings.plain(stiffness.get_config("exact"))
    rows = [{"name": "a", "step": 9, "config": config, "best": 0.5, "scores": {"accuracy": 0.5}, "status": "finished",
             "seconds": 720.0, "together": 2, "device": "cpu"}]  # fmt: skip
    write_rows(tmp_path / "runs" / "results.jsonl", rows)
    spent.note_command(tmp_path / "runs", "python -m experiments.sweep --config=configs/stiffness.py")
    words = ["stiffness", f"--runs={tmp_path / 'runs'}", f"--out={tmp_path / 'out'}"]
    monkeypatch.setattr("sys.argv", ["report.py", *words])
    monkeypatch.setattr(stiffness_report, "stiffness", lambda config: (1.0, 2.0))  # which would begin a model
    flags.FLAGS.mark_as_parsed()
    for _ in range(2):
        with flagsaver.as_parsed(runs=str(tmp_path / "runs"), out=str(tmp_path / "out")):
            report.main(["report", "stiffness"])
        text = (tmp_path / "out" / "table.md").read_text()
        assert text.endswith(
            "|\n\nRuns: 1, 0.10 hours of cpu (logged steps; of a program of several runs each its share).\n\n```\n"
            "python -m experiments.sweep --config=configs/stiffness.py\n"
            f"python -m experiments.report {' '.join(words)}\n```\n"
        )


@pytest.mark.parametrize("text, message", [("{", "results.jsonl, line 1: not JSON")])
def test_a_damaged_row_is_named(tmp_path, text, message):
    (tmp_path / "results.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        spent.spent(tmp_path)
