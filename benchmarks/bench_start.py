"""How long `make train` takes to its first step, and in all, with nothing cached.

Measured from outside, from the start of the process: to the first line in ``metrics.jsonl``,
and to the process's end. Each time in a new storage, so that the graph is generated and
partitioned, and with a new cache for compiled kernels, as after a fresh installation. In turn
with it, `plain_ray.py`: what Ray Train and Lightning take to the first step of a linear layer
without any graph. Exit code 1 if a limit is missed.

    python benchmarks/bench_start.py [--runs 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from machine import load, setting, table

CHECKOUT = Path(__file__).resolve().parents[1]
JOB = "products-100k"
FIRST_STEP_LIMIT, TOTAL_LIMIT = 25.0, 90.0  # seconds
_POLL = 0.02


@dataclass(frozen=True)
class Start:
    """Seconds from the start of the process."""

    first_step: float
    total: float


def measure(command: list[str], sign: Path, scratch: Path, **environment: str) -> Start:
    """Run ``command`` to its end.

    Args:
        sign: the file that shows the first step: there, and not empty if it is one of lines.
        scratch: an empty directory, for the command's caches.
        environment: more variables for it.

    Raises:
        RuntimeError: the command failed, with the end of its output.
    """
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "NUMBA_CACHE_DIR": str(scratch / "kernels"),
        **environment,
    }
    first_step = None
    with open(scratch / "output", "wb") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=CHECKOUT, env=env, stdout=output, stderr=output)
        try:
            while process.poll() is None:
                if first_step is None and _shown(sign):
                    first_step = time.perf_counter() - start
                time.sleep(_POLL)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        total = time.perf_counter() - start
    if process.returncode or first_step is None:
        tail = (scratch / "output").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{' '.join(command)} failed ({process.returncode}):\n{tail}")
    return Start(first_step, total)


def _shown(sign: Path) -> bool:
    if sign.suffix != ".jsonl":
        return sign.exists()
    return sign.exists() and b"\n" in sign.read_bytes()


def ours() -> Start:
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        command = [sys.executable, "-m", "raygnn", "train", f"jobs/{JOB}.yaml", "--overwrite"]
        command += ["--set", f"storage={scratch}/runs"]
        return measure(command, scratch / "runs" / JOB / "metrics.jsonl", scratch)


def plain() -> Start:
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        command = [sys.executable, str(CHECKOUT / "benchmarks/plain_ray.py"), f"{scratch}/step"]
        # left unset, ray.init would write a token into the home directory
        return measure(command, scratch / "step", scratch, RAY_AUTH_MODE="disabled")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each (3)")
    runs = parser.parse_args().runs
    print(setting())
    starts, contrast, rows = [], [], []
    for number in range(runs):
        rows.append([str(number + 1), load()])
        contrast.append(plain())
        starts.append(ours())
        figures = (contrast[-1].first_step, starts[-1].first_step, starts[-1].total)
        rows[-1] += [f"{seconds:.1f}" for seconds in figures]
    columns = [
        [start.first_step for start in contrast],
        [start.first_step for start in starts],
        [start.total for start in starts],
    ]
    medians = [statistics.median(column) for column in columns]
    rows.append(["median", "", *(f"{seconds:.1f}" for seconds in medians)])
    rows.append(["limit", "", "", f"{FIRST_STEP_LIMIT:g}", f"{TOTAL_LIMIT:g}"])
    header = ["run", "machine", "plain Ray + Lightning: first step, s"]
    print("\n" + table([*header, "raygnn: first step, s", "raygnn: in all, s"], rows))
    ratio = medians[1] / medians[0]
    print(f"\nfirst step, raygnn / plain: {ratio:.2f}")
    met = max(columns[1]) <= FIRST_STEP_LIMIT and max(columns[2]) <= TOTAL_LIMIT
    print("limits met" if met else "LIMITS MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
