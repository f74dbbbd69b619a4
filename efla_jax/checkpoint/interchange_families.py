"""The families of checkpoints that are exchanged with other libraries: names of tensors, and fields of config.json.

Of flash-linear-attention (fla): delta_net, gated_deltanet, mamba2, log_linear_mamba2, transformer. Of transformers:
llama, mistral, qwen3, and mamba2, whose tensors are those of fla; a config.json for it is written with the names of
both. Gated DeltaNet layers of Qwen3-Next and Qwen3.5 are exchanged one by one (QWEN3_NEXT, QWEN3_5).

Queries of the delta rule: fla and Qwen divide them by sqrt(K) and ours are of unit length, so that the norm of the
outputs needs its epsilon times K here, which makes both the same function; `norm_eps` of the mixer holds it. Both of
them add 1e-6 to |q|^2 and |k|^2 before the root and ours add nothing, for which no field stands: keys much shorter than
1e-2 differ. Sources: fla v0.5 and transformers 5 (layers and configurations of the models named above).
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from efla_jax.checkpoint import interchange_tables as tables
from efla_jax.checkpoint.interchange import Tensor

Fields = Mapping[str, Any]


class Family(NamedTuple):
    """One kind of checkpoint.

    name is its model_type. fixed: {field of their config: values that ours can do}, where a field that is absent is
    taken as allowed; fixed_here: the same of our mixer, and `mlp`. fields(config) gives the section `model` of a run's
    config, config(model) their config of that section with the mixer's fields in full. buffers: which tensors of
    their files follow from the config, as a regular expression."""

    name: str
    architecture: str
    mixer: str
    table: tuple[Tensor, ...]
    fixed: Mapping[str, tuple]
    fixed_here: Mapping[str, tuple]
    fields: Callable[[Fields], dict[str, Any]]
    config: Callable[[Fields, Fields], dict[str, Any]]
    buffers: str = ""

    def is_buffer(self, name: str) -> bool:
        return bool(self.buffers) and re.fullmatch(self.buffers, name) is not None


def required(config: Fields, name: str) -> int:
    """A whole number that has no default which the libraries agree on."""
    if (found := config.get(name)) is None:
        raise ValueError(f"config.json: {name} is missing; write it in, it cannot be guessed.")
    if type(found) is not int:
        raise ValueError(f"config.json: {name}={found!r} is not a whole number; write it as one.")
    return found


def section(config: Fields, mixer: str, options: Fields, norm_eps: float, mlp_width: int) -> dict[str, Any]:
    """The section `model` of a run's config; mlp_width 0 means no MLP."""
    return {
        "width": required(config, "hidden_size"),
        "depth": required(config, "num_hidden_layers"),
        "mixers": (mixer,),
        "mixer_options": {mixer: dict(options)},
        "mlp": "swiglu" if mlp_width else "none",
        "mlp_width": mlp_width,
        "norm_eps": norm_eps,
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "kernel_init": "normal",
        "init_std": config.get("initializer_range", 0.02),
    }


def shared_config(model: Fields) -> dict[str, Any]:
    """Fields of their config.json that every family has."""
    return {
        "hidden_size": model["width"],
        "num_hidden_layers": model["depth"],
        "tie_word_embeddings": model["tie_embeddings"],
        "initializer_range": model["init_std"],
    }


def fla_mlp_width(config: Fields) -> int:
    """Inner width of fla's gated MLP: given, or 2/3 of hidden_ratio times the width, rounded up to 256."""
    if config.get("intermediate_size"):
        return config["intermediate_size"]
    return 256 * math.ceil(int(config["hidden_size"] * (config.get("hidden_ratio") or 4) * 2 / 3) / 256)


def scaled_eps(config: Fields, key_dim: int) -> float:
    """The epsilon of ours that is theirs with queries divided by sqrt(K)."""
    return config.get("norm_eps", 1e-6) * key_dim


