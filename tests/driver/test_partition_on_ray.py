"""Partitions that are made out of core by tasks of a real Ray."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray

import raygnn
from raygnn.config.graph import TablesGraph
from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.driver import out_of_core
from raygnn.driver.out_of_core import RayTasks, is_out_of_core
from raygnn.driver.ray_cluster import RayCluster
from raygnn.errors import ConfigError, DataError, PreflightError
from raygnn.graph.partition.make import Missing, find_partition
from raygnn.runs.display import NullDisplay
from tests.support.ogb_builder import write_archives
from tests.support.tables_builder import write_shop

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("shared_ray")]


def job(tmp_path: Path, engine: str, method: str = "random", **tables: Any) -> Config:
    directory = tmp_path / "shop"
    directory.mkdir(exist_ok=True)
    graph = write_shop(directory, **tables)
    return load_config(
        {
            "name": "shop",
            "storage": str(tmp_path / engine),
            "graph": {"format": "tables", "path": str(graph.path)},
            "partition": {"engine": engine, "method": method, "parts": 2},
            "model": {"kind": "sage"},
        }
    )


def missing(config: Config) -> Missing:
    found = find_partition(config, 2)
    assert isinstance(found, Missing)
    return found


def test_the_partition_equals_the_one_built_in_memory(tmp_path: Path) -> None:
    local, on_ray = (
        raygnn.partition(job(tmp_path, engine), display=False) for engine in ("local", "ray")
    )
    assert local.manifest is not None
    assert on_ray.manifest is not None
    assert local.directory != on_ray.directory
    assert on_ray.manifest.files == local.manifest.files
    assert on_ray.digest == local.digest
    assert set(on_ray.manifest.seconds) >= {"ids", "edges", "scatter", "gather", "write"}


def test_errors_in_a_task_are_those_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message also names where the finished work is kept."""
    wrong = {"bought": {"name": ["anna", "carl", "bob"]}}
    errors = []
    shown: list[str] = []
    monkeypatch.setattr(NullDisplay, "note", lambda self, text: shown.append(text))
    for engine in ("local", "ray"):
        with pytest.raises(DataError) as raised:
            raygnn.partition(job(tmp_path, engine, **wrong), display=False)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
    (stages,) = tmp_path.glob("ray/partitions/.*.stages-*")
    assert f"kept in {stages}" in shown[-1]


def test_the_engine_is_chosen_by_the_available_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tmp_path, "auto")
    assert not is_out_of_core(config)
    monkeypatch.setattr(out_of_core, "memory", lambda: (1000, 100))
    assert is_out_of_core(config)
    shown: list[str] = []
    monkeypatch.setattr(NullDisplay, "note", lambda self, text: shown.append(text))
    assert raygnn.check(config, display=False).ok
    assert any("was not read" in text for text in shown)
    assert not (tmp_path / "auto").exists()
    archives = write_archives(tmp_path, packed=False).model_dump(mode="json")
    config = load_config({"name": "a", "graph": archives, "model": {"kind": "sage"}})
    assert is_out_of_core(config)
    monkeypatch.undo()
    assert not is_out_of_core(config)


