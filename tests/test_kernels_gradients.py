"""The delta rule's backward kernels in Mosaic's interpreter, with its race detector, against the float64 oracle.

What the forward saves is made here, in float64 and then rounded, so that these tests stand alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from efla_jax.kernels import delta_rule_gradients as kernel
from efla_jax.kernels.delta_rule_reverse import plans
from efla_jax.ops import chunked
from tests.cases import CASES, recurrence_case
from tests.lowering import lower_cuda, mosaic_calls
from tests.oracle import recurrence_and_gradients, relative_rms

C = kernel.CHUNK
NAMES = ("d_q", "d_k", "d_u", "d_erase", "d_log_decay", "d_initial")
# As many key heads as value heads: where several value heads read one key head, XLA:CPU sums b over them before it
# rounds, in more precision than was asked for, and is no measure.
SMALL = dict(batch=1, time=2 * C, key_heads=2, heads=2, key_dim=64, value_dim=64)
RATIO = 1.2  # of the chunked form's error: the kernels round the same operands to 16 bits, in another order of sums
FLOOR = 2e-3  # below this an error is that of rounding a result once to bfloat16
# <S, D> of a chunk is of rounded states here, of float32 states in the chunked form; it is a single number, which all
# of a chunk's d_log_decay share, so with two chunks and random states at both ends its error is a matter of luck.
LUCK = {"d_log_decay": 4e-3}


def chunk_numbers(starts: np.ndarray) -> np.ndarray:
    """Documents begun inside the chunk up to each token, float32 [B, T], from starts [B, T] bool."""
    return np.cumsum(starts.reshape(starts.shape[0], -1, C), axis=-1).reshape(starts.shape).astype(np.float32)


def saved_by_forward(k, u, erase, log_decay, initial, starts, dtype):
    """(inverse [B, H, T, C], gates [B, H, N, 5, C], states [B, H, N, V, K]) of time-major arguments, from float64."""
    batch, time, heads, _ = u.shape
    k, u, erase, decay, state = (np.asarray(x, np.float64) for x in (k, u, erase, log_decay, initial))
    k = np.repeat(k, heads // k.shape[2], axis=2)
    inverses, gates, states = [], [], []
    for first in range(0, time, C):
        here = slice(first, first + C)
        keys, e, g = (np.moveaxis(x[:, here], 2, 1) for x in (k, erase, decay))
        document = np.cumsum(starts[:, here], axis=1)[:, None]
        same = np.tril(document[..., :, None] == document[..., None, :])
        total = np.sum(same * g[..., None, :], -1)
        into = np.exp(total) * (document == 0)
        out = np.exp(np.where(document == document[..., -1:], total[..., -1:] - total, -np.inf))
        pairs = np.exp(np.where(same, total[..., :, None] - total[..., None, :], -np.inf))
        strict = np.tril(e[..., None] * pairs * np.einsum("bhik,bhjk->bhij", keys, keys), -1)
        inverse = np.linalg.inv(np.eye(C) + strict)
        states.append(np.swapaxes(state, -1, -2))
        known = np.einsum("bhck,bhkv->bhcv", keys, state)
        w = inverse @ (np.moveaxis(u[:, here], 2, 1) - (e * into)[..., None] * known)
        state = into[..., -1:, None] * state + np.einsum("bhck,bhcv->bhkv", keys, out[..., None] * w)
        inverses.append(inverse)
        gates.append(np.stack([e * into, np.full_like(into, np.nan), into, out, total], axis=2))
    return (
        jnp.asarray(np.concatenate(inverses, axis=2), dtype),
        jnp.asarray(np.stack(gates, axis=2), jnp.float32),
        jnp.asarray(np.stack(states, axis=2), dtype),
    )


@functools.partial(jax.jit, static_argnames="config")
def interpreted(arguments, saved, d_o, d_final, config=None):
    races = plgpu.InterpretGPUParams(detect_races=True)
    return kernel.backward(*arguments, saved, d_o, d_final, config=config, interpret=races)


def by_kernel(x, starts, cotangents, config=None):
    """Gradients in the library's layout, float32, those of a key head summed over its value heads."""
    q, k, u, erase, log_decay, initial = x
    d_o, d_final = cotangents
    heads_first = lambda g: jnp.swapaxes(g, 1, 2)  # noqa: E731
    saved = saved_by_forward(k, u, erase, log_decay, initial, np.asarray(starts), k.dtype)
    documents = jnp.asarray(chunk_numbers(np.asarray(starts))) if np.any(starts) else None
    arguments = q, k, u, heads_first(erase), heads_first(log_decay), documents
    grads = interpreted(arguments, saved, d_o, jnp.swapaxes(d_final, -1, -2), config=config)
    d_q, d_k, d_u, d_erase, d_decay, d_initial = (jnp.asarray(g, jnp.float32) for g in grads)
    by_key = lambda g: g.reshape(*k.shape[:3], -1, k.shape[3]).sum(3)  # noqa: E731
    return by_key(d_q), by_key(d_k), d_u, heads_first(d_erase), heads_first(d_decay), jnp.swapaxes(d_initial, -1, -2)


