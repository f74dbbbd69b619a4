"""What `experiments.benchmark` is asked for: its flags, random arguments of those sizes, the implementations that take
them, and the tables it writes."""

import csv
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from efla_jax import ops

LEVELED = {"log_linear_delta_rule": "delta_rule", "log_linear_attention": "linear_attention"}
ROUTED = {"routed_delta_rule": "delta_rule", "block_sparse_attention": "block_sparse_attention"}
FLAT = LEVELED | ROUTED  # what each is compared with
OP = flags.DEFINE_enum("op", "delta_rule", ["delta_rule", "linear_attention", *FLAT], "operator to measure")
IMPLEMENTATIONS = flags.DEFINE_list(
    "implementations",
    [],
    "what to compare; by default recurrent,associative,chunked,softmax, or chunked,flat,softmax of another --op; with"
    " --decode auto,flat,softmax, of block-sparse attention auto,chunked,softmax",
)
LENGTHS = flags.DEFINE_list("lengths", ["512", "1024", "2048", "4096", "8192", "16384", "32768"], "sequence lengths T")
BATCH = flags.DEFINE_integer("batch", 1, "rows B", lower_bound=1)
HEADS = flags.DEFINE_integer("heads", 4, "heads H", lower_bound=1)
KEY_HEADS = flags.DEFINE_integer("key_heads", 0, "key heads G, which divide the heads; 0: as many", lower_bound=0)
KEY_DIM = flags.DEFINE_integer("key_dim", 64, "key dim K", lower_bound=1)
VALUE_DIM = flags.DEFINE_integer("value_dim", 64, "value dim V", lower_bound=1)
LEVELS = flags.DEFINE_integer("levels", 0, "levels L; 0: what the length or position needs", lower_bound=0)
SELECTED = flags.DEFINE_float("selected", 0.25, "of a routed --op: part of the chunks for softmax", 0.0, 1.0)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "dtype of q, k and v")
CHUNK_SIZE = flags.DEFINE_enum("chunk_size", "64", ["16", "32", "64", "128"], "tokens of a chunk")
REPEATS = flags.DEFINE_integer("repeats", 5, "timed calls; the median counts", lower_bound=1)
LAUNCHES = flags.DEFINE_integer("launches", 1, "calls queued before one waits for them", lower_bound=1)
TUNE = flags.DEFINE_bool("tune", False, "time every config of the GPU kernel, write the fastest")
MEMORY_LIMIT = flags.DEFINE_float("memory_limit_gib", 6.0, "skip programs whose temporaries need more")
SLOW = flags.DEFINE_float("slow_ms", 8000.0, "skip longer sequences of an implementation once a call took this long")
DECODE = flags.DEFINE_bool("decode", False, "measure tokens one at a time")
POSITIONS = flags.DEFINE_list("positions", ["1023", "131071"], "with --decode: where the last token stands, from 0")
TOKENS = flags.DEFINE_integer("tokens", 64, "with --decode: tokens of a timed call", lower_bound=1)
OUT = flags.DEFINE_string("out", "runs/benchmark", "folder for the table and the picture")
FRACTIONS = flags.DEFINE_list(
    "fractions", ["0.1", "0.25", "0.5"], "with --decode of block-sparse attention: parts of the chunks that have pages"
)
ROUTES = flags.DEFINE_integer(
    "routes", 0, "routing heads R of block-sparse attention, which divide the heads; 0: as many", lower_bound=0
)
BUDGET = flags.DEFINE_integer(
    "budget",
    0,
    "tokens at each length, of every operator or of what --tune has; 0: --batch rows of one --op",
    lower_bound=0,
)
OPERATORS = flags.DEFINE_list("operators", [], "with --budget: which; by default all of benchmark_operators.MEASURED")
PASSES = ("forward", "forward+backward")
IMPLEMENTED = ("recurrent", "associative", "chunked", "pallas", "auto")
KNOWN = (*IMPLEMENTED, "flat", "softmax")


def levels_of(last: int) -> int:
    """How many levels a query at position `last` sees its document at."""
    return LEVELS.value or last.bit_length() + 1


def rows_of(length: int) -> int:
    """How many rows there are of this length."""
    return BUDGET.value // length or BATCH.value


