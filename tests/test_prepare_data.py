"""Preparing data: readers, tokenizers, shards on disk, resuming, what is refused."""

import gzip
import io
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from efla_jax.data import prepare, readers, shards, tokenizer
from efla_jax.data.prepare import Preparation
from efla_jax.data.tokenizer import TokenizerSpec, load_tokenizer

TEXTS = [f"document {i} " + "some words " * (i % 9) for i in range(60)]


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


def run(file, folder, workers=0, **settings):
    settings = {"valid_fraction": 0.2, "shard_tokens": 700, **settings}
    return prepare.prepare(Preparation(str(file), **settings), str(folder), workers, progress=False)


def documents(folder, split):
    """Every document of a split as a list of ids, in order."""
    found = []
    for corpus in shards.open_shards(str(folder)).splits[split]:
        found += [document.tolist() for document in np.split(corpus.tokens, corpus.offsets[1:-1])]
    return found


def contents(folder):
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


# Shards


def test_every_document_is_in_one_split_with_its_end(jsonl, tmp_path):
    manifest = run(jsonl, tmp_path / "out")
    train, valid = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "valid")
    assert sorted(train + valid) == sorted([*text.encode(), 0] for text in TEXTS) and len(valid) > 3
    kept = [[*text.encode(), 0] for text in TEXTS]
    assert train == [d for d in kept if d in train]  # in the order of the file
    names = [shard.name for shard in manifest.shards]
    assert sorted(names)[:2] == ["train-00000", "train-00001"] and "valid-00000" in names
    for split, texts in (("train", train), ("valid", valid)):
        sizes = {name: manifest.total(name, split) for name in ("documents", "tokens", "bytes", "targets")}
        raw = sum(map(len, texts)) - len(texts)
        assert sizes == {"documents": len(texts), "tokens": raw + len(texts), "bytes": raw, "targets": raw}
    assert manifest.dtype == "uint16" and manifest.tokenizer["sha256"] == "bytes"
    assert manifest == shards.read_manifest(tmp_path / "out" / "manifest.json")


def test_the_split_depends_on_content_alone(jsonl, tmp_path):
    rows = jsonl.read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(rows[:20:-1]))
    run(jsonl, tmp_path / "a")
    run(tmp_path / "other.jsonl", tmp_path / "b", shard_tokens=10**6)
    run(jsonl, tmp_path / "c", valid_fraction=0.5)
    few, many = ({tuple(d) for d in documents(tmp_path / name, "valid")} for name in "ac")
    assert few < many and {tuple(d) for d in documents(tmp_path / "b", "valid")} < few


def test_workers_and_repetition_change_nothing(jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_BYTES", 200)
    run(jsonl, tmp_path / "a")
    run(jsonl, tmp_path / "b", workers=2)
    first = contents(tmp_path / "a")
    assert first == contents(tmp_path / "b")
    monkeypatch.setattr(prepare, "_write", None)  # nothing is to be done, so nothing is called
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "a").iterdir() if file.name != "lock"}
    run(jsonl, tmp_path / "a")
    assert times == {file: file.stat().st_mtime_ns for file in times} and contents(tmp_path / "a") == first


