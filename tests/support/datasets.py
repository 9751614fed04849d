"""Datasets as users write them: odd graphs, and odd dtypes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def cora(data: Path, root: Path) -> dict[str, Any]:
    """Return the section ``graph`` of Cora as PyG reads it, from links below ``root``."""
    return _through_pyg(root, "Planetoid", "Cora", data / "planetoid") | {"normalize": "row"}


def tolokers(data: Path, root: Path, **keys: Any) -> dict[str, Any]:
    """Return the section ``graph`` of Tolokers, which has ten splits."""
    return _through_pyg(root, "HeterophilousGraphDataset", "tolokers", data / "npz") | keys


def _through_pyg(root: Path, kind: str, name: str, source: Path) -> dict[str, Any]:
    raw = root / name / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if not (raw / file.name).exists():
            (raw / file.name).symlink_to(file.resolve())
    args = {"root": str(root), "name": name}
    return {"format": "dataset", "dataset": f"torch_geometric.datasets:{kind}", "args": args}


DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


class RandomGraphs:
    """Random graphs whose class follows from their features; two classes.

    Args:
        num: how many.
        dtypes: of the features, in turn.
        largest: nodes of the largest graph; sizes go from 0 up to it.
        edges: mean number of in-edges of a node; 0 for none at all.
        seed: of everything.
    """

    num_classes = 2

    def __init__(
        self,
        num: int = 24,
        dtypes: Sequence[str] = ("fp32",),
        largest: int = 6,
        edges: float = 2.0,
        seed: int = 0,
    ):
        self.num, self.dtypes, self.largest = num, list(dtypes), largest
        self.edges, self.seed = edges, seed

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, number: int):  # type: ignore[no-untyped-def]
        from raygnn.graph.dgl import dgl

        draw = torch.Generator().manual_seed(self.seed * 10_007 + number)
        nodes = int(torch.randint(0, self.largest + 1, (), generator=draw))
        edges = int(nodes * self.edges)
        graph = dgl().graph(
            (self._ends(nodes, edges, draw), self._ends(nodes, edges, draw)), num_nodes=nodes
        )
        label = number % 2
        feat = torch.randn(nodes, 4, generator=draw) + label
        # every dtype represents these values exactly, so that stored values do not depend on it
        feat = feat.mul(8).round().div(8).clamp(-8, 8)
        graph.ndata["feat"] = feat.to(DTYPES[self.dtypes[number % len(self.dtypes)]])
        return graph, label

    @staticmethod
    def _ends(nodes: int, edges: int, draw: torch.Generator) -> Tensor:
        return torch.randint(0, max(1, nodes), (edges,), generator=draw)


class HalfConverted(RandomGraphs):
    """Graphs that are bf16 if loaded by the path that most graphs take, as in dmlc/dgl#7851.

    A graph without edges, number 3, leaves the loader earlier and stays as it was.
    """

    def __getitem__(self, number: int):  # type: ignore[no-untyped-def]
        graph, label = super().__getitem__(number)
        if number == 3:
            import dgl

            graph = dgl.graph(([], []), num_nodes=2)
            graph.ndata["feat"] = torch.ones(2, 4)
            return graph, label
        graph.ndata["feat"] = graph.ndata["feat"].to(torch.bfloat16)
        return graph, label


class Bonds:
    """Graphs of two classes that only their edges determine.

    Args:
        tells: "amount", a number of each edge; "kind", a whole number; "neighbour": amounts say
            which neighbours' features are of the class, and the others are of the other class.
    """

    num_classes = 2

    def __init__(self, num: int = 60, tells: str = "amount", start: int = 0):
        self.num, self.tells, self.start = num, tells, start

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, number: int):  # type: ignore[no-untyped-def]
        from raygnn.graph.dgl import dgl

        draw = torch.Generator().manual_seed(self.start + number)
        label = number % 2
        sides = torch.arange(8) % 2
        src, dst = torch.randint(0, 8, (2, 24), generator=draw)
        graph = dgl().graph((src, dst), num_nodes=8)
        noise = torch.randn(24, generator=draw)
        kind = torch.randint(0, 2, (24,), generator=draw) * 2
        graph.ndata["feat"] = torch.nn.functional.one_hot(sides, 4).float()
        if self.tells == "neighbour":
            amount = (sides[src] == label).float()
        else:
            amount = noise + (2 * label - 1 if self.tells == "amount" else 0)
        graph.edata["amount"] = amount
        graph.edata["kind"] = kind + label * (self.tells == "kind")
        return graph, label


class Sums(RandomGraphs):
    """Graphs with a number as label: the sum over the nodes of their first feature."""

    num_classes = None

    def __getitem__(self, number: int):  # type: ignore[no-untyped-def]
        graph, _ = super().__getitem__(number)
        return graph, graph.ndata["feat"][:, 0].sum()


class Chosen(RandomGraphs):
    """Graphs that are all for training, except for the named ones."""

    def __init__(
        self,
        without: Sequence[int] = (),
        val: Sequence[int] = (),
        test: Sequence[int] = (),
        **args: Any,
    ):
        super().__init__(**args)
        others = {*without, *val, *test}
        numbers = [n for n in range(self.num) if n not in others]
        self.splits = {"train": numbers, "val": list(val), "test": list(test)}


class Labelled(RandomGraphs):
    """Graphs of which number 5 has a given class."""

    def __init__(self, label: int, **args: Any):
        super().__init__(**args)
        self.label = label

    def __getitem__(self, number: int):  # type: ignore[no-untyped-def]
        graph, label = super().__getitem__(number)
        return graph, self.label if number == 5 else label


class Unlabelled(RandomGraphs):
    """Graphs without known classes, in their author's notation."""

    num_classes = None

    def __init__(self, how: str, **args: Any):
        super().__init__(**args)
        self.how = how

    def __getitem__(self, number: int):  # type: ignore[no-untyped-def]
        graph, _ = super().__getitem__(number)
        labels = {"none": None, "nan": float("nan"), "dictionary": {"other": 1}}
        return graph if self.how == "alone" else (graph, labels[self.how])


