"""Contradictions between sections, or of keys with the machine; what a resume may change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from raygnn.config.execution import MOST_DRAWN
from raygnn.config.graph import DatasetGraph, GraphSplit, ManyGraphs, PlantedGraph, TablesGraph
from raygnn.config.model import FamilyConfig, LightGcnConfig, NoLayersConfig
from raygnn.config.problems import Problem, dotted, show
from raygnn.config.schema import Config
from raygnn.config.task import (
    COMPLEX,
    DISTANCES,
    RELATIONAL,
    EdgeTaskConfig,
    LinkPrediction,
    NodeClassification,
    NodeTaskConfig,
    TrainingTable,
)
from raygnn.config.values import problems_of
from raygnn.config.yaml_text import KeyPath


def contradictions(config: Config) -> list[Problem]:
    """Return all contradictions between keys, and keys that nothing would use."""
    return [
        *problems_of(config),
        *_sampling(config),
        *_graph(config),
        *(_task(config) if config.tasks is None else _tasks(config)),
        *_network(config),
        *_time(config),
        *_resources(config),
    ]


def _sampling(config: Config) -> Iterator[Problem]:
    sampling, model, at = config.sampling, config.model, ("sampling",)
    sampled = "fanout", "replace", "edge_weight", "time"
    if config.task.of_graphs:
        why = f"task.kind {config.task.kind} reads whole graphs"
        yield from sampling.unused(at, *sampled, "topology", "cache", why=why)
    elif not model.depth:
        why = "model.kind none has no layers and samples no neighbours"
        yield from sampling.unused(at, *sampled, why=why, instead="choose another model.kind")
    elif len(sampling.fanout) != model.depth:
        yield Problem(
            (*at, "fanout"),
            f"{len(sampling.fanout)} fanouts {show(sampling.fanout)} for {model.depth} "
            "model.layers",
            f"give one number per layer, such as {show([10] * min(model.depth, 5))}, "
            "or change model.layers",
        )
    elif model.draws_once and any(hop != sampling.fanout[0] for hop in sampling.fanout):
        yield Problem(
            (*at, "fanout"),
            f"fanouts {show(sampling.fanout)} differ, but with model.interface pyg the neighbours "
            "of a node are sampled once, for all layers",
            "give every layer the same fanout, or set model.interface to pyg_layers",
        )


def _graph(config: Config) -> Iterator[Problem]:
    graph, partition = config.graph, config.partition
    if graph is None:
        if partition.path is None:
            message = "neither graph nor partition.path is set, so the job has no input"
            remedy = "add a graph section, or name an existing partition with partition.path"
            yield Problem(("graph",), message, remedy)
    elif isinstance(graph, PlantedGraph):
        if partition.parts != "auto" and partition.parts > graph.nodes:
            message = f"{partition.parts} parts of {graph.nodes} nodes would leave some empty"
            yield Problem(("partition", "parts"), message, "lower partition.parts")
    elif (path := getattr(graph, "path", None)) is not None and path == partition.path:
        message = f"partition.path is graph.path, {partition.path}, which is input"
        remedy = "give the partition its own directory, or remove partition.path"
        yield Problem(("partition", "path"), message, remedy)


def _task(config: Config) -> Iterator[Problem]:
    task, graph = config.task, config.graph
    if task.own_class is None:
        yield from task.unused(("task",), "args", why=f"task.kind is {task.kind}")
    if task.of_graphs and graph is not None and not isinstance(graph, GraphSplit):
        message = f"{task.kind} needs many graphs, but graph.format {graph.format} is one graph"
        remedy = "set graph.format to dataset or graphs, or task.kind to node_classification"
        yield Problem(("task", "kind"), message, remedy)
    if isinstance(graph, DatasetGraph):
        others = ("index", "split", "reverse") if task.of_graphs else GraphSplit.model_fields
        yield from graph.unused(("graph",), *others, why=f"task.kind is {task.kind}")
    if not task.of_graphs and isinstance(graph, ManyGraphs):
        message = f"{task.kind} needs one graph, but graph.format graphs is many"
        remedy = "set task.kind to graph_classification or graph_regression"
        yield Problem(("task", "kind"), message, remedy)
    yield from _decoder(config, ("task",), ("model", "decoder"))


def _tasks(config: Config) -> Iterator[Problem]:
    assert config.tasks is not None
    if config.task != NodeClassification():
        remedy = "move it into tasks, under its own name, or remove tasks"
        yield Problem(("task",), "task would be ignored: there are tasks", remedy)
    if isinstance(config.graph, ManyGraphs):
        message = "tasks need one graph, but graph.format graphs is many"
        yield Problem(("tasks",), message, "give one task (task), or one graph")
    if isinstance(config.model, NoLayersConfig | LightGcnConfig):
        remedy = "choose another model.kind, or give one task (task)"
        message = f"{config.model.kind} has no weights that tasks could share"
        yield Problem(("model", "kind"), message, remedy)
    for name, task in config.tasks.items():
        at = "tasks", name
        if task.own_class is not None:
            message = f"{task.own_class} defines the training step, which all tasks share"
            yield Problem((*at, "kind"), message, "give one task (task)")
        own = getattr(task, "decoder", None)
        yield from _decoder(config.of(name), at, (*at, "decoder") if own else ("model", "decoder"))


def _decoder(config: Config, task_at: KeyPath, at: KeyPath) -> Iterator[Problem]:
    """Yield contradictions between an edge task, at ``task_at``, and its decoder, at ``at``."""
    task, model, decoder = config.task, config.model, config.model.decoder
    name, task_name = dotted(at), dotted(task_at)
    if isinstance(task, LinkPrediction) and not (
        task.loss == "margin" or (decoder in DISTANCES and task.loss in ("bce", "self_adversarial"))
    ):
        why = (
            f"{task_name}.loss is {task.chosen_loss} and {name} {show(decoder)}; only the loss "
            "margin, and bce and self_adversarial with the decoders rotate and transe, read it"
        )
        yield from task.unused(task_at, "margin", why=why)
    if model.pair_history and task.of_links and decoder != "mlp":
        message = f"only the decoder mlp reads pair_history, but {name} is {show(decoder)}"
        yield Problem(("model", "pair_history"), message, f"set {name} to mlp")
    if decoder is None or not task.of_edges:
        return
    if not task.of_links and decoder != "mlp":
        message = f"{decoder} returns one score, but {task.kind} needs classes or numbers"
        yield Problem(at, message, f"set {name} to mlp, or remove it")
    elif model.relation is not None and decoder not in RELATIONAL and model.kind != "rgcn":
        message = f"{decoder} does not read relations, but model.relation is {model.relation}"
        remedy = f"set {name} to one of {', '.join(RELATIONAL)}, or remove model.relation"
        yield Problem(at, message, remedy)
    elif decoder in COMPLEX:
        rows = model.embedding if isinstance(model, NoLayersConfig) else None
        if (model.hidden if rows is None else rows.dim) % 2:
            message = f"{decoder} reads node vectors of complex numbers, but their width is odd"
            remedy = "make model.hidden, or without layers model.embedding.dim, even"
            yield Problem(at, message, remedy)


def _network(config: Config) -> Iterator[Problem]:
    """Yield models that do not suit the tasks, and keys of ``model`` that nothing uses."""
    model, task, time = config.model, config.task, config.sampling.time
    tasks = [c.task for c in config.by_task.values()]
    of_nodes = all(t.unit == "node" for t in tasks)
    other = "choose another task.kind"
    for ignored, key, why, instead in (
        (
            not any(t.of_edges for t in tasks),
            "decoder",
            "no task is on edges",
            "set a kind to edge_classification, edge_regression or link_prediction",
        ),
        (
            not any(t.of_edges and not t.of_links for t in tasks),
            "decoder_features",
            "no task is edge_classification or edge_regression",
            "",
        ),
        (not any(t.of_links for t in tasks), "pair_history", "no task is link_prediction", ""),
        (not task.of_graphs, "readout", f"{task.kind} is not a graph-level task", other),
        (task.of_graphs, "out_heads", "graph-level tasks have no output layer", other),
        (
            task.of_graphs,
            "relation",
            "in graph-level tasks the relation of an edge is its type",
            "give each an edge type",
        ),
        (
            of_nodes and model.kind != "rgcn",
            "relation",
            f"in tasks on nodes only rgcn reads it, and model.kind is {model.kind}",
            "choose another model.kind",
        ),
        (
            task.of_graphs,
            "embedding",
            "in graph-level tasks each graph has its own nodes",
            "embed categories of nodes (model.categories)",
        ),
        (time is None, "time_encoding", "edges have no times", "set sampling.time"),
        (time is None, "ages", "seeds have no times", "set sampling.time"),
    ):
        if ignored and key in type(model).model_fields:
            yield from model.unused(("model",), key, why=why, instead=instead)
    if isinstance(model, NoLayersConfig) and task.of_graphs:
        message = f"model.kind none has no readout of a graph, but task.kind is {task.kind}"
        yield Problem(("model", "kind"), message, "choose another model.kind, or another task.kind")
    elif isinstance(model, LightGcnConfig) and of_nodes:
        message = f"lightgcn needs a decoder, but task.kind is {task.kind}"
        yield Problem(("model", "kind"), message, "choose another model.kind, or a task on edges")
    if task.of_graphs and getattr(model, "interface", "") == "pyg_layers":
        message = f"{task.kind} reads whole graphs, which have one edge_index for all layers"
        yield Problem(("model", "interface"), message, "set model.interface to pyg")
    if model.embedding is not None and config.train.ema is not None:
        message = (
            "an average of all weights would change every embedding row in every step, but a step "
            "of model.embedding changes only the rows that its batch reads"
        )
        yield Problem(("train", "ema"), message, "remove train.ema, or model.embedding")


def _time(config: Config) -> Iterator[Problem]:
    """Yield contradictions with temporal sampling and temporal splits."""
    time, model = config.sampling.time, config.model
    if time is not None:
        if not any(c.table for c in config.by_task.values()):
            why = "there is no training table (task.table)"
            yield from time.unused(("sampling", "time"), "strict", why=why)
        if model.kind in ("gcn", "lightgcn"):
            message = f"{model.kind} normalises by degrees in the whole graph, with later edges"
            yield Problem(("model", "kind"), message, "choose another model.kind, such as sage")
        if isinstance(model, FamilyConfig) and model.norm == "batch":
            message = "batch normalises by nodes at other times"
            yield Problem(("model", "norm"), message, "set model.norm to layer")
    splits: dict[str, str] = {}
    for name, one in config.by_task.items():
        yield from _task_time(one, ("tasks", name) if name else ("task",))
        if isinstance(one.task, NodeTaskConfig) and one.table is None:
            splits.setdefault(str(one.task.split), name)
    if len(splits) > 1:
        names = " and ".join(splits.values())
        message = f"tasks {names} split nodes differently: one would train on the other's test set"
        yield Problem(("tasks", list(splits.values())[1], "split"), message, "give them one split")


def _task_time(config: Config, at: KeyPath) -> Iterator[Problem]:
    task, time = config.task, config.sampling.time
    split = task.split if isinstance(task, (NodeTaskConfig, EdgeTaskConfig)) else None
    if isinstance(task, NodeTaskConfig) and task.table is not None:
        yield from _table(config, task, task.table, at)
    elif isinstance(task, NodeTaskConfig):
        if time is not None and time.seeds is None:
            message = "the times at which nodes are predicted are not set"
            yield Problem(("sampling", "time"), message, "set sampling.time.seeds to their array")
        if split is not None and split.by == "random":
            message = "random splits of nodes come from the graph: see graph.format and its masks"
            yield Problem((*at, "split"), message, "set by to time, or remove split")
    timeless = config.split_time is None and config.table is None
    if split is not None and split.by == "time" and timeless:
        message = "a split by time needs an array of times"
        yield Problem((*at, "split", "time"), message, "name the array, or set sampling.time")
    if not isinstance(task, LinkPrediction):
        return
    held_out = split is None or (split.by == "random" and (split.val, split.test) != (0.0, 0.0))
    if config.model.pair_history and (held_out or not config.ordered):
        message = "a pair history would count held-out edges before their time"
        remedy = f"set sampling.time without seeds, and {dotted((*at, 'split', 'by'))} to time"
        yield Problem(("model", "pair_history"), message, remedy)
    if time is None:
        timed = {
            ("metric",): task.metric == "average_precision",
            ("negatives", "each"): task.negatives.each > 1,
            ("ranking", "candidates"): task.ranking.candidates == "destinations",
        }
        for key in (key for key, is_set in timed.items() if is_set):
            message = "this needs temporal sampling: nodes are sampled per edge, at its time"
            yield Problem((*at, *key), message, "remove it, or set sampling.time")
        return
    if task.negatives.kind in ("in_batch", "degree"):
        message = f"{task.negatives.kind} samples nodes by edges of all times"
        yield Problem((*at, "negatives", "kind"), message, "set it to uniform or local")
    if task.negatives.filtered:
        why = "a training edge may be a negative at other times"
        yield from task.negatives.unused((*at, "negatives"), "filtered", why=why)
    if task.tops and task.ranking.candidates != "destinations":
        message = "metrics per source and time rank all targets, each as seen at that time"
        remedy = f"remove it, or set {dotted((*at, 'ranking', 'candidates'))} to destinations"
        yield Problem((*at, "ranking"), message, remedy)


def _table(
    config: Config, task: NodeTaskConfig, table: TrainingTable, at: KeyPath
) -> Iterator[Problem]:
    here = (*at, "table")
    if task.ntype is None:
        message = "the node type of the table's entities is not set"
        yield Problem((*at, "ntype"), message, "name it")
    if task.classifies and not isinstance(table.target, str):
        message = f"a class label needs one column, but {show(table.target)} are several"
        yield Problem((*here, "target"), message, f"set {dotted((*at, 'labels'))} to multi")
    if table.sql is not None and not isinstance(config.graph, TablesGraph):
        message = "sql reads the tables of a description, but graph.format is not tables"
        yield Problem((*here, "sql"), message, "write the rows to files, and name them")
    if config.sampling.time is not None and table.time is None:
        message = "rows have no time, but edges do (sampling.time)"
        yield Problem((*here, "time"), message, "name the column with the time of a row")
    why, instead = "the training table has its own", f"remove {dotted(here)}"
    yield from task.unused(at, "target", why=why, instead=instead)
    ways = [table.split, task.split, table.files if isinstance(table.files, dict) else None]
    if sum(way is not None for way in ways) != 1 and config.trains:
        message = "rows for training, validation and test must be given in exactly one way"
        remedy = f"give files of each split, or {dotted(here)}.split, or {dotted(at)}.split by time"
        yield Problem(here, message, remedy)
    if task.split is not None and (task.split.by == "random" or table.time is None):
        message = "rows are split by their time, or by columns or files"
        yield Problem((*at, "split"), message, f"set by to time, and name {dotted(here)}.time")


def _resources(config: Config) -> Iterator[Problem]:
    comm, sampling, gpus = config.comm, config.sampling, config.cluster.gpus_per_worker
    if config.arithmetic.weights == "bfloat16":
        why = "with precision bf16 gradients have 16 bits"
        yield from comm.unused(("comm",), "compression", why=why)
    for key, value, needing, instead in (
        ("comm.backend", comm.backend, ("nccl",), "auto"),
        ("precision", config.precision, ("fp16-mixed",), "bf16-mixed or fp32"),
        ("sampling.sample_on", sampling.sample_on, ("gpu",), "auto"),
        ("sampling.features_on", sampling.features_on, ("pinned", "gpu"), "auto"),
    ):
        if value in needing and not gpus:
            message = f"{key} is {value}, but cluster.gpus_per_worker is {gpus}"
            remedy = f"set {key} to {instead}, or give each worker a GPU"
            yield Problem(tuple(key.split(".")), message, remedy)
    reason = not_drawn_on_gpu(config)
    if sampling.sample_on == "gpu" and gpus and reason:
        message = f"neighbours are not sampled on the GPU if {reason}"
        yield Problem(("sampling", "sample_on"), message, "set sampling.sample_on to auto or cpu")


def not_drawn_on_gpu(config: Config) -> str | None:
    """Return why neighbours are sampled on the CPU although there are GPUs; None if the
    configuration does not decide that."""
    sampling, model = config.sampling, config.model
    reasons = {
        "whole graphs are not sampled": isinstance(config.graph, ManyGraphs),
        "sampling.edge_weight is set": sampling.edge_weight is not None,
        "sampling.time is set": sampling.time is not None,
        "sampling.topology is partitioned": sampling.topology == "partitioned",
        "the model reads edges": bool(model.edge_feature_names or model.edge_category_widths),
        "edges to predict are excluded (task.exclude)": any(
            getattr(one.task, "exclude", "none") != "none" for one in config.by_task.values()
        ),
        f"a fanout is above {MOST_DRAWN:,}": any(n > MOST_DRAWN for n in sampling.fanouts),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


# Duration, storage, logging, speed and fault tolerance of a run. All other keys decide its batches,
# its results, or the meaning of a checkpoint's tensors. Data may move and be partitioned anew,
# because their digest shows whether they are the same.
_MAY_CHANGE = (
    "name",
    "storage",
    "graph.path",
    "graph.vocabulary",
    "task.table.files",
    "task.table.sql",
    "task.table.url",
    "partition",
    "model.recompute",
    "sampling.batch_size",  # only with the number of workers: the global batch stays
    "sampling.topology",
    "sampling.cache",
    "sampling.prefetch",
    "sampling.sample_on",
    "sampling.features_on",
    "sampling.eval_batch_size",
    "staging",
    "train.epochs",
    "train.max_steps",
    "train.log_every",
    "train.eval_every",
    "train.patience",
    "train.min_delta",
    "train.select",
    "guard",
    "comm",
    "cluster",
    "fault",
    "logging",
    "search",
)

# Keys whose values are mappings with the user's own keys.
_WHOLE = (
    "graph.args",
    "model.args",
    "task.args",
    "train.callbacks",
    "train.init.lr_scale",
    "model.ages",
    "model.categories",
    "model.edge_categories",
)


def fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that must not change in a resume, dotted, with their values as JSON types;
    ``config``: all keys, as `Config.to_dict` returns them."""
    found = {
        key: value
        for key, value in leaves(config)
        if not any(key == free or key.startswith(f"{free}.") for free in _MAY_CHANGE)
        and not re.match(r"tasks\.[^.]+\.table\.(files|sql|url)", key)
    }
    # names, in their order: the first task selects the best weights
    tasks = config.get("tasks")
    return {**found, "tasks": None if tasks is None else list(tasks)}


