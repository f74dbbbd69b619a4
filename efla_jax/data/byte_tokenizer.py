"""The tokenizer of bytes as a Hugging Face tokenizer.json, for programs that read nothing else.

Byte-level BPE without a merge: every byte is a token whose id is the byte. The format spells bytes that are no visible
Latin-1 character by the characters from U+0100 on, in their order.
"""

import json
from typing import Any


def spelled() -> dict[str, int]:
    """The byte that each character of the format stands for, in the order of bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    names = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return {names[byte]: byte for byte in range(256)}


def tokenizer_json() -> str:
    """The file's content, the same to the byte in every call."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": spelled(), "merges": [],
    }  # fmt: skip
    whole: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip
    return json.dumps(whole, ensure_ascii=False, indent=1) + "\n"
