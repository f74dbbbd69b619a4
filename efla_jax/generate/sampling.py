"""Which token comes next: greedily, or drawn at a temperature from the likely ones; and when a row has ended."""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int


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
    limited = (how.top_k != 0) | (how.top_p < 1)  # sorting a vocabulary may cost more than the model's step
    kept = lax.cond(limited, likely, lambda logits, *_: jnp.ones(logits.shape, bool), logits, how.top_k, how.top_p)
    logits = jnp.where(kept, logits, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def stream_of(prompt: Sequence[int] | np.ndarray, number: int) -> int:
    """The random stream of text `number` behind a prompt's ids: of two prompts, even with one number, no texts share
    their noise, and a prompt has the same wherever it stands."""
    return zlib.crc32(np.asarray(prompt, np.int64).tobytes() + number.to_bytes(8, "little"))


class Choice(NamedTuple):
    """How tokens are chosen, as numbers of Python.

    temperature  0: the most likely token
    top_k, top_p 0 and 1: no limit
    stop_tokens  ids that end a row
    vocabulary   ids from here on are never chosen: a table may have more rows than the tokenizer has tokens; 0: all may
    seed         of the streams, one for each prompt and number of its text (see `stream_of`)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_tokens: tuple[int, ...] = ()
    vocabulary: int = 0
    seed: int = 0

    def check(self, vocab_size: int) -> None:
        """Raise ValueError for what is out of range in a vocabulary of that size."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: {self.temperature} is not >= 0; 0 takes the most likely token.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} is not in (0, 1]; 1 is no limit.")
        if self.top_k < 0:
            raise ValueError(f"top_k: {self.top_k} is negative; 0 is no limit.")
        for token in self.stop_tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(f"stop_token: {token} is not a token id below vocab_size={vocab_size}.")
        if not 0 <= self.vocabulary <= vocab_size:
            raise ValueError(f"vocabulary: {self.vocabulary} is not between 0 and vocab_size={vocab_size}.")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed: {self.seed} is not between 0 and {(1 << 32) - 1}.")
