r"""What a trained language model knows and does: benchmarks, and what it makes of long texts.

    python -m experiments.evaluate COMMAND --run=RUN ...         # each COMMAND --help has its options

    suite, perplexity               experiments/suite.py: zero-shot tasks of the papers, perplexities of texts
    harness                         experiments/harness.py: lm-evaluation-harness
    ruler, cloze, longbench, ...    experiments/long_context.py: needles, recall-intensive questions, long documents
    per_position, needle            here:

    python -m experiments.evaluate per_position --run=runs/lm --data=books.jsonl.xz --tokenizer=tokenizer.json \
        --length=32768 --rows=16

Loss, nats per token, by position in the first and following `length` tokens of held-out documents (the first of every
document, then the second, ...); documents that are shorter are left out. --data is a folder that prepare_data wrote,
or a file or folder of text. Writes per_position.csv. --piece=4096 reads that many tokens at a time.

    python -m experiments.evaluate needle --run=runs/lm --tokenizer=tokenizer.json --kind=single_2 \
        --haystack=essays.txt.gz --lengths=1024,2048,4096,8192 --depths=0,25,50,75,100 --count=20

Single needles of RULER (efla_jax/data/needle.py). Writes needle.csv: accuracy of greedy decoding (the whole answer,
at once: stricter than RULER, which looks for it in 128 tokens), nats per token of the answer, nats_without its needle
in the same haystack, filled up to the same length, and the share of the answer's tokens that are guessed.
"""

import argparse
import pathlib
from collections.abc import Iterator

import jax
import numpy as np
from tqdm import tqdm

from efla_jax import evaluate
from efla_jax.data import needle, open_shards, readers, shards
from efla_jax.data.tokenizer import Tokenizer
from experiments import harness, language_runs, long_context, suite
from experiments.language_runs import Trained, positive, recorded, tokenizer_of, trained


def documents_of_text(path: str, tokenizer: Tokenizer, least: int) -> Iterator[np.ndarray]:
    """Ids of each document of a file or folder; those that cannot have `least` are not tokenised."""
    first = [tokenizer.bos_id] if tokenizer.bos_id >= 0 else []
    for name, file in readers.list_files(path):
        for record in readers.read_file(name, file):
            text = record.text.replace(b"\0", b"")
            if len(text) + len(first) >= least:
                yield np.array([*first, *tokenizer.encode(text)], np.int32)


def windows(documents: Iterator[np.ndarray], length: int, count: int) -> np.ndarray:
    """`count` or fewer rows [B, length + 1] of the documents that have so many tokens: the first of each, then the
    second, ..., which begins with the token that the first one ends with."""
    kept = []
    for document in documents:
        if len(document) > length:
            kept.append(document)
        if len(kept) == count:
            break
    places = sorted((start, which) for which, document in enumerate(kept)
                    for start in range(0, len(document) - length, length))[:count]  # fmt: skip
    if not places:
        raise ValueError(f"--length={length}: no document of --data has {length + 1} tokens; give longer ones.")
    return np.stack([kept[which][start : start + length + 1].astype(np.int32) for start, which in places])


def equal_parts(count: int, most: int) -> int:
    """The largest number of rows up to `most` that divides all of them, so that one program serves every batch."""
    return next(size for size in range(max(1, min(count, most)), 0, -1) if count % size == 0)