def delta_net_fields(config: Fields) -> dict[str, Any]:
    width, heads = required(config, "hidden_size"), required(config, "num_heads")
    key_dim = int(width * config.get("expand_k", 1.0)) // heads
    options = {
        "num_heads": heads,
        "head_dim": key_dim,
        "expand_v": int(width * config.get("expand_v", 1.0)) // heads / key_dim,
        "conv_width": config.get("conv_size", 4) if config.get("use_short_conv", True) else 0,
        "output_gate": bool(config.get("use_gate", False)),
        "norm_eps": scaled_eps(config, key_dim),
    }
    return section(config, "delta_net", options, config.get("norm_eps", 1e-6), fla_mlp_width(config))


def delta_config(model: Fields, mixer: Fields) -> dict[str, Any]:
    """What the two delta rules of fla share."""
    return shared_config(model) | {
        "num_heads": mixer["num_key_heads"],
        "use_gate": mixer["output_gate"],
        "use_short_conv": mixer["conv_width"] > 0,
        "conv_size": mixer["conv_width"] or 4,
        "intermediate_size": model["mlp_width"],
        "hidden_act": "swish",
        "norm_eps": model["norm_eps"],
        "fuse_cross_entropy": True,
    }


def delta_net_config(model: Fields, mixer: Fields) -> dict[str, Any]:
    if mixer["num_key_heads"] != mixer["num_heads"]:
        raise ValueError(f"num_key_heads: {mixer['num_key_heads']} is not num_heads={mixer['num_heads']}, as it is in"
                         " delta_net; this model cannot be exported.")  # fmt: skip
    keys = mixer["num_heads"] * mixer["head_dim"]
    return delta_config(model, mixer) | {
        "expand_k": keys / model["width"],
        "expand_v": keys * mixer["expand_v"] / model["width"],
        "qk_norm": "l2",
        "qk_activation": "silu",
        "use_beta": True,
        "use_output_norm": True,
    }


def gated_delta_net_fields(config: Fields) -> dict[str, Any]:
    key_dim, key_heads = config.get("head_dim", 256), required(config, "num_heads")
    options = {
        "num_heads": config.get("num_v_heads") or key_heads,
        "num_key_heads": key_heads,
        "head_dim": key_dim,
        "expand_v": float(config.get("expand_v", 2.0)),
        "conv_width": config.get("conv_size", 4) if config.get("use_short_conv", True) else 0,
        "output_gate": bool(config.get("use_gate", True)),
        "negative_eigenvalues": bool(config.get("allow_neg_eigval", False)),
        "norm_eps": scaled_eps(config, key_dim),
    }
    return section(config, "gated_delta_net", options, config.get("norm_eps", 1e-6), fla_mlp_width(config))


def gated_delta_net_config(model: Fields, mixer: Fields) -> dict[str, Any]:
    return delta_config(model, mixer) | {
        "num_v_heads": mixer["num_heads"],
        "head_dim": mixer["head_dim"],
        "expand_v": mixer["expand_v"],
        "allow_neg_eigval": mixer["negative_eigenvalues"],
    }


def mamba2_options(config: Fields) -> tuple[dict[str, Any], float]:
    """(options of the mixer, epsilon of every norm)."""
    width, head_dim = required(config, "hidden_size"), config.get("head_dim", 64)
    expand = config.get("expand", 2)
    limit = config.get("time_step_limit", config.get("dt_limit", (0.0, math.inf)))
    # transformers 5 writes infinity, which JSON does not have, as {"__float__": "Infinity"}.
    low, high = (float(x["__float__"] if isinstance(x, dict) else x) for x in limit)
    if low > 0 or high < math.inf:
        raise ValueError(f"config.json: the step is clipped to [{low}, {high}], which Mamba-2 here cannot do.")
    known = {config[name] for name in ("layer_norm_epsilon", "norm_eps") if config.get(name) is not None}
    if len(known) > 1:
        raise ValueError(f"config.json: layer_norm_epsilon and norm_eps differ, {sorted(known)}; remove the wrong one.")
    eps = known.pop() if known else 1e-5
    options = {
        "num_heads": config.get("num_heads") or int(expand * width / head_dim),
        "head_dim": head_dim,
        "state_dim": required(config, "state_size"),
        "num_groups": required(config, "n_groups"),  # 1 in fla and 8 in transformers where it is not said
        "expand": float(expand),
        "conv_width": config.get("conv_kernel", 4),
        "conv_bias": bool(config.get("use_conv_bias", True)),
        "norm_eps": eps,
    }
    return options, eps


