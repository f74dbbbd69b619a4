"""The papers' recipes: parameters counted by hand, published settings, costs, and training steps traced."""

import dataclasses
import functools
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest

from configs import lm_1b3, lm_340m, lm_books, lm_log_linear, lm_nats_l, quickstart
from efla_jax import flops, optim, sharding
from efla_jax.layers import MIXERS
from efla_jax.layers.level_weights import LevelOptions
from efla_jax.train import settings
from efla_jax.train.step import make_state, make_step

VOCABULARY = 32000
# config, width, inner width of the MLP
SIZES = {
    "lm_340m": (lm_340m, 1024, 2816),
    "lm_1b3": (lm_1b3, 2048, 5632),
    "lm_log_linear": (lm_log_linear, 1536, 4096),
}
# Every axis but one; every device along fsdp, as the config has it; rows and heads.
MESHES = {
    "lm_340m": {"data": 1, "fsdp": 2, "tensor": 2, "context": 2},
    "lm_1b3": {"data": 1, "fsdp": -1},
    "lm_log_linear": {"data": 2, "fsdp": 2, "tensor": 2},
    "lm_nats_l": {"data": 1, "fsdp": 2, "tensor": 2, "context": 2},
}
MODULES = {"lm_nats_l": lm_nats_l} | {name: module for name, (module, *_) in SIZES.items()}
RECIPES = [(name, mixer) for name, (module, *_) in SIZES.items() for mixer in module.OPTIONS]
# Every mixer once, and every recipe.
TRACED = [
    *(("lm_340m", mixer) for mixer in lm_340m.OPTIONS),
    ("lm_1b3", "gated_efla"),
    *(("lm_log_linear", mixer) for mixer in lm_log_linear.OPTIONS if mixer.startswith("log_linear")),
    ("lm_nats_l", "nats_l"),
]


def log_linear_count(mixer: str) -> int:
    """Of one block of lm_log_linear: two norms, an MLP, the mixer without levels, and per head and level a column and a
    scale."""
    width, heads = 1536, 48 if "mamba2" in mixer else 6
    block = 3 * width * 4096 + 2 * width
    block += heads * 15 * (width + 1) if mixer.startswith("log_linear") else 0
    if mixer == "attention":
        return block + 4 * width**2
    if "mamba2" in mixer:  # z, x, out of 3072; B, C of 128; dt; taps and bias; A, dt, D; norm
        return block + width * (3 * 3072 + 2 * 128 + 48) + 5 * (3072 + 2 * 128) + 3 * 48 + 3072
    # q, k of 1152; v, gate, o of 2304; beta; taps; norm of a head
    block += width * (2 * 1152 + 3 * 2304 + 6) + 4 * (2 * 1152 + 2304) + 384
    return block + (0 if "efla" in mixer else width * 6 + 2 * 6)  # a, A, dt


def hand_count(name: str, mixer: str) -> int:
    """Embedding and head of V D each, a final norm, and the blocks with their two norms (one without an MLP)."""
    _, width, inner = SIZES[name]
    if name == "lm_log_linear":
        return 21 * log_linear_count(mixer) + 2 * VOCABULARY * width + width
    mlp = 3 * width * inner
    if mixer == "attention":  # q, k, v, o
        depth, block = 24, 4 * width**2 + mlp + 2 * width
    elif mixer in ("delta_net", "efla"):  # q, k, v, o; beta of width / 128 heads; three convolutions; norm of a head
        depth, block = 24, 4 * width**2 + width * width // 128 + 3 * 4 * width + 128 + mlp + 2 * width
    elif mixer == "mamba2":  # z, x, B, C, dt; taps and bias of x, B, C; A, dt, D of width / 32 heads; norm; out
        heads, wide = width // 32, 2 * width
        projections = width * (wide + wide + 128 + 128 + heads) + wide * width
        depth, block = 48, projections + (4 + 1) * (wide + 128 + 128) + 3 * heads + wide + width
    else:  # q, k of 3/4 and v, gate, o of 3/2 of the width; a, beta; three convolutions; A, dt; norm of a head
        heads, keys, values = 6 * width // 1024, 3 * width // 4, 3 * width // 2
        projections = 2 * width * keys + 3 * width * values + 2 * width * heads
        depth, block = 21, projections + 4 * (2 * keys + values) + 2 * heads + 256 + mlp + 2 * width
    return depth * block + 2 * VOCABULARY * width + width


def test_any_mixer_can_stand_behind_the_quickstart():
    assert set(quickstart.MIXERS) == set(MIXERS)


