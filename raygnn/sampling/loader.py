"""Batches of a step, and the iterable of batches that Lightning trains on.

Batches are built in one background thread while the model trains: exactly those that will be
consumed, in order, so that its collectives match the other ranks' collectives. Its errors are
raised where the batch is awaited, on this rank and, through the failure broadcast, on the ranks
that would otherwise wait forever.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from raygnn.errors import InputError, error_text
from raygnn.graph.data import EdgeType
from raygnn.sampling.batch import AwaitedRows, Batch, Block, Share
from raygnn.sampling.exchange import (
    Exchange,
    FailureBroadcast,
    Ids,
    RowRoutes,
    count_nodes_once,
    route_rows,
)
from raygnn.sampling.features import FeatureRows, FeatureStore, Inputs, assemble, degree_column
from raygnn.sampling.plan import Fanout, Steps
from raygnn.sampling.sampler import NeighborSampler
from raygnn.sampling.seeds import SeedAssigner

if TYPE_CHECKING:
    from raygnn.sampling.collate import GraphBatchMaker
    from raygnn.sampling.device.device_features import DeviceFeatures
    from raygnn.sampling.device.device_sampler import DeviceSampler

log = logging.getLogger("raygnn")

T = TypeVar("T")

Maker: TypeAlias = "BatchMaker | GraphBatchMaker"


@dataclass(frozen=True)
class BatchMaker:
    """Builds batch ``(epoch, step)`` of one rank: plan, sample, exchange, gather. Collective.

    Attributes:
        seeds: of every step.
        fanouts: per hop, from the seeds outward.
        inputs: node type → columns of the model's input.
        degree_etypes: edge types whose in-degrees the model reads.
        combine: how the first layer aggregates its sources' features, if it does nothing else with
            them (see `FeatureStore.combine`); None = batches have the sources themselves, as node
            embeddings require.
        counted: add `Block.counted`, for models with statistics over the rows of all ranks.
        identity: fingerprint of the data and their splits, equal on all ranks and after a resume.
    """

    seeds: SeedAssigner
    sampler: NeighborSampler | DeviceSampler
    store: FeatureStore | DeviceFeatures
    fanouts: Sequence[Fanout]
    inputs: Mapping[str, Inputs]
    degree_etypes: Sequence[EdgeType] = ()
    combine: str | None = None
    counted: bool = False
    identity: str = ""

    @property
    def plan(self) -> Steps:
        return self.seeds.plan

    @property
    def exchange(self) -> Exchange:
        """Collectives that batches use."""
        return self.store.exchange

    @property
    def learned(self) -> list[str]:
        """Node types with embeddings, in a fixed order."""
        return [t for t, inputs in self.inputs.items() if inputs.learned]

    def __call__(self, epoch: int, step: int) -> Batch:
        begin, waited = time.perf_counter(), self.store.exchange.seconds
        start = self.seeds(epoch, step)
        given: dict[str, Any] = {"epoch": epoch, "step": step}
        given |= {"banned": start.banned, "times": start.times}
        routes: RowRoutes | None = None
        awaited: AwaitedRows | None = None
        combined: dict[EdgeType, Tensor] = {}
        frontier: Mapping[str, Any]
        if self.combine is None:
            blocks, frontier = self.sampler.sample(start.nodes, self.fanouts, **given)
        else:
            assert not self.learned
            assert isinstance(self.sampler, NeighborSampler)
            blocks, frontier, draws = self.sampler.sample_open(start.nodes, self.fanouts, **given)
        blocks = self._with_counted(blocks, frontier)
        until = blocks[0].until if blocks else {}
        sampled, asked = time.perf_counter(), self.store.exchange.seconds
        if self.combine is None:
            if learned := {t: frontier[t] for t in self.learned}:
                routes = route_rows(learned, self.store.bounds, self.store.exchange)
            if isinstance(self.store, FeatureStore):
                rows = self.store.gather(frontier)
            else:
                rows, awaited = self.store.begin(frontier)
        else:
            assert isinstance(self.store, FeatureStore)
            rows, combined = self.store.combine(frontier, draws, self.combine)
        if awaited is None:
            read = self._read(until, rows)
        else:
            awaited = replace(awaited, finish=partial(self._finish, until))
            read = {"x": {}, "categories": {}, "degree": {}}
        end, fetched = time.perf_counter(), self.store.exchange.seconds
        return Batch(
            blocks=blocks,
            combined=combined,
            routes=routes,
            awaited=awaited,
            epoch=epoch,
            step=step,
            seconds={
                "sample": sampled - begin - (asked - waited),
                "features": end - sampled - (fetched - asked),
                "exchange": fetched - waited,
            },
            **read,
            **start.fields,
        )

    def _read(self, until: Mapping[str, Tensor], rows: FeatureRows) -> dict[str, Any]:
        x, categories = assemble(rows, self.inputs, until)
        degree = {e: rows[e[2]][degree_column(e)] for e in self.degree_etypes}
        return {"x": x, "categories": categories, "degree": degree}

    def _finish(self, until: Mapping[str, Tensor], awaited: AwaitedRows) -> dict[str, Any]:
        assert not isinstance(self.store, FeatureStore)
        return self._read(until, self.store.finish(awaited))

    def _with_counted(self, blocks: list[Block], frontier: Mapping[str, Ids]) -> list[Block]:
        """Add `Block.counted` if the model reads it. Collective.

        A padding seed is a seed of another rank, so its neighbourhood adds no node to count.

        Args:
            frontier: starts with the first block's destinations.
        """
        if not (self.counted and blocks):
            return blocks
        hops = {t: [block.num_dst[t] for block in reversed(blocks)] for t in frontier}
        ids = {t: nodes[: hops[t][-1]] for t, nodes in frontier.items()}
        counted = count_nodes_once(ids, hops, self.store.bounds, self.store.exchange)
        return [
            replace(block, counted={t: rows[: block.num_dst[t]] for t, rows in counted.items()})
            for block in blocks
        ]


@dataclass(eq=False, kw_only=True)
class BatchLoader:
    """Training batches of one rank, resumable at any step.

    The position belongs to the *next* batch to train on, whatever was prefetched. The end of an
    epoch means the start of the next one, since a checkpoint may be written on an epoch's last
    batch.

    Attributes:
        make: builds one batch.
        prefetch: batches prepared ahead of training.
        limit: number of batches of the run.
        across: prefetch across the ends of epochs, so that only the first batch of a run is waited
            for. Not if training may stop after an epoch: ranks would be left in the middle of
            batches that other ranks never begin.
        alarm: reports failures between ranks.
        pin: GPU for which batches are pinned; None = they are not.
        side: builds batches on a GPU, or copies them there; None = batches stay where they are
            built.
        epoch, step: the position.
    """

    make: Maker = field(kw_only=False)
    prefetch: int
    limit: int
    across: bool = True
    alarm: FailureBroadcast | None = None
    pin: torch.device | None = None
    side: SideStream | None = None
    epoch: int = field(default=0, init=False)
    step: int = field(default=0, init=False)
    _batches: Generator[Share, None, None] | None = field(default=None, init=False)
    _prefetcher: Prefetcher[tuple[Share, Any]] | None = field(default=None, init=False)

    def __len__(self) -> int:
        return self.make.plan.steps_per_epoch

    def __iter__(self) -> Iterator[Share]:
        """Yield the remaining batches of this epoch, or of the next one at the end of one."""
        # a generator, so that nothing happens before the first batch is requested: Lightning
        # creates one iterator too many before it restores the position
        length = len(self)
        if self.step >= length:
            self.epoch, self.step = self.epoch + 1, 0
            if not self.across:
                self.close()
        if self._batches is None:
            self._batches = self._from(self.epoch * length + self.step)
        while self.step < length and self.epoch * length + self.step < self.limit:
            batch = next(self._batches)
            assert (batch.epoch, batch.step) == (self.epoch, self.step)
            self.step += 1
            yield batch

    def _from(self, number: int) -> Generator[Share, None, None]:
        length, last = len(self), self.limit
        if not self.across:
            last = min(last, (number // length + 1) * length)

        def local(number: int) -> Share:
            batch: Share = self.make(*divmod(number, length))
            return batch if self.pin is None else batch.pinned(self.pin)

        def made(number: int) -> tuple[Share, Any]:
            if self.side is None:
                return local(number), None
            return self.side.make(lambda: local(number))

        self._prefetcher = Prefetcher(
            made, range(number, last), self.prefetch, self.alarm, lambda: self.make.exchange.seconds
        )
        for batch, ready in self._prefetcher:
            if self.side is not None:
                self.side.hand_over(batch, ready)
            yield batch

    def close(self) -> None:
        """Stop preparing batches."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    @property
    def failure(self) -> BaseException | None:
        """Error that ended preparation, if any, even before training has reached that batch."""
        return None if self._prefetcher is None else self._prefetcher.failure

    @property
    def epochs_done(self) -> int:
        """Number of completed epochs."""
        return self.epoch + (self.step >= len(self))

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            **self.make.plan.state,
            "data": self.make.identity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position.

        Raises:
            InputError: it refers to another batch size or other seeds.
        """
        here = self.state_dict()
        if state.get("data", here["data"]) != here["data"]:
            what = "the checkpoint was trained on other data, or on another split of them"
            remedy = "resume with the run's data; a dataset's own splits must never change"
            raise InputError(what, remedy=remedy)
        for name, value in self.make.plan.state.items():
            if state.get(name) != value:
                what = f"the checkpoint has {name} {state[name]}, this run has {value}"
                remedy = "resume with the run's graph, train.seed, train.accumulate and "
                raise InputError(what, remedy=f"{remedy}sampling.batch_size × workers")
        self.close()
        self.epoch, self.step = state["epoch"], state["step"]


class SideStream:
    """Separate stream of a GPU on which batches are built or copied; the training stream waits for
    an event. The host is at most three steps ahead of training, which limits the batches in the
    GPU's memory.

    Args:
        device: the GPU.
        cuda: torch's module of streams.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda):
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._begun = deque[Any]()  # events: all steps before one were through

    def make(self, make: Callable[[], T]) -> tuple[T, Any]:
        """Return a batch on the GPU and the event of its completion; called by the thread that
        prepares batches."""
        # else returning to that thread's default stream would create a context on the first GPU
        self._cuda.set_device(self._device)
        with self._cuda.stream(self._stream):
            batch: Any = make()
            return batch.to(self._device), self._stream.record_event()

    def hand_over(self, batch: Share, ready: Any) -> None:
        """Let the calling thread's stream, which trains, wait for a batch and use it."""
        stream = self._cuda.current_stream(self._device)
        stream.wait_event(ready)
        batch.used_on(stream)
        if self._device.type == "cuda":
            # waiting for a blocking event leaves the core to the thread that builds batches
            event = self._cuda.Event(blocking=True)
            stream.record_event(event)
            self._begun.append(event)
        if len(self._begun) > _AHEAD:
            self._begun.popleft().synchronize()


