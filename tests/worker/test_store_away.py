"""A partition whose place is away for a while: every read is tried again."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import threading
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock

import numpy as np
import pytest

from raygnn.cli import carry_out
from raygnn.config.schema import Config
from raygnn.driver.inputs import read_input
from raygnn.driver.job_plan import ClusterNodes, count_workers, make_plan
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import DataError, TrainingError
from raygnn.graph.staging.shard import Shard
from raygnn.runs.display import NullDisplay
from raygnn.sampling.exchange import World
from raygnn.storage.remote import AnyPath, RemotePath
from raygnn.util import files
from raygnn.worker.job import Job, TaskTarget
from raygnn.worker.planes.partition_plane import map_shard
from raygnn.worker.planes.vocabulary import words
from tests.support.small_jobs import JobFactory, ensure_partition

ONE = SimpleNamespace(world=World(0, 1))


class Calls:
    """Calls of the file system below a path, one of which fails."""

    def __init__(self, place: AnyPath, monkeypatch: pytest.MonkeyPatch):
        self.place = os.path.realpath(str(place))
        self.count, self.failing = 0, -1
        for module, name in ((os, "stat"), (os, "listdir"), (builtins, "open"), (io, "open")):
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.place):
                self.count += 1
                if self.count - 1 == self.failing:
                    raise OSError(errno.EIO, "Input/output error", os.fspath(path))
            return call(path, *args, **kwargs)

        return counted


def job_of(config: Config, place: AnyPath, run_dir: Path) -> Job:
    return Job(config, place, run_dir, {"": TaskTarget("_N")}, True, 0.0, 128)


def read(job: Job) -> tuple[Shard, Any]:
    """Read everything that a rank needs into an empty cache."""
    shutil.rmtree(job.config.staging.root, ignore_errors=True)
    return map_shard(job, ONE, replicated=True), words(job)  # type: ignore[arg-type]


@pytest.mark.long
def test_each_call_of_a_store_may_fail_once(
    make_job: JobFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call fails in turn, and the result is the same."""
    monkeypatch.setattr(files, "_RETRY_EVERY", 0.0)
    config = make_job(graph={"nodes": 200}, staging={"path": str(tmp_path / "cache")})
    place = ensure_partition(config, 1).directory
    calls = Calls(place, monkeypatch)
    whole, meaning = read(job_of(config, place, tmp_path))
    total = calls.count
    assert total > 10
    for at in range(total):
        calls.count, calls.failing = 0, at
        shard, stands_for = read(job_of(config, place, tmp_path))
        assert calls.count > at
        assert stands_for == meaning
        for ntype, original in whole.original.items():
            np.testing.assert_array_equal(shard.original[ntype], original)
        for etype, rows in whole.topology.items():
            np.testing.assert_array_equal(shard.topology[etype].src, rows.src)


@pytest.mark.long
@pytest.mark.parametrize("foreign", [False, True])
def test_the_driver_plans_again_what_failed_once(
    foreign: bool, make_job: JobFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's view of the partition is read again, too; storage that stays unavailable is exit
    code 4."""
    monkeypatch.setattr(files, "_RETRY_EVERY", 0.0)
    sections: dict[str, Any] = {"graph": {"nodes": 200}, "fault": {"storage_timeout": 0.5}}
    place = Path(str(ensure_partition(make_job(**sections), 1).directory))
    if foreign:
        (place / "raygnn.json").unlink()
        sections["partition"] = {"path": str(place)}
    config = make_job(**sections, cluster={"workers": "auto", "num_cpus": 1})
    cluster, show = RayCluster(config), NullDisplay()
    calls = Calls(place, monkeypatch)
    with ClusterNodes(config, cluster) as nodes:  # their actors are kept: each is a Python process

        def plan(_: Any = None) -> Any:
            calls.count = 0
            _, workers, _ = count_workers(config, cluster, show)
            given = read_input(config, workers, show, cluster)
            return make_plan(config, nodes, given, 64, show).report.findings

        expected, total = plan(), calls.count
        assert total > 10
        for at in range(total):
            calls.failing = at
            assert plan() == expected
            assert calls.count > at
        calls.failing, read, short = -1, Path.read_bytes, iter([3])
        monkeypatch.setattr(Path, "read_bytes", lambda path: read(path)[: next(short, None)])
        assert plan() == expected
        calls.failing = ANY
        assert carry_out(Namespace(run=plan)) == 4


def test_a_place_that_comes_back(
    make_job: JobFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_RETRY_EVERY", 0.05)
    config = make_job(graph={"nodes": 200}, staging={"path": str(tmp_path / "cache")})
    place = Path(str(ensure_partition(config, 1).directory))
    away = place.rename(tmp_path / "away")
    back = threading.Timer(0.5, away.rename, (place,))
    back.start()
    shard, _ = read(job_of(config, place, tmp_path))
    back.join()
    assert sum(map(len, shard.original.values())) == 200


def test_a_place_that_stays_away_is_said(make_job: JobFactory, tmp_path: Path) -> None:
    """The message names the way to resume; a damaged partition is reported at once."""
    config = make_job(graph={"nodes": 200}, fault={"storage_timeout": 0.2})
    place = Path(str(ensure_partition(config, 1).directory))
    job = job_of(config, place, tmp_path)
    (place / "raygnn.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        _ = job.meta
    refused = PermissionError(errno.EACCES, "Permission denied")  # as of a cache
    with pytest.raises(PermissionError):
        job.read(Mock(side_effect=refused))
    damaged = OSError("not a Parquet file")  # as of pyarrow: of a file it has no number
    with pytest.raises(OSError, match="not a Parquet file"):
        job.read(Mock(side_effect=damaged))
    with pytest.raises(TrainingError, match=r"could not be read for 0 s"):
        replace(job, partition=Mock(spec=RemotePath)).read(Mock(side_effect=damaged))
    place.rename(tmp_path / "away")
    with pytest.raises(TrainingError, match=r"could not be read for 0 s") as caught:
        _ = job.meta
    assert caught.value.where == str(place)
    assert "--resume" in str(caught.value.remedy)
