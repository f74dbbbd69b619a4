"""Are the GPU kernels right on this GPU? Every kernel, forward and backward, over awkward inputs and shapes.

    python -m efla_jax.selfcheck              # on an NVIDIA Hopper GPU, a few minutes, most of them compilation
    python -m efla_jax.selfcheck --times      # and a table of device times
    python -m efla_jax.selfcheck --only=documents        # the cases whose name has this word
    python -m efla_jax.selfcheck --interpret  # tiny cases in Mosaic's interpreter, on a CPU

The reference is implementation="recurrent" on the same 16-bit inputs, widened to float32. An error is
RMS(difference) / RMS(reference), of outputs, states and every gradient; beside it stands that of implementation=
"chunked", the same algorithm in XLA at the same precisions (of softmax attention and the short convolution the
reference is XLA's in float32). A case passes if no error is more than 1.4 times that of XLA (float16: 3.5 times) unless
within one rounding of the dtype, and if a second run gives the same bits. "not covered" is a case that the kernel
declines with a reason; that is no failure. Exit status: 0 all passed, 1 some failed, 2 no such GPU.
"""

import argparse
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax import (
    selfcheck_attention,
    selfcheck_conv,
    selfcheck_log_linear,
    selfcheck_recurrences,
    selfcheck_routed,
)
from efla_jax.selfcheck_cases import BAR, Operators, errors_of

# A new operator is a module here.
MODULES: tuple[Operators, ...] = (
    selfcheck_recurrences,
    selfcheck_routed,
    selfcheck_log_linear,
    selfcheck_attention,
    selfcheck_conv,
)
MOST_WORDS = 300  # of an error's message


class Result(NamedTuple):
    """Errors by name of the kernel and of XLA; complaint: what is wrong, or None; declined: why not covered."""

    errors: dict[str, float]
    beside: dict[str, float]
    complaint: str | None = None
    declined: str | None = None


def check(module: Operators, case: Any, interpret: Any = None) -> Result:
    """Run a case of the module. What its kernel raises is its complaint, so that others still run."""
    arguments = module.arguments_of(case)
    twice = attempt(lambda: module.run(case, "pallas", arguments, interpret))
    if isinstance(twice, Result):
        return twice
    truth = module.truth_of(case, arguments)
    errors, beside = errors_of(twice[0], truth), module.beside(case, arguments, truth)
    return judged(*twice, errors, beside, {name: module.bar(case, name, beside[name]) for name in truth})


def attempt(run: Callable[[], dict]) -> tuple[dict, dict] | Result:
    """What run() returns, twice; or what it raises, as a result."""
    try:
        return jax.block_until_ready(run()), jax.block_until_ready(run())
    except NotImplementedError as reason:
        return Result({}, {}, declined=str(reason)[:MOST_WORDS])
    except Exception as error:  # noqa: BLE001  whatever a compiler or device says belongs in the table
        return Result({}, {}, f"{type(error).__name__}: {' '.join(str(error).split())[:MOST_WORDS]}")


def judged(found: dict, again: dict, errors: dict, beside: dict, bars: dict) -> Result:
    """The result of two runs whose errors may be as large as the bars."""
    names = list(errors)
    wrong = [name for name in names if not errors[name] <= bars[name]]
    differs = [name for name in names if np.asarray(found[name]).tobytes() != np.asarray(again[name]).tobytes()]
    complaints = [f"beyond the bar: {', '.join(wrong)}"] * bool(wrong)
    complaints += [f"another run gave other bits: {', '.join(differs)}"] * bool(differs)
    return Result(errors, beside, "; ".join(complaints) or None)


def line(case: Any, result: Result) -> str:
    """One row of the table: the verdict, and the error of the kernel and of XLA for each quantity."""
    verdict = "not covered" if result.declined else "FAILED" if result.complaint else "ok"
    cells = [f"{name} {result.errors[name]:.1e}/{result.beside[name]:.1e}" for name in result.errors]
    return f"{verdict:<11} | {case.name} | {'  '.join(cells)}{result.complaint and '  ' + result.complaint or ''}" + (
        f"{result.declined}" if result.declined else ""
    )


