"""What happens to checkpoints: damage of every file, killed writers, full disks, directories that cannot be written."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efla_jax.checkpoint import Checkpointer, load_params

STEPS = (1, 2, 3)


def make_state(step):
    kernel = jnp.arange(12.0).reshape(3, 4) + step
    # Large enough not to be stored inside orbax's index.
    table = jax.random.normal(jax.random.key(step), (40, 70))
    return {"params": {"kernel": kernel, "table": table}, "key": jax.random.key(step)}


def same(state, step):
    leaves, expected = (jax.tree.leaves({**s, "key": jax.random.key_data(s["key"])}) for s in (state, make_state(step)))
    return len(leaves) == len(expected) and all(map(np.array_equal, leaves, expected))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    with Checkpointer(directory, keep_best="loss") as checkpointer:
        for step in STEPS:
            metrics = {"loss": abs(step - 2.0)}
            checkpointer.save(step, make_state(step), {"next_step": step}, {"lr": 0.1}, metrics)
    return directory


def files_of(step_folder):
    return sorted(path for path in step_folder.rglob("*") if path.is_file())


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


# orbax's own notes: times of the commit, and marks of completion that a rename makes needless.
UNUSED = ("_CHECKPOINT_METADATA", "commit_success.txt")


@pytest.mark.parametrize("damage", [os.unlink, cut, flip])
def test_damage_of_any_file_is_seen(good, tmp_path, damage):
    """The newest step is passed over, its folder is kept under another name, and its number can be saved again."""
    names = [path.relative_to(good / "3") for path in files_of(good / "3")]
    assert len(names) > 12
    for number, name in enumerate(names):
        directory = shutil.copytree(good, tmp_path / str(number))
        damage(directory / "3" / name)
        if name.name in UNUSED:
            with Checkpointer(directory, read_only=True) as checkpointer:
                assert same(checkpointer.restore(make_state(0)).state, 3)
            continue
        with Checkpointer(directory, keep_best="loss", read_only=True) as checkpointer:
            with pytest.raises(ValueError, match="step=3 in .* is damaged: .*restore an earlier step"):
                checkpointer.restore(make_state(0), step=3)
            with pytest.warns(UserWarning, match="passed over step=3: .* is damaged"):
                assert checkpointer.restore(make_state(0)).step == 2
            assert (directory / "3" / "state").exists()  # moved by writers only
    # One of them to the end: reading it as a writer, and saving its number again.
    with Checkpointer(directory, keep_best="loss") as checkpointer:
        damage(directory / "3" / "metadata" / "metadata")
        with pytest.warns(UserWarning, match="step=3: .* is damaged .*; it was moved to .*3.damaged"):
            restored = checkpointer.restore(make_state(0))
        assert restored.step == 2 and same(restored.state, 2)
        assert restored.data_state == {"next_step": 2} and restored.metadata == {"lr": 0.1}
        assert checkpointer.all_steps() == (1, 2) and (directory / "3.damaged" / "state").exists()
        checkpointer.save(3, make_state(7), {"next_step": 3}, None)
        assert checkpointer.best_step() == 2
        assert same(checkpointer.restore(make_state(0), step=3).state, 7)


def test_what_a_cut_copy_leaves(good, tmp_path):
    """Empty folders, lost items; several damaged steps; nothing left; each number can be saved again."""
    directory = shutil.copytree(good, tmp_path / "run" / "checkpoints")
    shutil.rmtree(directory / "3" / "state")
    shutil.rmtree(directory / "2" / "data")
    (directory / "4").mkdir()
    with pytest.warns(UserWarning) as caught:
        params, report = load_params(tmp_path / "run", make_state(0)["params"])
    assert [str(w.message).split(":")[0] for w in caught] == [f"passed over step={n}" for n in (4, 3, 2)]
    assert report.folder == directory / "1" and np.array_equal(params["table"], make_state(1)["params"]["table"])
    with pytest.raises(ValueError, match="step=2 in .* is damaged: .*data"):
        load_params(directory / "2", make_state(0)["params"])

    with Checkpointer(directory) as checkpointer:
        assert checkpointer.latest_step() == 4
        # A step asked for by number, say after a look at the others: damaged ones do not block the way from it.
        assert same(checkpointer.restore(make_state(0), step=1).state, 1)
        with pytest.warns(UserWarning) as caught:
            checkpointer.save(2, make_state(2), None, None)
        assert len(caught) == 3 and checkpointer.all_steps() == (1, 2)
        for step in (1, 2):
            shutil.rmtree(directory / str(step) / "state")
        with pytest.raises(ValueError, match="step=2 in .* is damaged: .*step=1 in .* is damaged: .*begin afresh"):
            checkpointer.restore(make_state(0))
        assert checkpointer.all_steps() == (1, 2)  # nothing is moved when there is nothing to go on from
        with pytest.warns(UserWarning, match="2.damaged2"):
            checkpointer.save(2, make_state(2), None, None)
        assert same(checkpointer.restore(make_state(0)).state, 2)


def test_a_checkpoint_of_the_release_before_is_read(tmp_path):
    """It has no checksums: what reads is whole, and what does not is an error that names the step."""
    # One leaf: when the first of several cannot be read, orbax leaves the others to a loop that it has closed.
    state = {"table": make_state(3)["params"]["table"]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state, {"next_step": 3}, None)
    (tmp_path / "3" / "checksums.json").unlink()
    (tmp_path / "3" / "metadata" / "metadata").write_text(json.dumps({"value": {"lr": 0.2}}))
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        restored = checkpointer.restore(state)
        assert np.array_equal(restored.state["table"], state["table"]) and restored.metadata == {"lr": 0.2}
        for path in (tmp_path / "3" / "state").rglob("d/*"):
            path.write_bytes(path.read_bytes()[:9])
        with pytest.raises(ValueError, match="step=3 in .* cannot be read .*damaged, restore an earlier step"):
            checkpointer.restore(state)


def start(program, *arguments):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip


WRITER = """
import sys, warnings
import numpy as np
from efla_jax.checkpoint import Checkpointer
warnings.simplefilter("error")
x = np.zeros(1 << 14, np.int32)
with Checkpointer(sys.argv[1], max_to_keep=2) as checkpointer:
    begin = 0
    if checkpointer.latest_step() is not None:
        found = checkpointer.restore({"x": x})
        begin = found.step
        assert found.data_state == {"next_step": begin} and bool((found.state["x"] == begin).all()), begin
    print("from", begin, flush=True)
    for step in range(begin + 1, begin + 100_000):
        checkpointer.save(step, {"x": x + step}, {"next_step": step}, None)
        checkpointer.check_for_errors()
        print(step, flush=True)
