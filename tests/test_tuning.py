"""The choice of a kernel's config: what is tried, and that the fastest is written with everything beside it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from efla_jax.kernels import delta_rule as kernel
from efla_jax.ops import pallas, tuning

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("op", tuning.GLUE)
def test_candidates_are_the_table_row_and_its_neighbours(op):
    found = tuning.candidates(op, "NVIDIA H200", 128, 64, "bfloat16")
    row = found[0]
    assert len(found) == len(set(found)) > 3 and all(type(config) is type(row) for config in found)
    changed = {
        name
        for config in found
        for name, value in dataclasses.asdict(config).items()
        if value != dataclasses.asdict(row)[name]
    }
    assert "stages" in changed and changed <= set(tuning.TRIED)


@pytest.mark.parametrize("value_dim, tile", [(512, 128), (192, 64)])
def test_wide_values_have_the_row_of_their_tiles(value_dim, tile):
    """Kernels take tiles of V as heads, with the table's config for a tile."""
    row = tuning.candidates("delta_rule", "NVIDIA H200", tile, value_dim, "bfloat16")[0]
    assert row is pallas.config_for("NVIDIA H200", tile, value_dim, jnp.bfloat16)
    assert row is kernel.TABLE["NVIDIA H200", tile, tile, "bfloat16"] is not kernel.SAFE


@pytest.mark.parametrize("op, sizes", [("delta_rule", (96, 64)), ("linear_attention", (64, 40)), ("efla", (64, 64))])
def test_what_has_no_kernel_has_no_candidates(op, sizes):
    with pytest.raises(NotImplementedError, match="no GPU kernel"):
        tuning.candidates(op, "NVIDIA H200", *sizes, "bfloat16")


@pytest.mark.parametrize("op", tuning.GLUE)
def test_run_hands_the_config_and_the_arguments_on(op, monkeypatch):
    seen = []

    def kernel(x, chunk_size, config, interpret):
        assert config == "config" and interpret is None
        seen.extend(x)
        return x.u, x.initial_state

    monkeypatch.setattr(tuning.GLUE[op], op, kernel)
    given = {"q": jnp.ones((1, 3, 1, 4)), "k": jnp.zeros((1, 3, 1, 4)), "u": jnp.ones((1, 3, 2, 5))}
    gate = jnp.full((1, 3, 2), 0.5)
    tuning.run(op, given | {"erase": gate, "log_decay": -gate}, "config")
    q, k, u, erase, log_decay, state, starts = seen
    assert (q == 1).all() and (k == 0).all() and u is given["u"] and (log_decay == -gate).all()
    assert (erase == gate).all() and state.shape == (1, 2, 4, 5) and starts is None


# In a process of its own, as every program of experiments/ has flags of the same names. Two configs run, each told by
# its output, with times that this file chooses; the third is refused as a compiler would.
TUNE = """
import dataclasses, sys
import jax
import jax.numpy as jnp
from absl import app
from efla_jax import ops
from efla_jax.ops import tuning
from experiments import benchmark, benchmark_operators

@dataclasses.dataclass(frozen=True)
class Config:
    stages: int

def run(op, inputs, config):
    if config.stages == 5:
        raise ValueError("exceeds available shared memory")
    o, state = ops.delta_rule(**inputs)
    return o * config.stages, state

def measure(run, inputs):
    o, _, *gradients = jax.tree.leaves(run(inputs))
    stages = jnp.abs(o).sum() / jnp.abs(ops.delta_rule(**inputs)[0]).sum()
    return {"ms": {2: 3.0, 3: 1.0}[round(float(stages))] + len(gradients) / 5}

tuning.candidates = lambda *sizes: [Config(stages) for stages in (2, 3, 5)]
tuning.run, benchmark_operators.measure = run, measure
app.run(benchmark.main, sys.argv)
"""
CHOSEN = """
import json
from experiments import benchmark_tuning as tuning
found = []
for others in json.loads(%r):
    rows = [{"config": i, "ms": dict(zip(((T, name) for T in (8, 16) for name in tuning.PASSES), ms))} if ms else
            {"config": i, "error": "", "ms": {}} for i, ms in enumerate([[1, 3, 2, 6], *others])]
    found.append(tuning.chosen(rows)["config"])
print(json.dumps(found))
"""


def test_tune_writes_the_fastest_and_what_failed(tmp_path):
    options = ["--tune", "--budget=16", "--lengths=8,16", "--key_dim=4", "--value_dim=3", f"--out={tmp_path}"]
    done = subprocess.run([sys.executable, "-c", TUNE, *options], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "tune.json").read_text())
    assert found["config"] == {"stages": 3} and found["op"] == "delta_rule" and found["K"] == 4 and found["V"] == 3
    assert found["changed"] and found["batch"] == {"8": 2, "16": 1}
    passes = {"forward": 1.0, "forward+backward": 2.0}  # the gradients are of q, k, u, erase and decay
    assert found["ms"] == {f"T={length} {name}": ms for length in (8, 16) for name, ms in passes.items()}
    assert [row["config"]["stages"] for row in found["tried"]] == [2, 3, 5]
    assert "shared memory" in found["tried"][2]["error"] and "error" not in found["tried"][1]
    assert found["tried"][0]["apart"] == 0 and 0.3 < found["tried"][1]["apart"] < 0.7  # half as large again, but for k
    assert "better: {'stages': 3}" in done.stdout


def test_the_table_changes_for_a_gain_at_every_length_only():
    """Times forward and forward + backward at two lengths; the table's row has 1, 3, 2, 6."""
    rivals = {
        "within the noise": ([[0.98, 2.95, 1.96, 5.9]], 0),
        "at one length": ([[0.5, 2.0, 1.99, 5.99]], 0),
        "forward, at both": ([[0.9, 2.98, 1.8, 6.0]], 1),
        "slower backward": ([[0.9, 3.2, 1.8, 5.0]], 0),
        "the better of two": ([[0.9, 2.8, 1.9, 5.7], [0.8, 2.8, 1.9, 5.7]], 2),
        "refused": ([None, [0.9, 2.8, 1.9, 5.7]], 2),
    }
    given = json.dumps([others for others, _ in rivals.values()])
    command = [sys.executable, "-c", CHOSEN % given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = dict(zip(rivals, json.loads(done.stdout), strict=True))
    assert found == {name: wanted for name, (_, wanted) in rivals.items()}
