"""Short causal convolution on a Hopper GPU, one filter per channel: every input read once, every output written once.

    s_t = bias + sum_lag w_{W - 1 - lag} x_{t - lag}        lag = 0 .. W - 1, as far as token t reaches
    y_t = s_t, or SiLU(s_t), and 0 at padding

W products a number are nothing beside its bytes, and XLA reads x once for every lag, a number at a time. Here a
warpgroup owns a few neighbouring channels a thread and a part of the time, which it walks with the last W - 1 rows in
registers; TMA copies the rows of the next steps to shared memory meanwhile, many bytes in flight for no register.
Backward the walk is the same, with the cotangents of the W - 1 rows behind at hand, and s summed again for the slope of
an activation; sums over time are left as one row a program. Source: Mamba (arXiv 2312.00752), section 3.4.
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
ACTIVATIONS = (None, "silu")
PADDING = -1  # the reach of a token that neither reads nor is read


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
    W - 1 of them, so that no step of a walk looks beyond the end. active: the sums go through SiLU."""

    active: bool
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


def unsupported(taps: int, channels: int, dtype, activation: str | None = None) -> str | None:
    """Why the kernels do not cover these sizes, or None."""
    if activation not in ACTIVATIONS:
        return f"the activation {activation!r}"
    if jnp.dtype(dtype).name not in DTYPES:
        return f"dtype {jnp.dtype(dtype).name}: it is none of {', '.join(DTYPES)}"
    if channels % THREADS:
        return f"{channels} channels: not a multiple of {THREADS}"
    if not 2 <= taps <= MOST_TAPS:
        return f"{taps} taps: not 2 to {MOST_TAPS}"
    return None


def plan_for(x: jax.Array, taps: int, config: Config, activation: str | None) -> Plan:
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
    grid = batch, parts, columns
    return Plan(activation == "silu", taps, time, THREADS * width, config.rows, config.slots, tokens, tail, grid)


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
def forward(x, coefficients, reach, *, activation=None, config: Config = SAFE, interpret=None) -> jax.Array:
    """y [B, T, D] in the dtype of x, sums in float32, with zeros before the first token.

    x [B, T, D], T >= 1; coefficients [W + 1, D] float32 (`coefficients_of`); reach None or [B, T] int32: how many
    inputs before it a token reads, PADDING: its y is 0, whatever its x, which no other token may reach. activation: one
    of ACTIVATIONS, of the float32 sums. interpret: parameters of Mosaic's interpreter, for a CPU."""
    plan = plan_for(x, coefficients.shape[0] - 1, config, activation)
    arrays = lines(x), lines(coefficients), *(() if reach is None else (reach.reshape(-1),))
    out_type, scratch = (jax.ShapeDtypeStruct(arrays[0].shape, x.dtype),), plan.scratch(x.dtype, 1)
    call = launch(_forward_body(plan), "causal_conv", plan, out_type, scratch, interpret)
    return call(*arrays)[0].reshape(x.shape)


