"""Checkpoints: state, data position and metadata written together, verified and compared before anything is used.

    with Checkpointer("runs/first/checkpoints", keep_best="loss") as checkpointer:
        checkpointer.save(step, state, iterator.get_state(), {"config": config}, {"loss": 2.5})
        restored = checkpointer.restore(state)               # the newest that is not damaged
    params, report = load_params("runs/first", params)       # to begin from another run

A thin layer over orbax. A step appears under its number only when all of it is on disk, so a killed run leaves the last
complete one. With it lies a checksum of each of its files, so that a step damaged later is told from one that does not
fit. Several processes share one file system and call everything together. `jax.set_mesh` neither helps nor disturbs.

`checkpointer` saves and keeps, `restore` compares and reads, `folder` knows which steps there are and which are whole,
`barrier` lets every process of a job end when the write of one has failed.
"""

from efla_jax.checkpoint.checkpointer import Checkpointer, Restored
from efla_jax.checkpoint.restore import Report, load_params

__all__ = ["Checkpointer", "Report", "Restored", "load_params"]
