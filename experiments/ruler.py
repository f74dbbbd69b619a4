"""RULER's needles: what a run says to each question, the table of kinds and lengths, maps of depth over length."""

import argparse
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from efla_jax.data import answers, needle, readers
from efla_jax.scoring import Scorer, beginning
from experiments import language_runs
from experiments.result_files import about, markdown, mean_of, opened, write, write_outputs

DEPTH_BINS, MOST_COLUMNS = 10, 4  # of a picture: where depths were drawn, and its maps


def haystacks(chosen: argparse.Namespace) -> dict[str, needle.Needles]:
    """The needles of each kind. What does not fit or is missing is said before parameters are read."""
    _, config = language_runs.recorded(chosen)
    tokenizer = language_runs.tokenizer_of(chosen, config)
    begin = beginning(tokenizer, chosen.policy)
    files = readers.list_files(chosen.haystack) if chosen.haystack else []
    texts = (record.text for name, file in files for record in readers.read_file(name, file))
    text = b"\n".join(texts).decode(errors="replace")
    words = needle.read_words(chosen.words) if chosen.words else (needle.ADJECTIVES, needle.NOUNS)
    of = {}
    for kind in chosen.kinds:
        own = needle.KINDS[kind].haystack == "text"
        of[kind] = needle.Needles(kind, tokenizer.encode, text if own else "", seed=chosen.seed, words=words,
                                  bos=begin.token if begin.always else -1, room=chosen.tokens)  # fmt: skip
        for length in (min(chosen.lengths), max(chosen.lengths)):
            try:
                of[kind].prompt(length, chosen.depths[0])
            except ValueError as error:
                raise ValueError(f"--kinds: {kind} at --lengths={length}: {error}") from None
    return of


def found_needles(scorer: Scorer, needles: needle.Needles, length: int, chosen: argparse.Namespace) -> list[dict]:
    """A record of each question of one kind and length."""
    count = min(chosen.count, chosen.limit or chosen.count)
    asked = [(depth, index) for depth in chosen.depths for index in range(count)]
    bar = tqdm(asked, unit="prompt", desc=f"prompts of {length} tokens", disable=not scorer.progress, leave=False)
    prompts = [needles.prompt(length, depth, index) for depth, index in bar]
    outputs = scorer.generate([prompt.question for prompt in prompts], [], chosen.tokens)
    records = []
    for (depth, index), prompt, output in zip(asked, prompts, outputs, strict=True):
        found = answers.found(output, prompt.answers)
        records.append({
            "length": length, "depth": depth, "index": index, "answers": list(prompt.answers), "output": output,
            "depths": list(prompt.depths), "found": found, "all": sum(found) / len(found), "part": float(any(found)),
        })  # fmt: skip
    if chosen.strict:
        scores = scorer.loglikelihood([(prompt.question, prompt.answer) for prompt in prompts])
        for record, score in zip(records, scores, strict=True):
            record |= {"exact": float(score.greedy), "nats": -score.logprob / score.tokens}
    return records


def ruler_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means by kind, length and depth: "score" is RULER's string_match_all, "part" its string_match_part."""
    groups: dict[tuple, list[Mapping]] = {}
    for record in records:
        groups.setdefault((record["kind"], record["length"], record["depth"]), []).append(record)
    rows = []
    for (kind, length, depth), some in groups.items():
        row = {"kind": kind, "length": length, "depth": depth, **mean_of([one["all"] for one in some])}
        names = [name for name in ("part", "exact", "nats") if name in some[0]]
        rows.append(row | {name: float(np.mean([one[name] for one in some])) for name in names})
    return rows


