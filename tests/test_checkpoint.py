"""Checkpoints: round trips, comparison before reading, meshes, processes, retention, parameters alone, messages."""

import os
import socket
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from efla_jax.checkpoint import Checkpointer, load_params


class OptState(NamedTuple):
    moments: optax.OptState
    ema: dict


class State(NamedTuple):
    step: jax.Array
    params: dict
    opt_state: OptState
    key: jax.Array


def make_state(width=3, layers=2, scale=1.0, dtype=jnp.float32):
    kernel = scale * jnp.arange(layers * width * 4, dtype=dtype).reshape(layers, width, 4)
    params = {"layers": {"kernel": kernel, "A_log": jnp.full((layers, 2), scale)}, "empty": {}}
    moments = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam()).init(params)
    ema = jax.tree.map(lambda x: x + 100, params)
    return State(jnp.int32(7), params, OptState(moments, ema), jax.random.key(3))


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
            checkpointer.save(step, make_state(scale=float(step)), {"next_step": step}, metadata, {"loss": 1 / step})
    return directory


def test_round_trip(saved):
    with Checkpointer(saved, read_only=True) as checkpointer:
        assert checkpointer.latest_step() == 2 and checkpointer.all_steps() == (1, 2)
        state, data_state, metadata, step, notes = checkpointer.restore(jax.eval_shape(make_state))
        assert equal(state, make_state(scale=2.0)) and isinstance(state, State)
        assert step == 2 and notes == (f"read {len(jax.tree.leaves(state))} leaves from {saved / '2'}",)
        assert data_state == {"next_step": 2} and metadata == {"config": {"lr": 0.1, "n": None}}
        first = checkpointer.restore(make_state(), step=1)  # concrete arrays describe a tree as well
        assert equal(first.state, make_state(scale=1.0)) and first.data_state == {"next_step": 1}


@pytest.mark.parametrize(
    ("target", "differences"),
    [
        (lambda: make_state(width=5), ["params/layers/kernel: checkpoint float32[2, 3, 4], run float32[2, 5, 4]",
                                       "opt_state/moments/1/mu/layers/kernel: checkpoint float32[2, 3, 4], run"]),
        (lambda: make_state(layers=3), ["params/layers/A_log: checkpoint float32[2, 2], run float32[3, 2]"]),
        (lambda: make_state(dtype=jnp.bfloat16), ["kernel: checkpoint float32[2, 3, 4], run bfloat16[2, 3, 4]"]),
        (lambda: make_state()._replace(step=jnp.float32(0)), ["step: checkpoint int32[], run float32[]"]),
        (lambda: make_state()._replace(params={"x": jnp.ones(1)}),
         ["params/x: checkpoint has no such leaf, run float32[1]",
          "params/layers/A_log: checkpoint float32[2, 2], run has no such leaf"]),
        (lambda: make_state()._replace(opt_state=()),
         ["opt_state/moments/1/count: checkpoint int32[], run has no such leaf"]),
    ],
)  # fmt: skip
def test_any_difference_is_refused_before_reading(saved, target, differences, monkeypatch):
    with Checkpointer(saved, read_only=True) as checkpointer:
        monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", lambda *_, **__: pytest.fail("read first"))
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


def test_the_best_step_is_kept(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: float("nan"), 5: None, 6: 1.5}
    for name, best, kept in (("loss", 2, (2, 6)), ("-loss", 1, (1, 6))):
        with Checkpointer(tmp_path / name, max_to_keep=1, keep_best=name) as checkpointer:
            assert checkpointer.best_step() is None
            for step, loss in losses.items():
                checkpointer.save(step, {"x": jnp.full(2, step)}, None, None, None if loss is None else {"loss": loss})
            assert checkpointer.best_step() == best and checkpointer.all_steps() == kept
        # A resumed run knows what the one before has seen.
        with Checkpointer(tmp_path / name, max_to_keep=1, keep_best=name) as checkpointer:
            assert checkpointer.best_step() == best
            checkpointer.save(7, {"x": jnp.zeros(2)}, None, None, {"loss": 2.5, "accuracy": 1})
            assert checkpointer.all_steps() == (best, 7)
            with pytest.raises(ValueError, match="keep_best names the metric 'loss', metrics has perplexity only"):
                checkpointer.save(8, {"x": jnp.zeros(2)}, None, None, {"perplexity": 2.5})


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
    x = jnp.arange(1 << 20, dtype=jnp.float32)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": x}, None, None)
        y = jax.jit(lambda x: -x, donate_argnums=0)(x)
        assert y[1] == -1
        restored = checkpointer.restore({"x": y}).state
    np.testing.assert_array_equal(restored["x"], np.arange(1 << 20, dtype=np.float32))


