"""The cases of `efla_jax.selfcheck` for the routed delta rule: chunks kept, rolled back and taken at their word,
documents, padding and prefixes, with the states and every gradient, the mask's too.

The reference is "recurrent" on the same inputs widened to float32.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from efla_jax import ops
from efla_jax.ops import pallas_routed
from efla_jax.ops.routed_recurrent import routed, routed_over_mesh
from efla_jax.selfcheck_cases import (
    BAR,
    FLOOR,
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

NAMES = ("o", "state", "start", "dq", "dk", "du", "derase", "dlog_decay", "dkeep", "dinitial", "dstart")
CHUNK = 64
# A keep's cotangent is one number <J, D>, a d log_decay has the <S, D> of its chunk: of states rounded to 16 bits here,
# of float32 ones in "chunked"; of few chunks a matter of luck (tests/test_kernels_routed.py).
LUCK = {"dkeep": 6e-3, "dlog_decay": 4e-3}
KEPT: dict[str, Callable] = {
    "gaps": lambda rng, shape: rng.random(shape) < 0.7,
    "none kept": lambda rng, shape: np.zeros(shape),
    "any number": lambda rng, shape: rng.uniform(0.2, 1.5, shape),
}


class RoutedCase(NamedTuple):
    """One input: inputs and documents as of `Case`; kept: a name of KEPT; before: tokens of a prefix, more in each
    row."""

    kept: str
    sizes: Sizes
    inputs: str = "random"
    documents: str | None = None
    before: int = 0
    dtype: str = "bfloat16"

    @property
    def flat(self) -> Case:
        return Case("routed_delta_rule", self.inputs, self.sizes, self.documents, self.dtype)

    @property
    def name(self) -> str:
        return f"{self.flat.name}, {self.kept}" + (f", behind {self.before}" if self.before else "")


def cases() -> list[RoutedCase]:
    """Rows with and without a chunk that stays open, few chunks and many, documents that begin anywhere."""
    case = RoutedCase("gaps", Sizes(2, 500, 2, 2, 128, 128))
    found = [case._replace(kept=kept) for kept in KEPT]
    found += [case._replace(inputs=inputs) for inputs in ("parallel keys", "zero keys", "decay -1e4")]
    found += [case._replace(documents=documents, kept=kept) for documents in ("documents", "padding") for kept in KEPT]
    found += [case._replace(sizes=sizes) for sizes in (Sizes(1, 64, 1, 1, 64, 64), Sizes(1, 2048, 1, 2, 128, 64))]
    found += [
        case._replace(sizes=Sizes(1, 2048, 2, 2, 128, 128), documents="documents"),
        case._replace(dtype="float16"),
    ]
    # Behind whole chunks and, which XLA serves, behind open ones.
    found += [case._replace(sizes=Sizes(1, 500, 2, 2, 128, 128), before=128), case._replace(before=100)]
    # Not covered: no whole chunk, and documents behind a prefix.
    return found + [
        case._replace(sizes=Sizes(2, 40, 2, 2, 128, 128)),
        case._replace(documents="documents", before=100),
    ]


def tiny_cases() -> list[RoutedCase]:
    return [RoutedCase("gaps", Sizes(1, 130, 2, 2, 64, 64))]


class Arguments(NamedTuple):
    """Of a case: (q, k, u, erase, log_decay, keep, state, start), the rest of the prefix's state if there is one, ids
    or None, and cotangents of o, state and start."""

    inputs: tuple
    prefix: tuple | None
    ids: jax.Array | None
    cotangents: tuple


def arguments_of(case: RoutedCase) -> Arguments:
    (*tokens, state), (d_o, d_state) = draw(case.flat)
    s, rng = case.sizes, np.random.default_rng(2)
    keep = KEPT[case.kept](rng, (s.batch, -(-s.time // CHUNK), s.heads))
    start, d_start = (jnp.asarray(rng.normal(size=state.shape) * s.key_dim**-0.5, jnp.float32) for _ in range(2))
    inputs = (*tokens, jnp.asarray(keep, jnp.float32), state, start)
    position = jnp.asarray(case.before + 37 * np.arange(s.batch), jnp.int32)
    opened = jnp.asarray(-rng.random((s.batch, s.heads)), jnp.float32)
    return Arguments(
        inputs, (opened, position) if case.before else None, segment_ids(case.flat), (d_o, d_state, d_start)
    )


def apply(implementation: str, interpret: Any, prefix: tuple | None, ids, *inputs: jax.Array) -> tuple:
    """(o, state, where the open chunk began)."""
    q, k, u, erase, log_decay, keep, state, start = inputs
    before = None if prefix is None else ops.RoutedState(state, start, *prefix)
    if implementation == "pallas" and interpret is not None:
        kernel = functools.partial(pallas_routed.routed_delta_rule, size=CHUNK, interpret=interpret)
        o, after = routed_over_mesh(kernel, routed(q, k, u, erase, log_decay, keep, before, ids, CHUNK), None)
    else:
        options = {"initial_state": before, "segment_ids": ids, "chunk_size": CHUNK, "implementation": implementation}
        o, after = ops.routed_delta_rule(q, k, u, erase, log_decay, keep, **options)
    return o, after.state, after.start


@functools.cache
def program(implementation: str, interpret: Any = None) -> Callable:
    """A jitted (arguments) -> outputs, states and gradients by name."""

    @jax.jit
    def run(x: Arguments):
        out, pull = jax.vjp(lambda *given: apply(implementation, interpret, x.prefix, x.ids, *given), *x.inputs)
        gradients = pull((x.cotangents[0].astype(out[0].dtype), *x.cotangents[1:]))
        found = dict(zip(NAMES, (*out, *gradients), strict=True))
        unused = () if x.prefix else NAMES[-2:]
        return {name: value for name, value in found.items() if name not in unused}

    return run


def run(case: RoutedCase, implementation: str, arguments: Arguments, interpret: Any = None) -> dict[str, jax.Array]:
    return program(implementation, interpret)(arguments)


def truth_of(case: RoutedCase, arguments: Arguments) -> dict[str, jax.Array]:
    """ "recurrent" on the same inputs, widened."""
    wide = tuple(x.astype(jnp.float32) for x in arguments.inputs)
    return run(case, "recurrent", arguments._replace(inputs=wide))


def beside(case: RoutedCase, arguments: Arguments, truth: dict[str, jax.Array]) -> dict[str, float]:
    """Errors of "chunked" at the kernels' precisions, brought there as for the delta rule (`selfcheck_recurrences`)."""
    given, half = arguments.inputs, case.dtype == "float16"
    if half:
        given = tuple(x.astype(jnp.bfloat16) if x.dtype == jnp.float16 else x for x in given)
        truth = truth_of(case, arguments._replace(inputs=given))
    copies = copied(case.sizes, *given[:2])
    found = run(case, "chunked", arguments._replace(inputs=(*copies, *given[2:])))
    found |= {name: summed(case.sizes, found[name], given[0].dtype) for name in ("dq", "dk")}
    return {name: error / (8 if half else 1) for name, error in errors_of(found, truth).items()}


