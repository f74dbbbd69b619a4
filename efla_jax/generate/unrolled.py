"""A model as a loop over tokens runs it: block by block, its matrices in the dtype of its products.

A loop over the depth inside of a loop over tokens writes every block's cache to a new place and copies it back, once a
token; and float32 matrices would be read, rounded and multiplied, once a token. Here both are done once for all tokens,
and what comes out is the same: the same blocks, of the same rounded matrices.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from efla_jax.layers import MIXERS
from efla_jax.model import LanguageModel, mixer_fields
from efla_jax.sharding import path_of

# What products read in the model's dtype, whatever the mixer, and what those of this package's mixers do: gates of one
# from elsewhere may be of float32. Filters, norms and the router are.
MATRICES = re.compile(r"((q|k|v|g|z|x|B|C|gate|up|o|out|down)_proj|lm_head)/kernel$|embed/embedding$")
GATES = re.compile(r"((a|b|dt|mix|level)_proj|level_weights/(hidden|out))/kernel$")


def unrolled(model: LanguageModel, params: Mapping[str, Any]) -> tuple[LanguageModel, Mapping[str, Any]]:
    """(model, params) that say the same with every block of the depth by itself; its caches: see `apart`. A model whose
    parameters are not those of a pattern that is repeated, as of a class of one's own, stays as it is."""
    leaves = dict(params.get("params", {}))
    if "groups" not in leaves:
        return model, params
    pattern, repeated, last = len(model.mixers), leaves.pop("groups"), leaves.pop("last", {})
    blocks = [
        jax.tree.map(lambda leaf: leaf[i : i + 1], repeated[f"block_{j}"])  # noqa: B023
        for i in range(model.repetitions)
        for j in range(pattern)
    ]
    blocks += [last[f"block_{i}"] for i in range(len(blocks), model.depth)]
    groups = {}
    for i, (name, block) in enumerate(zip(model.layers, map(dict, blocks), strict=True)):
        own, dtype = block.pop("mixer"), mixer_fields(model, name).get("dtype")
        if dtype is not None:  # a mixer without the field has not heard of the model's
            own = narrow(own, dtype, gates=MIXERS[name].__module__.startswith("efla_jax."))
        groups[f"block_{i}"] = {**narrow(block, model.dtype), "mixer": own}
    leaves = narrow(leaves, model.dtype) | {"groups": groups}
    return model.clone(mixers=model.layers, tail=(), remat="none"), {**params, "params": leaves}


def narrow(params: Any, dtype: Any, gates: bool = True) -> Any:
    """The parameters with their MATRICES, and GATES, in `dtype`, which is what a model of that dtype multiplies."""

    def one(keys, leaf):
        path = path_of(keys)
        return leaf.astype(dtype) if MATRICES.search(path) or gates and GATES.search(path) else leaf

    return jax.tree_util.tree_map_with_path(one, params)


def apart(cache: tuple, pattern: int, count: int) -> tuple:
    """The cache of a model, leaves [count, B, ...] for each mixer of its pattern and [1, B, ...] for those of its tail,
    as that of the unrolled model."""
    if count == 1:
        return cache
    repeated = cache[:pattern]
    ones = (jax.tree.map(lambda leaf: leaf[i : i + 1], one) for i in range(count) for one in repeated)  # noqa: B023
    return (*ones, *cache[pattern:])


def together(cache: tuple, pattern: int, count: int) -> tuple:
    """`apart`, undone."""
    if count == 1:
        return cache
    same = (cache[j : pattern * count : pattern] for j in range(pattern))
    repeated = (jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *blocks) for blocks in same)
    return (*repeated, *cache[pattern * count :])
