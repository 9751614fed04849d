"""Every private or patched name of Ray, Lightning and torch; no other module uses one.

A function here that uses such names is decorated with `private`, which calls a function of public
names instead if a name is missing or takes other arguments, or if `PLAIN` is set. What is lost then
is comfort, not correctness: `missing_comforts` says what, and ``raygnn check`` shows it.

The names were compared in ray 2.53 to 2.60, lightning 2.4 to 2.6 and torch 2.4 to 2.15. Seconds of
CPU are those of one process on a 2-core machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import os
import re
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from types import ModuleType
from typing import Any, TypeVar

# Environment variable; 1 = use public names only.
PLAIN = "RAYGNN_PLAIN"

_SCALING = "ray.train.v2._internal.execution.scaling_policy"
_FAILURES = "ray.train.v2._internal.execution.failure_handling"

# Base classes of our policies for Ray Train, imported on first use: name here → module and name
# there.
_CLASSES = {
    # Ray's policies decide by resources that they read some time ago, and wait in silence for nodes
    # that do not come; its elastic policy restarts without a checkpoint.
    "FixedScalingPolicy": (_SCALING, "FixedScalingPolicy"),
    "NoopDecision": (_SCALING, "NoopDecision"),
    "ResizeDecision": (_SCALING, "ResizeDecision"),
    "ScalingDecision": (_SCALING, "ScalingDecision"),
    # A scaling policy does not know the placement group that the ranks hold.
    "WorkerGroupCallback": ("ray.train.v2._internal.execution.callback", "WorkerGroupCallback"),
    # Ray's failure policy restarts max_failures times after a failure that every restart meets.
    "DefaultFailurePolicy": (_FAILURES, "DefaultFailurePolicy"),
    "FailureDecision": (_FAILURES, "FailureDecision"),
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, original = _CLASSES[name]
    return getattr(importlib.import_module(module), original)


_Function = TypeVar("_Function", bound=Callable[..., Any])
_COMFORTS: list[tuple[tuple[str, ...], str]] = []  # private names, and what is lost without them


def private(
    *names: str, otherwise: Callable[..., Any], loses: str
) -> Callable[[_Function], _Function]:
    """Decorate a function that uses private names: ``otherwise`` is called, with the same
    arguments, if one of them is not usable or `PLAIN` is set.

    Args:
        names: ``"module:attribute"`` each; ``"module:attribute(a, b)"`` for a function with the
            names of the parameters that we pass; ``"package<2.7"`` for a version that is not known.
        loses: what is lost, for ``raygnn check``.
    """
    _COMFORTS.append((names, loses))

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            chosen = otherwise if _unusable(names, os.environ.get(PLAIN)) else function
            return chosen(*args, **options)

        return call  # type: ignore[return-value]

    return decorate


def missing_comforts() -> list[tuple[str, str]]:
    """Return why private names are not used here, with what is lost; imports what they are in."""
    plain = os.environ.get(PLAIN)
    return [(why, loses) for names, loses in _COMFORTS if (why := _unusable(names, plain))]


@functools.cache
def _unusable(names: tuple[str, ...], plain: str | None) -> str:
    """Return why private names are not to be used; empty if they are."""
    if plain == "1":
        return f"{PLAIN} is set"
    for name in names:
        library, _, limit = name.partition("<")
        if limit:
            installed = metadata.version(library)
            if _minor(installed) >= _minor(limit):
                return f"{library} {installed} is newer than those that were compared"
            continue
        match = re.fullmatch(r"([\w.]+):([\w.]+)(?:\((.*)\))?", name)
        assert match is not None, name
        module, path, parameters = match.groups()
        try:
            owner: Any = importlib.import_module(module)
            found = functools.reduce(getattr, path.split("."), owner)
        except (ImportError, AttributeError):
            return f"{module}.{path} is missing"
        if parameters is not None and not _takes(found, re.findall(r"\w+", parameters)):
            return f"{module}.{path} takes other arguments than ({parameters})"
    return ""


def _minor(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


def _takes(function: Any, names: list[str]) -> bool:
    """True if a function can be called with these parameters, and with no others."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in function without a signature
        return True
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {each.name for each in parameters if each.kind not in variadic}
    needed = {
        each.name
        for each in parameters
        if each.default is inspect.Parameter.empty and each.kind not in variadic
    }
    takes_any = any(each.kind in variadic for each in parameters)
    return needed <= set(names) and (takes_any or set(names) <= named)