def test_repeats_and_empty_documents_are_dropped(tmp_path):
    rows = ["one", "two", "o\0ne", " ", "", "three", "two", "four"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (tmp_path / "held.txt").write_text("four")
    manifest = run(tmp_path / "rows.jsonl", tmp_path / "a", valid_path=str(tmp_path / "held.txt"))
    assert documents(tmp_path / "a", "train") == [[*text, 0] for text in (b"one", b"two", b"three")]
    assert documents(tmp_path / "a", "valid") == [[*b"four", 0]]
    assert manifest.counts == {"documents": 4, "duplicates": 3, "empty": 2, "nul_bytes": 1}
    run(tmp_path / "rows.jsonl", tmp_path / "b", valid_path=str(tmp_path / "held.txt"), deduplicate=False)
    assert documents(tmp_path / "b", "train") == [[*t, 0] for t in (b"one", b"two", b"one", b"three", b"two")]


def test_prompts_are_not_trained_on(tmp_path):
    rows = [{"prompt": "ask", "response": "tell"}, {"text": "plain"}, {"prompt": "q", "completion": "a"},
            {"prompt": "empty", "response": ""}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = run(tmp_path / "rows.jsonl", tmp_path / "a", valid_fraction=0.0)
    (corpus,) = shards.open_shards(str(tmp_path / "a")).splits["train"]
    assert bytes(corpus.tokens.astype(np.uint8)) == b"asktell\0plain\0qa\0"
    assert corpus.loss.tolist() == [0] * 3 + [1] * 5 + [1] * 6 + [0] + [1] * 2
    # A target is trained on and has its past in the document: tell0, lain0, a0; their text is tell, plain, a.
    assert manifest.total("targets", "train") == 5 + 5 + 2 and manifest.total("target_bytes", "train") == 4 + 5 + 1


# Interruptions


@pytest.mark.parametrize("moment", range(8))
def test_a_stopped_preparation_goes_on(jsonl, tmp_path, monkeypatch, moment):
    """Stopped before the n-th rename: of a shard's files, of the journal or of the manifest."""
    run(jsonl, tmp_path / "whole")
    calls, replace = [], os.replace

    def stop(source, target):
        calls.append(target)
        if len(calls) > moment * 2:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            run(jsonl, tmp_path / "out")
    if (tmp_path / "out" / "unfinished.json").exists():
        with pytest.raises(ValueError, match="unfinished; run prepare_data again with the same settings"):
            shards.open_shards(str(tmp_path / "out"))
    finished = {f: f.stat().st_mtime_ns for f in (tmp_path / "out").glob("*.tokens")}
    run(jsonl, tmp_path / "out")
    whole, out = contents(tmp_path / "whole"), contents(tmp_path / "out")
    assert {name: out[name] for name in whole} == whole
    assert not [name for name in out if name not in whole]
    kept = [f for f, time in finished.items() if f.stat().st_mtime_ns == time]
    assert len(kept) >= len(finished) - 1


KILLED = """
import os, signal, sys
from efla_jax.data import prepare
if __name__ == "__main__":
    write = prepare.shards.ShardWriter.append
    left = [int(sys.argv[3])]
    def append(*arguments):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*arguments)
    prepare.shards.ShardWriter.append = append
    preparation = prepare.Preparation(sys.argv[1], valid_fraction=0.2, shard_tokens=700)
    prepare.prepare(preparation, sys.argv[2], workers=0, progress=False)
"""


def test_kill_9_in_the_middle(jsonl, tmp_path):
    (tmp_path / "main.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "main.py"), str(jsonl), str(tmp_path / "out"), "40"]
    result = subprocess.run(command, env={"PYTHONPATH": ":".join(sys.path)}, timeout=120)
    assert result.returncode == -9 and list((tmp_path / "out").glob("*.tmp"))
    run(jsonl, tmp_path / "out")
    run(jsonl, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_damaged_shard_is_made_again(jsonl, tmp_path, caplog):
    run(jsonl, tmp_path / "a")
    before = contents(tmp_path / "a")
    file = tmp_path / "a" / "train-00001.tokens"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    (tmp_path / "a" / "valid-00000.offsets").unlink()
    run(jsonl, tmp_path / "a")
    assert contents(tmp_path / "a") == before and "train-00001.tokens" in caplog.text


def test_a_full_disk_names_the_folder(jsonl, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.ShardWriter, "append", full)
    with pytest.raises(OSError, match="No space left on device while writing shards; the same command.*out"):
        run(jsonl, tmp_path / "out")


def test_other_settings_in_the_same_folder_are_refused(jsonl, tmp_path):
    run(jsonl, tmp_path / "out")
    before = contents(tmp_path / "out")
    for change, message in (({"valid_fraction": 0.3}, "valid_fraction=0.2, now 0.3"),
                            ({"shard_tokens": 9}, "shard_tokens=700, now 9"),
                            ({"text_field": "x"}, "text_field='text', now 'x'")):
        with pytest.raises(ValueError, match=f"prepared with other settings.*{message}.*another folder"):
            run(jsonl, tmp_path / "out", **change)
    assert contents(tmp_path / "out") == before
    (tmp_path / "more.jsonl").write_text(jsonl.read_text() * 2)
    with pytest.raises(ValueError, match="path_files"):
        run(tmp_path / "more.jsonl", tmp_path / "out")
    with pytest.raises(ValueError, match="field 'x'"):
        run(jsonl, tmp_path / "mistyped", text_field="x")
    (tmp_path / "mistyped" / "train-00000.tokens.tmp").write_bytes(b"a start")
    run(jsonl, tmp_path / "mistyped")  # nothing had been finished there
    assert contents(tmp_path / "mistyped") == before
    with pytest.raises(ValueError, match="more.jsonl' is a file; name a folder"):
        run(jsonl, tmp_path / "more.jsonl")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="holds other files .thesis.tex.*empty folder"):
        run(jsonl, tmp_path / "used")
    with prepare._locked(tmp_path / "out"), pytest.raises(ValueError, match="prepared by another process"):
        run(jsonl, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"valid_fraction": 1.0}, "valid_fraction=1.0 must be >= 0 and below 1"),
        ({"shard_tokens": 0}, "shard_tokens=0 must be >= 1"),
        ({"workers": -1}, "workers=-1 must be >= 0"),
        ({"valid_fraction": 1e-9}, "the valid split .* is empty .*'documents': 60"),
        ({"text_field": "content"}, "rows.jsonl', line 1: expected an object with a field 'content'"),
        ({"valid_path": "/nowhere.txt"}, "path='/nowhere.txt' does not exist"),
        ({"tokenizer": TokenizerSpec("/nowhere.json")}, "tokenizer='/nowhere.json' does not exist"),
        ({"tokenizer": TokenizerSpec(eos="x")}, "tokenizer='bytes' ends documents with byte 0"),
    ],
)
def test_wrong_settings(jsonl, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run(jsonl, tmp_path / "out", **change)


def test_command_line(jsonl, tmp_path):
    command = [sys.executable, "-m", "experiments.prepare_data", f"--path={jsonl}", f"--output={tmp_path / 'out'}",
               "--valid_fraction=0.2", "--workers=0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "train: " in result.stdout and "100%" in result.stderr, result.stderr
    assert len(documents(tmp_path / "out", "train")) + len(documents(tmp_path / "out", "valid")) == 60
    wrong = subprocess.run([*command, "--shard_tokens=8"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 1 and wrong.stderr.count("error:") == 1 and "other settings" in wrong.stderr


# Readers


def read(file, field="text"):
    return [(record.text, record.prompt) for name, path in readers.list_files(str(file))
            for record in readers.read_file(name, path, field)]


def test_zstd(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    rows = b"".join(json.dumps({"text": f"row {i} " + "x" * i}).encode() + b"\n" for i in range(2000))
    pack = zstandard.ZstdCompressor().compress
    file = tmp_path / "rows.jsonl.zst"
    file.write_bytes(pack(rows[:5000]) + pack(rows[5000:]))  # two frames
    assert [text for text, _ in read(file)] == [f"row {i} ".encode() + b"x" * i for i in range(2000)]
    for damaged in (file.read_bytes()[:-9], b"no zstd" + file.read_bytes()):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="rows.jsonl.zst' cannot be read"):
            read(file)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2], "content": ["a", "é"]}), file, row_group_size=1)
    assert read(file, "content") == [(b"a", b""), ("é".encode(), b"")]
    with pytest.raises(ValueError, match="rows.parquet', line 1: expected an object with a field 'text'"):
        read(file)
    file.write_bytes(file.read_bytes()[:-6])
    with pytest.raises(ValueError, match="rows.parquet' cannot be read"):
        read(file, "content")


