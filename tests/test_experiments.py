"""The command lines: what they refuse, what they say, and that the small ones run."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import app, flags
from absl.testing import flagsaver

from configs import quickstart, smnist
from efla_jax import evaluate, train
from efla_jax.checkpoint import Checkpointer
from efla_jax.train import settings
from experiments import books_report, report, sweep

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ("experiments.train", "--config=configs/quickstart.py:efla")


def run(*words):
    """(exit status, output) of python -m words."""
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


REFUSED = {
    "misspelt field": ([*TRAIN, "--config.optim.learning_rat=1e-3"], 'Did you mean "learning_rate"'),
    "misspelt section": ([*TRAIN, "--config.optm.learning_rate=1e-3"], 'Did you mean "optim"'),
    "misspelt flag": ([*TRAIN, "--workdr=x"], "Unknown command line flag 'workdr'"),
    "a word that is no flag": ([*TRAIN, "--workdir=x", "--resume", "False"], "stray argument 'False'"),
    "unlike any field": ([*TRAIN, "--workdir=x", "--config.model.zzz=1"], "no config field is called zzz"),
    "no such dtype": ([*TRAIN, "--workdir=x", "--config.model.dtype=bfloat61"], "config.model: dtype: 'bfloat61'"),
    "stray word": ([*TRAIN, "--workdir=x", "config.seed=1"], "stray argument 'config.seed=1'"),
    "exponent for an integer": ([*TRAIN, "--config.train.steps=1e3"], "invalid literal for int"),
    "infinite": (
        [*TRAIN, "--workdir=x", "--config.optim.learning_rate=1e400"],
        "config.optim.learning_rate: inf is not",
    ),
    "no workdir": (list(TRAIN), "--workdir is missing"),
    "empty workdir": ([*TRAIN, "--workdir="], "--workdir is missing"),
    "workdir is a file": ([*TRAIN, "--workdir=setup.py"], "workdir: setup.py is a file"),
    "no such file": (["experiments.train", "--config=configs/none.py", "--workdir=x"], "configs/none.py"),
    "no such mixer": (
        ["experiments.train", "--config=configs/quickstart.py:elfa", "--workdir=x"],
        "'elfa' is not one of",
    ),
    "no such argument of many": (
        ["experiments.train", "--config=configs/paper_mqar.py:log_linear-elfa-32", "--workdir=x"],
        "'log_linear-elfa-32' is not one of the 275 names there. Nearest: log_linear-efla-32",
    ),
    "no such implementation": (["experiments.benchmark", "--implementations=chunky"], "'chunky' is not one of"),
    "no such flag": (["experiments.benchmark", "--lenghts=8"], "error: Unknown command line flag 'lenghts'"),
    "no curves": (["experiments.curves", "--runs=none", "--out=x"], "error: path='none' has no metrics.jsonl"),
    "nothing to draw": (["experiments.curves", "--out=x"], "error: flag --runs=None: Flag --runs must have a value"),
    "flat beside itself": (["experiments.benchmark", "--implementations=flat"], "'flat' is delta_rule itself"),
    "no tokens": (["experiments.benchmark", "--lengths=-4"], "--lengths=-4: not whole numbers from 1 on"),
    "no length": (["experiments.benchmark", "--lengths="], "--lengths=: not whole numbers from 1 on"),
    "no such position": (["experiments.benchmark", "--decode", "--positions=-5"], "--positions=-5: not whole numbers"),
    "lengths of decoding": (["experiments.benchmark", "--decode", "--lengths=8"], "--lengths goes without --decode"),
    "position without decoding": (["experiments.benchmark", "--positions=8"], "--positions goes with --decode only"),
    "rows of a budget": (["experiments.benchmark", "--budget=64", "--lengths=16", "--batch=2"], "--batch goes without"),
    "sizes of operators": (
        ["experiments.benchmark", "--budget=64", "--heads=2"],
        "--heads goes without",
    ),
    "uneven rows": (["experiments.benchmark", "--budget=64", "--lengths=24"], "--budget=64 is no multiple of 24"),
    "operators alone": (["experiments.benchmark", "--operators=efla"], "--operators goes with --budget"),
    "no such operator": (
        ["experiments.benchmark", "--budget=64", "--lengths=64", "--operators=_"],
        "'_' is not",
    ),
    "nothing to select": (["experiments.benchmark", "--selected=0.5"], "--selected goes with --op=routed_delta"),
    "decoding of choices": (["experiments.benchmark", "--op=routed_delta_rule", "--decode"], "--decode: not of"),
    "parts of other caches": (
        ["experiments.benchmark", "--decode", "--fractions=0.1"],
        "--fractions goes with --op=block_sparse_attention",
    ),
    "no part": (
        ["experiments.benchmark", "--op=block_sparse_attention", "--decode", "--fractions=0.1,2"],
        "--fractions=0.1,2: not numbers from 0 to 1",
    ),
    "routes": (
        ["experiments.benchmark", "--op=block_sparse_attention", "--routes=3"],
        "--routes=3 must divide --heads",
    ),
    "no recurrence": (
        ["experiments.benchmark", "--op=block_sparse_attention", "--implementations=recurrent", "--lengths=16"],
        "--op=block_sparse_attention: implementation: 'recurrent' is not",
    ),
    "key heads": (["experiments.benchmark", "--key_heads=3"], "--key_heads=3 must divide --heads=4"),
    "no GPU": (
        ["experiments.benchmark", "--implementations=pallas", "--lengths=16"],
        "delta_rule: the GPU kernels need an NVIDIA Hopper GPU, not 'cpu'",
    ),
    "whole section": ([*TRAIN, "--workdir=x", '--config.optim={"a": 1}'], "a section cannot be replaced"),
}


# Every command of a list in a fork of one process, which imports once what all of them do.
FORKS = """
import json, os, runpy, sys, tempfile, traceback
import efla_jax.train