@jax.jit
def by_chunked(x, starts, cotangents):
    return jax.vjp(lambda *x: chunked.solve(*x, starts, C), *x)[1](cotangents)


pytestmark = pytest.mark.usefixtures("no_races")


def starts_at(shape: dict, *tokens: int) -> np.ndarray:
    starts = np.zeros((shape["batch"], shape["time"]), bool)
    starts[:, list(tokens)] = True
    return starts


def check(cases, starts, config=None):
    """Every gradient within its bound, its error a root mean square over the cases (x, cotangents); returns the last's.

    With nearly parallel keys a few tokens make most of the error, so one case of this size is a matter of luck."""
    found = []
    for x, cotangents in cases:
        truth = recurrence_and_gradients(x, 1 + np.cumsum(starts, axis=1), cotangents)[1]
        ours, theirs = by_kernel(x, starts, cotangents, config), by_chunked(x, jnp.asarray(starts), cotangents)
        found.append([[relative_rms(g, t) for g, t in zip(both, truth, strict=True)] for both in (ours, theirs)])
    wrong = {}
    for name, error, other in zip(NAMES, *np.sqrt(np.mean(np.square(found), axis=0)), strict=True):
        if not error <= max(RATIO * other, LUCK.get(name, FLOOR)):
            wrong[name] = f"{error:.1e}, {error / other:.2f} times that of the chunked form"
    assert not wrong, wrong
    return ours


def many(case: str, shape: dict) -> list:
    """The case, or three of it if its keys are nearly parallel."""
    return [recurrence_case(case, jnp.bfloat16, seed, **shape) for seed in range(3 if "cosine" in case else 1)]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_as_accurate_as_the_chunked_form(case):
    check(many(case, SMALL), starts_at(SMALL, 5, 40, 41, 100))


@pytest.mark.parametrize("case", ("random", "cosine 0.99", "forget"))
def test_one_document_of_several_chunks(case):
    check(many(case, SMALL), starts_at(SMALL))


@pytest.mark.parametrize("key_dim, value_dim", [(128, 64), (64, 128), (128, 128)])
def test_sizes_of_keys_and_values(key_dim, value_dim):
    shape = dict(SMALL, key_heads=1, heads=1, key_dim=key_dim, value_dim=value_dim)
    check(many("random", shape), starts_at(shape, 64, 70), kernel.ReverseConfig(parts=1, multiprocessors=1))


