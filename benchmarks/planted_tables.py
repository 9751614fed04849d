"""A planted graph as Parquet tables with text ids, of any size, written in pieces.

A piece is a function of the seed and its number alone, so that pieces can be made by any process
in any order, and none needs the whole. Node i is in community i mod classes. An edge's first end
is drawn by a power law, the second one too, for a share ``homophily`` of the edges in the same
community; each row is an edge in both directions. Ids are text that says nothing of the number.

    python benchmarks/planted_tables.py DIRECTORY --nodes 400000 --edges 6400000
"""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

_NODES, _EDGES = 1 << 18, 1 << 21  # rows of a piece, which is a file
_SHIFT = 50.0  # flattens the top of the power law
_FEATURES, _LINKS, _MEANS = range(3)  # random streams

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Planted:
    """What the graph is like; ``edges`` are directed, two for each row."""

    nodes: int
    edges: int
    features: int = 64
    classes: int = 64
    homophily: float = 0.8
    noise: float = 8.0
    train: float = 0.08
    held_out: float = 0.02  # for validation, and for test; the rest is in no split
    power: float = 2.5
    seed: int = 0

    @property
    def node_pieces(self) -> int:
        return -(-self.nodes // _NODES)

    @property
    def edge_pieces(self) -> int:
        return -(-(self.edges // 2) // _EDGES)

    def node_table(self, piece: int) -> pa.Table:
        """Ids, features, labels and splits of a piece of the nodes."""
        first = piece * _NODES
        numbers = np.arange(first, min(first + _NODES, self.nodes))
        label = numbers % self.classes
        random = self._random(_FEATURES, piece)
        means = self._random(_MEANS, 0).choice([-1.0, 1.0], (self.classes, self.features))
        feat = random.standard_normal((len(numbers), self.features), np.float32)
        feat = (feat * self.noise + means[label]) / math.sqrt(1 + self.noise**2)
        place = random.random(len(numbers))
        bounds = np.cumsum([self.train, self.held_out, self.held_out])
        split = pa.array(["train", "val", "test", None])
        split = split.take(pa.array(np.searchsorted(bounds, place, side="right")))
        values = pa.array(feat.astype(np.float16).reshape(-1))
        matrix = pa.FixedSizeListArray.from_arrays(values, self.features)
        columns = {"id": ids(numbers), "feat": matrix, "label": label, "split": split}
        return pa.table(columns)

    def edge_table(self, piece: int) -> pa.Table:
        """Both ends of a piece of the edges."""
        count = min(_EDGES, self.edges // 2 - piece * _EDGES)
        random = self._random(_LINKS, piece)
        community = random.integers(0, self.classes, count)
        other = random.integers(0, self.classes, count)
        other = np.where(random.random(count) < self.homophily, community, other)
        source = self._member(community, random)
        target = self._member(other, random)
        target = np.where(source == target, (target + self.classes) % self.nodes, target)
        return pa.table({"source": ids(source), "target": ids(target)})

    def _member(self, community: Array, random: np.random.Generator) -> Array:
        """A node of each community, by the power law."""
        count = (self.nodes - 1 - community) // self.classes + 1
        exponent = 1 - 1 / (self.power - 1)
        low, high = _SHIFT**exponent, (count + _SHIFT) ** exponent
        drawn = (low + random.random(len(community)) * (high - low)) ** (1 / exponent) - _SHIFT
        return community + self.classes * np.clip(drawn.astype(np.int64), 0, count - 1)

    def _random(self, stream: int, piece: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, stream, piece])


def ids(numbers: Array) -> pa.Array:
    """Text ids, each number's own."""
    scrambled = (numbers.astype(np.uint64) * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)
    return pc.binary_join_element_wise("n", pc.cast(pa.array(scrambled), pa.string()), "")


def write(directory: Path, graph: Planted, processes: int = 1) -> Path:
    """Write the tables and their description; returns its path. Files that are there stay."""
    directory.mkdir(parents=True, exist_ok=True)
    pieces = [("nodes", piece) for piece in range(graph.node_pieces)]
    pieces += [("edges", piece) for piece in range(graph.edge_pieces)]
    with ProcessPoolExecutor(processes) as pool:
        tasks = [pool.submit(_write, directory, graph, *piece) for piece in pieces]
        for task in tasks:
            task.result()
    node = {"files": "nodes-*.parquet", "id": "id", "features": {"feat": "feat"}}
    edge = {"files": "edges-*.parquet", "source": "source", "target": "target"}
    described = {
        "nodes": {"node": {**node, "label": "label", "split": "split"}},
        "edges": {"node:links:node": {**edge, "undirected": True}},
    }
    (directory / "planted.yaml").write_text(yaml.safe_dump(described, sort_keys=False))
    return directory / "planted.yaml"


def _write(directory: Path, graph: Planted, kind: str, piece: int) -> None:
    path = directory / f"{kind}-{piece:05}.parquet"
    if path.exists():
        return
    table = graph.node_table(piece) if kind == "nodes" else graph.edge_table(piece)
    draft = path.with_suffix(".tmp")
    pq.write_table(table, draft, compression="zstd", use_dictionary=["split"])
    draft.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--edges", type=int, required=True, help="directed")
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    graph = Planted(given.nodes, given.edges, given.features)
    print(write(given.directory, graph, given.processes))


if __name__ == "__main__":
    main()
