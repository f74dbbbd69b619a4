"""Fenwick states: levels in integers, the state after any piece and at any position, padding, capacity, what callers
may do with the operators, meshes, memory and wrong input."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from efla_jax import ops
from efla_jax.ops.fenwick_chunked import seen_weights
from efla_jax.sharding import AXES, make_mesh
from tests.cases import SHAPE, packed_ids
from tests.oracle import TOLERANCE, assert_close, fenwick_parallel, relative_rms
from tests.test_log_linear import BEGINNING, LEVELS, POSITION, case, compiled, live

IMPLEMENTATIONS = ("recurrent", "chunked")


@pytest.mark.identity
def test_levels_are_bit_lengths_in_integers():
    t, s = np.tril_indices(70)
    expected = [int(a ^ b).bit_length() for a, b in zip(t, s, strict=True)]
    np.testing.assert_array_equal(ops.fenwick_level(jnp.asarray(t), jnp.asarray(s)), expected)
    far = [2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1]
    assert ops.fenwick_level(jnp.asarray(far), 0).tolist() == [n.bit_length() for n in far]
    assert ops.fenwick_level(2**30, 2**30 - 1) == 31 and ops.fenwick_level(2**30 + 1, 2**30) == 1


def test_a_state_is_seen_at_the_level_of_every_position_in_it():
    start = np.arange(40)[:, None]
    t = start + np.arange(40)
    weights = tuple(jnp.full((40, 1, 1, 40), float(level)) for level in range(9))  # the weight of a level is its number
    seen = np.asarray(seen_weights(weights, jnp.asarray(t), jnp.asarray(start[:, 0])))[:, 0, 0]
    for row, level in np.argwhere(live(start[:, 0], 9)):
        first = row >> level << level
        for position in range(first, first + 2 ** (level - 1)):
            np.testing.assert_array_equal(seen[row, :, level], [(x ^ position).bit_length() for x in t[row].tolist()])


@pytest.mark.identity
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("whole_rows", (True, False))
def test_equal_weights_and_one_level_are_the_flat_operators(implementation, whole_rows):
    """Whatever the levels, their states add up to the flat state, and equal weights to its output."""
    (q, k, u, erase, decay, weights, _), _ = case("random")
    ids = None if whole_rows else jnp.asarray(packed_ids(2, SHAPE["time"]))
    options = dict(segment_ids=ids, chunk_size=16, implementation=implementation)
    one, factor = jnp.ones_like(weights), weights[..., :1]
    for flat, op in (
        (
            ops.delta_rule(q, k, u, erase, decay, **options),
            functools.partial(ops.log_linear_delta_rule, q, k, u, erase),
        ),
        (ops.linear_attention(q, k, u, decay, **options), functools.partial(ops.log_linear_attention, q, k, u)),
    ):
        for scale, levels in ((1.0, one), (factor, factor)):
            o, state = op(decay, levels, **options)
            assert_close((o, state.states.sum(2)), (scale * flat[0], flat[1]), ("o", "state"), 1e-6)


@pytest.mark.identity
def test_only_level_0_is_the_token_itself():
    (q, k, u, erase, decay, weights, _), _ = case("random", BEGINNING)
    weights = weights.at[..., 1:].set(0.0)
    own = jnp.repeat(jnp.sum(q * k, -1), 3, axis=2)[..., None] * weights[..., :1] * u
    for implementation in (*IMPLEMENTATIONS, "associative"):
        options = dict(implementation=implementation, chunk_size=16)
        o, _ = ops.log_linear_delta_rule(q, k, u, erase, decay, weights, **options)
        assert relative_rms(o, own) < 1e-6


@functools.cache
def forward(implementation, erases=True):
    def run(a, position, ids):
        state = ops.FenwickState(a[6], position)
        options = dict(initial_state=state, segment_ids=ids, chunk_size=16, implementation=implementation)
        if erases:
            return ops.log_linear_delta_rule(*a[:6], **options)
        return ops.log_linear_attention(*a[:3], *a[4:6], **options)

    return jax.jit(run)


@pytest.mark.parametrize("cuts", ((1, 9, 9, 23), (16, 32), (7, 8, 15, 33)))
@pytest.mark.parametrize("erases", (True, False))
def test_pieces_of_any_length_and_implementation_equal_the_whole(erases, cuts):
    """The state after a piece is the same from every implementation, so that each goes on where another stopped."""
    arguments, _ = case("random")
    ids = np.ones((2, SHAPE["time"]), np.int32)
    ids[0, 5:11] = 0
    position = jnp.asarray(POSITION, jnp.int32)
    whole, final = forward("recurrent", erases)(arguments, position, ids)
    state, parts = ops.FenwickState(arguments[6], position), []
    for i, (begin, end) in enumerate(zip((0, *cuts), (*cuts, SHAPE["time"]), strict=True)):
        piece = (*(x[:, begin:end] for x in arguments[:6]), state.states)
        o, state = forward(IMPLEMENTATIONS[1 - i % 2], erases)(piece, state.position, ids[:, begin:end])
        parts.append(o)
    np.testing.assert_array_equal(state.position, final.position)
    np.testing.assert_array_equal(final.position, [13 + 31, 6 + 37])
    o = jnp.concatenate(parts, 1)
    assert_close((o, state.states), (whole, final.states), ("o", "states"), TOLERANCE["float32"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slots_are_empty_where_the_bits_of_the_position_are_not_set(implementation):
    arguments, _ = case("random")
    _, state = forward(implementation)(arguments, jnp.asarray(POSITION, jnp.int32), None)
    np.testing.assert_array_equal(np.abs(state.states).sum((1, 3, 4)) > 0, live(state.position, LEVELS))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_document_packed_anywhere_equals_the_document_alone(implementation):
    (*arguments, states), _ = case("random")
    ids = np.repeat([[0, 4, 2, 0, 5]], (3, 6, 21, 2, 5), axis=1).repeat(2, 0)
    packed, _ = forward(implementation)((*arguments, states), jnp.asarray(POSITION, jnp.int32), ids)
    alone = [x[:, 9:30] for x in arguments]
    o, _ = forward(implementation)((*alone, 0 * states), jnp.zeros(2, jnp.int32), None)
    assert relative_rms(packed[:, 9:30], o) < 1e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_positions_near_the_end_of_int32(implementation):
    """Level 31 begins at 2^30: one step over it carries every slot into one."""
    position = (2**30 - 3, 2**30 - 1)
    arguments, _ = case("random", position, levels=33, time=6)
    _, state = forward(implementation)(arguments, jnp.asarray(position, jnp.int32), None)
    np.testing.assert_array_equal(np.abs(state.states).sum((1, 3, 4)) > 0, live(state.position, 33))
    _, flat = ops.delta_rule(*arguments[:5], initial_state=arguments[6].sum(2), implementation="recurrent")
    assert relative_rms(state.states.sum(2), flat) < 1e-6
    empty = (*arguments[:6], 0 * arguments[6])
    o, _ = forward(implementation)(empty, jnp.asarray(position, jnp.int32), None)
    for row, head in ((0, 1), (1, 4)):
        dense = fenwick_parallel(
            *(x[row, :, head // 3] for x in arguments[:2]), *(x[row, :, head] for x in arguments[2:6]), position[row]
        )
        assert relative_rms(o[row, :, head], dense) < TOLERANCE["float32"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_may_hold_anything_and_gets_no_gradient(implementation):
    arguments, cotangents = case("random")
    ids = packed_ids(2, SHAPE["time"])
    pad = ids == 0
    position = jnp.asarray(POSITION, jnp.int32)
    poisoned = [jnp.where(pad.reshape(pad.shape + (1,) * (x.ndim - 2)), jnp.nan, x) for x in arguments[:6]]
    run = compiled(implementation)
    clean, _ = run(arguments, ids, position, cotangents)
    out, gradients = run((*poisoned, arguments[6]), ids, position, cotangents)
    for value, reference in zip(out, clean, strict=True):
        np.testing.assert_array_equal(value, reference)
    for gradient in gradients[:6]:
        assert np.isfinite(gradient).all() and not np.asarray(gradient)[pad].any()


def test_a_document_does_not_see_what_another_spoils():
    arguments, cotangents = case("random")
    ids = np.repeat([[1, 2]], SHAPE["batch"], axis=0).repeat([7, SHAPE["time"] - 7], axis=1).astype(np.int32)
    run, position = compiled("recurrent"), jnp.asarray(POSITION, jnp.int32)
    spoilt = [x.at[:, 3].set(jnp.nan) for x in arguments[:6]]
    (o, states), _ = run((*spoilt, arguments[6]), ids, position, cotangents)
    (clean, _), _ = run(arguments, ids, position, cotangents)
    assert np.isnan(o[:, 3:7]).all() and np.isfinite(states).all()
    np.testing.assert_array_equal(o[:, 7:], clean[:, 7:])


@pytest.mark.parametrize("prefix", (1, 63, 64, 65, 100, 127, 128, 129))
def test_prefill_and_single_tokens_equal_the_whole(prefix):
    """The tree, then one token after the other across the next powers of two, as generation does."""
    shape = dict(batch=1, key_heads=1, heads=2, key_dim=7, value_dim=3)
    arguments, _ = case("random", (0,), levels=9, time=136, **shape)
    whole, _ = prefilled(136)(arguments)
    o, state = prefilled(prefix)(tuple(x[:, :prefix] for x in arguments[:6]))
    assert relative_rms(o, whole[:, :prefix]) < TOLERANCE["float32"]
    for t in range(prefix, prefix + 7):
        o, state = forward("recurrent")((*(x[:, t : t + 1] for x in arguments[:6]), state.states), state.position, None)
        assert relative_rms(o, whole[:, t : t + 1]) < TOLERANCE["float32"]
    assert state.position.tolist() == [prefix + 7]


@functools.cache
def prefilled(time):
    def run(a):
        assert a[0].shape[1] == time
        return ops.log_linear_delta_rule(*a[:6], implementation="chunked")

    return jax.jit(run)


@pytest.mark.parametrize("implementation", (*IMPLEMENTATIONS, "auto"))
def test_no_real_token_returns_the_state_unchanged(implementation):
    arguments, _ = case("random")
    position = jnp.asarray(POSITION, jnp.int32)
    o, state = forward(implementation)(arguments, position, np.zeros((2, SHAPE["time"]), np.int32))
    assert not np.asarray(o).any()
    np.testing.assert_array_equal(state.states, arguments[6])
    np.testing.assert_array_equal(state.position, position)
    empty = (*(x[:, :0] for x in arguments[:6]), arguments[6])
    o, state = forward(implementation)(empty, position, None)
    assert o.shape == (2, 0, 6, 5)
    np.testing.assert_array_equal(state.states, arguments[6])
    np.testing.assert_array_equal(state.position, position)


def test_associative_declines_what_is_not_a_whole_row():
    arguments, _ = case("random")
    for ids, position in ((None, POSITION), (packed_ids(2, SHAPE["time"]), POSITION)):
        with pytest.raises(NotImplementedError, match="takes whole rows only.*use 'chunked' or 'recurrent'"):
            forward("associative")(arguments, jnp.asarray(position, jnp.int32), ids)


def test_vmap_scan_and_remat_of_gradients():
    """Layers are scanned and recomputed, seeds are mapped."""
    arguments, _ = case("random", BEGINNING, time=48)
    arguments = arguments[:6]

    def loss(u, erases=True):
        o, state = ops.log_linear_delta_rule(*arguments[:2], u, *arguments[3:], chunk_size=16, implementation="chunked")
        return jnp.sum(o**2) + jnp.sum(state.states**2)

    scale = jnp.asarray([1.0, 2.0])

    @jax.jit
    def every(u):
        alone = jnp.stack([jax.grad(loss)(s * u) for s in scale])
        mapped = jax.vmap(lambda s: jax.grad(loss)(s * u))(scale)
        scanned = jax.lax.scan(lambda _, s: (None, jax.grad(jax.checkpoint(loss))(s * u)), None, scale)[1]
        return alone, mapped, scanned

    alone, *others = every(arguments[2])
    for other in others:
        assert relative_rms(other, alone) < 1e-6


def test_a_gradient_can_be_differentiated_forward():
    """Hessian-vector products, as jvp of grad: no rule of a gradient may itself have none."""
    (*arguments, _), _ = case("random", time=21)  # a whole chunk and some of the next
    arguments = [x[:1] for x in arguments]

    def product(implementation):
        def loss(arguments):
            o, state = ops.log_linear_delta_rule(*arguments, chunk_size=16, implementation=implementation)
            return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state.states))

        return jax.jit(lambda a: jax.jvp(jax.grad(loss), (a,), ([jnp.cos(x) for x in a],))[1])(arguments)

    for got, expected in zip(product("chunked"), product("recurrent"), strict=True):
        assert relative_rms(got, expected) < 1e-5


@pytest.mark.parametrize("fresh", (True, False))
@pytest.mark.parametrize("sizes", ((2, 2, 2, 1), (2, 1, 2, 2)))
def test_meshes_equal_one_device(sizes, fresh):
    """Rows and heads over (data, fsdp, tensor); time is whole on every device, whatever the context axis."""
    position = BEGINNING if fresh else POSITION
    arguments, cotangents = case("random", position, time=40)
    run = compiled("chunked", fresh=fresh)
    start = jnp.asarray(position, jnp.int32)
    alone = run(arguments, None, start, cotangents)
    with jax.set_mesh(make_mesh(**dict(zip(AXES, sizes, strict=True)))):
        spread = run(arguments, None, start, cotangents)
    for value, reference in zip(jax.tree.leaves(spread), jax.tree.leaves(alone), strict=True):
        assert relative_rms(value, reference) < 1e-6


@pytest.fixture
def plain_errors():
    """Our own ValueErrors instead of the type checker's, which pytest switches on."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