def plain_config(name: str, mixer: str) -> dict:
    return settings.plain(MODULES[name].get_config(mixer))


def built(name: str, mixer: str):
    """(config, model) as a run has them."""
    config = plain_config(name, mixer)
    return config, settings.build_model(config, types.SimpleNamespace(kind="tokens", vocab_size=VOCABULARY))


@pytest.mark.parametrize("name, mixer", RECIPES)
def test_every_recipe_has_the_parameters_it_says(name, mixer):
    """Config, checks, model."""
    config, model = built(name, mixer)
    settings.check_sections(config)
    settings.check_train(config["train"])
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert count == hand_count(name, mixer)
    assert f"| {mixer} | {count:,} |" in SIZES[name][0].__doc__


@pytest.mark.parametrize("name, mixer", TRACED)
def test_a_training_step_traces_on_a_mesh(name, mixer):
    """Parameters split over a mesh, and a whole step of forward, backward and AdamW: the rest that happens before a run
    compiles."""
    config, model = built(name, mixer)
    mesh = sharding.make_mesh(**MESHES[name])
    settings.check_divisible(config, mesh.shape)
    given = {"total_steps": config["train"]["steps"]}
    optimizer, schedule = settings.section(config, "optim", optim.make_optimizer, given)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(lambda: make_state(model, optimizer, config["seed"]))
        shape = config["data"]["batch_size"], config["data"]["window"]
        batch = {key: jax.ShapeDtypeStruct(shape, jnp.int32) for key in ("tokens", "targets", "segment_ids")}
        batch["mask"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        step = make_step(
            model, optimizer, schedule,
            accumulate=config["train"]["accumulate"], shardings=sharding.state_shardings(mesh, state),
        )  # fmt: skip
        after, report = jax.eval_shape(step, state, batch)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )
    assert report["loss"].shape == () and report["loss"].dtype == jnp.float32


RESULTS = pathlib.Path(__file__).parent.parent / "experiments" / "results"
# By which measured step a recipe's hours are taken: file of RESULTS, label, tokens/s as the recipes print them.
TIMED = {
    "efla": ("lm_340m/throughput.jsonl", "efla, kernels, SiLU in the convolution's", 154410),
    "gated_delta_net": ("nats_l_latency/training.jsonl", "gated_delta_net", 131301),
    "attention": ("nats_l_latency/training.jsonl", "attention", 114419),
    "nats_l_hybrid": (
        "nats_l_latency/training.jsonl",
        "gated_delta_net,gated_delta_net,gated_delta_net,nats_l",
        106057,
    ),
}
BY_SPEED = {"delta_net": "efla", "gated_efla": "gated_delta_net"}  # of lm_340m: the step as long as which theirs is
PEAK = 989.4e12


@functools.cache
def cost(name: str, model: str, vocabulary: int = VOCABULARY) -> tuple[float, float]:
    """(FLOP of training a token, tokens) of a recipe."""
    config = plain_config(name, model)
    built_model = settings.build_model(config, types.SimpleNamespace(kind="tokens", vocab_size=vocabulary))
    data = config["data"]
    per_token = flops.train_flops_per_token(built_model, data["window"])
    return per_token, data["batch_size"] * data["window"] * config["train"]["steps"]


