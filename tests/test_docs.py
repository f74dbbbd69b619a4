"""The guides of docs/: their examples run, their commands can be typed and do what is said, the mixer is added."""

import importlib
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart
from efla_jax import sharding, train
from efla_jax.layers import MIXERS
from tests.test_readme import check_command

ROOT = Path(__file__).resolve().parent.parent
GUIDES = ("use_a_layer", "bring_a_checkpoint", "evaluate", "add_a_mixer")
TEXTS = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in GUIDES}
BLOCK = re.compile(r"(?:(?:New file|In) `(?P<path>[\w/.]+)`)|^```(?P<kind>\w*)\n(?P<text>.*?)^```", re.S | re.M)


def blocks(guide: str, kind: str) -> list[str]:
    """The text of each block of a kind: "python", "diff", or "" for what is typed."""
    return [found["text"] for found in BLOCK.finditer(TEXTS[guide]) if found["kind"] == kind]


def commands(guide: str) -> list[str]:
    lines = "".join(blocks(guide, "")).splitlines()
    return [line for line in lines if line.startswith("python -m ") and "COMMAND" not in line]


ALL = [(guide, command) for guide in GUIDES for command in commands(guide)]


class Edit(types.SimpleNamespace):
    """A new file (old is None), or lines of a file and what stands in their place."""


def edits() -> list[Edit]:
    """What docs/add_a_mixer.md does to the checkout, in its order."""
    found, path = [], ""
    for part in BLOCK.finditer(TEXTS["add_a_mixer"]):
        path = part["path"] or path
        if part["kind"] == "python":
            found.append(Edit(path=path, old=None, new=part["text"]))
        elif part["kind"] == "diff":
            sides = ["".join(f"{line[1:]}\n" for line in part["text"].splitlines() if line[0] in mark)
                     for mark in (" -", " +")]  # fmt: skip
            found.append(Edit(path=path, old=sides[0], new=sides[1]))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus):
    """A folder with a softmax model of bytes trained for two steps, runs/lm, and its checkpoint in the format of others
    brought along as runs/my_llama."""
    folder = tmp_path_factory.mktemp("guides")
    config = quickstart.get_config("attention")
    config.mesh.data = 1
    config.data.update(path=str(corpus), valid_fraction=0.2, window=16, batch_size=2, eval_batch_size=4)
    config.model.update(width=16, depth=1)
    config.optim.warmup_steps = 1
    config.train.steps = 2
    train.fit(config, folder / "runs/lm")
    convert = importlib.import_module("experiments.convert")
    convert.main(["export", f"--run={folder}/runs/lm", f"--to={folder}/my_llama"])
    convert.main(["import", f"--source={folder}/my_llama", f"--run={folder}/runs/my_llama"])
    return folder


def test_the_guides_are_linked_and_their_links_lead_somewhere():
    readme = (ROOT / "README.md").read_text()
    for guide, text in TEXTS.items():
        assert f"](docs/{guide}.md)" in readme
        for target in re.findall(r"\]\((?!https://)([^)#]+)", re.sub(r"```.*?```", "", text, flags=re.S)):
            assert (ROOT / "docs" / target).exists(), target
    headings = {line.lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)", readme, re.M)}
    assert set(re.findall(r"README.md#([\w-]+)\)", "".join(TEXTS.values()))) <= headings


@pytest.mark.parametrize("guide", [guide for guide in GUIDES if guide != "add_a_mixer"])
def test_examples_run(guide, folder, monkeypatch):
    monkeypatch.chdir(folder)
    known: dict = {}
    assert blocks(guide, "python")
    for number, text in enumerate(blocks(guide, "python")):  # later ones go on with the names of earlier ones
        exec(compile(text, f"{guide}, example {number}", "exec"), known)


@pytest.fixture
def adopted(monkeypatch):
    """The mixer of docs/add_a_mixer.md in the registry, the rules of the mesh and the quickstart, for one test."""
    layer, *_ = edits()
    module = types.ModuleType("efla_jax.layers.mlstm")
    exec(compile(layer.new, layer.path, "exec"), module.__dict__)
    monkeypatch.setitem(MIXERS, "mlstm", module.MLSTM)
    (rule,) = (edit for edit in edits() if edit.path == "efla_jax/sharding.py")
    old, new = (eval(f"[{side}]")[0] for side in (rule.old, rule.new))
    assert old in sharding.RULES
    monkeypatch.setattr(sharding, "RULES", tuple(new if row == old else row for row in sharding.RULES))
    options = next(edit for edit in edits() if edit.path == "configs/quickstart.py").new.splitlines()[-1]
    monkeypatch.setattr(quickstart, "OPTIONS", quickstart.OPTIONS | eval(f"{{{options}}}"))
    monkeypatch.setattr(quickstart, "MIXERS", (*quickstart.MIXERS, "mlstm"))
    return module.MLSTM


@pytest.mark.parametrize("guide, command", ALL)
def test_a_command_can_be_typed(guide, command, adopted):
    if "-m pytest" not in command:
        check_command(command.replace("lm_340m.py:mlstm", "lm_340m.py:efla"))


def test_the_mixer_has_fewer_than_sixty_lines():
    lines = [line for edit in edits() if edit.path.startswith(("efla_jax", "configs"))
             for line in edit.new.splitlines() if line not in (edit.old or "").splitlines()]  # fmt: skip
    assert 30 < len(lines) < 60


