"""The delta rule's kernels over parts of one sequence that devices have: what each part does to a state and to a
cotangent is handed round before it is walked, in Mosaic's interpreter against the float64 oracle.

The interpreter cannot run on two devices at once, so that a named axis of `jax.vmap`, which the kernels loop over,
stands for the mesh axis; `test_kernels_mesh.py` lowers the same for two GPUs."""

import os

os.environ.setdefault("NPROC", "8")  # a waiting warpgroup blocks a thread of XLA's pool: more of them than warpgroups

import functools  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from efla_jax.kernels import delta_rule as kernel  # noqa: E402
from efla_jax.kernels import delta_rule_gradients  # noqa: E402
from efla_jax.kernels.delta_rule_reverse import ReverseConfig  # noqa: E402
from efla_jax.ops import pallas  # noqa: E402
from efla_jax.ops.arguments import Recurrence, recurrence  # noqa: E402
from efla_jax.ops.chunked import chunked  # noqa: E402
from efla_jax.ops.sharded import cotangent_over, part, sharded, state_over  # noqa: E402
from efla_jax.sharding import make_mesh  # noqa: E402
from tests.cases import recurrence_case  # noqa: E402
from tests.oracle import recurrence_and_gradients, relative_rms  # noqa: E402

RACES = plgpu.InterpretGPUParams(detect_races=True)
NAMES = ("o", "state", "dq", "dk", "du", "derase", "dlog_decay", "dinitial_state")
FLOOR, RATIO = 2.5e-3, 1.2  # as in test_kernels_delta.py
PARTS = 2
SHAPE = dict(batch=1, time=256, key_heads=1, heads=2, key_dim=64, value_dim=64)


def over_parts(config, arguments, ids, cotangents):
    """Outputs, final state and gradients by parts of the time along a named axis. Shares are those of `jax.shard_map`:
    all parts return one final state, whose cotangent is divided among them, and what they say of a state that all share
    is summed."""
    x, pull = jax.vjp(lambda *a: recurrence(*a, ids), *arguments)
    cut = lambda a: None if a is None else jnp.moveaxis(a.reshape(a.shape[0], PARTS, -1, *a.shape[2:]), 1, 0)  # noqa: E731
    join = lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, *a.shape[3:])  # noqa: E731

    def local(q, k, u, erase, log_decay, starts, d_o):
        def op(*arrays):
            return pallas.delta_rule_part(Recurrence(*arrays, starts), "context", config, RACES)

        out, pull = jax.vjp(op, q, k, u, erase, log_decay, x.initial_state)
        return *out, *pull((d_o, cotangents[1] / PARTS))

    arrays = (*map(cut, (x.q, x.k, x.u, x.erase, x.log_decay, x.starts, cotangents[0])),)
    axes = tuple(None if a is None else 0 for a in arrays)
    o, final, *gradients, d_initial = jax.vmap(local, axes, axis_name="context")(*arrays)
    np_starts = None if x.starts is None else np.zeros(x.starts.shape, jax.dtypes.float0)
    gradients = pull(Recurrence(*map(join, gradients), jnp.sum(d_initial, axis=0), np_starts))
    return join(o), final[0], *gradients


def by_chunked(arguments, ids, cotangents):
    out, pull = jax.vjp(lambda *a: chunked(recurrence(*a, ids), 64), *arguments)
    return *out, *pull(cotangents)


def by_kernel(arguments, ids, cotangents):
    """Whole rows on one device."""
    out, pull = jax.vjp(lambda *a: pallas.delta_rule(recurrence(*a, ids), 64, interpret=RACES), *arguments)
    return *out, *pull(cotangents)


def check(case, ids, config=None, like=by_kernel, **shape):
    """Every value is within RATIO of the error of `like`, another way to the same."""
    arguments, cotangents = recurrence_case(case, jnp.bfloat16, **{**SHAPE, **shape})
    truth, slopes = recurrence_and_gradients(arguments, ids, cotangents)
    ids = None if ids is None else jnp.asarray(ids)
    ours = jax.jit(over_parts, static_argnums=0)(config, arguments, ids, cotangents)
    others = jax.jit(like)(arguments, ids, cotangents)
    for name, value, other, reference in zip(NAMES, ours, others, (*truth, *slopes), strict=True):
        error, bar = relative_rms(value, reference), max(FLOOR, RATIO * relative_rms(other, reference))
        assert error <= bar, f"{name}: {error:.1e}, {bar:.1e} allowed"


