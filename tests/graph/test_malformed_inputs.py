"""Input that must be refused: one clear DataError that names the file, and nothing run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import (
    MALFORMED,
    assert_damage_is_harmless,
    assert_refused,
    graph_config,
    write_dgl,
    write_npz,
    write_planetoid,
)

from raygnn.errors import DataError
from raygnn.graph.sources import digest, load_graph


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_input_is_refused(name: str, tmp_path: Path) -> None:
    build, fragments = MALFORMED[name]
    section = build(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert_refused(lambda: load_graph(graph_config(section)), fragments.split("|"))
    assert sorted(tmp_path.rglob("*")) == before  # nothing ran, nothing was written


@pytest.mark.parametrize("name", ["planetoid file missing", "npz missing", "dgl is a directory"])
def test_digest_refuses_what_can_not_be_read(name: str, tmp_path: Path) -> None:
    build, fragments = MALFORMED[name]
    with pytest.raises(DataError) as caught:
        digest(graph_config(build(tmp_path)))
    assert fragments.split("|")[0] in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    section = write_npz(tmp_path)
    Path(section["path"]).chmod(0)
    with pytest.raises(DataError, match="permission denied"):
        load_graph(graph_config(section))


_HOSTILE = [name for name in MALFORMED if "pickle" in name or "huge" in name]


def test_hostile_input_takes_neither_time_nor_memory(tmp_path: Path) -> None:
    """In a process with 1 GiB more than it starts with: a segmentation fault or a huge
    allocation would end it."""
    code = (
        "import resource, sys, json\n"
        "from builders import graph_config\n"
        "from raygnn.errors import DataError\n"
        "from raygnn.graph.sources import load_graph, npz, planetoid\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, size + 2**30))\n"
        "for section in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        load_graph(graph_config(section))\n"
        "    except DataError:\n"
        "        print('refused')\n"
    )
    sections = []
    for number, name in enumerate(_HOSTILE):
        (tmp_path / str(number)).mkdir()
        sections.append(MALFORMED[name][0](tmp_path / str(number)))
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(sections)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.stdout.split() == ["refused"] * len(_HOSTILE), done.stderr[-2000:]
    assert done.returncode == 0


@pytest.mark.parametrize("write", [write_planetoid, write_npz, write_dgl])
def test_damage_anywhere_is_a_data_error_or_harmless(
    write: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    config = graph_config(write(tmp_path))
    assert_damage_is_harmless(lambda: load_graph(config), tmp_path, 300)
