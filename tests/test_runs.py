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
