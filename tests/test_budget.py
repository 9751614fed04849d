"""The package is in order, and no larger than it was: see `budget`."""

from __future__ import annotations

import ast

from tests import budget


def test_package_is_in_order() -> None:
    assert list(budget.disorder()) == []


def test_nothing_grows() -> None:
    assert list(budget.growth()) == []


def test_uses_of_undocumented_attributes_are_found() -> None:
    seen = ["optimizer.found_inf = bad", "checkpoint['loops']['fit_loop'] = {}"]
    seen += ["vars(module)['kernels'] = 1", "module.__dict__.update(a=1)"]
    fine = ["self.__dict__['a'] = 1", "print(vars(module)['a'], module.__dict__.get('a'))"]
    assert list(budget.undocumented(ast.parse("\n".join(seen + fine)))) == seen
