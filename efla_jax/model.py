"""Complete models: a language model that repeats a pattern of mixers over its depth, and the two that tasks of the
papers need, an autoencoder and a classifier of sequences."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import FrozenDict, freeze
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from efla_jax.layers import MIXERS
from efla_jax.layers.block import NORM_POSITIONS, NORMS, Block, swiglu_width
from efla_jax.layers.fields import check_choice, check_dtype, check_least, check_options, nearest
from efla_jax.layers.initializers import kernel_initializer
from efla_jax.layers.projections import float32_logits
from efla_jax.ops.segments import mask_padding, padding_behind, permute_time, positions, real_first
from efla_jax.ops.sharded import sharded
from efla_jax.shapes import SegmentIds, check_segment_ids
from efla_jax.sharding import auto_mesh, constrain

MIXER_INHERITS = ("width", "norm_eps", "kernel_init", "init_std", "dtype")
POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def check_mixers(model) -> None:
    """Raise ValueError for an empty pattern, an unknown mixer, options that it does not take or that do not fit."""
    for field in ("mixers", "tail"):
        if not isinstance(names := getattr(model, field, ()), tuple):
            raise ValueError(f"{field}: {names!r} is a {type(names).__name__}; write a tuple of names: ('efla',).")
    mixers, options = model.mixers + getattr(model, "tail", ()), model.mixer_options
    if not model.mixers:
        raise ValueError(f"mixers: the pattern is empty; name at least one of {tuple(MIXERS)}.")
    for name in mixers:
        if name not in MIXERS:
            raise ValueError(f"mixers: {name!r} is not one of {tuple(MIXERS)}.{nearest(name, MIXERS)}")
    for name, chosen in options.items():
        if name not in mixers:
            raise ValueError(
                f"mixer_options: there are options for {name!r}, but the pattern is {mixers}.{nearest(name, mixers)}"
            )
        check_options(f"mixer_options[{name!r}]", MIXERS[name], chosen)
    for name in mixers:
        if "num_heads" not in options.get(name, {}):
            raise ValueError(f"mixer_options[{name!r}]: num_heads is missing; write {{{name!r}: {{'num_heads': 4}}}}.")
        MIXERS[name](**mixer_fields(model, name), parent=None)  # checks the values


def freeze_options(model) -> None:
    """Make the model's mixer_options hashable, so that apply can be jitted; ValueError unless they map to mappings."""
    options = model.mixer_options
    if not isinstance(options, Mapping) or not all(isinstance(chosen, Mapping) for chosen in options.values()):
        raise ValueError(f"mixer_options: {options!r} has no fields by mixer; write {{'efla': {{'num_heads': 4}}}}.")
    object.__setattr__(model, "mixer_options", freeze(options))


def mixer_fields(model, name: str) -> dict[str, Any]:
    """All fields of the model's mixer `name`: what a mixer inherits from its model, and its own options over it."""
    known = {field.name for field in dataclasses.fields(MIXERS[name])}
    inherited = {field: getattr(model, field) for field in MIXER_INHERITS if field in known and hasattr(model, field)}
    return inherited | dict(model.mixer_options.get(name, {}))


class Group(nn.Module):
    """One pass through the pattern of mixers: the unit that the depth repeats. Caches are a tuple, one per block.
    first: the number of its first block."""

    blocks: tuple[Mapping[str, Any], ...]
    first: int = 0

    @nn.compact
    def __call__(self, x, segment_ids, caches):
        caches = (None,) * len(self.blocks) if caches is None else caches
        after = []
        for i, (fields, cache) in enumerate(zip(self.blocks, caches, strict=True)):
            x, cache = Block(**fields, name=f"block_{self.first + i}")(x, segment_ids, cache)
            after.append(cache)
        return x, tuple(after)


