"""Short causal convolution on a Hopper GPU, one filter per channel: every input read once, every output written once.

    y_t = bias + sum_lag w_{W - 1 - lag} x_{t - lag}        lag = 0 .. W - 1, as far as token t reaches

W products a number are nothing beside its bytes, and XLA reads x once for every lag, a number at a time. Here a
warpgroup owns a few neighbouring channels a thread and a part of the time, which it walks with the last W - 1 rows in
registers; TMA copies the rows of the next steps to shared memory meanwhile, many bytes in flight for no register.
Backward the walk is the same, with the cotangents of the W - 1 rows behind at hand; sums over time are left as one row
a program. Source: Mamba (arXiv 2312.00752), section 3.4.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels import mosaic

THREADS = 128  # of a warpgroup
LINE = 64  # channels in a line of an array: TMA takes at most 256 numbers along an axis
DTYPES = ("bfloat16", "float16", "float32")
MOST_TAPS = 8  # all but one are rows in registers


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut. bytes: of a row that a thread owns; rows: of a step of the walk; slots: steps in shared
    memory; tokens: of a program at most, halved while there are fewer than `programs` of them."""

    bytes: int = 8
    rows: int = 4
    slots: int = 6
    tokens: int = 256
    programs: int = 512  # 4 on each of 132 multiprocessors: more of them leave more rows of sums to add up


SAFE = Config()


