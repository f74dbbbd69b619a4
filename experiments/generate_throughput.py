"""How fast models write on this machine: reading a prompt, the time to the first token, tokens per second from there.

    python -m experiments.generate_throughput            # four small models, minutes on two CPU cores
    python -m experiments.generate_throughput --batches=1,16,256 --prompt=2048 --new=128 --dtype=bfloat16 --configs=\
configs/lm_340m.py:efla,configs/lm_340m.py:gated_delta_net,configs/lm_340m.py:mamba2,configs/lm_340m.py:attention

A model is a config file with its argument, or the folder of a run, whose config is taken; parameters are random, as
time does not depend on them (but for NAtS-L, whose choices do, and with them what a token sees). Every row of a batch
has the same number of random tokens, read in pieces and continued in blocks as `experiments.generate` does it. Times
are medians of --repeats, after one that compiles; those of the first token contain reading the prompt.

Writes throughput.csv after every measurement, and throughput.md, into --out. What needs more memory than there is says
so, and larger batches of that model are left out.
"""

import argparse
import csv
import importlib.util
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from efla_jax import LanguageModel
from efla_jax.generate import BLOCK, PIECE, Choice, Decoding, prefill
from efla_jax.train import settings
from experiments import runs
from experiments.language_runs import positive

CONFIGS = [f"configs/quickstart.py:{mixer}" for mixer in ("efla", "mamba2", "log_linear_mamba2", "attention")]
FIELDS = (
    "model", "parameters", "batch", "prompt", "new", "piece", "block", "dtype", "device", "prefill_tokens_per_second",
    "first_token_ms", "decode_tokens_per_second", "decode_ms_per_token", "cache_mib_per_row", "note",
)  # fmt: skip


def config_of(name: str) -> Mapping[str, Any]:
    """The config of "FILE.py:ARGUMENT" or of a run's folder. Raises ValueError naming --configs."""
    file, _, argument = name.partition(":")
    path = pathlib.Path(file)
    if path.suffix != ".py":
        return runs.recorded(path, "configs")[1]
    if not path.is_file():
        raise ValueError(f"--configs={name}: {file} is no file; give e.g. configs/quickstart.py:efla.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--configs={name}: {file} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return settings.plain(module.get_config(argument))


def model_of(name: str, chosen: argparse.Namespace) -> tuple[LanguageModel, str]:
    """(model, precision of its float32 products) of a config, with the sizes and dtype that the command line sets."""
    config = config_of(name)
    if config["data"]["kind"] not in ("text", "tokens"):
        raise ValueError(f"--configs={name}: of {config['data']['kind']}; give one of a language model.")
    changes = {field: getattr(chosen, field) for field in ("width", "depth", "dtype") if getattr(chosen, field)}
    config = {**config, "model": {**config["model"], **changes}}
    vocab_size = 256 if config["data"]["kind"] == "text" else chosen.vocab_size
    model = settings.section(config, "model", LanguageModel, {"vocab_size": vocab_size})
    return model, config["train"]["matmul_precision"]


def once(model: LanguageModel, params, prompts: np.ndarray, chosen: argparse.Namespace) -> dict[str, float]:
    """Seconds of one batch: to have read the prompts, to the first token, from there to the last; MiB of its cache."""
    choice = Choice(chosen.temperature, chosen.top_k, chosen.top_p)
    began = time.perf_counter()
    prefix = prefill(model, params, prompts, coming=chosen.new, piece=chosen.piece)
    jax.block_until_ready(prefix)
    read = time.perf_counter()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(prefix.cache))
    decoding = Decoding(model, params, prefix, choice, max_new_tokens=chosen.new, block=chosen.block, keep=False)
    decoding.advance(1)
    first = time.perf_counter()
    while decoding.count < chosen.new:
        decoding.advance(min(chosen.block, chosen.new - decoding.count))
    last = time.perf_counter()
    return {"read": read - began, "first": first - began, "rest": last - first, "mib": size / 2**20}


