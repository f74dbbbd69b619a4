"""Many small models in one program: runs that differ in seed, learning rate and weight decay only, under one vmap.

    found = fit_population([config, other], ["runs/a", "runs/b"])          # one `Outcome` per config

A model of width 64 leaves a GPU idle between its kernels; a dozen of them share their launches (what some took on an
H200 stands in configs/paper_mad.py). On a CPU it is no faster than one after another. Every member trains as `fit`
would train it by itself, on the rows of its own seed, to the tolerance of another order of its sums. What it has not: a
mesh, checkpoints on the way, signals; it can be paused. XLA computes the operators: no GPU has run the kernels under
this vmap.
"""

import contextlib
import functools
import inspect
import io
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from efla_jax import data, metrics, optim
from efla_jax.checkpoint import Checkpointer
from efla_jax.evaluate import batch_sums, batch_tallies, goal_accuracy, mean_of_slices, scores_of
from efla_jax.losses import Sums, macro_accuracy
from efla_jax.ops.dispatch import without_kernels
from efla_jax.train import hosts, pause, settings
from efla_jax.train.loop import HELD_OUT
from efla_jax.train.step import TrainState, make_state, make_step

Configs = Sequence[Mapping[str, Any]]


class Outcome(NamedTuple):
    """How a member ended. status: "finished", at its last step or at train.stop_at, "outrun", where another of its seed
    was there first and that was to be enough, "diverged", after train.max_skipped steps in a row without a finite
    gradient, or "paused", where the time was up, without params; step: where; scores: the last held-out ones before;
    best: the highest held-out `goal_accuracy` of all; seconds: since the population began; params: those that are
    scored."""

    status: str
    step: int
    scores: dict[str, float]
    best: float
    seconds: float
    params: Any


class Population(NamedTuple):
    """What members share. which [M]: the dataset of each member; rates, decays [M]: their learning rates and weight
    decays; optimizer: of rate 1 without decay."""

    config: Mapping[str, Any]
    model: nn.Module
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    datasets: tuple
    which: jax.Array
    rates: jax.Array
    decays: jax.Array
    seeds: jax.Array


def shared(config: Mapping[str, Any]) -> str:
    """What members of one population have in common, as text: all of a config but seed, learning rate and weight decay.
    Rows of several lengths come in an order of their seed, so that it is shared, too."""
    common = json.loads(json.dumps(config))
    del common["optim"]["learning_rate"]
    common["optim"].pop("weight_decay", None)
    if isinstance(common["data"].get("task", {}).get("length", 0), int):
        del common["seed"]
    return json.dumps(common, sort_keys=True)


def build(configs: Configs) -> Population:
    """Check every config, and build what they share. Raises ValueError for configs that are no population."""
    first = configs[0]
    for config in configs:
        settings.check_sections(config)
        settings.check_train(config["train"])
        if shared(config) != shared(first):
            raise ValueError(
                "configs: they differ in more than seed, optim.learning_rate and optim.weight_decay; train them apart."
            )
        if config["optim"].get("ema_decay") or config["optim"].get("adam_learning_rate"):
            raise ValueError(
                "config.optim: an average and a second rate depend on the learning rate in ways that a population does"
                " not follow; set ema_decay and adam_learning_rate to 0, or train apart."
            )
    steps = {"total_steps": first["train"]["steps"]}
    for config in configs:
        settings.section(config, "optim", optim.make_optimizer, steps)
    # Every update is proportional to the peak rate, so that of rate 1 times a member's is its own, and decay is added.
    unit = {"optim": {**first["optim"], "learning_rate": 1.0, "weight_decay": 0.0}}
    optimizer, schedule = settings.section(unit, "optim", optim.make_optimizer, steps)
    by_seed = {config["seed"]: settings.build_dataset(config) for config in configs}
    model = settings.build_model(first, next(iter(by_seed.values())))
    default = inspect.signature(optim.make_optimizer).parameters["weight_decay"].default
    settings.check_penalty(first)
    seeds = list(by_seed)
    return Population(
        first, model, optimizer, schedule, tuple(by_seed.values()),
        jnp.asarray([seeds.index(config["seed"]) for config in configs], jnp.int32),
        jnp.asarray([config["optim"]["learning_rate"] for config in configs], jnp.float32),
        jnp.asarray([config["optim"].get("weight_decay", default) for config in configs], jnp.float32),
        jnp.asarray([config["seed"] for config in configs], jnp.uint32),
    )  # fmt: skip


def begin(population: Population) -> TrainState:
    """The states of step 0, leaves [M, ...]."""
    one = functools.partial(make_state, population.model, population.optimizer)
    with without_kernels():
        return jax.jit(jax.vmap(one))(population.seeds)


