"""How long NAtS-L's hybrid takes to read a context and to write behind it, beside a Transformer and Gated DeltaNet of
the same size, at given parts of chunks that choose softmax.

    python -m experiments.nats_l_latency --out=experiments/results/nats_l_latency        # on a GPU, minutes
    python -m experiments.nats_l_latency --size=tiny --dtype=float32 --lengths=256,512 --out=runs/latency    # on a CPU

Models are those of configs/lm_nats_l.py, the Transformer that of configs/lm_340m.py:attention (24 layers of 16 heads of
64, 374M parameters). Parameters are random, matrices in the dtype of products. A router that was not trained chooses
softmax for about half of the chunks, so its choices are replaced (the router itself still runs): routing head r gives
chunk n to softmax where the fractional part of 0.618 n + 0.755 r is below the fraction asked for, which is that part of
every head's chunks, spread evenly.

read     one call over the whole prompt, from no cache to the logits behind its last token and the cache
write    one token after the other, --tokens of them in one program, behind a cache that holds random numbers for
         so many tokens; greedy. Its layers are unrolled: a loop over layers would copy every layer's cache
memory   of reading, what the program needs beside parameters and results; of a cache, what is in use

Times are medians of --repeats after a call that is not counted. Writes latency.csv, latency.md and latency.png into
--out, after every measurement.
"""

import argparse
import concurrent.futures
import csv
import functools
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import lm_nats_l
from efla_jax import LanguageModel, metrics
from efla_jax.train import settings
from experiments.generate_throughput import names, shown, sizes
from experiments.language_runs import positive
from experiments.nats_l_contexts import begun, forced, in_use

MODELS = ("nats_l_hybrid", "transformer", "gated_delta_net", "gdn_hybrid")
TINY = {"width": 64, "mlp_width": 64, "depth": 3, "tail": ()}
SPARE = 2048  # slots of a cache beyond the longest context
FIELDS = (
    "model", "fraction", "length", "read_ms", "read_tokens_per_second", "read_temporaries_mib", "write_ms_per_token",
    "write_tokens_per_second", "cache_mib",
)  # fmt: skip
RATIOS = "Transformer / hybrid, read", "hybrid / Gated DeltaNet, read", "Transformer / hybrid, write"
PUBLISHED = "published at 131072 tokens: 5.4, 1.66 and 2.3"


def fields_of(name: str, size: str) -> dict[str, Any]:
    """The model section of a config, for LanguageModel."""
    known = {"transformer": "gdn", "gated_delta_net": "gdn"}.get(name, name)
    model = settings.plain(lm_nats_l.get_config(known))["model"]
    if name == "transformer":
        attention = {"num_heads": model["width"] // 64, "rope_base": 10000.0}
        model |= {"mixers": ("attention",), "tail": (), "depth": 24, "mixer_options": {"attention": attention}}
    if size == "tiny":
        delta = {"num_heads": 2, "head_dim": 16, "expand_v": 2.0}
        tiny = {"gated_delta_net": delta, "attention": {"num_heads": 2}}
        tiny["nats_l"] = delta | {"num_attention_heads": 4, "num_routes": 2, "rope_base": 0.0}
        mixers = tuple(dict.fromkeys(model["mixers"]))
        model |= TINY | {"mixers": mixers if len(mixers) == 1 else (mixers[0], mixers[0], mixers[1])}
        model["mixer_options"] = {mixer: tiny[mixer] for mixer in mixers}
    return model | {"remat": "none"}


def model_of(name: str, chosen: argparse.Namespace, unrolled: bool) -> LanguageModel:
    """A model; unrolled: its pattern of mixers is all of the depth."""
    model = fields_of(name, chosen.size) | ({"dtype": chosen.dtype} if chosen.dtype else {})
    if unrolled:
        whole = settings.section({"model": model}, "model", LanguageModel, {"vocab_size": chosen.vocab_size})
        model |= {"mixers": whole.layers, "tail": ()}
    return settings.section({"model": model}, "model", LanguageModel, {"vocab_size": chosen.vocab_size})


def with_kernel(model: LanguageModel, implementation: str) -> LanguageModel:
    """The model with this implementation of NAtS-L's delta rule."""
    if "nats_l" not in model.mixers or implementation == "auto":
        return model
    options = {name: dict(fields) for name, fields in model.mixer_options.items()}
    options["nats_l"]["implementation"] = implementation
    return model.clone(mixer_options=options)


@functools.cache
def shapes_of(model: LanguageModel) -> Any:
    """Of parameters: matrices and tables in the model's dtype."""

    def narrow(x):
        matrix = x.ndim > 1 + (model.depth > len(model.mixers))
        return jax.ShapeDtypeStruct(x.shape, model.dtype if matrix else x.dtype)

    return jax.tree.map(narrow, jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))


def parameters(model: LanguageModel) -> Any:
    """Random numbers in those shapes."""
    return jax.tree.map(lambda x: 0.02 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype), shapes_of(model))