def check_all(chosen: Sequence[tuple[Operators, Any]], interpret: Any = None) -> int:
    """Check every case, print its row, and return how many failed."""
    print("verdict     | case | error of the kernel / of XLA for each output, state and gradient")
    failed = covered = 0
    for module, case in chosen:
        result = check(module, case, interpret)
        failed, covered = failed + bool(result.complaint), covered + (result.declined is None)
        print(line(case, result), flush=True)
    print(f"{len(chosen)} cases, {covered} covered, {failed} failed (the bar: {BAR} times the error of XLA)")
    return failed if covered else max(failed, 1)


def milliseconds(run: Callable, *arguments, launches: int = 10, repeats: int = 20) -> float:
    """Median time of a call among `launches` queued back to back, which hides the host's part: device time, as long as
    a call takes the device longer than the host."""
    jax.block_until_ready(run(*arguments))
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        results = [run(*arguments) for _ in range(launches)]
        jax.block_until_ready(results)
        found.append((time.perf_counter() - begin) / launches)
    return 1e3 * statistics.median(found)


def device_milliseconds(run: Callable, *arguments, calls: int = 5) -> float:
    """Time of a call's kernels on the GPU, from a profiler's trace; NaN where it shows none."""
    jax.block_until_ready(run(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(run(*arguments))
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = [plane for plane in jax.profiler.ProfileData.from_file(str(file)).planes if "GPU" in plane.name]
        lines = [line for plane in planes for line in plane.lines if "Stream" in line.name]
        total = sum(event.duration_ns for line in lines for event in line.events)
    return total / 1e6 / calls if lines else math.nan


def print_times(modules: Sequence[Operators]) -> None:
    """A table for each module: times of the kernels on the GPU, and of a call among several in a queue."""
    print("\nms on the device (ms of a call in a queue)")
    for module in modules:
        heads: tuple[str, ...] = ()
        for timed in module.timed():
            if timed.implementations != heads:
                heads = timed.implementations
                print(f"\n| what | {' | '.join(f'{name} ms' for name in heads)} |\n{'| --- ' * (1 + len(heads))}|")
            cells = []
            for name in heads:
                try:
                    run = timed.program(name)
                    queued = milliseconds(run, *timed.arguments)
                    cells.append(f"{device_milliseconds(run, *timed.arguments):.3f} ({queued:.3f})")
                except Exception as error:  # noqa: BLE001  too little memory for one must not hide the others
                    cells.append(f"{type(error).__name__}")
            print(f"| {timed.name} | {' | '.join(cells)} |", flush=True)


def hopper() -> bool:
    """Whether the default device is a GPU that the kernels were written for."""
    device = jax.devices()[0]
    return device.platform == "gpu" and str(getattr(device, "compute_capability", "")).startswith("9.")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m efla_jax.selfcheck", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--times", action="store_true", help="print device times, too")
    parser.add_argument("--only", default="", help="only cases whose name has this text")
    parser.add_argument("--interpret", action="store_true", help="tiny cases in Mosaic's interpreter")
    options = parser.parse_args(argv)
    if options.interpret:  # a waiting warpgroup blocks a thread of XLA's pool, which has one per core
        os.environ.setdefault("NPROC", "8")
    device = jax.devices()[0]
    if not options.interpret and not hopper():
        print(
            f"selfcheck: the kernels need an NVIDIA Hopper GPU (H100, H200, GH200), not {device.device_kind}"
            f" ({device.platform}). --interpret checks tiny cases in an interpreter.",
            file=sys.stderr,
        )
        return 2
    known = [(m, case) for m in MODULES for case in (m.tiny_cases() if options.interpret else m.cases())]
    chosen = [(module, case) for module, case in known if options.only in case.name]
    if not chosen:
        print(f"selfcheck: no case has {options.only!r} in its name", file=sys.stderr)
        return 2
    print(f"jax {jax.__version__} on {device.device_kind}")
    failed = check_all(chosen, plgpu.InterpretGPUParams(detect_races=True) if options.interpret else None)
    if options.times and not options.interpret:
        print_times(MODULES)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
