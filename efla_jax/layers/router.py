"""The router of NAtS-L: one hard choice per chunk and head, with a gradient as if it were soft (arXiv 2602.03681)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from efla_jax.layers.initializers import kernel_initializer
from efla_jax.layers.reading import Reading
from efla_jax.ops.document_chunks import DocumentChunks, carried, document_chunks
from efla_jax.shapes import SegmentIds


def chunk_means(x: Float[Array, "B T D"], chunks: DocumentChunks, chunk_size: int) -> Float[Array, "B N D"]:
    """Mean, float32, over the tokens of the n-th chunk that fills up in the row; zero for entries without a chunk."""
    batch, time, width = x.shape
    count = -(-time // chunk_size)
    slot = jnp.where(chunks.full, chunks.number * chunk_size + chunks.position % chunk_size, -1)
    token = jnp.arange(time, dtype=jnp.int32)
    source = jnp.full((batch, count * chunk_size), -1, jnp.int32)
    source = source.at[jnp.arange(batch)[:, None], jnp.where(chunks.full, slot, count * chunk_size + token)].set(
        jnp.broadcast_to(token, slot.shape), mode="drop", unique_indices=True
    )
    laid = carried(x, source, slot).reshape(batch, count, chunk_size, width)
    return jnp.mean(laid, axis=2, dtype=jnp.float32)


def straight_through(logits: Float[Array, "*lead 2"], noise: jax.Array | float = 0.0) -> Float[Array, "*lead 2"]:
    """The one-hot of the larger logit (the first of equals), exactly; its gradient is that of their softmax.

    noise is added to the logits first."""
    soft = nn.softmax(logits + noise)
    hard = jax.nn.one_hot(jnp.argmax(soft, axis=-1), 2, dtype=soft.dtype)
    return hard + (soft - jax.lax.stop_gradient(soft))


class Router(nn.Module):
    """[softmax, linear] = one-hot of argmax(W mean of x over the chunk), per chunk and routing head, in float32.

    num_heads     R
    chunk_size    tokens, counted from each document's first real one
    gumbel        noise of the Gumbel distribution on the logits, given a "dropout" rng: a draw of the softmax

    The part that chose softmax leaves as the Reading "softmax_fraction" over the chunks that fill up, [R]; its mean has
    the gradient of the choice, so that a loss may add a multiple of it."""

    num_heads: int
    chunk_size: int = 64
    gumbel: bool = False
    kernel_init: str = "lecun"
    init_std: float = 0.02

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], segment_ids: SegmentIds | None = None) -> Float[Array, "B N R 2"]:
        """x [B, T, D], zero at padding -> choices [B, N, R, 2]: entry n for the n-th chunk that fills up in the row, as
        the routed operators count them. A chunk that does not has no entry: nothing looks back at it."""
        chunks = document_chunks(x.shape[0], x.shape[1], self.chunk_size, segment_ids)
        pooled = chunk_means(x, chunks, self.chunk_size)
        init = kernel_initializer(self.kernel_init, self.init_std)
        logits = nn.Dense(2 * self.num_heads, use_bias=False, kernel_init=init, dtype=jnp.float32, name="route_proj")(
            pooled
        ).reshape(*pooled.shape[:2], self.num_heads, 2)
        noise: jax.Array | float = 0.0
        if self.gumbel and self.has_rng("dropout"):
            noise = jax.random.gumbel(self.make_rng("dropout"), logits.shape)
        choice = straight_through(logits, noise)
        filled = jnp.sum(chunks.closes, axis=1, keepdims=True)
        used = (jnp.arange(pooled.shape[1]) < filled).astype(jnp.int32)
        Reading(name="softmax_fraction")(choice[..., 0], used)
        return choice
