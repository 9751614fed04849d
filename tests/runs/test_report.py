"""The report of a run: what is in it, whatever is left of the run."""

from __future__ import annotations

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from raygnn.cli import main
from raygnn.errors import InputError
from raygnn.runs import charts
from raygnn.runs.charts import of_ranks, thin
from raygnn.runs.display import NullDisplay
from raygnn.runs.metrics_files import STEP
from raygnn.runs.run import Run
from raygnn.runs.run_directory import RunDir
from raygnn.runs.run_page import Source, as_json, read_some, reported, write_report
from tests.support.made_runs import make_run, write_records


class _Text(HTMLParser):
    """The text of a page without its scripts, and the data of its charts."""

    def __init__(self, page: Path):
        super().__init__()
        self.text = ""
        self.data: dict[str, Any] = {}
        self._within: str | None = None
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._within = "data" if ("id", "data") in attrs else tag

    def handle_data(self, data: str) -> None:
        if self._within == "data":
            self.data = json.loads(data)
            self._within = None
        elif self._within not in ("script", "style"):
            self.text += data


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path, ranks=4, slow=2, nodes=2)


def test_the_page_tells_of_all_there_is(run: Path) -> None:
    file = write_report(run)
    page = _Text(file)
    for said in (
        "done",
        "0.8125",
        "15,200",
        "2 starts",
        "cache_space",
        "942 MiB",
        "attempt 2 of at most 4",
        "rank 1 on host1 slows down the other ranks",
        "Intel Xeon",
        "24.0 GiB",
        "2.13.0",
        "lr: 0.003",
        "203,000",  # nodes in the parts together
    ):
        assert said in page.text, said
    assert {"loss", "metrics", "rate", "speed", "split", "by-rank", "loader"} <= set(page.data)
    assert {"cpu", "rss", "sent"} <= set(page.data)
    assert "gpu" not in page.data  # null everywhere
    assert "disk" not in page.text  # empty everywhere
    markup = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", file.read_text(), flags=re.DOTALL)
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", markup), "it loads something"
    assert "default-src 'none'" in markup


def test_the_slow_rank_stands_out(run: Path) -> None:
    table = of_ranks(Source.read(run).ranks, "seconds")
    chart = charts.by_rank(table, ["backward"], ["host0", "host1"])
    (bars,) = chart.traces
    assert bars["y"] == ["rank 0, host0", "rank 1, host1", "rank 2", "rank 3"]
    assert bars["x"].index(max(bars["x"])) == 2
    assert max(bars["x"]) > 1.3 * max(bars["x"][:2] + bars["x"][3:])


def test_a_steps_parts_add_up_to_its_time(run: Path) -> None:
    records = Source.read(run).ranks
    chart = charts.over_time(of_ranks(records, "seconds"), list(STEP)[:4])
    drawn = sum(trace["y"][0] for trace in chart.traces)
    seconds = records[0]["seconds"]
    expected = sum(sum(seconds[part]) / 4 for part in list(STEP)[:4])
    assert drawn == pytest.approx(expected, rel=1e-3)


def test_many_windows_are_averaged() -> None:
    """A bar is the mean of consecutive windows; unknown values count neither as 0 nor otherwise."""
    records = [{"step": n, "seconds": {"wait": [float(n), None]}} for n in range(1000)]
    table = of_ranks([*records, {"step": 1000, "seconds": {"wait": [None]}}], "seconds")
    (bars,) = charts.over_time(table, ["wait"]).traces
    assert len(bars["x"]) == len(bars["y"]) == 400
    assert bars["x"][-1] == 1000
    assert sum(bars["y"]) / 400 == pytest.approx(499.5, abs=1)


def test_losses_of_several_tasks_are_losses() -> None:
    """Tasks may have any names."""
    records: list[dict[str, Any]] = [
        {"step": 1, "train/loss": 3.0, "train/lr-a/loss": 1.0, "train/loss/loss": 2.0},
        {"step": 1, "train/lr": 0.1},
        {"step": 2, "val/lr-a/accuracy": 0.5, "val/lr-a/loss": 0.9, "val/loss/mrr": 0.1},
    ]
    drawn = {
        chart.name: [trace["name"] for trace in chart.traces]
        for chart in charts.training_charts(records)
    }
    losses = ["training", "lr-a, training", "loss, training", "lr-a, validation"]
    assert drawn["loss"] == losses
    assert drawn["rate"] == ["lr"]
    assert drawn["metrics"] == ["lr-a/accuracy, validation", "loss/mrr, validation"]


def test_long_curves_keep_their_spikes() -> None:
    points = [(step, 1.0) for step in range(100_000)]
    points[31_337] = (31_337, 99.0)
    points[77_777] = (77_777, -5.0)
    kept = thin(points)
    assert len(kept) <= 2000
    assert {(31_337, 99.0), (77_777, -5.0), (0, 1.0), (99_999, 1.0)} <= set(kept)
    assert kept == sorted(kept)
    gone = thin([(step, math.nan) for step in range(5000)])
    assert all(math.isnan(value) for _, value in gone)


def test_a_page_is_less_than_half_of_plotlys_script(run: Path) -> None:
    assert write_report(run).stat().st_size < 2.2e6