# ── Ray ──────────────────────────────────────────────────────────────────────────────────────

# Module that every process of an embedded Ray imports first. Each imports Ray and torch; with a
# tenth of the garbage collector's passes, since imports make no garbage, that takes 2.4 instead of
# 3.1 s.
PRELOAD = {"RAY_preload_python_modules": "raygnn.worker.preload"}

# Program that exits when the head node at its argument has accepted it. Ray's own connection waits
# for minutes and reports a refusal in the words of its C++ libraries, if at all.
KNOCK = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


def _nothing(*args: Any, **options: Any) -> None:
    """Do nothing, in place of a comfort."""


def _undo_nothing(*args: Any, **options: Any) -> Callable[[], None]:
    return _nothing


@private(
    "ray._private.auto_init_hook:enable_auto_connect",
    "ray._private.worker:print_to_stdstream",
    otherwise=_undo_nothing,
    loses="Ray's own lines about workers that ended are shown beside ours",
)
def quiet_ray(*, mute: bool) -> Callable[[], None]:
    """Prevent Ray from starting a new instance when a late call arrives after shutdown and, if
    ``mute``, from printing that a worker ended, which we report ourselves; returns what undoes
    that."""
    from ray._private import auto_init_hook, worker

    changes: list[tuple[Any, str, Any]] = [(auto_init_hook, "enable_auto_connect", False)]
    if mute:
        changes.append((worker, "print_to_stdstream", lambda *args, **options: None))
    return _patched(changes)


@private(
    "ray._raylet:AuthenticationTokenLoader.instance",
    otherwise=_nothing,
    loses="a process cannot connect to two clusters with different tokens",
)
def forget_token() -> None:
    """Have Ray, which keeps the first token of a process, read it again."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    AuthenticationTokenLoader.instance().reset_cache()


def _shut_down_ray(then: Callable[[], object]) -> None:
    import ray

    ray.shutdown()
    then()


@private(
    "ray._private.worker:_global_node",
    otherwise=_shut_down_ray,
    loses="SIGTERM ends the command at once while Ray shuts down",
)
def shut_down_ray(then: Callable[[], object]) -> None:
    """Shut down Ray, or the connection to it. ``then`` is called after its core has ended, which
    resets the handler of SIGTERM, and before its processes are waited for."""
    import ray
    from ray._private import worker

    node: Any = worker._global_node  # None if there is no connection
    kill: Any = getattr(node, "kill_all_processes", None)
    undo = _patched([(node, "kill_all_processes", lambda **options: (then(), kill(**options)))])
    try:
        ray.shutdown()
    finally:
        undo()  # the node calls it once more when this process ends


def _patched(changes: list[tuple[Any, str, Any]]) -> Callable[[], None]:
    """Set existing attributes, ``(owner, name, value)`` each; returns what undoes that."""
    changes = [change for change in changes if hasattr(change[0], change[1])]
    before = [getattr(owner, name) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)

    def undo() -> None:
        for (owner, name, _), value in zip(changes, before, strict=True):
            setattr(owner, name, value)

    return undo


@private(
    "ray._private.services:ConsolePopen",
    "ray._private.node:Node",
    otherwise=lambda *, logs: contextlib.nullcontext(),
    loses="an embedded Ray starts 3 s later, and Ctrl-C ends its processes before a checkpoint",
)
@contextlib.contextmanager
def own_session(*, logs: bool) -> Iterator[None]:
    """Start the processes of an embedded Ray in a session of their own, without an autoscaler, the
    dashboard's server and, unless ``logs``, the reader of workers' output. These three take 3 s,
    and the wait for them as long.

    Signals that a terminal or a job manager sends to the whole process group would otherwise end
    Ray's processes first: an interrupted run would not save a checkpoint.
    """
    from ray._private import node, services

    popen = getattr(services, "ConsolePopen", None)
    idle = ["start_monitor", "start_api_server", *([] if logs else ["start_log_monitor"])]
    undo = _patched(
        [
            (services, "ConsolePopen", popen and functools.partial(popen, start_new_session=True)),
            *((node.Node, name, lambda *args, **options: None) for name in idle),
        ]
    )
    try:
        yield
    finally:
        undo()


@private(
    "ray._private.state:actors(job_id)",
    otherwise=_nothing,
    loses="worker processes that die as soon as they start are reported after Ray's own timeout",
)
def actors_of(job: str) -> list[Mapping[str, Any]] | None:
    """Return the actors of a job, by its id in hexadecimal; None if they cannot be listed. The
    public function needs the dashboard, which an embedded Ray does not have."""
    import ray
    from ray._private import state

    return list(state.actors(job_id=ray.JobID(bytes.fromhex(job))).values())


@private(
    "ray._private.worker:global_worker",
    otherwise=_nothing,
    loses="a job that does not stop in time ends when its command disconnects from Ray",
)
def kill_actors(class_name: str) -> None:
    """Kill this process's actors of a class; Ray Train returns no handle of them."""
    import ray
    from ray._private.worker import global_worker

    for actor in actors_of(ray.get_runtime_context().get_job_id()) or ():
        if actor["ActorClassName"] == class_name and actor["State"] != "DEAD":
            actor_id = ray.ActorID(bytes.fromhex(actor["ActorID"]))
            global_worker.core_worker.kill_actor(actor_id, True)


