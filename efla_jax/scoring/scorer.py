"""Text put to a language model: log-likelihoods of continuations and of whole texts, greedy continuations."""

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from efla_jax.data.tokenizer import Tokenizer
from efla_jax.generate import Choice, Decoding, prefill
from efla_jax.scoring.journal import Journal
from efla_jax.scoring.rows import Row, Score, batches, row_scores, windows

POLICIES = ("auto", "always", "empty")
FINGERPRINT_ELEMENTS = 1024  # of each parameter: a step of training changes nearly every element


class Beginning(NamedTuple):
    """The token in front of empty contexts, and whether it stands in front of all others as well."""

    token: int
    always: bool


def beginning(tokenizer: Tokenizer, policy: str = "auto") -> Beginning:
    """How contexts begin: with the tokenizer's BOS, or its EOS where it has no BOS.

    policy "always": in front of every context; "empty": of empty ones only; "auto": as the documents of prepare_data,
    which begin with BOS if there is one, so "always" with a BOS and "empty" without."""
    if policy not in POLICIES:
        raise ValueError(f"policy: {policy!r} is not one of {POLICIES}.")
    has_bos = tokenizer.bos_id >= 0
    always = has_bos if policy == "auto" else policy == "always"
    return Beginning(tokenizer.bos_id if has_bos else tokenizer.eos_id, always)


