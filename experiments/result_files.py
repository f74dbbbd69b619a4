"""What an evaluation writes: means with their errors as JSON and Markdown, every output as a line of JSON, and the
journal that it goes on from when it is started again."""

import argparse
import json
import pathlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import efla_jax
from efla_jax.scoring import Scorer
from experiments import language_runs


def mean_of(scores: Sequence[float]) -> dict[str, float | int]:
    """{"score": mean, "stderr": its standard error, "count"}; the error of one score is not known, and NaN."""
    values = np.asarray(scores, np.float64)
    error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
    return {"score": float(values.mean()), "stderr": error, "count": len(values)}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with equal keys as a table; numbers to four places, what is missing as a dash."""
    def shown(x: Any) -> str:
        return f"{x:.4f}" if isinstance(x, float) and np.isfinite(x) else "-" if isinstance(x, float) else str(x)

    lines = [list(rows[0]), ["---"] * len(rows[0]), *([shown(x) for x in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def folder_of(chosen: argparse.Namespace, run_folder: pathlib.Path) -> pathlib.Path:
    """Where results go."""
    out = pathlib.Path(chosen.out or run_folder)
    out.mkdir(parents=True, exist_ok=True)
    return out


def write(out: pathlib.Path, name: str, about: Mapping[str, Any], rows: Sequence[Mapping], table: str) -> None:
    """out/NAME.json and NAME.md. What is not finite is null in JSON."""
    finite = [{k: None if isinstance(x, float) and not np.isfinite(x) else x for k, x in row.items()} for row in rows]
    (out / f"{name}.json").write_text(json.dumps({**about, "rows": finite}, indent=1) + "\n")
    (out / f"{name}.md").write_text(table + "\n")


def write_outputs(out: pathlib.Path, name: str, records: Sequence[Mapping[str, Any]]) -> None:
    """out/NAME_outputs.jsonl: what was asked, what was said and what it scored."""
    with open(out / f"{name}_outputs.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def commit() -> str:
    """The commit of this checkout, with "+" behind it where files differ; "" outside of one."""
    def git(*words: str) -> str:
        folder = pathlib.Path(__file__).parent
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def about(chosen: argparse.Namespace, run: language_runs.Trained, scorer: Scorer) -> dict[str, Any]:
    """What results are of: the run with its step, tokenizer, config and number of parameters, the options, the version
    and commit, how contexts begin, and how many requests there were and were cut."""
    options = {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in vars(chosen).items() if k != "command"}
    return {
        "run": str(run.folder), "step": run.step, "tokenizer": run.tokenizer.describe() if run.tokenizer else {},
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.params)), "config": run.config, "options": options,
        "version": efla_jax.__version__, "commit": commit(), "counts": dict(scorer.counts),
        "begin": {"token": scorer.begin.token, "always": scorer.begin.always}, "max_length": scorer.max_length,
    }  # fmt: skip


def opened(chosen: argparse.Namespace, name: str) -> tuple[language_runs.Trained, Scorer, pathlib.Path]:
    """The run, its scorer with the journal NAME.journal.jsonl, and the folder of results."""
    run = language_runs.open_run(chosen)
    out = folder_of(chosen, run.folder)
    return run, language_runs.scorer(chosen, run, out / f"{name}.journal.jsonl"), out
