"""Jobs on every kind of input at once: plain, half, int8 with a scale, categories; edge weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raygnn.config.schema import Config
from raygnn.graph.data import GraphData
from raygnn.models.network import Network
from tests.sampling.test_features import mixed_graph
from tests.support.graphs import ITEM, USER, partitioned
from tests.support.small_jobs import JobFactory, train_on_ranks

pytestmark = pytest.mark.long

INPUTS = {"features": ["feat", "half", "count", "small"], "categories": {"brand": 4}}


def weighted_graph() -> GraphData:
    data = mixed_graph()
    edges = data.edges[USER, "buys", ITEM]
    edges.data["w"] = np.random.default_rng(4).random(edges.num).astype(np.float32)
    return data


def losses(config: Config, *, replicated: bool) -> list[float]:
    run = train_on_ranks(config, replicated=replicated)
    assert run.summary["metrics"]["test/accuracy"] > 0
    return [float(v) for v in run.metrics["train/loss"].dropna()]


@pytest.mark.parametrize(
    ("kind", "precision", "columns"),
    [
        ("sage", "fp32", "raw"),
        ("gcn", "bf16", "raw"),
        ("gat", "fp32", "learned"),
        ("gat", "bf16", "raw"),
    ],
)
def test_every_kind_of_input(
    kind: str, precision: str, columns: str, make_job: JobFactory, tmp_path: Path
) -> None:
    """Losses are the same for one worker, and for two with either topology."""
    directory = partitioned(weighted_graph(), tmp_path, 2).directory
    heads = {"columns": columns, **({"heads": 4} if kind == "gat" else {})}

    def job(workers: int, name: str, **sampling: Any) -> Config:
        return make_job(
            name=name,
            graph=None,
            partition={"path": str(directory)},
            task={"ntype": ITEM},
            precision=precision,
            model={"kind": kind, "hidden": 16, "dropout": 0.0, **heads, **INPUTS},
            sampling={
                "fanout": [{"buys": 2, "*": 3}, 3],
                "batch_size": 24 // workers,
                "edge_weight": "w",
                "cache": 0.3,
                **sampling,
            },
            cluster={"workers": workers},
        )

    alone = losses(job(1, "alone"), replicated=True)
    close = 1e-4 if precision == "fp32" else 0.1
    several = losses(job(2, "several"), replicated=columns == "learned")
    assert np.allclose(alone, several, atol=close, rtol=close)


def test_the_first_layer_combined_trains_the_same(
    make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without input dropout, the first layer is summed straight from the table, and equals the
    layer on its sources."""
    for kind in ("sage", "gcn"):
        found = []
        for workers in (1, 2):
            config = make_job(
                name=f"{kind}-{workers}",
                model={"kind": kind, "input_dropout": 0.0},
                sampling={"batch_size": 64 // workers},
                cluster={"workers": workers},
            )
            found.append(losses(config, replicated=workers == 1))
        with monkeypatch.context() as patch:
            patch.setattr(Network, "first_combine", None)
            model = {"kind": kind, "input_dropout": 0.0}
            config = make_job(name=f"{kind}-layer", model=model, cluster={"workers": 1})
            found.append(losses(config, replicated=True))
        for other in found[1:]:
            assert np.allclose(found[0], other, atol=1e-4, rtol=1e-4)
