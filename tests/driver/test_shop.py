"""Tables with ids of text, all the way to predictions by these ids, by the commands people type."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from bench_tables import measure

pytestmark = pytest.mark.system


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_from_tables_to_predictions_by_their_ids(tmp_path: Path) -> None:
    found = measure(tmp_path, 40_000)
    assert found["edges"] == 40_000
    assert found["names"]
    assert found["right"] > 0.25  # of 8 classes, about equally many