def measured(name: str, batch: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """A row of the table."""
    model, precision = model_of(name, chosen)
    row = dict.fromkeys(FIELDS, "") | {
        "model": name.removeprefix("configs/").replace(".py:", " "), "batch": batch, "prompt": chosen.prompt,
        "new": chosen.new, "piece": min(chosen.piece, chosen.prompt), "block": chosen.block, "dtype": str(model.dtype),
        "device": jax.devices()[0].device_kind,
    }  # fmt: skip
    with jax.default_matmul_precision(precision):
        params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        row["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(params))
        prompts = np.random.default_rng(0).integers(0, model.vocab_size, (batch, chosen.prompt), np.int32)
        try:
            once(model, params, prompts, chosen)
            times = [once(model, params, prompts, chosen) for _ in range(chosen.repeats)]
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return row | {"note": "out of memory"}
    read, first, rest = (statistics.median(one[key] for one in times) for key in ("read", "first", "rest"))
    step = rest / (chosen.new - 1)
    return row | {
        "prefill_tokens_per_second": batch * chosen.prompt / read, "first_token_ms": 1e3 * first,
        "decode_tokens_per_second": batch / step, "decode_ms_per_token": 1e3 * step,
        "cache_mib_per_row": times[0]["mib"] / batch,
    }  # fmt: skip


def shown(value: Any) -> str:
    """A number in as many digits as it deserves."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write(rows: list[dict[str, Any]], out: pathlib.Path, command: str) -> None:
    """throughput.csv and throughput.md of the rows so far."""
    with open(out / "throughput.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    same = ("prompt", "new", "piece", "block", "device")
    columns = [field for field in FIELDS if field not in same and (field != "note" or any(r["note"] for r in rows))]
    lines = [columns, ["---"] * len(columns), *([shown(row[field]) for field in columns] for row in rows)]
    about = ", ".join(f"{field} {rows[0][field]}" for field in same)
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    (out / "throughput.md").write_text(f"`{command}`\n\n{about}; jax {jax.__version__}\n\n{table}\n")


def names(word: str) -> list[str]:
    """Names with commas between them."""
    return [part for part in word.split(",") if part]


def sizes(word: str) -> list[int]:
    """Whole numbers from 1 on with commas between them."""
    return [positive(part) for part in names(word)]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(
        prog="python -m experiments.generate_throughput", allow_abbrev=False, description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    whole.add_argument("--configs", type=names, default=CONFIGS, help="config files with arguments, or runs' folders")
    whole.add_argument("--batches", type=sizes, default=[1, 16], help="rows at once")
    whole.add_argument("--prompt", type=positive, default=512, help="tokens of each prompt")
    whole.add_argument("--new", type=positive, default=65, help="tokens that follow, 2 at least")
    whole.add_argument("--piece", type=positive, default=PIECE, help="tokens of each prompt that are read at a time")
    whole.add_argument("--block", type=positive, default=BLOCK, help="tokens between two looks of the host")
    whole.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token")
    whole.add_argument("--top_k", type=int, default=0, help="draw from so many most likely tokens; 0: no limit")
    whole.add_argument("--top_p", type=float, default=1.0, help="draw from the fewest tokens of this probability")
    whole.add_argument("--vocab_size", type=positive, default=32000, help="of models that are not of bytes")
    whole.add_argument("--width", type=positive, default=0, help="instead of the config's")
    whole.add_argument("--depth", type=positive, default=0, help="instead of the config's")
    whole.add_argument("--dtype", default="", choices=("", "float32", "bfloat16"), help="instead of the config's")
    whole.add_argument("--repeats", type=positive, default=3, help="timed texts; the median counts")
    whole.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/generate_throughput"), help="folder")
    return whole


def measure(chosen: argparse.Namespace, command: str) -> None:
    """All rows of the table."""
    if chosen.new < 2:
        raise ValueError(f"--new={chosen.new}: decoding is timed from the second token on; give 2 or more.")
    if not chosen.configs or not chosen.batches:
        raise ValueError("--configs and --batches: name at least one each.")
    for name in chosen.configs:  # what cannot be built is said before anything is timed
        model_of(name, chosen)
    chosen.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(chosen.configs) * len(chosen.batches), unit="row") as bar:
        for name in chosen.configs:
            full = False
            for batch in sorted(chosen.batches):
                bar.set_postfix_str(f"{name} x {batch}")
                if not full:
                    rows.append(measured(name, batch, chosen))
                    full = bool(rows[-1]["note"])
                    write(rows, chosen.out, command)
                bar.update()
            jax.clear_caches()  # programs of one model are of no use to the next
    print((chosen.out / "throughput.md").read_text())
    print(f"written: {chosen.out / 'throughput.csv'}, {chosen.out / 'throughput.md'}")


def main(words: list[str] | None = None) -> None:
    """Run a command line (None: the program's); what is wrong with it is one line, exit status 1."""
    words = sys.argv[1:] if words is None else words
    chosen = parser().parse_args(words)
    try:
        told = [word for word in words if not word.startswith("--out=")]
        measure(chosen, " ".join(["python -m experiments.generate_throughput", *told]))
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
