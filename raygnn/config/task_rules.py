"""What the keys of the section ``task``, and those of ``model`` that only some tasks read, must
agree on."""

from __future__ import annotations

from collections.abc import Iterator

from raygnn.config import model_rules, several_rules
from raygnn.config.graph import ManyGraphs
from raygnn.config.model import ModelConfig
from raygnn.config.problems import Problem, show
from raygnn.config.schema import Config
from raygnn.config.task import (
    DISTANCES,
    EDGE_KINDS,
    GRAPH_KINDS,
    LINK_LOSSES,
    NODE_KINDS,
    NUMBER_LOSSES,
    RELATIONAL,
    NegativesConfig,
    SplitConfig,
    TaskConfig,
)
from raygnn.config.values import NO_LAYERS, Section

COMPLEX = ("complex", "rotate")  # whose vectors are of complex numbers

_LINKS = ("link_prediction",)

# Keys that only some kinds of tasks read: a value other than the default would be ignored.
_ONLY_FOR = {
    "target": tuple(k for k in (*NODE_KINDS, *EDGE_KINDS, *GRAPH_KINDS) if k not in _LINKS),
    "ntype": NODE_KINDS,
    "etype": EDGE_KINDS,
    "split": EDGE_KINDS,
    "exclude": EDGE_KINDS,
    "reverse": EDGE_KINDS,
    "negatives": _LINKS,
    "margin": _LINKS,
    "temperature": _LINKS,
}


def tasks(config: Config) -> Iterator[Problem]:
    """``task``, or each of ``tasks``, with itself, with ``graph`` and with ``guard``."""
    yield from _data(config) if config.tasks is None else several_rules.several(config)
    for name, one in config.by_task.items():
        for problem in (*_metric(one.task), *_only_for(one.task), *_loss(one), *_ends(one)):
            yield several_rules.of_task(problem, name, config) if name else problem


def _data(config: Config) -> Iterator[Problem]:
    task, graph = config.task, config.graph
    if task.of_graphs and graph is not None and not isinstance(graph, ManyGraphs):
        yield Problem(
            ("task", "kind"),
            f"{task.kind} is of many graphs, and graph.format {graph.format} is one",
            "set graph.format to graphs, or task.kind to node_classification",
        )
    if not task.of_graphs and isinstance(graph, ManyGraphs):
        yield Problem(
            ("task", "kind"),
            f"{task.kind} is of the {task.seeds} of one graph, and graph.format graphs gives many",
            "set task.kind to graph_classification or graph_regression",
        )
    if config.guard.on_bad_sample == "skip" and not task.of_graphs:
        yield Problem(
            ("guard", "on_bad_sample"),
            f"skip would be ignored: task.kind is {task.kind}, whose samples are {task.seeds}",
            "remove guard.on_bad_sample",
        )


def _metric(task: TaskConfig) -> Iterator[Problem]:
    if task.metric is not None and task.metric not in task.metrics:
        yield Problem(
            ("task", "metric"),
            f"{task.metric} does not suit task.kind {task.kind}",
            f"set it to {', '.join(task.metrics[:-1])} or {task.metrics[-1]}",
        )


def _ends(config: Config) -> Iterator[Problem]:
    if config.task.of_edges:
        yield from _edges(config.task)
    yield from _decoder(config)


def _only_for(task: TaskConfig) -> Iterator[Problem]:
    for key, kinds in _ONLY_FOR.items():
        value = getattr(task, key)
        if task.kind in kinds or value == TaskConfig.model_fields[key].default:
            continue
        text = key if isinstance(value, Section) else f"{key} {show(value)}"
        yield Problem(
            ("task", key),
            f"{text} would be ignored: task.kind is {task.kind}, which does not read it",
            f"remove task.{key}, or choose another task.kind",
        )


