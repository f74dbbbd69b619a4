"""Metrics: rows and their continuation after a resume, TensorBoard, bar and log lines, processes, plots."""

import io
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from efla_jax import metrics
from efla_jax.metrics import Panel, Writer


class Terminal(io.StringIO):
    def isatty(self):
        return True


def write_run(workdir, steps, start_step=0, **settings):
    stream = io.StringIO()
    with Writer(workdir, start_step=start_step, tensorboard=False, stream=stream, **settings) as writer:
        for step in steps:
            writer.write(step, {"loss": 10.0 / (step + 1)})
    return stream.getvalue()


def lines(workdir, name=metrics.FILE_NAME):
    return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


def test_rows(tmp_path):
    with Writer(tmp_path / "new" / "run", tensorboard=False, stream=io.StringIO()) as writer:
        values = {"loss": jnp.float32(0.5), "flag": np.bool_(True), "half": jnp.bfloat16(1.5), "one": np.ones(1)}
        writer.write(1, values)
        # Each row is on disk at once: a killed run loses none.
        assert len(lines(tmp_path / "new" / "run")) == 1
        writer.write(2, {"loss": float("nan"), "norm": np.inf, "count": 3, "unknown here": None})
    assert lines(tmp_path / "new" / "run") == [
        {"step": 1, "loss": 0.5, "flag": 1.0, "half": 1.5, "one": 1.0},
        {"step": 2, "loss": None, "norm": None, "count": 3.0},
    ]
    first, second = metrics.read_rows(tmp_path / "new" / "run")
    assert first["loss"] == 0.5 and math.isnan(second["loss"]) and second["step"] == 2


def test_a_resumed_run_repeats_no_step(tmp_path):
    write_run(tmp_path, range(1, 8))
    with open(tmp_path / metrics.FILE_NAME, "a") as file:
        file.write('{"step": 8, "lo')  # killed in the middle of a line
    write_run(tmp_path, range(5, 10), start_step=5)
    assert [row["step"] for row in lines(tmp_path)] == list(range(1, 10))
    assert [row["step"] for row in lines(tmp_path, metrics.DROPPED_NAME)] == [5, 6, 7]
    write_run(tmp_path, [10], start_step=10)  # nothing to drop
    assert [row["step"] for row in lines(tmp_path)] == list(range(1, 11))
    assert len(lines(tmp_path, metrics.DROPPED_NAME)) == 3
    write_run(tmp_path, [0])  # a fresh run in the same place
    assert [row["step"] for row in lines(tmp_path)] == [0]
    assert len(lines(tmp_path, metrics.DROPPED_NAME)) == 13
    assert sorted(p.name for p in tmp_path.iterdir()) == [metrics.DROPPED_NAME, metrics.FILE_NAME]


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with Writer(tmp_path / "run", stream=io.StringIO()) as writer:
        writer.write(1, {"loss": 1.0})
        writer.print("hello")
    assert not (tmp_path / "run").exists()


def test_everything_is_closed_after_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), Writer(tmp_path, stream=Terminal()) as writer:
        writer.write(1, {"loss": 1.0})
        raise RuntimeError("stop")
    assert writer._file.closed and writer._bar.disable and writer._board.file_writer is None
    writer.close()
    assert len(lines(tmp_path)) == 1


def test_log_lines_without_a_terminal(tmp_path):
    stream = io.StringIO()
    with Writer(tmp_path, total_steps=25, print_every=10, tensorboard=False, stream=stream) as writer:
        for step in range(1, 26):
            writer.write(step, {"loss": 1.0 / step, "bits_per_byte": 2.5, "tokens_per_second": 123456.7, "hidden": 1.0})
            if step == 12:
                writer.write(step, {"valid/loss": 1.0})
        writer.print("done")
    assert stream.getvalue().splitlines() == [
        "step 10/25  loss 0.1  bpb 2.5  tok/s 1.23e+05",
        "step 20/25  loss 0.05  bpb 2.5  tok/s 1.23e+05",
        "step 25/25  loss 0.04  bpb 2.5  tok/s 1.23e+05",
        "done",
    ]


