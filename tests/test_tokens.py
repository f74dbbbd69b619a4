"""Training on tokenised shards: windows, packing, mixtures, rows of a process, resuming, damaged files."""

import errno
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from efla_jax import data
from efla_jax.data import batches, packing, prepare, shards
from efla_jax.data.windows import Concatenated

PROMPTS = {3, 4, 5, 20, 40}


def write(root, name, first, count, **settings):
    """A folder of `count` different documents, the prompt of some of them not trained on, in several shards."""
    rows = []
    for i in range(first, first + count):
        text = f"document {i:03d} " + "word " * (i % 7)
        rows.append({"prompt": f"prompt {i:03d} ", "response": text} if i - first in PROMPTS else {"text": text})
    (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"valid_fraction": 0.2, "shard_tokens": 600, **settings}
    preparation = prepare.Preparation(str(root / f"{name}.jsonl"), **settings)
    prepare.prepare(preparation, str(root / name), workers=0, progress=False)
    return str(root / name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokens")
    return write(root, "a", 0, 120), write(root, "b", 200, 30), write(root, "c", 300, 60)


@pytest.fixture
def own(tmp_path):
    """A folder that a test may damage."""
    return write(tmp_path, "own", 0, 60)


def make(path="", **settings):
    return data.make(data.DataConfig(**{"kind": "tokens", "path": path, "window": 16, "batch_size": 8, "seed": 3,
                                        **settings}))


def take(dataset, count, start=0, rows=None):
    iterator = dataset.train_iterator(start, rows)
    found = [next(iterator) for _ in range(count)]
    iterator.close()
    return found


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def all_documents(path, split):
    """(ids, whether trained on as a target) of every document."""
    found = []
    for corpus in shards.open_shards(path).splits[split]:
        loss = np.ones(len(corpus.tokens), np.uint8) if corpus.loss is None else corpus.loss
        for start, stop in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True):
            found.append((corpus.tokens[start:stop].tolist(), loss[start:stop].tolist()))
    return found


def targets(path, split):
    """Every (token, target) pair that is to be scored, in order."""
    return [pair for ids, loss in all_documents(path, split)
            for pair, scored in zip(zip(ids, ids[1:], strict=False), loss[1:], strict=True) if scored]


def scored(found):
    pairs = []
    for batch in found:
        live = batch["mask"] == 1
        assert (batch.get("segment_ids", batch["mask"])[live] > 0).all() and set(np.unique(batch["mask"])) <= {0.0, 1.0}
        pairs += zip(batch["tokens"][live].tolist(), batch["targets"][live].tolist(), strict=True)
    return pairs


# Rows


def test_loss_mask_is_that_of_the_target():
    # Documents "abc." and "de."; a, b and d are prompts.
    corpus = data.Corpus(np.array([1, 2, 3, 9, 4, 5, 9]), np.array([0, 4, 7]), loss=np.array([0, 0, 1, 1, 0, 1, 1]))
    first, second = (data.TokenWindows(corpus, 4, pad_tail=True)[i] for i in (0, 1))
    assert first["targets"].tolist() == [2, 3, 9, 4] and first["mask"].tolist() == [0, 1, 1, 0]
    assert second["targets"].tolist() == [5, 9, 0, 0] and second["mask"].tolist() == [1, 1, 0, 0]
    packed = packing.PackedRows([corpus], 5)[0]
    assert packed["targets"].tolist() == [2, 3, 9, 5, 9] and packed["mask"].tolist() == [0, 1, 1, 1, 1]
    assert packed["segment_ids"].tolist() == [1, 1, 1, 2, 2]


