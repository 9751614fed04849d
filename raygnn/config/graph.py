"""Section ``graph``: formats of input graphs, each with its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from raygnn.config.problems import Problem
from raygnn.config.values import (
    Conditions,
    Count,
    Fraction,
    InputPath,
    JsonValues,
    Section,
    Text,
    UserClass,
)
from raygnn.config.yaml_text import KeyPath


class _Graph(Section):
    kind_key = "format"

    normalize: Literal["none", "row", "standard"] | None = None
    """Scaling of the features: none, row (each row sums to 1) or standard (each column to mean 0,
    deviation 1); null = none."""
    format: str
    """Format of the input graph."""


class ReversibleGraph(_Graph):
    """A graph to which reverse edges can be added."""

    reverse: bool = False
    """Add an edge type rev_NAME for each edge type NAME: the reverse edges, with the same arrays,
    so that messages pass both ways."""


class DglGraph(ReversibleGraph):
    """A file written by dgl.save_graphs."""

    format: Literal["dgl"]
    path: InputPath
    """File written by dgl.save_graphs."""
    index: int = Field(0, ge=0, le=10**6)
    """Number of the graph in the file, from 0."""


class TablesGraph(ReversibleGraph):
    """Tables of nodes and edges in files or databases, described by a separate YAML file."""

    format: Literal["tables"]
    path: InputPath
    """YAML file that describes the tables: see docs/data.md."""
    vocabulary: InputPath | None = None
    """File with the categories and fitted transforms of other tables, which are reused: a run's
    checkpoints/selected.json, or a partition's raygnn.json; null = categories are numbered in
    sorted order, and transforms are fitted to the training rows. predict --new-data sets it."""


class TriplesGraph(ReversibleGraph):
    """A knowledge graph: files of head, relation and tail."""

    format: Literal["triples"]
    path: InputPath
    """Directory with train, valid and test files, or one training file: .txt or .tsv, .csv or
    .parquet."""


class OgbGraph(_Graph):
    """A node dataset of the Open Graph Benchmark in NumPy archives, such as ogbn-papers100M."""

    format: Literal["ogb"]
    path: InputPath
    """Directory in which the package ogb stores datasets, or the directory of this one, which
    contains raw and split."""
    name: Text
    """Name of the dataset, such as ogbn-papers100M."""
    split: Text | None = None
    """Name of the directory in split; null = the only one."""
    undirected: bool = False
    """Each listed edge stands for both directions."""


class PlantedGraph(_Graph):
    """A generated graph with power-law degrees, communities, and features so noisy that a model
    needs the neighbourhood."""

    format: Literal["planted"]
    nodes: Count
    """Number of nodes."""
    degree: float = Field(50.0, gt=0, le=10**6)
    """Mean number of in-edges of a node."""
    classes: int = Field(47, ge=2, le=10**6)
    """Number of communities; a node's community is its label."""
    features: int = Field(100, ge=1, le=10**6)
    """Number of features of a node."""
    train: Fraction = Field(0.08, gt=0)
    """Training fraction of the nodes."""
    val: Fraction = 0.02
    """Validation fraction of the nodes; all other nodes are for test."""
    homophily: Fraction = 0.8
    """Fraction of the edges within a community."""
    noise: float = Field(8.0, ge=0)
    """Standard deviation of a node's features around its community's mean."""
    power: float = Field(2.5, gt=1, le=100)
    """Exponent of the degrees' power law."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Random seed of the generator."""
    typed: bool = False
    """Several node and edge types instead of one of each."""

    @property
    def labelled_nodes(self) -> int:
        """Number of labelled nodes: all, or the items of a typed graph."""
        return self.nodes - self.nodes // 5 if self.typed else self.nodes

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        items = self.labelled_nodes
        nodes = f"{items} nodes with labels (four fifths)" if self.typed else f"{items} nodes"
        if self.train + self.val >= 1:
            message = f"train {self.train:g} + val {self.val:g} leaves no nodes for test"
            remedy = "lower graph.train or graph.val until they sum to less than 1"
            yield Problem((*at, "val"), message, remedy)
        if self.classes > items:
            message = f"{self.classes} classes are more than {nodes}"
            yield Problem((*at, "classes"), message, "raise graph.nodes or lower graph.classes")
        if self.degree > items / 2:
            message = f"a mean degree of {self.degree:g} is more than half of {nodes}"
            yield Problem((*at, "degree"), message, "lower graph.degree or raise graph.nodes")
        if int(self.train * items) < 1:
            message = f"train {self.train:g} of {nodes} is less than one node"
            yield Problem((*at, "train"), message, "raise graph.train or graph.nodes")


class GraphSplit(Section):
    """Split of the graphs into training, validation and test, for graph-level tasks."""

    read_if: ClassVar[Conditions] = {
        "fold": ("folds",),
        "fold_for": ("folds",),
        "test": ("folds", None),
        "val": ("fold_for", "test"),
    }

    val: Fraction = Field(0.1, lt=1)
    """Validation fraction of the graphs."""
    test: Fraction = Field(0.1, lt=1)
    """Test fraction of the graphs."""
    folds: Annotated[int, Field(ge=2, le=10**6)] | None = None
    """Cross-validation: number of folds; one of them is the test set, instead of a fraction."""
    fold: int = Field(0, ge=0, le=10**6)
    """Number of the held-out fold, from 0."""
    fold_for: Literal["test", "val"] = "test"
    """Use of the held-out fold: test, or val = validation after each epoch without a test set, as
    in GIN's published results."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Random seed of the split."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        if self.folds is not None and self.fold >= self.folds:
            message = f"there is no fold {self.fold} of {self.folds}"
            yield Problem((*at, "fold"), message, f"set graph.fold to 0 … {self.folds - 1}")
        if self.folds is None and self.val + self.test >= 1:
            message = f"val {self.val:g} + test {self.test:g} leaves no graphs for training"
            remedy = "lower graph.val or graph.test until they sum to less than 1"
            yield Problem((*at, "val"), message, remedy)


class DatasetGraph(GraphSplit, ReversibleGraph):
    """A dataset class of PyG, DGL or OGB, or your own class, read once and then partitioned."""

    format: Literal["dataset"]
    dataset: UserClass
    """Class, such as torch_geometric.datasets:Planetoid or package.module:Class; dataset[i] is a
    Data or HeteroData of PyG, a DGL graph, or a graph and its labels."""
    args: JsonValues = Field({})
    """Keyword arguments for the class; a relative root is relative to the directory of the config
    file."""
    index: int = Field(0, ge=0, le=10**6)
    """Number of the graph in the dataset, from 0."""
    split: int = Field(0, ge=0, le=10**6)
    """Column of masks that contain several splits, from 0."""


class ManyGraphs(GraphSplit, _Graph):
    """Files of many graphs, for graph-level tasks."""

    format: Literal["graphs"]
    path: InputPath
    """File written by dgl.save_graphs with labels, or a directory of such files."""


GraphConfig: TypeAlias = Annotated[
    DatasetGraph | DglGraph | TablesGraph | TriplesGraph | OgbGraph | PlantedGraph | ManyGraphs,
    Field(discriminator="format"),
]
