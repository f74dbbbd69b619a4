"""Rows of tokens whose last ones are scored: how long ones are cut, which share a program, and their scores.

Rows are padded behind to a power of two of tokens and share a batch with others of that length, so that few programs
serve all; padding is invisible to a causal model, and a score does not depend on the other rows. Rows longer than a
piece are read piece by piece from the cache, in constant memory.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from efla_jax.evaluate import token_scores
from efla_jax.generate.prefix import grown

SHORTEST = 16  # tokens of the shortest rows, and the fewest targets of a row, that have programs of their own


class Score(NamedTuple):
    """Of the targets of a request: sum of log-probabilities, nats; whether greedy decoding says them; how many."""

    logprob: float
    greedy: bool
    tokens: int


class Row(NamedTuple):
    """Tokens [n] int32, of which the last `scored`, fewer than n, are targets."""

    ids: np.ndarray
    scored: int


def windows(row: Row, most: int) -> list[Row]:
    """Rows of at most `most` inputs (0: no limit) that score every target of `row` once.

    A context is cut from the left. More than `most` targets are scored `most` at a time, each part after the token in
    front of it, the last with as much context as there is room for: lm-evaluation-harness's rolling windows."""
    end = len(row.ids)
    if not 0 < most < end - 1:
        return [row]
    parts = []
    for start in range(end - row.scored, end, most):
        stop = min(start + most, end)
        parts.append(Row(row.ids[max(0, stop - most - 1) : stop], stop - start))
    return parts


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number` >= 1."""
    return 1 << (number - 1).bit_length()


def batches(rows: Sequence[Row], batch_tokens: int, piece: int) -> Iterator[tuple[list[int], int, int, int]]:
    """(numbers of rows, batch size, time, places): rows that share a program, the longest first.

    time of the inputs is a power of two, places of the targets one of four; batch size is the largest power of two
    within batch_tokens / time, or that over a power of four where there are few rows. `time` may exceed the piece."""
    groups = defaultdict(list)
    for number, row in enumerate(rows):
        time = max(SHORTEST, power_of_two(len(row.ids) - 1))
        places = SHORTEST << 2 * ((power_of_two(row.scored) // SHORTEST).bit_length() // 2)
        groups[time, min(time, places)].append(number)
    for (time, places), members in sorted(groups.items(), reverse=True):
        size = 1 << max(1, batch_tokens // min(time, piece)).bit_length() - 1
        while size >= 4 * len(members):  # a quarter, a sixteenth, ...: few sizes, that small sets share
            size //= 4
        members.sort(key=lambda number: -len(rows[number].ids))
        for start in range(0, len(members), size):
            yield members[start : start + size], size, time, places


def padded_rows(rows: Sequence[Row], size: int, time: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(inputs, targets, mask) [size, time] of rows, each at the left; mask is True at the targets that are scored."""
    inputs, targets = (np.zeros((size, time), np.int32) for _ in range(2))
    mask = np.zeros((size, time), bool)
    for i, (ids, scored) in enumerate(rows):
        length = len(ids) - 1
        inputs[i, :length], targets[i, :length] = ids[:-1], ids[1:]
        mask[i, length - scored : length] = True
    return inputs, targets, mask


def single_pass(model, params, rows: Sequence[Row], size: int, time: int, places: int) -> list[tuple]:
    """[(nats, right, mask)], [size, places] of the targets; nats and right still on the device."""
    inputs, targets, mask = padded_rows(rows, size, time)
    ends = np.array([len(row.ids) - 1 for row in rows] + [places] * (size - len(rows)))
    at = ends[:, None] - places + np.arange(places)  # a row's targets are its last tokens
    within, at = at >= 0, np.maximum(at, 0).astype(np.int32)
    scores, _ = token_scores(model, params, inputs, np.take_along_axis(targets, at, 1), at)
    return [(scores.nats, scores.right, np.take_along_axis(mask, at, 1) & within)]


def by_pieces(model, params, rows: Sequence[Row], size: int, time: int, piece: int) -> list[tuple]:
    """Of each piece (nats, right, mask); the cache has room for `time` tokens."""
    longest = max(len(row.ids) - 1 for row in rows)
    inputs, targets, mask = padded_rows(rows, size, -(-longest // piece) * piece)
    cache, found = model.init_cache(size, max_length=time), []
    nowhere = np.zeros((size, 1), np.int32)
    for start in range(0, inputs.shape[1], piece):
        part = slice(start, start + piece)
        cache = grown(model, cache, time, piece)
        wanted = bool(mask[:, part].any())  # a piece of context alone needs no logits
        places, asked = (None, targets[:, part]) if wanted else (nowhere, nowhere)
        scores, cache = token_scores(model, params, inputs[:, part], asked, places, cache)
        if wanted:
            found.append((scores.nats, scores.right, mask[:, part]))
    return found


def row_scores(
    model, params, rows: Sequence[Row], *, batch_tokens: int = 32768, piece: int = 4096
) -> Iterator[tuple[int, Score]]:
    """(number of a row, its score) of every row, batch after batch. Scores do not depend on how rows share batches.

    batch_tokens: how many tokens are read at once, one row at least; piece: how many of one row (a power of two).
    Raises ValueError for ids outside the vocabulary and where a score is NaN, naming the row."""
    if piece < SHORTEST or piece & piece - 1:
        raise ValueError(f"piece: {piece} is not a power of two of at least {SHORTEST}.")
    for number, row in enumerate(rows):
        check_row(number, row, model.vocab_size)
    waiting = None
    for members, size, time, places in batches(rows, batch_tokens, piece):
        chosen = [rows[number] for number in members]
        try:
            if time <= piece:
                fresh = single_pass(model, params, chosen, size, time, places)
            else:
                fresh = by_pieces(model, params, chosen, size, time, piece)
            # Read one batch late, so that the device never waits for the host.
            done: list[tuple[int, Score]] = [] if waiting is None else _read(*waiting, rows)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ValueError(f"batch_tokens: {batch_tokens} is too much for the memory at {size} rows of {time} tokens;"
                             f" halve it. ({str(error).splitlines()[0]})") from error  # fmt: skip
        waiting = members, fresh
        yield from done
    if waiting is not None:
        yield from _read(*waiting, rows)


def check_row(number: int, row: Row, vocab_size: int) -> None:
    """Raise ValueError naming a row that has nothing to score or to begin with, or ids outside the vocabulary."""
    ids, scored = row
    if not 0 < scored < len(ids):
        raise ValueError(f"rows[{number}]: {scored} of {len(ids)} tokens cannot be scored; at least one, and not all.")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"rows[{number}]: ids from {min(ids)} to {max(ids)}, but vocab_size is {vocab_size}.")


def _read(members: Sequence[int], parts: list, rows: Sequence[Row]) -> list[tuple[int, Score]]:
    found, parts = [], [(np.asarray(nats, np.float64), np.asarray(right), mask) for nats, right, mask in parts]
    for i, number in enumerate(members):
        nats = sum(float(np.sum(nats[i], where=mask[i])) for nats, _, mask in parts)
        greedy = all(bool(np.all(right[i], where=mask[i])) for _, right, mask in parts)
        if np.isnan(nats):
            raise ValueError(f"rows[{number}]: its log-likelihood is NaN after {len(rows[number].ids)} tokens; look for"
                             " NaN in the parameters, or score in float32.")  # fmt: skip
        found.append((number, Score(-nats, greedy, rows[number].scored)))
    return found
