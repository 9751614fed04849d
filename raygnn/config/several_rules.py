"""What several tasks on one graph (``tasks``) must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from raygnn.config.graph import ManyGraphs
from raygnn.config.problems import Problem
from raygnn.config.schema import Config
from raygnn.config.task import TaskConfig
from raygnn.config.values import NO_LAYERS


def several(config: Config) -> Iterator[Problem]:
    """``tasks`` with ``task``, ``graph``, ``model`` and ``guard``."""
    assert config.tasks is not None
    if config.task != TaskConfig():
        yield Problem(
            ("task",),
            "task would be ignored: there are tasks",
            "move it into tasks, under a name of its own, or remove tasks",
        )
    for name, task in config.tasks.items():
        if task.of_graphs:
            yield Problem(
                ("tasks", name, "kind"),
                f"{task.kind} is of many graphs, and tasks are of the nodes and edges of one",
                "set it to a kind of nodes or edges, or have this one task alone (task)",
            )
    if isinstance(config.graph, ManyGraphs):
        yield Problem(
            ("tasks",),
            "tasks are of the nodes and edges of one graph, and graph.format graphs gives many",
            "give one task (task), or one graph",
        )
    if config.model.kind == NO_LAYERS:
        yield Problem(
            ("model", "kind"),
            "none has no layers, and tasks share a network",
            "choose another model.kind, or give one task (task)",
        )
    if config.model.decoder is not None and not any(t.of_edges for t in config.tasks.values()):
        yield Problem(
            ("model", "decoder"),
            f"decoder {config.model.decoder} would be ignored: none of the tasks is of edges",
            "remove model.decoder",
        )
    if config.guard.on_bad_sample == "skip":
        yield Problem(
            ("guard", "on_bad_sample"),
            "skip would be ignored: the samples of tasks are nodes and edges",
            "remove guard.on_bad_sample",
        )


def of_task(problem: Problem, name: str, config: Config) -> Problem:
    """What is wrong with one task on its own, said of one of ``tasks``."""
    assert config.tasks is not None
    own = {"task.": f"tasks.{name}."}
    key = problem.key
    if config.tasks[name].decoder is not None:
        own["model.decoder"] = f"tasks.{name}.decoder"
        key = ("tasks", name, "decoder") if key == ("model", "decoder") else key
    if key[0] == "task":
        key = ("tasks", name, *key[1:])
    what, remedy = problem.what, problem.remedy
    for one, other in own.items():
        what, remedy = what.replace(one, other), remedy.replace(one, other)
    return replace(problem, key=key, what=what, remedy=remedy)
