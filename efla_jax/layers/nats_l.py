"""NAtS-L: each chunk is remembered by softmax attention or by a delta rule, head by head (arXiv 2602.03681)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from efla_jax.layers.cache import carry_on, check_call, continues
from efla_jax.layers.fields import check_choice, check_least
from efla_jax.layers.gated_delta_net import GatedDeltaNet
from efla_jax.layers.projections import dense, heads, read_out
from efla_jax.layers.reading import read_delta_step
from efla_jax.layers.router import Router
from efla_jax.ops import (
    RoutedState,
    SelectedKV,
    apply_rope,
    block_sparse_attention,
    chunk_start_delta_rule,
    exact_flow,
    grow_selected_kv,
    init_routed_state,
    init_selected_kv,
    l2_normalize,
    routed_delta_rule,
)
from efla_jax.ops.segments import mask_padding, positions
from efla_jax.shapes import SegmentIds

SOFTMAX, LINEAR = 0, 1  # of a choice of the router; the weights of the merge come the other way round


class NATSLCache(NamedTuple):
    """conv: see `RecurrentCache`; state: of the delta rule; pooled [B, D]: sum, float32, of the layer's inputs over the
    chunk that is open; kv: keys (rotated) and values of the chunks that chose softmax and of the open one; segment [B]
    int32: id of each row's last real token, or 0."""

    conv: tuple[Array, ...]
    state: RoutedState
    pooled: Float[Array, "B D"]
    kv: SelectedKV
    segment: Int[Array, " B"]


