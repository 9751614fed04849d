"""The job of a company: tables with words, trained on once, and predictions for a later month."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import customers

from tests.support.commands import Command

pytestmark = pytest.mark.system


def run(*command: str, cwd: Path, code: int = 0) -> str:
    """Run a command that must exit with ``code`` and leave nothing behind; return its output."""
    process = Command([*command], cwd)
    status, out, err = process.finish(400)
    assert status == code, out + err
    assert process.left_behind() == []
    return out + err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_later_month(tmp_path: Path) -> None:
    """Data with fewer and unknown regions and no labels get predictions by category, or a refusal
    at once."""
    truth = customers.write(tmp_path).to_pandas()
    new = ["--new-data", "--set", "graph.path=october/tables.yaml"]
    run("train", "job.yaml", cwd=tmp_path)
    run("predict", "interests", *new, "--out", "october.parquet", cwd=tmp_path)
    frame = pd.read_parquet(tmp_path / "october.parquet")
    assert frame["node"].tolist() == truth["customer"].tolist()
    assert frame["label"].isna().all()
    assert set(frame["prediction"]) == set(customers.INTERESTS)
    right = frame["prediction"] == truth["interest"]
    unknown = truth["region"].isin(customers.NEW_REGIONS)
    assert unknown.sum() > 300
    assert right.mean() > 0.6  # of five interests, about equally many
    assert right[unknown].mean() > 0.55

    described = tmp_path / "october" / "tables.yaml"
    described.write_text(
        described.read_text().replace("unknown: bucket, min_count: 20", "unknown: error")
    )
    table = pd.read_parquet(tmp_path / "october" / "customers.parquet")
    table["region"] = table["region"].fillna("north 1")  # no values are refused first
    table.to_parquet(tmp_path / "october" / "customers.parquet")
    said = run("predict", "interests", *new, "--out", "no.parquet", cwd=tmp_path, code=2)
    for word in ("customers.parquet, row", "column 'region'", *map(repr, customers.NEW_REGIONS)):
        assert word in said
    assert not (tmp_path / "no.parquet").exists()
    assert not (tmp_path / "runs" / ".predicting").exists()
