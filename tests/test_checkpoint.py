"""Checkpoints: round trips, strict comparison before reading, sharding, retention, faults, error messages."""

import os
import shutil
import signal
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from efla_jax.checkpoint import Checkpointer


class State(NamedTuple):
    step: jax.Array
    params: dict
    moments: optax.OptState
    key: jax.Array


def make_state(width=3, layers=2, scale=1.0, dtype=jnp.float32):
    kernel = scale * jnp.arange(layers * width * 4, dtype=dtype).reshape(layers, width, 4)
    params = {"layers": {"kernel": kernel, "A_log": jnp.full((layers, 2), scale)}, "empty": {}}
    moments = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam()).init(params)
    return State(jnp.int32(7), params, moments, jax.random.key(3))


def equal(a, b):
    def same(x, y):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        return x.dtype == y.dtype and np.array_equal(x, y)

    return jax.tree.structure(a) == jax.tree.structure(b) and all(map(same, jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with steps 1 and 2 of different content."""
    directory = tmp_path_factory.mktemp("runs") / "checkpoints"
    with Checkpointer(directory) as checkpointer:
        for step in (1, 2):
            metadata = {"config": {"lr": 0.1, "n": None}}
            checkpointer.save(step, make_state(scale=float(step)), {"next_step": step}, metadata)
    return directory


def test_round_trip(saved):
    with Checkpointer(saved, read_only=True) as checkpointer:
        assert checkpointer.latest_step() == 2 and checkpointer.all_steps() == (1, 2)
        state, data_state, metadata = checkpointer.restore(jax.eval_shape(make_state))
        assert equal(state, make_state(scale=2.0)) and isinstance(state, State)
        assert data_state == {"next_step": 2} and metadata == {"config": {"lr": 0.1, "n": None}}
        first = checkpointer.restore(make_state(), step=1)  # concrete arrays describe a tree as well
        assert equal(first.state, make_state(scale=1.0)) and first.data_state == {"next_step": 1}


@pytest.mark.parametrize(
    ("target", "differences"),
    [
        (lambda: make_state(width=5), ["params/layers/kernel: checkpoint float32[2, 3, 4], run float32[2, 5, 4]",
                                       "moments/1/mu/layers/kernel: checkpoint float32[2, 3, 4], run"]),
        (lambda: make_state(layers=3), ["params/layers/A_log: checkpoint float32[2, 2], run float32[3, 2]"]),
        (lambda: make_state(dtype=jnp.bfloat16), ["kernel: checkpoint float32[2, 3, 4], run bfloat16[2, 3, 4]"]),
        (lambda: make_state()._replace(step=jnp.float32(0)), ["step: checkpoint int32[], run float32[]"]),
        (lambda: make_state()._replace(params={"x": jnp.ones(1)}),
         ["params/x: checkpoint has no such leaf, run float32[1]",
          "params/layers/A_log: checkpoint float32[2, 2], run has no such leaf"]),
        (lambda: make_state()._replace(moments=()), ["moments/1/count: checkpoint int32[], run has no such leaf"]),
    ],
)  # fmt: skip
def test_any_difference_is_refused_before_reading(saved, target, differences, monkeypatch):
    with Checkpointer(saved, read_only=True) as checkpointer:
        monkeypatch.setattr(checkpointer._manager, "restore", lambda *_, **__: pytest.fail("read before comparing"))
        with pytest.raises(ValueError, match=r"step=2 .* does not fit abstract_state in \d+ leaves") as error:
            checkpointer.restore(jax.eval_shape(target))
    for difference in differences:
        assert difference in str(error.value)


def test_a_long_list_of_differences_is_cut(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {str(i): jnp.ones(1) for i in range(25)}, None, None)
        with pytest.raises(ValueError, match=r"in 25 leaves(.|\n)*\.\.\. and 5 more"):
            checkpointer.restore({str(i): jnp.ones(2) for i in range(25)})


def test_missing_checkpoints_are_clear_errors(saved, tmp_path):
    with Checkpointer(tmp_path / "fresh") as checkpointer:
        assert checkpointer.latest_step() is None and checkpointer.all_steps() == ()
        with pytest.raises(FileNotFoundError, match="fresh' holds no complete checkpoint"):
            checkpointer.restore(jax.eval_shape(make_state))
    with Checkpointer(saved, read_only=True) as checkpointer:
        with pytest.raises(FileNotFoundError, match="step=9 is not in .*complete checkpoints: 1, 2"):
            checkpointer.restore(jax.eval_shape(make_state), step=9)
    with pytest.raises(FileNotFoundError, match="typo' does not exist"):
        Checkpointer(tmp_path / "typo", read_only=True)
    assert not (tmp_path / "typo").exists()


def test_an_older_step_is_refused_not_ignored(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, make_state(), None, None)
        for step in (5, 4):
            with pytest.raises(ValueError, match=f"step={step} must be newer than the latest checkpoint, 5"):
                checkpointer.save(step, make_state(), None, None)
    with Checkpointer(tmp_path, read_only=True) as checkpointer, pytest.raises(ValueError, match="opened read_only"):
        checkpointer.save(6, make_state(), None, None)


def test_what_cannot_be_saved_is_named(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match=r"state must hold .* only, not a/0 \(int32\), b \(int\)"):
            checkpointer.save(1, {"a": [np.int32(7)], "b": 3, "c": jnp.ones(1)}, None, None)
        with pytest.raises(ValueError, match="data_state must survive JSON"):
            checkpointer.save(1, make_state(), {"x": object()}, None)
        for metadata in ({"x": float("nan")}, {1: 2}, {"x": (1, 2)}):
            with pytest.raises(ValueError, match="metadata.* must survive JSON"):
                checkpointer.save(1, make_state(), None, metadata)
        assert checkpointer.all_steps() == ()
    with pytest.raises(ValueError, match="max_to_keep=0 must be >= 1"):
        Checkpointer(tmp_path, max_to_keep=0)
    with pytest.raises(ValueError, match="keep_period=-1 must be >= 0"):
        Checkpointer(tmp_path, keep_period=-1)


def test_retention(tmp_path):
    with Checkpointer(tmp_path, max_to_keep=2, keep_period=3) as checkpointer:
        for step in range(1, 9):
            checkpointer.save(step, {"x": jnp.full(2, step)}, None, None)
        checkpointer.wait()
        assert checkpointer.all_steps() == (3, 6, 7, 8)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["3", "6", "7", "8"]


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
    x = jnp.arange(1 << 20, dtype=jnp.float32)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": x}, None, None)
        y = jax.jit(lambda x: -x, donate_argnums=0)(x)
        assert y[1] == -1
        restored = checkpointer.restore({"x": y}).state
    np.testing.assert_array_equal(restored["x"], np.arange(1 << 20, dtype=np.float32))


FULL = """
import resource, signal, sys, time
import jax
# A limit on the file size stands for a full disk.
from efla_jax.checkpoint import Checkpointer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
state = {"x": jax.random.normal(jax.random.key(0), (1 << 20,))}
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, state, None, None)
checkpointer.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
checkpointer.save(2, state, None, None)
try:
    for _ in range(600):
        checkpointer.check_for_errors()
        time.sleep(0.1)
except Exception as error:
    print("SURFACED", checkpointer.all_steps())
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, resource.RLIM_INFINITY))
checkpointer.save(2, state, None, None)
checkpointer.close()
"""


def test_a_failed_background_write_surfaces(tmp_path):
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", FULL, str(tmp_path / "run")]
    ended = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)
    assert "SURFACED (1,)" in ended.stdout, ended.stderr
    with Checkpointer(tmp_path / "run", read_only=True) as checkpointer:
        assert checkpointer.all_steps() == (1, 2)  # written once there was room again
        expected = jax.random.normal(jax.random.key(0), (1 << 20,))
        np.testing.assert_array_equal(checkpointer.restore({"x": expected}).state["x"], expected)


def test_an_unfinished_step_is_no_checkpoint(saved, tmp_path):
    """What kill -9 leaves is a folder that has not received its final name."""
    directory = shutil.copytree(saved, tmp_path / "copy")
    shutil.copytree(directory / "2", directory / "3.orbax-checkpoint-tmp")
    with Checkpointer(directory) as checkpointer:
        assert checkpointer.latest_step() == 2
        assert equal(checkpointer.restore(jax.eval_shape(make_state)).state, make_state(scale=2.0))
        checkpointer.save(3, make_state(scale=3.0), None, None)
    with Checkpointer(directory, read_only=True) as checkpointer:
        assert equal(checkpointer.restore(jax.eval_shape(make_state)).state, make_state(scale=3.0))


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from efla_jax.checkpoint import Checkpointer
checkpointer = Checkpointer(sys.argv[1])
for step in range(1, 1000):
    checkpointer.save(step, {"x": jnp.full((1 << 20,), step)}, {"next_step": step}, None)
    if step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_during_a_write_leaves_the_last_complete_step(tmp_path):
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run")], env=environment, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    with Checkpointer(tmp_path / "run") as checkpointer:
        step = checkpointer.latest_step()
        assert step in (3, 4)
        state, data_state, _ = checkpointer.restore({"x": jax.ShapeDtypeStruct((1 << 20,), jnp.int32)})
        assert data_state == {"next_step": step} and bool((state["x"] == step).all())
        checkpointer.save(step + 1, state, data_state, None)


def test_save_and_restore_inside_a_mesh(tmp_path):
    mesh = jax.make_mesh((1, 1), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", None))
    with jax.set_mesh(mesh), Checkpointer(tmp_path) as checkpointer:
        state = {"x": jax.device_put(jnp.ones((4, 2)), sharding), "y": jnp.zeros(3)}
        checkpointer.save(1, state, None, None)
        target = {"x": jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=sharding),
                  "y": jax.ShapeDtypeStruct((3,), jnp.float32)}
        restored = checkpointer.restore(target).state
    assert restored["x"].sharding == sharding
    assert restored["y"].sharding == SingleDeviceSharding(jax.devices()[0])
    assert equal(restored, state)


RESHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from efla_jax.checkpoint import Checkpointer
def sharding(shape, spec):
    return NamedSharding(jax.make_mesh(shape, ("a", "b"), axis_types=(AxisType.Auto,) * 2), PartitionSpec(*spec))
x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
with Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(1, {"x": jax.device_put(x, sharding((4, 2), ("a", "b")))}, None, None)
    for target in (sharding((2, 4), ("b", None)), sharding((8, 1), (None, "a")), None):
        leaf = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=target)
        restored = checkpointer.restore({"x": leaf}).state["x"]
        assert restored.sharding == (target or jax.sharding.SingleDeviceSharding(jax.devices()[0])), restored.sharding
        np.testing.assert_array_equal(restored, x)
"""


def test_restore_onto_another_mesh(tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **flags, "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", RESHARDED, str(tmp_path / "run")], env=environment, check=True, timeout=120)
