"""Checkpoints of other libraries: the tables against their layouts written out, and both commands, bit for bit."""

import functools
import json
import math
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from efla_jax.checkpoint import Checkpointer, interchange, interchange_tables
from efla_jax.checkpoint import interchange_steps as steps
from efla_jax.checkpoint.interchange_families import FAMILIES, check_config
from efla_jax.checkpoint.interchange_files import INDEX, SINGLE, Reader, create, header_of
from efla_jax.layers import MIXERS
from efla_jax.model import LanguageModel
from experiments import convert, language_runs, runs
from tests import oracle

H, V = 16, 24  # width and vocabulary of the tiny models
COMMON = {"hidden_size": H, "vocab_size": V, "num_hidden_layers": 2, "tie_word_embeddings": False,
          "max_position_embeddings": 32}  # fmt: skip
MAMBA = {"state_size": 6, "head_dim": 4, "num_heads": 8, "expand": 2, "n_groups": 2, "layer_norm_epsilon": 1e-5}
SOFTMAX = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 20, "rms_norm_eps": 1e-5}
CONFIGS = {
    "llama": SOFTMAX | {"head_dim": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}},
    "mistral": SOFTMAX | {"head_dim": 6, "rope_theta": 5e3, "sliding_window": None},
    "qwen3": SOFTMAX | {"head_dim": 8, "rope_theta": 5e3},
    "transformer": {"num_heads": 4, "num_kv_heads": 2, "intermediate_size": 20, "norm_eps": 1e-5, "qk_norm": True},
    "delta_net": {"num_heads": 2, "expand_k": 0.5, "expand_v": 1.5, "intermediate_size": 20, "use_gate": True},
    "gated_deltanet": {"num_heads": 2, "num_v_heads": 4, "head_dim": 3, "expand_v": 5 / 3, "intermediate_size": 20},
    "mamba2": MAMBA | {"n_groups": 1, "residual_in_fp32": True, "time_step_limit": [0.0, math.inf]},
    "log_linear_mamba2": MAMBA | {"residual_in_fp32": False},
}
CONFIGS = {name: COMMON | fields | {"model_type": name} for name, fields in CONFIGS.items()}

# The layouts as the other libraries' models have them: names and shapes of one layer, and of what is around the layers.
PLAIN_MLP = {"mlp.gate_proj.weight": (20, H), "mlp.up_proj.weight": (20, H), "mlp.down_proj.weight": (H, 20)}


def softmax_layer(prefix, norms, head_dim, qk_norm):
    sizes = {"q_proj": (4 * head_dim, H), "k_proj": (2 * head_dim, H), "v_proj": (2 * head_dim, H)}
    sizes |= {"o_proj": (H, 4 * head_dim)} | ({"q_norm": (head_dim,), "k_norm": (head_dim,)} if qk_norm else {})
    layer = {f"{prefix}.{name}.weight": shape for name, shape in sizes.items()}
    return layer | {f"{name}.weight": (H,) for name in norms} | PLAIN_MLP


LLAMA_NORMS, FLA_NORMS = ("input_layernorm", "post_attention_layernorm"), ("attn_norm", "mlp_norm")


def mamba_mixer(groups, per_head):
    """8 heads of 4; `groups` of B and C of 6, and `per_head` columns of in_proj for each head's gates."""
    channels = 32 + 2 * groups * 6
    return {
        "mixer.in_proj.weight": (32 + channels + 8 * per_head, H), "mixer.conv1d.weight": (channels, 1, 4),
        "mixer.conv1d.bias": (channels,), "mixer.dt_bias": (8,), "mixer.A_log": (8,), "mixer.D": (8,),
        "mixer.norm.weight": (32,), "mixer.out_proj.weight": (H, 32),
    }  # fmt: skip


WIDE_MLP = {"mlp.gate_proj.weight": (256, H), "mlp.up_proj.weight": (256, H), "mlp.down_proj.weight": (H, 256)}
NORMS = {"attn_norm.weight": (H,), "mlp_norm.weight": (H,)}
LAYERS = {
    "llama": softmax_layer("self_attn", LLAMA_NORMS, 4, False),
    "mistral": softmax_layer("self_attn", LLAMA_NORMS, 6, False),
    "qwen3": softmax_layer("self_attn", LLAMA_NORMS, 8, True),
    "transformer": softmax_layer("attn", FLA_NORMS, 4, True),
    "delta_net": {  # keys of 8 = 16 x 0.5, values of 24
        "attn.q_proj.weight": (8, H), "attn.k_proj.weight": (8, H), "attn.v_proj.weight": (24, H),
        "attn.b_proj.weight": (2, H), "attn.g_proj.weight": (24, H), "attn.o_proj.weight": (H, 24),
        "attn.q_conv1d.weight": (8, 1, 4), "attn.k_conv1d.weight": (8, 1, 4), "attn.v_conv1d.weight": (24, 1, 4),
        "attn.o_norm.weight": (12,), **NORMS, **PLAIN_MLP,
    },
    "gated_deltanet": {  # two key heads of 3, four value heads of 5
        "attn.q_proj.weight": (6, H), "attn.k_proj.weight": (6, H), "attn.v_proj.weight": (20, H),
        "attn.g_proj.weight": (20, H), "attn.a_proj.weight": (4, H), "attn.b_proj.weight": (4, H),
        "attn.A_log": (4,), "attn.dt_bias": (4,), "attn.o_proj.weight": (H, 20), "attn.o_norm.weight": (5,),
        "attn.q_conv1d.weight": (6, 1, 4), "attn.k_conv1d.weight": (6, 1, 4), "attn.v_conv1d.weight": (20, 1, 4),
        **NORMS, **PLAIN_MLP,
    },
    "mamba2": {"norm.weight": (H,), **mamba_mixer(1, 1)},
    "log_linear_mamba2": {"mixer_norm.weight": (H,), "mlp_norm.weight": (H,), "mixer.L": (8, 15), **mamba_mixer(2, 16),
                          **WIDE_MLP},
}  # fmt: skip
AROUND = {"llama": ("model", "model.embed_tokens", "model.norm"),
          "delta_net": ("model", "model.embeddings", "model.norm"),
          "mamba2": ("backbone", "backbone.embeddings", "backbone.norm_f")}  # fmt: skip
