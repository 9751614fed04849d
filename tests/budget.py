"""The size and the order of the package; ``python tests/budget.py`` prints them and their limits.

`disorder` and `growth` are empty, which ``tests/test_budget.py`` keeps so. Limits only fall, unless
a new capability brings its own; where the package is not yet as small as it is to be, what it has
today is the limit.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = CHECKOUT / "raygnn"

# Folder of the package → the lines that it is to have, all of its own folders included; "" are the
# files at the top.
LINES = {
    "": 255,
    "compat": 500,
    "util": 600,
    "config": 2_300,
    "storage": 810,
    "graph": 8_000,
    "sampling": 3_000,
    "models": 2_600,
    "tasks": 1_500,
    "preflight": 2_600,
    "checkpoint": 1_200,
    "worker": 4_400,
    "driver": 3_400,
    "prediction": 950,
    "search": 600,
    "runs": 3_100,
    "jobs": 800,
    "cli": 800,
    "package": 34_000,
    "tests": 28_000,
}
# Today's limits of folders above their target, until they are smaller.
LINES_TODAY = {
    "": 248,
    "compat": 775,
    "util": 694,
    "config": 4_198,
    "graph": 13_029,
    "sampling": 5_466,
    "models": 3_879,
    "tasks": 2_845,
    "preflight": 2_568,
    "storage": 757,
    "checkpoint": 1_682,
    "worker": 8_105,
    "driver": 4_000,
    "prediction": 1_356,
    "search": 1_028,
    "serving": 2_308,
    "runs": 4_290,
    "jobs": 1_175,
    "cli": 815,
    "package": 59_218,
    "tests": 60_808,
}
MODULES, MODULES_TODAY = 189, 231
FOLDER_MODULES = 14
MODULE_LINES = 600
IMPORTS = 15
# Modules that connect many others, and the number of imports that each may have.
MEETING_POINTS = {
    # the sequences of the two programs
    "driver.train": 19,
    "driver.session": 16,
    "worker.rank": 20,
    "driver.inputs": 21,
    # a data plane joins the graph, sampling, the model and the task of one kind of seeds
    "worker.planes.partition_plane": 25,
    "worker.planes.edge_plane": 22,
    "worker.planes.graph_plane": 20,
}
PRIVATE_OF = ("ray", "torch", "lightning")
PRIVATE_ONLY_IN = ("compat", "graph.dgl")  # packages and modules; the latter DGL's
# Without an underscore, and yet no public API: attributes and keys of torch's and Lightning's.
NOT_PUBLIC = re.compile(r"\.(found_inf|grad_scale|epoch_loop|optim_progress)\b|['\"]loops['\"]")
CHANGED_DICT = re.compile(r"(?:vars\((\w+)\)|(\w+)\.__dict__)(?:\[[^]]+\] = |\.(?:update|pop)\()")
# Modules that change the `__dict__` of objects of our own classes.
CHANGE_OURS = ("models.message_passing", "sampling.batch", "worker.comm.process_groups")


def module_name(file: Path) -> str:
    """``raygnn/graph/sources/ogb.py`` → ``graph.sources.ogb``; packages by their own name."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def modules() -> dict[str, Path]:
    return {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def length(file: Path) -> int:
    return len(file.read_text().splitlines())


@lru_cache(maxsize=1)  # modules are read one after the other
def nodes(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the absolute names that a module imports, anywhere in it, and their local names."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                yield name, alias.asname or name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", alias.asname or alias.name


def links(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Map each module to the modules of the package that it imports, except the package's root."""
    found, files = defaultdict(set), modules()
    for module, tree in trees.items():
        plain = [node for node in nodes(tree) if isinstance(node, ast.Import)]
        targets = [alias.name for node in plain for alias in node.names]
        for target in (*targets, *(target for target, _ in imported(tree))):
            inner = target.removeprefix("raygnn.")
            if inner == target:
                continue
            home = inner if inner in files else inner.rpartition(".")[0]
            if home and home != module:
                found[module].add(home)
    return found


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield names with a leading underscore that a module uses of Ray, torch and Lightning."""
    roots = {}
    for target, name in imported(tree):
        if target.split(".")[0] in PRIVATE_OF:
            roots[name] = target
            if any(part.startswith("_") for part in target.split(".")):
                yield target
    for node in nodes(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        named = isinstance(inner, ast.Name) and inner.id in roots and parts
        if named and is_private(parts[0]):  # the outermost, so that a chain is reported once
            yield f"{roots[inner.id]}.{'.'.join(reversed(parts))}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_attributes(tree: ast.Module, *, own: bool) -> Iterator[str]:
    """Attributes with an underscore first: those of ``self`` that a module defines, or those of
    other objects that it uses, modules aside."""
    modules = {name for _, name in imported(tree)}
    for node in nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and own:
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and own:
            yield node.target.id
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            holder = getattr(node.value, "id", None)
            mine = holder == "self" and isinstance(node.ctx, ast.Store)
            if mine if own else holder not in ("self", "cls", *modules):
                yield node.attr


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Yield lines that use `NOT_PUBLIC` names, or change the ``__dict__`` of an object other than
    ``self``."""
    for line in ast.unparse(tree).splitlines():
        changed = CHANGED_DICT.search(line)
        if NOT_PUBLIC.search(line) or (changed and "self" not in changed.groups()):
            yield line.strip()


def disorder() -> Iterator[str]:
    """Yield a line for each rule of order that the package breaks."""
    files = {module: file for module, file in modules().items() if length(file)}
    named = [file for file in files.values() if file.name != "__init__.py"]
    for folder, count in Counter(file.parent for file in named).items():
        if count > FOLDER_MODULES:
            yield f"{folder.relative_to(CHECKOUT)}: {count} modules, at most {FOLDER_MODULES}"
    for stem, count in Counter(file.stem for file in named).items():
        if count > 1:
            yield f"{count} modules are called {stem}.py"
    trees = {module: ast.parse(file.read_text()) for module, file in files.items()}
    ours = {module: set(private_attributes(tree, own=True)) for module, tree in trees.items()}
    imports = links(trees)
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        yield f"an import cycle: {', '.join(error.args[1])}"
    for module in MEETING_POINTS:
        if len(imports[module]) <= IMPORTS:
            yield f"{module} needs no more than {IMPORTS} imports: take it off MEETING_POINTS"
    for module, file in files.items():
        if length(file) > MODULE_LINES:
            yield f"{module}: {length(file)} lines, at most {MODULE_LINES}"
        count, most = len(imports[module]), MEETING_POINTS.get(module, IMPORTS)
        if count > most:
            yield f"{module} imports {count} modules of the package, at most {most}"
        tree = trees[module]
        if not any(f"{module}.".startswith(f"{one}.") for one in PRIVATE_ONLY_IN):
            near = (module, *imports[module])  # modules whose objects it may hold
            known = set().union(*(ours.get(one, ()) for one in near))
            foreign = set(private_attributes(tree, own=False)) - known
            hidden = undocumented(tree) if module not in CHANGE_OURS else ()
            for name in sorted({*private_names(tree), *foreign, *hidden}):
                yield f"{module} uses {name}, which is private: that belongs in compat"


def sizes() -> dict[str, tuple[int, int]]:
    """Folder, ``package`` and ``tests`` → modules that are not empty, and lines."""
    table: dict[str, tuple[int, int]] = dict.fromkeys(LINES, (0, 0))

    def add(row: str, file: Path) -> None:
        count, total = table.get(row, (0, 0))
        table[row] = count + bool(length(file)), total + length(file)

    for file in modules().values():
        parts = file.relative_to(PACKAGE).parts
        add(parts[0] if len(parts) > 1 else "", file)
        add("package", file)
    for file in (CHECKOUT / "tests").rglob("*.py"):
        add("tests", file)
    return table


def growth() -> Iterator[str]:
    """Yield a line for each figure that exceeds its limit of today."""
    table = sizes()
    for name, (_, lines) in table.items():
        most = max(LINES.get(name, 0), LINES_TODAY.get(name, 0))
        if lines > most:
            yield f"{name or 'top of the package'}: {lines:,} lines, at most {most:,}"
    if table["package"][0] > MODULES_TODAY:
        yield f"package: {table['package'][0]} modules, at most {MODULES_TODAY}"


def main() -> int:
    print(f"{'folder':<14}{'modules':>8}{'lines':>9}{'today':>9}{'wanted':>9}")
    for name, (count, lines) in sizes().items():
        today = f"{LINES_TODAY[name]:,}" if name in LINES_TODAY else ""
        print(f"{name or '(top)':<14}{count:>8}{lines:>9,}{today:>9}{LINES.get(name, 0):>9,}")
    print(f"modules: at most {MODULES_TODAY} today, {MODULES} wanted")
    problems = [*disorder(), *growth()]
    print(*problems, sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