def test_an_empty_document_changes_nothing_and_repetition_is_bitwise():
    """Tokens that write, erase and decay nothing get zero gradients where the chunk's end is another document's."""
    x, cotangents = recurrence_case("random", jnp.bfloat16, **SMALL)
    inert = (jnp.arange(SMALL["time"]) >= 100)[None, :, None]
    q, k, u, erase, decay = (jnp.where(inert if a.ndim == 3 else inert[..., None], 0, a) for a in x[:5])
    d_o = jnp.where(inert[..., None], 0, cotangents[0])
    starts = starts_at(SMALL, 5, 100)
    x, cotangents = (q, k, u, erase, decay, x[5]), (d_o, cotangents[1])
    first, again = check([(x, cotangents)], starts), by_kernel(x, starts, cotangents)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_heads_that_share_gates():
    """Two value heads of one key head with one erase and decay: those get the sum of both gradients."""
    shape = dict(SMALL, key_heads=1)
    (q, k, u, erase, decay, initial), cotangents = recurrence_case("random", jnp.bfloat16, **shape)
    erase, decay = (jnp.repeat(x[:, :, :1], 2, axis=2) for x in (erase, decay))
    x, starts = (q, k, u, erase, decay, initial), starts_at(shape)
    truth = recurrence_and_gradients(x, 1 + np.cumsum(starts, axis=1), cotangents)[1]
    inverse, gates, states = saved_by_forward(k, u, erase, decay, initial, starts, k.dtype)
    shared = [jnp.swapaxes(g[:, :, :1], 1, 2) for g in (erase, decay)]
    d_final = jnp.swapaxes(cotangents[1], -1, -2)
    saved = inverse[:, :1], gates[:, :1], states
    found = interpreted((q, k, u, *shared, None), saved, cotangents[0], d_final)
    d_q, d_k, d_u, d_erase, d_decay, _ = found
    assert d_q.dtype == d_k.dtype == jnp.float32  # what is to be summed is not rounded
    errors = [relative_rms(g.sum(2, keepdims=True), t) for g, t in ((d_q, truth[0]), (d_k, truth[1]))]
    errors += [relative_rms(g[:, 0], t.sum(2)) for g, t in ((d_erase, truth[3]), (d_decay, truth[4]))]
    assert max(*errors, relative_rms(d_u, truth[2])) < 5e-3, errors  # bfloat16: single heads err as much


def test_programs_that_take_several_chunks():
    """With one multiprocessor every slot of a load is used again and again."""
    shape = dict(SMALL, time=4 * C, key_heads=1, heads=1)
    check(many("random", shape), starts_at(shape, 5, 200), kernel.ReverseConfig(parts=1, multiprocessors=1))


def test_parts_of_the_time_walked_at_once():
    check(many("no decay", SMALL), starts_at(SMALL, 5, 40), kernel.ReverseConfig(parts=2))


@pytest.mark.parametrize("batch, time, parts", [(16, 2048, 1), (1, 32768, 8), (1, 131072, 8), (1, 64, 1)])
def test_few_rows_are_walked_in_parts(batch, time, parts):
    walk, summary = plans(kernel.ReverseConfig(), kernel.Sizes(batch, time, 16, 16, 128, 128, False))
    assert (walk.parts, summary is None) == (parts, parts == 1)


def avals(batch, time, key_heads, heads, key_dim, value_dim, documents, dtype=jnp.bfloat16):
    """Arguments of `backward` as shapes."""
    sds, f32 = jax.ShapeDtypeStruct, jnp.float32
    keys, values = sds((batch, time, key_heads, key_dim), dtype), sds((batch, time, heads, value_dim), dtype)
    gates, count = sds((batch, heads, time), f32), time // C
    saved = (
        sds((batch, heads, time, C), dtype),
        sds((batch, heads, count, kernel.GATES, C), f32),
        sds((batch, heads, count, value_dim, key_dim), dtype),
    )
    final = sds((batch, heads, value_dim, key_dim), f32)
    return keys, keys, values, gates, gates, sds((batch, time), f32) if documents else None, saved, values, final


@pytest.mark.parametrize(
    "shape",
    [(16, 2048, 16, 16, 128, 128, False), (2, 32768, 2, 4, 64, 128, True), (1, 64, 1, 1, 128, 64, True)],
    ids=str,
)
def test_lowers_for_cuda(shape):
    in_parts = shape[1] > 2048
    assert mosaic_calls(lower_cuda(kernel.backward, *avals(*shape))) == 2 + in_parts


def test_other_sizes_are_declined():
    for sizes in ((1, 64, 1, 1, 96, 64), (1, 64, 1, 1, 64, 96), (1, 96, 1, 1, 64, 64)):
        with pytest.raises(NotImplementedError, match="must be"):
            jax.eval_shape(kernel.backward, *avals(*sizes, False))


def test_lowers_for_cuda_in_float16():
    assert mosaic_calls(lower_cuda(kernel.backward, *avals(1, 128, 1, 1, 64, 64, False, jnp.float16))) == 2
