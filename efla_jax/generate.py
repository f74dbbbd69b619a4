"""Text from a language model: read the prompts in one call, then one token per step of a `lax.scan`.

Prompts of different lengths are one batch, padded behind; padding is invisible, so every row gets what it would alone.
Rows finish at the stop token independently of each other: what a finished row goes on to say is dropped.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from efla_jax.model import LanguageModel

Prompts = Sequence[Sequence[int] | np.ndarray] | np.ndarray
SHORTEST_BUCKET = 16  # prompts are padded to a power of two of tokens, at least this: few programs serve all lengths


def likely(
    logits: Float[Array, "B vocabulary"], top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Bool[Array, "B vocabulary"]:
    """Which tokens may be drawn: the top_k most likely, and of those the fewest whose probability reaches top_p.

    top_k 0 is no limit. Probabilities are those of the top_k alone; the most likely token always stays; of equal ones
    the lower id counts as more likely."""
    vocabulary = logits.shape[-1]
    order = jnp.argsort(-logits, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    kept = rank < jnp.where(top_k == 0, vocabulary, top_k)
    probability = jax.nn.softmax(jnp.where(kept, logits, -jnp.inf), axis=-1)
    falling = jnp.take_along_axis(probability, order, axis=-1)
    before = jnp.take_along_axis(jnp.cumsum(falling, axis=-1) - falling, rank, axis=-1)
    return kept & ((before < top_p) | (rank == 0))


class Sampling(NamedTuple):
    """How to draw: temperature > 0, top_k (0: no limit) and top_p in (0, 1]."""

    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]


def sample(keys: Array, logits: Float[Array, "B vocabulary"], how: Sampling) -> Int[Array, " B"]:
    """One token per row from softmax(logits / temperature) over the `likely` tokens; keys [B], one per row."""
    # The largest is 0, so that a tiny temperature draws it instead of dividing everything to +-inf.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    logits = logits / jnp.maximum(how.temperature, jnp.finfo(jnp.float32).tiny)
    logits = jnp.where(likely(logits, how.top_k, how.top_p), logits, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


@partial(jax.jit, static_argnames=("model", "max_new_tokens", "greedy"))
def continuation(
    model: LanguageModel, params, prompts, lengths, keys, how: Sampling, stop_token, max_new_tokens: int, greedy: bool
) -> Int[Array, "B new"]:
    """New tokens [B, max_new_tokens] after prompts [B, T] whose first `lengths` [B] tokens are real; -1 behind a row's
    end. `stop_token` -1 never stops."""
    batch, time = prompts.shape
    real = (jnp.arange(time) < lengths[:, None]).astype(jnp.int32)
    fresh = model.init_cache(batch, max_length=time + max_new_tokens)
    x, cache = model.apply(params, prompts, real, fresh, method="features")
    logits = model.apply(params, x[jnp.arange(batch), lengths - 1], method="logits")

    def step(carry, number):
        logits, cache, going = carry
        if greedy:
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        else:
            token = sample(jax.vmap(jax.random.fold_in, (0, None))(keys, number), logits, how)
        going &= token != stop_token
        logits, cache = model.apply(params, token[:, None], None, cache)
        return (logits[:, 0], cache, going), jnp.where(going, token, -1)

    going = jnp.ones((batch,), bool)
    _, tokens = lax.scan(step, (logits, cache, going), jnp.arange(max_new_tokens))
    return tokens.T


def padded(prompts: Prompts, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as int32 [B, T] with T a power of two, and their lengths [B]. Raises ValueError for what is no prompt."""
    rows = [np.asarray(prompt) for prompt in prompts]
    if not rows:
        raise ValueError("prompts: there is none; pass a list of lists of token ids.")
    for i, row in enumerate(rows):
        if row.ndim != 1 or row.size == 0:
            raise ValueError(f"prompts[{i}]: shape {row.shape} is not a list of at least one token id.")
        if not np.issubdtype(row.dtype, np.integer):
            raise ValueError(f"prompts[{i}]: {row.dtype} is not an integer type; pass token ids.")
        if row.min() < 0 or row.max() >= vocab_size:
            raise ValueError(f"prompts[{i}]: ids from {row.min()} to {row.max()}, but vocab_size is {vocab_size}.")
    lengths = np.array([row.size for row in rows], np.int32)
    time = max(SHORTEST_BUCKET, 1 << (int(lengths.max()) - 1).bit_length())
    tokens = np.zeros((len(rows), time), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : row.size] = row
    return tokens, lengths


def generate(
    model: LanguageModel,
    params,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    greedy: bool = False,
    stop_token: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """The tokens that follow each prompt, without the stop token: at most max_new_tokens per row.

    prompts: lists or arrays of token ids, of any lengths. temperature 0 is greedy; top_k 0 and top_p 1 are no limits.
    A row's tokens depend on its prompt, its index and the seed, never on the other rows. The cache has room for prompt
    and continuation. Compiled once per number of rows, power of two of the longest prompt, and max_new_tokens.
    Raises ValueError for prompts or settings out of range."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: {max_new_tokens} is not positive.")
    if not temperature >= 0:
        raise ValueError(f"temperature: {temperature} is not >= 0; 0 takes the most likely token.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p: {top_p} is not in (0, 1]; 1 is no limit.")
    if top_k < 0:
        raise ValueError(f"top_k: {top_k} is negative; 0 is no limit.")
    if stop_token is not None and not 0 <= stop_token < model.vocab_size:
        raise ValueError(f"stop_token: {stop_token} is not a token id below vocab_size={model.vocab_size}.")
    tokens, lengths = padded(prompts, model.vocab_size)
    greedy = greedy or temperature == 0
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(len(lengths)))
    how = Sampling(jnp.float32(temperature or 1.0), jnp.int32(top_k), jnp.float32(top_p))
    stop = jnp.int32(-1 if stop_token is None else stop_token)
    new = continuation(
        model, params, tokens, lengths, keys, how, stop, max_new_tokens=max_new_tokens, greedy=bool(greedy)
    )
    return [[int(token) for token in row if token >= 0] for row in np.asarray(new)]
