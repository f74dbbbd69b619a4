"""Associative recall: the laws of its rows in figures, batches as a function of (seed, step), runs that end early."""

import csv
import functools
import json
import pickle
import shutil

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from configs import adaptive_decay, mqar, quickstart
from efla_jax import data, evaluate, metrics, sharding, train
from efla_jax.data import recall
from efla_jax.data.recall import Recall, Size
from efla_jax.layers import MIXERS
from efla_jax.model import LanguageModel
from efla_jax.train import settings
from experiments import recall_report

PACKED = dict(layout="packed", vocab_size=128, length=48, pairs=5, examples=130, test_examples=50)


def slots_of(tokens, targets, pairs, passes=1):
    """[rows, pairs]: in which slot behind the pairs the i-th key is asked for, found by its value."""
    values = tokens[:, 1 : 2 * pairs : 2]
    places = np.argmax(targets[:, None] == values[..., None], axis=2)
    assert np.all(np.take_along_axis(tokens, places, 1) == tokens[:, : 2 * pairs : 2])  # asked for by its key
    return (places - 2 * passes * pairs) / 2


def test_rows_follow_the_published_law():
    """L = 64, D = 4: figures counted from the authors' generator."""
    tokens, targets = Recall().fixed_rows(Size(64, 4), 20000, (0,))
    slots = slots_of(tokens, targets, 4)
    assert np.all(slots == np.floor(slots)) and slots.min() == 0 and slots.max() == 27
    assert np.mean(slots[:, 0] == 0) == pytest.approx(0.251, abs=0.01)
    assert np.mean(slots < 4) == pytest.approx(0.45, abs=0.01)
    assert slots.mean(0) == pytest.approx([6.2, 6.8, 7.5, 8.0], abs=0.15)  # in the order of the draws
    uniform = slots_of(*Recall(power=1.0).fixed_rows(Size(64, 4), 20000, (0,)), 4)
    assert uniform.mean(0) == pytest.approx([13.5] * 4, abs=0.2)


