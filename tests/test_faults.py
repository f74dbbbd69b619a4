"""What may happen to a run of two weeks, done to a small one: killed, out of disk, told to stop, fed with rubbish.

The slow tests start whole processes (`make test-slow ARGS=tests/test_faults.py`); EFLA_KILLS sets how many are killed.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from efla_jax import metrics, optim, sharding, train
from efla_jax.checkpoint import Checkpointer
from efla_jax.data import prepare
from tests.test_hosts import ended, losses, no_process_is_left, start, wait_for_step  # noqa: F401  (fixtures)
from tests.test_train import text_config

KILLS = int(os.environ.get("EFLA_KILLS", "30"))
LONG = ["--config.train.steps=100000", "--config.mesh.data=1", "--config.mesh.context=1"]


def alone(corpus, workdir, *more):
    # What a killed process compiled must not stand in the cache of the other tests.
    return start(corpus, workdir, *LONG, f"--compile_cache={corpus}.compiled", *more, devices=1)


def rows_ever_logged(workdir):
    """(step, loss) of every row, those of repeated steps included."""
    rows = []
    for name in (metrics.FILE_NAME, metrics.DROPPED_NAME):
        if (workdir / name).exists():
            for line in (workdir / name).read_text().splitlines():
                row = json.loads(line)
                if "loss" in row:
                    rows.append((row["step"], row["loss"]))
    return rows


@pytest.mark.slow
def test_killed_at_random_moments_a_run_repeats_its_losses_bit_for_bit(corpus, tmp_path):
    """kill -9, again and again, with a save at every step: all losses ever logged are those of one whole run."""
    rng, run, resumed = random.Random(0), tmp_path / "run", []
    for kill in range(KILLS):
        process = alone(corpus, run, "--resume", "--config.train.save_every=1")
        if kill % 5 == 4:  # while it starts, reads and compiles
            time.sleep(rng.uniform(0.5, 8))
        else:
            before = max(losses(run), default=0) if (run / metrics.FILE_NAME).exists() else 0
            wait_for_step(run, before + 2, process)
            time.sleep(rng.uniform(0, 1.5))
        process.kill()
        process.communicate()
        steps = sorted(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())
        resumed.append(steps[-1] if steps else 0)
    last = max(losses(run)) + 3
    final = [f"--config.train.steps={last}", "--resume", "--config.train.save_every=1"]
    ended(start(corpus, run, *LONG[1:], *final, devices=1))
    ended(start(corpus, tmp_path / "whole", *LONG[1:], final[0], "--config.train.save_every=0", devices=1))
    whole = losses(tmp_path / "whole")
    logged = rows_ever_logged(run)
    assert {step for step, _ in logged} == set(whole)
    different = [(step, loss, whole[step]) for step, loss in logged if loss != whole[step]]
    repeated = len(logged) - len(whole)
    print(f"{KILLS} kills, {len(whole)} steps, {repeated} done again, {len(different)} different; resumed at {resumed}")
    assert not different
    assert repeated > 0 and len(set(resumed)) > KILLS // 2


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_keeps_what_was_saved(corpus, tmp_path):
    """Files may not grow beyond a limit that a checkpoint exceeds: the run ends at once and says which step and why."""
    run = tmp_path / "run"
    ended(start(corpus, run, *LONG[1:], "--config.train.steps=3", "--config.train.save_every=3", devices=1))
    command = alone(corpus, run, "--resume", "--config.train.save_every=2")
    resource.prlimit(command.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
    output = command.communicate(timeout=240)[0]
    assert command.returncode == 1, output
    assert f"step=4 was not saved in {run / 'checkpoints'} (" in output and "File too large" in output, output
    assert "earlier steps are untouched" in output and sorted(losses(run))[:4] == [1, 2, 3, 4]
    ended(start(corpus, run, *LONG[1:], "--config.train.steps=8", "--resume", devices=1))
    ended(start(corpus, tmp_path / "whole", *LONG[1:], "--config.train.steps=8", devices=1))
    assert losses(run) == losses(tmp_path / "whole")


# Root writes everywhere; without this capability (prctl 24 drops number 1) it does as others do.
AS_OTHERS = [sys.executable, "-c", "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0);"
             "os.execv(sys.argv[1], sys.argv[1:])"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["run", "run/checkpoints", "."])
def test_a_folder_that_cannot_be_written_is_refused_before_a_step(corpus, tmp_path, closed):
    run, new = tmp_path / "run", closed == "."
    options = [*LONG[1:], "--config.train.steps=3"]
    if not new:
        ended(start(corpus, run, *options, devices=1))
    before = losses(run) if not new else {}
    (tmp_path / closed).chmod(0o555)
    options = [*LONG[1:], "--config.train.steps=5"]
    process = start(corpus, run, *options, "--resume", devices=1, under=AS_OTHERS)
    output = process.communicate(timeout=240)[0]
    (tmp_path / closed).chmod(0o755)
    assert process.returncode == 1 and "error: " in output.splitlines()[-2], output
    assert str(run) in output and "ermission denied" in output and "Traceback" not in output, output
    if not new:
        assert losses(run) == before
        ended(start(corpus, run, *options, "--resume", devices=1))
        assert sorted(losses(run)) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_sigterm_saves_and_exits_zero(corpus, tmp_path):
    run = tmp_path / "run"
    process = alone(corpus, run, "--config.train.save_every=0")
    wait_for_step(run, 4, process)
    process.send_signal(signal.SIGTERM)
    output = ended(process)[0]
    saved = [int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit()]
    assert f"told to stop: step {saved[0]} of 100000 is saved" in output
    ended(start(corpus, run, *LONG[1:], f"--config.train.steps={saved[0] + 2}", "--resume", devices=1))
    assert sorted(losses(run)) == list(range(1, saved[0] + 3))


@pytest.mark.slow
def test_importing_the_training_program_in_a_worker_joins_no_job():
    """Pitfall 58: spawned data workers import the main module."""
    environment = {**os.environ, "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2"}
    code = "import experiments.train; from jax._src import distributed as d; assert d.global_state.client is None"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


def spoilt(monkeypatch, steps):
    """Batches of these steps carry token ids beyond the vocabulary, which embed as NaN."""
    place, seen = sharding.place, []

    def placed(mesh, batch, size=None):
        if size is not None:  # a training batch, not one that is scored
            seen.append(None)
            if len(seen) in steps:
                batch = {**batch, "tokens": np.where(batch["mask"] > 0, 5000, 0).astype(np.int32)}
        return place(mesh, batch, size)

    monkeypatch.setattr(sharding, "place", placed)


def test_a_bad_batch_is_skipped_counted_and_named(corpus, tmp_path, monkeypatch, capsys):
    config = text_config(corpus)
    spoilt(monkeypatch, {3})
    run = train.fit(config, tmp_path / "run")
    rows = {row["step"]: row for row in metrics.read_rows(run.workdir) if "loss" in row}
    assert rows[2]["skipped"] == 0 and all(rows[s]["skipped"] == 1 for s in (3, 4, 5, 6))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(run.params))
    assert np.isnan(rows[3]["loss"]) and rows[6]["loss"] < rows[1]["loss"]
    assert "step 3: skipped, its gradient is not finite, first in params/" in capsys.readouterr().out


def test_too_many_bad_batches_in_a_row_stop_the_run_and_its_state_is_good(corpus, tmp_path, monkeypatch):
    config = text_config(corpus)
    config.train.max_skipped, config.train.save_every, config.train.log_every = 2, 1, 50  # looked at in every step
    spoilt(monkeypatch, {3, 4, 5, 6})
    with pytest.raises(FloatingPointError, match="not finite in the last 2 steps up to step 4"):
        train.fit(config, tmp_path / "run")
    monkeypatch.undo()
    resumed = train.fit(config, tmp_path / "run", resume=True)  # the data were repaired
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(resumed.params))

@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """(config, run) of a run of 6 steps, saved at 3 and at its end."""
    config = text_config(corpus)
    config.data.batch_size = 4
    return config, train.fit(config, tmp_path_factory.mktemp("runs") / "whole")


def copy_of(run, workdir, *without):
    """The folder of a run, as it was before these steps were saved."""
    shutil.copytree(run.workdir, workdir)
    for step in without:
        shutil.rmtree(workdir / "checkpoints" / str(step))
    return workdir


def changed(config, **values):
    """A config with other values of dotted fields, written with __ for the dot."""
    other = config.copy_and_resolve_references()
    other.update_from_flattened_dict({name.replace("__", "."): value for name, value in values.items()})
    return other


def arrays(params):
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}


def test_with_files_of_its_newest_checkpoint_gone_a_run_goes_on_from_the_one_before(finished, tmp_path):
    config, run = finished
    folder = copy_of(run, tmp_path / "run")
    lost = sorted(path for path in (folder / "checkpoints" / "6" / "state").rglob("*") if path.is_file())[-1]
    lost.unlink()
    with pytest.warns(UserWarning, match="step=6: .* is damaged .*; it was moved to .*6.damaged"):
        again = train.fit(config, folder, resume=True)
    assert losses(folder) == losses(run.workdir) and again.scores == run.scores
    assert [row[0] for row in rows_ever_logged(folder)] == [1, 2, 3, 4, 5, 6, 4, 5, 6]


def test_a_run_goes_on_over_eight_devices_and_back_on_one(finished, tmp_path):
    config, run = finished
    folder = copy_of(run, tmp_path / "run", 6)
    spread = changed(config, mesh__fsdp=2, mesh__tensor=2, mesh__context=2, train__save_every=1)
    split = train.fit(spread, folder, resume=True)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(split.params)} == {8}
    shutil.rmtree(folder / "checkpoints" / "6")
    train.fit(config, folder, resume=True)
    assert [row[0] for row in rows_ever_logged(folder)] == [1, 2, 3, 4, 5, 6, 4, 5, 6, 6]
    expected = losses(run.workdir)
    for step, loss in rows_ever_logged(folder):
        assert loss == pytest.approx(expected[step], rel=2e-5)


def write_shards(folder, words):
    """The same documents, by a tokenizer that numbers words in this order."""
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(("<eos>", *words))}))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    texts = np.random.default_rng(0).choice(sorted(words), (24, 60))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": " ".join(row)}) + "\n" for row in texts))
    spec = prepare.TokenizerSpec(str(folder / "tokenizer.json"))
    preparation = prepare.Preparation(str(folder / "text.jsonl"), tokenizer=spec, valid_fraction=0.2)
    prepare.prepare(preparation, str(folder / "shards"), workers=0, progress=False)
    return str(folder / "shards")


def test_other_data_or_another_tokenizer_is_refused(finished, tmp_path):
    """Shapes and counts are the same, but the numbers of tokens mean something else."""
    config, run = finished
    words = ["delta", "rule", "state", "key", "erase", "write"]
    config = changed(config, data__kind="tokens", data__path=write_shards(tmp_path / "a", words))
    config.train.steps, config.optim.warmup_steps = 1, 0
    train.fit(config, tmp_path / "run")
    other = changed(config, data__path=write_shards(tmp_path / "b", words[::-1]))
    with pytest.raises(ValueError, match=r"config.data: the run was trained with tokenizer .\w{64}., the data"):
        train.fit(other, tmp_path / "run", resume=True)
    config, folder = finished[0], copy_of(run, tmp_path / "text")
    texts = shutil.copytree(config.data.path, tmp_path / "texts")
    (texts / "0.txt").write_text("write erase key")
    with pytest.raises(ValueError, match="fingerprint=.* corpus, seed, window and batch size must be those of"):
        train.fit(changed(config, data__path=str(texts)), folder, resume=True)
    assert losses(folder) == losses(run.workdir)


def test_init_from_begins_with_the_parameters_of_another_run(finished, tmp_path, capsys):
    """A rate too small to move any number shows what the run began with."""
    config, run = finished
    still = changed(config, optim__learning_rate=1e-30, train__steps=1, optim__warmup_steps=0)
    begun = train.fit(still, tmp_path / "same", init_from=run.workdir)
    source = arrays(run.params)
    for path, value in arrays(begun.params).items():
        np.testing.assert_allclose(value, source[path], rtol=0, atol=1e-20, err_msg=path)
    assert f"read {len(source)} leaves from {run.workdir / 'checkpoints' / '6'}\n" in capsys.readouterr().out
    went_on = train.fit(still, tmp_path / "same", init_from=tmp_path / "gone", resume=True)  # it has its own by now
    assert went_on.scores == begun.scores

    deeper = changed(still, model__depth=2, model__mixers=("efla", "efla"), model__tie_embeddings=True)
    with pytest.raises(ValueError, match=r"block_1/.*: checkpoint has no such leaf, run float32\["):
        train.fit(deeper, tmp_path / "deeper", init_from=run.workdir)
    partly = arrays(train.fit(deeper, tmp_path / "deeper", init_from=run.workdir, allow_partial=True).params)
    printed = capsys.readouterr().out
    assert "leaves not in the checkpoint, kept as given: params/params/groups/block_1/" in printed
    assert "1 leaves in the checkpoint, not used: params/params/lm_head/kernel" in printed
    fresh = set(partly) - set(source)
    assert fresh and all("block_1" in path for path in fresh)
    for path in set(partly) & set(source):
        np.testing.assert_allclose(partly[path], source[path], rtol=0, atol=1e-20, err_msg=path)

    wider = changed(still, model__width=18)
    with pytest.raises(ValueError, match=r"embedding: checkpoint float32\[256, 16\], run float32\[256, 18\]"):
        train.fit(wider, tmp_path / "wider", init_from=run.workdir, allow_partial=True, cast=True)
    assert not (tmp_path / "wider" / "config.json").exists()


def test_a_checkpoint_with_other_leaves_needs_allow_partial_and_cast(finished, tmp_path, capsys):
    """As one of another release may be: without the random key, and with parameters in bfloat16."""
    config, run = finished
    folder = copy_of(run, tmp_path / "run", 6)
    optimizer, _ = optim.make_optimizer(**config.optim, total_steps=config.train.steps)
    state = jax.eval_shape(lambda: train.make_state(run.model, optimizer, config.seed))
    with Checkpointer(folder / "checkpoints") as checkpointer:
        found = checkpointer.restore(state)
    shutil.rmtree(folder / "checkpoints" / "3")
    older = found.state._asdict()
    del older["key"]
    older["params"] = jax.tree.map(lambda x: x.astype("bfloat16"), older["params"])
    with Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save(3, older, found.data_state, found.metadata)
    with pytest.raises(ValueError, match=r"key: checkpoint has no such leaf, run uint32\[2\](.|\n)*bfloat16"):
        train.fit(config, folder, resume=True)
    with pytest.raises(ValueError, match=r"in 1. leaves(.|\n)*kernel: checkpoint bfloat16(.|\n)*, run float32"):
        train.fit(config, folder, resume=True, allow_partial=True)
    again = train.fit(config, folder, resume=True, allow_partial=True, cast=True)
    printed = capsys.readouterr().out
    assert "1 leaves not in the checkpoint, kept as given: key\n" in printed and "leaves cast: params/" in printed
    assert {x.dtype.name for x in jax.tree.leaves(again.params)} == {"float32"}
    assert [row[0] for row in rows_ever_logged(folder)] == [1, 2, 3, 4, 5, 6, 4, 5, 6]
    assert losses(folder)[6] == pytest.approx(losses(run.workdir)[6], rel=1e-2)
