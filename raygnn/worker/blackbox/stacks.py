"""What all threads of this process are doing: samples of their stacks, places only, no values."""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

_DEPTH = 40  # frames of a stack, the innermost ones
_THREADS = 64
_RAYGNN = str(Path(__file__).resolve().parents[2])
_LIBRARIES = ("site-packages", "dist-packages")
_STDLIB = sysconfig.get_paths()["stdlib"]


def whose(file: str, module: str, own: Collection[str]) -> str:
    """Whose code a frame runs: ``user``, ``raygnn`` or ``library``.

    Args:
        own: top-level packages that are the user's, wherever they are installed.
    """
    if module.partition(".")[0] in own:
        return "user"
    if file.startswith(_RAYGNN):
        return "raygnn"
    if file.startswith(("<", _STDLIB)) or any(name in file for name in _LIBRARIES):
        return "library"
    return "user"


def sample(
    roles: Mapping[int, str], own: Collection[str] = (), *, times: int = 4, pause: float = 0.1
) -> list[dict[str, Any]]:
    """Every thread's name, role, stack and where it was in each of a few samples.

    Args:
        roles: thread id → ``training``, ``prefetch``, …
        times: samples, ``pause`` seconds apart.

    Returns:
        A dict for each thread: ``name``, ``role``, ``user`` and ``raygnn`` (the innermost frame
        of each kind, or None), ``frames`` (innermost first) and ``samples`` (the innermost frame
        of all, of each sample); a frame is ``{file, line, function, whose}``.
    """
    mine = threading.get_ident()
    found: dict[int, dict[str, Any]] = {}
    for number in range(times):
        if number:
            time.sleep(pause)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, top in list(sys._current_frames().items())[:_THREADS]:
            if ident == mine:
                continue  # who asks; what it did before, its traceback tells
            frames = _frames(top, own)
            thread = found.setdefault(ident, {"samples": []})
            thread["name"], thread["role"] = names.get(ident, "?"), roles.get(ident, "")
            for kind in ("user", "raygnn"):
                thread[kind] = next((frame for frame in frames if frame["whose"] == kind), None)
            thread["frames"] = frames
            thread["samples"].append(f"{frames[0]['file']}:{frames[0]['line']}")
    return list(found.values())


def _frames(top: FrameType, own: Collection[str]) -> list[dict[str, Any]]:
    frames: list[dict[str, Any]] = []
    frame: FrameType | None = top
    while frame is not None and len(frames) < _DEPTH:
        code = frame.f_code
        frames.append(
            {
                "file": code.co_filename,
                "line": frame.f_lineno,
                "function": code.co_name,
                "whose": whose(code.co_filename, str(frame.f_globals.get("__name__")), own),
            }
        )
        frame = frame.f_back
    return frames