def row_of(name: str, begin: str) -> list[str]:
    (row,) = (line for line in MODULES[name].__doc__.splitlines() if line.startswith(f"| {begin} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_speeds_that_costs_are_taken_by_were_measured():
    """The last of a label counts; the parts of the peak that the recipes print are those of these steps."""
    for file, label, printed in TIMED.values():
        rows = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]
        assert round([row for row in rows if row["label"] == label][-1]["tokens_per_second"]) == printed
    for model, mixer, percent in (("gdn_340m", "gated_delta_net", 29), ("nats_l_hybrid_340m", "nats_l_hybrid", 24)):
        assert round(100 * TIMED[mixer][2] * cost("lm_nats_l", model)[0] / PEAK) == percent
    printed = lm_340m.__doc__ + lm_nats_l.__doc__
    assert all(f"{speed:,}" in printed for *_, speed in TIMED.values())


@pytest.mark.parametrize("name, mixer", RECIPES)
def test_every_recipe_has_the_cost_it_says(name, mixer):
    """GFLOP of a token by count, checked at its leading term, six times the parameters but the embeddings; hours of an
    H200 by measured speed or by 29 % of the peak."""
    per_token, tokens = cost(name, mixer)
    dense = 6 * (hand_count(name, mixer) - VOCABULARY * SIZES[name][1])
    assert dense < per_token < (2.2 if mixer == "attention" else 1.4) * dense
    speed = TIMED.get(BY_SPEED.get(mixer, mixer), (0, 0, 0))[2] if name == "lm_340m" else 0
    hours = tokens / (speed or 0.29 * PEAK / per_token) / 3600
    assert row_of(name, mixer)[2:4] == [f"{per_token / 1e9:.2f}", f"{hours:.0f}"]
    assert speed or "29 %" in MODULES[name].__doc__


@pytest.mark.parametrize("model", lm_nats_l.MODELS)
def test_nats_l_has_the_cost_it_says(model):
    cells = []
    for size in lm_nats_l.SIZES:
        per_token, tokens = cost("lm_nats_l", f"{model}_{size}")
        part = 0.24 if model.startswith("nats_l") else 0.29
        cells += [f"{per_token / 1e9:.2f}", f"{tokens * per_token / (part * PEAK) / 3600:.0f}"]
    assert f"| {model} | {' | '.join(cells)} |" in lm_nats_l.__doc__


def test_the_adaptive_model_has_the_cost_it_says():
    per_token, tokens = cost("lm_log_linear", "adaptive", 50257)
    text = lm_log_linear.__doc__.replace("\n", " ")
    assert f"{per_token / 1e9:.2f} GFLOP a token, {per_token * tokens / 1e16:.1f}e16 FLOP in all" in text


def test_a_few_counts_in_figures():
    """Those that others publish or that fit on a line."""
    assert hand_count("lm_340m", "efla") == 24 * (4194304 + 8192 + 12288 + 128 + 8650752 + 2048) + 65536000 + 1024
    assert hand_count("lm_1b3", "delta_net") == 1365677056  # fla-hub/delta_net-1.3B-100B: 2.73 GB of bfloat16
    published = {"log_linear_gated_delta_net": 795.69, "gated_delta_net": 793, "attention": 693}
    for mixer, millions in published.items():
        assert hand_count("lm_log_linear", mixer) == pytest.approx(1e6 * millions, rel=1e-5 if millions % 1 else 7e-4)
    assert hand_count("lm_log_linear", "attention") + 3 * log_linear_count("attention") == 777856512  # 24 layers: 778M


@pytest.mark.parametrize("name, batch, tokens", [("lm_340m", 2**20, 8e9), ("lm_1b3", 2**21, 50e9)])
def test_published_settings(name, batch, tokens):
    for mixer in SIZES[name][0].OPTIONS:
        config = plain_config(name, mixer)
        data, train = config["data"], config["train"]
        settings.check_divisible(config, sharding.make_mesh(**config["mesh"]).shape)
        assert data["batch_size"] * data["window"] == batch
        assert (train["steps"] - 1) * batch < tokens <= train["steps"] * batch
        assert data["batch_size"] // train["accumulate"] == 8 * 8  # rows of a device, devices
        _, schedule = settings.section(config, "optim", optim.make_optimizer, {"total_steps": train["steps"]})
        assert schedule(1023) == pytest.approx(3e-4) and schedule(train["steps"] - 1) == pytest.approx(3e-5)
        wanted = {"weight_decay": 0.1, "clip_norm": 1.0, "learning_rate": 3e-4, "schedule": "cosine"}
        assert wanted.items() <= config["optim"].items() and config["seed"] == 42
        (options,) = config["model"]["mixer_options"].values()
        if mixer not in ("attention", "mamba2"):  # heads of 128
            assert options.get("head_dim", config["model"]["width"] // options["num_heads"]) == 128


def test_recipes_know_every_mixer_and_refuse_others():
    levels = {name for name in MIXERS if name.startswith("log_linear")}
    for module, *_ in SIZES.values():
        assert set(module.OPTIONS) >= (
            levels if module is lm_log_linear else set(MIXERS) - levels - {"nats_l", "gated_conv"}
        )
        assert module.get_config().model.mixers == (next(iter(module.OPTIONS)),)
        with pytest.raises(ValueError, match="'elfa' is not one of"):
            module.get_config("elfa")


def test_log_linear_settings():
    """16,384 tokens reach all 15 levels and no other; 95,368 steps are 50B tokens; every level field can be set."""
    config = plain_config("lm_log_linear", "log_linear_mamba2")
    data, train, options = config["data"], config["train"], config["model"]["mixer_options"]["log_linear_mamba2"]
    settings.check_divisible(config, {"data": 8, "fsdp": 1, "tensor": 1, "context": 1})
    assert data["batch_size"] * data["window"] == 524288 and data["window"] == 2 ** (options["levels"] - 1)
    assert abs(train["steps"] * 524288 - 50e9) < 524288
    assert data["batch_size"] // train["accumulate"] == 8  # one row a device
    _, schedule = settings.section(config, "optim", optim.make_optimizer, {"total_steps": train["steps"]})
    assert schedule(1023) == pytest.approx(3e-4) and schedule(train["steps"] - 1) == pytest.approx(3e-5)
    for mixer in ("log_linear_mamba2", "log_linear_gated_delta_net", "log_linear_efla"):
        (options,) = plain_config("lm_log_linear", mixer)["model"]["mixer_options"].values()
        fields = dataclasses.fields(LevelOptions)
        defaults = {field.name: field.default for field in fields if field.name not in ("name", "parent")}
        assert defaults == {name: options[name] for name in defaults}


def test_the_adaptive_model_traces():
    config = plain_config("lm_log_linear", "adaptive")
    model = settings.build_model(config, types.SimpleNamespace(kind="tokens", vocab_size=50257))
    tokens = jnp.zeros((2, config["data"]["window"]), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    logits, _ = jax.eval_shape(model.apply, params, tokens)
    assert logits.shape == (2, 512, 50257)
    found = params["params"]["groups"]["block_0"]["mixer"]
    assert found["x_proj"]["kernel"].shape == (6, 512, 512) and found["D"].shape == (6, 8)
    assert {"hidden", "out", "out_bias", "level_proj"} == set(found["level_weights"])
    settings.section(config, "optim", optim.make_optimizer, {"total_steps": config["train"]["steps"]})


@pytest.mark.parametrize("name", (*lm_books.MODELS, *lm_books.ALONE, "adaptive_mamba2"))
def test_the_models_of_books_are_of_one_size(name):
    """About 36M parameters, by hand; 800 steps; softmax layers are 3, 7 and 11."""
    config = settings.plain(lm_books.get_config(name))
    settings.check_train(config["train"])
    settings.check_penalty(config)
    model = settings.build_model(config, types.SimpleNamespace(kind="tokens", vocab_size=VOCABULARY))
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    width, keys, values = 384, 2 * 128, 2 * 256
    # q, k; v, gate, o; beta; taps; norm
    delta = 2 * width * keys + 3 * width * values + 2 * width + 4 * (2 * keys + values) + 256
    gated = delta + 2 * width + 2 * 2  # a; A and dt
    # z, x, o; B, C; dt; taps; A, dt and D; norm
    mamba = 3 * width * 768 + 2 * width * 128 + 12 * width + 5 * (768 + 2 * 128) + 3 * 12 + 768
    mixers = {
        "delta_net": delta,
        "efla": delta,
        "gated_delta_net": gated,
        "gated_efla": gated,
        "mamba2": mamba,
        "log_linear_mamba2": mamba + 12 * 16 * (width + 1),
        "log_linear_gated_delta_net": gated + 2 * 16 * (width + 1),
        "log_linear_efla": delta + 2 * 16 * (width + 1),
        "nats_l": gated - 256 + 2 * 2 * width + 2 * 4 * keys + 2 * (64 + 128),  # routes, merge, norms of 4 heads
        "attention": 4 * width**2 + 2 * 64,
    }
    if name == "adaptive_mamba2":  # an MLP from 16 levels to as many, in place of one scale a head and level
        mixers["log_linear_mamba2"] += -12 * 16 + 2 * 16 * 64 + 64 + 16
    layers = model.mixers * (12 // len(model.mixers))
    assert count == VOCABULARY * width + width + sum(mixers[m] + 3 * width * 1024 + 2 * width for m in layers)
    assert count == pytest.approx(36e6, rel=0.1)
    (row,) = (line for line in lm_books.__doc__.splitlines() if line.startswith(f"| {name} |"))
    assert row.endswith(f"| {count:,} |")
    own = name.replace("adaptive", "log_linear")
    softmax, others, rope_base = lm_books.MODELS.get(name, (own, own, 0.0))
    assert layers == tuple(softmax if layer in (3, 7, 11) else others for layer in range(12))
    assert all(options.get("rope_base", rope_base) == rope_base for options in model.mixer_options.values())
    assert config["data"]["batch_size"] * config["data"]["window"] * config["train"]["steps"] == 104857600
