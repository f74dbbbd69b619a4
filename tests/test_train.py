"""The training loop on tiny models: what a run writes, resuming, refusing, scores whatever the batching."""

import json
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart, smnist
from efla_jax import data, evaluate, metrics, train
from efla_jax.model import LanguageModel
from efla_jax.train import hosts, loop, settings
from efla_jax.train.step import make_gradients, make_signals

STEPS = 6


def text_config(corpus):
    config = quickstart.get_config("efla")
    config.mesh.data = 1  # the tests' process has eight simulated devices
    config.data.path = str(corpus)
    config.data.valid_fraction = 0.2
    config.data.window, config.data.batch_size = 24, 3
    config.model.width, config.model.depth, config.model.mlp_width = 16, 1, 24
    config.model.mixer_options.efla.num_heads = 2
    config.optim.warmup_steps, config.optim.learning_rate = 2, 1e-2
    config.train.steps, config.train.log_every, config.train.save_every = STEPS, 1, 3
    return config


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """(config, run) of a finished run: one compilation for most of this file."""
    config = text_config(corpus)
    return config, train.fit(config, tmp_path_factory.mktemp("runs") / "whole")


def leaves(params):
    return [np.asarray(x) for x in jax.tree.leaves(params)]


def test_a_run_writes_what_it_promises(finished):
    config, run = finished
    for name in ("config.json", "parameters.txt", "metrics.jsonl", "loss.png"):
        assert (run.workdir / name).stat().st_size > 0
    assert json.loads((run.workdir / "config.json").read_text())["model"]["width"] == 16
    rows = metrics.read_rows(run.workdir)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    assert losses[-1] < losses[0] - 0.3
    assert all(row["learning_rate"] > 0 for row in rows if "loss" in row)
    assert rows[-1]["valid_bits"] == pytest.approx(run.scores["loss"] / np.log(2))
    assert rows[0]["learning_rate"] == pytest.approx(0.005) and losses[0] == pytest.approx(np.log(256), abs=0.2)


def test_a_resumed_run_equals_one_that_never_stopped(finished, tmp_path):
    config, run = finished
    half = config.copy_and_resolve_references()
    half.optim.schedule = "constant"
    whole = half.copy_and_resolve_references()
    half.train.steps = 3
    train.fit(half, tmp_path / "parts")
    resumed = train.fit(whole, tmp_path / "parts", resume=True)
    straight = train.fit(whole, tmp_path / "straight")
    for a, b in zip(leaves(resumed.params), leaves(straight.params), strict=True):
        np.testing.assert_array_equal(a, b)
    rows = [[(r["step"], r["loss"]) for r in metrics.read_rows(x.workdir) if "loss" in r] for x in (resumed, straight)]
    assert rows[0] == rows[1]


def test_a_run_killed_after_a_checkpoint_goes_on_to_the_same_numbers(finished, tmp_path):
    """Cosine rate, same command: with its last checkpoint gone it repeats the last steps bit for bit."""
    config, run = finished
    shutil.copytree(run.workdir, tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "6")
    resumed = train.fit(config, tmp_path / "killed", resume=True)
    for a, b in zip(leaves(resumed.params), leaves(run.params), strict=True):
        np.testing.assert_array_equal(a, b)
    rows = [[r for r in metrics.read_rows(x.workdir) if "loss" in r] for x in (resumed, run)]
    assert [(r["step"], r["loss"]) for r in rows[0]] == [(r["step"], r["loss"]) for r in rows[1]]


def test_a_finished_run_is_only_scored_again(finished):
    config, run = finished
    before = (run.workdir / "metrics.jsonl").read_text()
    again = train.fit(config, run.workdir, resume=True)
    assert again.scores == run.scores
    assert (run.workdir / "metrics.jsonl").read_text() == before


