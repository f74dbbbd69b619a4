"""Speed and memory of the operators on this machine: every implementation, forward and forward + backward, by length;
or one decoded token at a time.

    python -m experiments.benchmark        # B = 1, H = 4, K = V = 64, float32, T = 512 ... 32768
    python -m experiments.benchmark --heads=16 --key_dim=128 --value_dim=128 --dtype=bfloat16        # for a GPU
    python -m experiments.benchmark --op=log_linear_delta_rule         # beside the flat operator and softmax attention
    python -m experiments.benchmark --op=log_linear_delta_rule --decode --positions=1023,131071
    python -m experiments.benchmark --op=block_sparse_attention --selected=0.25 --lengths=8192,16384,32768
    python -m experiments.benchmark --implementations=pallas,chunked --launches=10 --dtype=bfloat16 ...   # device time
    python -m experiments.benchmark --tune --batch=16 --lengths=2048 --dtype=bfloat16 ...         # configs of a kernel

Prints a table and writes benchmark.csv, benchmark.md and benchmark.png into --out. Times are medians of --repeats
calls, each waited for, with the implementations taking turns; memory is XLA's figure for the temporaries of the
compiled program, beside the size of q + k + v + o. A program that would need more than --memory_limit_gib, or whose
last length took more than --slow_ms, is skipped and says so. "flat" is the operator without levels, "chunked", of the
same sizes; "softmax" has heads of the value dim. A log-linear operator has the levels that the length needs. Of a
routed operator each head gives the part --selected of its chunks, at random, to softmax; "flat" is then the delta rule
that keeps all, or the same block-sparse attention with all of them selected, which is full causal attention.

--decode writes decode.csv and decode.md: bytes of the state and time per token of the --tokens tokens that end at each
position, inside one compiled loop. The states and caches it begins with are random numbers where that position has
some, as time does not depend on what they are.

--launches=10 queues ten calls before it waits, which hides the host's part of them. --tune does so for every config of
the operator's GPU kernel and writes the fastest over all --lengths, by forward + backward, to tune.json: the row for
the table in `kernels/`, with everything tried beside it, failures too.
"""

import csv
import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from efla_jax import metrics, ops, selfcheck
from efla_jax.ops import tuning

