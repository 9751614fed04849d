"""What all tests share: the real graphs, and an environment for small machines."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Set before torch, numba or ray is imported by any test, and inherited by their processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

# A shell's background job is started with Ctrl-C ignored, and so would be all that it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest
from hypothesis import settings

# no deadlines: the first example of a test may compile a kernel, and machines are shared
settings.register_profile("raygnn", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("raygnn")

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The directory of real graphs: ``RAYGNN_DATA``, else ``../shared/data`` by the checkout."""
    given = os.environ.get("RAYGNN_DATA")
    path = (Path(given) if given else CHECKOUT.parent / "shared" / "data").resolve()
    if not path.is_dir():
        pytest.skip(f"no real graphs in {path}; set RAYGNN_DATA to their directory")
    return path
