"""What a tuner needs of the GPU kernels: the configs worth timing for some sizes, and an operator run with one of them.

The choice is made offline, by `experiments/benchmark.py --tune`, and shipped as a row of the kernel's table; nothing is
timed while a program is imported, traced or run.
"""

import dataclasses
import importlib
import itertools
from collections.abc import Mapping
from typing import Any

import jax

from efla_jax.ops import pallas, pallas_linear
from efla_jax.ops.arguments import recurrence

# The glue of the operators whose kernels have a table: `config_for`, and the operator by its name.
GLUE = {"delta_rule": pallas, "linear_attention": pallas_linear}
# Values of a config's fields that are tried, where it has the field. What changes numbers (precision) is not for a
# clock to choose, and what describes the device (multiprocessors) is no choice.
TRIED: dict[str, tuple] = {
    "stages": (2, 3, 4),
    "early": (False, True),
    "automatic_barriers": (True, False),
    "waves": (1.0, 2.0, 4.0),
}


def candidates(op: str, device_kind: str, key_dim: int, value_dim: int, dtype: str) -> list[Any]:
    """The table's config for these sizes first, then it with every combination of the values in TRIED.

    Raises NotImplementedError for an operator that has no kernel, or whose kernel does not cover the sizes."""
    if op not in GLUE:
        raise NotImplementedError(f"{op}: no GPU kernel with a table of configs; these have one: {tuple(GLUE)}.")
    kernel = importlib.import_module(f"efla_jax.kernels.{op}")
    if reason := kernel.unsupported(key_dim, value_dim, dtype):
        raise NotImplementedError(f"{op}: no GPU kernel for {reason}")
    row = GLUE[op].config_for(device_kind, key_dim, value_dim, dtype)
    fields = {name: values for name, values in TRIED.items() if hasattr(row, name)}
    grid = [dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]
    return list(dict.fromkeys([row, *(dataclasses.replace(row, **choice) for choice in grid)]))


def run(op: str, inputs: Mapping[str, jax.Array], config: Any, interpret=None) -> tuple[jax.Array, jax.Array]:
    """(o, state) of the operator's kernel with this config; inputs by the names of the operator's arguments."""
    q, k, u = (inputs[name] for name in ("q", "k", "u"))
    x = recurrence(q, k, u, inputs.get("erase"), inputs.get("log_decay"), inputs.get("initial_state"), None)
    return getattr(GLUE[op], op)(x, pallas.CHUNK, config=config, interpret=interpret)
