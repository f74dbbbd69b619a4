"""Scores of single tokens: by position, in one pass or in pieces, and of answers; and the commands that write them."""

import csv
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from tqdm import tqdm

from configs import quickstart
from efla_jax import evaluate, train
from efla_jax.checkpoint import Checkpointer
from efla_jax.data import needle, prepare
from efla_jax.model import LanguageModel
from efla_jax.train import settings
from experiments import evaluate as program

OPTIONS = {"efla": {"num_heads": 2}, "attention": {"num_heads": 2}}


@pytest.fixture(scope="module")
def tiny():
    model = LanguageModel(vocab_size=256, width=16, depth=2, mixers=("efla", "attention"), mixer_options=OPTIONS)
    params = jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 4), jnp.int32))
    # Large enough that what a token is told depends on those before it.
    return model, jax.tree.map(lambda x: 3 * x, params)


def direct(model, params, rows):
    """log softmax of all the logits, at the targets."""
    logits, _ = jax.jit(model.apply)(params, jnp.asarray(rows[:, :-1]))
    return -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), rows[:, 1:, None], axis=2)[..., 0], logits


def test_losses_by_position_in_one_pass_and_in_pieces(tiny):
    rows = np.random.default_rng(0).integers(0, 256, (3, 38)).astype(np.int32)
    wanted, _ = direct(*tiny, rows)
    assert wanted.std() > 0.5
    np.testing.assert_allclose(evaluate.losses_by_position(*tiny, rows, chunk=5), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(evaluate.losses_by_position(*tiny, rows, piece=16), wanted, rtol=2e-4, atol=2e-5)


def test_bins_hold_every_position_once():
    assert evaluate.position_ends(300, 120) == [64, 120, 128, 240, 256, 300]
    assert evaluate.position_ends(256, 2048) == [64, 128, 256]
    assert evaluate.position_ends(50, 2048) == [50]
    assert evaluate.position_ends(32768, 2048) == [64, 128, 256, 512, 1024, *range(2048, 32769, 2048)]
    losses = np.arange(300.0)
    rows = evaluate.binned(losses, evaluate.position_ends(300, 120), 4)
    assert [row["count"] for row in rows] == [4 * size for size in (64, 56, 8, 112, 16, 44)]
    assert rows[2] == {"position_end": 128, "loss": 123.5, "count": 32}
    counts = [row["count"] for row in rows]
    assert np.average([row["loss"] for row in rows], weights=counts) == pytest.approx(losses.mean())


def test_answers_are_scored_where_they_stand(tiny):
    model, params = tiny
    rows = np.random.default_rng(1).integers(1, 256, (2, 21)).astype(np.int32)
    _, logits = direct(model, params, rows)
    for at in range(16, 20):  # an answer that greedy decoding says
        rows[0, at + 1] = np.argmax(direct(model, params, rows)[1][0, at])
    wanted, logits = direct(model, params, rows)
    prompts = [needle.Prompt(rows[0], 17, ""), needle.Prompt(rows[1, :19], 17, "")]
    batch = needle.lay_out(prompts, 24)
    batch["targets"][1, 2:] = np.argmax(logits[1, 0])  # what is no answer is right, and does not count
    found = evaluate.answer_scores(model, params, batch)
    assert found["accuracy"].tolist() == [True, False]
    np.testing.assert_allclose(found["nats"], [wanted[0, 16:].mean(), wanted[1, 16:18].mean()], rtol=1e-4)
    right = np.argmax(logits[1, 16:18], axis=1) == rows[1, 17:19]
    assert found["token_accuracy"].tolist() == [1.0, right.mean()]


class Copier(nn.Module):
    """Reads on where " is: " stands; says "0" where it does not, or if it is not `able`."""

    able: bool = True
    vocab_size: int = 256

    def features(self, tokens, segment_ids=None, cache=None):
        def ends(pattern):
            return jnp.stack([jnp.roll(tokens, i, 1) == c for i, c in enumerate(reversed(pattern))]).all(0)

        told, asked = ends(b" is: "), ends(b"provided text is")
        last = tokens.shape[1] - 1 - jnp.argmax(asked[:, ::-1], axis=1)[:, None]
        source = jnp.argmax(told, axis=1)[:, None] + jnp.arange(tokens.shape[1]) - last
        copied = jnp.take_along_axis(tokens, jnp.clip(source, 0, tokens.shape[1] - 1), axis=1)
        said = jnp.where(told.any(1, keepdims=True) & self.able, copied, ord("0"))
        return said[..., None].astype(jnp.float32), cache

    def logits(self, x):
        return 20 * nn.one_hot(x[..., 0].astype(jnp.int32), self.vocab_size)


@pytest.mark.parametrize("able", [True, False])
def test_a_model_that_copies_finds_needles_and_one_that_cannot_does_not(able):
    chosen = SimpleNamespace(depths=[0, 60, 100], count=3, batch_tokens=3000)
    run = program.Trained(Copier(able), {}, None, "highest")
    needles = needle.Needles("single_1", str.encode)
    with tqdm(disable=True) as bar:
        rows = program.needle_rows(run, needles, 1000, chosen, bar)
    assert [(row["length"], row["depth"], row["count"]) for row in rows] == [(1000, depth, 3) for depth in (0, 60, 100)]
    for row in rows:
        assert row["accuracy"] == able and (row["token_accuracy"] == 1) == able
        assert (row["nats"] < 1e-4) == able and row["nats_without"] > 10
        assert list(row)[-1] == "token_accuracy"


@pytest.fixture(scope="module")
def byte_run(corpus, tmp_path_factory):
    """(folder of a run that was never trained, its model and parameters)."""
    config = quickstart.get_config("efla")
    config.mesh.data = 1
    config.data.path, config.data.valid_fraction, config.data.window = str(corpus), 0.2, 24
    config.model.width, config.model.depth, config.model.mlp_width = 16, 1, 24
    config.model.mixer_options = {"efla": {"num_heads": 1}}
    config = train.plain(config)
    parts = settings.build(config)
    state = jax.jit(parts.begin)()
    folder = tmp_path_factory.mktemp("runs") / "bytes"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save(3, state, parts.dataset.train_iterator().get_state(), {"tokenizer": "bytes"})
        checkpointer.wait()
    return folder, parts.model, state.params


def table(file):
    with open(file, newline="") as rows:
        return [{name: float(x) for name, x in row.items()} for row in csv.DictReader(rows)]


def test_per_position_of_text_and_of_shards(byte_run, tmp_path):
    folder, model, params = byte_run
    texts = [
        "".join(np.random.default_rng(i).choice(list("abc def"), size)) for i, size in enumerate((60, 230, 90, 150))
    ]
    (tmp_path / "long.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    words = ["--length=70", "--rows=9", "--bin=30", "--batch_tokens=300"]
    program.main(["per_position", f"--run={folder}", f"--data={tmp_path / 'long.jsonl'}", *words])
    rows = table(folder / "per_position.csv")
    tokens = [[*texts[which].encode()][start : start + 71] for start, which in
              ((0, 1), (0, 2), (0, 3), (70, 1), (70, 3), (140, 1))]  # fmt: skip
    each = direct(model, params, np.array(tokens, np.int32))[0]
    bins = (0, 30), (30, 60), (60, 64), (64, 70)
    assert [(row["position_end"], row["count"]) for row in rows] == [(30, 180), (60, 180), (64, 24), (70, 36)]
    np.testing.assert_allclose([row["loss"] for row in rows], [each[:, a:b].mean() for a, b in bins], rtol=1e-5)

    prepare.prepare(prepare.Preparation(str(tmp_path / "long.jsonl"), valid_fraction=0.0), str(tmp_path / "shards"),
                    workers=0, progress=False)  # fmt: skip
    more = ["--split=train", "--piece=32", "--rows=3", f"--out={tmp_path / 'out'}"]
    step = folder / "checkpoints" / "3"
    program.main(["per_position", f"--run={step}", f"--data={tmp_path / 'shards'}", *words, *more])
    losses = [row["loss"] for row in table(tmp_path / "out" / "per_position.csv")]
    np.testing.assert_allclose(losses, [each[:3, a:b].mean() for a, b in bins], rtol=1e-4)


def test_needles_of_a_run(byte_run, capsys):
    folder = byte_run[0]
    words = ["--kind=single_1", "--lengths=700,800", "--depths=0,50", "--count=2", "--batch_tokens=1600"]
    program.main(["needle", f"--run={folder}", *words])
    rows = table(folder / "needle.csv")
    assert [(row["length"], row["depth"]) for row in rows] == [(700, 0), (700, 50), (800, 0), (800, 50)]
    for row in rows:  # it knows nothing
        assert row["accuracy"] == 0 and row["count"] == 2
        assert row["nats"] == pytest.approx(np.log(256), rel=0.2) == row["nats_without"]
    assert rows[0]["nats_without"] == rows[1]["nats_without"] != rows[2]["nats_without"]
    assert "| length | depth | accuracy | nats | nats_without | count | token_accuracy |" in capsys.readouterr().out


REFUSED = {
    "no run": (["needle", "--run=nowhere"], "--run=nowhere: no config.json there"),
    "no haystack": (["needle"], "haystack: kind='single_2' hides its needle in a text"),
    "short": (["needle", "--kind=single_1", "--lengths=1000,200"], "length=200 has no room"),
    "other tokens": (["needle", "--kind=single_1", "--eos=3"], "leave out eos, bos and pattern"),
    "short documents": (["per_position", "--data={corpus}", "--length=5000"], "--length=5000: no document of --data"),
    "no data": (["per_position", "--data=nowhere"], "path='nowhere' does not exist"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refuses(byte_run, corpus, fault):
    words, message = REFUSED[fault]
    words = [word.format(corpus=corpus) for word in words]
    with pytest.raises(SystemExit, match=re.escape(message)):
        program.main([words[0], f"--run={byte_run[0]}", *words[1:]])


def test_a_run_needs_its_own_tokenizer_and_a_checkpoint(byte_run, tmp_path):
    config = json.loads((byte_run[0] / "config.json").read_text())
    arguments = ["needle", f"--run={tmp_path}", "--kind=single_1"]
    for kind, message in (("images", "trained on images; give a run"), ("tokens", "--tokenizer: missing")):
        config["data"]["kind"] = kind
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(SystemExit, match=message):
            program.main(arguments)
    config["data"]["kind"] = "text"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="checkpoint"):
        program.main(arguments)


@pytest.mark.parametrize("words", [["needle", "--lengths=1,x"], ["needle", "--count=0"], ["needle", "--data=x"], [],
                                   ["perplexity", "--data=x", "--max_length=-4"]])  # fmt: skip
def test_a_wrong_word_is_refused(words, capsys):
    with pytest.raises(SystemExit):
        program.main([*words[:1], "--run=x", *words[1:]] if words else [])
    assert "error: " in capsys.readouterr().err
