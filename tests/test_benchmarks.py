"""Benchmarks: they can be started; tests do not run them completely."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raygnn.sampling.exchange import Exchange
from tests.support.ranks import run_ranks

CHECKOUT = Path(__file__).parents[1]

WITHOUT = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "dgl", "pymetis", "plotly", "tensorboardX"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
"""


def test_their_imports_exist() -> None:
    files = sorted(map(str, (CHECKOUT / "benchmarks").glob("*.py")))
    assert len(files) > 20
    assert run_ranks(1, imported, files, fresh=True) == [len(files)]


def imported(_: Exchange, files: list[str]) -> int:
    """Import files in a process of their own, and return their number."""
    sys.path[:0] = [str(CHECKOUT / "benchmarks"), str(CHECKOUT)]
    return len([runpy.run_path(file, run_name="imported") for file in files])


NUMBERED = """
import sys
sys.path.insert(0, "benchmarks")
import gpu, torch
for name in ("cuda", "cuda:1"):  # as torch.cuda.set_device asks for it
    print(torch.cuda._utils._get_device_index(gpu.device_of(name)))
try:
    with gpu.Alarm(1):
        while True:
            pass
except TimeoutError as error:
    print(error)
"""


def test_a_gpu_has_a_number_and_no_part_hangs() -> None:
    command = [sys.executable, "-c", NUMBERED]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=240)
    assert done.stdout.split("\n")[:3] == ["0", "1", "not through after 1 s"], done.stderr


@pytest.mark.long
def test_all_of_what_a_gpu_does_runs_on_a_cpu(tmp_path: Path) -> None:
    """Triton's interpreter runs it without Ray, DGL and their dependencies."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    paths = os.pathsep.join([str(tmp_path), str(CHECKOUT)])
    out = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--nodes", "300", "--batch", "8", "--steps", "1"]
    command = [sys.executable, "benchmarks/gpu.py", *options, "--out", str(out)]
    given: Any = {"cwd": CHECKOUT, "capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert not found["failed"]
    assert set(found["differs"].values()) == {None}
    assert len(found["throughput"]) == 16
    assert len(found["differs"]) == 15
    assert found["left_out"] == []
