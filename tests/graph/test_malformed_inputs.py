"""Input that must be refused: one clear DataError that names the file, and nothing run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raygnn.errors import DataError
from raygnn.graph.sources import digest, load_graph
from tests.support.builders import (
    MALFORMED,
    assert_damage_is_harmless,
    assert_refused,
    graph_config,
    write_dgl,
)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_input_is_refused(name: str, tmp_path: Path) -> None:
    build, fragments = MALFORMED[name]
    section = build(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert_refused(lambda: load_graph(graph_config(section)), fragments.split("|"))
    assert sorted(tmp_path.rglob("*")) == before  # nothing ran, nothing was written


@pytest.mark.parametrize("name", ["dgl missing", "dgl is a directory"])
def test_digest_refuses_what_can_not_be_read(name: str, tmp_path: Path) -> None:
    build, fragments = MALFORMED[name]
    with pytest.raises(DataError) as caught:
        digest(graph_config(build(tmp_path)))
    assert fragments.split("|")[0] in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    section = write_dgl(tmp_path)
    Path(section["path"]).chmod(0)
    with pytest.raises(DataError, match="permission denied"):
        load_graph(graph_config(section))


def test_damage_anywhere_is_a_data_error_or_harmless(tmp_path: Path) -> None:
    config = graph_config(write_dgl(tmp_path))
    assert_damage_is_harmless(lambda: load_graph(config), tmp_path, 300)
