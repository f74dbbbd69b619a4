"""The mesh: sizes, rules, where parameters, batches and activations stand, and a step that equals one device's."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from efla_jax import optim, sharding
from efla_jax.layers import MIXERS
from efla_jax.model import LanguageModel, SequenceClassifier
from efla_jax.train import make_state, make_step, settings
from tests.oracle import relative_rms

P = PartitionSpec
BATCH, TIME, VOCAB = 8, 16, 48
MESHES = (
    {"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 2, "context": 4}, {"context": 8},
    {"fsdp": 2, "tensor": 2, "context": 2},
)  # fmt: skip
needs_eight = pytest.mark.skipif(jax.device_count() < 8, reason="eight devices")
OPTIONS = {"efla": {"num_heads": 2, "chunk_size": 16}, "attention": {"num_heads": 2}}


def model(**fields):
    given = {"vocab_size": VOCAB, "width": 16, "depth": 2, "mixers": ("efla", "attention"), "mlp_width": 32}
    return LanguageModel(**{**given, "mixer_options": OPTIONS, **fields})


@functools.cache
def batch():
    """Documents that cross shards of two tokens, one that begins on a border, padding inside, left and right."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (BATCH, TIME + 1)).astype(np.int32)
    ids = np.ones((BATCH, TIME), np.int32)
    ids[1, 5:] = 2
    ids[2, 8:] = 3
    ids[3, :3] = 0
    ids[4, 6:9] = 0
    ids[5, 13:] = 0
    ids[6] = np.arange(TIME) + 1
    mask = (ids > 0).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask, "segment_ids": ids}


def one_step(mesh, accumulate=1):
    """(change of the parameters, gradient norm, loss) of one optimiser step on a mesh, and its compiled text.

    Adam's first step is the gradient's sign; with a large eps it is the gradient, so that every entry is compared."""
    optimizer, schedule = optim.make_optimizer(learning_rate=10.0, total_steps=4, eps=1.0, weight_decay=0.0)
    begin = functools.partial(make_state, model(), optimizer, 0)
    with jax.set_mesh(mesh):
        placed = sharding.state_shardings(mesh, jax.eval_shape(begin))
        state = jax.jit(begin, out_shardings=placed)()
        check_placed(state, placed)
        step = make_step(model(), optimizer, schedule, accumulate=accumulate, shardings=placed)
        put, before = sharding.place(mesh, batch()), jax.device_get(state.params)
        compiled = step.lower(state, put).compile()
        state, report = compiled(state, put)
        check_placed(state, placed)
    change = jax.tree.map(np.subtract, jax.device_get(state.params), before)
    return (change, float(report["grad_norm"]), float(report["loss"])), compiled.as_text()


def check_placed(state, placed):
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(placed), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)


@functools.cache
def reference():
    return one_step(sharding.make_mesh(data=1, devices=jax.devices()[:1]))[0]


def full_sequence_gathers(text):
    """The all-gathers of a compiled program whose result has the whole sequence and the width, or more, of features."""
    found = []
    for shape in re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", text):
        sizes = [int(size) for size in shape.split(",")]
        if TIME in sizes and len(sizes) >= 3 and np.prod(sizes) >= TIME * 16:
            found.append(sizes)
    return found


@needs_eight
@pytest.mark.parametrize("sizes", MESHES, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()))
def test_one_step_on_a_mesh_equals_one_device(sizes):
    (steps, norm, loss), text = one_step(sharding.make_mesh(**{"data": 1, **sizes}))
    expected, expected_norm, expected_loss = reference()
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert norm == pytest.approx(expected_norm, rel=2e-5)
    names = optim.leaf_names(expected)
    for name, ours, theirs in zip(names, jax.tree.leaves(steps), jax.tree.leaves(expected), strict=True):
        assert relative_rms(ours, theirs) < 1e-4, name  # float32 sums in another order, two layers deep
    if "context" not in sizes:
        assert not full_sequence_gathers(text)
    # The embedding's table stays where it is, and so does its gradient: what was looked up travels.
    assert not re.search(rf"\[{VOCAB},16\]\S* (all-gather|reduce-scatter)", text)
    if sizes.get("fsdp", 1) > 1:
        assert " all-to-all(" in text