def test_progress_bar_on_a_terminal(tmp_path):
    stream = Terminal()
    with Writer(tmp_path, start_step=20, total_steps=40, tensorboard=False, stream=stream) as writer:
        writer._bar.mininterval = 0
        writer._bar.miniters = 1
        for step in (30, 40):
            writer.write(step, {"loss": 1.25, "bits_per_byte": 1.8, "tokens_per_second": 512.0})
    shown = stream.getvalue()
    assert "20/40" in shown and "30/40" in shown and "40/40" in shown
    assert "loss=1.25, bpb=1.8, tok/s=512" in shown and "step 30" not in shown


def test_tensorboard_files_hold_the_scalars(tmp_path):
    with Writer(tmp_path, stream=io.StringIO()) as writer:
        writer.write(3, {"loss": 0.25, "valid/loss": 0.5})
    (file,) = (tmp_path / "tensorboard").iterdir()
    from tensorboardX.proto.event_pb2 import Event

    content, found = file.read_bytes(), {}
    while content:  # a record: length (8 bytes), its checksum (4), the event, its checksum (4)
        size = int.from_bytes(content[:8], "little")
        event = Event.FromString(content[12 : 12 + size])
        found.update({value.tag: (event.step, value.simple_value) for value in event.summary.value})
        content = content[16 + size :]
    assert found == {"loss": (3, 0.25), "valid/loss": (3, 0.5)}


def test_runs_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with Writer(tmp_path, stream=io.StringIO()) as writer:
        writer.write(1, {"loss": 1.0})
    assert [p.name for p in tmp_path.iterdir()] == [metrics.FILE_NAME]


class Wandb:
    """What `Writer` uses of wandb; keeps what it is told."""

    def __init__(self):
        self.starts, self.rows, self.ends, self.axes = [], [], [], []

    def init(self, **settings):
        self.starts.append(settings)
        self.id = settings["id"] or f"run{len(self.starts)}"
        return self

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def log(self, row):
        self.rows.append(row)

    def finish(self, exit_code):
        self.ends.append(exit_code)


def test_wandb_gets_the_rows_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = {"wandb_project": "linear", "config": {"seed": 3}, "tensorboard": False, "stream": io.StringIO()}
    with pytest.raises(RuntimeError, match="stop"), Writer(tmp_path / "first", start_step=1, **settings) as writer:
        writer.write(1, {"loss": 0.5, "peak_memory_gib": None})
        writer.write(2, {"loss": np.nan})
        raise RuntimeError("stop")
    with Writer(tmp_path / "first", start_step=2, **settings) as writer:
        writer.write(2, {"loss": 0.25})
        writer.close()
    with Writer(tmp_path / "first", start_step=1, **settings):  # a fresh run in the same place
        pass
    assert [(start["project"], start["name"], start["id"], start["config"]) for start in wandb.starts] == [
        ("linear", "first", None, {"seed": 3}), ("linear", "first", "run1", {"seed": 3}),
        ("linear", "first", None, {"seed": 3}),
    ]  # fmt: skip
    assert wandb.rows[0] == {"step": 1, "loss": 0.5} and wandb.rows[2] == {"step": 2, "loss": 0.25}
    assert wandb.ends == [1, 0, 0] and wandb.axes[:2] == [("step", None), ("*", "step")]
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    Writer(tmp_path / "other", **settings).close()
    assert len(wandb.starts) == 3


def test_wandb_that_is_asked_for_but_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb_project='linear' .* not installed; pip install wandb"):
        Writer(tmp_path, wandb_project="linear", stream=io.StringIO())


def test_wrong_input(tmp_path):
    with Writer(tmp_path, tensorboard=False, stream=io.StringIO()) as writer:
        for value in (np.ones(2), "1.0"):
            with pytest.raises(ValueError, match="loss=.* must be a scalar number"):
                writer.write(1, {"loss": value})
    with pytest.raises(ValueError, match="print_every=0 must be >= 1"):
        Writer(tmp_path, print_every=0)
    with pytest.raises(ValueError, match="start_step=-1 must be >= 0"):
        Writer(tmp_path, start_step=-1)
    with pytest.raises(ValueError, match="has no metrics.jsonl"):
        metrics.read_rows(tmp_path / "nowhere")
    (tmp_path / "bad.jsonl").write_text('{"step": 1}\n[]\n')
    with pytest.raises(ValueError, match="bad.jsonl', line 2"):
        metrics.read_rows(tmp_path / "bad.jsonl")


