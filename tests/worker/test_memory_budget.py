"""What a rank keeps because there is room for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raygnn.driver import job_plan
from raygnn.sampling.features import Inputs
from raygnn.worker.planes import model_inputs
from raygnn.worker.planes.model_inputs import MemoryBudget
from tests.graphs import partitioned, random_graph, shard_of
from tests.ranks import run_ranks
from tests.small_jobs import JobFactory


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
        return MemoryBudget(config, shard, {"_N": Inputs(("feat",), (), ())}, 2).cached_share

    assert run_ranks(2, kept) == [share, share]


def test_little_memory_keeps_little(
    make_job: JobFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In proportion: a tenth of the remote rows where there is room for those alone."""
    config = make_job()
    meta = partitioned(random_graph(nodes=60, degree=5), tmp_path, 2)

    def kept(exchange: object) -> bool:
        shard = shard_of(exchange, meta, replicated=True)  # type: ignore[arg-type]
        width = shard.node_data["_N"]["feat"].shape[1]
        remote = shard.num_nodes("_N") - shard.owned("_N")
        model_inputs.memory = lambda: (0, int(16 * 2 * 0.1 * remote * (4 * width + 48)))  # type: ignore[assignment]
        model_inputs.os.cpu_count = lambda: 8  # type: ignore[assignment]
        found = MemoryBudget(config, shard, {"_N": Inputs(("feat",), (), ())}, 2)
        return abs(found.cached_share - 0.1) < 1e-3

    assert run_ranks(2, kept, fresh=True) == [True, True]


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
    monkeypatch.setattr(model_inputs, "large_pages", lambda: pages)
    config = make_job(staging={"resident": resident})
    meta = partitioned(random_graph(nodes=60, degree=5), tmp_path, 1)

    def held(exchange: object) -> bool:
        shard = shard_of(exchange, meta, replicated=True)  # type: ignore[arg-type]
        return MemoryBudget(config, shard, {"_N": Inputs(("feat",), (), ())}, 1).holds_rows

    assert run_ranks(1, held) == [holds]


@pytest.mark.parametrize(
    ("topology", "free", "replicated"),
    [
        ("auto", [10**9, 10**10], True),
        ("auto", [10**9, 1000], False),
        ("auto", [None], True),  # a node that does not say
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
