"""Settings of the test session, made before jax is imported: tests run on the CPU and keep what XLA compiled."""

import gc
import os
from pathlib import Path

# setdefault: a caller who sets JAX_PLATFORMS=cuda runs the same tests on a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Most of the suite's time is compilation. A third of that is LLVM's optimisations, and half of the rest the newer of
# two ways from a fusion to LLVM, which builds an MLIR context for each fusion. XLA's own passes are as ever, and
# `make test-slow` leaves all of it.
if os.environ["JAX_PLATFORMS"] == "cpu":
    options = "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    os.environ.setdefault("XLA_FLAGS", options)

# Programs that took 0.15 s to compile are kept for the next run and for the other worker.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parent.parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.15")

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

# Eight simulated devices, for meshes. Not through the environment: programs that the tests start have one, as users do.
if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)


def pytest_collection_finish():
    """What stands after collection lives as long as the process: garbage collection, a ninth of the time of tracing,
    need not walk through it, nor come as often as where memory is short."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 20)


@pytest.fixture(autouse=True, scope="module")
def no_program_outlives_its_file():
    """Every program that a CPU keeps takes several of the process's 65,530 memory maps; a worker that kept those of all
    files ran out of them, which ends in an abort."""
    yield
    jax.clear_caches()
    gc.collect()  # programs that a cycle of objects holds


@pytest.fixture
def unchecked():
    """Shapes reach the op's own checks, not those of the test session."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def no_races(capfd):
    """The interpreter of kernels prints each race that it sees, and goes on."""
    yield
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of small text files, for tiny training runs."""
    folder = tmp_path_factory.mktemp("corpus")
    words = np.random.default_rng(0).choice(["delta", "rule", "state", "key", "erase", "write"], (24, 60))
    for i, row in enumerate(words):
        (folder / f"{i}.txt").write_text(" ".join(row))
    return folder
