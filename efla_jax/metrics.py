"""Metrics of a run: JSONL rows, TensorBoard, wandb, a progress bar or log lines, and plots of the result.

Rows are what counts, the rest is a view of them: one JSON object per line in `<workdir>/metrics.jsonl`, with "step" and
whatever scalars were written. A value that is not finite is stored as null.
"""

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

FILE_NAME = "metrics.jsonl"
DROPPED_NAME = "metrics.dropped.jsonl"
WANDB_NAME = "wandb_run.txt"  # the id under which a resumed run goes on
# What the progress bar shows, in this order, under which short name.
SHOWN = {"loss": "loss", "bits_per_byte": "bpb", "tokens_per_second": "tok/s"}

Scalars = Mapping[str, Any]


class Writer:
    """Writes scalars of a run into `workdir`; only process 0 of a job writes, elsewhere every call does nothing.

    start_step: the first step that will be written. Rows that are already there from that step on belong to work that
    is done again: they move to metrics.dropped.jsonl, so that no step stands twice; a line torn by a kill is removed.
    total_steps: length of the progress bar, 0 for unknown. On a terminal `stream` (standard output) gets the bar,
    otherwise one line every `print_every` steps. `tensorboard` writes those files too, if tensorboardX is installed.
    wandb_project: the Weights & Biases project that gets the rows too, under the name of `workdir` and with `config`;
    "": none. A resumed run goes on there. Use as a context manager. Raises ValueError for a project without wandb.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        start_step: int = 0,
        total_steps: int = 0,
        print_every: int = 100,
        tensorboard: bool = True,
        wandb_project: str = "",
        config: Mapping[str, Any] | None = None,
        stream: io.TextIOBase | None = None,
    ):
        if print_every < 1:
            raise ValueError(f"print_every={print_every} must be >= 1")
        if start_step < 0:
            raise ValueError(f"start_step={start_step} must be >= 0")
        self._active = jax.process_index() == 0
        self._bar = self._board = self._run = None
        if not self._active:
            return
        self._stream = sys.stdout if stream is None else stream
        self._print_every, self._total = print_every, total_steps
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        if wandb_project:  # first, as it may refuse
            self._run = _wandb_run(folder, wandb_project, config, start_step)
        _drop_rows(folder, start_step)
        self._file = open(folder / FILE_NAME, "a", encoding="utf-8")
        if tensorboard:
            self._board = _summary_writer(folder, start_step)
        if self._stream.isatty():
            self._bar = tqdm(total=total_steps or None, initial=start_step, file=self._stream, unit="step",
                             dynamic_ncols=True)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def write(self, step: int, scalars: Scalars) -> None:
        """Appends one row and moves the progress on to `step`.

        Values become floats here, which waits for a jax array still being computed: pass those of the step before.
        None, for what is not known on this machine, leaves the name out. Raises ValueError for a value that is no
        scalar.
        """
        if not self._active:
            return
        row = {name: _number(name, value) for name, value in scalars.items() if value is not None}
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self._file.write(json.dumps({"step": int(step), **finite}, allow_nan=False) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in row.items():
                self._board.add_scalar(name, value, int(step))
        if self._run is not None:
            self._run.log({"step": int(step), **row})
        self._show(int(step), row)

    def print(self, text: str) -> None:
        """Prints a line beside the progress bar, if somebody reads: Ctrl-C ends `tee` before a run has saved."""
        if self._active:
            with contextlib.suppress(BrokenPipeError):
                tqdm.write(text, file=self._stream)
                self._stream.flush()

    def close(self, *, failed: bool = False) -> None:
        """Ends bar, row file, TensorBoard and wandb, which is told whether the run failed. May be called twice."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.close()
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
            self._run = None

    def _show(self, step: int, row: dict[str, float]) -> None:
        shown = {short: _short(row[name]) for name, short in SHOWN.items() if name in row}
        if self._bar is not None:
            if shown:
                self._bar.set_postfix(shown, refresh=False)
            self._bar.update(max(0, step - self._bar.n))
        elif shown and (step % self._print_every == 0 or step == self._total):
            of = f"/{self._total}" if self._total else ""
            self.print(f"step {step}{of}  " + "  ".join(f"{short} {value}" for short, value in shown.items()))


def _number(name: str, value: Any) -> float:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biufV":  # V: bfloat16
        raise ValueError(f"{name}={value!r} must be a scalar number; write one value per name")
    return float(array.reshape(()))


def _short(value: float) -> str:
    return f"{value:.3g}" if not 0.001 <= abs(value) < 1000 else f"{value:.4g}"


