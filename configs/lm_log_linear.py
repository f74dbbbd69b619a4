"""Language models of Log-Linear Attention (arXiv 2506.04761) with their flat baselines, and a small one with adaptive
level weights (arXiv 2605.06946).

    python -m experiments.train --config=configs/lm_log_linear.py:log_linear_gated_delta_net \
        --config.data.path=SHARDS --workdir=runs/log_linear_gdn

SHARDS is a folder that experiments/prepare_data.py wrote with a tokenizer of 32,000 entries. The batch is cut for 8
large GPUs: one row of 16,384 tokens a device and microbatch; on one GPU --config.train.accumulate=32. 95,368 steps of
524,288 tokens are 50B tokens. Not run here and not timed: in the table GFLOP are those of training a token by count
(`efla_jax.flops`), hours those of an H200 for all of it at 29 % of the 989 TFLOP/s of its data sheet, which flat Gated
DeltaNet of 380M reaches in rows of 4096. That fraction is a guess for levels, whose work is less of dense products.

Published: Long-Data-Collections, AdamW with peak rate 3e-4, cosine to a tenth, clip 1, eps 1e-15, 1024 steps of
warm-up, seed 42; 21 layers of width 1536 with SwiGLU, normal(0.006), untied head; 48 heads of 64 with state 128 in
Mamba-2, 6 heads of 192 with V = 384 in Gated DeltaNet, 16 heads with RoPE base 500,000 in the Transformer (24 layers:
--config.model.depth=24, 777,856,512 parameters of 778M); 15 levels, linear weights. Not published, so chosen here:
weight decay 0.1 of matrices only, betas 0.9 and 0.95, bfloat16 products. EFLA is ours, in the layout of Gated DeltaNet.

Other level weights: --config.model.mixer_options.MIXER.level_kind=mlp_softplus, or mlp_softmax, or .level_bias=True
(linear, begun at 1). A trained model reads longer documents with the last level shared, or with more levels, e.g.
.max_levels=17 .untrained_levels=extrapolate for 64K tokens.

Published scores, one seed each; perplexity on WikiText and LAMBADA, mean zero-shot accuracy in per cent. The one size
published to five digits, 795.69M, is ours.

| mixer | parameters here | GFLOP | hours | published | WikiText | LAMBADA | accuracy |
| --- | --- | --- | --- | --- | --- | --- | --- |
| log_linear_mamba2 | 825,465,312 | 5.10 | 247 | | 22.11 | 21.86 | 44.9 |
| log_linear_gated_delta_net | 795,690,462 | 5.76 | 279 | 795.69M | 21.45 | 18.09 | 45.5 |
| log_linear_efla | 795,496,674 | 5.76 | 279 | | | | |
| mamba2 | 802,225,872 | 4.62 | 223 | | 22.44 | 24.14 | 44.8 |
| gated_delta_net | 792,785,532 | 4.63 | 224 | 793M | 21.73 | 19.71 | 45.0 |
| efla | 792,591,744 | 4.63 | 224 | | | | |
| attention | 692,912,640 | 7.03 | 340 | 693M | 21.56 | 22.14 | 44.0 |

With :adaptive the language model of the paper on adaptive memory decay: log-linear Mamba-2, 6 layers of width 512 with
expand 1 and 8 heads of 64 (width 256: --config.model.width=256 and 4 heads), MLP weights, GPT-2's tokenizer, 512
tokens, 40,000 steps of 8 rows, rate 3e-4 after 500 steps, weight decay 0.1. Its SwiGLU costs what their MLP of twice
the width does: 0.24 GFLOP a token, 4.0e16 FLOP in all, which the launches of so small a step and not its count set the
time of. Their perplexities of about 220 on WikiText-103 are of the token after the next, so not comparable.
"""

from configs.common import check_mixer, pretraining

LEVELS = {
    "levels": 15,
    "level_kind": "linear",
    "level_bias": False,
    "level_hidden": 64,
    "level_gelu": True,
    "trained_levels": 0,
    "untrained_levels": "tie",
    "max_levels": 0,
}
MAMBA = {"num_heads": 48, "state_dim": 128, "expand": 2.0, "norm_eps": 1e-5}
DELTA = {"num_heads": 6, "head_dim": 192, "expand_v": 2.0, "output_gate": True}
OPTIONS = {
    "log_linear_gated_delta_net": DELTA | LEVELS,
    "log_linear_mamba2": MAMBA | LEVELS,
    "log_linear_efla": DELTA | LEVELS,
    "gated_delta_net": DELTA,
    "mamba2": MAMBA,
    "efla": DELTA,
    "attention": {"num_heads": 16, "rope_base": 500000.0},
}


def get_config(arg: str = ""):
    arg = check_mixer(arg, (*OPTIONS, "adaptive"), "configs/lm_log_linear.py")
    config = pretraining("log_linear_mamba2" if arg == "adaptive" else arg, OPTIONS, {}, depth=21)
    config.model.depth = 21
    config.model.mlp = "swiglu"
    config.model.width = 1536
    config.model.init_std = 0.006
    config.model.remat = "full"
    config.data.window = 16384
    config.data.batch_size = 32
    config.data.eval_batch_size = 8
    config.train.steps = 95368
    config.train.accumulate = 4
    config.train.eval_every = 1000
    return adaptive(config) if arg == "adaptive" else config


def adaptive(config):
    """The changes of the second paper."""
    config.model.width = 512
    config.model.depth = 6
    config.model.mlp_ratio = 2.0
    config.model.init_std = 0.02
    config.model.remat = "none"
    config.model.mixer_options.log_linear_mamba2.update(dict(num_heads=8, expand=1.0, level_kind="mlp_softplus"))
    config.data.window = 512
    config.data.batch_size = 8
    config.optim.warmup_steps = 500
    config.optim.eps = 1e-8
    config.train.steps = 40000
    config.train.accumulate = 1
    return config
