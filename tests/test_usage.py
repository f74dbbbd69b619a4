"""How programs answer: what is wrong in one line, and nothing of what libraries tell about themselves."""

import pytest
from absl import app, logging

from experiments import usage


@pytest.fixture
def verbosity():
    before = logging.get_verbosity()
    logging.set_verbosity(logging.INFO)
    yield
    logging.set_verbosity(before)


def test_no_program_repeats_every_step_of_orbax(verbosity):
    seen = []
    usage.one_line(lambda argv: seen.append(logging.get_verbosity()), [])
    assert seen == [logging.WARNING]


def test_wrong_input_is_one_line(verbosity, capsys):
    def main(argv):
        raise app.UsageError(f"{argv[0]} is missing")

    with pytest.raises(SystemExit) as status:
        usage.one_line(main, ["--runs"])
    assert status.value.code == 2 and capsys.readouterr().err == "error: --runs is missing\n"


def test_ctrl_c_is_a_status(verbosity, capsys):
    def main(argv):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as status:
        usage.one_line(main, [])
    assert status.value.code == 130 and capsys.readouterr().err == ""
