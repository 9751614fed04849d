"""The list of mutants fits the code and the tests that there are; ``make mutants`` runs them."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.mutants.run import CHECKOUT, Mutant, load

MUTANTS = load()


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted(mutant: Mutant) -> None:
    """One place is changed, within a line, and the result is Python."""
    text = (CHECKOUT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert "\n" not in mutant.old
    assert mutant.new != mutant.old
    ast.parse(text.replace(mutant.old, mutant.new))
    assert mutant.breaks


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
