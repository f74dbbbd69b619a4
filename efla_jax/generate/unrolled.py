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

from efla_jax.model import LanguageModel
from efla_jax.sharding import path_of

# What products read in the model's dtype, whatever the mixer. Filters, norms and the router stay in float32.
MATRICES = re.compile(
    r"((q|k|v|g|z|x|B|C|a|b|dt|mix|level|gate|up|o|out|down)_proj|level_weights/(hidden|out)|lm_head)/kernel$"
    r"|embed/embedding$"
)


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
        own = narrow(block.pop("mixer"), model.mixer_options.get(name, {}).get("dtype", model.dtype))
        groups[f"block_{i}"] = {**narrow(block, model.dtype), "mixer": own}
    leaves = narrow(leaves, model.dtype) | {"groups": groups}
    return model.clone(mixers=model.layers, tail=(), remat="none"), {**params, "params": leaves}


def narrow(params: Any, dtype: Any) -> Any:
    """The parameters with their MATRICES in `dtype`, which is what a model of that dtype multiplies."""

    def one(keys, leaf):
        return leaf.astype(dtype) if MATRICES.search(path_of(keys)) else leaf

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
