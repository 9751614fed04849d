"""The `ray up` files in cluster/ pass Ray's own validation and keep a cluster private."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.node_provider_availability_tracker import NodeAvailabilitySummary
from ray.autoscaler._private.resource_demand_scheduler import (
    _default_utilization_scorer,
    get_nodes_for,
)
from ray.autoscaler._private.util import prepare_config, validate_config

CHECKOUT = Path(__file__).resolve().parents[2]
NAMES = ["onprem.yaml", "aws.yaml", "gcp.yaml"]
# Keys that Ray's providers read; its schema silently accepts any other key.
PROVIDER = {
    "local": {"type", "head_ip", "worker_ips"},
    "aws": {"type", "region", "availability_zone", "cache_stopped_nodes", "use_internal_ips"},
    "gcp": {"type", "region", "availability_zone", "project_id", "cache_stopped_nodes"},
}


@pytest.fixture(params=NAMES)
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A cluster file, read in the directory that its paths are relative to."""
    monkeypatch.chdir(CHECKOUT)
    loaded: dict[str, Any] = yaml.safe_load(Path("cluster", request.param).read_text())
    return loaded


def validate(cluster: dict[str, Any]) -> None:
    """Validate a cluster file as `ray up` does before it contacts any machine."""
    cluster = copy.deepcopy(cluster)
    for node_type in cluster.get("available_node_types", {}).values():
        node_type.setdefault("resources", {})  # which Ray asks the cloud for
    validate_config(prepare_config(cluster))


def brought(types: dict[str, Any], head: str, most: int, bundle: dict[str, float]) -> int:
    """Return the number of workers that Ray's autoscaler starts for two workers of a job that do
    not fit on the head."""
    score = partial(
        _default_utilization_scorer, node_availability_summary=NodeAvailabilitySummary({})
    )
    nodes, left = get_nodes_for(types, {head: 1}, head, most, [bundle] * 2, score)
    assert not left
    assert set(nodes) == {"worker"}
    return int(nodes["worker"])


def test_ray_accepts_it(cluster: dict[str, Any]) -> None:
    validate(cluster)
    with pytest.raises(Exception, match="is not of type"):
        validate({**cluster, "idle_timeout_minutes": "long"})


def test_every_key_is_read(cluster: dict[str, Any]) -> None:
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    assert set(cluster) <= set(schema["properties"])
    assert set(cluster["provider"]) <= PROVIDER[cluster["provider"]["type"]]
    assert cluster["auth"]["ssh_user"]  # which the schema does not ask for, and ssh does


def test_ray_asks_for_a_token_and_serves_no_others(cluster: dict[str, Any]) -> None:
    for role in ("head", "worker"):
        stop, start = cluster[f"{role}_start_ray_commands"]
        assert stop.startswith("ray stop")
        assert "RAY_AUTH_MODE=token" in start
    assert "--dashboard-host=127.0.0.1" in cluster["head_start_ray_commands"][-1]
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("chmod 600 ~/.ray/auth_token" in command for command in cluster["setup_commands"])


def test_file_mounts_exist(cluster: dict[str, Any]) -> None:
    carried = [Path(path) for path in cluster["file_mounts"].values() if not path.startswith("~")]
    assert carried
    assert all(path.exists() for path in carried)
    assert not any((path / ".git").exists() for path in carried)


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml"])
def test_the_autoscaler_starts_the_workers_of_a_job(name: str) -> None:
    cluster = yaml.safe_load((CHECKOUT / "cluster" / name).read_text())
    types, head = cluster["available_node_types"], cluster["head_node_type"]
    assert types["worker"]["min_workers"] == 0
    assert types["worker"]["resources"] == types[head]["resources"]
    assert types["worker"]["node_config"] == types[head]["node_config"]
    assert brought(types, head, cluster["max_workers"], {"CPU": 4.0, "GPU": 1.0}) == 2
