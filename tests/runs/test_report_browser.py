"""The report as a browser shows it: nothing asked for, nothing complained of, the curves there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from raygnn.runs.run_page import write_report
from tests.support.browser import Browser
from tests.support.made_runs import make_run


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser") / "profile", dark=True) as browser:
        yield browser


@pytest.fixture
def browser(started: Browser) -> Browser:
    started.requests.clear()
    started.complaints.clear()
    return started


def test_a_report_draws_its_curves_alone(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, slow=2, nodes=2)
    page = write_report(run)
    browser.open(page)
    assert [url for url in browser.requests if not url.startswith("data:")] == [page.as_uri()]
    assert browser.complaints == []
    drawn = "document.querySelectorAll('#chart-{} .{}').length"
    assert browser.ask(drawn.format("loss", "scatterlayer .trace .js-line")) == 2
    assert browser.ask(drawn.format("by-rank", "barlayer .trace.bars")) == 8
    assert browser.ask("Number(document.body.dataset.drawn)") == browser.ask(
        "document.querySelectorAll('[data-chart]').length"
    )


def test_what_files_say_stays_text(browser: Browser, tmp_path: Path) -> None:
    bad = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
    run = make_run(
        tmp_path,
        summary={
            "status": "failed",
            "error": bad,
            "metrics": {f"val/{bad}": 0.5},
            "versions": {bad: bad},
            "ranks": [{"rank": 0, "host": bad}, {"rank": 1, "host": "other" + bad}],
        },
    )
    (run / "logs" / "told.jsonl").write_text(json.dumps({"time": 1, "text": bad}) + "\n")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 999, "epoch": 1, "time": 1, f"val/{bad}": 0.5}) + "\n")
    browser.open(write_report(run))
    assert browser.ask("typeof window.broken") == "undefined"
    assert browser.ask("document.querySelector('.error').textContent") == bad
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert [url for url in browser.requests if not url.startswith(("data:", "file:"))] == []


@pytest.mark.parametrize("records", [0, 1])
def test_a_run_with_hardly_a_record_has_a_page(
    browser: Browser, tmp_path: Path, records: int
) -> None:
    browser.open(write_report(make_run(tmp_path, ranks=1, records=records)))
    assert browser.complaints == []
    there = browser.ask("document.querySelectorAll('#training [data-chart]').length")
    assert there == (3 if records else 0)
