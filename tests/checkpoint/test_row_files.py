"""Files of learned rows: what was written is read, in whatever pieces."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raygnn.checkpoint import learned_rows
from raygnn.checkpoint.learned_rows import RowState, read_rows, write_rows
from raygnn.checkpoint.store import RowFiles
from raygnn.errors import DataError
from raygnn.sampling.exchange import Exchange, World
from raygnn.tasks.embeddings import ROW


@given(
    st.integers(0, 40),
    st.integers(1, 5),
    st.lists(st.sampled_from(["row", "sum", "best"]), min_size=1, unique=True),
    st.integers(1, 200),
)
def test_rows_are_read_back(rows: int, dim: int, names: list[str], piece: int) -> None:
    rng = np.random.default_rng(rows)
    ids = rng.integers(0, 2**62, rows)
    arrays = {name: rng.normal(size=(rows, dim)).astype(np.float32) for name in names}
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(learned_rows, "_PIECE", piece)
        path = Path(place) / "rows-0-0.bin"
        file = write_rows(path, "a", ids, arrays)
        content = path.read_bytes()
        assert content == ids.astype("<i8").tobytes() + b"".join(
            a.astype("<f4").tobytes() for a in arrays.values()
        )
        assert file.bytes == len(content)
        assert file.sha256 == hashlib.sha256(content).hexdigest()
        pieces = list(read_rows(path, file, dim))
        assert [i for found, _ in pieces for i in found] == ids.tolist()
        for name, array in arrays.items():
            found = [part[name] for _, part in pieces]
            assert np.array_equal(np.concatenate([array[:0], *found]), array)
        files = RowFiles(dim=dim, steps=3, files=(file,))
        assert RowFiles.model_validate_json(files.model_dump_json()) == files


GOOD: dict[str, Any] = {
    "dim": 2,
    "steps": 1,
    "files": [
        {
            "name": "rows-0-0.bin",
            "ntype": "a",
            "rows": 3,
            "arrays": ["row"],
            "bytes": 48,
            "sha256": "0",
        }
    ],
}


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../rows-0-0.bin"},
        {"name": "/etc/passwd"},
        {"name": "state.ckpt"},
        {"rows": 4},
        {"rows": -3},
        {"rows": True},
        {"rows": "3"},
        {"bytes": 49},
        {"arrays": ["row", "sum"]},
        {"arrays": 3},
    ],
)
def test_invalid_descriptions_of_rows_are_refused(change: dict[str, Any]) -> None:
    assert RowFiles.model_validate(GOOD).files[0].rows == 3
    with pytest.raises(ValidationError):
        RowFiles.model_validate({**GOOD, "files": [{**GOOD["files"][0], **change}]})
    with pytest.raises(ValidationError):
        RowFiles.model_validate({"dim": 2, "files": []})


def test_rows_of_another_width_are_refused(tmp_path: Path) -> None:
    table = torch.zeros(3, 4)
    embeddings: Any = SimpleNamespace(
        rows={"a": table}, ids={"a": np.arange(3)}, dim=4, arrays=lambda _: {ROW: table}
    )
    file = write_rows(tmp_path / "rows-0-0.bin", "a", np.arange(3), {ROW: np.ones((3, 2))})
    state = RowState(embeddings, Exchange(World(0, 1)), 1.0)
    with pytest.raises(DataError, match="no embedding rows of 3 of this rank's 3 'a' nodes"):
        state.read(tmp_path, RowFiles(dim=2, steps=0, files=(file,)))


def test_a_file_that_was_cut_is_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows-0-0.bin"
    file = write_rows(path, "a", np.arange(3), {"row": np.zeros((3, 2), np.float32)})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match="size"):
        list(read_rows(path, file, 2))
