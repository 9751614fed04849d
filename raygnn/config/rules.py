"""Contradictions between sections, or of keys with the machine; what a resume may change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from raygnn.config.execution import MOST_DRAWN
from raygnn.config.graph import (
    DatasetGraph,
    GraphSplit,
    ManyGraphs,
    PlantedGraph,
    TablesGraph,
)
from raygnn.config.model import (
    AttentionConfig,
    FamilyConfig,
    LightGcnConfig,
    NoLayersConfig,
    UserModelConfig,
)
from raygnn.config.problems import Problem, dotted, show
from raygnn.config.schema import Config
from raygnn.config.split import TrainingTable
from raygnn.config.task import (
    COMPLEX,
    DISTANCES,
    RELATIONAL,
    EdgeTaskConfig,
    LinkPrediction,
    NodeClassification,
    NodeTaskConfig,
)
from raygnn.config.yaml_text import KeyPath


def contradictions(config: Config) -> list[Problem]:
    """Return all contradictions between keys, and keys that nothing would use."""
    return [
        *(problem for at, section in config.sections() for problem in section.problems(at)),
        *config.problems(),
        *_graph(config),
        *(_task(config) if config.tasks is None else _tasks(config)),
        *_network(config),
        *_time(config),
        *_embedding(config),
        *_resources(config),
    ]


def _graph(config: Config) -> Iterator[Problem]:
    graph, partition = config.graph, config.partition
    if graph is None:
        if partition.path is None:
            message = "neither graph nor partition.path is given, so there is no input"
            remedy = "add a graph section, or name an existing partition with partition.path"
            yield Problem(("graph",), message, remedy)
    elif isinstance(graph, PlantedGraph):
        if partition.parts != "auto" and partition.parts > graph.nodes:
            message = f"{partition.parts} parts of {graph.nodes} nodes would leave empty ones"
            yield Problem(("partition", "parts"), message, "lower partition.parts")
    elif (path := getattr(graph, "path", None)) is not None and path == partition.path:
        message = f"partition.path is graph.path, {partition.path}, which is input"
        remedy = "give the partition a directory of its own, or leave partition.path out"
        yield Problem(("partition", "path"), message, remedy)


def _task(config: Config) -> Iterator[Problem]:
    task, graph = config.task, config.graph
    if task.own_class is None:
        yield from task.unused(("task",), "args", why=f"task.kind is {task.kind}")
    if task.of_graphs and graph is not None and not isinstance(graph, GraphSplit):
        message = f"{task.kind} is of many graphs, and graph.format {graph.format} is one"
        remedy = "set graph.format to dataset or graphs, or task.kind to node_classification"
        yield Problem(("task", "kind"), message, remedy)
    if isinstance(graph, DatasetGraph):
        others = ("index", "split", "reverse") if task.of_graphs else GraphSplit.model_fields
        yield from graph.unused(("graph",), *others, why=f"task.kind is {task.kind}")
    if not task.of_graphs and isinstance(graph, ManyGraphs):
        yield Problem(
            ("task", "kind"),
            f"{task.kind} is of the {task.seeds} of one graph, and graph.format graphs gives many",
            "set task.kind to graph_classification or graph_regression",
        )
    if config.model.decoder is not None and not task.of_edges:
        yield Problem(
            ("model", "decoder"),
            f"decoder {config.model.decoder} would be ignored: task.kind is {task.kind}",
            "remove model.decoder, or set task.kind to edge_classification, edge_regression or "
            "link_prediction",
        )
    yield from _decoder(config, ("task",), ("model", "decoder"))


def _tasks(config: Config) -> Iterator[Problem]:
    assert config.tasks is not None
    if config.task != NodeClassification():
        remedy = "move it into tasks, under a name of its own, or remove tasks"
        yield Problem(("task",), "task would be ignored: there are tasks", remedy)
    if isinstance(config.graph, ManyGraphs):
        yield Problem(
            ("tasks",),
            "tasks are of the nodes and edges of one graph, and graph.format graphs gives many",
            "give one task (task), or one graph",
        )
    if isinstance(config.model, NoLayersConfig | LightGcnConfig):
        remedy = "choose another model.kind, or give one task (task)"
        message = f"{config.model.kind} has no weights that tasks could share"
        yield Problem(("model", "kind"), message, remedy)
    if config.model.decoder is not None and not any(t.of_edges for t in config.tasks.values()):
        message = f"decoder {config.model.decoder} would be ignored: none of the tasks is of edges"
        yield Problem(("model", "decoder"), message, "remove model.decoder")
    for name, task in config.tasks.items():
        at = "tasks", name
        if task.own_class is not None:
            message = f"{task.own_class} would say what a step does, which several tasks share"
            yield Problem((*at, "kind"), message, "give one task (task)")
        own = getattr(task, "decoder", None)
        yield from _decoder(config.of(name), at, (*at, "decoder") if own else ("model", "decoder"))


def _decoder(config: Config, task_at: KeyPath, at: KeyPath) -> Iterator[Problem]:
    """Yield contradictions between an edge task, at ``task_at``, and its decoder, at ``at``."""
    task, model, decoder = config.task, config.model, config.model.decoder
    name, task_name = ".".join(map(str, at)), ".".join(map(str, task_at))
    if isinstance(task, LinkPrediction) and not (
        task.loss == "margin" or (decoder in DISTANCES and task.loss in ("bce", "self_adversarial"))
    ):
        yield from task.unused(
            task_at,
            "margin",
            why=f"{task_name}.loss is {task.chosen_loss} and {name} {show(decoder)}; it is of the "
            "loss margin, and of bce and self_adversarial with the decoders rotate and transe",
        )
    if model.pair_history and task.of_links and decoder != "mlp":
        message = f"pair_history is read by the decoder mlp alone, and {name} is {show(decoder)}"
        yield Problem(("model", "pair_history"), message, f"set {name} to mlp")
    if decoder is None or not task.of_edges:
        return
    if not task.of_links and decoder != "mlp":
        message = f"{decoder} gives one score for an edge, and {task.kind} needs classes or numbers"
        yield Problem(at, message, f"set {name} to mlp, or leave it out")
    elif model.relation is not None and decoder not in RELATIONAL and model.kind != "rgcn":
        message = f"{decoder} does not read the relation that model.relation {model.relation} names"
        remedy = f"set {name} to one of {', '.join(RELATIONAL)}, or remove model.relation"
        yield Problem(at, message, remedy)
    elif decoder in COMPLEX and _width(config) % 2:
        message = f"{decoder} reads pairs of numbers, and the nodes' vectors are odd"
        yield Problem(at, message, "make model.hidden, or without layers model.embedding.dim, even")


def _width(config: Config) -> int:
    """Return the width of the nodes' vectors, as far as the configuration decides it."""
    model = config.model
    if isinstance(model, NoLayersConfig) and model.embedding is not None:
        return model.embedding.dim
    return model.hidden


