"""The compiled step: gradients of summed losses over microbatches, divided once, and one update of the optimiser."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from efla_jax import layers, optim
from efla_jax.evaluate import sums_and_readings
from efla_jax.layers import MIXERS
from efla_jax.layers.reading import is_softmax_fraction, mean_softmax_fraction
from efla_jax.model import LanguageModel, mixer_fields
from efla_jax.ops.document_chunks import document_chunks


class TrainState(NamedTuple):
    """What a step carries on and a checkpoint holds."""

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array


def make_state(model: nn.Module, optimizer, seed: int | jax.Array) -> TrainState:
    """Parameters (float32) and optimiser state of step 0, a pure function of the seed: jit it with out_shardings."""
    init_key, key = jax.random.split(jax.random.key(seed))
    if isinstance(model, LanguageModel):
        example = jnp.zeros((1, 1), jnp.int32)
    else:
        example = jnp.zeros((1, model.max_length, 1), jnp.float32)
    params = model.init(init_key, example)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), key)


def microbatches(batch: Mapping[str, jax.Array], count: int) -> dict[str, jax.Array]:
    """[B, ...] -> [count, B / count, ...]: row r goes to part r % count, so that each stays spread over the mesh."""
    return {name: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1) for name, x in batch.items()}


def full_chunks(model: nn.Module, batch: Mapping[str, jax.Array]) -> jax.Array:
    """How many chunks of a batch fill up, float32: those that the softmax fraction of its routers is a mean over."""
    size = MIXERS["nats_l"](**mixer_fields(model, "nats_l"), parent=None).chunk_size
    rows, time = batch["tokens" if "tokens" in batch else "pixels"].shape[:2]
    chunks = document_chunks(rows, time, size, batch.get("segment_ids"))
    return jnp.sum(chunks.closes, dtype=jnp.float32)


def make_gradients(
    model: nn.Module, accumulate: int, loss_chunk: int, z_loss: float, softmax_penalty: float
) -> Callable:
    """(params, batch, key) -> (gradients of the summed loss, (sums, summed penalty)), one of `accumulate` microbatches
    after another."""
    capture = is_softmax_fraction if softmax_penalty else False

    def summed(params, part, key, price):
        sums, readings = sums_and_readings(
            model, params, part, {"dropout": key}, chunk=loss_chunk, z_loss=z_loss, capture=capture
        )
        penalty = jnp.zeros(())
        if softmax_penalty:
            penalty = price * full_chunks(model, part) * mean_softmax_fraction(readings)
        return sums.loss + sums.z + penalty, (sums, penalty)

    gradient = jax.grad(summed, has_aux=True)

    def price_of(batch):  # of a chunk that chooses softmax: all of the batch know it, whatever their part of the chunks
        if not softmax_penalty:
            return jnp.zeros(())
        weight = jnp.sum(jnp.maximum(batch["mask"], 0), dtype=jnp.float32)
        return softmax_penalty * weight / jnp.maximum(full_chunks(model, batch), 1)

    if accumulate == 1:
        return lambda params, batch, key: gradient(params, batch, key, price_of(batch))

    def gradients(params, batch, key):
        price = price_of(batch)

        def add(total, part):
            index, rows = part
            return jax.tree.map(jnp.add, total, gradient(params, rows, jax.random.fold_in(key, index), price)), None

        parts = jnp.arange(accumulate), microbatches(batch, accumulate)
        shapes = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], parts[1]), key, price)
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zero, parts)[0]

    return gradients


def make_step(
    model: nn.Module,
    optimizer,
    schedule,
    *,
    accumulate: int = 1,
    loss_chunk: int = 0,
    z_loss: float = 0.0,
    softmax_penalty: float = 0.0,
    shardings: TrainState | None = None,
) -> Callable:
    """The jitted, donated (state, batch) -> (state, report): one optimiser step on the mean loss of the batch.

    accumulate    microbatches whose gradients are summed first; the result is that of one batch of all rows
    loss_chunk, z_loss    see `losses.cross_entropy`
    softmax_penalty    times the mean part of chunks that chose softmax in routed mixers, added to the mean loss
    shardings     of the state that comes in and goes out (see `sharding.state_shardings`); None: as it comes

    report: float32 scalars. A step whose gradient is not finite changes nothing but the counters; "first_bad" is then
    the index in `optim.leaf_names(params)` of the first gradient that was not, else -1."""
    gradients = make_gradients(model, accumulate, loss_chunk, z_loss, softmax_penalty)
    placed = {} if shardings is None else {"out_shardings": (shardings, None)}

    @functools.partial(jax.jit, donate_argnums=0, **placed)
    def step(state: TrainState, batch) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, (sums, penalty) = gradients(state.params, batch, jax.random.fold_in(state.key, state.step))
        weight = jnp.maximum(sums.weight, 1.0)
        grads = jax.tree.map(lambda g: g / weight, grads)
        if shardings is not None:  # summed where they are used: reduce-scattered, not reduced everywhere
            grads = jax.lax.with_sharding_constraint(grads, shardings.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        report = {
            "loss": sums.loss / weight,
            "accuracy": sums.correct / weight,
            "weight": sums.weight,
            "grad_norm": opt_state.grad_norm,
            "learning_rate": schedule(state.opt_state.count),
            "skipped": opt_state.skipped,
            "skipped_in_a_row": opt_state.skipped_in_a_row,
            "first_bad": optim.first_bad(grads),
        }
        report |= {f"grad_norm/{name}": norm for name, norm in optim.group_norms(grads).items()}
        if z_loss:
            report["z_loss"] = sums.z / weight
        if softmax_penalty:
            report["softmax_penalty"] = penalty / weight
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state, state.key), report

    return step


def make_signals(model: nn.Module, accumulate: int = 1) -> Callable:
    """The jitted (params, batch) -> scalars of how stiff and how forgetful the mixers are; see `layers.signals`.

    Of the first of `accumulate` microbatches: the others would take the memory that they were cut to save."""

    @jax.jit
    def signals(params, batch):
        batch = {name: x[0] for name, x in microbatches(batch, accumulate).items()}
        _, captured = model.apply(
            params, batch["tokens"], segment_ids=batch.get("segment_ids"), method=model.features,
            capture_intermediates=lambda module, _: isinstance(module, layers.Reading), mutable="intermediates",
        )  # fmt: skip
        return layers.signals(captured.get("intermediates", {}), len(model.mixers))

    return signals
