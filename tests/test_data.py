"""Data: corpora and their split, windows, resumable batches, baselines, images and corruptions, error messages."""

import gzip
import json
import lzma
import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest

from efla_jax import data
from efla_jax.data import text, windows
from efla_jax.data.batches import BatchIterator
from efla_jax.data.images import ImageSplit, corruptions

DOCUMENTS = [("a", b"abc"), ("b", b"de"), ("c", b"f"), ("d", b"ghijklmnop")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """120 different small documents, one file each."""
    root = tmp_path_factory.mktemp("corpus")
    for i in range(120):
        (root / f"{i:03d}.txt").write_text(f"document {i} " + "word " * (i % 7))
    return root


@pytest.fixture(scope="module")
def dataset(folder):
    return data.make(data.DataConfig(path=str(folder), window=16, batch_size=5, seed=3, valid_fraction=0.2))


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


# Corpora


def test_stream_and_offsets():
    corpus = text.build_corpus(DOCUMENTS)
    assert corpus.tokens.tobytes() == b"abc\0de\0f\0ghijklmnop\0"
    assert corpus.offsets.tolist() == [0, 4, 7, 9, 20]
    assert corpus.num_targets == sum(len(t) for _, t in DOCUMENTS)


def test_nul_bytes_are_stripped_and_counted_and_repeats_dropped():
    kept, nul, repeats = text.clean([("a", b"x\0y\0"), ("b", b"xy"), ("c", b"\0"), ("d", b""), ("e", b"z")])
    assert (kept, nul, repeats) == ([("a", b"xy"), ("e", b"z")], 3, 1)


def test_split_depends_on_the_name_only(folder):
    few = text.load_text(str(folder), valid_fraction=0.2)
    assert set(few.train.names).isdisjoint(few.valid.names)
    assert len(few.train.names) + len(few.valid.names) == 120
    names = [f"{i:03d}.txt" for i in range(120)]
    assert few.valid.names == tuple(name for name in names if text.in_valid_split(name, 0.2))
    # A fixed hash (SHA-256 of "a" begins ca97, of "b" 3e23, of "c" 2e7d, of "g" cd0a, of "h" aaa9): the same names are
    # held out on every machine, and a larger fraction only adds to them.
    assert [text.in_valid_split(name, 0.5) for name in "abcgh"] == [False, True, True, False, False]
    assert set(few.valid.names) < set(text.load_text(str(folder), valid_fraction=0.6).valid.names)


def test_text_shipped_with_python():
    documents = text.shipped_documents()
    names = [name for name, _ in documents]
    assert names == sorted(names) and len(set(names)) == len(names)
    assert {"topic:assert", "module:argparse", "module:asyncio.tasks"} <= set(names)
    banned = ("module:test.", "module:idlelib.", "module:encodings.", "module:pydoc_data", "module:site-packages.")
    assert not [name for name in names if name.startswith(banned)]
    splits = text.load_text()
    # The quickstart's premise: megabytes to train on, and held-out text that no training document repeats.
    assert splits.train.num_targets > 4e6 and splits.valid.num_targets > 1e5 and splits.valid.num_documents >= 8
    held_out = np.split(splits.valid.tokens, splits.valid.offsets[1:-1])
    trained = {d.tobytes() for d in np.split(splits.train.tokens, splits.train.offsets[1:-1])}
    assert not [d for d in held_out if d.tobytes() in trained]


def test_readers_of_user_text(tmp_path):
    lines = "\n".join(json.dumps({"text": t, "id": i}) for i, t in enumerate(("one", "zwei é", "tr\ud800is"))) + "\n\n"
    (tmp_path / "a.txt").write_bytes(b"\xff plain")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.jsonl").write_text(lines)
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "e.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (tmp_path / "ignored.csv").write_text("no")
    rows = [b"one", "zwei é".encode(), b"tr?is"]
    expected = [("a.txt", b"\xff plain"), ("b.txt.gz", b"packed")]
    for name in ("d.jsonl.gz", "e.jsonl.xz", "sub/c.jsonl"):
        expected += [(f"{name}#{i}", row) for i, row in enumerate(rows, start=1)]
    assert list(text.user_documents(str(tmp_path))) == expected
    assert list(text.user_documents(str(tmp_path / "a.txt"))) == expected[:1]


def test_valid_path_holds_out_its_own_documents(tmp_path):
    (tmp_path / "train.txt").write_text("train text")
    (tmp_path / "valid.txt").write_text("valid text")
    splits = text.load_text(str(tmp_path / "train.txt"), str(tmp_path / "valid.txt"))
    assert splits.train.names == ("train.txt",) and splits.valid.names == ("valid.txt",)
    with pytest.raises(ValueError, match="shares 1 documents.*train.txt"):
        text.load_text(str(tmp_path), str(tmp_path / "train.txt"))


def test_damaged_text_is_refused_with_its_name(tmp_path):
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abc"}' * 99)[:-12])
    (tmp_path / "cut.txt.xz").write_bytes(lzma.compress(b"abc" * 999)[:-12])
    flipped = bytearray(gzip.compress(b"abc" * 999))
    flipped[20] ^= 255
    (tmp_path / "flipped.txt.gz").write_bytes(flipped)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "field.jsonl").write_text('{"content": "x"}\n')
    (tmp_path / "type.jsonl").write_text('{"text": 3}\n')
    for name, message in {
        "cut.jsonl.gz": "cut.jsonl.gz.*cannot be read",
        "cut.txt.xz": "cut.txt.xz.*cannot be read",
        "flipped.txt.gz": "flipped.txt.gz.*cannot be read",
        "bad.jsonl": "bad.jsonl.*line 2",
        "field.jsonl": "field.jsonl.*line 1.*'text'",
        "type.jsonl": "type.jsonl.*line 1.*int, not a string",
    }.items():
        with pytest.raises(ValueError, match=message):
            list(text.user_documents(str(tmp_path / name)))


