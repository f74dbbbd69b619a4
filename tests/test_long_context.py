"""The commands for long texts: a run that was never trained from end to end, and readers that are rigged."""

import csv
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from configs import quickstart
from efla_jax import evaluate, train
from efla_jax.checkpoint import Checkpointer
from efla_jax.data import needle
from efla_jax.model import LanguageModel
from efla_jax.scoring import Journal, Scorer
from efla_jax.train import settings
from experiments import language_runs, long_context, ruler

WORDS = (("law", "state", "mind", "end", "word"), ("men", "things", "nature", "art", "truth", "trade"),
         ("first", "last", "best", "whole"))  # fmt: skip
ESSAY = " ".join(f"The {a} of {b} is not the {c}." for a, b, c in itertools.product(*WORDS))


@pytest.fixture(scope="module")
def byte_run(corpus, tmp_path_factory):
    """Folder of a run on bytes that was never trained."""
    config = quickstart.get_config("efla")
    config.mesh.data = 1
    config.data.path, config.data.valid_fraction, config.data.window = str(corpus), 0.2, 24
    config.model.width, config.model.depth, config.model.mlp_width = 16, 1, 24
    config.model.mixer_options = {"efla": {"num_heads": 1}}
    config = train.plain(config)
    parts = settings.build(config)
    folder = tmp_path_factory.mktemp("runs") / "bytes"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with Checkpointer(folder / "checkpoints") as checkpointer:
        state = parts.dataset.train_iterator().get_state()
        checkpointer.save(3, jax.jit(parts.begin)(), state, {"tokenizer": "bytes"})
        checkpointer.wait()
    return folder


class Reader(Scorer):
    """Says what `answer` makes of the text of a prompt; counts how often it is asked."""

    asked = 0

    def say(self, prompts, count, until, max_new_tokens):
        type(self).asked += count
        texts = [self.tokenizer.decode([int(token) for token in prompt]) for prompt in prompts[:count]]
        return [self.answer(text)[:max_new_tokens] for text in texts]

    def answer(self, text):
        """The value of every key that the question names, in upper case."""
        context, question = text.rsplit("\n", 1)
        query = re.search(r"magic \w+ for (.*?) mentioned", question)[1]
        told = re.findall(r"One of the special magic \w+s for (\S+) is: (\S+)\.", context)
        return " and ".join(value.upper() for key, value in told if re.search(rf"\b{key}\b", query)) + "."


