"""Finished runs by their folder: what a config.json must hold before anything is done with the run."""

import json

import pytest

from configs import quickstart
from efla_jax.train import settings
from experiments import convert, runs


def test_a_config_without_a_section_is_named(tmp_path):
    """Also through a program that would read the section first."""
    config = settings.plain(quickstart.get_config("efla"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("model", "optim", "train"):
        kept = {section: value for section, value in config.items() if section != name}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        with pytest.raises(ValueError, match=f"{tmp_path}: the config.json of this run has no section '{name}'"):
            runs.restored(tmp_path, "checkpoint")
        if name != "train":
            with pytest.raises(SystemExit, match=f"has no section '{name}'"):
                convert.main(["export", f"--run={tmp_path}", f"--to={tmp_path / 'out'}"])


def test_runs_that_diverged_are_not_said_to_go_on(tmp_path, capsys):
    """Each with its folder; one of them was trained again, to its end."""
    config = settings.plain(quickstart.get_config("efla"))
    rows = [("a", "finished"), ("b", "diverged"), ("c", "diverged"), ("c", "finished")]
    with open(tmp_path / "results.jsonl", "w") as file:
        for name, status in rows:
            scores = {"accuracy": 0.5} if status == "finished" else {}
            row = {"name": name, "status": status, "config": config, "step": 3, "scores": scores, "best": 0.5}
            file.write(json.dumps(row) + "\n")
    for name in "abcd":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert [run.name for run in runs.ended_runs(tmp_path, "text")] == ["a", "c"]
    said = capsys.readouterr().out
    assert said == "diverged, without a score: b\nleft out, not at their end (--resume): d\n"