def colours(path):
    """Colours of a PNG that are not grey, with how many pixels each has."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    values, counts = np.unique(pixels[np.ptp(pixels, axis=1) > 15], axis=0, return_counts=True)
    return {tuple(v): n for v, n in zip(values.tolist(), counts.tolist(), strict=True)}


BLUE, ORANGE = (31, 119, 180), (255, 127, 14)


def test_curves_of_several_runs(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, range(1, 50))
    with Writer(tmp_path / "a", start_step=50, tensorboard=False, stream=io.StringIO()) as writer:
        writer.write(50, {"loss": float("inf")})
        writer.write(50, {"valid/loss": 1.0})
    path = metrics.plot_curves({"run a": tmp_path / "a", "run b": tmp_path / "b" / "metrics.jsonl"},
                               tmp_path / "plots" / "loss.png", smoothing=0.5, levels={"bigram": 3.0})
    assert path == tmp_path / "plots" / "loss.png" and path.read_bytes().startswith(b"\x89PNG")
    # The runs are equal, so the second hides the first except in the legend.
    found = colours(path)
    assert found[ORANGE] > 300 and found[BLUE] > 10
    with pytest.raises(ValueError, match="run 'run b' has no finite value of metric='valid/loss'"):
        metrics.plot_curves({"run b": tmp_path / "b"}, tmp_path / "x.png", metric="valid/loss")
    with pytest.raises(ValueError, match="smoothing=1.0 must be"):
        metrics.plot_curves({"run b": tmp_path / "b"}, tmp_path / "x.png", smoothing=1.0)
    assert not (tmp_path / "x.png").exists()


def test_smoothing():
    np.testing.assert_allclose(metrics.smooth([4.0, 4.0, 4.0], 0.85), [4, 4, 4])
    np.testing.assert_allclose(metrics.smooth([1.0, 3.0], 0.5), [1, (0.5 * 1 + 3) / 1.5])
    np.testing.assert_array_equal(metrics.smooth([1.0, 3.0, 2.0], 0.0), [1, 3, 2])


def test_lines_with_a_band_over_seeds(tmp_path):
    x = np.arange(11) / 10
    seeds = 50 + 40 * np.outer([0.5, 1.0, 1.5], x)
    both = {"efla": (x, seeds), "delta_net": (x, 90 - 20 * x)}
    panels = [Panel(both, "noise", "accuracy, %", "noise", {"chance": 10}),
              Panel({"delta_net": (x, 90 - 40 * x)}, "dropout", "accuracy, %")]
    found = colours(metrics.plot_lines(panels, tmp_path / "curves.png"))
    assert found[BLUE] > 300 and found[ORANGE] > 600
    band = tuple(round(255 - 0.2 * (255 - c)) for c in BLUE)  # alpha 0.2 on white
    assert sum(n for colour, n in found.items() if max(np.abs(np.subtract(colour, band))) <= 1) > 5000
    single = [Panel({"efla": (x, seeds[:1])}, "noise", "accuracy, %")]
    alone = colours(metrics.plot_lines(single, tmp_path / "single.png"))
    assert sum(n for colour, n in alone.items() if max(np.abs(np.subtract(colour, band))) <= 1) < 500
    with pytest.raises(ValueError, match=r"line 'efla' of panel 't': x has shape \(11,\), y \(1, 3\)"):
        metrics.plot_lines([Panel({"efla": (x, [1, 2, 3])}, "x", "y", "t")], tmp_path / "x.png")
    with pytest.raises(ValueError, match="panels must hold at least one panel"):
        metrics.plot_lines([], tmp_path / "x.png")


def test_rows_are_written_though_nobody_reads_the_lines(tmp_path):
    """As behind Ctrl-C, which ends `tee` before the run has saved."""

    class Unread(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with Writer(tmp_path, print_every=1, stream=Unread(), tensorboard=False) as writer:
        for step in (1, 2):
            writer.write(step, {"loss": 0.5})
    assert [row["step"] for row in metrics.read_rows(tmp_path)] == [1, 2]