def test_every_edit_of_the_mixer_fits():
    for edit in edits():
        if edit.old is None:
            assert not (ROOT / edit.path).exists(), edit.path
        else:
            assert (ROOT / edit.path).read_text().count(edit.old) == 1, (edit.path, edit.old)


def test_the_mixer_is_what_it_says(adopted):
    """Its own tests, as the guide writes them."""
    known: dict = {}
    (edit,) = (edit for edit in edits() if edit.path == "tests/test_mlstm.py")
    exec(compile(edit.new, edit.path, "exec"), known)
    tests = [value for name, value in known.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_the_mixer_in_pieces_packed_and_padded_with_gradients(adopted):
    mixer = MIXERS["mlstm"](width=8, num_heads=2, chunk_size=16)
    x, weights = jax.random.normal(jax.random.key(0), (2, 2, 21, 8))
    params = jax.jit(mixer.init)(jax.random.key(1), x)

    def pieces(params, x):
        start, cache = mixer.apply(params, x[:, :19])
        end, cache = mixer.apply(params, x[:, 19:], cache=cache)
        return jnp.concatenate([start, end], axis=1), cache

    def packed(params, x):  # the second row behind the first, with padding between them
        ids = jnp.concatenate([jnp.ones(21), jnp.zeros(3), jnp.full(21, 2)]).astype(jnp.int32)[None]
        row = jnp.concatenate([x[:1], jnp.full((1, 3, 8), 7.0), x[1:]], axis=1)
        y, cache = mixer.apply(params, row, ids)
        return jnp.concatenate([y[:, :21], y[:, 24:]]), cache

    def outcome(form):
        """(outputs, state), gradients in parameters and input."""

        def loss(params, x):
            y, cache = form(params, x)
            return jnp.sum(weights * y), (y, cache.state[-1:])

        slopes, found = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)
        return found, slopes

    whole = outcome(mixer.apply)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(whole))
    for form in (pieces, packed):  # float32: sums of 21 tokens in another order
        for got, expected in zip(*map(jax.tree.leaves, (outcome(form), whole)), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_the_mixer_trains(adopted, corpus, tmp_path):
    """Two steps; and every parameter has its place on a mesh, heads split."""
    config = quickstart.get_config("mlstm")
    config.mesh.data = 1
    config.data.update(path=str(corpus), valid_fraction=0.2, window=16, batch_size=2, eval_batch_size=4)
    config.model.update(width=16, depth=1)
    config.optim.warmup_steps = 1
    config.train.steps = 2
    run = train.fit(config, tmp_path / "run")
    (bias,) = (leaf for path, leaf in jax.tree.leaves_with_path(run.params) if "a_bias" in str(path))
    assert bias.shape == (1, 2) and np.all(bias != 4.0)
    (place,) = (leaf for path, leaf in jax.tree.leaves_with_path(sharding.specs(run.params)) if "a_bias" in str(path))
    assert place == jax.sharding.PartitionSpec(None, "tensor")


@pytest.mark.slow
def test_every_loop_over_the_mixers_passes(tmp_path):
    """The guide followed to the letter in a copy of the checkout, and the tests that find the mixer by its name."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in (".ci", "efla_jax", "kernels", "configs", "experiments", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignore)
    for file in (file for file in ROOT.iterdir() if file.is_file()):
        shutil.copy(file, tmp_path)
    for edit in edits():
        path = tmp_path / edit.path
        path.write_text(edit.new if edit.old is None else path.read_text().replace(edit.old, edit.new))
    chosen = "(mlstm or recipes_know or sizes or flops or stands_in_the_table or muon or direction) and not test_docs"
    own = [edit.path for edit in edits() if edit.old is None]
    for words in (["ruff", "check", *own], ["pytest", "-q", "-x", "tests", "-k", chosen]):
        done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


PIQA = '{"goal": "To write, use", "sol1": "a pen.", "sol2": "a spoon.", "label": 0}\n'
TINY = {  # instead of the values in the guides: what is small, and lies in the tests' folder
    "suite": "--run=runs/lm --data=evals --tasks=piqa --limit=1",
    "perplexity": "--data=texts --limit=2",
    "per_position": "--data=texts --length=64 --rows=1 --piece=16",
    "plot_positions": "--tables=runs/lm/per_position.csv --labels=lm",
    "ruler": "--haystack=texts --kinds=single_1 --lengths=600 --count=1 --tokens=2",
    "cloze": "--task=synthetic_fda --count=1 --lengths=64",
    "import": "--source=my_llama --run=runs/again",
    "export": "--run=runs/my_llama --to=exported",
    "generate": "--run=runs/lm --max_tokens=2",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_commands_do_what_is_said(name, folder, corpus, monkeypatch):
    """Every kind of command of the guides, once, at a tiny size."""
    monkeypatch.chdir(folder)
    (folder / "evals").mkdir(exist_ok=True)
    (folder / "evals/piqa_validation.jsonl").write_text(PIQA)
    if not (folder / "texts").exists():
        shutil.copytree(corpus, folder / "texts")
    command = [command for _, command in ALL if f" {name} " in command or f".{name} " in command][-1]
    module, *words = shlex.split(command, comments=True)[2:]
    tiny = TINY[name].split()
    replaced = {word.partition("=")[0] for word in tiny}
    kept = [word for word in words if word.partition("=")[0] not in replaced]
    before = {path for path in folder.rglob("*") if path.is_file()}
    importlib.import_module(module).main([*kept, *tiny])
    assert name == "generate" or {path for path in folder.rglob("*") if path.is_file()} - before
