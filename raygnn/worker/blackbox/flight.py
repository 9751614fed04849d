"""This rank's last collectives, from torch's flight recorder, as plain JSON.

torch's own reader of these traces fails on those of gloo, which have no finishing times: what a
collective came to is seen from ``retired`` alone there.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Collection
from typing import Any

from raygnn.worker.blackbox.stacks import whose

_LAST = 60  # entries of each process group
_GROUPS = 8
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")  # of gloo and others, of NCCL


def collectives(own: Collection[str] = ()) -> list[dict[str, Any]]:
    """The last collectives of each process group, oldest first.

    Returns:
        Dicts of ``group``, ``seq`` (counts a group's collectives, alike on all ranks), ``op``,
        ``inputs`` and ``outputs`` (each ``{sizes, dtypes}``), ``created`` (seconds since the
        epoch), ``pending`` and ``at`` (the innermost frame of the user's, else of raygnn's).
    """
    kept: dict[str, int] = {}
    found = []
    for entry in reversed(_entries(stacks=True)):
        group = _group(entry)
        if entry.get("is_p2p") or (group not in kept and len(kept) == _GROUPS):
            continue
        kept[group] = kept.get(group, 0) + 1
        if kept[group] <= _LAST:
            found.append(_plain(entry, own))
    return found[::-1]


def longest_wait() -> float:
    """Seconds since the oldest collective began that is still under way; 0 when none is."""
    begun = [e["time_created_ns"] for e in _entries(stacks=False) if _pending(e)]
    return time.time() - min(begun) / 1e9 if begun else 0.0


def _entries(*, stacks: bool) -> list[dict[str, Any]]:
    torch = sys.modules.get("torch")  # where nobody imported it, there are no collectives
    if torch is None or not torch.distributed.is_available():
        return []
    entries: list[dict[str, Any]] = []
    for name in _DUMPS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is None:
            continue
        try:
            trace = pickle.loads(dump(True, stacks, False))  # of this process: plain values
        except Exception:  # it differs between versions, and what we are after is another error
            continue
        entries += trace.get("entries") or []
    return sorted(entries, key=lambda entry: entry.get("time_created_ns", 0))


def _pending(entry: dict[str, Any]) -> bool:
    return not entry.get("retired") and entry.get("state") != "completed"


def _group(entry: dict[str, Any]) -> str:
    return str((entry.get("process_group") or ["?"])[0])


def _plain(entry: dict[str, Any], own: Collection[str]) -> dict[str, Any]:
    at = {}  # the innermost frame of each kind
    for frame in reversed(entry.get("frames") or []):
        kind = whose(frame["filename"], "", own)
        place = {"file": frame["filename"], "line": frame["line"], "function": frame["name"]}
        at[kind] = {**place, "whose": kind}
    return {
        "group": _group(entry),
        "seq": entry.get("collective_seq_id"),
        "op": entry.get("profiling_name"),
        "inputs": _tensors(entry, "input"),
        "outputs": _tensors(entry, "output"),
        "created": entry.get("time_created_ns", 0) / 1e9,
        "pending": _pending(entry),
        "at": at.get("user") or at.get("raygnn"),
    }


def _tensors(entry: dict[str, Any], side: str) -> dict[str, Any]:
    return {"sizes": entry.get(f"{side}_sizes"), "dtypes": entry.get(f"{side}_dtypes")}
