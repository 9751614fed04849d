"""Several ranks on this machine, with a real gloo process group, as forked processes."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from raygnn.sampling.exchange import Exchange, World

TIMEOUT = 60.0


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(exchange, *args)`` on ``size`` ranks; returns what each returned.

    Raises:
        RuntimeError: with the traceback of the first rank that raised.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(theirs, f"{directory}/store", World(rank, size), function, args)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            results = [_receive(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
    if failures := [value for ok, value in results if not ok]:
        # the cause rather than "connection closed by peer", which is what the others die of
        raise RuntimeError(min(failures, key=lambda text: "by peer" in text))
    return [value for _, value in results]


def run_each(size: int, function: Callable[..., Any], arguments: Sequence[Any]) -> list[list[Any]]:
    """`run_ranks` for each of several tuples of arguments, by one process group for all."""
    return [list(values) for values in zip(*run_ranks(size, _each, function, arguments))]


def _each(exchange: Exchange, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    return [function(exchange, *args) for args in arguments]


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        return (
            pickle.loads(pipe.recv_bytes())
            if pipe.poll(TIMEOUT)
            else (False, "a rank did not answer")
        )
    except EOFError:
        return False, "a rank died without a word"


def _rank(
    pipe: Connection, store: str, world: World, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=TIMEOUT / 2),
        )
        answer = (True, function(Exchange(world, dist.group.WORLD), *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))  # plain: torch's own way shares memory of this process
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
