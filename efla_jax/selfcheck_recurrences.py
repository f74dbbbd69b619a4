"""The cases of `efla_jax.selfcheck` for the two recurrences and for the delta rule from raw keys: awkward inputs,
shapes and documents, with states and every gradient; and one token.

The reference is "recurrent" on the same inputs widened to float32.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from efla_jax import ops
from efla_jax.ops import pallas, pallas_linear, pallas_step
from efla_jax.ops.arguments import Recurrence, recurrence
from efla_jax.selfcheck_cases import (
    AWKWARD,
    BAR,
    FLOOR,
    ODD,
    Case,
    Sizes,
    Timed,
    copied,
    draw,
    errors_of,
    segment_ids,
    summed,
    timed_inputs,
)

# One token is computed in float32 throughout: its state differs by the order of K sums, 2^-24 each.
STATE_AFTER_ONE_TOKEN = 1e-6
NAMES = ("o", "state", "dq", "dk", "du", "derase", "dlog_decay", "dinitial")


def cases() -> list[Case]:
    """Everything, shapes that share programs next to each other."""
    both, found = ("delta_rule", "linear_attention"), []
    for op in both:
        found += [Case(op, inputs, ODD) for inputs in AWKWARD if op == "delta_rule" or inputs in AWKWARD[:5]]
        found += [Case(op, "random", ODD, "documents"), Case(op, "random", ODD, "padding")]
        found += [Case(op, "parallel keys", ODD, "documents"), Case(op, "decay -1e4", ODD, "documents")]
        found += [Case(op, "random", Sizes(1, 40, 1, 2, 64, 128)), Case(op, "random", Sizes(3, 64, 3, 3, 64, 64))]
        found += [Case(op, "random", Sizes(2, 130, 1, 4, 128, 64), "documents")]
        found += [Case(op, "random", Sizes(2, 200, 1, 2, 256, 256)), Case(op, "random", Sizes(2, 270, 2, 4, 256, 64))]
        found += [Case(op, "parallel keys", Sizes(1, 130, 1, 2, 256, 512), "documents")]
        found += [Case(op, "random", Sizes(1, 2048, 1, 2, 256, 128), "documents")]  # the time in parts
        found += [Case(op, "random", Sizes(1, 100, 1, 1, 192, 128))]
        found += [Case(op, "parallel keys", ODD, dtype="float16")]
        # Few rows and much time, which the kernels cut into parts; documents end inside some and span others.
        found += [Case(op, "random", Sizes(1, 4096, 1, 2, 128, 128)), Case(op, "random", ODD._replace(time=1))]
    found += [Case("delta_rule", "parallel keys", Sizes(1, 4096, 1, 2, 128, 128), "documents")]
    found += [Case("linear_attention", "random", Sizes(2, 4096, 1, 32, 128, 64))]
    found += [
        Case("delta_flow exact", inputs, ODD) for inputs in ("random", "parallel keys", "zero keys", "decay -1e4")
    ]
    found += [Case(f"delta_flow {step}", "random", ODD, "documents") for step in ("exact", "gated_exact", "unit")]
    found += [
        Case("delta_flow exact", "random", sizes)
        for sizes in (ODD._replace(key_dim=64), Sizes(1, 4096, 1, 2, 128, 128))
    ]
    return found + [Case("linear_attention", "random", Sizes(4, 1, 1, 32, 128, 64))]


def tiny_cases() -> list[Case]:
    """What Mosaic's interpreter computes in a minute."""
    small = Sizes(1, 130, 1, 2, 64, 64)
    found = [Case(op, "random", small, "documents") for op in ("delta_rule", "linear_attention")]
    found += [Case("delta_rule", "parallel keys", small), Case("delta_flow exact", "random", small)]
    return [*found, Case("delta_rule", "random", Sizes(2, 1, 1, 2, 16, 128))]


