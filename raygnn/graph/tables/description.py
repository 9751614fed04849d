"""The YAML that describes tables, read and checked; errors name its keys and lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from raygnn.config.load import Document, read_text
from raygnn.config.problems import Problem, missing_key, nearest, show, unknown_key, wrong_value
from raygnn.config.yaml_text import KeyPath, read_yaml
from raygnn.errors import ConfigError
from raygnn.graph.data import MASKS, EdgeType, etype_str
from raygnn.graph.sources.files import check_file
from raygnn.graph.tables.spec import (
    NAMES,
    Category,
    EdgeTable,
    Masks,
    NodeTable,
    RandomSplit,
    Spec,
    Target,
    is_name,
)

M = TypeVar("M", bound=BaseModel)

_TABLES: dict[str, type[BaseModel]] = {"nodes": NodeTable, "edges": EdgeTable}
_INNER: dict[str, type[BaseModel]] = {"splits": RandomSplit, "masks": Masks}


def read_spec(file: Path) -> Spec:
    """Read a description of tables; the files that it names are not looked at.

    Raises:
        DataError: there is no such file.
        ConfigError: it is no YAML, or says something that cannot be: all problems, with lines.
    """
    document = read_document(file, "describe the tables in the sections nodes and edges")
    return validated(document, Spec, _problem, _contradictions)


def read_document(file: Path, remedy: str) -> Document:
    """A YAML of sections, with the lines of its keys.

    Raises:
        DataError: there is no such file.
        ConfigError: it is no YAML, or holds no sections; ``remedy`` says what to do then.
    """
    check_file(file)
    label = str(file)
    data, lines = read_yaml(read_text(file, label), label)
    if not isinstance(data, dict):
        raise ConfigError(
            f"expected sections (`key: value`), got {show(data)}", where=label, remedy=remedy
        )
    return Document(data, label, file, lines)


def validated(
    document: Document,
    model: type[M],
    problem: Callable[[ErrorDetails], Problem],
    contradictions: Callable[[M], Iterable[Problem]],
) -> M:
    """What a document says, as a ``model``.

    Args:
        problem: says what pydantic found, such as `problem_of`.
        contradictions: what fields that are right by themselves disagree on.

    Raises:
        ConfigError: it says something that cannot be: all problems, with lines.
    """
    try:
        made = model.model_validate(document.data)
    except ValidationError as error:
        found = [problem(detail) for detail in error.errors(include_url=False)]
        raise document.error(found) from None
    if problems := list(contradictions(made)):
        raise document.error(problems)
    return made


def problem_of(detail: ErrorDetails, model: type[BaseModel], depth: int) -> Problem:
    """What pydantic found, in our words.

    Args:
        model: the innermost one that the key belongs to.
        depth: the place of that model's own key in the path.
    """
    key = detail["loc"]
    fields = model.model_fields
    field = fields.get(str(key[depth])) if len(key) > depth else None
    if detail["type"] == "extra_forbidden":
        return unknown_key(key, fields)
    if detail["type"] == "missing":
        return missing_key(key, field)
    return wrong_value(key, detail, field)


def edge_type(key: str, spec: Spec) -> EdgeType | None:
    """``"user:bought:item"`` → the edge type; of one node type ``"cites"``, too; or None."""
    parts = key.split(":")
    if len(parts) == 1 and len(spec.nodes) == 1:
        (ntype,) = spec.nodes
        parts = [ntype, key, ntype]
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 and all(parts) else None


def _problem(detail: ErrorDetails) -> Problem:
    key: KeyPath = detail["loc"]
    if key[-1] == "[key]":  # pydantic's name for a mapping's key that is wrong
        return Problem(key[:-1], f"{show(key[-2])} is no name", f"use {NAMES}")
    return problem_of(detail, *_model(key))


def _model(key: KeyPath) -> tuple[type[BaseModel], int]:
    """The innermost model that a key belongs to, and the place of its own key in the path."""
    if len(key) < 3 or key[0] not in _TABLES:
        return Spec, 0
    if len(key) > 4 and key[2] == "categories":
        return Category, 4
    if len(key) > 3 and key[2] in _INNER:
        return _INNER[str(key[2])], 3
    return _TABLES[str(key[0])], 2


def _contradictions(spec: Spec) -> Iterator[Problem]:
    for ntype, nodes in spec.nodes.items():
        yield from _node_problems(("nodes", ntype), nodes)
    seen: dict[EdgeType, str] = {}
    for key, edges in spec.edges.items():
        etype = edge_type(key, spec)
        if etype is None:
            remedy = "write source:relation:target, such as user:bought:item"
            yield Problem(("edges", key), f"{show(key)} is no edge type", remedy)
            continue
        unknown = [ntype for ntype in (etype[0], etype[2]) if ntype not in spec.nodes]
        if unknown:
            close = nearest(unknown[0], spec.nodes)
            yield Problem(
                ("edges", key),
                f"there is no node type {show(unknown[0])}",
                (f"did you mean {close}? " if close else "") + f"known: {', '.join(spec.nodes)}",
            )
            continue
        yield from _edge_problems(("edges", key), edges, etype, spec)
        for each in (etype, *([(etype[2], edges.reverse, etype[0])] if edges.reverse else [])):
            if each in seen:
                what = f"the edge type {etype_str(each)} is there already, by {seen[each]}"
                yield Problem(("edges", key), what, "give one of them another relation")
            seen[each] = key


def _node_problems(key: KeyPath, nodes: NodeTable) -> Iterator[Problem]:
    for name in (*nodes.features, *nodes.categories):
        if name == "label" or name in MASKS:
            yield _taken(key, name, "label and split give")
    for name in nodes.features.keys() & nodes.categories.keys():
        yield _taken((*key, "categories"), name, "features give")
    for name, category in nodes.categories.items():
        if category.min_count > 1 and category.unknown == "error":
            what = "min_count would be ignored: there is no bucket"
            yield Problem((*key, "categories", name, "min_count"), what, "set unknown: bucket")
    yield from _target_problems(key, nodes)


def _target_problems(key: KeyPath, table: Target) -> Iterator[Problem]:
    given = [name for name in ("split", "masks", "splits") if getattr(table, name) is not None]
    if len(given) > 1:
        what = f"{' and '.join(given)} both say which rows are for what"
        yield Problem((*key, given[1]), what, "keep one of them")
    if table.split_words and table.split is None:
        what = "split_words would be ignored: there is no split"
        yield Problem((*key, "split_words"), what, "name its column with split")
    shares = table.splits
    if shares is not None and shares.train + shares.val + (shares.test or 0) > 1 + 1e-9:
        yield Problem((*key, "splits"), "the shares sum to more than 1", "lower one of them")
    if table.label is None and table.label_kind != "class":
        what = f"label_kind {table.label_kind} would be ignored: there is no label"
        yield Problem((*key, "label_kind"), what, "name its column with label")


def _edge_problems(
    key: KeyPath, edges: EdgeTable, etype: EdgeType, spec: Spec
) -> Iterator[Problem]:
    for name, column in (("weight", edges.weight), ("time", edges.time)):
        if column is not None and name in edges.features:
            yield _taken((*key, "features"), name, f"{name} gives")
    for name in edges.features:
        if name == "label" or name in MASKS:
            yield _taken(key, name, "label and split give")
    yield from _target_problems(key, edges)
    if not is_name(etype[1]):
        yield Problem(key, f"{show(etype[1])} is no name", f"use {NAMES}")
    if edges.undirected and etype[0] != etype[2]:
        what = f"undirected, but {etype[0]} and {etype[2]} are two types"
        yield Problem((*key, "undirected"), what, "give the other direction a name with reverse")
    if edges.undirected and edges.reverse:
        what = "reverse and undirected both add the other direction"
        yield Problem((*key, "reverse"), what, "keep one of them")
    for ntype in dict.fromkeys((etype[0], etype[2])):
        nodes = spec.nodes[ntype]
        if edges.missing != "add":
            continue
        filled = all(category.unknown == "bucket" for category in nodes.categories.values())
        if not filled or (nodes.features and nodes.fill is None):
            lacking = "features, and no fill" if filled else "categories without a bucket"
            yield Problem(
                (*key, "missing"),
                f"a node of type {ntype} that is added would have no values: it has {lacking}",
                "choose drop or refuse, or set "
                + (f"nodes.{ntype}.fill" if filled else "unknown: bucket for the categories"),
            )


def _taken(key: KeyPath, name: str, by: str) -> Problem:
    return Problem(key, f"{by} an array {name!r} already", "give it another name")
