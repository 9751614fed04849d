"""Checks of the partition: that it is whole everywhere, and can be trained on."""

from __future__ import annotations

import re
from collections.abc import Iterator

from raygnn.preflight.findings import Finding
from raygnn.preflight.job import Job


def partition_visible(job: Job) -> Iterator[Finding]:
    if not job.partition.directory:
        return  # not made yet
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
        else:
            continue
        yield Finding(
            "partition_visible",
            "error",
            f"{job.partition.directory}: {what}",
            "put the partition where every node sees it (partition.path), or copy it there whole",
            nodes=(node.node,),
            values={"missing": missing, "wrong": wrong},
        )


def parts_agree(job: Job) -> Iterator[Finding]:
    """The same array must have one dtype and one row shape in every part."""
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
    """The features and the target are there, and of a kind that can be trained on."""
    task, model = job.config.task, job.config.model
    if job.ntype is None:
        yield _no_type(job)
        return
    columns, there = job.columns, ", ".join(sorted(job.columns)) or "none"
    for ntype, arrays in job.partition.columns.items():
        if model.features not in arrays:
            known = ", ".join(sorted(arrays)) or "none"
            yield Finding(
                "arrays_usable",
                "error",
                f"node type {ntype!r} has no array {model.features!r} (model.features); "
                f"there are: {known}",
                "give every node type an array of the name that model.features says",
            )
    features = columns.get(model.features)
    if features and not re.match(r"(float|bfloat|int|uint|bool)", features[0].dtype):
        yield Finding(
            "arrays_usable",
            "error",
            f"array {model.features!r} (model.features) is {features[0].dtype}, not numbers",
            "set model.features to an array of numbers",
        )
    elif features and 0 in features[0].shape:
        yield Finding(
            "arrays_usable",
            "error",
            f"array {model.features!r} (model.features) has rows without values",
            "set model.features to another array",
        )
    if task.target not in columns:
        yield Finding(
            "arrays_usable",
            "error",
            f"node type {job.ntype!r} has no array {task.target!r} (task.target); "
            f"there are: {there}",
            "set task.target to one of them, or task.ntype to the type that has it",
        )
    elif not re.match(r"u?int", columns[task.target][0].dtype) or columns[task.target][0].shape:
        yield Finding(
            "arrays_usable",
            "error",
            f"array {task.target!r} (task.target) is {columns[task.target][0]}, expected one "
            "whole number per node",
            "set task.target to an array of class numbers",
        )


def nodes_to_train_on(job: Job) -> Iterator[Finding]:
    splits, select = job.partition.splits, job.config.train.select
    train = splits.get("train")
    if train == 0:
        yield Finding(
            "nodes_to_train_on",
            "error",
            "the partition has no training nodes",
            "give the graph a train_mask with nodes in it, and make the partition again",
        )
    elif train is not None and train < job.workers:
        yield Finding(
            "nodes_to_train_on",
            "warn",
            f"{job.workers} workers share {train} training nodes: some have nothing to do",
            "lower cluster.workers",
        )
    if splits.get("val") == 0:
        untold = "; the best weights cannot be told from the last" if select == "best" else ""
        yield Finding(
            "nodes_to_train_on",
            "warn",
            f"the partition has no validation nodes{untold}",
            "give the graph a val_mask, or set train.select to last",
        )
    if splits.get("test") == 0:
        yield Finding("nodes_to_train_on", "warn", "the partition has no test nodes to report on")


def parts_and_workers(job: Job) -> Iterator[Finding]:
    parts = job.partition.num_parts
    if parts % job.workers and job.workers % parts:
        yield Finding(
            "parts_and_workers",
            "info",
            f"{parts} parts do not divide evenly between {job.workers} workers: more edges are cut",
            "set partition.parts to a multiple of cluster.workers, or to auto",
            values={"parts": parts, "workers": job.workers},
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
