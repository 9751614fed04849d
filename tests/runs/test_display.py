"""Output for users: plain lines in a file, live ones on a terminal, in any encoding."""

from __future__ import annotations

import io
import math
import re
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from raygnn.errors import DataError, TrainingError
from raygnn.runs.display import Display, NullDisplay
from raygnn.runs.progress_line import TrainingProgress, clock
from tests.support.terminal import rows_on_terminal

SUMMARY = {
    "status": "done",
    "metrics": {"val/accuracy": 0.79, "test/accuracy": 0.81512},
    "steps": 12000,
    "seeds_per_second": 12345.6,
    "seconds": {"sample": 1.25, "compute": 3.75},
}


class Screen:
    """A display that writes into memory, as a file or as a terminal of some width and encoding."""

    def __init__(self, terminal: bool = False, width: int = 200, encoding: str = "utf-8"):
        self._bytes = io.BytesIO()
        self._file = io.TextIOWrapper(self._bytes, encoding=encoding, newline="")
        console = Console(
            file=self._file, force_terminal=terminal, width=width, _environ={"TERM": "xterm"}
        )
        self.display = Display(console)

    def text(self) -> str:
        self._file.flush()
        return self._bytes.getvalue().decode(self._file.encoding)


def record(step: int, **values: float) -> dict[str, float]:
    renamed = {key.replace("_", "/", 1): value for key, value in values.items() if "/" not in key}
    return {"step": step, "epoch": 0, "time": step * 0.1, "train/loss": 1 / step, **renamed}


def show_all(display: Display) -> None:
    display.header({"run": "cora", "runs on": "2 workers × 1 CPU"})
    with display.stage("partitioning") as at:
        at("metis")
    with display.progress(2, 50) as progress:
        for step in range(10, 110, 10):
            progress.update(record(step))
    display.table("parts", ["part", "nodes"], [["0", 1_350], ["total", 2_708]])
    display.closing(SUMMARY, Path("/runs/cora"))
    display.error(DataError("row 7 has 3 fields …", where="edges.csv", remedy="give it 2"))


def test_header_names_are_aligned() -> None:
    screen = Screen()
    screen.display.header({"run": "cora", "runs on": "2 workers [cpu]"})
    assert screen.text() == "run      cora\nruns on  2 workers [cpu]\n\n"


def test_a_stage_leaves_one_line_with_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    with screen.display.stage("reading"):
        pass
    assert screen.text() == ""  # it took no time
    monkeypatch.setattr("raygnn.runs.display._NOTHING", 0.0)
    with screen.display.stage("starting Ray") as at:
        at("waiting")
    for seconds in (5.0, 0.0):  # after a short stage, only the error is printed
        monkeypatch.setattr("raygnn.runs.display._SHORT", seconds)
        with pytest.raises(KeyError), screen.display.stage("loading"):
            raise KeyError
    lines = screen.text().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"starting Ray: \d+\.\d s", lines[0])
    assert re.fullmatch(r"loading: stopped after \d+\.\d s", lines[1])


def test_progress_in_a_file_is_a_line_per_evaluation_and_rarely_more() -> None:
    screen = Screen()
    with screen.display.progress(3, 100) as progress:
        for step in range(1, 301):
            item = record(step)
            if step % 100 == 0:
                item["val/accuracy"] = step / 400
                item["seeds_per_second"] = 1234.5
            progress.update(item)
    assert screen.text().splitlines() == [
        "epoch 1/3  step 1/300  loss 1.0000",
        "epoch 1/3  step 100/300  loss 0.0100  val/accuracy 0.2500  1,234 seeds/s  0:20 left",
        "epoch 2/3  step 200/300  loss 0.0050  val/accuracy 0.5000  1,234 seeds/s  0:10 left",
        "epoch 3/3  step 300/300  loss 0.0033  val/accuracy 0.7500  1,234 seeds/s",
    ]


def test_progress_in_a_file_speaks_every_five_seconds_and_at_the_end() -> None:
    screen = Screen()
    with screen.display.progress(1, 1000) as progress:
        ticks = iter(range(1000))
        progress._now = lambda: float(next(ticks))  # a second per record, two looks per line
        for step in range(1, 21):
            progress.update(record(step))
    steps = [int(found) for found in re.findall(r"step (\d+)/", screen.text())]
    assert steps[0] == 1
    assert steps[-1] == 20
    assert all(later - earlier >= 4 for earlier, later in pairwise(steps[:-1]))
    assert 3 <= len(steps) <= 7


