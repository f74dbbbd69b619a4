"""MAD's tasks: the laws of their rows in figures, batches as a function of (seed, step), scores, the autoencoder."""

import csv
import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from configs import paper_mad, quickstart
from efla_jax import data, evaluate, losses, metrics, sharding, train
from efla_jax.data import mad
from efla_jax.data.mad import Mad
from efla_jax.model import AutoEncoder, LanguageModel
from efla_jax.train import population
from experiments import mad_report
from experiments import runs as finished

NOISY = {"vocab_size": 32, "noise": 0.2, "noise_vocab_size": 16}
KNOWN_MAP = [239, 241, 146, 166, 182, 213, 142, 235]
SMALL = {  # every task at a size of which nothing else has the numbers
    "compression": {"vocab_size": 9, "length": 11},
    "fuzzy_recall": {"vocab_size": 12, "length": 45, "motif": 2},
    "in_context_recall": {"vocab_size": 10, "length": 26},
    "memorization": {"vocab_size": 20, "length": 14},
    "noisy_recall": {"vocab_size": 15, "length": 28, "noise": 0.3, "noise_vocab_size": 5},
    "selective_copying": {"vocab_size": 13, "length": 37, "copies": 6},
}


def rows(name, count=4000, training=False, seed=0, **options):
    task = Mad(name=name, **options)
    tokens, targets = task.rows(count, task.length, np.random.default_rng(seed), training)
    assert tokens.dtype == targets.dtype == np.int32
    assert tokens.min() >= 0 and max(tokens.max(), targets.max()) < task.vocab_size and targets.min() >= -1
    return tokens, targets


@pytest.mark.parametrize(
    "name, options, length, targets",
    [  # counted from the authors' generators at the benchmark's baseline
        ("compression", {"length": 32}, 32, 32),
        ("fuzzy_recall", {}, 128, 4.37),
        ("in_context_recall", {}, 127, 56.0),
        ("memorization", {"vocab_size": 256, "length": 32}, 32, 16),
        ("noisy_recall", NOISY, 127, 43.6),
        ("selective_copying", {"length": 256}, 256, 16),
    ],
)
def test_lengths_and_numbers_of_targets_are_the_published_ones(name, options, length, targets):
    tokens, held = rows(name, **options)
    assert tokens.shape == held.shape == (4000, length)
    assert np.mean((held >= 0).sum(1)) == pytest.approx(targets, rel=0.02)
    told, trained = rows(name, training=True, **options)
    if name.endswith("recall"):  # every next token
        assert np.all(trained[:, :-1] == told[:, 1:]) and np.all(trained >= 0)
    else:
        assert np.mean((trained >= 0).sum(1)) == targets


@pytest.mark.parametrize("name, options, half, ids", [("in_context_recall", {}, 8, 16), ("noisy_recall", NOISY, 8, 16)])
def test_recall_asks_for_values_of_keys_that_were_told(name, options, half, ids):
    tokens, targets = rows(name, **options)
    trained = rows(name, training=True, **options)
    told = np.concatenate([trained[0], trained[1][:, -1:]], axis=1)  # the same rows, with their last token
    assert np.all(told[:, :-1] == tokens)
    pairs = told.reshape(len(told), 64, 2)
    keys, values = pairs[..., 0], pairs[..., 1]
    noise = keys >= ids
    assert np.all(noise == (values >= ids)) and np.all(keys[~noise] < half)
    assert np.all((values >= half)[~noise]) and np.all((values < ids)[~noise]) and not noise[:, -1].any()
    expected = np.full_like(told, -1)
    for row in range(500):
        value_of = {}
        for slot in range(64):
            key, value = map(int, pairs[row, slot])
            if noise[row, slot]:
                continue
            if key in value_of:
                assert value_of[key] == value
                expected[row, 2 * slot + 1] = value
            value_of.setdefault(key, value)
        assert expected[row, -1] >= 0  # the probe's key was told
    assert np.all(targets[:500] == expected[:500, 1:])
    counts = np.bincount(keys[:, :-1][~noise[:, :-1]], minlength=half)
    assert counts.size == half and np.abs(counts / counts.mean() - 1).max() < 0.05
    first = np.bincount(values[:, 0][~noise[:, 0]], minlength=ids)[half:]
    assert np.abs(first / first.mean() - 1).max() < 0.2  # values of a key are uniform, and may be another's, too
    if noise.any():
        assert np.mean(noise[:, :-1]) == pytest.approx(0.2 * (1 - 1 / 63), abs=0.005)
        inside = np.bincount(tokens[tokens >= ids], minlength=32)[16:]
        assert np.abs(inside / inside.mean() - 1).max() < 0.06