@needs_eight
def test_accumulation_on_a_mesh_is_one_batch():
    (_, norm, loss), _ = one_step(sharding.make_mesh(data=2, context=2, fsdp=2), accumulate=2)
    assert loss == pytest.approx(reference()[2], rel=1e-6)
    assert norm == pytest.approx(reference()[1], rel=2e-5)


@needs_eight
@pytest.mark.parametrize("name", ["mamba2", "log_linear_gated_delta_net"])
def test_heads_split_over_tensor_gather_no_sequence(name):
    options = {"num_heads": 4, "chunk_size": 16} | ({"state_dim": 8, "num_groups": 2} if name == "mamba2" else {})
    lm = model(mixers=(name,), mixer_options={name: options})
    mesh = sharding.make_mesh(data=1, fsdp=4, tensor=2)
    with jax.set_mesh(mesh):
        begin = lambda: lm.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))  # noqa: E731
        placed = sharding.state_shardings(mesh, jax.eval_shape(begin))
        params = jax.jit(begin, out_shardings=placed)()
        loss = lambda p, b: jnp.sum(lm.apply(p, b["tokens"], segment_ids=b["segment_ids"])[0] ** 2)  # noqa: E731
        text = jax.jit(jax.grad(loss)).lower(params, sharding.place(mesh, batch())).compile().as_text()
    assert not full_sequence_gathers(text)
    assert "all-gather" in text  # of the parameters over fsdp: otherwise the search looked at nothing


