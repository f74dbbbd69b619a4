"""Runs find their own tokenizer, EOS, BOS and window; and a benchmark of a run goes on where it was interrupted."""

import hashlib
import json
from argparse import Namespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efla_jax import evaluate
from efla_jax.checkpoint import Checkpointer
from efla_jax.data import shards
from efla_jax.data.tokenizer import TokenizerSpec, load_tokenizer
from efla_jax.model import LanguageModel
from efla_jax.scoring import rows
from experiments import evaluate as program
from experiments import language_runs

MODEL = {"width": 16, "depth": 1, "mixers": ["efla"], "mixer_options": {"efla": {"num_heads": 2}}}
BYTES = load_tokenizer(TokenizerSpec()).describe()
WINDOW = 16


def write_run(folder, metadata, kind="tokens", path="nowhere"):
    """A run that was never trained: (folder, model, parameters)."""
    folder.mkdir(parents=True)
    config = {"data": {"kind": kind, "path": path, "window": WINDOW}, "model": MODEL, "optim": {},
              "train": {"matmul_precision": "highest"}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    model = LanguageModel(vocab_size=256, width=16, depth=1, mixers=("efla",), mixer_options=MODEL["mixer_options"])
    params = jax.tree.map(lambda x: 3 * x, jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))
    with Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save(5, {"params": params}, None, metadata)
        checkpointer.wait()
    return folder, model, params


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "lm", {"tokenizer": "bytes", "vocabulary": BYTES})


def test_a_run_of_prepared_bytes_needs_no_tokenizer_and_goes_on(run, tmp_path, monkeypatch, capsys):
    folder, model, params = run
    text = "a text of fifty bytes, more than two windows of it"
    (tmp_path / "text.txt").write_text(text)
    words = ["perplexity", f"--run={folder}", f"--data={tmp_path / 'text.txt'}", f"--out={tmp_path}"]
    row = np.array([[0, *text.encode()]], np.int32)
    losses = evaluate.losses_by_position(model, params, row)[0]
    program.main([*words, "--max_length=0"])
    found = json.loads((tmp_path / "perplexity.json").read_text())
    assert found["rows"][0]["bits_per_byte"] == pytest.approx(losses.mean() / np.log(2), rel=1e-5)
    assert found["max_length"] == 0 and found["step"] == "5" and found["tokenizer"] == BYTES

    # By default the model sees no more than it was trained on: 16, 16, 16 and the last 2 after 14 others.
    program.main(words)
    found = json.loads((tmp_path / "perplexity.json").read_text())
    pieces = [row[:, start : start + WINDOW + 1] for start in (0, 16, 32)]
    sums = [evaluate.losses_by_position(model, params, piece)[0].sum() for piece in pieces]
    last = evaluate.losses_by_position(model, params, row[:, 34:])[0][-2:].sum()
    assert found["max_length"] == WINDOW
    assert found["rows"][0]["bits_per_byte"] == pytest.approx((sum(sums) + last) / 50 / np.log(2), rel=1e-5)
    assert found["counts"]["known"] == 0 and len((tmp_path / "perplexity.journal.jsonl").read_text().splitlines()) == 5

    def stopped(*_):
        raise AssertionError("nothing is left to compute")

    monkeypatch.setattr(rows, "token_scores", stopped)
    program.main(words)
    again = json.loads((tmp_path / "perplexity.json").read_text())
    assert again["rows"] == found["rows"] and again["counts"]["known"] == 4
    assert "| lm | 5 |" in capsys.readouterr().out


def options(folder, **given):
    return Namespace(run=folder, **{"tokenizer": "", "eos": "", "bos": "", "pattern": "", **given})


def test_tokenizers_are_found_by_their_hash(tmp_path, monkeypatch):
    """EOS and BOS: flags before the checkpoint before the file's own."""
    asked = []
    monkeypatch.setattr(language_runs, "load_tokenizer", asked.append)
    (tmp_path / "run").mkdir()
    content = b'{"model": 1}'
    sha256 = hashlib.sha256(content).hexdigest()
    config = {"data": {"kind": "tokens", "path": "nowhere"}}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    item = tmp_path / "run" / "checkpoints" / "3" / "metadata"
    item.mkdir(parents=True)
    (item.parent / "state").mkdir()
    known = {"sha256": sha256, "vocab_size": 9, "eos_id": 7, "bos_id": 1, "pattern": "x+"}
    (item / "metadata").write_text(json.dumps({"value": {"tokenizer": sha256, "vocabulary": known}}))
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match=f"--tokenizer: missing; give the one .* .sha256 {sha256}."):
        language_runs.tokenizer_of(options(folder), config)
    (folder / "another.json").write_text("{}")
    (folder / "tokenizer.json").write_bytes(content)
    for path in (folder, folder / "checkpoints" / "3"):
        language_runs.tokenizer_of(options(path), config)
        assert asked.pop() == TokenizerSpec(str(folder / "tokenizer.json"), "7", "1", "x+")
    language_runs.tokenizer_of(options(folder, tokenizer="my.json", eos="</s>", bos="<s>"), config)
    assert asked.pop() == TokenizerSpec("my.json", "</s>", "<s>", "x+")
    (item / "metadata").write_text(json.dumps({"value": {"tokenizer": sha256}}))  # of an older version
    language_runs.tokenizer_of(options(folder), config)
    assert asked.pop() == TokenizerSpec(str(folder / "tokenizer.json"))
    manifest = shards.Manifest({**known, "kind": "tokenizers", "bos_id": -1, "pattern": ""}, "uint16", {})
    (tmp_path / "data").mkdir()
    manifest.write(tmp_path / "data" / shards.MANIFEST)
    config["data"]["path"] = str(tmp_path / "data")
    language_runs.tokenizer_of(options(folder), config)
    assert asked.pop() == TokenizerSpec(str(folder / "tokenizer.json"), "7")


def test_bytes_of_text_runs_and_of_the_newest_step(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"data": {"kind": "text"}}))
    assert language_runs.tokenizer_of(options(tmp_path), {"data": {"kind": "text"}}).describe() == BYTES
    for step in ("9", "10", "x"):
        (tmp_path / "checkpoints" / step / "state").mkdir(parents=True)
    assert language_runs.step_folder(tmp_path).name == "10"
    assert language_runs.step_folder(tmp_path / "checkpoints" / "9").name == "9"
    assert language_runs.step_folder(tmp_path / "nowhere") is None


def test_a_policy_and_a_limit_of_length_reach_the_scorer(run, tmp_path):
    given = ["suite", f"--run={run[0]}", "--policy=always", "--max_length=9", "--batch_tokens=64", "--piece=32"]
    chosen = program.parser().parse_args(given)
    opened = language_runs.open_run(chosen)
    scorer = language_runs.scorer(chosen, opened, tmp_path / "kept.jsonl")
    assert (scorer.begin, scorer.max_length, scorer.batch_tokens, scorer.piece) == ((0, True), 9, 64, 32)
    assert scorer.precision == "highest" and scorer.journal.path == tmp_path / "kept.jsonl" and opened.step == "5"
    unlimited = language_runs.scorer(program.parser().parse_args([*given, "--max_length=0"]), opened, None)
    assert unlimited.max_length == 0


def test_a_negative_limit_is_refused(capsys):
    with pytest.raises(SystemExit):
        program.main(["suite", "--run=x", "--limit=-5"])
    assert "'-5' is not a whole number from 0 on" in capsys.readouterr().err
