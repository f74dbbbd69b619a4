"""Associative recall (MQAR) as three papers measure it: one experiment for every figure, mixer and width.

    python -m experiments.train --config=configs/paper_mqar.py:log_linear-gated_delta_net-32 --workdir=runs/mqar_gdn_32
    python -m experiments.sweep --config=configs/paper_mqar.py --workdir=runs/mqar --together=12      # get_sweep's grid
    python -m experiments.report mqar --runs=runs/mqar --out=experiments/results/mqar

Behind the colon: figure, mixer and width.

    zoology_64x4, zoology_128x8, zoology_256x16, zoology_512x64    figure 2 of arXiv 2312.04927: rows of one size,
        100,000 for training and 3000 held out, the rest of a row blank; 64 epochs; widths 64 to 512
    based, based_hybrid    figure 2 of arXiv 2402.18668: five training sizes up to 64 pairs in 256 tokens, seven held
        out up to 256 pairs in 1024, unused positions random; 32 epochs; widths 64, 128, 256. The hybrid has the gated
        short convolution as its first layer, as the recurrence of that paper has
    log_linear    figure 5 and table 6 of arXiv 2506.04761: 256 tokens, 4 to 64 pairs; widths 16, 32, 64

All: two blocks without an MLP, embeddings tied, LayerNorm, dropout 0.1 of embeddings, AdamW with decay 0.1 on all,
no clipping, cosine to 0, done at 99 %; the best of `RATES` is the result. Unlike zoology: the rate falls in steps and
not in epochs, batches are shuffled (--config.data.task.shuffle=false keeps the listed order), the output projection
begins like every other, and attention has rotary positions where it has learned ones. Heads as published there: two,
short convolutions of 4 in delta rules.

The third paper prints its rows' length, its numbers of pairs, its widths and that a run ends above 99 %, no more. The
rest is zoology's; 10,000 rows (a rerun of others has so many), 2000 of each number of pairs, batches of 64, 64 epochs,
and, so that states are of one size, one head with K = V = width, in Mamba-2, too.

Cost of the third figure: 396 runs, 33 programs of twelve; a run is 10,240 steps of 16,384 tokens (1.7e8), or until
99 %. On an H200 that two programs shared, four runs of Gated DeltaNet, flat or log-linear, took 15.5 ms a step at width
32 and 17 to 22 at 64, four of Mamba-2 12.6 at 32. By these all of it is about two GPU-hours, less by --arguments and
--config.train.steps. Of the first figure a run is 12,544 to 50,048 steps of 32,768 or 65,536 tokens, of the second
22,624 of 16,384 to 65,536: days for all. What was run: experiments/results/README.md. Published, per cent:

| | width 32 | width 64 |
| --- | --- | --- |
| mamba2, log_linear_mamba2 | 75.1, 76.5 | 89.6, 92.9 |
| gated_delta_net, log_linear_gated_delta_net | 79.0, 84.4 | over 99, over 99 |
"""

from configs.common import base, check_mixer

ZOOLOGY = {"64x4": 512, "128x8": 512, "256x16": 256, "512x64": 128}  # rows of a batch, by size
FIGURES = (*(f"zoology_{size}" for size in ZOOLOGY), "based", "based_hybrid", "log_linear")
WIDTHS = {"zoology": (64, 128, 256, 512), "based": (64, 128, 256), "log": (16, 32, 64)}
RATES = {  # logspace(-4, -2, 4) and logspace(-3, -1.5, 4)
    "zoology": (1e-4, 4.641589e-4, 2.154435e-3, 1e-2),
    "based": (1e-3, 3.162278e-3, 1e-2, 3.162278e-2),
    "log": (1e-3, 3.162278e-3, 1e-2, 3.162278e-2),
}
TRAIN = ((64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000))
TEST = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
PAIRS = (4, 8, 16, 32, 64)
GATED_CONV = {"num_heads": 1, "conv_width": 3}  # zoology's BaseConv, which has no state
MIXERS = (
    "mamba2", "log_linear_mamba2", "gated_delta_net", "log_linear_gated_delta_net", "delta_net", "efla",
    "log_linear_efla", "gated_efla", "nats_l", "gated_conv", "attention",
)  # fmt: skip


