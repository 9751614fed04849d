"""Explanations: how much each feature, node and edge contributes to a node's prediction.

The neighbourhood of the node is unrolled to its computation tree, in which no two edges share a
source: an edge contributes the sum of the inputs below it. Contributions are integrated gradients
from features of 0 (Sundararajan et al., "Axiomatic attribution for deep networks", ICML 2017), by
Captum: they add up to the difference between the prediction and its value for features of 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raygnn.graph.data import EdgeType
from raygnn.models.network import Stack
from raygnn.sampling.batch import Adjacency, Block
from raygnn.sampling.features import Inputs, row_width
from raygnn.serving.questions import LARGEST_TREE, RequestError

_EXACT = 1e-3  # error of the sum of contributions
_STEPS = 32, 512  # points of the integral, doubled until its sum is exact


@dataclass(frozen=True)
class Tree:
    """Computation tree of one node, or of several.

    Attributes:
        blocks: layers, the inputs' first. S inputs of a node type are copies of nodes.
        nodes: node type → int64 ``[S]``, number of the copied node in the neighbourhood.
        paths: node type → int64 ``[layers, S]``, number of the edge over which an input reaches
            each layer's outputs, from the last layer on; -1 = the output's own input.
        edges: edge type and numbers of source and target of each edge.
    """

    blocks: list[Block]
    nodes: dict[str, Tensor]
    paths: dict[str, Tensor]
    edges: list[tuple[EdgeType, int, int]]


def unroll(blocks: Sequence[Block], outputs: Mapping[str, int]) -> Tree:
    """Unroll sampled blocks.

    Args:
        blocks: blocks of a batch, the inputs' first.
        outputs: node type → number of nodes that the last block computes.

    Raises:
        RequestError: the tree would have more than `LARGEST_TREE` edges.
    """
    nodes = {t: torch.arange(count) for t, count in outputs.items()}
    paths = {t: torch.empty(0, count, dtype=torch.int64) for t, count in outputs.items()}
    edges: list[tuple[EdgeType, int, int]] = []
    grown: list[Block] = []
    for block in reversed(blocks):
        sources = {t: [own] for t, own in nodes.items()}
        ways = {t: [torch.vstack((p, p.new_full(p.shape[1:], -1)))] for t, p in paths.items()}
        adj: dict[EdgeType, Adjacency] = {}
        for etype, lists in block.adj.items():
            targets = nodes[etype[2]]
            degree = lists.degree[targets]
            indptr = F.pad(degree.cumsum(0), (1, 0))
            many = int(indptr[-1])
            if len(edges) + many > LARGEST_TREE:
                what = f"the computation tree has more than {LARGEST_TREE:,} edges"
                remedy = "sample fewer neighbours, such as 10 per layer"
                raise RequestError(what, where="fanout", remedy=remedy)
            parent = torch.repeat_interleave(torch.arange(len(targets)), degree)
            chosen = torch.arange(many) + (lists.indptr[targets] - indptr[:-1])[parent]
            begin = sum(map(len, sources[etype[0]]))
            adj[etype] = lists.with_edges(chosen, indptr, torch.arange(many) + begin)
            numbers = torch.arange(many) + len(edges)
            ends = zip(lists.src[chosen].tolist(), targets[parent].tolist())
            edges += [(etype, source, target) for source, target in ends]
            sources[etype[0]].append(lists.src[chosen])
            ways[etype[0]].append(torch.cat([paths[etype[2]][:, parent], numbers.unsqueeze(0)]))
        num_dst = {t: len(own) for t, own in nodes.items()}
        nodes = {t: torch.cat(parts) for t, parts in sources.items()}
        paths = {t: torch.cat(parts, 1) for t, parts in ways.items()}
        grown.insert(0, Block(adj, {t: len(own) for t, own in nodes.items()}, num_dst))
    return Tree(grown, nodes, paths, edges)


@dataclass(frozen=True)
class Contributions:
    """Contributions to the score of one node.

    Attributes:
        score: the model's output; without: its value if all features were 0.
        features: ``(node type, name)`` → contribution over all nodes.
        nodes: ``(node type, number)`` → contribution of the node's features.
        edges: ``(edge type, number of the source, of the target)`` → contribution of the inputs
            that reach the node over the edge.
    """

    score: float
    without: float
    features: dict[tuple[str, str], float]
    nodes: dict[tuple[str, int], float]
    edges: dict[tuple[EdgeType, int, int], float]


class Explainer:
    """Explains a model.

    Args:
        model: the task's model; it is copied, and computes in fp32.
        inputs: node type → arrays that the model reads.
        arrays: node type → name → array.
        columns: see `raygnn.graph.data.GraphData`.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Inputs],
        arrays: Mapping[str, Mapping[str, Tensor]],
        columns: Mapping[str, Sequence[str]],
    ):
        self._model = copy.deepcopy(model).float().eval()
        encoder = getattr(self._model, "encoder", self._model)
        self._stack = encoder if isinstance(encoder, Stack) else None
        self._names = {
            t: self._named(t, chosen, arrays[t], columns) for t, chosen in inputs.items()
        }

    def _named(
        self,
        ntype: str,
        chosen: Inputs,
        arrays: Mapping[str, Tensor],
        columns: Mapping[str, Sequence[str]],
    ) -> list[str]:
        """Return the name of each number of a type's input."""
        names: list[str] = []
        for name in (*chosen.plain, *chosen.scaled):
            width = row_width(arrays[name])
            numbered = [name] if width == 1 else [f"{name}[{k}]" for k in range(width)]
            names += columns.get(f"{ntype}/{name}", numbered)
        if chosen.learned:
            names += ["embedding"] * chosen.learned.dim
        if self._stack is not None:
            for name, width in self._stack.embedded_widths(ntype).items():
                names += [name] * width
        return names

    def __call__(
        self,
        given: tuple[Any, ...],
        outputs: Mapping[str, int],
        scores_of: Callable[[Tensor], Tensor],
    ) -> Contributions:
        """Explain the prediction of one node.

        Args:
            given: arguments of the model for its neighbourhood, on the CPU or a GPU.
            outputs: node type → 1 for the node's type, else 0.
            scores_of: outputs ``[1, K]`` → numbers ``[1, N]``; the largest is explained.

        Raises:
            RequestError: see `unroll`.
        """
        blocks, x, degree, _, categories = given
        tree = unroll([block.to(torch.device("cpu")) for block in blocks], outputs)
        if self._stack is not None:
            x = self._stack.embedded(x, categories)
        device = next(iter(x.values())).device
        x = {t: rows[tree.nodes[t].to(device)].float() for t, rows in x.items()}
        degree = {e: of[tree.nodes[e[2]].to(device)] for e, of in degree.items()}
        blocks = [_as_float(block.to(device)) for block in tree.blocks]

        def scores(*rows: Tensor) -> Tensor:
            found = scores_of(self._model(blocks, dict(zip(x, rows)), degree, None, None).float())
            return found[0] + 0 * sum(of.sum() for of in rows)  # all have a gradient

        with torch.no_grad():
            now = scores(*x.values())
            best = now.argmax()
            without = scores(*map(torch.zeros_like, x.values()))[best]
        found = _integrated(lambda *rows: scores(*rows)[best].reshape(1), list(x.values()))
        parts = {t: part.double().cpu() for t, part in zip(x, found)}
        return self._summed(tree, parts, float(now[best]), float(without))

    def _summed(
        self, tree: Tree, parts: Mapping[str, Tensor], now: float, without: float
    ) -> Contributions:
        features: dict[tuple[str, str], float] = {}
        nodes: dict[tuple[str, int], float] = {}
        over = torch.zeros(len(tree.edges), dtype=torch.float64)
        for ntype, part in parts.items():
            for name, value in zip(self._names[ntype], part.sum(0).tolist()):
                features[ntype, name] = features.get((ntype, name), 0) + value
            rows = part.sum(1)
            for node, value in zip(tree.nodes[ntype].tolist(), rows.tolist()):
                nodes[ntype, node] = nodes.get((ntype, node), 0) + value
            for path in tree.paths[ntype]:
                over.index_add_(0, path[path >= 0], rows[path >= 0])
        edges: dict[tuple[EdgeType, int, int], float] = {}
        for edge, value in zip(tree.edges, over.tolist()):
            edges[edge] = edges.get(edge, 0) + value
        return Contributions(now, without, features, nodes, edges)


