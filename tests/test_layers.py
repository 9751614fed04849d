"""The layers: who may import whom, read off the source, and what ``import raygnn`` costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.budget import PACKAGE, module_name

# Each layer may import itself and what is listed; "errors", "util", "compat" and the root, all may.
ALLOWED = {
    "errors": set(),
    "util": set(),
    "compat": set(),
    "config": set(),
    "storage": {"config"},
    "graph": {"config", "storage"},
    "sampling": {"config", "graph"},
    "models": {"config", "sampling.batch"},
    "tasks": {"config", "graph", "sampling", "models"},
    "preflight": {
        "config",
        "graph.available_memory",
        "graph.data",
        "graph.partition",
        "storage",
        "graph.collection",
    },
    "runs": {"config", "storage"},
    "checkpoint": {"config", "storage", "graph", "sampling", "models", "tasks", "runs"},
    "worker": {
        "config",
        "storage",
        "graph",
        "sampling",
        "models",
        "tasks",
        "preflight",
        "runs",
        "checkpoint",
    },
    "driver": {
        "config",
        "storage",
        "graph",
        "sampling",
        "models",
        "preflight",
        "runs",
        "checkpoint",
        "worker.main",  # its entry point, its arguments and its files
        "worker.job",
        "worker.control",
        "worker.comm.backend",
        "worker.failures",
        "worker.blackbox",
        "worker.ray_nodes",
        "worker.node_files",
    },
    "prediction": {
        "config",
        "storage",
        "graph",
        "models",
        "tasks",
        "runs",
        "checkpoint",
        "worker",
        "driver",
    },
    "search": {"config", "preflight.probe", "runs", "driver"},
    "serving": {
        *("config", "storage", "graph", "models", "runs", "sampling", "driver", "prediction"),
        *("tasks", "worker"),
    },
    "jobs": {"config", "storage", "runs", "graph.sources.library_graphs"},
    "cli": {"config", "graph", "jobs", "runs", "driver", "prediction", "search", "serving"},
    "__main__": {"cli"},
    "__init__": {"config", "jobs", "runs", "driver", "prediction", "search", "serving", "tasks"},
}

# Third-party package → the only places that may import it.
ONLY_IN = {
    "ray": (
        "compat",
        "preflight.probe",
        "driver",
        "worker",
        "prediction",
        "search",
        "serving",
        "jobs.server",
    ),
    "dgl": ("graph.dgl",),
}

HEAVY = ("torch", "dgl", "ray", "lightning", "torchmetrics")
# Layers without heavy imports, so that mistakes are reported at once.
LIGHT = {
    "errors": HEAVY,
    "compat": HEAVY,
    "util": (*HEAVY, "pydantic", "rich", "pandas", "numba"),
    "sampling.plan": (*HEAVY, "numba"),
    "config": (*HEAVY, "numpy", "scipy", "pandas", "pyarrow", "numba"),
    "storage": (*HEAVY, "numpy", "scipy", "pandas", "pyarrow", "numba"),
    "cli": (*HEAVY, "numpy", "pydantic", "rich"),
    "__init__": (*HEAVY, "numpy", "pydantic", "rich"),
    "driver.train": (*HEAVY, "numba", "pyarrow"),  # before anything is shown
    "graph.sources": HEAVY,
    "graph.tables": HEAVY,
    "graph.available_memory": HEAVY,
    "graph.data": HEAVY,
    "graph.partition.dgl_format": HEAVY,
    "graph.partition.edges": HEAVY,
    "graph.partition.layout": HEAVY,
    "graph.partition.make": HEAVY,
    "graph.partition.manifest": HEAVY,
    "preflight": HEAVY,
    "runs": HEAVY,
    "jobs": HEAVY,
}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {module_name(file): ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def imports(tree: ast.Module, *, at_load: bool = False) -> Iterator[str]:
    """Absolute names that a module imports; with ``at_load`` only when it is itself imported."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif at_load and (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_type_checking(node)
        ):
            continue
        else:
            pending.extend(ast.iter_child_nodes(node))


def inside(name: str, place: str) -> bool:
    return name == place or name.startswith(place + ".")


def test_import_direction(trees: dict[str, ast.Module]) -> None:
    for module, tree in trees.items():
        layer = module.split(".")[0]
        for target in imports(tree):
            if not inside(target, "raygnn"):
                continue
            inner = target.removeprefix("raygnn").lstrip(".")
            top = inner.split(".")[0]
            if top in (layer, "errors", "util", "compat", "__version__", ""):
                continue
            assert any(inside(inner, at) for at in ALLOWED[layer]), f"{module} imports {target}"


def test_ray_and_dgl_have_one_door(trees: dict[str, ast.Module]) -> None:
    for module, tree in trees.items():
        closed = [p for p, at in ONLY_IN.items() if not any(inside(module, one) for one in at)]
        wrong = [name for name in imports(tree) if any(inside(name, one) for one in closed)]
        assert wrong == [], f"{module} imports {wrong}"


def test_light_modules_load_nothing_heavy(trees: dict[str, ast.Module]) -> None:
    for module, tree in trees.items():
        forbidden = {name for at, names in LIGHT.items() if inside(module, at) for name in names}
        for target in imports(tree, at_load=True):
            assert target.split(".")[0] not in forbidden, f"{module} imports {target}"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import raygnn; raygnn.__version__; dir(raygnn)", (*HEAVY, "numpy", "pydantic", "rich")),
        ("import raygnn.cli", (*HEAVY, "numpy", "pydantic", "rich")),
        ("import raygnn; raygnn.load_config; raygnn.Config", (*HEAVY, "numpy", "pandas")),
        ("import raygnn; raygnn.open_run", (*HEAVY, "pandas")),
        ("import raygnn.graph.sources, raygnn.graph.data", HEAVY),
    ],
)
def test_modules_that_an_import_must_not_load(statement: str, absent: tuple[str, ...]) -> None:
    code = f"{statement}\nimport sys; print(*[m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
