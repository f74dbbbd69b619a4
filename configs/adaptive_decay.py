"""Associative recall as in Adaptive Memory Decay (arXiv 2605.06946): do learned level weights help log-linear Mamba-2?

    python -m experiments.train --config=configs/adaptive_decay.py:mlp_softplus --workdir=runs/recall_mlp_softplus

Two layers of width 64, one head, K = V = 64, no convolution, no MLP, x = LayerNorm(x + mixer(x)); 10,000 rows of 128
tokens with 8 of 63 keys, queries packed at the end; Adam, clip 1, batch 64, 5000 steps at 1e-3 or until 99 % of 1000
held-out rows' answers are right. Then rows of twice the length are scored. Behind the colon:

    mamba2            no levels: the control
    linear            softplus of a scaled projection, the published baseline, which begins near softplus(0) = 0.69
    linear_one        the same begun at 1, as the MLPs are meant to
    mlp_softplus, mlp_softmax    the MLPs, whose start is kept

The mixer is `plain`: the recurrence and its projections, since the published layer has none of Mamba-2's D x, gate and
norm (--config.model.mixer_options.log_linear_mamba2.plain=false for the whole of it, which learns this task slower).
Rows are those of its script: the answer does not stand behind its query (another of its scripts has
--config.data.task.answers=true). It differs in that a seed's result is the best score that the test set ever had, that
the MLPs lose their start, and that the output projection begins half as large.
Ten levels serve 512 tokens; of those that training rows do not reach (`trained_levels`) the last trained weight is
used. `linear_256` and so on train on 256 tokens. Figures: experiments/results/README.md.
"""

from configs.common import base, check_mixer

LEVELS = {
    "mamba2": {},
    "linear": {"level_kind": "linear", "level_bias": False},
    "linear_one": {"level_kind": "linear", "level_bias": True},
    "mlp_softplus": {"level_kind": "mlp_softplus"},
    "mlp_softmax": {"level_kind": "mlp_softmax"},
}
LENGTHS = {"": 128, "_256": 256}


def get_config(arg: str = ""):
    arguments = {f"{variant}{end}": (variant, length) for variant in LEVELS for end, length in LENGTHS.items()}
    variant, length = arguments[check_mixer(arg, tuple(arguments), "configs/adaptive_decay.py")]
    mixer = "mamba2" if variant == "mamba2" else "log_linear_mamba2"
    config = base()
    task = {
        "layout": "packed", "vocab_size": 128, "length": length, "pairs": 8, "examples": 10_000, "test_examples": 1000,
        "longer": (2 * length,), "answers": False,
    }  # fmt: skip
    config.data = dict(kind="recall", batch_size=64, eval_batch_size=500, worker_count=0, task=task)
    options = {
        "num_heads": 1, "head_dim": 64, "state_dim": 64, "expand": 1.0, "conv_width": 0, "activation": "none",
        "plain": True, "gate_init": "normal",
    }  # fmt: skip
    if variant != "mamba2":
        options |= {"levels": 10, "trained_levels": (length - 1).bit_length() + 1, "level_hidden": 64}
        options |= {"level_gelu": True} | LEVELS[variant]
    config.model.update(width=64, depth=2, mixers=(mixer,), mixer_options={mixer: options}, mlp="none")
    config.model.scan = False  # one program without loops: two layers compile soon, and a GPU launches it at once
    config.model.update(norm="layer", norm_position="post", norm_eps=1e-5, kernel_init="normal", init_std=0.02)
    config.optim.update(learning_rate=1e-3, schedule="constant", weight_decay=0.0, beta2=0.999)
    config.train.update(steps=5000, log_every=100, eval_every=100, stop_at=0.99, matmul_precision="highest")
    return config