def bar(case: RoutedCase, name: str, beside: float) -> float:
    floor = LUCK.get(name, FLOOR["bfloat16"]) / (8 if case.dtype == "float16" else 1)
    return max(BAR[case.dtype] * beside, floor)


def timed() -> Iterator[Timed]:
    """Half of the chunks kept."""
    sizes = Sizes(1, 32768, 16, 16, 128, 128)
    (*tokens, _), weights = timed_inputs(sizes)
    keep = jnp.asarray(np.arange(sizes.time // CHUNK) % 2, jnp.float32)
    given = *tokens, jnp.broadcast_to(keep[:, None], (sizes.batch, *keep.shape, sizes.heads))
    for name in ("forward", "forward+backward"):
        label = f"routed_delta_rule, {', '.join(map(str, sizes))}, {name}"
        yield Timed(label, ("pallas", "chunked"), functools.partial(one_pass, name), (given, weights))


def one_pass(name: str, implementation: str) -> Callable:
    """forward: (arguments, weights) -> o; forward+backward: the gradients of sum(weights o)."""

    def forward(given, weights):
        return ops.routed_delta_rule(*given, chunk_size=CHUNK, implementation=implementation)[0]

    def loss(given, weights):
        return jnp.sum(forward(given, weights).astype(jnp.float32) * weights)

    return jax.jit(forward if name == "forward" else jax.grad(loss))