@needs_eight
def test_named_activations_stand_where_they_say():
    mesh = sharding.make_mesh(data=2, fsdp=1, tensor=2, context=2)
    x = jnp.zeros((4, 6, 8))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: sharding.constrain(x, "batch", "time", "features"))(x)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "fsdp"), "context", "tensor")), 3)
        odd = jax.jit(lambda x: sharding.constrain(x, "batch", "time", "features"))(jnp.zeros((3, 1, 8)))
        assert odd.sharding.is_equivalent_to(NamedSharding(mesh, P(None, None, "tensor")), 3)
        with pytest.raises(ValueError, match="axes: .* name 2 axes, but x has shape"):
            sharding.constrain(x, "batch", None)
        seen = {}

        def look(y, name):
            jax.debug.inspect_array_sharding(y, callback=lambda s: seen.__setitem__(name, s))
            return y

        lm = model()
        params = jax.jit(lm.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        jax.jit(lambda p, b: look(lm.apply(p, b["tokens"], method=lm.features)[0], "features"))(
            params, sharding.place(mesh, {"tokens": batch()["tokens"]})
        )
    assert seen["features"].is_equivalent_to(NamedSharding(mesh, P(("data", "fsdp"), "context", None)), 3)
    assert sharding.constrain(x, "batch", "time", "features") is x  # no mesh: nothing to do


def test_a_mesh_is_auto_and_its_sizes_are_checked():
    assert sharding.make_mesh(data=1, devices=jax.devices()[:1]).axis_types == (AxisType.Auto,) * 4
    assert sharding.mesh_sizes(8, fsdp=4) == {"data": 2, "fsdp": 4, "tensor": 1, "context": 1}
    for sizes, words in (
        ({"fsdp": 3}, "fsdp 3 = 3 does not divide the 8 devices"),
        ({"data": 4, "fsdp": 4}, "16 devices are asked for, 8 are here"),
        ({"data": 0}, "mesh.data=0 must be >= 1"),
        ({"fsdp": -1}, "data and fsdp are all -1"),
    ):
        with pytest.raises(ValueError, match=words):
            sharding.mesh_sizes(8, **sizes)


LEVELS = [("log_linear_efla", {"level_bias": True}), ("log_linear_mamba2", {"level_kind": "mlp_softplus"})]


@pytest.mark.parametrize("name, options", [*((name, {}) for name in sorted(MIXERS)), *LEVELS])
def test_every_parameter_of_every_mixer_matches_one_rule(name, options):
    lm = model(mixers=(name,), mixer_options={name: {"num_heads": 2, **options}})
    optimizer, _ = optim.make_optimizer(learning_rate=1e-2, total_steps=4)
    state = jax.eval_shape(functools.partial(make_state, lm, optimizer, 0))
    specs = sharding.specs(state)
    assert specs.params["params"]["lm_head"]["kernel"] == P("fsdp", "tensor")
    up = state.params["params"]["groups"]["block_0"]["mlp"]["up_proj"]["kernel"]
    assert up.ndim == 3
    assert specs.params["params"]["groups"]["block_0"]["mlp"]["up_proj"]["kernel"] == P(None, "fsdp", "tensor")
    if options:
        found = specs.params["params"]["groups"]["block_0"]["mixer"]["level_weights"]
        assert found["level_proj"]["kernel"] == P(None, "fsdp", "tensor")
        assert found.get("shift", P(None, "tensor", None)) == P(None, "tensor", None)  # heads, levels


def test_a_classifier_matches_too_and_strangers_are_listed():
    classifier = SequenceClassifier(num_classes=3, width=8, max_length=4, mixer_options={"efla": {"num_heads": 2}})
    sharding.specs(jax.eval_shape(classifier.init, jax.random.key(0), jnp.zeros((1, 4, 1))))
    tree = {"params": {"odd": jnp.zeros((2, 2)), "q_proj": {"kernel": jnp.zeros((2,))}}}
    with pytest.raises(ValueError, match=r"2 parameters do not match(.|\n)*params/odd .*no rule(.|\n)*another rank"):
        sharding.specs(tree)


def test_a_parameter_matched_twice_is_an_error(monkeypatch):
    monkeypatch.setattr(sharding, "RULES", (*sharding.RULES, (r"lm_head/.*", (None, None))))
    with pytest.raises(ValueError, match=r"lm_head/kernel .* lm_head/kernel, lm_head/\.\*"):
        sharding.specs({"lm_head": {"kernel": jnp.zeros((2, 2))}})


@needs_eight
def test_sizes_that_the_mesh_does_not_divide_are_named():
    with pytest.raises(ValueError, match=r"lm_head/kernel \(16, 50\): 50 is not divisible by tensor=4"):
        sharding.state_shardings(sharding.make_mesh(tensor=4), {"lm_head": {"kernel": jnp.zeros((16, 50))}})
    config = {
        "data": {"batch_size": 6, "window": 10},
        "model": {"width": 18, "mixer_options": {"efla": {"num_heads": 3}}},
        "train": {"accumulate": 2},
    }
    with pytest.raises(ValueError) as error:
        settings.check_divisible(config, {"data": 1, "fsdp": 4, "tensor": 2, "context": 4})
    for words in ("6 rows are not divisible by train.accumulate=2 x data=1 x fsdp=4", "10 tokens .* context=4",
                  "width: 18 is not divisible by fsdp=4", "num_heads: 3 is not divisible by tensor=2"):  # fmt: skip
        assert re.search(words, str(error.value))


@needs_eight
def test_parameters_do_not_depend_on_the_mesh():
    optimizer, _ = optim.make_optimizer(learning_rate=1e-2, total_steps=4)
    begin = functools.partial(make_state, model(), optimizer, 3)
    mesh = sharding.make_mesh(fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        split = jax.jit(begin, out_shardings=sharding.state_shardings(mesh, jax.eval_shape(begin)))()
    for a, b in zip(jax.tree.leaves(split.params), jax.tree.leaves(jax.jit(begin)().params), strict=True):
        np.testing.assert_array_equal(a, b)


@needs_eight
def test_rows_of_a_process_and_batches_on_the_mesh():
    mesh = sharding.make_mesh(data=2, context=4)
    assert sharding.local_rows(mesh, 6) == slice(0, 6)
    put = sharding.place(mesh, {"tokens": np.arange(48).reshape(6, 8), "labels": np.arange(6)})
    np.testing.assert_array_equal(put["tokens"], np.arange(48).reshape(6, 8))
    assert put["tokens"].sharding.spec == P(("data", "fsdp"), "context")
    assert put["labels"].sharding.spec == P(("data", "fsdp"))
    assert isinstance(mesh, Mesh)
