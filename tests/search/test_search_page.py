"""``search.html``: what it shows of the trials, and that a browser draws it."""

from __future__ import annotations

from pathlib import Path

import pytest

from raygnn.config.load import load_config
from raygnn.search import search_page as module
from raygnn.search.record import SearchRecord
from raygnn.search.search_page import write_page
from tests.support.browser import Browser
from tests.support.small_jobs import job

SETTINGS = [
    {"train.lr": 10.0**-number, "model.kind": ("gcn", "sage<b>")[number % 2]} for number in range(8)
]


@pytest.fixture
def record(tmp_path: Path) -> SearchRecord:
    space = {"train.lr": {"uniform": [0, 1]}, "model.kind": {"choice": ["gcn", "sage"]}}
    config = load_config(job(tmp_path, search={"space": space}))
    found = SearchRecord.open(tmp_path, config, ("val/f1", "max"), SETTINGS, resume=False)
    found.write()
    return found


@pytest.mark.long
def test_the_page_shows_trials_best_so_far_settings_and_importance(
    record: SearchRecord, tmp_path: Path
) -> None:
    assert "8" in write_page(tmp_path).read_text()  # before a trial has a value, too
    for number, value in enumerate([0.5, 0.4, 0.7, 0.6, 0.65]):
        record.update(number, status="done", value=value, ended=1e9 - number)
    record.update(5, status="stopped", value=0.9)
    record.update(6, status="failed", error="<i>no memory</i>")
    page = write_page(tmp_path)
    assert "t006: &lt;i&gt;no memory&lt;/i&gt;" in page.read_text()
    with Browser(tmp_path / "browser") as browser:
        browser.open(page)
        assert browser.complaints == []
        lines = "document.querySelectorAll('#chart-{} .scatterlayer .trace').length"
        assert browser.ask(lines.format("settings")) == 6
        assert browser.ask("document.querySelectorAll('#chart-importance .point').length") == 2
        # by the time of their ends, the last one ended first
        data = "JSON.parse(document.getElementById('data').textContent)['over-time'].traces[{}]"
        assert browser.ask(data.format(0) + ".y") == [0.65, 0.65, 0.7, 0.7, 0.7]
        assert browser.ask(data.format(1) + ".y") == [0.65, 0.6, 0.7, 0.4, 0.5]
        assert browser.ask("document.querySelectorAll('#trials tbody tr').length") == 8
        assert browser.ask("document.querySelectorAll('b').length") == 0


def test_without_optuna_the_page_says_what_it_lacks(
    record: SearchRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        record.update(number, status="done", value=0.1 * number, ended=1e9)
    assert "raygnn[optuna]" not in write_page(tmp_path).read_text()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert "raygnn[optuna]" in write_page(tmp_path).read_text()
