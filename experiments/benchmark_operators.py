"""Every sequence operator at the sizes of its published model, over lengths that share one budget of tokens: the
`--budget` of `experiments.benchmark`.

Times are those of the kernels in a profiler's trace, or of whole calls where a device's trace shows none. "forward +
backward" is one program of outputs and of all gradients for given cotangents. "moved" is what must be read and written
once: forward, arguments and outputs; backward, arguments and cotangents again, and gradients. What an implementation
reads twice or saves between its passes is not in it, so moved / time is at most the bandwidth of the memory.
"""

import csv
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app

from efla_jax import metrics, ops, selfcheck
from experiments.benchmark_setting import (
    BUDGET,
    DTYPE,
    LENGTHS,
    OPERATORS,
    OUT,
    PASSES,
    REPEATS,
    SLOW,
    markdown,
    numbers,
    save,
)

# Bytes a second of a GPU's memory, from the maker's data sheets, by device kind.
BANDWIDTH = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H100 PCIe": 2.0e12}
ENOUGH = 0.25  # seconds of calls, of which one more is not made


class Operator(NamedTuple):
    """What is measured: an operator of `ops`, its sizes, and the implementation on a Hopper GPU and elsewhere."""

    op: str
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    implementation: tuple[str, str] = ("pallas", "chunked")


MAMBA = 48, 1, 128, 64
DELTA = 16, 16, 128, 128
# "auto" of softmax attention is cuDNN's on a GPU.
MEASURED = {
    "delta_rule": Operator("delta_rule", *DELTA),
    "efla": Operator("delta_flow", *DELTA),
    "routed_delta_rule": Operator("routed_delta_rule", *DELTA),
    "log_linear_delta_rule": Operator("log_linear_delta_rule", *DELTA),
    "mamba2": Operator("linear_attention", *MAMBA),
    "log_linear_mamba2": Operator("log_linear_attention", *MAMBA),
    "softmax": Operator("softmax_attention", *DELTA),
    "softmax_cudnn": Operator("softmax_attention", *DELTA, ("auto", "auto")),
    "softmax_cudnn_48x64": Operator("softmax_attention", 48, 48, 64, 64, ("auto", "auto")),
}