def _network(config: Config) -> Iterator[Problem]:
    """Yield keys of ``model`` that the task does not use."""
    model, task, at = config.model, config.task, ("model",)
    kinds = {c.task.unit for c in config.by_task.values()}
    predicted = [c.task for c in config.by_task.values()]
    if model.decoder_features and not any(t.of_edges and not t.of_links for t in predicted):
        message = "decoder_features would be ignored: no task is of classes or numbers of edges"
        yield Problem(("model", "decoder_features"), message, "remove model.decoder_features")
    if model.pair_history and not any(t.of_links for t in predicted):
        message = "pair_history would be ignored: no task is link_prediction"
        yield Problem(("model", "pair_history"), message, "remove model.pair_history")
    if isinstance(model, NoLayersConfig) and task.of_graphs:
        message = f"none is of nodes, and task.kind is {task.kind}"
        yield Problem(("model", "kind"), message, "choose another model.kind, or another task.kind")
    elif isinstance(model, LightGcnConfig) and kinds == {"node"}:
        message = f"rows of lightgcn are compared by a decoder, and task.kind is {task.kind}"
        yield Problem(("model", "kind"), message, "choose another model.kind, or a task on edges")
    if task.of_graphs and isinstance(model, UserModelConfig) and model.interface == "pyg_layers":
        message = f"task.kind {task.kind} takes graphs whole, with one edge_index for all layers"
        yield Problem(("model", "interface"), message, "set model.interface to pyg")
    if isinstance(model, FamilyConfig) and not task.of_graphs:
        why = f"only tasks on whole graphs read it, and task.kind is {task.kind}"
        yield from model.unused(at, "readout", why=why, instead="choose another task.kind")
    if isinstance(model, AttentionConfig) and task.of_graphs:
        why = f"every layer is hidden in tasks on whole graphs, and task.kind is {task.kind}"
        yield from model.unused(at, "out_heads", why=why, instead="choose another task.kind")
    if task.of_graphs:
        why = "in tasks on whole graphs an edge's relation is its type"
        yield from model.unused(at, "relation", why=why, instead="give each an edge type")
    elif model.kind != "rgcn" and kinds == {"node"}:
        why = f"only rgcn weighs edges by it, and model.kind is {model.kind}"
        yield from model.unused(at, "relation", why=why, instead="choose another model.kind")


