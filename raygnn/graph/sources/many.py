"""Many graphs as files hold them: of one file at a time, each graph read when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raygnn.graph.data import GraphData


@dataclass(frozen=True)
class GraphSet:
    """The graphs of one file.

    Attributes:
        file: where they come from.
        num: how many there are.
        labels: name → array ``[num, …]`` of any dtype, a torch tensor where that is bfloat16.
        graphs: to be read once and in order; their names say where they are, for errors.
        values: array → what its numbers 0, 1, … stood for in the file, where they were
            renumbered.
    """

    file: Path
    num: int
    labels: Mapping[str, Any]
    graphs: Iterator[GraphData]
    values: Mapping[str, list[int]] = field(default_factory=dict)
