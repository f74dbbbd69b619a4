"""Scaling over devices, two simulated ones: steps on meshes agree, what travels is counted, tables are right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import scaling, scaling_stages
from experiments.scaling_stages import Case

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/quickstart.py:efla"
MODEL = (("width", 16), ("depth", 3), ("dtype", "float32"))
# A CPU has eight simulated devices (conftest.py), so these run there; a machine with a single GPU has no second one.
needs_two = pytest.mark.skipif(jax.device_count() < 2, reason="a mesh of two devices")


def programs_of(*cases):
    return list(zip(cases, scaling_stages.compiled(cases, 256), strict=True))


@needs_two
def test_steps_agree_and_a_checkpoint_comes_back():
    shape = 2, 16, (*MODEL[:1], ("depth", 1), *MODEL[2:]), True, True
    cases = Case(CONFIG, "", 1, *shape), Case(CONFIG, "fsdp", 2, *shape)
    rows = list(scaling_stages.equality(programs_of(*cases)))
    assert [row["mesh"] for row in rows] == ["one device", "fsdp 2", "fsdp 2"]
    assert all(row["equal"] for row in rows[:2]) and rows[2]["restored_on_one"] is True
    assert rows[0]["update_difference"] == 0 < rows[1]["update_difference"] < 1e-4
    assert {row["dtype"] for row in rows[:2]} == {"float32"}
    assert rows[0]["losses"][0] > rows[0]["losses"][2]  # the step does something


def test_a_wrong_update_is_told():
    before = {"a": np.zeros((2, 2), np.float32), "b": np.ones(3, np.float32)}
    reference = {"a": before["a"] + 1, "b": before["b"] - 1}
    ours = {"a": reference["a"], "b": reference["b"] + 0.5}
    change, worst, name = scaling_stages.differences(ours, reference, before)
    assert (change, worst, name) == (pytest.approx(np.sqrt(0.75 / 7)), pytest.approx(0.5), "b")


@pytest.mark.slow
@needs_two
def test_what_a_layer_gathers_does_not_grow_with_the_length():
    cases = [Case(CONFIG, "context", 2, 1, length, MODEL, False) for length in (64, 128)]
    short, long = (
        scaling_stages.layer_bytes(program.step.as_text(), program.depth) for _, program in programs_of(*cases)
    )
    assert short == long and short["all-gather"] > 0


MODULE = """HloModule m, entry_computation_layout={()->()}

%inner (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %r = f32[2]{0} all-reduce(%p), to_apply=%add
}

%layer (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %g = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), dimensions={0}
  %h = bf16[3,5]{1,0} all-to-all(%y), dimensions={0}
  ROOT %c = f32[2]{0} fusion(%z), kind=kCustom, calls=%inner
}

%chunk (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  ROOT %g = f32[1024]{0} all-gather(%x), dimensions={0}
}