def _as_float(block: Block) -> Block:
    adj = {
        e: lists if lists.rows is None else lists.with_rows(lists.rows.float())
        for e, lists in block.adj.items()
    }
    return replace(block, adj=adj)


def _integrated(score: Callable[..., Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the integrated gradients of a score, with the shapes of its arguments."""
    try:
        from captum.attr import IntegratedGradients
    except ImportError as error:
        what, remedy = f"Captum is not installed: {error}", 'pip install "raygnn[explain]"'
        raise RequestError(what, where="explain", remedy=remedy) from None

    def batched(*given: Tensor) -> Tensor:  # Captum's first dimension is its points
        return score(*(one[0] for one in given))

    captum, (steps, most) = IntegratedGradients(batched), _STEPS
    while True:
        found, missed = captum.attribute(
            tuple(one.unsqueeze(0) for one in rows),
            n_steps=steps,
            internal_batch_size=1,
            return_convergence_delta=True,
        )
        if float(missed.abs()) <= _EXACT or steps >= most:
            return [one[0].detach() for one in found]
        steps *= 2


def largest(values: Mapping[Any, float], k: int) -> list[tuple[Any, float]]:
    """Return the ``k`` entries of the largest magnitude, the largest first."""
    return sorted(values.items(), key=lambda entry: abs(entry[1]), reverse=True)[:k]
