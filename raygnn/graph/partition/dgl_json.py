"""DGL's partition json (``<name>.json``), read with every field checked and named in errors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from raygnn.errors import DataError
from raygnn.graph.data import EdgeType
from raygnn.graph.remote import AnyPath, within

IntArray = np.ndarray[Any, np.dtype[np.int64]]

_LARGEST = 64 * 2**20  # bytes

_PART_FILES = ("part_graph", "node_feats", "edge_feats")
# what DGL's dispatch tool calls the files of original ids; the json does not mention them
_ORIGINAL_IDS = ("orig_nids.dgl", "orig_eids.dgl")


def read_json(path: AnyPath) -> dict[str, Any]:
    """A JSON object from a file. Raises DataError for anything else."""
    try:
        if not path.is_file():  # a FIFO would be waited for
            raise DataError("is no file", where=str(path), remedy="make the partition again")
        if (size := path.stat().st_size) > _LARGEST:
            raise DataError(
                f"has {size:,} bytes, more than any partition's description",
                where=str(path),
                remedy="check that this is the file you meant, or make the partition again",
            )
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror}", where=str(path), remedy="check its permissions"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"is not JSON: {error}", where=str(path), remedy="make the partition again"
        ) from error
    if not isinstance(values, dict):
        raise DataError("is not a JSON object", where=str(path), remedy="make the partition again")
    return values


def find_config(directory: AnyPath, manifest: str) -> AnyPath:
    """The one json of a directory that describes a partition (GraphStorm leaves others there)."""
    found: list[AnyPath] = []
    jsons: list[AnyPath] = [*directory.glob("*.json")]
    for path in sorted(jsons, key=lambda path: path.name):
        if path.name != manifest and {"num_parts", "node_map"} <= read_json(path).keys():
            found.append(path)
    if len(found) == 1:
        return found[0]
    raise DataError(
        f"holds {len(found) or 'no'} partition{'s' if found else ''}",
        where=str(directory),
        remedy="name the partition's json file, the one with num_parts and node_map in it",
    )


class Fields:
    """The fields of one partition json. Every method raises DataError naming file and key."""

    def __init__(self, path: AnyPath):
        self.path = path
        self.values = read_json(path)

    def bad(self, key: str, what: str) -> DataError:
        return DataError(
            what,
            where=f"{self.path}: {key}",
            remedy="make the partition again, or correct the json",
        )

    def integer(self, key: str, low: int, high: int) -> int:
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.bad(key, f"{value!r} is not a whole number from {low} to {high}")
        return value

    def types(self, key: str, default: str) -> list[str]:
        """Type names in the order of their ids."""
        ids = self.values.get(key, {default: 0})
        if not isinstance(ids, dict) or not ids:
            raise self.bad(key, f"{ids!r} does not number the types")
        order = {number: name for name, number in ids.items() if isinstance(number, int)}
        if sorted(order) != list(range(len(ids))):
            raise self.bad(key, f"{ids!r} does not number the types from 0")
        return [order[number] for number in range(len(ids))]

    def edge_types(self, key: str, default: str, ntypes: list[str]) -> list[EdgeType]:
        etypes: list[EdgeType] = []
        for name in self.types(key, default):
            ends = name.split(":")
            if len(ends) != 3:
                raise self.bad(key, f"{name!r} is not 'source type:relation:destination type'")
            if not {ends[0], ends[2]} <= set(ntypes):
                raise self.bad(key, f"{name!r} joins types that are not in ntypes")
            etypes.append((ends[0], ends[1], ends[2]))
        return etypes

    def ranges(
        self, key: str, types: list[str], num_parts: int, total_key: str
    ) -> dict[str, IntArray]:
        """Type → int64 ``[num_parts, 2]``; also from the old spelling, which lists only ends."""
        given = self.values.get(key)
        if isinstance(given, list) and len(types) == 1:
            given = {types[0]: given}
        if not isinstance(given, dict):
            raise self.bad(key, "holds no id ranges (partitions that map ids by file are not read)")
        if set(given) != set(types):
            raise self.bad(key, f"has the types {sorted(given)}, expected {sorted(types)}")
        ranges = {kind: self._range(f"{key}.{kind}", given[kind], num_parts) for kind in types}
        flat = np.stack(list(ranges.values()), axis=1).reshape(-1, 2)
        follows = np.concatenate([[0], flat[:-1, 1]])
        if (flat[:, 0] != follows).any() or (flat[:, 0] > flat[:, 1]).any():
            raise self.bad(key, "its ranges do not follow each other, part by part, type by type")
        if self.values.get(total_key) != flat[-1, 1]:
            raise self.bad(
                total_key, f"is {self.values.get(total_key)!r}, but {key} ends at {flat[-1, 1]}"
            )
        return ranges

    def _range(self, key: str, rows: Any, num_parts: int) -> IntArray:
        try:
            array = np.asarray(rows)
        except ValueError:  # rows of unequal length
            array = np.empty(0)
        if array.dtype.kind == "i" and array.shape == (num_parts,):
            array = np.stack([np.concatenate([[0], array[:-1]]), array], axis=1)
        if array.dtype.kind != "i" or array.shape != (num_parts, 2):
            raise self.bad(key, f"is not a list of {num_parts} id ranges")
        return array.astype(np.int64)

    def part_files(
        self, part: int
    ) -> tuple[AnyPath, AnyPath, AnyPath, AnyPath | None, AnyPath | None]:
        """Graph, node data, edge data; original node and edge ids where there are any."""
        entry = self.values.get(f"part-{part}")
        if not isinstance(entry, dict):
            raise self.bad(f"part-{part}", "is missing")
        if "part_graph" not in entry and "part_graph_graphbolt" in entry:
            raise DataError(
                "this partition holds only GraphBolt's fused graphs, which are not read",
                where=f"{self.path}: part-{part}",
                remedy="partition with use_graphbolt=False, or keep part_graph beside it",
            )
        graph, node, edge = (
            self._inside(f"part-{part}.{key}", entry.get(key)) for key in _PART_FILES
        )
        beside: list[AnyPath] = [graph.with_name(name) for name in _ORIGINAL_IDS]
        nids, eids = (path if path.is_file() else None for path in beside)
        return graph, node, edge, nids, eids

    def _inside(self, key: str, name: object) -> AnyPath:
        if not isinstance(name, str) or not name:
            raise self.bad(key, "is missing")
        directory = self.path.parent.resolve()
        try:
            path = (directory / name).resolve()
            exists = path.is_file()
        except (OSError, ValueError):  # a name that no file can have
            raise self.bad(key, f"{name!r} is no file name") from None
        if within(path, directory) is None:
            raise self.bad(key, f"{name!r} leads out of the partition's directory")
        if not exists:
            raise DataError(
                "a file of the partition is missing",
                where=str(path),
                remedy="copy the whole directory, or make the partition again",
            )
        return path