def test_a_failed_training_still_leaves_its_last_line() -> None:
    """The last line has the number of steps that the training was limited to."""
    screen = Screen()

    def fail_at_the_last_step() -> None:
        with screen.display.progress(10, 100, max_steps=150) as progress:
            for step in (1, 2, 150):
                progress.update(record(step))
            raise KeyError

    with pytest.raises(KeyError):
        fail_at_the_last_step()
    assert screen.text().splitlines()[-1].startswith("epoch 2/2  step 150/150  loss 0.0067")


@pytest.mark.parametrize(
    ("steps_per_epoch", "total", "records", "line"),
    [
        # the remaining time is estimated from the first record on, without a slow start
        (100, 100, [{"step": 10, "time": 60.0}], "epoch 1/1  step 10/100"),
        (
            *(100, 100, [{"step": 10, "time": 60.0}, {"step": 20, "time": 61.0}]),
            "epoch 1/1  step 20/100  0:08 left",
        ),
        # validation losses give way to metrics
        (
            *(10, 10, [{"step": 1, "time": 1.0, "val/a/loss": 1.0, "val/a/mrr": 0.5}]),
            "epoch 1/1  step 1/10  val/a/mrr 0.5000",
        ),
        (
            *(10, 10, [{"step": 1, "time": 0.0, "train/loss": math.nan}]),
            "epoch 1/1  step 1/10  loss nan",
        ),
        # epochs of one step are counted once
        (1, 200, [{"step": 39, "time": 1.0, "train/loss": 0.5}], "epoch 39/200  loss 0.5000"),
    ],
)
def test_the_line(
    steps_per_epoch: int, total: int, records: list[dict[str, float]], line: str
) -> None:
    progress = TrainingProgress(steps_per_epoch, total)
    for item in records:
        progress.update(item)
    assert progress.line() == line


@given(
    width=st.integers(1, 200),
    step=st.integers(0, 10**9),
    total=st.integers(0, 10**9),
    loss=st.floats(allow_nan=True),
    seconds=st.floats(0, 1e8),
)
def test_the_live_line_fits_any_width(
    width: int, step: int, total: int, loss: float, seconds: float
) -> None:
    progress = TrainingProgress(7, total)
    progress.update({"step": 0, "epoch": 0, "time": 0.0, "train/loss": loss})
    progress.update({"step": step, "epoch": 0, "time": seconds, "val/f1": 0.5})
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(progress)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 1
    assert cell_len(lines[0]) <= width


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (40, "epoch 39/200  loss 0.8309"),
        (60, "epoch 39/200  loss 0.8309  0:16 left"),
        (70, "epoch 39/200  loss 0.8309  val/mrr 0.7900  0:16 left"),
        (80, "epoch 39/200  step 390/2,000  loss 0.8309  val/mrr 0.7900  0:16 left"),
        (
            120,
            "epoch 39/200  step 390/2,000  loss 0.8309  val/mrr 0.7900  val/hits@1 0.7783  "
            "5,403 seeds/s  0:16 left",
        ),
    ],
)
def test_the_live_line_keeps_its_bar_and_gives_up_the_least_important(
    width: int, columns: str
) -> None:
    progress = TrainingProgress(10, 2000)
    values = {"train/loss": 0.8309, "seeds_per_second": 5403.2}
    progress.update({"step": 380, "time": 10.0, "val/mrr": 0.79, "val/hits@1": 0.7783, **values})
    progress.update({"step": 390, "time": 10.1, **values})
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(progress)
    (line,) = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    bar, _, rest = line.partition("  ")
    assert rest.strip() == columns
    assert re.fullmatch("[━╸╺]+", bar.replace(" ", "")), bar


def test_plain_lines_have_the_metrics_of_their_own_step() -> None:
    """Also of an evaluation right after a line that was due between evaluations."""
    lines: list[str] = []
    progress = TrainingProgress(10, 20)
    progress.on_line = lines.append
    for step, when, key in ((10, 1.0, "val/f1"), (14, 6.5, "train/loss"), (20, 7.0, "val/f1")):
        progress._now = lambda when=when: when  # type: ignore[misc]
        progress.update({"step": step, "time": when, key: when})
    assert [re.sub(r"  \S+ left", "", line) for line in lines] == [
        "epoch 1/2  step 10/20  val/f1 1.0000",
        "epoch 2/2  step 14/20  loss 6.5000",
        "epoch 2/2  step 20/20  loss 6.5000  val/f1 7.0000",
    ]


