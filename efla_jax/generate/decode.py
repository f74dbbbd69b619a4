"""Tokens behind a prefix, in blocks: a block is one program on the device, and between blocks the host may look.

    decoding = Decoding(model, params, prefix, Choice(temperature=0.8, seed=3), max_new_tokens=100)
    for tokens in decoding:           # [B, n] of numpy, -1 behind a row's end; first few, so that text appears at once
        ...
        decoding.end(rows)            # rows that need no more; the others are not touched by that
"""

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from efla_jax.generate.carried import carried, in_order, written
from efla_jax.generate.prefix import Prefix, grown, slots
from efla_jax.generate.sampling import Choice, Sampling, sample
from efla_jax.generate.unrolled import apart, together, unrolled
from efla_jax.model import LanguageModel

BLOCK = 32  # tokens of each row between two looks of the host


@partial(jax.jit, static_argnames=("model", "block", "greedy"), donate_argnames=("logits", "cache"))
def decode_block(
    model: LanguageModel, params, logits, cache, going, keys, how: Sampling, stops, limit, begin, count,
    *, block: int, greedy: bool,
):  # fmt: skip
    """(tokens [B, block], logits, cache, going, broken) after up to `count` more tokens of each row, as many as it
    takes for all to end.

    tokens: -1 behind a row's end and behind `count`; begin: how many came before; stops [S]: ids that end a row; ids
    from `limit` on are not chosen. broken [B]: the number of the first token of a row that is going whose logits are
    not finite, or -1."""
    allowed = jnp.arange(logits.shape[-1]) < limit
    blocks, params = unrolled(model, params)
    sizes = len(model.mixers), 1 if blocks is model else model.repetitions

    def step(carry):
        i, tokens, logits, cache, going, broken = carry
        fine = jnp.isfinite(logits).all(axis=-1)
        broken = jnp.where(going & ~fine & (broken < 0), begin + i, broken)
        masked = jnp.where(allowed, logits, -jnp.inf)
        if greedy:
            token = jnp.argmax(masked, axis=-1).astype(jnp.int32)
        else:
            token = sample(jax.vmap(jax.random.fold_in, (0, None))(keys, begin + i), masked, how)
        going &= ~(token[:, None] == stops).any(axis=-1) & fine
        tokens = tokens.at[:, i].set(jnp.where(going, token, -1))
        logits, after = blocks.apply(params, token[:, None], None, in_order(cache, parts, i))
        return i + 1, tokens, logits[:, 0], written(cache, after, i), going, broken

    def more(carry):
        return (carry[0] < count) & carry[4].any()

    nothing = jnp.full((len(logits), block), -1, jnp.int32)
    parts = apart(cache, *sizes)
    carry = jnp.int32(0), nothing, logits, carried(parts), going, jnp.full((len(logits),), -1, jnp.int32)
    i, tokens, logits, cache, going, broken = lax.while_loop(more, step, carry)
    return tokens, logits, together(in_order(cache, parts, i), *sizes), going, broken


class Decoding:
    """Rows that go on from a prefix: an iterator of blocks of tokens [B, n], until all have ended.

    streams [B]: numbers of the random streams of the rows (by default their indices): a row's tokens depend on its
    prefix, the seed and its stream, never on the other rows. keep: leave the prefix usable, for the memory of a copy.
    going [B]: which rows have not ended; count: how many tokens each row has been given. Raises ValueError for settings
    out of range, FloatingPointError with the row and token where logits are not finite."""

    def __init__(
        self, model: LanguageModel, params, prefix: Prefix, choice: Choice, *, max_new_tokens: int,
        streams: Sequence[int] | np.ndarray | None = None, block: int = BLOCK, keep: bool = True,
    ):  # fmt: skip
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: {max_new_tokens} is not positive.")
        if block < 1:
            raise ValueError(f"block: {block} is not positive.")
        choice.check(model.vocab_size)
        rows = np.arange(len(prefix.length)) if streams is None else np.asarray(streams)
        if rows.shape != prefix.length.shape:
            raise ValueError(f"streams: {list(rows.shape)} numbers for {len(prefix.length)} rows; give one for each.")
        self.model, self.params, self.block, self.most = model, params, block, max_new_tokens
        self.greedy = choice.temperature == 0
        self.how = Sampling(jnp.float32(choice.temperature or 1.0), jnp.int32(choice.top_k), jnp.float32(choice.top_p))
        self.keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(choice.seed), jnp.asarray(rows, jnp.uint32))
        self.stops = jnp.asarray(choice.stop_tokens or (-1,), jnp.int32)
        self.limit = jnp.int32(choice.vocabulary or model.vocab_size)
        self.length, self.count = prefix.length, 0
        self.room = slots(int(prefix.length.max()) + max_new_tokens)
        self.going = np.ones(len(rows), bool)
        self.logits, self.cache = prefix.logits, prefix.cache
        if keep:
            self.logits, self.cache = jax.tree.map(jnp.copy, (self.logits, self.cache))

    def end(self, rows: Sequence[int] | np.ndarray) -> None:
        """Choose no more tokens for these rows."""
        self.going[np.asarray(rows, np.int64)] = False

    def __iter__(self) -> Iterator[np.ndarray]:
        size = 1
        while self.going.any() and self.count < self.most:
            yield self.advance(min(size, self.block, self.most - self.count))
            size *= 4  # the first token as soon as it is known, then ever larger blocks

    def advance(self, count: int) -> np.ndarray:
        """The next `count` tokens, up to `block`, of every row that is going: [B, n], -1 behind a row's end."""
        self.cache = grown(self.model, self.cache, self.room, count)
        tokens, self.logits, self.cache, going, broken = decode_block(
            self.model, self.params, self.logits, self.cache, self.going, self.keys, self.how, self.stops, self.limit,
            jnp.int32(self.count), jnp.int32(count), block=self.block, greedy=self.greedy,
        )  # fmt: skip
        found, self.going, broken = (np.array(x) for x in (tokens, going, broken))
        rows = np.flatnonzero(broken >= 0)
        if rows.size:
            row = int(rows[0])
            raise FloatingPointError(
                f"row {row}: the logits behind {self.length[row]} tokens of prompt and {broken[row]} others are not"
                f" finite (rows {rows.tolist()}). Look for parameters that are not, or a dtype that overflows."
            )
        self.count += count
        return found[:, :count]
