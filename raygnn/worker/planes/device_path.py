"""Choice of the parts of a batch that the GPU builds: sampling neighbours, and reading rows.

All ranks decide alike. With ``auto``, GPU and CPU do the same work once before the first batch; the
CPU stays responsible if the GPU fails or its result differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from raygnn.config.rules import not_drawn_on_gpu
from raygnn.config.schema import Config
from raygnn.errors import ConfigError, TrainingError, error_text
from raygnn.graph.available_memory import memory
from raygnn.graph.staging.shard import Shard
from raygnn.sampling.features import FeatureRows, FeatureStore
from raygnn.sampling.plan import Fanout
from raygnn.sampling.sampler import NeighborSampler
from raygnn.worker.comm.process_groups import Ranks

if TYPE_CHECKING:
    from raygnn.sampling.device.device_features import DeviceFeatures
    from raygnn.sampling.device.device_sampler import DeviceSampler

T = TypeVar("T")

_KINDS = ("gpu", "pinned", "cpu")  # memory of the rows, the nearest first
_TRIED = 64  # nodes of each type that are sampled both ways

log = logging.getLogger("raygnn")


@dataclass(frozen=True)
class Room:
    """Memory with capacity for the data.

    Attributes:
        structure: memory of the in-edge lists: "gpu"; "pinned", page-locked memory of the host; or
            "cpu" if neither has capacity.
        rows: memory of the rows of this host, likewise; pinned ones once for all of its ranks.
        near: share of the rows that fit the GPU's memory.
        copies: each rank can have page-locked rows of its own besides.
    """

    structure: str
    rows: str
    near: float
    copies: bool

    @staticmethod
    def from_sizes(free: int, host: int, ranks: int, structure: int, rows: int) -> Room:
        """Divide memory: half of the ``free`` bytes of the GPU is for the data, and at most half of
        that for the structure; the model, its optimizer and the batches have the rest. Half of the
        ``host`` bytes may be locked, since torch locks pages by powers of two, and each rank locks
        the structure's.
        """
        left, locked = free // 2, host // 2
        fits = structure <= left // 2
        left -= structure if fits else 0
        of_structure = "gpu" if fits else "pinned" if ranks * structure <= locked else "cpu"
        locked -= ranks * structure if of_structure == "pinned" else 0
        of_rows = "gpu" if rows <= left else "pinned" if rows <= locked else "cpu"
        copies = (1 + ranks) * rows <= locked
        return Room(of_structure, of_rows, min(1.0, left / max(1, rows)), copies)


class DevicePath:
    """Decides for a rank's batches. Collective, on the control group.

    Args:
        rows: bytes of the rows on this host, including cached ones of other hosts.

    Attributes:
        draws: the GPU samples.
        features: memory that rows are read from, "gpu", "pinned" or "cpu".
    """

    def __init__(self, config: Config, shard: Shard, ranks: Ranks, rows: int):
        self._shard = shard
        self._ranks = ranks
        self._device = ranks.device
        self._sampling = sampling = config.sampling
        self.draws, self.features = False, "cpu"
        free = _free(self._device)
        if free is None:
            return
        structure = sum(lists.nbytes for lists in shard.topology.values())
        self._room = Room.from_sizes(free, memory()[1], len(ranks.host.ranks), structure, rows)
        triton = None if find_spec("triton") else "there is no Triton, which comes with torch"
        full = "the structure fits no memory" if self._room.structure == "cpu" else None
        why = not_drawn_on_gpu(config) or _not_drawn(shard) or triton or full
        self.draws = self._chosen("sample_on", sampling.sample_on, why, ("gpu", "cpu")) == "gpu"
        self._over = None if ranks.host.holds_all else ranks.device_rows
        wanted = sampling.features_on
        kinds = _KINDS[_KINDS.index(self._room.rows) :] if wanted == "auto" else (wanted, "cpu")
        why = triton if kinds[0] == "pinned" else None
        # training would wait for rows that the prefetch thread could fetch meanwhile
        if wanted == "auto" and self._over and self._over.device.type != self._device.type:
            why = "other hosts have some of the rows, and NCCL does not connect them"
        self.features = self._chosen("features_on", wanted, why, kinds)

    def _chosen(self, key: str, wanted: str, why: str | None, kinds: Sequence[str]) -> str:
        """Return the choice of all ranks: as wanted, or the nearest to the GPU that all support."""
        if wanted == "cpu":
            return "cpu"
        if why and wanted != "auto":
            message = f"{wanted} is not available: {why}"
            raise ConfigError(message, where=f"sampling.{key}", remedy="set it to auto or cpu")
        here = "cpu" if why else kinds[0]
        agreed = _KINDS[self._ranks.control.max(_KINDS.index(here))]
        log.info("sampling.%s: %s%s", key, agreed, f" ({why})" if why else "")
        return agreed

    @property
    def used(self) -> bool:
        """True if the GPU builds a part of a batch."""
        return self.draws or self.features != "cpu"

    def sampler(
        self, like: NeighborSampler, fanouts: Sequence[Fanout], *, seed: int, once: bool
    ) -> NeighborSampler | DeviceSampler:
        """Return a sampler on the chosen device with the results of ``like``."""
        if not self.draws:
            return like

        def make() -> DeviceSampler:
            from raygnn.sampling.device import device_sampler

            made = device_sampler.DeviceSampler(
                self._shard,
                self._device,
                pinned=self._room.structure == "pinned",
                seed=seed,
                replace=self._sampling.replace,
                once=once,
            )
            seeds = {t: np.arange(self._shard.num_nodes(t))[:_TRIED] for t in self._shard.ntypes}
            blocks, _ = like.sample(seeds, fanouts, epoch=0, step=0)
            others, _ = made.sample(seeds, fanouts, epoch=0, step=0)
            if differs := device_sampler.difference(blocks, others):
                raise TrainingError(f"the GPU samples other neighbours than the CPU: {differs}")
            return made

        return self._tried("sample_on", make) or like

    def store(
        self, like: FeatureStore, near: Callable[[float], Mapping[str, np.ndarray]]
    ) -> FeatureStore | DeviceFeatures:
        """Return a store on the chosen device with the rows of ``like``. ``near``: share of all
        rows that fit the GPU's memory → which ones."""
        if self.features == "cpu":
            return like

        nums = {t: self._shard.num_nodes(t) for t in self._shard.ntypes}
        ids = {t: np.arange(0, num, max(1, num // _TRIED)) for t, num in nums.items()}
        expected = {t: dict(columns) for t, columns in like.gather(ids).items()}

        def make() -> DeviceFeatures:
            from raygnn.sampling.device.device_features import DeviceFeatures

            chosen = near(self._room.near) if self.features == "pinned" else None
            copies = self._room.copies or self._sampling.features_on == "pinned"
            return DeviceFeatures(like, self._device, chosen, self._over, copies)

        def compare(given: FeatureRows) -> bool:
            for ntype, columns in expected.items():
                for name, rows in columns.items():
                    if not torch.equal(given[ntype][name].cpu(), rows):
                        raise TrainingError(f"the GPU reads other rows of {ntype}/{name}")
            return True

        # steps that may fail on one rank, and steps that wait for all ranks, are separate attempts
        made = self._tried("features_on", make)
        begun = self._tried("features_on", lambda: made.begin(ids)) if made else None
        if made is None or begun is None:
            return like
        rows, awaited = begun
        finish = lambda: made.finish(awaited) if awaited else rows  # noqa: E731
        done = self._tried("features_on", lambda: compare(finish()))
        like.remote = like.hits = 0  # of batches
        return made if done else like

    def _tried(self, key: str, make: Callable[[], T]) -> T | None:
        """Return the result of ``make``; None if a rank failed and the key is ``auto``."""
        made, failure = None, None
        try:
            made = make()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # other streams read it
        except Exception as error:  # of a compiler or a driver
            failure = error
        if not self._ranks.control.max(int(failure is not None)):
            return made
        text = error_text(failure) if failure else "another rank could not; see its log"
        if getattr(self._sampling, key) != "auto":
            raise TrainingError(
                text, where=f"sampling.{key}", remedy="set it to auto or cpu"
            ) from failure
        log.warning("sampling.%s: falling back to the CPU: %s", key, text)
        return None


def _free(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _not_drawn(shard: Shard) -> str | None:
    if not shard.replicated:
        return "each host holds its own part of the structure (sampling.topology)"
    if any(rows.carried for rows in shard.topology.values()):
        return "the model reads edges"
    return None
