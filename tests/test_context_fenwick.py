"""Log-linear operators whose time a mesh splits: every value and gradient is that of one device, and states travel.

A mesh is written (data, fsdp, tensor, context).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from efla_jax.ops import log_linear_attention, log_linear_delta_rule
from efla_jax.ops.fenwick import FenwickState
from tests.cases import recurrence_case
from tests.oracle import TOLERANCE, assert_close
from tests.test_context_parallel import COLLECTIVE, mesh_of, on_mesh

BATCH, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 3, 6, 8, 5
NAMES = ("o", "states", "dq", "dk", "du", "derase", "dlog_decay", "dlevel_weights")


def case(time, levels, dtype=jnp.float32, batch=BATCH, key_heads=KEY_HEADS, heads=HEADS):
    shape = dict(batch=batch, time=time, key_heads=key_heads, heads=heads, key_dim=KEY_DIM, value_dim=VALUE_DIM)
    arguments, cotangents = recurrence_case("random", dtype, **shape)
    rng = np.random.default_rng(levels)
    weights = jnp.asarray(rng.uniform(0.2, 1.2, (batch, time, heads, levels)), jnp.float32)
    d_states = jnp.asarray(rng.normal(size=(batch, heads, levels, KEY_DIM, VALUE_DIM)), jnp.float32)
    return (*arguments[:5], weights), (cotangents[0], d_states)


def run_of(erases, **options):
    """(arguments, cotangents) -> outputs, states and the gradients of all arguments that the operator has."""

    def op(q, k, u, erase, log_decay, weights):
        options_here = {"chunk_size": 16, **options}
        if erases:
            o, state = log_linear_delta_rule(q, k, u, erase, log_decay, weights, **options_here)
        else:
            o, state = log_linear_attention(q, k, u, log_decay, weights, **options_here)
        return o, state.states

    def run(arguments, cotangents):
        out, pull = jax.vjp(op, *arguments)
        return out, pull(cotangents)

    return run


def compare(sizes, erases, time, levels, tolerance, **options):
    arguments, cotangents = case(time, levels)
    run = run_of(erases, **options)
    out, gradients = on_mesh(sizes, run)(arguments, cotangents)
    expected, slopes = on_mesh(None, run)(arguments, cotangents)
    rows = [row for row in zip(NAMES, (*out, *gradients), (*expected, *slopes), strict=True)
            if erases or row[0] != "derase"]  # fmt: skip
    names, values, references = zip(*rows, strict=True)
    assert_close(values, references, names, tolerance)


@pytest.mark.parametrize("erases", (True, False))
@pytest.mark.parametrize(
    "sizes, time, levels",
    [
        pytest.param((1, 1, 1, 8), 64, 9, marks=pytest.mark.slow),  # parts of 8 tokens, a level for each
        ((1, 1, 1, 4), 64, 5),  # levels of parts share the last slot, which those of a part fill
        ((2, 1, 1, 3), 48, 8),  # three parts: what is left behind the last one are two levels
        ((1, 1, 2, 4), 4, 2),  # parts of one token
        pytest.param((1, 2, 1, 2), 12, 6, marks=pytest.mark.slow),  # six tokens are no power of two: whole rows
    ],
)
def test_parts_equal_one_device(sizes, time, levels, erases):
    compare(sizes, erases, time, levels, TOLERANCE["float32"])


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ("recurrent", "associative"))
def test_other_implementations(implementation):
    compare((1, 1, 1, 4), True, 32, 7, TOLERANCE["float32"], implementation=implementation)


def test_states_go_on_where_parts_ended():
    """The states behind the last part are those that the next tokens of one device want."""
    arguments, _ = case(32, 8)
    more = [x[:, :5] for x in arguments]

    def run(arguments, more):
        _, state = log_linear_attention(*arguments[:3], *arguments[4:], chunk_size=16)
        return log_linear_attention(*more[:3], *more[4:], initial_state=state, chunk_size=16)[0], state.position

    found, wanted = on_mesh((1, 1, 1, 4), run)(arguments, more), on_mesh(None, run)(arguments, more)
    assert_close(found[:1], wanted[:1], ("o",), TOLERANCE["float32"])
    assert found[1].tolist() == [32, 32]


@pytest.mark.parametrize("erases", (pytest.param(True, marks=pytest.mark.slow), False))
def test_only_states_travel(erases):
    def gathered(time):
        arguments, cotangents = case(time, 12, batch=1, key_heads=2, heads=2)
        tokens = PartitionSpec(None, "context")
        mesh = mesh_of((1, 1, 1, 8))
        where = NamedSharding(mesh, tokens)
        places = (where,) * 6, (where, NamedSharding(mesh, PartitionSpec()))
        with jax.set_mesh(mesh):
            jitted = jax.jit(run_of(erases), in_shardings=places)
            text = jitted.lower(arguments, cotangents).compile().as_text()
        return sorted((name, shape) for shape, name in COLLECTIVE.findall(text))

    short = gathered(256)
    assert short == gathered(512) and any(name == "all-gather" for name, _ in short)


@pytest.mark.parametrize("context", (4, 2))
def test_what_cannot_be_cut_is_whole(context):
    """Documents and rows that go on: on every device as without a mesh, with fewer heads where 6 are divided."""
    arguments, _ = case(16, 6)
    ids = jnp.asarray(np.repeat([[1, 2], [0, 3]], 8, axis=1), jnp.int32)
    states = jnp.ones((BATCH, HEADS, 6, KEY_DIM, VALUE_DIM)), jnp.full((BATCH,), 3, jnp.int32)

    def run(arguments, ids):
        rest = *arguments[:3], *arguments[4:]
        packed, _ = log_linear_attention(*rest, segment_ids=ids, chunk_size=16)
        later, _ = log_linear_attention(*rest, initial_state=FenwickState(*states), chunk_size=16)
        return packed, later

    results = (on_mesh(sizes, run)(arguments, ids) for sizes in ((1, 1, 1, context), None))
    assert_close(*results, ("packed", "later"), TOLERANCE["float32"])
