"""experiments.generate: one prompt, files of prompts that are gone on with, snapshots, conversations, refusals."""

import csv
import json
import types

import jax
import pytest

from configs import quickstart
from efla_jax import train
from efla_jax.checkpoint import Checkpointer
from efla_jax.generate import generate
from efla_jax.train import settings
from experiments import generate as program
from experiments import generate_batch, generate_session, generate_throughput, generation

SHORT = ("--max_tokens=12", "--piece=16", "--block=4")
DRAWN = (*SHORT, "--temperature=0.9", "--top_k=40", "--seed=5")
PROMPTS = ["delta rule", "state", "key erase write 北", "delta rule"]


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """(folder of a run over bytes that was never trained, its model and parameters)."""
    config = quickstart.get_config("efla")
    config.mesh.data = 1
    config.data.path, config.data.valid_fraction, config.data.window = str(corpus), 0.2, 24
    config.model.width, config.model.depth, config.model.mlp_width = 16, 1, 24
    config = train.plain(config)
    parts = settings.build(config)
    state = jax.jit(parts.begin)()
    state = state._replace(params=jax.tree.map(lambda x: 3 * x, state.params))  # decides more clearly than a fresh one
    folder = tmp_path_factory.mktemp("runs") / "bytes"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save(3, state, parts.dataset.train_iterator().get_state(), {"tokenizer": "bytes"})
    return folder, parts.model, state.params


def said(capsys, folder, *words):
    """What a command line writes to standard output."""
    capsys.readouterr()
    program.main([f"--run={folder}", *words])
    return capsys.readouterr().out


def next_tokens(trained, ids, **options):
    _, model, params = trained
    return generate(model, params, [list(ids)], max_new_tokens=12, piece=16, block=4, stop_token=0, **options)[0]


def expected(trained, prompt, **options):
    return bytes(next_tokens(trained, prompt.encode(), **options)).decode(errors="replace")


def test_one_prompt_is_continued_as_the_library_does(trained, capsys, tmp_path):
    options = {"temperature": 0.9, "top_k": 40, "seed": 5}
    for prompt in PROMPTS[:3]:
        text = said(capsys, trained[0], f"--prompt={prompt}", *DRAWN)
        assert text == expected(trained, prompt, **options) + "\n"
    (tmp_path / "long.txt").write_text(PROMPTS[2] * 5, encoding="utf-8")
    text = said(capsys, trained[0], f"--prompt_file={tmp_path / 'long.txt'}", *SHORT, "--temperature=0")
    assert text == expected(trained, PROMPTS[2] * 5, greedy=True) + "\n"
    program.main([f"--run={trained[0]}", "--prompt=", *SHORT])  # begins with EOS
    assert "12 tokens, length" in capsys.readouterr().err


def test_one_token_has_no_speed(trained, capsys):
    program.main([f"--run={trained[0]}", "--prompt=state", "--max_tokens=1"])
    told = capsys.readouterr().err
    assert "(1 tokens, length" in told and "s to the first)" in told and "tokens/s" not in told


def test_samples_are_streams_of_one_seed(trained, capsys):
    lines = said(capsys, trained[0], "--prompt=state", "--samples=3", "--batch_size=2", *DRAWN).splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["sample"] for row in rows] == [0, 1, 2] and len({row["text"] for row in rows}) == 3
    assert rows[0]["text"] == expected(trained, "state", temperature=0.9, top_k=40, seed=5)
    one = said(capsys, trained[0], "--prompt=state", "--samples=3", "--batch_size=1", *DRAWN).splitlines()
    assert [json.loads(line) for line in one] == rows


def test_a_stop_token_ends_the_text_unless_it_is_ignored(trained, capsys):
    whole = expected(trained, "state", temperature=0.9, top_k=40, seed=5)
    ids = next_tokens(trained, b"state", temperature=0.9, top_k=40, seed=5)
    file = trained[0] / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [200, ids[5]]}))
    try:
        program.main([f"--run={trained[0]}", "--prompt=state", *DRAWN])
        out, err = capsys.readouterr()
        assert out[:-1] == bytes(ids[: ids.index(ids[5])]).decode(errors="replace") and "stop_token" in err
        assert said(capsys, trained[0], "--prompt=state", "--ignore_eos", *DRAWN)[:-1] == whole
    finally:
        file.unlink()


def test_a_stop_string_ends_the_text_and_is_not_shown(trained, capsys):
    whole = said(capsys, trained[0], "--prompt=state", *DRAWN)[:-1]
    stop = whole[4:6]
    text = said(capsys, trained[0], "--prompt=state", f"--stop={stop}", r"--stop=\n\n\n", *DRAWN)[:-1]
    assert text == whole[: whole.index(stop)] and len(text) <= 4
    assert program.unescaped(r"a\nb\t\\n") == "a\nb\t\\n"