def _loss(config: Config) -> Iterator[Problem]:
    task, loss = config.task, config.task.loss
    suiting = LINK_LOSSES if task.of_links else () if task.classifies else NUMBER_LOSSES
    if loss is not None and loss not in suiting:
        why = (
            "classes have the cross entropy" if task.classifies else f"choose {', '.join(suiting)}"
        )
        yield Problem(
            ("task", "loss"),
            f"loss {loss} does not suit task.kind {task.kind}: {why}",
            "remove task.loss, or choose another task.kind"
            if task.classifies
            else f"set it to {' or '.join(suiting)}",
        )
    if not task.of_links:
        return
    distance = config.model.decoder in DISTANCES
    if (
        task.margin is not None
        and task.chosen_loss != "margin"
        and not (distance and task.chosen_loss in ("bce", "self_adversarial"))
    ):
        yield Problem(
            ("task", "margin"),
            f"margin {task.margin:g} would be ignored with task.loss {task.chosen_loss} and "
            f"model.decoder {show(config.model.decoder)}",
            "remove task.margin; it is of the loss margin, and of bce and self_adversarial with "
            "the decoders rotate and transe",
        )
    if task.temperature is not None and task.chosen_loss != "self_adversarial":
        yield Problem(
            ("task", "temperature"),
            f"temperature {task.temperature:g} would be ignored: task.loss is {task.chosen_loss}",
            "remove task.temperature, or set task.loss to self_adversarial",
        )


def _edges(task: TaskConfig) -> Iterator[Problem]:
    if task.reverse is not None and task.exclude != "reverse":
        yield Problem(
            ("task", "reverse"),
            f"reverse {task.reverse} would be ignored: task.exclude is {task.exclude}",
            "remove task.reverse, or set task.exclude to reverse",
        )
    split = task.split or SplitConfig()
    if split.val + split.test >= 1:
        yield Problem(
            ("task", "split", "val"),
            f"val {split.val:g} + test {split.test:g} leaves no edges to train on",
            "lower task.split.val or task.split.test until they sum to less than 1",
        )
    negatives, default = task.negatives, NegativesConfig.model_fields["number"].default
    if negatives.kind == "in_batch" and negatives.number != default:
        yield Problem(
            ("task", "negatives", "number"),
            f"number {negatives.number} would be ignored: of a step's edges all ends are taken "
            "(in_batch)",
            "remove task.negatives.number, or set task.negatives.kind to uniform",
        )


def _decoder(config: Config) -> Iterator[Problem]:
    task, model = config.task, config.model
    decoder = model.decoder
    if decoder is None:
        return
    if not task.of_edges:
        yield Problem(
            ("model", "decoder"),
            f"decoder {decoder} would be ignored: task.kind is {task.kind}",
            f"remove model.decoder, or set task.kind to {', '.join(EDGE_KINDS[:-1])} or "
            f"{EDGE_KINDS[-1]}",
        )
    elif not task.of_links and decoder != "mlp":
        yield Problem(
            ("model", "decoder"),
            f"{decoder} gives one score for an edge, and {task.kind} needs classes or numbers",
            "set model.decoder to mlp, or leave it out",
        )
    elif (
        model.relation is not None
        and decoder not in RELATIONAL
        and model.kind not in model_rules.RELATIONAL
    ):
        yield Problem(
            ("model", "decoder"),
            f"{decoder} does not read the relation that model.relation {model.relation} names",
            f"set model.decoder to one of {', '.join(RELATIONAL)}, or remove model.relation",
        )
    elif decoder in COMPLEX and _is_odd(model):
        yield Problem(
            ("model", "decoder"),
            f"{decoder} reads pairs of numbers, and the nodes' vectors are odd",
            "make model.hidden, or without layers model.embedding.dim, even",
        )


def _is_odd(model: ModelConfig) -> bool:
    width = model.hidden
    if model.kind == NO_LAYERS and model.embedding is not None:
        width = model.embedding.dim
    return ":" not in model.kind and width % 2 == 1
