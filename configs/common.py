"""The sections every experiment's config has, with their defaults; an experiment file changes what it is about.

Tuples and numbers only: lists and None cannot be overridden on a command line."""

from ml_collections import ConfigDict

MOST_NAMES = 24  # that a message can hold
# Level weights that the paper of Adaptive Memory Decay compares.
LEVELS = {
    "mamba2": {},
    "linear": {"level_kind": "linear", "level_bias": False},
    "linear_one": {"level_kind": "linear", "level_bias": True},
    "mlp_softplus": {"level_kind": "mlp_softplus"},
    "mlp_softmax": {"level_kind": "mlp_softmax"},
}


def base() -> ConfigDict:
    """mesh, data, model, optim, train; fields: sharding.make_mesh, DataConfig, LanguageModel, make_optimizer, train."""
    config = ConfigDict()
    config.seed = 0
    config.mesh = ConfigDict(dict(data=-1, fsdp=1, tensor=1, context=1))  # -1: the devices that the others leave
    config.data = ConfigDict(dict(kind="text", path="", batch_size=16, eval_batch_size=0, worker_count=0))
    config.model = ConfigDict(dict(width=128, mixers=("efla",), mixer_options=ConfigDict(), dtype="float32"))
    config.optim = ConfigDict(
        dict(
            algorithm="adamw",
            learning_rate=1e-3,
            adam_learning_rate=0.0,  # with muon, of what is not a hidden matrix; 0: learning_rate
            momentum=0.95,  # of muon
            schedule="cosine",
            warmup_steps=0,
            decay_steps=0,  # of wsd
            final_ratio=0.1,
            weight_decay=0.1,
            decay="matrices",
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            clip_norm=1.0,
            ema_decay=0.0,  # of averaged parameters, which are scored then; 0: none
        )
    )
    config.train = ConfigDict(
        dict(
            steps=100,
            accumulate=1,  # microbatches of a step
            loss_chunk=0,  # tokens of time whose logits exist at once; 0: by size
            z_loss=0.0,
            softmax_penalty=0.0,  # times the part of the chunks that choose softmax, of nats_l
            matmul_precision="tensorfloat32",
            log_every=10,
            signals_every=0,  # how stiff and how forgetful the mixers are
            eval_every=0,
            eval_batches=0,  # 0: all of them
            stop_at=0.0,  # held-out accuracy at which the run ends; 0: never
            save_every=0,
            keep=2,  # newest checkpoints
            keep_period=0,  # and every multiple of it
            keep_best="",  # and the best by this held-out score, e.g. loss
            max_skipped=10,  # steps without a finite gradient, in a row, until the run stops
            profile_start=0,  # first step of a profiler trace; 0: none
            profile_steps=3,
            peak_tflops=0.0,  # of one device, for MFU; 0: what is known about it
            wandb_project="",
        )
    )
    return config


def alike(name: str, other: str) -> float:
    """How much of two words' pairs of neighbouring letters they share, from 0 to 1."""
    pairs = [set(zip(word, word[1:], strict=False)) for word in (name, other)]
    return len(pairs[0] & pairs[1]) / max(1, len(pairs[0] | pairs[1]))


def check_mixer(arg: str, known: tuple[str, ...], file: str) -> str:
    """What is named behind the colon of --config=FILE:NAME, the first known name without it. Raises ValueError for
    another name, with all that are known where they are few, else the nearest; for "list" with all of them."""
    if not arg or arg in known:
        return arg or known[0]
    if arg == "list":
        raise ValueError(f"--config={file}: behind the colon one of {' '.join(known)}")
    if len(known) <= MOST_NAMES:
        raise ValueError(f"--config={file}:{arg}: {arg!r} is not one of {known}.")
    near = sorted(known, key=lambda name: alike(name, arg), reverse=True)[:4]
    raise ValueError(
        f"--config={file}:{arg}: {arg!r} is not one of the {len(known)} names there. Nearest: {', '.join(near)}."
        f" The head of the file says what they are made of, --config={file}:list names all."
    )


def pretraining(mixer: str, options: dict, gated: dict, depth: int) -> ConfigDict:
    """What the language-model recipes share: tokenised text, bfloat16, the published optimiser; see configs/lm_340m.py.

    gated: the layout of the two gated mixers. depth: of all mixers but those (21) and Mamba-2 (48, no MLP)."""
    config = base()
    config.seed = 42
    config.data.update(dict(kind="tokens", paths=(), weights=(), packing="windows", verify=False, window=4096))
    config.data.eval_batch_size = 64
    config.model.depth = {"mamba2": 48, "gated_delta_net": 21, "gated_efla": 21}.get(mixer, depth)
    config.model.mixers = (mixer,)
    config.model.mixer_options = {mixer: (gated if mixer.startswith("gated") else {}) | options[mixer]}
    config.model.mlp = "none" if mixer == "mamba2" else "swiglu"
    config.model.mlp_ratio = 4.0
    config.model.norm_eps = 1e-6
    config.model.tie_embeddings = False
    config.model.kernel_init = "normal"
    config.model.init_std = 0.02
    config.model.dtype = "bfloat16"
    config.model.scan = True
    config.optim.learning_rate = 3e-4
    config.optim.warmup_steps = 1024
    config.optim.eps = 1e-15
    config.train.signals_every = 100
    config.train.eval_batches = 16
    config.train.save_every = 500
    return config


def one_layer(mixer: str, own: dict) -> ConfigDict:
    """The classifier of sequential MNIST in the EFLA paper's code and how it trains, but for rate and steps; own: of
    the mixer's options those that are not of the recipe."""
    config = base()
    config.data.update(kind="images", batch_size=128, eval_batch_size=500)
    options = {
        "num_heads": 1, "conv_width": 0, "activation": "none", "query_norm": "none", "output_norm": False,
        "output_projection": False, "beta_bias": -2.0, "kernel_init": "xavier",
    }  # fmt: skip
    config.model.update(width=64, mixers=(mixer,), mixer_options={mixer: options | own})
    config.optim.update(schedule="constant", weight_decay=0.01, decay="all", beta2=0.999)
    config.train.matmul_precision = "highest"
    return config


def adaptive_decay(config: ConfigDict, variant: str, length: int, levels: int, steps: int) -> None:
    """The model of Adaptive Memory Decay (arXiv 2605.06946) and its training, of every task: one head of 64 x 64, x =
    LayerNorm(x + mixer(x)), twice; variant: one of LEVELS, whose level weights it has."""
    mixer = "mamba2" if variant == "mamba2" else "log_linear_mamba2"
    options = {
        "num_heads": 1, "head_dim": 64, "state_dim": 64, "expand": 1.0, "conv_width": 0, "activation": "none",
        "plain": True, "gate_init": "normal",
    }  # fmt: skip
    if variant != "mamba2":
        options |= {"levels": levels, "trained_levels": (length - 1).bit_length() + 1, "level_hidden": 64}
        options |= {"level_gelu": True} | LEVELS[variant]
    config.model.update(width=64, depth=2, mixers=(mixer,), mixer_options={mixer: options}, mlp="none")
    config.model.scan = False  # one program without loops: two layers compile soon, and a GPU launches it at once
    config.model.update(norm="layer", norm_position="post", norm_eps=1e-5, kernel_init="normal", init_std=0.02)
    config.optim.update(learning_rate=1e-3, schedule="constant", weight_decay=0.0, beta2=0.999)
    config.train.update(steps=steps, log_every=100, eval_every=100, stop_at=0.99, matmul_precision="highest")
