"""What `experiments.scaling` measures on the devices of one host: compiled steps on meshes, their agreement, their
speed and their communication."""

import concurrent.futures
import contextlib
import functools
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from efla_jax import LanguageModel, optim, sharding
from efla_jax.checkpoint import Checkpointer
from efla_jax.train import TrainState, make_state, make_step, settings
from experiments.generate_throughput import config_of

# Adam with a large eps is the clipped gradient itself, so that one update compares every entry of it.
PLAIN = {"learning_rate": 1.0, "schedule": "constant", "warmup_steps": 0, "eps": 1.0, "weight_decay": 0.0}
# An update's distance is the RMS of its difference from one device's in float32, over that one's RMS. float32 sums in
# another order leave 1e-6, which the norms of keys multiply; bfloat16 leaves much of the gradient of random parameters
# on any device (of lm_340m at width 256, on a CPU: 0.08 at 6 layers, 0.16 at 12), so that a mesh may be this many times
# as far as one device is.
FLOAT32, FURTHER = 1e-3, 1.25


class Case(NamedTuple):
    """One step: a config's name, the mesh axis that splits it over so many devices ("" and 1: none), its batch,
    and what the config says otherwise."""

    config: str
    axis: str
    devices: int
    rows: int
    length: int
    model: tuple[tuple[str, Any], ...] = ()
    packed: bool = True
    plain: bool = False

    @property
    def name(self) -> str:
        return f"{self.axis} {self.devices}" if self.axis else "one device"

    @property
    def exact(self) -> bool:
        """Whether it is of float32, and all products are."""
        return dict(self.model).get("dtype") == "float32"


class Program(NamedTuple):
    """A compiled step and what it needs; every call starts from the same parameters. begin: the first state, compiled,
    too: where each is compiled at its turn, the devices wait for it."""

    case: Case
    mesh: jax.sharding.Mesh
    begin: Any
    shapes: TrainState
    placed: TrainState
    step: Any
    depth: int

    def state(self) -> TrainState:
        return self.begin()

    def batch(self) -> dict[str, jax.Array]:
        return sharding.place(self.mesh, batch_of(self.case))


def mesh_of(case: Case) -> jax.sharding.Mesh:
    """The mesh of a case, over the first of this host's devices."""
    axes = {"data": 1} | ({case.axis: case.devices} if case.axis else {})
    return sharding.make_mesh(**axes, devices=jax.devices()[: case.devices])


def batch_of(case: Case, vocab_size: int = 256) -> dict[str, np.ndarray]:
    """Random tokens, few of them frequent; packed: as a corpus gives them, documents of about 1000 tokens."""
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.geometric(0.02, (case.rows, case.length + 1)), vocab_size - 1).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones((case.rows, case.length), np.float32)}
    if case.packed:
        begins = rng.random((case.rows, case.length)) < 1 / min(1024, case.length)
        batch["segment_ids"] = np.cumsum(begins, axis=1, dtype=np.int32) + 1
    return batch


def lowered(case: Case, vocab_size: int) -> tuple[Program, Any]:
    """(the program of a case, not compiled; its lowered step)."""
    config = config_of(case.config)
    model_config = {**config["model"], **dict(case.model)}
    optimizer_config = {**config["optim"], **(PLAIN if case.plain else {})}
    config = {**config, "model": model_config, "optim": optimizer_config}
    mesh = mesh_of(case)
    model = settings.section(config, "model", LanguageModel, {"vocab_size": vocab_size})
    optimizer, schedule = settings.section(
        config, "optim", optim.make_optimizer, {"total_steps": config["train"]["steps"]}
    )
    begin = functools.partial(make_state, model, optimizer, config["seed"])
    precision = "highest" if case.exact else config["train"]["matmul_precision"]
    with jax.set_mesh(mesh), jax.default_matmul_precision(precision):
        shapes = jax.eval_shape(begin)
        placed = sharding.state_shardings(mesh, shapes)
        step = make_step(model, optimizer, schedule, shardings=placed)
        state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, placed)
        batch = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, sharding.batch_spec(2)))
            for name, x in batch_of(case).items()
        }
        first = jax.jit(begin, out_shardings=placed).lower()
        return Program(case, mesh, first, shapes, placed, None, model.depth), step.lower(state, batch)


def compiled(cases: Sequence[Case], vocab_size: int) -> list[Program | str]:
    """The programs of the cases, compiled side by side; the reason instead of one that XLA has no memory for."""

    def finish(given: tuple[Program, Any]) -> Program | str:
        program, step = given
        try:
            return program._replace(begin=program.begin.compile(), step=step.compile())
        except jax.errors.JaxRuntimeError as error:
            return out_of_memory(error)

    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        waiting = [pool.submit(finish, lowered(case, vocab_size)) for case in cases]  # lowers the next meanwhile
        return [one.result() for one in waiting]


