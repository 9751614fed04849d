"""Split of graphs into training, validation and test."""

from __future__ import annotations

import numpy as np

from raygnn.config.graph import GraphSplit
from raygnn.errors import ConfigError
from raygnn.graph.data import SPLITS


def split_graphs(num: int, classes: np.ndarray | None, graph: GraphSplit) -> dict[str, np.ndarray]:
    """Divide graphs at random, by ``graph.seed``, stratified by class.

    With ``graph.folds``, the test graphs are fold ``graph.fold`` of disjoint folds of nearly equal
    size, and ``graph.val`` is a share of the others; with ``graph.fold_for: val``, the fold is the
    validation split and there is no test split. Otherwise ``graph.val`` and ``graph.test`` are
    shares of all graphs. A share above 0 is at least one graph, if that leaves one to train on.

    Args:
        num: number of graphs, from 1.
        classes: integers ``[num]``; None without classes.

    Returns:
        "train", "val" and "test" → graph numbers, int64, ascending; each graph is in one of them.

    Raises:
        ConfigError: there are more folds than graphs.
    """
    # RandomState, because its stream is the same in every version of NumPy
    order = np.random.RandomState(graph.seed).permutation(num)
    if classes is not None:
        # sorted by class, so that equal steps take equal shares of each class
        order = order[np.argsort(classes[order], kind="stable")]
    if graph.folds is None:
        test, rest = _take(order, _count(graph.test, num, len(order)))
        val, train = _take(rest, _count(graph.val, num, len(rest)))
    else:
        if graph.folds > num:
            raise ConfigError(
                f"{num} graphs cannot be divided into {graph.folds} folds",
                where="graph.folds",
                remedy="lower graph.folds",
            )
        mine = np.arange(num) % graph.folds == graph.fold
        held, rest = order[mine], order[~mine]
        if graph.fold_for == "val":
            test, val, train = held[:0], held, rest
        else:
            test = held
            val, train = _take(rest, _count(graph.val, len(rest), len(rest)))
    parts = {"train": train, "val": val, "test": test}
    return {name: np.sort(part).astype(np.int64) for name, part in parts.items()}


def no_splits() -> dict[str, np.ndarray]:
    """Return empty splits."""
    return {name: np.zeros(0, np.int64) for name in SPLITS}


def _count(share: float, whole: int, available: int) -> int:
    count = max(int(share * whole + 0.5), 1) if share else 0
    return min(count, available - 1)


def _take(order: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``count`` elements at equal steps, and the others."""
    taken = np.zeros(len(order), np.bool_)
    taken[(2 * np.arange(count) + 1) * len(order) // (2 * max(count, 1))] = True
    return order[taken], order[~taken]
