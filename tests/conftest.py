"""Fixtures and hooks for all tests: the real graphs, and an environment for small machines."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import signal
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

# Set before torch, numba, triton or ray is imported by any test, and inherited by their processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # as for ranks
os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels of a GPU run on tensors of the CPU

# A shell's background job is started with Ctrl-C ignored, and so would be all that it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest
from hypothesis import settings
from numba.core.dispatcher import Dispatcher

from raygnn.graph import dgl

# no deadlines: the first example of a test may compile a kernel, and machines are shared
settings.register_profile("raygnn", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("raygnn")

LOCKS, COMPILING, COMPILE = tempfile.gettempdir(), threading.local(), Dispatcher.compile


def compile_once(self: Any, signature: Any) -> Any:
    """Compile a kernel for types, or load it where another process has compiled it meanwhile: ranks
    call it at the same time."""
    if getattr(COMPILING, "now", False):  # another kernel, which calls this one
        return COMPILE(self, signature)
    name = f"raygnn-{os.getuid()}-{self.py_func.__module__}-{self.py_func.__name__}.lock"
    with open(os.path.join(LOCKS, name), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        COMPILING.now = True
        try:
            return COMPILE(self, signature)
        finally:
            COMPILING.now = False


Dispatcher.compile = compile_once
os.fsync = lambda _: None  # no test cuts the power
gc.set_threshold(50_000, 20, 20)  # most of what the tests' modules make on import stays

pytest_plugins = ["tests.support.small_jobs", "tests.support.stores"]

CHECKOUT = Path(__file__).resolve().parents[1]

# Where RAYGNN_NO_SKIPS is set, as in .ci/run, a test that is skipped fails: a tool or the data are
# missing. These skips stay, since nothing that could be installed would let their tests run.
MAY_SKIP = re.compile(
    "|".join(
        (
            "there is no GPU|needs CUDA|this DGL has CUDA kernels",  # hardware, and builds for it
            "this processor or this torch can not",
            "no IPv6 here|virtual hosts do not work here",  # a container may lack these
            "no mounts here|nothing can be mounted here",
            "root may read everything",
            "could not import '(ogb|wandb|mlflow)",  # packages that are no dependencies
            # torchmetrics imports transformers wherever it is, in each process
            "could not import '(sentence_transformers|transformers)",
            "KubeRay's definitions are in no package",
        )
    )
)


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the records of runs out of the state of the user who runs the tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need DGL if it is not installed."""
    if not dgl.installed():
        needing = [
            item
            for item in items
            if item.get_closest_marker("dgl")
            or (isinstance(item, pytest.Function) and "dgl" in _parameters(item))
        ]
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]


def _parameters(item: pytest.Function) -> list[Any]:
    """Return the test's parameters that are text, such as the choice of kernels."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [value for value in values if isinstance(value, str)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _without_skips((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _without_skips((yield))


def _without_skips(report: Any) -> Any:
    """Turn a skip into a failure where all tests have to run, unless it is exempt."""
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and os.environ.get("RAYGNN_NO_SKIPS"):
        reason = report.longrepr[2]
        if not MAY_SKIP.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{reason} (see RAYGNN_NO_SKIPS in tests/conftest.py)"
    return report


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The directory of real graphs: ``RAYGNN_DATA``, else ``../shared/data`` by the checkout."""
    given = os.environ.get("RAYGNN_DATA")
    path = (Path(given) if given else CHECKOUT.parent / "shared" / "data").resolve()
    if not path.is_dir():
        pytest.skip(f"no real graphs in {path}; set RAYGNN_DATA to their directory")
    return path