@private(
    "ray._private.state:state.available_resources_per_node",
    otherwise=dict,
    loses="free resources are counted without those that other jobs hold",
)
def free_resources() -> dict[str, dict[str, float]]:
    """Return node id → its free resources; the public function returns their sum over all nodes."""
    from ray._private import state

    free: dict[str, dict[str, float]] = state.state.available_resources_per_node()
    return free


@private(
    "ray._private.state:state.get_draining_nodes",
    otherwise=dict,
    loses="no checkpoint is written when the cloud announces that it takes a node away",
)
def draining_nodes() -> dict[str, float | None]:
    """Return the ids of nodes that are being drained → seconds until they go, None if unknown.

    Ray Train's own watcher asks the same way. Without it an announced preemption costs up to
    ``fault.checkpoint_every``."""
    from ray._private import state

    now = time.time()
    deadlines: Mapping[str, int] = state.state.get_draining_nodes()
    return {node: at / 1000 - now if at else None for node, at in deadlines.items()}


def held_group(worker_group: Any) -> Any:
    """Return the placement group of Ray Train's workers."""
    state = worker_group.get_worker_group_state()
    handle = getattr(state, "placement_group_handle", None)  # in 2.60
    return state.placement_group if handle is None else handle.placement_group


def resources_of(scaling_config: Any) -> dict[str, float]:
    """Return the resources of one worker by name, as Ray Train counts them."""
    needs: dict[str, float] = scaling_config._resources_per_worker_not_none
    return needs


@private(
    *(f"{module}:{name}" for module, name in _CLASSES.values()),
    f"{_SCALING}:FixedScalingPolicy(scaling_config)",
    f"{_SCALING}:FixedScalingPolicy.make_decision_for_non_running_worker_group(self)",
    f"{_SCALING}:FixedScalingPolicy.make_decision_for_running_worker_group"
    "(self, worker_group_state, worker_group_status)",
    f"{_SCALING}:ResizeDecision(num_workers, resources_per_worker)",
    f"{_FAILURES}:DefaultFailurePolicy(failure_config)",
    f"{_FAILURES}:DefaultFailurePolicy.make_decision(self, training_failed_error)",
    "ray.train:ScalingConfig._resources_per_worker_not_none",
    "ray.train.torch:TorchTrainer._initialize_and_run_controller",
    "ray.train.torch:TorchTrainer._create_default_callbacks(self)",
    "ray.train.v2._internal.execution.controller:TrainController.run(self)",
    "ray.train.v2._internal.execution.worker_group:WorkerGroup.poll_status(self, timeout)",
    otherwise=lambda: False,
    loses="Ray Train scales and restarts by its own policies: a run waits for nodes without saying "
    "so, and restarts after failures that a restart meets again",
)
def scales_itself() -> bool:
    """True if Ray Train can run with our scaling and failure policies."""
    return True


