"""Every private or patched name of Ray, Lightning and torch; no other module uses one.

`private` decorates a function that uses such names: if a name is missing or takes other arguments,
or if `PLAIN` is set, a function of public names is called instead. What is lost then is comfort,
not correctness; ``raygnn check`` shows it.

The names were compared in ray 2.53 to 2.60, lightning 2.5 to 2.6 and torch 2.6 to 2.15. Seconds of
CPU are those of one process on a 2-core machine.
"""

from __future__ import annotations

from typing import Any

from raygnn.compat.fallbacks import *  # noqa: F403
from raygnn.compat.lightning_steps import *  # noqa: F403
from raygnn.compat.ray_names import *  # noqa: F403
from raygnn.compat.torch_names import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Return a base class of our policies for Ray Train, imported on first use."""
    return base_class(name)  # noqa: F405
