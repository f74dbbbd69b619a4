"""The block around the delta rule that its mixers share; each adds how key, value and beta become a step."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from efla_jax.layers.cache import RecurrentCache, begin, fresh_cache
from efla_jax.layers.fields import check_choice, check_dtype, check_least, head_width
from efla_jax.layers.projections import ACTIVATIONS, gate, heads, merge_heads
from efla_jax.layers.reading import read_delta_step
from efla_jax.ops import delta_flow, delta_rule, l2_normalize
from efla_jax.shapes import SegmentIds, check_chunk_size, check_heads

BETA = {"sigmoid": nn.sigmoid, "softplus": nn.softplus}


class DeltaMixer(nn.Module):
    """Projections, short convolution, activation, gates in float32, the delta rule, output norm and gate, projection.

    head_dim          K, the key dim of a head; None: width / num_heads
    num_key_heads     G, must divide num_heads; None: num_heads
    expand_v          V = expand_v K
    conv_width        taps of the convolution over q, k and v; 0: none
    query_norm        "l2": queries of unit length; "none": as they come
    beta_activation   "sigmoid" or "softplus"
    beta_bias         None: beta's projection has no bias; a number: it has one, which begins there
    output_norm, output_gate, output_projection    RMSNorm per head, times SiLU of a projection, back to width
    kernel_init, gate_init    see `kernel_initializer`; gates are the projections to one number per head
    dtype             of the products; parameters, gates and states are float32
    """

    width: int
    num_heads: int
    head_dim: int | None = None
    num_key_heads: int | None = None
    expand_v: float = 1.0
    conv_width: int = 4
    activation: str = "silu"
    query_norm: str = "l2"
    beta_activation: str = "sigmoid"
    beta_bias: float | None = None
    output_norm: bool = True
    output_gate: bool = False
    output_projection: bool = True
    kernel_init: str = "lecun"
    gate_init: str = "uniform"
    init_std: float = 0.02
    norm_eps: float = 1e-6
    chunk_size: int = 64
    implementation: str = "auto"
    dtype: DTypeLike = "float32"

    def __post_init__(self):
        self.sizes()
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("query_norm", self.query_norm, ("l2", "none"))
        check_choice("beta_activation", self.beta_activation, BETA)
        check_chunk_size(self.chunk_size)
        check_least("conv_width", self.conv_width, 0)
        check_dtype(self.dtype)
        super().__post_init__()

    @nn.nowrap
    def sizes(self) -> tuple[int, int, int, int]:
        """(G, H, K, V). Raises ValueError for fields that do not fit together."""
        heads = self.num_heads
        key_heads = heads if self.num_key_heads is None else self.num_key_heads
        key_dim = head_width(self.width, heads, self.head_dim)
        check_heads(key_heads, heads)
        value_dim = round(self.expand_v * key_dim)
        if value_dim < 1 or value_dim != self.expand_v * key_dim:
            raise ValueError(f"expand_v: {self.expand_v} times the key dim {key_dim} is not a positive whole number.")
        if not self.output_projection and heads * value_dim != self.width:
            raise ValueError(f"output_projection: without it {heads} heads of {value_dim} must be width={self.width}.")
        return key_heads, heads, key_dim, value_dim

    @nn.nowrap
    def init_state(self, batch_size: int) -> Any:
        """What the recurrence begins with."""
        return jnp.zeros((batch_size, *self.sizes()[1:]), jnp.float32)

    @nn.nowrap
    def init_cache(self, batch_size: int) -> RecurrentCache:
        """The cache of `batch_size` rows that have seen nothing."""
        key_heads, heads, key_dim, value_dim = self.sizes()
        channels = key_heads * key_dim, key_heads * key_dim, heads * value_dim
        return fresh_cache(batch_size, self.conv_width, channels, self.init_state(batch_size), self.dtype)

    @nn.nowrap
    def operator_flops(self, length: int) -> float:
        """Of the recurrence per token, whatever the length: S^T k, the update k u^T and S^T q are 2 K V each a head."""
        _, heads, key_dim, value_dim = self.sizes()
        return 6.0 * heads * key_dim * value_dim

    def coefficients(self, k, v, beta, log_decay):
        """(unit k, u, erase, log decay) of `ops.delta_rule` from raw keys, values, beta and raw log decay (or None)."""
        raise NotImplementedError("DeltaMixer is the common part; use one of layers.MIXERS.")

    @nn.nowrap
    def raw_keys(self, k: jax.Array) -> jax.Array:
        """The keys [B, T, G, K] whose step is taken, from what projection and convolution give."""
        return k

    @nn.nowrap
    def flow_step(self) -> str | None:
        """The step of `ops.delta_flow` that is `coefficients` and `recurrence` in one; None: there is none. Nothing
        comes of it in a class that has either of its own and does not say this again."""
        return None

    @nn.nowrap
    def taken_step(self) -> str | None:
        """`flow_step`, unless a class behind it in which it was not said again changes what it stands for; and only if
        GPU kernels are asked for by name: a training step takes as long either way (lm_340m:efla, 16 x 2048 tokens, 151
        and 154 thousand tokens/s in one run each on an H200), and this way asks XLA for a barrier."""
        if self.implementation != "pallas":
            return None
        names = {"coefficients", "recurrence", "flow_step"}
        first = next(cls for cls in type(self).__mro__ if names & vars(cls).keys())
        return self.flow_step() if "flow_step" in vars(first) else None

    def log_decay(self, x: jax.Array) -> jax.Array | None:
        """Raw log decay [B, T, H] float32; None: the mixer never forgets by itself."""
        return None

    @nn.compact
    def __call__(
        self, x: jax.Array, segment_ids: SegmentIds | None = None, cache: RecurrentCache | None = None
    ) -> tuple[jax.Array, RecurrentCache]:
        """x [B, T, width] -> y [B, T, width] in `dtype` and the cache after each row's last real token; any T >= 0."""
        key_heads, value_heads, key_dim, value_dim = self.sizes()
        x, inputs, state, segment = begin(self, x, segment_ids, cache)
        q, q_inputs = heads(self, "q", x, (key_heads, key_dim), segment_ids, inputs[0:1])
        k, k_inputs = heads(self, "k", x, (key_heads, key_dim), segment_ids, inputs[1:2])
        v, v_inputs = heads(self, "v", x, (value_heads, value_dim), segment_ids, inputs[2:3])
        k, step = self.raw_keys(k), self.taken_step()
        if self.query_norm == "l2":
            q = l2_normalize(q if step is None else jax.lax.optimization_barrier(q))
        beta, raw_decay = self.beta(x), self.log_decay(x)
        unit_k, u, erase, log_decay = self.coefficients(k, v, beta, raw_decay)  # with a step only for what is read
        read_delta_step(k, beta, erase, log_decay, segment_ids)
        if step is None:
            o, state = self.recurrence(x, q, unit_k, u, erase, log_decay, state, segment_ids)
        else:
            o, state = delta_flow(
                q, k, v, beta, raw_decay, step=step,
                initial_state=state, segment_ids=segment_ids,
                chunk_size=self.chunk_size, implementation=self.implementation,
            )  # fmt: skip
        return merge_heads(self, o, x), RecurrentCache(q_inputs + k_inputs + v_inputs, state, segment)

    def recurrence(self, x, q, k, u, erase, log_decay, state, segment_ids) -> tuple[jax.Array, Any]:
        """Outputs [B, T, H, V] and next state of the operator, from its coefficients and the block's input x; state
        None: a fresh one."""
        return delta_rule(
            q, k, u, erase, log_decay,
            initial_state=state, segment_ids=segment_ids,
            chunk_size=self.chunk_size, implementation=self.implementation,
        )  # fmt: skip

    def beta_logits(self, x: jax.Array) -> jax.Array:
        logits = gate(self, "b_proj")(x)
        if self.beta_bias is None:
            return logits
        start = nn.initializers.constant(self.beta_bias)
        return logits + self.param("b_bias", start, (self.num_heads,), jnp.float32)

    def beta(self, x: jax.Array) -> jax.Array:
        """Write strength, or integration time, [B, T, H] float32, >= 0."""
        return BETA[self.beta_activation](self.beta_logits(x))
