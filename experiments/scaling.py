"""One host's devices together: whether they compute what one computes, how much faster, and what communication costs.

    python -m experiments.scaling --out=experiments/results/scaling               # all devices that are here
    JAX_NUM_CPU_DEVICES=4 python -m experiments.scaling --tiny --out=runs/tiny    # simulated ones of a CPU

equal    losses of three steps and one whole update of --config on data, fsdp, tensor and context meshes against one
         device, in float32 and as configured, and a checkpoint of a split state restored on one device
rows     tokens/s of --config at --rows x --window packed tokens a device, split over data and over fsdp
whole    the same where every row is one document
overlap  the stage rows with XLA told to begin collectives early (OVERLAP below), on GPUs
context  tokens/s of one sequence of --lengths tokens, split over context, of --mixers at --depth layers

Devices: 1, 2, 4, ... up to all. Efficiency is the rate over that of one device times the number of devices. Every stage
is a process of its own: all compile at once, then each has the devices to itself. A stage that fails or outlives its
time is told and left out. Writes scaling.jsonl as rows come, scaling.md and scaling.png, into --out.
"""

import argparse
import json
import math
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from efla_jax import metrics
from experiments.generate_throughput import config_of, names, sizes
from experiments.language_runs import positive
from experiments.result_files import commit

