"""A byte-level language model on the text that Python ships: `make quickstart`, or one mixer alone:

    python -m experiments.train --config=configs/quickstart.py:efla --workdir=runs/first

About 0.9 M parameters and 0.5 M bytes of training; one to two minutes a mixer on two CPU cores, log-linear ones a few
times that. Any mixer of the registry can stand behind the colon; efla is the default. A corpus of your own:
--config.data.path=FOLDER_OF_TEXTS. Held-out scores stand in experiments/results/README.md.
"""

from configs.common import base, check_mixer

# Options with their defaults, so that a command line can set them.
LEVELS = {"level_kind": "linear", "level_bias": False}
OPTIONS = {
    "efla": {"step": "exact"},
    "delta_net": {"negative_eigenvalues": False},
    "gated_efla": {"step": "joint", "normalize_keys": False},
    "gated_delta_net": {"negative_eigenvalues": False},
    "attention": {"rope_base": 10000.0, "qk_norm": False},
    "log_linear_efla": {"step": "exact", **LEVELS},
    "log_linear_gated_delta_net": {"negative_eigenvalues": False, **LEVELS},
    "log_linear_mamba2": LEVELS,
}
MIXERS = (*OPTIONS, "mamba2", "gated_conv", "nats_l")


def get_config(arg: str = ""):
    mixer = check_mixer(arg, MIXERS, "configs/quickstart.py")
    config = base()
    config.data.window = 256
    config.data.batch_size = 4
    config.data.valid_fraction = 0.03
    config.data.valid_path = ""
    config.data.eval_batch_size = 32
    config.model.width = 128
    config.model.depth = 4
    config.model.mixers = (mixer,)
    config.model.mixer_options = {mixer: {"num_heads": 2, **OPTIONS.get(mixer, {})}}
    config.model.mlp = "swiglu"
    config.model.mlp_ratio = 4.0
    config.model.tie_embeddings = False
    config.model.dropout = 0.0
    config.model.remat = "none"
    config.model.scan = True
    config.optim.learning_rate = 3e-3
    config.optim.warmup_steps = 40
    config.train.steps = 500
    config.train.log_every = 20
    return config
