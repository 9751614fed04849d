"""Resources of a job: when they are requested, checked and released, in a simulated Ray;
test_wait.py has real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raygnn.config.load import load_config
from raygnn.config.schema import Config
from raygnn.driver import job_plan, startup
from raygnn.driver.ray_cluster import patience
from raygnn.errors import PreflightError
from raygnn.preflight.facts import NodeResources, PartitionFacts, Resources
from raygnn.preflight.probe import Survey
from raygnn.runs.display import NullDisplay
from raygnn.worker import ray_nodes
from tests.support.small_jobs import job


class MadeUpRay:
    """A Ray with one node at first and a CPU for each; ``events`` are its calls, in order.

    Attributes:
        looks: number of polls before a second node comes.
        during: called at each poll.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.looks, self.seen = 3, 0
        self.now = 0.0
        self.death: Callable[[], str | None] = lambda: None
        self.during: Callable[[], None] = lambda: None
        self.local = False

    @property
    def nodes(self) -> int:
        return 1 + (self.seen >= self.looks)

    def ask(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.events.append(f"asked for {bundles}, {strategy}")
        return SimpleNamespace(wait=self.look)

    def look(self, seconds: float) -> bool:
        self.now += seconds
        self.seen += 1
        self.during()
        return self.nodes == 2

    def wait(self) -> None:
        """For the connection."""

    def about(self, config: Config, meta: Any) -> Survey:
        self.events.append(f"judged {self.nodes}")
        nodes = tuple(NodeResources(f"host{i}", 1, 0) for i in range(self.nodes))
        return Survey((), Resources(nodes, 0.0, 0.0))

    def __enter__(self) -> MadeUpRay:
        return self

    def __exit__(self, *_: object) -> None:
        self.events.append("left")


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUpRay:
    made = MadeUpRay()
    monkeypatch.setattr(job_plan, "Probes", lambda: made)
    monkeypatch.setattr(ray.util, "placement_group", made.ask)
    give_back = lambda group: made.events.append("gave back")  # noqa: E731
    monkeypatch.setattr(ray.util, "remove_placement_group", give_back)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    living = lambda: [{"NodeID": str(i)} for i in range(made.nodes)]  # noqa: E731
    monkeypatch.setattr(ray_nodes, "living", living)
    monkeypatch.setattr(ray_nodes, "room", lambda needs: made.nodes)
    monkeypatch.setattr(startup, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def config_of(tmp_path: Path, **cluster: Any) -> Config:
    made = job(tmp_path, cluster={"address": "host0:6379", "wait": "10s", **cluster})
    del made["cluster"]["num_cpus"]
    return load_config(made)


ASKED = "asked for [{'CPU': 1.0}, {'CPU': 1.0}], PACK"


def test_nodes_are_judged_when_enough_have_come(made_up: Any, tmp_path: Path) -> None:
    with job_plan.ClusterNodes(config_of(tmp_path), made_up, NullDisplay()) as nodes:
        survey = nodes.survey(None)
        nodes.survey(None)  # existing nodes are not requested twice
        assert made_up.events == [ASKED, "judged 2", "judged 2"]
    assert made_up.events[3:] == ["gave back", "left"]
    # its own reservation counts as free
    assert (survey.resources.free_cpus, survey.resources.growing) == (2.0, 0.0)


def test_nothing_is_held_while_a_graph_is_partitioned(
    made_up: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_plan, "preflight", lambda *_: SimpleNamespace(findings=()))

    class Missing:
        meta, place = None, tmp_path

        def check(self, config: Config) -> None: ...

        def facts(self, config: Config) -> PartitionFacts:
            return PartitionFacts()

        def made(self, show: Any) -> Missing:
            made_up.events.append("partitioned")
            return self

    with job_plan.ClusterNodes(config_of(tmp_path), made_up, NullDisplay()) as nodes:
        job_plan.make(config_of(tmp_path), nodes, Missing(), NullDisplay())  # type: ignore[arg-type]
        nodes.survey(None)
    between = [ASKED, "judged 2", "gave back", "partitioned"]
    assert made_up.events == [*between, ASKED, "judged 2", "gave back", "left"]


def test_the_wait_for_resources_ends(made_up: Any, tmp_path: Path) -> None:
    made_up.looks = 100
    with (
        pytest.raises(
            PreflightError, match=r"after 10s .* 1 of 2 workers .* 1 of 1 CPUs"
        ) as caught,
        job_plan.ClusterNodes(config_of(tmp_path), made_up, NullDisplay()) as nodes,
    ):
        nodes.survey(None)
    assert caught.value.exit_code == 3
    assert made_up.events == [ASKED, "gave back", "left"]
    assert 10 <= made_up.now <= 12


@pytest.mark.parametrize("error", [KeyboardInterrupt, PreflightError])
def test_an_end_while_waiting_gives_back(
    error: type[BaseException], made_up: Any, tmp_path: Path
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    if error is KeyboardInterrupt:
        made_up.during = stop
    made_up.looks = 100
    with (
        pytest.raises(error),
        job_plan.ClusterNodes(config_of(tmp_path), made_up, NullDisplay()) as nodes,
    ):
        nodes.survey(None)
    assert made_up.events == [ASKED, "gave back", "left"]


def test_a_ray_that_dies_ends_the_wait(made_up: Any, tmp_path: Path) -> None:
    made_up.death = lambda: "the head node's GCS has gone"
    with (
        pytest.raises(PreflightError, match="GCS has gone"),
        job_plan.ClusterNodes(config_of(tmp_path), made_up, NullDisplay()) as nodes,
    ):
        nodes.survey(None)
    assert made_up.events == [ASKED, "left"]  # a call of a dead Ray's would end this process


def test_a_range_requests_its_minimum(made_up: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path, workers=[1, 2], cpus_per_worker=3)
    with job_plan.ClusterNodes(config, made_up, NullDisplay()) as nodes:
        nodes.survey(None)
    assert made_up.events[0] == "asked for [{'CPU': 3.0}], PACK"


def test_checks_alone_request_no_resources(made_up: Any, tmp_path: Path) -> None:
    with job_plan.ClusterNodes(config_of(tmp_path), made_up) as nodes:
        assert nodes.survey(None).resources.growing == 10.0
    with job_plan.ClusterNodes(config_of(tmp_path, wait=0), made_up, NullDisplay()) as nodes:
        assert nodes.survey(None).resources.growing == 0.0
    assert made_up.events == ["judged 1", "left", "judged 1", "left"]


def test_a_restart_waits_as_long_as_the_first_start(tmp_path: Path) -> None:
    assert patience(config_of(tmp_path, wait="2h")) == 7200.0
    assert patience(config_of(tmp_path)) == 1800.0  # of comm.timeout
