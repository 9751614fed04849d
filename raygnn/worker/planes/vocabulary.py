"""Vocabularies of classes, categories and relations of tables, and transforms of their features.

Other tables number the same categories as the training did if `graph.vocabulary` names it; a
partition that was built without it may number them in another way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raygnn.config.model import ModelConfig
from raygnn.config.schema import Config
from raygnn.config.task import ClassTask
from raygnn.errors import ConfigError, DataError
from raygnn.graph.data import EdgeType, etype_str, table_key
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.graph.staging.shard import EdgeReads, Shard
from raygnn.models.registry import needs_relation
from raygnn.sampling.exchange import Exchange
from raygnn.worker.job import Job, Sizes

DEFAULT = "relation"
# names of two classes; the second one is the positive class
_PLAIN_CLASSES = {("0", "1"), ("no", "yes"), ("false", "true"), ("n", "y"), ("f", "t")}
_AGAIN = (
    "rebuild the partition with graph.vocabulary, the run's checkpoints/selected.json, or name the "
    "tables with graph.path"
)


def relation_array(model: ModelConfig) -> str | None:
    """Return the name of the edge array of relations; None if the network reads none."""
    return (model.relation or DEFAULT) if needs_relation(model) else None


def edge_reads(config: Config) -> EdgeReads:
    """Return the edge arrays that sampling and models read, where edge types have them."""
    model = config.model
    return EdgeReads(
        features=model.edge_feature_names,
        dtype=config.arithmetic.dtype,
        categories=tuple(model.edge_category_widths),
        whole=model.takes_dgl,
        relation=relation_array(model),
        weight=config.sampling.edge_weight,
        time=config.sampling.time.edges if config.sampling.time else None,
        elapsed=model.time_width > 0,
    )


def relations(config: Config, shard: Shard, exchange: Exchange) -> dict[EdgeType, int]:
    """Return edge type → number of relations, of the types that have the array; empty if the
    network reads none. Collective. Raises DataError if it does not hold whole numbers from 0."""
    name, found = relation_array(config.model), dict[EdgeType, int]()
    if name is None:
        return {}
    for etype in shard.etypes:
        values = shard.topology[etype].data.get(name)
        if values is None:
            continue
        own = values[slice(*shard.own_edges(etype))]
        found[etype] = count_numbers(etype, name, own, exchange)
    return found


def count_numbers(
    etype: EdgeType, name: str, own: np.ndarray, exchange: Exchange, key: str = "model.relation"
) -> int:
    """Return the number of relations or categories, at least 1. Collective.

    Args:
        own: numbers of this rank's edges.
        key: config key that names the array.

    Raises:
        DataError: see `relations`.
    """
    if own.dtype.kind not in "iu" or own.ndim > 1:
        raise _unusable(etype, name, f"is {own.dtype} {list(own.shape)}", key)
    if exchange.max(-int(own.min()) if len(own) else 0) > 0:
        raise _unusable(etype, name, "has numbers below 0", key)
    return max(1, exchange.max(int(own.max()) + 1 if len(own) else 0))


def _unusable(etype: EdgeType, name: str, what: str, key: str) -> DataError:
    message = f"edge array {name!r} of {etype_str(etype)!r} {what}"
    remedy = "provide one whole number from 0 for each edge, or name another array"
    return DataError(message, where=key, remedy=remedy)


CategoryNames = Mapping[str, Sequence[Any]]


def training_facts(job: Job, sizes: Sizes) -> dict[str, Any]:
    """Return the facts about the training data that predictions need, as JSON: see `Weights`."""
    goals = {
        name: {
            "ntype": goal.ntype,
            "etype": goal.edges and etype_str(goal.edges.etype),
            "relation": goal.edges and goal.edges.relation,
        }
        for name, goal in job.goals.items()
    }
    found = {"sizes": sizes.found, "like": sizes.like, "latest": sizes.latest}
    manifest = None if job.config.task.of_graphs else job.meta.manifest
    transforms, columns = (manifest.transforms, manifest.columns) if manifest else ({}, {})
    found |= {"transforms": transforms, "columns": columns}
    return {**found, "goals": goals, "words": words(job)}


def words(job: Job) -> CategoryNames:
    """Return ``"<type>/<array>"`` → categories 0, 1, … of the model's arrays and of the target;
    none for tasks on whole graphs."""
    model = job.config.model
    if job.config.task.of_graphs:
        return {}
    names: dict[str, Sequence[Any]] = dict(job.meta.names)
    wanted = {*model.categories, *model.edge_category_widths, relation_array(model)}
    targets = set()
    for name, each in job.by_task.items():
        if each.rows is not None and each.rows.words:
            targets.add(table_key(name))
            names[table_key(name)] = each.rows.words
            continue
        targets.add(f"{each.goal.kind}/{each.config.task.target}")
        if each.goal.edges is not None:
            targets.add(f"{each.goal.kind}/{each.goal.edges.relation}")
    return {
        key: values
        for key, values in names.items()
        if key in targets or key.rpartition("/")[2] in wanted
    }


def target_words(job: Job) -> Sequence[Any]:
    """Return the names of the classes 0, 1, … of a job of one task; empty if they are numbers."""
    return words(job).get(target_key(job.config, job.task, job.goal.kind), ())


def target_key(config: Config, task: str, kind: str | None) -> str:
    """Return the key of a task's classes in `words`.

    Args:
        config: of that task alone.
        task: its name.
        kind: its node or edge type.
    """
    return f"{kind}/{config.task.target}" if config.table is None else table_key(task)


def positive_class(job: Job, classes: int) -> int | None:
    """Return the number of the class ``task.positive``; None if it is not set. Raises ConfigError
    if there is no such class."""
    wanted = getattr(job.config.task, "positive", None)
    if wanted is None:
        return None
    known = [str(word) for word in target_words(job) or range(classes)]
    if str(wanted) not in known:
        message = f"there is no class {wanted!r}; the classes are {', '.join(known[:20])}"
        raise ConfigError(message, where="task.positive", remedy="name one of them")
    return known.index(str(wanted))


def positive_word(job: Job, classes: int) -> str | None:
    """Return the class that one-class metrics describe; None if they are means over all."""
    number = positive_class(job, classes)
    if number is None and classes == 2:
        number = 1
    known = target_words(job)
    return None if number is None else str(known[number] if number < len(known) else number)


def one_class_warnings(job: Job, labels: Tensor, classes: int, control: Exchange) -> list[str]:
    """Return warnings about the class that one-class metrics describe. Collective. ``labels``:
    int64 ``[n]`` of this rank's seeds for training; -1 = unknown."""
    task, word, texts = job.config.task, positive_word(job, classes), []
    if not isinstance(task, ClassTask) or task.several_labels or word is None:
        return []
    counts = control.sum(torch.bincount(labels[labels >= 0], minlength=classes))
    known = [str(each) for each in target_words(job)][:classes]  # later ones have no rows
    if int((counts > 0).sum()) == 1:
        only = int(counts.argmax())
        name = known[only] if known else only
        return [f"all training seeds are of class {name!r}: there is nothing to learn"]
    if known and word not in known:
        return []
    share = float(counts[known.index(word) if known else int(word)] / counts.sum().clamp(min=1))
    plain = not known or tuple(each.lower() for each in known) in _PLAIN_CLASSES
    if task.positive is None and not plain:
        (other,) = set(known) - {word}  # a word is taken unasked of two classes alone
        texts.append(
            f"average_precision, roc_auc and recall@K describe class {word!r}; set task.positive "
            f"to {other!r} if that is the class to find"
        )
    wanted = task.chosen_metric == "average_precision" or task.chosen_metric.startswith("recall@")
    if share > 0.5 and (wanted or not plain):
        texts.append(
            f"class {word!r}, which average_precision describes, is {share:.1%} of the training "
            "seeds, so the metric is high for any model"
        )
    return texts


def check(trained: CategoryNames, found: CategoryNames) -> None:
    """Check that categories have the same numbers as in the training. Raises DataError if one has
    another number."""
    for key in found.keys() & trained.keys():
        before, now = trained[key], found[key]
        for number, word in enumerate(now):
            if number < len(before) and before[number] == word:
                continue
            was = f"was {before[number]!r}" if number < len(before) else "did not exist"
            message = f"category {number} of {key} is {word!r}, but {was} in training"
            raise DataError(message, remedy=_AGAIN)


def check_transforms(trained: Mapping[str, Any], meta: PartitionMeta) -> None:
    """Check that features have the transforms of the training, if the partition has a manifest.
    Raises DataError if one has not."""
    if (manifest := meta.manifest) is None:
        return
    for key in manifest.features:
        if trained.get(key) != manifest.transforms.get(key):
            message = f"{key} has other transforms than in the training of the model"
            raise DataError(message, where=str(meta.directory), remedy=_AGAIN)
