"""Speed and memory of the operators on this machine: every implementation, forward and forward + backward, by length.

    python -m experiments.benchmark        # B = 1, H = 4, K = V = 64, float32, T = 512 ... 32768
    python -m experiments.benchmark --heads=16 --key_dim=128 --value_dim=128 --dtype=bfloat16        # for a GPU

Prints a table and writes benchmark.csv, benchmark.md and benchmark.png into --out. Times are medians of --repeats
calls, each waited for, with the implementations taking turns; memory is XLA's figure for the temporaries of the
compiled program, beside the size of q + k + v + o. A program that would need more than --memory_limit_gib, or whose
last length took more than --slow_ms, is skipped and says so.
"""

import csv
import math
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import app, flags

from efla_jax import metrics, ops

OP = flags.DEFINE_enum("op", "delta_rule", ["delta_rule", "linear_attention"], "operator to measure")
IMPLEMENTATIONS = flags.DEFINE_list(
    "implementations", ["recurrent", "associative", "chunked", "softmax"], "what to compare"
)
LENGTHS = flags.DEFINE_list("lengths", ["512", "1024", "2048", "4096", "8192", "16384", "32768"], "sequence lengths T")
BATCH = flags.DEFINE_integer("batch", 1, "rows B", lower_bound=1)
HEADS = flags.DEFINE_integer("heads", 4, "heads H", lower_bound=1)
KEY_DIM = flags.DEFINE_integer("key_dim", 64, "key dim K", lower_bound=1)
VALUE_DIM = flags.DEFINE_integer("value_dim", 64, "value dim V", lower_bound=1)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "dtype of q, k and v")
CHUNK_SIZE = flags.DEFINE_enum("chunk_size", "64", ["16", "32", "64", "128"], "tokens of a chunk")
REPEATS = flags.DEFINE_integer("repeats", 5, "timed calls; the median counts", lower_bound=1)
MEMORY_LIMIT = flags.DEFINE_float("memory_limit_gib", 6.0, "skip programs whose temporaries need more")
SLOW = flags.DEFINE_float("slow_ms", 8000.0, "skip longer sequences of an implementation once a call took this long")
OUT = flags.DEFINE_string("out", "runs/benchmark", "folder for the table and the picture")
PASSES = ("forward", "forward+backward")


def make_inputs(length: int) -> tuple[jax.Array, ...]:
    """q, k (unit keys), u, erase in (0, 1) and log decay of about -0.1, random."""
    keys = iter(jax.random.split(jax.random.key(length), 5))
    shape = BATCH.value, length, HEADS.value

    def normal(*rest):
        return jax.random.normal(next(keys), (*shape, *rest))

    q, k = (ops.l2_normalize(normal(KEY_DIM.value)).astype(DTYPE.value) for _ in range(2))
    return q, k, normal(VALUE_DIM.value).astype(DTYPE.value), jax.nn.sigmoid(normal()), -jax.nn.softplus(normal() - 2)


def program(implementation: str, both: bool) -> Callable:
    """The function measured: the outputs, or the gradients of every input for a random-like loss on outputs and
    state."""
    options = dict(implementation=implementation, chunk_size=int(CHUNK_SIZE.value))

    def forward(q, k, u, erase, log_decay):
        if implementation == "softmax":
            return ops.softmax_attention(q * q.shape[-1] ** -0.5, k, u)[0], jnp.zeros(())
        if OP.value == "linear_attention":
            return ops.linear_attention(q, k, u, log_decay, **options)
        return ops.delta_rule(q, k, u, erase, log_decay, **options)

    def loss(*inputs):
        o, state = forward(*inputs)
        return jnp.sum(jnp.sin(o.astype(jnp.float32))) + jnp.sum(jnp.sin(state))

    return jax.grad(loss, argnums=(0, 1, 2, 3, 4)) if both else forward


