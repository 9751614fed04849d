"""``ranks.jsonl``: what each rank did and used, a line at each record of training.

A line has ``step``, ``time`` and groups of values, each a list with one per rank: ``seconds`` (of
a batch: what a step consists of, and what the loader's thread does meanwhile), ``bytes`` (of a
batch), ``use`` (share of the rank's CPUs, of its GPU), ``memory`` (bytes), ``network`` (bytes per
second of the rank's host). What is not known is null or absent; the number of ranks may change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

RANKS = "ranks.jsonl"

# What a step consists of, in order; "compute" is of runs that were not told apart further.
STEP_PARTS = (
    "wait",
    "transfer",
    "forward",
    "backward",
    "compute",
    "communicate",
    "peers",
    "optimizer",
    "rest",
)
LOADER_PARTS = ("sample", "features", "exchange")  # of the thread beside it
SHARED_PARTS = ("communicate", "peers")  # time that a rank spends for or because of others
GROUPS = ("seconds", "bytes", "use", "memory", "network")


def values(record: Mapping[str, Any], group: str) -> dict[str, list[float]]:
    """Name → a number for each rank, NaN where there is none; what is no such thing is left out."""
    found = record.get(group)
    if not isinstance(found, dict):
        return {}
    return {
        str(name): [number(value) for value in ranks]
        for name, ranks in found.items()
        if isinstance(ranks, list)
    }


def number(value: Any) -> float:
    """The value, NaN where it is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def long(records: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each number: ``step``, ``time``, ``rank``, ``group``, ``name``, ``value``."""
    for record in records:
        at = {"step": record.get("step"), "time": number(record.get("time"))}
        for group in GROUPS:
            for name, ranks in values(record, group).items():
                for rank, value in enumerate(ranks):
                    yield {**at, "rank": rank, "group": group, "name": name, "value": value}
