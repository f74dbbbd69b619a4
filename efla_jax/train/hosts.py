"""A job of several processes, and signals: joining, agreeing on the next batch, and when to stop.

Everything rests on `jax.distributed`: it finds the other processes through the environment (SLURM, Open MPI,
Kubernetes, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID), ends every process with a message when
one is lost, and makes all of them stop at the same step when one is told to.
"""

import contextlib
import itertools
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"  # of a run's folder
ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
TURN, NO_BATCH = "efla_jax/turn", "no batch"
TURNS = itertools.count()  # how often processes have met: the same number in all of them


def join(heartbeat_timeout: int = 100) -> None:
    """`jax.distributed.initialize` from the environment; call it before anything touches a device.

    heartbeat_timeout: seconds after which a silent process, or one that does not end when another has, counts as lost
    and the job ends. Raises ValueError when the environment names some of ENVIRONMENT but not all, or is no job at
    all."""
    given = {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}
    processes = own = None  # for jax to find
    if "JAX_NUM_PROCESSES" in given or "JAX_PROCESS_ID" in given:
        missing = [name for name in ENVIRONMENT if name not in given]
        if missing:
            raise ValueError(f"environment: {', '.join(given)} is set, but {', '.join(missing)} is not; set all three")
        for name in ENVIRONMENT[1:]:
            if not given[name].isdecimal():
                raise ValueError(f"environment: {name}={given[name]!r} is not a whole number >= 0; correct it")
        if not given[ENVIRONMENT[0]].rpartition(":")[2].isdecimal():
            raise ValueError(f"environment: {ENVIRONMENT[0]}={given[ENVIRONMENT[0]]!r} is not HOST:PORT; add the port")
        processes, own = int(given[ENVIRONMENT[1]]), int(given[ENVIRONMENT[2]])
    try:
        jax.distributed.initialize(
            num_processes=processes,
            process_id=own,
            heartbeat_timeout_seconds=heartbeat_timeout,
            # How long the first process to end waits for the others: it may have ended with an error.
            shutdown_timeout_seconds=heartbeat_timeout,
        )
    except ValueError as error:
        raise ValueError(
            f"--distributed: no job of several processes was found in the environment ({error}). Start with srun or"
            f" mpirun, or set {', '.join(ENVIRONMENT)} for every process."
        ) from error


class PeerFailed(RuntimeError):
    """Another process of the job has ended, or does not answer: this one cannot go on."""


def agree_on_next(step: int, has_batch: bool, timeout: int = 600) -> bool:
    """True when every process has its batch of `step` in hand; False in all of them as soon as one has none.

    Returns when all have asked, on the host, without waiting for a device; raises PeerFailed with what another process
    ended with (see `ending_together`), or naming those that did not ask within `timeout` seconds. A job of one process
    answers at once."""
    if jax.process_count() == 1:
        return has_batch
    try:
        left = meet(None if has_batch else NO_BATCH, timeout)
    except jax.errors.JaxRuntimeError as error:
        raise PeerFailed(
            f"step {step}: another process had no batch within {timeout} s; its loader is stuck or it is gone ({error})"
        ) from error
    if left not in (None, NO_BATCH):
        raise PeerFailed(f"step {step}: the job ends with {left}")
    return left is None


def meet(message: str | None, timeout: int) -> str | None:
    """Waits for the next call of every process; the message that one of them left there, None when none did."""
    client, turn = ocp.multihost.get_jax_distributed_client(), f"{TURN}/{next(TURNS)}"
    if message is not None:
        client.key_value_set(turn, message, allow_overwrite=True)
    client.wait_at_barrier(TURN, timeout_in_ms=1000 * timeout)  # one name for all: the service never forgets any
    try:
        return client.key_value_try_get(turn)
    except jax.errors.JaxRuntimeError:  # nobody has set it
        return None


@contextlib.contextmanager
def ending_together(timeout: int = 60) -> Iterator[None]:
    """An error in one process, a full disk say, ends the others at their next step instead of leaving them to wait.

    Where they do not come to a next step within `timeout` seconds, jax ends them once this process is gone."""
    try:
        yield
    except PeerFailed:
        raise
    except Exception as error:
        if jax.process_count() > 1:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                meet(f"process {jax.process_index()}: {error}", timeout)
        raise


class StopRequest:
    """Whether the job has been told to end (SIGTERM, what schedulers send before they take a machine away; Ctrl-C)."""

    def __init__(self) -> None:
        self._told = False

    def tell(self, *_) -> None:
        """Ask the run to save and end after its current step."""
        self._told = True

    def reached(self, step: int) -> bool:
        """True at the step after which to save and end: the same one in every process. Ask at every step."""
        if jax.process_count() == 1:
            return self._told
        return multihost_utils.reached_preemption_sync_point(step)


@contextlib.contextmanager
def alone_in(folder: pathlib.Path) -> Iterator[None]:
    """The lock of a run's folder, held by the first process of a job until it ends, however it does.

    Two runs in one folder would clear away each other's half-written checkpoints, and mix their rows. Raises ValueError
    if another holds it, or the folder cannot be made. Where there are no locks (a file system without, Windows), nobody
    is kept out."""
    if fcntl is None or jax.process_index():
        yield
        return
    with contextlib.ExitStack() as opened:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"workdir: {folder} cannot be made ({error.strerror}); choose another.") from error
        try:
            file = opened.enter_context(open(folder / LOCK, "ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            opened.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a process forked meanwhile has the file open for longer
        except BlockingIOError:
            raise ValueError(
                f"workdir: another program trains in {folder}; wait for its end, stop it, or choose another --workdir."
            ) from None
        except OSError:  # what cannot be written is refused by name, where that counts
            pass
        yield


@contextlib.contextmanager
def stop_when_told() -> Iterator[StopRequest]:
    """A StopRequest that SIGTERM sets while this context is open, and Ctrl-C, which is raised at its end.

    So what Ctrl-C would lose is saved; a second one is what it always is."""
    request, interrupted = StopRequest(), False

    def interrupt(number, frame) -> None:
        nonlocal interrupted
        if interrupted:
            signal.default_int_handler(number, frame)
        interrupted = True
        request.tell()
        with contextlib.suppress(OSError):  # what reads a pipe behind this program has had the same Ctrl-C
            os.write(2, b"\nCtrl-C: the run is saved after this step; once more ends it without\n")

    # jax.distributed listens by itself, and a handler of ours would silence it; only a main thread may set one.
    handlers: dict[int, Any] = {signal.SIGTERM: request.tell} if jax.process_count() == 1 else {}
    if handlers and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not of a program in the background
        handlers[signal.SIGINT] = interrupt
    before: dict[int, Any] = {}
    with contextlib.suppress(ValueError):
        for number, handler in handlers.items():
            before[number] = signal.signal(number, handler)
    try:
        yield request
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that Python did not set cannot be set by it
                signal.signal(number, handler)
    if interrupted:
        raise KeyboardInterrupt