def apply(op: str, implementation: str, arguments: Sequence[jax.Array], ids=None, interpret: Any = None) -> tuple:
    """(o, state) of the operator; linear attention has no use for the fourth argument, erase. A single token with
    "pallas" goes to its own kernel; interpret: what Mosaic's interpreter needs, instead of a GPU."""
    q, k, u, erase, log_decay, state = arguments
    name, _, step = op.partition(" ")
    if name == "delta_flow" and interpret is not None:
        return pallas.delta_flow(recurrence(q, k, u, erase, log_decay, state, ids), step, interpret=interpret)
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


def arguments_of(case: Case) -> tuple:
    """(arguments, ids, cotangents)."""
    arguments, cotangents = draw(case)
    return arguments, segment_ids(case), cotangents


def run(case: Case, implementation: str, arguments: tuple, interpret: Any = None) -> dict[str, jax.Array]:
    return program(case.op, implementation, interpret)(*arguments)


def truth_of(case: Case, arguments: tuple) -> dict[str, jax.Array]:
    """ "recurrent" on the same inputs, widened."""
    given, ids, cotangents = arguments
    found = program(case.op, "recurrent")(tuple(x.astype(jnp.float32) for x in given), ids, cotangents)
    return {name: x for name, x in found.items() if case.op != "linear_attention" or name != "derase"}


def beside(case: Case, arguments: tuple, truth: dict[str, jax.Array]) -> dict[str, float]:
    """Errors of "chunked" at the kernels' precisions. Where it has others, it is brought to theirs: it multiplies
    float16 in float32, so that its error in bfloat16, whose rounding is 8 times as coarse, stands for that, divided by
    8; and where several value heads read a key head it multiplies sums over them in float32, so that each gets a copy,
    and the sum of their gradients is rounded as the kernels' is."""
    given, ids, cotangents = arguments
    half = case.dtype == "float16"
    if half:
        given = tuple(x.astype(jnp.bfloat16) if x.dtype == jnp.float16 else x for x in given)
        truth = truth_of(case, (given, ids, cotangents))
    copies = copied(case.sizes, *given[:2])
    found = program(case.op, "chunked")((*copies, *given[2:]), ids, cotangents)
    found |= {name: summed(case.sizes, found[name], given[0].dtype) for name in ("dq", "dk")}
    return {name: error / (8 if half else 1) for name, error in errors_of(found, truth).items()}


def bar(case: Case, name: str, beside: float) -> float:
    if case.sizes.time == 1 and name == "state":
        return STATE_AFTER_ONE_TOKEN
    floor = FLOOR[case.dtype]
    if name == "dlog_decay":  # <S, D> of a chunk is of two states in 16 bits, whose rounding XLA's float32 states lack
        floor = math.hypot(beside, 1.4 * floor)
    return max(BAR[case.dtype] * beside, floor)


# What --times measures: (op, B, T, G, H, K, V), bfloat16.
TIMED = (
    ("delta_rule", Sizes(16, 2048, 16, 16, 128, 128)),
    ("delta_rule", Sizes(4, 8192, 16, 16, 128, 128)),
    ("delta_rule", Sizes(1, 32768, 16, 16, 128, 128)),
    ("delta_rule", Sizes(1, 131072, 16, 16, 128, 128)),
    ("delta_flow exact", Sizes(16, 2048, 16, 16, 128, 128)),
    ("delta_flow exact", Sizes(1, 32768, 16, 16, 128, 128)),
    ("linear_attention", Sizes(16, 2048, 1, 32, 128, 64)),
    ("linear_attention", Sizes(1, 32768, 1, 32, 128, 64)),
)


def timed() -> Iterator[Timed]:
    for op, sizes in TIMED:
        arguments = timed_inputs(sizes)
        for name in ("forward", "forward+backward"):
            program = functools.partial(one_pass, op, name)
            yield Timed(f"{op}, {', '.join(map(str, sizes))}, {name}", ("pallas", "chunked"), program, arguments)


def one_pass(op: str, name: str, implementation: str) -> Callable:
    """forward: (arguments, weights) -> (o, state); forward+backward: the gradients of sum(weights o)."""

    def forward(arguments, weights):
        return apply(op, implementation, arguments)

    def loss(arguments, weights):
        return jnp.sum(forward(arguments, weights)[0].astype(jnp.float32) * weights)

    return jax.jit(forward if name == "forward" else jax.grad(loss))
