"""Log-linear Mamba-2 of flash-linear-attention with several groups of heads, converted: logits, text and files.

The reference is that library's layer in float64 numpy, of tensors under its names, with a decay so slow that tokens of
every level count. Some logits that its own model class gave for the same tensors are written out beside it.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from efla_jax.checkpoint.interchange_families import FAMILIES, check_model
from efla_jax.generate import generate
from efla_jax.model import LanguageModel
from efla_jax.train import settings
from experiments import convert, runs
from tests import oracle
from tests.test_convert import CONFIGS, V, assert_equal, conv, drawn, exchange, rms_norm, silu, stored, tensors_of
from tests.test_convert import written as write

NAME = "log_linear_mamba2"
CONFIG = {name: x for name, x in CONFIGS[NAME].items() if name != "layer_norm_epsilon"} | {"norm_eps": 1e-5}
GROUPS, HEADS, STATE, INNER, EPS = 2, 8, 6, 32, 1e-5
PROMPT, NEW = 9, 66  # levels 0 to 7


def arrays_of():
    """Tensors of two layers, drawn; a head remembers hundreds of tokens."""
    arrays = {name: x / 2 for name, x in drawn(tensors_of(NAME)).items()}
    return {name: x - np.float32(6) if name.endswith("A_log") else x for name, x in arrays.items()}


def reads(weights):
    """[T, T] of weights [T, L]: a token reads itself by level 0, and before itself a block of 2^i tokens by level i + 1
    for every bit i of its position, the smallest block nearest."""
    found = np.zeros((len(weights), len(weights)))
    for t, row in enumerate(weights):
        found[t, t], end = row[0], t
        for i in range(len(row) - 1):
            if t >> i & 1:
                found[t, end - 2**i : end] = row[i + 1]
                end -= 2**i
    return found


def mixed(x, w, norms):
    """One layer's mixer, x [T, 16]; norms: how many runs of channels have a norm each."""
    time = len(x)
    ends = np.cumsum([INNER, INNER + 2 * GROUPS * STATE, HEADS])
    z, channels, step, raw = np.split(x @ w["in_proj.weight"].T, ends, axis=1)
    channels = silu(conv(channels, w["conv1d.weight"], w["conv1d.bias"]))
    values, b, c = np.split(channels, [INNER, INNER + GROUPS * STATE], axis=1)
    values, b, c = (y.reshape(time, count, -1) for y, count in ((values, HEADS), (b, GROUPS), (c, GROUPS)))
    step = np.logaddexp(0, step + w["dt_bias"])
    levels = np.logaddexp(0, w["L"] * raw.reshape(time, HEADS, -1))
    log_decay = np.cumsum(-np.exp(w["A_log"]) * step, axis=0)
    outputs = []
    for h in range(HEADS):
        g = h * GROUPS // HEADS
        kept = np.exp(np.minimum(log_decay[:, None, h] - log_decay[None, :, h], 0))
        matrix = c[:, g] @ b[:, g].T * kept * reads(levels[:, h])
        outputs.append(matrix @ (step[:, h, None] * values[:, h]) + w["D"][h] * values[:, h])
    gated = np.concatenate(outputs, axis=1) * silu(z)
    normed = rms_norm(gated.reshape(time, norms, -1), w["norm.weight"].reshape(norms, -1), EPS)
    return normed.reshape(time, -1) @ w["out_proj.weight"].T


