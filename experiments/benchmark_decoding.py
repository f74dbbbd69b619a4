"""The part of `experiments.benchmark` that takes one token at a time: states, caches and pages as of a position, and
time per token."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

from efla_jax import ops, selfcheck
from experiments.benchmark_setting import (
    BATCH,
    CHUNK_SIZE,
    DTYPE,
    FLAT,
    FRACTIONS,
    HEADS,
    KEY_DIM,
    KEY_HEADS,
    OP,
    OUT,
    POSITIONS,
    REPEATS,
    ROUTES,
    TOKENS,
    VALUE_DIM,
    apply,
    levels_of,
    make_inputs,
    markdown,
    numbers,
    save,
)
from experiments.nats_l_contexts import owners_of


def begin_state(name: str, position: int, levels: int, fraction: float) -> Any:
    """Random numbers as the state of a row that has seen `position` tokens, with room for --tokens more; fraction: of
    the chunks that have a page."""
    batch, heads, dims = BATCH.value, HEADS.value, (KEY_DIM.value, VALUE_DIM.value)
    random = jax.random.key(position)
    stands = jnp.full((batch,), position, jnp.int32)
    if name == "softmax":
        cache = ops.init_kv_cache(batch, position + TOKENS.value, heads, dims[1], dims[1], DTYPE.value)
        k = jax.random.normal(random, cache.k.shape, cache.k.dtype).at[:, position:].set(0)
        return ops.KVCache(k, jnp.flip(k, axis=2), stands)
    if OP.value == "block_sparse_attention":
        return pages(position, fraction)
    if OP.value not in FLAT or name == "flat":
        return jax.random.normal(random, (batch, heads, *dims))
    states = jax.random.normal(random, (batch, heads, levels, *dims))
    return ops.FenwickState(jnp.where(live(position, levels)[:, None, None], states, 0.0), stands)


def pages(position: int, fraction: float) -> ops.SelectedKV:
    """The cache of block-sparse attention, with pages of this part of every routing head's chunks."""
    batch, size, routes = BATCH.value, int(CHUNK_SIZE.value), ROUTES.value or HEADS.value
    owners = owners_of(position // size, routes, 1, fraction)
    room = len(owners) + (TOKENS.value // size + 1) * routes
    key_heads, dims = KEY_HEADS.value or HEADS.value, (KEY_DIM.value, VALUE_DIM.value)
    empty = ops.init_selected_kv(batch, room, size, key_heads, routes, *dims, DTYPE.value)
    random = iter(jax.random.split(jax.random.key(position), 4))
    drawn = {
        part: jax.random.normal(next(random), getattr(empty, part).shape, DTYPE.value)
        for part in ("k", "v", "open_k", "open_v")
    }
    owner = jnp.asarray(np.pad(owners, (0, room - len(owners))), jnp.int32)
    used, stands = (jnp.full((batch,), number, jnp.int32) for number in (len(owners), position))
    return empty._replace(**drawn, owner=jnp.tile(owner, (batch, 1)), pages=used, position=stands)


def live(position: int, levels: int) -> jax.Array:
    """Which slots hold something after `position` tokens: bits of the position, the last slot all above."""
    level = jnp.arange(levels)
    bits = position >> jnp.maximum(level - 1, 0)
    return jnp.where(level == levels - 1, bits > 0, (level > 0) & (bits & 1 > 0))


def in_use(state: Any, position: int, levels: int) -> float:
    """Bytes of a state that hold something."""
    whole = sum(x.nbytes for x in jax.tree.leaves(state))
    if isinstance(state, ops.FenwickState):
        return whole * int(live(position, levels).sum()) / levels
    if isinstance(state, ops.SelectedKV):
        pool, room = state.k.nbytes + state.v.nbytes, state.k.shape[1]
        return whole - pool * (1 - int(state.pages[0]) / room)
    return whole


def back(state: Any, began: Any) -> Any:
    """A state whose counters are those of where it began: contents are random anyway."""
    counters = {name: began[name] for name in ("position", "length", "pages") if name in getattr(state, "_fields", ())}
    return state._replace(**{name: jnp.array(x) for name, x in counters.items()}) if counters else state


def decoder(name: str) -> Callable:
    """(state, inputs of some tokens) -> their outputs and the state after them, one token after the other."""

    def step(state, token):
        o, state = apply(name, jax.tree.map(lambda x: x[:, None], token), state)
        return state, o

    def decode(state, inputs):
        state, o = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs))
        return o, state

    return decode