class Forgetful(Reader):
    """Knows nothing of the first half of a text."""

    def answer(self, text):
        return super().answer(text[len(text) // 2 :])


def rig(monkeypatch, reader):
    def scorer(chosen, run, journal):
        return reader(run.model, run.params, run.tokenizer, batch_tokens=chosen.batch_tokens, journal=Journal(journal))

    monkeypatch.setattr(language_runs, "scorer", scorer)
    monkeypatch.setattr(reader, "asked", 0)


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_reader_finds_all_needles_and_goes_on_where_it_stopped(byte_run, tmp_path, monkeypatch):
    rig(monkeypatch, Reader)
    (tmp_path / "essay.txt").write_text(ESSAY)
    words = ["ruler", f"--run={byte_run}", f"--haystack={tmp_path / 'essay.txt'}", f"--out={tmp_path}", "--count=3",
             "--lengths=1500,2200"]  # fmt: skip
    long_context.main([*words, "--kinds=multikey_3"])
    assert Reader.asked == 6
    long_context.main(words)
    assert Reader.asked == 48  # the first six are known
    result = json.loads((tmp_path / "ruler.json").read_text())
    assert [(row["kind"], row["length"]) for row in result["rows"]] == [
        (kind, length) for kind in needle.KINDS for length in (1500, 2200)
    ]
    for row in result["rows"]:
        assert (row["score"], row["stderr"], row["part"], row["count"], row["depth"]) == (1, 0, 1, 3, "drawn")
    assert result["step"] == "3" and result["tokenizer"]["kind"] == "bytes" and result["options"]["count"] == 3
    records = rows_of(tmp_path / "ruler_outputs.jsonl")
    assert len(records) == 48 and all(record["found"] == [True] * len(record["answers"]) for record in records)
    assert "| multiquery | 100.0 | 100.0 |\n| mean | 100.0 | 100.0 |" in (tmp_path / "ruler.md").read_text()
    assert (tmp_path / "ruler.png").stat().st_size > 10000


def test_a_reader_of_the_second_half_finds_what_lies_there(byte_run, tmp_path, monkeypatch):
    rig(monkeypatch, Forgetful)
    (tmp_path / "essay.txt").write_text(ESSAY)
    words = ["ruler", f"--run={byte_run}", f"--haystack={tmp_path / 'essay.txt'}", f"--out={tmp_path}", "--count=12"]
    long_context.main([*words, "--limit=2", "--kinds=single_2", "--lengths=3000", "--depths=0,40,70,100"])
    rows = json.loads((tmp_path / "ruler.json").read_text())["rows"]
    found = [(row["depth"], row["score"], row["count"]) for row in rows]
    assert found == [(0, 0, 2), (40, 0, 2), (70, 1, 2), (100, 1, 2)]
    values, names = ruler.depth_map(rows_of(tmp_path / "ruler_outputs.jsonl"), [3000])
    assert (names, values.ravel().tolist()) == (["0", "40", "70", "100"], [0, 0, 1, 1])

    long_context.main([*words, "--kinds=multivalue", "--lengths=3000"])
    records = rows_of(tmp_path / "ruler_outputs.jsonl")
    for record in records:
        late = sum(place > 55 for place in record["depths"])  # where the half ends, give or take the question
        assert record["all"] == sum(record["found"]) / 4 and record["found"] == sorted(record["found"])
        assert late <= sum(record["found"]) <= late + sum(40 < place <= 55 for place in record["depths"])
        assert record["part"] == (sum(record["found"]) > 0)
    values, names = ruler.depth_map(records, [3000])
    assert len(names) == 10 and values[:4].ravel().tolist() == [0] * 4 and values[6:].ravel().tolist() == [1] * 4
    assert 0 < json.loads((tmp_path / "ruler.json").read_text())["rows"][0]["stderr"] < 0.2


def test_tables_leave_out_what_is_not_there():
    records = [{"kind": kind, "length": length, "depth": 0, "all": score} for kind, length, score in
               (("single_1", 1024, 1.0), ("single_1", 2048, 0.5), ("multiquery", 1024, 0.25))]  # fmt: skip
    assert ruler.ruler_table(records).splitlines() == [
        "| kind | 1024 | 2048 |", "| --- | --- | --- |", "| single_1 | 100.0 | 50.0 |", "| multiquery | 25.0 | - |",
        "| mean | 62.5 | - |",
    ]  # fmt: skip


class Completer(Reader):
    """Says what followed the last words of a prompt where they stood before."""

    def answer(self, text):
        lines = text.split("\n")
        cue = lines[-1] if lines[-1].endswith(":") else " ".join(lines[-1].split()[-4:])
        if text.index(cue) == len(text) - len(cue):
            return "no idea\nnothing"
        return text[text.index(cue) + len(cue) :]


def test_a_reader_completes_cloze_questions(byte_run, tmp_path, monkeypatch):
    rig(monkeypatch, Completer)
    squad = [{"context": f"It rained. Long ago the winner was the number {i}, as they say.", "question": "Who?",
              "answers": {"text": [f"number {i}"]}} for i in range(6)]  # fmt: skip
    (tmp_path / "squad.jsonl").write_text("\n".join(map(json.dumps, squad)))
    words, data = ["cloze", f"--run={byte_run}", f"--out={tmp_path}"], f"--data={tmp_path / 'squad.jsonl'}"
    long_context.main([*words, "--task=squad_cloze", data, "--lengths=0,88", "--limit=5"])
    rows = json.loads((tmp_path / "cloze_squad_cloze.json").read_text())["rows"]
    assert [(row["length"], row["score"], row["count"]) for row in rows] == [(0, 1, 5), (88, 1, 5)]
    assert rows[0]["without_document"] == 0
    long_context.main([*words, "--task=squad", data, "--lengths=0"])
    assert json.loads((tmp_path / "cloze_squad.json").read_text())["rows"][0]["score"] == 0  # the cue is nowhere

    long_context.main([*words, "--task=synthetic_swde", "--count=30", "--words=150", "--lengths=0", "--twice"])
    row = json.loads((tmp_path / "cloze_synthetic_swde_twice.json").read_text())["rows"][0]
    assert (row["task"], row["score"], row["stderr"]) == ("synthetic_swde_twice", 1, 0)
    long_context.main([*words, "--task=synthetic_fda", "--count=30", "--words=150", "--lengths=0"])
    row = json.loads((tmp_path / "cloze_synthetic_fda.json").read_text())["rows"][0]
    # About half of the values stand in a clause and not behind their key.
    assert 0.2 < row["score"] < 0.8 and row["stderr"] == pytest.approx((row["score"] * (1 - row["score"]) / 29) ** 0.5)


def test_longbench_of_a_folder(byte_run, tmp_path, monkeypatch):
    class Nine(Reader):
        def answer(self, text):
            return "9\n3" if "CUT" in text else "Paragraph 9"

    rig(monkeypatch, Nine)
    row = {"context": "x", "input": "y", "answers": ["9"], "all_classes": ["9", "3"], "length": 10}
    for task in ("passage_retrieval_en", "trec"):
        (tmp_path / f"{task}.jsonl").write_text("\n".join(json.dumps({**row, "length": n}) for n in (10, 5000, 9000)))
    (tmp_path / "dataset2prompt.json").write_text(json.dumps({"trec": "CUT {context}" + "z" * 400 + "{input}"}))
    words = ["longbench", f"--run={byte_run}", f"--data={tmp_path}", f"--out={tmp_path}"]
    long_context.main([*words, f"--prompts={tmp_path / 'dataset2prompt.json'}", "--length=100"])
    found = {one["task"]: one for one in json.loads((tmp_path / "longbench.json").read_text())["rows"]}
    assert found["trec"]["score"] == 1 and found["trec"]["prompts"] == "LongBench's"  # only the first line counts
    assert found["passage_retrieval_en"]["score"] == 1 and found["passage_retrieval_en"]["prompts"] == "ours"
    assert [found["trec"][name] for name in ("0-4k", "4-8k", "8k+")] == [1, 1, 1]
    assert len(rows_of(tmp_path / "longbench_outputs.jsonl")) == 6
    long_context.main([*words, "--tasks=trec", "--limit=1"])
    found = json.loads((tmp_path / "longbench.json").read_text())["rows"]
    assert [(one["task"], one["count"], one["stderr"], one["8k+"]) for one in found] == [("trec", 1, None, None)]


def test_a_run_that_knows_nothing_is_asked_for_real(byte_run, tmp_path, capsys):
    words = ["ruler", f"--run={byte_run}", f"--out={tmp_path}", "--kinds=single_1", "--lengths=600", "--count=2",
             "--tokens=16", "--strict", "--piece=128"]  # fmt: skip
    long_context.main(words)
    row = json.loads((tmp_path / "ruler.json").read_text())["rows"][0]
    assert (row["score"], row["exact"], row["count"]) == (0, 0, 2)
    assert row["nats"] == pytest.approx(np.log(256), rel=0.2)
    assert "| single_1 | 0.0 |" in capsys.readouterr().out
    counts = json.loads((tmp_path / "ruler.json").read_text())["counts"]
    assert counts["truncated"] == 0 and counts["requests"] == 4  # nothing but the window of training would be read
    long_context.main(words)
    counts = json.loads((tmp_path / "ruler.json").read_text())["counts"]
    assert counts["known"] == 4


class Finder(LanguageModel):
    """A model that reads on behind " is:" once it has been asked; its cache is what it has read."""

    def setup(self):
        """Without parameters."""

    @nn.nowrap
    def init_cache(self, batch, max_length=None):
        return ({"tokens": jnp.zeros((1, batch, max_length), jnp.int32), "length": jnp.zeros((1, batch), jnp.int32)},)

    def features(self, tokens, segment_ids=None, cache=None):
        cache = self.init_cache(*tokens.shape) if cache is None else cache
        read, length = cache[0]["tokens"][0], cache[0]["length"][0]
        real = jnp.ones_like(tokens) if segment_ids is None else (segment_ids != 0).astype(jnp.int32)
        places = length[:, None] + jnp.cumsum(real, axis=1) - 1
        rows = jnp.arange(len(tokens))[:, None]
        read = read.at[rows, jnp.where(real > 0, places, read.shape[1])].set(tokens, mode="drop")

        def ends(pattern):
            return jnp.stack([jnp.roll(read, i, 1) == c for i, c in enumerate(reversed(pattern))]).all(0)

        asked = read.shape[1] - 1 - jnp.argmax(ends(b" provided text is")[:, ::-1], axis=1)
        source = jnp.argmax(ends(b" is:"), axis=1)[:, None] + 1 + places - asked[:, None]
        said = jnp.take_along_axis(read, jnp.clip(source, 0, read.shape[1] - 1), axis=1)
        after = ({"tokens": read[None], "length": (length + real.sum(1))[None]},)
        return said[..., None].astype(jnp.float32), after

    def logits(self, x):
        return 20 * nn.one_hot(x[..., 0].astype(jnp.int32), self.vocab_size)

    def __call__(self, tokens, segment_ids=None, cache=None):
        x, cache = self.features(tokens, segment_ids, cache)
        return self.logits(x), cache


@pytest.mark.parametrize(("kind", "length", "piece"), [
    ("single_3", 1100, 256), pytest.param("single_1", 131072, 4096, marks=pytest.mark.slow)
])  # fmt: skip
def test_a_model_that_reads_on_finds_needles_in_pieces(byte_run, tmp_path, monkeypatch, kind, length, piece):
    def scorer(chosen, run, journal):
        model = Finder(vocab_size=256, width=1, depth=1, mixers=("efla",), mixer_options={"efla": {"num_heads": 1}})
        return Scorer(model, {}, run.tokenizer, batch_tokens=3000, piece=chosen.piece, journal=Journal(journal))

    monkeypatch.setattr(language_runs, "scorer", scorer)
    (tmp_path / "essay.txt").write_text(ESSAY)
    words = ["ruler", f"--run={byte_run}", f"--out={tmp_path}", f"--kinds={kind}", f"--lengths={length}", "--count=2",
             "--strict", f"--piece={piece}", "--tokens=48", "--depths=0,90"]  # fmt: skip
    long_context.main([*words, f"--haystack={tmp_path / 'essay.txt'}"])
    for row in json.loads((tmp_path / "ruler.json").read_text())["rows"]:
        assert (row["score"], row["exact"], row["count"]) == (1, 1, 2) and row["nats"] < 1e-4
    for record in rows_of(tmp_path / "ruler_outputs.jsonl"):
        assert record["output"].startswith(f" {record['answers'][0]}.") and len(record["output"]) == 48


REFUSED = {
    "no haystack": (["ruler"], "haystack: kind='single_2' hides its needle in a text"),
    "short": (
        ["ruler", "--kinds=single_1,multikey_3", "--lengths=900,650"],
        "--kinds: multikey_3 at --lengths=650: length=650 has no room for a sentence",
    ),
    "no data": (["cloze", "--task=squad"], "--data: missing; give a file of JSON lines for squad"),
    "made up": (["cloze", "--task=synthetic_fda", "--data=x"], "--data=x: synthetic_fda is made up"),
    "few words": (["cloze", "--task=synthetic_fda", "--words=9"], "words=9 is less than 120"),
    "no file": (["cloze", "--task=nq", "--data=nowhere.jsonl"], "path='nowhere.jsonl' is no file of JSON lines"),
    "no folder": (["longbench", "--data=nowhere"], "--data=nowhere: no TASK.jsonl there"),
    "no templates": (["longbench", "--data=nowhere", "--prompts=x"], "prompts='x' must be LongBench's"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refuses(byte_run, fault):
    words, message = REFUSED[fault]
    with pytest.raises(SystemExit, match=re.escape(message)):
        long_context.main([words[0], f"--run={byte_run}", *words[1:]])


@pytest.mark.parametrize("words", [
    ["ruler", "--kinds=single_4"], ["ruler", "--depths=101"], ["ruler", "--depths=a"], ["ruler", "--count=0"],
    ["ruler", "--lengths=x"], ["cloze", "--task=x"], ["longbench", "--data=x", "--tasks=trec,x"], ["longbench"], [],
])  # fmt: skip
def test_a_wrong_word_is_refused(words, capsys):
    with pytest.raises(SystemExit):
        long_context.main([*words[:1], "--run=x", *words[1:]] if words else [])
    assert "error: " in capsys.readouterr().err


def test_losses_by_position_are_drawn(tmp_path, capsys):
    for label, first in (("a", 3.0), ("b", 2.5)):
        (tmp_path / label).mkdir()
        evaluate.write_rows([{"position_end": end, "loss": first - end / 400, "count": 3} for end in (100, 200, 300)],
                            tmp_path / label / "per_position.csv")  # fmt: skip
    tables = f"--tables={tmp_path / 'a' / 'per_position.csv'},{tmp_path / 'b' / 'per_position.csv'}"
    out = tmp_path / "positions.png"
    long_context.main(["plot_positions", tables, f"--out={out}", "--trained_length=200"])
    assert out.stat().st_size > 10000
    assert "a: 2.6250 nats up to 200 tokens, 2.2500 beyond" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2 different ones are wanted"):
        long_context.main(["plot_positions", tables, f"--out={out}", "--labels=x,x"])
    with open(tmp_path / "a" / "bad.csv", "w", newline="") as file:
        csv.writer(file).writerows([["x"], [1]])
    with pytest.raises(SystemExit, match="no columns position_end and loss"):
        long_context.main(["plot_positions", f"--tables={tmp_path / 'a' / 'bad.csv'}", f"--out={out}"])
    with pytest.raises(SystemExit, match=r"--tables=none.csv: cannot be read \(No such file or directory\)"):
        long_context.main(["plot_positions", "--tables=none.csv", f"--out={out}"])


MIXERS = {"efla": {"num_heads": 2}, "log_linear_mamba2": {"num_heads": 2, "levels": 12}}


@pytest.mark.parametrize("mixer", MIXERS)
def test_loss_by_position_takes_the_memory_of_a_piece(mixer):
    """Compiled for rows of 512 and of 65536 tokens: the program of a piece and the cache are the same."""
    model = LanguageModel(64, 16, 1, mixers=(mixer,), mixer_options={mixer: MIXERS[mixer]})
    params = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 4), np.int32))
    piece = jax.ShapeDtypeStruct((1, 128), np.int32)

    def memory(time):
        cache = jax.eval_shape(lambda: model.init_cache(1, max_length=time))
        program = evaluate.token_scores.lower(model, params, piece, piece, cache=cache, chunk=64).compile()
        used = program.memory_analysis()
        return used.temp_size_in_bytes, used.argument_size_in_bytes, used.output_size_in_bytes

    assert memory(512) == memory(65536)