@pytest.mark.parametrize("layout, answers, passes", [
    ("scattered", False, 1), ("scattered", True, 1), ("scattered", False, 2), ("packed", False, 1), ("packed", True, 1),
])  # fmt: skip
def test_every_key_is_told_and_asked_for_once(layout, answers, passes):
    task = Recall(layout=layout, vocab_size=60, length=52, pairs=6, passes=passes, answers=answers, fill=False)
    tokens, targets = task.rows(Size(52, 6), 3000, np.random.default_rng(0))
    told = tokens[:, : 12 * passes].reshape(-1, passes, 6, 2)
    assert np.all(told == told[:, :1])
    keys, values = told[:, 0, :, 0], told[:, 0, :, 1]
    for column, low, high in ((keys, 1, 29), (values, 30, 59)):  # distinct within a row, uniform over all ids
        assert np.all(np.diff(np.sort(column, 1), axis=1) > 0)
        ids, counts = np.unique(column, return_counts=True)
        assert (ids.min(), ids.max()) == (low, high)
        assert np.abs(counts / counts.mean() - 1).max() < 0.2
    assert abs(np.corrcoef(keys[:, 0], values[:, 0])[0, 1]) < 0.06
    assert np.all((targets > 0).sum(1) == 6)
    slots = slots_of(tokens, targets, 6, passes)
    if layout == "packed":
        assert np.all(np.sort(slots, 1) == np.arange((52 - 12) // 2 - 6, (52 - 12) // 2))
        assert slots.mean(0) == pytest.approx([16.5] * 6, abs=0.15)
    written = np.zeros_like(tokens)
    written[:, : 12 * passes] = 1
    written[targets > 0] = 1
    if answers:
        rows, places = np.nonzero(targets)
        assert np.all(tokens[rows, places + 1] == targets[rows, places])
        written[rows, places + 1] = 1
    assert np.all((tokens > 0) == written)  # the rest is blank
    filled, same = Recall(layout=layout, vocab_size=60, length=52, pairs=6, passes=passes, answers=answers).rows(
        Size(52, 6), 3000, np.random.default_rng(0)
    )
    assert np.all(same == targets) and np.all(filled[written > 0] == tokens[written > 0])
    unused = np.unique(filled[written == 0])
    assert (unused.min(), unused.max(), unused.size) == ((0, 59, 60) if layout == "scattered" else (1, 59, 59))


def dataset(batch_size=16, eval_batch_size=0, seed=3, **task):
    config = data.DataConfig(
        kind="recall", batch_size=batch_size, eval_batch_size=eval_batch_size, seed=seed, task=PACKED | task
    )
    return data.make(config)


def some(dataset, count, **how):
    iterator = dataset.train_iterator(**how)
    try:
        return [next(iterator) for _ in range(count)]
    finally:
        iterator.close()


def rows_of(batches):
    return [row.tobytes() for batch in batches for row in batch["tokens"][batch["mask"].any(1)]]


def test_an_epoch_has_every_row_once_and_none_that_is_held_out():
    made = dataset()
    assert made.steps_per_epoch == 9 and made.length == 48
    batches = some(made, 27)
    assert {name: (value.dtype, value.shape) for name, value in batches[0].items()} == {
        "tokens": (np.int32, (16, 48)), "targets": (np.int32, (16, 48)), "mask": (np.float32, (16, 48)),
    }  # fmt: skip
    epochs = [rows_of(batches[i : i + 9]) for i in (0, 9, 18)]
    assert all(len(set(epoch)) == 130 == len(epoch) for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2]) and epochs[0] != epochs[1]
    assert sum(batch["mask"].sum() for batch in batches[:9]) == 5 * 130
    held_out = rows_of(made.eval_batches())
    assert len(set(held_out)) == 50 and not set(held_out) & set(epochs[0])
    larger = dataset(examples=2000, pairs=(5, 5), test_pairs=5)
    assert rows_of(larger.eval_batches()) == held_out  # whatever is trained on
    assert set(rows_of(some(dataset(examples=2000), 125))) > set(epochs[0])


@pytest.mark.parametrize("task", [{}, {"examples": 0}, {"length": (48, 64), "examples": (40, 70)}])
def test_batches_are_a_function_of_seed_and_step(task):
    made = dataset(**task)
    straight = some(made, 12)
    for start, rows in ((0, None), (7, None), (7, slice(4, 9))):
        again = some(dataset(**task), 12 - start, start_step=start, rows=rows)
        for a, b in zip(straight[start:], again, strict=True):
            assert all(np.array_equal(a[name][rows or slice(None)], b[name]) for name in a)
    assert len({batch["tokens"].shape[1] for batch in straight}) == (2 if task.get("length") else 1)
    assert not np.array_equal(straight[0]["tokens"], some(dataset(seed=4, **task), 1)[0]["tokens"])
    iterator = made.train_iterator(2)
    with pytest.raises(ValueError, match="fingerprint"):
        dataset(seed=4, **task).train_iterator().set_state(iterator.get_state())


def test_fresh_rows_never_return():
    rows = rows_of(some(dataset(examples=0), 60))
    assert len(set(rows)) == 60 * 16 and not set(rows) & set(rows_of(dataset(examples=0).eval_batches()))


def test_unshuffled_sizes_come_as_they_are_listed():
    listed = dataset(length=(48, 64), examples=(40, 20), shuffle=False)
    lengths = [batch["tokens"].shape[1] for batch in some(listed, 10)]
    assert lengths == [48, 48, 48, 64, 64] * 2
    mixed = dataset(length=(48, 64), examples=(1600, 1600))
    lengths = [batch["tokens"].shape[1] for batch in some(mixed, 40)]
    assert 8 < lengths.count(48) < 32 and mixed.length == 56


def test_sizes_of_the_test_and_their_names():
    made = dataset(length=(24, 48), pairs=(3, 5), test_length=(24, 48, 64), test_pairs=5, longer=(96,))
    assert list(made.slices()) == ["24x5", "48x5", "64x5"] and list(made.slices("longer")) == ["96x5"]
    for name, batches in (made.slices() | made.slices("longer")).items():
        length, pairs = map(int, name.split("x"))
        batches = list(batches)
        assert all(batch["tokens"].shape == (16, length) for batch in batches)
        assert sum(batch["mask"].sum() for batch in batches) == 50 * pairs
    assert dataset().task.test_sizes == (Size(48, 5),)
    assert "48x5 (130)" in dataset().describe()["train"]


FAULTS = {
    "unknown": ({"pair": 3}, "task.pair: no such field of recall. Did you mean 'pairs'"),
    "layout": ({"layout": "packd"}, "layout='packd' must be one of scattered, packed"),
    "short": ({"length": 18}, "length=18 must be even and at least 20, room for 5 pairs told 1 times"),
    "short with passes": ({"length": 28, "passes": 2}, "length=28 must be even and at least 30"),
    "odd": ({"length": 49}, "length=49 must be even"),
    "keys": ({"pairs": 64, "length": 400}, "pairs=64 must lie between 1 and the 63 keys of vocab_size=128"),
    "vocabulary": ({"layout": "scattered", "length": 128}, "vocab_size=128 must exceed length=128"),
    "longer": ({"longer": (10,)}, "length=10 must be even and at least 20"),
    "columns": ({"length": (48, 64), "pairs": (1, 2, 3)}, r"length=\(48, 64\), pairs=\(1, 2, 3\) must have one number"),
    "fresh and fixed": ({"length": (48, 64), "examples": (0, 5)}, r"examples=\(0, 5\) must be >= 1 for every size"),
    "power": ({"power": 0.0}, "power=0.0 must be > 0"),
    "tests": ({"test_examples": 0}, "test_examples=0 must be >= 1"),
}


@pytest.mark.parametrize("change, message", [
    ({"longer": 256}, r"longer=256 must be a tuple of lengths, such as \(512,\)"),
    ({"length": 64.0}, "length=64.0 must be whole numbers"),
    ({"test_pairs": (4, "8")}, r"test_pairs=\(4, '8'\) must be whole numbers"),
])  # fmt: skip
def test_types_are_named_where_nothing_else_checks_them(monkeypatch, change, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        Recall(**change)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_task_that_does_not_fit_is_refused(fault):
    change, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        dataset(**change)


def test_other_kinds_take_no_task():
    with pytest.raises(ValueError, match="task=.* is for kind=.*recall.*, and kind='text'"):
        data.make(data.DataConfig(task={"pairs": 3}))
    with pytest.raises(ValueError, match="split='valid' must be test or longer"):
        dataset().eval_batches("valid")


def test_a_worker_process_can_be_sent_the_data():
    made = dataset(length=(48, 64))
    tokens, targets = made.task.fixed_rows(Size(48, 5), 20, (0,))
    source = recall.FixedBatches([(tokens, targets)], 16, 0, True, range(16))
    there, here = pickle.loads(pickle.dumps(source))[3], source[3]
    assert all(np.array_equal(there[name], here[name]) for name in here)
    assert here["mask"].sum() == 4 * 5 and not here["tokens"][4:].any()  # the rest of the second epoch


def tiny_config():
    """One pair to remember, four values: learned within 60 steps."""
    config = quickstart.get_config("gated_delta_net")
    config.mesh.data = 1
    with config.unlocked():
        config.data = dict(kind="recall", batch_size=16, eval_batch_size=32, task=dict(
            layout="packed", vocab_size=8, length=6, pairs=1, examples=200, test_examples=64, longer=(10,)
        ))  # fmt: skip
    config.model.update(width=16, depth=2, mlp="none")
    config.optim.update(learning_rate=1e-2, schedule="constant", warmup_steps=0, weight_decay=0.0)
    config.train.update(steps=60, log_every=10, eval_every=10, stop_at=0.95)
    return config


def test_a_run_ends_when_its_score_is_reached_and_scores_longer_rows(tmp_path, capsys):
    config = tiny_config()
    run = train.fit(config, tmp_path / "run")
    rows = metrics.read_rows(run.workdir)
    scored = [row for row in rows if "test_accuracy" in row]
    last = rows[-1]["step"]
    assert run.finished and last < 60 and [row["step"] for row in scored] == list(range(10, last + 1, 10))
    assert all(row["test_accuracy"] < 0.95 for row in scored[:-1]) and scored[-1]["test_accuracy"] >= 0.95
    assert [name for name in run.scores if "/" in name] == ["accuracy/6x1", "accuracy/10x1"]
    assert "test_accuracy/10x1" in scored[-1] and not any("test_accuracy/10x1" in row for row in scored[:-1])
    assert f"step {last}: held-out accuracy" in capsys.readouterr().out
    longer = evaluate.evaluate(run.model, run.params, run.dataset.eval_batches("longer"))
    assert longer["accuracy"] == run.scores["accuracy/10x1"] and longer["weight"] == 64

    again = train.fit(config, run.workdir, resume=True)  # does not go on
    assert again.finished and again.scores == run.scores and metrics.read_rows(run.workdir) == rows


def test_a_score_that_could_not_be_reached_is_refused(tmp_path):
    for change in ({"stop_at": 1.5}, {"eval_every": 0}):
        config = tiny_config()
        config.train.update(change)
        with pytest.raises(ValueError, match="config.train.stop_at: .* is an accuracy, at most 1, that is looked at"):
            train.fit(config, tmp_path / "run")
    config = tiny_config()
    config.mesh.context = 4
    with pytest.raises(ValueError, match="config.mesh.context: rows of 6 tokens or pixels are not divisible"):
        train.fit(config, tmp_path / "run")


def test_slices_count_examples_and_not_targets():
    scores = {"1": {"accuracy": 0.5, "loss": 1.0}, "30": {"accuracy": 1.0, "loss": 0.0}}
    found = evaluate.evaluate_slices(lambda batches: scores[str(len(batches))], {"a": [{}], "b": [{}] * 30})
    assert found == {"accuracy": 0.75, "loss": 0.5, "accuracy/a": 0.5, "accuracy/b": 1.0}


def layer_norm(x, scale, bias, eps):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale + bias


@pytest.mark.parametrize("position", ["pre", "post"])
def test_a_layer_norm_stands_before_mixers_or_behind_their_residuals(position):
    """Two blocks without an MLP, by hand; and every parameter has a place on a mesh."""
    options = {"num_heads": 2, "conv_width": 0, "chunk_size": 16}
    how = dict(mixers=("delta_net",), mixer_options={"delta_net": options}, norm="layer", norm_eps=1e-3, mlp="none")
    model = LanguageModel(vocab_size=11, width=6, depth=2, norm_position=position, **how)
    tokens = jax.random.randint(jax.random.key(0), (3, 5), 0, 11)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape), model.init(jax.random.key(1), tokens))
    sharding.specs(params)
    own = params["params"]
    mixer = MIXERS["delta_net"](width=6, norm_eps=1e-3, **options)
    x = np.asarray(own["embed"]["embedding"])[tokens]
    for layer in range(2):
        block = jax.tree.map(lambda leaf, layer=layer: np.asarray(leaf[layer]), own["groups"]["block_0"])
        norm = functools.partial(layer_norm, eps=1e-3, **block["mixer_norm"])
        y = np.asarray(mixer.apply({"params": block["mixer"]}, jnp.asarray(norm(x) if position == "pre" else x))[0])
        x = x + y if position == "pre" else norm(x + y)
    features, _ = model.apply(params, tokens, method="features")
    np.testing.assert_allclose(features, layer_norm(x, eps=1e-3, **own["final_norm"]), atol=1e-5)