@pytest.mark.parametrize("width", [30, 60])
def test_a_stage_takes_one_line(width: int) -> None:
    screen = Screen(terminal=True, width=width)
    with screen.display.stage("Ray and workers") as at:
        at("a detail that is longer than any terminal is wide, " * 3 + "end")
        time.sleep(0.3)  # it is drawn some times a second
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.text())
    shown = [line for line in re.split(r"[\r\n]", text) if "Ray and" in line]
    assert shown
    assert all(cell_len(line) <= width for line in shown)
    assert "end" not in text


def test_a_table_is_flush_right_in_numbers() -> None:
    screen = Screen()
    rows = [["0", 1_350_000, 0.154321, None], ["total", 2, 12, "x"]]
    screen.display.table("parts", ["part", "nodes", "cut", "note"], rows)
    lines = [line.rstrip() for line in screen.text().splitlines()]
    assert lines[0] == "parts"
    assert "  0       1,350,000   0.1543" in lines
    assert "  total           2       12   x" in lines
    screen.display.table("runs", ["name"], [])
    assert screen.text().endswith("no runs\n")


@pytest.mark.parametrize("width", [20, 48, 60, 80])
def test_a_table_never_cuts_a_word(width: int) -> None:
    """Cells wrap between words; a table without enough width becomes a block of lines."""
    screen = Screen(terminal=True, width=width)
    words = ["comm.compression=bfloat16!", "sampling.cache=0.1"]
    columns = ["settings", "seeds/s", "exchange ms"]
    screen.display.table("trials", columns, [[" ".join(words), 12_345, 0.25], ["", 1, None]])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", screen.text()).splitlines()
    assert set(" ".join(lines).split()) >= {*words, "settings" if width > 40 else "settings:"}
    assert all(cell_len(line) <= width for line in lines if width > 40)
    assert any("12,345" in line and words[0] in line for line in lines) == (width > 40)


def test_closing_says_the_test_metric_first(tmp_path: Path) -> None:
    screen = Screen()
    screen.display.closing({**SUMMARY, "best_epoch": 2}, Path("/runs/cora"))
    assert "report.html" not in screen.text()
    lines = screen.text().split("\n")
    assert lines[1:7] == [
        "status         done",
        "test/accuracy  0.8151",
        "val/accuracy   0.7900 (best epoch, 3)",
        "steps          12,000",
        "seeds/s        12,346 (in steps alone)",
        "seconds        sample 1.2, compute 3.8",
    ]
    assert lines[7] == "run directory  /runs/cora"
    timed = {**SUMMARY, "seconds": {"first_step": 3.0}, "train_loss": 0.25}
    screen.display.closing(timed, Path("/runs/cora"))
    assert "start to first step 3.0" in screen.text()
    assert re.search(r"^train/loss +0\.2500 ", screen.text(), re.M)
    screen.display.closing({"status": "failed"}, Path("/runs/cora"))
    assert "/runs/cora/logs" in screen.text()
    assert "--resume" in screen.text()
    (tmp_path / "report.html").touch()
    screen.display.closing(SUMMARY, tmp_path)
    assert f"open {tmp_path / 'report.html'} in a browser" in screen.text()


def test_closing_says_the_last_epoch_where_the_best_is_reported() -> None:
    """The last epoch's metric is shown beside the best validation metric, but not beside test
    metrics."""
    last = {"last_metrics": {"val/accuracy": 0.71}}
    for metrics, said in (({"val/accuracy": 0.83}, True), (SUMMARY["metrics"], False)):
        screen = Screen()
        screen.display.closing({**SUMMARY, **last, "metrics": metrics}, Path("/runs/cora"))
        assert ("val/accuracy, last epoch  0.7100" in screen.text()) == said


