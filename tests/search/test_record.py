"""``search.json``: the best trial, and what a resume accepts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from ray.tune.experiment import Trial
from ray.tune.schedulers import MedianStoppingRule, TrialScheduler

from raygnn.config.load import load_config
from raygnn.errors import InputError
from raygnn.runs.run import open_run
from raygnn.search.record import SearchRecord, SearchResult
from raygnn.search.tune_thread import TrialActor, TuneThread
from tests.support.small_jobs import job

SETTINGS = [{"train.lr": 0.1}, {"train.lr": 0.2}, {"train.lr": 0.3}]


def record(path: Path, mode: str = "max", **search: Any) -> SearchRecord:
    search = {"space": {"train.lr": {"choice": [0.1, 0.2, 0.3]}}, **search}
    config = load_config(job(path, search=search))
    return SearchRecord.open(path, config, ("val/loss", mode), SETTINGS, resume=True)


@pytest.mark.parametrize(("mode", "best"), [("max", "t001"), ("min", "t000")])
def test_the_best_trial_is_a_completed_one(mode: str, best: str, tmp_path: Path) -> None:
    found = record(tmp_path, mode)
    assert found.best is None
    found.update(2, status="stopped", value=9.0 if mode == "max" else -9.0)
    assert found.best is None
    found.update(0, status="done", value=1.0)
    found.update(1, status="done", value=2.0)
    assert found.best is not None
    assert found.best["id"] == best
    assert json.loads((tmp_path / "search.json").read_text())["best"] == best
    table = SearchResult(tmp_path).trials
    assert list(table["status"]) == ["done", "done", "stopped"]
    assert record(tmp_path, mode).best == found.best


def test_a_resume_needs_the_same_trials(tmp_path: Path) -> None:
    record(tmp_path).write()
    with pytest.raises(InputError, match="began with another space"):
        record(tmp_path, trials=2)
    with pytest.raises(InputError, match="began with another space"):
        record(tmp_path, space={"train.lr": {"choice": [0.1, 0.2]}})
    (tmp_path / "search.json").unlink()
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(InputError, match="a run, not a search"):
        record(tmp_path)


def test_a_search_without_a_completed_trial_has_no_run_to_open(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# raygnn run: the configuration as it was resolved\n")
    record(tmp_path).write()
    with pytest.raises(InputError, match="no completed trial"):
        open_run(tmp_path)


def trial_actor(path: Path, mode: str = "max") -> TrialActor:
    """Return the first trial's actor, in this process."""
    actor = TrialActor.__new__(TrialActor)  # of which Ray Tune makes an actor
    trial = {"trial": {"number": 0, "settings": {}}}
    actor.setup(trial, load_config(job(path)), None, ("val/mrr", mode), [])
    return actor


@pytest.mark.parametrize(("mode", "wanted"), [("max", [1.0, 3.0, 3.0]), ("min", [1.0, 1.0, 0.5])])
def test_trials_are_compared_by_their_best_value_so_far(
    mode: str, wanted: list[float], tmp_path: Path
) -> None:
    values = [None, 1.0, math.nan, 3.0, 0.5]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrialActor, "_train", lambda self: None)
        actor = trial_actor(tmp_path, mode)
    actor._take([{"epoch": epoch, "val/mrr": value} for epoch, value in enumerate(values)])
    found = [actor.step() for _ in wanted]
    assert [one["val/mrr"] for one in found] == wanted
    assert [one["epoch"] for one in found] == [2, 4, 5]
    (tmp_path / "test" / "trials").mkdir(parents=True)
    (tmp_path / "test" / "trials" / ".stop").touch()
    with pytest.raises(KeyboardInterrupt):
        actor._take([])


def test_a_process_begins_another_trial_once_its_last_one_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def train(actor: TrialActor) -> None:
        assert actor._stopped.wait(60)
        ended.append(actor._run_dir.name)

    monkeypatch.setattr(TrialActor, "_train", train)
    actor = trial_actor(tmp_path)
    assert actor.reset_config({"trial": {"number": 1, "settings": {}}})
    assert ended == ["t000"]
    actor.cleanup()
    assert ended == ["t000", "t001"]


def test_the_median_rule_stops_a_worse_trial_and_pauses_none(tmp_path: Path) -> None:
    """Ray's rule would pause a trial while others wait, which ours cannot do."""
    section = {"space": {"train.lr": {"uniform": [0.1, 0.2]}}, "scheduler": "median"}
    config = load_config(job(tmp_path, search=section))
    rule = TuneThread(Mock(), config, None, ("val/f1", "max"), 2)._scheduler()
    assert isinstance(rule, MedianStoppingRule)
    rule.set_search_properties("val/f1", "max")
    controller = Mock(get_live_trials=lambda: [Mock(status=Trial.PENDING)])

    def decide(trial: Any, value: float) -> list[str]:
        results = [{"epoch": epoch, "val/f1": value} for epoch in (1, 2, 3)]
        return [rule.on_trial_result(controller, trial, result) for result in results]

    for value in (0.5, 0.6, 0.7):
        assert decide(Mock(), value) == [TrialScheduler.CONTINUE] * 3
    assert decide(Mock(), 0.65) == [TrialScheduler.CONTINUE] * 3
    worse = rule.on_trial_result(controller, Mock(), {"epoch": 1, "val/f1": 0.1})
    assert worse == TrialScheduler.STOP
