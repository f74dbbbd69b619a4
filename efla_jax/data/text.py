"""Byte-level text corpora: the text every Python interpreter ships, or the user's own files, split by document."""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from efla_jax.data import readers

VOCAB_SIZE = 256
END_OF_DOCUMENT = 0

# Tests and demos (some distributions strip them), tables without prose, files that depend on the build, and the
# module whose strings already are the documents named topic:*.
SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "encodings", "ensurepip", "site-packages",
     "dist-packages", "pydoc_data", "lib-dynload", "__phello__", "__pycache__")
)
SKIPPED_MODULES = ("_sysconfigdata", "html.entities", "config-")

Document = tuple[str, bytes]


@dataclass(frozen=True)
class Corpus:
    """Documents as one token stream; each ends with END_OF_DOCUMENT, which is the document's own last token.

    tokens [N] unsigned integers (array or memmap); offsets [D + 1] int64; names [D], for reports only; loss [N], 0
    where a token is not trained on as a target (None: 1 everywhere). Document d is tokens[offsets[d] : offsets[d + 1]].
    """

    tokens: np.ndarray
    offsets: np.ndarray
    names: tuple[str, ...] = ()
    loss: np.ndarray | None = None

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_targets(self) -> int:
        """Tokens that have a predecessor in their document. For byte corpora this equals the bytes of the raw text."""
        return len(self.tokens) - self.num_documents

    @cached_property
    def digest(self) -> str:
        """Short hash of tokens and document borders."""
        digest = hashlib.sha256(np.ascontiguousarray(self.tokens))
        digest.update(np.ascontiguousarray(self.offsets))
        return digest.hexdigest()[:16]

    def __getstate__(self) -> dict:
        # A pickled memmap would carry the whole file into every worker process: send its address instead.
        return {name: (str(value.filename), value.dtype, value.offset, value.shape) if isinstance(value, np.memmap)
                else value for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict) -> None:
        for name in ("tokens", "offsets", "loss"):
            if isinstance(state[name], tuple):
                file, dtype, offset, shape = state[name]
                state = {**state, name: np.memmap(file, dtype, "r", offset, shape)}
        self.__dict__.update(state)


@dataclass(frozen=True)
class TextSplits:
    """Train and valid corpora that share no document, and what was removed on the way."""

    train: Corpus
    valid: Corpus
    nul_bytes: int
    duplicates: int


def in_split(digest: bytes, fraction: float) -> bool:
    """Whether the first 8 bytes of a hash, read as a number in [0, 1), are below a fraction."""
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def in_valid_split(name: str, valid_fraction: float) -> bool:
    """Whether a document is held out: SHA-256 of its name, read as a number in [0, 1), is below valid_fraction."""
    spelt = name.encode(errors="surrogateescape")  # a file's name need not be UTF-8
    return in_split(hashlib.sha256(spelt).digest(), valid_fraction)


def build_corpus(documents: Iterable[Document]) -> Corpus:
    """Concatenates non-empty documents free of NUL bytes, each followed by END_OF_DOCUMENT."""
    documents = list(documents)
    for name, text in documents:
        if not text or END_OF_DOCUMENT in text:
            raise ValueError(f"document {name!r} is empty or contains a NUL byte, which marks the end of a document; "
                             "pass it through `clean` first")
    lengths = np.array([len(text) + 1 for _, text in documents], dtype=np.int64)
    tokens = np.frombuffer(b"".join(text + bytes([END_OF_DOCUMENT]) for _, text in documents), dtype=np.uint8)
    return Corpus(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), tuple(n for n, _ in documents))


def clean(documents: Iterable[Document]) -> tuple[list[Document], int, int]:
    """Strips NUL bytes, drops empty documents and repeated texts; returns documents, NUL bytes and repeats removed."""
    kept, seen, nul_bytes, duplicates = [], set(), 0, 0
    for name, text in documents:
        nul_bytes += text.count(0)
        text = text.replace(b"\0", b"")
        key = hashlib.sha256(text).digest()
        # The same text under two names could otherwise stand on both sides of the split.
        if text and key in seen:
            duplicates += 1
        elif text:
            seen.add(key)
            kept.append((name, text))
    return kept, nul_bytes, duplicates


def load_text(path: str = "", valid_path: str = "", valid_fraction: float = 0.05) -> TextSplits:
    """Reads the corpus at `path` (empty: the interpreter's own text) and splits it by document.

    With `valid_path` every document of `path` trains and every document of `valid_path` is held out. Raises ValueError
    for a missing path, an unreadable file, an empty split, or a text that stands in both paths.
    """
    if not 0 < valid_fraction < 1:
        raise ValueError(f"valid_fraction={valid_fraction} must lie strictly between 0 and 1; 0.05 is usual")
    if valid_path and not path:
        raise ValueError(f"valid_path={valid_path!r} needs path: give the training text as well")
    documents, nul_bytes, duplicates = clean(user_documents(path) if path else shipped_documents())
    if valid_path:
        train = documents
        valid, more_nul, more_duplicates = clean(user_documents(valid_path))
        nul_bytes, duplicates = nul_bytes + more_nul, duplicates + more_duplicates
        texts = {text: name for name, text in train}
        shared = [f"{name} = {texts[text]}" for name, text in valid if text in texts]
        if shared:
            raise ValueError(f"valid_path={valid_path!r} shares {len(shared)} documents with path={path!r} "
                             f"({', '.join(shared[:3])}); remove them from one side")
    else:
        train = [(name, text) for name, text in documents if not in_valid_split(name, valid_fraction)]
        valid = [(name, text) for name, text in documents if in_valid_split(name, valid_fraction)]
    for split, kept in (("train", train), ("valid", valid)):
        if not kept:
            raise ValueError(f"the {split} split of path={path!r} is empty: {len(documents)} documents, split "
                             f"by document with valid_fraction={valid_fraction}; give more documents (one per file or "
                             "per jsonl line), or a second file as valid_path")
    return TextSplits(build_corpus(train), build_corpus(valid), nul_bytes, duplicates)


def shipped_documents() -> list[Document]:
    """The text of the running interpreter, sorted by name: documentation topics and standard library sources.

    One document per topic of pydoc_data.topics (name topic:X) and per module (name module:X, docstrings included).
    Tests, demos, tables and unreadable files are left out; the result depends only on the Python release.
    """
    from pydoc_data import topics

    documents = {f"topic:{name}": text.encode() for name, text in topics.topics.items()}
    root = Path(sysconfig.get_path("stdlib"))
    for file in root.rglob("*.py"):
        parts = file.relative_to(root).with_suffix("").parts
        module = ".".join(parts)
        if SKIPPED_FOLDERS.intersection(parts) or module.startswith(SKIPPED_MODULES):
            continue
        try:
            text = file.read_bytes()
            text.decode()
        except (OSError, UnicodeDecodeError):
            continue
        documents[f"module:{module}"] = text.replace(b"\r\n", b"\n")
    return sorted(documents.items())


def user_documents(path: str) -> Iterator[Document]:
    """Documents of a file or, in sorted order, of every text file in a folder; names are relative to `path`.

    A .txt file is one document, a line of a .jsonl file is one document (field "text"); both may be packed.
    """
    for name, file in readers.list_files(path, readers.TEXT_SUFFIXES):
        for record in readers.read_file(name, file):
            yield record.name, record.prompt + record.text
