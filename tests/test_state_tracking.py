"""State tracking: products of a group's elements, and parity as the control that only a reflecting step can pass."""

import itertools
import json

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from configs import parity
from efla_jax import data, ops, train
from efla_jax.data.state_tracking import GROUPS, StateTracking, products
from experiments import state_tracking_report


@pytest.mark.parametrize("group", GROUPS)
def test_products_are_those_of_a_group(group):
    table, order = products(group), GROUPS[group]
    assert table.shape == (order, order) and np.all(table[0] == np.arange(order)) and np.all(table[:, 0] == table[0])
    for line in (*table, *table.T):
        assert sorted(line) == list(range(order))  # every element has an inverse
    assert np.all(table[table] == table[:, table])  # (a b) c = a (b c)
    assert np.any(table != table.T) == (group != "parity")


def test_groups_are_the_ones_they_are_called():
    """By the orders of their elements: A5 has 15 of order 2, 20 of 3 and 24 of 5, and no other group of 60 has."""

    def orders(group):
        table, found = products(group), []
        for g in range(len(table)):
            power, order = g, 1
            while power:
                power, order = table[g, power], order + 1
            found.append(order)
        return dict(zip(*np.unique(found, return_counts=True), strict=True))

    assert orders("parity") == {1: 1, 2: 1} and orders("S3") == {1: 1, 2: 3, 3: 2}
    assert orders("A5") == {1: 1, 2: 15, 3: 20, 5: 24}


@pytest.mark.parametrize("group", GROUPS)
def test_targets_are_running_products(group):
    task = StateTracking(group=group, length=23)
    tokens, targets = task.rows(400, 23, np.random.default_rng(0), True)
    assert tokens.dtype == targets.dtype == np.int32 and tokens.shape == targets.shape == (400, 23)
    table = products(group)
    for row in range(50):
        state = 0
        for t in range(23):
            state = table[tokens[row, t], state]
            assert targets[row, t] == state
    counts = np.bincount(tokens.ravel(), minlength=GROUPS[group])
    assert np.abs(counts / counts.mean() - 1).max() < (0.5 if group == "A5" else 0.06)
    if group == "parity":
        assert np.all(targets == np.cumsum(tokens, axis=1) % 2)


def dataset(batch_size=16, seed=3, **task):
    options = {"length": 12, "test_examples": 40, "longer_lengths": (20, 33)} | task
    return data.make(data.DataConfig(kind="state_tracking", batch_size=batch_size, seed=seed, task=options))


def some(made, count, **how):
    iterator = made.train_iterator(**how)
    try:
        return [next(iterator) for _ in range(count)]
    finally:
        iterator.close()


@pytest.mark.parametrize("examples", [0, 50])
def test_batches_are_a_function_of_seed_and_step(examples):
    straight = some(dataset(examples=examples), 9)
    again = some(dataset(examples=examples), 4, start_step=5, rows=slice(3, 16))
    for a, b in zip(straight[5:], again, strict=True):
        assert all(np.array_equal(a[name][3:], b[name]) for name in a)
    assert not np.array_equal(straight[0]["tokens"], some(dataset(examples=examples, seed=4), 1)[0]["tokens"])
    assert straight[0]["tokens"].shape == (16, 12)
    if examples:
        assert dataset(examples=50).steps_per_epoch == 4 and sum(batch["mask"].sum() for batch in straight[:4]) == 600
    else:
        assert dataset().steps_per_epoch == 0 and all(np.all(batch["mask"] == 1) for batch in straight)


def test_fresh_rows_of_a_group_stay_apart_from_those_held_out():
    """S3 in twelve tokens has 2e9 rows, so that one that came twice would be a fault."""
    made = dataset(group="S3")
    trained = [row.tobytes() for batch in some(made, 60) for row in batch["tokens"]]
    held = [row.tobytes() for batch in made.eval_batches() for row in batch["tokens"][batch["mask"].any(1)]]
    assert len(set(trained)) == 960 and len(set(held)) == 40 and not set(trained) & set(held)


def test_slices_are_lengths():
    made = dataset(test_lengths=(5, 12))
    assert list(made.slices()) == ["5", "12"] and list(made.slices("longer")) == ["20", "33"]
    assert made.lengths == (12, 5, 20, 33) and made.length == 12 and made.vocab_size == 2
    for name, batches in (made.slices() | made.slices("longer")).items():
        assert sum(batch["mask"].sum() for batch in batches) == 40 * int(name)
    assert list(dataset(longer_lengths=()).slices("longer")) == []


