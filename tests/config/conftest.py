"""A place for a small job."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: empty except for ``graph.dgl``, whose content is not read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.dgl").write_bytes(b"")
    return tmp_path
