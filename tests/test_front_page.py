"""The front page of results: its figures are those of the tables beside it, its commands can be typed."""

import re
import shlex

import pytest

from experiments import front_page
from tests.test_readme import check_command

CLAIMS = [claim for claims in front_page.read_claims().values() for claim in claims]


def test_the_pages_are_what_claims_and_tables_say():
    for path, text in front_page.pages().items():
        assert path.read_text() == text, f"{path.name}: run python -m experiments.front_page, and look at the verdicts"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["claim"][:40])
def test_a_claim_has_what_its_verdict_needs(claim):
    assert claim["published"]
    if claim["verdict"] == "not run":
        assert not claim["ours"] or claim["ours"].startswith("(")
    else:
        assert re.search(r"\d", claim["ours"]) and claim["command"]
    if claim["command"]:
        words = shlex.split(claim["command"])
        check_command(shlex.join(word for word in words if word != "--"))


BLOCKS = re.findall(r"^```\n(.*?)^```", (front_page.RESULTS / "README.md").read_text(), re.S | re.M)
TYPED = [line for text in BLOCKS for line in text.replace("\\\n", " ").splitlines() if "python -m experiments." in line]


@pytest.mark.parametrize("command", TYPED)
def test_a_command_of_the_results_can_be_typed(command):
    words = shlex.split(command, comments=True)
    for argument in (word.partition("=")[2].split(",")[0] for word in words if word.startswith("--arguments=")):
        words = [f"{word}:{argument}" if word.startswith("--config=") else word for word in words]  # of a sweep
    check_command(shlex.join(word for word in words if word != "--"))


def test_every_figure_of_ours_is_read_from_a_table():
    """Numbers typed into claims.toml are settings (rates, sizes, positions), never results."""
    text = (front_page.RESULTS / "claims.toml").read_text()
    typed = [front_page.REFERENCE.sub("", line) for line in re.findall(r'^ours = "(.*)"$', text, re.M)]
    assert len(typed) == len(CLAIMS) == text.count("\nclaim = ")
    decimals = [number for line in typed for number in re.findall(r"(?<![\d.])\d+\.\d+", line)]
    assert not decimals, f"{decimals}: name the table that has them"


TABLE = """words

| model | size | loss |
| --- | :--- | ---: |
| a, b | 1 | 0.5 ± 0.1 (2/5) |
| a | 2 | 0.25 [0.2, 0.3] |

| model | loss |
| --- | --- |
| a | 7 |
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "table.md").write_text(TABLE)
    (tmp_path / "runs.csv").write_text("op,T,ms\nx,1,1234.5\nx,2,3\ny,1,4\n")
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 1, "valid_loss": 1.25}\n')
    return tmp_path


def test_references_are_cells(folder):
    text = "{table.md|a, b, 1|loss} {table.md|a, b|loss|(} {table.md|a, 2|loss|[} {table.md#2|a|loss}"
    assert front_page.filled(text, folder) == "0.5 ± 0.1 (2/5) 0.5 ± 0.1 0.25 7"
    assert front_page.filled("{runs.csv|op=x; T=1|ms|,.0f} {runs.csv|op=y|ms}", folder) == "1,234 4"
    assert front_page.filled("{log.jsonl|step=1|valid_loss|.1f} {x}", folder) == "1.2 {x}"


@pytest.mark.parametrize("reference, message", [
    ("{none.md|a|loss}", "none.md is no file of experiments/results"),
    ("{table.md|c|loss}", "0 rows are meant"),
    ("{table.md|a|loss}", "2 rows are meant"),
    ("{table.md|a, 2|los}", "the columns are model, size, loss"),
    ("{table.md#3|a|loss}", "the file has 2 tables"),
    ("{runs.csv|op=x|ms}", "2 rows are meant"),
])  # fmt: skip
def test_a_reference_to_nothing_is_refused(folder, reference, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        front_page.filled(reference, folder)


@pytest.mark.parametrize("change, message", [
    ({"verdict": "perhaps"}, "verdict='perhaps' must be one of reproduces, partly"),
    ({"ours": None}, "'it is fast' must have exactly claim, published, ours, verdict, command"),
])  # fmt: skip
def test_a_claim_that_is_none_is_refused(folder, change, message):
    claim = {"claim": "it is fast", "published": "1", "ours": "{table.md#2|a|loss}", "verdict": "partly", "command": ""}
    lines = [f'{name} = "{value}"' for name, value in (claim | change).items() if value is not None]
    (folder / "claims.toml").write_text("\n".join(['[["Paper"]]', *lines]))
    with pytest.raises(ValueError, match=re.escape(message)):
        front_page.read_claims(folder / "claims.toml")


def test_a_page_keeps_what_stands_around_the_tables():
    page = f"head\n{front_page.BEGIN}\nold\n{front_page.END}\ntail\n"
    assert front_page.replaced(page, "new") == f"head\n{front_page.BEGIN}\n\nnew\n\n{front_page.END}\ntail\n"
    with pytest.raises(ValueError, match="the page has no lines"):
        front_page.replaced("head", "new")


def test_help_says_what_it_does(capsys):
    front_page.main(["--help"])
    assert "--check" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="'--chek': the only word is --check"):
        front_page.main(["--chek"])
