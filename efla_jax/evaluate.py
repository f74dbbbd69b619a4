"""Held-out scores: sums of losses and weights over batches, divided once, as training minimises them; and what a model
tells about itself on a batch."""

import csv
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from efla_jax import layers, metrics
from efla_jax.layers.reading import by_layer
from efla_jax.losses import PIECE_BYTES, Sums, class_tallies, cross_entropy, macro_accuracy, weighted_sums
from efla_jax.model import LanguageModel, SequenceClassifier
from efla_jax.ops.segments import positions


def batch_sums(
    model: nn.Module,
    params,
    batch: Mapping[str, jax.Array],
    rngs=None,
    *,
    chunk: int = 0,
    z_loss: float = 0.0,
) -> Sums:
    """The sums of one batch: every unmasked next token, or every unmasked image. `rngs` with "dropout" turns dropout
    on; chunk (text only) and z_loss as in `losses.cross_entropy`.

    Text: {"tokens", "targets", "mask"} [B, T] and, where rows are not one document each, "segment_ids" [B, T]; with
    "places" [B, N] targets and mask are [B, N], of the tokens at those places. Images: {"pixels" [B, T, 1], "labels"
    [B], "mask" [B]}."""
    return sums_and_readings(model, params, batch, rngs, chunk=chunk, z_loss=z_loss)[0]


def sums_and_readings(
    model: nn.Module,
    params,
    batch: Mapping[str, jax.Array],
    rngs=None,
    *,
    chunk: int = 0,
    z_loss: float = 0.0,
    capture: Callable[[nn.Module, str], bool] | bool = False,
) -> tuple[Sums, Mapping[str, Any]]:
    """`batch_sums`, and the intermediates of the same pass that `capture` chooses (see `layers.Reading`)."""
    if isinstance(model, LanguageModel):
        (features, _), state = model.apply(
            params, batch["tokens"], segment_ids=batch.get("segment_ids"), rngs=rngs, method=model.features,
            capture_intermediates=capture, mutable="intermediates",
        )  # fmt: skip

        if "places" in batch:
            features = jnp.take_along_axis(features, batch["places"][..., None], axis=1)

        def logits_of(x: jax.Array) -> jax.Array:
            return cast(jax.Array, model.apply(params, x, method=model.logits))

        sums = cross_entropy(logits_of, features, batch["targets"], batch["mask"], chunk=chunk, z_loss=z_loss)
    elif isinstance(model, SequenceClassifier):
        logits, state = model.apply(
            params, batch["pixels"], rngs=rngs, capture_intermediates=capture, mutable="intermediates"
        )
        sums = weighted_sums(logits, batch["labels"], batch["mask"], z_loss)
    else:
        raise ValueError(f"model: {type(model).__name__} is neither a LanguageModel nor a SequenceClassifier.")
    return sums, state.get("intermediates", {})


def signals(model: nn.Module, params, batch: Mapping[str, jax.Array]) -> dict[str, float]:
    """What the mixers tell about themselves on one batch of `batch_sums`: see `layers.signals`."""
    _, captured = sums_and_readings(
        model, params, batch, capture=lambda module, _: isinstance(module, layers.Reading)
    )  # fmt: skip
    return {name: float(value) for name, value in layers.signals(captured, len(model.mixers)).items()}


@functools.lru_cache(maxsize=8)
def compiled_sums(model: nn.Module, chunk: int = 0):
    """`batch_sums` of a model, jitted once for every evaluation of the process."""
    return jax.jit(functools.partial(batch_sums, model, chunk=chunk))


def evaluate(
    model: nn.Module,
    params,
    batches: Iterable[Mapping[str, np.ndarray]],
    *,
    place: Callable[[Mapping[str, np.ndarray]], Mapping[str, Any]] = lambda batch: batch,
    limit: int = 0,
    chunk: int = 0,
) -> dict[str, float]:
    """{"loss" nats, "accuracy", "weight", and for language models "bits", per scored target} over all the batches.

    place puts a batch on a mesh (`sharding.place`); limit: how many batches, 0 for all; chunk as in
    `losses.cross_entropy`. Scores do not depend on how the examples are batched. Raises ValueError if nothing in the
    batches is scored."""
    run = compiled_sums(model, chunk)
    totals, waiting = np.zeros(len(Sums._fields)), None
    for batch in itertools.islice(batches, limit or None):
        fresh = run(params, place(batch))
        if waiting is not None:  # read one batch late, so that the device never waits for the host
            totals += np.asarray(jax.device_get(waiting), np.float64)
        waiting = fresh
    if waiting is not None:
        totals += np.asarray(jax.device_get(waiting), np.float64)
    return scores_of(model, totals)


def scores_of(model: nn.Module, totals: np.ndarray) -> dict[str, float]:
    """What `evaluate` returns for the `Sums` of all batches."""
    loss, weight, correct, _ = totals
    if not weight:
        raise ValueError("batches: no target has a positive mask, so there is nothing to score.")
    scores = {"loss": float(loss / weight), "accuracy": float(correct / weight), "weight": float(weight)}
    if isinstance(model, LanguageModel):
        scores["bits"] = scores["loss"] / math.log(2)  # bits per byte when the tokens are bytes
    return scores


