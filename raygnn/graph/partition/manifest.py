"""``raygnn.json``: what a partition holds, how it was made, and what its files must look like."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

from raygnn.errors import DataError
from raygnn.graph.arrays import Array, Rows, dtype_name
from raygnn.graph.data import MASKS, etype_str
from raygnn.graph.partition.layout import PartitionMeta, load_part
from raygnn.graph.remote import AnyPath

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


def feature(tensor: torch.Tensor | Rows) -> dict[str, Any]:
    """How the manifest describes an array: dtype, and shape without the rows."""
    return {"dtype": dtype_name(tensor), "shape": list(tensor.shape[1:])}


def splits(node_data: Mapping[str, Array | torch.Tensor]) -> dict[str, dict[str, int]]:
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
    """Check presence, size and SHA-256 of the files (all, or those of the parts named).

    Raises:
        DataError: naming the first file that is missing or has changed. A partition without a
            manifest has nothing to be checked against; its files are only read whole.
    """
    numbers = range(meta.num_parts) if parts is None else parts
    if meta.manifest is None:
        for number in numbers:
            load_part(meta, number)
        return
    paths = [meta.config_file, *(path for n in numbers for path in meta.files[n].all())]
    if parts is None:
        paths += [path for ntype in meta.ntypes if (path := meta.id_file(ntype)) is not None]
    for path in paths:
        with checked(meta, path) as file, file.open() as stream:
            while stream.read(_CHUNK):
                pass


@contextmanager
def checked(meta: PartitionMeta, path: AnyPath) -> Iterator[CheckedFile]:
    """A file of a partition, to be read once and to its end; then it is compared.

    Raises:
        DataError: it cannot be read, or its size or SHA-256 is not what the manifest says. What
            others wrote has no manifest to be compared with.
    """
    files = meta.manifest["files"] if meta.manifest else {}
    file = CheckedFile(path)
    yield file
    name = meta.name_of(path)
    if name in files:
        file.compare(files[name])


class CheckedFile:
    """A file that is hashed while it is read, from its start to its end."""

    def __init__(self, path: AnyPath):
        self._path = path
        self._hash = hashlib.sha256()
        self._size = 0

    def __str__(self) -> str:
        return str(self._path)

    def stat(self) -> Any:
        return self._path.stat()

    _stream: Any

    def open(self, mode: Literal["rb"] = "rb", buffering: int = -1) -> CheckedFile:
        with self._saying():
            self._stream = self._path.open(mode, buffering)
        return self

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()

    def read(self, size: int) -> bytes:
        with self._saying():
            data: bytes = self._stream.read(size)
        self._hash.update(data)
        self._size += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        start = self._size
        for low in range(0, len(buffer), _CHUNK):  # hashed while it is in the cache
            chunk = buffer[low : low + _CHUNK]
            with self._saying():
                count = self._stream.readinto(chunk)
            self._hash.update(chunk[:count])
            self._size += count
            if count < len(chunk):
                break
        return self._size - start

    def seek(self, to: int) -> None:
        """Only forward."""
        while self._size < to and self.read(min(_CHUNK, to - self._size)):
            pass

    def compare(self, facts: Mapping[str, Any]) -> None:
        remedy = "copy the file again, or make the partition again"
        if self._size != facts["bytes"]:
            raise DataError(
                f"has {self._size} bytes, expected {facts['bytes']}",
                where=str(self),
                remedy=remedy,
            )
        if self._hash.hexdigest() != facts["sha256"]:
            raise DataError("has changed since it was written", where=str(self), remedy=remedy)

    @contextmanager
    def _saying(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"cannot be read: {error.strerror or error}",
                where=str(self),
                remedy="copy the file again, or make the partition again",
            ) from error
