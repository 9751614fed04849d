"""Graphs that cannot be joined to others are refused by their number."""

from __future__ import annotations

import pytest
import torch

from raygnn.errors import DataError
from raygnn.graph.collection.mapped_collection import Sample
from raygnn.graph.data import DEFAULT_NTYPE
from raygnn.sampling.collate import Collate
from raygnn.sampling.features import Inputs


def graph(y: float) -> Sample:
    return Sample(
        num_nodes={DEFAULT_NTYPE: 2},
        edges={},
        node_data={DEFAULT_NTYPE: {"feat": torch.ones(2, 3)}},
        edge_data={},
        y=torch.tensor(y),
    )


@pytest.mark.parametrize("y", [float("nan"), float("inf")])
def test_a_target_that_is_not_finite(y: float) -> None:
    """A graph for prediction may have an unknown target; other graphs are refused."""
    inputs = {DEFAULT_NTYPE: Inputs(("feat",), (), ())}
    for asked in (False, True):
        collate = Collate(graph(0.5), inputs, {}, torch.float32, False, None, asked=asked)
        collate.check(0, graph(-3.0))
        if asked and y != y:
            collate.check(1, graph(y))
            continue
        with pytest.raises(DataError, match=r"graph 1 has the target .* not finite"):
            collate.check(1, graph(y))