BAD = {
    "weights": (lambda a: dict(level_weights=a["level_weights"][:, :-1]), "level_weights: shape .* T .time. is 36"),
    "no weights": (lambda a: dict(level_weights=None), "level_weights: None, but a Fenwick operator needs it"),
    "no levels": (
        lambda a: dict(level_weights=a["level_weights"][..., :0], initial_state=None),
        "level_weights: shape .* has L = 0 levels",
    ),
    "no erase": (lambda a: dict(erase=None), "erase: None, .* log_linear_attention"),
    "fewer levels in the state": (
        lambda a: dict(initial_state=a["initial_state"]._replace(states=a["initial_state"].states[:, :, 1:])),
        "initial_state.states: shape .* L .levels. is 6 here but 7 in level_weights",
    ),
    "position": (
        lambda a: dict(initial_state=a["initial_state"]._replace(position=jnp.zeros(2))),
        "initial_state.position: dtype float32 is not an integer",
    ),
    "chunk": (lambda a: dict(chunk_size=40), "chunk_size: 40 is not one of"),
}


@pytest.mark.parametrize("fault", BAD)
def test_wrong_input_is_named_before_anything_compiles(plain_errors, fault):
    change, message = BAD[fault]
    (q, k, u, erase, decay, weights, states), _ = case("random")
    arguments = dict(q=q, k=k, u=u, erase=erase, log_decay=decay, level_weights=weights)
    arguments["initial_state"] = ops.FenwickState(states, jnp.asarray(POSITION, jnp.int32))
    with pytest.raises(ValueError, match=message):
        ops.log_linear_delta_rule(**{**arguments, **change(arguments)})


def test_memory_of_the_gradient():
    """What the compiler sets aside grows like T log T at most and is little more than twice that of the flat operator;
    a stack of states of all levels and chunks alone would be more."""
    key_dim, value_dim, chunk_size, long = 32, 32, 16, 4096

    def temporary(time, flat=False):
        levels = (time - 1).bit_length() + 1
        key, value, gate, weights = (
            jax.ShapeDtypeStruct((1, time, *x), jnp.float32) for x in ((1, key_dim), (1, value_dim), (1,), (1, levels))
        )

        def loss(q, k, u, erase, decay, weights):
            options = dict(chunk_size=chunk_size, implementation="chunked")
            if flat:
                return ops.delta_rule(q, k, u, erase, decay, **options)[0].sum()
            return ops.log_linear_delta_rule(q, k, u, erase, decay, weights, **options)[0].sum()

        program = jax.jit(jax.grad(loss, range(5 if flat else 6)))
        return program.lower(key, key, value, gate, gate, weights).compile().memory_analysis().temp_size_in_bytes

    used = temporary(long)
    assert used < 4.8 * temporary(long // 4)
    assert used < 2.5 * temporary(long, flat=True)