def out_of_memory(error: Exception) -> str:
    """The note of a row that did not fit; raises any other error again."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    return "out of memory"


# ---- speed ----------------------------------------------------------------------------------------------------------


def timed(program: Program, seconds: float) -> dict[str, Any]:
    """Seconds of a step, the loss behind it and the shares of communication of a trace. Medians of three rounds of as
    many steps as fill `seconds`, after one that loads everything; a step that takes as long is timed once."""
    batch, state, rounds = program.batch(), program.state(), []
    state, report = program.step(state, batch)
    jax.block_until_ready(report)
    count = 1
    for _ in range(4):
        began = time.perf_counter()
        for _ in range(count):
            state, report = program.step(state, batch)
        jax.block_until_ready((state, report))
        took = (time.perf_counter() - began) / count
        rounds.append(took)
        if took >= seconds:
            break
        if len(rounds) == 1:
            count = min(max(int(seconds / took), 1), 20)
    row: dict[str, Any] = {"step_seconds": float(np.median(rounds[1:] or rounds)), "loss": float(report["loss"])}
    row["steps"] = count * len(rounds)
    if took < 2:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(2):
                    state, report = program.step(state, batch)
                jax.block_until_ready((state, report))
            row |= communication(pathlib.Path(folder), 2)
    return row


def speed(programs: Sequence[tuple[Case, Program | str]], seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each case: tokens per second, memory by XLA's plan, collectives, communication from a trace."""
    for case, program in programs:
        row = {
            "config": case.config, "axis": case.axis, "devices": case.devices, "rows": case.rows,
            "length": case.length, "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        }  # fmt: skip
        if isinstance(program, str):
            yield row | {"note": program}
            continue
        try:
            found = timed(program, seconds)
        except jax.errors.JaxRuntimeError as error:
            yield row | {"note": out_of_memory(error)}
            continue
        plan = program.step.memory_analysis()
        row |= found | {"tokens_per_second": case.rows * case.length / found["step_seconds"]}
        row["planned_gib"] = (plan.temp_size_in_bytes + plan.argument_size_in_bytes) / 2**30
        yield row | {"layer_bytes": layer_bytes(program.step.as_text(), program.depth)}


# ---- communication --------------------------------------------------------------------------------------------------

COLLECTIVE = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|ragged-all-to-all)(?:-start)?"
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}
KERNEL = re.compile(r"nccl|all.?reduce|all.?gather|reduce.?scatter|all.?to.?all|collective|sendrecv|p2p", re.IGNORECASE)


def layer_bytes(text: str, depth: int) -> dict[str, int]:
    """Bytes that the collectives inside the loops over `depth` layers give one device, per layer and by their name,
    from a compiled program's text; forward and backward are loops of their own, and both count."""
    bodies = computations(text)
    wanted = [body for line in text.splitlines() if (body := looped(line, depth))]
    found: dict[str, int] = {}
    seen: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in seen or name not in bodies:
            continue
        seen.add(name)
        for line in bodies[name]:
            wanted += re.findall(r"(?:body|condition|calls|to_apply|called_computation)=%?([\w.-]+)", line)
            match = re.search(rf"= (.*?) {COLLECTIVE}\(", line)
            if match:
                found[match[2]] = found.get(match[2], 0) + given_bytes(match[1], line)
    return found


def looped(line: str, depth: int) -> str:
    """The body of a loop of `depth` turns, "" where a line has none. Of many layers up to two stand around the
    loop where collectives are begun a turn ahead; of few, a shorter loop may be another."""
    match = re.search(r"\bwhile\(.*body=%?([\w.-]+)", line)
    turns = re.search(r"known_trip_count\W+n\W+(\d+)", line)
    fewest = depth - 2 if depth > 16 else depth
    return match[1] if match and turns and fewest <= int(turns[1]) <= depth else ""


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation of a module, by its name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        match = re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line)
        if match:
            lines = found.setdefault(match[1], [])
        else:
            lines.append(line)
    return found


