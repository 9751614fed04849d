"""Ids that the data do not have are refused before Ray starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import raygnn
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import InputError
from raygnn.runs.run import Run
from tests.prediction.test_new_graphs import save
from tests.prediction.test_table_jobs import shop
from tests.support.small_jobs import train_on_ranks
from tests.worker.test_graph_tasks import make


@pytest.fixture(autouse=True)
def no_start(monkeypatch: pytest.MonkeyPatch, no_ray: None) -> None:
    def start(self: RayCluster) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(RayCluster, "start", start)


def refused(run: Run, what: str, ids: Path) -> None:
    out = run.path.parent / "out.parquet"
    with pytest.raises(InputError, match=what):
        raygnn.predict(run, out=out, ids=ids, overrides=["cluster.address=local"], display=False)
    assert not out.exists()
    assert not (run.path.parent / ".predicting").exists()


@pytest.mark.parametrize("partitioned", [True, False])
def test_nodes_of_tables(partitioned: bool, tmp_path: Path) -> None:
    run = train_on_ranks(shop(tmp_path, train={"epochs": 1}))
    if not partitioned:
        shutil.rmtree(tmp_path / "partitions")
    (tmp_path / "ids").write_text("item 3\nitem 300\n")
    refused(run, "no 'item 300' among the 300 .* number 2", tmp_path / "ids")


@pytest.mark.dgl
def test_graphs(tmp_path: Path) -> None:
    file = save(tmp_path / "old.bin", list(range(30)), label=torch.arange(30) % 2)
    graph = {"format": "graphs", "path": str(file), "folds": 10, "fold": 3}
    run = train_on_ranks(make(tmp_path, graph=graph, train={"epochs": 1}))
    (tmp_path / "ids").write_text("29\n30\n")
    refused(run, "no '30' among the 30 .* number 2", tmp_path / "ids")
