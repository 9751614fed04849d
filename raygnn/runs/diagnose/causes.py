"""Causes that end a run: their traces in the texts of errors and of Ray, and their remedies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FROZEN = "Frozen"  # the kind of the failure that the driver records for a frozen rank

REMEDIES = {
    "model": "correct the model or the loss there; the traceback is in the rank's log",
    "data": "correct the dataset or its transform there",
    "ranks_differ": "let no collective, parameter, dtype or early return depend on the rank or its "
    "data; comm.debug: true stops at the first difference in raygnn's collectives and gradients",
    "unused_parameter": "let every parameter take part in the loss of every step, or set "
    "comm.find_unused_parameters: true",
    "not_finite": "lower train.lr, set train.clip, use precision fp32 or bf16, and look for bad "
    "values in the input",
    "memory": "lower sampling.batch_size, sampling.fanout or sampling.cache, start fewer "
    "cluster.workers on a node, or use more nodes",
    "crash": "update or replace the native library that the frames show, or run again with "
    "comm.debug: true",
    "died": "find out what ended it: the kernel's log (dmesg), the job manager, or os._exit in the "
    "code or its libraries; then train with --resume",
    "node_lost": "find out why the node failed (power, network, preemption); then train with "
    "--resume",
    "ray_died": "find out what ended it: the kernel's log (dmesg), the job manager, Ray's logs; "
    "then train with --resume",
    "frozen": "check there whether the process is stopped (SIGSTOP, a debugger), the machine "
    "swaps or sleeps, or native code holds the GIL: then raise fault.heartbeat",
    "stuck": "find out what the code waits for: a lock, a queue, a file, the network, a sleep",
    "storage": "free space or make it writable, or change storage; then train with --resume",
    "timeout": "if all ranks were only slow, raise comm.timeout; else check the network between "
    "the hosts with raygnn check",
    "input": "correct what the error names",
    "error": "if your configuration is right, report a bug of raygnn or of the library named; the "
    "traceback is in the rank's log",
    "setup": "correct what the error names, and start again",
    "command_gone": "train with --resume",
    "interrupted": "resume with raygnn train CONFIG --resume",
    "running": "wait, or follow logs/ and metrics.jsonl",
    "none": "",
    "unknown": "run again with -v, and comm.debug: true",
}

_MEMORY = re.compile(
    r"MemoryError|OutOfMemory|out of memory|can't allocate memory|cannot allocate memory|"
    r"running low on memory|Unable to allocate",
    re.I,
)
_STORAGE = re.compile(
    r"No space left|quota|disk is full|Read-only file system|\[Errno (?:28|30|122)\]|"
    r"it cannot be written|Stale file handle|"
    r"unexpected pos \d+ vs|PytorchStreamWriter|iostream error",  # how torch.save says it
    re.I,
)
_DIFFER = re.compile(
    r"ranks differ|mismatch between collectives|op\.preamble\.length|"
    r"appears not to match|params? .* sizes? .* does not match|inconsistent .* across",
    re.I,
)
_UNUSED = re.compile(
    r"Expected to have finished reduction|find_unused_parameters|got no gradient|"
    r"marked (?:as )?ready twice|does not require grad",
    re.I,
)
_NOT_FINITE = re.compile(r"not finite|non-?finite|\bnan\b|infinite gradient", re.I)
# texts of a lost connection, more than a rank itself recognizes
_COMMUNICATION = re.compile(
    r"gloo|nccl|c10d|ProcessGroup|DistNetwork|DistStore|DistBackend|socket|connection|broken pipe|"
    r"timed out waiting|could not prepare its batch",
    re.I,
)
# the network of training, rather than a connection of the user's: names of its libraries, its
# errors, and our alarm
_TRANSPORT = re.compile(
    r"gloo|nccl|c10d|ProcessGroup|DistNetwork|DistStore|DistBackend|monitoredBarrier", re.I
)
_OF_TRANSPORT = re.compile(r"RuntimeError|TimeoutError|Dist\w*Error")
_OF_SOCKETS = re.compile(r"Connection\w*Error|BrokenPipeError")
_ALARM = re.compile(r"(?:TrainingError: )?rank \d+ could not prepare its batch: ")
_NODE = re.compile(
    r"node (?:has )?died|node was (?:terminated|preempted|drained)|node is dead|its node|"
    r"raylet (?:has )?died|node .{0,80}missed",
    re.I,
)
_KILLED_FOR_MEMORY = re.compile(r"low on memory|memory monitor|OutOfMemory|memory usage threshold")

# Ray's text when its memory monitor kills a process; in Ray 2.55 and 2.56 all of it is one line
_KILLED_ON = re.compile(
    r"Memory on the node \(IP: ([^,()]+).{0,200}? was ([\d.]+ ?\w+)(?: used)? / ([\d.]+ ?\w+)"
)
_LIMIT = re.compile(r"threshold of (?:\d+B \()?(\d+\.?\d*)(%?)")  # a fraction in Ray 2.55
_KILLED = re.compile(
    r"(?:Selected to kill: |policy: \[)\(.{0,2000}?task name=([^,\s]+),.{0,2000}?pid=(\d{1,9}), "
    r"actual memory used=([\d.]+GB)",
    re.S,
)
_USERS = re.compile(r"(?:^|[,;] )(\d{1,9})\t([\d.]+)\t((?:(?![,;] ).){0,60})", re.M)
_MOST_USERS = 3  # of the processes that use most memory
_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"\n]+)", line (?P<line>\d{1,9}),? in (?P<function>.+)$', re.M
)
_INNERMOST = 3  # frames of a traceback that has none of the user's
_BECAUSE = "The above exception was the direct cause of the following exception"
_DURING = "During handling of the above exception, another exception occurred"
_OURS = re.compile(
    r"/raygnn/(driver|worker|checkpoint|prediction|search|sampling|tasks|models|graph|runs|config|preflight"
    r"|compat|jobs|serving|storage|util|cli)/"
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
    """Return the frames of a traceback's first cause, in the order of the text: of exceptions
    raised ``from`` each other the first; of exceptions raised while another one was handled the
    last, which is unrelated to the others."""
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


@dataclass(frozen=True)
class Cause:
    """Most likely cause of a run's end."""

    kind: str  # a key of `REMEDIES`
    what: str
    rank: int | None = None  # None if it was not a single rank's
    where: str | None = None  # a line of code, a host, a file
    confidence: str = "high"  # ``high``, ``medium`` or ``low``
    evidence: list[str] = field(default_factory=list)  # lines of evidence, each with its file
    remedy: str = ""


