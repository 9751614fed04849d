"""Ray Train's trainer, without what has nothing to do here."""

from __future__ import annotations

from typing import Any

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.failure_handling import (
    DefaultFailurePolicy,
    FailureDecision,
)

from raygnn.driver.ray.scaling import Group, Scaling


class Failures(DefaultFailurePolicy):
    """Starts no ranks again where a rank says that a new start would meet its failure, too: also
    where it could record that nowhere, on a disk that is full."""

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        failures = getattr(training_failed_error, "worker_failures", {})
        if any(getattr(failure, "final", False) for failure in failures.values()):
            return FailureDecision.RAISE
        return super().make_decision(training_failed_error)


class LeanTrainer(TorchTrainer):
    """A TorchTrainer that starts fewer processes, each of which costs seconds.

    One serves Ray Data's datasets, of which there are none; another removes the placement group
    if the controller dies, which a Ray that goes with the job does not need.

    Attributes:
        local: on a Ray that was started for this job.
        policy: decides how many workers there are.
    """

    local = False
    policy: Scaling

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        return super()._initialize_and_run_controller(
            **{
                **arguments,
                "scaling_policy": self.policy,
                "failure_policy": Failures(self.run_config.failure_config),
            }
        )

    def _create_default_callbacks(self) -> list[Any]:
        idle = {"DatasetsCallback"} | ({"PlacementGroupCleanerCallback"} if self.local else set())
        callbacks: list[Any] = super()._create_default_callbacks()
        return [Group(), *(each for each in callbacks if type(each).__name__ not in idle)]
