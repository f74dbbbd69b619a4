"""Cross-entropy in pieces: the sums of the whole, exact silence of masked tokens, memory, meshes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from efla_jax import LanguageModel, evaluate, losses, sharding

B, T, D, V = 2, 11, 5, 13


def case(seed=0, batch=B, time=T, width=D, vocabulary=V):
    rng = np.random.default_rng(seed)
    features = jnp.asarray(rng.normal(size=(batch, time, width)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(width, vocabulary)), jnp.float32)
    targets = jnp.asarray(rng.integers(vocabulary, size=(batch, time)), jnp.int32)
    mask = jnp.asarray(rng.choice([0.0, 0.5, 1.0], size=(batch, time)), jnp.float32)
    return features, head, targets, mask


def sums_of(features, head, targets, mask, chunk=0, z_loss=0.0):
    return losses.cross_entropy(lambda x: x @ head, features, targets, mask, chunk=chunk, z_loss=z_loss)


def slopes_of(features, head, targets, mask, chunk=0, z_loss=0.0):
    """Sums and gradients of the objective in features and head."""

    def objective(features, head):
        sums = sums_of(features, head, targets, mask, chunk, z_loss)
        return sums.loss + sums.z, sums

    (_, sums), slopes = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(features, head)
    return sums, slopes


def reference(features, head, targets, mask, z_loss):
    """Sums and gradients in float64, by the definition."""
    x, w, mask = (np.asarray(a, np.float64) for a in (features, head, mask))
    logits = x @ w
    z = np.exp(logits).sum(-1)
    picked = np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    sums = losses.Sums(((np.log(z) - picked) * mask).sum(), mask.sum(),
                       ((logits.argmax(-1) == targets) * mask).sum(), (z_loss * np.log(z) ** 2 * mask).sum())
    soft, hot = np.exp(logits) / z[..., None], np.eye(w.shape[1])[np.asarray(targets)]
    slope = mask[..., None] * (soft - hot + 2 * z_loss * np.log(z)[..., None] * soft)
    return sums, (slope @ w.T, np.einsum("btd,btv->dv", x, slope))


def close(found, expected, rtol=2e-6):
    """Sums of some twenty float32 terms of order one, and products over 13 logits."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=5e-6), found, expected)


@pytest.mark.parametrize("chunk", [0, 1, 3, 4, 11, 50])  # 11 tokens: divisible by none of 3 and 4
def test_pieces_of_any_size_are_the_definition(chunk):
    data = case()
    close(slopes_of(*data, chunk=chunk, z_loss=0.3), reference(*data, z_loss=0.3))


def test_the_penalty_is_apart_from_the_loss():
    data = case()
    plain, penalised = sums_of(*data), sums_of(*data, z_loss=0.3)
    assert float(plain.z) == 0 and float(penalised.z) > 1
    assert float(plain.loss) == float(penalised.loss)


def test_large_logits_do_not_overflow():
    features, head, targets, mask = case()
    sums, slopes = slopes_of(1e4 * features, head, targets, mask, chunk=4, z_loss=1e-4)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((sums, slopes)))


@pytest.mark.parametrize("chunk", [0, 4])
def test_masked_tokens_are_silent(chunk):
    """Exactly: NaN features, ids outside the vocabulary and NaN weights below zero's side change no bit."""
    features, head, targets, mask = case()
    dead = np.asarray(mask) == 0
    poisoned = jnp.where(dead[..., None], jnp.nan, features)
    wild = jnp.where(dead, jnp.where(np.arange(T) % 2, -7, 10**6), targets)
    expected = slopes_of(features, head, targets, mask, chunk, 0.1)
    found = slopes_of(poisoned, head, wild, mask, chunk, 0.1)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert not np.asarray(found[1][0])[dead].any() and np.asarray(found[1][0])[~dead].all()
    nothing = slopes_of(jnp.full_like(features, jnp.nan), head, wild, jnp.zeros_like(mask, bool), chunk, 0.1)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(nothing))


@pytest.mark.parametrize("wrong", [-1, V])
def test_a_wrong_target_that_counts_spoils_loss_and_gradient(wrong):
    features, head, targets, mask = case()
    sums, slopes = slopes_of(features, head, targets.at[0, 0].set(wrong), mask.at[0, 0].set(1.0), chunk=4)
    assert np.isnan(sums.loss) and np.isnan(slopes[1]).any()


def test_equal_logits_are_not_all_right():
    sums = losses.weighted_sums(jnp.zeros((3, 4)), jnp.arange(3), jnp.ones(3))
    assert float(sums.correct) == 1  # the guess is the first


def test_parts_add_up():
    """Pitfall 72: sums over unequal parts of a batch are those of the batch, gradients included."""
    features, head, targets, mask = case()
    whole = slopes_of(features, head, targets, mask, chunk=3)
    first, second = (slopes_of(features[s], head, targets[s], mask[s], chunk=3) for s in (slice(0, 1), slice(1, 2)))
    close(jax.tree.map(jnp.add, first[0], second[0]), whole[0])
    close(first[1][1] + second[1][1], whole[1][1])