def _time(config: Config) -> Iterator[Problem]:
    """Yield contradictions with temporal sampling, or with its absence."""
    time, model, at = config.sampling.time, config.model, ("sampling", "time")
    if time is not None and time.strict and not any(c.table for c in config.by_task.values()):
        message = "strict would be ignored: there is no training table (task.table)"
        yield Problem((*at, "strict"), message, "remove it")
    if model.time_width and time is None:
        message = "time_encoding would be ignored: edges have no times"
        yield Problem(("model", "time_encoding"), message, "set sampling.time, or remove it")
    if model.ages and time is None:
        message = "ages would be ignored: seeds have no times"
        yield Problem(("model", "ages"), message, "set sampling.time, or remove it")
    if time is not None and (config.task.of_graphs or not model.depth):
        what = "whole graphs are" if config.task.of_graphs else "a model without layers is"
        yield Problem(at, f"time would be ignored: {what} not sampled", "remove sampling.time")
    if time is not None and model.kind in ("gcn", "lightgcn"):
        message = f"{model.kind} divides by the edges of the whole graph, later ones included"
        yield Problem(("model", "kind"), message, "choose another model.kind, such as sage")
    if time is not None and isinstance(model, FamilyConfig) and model.norm == "batch":
        message = "batch normalises by nodes of other times"
        yield Problem(("model", "norm"), message, "set model.norm to layer")
    splits: dict[str, str] = {}
    for name, one in config.by_task.items():
        yield from _task_time(one, ("tasks", name) if name else ("task",))
        if isinstance(one.task, NodeTaskConfig) and one.table is None:
            splits.setdefault(str(one.task.split), name)
    if len(splits) > 1:
        names = " and ".join(splits.values())
        message = f"tasks {names} divide nodes differently: one would be trained on what is tested"
        yield Problem(("tasks", list(splits.values())[1], "split"), message, "give them one split")


