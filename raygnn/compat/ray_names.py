"""Private names of Ray."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from raygnn.compat.fallbacks import nothing, private

_SCALING = "ray.train.v2._internal.execution.scaling_policy"
_FAILURES = "ray.train.v2._internal.execution.failure_handling"

# Base class of our policies for Ray Train → its module. Ray's own scaling policies decide by
# resources that they read some time ago, and wait silently for nodes that do not come; its elastic
# policy restarts without a checkpoint. Its failure policy restarts max_failures times, even after a
# failure that every restart repeats.
RAY_TRAIN_CLASSES = {
    "FixedScalingPolicy": _SCALING,
    "NoopDecision": _SCALING,
    "ResizeDecision": _SCALING,
    "ScalingDecision": _SCALING,
    "DefaultFailurePolicy": _FAILURES,
    "FailureDecision": _FAILURES,
}


# Module that every process of an embedded Ray imports first. It makes the garbage collector run
# less often during the imports of Ray and torch, which then take 2.4 instead of 3.1 s.
PRELOAD = {"RAY_preload_python_modules": "raygnn.worker.preload"}

# Program that exits when the head node at its argument has accepted it. Ray's own connection waits
# for minutes, and reports a refusal as a text of C++ libraries, if at all.
KNOCK = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


@private(
    "ray._private.auto_init_hook:enable_auto_connect",
    "ray._private.worker:print_to_stdstream",
    otherwise=lambda *, mute: nothing,
    loses="Ray's own messages about workers that ended are shown beside raygnn's",
)
def quiet_ray(*, mute: bool) -> Callable[[], None]:
    """Prevent Ray from starting a new instance for a late call after shutdown. If ``mute``, also
    prevent it from printing that a worker ended, which raygnn reports itself. Return a function
    that restores Ray's behaviour."""
    from ray._private import auto_init_hook, worker

    undo = contextlib.ExitStack()
    undo.enter_context(_patched(auto_init_hook, "enable_auto_connect", False))
    if mute:
        undo.enter_context(_patched(worker, "print_to_stdstream", nothing))
    return undo.close


@private(
    "ray._raylet:AuthenticationTokenLoader.instance",
    otherwise=nothing,
    loses="a process cannot connect to two clusters with different tokens",
)
def forget_token() -> None:
    """Have Ray read the token again; it caches the first token of a process."""
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
    """Shut down Ray, or the connection to it. ``then`` is called when Ray's core has ended, which
    resets the handler of SIGTERM, but before the wait for its processes."""
    import ray
    from ray._private import worker

    node: Any = worker._global_node  # None if there is no connection
    kill: Any = getattr(node, "kill_all_processes", None)
    # patched only for now: the node calls it once more when this process ends
    with _patched(node, "kill_all_processes", lambda **options: (then(), kill(**options))):
        ray.shutdown()


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, and restore it at the end; does nothing if it does not exist."""
    if not hasattr(owner, name):
        yield
        return
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@private(
    "ray._private.services:ConsolePopen",
    "ray._private.node:Node",
    otherwise=lambda *, logs: contextlib.nullcontext(),
    loses="an embedded Ray starts 3 s later, and Ctrl-C ends its processes before a checkpoint",
)
@contextlib.contextmanager
def own_session(*, logs: bool) -> Iterator[None]:
    """Start the processes of an embedded Ray in a separate session, without an autoscaler, the
    dashboard's server and, unless ``logs``, the reader of workers' output, which together take 3 s.

    A terminal or a job manager sends signals to a whole process group. In the same session they
    would end Ray's processes first, and an interrupted run could not save a checkpoint.
    """
    from ray._private import node, services

    idle = ["start_monitor", "start_api_server", *([] if logs else ["start_log_monitor"])]
    own = functools.partial(services.ConsolePopen, start_new_session=True)
    with contextlib.ExitStack() as patches:
        patches.enter_context(_patched(services, "ConsolePopen", own))
        for name in idle:
            patches.enter_context(_patched(node.Node, name, nothing))
        yield


@private(
    "ray._private.state:actors(job_id)",
    otherwise=nothing,
    loses="worker processes that die as soon as they start are reported after Ray's own timeout",
)
def list_actors() -> list[Mapping[str, Any]] | None:
    """Return the actors of this process's Ray job, or only its own children if the process is an
    actor; None if they cannot be listed. Ray's public function needs the dashboard, which an
    embedded Ray does not have."""
    import ray
    from ray._private import state

    context = ray.get_runtime_context()
    actors = state.actors(job_id=ray.JobID(bytes.fromhex(context.get_job_id())))
    if (actor := context.get_actor_id()) is None:
        return list(actors.values())
    owner = actors[actor]["Address"]
    return [each for each in actors.values() if each["OwnerAddress"] == owner]


@private(
    "ray._private.worker:global_worker",
    otherwise=nothing,
    loses="a job that does not stop in time ends when its command disconnects from Ray",
)
def kill_actors(class_name: str) -> None:
    """Kill this process's actors of a class, to which Ray Train returns no handle."""
    import ray
    from ray._private.worker import global_worker

    for actor in list_actors() or ():
        if actor["ActorClassName"] == class_name and actor["State"] != "DEAD":
            actor_id = ray.ActorID(bytes.fromhex(actor["ActorID"]))
            global_worker.core_worker.kill_actor(actor_id, True)