@pytest.mark.parametrize("name", ["mamba2", "log_linear_mamba2"])
def test_a_plain_mamba2_is_its_recurrence_and_projections(name):
    """y = (C B^T * decay * level weights) V W by hand."""
    levels = {"levels": 3} if name.startswith("log") else {}
    mixer = MIXERS[name](width=6, num_heads=2, head_dim=4, state_dim=5, conv_width=0, activation="none", plain=True,
                         **levels)  # fmt: skip
    x = np.random.default_rng(0).normal(size=(2, 7, 6)).astype(np.float32)
    params = mixer.init(jax.random.key(0), jnp.asarray(x))
    own = params["params"]
    wanted = {"x_proj", "B_proj", "C_proj", "dt_proj", "A_log", "dt_bias", "out_proj"}
    assert set(own) == wanted | ({"level_weights"} if levels else set())
    np.testing.assert_array_equal(own["A_log"], 0)
    project = {key: x @ own[f"{key}_proj"]["kernel"] for key in ("x", "B", "C", "dt")}
    total = np.cumsum(np.log1p(np.exp(project["dt"] + own["dt_bias"])), axis=1)  # [B, T, H]
    past = np.tril(np.ones((7, 7), bool))[..., None]
    read = np.einsum("btk,bsk->bts", project["C"], project["B"])[..., None]
    read = read * np.exp(np.where(past, total[:, None] - total[:, :, None], -np.inf))
    if levels:
        level = np.vectorize(lambda t, s: min(int(t ^ s).bit_length(), 2))(*np.indices((7, 7)))
        raw = (x @ own["level_weights"]["level_proj"]["kernel"]).reshape(2, 7, 2, 3)
        weights = np.log1p(np.exp(raw))
        read = read * np.take_along_axis(weights[:, :, None], level[None, ..., None, None], 4)[..., 0]
    o = np.einsum("btsh,bshv->bthv", read, project["x"].reshape(2, 7, 2, 4)).reshape(2, 7, 8)
    np.testing.assert_allclose(mixer.apply(params, jnp.asarray(x))[0], o @ own["out_proj"]["kernel"], atol=1e-5)


