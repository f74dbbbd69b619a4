"""The choice of a GPU kernel's config, `--tune` of `experiments.benchmark`: every candidate of `ops.tuning` is timed,
forward and forward + backward, at every one of --lengths.

tune.json has what each took, which failed and how far its outputs are from those of the table's row (a config is no
choice of numbers: 0 but for the order of sums). A candidate replaces the row if it is more than 3 % faster at every
length in one of the passes and nowhere slower by more than 1 %; of several the one with the smallest product of times.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from efla_jax.ops import tuning
from experiments import benchmark_operators
from experiments.benchmark_setting import (
    DTYPE,
    HEADS,
    KEY_DIM,
    KEY_HEADS,
    LENGTHS,
    OP,
    OUT,
    PASSES,
    VALUE_DIM,
    make_inputs,
    numbers,
    rows_of,
)

GAIN, LOSS = 1.03, 1.01  # what a candidate must win in a pass, and may lose in the other


def program(op: str, both: bool, config: Any) -> Callable:
    """inputs -> (outputs, state), or those with the gradients of their sum: the cotangents are ones."""

    def forward(inputs):
        return tuning.run(op, inputs, config)

    def gradients(inputs):
        out, pull = jax.vjp(forward, inputs)
        return *out, pull(jax.tree.map(jnp.ones_like, out))

    return gradients if both else forward


def compiled(op: str, both: bool, config: Any, inputs: dict[str, jax.Array]) -> Callable:
    """The program compiled for this device and these inputs."""
    return jax.jit(program(op, both, config)).lower(inputs).compile()


def apart(found: Any, reference: Any) -> float:
    """RMS(found - reference) / RMS(reference) of all arrays together."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True))
    wide = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in pairs]
    difference = sum(float(jnp.sum((x - y) ** 2)) for x, y in wide)
    return math.sqrt(difference / (sum(float(jnp.sum(y**2)) for _, y in wide) or 1.0))


def chosen(tried: list[dict]) -> dict:
    """Of rows {"config", "ms": {(length, pass): ms}}, the table's first, the one that the table should have."""
    kept = tried[0]

    def better(row: dict) -> bool:
        gains = {key: kept["ms"][key] / ms for key, ms in row["ms"].items()}
        wins = [all(gain > GAIN for (_, measured), gain in gains.items() if measured == name) for name in PASSES]
        return any(wins) and min(gains.values()) > 1 / LOSS

    rivals = [row for row in tried[1:] if "error" not in row and ("error" in kept or better(row))]
    return min(rivals, key=lambda row: math.prod(row["ms"].values()), default=kept)


def measure(config: Any, reference: dict[int, Any]) -> dict[str, Any]:
    """{"config", "ms", "apart"} or, of a config that a compiler refuses, "error". reference: outputs by length, which
    the first config leaves here."""
    row: dict[str, Any] = {"config": dataclasses.asdict(config), "ms": {}, "apart": 0.0}
    try:
        for length in numbers(LENGTHS, 1):
            inputs = make_inputs("pallas", length, 0)
            for both in (False, True):
                run = compiled(OP.value, both, config, inputs)
                row["ms"][length, PASSES[both]] = benchmark_operators.measure(run, inputs)["ms"]
            found = run(inputs)
            row["apart"] = max(row["apart"], apart(found, reference.setdefault(length, found)))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
    return row


def plain(row: dict) -> dict:
    """A row as JSON has it."""
    return row | {"ms": {f"T={length} {name}": ms for (length, name), ms in row["ms"].items()}}


def tune() -> None:
    """tune.json: the config that the table should have, and what all of them took."""
    sizes = {"op": OP.value, "K": KEY_DIM.value, "V": VALUE_DIM.value, "dtype": DTYPE.value}
    device, tried, reference = jax.devices()[0].device_kind, [], {}
    for config in tuning.candidates(OP.value, device, *list(sizes.values())[1:]):
        tried.append(measure(config, reference))
        print(json.dumps(plain(tried[-1])), flush=True)
    best = chosen(tried)
    (out := pathlib.Path(OUT.value)).mkdir(parents=True, exist_ok=True)
    rows = {str(length): rows_of(length) for length in numbers(LENGTHS, 1)}
    sizes |= {
        "device": device,
        "jax": jax.__version__,
        "batch": rows,
        "heads": HEADS.value,
        "key_heads": KEY_HEADS.value,
    }
    found = sizes | {"changed": best is not tried[0]} | plain(best) | {"tried": list(map(plain, tried))}
    (out / "tune.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{'better' if best is not tried[0] else 'the table stays'}: {best['config']}\nwritten: {out}/tune.json")
