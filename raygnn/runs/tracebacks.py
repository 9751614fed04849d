"""Frames of tracebacks, the owner of their code, and which frame to report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"\n]+)", line (?P<line>\d{1,9}),? in (?P<function>.+)$', re.M
)
_INNERMOST = 3  # frames of a traceback that has none of the user's
_BECAUSE = "The above exception was the direct cause of the following exception"
_DURING = "During handling of the above exception, another exception occurred"
_OURS = re.compile(
    r"/raygnn/(driver|worker|checkpoint|prediction|search|sampling|tasks|models|graph|runs|config|preflight)/"
)
_LIBRARY = re.compile(r"site-packages/|dist-packages/|/lib(64)?/python3|^<")
# the path of a file up to its package
_BEFORE_PACKAGE = re.compile(
    r"^.*/(?:site|dist)-packages/|^.*/(?=raygnn/)|^.*/lib(?:64)?/python3[^/]*/"
)
_PREPARES = re.compile(r"/raygnn/sampling/|/raygnn/worker/planes/\w+_plane\.py")


@dataclass(frozen=True)
class Frame:
    """Frame of a call stack; ``whose``: owner of its code, ``user``, ``raygnn`` or ``library``. As
    text, paths of files that are not the user's begin with their package."""

    file: str
    line: int
    function: str
    whose: str

    def __str__(self) -> str:
        file = self.file if self.whose == "user" else _BEFORE_PACKAGE.sub("", self.file)
        return f"{file}:{self.line} in {self.function}"

    @property
    def prepares(self) -> bool:
        """True for raygnn's code that prepares batches."""
        return bool(_PREPARES.search(self.file))


def whose_path(file: str, own: Sequence[str] = ()) -> str:
    """Return the owner of a file's code by its path on any machine; ``own``: path suffixes of the
    user's modules."""
    if any(file.endswith(end) for end in own):
        return "user"
    if _OURS.search(file):
        return "raygnn"
    return "library" if _LIBRARY.search(file) else "user"


def own_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return ``/package/module.py`` of each user class or function that a configuration names."""
    files = []
    train = config.get("train")
    callbacks = train.get("callbacks") if isinstance(train, Mapping) else None
    sections = [config.get(name) for name in ("model", "graph", "task")]
    for section in (*sections, callbacks, *(config.get("tasks") or {}).values()):
        for value in (*section, *section.values()) if isinstance(section, Mapping) else ():
            if isinstance(value, str) and re.fullmatch(r"[\w.]+:\w+", value):
                files.append("/" + value.partition(":")[0].replace(".", "/") + ".py")
    return tuple(files)


def frames(trace: str, own: Sequence[str] = ()) -> list[Frame]:
    """Return the frames of a traceback's first cause, in the order of the text. Of exceptions
    raised ``from`` each other the first counts; of those raised while another was handled, the
    last, which is unrelated to it."""
    block = trace.split(_DURING)[-1].split(_BECAUSE)[0]
    return [
        Frame(m["file"], int(m["line"]), m["function"].strip(), whose_path(m["file"], own))
        for m in _FRAME.finditer(block)
    ]


def shown(trace: str) -> list[Frame]:
    """Return the frames of a traceback to show: the user's, or else the innermost few."""
    stack = frames(trace)
    return [frame for frame in stack if frame.whose == "user"] or stack[-_INNERMOST:]


def crashed_at(text: str, own: Sequence[str] = ()) -> list[Frame]:
    """Return the frames of faulthandler's current thread, innermost first."""
    current = text.partition("Current thread")[2]
    return frames(current.split("\n\n")[0], own)


def in_collective(text: str, own: Sequence[str] = ()) -> list[Frame]:
    """Return the frames of a thread in a collective, innermost first, from faulthandler's text."""
    for block in text.split("\n\n"):
        stack = frames(block, own)
        if stack and "torch/distributed/" in stack[0].file:
            return stack
    return []
