"""Datasets of graphs: collections on disk and the user's dataset classes.

Neither torch nor dgl is loaded until graphs are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raygnn.config.graph import GraphSplit, ManyGraphs
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
    from raygnn.graph.collection.mapped_collection import Samples
    from raygnn.storage.remote import AnyPath

__all__ = [
    "CollectionMeta",
    "MissingCollection",
    "find_collection",
    "open_samples",
    "read_collection",
    "split_graphs",
]


def open_samples(config: Config, directory: AnyPath | None, *, others: bool = False) -> Samples:
    """Open a job's graphs.

    Args:
        directory: their collection; None for a dataset class of the user.
        others: the graphs are not those of the training: they need no targets, and have no splits
            except the dataset's own.

    Raises:
        ConfigError: the user's dataset cannot be imported or constructed, or the labels do not
            fit the task.
        DataError: the graphs cannot be read.
    """
    graph = config.graph if isinstance(config.graph, GraphSplit) else GraphSplit()
    split = None if others else graph
    if isinstance(graph, ManyGraphs) and graph.dataset is not None:
        from raygnn.graph.collection.user_dataset import UserSamples

        return UserSamples(graph.dataset, graph.args, split, target=config.task.target)
    if isinstance(directory, RemotePath):
        raise ConfigError(
            f"{directory} is not on a disk of this machine",
            where="partition.path",
            remedy="copy the collection to a directory that every node sees",
        )
    from raygnn.graph.collection.mapped_collection import Collection

    assert directory is not None
    meta = read_collection(directory)
    meta.check_target(config.task, known=not others)
    return Collection(meta, config.task.target, split)
