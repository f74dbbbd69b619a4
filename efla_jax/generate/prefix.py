"""Reading prompts into a cache, a piece at a time: activations are those of a piece, however long the prompt is.

    prefix = prefill(model, params, [[3, 1, 4], [1, 5]], coming=100)       # coming: room for so many more tokens
    longer = prefill(model, params, [[9], [2, 6]], prefix=prefix)          # goes on; `prefix` can still be used
    many = take(prefix, [0, 0, 0, 1])                                      # rows, as often as wanted

Prompts of different lengths are one batch, padded behind. Padding is invisible, also where a caller has put it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from efla_jax.layers import MIXERS
from efla_jax.layers.attention import AttentionCache
from efla_jax.layers.nats_l import NATSLCache
from efla_jax.model import LanguageModel, mixer_fields
from efla_jax.ops import grow_selected_kv
from efla_jax.ops.segments import positions_divisible

Prompts = Sequence[Sequence[int] | np.ndarray] | np.ndarray
PIECE = 512  # tokens of each row that are read at once
MOST_SPARE = 4096  # tokens of room that nobody asked for
CELL = 64  # tokens of a chunk of the GPU kernels: none is open behind a multiple of them
SHORTEST_BUCKET = 16  # shorter prompts are padded to a power of two of tokens, at least this: few programs serve all


class Prefix(NamedTuple):
    """What rows have read, to go on from any number of times.

    logits   [B, vocabulary] float32, of the token that comes next
    cache    of the model
    length   [B] of numpy: how many tokens each row has read
    segment  [B] int32 of numpy: id of the document that it is in
    """

    logits: jax.Array
    cache: Any
    length: np.ndarray
    segment: np.ndarray


def padded(prompts: Prompts, vocab_size: int, least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as int32 [B, T] with T a power of two, and their lengths [B]. Raises ValueError for what is no prompt, or
    has fewer than `least` tokens."""
    rows = [np.asarray(prompt, np.int32 if len(prompt) == 0 else None) for prompt in prompts]
    if not rows:
        raise ValueError("prompts: there is none; pass a list of lists of token ids.")
    for i, row in enumerate(rows):
        if row.ndim != 1 or row.size < least:
            raise ValueError(f"prompts[{i}]: shape {row.shape} is not a list of at least one token id.")
        if not np.issubdtype(row.dtype, np.integer):
            raise ValueError(f"prompts[{i}]: {row.dtype} is not an integer type; pass token ids.")
        if row.size and (row.min() < 0 or row.max() >= vocab_size):
            raise ValueError(f"prompts[{i}]: ids from {row.min()} to {row.max()}, but vocab_size is {vocab_size}.")
    lengths = np.array([row.size for row in rows], np.int32)
    time = max(SHORTEST_BUCKET, 1 << (max(1, int(lengths.max())) - 1).bit_length())
    tokens = np.zeros((len(rows), time), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : row.size] = row
    return tokens, lengths


