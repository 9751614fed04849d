"""Every private or patched name of Ray, Lightning and torch: nowhere else is one of them used.

Each was seen in ray 2.51 and 2.60, lightning 2.4 and 2.6, torch 2.4 and 2.13, unless said
otherwise. Where a version may lack it, what is here does without. Of each it says what breaks
without it, or what it saves: seconds of CPU are those of one process on a 2-core machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import importlib
import importlib.util
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

_SCALING = "ray.train.v2._internal.execution.scaling_policy"
_FAILURES = "ray.train.v2._internal.execution.failure_handling"

# What Ray Train's classes are derived from, imported when they are asked for:
# name here → module and name there.
_CLASSES = {
    # the communication variables of a rank must be set before its process group is made, which a
    # training function is too late for
    "TorchBackend": ("ray.train.torch.config", "_TorchBackend"),
    # Ray's policies start with what they were told some time ago, and wait in silence for nodes
    # that do not come; its elastic one starts anew, also with fewer workers, without a checkpoint
    "FixedScalingPolicy": (_SCALING, "FixedScalingPolicy"),
    "NoopDecision": (_SCALING, "NoopDecision"),
    "ResizeDecision": (_SCALING, "ResizeDecision"),
    "ScalingDecision": (_SCALING, "ScalingDecision"),
    # a policy of scaling is not told which placement group the ranks hold
    "WorkerGroupCallback": ("ray.train.v2._internal.execution.callback", "WorkerGroupCallback"),
    # a failure that a new start would meet again would be met max_failures times
    "DefaultFailurePolicy": (_FAILURES, "DefaultFailurePolicy"),
    "FailureDecision": (_FAILURES, "FailureDecision"),
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, original = _CLASSES[name]
    return getattr(importlib.import_module(module), original)


# ── Ray ──────────────────────────────────────────────────────────────────────────────────────

# Imported first by every process of a local Ray, each of which imports Ray and torch: a tenth of
# the garbage collector's passes, since imports make no garbage. Saves 0.7 of 3.1 s in each of
# its processes.
PRELOAD = {"RAY_preload_python_modules": "raygnn.worker.preload"}

# a program that ends when the head node at its argument lets it in; Ray's own connection asks for
# minutes, and gives the reason in the words of its C++ libraries, if at all
KNOCK = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


def quiet_ray(*, mute: bool) -> Callable[[], None]:
    """Keep Ray from starting another one for who still asks after the end of ours, and from
    printing, whatever it was told, on this process's output that a worker has gone, which we say
    in our own words; returns what undoes that."""
    from ray._private import auto_init_hook, worker

    changes: list[tuple[Any, str, Any]] = [(auto_init_hook, "enable_auto_connect", False)]
    if mute:
        changes.append((worker, "print_to_stdstream", lambda *args, **options: None))
    return _patched(changes)


def forget_token() -> None:
    """Have Ray, which keeps the first token of a process, look again which it is to show."""
    with contextlib.suppress(ImportError):  # a Ray without tokens
        from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

        AuthenticationTokenLoader.instance().reset_cache()


def shut_down_ray(then: Callable[[], object]) -> None:
    """End Ray, or the connection to it. ``then`` is called when its core has gone, which takes what
    SIGTERM does along, before its processes are waited for."""
    import ray
    from ray._private import worker

    node: Any = worker._global_node  # None where there is no connection
    kill: Any = getattr(node, "kill_all_processes", None)
    undo = _patched([(node, "kill_all_processes", lambda **options: (then(), kill(**options)))])
    try:
        ray.shutdown()
    finally:
        undo()  # the node calls it once more when this process ends


def _patched(changes: list[tuple[Any, str, Any]]) -> Callable[[], None]:
    """Set attributes that are there, as ``(owner, name, value)``; returns what undoes that."""
    changes = [change for change in changes if hasattr(change[0], change[1])]
    before = [getattr(owner, name) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)

    def undo() -> None:
        for (owner, name, _), value in zip(changes, before, strict=True):
            setattr(owner, name, value)

    return undo


@contextlib.contextmanager
def own_session(*, logs: bool) -> Iterator[None]:
    """Let what Ray starts have a session of its own, and be less: no autoscaler of one node, no
    server of the dashboard's, which is waited for, and no reader of workers' output without
    ``logs``. These three take 3 s, and the wait for them as long.

    What a terminal or a job manager sends to all of us would end Ray's processes first, and us in
    the middle of waiting for them: an interrupted run would not save.
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