def make_population_step(population: Population) -> Callable:
    """The jitted, donated (states, batches) -> (states, report): `make_step` for every member at its own rate and
    decay; batches have one row per dataset, leaves [S, B, ...]. Nothing of a member is a constant of the program, so
    that a compilation cache has it for as many members of other seeds and rates."""
    options = population.config["train"]
    fields = {name: options[name] for name in ("accumulate", "loss_chunk", "z_loss", "softmax_penalty")}
    everything = population.config["optim"].get("decay") == "all"

    def member(state, rate, decay, batch):
        def update(gradients, state, params=None):
            updates, after = population.optimizer.update(gradients, state, params)
            pull = jnp.where(after.skipped_in_a_row > 0, 0.0, decay * population.schedule(state.count))
            decays = jax.tree.map(lambda _: True, params) if everything else optim.decay_mask(params)
            moves = jax.tree.map(lambda u, p, d: rate * (u - pull * p if d else u), updates, params, decays)
            return moves, after

        scaled = optax.GradientTransformation(population.optimizer.init, update)
        step = make_step(population.model, scaled, lambda count: rate * population.schedule(count), **fields)
        return step.__wrapped__(state, batch)  # what is jitted and donated is the whole population

    @functools.partial(jax.jit, donate_argnums=0)
    def step(states, batches, which, rates, decays):
        batches = jax.tree.map(lambda x: x[which], batches)
        return jax.vmap(member)(states, rates, decays, batches)

    return lambda states, batches: step(states, batches, population.which, population.rates, population.decays)


def make_population_sums(population: Population) -> Callable:
    """The jitted (params, batches) -> (`Sums` of every member, [M] each; their `class_tallies` [M, 3, V], empty unless
    the data is scored by class)."""
    chunk, classwise = population.config["train"]["loss_chunk"], getattr(population.datasets[0], "classwise", False)

    def one(params, batch):
        tallies = batch_tallies(population.model, params, batch) if classwise else jnp.zeros((3, 0))
        return batch_sums(population.model, params, batch, chunk=chunk), tallies

    @jax.jit
    def sums(params, batches, which):
        return jax.vmap(one)(params, jax.tree.map(lambda x: x[which], batches))

    return lambda params, batches: sums(params, batches, population.which)


def stacked(batches: Sequence[Mapping[str, np.ndarray]], least: int = 1) -> dict[str, np.ndarray]:
    """One batch of each dataset, side by side: leaves [S, B, ...]. Where at most half of the tokens have a target, what
    is kept of targets and mask are those, [S, B, N] at "places": logits of the others are most of a small model's work.

    N is a power of two, `least` or more, so that tasks whose rows have different numbers of targets have few shapes."""
    joined = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    real = joined["mask"] > 0
    if "tokens" not in joined:
        return joined
    count = max(least, 1 << max(0, int(real.sum(-1).max()) - 1).bit_length())
    if 2 * count > real.shape[-1]:
        return joined
    places = np.argsort(~real, axis=-1, kind="stable")[..., :count].astype(np.int32)
    kept = {name: np.take_along_axis(joined[name], places, axis=-1) for name in ("targets", "mask")}
    return joined | kept | {"places": places}


def widest(dataset, batches: int = 64) -> int:
    """The N of `stacked` that serves most batches of a dataset, as its first ones show: one program for rows of several
    numbers of targets, not one for each until the widest has come."""
    with contextlib.closing(dataset.train_iterator()) as iterator:
        first = stacked([next(iterator)])
        if "places" not in first:
            return 1
        return max(stacked([next(iterator)]).get("places", first["places"]).shape[-1] for _ in range(batches))


def held_out(population: Population, sums: Callable, params, least: int, split: str = "") -> list[dict[str, float]]:
    """The scores of a split, by default the held-out one, of every member: see `evaluate` and `stacked`."""
    first = population.datasets[0]
    split, limit = split or HELD_OUT[first.kind], population.config["train"]["eval_batches"]
    sliced = first.kind in data.GENERATED
    parts = [one.slices(split) if sliced else {"": one.eval_batches(split)} for one in population.datasets]
    totals, tallies = {}, np.zeros(())
    for name in parts[0]:
        total = np.zeros((len(Sums._fields), len(population.rates)))
        for number, batches in enumerate(zip(*(part[name] for part in parts), strict=True)):
            if limit and number >= limit:
                break
            fresh = jax.device_get(sums(params, stacked(batches, least)))
            total += np.asarray(fresh[0], np.float64)
            tallies = tallies + fresh[1]
        totals[name] = total
    members = range(len(population.rates))
    each = [{name: scores_of(population.model, total[:, i]) for name, total in totals.items()} for i in members]
    scores = [mean_of_slices(one) if sliced else one[""] for one in each]
    if tallies.size:
        scores = [one | {"macro_accuracy": macro_accuracy(tallies[i])} for i, one in enumerate(scores)]
    per_byte = getattr(first, "bytes_per_token", 0.0)
    return [one | ({"bits_per_byte": one["bits"] / per_byte} if per_byte else {}) for one in scores]


