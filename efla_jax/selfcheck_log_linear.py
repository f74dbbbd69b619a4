"""The cases of `efla_jax.selfcheck` for the log-linear operators: whole rows, packed ones, padding, prefixes of any
length, and one token, with the states and every gradient.

The reference is "recurrent" on the same inputs widened to float32.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from efla_jax import ops
from efla_jax.ops.fenwick import fenwick
from efla_jax.ops.log_linear import KERNELS
from efla_jax.selfcheck_cases import AWKWARD, BAR, Case, Sizes, Timed, draw, errors_of, segment_ids

NAMES = ("o", "states", "dq", "dk", "du", "derase", "dlog_decay", "dlevel_weights", "dinitial")
# dk and du are sums of two gradients in bfloat16, one of pairs and one of states, half of 2^-8 / sqrt(3) each.
FLOOR = 2.9e-3
# Where products of states and their cotangents are most of dlog_decay: both are kept in bfloat16, "chunked" keeps
# float32 (tests/test_kernels_log_linear.py).
FLOORS = {"dlog_decay": 3.8e-3}
# Where nothing decays a token's dlog_decay of the delta rule is a sum over all that comes later, of terms that nearly
# cancel. Tokens share most of what was rounded there, so that the error of a sample is that of a few numbers: over five
# draws of 512 tokens and 4 heads that of "chunked" was between 4.1e-3 and 7.8e-3, that of a model of the kernels'
# roundings between 5.1e-3 and 7.0e-3, in no order.
FLOOR_WITHOUT_DECAY = 7e-3


class LogLinearCase(NamedTuple):
    """One input: inputs and documents as of `Case`; levels L; before: tokens of a prefix, more in each row."""

    op: str
    inputs: str
    sizes: Sizes
    levels: int = 12
    documents: str | None = None
    before: int = 0
    dtype: str = "bfloat16"

    @property
    def flat(self) -> Case:
        return Case(self.op, self.inputs, self.sizes, self.documents, self.dtype)

    @property
    def name(self) -> str:
        return f"{self.flat.name}, L{self.levels}" + (f", behind {self.before}" if self.before else "")


def cases() -> list[LogLinearCase]:
    """Rows that fill no block, few levels, documents that begin anywhere, prefixes that end anywhere."""
    found = []
    for op, sizes in (
        ("log_linear_attention", Sizes(2, 700, 1, 4, 128, 64)),
        ("log_linear_delta_rule", Sizes(2, 700, 2, 2, 128, 128)),
    ):
        case = LogLinearCase(op, "random", sizes)
        found += [case._replace(inputs=inputs) for inputs in AWKWARD[: 5 if op == "log_linear_attention" else 7]]
        found += [case._replace(levels=levels) for levels in (1, 6, 10)]
        found += [case._replace(documents="documents"), case._replace(documents="padding", before=300)]
        found += [case._replace(before=128), case._replace(before=1000), case._replace(dtype="float16")]
        found += [case._replace(sizes=sizes._replace(time=1), before=before) for before in (1, 63, 1000)]
        found += [case._replace(sizes=sizes._replace(time=70)), case._replace(sizes=sizes._replace(key_dim=32))]
        if op == "log_linear_attention":  # whole parts of 1024 tokens, and one that is not whole
            found += [case._replace(sizes=sizes._replace(batch=1, time=time)) for time in (2048, 2500)]
            found += [case._replace(inputs="decay -1e4", sizes=sizes._replace(batch=1, time=2500), levels=10)]
    return found


class Arguments(NamedTuple):
    """Of a case: (q, k, u, erase, log_decay, level weights, states), positions [B] and cotangents of o and states."""

    inputs: tuple
    position: jax.Array
    cotangents: tuple


def arguments_of(case: LogLinearCase) -> tuple[Arguments, jax.Array | None]:
    """Of a case, and the ids of its documents."""
    return drawn(case), segment_ids(case.flat)


def drawn(case: LogLinearCase, seed: int = 0) -> Arguments:
    """A prefix has states in the slots that its length has."""
    (*inputs, state), (d_o, _) = draw(case.flat, seed)
    rng, shape = np.random.default_rng(seed + 1), (*state.shape[:2], case.levels, *state.shape[2:])
    position = case.before + (37 * np.arange(case.sizes.batch) if case.before else np.zeros(case.sizes.batch, int))
    slot, last = np.arange(case.levels), case.levels - 1
    bits = position[:, None] >> np.maximum(slot - 1, 0)
    live = np.where(slot == last, bits > 0, bits & 1 == 1) & ((slot > 0) | (last == 0))
    states = rng.normal(size=shape) * case.sizes.key_dim**-0.5 * live[:, None, :, None, None]
    weights = jnp.asarray(rng.normal(size=(*inputs[2].shape[:3], case.levels)), jnp.float32)
    cotangents = d_o, jnp.asarray(rng.normal(size=shape), jnp.float32)
    return Arguments((*inputs, weights, jnp.asarray(states, jnp.float32)), jnp.asarray(position, jnp.int32), cotangents)


@functools.cache
def program(op: str, implementation: str, prefix: bool, interpret: Any = None) -> Callable:
    """A jitted (arguments, ids) -> outputs, states and gradients by name; prefix: whether there is one."""

    def forward(position, ids, q, k, u, erase, log_decay, weights, states):
        before = ops.FenwickState(states, position) if prefix else None
        if interpret is not None:
            given = None if op == "log_linear_attention" else erase
            return KERNELS[op](fenwick(q, k, u, given, log_decay, weights, before, ids), 64, interpret=interpret)
        options = {"initial_state": before, "segment_ids": ids, "implementation": implementation}
        if op == "log_linear_attention":
            o, state = ops.log_linear_attention(q, k, u, log_decay, weights, **options)
        else:
            o, state = ops.log_linear_delta_rule(q, k, u, erase, log_decay, weights, **options)
        return o, state.states

    @jax.jit
    def run(x: Arguments, ids):
        out, pull = jax.vjp(lambda *given: forward(x.position, ids, *given), *x.inputs)
        gradients = pull((x.cotangents[0].astype(out[0].dtype), x.cotangents[1]))
        found = dict(zip(NAMES, (*out, *gradients), strict=True))
        unused = ["derase"] * (op == "log_linear_attention") + ["dinitial"] * (not prefix)
        if prefix:  # slots that the prefix has not are none of its state
            found["dinitial"] = jnp.where(x.inputs[-1] != 0, found["dinitial"], 0.0)
        return {name: value for name, value in found.items() if name not in unused}

    return run


def run(case: LogLinearCase, implementation: str, arguments: tuple, interpret: Any = None) -> dict[str, jax.Array]:
    return program(case.op, implementation, case.before > 0, interpret)(*arguments)


def truth_of(case: LogLinearCase, arguments: tuple) -> dict[str, jax.Array]:
    """ "recurrent" on the same inputs, widened."""
    x, ids = arguments
    return run(case, "recurrent", (x._replace(inputs=tuple(a.astype(jnp.float32) for a in x.inputs)), ids))


def beside(case: LogLinearCase, arguments: tuple, truth: dict[str, jax.Array]) -> dict[str, float]:
    """Errors of "chunked"."""
    return errors_of(run(case, "chunked", arguments), truth)


def bar(case: LogLinearCase, name: str, beside: float) -> float:
    floor = FLOORS.get(name, FLOOR)
    if name == "dlog_decay" and case.inputs == "beta 1" and case.op == "log_linear_delta_rule":
        floor = FLOOR_WITHOUT_DECAY
    return max(BAR[case.dtype] * beside, floor if case.dtype == "bfloat16" else floor / 8)


def tiny_cases() -> list[LogLinearCase]:
    found = [LogLinearCase("log_linear_attention", "random", Sizes(1, 150, 1, 1, 64, 64), 9)]
    return [*found, LogLinearCase("log_linear_delta_rule", "parallel keys", Sizes(1, 150, 1, 1, 64, 64), 9)]


def timed() -> Iterator[Timed]:
    """The benchmark has their times beside those of flat operators and attention."""
    yield from ()
