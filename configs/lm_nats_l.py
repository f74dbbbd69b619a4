"""Language models of NAtS-L (arXiv 2602.03681) and their controls.

    python -m experiments.train --config=configs/lm_nats_l.py:nats_l_hybrid --config.data.path=SHARDS \\
        --workdir=runs/nats_l

SHARDS is a folder that experiments/prepare_data.py wrote with a tokenizer of 32,000 entries. 21 layers, context 4096,
0.52M tokens a step; the batch is cut for 4 large GPUs. Behind the name the size: nats_l_hybrid_760m is the larger one.
28,611 steps are 15B tokens. Not run to its end here.

| model | layers 3, 7, 11, 15, 19, 20 | others | parameters, 340m | 760m |
| --- | --- | --- | --- | --- |
| nats_l_hybrid | nats_l, no positions | gated_delta_net | 380,073,212 | 793,144,956 |
| nats_l | nats_l, rotary positions | the same | 380,535,932 | 794,043,516 |
| gdn_hybrid | attention, no positions | gated_delta_net | 367,156,916 | 764,251,188 |
| gdn_hybrid_rope | attention, rotary positions | gated_delta_net | 367,156,916 | 764,251,188 |
| gdn | gated_delta_net | the same | 379,888,124 | 792,785,532 |

What it costs: GFLOP of training a token by count (`efla_jax.flops`), and hours of one H200 for all of it at the part of
the 989 TFLOP/s of its data sheet that a step of 8 x 4096 tokens reached (experiments/results, nats_l_latency): 24 % of
nats_l_hybrid, 106,057 tokens/s, taken for nats_l too; 29 % of gdn, 131,301 tokens/s, for those without routing.

| model | GFLOP, 340m | hours | GFLOP, 760m | hours |
| --- | --- | --- | --- | --- |
| nats_l_hybrid | 2.24 | 39 | 4.76 | 84 |
| nats_l | 2.46 | 43 | 5.09 | 89 |
| gdn_hybrid | 2.21 | 32 | 4.64 | 67 |
| gdn_hybrid_rope | 2.21 | 32 | 4.64 | 67 |
| gdn | 2.16 | 31 | 4.63 | 67 |

The published ablations, of the smaller hybrid, each behind a name of its own; all of them, and the hybrid itself (7 x
39 hours by the same count):

    python -m experiments.sweep --config=configs/lm_nats_l.py --workdir=runs/ablations --jobs=1 \\
        -- --config.data.path=SHARDS
    python -m experiments.evaluate cloze --run=RUN --task=squad --data=squad.jsonl.gz   # and swde, fda, triviaqa, ...

| name | option of nats_l | published, six tasks on average (hybrid: 33.5) | parameters |
| --- | --- | --- | --- |
| nats_l_hybrid_softmax_in_chunk | own_chunk="softmax" | 30.9 | 380,073,212 |
| nats_l_hybrid_linear_in_chunk | own_chunk="linear" | 27.0 | 380,073,212 |
| nats_l_hybrid_no_decay_over_softmax | skipped_decay=False | 32.2 | 380,073,212 |
| nats_l_hybrid_no_output_norm | output_norm=False | 29.6 | 380,071,676 |
| nats_l_hybrid_no_merge_weights | merge="none" | 32.3 | 379,962,620 |
| nats_l_hybrid_merge_from_inputs | merge="inputs" | 27.6 | 380,110,076 |

The first three have no GPU kernels of their own: the branch that they change takes XLA, and is slower than the count
says. Where the paper's words leave it open: weights from inputs are a softmax per attention head as those from queries
are; without weights the two outputs are added; without output norm the delta rule's output is scaled by K^-1/2, which
the norm else takes out, and Gated DeltaNet's layers keep theirs.

Published: AdamW with peak rate 3e-4, cosine to a tenth, 1024 steps of warm-up, clip 1, eps 1e-15. gdn_hybrid beside
every result: the published hybrid has no positions and its baselines rotate, so that only it tells what routing gains.
"""

from configs.common import check_mixer, pretraining

DEPTH = 21
# width, heads of the delta rule, key dim, attention heads, SwiGLU
SIZES = {"340m": (1024, 6, 128, 12), "760m": (1536, 6, 192, 18)}
MODELS = {  # mixer of the softmax layers, of the others, rope_base
    "nats_l_hybrid": ("nats_l", "gated_delta_net", 0.0),
    "nats_l": ("nats_l", "nats_l", 10000.0),
    "gdn_hybrid": ("attention", "gated_delta_net", 0.0),
    "gdn_hybrid_rope": ("attention", "gated_delta_net", 10000.0),
    "gdn": ("gated_delta_net", "gated_delta_net", 0.0),
}
ABLATIONS = {  # of nats_l_hybrid: options of nats_l
    "softmax_in_chunk": {"own_chunk": "softmax"},
    "linear_in_chunk": {"own_chunk": "linear"},
    "no_decay_over_softmax": {"skipped_decay": False},
    "no_output_norm": {"output_norm": False},
    "no_merge_weights": {"merge": "none"},
    "merge_from_inputs": {"merge": "inputs"},
}
ABLATED = tuple(f"nats_l_hybrid_{name}" for name in ABLATIONS)
NAMES = (*MODELS, *(f"{model}_{size}" for model in MODELS for size in SIZES), *ABLATED)


def options(width: int, heads: int, key_dim: int, attention_heads: int, rope_base: float) -> dict:
    """Of each mixer; everything begins normal with the model's init_std."""
    delta = {"num_heads": heads, "head_dim": key_dim, "expand_v": 2.0, "output_gate": True, "gate_init": "normal"}
    routed = {"num_attention_heads": attention_heads, "num_routes": heads, "rope_base": rope_base, "qk_norm": True}
    routed |= {"step": "gated_delta_net", "skipped_decay": True, "counterfactual": False, "gumbel": False}
    routed |= {"own_chunk": "both", "merge": "queries", "output_norm": True}
    attention = {"num_heads": width // 64, "rope_base": rope_base, "qk_norm": True}
    return {"gated_delta_net": delta, "nats_l": delta | routed, "attention": attention}


def get_config(arg: str = ""):
    arg = check_mixer(arg, NAMES, "configs/lm_nats_l.py")
    size = next((size for size in SIZES if arg.endswith(size)), "340m")
    ablation = arg.removeprefix("nats_l_hybrid_") if arg in ABLATED else ""
    some, others, rope_base = MODELS["nats_l_hybrid" if ablation else arg.removesuffix(f"_{size}")]
    width, heads, key_dim, attention_heads = SIZES[size]
    choices = options(width, heads, key_dim, attention_heads, rope_base)
    choices["nats_l"] |= ABLATIONS.get(ablation, {})
    config = pretraining(others, choices, {}, depth=DEPTH)
    config.model.depth = DEPTH
    if some != others:
        config.model.mixers, config.model.tail = (others, others, others, some), (some,)
    config.model.mixer_options = {name: choices[name] for name in dict.fromkeys((some, others))}
    config.model.width = width
    config.model.remat = "full"
    config.data.window = 4096
    config.data.batch_size = 128
    config.train.steps = 28611
    config.train.accumulate = 4
    config.train.eval_every = 1000
    return config


def get_sweep():
    return {"arguments": ("nats_l_hybrid", *ABLATED)}