@pytest.mark.parametrize("packed", ["windows", "first_fit", "stream"])
@pytest.mark.parametrize("window", [1, 7, 16, 64])
def test_evaluation_scores_every_target_once(folders, packed, window):
    for split in ("valid", "train"):
        dataset = make(folders[0], window=window, packing=packed, batch_size=4, eval_batch_size=3)
        found = list(dataset.eval_batches(split))
        assert all(v.shape == (3, window) for batch in found for v in batch.values())
        expected, pairs = targets(folders[0], split), scored(found)
        assert len(pairs) == len(expected) and sorted(pairs) == sorted(expected)
        if packed != "first_fit":
            assert pairs == expected
        assert all(("segment_ids" in batch) == (packed != "stream") for batch in found)


def test_packer_round_trip():
    lengths = (3, 11, 2, 9, 2, 5)
    tokens, offsets = np.arange(1, 1 + sum(lengths)), np.concatenate([[0], np.cumsum(lengths)])
    rows = packing.PackedRows([data.Corpus(tokens[:16], offsets[:4]), data.Corpus(tokens[16:], offsets[3:] - 16)], 4)
    pieces = []
    for row in (rows[i] for i in range(len(rows))):
        assert row["segment_ids"].max() >= 1 and np.array_equal(row["segment_ids"] > 0, row["mask"] > 0)
        used = int(row["mask"].sum())
        assert not row["segment_ids"][used:].any() and not row["tokens"][used:].any()
        for segment in range(1, 1 + row["segment_ids"].max()):
            place = row["segment_ids"] == segment
            assert np.array_equal(row["targets"][place], row["tokens"][place] + 1)
            pieces.append(row["tokens"][place].tolist())
    # Documents in order, all tokens but the last of each, cut after every fourth.
    expected = []
    for start, stop in zip(offsets[:-1], offsets[1:] - 1, strict=True):
        expected += [tokens[i : min(i + 4, stop)].tolist() for i in range(start, stop, 4)]
    assert sorted(pieces) == expected and rows.fill == sum(map(len, expected)) / (4 * len(rows))


@pytest.mark.parametrize("block", [7, 4096])
def test_first_fit_is_the_first_row_with_room(monkeypatch, block):
    monkeypatch.setattr(packing, "BLOCK", block)
    lengths = np.random.default_rng(0).integers(1, 11, 200)
    room, expected, opened = [], [], 0
    for place, length in enumerate(lengths):
        if place % block == 0:
            opened = len(room)
        row = next((r for r in range(opened, len(room)) if room[r] >= length), len(room))
        room[row:] = room[row:] or [10]
        room[row] -= length
        expected.append(row)
    assert packing.first_fit(lengths, 10).tolist() == expected
    if block == 4096:
        assert lengths.sum() / (10 * len(room)) > 0.9


class Numbers:
    """A source whose item i is i."""

    def __init__(self, size, first):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"x": np.array(self.first + int(index))}


def test_concatenated():
    joined = Concatenated([Numbers(3, 0), Numbers(1, 10), Numbers(2, 20)])
    assert len(joined) == 6 and [int(joined[i]["x"]) for i in range(6)] == [0, 1, 2, 10, 20, 21]


# Batches


@pytest.mark.parametrize("packed", ["windows", "first_fit"])
def test_every_epoch_shows_every_training_row_once_and_nothing_held_out(folders, packed):
    dataset = make(folders[0], packing=packed, batch_size=1)
    rows = int(dataset.steps_per_epoch)
    expected = sorted(dataset._train[0][i]["targets"].tolist() for i in range(rows))
    for epoch in range(3):
        found = take(dataset, rows, start=epoch * rows)
        assert sorted(batch["targets"][0].tolist() for batch in found) == expected
    assert not same(take(dataset, 1)[0], take(dataset, 1, start=rows)[0])
    seen = b"".join(bytes(batch["tokens"][0].astype(np.uint8)) for batch in take(dataset, 3 * rows))
    # A name of twelve bytes is cut by some windows, but not by all.
    for split, present in (("train", True), ("valid", False)):
        names = [bytes(ids)[bytes(ids).index(b"document") :][:12] for ids, _ in all_documents(folders[0], split)]
        assert len(names) > 10 and (sum(name in seen for name in names) > len(names) / 3) == present
        assert present or not any(name in seen for name in names)