"""


def kill_writers(directory, times, seed):
    """Each is killed a random moment after a random number of saves; returns how many were in the middle of a write."""
    rng, reached, unfinished = random.Random(seed), 0, 0
    for _ in range(times):
        job = start(WRITER, directory)
        try:
            begin = job.stdout.readline().split()
            assert begin[:1] == ["from"], job.stderr.read()
            # `save` n returns when n - 1 is on disk; n itself may be.
            assert int(begin[1]) in (max(reached - 1, 0), reached, reached + 1)
            for _ in range(rng.randrange(2, 12)):
                reached = int(job.stdout.readline())
            try:
                job.wait(timeout=rng.uniform(0.0, 0.03))
            except subprocess.TimeoutExpired:
                pass
        finally:
            job.send_signal(signal.SIGKILL)
            rest, errors = job.communicate()
        assert job.returncode == -signal.SIGKILL, errors
        reached = int((rest.split() or [reached])[-1])
        unfinished += any("tmp" in path.name for path in directory.iterdir())
        with Checkpointer(directory, read_only=True) as checkpointer:
            found = checkpointer.restore({"x": np.zeros(1 << 14, np.int32)})
            assert found.step >= reached - 1 and found.data_state == {"next_step": found.step}
            assert bool((found.state["x"] == found.step).all())
    assert not [path.name for path in directory.iterdir() if "damaged" in path.name]
    return unfinished


def test_a_killed_writer_leaves_the_last_complete_step(tmp_path):
    kill_writers(tmp_path / "run", times=3, seed=1)


@pytest.mark.slow
def test_thirty_killed_writers(tmp_path):
    assert kill_writers(tmp_path / "run", times=30, seed=2) > 3  # else the test did not meet what it is for


FULL = """
import resource, signal, sys, time
import jax
# A limit on the file size stands for a full disk.
from efla_jax.checkpoint import Checkpointer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
state = {"x": jax.random.normal(jax.random.key(0), (1 << 20,))}
checkpointer = Checkpointer(sys.argv[1], max_to_keep=1)
checkpointer.save(1, state, None, None)
checkpointer.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
checkpointer.save(2, state, None, None)
try:
    for _ in range(600):
        checkpointer.check_for_errors()
        time.sleep(0.1)
