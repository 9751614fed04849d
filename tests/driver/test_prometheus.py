"""Gauges for Prometheus, and the dashboard that shows them."""

from __future__ import annotations

import json
import math
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raygnn.driver import prometheus
from raygnn.driver.prometheus import GAUGES, MOST_RANKS, Prometheus
from raygnn.runs.run_directory import RunDir
from tests.runs.made_runs import make_run, write_records

DASHBOARD = Path(__file__).resolve().parents[2] / "cluster" / "grafana" / "raygnn.json"

Series = dict[tuple[str, ...], float]


class _Gauge:
    """In place of Ray's: keeps what it is set to."""

    def __init__(self, series: Series, name: str, tags: tuple[str, ...]):
        self._series, self._name, self._tags = series, name, tags

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self._tags)  # Ray refuses any other
        self._series[(self._name, *(tags[key] for key in self._tags))] = value


@pytest.fixture
def series(monkeypatch: pytest.MonkeyPatch) -> Series:
    found: Series = {}

    def gauge(self: Prometheus, name: str) -> Any:
        return _Gauge(found, name, ("run", *GAUGES[name][1]))

    monkeypatch.setattr(prometheus.Prometheus, "_gauge", gauge)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    make_run(tmp_path, "job", ranks=3, records=2)
    with RunDir.create(str(tmp_path), "job", mode="resume") as run:
        yield run


def test_records_and_ranks_become_gauges(run: RunDir, series: Series) -> None:
    follow = Prometheus(run.path, "job")
    follow.export_record(
        {"step": 7, "epoch": 1, "train/loss": 0.5, "val/f1": 0.25, "seeds_per_second": 9.0}
    )
    follow.export_record({"step": 8, "epoch": 1, "train/loss": math.nan})
    follow.export_ranks(starts=2)
    assert series[("raygnn_step", "job")] == 8
    assert series[("raygnn_loss", "job")] == 0.5  # a loss that is no number is no point
    assert series[("raygnn_metric", "job", "val/f1")] == 0.25
    assert series[("raygnn_starts", "job")] == 2
    assert series[("raygnn_ranks", "job")] == 3
    last = json.loads((run.path / "ranks.jsonl").read_text().splitlines()[-1])
    for rank in range(3):
        backward = series[("raygnn_seconds", "job", str(rank), "backward")]
        assert backward == last["seconds"]["backward"][rank]
    assert ("raygnn_use", "job", "0", "gpu") not in series  # null: there is none


def test_ranks_that_are_gone_are_zero(run: RunDir, series: Series) -> None:
    follow = Prometheus(run.path, "job")
    follow.export_ranks(1)
    file = run.path / "ranks.jsonl"
    write_records(run.path / "logs", ranks=1, records=1)
    with open(file, "a") as ranks:
        ranks.write((run.path / "logs" / "ranks.jsonl").read_text())
    follow.export_ranks(1)
    assert series[("raygnn_ranks", "job")] == 1
    assert series[("raygnn_seconds", "job", "2", "backward")] == 0
    assert series[("raygnn_seconds", "job", "0", "backward")] > 0


def test_series_are_bounded(run: RunDir, series: Series) -> None:
    many = {f"part{part}": [1.0] * 1000 for part in range(100)}
    line = json.dumps({"step": 1, "time": 1.0, "seconds": many}) + "\n"
    (run.path / "ranks.jsonl").write_text(line)
    follow = Prometheus(run.path, "job")
    follow.export_record({"step": 1, **{f"val/{name}": 1.0 for name in range(1000)}})
    follow.export_ranks(1)
    assert sum(name[0] == "raygnn_metric" for name in series) == 32
    assert sum(name[0] == "raygnn_seconds" for name in series) == 32 * MOST_RANKS


def test_a_ray_that_refuses_ends_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Prometheus, name: str) -> Any:
        raise RuntimeError("not connected")

    monkeypatch.setattr(prometheus.Prometheus, "_gauge", refuse)
    follow = Prometheus(run.path, "job")
    follow.export_record({"step": 1})
    follow.export_ranks(1)


def test_the_dashboard_shows_what_is_exported() -> None:
    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [variable.get("definition", "") for variable in board["templating"]["list"]]
    names = {name for text in asked for name in re.findall(r"\bray_\w+", text)}
    assert names == {f"ray_{name}" for name in GAUGES}
    for text in asked:
        for name, labels in re.findall(r"ray_(raygnn_\w+)\{([^}]*)\}", text):
            used = set(re.findall(r"(\w+)[=!]", labels))
            assert used <= {"run", *GAUGES[name][1]}, text


def test_the_dashboard_has_grafanas_shape() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["id"] is None  # of one that is to be imported
    assert board["schemaVersion"] >= 36
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    known = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]))) <= known
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert [target["refId"] for target in panel["targets"]] == list("AB")[
            : len(panel["targets"])
        ]


@pytest.mark.system
@pytest.mark.slow
def test_ray_exposes_the_gauges(run: RunDir, shared_ray: None) -> None:
    import ray

    follow = Prometheus(run.path, "job")
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + 90
    wanted = re.compile(r'^ray_raygnn_step\{[^}]*run="job"[^}]*\} 42\.0$', re.MULTILINE)
    said = ""
    while not wanted.search(said):
        assert time.monotonic() < deadline, said[-2000:]
        follow.export_record({"step": 42, "epoch": 1})
        follow.export_ranks(1)
        time.sleep(1)
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                said = answer.read().decode()
        except OSError:  # the node's agent takes longer to start than the node
            pass
    assert re.search(r'^ray_raygnn_seconds\{[^}]*part="backward"[^}]*\}', said, re.MULTILINE)
    assert re.search(r'^ray_raygnn_seconds\{[^}]*rank="2"[^}]*\}', said, re.MULTILINE)
