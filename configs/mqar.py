"""Associative recall (MQAR) as in the second figure of Based (arXiv 2402.18668), for any recurrent mixer.

    python -m experiments.train --config=configs/mqar.py:gated_delta_net --workdir=runs/mqar_gated_delta_net

Two blocks of width 128 without an MLP, embeddings tied, LayerNorm; five training sizes of 4 pairs in 64 tokens to 64 in
256, 180,000 rows, 32 epochs; scored on sizes up to 256 pairs in 1024 tokens, 1000 rows each, and done at 99 %. AdamW,
decay 0.1 on everything, no clipping. The published sweep takes the best of four rates (1e-3, 3.2e-3, 1e-2, 3.2e-2) and
widths 64 and 256, too. Unlike there: the rate falls in steps and not in epochs, batches of all sizes are shuffled
(--config.data.task.shuffle=false keeps the listed order, easy ones first), there is no dropout of embeddings, and the
output projection begins like every other. 22,624 steps; --config.train.steps shortens the whole schedule.
"""

from configs.common import base, check_mixer

# With the heads that the published comparison gives them.
OPTIONS = {
    "delta_net": {"num_heads": 2},
    "gated_delta_net": {"num_heads": 2},
    "efla": {"num_heads": 2},
    "gated_efla": {"num_heads": 2},
    "mamba2": {"num_heads": 4, "state_dim": 16},
    "log_linear_mamba2": {"num_heads": 4, "state_dim": 16, "levels": 11},
    "log_linear_gated_delta_net": {"num_heads": 2, "levels": 11},
    "log_linear_efla": {"num_heads": 2, "levels": 11},
    "nats_l": {"num_heads": 2, "chunk_size": 16},
    "gated_conv": {"num_heads": 1, "conv_width": 3},
    "attention": {"num_heads": 2},
}
BATCH, EPOCHS = 256, 32
TRAIN = ((64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000))
TEST = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))


def get_config(arg: str = ""):
    mixer = check_mixer(arg, tuple(OPTIONS), "configs/mqar.py")
    config = base()
    length, pairs, examples = zip(*TRAIN, strict=True)
    test_length, test_pairs = zip(*TEST, strict=True)
    task = {
        "layout": "scattered", "vocab_size": 8192, "length": length, "pairs": pairs, "examples": examples,
        "test_length": test_length, "test_pairs": test_pairs, "test_examples": 1000, "power": 0.01, "passes": 1,
        "fill": True, "shuffle": True,
    }  # fmt: skip
    config.data = dict(kind="recall", batch_size=BATCH, eval_batch_size=200, worker_count=0, task=task)
    config.model.update(width=128, depth=2, mixers=(mixer,), mixer_options={mixer: OPTIONS[mixer]}, mlp="none")
    config.model.scan = False
    config.model.update(norm="layer", norm_eps=1e-5, tie_embeddings=True, kernel_init="normal", init_std=0.02)
    config.optim.update(learning_rate=3.2e-3, final_ratio=0.0, decay="all", beta2=0.999, clip_norm=0.0)
    config.train.steps = EPOCHS * sum(-(-count // BATCH) for count in examples)
    config.train.update(log_every=100, eval_every=705, stop_at=0.99, matmul_precision="highest")
    return config
