"""Train one model: a config in, a run folder out.

    python -m experiments.train --config=configs/quickstart.py:efla --workdir=runs/first
    python -m experiments.train --config=configs/quickstart.py:efla --workdir=runs/first --resume
    python -m experiments.train --config=configs/smnist.py:efla --workdir=runs/smnist --config.data.path=mnist.npz

Any field of the experiment file is overridden as --config.section.field=value. An image classifier's run ends with its
accuracy under the three corruptions of its test images, as corruption.csv and corruption.png.
"""

import jax
from absl import flags

from efla_jax import evaluate, train
from experiments import arguments

RESUME = flags.DEFINE_bool("resume", False, "go on from the latest checkpoint in --workdir, if there is one")


def main(argv: list[str]) -> None:
    arguments.check(argv)
    run = train.fit(arguments.CONFIG.value, arguments.WORKDIR.value, resume=RESUME.value)
    print("held out: " + ", ".join(f"{name} {value:.4f}" for name, value in run.scores.items()))
    if run.dataset.kind == "images":
        with jax.default_matmul_precision(arguments.CONFIG.value.train.matmul_precision):  # as it was trained
            rows = evaluate.corruption_curves(run.model, run.params, run.dataset)
        evaluate.write_rows(rows, run.workdir / "corruption.csv")
        evaluate.plot_corruptions({run.workdir.name: [rows]}, run.workdir / "corruption.png")
        print(f"accuracy under corruption: {run.workdir}/corruption.csv, {run.workdir}/corruption.png")
    print(f"checkpoint: {run.workdir}/checkpoints    loss curve: {run.workdir}/loss.png")


if __name__ == "__main__":
    arguments.run(main)
