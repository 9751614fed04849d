"""Serving: a run's model as an application of Ray Serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raygnn.serving.application import app as app
    from raygnn.serving.application import build as build

__all__ = ["app", "build"]


def __getattr__(name: str) -> Any:
    """Import what needs Ray Serve when it is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from raygnn.serving import application

    return getattr(application, name)