class Coloured(RandomGraphs):
    """Graphs whose nodes have one of ``colours`` colours, too; the last colour always occurs."""

    def __init__(self, colours: int, **args: Any):
        super().__init__(**args)
        self.colours = colours

    def __getitem__(self, number: int):  # type: ignore[no-untyped-def]
        graph, label = super().__getitem__(number)
        draw = torch.Generator().manual_seed(number)
        colour = torch.randint(self.colours, (graph.num_nodes(),), generator=draw)
        colour[:1] = self.colours - 1
        graph.ndata["colour"] = colour
        return graph, label


class Numbered(RandomGraphs):
    """Graphs with a positive number as the label."""

    num_classes = None

    def __getitem__(self, number: int):  # type: ignore[no-untyped-def]
        return super().__getitem__(number)[0], float(number + 1)


class TwoLabels(RandomGraphs):
    """The class twice: of every third graph (``missing``) the second one is not known, of every
    ninth neither; graph 5 may have an odd one."""

    num_classes = None

    def __init__(self, missing: int = 3, odd: float | None = None, **args: Any):
        super().__init__(**args)
        self.missing, self.odd = missing, odd

    def __getitem__(self, number: int):  # type: ignore[no-untyped-def]
        graph, label = super().__getitem__(number)
        labels = torch.tensor([label, label], dtype=torch.float32)
        labels[1] = torch.nan if number % self.missing == 0 else label
        labels[0] = -1 if number % self.missing**2 == 0 else label
        if number == 5 and self.odd is not None:
            labels[0] = self.odd
        return graph, labels


def main(source: Path, target: Path) -> None:
    """Link datasets as PyG lays them out, for the jobs in ``jobs/``."""
    cora(source, target)
    tolokers(source, target)
    if not (target / "MUTAG.txt").exists():
        (target / "MUTAG.txt").symlink_to((source / "graphs" / "MUTAG.txt").resolve())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