class Members:
    """What is known of each member while the population trains, with its rows of metrics.jsonl."""

    def __init__(self, folders: Sequence[str | pathlib.Path], stack: contextlib.ExitStack, keep: bool, start: int):
        quiet = functools.partial(
            metrics.Writer, tensorboard=False, stream=io.StringIO(), print_every=1 << 62, start_step=start + 1
        )
        self.writers = [stack.enter_context(quiet(folder)) for folder in folders]
        self.folders, self.keep = folders, keep
        self.outcomes: list[Outcome | None] = [None] * len(folders)
        self.scores: list[dict[str, float]] = [{} for _ in folders]
        self.best = [math.nan] * len(folders)
        self.began = time.perf_counter()

    @property
    def going(self) -> list[int]:
        return [member for member, outcome in enumerate(self.outcomes) if outcome is None]

    def outrun(self, seeds: Sequence[int]) -> list[int]:
        """The members that still train though one of their seed is there."""
        there = [one is not None and one.status == "finished" for one in self.outcomes]
        return [member for member in self.going if (seeds[member], True) in zip(seeds, there, strict=True)]

    def log(self, step: int, report: Mapping[str, np.ndarray]) -> None:
        for member in self.going:
            self.writers[member].write(step, {name: values[member] for name, values in report.items()})

    def note(self, step: int, scores: Sequence[Mapping[str, float]], split: str) -> None:
        for member in self.going:
            self.scores[member] = dict(scores[member])
            self.best[member] = float(np.nanmax([self.best[member], goal_accuracy(scores[member])]))
            self.writers[member].write(step, {f"{split}_{name}": value for name, value in scores[member].items()})

    def end(self, member: int, status: str, step: int, states: TrainState, data_state: Mapping[str, Any]) -> None:
        seconds = time.perf_counter() - self.began
        # Cut on the host: a GPU would compile a slice for every shape.
        params = jax.tree.map(lambda x: np.asarray(x)[member].copy(), states.params)
        self.outcomes[member] = Outcome(status, step, self.scores[member], self.best[member], seconds, params)
        if self.keep:
            own = jax.tree.map(lambda x: x[member], states)
            folder = pathlib.Path(self.folders[member])
            metadata = {"config": json.loads((folder / "config.json").read_text()), "tokenizer": ""}
            with Checkpointer(folder / "checkpoints", max_to_keep=1) as checkpointer:
                checkpointer.save(step, own, data_state, metadata)
                checkpointer.wait()

    def pause(self, file: pathlib.Path, step: int, states: TrainState, header: Mapping[str, Any]) -> None:
        """Everything of the population into one file; those that still train are "paused"."""
        seconds = time.perf_counter() - self.began
        own = {"step": step, "seconds": seconds, "scores": self.scores, "best": self.best}
        own["ended"] = [one and one._replace(params=None) for one in self.outcomes]
        pause.save(file, {**header, **own}, jax.tree.leaves((states, [one and one.params for one in self.outcomes])))
        for member in self.going:
            self.outcomes[member] = Outcome("paused", step, self.scores[member], self.best[member], seconds, None)

    def resume(self, file: pathlib.Path, header: Mapping[str, Any], states: TrainState) -> TrainState:
        """Back to where `pause` was; states: those of the population's step 0."""
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), states.params)
        like = states, [ended and one for ended in header["ended"]]
        states, params = jax.tree.unflatten(jax.tree.structure(like), pause.load(file, jax.tree.leaves(like)))
        for member, ended in enumerate(header["ended"]):
            self.outcomes[member] = ended and Outcome(*ended)._replace(params=jax.tree.map(np.asarray, params[member]))
        self.scores, self.best = header["scores"], header["best"]
        self.began = time.perf_counter() - header["seconds"]
        return states


