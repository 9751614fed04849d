"""Every private or patched name of Ray, Lightning and torch; no other module uses one.

`private` decorates a function that uses such names. A function of public names is called instead
if a name is missing or takes other arguments, or if `PLAIN` is set. That costs speed or detail, but
not correctness; ``raygnn check`` reports it.

The names were compared in ray 2.55 to 2.60, lightning 2.5 to 2.6 and torch 2.8 to 2.15. Seconds of
CPU are per process on a 2-core machine.
"""

from __future__ import annotations

import importlib
from typing import Any

from raygnn.compat.fallbacks import *  # noqa: F403
from raygnn.compat.lightning_steps import *  # noqa: F403
from raygnn.compat.ray_names import *  # noqa: F403
from raygnn.compat.torch_names import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Return a base class of our policies for Ray Train, imported on first use."""
    if name not in RAY_TRAIN_CLASSES:  # noqa: F405
        raise AttributeError(f"module 'raygnn.compat' has no attribute {name!r}")
    return getattr(importlib.import_module(RAY_TRAIN_CLASSES[name]), name)  # noqa: F405
