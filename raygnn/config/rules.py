"""What several keys, or a key and the machine, must agree on before anything starts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from raygnn.config import (
    comm_rules,
    embedding_rules,
    logging_rules,
    model_rules,
    task_rules,
    train_rules,
)
from raygnn.config.graph import (
    DglGraph,
    ManyGraphs,
    NpzGraph,
    PlanetoidGraph,
    PlantedGraph,
    TablesGraph,
    TriplesGraph,
    labelled_nodes,
)
from raygnn.config.graph_rules import many_graphs
from raygnn.config.model import ModelConfig
from raygnn.config.places import unreachable
from raygnn.config.problems import Problem, nearest, show
from raygnn.config.schema import Config, SamplingConfig
from raygnn.config.values import NO_LAYERS

# What they find is either no error, or one that this job may live with.
ALLOWABLE = (
    "nodes_answer",
    "versions_supported",
    "versions_uniform",
    "code_uniform",
    "hardware_uniform",
    "environment_uniform",
    "cpus_are_there",
    "shared_memory",
    "host_name_resolves",
    "debug_level_safe",
    "clocks_agree",
    "open_files",
    "network_reach",
    "network_latency",
    "network_bandwidth",
    "bf16_is_there",
    "gpus_are_there",
    "gpus_are_free",
    "model_runs",
    "storage_visible",
    "partition_visible",
    "parts_agree",
    "fold_is_unseen",
    "splits_agree",
    "batch_size_fits",
    "edge_arrays_read",
    "memory_fits",
    "disk_space",
    "cache_space",
    "parts_and_workers",
)

# Of what these find the job would surely fail, or wait for ever.
BINDING = (
    "interfaces_there",
    "resources_fit",
    "devices_suit",
    "arrays_usable",
    "inputs_exist",
    "embeddings_usable",
    "nodes_to_train_on",
    "cache_usable",
    "name_free",
)


def contradictions(config: Config) -> list[Problem]:
    """Every pair of keys that cannot both be meant."""
    return [
        *_graph(config),
        *task_rules.tasks(config),
        *_network(config),
        *(_whole(config) if config.task.of_graphs else _sampling(config.sampling, config.model)),
        *train_rules.optimisation(config.train),
        *_resources(config),
        *comm_rules.communication(config),
        *comm_rules.sharding(config),
        *embedding_rules.embeddings(config),
        *allowed(config),
        *comm_rules.sizes(config),
        *logging_rules.loggers(config),
    ]


def allowed(config: Config) -> Iterator[Problem]:
    """``cluster.allow`` names checks, and none whose errors are the job's end anyway."""
    names = dict.fromkeys(config.cluster.allow)
    unknown = [name for name in names if name not in (*ALLOWABLE, *BINDING)]
    if unknown:
        near = [close for name in unknown if (close := nearest(name, ALLOWABLE))]
        listed = f"checks are: {', '.join(sorted(ALLOWABLE))}"
        yield Problem(
            ("cluster", "allow"),
            f"there is no check {', '.join(map(show, unknown))}",
            f"did you mean {', '.join(dict.fromkeys(near))}?" if near else listed,
        )
    binding = [name for name in names if name in BINDING]
    if binding:
        yield Problem(
            ("cluster", "allow"),
            f"{', '.join(binding)} cannot be allowed: the job would fail of it later, or wait "
            "for ever",
            "remove it, and mend what the check says",
        )


def _network(config: Config) -> Iterator[Problem]:
    """Problems of ``model``; of several tasks, those that all of them have with it."""
    first, *others = (list(model_rules.network(c.model, c.task)) for c in config.by_task.values())
    for problem in first:
        if all(problem.key in {p.key for p in other} for other in others):
            yield problem


