"""Bytes as another library's tokenizer, and a run of bytes that goes out and comes back."""

import json
import types

import jax.numpy as jnp
import pytest

from efla_jax.checkpoint import interchange_steps as steps
from efla_jax.data.byte_tokenizer import spelled, tokenizer_json
from efla_jax.model import LanguageModel
from experiments import convert, language_runs, runs
from tests.test_convert import drawn, exchange

TEXT = "Délta\t\x00 rule \n\u2028北 \x7f\xad end"


def test_every_byte_is_a_token_of_its_number():
    vocabulary = spelled()
    assert sorted(vocabulary.values()) == list(range(256)) and len(vocabulary) == 256
    # Of the format: "a" and "é" stand for themselves; a space is the 33rd hidden byte, 0 the first, 0xAD the last.
    assert (vocabulary["a"], vocabulary["\xe9"], vocabulary["\u0120"], vocabulary["\u0100"], vocabulary["\u0143"]) == (
        97, 0xE9, 32, 0, 0xAD)  # fmt: skip
    assert json.loads(tokenizer_json())["model"]["vocab"] == vocabulary


def test_the_library_that_reads_it_agrees():
    # of the extra "hf", which the tests install without
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_str(tokenizer_json())
    ids = theirs.encode(TEXT, add_special_tokens=False).ids
    assert bytes(ids) == TEXT.encode() and theirs.decode(ids, skip_special_tokens=False) == TEXT


def test_a_run_of_bytes_is_one_again(tmp_path):
    """Out, in and out again: files to the byte, a tokenizer that nobody named, a model that takes its ids."""
    fields = {"width": 8, "depth": 1, "mixers": ("attention",), "mlp_width": 8,
              "mixer_options": {"attention": {"num_heads": 2}}}  # fmt: skip
    leaves = drawn(convert.shapes_of(LanguageModel(vocab_size=256, **fields)))
    steps.save(tmp_path / "run" / "checkpoints", leaves, {"tokenizer": "bytes"})
    record = {"data": {"kind": "text"}, "optim": {"ema_decay": 0.0}, "model": fields}
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    exchange("export", tmp_path / "run", to=tmp_path / "out", family="llama")
    exchange("import", tmp_path / "again", source=tmp_path / "out")
    folder, record = runs.recorded(tmp_path / "again", "run")
    chosen = types.SimpleNamespace(run=folder, tokenizer="", eos="", bos="", pattern="")
    tokenizer = language_runs.tokenizer_of(chosen, record)
    assert tokenizer.kind == "bytes" and list(tokenizer.encode(TEXT)) == list(TEXT.encode())
    run = language_runs.open_run(chosen)
    logits, _ = run.model.apply(run.params, jnp.asarray([list(tokenizer.encode(TEXT))]))
    assert logits.shape[2] == 256 and bool(jnp.all(jnp.isfinite(logits)))
    exchange("export", folder, to=tmp_path / "back")
    for file in sorted((tmp_path / "out").iterdir()):
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name
