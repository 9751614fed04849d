"""cluster/setup.sh: installs once, from the pins, and not at all where the versions are there.

Its Python is one that only writes down what it is asked for: an installation takes gigabytes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pinned import needs_pinned

CHECKOUT = Path(__file__).resolve().parents[2]
LIMIT = 60.0
_PYTHON = """#!/bin/sh
test "$1 $2" = "-m venv" || exit 1
mkdir -p "$3/bin"
printf '#!/bin/sh\\necho "$@" >> "$HOME/pip.log"\\n' > "$3/bin/pip"
chmod +x "$3/bin/pip"
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A node's home with the files of `ray up`, and a Python for new environments."""
    (tmp_path / "raygnn").mkdir()
    shutil.copy(CHECKOUT / "cluster" / "setup.sh", tmp_path / "raygnn")
    shutil.copy(CHECKOUT / "constraints.txt", tmp_path / "raygnn")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3.11").write_text(_PYTHON)
    (tmp_path / "bin" / "python3.11").chmod(0o755)
    return tmp_path


def setup(home: Path, *, ready: bool) -> str:
    """Run the script; with ``ready``, this complete interpreter is on PATH."""
    path = f"{home}/bin:/usr/bin:/bin"
    if ready:
        path = f"{Path(sys.executable).parent}:{path}"
    done = subprocess.run(
        ["bash", str(home / "raygnn" / "setup.sh"), str(home / "bin" / "python3.11")],
        env={"HOME": str(home), "PATH": path, "TORCH_ARGS": "--a --b", "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _installed(home: Path) -> list[str]:
    log = home / "pip.log"
    return log.read_text().splitlines() if log.exists() else []


@needs_pinned()
def test_nothing_happens_where_the_versions_are(home: Path) -> None:
    assert "are here" in setup(home, ready=True)
    assert not (home / "raygnn-env").exists()
    assert not (home / ".bashrc").exists()


def test_a_new_node_gets_the_pinned_versions(home: Path) -> None:
    setup(home, ready=False)
    pins = (home / "raygnn" / "constraints.txt").read_text().splitlines()
    (torch,) = (pin for pin in pins if pin.startswith("torch=="))
    source = home / "raygnn"
    assert _installed(home) == [
        f"install --quiet --a --b {torch}",
        f"install --quiet -c {source}/constraints.txt -e {source}",
    ]
    setup(home, ready=False)
    line = 'export PATH="$HOME/raygnn-env/bin:$PATH"\n'
    assert (home / ".bashrc").read_text() == line  # once, however often it is run


@pytest.mark.parametrize("name", ["ray", "PyYAML"])  # pyproject.toml has the second as pyyaml
def test_another_version_is_not_enough(name: str, home: Path) -> None:
    file = home / "raygnn" / "constraints.txt"
    pins = file.read_text().splitlines()
    assert any(pin.startswith(f"{name}==") for pin in pins)
    other = (f"{name}==0.1" if pin.startswith(f"{name}==") else pin for pin in pins)
    file.write_text("\n".join(other))
    setup(home, ready=True)
    assert len(_installed(home)) == 2
