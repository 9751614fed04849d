"""Tasks of several labels, many not known: of graphs, nodes and edges, the same on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.prediction.test_predict import ask
from tests.support.small_jobs import losses as numbers
from tests.support.small_jobs import train_on_ranks
from tests.worker.test_edge_tasks import LIKES, config_of, shop
from tests.worker.test_graph_tasks import dataset, losses, make

pytestmark = pytest.mark.long

COLUMNS = ["split", "probability_0", "label_0", "probability_1", "label_1"]


@pytest.mark.dgl
def test_of_graphs(tmp_path: Path) -> None:
    runs = []
    for workers in (1, 2):
        config = make(
            tmp_path,
            name=f"on-{workers}",
            graph=dataset("TwoLabels", num=47),
            task={"kind": "graph_classification", "labels": "multi"},
            cluster={"workers": workers},
            sampling={"batch_size": 6 // workers},
        )
        runs.append((train_on_ranks(config), config))
    (one, config), (two, _) = runs
    assert np.allclose(losses(one), losses(two), atol=1e-5)
    metrics = one.summary["metrics"]
    assert metrics == pytest.approx(two.summary["metrics"], abs=1e-4)
    assert {"test/roc_auc", "test/roc_auc_1", "val/average_precision_0"} <= metrics.keys()
    frame = ask(one, config, 2).to_pandas()
    assert list(frame) == ["graph", *COLUMNS]
    unknown = frame["graph"] % 3 == 0
    assert frame["label_1"].isna().equals(unknown)
    assert (frame["label_1"][~unknown] == frame["graph"][~unknown] % 2).all()
    assert frame["probability_1"].between(0, 1).all()


@pytest.mark.dgl
@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ({"odd": 2.0}, "a label is 2, expected 0, 1, or -1 or NaN"),
        ({"missing": 1}, "no graph has a known label 'label'"),
    ],
)
def test_labels_that_are_none(args: dict[str, Any], cause: str, tmp_path: Path) -> None:
    task = {"kind": "graph_classification", "labels": "multi"}
    with pytest.raises(RuntimeError, match=cause):
        train_on_ranks(make(tmp_path, graph=dataset("TwoLabels", num=20, **args), task=task))


@pytest.mark.parametrize("kind", ["node_classification", "edge_classification"])
def test_of_nodes_and_edges(kind: str, tmp_path: Path) -> None:
    """A row of labels is a seed for training if one of them is known."""
    found = []
    for workers, parts in ((1, 1), (2, 2)):
        data = shop()
        of_edges = kind.startswith("edge")
        of = {"etype": "likes"} if of_edges else {"ntype": "thing"}
        place = data.edges[LIKES].data if of_edges else data.nodes["thing"].data
        given = place["label" if of_edges else "price"].astype(np.int64)
        rows = np.stack([given % 2, given // 2 % 2], axis=1)
        rows[::3, 0] = rows[::5, 1] = -1
        place["holds"] = rows
        config = config_of(
            tmp_path,
            f"{kind}-{workers}",
            data=data,
            parts=parts,
            task={"kind": kind, "target": "holds", "labels": "multi", **of},
            model={"hidden": 8},
            sampling={"fanout": [-1, -1], "batch_size": 40 // workers},
            cluster={"workers": workers},
            train={"epochs": 2},
        )
        run = train_on_ranks(config)
        found.append((numbers(run), run.summary["metrics"], ask(run, config, workers).to_pandas()))
    (curve, metrics, frame), (other, others, again) = found
    assert np.abs(curve - other).max() < 1e-4
    assert metrics == pytest.approx(others, abs=1e-3)
    assert list(frame)[-5:] == COLUMNS
    assert frame["label_0"].isna().sum() > frame["label_1"].isna().sum() > 0
    assert np.allclose(frame["probability_0"], again["probability_0"], atol=1e-4)
