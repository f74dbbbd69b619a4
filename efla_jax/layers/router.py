"""The router of NAtS-L: one hard choice per chunk and head, with a gradient as if it were soft (arXiv 2602.03681)."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from efla_jax.layers.initializers import kernel_initializer
from efla_jax.layers.reading import Reading
from efla_jax.ops.document_chunks import chunk_sums, document_chunks, still_open
from efla_jax.shapes import SegmentIds


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

    Equal logits choose softmax; where they are equal but for the rounding of the mean, a document read in pieces may
    choose otherwise than in one pass. Products are in full precision whatever `jax.default_matmul_precision` says.

    The part that chose softmax leaves as the Reading "softmax_fraction" over the chunks that fill up, [R]; its mean has
    the gradient of the choice, so that a loss may add a multiple of it."""

    num_heads: int
    chunk_size: int = 64
    gumbel: bool = False
    kernel_init: str = "lecun"
    init_std: float = 0.02

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_ids: SegmentIds | None = None,
        position: Int[Array, " B"] | None = None,
        pooled: Float[Array, "B D"] | None = None,
    ) -> tuple[Float[Array, "B N R 2"], Float[Array, "B D"]]:
        """x [B, T, D], zero at padding -> choices [B, N, R, 2]: entry n for the n-th chunk that fills up in the row, as
        the routed operators count them; and the sum of x over the chunk that is open when the row ends, float32. A
        chunk that does not fill up has no entry: nothing looks back at it.

        A call that goes on with documents: position [B], their tokens so far, and pooled [B, D], what the last call
        returned."""
        batch, time, _ = x.shape
        chunks = document_chunks(batch, time, self.chunk_size, segment_ids, position)
        sums = chunk_sums(x, chunks, self.chunk_size)
        own, carries = still_open(chunks)
        after = jnp.sum(jnp.where(own[..., None], x, 0), axis=1, dtype=jnp.float32)
        if pooled is not None:
            fills = jnp.any(chunks.closes & (chunks.number == 0) & (chunks.document == 0), axis=1)
            first = jnp.arange(sums.shape[1]) == 0
            sums += jnp.where((fills[:, None] & first)[..., None], pooled[:, None], 0)
            after += jnp.where(carries[:, None], pooled, 0)
        init = kernel_initializer(self.kernel_init, self.init_std)
        logits = nn.Dense(
            2 * self.num_heads, use_bias=False, kernel_init=init, dtype=jnp.float32,
            precision=jax.lax.Precision.HIGHEST, name="route_proj",
        )(sums / self.chunk_size).reshape(*sums.shape[:2], self.num_heads, 2)  # fmt: skip
        noise: jax.Array | float = 0.0
        if self.gumbel and self.has_rng("dropout"):
            noise = jax.random.gumbel(self.make_rng("dropout"), logits.shape)
        choice = straight_through(logits, noise)
        filled = jnp.sum(chunks.closes, axis=1, keepdims=True)
        used = (jnp.arange(sums.shape[1]) < filled).astype(jnp.int32)
        Reading(name="softmax_fraction")(choice[..., 0], used)
        return choice, after
