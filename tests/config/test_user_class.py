"""Finding package.module:Class without running it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raygnn.config.values import class_problems


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``mine/models.py`` in the current directory, which must not be imported."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (directory / "models.py").write_text("raise RuntimeError('imported')\nclass Net: ...\n")
    return directory


@pytest.mark.parametrize(
    "source",
    [
        "class Net: ...",
        "from other import Net",
        "from other import Thing as Net",
        "from other import *",
        "Net = make()",
        "if True:\n    class Net: ...",
        "try:\n    from a import Net\nexcept ImportError:\n    Net = None",
        "def __getattr__(name): ...",
    ],
)
def test_found(source: str, package: Path) -> None:
    (package / "models.py").write_text(source + "\nraise RuntimeError('imported')\n")
    assert not [*class_problems("mine.models:Net", ())]
    assert "mine" not in sys.modules


def test_found_on_the_python_path() -> None:
    assert not [*class_problems("collections:OrderedDict", ())]


def test_namespace_packages_are_packages(package: Path) -> None:
    (package / "__init__.py").unlink()
    assert not [*class_problems("mine.models:Net", ())]
    (package / "deep" / "deeper").mkdir(parents=True)  # namespaces within a namespace
    (package / "deep" / "deeper" / "nets.py").write_text("class Net: ...")
    assert not [*class_problems("mine.deep.deeper.nets:Net", ())]
    assert [*class_problems("mine.deep.deeper.others:Net", ())]


@pytest.mark.parametrize(
    ("spec", "source", "fragment"),
    [
        ("mine.models:Nett", None, "did you mean mine.models:Net?"),
        ("mine.models:net", None, "did you mean mine.models:Net?"),
        ("mine.other:Net", None, "mine.other"),
        ("mine.models.deeper:Net", None, "mine.models.deeper"),
        ("yours.models:Net", None, "no module yours"),
        ("mine.models:Net", "class Net(", "models.py"),
        ("mine.models:Net", "def f():\n    class Net: ...", "has no Net"),
    ],
)
def test_not_found(spec: str, source: str | None, fragment: str, package: Path) -> None:
    if source is not None:
        (package / "models.py").write_text(source)
    (problem,) = class_problems(spec, ("model", "kind"))
    assert fragment in f"{problem.what} → {problem.remedy}"