def evaluate_slices(
    score: Callable[[Iterable[Mapping[str, np.ndarray]]], dict[str, float]],
    slices: Mapping[str, Iterable[Mapping[str, np.ndarray]]],
) -> dict[str, float]:
    """Means of the scores over slices that have equally many examples of equally many targets each, so that they are
    means over examples; and the accuracy of every slice as "accuracy/NAME". `score` is `evaluate` of a model."""
    return mean_of_slices({name: score(batches) for name, batches in slices.items()})


def mean_of_slices(each: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What `evaluate_slices` returns for the scores of every slice."""
    means = {key: float(np.mean([scores[key] for scores in each.values()])) for key in next(iter(each.values()))}
    return means | {f"accuracy/{name}": scores["accuracy"] for name, scores in each.items()}


def batch_tallies(model: nn.Module, params, batch: Mapping[str, jax.Array]) -> jax.Array:
    """`losses.class_tallies` of one batch of `batch_sums`."""
    x, _ = model.apply(params, batch["tokens"], segment_ids=batch.get("segment_ids"), method="features")
    if "places" in batch:
        x = jnp.take_along_axis(x, batch["places"][..., None], axis=1)
    logits = cast(jax.Array, model.apply(params, x, method="logits"))
    return class_tallies(logits, batch["targets"], batch["mask"])


@functools.lru_cache(maxsize=8)
def compiled_tallies(model: nn.Module):
    """`batch_tallies` of a model, jitted once for every evaluation of the process."""
    return jax.jit(functools.partial(batch_tallies, model))


def evaluate_classes(
    model: nn.Module,
    params,
    batches: Iterable[Mapping[str, np.ndarray]],
    *,
    place: Callable[[Mapping[str, np.ndarray]], Mapping[str, Any]] = lambda batch: batch,
    limit: int = 0,
) -> dict[str, float]:
    """{"macro_accuracy"} of all the batches, for few classes: it has a pass of its own. Arguments as of `evaluate`."""
    run = compiled_tallies(model)
    parts = [run(params, place(batch)) for batch in itertools.islice(batches, limit or None)]
    return {"macro_accuracy": macro_accuracy(np.sum(jax.device_get(parts), axis=0, dtype=np.float64))}


def goal_accuracy(scores: Mapping[str, float]) -> float:
    """Which of held-out scores a run's goal is about: the macro accuracy where there is one, as published, or plain."""
    return scores.get("macro_accuracy", scores["accuracy"])


class TokenScores(NamedTuple):
    """Of each target: its negative log-likelihood, nats float32, and whether it was the most likely token."""

    nats: Any
    right: Any


@functools.partial(jax.jit, static_argnames=("model", "chunk"))
def token_scores(
    model: nn.Module, params, tokens, targets, places=None, cache=None, *, chunk: int = 0
) -> tuple[TokenScores, Any]:
    """Scores [B, N] of the targets [B, N] that follow tokens [B, T] at `places` [B, N] (None: everywhere, N = T), and
    the cache after the tokens (None without one). Logits of `chunk` targets of each row exist at once; 0: 256 MiB."""
    x, after = model.apply(params, tokens, None, cache, method="features")
    if places is not None:
        x = jnp.take_along_axis(x, places[..., None], axis=1)

    def score(at):
        x, ids = at
        logits = cast(jax.Array, model.apply(params, x, method="logits"))
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, ids)
        return TokenScores(nats, jnp.argmax(logits, axis=-1) == ids)

    chunk = chunk or max(1, PIECE_BYTES // (4 * len(tokens) * model.vocab_size))
    scores = jax.lax.map(score, (x.swapaxes(0, 1), targets.T), batch_size=min(chunk, x.shape[1]))
    return jax.tree.map(jnp.transpose, scores), None if cache is None else after


def losses_by_position(model: nn.Module, params, rows: np.ndarray, *, piece: int = 0, chunk: int = 0) -> np.ndarray:
    """nats [B, T] of the T targets of rows [B, T + 1] of tokens, each the beginning of a document or taken for one.

    piece > 0 reads that many tokens at a time and carries the cache on: the same numbers, in the memory of a piece and
    of the cache. chunk as in `token_scores`."""
    time = rows.shape[1] - 1
    if not 0 < piece < time:
        scores, _ = token_scores(model, params, rows[:, :-1], rows[:, 1:], chunk=chunk)
        return np.asarray(scores.nats)
    cache, nats = model.init_cache(len(rows), max_length=time), []
    for start in range(0, time, piece):
        stop = min(start + piece, time)
        tokens, targets = rows[:, start:stop], rows[:, start + 1 : stop + 1]
        scores, cache = token_scores(model, params, tokens, targets, cache=cache, chunk=chunk)
        nats.append(scores.nats)
    return np.concatenate(jax.device_get(nats), axis=1)


def position_ends(length: int, width: int, first: int = 64) -> list[int]:
    """Where bins of `length` positions end: at powers of two from `first` on, at multiples of `width`, at the end."""
    powers = (1 << i for i in range((first - 1).bit_length(), length.bit_length()))
    return sorted({*powers, *range(width, length, width), length})


def binned(losses: np.ndarray, ends: Sequence[int], count: int) -> list[dict[str, int | float]]:
    """Rows {"position_end", "loss", "count"} of losses [T] that are means over `count` rows; a bin goes from the end of
    the one before it."""
    edges = list(zip([0, *ends[:-1]], ends, strict=True))
    return [{"position_end": b, "loss": float(np.mean(losses[a:b])), "count": count * (b - a)} for a, b in edges]


def answer_scores(model: nn.Module, params, batch: Mapping[str, np.ndarray], *, chunk: int = 0) -> dict[str, Any]:
    """Of each row of a batch {"tokens", "places", "targets", "mask"} (`data.needle.lay_out`), [B]: "accuracy", 1 where
    greedy decoding would say the whole answer, "nats" and "token_accuracy", means over the answer's tokens.

    In one pass: greedy decoding says the answer exactly if each of its tokens, after those before it, is the most
    likely."""
    scores, _ = token_scores(model, params, batch["tokens"], batch["targets"], batch["places"], chunk=chunk)
    mask = batch["mask"]
    nats, right = (np.asarray(x, np.float64) for x in scores)
    share = (right * mask).sum(1) / mask.sum(1)
    return {"accuracy": share == 1, "nats": (nats * mask).sum(1) / mask.sum(1), "token_accuracy": share}


def level_weights(model: nn.Module, params, batch: Mapping[str, Any]) -> dict[int, np.ndarray]:
    """{depth: level weights [B, T, H, L] float32} of every log-linear mixer of a model on one batch (see `batch_sums`).

    Raises ValueError if the model has none. `live_levels` says which of them weigh a state."""
    images = isinstance(model, SequenceClassifier)
    names = ("pixels",) if images else ("tokens", "segment_ids")

    @jax.jit
    def capture(params, arrays):
        _, captured = model.apply(
            params, arrays[names[0]], segment_ids=arrays.get("segment_ids"), method=None if images else "features",
            capture_intermediates=lambda module, _: isinstance(module, layers.LevelWeights), mutable="intermediates",
        )  # fmt: skip
        return captured.get("intermediates", {})

    found: dict[int, np.ndarray] = {}
    arrays = {name: batch[name] for name in names if name in batch}
    for path, weights in jax.tree.leaves_with_path(capture(params, arrays)):
        found |= by_layer(path, np.asarray(weights), len(model.mixers))
    if not found:
        raise ValueError(f"model: none of its mixers {model.mixers} is log-linear, so there are no level weights.")
    return dict(sorted(found.items()))


def live_levels(segment_ids: np.ndarray, levels: int) -> np.ndarray:
    """Which of `levels` levels a token [B, T] reads: bool [B, T, L], False throughout at padding.

    Level 0 is the token itself; level l >= 1 is there where bit l - 1 of the position in the document is set, the last
    one where any bit from there on is."""
    (batch, time), level = segment_ids.shape, np.arange(levels)
    position = np.asarray(positions(batch, time, jnp.asarray(segment_ids)))
    bits = position[..., None] >> np.maximum(level - 1, 0)
    live = np.where(level == levels - 1, bits > 0, bits & 1 > 0) | (level == 0)
    return live & (segment_ids != 0)[..., None]


def corruption_curves(model: nn.Module, params, dataset) -> list[dict[str, float | str]]:
    """Test accuracy of an image classifier under every corruption: rows {"corruption", "severity", "accuracy",
    "loss"}."""
    rows = []
    for family, severity, images in dataset.corrupted("test"):
        scores = evaluate(model, params, dataset.eval_batches(images))
        rows.append(
            {"corruption": family, "severity": severity, "accuracy": scores["accuracy"], "loss": scores["loss"]}
        )
    return rows


def plot_corruptions(runs: Mapping[str, list[list[dict]]], output: str | pathlib.Path, chance: float = 0.1) -> None:
    """One panel per corruption, accuracy in % against severity; each label's runs (seeds) as mean and band."""
    lines: dict[str, dict[str, tuple]] = {}
    for label, seeds in runs.items():
        for family in dict.fromkeys(row["corruption"] for row in seeds[0]):
            chosen = [[row for row in rows if row["corruption"] == family] for rows in seeds]
            severity = [float(row["severity"]) for row in chosen[0]]
            accuracy = [[100 * float(row["accuracy"]) for row in rows] for rows in chosen]
            lines.setdefault(family, {})[label] = severity, accuracy
    level = {"chance": 100 * chance}
    panels = [metrics.Panel(line, family, "test accuracy, %", "", level) for family, line in lines.items()]
    metrics.plot_lines(panels, output)


def write_rows(rows: list[dict], path: str | pathlib.Path) -> None:
    """Rows with equal keys as a CSV file with a header."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
