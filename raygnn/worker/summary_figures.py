"""The summary's figures of a run that came to its end."""

from __future__ import annotations

from typing import Any

import torch

from raygnn.runs.metrics_files import COMPUTE, STEP
from raygnn.tasks.embeddings import Embeddings
from raygnn.worker.comm.process_groups import Ranks
from raygnn.worker.comm.reduction import Reduction
from raygnn.worker.planes.plane import Traffic
from raygnn.worker.profiling import Profiling
from raygnn.worker.records import Records


def speed(records: Records) -> dict[str, Any]:
    """Seeds a second and where the time went, without evaluations and checkpoints."""
    busy = sum(records.totals[name] for name in STEP)
    compute = sum(records.totals[name] for name in COMPUTE)
    return {
        "seeds_per_second": records.seeds / busy if busy else 0.0,
        "seconds": {**records.totals, "compute": compute, "first_step": records.first_step},
    }


def communication(
    ranks: Ranks, traffic: Traffic, reduction: Reduction, embeddings: Embeddings | None
) -> dict[str, Any]:
    """What went between ranks. Collective."""
    counts = torch.tensor([traffic.rows, traffic.hits, ranks.data.sent_bytes])
    remote, hits, sent = ranks.control.sum(counts).tolist()
    learned = None
    if embeddings is not None:
        own = [embeddings.read, embeddings.remote, ranks.step.sent_bytes]
        read, others, moved = ranks.control.sum(torch.tensor(own)).tolist()
        learned = {"rows": read, "remote": others, "bytes": moved}
    return {
        "remote": {
            "rows": remote,
            "cache_hits": hits,
            "hit_rate": hits / remote if remote else None,
            "bytes": sent,
        },
        # of learned rows and their gradients; None where there are none
        "embeddings": learned,
        # None where DDP does not exchange them
        "gradients": {"bytes": reduction.whole or None, "buckets": reduction.buckets},
    }


def operators(profiling: Profiling) -> dict[str, Any]:
    """The top ones of this rank, if steps were recorded; None takes those of an earlier command
    away."""
    if not profiling.operators:
        return {"operators": None}
    return {"operators": {"steps": profiling.recorded, "top": profiling.operators}}
