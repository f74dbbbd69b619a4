"""Inputs that have broken such operators before: one maker, many named cases, shapes with pairwise distinct sizes."""

import jax.numpy as jnp
import numpy as np

SHAPE = dict(batch=2, time=37, key_heads=2, heads=6, key_dim=8, value_dim=5)
CASES = (
    "random", "cosine 0.9", "cosine 0.99", "no decay", "strong decay", "forget", "mixed decay",
    "erase 0", "erase 1", "erase up to 2", "zero keys",
)  # fmt: skip


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def recurrence_case(case: str, dtype=jnp.float32, seed: int = 0, **shape):
    """(q, k, u, erase, log_decay, initial_state) and cotangents (o, state) of the named case, exactly representable in
    dtype."""
    s = {**SHAPE, **shape}
    rng = np.random.default_rng(seed)
    keys = (s["batch"], s["time"], s["key_heads"], s["key_dim"])
    values = (s["batch"], s["time"], s["heads"], s["value_dim"])
    states = (s["batch"], s["heads"], s["key_dim"], s["value_dim"])
    q, k = unit(rng.normal(size=keys)), unit(rng.normal(size=keys))
    erase = 1 / (1 + np.exp(-rng.normal(size=values[:3])))
    decay = -np.log1p(np.exp(rng.normal(size=values[:3]) - 2))
    if case.startswith("cosine"):
        cosine = float(case.split()[1])
        centre = unit(rng.normal(size=(s["batch"], 1, s["key_heads"], s["key_dim"])))
        away = unit(k - np.sum(k * centre, -1, keepdims=True) * centre)
        k = np.sqrt(cosine) * centre + np.sqrt(1 - cosine) * away
        erase, decay = 1 / (1 + np.exp(-rng.normal(size=values[:3]) - 4)), decay * 0.02
    changes = {
        "no decay": lambda: (erase, decay * 0),
        "strong decay": lambda: (erase, decay * 0 - 20.0),
        "forget": lambda: (erase, np.where(rng.random(values[:3]) < 0.1, -1e4, 0.0)),
        "mixed decay": lambda: (erase, np.where(rng.random(values[:3]) < 0.1, -60.0, decay * 0.1)),
        "erase 0": lambda: (erase * 0, decay),
        "erase 1": lambda: (erase * 0 + 1, decay),
        "erase up to 2": lambda: (2 * erase, decay),
    }
    erase, decay = changes.get(case, lambda: (erase, decay))()
    if case == "zero keys":
        k = k * (rng.random((*keys[:3], 1)) < 0.7)
    rounded = [jnp.asarray(x, dtype) for x in (q, k, rng.normal(size=values))]
    exact = [jnp.asarray(x, jnp.float32) for x in (erase, decay, rng.normal(size=states))]
    cotangents = jnp.asarray(rng.normal(size=values), dtype), jnp.asarray(rng.normal(size=states), jnp.float32)
    return (*rounded, *exact), cotangents


def packed_ids(batch: int, time: int, seed: int = 0) -> np.ndarray:
    """Segment ids with documents of one token, of a few and of many, and padding in front, inside and behind."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((batch, time), np.int32)
    for row in range(batch):
        lengths = []
        while sum(lengths) < time:
            lengths.append(int(rng.choice([1, 2, 3, 7, 19])))
        ids[row] = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:time]
        ids[row, rng.random(time) < 0.2] = 0
        ids[row, : 3 * (row % 2)] = 0
        ids[row, time - 2 * ((row + 1) % 2) :] = 0
    return ids


def prefix(position, like):
    """States [B, H, L, K, V] of a prefix of so many tokens, in the slots that it has, and which these are."""
    slot, last = np.arange(like.shape[2]), like.shape[2] - 1
    bits = np.asarray(position)[:, None] >> np.maximum(slot - 1, 0)
    live = np.where(slot == last, bits > 0, bits & 1 == 1) & ((slot > 0) | (last == 0))
    states = np.random.default_rng(2).normal(size=like.shape) * live[:, None, :, None, None]
    return jnp.asarray(states, jnp.float32), live
