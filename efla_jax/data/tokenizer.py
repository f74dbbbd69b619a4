"""Tokenizers behind one face: bytes, a Hugging Face tokenizer.json, a SentencePiece .model, a tiktoken rank file.

    tokenizer = load_tokenizer(TokenizerSpec("tokenizer.json"))
    ids = tokenizer.encode("some text")         # no BOS, no EOS, whatever the file says
    tokenizer.decode(ids)

What a document adds to its ids (eos_id at the end, bos_id at the start if there is one) is added by the caller, once.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from efla_jax.data.readers import optional
from efla_jax.data.text import END_OF_DOCUMENT, VOCAB_SIZE

BYTES = "bytes"
# The end of a document in published vocabularies, tried in this order where no name is given.
USUAL_EOS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
GPT2_RANKS = 50256
LAST_ID = 2**31 - 1
RANK_LINE = re.compile(rb"[A-Za-z0-9+/=]+ \d+\s")


@dataclass(frozen=True)
class TokenizerSpec:
    """path "bytes" or a file; eos and bos a token of the vocabulary or its number ("": the usual eos, no bos).

    pattern: the regular expression that splits text before a tiktoken rank file is applied; such a file does not hold
    it ("": that of GPT-2, for its 50256 ranks only).
    """

    path: str = BYTES
    eos: str = ""
    bos: str = ""
    pattern: str = ""


@dataclass(frozen=True)
class Tokenizer:
    """decode(ids) gives text; sha256 is that of the file, or "bytes"; bos_id -1 means none."""

    kind: str
    sha256: str
    vocab_size: int
    eos_id: int
    bos_id: int
    encode_text: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    pattern: str = ""

    def encode(self, text: str | bytes) -> Sequence[int]:
        """Ids without special tokens; bytes are UTF-8, and need not be for the tokenizer "bytes"."""
        if self.kind == BYTES:
            return text if isinstance(text, bytes) else text.encode(errors="replace")
        return self.encode_text(text.decode(errors="replace") if isinstance(text, bytes) else text)

    def describe(self) -> dict[str, int | str]:
        """What a manifest keeps: equal for two tokenizers that give the same ids."""
        return {"kind": self.kind, "sha256": self.sha256, "vocab_size": self.vocab_size, "eos_id": self.eos_id,
                "bos_id": self.bos_id, "pattern": self.pattern}


@lru_cache(maxsize=4)
def load_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """The tokenizer of a file. Raises ValueError for a missing or damaged file or an unknown eos or bos."""
    if spec.path == BYTES:
        return _bytes(spec)
    file = Path(spec.path).expanduser()
    if not file.is_file():
        raise ValueError(f"tokenizer={spec.path!r} does not exist; give 'bytes', a tokenizer.json, a SentencePiece "
                         ".model or a tiktoken rank file")
    content = file.read_bytes()
    # By content: the name tokenizer.model is in use for SentencePiece and for ranks.
    if content.lstrip()[:1] == b"{":
        build = _hugging_face
    else:
        build = _tiktoken if RANK_LINE.match(content) else _sentencepiece
    try:
        return build(spec, content, hashlib.sha256(content).hexdigest())
    except ImportError:
        raise
    except Exception as error:  # tokenizers raises Exception itself, sentencepiece RuntimeError
        raise ValueError(f"tokenizer={spec.path!r}: {error}") from error


def _bytes(spec: TokenizerSpec) -> Tokenizer:
    if spec.eos or spec.bos or spec.pattern:
        raise ValueError("tokenizer='bytes' ends documents with byte 0 and has no other special token: leave out "
                         "eos, bos and pattern")
    return Tokenizer(BYTES, BYTES, VOCAB_SIZE, END_OF_DOCUMENT, -1, str.encode,
                     lambda ids: bytes(ids).decode(errors="replace"))


def _special(name: str, field: str, lookup: Callable[[str], int | None]) -> int:
    """The id of a token given by its text or its number."""
    token = int(name) if name.isdecimal() else lookup(name)
    if token is None:
        raise ValueError(f"{field}={name!r} is no token of this vocabulary; give its text or its number")
    if token >= LAST_ID:
        raise ValueError(f"{field}={name!r} must be a number below {LAST_ID}, as batches hold int32; the vocabulary "
                         "grows up to it, so give the next free one")
    return token


def _specials(
    spec: TokenizerSpec, vocab_size: int, lookup: Callable[[str], int | None], own_eos: int = -1
) -> tuple[int, int, int]:
    """(vocab_size, eos_id, bos_id); the vocabulary grows to hold a special token that is numbered beyond it."""
    usual = next((name for name in USUAL_EOS if lookup(name) is not None), "")
    if not spec.eos and own_eos < 0 and not usual:
        raise ValueError(f"none of {', '.join(USUAL_EOS)} is in the vocabulary; name the end of a document with eos")
    eos = own_eos if not spec.eos and own_eos >= 0 else _special(spec.eos or usual, "eos", lookup)
    bos = _special(spec.bos, "bos", lookup) if spec.bos else -1
    return max(vocab_size, eos + 1, bos + 1), eos, bos


def _hugging_face(spec: TokenizerSpec, content: bytes, sha256: str) -> Tokenizer:
    inner = optional("tokenizers", f"tokenizer={spec.path!r}").Tokenizer.from_buffer(content)
    # A file may ask for truncation to a model's length, which would silently cut every document.
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True  # "</s>" spelt in a document is text, not its end
    vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values())
    sizes = _specials(spec, vocab_size, inner.token_to_id)
    return Tokenizer("tokenizers", sha256, *sizes, lambda text: inner.encode(text, add_special_tokens=False).ids,
                     lambda ids: inner.decode(list(ids), skip_special_tokens=False))


def _sentencepiece(spec: TokenizerSpec, content: bytes, sha256: str) -> Tokenizer:
    module = optional("sentencepiece", f"tokenizer={spec.path!r}")
    inner = module.SentencePieceProcessor(model_proto=content)

    def lookup(piece: str) -> int | None:
        token = inner.piece_to_id(piece)  # the unknown token for an unknown piece
        return token if inner.id_to_piece(token) == piece else None

    sizes = _specials(spec, inner.vocab_size(), lookup, own_eos=inner.eos_id())
    return Tokenizer("sentencepiece", sha256, *sizes, lambda text: inner.encode(text, add_bos=False, add_eos=False),
                     lambda ids: inner.decode([int(i) for i in ids]))


def _tiktoken(spec: TokenizerSpec, content: bytes, sha256: str) -> Tokenizer:
    module = optional("tiktoken", f"tokenizer={spec.path!r}")
    pairs = [line.split() for line in content.splitlines() if line.strip()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    pattern = spec.pattern
    if not pattern and len(ranks) == GPT2_RANKS:
        from tiktoken_ext import openai_public

        pattern = openai_public.r50k_pat_str
    if not pattern:
        raise ValueError(f"a rank file of {len(ranks)} tokens does not say how text is split; give its regular "
                         "expression as pattern")
    last_rank = max(ranks.values())
    named = {USUAL_EOS[0]: last_rank + 1}  # such a file has no special tokens; GPT-2's own follows its ranks
    sizes = _specials(spec, last_rank + 1, lambda name: ranks.get(name.encode(), named.get(name)))
    special = {USUAL_EOS[0] if token == sizes[1] else f"<|{token}|>": token for token in sizes[1:] if token > last_rank}
    inner = module.Encoding(Path(spec.path).name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return Tokenizer("tiktoken", sha256, *sizes, inner.encode_ordinary, inner.decode, pattern)
