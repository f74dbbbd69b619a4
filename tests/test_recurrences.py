"""The ladder: recurrent, associative and chunked against the float64 oracle, for both operators, with every
gradient."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from efla_jax import ops
from efla_jax.ops import chunked as chunked_file
from efla_jax.ops.dispatch import automatic, dispatch, missing_kernel
from tests.cases import CASES, SHAPE, packed_ids, recurrence_case
from tests.oracle import TOLERANCE, assert_close, recurrence_and_gradients, relative_rms

IMPLEMENTATIONS = ("recurrent", "associative", "chunked")
NAMES = ("o", "state", "dq", "dk", "du", "derase", "dlog_decay", "dinitial_state")


@functools.cache
def compiled(implementation: str, chunk_size: int = 16, erases: bool = True):
    """A jitted (arguments, ids, cotangents) -> ((o, state), gradients), shared by all cases of one shape."""

    def op(q, k, u, erase, log_decay, initial_state, ids):
        options = dict(
            initial_state=initial_state, segment_ids=ids, chunk_size=chunk_size, implementation=implementation
        )
        return (
            ops.delta_rule(q, k, u, erase, log_decay, **options)
            if erases
            else ops.linear_attention(q, k, u, log_decay, **options)
        )

    @jax.jit
    def run(arguments, ids, cotangents):
        out, pull = jax.vjp(lambda *a: op(*a, ids), *arguments)
        return out, pull(cotangents)

    return run


def compare(implementation, arguments, ids, cotangents, dtype="float32", chunk_size=16, erases=True):
    out, gradients = compiled(implementation, chunk_size, erases)(arguments, ids, cotangents)
    if not erases:
        arguments = (*arguments[:3], arguments[3] * 0, *arguments[4:])
    truth, slopes = recurrence_and_gradients(arguments, ids, cotangents)
    names, values, references = NAMES, (*out, *gradients), (*truth, *slopes)
    if not erases:  # the oracle's erase is a constant 0 here; the operator has no such argument
        names, values, references = (tuple(x for i, x in enumerate(y) if i != 5) for y in (names, values, references))
    assert_close(values, references, names, TOLERANCE[dtype])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_delta_rule_equals_the_oracle(implementation, case):
    arguments, cotangents = recurrence_case(case)
    compare(implementation, arguments, None, cotangents)


@pytest.mark.parametrize("case", ("random", "no decay", "strong decay", "forget", "mixed decay", "zero keys"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_linear_attention_equals_the_oracle(implementation, case):
    arguments, cotangents = recurrence_case(case)
    compare(implementation, arguments, None, cotangents, erases=False)


@pytest.mark.parametrize("case", ("random", "cosine 0.99", "mixed decay"))
@pytest.mark.parametrize("erases", (True, False))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_documents_and_padding(implementation, erases, case):
    arguments, cotangents = recurrence_case(case)
    compare(implementation, arguments, packed_ids(SHAPE["batch"], SHAPE["time"]), cotangents, erases=erases)


@pytest.mark.parametrize(
    "case", ("random", "cosine 0.9", "cosine 0.99", "no decay", "strong decay", "erase up to 2", "zero keys")
)
@pytest.mark.parametrize("implementation", ("recurrent", "chunked"))
def test_bfloat16_inputs(implementation, case):
    arguments, cotangents = recurrence_case(case, jnp.bfloat16)
    compare(implementation, arguments, packed_ids(SHAPE["batch"], SHAPE["time"]), cotangents, dtype="bfloat16")
    out, gradients = compiled(implementation)(arguments, None, cotangents)
    assert [x.dtype for x in (*out, *gradients)] == [jnp.bfloat16, jnp.float32] + [jnp.bfloat16] * 3 + [jnp.float32] * 3


@pytest.mark.parametrize("chunk_size, time", [(16, 1), (16, 16), (32, 33), (64, 65), (64, 200), (128, 100)])
def test_chunk_sizes_and_awkward_lengths(chunk_size, time):
    shape = dict(batch=1, time=time, key_heads=1, heads=2, key_dim=7, value_dim=3)
    arguments, cotangents = recurrence_case("cosine 0.99", **shape)
    compare("chunked", arguments, packed_ids(1, time, seed=time), cotangents, chunk_size=chunk_size)


def test_long_bfloat16_state_gradient_stays_accurate():
    """Pitfall 51: the gradient of the initial state after 512 bfloat16 tokens."""
    shape = dict(batch=1, time=512, key_heads=1, heads=1, key_dim=16, value_dim=12)
    arguments, (_, d_state) = recurrence_case("no decay", jnp.bfloat16, **shape)
    arguments = (*arguments[:3], arguments[3] * 0.05, *arguments[4:])
    cotangents = jnp.zeros((1, 512, 1, 12), jnp.bfloat16), d_state
    compare("chunked", arguments, None, cotangents, dtype="bfloat16", chunk_size=64)


def test_decay_sums_keep_float32_accuracy_after_a_strong_decay():
    """A running sum near -1e3 has steps of 6e-5 in float32: differences must not be taken from it."""
    rng = np.random.default_rng(0)
    decay = np.where(np.arange(64) % 6 == 0, -90.0, -rng.random(64) * 0.05).astype(np.float32)
    pairs = np.asarray(chunked_file.decays(jnp.asarray(decay), None, None).pairs)
    sums = np.cumsum(decay.astype(np.float64))
    with np.errstate(over="ignore"):
        truth = np.tril(np.exp(sums[:, None] - sums[None, :]))
    assert np.max(np.abs(pairs - truth)) < 1e-6


@pytest.mark.parametrize("cosine", (0.0, 0.9, 0.99, 1.0))
def test_triangle_inverse_for_parallel_keys(cosine):
    """Random keys hide a bad inverse; parallel ones do not."""
    rng = np.random.default_rng(1)
    k = np.sqrt(cosine) * np.eye(1, 24) + np.sqrt(1 - cosine) * (
        lambda z: z / np.linalg.norm(z, axis=-1, keepdims=True)
    )(rng.normal(size=(128, 24)))
    strict = np.tril(0.98 * k @ k.T, -1)
    inverse = np.asarray(chunked_file.unit_lower_inverse(jnp.asarray(strict, jnp.float32)))
    truth = np.linalg.inv(np.eye(128) + strict)
    assert relative_rms(inverse, truth) < 1e-5


@pytest.mark.parametrize("erases", (True, False))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pieces_of_any_length_equal_the_whole(implementation, erases):
    """Split invariance with a random initial state, documents crossing the cuts, and an empty piece."""
    arguments, _ = recurrence_case("random")
    ids = packed_ids(SHAPE["batch"], SHAPE["time"], seed=3)
    ids[:, 20:26] = ids.max() + 1  # one document across the cut at 23
    run = compiled_forward(implementation, erases)
    whole, final = run(arguments, ids)
    state, parts, last = arguments[-1], [], np.zeros(SHAPE["batch"], np.int32)
    for begin, end in ((0, 1), (1, 1), (1, 9), (9, 23), (23, SHAPE["time"])):
        piece = ids[:, begin:end]
        first = np.array([next((i for i in row if i), 0) for row in piece])
        fresh = (first != last) & (first != 0) & (last != 0)  # what a mixer's cache does between calls
        state = jnp.where(fresh[:, None, None, None], 0.0, state)
        last = np.array([next((i for i in row[::-1] if i), old) for row, old in zip(piece, last, strict=True)])
        o, state = run((*(x[:, begin:end] for x in arguments[:5]), state), piece)
        parts.append(o)
    assert_close((jnp.concatenate(parts, 1), state), (whole, final), ("o", "state"), TOLERANCE["float32"])


@functools.cache
def compiled_forward(implementation, erases):
    def run(a, ids):
        options = dict(initial_state=a[5], segment_ids=ids, chunk_size=16, implementation=implementation)
        return ops.delta_rule(*a[:5], **options) if erases else ops.linear_attention(*a[:3], a[4], **options)

    return jax.jit(run)


@pytest.mark.parametrize("implementation", (*IMPLEMENTATIONS, "auto"))
def test_no_tokens_return_the_state_unchanged(implementation):
    arguments, _ = recurrence_case("random", time=0)
    for o, state in (
        ops.delta_rule(*arguments[:5], initial_state=arguments[5], implementation=implementation),
        ops.linear_attention(*arguments[:3], arguments[4], initial_state=arguments[5], implementation=implementation),
    ):
        assert o.shape == arguments[2].shape
        np.testing.assert_array_equal(state, arguments[5])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_may_hold_anything_and_gets_no_gradient(implementation):
    arguments, cotangents = recurrence_case("random")
    ids = packed_ids(SHAPE["batch"], SHAPE["time"])
    pad = ids == 0
    assert pad.any()

    def poison(x):
        return jnp.where(pad.reshape(pad.shape + (1,) * (x.ndim - 2)), jnp.nan, x)

    poisoned = (*map(poison, arguments[:5]), arguments[5])
    clean_out, _ = compiled(implementation)(arguments, ids, cotangents)
    out, gradients = compiled(implementation)(poisoned, ids, cotangents)
    np.testing.assert_array_equal(out[0], clean_out[0])
    np.testing.assert_array_equal(out[1], clean_out[1])
    for gradient in gradients[:5]:
        assert np.isfinite(gradient).all() and not np.asarray(gradient)[pad].any()


def test_only_padding_returns_the_initial_state_and_zeros():
    arguments, _ = recurrence_case("random")
    o, state = compiled_forward("chunked", True)(arguments, np.zeros((SHAPE["batch"], SHAPE["time"]), np.int32))
    assert not np.asarray(o).any()
    np.testing.assert_array_equal(state, arguments[5])


@pytest.mark.identity
def test_identities_between_the_operators():
    (q, k, u, erase, decay, state), _ = recurrence_case("random")
    same = dict(initial_state=state, chunk_size=16, implementation="chunked")
    without = ops.delta_rule(q, k, u, erase, **same)
    zero = ops.delta_rule(q, k, u, erase, decay * 0, **same)
    assert_close(without, zero, ("o", "state"), 1e-6)
    assert_close(
        ops.delta_rule(q, k, u, erase * 0, decay, **same),
        ops.linear_attention(q, k, u, decay, **same),
        ("o", "state"),
        1e-6,
    )
    scaled = ops.delta_rule(0.3 * q, k, u, erase, decay, **same)[0]
    assert_close((scaled,), (0.3 * ops.delta_rule(q, k, u, erase, decay, **same)[0],), ("o",), 1e-6)


def test_missing_initial_state_decay_and_cotangents_are_zeros():
    """Pitfall 49: gradients with no initial state, with a loss on the output only and on the state only."""
    (q, k, u, erase, _, _), _ = recurrence_case("random")
    for implementation in IMPLEMENTATIONS:
        run = functools.partial(ops.delta_rule, chunk_size=16, implementation=implementation)
        by_output = jax.grad(lambda k, run=run: jnp.sum(run(q, k, u, erase)[0] ** 2))(k)
        by_state = jax.grad(lambda q, run=run: jnp.sum(run(q, k, u, erase)[1] ** 2))(q)
        assert np.isfinite(by_output).all() and np.asarray(by_output).any()
        assert not np.asarray(by_state).any()


def test_vmap_jit_and_repeated_calls_agree():
    arguments, _ = recurrence_case("random")
    run = compiled_forward("chunked", True)
    first, second = run(arguments, None), run(arguments, None)
    np.testing.assert_array_equal(first[0], second[0])
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), arguments[2])
    mapped = jax.vmap(lambda u: run((*arguments[:2], u, *arguments[3:]), None)[0])(stacked)
    assert_close((mapped[0],), (first[0],), ("o",), 1e-6)
    transposed = jnp.swapaxes(jnp.swapaxes(arguments[0], 1, 2).copy(), 1, 2)
    np.testing.assert_array_equal(run((transposed, *arguments[1:]), None)[0], first[0])


def test_auto_chooses_by_length_and_agrees():
    assert automatic(1) == ("recurrent",) and automatic(4096) == ("pallas", "chunked")
    assert automatic(1, 1 << 28) == ("pallas", "recurrent") and automatic(2, 1 << 28) == ("recurrent",)
    (q, k, u, erase, decay, state), _ = recurrence_case("random")
    auto = ops.delta_rule(q, k, u, erase, decay, initial_state=state)
    assert_close(auto, compiled_forward("chunked", True)((q, k, u, erase, decay, state), None), ("o", "state"), 1e-6)


@pytest.fixture
def plain_errors():
    """Our own ValueErrors instead of the type checker's, which pytest switches on."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