def test_hugging_face_dataset(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, config, split, streaming):
        asked.append((name, config, split, streaming))
        return iter([{"text": text} for text in TEXTS])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    run("hf:someone/books", tmp_path / "out")
    run("hf:someone/books:english:test", tmp_path / "other")
    assert asked == [("someone/books", None, "train", True), ("someone/books", "english", "test", True)]
    assert len(documents(tmp_path / "out", "train")) + len(documents(tmp_path / "out", "valid")) == 60
    for wrong in ("hf:", "hf:a:b:c:d"):
        with pytest.raises(ValueError, match=f"path='{wrong}' must be hf:NAME, hf:NAME:CONFIG or"):
            run(wrong, tmp_path / wrong)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="path='hf:a' needs datasets.*pip install datasets"):
        run("hf:a", tmp_path / "third")


def test_positions_end_at_the_size_of_the_file(tmp_path):
    rows = b"".join(json.dumps({"text": os.urandom(50).hex()}).encode() + b"\n" for _ in range(500))
    for name, content in (("a.jsonl", rows), ("b.jsonl.gz", gzip.compress(rows)), ("c.jsonl.xz", lzma.compress(rows)),
                          ("d.txt", rows)):
        (tmp_path / name).write_bytes(content)
        positions = [record.position for record in readers.read_file(name, tmp_path / name)]
        assert positions == sorted(positions) and positions[-1] == len(content), name


# Tokenizers


def text_without_surprises(tokens):
    return tokens.eos_id not in tokens.encode("<|endoftext|></s>") and tokens.bos_id not in tokens.encode("<s>")


def test_bytes_tokenizer():
    tokens = load_tokenizer(TokenizerSpec())
    assert (tokens.vocab_size, tokens.eos_id, tokens.sha256) == (256, 0, "bytes")
    assert list(tokens.encode("é")) == [0xC3, 0xA9] and tokens.decode([0xC3, 0xA9]) == "é"
    assert list(tokens.encode(b"\xff")) == [0xFF]


