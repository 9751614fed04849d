"""The size and the order of the house: ``python tests/budget.py`` prints them beside their limits.

Limits only fall, unless a new capability brings its own. What breaks one is listed last, and makes
the exit code 1.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = CHECKOUT / "raygnn"

# Folder of the package → lines, all of its own folders included; "" are the files at the top.
LINES = {
    "": 500,
    "util": 600,
    "config": 2_300,
    "graph": 8_000,
    "sampling": 3_000,
    "models": 2_600,
    "tasks": 1_500,
    "preflight": 2_600,
    "checkpoint": 1_200,
    "worker": 4_400,
    "driver": 3_400,
    "prediction": 950,
    "tuning": 500,
    "runs": 3_100,
    "jobs": 800,
    "cli": 800,
}
PACKAGE_LINES, PACKAGE_MODULES, TEST_LINES = 34_000, 170, 28_000
FOLDER_MODULES = 14
MODULE_LINES = 600
IMPORTS, IMPORTS_OF_A_SEQUENCE = 15, 20
SEQUENCES = ("driver.train", "worker.rank")
PRIVATE_OF = ("ray", "torch", "lightning")
PRIVATE_ONLY_IN = "compat"


def module_name(file: Path) -> str:
    """``raygnn/graph/sources/npz.py`` → ``graph.sources.npz``; packages by their own name."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def modules() -> dict[str, Path]:
    return {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def length(file: Path) -> int:
    return len(file.read_text().splitlines())


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Absolute names that a module imports, anywhere in it, and what it calls them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                yield name, alias.asname or name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", alias.asname or alias.name


def links() -> dict[str, set[str]]:
    """Module → the modules of the package that it imports, the package's root aside."""
    found, files = defaultdict(set), modules()
    for module, file in files.items():
        for target, _ in imported(ast.parse(file.read_text())):
            inner = target.removeprefix("raygnn.")
            if inner == target:
                continue
            home = inner if inner in files else inner.rpartition(".")[0]
            if home and home != module:
                found[module].add(home)
    return found


def cycles(links: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import one another (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in links.get(module, ()):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for module in list(links):
        if module not in index:
            visit(module)
    return groups


def private_names(tree: ast.Module) -> Iterator[str]:
    """Names of Ray, torch and Lightning with an underscore first, as a module uses them."""
    roots = {}
    for target, name in imported(tree):
        if target.split(".")[0] in PRIVATE_OF:
            roots[name] = target
            if any(part.startswith("_") for part in target.split(".")):
                yield target
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in roots and parts:
            private = parts[0]  # the outermost attribute, so that a chain is reported once
            if private.startswith("_") and not private.startswith("__"):
                yield f"{roots[inner.id]}.{'.'.join(reversed(parts))}"


def broken() -> Iterator[str]:
    """What is over a limit or out of order, a line each."""
    files = modules()
    lines = Counter(dict.fromkeys(LINES, 0))
    for file in files.values():
        parts = file.relative_to(PACKAGE).parts
        lines[parts[0] if len(parts) > 1 else ""] += length(file)
    for folder, count in lines.items():
        if count > LINES.get(folder, 0):
            yield f"raygnn/{folder}: {count:,} lines, at most {LINES.get(folder, 0):,}"
    if lines.total() > PACKAGE_LINES:
        yield f"raygnn: {lines.total():,} lines, at most {PACKAGE_LINES:,}"
    real = {module: file for module, file in files.items() if length(file)}
    if len(real) > PACKAGE_MODULES:
        yield f"raygnn: {len(real)} modules, at most {PACKAGE_MODULES}"
    tests = sum(map(length, (CHECKOUT / "tests").rglob("*.py")))
    if tests > TEST_LINES:
        yield f"tests: {tests:,} lines, at most {TEST_LINES:,}"
    folders = Counter(file.parent for file in real.values() if file.name != "__init__.py")
    for folder_path, count in folders.items():
        if count > FOLDER_MODULES:
            name = folder_path.relative_to(CHECKOUT)
            yield f"{name}: {count} modules, at most {FOLDER_MODULES}"
    stems = Counter(file.stem for file in real.values() if file.name != "__init__.py")
    for stem, count in stems.items():
        if count > 1:
            yield f"{count} modules are called {stem}.py"
    imports = links()
    for group in cycles(imports):
        yield f"an import cycle: {', '.join(group)}"
    for module, file in real.items():
        if length(file) > MODULE_LINES:
            yield f"{module}: {length(file)} lines, at most {MODULE_LINES}"
        most = IMPORTS_OF_A_SEQUENCE if module in SEQUENCES else IMPORTS
        if len(imports[module]) > most:
            yield f"{module} imports {len(imports[module])} modules of the package, at most {most}"
        if module != PRIVATE_ONLY_IN:
            for name in sorted(set(private_names(ast.parse(file.read_text())))):
                yield f"{module} uses {name}, which is private: that belongs in compat.py"


def main() -> int:
    table: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for file in modules().values():
        parts = file.relative_to(PACKAGE).parts
        row = table[parts[0] if len(parts) > 1 else ""]
        row[0] += 1 if length(file) else 0
        row[1] += length(file)
    print(f"{'folder':<14}{'modules':>8}{'lines':>9}{'at most':>9}")
    for folder, (count, total) in sorted(table.items()):
        print(f"{folder or '(top)':<14}{count:>8}{total:>9,}{LINES.get(folder, 0):>9,}")
    count, total = (sum(row[column] for row in table.values()) for column in (0, 1))
    print(f"{'package':<14}{count:>8}{total:>9,}{PACKAGE_LINES:>9,}   ({PACKAGE_MODULES} modules)")
    files = list((CHECKOUT / "tests").rglob("*.py"))
    print(f"{'tests':<14}{len(files):>8}{sum(map(length, files)):>9,}{TEST_LINES:>9,}")
    problems = list(broken())
    print(*problems, sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
