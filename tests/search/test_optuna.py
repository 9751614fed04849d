"""Optuna's suggestions: numbered trials, the same for the same seed and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

from ray.tune.search.optuna import OptunaSearch

from raygnn.config.load import load_config
from raygnn.search import tune_thread as module
from tests.support.small_jobs import job

SPACE = {"train.lr": {"loguniform": [1e-4, 0.1]}, "model.hidden": {"choice": [8, 16]}}


def suggestions(path: Path, search: dict[str, Any], seed: int) -> OptunaSearch:
    """Return Optuna's suggestions outside of a search."""
    module.TuneThread.current = Mock()
    searcher = module._Optuna(seed=seed)
    section = load_config(job(path, search=search)).search
    assert section is not None
    searcher.set_search_properties("val/accuracy", "max", module._domains(section))
    return searcher


def test_suggestions(tmp_path: Path) -> None:
    search = {"space": SPACE, "algorithm": "optuna", "trials": 3}
    found = []
    for seed in (7, 7, 8):
        searcher = suggestions(tmp_path, search, seed)
        found.append([searcher.suggest(f"t00{number}")["trial"] for number in range(3)])
        told = module.TuneThread.current.record.add.call_args_list
        assert [call.args[0] for call in told] == [0, 1, 2]
        assert [call.args[1] for call in told] == [trial["settings"] for trial in found[-1]]
    assert found[0] == found[1] != found[2]
    for trial in found[0]:
        assert 1e-4 <= trial["settings"]["train.lr"] <= 0.1
        assert trial["settings"]["model.hidden"] in (8, 16)
