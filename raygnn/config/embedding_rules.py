"""What ``model.embedding`` and ``model.kind: none`` must agree with."""

from __future__ import annotations

from collections.abc import Iterator

from raygnn.config.model import ModelConfig
from raygnn.config.problems import Problem, show
from raygnn.config.schema import Config, SamplingConfig
from raygnn.config.values import NO_LAYERS


def embeddings(config: Config) -> Iterator[Problem]:
    """What learned rows cannot have beside them, and what nothing would read."""
    yield from _no_layers(config)
    embedding = config.model.embedding
    if embedding is None:
        return
    key = ("model", "embedding")
    if config.task.of_graphs:
        yield Problem(
            key,
            f"embedding would be ignored: task.kind is {config.task.kind}, whose graphs have other "
            "nodes each",
            "remove model.embedding, or learn rows of categories (model.categories)",
        )
    if embedding.ntypes is not None and len(set(embedding.ntypes)) < len(embedding.ntypes):
        yield Problem(
            (*key, "ntypes"),
            f"{show(list(embedding.ntypes))} names a node type twice",
            "name each once",
        )
    if config.train.ema is not None:
        yield Problem(
            ("train", "ema"),
            "an average of all weights would move every learned row in every step, and a step of "
            "model.embedding moves only those that its batch reads",
            "remove train.ema, or model.embedding",
        )
    if config.comm.shard == "full":
        yield Problem(
            ("comm", "shard"),
            "full clips and checks gradients in its own way, which does not know of "
            "model.embedding",
            "set comm.shard to optimizer or none: learned rows are sharded in any case",
        )


def _no_layers(config: Config) -> Iterator[Problem]:
    """``model.kind: none`` has no layers, and so draws no neighbours."""
    model, task = config.model, config.task
    if model.kind != NO_LAYERS:
        return
    if task.of_graphs:
        yield Problem(
            ("model", "kind"),
            f"none is of nodes, and task.kind is {task.kind}",
            "choose another model.kind, or another task.kind",
        )
    sections = (
        ("model", model, ModelConfig, ("layers",)),
        ("sampling", config.sampling, SamplingConfig, ("fanout", "replace", "edge_weight")),
    )
    for name, section, kind, keys in sections:
        for key in keys:
            value, default = getattr(section, key), kind.model_fields[key].default
            if value != default:
                yield Problem(
                    (name, key),
                    f"{key} {show(value)} would be ignored: model.kind is none, which has no "
                    "layers and draws no neighbours",
                    f"remove {name}.{key}, or choose another model.kind",
                )
