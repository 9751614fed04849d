"""Unit costs that a benchmark of the whole engine cannot tell apart, each timed alone."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from bench_engine import CHECKOUT, PORT, WORK

from raygnn.sampling import kernels
from raygnn.sampling.exchange import Exchange, Ragged, RaggedByRank, World, exchange_ragged
from tests.hosts import hosts

_TALK = 20  # all-to-alls of one size
TALK_BYTES = 4 << 20


def time_locate(nodes: int) -> float:
    """ns per id that another rank owns: half of ``nodes``, a tenth of them cached."""
    rng = np.random.default_rng(0)
    half = nodes // 2
    ids, cached = rng.integers(half, nodes, 40_000), np.arange(half, nodes, 10)
    keys, slots = kernels.hash_slots(cached, half)
    bounds = np.array([0, half, nodes])
    return _fastest(lambda: kernels.locate(ids, bounds, 0, keys, slots, nodes)) / len(ids)


def time_number(nodes: int) -> float:
    """ns per id that is looked up among those found so far: ten times as many as are known."""
    rng = np.random.default_rng(0)
    known = rng.permutation(nodes)[: nodes // 80]
    ids = rng.integers(0, nodes, 10 * len(known))
    return _fastest(lambda: kernels.relabel(known, ids)) / len(ids)


def time_route() -> float:
    """ns per id of lists of ten, sent to no one and put back in another order."""
    exchange = Exchange(World(0, 1))
    rng = np.random.default_rng(0)
    lists = Ragged(np.arange(0, 200_001, 10), rng.integers(0, 1 << 30, 200_000))
    cuts = np.array([0, len(lists.indptr) - 1])
    owner = rng.integers(0, 2, len(lists.indptr) - 1)

    def once() -> None:
        order = np.argsort(owner, kind="stable")
        questions = RaggedByRank(Ragged.of_one(lists.ids[: len(order)][order]), cuts)
        exchange_ragged(exchange, [questions], np.dtype(np.int32))
        (found,) = exchange_ragged(exchange, [RaggedByRank(lists, cuts)], np.dtype(np.int32))
        found.lists.take(order)

    return _fastest(once) / len(lists.ids)


def _fastest(function: Callable[[], object]) -> float:
    """ns of the fastest of several calls."""
    function()
    times = []
    for _ in range(10):
        start = time.perf_counter_ns()
        function()
        times.append(time.perf_counter_ns() - start)
    return float(min(times))


def talk(world: int) -> tuple[float, float, float]:
    """ms of an all-to-all between hosts: of nothing, the processor's of that, and of 4 MiB sent
    by each."""
    with (
        tempfile.TemporaryDirectory(dir=WORK) as directory,
        hosts(world, share=[CHECKOUT]) as group,
    ):
        processes = [
            host.popen(
                [sys.executable, __file__, str(rank), str(world), group[0].address],
                env={**os.environ, "GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                cwd=directory,
            )
            for rank, host in enumerate(group)
        ]
        said = [process.communicate(timeout=120)[0] for process in processes]
    return tuple(json.loads(said[0]))  # type: ignore[return-value]


def talker(rank: int, world: int, address: str) -> None:
    """One rank of `talk`."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{PORT}",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=1),
    )
    found = []
    for size in (8, TALK_BYTES // (world - 1)):
        values = torch.ones(size * world, dtype=torch.uint8)
        out = torch.empty_like(values)
        times, cpus = [], []
        for _ in range(_TALK):
            start, cpu = time.perf_counter(), time.process_time()
            dist.all_to_all_single(out, values)
            times.append(time.perf_counter() - start)
            cpus.append(time.process_time() - cpu)
        found.append(1e3 * float(np.median(times)))
        if size == 8:
            found.append(1e3 * float(np.median(cpus)))
    print(json.dumps(found), flush=True)
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="one rank of `talk`")
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("address")
    talker(**vars(parser.parse_args()))
