"""A byte-level language model on the text that Python ships: `make quickstart`, or one mixer alone:

    python -m experiments.train --config=configs/quickstart.py:efla --workdir=runs/first

About 1 M parameters and 1.2 M bytes of training; one to two minutes a mixer on two CPU cores. Any mixer of the registry
can stand behind the colon; efla is the default. Held-out scores stand in experiments/results/README.md.
"""

from configs.common import base, check_mixer

MIXERS = ("efla", "delta_net", "gated_efla", "gated_delta_net", "mamba2", "attention")


def get_config(arg: str = ""):
    mixer = check_mixer(arg, MIXERS, "configs/quickstart.py")
    config = base()
    config.data.window = 256
    config.data.batch_size = 4
    config.data.valid_fraction = 0.03
    config.data.eval_batch_size = 32
    config.model.width = 128
    config.model.depth = 4
    config.model.mixers = (mixer,)
    config.model.mixer_options = {mixer: {"num_heads": 2}}
    config.model.mlp = "swiglu"
    config.optim.learning_rate = 3e-3
    config.optim.warmup_steps = 40
    config.train.steps = 600
    config.train.log_every = 20
    return config