def test_one_pair_is_never_noise():
    _, targets = rows("noisy_recall", noise=0.99, length=8, vocab_size=12, noise_vocab_size=4)
    assert np.all((targets >= 0).any(1))


@pytest.mark.parametrize("training", [True, False])
def test_fuzzy_recall_has_keys_and_values_of_several_ids(training):
    """V = 16: ids below 7 are of keys, so that where key and value end can be read off a row."""
    count = 1500
    tokens, targets = rows("fuzzy_recall", count=count, training=training)
    last = rows("fuzzy_recall", count=count, training=True)[1][:, -1:] if training else targets[:, -1:]
    told = np.concatenate([tokens, last], axis=1)
    key_sizes, value_sizes, repeated = [], [], 0
    for row in range(count):
        start = int(np.argmax(told[row] != 15))
        assert start >= 2 and np.all(told[row, start:] != 15) and 128 + 1 - start <= 127
        runs = [list(run) for _, run in itertools.groupby(told[row, start:].tolist(), lambda token: token < 7)]
        assert len(runs) % 2 == 0 and all(len(set(run)) == len(run) <= 3 for run in runs)
        value_of, expected = {}, []
        for number, (key, value) in enumerate(zip(runs[::2], runs[1::2], strict=True)):
            key, again = tuple(key), tuple(key) in value_of
            assert value_of.setdefault(key, value) == value
            asked = again or number == len(runs) // 2 - 1
            repeated += again
            expected += [-1] * len(key) + (value if asked else [-1] * len(value))
            key_sizes.append(len(key))
            value_sizes.append(len(value))
        assert len(told[row, start:]) > 128 - 6 - 6 - 6
        if not training:
            assert targets[row, start - 1 :].tolist() == expected and np.all(targets[row, : start - 1] == -1)
            assert len(runs[-2]) == 3
    assert repeated >= 0.95 * count  # the probe at least, unless a short one's place was never reached
    sizes = np.bincount(value_sizes, minlength=4)[1:] / len(value_sizes)
    # Of keys that have come again the value is the first one's, so sizes are uniform up to chance.
    assert sizes == pytest.approx([1 / 3] * 3, abs=0.03)
    if training:
        assert np.bincount(key_sizes, minlength=4)[1:] / len(key_sizes) == pytest.approx([1 / 3] * 3, abs=0.03)
    else:
        assert set(key_sizes) == {3}


def test_motifs_are_every_ordered_choice_alike():
    drawn = mad.motifs(np.random.default_rng(0), (60_000,), 5, 9, 3)
    kinds, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(kinds) == 24 and kinds.min() == 5 and kinds.max() == 8
    assert np.abs(counts / 2500 - 1).max() < 0.1


def test_selective_copying_spreads_blanks_before_the_last_id():
    tokens, targets = rows("selective_copying", length=256)
    assert np.all(tokens[:, 239] == 15) and np.all(tokens[:, 240:] == 14) and np.all(targets[:, :240] == -1)
    data_places = tokens[:, :239] < 14
    assert np.all(data_places.sum(1) == 16) and np.all(data_places[:, -1])  # no blank behind the last one
    assert np.all(tokens[:, :239][data_places].reshape(-1, 16) == targets[:, 240:])
    places = np.nonzero(data_places)[1].reshape(-1, 16)
    gaps = np.diff(places, prepend=-1, axis=1) - 1
    assert gaps.mean(0) == pytest.approx([223 / 16] * 16, rel=0.03)
    assert gaps.var(0) == pytest.approx([223 / 16 * 15 / 16] * 16, rel=0.15)  # multinomial
    counts = np.bincount(targets[:, 240:].ravel())
    assert counts.size == 14 and np.abs(counts / counts.mean() - 1).max() < 0.05


def test_compression_tells_the_row_itself():
    tokens, targets = rows("compression", length=32)
    assert np.all(tokens == targets) and np.all(tokens[:, -1] == 15)
    counts = np.bincount(tokens[:, :-1].ravel())
    assert counts.size == 15 and np.abs(counts / counts.mean() - 1).max() < 0.05


