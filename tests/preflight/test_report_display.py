"""A report as people read it: what is said once, and what of it fits."""

from __future__ import annotations

from dataclasses import replace

from raygnn.preflight.facts import NodeFacts
from raygnn.preflight.findings import Finding
from raygnn.preflight.probe import Survey
from raygnn.preflight.report import DisplayTable, Report, display_blocks, preflight
from tests.support.facts import make_config, make_node, make_partition, make_resources, two


def report(*given: NodeFacts) -> Report:
    resources = make_resources(*((node.node, 2, 0) for node in given))
    return preflight(make_config(), make_partition(), Survey(given, resources))


def test_a_single_node_is_a_line() -> None:
    line, table = display_blocks(report(make_node()))
    assert isinstance(line, str)
    assert line.startswith("node a: address 10.0.0.1, python 3.11.7, torch 2.13.0+cpu, ")
    assert isinstance(table, DisplayTable)
    assert table.columns == ("variable", "value", "reason")


def test_facts_shared_by_all_nodes_are_shown_once() -> None:
    line, table, _ = display_blocks(report(*two(python="3.11.9")))
    assert isinstance(line, str)
    assert line.startswith("all 2 nodes: torch 2.13.0+cpu, dgl 2.1.0, ray 2.60.0, ")
    assert isinstance(table, DisplayTable)
    # the disk of made-up nodes is known, their memory too
    assert table.columns == ["node", "address", "python", "memory", "disk"]
    assert table.rows[1][:3] == ("b", "10.0.0.2", "3.11.9")


def test_nodes_that_do_not_answer_are_findings() -> None:
    silent = NodeFacts("b", problem="no answer within 5 s, and much more that is in the finding")
    line, table, _ = display_blocks(report(make_node(), silent, make_node("c")))
    assert isinstance(line, str)
    assert line.startswith("all 2 nodes: ")
    assert isinstance(table, DisplayTable)
    assert table.rows[1][:2] == ("b", "no answer")
    assert [*display_blocks(report(silent))] == []


def test_the_cluster_alone_has_no_communication() -> None:
    survey = Survey(two(), make_resources(("a", 2, 0), ("b", 2, 0)))
    blocks = [*display_blocks(preflight(make_config(), None, survey, of_job=False))]
    assert [type(block) for block in blocks] == [str, DisplayTable]


def test_a_finding_names_its_check() -> None:
    what = "nodes differ in OMP_NUM_THREADS: 1 on host0, 64 on host1"
    found = Finding("environment_uniform", "error", what, "unset it there", ("host1",))
    assert found.text == f"error [environment_uniform]: {what}\n  → unset it there"
    assert replace(found, remedy="").text.count("\n") == 0
