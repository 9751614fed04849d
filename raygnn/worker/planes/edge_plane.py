"""The data plane of a graph whose edges are the seeds."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raygnn.config.task import DISTANCES, EdgeTaskConfig, LinkPrediction
from raygnn.graph.data import EdgeTarget, EdgeType, etype_str
from raygnn.graph.staging.shard import NUMBER, SPLIT
from raygnn.models.decoders import Decoder, make_decoder
from raygnn.models.heads import EdgeHead, EdgeModel
from raygnn.models.registry import build_edge_model
from raygnn.sampling.features import FEATURES, FeatureStore, with_room
from raygnn.sampling.loader import BatchMaker
from raygnn.sampling.negatives import ENDS, End, make_negatives
from raygnn.sampling.seeds import Edges, EdgeSeeds, TaskSeeds, in_order, known
from raygnn.tasks.lightning_modules import EdgeTask, LinkTask, Task
from raygnn.tasks.losses import make_link_loss, make_loss
from raygnn.tasks.metrics import measure
from raygnn.tasks.ranking import Ranking
from raygnn.worker.job import SPLITS, Request
from raygnn.worker.planes.partition_plane import PartitionPlane
from raygnn.worker.planes.plane import build, map_shard
from raygnn.worker.planes.prediction_rows import (
    NO_SPLIT,
    EdgePredictions,
    Embedded,
    chunk_rows,
    embedded_nodes,
    pick_ntype,
)
from raygnn.worker.planes.vocabulary import count_relations

_ORIGINAL = "original"


class EdgePlane(PartitionPlane):
    """A shard of one graph, whose edges are the seeds.

    Messages pass along the edges that are not for validation or test (``shard``); what is to be
    predicted are the edges of one type, all of them (``edges``).
    """

    @property
    def target(self) -> EdgeTarget:
        assert self.job.edges is not None
        return self.job.edges

    @property
    def etype(self) -> EdgeType:
        return self.target.etype

    @property
    def of(self) -> str:
        """See `PartitionPlane`."""
        return etype_str(self.etype)

    @property
    def _ntypes(self) -> dict[End, str]:
        return {"source": self.etype[0], "target": self.etype[2]}

    @cached_property
    def edges(self) -> Edges:
        """All edges of the type. Collective."""
        target, task = self.target, self.config.task
        arrays = [target.relation, None if task.of_links else task.target]
        names = [name for name in arrays if name is not None]
        shard = map_shard(self.job, self.ranks, names, replicated=False, split=target.split)
        return Edges(shard, self.control, self.etype)

    @cached_property
    def labels(self) -> Tensor:
        """Of the own edges: classes, int64 ``[own]``, or numbers, float32 ``[own, …]``; -1 and NaN
        where the data have none and are only asked about."""
        task, request, own = self.config.task, self.job.request, len(self.edges.src)
        if task.target not in self.edges:
            assert not self.config.trains
            if task.classifies:
                return torch.full((own,), -1)
            width = (request.sizes or {}).get(self.counted("numbers"), 1) if request else 1
            return torch.full((own, width), float("nan"))
        stored = torch.from_numpy(np.array(self.edges.column(task.target)))
        return stored.long().flatten() if task.classifies else stored.float()

    @cached_property
    def relations(self) -> int:
        """How many there are, at least 1. Collective."""
        name = self.target.relation
        if name is None:
            return 1
        count = count_relations(self.etype, name, self.edges.column(name), self.control)
        return self.settle("relations of the edges to predict", count)

    def task(self) -> EdgeTask:
        """See `Plane`."""
        config, etype = self.config, self.etype
        first, *others = self.ntypes
        schema, kind = self.schema(first, config.model.hidden, tuple(others)), self.decoder
        out, relations = None if config.task.of_links else self.out_features, self.relations
        model = build(
            config, lambda: build_edge_model(config.model, schema, etype, kind, relations, out)
        )
        return self._finish(self.task_of(model))

    def task_of(self, model: nn.Module | None) -> EdgeTask:
        """The task with a model."""
        config = self.config
        given = model or nn.Identity()
        more = (config.train, self.ranks.world.size, self.out_features, self.job.planned)
        if isinstance(config.task, LinkPrediction):
            loss = make_link_loss(config.task, distance=self.decoder in DISTANCES)
            return LinkTask(given, loss, *more)
        return EdgeTask(given, make_loss(config.task), *more)

    @cached_property
    def out_features(self) -> int:
        """Classes or numbers of an edge; 1 of links. Collective."""
        task = self.config.task
        if task.classifies:
            return self.classes(self.labels)
        if task.of_links:
            return 1
        numbers = self.control.max(self.labels[:1].numel() if len(self.labels) else 1)
        return self.settle("numbers", numbers)

    @property
    def ntypes(self) -> list[str]:
        """The node types whose outputs are needed."""
        return list(dict.fromkeys(self._ntypes.values()))

    @property
    def decoder(self) -> str:
        """Its kind."""
        links = "distmult" if self.target.relation is not None else "dot"
        return self.config.model.decoder or (links if self.config.task.of_links else "mlp")

    def head(self, width: int) -> EdgeHead:
        """See `MultitaskModel`."""
        model, links = self.config.model, self.config.task.of_links
        decoder = make_decoder(model, self.decoder, width, self.relations, self.out_features)
        return EdgeHead(self.etype, decoder, links=links)

    def batches(self, task: Task) -> BatchMaker:
        """See `Plane`."""
        assert isinstance(task.model, EdgeModel)
        seeds, own, share = self.seeds()
        return self.make_batches(task.model.encoder, seeds, own, share)

    def seeds(self) -> tuple[TaskSeeds, dict[str, np.ndarray], int]:
        """See `NodePlane`."""
        config, edges = self.config.task, self.edges
        assert isinstance(config, EdgeTaskConfig)
        own = self._chosen("train")
        ends: dict[End, np.ndarray] = {"source": edges.src[own], "target": edges.dst[own]}
        negatives = None
        if isinstance(config, LinkPrediction):
            seed = self.config.train.seed
            negatives = make_negatives(
                config.negatives, self.shard, self.control, self._ntypes, seed, ends
            )
        seeds = EdgeSeeds(
            edges.over(self.ranks.data),
            in_order(edges, own),
            exclude=None if config.exclude == "none" else config.exclude,
            reverse=self.target.split.reverse,
            target=None if config.of_links else config.target,
            relation=self.target.relation,
            negatives=negatives,
        )
        nodes: dict[str, np.ndarray] = {}
        for end, ntype in self._ntypes.items():
            nodes[ntype] = np.union1d(nodes.get(ntype, ends[end][:0]), ends[end])
        return self.assigned(seeds), nodes, 2 * self.batch_share

    def evaluate(self, task: Task, split: str) -> dict[str, float]:
        """See `Plane`."""
        model, own = task.model, self._chosen(split)
        assert isinstance(model, EdgeModel)
        rows = self._rows(model)
        if self.config.task.of_links:
            decoder = copy.deepcopy(model.decoder).float().eval()
            sources = self._sources({FEATURES: rows["source"]})
            return self._ranking.metrics(
                decoder,
                own,
                lambda some: sources(some)[FEATURES],
                rows,
                self.ranks.device,
            )
        outputs, _ = self._outputs(model, rows, own)
        return measure(outputs, self.labels[torch.from_numpy(own)], self.config.task, self.control)

    def embed(self, task: Task, request: Request) -> Iterator[Embedded]:
        """See `Plane`: the rows of nodes that the decoder is given."""
        model = task.model
        assert isinstance(model, EdgeModel)
        ntype = pick_ntype(request.ntype, self.ntypes)
        rows = self.inference.represent(model.encoder, [ntype])[ntype]
        yield from embedded_nodes(self.job, request, self.shard, rows, ntype)

    def predict(self, task: Task, request: Request) -> Iterator[EdgePredictions]:
        """See `Plane`."""
        model, edges, target = task.model, self.edges, self.target
        split = request.split
        assert isinstance(model, EdgeModel)
        own = np.arange(len(edges.src)) if split == "all" else self._in_split(split)
        if not self.control.max(len(own)):
            return
        own = own[np.argsort(edges.column(NUMBER)[own])]
        outputs, sources = self._outputs(model, self._rows(model), own)
        size = chunk_rows(outputs.shape[1])
        first = self.shard.first(self.etype[2])
        for start in range(0, len(own), size):
            some = own[start : start + size]
            targets = None
            if not self.config.task.of_links:
                targets = self.labels[torch.from_numpy(some)]
            yield EdgePredictions(
                ids=edges.column(NUMBER)[some],
                outputs=outputs[start : start + size],
                targets=targets,
                splits=np.full(len(some), NO_SPLIT, np.int8)
                if self._unsplit
                else edges.column(SPLIT)[some],
                sources=sources[start : start + size].numpy(),
                ends=self.shard.original[self.etype[2]][edges.dst[some] - first].astype(np.int64),
                relations=None
                if target.relation is None
                else edges.column(target.relation)[some].astype(np.int64),
            )

    def count(self, split: str) -> int:
        """See `Plane`."""
        return int(self.control.sum(torch.tensor(len(self._chosen(split)))))

    @property
    def _unsplit(self) -> bool:
        """Whether nobody says what the edges are for: of data that were not trained on."""
        request = self.job.request
        others = request is not None and request.sizes is not None
        return others and self.target.split.shares == (0.0, 0.0)

    def _in_split(self, split: str) -> np.ndarray:
        """Which of the own edges are in a split."""
        if self._unsplit:
            return np.empty(0, np.int64)
        return self.edges.chosen(SPLITS.index(split))

    def _chosen(self, split: str) -> np.ndarray:
        """Those of them that have a target."""
        own = self._in_split(split)
        if self.config.task.of_links:
            return own
        return own[known(self.labels[torch.from_numpy(own)]).numpy()]

    def _rows(self, model: EdgeModel) -> dict[str, Tensor]:
        """End → outputs for the owned nodes of its type, float32 ``[owned, D]``. Collective."""
        ntypes = self._ntypes
        found = self.inference.represent(model.encoder, self.ntypes)
        return {end: found[ntype] for end, ntype in ntypes.items()}

    def _sources(self, columns: Mapping[str, Tensor]) -> Any:
        """What gives rows of the sources of own edges, by their places. Collective.

        Args:
            columns: name → of the owned nodes of the source type, ``[owned, …]``.
        """
        ntype, shard = self.etype[0], self.shard
        table = {n: with_room(c, shard.num_nodes(ntype)) for n, c in columns.items()}
        bounds = {ntype: shard.bounds[ntype]}
        store = FeatureStore(bounds, self.control, {ntype: table})
        return lambda some: store.gather({ntype: self.edges.src[some]})[ntype]

    def _outputs(
        self, model: EdgeModel, rows: Mapping[str, Tensor], own: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Outputs of own edges, float32 ``[n, out_features]``, and the user's numbers of their
        sources, int64 ``[n]``. Collective."""
        edges, device, target = self.edges, self.ranks.device, self.target
        decoder: Decoder = copy.deepcopy(model.decoder).float().eval()
        numbers = torch.from_numpy(self.shard.original[self.etype[0]].astype(np.int64))
        sources = self._sources({FEATURES: rows["source"], _ORIGINAL: numbers})
        first = self.shard.first(self.etype[2])
        size = chunk_rows(rows["target"].shape[1])
        outputs, originals = [], []
        for number in range(-(-self.control.max(len(own)) // size)):
            some = own[number * size : (number + 1) * size]
            found = sources(some)
            relation = None
            if target.relation is not None:
                given = edges.column(target.relation)[some].astype(np.int64)
                relation = torch.from_numpy(given).to(device)
            ends = rows["target"][torch.from_numpy(edges.dst[some] - first)]
            with torch.no_grad():
                out = decoder(found[FEATURES].to(device), ends.to(device), relation)
            outputs.append(out.float().cpu())
            originals.append(found[_ORIGINAL])
        return torch.cat(outputs), torch.cat(originals)

    @cached_property
    def _ranking(self) -> Ranking:
        ntypes = self._ntypes
        bounds: dict[str, np.ndarray] = {end: self.shard.bounds[ntypes[end]] for end in ENDS}
        return Ranking(self.edges, bounds, self.target.relation, self.relations)
