"""Stacks of this process's threads, without values, and its last collectives, as plain JSON.

Collectives come from torch's flight recorder, whose own reader fails on traces of gloo: they have
no finishing times, and only ``retired`` shows whether a collective has ended.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from itertools import islice
from types import FrameType
from typing import Any

from raygnn import compat
from raygnn.runs.diagnose.causes import whose_path

_DEPTH = 40  # innermost frames of a stack
_THREADS = 64
_PREFETCH = "raygnn-prefetch"  # name of the prefetch thread


def stacks(training: int, own: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the stacks of all other threads; ``training``: id of the training thread; ``own``: see
    `whose_path`.

    Returns:
        A dict for each thread: ``name``, ``role`` (``training``, ``prefetch`` or nothing) and
        ``frames`` (innermost first), each ``{file, line, function, whose}``.
    """
    mine, names = threading.get_ident(), {t.ident: t.name for t in threading.enumerate()}
    found = []
    for ident, top in list(sys._current_frames().items())[:_THREADS]:
        if ident != mine:  # whose traceback is in the failure record
            name = names.get(ident, "?")
            role = "training" if ident == training else "prefetch" if name == _PREFETCH else ""
            found.append({"name": name, "role": role, "frames": _frames(top, own)})
    return found


def _frames(top: FrameType, own: Sequence[str]) -> list[dict[str, Any]]:
    frames = []
    for frame, line in islice(traceback.walk_stack(top), _DEPTH):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        place = {"file": file, "line": line, "function": name}
        frames.append({**place, "whose": whose_path(file, own)})
    return frames


_LAST = 60  # collectives of each process group
_GROUPS = 8


def collectives(own: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the last collectives of each process group, oldest first.

    Returns:
        Dicts of ``group``, ``seq`` (number within the group, equal on all ranks), ``op``,
        ``inputs`` and ``outputs`` (each ``{sizes, dtypes}``), ``created`` (seconds since the
        epoch), ``pending`` and ``at`` (innermost frame of the user's code, else of raygnn's).
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
    """Return the seconds since the oldest pending collective began; 0 if there is none."""
    begun = [e["time_created_ns"] for e in _entries(stacks=False) if _pending(e)]
    return time.time() - min(begun) / 1e9 if begun else 0.0


def _entries(*, stacks: bool) -> list[dict[str, Any]]:
    torch = sys.modules.get("torch")  # without it there are no collectives
    if torch is None or not torch.distributed.is_available():
        return []
    entries: list[dict[str, Any]] = []
    for dump in compat.flight_recorders():
        try:
            trace = pickle.loads(dump(True, stacks, False))  # of this process: plain values
        except Exception:  # formats differ, and the rank's own failure must not be hidden
            continue
        entries += trace.get("entries") or []
    return sorted(entries, key=lambda entry: entry.get("time_created_ns", 0))


def _pending(entry: dict[str, Any]) -> bool:
    return not entry.get("retired") and entry.get("state") != "completed"


def _group(entry: dict[str, Any]) -> str:
    return str((entry.get("process_group") or ["?"])[0])


def _plain(entry: dict[str, Any], own: Sequence[str]) -> dict[str, Any]:
    at = {}  # the innermost frame of each kind
    for frame in reversed(entry.get("frames") or []):
        kind = whose_path(frame["filename"], own)
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
