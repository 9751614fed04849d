"""Data plane of a graph whose edges are the seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raygnn.config.task import DISTANCES, EdgeTaskConfig, LinkPrediction, NegativesConfig
from raygnn.graph.data import TRAINING, EdgeTarget, EdgeType, etype_str
from raygnn.graph.staging.shard import NUMBER, SPLIT, EdgeReads
from raygnn.models.decoders import Decoder, make_decoder
from raygnn.models.heads import EdgeHead, EdgeModel
from raygnn.models.registry import build_edge_model
from raygnn.sampling.batch import Part
from raygnn.sampling.exchange import ask_owners
from raygnn.sampling.loader import BatchMaker
from raygnn.sampling.negatives import (
    ENDS,
    End,
    ListedNegatives,
    Negatives,
    find_lists,
    gather_known,
    make_negatives,
)
from raygnn.sampling.seeds import (
    JOINED,
    EdgeSeeds,
    OwnedEdges,
    SeedSlice,
    TaskSeeds,
    in_order,
    known,
)
from raygnn.tasks.lightning_modules import TaskModule
from raygnn.tasks.losses import make_link_loss
from raygnn.tasks.ranking import (
    Candidates,
    Ranking,
    metrics_of_lists,
    metrics_of_ranks,
    ranked_above,
    ranked_among_drawn,
)
from raygnn.worker.job import RELATIONS, SPLITS, Request
from raygnn.worker.planes.partition_plane import PartitionPlane, map_shard, union
from raygnn.worker.planes.plane import Kept, build, loss_of, make_task
from raygnn.worker.planes.prediction_rows import NO_SPLIT, Predictions, chunk_rows
from raygnn.worker.planes.seed_times import EdgeHistory, times_of
from raygnn.worker.planes.vocabulary import count_numbers, one_class_warnings


class EdgePlane(PartitionPlane):
    """A shard of one graph, whose edges are the seeds.

    Messages pass along the edges that are not held out (``shard``). Seeds are edges of one type;
    ``edges`` holds all edges of the type.
    """

    @property
    def target(self) -> EdgeTarget:
        assert self.job.goal.edges is not None
        return self.job.goal.edges

    @property
    def etype(self) -> EdgeType:
        return self.target.etype

    @property
    def seed_type(self) -> str:
        return etype_str(self.etype)

    @property
    def _ntypes(self) -> dict[End, str]:
        return {"source": self.etype[0], "target": self.etype[2]}

    @cached_property
    def edges(self) -> OwnedEdges:
        """Edges of the type that this rank owns. Collective."""
        target, task = self.target, self.config.task
        read = self.config.model.decoder_feature_names
        arrays = [target.relation, None if task.of_links else task.target, self.when]
        shard = map_shard(
            self.job,
            self.ranks,
            reads=EdgeReads(read, self.config.arithmetic.dtype),
            edge_arrays=[name for name in arrays if name is not None],
            replicated=False,
            split=target.split,
        )
        edges = OwnedEdges(shard, self.control, self.etype)
        if self.time is not None:
            stored = edges.column(self.time) if self.time in edges else None
            times = times_of(stored, f"edge type {self.seed_type!r}", self.time)
            self.clock.check(times, self.seed_type, self.time)
            latest = int(times.max()) if len(times) else np.iinfo(np.int64).min
            self.sizes.latest[self.job.task] = self.control.max(latest)
        return edges

    @property
    def when(self) -> str | None:
        """Array of the edges' times, also if all seeds have one; None = there is none."""
        time = self.config.sampling.time
        return None if time is None else time.seeds or time.edges

    @property
    def _width(self) -> int:
        model = self.config.model
        if model.pair_history:
            return EdgeHistory.width
        return self.edges.column(JOINED).shape[1] if model.decoder_feature_names else 0

    def kinds(self, some: Any = slice(None)) -> np.ndarray | None:
        """Return the relations of owned edges, int64 ``[n]``; None if the edges have none.
        ``some``: positions of the edges."""
        name = self.target.relation
        return None if name is None else self.edges.column(name)[some].astype(np.int64)

    @cached_property
    def labels(self) -> Tensor:
        """Labels of the owned edges: see `labels_of`."""
        name, edges = self.config.task.target, self.edges
        stored = torch.from_numpy(np.array(edges.column(name))) if name in edges else None
        return self.labels_of(stored, len(edges.src))

    @cached_property
    def relations(self) -> int:
        """Number of relations, at least 1. Collective."""
        name = self.target.relation
        if name is None:
            return 1
        count = count_numbers(self.etype, name, self.edges.column(name), self.control)
        return self.resolve(RELATIONS, count)

    def task(self) -> TaskModule:
        config, etype = self.config, self.etype
        first, *others = self.ntypes
        schema, kind = self.schema(first, config.model.hidden, tuple(others)), self.decoder
        out, relations = None if config.task.of_links else self.out_features, self.relations
        model = build(
            config,
            lambda: build_edge_model(
                config.model, schema, etype, kind, relations, out, self._width
            ),
        )
        return self._finish(self.task_of(model))

    def task_of(self, model: nn.Module | None) -> TaskModule:
        """Return the task with a model."""
        task = self.config.task
        loss: Any
        if isinstance(task, LinkPrediction):
            loss = make_link_loss(task, distance=self.decoder in DISTANCES)
        else:
            loss = loss_of(self.job, self.ranks, self._trained, self.out_features)
        return make_task(self.job, self.ranks, model or nn.Identity(), loss, self.out_features)

    @cached_property
    def out_features(self) -> int:
        """Number of classes, or width of a regression target; 1 for links. Collective."""
        task = self.config.task
        if task.classifies:
            return self.classes(self.labels)
        if task.of_links:
            return 1
        numbers = self.control.max(self.labels[:1].numel() if len(self.labels) else 1)
        return self.resolve("numbers", numbers)

    @property
    def ntypes(self) -> list[str]:
        """Node types with outputs."""
        return list(dict.fromkeys(self._ntypes.values()))

    @property
    def decoder(self) -> str:
        """Kind of the decoder."""
        links = "distmult" if self.target.relation is not None else "dot"
        return self.config.model.decoder or (links if self.config.task.of_links else "mlp")

    def head(self, width: int) -> EdgeHead:
        """See `MultitaskModel`."""
        model, links = self.config.model, self.config.task.of_links
        decoder = make_decoder(
            model, self.decoder, width, self.relations, self.out_features, self._width
        )
        return EdgeHead(self.etype, decoder, links=links)

    def batches(self, task: TaskModule) -> BatchMaker:
        assert isinstance(task.model, EdgeModel)
        seeds, own, share = self.seeds()
        return self.make_batches(task.model.encoder, seeds, own, share)

    def warnings(self) -> list[str]:
        """See `Plane`; whether messages reach the seeds is checked at the edges' targets."""
        own = self._chosen("train")
        times = None
        if self.time is not None:
            times = np.asarray(self.edges.column(self.time), np.int64)[own]
        reached = self.unreached(self.etype[2], self.edges.dst[own], times)
        if not self.config.task.classifies:
            return reached
        labels = self.labels[own]
        return [*reached, *one_class_warnings(self.job, labels, self.out_features, self.control)]

    def seeds(self) -> tuple[TaskSeeds, dict[str, np.ndarray], int]:
        """See `NodePlane`."""
        config, edges = self.config.task, self.edges
        assert isinstance(config, EdgeTaskConfig)
        own = self._chosen("train")
        ends: dict[End, np.ndarray] = {"source": edges.src[own], "target": edges.dst[own]}
        negatives, listed = None, self._listed.get(TRAINING)
        if isinstance(config, LinkPrediction) and config.negatives.kind != "none":
            seed = self.config.train.seed
            number = 0 if self.time is None else config.negatives.each
            known = None
            if config.filters and self.time is None:
                known = gather_known(ends, self.kinds(own), self.relations, self.control)
            given = config.negatives, self.shard, self.control, self._ntypes, seed, ends, number
            negatives = make_negatives(*given, known, self.relations)
        elif listed is not None:
            listed.check_all_have(own, edges, self.control)
        positions = in_order(edges, own)
        seeds = self._seeds(edges.over(self.ranks.data), positions, negatives, listed)
        return self.assigned(seeds), self._ends(own), 2 * self.batch_share

    @cached_property
    def _listed(self) -> dict[str, ListedNegatives]:
        """Lists of `Job.negatives` for this rank's edges, by use. Collective."""
        edges, kinds = self.edges, self.kinds()
        found: dict[int, ListedNegatives] = {}
        for name, lists in self.job.negatives.items():
            if lists.pairs is not None and (name == TRAINING or self.time or self.target.relation):
                message = "it has no lists for each edge, as training, times and relations need"
                remedy = "provide source_neg or target_neg for each edge"
                raise lists.error(message, remedy)
            if id(lists) not in found:
                listed = find_lists(lists, self.shard, self.control, self._ntypes, edges, kinds)
                if self.time is None:  # such edges may exist at other times
                    self._ranking.check_absent(listed)
                found[id(lists)] = listed
        return {name: found[id(lists)] for name, lists in self.job.negatives.items()}

    def _seeds(
        self,
        edges: OwnedEdges,
        positions: np.ndarray,
        negatives: Negatives | None = None,
        listed: ListedNegatives | None = None,
    ) -> EdgeSeeds:
        config = self.config.task
        assert isinstance(config, EdgeTaskConfig)
        # with times, an edge sees neither itself nor its reverse anyway
        exclude = None if config.exclude == "none" or self.config.ordered else config.exclude
        return EdgeSeeds(
            edges if listed is None else edges.listing(listed.rows),
            positions,
            exclude=exclude,
            reverse=self.target.split.reverse,
            target=None if config.of_links or config.target not in edges else config.target,
            relation=self.target.relation,
            negatives=negatives,
            listed=listed,
            time=self.time,
            history=self.history.features if self.config.model.pair_history else None,
        )

    def evaluate(self, task: TaskModule, split: str, keep: Kept | None = None) -> dict[str, float]:
        model, own, links = task.model, self._chosen(split), self.config.task
        assert isinstance(model, EdgeModel)
        if not isinstance(links, LinkPrediction):
            outputs = self._outputs(model, own, again=self.validates(split))
            return self.measured(outputs, self.labels[torch.from_numpy(own)], task.loss, keep)
        listed = self._listed.get(split)
        if listed is not None:
            own = own[listed.rows[own] >= 0]
            if not self.control.max(len(own)):
                message = f"no edge of the split {split!r} is in it"
                raise listed.lists.error(message, "list the edges to rank")
        if self.time is not None:
            return self._timed_metrics(model, own, listed or self._evaluation)
        nodes = self.read(split)
        rows = self.inference.represent(model.encoder, nodes, again=self.validates(split))
        decoder = copy.deepcopy(model.decoder).float().eval()
        owned = {str(end): rows[t].select(nodes[t]) for end, t in self._ntypes.items()}
        if listed is not None and listed.lists.pairs is not None:
            given = decoder, own, listed.global_ids(), owned, self.ranks.device
            return self._ranking.metrics_among(*given)
        found: dict[str, float] = {}
        if links.ranks_edges:
            found = self._ranking.metrics(
                decoder,
                own,
                lambda some: self._of_sources(some, rows[self.etype[0]].select),
                owned,
                self.ranks.device,
                self._candidates(own, listed),
                [end for end in ENDS if links.negatives.ends in ("both", end)],
            )
        if links.tops:
            found |= self._ranking.metrics_per_source(
                decoder, SPLITS.index(split), owned, self.ranks.device, links.tops
            )
        return found

    @cached_property
    def _evaluation(self) -> Negatives | None:
        """Samples the ranking candidates of each edge, equal in each evaluation; None = all nodes
        are candidates. Collective."""
        task, seed = self.config.task, self.config.train.seed
        assert isinstance(task, LinkPrediction)
        number, kind = task.ranking.candidates, NegativesConfig(ends=task.negatives.ends)
        if self.time is not None:
            number = number if isinstance(number, int) else 1
        if not isinstance(number, int):
            return None
        return make_negatives(kind, self.shard, self.control, self._ntypes, seed, {}, number)

    def _candidates(self, own: np.ndarray, listed: ListedNegatives | None) -> Candidates | None:
        if listed is not None:
            return Candidates(listed.rows[own], listed.nodes, listed.width, False)
        if (draw := self._evaluation) is None:
            return None
        numbers = self.edges.column(NUMBER)[own].astype(np.int64)
        return Candidates(numbers, lambda of, _: draw.draw_each(0, 0, of), draw.number, True)

    def read(self, split: str) -> dict[str, np.ndarray]:
        """Return node type → global ids of the nodes that an evaluation needs: for links all owned
        ones, which are ranked, else the ends of the split's edges."""
        if not self.config.task.of_links:
            return self._ends(self._chosen(split))
        shard = self.shard
        return {t: shard.first(t) + np.arange(shard.owned(t)) for t in self.ntypes}

    def _ends(self, own: np.ndarray) -> dict[str, np.ndarray]:
        """Return node type → unique global ids of the ends of owned edges."""
        source, target = self._ntypes.values()
        return union([{source: self.edges.src[own]}, {target: self.edges.dst[own]}])

    def predict(self, task: TaskModule, request: Request) -> Iterator[Predictions]:
        model, edges, split = task.model, self.edges, request.split
        assert isinstance(model, EdgeModel)
        own = np.arange(len(edges.src)) if split == "all" else self._in_split(split)
        kind, when = f"edge type {self.seed_type!r}", self.when
        times = None
        if when is not None and (when in edges or request.since is not None):
            times = times_of(edges.column(when) if when in edges else None, kind, when)
        if times is not None and (since := self.clock.asked("since")) is not None:
            own = own[times[own] >= since]
        if not self.control.max(len(own)):
            return
        own = own[np.argsort(edges.column(NUMBER)[own])]
        outputs = self._outputs(model, own)

        def original(ntype: str, ids: np.ndarray) -> np.ndarray:
            rows = ids - self.shard.first(ntype)
            return self.shard.original[ntype][rows].astype(np.int64)

        source, end = self._ntypes.values()
        sources = self._of_sources(own, lambda ids: torch.from_numpy(original(source, ids)))
        splits = np.full(len(edges.src), NO_SPLIT, np.int8)
        splits = splits if self._unsplit else edges.column(SPLIT)
        size = chunk_rows(outputs.shape[1])
        for start in range(0, len(own), size):
            some = own[start : start + size]
            links = self.config.task.of_links
            yield Predictions(
                ids=edges.column(NUMBER)[some],
                outputs=outputs[start : start + size],
                targets=None if links else self.labels[torch.from_numpy(some)],
                splits=splits[some],
                beside={
                    "source": sources[start : start + size].numpy(),
                    "target": original(end, edges.dst[some]),
                    "relation": self.kinds(some),
                    "time": None if times is None else times[some],
                },
            )

    @property
    def _unsplit(self) -> bool:
        """True if the edges of a request's other data have no splits."""
        request = self.job.request
        others = request is not None and request.sizes is not None
        return others and self.target.split.shares == (0.0, 0.0)

    def _in_split(self, split: str) -> np.ndarray:
        if self._unsplit:
            return np.empty(0, np.int64)
        return self.edges.chosen(SPLITS.index(split))

    def _chosen(self, split: str) -> np.ndarray:
        own = self._in_split(split)
        if self.config.task.of_links:
            return own
        return own[known(self.labels[torch.from_numpy(own)]).numpy()]

    def _of_sources(self, some: np.ndarray, rows_of: Callable[[np.ndarray], Tensor]) -> Tensor:
        """Fetch rows of the sources of owned edges from their owners. Collective."""
        ids, place = np.unique(self.edges.src[some], return_inverse=True)
        bounds = self.shard.bounds[self.etype[0]]
        (rows,) = ask_owners(ids, bounds, self.control, lambda own: [rows_of(own)])
        return rows[torch.from_numpy(place)]

    def _outputs(self, model: EdgeModel, own: np.ndarray, *, again: bool = False) -> Tensor:
        """Return outputs of owned edges, float32 ``[n, out_features]``; of edges with times each
        from all that was before it. Collective. ``again``: see `Inference.represent`."""
        edges, device = self.edges, self.ranks.device
        if self.time is not None:
            links = self.config.task.of_links
            found = self._decoded(model, own + self.edges.first, self._at_once)
            return torch.cat([out[0].unsqueeze(1) if links else out for out in found])
        rows = self.inference.represent(model.encoder, self._ends(own), again=again)
        decoder: Decoder = copy.deepcopy(model.decoder).float().eval()
        size = chunk_rows(rows[self.etype[2]].rows.shape[1])
        outputs = []
        for number in range(-(-self.control.max(len(own)) // size)):
            some = own[number * size : (number + 1) * size]
            sources = self._of_sources(some, rows[self.etype[0]].select)
            kinds = self.kinds(some)
            relation = None if kinds is None else torch.from_numpy(kinds).to(device)
            ends = rows[self.etype[2]].select(edges.dst[some])
            features = edges.column(JOINED)[some].to(device) if self._width else None
            with torch.no_grad():
                out = decoder(sources.to(device), ends.to(device), relation, features)
            outputs.append(out.float().cpu())
        return torch.cat(outputs)

    def _timed_metrics(
        self, model: EdgeModel, own: np.ndarray, candidates: Negatives | ListedNegatives | None
    ) -> dict[str, float]:
        """Return the metrics of edges at their times, each ranked among sampled or listed
        candidates. Collective."""
        task = self.config.task
        assert isinstance(task, LinkPrediction)
        draws = (None, candidates) if isinstance(candidates, ListedNegatives) else (candidates,)
        positions = own + self.edges.first
        there, absent, counts = zip(*self._decoded(model, positions, self._at_once, *draws))
        both = [[torch.cat(some) for some in zip(*pieces)] for pieces in (absent, counts)]
        metrics = ranked_among_drawn(torch.cat(there), both[0], both[1], self.control)
        if task.ranking.candidates == "destinations":
            metrics |= self._among_destinations(model, own)
        return metrics

    def _among_destinations(self, model: EdgeModel, own: np.ndarray) -> dict[str, float]:
        """Return the metrics of edges, each ranked among all destinations of the type at its time.
        Collective.

        Ranks divide the edges evenly: the same edges are ranked on any number of them.
        """
        task, edges, history = self.config.task, self.edges, self.history
        world = edges.exchange.world
        assert isinstance(task, LinkPrediction)
        positions = in_order(edges, own)
        total = len(positions)
        if task.ranking.edges is not None and task.ranking.edges < total:
            random = np.random.default_rng(self.config.train.seed)
            positions = positions[np.sort(random.choice(total, task.ranking.edges, replace=False))]
        mine = np.array_split(positions, world.size)[world.rank].astype(np.int64)
        names = [name for name in (self.time, self.target.relation) if name is not None]
        (src, dst), columns = edges.rows(mine, names)
        when, kind = columns[0].long().numpy(), columns[-1].long().numpy()
        kind = kind if self.target.relation is not None else np.zeros_like(when)
        ranks = torch.ones(len(mine), dtype=torch.float64)
        pieces = -(-len(history.targets) // self._at_once)
        for nodes in np.array_split(history.targets, pieces):
            start, size = 0, max(1, self._at_once // len(nodes))
            for there, (absent,), (counts,) in self._decoded(model, mine, size, _Same(nodes)):
                some = slice(start, start := start + len(there))
                true = history.exist(src[some, None], nodes, kind[some, None], when[some, None])
                ranks[some] += ranked_above(there, absent, counts & ~torch.from_numpy(true))
        metrics = metrics_of_ranks(ranks, total, self.control)
        if task.tops:
            asked = torch.from_numpy(np.stack([src, kind, when, dst], axis=1))
            metrics |= metrics_of_lists(asked, ranks, task.tops, self.control)
        return metrics

    @cached_property
    def history(self) -> EdgeHistory:
        """The edges of the type with their times. Collective."""
        assert self.time is not None
        return EdgeHistory(self.edges, self.time, self.target.relation, self.relations)

    @property
    def _at_once(self) -> int:
        return self.config.sampling.eval_batch_size or 1024

    def _decoded(
        self, model: EdgeModel, positions: np.ndarray, size: int, *draws: Any
    ) -> Iterator[Any]:
        """Yield the decoder's results in minibatches: the ends of an edge are encoded at its time.
        Collective. ``positions``: int64 ``[n]``, of any edges; ``size``: edges in a minibatch."""
        edges = self.edges
        exact = type(model)(model.encoder, copy.deepcopy(model.decoder).float().eval(), edges.etype)
        any_edge = np.minimum(edges.first, edges.bounds[-1:] - 1)  # for a rank that has none left
        for number in range(-(-edges.exchange.max(len(positions)) // size)):
            some = positions[number * size : (number + 1) * size]
            asked = some if len(some) else any_edge
            index = np.arange(len(asked))
            start = self._seeds(edges, asked, *draws).start(SeedSlice(index, index, 0, 0))
            assert start.times is not None
            rows = self.inference.encode(model.encoder, start.nodes, start.times)
            weight = torch.ones(len(asked))
            part = Part(seeds=weight, weight=weight, total=0, window=0, **start.fields)
            with torch.no_grad():
                yield _first(exact.decode(rows, part.to(self.ranks.device)), len(some))

    @cached_property
    def _ranking(self) -> Ranking:
        ntypes = self._ntypes
        bounds: dict[str, np.ndarray] = {end: self.shard.bounds[ntypes[end]] for end in ENDS}
        return Ranking(self.edges, bounds, self.target.relation, self.relations)


class _Same(Negatives):
    """The same nodes as targets of every edge."""

    def __init__(self, nodes: np.ndarray):
        super().__init__({}, NegativesConfig(), 0)
        self._nodes = nodes

    def draw_each(self, epoch: int, step: int, edges: np.ndarray) -> dict[str, np.ndarray]:
        return {"target": np.tile(self._nodes, (len(edges), 1))}


def _first(out: Any, count: int) -> Any:
    if isinstance(out, Tensor):
        return out[:count].cpu()
    return tuple(_first(some, count) for some in out)