@pytest.fixture
def hugging_face(tmp_path):
    """A byte-level BPE file that truncates to 4 tokens, pads, and adds BOS and EOS by itself."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(TEXTS, trainer)
    inner.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    inner.enable_truncation(4)
    inner.enable_padding(length=4)
    inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_hugging_face_tokenizer(hugging_face, jsonl, tmp_path):
    spec = TokenizerSpec(str(hugging_face), bos="<s>")
    tokens = load_tokenizer(spec)
    assert (tokens.eos_id, tokens.bos_id, tokens.vocab_size) == (1, 0, 300) and text_without_surprises(tokens)
    assert tokens.decode(tokens.encode(TEXTS[-1])) == TEXTS[-1] and len(tokens.encode(TEXTS[-1])) > 4
    manifest = run(jsonl, tmp_path / "out", tokenizer=spec)
    for document in documents(tmp_path / "out", "train"):
        assert document[0] == 0 and document[-1] == 1 and not {0, 1} & set(document[1:-1])
    assert manifest.tokenizer["sha256"] == tokens.sha256 and len(tokens.sha256) == 64
    (asked,) = prepare.encode(spec, [prepare.Document(0, "train", b"some", b"some words")])
    assert tokens.decode(asked.tokens[: asked.untrained].tolist()) == "<s>some words"
    with pytest.raises(ValueError, match="eos='<end>' is no token of this vocabulary"):
        load_tokenizer(TokenizerSpec(str(hugging_face), eos="<end>"))
    with pytest.raises(ValueError, match="eos='4000000000' must be a number below 2147483647"):
        load_tokenizer(TokenizerSpec(str(hugging_face), eos="4000000000"))
    hugging_face.write_text("{")
    load_tokenizer.cache_clear()
    with pytest.raises(ValueError, match="tokenizer=.*tokenizer.json"):
        load_tokenizer(spec)


def test_sentencepiece(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS * 3), model_writer=model, vocab_size=30,
                                             minloglevel=2)
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    tokens = load_tokenizer(TokenizerSpec(str(tmp_path / "tokenizer.model"), bos="<s>"))
    assert (tokens.kind, tokens.vocab_size, tokens.bos_id, tokens.eos_id) == ("sentencepiece", 30, 1, 2)
    assert tokens.decode(tokens.encode("some words")) == "some words" and text_without_surprises(tokens)
    with pytest.raises(ValueError, match="bos='<nothing>' is no token"):
        load_tokenizer(TokenizerSpec(str(tmp_path / "tokenizer.model"), bos="<nothing>"))


def test_tiktoken(tmp_path):
    pytest.importorskip("tiktoken")
    import base64

    ranks = [bytes([i]) for i in range(256)] + [b"so", b"me", b"some"]
    file = tmp_path / "tokenizer.model"
    file.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)))
    with pytest.raises(ValueError, match="259 tokens does not say how text is split.*pattern"):
        load_tokenizer(TokenizerSpec(str(file)))
    spec = TokenizerSpec(str(file), pattern=r"\s?\w+|.")
    tokens = load_tokenizer(spec)
    assert (tokens.kind, tokens.vocab_size, tokens.eos_id, tokens.bos_id) == ("tiktoken", 260, 259, -1)
    assert list(tokens.encode("some")) == [258] and text_without_surprises(tokens)
    assert tokens.decode([258, 259]) == "some<|endoftext|>"
    numbered = load_tokenizer(TokenizerSpec(str(file), eos="300", pattern=spec.pattern))
    assert (numbered.vocab_size, numbered.eos_id) == (301, 300)
    assert tokens.describe() != load_tokenizer(TokenizerSpec(str(file), pattern=".")).describe()


# The published files are not ours to ship; the tests above make small tokenizers of all three kinds themselves.
@pytest.mark.skipif("EFLA_DATA" not in os.environ, reason="EFLA_DATA names a folder with real tokenizers")
@pytest.mark.parametrize(
    ("name", "module", "sizes", "ids"),
    [
        ("gpt2_r50k_base.tiktoken", "tiktoken", (50257, 50256), [15496, 995]),
        ("mistral_v1.model", "sentencepiece", (32000, 2), [22557, 1526]),
        ("mistral_v1_tokenizer.json", "tokenizers", (32000, 2), [22557, 1526]),
        ("gpt_neox_20b_pii_special.json", "tokenizers", (50280, 0), [12092, 1533]),
    ],
)
def test_published_tokenizers(name, module, sizes, ids):
    pytest.importorskip(module)
    file = Path(os.environ["EFLA_DATA"]) / "tokenizers" / name
    tokens = load_tokenizer(TokenizerSpec(str(file)))
    assert (tokens.vocab_size, tokens.eos_id) == sizes and list(tokens.encode("Hello world")) == ids
    assert tokens.decode(tokens.encode("Hello world é 漢字")).strip() == "Hello world é 漢字"
    assert tokenizer.load_tokenizer(TokenizerSpec(str(file))) is tokens
    assert text_without_surprises(tokens)