def slots(tokens: int) -> int:
    """Room for so many tokens, rounded up by at most an eighth (or to 64), so that few programs serve all lengths."""
    step = max(64, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


@partial(jax.jit, static_argnames=("model", "batch", "room"))
def fresh(model: LanguageModel, batch: int, room: int):
    """The cache of rows that have read nothing."""
    return model.init_cache(batch, max_length=room)


def grown(model: LanguageModel, cache: tuple, room: int, coming: int) -> tuple:
    """The cache, with room for documents of `room` tokens where it has less, and in pools of NAtS-L for what the next
    `coming` tokens may choose. Caches that do not grow stay as they are."""
    parts = []
    for name, part in zip(model.mixers + model.tail, cache, strict=True):
        if isinstance(part, AttentionCache):
            now = part.kv.k.shape[2]
            if room > now:  # by half at least, where that is not much: few programs serve a text that grows
                more = max(room, min(now + now // 2, now + MOST_SPARE)) - now
                wider = ((0, 0), (0, 0), (0, more), (0, 0), (0, 0))
                k, v = jnp.pad(part.kv.k, wider), jnp.pad(part.kv.v, wider)
                part = part._replace(kv=part.kv._replace(k=k, v=v))
        elif isinstance(part, NATSLCache):
            mixer = MIXERS[name](**mixer_fields(model, name), parent=None)
            pool, routes, size = part.kv.k.shape[2], mixer.routes(), mixer.chunk_size
            need = int(jnp.max(part.kv.pages)) + routes * (coming // size + 1)
            if need > pool:  # to twice as many, so that pools do not grow, and compile, with every piece
                pages = max(need, min(max(16, 2 * pool), routes * (room // size + 1)))
                part = part._replace(kv=jax.vmap(partial(grow_selected_kv, pages=pages))(part.kv))
        parts.append(part)
    return tuple(parts)


@partial(jax.jit, static_argnames=("model", "divisible"), donate_argnames=("logits", "cache"))
def read_piece(model: LanguageModel, params, tokens, segment_ids, logits, cache, divisible: int = 1):
    """(logits, cache, broken) after a piece [B, P] of each row: logits [B, vocabulary] behind its last real token, or
    as they were where it has none; broken [B]: the place of the first real token of features that are not finite, or
    -1. divisible: see `positions_divisible`."""
    with positions_divisible(divisible):
        x, cache = model.apply(params, tokens, segment_ids, cache, method="features")
    real = jnp.ones(tokens.shape, bool) if segment_ids is None else segment_ids != 0
    last = tokens.shape[1] - 1 - jnp.argmax(real[:, ::-1], axis=1)
    ahead = cast(jax.Array, model.apply(params, x[jnp.arange(len(x)), last], method="logits"))
    logits = jnp.where(real.any(axis=1, keepdims=True), ahead, logits)
    bad = real & ~jnp.isfinite(x).all(axis=-1)
    return logits, cache, jnp.where(bad.any(axis=1), jnp.argmax(bad, axis=1), -1)


def check_broken(broken, start: int, skipped: np.ndarray) -> None:
    """Raise FloatingPointError if a row of the piece from `start` on is not finite."""
    broken = np.asarray(broken)
    rows = np.flatnonzero(broken >= 0)
    if rows.size:
        row = int(rows[0])
        place = start + int(broken[row]) - int(skipped[row])
        raise FloatingPointError(
            f"prompts[{row}]: from its token {place} on (counted from 0) the model's features are not finite (rows"
            f" {rows.tolist()}). Look for parameters that are not, or a dtype that overflows. Mixers spread a NaN over"
            " tokens that are read together; a smaller piece says more exactly where it is."
        )


def prefill(
    model: LanguageModel,
    params,
    prompts: Prompts,
    *,
    segment_ids: np.ndarray | None = None,
    prefix: Prefix | None = None,
    coming: int = 0,
    piece: int = PIECE,
    progress: Callable[[int], Any] | None = None,
) -> Prefix:
    """The prefix of each prompt, behind `prefix` if given, with room in growing caches for `coming` more tokens.

    prompts: lists of token ids; behind a prefix they may be empty. Or an array [B, T] with segment_ids [B, T]: 0 is
    padding, wherever it stands, and a new id begins a document. piece: tokens of each row that are read at once, which
    bounds the memory of activations and changes no token. progress is called with the tokens of a row that each piece
    adds. A single prompt, and the equal rows of an array without segment_ids, are read without any as far as pieces are
    whole, which some mixers do in less time; other rows depend on none beside them, not even in rounding. Raises
    ValueError for what is no prompt, FloatingPointError with the first token that is not finite."""
    if piece < 1:
        raise ValueError(f"piece: {piece} is not positive.")
    tokens, ids, lengths = laid_out(prompts, segment_ids, prefix, model.vocab_size)
    batch, longest = len(tokens), int(lengths.max(initial=0))
    if prefix is None:
        before, segment = np.zeros(batch, np.int64), np.zeros(batch, np.int32)
    else:
        before, segment = prefix.length, prefix.segment
        if longest == 0 and coming == 0:
            return prefix
    width = min(piece, tokens.shape[1])
    tokens, ids = (np.pad(x, ((0, 0), (0, -x.shape[1] % width))) for x in (tokens, ids))
    room = slots(max(int((before + lengths).max()) + coming, width))
    if prefix is None:
        logits, cache = jnp.zeros((batch, model.vocab_size), jnp.float32), fresh(model, batch, room)
    else:
        logits, cache = jax.tree.map(jnp.copy, (prefix.logits, prefix.cache))  # what is read is given up to the program
    skipped = np.argmax(ids != 0, axis=1)
    used = 1 + np.flatnonzero((ids != 0).any(axis=0)).max(initial=-1)  # behind it all is padding
    equal = segment_ids is None and (batch == 1 or getattr(prompts, "ndim", 1) == 2)
    waiting = None
    for start in range(0, used, width):
        cache = grown(model, cache, room, width)
        part = slice(start, start + width)
        told = None if equal and ids[:, part].all() else ids[:, part]
        # Nothing but whole pieces before this one: every row has read `start` tokens of one document.
        whole = prefix is None and told is None and start % CELL == 0
        given = tokens[:, part], told, logits, cache
        logits, cache, broken = read_piece(model, params, *given, divisible=CELL if whole else 1)
        if waiting is not None:  # one piece late, so that the device never waits for the host
            check_broken(*waiting, skipped)
        waiting = broken, start
        if progress is not None:
            progress(min(width, used - start))
    if waiting is not None:
        check_broken(*waiting, skipped)
    real = ids != 0
    last = ids[np.arange(batch), -1 - np.argmax(real[:, ::-1], axis=1)]
    return Prefix(logits, grown(model, cache, room, 0), before + lengths, np.where(real.any(axis=1), last, segment))


def laid_out(prompts, segment_ids, prefix: Prefix | None, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, segment ids, lengths) of prompts behind a prefix: int32 [B, T], [B, T], [B]."""
    least = 1 if prefix is None else 0
    if prefix is not None and len(prefix.length) != len(prompts):
        raise ValueError(
            f"prefix: it has {len(prefix.length)} rows, and there are {len(prompts)} prompts; `take` repeats rows."
        )
    if segment_ids is None:
        tokens, lengths = padded(prompts, vocab_size, least)
        real = np.arange(tokens.shape[1]) < lengths[:, None]
        document = np.ones(len(tokens), np.int32) if prefix is None else np.maximum(prefix.segment, 1)
        return tokens, np.where(real, document[:, None], 0).astype(np.int32), lengths.astype(np.int64)
    tokens, ids = np.asarray(prompts), np.asarray(segment_ids)
    if tokens.ndim != 2 or tokens.shape != ids.shape or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"segment_ids: {ids.dtype}{list(ids.shape)} beside prompts of shape {list(tokens.shape)}; both must be"
            " integer [B, T]."
        )
    padded([row[on != 0] for row, on in zip(tokens, ids, strict=True)], vocab_size, least)  # checks what is real
    tokens = np.where(ids != 0, tokens, 0)
    return tokens.astype(np.int32), ids.astype(np.int32), (ids != 0).sum(axis=1)


def take(prefix: Prefix, rows: Sequence[int] | np.ndarray) -> Prefix:
    """The rows of a prefix with these numbers, in this order, as often as they are named."""
    count, chosen = len(prefix.length), np.asarray(rows, np.int32)
    if chosen.size == 0 or chosen.min() < 0 or chosen.max() >= count:
        raise ValueError(f"rows: {list(rows)} must be numbers of the prefix's rows, from 0 to {count - 1}.")
    cache = jax.tree.map(lambda x: jnp.take(x, chosen, axis=1), prefix.cache)  # leaves [groups, B, ...]
    return Prefix(prefix.logits[chosen], cache, prefix.length[chosen], prefix.segment[chosen])
