"""The wheel is complete: installed elsewhere, it trains without the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml

from tests.support.commands import ROOT, Command
from tests.support.small_jobs import job

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def run(*args: object) -> str:
    done = subprocess.run([*map(str, args)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with this one's packages but for raygnn, which comes from a wheel."""
    place = tmp_path_factory.mktemp("wheel")
    for name in ("raygnn", "pyproject.toml", "README.md"):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, place / name)
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", place / "dist", place)
    venv.create(place / "env")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = place / "env" / "lib" / version / "site-packages"
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "raygnn" not in path.name:
            (packages / path.name).symlink_to(path)
    (wheel,) = (place / "dist").glob("raygnn-*.whl")
    python = place / "env" / "bin" / "python"
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel)
    return place / "env"


@pytest.mark.system
@pytest.mark.slow
def test_the_wheel_trains_without_the_checkout(environment: Path, tmp_path: Path) -> None:
    where = run(environment / "bin" / "python", "-I", "-c", "import raygnn; print(raygnn.__file__)")
    assert where.startswith(str(environment))
    settings = job(tmp_path / "runs", train={"epochs": 1})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(settings))
    program = environment / "bin" / "raygnn"
    command = Command(["train", "job.yaml"], tmp_path, program=[str(program)], PYTHONPATH="")
    code, out, err = command.finish(300)
    assert (code, err) == (0, ""), out
    assert (tmp_path / "runs" / "test" / "report.html").stat().st_size > 0
    assert command.left_behind() == []
