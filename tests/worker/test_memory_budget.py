"""Memory budget of a rank: what it keeps in free memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raygnn.config.schema import Config
from raygnn.driver import job_plan
from raygnn.graph.staging.shard import Shard
from raygnn.sampling.features import Inputs
from raygnn.sampling.host_memory import Host
from raygnn.worker.planes import model_inputs
from raygnn.worker.planes.model_inputs import MemoryBudget
from tests.support.graphs import partitioned, random_graph, shard_of
from tests.support.ranks import run_ranks
from tests.support.small_jobs import JobFactory


def budget(config: Config, shard: Shard, exchange: Any, *ranks: int, most: int = 1) -> MemoryBudget:
    """Build the memory budget of a rank that is alone on its host, or shares it with ``ranks``."""
    host = Host(exchange, ranks or (exchange.world.rank,), most)
    ranks: Any = SimpleNamespace(config=config, host=host)
    return MemoryBudget(shard, {"_N": Inputs(("feat",), (), ())}, ranks)


@pytest.mark.parametrize(
    ("free", "told", "share"),
    [(10**12, "auto", 1.0), (0, "auto", 0.0), (10**12, 0.25, 0.25), (0, 1, 1)],
)
def test_the_cache_takes_what_is_free(
    free: int,
    told: object,
    share: float,
    make_job: JobFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_inputs, "memory", lambda: (0, free))
    config = make_job(sampling={"cache": told})
    meta = partitioned(random_graph(nodes=60, degree=5), tmp_path, 2)

    def kept(exchange: object) -> float:
        shard = shard_of(exchange, meta, replicated=True)  # type: ignore[arg-type]
        return budget(config, shard, exchange).cached_share

    assert run_ranks(2, kept) == [share, share]


@pytest.mark.parametrize("here", [(0,), (0, 1)])
def test_little_memory_keeps_little(
    here: tuple[int, ...], make_job: JobFactory, tmp_path: Path
) -> None:
    """A tenth of the remote rows is cached if there is memory for a tenth, once for all ranks of a
    host, whose leader decides."""
    config = make_job()
    meta = partitioned(random_graph(nodes=60, degree=5), tmp_path, 3)

    def kept(exchange: Any) -> bool:
        rank = exchange.world.rank
        shard = shard_of(exchange, meta, replicated=True)
        width = shard.node_data["_N"]["feat"].shape[1]
        host = here if rank in here else (rank,)
        remote = 60 - sum(int(np.diff(shard.bounds["_N"])[r]) for r in host)
        free = 0 if rank == 1 and rank in here else int(16 * 0.1 * remote * (4 * width + 48))
        model_inputs.memory = lambda: (0, free)  # type: ignore[assignment]
        share = budget(config, shard, exchange, *host, most=len(here)).cached_share
        return abs(share - 0.1) < 1e-2

    assert run_ranks(3, kept, fresh=True) == [True, True, True]


@pytest.mark.parametrize(
    ("resident", "free", "pages", "holds"),
    [
        ("auto", 10**12, True, True),
        ("auto", 10**12, False, False),
        ("auto", 0, True, False),
        ("always", 0, False, True),
        ("never", 10**12, True, False),
    ],
)
def test_rows_are_copied_where_there_is_room_or_as_told(
    resident: str,
    free: int,
    pages: bool,
    holds: bool,
    make_job: JobFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_inputs, "memory", lambda: (0, free))
    monkeypatch.setattr(model_inputs, "large_pages", lambda shared: pages)
    config = make_job(staging={"resident": resident})
    meta = partitioned(random_graph(nodes=60, degree=5), tmp_path, 1)

    def held(exchange: object) -> bool:
        shard = shard_of(exchange, meta, replicated=True)  # type: ignore[arg-type]
        return budget(config, shard, exchange).holds_rows

    assert run_ranks(1, held) == [holds]


@pytest.mark.parametrize(
    ("topology", "free", "replicated"),
    [
        ("auto", [10**9, 10**10], True),
        ("auto", [10**9, 1000], False),
        ("auto", [None], True),  # a node without a figure
        ("replicated", [0], True),
        ("partitioned", [10**12], False),
    ],
)
def test_every_node_has_the_structure_where_it_fits(
    topology: str, free: list[int | None], replicated: bool, make_job: JobFactory
) -> None:
    report: Any = SimpleNamespace(nodes=[SimpleNamespace(memory_available=n) for n in free])
    config = make_job(sampling={"topology": topology})
    assert job_plan._replicated(config, 10_000, report) is replicated
