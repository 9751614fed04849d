"""Collections: many graphs, packed on disk for tasks on whole graphs.

Neither torch nor dgl is loaded until graphs are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raygnn.config.graph import GraphSplit
from raygnn.errors import ConfigError
from raygnn.graph.collection.collection_manifest import (
    CollectionMeta,
    read_collection,
    split_graphs,
)
from raygnn.graph.collection.collection_store import MissingCollection, find_collection
from raygnn.storage.remote import RemotePath

if TYPE_CHECKING:
    from raygnn.config.schema import Config
    from raygnn.graph.collection.mapped_collection import Collection
    from raygnn.storage.remote import AnyPath

__all__ = [
    "CollectionMeta",
    "MissingCollection",
    "find_collection",
    "open_collection",
    "read_collection",
    "split_graphs",
]


def open_collection(config: Config, directory: AnyPath, *, others: bool = False) -> Collection:
    """Open a job's graphs; ``others`` than the training's need no targets, and have no splits but
    the dataset's own."""
    if isinstance(directory, RemotePath):
        message = f"{directory} is not on a disk of this machine"
        remedy = "copy the collection to a directory that every node sees"
        raise ConfigError(message, where="partition.path", remedy=remedy)
    from raygnn.graph.collection.mapped_collection import Collection

    graph = config.graph if isinstance(config.graph, GraphSplit) else GraphSplit()
    meta = read_collection(directory)
    meta.check_target(config.task, known=not others)
    return Collection(meta, config.task.target, None if others else graph)
