"""Environment variables of communication: which ranks get which, and none without need."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raygnn.config.comm_plan import CommPlan, Interface, NodeNetwork
from tests.support.facts import make_config, make_network, make_node, plan_for, two

GPUS = {"cluster__gpus_per_worker": 1}


def values(plan: CommPlan, node: str) -> dict[str, str]:
    return {variable.name: variable.value for variable in plan.nodes[node]}


def test_nothing_of_the_network_is_set_where_names_resolve() -> None:
    plan = plan_for(make_config(), two())
    assert (plan.backend, plan.timeout) == ("gloo", 1800)
    assert values(plan, "aaa") == values(plan, "bbb") == {"OMP_NUM_THREADS": "1"}


def test_the_interface_is_set_on_nodes_whose_name_resolves_wrongly() -> None:
    for wrong in ((), ("127.0.1.1",), ("192.168.0.9",), ("10.0.0.2", "192.168.0.9")):
        nodes = two(network=make_network(2, resolves_to=wrong))
        plan = plan_for(make_config(), nodes)
        assert "GLOO_SOCKET_IFNAME" not in values(plan, "aaa")
        assert values(plan, "bbb")["GLOO_SOCKET_IFNAME"] == "eth2"
    (reason,) = [v.reason for v in plan.nodes["bbb"] if v.name == "GLOO_SOCKET_IFNAME"]
    assert "10.0.0.2" in reason


def test_a_ray_of_our_own_keeps_to_loopback() -> None:
    alone = replace(make_node(), id="", network=make_network(address=None, interface=None))
    plan = plan_for(make_config(), (alone,))
    assert values(plan, "")["GLOO_SOCKET_IFNAME"] == "lo"


def test_nccl_where_every_worker_has_a_gpu() -> None:
    plan = plan_for(make_config(**GPUS), two())
    assert plan.backend == "nccl"
    assert "NCCL_SOCKET_IFNAME" not in values(plan, "aaa")
    assert values(plan, "aaa")["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def second_interface(number: int, **changes: object) -> NodeNetwork:
    """Return a node's network in which NCCL's first choice is not the right interface."""
    others = (Interface("docker0", ("172.17.0.1",)), Interface("eth0", ("192.168.0.1",)))
    own = Interface(f"eth{number}", (f"10.0.0.{number}",))
    return make_network(number, interfaces=(*others, own), **changes)


def test_gloos_interface_is_set_beside_nccl() -> None:
    """Ids, features and control messages use gloo in that case, too."""
    plan = plan_for(make_config(**GPUS), two(network=make_network(2, resolves_to=())))
    assert values(plan, "bbb")["GLOO_SOCKET_IFNAME"] == "eth2"


def test_secrets_reach_only_the_ranks() -> None:
    plan = plan_for(make_config(comm__env={"HF_TOKEN": "hidden-value"}), two())
    assert values(plan, "aaa")["HF_TOKEN"] == "hidden-value"
    assert "hidden-value" not in json.dumps([plan.to_dict(), plan.rows()])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("GITHUB_PAT", "hunter2"), ("DATABASE_URL", "postgres://u:hunter2@h/db")),
        *(("http_proxy", "http://u:hunter2@proxy"), ("API_KEY", "hunter2")),
    ],
)
def test_names_of_secrets(name: str, value: str) -> None:
    config = make_config(comm__env={name: value})
    plan = plan_for(config, two())
    assert name not in plan.everywhere()
    assert "hunter2" not in json.dumps([plan.to_dict(), plan.rows(), config.recorded()])
    assert config.recorded()["comm"]["env"] == {name: "***"}
    assert config.to_dict()["comm"]["env"] == {name: value}


def test_names_that_are_no_secrets() -> None:
    env = {"NCCL_IB_PKEY": "1", "PATTERN": "x", "URL": "http://host:80/a"}
    assert make_config(comm__env=env).recorded()["comm"]["env"] == env


def test_values_with_a_dollar_are_set_by_the_backend_only() -> None:
    plan = plan_for(make_config(comm__env={"A": "$HOME/x"}), two())
    assert "A" not in plan.everywhere()
    assert values(plan, "aaa")["A"] == "$HOME/x"


def test_the_reason_names_a_replaced_value() -> None:
    plan = plan_for(make_config(), two(environment={"OMP_NUM_THREADS": "64"}))
    reasons = [plan.nodes[node][0].reason for node in ("aaa", "bbb")]
    assert reasons == ["cluster.cpus_per_worker", "cluster.cpus_per_worker, instead of 64"]


def test_a_plan_without_nodes() -> None:
    assert not plan_for(make_config(), ()).single


def test_nccls_interface_is_set_only_if_its_default_is_wrong() -> None:
    nodes = (make_node(), make_node("b", network=second_interface(2)))
    plan = plan_for(make_config(**GPUS), nodes)
    assert "NCCL_SOCKET_IFNAME" not in values(plan, "aaa")
    assert values(plan, "bbb")["NCCL_SOCKET_IFNAME"] == "=eth2"


def test_nccl_is_left_alone_with_rdma() -> None:
    everywhere = tuple(
        make_node(name, network=second_interface(i, rdma=("mlx5_0",)))
        for i, name in enumerate("ab", 1)
    )
    plan = plan_for(make_config(**GPUS), everywhere)
    assert not [v for v in plan.nodes["aaa"] if v.name.startswith("NCCL_")]
    some = (everywhere[0], make_node("b"))
    for node in ("aaa", "bbb"):
        assert values(plan_for(make_config(**GPUS), some), node)["NCCL_IB_DISABLE"] == "1"


def test_comm_env_wins_and_existing_variables_stay() -> None:
    misled = two(network=make_network(2, resolves_to=()))
    there = replace(misled[1], environment={"GLOO_SOCKET_IFNAME": "bond0"})
    plan = plan_for(make_config(), (misled[0], there))
    (kept,) = [v for v in plan.nodes["bbb"] if v.name == "GLOO_SOCKET_IFNAME"]
    assert (kept.value, kept.reason) == ("bond0", "it is already set on the node")
    own = {"GLOO_SOCKET_IFNAME": "eth9", "OMP_NUM_THREADS": "3"}
    plan = plan_for(make_config(comm__env=own), misled)
    assert values(plan, "aaa") == values(plan, "bbb") == own
    reasons = {v.name: v.reason for v in plan.nodes["bbb"]}
    assert reasons["GLOO_SOCKET_IFNAME"] == "comm.env, instead of eth2"
    assert plan.everywhere() == own


def test_one_switch_turns_on_what_an_investigation_needs() -> None:
    plan = plan_for(make_config(comm__debug=True, **GPUS), two())
    found = values(plan, "aaa")
    assert found["NCCL_DEBUG"] == "INFO"
    assert found["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "/logs/nccl-%h-%p.log" in found["NCCL_DEBUG_FILE"]
    assert int(found["TORCH_FR_BUFFER_SIZE"]) > 2000
    quiet = values(plan_for(make_config(**GPUS), two()), "aaa")
    assert not {"NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG"} & quiet.keys()
    # torch's own switch kills DDP: see raygnn.worker.rank
    assert "TORCH_DISTRIBUTED_DEBUG" not in found


names = st.sampled_from(["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "NCCL_X"])


@given(
    env=st.dictionaries(names, st.sampled_from("123"), max_size=3),
    there=st.dictionaries(names, st.sampled_from("123"), max_size=3),
    gpus=st.integers(0, 1),
    debug=st.booleans(),
    resolves=st.lists(st.sampled_from(["10.0.0.2", "127.0.0.1"]), unique=True),
)
def test_the_users_variables_always_arrive(
    env: dict[str, str], there: dict[str, str], gpus: int, debug: bool, resolves: list[str]
) -> None:
    config = make_config(comm__env=env, comm__debug=debug, cluster__gpus_per_worker=gpus)
    network = make_network(2, resolves_to=tuple(resolves))
    plan = plan_for(config, two(network=network, environment=there))
    for node in ("aaa", "bbb"):
        assert values(plan, node).items() >= env.items()
        assert all(variable.reason for variable in plan.nodes[node])
    json.dumps(plan.to_dict())
    listed = [row[1:3] for row in plan.rows()]
    assert {tuple(v) for v in env.items()} <= set(listed)
