"""``ids/<node type>.arrow`` of a partition: what the user calls the nodes, by their numbers.

An Arrow IPC file of one record batch with the column ``id``, int64 or large_string; row *i* is node
*i* of the graph that was partitioned, so that the file can be mapped and asked for any rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from raygnn.errors import DataError
from raygnn.graph.partition.dgl_file import Written
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.partition.manifest import checked
from raygnn.graph.sources.input_files import sha256
from raygnn.util.files import sync_file

_CHUNK = 1 << 22
_COLUMN = "id"


def write_ids(ids: Mapping[str, Any], directory: Path) -> dict[str, Written]:
    """Write the ids of each node type, durably; returns the files by their names.

    Args:
        ids: node type → pyarrow array ``[N]``.
    """
    written = {}
    if ids:
        (directory / "ids").mkdir()
    for ntype, values in ids.items():
        file = directory / "ids" / f"{ntype}.arrow"
        batch = pa.RecordBatch.from_arrays([values], names=[_COLUMN])
        with file.open("wb") as stream:
            with pa.ipc.new_file(stream, batch.schema) as writer:
                writer.write_batch(batch)
            sync_file(stream)
        written[f"ids/{file.name}"] = Written(file.stat().st_size, sha256(file))
    return written


def read_ids(meta: PartitionMeta, ntype: str) -> Any:
    """The ids of a node type, a pyarrow array ``[N]``, mapped where they lie on a disk.

    None where the partition has none: its nodes are called by their numbers.

    Raises:
        DataError: the file is missing or has changed.
    """
    path = meta.id_file(ntype)
    if path is None:
        return None
    with checked(meta, path) as file, file.open() as stream:
        while stream.read(_CHUNK):
            pass
    source = pa.memory_map(str(path)) if isinstance(path, Path) else path.read_bytes()
    try:
        ids = pa.ipc.open_file(source).get_batch(0).column(_COLUMN)
    except (pa.ArrowException, KeyError) as error:
        raise DataError(
            f"does not hold ids: {error}", where=str(path), remedy="make the partition again"
        ) from None
    if len(ids) != meta.num_nodes(ntype):
        raise DataError(
            f"holds {len(ids)} ids, expected {meta.num_nodes(ntype)}",
            where=str(path),
            remedy="make the partition again",
        )
    return ids