@private(
    "ray._private.state:state.available_resources_per_node",
    otherwise=dict,
    loses="free resources are counted without those that other jobs hold",
)
def free_resources() -> dict[str, dict[str, float]]:
    """Return node id → its free resources. Ray's public function sums them over all nodes."""
    from ray._private import state

    return dict(state.state.available_resources_per_node())


@private(
    "ray._private.state:state.get_draining_nodes",
    otherwise=dict,
    loses="no checkpoint is written when the cloud announces a preemption",
)
def draining_nodes() -> dict[str, float | None]:
    """Return node id → seconds until the node is removed (None = unknown), for nodes that are being
    drained. Ray Train's own watcher calls the same function."""
    from ray._private import state

    now = time.time()
    deadlines: Mapping[str, int] = state.state.get_draining_nodes()
    return {node: at / 1000 - now if at else None for node, at in deadlines.items()}


def resources_of(scaling_config: Any) -> dict[str, float]:
    """Return the resources of one worker by name, as Ray Train counts them."""
    return dict(scaling_config._resources_per_worker_not_none)


@private(
    *(f"{module}:{name}" for name, module in RAY_TRAIN_CLASSES.items()),
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
    loses="Ray Train scales and restarts by its own policies: a run waits for nodes without a "
    "message, and restarts even after a failure that every restart repeats",
)
def scales_itself() -> bool:
    """True if Ray Train can run with our scaling and failure policies."""
    return True


def lean_trainer(
    policy: Any,
    failures: Any,
    *,
    local: bool,
    inside: bool,
    stopped: Callable[[], bool],
    died: Callable[[], bool],
) -> type[Any]:
    """Return a TorchTrainer class with our policies (see `scales_itself`) that starts up to four
    processes fewer, each of which takes 1 to 3 s.

    The process for Ray Data's datasets is never started. If the ranks end with this process
    (``inside``), the controller runs in the thread that calls ``fit``, without a placement group
    cleaner, which waits 10 s for a dashboard when it ends. An embedded Ray (``local``) needs no
    autoscaler.

    A call of a Ray that has ended would end this process, so none is made once ``stopped`` or
    ``died`` returns True.
    """
    from ray.runtime_context import RuntimeContext
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.worker_group import WorkerGroup

    idle = {"DatasetsCallback"} | ({"PlacementGroupCleanerCallback"} if inside else set())

    class WatchedWorkerGroup(WorkerGroup):
        def poll_status(self, timeout: float | None = None) -> Any:
            if died():
                raise asyncio.CancelledError
            return super().poll_status(timeout)

    class Controller(TrainController):
        worker_group_cls = WatchedWorkerGroup

    class LeanTrainer(TorchTrainer):
        def _initialize_and_run_controller(self, **arguments: Any) -> Any:
            if stopped():
                raise RuntimeError("stopped before it began")
            arguments["scaling_policy"] = policy
            arguments["failure_policy"] = failures(self.run_config.failure_config)
            if not inside:
                return super()._initialize_and_run_controller(**arguments)
            for request in ("send", "maybe_send", "cancel") if local else ():
                setattr(policy, f"_{request}_resource_request", lambda: None)
            controller = Controller(**arguments)
            # otherwise it passes its actor handle to the ranks, which would query it
            with _patched(RuntimeContext, "current_actor", None):
                asyncio.run(controller.run())
            return controller.get_result()

        def _create_default_callbacks(self) -> list[Any]:
            callbacks: list[Any] = super()._create_default_callbacks()
            return [each for each in callbacks if type(each).__name__ not in idle]

    return LeanTrainer
