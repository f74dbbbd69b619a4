"""Mamba-2 with several groups of B and C: the two libraries that have it take the norm of its outputs differently."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efla_jax.checkpoint import interchange
from efla_jax.checkpoint import interchange_steps as steps
from efla_jax.checkpoint.interchange_families import FAMILIES
from efla_jax.layers import MIXERS
from efla_jax.model import LanguageModel
from experiments import convert, runs
from tests import oracle
from tests.test_convert import (
    COMMON,
    MAMBA,
    H,
    V,
    assert_equal,
    by_head,
    conv,
    drawn,
    exchange,
    mamba_mixer,
    rms_norm,
    silu,
    stored,
)
from tests.test_convert import written as write

GROUPS, HEADS, STATE, INNER = 2, 8, 6, 32
PLAIN = COMMON | MAMBA | {"model_type": "mamba2", "n_groups": GROUPS}
OWNERS = {"transformers": (PLAIN, 1), "fla": ({**PLAIN, "norm_eps": 1e-5} | {"layer_norm_epsilon": None}, GROUPS)}


def tensors_of_groups():
    layer = {"norm.weight": (H,), **mamba_mixer(GROUPS, 1)}
    around = {"backbone.embeddings.weight": (V, H), "backbone.norm_f.weight": (H,), "lm_head.weight": (V, H)}
    return around | {f"backbone.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}


def mixed(x, w, norms):
    """The definition, from the tensors as both libraries name them; norms: of how many runs of channels."""
    ends = np.cumsum([INNER, INNER + 2 * GROUPS * STATE])
    z, channels, dt = np.split(x @ w["in_proj.weight"].T, ends, axis=1)
    channels = silu(conv(channels, w["conv1d.weight"], w["conv1d.bias"]))
    values, b, key = np.split(channels, [INNER, INNER + GROUPS * STATE], axis=1)
    values, b, key = (y.reshape(len(x), n, -1) for y, n in ((values, HEADS), (b, GROUPS), (key, GROUPS)))
    dt = np.logaddexp(0, dt + w["dt_bias"])
    o = by_head(key, b, dt[..., None] * values, np.zeros_like(dt), -np.exp(w["A_log"]) * dt, np.ones((*dt.shape, 1)))
    o = (o + w["D"][:, None] * values).reshape(len(x), -1) * silu(z)
    o = rms_norm(o.reshape(len(x), norms, -1), np.ones(INNER // norms), 1e-5).reshape(o.shape) * w["norm.weight"]
    return o @ w["out_proj.weight"].T


def logits_of(tensors, tokens, norms):
    w = {name.removesuffix(".weight") if "layers" not in name else name: x.astype(np.float64)
         for name, x in tensors.items()}  # fmt: skip
    x = w["backbone.embeddings"][tokens]
    for i in range(2):
        stem = f"backbone.layers.{i}."
        own = {name.removeprefix(stem): y for name, y in w.items() if name.startswith(stem)}
        inner = {name.removeprefix("mixer."): y for name, y in own.items() if name.startswith("mixer.")}
        x = x + mixed(rms_norm(x, own["norm.weight"], 1e-5), inner, norms)
    return rms_norm(x, w["backbone.norm_f"], 1e-5) @ w["lm_head"].T


@pytest.mark.parametrize("owner", OWNERS)
def test_groups_are_their_definition(owner):
    config, norms = OWNERS[owner]
    model = LanguageModel(vocab_size=V, **FAMILIES["mamba2"].fields(config))
    layout = interchange.lay_out(FAMILIES["mamba2"].table, convert.shapes_of(model))
    assert layout.tensors == tensors_of_groups()
    tensors = {name: x / 2 for name, x in drawn(layout.tensors).items()}
    params = steps.nested(interchange.to_leaves(layout, tensors))
    tokens = np.random.default_rng(5).integers(0, V, 21)
    with jax.default_matmul_precision("highest"):
        logits, _ = jax.jit(model.apply)(params, jnp.asarray(tokens, jnp.int32)[None])
    assert oracle.relative_rms(logits[0], logits_of(tensors, tokens, norms)) < 2e-6  # as other families of that test
    assert oracle.relative_rms(logits[0], logits_of(tensors, tokens, 3 - norms)) > 1e-2  # the other library's


@pytest.mark.parametrize("owner", OWNERS)
def test_they_come_back_as_whose_they_were(owner, tmp_path):
    config, norms = OWNERS[owner]
    config = {name: x for name, x in config.items() if x is not None}
    arrays = drawn(tensors_of_groups())
    write(tmp_path / "source", "mamba2", arrays)
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    exchange("import", tmp_path / "run", source=tmp_path / "source")
    found = runs.recorded(tmp_path / "run", "run")[1]["model"]["mixer_options"]["mamba2"]
    assert (found["num_groups"], found["norm_groups"]) == (GROUPS, norms)
    exchange("export", tmp_path / "run", to=tmp_path / "back")
    assert_equal(stored(tmp_path / "back"), arrays)
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {name: back.get(name) for name in config} == config
    other = "norm_eps" if owner == "transformers" else "layer_norm_epsilon"
    assert other not in back


@pytest.mark.parametrize("change", [{"norm_eps": 1e-5}, {"layer_norm_epsilon": None}])
def test_what_may_be_of_either_is_refused(change):
    with pytest.raises(ValueError, match="n_groups=2: leave one of norm_eps .fla. and layer_norm_epsilon"):
        FAMILIES["mamba2"].fields(PLAIN | change)


def test_norms_of_neither_are_refused():
    with pytest.raises(ValueError, match="norm_groups: 3 does not divide num_heads=8"):
        MIXERS["mamba2"](width=16, num_heads=8, norm_groups=3)
    model = FAMILIES["mamba2"].fields(PLAIN)
    mixer = model["mixer_options"]["mamba2"] | {"norm_groups": 4}
    with pytest.raises(ValueError, match="norm_groups: 4 is neither 1 nor num_groups=2"):
        FAMILIES["mamba2"].config(model, mixer)
