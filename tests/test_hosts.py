"""Jobs of two processes, started as users start them: equal to one process, ended by a lost peer, stopped together."""

import itertools
import json
import os
import resource
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
STARTED: list[subprocess.Popen] = []
OPTIONS = [
    "--config=configs/quickstart.py:efla", "--config.data.window=24", "--config.data.batch_size=4",
    "--config.data.eval_batch_size=4", "--config.data.valid_fraction=0.2", "--config.model.width=16",
    "--config.model.depth=1", "--config.model.mixer_options.efla.num_heads=2", "--config.model.mlp_ratio=1.0",
    "--config.optim.schedule=constant", "--config.optim.warmup_steps=2", "--config.train.log_every=1",
    f"--config.train.steps={STEPS}", "--config.train.save_every=3", "--config.mesh.data=2", "--config.mesh.context=2",
]  # fmt: skip


def start(corpus, workdir, *more, devices=4, process=None, port=0, under=()):
    """experiments.train as a process of its own, alone or as one of two; `under`: the command that starts it."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    flags = []
    if process is not None:
        address = f"127.0.0.1:{port}"
        environment |= {
            "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(process),
        }  # fmt: skip
        flags = ["--distributed", "--heartbeat_timeout=10"]
    command = [sys.executable, "-m", "experiments.train", *OPTIONS, f"--config.data.path={corpus}"]
    process = subprocess.Popen(
        [*under, *command, f"--workdir={workdir}", *flags, *more],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Whatever a test finds, the processes it started end with it."""
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()
        process.stdout.close()


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


def assert_same_losses(workdir, other):
    ours, theirs = losses(workdir), losses(other)
    assert sorted(ours) == sorted(theirs) == list(range(1, STEPS + 4))
    np.testing.assert_allclose([ours[s] for s in sorted(ours)], [theirs[s] for s in sorted(theirs)], rtol=2e-5)


@pytest.mark.slow
def test_two_processes_train_save_and_go_on_as_one(corpus, tmp_path):
    """Two processes equal one; their checkpoint goes on in one process, on another mesh, to the same numbers."""
    ended(*pair(corpus, tmp_path / "two"))
    longer = f"--config.train.steps={STEPS + 3}"
    ended(start(corpus, tmp_path / "one", longer))
    ended(start(corpus, tmp_path / "two", longer, "--resume", "--config.mesh.context=1", "--config.mesh.fsdp=2"))
    assert_same_losses(tmp_path / "two", tmp_path / "one")
    one = losses(tmp_path / "one")
    assert one[STEPS + 3] < one[1] - 0.1


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_in_two(corpus, tmp_path):
    longer = f"--config.train.steps={STEPS + 3}"
    ended(start(corpus, tmp_path / "run", "--config.mesh.data=1", "--config.mesh.context=1", devices=1))
    ended(*pair(corpus, tmp_path / "run", longer, "--resume"))
    ended(start(corpus, tmp_path / "whole", longer))
    assert_same_losses(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_a_lost_peer_ends_the_job_with_a_message(corpus, tmp_path):
    """kill -9 of the second process: the first ends by itself, not with status 0, and says why."""
    first, second = pair(corpus, tmp_path / "run", "--config.train.steps=100000", "--config.train.save_every=0")
    wait_for_step(tmp_path / "run", 5, first)
    second.kill()
    began = time.monotonic()
    output = first.communicate(timeout=120)[0]
    seconds = time.monotonic() - began
    print(f"the other process ended {seconds:.0f} s after one was killed, with status {first.returncode}")
    assert first.returncode not in (0, None) and seconds < 60
    assert "another task died" in output or "Connection closed by peer" in output, output[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_process_ends_both_with_its_message(corpus, tmp_path, failing):
    """Its files may not grow any more: that of the metrics in the first process, of the checkpoint in either."""
    often = ["--config.train.steps=100000", f"--config.train.save_every={4 * failing}"]
    jobs = pair(corpus, tmp_path / "run", *often)
    wait_for_step(tmp_path / "run", 5, jobs[0])
    resource.prlimit(jobs[failing].pid, resource.RLIMIT_FSIZE, (4096, 4096))
    began = time.monotonic()
    outputs = [job.communicate(timeout=120)[0] for job in jobs]
    print(f"both ended {time.monotonic() - began:.0f} s after the disk of process {failing} was full")
    for job, output in zip(jobs, outputs, strict=True):
        assert job.returncode == 1 and "File too large" in output, output[-2000:]
    assert f"process {failing}: " in outputs[1 - failing]
    assert time.monotonic() - began < 60


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
    def initialize(**_):  # the real one may be called once, before anything else of jax
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(hosts.jax.distributed, "initialize", initialize)
    for name in hosts.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="--distributed: no job of several processes was found"):
        hosts.join()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES is set, but JAX_COORDINATOR_ADDRESS, .* is not"):
        hosts.join()
    monkeypatch.setenv("JAX_PROCESS_ID", "one")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host")
    with pytest.raises(ValueError, match="JAX_PROCESS_ID='one' is not a whole number"):
        hosts.join()
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    with pytest.raises(ValueError, match="JAX_COORDINATOR_ADDRESS='host' is not HOST:PORT"):
        hosts.join()


class Client:
    """The coordination service of a job of two, where the other process has always arrived."""

    def __init__(self, store):
        self.store = store

    def key_value_set(self, key, value, allow_overwrite=False):
        self.store[key] = value

    def wait_at_barrier(self, name, timeout_in_ms):
        self.store["met"] = self.store.get("met", 0) + 1

    def key_value_try_get(self, key):
        import jax

        if key not in self.store:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")
        return self.store[key]


@pytest.fixture
def store(monkeypatch):
    """What the processes of a job of two have told each other."""
    store: dict = {}
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts.ocp.multihost, "get_jax_distributed_client", lambda: Client(store))
    monkeypatch.setattr(hosts, "TURNS", itertools.count())
    return store


def test_all_processes_stop_at_the_step_where_one_has_no_batch(store, monkeypatch):
    assert hosts.agree_on_next(1, True)
    assert not hosts.agree_on_next(2, False)
    assert store["met"] == 2
    monkeypatch.setattr(hosts, "TURNS", itertools.count())  # the process that had one, and came late to step 1
    assert hosts.agree_on_next(1, True)
    assert not hosts.agree_on_next(2, True)


def test_what_ends_one_process_is_told_to_the_others(store, monkeypatch):
    assert hosts.agree_on_next(1, True)
    with pytest.raises(OSError, match="disk is full"), hosts.ending_together():
        raise OSError("the disk is full")
    monkeypatch.setattr(hosts, "TURNS", itertools.count())
    with pytest.raises(hosts.PeerFailed, match="step 2: the job ends with process 0: the disk is full"):
        with hosts.ending_together():
            assert hosts.agree_on_next(1, True)
            hosts.agree_on_next(2, True)
    assert store["met"] == 4  # it did not wait for the one that told it
