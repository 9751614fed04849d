"""What the keys of the section ``graph`` must agree on, where that takes more than a line."""

from __future__ import annotations

from collections.abc import Iterator

from raygnn.config.graph import ManyGraphs
from raygnn.config.problems import Problem, show
from raygnn.config.values import class_problem


def many_graphs(graph: ManyGraphs) -> Iterator[Problem]:
    """What the keys of ``graph: {format: graphs}`` must agree on; files are not looked at."""
    if graph.path is None and graph.dataset is None:
        yield Problem(
            ("graph", "path"),
            "neither path nor dataset is given, so there are no graphs",
            "name files with graph.path, or your own dataset with graph.dataset",
        )
    if graph.path is not None and graph.dataset is not None:
        yield Problem(
            ("graph", "dataset"),
            f"dataset {graph.dataset} and path {graph.path} are both given",
            "remove one of them; what your own dataset reads can be given in graph.args",
        )
    if graph.dataset is None and graph.args:
        yield Problem(
            ("graph", "args"),
            f"args {', '.join(map(show, graph.args))} would be ignored: there is no graph.dataset",
            "remove graph.args, or name your own dataset with graph.dataset",
        )
    if graph.dataset is not None:
        if problem := class_problem(graph.dataset):
            yield Problem(("graph", "dataset"), f"{show(graph.dataset)}: {problem[0]}", problem[1])
        if graph.normalize is not None:
            yield Problem(
                ("graph", "normalize"),
                f"normalize {graph.normalize} would be ignored: graph.dataset gives its graphs "
                "as they are",
                "remove graph.normalize, and scale the features in your own dataset",
            )
    for key in ("tags", "labels"):
        if graph.dataset is not None and getattr(graph, key) is not None:
            yield Problem(
                ("graph", key),
                f"{key} would be ignored: graph.dataset gives its graphs as they are",
                f"remove graph.{key}",
            )
    if graph.folds is None:
        if graph.fold:
            yield Problem(
                ("graph", "fold"),
                f"fold {graph.fold} would be ignored: there is no graph.folds",
                "set graph.folds, or remove graph.fold",
            )
        if graph.fold_for != "test":
            yield Problem(
                ("graph", "fold_for"),
                f"fold_for {graph.fold_for} would be ignored: there is no graph.folds",
                "set graph.folds, or remove graph.fold_for",
            )
        if graph.val + graph.test >= 1:
            yield Problem(
                ("graph", "val"),
                f"val {graph.val:g} + test {graph.test:g} leaves no graphs to train on",
                "lower graph.val or graph.test until they sum to less than 1",
            )
        return
    if graph.fold_for == "val" and graph.val != ManyGraphs.model_fields["val"].default:
        yield Problem(
            ("graph", "val"),
            f"val {graph.val:g} would be ignored: with graph.fold_for val the fold is validated on",
            "remove graph.val or graph.fold_for",
        )
    if graph.fold >= graph.folds:
        yield Problem(
            ("graph", "fold"),
            f"there is no fold {graph.fold} of {graph.folds}",
            f"set graph.fold to 0 … {graph.folds - 1}",
        )
    if graph.test != ManyGraphs.model_fields["test"].default:
        yield Problem(
            ("graph", "test"),
            f"test {graph.test:g} would be ignored: with graph.folds one fold is for test",
            "remove graph.test or graph.folds",
        )
