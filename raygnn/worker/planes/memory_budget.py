"""What a rank keeps in its own memory because there is room for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property

from raygnn.config.schema import Config
from raygnn.graph.available_memory import memory
from raygnn.graph.staging.mapped import large_pages
from raygnn.graph.staging.shard import Shard
from raygnn.sampling.features import Inputs, row_width
from raygnn.worker.precision import PRECISIONS

_ROWS, _CACHE = 4, 16  # what part of the free memory its rows, or its cache, may take at most
_PLACE = 48  # bytes of the table in which a cached row is found
_UNKNOWN = 0.1  # of the remote rows, where nobody says how much memory is free


class Room:
    """Feature rows in a rank's memory; how many ranks share its node is not known here, at most
    as many as there are CPUs.

    Args:
        inputs: node type → the arrays that the model reads.
        workers: of the job.
    """

    def __init__(self, config: Config, shard: Shard, inputs: Mapping[str, Inputs], workers: int):
        self._config = config
        self._shard = shard
        self._inputs = inputs
        self._neighbours = min(workers, os.cpu_count() or 1)

    @cached_property
    def holds_rows(self) -> bool:
        """``staging.resident``: whether this rank copies the rows that it owns."""
        wanted = self._config.staging.resident
        if wanted != "auto":
            return wanted == "always"
        own = sum(self._shard.owned(t) * size for t, size in self._sizes.items())
        _, free = memory()
        return large_pages() and free is not None and _ROWS * own * self._neighbours <= free

    @cached_property
    def cached_share(self) -> float:
        """``sampling.cache``: share of the remote rows that this rank keeps."""
        wanted, shard = self._config.sampling.cache, self._shard
        if wanted != "auto":
            return wanted
        remote = sum(
            (shard.num_nodes(t) - shard.owned(t)) * (size + _PLACE)
            for t, size in self._sizes.items()
        )
        _, free = memory()
        if free is None:
            return _UNKNOWN
        return min(1.0, free / (_CACHE * self._neighbours) / max(1, remote))

    @property
    def _sizes(self) -> dict[str, int]:
        """Node type → bytes of a row."""
        width = PRECISIONS[self._config.precision].dtype.itemsize
        return {
            t: sum(
                row_width(arrays[name]) * (1 if name in self._inputs[t].scaled else width)
                for name in (*self._inputs[t].plain, *self._inputs[t].scaled)
            )
            for t, arrays in self._shard.node_data.items()
        }
