"""How a report was made: its command, those that trained its runs, and the hours that they took."""

import pathlib
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from efla_jax import metrics
from experiments import runs

COMMANDS = "commands.txt"  # of a sweep's folder, a line each


class Spent(NamedTuple):
    """runs: how many there are; timed: of how many of them the time is known; seconds: theirs; devices: known ones."""

    runs: int
    timed: int
    seconds: float
    devices: tuple[str, ...]


def command_line(program: str, words: Sequence[str]) -> str:
    """What was typed to run `program` with the words behind its name, as a shell reads it."""
    return shlex.join(["python", "-m", f"experiments.{program}", *words])


def note_command(folder: pathlib.Path, line: str) -> None:
    """Add a line to COMMANDS of a folder of runs, once."""
    file = folder / COMMANDS
    known = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    if line not in known:
        file.write_text("\n".join((*known, line, "")), encoding="utf-8")


def step_seconds(file: pathlib.Path) -> float | None:
    """Seconds of the steps of a metrics.jsonl whose rows have them; None if none has."""
    seconds, before, known = 0.0, 0, False
    for row in metrics.read_rows(file):
        if "step_seconds" in row:
            seconds += row["step_seconds"] * (row["step"] - before)
            known = True
        before = int(row["step"])
    return seconds if known else None


def spent(folder: pathlib.Path) -> Spent:
    """The time of all runs below a folder, or of the one run whose folder it is: of a sweep's program of several runs
    each its share, of others the steps that were logged, without what was compiled, scored and saved."""
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in runs.swept_rows(folder)}
    files = {file.parent.name: file for file in (*folder.glob("*/metrics.jsonl"), *folder.glob("metrics.jsonl"))}
    each = []
    for name in sorted({*rows, *files}):
        row = rows.get(name, {})
        if "seconds" in row:
            each.append(row.get("share", row["seconds"] / row["together"]))  # older rows: until that run ended
        else:
            each.append(step_seconds(files[name]) if name in files else None)
    known = [seconds for seconds in each if seconds is not None]
    devices = sorted({row["device"] for row in rows.values() if "device" in row})
    return Spent(len(each), len(known), sum(known), tuple(devices))


def sentence(of: Spent) -> str:
    """The hours, and of what."""
    if not of.timed:
        return f"Runs: {of.runs}, none with a record of its time."
    time = f"{of.seconds / 3600:.2f} hours" if of.seconds >= 360 else f"{of.seconds / 60:.1f} minutes"
    where = f" of {' and '.join(of.devices)}" if of.devices else ""
    without = f"; {of.runs - of.timed} without a record of time" if of.timed < of.runs else ""
    return f"Runs: {of.runs}, {time}{where} (logged steps; of a program of several runs each its share{without})."


def append(table: pathlib.Path, line: str, folder: pathlib.Path) -> None:
    """Write below a report's table how it was made: by `line`, from the runs below `folder`."""
    file = folder / COMMANDS
    lines = [*(file.read_text(encoding="utf-8").splitlines() if file.is_file() else ()), line]
    text = "\n".join((sentence(spent(folder)), "", "```", *lines, "```", ""))
    table.write_text(f"{table.read_text(encoding='utf-8').rstrip()}\n\n{text}", encoding="utf-8")
