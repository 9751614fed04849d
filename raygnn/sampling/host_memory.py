"""Memory that the ranks of one host have in common.

It has no name anywhere: one rank asks the kernel for it and the others open it through that rank's
entry in /proc, so it goes with the last process that maps it, however that ends. The size of
/dev/shm, which is small in many containers, does not bound it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from raygnn.errors import TrainingError
from raygnn.sampling.exchange import Exchange

T = TypeVar("T")


def host_identity() -> list[str] | None:
    """What processes have alike that see the same files and one another, and last the number of
    this one among them; None where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "user")]
        return [boot, *spaces, str(os.getuid()), os.readlink("/proc/self")]
    except OSError:
        return None


@dataclass(frozen=True)
class Host:
    """The ranks that share memory with this one. All methods are collective over all ranks, of
    all hosts; where no two ranks share any, none of them sends anything.

    Attributes:
        exchange: over all ranks.
        ranks: those of this host, ascending; the first leads.
        most: the largest number of ranks of any host.
    """

    exchange: Exchange
    ranks: tuple[int, ...]
    most: int

    @classmethod
    def alone(cls, exchange: Exchange) -> Host:
        """A host of this rank, as if every other rank had one of its own."""
        return cls(exchange, (exchange.world.rank,), 1)

    @classmethod
    def of(cls, exchange: Exchange) -> Host:
        """The host that this rank runs on. Collective."""
        rank, identities = exchange.world.rank, exchange.gather_json(host_identity())
        mine = identities[rank] or []
        alike = [r for r, other in enumerate(identities) if other and other[:-1] == mine[:-1]]
        # the system asks for the same right here as to open another process's memory
        opens = bool(mine) and os.path.exists(f"/proc/{identities[alike[0]][-1]}/cwd")
        opening = exchange.gather_json(opens)
        ranks = tuple(r for r in alike if opening[r]) if opens else (rank,)
        return cls(exchange, ranks, exchange.max(len(ranks)))

    @property
    def leads(self) -> bool:
        return self.exchange.world.rank == self.ranks[0]

    @property
    def holds_all(self) -> bool:
        """Whether all ranks are on this host, and so on all of them."""
        return len(self.ranks) == self.exchange.world.size

    @property
    def place(self) -> int:
        """This rank's place among those of the host."""
        return self.ranks.index(self.exchange.world.rank)

    def settle(self, value: T) -> T:
        """What the leader gave, a JSON value."""
        if self.most == 1:
            return value
        settled: T = self.exchange.gather_json(value)[self.ranks[0]]
        return settled

    def wait(self) -> None:
        """Until all ranks are here, so that one reads what another has written."""
        if self.most > 1:
            self.exchange.max(0)

    @contextmanager
    def memory(self, size: int) -> Iterator[int | None]:
        """A handle on memory of so many bytes, zero at first, to be mapped in the block; None for
        a rank that shares with nobody.

        Raises:
            TrainingError: the system refuses it.
        """
        handle = self._open(size) if self.most > 1 else None
        try:
            yield handle
        finally:
            if handle is not None:
                os.close(handle)

    def _open(self, size: int) -> int | None:
        handle, several = None, len(self.ranks) > 1
        try:
            if several and self.leads:
                handle = os.memfd_create("raygnn")
                os.ftruncate(handle, size)
            pid, number = self.settle([os.readlink("/proc/self"), handle])
            if several and not self.leads:
                handle = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TrainingError(
                f"{size:,} bytes of memory cannot be shared by the ranks {list(self.ranks)} of "
                f"this host: {error.strerror or error}",
                remedy="free memory there, or raise the limit on open files (ulimit -n)",
            ) from error
        self.wait()  # the leader's is open until all have theirs
        return handle

    def array(self, count: int, dtype: Any) -> np.ndarray:
        """``[count]`` zeros that all ranks of the host have in common."""
        size = count * np.dtype(dtype).itemsize
        with self.memory(size) as handle:
            if handle is None or not size:
                return np.zeros(count, dtype)
            return np.frombuffer(mmap.mmap(handle, size), dtype)

    def publish(self, values: np.ndarray) -> np.ndarray:
        """The leader's ``[n]``, for all ranks of the host."""
        shared = self.array(self.settle(len(values)), values.dtype)
        if self.leads:
            shared[:] = values
        self.wait()
        return shared

    def add_up(self, values: np.ndarray) -> np.ndarray:
        """The sum of what the ranks of the host gave, ``[n]`` each: in memory once, and added in
        the order of the ranks."""
        if self.most == 1:
            return values
        total = self.array(len(values), values.dtype)
        for turn in range(self.most):
            if turn == self.place:
                total += values
            self.wait()
        return total
