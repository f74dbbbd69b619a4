"""The seam between an op and its implementations: `implementation="auto"` and what happens when one cannot serve.

An implementation that does not support an input raises NotImplementedError with the reason; "auto" then tries the next.
Wrong input is a ValueError and is never retried. Kernels are reached only from here, and only when asked for.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax

Table = Mapping[str, Callable[..., Any]]
GPU_PROGRAMS = ("pallas", "cudnn")  # names under which "auto" tries what is not XLA's
SHORT = 8  # tokens up to which the scan is cheaper than a chunk
LARGE_STATE = 16 << 20  # bytes of all states from which a kernel of one token is the faster one (H200, delta rule; the
# log-linear ones take 0.46 to 0.58 of the time of "recurrent" with 176 MiB and more; smaller states were not timed)


def on_gpu() -> bool:
    """True when the default backend is a GPU (asked at call time: importing the library must not start a backend)."""
    return jax.default_backend() == "gpu"


def automatic(time: int, state_bytes: int = 0) -> tuple[str, ...]:
    """What "auto" tries for a recurrence over this many tokens, in order; state_bytes: of an operator that has a kernel
    of one token worth trying."""
    if time <= SHORT:
        return ("pallas", "recurrent") if time == 1 and state_bytes >= LARGE_STATE else ("recurrent",)
    return ("pallas", "chunked")


KERNELS = contextvars.ContextVar("kernels", default=True)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """What is traced inside takes no GPU kernel where the choice is "auto": for `jax.vmap` over parameters, under which
    no GPU has run them."""
    before = KERNELS.set(False)
    try:
        yield
    finally:
        KERNELS.reset(before)


def missing_kernel(op: str) -> Callable[..., NoReturn]:
    """The slot of a kernel by jax-triton, of which there is none: `kernels/README.md` says why."""

    def implementation(*_) -> NoReturn:
        raise NotImplementedError(
            f"{op}: no kernel of jax-triton is built; use implementation='pallas' on a Hopper GPU, 'chunked' or 'auto'."
        )

    return implementation


def check_implementation(op: str, implementation: str, table: Iterable[str]) -> None:
    """Raise ValueError unless the name is "auto" or one of the table's."""
    known = ("auto", *table)
    if implementation not in known:
        raise ValueError(f"implementation: {implementation!r} is not known to {op}; choose one of {known}.")


def dispatch(op: str, implementation: str, table: Table, auto: Sequence[str], arguments: tuple) -> Any:
    """Run `table[implementation](*arguments)`, or for "auto" the first name of `auto` that supports the arguments.

    Raises ValueError for an unknown name, NotImplementedError when the named one does not support the input, and an
    ExceptionGroup of every reason when all of `auto` decline."""
    check_implementation(op, implementation, table)
    if implementation != "auto":
        return table[implementation](*arguments)
    declined = []
    for name in auto:
        try:
            if name in GPU_PROGRAMS and not KERNELS.get():
                raise NotImplementedError(f"{op}: no GPU kernel inside dispatch.without_kernels()")
            return table[name](*arguments)
        except NotImplementedError as reason:
            declined.append(reason)
    raise ExceptionGroup(f"{op}: no implementation supports this input", declined)