def lean_trainer(
    policy: Any,
    failures: Any,
    callback: Any,
    *,
    local: bool,
    stopped: Callable[[], bool],
    died: Callable[[], bool],
) -> type[Any]:
    """Return a TorchTrainer class with our policies, which starts up to four processes less, of 1
    to 3 s each; see `scales_itself`.

    It starts none if it was stopped before: calls of a Ray that has ended, or ``died``, end this
    process.

    One of them serves Ray Data's datasets, which are not used. On an embedded Ray the controller
    runs in this process, in the thread that calls ``fit``, and two more are not needed, which Ray
    would start one after the other before any rank: one removes the placement group if the
    controller dies, one sends requests to an autoscaler.
    """
    from ray.runtime_context import RuntimeContext
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.worker_group import WorkerGroup

    idle = {"DatasetsCallback"} | ({"PlacementGroupCleanerCallback"} if local else set())

    class Ranks(WorkerGroup):
        def poll_status(self, timeout: float | None = None) -> Any:
            if died():  # any further call of Ray would end this process
                raise asyncio.CancelledError
            return super().poll_status(timeout)

    class Controller(TrainController):
        worker_group_cls = Ranks

    class LeanTrainer(TorchTrainer):
        def _initialize_and_run_controller(self, **arguments: Any) -> Any:
            if stopped():
                raise RuntimeError("stopped before it began")
            arguments["scaling_policy"] = policy
            arguments["failure_policy"] = failures(self.run_config.failure_config)
            if not local:
                return super()._initialize_and_run_controller(**arguments)
            for request in ("send", "maybe_send", "cancel"):  # not in 2.51
                setattr(policy, f"_{request}_resource_request", lambda: None)
            controller = Controller(**arguments)
            # it passes ranks its actor handle, which they would query for what they reported
            undo = _patched([(RuntimeContext, "current_actor", None)])
            try:
                asyncio.run(controller.run())
            finally:
                undo()
            return controller.get_result()

        def _create_default_callbacks(self) -> list[Any]:
            callbacks: list[Any] = super()._create_default_callbacks()
            return [callback, *(each for each in callbacks if type(each).__name__ not in idle)]

    return LeanTrainer


# ── torch and torchmetrics ───────────────────────────────────────────────────────────────────


def _import_torchmetrics() -> None:
    import torchmetrics  # noqa: F401


@private(
    "torchmetrics<1.10",
    otherwise=_import_torchmetrics,
    loses="every rank starts 1 s later",
)
def import_torchmetrics() -> None:
    """Import torchmetrics without scipy.signal, which takes 0.8 to 1.0 of its 1.0 to 1.2 s in
    every rank (torchmetrics 1.4 to 1.9).

    It reads that module only to learn whether an old name exists, for a package for speech.
    Afterwards scipy.signal is imported as usual by whatever needs it.
    """
    wanted_by = ("librosa", "pesq", "pystoi", "gammatone", "srmrpy")  # through torchmetrics
    known = "scipy.signal" in sys.modules or "torchmetrics" in sys.modules
    if known or any(importlib.util.find_spec(name) for name in wanted_by):
        return
    stand_in = ModuleType("scipy.signal")
    stand_in.hamming = None  # type: ignore[attr-defined]
    sys.modules["scipy.signal"] = stand_in
    try:
        _import_torchmetrics()
    finally:
        del sys.modules["scipy.signal"]


@private(
    "torch.distributed.distributed_c10d:_get_default_group()",
    "torch.distributed:ProcessGroup._get_backend",
    otherwise=_nothing,
    loses="the timeout of the process group is not compared with the planned one",
)
def group_timeout(device: Any) -> int | None:
    """Return the timeout of the default process group in seconds; None if it cannot be read."""
    import torch.distributed as dist

    group = dist.distributed_c10d._get_default_group()
    return int(group._get_backend(device).options._timeout.total_seconds())


def _shared_store() -> Any:
    """Return a store of its own for all ranks. Collective."""
    import torch.distributed as dist

    host, master = os.environ.get("MASTER_ADDR", "localhost"), dist.get_rank() == 0
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if master else None
    port: list[Any] = [None if store is None else store.port]
    dist.broadcast_object_list(port)
    return store or dist.TCPStore(host, port[0], is_master=False)


