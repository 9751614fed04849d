"""What the driver hands to every rank; light, so that the driver need not import what ranks do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raygnn.config.schema import Config

if TYPE_CHECKING:
    from raygnn.graph.layout import AnyPath

STOP = ".stop"  # in the run directory: the driver wants the ranks to end
SAVE = ".save"  # in the run directory: somebody wants a checkpoint now; gone when it is written
LENGTH = ".length.json"  # in the run directory: rank 0's ``steps_per_epoch``
RESULT = ".result.json"  # in the run directory: what rank 0 leaves for the driver


def host_of(logs: Path, rank: int) -> str | None:
    """Where a rank runs, or ran last, as the backend noted it; None where it did not."""
    try:
        last = (logs / f"comm-rank-{rank}.jsonl").read_text().splitlines()[-1]
        return str(json.loads(last)["host"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def attempts(run_dir: Path) -> int:
    """How often the ranks of a run were started: before each, the backend leaves rank 0 a line."""
    try:
        with open(run_dir / "logs" / "comm-rank-0.jsonl", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


@dataclass(frozen=True)
class Job:
    """One run, as every rank sees it.

    Attributes:
        config: of the run.
        partition: directory of the partition, or of a collection of graphs; it may appear after
            the ranks have started. None for a dataset of the user's own.
        run_dir: of the run, visible on every node.
        ntype: the node type to classify; None where the seeds are graphs.
        replicated: whether every rank holds the whole structure.
        started: when the command began, seconds since the epoch.
        global_batch: seeds of a batch, over all ranks; as the run began, whatever its number of
            workers was then.
    """

    config: Config
    partition: AnyPath | None
    run_dir: Path
    ntype: str | None
    replicated: bool
    started: float
    global_batch: int
