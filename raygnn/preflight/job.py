"""What a check may look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from raygnn.config.schema import Config
from raygnn.preflight.facts import Column, NodeFacts, PartitionFacts, Resources
from raygnn.preflight.findings import Finding


@dataclass(frozen=True)
class Job:
    """Everything a check may look at.

    Attributes:
        nodes: those that answered; ``silent`` are the others.
        workers: how many will run.
        ntype: the node type to classify; None where the partition has none such.
    """

    config: Config
    partition: PartitionFacts
    resources: Resources
    nodes: tuple[NodeFacts, ...]
    silent: tuple[NodeFacts, ...]
    workers: int
    ntype: str | None

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        """The arrays of the node type to classify."""
        return dict(self.partition.columns.get(self.ntype, {})) if self.ntype else {}


Check: TypeAlias = Callable[[Job], Iterator[Finding]]