def test_norms_that_do_not_exist_are_refused():
    for change, message in (({"norm": "rmsnorm"}, "norm: 'rmsnorm' is not one of"),
                            ({"norm_position": "past"}, "norm_position: 'past' is not one of .* Did you mean 'post'")):
        with pytest.raises(ValueError, match=message):
            LanguageModel(vocab_size=11, width=6, depth=1, mixer_options={"efla": {"num_heads": 2}}, **change)


def parameters(config) -> int:
    config = train.plain(config)
    dataset = settings.build_dataset(config)
    model = settings.build_model(config, dataset)
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 1), int))))


def test_the_adaptive_decay_setting_has_the_published_layer():
    """Embedding and head; per layer q, k, v, o, dt and the two decays, a LayerNorm; raw level weights and their MLP."""
    plain = 2 * 128 * 64 + 2 * 64 + 2 * (4 * 64**2 + 64 + 2 + 2 * 64)
    mlp = 2 * 10 * 64 + 64 + 10
    extra = {"linear": 10, "linear_one": 20, "mlp_softplus": mlp, "mlp_softmax": mlp}
    assert parameters(adaptive_decay.get_config("mamba2")) == plain
    for variant, own in extra.items():
        assert parameters(adaptive_decay.get_config(variant)) == plain + 2 * (64 * 10 + own)
    config = adaptive_decay.get_config("linear_256")
    assert config.data.task.length == 256 and config.data.task.longer == (512,)
    assert config.model.mixer_options.log_linear_mamba2.trained_levels == 9
    with pytest.raises(ValueError, match="'linear_64' is not one of"):
        adaptive_decay.get_config("linear_64")