def test_streaming_stands_in_for_metis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The partition is found again, also at a configured path; with `engine: ray`, METIS's
    partition in the same storage is not used for it."""
    config = job(tmp_path, "ray", "metis")
    in_memory = config.partition.model_copy(update={"engine": "local"})
    raygnn.partition(config.model_copy(update={"partition": in_memory}), display=False)
    assert missing(config).method == "stream"
    partition = config.partition.model_copy(update={"path": str(tmp_path / "p")})
    config = config.model_copy(update={"partition": partition})
    made = raygnn.partition(config)
    assert "exists already" not in capsys.readouterr().out
    assert made.manifest is not None
    assert made.manifest.method == "stream"
    assert raygnn.partition(config).digest == made.digest
    assert "exists already" in capsys.readouterr().out
    local = partition.model_copy(update={"engine": "local"})
    with pytest.raises(ConfigError, match=r"method is 'stream' there and 'metis' here"):
        raygnn.partition(config.model_copy(update={"partition": local}), display=False)


def test_a_graph_that_does_not_fit_on_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tmp_path, "ray")
    monkeypatch.setattr(out_of_core.shutil, "disk_usage", lambda path: os.statvfs(path) and Full)
    for command in (raygnn.check, raygnn.partition):
        with pytest.raises(PreflightError, match=r"0 B are free there \[disk_space\]"):
            command(config, display=False)
    assert not list(tmp_path.glob("ray/**/part0"))


class Full:
    free = 0


def killed_once(place: str) -> str:
    mark = Path(place)
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def failing(number: int) -> int:
    if number in (2, 5):
        raise DataError(f"the task {number}")
    return number


def test_tasks_survive_their_process_and_fail_in_order(tmp_path: Path) -> None:
    with RayCluster(job(tmp_path, "ray")) as cluster:
        run = RayTasks(cluster)
        assert list(run(killed_once, [(str(tmp_path / "mark"),)])) == [(0, "done")]
        with pytest.raises(DataError, match="the task 2"):
            list(run(failing, [(number,) for number in range(40)]))


def test_text_is_encoded_by_actors(tmp_path: Path) -> None:
    """A model encodes on Ray by default, and the partition is the one of this process alone."""
    made = [
        raygnn.partition(with_text(job(tmp_path, engine)), display=False)
        for engine in ("local", "auto")
    ]
    assert made[0].manifest is not None
    assert made[1].manifest is not None
    assert made[1].manifest.files == made[0].manifest.files
    assert "text-0" in made[1].manifest.seconds
    errors = []
    for engine in ("local", "auto"):
        with pytest.raises(DataError, match="Nan failed") as raised:
            raygnn.partition(with_text(job(tmp_path, engine), "Nan"), display=False)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_an_encoder_whose_process_dies_repeatedly(tmp_path: Path) -> None:
    died = pytest.raises(DataError, match="a process that partitions the graph died")
    with RayCluster(job(tmp_path, "ray")) as cluster, died:
        list(RayTasks(cluster)(killed, [(0,)], gpus=0))


def test_an_encoder_that_lost_its_place_gets_that_of_an_idle_one(tmp_path: Path) -> None:
    with RayCluster(job(tmp_path, "ray")) as cluster:
        cluster.wait()
        cpus = int(ray.cluster_resources()["CPU"])
        assert cpus > 1
        tasks = [(number, str(tmp_path / "mark")) for number in range(cpus)]
        done = list(RayTasks(cluster)(killed_with_its_place_taken, tasks, gpus=0))
        ray.kill(ray.get_actor("taker"))
        assert sorted(done) == [(number, number) for number, _ in tasks]


@pytest.mark.timeout(120)
def test_an_encoder_does_not_wait_forever_for_a_processor(tmp_path: Path) -> None:
    @ray.remote(num_cpus=1)
    class Holder:
        def ready(self) -> None:
            pass

    with RayCluster(job(tmp_path, "ray")) as cluster:
        cluster.wait()
        holders = [Holder.remote() for _ in range(int(ray.cluster_resources()["CPU"]))]
        ray.get([holder.ready.remote() for holder in holders])
        cluster.patience = 3
        with pytest.raises(PreflightError, match="no node of Ray had a CPU free within 3 s"):
            list(RayTasks(cluster)(failing, [(0,)], gpus=0))
        del holders
        cluster.patience = 60
        assert list(RayTasks(cluster)(failing, [(0,), (1,)], gpus=0)) == [(0, 0), (1, 1)]


@pytest.mark.parametrize("gpus", [None, 0])
def test_a_ray_that_dies_ends_the_tasks(
    gpus: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RayCluster(job(tmp_path, "ray")) as cluster:
        cluster.wait()
        monkeypatch.setattr(cluster, "death", lambda: "the GCS was killed")
        with pytest.raises(PreflightError, match="the GCS was killed"):
            list(RayTasks(cluster)(slow, [(20,)], gpus=gpus))


class Taker:
    """An actor that holds a CPU."""


def killed(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_with_its_place_taken(number: int, mark: str) -> int:
    if number == 0 and not os.path.exists(mark):
        Path(mark).touch()
        ray.remote(Taker).options(num_cpus=1, name="taker", lifetime="detached").remote()
        time.sleep(3)
        killed(number)
    return number


def slow(seconds: float) -> None:
    time.sleep(seconds)


def with_text(config: Config, encoder: str = "Tiny") -> Config:
    assert isinstance(config.graph, TablesGraph)
    text = f"    text:\n      name: {{encoder: 'tests.support.own_encoders:{encoder}'}}\n"
    path = config.graph.path
    path.write_text(path.read_text().replace("  user:\n", f"  user:\n{text}"))
    return config