def ruler_table(records: Sequence[Mapping[str, Any]]) -> str:
    """RULER's table: percent by kind and length, over all depths, and the mean of the kinds."""
    kinds, lengths = (list(dict.fromkeys(record[name] for record in records)) for name in ("kind", "length"))

    def percent(kind: str, length: int) -> float:
        some = [record["all"] for record in records if (record["kind"], record["length"]) == (kind, length)]
        return 100 * float(np.mean(some)) if some else float("nan")

    cells = np.array([[percent(kind, length) for length in lengths] for kind in kinds])
    complete = np.isfinite(cells).all(axis=0)
    means = np.where(complete, np.where(complete, cells, 0).mean(axis=0), np.nan)
    lines = [*zip(kinds, cells, strict=True), ("mean", means)]
    return markdown([{"kind": kind, **{str(n): f"{x:.1f}" if np.isfinite(x) else "-" for n, x in
                                       zip(lengths, line, strict=True)}} for kind, line in lines])  # fmt: skip


def depth_map(records: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> tuple[np.ndarray, list[str]]:
    """Shares of the values found [depths, lengths], NaN without any, and the names of the depths: those that were
    given, or tenths."""
    drawn = any(record["depth"] == needle.DRAWN for record in records)
    given = sorted({record["depth"] for record in records if record["depth"] != needle.DRAWN})
    names = [f"{10 * i}-{10 * i + 10}" for i in range(DEPTH_BINS)] if drawn else [str(depth) for depth in given]
    total, hits = np.zeros((2, len(names), len(lengths)))
    for record in records:
        # A depth that was given is that of the first value alone, so its prompt counts there as a whole.
        places = record["depths"] if drawn else [record["depth"]]
        right = record["found"] if drawn else [record["all"]]
        for place, hit in zip(places, right, strict=True):
            row = min(int(place * DEPTH_BINS / 100), DEPTH_BINS - 1) if drawn else given.index(place)
            total[row, lengths.index(record["length"])] += 1
            hits[row, lengths.index(record["length"])] += hit
    return np.divide(hits, total, out=np.full_like(hits, np.nan), where=total > 0), names


def plot_depths(records: Sequence[Mapping[str, Any]], output: pathlib.Path) -> None:
    """A map of depth over length for each kind: the share of the values that were found, from 0 to 1."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    kinds, lengths = (list(dict.fromkeys(record[name] for record in records)) for name in ("kind", "length"))
    columns = min(len(kinds), MOST_COLUMNS)
    size = 1.6 + (1.2 + 0.5 * len(lengths)) * columns, 3.4 * -(-len(kinds) // columns)
    figure, image = Figure(figsize=size, layout="constrained"), None
    grid = figure.subplots(-(-len(kinds) // columns), columns, squeeze=False, sharey=True)
    for axes in grid.flat[len(kinds) :]:
        axes.set_visible(False)
    for axes, kind in zip(grid.flat, kinds, strict=False):
        values, names = depth_map([record for record in records if record["kind"] == kind], lengths)
        image = axes.imshow(values, vmin=0, vmax=1, aspect="auto", cmap=colormaps["viridis"].with_extremes(bad="0.85"))
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=7,
                          color="white" if value < 0.6 else "black")  # fmt: skip
        named = [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in lengths]
        axes.set_xticks(range(len(lengths)), named, fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_title(kind, fontsize=9)
        axes.set_xlabel("tokens", fontsize=8)
    for axes in grid[:, 0]:
        axes.set_ylabel("depth, percent of the haystack", fontsize=8)
    figure.colorbar(image, ax=grid, label="share of values found")
    figure.savefig(output, dpi=150)


def ruler(chosen: argparse.Namespace) -> None:
    """OUT/ruler.json, .md and _outputs.jsonl, written anew after every kind and length, and .png in the end."""
    of = haystacks(chosen)
    run, scorer, out = opened(chosen, "ruler")
    records: list[dict] = []
    with jax.default_matmul_precision(run.precision):
        for kind, needles in of.items():
            for length in chosen.lengths:
                fresh = found_needles(scorer, needles, length, chosen)
                records += [{"kind": kind, **record} for record in fresh]
                write(out, "ruler", about(chosen, run, scorer), ruler_rows(records), ruler_table(records))
                write_outputs(out, "ruler", records)
    plot_depths(records, out / "ruler.png")
    print(f"{ruler_table(records)}\n\nwritten: {out / 'ruler.json'}, ruler.md, ruler.png, ruler_outputs.jsonl")
