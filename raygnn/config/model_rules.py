"""What the keys of the section ``model`` must agree on, with each other and with the task."""

from __future__ import annotations

from collections.abc import Iterator

from raygnn.config.model import ModelConfig
from raygnn.config.problems import Problem, show
from raygnn.config.task import TaskConfig
from raygnn.config.values import MODEL_FAMILIES, NO_LAYERS, class_problem

ATTENTION = ("gat", "gatv2", "han")
HEADS = (*ATTENTION, "hgt")
RELATIONAL = ("rgcn",)

# Keys of a section that only some kinds read: a value other than the default would be ignored.
_ONLY_FOR = {
    "heads": HEADS,
    "out_heads": ATTENTION,
    "attn_dropout": ATTENTION,
    "aggregator": ("sage",),
    "regularizer": RELATIONAL,
    "bases": RELATIONAL,
    "mean_over": RELATIONAL,
    "hidden": MODEL_FAMILIES,
    "dropout": MODEL_FAMILIES,
    "input_dropout": MODEL_FAMILIES,
    "kernels": MODEL_FAMILIES,
    "categories": MODEL_FAMILIES,
    "residual": MODEL_FAMILIES,
    "norm": MODEL_FAMILIES,
    "activation": MODEL_FAMILIES,
    "readout": MODEL_FAMILIES,
    "recompute": MODEL_FAMILIES,
}


def network(model: ModelConfig, task: TaskConfig) -> Iterator[Problem]:
    """Keys that would be ignored, widths that do not divide, a class that is none."""
    for key, kinds in _ONLY_FOR.items():
        value, default = getattr(model, key), ModelConfig.model_fields[key].default
        if model.kind not in kinds and value != default:
            yield Problem(
                ("model", key),
                f"{key} {show(value)} would be ignored: only {' and '.join(kinds)} have {key}, "
                f"and model.kind is {model.kind}",
                f"remove model.{key}, or choose another model.kind (your own class has model.args)",
            )
    for key, of_graphs, why in (
        ("readout", True, "only tasks on whole graphs read it"),
        ("out_heads", False, "every layer is hidden in tasks on whole graphs"),
    ):
        value, default = getattr(model, key), ModelConfig.model_fields[key].default
        if model.kind in _ONLY_FOR[key] and task.of_graphs != of_graphs and value != default:
            yield Problem(
                ("model", key),
                f"{key} {show(value)} would be ignored: {why}, and task.kind is {task.kind}",
                f"remove model.{key}, or choose another task.kind",
            )
    for name in sorted(set(model.feature_names) & set(model.categories)):
        yield Problem(
            ("model", "categories"),
            f"{name} is in model.features and in model.categories",
            "keep it in one of them: categories are embedded, features are taken as numbers",
        )
    if model.kind in HEADS and model.hidden % model.heads:
        yield Problem(
            ("model", "hidden"),
            f"hidden {model.hidden} does not divide into {model.heads} heads",
            "make model.hidden a multiple of model.heads: it is the width over all heads",
        )
    yield from _relations(model, task)
    if model.kind in (*MODEL_FAMILIES, NO_LAYERS):
        if model.args:
            yield Problem(
                ("model", "args"),
                f"{model.kind} takes no args, got {', '.join(map(show, model.args))}",
                "set the keys of the model section; args are for package.module:Class",
            )
    elif problem := class_problem(model.kind):
        yield Problem(("model", "kind"), f"{show(model.kind)}: {problem[0]}", problem[1])


def _relations(model: ModelConfig, task: TaskConfig) -> Iterator[Problem]:
    if model.regularizer == "none" and model.bases != ModelConfig.model_fields["bases"].default:
        yield Problem(
            ("model", "bases"),
            f"bases {model.bases} would be ignored: with model.regularizer none each relation has "
            "a matrix of its own",
            "remove model.bases, or set model.regularizer to basis or block",
        )
    if model.relation is None:
        return
    if task.of_graphs:
        yield Problem(
            ("model", "relation"),
            f"relation {show(model.relation)} would be ignored: in tasks on whole graphs an edge's "
            "relation is its type",
            "remove model.relation, or give each relation an edge type",
        )
    elif model.kind not in RELATIONAL and task.kind.startswith("node"):
        yield Problem(
            ("model", "relation"),
            f"relation {show(model.relation)} would be ignored: only {' and '.join(RELATIONAL)} "
            f"weigh edges by it, and model.kind is {model.kind}",
            "remove model.relation, or choose another model.kind",
        )
