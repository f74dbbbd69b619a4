"""State tracking as a control: is the number of ones odd? Beyond the trained length only a reflecting step can tell.

    python -m experiments.train --config=configs/parity.py:delta_net_negative --workdir=runs/parity_negative
    python -m experiments.sweep --config=configs/parity.py --workdir=runs/parity --together=12       # all, three seeds
    python -m experiments.report state_tracking --runs=runs/parity --out=experiments/results/parity

Rows of 40 fair bits, fresh ones at every step; the target at every token is the parity so far. Scored on 1000 rows of
40, then of 64, 128, 256 and 512. One block of width 64, two heads of 32, no convolution, no MLP; AdamW at a constant
rate. Behind the colon any mixer of the table; `delta_net_negative` and `gated_delta_net_negative` have beta up to 2,
and so eigenvalues down to -1 (arXiv 2411.12537). EFLA's step is exp(-beta |k|^2) along k, never negative: it cannot.
--config.data.task.group=S3 or A5 asks for products of permutations instead. The grid of get_sweep is 63 runs in 7
programs, not timed on a GPU; six runs of 800 steps at width 32 take three to six minutes on two CPU cores, and tell the
mixers apart. Figures: experiments/results/README.md.
"""

from configs.common import base, check_mixer

OPTIONS = {
    "delta_net": {"negative_eigenvalues": False},
    "delta_net_negative": {"negative_eigenvalues": True},
    "efla": {"step": "exact"},
    "gated_delta_net": {"negative_eigenvalues": False},
    "gated_delta_net_negative": {"negative_eigenvalues": True},
    "gated_efla": {},
    "mamba2": {},
}


def get_sweep():
    """Every mixer with three seeds and three rates."""
    return {"arguments": tuple(OPTIONS), "grid": {"optim.learning_rate": (1e-3, 3e-3, 1e-2), "seed": (0, 1, 2)}}


def get_config(arg: str = ""):
    variant = check_mixer(arg, tuple(OPTIONS), "configs/parity.py")
    mixer = variant.removesuffix("_negative")
    config = base()
    task = {
        "group": "parity", "length": 40, "examples": 0, "test_examples": 1000, "test_lengths": (40,),
        "longer_lengths": (64, 128, 256, 512),
    }  # fmt: skip
    config.data = dict(kind="state_tracking", batch_size=128, eval_batch_size=200, worker_count=0, task=task)
    options = {"num_heads": 2, "conv_width": 0, **OPTIONS[variant]}
    config.model.update(width=64, depth=1, mixers=(mixer,), mixer_options={mixer: options}, mlp="none", scan=False)
    config.model.update(norm="layer", norm_eps=1e-5)
    config.optim.update(learning_rate=3e-3, schedule="constant", weight_decay=0.0, beta2=0.999)
    config.train.update(steps=3000, log_every=100, eval_every=250, stop_at=0.0, matmul_precision="highest")
    return config