FAULTS = {
    "unknown": ({"groups": "S3"}, "task.groups: no such field of StateTracking. Did you mean 'group'"),
    "group": ({"group": "S5"}, "group='S5' must be one of parity, S3, A5"),
    "length": ({"length": 0}, "length=0 must be a whole number >= 1"),
    "longer": ({"longer_lengths": (20, 0)}, r"longer_lengths=\(20, 0\) must be a tuple of whole numbers >= 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_task_that_does_not_fit_is_refused(fault, monkeypatch):
    change, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        dataset(**change)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match="test_lengths=40 must be a tuple"):
        StateTracking(test_lengths=40)


def state_after(bits, coefficients):
    """S^T k of one head with one key: the number that the row of bits leaves behind, from a state of 1."""
    k = jnp.ones((1, len(bits), 1, 1))
    k, u, erase = coefficients(k, jnp.asarray(bits, jnp.float32)[None, :, None])
    start = jnp.ones((1, 1, 1, 1))
    return float(ops.delta_rule(k, k, u, erase, initial_state=start, implementation="recurrent")[1][0, 0, 0, 0])


def test_a_reflecting_step_counts_and_the_exact_flow_does_not():
    """Beta 2 at every one turns the state round, whatever the length; a flow towards 0 forgets instead."""
    for bits in itertools.product((0, 1), repeat=5):
        turned = state_after(bits, lambda k, bit: (k, 0 * k, 2 * bit))
        assert turned == (-1) ** sum(bits)
        flown = state_after(bits, lambda k, bit: ops.exact_flow(k, 0 * k, 2 * bit))
        assert flown == pytest.approx(np.exp(-2 * sum(bits)), rel=1e-5)


def test_no_step_of_the_exact_flow_has_a_negative_eigenvalue():
    rng = np.random.default_rng(0)
    k = jnp.asarray(rng.normal(size=(1, 200, 1, 6)) * 10 ** rng.uniform(-3, 3, size=(1, 200, 1, 1)), jnp.float32)
    beta = jnp.asarray(10 ** rng.uniform(-3, 3, size=(1, 200, 1)), jnp.float32)
    unit_k, _, erase = ops.exact_flow(k, k, beta)
    eigenvalue = 1 - erase * jnp.sum(unit_k**2, axis=-1)  # of I - e k k^T along k; the others are 1
    assert jnp.all(eigenvalue > -1e-6) and jnp.all(erase <= 1)


def trained(tmp_path, variant, steps):
    config = parity.get_config(variant)
    config.mesh.data = 1
    config.data.update(batch_size=32, eval_batch_size=50)
    config.data.task.update(length=16, test_lengths=(16,), longer_lengths=(64,), test_examples=50)
    config.model.width = 16
    config.model.mixer_options[config.model.mixers[0]].num_heads = 1
    config.optim.learning_rate = 1e-2
    config.train.update(steps=steps, log_every=50, eval_every=0)
    return train.fit(config, tmp_path / variant).scores


@pytest.mark.slow
def test_parity_is_learned_with_negative_eigenvalues_and_not_by_exact_flow(tmp_path):
    can, cannot = (trained(tmp_path, variant, 600) for variant in ("delta_net_negative", "efla"))
    assert can["accuracy/16"] > 0.999 and can["accuracy/64"] > 0.99
    assert cannot["accuracy/64"] < 0.75


@pytest.mark.parametrize("argument", parity.OPTIONS)
def test_every_config_is_built(argument):
    config = parity.get_config(argument)
    parts = train.settings.build(train.settings.plain(config))
    params = jax.eval_shape(parts.begin).params
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    # Embedding, head, q, k, v and o, beta, and the scales of the heads' norm and of two LayerNorms with their biases.
    by_hand = 2 * 2 * 64 + 4 * 64 * 64 + 64 * 2 + 32 + 2 * 128
    assert count == by_hand if argument.startswith(("delta", "efla")) else by_hand < count < 50_000
    assert parts.dataset.lengths == (40, 64, 128, 256, 512)
    assert parity.get_sweep()["arguments"] == tuple(parity.OPTIONS)


def test_a_report_chooses_the_rate_by_the_trained_length(tmp_path):
    runs = tmp_path / "runs"
    found = {  # (variant, seed, rate): accuracy at 40 and at 64 tokens
        ("efla", 0, 1e-3): (0.6, 0.9), ("efla", 0, 1e-2): (0.7, 0.5), ("efla", 1, 1e-3): (0.5, 0.55),
        ("delta_net_negative", 0, 1e-3): (1.0, 1.0),
    }  # fmt: skip
    for (variant, seed, rate), (here, there) in found.items():
        config = train.settings.plain(parity.get_config(variant))
        config["optim"]["learning_rate"], config["seed"] = rate, seed
        config["data"]["task"]["group"] = "S3" if variant == "delta_net_negative" else "parity"
        folder = runs / f"{variant}_{rate}_{seed}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        last = {"step": 3000, "test_accuracy": here, "test_accuracy/40": here, "test_accuracy/64": there}
        (folder / "metrics.jsonl").write_text(json.dumps(last) + "\n")
    state_tracking_report.write(runs, tmp_path / "out")
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| efla | 2 | 60.0 [50.0, 70.0] | 52.5 [50.0, 55.0] |" in text
    assert "| delta_net (beta to 2), S3 | 1 | 100.0 [100.0, 100.0] |" in text
    assert "best of rates 0.001, 0.01 at 40 tokens" in text and "| | seeds | 40 | 64 |" in text
    assert (tmp_path / "out" / "state_tracking.png").stat().st_size > 5_000
    config["data"]["task"]["length"] = 41
    (runs / "delta_net_negative_0.001_0" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="the runs are of different lengths"):
        state_tracking_report.read(runs)