def documents_at(*starts: int) -> np.ndarray:
    return 1 + np.sum(np.arange(SHAPE["time"])[None] >= np.asarray(starts)[:, None], axis=0, dtype=np.int32)[None]


def test_states_and_cotangents_cross_the_border():
    check("cosine 0.9", None, like=by_chunked)  # the cheaper one


@pytest.mark.slow
@pytest.mark.parametrize("starts", [(100,), (128,), (30, 190), (200, 201)])
def test_documents(starts):
    check("cosine 0.9", documents_at(*starts))


@pytest.mark.slow
@pytest.mark.parametrize("key_dim, value_dim, heads", [(64, 192, 1), (256, 64, 1), (64, 64, 3)])
def test_tiles_of_values_and_wide_keys(key_dim, value_dim, heads):
    check("cosine 0.9", documents_at(70), key_dim=key_dim, value_dim=value_dim, heads=heads)


@pytest.mark.slow
def test_parts_in_parts(monkeypatch):
    """Each device's two chunks are walked at once, both ways."""
    made = functools.partial(ReverseConfig, parts=2)
    monkeypatch.setattr(delta_rule_gradients, "ReverseConfig", made)
    config = kernel.Config(combine=0.0)
    sizes = kernel.mosaic.Sizes(1, 128, 1, 2, 64, 64, 2)
    assert kernel.layout_of(config, sizes, True)[1] == 2
    check("random", documents_at(100), config)


# A CPU has eight simulated devices (conftest.py), so it runs there; a machine with a single GPU has nobody to hand to.
@pytest.mark.skipif(jax.device_count() < 2, reason="a mesh of two devices")
def test_what_is_handed_round_on_a_mesh():
    """S' = M S + Z of each device's part, as an operator whose gradient hands cotangents round itself: every one is
    that of autodiff on one device, the final state's and that of the state all begin with, too."""
    count = jax.device_count() if jax.device_count() in (2, 4, 8) else 2
    rng = np.random.default_rng(0)
    shapes = (2, count, 3, 4, 4), (2, count, 3, 4, 5), (2, 3, 4, 5)
    arrays = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    cotangents = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes[1:])

    def whole(m, z, state):
        before = []
        for i in range(count):
            before.append(state)
            state = jnp.einsum("bhij,bhjv->bhiv", m[:, i], state) + z[:, i]
        return jnp.stack(before, axis=1), state

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def local(context, m, z, state):
        return forward(context, m, z, state)[0]

    def forward(context, m, z, state):
        before, final = state_over(context, state, z[:, 0], m[:, 0])
        return (before[:, None], final), (m, before)

    def backward(context, saved, cotangents):
        (m, before), (d_before, d_final) = saved, cotangents
        added = d_before[:, 0].swapaxes(2, 3)
        behind = cotangent_over(context, d_final.swapaxes(2, 3), added, m[:, 0])
        front = jnp.where(part(context) == 0, jnp.einsum("bhvi,bhij->bhvj", behind, m[:, 0]) + added, 0.0)
        d_m = jnp.einsum("bhvi,bhjv->bhij", behind, before)
        return d_m[:, None], behind.swapaxes(2, 3)[:, None], front.swapaxes(2, 3)

    local.defvjp(forward, backward)

    def on_mesh(*arrays):
        out, pull = jax.vjp(lambda *a: sharded(local, a, ("BTHIJ", "BTHIV", "BHIV"), ("BTHIV", "BHIV")), *arrays)
        return *out, *pull(cotangents)

    with jax.set_mesh(make_mesh(data=1, context=count, devices=jax.devices()[:count])):
        ours = jax.jit(on_mesh)(*arrays)
    out, pull = jax.vjp(whole, *arrays)
    for value, reference in zip(ours, (*out, *pull(cotangents)), strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-4, atol=1e-4)  # sums of up to 4^8 terms in another order