def _task_time(config: Config, at: KeyPath) -> Iterator[Problem]:
    task, time = config.task, config.sampling.time
    split = task.split if isinstance(task, (NodeTaskConfig, EdgeTaskConfig)) else None
    if isinstance(task, NodeTaskConfig) and task.table is not None:
        yield from _table(config, task, task.table, at)
    elif isinstance(task, NodeTaskConfig):
        if time is not None and time.seeds is None:
            message = "it is not said when nodes are predicted"
            yield Problem(("sampling", "time"), message, "set sampling.time.seeds to their array")
        if split is not None and split.by == "random":
            message = "nodes are split at random by the graph: see graph.format and its masks"
            yield Problem((*at, "split"), message, "set by to time, or remove split")
    timeless = config.split_time is None and config.table is None
    if split is not None and split.by == "time" and timeless:
        message = "a split by time needs an array of times"
        yield Problem((*at, "split", "time"), message, "name the array, or set sampling.time")
    if not isinstance(task, LinkPrediction):
        return
    if time is not None and task.negatives.kind in ("in_batch", "degree"):
        message = f"{task.negatives.kind} draws nodes by edges of all times"
        yield Problem((*at, "negatives", "kind"), message, "set it to uniform or local")
    held_out = split is None or (split.by == "random" and (split.val, split.test) != (0.0, 0.0))
    if config.model.pair_history and (held_out or not config.ordered):
        message = "a history has held-out edges, which earlier edges would see"
        remedy = f"set sampling.time without seeds, and {dotted((*at, 'split', 'by'))} to time"
        yield Problem(("model", "pair_history"), message, remedy)
    drawn = {
        ("metric",): task.metric == "average_precision",
        ("negatives", "each"): task.negatives.each > 1,
        ("ranking", "candidates"): task.ranking.candidates == "destinations",
    }
    if time is not None and task.negatives.filtered:
        message = "filtered would be ignored: a training edge may be a negative at other times"
        yield Problem((*at, "negatives", "filtered"), message, "remove it")
    for key, value in drawn.items():
        if value and time is None:
            message = "this is of nodes that are drawn for each edge at its time"
            yield Problem((*at, *key), message, "remove it, or set sampling.time")
    if task.tops and time is not None and task.ranking.candidates != "destinations":
        message = "metrics per source and time are of all targets, each seen at that time"
        remedy = f"remove it, or set {dotted((*at, 'ranking', 'candidates'))} to destinations"
        yield Problem((*at, "ranking"), message, remedy)


def _table(
    config: Config, task: NodeTaskConfig, table: TrainingTable, at: KeyPath
) -> Iterator[Problem]:
    here = (*at, "table")
    if task.ntype is None:
        message = "it is not said of which node type the entities are"
        yield Problem((*at, "ntype"), message, "name it")
    if task.classifies and not isinstance(table.target, str):
        message = f"a class label needs one column, and {show(table.target)} are several"
        yield Problem((*here, "target"), message, f"set {dotted((*at, 'labels'))} to multi")
    if table.sql is not None and not isinstance(config.graph, TablesGraph):
        message = "sql names tables of a description, and graph.format is not tables"
        yield Problem((*here, "sql"), message, "write the rows to files, and name them")
    if config.sampling.time is not None and table.time is None:
        message = "rows have no time, and edges do (sampling.time)"
        yield Problem((*here, "time"), message, "name the column with the time of a row")
    if task.target != type(task).model_fields["target"].default:
        message = "target would be ignored: the training table has its own"
        yield Problem((*at, "target"), message, f"remove it, or {dotted(here)}")
    ways = [table.split, task.split, table.files if isinstance(table.files, dict) else None]
    if sum(way is not None for way in ways) != 1 and config.trains:
        message = "which rows are for training, validation and test must be said in one way"
        remedy = f"give files of each split, or {dotted(here)}.split, or {dotted(at)}.split by time"
        yield Problem(here, message, remedy)
    if task.split is not None and (task.split.by == "random" or table.time is None):
        message = "rows are split by their time, or by columns or files"
        yield Problem((*at, "split"), message, f"set by to time, and name {dotted(here)}.time")