@private(
    "torch.distributed.distributed_c10d:_get_default_store()",
    otherwise=_shared_store,
    loses="ranks report failures to each other over a port of its own",
)
def default_store() -> Any:
    """Return the store of the default process group. Collective where that is private."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


@private(
    "torch.distributed.rendezvous:TCPStore",
    otherwise=_nothing,
    loses="rank 0's store listens on every address of its machine, not on the planned one alone",
)
def listen_on_own_address() -> None:
    """Have the stores of this process, created from now on, listen on their own address alone."""
    # torch.distributed.rendezvous is also the name of a function
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    module.TCPStore = _store


def _store(host_name: str, port: int, **options: Any) -> Any:
    """Return a TCPStore; on rank 0 with a socket that is bound to ``host_name``."""
    from torch.distributed import TCPStore

    if options.get("is_master") and (listener := _bound(host_name, port)) is not None:
        options["master_listen_fd"] = listener.detach()  # the store owns it
    return TCPStore(host_name, port, **options)


def _bound(host: str, port: int) -> socket.socket | None:
    """Return a listening socket; None if the address is not one of this machine's interfaces (as
    behind address translation) or is in use, which torch then reports."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        return listener
    except OSError:
        if listener is not None:
            listener.close()
        return None


@private(
    "torch._C:_distributed_c10d",
    otherwise=list,
    loses="the collective that a rank hangs in is not named",
)
def flight_recorders() -> list[Callable[..., bytes]]:
    """Return the functions that dump a rank's collectives, of gloo and of NCCL."""
    import torch

    names = ("_dump_fr_trace", "_dump_nccl_trace")
    dumps = [getattr(torch._C._distributed_c10d, name, None) for name in names]
    return [dump for dump in dumps if dump is not None]


def _copy_each(targets: list[Any], sources: list[Any]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@private(
    "torch:_foreach_copy_",
    otherwise=_copy_each,
    loses="steps with many buffers take longer",
)
def copy_all(targets: list[Any], sources: list[Any]) -> None:
    """Copy tensors of one type and device: one kernel on a GPU. On a CPU, 60 small buffers take
    25 us instead of 55."""
    import torch

    torch._foreach_copy_(targets, sources)


@private(
    "torch:_foreach_norm",
    otherwise=lambda tensors: [tensor.norm() for tensor in tensors],
    loses="the check for gradients that are not finite takes longer",
)
def norms(tensors: list[Any]) -> list[Any]:
    """Return the norm of each tensor, by one kernel on a GPU."""
    import torch

    return list(torch._foreach_norm(tensors))


@private(
    "torch.nn.parallel:DistributedDataParallel._check_reducer_finalized(self)",
    otherwise=_nothing,
    loses="a parameter without a gradient on one rank is reported by DDP one step later",
)
def check_reduced(ddp: Any) -> None:
    """Raise if a gradient is missing; DDP reports it in the next forward pass, when the other ranks
    already wait.

    Raises:
        RuntimeError: with the numbers of the parameters.
    """
    ddp._check_reducer_finalized()


@private(
    "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data(self)",
    otherwise=lambda ddp, *, rebuilt: [],
    loses="the report does not show the sizes of DDP's buckets",
)
def bucket_sizes(ddp: Any, *, rebuilt: bool) -> list[int]:
    """Return the bytes of DDP's buckets as rebuilt after the first step; with ``rebuilt`` False,
    for a DDP that looks for unused parameters, as they were at first."""
    logged = ddp._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or (not rebuilt and logged.get("bucket_sizes")) or ""
    return [int(size) for size in sizes.split(", ") if size]


BUCKET_ORDER = "the first step after a resume may round differently from three workers on"


@private(
    "torch.distributed:Reducer._rebuild_buckets",
    otherwise=lambda ddp, parameters: False,
    loses=BUCKET_ORDER,
)
def lay_out_buckets(ddp: Any, parameters: Iterable[Any]) -> bool:
    """Have DDP build its buckets as after a first backward pass in which gradients arrive in this
    order, before there is one; returns True if it did. Collective."""
    import torch

    ddp.reducer.prepare_for_backward([])
    for parameter in parameters:
        parameter.backward(torch.zeros_like(parameter))
    ddp.reducer._rebuild_buckets()
    ddp.zero_grad()
    return True


def before_load(module: Any, hook: Callable[..., None]) -> None:
    """Have a module call ``hook(module, state, prefix, …)`` before it loads a state."""
    if hasattr(module, "register_load_state_dict_pre_hook"):
        module.register_load_state_dict_pre_hook(hook)
    else:  # before torch 2.5
        module._register_load_state_dict_pre_hook(hook, with_module=True)


@private("torch:Tensor._base", otherwise=lambda tensor: True, loses="one more copy in typed layers")
def is_view(tensor: Any) -> bool:
    """True if a tensor may share another's memory, which then must not be written to."""
    return tensor._base is not None


def with_model(module: Any, model: Any) -> Any:
    """Return a shallow copy of a module whose ``model`` is another one; after ``copy.copy`` alone
    the two would share their table of submodules."""
    other = copy.copy(module)
    other._modules = {**module._modules, "model": model}
    return other


def _no_linear(x: Any, weight: Any, bias: Any) -> Any:
    raise NotImplementedError("torch.ops.mkldnn._linear_pointwise is not used")


@private(
    "torch:ops.mkldnn._linear_pointwise",
    otherwise=_no_linear,
    loses="linear layers on a CPU take longer",
)
def linear_of_mkldnn(x: Any, weight: Any, bias: Any) -> Any:
    """Return ``x @ weight.T + bias`` by oneDNN, as torch's compiler calls it: the bias is added in
    the same pass instead of filling the output first.

    Raises:
        NotImplementedError: this torch lacks it, or was built without oneDNN.
        RuntimeError: oneDNN has no such product for this processor.
    """
    import torch

    if not torch.backends.mkldnn.is_available():
        raise NotImplementedError("torch was built without oneDNN")
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], None)


