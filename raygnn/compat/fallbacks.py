"""Fallbacks for private names of other libraries that cannot be used."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any, TypeVar

from packaging.version import Version

# Environment variable; 1 = use public names only.
PLAIN = "RAYGNN_PLAIN"

_Function = TypeVar("_Function", bound=Callable[..., Any])
_COMFORTS: list[tuple[tuple[str, ...], str]] = []  # private names, and what is lost without them


def private(
    *names: str, otherwise: Callable[..., Any], loses: str
) -> Callable[[_Function], _Function]:
    """Decorate a function that uses private names: ``otherwise`` is called, with the same
    arguments, if one of them is not usable or `PLAIN` is set.

    Args:
        names: each ``"module:attribute"``, ``"module:attribute(a, b)"`` for a function with the
            parameters that we pass, or ``"package<2.7"`` for the first version not compared.
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
    """Return why private names are not used here, with what is lost; imports their modules."""
    plain = os.environ.get(PLAIN)
    return [(why, loses) for names, loses in _COMFORTS if (why := _unusable(names, plain))]


@functools.cache
def _unusable(names: tuple[str, ...], plain: str | None) -> str:
    """Return why private names cannot be used; empty if they can."""
    if plain == "1":
        return f"{PLAIN} is set"
    for name in names:
        library, _, limit = name.partition("<")
        if limit:
            installed = metadata.version(library)
            if Version(installed).release >= Version(limit).release:
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


def _takes(function: Any, names: list[str]) -> bool:
    """True if a function can be called with exactly these parameters."""
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError:
        return False
    except ValueError:  # a built-in function without a signature
        pass
    return True


def nothing(*args: Any, **options: Any) -> None:
    """Do nothing, in place of a private name."""