def read_rows(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_file_of_prompts_says_what_each_says_alone(trained, capsys, tmp_path):
    """In its order, whatever the batches; other fields are carried; equal prompts say the same; .txt is the same."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "new" / "answers.jsonl"
    rows = [{"prompt": prompt, "id": 10 * i} for i, prompt in enumerate(PROMPTS)]
    prompts.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    words = (f"--prompts={prompts}", f"--out={out}", "--samples=2", "--batch_size=2", *DRAWN)
    said(capsys, trained[0], *words)
    answers = read_rows(out)
    assert [(a["index"], a["sample"], a["id"]) for a in answers] == [(i, s, 10 * i) for i in range(4) for s in (0, 1)]
    for answer in answers[::2]:
        assert answer["text"] == expected(trained, answer["prompt"], temperature=0.9, top_k=40, seed=5)
        assert answer["finish"] in ("length", "stop_token") and answer["tokens"] <= 12
    assert [a["text"] for a in answers[:2]] == [a["text"] for a in answers[6:]]
    assert answers[0]["text"] != answers[1]["text"]
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    words = (f"--prompts={tmp_path / 'prompts.txt'}", f"--out={tmp_path / 'b.jsonl'}", "--batch_size=2", *DRAWN)
    said(capsys, trained[0], *words)
    assert [a["text"] for a in read_rows(tmp_path / "b.jsonl")] == [a["text"] for a in answers[::2]]


def test_an_interrupted_file_is_gone_on_with(trained, capsys, tmp_path):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
    words = (f"--prompts={prompts}", f"--out={out}", "--batch_size=2", *DRAWN)
    said(capsys, trained[0], *words)
    whole = out.read_bytes()
    lines = whole.split(b"\n")
    kept = json.loads(lines[2]) | {"text": "kept as it is"}
    out.write_bytes(json.dumps(kept).encode() + b"\n" + lines[0][:-20])  # stopped while it wrote
    said(capsys, trained[0], *words)
    rows = read_rows(out)
    assert rows == [kept if i == 2 else json.loads(line) for i, line in enumerate(lines[:4])]
    said(capsys, trained[0], *words)  # there is nothing left to do
    assert read_rows(out) == rows
    for other in ("--seed=6", "--stop=x", "--max_tokens=5"):
        with pytest.raises(SystemExit, match="answers.jsonl, line 1: an answer of another prompt, model or setting"):
            said(capsys, trained[0], *words, other)
    assert read_rows(out) == rows
    said(capsys, trained[0], *words, "--overwrite")
    assert out.read_bytes() == whole
    prompts.write_text("others", encoding="utf-8")
    with pytest.raises(SystemExit, match="line 1: an answer of another prompt"):
        said(capsys, trained[0], *words)
    out.write_text("notes\n{}\n")
    with pytest.raises(SystemExit, match="line 1: not an answer of this program"):
        said(capsys, trained[0], *words)


def test_a_prompt_that_breaks_the_model_costs_no_other_answer(trained, capsys, tmp_path, monkeypatch):
    """Its line says why, the exit status is 1, and it is tried again by the same command line."""
    params = trained[2]
    table = params["params"]["embed"]["embedding"].at[ord("!")].set(float("nan"))
    broken = {"params": {**params["params"], "embed": {"embedding": table}}}
    prompts, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("state\nkey!\nrule", encoding="utf-8")
    words = [f"--run={trained[0]}", f"--prompts={prompts}", f"--out={out}", "--batch_size=2", "--temperature=0", *SHORT]
    opened = program.open_run
    with monkeypatch.context() as patch:
        patch.setattr(program, "open_run", lambda chosen: opened(chosen)._replace(params=broken))
        for _ in range(2):
            with pytest.raises(SystemExit, match="error: 1 texts could not be had"):
                program.main(words)
            rows = read_rows(out)
            assert [row["prompt"] for row in rows] == ["state", "key!", "rule"]
            assert "prompts[0]: from its token" in rows[1]["error"] and "text" not in rows[1]
            assert rows[0]["text"] == expected(trained, "state", greedy=True)
            assert rows[2]["text"] == expected(trained, "rule", greedy=True)


def test_a_text_is_read_once_and_gone_on_from(trained, capsys, tmp_path):
    snapshot, manual = tmp_path / "manual.npz", PROMPTS[2] * 3
    (tmp_path / "manual.txt").write_text(manual, encoding="utf-8")
    (tmp_path / "prompts.txt").write_text("state\nkey", encoding="utf-8")
    assert said(capsys, trained[0], f"--prompt_file={tmp_path / 'manual.txt'}", f"--save={snapshot}", *SHORT) == ""
    for prompt in ("state", "key"):
        text = said(capsys, trained[0], f"--load={snapshot}", f"--prompt={prompt}", "--temperature=0", *SHORT)
        assert text == expected(trained, manual + prompt, greedy=True) + "\n"
    out = tmp_path / "answers.jsonl"
    words = (f"--load={snapshot}", f"--prompts={tmp_path / 'prompts.txt'}", f"--out={out}", "--temperature=0", *SHORT)
    said(capsys, trained[0], *words)
    texts = [row["text"] for row in read_rows(out)]
    assert texts == [expected(trained, manual + prompt, greedy=True) for prompt in ("state", "key")]
    longer = tmp_path / "longer.npz"
    said(capsys, trained[0], f"--load={snapshot}", "--prompt= more", f"--save={longer}", *SHORT)
    text = said(capsys, trained[0], f"--load={longer}", "--prompt=", "--temperature=0", *SHORT)
    assert text == expected(trained, manual + " more", greedy=True) + "\n"
    with pytest.raises(SystemExit, match="made of|line 1: an answer of another prompt, model or setting"):
        said(capsys, trained[0], *words, f"--load={longer}")  # the same prompts behind another text


@pytest.fixture
def session(trained):
    words = [f"--run={trained[0]}", "--temperature=0", *SHORT]
    generator = program.made(program.parser().parse_args(words))
    parts = []
    return generate_session.Session(generator, parts.append), parts


def test_a_conversation_is_one_text(trained, session, tmp_path):
    """Turns, undone and repeated ones, saved and loaded ones: always what the whole text gives when it is read anew."""
    session, parts = session
    tokens = []

    def turn(line):
        parts.clear()
        assert session.say(line)
        return "".join(parts)

    for line, added in (("delta rule", "delta rule"), ("//北", "/北"), ("", "")):
        answer = turn(line)
        tokens += added.encode()
        more = next_tokens(trained, tokens, greedy=True)
        assert answer == bytes(more).decode(errors="replace") + "\n"
        tokens += more
        assert list(session.now.tokens) == tokens
    assert turn("/text").endswith(f"\n({len(tokens)} tokens)\n") and turn("/text").startswith("delta rule")
    file = tmp_path / "text.npz"
    assert turn(f"/save {file}") == f"{len(tokens)} tokens are in {file}\n"
    last = turn("state")
    turn("/undo")
    assert list(session.now.tokens) == tokens and turn("state") == last
    assert turn("/undo") == "" and turn("/undo").startswith("error: /undo: there is no turn")
    turn("/reset")
    assert session.now == generate_session.Turn()
    assert turn(f"/load {file}") == f"the text has {len(tokens)} tokens\n"
    assert list(session.now.tokens) == tokens and turn("state") == last
    turn("/undo")
    turn("/set temperature 2.5")
    first, second = turn("state"), turn("/again")
    assert first != second
    turn("/undo")
    turn("/set seed 0")
    assert turn("state") == first


@pytest.mark.parametrize(
    "line, message",
    [
        ("/sing", "error: /sing is no command"),
        ("/save", "error: /save: name a file"),
        ("/save a.npz", "error: /save: there is no text yet"),
        ("/load none.npz", "error: snapshot='none.npz': there is no such file"),
        ("/set depth 3", "error: /set depth: not one of temperature"),
        ("/set top_p 1.5", "error: top_p: 1.5"),
        ("/set top_k many", "error: /set top_k: 'many' is not a number"),
        ("/set max_tokens 0", "error: /set max_tokens: 0 is not positive"),
        ("/help", "What you type is added"),
    ],
)
def test_a_wrong_command_leaves_the_conversation_as_it_was(session, line, message):
    session, parts = session
    choice = session.generator.choice
    assert session.say(line) and "".join(parts).startswith(message)
    assert session.now == generate_session.Turn() and session.generator.choice == choice
    assert not session.say("/quit")


def test_ctrl_c_ends_the_text_and_not_the_conversation(session, monkeypatch):
    session, parts = session
    session.generator.max_tokens = 400
    shown = []

    def write(text):
        shown.append(text)
        if len(shown) == 3:
            raise KeyboardInterrupt

    session.write = write
    assert session.say("delta")
    assert 0 < len(session.now.pending) < 400
    session.generator.max_tokens, session.write = 3, parts.append
    assert session.say("rule") and session.now.text.startswith("delta") and "rule" in session.now.text

    def interrupted(prompts, prefix):
        raise KeyboardInterrupt

    before = session.now
    session.generator.read = interrupted
    assert session.say("rule") and session.now == before


def test_typed_lines():
    lines = iter(["one", "two\\", "", "three\\"])

    def ask(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    assert list(generate_session.typed_lines(ask)) == ["one", "two\n", "three"]


def test_lines_on_standard_input_are_a_conversation(trained, capsys, monkeypatch):
    lines = iter(["state", "/quit", "key"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    text = said(capsys, trained[0], "--temperature=0", *SHORT)
    assert text == expected(trained, "state", greedy=True) + "\n" and next(lines) == "key"


def test_stop_tokens_come_from_tokenizer_and_generation_config(tmp_path):
    tokenizer, model = types.SimpleNamespace(eos_id=7), types.SimpleNamespace(vocab_size=100)
    run = types.SimpleNamespace(tokenizer=tokenizer, folder=tmp_path, model=model)
    assert generation.stop_tokens(run) == (7,)
    for named, ids in (([3, 9, 200], (3, 7, 9)), (4, (4, 7)), (None, (7,))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert generation.stop_tokens(run) == ids


@pytest.mark.parametrize(
    "words, message",
    [
        (["--prompts=p.jsonl"], "--out: missing"),
        (["--prompt=a", "--out=b.jsonl"], "--out and --overwrite go with --prompts"),
        (["--save=a.npz"], "--save: needs a --prompt"),
        (["--samples=2"], "--samples goes with prompts"),
        (["--prompt=a", "--stop="], "--stop: an empty string"),
        (["--prompt=a", "--top_p=0"], "top_p: 0.0"),
        (["--prompt=a", "--temperature=nan"], "temperature: nan"),
        (["--prompt=a", "--load=none.npz"], "--load=none.npz: there is no such file"),
        (["--prompt_file=none.txt"], r"--prompt_file=none.txt: cannot be read \(No such file or directory\)"),
        (["--prompt=a", "--save=."], "--save=.: no file can be written there"),
        (["--prompts=none.jsonl", "--out=b.jsonl"], "none.jsonl"),
        (["--prompts=none.csv", "--out=b.jsonl"], "none.csv: not a .txt file"),
    ],
)
def test_what_does_not_go_is_one_line(tmp_path, monkeypatch, words, message):
    """Before the run is looked for."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        program.main(["--run=none", *words])
    with pytest.raises(SystemExit, match="--run=none: no config.json there"):
        program.main(["--run=none"])


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"\n', "line 2: not JSON"),
        ("p.jsonl", '{"question": "a"}', 'line 1: no text in "prompt"'),
        ("p.jsonl", "[1]", 'line 1: no text in "prompt"'),
        ("p.txt", "\n \n", "there is no prompt"),
        ("p.txt", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_prompts_that_cannot_be_read_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        generate_batch.read_prompts(tmp_path / name)
    (tmp_path / name).write_bytes(b'{"text": "a\\u2028b"}\r\n')
    assert [row["prompt"] for row in generate_batch.read_prompts(tmp_path / name)] == (
        ["a\u2028b"] if name == "p.jsonl" else ['{"text": "a\\u2028b"}']
    )


def throughput(tmp_path, *words):
    generate_throughput.main([f"--out={tmp_path}", "--width=32", "--depth=1", "--new=5", "--repeats=1", *words])
    with open(tmp_path / "throughput.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_throughput_is_a_table_of_models_and_batches(tmp_path, capsys):
    rows = throughput(tmp_path, "--configs=configs/quickstart.py:attention", "--batches=2,1", "--prompt=20")
    assert [(row["model"], row["batch"]) for row in rows] == [("quickstart attention", batch) for batch in ("1", "2")]
    for row in rows:
        assert float(row["prefill_tokens_per_second"]) > 0 and float(row["first_token_ms"]) > 0
        step, rate = float(row["decode_ms_per_token"]), float(row["decode_tokens_per_second"])
        assert step * rate == pytest.approx(1e3 * int(row["batch"])) and step > 0
        # 64 slots of keys and values of 2 heads of 16 in float32, and the numbers of two int32
        assert float(row["cache_mib_per_row"]) == pytest.approx((64 * 2 * 32 * 4 + 8) / 2**20)
    text = (tmp_path / "throughput.md").read_text()
    assert "| quickstart attention |" in text and str(tmp_path) not in text
    assert "written" in capsys.readouterr().out


def test_throughput_says_what_did_not_fit_or_cannot_be(tmp_path, monkeypatch):
    def full(model, params, prompts, chosen):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(generate_throughput, "once", full)
    rows = throughput(tmp_path, "--configs=configs/quickstart.py:efla", "--batches=1,16,256")
    assert [(row["batch"], row["note"]) for row in rows] == [("1", "out of memory")]
    assert "out of memory" in (tmp_path / "throughput.md").read_text()
    for words, message in (
        (["--new=1"], "--new=1: decoding is timed from the second"),
        (["--configs=configs/none.py:efla"], "none.py is no file"),
        (["--configs=configs/smnist.py:efla"], "of images"),
        (["--configs="], "name at least one"),
        ([f"--configs={tmp_path}"], "no config.json there"),
    ):
        with pytest.raises(SystemExit, match=message):
            throughput(tmp_path, *words)
