"""Language models of about 36M parameters on books, at equal steps: NAtS-L (arXiv 2602.03681) and what it is made of.

    python -m experiments.prepare_data --path=train.jsonl.xz --valid_path=valid.jsonl.xz --tokenizer=tokenizer.json \\
        --output=SHARDS --workers=16
    python -m experiments.train --config=configs/lm_books.py:nats_l_hybrid --config.data.path=SHARDS \\
        --workdir=runs/books/nats_l_hybrid
    python -m experiments.report books --runs=runs/books --out=experiments/results/books

A tokenizer of 32,000 entries. 12 layers of width 384, tied embedding; 800 steps of 32 rows of 4096 tokens are 105M
tokens. Rows are read across the borders between books, which are far longer than a row: without segment ids attention
takes cuDNN on a GPU, and no mixer lays documents out. On an H200 the highest peak (metrics.jsonl) was 26 GiB, of
nats_l_hybrid, which took 0.5 s a step; for less memory --config.train.accumulate=4.

| model | layers 3, 7, 11 | others | parameters |
| --- | --- | --- | --- |
| nats_l_hybrid | nats_l, no positions | gated_delta_net | 35,972,400 |
| gdn | gated_delta_net | the same | 35,961,264 |
| gdn_hybrid | attention, no positions | gated_delta_net | 35,354,148 |
| gdn_hybrid_rope | attention, rotary positions | gated_delta_net | 35,354,148 |
| attention | attention, rotary positions | the same | 33,532,800 |

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


def get_config(arg: str = ""):
    arg = check_mixer(arg, tuple(MODELS), "configs/lm_books.py")
    some, others, rope_base = MODELS[arg]
    delta = {"num_heads": 2, "head_dim": 128, "expand_v": 2.0, "output_gate": True, "gate_init": "normal"}
    attention = {"rope_base": rope_base, "qk_norm": True}
    choices = {
        "gated_delta_net": delta,
        "nats_l": delta | attention | {"num_attention_heads": 4, "num_routes": 2, "counterfactual": False},
        "attention": attention | {"num_heads": 6},
    }
    config = pretraining(others, choices, {}, depth=12)
    config.model.depth = 12
    config.model.mixers = (others,) * 3 + (some,) if some != others else (some,)
    config.model.mixer_options = {name: choices[name] for name in dict.fromkeys(config.model.mixers)}
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
