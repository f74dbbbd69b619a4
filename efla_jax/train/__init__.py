"""Training: a config and a folder go in; a trained model, its checkpoints, metrics and loss curve come out.

    run = fit(config, "runs/first")                                  # the sections of configs/common.py
    run = fit(config, "runs/first", resume=True)                     # go on from the latest checkpoint
    run = fit(config, "runs/tuned", init_from="runs/first")          # its parameters, a fresh optimiser

The config is taken apart here, once: no layer ever sees it. `settings` reads it, `step` is the compiled step, `loop`
runs it, `report` turns what it returns into log rows, `hosts` is what a job of several processes needs.
"""

from efla_jax.train.loop import Run, fit
from efla_jax.train.settings import plain
from efla_jax.train.step import TrainState, make_state, make_step

__all__ = ["Run", "TrainState", "fit", "make_state", "make_step", "plain"]