@private(
    "torch:ops.aten._embedding_bag_per_sample_weights_backward",
    otherwise=lambda grad, rows, index, start, bag: (grad[bag] * rows[index]).sum(1),
    loses="gradients of edge weights take more memory",
)
def weight_gradient_of_bags(grad: Any, rows: Any, index: Any, start: Any, bag: Any) -> Any:
    """Return the gradient ``[E]`` of the weights of an ``embedding_bag`` sum: dot products of
    ``grad[bag]`` and ``rows[index]``, without these two being allocated, ``[E, F]`` each."""
    import torch

    dtype = grad.dtype
    if grad.is_cuda and dtype == torch.bfloat16:  # CUDA has no kernel for it (pytorch#185808)
        grad, rows = grad.float(), rows.float()
    return torch.ops.aten._embedding_bag_per_sample_weights_backward(
        grad, rows, index, start, bag, 0
    ).to(dtype)


# ── Lightning ────────────────────────────────────────────────────────────────────────────────


@private(
    "lightning<2.7",
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop",
    "lightning.pytorch.loops.utilities:_block_parallel_sync_behavior(strategy)",
    otherwise=_nothing,
    loses="Lightning's own training loop runs, which takes about 1,400 Python calls more per step",
)
def lean_steps(trainer: Any) -> None:
    """Have a training step call only callbacks that define a hook, and look up once per epoch what
    does not change: of the 1,850 Python calls that a step takes beside the engine's, 470 are left.

    Arguments and order of hooks, what `LightningModule.log` keeps, and the loop's counts and state
    are Lightning's. Lightning's own loop runs a step with a gradient scaler, loggers or a
    user-defined ``optimizer_step``, and the first one after a checkpoint. Ranks do not exchange
    whether they received SIGTERM before every batch, as in newer versions: the driver notifies
    them.
    """
    import torch
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior

    hooks: dict[str, list[Callable[..., Any]]] = {}  # name → those that callbacks define
    plain = takes_index = False

    def call(name: str, *args: Any, **named: Any) -> Any:
        """Call a hook of the callbacks, then of the module, and return the module's result."""
        module = trainer.lightning_module
        facts = vars(module)  # nn.Module.__setattr__ is slow
        before, facts["_current_fx_name"] = facts["_current_fx_name"], name
        for hook in hooks.get(name, ()):
            hook(trainer, module, *args)
        answer = getattr(module, name)(*args, **named)
        facts["_current_fx_name"] = before
        return answer

    class LeanLoop(_TrainingEpochLoop):
        def on_run_start(self, fetcher: Any) -> None:
            nonlocal plain, takes_index
            super().on_run_start(fetcher)
            for name in _STEP_HOOKS:
                all_of = [getattr(callback, name) for callback in trainer.callbacks]
                none = getattr(Callback, name)
                hooks[name] = [h for h in all_of if getattr(h, "__func__", None) is not none]
            module = trainer.lightning_module
            takes_index = "batch_idx" in self._build_kwargs(OrderedDict(), None, 0)
            steps = getattr(module.optimizer_step, "__func__", None)
            plain = (
                module.automatic_optimization
                and steps is LightningModule.optimizer_step
                and getattr(trainer.precision_plugin, "scaler", None) is None
                and not trainer.loggers
            )

        def _broadcast_sigterm_tensor(self) -> None:
            pass

        def _on_before_fetch(self) -> None:
            pass

        _on_after_fetch = _on_before_fetch  # of Lightning's profiler

        def _should_check_val_fx(self, fetcher: Any) -> bool:
            return False  # evaluation is not Lightning's

        def advance(self, fetcher: Any) -> None:
            if self.restarting or not plain:
                super().advance(fetcher)
                return
            module, progress = trainer.lightning_module, self.batch_progress
            connector, logged = trainer._logger_connector, self._results
            batch, _, _ = next(fetcher)
            index = self.batch_idx + 1
            progress.is_last_batch = fetcher.done
            batch = module.on_before_batch_transfer(batch, 0)
            batch = module.transfer_batch_to_device(batch, trainer.strategy.root_device, 0)
            batch = module.on_after_batch_transfer(batch, 0)
            progress.increment_ready()
            connector._first_loop_iter = connector._first_loop_iter is None
            logged.batch, logged.batch_size, logged.dataloader_idx = batch, None, None
            skip = call("on_train_batch_start", batch, index) == -1
            if skip:
                progress.is_last_batch = True
            else:
                progress.increment_started()
                output = self._step(batch, index)
            progress.increment_processed()
            if trainer.lr_scheduler_configs:
                self.update_lr_schedulers("step", update_plateau_schedulers=False)
                if self._num_ready_batches_reached():
                    self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            if skip:
                raise StopIteration
            call("on_train_batch_end", output, batch, index)
            if logged:
                connector.on_batch_end()
            logged.batch = None
            progress.increment_completed()

        def _step(self, batch: Any, index: int) -> Any:
            """Forward, backward, and the optimizer's step where batches do not accumulate."""
            automatic, strategy = self.automatic_optimization, trainer.strategy
            optimizer = trainer.optimizers[0]
            counts, steps = automatic.optim_progress.optimizer, not self._should_accumulate()
            results: list[Any] = []

            @torch.enable_grad()  # an optimizer may have none
            def closure() -> Any:
                given = {"batch": batch, "batch_idx": index} if takes_index else {"batch": batch}
                result = automatic._training_step(given)
                results.append(result)
                if index % trainer.accumulate_grad_batches == 0:
                    counts.zero_grad.increment_ready()
                    call("on_before_zero_grad", optimizer)
                    counts.zero_grad.increment_started()
                    call("optimizer_zero_grad", trainer.current_epoch, index, optimizer)
                    counts.zero_grad.increment_completed()
                if result.closure_loss is not None:
                    strategy.pre_backward(result.closure_loss)
                    call("on_before_backward", result.closure_loss)
                    call("backward", result.closure_loss)
                    call("on_after_backward")
                if steps:
                    call("on_before_optimizer_step", optimizer)
                    call(
                        "configure_gradient_clipping",
                        optimizer,
                        gradient_clip_val=trainer.gradient_clip_val,
                        gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                    )
                return result.loss

            if steps:
                counts.step.increment_ready()
                optimizer.step(closure=closure)
                if not results:
                    name = type(optimizer).__name__
                    raise RuntimeError(f"{name}.step did not call the closure that it was given")
                counts.step.increment_completed()
            else:
                with _block_parallel_sync_behavior(strategy):
                    closure()
            return {} if results[-1].loss is None else results[-1].asdict()

    loop = trainer.fit_loop.epoch_loop
    trainer.fit_loop.epoch_loop = LeanLoop(trainer, loop.min_steps, loop.max_steps)


_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
