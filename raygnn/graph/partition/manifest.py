"""Manifest of a partition (``raygnn.json``): contents, origin, and hashes of its files."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raygnn.errors import DataError
from raygnn.graph.arrays import Array
from raygnn.graph.data import MASKS
from raygnn.storage.remote import AnyPath
from raygnn.util.hashing import digest

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "raygnn.json"
LAYOUT_VERSION = 2

_LARGEST = 64 * 2**20  # bytes
_AGAIN = "partition the graph again"

M = TypeVar("M", bound=BaseModel)
_Count = Annotated[int, Field(ge=0)]
_Counts = dict[str, _Count]


class _ManifestSection(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class FileFacts(_ManifestSection):
    """Size of a file in bytes, and its SHA-256 in hex."""

    bytes: _Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Feature(_ManifestSection):
    """An array of nodes or edges: dtype, and shape without the rows."""

    dtype: str
    shape: list[_Count]


class PartFacts(_ManifestSection):
    """Size of one part.

    Attributes:
        nodes, edges: type → number of owned nodes or edges.
        halo: number of nodes of other parts that are sources of owned edges.
        cut: number of owned edges from other parts.
        splits: node type → split → number of owned nodes in its mask.
    """

    nodes: _Counts
    edges: _Counts
    halo: _Count
    cut: _Count
    splits: dict[str, _Counts]
    bytes: _Count

    @property
    def row(self) -> dict[str, int]:
        """The counts over all types: see `raygnn.graph.partition.read.table`."""
        return {
            "nodes": sum(self.nodes.values()),
            "edges": sum(self.edges.values()),
            "halo": self.halo,
            "cut": self.cut,
            "training_nodes": sum(counts.get("train", 0) for counts in self.splits.values()),
            "bytes": self.bytes,
        }


class PartitionSource(_ManifestSection):
    """Origin of a partition: the config's graph section, and all that determines the result."""

    options: dict[str, Any] = {}
    made_from: dict[str, Any] = {}


class Manifest(_ManifestSection):
    """Contents of ``raygnn.json``.

    Attributes:
        features: ``"<type>/<array>"`` → dtype and shape.
        ids: node types with ids of the user.
        names, reverses, transforms, columns, microseconds: see `raygnn.graph.data.GraphData`.
        files: path in the directory → size and hash.
        digest: hash of the input and everything else that determines the result.
        seconds: duration of each stage.
    """

    layout: int = LAYOUT_VERSION
    graph_name: str = ""
    num_parts: int
    method: str = ""
    features: dict[str, Feature]
    ids: list[str] = []
    names: dict[str, list[Any]] = {}
    reverses: dict[str, str] = {}
    transforms: dict[str, Any] = {}
    columns: dict[str, list[str]] = {}
    microseconds: list[str] = []
    parts: list[PartFacts]
    files: dict[str, FileFacts]
    versions: dict[str, str] = {}
    digest: str
    seed: int = 0
    source: PartitionSource
    seconds: dict[str, float] = {}


def split_counts(node_data: Mapping[str, Array | Tensor]) -> dict[str, dict[str, int]]:
    """Count the nodes in a part's masks (``"<type>/<name>"``): node type → split → number."""
    counts: dict[str, dict[str, int]] = {}
    for key, mask in node_data.items():
        ntype, _, name = key.rpartition("/")
        if name in MASKS:
            counts.setdefault(ntype, {})[name.removesuffix("_mask")] = int(mask.sum())
    return counts


def read_all(path: AnyPath) -> bytes:
    """Read a file. Raises OSError, also if the storage returns only part of it."""
    size, content = path.stat().st_size, path.read_bytes()
    if len(content) < size:  # damage that was written shows in the size, too
        raise OSError(errno.EIO, "the storage returned only part of the file", str(path))
    return content


def read_json(path: AnyPath, remedy: str = _AGAIN) -> dict[str, Any]:
    """Read a JSON object from a file. Raises DataError for anything else."""
    try:
        if not path.is_file():  # reading a FIFO would block
            raise DataError("is no file", where=str(path), remedy=remedy)
        if (size := path.stat().st_size) > _LARGEST:
            what = f"has {size:,} bytes, more than any partition's description"
            remedy = f"check that this is the right file, or {remedy}"
            raise DataError(what, where=str(path), remedy=remedy)
        values = json.loads(read_all(path).decode())
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON: {error}", where=str(path), remedy=remedy) from error
    if not isinstance(values, dict):
        raise DataError("is damaged: no JSON object", where=str(path), remedy=remedy)
    return values


def validated(model: type[M], values: Any, path: AnyPath, remedy: str = _AGAIN) -> M:
    """Validate the values of a JSON file. Raises DataError with the first key that is wrong."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part)[:100] for part in first["loc"])
        message = f"is damaged: {key}: {first['msg']}"
        raise DataError(message, where=str(path), remedy=remedy) from None


def check_size(path: AnyPath, expected: int, remedy: str) -> None:
    """Raise DataError if a file is missing or has another size."""
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError as reason:
        raise _unreadable(path, reason) from reason
    if size != expected:
        problem = "is missing" if size is None else f"has {size} bytes, expected {expected}"
        raise DataError(problem, where=str(path), remedy=remedy)


def _unreadable(path: AnyPath, error: OSError) -> DataError:
    message = f"cannot be read: {error.strerror}"
    return DataError(message, where=str(path), remedy="check its permissions")


def read_manifest(directory: AnyPath) -> Manifest | None:
    """Read the manifest of a partition; None if there is none."""
    path = directory / MANIFEST
    if not path.exists():
        return None
    values = read_json(path)
    if values.get("layout") != LAYOUT_VERSION:
        message = f"is of layout version {values.get('layout')!r}; this is version {LAYOUT_VERSION}"
        raise DataError(message, where=str(path), remedy=f"{_AGAIN} with this version of raygnn")
    if values.pop("checksum", None) != checksum(values):
        message = "does not describe the partition: its content has changed"
        remedy = f"the file is damaged: restore it, or {_AGAIN}"
        raise DataError(message, where=str(path), remedy=remedy)
    manifest = validated(Manifest, values, path)
    remedy = f"copy the complete directory again, or {_AGAIN}"
    for name, expected in manifest.files.items():
        check_size(directory / name, expected.bytes, remedy)
        if name.endswith(".json"):  # parts are compared when they are read
            compare(directory / name, expected, expected.bytes, file_facts(directory / name).sha256)
    return manifest


def checksum(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values, in hex; a manifest stores the one of its other values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def file_facts(path: AnyPath) -> FileFacts:
    """Read a file's size and hash. Raises OSError."""
    with path.open("rb") as stream:
        sha256 = digest(stream)
        return FileFacts(bytes=stream.tell(), sha256=sha256)


def compare(path: AnyPath, expected: FileFacts, size: int, sha256: str | None = None) -> None:
    """Raise DataError unless a file's size, and its hash if passed, are the expected ones."""
    problem = None
    if size != expected.bytes:
        problem = f"has {size} bytes, expected {expected.bytes}"
    elif sha256 not in (None, expected.sha256):
        problem = "has changed since it was written"
    if problem is not None:
        raise DataError(problem, where=str(path), remedy=f"copy the file again, or {_AGAIN}")
