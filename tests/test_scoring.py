"""Scores of text against one full pass per request in float64, models that are rigged, and results that were kept."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import FrozenDict

from efla_jax.data.tokenizer import Tokenizer, TokenizerSpec, load_tokenizer
from efla_jax.model import LanguageModel
from efla_jax.scoring import Journal, Row, Score, Scorer, beginning, row_scores, rows, scorer, split_pair, windows

OPTIONS = {"efla": {"num_heads": 2}, "attention": {"num_heads": 2}}
BYTES = load_tokenizer(TokenizerSpec())
ROOM = 96  # tokens of the one program that the slow path compiles


def vocabulary(encode, decode=None, size=256, eos=0, bos=-1):
    return Tokenizer("rigged", "0", size, eos, bos, encode, decode or (lambda ids: "".join(map(chr, ids))))


@pytest.fixture(scope="module")
def tiny():
    model = LanguageModel(vocab_size=256, width=16, depth=2, mixers=("efla", "attention"), mixer_options=OPTIONS)
    params = jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 4), jnp.int32))
    return model, jax.tree.map(lambda x: 3 * x, params)  # decides more clearly than a fresh model


@pytest.fixture(scope="module")
def slow(tiny):
    """(ids, scored) -> Score by one pass over the request alone, log-softmax and sum in float64."""
    model, params = tiny
    forward = jax.jit(model.apply)

    def score(ids, scored):
        tokens = np.zeros((1, ROOM), np.int32)
        tokens[0, : len(ids)] = list(ids)
        logits = np.asarray(forward(params, tokens)[0], np.float64)[0]
        logprobs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        logprobs -= logits.max(1, keepdims=True)
        at = range(len(ids) - scored, len(ids))
        greedy = all(np.argmax(logits[i - 1]) == ids[i] for i in at)
        return Score(sum(logprobs[i - 1, ids[i]] for i in at), greedy, scored)

    return score


def close(found, wanted):
    assert [(s.greedy, s.tokens) for s in found] == [(s.greedy, s.tokens) for s in wanted]
    # Sums of float32 losses of up to 90 tokens and 500 nats, each good to some 1e-6 of itself.
    np.testing.assert_allclose([s.logprob for s in found], [s.logprob for s in wanted], rtol=1e-5, atol=1e-4)


PAIRS = [
    ("The sky is", " blue"), ("The sky is", " a deep and endless green"), ("", "abc"), ("x" * 50, "y" * 30),
    ("a  ", "b"), ("\n", "c"), ("Short", " e"), ("The sky is", " blue"),
]  # fmt: skip


def test_pairs_are_scored_as_one_by_one_in_any_order_and_batch(tiny, slow):
    def alone(context, continuation):
        moved = context[len(context.rstrip()) :] + continuation
        ids = [*(context.rstrip() or "\0").encode(), *moved.encode()]
        return slow(ids, len(moved.encode()))

    wanted = [alone(*pair) for pair in PAIRS]
    assert np.std([s.logprob / s.tokens for s in wanted]) > 0.3
    first = Scorer(*tiny, BYTES)
    found = first.loglikelihood(PAIRS)
    close(found, wanted)
    assert first.counts["requests"] == 8 and first.counts["truncated"] == first.counts["joined"] == 0
    order = [3, 0, 6, 4, 1, 7, 2, 5]
    assert Scorer(*tiny, BYTES).loglikelihood([PAIRS[i] for i in order]) == [found[i] for i in order]
    close(Scorer(*tiny, BYTES, batch_tokens=64).loglikelihood(PAIRS[2:5]), wanted[2:5])


def test_long_rows_are_read_in_pieces(tiny, slow):
    text = "".join(np.random.default_rng(0).choice(list("abc def"), 90))
    pieces = Scorer(*tiny, BYTES, piece=32)
    close(pieces.loglikelihood([(text[:80], text[80:])]), [slow(text.encode(), 10)])
    close(pieces.rolling([text, text[:40], "", text[:1]]), [
        slow(b"\0" + text.encode(), 90), slow(b"\0" + text[:40].encode(), 40), Score(0.0, True, 0),
        slow(b"\0" + text[:1].encode(), 1),
    ])  # fmt: skip


def test_left_padding_never_changes_a_score(tiny, slow):
    """The engine pads behind; what a caller pads in front, with segment ids, scores the same."""
    model, params = tiny
    ids = list(b"The sky is blue")
    tokens, real = np.full((2, 24), 7, np.int32), np.zeros((2, 24), np.int32)
    tokens[0, 9:], real[0, 9:] = ids, 1
    tokens[1, 3:18], real[1, 3:18] = ids, 1
    logits, _ = jax.jit(model.apply)(params, tokens, real)
    logprobs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    (wanted,) = Scorer(*tiny, BYTES).loglikelihood([("The sky is", " blue")])
    for row, end in ((0, 24), (1, 18)):
        padded = sum(logprobs[row, i - 1, tokens[row, i]] for i in range(end - 5, end))
        assert padded == pytest.approx(wanted.logprob, rel=1e-5)


def test_a_context_is_cut_from_the_left_and_counted(tiny, slow):
    cut = Scorer(*tiny, BYTES, max_length=20)
    text = "0123456789abcdefghijklmnopqrstuvwxyz"
    found = cut.loglikelihood([(text[:30], text[30:]), (text[:15], text[15:21]), (text[:2], text[2:30])])
    whole = [text[15:36].encode(), text[:21].encode()]
    # 28 targets are more than are read at once: 20 of them, then the rest with all the context there is room for.
    parts = [slow(text[1:22].encode(), 20), slow(text[9:30].encode(), 8)]
    both = Score(sum(p.logprob for p in parts), all(p.greedy for p in parts), 28)
    close(found, [slow(whole[0], 6), slow(whole[1], 6), both])
    assert cut.counts["truncated"] == 2 and cut.counts["tokens_dropped"] == 15 + 9


class Successor(LanguageModel):
    """After token i comes i + 1, with all of the probability; after `broken` comes NaN. It has no parameters."""

    vocab_size: int = 256
    width: int = 1
    depth: int = 1
    mixer_options: Any = FrozenDict(efla=FrozenDict(num_heads=1))
    broken: int = -1

    @nn.nowrap
    def init_cache(self, batch_size, max_length=None):
        return (None,)

    def setup(self):
        pass

    def features(self, tokens, segment_ids=None, cache=None):
        return jnp.where(tokens == self.broken, jnp.nan, tokens + 1.0)[..., None], cache

    def logits(self, x):
        return 100 * nn.one_hot(x[..., 0].astype(jnp.int32), self.vocab_size) + 0 * x


class Constant(Successor):
    """Every token is `often` with probability 1/2; the other half is that of all others alike."""

    often: int = 97

    def logits(self, x):
        return jnp.log(self.vocab_size - 1.0) * nn.one_hot(jnp.full(x.shape[:-1], self.often), self.vocab_size) + 0 * x


def test_a_model_that_counts_is_never_off_by_one():
    count = Scorer(Successor(), {}, vocabulary(lambda text: list(map(ord, text))))
    found = count.loglikelihood([("\1", "\2\3\4"), ("\1\2", "\4"), ("", "\1"), ("\1", "\3\4")])
    assert [s.greedy for s in found] == [True, False, True, False]
    assert [s.tokens for s in found] == [3, 1, 1, 2]
    assert [s.logprob for s in found] == pytest.approx([0, -100, 0, -100], abs=1e-6)
    (whole,) = count.rolling(["\1\2\3\4"])
    assert whole.greedy and whole.tokens == 4 and whole.logprob == pytest.approx(0, abs=1e-6)
    assert not count.rolling(["\2\3\4"])[0].greedy


def test_a_model_that_knows_one_token_scores_what_can_be_counted():
    text = "banana"
    half, rest = np.log(0.5), np.log(0.5 / 255)
    found = Scorer(Constant(), {}, BYTES).loglikelihood([("b", "anana"), ("x", "aaa")])
    assert found[0].logprob == pytest.approx(3 * half + 2 * rest) and not found[0].greedy
    assert found[1].logprob == pytest.approx(3 * half) and found[1].greedy
    for most in (0, 1, 2, 8):
        (whole,) = Scorer(Constant(), {}, BYTES, max_length=most).rolling([text])
        assert whole.logprob == pytest.approx(3 * half + 3 * rest) and whole.tokens == 6


def merging(text):
    """A vocabulary of characters in which "Answer" is one token."""
    return [300 if part == "Answer" else ord(part) for part in text.replace("Answer", "\uffff").replace(
        "\uffff", "\0Answer\0").split("\0") for part in ([part] if part == "Answer" else part)]  # fmt: skip


def test_the_join_of_context_and_continuation():
    assert merging("my Answer is") == [*map(ord, "my "), 300, *map(ord, " is")]
    # A token that reaches across the join is scored, not lost and not asserted away.
    assert split_pair(merging, "Ans", "wer") == ([], [300])
    assert split_pair(merging, "my Ans", "wer is") == ([*map(ord, "my ")], [300, *map(ord, " is")])
    assert split_pair(merging, "Answer", "wer") == ([300], [*map(ord, "wer")])
    # White space behind the context goes with the continuation.
    assert split_pair(merging, "Answer: \n", "yes") == ([300, 58], [*map(ord, " \nyes")])
    assert split_pair(merging, "Answer:", " yes") == split_pair(merging, "Answer: ", "yes")
    assert split_pair(merging, "  ", "a") == ([], [*map(ord, "  a")])
    for context, continuation in (("a", ""), ("", ""), (" ", "")):
        with pytest.raises(ValueError, match="continuation: '' has no token"):
            split_pair(merging, context, continuation)
    joined = Scorer(Successor(vocab_size=512), {}, vocabulary(merging, size=512))
    assert [s.tokens for s in joined.loglikelihood([("my Ans", "wer"), ("a", "b")])] == [1, 1]
    assert joined.counts["joined"] == 1
    with pytest.raises(ValueError, match=r"pairs\[1\]: continuation: ''"):
        joined.loglikelihood([("a", "b"), ("a", "")])


@pytest.mark.parametrize("bos", [-1, 5])
@pytest.mark.parametrize("policy", ["auto", "always", "empty"])
def test_exactly_one_beginning(bos, policy):
    encode = lambda text: [5 if c == "<" else ord(c) for c in text]  # noqa: E731
    texts = vocabulary(encode, bos=bos)
    token, always = beginning(texts, policy)
    assert token == (5 if bos == 5 else 0) and always == (policy == "always" or (policy == "auto" and bos == 5))
    scored = Scorer(Successor(), {}, texts, policy=policy)
    front = [token] if always else []
    assert scored.pair_row("a", "b").ids.tolist() == [*front, 97, 98]
    assert scored.pair_row("", "ab").ids.tolist() == [token, 97, 98] and scored.pair_row("", "ab").scored == 2
    again = scored.pair_row("<a", "b").ids.tolist()  # the text brings one along
    assert again == ([token, 5, 97, 98] if always and token != 5 else [5, 97, 98])
    if bos == 5:
        row = scored.pair_row("", "<ab")
        assert row.ids.tolist() == [5, 97, 98] and row.scored == 2
    with pytest.raises(ValueError, match="policy: 'never' is not one of"):
        beginning(texts, "never")


@pytest.mark.parametrize("length", range(1, 21))
def test_windows_score_every_token_once(length):
    ids = np.arange(length + 1)  # 0 is the beginning
    parts = windows(Row(ids, length), 8)
    scored = np.concatenate([part.ids[len(part.ids) - part.scored :] for part in parts])
    assert scored.tolist() == list(range(1, length + 1))
    assert all(len(part.ids) - 1 <= 8 for part in parts)
    # All but the first have as many inputs as there is room for.
    assert all(len(part.ids) - 1 == 8 for part in parts[1:]) and len(parts) == -(-length // 8)


def test_rolling_windows_are_those_of_the_harness():
    """The example in the documentation of its `loglikelihood_rolling`, with BOS as -1."""
    parts = windows(Row(np.array([-1, *range(10)]), 10), 4)
    assert [(part.ids[:-1].tolist(), part.scored) for part in parts] == [
        ([-1, 0, 1, 2], 4), ([3, 4, 5, 6], 4), ([5, 6, 7, 8], 2),
    ]  # fmt: skip


def test_few_programs_serve_all_lengths():
    lengths = np.random.default_rng(0).integers(2, 3000, 2000)
    asked = [Row(np.zeros(n, np.int32), int(min(n - 1, 1 + n % 40))) for n in lengths]
    plan = list(rows.batches(asked, 32768, 4096))
    assert sorted(n for members, *_ in plan for n in members) == list(range(2000))
    assert len({shape for _, *shape in plan for shape in [tuple(shape)]}) <= 20
    for members, size, time, places in plan:
        assert len(members) <= size and size * time <= 32768 and places <= time
        assert all(time / 2 < len(asked[n].ids) - 1 <= time or time == 16 for n in members)
        assert all(asked[n].scored <= places for n in members)
    assert [time for _, _, time, _ in plan] == sorted((time for _, _, time, _ in plan), reverse=True)


def test_an_interrupted_evaluation_goes_on(tmp_path, monkeypatch):
    pairs = [("a" * (8 << i), "b" * (i + 1)) for i in range(5)]
    file, whole = tmp_path / "kept" / "scores.jsonl", Scorer(Constant(), {}, BYTES).loglikelihood(pairs)
    calls, honest = [], rows.token_scores

    def failing(*arguments):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(arguments)
        return honest(*arguments)

    monkeypatch.setattr(rows, "token_scores", failing)
    with pytest.raises(KeyboardInterrupt):
        Scorer(Constant(), {}, BYTES, journal=Journal(file)).loglikelihood(pairs)
    kept = file.read_text().splitlines()
    assert len(kept) == 2  # of three batches, the last one not yet read
    with file.open("a") as broken_off:
        broken_off.write('["half a li')
    monkeypatch.setattr(rows, "token_scores", lambda *arguments: calls.append(0) or honest(*arguments))
    calls.clear()
    again = Scorer(Constant(), {}, BYTES, journal=Journal(file))
    assert again.loglikelihood(pairs) == whole
    assert len(calls) == 3 and again.counts["known"] == 2 and len(file.read_text().splitlines()) == 5
    again.loglikelihood(pairs[::-1] + pairs)
    assert len(calls) == 3
    # Another model, other products or another request find nothing there.
    other = Scorer(Constant(often=98), {}, BYTES, journal=Journal(file))
    other.loglikelihood(pairs[:1])
    Scorer(Constant(), {}, BYTES, journal=Journal(file), precision="highest").loglikelihood(pairs[:1])
    Scorer(Constant(), {}, BYTES, journal=Journal(file)).loglikelihood([("a" * 8, "bb")])
    assert len(calls) == 6
    file.write_text("nonsense\n")
    with pytest.raises(ValueError, match="scores.jsonl, line 1: no result"):
        Journal(file)


def test_a_fingerprint_is_of_values(tiny):
    model, params = tiny
    assert scorer.fingerprint(model, params) == scorer.fingerprint(model, jax.tree.map(jnp.copy, params))
    nudged = jax.tree.map(lambda x: x * 1.001, params)
    assert scorer.fingerprint(model, params) != scorer.fingerprint(model, nudged)
    assert json.loads(json.dumps(scorer.fingerprint(model, params)))


def test_greedy_text_up_to_stop_strings(tmp_path):
    counts = Scorer(Successor(), {}, BYTES, journal=Journal(tmp_path / "said.jsonl"))
    said = counts.generate(["xa", "A", "zz0", "a"], until=["fgh", "", "45"], max_new_tokens=12)
    assert said == ["bcde", "BCDEFGHIJKLM", "123", "bcde"]
    assert counts.generate(["a"], until=[], max_new_tokens=3) == ["bcd"]
    known = counts.counts["known"]
    assert counts.generate(["A"], until=["fgh", "", "45"], max_new_tokens=12) == ["BCDEFGHIJKLM"]
    assert counts.counts["known"] == known + 1
    stops = Scorer(Successor(), {}, vocabulary(lambda text: list(map(ord, text)), eos=ord("d")))
    assert stops.generate(["a", ""], until=[], max_new_tokens=6) == ["bc", "efghij"]  # an empty context begins with EOS
    cut = Scorer(Successor(), {}, BYTES, max_length=8)
    assert cut.generate(["a" * 30 + "k"], until=[], max_new_tokens=4) == ["lmno"]
    assert cut.counts["truncated"] == 1 and cut.counts["tokens_dropped"] == 27
    with pytest.raises(ValueError, match="max_new_tokens: 8 leaves no room for a context in max_length=8"):
        cut.generate(["a"], until=[], max_new_tokens=8)


def test_greedy_text_of_a_model_is_what_rereading_says(tiny, slow):
    said = Scorer(*tiny, vocabulary(lambda text: list(text.encode("latin1")), lambda ids: bytes(ids).decode("latin1")))
    (text,) = said.generate(["The sky"], until=[], max_new_tokens=5)
    ids = list(b"The sky" + text.encode("latin1"))
    assert len(text) == 5 and slow(ids, 5).greedy


def test_what_cannot_be_scored_is_an_error():
    scored = Scorer(Successor(broken=98), {}, BYTES)
    assert scored.loglikelihood([("a", "b")])[0].greedy
    with pytest.raises(ValueError, match=r"rows\[0\]: its log-likelihood is NaN"):
        scored.loglikelihood([("b", "c")])
    with pytest.raises(ValueError, match=r"rows\[1\]: ids from 1 to 300, but vocab_size is 256"):
        list(row_scores(Successor(), {}, [Row(np.array([1, 2]), 1), Row(np.array([1, 300]), 1)]))
    with pytest.raises(ValueError, match=r"rows\[0\]: 2 of 2 tokens cannot be scored"):
        list(row_scores(Successor(), {}, [Row(np.array([1, 2]), 2)]))
    with pytest.raises(ValueError, match="piece: 100 is not a power of two"):
        list(row_scores(Successor(), {}, [], piece=100))
    with pytest.raises(ValueError, match="max_length: -1 is negative"):
        Scorer(Successor(), {}, BYTES, max_length=-1)
    with pytest.raises(ValueError, match="tokenizer: it has 256 tokens, the model 99"):
        Scorer(Successor(vocab_size=99), {}, BYTES)


def test_too_large_a_batch_says_what_to_halve(monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(rows, "token_scores", full)
    with pytest.raises(ValueError, match="batch_tokens: 512 is too much for the memory at 2 rows of 16 tokens; halve"):
        Scorer(Successor(), {}, BYTES, batch_tokens=512).loglikelihood([("a", "b")])
