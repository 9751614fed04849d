"""That benchmarks can be started: whole runs of them are nobody's test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
