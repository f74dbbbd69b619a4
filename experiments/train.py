r"""Train one model: a config in, a run folder out.

    python -m experiments.train --config=configs/quickstart.py:efla --workdir=runs/first
    python -m experiments.train --config=configs/quickstart.py:efla --workdir=runs/first --resume
    python -m experiments.train --config=configs/lm_340m.py:efla --config.data.path=shards --workdir=runs/lm \
        --config.mesh.fsdp=8                                             # one host of eight GPUs
    srun python -m experiments.train --distributed ... the same ...      # several hosts, one process per GPU
    python -m experiments.train ... --workdir=runs/tuned --init_from=runs/lm

Any field of the experiment file is overridden as --config.section.field=value. SIGTERM saves and exits with status 0,
and Ctrl-C saves, too; the same line with --resume goes on. An image classifier's run ends with its accuracy under the
three corruptions of its test images, as corruption.csv and corruption.png.
"""

import jax
from absl import flags

from efla_jax import evaluate, train
from efla_jax.train import hosts
from experiments import arguments

RESUME = flags.DEFINE_bool("resume", False, "go on from the latest checkpoint in --workdir, if there is one")
INIT_FROM = flags.DEFINE_string("init_from", "", "begin with the parameters of this run's workdir, or step folder")
INIT_PART = flags.DEFINE_enum("init_part", "params", ["params", "ema"], "of that run: its parameters, or their average")
ALLOW_PARTIAL = flags.DEFINE_bool("allow_partial", False, "a checkpoint may lack leaves, or have others; says which")
CAST = flags.DEFINE_bool("cast", False, "a checkpoint's leaves may have other dtypes; says which were cast")
DISTRIBUTED = flags.DEFINE_bool("distributed", False, "join the job that srun, mpirun or the environment describes")
HEARTBEAT = flags.DEFINE_integer(
    "heartbeat_timeout", 100, "seconds until a silent process counts as lost", lower_bound=1
)
COMPILE_CACHE = flags.DEFINE_string("compile_cache", "", "folder of compiled programs, shared by runs; off when empty")


def main(argv: list[str]) -> None:
    arguments.check(argv)
    if COMPILE_CACHE.value:
        jax.config.update("jax_compilation_cache_dir", COMPILE_CACHE.value)
    if DISTRIBUTED.value:
        hosts.join(HEARTBEAT.value)
    run = train.fit(
        arguments.CONFIG.value, arguments.WORKDIR.value, resume=RESUME.value, init_from=INIT_FROM.value,
        init_part=INIT_PART.value, allow_partial=ALLOW_PARTIAL.value, cast=CAST.value,
    )  # fmt: skip
    if not run.finished or jax.process_index():
        return
    print("held out: " + ", ".join(f"{name} {value:.4f}" for name, value in run.scores.items()))
    if jax.process_count() > 1:  # what follows is a program of one process
        print(f"checkpoint: {run.workdir}/checkpoints    loss curve: {run.workdir}/loss.png")
        return
    if run.dataset.kind == "images":
        with jax.default_matmul_precision(arguments.CONFIG.value.train.matmul_precision):  # as it was trained
            rows = evaluate.corruption_curves(run.model, run.params, run.dataset)
        evaluate.write_rows(rows, run.workdir / "corruption.csv")
        evaluate.plot_corruptions({run.workdir.name: [rows]}, run.workdir / "corruption.png")
        print(f"accuracy under corruption: {run.workdir}/corruption.csv, {run.workdir}/corruption.png")
    print(f"checkpoint: {run.workdir}/checkpoints    loss curve: {run.workdir}/loss.png")


if __name__ == "__main__":
    arguments.run(main)
