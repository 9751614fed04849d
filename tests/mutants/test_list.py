"""The list of mutants fits the code and the tests that there are; ``make mutants`` runs them."""

from __future__ import annotations

import ast
import subprocess
import sys
from bisect import bisect_right

import pytest

from tests.mutants.run import CHECKOUT, load

MUTANTS = load()


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60


def test_each_can_be_planted() -> None:
    """One place is changed, within a line, and the result is Python."""
    texts = {file: (CHECKOUT / file).read_text() for file in {mutant.file for mutant in MUTANTS}}
    starts = {file: statements(text) for file, text in texts.items()}
    for mutant in MUTANTS:
        text = texts[mutant.file]
        assert text.count(mutant.old) == 1, mutant
        assert "\n" not in mutant.old, mutant
        assert mutant.new != mutant.old, mutant
        assert mutant.breaks, mutant
        line = text[: text.index(mutant.old)].count("\n")
        bounds = starts[mutant.file]
        at = bisect_right(bounds, line)
        lines = text.splitlines(keepends=True)[bounds[at - 1] : [*bounds, None][at]]
        ast.parse("".join(lines).replace(mutant.old, mutant.new))


def statements(text: str) -> list[int]:
    """Return the first line of each statement of a module, counted from 0."""
    return [
        min(part.lineno for part in (node, *getattr(node, "decorator_list", ()))) - 1
        for node in ast.parse(text).body
    ]


@pytest.mark.system
def test_their_tests_are_there() -> None:
    tests = {test for mutant in MUTANTS for test in mutant.tests}
    files = sorted({test.split("::")[0] for test in tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout
    there = set(done.stdout.splitlines())
    there |= {test.split("[")[0] for test in there}  # all of its parameters
    assert sorted(tests - there) == []
