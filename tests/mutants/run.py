"""Plant mistakes, one at a time, and see that the test of each fails: ``make mutants``.

``mutants.yaml`` beside this lists them. They are planted in copies of the checkout, which come
before all else in ``sys.path`` and ``PYTHONPATH``, also of subprocesses and of Ray's workers. All
tests have to pass without a mutant first. Exits 1 if a mutant lives.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import yaml

CHECKOUT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.yaml")

_LIMIT = 300  # seconds for a test
_COMPILES = "tests/sampling/test_kernels.py"
_NOT_IMPORTED = 90  # an exit status that pytest does not have
# a mutant that fails on import or by a NameError proves nothing about its test
_INVALID = re.compile(r"(ImportError|ModuleNotFoundError|NameError|SyntaxError)\b")
_CAUSE = re.compile(r"^E +((?:assert|[\w.]*(?:Error|Exception|Failed))\b.*)", re.M)


@dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes:
        file: in the checkout; old: text that occurs once in it; new: what takes its place.
        tests: pytest's ids; one of them must fail.
        breaks: the promise that is no longer kept.
    """

    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    breaks: str

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def load() -> list[Mutant]:
    """Return all mutants in order."""
    mutants = []
    for values in yaml.safe_load(LIST.read_text()):
        test = values.pop("test")
        mutants.append(Mutant(**values, tests=[test] if isinstance(test, str) else test))
    return mutants


class Tree:
    """A copy of the checkout, in which one process at a time runs tests.

    Numba's cache does not see that a function that is inlined has changed: there is one of the
    copy's own, and a fresh one for a mutant in a module that compiles.
    """

    def __init__(self, root: Path):
        ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
        shutil.copytree(CHECKOUT, root, ignore=ignored, symlinks=True)
        for written in ("build", "runs"):  # by commands in the checkout; raygnn/runs is a package
            shutil.rmtree(root / written, ignore_errors=True)
        self.root, self.mutant = root, None
        self._original, self._fresh, self._output = (
            root.with_name(f"{root.name}-{name}") for name in ("original", "fresh", "output")
        )

    def start(self, mutant: Mutant | None, tests: list[str]) -> None:
        """Begin to run tests, with a mutant or as they are."""
        self.mutant, self.begin = mutant, time.monotonic()
        self.deadline = self.begin + _LIMIT * len(tests)
        module, cache = "raygnn", self.root.with_name("numba")
        if mutant is not None:
            path, module = self.root / mutant.file, mutant.module
            shutil.copy2(path, self._original)
            text = path.read_text()
            path.write_text(text.replace(mutant.old, mutant.new))
            self._forget(path)
            cache = self._fresh if "from numba import" in text else cache
        fork = multiprocessing.get_context("fork")
        arguments = (self.root, module, tests, cache, self._output)
        self.process: BaseProcess = fork.Process(target=_run, args=arguments)
        self.process.start()

    def finish(self) -> tuple[int, str]:
        """Return the tests' exit status and output when they are done, or when time is up."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        if self.mutant is not None:
            path = self.root / self.mutant.file
            os.replace(self._original, path)
            self._forget(path)
        shutil.rmtree(self._fresh, ignore_errors=True)
        return self.process.exitcode or 0, self._output.read_text(errors="replace")

    def _forget(self, path: Path) -> None:
        """Remove the bytecode, which knows a source by its second and its size."""
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _run(root: Path, module: str, tests: list[str], cache: Path, output: Path) -> None:
    """Run tests of a copy in a forked process, which inherits the slow imports."""
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    sys.path[:0] = [str(root)]
    os.environ |= {"PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(cache)}
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "raygnn")]:
        del sys.modules[name]
    try:
        file = importlib.import_module(module).__file__
        assert file is not None
        assert Path(file).is_relative_to(root), file
    except BaseException as error:
        print("E  ", repr(error), flush=True)
        os._exit(_NOT_IMPORTED)
    import pytest

    options = ["-xq", "--tb=short", "-pno:cacheprovider", f"--basetemp={root}-tmp"]
    options += ["-Wignore::pytest.PytestAssertRewriteWarning"]  # of hypothesis, imported already
    status = pytest.main([*options, *tests])
    sys.stdout.flush()
    os._exit(status)


def run_all(
    trees: list[Tree], jobs: list[tuple[Mutant | None, list[str]]]
) -> Iterator[tuple[Mutant | None, int, str, float]]:
    """Yield mutants with exit status, output and seconds of their tests as these finish."""
    left, free, busy = list(reversed(jobs)), list(trees), list[Tree]()
    try:
        while left or busy:
            while left and free:
                busy.append(free.pop())
                busy[-1].start(*left.pop())
            wait([tree.process.sentinel for tree in busy], timeout=5)
            for tree in list(busy):
                if not tree.process.is_alive() or time.monotonic() > tree.deadline:
                    busy.remove(tree)
                    free.append(tree)
                    yield tree.mutant, *tree.finish(), time.monotonic() - tree.begin
    finally:
        for tree in busy:
            tree.finish()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name or file has this pattern")
    parser.add_argument("--jobs", type=int, default=2, help="tests at the same time")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "CI": "1"}
    os.environ["TRITON_INTERPRET"] = "1"  # before torch loads it
    os.environ.setdefault("RAYGNN_DATA", str(CHECKOUT.parent / "shared" / "data"))
    for name in ("hypothesis", "pytest", "lightning.pytorch", "pandas", "pyarrow.parquet", "scipy"):
        importlib.import_module(name)
    pattern, begin = re.compile(options.only), time.monotonic()
    mutants = [m for m in load() if pattern.search(m.name) or pattern.search(m.file)]
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    alive = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        trees = [Tree(Path(directory) / str(number)) for number in range(options.jobs)]
        # compile the kernels first in one process, since ranks wait a minute at most
        shares = [[_COMPILES, *tests[number :: options.jobs]] for number in range(options.jobs)]
        for _, status, output, _ in run_all(trees, [(None, share) for share in shares]):
            if status:
                print(output, "The tests have to pass without a mutant.", sep="\n")
                return 2
        print(f"{len(tests)} tests pass: {time.monotonic() - begin:.0f} s", flush=True)
        for mutant, status, output, took in run_all(trees, [(m, m.tests) for m in mutants]):
            assert mutant is not None
            causes = _CAUSE.findall(output) or [f"exit status {status}"]
            killed = status == 1 and re.search(r"\b1 failed\b", output)
            verdict = "killed" if killed and not any(map(_INVALID.match, causes)) else "LIVES"
            alive += [mutant] if verdict == "LIVES" else []
            print(f"{verdict} {mutant.name}: {causes[-1][:150]} ({took:.0f} s)", flush=True)
    for mutant in alive:
        print(f"{mutant.name} lives, so that nothing sees it when this breaks: {mutant.breaks}")
    print(f"{len(mutants)} mutants, {len(alive)} live; {time.monotonic() - begin:.0f} s")
    return 1 if alive or not mutants else 0


if __name__ == "__main__":
    sys.exit(main())