except RuntimeError as error:
    print("SURFACED", checkpointer.all_steps(), sorted(path.name for path in checkpointer.directory.iterdir()))
    print(str(error).replace(chr(10), " "))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, resource.RLIM_INFINITY))
checkpointer.save(2, state, None, None)
checkpointer.close()
"""


def test_a_full_disk_surfaces_and_can_be_mended(tmp_path):
    """The write fails in the background; the step before stays, though only one is kept, and nothing half-written."""
    job = start(FULL, tmp_path / "run")
    output, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    assert output.splitlines()[0] == "SURFACED (1,) ['1']", errors
    assert output.splitlines()[1].startswith(f"step=2 was not saved in {tmp_path / 'run'} (")
    assert "File too large" in output
    with Checkpointer(tmp_path / "run", read_only=True) as checkpointer:
        assert checkpointer.all_steps() == (2,)  # written once there was room again
        expected = jax.random.normal(jax.random.key(0), (1 << 20,))
        np.testing.assert_array_equal(checkpointer.restore({"x": expected}).state["x"], expected)


PEER = """
import resource, signal, sys, time
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from jax.sharding import NamedSharding, PartitionSpec as P
from efla_jax.checkpoint import Checkpointer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
placed = NamedSharding(jax.make_mesh((2, 2), ("a", "b")), P("a", "b"))
x = jax.jit(lambda: jax.random.normal(jax.random.key(0), (1 << 10, 1 << 9)), out_shardings=placed)()
with Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(1, {"x": x}, None, None)
    checkpointer.wait()
    if jax.process_index() == int(sys.argv[4]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    checkpointer.save(2, {"x": x}, None, None)
    for _ in range(600):
        checkpointer.check_for_errors()
        time.sleep(0.1)
"""


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_of_one_process_ends_all(tmp_path, failing):
    """Without waiting for orbax's barriers to time out, which takes twenty minutes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    jobs = [start(PEER, tmp_path / "run", address, process, failing) for process in range(2)]
    try:
        outputs = [job.communicate(timeout=60) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for job, (_, errors) in zip(jobs, outputs, strict=True):
        assert job.returncode == 1, errors
        assert f"RuntimeError: step=2 was not saved in {tmp_path / 'run'} (process {failing}: " in errors, errors
        assert "File too large" in errors and "start the job again" in errors
    with Checkpointer(tmp_path / "run", read_only=True) as checkpointer:
        assert checkpointer.all_steps() == (1,)


READ_ONLY = """
import os, sys
import jax.numpy as jnp
from efla_jax.checkpoint import Checkpointer
directory, state = sys.argv[1], {"x": jnp.ones(3)}
checkpointer = Checkpointer(directory)
checkpointer.save(1, state, None, None)
checkpointer.wait()
os.chmod(directory, 0o555)
if root := os.geteuid() == 0:
    os.seteuid(int(sys.argv[2]))  # root would write all the same
try:
    checkpointer.save(2, state, None, None)
    checkpointer.wait()
except RuntimeError as error:
    print(str(error).replace(chr(10), " "))
if root:
    os.seteuid(0)
os.chmod(directory, 0o755)
checkpointer.save(2, state, None, None)
checkpointer.close()
"""


def test_a_read_only_directory_is_named():
    nobody = 65534
    with tempfile.TemporaryDirectory() as folder:  # pytest's own cannot be entered by nobody
        directory = Path(folder).resolve() / "run"
        os.chmod(folder, 0o755)
        job = start(READ_ONLY, directory, nobody)
        output, errors = job.communicate(timeout=120)
        assert job.returncode == 0, errors
        assert output.startswith(f"step=2 was not saved in {directory} (") and "ermission denied" in output, errors
        with Checkpointer(directory, read_only=True) as checkpointer:
            assert checkpointer.all_steps() == (1, 2)
            assert checkpointer.restore({"x": jnp.zeros(3)}).step == 2
