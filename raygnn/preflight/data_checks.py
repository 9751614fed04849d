"""Checks of the partition: that it is whole everywhere, and can be trained on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from raygnn.config.graph import ManyGraphs
from raygnn.graph.data import etype_str
from raygnn.graph.partition.edge_target import EdgeSplit, EdgeTarget
from raygnn.preflight.facts import Column
from raygnn.preflight.findings import Finding
from raygnn.preflight.job import Job


def partition_visible(job: Job) -> Iterator[Finding]:
    """Every node sees the same partition, whole and as it was written."""
    if not job.partition.directory:
        return  # not made yet
    remedy = "put the partition where every node sees it (partition.path), or copy it there whole"
    if len(job.nodes) == 1:
        remedy = f"restore the file, or delete {job.partition.directory} and make it again"
    for node in job.nodes:
        expected, seen = job.partition.files, node.partition_files
        missing = sorted(expected.keys() - seen.keys())
        wrong = sorted(
            name for name in expected if seen.get(name, expected[name]) != expected[name]
        )
        if missing:
            what = f"{len(missing)} of the partition's files are missing, {missing[0]} the first"
        elif wrong:
            name = wrong[0]
            what = f"{name} of the partition has {seen[name]} bytes, expected {expected[name]}"
        elif node.partition_fingerprint != job.partition.fingerprint:
            what = "another partition lies at the same place there"
        elif node.damaged:
            name = min(node.damaged)
            what = f"{name} of the partition {node.damaged[name]}"
        else:
            continue
        yield Finding(
            "partition_visible",
            "error",
            f"{job.partition.directory}: {what}",
            remedy,
            nodes=(node.node,),
            values={"missing": missing, "wrong": wrong, "damaged": dict(node.damaged)},
        )


def parts_agree(job: Job) -> Iterator[Finding]:
    """An array has one dtype and one row shape in every part."""
    if job.partition.alike:
        return
    for ntype, arrays in job.partition.columns.items():
        for name, columns in arrays.items():
            kinds = sorted(set(columns))
            if len(kinds) < 2 and len(columns) in (0, job.partition.num_parts):
                continue
            where = {str(kind): [p for p, c in enumerate(columns) if c == kind] for kind in kinds}
            listed = ", ".join(f"{kind} in part {parts[0]}" for kind, parts in where.items())
            absent = len(columns) < job.partition.num_parts
            yield Finding(
                "parts_agree",
                "error",
                f"array {name!r} of node type {ntype!r} is not the same in every part: "
                + ("some lack it" if absent else listed),
                "make the partition again from one array",
                values={"array": f"{ntype}/{name}", "parts": where},
            )


def arrays_usable(job: Job) -> Iterator[Finding]:
    """Features and target are there, and of a kind that can be trained on."""
    wrong = [_named(name, f) for name, one in job.by_task.items() for f in _goal(one)]
    yield from wrong
    if wrong:
        return
    for ntype, arrays in job.partition.columns.items():
        yield from _inputs(job, ntype, arrays)
    for name, one in job.by_task.items():
        for finding in _targets(one):
            yield _named(name, finding)


def _named(name: str, finding: Finding) -> Finding:
    """What is found of one task on its own, said of one of several."""
    if not name:
        return finding
    what, remedy = (t.replace("task.", f"tasks.{name}.") for t in (finding.what, finding.remedy))
    return replace(finding, what=f"task {name}: {what}", remedy=remedy)


def _goal(job: Job) -> Iterator[Finding]:
    """What is wrong with what is to be predicted for."""
    task = job.config.task
    if job.ntype is None and not task.of_graphs and not task.of_edges:
        yield _no_type(job)
    elif isinstance(job.edges, tuple):
        yield Finding("arrays_usable", "error", *job.edges)


def _targets(job: Job) -> Iterator[Finding]:
    """What is wrong with what is to be predicted."""
    task, columns = job.config.task, job.columns
    there = ", ".join(sorted(columns)) or "none"
    if task.of_graphs:
        return  # the targets are no arrays of nodes; reading them has seen to them
    if isinstance(job.edges, EdgeTarget):
        yield from _edge_arrays(job, job.edges)
        return
    if task.target in columns:
        yield from _target(job, columns[task.target][0])
    elif job.config.trains:
        yield Finding(
            "arrays_usable",
            "error",
            f"node type {job.ntype!r} has no array {task.target!r} (task.target); "
            f"there are: {there}",
            "set task.target to one of them, or task.ntype to the type that has it",
        )


def _target(job: Job, column: Column) -> Iterator[Finding]:
    """What is predicted are class numbers, or numbers."""
    task = job.config.task
    if task.classifies:
        whole = re.match(r"u?int", column.dtype) is not None
        fits, wanted = whole and not column.shape, "one whole number"
        remedy = "set task.target to an array of class numbers"
    else:
        fits = re.match(r"(float|bfloat|u?int)", column.dtype) is not None
        wanted = "numbers"
        remedy = "set task.target to an array of numbers"
    if not fits or 0 in column.shape:
        yield Finding(
            "arrays_usable",
            "error",
            f"array {task.target!r} (task.target) is {column}, expected {wanted} per {task.unit}",
            remedy,
        )


def _edge_arrays(job: Job, target: EdgeTarget) -> Iterator[Finding]:
    """The edges' targets and relations are of a kind that can be trained on."""
    task, arrays = job.config.task, job.partition.edges[target.etype]
    if not task.of_links and task.target in arrays:
        yield from _target(job, arrays[task.target])
    if target.relation is None:
        return
    column = arrays[target.relation]
    if not re.match(r"u?int", column.dtype) or column.shape:
        yield Finding(
            "arrays_usable",
            "error",
            f"array {target.relation!r} (model.relation) is {column}, expected one whole number "
            "per edge",
            "set model.relation to an array of relation numbers",
        )