class Case(NamedTuple):
    """One program: an operator of MEASURED on `rows` rows of `length` tokens, forward or forward + backward."""

    name: str
    length: int
    rows: int
    dtype: str
    both: bool

    @property
    def operator(self) -> Operator:
        return MEASURED[self.name]

    def arguments(self) -> tuple[dict[str, jax.Array], jax.Array]:
        """Random arguments by name, and the outputs' cotangents: unit keys (EFLA: of length 2), erase and beta in
        (0, 1), log decay of about -0.1, level weights about 0.8; every fourth chunk of a routed operator goes."""
        of, keys = self.operator, iter(jax.random.split(jax.random.key(self.length), 7))

        def normal(*rest):
            return jax.random.normal(next(keys), (self.rows, self.length, *rest))

        q, k = (ops.l2_normalize(normal(of.key_heads, of.key_dim)).astype(self.dtype) for _ in range(2))
        values = normal(of.heads, of.value_dim).astype(self.dtype)
        cotangents = normal(of.heads, of.value_dim).astype(self.dtype)
        if of.op == "softmax_attention":
            return {"q": q, "k": k, "v": values}, cotangents
        gate = jax.nn.sigmoid(normal(of.heads))
        log_decay = -jax.nn.softplus(normal(of.heads) - 2)
        if of.op == "delta_flow":
            return {"q": q, "k": 2 * k, "v": values, "beta": gate}, cotangents
        named = {"q": q, "k": k, "u": values} | ({"erase": gate} if of.op.endswith("delta_rule") else {})
        named["log_decay"] = log_decay
        if of.op == "routed_delta_rule":
            drawn = jax.random.uniform(next(keys), (self.rows, -(-self.length // 64), of.heads))
            named["keep"] = (drawn > 0.25).astype(jnp.float32)
        if of.op.startswith("log_linear"):
            named["level_weights"] = jax.nn.softplus(normal(of.heads, self.length.bit_length()))
        return named, cotangents

    def program(self) -> Callable:
        """(arguments, cotangents) -> outputs, or (outputs, gradients)."""
        implementation = self.operator.implementation[0 if selfcheck.hopper() else 1]
        op = getattr(ops, self.operator.op)

        def forward(named):
            return op(**named, implementation=implementation)[0]

        def both(named, cotangents):
            o, pull = jax.vjp(forward, named)
            return o, pull(cotangents)[0]

        return both if self.both else lambda named, _: forward(named)

    def moved(self) -> int:
        """Bytes that must be read and written."""
        named, cotangents = jax.eval_shape(self.arguments)
        given, out = (sum(math.prod(x.shape) * x.dtype.itemsize for x in of) for of in (named.values(), [cotangents]))
        return 3 * given + 2 * out if self.both else given + out


def compiled(case: Case) -> jax.stages.Compiled:
    """The case's program, compiled for this device."""
    return jax.jit(case.program()).lower(*jax.eval_shape(case.arguments)).compile()


def drawn(case: Case) -> tuple[dict[str, jax.Array], jax.Array]:
    """The case's arguments, made in one program on the device."""
    return jax.jit(case.arguments)()


def measure(run: Callable, *arguments) -> dict[str, float]:
    """Milliseconds of a call, and whether the trace of a GPU gave them: few calls where they are slow."""
    jax.block_until_ready(run(*arguments))
    begin = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    seconds = time.perf_counter() - begin
    calls = max(1, min(REPEATS.value, int(ENOUGH / seconds)))
    ms = selfcheck.device_milliseconds(run, *arguments, calls=calls)
    if math.isfinite(ms):
        return {"ms": ms, "traced": True}
    times = [seconds]
    for _ in range(calls - 1):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - begin)
    return {"ms": 1e3 * statistics.median(times), "traced": False}


def row_of(case: Case, arguments: tuple) -> dict[str, Any]:
    """The case's row of the table. What a compiler or a device refuses is told, and leaves NaN."""
    of, kind = case.operator, jax.devices()[0].device_kind
    row: dict[str, Any] = {"operator": case.name, "measured": PASSES[case.both], "T": case.length, "B": case.rows}
    row |= {"H": of.heads, "G": of.key_heads, "K": of.key_dim, "V": of.value_dim, "moved_gib": case.moved() / 2**30}
    row |= dict.fromkeys(("ms", "tokens_per_s", "tb_per_s", "of_bandwidth", "memory_gib"), math.nan) | {"traced": False}
    try:
        run = compiled(case)
        if memory := run.memory_analysis():
            sizes = memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes
            row["memory_gib"] = sum(sizes) / 2**30
        row |= measure(run, *arguments)
    except (NotImplementedError, ValueError, ExceptionGroup, jax.errors.JaxRuntimeError) as reason:
        print(f"{case.name} {PASSES[case.both]} at T={case.length}: {str(reason)[:200]}", flush=True)
        return row
    speed = case.moved() / (row["ms"] / 1e3)
    row |= {"tokens_per_s": 1e3 * case.rows * case.length / row["ms"], "tb_per_s": speed / 1e12}
    return row | {"of_bandwidth": speed / BANDWIDTH.get(kind, math.nan)}


def heading() -> str:
    """What was measured, and where."""
    where = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    return f"operators on {where}: {BUDGET.value} tokens at every length, {DTYPE.value}"


def by_length(rows: list[dict], column: str, form: str) -> str:
    """A Markdown table of one column: a line for each operator and pass, T across."""
    lengths, found = sorted({r["T"] for r in rows}), {(r["operator"], r["measured"], r["T"]): r[column] for r in rows}
    lines, seen = [], set()
    for r in sorted(rows, key=lambda r: list(MEASURED).index(r["operator"])):
        if (r["operator"], r["measured"]) not in seen:
            seen.add((r["operator"], r["measured"]))
            sizes = f"{r['H']}, {r['G']}, {r['K']}, {r['V']}"
            values = {str(T): found.get((r["operator"], r["measured"], T), math.nan) for T in lengths}
            lines.append({"operator": r["operator"], "H, G, K, V": sizes, "pass": r["measured"]} | values)
    return markdown(lines, {name: name for name in lines[0]}, dict.fromkeys(map(str, lengths), form))


def table(rows: list[dict]) -> str:
    """Milliseconds, the rate of bytes that must move, and memory."""
    clock = "of the kernels, from a trace" if all(r["traced"] for r in rows if r["ms"] == r["ms"]) else "of whole calls"
    parts = [f"Milliseconds {clock}; T across.\n\n{by_length(rows, 'ms', '.3f')}"]
    parts.append(f"TB/s of what must be read and written once.\n\n{by_length(rows, 'tb_per_s', '.2f')}")
    parts.append(f"GiB of arguments, results and temporaries, by XLA's plan.\n\n{by_length(rows, 'memory_gib', '.2f')}")
    return "\n\n".join(parts)


def draw(rows: list[dict], out: pathlib.Path) -> None:
    """operators.png, ms over T; roofline.png, TB/s of what must move, below the card's bandwidth. Axes logarithmic."""
    card = BANDWIDTH.get(jax.devices()[0].device_kind)
    levels = {"of the memory": card / 1e12} if card else {}
    for column, label, file in (("ms", "ms", "operators"), ("tb_per_s", "TB/s that must move", "roofline")):
        panels = []
        for measured in PASSES:
            lines: dict[str, tuple] = {}
            for name in MEASURED:
                chosen = [r for r in rows if r["operator"] == name and r["measured"] == measured]
                points = [(r["T"], r[column]) for r in chosen if math.isfinite(r[column])]
                if points:
                    lines[name] = tuple(zip(*points, strict=True))
            if lines:
                given = levels if column == "tb_per_s" else {}
                panels.append(metrics.Panel(lines, "tokens T", f"{label}, {measured}", "", given, logarithmic=True))
        if panels:
            metrics.plot_lines(panels, out / f"{file}.png")


def earlier(out: pathlib.Path) -> list[dict]:
    """The rows that a run of the same device, budget and dtype has left in the folder."""
    if not (out / "operators.md").exists() or (out / "operators.md").read_text().splitlines()[0] != heading():
        return []
    with open(out / "operators.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    words, whole = ("operator", "measured"), ("T", "B", "H", "G", "K", "V")
    of = {name: str for name in words} | {name: int for name in whole} | {"traced": lambda word: word == "True"}
    return [{name: of.get(name, float)(word) for name, word in row.items()} for row in rows]


def joined(rows: list[dict], fresh: list[dict]) -> list[dict]:
    """The rows with fresh ones added, or in the places of those of the same operator, pass and length."""
    found = {(r["T"], r["operator"], r["measured"]): r for r in [*rows, *fresh]}
    order = list(MEASURED)
    return sorted(found.values(), key=lambda r: (r["T"], order.index(r["operator"]), PASSES.index(r["measured"])))


def by_budget() -> None:
    """Measure all chosen operators over --lengths, longest last; every length is saved when it is done. Rows of an
    earlier run in --out that are not measured again stay."""
    names, lengths, out = OPERATORS.value or list(MEASURED), numbers(LENGTHS, 1), pathlib.Path(OUT.value)
    if missing := [name for name in names if name not in MEASURED]:
        raise app.UsageError(f"--operators: {missing[0]!r} is not one of {list(MEASURED)}")
    rows = earlier(out)
    for length in lengths:
        for name in list(names):
            cases = [Case(name, length, BUDGET.value // length, DTYPE.value, both) for both in (False, True)]
            arguments = jax.block_until_ready(drawn(cases[0]))
            fresh = [row_of(case, arguments) for case in cases]
            rows = joined(rows, fresh)
            for r in fresh:
                label = f"T={length:<7} {name:<22} {r['measured']:<17}"
                print(f"{label} {r['ms']:10.3f} ms {r['tb_per_s']:6.2f} TB/s", flush=True)
            if not fresh[-1]["ms"] <= SLOW.value:
                names.remove(name)
                print(f"skipped from here on, too slow or refused: {name}", flush=True)
        save(rows, "operators", table(rows), heading())  # an interrupted run keeps what it measured
        draw(rows, out)
    print(f"\n{table(rows)}\n\nwritten: {out}/operators.csv, .md, .png, roofline.png")
