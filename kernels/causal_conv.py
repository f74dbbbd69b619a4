"""Short causal convolution on a Hopper GPU, one filter per channel: every input read once, every output written once.

    y_t = bias + sum_lag w_{W - 1 - lag} x_{t - lag}        lag = 0 .. W - 1, as far as token t reaches

W products a number are nothing beside its bytes, and XLA reads x once for every lag, a number at a time. Here a
warpgroup owns a few channels of each thread, side by side so that a row is one coalesced load, and a part of the time,
which it walks with the W - 1 last rows in registers. Rows of the next step are loaded before those of the last one are
summed: they are what keeps memory busy, with no shared memory and no barrier. Backward the walk is the same, with the
cotangents of the W - 1 rows ahead at hand; sums over time are left as one row a program. Source: Mamba
(arXiv 2312.00752), section 3.4.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels import mosaic

THREADS = 128  # of a warpgroup
DTYPES = ("bfloat16", "float16", "float32")
MOST_TAPS = 8  # rows before a step's are held in registers


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut. bytes: of a row that a thread loads at once; rows: loaded together, one step of the walk;
    tokens: of a program at most, halved while there are fewer than `programs` of them."""

    bytes: int = 8
    rows: int = 8
    tokens: int = 128
    programs: int = 1024  # 8 on each of 132 multiprocessors, about as many as their registers hold


SAFE = Config()


class Plan(NamedTuple):
    """The grid of programs [batch, parts, columns]. columns of `lanes` channels, parts of `tokens` tokens, walked in
    steps of `rows` rows."""

    taps: int
    time: int
    lanes: int
    rows: int
    tokens: int
    grid: tuple[int, int, int]


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
    while tokens >= 4 * config.rows and batch * columns * pl.cdiv(time, tokens) < config.programs:
        tokens //= 2
    return Plan(taps, time, THREADS * width, config.rows, tokens, (batch, pl.cdiv(time, tokens), columns))


def coefficients_of(weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """[W + 1, D] float32: the taps, then the bias."""
    bias = jnp.zeros(weight.shape[1:], weight.dtype) if bias is None else bias
    return jnp.concatenate([weight.astype(jnp.float32), bias.astype(jnp.float32)[None]])


def launch(body, name: str, plan: Plan, out_type, interpret):
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=plan.grid,
        grid_names=("batch", "part", "column"),
        # Automatic barriers would stop the warpgroup twice at every row that it stores.
        compiler_params=mosaic.parameters(automatic_barriers=False),
        interpret=False if interpret is None else interpret,
        kernel_name=name,
    )


def forward(x, coefficients, reach, *, config: Config = SAFE, interpret=None) -> jax.Array:
    """y [B, T, D] in the dtype of x, sums in float32, with zeros before the first token.

    x [B, T, D], T >= 1; coefficients [W + 1, D] float32 (`coefficients_of`); reach None or [B, T] int32: how many
    inputs before it a token reads. interpret: parameters of Mosaic's interpreter, for a CPU."""
    plan = plan_for(x, coefficients.shape[0] - 1, config)
    call = launch(_forward_body(plan), "causal_conv", plan, (jax.ShapeDtypeStruct(x.shape, x.dtype),), interpret)
    return call(x, coefficients, *(() if reach is None else (reach,)))[0]


def backward(x, d_y, coefficients, reach, *, config: Config = SAFE, interpret=None) -> tuple[jax.Array, jax.Array]:
    """(dx [B, T, D] in the dtype of x, d coefficients [W + 1, D] float32). d_y like x; the others as in `forward`."""
    plan = plan_for(x, coefficients.shape[0] - 1, config)
    sums = jax.ShapeDtypeStruct((*plan.grid[:2], *coefficients.shape), jnp.float32)
    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype), sums
    call = launch(_backward_body(plan), "causal_conv_gradients", plan, out_type, interpret)
    d_x, sums = call(x, d_y, coefficients, *(() if reach is None else (reach,)))
    return d_x, jnp.sum(sums, axis=(0, 1))


class Place(NamedTuple):
    """Where a program is: its row of the batch, its channels, and its tokens first, ..., end - 1."""

    batch: jax.Array
    part: jax.Array
    channels: pl.Slice
    first: jax.Array
    end: jax.Array


def _place(plan: Plan) -> Place:
    batch, part, column = (lax.axis_index(name) for name in ("batch", "part", "column"))
    first = part * plan.tokens
    end = jnp.minimum(first + plan.tokens, plan.time)
    return Place(batch, part, pl.ds(column * plan.lanes, plan.lanes), first, end)


