"""Checks of the partition: it is complete on every node, and can be trained on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from raygnn.config.graph import GraphSplit
from raygnn.config.task import NodeTaskConfig
from raygnn.graph.data import MASKS, EdgeSplit, EdgeTarget, etype_str
from raygnn.preflight.facts import ArrayType
from raygnn.preflight.findings import Check, Finding, JobFacts, error, info, warn


def partition_visible(job: JobFacts) -> Iterator[Finding]:
    """Every node sees the same complete partition."""
    if not job.partition.directory:
        return  # not built yet
    remedy = "set partition.path to a directory that all nodes share, or copy all of it there"
    if len(job.nodes) == 1:
        remedy = f"restore the file, or delete {job.partition.directory} to build it again"
    for node in job.nodes:
        expected, seen = job.partition.files, node.partition_files
        missing = sorted(expected.keys() - seen.keys())
        wrong = sorted(
            name for name in expected if seen.get(name, expected[name]) != expected[name]
        )
        if missing:
            what = f"{len(missing)} of the partition's files are missing, such as {missing[0]}"
        elif wrong:
            name = wrong[0]
            what = f"{name} has {seen[name]} bytes, expected {expected[name]}"
        elif node.partition_fingerprint != job.partition.fingerprint:
            what = "the node sees another partition at this path"
        else:
            continue
        yield error(f"{job.partition.directory}: {what}", remedy, [node.node])


def parts_agree(job: JobFacts) -> Iterator[Finding]:
    """Every array has the same dtype and row shape in all parts."""
    if job.partition.alike:
        return
    for ntype, arrays in job.partition.columns.items():
        for name, columns in arrays.items():
            kinds = sorted(set(columns))
            if len(kinds) < 2 and len(columns) in (0, job.partition.num_parts):
                continue
            listed = ", ".join(f"{kind} in part {columns.index(kind)}" for kind in kinds)
            absent = len(columns) < job.partition.num_parts
            yield error(
                f"array {name!r} of node type {ntype!r} differs between the parts: "
                + ("some lack it" if absent else listed),
                "build the partition again from one array",
            )


def arrays_usable(job: JobFacts) -> Iterator[Finding]:
    """Features and targets exist and have a dtype that can be trained on."""
    if wrong := list(_for_each_task(job, _seeds)):
        yield from wrong
        return
    for ntype, arrays in job.partition.columns.items():
        yield from _inputs(job, ntype, arrays)
    keys = _edge_inputs(job)
    for name, column in {pair for named in job.partition.edges.values() for pair in named.items()}:
        if name in keys:
            yield from _readable(name, keys[name], column)
    yield from _for_each_task(job, _targets)


def _for_each_task(job: JobFacts, check: Check) -> Iterator[Finding]:
    """Yield the findings of a check of a single task, which name the task if there are several."""
    for name, task_job in job.by_task.items():
        for found in check(task_job):
            what, remedy = found.what, found.remedy
            if name:
                what, remedy = (t.replace("task.", f"tasks.{name}.") for t in (what, remedy))
                what = f"task {name}: {what}"
            yield replace(found, what=what, remedy=remedy)


def _seeds(job: JobFacts) -> Iterator[Finding]:
    task, columns = job.config.task, job.partition.columns
    if isinstance(job.edges, tuple):
        yield error(*job.edges)
    if job.ntype is not None or not isinstance(task, NodeTaskConfig):
        return
    holders = [ntype for ntype, arrays in columns.items() if task.target in arrays]
    if task.ntype is not None:
        yield error(
            f"there is no node type {task.ntype!r} (task.ntype); there are: {', '.join(columns)}",
            "set task.ntype to one of them",
        )
    elif holders:
        yield error(
            f"several node types have an array {task.target!r}: {', '.join(holders)}",
            "set task.ntype to one of them",
        )
    else:
        names = sorted({name for arrays in columns.values() for name in arrays})
        remedy = f"set task.target to one of: {', '.join(names) or 'none'}"
        if any("train_mask" in arrays for arrays in job.partition.edges.values()):
            remedy = "set task.kind to link_prediction, edge_classification or edge_regression"
        yield error(f"no node type has an array {task.target!r} (task.target)", remedy)


def _targets(job: JobFacts) -> Iterator[Finding]:
    """Check that the target exists, with class numbers or numbers, and so do edges' relations."""
    task, columns = job.config.task, job.columns
    if task.of_graphs or job.config.table is not None:
        return  # the reader has checked the targets of graphs, and of rows
    if isinstance(job.edges, EdgeTarget):
        arrays, relation = job.partition.edges[job.edges.etype], job.edges.relation
        if not task.of_links and task.target in arrays:
            yield from _target(job, arrays[task.target])
        for name in job.config.model.decoder_feature_names:
            yield from _readable(name, "model.decoder_features", arrays[name])
        if relation is not None and not _is_whole_number(arrays[relation]):
            yield error(
                f"array {relation!r} (model.relation) is {arrays[relation]}, expected one whole "
                "number per edge",
                "set model.relation to an array of relation numbers",
            )
    elif task.target in columns:
        yield from _target(job, columns[task.target][0])
    elif job.config.trains:
        remedy = "set task.target to one of them, or task.ntype to the type that has it"
        kind = f"node type {job.ntype!r} has no"
        yield _no_array(kind, f"{task.target!r} (task.target)", columns, remedy)