def _graph(config: Config) -> Iterator[Problem]:
    graph, partition = config.graph, config.partition
    if graph is None:
        if partition.path is None:
            yield Problem(
                ("graph",),
                "neither graph nor partition.path is given, so there is no input",
                "add a graph section, or name an existing partition with partition.path",
            )
        return
    if isinstance(graph, ManyGraphs):
        yield from many_graphs(graph)
    if isinstance(graph, PlantedGraph):
        yield from _planted(graph, config)
    elif graph.path is not None and graph.path == partition.path:
        yield Problem(
            ("partition", "path"),
            f"partition.path is graph.path, {partition.path}, which is input",
            "give the partition a directory of its own, or leave partition.path out",
        )


def _planted(graph: PlantedGraph, config: Config) -> Iterator[Problem]:
    if graph.train + graph.val >= 1:
        yield Problem(
            ("graph", "val"),
            f"train {graph.train:g} + val {graph.val:g} leaves no nodes to test on",
            "lower graph.train or graph.val until they sum to less than 1",
        )
    items = labelled_nodes(graph)
    nodes = f"{items} nodes with labels (four fifths)" if graph.typed else f"{items} nodes"
    if graph.classes > items:
        yield Problem(
            ("graph", "classes"),
            f"{graph.classes} classes are more than {nodes}",
            "raise graph.nodes or lower graph.classes",
        )
    if graph.degree > items / 2:
        yield Problem(
            ("graph", "degree"),
            f"a mean degree of {graph.degree:g} is more than half of {nodes}",
            "lower graph.degree or raise graph.nodes",
        )
    if int(graph.train * items) < 1:
        yield Problem(
            ("graph", "train"),
            f"a share of {graph.train:g} of {nodes} leaves none to train on",
            "raise graph.train or graph.nodes",
        )
    parts = config.partition.parts
    if parts != "auto" and parts > graph.nodes:
        yield Problem(
            ("partition", "parts"),
            f"{parts} parts of {graph.nodes} nodes would leave empty ones",
            "lower partition.parts",
        )


def _whole(config: Config) -> Iterator[Problem]:
    """Whole graphs are not sampled."""
    for key in ("fanout", "replace", "edge_weight", "topology", "cache", "cache_policy"):
        value, default = getattr(config.sampling, key), SamplingConfig.model_fields[key].default
        if value != default:
            yield Problem(
                ("sampling", key),
                f"{key} {show(value)} would be ignored: task.kind {config.task.kind} takes graphs "
                "whole",
                f"remove sampling.{key}",
            )


def _sampling(sampling: SamplingConfig, model: ModelConfig) -> Iterator[Problem]:
    layers = model.layers
    if model.kind != NO_LAYERS and len(sampling.fanout) != layers:
        yield Problem(
            ("sampling", "fanout"),
            f"{len(sampling.fanout)} fanouts {show(sampling.fanout)} for {layers} model.layers",
            f"give one number per layer, such as {show([10] * min(layers, 5))}, "
            "or change model.layers",
        )
    numbers = {
        number
        for hop in sampling.fanout
        for number in (hop.values() if isinstance(hop, dict) else (hop,))
    }
    if sampling.replace and -1 in numbers:
        yield Problem(
            ("sampling", "replace"),
            f"replace is true, but sampling.fanout {show(sampling.fanout)} takes all (-1) once",
            "set sampling.replace to false, or give every layer a number of neighbours",
        )