def test_memorization_has_one_map_for_all_rows():
    value_of = {}
    for seed, training in ((0, True), (1, False)):
        tokens, targets = rows("memorization", vocab_size=256, length=32, seed=seed, training=training)
        assert np.all(tokens[:, 1::2] == 255) and np.all(targets[:, ::2] == -1)
        for key, value in zip(tokens[:, ::2].ravel().tolist(), targets[:, 1::2].ravel().tolist(), strict=True):
            assert value_of.setdefault(key, value) == value
    assert set(value_of) == set(range(127)) and len(set(value_of.values())) == 127
    assert min(value_of.values()) >= 127 and max(value_of.values()) == 254
    # The authors' generator shuffles keys, then values, by the same numbers: its map, counted there.
    assert [value_of[key] for key in range(8)] == KNOWN_MAP
    assert np.any(mad.value_map(256, 1) != mad.value_map(256, 12345))


def dataset(name, batch_size=16, eval_batch_size=0, seed=3, **task):
    sizes = {"examples": 130, "test_examples": 50}
    config = data.DataConfig(
        kind="mad", batch_size=batch_size, eval_batch_size=eval_batch_size, seed=seed,
        task={"name": name, **sizes, **SMALL[name], **task},
    )  # fmt: skip
    return data.make(config)


def some(made, count, **how):
    iterator = made.train_iterator(**how)
    try:
        return [next(iterator) for _ in range(count)]
    finally:
        iterator.close()


def rows_of(batches):
    return [row.tobytes() for batch in batches for row in batch["tokens"][batch["mask"].any(1)]]


@pytest.mark.parametrize("name", SMALL)
def test_an_epoch_has_every_row_once_and_none_that_is_held_out(name):
    made = dataset(name)
    less = name in ("in_context_recall", "noisy_recall")
    assert made.steps_per_epoch == 9 and made.length == SMALL[name]["length"] - less and made.lengths == (made.length,)
    batches = some(made, 27)
    assert {key: (value.dtype, value.shape) for key, value in batches[0].items()} == {
        "tokens": (np.int32, (16, made.length)), "targets": (np.int32, (16, made.length)),
        "mask": (np.float32, (16, made.length)),
    }  # fmt: skip
    epochs = [rows_of(batches[i : i + 9]) for i in (0, 9, 18)]
    assert all(len(set(epoch)) == 130 == len(epoch) for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2]) and epochs[0] != epochs[1]
    held_out = rows_of(made.eval_batches())
    assert list(made.slices()) == [name] and made.slices("longer") == {}
    assert len(set(held_out)) == 50 == len(held_out) and not set(held_out) & set(epochs[0])
    assert rows_of(dataset(name, examples=2000).eval_batches()) == held_out  # whatever is trained on
    assert set(rows_of(some(dataset(name, examples=2000), 125))) > set(epochs[0])


@pytest.mark.parametrize("name", ["noisy_recall", "fuzzy_recall"])
def test_batches_are_a_function_of_seed_and_step(name):
    straight = some(dataset(name), 12)
    for start, part in ((0, None), (7, None), (7, slice(4, 9))):
        again = some(dataset(name), 12 - start, start_step=start, rows=part)
        for a, b in zip(straight[start:], again, strict=True):
            assert all(np.array_equal(a[key][part or slice(None)], b[key]) for key in a)
    assert not np.array_equal(straight[0]["tokens"], some(dataset(name, seed=4), 1)[0]["tokens"])
    with pytest.raises(ValueError, match="fingerprint"):
        dataset(name, seed=4).train_iterator().set_state(dataset(name).train_iterator(2).get_state())


