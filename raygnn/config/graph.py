"""The section ``graph``: the formats of input graphs, each with its keys."""

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
    classes_of,
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
    """A graph whose edges may be added the other way round."""

    reverse: bool = False
    """Add an edge type rev_NAME for each edge type NAME: the same edges with the same arrays the
    other way round, so that messages pass both ways."""


class DglGraph(ReversibleGraph):
    """A file that dgl.save_graphs wrote."""

    format: Literal["dgl"]
    path: InputPath
    """The file that dgl.save_graphs wrote."""
    index: int = Field(0, ge=0, le=10**6)
    """Which of the file's graphs, from 0."""


class TablesGraph(ReversibleGraph):
    """Tables of nodes and edges, in files or databases, as a YAML of their own describes them."""

    format: Literal["tables"]
    path: InputPath
    """The YAML that describes the tables: see docs/data.md."""
    vocabulary: InputPath | None = None
    """A file with the words of other tables, whose numbers are taken over, and the state of what
    was done to their features: a run's checkpoints/selected.json, or a partition's raygnn.json;
    null = words are numbered in sorted order, and transforms are fitted to the rows for training.
    predict --new-data sets it."""


class TriplesGraph(ReversibleGraph):
    """A knowledge graph: files of head, relation and tail."""

    format: Literal["triples"]
    path: InputPath
    """A directory with train, valid and test files, or one file to train on: .txt or .tsv, .csv or
    .parquet."""


class OgbGraph(_Graph):
    """A node dataset of the Open Graph Benchmark in NumPy archives, such as ogbn-papers100M."""

    format: Literal["ogb"]
    path: InputPath
    """Where the package ogb keeps datasets, or the directory of this one, with raw and split in
    it."""
    name: Text
    """Which dataset, such as ogbn-papers100M."""
    split: Text | None = None
    """Which directory of split to use; null = the only one."""
    undirected: bool = False
    """Each pair is listed once and stands for both directions."""


class PlantedGraph(_Graph):
    """A generated graph: power-law degrees, communities, features that need the neighbourhood."""

    format: Literal["planted"]
    nodes: Count
    """Number of nodes."""
    degree: float = Field(50.0, gt=0, le=10**6)
    """Mean number of in-edges of a node."""
    classes: int = Field(47, ge=2, le=10**6)
    """Number of communities, which are the labels."""
    features: int = Field(100, ge=1, le=10**6)
    """Number of features of a node."""
    train: Fraction = Field(0.08, gt=0)
    """Share of the nodes to train on."""
    val: Fraction = 0.02
    """Share of the nodes to validate on; the rest are for test."""
    homophily: Fraction = 0.8
    """Share of the edges that stay within a community."""
    noise: float = Field(8.0, ge=0)
    """Deviation of a node's features around its community's mean."""
    power: float = Field(2.5, gt=1, le=100)
    """Exponent of the degrees' power law."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of the generator."""
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
            message = f"train {self.train:g} + val {self.val:g} leaves no nodes to test on"
            remedy = "lower graph.train or graph.val until they sum to less than 1"
            yield Problem((*at, "val"), message, remedy)
        if self.classes > items:
            message = f"{self.classes} classes are more than {nodes}"
            yield Problem((*at, "classes"), message, "raise graph.nodes or lower graph.classes")
        if self.degree > items / 2:
            message = f"a mean degree of {self.degree:g} is more than half of {nodes}"
            yield Problem((*at, "degree"), message, "lower graph.degree or raise graph.nodes")
        if int(self.train * items) < 1:
            message = f"train {self.train:g} of {nodes} rounds down to 0"
            yield Problem((*at, "train"), message, "raise graph.train or graph.nodes")


class GraphSplit(Section):
    """Return the number of graphs that are split, for tasks on whole graphs."""

    read_if: ClassVar[Conditions] = {
        "fold": ("folds",),
        "fold_for": ("folds",),
        "test": ("folds", None),
        "val": ("fold_for", "test"),
    }

    val: Fraction = Field(0.1, lt=1)
    """Share of the graphs to validate on."""
    test: Fraction = Field(0.1, lt=1)
    """Share of the graphs to test on."""
    folds: Annotated[int, Field(ge=2, le=10**6)] | None = None
    """Cross-validation: test on one of so many folds, instead of a share."""
    fold: int = Field(0, ge=0, le=10**6)
    """Which of the folds to test on, from 0."""
    fold_for: Literal["test", "val"] = "test"
    """What the fold is held out for; val: it is validated on after each epoch, and there is nothing
    to test on, which is how GIN's results were published."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of the split."""

    def _conflicts(self, at: KeyPath) -> Iterator[Problem]:
        if self.folds is not None and self.fold >= self.folds:
            message = f"there is no fold {self.fold} of {self.folds}"
            yield Problem((*at, "fold"), message, f"set graph.fold to 0 … {self.folds - 1}")
        if self.folds is None and self.val + self.test >= 1:
            message = f"val {self.val:g} + test {self.test:g} leaves no graphs to train on"
            remedy = "lower graph.val or graph.test until they sum to less than 1"
            yield Problem((*at, "val"), message, remedy)


class DatasetGraph(GraphSplit, ReversibleGraph):
    """A dataset class of PyG, DGL or OGB, or one of your own, read once and then partitioned."""

    format: Literal["dataset"]
    dataset: UserClass
    """The class, such as torch_geometric.datasets:Planetoid or package.module:Class; dataset[i] is
    a Data or HeteroData of PyG, a DGL graph, or a graph and its labels."""
    args: JsonValues = Field({})
    """Keyword arguments for the class; a relative root is taken from the directory of the config
    file."""
    index: int = Field(0, ge=0, le=10**6)
    """Which of the dataset's graphs, from 0."""
    split: int = Field(0, ge=0, le=10**6)
    """Which column of masks with several splits, from 0."""


class ManyGraphs(GraphSplit, _Graph):
    """Files of many graphs, for tasks on whole graphs."""

    format: Literal["graphs"]
    path: InputPath
    """A file that dgl.save_graphs wrote with labels, or a directory of such files."""


GraphConfig: TypeAlias = Annotated[
    (DatasetGraph | DglGraph | TablesGraph | TriplesGraph | OgbGraph | PlantedGraph | ManyGraphs),
    Field(discriminator="format"),
]
FORMATS = classes_of(GraphConfig)