def _target(job: JobFacts, column: ArrayType) -> Iterator[Finding]:
    task = job.config.task
    if task.classifies:
        fits, expected = _is_whole_number(column), "one whole number"
        remedy = "set task.target to an array of class numbers, or task.labels to multi"
    else:
        fits, expected = _are_numbers(column), "numbers"
        remedy = "set task.target to an array of numbers"
    if not fits or 0 in column.shape:
        yield error(
            f"array {task.target!r} (task.target) is {column}, expected {expected} per {task.unit}",
            remedy,
        )
    elif not task.classifies and not task.several_labels and _are_numbers(column, whole=True):
        yield warn(
            f"array {task.target!r} (task.target) is {column}, and {task.kind} predicts numbers: "
            "class numbers have no order",
            f"set task.kind to {task.unit}_classification if they are classes; store numbers such "
            "as counts as float32 to avoid this warning",
        )


def _are_numbers(column: ArrayType, whole: bool = False) -> bool:
    return re.match(r"u?int" if whole else r"(float|bfloat|u?int)", column.dtype) is not None


def _is_whole_number(column: ArrayType) -> bool:
    return _are_numbers(column, whole=True) and not column.shape


def _inputs(
    job: JobFacts, ntype: str, arrays: Mapping[str, tuple[ArrayType, ...]]
) -> Iterator[Finding]:
    """Check that a node type has an embedding table or an input array, and that inputs are
    numbers."""
    model = job.config.model
    names = model.node_arrays
    has_inputs = any(name in arrays for name in names)
    learns = model.embedding is not None and model.embedding.covers(ntype, has_inputs)
    if not has_inputs and not learns:
        named = [f"{name!r} ({key})" for name, key in names.items()] or ["as input"]
        remedy = (
            "give every node type an array that one of these keys names, or an embedding table "
            "(model.embedding)"
        )
        yield _no_array(f"node type {ntype!r} has no", " or ".join(named), arrays, remedy)
    for name, key in names.items():
        if arrays.get(name):
            yield from _readable(name, key, arrays[name][0])


def _readable(name: str, key: str, column: ArrayType) -> Iterator[Finding]:
    """Check that an input array has numbers, or one category per row; ``key``: the key that names
    it."""
    is_category = not key.endswith("features")
    kind = "whole numbers" if is_category else "numbers"
    if not _are_numbers(column, whole=is_category):
        yield error(
            f"array {name!r} ({key}) is {column.dtype}, not {kind}",
            f"set {key} to an array of {kind}",
        )
    elif 0 in column.shape:
        yield error(
            f"array {name!r} ({key}) has rows without values", f"set {key} to another array"
        )
    elif is_category and math.prod(column.shape) != 1:
        yield error(
            f"array {name!r} ({key}) has rows of {list(column.shape)}, expected one number",
            "split it into arrays of one number each, or move it to "
            f"{key.replace('categories', 'features')}",
        )


def _edge_inputs(job: JobFacts) -> dict[str, str]:
    """Return the edge arrays that the model reads → the key that names them."""
    model = job.config.model
    of_features = dict.fromkeys(model.edge_feature_names, "model.edge_features")
    return of_features | dict.fromkeys(model.edge_category_widths, "model.edge_categories")