AROUND |= {"mistral": AROUND["llama"], "qwen3": AROUND["llama"], "transformer": AROUND["delta_net"],
           "gated_deltanet": AROUND["delta_net"], "log_linear_mamba2": AROUND["mamba2"]}  # fmt: skip


def tensors_of(family):
    """{name: shape} of a checkpoint of two layers, from the tables of this file."""
    stem, table, norm = AROUND[family]
    layers = {f"{stem}.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYERS[family].items()}
    return {f"{table}.weight": (V, H), f"{norm}.weight": (H,), "lm_head.weight": (V, H)} | layers


def drawn(shapes, seed=0):
    """Random float32 arrays, no two entries alike."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def written(folder: Path, family, arrays=None, codes=None, largest=10**9, config=None):
    """A checkpoint in `folder`, and its arrays."""
    folder.mkdir(parents=True)
    arrays = drawn(tensors_of(family)) if arrays is None else arrays
    codes = codes or {}
    files = create(folder, {name: (codes.get(name, "F32"), x.shape) for name, x in arrays.items()}, largest)
    for name, x in arrays.items():
        files[name][...] = x
    arrays = {name: np.array(x) for name, x in files.items()}  # in the dtypes of the file
    (folder / "config.json").write_text(json.dumps(CONFIGS[family] | (config or {})))
    return arrays


def exchange(command, run, **options):
    """A command of experiments.convert; options without a value are True."""
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]
    convert.main([command, f"--run={run}", *words])


def stored(folder: Path):
    reader = Reader(folder)
    return {name: np.array(reader[name]) for name in reader.shapes}


def assert_equal(found, wanted):
    """The same names, dtypes and bits."""
    assert set(found) == set(wanted)
    for name, x in wanted.items():
        assert found[name].dtype == x.dtype and steps.same(found[name], x), name


def model_of(family):
    section = FAMILIES[family].fields(CONFIGS[family])
    return LanguageModel(vocab_size=V, **section)


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_are_the_layouts_and_undo_themselves(family):
    shapes = convert.shapes_of(model_of(family))
    layout = interchange.lay_out(FAMILIES[family].table, shapes)
    assert layout.tensors == tensors_of(family)
    tensors, leaves = drawn(layout.tensors), drawn(shapes, 1)
    assert_equal(interchange.to_tensors(layout, interchange.to_leaves(layout, tensors)), tensors)
    assert_equal(interchange.to_leaves(layout, interchange.to_tensors(layout, leaves)), leaves)


@pytest.mark.parametrize("family", FAMILIES)
def test_import_and_export_give_the_same_bits(family, tmp_path):
    arrays = written(tmp_path / "source", family)
    exchange("import", tmp_path / "run", source=tmp_path / "source")
    folder, config = runs.recorded(tmp_path / "run", "run")
    model = model_of(family)
    params, _ = runs.scored_params(folder, config, model)
    layout = interchange.lay_out(FAMILIES[family].table, convert.shapes_of(model))
    assert_equal({name: np.asarray(x) for name, x in steps.flat(params).items()}, interchange.to_leaves(layout, arrays))
    assert not (folder / "scratch").exists() and not (tmp_path / "run.partial").exists()

    exchange("export", folder, to=tmp_path / "back")
    assert_equal(stored(tmp_path / "back"), arrays)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {name: config[name] for name in CONFIGS[family]} == CONFIGS[family]
    assert config["architectures"] == [FAMILIES[family].architecture] and config["dtype"] == "float32"


def test_columns_of_in_proj_are_z_x_b_c_dt(tmp_path):
    tensors = drawn(tensors_of("mamba2"))
    layout = interchange.lay_out(FAMILIES["mamba2"].table, convert.shapes_of(model_of("mamba2")))
    mixer = {name.rpartition("mixer/")[2]: x[1] for name, x in interchange.to_leaves(layout, tensors).items()
             if "/mixer/" in name}  # fmt: skip
    whole = tensors["backbone.layers.1.mixer.in_proj.weight"]
    ends = {"z": (0, 32), "x": (32, 64), "B": (64, 70), "C": (70, 76), "dt": (76, 84)}
    for name, (start, stop) in ends.items():
        np.testing.assert_array_equal(mixer[f"{name}_proj/kernel"], whole[start:stop].T)
    taps = tensors["backbone.layers.1.mixer.conv1d.weight"]
    np.testing.assert_array_equal(mixer["B_conv/weight"][3], taps[32:38, 0, 3])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def qwen3_next_layer(x, w, G, R, K, D, eps):
    """The Gated DeltaNet layer of Qwen3-Next in float64, from its own tensors: G key heads with R value heads each, of
    K and D channels; eps is added to the squares of keys and queries. x [T, H] -> [T, H]."""
    w, T = {name: a.astype(np.float64) for name, a in w.items()}, len(x)
    groups = (x @ w["in_proj_qkvz.weight"].T).reshape(T, G, 2 * K + 2 * R * D)
    q, k, v, z = np.split(groups, [K, 2 * K, 2 * K + R * D], axis=2)
    b, a = np.split((x @ w["in_proj_ba.weight"].T).reshape(T, G, 2 * R), 2, axis=2)
    mixed = np.concatenate([y.reshape(T, -1) for y in (q, k, v)], axis=1)
    taps = w["conv1d.weight"][:, 0]
    padded = np.concatenate([np.zeros((3, mixed.shape[1])), mixed])
    mixed = sum(padded[i : i + T] * taps[:, i] for i in range(4))
    mixed *= sigmoid(mixed)
    q, k, v = np.split(mixed, [G * K, 2 * G * K], axis=1)
    q, k, v = q.reshape(T, G, K), k.reshape(T, G, K), v.reshape(T, G * R, D)
    q, k = (np.repeat(y / np.sqrt((y**2).sum(2, keepdims=True) + eps), R, axis=1) for y in (q, k))
    beta, decay = sigmoid(b.reshape(T, -1)), np.logaddexp(0, a.reshape(T, -1) + w["dt_bias"])
    decay = np.exp(-np.exp(w["A_log"]) * decay)
    state, outputs = np.zeros((G * R, K, D)), []
    for t in range(T):
        state *= decay[t][:, None, None]
        wrong = v[t] - np.einsum("hk,hkd->hd", k[t], state)
        state += np.einsum("hk,hd->hkd", k[t], beta[t][:, None] * wrong)
        outputs.append(np.einsum("hk,hkd->hd", q[t] / np.sqrt(K), state))
    o = np.stack(outputs)
    o = o / np.sqrt((o**2).mean(2, keepdims=True) + 1e-6) * w["norm.weight"]
    z = z.reshape(o.shape)
    return (o * z * sigmoid(z)).reshape(T, -1) @ w["out_proj.weight"].T


QWEN = {"hidden_size": H, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3,
        "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6}  # fmt: skip


def test_layer_of_qwen3_next_is_its_definition():
    """Pitfall 94: two key heads for four value heads, with sizes that no other order of rows could fit by chance."""
    mixer = MIXERS["gated_delta_net"](**interchange_tables.qwen_mixer(QWEN))
    x = jax.random.normal(jax.random.key(3), (1, 11, H))
    shapes = steps.flat(jax.eval_shape(mixer.init, jax.random.key(0), x))
    shapes = {name: leaf.shape for name, leaf in shapes.items()}
    layout = interchange.lay_out(interchange_tables.QWEN3_NEXT, shapes, key_heads=2)
    assert layout.tensors["in_proj_qkvz.weight"] == (52, H) and layout.tensors["in_proj_ba.weight"] == (8, H)
    tensors = {name: a / 4 for name, a in drawn(layout.tensors).items()}
    leaves = interchange.to_leaves(layout, tensors)
    assert_equal(interchange.to_tensors(layout, leaves), tensors)

    def apply(leaves):
        return np.asarray(jax.jit(mixer.apply)(steps.nested(leaves), x)[0][0], np.float64)

    wanted, theirs = (qwen3_next_layer(np.asarray(x[0], np.float64), tensors, 2, 2, 3, 5, eps) for eps in (0, 1e-6))
    np.testing.assert_allclose(apply(leaves), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    # The 1e-6 that only theirs adds to |k|^2 and |q|^2 changes these outputs by 1.5e-4 of the largest, in float64.
    np.testing.assert_allclose(apply(leaves), theirs, rtol=0, atol=2e-4 * np.abs(wanted).max())
    # The reorder of value heads left out, as if the rows were not grouped by key head, is another function.
    flat_layout = interchange.lay_out(
        [row._replace(per_key_head=False) for row in interchange_tables.QWEN3_NEXT], shapes, key_heads=2
    )
    assert np.abs(apply(interchange.to_leaves(flat_layout, tensors)) - wanted).max() > 0.1 * np.abs(wanted).max()


def silu(x):
    return x * sigmoid(x)


def rms_norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def conv(x, taps, bias=0.0):
    """A causal depthwise Conv1d of torch, taps [C, 1, W], over x [T, C]."""
    width = taps.shape[2]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    return bias + sum(padded[i : i + len(x)] * taps[:, 0, i] for i in range(width))


def by_head(q, k, u, erase, log_decay, weights):
    """The recurrence of every head, q, k [T, G, K], u [T, H, V], gates [T, H], weights [T, H, L]."""
    repeats = u.shape[1] // k.shape[1]
    heads = [oracle.fenwick_parallel(q[:, h // repeats], k[:, h // repeats], u[:, h], erase[:, h], log_decay[:, h],
                                     weights[:, h]) for h in range(u.shape[1])]  # fmt: skip
    return np.stack(heads, axis=1)


def fla_delta(x, w, c, gated):
    """DeltaNet or Gated DeltaNet of fla: unit queries over sqrt(K), |.|^2 + 1e-6."""
    q, k, v = (silu(conv(x @ w[f"{n}_proj.weight"].T, w[f"{n}_conv1d.weight"])) for n in "qkv")
    heads = c["num_heads"]
    q, k = (y.reshape(len(x), heads, -1) for y in (q, k))
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    v = v.reshape(len(x), c.get("num_v_heads", heads), -1)
    beta, decay = sigmoid(x @ w["b_proj.weight"].T), np.zeros(v.shape[:2])
    if gated:
        decay = -np.exp(w["A_log"]) * np.logaddexp(0, x @ w["a_proj.weight"].T + w["dt_bias"])
    o = by_head(q / np.sqrt(q.shape[2]), k, beta[..., None] * v, beta, decay, np.ones((*beta.shape, 1)))
    o = rms_norm(o, w["o_norm.weight"], 1e-6) * silu(x @ w["g_proj.weight"].T).reshape(o.shape)
    return o.reshape(len(x), -1) @ w["o_proj.weight"].T


def fla_softmax(x, w, c):
    """Attention of fla's transformer: norms of q and k, then rotary positions by halves of a head."""
    q, k, v = (np.split(x @ w[f"{n}_proj.weight"].T, c["num_heads" if n == "q" else "num_kv_heads"], 1) for n in "qkv")
    half = q[0].shape[1] // 2
    angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)

    def turned(y, scale):
        a, b = np.split(rms_norm(y, scale, c["norm_eps"]), 2, axis=1)
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1)

    outputs = []
    for h, one in enumerate(q):
        at = h // (c["num_heads"] // c["num_kv_heads"])
        scores = turned(one, w["q_norm.weight"]) @ turned(k[at], w["k_norm.weight"]).T / np.sqrt(2 * half)
        scores = np.exp(np.where(np.tri(len(x)) > 0, scores, -np.inf))
        outputs.append(scores / scores.sum(1, keepdims=True) @ v[at])
    return np.concatenate(outputs, axis=1) @ w["o_proj.weight"].T


