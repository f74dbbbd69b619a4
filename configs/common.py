"""The sections every experiment's config has, with their defaults; an experiment file changes what it is about.

Tuples and numbers only: lists and None cannot be overridden on a command line."""

from ml_collections import ConfigDict


def base() -> ConfigDict:
    """data, model, optim and train; see DataConfig, LanguageModel, make_optimizer and train.fit for the fields."""
    config = ConfigDict()
    config.seed = 0
    config.data = ConfigDict(dict(kind="text", path="", batch_size=16, eval_batch_size=0, worker_count=0))
    config.model = ConfigDict(dict(width=128, mixers=("efla",), mixer_options=ConfigDict(), dtype="float32"))
    config.optim = ConfigDict(
        dict(
            learning_rate=1e-3,
            schedule="cosine",
            warmup_steps=0,
            final_ratio=0.1,
            weight_decay=0.1,
            decay="matrices",
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            clip_norm=1.0,
        )
    )
    config.train = ConfigDict(
        dict(
            steps=100,
            matmul_precision="tensorfloat32",
            log_every=10,
            eval_every=0,
            save_every=0,
            keep=2,
            max_skipped=10,
        )
    )
    return config


def check_mixer(arg: str, known: tuple[str, ...], file: str) -> str:
    """The mixer named behind the colon of --config=FILE:MIXER, the first known one without it."""
    if arg and arg not in known:
        raise ValueError(f"--config={file}:{arg}: {arg!r} is not one of {known}.")
    return arg or known[0]
