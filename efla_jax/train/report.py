"""What a step returns as log rows, with speed, memory and health; read one step late, so that logging never waits."""

import math
import time
from collections.abc import Sequence

import jax

from efla_jax import metrics

COMPILED = "/jax/core/compile/backend_compile_duration"


class Clock:
    """Seconds of the process since it began, by what they were spent on; what is not accounted for went into steps."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.spent = {"start": 0.0, "data": 0.0, "save": 0.0, "score": 0.0}
        self._entered, self._purpose = 0.0, ""

    def on(self, purpose: str) -> "Clock":
        """`with clock.on("data"): ...` adds the seconds of the block."""
        self._purpose = purpose
        return self

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *_) -> None:
        self.spent[self._purpose] += time.perf_counter() - self._entered

    def started(self) -> None:
        """The first step is done: everything up to now was reading, building and compiling."""
        self.spent = {**dict.fromkeys(self.spent, 0.0), "start": time.perf_counter() - self.began}

    def goodput(self) -> float:
        """Share of the time since the process began that went into steps."""
        whole = time.perf_counter() - self.began
        return max(0.0, 1 - sum(self.spent.values()) / max(whole, 1e-9))


class Compilations:
    """Counts the programs that XLA compiled while it is listening; more than a few per run mean changing shapes."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == COMPILED

    def close(self) -> None:
        """Stop listening."""
        jax.monitoring.unregister_event_duration_listener(self._hear)


def health(report: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What of a report is looked at in every step."""
    return {name: report[name] for name in ("skipped", "skipped_in_a_row", "first_bad")}


class MetricLog:
    """Turns step reports into rows of `writer`, and stops a run whose gradients stay non-finite.

    tokens           per step, of the whole job
    flops_per_token, peak_flops    for model FLOP utilisation: of a step's arithmetic, and of all devices together
    leaf_names       of the parameters, for the name of the first gradient that was not finite
    """

    def __init__(
        self,
        writer: metrics.Writer,
        clock: Clock,
        compilations: Compilations,
        *,
        begin: int,
        limit: int,
        tokens: int,
        flops_per_token: float = 0.0,
        peak_flops: float = 0.0,
        bytes_per_token: float = 0.0,
        leaf_names: Sequence[str] = (),
    ):
        self.writer, self.clock, self.compilations = writer, clock, compilations
        self.limit, self.tokens, self.leaf_names = limit, tokens, leaf_names
        self.flops_per_token, self.peak_flops, self.bytes_per_token = flops_per_token, peak_flops, bytes_per_token
        self.waiting: tuple[int, dict, dict, bool] | None = None
        self.last_bad = "unknown"
        self.restart(begin)

    def restart(self, step: int) -> None:
        """Speed is measured from here: what lies between two calls was not training."""
        self.since, self.logged_at, self.data_before = time.perf_counter(), step, self.clock.spent["data"]

    def note(self, step: int, report: dict[str, jax.Array], *, log: bool, signals: dict | None = None) -> None:
        """Read the report that waits, if any; then keep this one until the next call."""
        self.flush()
        self.waiting = step, report, signals or {}, log

    def flush(self) -> None:
        """Read the report that waits, if any; write its row if it was to be logged."""
        if self.waiting is None:
            return
        step, report, signals, log = self.waiting
        self.waiting = None
        # Read at every step, which also keeps the host no more than one step ahead of the devices.
        read = jax.device_get(report | signals if log else health(report))
        row = {name: float(value) for name, value in read.items()}
        in_a_row, first_bad = row.pop("skipped_in_a_row"), int(row.pop("first_bad"))
        if first_bad >= 0:
            self.last_bad = self.name_of(first_bad)
            so_far = f"{row['skipped']:.0f} skipped so far"
            self.writer.print(f"step {step}: skipped, its gradient is not finite, first in {self.last_bad}; {so_far}")
        if log:
            self.write(step, row)
        if in_a_row >= self.limit:
            raise FloatingPointError(
                f"the gradient was not finite in the last {in_a_row:.0f} steps up to step {step}: nothing was learned"
                f" from them and the run stops. First such gradient: {self.last_bad}. Lower config.optim.learning_rate,"
                " or look at the data of these steps."
            )

    def write(self, step: int, row: dict[str, float]) -> None:
        """Write a row, with the speed of the steps since the last one."""
        row |= self.speed(step)
        if self.bytes_per_token:
            row["bits_per_byte"] = row["loss"] / math.log(2) / self.bytes_per_token
        if self.flops_per_token:
            row["perplexity"] = math.exp(min(row["loss"], 700.0))
        self.writer.write(step, row)

    def name_of(self, index: int) -> str:
        return self.leaf_names[index] if 0 <= index < len(self.leaf_names) else "unknown"

    def speed(self, step: int) -> dict[str, float]:
        """What the steps since the last row took, per step, and the memory of this process's first device."""
        row = {"goodput": self.clock.goodput(), "compilations": float(self.compilations.count)}
        seconds, steps = max(time.perf_counter() - self.since, 1e-9), step - self.logged_at
        if steps:  # none after the first step, which compiles
            row["tokens_per_second"] = self.tokens * steps / seconds
            row["step_seconds"] = seconds / steps
            row["data_wait_seconds"] = (self.clock.spent["data"] - self.data_before) / steps
            if self.flops_per_token and self.peak_flops:
                row["mfu"] = row["tokens_per_second"] * self.flops_per_token / self.peak_flops
        memory = jax.local_devices()[0].memory_stats()
        if memory and "peak_bytes_in_use" in memory:
            row["peak_memory_gib"] = memory["peak_bytes_in_use"] / 2**30
        self.restart(step)
        return row
