"""Trained language models by the folder of their run, with the tokenizer that makes numbers of text for them.

The tokenizer is --tokenizer, or found: "bytes" where the run was trained on bytes, else a file in the run's folder with
the hash that its checkpoints name. EOS and BOS are --eos and --bos, or what the checkpoint says ("vocabulary" in its
metadata, as `Tokenizer.describe`), or the manifest of the run's data where that is still there.
"""

import argparse
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from efla_jax.data import shards
from efla_jax.data.tokenizer import BYTES, Tokenizer, TokenizerSpec, load_tokenizer
from efla_jax.model import LanguageModel
from efla_jax.scoring import POLICIES, Journal, Scorer
from efla_jax.train import settings
from experiments import runs

TEXT_KINDS = ("text", "tokens")
TOKENIZER_FILES = ("*.json", "*.model", "*.tiktoken")  # that may lie in a run's folder


class Trained(NamedTuple):
    """A language model of a run, how its float32 products are multiplied, its tokenizer, config and step."""

    model: LanguageModel
    params: Any
    folder: pathlib.Path
    precision: str
    tokenizer: Tokenizer | None = None
    config: Mapping[str, Any] = {}
    step: str = ""


def recorded(chosen: argparse.Namespace) -> tuple[pathlib.Path, dict]:
    """(folder, config) of the run --run, which must be one of text."""
    folder, config = runs.recorded(chosen.run, "run")
    if config["data"]["kind"] not in TEXT_KINDS:
        raise ValueError(f"--run={chosen.run}: trained on {config['data']['kind']}; give a run of a language model.")
    return folder, config


def step_folder(path: pathlib.Path) -> pathlib.Path | None:
    """The folder of a step, or of the newest one of a run; None where there is none."""
    if (path / "state").is_dir():
        return path
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = [f for f in root.iterdir() if f.name.isdecimal() and f.is_dir()] if root.is_dir() else []
    return max(steps, key=lambda f: int(f.name), default=None)


