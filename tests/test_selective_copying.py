"""Selective copying: where things stand in a row, how they are drawn, the papers' settings, and that it is learned."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from configs import paper_selective_copying as recipe
from efla_jax import data, train
from efla_jax.data.selective_copying import SelectiveCopying
from efla_jax.layers import MIXERS
from efla_jax.train import settings
from efla_jax.train.population import fit_population, shared


@pytest.mark.parametrize("fields", [
    {}, {"vocab_size": 128, "copied": (3, 65), "noise": (67, 127), "marker": 66, "copies": 5},
])  # fmt: skip
def test_a_row_is_noise_with_what_is_copied_then_markers(fields):
    task = SelectiveCopying(length=60, **fields)
    tokens, targets = task.rows(3000, 60, np.random.default_rng(0), True)
    assert tokens.dtype == targets.dtype == np.int32 and tokens.shape == targets.shape == (3000, 60)
    copies, (low, high), front = task.copies, task.copied, 60 - task.copies
    assert np.all(tokens[:, front:] == task.marker) and np.all(targets[:, :front] == -1)
    inside = (tokens[:, :front] >= low) & (tokens[:, :front] <= high)
    assert np.all(inside.sum(1) == copies)
    copied = tokens[:, :front][inside].reshape(3000, copies)
    assert np.all(copied == targets[:, front:])  # in their order
    rest = tokens[:, :front][~inside]
    assert (rest.min(), rest.max()) == task.noise
    for values, (first, last) in ((copied, task.copied), (rest, task.noise)):
        found, counts = np.unique(values, return_counts=True)
        assert found.tolist() == list(range(first, last + 1)) and np.abs(counts / counts.mean() - 1).max() < 0.3
    by_place = inside.mean(0)  # every place alike
    assert by_place == pytest.approx(np.full(front, copies / front), abs=0.05)
    first_place = np.argmax(inside, axis=1).mean()
    assert first_place == pytest.approx((front - copies) / (copies + 1), rel=0.1)  # of a uniform draw without repeats


def test_published_sizes():
    """14 ids among noise 0; 4096 tokens in all; the second task's ids and lengths; fresh or fixed rows."""
    for arg, length, ids, noise in (("mamba-mamba2", 4096, 14, 1), ("decay_1024-linear", 1024, 63, 61)):
        config = train.plain(recipe.get_config(arg))
        dataset = settings.build_dataset(config)
        task = dataset.task
        assert (dataset.length, task.copies, config["data"]["batch_size"]) == (length, 16, 64)
        assert task.copied[1] - task.copied[0] + 1 == ids and task.noise[1] - task.noise[0] + 1 == noise
    assert dataset.steps_per_epoch == 157 and list(dataset.slices("longer")) == ["2048"]
    assert config["model"]["mixer_options"]["log_linear_mamba2"]["trained_levels"] == 11
    assert (config["train"]["steps"], config["train"]["stop_at"], config["train"]["eval_every"]) == (30_000, 0.99, 100)
    assert settings.build_dataset(train.plain(recipe.get_config("mamba-efla"))).steps_per_epoch == 0


def test_every_setting_is_a_model():
    assert set(recipe.MIXERS) == set(MIXERS)
    for arg in recipe.ARGUMENTS:
        config = train.plain(recipe.get_config(arg))
        settings.check_train(config["train"])
        model = settings.build_model(config, settings.build_dataset(config))
        jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    own = recipe.get_sweep()
    assert len(own["arguments"]) == 15 and own["grid"] == {"seed": (0, 1, 2, 3, 4)}
    with pytest.raises(ValueError, match="'decay_128-linear' is not one of"):
        recipe.get_config("decay_128-linear")


def some(seed=0, examples=0, count=3, **where):
    config = data.DataConfig(
        kind="selective_copying", batch_size=8, seed=seed, task={"length": 40, "copies": 3, "examples": examples}
    )
    iterator = data.make(config).train_iterator(**where)
    try:
        return [next(iterator) for _ in range(count)]
    finally:
        iterator.close()


@pytest.mark.parametrize("examples", [0, 20])
def test_batches_are_a_function_of_seed_and_step(examples):
    batches = some(examples=examples, count=6)
    for a, b in zip(batches[4:], some(examples=examples, count=2, start_step=4), strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not np.array_equal(batches[0]["tokens"], some(seed=1, examples=examples)[0]["tokens"])
    real = np.concatenate([batch["mask"][batch["mask"].any(1)] for batch in batches])  # the rest fills an epoch's end
    assert len(real) == (2 * 20 if examples else 48) and np.all(real == (np.arange(40) >= 37))
    rows = {row.tobytes() for batch in batches for row in batch["tokens"][batch["mask"].any(1)]}
    assert len(rows) == (20 if examples else 48)


@pytest.mark.parametrize(("change", "message"), [
    ({"length": 31}, "length=31 must be at least 2 copies = 32"),
    ({"longer_lengths": (8,)}, "length=8 must be at least 2 copies = 32"),
    ({"longer_lengths": 8192}, "longer_lengths=8192 must be a tuple of whole numbers"),
    ({"longer_lengths": (8192.5,)}, "must be a tuple of whole numbers"),
    ({"noise": (0, 0.5)}, r"noise=\(0, 0.5\) must be the first and the last"),
    ({"copies": 0}, "copies=0 must be a whole number >= 1"),
    ({"copied": (1, 16)}, r"copied=\(1, 16\) must be the first and the last of some ids below vocab_size=16"),
    ({"noise": (3, 2)}, r"noise=\(3, 2\) must be the first and the last"),
    ({"noise": (0, 1)}, r"copied=\(1, 14\), noise=\(0, 1\) and marker=15 must have no id in common"),
    ({"marker": 14}, "must have no id in common"),
    ({"marker": 16}, "marker=16 must be below vocab_size=16"),
    ({"copis": 3}, "task.copis: no such field of SelectiveCopying. Did you mean 'copies'"),
])  # fmt: skip
def test_a_task_that_does_not_fit_is_refused(monkeypatch, change, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        data.make(data.DataConfig(kind="selective_copying", task=change))


@pytest.mark.slow
def test_it_is_learned_where_there_is_little_to_copy(tmp_path):
    """One of three ids among noise, by two seeds at once; by chance a third is right."""
    configs = []
    for seed in (0, 1):
        config = train.plain(recipe.get_config("decay_256-mamba2"))
        config["seed"], config["mesh"]["data"] = seed, 1
        task = {"length": 16, "copies": 1, "copied": (3, 5), "noise": (67, 69), "longer_lengths": (32,)}
        config["data"]["task"] |= task | {"examples": 400, "test_examples": 100}
        config["data"] |= {"batch_size": 16, "eval_batch_size": 50}
        config["model"]["mixer_options"]["mamba2"] |= {"state_dim": 16}
        config["train"] |= {"steps": 400, "eval_every": 50, "stop_at": 0.95}
        configs.append(config)
    assert shared(configs[0]) == shared(configs[1])
    for outcome in fit_population(configs, [tmp_path / "0", tmp_path / "1"]):
        assert outcome.scores["accuracy"] >= 0.95 and outcome.step < 400 and "accuracy/32" in outcome.scores
