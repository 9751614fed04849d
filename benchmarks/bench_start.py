"""How long `make train` takes until it shows something, to its first step, and in all.

Measured from outside, from the start of the process: to its first output, to the first line in
``metrics.jsonl``, and to the process's end. Each time in a new storage, so that the graph is
generated and partitioned; first with a new cache for compiled kernels, as after a fresh
installation, then with the kernels that the first has compiled. In turn with it, `plain_ray.py`:
what Ray Train and Lightning take to the first step of a linear layer without any graph. Exit code
1 if a limit is missed.

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
SHOWN_LIMIT, FIRST_STEP_LIMIT, TOTAL_LIMIT = 1.0, 9.0, 90.0  # seconds
_POLL = 0.02


@dataclass(frozen=True)
class Start:
    """Seconds from the start of the process."""

    shown: float
    first_step: float
    total: float


def measure(command: list[str], sign: Path, scratch: Path, kernels: Path) -> Start:
    """Run ``command`` to its end.

    Args:
        sign: the file that shows the first step: there, and not empty if it is one of lines.
        scratch: an empty directory, for the command's output.
        kernels: where it finds and keeps compiled kernels.

    Raises:
        RuntimeError: the command failed, with the end of its output.
    """
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "NUMBA_CACHE_DIR": str(kernels),
    }
    shown = first_step = None
    with open(scratch / "output", "wb") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=CHECKOUT, env=env, stdout=output, stderr=output)
        try:
            while process.poll() is None:
                if shown is None and os.fstat(output.fileno()).st_size:
                    shown = time.perf_counter() - start
                if first_step is None and _made(sign):
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
    return Start(total if shown is None else shown, first_step, total)


def _made(sign: Path) -> bool:
    if sign.suffix != ".jsonl":
        return sign.exists()
    return sign.exists() and b"\n" in sign.read_bytes()


def ours(kernels: Path) -> Start:
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        command = [sys.executable, "-m", "raygnn", "train", f"jobs/{JOB}.yaml", "--overwrite"]
        command += ["--set", f"storage={scratch}/runs"]
        return measure(command, scratch / "runs" / JOB / "metrics.jsonl", scratch, kernels)


def plain(kernels: Path) -> Start:
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        # left unset, ray.init would write a token into the home directory
        command = ["env", "RAY_AUTH_MODE=disabled", sys.executable]
        command += [str(CHECKOUT / "benchmarks/plain_ray.py"), f"{scratch}/step"]
        return measure(command, scratch / "step", scratch, kernels)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each (3)")
    runs = parser.parse_args().runs
    print(setting())
    rows, figures = [], []
    for number in range(runs):
        with tempfile.TemporaryDirectory() as directory:
            kernels = Path(directory)
            state = load()
            contrast, first, later = plain(kernels), ours(kernels), ours(kernels)
        figures.append(
            [contrast.first_step, first.shown, first.first_step, first.total]
            + [later.shown, later.first_step, later.total]
        )
        rows.append([str(number + 1), state, *(f"{seconds:.1f}" for seconds in figures[-1])])
    medians = [statistics.median(column) for column in zip(*figures, strict=True)]
    limits = [SHOWN_LIMIT, FIRST_STEP_LIMIT, TOTAL_LIMIT] * 2
    rows.append(["median", "", *(f"{seconds:.1f}" for seconds in medians)])
    rows.append(["limit", "", "", *(f"{limit:g}" for limit in limits)])
    header = ["run", "machine", "plain Ray + Lightning: first step, s"]
    for kernels_are in ("compiled", "kept"):
        header += [f"kernels {kernels_are}: shown, s", "first step, s", "in all, s"]
    print("\n" + table(header, rows))
    print(f"\nfirst step, raygnn / plain: {medians[2] / medians[0]:.2f} when kernels are compiled,")
    print(f"{medians[5] / medians[0]:.2f} when they are kept")
    met = all(seconds <= limit for seconds, limit in zip(medians[1:], limits, strict=True))
    print("limits met" if met else "LIMITS MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