def actors_of(job: str) -> list[Mapping[str, Any]]:
    """The actors of a job, by its id in hexadecimal; what is public for that needs the dashboard,
    which a local Ray has not."""
    import ray
    from ray._private import state

    return list(state.actors(job_id=ray.JobID(bytes.fromhex(job))).values())


def kill_actors(class_name: str) -> None:
    """Kill this process's actors of a class, of which Ray Train hands out no handle."""
    import ray
    from ray._private.worker import global_worker

    for actor in actors_of(ray.get_runtime_context().get_job_id()):
        if actor["ActorClassName"] == class_name and actor["State"] != "DEAD":
            actor_id = ray.ActorID(bytes.fromhex(actor["ActorID"]))
            global_worker.core_worker.kill_actor(actor_id, True)


def free_resources() -> dict[str, dict[str, float]]:
    """Node id → what is free on it; what is public says it of all nodes together."""
    from ray._private import state

    free: dict[str, dict[str, float]] = state.state.available_resources_per_node()
    return free


def draining_nodes() -> dict[str, float | None]:
    """The ids of the nodes that are to go, and in how many seconds; None where nobody says. As Ray
    Train's own watcher asks; without it a notice of the cloud's would cost up to
    ``fault.checkpoint_every``."""
    from ray._private import state

    now, ask = time.time(), getattr(state.state, "get_draining_nodes", None)
    deadlines: Mapping[str, int] = ask() if ask is not None else {}
    return {node: at / 1000 - now if at else None for node, at in deadlines.items()}


def held_group(worker_group: Any) -> Any:
    """The placement group of Ray Train's workers."""
    state = worker_group.get_worker_group_state()
    handle = getattr(state, "placement_group_handle", None)  # in 2.60
    return state.placement_group if handle is None else handle.placement_group


def resources_of(scaling_config: Any) -> dict[str, float]:
    """What a worker takes, by name, as Ray Train counts it."""
    needs: dict[str, float] = scaling_config._resources_per_worker_not_none
    return needs


def lean_trainer(
    policy: Any,
    failures: Any,
    callback: Any,
    *,
    local: bool,
    stopped: Callable[[], bool],
    died: Callable[[], bool],
) -> type[Any]:
    """A TorchTrainer with policies of ours, that starts fewer processes, of 1 to 3 s each.

    It starts none when it was stopped before: calls of a Ray that has ended, or ``died``, end this
    process.

    One serves Ray Data's datasets, of which there are none. On a Ray that goes with this process
    the controller is in it, in the thread that calls ``fit``, and two more are not needed, which
    Ray would start one after the other before any rank: who removes the placement group if the
    controller dies, and who is told what to ask an autoscaler for.
    """
    from ray.runtime_context import RuntimeContext
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.worker_group import WorkerGroup

    idle = {"DatasetsCallback"} | ({"PlacementGroupCleanerCallback"} if local else set())

    class Ranks(WorkerGroup):
        def poll_status(self, timeout: float | None = None) -> Any:
            if died():  # which must be asked for nothing more
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
            # it hands ranks a way to itself, through which they would ask for what they reported
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


def import_torchmetrics() -> None:
    """Import torchmetrics without scipy.signal, which takes 0.8 to 1.0 of its 1.0 to 1.2 s in
    every rank (torchmetrics 1.4 to 1.9).

    It wants that module only to see whether an old name is there, for the sake of a package for
    speech. Afterwards scipy.signal is imported as usual by whoever needs it.
    """
    wanted_by = ("librosa", "pesq", "pystoi", "gammatone", "srmrpy")  # through torchmetrics
    known = "scipy.signal" in sys.modules or "torchmetrics" in sys.modules
    if known or any(importlib.util.find_spec(name) for name in wanted_by):
        return
    stand_in = ModuleType("scipy.signal")
    stand_in.hamming = None  # type: ignore[attr-defined]
    sys.modules["scipy.signal"] = stand_in
    try:
        import torchmetrics  # noqa: F401
    finally:
        del sys.modules["scipy.signal"]


def group_timeout(device: Any) -> int:
    """Seconds of the default process group's timeout: whether it is the planned one can be seen
    nowhere else."""
    import torch.distributed as dist

    group = dist.distributed_c10d._get_default_group()
    return int(group._get_backend(device).options._timeout.total_seconds())


