"""Finding the module of package.module:Class without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raygnn.config.values import find_module


def test_modules_are_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "mine"
    (directory / "deep" / "deeper").mkdir(parents=True)  # namespaces within a namespace
    for name in ("models", "deep/deeper/nets"):
        (directory / f"{name}.py").write_text("raise RuntimeError('imported')")
    for name in ("mine.models", "mine.deep.deeper.nets", "collections"):
        assert not isinstance(find_module(name), str)
    (directory / "__init__.py").write_text("raise RuntimeError('imported')")
    assert not isinstance(find_module("mine.models"), str)
    assert find_module("mine.other.net") == "mine.other"
    assert find_module("mine.models.deeper") == "mine.models.deeper"
    assert find_module("yours.models") == "yours"
    assert "mine" not in sys.modules