def test_many_ranks_and_records_make_a_small_page(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=64, records=400, nodes=8)
    page = write_report(run)
    data = _Text(page).data
    assert len(json.dumps(data)) < 3e6
    curve = data["loss"]["traces"][0]
    assert len(curve["x"]) <= 2000


def test_ranks_may_come_and_go(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, records=3)
    write_records(run / "logs", ranks=4, records=3)
    with open(run / "ranks.jsonl", "a") as file:
        file.write((run / "logs" / "ranks.jsonl").read_text())
    waits = of_ranks(Source.read(run).ranks, "seconds")["wait"]
    assert waits.shape == (6, 4)
    assert math.isnan(waits.iloc[0, 3])
    assert set(Run(run).ranks["rank"]) == {0, 1, 2, 3}
    write_report(run)


def test_losses_that_are_no_numbers_are_gaps(run: Path) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 700, "epoch": 9, "time": 9, "train/loss": null}\n')
    chart = charts.loss(Source.read(run).records)
    assert chart is not None
    assert chart.traces[0]["y"][-1] is None
    assert "1 of the records" in chart.about
    page = _Text(write_report(run))
    assert "training lossnan" in re.sub(r"\s*\n\s*", "", page.text)


@pytest.mark.parametrize(
    "damage",
    [
        {"metrics.jsonl": '{"step": 1, "time": 1, "epo'},
        {"metrics.jsonl": "nonsense\n[]\n{}\n"},
        {"metrics.jsonl": "", "ranks.jsonl": ""},
        {"ranks.jsonl": '{"step": 1, "time": 1, "sec'},
        {"summary.json": "{"},
        {"summary.json": "{}", "preflight.json": "{}", "partition.json": "{}"},
        {"config.yaml": "# raygnn run\n["},
        dict.fromkeys(("metrics.jsonl", "ranks.jsonl", "summary.json", "preflight.json"), None),
    ],
)
def test_whatever_is_left_has_a_page(run: Path, damage: dict[str, str | None]) -> None:
    for name, content in damage.items():
        if content is None:
            (run / name).unlink()
        else:
            (run / name).write_text(content)
    page = _Text(write_report(run))
    assert "made" in page.text
    assert ("not readable as JSON" in page.text) == (damage == {"summary.json": "{"})


def test_a_very_long_file_is_read_in_part(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "train/loss": 1.0}) for step in range(1000)]
    lines[501] = json.dumps({"step": 501, "val/f1": 1.0})
    file.write_text("\n".join(lines) + "\n")
    found = read_some(file, file.stat().st_size // 10, (b'"val/',))
    assert 50 <= len(found) <= 110
    assert {501, 999} <= {record["step"] for record in found}
    # also with evaluations only
    file.write_text('{"step": 1, "val/f1": 1}\n' * 1000)
    assert len(read_some(file, file.stat().st_size // 10, (b'"val/',))) < 300


def test_fifos_are_not_read(run: Path) -> None:
    for name in ("metrics.jsonl", "ranks.jsonl", "logs/told.jsonl"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert "No records yet" in _Text(write_report(run)).text


def test_a_run_without_a_configuration_has_a_page(run: Path) -> None:
    (run / "config.yaml").unlink()
    assert main(["report", str(run)]) == 0
    assert "0.8125" in _Text(run / "report.html").text
    assert main(["report", str(run.parent)]) == 2


def test_a_page_is_replaced_whole_or_not_at_all(run: Path, tmp_path: Path) -> None:
    page = write_report(run)
    before = page.read_bytes()
    assert write_report(run) == page
    assert len(page.read_bytes()) == len(before)
    with pytest.raises(InputError, match="cannot be written"):
        write_report(run, tmp_path / "nowhere" / "report.html")
    assert sorted(p.name for p in run.glob(".*report*")) == []


def test_no_text_ends_a_script() -> None:
    text = as_json({"</script><script>": "a\u2028b & c"})
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == {"</script><script>": "a\u2028b & c"}


def test_the_verb(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["report", "made", "--storage", str(run.parent)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run), "--out", "other.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(tmp_path / "other.html")}
    assert (tmp_path / "other.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(tmp_path)]) == 2


def test_ranks_as_a_table(run: Path) -> None:
    table = Run(run).ranks
    assert list(table.columns) == ["step", "time", "rank", "group", "name", "value"]
    backward = table[(table["name"] == "backward") & (table["step"] == 1)]
    assert list(backward["rank"]) == [0, 1, 2, 3]
    assert backward["value"].idxmax() == backward.index[2]
    (run / "ranks.jsonl").unlink()
    assert len(Run(run).ranks) == 0


def test_notes_are_recorded_until_the_end_of_the_run(tmp_path: Path) -> None:
    show = NullDisplay()
    with RunDir(tmp_path, "run") as run, reported(run, show) as record_notes:
        show.note("before it began")
        run.begin({"name": "run"})
        record_notes()
        show.note("after it began")
    texts = [event["text"] for event in Source.read(run.path).events]
    assert texts[1:] == ["after it began"]
    opened = [os.readlink(entry) for entry in os.scandir("/proc/self/fd")]
    assert not any(name.startswith(str(tmp_path)) for name in opened)
