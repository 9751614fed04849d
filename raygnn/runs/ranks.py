"""``ranks.jsonl``: what each rank did and used, and the parts that its time is split into.

A line is about a window of some steps::

    {"step": 120, "time": 31.2, "batches": 10,
     "seconds": {"wait": [0.001, 0.002], "forward": [...], ...},
     "bytes": {"gradients": [...], "exchange": [...]},
     "use": {"cpu": [...], "gpu": [...]},
     "memory": {"rss": [...], "gpu": [...], "gpu_share": [...]},
     "network": {"sent": [...], "received": [...]}}

with a value of each rank in rank order: seconds and bytes of a batch (mean over the window), busy
share of the rank's CPUs and of its GPU, bytes that its process and its GPU hold and the share of
the GPU's memory, bytes a second of its host. What is not known is
null or absent; the number of ranks may change.

On CPUs the parts are measured by the host's clock, on GPUs along the stream that computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

RANKS = "ranks.jsonl"

# In the thread that trains, in the order of a step; they sum to its time.
STEP = {
    "wait": "wait for the next batch",
    "transfer": "copy it to the device",
    "forward": "forward pass and loss",
    "backward": "backward pass, and the exchange of gradients hidden behind it",
    "communicate": "exchange of gradients that nothing hides",
    "peers": "wait for slower ranks in that exchange",
    "optimizer": "checks and clipping of the gradient, optimizer",
    "rest": "records, comparisons between ranks, other callbacks",
}

# In the thread that prepares batches, hidden as long as there is no wait.
LOADER = {
    "sample": "choose seeds and draw neighbours",
    "features": "gather features",
    "exchange": "structure and features of other ranks",
}

COMPUTE = ("transfer", "forward", "backward", "optimizer", "rest")  # what a rank does on its own
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
