"""Configuration of a prediction: a run's, for its own data or new data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from raygnn.checkpoint.weights import Weights
from raygnn.config.graph import TablesGraph
from raygnn.config.load import load_config
from raygnn.config.places import Uri
from raygnn.config.rules import changes, fixed
from raygnn.config.schema import Config
from raygnn.driver.resume import trained_partition
from raygnn.errors import ConfigError, InputError
from raygnn.graph.partition.layout import read_meta
from raygnn.runs.run import Run
from raygnn.runs.run_directory import PARTITION
from raygnn.runs.trust import usable
from raygnn.storage.remote import any_path
from raygnn.util.files import is_vacant, read_json
from raygnn.worker.planes import vocabulary

# keys that no weight depends on
_EVALUATION_KEYS = r"\.ranking\.(candidates|edges|file|top)$"
# keys that may also differ for new data, some of which follow from the weights
_NEW_DATA_KEYS = (
    r"^graph|(\.ntype|\.etype|model\.relation|\.split(\.(by|val|test|seed|time))?)$|"
    + _EVALUATION_KEYS
)


def config_of(run: Run, overrides: Sequence[str], trust: bool = False) -> Config:
    """Return the run's configuration with its directory's current location; ``trust``: see
    `raygnn.runs.trust.usable`.

    Raises:
        ConfigError: an override is wrong, or changes what was trained.
        InputError: the run names classes and is not trusted.
    """
    values = _values(run, trust)
    if not any(key.startswith(("graph", "partition")) for key in overrides):
        values |= _partition(run, overrides)
    config = load_config(values, overrides)
    remedy = "change keys of cluster, comm, staging, fault, partition, ranking, or graph.path"
    return _unchanged(run, config, _EVALUATION_KEYS, remedy)


def _values(run: Run, trust: bool) -> dict[str, Any]:
    storage = run.storage.text if isinstance(run.storage, Uri) else str(run.storage)
    recorded = usable(run.config, run.shown, trust, run.files)
    # a prediction logs nothing, and runs of earlier versions may name removed loggers
    return {**recorded, "storage": storage, "name": run.name, "logging": {"loggers": []}}


def _unchanged(run: Run, config: Config, free: str, remedy: str) -> Config:
    """Return the configuration. Raises ConfigError if it changes keys of the run that training
    fixed. ``free``: regular expression of keys that may change."""
    before = {key: v for key, v in fixed(run.config).items() if not re.search(free, key)}
    if changed := changes(before, config):
        what = f"a trained model cannot be changed: {'; '.join(changed)}"
        raise ConfigError(what, where="--set", remedy=remedy)
    return config


def _partition(run: Run, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the sections for the partition of the training, or if it is missing for a new one with
    as many parts. Only a missing partition and queries need the graph's files."""
    parts, place = read_json(run.files / PARTITION).get("parts"), trained_partition(run)
    if not isinstance(parts, list) or place is None:
        return {}  # a user's partition, or graphs
    tasks = run.config.get("tasks") or {"": run.config.get("task") or {}}
    queried = any((task.get("table") or {}).get("sql") for task in tasks.values())
    if not queried and not is_vacant(any_path(place)):
        return {"graph": None, "partition": {"path": place}}
    return {"partition": {**(run.config.get("partition") or {}), "parts": len(parts)}}


def config_for_others(
    run: Run, trained: Weights, overrides: Sequence[str], trust: bool = False
) -> Config:
    """Return the run's configuration for new data of the same kind; see `config_of`. Raises
    InputError, too, if no new data are named, or the model cannot be used for them."""
    task, model = (run.config.get(name) or {} for name in ("task", "model"))
    what = remedy = None
    if not any(key.startswith(("graph.", "graph=", "partition.path")) for key in overrides):
        what = "no new data are named"
        remedy = "name them, such as --set graph.path=DIRECTORY"
    elif model.get("embedding"):
        what = "new nodes have no rows in the embedding table (model.embedding)"
        remedy = "train a model on features alone, or train on these data, too"
    if what is not None:
        raise InputError(what, where="--new-data", remedy=remedy)
    values = _values(run, trust)
    if "" in trained.goals:
        values["task"] = _requested(task, trained.goals[""])
    else:
        tasks = run.config["tasks"]
        values["tasks"] = {
            name: _requested(tasks[name], goal) for name, goal in trained.goals.items()
        }
    # one key for all edges, so only if all tasks on edges read the same array
    read = {goal["relation"] for goal in trained.goals.values() if goal["etype"] is not None}
    relation = read.pop() if len(read) == 1 else None
    values["model"] = {**model, "relation": relation or model.get("relation")}
    values["partition"] = {**(run.config.get("partition") or {}), "path": None, "parts": "auto"}
    config = load_config(values, overrides)
    _check_scaling(run, config)
    remedy = "change keys of graph, partition, cluster, comm, staging or fault"
    _unchanged(run, config, _NEW_DATA_KEYS, remedy)
    return _with_categories(config, trained)


def _with_categories(config: Config, trained: Weights) -> Config:
    """Return the configuration with the training's categories and transforms of tables."""
    if isinstance(config.graph, TablesGraph):
        graph = config.graph.model_copy(update={"vocabulary": trained.about})
        return config.model_copy(update={"graph": graph})
    if config.graph is None and not config.task.of_graphs:
        assert config.partition.path is not None
        meta = read_meta(any_path(config.partition.path))
        vocabulary.check(trained.words, meta.names)
        vocabulary.check_transforms(trained.transforms, meta)
    return config


def _requested(task: Mapping[str, Any], goal: Mapping[Any, str | None]) -> dict[str, Any]:
    split = task.get("split") if task.get("table") else None  # by masks
    requested = {**task, "ntype": goal["ntype"], "etype": goal["etype"], "split": split}
    if goal["etype"] is not None:
        requested["split"] = {"val": 0.0, "test": 0.0}  # nothing is held out
    return requested


def _check_scaling(run: Run, config: Config) -> None:
    """Raise ConfigError if features of new data are not scaled as in training."""
    if not run.config.get("graph") or config.graph is None:
        return  # unknown for a user's partition
    before = run.config["graph"].get("normalize") or "none"
    now, remedy = config.graph.normalize or "none", f"set graph.normalize={before}"
    if now == before != "standard" or (before == "standard" and config.graph.normalize == "none"):
        return
    what = f"features were scaled by {before} when the model was trained, and by {now} here"
    if before == "standard":
        remedy = "scale them in the files as in the training, and set graph.normalize=none"
        if isinstance(config.graph, TablesGraph):
            remedy += ", or train with scale: standard in the YAML of the tables, which is kept"
        if now == before:
            what = "standard scales by the data's own mean and deviation, and these are new data"
    raise ConfigError(what, where="graph.normalize", remedy=remedy)
