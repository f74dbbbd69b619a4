"""All operators beside each other: what a row counts, what is written, and that gradients are those of the operator."""

import csv
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent
# In a process of its own, as every program of experiments/ has flags of the same names. Sizes are small; a device with
# a bandwidth is pretended, and one program is refused as a compiler would.
SMALL = """
import sys
import jax
import numpy as np
from absl import app
from efla_jax import ops
from experiments import benchmark, benchmark_operators as measured

names = "efla", "log_linear_mamba2", "softmax"
small = {name: measured.MEASURED[name]._replace(heads=2, key_heads=1, key_dim=4, value_dim=8) for name in names}
small["softmax"] = small["softmax"]._replace(key_heads=2, value_dim=4)
measured.MEASURED = small
measured.BANDWIDTH = {jax.devices()[0].device_kind: 1e9}
real = measured.compiled

def compiled(case):
    if case.name == "efla" and case.length == 32:
        raise NotImplementedError("too long")
    return real(case)

measured.compiled = compiled
case = measured.Case("efla", 32, 1, "float32", True)
arguments, cotangents = case.arguments()
o, gradients = case.program()(arguments, cotangents)
loss = lambda named: (ops.delta_flow(**named, implementation="chunked")[0] * cotangents).sum()
for name, wanted in jax.grad(loss)(arguments).items():
    np.testing.assert_allclose(gradients[name], wanted, atol=1e-5)
app.run(benchmark.main, sys.argv)
"""
# What an earlier run left: one row of a length that is not measured again, and one that is.
EARLIER = """operator,measured,T,B,H,G,K,V,moved_gib,ms,tokens_per_s,tb_per_s,of_bandwidth,memory_gib,traced
softmax,forward,8,4,2,2,4,4,0.5,7.25,1.0,0.25,nan,nan,False
softmax,forward,16,2,2,2,4,4,0.5,-1.0,1.0,0.25,nan,nan,False
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(folder, output) of a run with two lengths."""
    folder = tmp_path_factory.mktemp("operators")
    options = ["--budget=32", "--lengths=16,32", "--repeats=2", "--dtype=bfloat16", f"--out={folder}"]
    (folder / "operators.csv").write_text(EARLIER)
    (folder / "operators.md").write_text(
        f"operators on cpu, jax {jax.__version__}: 32 tokens at every length, bfloat16\n"
    )
    command = [sys.executable, "-c", SMALL, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_a_row_has_the_bytes_that_must_move(written):
    with open(written[0] / "operators.csv", newline="") as file:
        rows = {(r["operator"], r["measured"], int(r["T"])): r for r in csv.DictReader(file)}
    assert len(rows) == 3 * 2 * 2 + 1 and {int(r["B"]) * int(r["T"]) for r in rows.values()} == {32}
    kept = rows["softmax", "forward", 8]
    assert ",".join(kept.values()) == EARLIER.splitlines()[1]
    values, keys, gate = 32 * 2 * 8 * 2, 32 * 4 * 2, 32 * 2 * 4  # u or o, q or k in bfloat16; a gate in float32
    for length, levels in ((16, 5), (32, 6)):
        given = {
            "efla": 2 * keys + values + gate,
            "log_linear_mamba2": 2 * keys + values + gate + levels * gate,
            "softmax": 3 * values // 2,
        }
        for name, arguments in given.items():
            out = values // 2 if name == "softmax" else values
            for measured, moved in (("forward", arguments + out), ("forward+backward", 3 * arguments + 2 * out)):
                row = rows[name, measured, length]
                assert float(row["moved_gib"]) * 2**30 == pytest.approx(moved)
                if (name, length) == ("efla", 32):
                    assert row["ms"] == row["tb_per_s"] == row["memory_gib"] == "nan"
                    continue
                seconds = float(row["ms"]) / 1e3
                assert seconds > 0 and float(row["memory_gib"]) * 2**30 >= arguments
                assert float(row["tb_per_s"]) == pytest.approx(moved / seconds / 1e12)
                assert float(row["of_bandwidth"]) == pytest.approx(moved / seconds / 1e9)
                assert float(row["tokens_per_s"]) == pytest.approx(32 / seconds)


def test_tables_and_pictures_are_written_and_a_refusal_is_told(written):
    folder, output = written
    text = (folder / "operators.md").read_text()
    assert text.startswith("operators on cpu") and "32 tokens at every length, bfloat16" in text.splitlines()[0]
    assert "Milliseconds of whole calls" in text and "| operator | H, G, K, V | pass | 8 | 16 | 32 |" in text
    assert text.count("| efla | 2, 1, 4, 8 | forward+backward |") == 3
    assert all((folder / f"{name}.png").stat().st_size > 10_000 for name in ("operators", "roofline"))
    assert "efla forward at T=32: too long" in output and "too slow or refused: efla" in output
