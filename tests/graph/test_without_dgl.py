"""Environments without DGL: what does not need it works, and other commands say that they need
it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raygnn.config.load import load_config
from raygnn.errors import CapabilityError
from raygnn.graph import dgl as door
from raygnn.graph.outofcore.divide import make_partition
from raygnn.graph.partition import metis
from raygnn.graph.partition.layout import read_meta
from raygnn.graph.partition.make import Missing, find_partition
from raygnn.graph.sources import load_graph


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dgl", None)  # as if it were not installed
    monkeypatch.setattr(door, "_load", door._load.__wrapped__)  # without its cache


@pytest.fixture
def no_dgl(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch)


def config(storage: Path, method: str, **partition: Any) -> Any:
    graph = {"format": "planted", "nodes": 2000, "degree": 8, "train": 0.5}
    sections = {"partition": {"method": method, **partition}, "storage": str(storage)}
    return load_config({"name": "a", "graph": graph, "model": {"kind": "sage"}, **sections})


def made(storage: Path, method: str, **partition: Any) -> Missing:
    """Partition a graph, and return the request that described the partition."""
    asked = config(storage, method, **partition)
    missing = find_partition(asked, 2)
    assert isinstance(missing, Missing)
    make_partition(missing, load_graph(asked.graph))
    return missing


@pytest.mark.usefixtures("no_dgl")
def test_functions_that_need_dgl_report_it(tmp_path: Path) -> None:
    assert not door.installed()
    for use in (door.dgl, door.missing):
        with pytest.raises(CapabilityError, match="DGL is not installed") as error:
            use()
        assert "pip install dgl, with Python 3.12 or older" in (error.value.remedy or "")


def test_a_directory_of_that_name_is_no_dgl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dgl").mkdir()
    monkeypatch.delitem(sys.modules, "dgl", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_spec("dgl") is not None
    assert not door.installed()


@pytest.mark.usefixtures("no_dgl")
@pytest.mark.parametrize("method", ["metis", "stream"])
def test_a_partition_is_made(method: str, tmp_path: Path) -> None:
    meta = read_meta(made(tmp_path, method).draft)
    assert meta.manifest is not None
    assert "pymetis" in meta.manifest.versions
    found = find_partition(config(tmp_path, method), 2)
    assert not isinstance(found, Missing)
    assert found.digest == meta.digest


def test_a_missing_pymetis_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    metis._library.cache_clear()
    monkeypatch.setitem(sys.modules, "pymetis", None)
    indptr, ids = np.array([0, 1, 2]), np.array([1, 0])
    with pytest.raises(CapabilityError, match=r"METIS is not available(.|\n)*pip install pymetis"):
        metis.metis(indptr, ids, 2, np.ones((2, 1), np.int64))