MIX = {
    "delta_net": functools.partial(fla_delta, gated=False), "gated_deltanet": functools.partial(fla_delta, gated=True),
    "transformer": fla_softmax,
}  # fmt: skip


def fla_logits(family, tensors, tokens):
    """Logits [T, V] in float64 of a model of fla, from its own tensors."""
    w, c = {name: x.astype(np.float64) for name, x in tensors.items()}, CONFIGS[family]
    stem, table, norm = AROUND[family]
    eps, x = c.get("norm_eps", 1e-6), w[f"{table}.weight"][tokens]
    for i in range(2):
        own = {name.removeprefix(f"{stem}.layers.{i}."): y for name, y in w.items() if f"layers.{i}." in name}
        inner = {name.removeprefix("attn."): y for name, y in own.items() if name.startswith("attn.")}
        x = x + MIX[family](rms_norm(x, own["attn_norm.weight"], eps), inner, c)
        y = rms_norm(x, own["mlp_norm.weight"], eps)
        y = silu(y @ own["mlp.gate_proj.weight"].T) * (y @ own["mlp.up_proj.weight"].T)
        x = x + y @ own["mlp.down_proj.weight"].T
    return rms_norm(x, w[f"{norm}.weight"], eps) @ w["lm_head.weight"].T


@pytest.mark.parametrize("family", MIX)
def test_converted_models_of_fla_are_their_definition(family):
    """What transformers has no code for (the rest: test_parity_hf.py, test_convert_log_linear.py), from the tensors as
    fla names them."""
    model, tokens = model_of(family), np.random.default_rng(5).integers(0, V, 21)
    layout = interchange.lay_out(FAMILIES[family].table, convert.shapes_of(model))
    tensors = {name: x / 2 for name, x in drawn(layout.tensors).items()}
    params = steps.nested(interchange.to_leaves(layout, tensors))
    with jax.default_matmul_precision("highest"):
        logits, _ = jax.jit(model.apply)(params, jnp.asarray(tokens, jnp.int32)[None])
    # Measured up to 5e-7 in float32, and 1.7e-5 where 1e-6 is added to |q|^2 and |k|^2 there and not here.
    tolerance = 5e-5 if "delta" in family else 2e-6
    assert oracle.relative_rms(logits[0], fla_logits(family, tensors, tokens)) < tolerance


