"""Finds ``package.module:Class`` without importing it, so that a typo costs no import of torch."""

from __future__ import annotations

import ast
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from raygnn.config.problems import nearest


def class_problem(spec: str) -> tuple[str, str] | None:
    """Say what is wrong with ``package.module:Class``, if anything is.

    The module is looked up on the Python path with the current directory first, as Python does
    for a script there. Its source is parsed, not run. A module without source, or with a star
    import or a module-level ``__getattr__``, is taken at its word.

    Returns:
        None if the class is there (or cannot be ruled out), else (what is wrong, remedy).
    """
    module, _, name = spec.partition(":")
    found = _find(module)
    if isinstance(found, str):
        return (
            f"there is no module {found} to import {name} from",
            f"correct the name, install the package, or start in the directory that holds "
            f"{found.split('.')[0]} (now {Path.cwd()})",
        )
    if not found.origin or not found.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(found.origin).read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        return f"{found.origin} cannot be read as Python: {error}", "correct the file"
    names = _defined(tree)
    if name in names or "*" in names or "__getattr__" in names:
        return None
    close = nearest(name, names)
    hint = f"did you mean {module}:{close}?" if close else f"define class {name} there"
    return f"{found.origin} has no {name}", hint


def _find(module: str) -> ModuleSpec | str:
    """The module's spec, or the dotted name that could not be found."""
    path: list[str] | None = [str(Path.cwd()), *sys.path]
    parts = module.split(".")
    spec: ModuleSpec | None = None
    for depth in range(1, len(parts) + 1):
        # by its last name alone: a dotted one makes a namespace package ask for its parent among
        # the modules that have been imported
        spec = PathFinder.find_spec(parts[depth - 1], path) if path is not None else None
        if spec is None:
            return ".".join(parts[:depth])
        inside = spec.submodule_search_locations
        path = list(inside) if inside is not None else None
    assert spec is not None
    return spec


def _defined(tree: ast.Module) -> set[str]:
    """Names bound at the top level of a module, also under ``if`` and ``try``."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            pending.extend(ast.iter_child_nodes(node))
    return names