def _summary_writer(folder: Path, start_step: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=start_step)


def _wandb_run(folder: Path, project: str, config: Mapping[str, Any] | None, start_step: int) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            f"wandb_project={project!r} asks for Weights & Biases, which is not installed; pip install wandb, or leave"
            " wandb_project empty"
        ) from error
    file = folder / WANDB_NAME
    known = file.read_text(encoding="utf-8").strip() if start_step > 1 and file.exists() else None
    run = wandb.init(
        project=project, name=folder.name, dir=str(folder.resolve()), id=known, resume="allow",
        config=dict(config or {}), allow_val_change=True,  # the mesh, or the number of steps, of a resumed run
    )  # fmt: skip
    # wandb's own step must grow, which that of a run that repeats some steps after a crash does not.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    file.write_text(f"{run.id}\n", encoding="utf-8")
    return run


def _drop_rows(folder: Path, start_step: int) -> None:
    file = folder / FILE_NAME
    if not file.exists():
        return
    kept: list[str] = []
    dropped: list[str] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            belongs = kept if json.loads(line)["step"] < start_step else dropped
        except (ValueError, KeyError, TypeError):  # a line torn by a killed process
            continue
        belongs.append(line + "\n")
    if dropped:
        with open(folder / DROPPED_NAME, "a", encoding="utf-8") as stream:
            stream.writelines(dropped)
    partial = folder / (FILE_NAME + ".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, file)


def read_rows(path: str | Path) -> list[dict[str, int | float]]:
    """Rows of a metrics.jsonl, or of a run's folder; null reads as NaN. Raises ValueError naming a damaged line."""
    file = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise ValueError(f"path={str(path)!r} has no {FILE_NAME}; give a run's workdir")
    text = file.read_text(encoding="utf-8", errors="replace")
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            rows.append({name: math.nan if value is None else value for name, value in json.loads(line).items()})
        except (ValueError, AttributeError) as error:
            raise ValueError(f"file {str(file)!r}, line {number} is no JSON object ({error})") from error
    return rows


@dataclass(frozen=True)
class Panel:
    """One pair of axes: `lines` maps a label to (x [n], y [n] or [seeds, n]), `levels` a label to a constant.

    Several seeds are drawn as their mean with a band from the smallest to the largest; levels are dashed.
    `logarithmic` makes both axes so, x by powers of two, and marks the points. `points` is for outcomes that are all or
    nothing: x are categories, every seed is a point and the mean a dash.
    """

    lines: Mapping[str, tuple[Any, Any]]
    x_label: str
    y_label: str
    title: str = ""
    levels: Mapping[str, float | int] = field(default_factory=dict)
    logarithmic: bool = False
    points: bool = False


def plot_lines(panels: Sequence[Panel], output: str | Path) -> Path:
    """Draws panels side by side into a PNG and returns its path. A label has the same colour in every panel, from the
    eleventh on with dashes or another mark; what would hide lines, a long legend, stands beside the panels.

    Raises ValueError when there is nothing to draw or x and y differ in length.
    """
    if not panels or not all(panel.lines for panel in panels):
        raise ValueError("panels must hold at least one panel, and every panel at least one line")
    # Figure instead of pyplot: it draws with Agg and leaves no global state behind.
    from matplotlib.figure import Figure

    labels = dict.fromkeys(label for panel in panels for label in panel.lines)
    colours = {label: f"C{i % 10}" for i, label in enumerate(labels)}
    rounds = {label: min(i // 10, 2) for i, label in enumerate(labels)}
    beside = any(panel.points or len(panel.lines) > 8 for panel in panels)
    figure = Figure(figsize=(1 + 4.5 * len(panels) + beside, 3.8), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        places = np.unique(np.concatenate([np.asarray(x, float) for x, _ in panel.lines.values()]))
        for i, (label, (x, y)) in enumerate(panel.lines.items()):
            x, y = np.asarray(x, float), np.atleast_2d(np.asarray(y, float))
            if y.shape[1:] != x.shape:
                raise ValueError(f"line {label!r} of panel {panel.title!r}: x has shape {x.shape}, y {y.shape}; "
                                 "y must be [n] or [seeds, n] for x [n]")
            if panel.points:
                x = np.searchsorted(places, x) + 0.8 * ((i + 0.5) / len(panel.lines) - 0.5)
                one, colour = np.tile(x, len(y)), colours[label]
                axes.plot(one, y.ravel(), "os^"[rounds[label]], label=label, color=colour, markersize=4, alpha=0.6)
                axes.plot(x, y.mean(axis=0), "_", color=colour, markersize=11, markeredgewidth=2)
                continue
            marker = "o" if panel.logarithmic else None
            style = {"color": colours[label], "linestyle": ("-", "--", ":")[rounds[label]], "marker": marker}
            axes.plot(x, y.mean(axis=0), label=label, linewidth=1.5, markersize=3, **style)
            if len(y) > 1:
                axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=colours[label], alpha=0.2, linewidth=0)
        if panel.points:
            axes.set_xticks(range(len(places)), [f"{place:g}" for place in places])
        for label, level in panel.levels.items():
            axes.axhline(level, linestyle="--", linewidth=1, color="0.4")
            axes.annotate(label, (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
        if panel.logarithmic:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        axes.grid(alpha=0.3, axis="y" if panel.points else "both")
        if not beside:
            axes.legend(fontsize=8)
    if beside:
        told = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes)
        drawn = {label: line for pairs in told for line, label in pairs}
        figure.legend(drawn.values(), drawn, fontsize=8, loc="outside right upper")
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


@dataclass(frozen=True)
class Map:
    """An image of `values` [columns, rows], NaN in grey; `columns` names them where they are few enough, and a column
    stands for `step` units of the x axis."""

    values: np.ndarray
    title: str = ""
    columns: Sequence[str] = ()
    step: int = 1


def plot_maps(
    maps: Sequence[Sequence[Map]], output: str | Path, *, x_label: str, y_label: str, scale_label: str
) -> Path:
    """Draws rows of maps on one colour scale, from 0 to the largest value of all, into a PNG and returns its path.

    Raises ValueError when there is nothing finite to draw, or rows have different numbers of maps."""
    finite = [np.nanmax(one.values) for row in maps for one in row if np.isfinite(one.values).any()]
    if not finite or len({len(row) for row in maps}) != 1:
        raise ValueError("maps must be rows of equally many maps, one of them with a finite value")
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    shape = len(maps), len(maps[0])
    figure = Figure(figsize=(1.5 + 3.2 * shape[1], 0.8 + 1.8 * shape[0]), layout="constrained")
    grid, image = figure.subplots(*shape, squeeze=False, sharey="row"), None
    colours = colormaps["viridis"].with_extremes(bad="0.85")
    for axes, one in zip(grid.flat, [one for row in maps for one in row], strict=True):
        columns, rows = one.values.shape
        image = axes.imshow(
            one.values.T, origin="lower", aspect="auto", interpolation="nearest", vmin=0, vmax=max(finite) or 1,
            cmap=colours, extent=(-0.5, columns * one.step - 0.5, -0.5, rows - 0.5),
        )  # fmt: skip
        axes.set_title(one.title, fontsize=9)
        if one.columns:
            axes.set_xticks(range(columns), one.columns, fontsize=6, family="monospace")
    for axes in grid[-1]:
        axes.set_xlabel(x_label)
    for axes in grid[:, 0]:
        axes.set_ylabel(y_label)
    assert image is not None  # there is a map
    figure.colorbar(image, ax=grid, label=scale_label)
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def plot_curves(
    runs: Mapping[str, str | Path],
    output: str | Path,
    *,
    metric: str = "loss",
    y_label: str = "",
    smoothing: float = 0.0,
    levels: Mapping[str, float | int] | None = None,
) -> Path:
    """Draws `metric` against the step for several runs (label to metrics.jsonl or workdir) into a PNG.

    smoothing a in [0, 1): m_t = a m_{t-1} + (1 - a) x_t, divided by 1 - a^t so that the start is not pulled to 0. Rows
    without the metric, or where it is not finite, are left out. Raises ValueError if a run has none.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing={smoothing} must be >= 0 and < 1; 0 draws every value")
    lines = {}
    for label, path in runs.items():
        rows = [row for row in read_rows(path) if math.isfinite(row.get(metric, math.nan))]
        if not rows:
            raise ValueError(f"run {label!r} has no finite value of metric={metric!r}; check the name in {str(path)!r}")
        lines[label] = ([row["step"] for row in rows], smooth([row[metric] for row in rows], smoothing))
    return plot_lines([Panel(lines, "step", y_label or metric, levels=levels or {})], output)


def smooth(values: Sequence[float], factor: float) -> np.ndarray:
    """Exponential average of every value with those before it; see `plot_curves`."""
    smooth, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = factor * total + (1 - factor) * value, factor * weight + (1 - factor)
        smooth.append(total / weight)
    return np.array(smooth)
