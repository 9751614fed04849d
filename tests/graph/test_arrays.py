"""Rows of arrays, written without a copy of all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raygnn.graph import arrays
from raygnn.graph.arrays import rows_of
from raygnn.graph.partition.dgl_format import read_tensors, write_tensors


def test_rows_are_written_as_they_would_be_at_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of any dtype are written in pieces of any size."""
    place = tmp_path_factory.mktemp("rows")
    random = np.random.default_rng(0)
    kinds = {
        "features": random.standard_normal((30, 3), np.float32),
        "labels": random.integers(0, 9, 30),
        "mask": random.random(30) < 0.5,
        "nothing": np.zeros((30, 0), np.float32),
        "bf16": torch.randn(30, 2).bfloat16(),
    }

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.sampled_from(list(kinds)), st.lists(st.integers(0, 29)), st.integers(1, 100))
    def run(kind: str, ids: list[int], piece: int) -> None:
        monkeypatch.setattr(arrays, "_PIECE", piece)
        array, chosen = kinds[kind], np.array(ids, np.int64)
        rows = rows_of(array, chosen)
        at_once = array[torch.from_numpy(chosen)] if kind == "bf16" else array[chosen]
        assert rows.shape == tuple(at_once.shape)
        one = write_tensors(place / "one.dgl", {kind: rows})
        other = write_tensors(place / "other.dgl", {kind: at_once})
        assert one == other
        assert len(read_tensors(place / "one.dgl")[kind]) == len(ids)

    run()