class LanguageModel(nn.Module):
    """Embedding, `depth` blocks of mixer and MLP, norm, logits in float32.

    mixers           pattern, repeated as often as the depth has it, of names of `layers.MIXERS`
    tail             mixers of the blocks behind the last repetition: depth = repetitions x len(mixers) + len(tail)
    mixer_options    fields per mixer name, num_heads at least; width, norm_eps, kernel_init, init_std and dtype are the
                     model's where a mixer's options do not say otherwise
    mlp              "swiglu" or "none"; mlp_ratio as of a plain MLP (see `swiglu_width`); mlp_width > 0 overrides it
    norm             "rms" or "layer"; norm_position: "pre", in front of mixer and MLP, or "post", behind their residual
    dropout          on the embedding and each residual branch; active exactly when a "dropout" rng is passed
    embedding_dropout    on the embedding alone; None: dropout
    kernel_init      see `kernel_initializer`; embedding and head begin normal with init_std
    remat            "none"; "full": recompute each group in the backward pass; "dots": but keep its dense products
    scan             one compiled group for all repetitions; False unrolls it. Parameters are the same either way:
                     those of the groups have a leading axis, one entry per repetition (of the tail's blocks, one)
    dtype            of products and the residual stream; parameters, gates, states, norms' sums and logits are float32
    """

    vocab_size: int
    width: int
    depth: int
    mixers: tuple[str, ...] = ("efla",)
    mixer_options: Mapping[str, Mapping[str, Any]] = FrozenDict()
    mlp: str = "swiglu"
    mlp_ratio: float = 4.0
    mlp_width: int = 0
    norm: str = "rms"
    norm_position: str = "pre"
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    dropout: float = 0.0
    embedding_dropout: float | None = None
    kernel_init: str = "lecun"
    init_std: float = 0.02
    dtype: DTypeLike = "float32"
    remat: str = "none"
    scan: bool = True
    tail: tuple[str, ...] = ()

    def __post_init__(self):
        freeze_options(self)
        for field, least in (("vocab_size", 1), ("width", 1), ("mlp_width", 0)):
            check_least(field, getattr(self, field), least)
        check_dtype(self.dtype)
        check_mixers(self)
        check_choice("mlp", self.mlp, ("swiglu", "none"))
        check_choice("norm", self.norm, NORMS)
        check_choice("norm_position", self.norm_position, NORM_POSITIONS)
        check_choice("remat", self.remat, ("none", *POLICIES))
        kernel_initializer(self.kernel_init, self.init_std)
        if self.repetitions < 1 or (self.depth - len(self.tail)) % len(self.mixers):
            behind = f" and the tail {self.tail}" if self.tail else ""
            raise ValueError(
                f"depth: {self.depth} blocks are not a whole number of patterns {self.mixers}{behind}."
                f" Choose a multiple of {len(self.mixers)}{f', plus {len(self.tail)}' if self.tail else ''}."
            )
        for field in ("dropout", "embedding_dropout"):
            if not 0 <= (getattr(self, field) or 0) < 1:
                raise ValueError(f"{field}: {getattr(self, field)} is not in [0, 1).")
        for field in ("norm_eps", "init_std", *(() if self.mlp_width or self.mlp == "none" else ("mlp_ratio",))):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}: {getattr(self, field)} is not positive; set it above 0.")
        super().__post_init__()

    @property
    def repetitions(self) -> int:
        """How often the pattern of mixers is repeated."""
        return (self.depth - len(self.tail)) // len(self.mixers)

    @property
    def layers(self) -> tuple[str, ...]:
        """The mixer of every block, from the first to the last."""
        return self.mixers * self.repetitions + self.tail

    @nn.nowrap
    def init_cache(self, batch_size: int, max_length: int | None = None) -> tuple:
        """A fresh cache of `batch_size` rows: one entry per mixer of the pattern, leaves [repetitions, B, ...], and one
        per mixer of the tail, leaves [1, B, ...].

        max_length: how many tokens those mixers make room for whose cache grows with them (None: their default)."""
        caches = []
        for i, name in enumerate(self.mixers + self.tail):
            mixer = MIXERS[name](**mixer_fields(self, name), parent=None)
            grows = max_length is not None and "max_length" in inspect.signature(mixer.init_cache).parameters
            room = {"max_length": max_length} if grows else {}
            count = self.repetitions if i < len(self.mixers) else 1
            one = mixer.init_cache(batch_size, **room)
            caches.append(jax.tree.map(lambda leaf, count=count: jnp.broadcast_to(leaf, (count, *leaf.shape)), one))
        return tuple(caches)

    def setup(self):
        normal = nn.initializers.normal(self.init_std)
        self.embed = nn.Embed(self.vocab_size, self.width, dtype=self.dtype, embedding_init=normal)
        group = Group
        if self.remat != "none":
            # Inside a loop nothing can be merged with the forward pass, so the barrier against it is not needed.
            group = nn.remat(Group, prevent_cse=not self.scan, policy=POLICIES[self.remat])

        def repeated(mixers: tuple[str, ...], count: int, first: int) -> Any:
            return nn.scan(
                group,
                variable_axes={"params": 0, "intermediates": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=(nn.broadcast, 0),
                length=count,
                unroll=1 if self.scan else count,
            )(tuple(self.block_fields(name) for name in mixers), first)

        self.groups = repeated(self.mixers, self.repetitions, 0)
        if self.tail:
            self.last = repeated(self.tail, 1, self.depth - len(self.tail))
        self.final_norm = NORMS[self.norm](epsilon=self.norm_eps, dtype=self.dtype)
        self.drop = nn.Dropout(self.dropout if self.embedding_dropout is None else self.embedding_dropout)
        if not self.tie_embeddings:
            self.lm_head = nn.Dense(
                self.vocab_size, use_bias=False, kernel_init=normal, dtype=self.dtype, dot_general=float32_logits
            )

    @nn.nowrap
    def block_fields(self, name: str) -> dict[str, Any]:
        inner = self.mlp_width or swiglu_width(self.width, self.mlp_ratio)
        return {
            "mixer_class": MIXERS[name],
            "mixer_fields": mixer_fields(self, name),
            "width": self.width,
            "mlp_width": inner if self.mlp == "swiglu" else 0,
            "norm": self.norm,
            "norm_position": self.norm_position,
            "norm_eps": self.norm_eps,
            "dropout": self.dropout,
            "kernel_init": self.kernel_init,
            "init_std": self.init_std,
            "dtype": self.dtype,
        }

    def __call__(
        self, tokens: Int[Array, "B T"], segment_ids: SegmentIds | None = None, cache: tuple | None = None
    ) -> tuple[Float[Array, "B T vocabulary"], tuple]:
        """tokens [B, T] -> logits [B, T, vocab_size] float32 of each next token, and the cache after each row's last.

        The same call trains, reads a prompt and takes one token; cache None is a fresh one. Padding (segment id 0) gets
        logits without meaning: give it no weight. A token id that is negative or beyond the vocabulary makes its row
        NaN. Raises ValueError for tokens that are not integers [B, T]."""
        x, cache = self.features(tokens, segment_ids, cache)
        return self.logits(x), cache

    def features(self, tokens, segment_ids=None, cache=None) -> tuple[jax.Array, tuple]:
        """What `logits` reads, [B, T, width], and the cache: for callers that need the logits of a few tokens only."""
        x, cache = self.mixed(tokens, segment_ids, cache)
        return self.final_norm(x), cache

    def mixed(self, tokens, segment_ids, cache) -> tuple[jax.Array, tuple]:
        """The residual stream [B, T, width] behind the last block, and the cache."""
        given = f"{tokens.dtype}{list(tokens.shape)}" if hasattr(tokens, "dtype") else f"a {type(tokens).__name__}"
        if not hasattr(tokens, "dtype") or not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.ndim != 2:
            raise ValueError(f"tokens: {given} is not an integer array [B, T]; pass token ids.")
        check_segment_ids(segment_ids, *tokens.shape)
        count = len(self.mixers + self.tail)
        if cache is not None and (not isinstance(cache, tuple) or len(cache) != count):
            raise ValueError(f"cache: not a tuple of {count}, one for each mixer; pass what the last call returned.")
        # An id beyond the vocabulary embeds as NaN; a negative one would count from its end.
        tokens = jnp.asarray(tokens, jnp.int32)
        tokens = jnp.where(tokens < 0, self.vocab_size, tokens)
        if segment_ids is not None:  # zero cotangents would not stop a NaN at padding
            tokens = jnp.where(segment_ids != 0, tokens, 0)
        order, inverse = self.real_first(segment_ids)
        if order is not None:
            tokens, segment_ids = (jnp.take_along_axis(a, order, axis=1) for a in (tokens, segment_ids))
        # Where fsdp splits the table's columns, a device looks up its columns of all rows, and these change places. XLA
        # would gather the table with columns in front, and read it and add its gradient entry by entry.
        # In float32: the gradient of a frequent token is a sum of thousands, which bfloat16 stops adding up at 256.
        x = jnp.take(self.embed.embedding, constrain(tokens, "rows", "time"), axis=0).astype(self.dtype)
        x = constrain(constrain(x, "rows", "time", "width"), "batch", "time", None)
        x = self.drop(x, deterministic=not self.has_rng("dropout"))
        if inverse is None:
            return self.blocks(x, segment_ids, cache)
        with padding_behind():
            x, cache = self.blocks(x, segment_ids, cache)
        whole = "BSE", "BS", "BS"  # each device its rows
        return sharded(lambda _, *given: permute_time(*given), (x, inverse, order), whole, whole[0]), cache

    def blocks(self, x, segment_ids, cache) -> tuple[jax.Array, tuple]:
        """x [B, T, width] behind all blocks, and the cache."""
        count = len(self.mixers)
        x, after = self.groups(x, segment_ids, None if cache is None else cache[:count])
        if not self.tail:
            return x, after
        x, behind = self.last(x, segment_ids, None if cache is None else cache[count:])
        return x, (*after, *behind)

    def real_first(self, segment_ids) -> tuple[jax.Array | None, jax.Array | None]:
        """The order in which each row's real tokens come first and its inverse, or None where nothing is moved: no
        padding, a device with a part of the time, intermediates that somebody reads token by token."""
        mesh = auto_mesh()
        split = mesh is not None and mesh.shape["context"] > 1
        if segment_ids is None or segment_ids.shape[1] < 2 or split or self.is_mutable_collection("intermediates"):
            return None, None
        return real_first(segment_ids != 0)

    def logits(self, x: jax.Array) -> jax.Array:
        """Logits [..., vocab_size] float32 of features [..., width]."""
        if not self.tie_embeddings:
            return self.lm_head(x)
        table = self.embed.embedding.astype(self.dtype)
        return float32_logits(x.astype(self.dtype), table, (((x.ndim - 1,), (1,)), ((), ())))


class Decoder(nn.Module):
    """z [B, D] -> T features [B, T, D]: position t's are of z + p_t, with p_t the sines and cosines of t.

    x <- GELU(W norm(x) + b), twice, without residuals."""

    width: int
    norm: str
    norm_eps: float
    kernel_init: str
    init_std: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, z: jax.Array, length: int) -> jax.Array:
        half = self.width // 2
        rates = 10000.0 ** (-jnp.arange(half) / max(half - 1, 1))
        angles = jnp.arange(length)[:, None] * rates
        x = z[:, None] + jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(self.dtype)
        init = kernel_initializer(self.kernel_init, self.init_std)
        for i in range(2):
            x = NORMS[self.norm](epsilon=self.norm_eps, dtype=self.dtype, name=f"norm_{i}")(x)
            x = nn.Dense(self.width, kernel_init=init, dtype=self.dtype, name=f"dense_{i}")(x)
            x = nn.gelu(x, approximate=False)
        return x


