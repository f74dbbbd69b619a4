"""Continuations of many prompts: a file of prompts in, a file of answers out, written as they come and resumable.

Prompts are a .jsonl file with the field "prompt" (or "text") in each line, whose other fields are carried along, or a
.txt file of one prompt per line. A line of the answers has the prompt's number `index`, `sample`, `prompt`, `text`,
`finish`, the number of `tokens`, and `settings`, a hash of all that decides the text. What a row says is decided by its
prompt, the seed and the number of its sample, not by the rows beside it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from efla_jax.generate import Prefix, stream_of
from efla_jax.generate.text import LEFT_CONTEXT
from experiments.generation import Answer, Generator, repeated

OWN = ("index", "sample", "prompt", "text", "finish", "tokens", "settings", "error")


class Job(NamedTuple):
    """One answer to be had: the number of the prompt and of the sample, and the prompt's ids."""

    index: int
    sample: int
    ids: list[int]


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a file, each with the fields that came with it. Raises ValueError naming file and line."""
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"--prompts={path}: not a .txt file (a prompt in each line) or .jsonl file.")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: U+2028 may stand inside a prompt
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts={path}: not UTF-8 ({error}); convert it first.") from None
    rows = []
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        if path.suffix == ".txt":
            rows.append({"prompt": line})
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"--prompts={path}, line {number}: not JSON ({error}).") from None
        text = row.get("prompt", row.get("text")) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise ValueError(f'--prompts={path}, line {number}: no text in "prompt" (or "text").')
        rows.append({**{key: x for key, x in row.items() if key not in OWN}, "prompt": text})
    if not rows:
        raise ValueError(f"--prompts={path}: there is no prompt in it.")
    return rows


def settings_of(generator: Generator, context: Sequence[int]) -> str:
    """A hash of what decides the text behind a prompt; context: ids of the snapshot in front of it."""
    told = [generator.identity, generator.choice._asdict(), generator.stops, generator.max_tokens, list(context)]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def answered(out: Path, prompts: Sequence[Mapping[str, Any]], settings: str) -> dict[tuple[int, int], dict[str, Any]]:
    """The answers that a file has already, by (index, sample); those with an error are to be tried again. A line that
    was cut off when its program was stopped is dropped. Raises ValueError for answers of other prompts or settings."""
    if not out.is_file():
        return {}
    found: dict[tuple[int, int], dict[str, Any]] = {}
    lines = out.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            index, sample = row["index"], row["sample"]
        except (ValueError, KeyError, TypeError):
            if number == len(lines):  # behind the last line break
                break
            raise ValueError(
                f"--out={out}, line {number}: not an answer of this program; give another file, or --overwrite."
            ) from None
        if row["settings"] != settings or index >= len(prompts) or row["prompt"] != prompts[index]["prompt"]:
            raise ValueError(
                f"--out={out}, line {number}: an answer of another prompt, model or setting; give the same ones to go"
                " on, another file, or --overwrite."
            )
        if "error" not in row:
            found[index, sample] = row
    write_rows(out, found)  # whole lines only, so that the next ones can be appended
    return found


def write_rows(out: Path, rows: Mapping[tuple[int, int], Mapping[str, Any]]) -> None:
    """All answers in the order of their prompts, in place of the file that is there."""
    unfinished = out.with_name(f"{out.name}.part")
    with open(unfinished, "w", encoding="utf-8") as file:
        for key in sorted(rows):
            file.write(json.dumps(rows[key], ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, out)


def batches(jobs: Sequence[Job], size: int) -> Iterator[list[Job]]:
    """Jobs of about equal length together."""
    ordered = sorted(jobs, key=lambda job: (len(job.ids), job.index, job.sample))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def answers_of(
    generator: Generator, batch: Sequence[Job], size: int, prefix: Prefix | None, context: Sequence[int]
) -> list[Answer | str]:
    """The answer of each job, or what went wrong with it. Batches are filled up to `size` rows: one program for all."""
    filled = [*batch, *batch[-1:] * (size - len(batch))]
    try:
        read = generator.read([job.ids for job in filled], repeated(prefix, size))
        before = [[*context[-LEFT_CONTEXT:], *job.ids] for job in batch]
        streams = [stream_of([*context, *job.ids], job.sample) for job in filled]
        return list(generator.answers(read, before, streams))
    except FloatingPointError as error:
        if len(batch) == 1:
            return [str(error)]
        return [answers_of(generator, [job], size, prefix, context)[0] for job in batch]  # the others are not to blame


def run_batch(
    generator: Generator, prompts: Sequence[Mapping[str, Any]], out: Path, *, samples: int = 1, batch_size: int = 16,
    prefix: Prefix | None = None, context: Sequence[int] = (), overwrite: bool = False,
) -> int:  # fmt: skip
    """Answer what is not answered in `out` yet; how many answers could not be had. context: ids of the prefix."""
    settings = settings_of(generator, context)
    out.parent.mkdir(parents=True, exist_ok=True)
    if overwrite:
        out.unlink(missing_ok=True)
    rows = answered(out, prompts, settings)
    known = len(rows)
    ids = [generator.encode(row["prompt"], first=prefix is None) for row in prompts]
    jobs = [Job(i, s, ids[i]) for i in range(len(prompts)) for s in range(samples) if (i, s) not in rows]
    size, failed = min(batch_size, len(jobs)), 0
    with open(out, "a", encoding="utf-8") as file, tqdm(total=known + len(jobs), initial=known, unit="text") as bar:
        for batch in batches(jobs, size or 1):
            for job, answer in zip(batch, answers_of(generator, batch, size, prefix, context), strict=True):
                row = {"index": job.index, "sample": job.sample, **prompts[job.index]}
                if isinstance(answer, str):
                    failed += 1
                    row |= {"error": answer}
                else:
                    row |= {"text": answer.text, "finish": answer.finish, "tokens": len(answer.tokens)}
                row["settings"] = settings
                rows[job.index, job.sample] = row
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            bar.update(len(batch))
    write_rows(out, rows)
    return failed
