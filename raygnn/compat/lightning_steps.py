"""Private names of Lightning: a training step that calls only existing hooks, and checkpoints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from raygnn.compat.fallbacks import nothing, private

# Keys of a checkpoint that Lightning cannot resume without.
LIGHTNING_STATE = {"global_step", "loops", "state_dict"}


def save_epoch(checkpoint: dict[str, Any], done: int) -> None:
    """Correct the number of epochs in a checkpoint that is about to be saved.

    After resuming from an epoch's last batch, Lightning does not count the next epoch as started.
    Its next checkpoint then reads as if no epoch were in progress, and a run that resumes from it
    begins with the first batch of the data. No public function sets the count.
    """
    count = {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
    saved = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    saved["total"], saved["current"] = dict(count), dict(count)


@private(
    "lightning<2.7",
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop",
    "lightning.pytorch.loops.utilities:_block_parallel_sync_behavior(strategy)",
    otherwise=nothing,
    loses="Lightning's own training loop runs, which takes about 1,400 Python calls more per step",
)
def lean_steps(trainer: Any) -> None:
    """Have a training step call only the hooks that callbacks define: 470 Python calls instead of
    1,850, besides the engine's.

    Arguments and order of hooks, logged values, and the loop's counts and state are Lightning's.
    Lightning's own loop runs steps with a gradient scaler, loggers or a user-defined
    ``optimizer_step``, and the first step after a checkpoint. Ranks do not exchange before every
    batch whether they received SIGTERM, because the driver notifies them.
    """
    import torch
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior

    hooks: dict[str, list[Callable[..., Any]]] = {}  # name → its implementations in callbacks

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
            super().on_run_start(fetcher)
            for name in _STEP_HOOKS:
                found = [getattr(callback, name) for callback in trainer.callbacks]
                empty = getattr(Callback, name)
                hooks[name] = [h for h in found if getattr(h, "__func__", None) is not empty]
            module = trainer.lightning_module
            self._takes_index = "batch_idx" in self._build_kwargs(OrderedDict(), None, 0)
            steps = getattr(module.optimizer_step, "__func__", None)
            self._is_plain = (
                module.automatic_optimization
                and steps is LightningModule.optimizer_step
                and getattr(trainer.precision_plugin, "scaler", None) is None
                and not trainer.loggers
            )

        _broadcast_sigterm_tensor = nothing
        _on_before_fetch = _on_after_fetch = nothing  # which only serve Lightning's profiler

        def _should_check_val_fx(self, fetcher: Any) -> bool:
            return False  # raygnn evaluates, not Lightning

        def advance(self, fetcher: Any) -> None:
            if self.restarting or not self._is_plain:
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
            """Run forward and backward, and the optimizer unless the batch only accumulates."""
            automatic, strategy = self.automatic_optimization, trainer.strategy
            optimizer = trainer.optimizers[0]
            counts, steps = automatic.optim_progress.optimizer, not self._should_accumulate()
            results: list[Any] = []

            @torch.enable_grad()  # an optimizer may have none
            def closure() -> Any:
                index_of = {"batch_idx": index} if self._takes_index else {}
                result = automatic._training_step({"batch": batch, **index_of})
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
                    raise RuntimeError(f"{name}.step did not call the closure passed to it")
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
