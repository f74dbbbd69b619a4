"""How fast a config trains on this machine: whole optimiser steps on its own data, without scores and checkpoints.

    python -m experiments.throughput --config=configs/lm_340m.py:efla --config.data.path=shards --steps=50 \
        --config.data.window=2048 --config.data.batch_size=16 --config.mesh.fsdp=1 --out=throughput.jsonl

Prints tokens per second, MFU (see efla_jax/flops.py), the share of time spent waiting for data, and the peak memory of
a device; appends them to --out as a JSON line. The first steps, which compile and warm up, are not counted. --profile
names a folder for a profiler trace of three more steps.
"""

import json
import pathlib
import time

import jax
from absl import flags

from efla_jax import flops, sharding, train
from efla_jax.train import settings
from experiments import arguments

STEPS = flags.DEFINE_integer("steps", 50, "steps that are timed", lower_bound=1)
WARMUP = flags.DEFINE_integer("warmup", 3, "steps before them", lower_bound=1)
OUT = flags.DEFINE_string("out", "", "file to append the result to")
PROFILE = flags.DEFINE_string("profile", "", "folder for a profiler trace")
LABEL = flags.DEFINE_string("label", "", "name of the row; empty: the config's argument")


def main(argv: list[str]) -> None:
    arguments.check(argv, required=("config",))
    config = train.plain(arguments.CONFIG.value)
    with jax.default_matmul_precision(config["train"]["matmul_precision"]):
        mesh, dataset, model, _, begin, placed, step = settings.build(config)
        size, window = config["data"]["batch_size"], config["data"]["window"]
        iterator = dataset.train_iterator(rows=sharding.local_rows(mesh, size))
        waited = 0.0

        def steps(count: int, state):
            nonlocal waited
            report = None
            for _ in range(count):
                asked = time.perf_counter()
                batch = sharding.place(mesh, next(iterator), size)
                waited += time.perf_counter() - asked
                state, report = step(state, batch)
            jax.block_until_ready(state)
            return state, report

        with jax.set_mesh(mesh):
            state = jax.jit(begin, out_shardings=placed)()
            started = time.perf_counter()
            state, _ = steps(WARMUP.value, state)
            warmed, waited = time.perf_counter() - started, 0.0
            started = time.perf_counter()
            state, report = steps(STEPS.value, state)
            seconds, data_wait = (time.perf_counter() - started) / STEPS.value, waited / STEPS.value
            memory = jax.local_devices()[0].memory_stats() or {}
            if PROFILE.value:
                with jax.profiler.trace(PROFILE.value):
                    state, _ = steps(3, state)
    rate = size * window / seconds
    peak = flops.peak_flops(jax.devices()[0])
    row = {
        "label": LABEL.value or ",".join(config["model"]["mixers"]), "batch_size": size, "window": window,
        "mesh": sharding.describe(mesh), "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)), "remat": config["model"]["remat"],
        "step_seconds": seconds, "tokens_per_second": rate, "data_wait_seconds": data_wait,
        "mfu": rate * flops.train_flops_per_token(model, window) / (peak * mesh.size) if peak else None,
        "peak_memory_gib": memory["peak_bytes_in_use"] / 2**30 if "peak_bytes_in_use" in memory else None,
        "warmup_seconds": warmed, "steps": STEPS.value, "loss": float(report["loss"]),
    }  # fmt: skip
    print(json.dumps(row))
    if OUT.value:
        pathlib.Path(OUT.value).parent.mkdir(parents=True, exist_ok=True)
        with open(OUT.value, "a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    arguments.run(main)
