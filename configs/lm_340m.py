"""Language models of about 340M parameters, trained as in the EFLA paper (arXiv 2512.12602, section 4.1, appendix A).

    python -m experiments.train --config=configs/lm_340m.py:efla --config.data.path=SHARDS --workdir=runs/efla_340m

SHARDS is a folder that experiments/prepare_data.py wrote with the Mistral tokenizer (32,000 entries). The batch is cut
for 8 large GPUs: 8 rows of 4096 tokens a device and microbatch. On one: --config.train.accumulate=32; where memory does
not suffice: --config.model.remat=full. 7630 steps of 1M tokens are 8B tokens.

In the table GFLOP are those of training a token by count (`efla_jax.flops`), hours those of one H200 for all of it by
tokens/s measured there (experiments/results): of EFLA 154,410 in rows of 2048, which DeltaNet, as fast, has too; of
attention 114,419 and of Gated DeltaNet, for both gated ones, 131,301 in rows of 4096. Mamba-2 was not timed: 29 % of
the 989 TFLOP/s of its data sheet, as Gated DeltaNet reaches.

Published: SlimPajama, AdamW with peak rate 3e-4, cosine to 3e-5, weight decay 0.1, clip 1, 1024 steps of warm-up (1B
tokens), seed 42, heads of 128, convolutions of 4 taps. Not published, so chosen here:
- length 4096; bfloat16 products; betas 0.9 and 0.95, eps 1e-15 (flame's); decay of matrices only; normal(0.02) kernels
- the layouts of flash-linear-attention and flame: width 1024, 24 layers (Mamba-2 48 without MLP, gated 21), SwiGLU,
  untied head, 16 heads of 64 in attention, state 128 and heads of 64 in Mamba-2; 6 gated heads of 128 with V = 256
  (flame's own layout: --config.model.mixer_options.gated_efla.head_dim=256, 512M parameters)
The paper's warm-up begins at 3e-5, ours at 3e-4 / 1024.

Published scores, one seed each: perplexity on WikiText and LAMBADA, mean accuracy of nine tasks in per cent.

| mixer | parameters here | GFLOP | hours | WikiText | LAMBADA | accuracy |
| --- | --- | --- | --- | --- | --- | --- |
| attention | 373,867,520 | 2.65 | 19 | | | |
| mamba2 | 382,387,712 | 2.25 | 17 | 36.90 | 105.69 | 42.0 |
| delta_net | 374,362,112 | 2.11 | 14 | 38.09 | 96.26 | 42.2 (as printed; the tasks' own mean is 43.1) |
| efla | 374,362,112 | 2.11 | 14 | 35.26 | 79.97 | 44.1 |
| gated_delta_net | 379,888,124 | 2.16 | 17 | 34.93 | 72.46 | 43.9 |
| gated_efla | 379,888,124 | 2.16 | 17 | 34.28 | 69.37 | 44.8 |
"""

from configs.common import check_mixer, pretraining

GATED = {"num_heads": 6, "head_dim": 128, "expand_v": 2.0}
OPTIONS = {
    "efla": {"num_heads": 8, "step": "exact"},
    "attention": {"num_heads": 16, "rope_base": 10000.0},
    "mamba2": {"num_heads": 32, "state_dim": 128, "norm_eps": 1e-5},
    "delta_net": {"num_heads": 8, "negative_eigenvalues": False},
    "gated_delta_net": {"negative_eigenvalues": False},
    "gated_efla": {"step": "joint", "normalize_keys": False},
}


def get_config(arg: str = ""):
    mixer = check_mixer(arg, tuple(OPTIONS), "configs/lm_340m.py")
    config = pretraining(mixer, OPTIONS, GATED, depth=24)
    config.data.batch_size = 256
    config.model.width = 1024
    config.model.remat = "dots"
    config.train.steps = 7630
    config.train.accumulate = 4
    config.train.eval_every = 500
    return config