def make_inputs(name: str, length: int, levels: int) -> dict[str, jax.Array]:
    """Random arguments of the implementation `name`: unit keys, erase in (0, 1), log decay of about -0.1, level weights
    about 0.8."""
    keys = iter(jax.random.split(jax.random.key(length), 7))
    batch, heads, key_heads = rows_of(length), HEADS.value, KEY_HEADS.value or HEADS.value

    def normal(*rest):
        return jax.random.normal(next(keys), (batch, length, *rest))

    key = (heads, VALUE_DIM.value) if name == "softmax" else (key_heads, KEY_DIM.value)
    inputs = {"q": ops.l2_normalize(normal(*key)), "k": ops.l2_normalize(normal(*key))}
    inputs["u"] = normal(heads, VALUE_DIM.value)
    inputs = {argument: x.astype(DTYPE.value) for argument, x in inputs.items()}
    if name == "softmax":
        return inputs
    if OP.value in ROUTED:
        chunks = -(-length // int(CHUNK_SIZE.value))
        drawn = jax.random.uniform(next(keys), (batch, chunks, ROUTES.value or heads))
        selected = (drawn < SELECTED.value).astype(jnp.float32)
        if OP.value == "block_sparse_attention":
            return inputs | {"selected": jnp.ones_like(selected) if name == "flat" else selected}
        if name != "flat":
            inputs["keep"] = 1 - selected
    if OP.value.endswith("delta_rule"):
        inputs["erase"] = jax.nn.sigmoid(normal(heads))
    inputs["log_decay"] = -jax.nn.softplus(normal(heads) - 2)
    if OP.value in LEVELED and name != "flat":
        inputs["level_weights"] = jax.nn.softplus(normal(heads, levels))
    return inputs


def apply(name: str, inputs: dict[str, jax.Array], state: Any = None) -> tuple[jax.Array, Any]:
    """(outputs, state) of the implementation `name`."""
    if name == "softmax":
        q = inputs["q"] * inputs["q"].shape[-1] ** -0.5
        return ops.softmax_attention(q, inputs["k"], inputs["u"], initial_state=state)
    op = getattr(ops, FLAT[OP.value] if name == "flat" else OP.value)
    implementation, size = name if name in IMPLEMENTED else "auto", int(CHUNK_SIZE.value)
    if OP.value == "block_sparse_attention":
        q, k, v, selected = (inputs[argument] for argument in ("q", "k", "u", "selected"))
        options = {"initial_state": state, "implementation": implementation, "chunk_size": size}
        return op(q * q.shape[-1] ** -0.5, k, v, selected, **options)
    return op(**inputs, initial_state=state, implementation=implementation, chunk_size=size)


def numbers(flag: flags.FlagHolder, least: int) -> list[int]:
    """The whole numbers of a list flag, in order."""
    if not flag.value or not all(word.strip().isdecimal() and int(word) >= least for word in flag.value):
        given = f"--{flag.name}={','.join(flag.value)}"
        raise app.UsageError(f"{given}: not whole numbers from {least} on; write e.g. --{flag.name}=512,1024")
    return sorted(map(int, flag.value))


def markdown(rows: list[dict], shown: dict[str, str], formats: dict[str, str]) -> str:
    """A Markdown table of the columns `shown` under their headings; numbers that are not whole with two digits, what is
    not known as nothing."""

    def cell(value, form: str) -> str:
        return ("" if math.isnan(value) else format(value, form or ".2f")) if isinstance(value, float) else str(value)

    lines = [f"| {' | '.join(shown.values())} |", "| --- " * len(shown) + "|"]
    lines += (f"| {' | '.join(cell(row[c], formats.get(c, '')) for c in shown)} |" for row in rows)
    return "\n".join(lines)


def title() -> str:
    """What was measured, where and at which sizes."""
    shape = f"B={BATCH.value}, H={HEADS.value}, K={KEY_DIM.value}, V={VALUE_DIM.value}"
    shape += f", G={KEY_HEADS.value}" if KEY_HEADS.value else ""
    shape += f", R={ROUTES.value}" if ROUTES.value else ""
    shape += f", {SELECTED.value:g} of the chunks for softmax" if OP.value in ROUTED and not DECODE.value else ""
    where = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    return f"{OP.value} on {where}: {shape}, {DTYPE.value}, chunk {CHUNK_SIZE.value}"


def save(rows: list[dict], name: str, text: str, heading: str = "") -> None:
    """NAME.csv and NAME.md in --out; heading: instead of `title()`."""
    out = pathlib.Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    with open(out / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (out / f"{name}.md").write_text(f"{heading or title()}\n\n{text}\n")