@pytest.fixture(scope="module")
def every_kind(folders, tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    for i in range(60):
        (root / f"{i}.txt").write_text(f"document {i} " + "word " * (i % 7))
    text = data.make(data.DataConfig(path=str(root), window=16, batch_size=8, valid_fraction=0.2))
    return {"text": text, "images": data.make(data.DataConfig(kind="images", batch_size=8)), "tokens": make(folders[0]),
            "packed": make(folders[0], packing="first_fit"), "mixture": make(paths=folders, weights=(2.0, 1.0, 1.0))}


@pytest.mark.parametrize("kind", ["text", "images", "tokens", "packed", "mixture"])
def test_processes_share_the_global_batch(every_kind, kind):
    dataset, held_out = every_kind[kind], "test" if kind == "images" else "valid"
    last = int(dataset.steps_per_epoch)  # images: the short batch
    whole, evaluated = take(dataset, 4, start=last - 2), list(dataset.eval_batches(held_out))
    assert all(len(batch["mask"]) == 8 for batch in whole + evaluated)
    for processes in (2, 4):
        size = 8 // processes
        parts = [slice(p * size, (p + 1) * size) for p in range(processes)]
        shares = [take(dataset, 4, start=last - 2, rows=part) for part in parts]
        scores = [list(dataset.eval_batches(held_out, rows=part)) for part in parts]
        for found, expected in ((shares, whole), (scores, evaluated)):
            for step, batch in enumerate(expected):
                pieces = [share[step] for share in found]
                assert same({k: np.concatenate([piece[k] for piece in pieces]) for k in batch}, batch)
    one = dataset.train_iterator(2, rows=slice(0, 2)).get_state()
    assert one == dataset.train_iterator(2).get_state()  # a run may go on with another number of processes
    for wrong in (slice(0, 9), slice(3, 3), slice(-2, None), slice(0, 8, 2)):
        with pytest.raises(ValueError, match=r"rows=slice.* must be a slice of step 1 and 0 <= start < stop <= 8"):
            dataset.train_iterator(rows=wrong)
        with pytest.raises(ValueError, match="rows=slice"):
            dataset.eval_batches(held_out, rows=wrong)


@pytest.mark.parametrize("kind", ["tokens", "packed", "mixture"])
def test_resuming_is_exact(every_kind, kind):
    dataset = every_kind[kind]
    steps = 2 * int(dataset.steps_per_epoch)
    found, iterator = take(dataset, steps), dataset.train_iterator()
    for at in (0, 5, steps - 3):
        state = json.loads(json.dumps({**iterator.get_state(), "next_step": at}))
        iterator.set_state(state)
        assert all(same(next(iterator), batch) for batch in found[at : at + 3])
        assert iterator.get_state() == {**state, "next_step": at + 3}
    iterator.close()
    assert all(same(a, b) for a, b in zip(take(dataset, 2, start=steps - 2), found[-2:], strict=True))


def test_the_fingerprint_covers_what_changes_the_batches(folders, tmp_path):
    a, b, c = folders
    base = {"paths": (a, b), "weights": (1.0, 1.0)}
    changes = ({}, {"seed": 4}, {"window": 8}, {"batch_size": 4}, {"packing": "first_fit"}, {"paths": (a, c)},
               {"paths": (b, a)}, {"weights": (2.0, 1.0)}, {"weights": ()})
    marks = [make(**{**base, **change}).train_iterator().get_state()["fingerprint"] for change in changes]
    assert len(set(marks)) == len(marks)
    os.symlink(a, tmp_path / "moved")
    moved = make(**{**base, "paths": (str(tmp_path / "moved"), b)})
    assert moved.train_iterator().get_state()["fingerprint"] == marks[0]
    with pytest.raises(ValueError, match="fingerprint"):
        moved.train_iterator().set_state({"next_step": 1, "fingerprint": marks[1]})


WORKERS = """
import sys
from absl import flags
from efla_jax import data
if __name__ == "__main__":
    flags.FLAGS.mark_as_parsed()
    found = {}
    for workers in (0, 2):
        config = data.DataConfig(kind="tokens", paths=tuple(sys.argv[1:]), weights=(1.0, 2.0), window=16, batch_size=5,
                                 packing="first_fit", worker_count=workers)
        iterator = data.make(config).train_iterator(3)
        found[workers] = [{k: v.tolist() for k, v in next(iterator).items()} for _ in range(5)], iterator.get_state()
        iterator.close()
    assert found[0] == found[2]
"""


@pytest.mark.slow  # two worker processes import grain
def test_worker_count_does_not_change_the_data(tmp_path, folders):
    (tmp_path / "main.py").write_text(WORKERS)
    command = [sys.executable, str(tmp_path / "main.py"), *folders[:2]]
    subprocess.run(command, check=True, timeout=120, env={"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"})


def test_workers_are_sent_addresses(tmp_path):
    rows = [{"text": os.urandom(3000).hex()} for _ in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    preparation = prepare.Preparation(str(tmp_path / "rows.jsonl"), valid_fraction=0.2)
    prepare.prepare(preparation, str(tmp_path / "out"), workers=0, progress=False)
    source = make(str(tmp_path / "out"))._train[0]
    sent = pickle.dumps(source)
    assert len(sent) < 3000 and same(pickle.loads(sent)[5], source[5])


# Mixtures


def from_source(batch):
    """The source of each row: documents are numbered from 0, 200 and 300."""
    texts = [bytes(row.astype(np.uint8)).partition(b"ment ")[2][:1] for row in batch["tokens"]]
    return [int(text) for text in texts if text]


def test_weights_are_frequencies(folders):
    dataset = make(paths=folders, weights=(1.0, 6.0, 3.0), window=40, packing="first_fit", batch_size=50)
    seen = [source for batch in take(dataset, 24) for source in from_source(batch)]
    counts = np.array([sum(source in group for source in seen) for group in ((0, 1), (2,), (3,))])
    assert counts.sum() > 1000
    # Rows dealt by weight: four standard deviations of a share are at most 4 sqrt(1 / 4 / 1000) = 0.064.
    np.testing.assert_allclose(counts / counts.sum(), [0.1, 0.6, 0.3], atol=0.065)
    assert len({tuple(seen[i : i + 20]) for i in range(0, 1000, 20)}) == 50  # no fixed pattern


def test_each_source_goes_through_its_own_epochs(monkeypatch):
    monkeypatch.setattr(batches.Mixture, "BLOCK", 64)
    sources = Numbers(50, 0), Numbers(70, 100)
    mixture = batches.Mixture(sources, (0.3, 0.7), seed=1)
    found = [int(mixture[i]["x"]) for i in range(640)]
    for source, share in zip(sources, (19, 45), strict=True):  # 0.3 * 64 = 19.2, 0.7 * 64 = 44.8
        own = [x for x in found if source.first <= x < source.first + source.size]
        epochs = [own[i : i + source.size] for i in range(0, len(own) - source.size + 1, source.size)]
        assert len(own) == 10 * share and len(epochs) >= 3 and len({tuple(epoch) for epoch in epochs}) == len(epochs)
        assert all(sorted(epoch) == list(range(source.first, source.first + source.size)) for epoch in epochs)
        assert {sum(x in own for x in found[64 * block : 64 * block + 64]) for block in range(10)} == {share}
    assert len({tuple(x < 100 for x in found[i : i + 64]) for i in range(0, 640, 64)}) == 10  # no order twice
    again, other = (batches.Mixture(sources, (3.0, 7.0), seed=seed) for seed in (1, 2))
    assert [int(again[i]["x"]) for i in range(639, 600, -1)] == found[639:600:-1]
    assert [int(other[i]["x"]) for i in range(64)] != found[:64]
    equal = batches.Mixture([Numbers(90, 0), Numbers(90, 100)], (1.0, 1.0), seed=1)
    drawn = [int(equal[i]["x"]) for i in range(64)]
    assert [x for x in drawn if x < 100] != [x - 100 for x in drawn if x >= 100]
    with pytest.raises(ValueError, match="one is below 1/64 of their sum,.*by default they are sizes"):
        batches.Mixture(sources, (1.0, 1000.0), seed=1)


def test_held_out_text_of_all_sources_is_scored_once(folders):
    dataset = make(paths=folders, weights=(8.0, 1.0, 1.0))
    assert scored(dataset.eval_batches()) == [pair for path in folders for pair in targets(path, "valid")]


def test_facts(folders):
    dataset = make(paths=folders[:2], packing="first_fit")
    numbers = dataset.describe()
    assert json.loads(json.dumps(numbers)) == numbers and 0.5 < numbers["fill"] <= 1
    assert numbers["train_documents"] + numbers["valid_documents"] == 150
    assert (dataset.kind, dataset.vocab_size, dataset.tokenizer_hash) == ("tokens", 256, "bytes")
    text = sum(len(ids) - 1 for path in folders[:2] for ids, loss in all_documents(path, "valid") if all(loss))
    part = [sum(loss) for path in folders[:2] for ids, loss in all_documents(path, "valid") if not all(loss)]
    assert part and dataset.bytes_per_token == (text + sum(part) - len(part)) / (text + sum(part))
    assert "fill" not in make(folders[0]).describe()
    assert (data.TextDataset.bytes_per_token, data.TextDataset.tokenizer_hash) == (1.0, "bytes")


# Damage


def cut(file):
    file.write_bytes(file.read_bytes()[:-2])


def flip(file):
    content = bytearray(file.read_bytes())
    content[20] ^= 1
    file.write_bytes(content)


def swap_offsets(file):
    offsets = np.fromfile(file, np.int64)
    offsets[[3, 4]] = offsets[[4, 3]]
    offsets.tofile(file)


def edit(key, value):
    def change(file):
        content = json.loads(file.read_text())
        if key in ("dtype", "version", "format"):
            content[key] = value
        elif key in content["tokenizer"]:
            content["tokenizer"][key] = value
        else:
            content["shards"][0][key] = value
        file.write_text(json.dumps(content))

    return change


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train-00001.tokens", cut, "train-00001.tokens' has [0-9]+ bytes and by the manifest [0-9]+: truncated"),
        ("train-00001.tokens", lambda file: file.unlink(), "train-00001.tokens' cannot be read .No such file"),
        ("valid-00000.offsets", cut, "valid-00000.offsets' has [0-9]+ bytes"),
        ("valid-00000.offsets", lambda file: file.unlink(), "valid-00000.offsets' cannot be read"),
        ("train-00000.offsets", swap_offsets, "train-00000.offsets': offsets must rise strictly from 0 to the"),
        ("train-00000.mask", cut, "train-00000.mask' has [0-9]+ bytes"),
        ("train-00000.mask", lambda file: file.unlink(), "train-00000.mask' cannot be read"),
        ("manifest.json", cut, "manifest.json' is not a manifest .*JSONDecodeError"),
        ("manifest.json", lambda file: file.unlink(), "own' has no manifest.json; give a folder that prepare_data"),
        ("manifest.json", lambda file: file.write_text("[]"), "manifest.json' is not a manifest .*not marked"),
        ("manifest.json", edit("format", "other"), "manifest.json.*not marked 'efla_jax tokens'"),
        ("manifest.json", edit("version", 2), "manifest.json.*of version 2 and this library reads 1"),
        ("manifest.json", edit("dtype", "uint32"), "manifest.json.*cannot be"),
        ("manifest.json", edit("eos_id", 256), "manifest.json.*cannot be"),
        ("manifest.json", edit("sha256", ""), "manifest.json.*cannot be"),
        ("manifest.json", edit("split", "test"), "manifest.json.*cannot be"),
        ("manifest.json", edit("name", "../own/train-00000"), "manifest.json.*cannot be"),
        ("manifest.json", edit("tokens", "many"), "manifest.json.*Type(Check)?Error"),
        ("manifest.json", edit("surprise", 1), "manifest.json.*surprise"),
        ("manifest.json", edit("documents", 5), "train-00000.offsets' has [0-9]+ bytes and by the manifest 48"),
    ],
)
def test_damaged_folders_are_refused_with_the_file(own, tmp_path, name, damage, message):
    make(own)
    damage(tmp_path / "own" / name)
    with pytest.raises(ValueError, match=message):
        make(own)


