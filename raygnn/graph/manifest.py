"""``raygnn.json``: what a partition holds, how it was made, and what its files must look like."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from raygnn.errors import DataError
from raygnn.graph.arrays import dtype_name
from raygnn.graph.data import MASKS, etype_str
from raygnn.graph.layout import PartitionMeta, load_part

_CHUNK = 1 << 20


def describe(meta: PartitionMeta) -> dict[str, Any]:
    """The manifest's facts: ``parts`` (see :func:`table`), ``features`` (name → dtype, shape),
    ``digest``, ``method``, ``seconds``, ….

    For a partition that others wrote, which has no manifest, the parts are read for it.
    """
    if meta.manifest is not None:
        return meta.manifest
    features: dict[str, Any] = {}
    parts = []
    for number in range(meta.num_parts):
        part = load_part(meta, number)
        cut, halo = 0, 0
        for ntype in meta.ntypes:
            first, last = meta.node_ranges[ntype][number]
            far = torch.zeros(meta.num_nodes(ntype), dtype=torch.bool)
            for etype, csc in part.csc.items():
                if etype[0] == ntype:
                    far[csc.src] = True
                    cut += int(((csc.src < first) | (csc.src >= last)).sum())
            far[first:last] = False
            halo += int(far.sum())
        node_data = _flat(part.node_data)
        edge_data = _flat({etype_str(t): frame for t, frame in part.edge_data.items()})
        features |= {key: feature(tensor) for key, tensor in (node_data | edge_data).items()}
        parts.append(
            {
                "nodes": {t: int(r[number, 1] - r[number, 0]) for t, r in meta.node_ranges.items()},
                "edges": {etype_str(t): len(csc.eid) for t, csc in part.csc.items()},
                "halo": halo,
                "cut": cut,
                "splits": splits(node_data),
                "bytes": sum(path.stat().st_size for path in meta.files[number].all()),
            }
        )
    return {
        "digest": meta.digest,
        "graph_name": meta.graph_name,
        "num_parts": meta.num_parts,
        "features": features,
        "parts": parts,
    }


def feature(tensor: torch.Tensor) -> dict[str, Any]:
    """How the manifest describes an array: dtype, and shape without the rows."""
    return {"dtype": dtype_name(tensor), "shape": list(tensor.shape[1:])}


def splits(node_data: Mapping[str, torch.Tensor]) -> dict[str, dict[str, int]]:
    """How many nodes a part's masks (``"<type>/<name>"``) mark: node type → split → number.

    Masks that are not there are left out, and so are types without any.
    """
    found: dict[str, dict[str, int]] = {}
    for key, mask in node_data.items():
        ntype, _, name = key.rpartition("/")
        if name in MASKS:
            found.setdefault(ntype, {})[name.removesuffix("_mask")] = int(mask.sum())
    return found


def _flat(frames: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{kind}/{name}": t for kind, frame in frames.items() for name, t in frame.items()}


def table(meta: PartitionMeta) -> list[dict[str, Any]]:
    """One row for each part and one for the total, all counts over all types.

    Keys: ``part`` (number, or ``"total"``), ``nodes``, ``edges`` (in-edges of the part's nodes),
    ``halo`` (nodes of other parts that these come from), ``cut`` (edges that come from other
    parts), ``training_nodes``, ``bytes``, ``seconds`` (of the total; None where unknown).
    """
    facts = describe(meta)
    rows = [
        {
            "part": number,
            "nodes": sum(part["nodes"].values()),
            "edges": sum(part["edges"].values()),
            "halo": part["halo"],
            "cut": part["cut"],
            "training_nodes": sum(counts.get("train", 0) for counts in part["splits"].values()),
            "bytes": part["bytes"],
            "seconds": None,
        }
        for number, part in enumerate(facts["parts"])
    ]
    total = {
        key: sum(row[key] for row in rows) for key in rows[0] if key not in ("part", "seconds")
    }
    seconds = sum(facts["seconds"].values()) if "seconds" in facts else None
    return [*rows, {"part": "total", **total, "seconds": seconds}]


def verify(meta: PartitionMeta, parts: Iterable[int] | None = None) -> None:
    """Check presence, size and SHA-256 of the files (of all parts, or of those named).

    Raises:
        DataError: naming the first file that is missing or has changed. A partition without a
            manifest has nothing to be checked against; its files are only read whole.
    """
    numbers = range(meta.num_parts) if parts is None else parts
    if meta.manifest is None:
        for number in numbers:
            load_part(meta, number)
        return
    wanted = {path for number in numbers for path in meta.files[number].all()}
    for name, facts in meta.manifest["files"].items():
        path = (meta.directory / name).resolve()
        if path in wanted or path == meta.config_file.resolve():
            _verify_file(path, facts)


def _verify_file(path: Path, facts: dict[str, Any]) -> None:
    remedy = "copy the file again, or make the partition again"
    digest = hashlib.sha256()
    size = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}", where=str(path), remedy=remedy
        ) from error
    if size != facts["bytes"]:
        raise DataError(
            f"has {size} bytes, expected {facts['bytes']}", where=str(path), remedy=remedy
        )
    if digest.hexdigest() != facts["sha256"]:
        raise DataError("has changed since it was written", where=str(path), remedy=remedy)