BAD = {
    "layout": (lambda a: dict(q=jnp.swapaxes(a["q"], 1, 2)), "k: shape .* does not fit .*transpose"),
    "rank": (lambda a: dict(erase=a["erase"][..., None]), r"erase: shape .* has 4 axes, but erase is \[B, T, H\]"),
    "heads": (
        lambda a: dict(q=a["q"][:, :, :1].repeat(4, 2), k=a["k"][:, :, :1].repeat(4, 2)),
        "heads: H=6 .*G=4.* must divide",
    ),
    "time": (lambda a: dict(log_decay=a["log_decay"][:, :-1]), "log_decay: shape .* T .time. is 36 here but 37 in q"),
    "state": (
        lambda a: dict(initial_state=a["initial_state"][:1]),
        "initial_state: shape .* B .batch. is 1 here but 2 in q",
    ),
    "state dims": (
        lambda a: dict(initial_state=jnp.swapaxes(a["initial_state"], 2, 3)),
        "initial_state: shape .* K .key dim. is 5 here but 8",
    ),
    "dtype": (
        lambda a: dict(u=a["u"].astype(jnp.int32)),
        "u: dtype int32 is not float32, bfloat16 or float16; cast it",
    ),
    "a number": (lambda a: dict(erase=0.5), r"erase: 0.5 is a float, but erase is an array \[B, T, H\]"),
    "no erase": (lambda a: dict(erase=None), "erase: None, .* linear_attention"),
    "chunk": (lambda a: dict(chunk_size=40), r"chunk_size: 40 is not one of \(16, 32, 64, 128\)"),
    "ids dtype": (lambda a: dict(segment_ids=jnp.ones((2, 37))), "segment_ids: dtype float32 is not an integer"),
    "ids as a list": (lambda a: dict(segment_ids=[[1, 2]]), r"segment_ids: \[\[1, 2\]\] is a list, but an array"),
    "ids shape": (
        lambda a: dict(segment_ids=jnp.ones((2, 36), jnp.int32)),
        r"segment_ids: shape \(2, 36\) is not \[B, T\] = \(2, 37\)",
    ),
    "name": (
        lambda a: dict(implementation="chunk"),
        "implementation: 'chunk' is not known to delta_rule; choose one of",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_wrong_input_is_named_before_anything_compiles(plain_errors, fault):
    change, message = BAD[fault]
    (q, k, u, erase, decay, state), _ = recurrence_case("random")
    arguments = dict(q=q, k=k, u=u, erase=erase, log_decay=decay, initial_state=state)
    with pytest.raises(ValueError, match=message):
        ops.delta_rule(**{**arguments, **change(arguments)})


def test_missing_kernels_say_so_and_failures_are_collected():
    (q, k, u, erase, _, _), _ = recurrence_case("random")
    with pytest.raises(NotImplementedError, match="no kernel of jax-triton is built.*'chunked' or 'auto'"):
        ops.delta_rule(q, k, u, erase, implementation="triton")
    with pytest.raises(ExceptionGroup, match="no implementation supports"):
        dispatch("op", "auto", {"pallas": missing_kernel("op")}, ("pallas",), ())