def mamba2_fields(config: Fields) -> dict[str, Any]:
    """The norm of the outputs is over each group of heads in fla, and over all of them in transformers."""
    options, eps = mamba2_options(config)
    groups, of_fla = options["num_groups"], config.get("norm_eps") is not None
    if groups > 1 and of_fla == (config.get("layer_norm_epsilon") is not None):
        raise ValueError(f"config.json: n_groups={groups}: leave one of norm_eps (fla) and layer_norm_epsilon"
                         " (transformers), whose norms of groups differ.")  # fmt: skip
    return section(config, "mamba2", options | {"norm_groups": groups if of_fla else 1}, eps, 0)


def log_linear_fields(config: Fields) -> dict[str, Any]:
    """As Mamba-2 of fla, a norm for each group of heads; the MLP has no fields."""
    options, eps = mamba2_options(config)
    options |= {"norm_groups": options["num_groups"], "levels": 15}
    return section(config, "log_linear_mamba2", options, eps, fla_mlp_width({"hidden_size": config["hidden_size"]}))


def mamba_config(model: Fields, mixer: Fields) -> dict[str, Any]:
    inner = mixer["num_heads"] * mixer["head_dim"]
    if inner % model["width"]:
        raise ValueError(f"num_heads, head_dim: {inner} channels are not a multiple of width={model['width']}, as they"
                         " are there; this model cannot be exported.")  # fmt: skip
    eps, limit = mixer["norm_eps"], [0.0, math.inf]
    return shared_config(model) | {
        "num_heads": mixer["num_heads"], "head_dim": mixer["head_dim"],
        "state_size": mixer["state_dim"], "n_groups": mixer["num_groups"],
        "expand": inner // model["width"],
        "conv_kernel": mixer["conv_width"], "use_conv_bias": mixer["conv_bias"],
        "use_bias": False, "hidden_act": "silu",
        "rms_norm": True, "rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False,
        "residual_in_fp32": False,
        "layer_norm_epsilon": eps, "norm_eps": eps,  # of transformers and of fla, as in the next lines
        "time_step_limit": limit, "dt_limit": limit,
        "time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4,
        "time_step_rank": math.ceil(model["width"] / 16),
    }  # fmt: skip


def mamba2_config(model: Fields, mixer: Fields) -> dict[str, Any]:
    found, groups, norms = mamba_config(model, mixer), mixer["num_groups"], mixer["norm_groups"]
    if norms not in (1, groups):
        raise ValueError(f"norm_groups: {norms} is neither 1 nor num_groups={groups}; this model cannot be exported.")
    if groups > 1:  # see `mamba2_fields`
        found.pop("layer_norm_epsilon" if norms > 1 else "norm_eps")
    return found


def log_linear_config(model: Fields, mixer: Fields) -> dict[str, Any]:
    known = {"mlp_width": model["mlp_width"], "norm_groups": mixer["norm_groups"]}
    theirs = {"mlp_width": fla_mlp_width({"hidden_size": model["width"]}), "norm_groups": mixer["num_groups"]}
    wrong = [f"{name}: {known[name]} is not {value}" for name, value in theirs.items() if known[name] != value]
    if wrong:
        raise ValueError(f"{'; '.join(wrong)}, as always in log_linear_mamba2; this model cannot be exported.")
    return mamba_config(model, mixer) | {"chunk_size": 64}


