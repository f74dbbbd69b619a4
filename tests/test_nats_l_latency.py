"""The measurement of NAtS-L's latency: choices that are forced, caches that stand for a context, and the whole program
at a tiny size."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import nats_l_contexts as contexts
from experiments import nats_l_latency as latency

WORDS = ["--size=tiny", "--dtype=float32", "--lengths=128", "--fractions=0.5", "--tokens=2", "--repeats=1"]


@pytest.mark.parametrize("fraction", (0.0, 0.1, 0.25, 0.5, 1.0))
def test_every_head_chooses_softmax_for_the_fraction_asked_for(fraction):
    found = contexts.chooses_softmax(np.arange(2048)[:, None], np.arange(6), fraction, np)
    np.testing.assert_allclose(found.mean(0), fraction, atol=2e-3)


@pytest.mark.slow
def test_a_context_that_was_read_and_one_that_is_made_up_hold_the_same_pages():
    chosen = latency.parser().parse_args(WORDS)
    model = latency.model_of("nats_l_hybrid", chosen, unrolled=True)
    tokens = jnp.ones((1, 320), jnp.int32)
    _, cache = jax.jit(lambda params: latency.read(model, params, tokens, 0.3))(latency.parameters(model))
    made = contexts.begun(model, 320, 400, 0.3)
    for part, other in zip(cache[2].kv, made[2].kv, strict=True):
        assert part.shape[3:] == other.shape[3:]
    kv, other = cache[2].kv, made[2].kv
    pages = int(kv.pages[0, 0])
    assert 0 < pages == int(other.pages[0, 0]) < 10
    np.testing.assert_array_equal(kv.owner[..., :pages], other.owner[..., :pages])
    assert jax.tree.map(jnp.shape, made[0]) == jax.tree.map(jnp.shape, cache[0])


@pytest.mark.slow
def test_the_program_writes_its_table(tmp_path, capsys):
    latency.main([*WORDS, f"--out={tmp_path}"])
    with open(tmp_path / "latency.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == ["nats_l_hybrid", "transformer", "gated_delta_net"]
    assert all(float(row[name]) > 0 for row in rows for name in ("read_ms", "write_ms_per_token", "cache_mib"))
    assert "Ratios of times" in (tmp_path / "latency.md").read_text() and (tmp_path / "latency.png").exists()


def test_what_is_wrong_with_a_command_line_is_said(capsys):
    with pytest.raises(SystemExit, match="--models=gpt"):
        latency.main(["--models=gpt"])
    with pytest.raises(SystemExit):
        latency.main(["--fractions=2"])
    assert "argument --fractions: '2' is not of numbers from 0 to 1" in capsys.readouterr().err
