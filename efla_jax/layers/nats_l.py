"""NAtS-L: each chunk is remembered by softmax attention or by a delta rule, head by head (arXiv 2602.03681)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from efla_jax.layers.fields import check_choice
from efla_jax.layers.gated_delta_net import GatedDeltaNet
from efla_jax.layers.projections import dense, heads, read_out
from efla_jax.layers.reading import read_delta_step
from efla_jax.layers.router import Router
from efla_jax.ops import apply_rope, block_sparse_attention, exact_flow, l2_normalize, routed_delta_rule
from efla_jax.ops.segments import mask_padding, positions
from efla_jax.shapes import SegmentIds, check_heads

SOFTMAX, LINEAR = 0, 1  # of a choice of the router; the weights of the merge come the other way round


class NATSL(GatedDeltaNet):
    """Within its chunk a token has both operations; of earlier chunks softmax attention sees those that chose it, and
    the state of the delta rule holds the others (see `ops.block_sparse_attention` and `ops.routed_delta_rule`).

        y = w_0 RMSNorm(o of the delta rule) + w_1 RMSNorm(o of attention)        w = softmax(mix_proj q)
        out = o_proj (y SiLU(g_proj x))

    q, k, v with their convolutions serve both; norms and weights are per attention head, those of one head of the delta
    rule side by side in its channels. Fields of `GatedDeltaNet`, except that num_key_heads is num_heads, and

    num_attention_heads    A, a multiple of num_heads; None: 2 num_heads
    num_routes             R heads of the router, must divide num_heads; None: num_heads
    step                   of the delta rule: "gated_delta_net"; "efla": exact, keys as they come, after the decay
    rope_base              of rotary positions in attention; 0: none
    qk_norm                RMSNorm with weights of attention's queries and keys
    skipped_decay          the state also decays over chunks that chose softmax
    counterfactual         routing gradient of what a chunk did not choose, too (costs all scores in the backward pass)
    gumbel                 see `Router`
    implementation         of the delta rule; attention takes what there is
    """

    num_attention_heads: int | None = None
    num_routes: int | None = None
    step: str = "gated_delta_net"
    rope_base: float = 0.0
    qk_norm: bool = True
    skipped_decay: bool = True
    counterfactual: bool = False
    gumbel: bool = False

    def __post_init__(self):
        check_choice("step", self.step, ("gated_delta_net", "efla"))
        _, key_dim, _ = self.attention_sizes()
        if self.rope_base < 0 or (self.rope_base and key_dim % 2):
            raise ValueError(
                f"rope_base: {self.rope_base} with attention heads of {key_dim}, but it must be positive and they even,"
                " as channels turn in pairs. Change one of them, or set rope_base=0.0 for no positions."
            )
        super().__post_init__()

    @nn.nowrap
    def sizes(self) -> tuple[int, int, int, int]:
        if self.num_key_heads not in (None, self.num_heads):
            raise ValueError(
                f"num_key_heads: {self.num_key_heads}, but both branches cut the same channels into heads: it must be"
                f" num_heads={self.num_heads}. Leave it out."
            )
        check_heads(self.routes(), self.num_heads)
        return super().sizes()

    @nn.nowrap
    def routes(self) -> int:
        """R."""
        return self.num_heads if self.num_routes is None else self.num_routes

    @nn.nowrap
    def attention_sizes(self) -> tuple[int, int, int]:
        """(A, key dim, value dim) of the attention heads. Raises ValueError for fields that do not fit together."""
        _, num_heads, key_dim, value_dim = self.sizes()
        count = 2 * num_heads if self.num_attention_heads is None else self.num_attention_heads
        share = count // num_heads
        if share < 1 or count % num_heads or key_dim % share or value_dim % share:
            raise ValueError(
                f"num_attention_heads: {count} must be a multiple of num_heads={num_heads} that cuts its key dim"
                f" {key_dim} and value dim {value_dim} into whole numbers. Set one that does."
            )
        return count, key_dim // share, value_dim // share

    @nn.nowrap
    def init_cache(self, batch_size: int):
        """Not implemented: raises NotImplementedError."""
        raise NotImplementedError("nats_l: no cache yet; call it on whole sequences (cache=None).")

    @nn.nowrap
    def operator_flops(self, length: int) -> float:
        """Per token, mean over a document of `length`: 6 K V a head of the delta rule; scores and weighted values,
        2 (K + V) a head and key seen: half the own chunk and, as when training begins, half of the others before it.
        The router's matrix is used once a chunk."""
        _, num_heads, key_dim, value_dim = self.sizes()
        size = self.chunk_size
        keys = min(length, size) / 2 + max(0, length - size) / 4
        router = 4.0 * self.width * self.routes() * (1 / size - 1)
        return num_heads * (6.0 * key_dim * value_dim + 2.0 * (key_dim + value_dim) * keys) + router

    def coefficients(self, k, v, beta, log_decay):
        if self.step == "efla":
            return *exact_flow(k, v, beta), log_decay
        return super().coefficients(k, v, beta, log_decay)

    def linear(self, x, q, k, v, choice, segment_ids) -> jax.Array:
        """Outputs [B, T, H, V] of the delta rule whose state keeps the chunks that chose it."""
        beta = self.beta(x)
        unit_k, u, erase, log_decay = self.coefficients(k, v, beta, self.log_decay(x))
        read_delta_step(k, beta, erase, log_decay, segment_ids)
        keep = jnp.repeat(choice, self.num_heads // self.routes(), axis=2)
        if not self.counterfactual:
            keep *= jax.lax.stop_gradient(keep)  # of chunks that are not kept, no gradient
        if not self.skipped_decay:
            keep = jnp.stack([keep, jnp.zeros_like(keep)], axis=-1)
        q = l2_normalize(q) if self.query_norm == "l2" else q
        o, _ = routed_delta_rule(
            q, unit_k, u, erase, log_decay, keep,
            segment_ids=segment_ids, chunk_size=self.chunk_size, implementation=self.implementation,
        )  # fmt: skip
        return o

    def attention(self, q, k, v, choice, segment_ids) -> jax.Array:
        """Outputs [B, T, A, value dim] of attention that sees the chunks that chose it."""
        count, key_dim, value_dim = self.attention_sizes()
        batch, time = q.shape[:2]
        q, k = (x.reshape(batch, time, count, key_dim) for x in (q, k))
        if self.qk_norm:
            q = nn.RMSNorm(epsilon=self.norm_eps, dtype=self.dtype, name="q_norm")(q)
            k = nn.RMSNorm(epsilon=self.norm_eps, dtype=self.dtype, name="k_norm")(k)
        if self.rope_base:
            at = positions(batch, time, segment_ids)
            q, k = apply_rope(q, at, self.rope_base), apply_rope(k, at, self.rope_base)
        o, _ = block_sparse_attention(
            q * key_dim**-0.5, k, v.reshape(batch, time, count, value_dim), choice,
            segment_ids=segment_ids, chunk_size=self.chunk_size, counterfactual=self.counterfactual,
        )  # fmt: skip
        return o

    def mixed(self, q, linear, attention) -> jax.Array:
        """The two outputs [B, T, A, value dim], normed and weighed by the raw queries, float32."""
        batch, time, count, _ = attention.shape
        logits = dense(self, "mix_proj", 2 * count)(q.reshape(batch, time, q.shape[2] * q.shape[3]))
        weights = nn.softmax(logits.astype(jnp.float32).reshape(batch, time, count, 2))[..., None]
        both = linear.reshape(attention.shape), attention
        if self.output_norm:
            names = "linear_norm", "softmax_norm"
            both = tuple(
                nn.RMSNorm(epsilon=self.norm_eps, dtype=jnp.float32, name=name)(o)
                for name, o in zip(names, both, strict=True)
            )
        return weights[..., 0, :] * both[0] + weights[..., 1, :] * both[1]

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: SegmentIds | None = None, cache=None) -> tuple[jax.Array, Any]:
        """x [B, T, width] -> y [B, T, width] in `dtype`, and no cache (one given: NotImplementedError); any T >= 0."""
        if cache is not None:
            raise NotImplementedError("nats_l: no cache yet; call it on whole sequences (cache=None).")
        _, num_heads, key_dim, value_dim = self.sizes()
        if segment_ids is not None:
            x = mask_padding(segment_ids != 0, x)
        q, _ = heads(self, "q", x, (num_heads, key_dim), segment_ids, ())
        k, _ = heads(self, "k", x, (num_heads, key_dim), segment_ids, ())
        v, _ = heads(self, "v", x, (num_heads, value_dim), segment_ids, ())
        router = Router(self.routes(), self.chunk_size, self.gumbel, self.kernel_init, self.init_std, name="router")
        choice = router(x, segment_ids)
        linear = self.linear(x, q, k, v, choice[..., LINEAR], segment_ids)
        attention = self.attention(q, k, v, choice[..., SOFTMAX], segment_ids)
        y = self.mixed(q, linear, attention)
        return read_out(self, y.reshape(linear.shape), x), None
