"""``meta.yaml`` of a directory that ``dgl.data.CSVDataset`` reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import ErrorDetails

from raygnn.config.problems import Problem, show
from raygnn.config.values import Section, Text
from raygnn.graph.data import EdgeType
from raygnn.graph.tables.description import problem_of, read_document, validated
from raygnn.graph.tables.spec import NAMES, Delimiter, is_name


def _default(value: str) -> BeforeValidator:
    """DGL takes null for the default."""
    return BeforeValidator(lambda given: value if given is None else given)


_NodeType = Annotated[Text, _default("_V")]
_GraphId = Annotated[Text, _default("graph_id")]


class NodeFile(Section):
    """The nodes of one type."""

    file_name: Text = Field(description="Its CSV file, beside meta.yaml.")
    ntype: _NodeType = Field("_V", description="Node type.")
    graph_id_field: _GraphId = Field("graph_id", description="Column of the graph's number.")
    node_id_field: Annotated[Text, _default("node_id")] = Field(
        "node_id", description="Column of ids."
    )


class EdgeFile(Section):
    """The edges of one type."""

    file_name: Text = Field(description="Its CSV file, beside meta.yaml.")
    etype: Annotated[
        list[Text],
        BeforeValidator(lambda given: ["_V", "_E", "_V"] if given is None else given),
        Field(min_length=3, max_length=3),
    ] = Field(["_V", "_E", "_V"], description="Source type, relation and target type.")
    graph_id_field: _GraphId = Field("graph_id", description="Column of the graph's number.")
    src_id_field: Annotated[Text, _default("src_id")] = Field(
        "src_id", description="Column with the id of the source node."
    )
    dst_id_field: Annotated[Text, _default("dst_id")] = Field(
        "dst_id", description="Column with the id of the target node."
    )

    @property
    def edge_type(self) -> EdgeType:
        source, relation, target = self.etype
        return source, relation, target


class GraphFile(Section):
    """Labels of whole graphs."""

    file_name: Text = Field(description="Its CSV file, beside meta.yaml.")
    graph_id_field: _GraphId = Field("graph_id", description="Column of the graph's number.")


class Meta(Section):
    """What ``meta.yaml`` says."""

    version: Annotated[Literal["1.0.0"], _default("1.0.0")] = Field(
        "1.0.0", description="Version of the format."
    )
    dataset_name: Text = Field(description="What the dataset is called.")
    separator: Annotated[Delimiter, _default(",")] = Field(",", description="Between columns.")
    node_data: list[NodeFile] = Field(min_length=1, description="The files of nodes.")
    edge_data: list[EdgeFile] = Field(min_length=1, description="The files of edges.")
    graph_data: GraphFile | None = Field(None, description="The file of graphs.")


_INNER: dict[str, type[BaseModel]] = {
    "node_data": NodeFile,
    "edge_data": EdgeFile,
    "graph_data": GraphFile,
}


def read_meta(file: Path) -> Meta:
    """Read ``meta.yaml``; the files that it names are not looked at.

    Raises:
        DataError: there is no such file.
        ConfigError: it is no YAML, or says something that cannot be: all problems, with lines.
    """
    document = read_document(file, "give dataset_name, node_data and edge_data")
    return validated(document, Meta, _problem, _contradictions)


def _problem(detail: ErrorDetails) -> Problem:
    key = detail["loc"]
    model = _INNER.get(str(key[0]), Meta) if len(key) > 1 else Meta
    depth = 0 if model is Meta else 1 if key[0] == "graph_data" else 2
    return problem_of(detail, model, depth)


def _contradictions(meta: Meta) -> Iterator[Problem]:
    ntypes = [each.ntype for each in meta.node_data]
    for at, ntype in enumerate(ntypes):
        if not is_name(ntype) and ntype != "_V":
            yield Problem(("node_data", at, "ntype"), f"{show(ntype)} is no name", f"use {NAMES}")
        if ntype in ntypes[:at]:
            what = f"the node type {show(ntype)} is there already"
            yield Problem(("node_data", at, "ntype"), what, "give each file a type of its own")
    etypes = [each.edge_type for each in meta.edge_data]
    for at, etype in enumerate(etypes):
        key = ("edge_data", at, "etype")
        for ntype in dict.fromkeys((etype[0], etype[2])):
            if ntype not in ntypes:
                what = f"there is no node type {show(ntype)}"
                yield Problem(key, what, f"known: {', '.join(ntypes)}")
        if not is_name(etype[1]) and etype[1] != "_E":
            yield Problem(key, f"{show(etype[1])} is no name", f"use {NAMES}")
        if etype in etypes[:at]:
            what = f"the edge type {':'.join(etype)} is there already"
            yield Problem(key, what, "give each file a type of its own")
    if meta.graph_data is not None:
        what = "graph_data gives data of whole graphs, and this format reads one graph"
        remedy = (
            "read it with dgl.data.CSVDataset, save graphs and labels with dgl.save_graphs, and "
            "use format: graphs"
        )
        yield Problem(("graph_data",), what, remedy)