def inputs_exist(job: JobFacts) -> Iterator[Finding]:
    """Every array that the model is configured to read exists for some node type or edge type."""
    model, edges = job.config.model, job.partition.edges
    of_edges = {name for columns in edges.values() for name in columns}
    named: list[tuple[str | None, str]] = [*_edge_inputs(job).items()]
    named.append((job.config.sampling.edge_weight, "sampling.edge_weight"))
    named.append((model.relation, "model.relation"))
    of_nodes = {name for columns in job.partition.columns.values() for name in columns}
    # without any input there is a finding for each node type, or the arrays are not known
    inputs = () if of_nodes.isdisjoint(model.node_arrays) else model.node_arrays.items()
    for kind, arrays, wanted in (
        ("edge", of_edges, named if edges else ()),
        ("node", of_nodes, inputs),
    ):
        for name, key in wanted:
            if name is not None and name not in arrays:
                remedy = f"set {key} to existing arrays"
                yield _no_array(f"no {kind} type has an", f"{name!r} ({key})", arrays, remedy)


def embeddings_usable(job: JobFacts) -> Iterator[Finding]:
    """The node types with embedding tables exist."""
    model, columns = job.config.model, job.partition.columns
    if model.embedding is None or not columns:
        return
    inputs, listed = {*model.node_arrays}, ", ".join(columns)
    unknown = [name for name in model.embedding.ntypes or () if name not in columns]
    if unknown:
        yield error(
            f"there is no node type {unknown[0]!r} (model.embedding.ntypes); there are: {listed}",
            "name one of them, or remove the key",
        )
    elif not any(
        model.embedding.covers(ntype, not inputs.isdisjoint(arrays))
        for ntype, arrays in columns.items()
    ):
        yield error(
            "every node type has features, so model.embedding has no effect",
            f"name node types in model.embedding.ntypes ({listed}), or remove model.embedding",
        )


def nodes_to_train_on(job: JobFacts) -> Iterator[Finding]:
    """Training, validation and test have seeds."""
    if job.config.trains:
        yield from _for_each_task(job, _enough)


def _enough(job: JobFacts) -> Iterator[Finding]:
    splits, graph, seeds = job.partition.splits, job.config.graph, job.config.task.seeds
    of_graphs, train = job.config.task.of_graphs, splits.get("train")
    whole = "collection" if of_graphs else "partition"
    mark = (
        "leave {} graphs: see graph.val and graph.test" if of_graphs else "give the graph a {}_mask"
    )
    again = "" if of_graphs else f" with {seeds} in it, and build the partition again"
    if train == 0:
        yield error(f"the {whole} has no training {seeds}", mark.format("train") + again)
    elif train is not None and train < job.workers:
        yield warn(
            f"{job.workers} workers share {train} training {seeds}, so some have none",
            "lower cluster.workers",
        )
    if splits.get("val") == 0:
        best = job.config.train.select == "best"
        effect = "; the best weights cannot be selected" if best else ""
        yield warn(
            f"the {whole} has no validation {seeds}{effect}",
            mark.format("val") + ", or set train.select to last",
        )
    folds = isinstance(graph, GraphSplit) and graph.folds is not None
    if splits.get("test") == 0 and not folds:  # metrics are reported of the fold
        yield warn(f"the {whole} has no test {seeds} to report on")


def splits_agree(job: JobFacts) -> Iterator[Finding]:
    """Tasks on the same edges split them alike into training, validation and test."""
    if not job.config.trains:
        return
    targets = {name: task_job.edges for name, task_job in job.by_task.items()}
    splits = {name: t.split for name, t in targets.items() if isinstance(t, EdgeTarget)}
    for (name, one), (other, two) in combinations(splits.items(), 2):
        if _alike(one, two):
            continue
        what = f"tasks {name} and {other} split the edges of {etype_str(one.etype)} differently"
        remedy = f"set tasks.{name}.split and tasks.{other}.split to the same values"
        if one.etype != two.etype:
            what += f", whose reverse edges are of type {etype_str(two.etype)}"
            remedy = "set both to predict the same type, or give the edges of both types masks"
        yield error(f"{what}: one would train on edges that the other is tested on", remedy)


def _alike(one: EdgeSplit, two: EdgeSplit) -> bool:
    """True if no edge is known to be for training in one split and held out in the other."""
    if one.etype != two.etype and one.etype != two.reverse and one.reverse != two.etype:
        return True  # the edges are different
    if (one.shares, one.seed, one.time) != (two.shares, two.seed, two.time):
        return False
    # splits by shares depend on the order of an edge's ends, unless both are of one type
    keyed = one.shares is not None and one.time is None
    return not keyed or one.etype == two.etype or one.etype[0] == one.etype[2]


