"""How long a rank that was stopped (SIGSTOP) keeps a job from going on.

Measured from the signal to the first step that the started-again ranks make, with a timeout of
20 s: in raygnn by ``comm.timeout``; in raygnn with a timeout of half an hour, by
``fault.heartbeat``; and in `plain_frozen.py`, a plain Ray Train and Lightning job whose
``RayDDPStrategy(timeout=…)`` says 20 s, which is given up after a while. Exit code 1 if raygnn
misses its limit with the timeout of 20 s.

    python benchmarks/bench_frozen.py [--patience 60]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from machine import setting, table

from raygnn.runs.diagnose.state_file import read_state

CHECKOUT = Path(__file__).resolve().parents[1]
LIMIT = 40.0  # seconds
TIMEOUT = 20.0  # seconds
ODD = 1  # the rank that is stopped
_START, _END = 180.0, 20.0  # seconds for a job to make its first steps, or to end
_POLL = 0.05
_MARK = "BENCH_FROZEN"  # a variable by which all processes of a job are found

JOB = """
name: frozen
storage: {directory}/runs
graph: {{format: planted, nodes: 20000, degree: 10, classes: 4, features: 16}}
model: {{kind: sage, hidden: 16, layers: 2}}
sampling: {{fanout: [5, 5], batch_size: 32}}
staging: {{path: {directory}/stage}}
train: {{epochs: 100000, log_every: 1}}
cluster: {{address: local, workers: 2, num_cpus: 4, probe_timeout: 1m}}
"""


@contextlib.contextmanager
def running(command: list[str], directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job; at the end none of its processes is left, whether it is stopped or not."""
    mark = uuid.uuid4().hex
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", _MARK: mark}
    env.pop("RAY_ADDRESS", None)
    with open(directory / "output", "wb") as output:
        process = subprocess.Popen(command, cwd=CHECKOUT, env=env, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END)
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(_END)


def marked(mark: str) -> list[int]:
    """The processes that have the mark among their variables."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{_MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def until(
    condition: Callable[[], object], seconds: float, process: subprocess.Popen[bytes]
) -> bool:
    """Wait for something to be so; whether it came to be."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return True
        time.sleep(_POLL)
    return False


def ours(patience: float, *settings: str) -> float | None:
    """Seconds from the signal to the next first step; None if there was none in ``patience``.

    Raises:
        RuntimeError: the job did not start.
    """
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "job.yaml").write_text(JOB.format(directory=directory))
        logs = directory / "runs/frozen/logs"
        metrics = directory / "runs/frozen/metrics.jsonl"
        command = [sys.executable, "-m", "raygnn", "train", str(directory / "job.yaml")]
        for each in settings:
            command += ["--set", each]

        def steps() -> int:
            return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

        def starts() -> int:
            return (logs / "comm-rank-0.jsonl").read_bytes().count(b"\n")

        with running(command, directory) as process:
            if not until(lambda: steps() > 20, _START, process):
                raise RuntimeError(tail(directory))
            state = read_state(logs / f"rank-{ODD}.state")
            assert state is not None
            os.kill(state.pid, signal.SIGSTOP)
            begin = time.monotonic()
            if not until(lambda: starts() == 2, patience, process):
                return None
            before = steps()
            if not until(lambda: steps() > before, patience, process):
                return None
            return time.monotonic() - begin


def plain(patience: float) -> float | None:
    """The same of the plain job."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        script = str(CHECKOUT / "benchmarks/plain_frozen.py")
        command = [sys.executable, script, scratch, str(TIMEOUT)]

        def ranks() -> list[Path]:
            return sorted(directory.glob("rank-*"))

        with running(command, directory) as process:
            if not until(lambda: len(ranks()) == 2, _START, process):
                raise RuntimeError(tail(directory))
            os.kill(int(ranks()[ODD].name.rpartition("-")[2]), signal.SIGSTOP)
            begin = time.monotonic()
            if not until(lambda: len(ranks()) > 2, patience, process):
                return None
            return time.monotonic() - begin


def tail(directory: Path) -> str:
    return "the job did not start:\n" + (directory / "output").read_text(errors="replace")[-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        *("--patience",), type=float, default=60.0, metavar="SECONDS", help="for each job (60)"
    )
    patience = parser.parse_args().patience
    print(setting())
    wait = f"{TIMEOUT:g} s"
    measured = {
        f"raygnn, comm.timeout {wait}": ours(patience, f"comm.timeout={TIMEOUT:g}s"),
        "raygnn, comm.timeout 30m, fault.heartbeat 8 s": ours(
            patience, "comm.timeout=30m", "fault.heartbeat=8s"
        ),
        f"plain Ray Train + Lightning, RayDDPStrategy(timeout={wait})": plain(patience),
    }
    shown = [
        [name, f"{seconds:.1f}" if seconds is not None else f"not in {patience:g} s"]
        for name, seconds in measured.items()
    ]
    print("\n" + table(["job", "SIGSTOP to the next first step, s"], shown))
    first = next(iter(measured.values()))
    met = first is not None and first <= LIMIT
    print(f"\nlimit, with comm.timeout {wait}: {LIMIT:g} s; {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