LEVELED = {"log_linear_delta_rule": "delta_rule", "log_linear_attention": "linear_attention"}
ROUTED = {"routed_delta_rule": "delta_rule", "block_sparse_attention": "block_sparse_attention"}
FLAT = LEVELED | ROUTED  # what each is compared with
OP = flags.DEFINE_enum("op", "delta_rule", ["delta_rule", "linear_attention", *FLAT], "operator to measure")
IMPLEMENTATIONS = flags.DEFINE_list(
    "implementations",
    [],
    "what to compare; by default recurrent,associative,chunked,softmax, or chunked,flat,softmax of another --op",
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
PASSES = ("forward", "forward+backward")
KNOWN = ("recurrent", "associative", "chunked", "pallas", "flat", "softmax")


def levels_of(last: int) -> int:
    """How many levels a query at position `last` sees its document at."""
    return LEVELS.value or last.bit_length() + 1


def make_inputs(name: str, length: int, levels: int) -> dict[str, jax.Array]:
    """Random arguments of the implementation `name`: unit keys, erase in (0, 1), log decay of about -0.1, level weights
    about 0.8."""
    keys = iter(jax.random.split(jax.random.key(length), 7))
    heads, key_heads = HEADS.value, KEY_HEADS.value or HEADS.value

    def normal(*rest):
        return jax.random.normal(next(keys), (BATCH.value, length, *rest))

    key = (heads, VALUE_DIM.value) if name == "softmax" else (key_heads, KEY_DIM.value)
    inputs = {"q": ops.l2_normalize(normal(*key)), "k": ops.l2_normalize(normal(*key))}
    inputs["u"] = normal(heads, VALUE_DIM.value)
    inputs = {argument: x.astype(DTYPE.value) for argument, x in inputs.items()}
    if name == "softmax":
        return inputs
    if OP.value in ROUTED:
        drawn = jax.random.uniform(next(keys), (BATCH.value, -(-length // int(CHUNK_SIZE.value)), heads))
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


def apply(name: str, inputs: dict[str, jax.Array], state: Any = None, config: Any = None) -> tuple[jax.Array, Any]:
    """(outputs, state) of the implementation `name`; config: of its GPU kernel, instead of the table's."""
    if config is not None:
        return tuning.run(OP.value, inputs, config)
    if name == "softmax":
        q = inputs["q"] * inputs["q"].shape[-1] ** -0.5
        return ops.softmax_attention(q, inputs["k"], inputs["u"], initial_state=state)
    op = getattr(ops, FLAT[OP.value] if name == "flat" else OP.value)
    implementation, size = name if name in KNOWN[:4] else "auto", int(CHUNK_SIZE.value)
    if OP.value == "block_sparse_attention":
        q, k, v, selected = (inputs[argument] for argument in ("q", "k", "u", "selected"))
        return op(q * q.shape[-1] ** -0.5, k, v, selected, implementation=implementation, chunk_size=size)
    return op(**inputs, initial_state=state, implementation=implementation, chunk_size=size)


def program(name: str, both: bool, config: Any = None) -> Callable:
    """The function measured: outputs and state, or the gradients of every input for a random-like loss on them."""

    attends = name == "softmax" or OP.value == "block_sparse_attention"  # the state: what keys and values were given

    def forward(inputs):
        o, state = apply(name, inputs, config=config)
        return o, None if attends else jax.tree.leaves(state)[0]

    def loss(inputs):
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(forward(inputs)))

    return jax.grad(loss) if both else forward


def measure(length: int, names: list[str]) -> list[dict]:
    """One row per implementation and pass. Calls take turns, so that a busy machine slows all of them alike."""
    compiled, rows = {}, []
    for name in names:
        inputs = make_inputs(name, length, levels_of(length - 1))
        ideal = sum(inputs[x].nbytes for x in "qku") + inputs["u"].nbytes
        for both in (False, True):
            run = jax.jit(program(name, both)).lower(inputs).compile()
            memory = run.memory_analysis()
            temporary = memory.temp_size_in_bytes if memory else float("nan")
            row = dict(op=OP.value, implementation=name, measured=PASSES[both], T=length, memory_mib=temporary / 2**20)
            row |= dict(memory_over_qkvo=temporary / ideal, ms=float("nan"), tokens_per_s=float("nan"))
            rows.append(row)
            if temporary > MEMORY_LIMIT.value * 2**30:
                print(f"skipped: {name} {PASSES[both]} at T={length} needs {temporary / 2**30:.1f} GiB", flush=True)
                continue
            jax.block_until_ready(run(inputs))
            compiled[name, both] = run, inputs, row
    times = {key: [] for key in compiled}
    for _ in range(REPEATS.value):
        for key, (run, inputs, _) in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready([run(inputs) for _ in range(LAUNCHES.value)])
            times[key].append((time.perf_counter() - begin) / LAUNCHES.value)
    for key, (_, _, row) in compiled.items():
        seconds = statistics.median(times[key])
        row |= dict(ms=1e3 * seconds, tokens_per_s=BATCH.value * length / seconds)
    return rows


def compared(rows: list[dict]) -> list[dict]:
    """The rows with their time over that of half the length, of the flat operator and of softmax (NaN where one is
    missing)."""
    ms = {(r["implementation"], r["measured"], r["T"]): r["ms"] for r in rows}
    others = {"over_half_T": lambda r: (r["implementation"], r["measured"], r["T"] / 2)}
    others |= {f"over_{name}": lambda r, name=name: (name, r["measured"], r["T"]) for name in ("flat", "softmax")}
    return [r | {name: r["ms"] / ms.get(of(r), math.nan) for name, of in others.items()} for r in rows]


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table, one line per length, implementation and pass; ratios where there are some."""
    rows = compared(rows)
    shown = {"T": "T", "implementation": "implementation", "measured": "pass", "ms": "ms"}
    ratios = {"over_half_T": "of half T", "over_flat": "of flat", "over_softmax": "of softmax"}
    shown |= {name: label for name, label in ratios.items() if any(math.isfinite(r[name]) for r in rows)}
    shown |= {"tokens_per_s": "tokens/s", "memory_mib": "temporaries MiB", "memory_over_qkvo": "of q+k+v+o"}
    return markdown(rows, shown, {"tokens_per_s": ",.0f", "memory_mib": ".1f"})


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
    shape += f", {SELECTED.value:g} of the chunks for softmax" if OP.value in ROUTED else ""
    where = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    return f"{OP.value} on {where}: {shape}, {DTYPE.value}, chunk {CHUNK_SIZE.value}"


def save(rows: list[dict], name: str, text: str) -> None:
    """NAME.csv and NAME.md in --out."""
    out = pathlib.Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    with open(out / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (out / f"{name}.md").write_text(f"{title()}\n\n{text}\n")


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Time and memory of forward + backward over the length, all axes logarithmic."""
    both = [r for r in rows if r["measured"] == PASSES[True]]
    panels, heading = [], title().replace(": ", "\n", 1)
    for column, label in (("ms", "ms, forward + backward"), ("memory_mib", "temporaries, MiB")):
        lines = {}
        for name in dict.fromkeys(r["implementation"] for r in both):
            points = [(r["T"], r[column]) for r in both if r["implementation"] == name and math.isfinite(r[column])]
            if points:
                lines[name] = tuple(zip(*points, strict=True))
        if lines:
            panels.append(metrics.Panel(lines, "tokens T", label, heading if not panels else "", logarithmic=True))
    if panels:
        metrics.plot_lines(panels, path)


def begin_state(name: str, position: int, levels: int) -> Any:
    """Random numbers as the state of a row that has seen `position` tokens, with room for --tokens more."""
    batch, heads, dims = BATCH.value, HEADS.value, (KEY_DIM.value, VALUE_DIM.value)
    numbers = jax.random.key(position)
    stands = jnp.full((batch,), position, jnp.int32)
    if name == "softmax":
        cache = ops.init_kv_cache(batch, position + TOKENS.value, heads, dims[1], dims[1], DTYPE.value)
        k = jax.random.normal(numbers, cache.k.shape, cache.k.dtype).at[:, position:].set(0)
        return ops.KVCache(k, jnp.flip(k, axis=2), stands)
    if OP.value not in FLAT or name == "flat":
        return jax.random.normal(numbers, (batch, heads, *dims))
    states = jax.random.normal(numbers, (batch, heads, levels, *dims))
    return ops.FenwickState(jnp.where(live(position, levels)[:, None, None], states, 0.0), stands)


def live(position: int, levels: int) -> jax.Array:
    """Which slots hold something after `position` tokens: bits of the position, the last slot all above."""
    level = jnp.arange(levels)
    bits = position >> jnp.maximum(level - 1, 0)
    return jnp.where(level == levels - 1, bits > 0, (level > 0) & (bits & 1 > 0))


def decoder(name: str) -> Callable:
    """(state, inputs of some tokens) -> their outputs and the state after them, one token after the other."""

    def step(state, token):
        o, state = apply(name, jax.tree.map(lambda x: x[:, None], token), state)
        return state, o

    def decode(state, inputs):
        state, o = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs))
        return o, state

    return decode


def measure_decoding(position: int, names: list[str]) -> list[dict]:
    """One row per implementation: the --tokens tokens that end at `position`, in turns as in `measure`."""
    count, levels = min(TOKENS.value, position + 1), levels_of(position)
    begin, runs, times = position + 1 - count, {}, {name: [] for name in names}
    rows = []
    for name in names:
        inputs, state = make_inputs(name, count, levels), begin_state(name, begin, levels)
        run = jax.jit(decoder(name), donate_argnums=0).lower(state, inputs).compile()
        size = used = sum(x.nbytes for x in jax.tree.leaves(state))
        row = dict(op=OP.value, implementation=name, position=position, levels="", state_bytes=size)
        if isinstance(state, ops.FenwickState):
            used, row["levels"] = size * int(live(position, levels).sum()) / levels, levels
        rows.append(row | dict(live_mib=used / 2**20, state_mib=size / 2**20))
        runs[name] = run, inputs, run(state, inputs)[1]
    for _ in range(REPEATS.value):
        for name, (run, inputs, state) in runs.items():
            if isinstance(state, ops.FenwickState):  # back to where it began: contents are random anyway
                state = state._replace(position=jnp.full_like(state.position, begin))
            elif isinstance(state, ops.KVCache):
                state = state._replace(length=jnp.full_like(state.length, begin))
            jax.block_until_ready(state)
            started = time.perf_counter()
            _, state = jax.block_until_ready(run(state, inputs))
            times[name].append(time.perf_counter() - started)
            runs[name] = run, inputs, state
    return [r | dict(us_per_token=1e6 * statistics.median(times[r["implementation"]]) / count) for r in rows]


def numbers(flag: flags.FlagHolder, least: int) -> list[int]:
    """The whole numbers of a list flag, in order."""
    if not flag.value or not all(word.strip().isdecimal() and int(word) >= least for word in flag.value):
        given = f"--{flag.name}={','.join(flag.value)}"
        raise app.UsageError(f"{given}: not whole numbers from {least} on; write e.g. --{flag.name}=512,1024")
    return sorted(map(int, flag.value))


def by_length(names: list[str]) -> None:
    """The benchmark over --lengths."""
    rows, lengths, out = [], numbers(LENGTHS, 1), pathlib.Path(OUT.value)
    for length in lengths:
        fresh = measure(length, names)
        rows += fresh
        for r in fresh:
            label = f"T={r['T']:<6} {r['implementation']:<12} {r['measured']:<17}"
            print(f"{label} {r['ms']:10.2f} ms {r['memory_mib']:10.1f} MiB", flush=True)
        save(compared(rows), "benchmark", table(rows))  # an interrupted benchmark keeps what it measured
        draw(rows, out / "benchmark.png")
        too_slow = {r["implementation"] for r in fresh if not r["ms"] <= SLOW.value}
        names = [n for n in names if n not in too_slow]
        if too_slow and length < lengths[-1]:
            print(f"skipped from here on, too slow or too large: {', '.join(sorted(too_slow))}", flush=True)
    print(f"\n{table(rows)}\n\nwritten: {out}/benchmark.csv, .md, .png")


def tune() -> None:
    """tune.json: the fastest config of the operator's kernel, and what each took."""
    sizes = {"op": OP.value, "K": KEY_DIM.value, "V": VALUE_DIM.value, "dtype": DTYPE.value}
    device, tried = jax.devices()[0].device_kind, []
    for config in tuning.candidates(OP.value, device, *list(sizes.values())[1:]):
        row: dict[str, Any] = {"config": dataclasses.asdict(config), "ms": {}}
        try:
            for length, both in itertools.product(numbers(LENGTHS, 1), (False, True)):
                run = jax.jit(program("pallas", both, config))
                row["ms"][f"T={length} {PASSES[both]}"] = selfcheck.milliseconds(run, make_inputs("pallas", length, 0))
        except (ValueError, jax.errors.JaxRuntimeError) as error:  # a config that a compiler refuses is a result
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        tried.append(row)
        print(json.dumps(row), flush=True)

    def cost(row):
        return math.prod(ms for name, ms in row["ms"].items() if name.endswith(PASSES[True]))

    fastest = min((row for row in tried if "error" not in row), key=cost, default={"config": None, "ms": None})
    (out := pathlib.Path(OUT.value)).mkdir(parents=True, exist_ok=True)
    sizes |= {"device": device, "jax": jax.__version__, "batch": BATCH.value, "heads": HEADS.value}
    (out / "tune.json").write_text(json.dumps(sizes | fastest | {"tried": tried}, indent=1) + "\n")
    print(f"fastest: {fastest['config']}\nwritten: {out}/tune.json")


def by_position() -> None:
    """The benchmark of single tokens at --positions."""
    names = [OP.value, *(["flat"] if OP.value in FLAT else []), "softmax"]
    shown = {"position": "position", "implementation": "operator", "levels": "levels"}
    shown |= {"state_mib": "state MiB", "live_mib": "live MiB", "us_per_token": "microseconds per token"}
    rows: list[dict] = []
    for position in numbers(POSITIONS, 0):
        rows += measure_decoding(position, names)
        text = markdown(rows, shown, {"us_per_token": ".1f"})
        save(rows, "decode", text)
    print(f"{text}\n\nwritten: {OUT.value}/decode.csv, .md")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"stray argument {argv[1]!r}: flags are written --name=value")
    compares = OP.value in FLAT
    default = ["chunked", "flat", "softmax"] if compares else ["recurrent", "associative", "chunked", "softmax"]
    names = IMPLEMENTATIONS.value or default
    for name in names:
        if name not in KNOWN:
            raise app.UsageError(f"--implementations: {name!r} is not one of {KNOWN}")
    if not compares and "flat" in names:
        raise app.UsageError(f"--implementations: 'flat' is {OP.value} itself; it stands beside {list(FLAT)} only")
    for flag in (IMPLEMENTATIONS, LENGTHS) if DECODE.value else (POSITIONS, TOKENS):
        if flag.present:
            raise app.UsageError(f"--{flag.name} goes {'without --decode' if DECODE.value else 'with --decode only'}")
    if TUNE.value and (DECODE.value or IMPLEMENTATIONS.present):
        raise app.UsageError("--tune: goes with neither --decode nor --implementations; it measures one kernel")
    if SELECTED.present and OP.value not in ROUTED:
        raise app.UsageError(f"--selected goes with --op={' or '.join(ROUTED)}")
    if DECODE.value and OP.value in ROUTED:
        raise app.UsageError(f"--decode: not of --op={OP.value}, whose memory depends on what was chosen")
    if HEADS.value % (KEY_HEADS.value or HEADS.value):
        raise app.UsageError(f"--key_heads={KEY_HEADS.value} must divide --heads={HEADS.value}")
    try:
        tune() if TUNE.value else by_position() if DECODE.value else by_length(names)
    except NotImplementedError as reason:
        raise app.UsageError(f"--{'tune' if TUNE.value else 'implementations'}: {reason}") from None
    except ValueError as reason:
        raise app.UsageError(f"--op={OP.value}: {reason}") from None


if __name__ == "__main__":
    app.run(main)