answers = []
for words in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile("w+") as output:
        process = os.fork()
        if not process:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.argv, status = words, 0
            try:
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                status = 1
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        output.seek(0)
        answers.append((status, output.read()))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers():
    """(exit status, output) of every command of REFUSED, as of python -m."""
    command = [sys.executable, "-c", FORKS, json.dumps([words for words, _ in REFUSED.values()])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(REFUSED, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("fault", REFUSED)
def test_the_command_line_is_refused_in_one_line(answers, fault):
    status, output = answers[fault]
    assert status in (1, 2) and REFUSED[fault][1] in output, output
    assert len(output.strip().splitlines()) <= 2, output  # the other says how to see more
    assert "Traceback" not in output and not (ROOT / "x").exists()


def test_benchmark_writes_table_and_picture(tmp_path):
    options = ("--op=log_linear_delta_rule", "--lengths=16,32", "--repeats=1", "--heads=1", f"--out={tmp_path}")
    status, output = run("experiments.benchmark", *options, "--implementations=chunked,flat,softmax")
    assert status == 0, output
    with open(tmp_path / "benchmark.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * 2 and all(float(r["ms"]) > 0 for r in rows)
    ms = {(r["T"], r["implementation"], r["measured"]): float(r["ms"]) for r in rows}
    for r in rows:
        flat, half = ms[r["T"], "flat", r["measured"]], ms["16", r["implementation"], r["measured"]]
        assert float(r["over_flat"]) == pytest.approx(float(r["ms"]) / flat)
        assert r["over_half_T"] == "nan" if r["T"] == "16" else float(r["over_half_T"]) == float(r["ms"]) / half
    assert (tmp_path / "benchmark.png").exists() and "| 32 | chunked |" in (tmp_path / "benchmark.md").read_text()


@pytest.mark.parametrize("op", ["block_sparse_attention", pytest.param("routed_delta_rule", marks=pytest.mark.slow)])
def test_benchmark_of_routed_operators(op, tmp_path):
    sizes = ("--heads=2", "--key_dim=4", "--value_dim=8", "--chunk_size=16", "--repeats=1", "--lengths=96,192")
    status, output = run("experiments.benchmark", f"--op={op}", "--selected=0.5", *sizes, f"--out={tmp_path}")
    assert status == 0, output
    with open(tmp_path / "benchmark.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * 2 and {row["implementation"] for row in rows} == {"chunked", "flat", "softmax"}
    ms = {(row["T"], row["implementation"], row["measured"]): float(row["ms"]) for row in rows}
    for row in rows:
        assert float(row["over_flat"]) == pytest.approx(float(row["ms"]) / ms[row["T"], "flat", row["measured"]])
    assert "chunk 16" in (tmp_path / "benchmark.md").read_text().splitlines()[0]
    assert "0.5 of the chunks for softmax" in (tmp_path / "benchmark.md").read_text().splitlines()[0]


def test_benchmark_of_decoding_counts_states_and_caches(tmp_path):
    sizes = ("--heads=2", "--key_dim=4", "--value_dim=8", "--dtype=bfloat16", "--repeats=1", "--tokens=3")
    options = ("--op=log_linear_attention", "--decode", "--positions=6,31", *sizes, f"--out={tmp_path}")
    status, output = run("experiments.benchmark", *options)
    assert status == 0, output
    with open(tmp_path / "decode.csv", newline="") as file:
        rows = {(r["implementation"], int(r["position"])): r for r in csv.DictReader(file)}
    slot = 4 * 2 * 4 * 8
    for position, levels, live in ((6, 4, 2), (31, 6, 5)):
        row = rows["log_linear_attention", position]
        assert int(row["levels"]) == levels and int(row["state_bytes"]) == levels * slot + 4
        assert float(row["live_mib"]) == pytest.approx(live * slot / 2**20, rel=0.01)
        assert int(rows["flat", position]["state_bytes"]) == slot
        assert int(rows["softmax", position]["state_bytes"]) == 2 * 2 * 2 * 8 * (position + 1) + 4
    assert all(float(r["us_per_token"]) > 0 for r in rows.values())
    assert "| 31 | log_linear_attention | 6 |" in (tmp_path / "decode.md").read_text()


def test_benchmark_of_decoding_behind_pages(tmp_path):
    """A position may have part of a chunk, which is in use like the pages; a token of the last chunk fills it."""
    sizes = ("--heads=4", "--routes=2", "--key_dim=4", "--value_dim=8", "--chunk_size=16", "--repeats=1", "--tokens=3")
    options = ("--op=block_sparse_attention", "--decode", "--positions=80", "--fractions=0.25,1")
    sizes += ("--implementations=chunked,softmax", f"--out={tmp_path}")
    status, output = run("experiments.benchmark", *options, *sizes)
    assert status == 0, output
    with open(tmp_path / "decode.csv", newline="") as file:
        rows = {(r["implementation"], r["fraction"]): r for r in csv.DictReader(file)}
    assert set(rows) == {("chunked", "0.25"), ("chunked", "1.0"), ("softmax", "nan")}
    page = 4 * 16 * 2 * (4 + 8)  # of two key heads each
    used, spare = (float(rows["chunked", "1.0"][name]) * 2**20 for name in ("live_mib", "state_mib"))
    assert spare - used == pytest.approx(2 * page) and used - 8 * page == pytest.approx(4 * (16 * 4 * 12 + 2 * 10 + 2))
    assert float(rows["chunked", "0.25"]["live_mib"]) * 2**20 < used - 5 * page
    assert all(float(r["us_per_token"]) > 0 for r in rows.values())


def test_a_grid_is_crossed_or_refused():
    points = sweep.crossed(sweep.parse_fields("optim.learning_rate=1e-3,3e-3;seed=0,1"))
    assert len(points) == 4 and points[1] == {"optim.learning_rate": "1e-3", "seed": "1"}
    assert sweep.crossed(sweep.parse_fields("")) == [{}]
    for text in ("seed", "seed=", "seed=1,,2", "=1"):
        with pytest.raises(ValueError, match="is not field=value"):
            sweep.parse_fields(text)


def test_report_takes_seeds_together(tmp_path):
    for seed, accuracy in ((0, 0.5), (1, 0.7)):
        folder = tmp_path / f"run{seed}"
        folder.mkdir()
        model = {"mixers": ["efla"], "mixer_options": {"efla": {"step": "euler"}}}
        (folder / "config.json").write_text(
            json.dumps({"seed": seed, "model": model, "optim": {"learning_rate": 1e-3}})
        )
        rows = [
            ("intensity", 1.0, accuracy),
            ("intensity", 2.0, accuracy / 2),
            ("noise", 0.0, accuracy),
            ("noise", 0.1, 0.1),
        ]
        with open(folder / "corruption.csv", "w", newline="") as file:
            csv.writer(file).writerows([("corruption", "severity", "accuracy"), *rows])
    runs = report.read(tmp_path)
    assert list(runs) == ["efla euler, lr 0.001"]
    assert "| efla euler, lr 0.001 | 2 | 60.0 [50.0, 70.0] | 30.0 [25.0, 35.0] | 10.0 [10.0, 10.0] |" in report.table(
        runs
    )
    shutil.copytree(tmp_path / "run1", tmp_path / "run2")
    with pytest.raises(ValueError, match="two runs are 'efla euler, lr 0.001' with seed 1, one of them in run2"):
        report.read(tmp_path)
    with pytest.raises(ValueError, match="no sub-folder holds a corruption.csv"):
        report.read(tmp_path / "run0")


def reported(command, **words):
    """report.py in this process, with flags as on a command line."""
    flags.FLAGS.mark_as_parsed()
    with flagsaver.as_parsed(**words):
        report.main(["report", command])


def level_run(config, folder, heads):
    """A run of that config at step 3 whose level weights are (level + 1) / (head + 1), whatever the input."""
    config = train.plain(config)
    parts = settings.build(config)
    state = jax.jit(parts.begin)()
    wanted = (np.arange(4) + 1) / (np.arange(heads)[:, None] + 1)

    def known(path, leaf):
        name = jax.tree_util.keystr(path)
        shift = "level_weights" in name and "shift" in name
        return np.broadcast_to(np.log(np.expm1(wanted)), leaf.shape).astype("float32") if shift else leaf

    state = state._replace(params=jax.tree_util.tree_map_with_path(known, state.params))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save(3, state, parts.dataset.train_iterator().get_state(), {})
        checkpointer.wait()
    return wanted


@pytest.fixture(scope="module")
def language_run(corpus, tmp_path_factory):
    """(folder, level weights [H, L]) of a language model whose second and fourth layer are log-linear."""
    config = quickstart.get_config("efla")
    config.mesh.data = 1
    config.data.path, config.data.valid_fraction, config.data.window = str(corpus), 0.2, 24
    config.model.width, config.model.depth, config.model.mlp_width = 16, 4, 24
    config.model.mixers = ("efla", "log_linear_mamba2")
    levels = {"num_heads": 2, "levels": 4, "level_bias": True, "state_dim": 4, "implementation": "recurrent"}
    config.model.mixer_options = {"efla": {"num_heads": 1}, "log_linear_mamba2": levels}
    folder = tmp_path_factory.mktemp("runs") / "levels"
    return folder, level_run(config, folder, 2)


def test_level_weights_of_a_checkpoint(language_run, tmp_path):
    folder, wanted = language_run
    reported("level_weights", checkpoint=str(folder / "checkpoints" / "3"), out=str(tmp_path / "a.png"), text="abcdefg")
    with np.load(tmp_path / "a.npz") as arrays:
        assert sorted(arrays) == ["layer_1", "layer_3", "live_1", "live_3", "segment_ids", "tokens"]
        assert arrays["layer_1"].shape == (1, 7, 2, 4)
        np.testing.assert_allclose(arrays["layer_3"], np.broadcast_to(wanted, (1, 7, 2, 4)), rtol=1e-4)
        live = [[level == 0 or t >> (level - 1) & 1 == 1 for level in range(4)] for t in range(7)]
        assert arrays["live_1"][0].tolist() == live
        assert bytes(arrays["tokens"][0].tolist()) == b"abcdefg"
    assert (tmp_path / "a.png").stat().st_size > 0
    assert "| 3 | 1 | 0.500 | 1.000 | 1.500 | 2.000 |" in (tmp_path / "a.md").read_text()
    words = {"checkpoint": str(folder), "out": str(tmp_path / "b.png"), "rows": "0,2", "layers": "3"}
    reported("level_weights", **words)
    with np.load(tmp_path / "b.npz") as arrays:
        assert arrays["layer_3"].shape == (2, 24, 2, 4) and "layer_1" not in arrays


@pytest.mark.parametrize(("words", "message"), [
    ({"layers": "0"}, r"--layers: '0' is not one of the log-linear layers \[1, 3\]"),
    ({"heads": "2"}, "--heads=2: give whole numbers from 0 to 1"),
    ({"rows": "9999"}, "--rows=9999: give whole numbers"),
    ({"rows": ""}, "--rows: empty; give at least one row"),
    ({"rows": "1", "text": "abc"}, "--rows: of held-out data, but --text or --tokens takes its place"),
    ({"tokens": "256"}, "--tokens=256: give whole numbers from 0 to 255"),
    ({"batch": "9999"}, "--batch=9999: the held-out data has fewer"),
    ({"checkpoint": "nowhere"}, "--checkpoint=nowhere: no config.json"),
    ({"out": "levels"}, "--out=levels: name a picture"),
    ({"runs": "x"}, "--runs is no flag of the report level_weights"),
])  # fmt: skip
def test_level_weights_refuses(language_run, tmp_path, words, message):
    with pytest.raises(app.UsageError, match=message):
        reported("level_weights", **{"checkpoint": str(language_run[0]), "out": str(tmp_path / "x.png"), **words})


def test_level_weights_of_a_classifier_and_of_none(tmp_path):
    config = smnist.get_config("efla")
    config.mesh.data = 1
    config.data.path, config.data.batch_size, config.model.width = "", 4, 8
    config.model.mixers = ("log_linear_efla",)
    options = {"num_heads": 2, "levels": 4, "level_bias": True, "implementation": "recurrent"}
    config.model.mixer_options = {"log_linear_efla": options}
    wanted = level_run(config, tmp_path / "run", 2)
    reported("level_weights", checkpoint=str(tmp_path / "run"), out=str(tmp_path / "c.png"))
    with np.load(tmp_path / "c.npz") as arrays:
        assert sorted(arrays) == ["labels", "layer_0", "live_0", "mask"]
        np.testing.assert_allclose(arrays["layer_0"][0, -1], wanted, rtol=1e-4)
    config.model.mixers, config.model.mixer_options = ("efla",), {"efla": {"num_heads": 2}}
    level_run(config, tmp_path / "flat", 2)
    with pytest.raises(app.UsageError, match=r"none of its mixers \('efla',\) is log-linear"):
        reported("level_weights", checkpoint=str(tmp_path / "flat"), out=str(tmp_path / "d.png"))


def test_level_weights_of_layers_with_different_heads(language_run, tmp_path, monkeypatch):
    found = {0: np.ones((1, 5, 2, 3)), 4: np.ones((1, 5, 1, 3))}
    monkeypatch.setattr(evaluate, "level_weights", lambda *_: found)
    words = {"checkpoint": str(language_run[0]), "out": str(tmp_path / "e.png"), "text": "abcde"}
    with pytest.raises(app.UsageError, match=r"--layers: \[0, 4\] have different numbers of heads"):
        reported("level_weights", **words)
    reported("level_weights", **words, layers="4")
    assert "| 4 | 0 | 1.000 | 1.000 | 1.000 |" in (tmp_path / "e.md").read_text()


def test_live_levels_count_the_tokens_of_documents():
    ids = np.array([[0, 3, 3, 0, 3, 3, 4, 4, 4, 4]], np.int32)
    position = [None, 0, 1, None, 2, 3, 0, 1, 2, 3]
    for levels in (2, 3, 5):
        for live, t in zip(evaluate.live_levels(ids, levels)[0], position, strict=True):
            seen = set() if t is None else {min((t ^ s).bit_length(), levels - 1) for s in range(t + 1)}
            assert set(np.flatnonzero(live)) == seen


def test_a_panel_of_many_tokens_has_the_means_of_those_that_have_the_level():
    values = np.arange(1100.0)[:, None] * np.ones(4)
    live = evaluate.live_levels(np.ones((1, 1100), np.int32), 4)[0]
    panel = report.drawn(values, live, "", [])
    assert panel.step == 4 and panel.values.shape == (275, 4)
    assert panel.values[2].tolist() == [9.5, 10.0, 10.5, 9.5] and np.isnan(panel.values[0, 3])


def book_run(folder, *, routed=(), positions=(), needles=()):
    """A run of a language model that ended at step 20."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"data": {"kind": "tokens"}}))
    chosen = {f"softmax_fraction/layer_{depth:02d}": 0.1 * depth for depth in routed}
    chosen |= {f"{name}/head_0": 0.9 for name in chosen} | ({"softmax_fraction_mean": 0.25} if routed else {})
    rows = [{"step": 10, "loss": 4.0, **chosen}, {"step": 20, "loss": 3.0, **chosen}]
    rows.append({"step": 20, "valid_loss": 3.5, "valid_bits_per_byte": 1.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, columns, table in (
        ("per_position", "position_end,loss,count", positions),
        ("needle", "length,depth,accuracy,nats,nats_without,count,token_accuracy", needles),
    ):
        if table:
            (folder / f"{name}.csv").write_text("\n".join([columns, *(",".join(map(str, row)) for row in table)]))


def test_books_side_by_side(tmp_path, capsys):
    """Means over what was counted; what a run lacks is said, left out of its line and of the pictures."""
    positions = [(512, 9, 512), (1024, 5, 512), (1536, 4, 30), (2048, 2, 10), (3000, 7, 5)]
    needles = [(1024, 0, 0.5, 1.0, 6.0, 10), (1024, 100, 0.0, 4.0, 9.0, 20), (2048, 0, 1.0, 0.25, 7.0, 5)]
    book_run(tmp_path / "runs" / "routed", routed=(3, 11), positions=positions, needles=[(*n, 0.5) for n in needles])
    book_run(tmp_path / "runs" / "plain")
    found = books_report.read(tmp_path / "runs")
    assert "runs/plain/needle.csv is missing: left out" in capsys.readouterr().out
    lines = books_report.table(found).splitlines()
    cells = "3.500 | 1.250 | 0.250 | 5.000 | 3.500 | 17 (3.00, 8.00) | 100 (0.25, 7.00)"
    assert lines[0].endswith("| softmax | 512 to 1024 | 1024 to 2048 | needle 1024 | needle 2048 |")
    assert lines[2:] == ["| plain | 20 | 3.500 | 1.250 |  |  |  |  |  |", f"| routed | 20 | {cells} |"]
    rows = [
        {"task": "wikitext", "word_perplexity": 1234.5},
        {"task": "lambada_openai", "perplexity": None, "acc": 0.25},
    ]
    (tmp_path / "runs" / "plain" / "suite.json").write_text(json.dumps({"rows": rows}))
    found = books_report.read(tmp_path / "runs")
    lines = books_report.table(found).splitlines()
    assert "| softmax | WikiText ppl | LAMBADA % | 512" in lines[0] and "LAMBADA ppl" not in lines[0]
    assert lines[2:] == [
        "| plain | 20 | 3.500 | 1.250 |  | 1,234.5 | 25.0 |  |  |  |  |",
        f"| routed | 20 | {cells} |".replace("0.250 |", "0.250 |  |  |", 1),
    ]
    training, held_out, choice = books_report.over_training(found)
    assert list(training.lines) == list(held_out.lines) == ["plain", "routed"]
    assert choice.lines == {"layer 3": ([10, 20], [0.1 * 3] * 2), "layer 11": ([10, 20], [0.1 * 11] * 2)}
    by_position, right, nats = books_report.over_length(found)
    assert by_position.lines["routed"] == ((512, 1024, 1536, 2048, 3000), (9, 5, 4, 2, 7))
    assert right.lines == {"routed": ([1024, 2048], [pytest.approx(100 / 6), 100])}
    reported("books", runs=str(tmp_path / "runs"), out=str(tmp_path / "out"))
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"table.md", "training.png", "length.png"}
    (tmp_path / "runs" / "plain" / "needle.csv").write_text("length,depth\n1,2\n")
    with pytest.raises(ValueError, match="plain/needle.csv: no column 'accuracy'"):
        books_report.read(tmp_path / "runs")