FAULTS = {
    "unknown": ("compression", {"lenght": 3}, "task.lenght: no such field of Mad. Did you mean 'length'"),
    "name": ("compression", {"name": "recall"}, "name='recall' must be one of compression, fuzzy_recall"),
    "short": ("compression", {"length": 3}, "length=3 must be a whole number >= 4"),
    "odd": ("in_context_recall", {"length": 27}, "length=27 must be even, for in_context_recall is made of pairs"),
    "odd keys": ("memorization", {"length": 27}, "length=27 must be even, for memorization is made of pairs"),
    "noise": ("in_context_recall", {"noise": 0.2}, "noise=0.2 of noise_vocab_size=0: noisy_recall takes a probability"),
    "no noise": ("noisy_recall", {"noise": 0.0}, "noise=0.0 of noise_vocab_size=5: noisy_recall takes a probability"),
    "all noise": ("noisy_recall", {"noise_vocab_size": 12}, "noise_vocab_size=12 leaves no 4 of vocab_size=15 ids"),
    "motif": ("fuzzy_recall", {"motif": 6}, "motif=6 must be at most the 5 keys of vocab_size=12"),
    "room": ("fuzzy_recall", {"motif": 5, "length": 24}, "motif=5 must be at most .* and length=24 at least 25"),
    "copies": ("selective_copying", {"copies": 18}, "copies=18 need length=37 to be above 37"),
    "batch": ("compression", {"batch_size": 0}, "batch_size=0 must be >= 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_task_that_does_not_fit_is_refused(fault):
    name, change, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        dataset(**({"name": name} | change)) if "name" not in change else Mad(**change)
    with pytest.raises(ValueError, match="split='valid' must be test or longer"):
        dataset("compression").slices("valid")


def test_types_are_named_where_nothing_else_checks_them(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match="length=8.5 must be a whole number >= 4"):
        Mad(name="compression", length=8.5)


def test_macro_accuracy_is_the_mean_over_classes():
    """By hand: class 0 is right twice of three times, 2 never, 3 only guessed, 1 and 4 do not occur."""
    targets = jnp.array([[0, 0, 0, 2, 1]])
    guesses = jnp.array([[0, 0, 3, 0, 1]])
    mask = jnp.array([[1.0, 1.0, 0.5, 1.0, 0.0]])
    tallies = losses.class_tallies(jax.nn.one_hot(guesses, 5), targets, mask)
    assert tallies.tolist() == [[3, 0, 1, 0, 0], [3, 0, 0, 1, 0], [2, 0, 0, 0, 0]]
    assert losses.macro_accuracy(np.asarray(tallies)) == pytest.approx((2 / 3 + 0 + 0) / 3)


def test_an_autoencoder_is_its_equations():
    """Two blocks, then sines, two dense layers, norm and head by hand; only the last token's output is read."""
    options = {"num_heads": 2, "conv_width": 0, "chunk_size": 16}
    fields = dict(mixers=("delta_net",), mixer_options={"delta_net": options}, norm="layer", norm_eps=1e-3, mlp="none")
    model = AutoEncoder(vocab_size=11, width=6, depth=2, **fields)
    tokens = jax.random.randint(jax.random.key(0), (3, 5), 0, 11)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape), model.init(jax.random.key(1), tokens))
    sharding.specs(params)
    own = params["params"]
    inside = {"params": {name: own[name] for name in own if name != "decoder"}}
    z = np.asarray(LanguageModel(vocab_size=11, width=6, depth=2, **fields).apply(
        inside, tokens, None, None, method="mixed"
    )[0])[:, -1]  # fmt: skip

    def norm(x, scale, bias):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * scale + bias

    rates = np.array([1.0, 0.01, 0.0001])
    place = np.stack([np.concatenate([np.sin(t * rates), np.cos(t * rates)]) for t in range(5)])
    x = z[:, None] + place
    for layer in range(2):
        dense = own["decoder"][f"dense_{layer}"]
        x = norm(x, **own["decoder"][f"norm_{layer}"]) @ np.asarray(dense["kernel"]) + dense["bias"]
        x = x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    expected = norm(x, **own["final_norm"]) @ np.asarray(own["lm_head"]["kernel"])
    np.testing.assert_allclose(model.apply(params, tokens)[0], expected, atol=1e-4)
    with pytest.raises(ValueError, match="segment_ids: an autoencoder reads whole rows"):
        model.apply(params, tokens, jnp.ones_like(tokens))
    with pytest.raises(ValueError, match="cache: an autoencoder reads whole rows"):
        model.apply(params, tokens, cache=model.init_cache(3))
    with pytest.raises(ValueError, match="width: 7 is odd"):
        AutoEncoder(vocab_size=11, width=7, depth=2, **fields)


def test_a_goal_is_of_the_macro_accuracy_where_there_is_one():
    assert evaluate.goal_accuracy({"accuracy": 0.9995, "macro_accuracy": 0.98}) == 0.98
    assert evaluate.goal_accuracy({"accuracy": 0.9995}) == 0.9995


