"""Edges the other way round: a second edge type, with the same arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raygnn.config.graph import TriplesGraph
from raygnn.errors import ConfigError
from raygnn.graph.data import EdgeFrame
from raygnn.graph.partition.layout import read_meta
from raygnn.graph.sources import add_reverses, digest, load_graph
from tests.support.graphs import ITEM, TAG, partition_graph, typed_graph
from tests.support.parted import load_part

TRIPLE, REVERSE = ("entity", "triple", "entity"), ("entity", "rev_triple", "entity")


@pytest.fixture
def triples(tmp_path: Path) -> TriplesGraph:
    (tmp_path / "train.txt").write_text("a\tof\tb\nc\tin\ta\na\tin\tb\n")
    (tmp_path / "test.txt").write_text("c\tof\tb\n")
    return TriplesGraph(format="triples", path=tmp_path, reverse=True)


def test_reverses_have_the_same_arrays(triples: TriplesGraph, tmp_path: Path) -> None:
    data = load_graph(triples)
    assert data.reverses == {TRIPLE: REVERSE}
    there, back = data.edges[TRIPLE], data.edges[REVERSE]
    assert (there.src.tolist(), there.dst.tolist()) == (back.dst.tolist(), back.src.tolist())
    assert back.data.keys() == there.data.keys() >= {"relation", "train_mask", "test_mask"}
    assert data.names["entity:rev_triple:entity/relation"] == ["in", "of"]

    meta = partition_graph(data, tmp_path / "p")
    assert read_meta(meta.directory).reverses == {TRIPLE: REVERSE}
    found: dict[tuple[str, str, str], list[tuple[int, ...]]] = {TRIPLE: [], REVERSE: []}
    for number in range(2):
        part = load_part(meta, number)
        for etype, csc in part.csc.items():
            first = int(meta.node_ranges["entity"][number, 0])
            dst = np.repeat(np.arange(len(csc.indptr) - 1) + first, np.diff(csc.indptr))
            rows = csc.eid - int(meta.edge_ranges[etype][number, 0])
            kinds = part.edge_data[etype]["relation"][rows]
            masks = part.edge_data[etype]["test_mask"][rows]
            edges = zip(csc.src.tolist(), dst.tolist(), kinds.tolist(), masks.tolist())
            found[etype] += edges
    assert len(found[TRIPLE]) == 4
    assert sorted((d, s, *rest) for s, d, *rest in found[REVERSE]) == sorted(found[TRIPLE])


def test_reverse_edges_change_the_digest(triples: TriplesGraph) -> None:
    plain = triples.model_copy(update={"reverse": False})
    assert digest(triples) != digest(plain)
    assert load_graph(plain).reverses == {}
    assert list(load_graph(plain).edges) == [TRIPLE]


def test_every_type_gets_one() -> None:
    data = typed_graph()
    before = list(data.edges)
    add_reverses(data)
    assert data.edges[TAG, "rev_has", ITEM].num == data.edges[ITEM, "has", TAG].num
    assert list(data.reverses) == before
    assert len(data.edges) == 2 * len(before)


def test_a_name_that_is_taken() -> None:
    data = typed_graph()
    data.edges[TAG, "rev_has", ITEM] = EdgeFrame(np.zeros(1, np.int64), np.zeros(1, np.int64))
    with pytest.raises(ConfigError, match="tag:rev_has:item already") as error:
        add_reverses(data)
    assert error.value.where == "graph.reverse"