def test_the_mqar_recipe_has_the_published_sizes():
    config = mqar.get_config("gated_delta_net")
    dataset = settings.build_dataset(train.plain(config))
    assert dataset.steps_per_epoch == 391 + 4 * 79 and config.train.steps == 32 * dataset.steps_per_epoch
    assert dataset.task.test_sizes == tuple(Size(*size) for size in mqar.TEST)
    for mixer in MIXERS:
        assert parameters(mqar.get_config(mixer)) > 8192 * 128  # tied


def test_report_tells_variants_lengths_and_collapsed_seeds(tmp_path):
    for variant, length, seed, accuracy, longer in (
        ("linear", 128, 0, 0.9, 0.4), ("linear", 128, 1, 0.3, 0.2), ("linear_one", 128, 0, 1.0, 0.5),
        ("mamba2", 256, 0, 0.25, 0.125),
    ):  # fmt: skip
        config = train.plain(adaptive_decay.get_config(variant + ("_256" if length == 256 else "")))
        config["seed"], config["train"]["steps"] = seed, 200
        folder = tmp_path / "runs" / f"{variant}{seed}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        rows = [{"step": 50, "loss": 1.0}, {"step": 100, "test_accuracy": 0.95}]
        rows += [{"step": 200, "test_accuracy": accuracy, f"test_accuracy/{2 * length}x8": longer}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recall_report.write(tmp_path / "runs", tmp_path / "out")
    with open(tmp_path / "out" / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["mamba2", "linear", "linear", "linear_one"]
    assert rows[2] == {"variant": "linear", "length": "128", "pairs": "8", "seed": "1", "steps": "200",
                       "accuracy": "0.3", "longer": "0.2", "best": "0.95"}  # fmt: skip
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| length | pairs | mamba2 | linear | linear_one |" in text
    assert "| 128 | 8 |  | 60.0 ± 42.4 (1/2) | 100.0 (0/1) |" in text and "| 256 | 8 | 12.5 (1/1) |  |  |" in text
    assert (tmp_path / "out" / "recall.png").stat().st_size > 1000
    shutil.copytree(tmp_path / "runs" / "linear1", tmp_path / "runs" / "twin")
    with pytest.raises(ValueError, match="two runs are .*'linear', 128, 8, 1.*, one of them twin"):
        recall_report.read(tmp_path / "runs")
    with pytest.raises(ValueError, match="no sub-folder is an ended run of associative recall"):
        recall_report.read(tmp_path)


def test_report_leaves_out_runs_that_go_on_and_refuses_several_sizes(tmp_path, capsys):
    def write(name, config, *rows):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(train.plain(config)))
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    config = adaptive_decay.get_config("linear")
    config.data.task.longer = (256, 512)
    write("early", config, {"step": 50, "loss": 1.0})
    write("half", config, {"step": 100, "test_accuracy": 0.5})
    with pytest.raises(ValueError, match="no sub-folder is an ended run"):
        recall_report.read(tmp_path)
    assert "left out, not at their end (--resume): early, half" in capsys.readouterr().out
    beyond = {"test_accuracy/256x8": 0.75, "test_accuracy/512x8": 0.25}
    write("early", config, {"step": 100, "test_accuracy": 0.995} | beyond)  # stop_at
    config.seed, config.data.task.longer = 1, ()
    write("half", config, {"step": 5000, "test_accuracy": 0.5})
    rows = recall_report.read(tmp_path)
    assert [row["steps"] for row in rows] == [100, 5000]
    assert recall_report.cell(rows, "longer") == "75.0 (0/1)"  # twice as long, where there are such rows
    write("sizes", mqar.get_config("efla"), {"step": 100, "test_accuracy": 0.5})
    with pytest.raises(ValueError, match=r"sizes has length=\[64, 128, 256, 256, 256\] .* report runs of one size"):
        recall_report.read(tmp_path)
