"""Small input files, right and wrong, and the table of wrong ones that several tests share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from raygnn.config.graph import DatasetGraph, DglGraph, GraphConfig, PlantedGraph
from raygnn.config.task import TaskConfig
from raygnn.errors import InputError
from raygnn.graph.data import DEFAULT_ETYPE, DEFAULT_NTYPE, EdgeFrame, GraphData, NodeFrame
from raygnn.graph.partition.dgl_format import write_graph

SECTIONS = {"dataset": DatasetGraph, "dgl": DglGraph, "planted": PlantedGraph}


def read_task(**keys: Any) -> TaskConfig:
    """Return the ``task:`` section with these keys. Raises pydantic.ValidationError if a key or a
    value is wrong."""
    task: TaskConfig = TypeAdapter(TaskConfig).validate_python(keys)
    return task


def graph_config(section: dict[str, Any]) -> GraphConfig:
    """Return the ``graph:`` section of a config as the model that ``load_graph`` accepts."""
    return SECTIONS[section["format"]](**section)


# --- dgl -----------------------------------------------------------------------------------


def write_homogeneous(
    path: Path, num: int, src: Any, dst: Any, ndata: dict[str, Any], edata: Any = None
) -> None:
    """Write a graph of one node type and one edge type as ``dgl.save_graphs`` does."""
    edges = {DEFAULT_ETYPE: EdgeFrame(src, dst, edata or {})}
    write_graph(path, GraphData("", {DEFAULT_NTYPE: NodeFrame(num, ndata)}, edges))


def write_dgl(
    directory: Path, /, src: Any = (0, 1, 2, 3), dst: Any = (1, 2, 3, 0), **data: Any
) -> dict[str, Any]:
    """Write a 4-node cycle as ``dgl.save_graphs`` does, with some data changed (None: left out)."""
    ndata = {
        "feat": np.arange(8, dtype=np.float32).reshape(4, 2),
        "label": np.array([0, 1, 0, 1]),
        "train_mask": np.array([True, True, False, False]),
        "val_mask": np.array([False, False, True, False]),
        "test_mask": np.array([False, False, False, True]),
    }
    path = directory / "tiny.dgl"
    ndata = {name: array for name, array in {**ndata, **data}.items() if array is not None}
    write_homogeneous(path, 4, np.array(src), np.array(dst), ndata)
    return {"format": "dgl", "path": str(path)}


# --- what several tests ask of input ---------------------------------------------------------


def assert_refused(read: Callable[[], object], fragments: Iterable[str]) -> None:
    """Check for one short error with these fragments, a remedy and exit code 2."""
    with pytest.raises(InputError) as caught:
        read()
    message = str(caught.value)
    assert all(fragment in message for fragment in fragments), message
    assert "→" in message
    assert caught.value.exit_code == 2
    assert len(message) < 1500


def assert_damage_is_harmless(
    read: Callable[[], object], directory: Path, examples: int = 150
) -> None:
    """Check that truncated or garbled files of a directory are read, or refused by name."""
    whole = {file: file.read_bytes() for file in sorted(directory.iterdir())}

    @settings(max_examples=examples, deadline=None, database=None)
    @given(
        st.sampled_from(sorted(whole)),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=8),
        st.booleans(),
    )
    @example(min(whole), 0.0, b"\0", True)
    @example(min(whole), 0.0, b"\0", False)
    def run(file: Path, where: float, garbage: bytes, cuts: bool) -> None:
        data = whole[file]
        at = int(len(data) * where)
        file.write_bytes(data[:at] + (b"" if cuts else garbage + data[at + len(garbage) :]))
        try:
            read()
        except InputError as error:
            assert str(directory) in str(error)  # noqa: PT017
        finally:
            file.write_bytes(data)

    run()


def stored(values: Any, dtype: Any) -> Any:
    """Return an array as a shard has it: read-only, so that no kernel is compiled for it alone."""
    array = np.array(values, dtype)
    array.setflags(write=False)
    return array


def assert_not_imported(code: str, *modules: str) -> None:
    """Check that a new process that runs the code loads none of these modules."""
    code += f"\nimport sys\nassert not {set(modules)} & sys.modules.keys()\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- what must be refused ------------------------------------------------------------------


def _bare(write: Callable[[Path], None], format: str, **section: Any) -> Any:
    """Return a builder for a single file ``input`` that ``write`` creates."""

    def build(directory: Path) -> dict[str, Any]:
        write(directory / "input")
        return {"format": format, "path": str(directory / "input"), **section}

    return build


def _cut(section: dict[str, Any], keep: float) -> dict[str, Any]:
    path = Path(section["path"])
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    return section


Builder = Callable[[Path], dict[str, Any]]


def dgl(**changes: Any) -> Builder:
    return lambda directory: write_dgl(directory, **changes)


# Name → builder, which writes a malformed input to an empty directory and returns the ``graph:``
# section that names it; and the fragments of the message that must come of it, joined by ``|``.
Cases = dict[str, tuple[Builder, str]]
_DGL: Cases = {
    "edge out of range": (dgl(dst=(1, 2, 9, 0)), "_N:_E:_N, row 2|9"),
    "edge negative": (dgl(src=(0, 1, -1, 3)), "_N:_E:_N, row 2|-1"),
    "no edges": (dgl(src=np.zeros(0, int), dst=np.zeros(0, int)), "edges|no edges"),
    "NaN": (dgl(feat=np.array([[0.0], [1.0], [np.nan], [2.0]])), "_N/feat, row 2|column 0|nan"),
    "infinity": (dgl(feat=np.array([[0.0], [1.0], [-np.inf], [2.0]])), "_N/feat, row 2|-inf"),
    "mask of ids": (dgl(train_mask=np.array([0, 1, 2, 3])), "_N/train_mask, row 2|neither 0 nor 1"),
    "mask too short": (dgl(test_mask=np.zeros(3, bool)), "_N/test_mask|(3,)|4 nodes"),
    "no training nodes": (dgl(train_mask=np.zeros(4, bool)), "_N/train_mask|no training nodes"),
    "label negative": (dgl(label=np.array([0, 1, -7, 1])), "_N/label, row 2|-7"),
    "label above": (dgl(label=np.array([0, 1, 4, 1])), "_N/label, row 2|is 4"),
    "label enormous": (dgl(label=np.array([0, 1, 10**12, 1])), "_N/label, row 2|1000000000000"),
    "label fractional": (dgl(label=np.array([0, 1, 0.5, 1])), "_N/label, row 2|0.5"),
    "labels too few": (dgl(label=np.array([0, 1, 0])), "_N/label|(3,)|4 nodes"),
    "training node without label": (
        dgl(label=np.array([0, -1, 0, 1])),
        "_N/train_mask, row 1|no label",
    ),
    "rows disagree": (dgl(feat=np.array([[0.0], [1.0], [3.0]])), "_N/feat|(3, 1)|4 nodes"),
    "mask overlap": (dgl(val_mask=np.array([0, 1, 1, 0])), "_N/val_mask, row 1|train_mask"),
    "without masks": (
        dgl(train_mask=None, val_mask=None, test_mask=None),
        "_N/train_mask|no node type has a train_mask",
    ),
}
_FILES: Cases = {
    "dgl missing": (lambda p: {"format": "dgl", "path": str(p / "gone.dgl")}, "gone.dgl"),
    "dgl is a directory": (_bare(Path.mkdir, "dgl"), "input|directory"),
    "dgl garbage": (
        _bare(lambda f: f.write_bytes(bytes(range(256)) * 40), "dgl"),
        "input|holds no DGL graph file",
    ),
    "dgl truncated": (lambda p: _cut(write_dgl(p), 0.95), "tiny.dgl|damaged"),
    "dgl header only": (lambda p: _cut(write_dgl(p), 0.1), "tiny.dgl|damaged"),
    "dgl index out of range": (lambda p: {**write_dgl(p), "index": 3}, "tiny.dgl|graph.index is 3"),
}
MALFORMED: Cases = _FILES | {
    f"{kind} {name}": (build, place + fragments)
    for kind, place, cases in (("dgl", "tiny.dgl: ", _DGL),)
    for name, (build, fragments) in cases.items()
}