def _reader(gmem, plan: Plan, place: Place):
    """A function of t: row t of the program's channels, one register or two of each thread."""
    layout = plgpu.Layout.WG_STRIDED((plan.lanes,), vec_size=plan.lanes // THREADS)
    return lambda t: plgpu.load(gmem.at[place.batch, t, place.channels], layout=layout)


def _coefficients(gmem, plan: Plan, place: Place) -> list:
    layout = plgpu.Layout.WG_STRIDED((plan.lanes,), vec_size=plan.lanes // THREADS)
    return [plgpu.load(gmem.at[j, place.channels], layout=layout) for j in range(plan.taps + 1)]


def _walk(plan: Plan, place: Place, step, carry):
    """The carry after all whole steps: step(t, carry) does the tokens t, ..., t + rows - 1."""
    steps = plan.tokens // plan.rows
    if plan.time % plan.tokens:
        steps = jnp.minimum(steps, plan.time // plan.rows - place.part * steps)
    return lax.fori_loop(0, steps, lambda i, carry: step(place.first + i * plan.rows, carry), carry)


def _within(reach, lag: int, x):
    """x where a token of this reach (None: any) reads the input `lag` before it, else 0."""
    return x if reach is None or lag == 0 else jnp.where(reach >= lag, x, jnp.zeros_like(x))


def _forward_body(plan: Plan):
    """The program that sums plan.tokens tokens of plan.lanes channels."""
    taps, rows, tail = plan.taps, plan.rows, plan.time % plan.rows

    def body(x_gmem, coefficients_gmem, *rest):
        *reach_gmem, y_gmem = rest
        place = _place(plan)
        row = _reader(x_gmem, plan, place)
        coefficients = _coefficients(coefficients_gmem, plan, place)

        def before(lag: int):
            x = row(jnp.maximum(place.first - lag, 0))
            return jnp.where(place.first >= lag, x, jnp.zeros_like(x))

        def loaded(t) -> tuple[list, list]:
            """Rows t, ... and their reach. Behind the part its last row stands in, which is near: none is used."""
            at = [jnp.minimum(t + i, place.end - 1) for i in range(rows)]
            return [row(t) for t in at], [gmem[place.batch, t] for gmem in reach_gmem for t in at]

        def write(t, inputs: list, reach: list, count: int) -> None:
            """The outputs of tokens t, ..., t + count - 1; inputs begins with the W - 1 rows before."""
            wide = [x.astype(jnp.float32) for x in inputs[: taps - 1 + count]]
            for i in range(count):
                y = coefficients[taps]
                for lag in reversed(range(taps)):
                    y += coefficients[taps - 1 - lag] * _within(
                        reach[i] if reach else None, lag, wide[taps - 1 + i - lag]
                    )
                y_gmem[place.batch, t + i, place.channels] = y.astype(y_gmem.dtype)

        def step(t, carry):
            inputs, reach = carry
            ahead, reach_ahead = loaded(t + rows)
            write(t, inputs, reach, rows)
            return [*inputs[rows:], *ahead], reach_ahead

        inputs, reach = loaded(place.first)
        carry = [before(lag) for lag in range(taps - 1, 0, -1)] + inputs, reach
        inputs, reach = _walk(plan, place, step, carry)
        if tail:

            @pl.when(place.end == plan.time)
            def _():
                write(plan.time - tail, inputs, reach, tail)

    return body


def _backward_body(plan: Plan):
    """The program that writes dx of plan.tokens tokens of plan.lanes channels, and their part of the sums."""
    taps, rows, tail = plan.taps, plan.rows, plan.time % plan.rows

    def body(x_gmem, d_y_gmem, coefficients_gmem, *rest):
        *reach_gmem, d_x_gmem, sums_gmem = rest
        place = _place(plan)
        x_row, d_y_row = (_reader(gmem, plan, place) for gmem in (x_gmem, d_y_gmem))
        coefficients = _coefficients(coefficients_gmem, plan, place)
        last = jnp.minimum(place.end + taps - 2, plan.time - 1)  # the last token that reads an input of the part

        def inputs(t) -> list:
            return [x_row(jnp.minimum(t + i, place.end - 1)) for i in range(rows)]

        def readers(t, count: int) -> tuple[list, list]:
            """Cotangents of tokens t, ..., and their reach; zeros behind the last one."""
            at = [jnp.minimum(t + i, last) for i in range(count)]
            found = [d_y_row(t) for t in at]
            found = [jnp.where(t + i <= last, d_y, jnp.zeros_like(d_y)) for i, d_y in enumerate(found)]
            return found, [gmem[place.batch, t] for gmem in reach_gmem for t in at]

        def write(t, x: list, d_y: list, reach: list, sums: list, count: int) -> list:
            """dx of tokens t, ..., t + count - 1, and the sums with their share."""
            wide = [d.astype(jnp.float32) for d in d_y[: count + taps - 1]]
            sums = list(sums)
            for i in range(count):
                source, d_x = x[i].astype(jnp.float32), None
                for lag in range(taps):
                    read = _within(reach[i + lag] if reach else None, lag, wide[i + lag])
                    product = coefficients[taps - 1 - lag] * read
                    d_x = product if d_x is None else d_x + product
                    sums[taps - 1 - lag] += source * read
                sums[taps] += wide[i]
                d_x_gmem[place.batch, t + i, place.channels] = d_x.astype(d_x_gmem.dtype)
            return sums

        def step(t, carry):
            x, d_y, reach, sums = carry
            x_ahead, (d_y_ahead, reach_ahead) = inputs(t + rows), readers(t + rows + taps - 1, rows)
            sums = write(t, x, d_y, reach, sums, rows)
            return x_ahead, [*d_y[rows:], *d_y_ahead], [*reach[rows:], *reach_ahead], sums

        def finish(carry, count: int) -> None:
            for j, total in enumerate(write(plan.time - count, *carry, count)):
                sums_gmem[place.batch, place.part, j, place.channels] = total

        sums = [x - x for x in coefficients]  # zeros, spread over the threads as the sums will be
        carry = inputs(place.first), *readers(place.first, rows + taps - 1), sums
        carry = _walk(plan, place, step, carry)
        if not tail:
            finish(carry, 0)
            return
        pl.when(place.end == plan.time)(lambda: finish(carry, tail))
        pl.when(place.end < plan.time)(lambda: finish(carry, 0))

    return body