def test_partial_and_cast_are_explicit_and_noted(saved):
    fresh = make_state(scale=9.0, dtype=jnp.bfloat16)
    del fresh.params["layers"]["A_log"]
    fresh.params["head"] = jnp.full(3, 5.0)
    with Checkpointer(saved, read_only=True) as checkpointer:
        with pytest.raises(ValueError, match=r"in 6 leaves"):  # four of another dtype, one more, one less
            checkpointer.restore(fresh)
        for one in ({"allow_partial": True}, {"cast": True}):
            with pytest.raises(ValueError, match="allow_partial for leaves .* and cast for dtypes"):
                checkpointer.restore(fresh, **one)
        restored = checkpointer.restore(fresh, allow_partial=True, cast=True)
        with pytest.raises(ValueError, match=r"in 1 leaves(.|\n)*params/head: .* no such leaf, run float32"):
            checkpointer.restore(jax.eval_shape(lambda: fresh), allow_partial=True, cast=True)
        with pytest.raises(ValueError, match="kernel: checkpoint float32.2, 3, 4., run float32.2, 5, 4."):
            checkpointer.restore(make_state(width=5), allow_partial=True, cast=True)
        with pytest.raises(ValueError, match=r"in 1 leaves(.|\n)*key: checkpoint uint32.2., run float32.2."):
            checkpointer.restore(make_state()._replace(key=jnp.zeros(2)))
    assert restored.state.params["head"] is fresh.params["head"]
    kernel = restored.state.params["layers"]["kernel"]
    assert kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kernel, make_state(scale=2.0).params["layers"]["kernel"].astype(jnp.bfloat16))
    assert restored.notes[1:] == (
        "1 leaves not in the checkpoint, kept as given: params/head",
        "1 leaves in the checkpoint, not used: params/layers/A_log",
        "4 leaves cast: params/layers/kernel, opt_state/moments/1/mu/layers/kernel, "
        "opt_state/moments/1/nu/layers/kernel, opt_state/ema/layers/kernel",
    )


def test_parameters_alone(saved, tmp_path):
    """From a run's folder, its checkpoints or one step's; only this part of the state is read."""
    wanted = jax.eval_shape(make_state).params
    for path, scale in ((saved.parent, 2.0), (saved, 2.0), (saved / "1", 1.0)):
        params, report = load_params(path, wanted)
        assert equal(params, make_state(scale=scale).params)
        assert report.loaded == ("params/layers/A_log", "params/layers/kernel")
        assert report.missing == report.unused == report.cast == ()
    averaged, _ = load_params(saved, wanted, part="ema")
    assert equal(averaged, make_state(scale=2.0).opt_state.ema)

    given = {"layers": {"kernel": jnp.zeros((2, 3, 4), jnp.bfloat16)}, "head": jnp.ones(5)}
    with pytest.raises(ValueError, match=r"in 3 leaves(.|\n)*params/head(.|\n)*layers/A_log(.|\n)*layers/kernel"):
        load_params(saved, given)
    params, report = load_params(saved, given, allow_partial=True, cast=True)
    assert params["head"] is given["head"] and params["layers"]["kernel"].dtype == jnp.bfloat16
    assert report[1:5] == (("params/layers/kernel",), ("params/head",), ("params/layers/A_log",),
                           ("params/layers/kernel",)) and report.metadata["config"]["lr"] == 0.1  # fmt: skip

    with pytest.raises(ValueError, match="part='moments' must be one of params, ema"):
        load_params(saved, wanted, part="moments")
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        load_params(tmp_path, wanted)
    with pytest.raises(FileNotFoundError, match="path='.*/nothing' is no folder: .* give a run's folder"):
        load_params(tmp_path / "nothing", wanted)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"params": make_state().params}, None, None)
    with pytest.raises(ValueError, match="holds no leaf below 'opt_state/ema'"):
        load_params(tmp_path, wanted, part="ema")


