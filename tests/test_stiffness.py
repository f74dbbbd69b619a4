"""The stiffness sweep: what the scale of the keys does to a step, its config, and the report of runs that diverged."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import smnist, stiffness
from efla_jax import layers
from efla_jax.train import settings
from experiments import stiffness_report


@pytest.mark.parametrize("step", ["exact", "euler"])
def test_a_scale_is_that_of_the_projection_of_keys(step):
    """Without convolution and activation, keys times 3 are those of a kernel times 3; and beta |k|^2 times 9."""
    options = dict(width=8, num_heads=2, conv_width=0, activation="none", step=step, chunk_size=16)
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    scaled, plain = layers.EFLA(**options, key_scale=3.0), layers.EFLA(**options)
    params = plain.init(jax.random.key(1), x)
    larger = {"params": dict(params["params"], k_proj=jax.tree.map(lambda leaf: 3 * leaf, params["params"]["k_proj"]))}
    np.testing.assert_allclose(scaled.apply(params, x)[0], plain.apply(larger, x)[0], rtol=2e-5, atol=1e-6)
    assert jax.tree.structure(scaled.init(jax.random.key(1), x)) == jax.tree.structure(params)

    def median(layer):
        _, captured = layer.apply(params, x, capture_intermediates=True, mutable="intermediates")
        return layers.signals(captured)["stiffness_p50"]

    np.testing.assert_allclose(median(scaled), 9 * median(plain), rtol=1e-5)


def test_the_config_is_the_recipe_of_smnist_and_its_grid_can_be_set():
    config, recipe = stiffness.get_config("euler"), smnist.get_config("efla")
    options = dict(config.model.mixer_options.efla)
    assert options == dict(recipe.model.mixer_options.efla) | {"step": "euler", "key_scale": 1.0}
    assert dict(config.optim) == dict(recipe.optim)
    sweep = stiffness.get_sweep()
    assert set(sweep["arguments"]) < set(stiffness.STEPS) and len(sweep["grid"]["seed"]) >= 3
    assert "model.mixer_options.efla.key_scale" in sweep["grid"]
    for step in stiffness.STEPS:
        settings.check_sections(settings.plain(stiffness.get_config(step)))
    with pytest.raises(ValueError, match="'eulr' is not one of"):
        stiffness.get_config("eulr")


def swept(folder, results):
    """A sweep's results.jsonl of (step, scale, seed, accuracy or None where the run diverged)."""
    folder.mkdir(exist_ok=True)
    with open(folder / "results.jsonl", "a") as file:
        for step, scale, seed, accuracy in results:
            config = settings.plain(stiffness.get_config(step)) | {"seed": seed}
            config["model"]["mixer_options"]["efla"]["key_scale"] = scale
            row = {"name": f"{step}_{scale}_{seed}", "step": 200, "config": config, "best": accuracy, "scores": {}}
            row |= {"status": "diverged"} if accuracy is None else {"status": "finished"}
            row |= {} if accuracy is None else {"scores": {"accuracy": accuracy}}
            file.write(json.dumps(row) + "\n")


def test_a_report_counts_what_diverged(tmp_path):
    swept(tmp_path / "runs", [
        *(("exact", scale, seed, 0.9 + 0.01 * seed) for scale in (1.0, 4.0) for seed in (0, 1)),
        ("euler", 1.0, 0, 0.8), ("euler", 1.0, 1, 0.7), ("euler", 4.0, 0, None), ("euler", 4.0, 1, 0.5),
        ("normalized", 1.0, 0, 0.25), ("normalized", 1.0, 1, None),
    ])  # fmt: skip
    drawn = {}

    def draw(panels, file):
        drawn[file.name] = panels[0].lines

    stiffness_report.write(tmp_path / "runs", tmp_path / "out", draw)
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| key scale | 1 | 4 |" in text
    assert "| euler | 75.0 [70.0, 80.0] | 50.0 [50.0, 50.0], 1 of 2 diverged |" in text
    assert "| exact | 90.5 [90.0, 91.0] | 90.5 [90.0, 91.0] |" in text
    assert "| normalized | 25.0 [25.0, 25.0], 1 of 2 diverged |  |" in text
    lines = drawn["stiffness.png"]
    assert lines["euler"][0] == [1.0, 4.0]
    np.testing.assert_allclose(lines["euler"][1], [[80, 10], [70, 50]])
    assert lines["normalized"][0] == [1.0]
    with open(tmp_path / "out" / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10 and sum(row["accuracy"] == "" for row in rows) == 2

    median, high = stiffness_report.stiffness(settings.plain(stiffness.get_config("euler")))
    assert 0 < median < high
    assert f"| beta k.k at the start, median | {median:.2g} | {16 * median:.2g} |" in text
    assert f"| beta k.k at the start, 95 % | {high:.2g} | {16 * high:.2g} |" in text
    swept(tmp_path / "runs", [("euler", 1.0, 0, 0.8)])  # the same name: the last row counts
    assert len(stiffness_report.read(tmp_path / "runs")[0]) == 10


def test_a_report_refuses_other_images(tmp_path):
    config = settings.plain(smnist.get_config("efla"))
    row = {"name": "a", "step": 9, "config": config, "best": 0.5, "scores": {"accuracy": 0.5}, "status": "finished"}
    (tmp_path / "results.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match="a has no key_scale; give runs of configs/stiffness.py"):
        stiffness_report.read(tmp_path)


def test_the_exact_step_contracts_at_any_scale_and_euler_does_not():
    """The erase gate is 1 - (survival along the key): the exact one stays in [0, 1], that of Euler passes 2."""
    k, v, beta = jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 1, 2)), jnp.full((1, 1, 1), 0.12)
    for scale in (0.25, 1.0, 8.0, 32.0):
        gates = {step: layers.EFLA(width=4, num_heads=1, step=step).coefficients(scale * k, v, beta, None)[2].item()
                 for step in ("exact", "euler")}  # fmt: skip
        assert 0 <= gates["exact"] <= 1
        assert (gates["euler"] > 2) == (0.12 * 4 * scale**2 > 2)