def _resources(config: Config) -> Iterator[Problem]:
    comm, cluster = config.comm, config.cluster
    if comm.static_graph and comm.find_unused_parameters:
        yield Problem(
            ("comm", "static_graph"),
            "static_graph and find_unused_parameters are both true, and rule each other out",
            "keep one of the two; neither is needed if every parameter gets a gradient",
        )
    if comm.static_graph and config.train.accumulate > 1:
        yield Problem(
            ("comm", "static_graph"),
            f"static_graph is true, and torch cannot have it with train.accumulate "
            f"{config.train.accumulate}",
            "remove comm.static_graph, or set train.accumulate to 1",
        )
    yield from comm_rules.compression(config)
    gpus = f"cluster.gpus_per_worker is {cluster.gpus_per_worker}"
    if comm.backend == "nccl" and not cluster.gpus_per_worker:
        yield Problem(
            ("comm", "backend"),
            f"nccl works between GPUs, but {gpus}",
            "set comm.backend to auto, or give each worker a GPU",
        )
    if config.sampling.pin_memory is True and not cluster.gpus_per_worker:
        yield Problem(
            ("sampling", "pin_memory"),
            f"pin_memory is true, but memory is pinned for GPUs, and {gpus}",
            "set sampling.pin_memory to auto, or give each worker a GPU",
        )
    if config.precision == "fp16-mixed" and not cluster.gpus_per_worker:
        yield Problem(
            ("precision",),
            f"fp16-mixed needs GPUs, but {gpus}",
            "set precision to bf16-mixed or fp32, or give each worker a GPU",
        )
    if cluster.num_cpus is None:
        return
    if cluster.address not in ("auto", "local"):
        yield Problem(
            ("cluster", "num_cpus"),
            f"num_cpus {cluster.num_cpus} would be ignored: cluster.address is {cluster.address}, "
            "which runs already",
            "remove cluster.num_cpus, or set cluster.address to local",
        )
    workers = cluster.limits[0] if cluster.limits else 1
    if workers * cluster.cpus_per_worker > cluster.num_cpus:
        yield Problem(
            ("cluster", "num_cpus"),
            f"{cluster.num_cpus} CPUs are too few for {workers} × {cluster.cpus_per_worker} "
            "(cluster.workers × cluster.cpus_per_worker)",
            "raise cluster.num_cpus, or lower one of the others",
        )


def missing_paths(config: Config) -> list[Problem]:
    """Inputs that are not there or not of the right kind, and a storage that is not a directory."""
    return [*_input_paths(config), *_storage(Path(config.storage))]


def garbled_paths(config: Config) -> Iterator[Problem]:
    """Paths that are no UTF-8: a run's files, Ray's messages and the report are."""
    places = {
        "storage": config.storage,
        "graph.path": getattr(config.graph, "path", None),
        "partition.path": config.partition.path,
        "staging.path": config.staging.path,
        "fault.mirror": config.fault.mirror,
    }
    for key, place in places.items():
        if place is not None and _is_garbled(str(place)):
            yield Problem(
                tuple(key.split(".")),
                f"{str(place)!a} has bytes that are not UTF-8",
                "rename the directory or file, or take another",
            )
    if _is_garbled(cwd := os.getcwd()) and not _is_garbled(str(config.storage)):
        yield Problem(
            ("storage",),
            f"the working directory {cwd!a} has bytes that are not UTF-8",
            "start in another directory, or rename it",
        )


def _is_garbled(place: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in place)


def _input_paths(config: Config) -> Iterator[Problem]:
    graph, partition = config.graph, config.partition.path
    if isinstance(graph, PlanetoidGraph):
        yield from _input(("graph", "path"), graph.path, directory=True)
        yield from _planetoid_name(graph)
    elif isinstance(graph, (NpzGraph, DglGraph, TablesGraph)):
        yield from _input(("graph", "path"), graph.path, directory=False)
    elif isinstance(graph, (TriplesGraph, ManyGraphs)) and graph.path is not None:
        yield from _input(("graph", "path"), graph.path, directory=None)
    if not isinstance(partition, Path):
        return  # null, or a URI: looked at by whoever can open it
    if problem := _unseen(("partition", "path"), partition):
        yield problem
        return
    if graph is None and not partition.exists():
        yield _missing(("partition", "path"), partition)
    if partition.is_file() and partition.suffix != ".json":
        yield Problem(
            ("partition", "path"),
            f"{partition} is a file, not a directory or a partition's .json",
            "name the directory that dgl.distributed.partition_graph or raygnn wrote",
        )