class Run:
    """A compiled loop of an implementation that can be called again and again: it goes back to where it began."""

    def __init__(self, name: str, begin: int, count: int, levels: int, fraction: float):
        self.inputs, self.state = make_inputs(name, count, levels), begin_state(name, begin, levels, fraction)
        if OP.value == "block_sparse_attention" and name != "softmax":  # an entry for each token, not for each chunk
            entries = np.arange(count)[:, None] + np.arange(ROUTES.value or HEADS.value)
            self.inputs["selected"] = jnp.tile(jnp.asarray(entries % 2, jnp.float32), (BATCH.value, 1, 1))
        self.size = sum(x.nbytes for x in jax.tree.leaves(self.state))
        self.used = in_use(self.state, begin + count - 1, levels)
        self.levels = levels if isinstance(self.state, ops.FenwickState) else ""
        fields = self.state._asdict() if hasattr(self.state, "_asdict") else {}
        self.began = {field: np.asarray(x) for field, x in fields.items() if x.ndim == 1}
        self.loop = jax.jit(decoder(name), donate_argnums=0).lower(self.state, self.inputs).compile()

    def prepare(self) -> None:
        self.state = jax.block_until_ready(back(self.state, self.began))

    def __call__(self) -> jax.Array:
        o, self.state = self.loop(self.state, self.inputs)
        return jax.block_until_ready(o)

    def anew(self) -> jax.Array:
        self.prepare()
        return self()

    def kernels(self) -> float:
        """Milliseconds of the loop's kernels on a GPU, NaN elsewhere."""
        return selfcheck.device_milliseconds(self.anew, calls=3) if jax.default_backend() == "gpu" else float("nan")


def measure(position: int, fraction: float, names: list[str]) -> list[dict]:
    """One row per implementation: the --tokens tokens that end at `position`; calls take turns, so that a busy machine
    slows all of them alike."""
    count, levels = min(TOKENS.value, position + 1), levels_of(position)
    runs = {name: Run(name, position + 1 - count, count, levels, fraction) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for run in runs.values():
        run()
    for _ in range(REPEATS.value):
        for name, run in runs.items():
            run.prepare()
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    rows = []
    for name, run in runs.items():
        row = dict(op=OP.value, implementation=OP.value if name == "auto" else name, position=position)
        row |= dict(fraction=float("nan") if name == "softmax" else fraction, levels=run.levels, state_bytes=run.size)
        row |= dict(live_mib=run.used / 2**20, state_mib=run.size / 2**20)
        row |= dict(us_per_token=1e6 * statistics.median(times[name]) / count)
        rows.append(row | dict(kernels_us_per_token=1e3 * run.kernels() / count))
    return rows


def parts() -> list[float]:
    """--fractions of block-sparse attention; a number that is none of any other operator."""
    if OP.value != "block_sparse_attention":
        if FRACTIONS.present:
            raise app.UsageError("--fractions goes with --op=block_sparse_attention")
        return [float("nan")]
    try:
        found = [float(word) for word in FRACTIONS.value]
    except ValueError:
        found = []
    if not found or not all(0 <= part <= 1 for part in found):
        raise app.UsageError(f"--fractions={','.join(FRACTIONS.value)}: not numbers from 0 to 1; write e.g. 0.1,0.5")
    return found


def by_position(names: list[str]) -> None:
    """The benchmark of single tokens at --positions."""
    shown = {"position": "position", "implementation": "operator"}
    shown |= {"fraction": "of chunks"} if OP.value == "block_sparse_attention" else {"levels": "levels"}
    shown |= {"state_mib": "state MiB", "live_mib": "live MiB", "us_per_token": "microseconds per token"}
    shown |= {"kernels_us_per_token": "of its kernels"} if jax.default_backend() == "gpu" else {}
    rows: list[dict] = []
    for position in numbers(POSITIONS, 0):
        for index, fraction in enumerate(parts()):
            rows += measure(position, fraction, [name for name in names if name != "softmax" or index == 0])
            text = markdown(rows, shown, {"us_per_token": ".1f", "kernels_us_per_token": ".1f"})
            save(rows, "decode", text)
    print(f"{text}\n\nwritten: {OUT.value}/decode.csv, .md")
