"""Sequential MNIST of the EFLA paper: one mixer layer reads an image pixel by pixel and classifies its last output.

    python -m experiments.train --config=configs/smnist.py:efla --config.data.path=mnist.npz --workdir=runs/smnist_efla

One head of 64, no convolution, residual or gate, raw query, beta bias -2, one epoch (469 steps of 128 images), AdamW at
a constant rate, clip 1. The paper's code trains DeltaNet at 1e-3 and EFLA at 3e-3; here both mixers share seeds, and
the rate is theirs by default (--config.optim.learning_rate makes them equal). Without a path it takes scikit-learn's
8x8 digits. Seconds on a GPU, about ten minutes on two CPU cores. Figure and table: experiments/results/README.md.
"""

from configs.common import base, check_mixer

RATES = {"efla": 3e-3, "delta_net": 1e-3}


def get_config(arg: str = ""):
    mixer = check_mixer(arg, tuple(RATES), "configs/smnist.py")
    config = base()
    config.data.kind = "images"
    config.data.batch_size = 128
    config.data.eval_batch_size = 500
    config.model.width = 64
    config.model.mixers = (mixer,)
    options = {
        "num_heads": 1,
        "conv_width": 0,
        "activation": "none",
        "query_norm": "none",
        "output_norm": False,
        "output_projection": False,
        "beta_bias": -2.0,
        "kernel_init": "xavier",
    }
    config.model.mixer_options = {mixer: options | ({"step": "exact"} if mixer == "efla" else {})}
    config.optim.learning_rate = RATES[mixer]
    config.optim.schedule = "constant"
    config.optim.weight_decay = 0.01
    config.optim.decay = "all"
    config.optim.beta2 = 0.999
    config.train.steps = 469
    config.train.matmul_precision = "highest"
    return config
