"""What may happen to a run of two weeks, done to a small one: killed, out of disk, told to stop, fed with rubbish.

The slow tests start whole processes (`make test-slow ARGS=tests/test_faults.py`); EFLA_KILLS sets how many are killed.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from efla_jax import metrics, sharding, train
from tests.test_hosts import corpus, ended, losses, start, wait_for_step  # noqa: F401  (corpus is a fixture)
from tests.test_train import text_config

KILLS = int(os.environ.get("EFLA_KILLS", "30"))
LONG = ["--config.train.steps=100000", "--config.mesh.data=1", "--config.mesh.context=1"]


def alone(corpus, workdir, *more):  # noqa: F811
    return start(corpus, workdir, *LONG, *more, devices=1)


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
def test_killed_at_random_moments_a_run_repeats_its_losses_bit_for_bit(corpus, tmp_path):  # noqa: F811
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
def test_a_full_disk_ends_the_run_and_keeps_what_was_saved(corpus, tmp_path):  # noqa: F811
    """Files may not grow beyond a limit that a checkpoint exceeds: the run ends at once and says which step and why."""
    run = tmp_path / "run"
    ended(start(corpus, run, *LONG[1:], "--config.train.steps=3", "--config.train.save_every=3", devices=1))
    command = alone(corpus, run, "--resume", "--config.train.save_every=2")
    resource.prlimit(command.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
    output = command.communicate(timeout=240)[0]
    assert command.returncode == 1, output
    assert "error" in output and "5" in output, output
    ended(start(corpus, run, *LONG[1:], "--config.train.steps=8", "--resume", devices=1))
    ended(start(corpus, tmp_path / "whole", *LONG[1:], "--config.train.steps=8", devices=1))
    assert losses(run) == losses(tmp_path / "whole")


@pytest.mark.slow
def test_sigterm_saves_and_exits_zero(corpus, tmp_path):  # noqa: F811
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


def test_a_bad_batch_is_skipped_counted_and_named(corpus, tmp_path, monkeypatch, capsys):  # noqa: F811
    config = text_config(corpus)
    spoilt(monkeypatch, {3})
    run = train.fit(config, tmp_path / "run")
    rows = {row["step"]: row for row in metrics.read_rows(run.workdir) if "loss" in row}
    assert rows[2]["skipped"] == 0 and all(rows[s]["skipped"] == 1 for s in (3, 4, 5, 6))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(run.params))
    assert np.isnan(rows[3]["loss"]) and rows[6]["loss"] < rows[1]["loss"]
    assert "step 3: 1 steps skipped so far, gradient not finite; first in params/" in capsys.readouterr().out


def test_too_many_bad_batches_in_a_row_stop_the_run_and_its_state_is_good(corpus, tmp_path, monkeypatch):  # noqa: F811
    config = text_config(corpus)
    config.train.max_skipped, config.train.save_every = 2, 1
    spoilt(monkeypatch, {3, 4, 5, 6})
    with pytest.raises(FloatingPointError, match="not finite in the last 2 steps up to step 4"):
        train.fit(config, tmp_path / "run")
    monkeypatch.undo()
    resumed = train.fit(config, tmp_path / "run", resume=True)  # the data were repaired
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(resumed.params))
