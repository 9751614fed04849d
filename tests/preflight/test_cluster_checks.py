"""Checks of nodes against each other: each has a case in which it speaks, and is silent else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from raygnn.config.rules import ALLOWABLE, BINDING
from raygnn.preflight.facts import Gpu, Interface, NodeFacts
from raygnn.preflight.findings import Job
from raygnn.preflight.links import Link
from raygnn.preflight.probe import Survey
from raygnn.preflight.report import CHECKS, described, inspect, preflight
from tests.facts import (
    GIB,
    check,
    make_config,
    make_job,
    make_network,
    make_node,
    make_partition,
    make_resources,
    two,
    versions,
)
from tests.preflight.test_preflight_checks import SPEAKS as OTHERS

OLD = Gpu("V100", "GPU-1", capability=(7, 0))
NEW = Gpu("H100", "GPU-2", capability=(9, 0))
CUDA = versions(torch="2.13.0", dgl="2.1.0+cu121")


def on_gpus(*nodes: NodeFacts, **job: object) -> Job:
    config = make_config(cluster__gpus_per_worker=1, **job)
    given = make_resources(*((node.node, 2, len(node.gpus)) for node in nodes))
    return make_job(config, tuple(replace(n, versions=CUDA) for n in nodes), resources=given)


def with_interface(interface: Interface) -> Job:
    config = make_config(comm__env={"GLOO_SOCKET_IFNAME": interface.name})
    network = make_network()
    network = replace(network, interfaces=(*network.interfaces, interface))
    return make_job(config, (make_node(network=network),))


# name of the case → (job, check that speaks, severity, words in what it says)
SPEAKS: dict[str, tuple[Callable[[], Job], str, str, list[str]]] = {
    "another checkout": (
        lambda: make_job(nodes=two(code="d" * 64)),
        *("code_uniform", "error", ["cccccccccccc on a", "dddddddddddd on b"]),
    ),
    "another processor": (
        lambda: make_job(make_config(cluster__uniform="warn"), two(cpu="An old one")),
        *("hardware_uniform", "warn", ["the processor", "A processor on a", "An old one on b"]),
    ),
    "other instructions": (
        lambda: make_job(nodes=two(cpu_flags=("avx2",))),
        *("hardware_uniform", "error", ["instructions", "avx2 avx512_bf16 on a", "avx2 on b"]),
    ),
    "other GPUs": (
        lambda: on_gpus(make_node(gpus=(OLD,)), make_node("b", gpus=(NEW,))),
        *("hardware_uniform", "error", ["V100 on a", "H100 on b"]),
    ),
    "a variable on one node": (
        lambda: make_job(nodes=two(environment={"NCCL_ALGO": "Tree"})),
        *("environment_uniform", "error", ["NCCL_ALGO", "not set on a", "Tree on b"]),
    ),
    "other threads": (
        lambda: make_job(
            nodes=(
                make_node(environment={"OMP_NUM_THREADS": "1"}),
                make_node("b", environment={"OMP_NUM_THREADS": "64"}),
            )
        ),
        *("environment_uniform", "error", ["OMP_NUM_THREADS", "1 on a", "64 on b"]),
    ),
    "no shared memory": (
        lambda: make_job(nodes=two(shm_free=2**20)),
        *("shared_memory", "error", ["/dev/shm has 1 MiB free", "(on b)"]),
    ),
    "a name that is loopback": (
        lambda: make_job(nodes=two(network=make_network(2, resolves_to=("127.0.1.1",)))),
        *("host_name_resolves", "error", ["127.0.1.1", "10.0.0.2", "(on b)"]),
    ),
    "an interface that is not there": (
        lambda: make_job(make_config(comm__env={"GLOO_SOCKET_IFNAME": "eth1"}), two()),
        *("interfaces_there", "error", ["GLOO_SOCKET_IFNAME is 'eth1'", "eth2", "(on b)"]),
    ),
    "an interface that only the other node has": (
        lambda: make_job(make_config(comm__env={"GLOO_SOCKET_IFNAME": "eth1,eth2"}), two()),
        *("interfaces_there", "error", ["no interface 'eth1'", "(on b)"]),
    ),
    "an interface that one node alone lacks": (
        lambda: make_job(make_config(comm__env={"GLOO_SOCKET_IFNAME": "nope0"})),
        *("interfaces_there", "error", ["no interface 'nope0'; there are: eth1, lo", "(on a)"]),
    ),
    "an interface that the shell names": (
        lambda: make_job(nodes=(make_node(environment={"GLOO_SOCKET_IFNAME": "eth7"}),)),
        *("interfaces_there", "error", ["GLOO_SOCKET_IFNAME is 'eth7'", "(on a)"]),
    ),
    "an empty name of an interface": (
        lambda: make_job(make_config(comm__env={"GLOO_SOCKET_IFNAME": ""})),
        *("interfaces_there", "error", ["no interface ''"]),
    ),
    "loopback for two hosts": (
        lambda: make_job(make_config(comm__env={"GLOO_SOCKET_IFNAME": "lo"}), two()),
        *("interfaces_there", "error", ["lo reaches nothing but the node itself", "(on b)"]),
    ),
    "an interface that is down": (
        lambda: with_interface(Interface("eth0", ("10.1.0.1",), up=False)),
        *("interfaces_there", "error", ["eth0 is down"]),
    ),
    "an interface without an address": (
        lambda: with_interface(Interface("eth0")),
        *("interfaces_there", "error", ["eth0 has no IPv4 address"]),
    ),
    "an interface that NCCL does not find": (
        lambda: on_gpus(make_node(gpus=(NEW,)), comm__env={"NCCL_SOCKET_IFNAME": "=eth"}),
        *("interfaces_there", "error", ["NCCL_SOCKET_IFNAME is '=eth'", "eth1, lo"]),
    ),
    "a level of debugging that there is none of": (
        lambda: make_job(nodes=two(environment={"TORCH_DISTRIBUTED_DEBUG": "lots"})),
        *("debug_level_safe", "error", ["LOTS", "torch knows OFF", "(on b)"]),
    ),
    "a level of debugging that kills": (
        lambda: make_job(nodes=two(environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})),
        *("debug_level_safe", "error", ["DETAIL", "segmentation fault", "(on b)"]),
    ),
    "a full cache": (
        lambda: make_job(nodes=two(cache_free=2**10)),
        *("cache_space", "warn", ["takes up to 10 KiB", "has 1 KiB free", "(on b)"]),
    ),
    "a clock of its own": (
        lambda: make_job(nodes=two(clock=-60.0)),
        *("clocks_agree", "warn", ["60.0 s behind", "(on b)"]),
    ),
    "few open files": (
        lambda: make_job(nodes=two(limits={"nofile": 1024})),
        *("open_files", "warn", ["at most 1024 files", "(on b)"]),
    ),
    "a slow link": (
        lambda: make_job(nodes=two(), links=(Link("a", "b", 0.1, 100.0),)),
        *("network_bandwidth", "warn", ["100"]),
    ),
    "a far node": (
        lambda: make_job(nodes=two(), links=(Link("a", "b", 20.0, 20_000.0),)),
        *("network_latency", "warn", ["20"]),
    ),
    "no way between nodes": (
        lambda: make_job(nodes=two(), links=(Link("a", "b", None, None, "refused"),)),
        *("network_reach", "error", ["refused"]),
    ),
    "bf16 without instructions": (
        lambda: make_job(make_config(precision="bf16"), two(cpu_flags=("avx2",))),
        *("bf16_is_there", "info", ["no bf16 instructions", "(on b)"]),
    ),
    "bf16 on old GPUs": (
        lambda: on_gpus(make_node(gpus=(OLD,)), precision="bf16-mixed"),
        *("bf16_is_there", "warn", ["V100", "bf16"]),
    ),
    "one GPU for two": (
        lambda: on_gpus(make_node(gpus=(NEW,)), make_node("b", gpus=(NEW,))),
        *("gpus_are_there", "error", ["GPU-2", "two ranks", "(on a, b)"]),
    ),
    "a GPU in use": (
        lambda: on_gpus(make_node(gpus=(replace(NEW, processes=(77,)), OLD))),
        *("gpus_are_free", "warn", ["77"]),
    ),
    "a damaged part": (
        lambda: make_job(nodes=two(damaged={"part1/graph.dgl": "has changed"})),
        *("partition_visible", "error", ["part1/graph.dgl", "has changed", "(on b)"]),
    ),
    "one node with too little memory": (
        lambda: make_job(
            nodes=two(memory=4 * GIB, memory_available=3 * GIB),
            partition=make_partition(bytes=9 * GIB),
        ),
        *("memory_fits", "error", ["4.0 GiB of memory", "(on b)"]),
    ),
}


@pytest.mark.parametrize("case", SPEAKS)
def test_it_speaks(case: str) -> None:
    job, name, severity, words = SPEAKS[case]
    found = [f for f in check(job()) if f.check == name]
    assert severity in [finding.severity for finding in found]
    said = [str(f) for f in found]
    assert any(all(word in text for word in words) for text in said), said
    assert all(finding.remedy for finding in found if finding.severity != "info")


def test_every_check_has_a_case() -> None:
    named = {name for _, name, _, _ in [*SPEAKS.values(), *OTHERS.values()]}
    assert named == {check.__name__ for check in CHECKS}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("GLOO_SOCKET_IFNAME", "eth1"), ("GLOO_SOCKET_IFNAME", "lo")),  # on one node
        *(("NCCL_SOCKET_IFNAME", "eth"), ("NCCL_SOCKET_IFNAME", "^docker,lo")),
        *(("NCCL_SOCKET_IFNAME", "=eth1"), ("NCCL_SOCKET_IFNAME", "ib,eth")),
    ],
)
def test_interfaces_that_are_there(variable: str, value: str) -> None:
    node = make_node(gpus=(NEW, replace(NEW, uuid="GPU-3")))
    assert check(on_gpus(node, comm__env={variable: value})) == ()


def test_the_name_of_a_host_does_not_matter_where_the_interface_is_said() -> None:
    network = make_network(2, resolves_to=("127.0.1.1",))
    said = two(network=network, environment={"GLOO_SOCKET_IFNAME": "eth2"})
    config = make_config(cluster__uniform="off")
    assert check(make_job(config, said)) == ()
    assert [f.check for f in check(make_job(config, two(network=network)))] == [
        "host_name_resolves"
    ]


def test_the_names_that_can_be_allowed_are_those_of_the_checks() -> None:
    names = {*described(), "name_free"}
    assert sorted(names) == sorted((*ALLOWABLE, *BINDING))
    assert len({*ALLOWABLE, *BINDING}) == len((*ALLOWABLE, *BINDING))
    assert {name for _, name, _, _ in [*SPEAKS.values(), *OTHERS.values()]} <= names


@pytest.mark.parametrize("name", described())
def test_every_check_says_what_it_looks_at(name: str) -> None:
    sentence = described()[name]
    assert sentence.endswith(".")
    assert "``" not in sentence, "it is shown as Markdown"
    assert 10 < len(sentence) < 200


def test_what_is_allowed_says_no_more_how_to_allow_it() -> None:
    config = make_config(cluster__allow=["hardware_uniform"])
    (finding,) = check(make_job(config, two(cpu="An old one")))
    assert finding.what.endswith("(allowed)")
    assert finding.remedy == ""


def test_what_is_allowed_does_not_stop_the_job() -> None:
    nodes = two(cpu="An old one", code="d" * 64)
    findings = check(make_job(make_config(cluster__allow=["hardware_uniform"]), nodes))
    severities = {finding.check: finding.severity for finding in findings}
    assert severities == {"hardware_uniform": "info", "code_uniform": "error"}
    assert check(make_job(make_config(cluster__uniform="off"), nodes)) == ()


def test_a_node_without_room_for_workers_may_differ() -> None:
    resources = make_resources(("a", 0, 0), ("b", 2, 0), ("c", 2, 0))
    nodes = (make_node("a", cpu="a small one", code="d" * 64), make_node("b"), make_node("c"))
    assert check(make_job(nodes=nodes, resources=resources)) == ()


def test_the_odd_node_is_named() -> None:
    nodes = tuple(make_node(name) for name in "abcdefgh") + (make_node("i", cpu="An old one"),)
    (finding,) = check(make_job(nodes=nodes))
    assert finding.nodes == ("i",)
    assert "A processor on a, b, c and 5 more" in finding.what
    assert finding.values["the processor"]["An old one"] == ["i"]


def test_one_node_alone_needs_no_network() -> None:
    alone = make_node(network=make_network(resolves_to=("127.0.0.1",)), limits={"nofile": 256})
    assert check(make_job(nodes=(alone,))) == ()


def test_the_cluster_alone() -> None:
    nodes = two(shm_free=0)
    found = Survey(nodes, make_resources(("a", 2, 0), ("b", 2, 0)))
    report = inspect(make_config(), found)
    assert [finding.check for finding in report.findings] == ["shared_memory"]
    assert (report.ok, report.verdict) == (False, "refused: 1 error")
    assert report.to_dict()["communication"] is None
    marked = inspect(make_config(), replace(found, nodes=two(python="3.12.1"))).rows()
    assert marked[1][2] == "≠ 3.12.1"


def test_a_thousand_nodes_are_judged_one_by_one() -> None:
    """The worst case: every value of every node is another one."""
    nodes = tuple(
        replace(
            make_node(),
            node=f"n{i}",
            id=f"{i:056x}",
            cpu=f"processor {i}",
            environment={"OMP_NUM_THREADS": str(i)},
            network=make_network(i % 250 + 1, resolves_to=("127.0.1.1",)),
        )
        for i in range(1000)
    )
    given = make_resources(*((node.node, 2, 0) for node in nodes))
    links = tuple(Link(f"n{i}", f"n{(i + 1) % 1000}", 20.0, 100.0) for i in range(1000))
    report = preflight(make_config(), make_partition(), Survey(nodes, given, links))
    assert {f.check for f in report.findings} >= {"host_name_resolves", "hardware_uniform"}
    assert len([f for f in report.findings if f.check == "hardware_uniform"]) == 1
    assert len(report.rows()) == len(report.comm.nodes) == 1000
    print(f"{report.seconds:.2f} s for 1,000 nodes")
