"""Speed and memory of the operators on this machine: every implementation, forward and forward + backward, by length;
or one decoded token at a time.

    python -m experiments.benchmark        # B = 1, H = 4, K = V = 64, float32, T = 512 ... 32768
    python -m experiments.benchmark --heads=16 --key_dim=128 --value_dim=128 --dtype=bfloat16        # for a GPU
    python -m experiments.benchmark --op=log_linear_delta_rule         # beside the flat operator and softmax attention
    python -m experiments.benchmark --op=log_linear_delta_rule --decode --positions=1023,131071
    python -m experiments.benchmark --op=block_sparse_attention --selected=0.25 --lengths=8192,16384,32768
    python -m experiments.benchmark --op=block_sparse_attention --decode --positions=131071 --heads=12 --routes=6 \
        --key_dim=64 --value_dim=128 --dtype=bfloat16 --implementations=auto,pallas,chunked          # behind pages
    python -m experiments.benchmark --implementations=pallas,chunked --launches=10 --dtype=bfloat16 ...   # device time
    python -m experiments.benchmark --budget=131072 --lengths=2048,8192,32768,131072 --dtype=bfloat16    # all operators
    python -m experiments.benchmark --tune --budget=32768 --lengths=2048,32768 --dtype=bfloat16 ...  # a kernel's config

Prints a table and writes benchmark.csv, benchmark.md and benchmark.png into --out. Times are medians of --repeats
calls, each waited for, with the implementations taking turns; memory is XLA's figure for the temporaries of the
compiled program, beside the size of q + k + v + o. A program that would need more than --memory_limit_gib, or whose
last length took more than --slow_ms, is skipped and says so. "flat" is the operator without levels, "chunked", of the
same sizes; "softmax" has heads of the value dim. A log-linear operator has the levels that the length needs. Of a
routed operator each head gives the part --selected of its chunks, at random, to softmax; "flat" is then the delta rule
that keeps all, or the same block-sparse attention with all of them selected, which is full causal attention.

--decode writes decode.csv and decode.md: bytes of the state and time per token of the --tokens tokens that end at each
position, inside one compiled loop; on a GPU also the time of the kernels alone. The states and caches it begins with
are random numbers where that position has some, as time does not depend on what they are. Block-sparse attention has
pages of each of --fractions of the chunks, spread evenly, for each routing head.

--budget measures all operators beside each other, each at the sizes of its published model and with as many tokens at
every length: operators.csv, .md and .png, times of the kernels, and roofline.png, the rate of bytes that must move.

--launches=10 queues ten calls before it waits, which hides the host's part of them. --tune: `benchmark_tuning`.
"""

import math
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import app, flags

from efla_jax import metrics
from experiments import benchmark_decoding, benchmark_operators, benchmark_setting, benchmark_tuning
from experiments.benchmark_setting import (
    BATCH,
    BUDGET,
    DECODE,
    FLAT,
    FRACTIONS,
    HEADS,
    IMPLEMENTATIONS,
    KEY_DIM,
    KEY_HEADS,
    KNOWN,
    LAUNCHES,
    LENGTHS,
    MEMORY_LIMIT,
    OP,
    OPERATORS,
    OUT,
    PASSES,
    POSITIONS,
    REPEATS,
    ROUTED,
    ROUTES,
    SELECTED,
    SLOW,
    TOKENS,
    TUNE,
    VALUE_DIM,
    apply,
    levels_of,
    make_inputs,
    markdown,
    numbers,
    save,
    title,
)
from experiments.usage import run_in_one_line

flags.adopt_module_key_flags(benchmark_setting)


def program(name: str, both: bool) -> Callable:
    """The function measured: outputs and state, or the gradients of every input for a random-like loss on them."""

    attends = name == "softmax" or OP.value == "block_sparse_attention"  # the state: what keys and values were given

    def forward(inputs):
        o, state = apply(name, inputs)
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


def default_names(compares: bool) -> list[str]:
    """What to compare where --implementations does not say."""
    if DECODE.value:
        beside = ["chunked"] if OP.value in ROUTED else ["flat"] if compares else []
        return ["auto", *beside, "softmax"]
    return ["chunked", "flat", "softmax"] if compares else ["recurrent", "associative", "chunked", "softmax"]


def check_budget() -> None:
    """Refuse flags that --budget leaves without a meaning, and lengths that do not divide it."""
    if OPERATORS.present and (TUNE.value or not BUDGET.value):
        raise app.UsageError("--operators goes with --budget and without --tune only")
    if not BUDGET.value:
        return
    own = () if TUNE.value else (OP, HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM)
    for flag in (BATCH, DECODE, IMPLEMENTATIONS, *own):
        if flag.present:
            raise app.UsageError(
                f"--{flag.name} goes without --budget, which gives the rows and, of all operators, sizes"
            )
    if uneven := [T for T in numbers(LENGTHS, 1) if BUDGET.value % T]:
        raise app.UsageError(f"--budget={BUDGET.value} is no multiple of {uneven[0]} tokens, one of --lengths")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"stray argument {argv[1]!r}: flags are written --name=value")
    check_budget()
    if BUDGET.value and not TUNE.value:
        return benchmark_operators.by_budget()
    compares = OP.value in FLAT
    names = IMPLEMENTATIONS.value or default_names(compares)
    for name in names:
        if name not in KNOWN:
            raise app.UsageError(f"--implementations: {name!r} is not one of {KNOWN}")
    if not compares and "flat" in names:
        raise app.UsageError(f"--implementations: 'flat' is {OP.value} itself; it stands beside {list(FLAT)} only")
    for flag in (LENGTHS, SELECTED) if DECODE.value else (POSITIONS, TOKENS, FRACTIONS):
        if flag.present:
            raise app.UsageError(f"--{flag.name} goes {'without --decode' if DECODE.value else 'with --decode only'}")
    if TUNE.value and (DECODE.value or IMPLEMENTATIONS.present):
        raise app.UsageError("--tune: goes with neither --decode nor --implementations; it measures one kernel")
    if SELECTED.present and OP.value not in ROUTED:
        raise app.UsageError(f"--selected goes with --op={' or '.join(ROUTED)}")
    if DECODE.value and OP.value == "routed_delta_rule":
        raise app.UsageError(f"--decode: not of --op={OP.value}, one of whose tokens is the delta rule's")
    if ROUTES.present and OP.value != "block_sparse_attention":
        raise app.UsageError("--routes goes with --op=block_sparse_attention")
    if HEADS.value % (ROUTES.value or HEADS.value):
        raise app.UsageError(f"--routes={ROUTES.value} must divide --heads={HEADS.value}")
    if HEADS.value % (KEY_HEADS.value or HEADS.value):
        raise app.UsageError(f"--key_heads={KEY_HEADS.value} must divide --heads={HEADS.value}")
    try:
        if TUNE.value:
            benchmark_tuning.tune()
        elif DECODE.value:
            benchmark_decoding.by_position(names)
        else:
            by_length(names)
    except NotImplementedError as reason:
        raise app.UsageError(f"--{'tune' if TUNE.value else 'implementations'}: {reason}") from None
    except ValueError as reason:
        raise app.UsageError(f"--op={OP.value}: {reason}") from None


if __name__ == "__main__":
    run_in_one_line(main)