def _inputs(job: Job, ntype: str, arrays: Mapping[str, tuple[Column, ...]]) -> Iterator[Finding]:
    """A node type has learned rows, or at least one of the arrays that the model reads, and they
    are numbers."""
    model = job.config.model
    wanted = [*model.feature_names, *model.categories]
    known = ", ".join(sorted(arrays)) or "none"
    has_inputs = any(name in arrays for name in wanted)
    learns = model.embedding is not None and model.embedding.covers(ntype, has_inputs)
    if not has_inputs and not learns:
        named = " or ".join(repr(name) for name in wanted)
        yield Finding(
            "arrays_usable",
            "error",
            f"node type {ntype!r} has no array {named} (model.features); there are: {known}",
            "give every node type an array of a name that model.features says, or learned rows "
            "with model.embedding",
        )
    for name in wanted:
        if not arrays.get(name):
            continue
        column = arrays[name][0]
        key = "model.categories" if name in model.categories else "model.features"
        numbers = r"u?int" if name in model.categories else r"(float|bfloat|int|uint)"
        if not re.match(numbers, column.dtype):
            kind = "whole numbers" if name in model.categories else "numbers"
            yield Finding(
                "arrays_usable",
                "error",
                f"array {name!r} ({key}) is {column.dtype}, not {kind}",
                f"set {key} to an array of {kind}",
            )
        elif 0 in column.shape:
            yield Finding(
                "arrays_usable",
                "error",
                f"array {name!r} ({key}) has rows without values",
                f"set {key} to another array",
            )
        elif name in model.categories and math.prod(column.shape) != 1:
            yield Finding(
                "arrays_usable",
                "error",
                f"array {name!r} ({key}) has rows of {list(column.shape)}, expected one category",
                "split it into arrays of one category each, or move it to model.features",
            )


def inputs_exist(job: Job) -> Iterator[Finding]:
    """Every array that the model is told to read is there for some node type."""
    model = job.config.model
    wanted = (*model.feature_names, *model.categories)
    there = {name for arrays in job.partition.columns.values() for name in arrays}
    if there.isdisjoint(wanted):
        return  # said for each node type already, or not known
    for name in wanted:
        if name not in there:
            key = "model.categories" if name in model.categories else "model.features"
            yield Finding(
                "inputs_exist",
                "error",
                f"no node type has an array {name!r} ({key}); "
                f"there are: {', '.join(sorted(there)) or 'none'}",
                f"set {key} to arrays that are there",
            )


def embeddings_usable(job: Job) -> Iterator[Finding]:
    """The node types that are to have learned rows are there."""
    model, columns = job.config.model, job.partition.columns
    if model.embedding is None or not columns:
        return
    wanted, there = {*model.feature_names, *model.categories}, ", ".join(columns)
    unknown = [name for name in model.embedding.ntypes or () if name not in columns]
    covered = [
        t for t, arrays in columns.items() if model.embedding.covers(t, bool(wanted & {*arrays}))
    ]
    if unknown:
        what = f"there is no node type {unknown[0]!r} (model.embedding.ntypes); there are: {there}"
        yield Finding("embeddings_usable", "error", what, "name one of them, or leave the key out")
    elif not covered:
        yield Finding(
            "embeddings_usable",
            "error",
            "every node type has features, so model.embedding would learn nothing",
            f"say which are to have some with model.embedding.ntypes ({there}), or remove it",
        )


def nodes_to_train_on(job: Job) -> Iterator[Finding]:
    """There is something to train on, to validate on and to test on."""
    for name, one in job.by_task.items():
        for finding in _enough(one):
            yield _named(name, finding)