# Training has priority if the two share a core: prefetching uses the time in which a rank waits for
# the other ranks, which evens out their steps. The second niceness is for batches that need no
# communication, as long as training does not wait for them: if other programs keep the core busy,
# the prefetch thread, at this niceness, gets little processor time.
_NICE, _NICE_ALONE = 4, 10
_WINDOW, _STARVES = 16, 0.25  # batches; share of the time in which training waits for them
_AHEAD = 2  # steps queued for a GPU behind the current one
_POLL = 0.5  # seconds; interval of checks whether the other thread is alive


@dataclass(frozen=True)
class _Last:
    error: BaseException | None = None


_Ready: TypeAlias = "queue.Queue[T | _Last]"


@dataclass(eq=False)
class Prefetcher(Generic[T]):
    """Iterates ``make(step)`` over ``steps``, up to ``depth`` ahead of the consumer.

    With depth 0 everything runs in the caller's thread. Closing (or dropping) the iterator ends the
    thread after its current batch.

    Attributes:
        alarm: notified of a failure here, and polled for other ranks' while a batch is awaited.
        waited: returns the seconds spent waiting for other ranks so far.
        failure: the error that ended the thread; raised in place of the batch.
    """

    make: Callable[[int], T]
    steps: Iterable[int]
    depth: int
    alarm: FailureBroadcast | None = None
    waited: Callable[[], float] = float
    failure: BaseException | None = field(default=None, init=False)
    _starves: bool = field(default=False, init=False)
    _left: Iterator[int] | None = field(default=None, init=False)  # steps for the next thread

    def __iter__(self) -> Iterator[T]:
        if self.depth == 0:
            yield from map(self.make, self.steps)
            return
        ready: _Ready[T] = queue.Queue(maxsize=self.depth)
        stop = threading.Event()
        self._start(ready, stop, iter(self.steps))
        begun = waited = 0.0
        try:
            for number in itertools.count():
                asked = time.perf_counter()
                item = self._await_next(ready, stop)
                if isinstance(item, _Last):
                    if item.error is not None:
                        raise item.error
                    return
                now = time.perf_counter()
                waited += now - asked
                if number % _WINDOW == 0:
                    self._starves |= number > 0 and waited > _STARVES * (now - begun)
                    begun, waited = now, 0.0
                yield item
        finally:
            stop.set()

    def _start(self, ready: _Ready[T], stop: threading.Event, steps: Iterator[int]) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(ready, stop, steps), name="raygnn-prefetch", daemon=True
        )
        self._thread.start()

    def _await_next(self, ready: _Ready[T], stop: threading.Event) -> T | _Last:
        while True:
            if (steps := self._left) is not None:
                self._left = None
                self._start(ready, stop, steps)  # with this thread's niceness
            try:
                return ready.get(timeout=_POLL)
            except queue.Empty:
                if self.alarm is not None:
                    self.alarm.check()
                if not self._thread.is_alive() and ready.empty() and self._left is None:
                    raise RuntimeError("the prefetch thread ended without a batch") from None

    def _run(self, ready: _Ready[T], stop: threading.Event, steps: Iterator[int]) -> None:
        def put(item: T | _Last) -> bool:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=_POLL)
                    return True
                except queue.Full:
                    continue
            return False

        os.nice(_NICE)  # on Linux, of this thread only
        try:
            before, nicer = self.waited(), False
            for number, step in enumerate(steps):
                made = self.make(step)
                if not number and before == self.waited() and not self._starves:
                    os.nice(_NICE_ALONE - _NICE)
                    nicer = True
                if not put(made):
                    return
                if nicer and self._starves:  # niceness cannot be taken back
                    self._left = steps
                    return
        except BaseException as error:
            if not isinstance(error, Exception):  # it would end the process silently
                ended = RuntimeError(f"{error_text(error)} while a batch was prepared")
                ended.__cause__ = error
                error = ended
            self.failure = error
            log.error("a batch could not be prepared", exc_info=error)
            if self.alarm is not None:
                with contextlib.suppress(Exception):  # the other ranks will time out
                    self.alarm.announce(error)
            put(_Last(error))
        else:
            put(_Last())