class Plan(NamedTuple):
    """The grid of programs [batch, parts, columns]: columns of `lanes` channels, parts of `tokens` tokens, walked in
    steps of `rows` tokens, `slots` of them in shared memory. The last part has the last `tail` tokens as well, at least
    W - 1 of them, so that no step of a walk looks beyond the end."""

    taps: int
    time: int
    lanes: int
    rows: int
    slots: int
    tokens: int
    tail: int
    grid: tuple[int, int, int]

    @property
    def walked(self) -> int:
        return self.time - self.tail

    @property
    def layout(self):
        return plgpu.Layout.WG_STRIDED(self.shape, vec_size=self.lanes // THREADS)

    @property
    def shape(self) -> tuple[int, int]:
        """Of a row of a program's channels."""
        return self.lanes // LINE, LINE

    def scratch(self, dtype, count: int) -> list:
        """The shared memory of a walk over `count` arrays, and barriers that tell when a slot is full."""
        buffers = [plgpu.SMEM((self.slots, self.rows, *self.shape), dtype)] * count
        return [*buffers, plgpu.Barrier(num_arrivals=count, num_barriers=self.slots)]


def unsupported(taps: int, channels: int, dtype) -> str | None:
    """Why the kernels do not cover these sizes, or None."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"dtype {jnp.dtype(dtype).name}: it is none of {', '.join(DTYPES)}"
    if channels % THREADS:
        return f"{channels} channels: not a multiple of {THREADS}"
    if not 2 <= taps <= MOST_TAPS:
        return f"{taps} taps: not 2 to {MOST_TAPS}"
    return None


def plan_for(x: jax.Array, taps: int, config: Config) -> Plan:
    """The widest rows that divide the channels, and the longest parts that still give enough programs."""
    batch, time, channels = x.shape
    width = max(config.bytes // x.dtype.itemsize, 1)
    while channels % (THREADS * width):
        width //= 2
    columns, tokens = channels // (THREADS * width), config.tokens
    tail = min(taps - 1 + (time - taps + 1) % config.rows, time)
    while tokens >= 4 * config.rows and batch * columns * pl.cdiv(time, tokens) < config.programs:
        tokens = tokens // 2 // config.rows * config.rows
    parts = max(pl.cdiv(time - tail, tokens), 1)
    return Plan(taps, time, THREADS * width, config.rows, config.slots, tokens, tail, (batch, parts, columns))


def coefficients_of(weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """[W + 1, D] float32: the taps, then the bias."""
    bias = jnp.zeros(weight.shape[1:], weight.dtype) if bias is None else bias
    return jnp.concatenate([weight.astype(jnp.float32), bias.astype(jnp.float32)[None]])


def lines(x: jax.Array) -> jax.Array:
    """[..., D] as [rows, D / LINE, LINE]."""
    return x.reshape(-1, x.shape[-1] // LINE, LINE)


def launch(body, name: str, plan: Plan, out_type, scratch, interpret):
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=plan.grid,
        grid_names=("batch", "part", "column"),
        # Automatic barriers would stop the warpgroup twice at every row that it stores.
        compiler_params=mosaic.parameters(automatic_barriers=False),
        interpret=False if interpret is None else interpret,
        kernel_name=name,
    )


@mosaic.narrow_indices()
def forward(x, coefficients, reach, *, config: Config = SAFE, interpret=None) -> jax.Array:
    """y [B, T, D] in the dtype of x, sums in float32, with zeros before the first token.

    x [B, T, D], T >= 1; coefficients [W + 1, D] float32 (`coefficients_of`); reach None or [B, T] int32: how many
    inputs before it a token reads. interpret: parameters of Mosaic's interpreter, for a CPU."""
    plan = plan_for(x, coefficients.shape[0] - 1, config)
    arrays = lines(x), lines(coefficients), *(() if reach is None else (reach.reshape(-1),))
    out_type, scratch = (jax.ShapeDtypeStruct(arrays[0].shape, x.dtype),), plan.scratch(x.dtype, 1)
    call = launch(_forward_body(plan), "causal_conv", plan, out_type, scratch, interpret)
    return call(*arrays)[0].reshape(x.shape)


@mosaic.narrow_indices()
def backward(x, d_y, coefficients, reach, *, config: Config = SAFE, interpret=None) -> tuple[jax.Array, jax.Array]:
    """(dx [B, T, D] in the dtype of x, d coefficients [W + 1, D] float32). d_y like x; the others as in `forward`."""
    plan = plan_for(x, coefficients.shape[0] - 1, config)
    arrays = lines(x), lines(d_y), lines(coefficients), *(() if reach is None else (reach.reshape(-1),))
    sums = jax.ShapeDtypeStruct((math.prod(plan.grid[:2]) * (plan.taps + 1), *arrays[0].shape[1:]), jnp.float32)
    out_type = jax.ShapeDtypeStruct(arrays[0].shape, x.dtype), sums
    call = launch(_backward_body(plan), "causal_conv_gradients", plan, out_type, plan.scratch(x.dtype, 2), interpret)
    d_x, sums = call(*arrays)
    return d_x.reshape(x.shape), jnp.sum(sums.reshape(-1, *coefficients.shape), axis=0)


class Place(NamedTuple):
    """Where a program is: its row of the batch, its part of the time, of which it walks first, ..., stop - 1, and its
    channels."""

    batch: jax.Array
    part: jax.Array
    channels: pl.Slice
    first: jax.Array
    stop: jax.Array


def _place(plan: Plan) -> Place:
    batch, part, column = (lax.axis_index(name) for name in ("batch", "part", "column"))
    first = part * plan.tokens
    stop = jnp.minimum(first + plan.tokens, plan.walked)
    return Place(batch, part, pl.ds(column * plan.shape[0], plan.shape[0]), first, stop)


def _reader(gmem, plan: Plan, place: Place):
    """A function of t and n: rows t, ..., t + n - 1 of the program's channels, a few channels in each thread."""

    def rows(t, count: int) -> list:
        places = [gmem.at[place.batch * plan.time + t + i, place.channels] for i in range(count)]
        return [plgpu.load(ref, layout=plan.layout) for ref in places]

    return rows


def _scalars(gmems, plan: Plan, place: Place):
    """The same of [B, T], numbers that all threads share; no numbers of no array."""
    return lambda t, count: [gmem[place.batch * plan.time + t + i] for gmem in gmems for i in range(count)]


def _coefficients(gmem, plan: Plan, place: Place) -> list:
    return [plgpu.load(gmem.at[j, place.channels], layout=plan.layout) for j in range(plan.taps + 1)]


def _walk(plan: Plan, place: Place, sources: list, scratch, step, carry):
    """The carry after all steps: step(t, ahead, rows of every source, carry) does the tokens t, ..., t + rows - 1.

    sources: (array, how many rows behind t the step's rows of it begin). ahead: where the next step begins, or after
    the last one its own beginning. Copies run `slots` steps ahead of the sums, in shared memory."""
    *buffers, full = scratch
    steps: int | jax.Array = plan.tokens // plan.rows
    if plan.walked % plan.tokens:
        steps = lax.div(place.stop - place.first, plan.rows)

    def fetch(i):
        slot, t = lax.rem(i, plan.slots), place.batch * plan.time + place.first + i * plan.rows
        for (gmem, behind), buffer in zip(sources, buffers, strict=True):
            rows = gmem.at[pl.ds(t + behind, plan.rows), place.channels]
            plgpu.copy_gmem_to_smem(rows, buffer.at[slot], full.at[slot])

    def body(i, carry):
        slot, t = lax.rem(i, plan.slots), place.first + i * plan.rows
        plgpu.barrier_wait(full.at[slot])
        rows = [[plgpu.load(x.at[slot, j], layout=plan.layout) for j in range(plan.rows)] for x in buffers]
        carry = step(t, jnp.minimum(t + plan.rows, place.stop - plan.rows), *rows, carry)
        plgpu.commit_smem()  # every thread has read the slot
        pl.when(i + plan.slots < steps)(lambda: fetch(i + plan.slots))
        return carry

    for i in range(plan.slots):
        pl.when(i < steps)(functools.partial(fetch, jnp.int32(i)))
    return lax.fori_loop(0, steps, body, carry)


def _at_the_end(plan: Plan, place: Place, then, otherwise=None) -> None:
    """then() in the programs that have the tail, otherwise() in the rest."""
    if plan.grid[1] == 1:
        then()
        return
    pl.when(place.part == plan.grid[1] - 1)(then)
    if otherwise is not None:
        pl.when(place.part < plan.grid[1] - 1)(otherwise)


def _within(reach: list, i: int, lag: int, x):
    """x where token i of those with this reach (none: any) reads the input `lag` before it, else 0."""
    return jnp.where(reach[i] >= lag, x, jnp.zeros_like(x)) if reach and lag else x


def _forward_body(plan: Plan):
    """The program that sums a part's tokens of plan.lanes channels."""
    taps, rows = plan.taps, plan.rows

    def body(x_gmem, coefficients_gmem, *rest):
        *reach_gmem, y_gmem, x_smem, full = rest
        place = _place(plan)
        inputs_at, reach_at = _reader(x_gmem, plan, place), _scalars(reach_gmem, plan, place)
        coefficients = _coefficients(coefficients_gmem, plan, place)

        def write(t, inputs: list, reach: list, count: int) -> None:
            """The outputs of tokens t, ..., t + count - 1 from their inputs and as many of those before as there are,
            at most W - 1."""
            wide, early = [x.astype(jnp.float32) for x in inputs], len(inputs) - count
            for i in range(count):
                y = coefficients[taps]
                for lag in reversed(range(min(taps, early + i + 1))):
                    y += coefficients[taps - 1 - lag] * _within(reach, i, lag, wide[early + i - lag])
                y_gmem[place.batch * plan.time + t + i, place.channels] = y.astype(y_gmem.dtype)

        def step(t, ahead, inputs, carry):
            before, reach = carry
            inputs, reach_ahead = [*before, *inputs], reach_at(ahead, rows)
            write(t, inputs, reach, rows)
            return inputs[rows:], reach_ahead

        def tail():
            early = min(taps - 1, plan.walked)
            inputs, reach = inputs_at(plan.walked - early, early + plan.tail), reach_at(plan.walked, plan.tail)
            write(plan.walked, inputs, reach, plan.tail)

        if plan.walked:
            before = [inputs_at(jnp.maximum(place.first - lag, 0), 1)[0] for lag in range(taps - 1, 0, -1)]
            before = [jnp.where(place.first >= taps - 1 - i, x, jnp.zeros_like(x)) for i, x in enumerate(before)]
            _walk(plan, place, [(x_gmem, 0)], (x_smem, full), step, (before, reach_at(place.first, rows)))
        _at_the_end(plan, place, tail)

    return body


def _backward_body(plan: Plan):
    """The program that writes dx of a part's tokens of plan.lanes channels, and their share of the sums."""
    taps, rows = plan.taps, plan.rows

    def body(x_gmem, d_y_gmem, coefficients_gmem, *rest):
        *reach_gmem, d_x_gmem, sums_gmem, x_smem, d_y_smem, full = rest
        place = _place(plan)
        inputs_at, reach_at = _reader(x_gmem, plan, place), _scalars(reach_gmem, plan, place)
        d_y_at = _reader(d_y_gmem, plan, place)
        coefficients = _coefficients(coefficients_gmem, plan, place)

        def write(t, inputs: list, d_y: list, reach: list, sums: list) -> list:
            """dx of the tokens t, ... with these inputs, and the sums with their share. d_y: the tokens' cotangents and
            as many of those behind as there are, at most W - 1."""
            wide, sums = [d.astype(jnp.float32) for d in d_y], list(sums)
            for i, x in enumerate(inputs):
                source, d_x = x.astype(jnp.float32), coefficients[taps - 1] * wide[i]
                sums[taps - 1] += source * wide[i]
                sums[taps] += wide[i]
                for lag in range(1, min(taps, len(wide) - i)):
                    read = _within(reach, i + lag, lag, wide[i + lag])
                    d_x += coefficients[taps - 1 - lag] * read
                    sums[taps - 1 - lag] += source * read
                d_x_gmem[place.batch * plan.time + t + i, place.channels] = d_x.astype(d_x_gmem.dtype)
            return sums

        def step(t, ahead, inputs, d_y_behind, carry):
            d_y, reach, sums = carry
            d_y, reach_ahead = [*d_y, *d_y_behind], reach_at(ahead + taps - 1, rows)
            sums = write(t, inputs, d_y, reach, sums)
            return d_y[rows:], [*reach[rows:], *reach_ahead], sums

        def store(sums: list) -> None:
            line = (place.batch * plan.grid[1] + place.part) * len(sums)
            for j, total in enumerate(sums):
                sums_gmem[line + j, place.channels] = total

        def tail(sums: list) -> list:
            inputs, d_y, reach = (read_at(plan.walked, plan.tail) for read_at in (inputs_at, d_y_at, reach_at))
            return write(plan.walked, inputs, d_y, reach, sums)

        sums = [plgpu.layout_cast(jnp.zeros(plan.shape, jnp.float32), plan.layout) for _ in coefficients]
        if plan.walked:
            carry = d_y_at(place.first, taps - 1), reach_at(place.first, rows + taps - 1), sums
            sources, scratch = [(x_gmem, 0), (d_y_gmem, taps - 1)], (x_smem, d_y_smem, full)
            *_, sums = _walk(plan, place, sources, scratch, step, carry)
        _at_the_end(plan, place, lambda: store(tail(sums)), lambda: store(sums))

    return body