def _enough(job: Job) -> Iterator[Finding]:
    splits, select = job.partition.splits, job.config.train.select
    graphs, seeds = job.config.task.of_graphs, job.config.task.seeds
    whole = "collection" if graphs else "partition"
    mask = (
        "leave {0} graphs: see graph.val and graph.test" if graphs else "give the graph a {0}_mask"
    )
    train = splits.get("train")
    if not job.config.trains:
        return
    if train == 0:
        yield Finding(
            "nodes_to_train_on",
            "error",
            f"the {whole} has no training {seeds}",
            mask.format("train")
            + ("" if graphs else f" with {seeds} in it, and make the partition again"),
        )
    elif train is not None and train < job.workers:
        yield Finding(
            "nodes_to_train_on",
            "warn",
            f"{job.workers} workers share {train} training {seeds}: some have nothing to do",
            "lower cluster.workers",
        )
    if splits.get("val") == 0:
        untold = "; the best weights cannot be told from the last" if select == "best" else ""
        yield Finding(
            "nodes_to_train_on",
            "warn",
            f"the {whole} has no validation {seeds}{untold}",
            mask.format("val") + ", or set train.select to last",
        )
    folds = isinstance(graph := job.config.graph, ManyGraphs) and graph.fold is not None
    if splits.get("test") == 0 and not folds:  # the fold is what is reported on
        told = f"the {whole} has no test {seeds} to report on"
        yield Finding("nodes_to_train_on", "warn", told)


def fold_is_unseen(job: Job) -> Iterator[Finding]:
    """The fold that is reported on has not selected the weights that are reported."""
    graph, train = job.config.graph, job.config.train
    if not job.config.trains or not isinstance(graph, ManyGraphs):
        return
    if graph.folds is not None and graph.fold_for == "val" and train.select == "best":
        yield Finding(
            "fold_is_unseen",
            "warn",
            "the fold is validated on (graph.fold_for: val) and selects the best epoch "
            "(train.select: best): the best epoch's metric is higher than that of unseen graphs",
            "set train.select to last, or graph.fold_for to test; the summary has the last "
            "epoch's metric, too",
        )


def splits_agree(job: Job) -> Iterator[Finding]:
    """Several tasks on the same edges divide them alike between training, validation and test."""
    if not job.config.trains:
        return
    targets = {name: one.edges for name, one in job.by_task.items()}
    splits = {name: t.split for name, t in targets.items() if isinstance(t, EdgeTarget)}
    for (name, one), (other, two) in combinations(splits.items(), 2):
        if _alike(one, two):
            continue
        what = f"tasks {name} and {other} divide the edges of {etype_str(one.etype)} differently"
        remedy = f"set tasks.{name}.split and tasks.{other}.split to the same"
        if one.etype != two.etype:
            what += f", whose reverses are those of {etype_str(two.etype)}"
            remedy = "let both predict the same type, or give the edges of both types masks"
        told = ": one would be trained on what the other is tested with"
        yield Finding("splits_agree", "error", what + told, remedy)


def _alike(one: EdgeSplit, two: EdgeSplit) -> bool:
    """Whether no edge is for training in one and held out in the other, as far as can be told."""
    if one.etype != two.etype and one.etype != two.reverse and one.reverse != two.etype:
        return True  # of different edges
    if (one.shares, one.seed) != (two.shares, two.seed):
        return False
    # shares are told by an edge's ends in their order, unless both are of one type
    return one.shares is None or one.etype == two.etype or one.etype[0] == one.etype[2]


def parts_and_workers(job: Job) -> Iterator[Finding]:
    """Parts divide evenly between the workers."""
    parts = job.partition.num_parts
    if job.config.task.of_graphs:
        return  # every rank has all graphs in reach
    workers = job.most
    if parts % workers and workers % parts:
        yield Finding(
            "parts_and_workers",
            "info",
            f"{parts} parts do not divide evenly between {workers} workers: more edges are cut",
            "set partition.parts to a multiple of cluster.workers, or to auto",
            values={"parts": parts, "workers": workers},
        )


def _no_type(job: Job) -> Finding:
    task, columns = job.config.task, job.partition.columns
    if task.ntype is not None:
        what = f"there is no node type {task.ntype!r} (task.ntype); there are: {', '.join(columns)}"
        return Finding("arrays_usable", "error", what, "set task.ntype to one of them")
    having = [ntype for ntype, arrays in columns.items() if task.target in arrays]
    if having:
        what = f"several node types have an array {task.target!r}: {', '.join(having)}"
        return Finding("arrays_usable", "error", what, "say which with task.ntype")
    what = f"no node type has an array {task.target!r} (task.target)"
    listed = ", ".join(sorted({name for arrays in columns.values() for name in arrays}))
    return Finding("arrays_usable", "error", what, f"set task.target to one of: {listed or 'none'}")
