"""Jobs of two processes, started as users start them: equal to one process, ended by a lost peer, stopped together."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from efla_jax import metrics
from efla_jax.train import hosts

STEPS = 6
OPTIONS = [
    "--config=configs/quickstart.py:efla", "--config.data.window=24", "--config.data.batch_size=4",
    "--config.data.eval_batch_size=4", "--config.data.valid_fraction=0.2", "--config.model.width=16",
    "--config.model.depth=1", "--config.model.mixer_options.efla.num_heads=2", "--config.model.mlp_ratio=1.0",
    "--config.optim.schedule=constant", "--config.optim.warmup_steps=2", "--config.train.log_every=1",
    f"--config.train.steps={STEPS}", "--config.train.save_every=3", "--config.mesh.data=2", "--config.mesh.context=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    words = np.random.default_rng(0).choice(["delta", "rule", "state", "key", "erase", "write"], (24, 60))
    for i, row in enumerate(words):
        (folder / f"{i}.txt").write_text(" ".join(row))
    return folder


def start(corpus, workdir, *more, devices=4, process=None, port=0):
    """experiments.train as a process of its own, alone or as one of two."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    flags = []
    if process is not None:
        address = f"127.0.0.1:{port}"
        environment |= {
            "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(process),
        }  # fmt: skip
        flags = ["--distributed", "--heartbeat_timeout=10"]
    command = [sys.executable, "-m", "experiments.train", *OPTIONS, f"--config.data.path={corpus}"]
    return subprocess.Popen(
        [*command, f"--workdir={workdir}", *flags, *more],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def pair(corpus, workdir, *more):
    port = free_port()
    return [start(corpus, workdir, *more, devices=2, process=i, port=port) for i in (0, 1)]


def ended(*processes):
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def losses(workdir):
    return {row["step"]: row["loss"] for row in metrics.read_rows(workdir) if "loss" in row}


def test_two_processes_train_save_and_go_on_as_one(corpus, tmp_path):
    """Two processes equal one; their checkpoint goes on in one process, on another mesh, to the same numbers."""
    ended(*pair(corpus, tmp_path / "two"))
    longer = f"--config.train.steps={STEPS + 3}"
    ended(start(corpus, tmp_path / "one", longer))
    ended(start(corpus, tmp_path / "two", longer, "--resume", "--config.mesh.context=1", "--config.mesh.fsdp=2"))
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert sorted(one) == sorted(two) == list(range(1, STEPS + 4))
    np.testing.assert_allclose([two[s] for s in sorted(two)], [one[s] for s in sorted(one)], rtol=2e-5)
    assert one[STEPS + 3] < one[1] - 0.1


@pytest.mark.slow
def test_a_lost_peer_ends_the_job_with_a_message(corpus, tmp_path):
    """kill -9 of the second process: the first ends by itself, not with status 0, and says why."""
    first, second = pair(corpus, tmp_path / "run", "--config.train.steps=100000", "--config.train.save_every=0")
    wait_for_step(tmp_path / "run", 5, first)
    second.kill()
    began = time.monotonic()
    output = first.communicate(timeout=120)[0]
    assert first.returncode != 0
    assert time.monotonic() - began < 60
    assert "heartbeat" in output or "peer" in output.lower() or "unavailable" in output.lower(), output[-2000:]


@pytest.mark.slow
def test_sigterm_to_one_process_saves_in_both_and_exits_zero(corpus, tmp_path):
    first, second = pair(corpus, tmp_path / "run", "--config.train.steps=100000", "--config.train.save_every=0")
    wait_for_step(tmp_path / "run", 5, first)
    second.send_signal(signal.SIGTERM)
    outputs = ended(first, second)
    assert "told to stop" in outputs[0]
    saved = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()]
    assert len(saved) == 1 and f"step {saved[0]} of 100000 is saved" in outputs[0]


def wait_for_step(workdir, step, process):
    deadline = time.monotonic() + 240
    file = workdir / metrics.FILE_NAME
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        if file.exists() and any(json.loads(line)["step"] >= step for line in file.read_text().splitlines() if line):
            return
        time.sleep(0.2)
    raise TimeoutError(f"no step {step} in {workdir}")


def test_an_incomplete_environment_is_refused(monkeypatch):
    for name in hosts.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="--distributed: no job of several processes was found"):
        hosts.join()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES is set, but JAX_COORDINATOR_ADDRESS, .* is not"):
        hosts.join()


class Client:
    """The coordination service of a job of two, where the other process has always arrived."""

    def __init__(self, store):
        self.store = store

    def key_value_set(self, key, value, allow_overwrite=False):
        self.store[key] = value

    def wait_at_barrier(self, name, timeout_in_ms):
        self.store.setdefault("barriers", []).append(name)

    def key_value_try_get(self, key):
        import jax

        if key not in self.store:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.store[key]


def test_all_processes_stop_at_the_step_where_one_has_no_batch(monkeypatch):
    store: dict = {}
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts.ocp.multihost, "get_jax_distributed_client", lambda: Client(store))
    assert hosts.agree_on_next(1, True)
    assert not hosts.agree_on_next(2, False)
    assert not hosts.agree_on_next(2, True)  # the process that had one
    assert store["barriers"] == ["efla_jax/batches/1", "efla_jax/batches/2", "efla_jax/batches/2"]
