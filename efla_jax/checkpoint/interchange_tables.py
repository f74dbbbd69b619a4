"""Names of tensors in other libraries' checkpoints, and the leaves of ours that each is made of.

A table is a tuple of `interchange.Tensor`. Those of flash-linear-attention (fla) and of transformers' models; Mamba-2's
is the same in both.
"""

from collections.abc import Mapping
from typing import Any

from efla_jax.checkpoint.interchange import Tensor

Rows = dict[str, Any]  # {name of theirs: its leaf, or a tuple of leaves}
HEAD, TABLE = "lm_head/kernel", "embed/embedding"
ENDINGS = ("weight", "bias", "A_log", "dt_bias", "D", "L")


def per_layer(prefix: str, names: Rows) -> tuple[Tensor, ...]:
    """Rows of a table: `prefix`{layer}.NAME.weight (or NAME itself where it ends in a parameter's name)."""
    named = {name if name.rpartition(".")[2] in ENDINGS else f"{name}.weight": leaves for name, leaves in names.items()}
    return tuple(
        Tensor(f"{prefix}{{layer}}.{name}", (leaves,) if isinstance(leaves, str) else leaves)
        for name, leaves in named.items()
    )


def around(embeddings: str, norm: str) -> tuple[Tensor, ...]:
    """Rows of what stands before and behind the layers."""
    return Tensor(embeddings, (TABLE,)), Tensor(norm, ("final_norm/scale",)), Tensor("lm_head.weight", (HEAD,))


MLP: Rows = {f"mlp.{name}": f"mlp/{name}/kernel" for name in ("gate_proj", "up_proj", "down_proj")}
FLA_NORMS: Rows = {"attn_norm": "mixer_norm/scale", "mlp_norm": "mlp_norm/scale"}
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
FLA_DELTA: Rows = (
    {f"attn.{name}": f"mixer/{name}/kernel" for name in (*QKVO, "b_proj", "g_proj", "a_proj")}
    | {f"attn.{name}_conv1d": f"mixer/{name}_conv/weight" for name in "qkv"}
    | {"attn.o_norm": "mixer/o_norm/scale", "attn.A_log": "mixer/A_log", "attn.dt_bias": "mixer/dt_bias"}
)
IN_PROJ = tuple(f"mixer/{name}_proj/kernel" for name in ("z", "x", "B", "C", "dt"))
MIXER_MAMBA2: Rows = {
    "mixer.conv1d.weight": tuple(f"mixer/{name}_conv/weight" for name in "xBC"),
    "mixer.conv1d.bias": tuple(f"mixer/{name}_conv/bias" for name in "xBC"),
    "mixer.A_log": "mixer/A_log", "mixer.dt_bias": "mixer/dt_bias", "mixer.D": "mixer/D",
    "mixer.norm": "mixer/norm/scale", "mixer.out_proj": "mixer/out_proj/kernel",
}  # fmt: skip
MIXER_LOG_LINEAR: Rows = MIXER_MAMBA2 | {
    "mixer.in_proj": (*IN_PROJ, "mixer/level_weights/level_proj/kernel"), "mixer.L": "mixer/level_weights/scale",
    "mixer_norm": "mixer_norm/scale", "mlp_norm": "mlp_norm/scale",
}  # fmt: skip
BACKBONE = around("backbone.embeddings.weight", "backbone.norm_f.weight")
LLAMA_LAYER: Rows = (
    {f"self_attn.{name}": f"mixer/{name}/kernel" for name in QKVO}
    | {"self_attn.q_norm": "mixer/q_norm/scale", "self_attn.k_norm": "mixer/k_norm/scale"}
    | {"input_layernorm": "mixer_norm/scale", "post_attention_layernorm": "mlp_norm/scale"}
)
FLA_ATTENTION: Rows = {f"attn.{name}": f"mixer/{name}/kernel" for name in QKVO} | {
    "attn.q_norm": "mixer/q_norm/scale", "attn.k_norm": "mixer/k_norm/scale",
}  # fmt: skip

FLA = around("model.embeddings.weight", "model.norm.weight")
DELTA = FLA + per_layer("model.layers.", FLA_NORMS | FLA_DELTA | MLP)
TRANSFORMER = FLA + per_layer("model.layers.", FLA_NORMS | FLA_ATTENTION | MLP)
MAMBA2_LAYER: Rows = MIXER_MAMBA2 | {"norm": "mixer_norm/scale", "mixer.in_proj": IN_PROJ}
MAMBA2 = BACKBONE + per_layer("backbone.layers.", MAMBA2_LAYER)
LOG_LINEAR_MAMBA2 = BACKBONE + per_layer("backbone.layers.", MIXER_LOG_LINEAR | MLP)
LLAMA = around("model.embed_tokens.weight", "model.norm.weight") + per_layer("model.layers.", LLAMA_LAYER | MLP)

# Of one layer: names behind "linear_attn.", leaves from the mixer on.
GATED_LAYER = (
    Tensor("conv1d.weight", ("q_conv/weight", "k_conv/weight", "v_conv/weight")),
    Tensor("A_log", ("A_log",)), Tensor("dt_bias", ("dt_bias",)),
    Tensor("norm.weight", ("o_norm/scale",)), Tensor("out_proj.weight", ("o_proj/kernel",)),
)  # fmt: skip
QWEN3_NEXT = GATED_LAYER + (
    Tensor("in_proj_qkvz.weight", tuple(f"{name}_proj/kernel" for name in "qkvg"), per_key_head=True),
    Tensor("in_proj_ba.weight", ("b_proj/kernel", "a_proj/kernel"), per_key_head=True),
)
QWEN3_5 = GATED_LAYER + (
    Tensor("in_proj_qkv.weight", tuple(f"{name}_proj/kernel" for name in "qkv")),
    *(Tensor(f"in_proj_{name}.weight", (f"{leaf}_proj/kernel",)) for name, leaf in ("zg", "bb", "aa")),
)


def qwen_mixer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of layers.GatedDeltaNet for a linear-attention layer of a Qwen3-Next or Qwen3.5 config."""
    key_dim = config["linear_key_head_dim"]
    return {
        "width": config["hidden_size"],
        "num_heads": config["linear_num_value_heads"],
        "num_key_heads": config["linear_num_key_heads"],
        "head_dim": key_dim,
        "expand_v": config["linear_value_head_dim"] / key_dim,
        "conv_width": config["linear_conv_kernel_dim"],
        "norm_eps": config["rms_norm_eps"] * key_dim,
    }
