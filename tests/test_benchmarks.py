"""That benchmarks can be started: whole runs of them are nobody's test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
IMPORTS = """
import runpy, sys
sys.path[:0] = ["benchmarks", "."]
for file in sys.argv[1:]:
    runpy.run_path(file, run_name="imported")
"""


def test_what_they_import_is_there() -> None:
    files = sorted(map(str, (CHECKOUT / "benchmarks").glob("*.py")))
    assert len(files) > 20
    command = [sys.executable, "-c", IMPORTS, *files]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_of_what_a_gpu_does_runs_on_a_cpu(tmp_path: Path) -> None:
    """By Triton's interpreter; PyG's loader, which starts processes, aside."""
    out = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--nodes", "1500", "--steps", "1", "--skip", "pyg"]
    command = [sys.executable, "benchmarks/gpu.py", *options, "--out", str(out)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert not found["failed"]
    assert set(found["differs"].values()) == {None}
    assert found["trainings"]["resume"]["exact"]
    assert found["trainings"]["typed-1"]["largest_gap_from_cpu"] < 1e-4
    assert len(found["throughput"]) == 14