def test_a_used_folder_or_a_changed_config_is_refused(finished):
    config, run = finished
    with pytest.raises(ValueError, match="workdir: .* holds a run at step 6. Pass --resume"):
        train.fit(config, run.workdir)
    other = config.copy_and_resolve_references()
    other.optim.learning_rate = 3e-3
    with pytest.raises(ValueError, match="config.optim.learning_rate: 0.01 in the checkpoint, 0.003 now"):
        train.fit(other, run.workdir, resume=True)
    wider = config.copy_and_resolve_references()
    wider.model.width = 2 * config.model.width  # the field, not the leaves that it shapes
    expected = f"config.model.width: {config.model.width} in the checkpoint, {wider.model.width} now\nGive those"
    with pytest.raises(ValueError, match=expected):
        train.fit(wider, run.workdir, resume=True)
    longer = config.copy_and_resolve_references()
    longer.train.steps = 12  # would bend the cosine that the first steps followed
    with pytest.raises(ValueError, match="config.train.steps: 6 in the checkpoint, 12 now"):
        train.fit(longer, run.workdir, resume=True)
    assert run.workdir.joinpath("checkpoints", "6").exists()


def test_what_ctrl_c_ends_is_saved(finished, tmp_path, monkeypatch, capfd):
    """As if pressed while step 3 waits for its batch; the second time, while it is pressed again, nothing is."""
    config, run = finished
    next_batch, presses = loop.next_batch, [1]

    def pressed(job, iterator, step):
        for _ in range(presses[0] if step == 3 else 0):
            signal.raise_signal(signal.SIGINT)
        return next_batch(job, iterator, step)

    monkeypatch.setattr(loop, "next_batch", pressed)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train.fit(config, tmp_path / "once")
        presses[0] = 2
        with pytest.raises(KeyboardInterrupt):
            train.fit(config, tmp_path / "twice")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Ctrl-C: the run is saved after this step" in capfd.readouterr().err
    saved = {p.name for name in ("once", "twice") for p in (tmp_path / name / "checkpoints").iterdir()}
    assert saved == {"3"}
    resumed = train.fit(config, tmp_path / "once", resume=True)
    for a, b in zip(leaves(resumed.params), leaves(run.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_signals_of_another_kind_of_program(monkeypatch):
    """Ctrl-C ends `tee` behind this program, too, so that nobody reads; and of a handler in C Python says None."""
    set_signal = signal.signal

    def unread(number, text):
        raise BrokenPipeError

    def told(number, handler):
        before = set_signal(number, handler)
        return None if number == signal.SIGTERM else before

    term, before = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(signal, "signal", told)
        monkeypatch.setattr(os, "write", unread)
        with pytest.raises(KeyboardInterrupt), hosts.stop_when_told() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.reached(1)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        set_signal(signal.SIGTERM, term)
        set_signal(signal.SIGINT, before)


def test_two_runs_in_one_folder_are_refused(finished, tmp_path, monkeypatch):
    """The second, whatever the first has saved; and not for longer than the first runs."""
    config, run = finished
    with hosts.alone_in(run.workdir):
        before = sorted((run.workdir / "checkpoints").iterdir())
        with pytest.raises(ValueError, match="workdir: another program trains in .*; wait for its end"):
            train.fit(config, run.workdir, resume=True)
        assert sorted((run.workdir / "checkpoints").iterdir()) == before
        with hosts.alone_in(tmp_path / "another"):
            pass
    with hosts.alone_in(run.workdir):
        pass
    flock, copies = hosts.fcntl.flock, []

    def copied(file, how):  # as for a process that is forked meanwhile
        flock(file, how)
        copies.append(os.dup(file.fileno()))

    monkeypatch.setattr(hosts.fcntl, "flock", copied)
    for _ in range(2):
        with hosts.alone_in(run.workdir):
            pass
    for copy in copies:
        os.close(copy)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="workdir: .*/file/run cannot be made .Not a directory.; choose another"):
        train.fit(config, tmp_path / "file" / "run")


@pytest.mark.parametrize("schedule, step, free", [
    ("cosine", 3, False), ("constant", 3, True), ("wsd", 4, True), ("wsd", 5, False),
])  # fmt: skip
def test_the_number_of_steps_may_change_while_the_rate_is_steady(corpus, schedule, step, free):
    config = text_config(corpus)
    config.optim.update(schedule=schedule, decay_steps=2)
    saved, longer = train.plain(config), train.plain(config)
    longer["train"] = {**longer["train"], "steps": 12, "log_every": 7}
    saved = json.loads(json.dumps(saved))
    if free:
        settings.check_unchanged(saved, longer, step)
    else:
        with pytest.raises(ValueError, match="config.train.steps: 6 in the checkpoint, 12 now"):
            settings.check_unchanged(saved, longer, step)


def as_list(config):
    del config.model.mixers
    config.model.mixers = ["efla"]


FAULTS = {
    "not finite": (
        lambda c: c.optim.update(learning_rate=float("inf")),
        "config.optim.learning_rate: inf is not a finite",
    ),
    "a list": (as_list, r"config.model.mixers: \['efla'\] could not be overridden"),
    "unknown field": (lambda c: c.model.update(widht=8), "config.model.widht: no such field. Did you mean 'width'"),
    "unknown data field": (lambda c: c.data.update(windw=8), "config.data.windw: no such field. Did you mean 'window'"),
    "mixer option": (lambda c: c.model.mixer_options.efla.update(num_head=2), "num_head.* Did you mean 'num_heads'"),
    "precision": (
        lambda c: c.train.update(matmul_precision="float16"),
        "config.train.matmul_precision: 'float16' is not",
    ),
    "heads": (lambda c: c.model.update(width=17), "config.model: width: 17 is not divisible by num_heads=2"),
    "window": (lambda c: c.data.update(window=100000), "window"),
    "best of what": (lambda c: c.train.update(keep_best="accuracy"), "keep_best: 'accuracy' is not one of .*-accuracy"),
    "best of nothing": (
        lambda c: c.train.update(keep_best="loss"), "keep_best: 'loss' needs scores .* eval_every=0 does not divide",
    ),
    "set by the run": (lambda c: c.model.update(vocab_size=5), "config.model.vocab_size: 5 is set by the run; remove"),
    "eps": (lambda c: c.model.update(norm_eps=-1.0), "config.model: norm_eps: -1.0 is not positive"),
    "mlp": (lambda c: c.model.update(mlp_width=0, mlp_ratio=-1.0), "mlp_ratio: -1.0 is not positive"),
    "mesh": (lambda c: c.mesh.update(fsdp=16), "config.mesh: mesh: fsdp 16 = 16 devices are asked for, 8 are here"),
    "steps": (lambda c: c.train.update(steps=0), "config.train.steps: 0 is less than 1"),
    "unknown train field": (
        lambda c: c.train.update(stepz=3),
        "config.train.stepz: no such field. Did you mean 'steps'",
    ),
    "penalty on no choice": (
        lambda c: c.train.update(softmax_penalty=0.1),
        r"config.train.softmax_penalty: 0.1 is on .* no mixer of config.model.mixers=\('efla',\) chooses",
    ),
    "negative penalty": (lambda c: c.train.update(softmax_penalty=-0.1), "softmax_penalty: -0.1 is less than 0"),
    "skips": (lambda c: c.train.update(max_skipped=0), "config.train.max_skipped: 0 is less than 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_config_that_does_not_fit_is_refused_before_anything_is_written(corpus, tmp_path, fault):
    spoil, message = FAULTS[fault]
    config = text_config(corpus)
    with config.unlocked():
        spoil(config)
    with pytest.raises(ValueError, match=message):
        train.fit(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_missing_section_is_named(corpus, tmp_path):
    config = text_config(corpus)
    with config.unlocked():
        config.optm = config.optim
        del config.optim
    with pytest.raises(ValueError, match="config.optim: this section is missing. Did you mean 'optm'"):
        train.fit(config, tmp_path / "run")


def test_a_run_that_learns_nothing_stops(corpus, tmp_path):
    """A rate that blows the parameters up: gradients stay non-finite, updates are skipped, and the run says so."""
    config = text_config(corpus)
    config.optim.learning_rate, config.train.steps, config.train.max_skipped = 1e30, 30, 2
    with pytest.raises(FloatingPointError, match="not finite in the last .* up to .* First such gradient: params"):
        train.fit(config, tmp_path / "run")


def test_a_run_whose_data_end_saves_where_it_stands(finished, tmp_path, monkeypatch):
    config, whole = finished
    given = loop.next_batch
    monkeypatch.setattr(loop, "next_batch", lambda job, it, step: given(job, it, step) if step < 5 else None)
    run = train.fit(config, tmp_path / "ended")
    assert not run.finished and run.scores == {}
    monkeypatch.undo()
    resumed = train.fit(config, tmp_path / "ended", resume=True)
    assert resumed.finished
    for a, b in zip(leaves(resumed.params), leaves(whole.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_with_everything_on(corpus, tmp_path):
    """Microbatches, Muon, warm-up/stable/decay, averaged parameters, z-loss, pieces of logits, signals, a trace, the
    best checkpoint; a mesh of four of the devices: all at once, and what each adds to the log."""
    config = text_config(corpus)
    config.mesh.update(data=2, fsdp=2)
    config.data.batch_size, config.data.eval_batch_size = 8, 8
    config.optim.update(algorithm="muon", schedule="wsd", decay_steps=2, ema_decay=0.5)
    config.train.update(accumulate=2, z_loss=1e-3, loss_chunk=8, signals_every=3, eval_every=2, keep=1, save_every=2)
    config.train.update(keep_best="loss", profile_start=4, profile_steps=1, peak_tflops=1.0)
    run = train.fit(config, tmp_path / "run")
    rows = [row for row in metrics.read_rows(run.workdir) if "loss" in row]
    assert [row["learning_rate"] for row in rows] == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2, 5.5e-3, 1e-3])
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2
    assert all(row["z_loss"] > 0 and row["perplexity"] == pytest.approx(np.exp(row["loss"])) for row in rows)
    groups = {name.split("/")[1] for name in rows[0] if name.startswith("grad_norm/")}
    assert {"embed", "head", "mixer", "mlp", "norm"} <= groups
    total = sum(rows[0][f"grad_norm/{group}"] ** 2 for group in groups) ** 0.5
    assert total == pytest.approx(rows[0]["grad_norm"], rel=1e-5)
    assert [row["step"] for row in rows if "stiffness_p95" in row] == [3, 6]
    assert all(0 < row["erase_mean"] < row["erase_max"] <= 1 for row in rows if "erase_mean" in row)
    assert "tokens_per_second" not in rows[0] and all(row["tokens_per_second"] > 0 for row in rows[1:])
    assert all(0 < row["mfu"] < 1 and 0 < row["goodput"] <= 1 and row["data_wait_seconds"] >= 0 for row in rows[1:])
    assert 1 <= rows[1]["compilations"] <= rows[-1]["compilations"]
    assert list((run.workdir / "profile").rglob("*.xplane.pb"))
    best = min((row["valid_loss"], row["step"]) for row in metrics.read_rows(run.workdir) if "valid_loss" in row)[1]
    assert {p.name for p in (run.workdir / "checkpoints").iterdir() if p.name.isdigit()} == {str(best), "6"}
    held = evaluate.evaluate(run.model, run.params, run.dataset.eval_batches("valid"))
    assert held["loss"] == pytest.approx(run.scores["loss"], rel=1e-5)  # run.params are those that were scored
    assert "algorithm" not in (run.workdir / "parameters.txt").read_text()  # a table, not a config


def test_a_model_that_tells_nothing_about_itself_has_no_signals():
    options = {"attention": {"num_heads": 1}}
    model = LanguageModel(vocab_size=8, width=4, depth=1, mixers=("attention",), mixer_options=options)
    batch = {"tokens": jnp.zeros((1, 2), jnp.int32)}
    assert make_signals(model)(model.init(jax.random.key(0), batch["tokens"]), batch) == {}


CHUNK = 16
ROUTED = {"nats_l": {"num_heads": 2, "head_dim": 4, "chunk_size": CHUNK, "implementation": "recurrent"}}


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_softmax_penalty_is_a_mean_over_layers_heads_and_chunks(accumulate):
    """Through scan and remat; microbatches make the gradient of one batch, though one has four times the chunks of the
    other and half its weight."""
    model = LanguageModel(31, 12, 2, ("nats_l",), ROUTED, mlp="none", remat="full")
    keys = jax.random.split(jax.random.key(2), 2)
    tokens = jax.random.randint(keys[0], (4, 2 * CHUNK + 3), 0, 31)
    mask = jnp.array([1.0, 3.0, 1.0, 3.0])[:, None] * jnp.ones(tokens.shape)
    ids = jnp.ones(tokens.shape, jnp.int32).at[1, CHUNK - 1 :].set(2).at[3, CHUNK - 1 :].set(0)
    batch = {"tokens": tokens, "targets": tokens[:, ::-1], "mask": mask * (ids != 0), "segment_ids": ids}
    params = jax.jit(model.init)(keys[1], tokens)

    def by_hand(params):
        (logits, _), state = model.apply(
            params, tokens, ids, capture_intermediates=lambda module, _: module.name == "softmax_fraction",
            mutable="intermediates",
        )  # fmt: skip
        fraction = state["intermediates"]["groups"]["block_0"]["mixer"]["router"]["softmax_fraction"]["__call__"][0]
        assert fraction.mean.shape == (2, 2)
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)
        nats = jnp.sum(nats[..., 0] * batch["mask"]) / jnp.sum(batch["mask"])
        return nats + 3.0 * jnp.mean(fraction.mean), jnp.mean(fraction.mean)

    wanted, fraction = jax.jit(jax.grad(by_hand, has_aux=True))(params)
    assert 0 < fraction < 1
    given, (sums, penalty) = jax.jit(make_gradients(model, accumulate, 0, 0.0, 3.0))(params, batch, keys[0])
    assert float(penalty / sums.weight) == pytest.approx(3 * float(fraction), rel=1e-5)
    for a, b in zip(leaves(given), leaves(wanted), strict=True):
        np.testing.assert_allclose(a / sums.weight, b, atol=2e-5 * np.abs(b).max())


def test_a_routed_run_tells_what_each_layer_and_head_chose(corpus, tmp_path):
    config = text_config(corpus)
    config.model.update(mixers=("nats_l",), depth=2, mlp="none")
    with config.unlocked():
        config.model.mixer_options = ROUTED
    config.data.window, config.train.steps, config.train.signals_every = 3 * CHUNK, 3, 1
    config.train.softmax_penalty = 0.5
    run = train.fit(config, tmp_path / "run")
    rows = [row for row in metrics.read_rows(run.workdir) if "loss" in row]
    for row in rows:
        assert row["softmax_penalty"] == pytest.approx(0.5 * row["softmax_fraction_mean"], rel=1e-5)
        means = [row["softmax_fraction/layer_00"], row["softmax_fraction/layer_01"]]
        assert np.mean(means) == pytest.approx(row["softmax_fraction_mean"], rel=1e-5)
        heads = [row[f"softmax_fraction/layer_01/head_{head}"] for head in (0, 1)]
        assert np.mean(heads) == pytest.approx(means[1], rel=1e-5)
    assert abs(rows[0]["loss"] - np.log(256)) < 0.2  # the penalty is not in it


def test_a_run_of_an_older_version_goes_on(corpus):
    """Its config lacks fields that came later: as long as they are off, nothing has changed."""
    config = train.plain(text_config(corpus))
    saved = json.loads(json.dumps(config))
    del saved["train"]["softmax_penalty"]
    settings.check_unchanged(saved, config, 3)
    config["train"]["softmax_penalty"] = 0.1
    with pytest.raises(ValueError, match="config.train.softmax_penalty: None in the checkpoint, 0.1 now"):
        settings.check_unchanged(saved, config, 3)


def test_scores_do_not_depend_on_the_batching(finished):
    """Pitfall 41: the same sums for one row at a time, and for any padding of the last batch."""
    _, run = finished
    batches = list(run.dataset.eval_batches("valid"))
    rows = [
        {name: value[i : i + 1] for name, value in batch.items()}
        for batch in batches
        for i in range(len(batch["mask"]))
    ]
    one = evaluate.evaluate(run.model, run.params, rows)
    assert one == pytest.approx({name: run.scores[name] for name in one}, rel=1e-5)
    assert run.scores["bits_per_byte"] == pytest.approx(one["bits"], rel=1e-5)  # tokens are bytes
    assert run.scores["weight"] == run.dataset.splits.valid.num_targets
    empty = [{name: value * 0 for name, value in batches[0].items()}]
    with pytest.raises(ValueError, match="nothing to score"):
        evaluate.evaluate(run.model, run.params, empty)


class Successor(LanguageModel):
    """Predicts token + 1, surely."""

    def features(self, tokens, segment_ids=None, cache=None):
        return jax.nn.one_hot(tokens + 1, self.vocab_size), cache

    def logits(self, x):
        return 100.0 * x


def test_a_rigged_model_scores_what_it_should(tmp_path):
    """Pitfall 91: from the corpus to the sums, targets are shifted exactly once."""
    for first in range(33, 43):
        (tmp_path / f"{first}.txt").write_text("".join(map(chr, range(first, first + 50))))
    dataset = data.make(data.DataConfig(path=str(tmp_path), valid_fraction=0.3, window=16, batch_size=2))
    model = Successor(vocab_size=256, width=8, depth=1, mixer_options={"efla": {"num_heads": 1}})
    scores = evaluate.evaluate(model, {}, dataset.eval_batches("valid"))
    documents = dataset.splits.valid.num_documents
    assert scores["weight"] == 50 * documents  # 49 successors and the end of the document, which breaks the row
    assert scores["accuracy"] == pytest.approx(49 / 50)


def test_weights_of_short_rows_count_once():
    """Pitfall 72: one token of loss 2 and nine of mean 1 make 1.1, not 1.5."""
    losses = jnp.concatenate([jnp.asarray([2.0]), jnp.ones(9)])
    logits = jnp.stack([jnp.zeros(10), jnp.log(jnp.expm1(losses))], -1)  # cross-entropy of class 0 is `losses`
    parts = [evaluate.weighted_sums(logits[a:b], jnp.zeros(b - a, int), jnp.ones(b - a)) for a, b in ((0, 1), (1, 10))]
    total = sum(float(p.loss) for p in parts) / sum(float(p.weight) for p in parts)
    assert total == pytest.approx(1.1, rel=1e-5)


def test_sequential_mnist_on_digits(tmp_path):
    """The published recipe by config alone: one head, raw query, no residual; it learns, and corruption hurts it."""
    config = smnist.get_config("efla")
    config.mesh.data = 1
    config.train.steps, config.data.batch_size, config.optim.learning_rate = 40, 64, 1e-2
    run = train.fit(config, tmp_path / "digits")
    assert run.scores["accuracy"] > 0.5
    width = 64
    by_hand = width + 64 * width + 3 * width**2 + (width + 1) + 2 * width + (width * 10 + 10)
    assert sum(x.size for x in leaves(run.params)) == by_hand
    rows = evaluate.corruption_curves(run.model, run.params, run.dataset)
    assert len(rows) == 10 + 11 + 11
    blank = [r for r in rows if r["corruption"] == "dropout" and r["severity"] == 1.0]
    assert blank[0]["accuracy"] < 0.2
    evaluate.write_rows(rows, tmp_path / "rows.csv")
    evaluate.plot_corruptions({"efla": [rows, rows]}, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 1000
