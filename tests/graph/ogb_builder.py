"""Small datasets in the layout of the Open Graph Benchmark's raw files."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from raygnn.config.graph import OgbGraph

NODES, EDGES = 30, 80
TYPED = {"author": 12, "field": 5, "paper": 20}
TRIPLETS = {
    ("author", "writes", "paper"): 40,
    ("paper", "cites", "paper"): 50,
    ("paper", "has_topic", "field"): 25,
}
SPLIT = ("train", "valid", "test")


def write_gz(file: Path, rows: Any, header: list[str] | None = None) -> None:
    """One CSV as ogb writes them: without an index, and mostly without names."""
    file.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(np.asarray(rows))
    frame.to_csv(file, index=False, header=header or False, compression="gzip")


def write_nodes(root: Path, name: str = "ogbn-arxiv", labels: int = 1) -> OgbGraph:
    """A node dataset of one type, as ogbn-arxiv."""
    random = np.random.default_rng(0)
    place = root / name.replace("-", "_")
    raw = place / "raw"
    write_gz(raw / "edge.csv.gz", random.integers(0, NODES, (EDGES, 2)))
    write_gz(raw / "num-node-list.csv.gz", [NODES])
    write_gz(raw / "num-edge-list.csv.gz", [EDGES])
    write_gz(raw / "node-feat.csv.gz", random.normal(size=(NODES, 4)).astype(np.float32))
    write_gz(raw / "node_year.csv.gz", random.integers(2000, 2020, NODES))
    write_gz(raw / "node-label.csv.gz", random.integers(0, 3, (NODES, labels)))
    order = random.permutation(NODES)
    for split, part in zip(SPLIT, np.split(order, [20, 25]), strict=True):
        write_gz(place / "split" / "time" / f"{split}.csv.gz", part)
    (place / "RELEASE_v1.txt").write_text("")
    return OgbGraph(format="ogb", path=root, name=name)


def write_archives(
    root: Path,
    *,
    features: str = "float32",
    packed: bool = True,
    fortran: bool = True,
    **changes: Any,
) -> OgbGraph:
    """A node dataset in archives, as ogbn-papers100M: nodes outside of the splits have no label.

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


def write_typed_graph(place: Path) -> None:
    """The graph of ogbn-mag or ogbl-biokg, without what is to be predicted."""
    random = np.random.default_rng(1)
    raw = place / "raw"
    write_gz(raw / "num-node-dict.csv.gz", [list(TYPED.values())], list(TYPED))
    write_gz(raw / "triplet-type-list.csv.gz", [list(each) for each in TRIPLETS])
    for number, (etype, count) in enumerate(TRIPLETS.items()):
        where = raw / "relations" / "___".join(etype)
        sizes = TYPED[etype[0]], TYPED[etype[2]]
        write_gz(where / "edge.csv.gz", random.integers(0, sizes, (count, 2)))
        write_gz(where / "num-edge-list.csv.gz", [count])
        write_gz(where / "edge_reltype.csv.gz", np.full(count, number))
    write_gz(raw / "node-feat" / "paper" / "node-feat.csv.gz", random.normal(size=(20, 3)))
    write_gz(raw / "node-feat" / "paper" / "node_year.csv.gz", random.integers(2000, 2020, 20))


def write_typed(root: Path) -> OgbGraph:
    """A node dataset of several types, as ogbn-mag."""
    random = np.random.default_rng(2)
    place = root / "ogbn_mag"
    write_typed_graph(place)
    raw, split = place / "raw", place / "split" / "time"
    has = [[ntype == "paper" for ntype in TYPED]]
    write_gz(raw / "nodetype-has-label.csv.gz", has, list(TYPED))
    write_gz(split / "nodetype-has-split.csv.gz", has, list(TYPED))
    write_gz(raw / "node-label" / "paper" / "node-label.csv.gz", random.integers(0, 3, 20))
    for name, part in zip(SPLIT, np.split(random.permutation(20), [12, 16]), strict=True):
        write_gz(split / "paper" / f"{name}.csv.gz", part)
    (place / "RELEASE_v2.txt").write_text("")
    return OgbGraph(format="ogb", path=root, name="ogbn-mag")


def write_links(root: Path, name: str, *, legacy: bool = False) -> tuple[OgbGraph, list[Any]]:
    """A link dataset, and the three dictionaries of its splits; those of validation and test have
    edges that are not there, some of them perhaps."""
    random, other = np.random.default_rng(3), np.random.default_rng(5)
    place = root / name.replace("-", "_")
    sizes, parts = (30, 10, 6), []
    if name == "ogbl-biokg":
        write_typed_graph(place)
    else:
        write_nodes(root, name)
        (place / "raw" / "node-label.csv.gz").unlink()
        for file in (place / "split" / "time").iterdir():
            file.unlink()
    for size in sizes:
        source, target = random.integers(0, NODES, (2, size))
        part: dict[str, Any]
        if name == "ogbl-collab":
            part = {"edge": np.stack([source, target], 1), "weight": np.ones(size, np.int64)}
            part |= {"year": random.integers(2000, 2020, size)}
        elif name == "ogbl-ddi":
            part = {"edge": np.stack([source, target], 1)}
        elif name == "ogbl-citation2":
            part = {"source_node": source, "target_node": target}
        elif name == "ogbl-biokg":
            relation = random.integers(0, len(TRIPLETS), size)
            types = [list(TRIPLETS)[at] for at in relation]
            part = {
                "head_type": [each[0] for each in types],
                "head": np.array([random.integers(TYPED[each[0]]) for each in types]),
                "relation": relation,
                "tail_type": [each[2] for each in types],
                "tail": np.array([random.integers(TYPED[each[2]]) for each in types]),
            }
        else:
            part = {"head": source, "relation": random.integers(0, 4, size), "tail": target}
        if parts:
            part |= _negatives(part, other)
        parts.append(part)
    for split, part in zip(SPLIT, parts, strict=True):
        file = place / "split" / "time" / f"{split}.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        zipped = {"_use_new_zipfile_serialization": not legacy}
        torch.save(part, file, pickle_protocol=2 if legacy else 4, **zipped)
    return OgbGraph(format="ogb", path=root, name=name), parts


def _negatives(part: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    """What ogb has beside edges to rank: of pairs more than its largest k, else 20 for each."""
    if "edge" in part:
        return {"edge_neg": random.integers(0, NODES, (150, 2))}
    found = {}
    for name in ("target_node",) if "source_node" in part else ("head", "tail"):
        own = part[name]
        below = [TYPED[each] for each in part.get(f"{name}_type", [])] or [NODES] * len(own)
        others = [i + random.integers(1, num, 20) for i, num in zip(own, below)]
        found[f"{name}_neg"] = np.stack(others) % np.array(below)[:, None]
    return found


def raw_text(file: Path, text: str) -> None:
    """Put something else into a file."""
    with gzip.open(file, "wt") as stream:
        stream.write(text)