def given_bytes(result: str, line: str) -> int:
    """Of a collective's result. That of an asynchronous start has its operands in front of its results."""
    sizes = [
        BYTES.get(dtype, 4) * int(np.prod([int(size) for size in shape.split(",") if size], initial=1))
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result)
    ]
    return sum(sizes[len(sizes) // 2 :]) if "-start(" in line and len(sizes) > 1 else sum(sizes)


def merged(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, end = 0.0, -np.inf
    for first, last in sorted(spans):
        total += max(last - max(first, end), 0.0)
        end = max(end, last)
    return total


def communication(folder: pathlib.Path, steps: int) -> dict[str, float]:
    """Seconds a step in which a device's streams ran collectives, and in which they ran nothing else, means over
    devices, from a profiler's trace; empty where there is no GPU in it. Waiting for a slower device counts."""
    [file] = folder.rglob("*.xplane.pb")
    found = []
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        streams = [line for line in plane.lines if "Stream" in line.name] if "GPU" in plane.name else []
        events = [(KERNEL.search(e.name) is not None, e.start_ns, e.start_ns + e.duration_ns)
                  for line in streams for e in line.events]  # fmt: skip
        if events:
            other = merged([span for is_collective, *span in events if not is_collective])
            both = merged([span for _, *span in events])
            found.append((merged([span for is_collective, *span in events if is_collective]), both - other, both))
    if not found:
        return {}
    names = "communication_seconds", "exposed_seconds", "busy_seconds"
    return dict(zip(names, (float(x) / 1e9 / steps for x in np.mean(found, axis=0)), strict=True))


# ---- agreement ------------------------------------------------------------------------------------------------------


def equality(programs: Sequence[tuple[Case, Program | str]], steps: int = 3) -> Iterator[dict[str, Any]]:
    """Losses of a few steps and the first update against those of the first case, one device in float32. A bfloat16
    mesh is held beside one device in bfloat16, which comes second. Then a checkpoint of the last mesh on one device."""
    reference = before = first = one = None
    for case, program in programs:
        if isinstance(program, str):
            raise ValueError(f"--equal_rows: {case.name}: {program}; give fewer rows.")
        state, batch, losses, after = program.state(), program.batch(), [], None
        if before is None:
            before = jax.device_get(state.params)
        for i in range(steps):
            state, report = program.step(state, batch)
            losses.append(float(report["loss"]))
            after = jax.device_get(state.params) if i == 0 else after
        if reference is None:
            reference, first = (losses, after), program
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, reference[0], strict=True))
        distance, leaf, name = differences(after, reference[1], before)
        if not case.exact and one is None:
            one = distance
        bar = FLOAT32 if case.exact else FURTHER * one
        yield {
            "config": case.config, "mesh": case.name, "dtype": "float32" if case.exact else "as configured",
            "losses": losses, "loss_difference": worst, "update_difference": distance, "bar": bar,
            "worst_leaf_difference": leaf, "worst_leaf": name, "equal": bool(distance <= bar), "depth": program.depth,
            "rows": case.rows, "length": case.length, "device": jax.devices()[0].device_kind,
        }  # fmt: skip
        if program is programs[-1][1]:
            yield {"config": case.config, "mesh": case.name, "restored_on_one": restored(state, first)}


def differences(after, reference, before) -> tuple[float, float, str]:
    """(RMS of the difference of two updates over their RMS, that of the worst leaf, its name)."""
    names, sums = optim.leaf_names(after), []
    for ours, theirs, old in zip(*map(jax.tree.leaves, (after, reference, before)), strict=True):
        sums.append([float(np.sum(np.square(x), dtype=np.float64)) for x in (ours - theirs, theirs - old)])
    ratios = [np.sqrt(d / max(u, 1e-30)) for d, u in sums]
    whole = np.sqrt(sum(d for d, _ in sums) / max(sum(u for _, u in sums), 1e-30))
    return float(whole), float(max(ratios)), names[int(np.argmax(ratios))]


def restored(state: TrainState, program: Program) -> bool:
    """Whether a checkpoint of a state, split as it is, is the same to the bit on one device."""
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), program.shapes, program.placed
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Checkpointer(folder)) as checkpointer:
        checkpointer.save(1, state, {}, {})
        checkpointer.wait()
        found = checkpointer.restore(target).state
    plain: Mapping = {"a": state._replace(key=jax.random.key_data(state.key)),
                      "b": found._replace(key=jax.random.key_data(found.key))}  # fmt: skip
    one = all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves(found))
    return one and all(
        np.array_equal(a, b) for a, b in zip(*(jax.tree.leaves(jax.device_get(x)) for x in plain.values()), strict=True)
    )


def sum_of_devices() -> float:
    """A sum over all devices, by NCCL on GPUs: a host whose devices do not reach each other says so here."""
    mesh = sharding.make_mesh(data=jax.device_count())
    ones = sharding.place(mesh, {"x": np.ones((jax.device_count(), 1), np.float32)})["x"]
    return float(jax.jit(jnp.sum)(ones))
