"""Text from a language model: prompts are read in pieces, tokens follow in blocks, and prefixes can be kept.

    tokens = generate(model, params, [[3, 1, 4], [1, 5]], max_new_tokens=100, temperature=0.8)

`prefill` and `Decoding` are its two halves, for streams of text, stop strings and prefixes that are used again;
`snapshot` keeps a prefix in a file, `text` turns tokens into text as they come.

Prompts of different lengths are one batch, padded behind; padding is invisible, so every row gets what it would alone.
Rows finish at the stop token independently of each other: what a finished row goes on to say is dropped.
"""

from collections.abc import Sequence

import numpy as np

from efla_jax.generate.decode import BLOCK, Decoding, decode_block
from efla_jax.generate.prefix import PIECE, Prefix, Prompts, padded, prefill, read_piece, take
from efla_jax.generate.sampling import Choice, Sampling, likely, sample, stream_of
from efla_jax.model import LanguageModel

__all__ = [
    "BLOCK", "PIECE", "Choice", "Decoding", "Prefix", "Prompts", "Sampling", "decode_block", "generate", "likely",
    "padded", "prefill", "read_piece", "sample", "stream_of", "take",
]  # fmt: skip


def generate(
    model: LanguageModel,
    params,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    greedy: bool = False,
    stop_token: int | Sequence[int] | None = None,
    seed: int = 0,
    segment_ids: np.ndarray | None = None,
    piece: int = PIECE,
    block: int = BLOCK,
) -> list[list[int]]:
    """The tokens that follow each prompt, without the stop token: at most max_new_tokens per row.

    prompts: lists or arrays of token ids, of any lengths; or an array [B, T] with segment_ids [B, T], 0 at padding.
    temperature 0 is greedy; top_k 0 and top_p 1 are no limits. A row's tokens depend on its prompt, its index and the
    seed, never on the other rows. The cache has room for prompt and continuation. piece: see `prefill`; block: tokens
    between two looks of the host. Compiled once per number of rows and piece (or power of two of shorter prompts).
    Raises ValueError for prompts or settings out of range, FloatingPointError where logits are not finite."""
    stops = () if stop_token is None else (stop_token,) if isinstance(stop_token, int) else tuple(stop_token)
    choice = Choice(0.0 if greedy and temperature >= 0 else temperature, top_k, top_p, stops, seed=seed)
    choice.check(model.vocab_size)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: {max_new_tokens} is not positive.")
    prefix = prefill(model, params, prompts, segment_ids=segment_ids, coming=max_new_tokens, piece=piece)
    real = prompts if segment_ids is None else [row[ids != 0] for row, ids in zip(prompts, segment_ids, strict=True)]
    streams = [stream_of(row, i) for i, row in enumerate(real)]
    decoding = Decoding(
        model, params, prefix, choice, max_new_tokens=max_new_tokens, streams=streams, block=block, keep=False
    )
    rows: list[list[int]] = [[] for _ in prefix.length]
    for tokens in decoding:
        for row, new in zip(rows, tokens, strict=True):
            row += [int(token) for token in new if token >= 0]
    return rows