class NATSL(GatedDeltaNet):
    """Within its chunk a token has both operations; of earlier chunks softmax attention sees those that chose it, and
    the state of the delta rule holds the others (see `ops.block_sparse_attention` and `ops.routed_delta_rule`).

        y = w_0 RMSNorm(o of the delta rule) + w_1 RMSNorm(o of attention)        w = softmax(mix_proj q)
        out = o_proj (y SiLU(g_proj x))

    q, k, v with their convolutions serve both; norms and weights are per attention head, those of one head of the delta
    rule side by side in its channels. The delta rule's queries are not scaled by K^-1/2, as in `GatedDeltaNet`: the
    norm takes a factor out; without output_norm the output is scaled. Choices are those of `Router`. Fields of
    `GatedDeltaNet`, except that num_key_heads is num_heads, and

    num_attention_heads    A, a multiple of num_heads; None: 2 num_heads
    num_routes             R heads of the router, must divide num_heads; None: num_heads
    step                   of the delta rule: "gated_delta_net"; "efla": exact, keys as they come, after the decay, so
                           that the decay stays the same (joint with it, it would keep a third of the state or more)
    rope_base              of rotary positions in attention; 0: none
    qk_norm                RMSNorm with weights of attention's queries and keys
    skipped_decay          the state also decays over chunks that chose softmax
    own_chunk              what shows a token its own chunk: "both"; "softmax" or "linear": one, the other shows earlier
                           chunks only (without GPU kernels)
    merge                  what w is made from: "queries"; "inputs", w = softmax(mix_proj x); "none", both w are 1
    counterfactual         routing gradient of what a chunk did not choose, too (costs all scores in the backward pass;
                           from tokens of later calls there is none, as a cache holds chosen chunks only)
    gumbel                 see `Router`
    max_length             tokens of a document that a fresh cache has room for; after a first call see `Attention`
    softmax_room           part of the (chunk, routing head) pairs of max_length tokens that the cache has pages for;
                           1.0 always suffices. A document that needs more: see `ops.block_sparse_attention`
    implementation         of the delta rule; attention takes what there is
    """

    num_attention_heads: int | None = None
    num_routes: int | None = None
    step: str = "gated_delta_net"
    rope_base: float = 0.0
    qk_norm: bool = True
    skipped_decay: bool = True
    own_chunk: str = "both"
    merge: str = "queries"
    counterfactual: bool = False
    gumbel: bool = False
    max_length: int = 2048
    softmax_room: float = 1.0

    def __post_init__(self):
        check_choice("step", self.step, ("gated_delta_net", "efla"))
        check_choice("own_chunk", self.own_chunk, ("both", "softmax", "linear"))
        if self.own_chunk == "linear" and self.counterfactual:
            raise ValueError(
                "counterfactual: True with own_chunk='linear', but where attention sees no chunk a choice not made has"
                " no gradient. Leave one of them as it is by default."
            )
        check_choice("merge", self.merge, ("queries", "inputs", "none"))
        check_least("max_length", self.max_length, 1)
        if not 0 < self.softmax_room <= 1:
            raise ValueError(
                f"softmax_room: {self.softmax_room} is not in (0, 1]: it is the part of a document's chunks that the"
                " cache has room for. Set 1.0, which suffices whatever they choose."
            )
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
        sizes = super().sizes()
        if self.routes() < 1 or self.num_heads % self.routes():
            raise ValueError(
                f"num_routes: {self.num_routes}, but it must divide num_heads={self.num_heads}: a routing head decides"
                " for as many heads as every other. Set one that does, or leave it out for one each."
            )
        return sizes

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
    def pages(self, chunks: int) -> int:
        """How many pairs of a routing head and one of so many chunks there is room for."""
        return math.ceil(self.softmax_room * self.routes() * chunks)

    @nn.nowrap
    def init_cache(  # type: ignore[override]  # more than the delta rule's
        self, batch_size: int, max_length: int | None = None
    ) -> NATSLCache:
        """The cache of `batch_size` rows that have seen nothing, for documents of up to max_length tokens."""
        fresh = super().init_cache(batch_size)
        length = self.max_length if max_length is None else max_length
        count, key_dim, value_dim = self.attention_sizes()
        kv = init_selected_kv(
            batch_size, self.pages(length // self.chunk_size), self.chunk_size, count, self.routes(),
            key_dim, value_dim, self.dtype,
        )  # fmt: skip
        state = init_routed_state(batch_size, *self.sizes()[1:])
        pooled = jnp.zeros((batch_size, self.width), jnp.float32)
        return NATSLCache(fresh.conv, state, pooled, kv, fresh.segment)

    @nn.nowrap
    def operator_flops(self, length: int) -> float:
        """Per token, mean over a document of `length`: 6 K V a head of the delta rule; scores and weighted values,
        2 (K + V) a head and key seen: half the own chunk and, as when training begins, half of the others before it.
        The router's matrix is used once a chunk."""
        _, num_heads, key_dim, value_dim = self.sizes()
        size = self.chunk_size
        keys = (self.own_chunk != "linear") * min(length, size) / 2 + max(0, length - size) / 4
        router = 4.0 * self.width * self.routes() * (1 / size - 1)
        return num_heads * (6.0 * key_dim * value_dim + 2.0 * (key_dim + value_dim) * keys) + router

    def coefficients(self, k, v, beta, log_decay):
        if self.step == "efla":
            return *exact_flow(k, v, beta), log_decay
        return super().coefficients(k, v, beta, log_decay)

    def linear(self, x, q, k, v, choice, state, segment_ids) -> tuple[jax.Array, RoutedState]:
        """Outputs [B, T, H, V] of the delta rule whose state keeps the chunks that chose it, and that state."""
        beta = self.beta(x)
        unit_k, u, erase, log_decay = self.coefficients(k, v, beta, self.log_decay(x))
        read_delta_step(k, beta, erase, log_decay, segment_ids)
        keep = jnp.repeat(choice, self.num_heads // self.routes(), axis=2)
        if not self.counterfactual:
            keep *= jax.lax.stop_gradient(keep)  # of chunks that are not kept, no gradient
        if not self.skipped_decay:
            keep = jnp.stack([keep, jnp.zeros_like(keep)], axis=-1)
        q = l2_normalize(q) if self.query_norm == "l2" else q
        op = chunk_start_delta_rule if self.own_chunk == "softmax" else routed_delta_rule
        return op(
            q, unit_k, u, erase, log_decay, keep,
            initial_state=state, segment_ids=segment_ids,
            chunk_size=self.chunk_size, implementation=self.implementation,
        )  # fmt: skip

    def attention(self, q, k, v, choice, kv, segment_ids) -> tuple[jax.Array, SelectedKV]:
        """Outputs [B, T, A, value dim] of attention that sees the chunks that chose it, and what it keeps of them."""
        count, key_dim, value_dim = self.attention_sizes()
        batch, time = q.shape[:2]
        q, k = (x.reshape(batch, time, count, key_dim) for x in (q, k))
        if self.qk_norm:
            q = nn.RMSNorm(epsilon=self.norm_eps, dtype=self.dtype, name="q_norm")(q)
            k = nn.RMSNorm(epsilon=self.norm_eps, dtype=self.dtype, name="k_norm")(k)
        if self.rope_base:
            at = positions(batch, time, segment_ids, None if kv is None else kv.position)
            q, k = apply_rope(q, at, self.rope_base), apply_rope(k, at, self.rope_base)
        o, after = block_sparse_attention(
            q * key_dim**-0.5, k, v.reshape(batch, time, count, value_dim), choice, initial_state=kv,
            segment_ids=segment_ids, chunk_size=self.chunk_size, counterfactual=self.counterfactual,
            own_chunk=self.own_chunk != "linear",
        )  # fmt: skip
        if kv is None:  # what came back has room for these tokens alone
            total = self.max_length if time < self.max_length else time + self.max_length
            more = self.pages(total // self.chunk_size - time // self.chunk_size)
            after = grow_selected_kv(after, after.k.shape[1] + more)
        return o, after

    def mixed(self, source, linear, attention) -> jax.Array:
        """The two outputs [B, T, A, value dim], normed and weighed by `source` [B, T, ...], float32."""
        batch, time, count, _ = attention.shape
        linear = linear.reshape(attention.shape)
        if self.output_norm:
            linear, attention = (
                nn.RMSNorm(epsilon=self.norm_eps, dtype=jnp.float32, name=name)(o)
                for name, o in (("linear_norm", linear), ("softmax_norm", attention))
            )
        else:
            linear = linear.astype(jnp.float32) * self.sizes()[2] ** -0.5
        if self.merge == "none":
            return linear + attention
        logits = dense(self, "mix_proj", 2 * count)(source.reshape(batch, time, math.prod(source.shape[2:])))
        weights = nn.softmax(logits.astype(jnp.float32).reshape(batch, time, count, 2))[..., None]
        return weights[..., 0, :] * linear + weights[..., 1, :] * attention

    @nn.compact
    def __call__(  # type: ignore[override]
        self, x: jax.Array, segment_ids: SegmentIds | None = None, cache: NATSLCache | None = None
    ) -> tuple[jax.Array, NATSLCache]:
        """x [B, T, width] -> y [B, T, width] in `dtype` and the cache after each row's last real token; any T >= 0."""
        check_call(self, x, segment_ids, cache, NATSLCache)
        _, num_heads, key_dim, value_dim = self.sizes()
        if segment_ids is not None:
            x = mask_padding(segment_ids != 0, x)
        conv, state, pooled, kv, segment = carried(cache, segment_ids, *x.shape[:2])
        q, q_inputs = heads(self, "q", x, (num_heads, key_dim), segment_ids, conv[0:1])
        k, k_inputs = heads(self, "k", x, (num_heads, key_dim), segment_ids, conv[1:2])
        v, v_inputs = heads(self, "v", x, (num_heads, value_dim), segment_ids, conv[2:3])
        router = Router(self.routes(), self.chunk_size, self.gumbel, self.kernel_init, self.init_std, name="router")
        choice, pooled = router(x, segment_ids, None if state is None else state.position, pooled)
        linear, state = self.linear(x, q, k, v, choice[..., LINEAR], state, segment_ids)
        attention, kv = self.attention(q, k, v, choice[..., SOFTMAX], kv, segment_ids)
        mixed = self.mixed(x if self.merge == "inputs" else q, linear, attention)
        y = read_out(self, mixed.reshape(linear.shape), x)
        return y, NATSLCache(q_inputs + k_inputs + v_inputs, state, pooled, kv, segment)


def carried(cache: NATSLCache | None, segment_ids: SegmentIds | None, batch: int, time: int) -> tuple:
    """(conv, state, pooled, kv) of the documents that go on (none without a cache), and the segment after the call."""
    if cache is None:
        _, segment = continues(jnp.zeros((batch,), jnp.int32), segment_ids, time)
        return (), None, None, None, segment
    keep, segment = continues(cache.segment, segment_ids, time)
    # Pages that are not in use are not read: to zero them would cost as much as all of attention.
    pages, position = carry_on(keep, (cache.kv.pages, cache.kv.position))
    kv = cache.kv._replace(pages=pages, position=position)
    return *carry_on(keep, (cache.conv, cache.state, cache.pooled)), kv, segment
