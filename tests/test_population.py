"""Many models in one program: each is what it would be by itself, ends when it would, and says what happened to it."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart, smnist
from efla_jax import evaluate, metrics, train
from efla_jax.layers import MIXERS
from efla_jax.ops import dispatch
from efla_jax.ops.delta_rule import TABLE
from efla_jax.train import hosts, pause, population
from efla_jax.train.population import fit_population

# Float32 sums in another order, through 15 updates of Adam, which makes much of a gradient near zero.
CLOSE = 2e-4


def tiny(seed=0, rate=3e-3, mixer="gated_delta_net", weight_decay=0.1, **task):
    config = quickstart.get_config(mixer)
    config.mesh.data, config.seed = 1, seed
    with config.unlocked():
        config.data = dict(kind="recall", batch_size=8, eval_batch_size=32, task=dict(
            layout="packed", vocab_size=8, length=6, pairs=1, examples=200, test_examples=64, longer=(10,)
        ) | task)  # fmt: skip
    config.model.update(width=16, depth=1, mlp="none", embedding_dropout=0.1)
    config.optim.update(learning_rate=rate, schedule="cosine", warmup_steps=2, clip_norm=1.0)
    config.optim.weight_decay = weight_decay
    config.train.update(steps=15, log_every=5, eval_every=10, stop_at=0.0)
    return train.plain(config)


def scored(folder):
    return [row for row in metrics.read_rows(folder) if "test_accuracy" in row]


def test_every_member_is_what_it_is_by_itself(tmp_path):
    """Seed, rate and decay are a member's own; one that diverges ends, and the others go on."""
    configs = [tiny(*own) for own in ((0, 3e-3), (0, 1e38), (5, 1e-2, "gated_delta_net", 3.0))]
    for config in configs:
        config["train"]["max_skipped"] = 3
    folders = [tmp_path / str(number) for number in range(3)]
    told = []
    found = fit_population(configs, folders, lambda step, members: told.append((step, members)))
    assert told == [(step, 3 if step < 5 else 2) for step in range(1, 15)] + [(15, 0)]
    assert [(one.status, one.step) for one in found] == [("finished", 15), ("diverged", 5), ("finished", 15)]
    assert found[1].scores == {} and metrics.read_rows(folders[1])[-1]["step"] == 5
    outcome, folder, alone = found[2], folders[2], train.fit(configs[2], tmp_path / "alone")
    assert outcome.scores.keys() == alone.scores.keys() and found[0].scores != outcome.scores
    for name, value in alone.scores.items():
        assert outcome.scores[name] == pytest.approx(value, rel=CLOSE, abs=CLOSE), name
    for ours, theirs in zip(*map(jax.tree.leaves, (outcome.params, alone.params)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=CLOSE)
    rows, expected = metrics.read_rows(folder), metrics.read_rows(alone.workdir)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        for name, value in row.items():
            assert value == pytest.approx(other[name], rel=CLOSE, abs=CLOSE), (row["step"], name)
    assert outcome.best == max(row["test_accuracy"] for row in scored(folder))
    assert json.loads((folder / "config.json").read_text()) == json.loads(json.dumps(configs[2]))


@pytest.mark.slow
def test_a_population_that_is_paused_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    """Twice, once after a member has ended; dropout's keys, the data's place and Adam's moments are where they were."""
    configs = [tiny(), tiny(0, 1e38), tiny(5)]
    for config in configs:
        config["train"]["max_skipped"] = 3
        config["model"]["dtype"] = "bfloat16"
    whole, parts = ([tmp_path / name / str(i) for i in range(3)] for name in ("whole", "parts"))
    sizes, steps, score = [], [], population.score
    monkeypatch.setattr(population, "score", lambda *given: sizes.append(given[-1]) or score(*given))
    monkeypatch.setattr(population, "widest", lambda dataset: 1024)
    expected = fit_population(configs, whole)
    for _ in range(3):  # the time is up after seven more steps
        up = functools.partial(next, iter([*[False] * 6, True]))
        found = fit_population(configs, parts, lambda step, members: steps.append(step), until=up)
        if len(steps) == 7:
            assert [(one.status, one.step) for one in found] == [("paused", 7), ("diverged", 5), ("paused", 7)]
            shutil.copy(parts[0] / "paused.npz", tmp_path / "kept.npz")
            monkeypatch.setattr(population, "widest", lambda dataset: 1)  # as where the widest batch came before
    assert steps == list(range(1, 16)) and not (parts[0] / "paused.npz").exists()
    assert len(sizes) > 2 and set(sizes) == {1024}
    for one, other in zip(found, expected, strict=True):
        assert str(one._replace(seconds=0, params=None)) == str(other._replace(seconds=0, params=None))
        for ours, theirs in zip(*map(jax.tree.leaves, (one.params, other.params)), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(parts, whole, strict=True):
        assert metrics.read_rows(ours) == metrics.read_rows(theirs)

    monkeypatch.undo()
    (parts[0] / "paused.npz").write_bytes((tmp_path / "kept.npz").read_bytes())
    pause.save(tmp_path / "short.npz", pause.read_header(tmp_path / "kept.npz"), [np.zeros(3)])
    with pytest.raises(ValueError, match="its 1 arrays are not"):
        pause.load(tmp_path / "short.npz", jax.tree.leaves(expected[0].params))
    (tmp_path / "torn.npz").write_bytes((tmp_path / "kept.npz").read_bytes()[:900])
    with pytest.raises(ValueError, match="no whole file"):
        pause.read_header(tmp_path / "torn.npz")
    steps.clear()
    for config in configs:
        config["train"]["steps"] = 3
    with pytest.raises(ValueError, match="paused.npz: holds 3 runs of other configs, paused at step 7. Go on with"):
        fit_population(configs, parts, lambda step, members: steps.append(step))
    assert not steps and json.loads((parts[0] / "config.json").read_text())["train"]["steps"] != 3  # nothing is lost
    (parts[0] / "paused.npz").unlink()
    fit_population(configs, parts, lambda step, members: steps.append(step))
    assert steps == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_goes_through_vmap(mixer, tmp_path):
    """Three steps of every mixer, gated convolutions and a router's choices among them."""
    configs = [tiny(seed, length=32, pairs=3, vocab_size=20, longer=()) for seed in (0, 3)]
    for config in configs:
        more = {"chunk_size": 16} if mixer == "nats_l" else {"state_dim": 8} if mixer.endswith("mamba2") else {}
        config["model"]["mixers"], config["model"]["mixer_options"] = (mixer,), {mixer: {"num_heads": 2, **more}}
        config["train"].update(steps=3, log_every=1)
        config["optim"]["decay"] = "all"
    found = fit_population(configs, [tmp_path / "0", tmp_path / "1"])
    alone = train.fit(configs[1], tmp_path / "alone")
    for name, value in alone.scores.items():
        assert found[1].scores[name] == pytest.approx(value, rel=CLOSE, abs=CLOSE), name
    for ours, theirs in zip(*map(jax.tree.leaves, (found[1].params, alone.params)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "images"])
def test_other_data_than_generated_tasks(kind, corpus, tmp_path):
    """Two seeds on one corpus, whose batches they see in different orders."""
    configs = []
    for seed in (0, 1):
        config = quickstart.get_config("efla") if kind == "text" else smnist.get_config("efla")
        config.seed, config.mesh.data, config.model.width = seed, 1, 8
        config.data.batch_size, config.data.path = 4, str(corpus) if kind == "text" else ""
        config.train.update(steps=3, log_every=1)
        if kind == "text":
            config.data.update(window=16, valid_fraction=0.2)
            config.model.update(depth=1, mlp_width=8)
            config.optim.warmup_steps = 0
        configs.append(train.plain(config))
    found = fit_population(configs, [tmp_path / "0", tmp_path / "1"])
    alone = train.fit(configs[1], tmp_path / "alone")
    assert found[1].scores == pytest.approx(alone.scores, rel=CLOSE, abs=CLOSE)
    assert found[0].scores != found[1].scores and ("bits_per_byte" in alone.scores) == (kind == "text")


@pytest.mark.slow
def test_a_member_ends_at_its_goal_and_keeps_those_scores(tmp_path):
    """At rate 1e-2 one pair of four values is learned; at 1e-9 nothing is."""
    configs = [tiny(rate=rate) for rate in (1e-9, 1e-2)]
    for config in configs:
        config["model"]["depth"] = 2
        config["optim"].update(schedule="constant", warmup_steps=0, weight_decay=0.0)
        config["train"].update(steps=80, stop_at=0.9)
    slow, quick = fit_population(configs, [tmp_path / "slow", tmp_path / "quick"])
    assert (slow.status, slow.step) == ("finished", 80) and slow.scores["accuracy"] < 0.6
    assert quick.status == "finished" and quick.step < 80 and quick.scores["accuracy"] >= 0.9
    assert metrics.read_rows(tmp_path / "quick")[-1]["step"] == quick.step and "accuracy/10x1" in quick.scores
    assert all(row["test_accuracy"] < 0.9 for row in scored(tmp_path / "quick")[:-1])
    configs.append(configs[0] | {"seed": 1})
    folders = [tmp_path / name for name in ("outrun", "first", "other")]
    outrun, winner, other = fit_population(configs, folders, first=True)
    assert (outrun.status, outrun.step) == ("outrun", winner.step) and winner.step == quick.step
    assert (other.status, other.step) == ("finished", 80)


def test_configs_that_are_no_population_are_refused(tmp_path):
    wider, averaged = tiny(1), tiny(1)
    wider["model"]["width"], averaged["optim"]["ema_decay"] = 8, 0.9
    for configs, message in (([tiny(), wider], "differ in more than seed, optim.learning_rate"),
                             ([averaged, averaged], "set ema_decay and adam_learning_rate to 0"),
                             ([tiny(), tiny(rate=-1.0)], "learning_rate=-1.0 must be > 0")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            fit_population(configs, [tmp_path / "a", tmp_path / "b"])
    lengths = [tiny(seed, length=(6, 8), pairs=(1, 1)) for seed in (0, 1)]
    assert population.shared(lengths[0]) != population.shared(lengths[1])  # their batches come in different orders
    assert population.shared(tiny(0, 1e-3)) == population.shared(tiny(1, 1e-2, weight_decay=0.0))


def test_no_kernel_is_taken_inside(monkeypatch):
    """Where "auto" would take one: no GPU has run them under vmap over parameters."""
    for name in dispatch.GPU_PROGRAMS:
        table = {name: lambda: "kernel", "chunked": lambda: "xla"}
        choose = functools.partial(dispatch.dispatch, "op", "auto", table, (name, "chunked"), ())
        assert choose() == "kernel"
        with dispatch.without_kernels():
            assert choose() == "xla" and dispatch.dispatch("op", name, table, (), ()) == "kernel"
        assert choose() == "kernel"

    def kernel(*_):
        raise RuntimeError("a kernel was taken")

    monkeypatch.setitem(TABLE, "pallas", kernel)
    made = population.build([tiny(length=24, pairs=3, vocab_size=20, longer=())])
    states = jax.eval_shape(lambda: population.begin(made))
    batch = population.stacked([next(one.train_iterator()) for one in made.datasets])
    step = population.make_population_step(made)
    with dispatch.without_kernels():
        jax.eval_shape(step, states, batch)
    with pytest.raises(RuntimeError, match="a kernel was taken"):
        jax.eval_shape(population.make_population_step(made), states, batch)


def test_only_tokens_with_a_target_have_logits():
    """The sums are those of all tokens."""
    config = tiny(length=24, pairs=3, vocab_size=20, longer=())
    dataset = train.settings.build_dataset(config)
    model = train.settings.build_model(config, dataset)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    batch = next(dataset.eval_batches())
    few = population.stacked([batch])
    assert few["targets"].shape == few["places"].shape == (1, 32, 4) and few["mask"].sum() == batch["mask"].sum()
    here = [jax.tree.map(jnp.asarray, one) for one in (jax.tree.map(lambda x: x[0], few), batch)]
    ours, full = (evaluate.compiled_sums(model)(params, one) for one in here)
    np.testing.assert_allclose(ours, full, rtol=1e-6)
    several = train.settings.build_dataset(tiny(length=24, pairs=(1, 3), vocab_size=20, longer=()))
    assert population.widest(several) == 4 and population.widest(train.settings.build_dataset(tiny())) == 1
    dense = batch | {"mask": np.ones_like(batch["mask"])}
    assert "places" not in population.stacked([dense])
    assert population.stacked([batch], 8)["places"].shape == (1, 32, 8)
    assert not np.any(population.stacked([batch], 8)["mask"][..., 3:])


def test_a_folder_in_which_another_program_trains_is_refused(tmp_path):
    with hosts.alone_in(tmp_path / "b"), pytest.raises(ValueError, match="another program trains in .*b;"):
        fit_population([tiny(), tiny(1)], [tmp_path / "a", tmp_path / "b"])