def test_published_sizes():
    """Parameters of fla's default models, as their formulas give them: 1,365,677,056 is the 2.73 GB file of 1.3B."""

    def count(family, config):
        model = LanguageModel(vocab_size=32000, **FAMILIES[family].fields({"vocab_size": 32000, **config}))
        layout = interchange.lay_out(FAMILIES[family].table, convert.shapes_of(model))
        return steps.size_of(layout.tensors)

    assert count("delta_net", {"hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 16}) == 1_365_677_056
    assert count("gated_deltanet", {"hidden_size": 2048, "num_hidden_layers": 21, "num_heads": 6}) == 1_387_348_732


def test_epsilon_of_the_outputs_is_that_of_divided_queries():
    fields = FAMILIES["gated_deltanet"].fields(COMMON | {"num_heads": 2, "head_dim": 64, "norm_eps": 1e-6})
    assert fields["norm_eps"] == 1e-6
    assert fields["mixer_options"]["gated_delta_net"]["norm_eps"] == pytest.approx(6.4e-5)


def test_shards_and_dtypes_come_back_as_they_were(tmp_path):
    """bfloat16 with gates in float32 and a norm in float16, in several files (pitfall 95: weights of 1e-3 too)."""
    names = tensors_of("mamba2")
    codes = {name: "F32" if name.endswith(("A_log", "dt_bias")) else "BF16" for name in names}
    codes["backbone.norm_f.weight"] = "F16"
    arrays = drawn(names)
    arrays["backbone.layers.0.norm.weight"][:] = 1e-3
    arrays = written(tmp_path / "source", "mamba2", arrays, codes, largest=4000, config={"torch_dtype": "bfloat16"})
    assert (tmp_path / "source" / INDEX).is_file() and not (tmp_path / "source" / SINGLE).exists()
    exchange("import", tmp_path / "run", source=tmp_path / "source")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["dtype"] == "bfloat16"
    exchange("export", tmp_path / "run", to=tmp_path / "back", shard_bytes=5000)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 2
    assert_equal(stored(tmp_path / "back"), arrays)
    exchange("export", tmp_path / "run", to=tmp_path / "narrow", dtype="bfloat16")
    narrow = stored(tmp_path / "narrow")
    assert_equal(narrow, {name: x.astype(ml_dtypes.bfloat16) for name, x in arrays.items()})
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in arrays.values())


def test_tied_embeddings(tmp_path):
    arrays = drawn(tensors_of("llama"))
    arrays.pop("lm_head.weight")
    tie = {"tie_word_embeddings": True}
    arrays = written(tmp_path / "tied", "llama", arrays, config=tie)
    exchange("import", tmp_path / "run", source=tmp_path / "tied")
    exchange("export", tmp_path / "run", to=tmp_path / "back")
    assert_equal(stored(tmp_path / "back"), arrays)
    # A head of its own, at either end, and back.
    twice = arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"]}
    exchange("export", tmp_path / "run", to=tmp_path / "untied", untie=True)
    assert_equal(stored(tmp_path / "untied"), twice)
    assert json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"] is False
    exchange("import", tmp_path / "apart", source=tmp_path / "tied", untie=True)
    exchange("export", tmp_path / "apart", to=tmp_path / "two")
    assert_equal(stored(tmp_path / "two"), twice)
    exchange("export", tmp_path / "apart", to=tmp_path / "one", tie=True)
    assert_equal(stored(tmp_path / "one"), arrays)
    # Both in the files, equal; only the head; and both, but different.
    written(tmp_path / "both", "llama", twice, config=tie)
    exchange("import", tmp_path / "from_both", source=tmp_path / "both")
    head = {name.replace("model.embed_tokens", "lm_head"): x for name, x in arrays.items()}
    written(tmp_path / "head", "llama", head, config=tie)
    exchange("import", tmp_path / "from_head", source=tmp_path / "head")
    for run in ("from_both", "from_head"):
        exchange("export", tmp_path / run, to=tmp_path / f"{run}_back")
        assert_equal(stored(tmp_path / f"{run}_back"), arrays)
    written(tmp_path / "differ", "llama", config=tie)
    with pytest.raises(SystemExit, match="cannot be tied"):
        exchange("import", tmp_path / "never", source=tmp_path / "differ")
    exchange("import", tmp_path / "differing", source=tmp_path / "differ", untie=True)
    with pytest.raises(SystemExit, match="the head and the table of embeddings differ"):
        exchange("export", tmp_path / "differing", to=tmp_path / "never", tie=True)


def test_missing_and_unused_tensors_are_listed(tmp_path):
    arrays = drawn(tensors_of("delta_net"))
    lost = [name for name in arrays if name.endswith(("q_proj.weight", "layers.1.mlp_norm.weight"))]
    for name in lost:
        del arrays[name]
    arrays |= {"model.res_norm.weight": np.ones(3, np.float32), "model.norm.weight": np.ones(H + 1, np.float32)}
    written(tmp_path / "source", "delta_net", arrays)
    with pytest.raises(SystemExit) as error:
        exchange("import", tmp_path / "run", source=tmp_path / "source")
    for name in lost:
        assert f"{name} [" in str(error.value)
    assert str(error.value).count(": missing") == 3
    assert "model.res_norm.weight [3]: not used" in str(error.value)
    assert f"model.norm.weight: [{H + 1}] there, [{H}] by the config" in str(error.value)
    assert not (tmp_path / "run").exists()


REFUSED_CONFIGS = {
    ("llama", "attention_bias", True): "attention_bias=True",
    ("llama", "rope_scaling", ("rope_type", "llama3")): "positions are rescaled",
    ("mistral", "sliding_window", 8): "sliding_window=8 limits",
    ("delta_net", "attn", ("layers", 1)): "attn=",
    ("delta_net", "qk_norm", "sum"): "qk_norm='sum'",
    ("gated_deltanet", "hidden_act", "relu"): "hidden_act='relu'",
    ("mamba2", "use_bias", True): "use_bias=True",
    ("mamba2", "time_step_limit", (0.001, 0.1)): "clipped",
    ("log_linear_mamba2", "n_groups", None): "n_groups is missing",
    ("log_linear_mamba2", "n_groups", 2.0): r"n_groups=2\.0 is not a whole number",
    ("mamba2", "norm_eps", 1e-6): "layer_norm_epsilon and norm_eps differ",
}


@pytest.mark.parametrize("case", REFUSED_CONFIGS, ids=lambda case: f"{case[0]}-{case[1]}")
def test_what_a_config_says_and_ours_cannot_do_is_named(case):
    family, name, value = case
    value = dict([value]) if name in ("attn", "rope_scaling") else value
    config = CONFIGS[family] | {name: value}
    if name == "rope_scaling":
        config.pop("rope_parameters")
    with pytest.raises(ValueError, match=REFUSED_CONFIGS[case]):
        check_config(FAMILIES[family], config)
        FAMILIES[family].fields(config)


def test_damaged_and_absent_files(tmp_path):
    written(tmp_path / "source", "llama")
    file = tmp_path / "source" / SINGLE
    content = file.read_bytes()

    def refused(match, **options):
        with pytest.raises(SystemExit, match=match):
            exchange("import", tmp_path / "run", **({"source": tmp_path / "source"} | options))

    for cut in (4, 100, len(content) - 1):
        file.write_bytes(content[:cut])
        refused("download it again")
    file.write_bytes((3).to_bytes(8, "little") + b"{{{" + content)
    refused("its header cannot be read")
    file.unlink()
    refused("is not there")
    (tmp_path / "source" / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    refused("model-00001-of-00001.safetensors is not there")
    refused("neither a file or folder, nor a name on the hub", source="nothing_here")
    refused("--family: 'gpt2' is not one of .*; name the one it is made like as --family", family="gpt2")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    refused("config.json: model_type 'gpt2' is not one of")
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    (tmp_path / "source" / "config.json").unlink()
    refused("no config.json")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    written(tmp_path / "other", "llama")
    refused("is there already", source=tmp_path / "other")
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_an_interrupted_import_is_made_anew(tmp_path, monkeypatch):
    arrays = written(tmp_path / "source", "llama")
    with monkeypatch.context() as patch:
        patch.setattr(steps, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            exchange("import", tmp_path / "run", source=tmp_path / "source")
    assert not (tmp_path / "run").exists() and (tmp_path / "run.partial").is_dir()
    exchange("import", tmp_path / "run", source=tmp_path / "source")
    exchange("export", tmp_path / "run", to=tmp_path / "back")
    assert_equal(stored(tmp_path / "back"), arrays)


def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    written(tmp_path / "source", "llama")
    usage = convert.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(convert.shutil, "disk_usage", lambda _: usage._replace(free=8 * 4304 - 1))
        with pytest.raises(SystemExit, match="are written there at most and 0.0 GB are free"):
            exchange("import", tmp_path / "run", source=tmp_path / "source")
        assert not list((tmp_path / "run.partial").iterdir())
        patch.setattr(convert.shutil, "disk_usage", lambda _: usage._replace(free=8 * 4304))
        exchange("import", tmp_path / "run", source=tmp_path / "source")


def test_a_write_that_fails_names_the_folder(tmp_path):
    """What a full disk or a limit says has no name of its own."""
    with pytest.raises(OSError, match="--to=.*/out: File too large while .*/out.partial was written; begin again"):
        with convert.building(tmp_path / "out", "to", 1):
            raise OSError(27, "File too large")
    with pytest.raises(OSError, match="names itself"):
        with convert.building(tmp_path / "out", "to", 1):
            raise OSError("names itself")
    assert not (tmp_path / "out").exists()


def test_a_file_that_does_not_take_what_is_written_is_noticed(tmp_path, monkeypatch):
    written(tmp_path / "source", "llama")
    exchange("import", tmp_path / "run", source=tmp_path / "source")
    monkeypatch.setattr(interchange, "write", lambda place, leaf, tensor: None)
    with pytest.raises(SystemExit, match="does not hold what was written"):
        exchange("export", tmp_path / "run", to=tmp_path / "back")
    assert not (tmp_path / "back").exists()


TEMPLATE = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"type": "TemplateProcessing", "single": [
    {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}]}  # fmt: skip


@pytest.mark.parametrize("case", ["template", "no template", "told not to"])
def test_tokenizer_travels_and_says_how_texts_begin(case, tmp_path):
    config = {"bos_token_id": 1, "eos_token_id": [2, 3]}
    written(tmp_path / "source", "llama", config=config)
    content = {"post_processor": None if case == "no template" else TEMPLATE}
    told = {"add_bos_token": False} if case == "told not to" else {}
    files = {"tokenizer.json": content, "tokenizer_config.json": told, "generation_config.json": config}
    for name, value in files.items():
        (tmp_path / "source" / name).write_text(json.dumps(value))
    exchange("import", tmp_path / "run", source=tmp_path / "source")
    exchange("export", tmp_path / "run", to=tmp_path / "back")
    for name in files:
        texts = {(tmp_path / folder / name).read_text() for folder in ("source", "run", "back")}
        assert len(texts) == 1
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == [2, 3]
    # What evaluation and generation read of it.
    folder, record = runs.recorded(tmp_path / "run", "run")
    known = language_runs.vocabulary_of(folder, record)
    assert (known["vocab_size"], known["eos_id"], known["bos_id"]) == (V, 2, 1 if case == "template" else -1)
    assert language_runs.found_tokenizer(folder, known["sha256"]) == str(folder / "tokenizer.json")
    chosen = types.SimpleNamespace(run=folder)
    # The tokenizer has fewer entries than the table has rows, as published ones often do.
    run = language_runs.trained(chosen, record, folder, V - 5, known["sha256"])
    logits, _ = run.model.apply(run.params, jnp.arange(6)[None])
    assert logits.shape == (1, 6, V) and bool(jnp.all(jnp.isfinite(logits)))


def test_runs_that_were_trained_here_are_exported(tmp_path):
    """Two epsilons where the other library has one are said; patterns, options and mixers that it lacks are refused."""

    def trained(name, mixers, options, **model):
        fields = {"width": H, "depth": 2, "mixers": mixers, "mixer_options": options, "mlp_width": 20} | model
        built = LanguageModel(vocab_size=V, **fields)
        leaves = drawn(convert.shapes_of(built))
        steps.save(tmp_path / name / "checkpoints", leaves, {"tokenizer": "bytes"})
        record = {"data": {"kind": "text"}, "optim": {"ema_decay": 0.0}, "model": fields}
        (tmp_path / name / "config.json").write_text(json.dumps(record))
        return tmp_path / name, leaves

    run, leaves = trained("delta", ("delta_net",), {"delta_net": {"num_heads": 2}})
    with pytest.raises(SystemExit, match=r"norm_eps: 1e-06 in the mixer's norm.*8e-06.*--inexact"):
        exchange("export", run, to=tmp_path / "out")
    exchange("export", run, to=tmp_path / "out", inexact=True)
    layout = interchange.lay_out(FAMILIES["delta_net"].table, {path: x.shape for path, x in leaves.items()})
    assert_equal(interchange.to_leaves(layout, stored(tmp_path / "out")), leaves)
    exact, _ = trained("exact", ("delta_net",), {"delta_net": {"num_heads": 2, "norm_eps": 8e-6}})
    exchange("export", exact, to=tmp_path / "exact_out")

    def refused(match, *arguments, **model):
        run, _ = trained(f"run{len(list(tmp_path.iterdir()))}", *arguments, **model)
        with pytest.raises(SystemExit, match=match):
            exchange("export", run, to=tmp_path / "never", inexact=True)

    refused("no family is made of efla; .*have one mixer, of attention,", ("efla",), {"efla": {"num_heads": 2}})
    for option, value in (("beta_activation", "softplus"), ("negative_eigenvalues", True)):
        refused(f"{option}={value!r}", ("delta_net",), {"delta_net": {"num_heads": 2, option: value}})
    refused("norm='layer'", ("attention",), {"attention": {"num_heads": 2}}, norm="layer")
    both = {"attention": {"num_heads": 2}, "mamba2": {"num_heads": 2}}
    refused("no family is made of attention and mamba2;", ("mamba2", "attention"), both)


def test_what_stands_in_older_files(tmp_path):
    """A table under its first name, frequencies of rotary positions, and numbers of 64 bits; one file by itself."""
    arrays = written(tmp_path / "mamba2", "mamba2")
    old = {name.replace("embeddings", "embedding"): x for name, x in arrays.items()}
    written(tmp_path / "old", "mamba2", old)
    exchange("import", tmp_path / "run", source=tmp_path / "old" / SINGLE)
    exchange("export", tmp_path / "run", to=tmp_path / "back")
    assert_equal(stored(tmp_path / "back"), arrays)
    arrays = drawn(tensors_of("llama"))
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    written(tmp_path / "llama", "llama", arrays | buffer, {"model.norm.weight": "F64"})
    exchange("import", tmp_path / "rotary", source=tmp_path / "llama")
    exchange("export", tmp_path / "rotary", to=tmp_path / "plain", dtype="float32")
    assert_equal(stored(tmp_path / "plain"), arrays)


def test_numbers_that_a_dtype_cannot_hold_are_said(tmp_path):
    arrays = drawn(tensors_of("llama"))
    arrays["model.norm.weight"][3] = 7e4
    written(tmp_path / "source", "llama", arrays)
    exchange("import", tmp_path / "run", source=tmp_path / "source")
    with pytest.raises(SystemExit, match="model.norm.weight: 70000 is beyond float16"):
        exchange("export", tmp_path / "run", to=tmp_path / "back", dtype="float16")
    assert not (tmp_path / "back").exists()
    exchange("export", tmp_path / "run", to=tmp_path / "back", dtype="bfloat16")


def test_the_average_is_exported_where_a_run_kept_one(tmp_path):
    options = {"attention": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4}}
    fields = {"width": H, "depth": 2, "mixers": ("attention",), "mixer_options": options, "mlp_width": 20}
    leaves = drawn(convert.shapes_of(LanguageModel(vocab_size=V, **fields)))
    average = {path: x + 1 for path, x in leaves.items()}
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpointer:
        state = {"params": steps.nested(leaves), "opt_state": {"ema": steps.nested(average)}}
        checkpointer.save(7, state, None, {})
    record = {"data": {"kind": "text"}, "optim": {"ema_decay": 0.9}, "model": fields}
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    tokenizer = tmp_path / "my.json"
    tokenizer.write_text("{}")
    exchange("export", tmp_path / "run", to=tmp_path / "out", tokenizer=tokenizer)
    layout = interchange.lay_out(FAMILIES["llama"].table, {path: x.shape for path, x in leaves.items()})
    assert_equal(interchange.to_leaves(layout, stored(tmp_path / "out")), average)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["eos_token_id"] is None and config["vocab_size"] == V


def test_a_leaf_without_a_place_is_named():
    shapes = convert.shapes_of(model_of("delta_net")) | {"groups/block_0/mixer/b_bias": (2, 2)}
    with pytest.raises(ValueError, match="no place for groups/block_0/mixer/b_bias"):
        interchange.lay_out(FAMILIES["delta_net"].table, shapes)
    lacking = convert.shapes_of(model_of("mamba2"))
    lacking.pop("groups/block_0/mixer/B_conv/bias")
    with pytest.raises(ValueError, match="the model has no groups/block_0/mixer/B_conv/bias"):
        interchange.lay_out(FAMILIES["mamba2"].table, lacking)


def test_patterns_of_several_blocks_count_layers_in_order():
    options = {"attention": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4}}
    two = LanguageModel(vocab_size=V, width=H, depth=4, mixers=("attention", "attention"), mixer_options=options)
    layout = interchange.lay_out(FAMILIES["llama"].table, convert.shapes_of(two))
    where = {(place.leaf, place.group): place.tensor for place in layout.places}
    for layer in range(4):
        leaf = f"groups/block_{layer % 2}/mixer/q_proj/kernel"
        assert where[leaf, layer // 2] == f"model.layers.{layer}.self_attn.q_proj.weight"


def test_headers_are_aligned_and_exact(tmp_path):
    arrays = create(tmp_path, {"a": ("BF16", (3,)), "b": ("F32", (2, 2)), "c": ("F64", ())}, 10**9)
    for name, value in zip("abc", (1, 2, 3), strict=True):
        arrays[name][...] = value
    header, start = header_of(tmp_path / SINGLE)
    assert start % 8 == 0 and [header[name]["data_offsets"][0] for name in "cba"] == [0, 8, 24]
    assert (tmp_path / SINGLE).stat().st_size == start + 30
    found = stored(tmp_path)
    assert {name: np.unique(x).tolist() for name, x in found.items()} == {"a": [1], "b": [2], "c": [3]}


def test_names_on_the_hub_are_fetched(tmp_path, monkeypatch):
    arrays = written(tmp_path / "cache", "llama")
    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = lambda name, allow_patterns: str(tmp_path / "cache") if name == "who/what" else 1 / 0
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", hub)
    exchange("import", tmp_path / "run", source="who/what")
    exchange("export", tmp_path / "run", to=tmp_path / "back")
    assert_equal(stored(tmp_path / "back"), arrays)
    with pytest.raises(SystemExit, match="the hub gave no checkpoint"):
        exchange("import", tmp_path / "other", source="who/else")


def test_a_folder_of_another_library_is_no_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="python -m experiments.convert import first"):
        runs.recorded(tmp_path, "run")


@pytest.mark.parametrize("content, message", [("{", "not JSON"), ("[1]", "holds a list"), (b"\xff", "not JSON")])
def test_a_damaged_config_is_named(content, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    for words in (["import", f"--source={tmp_path}", "--run=never"], ["export", f"--run={tmp_path}", "--to=never"]):
        with pytest.raises(SystemExit, match=f"{re.escape(str(file))}: {message}"):
            convert.main(words)


def test_a_damaged_row_of_a_sweep_is_named(tmp_path):
    (tmp_path / "results.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match=r"results\.jsonl, line 1: not JSON"):
        runs.ended_runs(tmp_path, "mad")


def test_a_tokenizer_that_is_not_there_is_said_before_anything_is_written(tmp_path, capsys):
    words = ["import", f"--source={tmp_path}", f"--run={tmp_path / 'run'}", "--tokenizer=no_such_file"]
    with pytest.raises(SystemExit):
        convert.main(words)
    assert "--tokenizer: no_such_file: neither a file nor a folder" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
