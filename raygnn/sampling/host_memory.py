"""Memory shared by the ranks of one host.

It has no name: one rank allocates it and the other ranks open it through that rank's entry in
/proc, so the kernel frees it with the last process that maps it, however that process ends. It is
not limited by the size of /dev/shm, which is small in many containers.
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
    """Return an identity shared by processes that see the same files and processes, followed by
    this process's pid among them; None if the system does not provide it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "user")]
        return [boot, *spaces, str(os.getuid()), os.readlink("/proc/self")]
    except OSError:
        return None


@dataclass(frozen=True)
class Host:
    """Ranks that share memory with this one. All methods are collective over the ranks of all
    hosts; nothing is sent if no two ranks share a host.

    Attributes:
        exchange: over all ranks.
        ranks: the ranks of this host, ascending; the first leads.
        most: the largest number of ranks of any host.
    """

    exchange: Exchange
    ranks: tuple[int, ...]
    most: int

    @classmethod
    def alone(cls, exchange: Exchange) -> Host:
        """Return a host of this rank alone, as if every rank had its own."""
        return cls(exchange, (exchange.world.rank,), 1)

    @classmethod
    def discover(cls, exchange: Exchange) -> Host:
        """Find the ranks on this rank's host. Collective."""
        rank, identities = exchange.world.rank, exchange.gather_json(host_identity())
        mine = identities[rank] or []
        alike = [r for r, other in enumerate(identities) if other and other[:-1] == mine[:-1]]
        # the kernel requires the same permission here as for opening the process's memory
        opens = bool(mine) and os.path.exists(f"/proc/{identities[alike[0]][-1]}/cwd")
        opening = exchange.gather_json(opens)
        ranks = tuple(r for r in alike if opening[r]) if opens else (rank,)
        return cls(exchange, ranks, exchange.max(len(ranks)))

    @property
    def leads(self) -> bool:
        return self.exchange.world.rank == self.ranks[0]

    @property
    def holds_all(self) -> bool:
        """True if all ranks are on this host; the same on every rank."""
        return len(self.ranks) == self.exchange.world.size

    @property
    def place(self) -> int:
        """Index of this rank among the ranks of the host."""
        return self.ranks.index(self.exchange.world.rank)

    def from_leader(self, value: T) -> T:
        """Return the leader's ``value``, which must be JSON."""
        if self.most == 1:
            return value
        agreed: T = self.exchange.gather_json(value)[self.ranks[0]]
        return agreed

    def wait(self) -> None:
        """Wait for all ranks, so that each sees what the others have written."""
        if self.most > 1:
            self.exchange.max(0)

    @contextmanager
    def memory(self, size: int) -> Iterator[int | None]:
        """Yield a file descriptor of ``size`` bytes of zeroed memory, to be mapped in the block;
        None for a rank alone on its host.

        Raises:
            TrainingError: the memory cannot be allocated or opened.
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
            pid, number = self.from_leader([os.readlink("/proc/self"), handle])
            if several and not self.leads:
                handle = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TrainingError(
                f"ranks {list(self.ranks)} of this host cannot share {size:,} bytes of memory: "
                f"{error.strerror or error}",
                remedy="free memory there, or raise the limit on open files (ulimit -n)",
            ) from error
        self.wait()  # the leader closes its descriptor only after all ranks have opened theirs
        return handle

    def array(self, count: int, dtype: Any) -> np.ndarray:
        """Return ``[count]`` zeros in memory shared by all ranks of the host."""
        size = count * np.dtype(dtype).itemsize
        with self.memory(size) as handle:
            if handle is None or not size:
                return np.zeros(count, dtype)
            return np.frombuffer(mmap.mmap(handle, size), dtype)

    def publish(self, values: np.ndarray) -> np.ndarray:
        """Return the leader's ``values [n]`` in shared memory."""
        shared = self.array(self.from_leader(len(values)), values.dtype)
        if self.leads:
            shared[:] = values
        self.wait()
        return shared

    def add_up(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of the ``values [n]`` of the host's ranks, added in rank order in shared
        memory."""
        if self.most == 1:
            return values
        total = self.array(len(values), values.dtype)
        for turn in range(self.most):
            if turn == self.place:
                total += values
            self.wait()
        return total
