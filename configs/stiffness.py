"""Exact flow and its controls over the scale of the keys: from where on does a step that is not exact break?

    python -m experiments.sweep --config=configs/stiffness.py --workdir=runs/stiffness --together=3 --jobs=1
    python -m experiments.report stiffness --runs=runs/stiffness --out=experiments/results/stiffness

The recipe of configs/smnist.py (one mixer, beta bias -2, AdamW at a constant 3e-3), with keys that are multiplied by
`key_scale` before the step is taken, in training and when scored. beta |k|^2, the stiffness of an Euler step, grows by
its square: Euler contracts below 2 only, the exact flow always (arXiv 2512.12602, section 3.4, which shows no such
sweep). Behind the colon how the step is taken, a name of `ops.flow_controls`; `normalized` divides the scale out, so
that one scale is its control.

By default on scikit-learn's digits, rows of 64 pixels, at width 32, 200 steps of 64 images: the grid is 36 programs of
three seeds, a quarter of a minute of one core each. With --config.data.path=mnist.npz --config.model.width=64
--config.data.batch_size=128 --config.train.steps=469 that of the paper, on a GPU. Figures:
experiments/results/README.md.
"""

from configs.common import check_mixer, one_layer

STEPS = ("exact", "implicit", "gate_only", "order2", "order4", "euler", "normalized")


def get_sweep():
    """Every step whose stiffness the scale sets, at six scales, three seeds."""
    scales = (0.25, 1.0, 2.0, 4.0, 8.0, 32.0)
    return {"arguments": STEPS[:-1], "grid": {"model.mixer_options.efla.key_scale": scales, "seed": (0, 1, 2)}}


def get_config(arg: str = ""):
    step = check_mixer(arg, STEPS, "configs/stiffness.py")
    config = one_layer("efla", {"step": step, "key_scale": 1.0})
    config.data.update(batch_size=64, eval_batch_size=180)
    config.model.width = 32
    config.optim.learning_rate = 3e-3
    config.train.update(steps=200, log_every=20)
    return config
