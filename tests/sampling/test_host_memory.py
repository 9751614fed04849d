"""Memory that ranks share: once for a host, seen by all of its ranks, and gone when they are."""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from raygnn.errors import TrainingError
from raygnn.graph.partition.layout import PartitionMeta
from raygnn.sampling.cache import choose_for_host
from raygnn.sampling.exchange import Exchange, World
from raygnn.sampling.features import FeatureStore, Inputs, build_store
from raygnn.sampling.host_memory import Host, host_identity
from tests.support.graphs import out_degrees, partitioned, random_graph, shard_of
from tests.support.hosts import hosts, needs_hosts
from tests.support.ranks import run_ranks

CHECKOUT = Path(__file__).resolve().parents[2]


def store_of(exchange: Exchange, meta: PartitionMeta, host: Host) -> tuple[FeatureStore, int]:
    """Build a store that caches half of the rows of other hosts, and return it with their bytes."""
    shard = shard_of(exchange, meta, replicated=True)
    cached = choose_for_host(out_degrees(shard), shard.bounds, host, 0.5)
    inputs = {"_N": Inputs(("feat",), (), ())}
    store = build_store(shard, exchange, inputs, dtype=torch.float32, host=host, cached=cached)
    return store, len(cached["_N"]) * store.row_bytes("_N")


def shared_bytes(field: str) -> int:
    """Sum a field over this process's mappings of memory that ranks share, in bytes."""
    text, total = Path("/proc/self/smaps").read_text(), 0
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.M):
        if "memfd:raygnn" in mapping.partition("\n")[0]:
            total += 1024 * int(re.findall(rf"^{field}: +(\d+) kB", mapping, re.M)[0])
    return total


def _held(exchange: Exchange, meta: PartitionMeta) -> tuple[int, int, int, int]:
    """Return bytes of the cache, and of shared memory here, in total and in proportion; and the
    hits."""
    rank = exchange.world.rank
    host = Host(exchange, (0, 1) if rank < 2 else (2,), 2)
    store, cached = store_of(exchange, meta, host)
    store.gather({"_N": np.arange(meta.num_nodes("_N"))})
    exchange.max(0)
    held = shared_bytes("Rss"), shared_bytes("Pss")
    exchange.max(0)
    return cached, *held, store.hits


def test_the_cache_of_two_ranks_is_in_memory_once(tmp_path: Path) -> None:
    meta = partitioned(random_graph(30_000, 8, features=64), tmp_path, 3)
    one, two, other = run_ranks(3, _held, meta, fresh=True)
    cached = one[0]
    assert cached == two[0] > 10**6
    assert one[3] == two[3] == cached // 256
    for _, held, _, _ in (one, two):  # both read all of it
        assert held >= cached
    table = 48 * cached // 256 + 10 * 4096  # where its rows are found
    assert cached <= one[2] + two[2] < cached + table
    assert other[1] == 0


def _killed(exchange: Exchange, meta: PartitionMeta) -> None:
    store, _ = store_of(
        exchange, meta, Host(exchange, (0, 1) if exchange.world.rank < 2 else (2,), 2)
    )
    store.gather({"_N": np.arange(10)})
    exchange.max(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_that_are_killed_leave_nothing(tmp_path: Path) -> None:
    meta = partitioned(random_graph(3_000, 4), tmp_path, 3)

    def files() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if "raygnn" in name}

    before = files()
    run_ranks(3, _held, meta, fresh=True)  # the node's staged partition stays
    staged = set(os.listdir(tmp_path / "stage"))
    with pytest.raises(RuntimeError, match="exit code -9"):
        run_ranks(3, _killed, meta, fresh=True)
    strays = files() - before
    for name in strays:
        Path("/dev/shm", name).unlink(missing_ok=True)
    assert not strays
    assert set(os.listdir(tmp_path / "stage")) == staged


def _chosen(exchange: Exchange) -> list[int]:
    rank = exchange.world.rank
    scores = np.zeros(9, np.float32)
    scores[[5, 6, 8]] = [(4, 3, 0), (0, 3, 4), (9, 9, 9)][rank]
    host = Host(exchange, (0, 1) if rank < 2 else (2,), 2)
    return choose_for_host({"_N": scores}, {"_N": np.array([0, 2, 4, 9])}, host, 0.2)["_N"].tolist()


def test_the_rows_that_a_host_keeps_are_those_that_its_ranks_ask_for_together() -> None:
    assert run_ranks(3, _chosen) == [[6], [6], []]


def test_memory_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    host = Host(Exchange(World(0, 1)), (0, 1), 2)
    with pytest.raises(TrainingError, match=r"ranks \[0, 1\].*1,000 bytes.*Too many"):
        host.array(1000, np.int8)


def _barred(exchange: Exchange) -> tuple[int, ...]:
    if exchange.world.rank == 1:
        os.path.exists = lambda path: False
    return Host.discover(exchange).ranks


def test_a_rank_that_may_not_open_the_others_memory_is_alone() -> None:
    assert run_ranks(3, _barred, fresh=True) == [(0, 2), (1,), (0, 2)]


IDENTITY = "from raygnn.sampling.host_memory import host_identity; print(host_identity())"


@pytest.mark.long
@needs_hosts()
def test_ranks_of_other_hosts_share_nothing() -> None:
    """Containers on one machine share nothing either, since they do not see each other's
    processes."""
    with hosts(2, share=[CHECKOUT]) as group:
        command = [sys.executable, "-c", IDENTITY]
        said = [host.run(command, cwd=CHECKOUT, timeout=60).stdout for host in group]
    identities = [tuple(ast.literal_eval(text)[:-1]) for text in said]
    here = host_identity()
    assert here is not None
    assert len({*identities, tuple(here[:-1])}) == 3