def measure(length: int, names: list[str]) -> list[dict]:
    """One row per implementation and pass. Calls take turns, so that a busy machine slows all of them alike."""
    inputs = make_inputs(length)
    ideal = sum(x.nbytes for x in inputs[:3]) + inputs[2].nbytes
    compiled, rows = {}, []
    for name in names:
        for both in (False, True):
            run = jax.jit(program(name, both)).lower(*inputs).compile()
            memory = run.memory_analysis()
            temporary = memory.temp_size_in_bytes if memory else float("nan")
            row = dict(op=OP.value, implementation=name, measured=PASSES[both], T=length, memory_mib=temporary / 2**20)
            row |= dict(memory_over_qkvo=temporary / ideal, ms=float("nan"), tokens_per_s=float("nan"))
            rows.append(row)
            if temporary > MEMORY_LIMIT.value * 2**30:
                print(f"skipped: {name} {PASSES[both]} at T={length} needs {temporary / 2**30:.1f} GiB", flush=True)
                continue
            jax.block_until_ready(run(*inputs))
            compiled[name, both] = run, row
    times = {key: [] for key in compiled}
    for _ in range(REPEATS.value):
        for key, (run, _) in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(*inputs))
            times[key].append(time.perf_counter() - begin)
    for key, (_, row) in compiled.items():
        seconds = statistics.median(times[key])
        row |= dict(ms=1e3 * seconds, tokens_per_s=BATCH.value * length / seconds)
    return rows


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table, one line per length, one column pair per implementation and pass."""
    lines = [
        "| T | implementation | pass | ms | tokens/s | temporaries MiB | of q+k+v+o |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        shown = (r["T"], r["implementation"], r["measured"], f"{r['ms']:.2f}", f"{r['tokens_per_s']:,.0f}")
        lines.append(f"| {' | '.join(map(str, shown))} | {r['memory_mib']:.1f} | {r['memory_over_qkvo']:.2f} |")
    return "\n".join(lines)


def save(rows: list[dict], out: pathlib.Path) -> None:
    """benchmark.csv, benchmark.md and benchmark.png."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "benchmark.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    shape = f"B={BATCH.value}, H={HEADS.value}, K={KEY_DIM.value}, V={VALUE_DIM.value}"
    where = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    title = f"{OP.value} on {where}: {shape}, {DTYPE.value}, chunk {CHUNK_SIZE.value}"
    (out / "benchmark.md").write_text(f"{title}\n\n{table(rows)}\n")
    draw(rows, title, out / "benchmark.png")


def draw(rows: list[dict], title: str, path: pathlib.Path) -> None:
    """Time and memory of forward + backward over the length, all axes logarithmic."""
    both = [r for r in rows if r["measured"] == PASSES[True]]
    panels, heading = [], title.replace(": ", "\n", 1)
    for column, label in (("ms", "ms, forward + backward"), ("memory_mib", "temporaries, MiB")):
        lines = {}
        for name in dict.fromkeys(r["implementation"] for r in both):
            points = [(r["T"], r[column]) for r in both if r["implementation"] == name and math.isfinite(r[column])]
            if points:
                lines[name] = tuple(zip(*points, strict=True))
        panels.append(metrics.Panel(lines, "tokens T", label, heading if not panels else "", logarithmic=True))
    metrics.plot_lines(panels, path)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"stray argument {argv[1]!r}: flags are written --name=value")
    try:
        lengths = sorted(int(x) for x in LENGTHS.value)
    except ValueError:
        raise app.UsageError(
            f"--lengths={','.join(LENGTHS.value)}: not whole numbers; write e.g. --lengths=512,1024"
        ) from None
    known = ("recurrent", "associative", "chunked", "pallas", "softmax")
    for name in IMPLEMENTATIONS.value:
        if name not in known:
            raise app.UsageError(f"--implementations: {name!r} is not one of {known}")
    rows, names, out = [], list(IMPLEMENTATIONS.value), pathlib.Path(OUT.value)
    for length in lengths:
        fresh = measure(length, names)
        rows += fresh
        for r in fresh:
            label = f"T={r['T']:<6} {r['implementation']:<12} {r['measured']:<17}"
            print(f"{label} {r['ms']:10.2f} ms {r['memory_mib']:10.1f} MiB", flush=True)
        save(rows, out)  # an interrupted benchmark keeps what it measured
        too_slow = {r["implementation"] for r in fresh if not r["ms"] <= SLOW.value}
        names = [n for n in names if n not in too_slow]
        if too_slow and length < lengths[-1]:
            print(f"skipped from here on, too slow or too large: {', '.join(sorted(too_slow))}", flush=True)
    print(f"\n{table(rows)}\n\nwritten: {out}/benchmark.csv, .md, .png")


if __name__ == "__main__":
    app.run(main)
