"""Advice at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.errors import ConfigError
from raygnn.runs.advice import advise
from raygnn.runs.metrics_files import RANKS
from raygnn.runs.report.source import MOST_OF_RANKS, read_some
from raygnn.runs.run_directory import RunDir


def advice_for(config: Config, run: RunDir, result: dict[str, Any]) -> list[dict[str, Any]]:
    """As JSON types, for the summary; nothing that the configuration refuses."""
    with suppress(Exception):  # it is no part of a run, which has been trained by now
        records = read_some(run.path / RANKS, MOST_OF_RANKS)
        found = advise(config.to_dict(), result, records)
        return [advice.to_dict() for advice in found if _is_possible(config, advice.set)]
    return []


def _is_possible(config: Config, changes: Sequence[str]) -> bool:
    try:
        load_config(config.to_dict(), list(changes))
    except ConfigError:
        return False
    return True
