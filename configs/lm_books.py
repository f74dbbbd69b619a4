"""Language models of about 36M parameters on books, at equal steps: every mixer in one recipe, and NAtS-L (arXiv
2602.03681) beside what it is made of.

    python -m experiments.prepare_data --path=train.jsonl.xz --valid_path=valid.jsonl.xz --tokenizer=tokenizer.json \\
        --output=SHARDS --workers=16
    python -m experiments.train --config=configs/lm_books.py:efla --config.data.path=SHARDS --workdir=runs/books/efla
    python -m experiments.report books --runs=runs/books --out=experiments/results/books

A tokenizer of 32,000 entries. 12 layers of width 384, tied embedding; 800 steps of 32 rows of 4096 tokens are 105M
tokens. Rows are read across the borders between books, which are far longer than a row: without segment ids attention
takes cuDNN on a GPU, and no mixer lays documents out. On an H200 the highest peak (metrics.jsonl) was 26 GiB, of
nats_l_hybrid, which took 0.5 s a step by XLA; for less memory --config.train.accumulate=4.

All delta rules have the heads of Gated DeltaNet (two of K = 128, V = 256, output gate), both Mamba-2s twelve heads of
64 with a state of 128: within a family only the recurrence differs. Log-linear mixers have 16 levels, for 32,768
tokens; rows of training reach 13 of them, and the last of those serves the levels beyond.

| model | layers 3, 7, 11 | others | parameters |
| --- | --- | --- | --- |
| nats_l_hybrid | nats_l, no positions | gated_delta_net | 35,972,400 |
| gdn | gated_delta_net | the same | 35,961,264 |
| gdn_hybrid | attention, no positions | gated_delta_net | 35,354,148 |
| gdn_hybrid_rope | attention, rotary positions | gated_delta_net | 35,354,148 |
| attention | attention, rotary positions | the same | 33,532,800 |
| delta_net | the same mixer | the same | 35,952,000 |
| efla | the same mixer | the same | 35,952,000 |
| gated_efla | the same mixer | the same | 35,961,264 |
| mamba2 | the same mixer | the same | 38,376,240 |
| log_linear_mamba2 | the same mixer, linear level weights | the same | 39,263,280 |
| adaptive_mamba2 | log_linear_mamba2, level weights of an MLP | the same | 39,286,512 |
| log_linear_gated_delta_net | the same mixer | the same | 36,109,104 |
| log_linear_efla | the same mixer | the same | 36,099,840 |

A softmax fraction that grows too large: --config.train.softmax_penalty=0.01 adds a hundredth of it to the loss.
"""

from configs.common import check_mixer, pretraining

MODELS = {  # mixer of the softmax layers, of the others, rope_base
    "nats_l_hybrid": ("nats_l", "gated_delta_net", 0.0),
    "gdn": ("gated_delta_net", "gated_delta_net", 0.0),
    "gdn_hybrid": ("attention", "gated_delta_net", 0.0),
    "gdn_hybrid_rope": ("attention", "gated_delta_net", 10000.0),
    "attention": ("attention", "attention", 10000.0),
}
ALONE = (  # mixers that are all of a model of their name
    "delta_net", "efla", "gated_efla", "mamba2", "log_linear_mamba2", "log_linear_gated_delta_net", "log_linear_efla",
)  # fmt: skip
LEVELS = {"levels": 16, "trained_levels": 13}
ADAPTIVE = {"level_kind": "mlp_softplus", "level_hidden": 64, "level_gelu": True}


def get_config(arg: str = ""):
    arg = check_mixer(arg, (*MODELS, *ALONE, "adaptive_mamba2"), "configs/lm_books.py")
    own = "log_linear_mamba2" if arg == "adaptive_mamba2" else arg
    some, others, rope_base = MODELS.get(arg, (own, own, 0.0))
    delta = {"num_heads": 2, "head_dim": 128, "expand_v": 2.0, "output_gate": True}
    gated = delta | {"gate_init": "normal"}
    mamba = {"num_heads": 12, "state_dim": 128, "expand": 2.0, "gate_init": "normal"}
    attention = {"rope_base": rope_base, "qk_norm": True}
    choices = {
        "delta_net": delta,
        "efla": delta,
        "gated_delta_net": gated,
        "gated_efla": gated,
        "mamba2": mamba,
        "log_linear_mamba2": mamba | LEVELS | (ADAPTIVE if arg == "adaptive_mamba2" else {}),
        "log_linear_gated_delta_net": gated | LEVELS,
        "log_linear_efla": gated | LEVELS,
        "nats_l": gated | attention | {"num_attention_heads": 4, "num_routes": 2, "counterfactual": False},
        "attention": attention | {"num_heads": 6},
    }
    config = pretraining(others, choices, {}, depth=12)
    config.model.depth = 12
    config.model.mixers = (others,) * 3 + (some,) if some != others else (some,)
    config.model.mixer_options = {name: choices[name] for name in dict.fromkeys(config.model.mixers)}
    config.model.mlp = "swiglu"
    config.model.width = 384
    config.model.tie_embeddings = True
    config.model.remat = "dots"
    config.data.packing = "stream"
    config.data.batch_size = 32
    config.data.eval_batch_size = 32
    config.optim.learning_rate = 1e-3
    config.optim.warmup_steps = 100
    config.train.steps = 800
    config.train.signals_every = 20
    config.train.eval_every = 100
    config.train.eval_batches = 0
    config.train.save_every = 400
    config.train.keep = 1
    return config
