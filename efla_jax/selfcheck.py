"""Are the GPU kernels right on this GPU? Every kernel, forward and backward, over awkward inputs and shapes.

    python -m efla_jax.selfcheck              # on an NVIDIA Hopper GPU, a few minutes, most of them compilation
    python -m efla_jax.selfcheck --times      # and a table of device times
    python -m efla_jax.selfcheck --only=documents        # the cases whose name has this word
    python -m efla_jax.selfcheck --interpret  # tiny cases in Mosaic's interpreter, on a CPU

The reference is implementation="recurrent" on the same 16-bit inputs, widened to float32. An error is
RMS(difference) / RMS(reference), of outputs, states and every gradient; beside it stands that of implementation=
"chunked", the same algorithm in XLA at the same precisions (of softmax attention the reference is "chunked" in
float32). A case passes if no error is more than 1.4 times that of "chunked" (float16: 3.5 times) unless within one
rounding of the dtype, and if a second run gives the same bits. "not covered" is a case that the kernel declines with a
reason; that is no failure. Exit status: 0 all passed, 1 some failed, 2 no such GPU.
"""

import argparse
import functools
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
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax import ops, selfcheck_attention, selfcheck_log_linear
from efla_jax.ops import pallas, pallas_linear, pallas_step
from efla_jax.ops.arguments import Recurrence, recurrence
from efla_jax.selfcheck_attention import AttentionCase
from efla_jax.selfcheck_cases import TIMED, Case, cases, draw, segment_ids, timed_inputs, tiny_cases
from efla_jax.selfcheck_log_linear import LogLinearCase

# Times the error of "chunked". The kernels invert a chunk's triangle with products of float16, "chunked" in float32:
# nothing beside the rounding of all else to bfloat16, but as much as that to float16 where keys are nearly parallel.
# The aim for bfloat16 is 1.2. On an H200 dq of nearly parallel keys read 1.19 to 1.31 and dlog_decay up to 1.22, all
# else less: the backward begins from states rounded to 16 bits. In float16 dlog_decay of nearly parallel keys read 3.2
# (1.7e-3, of which the inverse has 1e-3: `kernels/delta_rule.py`), all else up to 2. A wrong kernel is off by far more.
BAR = {"bfloat16": 1.4, "float16": 3.5}
# Relative RMS of rounding normal numbers once, 1.66e-3 in bfloat16 and an eighth of it in float16, and a tenth more for
# samples of a few. An error within it is no worse than the best 16-bit output, however good "chunked" happened to be.
FLOOR = {"bfloat16": 1.8e-3, "float16": 2.3e-4}
# One token is computed in float32 throughout: its state differs by the order of K sums, 2^-24 each.
STATE_AFTER_ONE_TOKEN = 1e-6
NAMES = ("o", "state", "dq", "dk", "du", "derase", "dlog_decay", "dinitial")
AnyCase = Case | AttentionCase | LogLinearCase
MOST_WORDS = 300  # of an error's message


class Result(NamedTuple):
    """Errors by name of the kernel and of "chunked"; complaint: what is wrong, or None; declined: why not covered."""

    errors: dict[str, float]
    chunked: dict[str, float]
    complaint: str | None = None
    declined: str | None = None


def apply(op: str, implementation: str, arguments: Sequence[jax.Array], ids=None, interpret: Any = None) -> tuple:
    """(o, state) of the operator; linear attention has no use for the fourth argument, erase. A single token with
    "pallas" goes to its own kernel; interpret: what Mosaic's interpreter needs, instead of a GPU."""
    q, k, u, erase, log_decay, state = arguments
    name, _, step = op.partition(" ")
    if name == "delta_flow":
        return ops.delta_flow(
            q, k, u, erase, log_decay, step=step, initial_state=state, segment_ids=ids, implementation=implementation
        )
    if implementation == "pallas" and (interpret is not None or q.shape[1] == 1):
        x = recurrence(q, k, u, erase if op == "delta_rule" else None, log_decay, state, ids)
        return kernel(op, x, interpret)
    options = {"initial_state": state, "segment_ids": ids, "implementation": implementation}
    if op == "linear_attention":
        return ops.linear_attention(q, k, u, log_decay, **options)
    return ops.delta_rule(q, k, u, erase, log_decay, **options)