def fit_population(
    configs: Configs,
    folders: Sequence[str | pathlib.Path],
    progress: Callable[[int, int], None] = lambda *_: None,
    *,
    keep: bool = False,
    first: bool = False,
    until: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Train every config, plain dicts that `shared` does not tell apart, to its end; see `train.fit` for what a config
    says. Writes config.json and metrics.jsonl into each member's folder; progress(step, members that still train) is
    called after every step.

    A member that reaches train.stop_at keeps the scores it has then; keep: its state, too, as a checkpoint that
    `train.fit` goes on from; first: nor do others of its seed train any longer. `until` is asked after every step: once
    it is true, what still trains is paused: the same call goes on with it, from paused.npz in the first folder, as if
    it had not been. Raises ValueError for configs that do not fit, and where another program trains in a folder."""
    configs = [settings.plain(config) for config in configs]
    population = build(configs)
    file, plain = pathlib.Path(folders[0]) / "paused.npz", json.loads(json.dumps(configs))
    paused = pause.read_header(file)
    if paused and paused["configs"] != plain:
        raise ValueError(
            f"{file}: holds {len(paused['configs'])} runs of other configs, paused at step {paused['step']}. Go on with"
            " the line that paused them, or remove the file to train these from their beginning."
        )
    precision = configs[0]["train"]["matmul_precision"]
    with jax.default_matmul_precision(precision), without_kernels(), contextlib.ExitStack() as stack:
        for config, folder in zip(configs, map(pathlib.Path, folders), strict=True):
            stack.enter_context(hosts.alone_in(folder))
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        members = Members(folders, stack, keep, paused["step"] if paused else -1)
        train(population, members, stack, progress, first, Pause(file, plain, paused, until))
    if not any(outcome and outcome.status == "paused" for outcome in members.outcomes):
        file.unlink(missing_ok=True)
    return [outcome for outcome in members.outcomes if outcome is not None]


class Pause(NamedTuple):
    """file: where a pause is kept; found: what that file says if it is of these configs; until: whether to pause."""

    file: pathlib.Path
    configs: list
    found: dict | None
    until: Callable[[], bool]


def train(
    population: Population, members: Members, stack: contextlib.ExitStack, progress: Callable, first: bool, rest: Pause
) -> None:
    """Steps, logs and scores until every member has ended."""
    options = population.config["train"]
    step, sums = make_population_step(population), make_population_sums(population)
    iterators = [stack.enter_context(contextlib.closing(one.train_iterator())) for one in population.datasets]
    states, end, before, least = begin(population), options["steps"], None, widest(population.datasets[0])
    start = 0
    if rest.found:
        start, states = rest.found["step"], members.resume(rest.file, rest.found, states)
        least = rest.found.get("least", least)  # which decides the order of sums, too
        for iterator, position in zip(iterators, rest.found["data"], strict=True):
            iterator.set_state(position)
    which, seeds = np.asarray(population.which), population.seeds.tolist()

    def finish(member: int, status: str) -> None:
        members.end(member, status, done, states, iterators[which[member]].get_state())

    for done in range(start + 1, end + 1):
        batch = stacked([next(iterator) for iterator in iterators], least)
        least = batch["places"].shape[-1] if "places" in batch else least
        states, report = step(states, batch)
        jax.block_until_ready(before)  # so that the host is one step ahead and no more
        before = report["loss"]
        if done % options["log_every"] == 0 or done in (1, end):
            report = {name: np.asarray(values) for name, values in report.items() if name != "first_bad"}
            bad = report.pop("skipped_in_a_row")
            members.log(done, report)
            for member in members.going:
                if bad[member] >= options["max_skipped"]:
                    finish(member, "diverged")
        if done == end or (options["eval_every"] and done % options["eval_every"] == 0):
            for member in score(population, members, sums, states.params, done, least):
                finish(member, "finished")
            for member in members.outrun(seeds) if first else ():
                finish(member, "outrun")
        progress(done, len(members.going))
        if not members.going:
            break
        if rest.until():
            positions = [iterator.get_state() for iterator in iterators]
            members.pause(rest.file, done, states, {"configs": rest.configs, "data": positions, "least": least})
            break


def score(population: Population, members: Members, sums: Callable, params, step: int, least: int) -> list[int]:
    """Held-out scores of a step; the members that end here, which have those of "longer" rows, too."""
    scores = held_out(population, sums, params, least)
    options, first = population.config["train"], population.datasets[0]
    at_goal = [0 < options["stop_at"] <= goal_accuracy(one) for one in scores]
    ending = [member for member in members.going if at_goal[member] or step == options["steps"]]
    if ending and first.kind in data.GENERATED and first.slices("longer"):
        for member, longer in enumerate(held_out(population, sums, params, least, "longer")):
            if member in ending:
                scores[member] |= {name: value for name, value in longer.items() if "/" in name}
    members.note(step, scores, HELD_OUT[first.kind])
    return ending