def default_store() -> Any:
    """The store of the default process group: another one would need a port of its own."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def flight_recorders() -> list[Callable[..., bytes]]:
    """What dumps the collectives that a rank has made, with gloo and others, and with NCCL;
    without it nobody can say which one a rank hangs in."""
    import torch

    names = ("_dump_fr_trace", "_dump_nccl_trace")
    dumps = [getattr(torch._C._distributed_c10d, name, None) for name in names]
    return [dump for dump in dumps if dump is not None]


def copy_all(targets: list[Any], sources: list[Any]) -> None:
    """Copy tensors of one type and device: one kernel on a GPU. Of 60 small buffers on a CPU it
    takes 25 us, and one by one 55."""
    import torch

    torch._foreach_copy_(targets, sources)


def norms(tensors: list[Any]) -> list[Any]:
    """Of each tensor, with one kernel on a GPU: ``torch.nn.utils.get_total_norm`` is not in 2.4."""
    import torch

    return list(torch._foreach_norm(tensors))


def check_reduced(ddp: Any) -> None:
    """Ask DDP whether all gradients came; it would say so in the next forward pass only, when
    other ranks wait.

    Raises:
        RuntimeError: of some none came; the text has their numbers.
    """
    ddp._check_reducer_finalized()


def bucket_sizes(ddp: Any, *, rebuilt: bool) -> list[int]:
    """Bytes of DDP's buckets, as it made them anew after the first step, which it does not do
    where it looks for unused parameters; what a run's report says of buckets."""
    logged = ddp._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or (not rebuilt and logged.get("bucket_sizes")) or ""
    return [int(size) for size in sizes.split(", ") if size]


def lay_out_buckets(ddp: Any, parameters: Iterable[Any]) -> None:
    """Have DDP lay out its buckets as after a first backward pass in which gradients come in this
    order, before there is one. Collective."""
    import torch

    ddp.reducer.prepare_for_backward([])
    for parameter in parameters:
        parameter.backward(torch.zeros_like(parameter))
    ddp.reducer._rebuild_buckets()
    ddp.zero_grad()


def before_load(module: Any, hook: Callable[..., None]) -> None:
    """Have a module call ``hook(module, state, prefix, …)`` before it loads a state."""
    if hasattr(module, "register_load_state_dict_pre_hook"):
        module.register_load_state_dict_pre_hook(hook)
    else:  # before torch 2.5
        module._register_load_state_dict_pre_hook(hook, with_module=True)


def is_view(tensor: Any) -> bool:
    """Whether it shares another tensor's memory, which then must not be written to."""
    return tensor._base is not None


def with_model(module: Any, model: Any) -> Any:
    """A shallow copy of a module whose ``model`` is another one; ``copy.copy`` alone shares the
    table of parts."""
    other = copy.copy(module)
    other._modules = {**module._modules, "model": model}
    return other


def linear_of_mkldnn(x: Any, weight: Any, bias: Any) -> Any:
    """A linear transform that adds the bias in the same pass, as torch's compiler calls it:
    otherwise the bias is laid over the output before.

    Raises:
        NotImplementedError: this torch lacks it, or was built without oneDNN.
        RuntimeError: oneDNN has no such product for this processor.
    """
    import torch

    if not torch.backends.mkldnn.is_available() or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        raise NotImplementedError("no torch.ops.mkldnn._linear_pointwise")
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], None)


def weight_gradient_of_bags(grad: Any, rows: Any, index: Any, start: Any, bag: Any) -> Any:
    """The gradient ``[E]`` of the weights of an ``embedding_bag`` sum: dot products of
    ``grad[bag]`` and ``rows[index]``. Without it both would be laid out, ``[E, F]`` each."""
    import torch

    dtype = grad.dtype
    if grad.is_cuda and dtype == torch.bfloat16:  # CUDA has no kernel for it (pytorch#185808)
        grad, rows = grad.float(), rows.float()
    return torch.ops.aten._embedding_bag_per_sample_weights_backward(
        grad, rows, index, start, bag, 0
    ).to(dtype)


# ── Lightning ────────────────────────────────────────────────────────────────────────────────


def lean_steps(trainer: Any) -> None:
    """Let a step ask only those that have a hook, and look up once an epoch what stays as it is: of
    1,850 Python calls that a step takes beside the engine's, 470 are left.

    What hooks are given, their order, what `LightningModule.log` keeps, and the loop's counts and
    state are Lightning's. Its own loop makes the steps of which there may be more to know: with a
    gradient scaler, loggers of Lightning's or an ``optimizer_step`` of the user's, and the first
    one after a checkpoint. Nor do ranks wait for a word about SIGTERM, which newer versions let
    them do before every batch: ours comes from the driver.
    """
    import torch
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior

    hooks: dict[str, list[Callable[..., Any]]] = {}  # name → those of callbacks that do something
    plain = takes_index = False

    def call(name: str, *args: Any, **named: Any) -> Any:
        """Of the callbacks, then of the module, whose answer it returns."""
        module = trainer.lightning_module
        facts = vars(module)  # torch looks at length at what is set
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