def logits_of(arrays, tokens, norms=GROUPS):
    """[T, V] in float64."""
    w = {name: x.astype(np.float64) for name, x in arrays.items()}
    x = w["backbone.embeddings.weight"][tokens]
    for i in range(2):
        own = {name.removeprefix(f"backbone.layers.{i}."): y for name, y in w.items() if f"layers.{i}." in name}
        inner = {name.removeprefix("mixer."): y for name, y in own.items()}
        x = x + mixed(rms_norm(x, own["mixer_norm.weight"], EPS), inner, norms)
        y = rms_norm(x, own["mlp_norm.weight"], EPS)
        y = silu(y @ own["mlp.gate_proj.weight"].T) * (y @ own["mlp.up_proj.weight"].T)
        x = x + y @ own["mlp.down_proj.weight"].T
    return rms_norm(x, w["backbone.norm_f.weight"], EPS) @ w["lm_head.weight"].T


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(tensors, model, parameters, folder) of an import."""
    folder, arrays = tmp_path_factory.mktemp(NAME), arrays_of()
    write(folder / "source", NAME, arrays)
    (folder / "source" / "config.json").write_text(json.dumps(CONFIG))
    exchange("import", folder / "run", source=folder / "source")
    run, config = runs.recorded(folder / "run", "run")
    model = settings.section(config, "model", LanguageModel, {"vocab_size": V})
    return arrays, model, runs.scored_params(run, config, model)[0], folder


def tokens_of():
    return np.random.default_rng(5).integers(0, V, PROMPT + NEW)


# At positions 0, 63, 64 and 74, of the first four tokens: LogLinearMamba2ForCausalLM of flash-linear-attention 0.6.0,
# read from the files of `pair`, on a CPU in float32 with its kernels replaced by the definitions that it has of them.
PUBLISHED = {
    0: [-0.54323, 0.46638, -0.05909, -0.44954],
    63: [-1.66147, -1.03626, -0.10027, 0.15939],
    64: [-1.34643, -1.05459, -0.56422, 0.5027],
    74: [-0.4025, -0.52175, -0.08062, 0.9515],
}


def test_logits_are_theirs(pair):
    arrays, model, params, _ = pair
    tokens = tokens_of()
    wanted = logits_of(arrays, tokens)
    for at, logits in PUBLISHED.items():
        np.testing.assert_allclose(wanted[at, :4], logits, rtol=0, atol=1e-5)  # what they were rounded to
    with jax.default_matmul_precision("highest"):
        logits, _ = jax.jit(model.apply)(params, jnp.asarray(tokens, jnp.int32)[None])
    assert oracle.relative_rms(logits[0], wanted) < 2e-6  # 6.5e-7, in float32
    assert oracle.relative_rms(logits_of(arrays, tokens, 1), wanted) > 0.1  # one norm over all heads is another model


@pytest.mark.parametrize("ending", ["mixer.L", "mixer.in_proj.weight"])
def test_every_level_counts(ending, pair):
    """In these logits: no level's weights could stand in another's place."""
    arrays, tokens = pair[0], tokens_of()
    wanted, name = logits_of(arrays, tokens), f"backbone.layers.0.{ending}"
    columns = arrays[name] if ending == "mixer.L" else arrays[name][-HEADS * 15 :].reshape(HEADS, 15, -1)
    for level in range(7):
        moved = columns.copy()
        moved[:, [level, level + 1]] = columns[:, [level + 1, level]]
        whole = moved if ending == "mixer.L" else np.concatenate(
            [arrays[name][: -HEADS * 15], moved.reshape(HEADS * 15, -1)])  # fmt: skip
        assert oracle.relative_rms(logits_of(arrays | {name: whole}, tokens), wanted) > 1e-3, level


def test_text_token_by_token_is_that_of_the_whole(pair):
    arrays, model, params, _ = pair
    prompt = tokens_of()[:PROMPT]
    with jax.default_matmul_precision("highest"):
        (found,) = generate(model, params, prompt[None].astype(np.int32), max_new_tokens=NEW, greedy=True)
    said = np.concatenate([prompt, found])
    assert logits_of(arrays, said[:-1])[PROMPT - 1 :].argmax(1).tolist() == list(found)
    assert len(set(found)) > 5


def test_files_come_back(pair):
    arrays, _, _, folder = pair
    options = runs.recorded(folder / "run", "run")[1]["model"]["mixer_options"][NAME]
    assert (options["num_groups"], options["norm_groups"], options["levels"]) == (GROUPS, GROUPS, 15)
    exchange("export", folder / "run", to=folder / "back")
    assert_equal(stored(folder / "back"), arrays)
    back = json.loads((folder / "back" / "config.json").read_text())
    assert {name: back.get(name) for name in CONFIG} == CONFIG


@pytest.mark.parametrize(("field", "value", "match"), [
    ("norm_groups", 1, "norm_groups: 1 is not 2, as always in log_linear_mamba2"),
    ("trained_levels", 9, "trained_levels=9, and theirs is always 0 or 15"),
])  # fmt: skip
def test_other_models_are_not_exported(field, value, match, pair):
    """Theirs has a norm for each group, and learned weights for every level of 16384 tokens."""
    model = pair[1]
    model = model.clone(mixer_options={NAME: dict(model.mixer_options[NAME]) | {field: value}})
    whole, mixer = convert.whole_fields(model, NAME)
    with pytest.raises(ValueError, match=match):
        check_model(FAMILIES[NAME], whole, mixer, {NAME}, False)
        FAMILIES[NAME].config(whole, mixer)
