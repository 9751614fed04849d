"""What to change in a run's configuration, from what was measured: `advise`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raygnn.runs.advice.evidence import Evidence
from raygnn.runs.advice.rules import RULES, Advice

__all__ = ["Advice", "advise"]


def advise(
    config: Mapping[str, Any], summary: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
) -> list[Advice]:
    """What would make a run faster, or keep its results, the most urgent first.

    Args:
        config: resolved, as JSON types.
        summary: of the run; what it lacks is not judged.
        ranks: records of ``ranks.jsonl``, see `raygnn.runs.metrics_files`.
    """
    evidence = Evidence.of(config, summary, ranks)
    if evidence is None:
        return []
    found = [advice for rule in RULES for advice in rule(evidence)]
    return sorted(found, key=lambda advice: (advice.severity != "warning", -advice.gain))