def split_pair(encode: Callable[[str], Sequence[int]], context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokens of context and continuation, as the tokenizer splits both in one piece.

    White space at the end of the context belongs to the continuation, as in lm-evaluation-harness. The context is what
    its own tokens and those of the whole text have in common in front, so that a token that reaches across the join is
    scored; the continuation has at least one token. Raises ValueError where there is nothing to score."""
    stripped = context.rstrip()
    whole, alone = list(encode(context + continuation)), list(encode(stripped)) if stripped else []
    if not continuation or not whole:
        raise ValueError(f"continuation: {continuation!r} has no token, so there is nothing to score.")
    most = min(len(alone), len(whole) - 1)
    shared = next((i for i in range(most) if alone[i] != whole[i]), most)
    return whole[:shared], whole[shared:]


def fingerprint(model, params, precision: str = "") -> str:
    """Hash of a model's fields, a sample of each of its parameters and how products are multiplied."""
    digest = hashlib.sha256(f"{model} {precision}".encode())
    for path, leaf in jax.tree.leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        digest.update(np.asarray(leaf.reshape(-1)[:: max(1, leaf.size // FINGERPRINT_ELEMENTS)]).tobytes())
    return digest.hexdigest()


@dataclasses.dataclass
class Scorer:
    """A model with its tokenizer, and how requests are put to it.

    policy        how contexts begin: see `beginning`
    max_length    most tokens that are read for one target, as the window of training (0: no limit)
    batch_tokens, piece    see `row_scores`
    journal       where results are kept and looked for; precision names products in their keys
    counts        of requests: "requests", "known" from the journal, "truncated" and the "tokens_dropped" of those,
                  "joined", whose context ends inside a token
    """

    model: Any
    params: Any
    tokenizer: Tokenizer
    policy: str = "auto"
    max_length: int = 0
    batch_tokens: int = 32768
    piece: int = 4096
    journal: Journal = dataclasses.field(default_factory=Journal)
    precision: str = ""
    progress: bool = False

    def __post_init__(self) -> None:
        if self.max_length < 0:
            raise ValueError(f"max_length: {self.max_length} is negative; 0 is no limit.")
        if self.tokenizer.vocab_size > self.model.vocab_size:
            raise ValueError(f"tokenizer: it has {self.tokenizer.vocab_size} tokens, the model {self.model.vocab_size};"
                             " give the model's own.")  # fmt: skip
        self.begin = beginning(self.tokenizer, self.policy)
        self.counts: Counter[str] = Counter()
        self._encode = functools.lru_cache(maxsize=8)(self.tokenizer.encode)  # answers share their context
        self._identity = fingerprint(self.model, self.params, self.precision)

    def begun(self, ids: Sequence[int]) -> list[int]:
        """Tokens of a context with what stands in front of it; never twice."""
        wanted = self.begin.always or not ids
        return [self.begin.token, *ids] if wanted and list(ids[:1]) != [self.begin.token] else list(ids)

    def pair_row(self, context: str, continuation: str) -> Row:
        """The row of a pair."""
        before, after = split_pair(self._encode, context, continuation)
        stripped = context.rstrip()
        self.counts["joined"] += bool(stripped) and len(before) < len(self._encode(stripped))
        if not before and len(after) > 1 and after[0] == self.begin.token:  # the text brings it along
            before, after = after[:1], after[1:]
        ids = [*self.begun(before), *after]
        self.cut(ids, self.max_length + 1)  # counts; `windows` cuts
        return Row(np.array(ids, np.int32), len(after))

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        """Scores of continuations, each after its context (context, continuation); an empty context is the beginning of
        a document. Raises ValueError naming the pair where a continuation is empty."""
        rows = []
        for number, pair in enumerate(pairs):
            try:
                rows.append(self.pair_row(*pair))
            except ValueError as error:
                raise ValueError(f"pairs[{number}]: {error}") from error
        return self.score(rows, "loglikelihood")

    def rolling(self, texts: Sequence[str]) -> list[Score]:
        """Scores of whole texts, each the beginning of a document: every token once. A text without tokens scores 0."""
        rows = []
        for text in texts:
            ids = list(self.tokenizer.encode(text))
            ids = ids if ids[:1] == [self.begin.token] and self.begin.always else [self.begin.token, *ids]
            rows.append(Row(np.array(ids, np.int32), len(ids) - 1))
        return self.score(rows, "rolling")

    def score(self, rows: Sequence[Row], purpose: str = "") -> list[Score]:
        """Scores of rows, cut into `windows` of max_length; those that the journal knows are not computed again."""
        parts = [windows(row, self.max_length) if row.scored else [] for row in rows]
        keys = [[self.key("score", part.ids.tolist(), part.scored) for part in some] for some in parts]
        todo = dict(zip((key for some in keys for key in some), (part for some in parts for part in some), strict=True))
        fresh = {key: part for key, part in todo.items() if key not in self.journal.known}
        self.counts.update(requests=len(rows), known=len(todo) - len(fresh))
        names = list(fresh)
        scored = row_scores(
            self.model, self.params, list(fresh.values()), batch_tokens=self.batch_tokens, piece=self.piece
        )
        with self.bar(len(todo), len(fresh), purpose) as bar:
            try:
                for number, score in scored:
                    self.journal.add(names[number], list(score))
                    bar.update()
            finally:
                self.journal.flush()
        found = [[Score(*self.journal.known[key]) for key in some] for some in keys]
        return [Score(float(sum(s.logprob for s in some)), all(s.greedy for s in some), sum(s.tokens for s in some))
                for some in found]  # fmt: skip

    def generate(self, contexts: Sequence[str], until: Sequence[str], max_new_tokens: int) -> list[str]:
        """What greedy decoding says after each context, up to EOS, the first of the stop strings or max_new_tokens."""
        if self.max_length and max_new_tokens >= self.max_length:
            raise ValueError(f"max_new_tokens: {max_new_tokens} leaves no room for a context in max_length="
                             f"{self.max_length}; ask for fewer tokens, or raise it.")  # fmt: skip
        prompts = [self.begun(self.tokenizer.encode(context)) for context in contexts]
        cut = [self.cut(ids, self.max_length - max_new_tokens) for ids in prompts]
        keys = [self.key("generate", ids, list(until), max_new_tokens) for ids in cut]
        fresh = {key: ids for key, ids in zip(keys, cut, strict=True) if key not in self.journal.known}
        self.counts.update(requests=len(contexts), known=len(set(keys)) - len(fresh))
        names = list(fresh)
        rows = [Row(np.array([*ids, 0], np.int32), 1) for ids in fresh.values()]  # the 0 stands for the first answer
        with self.bar(len(set(keys)), len(fresh), "generate") as bar:
            for members, size, _, _ in batches(rows, max(1, self.batch_tokens - max_new_tokens), self.batch_tokens):
                asked = [rows[number].ids[:-1] for number in members]
                said = self.say(asked + asked[-1:] * (size - len(asked)), len(asked), until, max_new_tokens)
                for number, text in zip(members, said, strict=True):
                    self.journal.add(names[number], text)
                    bar.update()
                self.journal.flush()
        return [self.journal.known[key] for key in keys]

    def say(self, prompts: list[np.ndarray], count: int, until: Sequence[str], max_new_tokens: int) -> list[str]:
        """Greedy continuations of the first `count` prompts; the others fill the batch up."""
        prefix = prefill(self.model, self.params, prompts, coming=max_new_tokens, piece=self.piece)
        choice = Choice(temperature=0.0, stop_tokens=(self.tokenizer.eos_id,), vocabulary=self.tokenizer.vocab_size)
        decoding = Decoding(self.model, self.params, prefix, choice, max_new_tokens=max_new_tokens, keep=False)
        decoding.end(range(count, len(prompts)))
        ids: list[list[int]] = [[] for _ in range(count)]
        texts = [""] * count
        for block in decoding:
            for row, new in enumerate(block[:count]):
                ids[row] += [int(token) for token in new if token >= 0]
                whole = self.tokenizer.decode(ids[row])
                texts[row] = until_stop(whole, until)
                if len(texts[row]) < len(whole):
                    decoding.end([row])
        return texts

    def cut(self, ids: list[int], most: int) -> list[int]:
        """The last `most` tokens where there is a limit, counted."""
        dropped = max(0, len(ids) - most) if self.max_length else 0
        self.counts.update(truncated=int(dropped > 0), tokens_dropped=dropped)
        return ids[dropped:]

    def bar(self, total: int, fresh: int, purpose: str) -> tqdm:
        """A progress bar of rows, of which those that are not `fresh` are done."""
        return tqdm(total=total, initial=total - fresh, unit="row", desc=purpose, disable=not self.progress)

    def key(self, *request: Any) -> str:
        """The name of a request's result in the journal."""
        return hashlib.sha256(json.dumps([self._identity, *request]).encode()).hexdigest()


def until_stop(text: str, until: Sequence[str]) -> str:
    """The text in front of the first stop string in it; empty ones stop nothing."""
    return text[: min((text.find(stop) for stop in until if stop and stop in text), default=len(text))]