def _embedding(config: Config) -> Iterator[Problem]:
    if config.model.embedding is None:
        return
    if config.task.of_graphs:
        yield Problem(
            ("model", "embedding"),
            f"embedding would be ignored: task.kind is {config.task.kind}, whose graphs have other "
            "nodes each",
            "remove model.embedding, or learn rows of categories (model.categories)",
        )
    if config.train.ema is not None:
        message = (
            "an average of all weights would move every learned row in every step, and a step of "
            "model.embedding moves only those that its batch reads"
        )
        yield Problem(("train", "ema"), message, "remove train.ema, or model.embedding")


def _resources(config: Config) -> Iterator[Problem]:
    comm, gpus = config.comm, config.cluster.gpus_per_worker
    if comm.backend == "nccl" and not gpus:
        message = f"nccl works between GPUs, but cluster.gpus_per_worker is {gpus}"
        remedy = "set comm.backend to auto, or give each worker a GPU"
        yield Problem(("comm", "backend"), message, remedy)
    for key, value in (
        ("sample_on", config.sampling.sample_on),
        ("features_on", config.sampling.features_on),
    ):
        if value in ("pinned", "gpu") and not gpus:
            message = f"{key} is {value}, but cluster.gpus_per_worker is {gpus}"
            remedy = f"set sampling.{key} to auto, or give each worker a GPU"
            yield Problem(("sampling", key), message, remedy)
    reason = not_drawn_on_gpu(config)
    if config.sampling.sample_on == "gpu" and gpus and reason:
        message = f"a GPU draws plain neighbours alone, and {reason}"
        yield Problem(("sampling", "sample_on"), message, "set sampling.sample_on to auto or cpu")


def not_drawn_on_gpu(config: Config) -> str | None:
    """Return why neighbours are sampled on the CPU although there are GPUs; None if the
    configuration does not decide that."""
    sampling, model = config.sampling, config.model
    hops = [hop.values() if isinstance(hop, dict) else (hop,) for hop in sampling.fanout]
    tasks = config.tasks.values() if config.tasks else [config.task]
    reasons = {
        "whole graphs are not sampled": isinstance(config.graph, ManyGraphs),
        "sampling.edge_weight is set": sampling.edge_weight is not None,
        "sampling.time is set": sampling.time is not None,
        "sampling.topology is partitioned": sampling.topology == "partitioned",
        "the model reads edges": bool(model.edge_feature_names or model.edge_category_widths),
        "edges to predict are not drawn (task.exclude)": any(
            task.of_edges and getattr(task, "exclude", "none") != "none" for task in tasks
        ),
        f"a fanout is above {MOST_DRAWN:,}": any(n > MOST_DRAWN for hop in hops for n in hop),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


# How long, where, how watched, how fast, and what to do about what goes wrong. All else decides
# which batches there are, what is made of them, or what a checkpoint's tensors mean. Whether the
# data are the same, their digest says, wherever they lie and however many parts they have.
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

# the user's own keys are in them
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
    ``config``: a complete one, such as `Config.to_dict` returns."""
    found = {
        key: value
        for key, value in leaves(config)
        if not any(key == free or key.startswith(f"{free}.") for free in _MAY_CHANGE)
        and not re.match(r"tasks\.[^.]+\.table\.(files|sql|url)", key)
    }
    # which there are, and in which order: the first one selects the best weights
    tasks = config.get("tasks")
    return {**found, "tasks": None if tasks is None else list(tasks)}


def changes(before: Mapping[str, Any], now: Config) -> list[str]:
    """Return the keys that changed although they must not, each with both values, in order.

    Args:
        before: `fixed` of the configuration that the run began with. Keys that it lacks, because
            it is of an older version, are skipped.
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
    """Sections that are null in one, and have keys in the other; but ``graph``, which a partition
    that is there can do without: whether the data are the same, their digest says; and ``tasks``,
    whose names are compared."""
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
            yield key, {k: v for k, v in inner.items() if k != "root"}  # which is a path
        elif isinstance(inner, Mapping) and key not in _WHOLE:
            yield from leaves(inner, f"{key}.")
        else:
            yield key, inner