def times_usable(job: JobFacts) -> Iterator[Finding]:
    """The time arrays of `sampling.time` and of splits by time exist and are comparable, so that no
    future edge is sampled."""
    time, edges = job.config.sampling.time, job.partition.edges
    if time is not None:
        timed = {etype for etype, arrays in edges.items() if time.edges in arrays}
        if not timed:
            names = {name for arrays in edges.values() for name in arrays}
            wanted = f"{time.edges!r} (sampling.time.edges)"
            yield _no_array("no edge type has an", wanted, names, _time("sampling.time.edges"))
        for etype in timed:
            yield from _when(etype_str(etype), time.edges, "sampling.time.edges", edges[etype])
        pairs = dict(job.partition.reverses)
        for split in (
            j.edges.split for j in job.by_task.values() if isinstance(j.edges, EdgeTarget)
        ):
            if split.reverse is not None and split.etype not in pairs.values():
                pairs[split.etype] = split.reverse
        for one, other in pairs.items():
            if (one in timed) != (other in timed):
                late, has = map(etype_str, (other, one) if one in timed else (one, other))
                yield error(
                    f"edges of type {late!r} are the reverse edges of {has!r}, and have no array "
                    f"{time.edges!r} (sampling.time.edges): they would be sampled before their "
                    "time",
                    f"give them the times of {has!r}, as graph.reverse does, and for tables "
                    "reverse in their description",
                )
    yield from _for_each_task(job, _seed_times)


def _seed_times(job: JobFacts) -> Iterator[Finding]:
    """Check that the seeds of one task have the arrays of their times."""
    config, time = job.config, job.config.sampling.time
    arrays: Mapping[str, ArrayType] = {n: c[0] for n, c in job.columns.items() if c}
    kind, keys = f"node type {job.ntype!r}", {config.seed_time: "sampling.time.seeds"}
    if isinstance(job.edges, EdgeTarget):
        arrays, kind = job.partition.edges[job.edges.etype], etype_str(job.edges.etype)
        if time is not None:  # else an edge could be seen while it is predicted
            keys = {config.seed_time: "sampling.time.seeds", time.edges: "sampling.time.edges"}
    elif job.ntype is None or config.table is not None:
        return  # another check reports it, or rows have their own times
    if config.split_time is not None:
        keys.setdefault(config.split_time, "task.split.time")
    for name, key in keys.items():
        if name is not None and name not in arrays:
            at_once = not config.trains and key == "sampling.time.seeds"
            remedy = "predict all for one time with --at, or give them the array"
            remedy = remedy if at_once else _time(key)
            yield _no_array(f"{kind} has no", f"{name!r} ({key})", arrays, remedy)
        elif name is not None:
            yield from _when(kind, name, key, arrays)


def _time(key: str) -> str:
    return f"set {key} to an array of whole numbers, such as `time` for tables"


def _no_array(who: str, wanted: str, names: Iterable[str], remedy: str) -> Finding:
    return error(f"{who} array {wanted}; there are: {', '.join(sorted(names)) or 'none'}", remedy)


def _when(kind: str, name: str, key: str, arrays: Mapping[str, ArrayType]) -> Iterator[Finding]:
    if not _is_whole_number(arrays[name]):
        what = f"array {name!r} of {kind} ({key}) is {arrays[name]}, expected one whole number each"
        yield error(what, f"set {key} to an array of whole numbers")


def edge_arrays_read(job: JobFacts) -> Iterator[Finding]:
    """Every edge array is used by the model, the sampler or the task."""
    model = job.config.model
    if (job.config.task.of_graphs and model.takes_dgl) or not job.config.trains:
        return  # a user-defined class gets all arrays; and training has reported it
    time = job.config.sampling.time
    read = {*MASKS, "label", job.config.sampling.edge_weight, time and time.edges}
    read |= _edge_inputs(job).keys()
    if model.kind == "rgcn":
        read.add(model.relation or "relation")
    for task_job in job.by_task.values():
        if isinstance(task_job.edges, EdgeTarget):
            edges = task_job.edges
            read |= {task_job.config.task.target, edges.relation, edges.split.time}
            read |= {*task_job.config.model.decoder_feature_names, time and time.seeds}
    types: dict[tuple[str, ...], list[str]] = {}
    for etype, arrays in job.partition.edges.items():
        if unread := tuple(sorted(arrays.keys() - read)):
            types.setdefault(unread, []).append(etype_str(etype))
    for names, kinds in types.items():
        yield info(
            f"edges of {', '.join(kinds)} have {', '.join(names)}, which nothing reads: they are "
            "stored and have no effect",
            "name features in model.edge_features, weights in sampling.edge_weight and times in "
            "sampling.time or task.split, or remove them from the graph",
        )