def vocabulary_of(path: pathlib.Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a run says of its tokens, of `Tokenizer.describe`: as its checkpoint, else as its data, has it; or {}."""
    folder = step_folder(path)
    try:
        metadata = json.loads((folder / "metadata" / "metadata").read_text())["value"] if folder else {}
    except (OSError, ValueError, KeyError):  # loading the parameters says what is wrong
        metadata = {}
    data, sha256 = config["data"], metadata.get("tokenizer", "")
    manifest = pathlib.Path((data.get("paths") or [data.get("path", "")])[0]) / shards.MANIFEST
    if not metadata.get("vocabulary") and data["kind"] == "tokens" and manifest.is_file():
        known = shards.read_manifest(manifest).tokenizer
        if known["sha256"] == sha256:
            return dict(known)
    return metadata.get("vocabulary") or {"sha256": sha256}


def found_tokenizer(folder: pathlib.Path, sha256: str) -> str:
    """The file in a run's folder that has this hash, "" where there is none."""
    files = (file for pattern in TOKENIZER_FILES for file in sorted(folder.glob(pattern)))
    return next((str(f) for f in files if hashlib.sha256(f.read_bytes()).hexdigest() == sha256), "")


def tokenizer_of(chosen: argparse.Namespace, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of the run --run: see the head of this file."""
    folder, _ = runs.recorded(chosen.run, "run")
    known, in_bytes = vocabulary_of(chosen.run, config), config["data"]["kind"] == "text"
    path = chosen.tokenizer
    if not path:
        path = BYTES if in_bytes or known["sha256"] == BYTES else found_tokenizer(folder, known["sha256"])
    if not path:
        raise ValueError(f"--tokenizer: missing; give the one that the run's data were prepared with (sha256"
                         f" {known['sha256'] or 'unknown'}), or lay it into {folder}.")  # fmt: skip
    ids = {name: str(known[f"{name}_id"]) if known.get(f"{name}_id", -1) >= 0 else "" for name in ("eos", "bos")}
    told = {**ids, "pattern": known.get("pattern", "")} if path != BYTES else {}
    fields = ((getattr(chosen, name) or told.get(name, "")) for name in ("eos", "bos", "pattern"))
    return load_tokenizer(TokenizerSpec(path, *fields))


def trained(chosen: argparse.Namespace, config: dict, folder: pathlib.Path, vocab_size: int, sha256: str) -> Trained:
    """The run --run, whose tokens must be those of the tokenizer with that hash."""
    runs.require_sections(chosen.run, config, "model", "optim", "train")
    vocab_size = vocabulary_of(chosen.run, config).get("vocab_size", vocab_size)
    model = settings.section(config, "model", LanguageModel, {"vocab_size": vocab_size})
    params, known = runs.scored_params(chosen.run, config, model)
    if known != sha256:
        raise ValueError(f"--run={chosen.run}: trained with tokenizer {known!r}, and this one is {sha256!r}: its tokens"
                         " mean something else. Give the run's own.")  # fmt: skip
    step = step_folder(chosen.run)
    return Trained(model, params, folder, config["train"]["matmul_precision"], None, config, step.name if step else "")


def open_run(chosen: argparse.Namespace) -> Trained:
    """The run --run with its tokenizer."""
    folder, config = recorded(chosen)
    tokenizer = tokenizer_of(chosen, config)
    return trained(chosen, config, folder, tokenizer.vocab_size, tokenizer.sha256)._replace(tokenizer=tokenizer)


def run_arguments() -> argparse.ArgumentParser:
    """Which run, its tokenizer, and where results go: the parent of commands about one run."""
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    shared.add_argument("--run", type=pathlib.Path, required=True, help="folder of a run, or of one of its steps")
    shared.add_argument("--tokenizer", default="", help="that of the run's data, where it does not lie with the run")
    for name in ("eos", "bos", "pattern"):
        shared.add_argument(f"--{name}", default="", help="as of prepare_data, where the checkpoint does not say it")
    shared.add_argument("--batch_tokens", type=positive, default=32768, help="tokens of a batch, or one row")
    shared.add_argument("--out", default="", help="folder to write to; the run's by default")
    return shared


def scoring_arguments() -> argparse.ArgumentParser:
    """How text is put to the model: the parent of commands that score it."""
    scoring = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    scoring.add_argument("--max_length", type=limit, default=-1, help="most tokens read for one target; -1: the"
                         " training window, 0: no limit")  # fmt: skip
    scoring.add_argument("--policy", default="auto", choices=POLICIES, help="where BOS (or EOS) stands in front:"
                         " always, of empty contexts only, or auto: always if there is a BOS")  # fmt: skip
    scoring.add_argument("--piece", type=positive, default=4096, help="tokens of a row that are read at a time")
    scoring.add_argument("--limit", type=natural, default=0, help="questions of each task, the first ones; 0: all")
    return scoring


def scorer(chosen: argparse.Namespace, run: Trained, journal: str | pathlib.Path | None) -> Scorer:
    """The scorer of a run with those options; `journal`: the file that keeps its results."""
    window = run.config["data"].get("window", 0)
    return Scorer(
        run.model, run.params, run.tokenizer, policy=chosen.policy, batch_tokens=chosen.batch_tokens,
        max_length=window if chosen.max_length < 0 else chosen.max_length, piece=chosen.piece,
        journal=Journal(journal), precision=run.precision, progress=True,
    )  # fmt: skip


def limit(word: str) -> int:
    """A whole number from -1 on."""
    if word != "-1" and not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from -1 on")
    return int(word)


def natural(word: str) -> int:
    """A whole number from 0 on."""
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 0 on")
    return int(word)


def positive(word: str) -> int:
    """A whole number from 1 on."""
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 1 on")
    return int(word)