@mosaic.narrow_indices()
def backward(
    x, d_y, coefficients, reach, *, activation=None, continued=False, config: Config = SAFE, interpret=None
) -> tuple[jax.Array, jax.Array]:
    """(dx [B, T, D] in the dtype of x, d coefficients [W + 1, D] float32). d_y like x; the others as in `forward`.

    continued: without what comes of the first W - 1 tokens' d_y, whose outputs are not those of `forward`."""
    if activation:  # half the rows need 20 registers less, and 4 programs have room on a multiprocessor, not 3
        config = dataclasses.replace(config, rows=max(config.rows // 2, 1), slots=2 * config.slots)
    plan = plan_for(x, coefficients.shape[0] - 1, config, activation)
    arrays = lines(x), lines(d_y), lines(coefficients), *(() if reach is None else (reach.reshape(-1),))
    sums = jax.ShapeDtypeStruct((math.prod(plan.grid[:2]) * (plan.taps + 1), *arrays[0].shape[1:]), jnp.float32)
    out_type, scratch = (jax.ShapeDtypeStruct(arrays[0].shape, x.dtype), sums), plan.scratch(x.dtype, 2)
    call = launch(_backward_body(plan, continued), "causal_conv_gradients", plan, out_type, scratch, interpret)
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
    return jnp.where(reach[i] >= lag, x, jnp.zeros_like(x)) if reach else x


def _sigmoid(x):
    """Two approximate instructions; a quotient would be ten exact ones. From -inf on: 1 / sqrt(inf) is 0."""
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return root * root


def _silu_slope(x):
    sigmoid = _sigmoid(x)
    return sigmoid * (1.0 + x * (1.0 - sigmoid))


def _sums(plan: Plan, coefficients: list, inputs: list, reach: list, count: int) -> list:
    """s, float32, of the last `count` of these inputs, which the others stand before: as many as there are, at most
    W - 1. reach: of the tokens with a sum."""
    wide, early, found = [x.astype(jnp.float32) for x in inputs], len(inputs) - count, []
    for i in range(count):
        s = coefficients[plan.taps]
        for lag in reversed(range(min(plan.taps, early + i + 1))):
            read = wide[early + i - lag]
            s += coefficients[plan.taps - 1 - lag] * (_within(reach, i, lag, read) if lag else read)
        found.append(s)
    return found


def _inputs_before(plan: Plan, place: Place, inputs_at) -> list:
    """The W - 1 inputs before a part, zeros before the first token."""
    before = [inputs_at(jnp.maximum(place.first - lag, 0), 1)[0] for lag in range(plan.taps - 1, 0, -1)]
    return [jnp.where(place.first >= plan.taps - 1 - i, x, jnp.zeros_like(x)) for i, x in enumerate(before)]


def _forward_body(plan: Plan):
    """The program that sums a part's tokens of plan.lanes channels."""
    taps, rows = plan.taps, plan.rows

    def body(x_gmem, coefficients_gmem, *rest):
        *reach_gmem, y_gmem, x_smem, full = rest
        place = _place(plan)
        inputs_at, reach_at = _reader(x_gmem, plan, place), _scalars(reach_gmem, plan, place)
        coefficients = _coefficients(coefficients_gmem, plan, place)

        def write(t, inputs: list, reach: list, count: int) -> None:
            """The outputs of tokens t, ..., t + count - 1 from their inputs and those before (see `_sums`)."""
            for i, s in enumerate(_sums(plan, coefficients, inputs, reach, count)):
                y = _within(reach, i, 0, s * _sigmoid(s) if plan.active else s)
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
            carry = _inputs_before(plan, place, inputs_at), reach_at(place.first, rows)
            _walk(plan, place, [(x_gmem, 0)], (x_smem, full), step, carry)
        _at_the_end(plan, place, tail)

    return body


def _slopes(plan: Plan, coefficients: list, inputs: list, d_y: list, reach: list) -> list:
    """ds, float32, of the tokens with these d_y; the other arguments as in `_sums`."""
    wide = [d.astype(jnp.float32) for d in d_y]
    if plan.active:
        sums = _sums(plan, coefficients, inputs, reach, len(d_y))
        wide = [d * _silu_slope(s) for d, s in zip(wide, sums, strict=True)]
    return [_within(reach, i, 0, d) for i, d in enumerate(wide)]


def _gradients(coefficients: list, x, d_s: list, reach: list, sums: list) -> tuple:
    """dx, float32, of a token with the input x, and the sums with its share. d_s, reach: of the token and of as many of
    those behind as there are, at most W - 1."""
    source, sums, last = _within(reach, 0, 0, x.astype(jnp.float32)), list(sums), len(sums) - 2
    d_x = coefficients[last] * d_s[0]
    sums[last] += source * d_s[0]
    sums[-1] += d_s[0]
    for lag, d in enumerate(d_s[1:], 1):
        read = _within(reach, lag, lag, d)
        d_x += coefficients[last - lag] * read
        sums[last - lag] += source * read
    return d_x, sums


def _backward_body(plan: Plan, continued: bool):
    """The program that writes dx of a part's tokens of plan.lanes channels, and their share of the sums."""
    taps, rows = plan.taps, plan.rows

    def body(x_gmem, d_y_gmem, coefficients_gmem, *rest):
        *reach_gmem, d_x_gmem, sums_gmem, x_smem, d_y_smem, full = rest
        place = _place(plan)
        inputs_at, reach_at = _reader(x_gmem, plan, place), _scalars(reach_gmem, plan, place)
        d_y_at = _reader(d_y_gmem, plan, place)
        coefficients = _coefficients(coefficients_gmem, plan, place)

        slopes = functools.partial(_slopes, plan, coefficients)

        def write(t, inputs: list, d_s: list, reach: list, sums: list) -> list:
            """dx of the tokens t, ... with these inputs, and the sums with their share (see `_gradients`)."""
            for i, x in enumerate(inputs):
                d_x, sums = _gradients(coefficients, x, d_s[i : i + taps], reach[i:], sums)
                d_x_gmem[place.batch * plan.time + t + i, place.channels] = d_x.astype(d_x_gmem.dtype)
            return sums

        def step(t, ahead, inputs_behind, d_y_behind, carry):
            inputs, d_s, reach, sums = carry
            inputs, reach_ahead = [*inputs, *inputs_behind], reach_at(ahead + taps - 1, rows)
            for i in range(rows):  # one by one: all their slopes at once would need more registers
                d_s = [*d_s, *slopes(inputs[i : i + taps], d_y_behind[i : i + 1], reach[i + taps - 1 :])]
                sums = write(t + i, inputs[i : i + 1], d_s, reach[i:], sums)
                d_s = d_s[1:]
            return inputs[rows:], d_s, [*reach[rows:], *reach_ahead], sums

        def first() -> tuple:
            """What the first step carries on: the inputs and ds of W - 1 tokens, and the reach of those and its own."""
            inputs, reach = inputs_at(place.first, taps - 1), reach_at(place.first, rows + taps - 1)
            before = _inputs_before(plan, place, inputs_at) if plan.active else []
            d_s = slopes([*before, *inputs], d_y_at(place.first, taps - 1), reach)
            if continued:
                d_s = [jnp.where(place.first > 0, d, jnp.zeros_like(d)) for d in d_s]
            return inputs, d_s, reach

        def store(sums: list) -> None:
            line = (place.batch * plan.grid[1] + place.part) * len(sums)
            for j, total in enumerate(sums):
                sums_gmem[line + j, place.channels] = total

        def tail(sums: list) -> list:
            early = min(taps - 1, plan.walked) if plan.active else 0
            inputs = inputs_at(plan.walked - early, early + plan.tail)
            d_y, reach = d_y_at(plan.walked, plan.tail), reach_at(plan.walked, plan.tail)
            d_s = slopes(inputs, d_y, reach)
            if continued and not plan.walked:
                d_s = [jnp.zeros_like(d) if i < taps - 1 else d for i, d in enumerate(d_s)]
            return write(plan.walked, inputs[early:], d_s, reach, sums)

        sums = [plgpu.layout_cast(jnp.zeros(plan.shape, jnp.float32), plan.layout) for _ in coefficients]
        if plan.walked:
            sources = [(gmem, taps - 1) for gmem in (x_gmem, d_y_gmem)]
            *_, sums = _walk(plan, place, sources, (x_smem, d_y_smem, full), step, (*first(), sums))
        _at_the_end(plan, place, lambda: store(tail(sums)), lambda: store(sums))

    return body
