"""The README's Python examples run, its commands can be typed, and its tables name what exists."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from configs import lm_340m
from efla_jax import layers

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"```.*?```", "", README, flags=re.S)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.S | re.M)
EXAMPLES = [text for language, text in BLOCKS if language == "python"]
SHELL = "".join(text for language, text in BLOCKS if not language).replace("\\\n", " ")
COMMANDS = [line for line in SHELL.splitlines() if "python -m " in line]


def test_there_are_examples():
    assert len(EXAMPLES) >= 3 and len(COMMANDS) >= 10


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number):
    exec(compile(EXAMPLES[number], f"README example {number}", "exec"), {})


def has_field(config, path: str) -> bool:
    """Whether a config has a field of this dotted path."""
    for name in path.split("."):
        if not hasattr(config, "keys") or name not in config:
            return False
        config = config[name]
    return True


def check_command(command: str) -> None:
    """Fail for a command line whose module, words, flags or config fields do not exist."""
    words = shlex.split(command, comments=True)
    name = words[words.index("-m") + 1]
    arguments = words[words.index("-m") + 2 :]
    sources = [(ROOT / f"{path}.py").read_text() for path in (name.replace(".", "/"), "experiments/arguments")]
    for path in re.findall(r"^from experiments\.(\w+) import", sources[0], re.MULTILINE):  # flags of its parts
        sources.append((ROOT / "experiments" / f"{path}.py").read_text())
    if "\ndef parser(" in sources[0]:  # a program of argparse, which knows its own words
        importlib.import_module(name).parser().parse_args(arguments)
        return
    if name == "experiments.report":  # commands before flags of absl
        assert f'    "{arguments.pop(0)}": (' in sources[0]
    known = set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', "".join(sources)))
    config = None
    for word in arguments:
        flag, _, value = word.removeprefix("--").partition("=")
        if flag == "config":
            file, _, mixer = value.partition(":")
            config = importlib.import_module(file.removesuffix(".py").replace("/", ".")).get_config(mixer)
        elif flag.startswith("config."):
            assert has_field(config, flag.removeprefix("config.")), word
        else:
            assert word.startswith("--") and flag in known, word


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_can_be_typed(command):
    check_command(command)


def test_fields_named_in_prose_exist():
    named = set(re.findall(r"`(?:-*config\.)?((?:mesh|data|model|optim|train)\.\w+)", PROSE))
    named = {name for name in named if not name.endswith(".py")}
    assert len(named) > 20
    assert not [name for name in named if not has_field(lm_340m.get_config("efla"), name)]


def test_every_mixer_stands_in_the_table():
    table = README.split("## Mixers")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) - {"MIXERS"} == set(layers.MIXERS)


def test_every_linked_file_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", PROSE):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_every_room_exists():
    table = README.split("## Rooms")[1].split("\n## ")[0]
    names = [name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`([\w./]+)`", row)]
    assert len(names) > 15
    assert not [name for name in names if not ((ROOT / name).exists() or (ROOT / "efla_jax" / name).exists())]
