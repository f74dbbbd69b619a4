"""Contexts of a NAtS-L model that nobody read: choices between linear and softmax attention that are forced, and caches
of random numbers that hold what those choices would have left."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from efla_jax import LanguageModel

SPREAD = 0.6180339887, 0.7548776662  # of chunks and of routing heads: what they add is nowhere near a fraction


def chooses_softmax(chunk: Any, route: Any, fraction: Any, of=jnp) -> Any:
    """Which of the chunks and routing heads (arrays that broadcast) choose softmax."""
    place = of.asarray(chunk * SPREAD[0] + route * SPREAD[1], of.float32)
    return place - of.floor(place) < fraction


def forced(fraction: jax.Array):
    """A context in which routers, traced, choose as `chooses_softmax` says."""

    def interceptor(following: Callable, args, kwargs, context):
        found = following(*args, **kwargs)
        if context.module.name != "router" or context.method_name != "__call__":
            return found
        choice, pooled = found
        position = args[2] if len(args) > 2 else kwargs.get("position")
        first = 0 if position is None else position[:, None, None] // context.module.chunk_size
        number = first + jnp.arange(choice.shape[1])[None, :, None]
        soft = chooses_softmax(number, jnp.arange(choice.shape[2]), fraction).astype(choice.dtype)
        soft = jnp.broadcast_to(soft, choice.shape[:3])
        # A choice is 0 or 1: the router's own is never taken, but a compiler does not know.
        return jnp.where(choice > 2, choice, jnp.stack([soft, 1 - soft], axis=-1)), pooled

    return nn.intercept_methods(interceptor)


def holds(part: Any, field: str) -> bool:
    """Whether a mixer's cache has this field among its keys and values: attention's has length, NAtS-L's pages."""
    return hasattr(part, "kv") and hasattr(part.kv, field)


def begun(model: LanguageModel, length: int, room: int, fraction: float) -> tuple:
    """A cache of one row with room for `room` tokens whose document has `length` tokens: random numbers."""

    def noise(x):
        return 0.1 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype)

    def full(x):
        return jnp.full(x.shape, length, x.dtype)

    parts = []
    for part in model.init_cache(1, max_length=room):
        if holds(part, "length"):
            part = part._replace(
                kv=part.kv._replace(k=noise(part.kv.k), v=noise(part.kv.v), length=full(part.kv.length))
            )
        elif holds(part, "pages"):
            kv = part.kv
            owners = owners_of(length // kv.k.shape[3], kv.open_k.shape[3], kv.k.shape[4], fraction)
            owner = np.zeros(kv.owner.shape, np.int32)
            owner[..., : len(owners)] = owners
            pages, position = (jnp.full(kv.pages.shape, n, jnp.int32) for n in (len(owners), length))
            kv = kv._replace(k=noise(kv.k), v=noise(kv.v), owner=jnp.asarray(owner), pages=pages, position=position)
            part = part._replace(kv=kv, state=part.state._replace(position=full(part.state.position)))
        parts.append(part._replace(segment=jnp.ones_like(part.segment)))
    return tuple(parts)


def owners_of(chunks: int, key_heads: int, shared: int, fraction: float) -> np.ndarray:
    """Owners of the pages of so many chunks, in their order."""
    routes = np.arange(key_heads // shared)
    return np.nonzero(chooses_softmax(np.arange(chunks)[:, None], routes, fraction, np))[1]


def in_use(cache: tuple, length: int) -> float:
    """MiB of a cache that hold something."""
    total = 0.0
    for part in cache:
        if holds(part, "length"):
            total += (part.kv.k.nbytes + part.kv.v.nbytes) * length / part.kv.k.shape[2]
        elif holds(part, "pages"):
            pools = part.kv.k.nbytes + part.kv.v.nbytes
            total += pools * float(part.kv.pages.max()) / part.kv.k.shape[2] - pools
            total += sum(x.nbytes for x in jax.tree.leaves(part))
        else:
            total += sum(x.nbytes for x in jax.tree.leaves(part))
    return total / 2**20
