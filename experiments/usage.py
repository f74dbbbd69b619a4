"""How programs with flags of their own, not `arguments`, say what is wrong with a command line."""

import re
import sys
from collections.abc import Callable

from absl import app, flags, logging


def reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file could not be had, for a message that names it already."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is no UTF-8 text"


def of_field(error: Exception) -> str:
    """What ml_collections says of a config field that is not there or does not take a value, as a sentence."""
    text = re.sub(r"[\s'\\]+", " ", str(error.args[0] if error.args else error).replace("\\n", " ")).strip()
    text = re.sub(r"^(\w+) Did", r"no config field is called \1. Did", text)
    return re.sub(r'^"? ?(\w+) ?"?$', r"no config field is called \1 in this experiment file.", text)


def quiet() -> None:
    """No line of orbax and grain about each step that they take, unless --verbosity asks for some."""
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)


def one_line(main: Callable[[list[str]], None], argv: list[str]) -> None:
    """main(argv), with a line and exit status 2 for an app.UsageError: absl would print all of the help before it."""
    quiet()
    try:
        main(argv)
    except app.UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # 128 + SIGINT, as shells have it
        raise SystemExit(130) from None


def parse(argv: list[str]) -> list[str]:
    """absl's parser, with an answer of the same form for a flag that is wrong or missing."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


def run_in_one_line(main: Callable[[list[str]], None]) -> None:
    """Run a program whose main raises app.UsageError for what is wrong with its input."""
    app.run(lambda argv: one_line(main, argv), flags_parser=parse)