# Windows


def test_window_fields():
    # Stream: a b c 0 | d e 0 | f 0 | g ... p 0, 20 tokens, windows of 8.
    source = data.TokenWindows(text.build_corpus(DOCUMENTS), 8, pad_tail=True)
    first, last = source[0], source[2]
    assert len(source) == 3
    assert bytes(first["tokens"].tolist()) == b"abc\0de\0f" and bytes(first["targets"].tolist()) == b"bc\0de\0f\0"
    assert first["segment_ids"].tolist() == [1, 1, 1, 1, 2, 2, 2, 3]
    assert first["mask"].tolist() == [1, 1, 1, 0, 1, 1, 0, 1]
    assert bytes(last["tokens"].tolist()) == b"nop\0\0\0\0\0" and last["segment_ids"].tolist() == [1] * 4 + [0] * 4
    assert last["mask"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert {k: v.dtype.name for k, v in first.items()} == {
        "tokens": "int32", "targets": "int32", "mask": "float32", "segment_ids": "int32"}
    assert len(data.TokenWindows(text.build_corpus(DOCUMENTS), 8)) == 2
    assert len(data.TokenWindows(text.build_corpus(DOCUMENTS), 19)) == 1


@pytest.mark.parametrize("window", [1, 2, 3, 7, 8, 19, 20, 50])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_evaluation_scores_every_target_once(window, batch_size):
    corpus = text.build_corpus(DOCUMENTS)
    pairs = []
    for batch in windows.evaluation_batches(data.TokenWindows(corpus, window, pad_tail=True), batch_size):
        assert all(v.shape == (batch_size, window) for v in batch.values())
        live = batch["mask"] == 1
        pairs += zip(batch["tokens"][live].tolist(), batch["targets"][live].tolist(), strict=True)
        assert (batch["segment_ids"][live] > 0).all()
    expected = []
    for _, document in DOCUMENTS:
        expected += zip(document, document[1:] + b"\0", strict=True)
    assert pairs == expected and len(pairs) == corpus.num_targets


def test_memmap_travels_as_an_address(tmp_path):
    tokens = np.arange(100_000, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    corpus = data.Corpus(np.memmap(tmp_path / "tokens.bin", np.uint16, "r"), np.array([0, 40_000, 100_000]))
    source = data.TokenWindows(corpus, 100)
    sent = pickle.dumps(source)
    assert len(sent) < 2000
    assert same(pickle.loads(sent)[400], source[400]) and source[400]["tokens"][0] == 40_000
    assert source[399]["mask"].tolist() == [1.0] * 99 + [0.0]
    plain = data.TokenWindows(text.build_corpus(DOCUMENTS), 8)
    assert same(pickle.loads(pickle.dumps(plain))[1], plain[1])


# Resumable batches


def test_batches_are_a_function_of_the_step(dataset):
    through = dataset.train_iterator()
    batches = [next(through) for _ in range(10)]
    assert all(b["tokens"].shape == (5, 16) for b in batches)
    late = dataset.train_iterator(start_step=5)
    assert all(same(next(late), b) for b in batches[5:])
    resumed = dataset.train_iterator()
    state = json.loads(json.dumps({**late.get_state(), "next_step": 4}))
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert all(same(next(resumed), b) for b in batches[4:])
    assert resumed.get_state()["next_step"] == 10
    resumed.set_state(state)  # back in time, from a started iterator
    assert same(next(resumed), batches[4])
    for iterator in (through, late, resumed):
        iterator.close()


def test_every_epoch_has_every_window_once_in_its_own_order():
    corpus = text.build_corpus([("a", bytes(range(1, 201)))])
    batches = windows.training_batches(data.TokenWindows(corpus, 10), 4, seed=0)
    iterator = BatchIterator(batches, "x")
    starts = [int(row[0]) for _ in range(15) for row in next(iterator)["tokens"]]
    iterator.close()
    epochs = [starts[i : i + 20] for i in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(1, 200, 10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])
    other = BatchIterator(windows.training_batches(data.TokenWindows(corpus, 10), 4, seed=1), "x")
    assert [int(t) for t in next(other)["tokens"][:, 0]] != starts[:4]
    other.close()


def test_training_never_shows_held_out_text(dataset):
    valid = {d.tobytes() for d in np.split(dataset.splits.valid.tokens, dataset.splits.valid.offsets[1:-1])}
    iterator = dataset.train_iterator()
    steps = 3 * int(dataset.steps_per_epoch)
    seen = b"".join(next(iterator)["tokens"].astype(np.uint8).tobytes() for _ in range(steps))
    iterator.close()
    assert len(valid) > 10 and not [d for d in valid if d in seen]


def test_state_of_other_data_is_refused(folder, dataset):
    config = data.DataConfig(path=str(folder), window=16, batch_size=5, seed=4, valid_fraction=0.2)
    state = dataset.train_iterator().get_state()
    with pytest.raises(ValueError, match="fingerprint.*seed, window and batch size"):
        data.make(config).train_iterator().set_state(state)


WORKERS = """
import sys
from absl import flags
from efla_jax import data
if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()
    batches = {}
    for workers in (0, 2):
        config = data.DataConfig(path=sys.argv[1], window=16, batch_size=5, worker_count=workers)
        iterator = data.make(config).train_iterator(3)
        batches[workers] = [next(iterator)["tokens"].tolist() for _ in range(5)], iterator.get_state()
        iterator.close()
    assert batches[0] == batches[2]
"""


@pytest.mark.slow  # two worker processes import grain
def test_worker_count_does_not_change_the_data(tmp_path, folder):
    (tmp_path / "main.py").write_text(WORKERS)
    command = [sys.executable, str(tmp_path / "main.py"), str(folder)]
    subprocess.run(command, check=True, timeout=120, env={"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"})


def test_reading_data_starts_no_backend(folder):
    program = (
        "from efla_jax import data\n"
        f"dataset = data.make(data.DataConfig(path={str(folder)!r}, window=16, batch_size=2))\n"
        "next(dataset.train_iterator()); next(dataset.eval_batches())\n"
        "from jax._src import xla_bridge\nassert not xla_bridge._backends, xla_bridge._backends"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=environment)


def test_describe(dataset):
    numbers = dataset.describe()
    assert numbers["train_documents"] + numbers["valid_documents"] == 120
    assert numbers["valid_bytes"] == sum(batch["mask"].sum() for batch in dataset.eval_batches())
    assert json.loads(json.dumps(numbers)) == numbers and dataset.vocab_size == 256 and dataset.kind == "text"


# Baselines


def test_bigram_by_hand():
    train = text.build_corpus([("a", b"ab"), ("b", b"aa")])  # pairs: a b, b 0, a a, a 0
    valid = text.build_corpus([("c", b"ac"), ("d", b"ab")])  # pairs: a c, c 0, a b, b 0
    p = {"0": 3 / 260, "b": 2 / 260, "c": 1 / 260}
    probabilities = 3 * p["c"] / (3 + 3), p["0"], (1 + 3 * p["b"]) / (3 + 3), (1 + p["0"]) / (1 + 1)
    expected = -sum(np.log2(probabilities)) / 4
    assert data.bigram_bits_per_byte(train, valid) == pytest.approx(expected, rel=1e-12)


def test_bigram_ignores_document_borders_and_normalises():
    rng = np.random.default_rng(0)
    train = text.build_corpus([("a", bytes(rng.integers(1, 256, 5000).tolist()))])
    # Uniform noise cannot be predicted: log2(255) bits per byte, and somewhat more for estimates from few counts.
    valid = text.build_corpus([("b", bytes(rng.integers(1, 256, 5000).tolist()))])
    assert 8 < data.bigram_bits_per_byte(train, valid) < 9.2
    regular = [(str(i), b"xyxyxyxy") for i in range(50)]
    assert data.bigram_bits_per_byte(text.build_corpus(regular), text.build_corpus(regular[:1])) < 1.0


def test_lzma():
    rng = np.random.default_rng(0)
    documents = [(str(i), bytes(rng.integers(1, 256, 4000).tolist())) for i in range(4)]
    noise, all_noise = text.build_corpus(documents[:1]), text.build_corpus(documents)
    assert 8 <= data.lzma_bits_per_byte(noise) < 8.3
    assert data.lzma_bits_per_byte(noise, train=all_noise) < 0.6  # seen in the training text
    assert data.lzma_bits_per_byte(noise, train=all_noise, train_bytes=4002) > 7.9  # prefix: another document


# Images


def write_idx(folder, packed):
    rng = np.random.default_rng(0)
    arrays = {}
    shapes = {"train-images-idx3": (7, 3, 2), "train-labels-idx1": (7,), "t10k-images-idx3": (5, 3, 2),
              "t10k-labels-idx1": (5,)}
    for stem, shape in shapes.items():
        array = rng.integers(0, 256 if len(shape) == 3 else 10, shape).astype(np.uint8)
        content = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + array.tobytes()
        name = folder / f"{stem}-ubyte{'.gz' if packed else ''}"
        name.write_bytes(gzip.compress(content) if packed else content)
        arrays[stem] = array
    return list(arrays.values())


@pytest.mark.parametrize("packed", [False, True])
def test_idx_and_npz_agree(tmp_path, packed):
    (tmp_path / "idx").mkdir()
    x_train, y_train, x_test, y_test = write_idx(tmp_path / "idx", packed)
    np.savez(tmp_path / "mnist.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    for path in (tmp_path / "idx", tmp_path / "mnist.npz"):
        splits = data.load_images(str(path))
        assert splits["train"].pixels.shape == (7, 6, 1) and splits["train"].pixels.dtype == np.float32
        np.testing.assert_array_equal(splits["train"].pixels[3, :, 0], x_train[3].reshape(-1) / np.float32(255))
        np.testing.assert_array_equal(splits["test"].labels, y_test)
        assert splits["test"].labels.dtype == np.int32


def test_digits_are_the_default():
    dataset = data.make(data.DataConfig(kind="images", batch_size=128))
    train, test = dataset.splits["train"], dataset.splits["test"]
    assert (len(train.labels), len(test.labels), dataset.length, dataset.num_classes) == (1437, 360, 64, 10)
    assert train.pixels.min() == 0 and train.pixels.max() == 1 and train.pixels.dtype == np.float32
    assert set(test.labels.tolist()) == set(range(10))


def test_image_epochs_keep_the_short_last_batch(tmp_path):
    write_idx(tmp_path, packed=False)
    dataset = data.make(data.DataConfig(kind="images", path=str(tmp_path), batch_size=3))
    assert dataset.steps_per_epoch == 3  # ceil(7 / 3), as 469 = ceil(60000 / 128)
    iterator = dataset.train_iterator()
    batches = [next(iterator) for _ in range(6)]
    assert [b["mask"].sum() for b in batches] == [3, 3, 1, 3, 3, 1]
    assert all(b["pixels"].shape == (3, 6, 1) and b["labels"].shape == (3,) for b in batches)
    assert not batches[2]["pixels"][1:].any()
    epochs = [np.concatenate([b["pixels"][b["mask"] == 1] for b in batches[i : i + 3]]) for i in (0, 3)]
    for epoch in epochs:
        assert sorted(map(bytes, epoch)) == sorted(map(bytes, dataset.splits["train"].pixels))
    assert not np.array_equal(*epochs)
    resumed = dataset.train_iterator(4)
    assert same(next(resumed), batches[4])
    evaluated = list(dataset.eval_batches())
    assert [b["mask"].tolist() for b in evaluated] == [[1, 1, 1], [1, 1, 0]]
    np.testing.assert_array_equal(np.concatenate([b["labels"] for b in evaluated])[:5], dataset.splits["test"].labels)
    for i in (iterator, resumed):
        i.close()


def test_corruptions():
    pixels = np.random.default_rng(1).random((40, 50, 1), dtype=np.float32)
    found = {}
    for family, severity, corrupted in corruptions(pixels):
        assert corrupted.dtype == np.float32 and corrupted.shape == pixels.shape
        found.setdefault(family, {})[severity] = corrupted
    assert list(found["intensity"]) == [float(s) for s in range(1, 11)]
    assert list(found["noise"]) == list(found["dropout"]) == [s / 10 for s in range(11)]
    np.testing.assert_array_equal(found["intensity"][4.0], 4 * pixels)
    noise = found["noise"][0.5] - pixels
    assert abs(noise.std() - 0.5) < 0.03 and abs(noise.mean()) < 0.03  # 2000 draws: 4 standard errors
    assert found["noise"][1.0].min() < 0 and found["noise"][1.0].max() > 1.5  # not clipped
    np.testing.assert_array_equal(found["noise"][0.0], pixels)
    np.testing.assert_array_equal(found["dropout"][0.0], pixels)
    assert not found["dropout"][1.0].any()
    dropped = found["dropout"][0.3]
    assert set(np.unique(dropped)) <= set(np.unique(pixels)) | {0.0}  # no rescaling
    assert abs((dropped == 0).mean() - 0.3) < 0.04
    again = {(f, s): x for f, s, x in corruptions(pixels)}
    np.testing.assert_array_equal(again["noise", 0.7], found["noise"][0.7])
    # Reseeded per family: the dropout masks come from a fresh generator with seed 42.
    draws = np.random.default_rng(42)
    draws.random(pixels.shape, dtype=np.float32)
    np.testing.assert_array_equal(found["dropout"][0.1], pixels * (draws.random(pixels.shape, dtype=np.float32) >= 0.1))


def test_corrupted_images_can_be_evaluated(tmp_path):
    write_idx(tmp_path, packed=False)
    dataset = data.make(data.DataConfig(kind="images", path=str(tmp_path), batch_size=3, eval_batch_size=5))
    cases = list(dataset.corrupted())
    assert len(cases) == 32
    family, severity, images = cases[1]
    assert (family, severity) == ("intensity", 2.0) and isinstance(images, ImageSplit)
    (batch,) = dataset.eval_batches(images)
    np.testing.assert_array_equal(batch["pixels"], 2 * dataset.splits["test"].pixels)
    np.testing.assert_array_equal(batch["labels"], dataset.splits["test"].labels)


# Messages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "audio"}, "kind='audio' must be one of text, images"),
        ({"path": "/nowhere.txt"}, "path='/nowhere.txt' does not exist"),
        ({"path": "/nowhere", "kind": "images"}, "path='/nowhere' does not exist.*mnist.npz"),
        ({"window": 0}, "window=0 must be >= 1"),
        ({"window": 10**6}, "window=1000000 is longer than the corpus"),
        ({"batch_size": 0}, "batch_size=0 must lie between 1 and"),
        ({"batch_size": 10**6}, "batch_size=1000000 must lie between 1 and the [0-9]+ windows"),
        ({"eval_batch_size": -1}, "eval_batch_size=-1 must be >= 0"),
        ({"valid_fraction": 0.0}, "valid_fraction=0.0 must lie strictly between 0 and 1"),
        ({"valid_fraction": 1e-9}, "the valid split .* is empty: 120 documents"),
        ({"path": "", "valid_path": "x.txt"}, "valid_path='x.txt' needs path"),
    ],
)
def test_wrong_configurations(folder, change, message):
    config = {"path": str(folder), "window": 16, "batch_size": 4, **change}
    with pytest.raises(ValueError, match=message):
        data.make(data.DataConfig(**config))


def test_more_wrong_input(tmp_path, dataset):
    with pytest.raises(ValueError, match="holds no text file"):
        list(text.user_documents(str(tmp_path)))
    with pytest.raises(ValueError, match="split='test' must be train or valid"):
        dataset.eval_batches("test")
    with pytest.raises(ValueError, match="step=-1 must be >= 0"):
        dataset.train_iterator(-1)
    with pytest.raises(ValueError, match="document 'n' is empty or contains a NUL byte"):
        text.build_corpus([("n", b"a\0")])
    with pytest.raises(ValueError, match="offsets from 0 to 5 must rise strictly"):
        data.TokenWindows(data.Corpus(np.ones(6, np.uint8), np.array([0, 3, 5])), 2)
    corpus = data.Corpus(np.ones(6, np.uint8), np.array([0, 3, 3, 6]))
    with pytest.raises(ValueError, match="must rise strictly"):
        data.TokenWindows(corpus, 2)


def test_damaged_images_are_refused_with_their_name(tmp_path):
    write_idx(tmp_path, packed=False)
    file = tmp_path / "t10k-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte.*not a complete IDX file"):
        data.load_images(str(tmp_path))
    file.unlink()
    with pytest.raises(ValueError, match="no file t10k-images"):
        data.load_images(str(tmp_path))
    np.savez(tmp_path / "x.npz", x_train=np.zeros((2, 2, 2)))
    with pytest.raises(ValueError, match="x.npz.*keys x_train, y_train"):
        data.load_images(str(tmp_path / "x.npz"))
    (tmp_path / "y.npz").write_bytes(b"PK nonsense")
    with pytest.raises(ValueError, match=r"y.npz.*\(no archive of numbers\)$"):
        data.load_images(str(tmp_path / "y.npz"))
    wide, label = np.full((2, 2, 2), 3.0), np.zeros(2, int)
    np.savez(tmp_path / "z.npz", x_train=wide, y_train=label, x_test=wide, y_test=label)
    with pytest.raises(ValueError, match="pixels from 3.0 to 3.0; must be uint8"):
        data.load_images(str(tmp_path / "z.npz"))


def test_missing_scikit_learn_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn, or give mnist.npz"):
        data.load_images()