def test_memory_of_the_logits():
    """B=4, T=512, V=32000: all logits are 250 MiB, and loss and gradient hold several of that; pieces of 32 tokens hold
    a sixteenth, and the gradient of the head."""
    shapes = [jax.ShapeDtypeStruct(*kind) for kind in (((4, 512, 64), jnp.float32), ((64, 32000), jnp.float32),
                                                       ((4, 512), jnp.int32), ((4, 512), jnp.float32))]

    def mebibytes(chunk):
        step = jax.jit(lambda *data: slopes_of(*data, chunk=chunk))
        return step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes / 2**20

    whole, pieces = mebibytes(512), mebibytes(32)
    print(f"temporaries: {whole:.0f} MiB whole, {pieces:.0f} MiB in pieces of 32 tokens")
    assert whole > 250 and pieces < whole / 10


def test_the_chosen_piece_fits(monkeypatch):
    """0 means: as many tokens as PIECE_BYTES holds, per device; a tiny budget still takes one token."""
    seen = []

    def logits_of(x):
        seen.append(x.shape)
        return x @ head

    features, head, targets, mask = case()
    for budget, tokens in ((4 * B * V * 4, 4), (1, 1), (2**28, T)):
        monkeypatch.setattr(losses, "PIECE_BYTES", budget)
        seen.clear()
        losses.cross_entropy(logits_of, features, targets, mask)
        assert seen[-1] == (B, tokens, D)


MESHES = {"vocabulary": {"tensor": 4}, "tensor": {"data": 2, "tensor": 4}, "context": {"fsdp": 2, "context": 4},
          "all": {"fsdp": 2, "tensor": 2, "context": 2}}  # fmt: skip


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_a_mesh_changes_nothing_and_gathers_nothing(sizes):
    """Split rows, time and vocabulary: the sums and gradients of one device, every shard on its own tokens."""
    data = case(batch=4, time=24, width=8, vocabulary=32)
    expected = slopes_of(*data, chunk=3, z_loss=0.3)
    mesh = sharding.make_mesh(**{"data": 1, **sizes})
    tokens = PartitionSpec(("data", "fsdp"), "context")
    where = [NamedSharding(mesh, spec) for spec in (tokens, PartitionSpec("fsdp", "tensor"), tokens, tokens)]
    step = jax.jit(lambda *data: slopes_of(*data, chunk=3, z_loss=0.3), in_shardings=where)
    with jax.set_mesh(mesh):
        program = step.lower(*data).compile().as_text()
        close(step(*(jax.device_put(x, s) for x, s in zip(data, where, strict=True))), expected)
    moving = re.compile(r" = (.*) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)\(")
    loops, entry = program.split("ENTRY")
    # In the loops the largest and the sums of parts of a vocabulary, one number per token; the head's gradient after.
    split = sizes.get("tensor", 1) > 1
    assert all(split and "[8," not in shape for shape, _ in moving.findall(loops)), moving.findall(loops)
    # What is gathered is the head over fsdp, and no token.
    moved = [shape for shape, name in moving.findall(entry) if name != "all-reduce"]
    assert all(shape.startswith("f32[8,") for shape in moved), moved


@pytest.mark.parametrize("tie", [False, True])
def test_a_language_model_in_pieces(tie):
    """The model's features and head give what its logits give, with and without a head of its own."""
    model = LanguageModel(V, 8, 1, ("attention",), {"attention": {"num_heads": 2}}, mlp="none", tie_embeddings=tie)
    _, _, targets, mask = case()
    segments = (mask > 0).astype(jnp.int32)
    batch = {"tokens": targets, "targets": jnp.roll(targets, -1, 1), "mask": mask, "segment_ids": segments}
    params = jax.jit(model.init)(jax.random.key(0), targets)

    def whole(params):
        logits, _ = model.apply(params, targets, segment_ids=segments)
        sums = losses.weighted_sums(logits, batch["targets"], mask, 0.3)
        return sums.loss + sums.z, sums

    def pieces(params):
        sums = evaluate.batch_sums(model, params, batch, chunk=4, z_loss=0.3)
        return sums.loss + sums.z, sums

    both = jax.jit(lambda params: [jax.value_and_grad(f, has_aux=True)(params) for f in (pieces, whole)])
    found, expected = both(params)
    close(found, expected, rtol=2e-5)
    scores = evaluate.evaluate(model, params, [jax.tree.map(np.asarray, batch)])
    sums = expected[0][1]
    assert scores["loss"] == pytest.approx(float(sums.loss / sums.weight), rel=1e-5)
    assert scores["accuracy"] == pytest.approx(float(sums.correct / sums.weight)) and scores["weight"] == mask.sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": jnp.zeros((T, D))}, r"features: shape \(11, 5\) is not"),
        ({"targets": jnp.zeros((B, T + 1), int)}, r"targets: shape \(2, 12\) is not that of the tokens, \(2, 11\)"),
        ({"mask": jnp.zeros((B, 1))}, r"mask: shape \(2, 1\)"),
        ({"targets": jnp.zeros((B, T))}, "targets: float32 are not token ids"),
        ({"chunk": -1}, "chunk=-1 must be >= 0"),
        ({"z_loss": -0.1}, "z_loss=-0.1 must be finite and >= 0"),
        ({"z_loss": float("nan")}, "z_loss=nan must be finite"),
    ],
)
def test_wrong_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        sums_of(**{**dict(zip(("features", "head", "targets", "mask"), case(), strict=True)), **change})
