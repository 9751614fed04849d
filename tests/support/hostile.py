"""Hostile input in place of data: pickles that execute code or fill the memory.

Beside them, a process of its own that gives commands such input, and what must come of each.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
MOST_MEMORY = 2 * 2**30  # bytes, torch included; loading the hostile input would need far more
MOST_SECONDS = 120


class Runs:
    """An object whose pickle calls a function when an ordinary unpickler reads it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


class _Reconstructed:
    """numpy's own way to make an array, with what is no array to be made."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        make = np.empty(0).__reduce__()[0]
        return (
            make,
            (_Subclass, (0,), b"b"),
            (1, (1,), np.dtype("O"), False, [_system(self.marker)]),
        )


class _Subclass(np.ndarray[Any, Any]):
    pass


class _CopyReg:
    """``copyreg.__newobj_ex__`` and a state that a ``__setstate__`` of others is called with."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        import copyreg

        made: Any = copyreg
        return made.__newobj_ex__, (Runs, (os.system, f"touch {self.marker}"), {}), {"a": 1}


def _system(marker: Path) -> Runs:
    return Runs(os.system, f"touch {marker}")


def _partial(marker: Path) -> Any:
    inner = functools.partial(os.system)
    return Runs(functools.partial(inner, f"touch {marker}"))


def _laughs() -> bytes:
    """Lists of ten times the list before, twenty deep: 200 bytes that are 10^20 values."""
    code = io.BytesIO()
    code.write(b"\x80\x02]q\x00(" + b"K\x01" * 10 + b"e")
    for level in range(1, 21):
        code.write(b"]q" + bytes([level]) + b"(" + b"h" + bytes([level - 1]))
        code.write((b"h" + bytes([level - 1])) * 9 + b"e")
    return code.getvalue() + b"."


def bombs(marker: Path) -> dict[str, bytes]:
    """Name → pickle; those that run make the file ``marker``."""
    touch = f"touch {marker}".encode()
    return {
        "system": pickle.dumps(_system(marker), 2),
        "system, new protocol": pickle.dumps(_system(marker), 5),
        "partial": pickle.dumps(_partial(marker), 2),
        "eval": pickle.dumps(Runs(eval, f"open({str(marker)!r}, 'w')"), 2),
        "reconstruct": pickle.dumps(_Reconstructed(marker), 2),
        "copyreg": pickle.dumps(_CopyReg(marker), 4),
        "instance": b"(S'" + touch + b"'\nios\nsystem\n.",
        "object": b"(cos\nsystem\nS'" + touch + b"'\no.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"\x80\x02Pos.system\n.",
        "laughs": _laughs(),
    }


class Outcome(NamedTuple):
    """Result of a command; ``peak`` is its process's peak memory so far in bytes."""

    code: int
    out: str
    err: str
    peak: int = 0


_CHILD = """
import contextlib, io, json, os, resource, sys
from raygnn.cli import main
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code
    # ru_maxrss would begin with the memory of the process that started this one
    lines = open("/proc/self/status").readlines()
    peak = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    print(json.dumps([code, out.getvalue(), err.getvalue(), peak]), flush=True)
"""


def outcomes(commands: Sequence[Sequence[str]], here: Path) -> list[Outcome]:
    """Run commands in a separate process with limits on its memory and time."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(MOST_MEMORY)],
        input=json.dumps([*map(list, commands)]),
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]


def assert_refused(found: Outcome, *fragments: str) -> None:
    """Check for one error of ours, with location, cause and remedy."""
    code, out, err, _ = found
    assert code in (2, 3), (out, err)
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert "→" in err
    assert "Traceback" not in out + err
    assert "internal error" not in err
    assert len(err) < 3000
    for fragment in fragments:
        assert fragment in err, err


def tree(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return everything below a directory, to compare it with a later state."""
    found = {}
    for path in sorted(directory.rglob("*")):
        facts = path.lstat()
        kept = (facts.st_size, facts.st_mtime_ns) if stat.S_ISREG(facts.st_mode) else ()
        found[str(path.relative_to(directory))] = (stat.S_IFMT(facts.st_mode), *kept)
    return found