def settings(figure: str) -> tuple[str, ...]:
    """Every argument of a figure."""
    return tuple(f"{figure}-{mixer}-{width}" for mixer in MIXERS for width in WIDTHS[figure.split("_")[0]])


def get_sweep():
    """The log-linear paper's figure: every mixer, width and rate, three seeds."""
    return {
        "arguments": settings("log_linear"), "grid": {"optim.learning_rate": RATES["log"], "seed": (0, 1, 2)},
    }  # fmt: skip


def options(figure: str, mixer: str, width: int, longest: int) -> dict:
    """Heads and states: zoology's, or for the log-linear figure one head with a state of width x width."""
    single = figure == "log_linear"
    chosen: dict = {"num_heads": 1 if single else 2}
    if mixer.endswith("mamba2"):
        chosen |= {"state_dim": width, "expand": 1.0} if single else {"num_heads": 4, "state_dim": 16}
    if mixer.startswith("gated") or mixer == "log_linear_gated_delta_net":
        chosen |= {"expand_v": 1.0, "output_gate": False}
    if mixer.startswith("log_linear"):
        chosen["levels"] = (longest - 1).bit_length() + 1
    if mixer == "nats_l":
        chosen |= {"chunk_size": 16, "expand_v": 1.0, "output_gate": False}
    return GATED_CONV if mixer == "gated_conv" else chosen


def task(figure: str) -> tuple[dict, int, int]:
    """(fields of the task, rows of a batch, epochs) of a figure."""
    fields = {"layout": "scattered", "vocab_size": 8192, "power": 0.01, "passes": 1, "shuffle": True, "fill": True}
    if figure == "log_linear":
        sizes = {"length": 256, "pairs": PAIRS, "examples": 2000, "test_examples": 500}
        return fields | sizes, 64, 64
    if figure.startswith("based"):
        length, pairs, examples = zip(*TRAIN, strict=True)
        test_length, test_pairs = zip(*TEST, strict=True)
        sizes = {"length": length, "pairs": pairs, "examples": examples, "test_examples": 1000}
        return fields | sizes | {"test_length": test_length, "test_pairs": test_pairs}, 256, 32
    size = figure.partition("_")[2]
    length, pairs = map(int, size.split("x"))
    sizes = {"length": length, "pairs": pairs, "examples": 100_000, "test_examples": 3000, "fill": False}
    return fields | sizes, ZOOLOGY[size], 64


def get_config(arg: str = ""):
    known = tuple(argument for figure in FIGURES for argument in settings(figure))
    figure, mixer, width = check_mixer(arg, known, "configs/paper_mqar.py").split("-")
    config, (fields, batch, epochs) = base(), task(figure)
    config.data = dict(kind="recall", batch_size=batch, eval_batch_size=250, worker_count=0, task=fields)
    longest = max(fields.get("test_length", (fields["length"],)))
    mixers, chosen = (mixer,), {mixer: options(figure, mixer, int(width), longest)}
    if figure == "based_hybrid":
        mixers, chosen = ("gated_conv", mixer), chosen | {"gated_conv": GATED_CONV}
    config.model.update(width=int(width), depth=2, mixers=mixers, mixer_options=chosen, mlp="none")
    config.model.update(scan=False, norm="layer", norm_eps=1e-5, tie_embeddings=True, embedding_dropout=0.1)
    config.model.update(kernel_init="normal", init_std=0.02)
    rate = RATES[figure.split("_")[0]][1]
    config.optim.update(learning_rate=rate, final_ratio=0.0, decay="all", beta2=0.999, clip_norm=0.0)
    sizes = len(fields["pairs"]) if isinstance(fields["pairs"], tuple) else 1
    examples = fields["examples"] if isinstance(fields["examples"], tuple) else (fields["examples"],) * sizes
    epoch = sum(-(-count // batch) for count in examples)
    config.train.update(steps=epochs * epoch, log_every=100, eval_every=epoch, stop_at=0.99)
    config.train.matmul_precision = "highest"
    return config
