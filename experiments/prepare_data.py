"""Tokenise text into memory-mapped shards for training with config.data.kind = "tokens".

    python -m experiments.prepare_data --path=books.jsonl.xz --tokenizer=tokenizer.json --output=tokens/books
    python -m experiments.prepare_data --path=FOLDER --tokenizer=bytes --output=tokens/folder
    python -m experiments.prepare_data --path=hf:NAME:CONFIG:SPLIT --tokenizer=tokenizer.model --output=tokens/name
    python -m experiments.train --config=... --config.data.kind=tokens --config.data.path=tokens/books

Reads .txt, .jsonl (plain, .gz, .xz, .zst), .parquet, or a Hugging Face dataset. A row with "prompt" and "response" (or
"completion") is trained on its response alone. The same command again goes on where it was stopped, and does nothing
when all is done. The format is described at the head of efla_jax/data/shards.py.
"""

from absl import flags

from efla_jax.data import prepare, tokenizer
from experiments import arguments

PATH = flags.DEFINE_string("path", "", "file, folder, or hf:NAME[:CONFIG[:SPLIT]]")
OUTPUT = flags.DEFINE_string("output", "", "folder for the shards: empty, or of the same preparation")
TOKENIZER = flags.DEFINE_string("tokenizer", "bytes", "bytes, tokenizer.json, SentencePiece .model or tiktoken ranks")
EOS = flags.DEFINE_string("eos", "", "token (or number) that ends a document; empty: the tokenizer's usual one")
BOS = flags.DEFINE_string("bos", "", "token (or number) that begins a document; empty: none")
PATTERN = flags.DEFINE_string("pattern", "", "tiktoken ranks only: the split expression; empty: that of GPT-2")
VALID_PATH = flags.DEFINE_string("valid_path", "", "held-out text; empty: a fraction of path")
VALID_FRACTION = flags.DEFINE_float("valid_fraction", 0.005, "held-out share of documents, by hash of content")
TEXT_FIELD = flags.DEFINE_string("text_field", "text", "field of a row that has the text")
DEDUPLICATE = flags.DEFINE_bool("deduplicate", True, "drop exact repeats (about 100 bytes of memory per document)")
SHARD_TOKENS = flags.DEFINE_integer("shard_tokens", 1 << 27, "close a shard when it has so many tokens")
WORKERS = flags.DEFINE_integer("workers", 1, "processes that tokenise; 0: this one. The result is the same")


def main(argv: list[str]) -> None:
    arguments.check(argv, required=("path", "output"))
    spec = tokenizer.TokenizerSpec(TOKENIZER.value, EOS.value, BOS.value, PATTERN.value)
    preparation = prepare.Preparation(PATH.value, spec, VALID_PATH.value, VALID_FRACTION.value, TEXT_FIELD.value,
                                      DEDUPLICATE.value, SHARD_TOKENS.value)
    manifest = prepare.prepare(preparation, OUTPUT.value, WORKERS.value)
    for split in ("train", "valid"):
        documents, tokens, size = (manifest.total(name, split) for name in ("documents", "tokens", "bytes"))
        print(f"{split}: {documents} documents, {tokens} tokens, {size} bytes")
    print(f"dropped: {manifest.counts['duplicates']} duplicates, {manifest.counts['empty']} empty documents")


if __name__ == "__main__":
    arguments.run(main)