def table(rows: list[dict]) -> str:
    """Rows with equal keys as Markdown."""
    lines = [[f"{x:.4f}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(rows[0]), ["---"] * len(rows[0]), *lines])


def write(rows: list[dict], chosen: argparse.Namespace, folder: pathlib.Path, name: str) -> None:
    """The table, printed, and as a CSV file in the run's folder or --out."""
    out = pathlib.Path(chosen.out or folder)
    out.mkdir(parents=True, exist_ok=True)
    evaluate.write_rows(rows, out / name)
    print(f"{table(rows)}\n\nwritten: {out / name}")


def per_position(chosen: argparse.Namespace) -> None:
    """RUN/per_position.csv: position_end, loss, count."""
    folder, config = recorded(chosen)
    if (pathlib.Path(chosen.data) / shards.MANIFEST).is_file():
        source = open_shards(chosen.data)
        corpora, of = source.splits[chosen.split], source.manifest.tokenizer
        vocab_size, sha256 = int(of["vocab_size"]), str(of["sha256"])
        documents = (c.tokens[a:b] for c in corpora for a, b in zip(c.offsets[:-1], c.offsets[1:], strict=True))
    else:
        tokenizer = tokenizer_of(chosen, config)
        vocab_size, sha256 = tokenizer.vocab_size, tokenizer.sha256
        documents = documents_of_text(chosen.data, tokenizer, chosen.length + 1)
    run = trained(chosen, config, folder, vocab_size, sha256)
    rows = windows(documents, chosen.length, chosen.rows)
    size, total = equal_parts(len(rows), chosen.batch_tokens // chosen.length), np.zeros(chosen.length)
    with jax.default_matmul_precision(run.precision), tqdm(total=len(rows), unit="row") as bar:
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            total += evaluate.losses_by_position(run.model, run.params, batch, piece=chosen.piece).sum(0, np.float64)
            bar.update(size)
    ends = evaluate.position_ends(chosen.length, chosen.bin)
    write(evaluate.binned(total / len(rows), ends, len(rows)), chosen, folder, "per_position.csv")


def needle_rows(run: Trained, needles: needle.Needles, length: int, chosen: argparse.Namespace, bar: tqdm) -> list:
    """The rows of one length: every depth, all of the same questions."""
    depths = [*chosen.depths, None]
    prompts = [needles.prompt(length, depth, index) for depth in depths for index in range(chosen.count)]
    batch = needle.lay_out(prompts, length)
    size = equal_parts(len(prompts), chosen.batch_tokens // length)
    parts = []
    for start in range(0, len(prompts), size):
        part = {name: x[start : start + size] for name, x in batch.items()}
        parts.append(evaluate.answer_scores(run.model, run.params, part))
        bar.update(size)
    names = ("accuracy", "nats", "token_accuracy")
    each = {name: np.concatenate([part[name] for part in parts]).reshape(len(depths), chosen.count) for name in names}
    means = {name: x.mean(axis=1, dtype=np.float64).tolist() for name, x in each.items()}
    return [
        {
            "length": length, "depth": depth, "accuracy": means["accuracy"][i], "nats": means["nats"][i],
            "nats_without": means["nats"][-1], "count": chosen.count, "token_accuracy": means["token_accuracy"][i],
        }
        for i, depth in enumerate(chosen.depths)
    ]  # fmt: skip


def find_needles(chosen: argparse.Namespace) -> None:
    """RUN/needle.csv: length, depth, accuracy, nats, nats_without, count, token_accuracy."""
    folder, config = recorded(chosen)
    tokenizer = tokenizer_of(chosen, config)
    files = readers.list_files(chosen.haystack) if chosen.haystack else []
    texts = (record.text for name, file in files for record in readers.read_file(name, file))
    words = needle.read_words(chosen.words) if chosen.words else (needle.ADJECTIVES, needle.NOUNS)
    needles = needle.Needles(chosen.kind, tokenizer.encode, b"\n".join(texts).decode(errors="replace"),
                             bos=tokenizer.bos_id, seed=chosen.seed, words=words)  # fmt: skip
    for length in chosen.lengths:  # what does not fit is said before anything is read or compiled
        needles.prompt(length, chosen.depths[0])
    run, rows = trained(chosen, config, folder, tokenizer.vocab_size, tokenizer.sha256), []
    total = len(chosen.lengths) * (len(chosen.depths) + 1) * chosen.count
    with jax.default_matmul_precision(run.precision), tqdm(total=total, unit="prompt") as bar:
        for length in chosen.lengths:
            rows += needle_rows(run, needles, length, chosen, bar)
    write(rows, chosen, folder, "needle.csv")


def several(word: str) -> list[int]:
    """Whole numbers from 0 on, with commas between them."""
    if not all(part.isdecimal() for part in word.split(",")):
        raise argparse.ArgumentTypeError(f"{word!r} is not whole numbers with commas between them")
    return [int(part) for part in word.split(",")]


def parser() -> argparse.ArgumentParser:
    """Of every command: its options, and what it runs, as `command`."""
    shared = language_runs.run_arguments()
    whole = argparse.ArgumentParser(allow_abbrev=False, prog="python -m experiments.evaluate")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("per_position", parents=[shared], allow_abbrev=False, help="loss by position")
    one.set_defaults(command=per_position)
    one.add_argument("--data", required=True, help="folder that prepare_data wrote, or text: .txt, .jsonl, packed")
    one.add_argument("--split", default="valid", choices=shards.SPLITS, help="of such a folder")
    one.add_argument("--length", type=positive, default=32768, help="tokens of a row")
    one.add_argument("--rows", type=positive, default=16, help="rows, if the text has so many")
    one.add_argument("--piece", type=positive, default=0, help="tokens that are read at a time; all by default")
    one.add_argument("--bin", type=positive, default=2048, help="positions of a bin; and bins end at powers of two")

    one = commands.add_parser("needle", parents=[shared], allow_abbrev=False, help="needles in a haystack")
    one.set_defaults(command=find_needles)
    one.add_argument("--kind", default="single_2", choices=tuple(needle.KINDS))
    one.add_argument("--haystack", default="", help="text that needles are hidden in; not for single_1")
    one.add_argument("--lengths", type=several, default=[1024, 2048, 4096, 8192], help="tokens, 128 for the answer")
    one.add_argument("--depths", type=several, default=[0, 25, 50, 75, 100], help="percent of the haystack before it")
    one.add_argument("--count", type=positive, default=20, help="questions; the same at every length and depth")
    one.add_argument("--seed", type=int, default=0, help="of the questions")
    one.add_argument("--words", default="", help="folder of adjectivelist.txt and nounlist.txt; a short list without")
    for others in (suite, harness, long_context):
        others.add_commands(commands)
    return whole


def main(words: list[str] | None = None) -> None:
    """Run a command line (None: the program's); wrong input, files and a missing extra are one line, exit status 1."""
    chosen = parser().parse_args(words)
    try:
        chosen.command(chosen)
    except (ValueError, OSError, ImportError, NotImplementedError, FloatingPointError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