def tiny(task, steps=60, width=16, **options):
    config = quickstart.get_config("gated_delta_net")
    config.mesh.data = 1
    with config.unlocked():
        config.data = dict(kind="mad", batch_size=32, eval_batch_size=64, task=task | {"test_examples": 64})
    config.model.update(width=width, depth=1, mlp="none", norm="layer", **options)
    config.optim.update(learning_rate=2e-2, schedule="constant", warmup_steps=0, weight_decay=0.0)
    config.train.update(steps=steps, log_every=20, eval_every=20, stop_at=0.99)
    return config


@pytest.mark.parametrize("name, task, begin", [
    ("memorization", {"vocab_size": 9, "length": 6, "examples": 64}, 0.3),
    pytest.param("compression", {"vocab_size": 4, "length": 4, "examples": 600}, 0.6, marks=pytest.mark.slow),
    pytest.param("selective_copying", {"vocab_size": 4, "length": 8, "copies": 1, "examples": 300}, 0.6,
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_the_easiest_settings_are_learned(name, task, begin, tmp_path):
    """An autoencoder for compression, a language model for the others; macro accuracy stands beside the plain one."""
    run = train.fit(tiny({"name": name, **task}, steps=160), tmp_path / name)
    assert isinstance(run.model, AutoEncoder) == (name == "compression")
    assert run.scores["accuracy"] > 0.95 and run.scores["macro_accuracy"] > 0.9
    scored = [row for row in metrics.read_rows(run.workdir) if "test_accuracy" in row]
    assert scored[-1]["test_macro_accuracy"] == run.scores["macro_accuracy"]
    assert run.scores[f"accuracy/{name}"] == run.scores["accuracy"]
    again = evaluate.evaluate_classes(run.model, run.params, run.dataset.eval_batches())
    assert again["macro_accuracy"] == pytest.approx(run.scores["macro_accuracy"])
    fresh = jax.jit(run.model.init)(jax.random.key(5), jnp.zeros((1, 1), jnp.int32))
    assert evaluate.evaluate(run.model, fresh, run.dataset.eval_batches())["accuracy"] < begin


def test_the_sweep_has_the_published_settings():
    every = paper_mad.settings("efla")
    assert len(every) == len(set(every)) == 66
    counts = {task: sum(name.split("-")[1] == task for name in every) for task in paper_mad.TASKS}
    assert counts == {"compression": 11, "fuzzy_recall": 11, "in_context_recall": 11, "memorization": 6,
                      "noisy_recall": 14, "selective_copying": 13}  # fmt: skip
    for argument in every:  # each is the baseline but for what it names
        task = dict(paper_mad.get_config(argument).data.task)
        Mad(**task)
        baseline = dict(paper_mad.get_config("-".join(argument.split("-")[:2])).data.task)
        assert [f"{name}={task[name]}" for name in task if task[name] != baseline[name]] == argument.split("-")[2:]
        steps = paper_mad.get_config(argument).train.steps
        assert steps == 200 * math.ceil(task["examples"] / 128)
    sweep = paper_mad.get_sweep()
    assert len(sweep["arguments"]) == 12 and set(sweep["arguments"]) <= {*every, *paper_mad.settings("delta_net")}
    assert [len(values) for values in sweep["grid"].values()] == [3, 2]


@pytest.mark.parametrize("mixer", paper_mad.OPTIONS)
def test_a_config_is_built(mixer):
    config = paper_mad.get_config(f"{mixer}-compression")
    parts = train.settings.build(train.settings.plain(config))
    params = jax.eval_shape(parts.begin).params
    assert isinstance(parts.model, AutoEncoder) and parts.dataset.steps_per_epoch == 100
    if mixer in ("delta_net", "efla"):
        block = 4 * 128 * 128 + 128 * 4 + 3 * 4 * 128 + 32 + 3 * 128 * 352 + 4 * 128
        decoder = 2 * (128 * 128 + 128 + 2 * 128)
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        assert count == 2 * block + decoder + 2 * 16 * 128 + 2 * 128


@pytest.mark.parametrize("argument, message", [
    ("elfa-compression", "'elfa' is not one of"),
    ("efla-compress", "'compress' is not one of"),
    ("efla", "'' is not one of"),
    ("efla-compression-length=33", "'length=33' is not one of"),
])  # fmt: skip
def test_an_argument_that_is_none_is_refused(argument, message):
    with pytest.raises(ValueError, match=message):
        paper_mad.get_config(argument)


@pytest.mark.slow
def test_a_population_is_scored_by_class_as_its_members_are(tmp_path):
    """Two seeds and two rates side by side, of an autoencoder: each as it would train by itself."""
    configs = []
    for seed, rate in ((0, 1e-2), (1, 1e-2), (1, 3e-3)):
        config = tiny({"name": "compression", "vocab_size": 4, "length": 4, "examples": 64}, steps=4)
        config.seed, config.optim.learning_rate = seed, rate
        config.train.update(eval_every=2, stop_at=0.0)
        configs.append(train.settings.plain(config))
    found = population.fit_population(configs, [tmp_path / str(i) for i in range(3)])
    alone = train.fit(configs[2], tmp_path / "alone")
    rows = [row for row in metrics.read_rows(tmp_path / "2") if "test_accuracy" in row]
    assert found[2].best == max(row["test_macro_accuracy"] for row in rows)
    assert set(alone.scores) == set(found[2].scores) and len({one.scores["loss"] for one in found}) == 3
    for name, value in alone.scores.items():
        assert found[2].scores[name] == pytest.approx(value, rel=1e-4), name


def write_run(folder, argument, macro, micro, at=1.0, **changes):
    """A run's config.json and metrics.jsonl, whose last scores are at this part of its steps."""
    config = train.settings.plain(paper_mad.get_config(argument))
    config["optim"] = config["optim"] | {k: v for k, v in changes.items() if k in config["optim"]}
    config["seed"] = changes.get("seed", 0)
    name = "_".join((argument, *(f"{name}={value}" for name, value in changes.items())))
    (folder / name).mkdir(parents=True)
    (folder / name / "config.json").write_text(json.dumps(config))
    last = {"step": int(config["train"]["steps"] * at), "test_accuracy": micro, "test_macro_accuracy": macro}
    rows = [{"step": 1, "loss": 2.0}, {"step": 100, "test_accuracy": 0.1, "test_macro_accuracy": 0.1}, last]
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_report_takes_the_best_of_a_setting_and_means_over_settings_and_tasks(tmp_path, capsys):
    runs = tmp_path / "runs"
    for seed, (low, high) in enumerate(((0.2, 0.5), (0.6, 0.4))):  # best of two rates: 50 and 60 %
        write_run(runs, "efla-compression", low, 0.1, seed=seed, learning_rate=1e-4)
        write_run(runs, "efla-compression", high, 0.3, seed=seed, learning_rate=1e-3)
        write_run(runs, "efla-compression-length=64", 0.1, 0.1, seed=seed, learning_rate=1e-3, weight_decay=0.1)
    write_run(runs, "efla-memorization", 0.7, 0.8, schedule="cosine")
    write_run(runs, "delta_net-memorization", 0.999, 0.9995, at=0.5)  # reached stop_at
    write_run(runs, "delta_net-compression", 0.998, 0.9995, at=0.9)  # did not end: the goal is of the macro accuracy
    mad_report.write(runs, tmp_path / "out")
    text = (tmp_path / "out" / "table.md").read_text()
    assert "left out, not at their end (--resume): delta_net-compression" in capsys.readouterr().out
    macro, micro, best = re.split("Micro accuracy|the best of any evaluation", text)
    # Seeds 0 and 1: (50 + 10) / 2 and (60 + 10) / 2.
    assert "| efla, constant | 32.5 ± 3.5 (2, 200 epochs) |  |  |  |  |  |  | 2 |" in macro
    assert "| efla, constant | 20.0 ± 0.0 (2, 200 epochs) |" in micro
    assert "| efla, cosine, 200 epochs |  |  |  | 70.0 (1, 200 epochs) |  |  |  | 1 |" in macro
    assert "| delta_net, constant |  |  |  | 99.9 (1) |  |  |  | 1 |" in macro
    assert "| efla, published | 43.8 | 22.6 | 100.0 | 32.5 | 100.0 | 99.8 | 66.4 | |" in macro
    assert "| delta_net, published | 42.7 | 22.2 | 99.9 | 29.9 | 99.9 | 99.6 | 65.7 | |" in macro
    assert "published |" not in micro + best and "| efla, constant | 32.5 ± 3.5 (2, 200 epochs) |" in best
    assert "at the end of training; of each seed the best of all ended runs" in macro
    assert "of compression rates 0.0001, 0.001 and decays 0, 0.1; of memorization rates 0.0005 and decays 0." in best
    assert mad_report.grids([row for row in mad_report.read(runs) if row["task"] == "memorization"]) == (
        "rates 0.0005 and decays 0"
    )
    assert (tmp_path / "out" / "mad.png").stat().st_size > 10_000
    with open(tmp_path / "out" / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and {row["setting"] for row in rows if row["task"] == "compression"} == {
        "length=32", "length=64"
    }  # fmt: skip
    broken = runs / "delta_net-compression" / "metrics.jsonl"  # has scores at 100 and at 18,000 steps, 180 epochs
    assert len(mad_report.read(runs, 100)) == len(rows)
    (cut,) = (row for row in mad_report.read(runs, 1) if row["epochs"] == 1)
    assert (cut["variant"], cut["task"], cut["macro"], cut["ended_at"]) == ("delta_net", "compression", 0.1, 1.0)
    assert [row["macro"] for row in mad_report.read(runs, 180) if row["epochs"] == 180] == [0.998]
    config = json.loads((broken.parent / "config.json").read_text())
    config["optim"]["schedule"] = "cosine"  # one of fewer steps would have had other rates
    (broken.parent / "config.json").write_text(json.dumps(config))
    assert len(mad_report.read(runs, 180)) == len(rows)
    write_run(runs, "efla-memorization", 0.7, 0.8, schedule="cosine", clip_norm=1.0)
    with pytest.raises(ValueError, match="two runs are .*'efla', 'cosine', 'memorization'"):
        mad_report.read(runs)
    with pytest.raises(ValueError, match="no ended run of kind 'mad' there"):
        mad_report.read(tmp_path / "none")


def test_of_a_task_the_longest_runs_count_and_those_that_got_to_the_goal(tmp_path):
    """Ten epochs more are none that a run at 99.9 % would have needed."""

    def row(seed, rate, epochs, macro, at=1.0, task="fuzzy_recall"):
        return dict(
            variant="efla", schedule="constant", task=task, setting="", seed=seed, learning_rate=rate, weight_decay=0.0,
            epochs=epochs, ended_at=at, macro=macro, micro=macro, best=min(1.0, macro + 0.1),
        )  # fmt: skip

    rows = [row(0, 1e-4, 100, 0.9), row(0, 1e-4, 200, 0.3), row(0, 1e-3, 200, 0.4), row(1, 1e-3, 100, 0.999, at=0.1)]
    assert mad_report.task_scores(rows, "fuzzy_recall", "macro") == pytest.approx([40, 99.9])
    assert mad_report.cell(rows, "fuzzy_recall", "macro").endswith("(2, 200 epochs)")
    assert mad_report.cell(rows[3:], "fuzzy_recall", "macro") == "99.9 (1)"
    assert mad_report.cell(rows[:3], "fuzzy_recall", "best") == "50.0 (1, 200 epochs)"
    assert mad_report.cell(rows, "compression", "macro") == "" and list(mad_report.lines_of(rows)) == ["efla, constant"]


def test_a_report_names_the_options_of_a_control():
    config = train.settings.plain(paper_mad.get_config("efla-compression"))
    assert finished.variant(config, mad_report.PLAIN) == "efla"
    config["model"]["mixer_options"]["efla"]["step"] = "euler"
    assert finished.variant(config, mad_report.PLAIN) == "efla step=euler"
    assert set(mad_report.TASKS) == set(paper_mad.TASKS) == set(mad.TASKS)


def test_a_report_needs_no_more_than_the_rows_of_a_sweep(tmp_path):
    config = train.settings.plain(paper_mad.get_config("efla-memorization"))
    row = {"name": "a", "status": "finished", "step": 400, "scores": {"accuracy": 0.2, "macro_accuracy": 0.1},
           "config": config, "best": 0.5}  # fmt: skip
    again = row | {"scores": {"accuracy": 0.5, "macro_accuracy": 0.4}}
    rows = [row, again, row | {"name": "b", "status": "diverged"}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (found,) = mad_report.read(tmp_path)
    assert (found["variant"], found["macro"], found["best"], found["epochs"]) == ("efla", 0.4, 0.5, 200)