def sharded(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_restore_onto_another_mesh(tmp_path, kind):
    """From (4, 2) to (2, 2, 2) and to one device, inside an active mesh; typed keys too."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    state = {"x": jax.device_put(x, sharded(mesh, "a", "b")), "key": jax.device_put(jax.random.key(5), sharded(mesh)),
             "moments": [{"n": jax.device_put(jnp.int32(3), sharded(mesh))}]}  # fmt: skip
    with jax.set_mesh(mesh), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, None, None)
    other = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(kind,) * 3)
    part = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[5:7])
    for mesh, spec in ((other, (("c", "a"), "b")), (other, (None, "b")), (part, (None, "a"))):
        place = {"x": sharded(mesh, *spec), "key": sharded(mesh), "moments": [{"n": sharded(mesh)}]}
        target = jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), state, place)
        with jax.set_mesh(mesh), Checkpointer(tmp_path, read_only=True) as checkpointer:
            restored = checkpointer.restore(target).state
        assert jax.tree.map(lambda leaf: leaf.sharding, restored) == place
        assert equal(restored, jax.device_put(state, place))
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    with Checkpointer(tmp_path, read_only=True) as checkpointer:
        restored = checkpointer.restore(one).state
        assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {SingleDeviceSharding(jax.devices()[0])}
        assert equal(restored, jax.device_put(state, jax.devices()[0]))


PROCESS = """
import sys, warnings
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from efla_jax.checkpoint import Checkpointer, load_params
x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
def put(x, *spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(*spec)), lambda index: x[index])
def check(array, expected):
    assert all(np.array_equal(shard.data, expected[shard.index]) for shard in array.addressable_shards)
with jax.set_mesh(mesh), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with Checkpointer(sys.argv[1], max_to_keep=1, keep_best="loss") as checkpointer:
        one = checkpointer.restore({"params": {"x": put(x, ("a", "b"))}}).state["params"]["x"]
        check(one, x)
        assert one.sharding.spec == P(("a", "b"))
        for step in (2, 3, 4):
            state = {"params": {"x": put(step * x, "b", "a")}}
            checkpointer.save(step, state, {"next_step": step}, None, {"loss": step})
        checkpointer.check_for_errors()
        assert checkpointer.all_steps() == (2, 4) and checkpointer.best_step() == 2
        jax.experimental.multihost_utils.sync_global_devices("cut")
        if jax.process_index() == 1:
            next((checkpointer.directory / "4" / "state").glob("ocdbt.process_1/d/*")).write_bytes(b"")
        jax.experimental.multihost_utils.sync_global_devices("was cut")
        found = checkpointer.restore({"params": {"x": put(x, "a")}})
        assert found.step == 2 and found.data_state == {"next_step": 2}, found
        check(found.state["params"]["x"], 2 * x)
        checkpointer.save(4, {"params": {"x": put(4 * x, "b", "a")}}, None, None)
    assert [w for w in caught if "step=4" in str(w.message) and "4.damaged" in str(w.message)], caught
    params, report = load_params(sys.argv[1], {"x": put(x, "b")})
    check(params["x"], 4 * x)
"""


def test_several_processes(tmp_path):
    """One process writes, two go on, agree on damage that one of them sees, and one reads again."""
    x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"params": {"x": jnp.asarray(x)}}, None, None)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)}
    jobs = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path), address, str(process)], env=environment,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for process in range(2)
    ]  # fmt: skip
    try:
        outputs = [job.communicate(timeout=120)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], "\n\n".join(outputs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "4.damaged"]
    restored, _ = load_params(tmp_path, {"x": jax.ShapeDtypeStruct(x.shape, x.dtype)})
    np.testing.assert_array_equal(restored["x"], 4 * x)