def kernel(op: str, x: Recurrence, interpret: Any) -> tuple:
    """The kernel of the operator, or of one token, without the public operator around it."""
    if x.k.shape[1] == 1:
        return pallas_step.one_token(x, interpret)
    if op == "delta_rule":
        return pallas.delta_rule(x, pallas.CHUNK, interpret=interpret)
    return pallas_linear.linear_attention(x, pallas.CHUNK, interpret=interpret)


@functools.cache
def program(op: str, implementation: str, interpret: Any = None) -> Callable:
    """A jitted (arguments, ids, cotangents) -> (outputs, state, gradients...) in the order of NAMES."""

    @jax.jit
    def run(arguments, ids, cotangents):
        out, pull = jax.vjp(lambda *given: apply(op, implementation, given, ids, interpret), *arguments)
        gradients = pull((cotangents[0].astype(out[0].dtype), cotangents[1]))
        return dict(zip(NAMES, (*out, *gradients), strict=True))

    return run


def relative_rms(value, reference) -> float:
    """RMS(difference) / RMS(reference), infinite where something is not a number; a reference near zero counts as
    1e-3."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    if not np.isfinite(value).all():
        return math.inf
    return float(np.sqrt(np.mean((value - reference) ** 2)) / max(np.sqrt(np.mean(reference**2)), 1e-3))


def errors_of(case: Case, found: dict, arguments: tuple, ids, cotangents: tuple) -> dict[str, float]:
    """Errors by name of what was found for these arguments."""
    wide = tuple(x.astype(jnp.float32) for x in arguments)
    truth = program(case.op, "recurrent")(wide, ids, cotangents)
    names = [name for name in NAMES if case.op != "linear_attention" or name != "derase"]
    return {name: relative_rms(found[name], truth[name]) for name in names}


def errors_of_chunked(case: Case, arguments: tuple, ids, cotangents: tuple) -> dict[str, float]:
    """Errors of "chunked" at the kernels' precisions. Where it has others, it is brought to theirs: it multiplies
    float16 in float32, so that its error in bfloat16, whose rounding is 8 times as coarse, stands for that, divided by
    8; and where several value heads read a key head it multiplies sums over them in float32, so that each gets a copy,
    and the sum of their gradients is rounded as the kernels' is."""
    half, s = case.dtype == "float16", case.sizes
    if half:
        arguments = tuple(x.astype(jnp.bfloat16) if x.dtype == jnp.float16 else x for x in arguments)
    copies = [jnp.repeat(x, s.heads // s.key_heads, axis=2) for x in arguments[:2]]
    found = program(case.op, "chunked")((*copies, *arguments[2:]), ids, cotangents)
    shape = (s.batch, s.time, s.key_heads, -1, s.key_dim)
    for name, x in (("dq", arguments[0]), ("dk", arguments[1])):
        found[name] = jnp.sum(found[name].astype(jnp.float32).reshape(shape), 3).astype(x.dtype)
    return {k: v / (8 if half else 1) for k, v in errors_of(case, found, arguments, ids, cotangents).items()}


def bar(case: Case, name: str, chunked: float) -> float:
    """The largest error that passes."""
    if case.sizes.time == 1 and name == "state":
        return STATE_AFTER_ONE_TOKEN
    return max(BAR[case.dtype] * chunked, FLOOR[case.dtype])


def check(case: AnyCase, interpret: Any = None) -> Result:
    """Run the case. What it raises is its complaint, so that others still run."""
    if isinstance(case, AttentionCase):
        return check_attention(case)
    if isinstance(case, LogLinearCase):
        return check_log_linear(case)
    arguments, cotangents = draw(case)
    ids = segment_ids(case)
    twice = attempt(lambda: program(case.op, "pallas", interpret)(arguments, ids, cotangents))
    if isinstance(twice, Result):
        return twice
    errors = errors_of(case, twice[0], arguments, ids, cotangents)
    chunked = errors_of_chunked(case, arguments, ids, cotangents)
    return judged(*twice, errors, chunked, {name: bar(case, name, chunked[name]) for name in errors})


def check_attention(case: AttentionCase) -> Result:
    """`check` of softmax attention. "chunked" multiplies float16 as the kernels do."""
    arguments, state = selfcheck_attention.draw(case)
    ids, gradients = selfcheck_attention.ids_of(case), not case.before
    run = selfcheck_attention.program
    twice = attempt(lambda: run(case.op, "pallas", gradients)(arguments, ids, state))
    if isinstance(twice, Result):
        return twice
    truth = selfcheck_attention.truth_of(case, arguments, ids, state)
    beside = run(case.op, "chunked", gradients)(arguments, ids, state)
    names = [name for name in selfcheck_attention.NAMES if name in truth]
    errors, chunked = ({k: relative_rms(found[k], truth[k]) for k in names} for found in (twice[0], beside))
    times = {name: selfcheck_attention.CANCELLED if name == "dselected" else BAR[case.dtype] for name in names}
    return judged(*twice, errors, chunked, {k: max(times[k] * chunked[k], FLOOR[case.dtype]) for k in names})


def check_log_linear(case: LogLinearCase) -> Result:
    """`check` of a log-linear operator."""
    arguments, ids, prefix = selfcheck_log_linear.arguments_of(case), selfcheck_log_linear.ids_of(case), case.before > 0
    run = selfcheck_log_linear.program
    twice = attempt(lambda: run(case.op, "pallas", prefix)(arguments, ids))
    if isinstance(twice, Result):
        return twice
    truth = selfcheck_log_linear.truth_of(case, arguments, ids)
    beside = run(case.op, "chunked", prefix)(arguments, ids)
    errors, chunked = ({k: relative_rms(found[k], truth[k]) for k in truth} for found in (twice[0], beside))
    floors = {name: selfcheck_log_linear.floor_of(case, name) for name in truth}
    return judged(*twice, errors, chunked, {k: max(BAR[case.dtype] * chunked[k], floors[k]) for k in truth})


def attempt(run: Callable[[], dict]) -> tuple[dict, dict] | Result:
    """What run() returns, twice; or what it raises, as a result."""
    try:
        return jax.block_until_ready(run()), jax.block_until_ready(run())
    except NotImplementedError as reason:
        return Result({}, {}, declined=str(reason)[:MOST_WORDS])
    except Exception as error:  # noqa: BLE001  whatever a compiler or device says belongs in the table
        return Result({}, {}, f"{type(error).__name__}: {' '.join(str(error).split())[:MOST_WORDS]}")


def judged(found: dict, again: dict, errors: dict, chunked: dict, bars: dict) -> Result:
    """The result of two runs whose errors may be as large as the bars."""
    names = list(errors)
    wrong = [name for name in names if not errors[name] <= bars[name]]
    differs = [name for name in names if np.asarray(found[name]).tobytes() != np.asarray(again[name]).tobytes()]
    complaints = [f"beyond the bar: {', '.join(wrong)}"] * bool(wrong)
    complaints += [f"another run gave other bits: {', '.join(differs)}"] * bool(differs)
    return Result(errors, chunked, "; ".join(complaints) or None)


def line(case: AnyCase, result: Result) -> str:
    """One row of the table: the verdict, and the error of the kernel and of "chunked" for each quantity."""
    verdict = "not covered" if result.declined else "FAILED" if result.complaint else "ok"
    cells = [f"{name} {result.errors[name]:.1e}/{result.chunked[name]:.1e}" for name in result.errors]
    return f"{verdict:<11} | {case.name} | {'  '.join(cells)}{result.complaint and '  ' + result.complaint or ''}" + (
        f"{result.declined}" if result.declined else ""
    )


def check_all(chosen: Sequence[AnyCase], interpret: Any = None) -> int:
    """Check every case, print its row, and return how many failed."""
    print('verdict     | case | error of the kernel / of "chunked" for each output, state and gradient')
    failed = covered = 0
    for case in chosen:
        result = check(case, interpret)
        failed, covered = failed + bool(result.complaint), covered + (result.declined is None)
        print(line(case, result), flush=True)
    print(f"{len(chosen)} cases, {covered} covered, {failed} failed (the bar: {BAR} times the error of chunked)")
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


def passes(op: str, implementation: str) -> dict[str, Callable]:
    """forward: (arguments, weights) -> (o, state); forward+backward: the gradients of sum(weights o)."""

    def forward(arguments, weights):
        return apply(op, implementation, arguments)

    def loss(arguments, weights):
        return jnp.sum(forward(arguments, weights)[0].astype(jnp.float32) * weights)

    return {"forward": jax.jit(forward), "forward+backward": jax.jit(jax.grad(loss))}


def print_times(implementations: Sequence[str] = ("pallas", "chunked")) -> None:
    """The table of times over TIMED: of the kernels on the GPU, and of a call among several in a queue."""
    print("\nms on the device (ms of a call in a queue)")
    print("\n| op | B, T, G, H, K, V | pass | " + " | ".join(f"{name} ms" for name in implementations) + " |")
    print("| --- " * (3 + len(implementations)) + "|")
    for op, sizes in TIMED:
        arguments, weights = timed_inputs(sizes)
        for name in ("forward", "forward+backward"):
            cells = []
            for implementation in implementations:
                try:
                    run = passes(op, implementation)[name]
                    queued = milliseconds(run, arguments, weights)
                    cells.append(f"{device_milliseconds(run, arguments, weights):.3f} ({queued:.3f})")
                except Exception as error:  # noqa: BLE001  too little memory for one must not hide the others
                    cells.append(f"{type(error).__name__}")
            print(f"| {op} | {', '.join(map(str, sizes))} | {name} | {' | '.join(cells)} |", flush=True)


def print_attention_times(implementations: Sequence[str] = ("pallas", "auto")) -> None:
    """The table of times of softmax attention, of the kernels on the GPU; "auto" is cuDNN where that serves."""
    print("\n| case | pass | " + " | ".join(f"{name} ms" for name in implementations) + " |")
    print("| --- " * (2 + len(implementations)) + "|")
    for case in selfcheck_attention.TIMED:
        (arguments, state), ids = selfcheck_attention.draw(case), selfcheck_attention.ids_of(case)
        for gradients in (False, True)[: 1 if case.before else 2]:
            cells = []
            for implementation in implementations:
                try:
                    run = selfcheck_attention.program(case.op, implementation, gradients)
                    cells.append(f"{device_milliseconds(run, arguments, ids, state):.3f}")
                except Exception as error:  # noqa: BLE001  too little memory for one must not hide the others
                    cells.append(f"{type(error).__name__}")
            name = "forward+backward" if gradients else "forward"
            print(f"| {case.name} | {name} | {' | '.join(cells)} |", flush=True)


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
    known: list[AnyCase] = [*tiny_cases()] if options.interpret else [*cases()]
    known += [] if options.interpret else [*selfcheck_log_linear.cases(), *selfcheck_attention.cases()]
    chosen = [case for case in known if options.only in case.name]
    if not chosen:
        print(f"selfcheck: no case has {options.only!r} in its name", file=sys.stderr)
        return 2
    print(f"jax {jax.__version__} on {device.device_kind}")
    failed = check_all(chosen, plgpu.InterpretGPUParams(detect_races=True) if options.interpret else None)
    if options.times and not options.interpret:
        print_times()
        print_attention_times()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
