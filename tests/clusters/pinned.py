"""Whether this environment has the pinned versions: else cluster/setup.sh would install them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
LIMIT = 60.0


@functools.cache
def _pinned() -> bool:
    """As the script itself has it; ``false`` stands for the Python of a new environment."""
    with tempfile.TemporaryDirectory() as directory:
        for file in ("constraints.txt", "cluster/setup.sh"):
            shutil.copy(CHECKOUT / file, directory)
        argv = ["bash", f"{directory}/setup.sh", "false"]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "PYTHONPATH": str(CHECKOUT)}
        return subprocess.run(argv, env=env, capture_output=True, timeout=LIMIT).returncode == 0


def needs_pinned() -> pytest.MarkDecorator:
    """Marks tests that need the versions of constraints.txt on PATH."""
    return pytest.mark.skipif(not _pinned(), reason="other versions than constraints.txt has")
