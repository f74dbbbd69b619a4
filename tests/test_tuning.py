"""The choice of a kernel's config: what is tried, and that the fastest is written with everything beside it."""

import dataclasses
import json

import jax.numpy as jnp
import pytest
from absl import flags
from absl.testing import flagsaver

from efla_jax import ops
from efla_jax.ops import tuning
from experiments import benchmark


@pytest.mark.parametrize("op", tuning.OPERATORS)
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


@pytest.mark.parametrize("op, sizes", [("delta_rule", (96, 64)), ("linear_attention", (64, 40)), ("efla", (64, 64))])
def test_what_has_no_kernel_has_no_candidates(op, sizes):
    with pytest.raises(NotImplementedError, match="no GPU kernel"):
        tuning.candidates(op, "NVIDIA H200", *sizes, "bfloat16")


@pytest.mark.parametrize("op", tuning.OPERATORS)
def test_run_hands_the_config_and_the_arguments_on(op, monkeypatch):
    seen = []

    def kernel(x, chunk_size, config, interpret):
        assert config == "config" and interpret is None
        seen.extend(x)
        return x.u, x.initial_state

    monkeypatch.setitem(tuning.OPERATORS, op, kernel)
    given = {"q": jnp.ones((1, 3, 1, 4)), "k": jnp.zeros((1, 3, 1, 4)), "u": jnp.ones((1, 3, 2, 5))}
    gate = jnp.full((1, 3, 2), 0.5)
    tuning.run(op, given | {"erase": gate, "log_decay": -gate}, "config")
    q, k, u, erase, log_decay, state, starts = seen
    assert (q == 1).all() and (k == 0).all() and u is given["u"] and (log_decay == -gate).all()
    assert (erase == gate).all() and state.shape == (1, 2, 4, 5) and starts is None


@dataclasses.dataclass(frozen=True)
class Config:
    stages: int


def test_tune_writes_the_fastest_and_what_failed(tmp_path, monkeypatch):
    milliseconds = {2: 3.0, 3: 1.0, 4: 2.0}

    def run(op, inputs, config):
        if config.stages == 5:
            raise ValueError("exceeds available shared memory")
        return ops.delta_rule(**inputs)[0] * config.stages, None

    def timed(run, inputs):  # a call's output tells which config made it
        stages = round(float(jnp.abs(run(inputs)[0]).sum() / jnp.abs(ops.delta_rule(**inputs)[0]).sum()))
        return milliseconds[stages]

    monkeypatch.setattr(tuning, "candidates", lambda *sizes: [Config(s) for s in (2, 3, 4, 5)])
    monkeypatch.setattr(tuning, "run", run)
    monkeypatch.setattr(benchmark, "PASSES", ("forward", "forward"))
    program = lambda name, both, config: lambda x: benchmark.apply(name, x, None, config)  # noqa: E731
    monkeypatch.setattr(benchmark, "program", program)
    monkeypatch.setattr(benchmark.selfcheck, "milliseconds", timed)
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(tune=True, lengths=["8", "16"], out=str(tmp_path), key_dim=4, value_dim=3):
        benchmark.tune()
    found = json.loads((tmp_path / "tune.json").read_text())
    assert found["config"] == {"stages": 3} and found["op"] == "delta_rule" and found["K"] == 4 and found["V"] == 3
    assert [row["config"]["stages"] for row in found["tried"]] == [2, 3, 4, 5]
    assert "shared memory" in found["tried"][3]["error"] and "error" not in found["tried"][1]
