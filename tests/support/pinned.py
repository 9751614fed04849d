"""A mark for tests that need the pinned versions, which cluster/setup.sh would else install."""

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
    """Return True if setup.sh finds the pinned versions in this environment.

    ``false`` stands for the Python of a new environment, so that creating one fails.
    """
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
