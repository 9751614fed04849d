"""``raygnn.json`` of a partition, read with everything checked that somebody relies on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raygnn.errors import DataError
from raygnn.graph.data import MASKS, etype_str
from raygnn.graph.partition.dgl_json import read_json
from raygnn.graph.remote import AnyPath

if TYPE_CHECKING:
    from raygnn.graph.partition.layout import PartitionMeta

_SHOWN = 100  # characters of a name that is none
_LONGEST = 256  # characters of a file's name: one more than file systems allow
_COUNTS = ("halo", "cut", "bytes")


def read_manifest(path: AnyPath, layout: int) -> dict[str, Any] | None:
    """The manifest; None where there is none.

    Args:
        layout: the version that can be read.

    Raises:
        DataError: it is of another version, or not as we write it.
    """
    if not path.exists():
        return None
    manifest = read_json(path)
    if manifest.get("layout") != layout:
        raise DataError(
            f"is of layout version {manifest.get('layout')!r}; this is version {layout}",
            where=str(path),
            remedy="make the partition again with this version of raygnn",
        )
    if (wrong := _wrong_alone(manifest)) is not None:
        raise _damaged(path, wrong)
    return manifest


def check_manifest(path: AnyPath, meta: PartitionMeta) -> None:
    """Compare a partition's manifest with DGL's json, which counts the same.

    Raises:
        DataError: they contradict each other.
    """
    if meta.manifest is not None and (wrong := _wrong_beside(meta.manifest, meta)) is not None:
        raise _damaged(path, wrong)


def _damaged(path: AnyPath, wrong: str) -> DataError:
    return DataError(
        f"does not say what the partition is: {wrong}",
        where=str(path),
        remedy="the file is damaged: restore it, or make the partition again",
    )


def _wrong_alone(manifest: Mapping[str, Any]) -> str | None:
    """The first entry that is missing, or of no kind that we write."""
    if not isinstance(manifest.get("digest"), str):
        return "digest"
    for name, kind in (("files", dict), ("features", dict), ("parts", list), ("source", dict)):
        if not isinstance(manifest.get(name), kind):
            return name
    for name, facts in manifest["files"].items():
        if not _is_inside(name):
            return f"files, {name[:_SHOWN]!r} is no file of it"
        if not (isinstance(facts, dict) and _is_count(facts.get("bytes")) and _is_digest(facts)):
            return f"files, {name}"
    for name, facts in manifest["features"].items():
        if not (isinstance(facts, dict) and isinstance(facts.get("dtype"), str)):
            return f"features, {name}"
        if not isinstance(facts.get("shape"), list) or not all(map(_is_count, facts["shape"])):
            return f"features, {name}"
    for number, part in enumerate(manifest["parts"]):
        if not (isinstance(part, dict) and all(_is_count(part.get(key)) for key in _COUNTS)):
            return f"parts, {number}"
        splits = part.get("splits")
        if not isinstance(splits, dict) or not all(map(_are_counts, splits.values())):
            return f"parts, {number}, splits"
    if not _are_names(manifest.get("ids", [])):
        return "ids"
    reverses = manifest.get("reverses", {})
    if not isinstance(reverses, dict) or not _are_names([*reverses.values()]):
        return "reverses"
    source = manifest["source"]
    if not all(isinstance(source.get(key, {}), dict) for key in ("made_from", "options")):
        return "source"
    seconds = manifest.get("seconds", {})
    if not isinstance(seconds, dict) or not all(
        isinstance(each, (int, float)) for each in seconds.values()
    ):
        return "seconds"
    return None


def _wrong_beside(manifest: Mapping[str, Any], meta: PartitionMeta) -> str | None:
    """The first entry that is not what DGL's json says."""
    parts = manifest["parts"]
    if manifest.get("num_parts") != meta.num_parts or len(parts) != meta.num_parts:
        return "num_parts"
    paths = (meta.config_file, *(path for files in meta.files for path in files.all()))
    for path in paths:
        if meta.name_of(path) not in manifest["files"]:
            return f"files, {meta.name_of(path)} is missing"
    for ntype in manifest.get("ids", []):
        if ntype not in meta.ntypes or f"ids/{ntype}.arrow" not in manifest["files"]:
            return f"ids, {ntype}"
    known = {etype_str(etype): etype[::2] for etype in meta.etypes}
    for one, other in manifest.get("reverses", {}).items():
        if one not in known or known.get(other) != known[one][::-1]:
            return f"reverses, {one[:_SHOWN]!r}"
    nodes = {ntype: meta.node_ranges[ntype] for ntype in meta.ntypes}
    edges = {etype_str(etype): meta.edge_ranges[etype] for etype in meta.etypes}
    masks: dict[str, set[str]] = {}
    for key in manifest["features"]:
        kind, _, name = key.rpartition("/")
        if kind in nodes and name in MASKS:
            masks.setdefault(kind, set()).add(name.removesuffix("_mask"))
    for number, part in enumerate(parts):
        for key, ranges in (("nodes", nodes), ("edges", edges)):
            sizes = {kind: int(rows[number, 1] - rows[number, 0]) for kind, rows in ranges.items()}
            if part.get(key) != sizes:
                return f"parts, {number}, {key}"
        if {kind: set(counts) for kind, counts in part["splits"].items()} != masks:
            return f"parts, {number}, splits"
    return None


def _is_inside(name: str) -> bool:
    """Whether it can be the name of a file in the partition's directory, or below."""
    parts = name.split("/")
    return "\0" not in name and not {"", ".", ".."} & {*parts} and max(map(len, parts)) < _LONGEST


def _are_names(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_counts(values: Any) -> bool:
    return isinstance(values, dict) and all(map(_is_count, values.values()))


def _is_digest(facts: Mapping[str, Any]) -> bool:
    digest = facts.get("sha256")
    return isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) is not None