def attention_fields(config: Fields, heads: str, kv_heads: str, eps: str, qk_norm: bool) -> dict[str, Any]:
    """The section of a softmax model, whose fields have these names. Raises ValueError for rescaled positions."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"config.json: positions are rescaled ({kind!r}), which attention here cannot do.")
    length = config.get("max_position_embeddings", 2048)
    for name in ("sliding_window", "window_size"):
        if config.get(name) and config.get("use_sliding_window", True) and config[name] < length:
            raise ValueError(f"config.json: {name}={config[name]} limits what a token sees to less than the"
                             f" {length} tokens of a document, which attention here cannot do.")  # fmt: skip
    options = {
        "num_heads": required(config, heads),
        "num_kv_heads": config.get(kv_heads) or config[heads],
        "head_dim": config.get("head_dim") or config["hidden_size"] // config[heads],
        "rope_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "qk_norm": qk_norm,
        "max_length": length,
    }
    eps_value = config.get(eps, 1e-6)
    mlp_width = fla_mlp_width(config) if heads == "num_heads" else required(config, "intermediate_size")
    return section(config, "attention", options | {"norm_eps": eps_value}, eps_value, mlp_width)


def llama_fields(config: Fields) -> dict[str, Any]:
    qk_norm = config.get("model_type") == "qwen3"
    return attention_fields(config, "num_attention_heads", "num_key_value_heads", "rms_norm_eps", qk_norm)


def llama_config(model: Fields, mixer: Fields) -> dict[str, Any]:
    base = mixer["rope_base"]
    return shared_config(model) | {
        "num_attention_heads": mixer["num_heads"],
        "num_key_value_heads": mixer["num_kv_heads"],
        "head_dim": mixer["head_dim"],
        "intermediate_size": model["mlp_width"],
        "hidden_act": "silu",
        "rms_norm_eps": model["norm_eps"],
        "max_position_embeddings": mixer["max_length"],
        "rope_theta": base,  # as transformers 4 wants it, and 5 in the next line
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
    }


def transformer_fields(config: Fields) -> dict[str, Any]:
    if not config.get("rope_theta", 10000.0):
        raise ValueError("config.json: rope_theta is null; write the base of the rotary positions in.")
    return attention_fields(config, "num_heads", "num_kv_heads", "norm_eps", bool(config.get("qk_norm", False)))


def transformer_config(model: Fields, mixer: Fields) -> dict[str, Any]:
    if mixer["head_dim"] * mixer["num_heads"] != model["width"]:
        raise ValueError(f"head_dim: {mixer['num_heads']} heads of {mixer['head_dim']} are not width={model['width']},"
                         " as they are in fla's transformer; export this model as llama.")  # fmt: skip
    return shared_config(model) | {
        "num_heads": mixer["num_heads"],
        "num_kv_heads": mixer["num_kv_heads"],
        "qkv_bias": False,
        "qk_norm": mixer["qk_norm"],
        "window_size": None,
        "rope_theta": mixer["rope_base"],
        "max_position_embeddings": mixer["max_length"],
        "intermediate_size": model["mlp_width"],
        "hidden_act": "swish",
        "norm_eps": model["norm_eps"],
    }


SILU = ("silu", "swish")
DELTA_HERE = {
    "query_norm": ("l2",), "activation": ("silu",), "beta_activation": ("sigmoid",), "beta_bias": (None,),
    "output_norm": (True,), "output_projection": (True,), "mlp": ("swiglu",),
}  # fmt: skip
FLA_DELTA = {
    "attn": (None,), "attnres_block_size": (None,), "hidden_act": SILU, "qk_norm": ("l2",), "qk_activation": ("silu",),
    "use_beta": (True,), "use_output_norm": (True,), "conv_bias": (False,),
}  # fmt: skip
FLA_MAMBA2 = {
    "use_bias": (False,), "hidden_act": SILU, "rms_norm": (True,), "rmsnorm": (True,), "norm_before_gate": (False,),
    "D_has_hdim": (False,), "rescale_layers": (None,),
}  # fmt: skip
MAMBA2_HERE = {"activation": ("silu",), "plain": (False,)}
SOFTMAX = {"hidden_act": SILU, "attention_bias": (False,), "mlp_bias": (False,), "partial_rotary_factor": (1.0, None)}
FREQUENCIES = r"model\.layers\.\d+\.(self_)?attn\.(rotary_emb|rotary)\.inv_freq"


def softmax_family(name: str, architecture: str, qk_norm: bool) -> Family:
    """A model of transformers whose layers are those of Llama."""
    fixed_here = {"qk_norm": (qk_norm,), "mlp": ("swiglu",)}
    return Family(name, architecture, "attention", tables.LLAMA, SOFTMAX, fixed_here, llama_fields, llama_config,
                  FREQUENCIES)  # fmt: skip


FAMILIES = {
    family.name: family
    for family in (
        softmax_family("llama", "LlamaForCausalLM", False),
        softmax_family("mistral", "MistralForCausalLM", False),
        softmax_family("qwen3", "Qwen3ForCausalLM", True),
        Family(
            "transformer", "TransformerForCausalLM", "attention", tables.TRANSFORMER,
            {"hidden_act": SILU, "qkv_bias": (False,), "elementwise_affine": (True, None)}, {"mlp": ("swiglu",)},
            transformer_fields, transformer_config, FREQUENCIES,
        ),
        Family(
            "delta_net", "DeltaNetForCausalLM", "delta_net", tables.DELTA, FLA_DELTA | {"allow_neg_eigval": (False,)},
            DELTA_HERE | {"negative_eigenvalues": (False,)},  # there is no field for it in their config
            delta_net_fields, delta_net_config,
        ),
        Family(
            "gated_deltanet", "GatedDeltaNetForCausalLM", "gated_delta_net", tables.DELTA, FLA_DELTA, DELTA_HERE,
            gated_delta_net_fields, gated_delta_net_config,
        ),
        Family(
            "mamba2", "Mamba2ForCausalLM", "mamba2",
            tables.MAMBA2, FLA_MAMBA2, MAMBA2_HERE | {"mlp": ("none",)}, mamba2_fields, mamba2_config,
        ),
        Family(
            "log_linear_mamba2", "LogLinearMamba2ForCausalLM", "log_linear_mamba2", tables.LOG_LINEAR_MAMBA2,
            FLA_MAMBA2, MAMBA2_HERE | {"levels": (15,), "trained_levels": (0, 15), "level_kind": ("linear",),
                                       "level_bias": (False,), "mlp": ("swiglu",)},
            log_linear_fields, log_linear_config,
        ),
    )
}  # fmt: skip


def check_config(family: Family, config: Fields) -> None:
    """Raise ValueError listing the fields of their config.json that ours cannot do."""
    wrong = [f"{name}={config[name]!r}, only {' or '.join(map(repr, allowed))} can be converted"
             for name, allowed in family.fixed.items() if name in config and config[name] not in allowed]  # fmt: skip
    if wrong:
        raise ValueError(f"config.json ({family.name}): " + "; ".join(wrong) + ".")


def check_model(family: Family, model: Fields, mixer: Fields, mixers: set[str], inexact: bool) -> None:
    """Raise ValueError listing what a family cannot express of a model and its mixer; inexact: whether epsilons of
    norms may differ, of which they have one and we two."""
    if mixers != {family.mixer}:
        raise ValueError(f"mixers: a model of {sorted(mixers)} is no {family.name}, which is all {family.mixer}; name"
                         " another family.")  # fmt: skip
    known = {**mixer, **{name: model[name] for name in ("norm", "norm_position", "mlp")}}
    fixed = {"norm": ("rms",), "norm_position": ("pre",), **family.fixed_here}
    wrong = [f"{name}={known[name]!r}, and theirs is always {' or '.join(map(repr, allowed))}"
             for name, allowed in fixed.items() if known[name] not in allowed]  # fmt: skip
    if wrong:
        raise ValueError(f"the model cannot be exported as {family.name}: " + "; ".join(wrong) + ".")
    delta = family.mixer in ("delta_net", "gated_delta_net")
    wanted = model["norm_eps"] * (mixer["head_dim"] if delta else 1)
    used = family.mixer != "attention" or mixer["qk_norm"]
    if used and not inexact and not math.isclose(mixer["norm_eps"], wanted, rel_tol=1e-6):
        times = f" (norm_eps={model['norm_eps']:g} of the model times K={mixer['head_dim']})" if delta else ""
        raise ValueError(
            f"norm_eps: {mixer['norm_eps']:g} in the mixer's norm, and theirs would be {wanted:g}{times}:"
            " its outputs would differ where they are small. Export with --inexact all the same."
        )
