"""Text of a trained language model: prompts to tokens, tokens to text as they come, and where a text ends.

`Generator` holds what stays the same over all texts of a program; `experiments.generate` is the command line.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from efla_jax.data.tokenizer import Tokenizer
from efla_jax.generate import Choice, Decoding, Prefix, prefill, take
from efla_jax.generate.snapshot import fingerprint
from efla_jax.generate.text import TextStream
from efla_jax.scoring import beginning
from experiments import runs
from experiments.language_runs import Trained


class Answer(NamedTuple):
    """What followed a prompt.

    text    without stop token and stop string
    tokens  ids that were chosen, without the stop token; they may go beyond a text that a stop string cut
    finish  "stop_token", "stop_string", "length" (max_tokens), or "interrupted" (from the keyboard)"""

    text: str
    tokens: list[int]
    finish: str


class Timing(NamedTuple):
    """Of the last answers: seconds from the prompt's first token to the first of the answer, and tokens per second of
    all rows from then on (0 where there was one token only)."""

    first: float
    rate: float


def stop_tokens(run: Trained) -> tuple[int, ...]:
    """Ids that end a text: the tokenizer's EOS, and those of a generation_config.json that came with the run."""
    ids = {run.tokenizer.eos_id} if run.tokenizer.eos_id >= 0 else set()
    file = run.folder / "generation_config.json"
    if file.is_file():
        named = runs.json_object(file).get("eos_token_id")
        ids |= set(named if isinstance(named, list) else [] if named is None else [named])
    return tuple(sorted(i for i in ids if i < run.model.vocab_size))


@dataclass
class Generator:
    """A run and how it is to speak. Not of a mesh: parameters lie where `runs` puts them."""

    run: Trained
    choice: Choice
    stops: tuple[str, ...] = ()
    max_tokens: int = 256
    piece: int = 512
    block: int = 32
    timing: Timing = Timing(0.0, 0.0)
    _started: float = 0.0
    _identity: dict[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, str]:
        """What a snapshot must have been made with."""
        if not self._identity:
            self._identity["model"] = fingerprint(self.run.model, self.run.params)
            self._identity["tokenizer"] = self.run.tokenizer.sha256
        return self._identity

    def encode(self, text: str, first: bool = True) -> list[int]:
        """Ids of a text; the first of a document gets BOS where the tokenizer has one, and EOS where it has no BOS and
        there is no text to begin with."""
        tokenizer = self.run.tokenizer
        if not first:
            return encode_behind(tokenizer, text)
        ids, begin = [int(i) for i in tokenizer.encode(text)], beginning(tokenizer)
        return [begin.token, *ids] if begin is not None and (begin.always or not ids) else ids

    def read(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> Prefix:
        """The prefix of each prompt, behind those rows of `prefix`; with a bar where it takes several pieces."""
        self._started = time.perf_counter()
        total = max(len(prompt) for prompt in prompts)
        with tqdm(total=total, unit="token", desc="reading", leave=False, disable=total <= self.piece) as bar:
            return prefill(
                self.run.model, self.run.params, prompts, prefix=prefix, coming=self.max_tokens, piece=self.piece,
                progress=bar.update,
            )  # fmt: skip

    def answers(
        self, prefix: Prefix, before: Sequence[Sequence[int]], streams: Sequence[int], *, keep: bool = False,
        show: Callable[[int, str], Any] = lambda row, text: None, interruptible: bool = False,
    ) -> list[Answer]:  # fmt: skip
        """What rows of a prefix go on to say. before: the last ids of their prompts, of as many rows as are asked for,
        the first ones. streams: of the random numbers, one per row. show: called with the row and each part of its
        text. keep: leave the prefix usable. interruptible: Ctrl-C ends the texts, not the program."""
        count = len(before)
        texts = [TextStream(self.run.tokenizer.decode, self.stops, ids) for ids in before]
        decoding = Decoding(
            self.run.model, self.run.params, prefix, self.choice, max_new_tokens=self.max_tokens, streams=streams,
            block=self.block, keep=keep,
        )  # fmt: skip
        decoding.end(range(count, len(prefix.length)))
        finish = ["stop_token"] * count
        began = first = 0.0
        try:
            for block in decoding:
                began = began or time.perf_counter()
                first = first or began - self._started
                for row, (text, new) in enumerate(zip(texts, block[:count], strict=True)):
                    if part := text.add(new[new >= 0]):
                        show(row, part)
                    if text.stopped and finish[row] == "stop_token":
                        finish[row] = "stop_string"
                        decoding.end([row])
            finish = ["length" if decoding.going[row] else how for row, how in enumerate(finish)]
        except KeyboardInterrupt:
            if not interruptible:
                raise
            finish = ["interrupted" if decoding.going[row] else how for row, how in enumerate(finish)]
        seconds, chosen = time.perf_counter() - began, sum(len(text.tokens) for text in texts)
        self.timing = Timing(first, (chosen - count) / seconds if chosen > count and seconds else 0.0)
        for row, text in enumerate(texts):
            if part := text.end():
                show(row, part)
            if text.stopped:  # by what was held back until now
                finish[row] = "stop_string"
        return [Answer(text.text, text.tokens, how) for text, how in zip(texts, finish, strict=True)]

    def tokens_of(self, answer: Answer) -> list[int]:
        """Ids of the answer's text alone: its own, or those of what a stop string left of it."""
        return self.encode(answer.text, first=False) if answer.finish == "stop_string" else answer.tokens


def encode_behind(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that stands behind another one: without the space that some tokenizers put in front of a text."""
    anchor, ids = list(tokenizer.encode("\n")), list(tokenizer.encode("\n" + text))
    return ids[len(anchor) :] if ids[: len(anchor)] == anchor else [int(i) for i in tokenizer.encode(text)]


def repeated(prefix: Prefix | None, rows: int) -> Prefix | None:
    """The one row of a prefix as many times as there are prompts."""
    if prefix is None or (rows == 1 and len(prefix.length) == 1):
        return prefix
    if len(prefix.length) != 1:
        raise ValueError(f"the snapshot has {len(prefix.length)} rows; prompts go on from one of a single row.")
    return take(prefix, np.zeros(rows, np.int32))


def show_in_terminal(row: int, text: str) -> None:
    """Write a part of a text at once; what would command a terminal is shown as a question mark."""
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()
