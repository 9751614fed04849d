"""Small datasets in the layout of the Open Graph Benchmark's raw files."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from raygnn.config.graph import OgbGraph

NODES, EDGES = 30, 80
SPLIT = ("train", "valid", "test")


def write_gz(file: Path, rows: Any, header: list[str] | None = None) -> None:
    """Write a CSV as ogb does: without an index, and mostly without a header."""
    file.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(np.asarray(rows))
    frame.to_csv(file, index=False, header=header or False, compression="gzip")


def write_archives(
    root: Path,
    *,
    features: str = "float32",
    packed: bool = True,
    fortran: bool = True,
    **changes: Any,
) -> OgbGraph:
    """Write a node dataset in archives like ogbn-papers100M's: only nodes of the splits have
    labels.

    Args:
        features: their dtype.
        packed, fortran: how arrays lie in the archives.
        changes: arrays instead of these; None = without.
    """
    random = np.random.default_rng(4)
    place = root / "ogbn_papers100M"
    (place / "raw").mkdir(parents=True)
    arrays: dict[str, Any] = {
        "edge_index": random.integers(0, NODES, (2, EDGES)),
        "num_nodes_list": np.array([NODES]),
        "num_edges_list": np.array([EDGES]),
        "node_feat": (100 * random.random((NODES, 4))).astype(features),
        "node_year": random.integers(2000, 2020, (NODES, 1)),
        "edge_reltype": random.integers(0, 5, (EDGES, 1)),
        "edge_feat": random.random((EDGES, 2)).astype(">f4"),
    }
    labels = random.integers(0, 3, (NODES, 1)).astype(np.float32)
    order = random.permutation(NODES)
    labels[order[18:]] = np.nan
    save = np.savez_compressed if packed else np.savez
    stored = {"node_label": labels} | {k: v for k, v in changes.items() if k == "node_label"}
    save(place / "raw" / "node-label.npz", **stored)
    arrays = {k: v for k, v in (arrays | changes).items() if k not in stored and v is not None}
    order_of = np.asfortranarray if fortran else np.ascontiguousarray
    save(place / "raw" / "data.npz", **{name: order_of(array) for name, array in arrays.items()})
    for split, part in zip(SPLIT, np.split(order[:18], [10, 14]), strict=True):
        write_gz(place / "split" / "time" / f"{split}.csv.gz", part)
    return OgbGraph(format="ogb", path=root, name="ogbn-papers100M")


def raw_text(file: Path, text: str) -> None:
    """Replace the content of a file."""
    with gzip.open(file, "wt") as stream:
        stream.write(text)


class Links:
    """A link dataset like ogb's, whose graph lacks the held-out edges.

    Args:
        kind: ``ogbl-ddi``, ``ogbl-collab``, ``ogbl-citation2`` or ``ogbl-wikikg2``; ``typed`` has
            splits of several edge types.
    """

    def __init__(self, kind: str):
        self.parts = link_splits(kind)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        train = self.parts[0]
        ends = [train.get(key) for key in ("source_node", "target_node")]
        edge_index = np.stack(ends) if ends[0] is not None else np.zeros((2, 3), np.int64)
        return {"edge_index": edge_index, "num_nodes": NODES, "node_feat": None}

    def get_edge_split(self) -> dict[str, Any]:
        return dict(zip(SPLIT, self.parts, strict=True))


def link_splits(kind: str) -> list[dict[str, Any]]:
    """Return the edges of the three splits, each once; validation and test have negatives."""
    random = np.random.default_rng(3)
    codes = random.permutation(NODES * NODES)
    absent = np.ones((NODES, NODES), bool)
    absent.flat[codes[:46]] = False
    parts: list[dict[str, Any]] = []
    for at in np.split(codes[:46], [30, 40]):
        source, target, size = at // NODES, at % NODES, len(at)
        heads, tails = (
            np.array([random.choice(np.flatnonzero(row), 20) for row in free])
            for free in (absent[:, target].T, absent[source])
        )
        part: dict[str, Any]
        if kind in ("ogbl-collab", "ogbl-ddi"):
            part = {"edge": np.stack([source, target], 1)}
            if kind == "ogbl-collab":
                part["year"] = random.integers(2000, 2020, size)
            others = random.permutation(codes[46:])[:150]
            negatives = {"edge_neg": np.stack([others // NODES, others % NODES], 1)}
        elif kind == "ogbl-citation2":
            part = {"source_node": source, "target_node": target}
            negatives = {"target_node_neg": tails}
        elif kind == "ogbl-wikikg2":
            part = {"head": source, "relation": random.integers(0, 4, size), "tail": target}
            negatives = {"head_neg": heads, "tail_neg": tails}
        else:
            part, negatives = {"head_type": ["paper"] * size}, {}
        parts.append(part | negatives if parts else part)
    return parts