def test_an_error_says_the_cause_first_and_the_trace_last() -> None:
    screen = Screen()
    error = TrainingError(
        "rank 1 ran out of [memory]",
        where="rank 1 on node-2",
        remedy="lower sampling.batch_size",
        trace="Traceback …\n  MemoryError\n",
    )
    screen.display.error(error)
    assert screen.text() == (
        "error: rank 1 ran out of [memory]\n"
        "  at rank 1 on node-2\n"
        "  → lower sampling.batch_size\n"
        "\n"
        "Traceback …\n"
        "  MemoryError\n"
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [10, 40, 200])
def test_any_encoding_and_width_can_be_written(encoding: str, terminal: bool, width: int) -> None:
    screen = Screen(terminal, width, encoding)
    show_all(screen.display)
    screen.display.error(DataError("名 \udcff"))
    shown = screen.text()
    assert "error: " in shown
    assert "12,000" in shown
    if not terminal:
        assert ("->" in shown) == (encoding != "utf-8")


def test_a_file_gets_no_control_characters_even_from_values() -> None:
    screen = Screen()
    show_all(screen.display)
    screen.display.error(DataError("bad \x1b[31mname\x07\r", where="a\x00b"))
    shown = screen.text()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", shown)
    assert r"bad \x1b[31mname\x07\r" in shown


def test_a_long_value_is_not_folded_in_a_file() -> None:
    screen = Screen(width=80)
    screen.display.closing(SUMMARY, Path("/" + "x" * 300))
    assert "run directory  /" + "x" * 300 + "\n" in screen.text()


def test_default_consoles_are_the_standard_streams(capsys: pytest.CaptureFixture[str]) -> None:
    show_all(NullDisplay())
    assert capsys.readouterr() == ("", "")
    show_all(Display())
    out, err = capsys.readouterr()
    assert out.startswith("run")
    assert err.startswith("error: row 7")


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    Display(Console(file=file, force_terminal=True)).error(DataError("x"))
    assert "31" not in file.getvalue()


def test_clock() -> None:
    assert [clock(s) for s in (0, 42.4, 59.9, 3600, 11220)] == [
        *("0:00", "0:42", "1:00", "1:00:00", "3:07:00")
    ]


def test_notes_are_passed_to_the_callback() -> None:
    screen, kept = Screen(), list[str]()
    screen.display.note("before")
    screen.display.on_note = kept.append
    screen.display.note("after")
    assert kept == ["after"]
    assert "after" in screen.text()


def test_details_that_matter_to_everybody_are_lines() -> None:
    screen = Screen()
    with screen.display.stage("room", lines=True) as detail:
        for text in ("1 of 2, 0:09 left", "1 of 2, 0:08 left", "2 of 2, 0:07 left"):
            detail(text)
    assert screen.text().splitlines()[:2] == ["room: 1 of 2, 0:09 left", "room: 2 of 2, 0:07 left"]


def test_details_of_a_long_stage_come_at_a_bounded_rate() -> None:
    screen = Screen()
    screen.display.verbose = True
    with screen.display.stage("partition") as detail:
        detail("metis")
        for part in range(1000):
            detail(f"write, {part} of 1000 parts")
    lines = [line for line in screen.text().splitlines() if line.startswith("partition: write")]
    assert lines == ["partition: write, 0 of 1000 parts"]
    assert "partition: metis" in screen.text()


_ON_A_TERMINAL = """
import time
from pathlib import Path
from raygnn.runs.display import Display

show = Display()
show.header({"run": "cora → /some/where/on/a/file-system/of/a/cluster/runs/cora"})
with show.stage("Ray and workers") as at:
    at("workers: 2 of 2 setting up, which takes as long as it takes, and is told meanwhile")
    time.sleep(0.2)
with show.progress(200, 1) as progress:
    for step in (1, 99, 100, 200):
        values = {"train/loss": 0.3804, "val/accuracy": 0.806, "val/f1": 0.7972}
        progress.update({"step": step, "time": step / 9, "seeds_per_second": 5403.0, **values})
        time.sleep(0.3)  # it is drawn four times a second
        if step == 100:
            show.note("rank 1 waits for the next batch 37% of the time, since step 1,234,567: " * 2)
show.closing({"status": "done", "seconds": {"sample": 1.8, "features": 0.8, "total": 52.2}}, Path())
"""


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_is_broken_on_a_terminal(width: int) -> None:
    rows = rows_on_terminal([sys.executable, "-c", _ON_A_TERMINAL], width)
    live = [row for row in rows if "━" in row]
    assert max(map(cell_len, live)) <= width
    for step in (1, 99, 100, 200):
        assert any(f"epoch {step}/200" in row for row in live), "a bar at each step"
    last = next(row for row in reversed(rows) if row.startswith("epoch"))
    assert last.startswith("epoch 200/200  loss 0.3804")
