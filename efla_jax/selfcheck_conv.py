"""The cases of `efla_jax.selfcheck` for the short convolution: both activations, documents, padding, inputs before the
first token, widths and lengths of all kinds, with every gradient.

The reference is XLA's form, by shifts, on the same inputs widened to float32; beside the kernel stands that form at the
inputs' dtype, which sums in float32 as the kernel does.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from efla_jax import ops
from efla_jax.ops import pallas_conv
from efla_jax.ops.conv import reached
from efla_jax.ops.dispatch import without_kernels
from efla_jax.ops.segments import segments
from efla_jax.selfcheck_cases import FLOOR, Case, Sizes, Timed, errors_of, segment_ids

NAMES = ("y", "dx", "dweight", "dbias", "dstate")
BAR = 1.2  # times the error of XLA's: both sum in float32 and round once
# In float32: sums of up to 2000 numbers in another order, of slopes with approximate instructions, 2^-22 each. On an
# H200 they read at most 2.1e-7.
SUMS = 1e-6


class ConvCase(NamedTuple):
    """One input: T tokens of D channels, W taps, documents as of `Case`; state: whether there are inputs before it."""

    batch: int
    time: int
    channels: int
    taps: int = 4
    activation: str | None = "silu"
    documents: str | None = None
    state: bool = False
    bias: bool = True
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        shape = f"B{self.batch} T{self.time} D{self.channels} W{self.taps}"
        notes = [self.activation or "", self.documents or ""]
        notes += ["behind a state"] * self.state + ["no bias"] * (not self.bias)
        return ", ".join(["causal_conv", *filter(None, notes), shape, self.dtype])


def cases() -> list[ConvCase]:
    """Rows that fill no step, one row, parts that documents end in, few channels and many, few taps and many."""
    case = ConvCase(2, 1000, 1024)
    found = [case, case._replace(activation=None), case._replace(documents="documents")]
    found += [case._replace(documents="padding"), case._replace(documents="padding", activation=None, state=True)]
    found += [case._replace(state=True, bias=False), case._replace(documents="documents", state=True)]
    one = ConvCase(1, 333, 384, documents="documents", state=True)  # one row: see `pallas_conv.overwritten`
    found += [one, one._replace(taps=2, activation=None), one._replace(taps=8), one._replace(time=64, documents=None)]
    found += [one._replace(dtype="float16"), one._replace(dtype="float32")]
    return found + [one._replace(channels=100), one._replace(taps=9)]  # not covered


def tiny_cases() -> list[ConvCase]:
    case = ConvCase(1, 70, 128, documents="documents")
    return [case, case._replace(documents=None, activation=None, state=True)]


class Arguments(NamedTuple):
    """Of a case: (x, weight, bias, state), of which the last two may be None, ids or None, and y's cotangent."""

    inputs: tuple
    ids: jax.Array | None
    cotangent: jax.Array


def arguments_of(case: ConvCase) -> Arguments:
    rng, row = np.random.default_rng(0), (case.batch, case.time, case.channels)

    def normal(*shape, dtype="float32"):
        return jnp.asarray(rng.normal(size=shape), dtype)

    x, cotangent = normal(*row, dtype=case.dtype), normal(*row, dtype=case.dtype)
    weight, bias = normal(case.taps, case.channels) / 2, normal(case.channels) if case.bias else None
    state = normal(case.batch, case.taps - 1, case.channels, dtype=case.dtype) if case.state else None
    return Arguments((x, weight, bias, state), ids_of(case), cotangent)


def ids_of(case: ConvCase) -> jax.Array | None:
    return segment_ids(Case("causal_conv", "random", Sizes(case.batch, case.time, 1, 1, 1, 1), case.documents))


def reach_of(ids: jax.Array | None, count: int) -> jax.Array | None:
    """How many of the `count` inputs before each token it reads, in rows without padding."""
    if ids is None:
        return None
    document = segments(ids).document
    return reached(jnp.pad(document, ((0, 0), (count, 0))), count)


def apply(activation: str | None, implementation: str, interpret: Any, ids, x, weight, bias, state) -> jax.Array:
    """y of the operator; in the interpreter of the kernel alone, in rows without padding."""
    kernel = functools.partial(pallas_conv.windowed, activation=activation, interpret=interpret)
    context: contextlib.AbstractContextManager = without_kernels()
    if implementation == "pallas":
        if interpret is not None:
            return kernel(x, weight, bias, state, reach_of(ids, weight.shape[0] - 1))
        jax.eval_shape(kernel, x, weight, bias, state, None)  # the operator would go on without it
        context = contextlib.nullcontext()
    with context:
        return ops.causal_conv(x, weight, bias, initial_state=state, segment_ids=ids, activation=activation)[0]


@functools.cache
def program(activation: str | None, implementation: str, interpret: Any = None) -> Callable:
    """A jitted (arguments) -> y and gradients by name; implementation: "pallas" or "shifts"."""

    @jax.jit
    def run(given: Arguments):
        y, pull = jax.vjp(lambda *a: apply(activation, implementation, interpret, given.ids, *a), *given.inputs)
        found = dict(zip(NAMES, (y, *pull(given.cotangent.astype(y.dtype))), strict=True))
        return {name: x for name, x in found.items() if x is not None}

    return run


def run(case: ConvCase, implementation: str, arguments: Arguments, interpret: Any = None) -> dict[str, jax.Array]:
    return program(case.activation, implementation, interpret)(arguments)


def truth_of(case: ConvCase, arguments: Arguments) -> dict[str, jax.Array]:
    """By shifts on the same inputs, widened."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arguments.inputs)
    return run(case, "shifts", arguments._replace(inputs=wide))


def beside(case: ConvCase, arguments: Arguments, truth: dict[str, jax.Array]) -> dict[str, float]:
    """Errors of the form by shifts."""
    return errors_of(run(case, "shifts", arguments), truth)


def bar(case: ConvCase, name: str, beside: float) -> float:
    return max(BAR * beside, SUMS if name in ("dweight", "dbias") else FLOOR.get(case.dtype, SUMS))


def timed() -> Iterator[Timed]:
    for channels in (1024, 3072):
        keys = jax.random.split(jax.random.key(0), 3)
        x, cotangent = (jax.random.normal(key, (16, 2048, channels), jnp.bfloat16) for key in keys[:2])
        given = Arguments((x, jax.random.normal(keys[2], (4, channels)), None, None), None, cotangent)
        name = f"causal_conv, silu, {', '.join(map(str, x.shape))}, W 4, forward+backward"
        yield Timed(name, ("pallas", "shifts"), functools.partial(program, "silu"), (given,))
