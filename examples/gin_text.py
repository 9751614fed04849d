"""A dataset class for `graph: {format: dataset}`: graphs as text, as published with GIN.

The first line is the number of graphs. Each graph is a line `n label`, then for each node a line
`tag degree neighbours…` (Xu et al., 2019). Tags and labels are numbered in ascending order.
"""

from pathlib import Path

import torch
from torch_geometric.data import Data


class GinText:
    """The graphs of `root/NAME.txt`: feature i is for `tags[i]`, class i is `labels[i]`."""

    def __init__(self, root: str, name: str, tags: tuple = (), labels: tuple = ()):
        file = Path(root) / f"{name}.txt"
        self.raw_paths = [file]  # their content makes a new partition when it changes
        lines = iter([[int(word) for word in line.split()] for line in file.open()])
        num_graphs = next(lines)[0]
        graphs = []
        for _ in range(num_graphs):
            num_nodes, label = next(lines)
            graphs.append((label, [next(lines) for _ in range(num_nodes)]))
        self.tags = tags or sorted({tag for _, nodes in graphs for tag, *_ in nodes})
        self.labels = labels or sorted({label for label, _ in graphs})
        self.graphs = [self._graph(label, nodes) for label, nodes in graphs]

    def _graph(self, label: int, nodes: list[list[int]]) -> Data:
        x = torch.eye(len(self.tags))[[self.tags.index(tag) for tag, *_ in nodes]]
        ends = [(node, other) for node, line in enumerate(nodes) for other in line[2:]]
        edge_index = torch.tensor(ends, dtype=torch.int64).reshape(-1, 2).T
        return Data(x=x, edge_index=edge_index, y=torch.tensor([self.labels.index(label)]))

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, number: int) -> Data:
        return self.graphs[number]
