"""The README's Python examples run, and its tables name what exists."""

import re
from pathlib import Path

import pytest

from efla_jax import layers

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
PROSE = re.sub(r"```.*?```", "", README, flags=re.S)
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.S)


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number):
    exec(compile(EXAMPLES[number], f"README example {number}", "exec"), {})


def test_every_mixer_stands_in_the_table():
    table = README.split("## Mixers")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) - {"MIXERS"} == set(layers.MIXERS)


def test_every_linked_file_exists():
    root = Path(__file__).resolve().parent.parent
    for target in re.findall(r"\]\(([^)#]+)\)", PROSE):
        assert target.startswith("https://") or (root / target).exists(), target
