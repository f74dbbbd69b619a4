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

from configs.common import LEVELS, adaptive_decay, base, check_mixer

LENGTHS = {"": 128, "_256": 256}


def get_config(arg: str = ""):
    arguments = {f"{variant}{end}": (variant, length) for variant in LEVELS for end, length in LENGTHS.items()}
    variant, length = arguments[check_mixer(arg, tuple(arguments), "configs/adaptive_decay.py")]
    config = base()
    task = {
        "layout": "packed", "vocab_size": 128, "length": length, "pairs": 8, "examples": 10_000, "test_examples": 1000,
        "longer": (2 * length,), "answers": False,
    }  # fmt: skip
    config.data = dict(kind="recall", batch_size=64, eval_batch_size=500, worker_count=0, task=task)
    adaptive_decay(config, variant, length, levels=10, steps=5000)
    return config