ENTRY %main () -> () {
  %w = (s32[], f32[4]) while(%t), condition=%more, body=%layer, backend_config={"known_trip_count":{"n":"3"}}
  %v = (s32[], f32[4]) while(%t), condition=%more, body=%chunk, backend_config={"known_trip_count":{"n":"4"}}
}
"""


def test_collectives_of_the_loop_over_layers_are_counted():
    assert scaling_stages.layer_bytes(MODULE, 3) == {"all-gather": 32, "all-to-all": 30, "all-reduce": 8}
    assert scaling_stages.layer_bytes(MODULE, 4) == {"all-gather": 4096}
    assert scaling_stages.layer_bytes(MODULE, 5) == {}
    assert scaling_stages.layer_bytes(MODULE.replace('"n":"4"', '"n":"23"'), 24) == {"all-gather": 4096}


def test_overlapping_spans_count_once():
    assert scaling_stages.merged([(4, 5), (0, 2), (1, 3), (1, 2)]) == 4
    assert scaling_stages.merged([]) == 0


def row(stage, axis, devices, rate, **more):
    return {"stage": stage, "config": "configs/lm_340m.py:efla", "axis": axis, "devices": devices, "rows": 16,
            "length": 2048, "device": "a GPU", "commit": "abc", "tokens_per_second": rate,
            "step_seconds": 0.5} | more  # fmt: skip


def test_tables_and_plot(tmp_path):
    rows = [row("rows", "", 1, 100.0), row("rows", "data", 2, 190.0, exposed_seconds=0.02),
            row("context", "", 1, 10.0, length=64), row("context", "context", 2, 30.0, length=64),
            {**row("context", "context", 2, 0.0, length=128, note="out of memory")}]  # fmt: skip
    del rows[-1]["tokens_per_second"]
    equal = {"stage": "equal", "config": CONFIG, "mesh": "fsdp 2", "commit": ""}
    figures = {"loss_difference": 0.1, "update_difference": 0.2, "worst_leaf_difference": 0.3, "worst_leaf": "x"}
    rows += [equal | figures | {"dtype": "float32", "losses": [5.0, 4.0], "equal": False}]
    rows += [equal | {"restored_on_one": True}]
    (tmp_path / "scaling.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    scaling.report(tmp_path)
    text = (tmp_path / "scaling.md").read_text()
    assert "| lm_340m efla | data 2 | 16 x 2048 | 500 | 190 | 0.95 | - | 20 | - |" in text
    assert "| 1.5 |" in text and "out of memory" in text and "| NO |" in text and "same bits" in text
    assert (tmp_path / "scaling.png").stat().st_size > 1000
    assert scaling.efficiencies(rows[2:4]) == {0: 1.0, 1: 1.5}


def test_stages_are_of_all_devices():
    chosen = scaling.parser().parse_args([])
    split = [(case.axis, case.devices, case.rows) for case in scaling.cases_of("rows", chosen, 4)]
    assert split == [("", 1, 16), ("data", 4, 64), ("fsdp", 4, 64), ("data", 2, 32), ("fsdp", 2, 32)]
    assert [{case.packed for case in scaling.cases_of(name, chosen, 2)} for name in ("rows", "whole")] == [
        {True},
        {False},
    ]
    equal = scaling.cases_of("equal", chosen, 16)
    assert [case.name for case in equal[::2]] == ["one device", "data 16", "tensor 8", "context 16", "fsdp 16"]
    assert [case.exact for case in equal[:4]] == [True, False, True, False]
    mixer = chosen.mixers[2]
    assert [(case.name, case.length) for case in scaling.cases_of(f"context {mixer}", chosen, 2)] == [
        ("one device", 131072), ("context 2", 131072), ("one device", 524288), ("context 2", 524288)]  # fmt: skip


@needs_two
@pytest.mark.parametrize(
    "stage",
    ["rows", "equal", *(pytest.param(f"context {mixer}", marks=pytest.mark.slow) for mixer in scaling.MIXERS)],
)
def test_every_stage_traces_its_own_configs(stage):
    """The configs, sizes but for depth and length, optimisers and meshes that a run without --tiny has."""
    words = ["--lengths=256", "--window=64", "--rows=1", "--depth=1", "--equal_depth=1", "--equal_length=64",
             "--equal_rows=2"]  # fmt: skip
    case = scaling.cases_of(stage, scaling.parser().parse_args(words), 2)[-1]
    program, step = scaling_stages.lowered(case, 32000)
    assert case.devices == 2 and program.depth in (1, 24) and "stablehlo" in step.as_text()[:20000]


@pytest.mark.slow
def test_the_program_runs(tmp_path):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    words = [
        sys.executable,
        "-m",
        "experiments.scaling",
        "--tiny",
        f"--out={tmp_path}",
        "--compile_limit=600",
        "--limit=300",
    ]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "scaling.md").read_text()
    assert "NO" not in text and text.count("context 2") >= 4 and "same bits" in text, done.stdout
