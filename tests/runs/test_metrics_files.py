"""metrics.jsonl: what is written is read back, also by a reader that is there all along."""

from __future__ import annotations

import errno
import json
import math
import os
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raygnn.errors import DataError, TrainingError
from raygnn.runs import metrics_files
from raygnn.runs.metrics_files import MetricsTail, MetricsWriter, newest, read_metrics

RECORDS = st.fixed_dictionaries(
    {
        "step": st.integers(0, 10**12),
        "epoch": st.integers(0, 10**6),
        "time": st.floats(0, 1e9),
        "train/loss": st.floats(),
        "note": st.text(),
    }
)


def record(step: int, **values: object) -> dict[str, object]:
    return {"step": step, "epoch": 0, "time": 0.5, **values}


def as_read(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "not a number"
    return value


def same(left: list[dict], right: list[dict]) -> bool:
    return [{k: as_read(v) for k, v in r.items()} for r in left] == [
        {k: as_read(v) for k, v in r.items()} for r in right
    ]


@given(records=st.lists(RECORDS, max_size=8), polls=st.sets(st.integers(0, 8)))
def test_what_is_written_is_read(records: list[dict], polls: set[int]) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.jsonl"
        tail = MetricsTail(path)
        tailed = tail.poll()
        with closing(MetricsWriter(path)) as writer:
            for index, item in enumerate(records):
                writer.write(item)
                if index in polls:
                    tailed += tail.poll()
        tailed += tail.poll()
        assert same(read_metrics(path), records)
        assert same(tailed, records)
        for line in path.read_text("utf-8").split("\n")[:-1]:
            json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@given(cut=st.integers(1, 200))
def test_complete_lines_of_a_torn_file_are_read_and_continued(cut: int) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.jsonl"
        with closing(MetricsWriter(path)) as writer:
            for step in range(4):
                writer.write(record(step))
        content = path.read_bytes()[: -min(cut, path.stat().st_size)]
        path.write_bytes(content)
        whole = content.count(b"\n")
        assert [item["step"] for item in read_metrics(path)] == list(range(whole))
        with closing(MetricsWriter(path, keep=9)) as writer:
            writer.write(record(9))
        assert [item["step"] for item in read_metrics(path)] == [*range(whole), 9]


def test_a_writer_truncates_the_file_by_default(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    for step in range(2):
        with closing(MetricsWriter(path)) as writer:
            writer.write(record(step))
    assert [item["step"] for item in read_metrics(path)] == [1]


@pytest.mark.parametrize("keep", [0, 1, 3, 5, 9])
def test_going_on_from_a_step_has_each_step_once(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        for step in range(1, 6):
            writer.write({**record(step), "train/loss": 0.5})
            writer.write({**record(step), "val/loss": 0.5})
    with closing(MetricsWriter(path, keep=keep)) as writer:
        writer.write({**record(keep), "val/loss": 0.5})  # comes after the checkpoint of its step
    found = [(item["step"], "val/loss" in item) for item in read_metrics(path)]
    trained = range(1, min(keep, 5) + 1)
    expected = [
        (step, val) for step in trained for val in (False, True) if (step, val) != (keep, True)
    ]
    assert found == [*expected, (keep, True)]


def test_each_record_is_there_at_once_and_scalars_are_unwrapped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        writer.write(record(1, loss=np.float32(0.5), count=np.int64(3)))
        assert read_metrics(path)[0]["loss"] == 0.5
        assert read_metrics(path)[0]["count"] == 3


def test_a_tail_sees_half_a_line_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    path.write_text('{"step": 1}\n{"st')
    assert tail.poll() == [newest(path)] == [{"step": 1}]
    with open(path, "a") as file:
        file.write('ep": 2}\n')
    assert tail.poll() == [{"step": 2}]
    assert tail.poll() == []
    path.write_text('{"step": 7}\n')  # the run was overwritten
    assert tail.poll() == [{"step": 7}]


def test_a_tail_does_not_tell_again_what_a_restart_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}, "time": {step}.5}}\n' for step in range(1, 7)]
    path.write_text("".join(lines))
    tail = MetricsTail(path)
    assert len(tail.poll()) == 6
    path.write_text("".join(lines[:3]))
    assert tail.poll() == []
    with open(path, "a") as file:
        file.write('{"step": 4, "time": 9.5}\n')
    assert tail.poll() == [{"step": 4, "time": 9.5}]
    path.write_text(lines[0] + '{"step": 2, "time": 11.5}\n')  # and both since the last look
    assert tail.poll() == [{"step": 2, "time": 11.5}]
    # since the last poll, the file shrank, and then grew beyond its old size
    news = [f'{{"step": {step}, "time": {step}.25}}\n' for step in range(2, 30)]
    path.write_text("".join([lines[0], *news]))
    assert [item["step"] for item in tail.poll()] == [*range(2, 30)]
    path.write_text("")
    assert tail.poll() == tail.poll() == []


def test_a_tail_reads_a_long_file_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_files, "_MOST_AT_ONCE", 50)
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}, "time": {step}.5}}\n' for step in range(1, 40)]
    lines[20] = '{"step": 21, "time": ' + 80 * "1" + "}\n"  # longer than a piece
    path.write_text("".join(lines))
    tail = MetricsTail(path)
    pieces = list(iter(tail.poll, []))
    assert len(pieces) > 5
    assert [item["step"] for piece in pieces for item in piece] == list(range(1, 40))
    path.write_text("".join(lines[:30]) + '{"step": 31, "time": 50.5}\n')
    assert tail.poll() == [{"step": 31, "time": 50.5}]
    tail = MetricsTail(path)
    tail.skip()
    assert tail.poll() == []
    assert newest(path) == {"step": 31, "time": 50.5}
    path.write_text("".join(lines[:20]))
    assert tail.poll() == []


@pytest.mark.parametrize("bad", ["", "{", "[1]", "3", "nonsense", "[" * 100_000])
def test_a_damaged_line_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + bad + '\n{"step": 2}\n')
    with pytest.raises(DataError) as caught:
        read_metrics(path)
    assert str(caught.value.where).endswith("metrics.jsonl: line 2")
    assert [item["step"] for item in MetricsTail(path).poll()] == [1, 2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_says_so() -> None:
    writer = MetricsWriter(Path("/dev/full"))
    writer.write(record(1))
    assert writer.waiting is not None
    with pytest.raises(TrainingError, match="full"):
        writer.close()


def test_records_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up in the middle of a record, and stays full for a while."""
    path = tmp_path / "metrics.jsonl"
    room = [20]
    write = os.write

    def limited(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(file, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", limited)
    writer = MetricsWriter(path)
    for step in (1, 2, 3):
        writer.write(record(step))
    assert writer.waiting is not None
    room[0] = 10**6
    writer.write(record(4))
    assert writer.waiting is None
    writer.close()
    assert [entry["step"] for entry in read_metrics(path)] == [1, 2, 3, 4]


def test_there_is_a_limit_to_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raygnn.runs.metrics_files._MOST_WAITING", 1000)
    writer = MetricsWriter(Path("/dev/full"))

    def fill() -> None:
        for step in range(100):
            writer.write(record(step))

    with pytest.raises(TrainingError, match="full"):
        fill()