def changes(before: Mapping[str, Any], now: Config) -> list[str]:
    """Return the keys that changed although they must not, each with both values, in order.

    Args:
        before: `fixed` of the run's first configuration. Keys that it lacks, because an older
            version wrote it, are skipped.
    """
    after = fixed(now.to_dict())
    return [
        *(
            f"{key} was {json.dumps(before[key])} and is {json.dumps(value)}"
            for key, value in after.items()
            if key in before and before[key] != value
        ),
        *(f"{key} was null and is not" for key in _filled(before, after)),
        *(f"{key} is null and was not" for key in _filled(after, before)),
    ]


def _filled(empty: Mapping[str, Any], full: Mapping[str, Any]) -> list[str]:
    """Return sections that are null in one and have keys in the other; without ``graph``, which an
    existing partition replaces (its digest is compared), and ``tasks`` (their names are)."""
    apart = "graph", "tasks"
    return [
        key
        for key, value in empty.items()
        if value is None and key not in apart and any(other.startswith(f"{key}.") for other in full)
    ]


def leaves(value: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a configuration, dotted, with their values."""
    for name, inner in value.items():
        key = f"{head}{name}"
        if key == "graph.args" and isinstance(inner, Mapping):
            yield key, {k: v for k, v in inner.items() if k != "root"}  # a path, which may move
        elif isinstance(inner, Mapping) and key not in _WHOLE:
            yield from leaves(inner, f"{key}.")
        else:
            yield key, inner
