"""The start commands of aws.yaml and gcp.yaml lift the limits of the shell that starts Ray.

Run as `ray up` runs them over ssh, in a shell within another one; with a sudo that sets a limit
which needs no root, and a Ray that only writes down what it has.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.command_runner import _with_interactive

CHECKOUT = Path(__file__).resolve().parents[2]
LIMIT = 60.0
_SUDO = """#!/bin/sh
test "$1 $2" = "prlimit --pid" && exec prlimit --pid "$3" --nofile=123:
"""
_RAY = """#!/bin/sh
ulimit -n > "$HOME/limit"
"""


@pytest.mark.parametrize("role", ["head", "worker"])
@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml"])
def test_limits_are_those_of_ray(name: str, role: str, tmp_path: Path) -> None:
    cluster = yaml.safe_load((CHECKOUT / "cluster" / name).read_text())
    for tool, text in (("sudo", _SUDO), ("ray", _RAY)):
        (tmp_path / tool).write_text(text)
        (tmp_path / tool).chmod(0o755)
    (tmp_path / ".bashrc").write_text(f'PATH="{tmp_path}:$PATH"\n')
    command = " ".join(_with_interactive(cluster[f"{role}_start_ray_commands"][-1]))
    subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        start_new_session=True,  # an interactive shell would seize the tests' terminal
        check=True,
        timeout=LIMIT,
    )
    assert (tmp_path / "limit").read_text() == "123\n"