def is_consequence(failure: Mapping[str, Any], own: Sequence[str] = ()) -> bool:
    """Return True if a rank's failure only follows from another rank's, or the network's; ``own``:
    path suffixes of the user's modules."""
    what = failure["what"]
    if not _COMMUNICATION.search(what) or _DIFFER.search(what):
        return False
    return of_training(str(failure.get("kind") or ""), what, failure["trace"], own)


def of_training(kind: str, what: str, trace: str, own: Sequence[str] = ()) -> bool:
    """Return True if an error concerns a connection of training, not of the user's code; ``kind``:
    name of its class; empty if ``what`` begins with it."""
    if _ALARM.match(what):
        return True
    kind = kind or what.partition(":")[0]
    stack = frames(trace, own)
    if stack and "torch/distributed/" in stack[-1].file:
        return True
    ours = bool(stack) and stack[-1].whose == "raygnn"
    if _OF_TRANSPORT.fullmatch(kind):
        # in backward, say, it is raised from elsewhere in torch
        users = not stack or any(frame.whose == "user" for frame in stack)
        return ours or not users or bool(_TRANSPORT.search(f"{kind} {what}"))
    return ours and bool(_OF_SOCKETS.fullmatch(kind))


def kind_of(failure: Mapping[str, Any], own: Sequence[str]) -> tuple[str, Frame | None]:
    """Return the kind of cause of a rank's recorded failure, and where it was raised."""
    if failure.get("kind") == FROZEN:
        return "frozen", None
    what = f"{failure.get('kind') or ''} {failure['what']}"
    stack = frames(failure["trace"], own)
    place = where(stack)
    for kind, pattern in (
        ("ranks_differ", _DIFFER),
        ("memory", _MEMORY),
        ("storage", _STORAGE),
        ("unused_parameter", _UNUSED),
    ):
        if pattern.search(what):
            return kind, place
    if failure.get("kind") == "GuardError":
        return ("not_finite" if _NOT_FINITE.search(what) else "ranks_differ"), place
    if failure.get("exit_code") in (2, 3):
        return "input", place
    if place is not None and place.whose == "user":
        at = stack.index(place)
        return ("data" if any(frame.prepares for frame in stack[:at]) else "model"), place
    return ("not_finite" if _NOT_FINITE.search(what) else "error"), place


def where(stack: Sequence[Frame]) -> Frame | None:
    """Return the frame to report, of a stack with the innermost last: the user's, else raygnn's."""
    for whose in ("user", "raygnn"):
        for frame in reversed(stack):
            if frame.whose == whose:
                return frame
    return stack[-1] if stack else None


def kind_of_death(text: str) -> str:
    """Return the kind of cause in Ray's text on a dead worker, which also lists mere guesses."""
    if _NODE.search(text):
        return "node_lost"
    return "memory" if _KILLED_FOR_MEMORY.search(text) else "died"


@dataclass(frozen=True)
class MemoryKill:
    """Process that Ray killed because its node was short of memory."""

    host: str  # the node's address
    why: str  # ``its node 10.0.0.7 had 22.9GB of 23.5GB of memory in use, more than …``
    process: str  # name of the task or actor, with its ``pid``; empty and 0 if unknown
    pid: int
    users: tuple[str, ...]  # processes with the highest memory use, as Ray lists them

    @classmethod
    def from_text(cls, text: str) -> MemoryKill | None:
        """Parse the text of Ray's OutOfMemoryError; None for any other error."""
        if (node := _KILLED_ON.search(text)) is None:
            return None
        why = f"its node {node[1]} had {node[2]} of {node[3]} of memory in use"
        if limit := _LIMIT.search(text):
            allowed = f"{limit[1]}%" if limit[2] else f"{float(limit[1]):.1%}"
            why += f", more than the {allowed} that Ray allows"
        process, pid = "", 0
        if killed := _KILLED.search(text):
            process, pid = killed[1].partition(".")[0], int(killed[2])
            why += f"; it held {killed[3]} itself"
        users = tuple(f"{m[2]} GB by {m[3]} (pid {m[1]})" for m in _USERS.finditer(text))
        return cls(node[1], why, process, pid, users[:_MOST_USERS])
