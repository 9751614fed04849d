"""From a step number to a batch, and from batches to the iterable that Lightning trains on.

Batches are made in one background thread while the model trains: exactly those that will be
consumed, in order, so that the thread's collectives match those of the other ranks. Whatever goes
wrong in it is raised where the batch is awaited, on the rank itself and, through the failure
broadcast, on those that would wait for it for ever.
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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

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
    from typing_extensions import Self

    from raygnn.sampling.device.device_features import DeviceFeatures
    from raygnn.sampling.device.device_sampler import DeviceSampler


log = logging.getLogger("raygnn")

T = TypeVar("T")
S = TypeVar("S", bound=Share, covariant=True)

Note = Callable[..., None]  # told what a thread does: ``note(phase, epoch=…, step=…)``


def silent(phase: str, *, epoch: int | None = None, step: int | None = None) -> None:
    """A `Note` that nobody reads."""


class Maker(Protocol[S]):
    """What makes the batches of one rank; collective. `BatchMaker`, or that of whole graphs."""

    @property
    def plan(self) -> Steps: ...

    @property
    def identity(self) -> str:
        """Stands for the data and their splits: the same on all ranks, and after a resume."""
        ...

    @property
    def exchange(self) -> Exchange:
        """What batches need of other ranks comes over it."""
        ...

    def __call__(self, epoch: int, step: int) -> S: ...

    def accumulating(self, batches: int) -> Self:
        """The same, of whose batches so many make an optimizer step together."""
        ...


@dataclass(frozen=True)
class BatchMaker:
    """Makes batch ``(epoch, step)`` of one rank: plan, sample, exchange, gather. Collective.

    Attributes:
        seeds: which there are, and where the blocks start.
        fanouts: per hop, from the seeds outward.
        inputs: node type → which columns are the model's input.
        degree_etypes: edge types whose in-degrees the model wants.
        combine: how the first layer adds up its sources' features, where that is all it does
            with them (see `FeatureStore.combine`); None = it is given the sources themselves,
            which is needed where nodes have learned rows.
        counted: whether blocks say which rows count (`Block.counted`), since the model makes
            statistics of the rows of all ranks.
        note: told ``"sample"`` and ``"features"``.
    """

    seeds: SeedAssigner
    sampler: NeighborSampler | DeviceSampler
    store: FeatureStore | DeviceFeatures
    fanouts: Sequence[Fanout]
    inputs: Mapping[str, Inputs]
    degree_etypes: Sequence[EdgeType] = ()
    combine: str | None = None
    counted: bool = False
    note: Note = silent
    identity: str = ""

    @property
    def plan(self) -> Steps:
        """See `Maker`."""
        return self.seeds.plan

    @property
    def exchange(self) -> Exchange:
        """See `Maker`."""
        return self.store.exchange

    def accumulating(self, batches: int) -> BatchMaker:
        """See `Maker`."""
        return replace(self, seeds=self.seeds.accumulating(batches))

    @property
    def learned(self) -> list[str]:
        """The node types with learned rows, in a fixed order."""
        return [t for t, inputs in self.inputs.items() if inputs.learned]

    def __call__(self, epoch: int, step: int) -> Batch:
        begin, waited = time.perf_counter(), self.store.exchange.seconds
        self.note("sample", epoch=epoch, step=step)
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
        sampled, asked = time.perf_counter(), self.store.exchange.seconds
        self.note("features")
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
            read = self._read(rows)
        else:
            awaited = replace(awaited, finish=self._finish)
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

    def _read(self, rows: FeatureRows) -> dict[str, Any]:
        """What a batch has of the rows of its input nodes."""
        x, categories = assemble(rows, self.inputs)
        degree = {e: rows[e[2]][degree_column(e)] for e in self.degree_etypes}
        return {"x": x, "categories": categories, "degree": degree}

    def _finish(self, awaited: AwaitedRows) -> dict[str, Any]:
        """See `AwaitedRows`."""
        assert not isinstance(self.store, FeatureStore)
        return self._read(self.store.finish(awaited))

    def _with_counted(self, blocks: list[Block], frontier: Mapping[str, Ids]) -> list[Block]:
        """The blocks with `Block.counted`, where the model wants it. Collective.

        A seed of padding is one of another rank's seeds, so that its neighbourhood adds no node to
        those of all ranks.

        Args:
            frontier: of which the first block's destinations are the first.
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