def _input(key: tuple[str, ...], path: Path, *, directory: bool | None) -> Iterator[Problem]:
    """``directory``: whether it must be one; None = either."""
    if problem := _unseen(key, path):
        yield problem
    elif not path.exists():
        yield _missing(key, path)
    elif directory and not path.is_dir():
        yield Problem(
            key, f"{path} is a file, expected a directory", f"name its directory, {path.parent}"
        )
    elif directory is False and not path.is_file():
        yield Problem(key, f"{path} is a directory, expected a file", "name the file in it")
    elif not os.access(path, os.R_OK):
        yield Problem(key, f"{path} may not be read", "change its permissions, or run as its owner")


def _planetoid_name(graph: PlanetoidGraph) -> Iterator[Problem]:
    try:
        files = os.listdir(graph.path)
    except OSError:
        return  # said of the path, or by what reads the files
    if f"ind.{graph.name}.x" in files:
        return
    there = sorted(f[4:-2] for f in files if f.startswith("ind.") and f.endswith(".x"))
    close = nearest(graph.name, [*there, "cora", "citeseer", "pubmed"])
    yield Problem(
        ("graph", "name"),
        f"{graph.path} has no file ind.{graph.name}.x",
        (f"did you mean {close}? " if close else "") + f"there are: {', '.join(there) or 'none'}",
    )


def _unseen(key: tuple[str, ...], path: Path) -> Problem | None:
    if (why := unreachable(path)) is None:
        return None
    return Problem(key, f"{path} cannot be looked at: {why}", "correct it, or its permissions")


def _missing(key: tuple[str, ...], path: Path) -> Problem:
    if path.is_symlink():
        return Problem(
            key, f"{path} is a link to {os.readlink(path)}, which does not exist", "correct it"
        )
    parent = next(parent for parent in path.parents if parent.is_dir())
    if parent != path.parent:
        return Problem(key, f"{path} does not exist", f"nor does its directory; {parent} does")
    with suppress(PermissionError):  # its names may not be read
        names = (entry.name for entry in os.scandir(parent))
        if close := nearest(path.name, names):
            return Problem(key, f"{path} does not exist", f"did you mean {parent / close}?")
    return Problem(key, f"{path} does not exist", f"check the name; {parent} exists")


def _storage(storage: Path) -> Iterator[Problem]:
    if problem := _unseen(("storage",), storage):
        yield problem
        return
    there = next(path for path in (storage, *storage.parents) if path.exists())
    if not there.is_dir():
        yield Problem(
            ("storage",), f"{there} is not a directory", "name a directory that can be made"
        )


# How long, where, how watched, how fast, and what to do about what goes wrong. All else decides
# which batches there are, what is made of them, or what a checkpoint's tensors mean. Whether the
# data are the same, their digest says, wherever they lie and however many parts they have.
_MAY_CHANGE = (
    "name",
    "storage",
    "graph.path",
    "graph.vocabulary",
    "partition",
    "model.kernels",
    "model.recompute",
    "sampling.batch_size",  # only with the number of workers: the global batch stays
    "sampling.topology",
    "sampling.cache",
    "sampling.cache_policy",
    "sampling.prefetch",
    "sampling.pin_memory",
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
)

_WHOLE = ("graph.args", "model.args", "model.categories")  # the user's own keys are in them


def fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that must not change, dotted, with their values as JSON types.

    Args:
        config: a whole one, such as `Config.to_dict` gives.
    """
    found = {key: value for key, value in _leaves(config) if not _may_change(key)}
    # which there are, and in which order: the first one selects the best weights
    tasks = config.get("tasks")
    return {**found, "tasks": None if tasks is None else list(tasks)}


def changes(before: Mapping[str, Any], now: Config) -> list[str]:
    """The keys that changed and must not, each with both values, in the order of the config.

    Args:
        before: `fixed` of the config that the run began with. Keys that it lacks, since it is of
            an older version, are passed over.
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


def _may_change(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in _MAY_CHANGE)


def _leaves(value: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        key = f"{head}{name}"
        if isinstance(inner, Mapping) and key not in _WHOLE:
            yield from _leaves(inner, f"{key}.")
        else:
            yield key, inner
