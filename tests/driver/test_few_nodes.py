"""Graphs of few nodes get one worker where nothing else is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.driver import inputs, job_plan
from raygnn.driver.inputs import read_input
from raygnn.driver.job_plan import count_workers
from raygnn.graph import sources
from raygnn.runs.display import NullDisplay
from tests.support.builders import write_dgl
from tests.support.small_jobs import job


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A machine with room for four workers."""
    monkeypatch.setattr(job_plan, "resolve_workers", lambda config, resources: 4)
    return Mock(local=True)


def config_of(tmp_path: Path, **sections: Any) -> Config:
    return load_config(job(tmp_path, **{"cluster": {"workers": "auto"}, **sections}))


@pytest.mark.parametrize(("nodes", "workers"), [(2_000, 1), (49_999, 1), (50_000, 4)])
def test_the_number_of_nodes_decides(
    nodes: int, workers: int, cluster: Mock, tmp_path: Path
) -> None:
    config = config_of(tmp_path, graph={"nodes": nodes, "degree": 2, "features": 2})
    sized, num, _ = count_workers(config, cluster, NullDisplay())
    assert num == workers
    assert sized.cluster.workers == (1 if workers == 1 else "auto")


@pytest.mark.parametrize("workers", [2, [1, 3]])
def test_a_requested_number_of_workers_is_kept(workers: Any, cluster: Mock, tmp_path: Path) -> None:
    config = config_of(tmp_path, cluster={"workers": workers})
    sized, num, early = count_workers(config, cluster, NullDisplay())
    assert (sized, early) == (config, None)
    assert num == (workers if isinstance(workers, int) else workers[1])


def test_a_file_is_read_once_and_a_partition_is_used_again(
    cluster: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(
        {**job(tmp_path, cluster={"workers": "auto"}), "graph": write_dgl(tmp_path)}
    )
    reads, hashes = (Mock(wraps=f) for f in (inputs.load_graph, sources.digest))
    monkeypatch.setattr(inputs, "load_graph", reads)
    monkeypatch.setattr(sources, "digest", hashes)
    for number in (1, 2):
        sized, num, early = count_workers(config, cluster, NullDisplay())
        given = read_input(sized, num, NullDisplay(), cluster, early=early)
        made = given.made(NullDisplay())
        assert (num, made.parts) == (1, 1)
        assert (reads.call_count, hashes.call_count) == (1, number)


def test_a_partition_for_more_workers_does_not_hide_the_graph(
    cluster: Mock, tmp_path: Path
) -> None:
    auto = {"cluster": {"workers": "auto"}, "partition": {"parts": "auto"}}
    config = load_config({**job(tmp_path, **auto), "graph": write_dgl(tmp_path)})
    read_input(config.with_workers(4), 4, NullDisplay(), cluster).made(NullDisplay())
    sized, num, early = count_workers(config, cluster, NullDisplay())
    given = read_input(sized, num, NullDisplay(), cluster, early=early)
    assert given.made(NullDisplay()).parts == 1


def test_large_graphs_are_not_read_to_count_them(
    cluster: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_EARLY", 1000)
    _, num, early = count_workers(config_of(tmp_path), cluster, NullDisplay())
    assert (num, early) == (4, None)