class BatchLoader(Generic[S]):
    """The training batches of one rank, resumable at any step.

    The position is where the *next* batch to train on stands; batches that were prepared ahead
    do not count. A position at the end of an epoch means the start of the next one, since a
    checkpoint may be taken on an epoch's last batch.

    Args:
        make: makes one batch.
        prefetch: batches prepared ahead of training.
        limit: batches in all, over the whole run.
        across: prepare across the ends of epochs, too, so that only the first batch of a run is
            waited for. Not where training may stop at one: ranks would be left in the middle of
            batches that the others never begin.
        alarm: tells ranks of each other's failures.
        note: see `Prefetcher`.
        pin: the GPU for which batches are pinned where they are made; None = they are not.
        side: what makes batches on a GPU, and copies there what was made on the CPU; None = the
            batches stay where they are made.
    """

    def __init__(
        self,
        make: Maker[S],
        *,
        prefetch: int,
        limit: int,
        across: bool = True,
        alarm: FailureBroadcast | None = None,
        note: Note | None = None,
        pin: torch.device | None = None,
        side: SideStream | None = None,
    ):
        self._make = make
        self._pin = pin
        self._side = side
        self._note = note
        self._prefetch = prefetch
        self._alarm = alarm
        self._limit = limit
        self._across = across
        self._batches: Generator[S, None, None] | None = None  # from the position on
        self._prefetcher: Prefetcher[tuple[S, Any]] | None = None
        self.epoch = 0
        self.step = 0

    def __len__(self) -> int:
        return self._make.plan.steps_per_epoch

    def __iter__(self) -> Iterator[S]:
        """The batches of the rest of this epoch, or of the next one at the end of one."""
        # a generator: nothing happens before the first batch is asked for, since Lightning makes
        # one iterator too many before it restores the position
        length = len(self)
        if self.step >= length:
            self.epoch, self.step = self.epoch + 1, 0
            if not self._across:
                self.close()
        if self._batches is None:
            self._batches = self._from(self.epoch * length + self.step)
        while self.step < length and self.epoch * length + self.step < self._limit:
            batch = next(self._batches)
            assert (batch.epoch, batch.step) == (self.epoch, self.step)
            self.step += 1
            yield batch

    def _from(self, number: int) -> Generator[S, None, None]:
        length, last = len(self), self._limit
        if not self._across:
            last = min(last, (number // length + 1) * length)

        def local(number: int) -> S:
            batch = self._make(*divmod(number, length))
            return batch if self._pin is None else batch.pinned(self._pin)

        def made(number: int) -> tuple[S, Any]:
            if self._side is None:
                return local(number), None
            return self._side.make(lambda: local(number))

        self._prefetcher = Prefetcher(
            made,
            range(number, last),
            self._prefetch,
            self._alarm,
            self._note,
            lambda: self._make.exchange.seconds,
        )
        for batch, ready in self._prefetcher:
            if self._side is not None:
                self._side.hand_over(batch, ready)
            yield batch

    def close(self) -> None:
        """End the preparation of batches, which nobody wants any more."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    @property
    def failure(self) -> BaseException | None:
        """What preparation died of, if it has, although training may not be there yet."""
        return None if self._prefetcher is None else self._prefetcher.failure

    @property
    def epochs_done(self) -> int:
        """Whole epochs that have been trained on."""
        return self.epoch + (self.step >= len(self))

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            **self._make.plan.state,
            "data": self._make.identity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            InputError: it was counted in batches of another size, or over other seeds or orders.
        """
        here = self.state_dict()
        if state.get("data", here["data"]) != here["data"]:
            raise InputError(
                "the checkpoint was trained on other data, or on another split of them",
                remedy="resume with the data that the run had; a dataset's own splits must be the "
                "same each time it is made",
            )
        for name in self._make.plan.state:
            if state.get(name) == here[name]:
                continue
            if name == "order":
                raise InputError(
                    "the checkpoint is of a version that put so few seeds in another order",
                    remedy="go on with the version that began the run, or begin anew (--overwrite)",
                )
            raise InputError(
                f"the checkpoint has {name} {state[name]}, this run has {here[name]}",
                remedy="resume with the graph, train.seed, train.accumulate and "
                "sampling.batch_size × workers that the run had",
            )
        self.close()
        self.epoch, self.step = state["epoch"], state["step"]


class SideStream:
    """A stream of a GPU's own on which batches are made, and copied there, beside the one that
    trains, which waits for an event. The host is up to three steps ahead of what trains, so that
    no more batches than those are in the GPU's memory beside the prepared ones.

    Args:
        device: the GPU.
        cuda: torch's module of its streams.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda):
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._begun = deque[Any]()  # events: all steps before one were through

    def make(self, make: Callable[[], T]) -> tuple[T, Any]:
        """A batch on the GPU, and the event that comes after all that makes it; in the thread that
        prepares batches."""
        # else the way back to that thread's own stream makes a context on the first GPU
        self._cuda.set_device(self._device)
        with self._cuda.stream(self._stream):
            batch: Any = make()
            return batch.to(self._device), self._stream.record_event()

    def hand_over(self, batch: Share, ready: Any) -> None:
        """To the stream of the thread that trains, which calls it."""
        stream = self._cuda.current_stream(self._device)
        stream.wait_event(ready)
        batch.used_on(stream)
        if self._device.type == "cuda":
            # a wait for it leaves the core to the thread that makes batches
            event = self._cuda.Event(blocking=True)
            stream.record_event(event)
            self._begun.append(event)
        if len(self._begun) > _AHEAD:
            self._begun.popleft().synchronize()


# Training goes first where the two share a core: what is prepared ahead fills the time in which a
# rank waits for the others, so that the ranks' steps are more alike. The second is for batches that
# need no word of another rank, as long as training does not wait for them: other programs may keep
# the core busy, of which little is left for who is that nice.
_NICE, _NICE_ALONE = 4, 10
_WINDOW, _STARVES = 16, 0.25  # batches; share of the time in which training waits for them
_AHEAD = 2  # steps that wait for a GPU behind the one that it is at
_POLL = 0.5  # seconds between looks at whether the other side is still there


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class _Exhausted:
    pass


_Ready: TypeAlias = "queue.Queue[T | _Failed | _Exhausted]"


class Prefetcher(Generic[T]):
    """Iterates ``make(step)`` over ``steps``, up to ``depth`` ahead of the consumer.

    With depth 0 everything happens in the caller's thread. Closing (or dropping) the iterator
    ends the thread after the batch it is making.

    Args:
        alarm: rung when a batch can not be made, and looked at while one is awaited.
        note: told ``"queue"`` when the thread waits for room.
        waited: seconds that making them has waited for other ranks so far.

    Attributes:
        failure: what the thread died of, as soon as it has; raised when its turn comes.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        steps: Iterable[int],
        depth: int,
        alarm: FailureBroadcast | None = None,
        note: Note | None = None,
        waited: Callable[[], float] = float,
    ):
        self._make = make
        self._steps = steps
        self._depth = depth
        self._waited = waited
        self._starves = False
        self._left: Iterator[int] | None = None  # steps that a thread has left to another
        self._alarm = alarm
        self._note = note or silent
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[T]:
        if self._depth == 0:
            yield from map(self._make, self._steps)
            return
        ready: _Ready[T] = queue.Queue(maxsize=self._depth)
        stop = threading.Event()
        self._start(ready, stop, iter(self._steps))
        begun = waited = 0.0
        try:
            for number in itertools.count():
                asked = time.perf_counter()
                item = self._await_next(ready, stop)
                if isinstance(item, _Exhausted):
                    return
                if isinstance(item, _Failed):
                    raise item.error
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

    def _await_next(self, ready: _Ready[T], stop: threading.Event) -> T | _Failed | _Exhausted:
        while True:
            if (steps := self._left) is not None:
                self._left = None
                self._start(ready, stop, steps)  # as nice as this thread, which starts it
            try:
                return ready.get(timeout=_POLL)
            except queue.Empty:
                if self._alarm is not None:
                    self._alarm.check()
                if not self._thread.is_alive() and ready.empty() and self._left is None:
                    raise RuntimeError("the prefetch thread ended without a batch") from None

    def _run(self, ready: _Ready[T], stop: threading.Event, steps: Iterator[int]) -> None:
        def put(item: T | _Failed | _Exhausted) -> bool:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=_POLL)
                    return True
                except queue.Full:
                    continue
            return False

        os.nice(_NICE)  # this thread's alone, on Linux
        try:
            before, nicer = self._waited(), False
            for number, step in enumerate(steps):
                made = self._make(step)
                if not number and before == self._waited() and not self._starves:
                    os.nice(_NICE_ALONE - _NICE)
                    nicer = True
                self._note("queue")
                if not put(made):
                    return
                if nicer and self._starves:  # niceness cannot be taken back
                    self._left = steps
                    return
        except BaseException as error:
            if not isinstance(error, Exception):  # which would end the process in silence
                ended = RuntimeError(f"{error_text(error)} while a batch was prepared")
                ended.__cause__ = error
                error = ended
            self.failure = error
            log.error("a batch could not be prepared", exc_info=error)
            if self._alarm is not None:
                with contextlib.suppress(Exception):  # the others will time out
                    self._alarm.announce(error)
            put(_Failed(error))
        else:
            put(_Exhausted())