def read(model: LanguageModel, params, tokens, fraction):
    """(logits [B, vocabulary] behind the last token, cache)."""
    with forced(fraction):
        x, cache = model.apply(params, tokens, method="features")
    return model.apply(params, x[:, -1], method="logits"), cache


def write(model: LanguageModel, count: int, params, token, cache, fraction):
    """(last token [B, 1], cache) after `count` greedy tokens."""

    def step(carry, _):
        token, cache = carry
        with forced(fraction):
            logits, cache = model.apply(params, token, None, cache)
        return (jnp.argmax(logits, axis=-1).astype(jnp.int32), cache), None

    (token, cache), _ = jax.lax.scan(step, (token, cache), None, length=count)
    return token, cache


def median_ms(run: Callable, repeats: int) -> float:
    """Of run(), after one call that is not counted; run waits for its results."""
    run()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return 1e3 * statistics.median(found)


class Programs:
    """The programs of a model: they are compiled while others are traced."""

    def __init__(self, name: str, chosen: argparse.Namespace):
        self.name, self.chosen, self.room = name, chosen, max(chosen.lengths) + SPARE
        self.models = [model_of(name, chosen, unrolled) for unrolled in (False, True)]
        self.reads: dict[int, concurrent.futures.Future] = {}
        self.writes: concurrent.futures.Future | None = None

    def read_in(self, lengths: Sequence[int], pool: concurrent.futures.Executor) -> list:
        """Trace reading of these lengths, and have it compiled."""
        model, fraction = self.models[0], jax.ShapeDtypeStruct((), jnp.float32)
        params, run = shapes_of(model), functools.partial(read, with_kernel(model, self.chosen.routed))
        for length in lengths:
            lowered = jax.jit(run).lower(params, jax.ShapeDtypeStruct((1, length), jnp.int32), fraction)
            self.reads[length] = pool.submit(lowered.compile)
        return [self.reads[length] for length in lengths]

    def written_in(self, pool: concurrent.futures.Executor) -> list:
        """Trace writing, one program for all lengths, and have it compiled."""
        model, fraction = self.models[1], jax.ShapeDtypeStruct((), jnp.float32)
        params = shapes_of(model)
        cache = jax.eval_shape(lambda: model.init_cache(1, max_length=self.room))
        run = jax.jit(functools.partial(write, model, self.chosen.tokens), donate_argnums=(1, 2))
        lowered = run.lower(params, jax.ShapeDtypeStruct((1, 1), jnp.int32), cache, fraction)
        self.writes = pool.submit(lowered.compile)
        return [self.writes]

    def rows(self) -> list[dict[str, Any]]:
        """A row of each length and fraction, without times."""
        fractions = self.chosen.fractions if "nats_l" in self.models[0].mixers else [float("nan")]
        places = [(fraction, length) for fraction in fractions for length in sorted(self.chosen.lengths, reverse=True)]
        empty = dict.fromkeys(FIELDS, float("nan"))
        return [empty | {"model": self.name, "fraction": fraction, "length": length} for fraction, length in places]

    def measure_reading(self, rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Fills in what reading takes, row by row."""
        params = parameters(self.models[0])
        for row in rows:
            length, program = row["length"], self.reads[row["length"]].result()
            tokens = np.random.default_rng(0).integers(0, self.chosen.vocab_size, (1, length), np.int32)
            given = params, jnp.asarray(tokens), jnp.float32(np.nan_to_num(row["fraction"]))
            run = functools.partial(program, *given)
            ms = median_ms(lambda run=run: jax.block_until_ready(run()), self.chosen.repeats)
            memory = program.memory_analysis()
            row["read_temporaries_mib"] = memory.temp_size_in_bytes / 2**20 if memory else float("nan")
            row |= {"read_ms": ms, "read_tokens_per_second": 1e3 * length / ms}
            yield row

    def measure_writing(self, rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Fills in what writing takes and its cache, row by row."""
        params, program = parameters(self.models[1]), self.writes.result()
        for row in rows:
            fraction = float(np.nan_to_num(row["fraction"]))
            cache = begun(self.models[1], row["length"], self.room, fraction)
            row["cache_mib"] = in_use(cache, row["length"])
            carried = [jnp.zeros((1, 1), jnp.int32), cache]
            del cache

            def run(carried=carried, fraction=fraction):
                carried[:] = jax.block_until_ready(program(params, *carried, jnp.float32(fraction)))

            ms = median_ms(run, self.chosen.repeats) / self.chosen.tokens
            row |= {"write_ms_per_token": ms, "write_tokens_per_second": 1e3 / ms}
            yield row


# ---- what is written ------------------------------------------------------------------------------------------------


def ratios(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line of each hybrid row: how its times stand to those of the Transformer and of Gated DeltaNet."""
    known = {(row["model"], row["length"]): row for row in rows if row["model"] in MODELS[1:3]}
    lines = []
    for row in rows:
        others = [known.get((name, row["length"])) for name in MODELS[1:3]]
        if row["model"] == "nats_l_hybrid" and all(others):
            of = [others[0]["read_ms"] / row["read_ms"], row["read_ms"] / others[1]["read_ms"]]
            of.append(others[0]["write_ms_per_token"] / row["write_ms_per_token"])
            lines.append([shown(row["fraction"]), shown(row["length"]), *(f"{x:.2f}" for x in of)])
    return lines


def table(head: Sequence[str], *lines: Sequence[str]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def save(rows: Sequence[dict[str, Any]], chosen: argparse.Namespace, command: str) -> None:
    """latency.csv, latency.md, latency.png of the rows so far."""
    chosen.out.mkdir(parents=True, exist_ok=True)
    with open(chosen.out / "latency.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    cells = [["" if row[f] != row[f] else shown(row[f]) for f in FIELDS] for row in rows]
    text = f"`{command}`\n\nbatch 1, {jax.devices()[0].device_kind}, jax {jax.__version__}\n\n{table(FIELDS, *cells)}\n"
    if lines := ratios(rows):
        heads = ["fraction", "length", *RATIOS]
        text += f"\nRatios of times ({PUBLISHED}):\n\n{table(heads, *lines)}\n"
    (chosen.out / "latency.md").write_text(text)
    panels = []
    for column, label in (("read_ms", "ms to read the context"), ("write_ms_per_token", "ms per token behind it")):
        curves: dict[str, list] = {}
        for row in rows:
            if row[column] == row[column]:
                name = row["model"] + ("" if row["fraction"] != row["fraction"] else f" {row['fraction']:g}")
                curves.setdefault(name, []).append((row["length"], row[column]))
        if curves:
            lines = {name: tuple(zip(*sorted(points), strict=True)) for name, points in curves.items()}
            panels.append(
                metrics.Panel(lines, "tokens of context", label, "" if panels else "batch 1", logarithmic=True)
            )
    if panels:
        metrics.plot_lines(panels, chosen.out / "latency.png")


def fractions(word: str) -> list[float]:
    """Numbers from 0 to 1 with commas between them."""
    found = [float(part) for part in names(word)]
    if not found or not all(0 <= x <= 1 for x in found):
        raise argparse.ArgumentTypeError(f"{word!r} is not of numbers from 0 to 1")
    return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(
        prog="python -m experiments.nats_l_latency", allow_abbrev=False, description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    whole.add_argument("--models", type=names, default=list(MODELS[:3]), help=f"of {', '.join(MODELS)}")
    whole.add_argument("--lengths", type=sizes, default=[8192, 32768, 131072], help="tokens of context")
    whole.add_argument("--fractions", type=fractions, default=[0.1, 0.25, 0.5], help="of chunks that choose softmax")
    whole.add_argument("--tokens", type=positive, default=64, help="tokens that are written in one program")
    whole.add_argument("--repeats", type=positive, default=3, help="timed calls; the median counts")
    whole.add_argument("--size", choices=("380m", "tiny"), default="380m", help="tiny: to try it on a CPU")
    whole.add_argument("--vocab_size", type=positive, default=32000, help="of the models")
    whole.add_argument("--dtype", default="", choices=("", "float32", "bfloat16"), help="instead of the configs'")
    whole.add_argument("--routed", default="auto", help="implementation of NAtS-L's delta rule while it reads")
    whole.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/nats_l_latency"), help="folder")
    return whole


def measure(chosen: argparse.Namespace, command: str) -> None:
    """All rows."""
    for name in chosen.models:
        if name not in MODELS:
            raise ValueError(f"--models={name}: choose of {', '.join(MODELS)}.")
    ones = [Programs(name, chosen) for name in chosen.models]
    tables = [one.rows() for one in ones]
    longest, *others = sorted(chosen.lengths, reverse=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for lengths in ([longest], others):  # the longest first: a run that is cut short has it
            waiting, began = [], time.perf_counter()
            for one in ones:
                waiting += [one.written_in(pool)] if lengths == [longest] else []
                waiting += [one.read_in(lengths, pool)]
            concurrent.futures.wait(itertools.chain(*waiting))  # nothing compiles while something is timed
            print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
            for one, mine in zip(ones, tables, strict=True):
                steps = [one.measure_writing(mine)] if lengths == [longest] else []
                steps.append(one.measure_reading([row for row in mine if row["length"] in lengths]))
                try:
                    for row in itertools.chain(*steps):
                        save(list(itertools.chain(*tables)), chosen, command)
                        print({k: v for k, v in row.items() if v == v}, flush=True)
                except jax.errors.JaxRuntimeError as error:  # too little memory for one must not hide the others
                    print(f"{one.name}: {str(error)[:300]}", flush=True)
    print(f"{(chosen.out / 'latency.md').read_text()}\nwritten: {chosen.out}/latency.csv, .md, .png")


def main(words: list[str] | None = None) -> None:
    """Run a command line (None: the program's); what is wrong with it is one line, exit status 1."""
    words = sys.argv[1:] if words is None else words
    chosen = parser().parse_args(words)
    try:
        told = [word for word in words if not word.startswith("--out=")]
        measure(chosen, " ".join(["python -m experiments.nats_l_latency", *told]))
    except (ValueError, OSError, NotImplementedError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
