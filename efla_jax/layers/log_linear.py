"""Log-linear mixers: the recurrence of another mixer over Fenwick states, weighed by each token (arXiv 2506.04761)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from efla_jax.layers.cache import RecurrentCache
from efla_jax.layers.delta import DeltaMixer
from efla_jax.layers.efla import EFLA
from efla_jax.layers.fields import MODULE_FIELDS
from efla_jax.layers.gated_delta_net import GatedDeltaNet
from efla_jax.layers.level_weights import LevelOptions, LevelWeights, note_untrained
from efla_jax.layers.mamba2 import Mamba2
from efla_jax.layers.reading import read_level_weights
from efla_jax.ops import FenwickState, init_fenwick_state, log_linear_attention, log_linear_delta_rule

LEVEL_FIELDS = [field.name for field in dataclasses.fields(LevelWeights) if field.name not in MODULE_FIELDS]


def live_states(length: int, slots: int) -> float:
    """States beside its own that a token reads, mean over the positions of a document: the bits of its position, those
    that share the last slot as one."""

    def with_bit(bit: int) -> int:  # positions below length that have it
        return (length >> (bit + 1) << bit) + max(0, length % (2 << bit) - (1 << bit))

    return (sum(map(with_bit, range(slots - 2))) + max(0, length - (1 << (slots - 2)))) / length


class LogLinear(LevelOptions):
    """What turns a recurrent mixer into its log-linear form, as the base class before it.

    With all level weights 1 the mixer is the one it is made of, and has its parameters beside those of the weights."""

    @nn.nowrap
    def init_state(self, batch_size: int) -> FenwickState:
        _, heads, key_dim, value_dim = self.sizes()
        return init_fenwick_state(batch_size, heads, self.level_counts()[1], key_dim, value_dim)

    @nn.nowrap
    def init_cache(self, batch_size: int, max_length: int | None = None) -> RecurrentCache:
        """The cache of `batch_size` rows that have seen nothing; max_length changes nothing but what is logged."""
        self.note_length(max_length or 0)
        return super().init_cache(batch_size)  # type: ignore[misc]  # of the mixer that stands behind

    @nn.nowrap
    def note_length(self, length: int) -> None:
        trained = self.level_counts()[0]
        if length > 2 ** (trained - 1):
            note_untrained(length, trained, self.untrained_levels)

    @nn.nowrap
    def operator_flops(self, length: int) -> float:
        """Of the recurrence per token, mean over a document of `length`: write and read of the own state are 2 K V each
        a head, and so are every other live state's read and, in a delta rule, S^T k and the update; and of the level
        weights' MLP, whose matrices serve every head."""
        _, slots, hidden = self.level_counts()
        _, heads, key_dim, value_dim = self.sizes()
        older = (6.0 if isinstance(self, DeltaMixer) else 2.0) * live_states(length, slots)
        return heads * key_dim * value_dim * (4.0 + older) + 4.0 * (heads - 1) * self.levels * hidden

    def recurrence(self, x, q, k, u, erase, log_decay, state, segment_ids) -> tuple[jax.Array, FenwickState]:
        self.note_length(x.shape[1])
        slots = self.level_counts()[1]
        if state is not None and state.states.shape[2] != slots:
            raise ValueError(
                f"cache: its states have {state.states.shape[2]} levels, but this mixer has max_levels={slots}; begin"
                " again from the tokens, or set max_levels to what the cache was made with."
            )
        fields = {name: getattr(self, name) for name in LEVEL_FIELDS}
        weights = LevelWeights(**fields, name="level_weights")(x)
        read_level_weights(weights, segment_ids)
        how = {"initial_state": state, "segment_ids": segment_ids}
        how |= {"chunk_size": self.chunk_size, "implementation": self.implementation}
        if erase is None:
            return log_linear_attention(q, k, u, log_decay, weights, **how)
        log_decay = jnp.zeros_like(erase) if log_decay is None else log_decay
        return log_linear_delta_rule(q, k, u, erase, log_decay, weights, **how)


class LogLinearMamba2(LogLinear, Mamba2):
    """Mamba-2 whose token reads each Fenwick level with a weight of its own; fields of `Mamba2` and `LevelOptions`."""


class LogLinearGatedDeltaNet(LogLinear, GatedDeltaNet):
    """Gated DeltaNet over Fenwick levels; fields of `GatedDeltaNet` and `LevelOptions`."""


class LogLinearEFLA(LogLinear, EFLA):
    """EFLA over Fenwick levels, without decay; fields of `EFLA` and `LevelOptions`."""
