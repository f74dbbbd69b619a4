"""The command line of every experiment: --config and --workdir, with misspelt names, stray words and odd values
refused."""

import sys
from collections.abc import Callable

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from experiments.usage import of_field, quiet

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "experiment file, e.g. configs/quickstart.py:efla", lock_config=True
)
WORKDIR = flags.DEFINE_string("workdir", None, "folder that the run writes to")


def parse(argv: list[str]) -> list[str]:
    """absl's parser, with a one-line answer where ml_collections would raise a traceback."""
    for word in argv[1:]:
        name = word.lstrip("-").split("=")[0].split(".")
        if word.startswith("--config.") and len(name) == 2 and "{" in word:
            stop(f"{word.split('=')[0]}: a section cannot be replaced; set its fields one by one.")
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:  # an error inside the experiment file arrives as text, its traceback included
        stop(str(error).strip().splitlines()[-1] if "Traceback" in str(error) else str(error))
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        stop(of_field(error))
    return []


def stop(message: str) -> None:
    """End the program with exit status 2 and one line."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check(argv: list[str], required: tuple[str, ...] = ("config", "workdir")) -> None:
    """Refuse stray words and missing flags."""
    if len(argv) > 1:
        stop(f"stray argument {argv[1]!r}: write --name=value, and --config.flag=false for a false boolean.")
    for name in required:
        if flags.FLAGS[name].value in (None, ""):
            stop(f"--{name} is missing; see the head of {argv[0]} for a whole command.")
    if "config" in required and not isinstance(flags.FLAGS.config, ConfigDict):
        file = config_flags.get_config_filename(flags.FLAGS["config"])
        stop(f"--config={file}: this experiment file cannot be loaded (is the path right, seen from here?).")


def run(main: Callable[[list[str]], None]) -> None:
    """Run main(argv). What is wrong with input, files, numbers or a missing extra is one line and exit status 1."""

    def guarded(argv: list[str]) -> None:
        quiet()
        try:
            main(argv)
        except (ValueError, FloatingPointError, OSError, ImportError, RuntimeError) as error:
            if flags.FLAGS.traceback:
                raise
            print(f"error: {error}\n(--traceback shows where)", file=sys.stderr)
            raise SystemExit(1) from None
        except KeyboardInterrupt:  # 128 + SIGINT, as shells have it
            raise SystemExit(130) from None

    app.run(guarded, flags_parser=parse)


flags.DEFINE_bool("traceback", False, "show the whole traceback of an error")
