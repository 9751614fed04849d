"""Several ranks on this machine, with a real gloo process group, as forked processes.

The processes are kept between calls: what the first training in a process takes (lazy imports,
compiled kernels) is paid once. Each call has a process group of its own, on the random state of
this process.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import random
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities import registry
from ray import cloudpickle  # of functions within functions, too

from raygnn.sampling.exchange import Exchange, World

# Where there is a GPU a forked process can not use it, nor run backward; a spawned one imports all.
_METHOD, TIMEOUT = ("spawn", 150.0) if "RAYGNN_TEST_DEVICE" in os.environ else ("fork", 60.0)
_KEPT = 4  # processes; ranks beyond them end with their call
_UNCONNECTED = "Gloo connectFullMesh failed"

# each trainer asks for the callbacks of all installed packages
registry.entry_points = functools.cache(registry.entry_points)

# The first backward pass decides for which devices autograd has threads. After torch.export a torch
# built for CUDA counts one that does not exist, and no fork could run backward.
torch.ones((), requires_grad=True).backward()

_patches: weakref.WeakSet[Any] = weakref.WeakSet()  # every MonkeyPatch


def run_ranks(
    size: int, function: Callable[..., Any], *args: Any, fresh: bool = False
) -> list[Any]:
    """Call ``function(exchange, *args)`` on ``size`` ranks; returns what each returned.

    Args:
        fresh: in processes forked for this call: of a function that ends its process, or leaves
            traces in it. So it is, too, where the function, or what a test has patched, cannot
            be pickled.

    Raises:
        RuntimeError: with the traceback of the first rank that raised.
    """
    results = _called(size, function, args, fresh)
    # Gloo does not connect now and then, and no rank has called the function
    if all(not ok and _UNCONNECTED in value for ok, value in results):
        results = _called(size, function, args, fresh)
    failures = [value for ok, value in results if not ok]
    if failures:
        # the cause, not the "connection closed by peer" of the other ranks
        raise RuntimeError(min(failures, key=lambda text: "by peer" in text))
    return [value for _, value in results]


def _called(
    size: int, function: Callable[..., Any], args: Sequence[Any], fresh: bool
) -> list[tuple[bool, Any]]:
    """Return ``(True, result)`` or ``(False, traceback)`` of each rank."""
    call = None if fresh or size > _KEPT else _for_kept_ranks(size, function, args)
    ranks = _pool[:size] if call else [_Process((function, args)) for _ in range(size)]
    with tempfile.TemporaryDirectory() as directory:
        for rank, process in enumerate(ranks):
            process.send((f"{directory}/store", World(rank, size), _State.now(), call))
        try:
            results = [process.receive() for process in ranks]
        except BaseException:  # such as pytest's time limit: their answers come too late
            end_kept_ranks()
            raise
    if ranks[0] not in _pool:
        _end(ranks)
    elif not all(ok for ok, _ in results):  # other ranks may still wait for it
        end_kept_ranks()
    else:
        for process in ranks:
            process.send(None)
    return results


def run_each(size: int, function: Callable[..., Any], arguments: Sequence[Any]) -> list[list[Any]]:
    """Run `run_ranks` for each of several tuples of arguments, with one process group for all."""
    return [list(values) for values in zip(*run_ranks(size, _each, function, arguments))]


def _each(exchange: Exchange, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    return [function(exchange, *args) for args in arguments]


def end_kept_ranks() -> None:
    """End the kept processes; the next call forks others."""
    ended = [*_pool]
    _pool.clear()  # first, as pytest's time limit may end this
    _end(ended)


@dataclass(frozen=True)
class _State:
    """State of this process that a fork at the time of the call would inherit."""

    directory: str
    environment: dict[str, str]
    torch: torch.Tensor
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> _State:
        numpy = np.random.get_state()
        return cls(os.getcwd(), dict(os.environ), torch.get_rng_state(), numpy, random.getstate())

    def restore(self) -> None:
        os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(self.environment)
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


class _Process:
    """A forked process that runs calls until its pipe is closed.

    Args:
        only: the function and arguments of its only call; None = calls name theirs.
    """

    def __init__(self, only: tuple[Callable[..., Any], Any] | None = None):
        # The child must collect nothing of this process: a handle of Ray's would be released over
        # this process's own connection, whose next answer would then never come. So it starts with
        # its collector off, and freezes what it was forked with.
        gc.disable()
        context: Any = multiprocessing.get_context(_METHOD)
        self._pipe, theirs = context.Pipe()
        if _METHOD == "fork":
            # their ends of this process's pipes, which would never be seen closed
            others = [self._pipe, *(process._pipe for process in _pool)]
        else:
            others, only = [], only and cloudpickle.dumps(only)
        self._process: BaseProcess = context.Process(target=_serve, args=(theirs, others, only))
        self._process.start()
        gc.enable()
        theirs.close()

    def send(self, call: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # `receive` reports its death
            self._pipe.send_bytes(pickle.dumps(call))

    def receive(self) -> tuple[bool, Any]:
        """Return ``(True, result)`` of the call, or ``(False, traceback)``."""
        try:
            if not self._pipe.poll(TIMEOUT):
                return False, "a rank did not answer"
            answer: tuple[bool, Any] = pickle.loads(self._pipe.recv_bytes())
            return answer
        except (EOFError, ConnectionError):
            self._wait()
            return False, f"a rank died without a word, exit code {self._process.exitcode}"

    def close(self) -> None:
        self._pipe.close()

    def join(self) -> None:
        self._wait()
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()

    def _wait(self) -> None:
        """Wait for its end, at most 5 s; `Process.join` would wait without an end, since the pipe
        that it looks at was released by the child."""
        deadline = time.monotonic() + 5
        while self._process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.005)


_pool: list[_Process] = []


def _end(processes: list[_Process]) -> None:
    for process in processes:
        process.close()
    for process in processes:
        process.join()


atexit.register(end_kept_ranks)


def _for_kept_ranks(size: int, function: Callable[..., Any], args: Sequence[Any]) -> bytes | None:
    """Return a call with the tests' patches; None if kept processes cannot receive them.

    The processes are forked, if they are not there yet, without the patches.
    """
    changed: dict[tuple[Any, str], Any] = {}
    for patch in _patches:
        for target, name, before in patch._setattr:
            if not isinstance(target, pytest.Config):  # which pytest itself patches
                changed.setdefault((target, name), before)
        if any(target is not os.environ for target, *_ in patch._setitem):  # which `_State` has
            return None
    if not all(isinstance(at, (ModuleType, type)) and name in vars(at) for at, name in changed):
        return None
    now = {(target, name): vars(target)[name] for target, name in changed}
    _set(changed)  # functions that a patch calls are pickled by name
    try:
        call = bytes(cloudpickle.dumps((function, args, now)))
    except Exception:
        return None
    else:
        _pool.extend(_Process() for _ in range(size - len(_pool)))
        return call
    finally:
        _set(now)


def _set(values: dict[tuple[Any, str], Any]) -> None:
    for (target, name), value in values.items():
        setattr(target, name, value)


def _serve(pipe: Connection, others: list[Connection], only: Any) -> None:
    gc.freeze()  # see above, where the collector was turned off
    faulthandler.enable(2)  # where the output of the test goes
    for other in others:
        other.close()
    if isinstance(only, bytes):
        only = cloudpickle.loads(only)
    if only is None and _METHOD == "fork":
        _release_files(pipe.fileno())
    with contextlib.suppress(EOFError):
        while _serve_call(pipe, only):
            pipe.recv_bytes()  # only now have all ranks answered
            dist.destroy_process_group()
            # Each of Gloo's groups has a thread that wakes every 10 ms while cycles keep the group.
            gc.collect()


def _serve_call(pipe: Connection, only: Any) -> bool:
    """Answer the next call; returns True if others may follow."""
    store, world, state, call = pickle.loads(pipe.recv_bytes())
    state.restore()
    try:
        answer = pickle.dumps((True, _run(store, world, call, only)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
        return False  # exit closes its connections, which the other ranks notice
    finally:
        pipe.send_bytes(answer)
    return call is not None


def _release_files(kept: int) -> None:
    """Close files that were open at the fork, so that no lock is held while this process is kept.

    The numbers stay taken: an inherited object that closes its file later would else close a
    socket of Gloo's that has its number by then.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (kept, null):
            with contextlib.suppress(OSError):  # the listing's own
                os.fstat(number)
                os.dup2(null, number)


def _run(store: str, world: World, call: bytes | None, only: Any) -> Any:
    function, args, patched = (*only, {}) if call is None else pickle.loads(call)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=TIMEOUT / 2),
    )
    with pytest.MonkeyPatch.context() as patch:
        for (target, name), value in patched.items():
            patch.setattr(target, name, value, raising=False)
        return function(Exchange(world, dist.group.WORLD), *args)


def _remember_patches() -> None:
    init = pytest.MonkeyPatch.__init__

    def remember(self: pytest.MonkeyPatch) -> None:
        init(self)
        _patches.add(self)

    pytest.MonkeyPatch.__init__ = remember  # type: ignore[method-assign]


_remember_patches()
