"""The front page of results: what the papers claim, what came out here, and whether that reproduces it.

    python -m experiments.front_page            # writes the tables into experiments/results/README.md and README.md
    python -m experiments.front_page --check    # exit status 1 if they are not what the files beside them say

experiments/results/claims.toml has the claims. Their figures are not typed: {FILE|ROW|COLUMN} is a cell of a table in
a file of experiments/results. A .md file's first table is meant, or #2, #3 ...; ROW is how the row's first cells begin,
joined by commas. In a .csv or .jsonl ROW is column=value pairs, joined by semicolons. A fourth part is a format for
numbers: {benchmark/benchmark.csv|implementation=chunked; T=8192|ms|.2f}. A cell that ends in words behind its number
can be cut there: {smnist/table.md|efla, lr 0.001|noise|[} is what stands before the bracket.
"""

import csv
import json
import pathlib
import re
import sys
import tomllib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
VERDICTS = ("reproduces", "partly", "does not", "not run")
FIELDS = ("claim", "published", "ours", "verdict", "command")
BEGIN, END = "<!-- claims: python -m experiments.front_page -->", "<!-- end of claims -->"
REFERENCE = re.compile(r"\{([^{}|]+)\|([^{}|]+)\|([^{}|]+)(?:\|([^{}|]+))?\}")


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a Markdown text, each a list of rows of cells, headings first."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not inside:
            found.append([])
        inside = True
        if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            found[-1].append(cells)
    return found


def records(file: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a .csv or .jsonl file."""
    with open(file, newline="", encoding="utf-8") as lines:
        if file.suffix == ".csv":
            return list(csv.DictReader(lines))
        return [json.loads(line) for line in lines if line.strip()]


def only(found: list, what: str) -> Any:
    """The one element of a list. Raises ValueError if there is none, or another."""
    if len(found) != 1:
        raise ValueError(f"{what}: {len(found)} rows are meant; name exactly one.")
    return found[0]


def cell(file: str, row: str, column: str, how: str = "", folder: pathlib.Path = RESULTS) -> str:
    """What a reference stands for. Raises ValueError for a file, row or column that is not there."""
    name, _, number = file.partition("#")
    path, what = folder / name, f"{{{file}|{row}|{column}}}"
    if not path.is_file():
        raise ValueError(f"{what}: {path.name} is no file of experiments/results.")
    if path.suffix == ".md":
        found = tables(path.read_text(encoding="utf-8"))
        chosen = int(number or 1)
        if not 1 <= chosen <= len(found):
            raise ValueError(f"{what}: the file has {len(found)} tables.")
        heading, *rows = found[chosen - 1]
        match = [dict(zip(heading, one, strict=True)) for one in rows if (", ".join(one) + ",").startswith(row + ",")]
    else:
        pairs = [pair.partition("=")[::2] for pair in row.split("; ")]
        rows_of = [one for one in records(path) if column in one]
        match = [one for one in rows_of if all(str(one.get(name)) == value for name, value in pairs)]
    record = only(match, what)
    if column not in record:
        raise ValueError(f"{what}: the columns are {', '.join(record)}.")
    value = str(record[column])
    if how in ("", "[", "("):
        return value.split(how)[0].strip() if how else value
    return format(float(value), how)


def filled(text: str, folder: pathlib.Path = RESULTS) -> str:
    """A text with what its references stand for."""
    return REFERENCE.sub(lambda found: cell(*(part or "" for part in found.groups()), folder), text)


def read_claims(file: pathlib.Path = RESULTS / "claims.toml") -> dict[str, list[dict[str, str]]]:
    """paper -> its claims, figures filled in. Raises ValueError for a claim without a field, or with an odd verdict."""
    found: dict[str, list[dict[str, str]]] = {}
    for paper, claims in tomllib.loads(file.read_text(encoding="utf-8")).items():
        for claim in claims:
            missing = [name for name in FIELDS if name not in claim]
            if missing or set(claim) - set(FIELDS):
                raise ValueError(f"{file.name}: {claim.get('claim')!r} must have exactly {', '.join(FIELDS)}.")
            if claim["verdict"] not in VERDICTS:
                raise ValueError(f"{file.name}: verdict={claim['verdict']!r} must be one of {', '.join(VERDICTS)}.")
            found.setdefault(paper, []).append({**claim, "ours": filled(claim["ours"], file.parent)})
    return found


def rows(claims: list[dict[str, str]], fields: tuple[str, ...]) -> str:
    """A Markdown table of claims."""
    lines = [f"| {' | '.join(fields)} |", "| --- " * len(fields) + "|"]
    for claim in claims:
        shown = {**claim, "command": f"`{claim['command']}`" if claim["command"] else ""}
        lines.append(f"| {' | '.join(shown[field] for field in fields)} |")
    return "\n".join(lines)


def counted(claims: list[dict[str, str]]) -> str:
    """How many claims have which verdict, in words."""
    words = {"reproduces": "reproduced", "partly": "in part", "does not": "not reproduced", "not run": "not run"}
    counts = [f"{sum(claim['verdict'] == verdict for claim in claims)} {word}" for verdict, word in words.items()]
    return f"{len(claims)} claims, {', '.join(counts)}"


def front_page(found: dict[str, list[dict[str, str]]]) -> str:
    """All claims, paper after paper, with their commands."""
    every = [claim for claims in found.values() for claim in claims]
    parts = [f"{counted(every)}. What is typed stands in `claims.toml`; the figures of \"ours\" are read from tables of"
             " this folder. The sections below have the seeds, the hardware, what else was found, and all"
             " commands."]  # fmt: skip
    parts += [f"### {paper}\n\n{rows(claims, FIELDS)}" for paper, claims in found.items()]
    return "\n\n".join(parts)


def summary(found: dict[str, list[dict[str, str]]]) -> str:
    """The claims that were run, without their commands."""
    run = [{"paper": paper.partition(" (")[0], **claim} for paper, claims in found.items() for claim in claims
           if claim["verdict"] != "not run"]  # fmt: skip
    every = [claim for claims in found.values() for claim in claims]
    rest = f"{counted(every)}: [all of them, with their commands](experiments/results/README.md)."
    return f"{rows(run, ('paper', 'claim', 'published', 'ours', 'verdict'))}\n\n{rest}"


def replaced(text: str, block: str) -> str:
    """A page with the block between its marks. Raises ValueError for a page without them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN} and {END}.")
    return f"{head}{BEGIN}\n\n{block}\n\n{END}{tail}"


def pages() -> dict[pathlib.Path, str]:
    """The pages as they should be."""
    found = read_claims()
    blocks = {RESULTS / "README.md": front_page(found), ROOT / "README.md": summary(found)}
    return {path: replaced(path.read_text(encoding="utf-8"), block) for path, block in blocks.items()}


def main(words: list[str]) -> None:
    if words in (["-h"], ["--help"]):
        print(__doc__)
        return
    if words not in ([], ["--check"]):
        raise SystemExit(f"error: {' '.join(words)!r}: the only word is --check.")
    stale = {path: text for path, text in pages().items() if path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)}: {'not what claims.toml and the tables say' if words else 'written'}")
        if not words:
            path.write_text(text, encoding="utf-8")
    if stale and words:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
