"""Sequential MNIST of the EFLA paper: one mixer layer reads an image pixel by pixel and classifies its last output.

    python -m experiments.train --config=configs/smnist.py:efla --config.data.path=mnist.npz --workdir=runs/smnist_efla

One head of 64, no convolution, residual or gate, raw query, beta bias -2, one epoch (469 steps of 128 images), AdamW at
a constant rate, clip 1. The paper's code trains DeltaNet at 1e-3 and EFLA at 3e-3; here both mixers share seeds, and
the rate is theirs by default (--config.optim.learning_rate makes them equal). Without a path it takes scikit-learn's
8x8 digits. Seconds on a GPU, about ten minutes on two CPU cores. Figure and table: experiments/results/README.md.
"""

from configs.common import check_mixer, one_layer

RATES = {"efla": 3e-3, "delta_net": 1e-3}


def get_config(arg: str = ""):
    mixer = check_mixer(arg, tuple(RATES), "configs/smnist.py")
    config = one_layer(mixer, {"step": "exact"} if mixer == "efla" else {})
    config.optim.learning_rate = RATES[mixer]
    config.train.steps = 469
    return config