class AutoEncoder(LanguageModel):
    """A language model whose last output is all that it knows of a row, and whose logits tell the row from it.

        z = x_T after the last block;   logits_t = head(norm(decoder(z)_t)),   t = 1 ... T

    The model of MAD's compression task (arXiv 2403.17844) for every mixer. Rows are whole: it takes neither cache nor
    segment ids."""

    def __post_init__(self):
        if self.width % 2:
            raise ValueError(
                f"width: {self.width} is odd, but half of a position's features are sines; take an even one."
            )
        super().__post_init__()

    def setup(self):
        super().setup()
        fields = ("width", "norm", "norm_eps", "kernel_init", "init_std", "dtype")
        self.decoder = Decoder(**{field: getattr(self, field) for field in fields})

    def mixed(self, tokens, segment_ids=None, cache=None) -> tuple[jax.Array, tuple]:
        """Features [B, T, width] that the decoder made of the last token's."""
        if segment_ids is not None or cache is not None:
            given = "cache" if segment_ids is None else "segment_ids"
            raise ValueError(f"{given}: an autoencoder reads whole rows of one length; leave it out.")
        x, cache = super().mixed(tokens, segment_ids, cache)
        return self.decoder(x[:, -1], tokens.shape[1]), cache


class SequenceClassifier(nn.Module):
    """Linear front end plus position embedding, GELU, mixers one after another, last real token, LayerNorm, logits.

    The model of sequential MNIST in the EFLA paper, for every mixer. max_length: how many positions are learned.
    mixers and mixer_options as in `LanguageModel`; there is no residual path and no MLP."""

    num_classes: int
    width: int
    max_length: int
    mixers: tuple[str, ...] = ("efla",)
    mixer_options: Mapping[str, Mapping[str, Any]] = FrozenDict()
    init_std: float = 0.02
    dtype: DTypeLike = "float32"

    def __post_init__(self):
        freeze_options(self)
        check_dtype(self.dtype)
        check_mixers(self)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T channels"], segment_ids: SegmentIds | None = None
    ) -> Float[Array, "B classes"]:
        """x [B, T, channels] -> logits [B, num_classes] float32; segment_ids marks padding by 0, one sequence per row.

        Raises ValueError when T is 0 or exceeds max_length."""
        if x.ndim != 3 or x.shape[1] < 1:
            raise ValueError(f"x: shape {x.shape} is not [B, T, channels] with at least one token.")
        batch, time, _ = x.shape
        if time > self.max_length:
            raise ValueError(f"x: {time} tokens, but max_length={self.max_length} positions are learned; raise it.")
        check_segment_ids(segment_ids, batch, time)
        if segment_ids is not None:
            x = mask_padding(segment_ids != 0, x)
        uniform = kernel_initializer("uniform", self.init_std)
        x = nn.Dense(self.width, use_bias=False, kernel_init=uniform, dtype=self.dtype, name="front")(x)
        normal, places = nn.initializers.normal(self.init_std), (self.max_length, self.width)
        table = self.param("position", normal, places, jnp.float32)
        x = nn.gelu(x + table.astype(self.dtype)[positions(batch, time, segment_ids)], approximate=False)
        for i, name in enumerate(self.mixers):
            x, _ = MIXERS[name](**mixer_fields(self, name), name=f"mixer_{i}")(x, segment_ids)
        last = jnp.full((batch,), time - 1)
        if segment_ids is not None:
            last -= jnp.argmax(segment_ids[:, ::-1] != 0, axis=1)
        x = nn.LayerNorm(epsilon=1e-5, dtype=jnp.float32, name="norm")(x[jnp.arange(batch), last])
        return nn.Dense(self.num_classes, kernel_init=uniform, dtype=jnp.float32, name="head")(x)