STAGES = ["rows", "equal", "whole", "overlap", "context"]
MIXERS = [
    "configs/lm_340m.py:efla", "configs/lm_340m.py:gated_delta_net", "configs/lm_log_linear.py:log_linear_mamba2",
    "configs/lm_340m.py:attention",
]  # fmt: skip
OVERLAP = "--xla_gpu_enable_latency_hiding_scheduler=true " + " ".join(
    f"--xla_gpu_pipeline_{kind}=on" for kind in ("all_gather", "all_reduce", "reduce_scatter")
)
TINY = {
    "config": "configs/quickstart.py:efla", "mixers": ["configs/quickstart.py:efla", "configs/quickstart.py:mamba2"],
    "lengths": [64, 128], "window": 32, "rows": 2, "depth": 3, "equal_depth": 1, "seconds": 0.02, "vocab_size": 256,
    "equal_length": 32, "equal_rows": 4, "model": (("width", 32), ("dtype", "float32")),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(
        prog="python -m experiments.scaling", allow_abbrev=False, description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    whole.add_argument("--stages", type=names, default=STAGES, help="which, in this order")
    whole.add_argument("--config", default="configs/lm_340m.py:efla", help="of the stages equal and rows")
    whole.add_argument("--rows", type=positive, default=16, help="rows a device of the stage rows")
    whole.add_argument("--window", type=positive, default=2048, help="tokens of these rows")
    whole.add_argument("--mixers", type=names, default=MIXERS, help="configs of the stage context")
    whole.add_argument("--lengths", type=sizes, default=[131072, 524288], help="tokens of the stage context")
    whole.add_argument("--depth", type=positive, default=3, help="layers of the stage context")
    whole.add_argument("--equal_depth", type=positive, default=4, help="layers of the stage equal")
    whole.add_argument("--equal_rows", type=positive, default=8, help="rows of the stage equal")
    whole.add_argument("--equal_length", type=positive, default=2048, help="tokens of these rows")
    whole.add_argument("--vocab_size", type=positive, default=32000)
    whole.add_argument("--seconds", type=float, default=0.5, help="of each of three timed rounds")
    whole.add_argument("--compile_limit", type=float, default=150.0, help="seconds until all stages have compiled")
    whole.add_argument("--limit", type=float, default=60.0, help="seconds of one stage from there on")
    whole.add_argument("--tiny", action="store_true", help="sizes for simulated devices of a CPU")
    whole.add_argument("--stage", default="", help="this one, in this process; for the program's own use")
    whole.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/scaling"), help="folder")
    return whole


def cases_of(stage: str, chosen: argparse.Namespace, devices: int) -> list:
    """The steps of a stage; one device comes first."""
    from experiments.scaling_stages import Case

    counts = [2**i for i in range(1, devices.bit_length()) if 2**i <= devices]
    given: tuple = TINY["model"] if chosen.tiny else ()
    kind, _, mixer = stage.partition(" ")
    if kind in ("rows", "whole", "overlap"):
        split = [("", 1), *((axis, count) for count in reversed(counts) for axis in ("data", "fsdp"))]
        return [Case(chosen.config, *one, chosen.rows * one[1], chosen.window, given, kind != "whole") for one in split]
    if kind == "equal":
        shape = chosen.equal_rows, chosen.equal_length
        fields = *given, ("depth", chosen.equal_depth)
        heads = [options["num_heads"] for options in config_of(chosen.config)["model"]["mixer_options"].values()]
        meshes = [(axis, counts[-1]) for axis in ("data", "context", "fsdp")] if counts else []
        if (tensor := math.gcd(*heads, 2 ** len(counts))) > 1:
            meshes.insert(1, ("tensor", tensor))
        dtypes: tuple[tuple, ...] = ((("dtype", "float32"),), *(() if chosen.tiny else ((),)))
        one = [Case(chosen.config, "", 1, *shape, (*fields, *dtype), True, True) for dtype in dtypes]
        return one + [
            Case(chosen.config, *mesh, *shape, (*fields, *dtype), True, True) for mesh in meshes for dtype in dtypes
        ]
    fields = (*given, ("depth", chosen.depth), ("remat", "full"))
    split = [("", 1), *(("context", count) for count in reversed(counts))]
    return [Case(mixer, *one, 1, length, fields, False) for length in chosen.lengths for one in split]


def run_stage(chosen: argparse.Namespace) -> None:
    """Compile, say so, wait for a line and measure; rows go to standard output."""
    import jax

    from experiments import scaling_stages

    cases = cases_of(chosen.stage, chosen, jax.device_count())
    began = time.perf_counter()
    programs = list(zip(cases, scaling_stages.compiled(cases, chosen.vocab_size), strict=True))
    print(json.dumps({"compiled_seconds": time.perf_counter() - began}), flush=True)
    sys.stdin.readline()
    scaling_stages.sum_of_devices()
    kind = chosen.stage.partition(" ")[0]
    found = scaling_stages.equality(programs) if kind == "equal" else scaling_stages.speed(programs, chosen.seconds)
    for row in found:
        print(json.dumps({"stage": kind} | row), flush=True)


class Stage:
    """The process of a stage, its lines of JSON as they come, and the rest of what it says in a file."""

    def __init__(self, name: str, words: Sequence[str], out: pathlib.Path):
        self.name, self.lines = name, queue.Queue()
        self.log = out / f"{name.replace('/', '_').replace(' ', '_').replace(':', '_')}.log"
        # Processes that compile side by side share the memory; multicast over NVLink can take the GPUs of a host down.
        own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
               "NCCL_NVLS_ENABLE": "0"}  # fmt: skip
        if name == "overlap":
            own["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {OVERLAP}"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "experiments.scaling", *words, f"--stage={name}"], env=os.environ | own,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith("{"):
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def next(self, until: float) -> dict[str, Any] | None:
        """The next row; None at its end, or when it is over time and ended here."""
        try:
            return self.lines.get(timeout=max(until - time.monotonic(), 0.01))
        except queue.Empty:
            print(f"{self.name}: out of time")
            self.process.kill()
            return None

    def go(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """Wait for its end, and show the last lines of one that failed."""
        if self.process.wait():
            print(
                f"{self.name}: status {self.process.returncode}\n" + "\n".join(self.log.read_text().splitlines()[-8:])
            )
        self.log.unlink()


def measure(chosen: argparse.Namespace, words: Sequence[str]) -> None:
    """All stages: compiled at once, measured one after another."""
    chosen.out.mkdir(parents=True, exist_ok=True)
    wanted = [name for stage in chosen.stages for name in
              ([f"context {mixer}" for mixer in chosen.mixers] if stage == "context" else [stage])]  # fmt: skip
    about = {"commit": commit()}
    began = time.monotonic()
    stages = [Stage(name, words, chosen.out) for name in wanted]
    until = began + chosen.compile_limit
    ready = [(stage, stage.next(until)) for stage in stages]
    for stage, first in ready:
        limit, done = time.monotonic() + chosen.limit, first is None
        if not done:
            print(f"{stage.name}: compiled in {first['compiled_seconds']:.0f} s, at {time.monotonic() - began:.0f} s",
                  flush=True)  # fmt: skip
            stage.go()
        while not done and (row := stage.next(limit)) is not None:
            with open(chosen.out / "scaling.jsonl", "a") as file:
                file.write(json.dumps(row | about) + "\n")
            print(line_of(row), flush=True)
        stage.close()
        if (chosen.out / "scaling.jsonl").is_file():
            report(chosen.out)


# ---- tables ---------------------------------------------------------------------------------------------------------


def line_of(row: dict[str, Any]) -> str:
    """What a row says in a line of a log."""
    if row["stage"] == "equal":
        kept = ("mesh", "dtype", "losses", "loss_difference", "update_difference", "worst_leaf", "equal",
                "restored_on_one")  # fmt: skip
    else:
        kept = ("config", "axis", "devices", "length", "tokens_per_second", "step_seconds", "exposed_seconds",
                "busy_seconds", "layer_bytes", "planned_gib", "note")  # fmt: skip
    return f"{row['stage']}: " + ", ".join(f"{name} {shown(row[name])}" for name in kept if name in row)


def shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(shown, value))
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def efficiencies(rows: Sequence[dict[str, Any]]) -> dict[int, float]:
    """By the place of a row: its rate over that of one device with the same work each, times the number of devices."""
    found = {}
    for i, row in enumerate(rows):
        same = [
            one["tokens_per_second"] for one in rows
            if one["devices"] == 1 and "tokens_per_second" in one
            and all(one[name] == row[name] for name in ("stage", "config", "length", "device"))
        ]  # fmt: skip
        if same and "tokens_per_second" in row:
            found[i] = row["tokens_per_second"] / (row["devices"] * same[-1])
    return found


def table(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    cells = [list(header), ["---"] * len(header), *([shown(x) for x in line] for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def speed_table(rows: Sequence[dict[str, Any]]) -> str:
    """Of the other stages."""
    ratio = efficiencies(rows)
    header = ("config", "mesh", "rows x tokens", "ms a step", "tokens/s", "efficiency", "communication, ms",
              "not hidden, ms", "busy, ms", "planned GiB", "KiB a layer by collectives", "note")  # fmt: skip

    def milliseconds(row, name):
        return 1e3 * row[name] if name in row else "-"

    lines = [
        (row["config"].removeprefix("configs/").replace(".py:", " "),
         f"{row['axis']} {row['devices']}" if row["axis"] else "one device", f"{row['rows']} x {row['length']}",
         milliseconds(row, "step_seconds"), row.get("tokens_per_second", "-"), ratio.get(i, "-"),
         milliseconds(row, "communication_seconds"), milliseconds(row, "exposed_seconds"),
         milliseconds(row, "busy_seconds"), row.get("planned_gib", "-"),
         ", ".join(f"{name} {size / 1024:.4g}" for name, size in row.get("layer_bytes", {}).items()) or "-",
         row.get("note", ""))
        for i, row in enumerate(rows)
    ]  # fmt: skip
    return table(header, lines)


def equal_table(rows: Sequence[dict[str, Any]]) -> str:
    """Of the stage equal."""
    lines = [(row["mesh"], row["dtype"], row["losses"], row["loss_difference"], row["update_difference"],
              f"{shown(row['worst_leaf_difference'])} ({row['worst_leaf']})", "yes" if row["equal"] else "NO")
             for row in rows if "losses" in row]  # fmt: skip
    header = ("mesh", "dtype", "losses", "furthest loss, relative", "update", "furthest leaf of it", "equal")
    saved = [
        f"A checkpoint of {row['mesh']} on one device: {'same bits' if row['restored_on_one'] else 'DIFFERS'}."
        for row in rows
        if "restored_on_one" in row
    ]
    return table(header, lines) + "\n" + "\n".join(saved) + "\n"


def report(out: pathlib.Path) -> None:
    """scaling.md and scaling.png of the rows in scaling.jsonl."""
    rows = [json.loads(line) for line in (out / "scaling.jsonl").read_text().splitlines()]
    parts = []
    for stage in ("equal", "rows", "whole", "overlap", "context"):
        own = [row for row in rows if row["stage"] == stage]
        if own:
            device = next((row["device"] for row in own if "device" in row), "")
            text = equal_table(own) if stage == "equal" else speed_table(own)
            parts.append(f"## {stage}: {device}, commit {own[-1]['commit'] or 'unknown'}\n\n{text}")
    (out / "scaling.md").write_text("\n".join(parts))
    panels = []
    for stage, goal in (("rows", 0.95), ("whole", 0.95), ("overlap", 0.95), ("context", 0.9)):
        own = [row for row in rows if row["stage"] == stage]
        ratio, lines = efficiencies(own), {}
        for i, row in enumerate(own):
            name = row["axis"] if stage != "context" else f"{row['config'].rpartition(':')[2]}, {row['length']}"
            if row["axis"] and i in ratio:
                lines.setdefault(name, {1: 1.0})[row["devices"]] = ratio[i]
        points = {name: tuple(zip(*sorted(one.items()), strict=True)) for name, one in lines.items()}
        if points:
            panels.append(metrics.Panel(points, "devices", "efficiency", stage, {f"goal {goal}": goal}))
    if panels:
        metrics.plot_lines(panels, out / "scaling.png")


def main(words: list[str] | None = None) -> None:
    """Run a command line (None: the program's); what is wrong with it is one line, exit status 1."""
    words = sys.argv[1:] if words is None else words
    chosen = parser().parse_args(words)
    if chosen.tiny:
        vars(chosen).update(TINY)
    if unknown := set(chosen.stages) - set(STAGES):
        raise SystemExit(f"error: --stages: {', '.join(sorted(unknown))} not known; give some of {','.join(STAGES)}.")
    if not math.isfinite(chosen.limit) or chosen.limit <= 0:
        raise SystemExit(f"error: --limit={chosen.limit}: give seconds above 0.")
    try:
        run_stage(chosen) if chosen.stage else measure(chosen, words)
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
