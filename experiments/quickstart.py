"""`make quickstart`: two small byte models on the text that Python ships, EFLA beside DeltaNet, with the numbers around
them.

    python -m experiments.quickstart --workdir=runs/quickstart

Trains both for the same steps (or goes on, or only shows the results of a finished run), then prints held-out bits per
byte beside a byte bigram and lzma, a sampled continuation, where everything is, and what to type next.
"""

import os
import pathlib
import sys

from absl import flags

from configs import quickstart
from efla_jax import data, generate, metrics, train
from experiments import arguments

PROMPT = 'def read(self, size=-1):\n        """Return '
PYTHON = os.path.relpath(sys.executable)  # as it is typed from here
NEXT = f"{PYTHON} -m experiments.train --config=configs/quickstart.py:gated_efla --workdir=runs/gated_efla"
MIXERS = ("efla", "delta_net")
STEPS = flags.DEFINE_integer(
    "steps", 0, "training steps of each model; 0: those of configs/quickstart.py", lower_bound=0
)


def bits(workdir: pathlib.Path) -> tuple[list[tuple[str, float]], dict]:
    """(name, held-out bits per byte) of both models and of the yardsticks, and the runs."""
    runs, rows = {}, []
    for mixer in MIXERS:
        config = quickstart.get_config(mixer)
        config.train.steps = STEPS.value or config.train.steps
        runs[mixer] = train.fit(config, workdir / mixer, resume=True)
        rows.append((f"{mixer}, {config.train.steps} steps", runs[mixer].scores["bits"]))
    splits = runs[MIXERS[0]].dataset.splits
    rows.append(("byte bigram, fitted on the training text", data.bigram_bits_per_byte(splits.train, splits.valid)))
    rows.append(("lzma, held-out text alone", data.lzma_bits_per_byte(splits.valid)))
    return rows, runs


def main(argv: list[str]) -> None:
    arguments.check(argv, required=("workdir",))
    workdir = pathlib.Path(arguments.WORKDIR.value)
    rows, runs = bits(workdir)
    metrics.plot_curves({mixer: run.workdir for mixer, run in runs.items()}, workdir / "loss.png")
    print("\nheld-out bits per byte (documents that no model was trained on; lower is better)")
    for name, value in rows:
        print(f"  {value:6.3f}  {name}")
    print(f"\nEFLA goes on from {PROMPT!r}:\n{PROMPT}{sampled(runs[MIXERS[0]])}")
    print(f"\nloss curves   {workdir}/loss.png")
    print("checkpoints   " + ", ".join(f"{run.workdir}/checkpoints" for run in runs.values()))
    print(f"\nnext          {NEXT}")


def sampled(run: train.Run) -> str:
    """At most 200 bytes that the model writes after PROMPT, up to the end of the document."""
    prompts, stop = [list(PROMPT.encode())], data.END_OF_DOCUMENT
    how = {"max_new_tokens": 200, "temperature": 0.7, "stop_token": stop, "seed": 0}
    return bytes(generate.generate(run.model, run.params, prompts, **how)[0]).decode(errors="replace")


if __name__ == "__main__":
    arguments.run(main)
