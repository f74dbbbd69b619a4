"""Language models of about 1.3B parameters, trained as in the EFLA paper (arXiv 2512.12602, section 4.1, appendix A).

    python -m experiments.train --config=configs/lm_1b3.py:efla --config.data.path=SHARDS --workdir=runs/efla_1b3

SHARDS is a folder that experiments/prepare_data.py wrote with the Mistral tokenizer (32,000 entries). The batch is cut
for 8 large GPUs that share the parameters (mesh.fsdp takes every device): 8 rows of 4096 tokens a device and
microbatch. On N such hosts: --config.mesh.fsdp=8 --config.mesh.data=-1, and train.accumulate divided by N. 23842 steps
of 2M tokens are 50B tokens. Not timed: in the table GFLOP are those of training a token by count (`efla_jax.flops`),
hours those of an H200 for all of it at 29 % of the 989 TFLOP/s of its data sheet, which Gated DeltaNet of 380M reaches
in rows of 4096; on 8 of them two days, if they lose nothing to each other.

Published: SlimPajama, AdamW with peak rate 3e-4, cosine to 3e-5, weight decay 0.1, clip 1, 1024 steps of warm-up (2B
tokens), seed 42, heads of 128, convolutions of 4 taps. Not published, so chosen here:
- length 4096; bfloat16 products; betas 0.9 and 0.95, eps 1e-15 (flame's); decay of matrices only; normal(0.02) kernels
- the layouts of flash-linear-attention: width 2048, 24 layers (Mamba-2 48 without MLP, gated 21), SwiGLU, untied head,
  32 heads of 64 in attention, state 128 and heads of 64 in Mamba-2; 12 gated heads of 128 with V = 256, which is as
  wide as the 6 heads of 256 of its Gated DeltaNet
The paper's warm-up begins at 3e-5, ours at 3e-4 / 1024.

Published scores, one seed each: perplexity on WikiText and LAMBADA, mean accuracy of nine tasks in per cent.

| mixer | parameters here | GFLOP | hours | WikiText | LAMBADA | accuracy |
| --- | --- | --- | --- | --- | --- | --- |
| attention | 1,364,297,728 | 9.00 | 436 | | | |
| mamba2 | 1,371,839,488 | 8.14 | 394 | | | |
| delta_net | 1,365,677,056 | 7.91 | 383 | 18.38 | 17.29 | 50.5 |
| efla | 1,365,677,056 | 7.91 | 383 | 18.30 | 16.54 | 51.8 |
| gated_delta_net | 1,387,859,704 | 8.08 | 391 | | | |
| gated_efla | 1,387,859,704 | 8.08 | 391 | | | |
"""

from configs.common import check_mixer, pretraining

GATED = {"num_heads": 12, "head_dim": 128, "expand_v": 2.0}
OPTIONS = {
    "efla": {"num_heads": 16, "step": "exact"},
    "attention": {"num_heads": 32, "rope_base": 10000.0},
    "mamba2": {"num_heads": 64, "state_dim": 128, "norm_eps": 1e-5},
    "delta_net": {"num_heads": 16, "negative_eigenvalues": False},
    "gated_delta_net": {"negative_eigenvalues": False},
    "gated_efla": {"step": "joint", "normalize_keys": False},
}


def get_config(arg: str = ""):
    mixer = check_mixer(arg, tuple(OPTIONS), "configs/lm_1b3.py")
    config = pretraining(mixer, OPTIONS, GATED, depth=24)
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.data.batch_size = 512
    config.model.width = 2048
    config.model.remat = "full"
    config.train.steps = 23842
    config.train.accumulate = 8
    config.train.eval_every = 1000
    return config