@pytest.mark.parametrize("name", ["train-00001.tokens", "train-00000.mask", "valid-00000.tokens"])
def test_checksums_on_request(own, tmp_path, name):
    make(own, verify=True)
    flip(tmp_path / "own" / name)
    make(own)  # a size cannot tell
    with pytest.raises(ValueError, match=f"{name}' does not have the checksum of the manifest"):
        make(own, verify=True)


def test_more_files_than_may_be_open(folders, monkeypatch):
    def memmap(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(np, "memmap", memmap)
    with pytest.raises(ValueError, match="train-00000.tokens' cannot be mapped .Too many open files.*ulimit -n"):
        make(folders[0])


def test_two_tokenizers_are_refused_naming_both(folders, own, tmp_path):
    edit("sha256", "another")(tmp_path / "own" / "manifest.json")
    with pytest.raises(ValueError, match=f"mix two tokenizers: '{folders[0]}' has .*'bytes'.*'{own}' has .*'another'"):
        make(paths=(folders[0], own))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": ""}, "kind='tokens' needs path='' or paths=.., one of them"),
        ({"paths": ("x",)}, "needs path='.*' or paths=.'x',., one of them"),
        ({"packing": "best"}, "packing='best' must be one of windows, first_fit, stream"),
        ({"weights": (1.0, 2.0)}, "weights=.1.0, 2.0. must be 1 positive numbers"),
        ({"weights": (0.0,)}, "weights=.0.0,. must be 1 positive numbers"),
        ({"window": 0}, "window=0 must be >= 1"),
        ({"window": 0, "packing": "first_fit"}, "window=0 must be >= 1"),
        ({"window": 4000}, "window=4000 is longer than every train shard"),
        ({"batch_size": 10**6}, "batch_size=1000000 must lie between 1 and the [0-9]+ windows"),
        ({"seed": 1 << 32}, "seed=4294967296 must be >= 0 and below"),
        ({"kind": "text", "paths": ("x",)}, "paths, weights and packing are for kind='tokens', and kind='text'"),
    ],
)
def test_wrong_configurations(folders, change, message):
    with pytest.raises(ValueError, match=message):
        make(**{"path": folders[0], **change})


def test_more_wrong_input(folders, tmp_path):
    with pytest.raises(ValueError, match="split='test' must be train or valid"):
        make(folders[0]).eval_batches("test")
    with pytest.raises(ValueError, match="names a folder twice"):
        make(paths=folders[:1] * 2)
    with pytest.raises(ValueError, match="names a folder twice"):
        make(paths=(folders[0], f"{folders[0]}/../a/"))
    path = write(tmp_path, "all", 0, 20, valid_fraction=0.0)
    with pytest.raises(ValueError, match="the valid split of .*all' is empty; prepare the data with a larger"):
        make(path)
    assert make(paths=(path, folders[1])).bytes_per_token > 0
