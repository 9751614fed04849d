"""Small input files, right and wrong, and the table of wrong ones that several tests share."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raygnn.config.graph import DglGraph, GraphConfig, NpzGraph, PlanetoidGraph, PlantedGraph
from raygnn.errors import InputError
from raygnn.graph.partition.dgl_format import write_graph

SECTIONS = {
    "planetoid": PlanetoidGraph,
    "npz": NpzGraph,
    "dgl": DglGraph,
    "planted": PlantedGraph,
}


def graph_config(section: dict[str, Any]) -> GraphConfig:
    """The ``graph:`` section of a config as the model that ``load_graph`` takes."""
    return SECTIONS[section["format"]](**section)


# --- planetoid -----------------------------------------------------------------------------

TINY_NAME = "tiny"
# 8 nodes: 0-1 train, 2-4 val, 5-7 test (rows of tx are for the nodes 7, 5, 6).
TINY_ADJACENCY = {0: [1, 2], 1: [0, 0], 2: [0, 3], 3: [2], 4: [5], 5: [4, 6], 6: [5], 7: [7]}
TINY_TEST = [7, 5, 6]


def tiny_parts() -> dict[str, Any]:
    """The contents of the eight files of an 8-node graph with 3 features and 2 classes."""
    features = np.arange(24, dtype=np.float32).reshape(8, 3) % 5
    classes = np.eye(2, dtype=np.int32)[np.arange(8) % 2]
    return {
        "x": sp.csr_matrix(features[:2]),
        "y": classes[:2],
        "allx": sp.csr_matrix(features[:5]),
        "ally": classes[:5],
        "tx": sp.csr_matrix(features[TINY_TEST]),
        "ty": classes[TINY_TEST],
        "graph": TINY_ADJACENCY,
        "test.index": "".join(f"{node}\n" for node in TINY_TEST).encode(),
    }


def write_planetoid(directory: Path, protocol: int = 2, **changes: Any) -> dict[str, Any]:
    """Write the tiny graph with some parts changed; ``bytes`` are written as they are, ``None``
    leaves the file out, ``test_index`` stands for ``test.index``."""
    changes = {key.replace("_", "."): value for key, value in changes.items()}
    for part, content in {**tiny_parts(), **changes}.items():
        if content is None:
            continue
        data = content if isinstance(content, bytes) else pickle.dumps(content, protocol)
        (directory / f"ind.{TINY_NAME}.{part}").write_bytes(data)
    return {"format": "planetoid", "path": str(directory), "name": TINY_NAME}


# --- npz -----------------------------------------------------------------------------------


def tiny_arrays() -> dict[str, np.ndarray]:
    """The arrays of a 6-node path with 2 splits."""
    masks = np.zeros((3, 2, 6), dtype=bool)
    for part, nodes in enumerate(([0, 1], [2, 3], [4, 5])):
        masks[part, 0, nodes] = True
        masks[part, 1, 5 - np.array(nodes)] = True
    return {
        "node_features": np.arange(12, dtype=np.float32).reshape(6, 2),
        "node_labels": np.array([0, 1, 0, 1, 0, 1]),
        "edges": np.array([[0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]),
        "train_masks": masks[0],
        "val_masks": masks[1],
        "test_masks": masks[2],
    }


def write_npz(directory: Path, /, **changes: Any) -> dict[str, Any]:
    """Write the path graph with some arrays changed; ``None`` leaves an array out."""
    arrays = {**tiny_arrays(), **changes}
    np.savez(directory / "tiny.npz", **{k: v for k, v in arrays.items() if v is not None})
    return {"format": "npz", "path": str(directory / "tiny.npz")}


def changed(name: str, at: Any, value: Any) -> dict[str, np.ndarray]:
    """The array ``name`` of :func:`tiny_arrays` with ``value`` at the index ``at``."""
    array = tiny_arrays()[name]
    array[at] = value
    return {name: array}


# --- dgl -----------------------------------------------------------------------------------


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
    write_graph(path, 4, np.array(src), np.array(dst), ndata, {})
    return {"format": "dgl", "path": str(path)}


# --- what several tests ask of input ---------------------------------------------------------


def assert_refused(read: Callable[[], object], fragments: Iterable[str]) -> None:
    """One short error with these in it, that says what to do, and exit code 2."""
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
    """Files of a directory that are cut or garbled anywhere are read, or refused by name."""
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


def assert_not_imported(code: str, *modules: str) -> None:
    """A new process that runs the code loads none of these."""
    code += f"\nimport sys\nassert not {set(modules)} & sys.modules.keys()\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- what must be refused ------------------------------------------------------------------


class Runs:
    """An object whose pickle calls a function when an ordinary unpickler reads it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def _array_pickle(shape: bytes) -> bytes:
    """A protocol-2 pickle of a float32 array of the given shape (opcodes) and no data."""
    start = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02f4K\x00K\x01\x87R"
    state = b"(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return start + b"(K\x01" + shape + dtype + state + b"\x89U\x00tb."


_HUGE = b"\x8a\x06\x00\x00\x00\x00\x00\x10"  # LONG1: 2^44
_DEEP_KEY = b"\x80\x02})" + b"\x85" * 150_000 + b"K\x00s."
_MEMO_BOMB = b"\x80\x02]r\xfe\xff\xff\x7f."
_SHARED_LIST = (  # 20,000 nodes that share one list of 100,000 neighbours
    b"\x80\x02}(M\x00\x00]q\x00("
    + b"K\x00" * 100_000
    + b"e"
    + b"".join(b"M" + struct.pack("<H", node) + b"h\x00" for node in range(1, 20_000))
    + b"u."
)
_DEEP_LIST = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."


def _bare(write: Callable[[Path], None], format: str, **section: Any) -> Any:
    """A builder for a single file ``input`` that ``write`` makes."""

    def build(directory: Path) -> dict[str, Any]:
        write(directory / "input")
        return {"format": format, "path": str(directory / "input"), **section}

    return build


def _cut(section: dict[str, Any], keep: float, part: str = "") -> dict[str, Any]:
    path = Path(section["path"])
    file = path / f"ind.{TINY_NAME}.{part}" if part else path
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    return section


def _npy_header_bomb(directory: Path) -> dict[str, Any]:
    section = write_npz(directory)
    path = Path(section["path"])
    data = bytearray(path.read_bytes())
    at = data.index(b"'shape': (6, 2)")
    data[at : at + 15] = b"'shape': (9**9)"
    path.write_bytes(bytes(data))
    return section


def _huge_npy(directory: Path) -> dict[str, Any]:
    import zipfile

    section = write_npz(directory, node_features=None)
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 2), }"
    header += b" " * (117 - len(header)) + b"\n"
    with zipfile.ZipFile(section["path"], "a") as archive:
        magic = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header))
        archive.writestr("node_features.npy", magic + header + bytes(48))
    return section


def _nan_features(row: int) -> Any:
    features = tiny_parts()["allx"].toarray()
    features[row, 1] = np.nan
    return sp.csr_matrix(features)


Builder = Callable[[Path], dict[str, Any]]


def planetoid(**changes: Any) -> Builder:
    """A builder of the planetoid graph with some parts changed."""
    return lambda directory: write_planetoid(directory, **changes)


def npz(**changes: Any) -> Builder:
    return lambda directory: write_npz(directory, **changes)


def dgl(**changes: Any) -> Builder:
    return lambda directory: write_dgl(directory, **changes)


# Name → builder, which writes a malformed input to an empty directory and returns the ``graph:``
# section that names it; and the fragments of the message that must come of it, joined by ``|``.
Cases = dict[str, tuple[Builder, str]]
_PLANETOID: Cases = {
    "file missing": (planetoid(allx=None), "allx"),
    "part is a directory": (
        lambda p: ((p / "ind.tiny.ty").mkdir(), write_planetoid(p, ty=None))[1],
        "ty|directory",
    ),
    "part is a pipe": (
        lambda p: (os.mkfifo(p / "ind.tiny.ty"), write_planetoid(p, ty=None))[1],
        "ty|not a regular file",
    ),
    "file empty": (planetoid(ty=b""), "ty|empty"),
    "file truncated": (lambda p: _cut(write_planetoid(p), 0.6, "allx"), "allx|truncated"),
    "file is text": (planetoid(graph=b"0: 1 2\n1: 0\n"), "graph|not a whole pickle"),
    "pickle runs a command": (
        lambda p: write_planetoid(p, y=Runs(os.system, f"touch {p}/owned")),
        "y|refused|system",
    ),
    "pickle evaluates": (
        lambda p: write_planetoid(p, graph=Runs(eval, f"open({str(p / 'owned')!r}, 'w')")),
        "graph|refused|eval",
    ),
    "pickle runs a command by INST": (
        planetoid(graph=b"(S'true'\nios\nsystem\n."),
        "graph|refused|os.system",
    ),
    "pickle changes a name": (
        planetoid(graph=b"\x80\x02cnumpy\nndarray\n}U\x01aK\x01sb."),
        "graph|not a whole pickle",
    ),
    "pickle with a deep key": (planetoid(graph=_DEEP_KEY), "graph|more than 1000 tuples"),
    "pickle with deep lists": (planetoid(graph=_DEEP_LIST), "graph|a dict"),
    "pickle with a shared list": (
        planetoid(graph=_SHARED_LIST),
        "graph|more neighbours than it has bytes",
    ),
    "pickle with a huge memo": (planetoid(graph=_MEMO_BOMB), "graph|the memo index 2147483646"),
    "pickle with a huge array": (
        planetoid(ally=_array_pickle(_HUGE + b"K\x02\x86")),
        "ally|17592186044416",
    ),
    "csr with huge columns": (
        planetoid(
            **{
                part: sp.csr_matrix((n, 2**40), dtype=np.float32)
                for part, n in (("x", 2), ("allx", 5), ("tx", 3))
            }
        ),
        "allx|GiB",
    ),
    "rows disagree": (planetoid(ally=tiny_parts()["ally"][:4]), "ally|4 rows|allx holds 5"),
    "columns disagree": (planetoid(tx=sp.csr_matrix(np.ones((3, 4), np.float32))), "tx|4 columns"),
    "NaN": (planetoid(allx=_nan_features(3)), "allx: row 3|column 1|nan"),
    "label of two classes": (
        planetoid(ally=np.array([[0, 1], [1, 0], [1, 1], [0, 1], [1, 0]])),
        "ally: row 2|[1, 1]",
    ),
    "test node twice": (planetoid(test_index=b"7\n5\n7\n"), "test.index: line 3|'7'|twice"),
    "test node far away": (
        planetoid(test_index=b"7\n5\n99999999999\n"),
        "test.index: line 3|99999999999",
    ),
    "edge to nowhere": (planetoid(graph={**TINY_ADJACENCY, 4: [5, 80]}), "graph: row 4|80"),
    "neighbours are text": (planetoid(graph={**TINY_ADJACENCY, 4: ["5"]}), "graph: row 4"),
}
_NPZ: Cases = {
    "with objects": (
        lambda p: write_npz(p, node_labels=np.array([Runs(os.system, f"touch {p}/owned")] * 6)),
        "node_labels|refused",
    ),
    "huge shape": (_huge_npy, "node_features|1000000000000"),
    "labels too few": (npz(node_labels=np.array([0, 1, 0, 1, 0])), "node_labels|(5,)|6 nodes"),
    "features too few": (npz(node_features=np.ones((5, 2), np.float32)), "node_labels|5 nodes"),
    "edge out of range": (npz(**changed("edges", (3, 1), 6)), "edges, row 3|6"),
    "edge negative": (npz(**changed("edges", (2, 0), -1)), "edges, row 2|-1"),
    "edges transposed": (npz(edges=tiny_arrays()["edges"].T), "edges|(2, 5)|[E, 2]"),
    "edges float": (npz(edges=tiny_arrays()["edges"] * 1.0), "edges|float64"),
    "no edges": (npz(edges=np.zeros((0, 2), np.int64)), "edges|no edges"),
    "NaN": (npz(**changed("node_features", (4, 1), np.nan)), "node_features, row 4|column 1|nan"),
    "infinity": (npz(**changed("node_features", (5, 0), -np.inf)), "node_features, row 5|-inf"),
    "mask overlap": (npz(**changed("val_masks", (0, 1), True)), "val_masks, row 1|train_mask"),
    "mask of ids": (
        npz(train_masks=np.array([[0, 1, 2, 3, 4, 5]])),
        "train_masks, row 2|neither 0 nor 1",
    ),
    "mask too short": (npz(test_masks=np.zeros((2, 5), dtype=bool)), "test_masks|(5,)|6 nodes"),
    "no training nodes": (
        npz(train_masks=np.zeros((2, 6), dtype=bool)),
        "train_masks|no training nodes",
    ),
    "label negative": (npz(**changed("node_labels", 2, -7)), "node_labels, row 2|-7"),
    "label above": (npz(**changed("node_labels", 2, 6)), "node_labels, row 2|is 6"),
    "label enormous": (
        npz(**changed("node_labels", 2, 10**12)),
        "node_labels, row 2|1000000000000",
    ),
    "label fractional": (npz(node_labels=np.array([0, 1, 0.5, 1, 0, 1])), "node_labels, row 2|0.5"),
    "training node without label": (
        npz(**changed("node_labels", 1, -1)),
        "train_masks, row 1|no label",
    ),
    "split out of range": (
        lambda p: {**write_npz(p), "split": 2},
        "train_masks|graph.split is 2|2 splits",
    ),
}
_DGL: Cases = {
    "edge out of range": (dgl(dst=(1, 2, 9, 0)), "_N:_E:_N, row 2|9"),
    "NaN": (dgl(feat=np.array([[0.0], [1.0], [np.nan], [2.0]])), "_N/feat, row 2|nan"),
    "rows disagree": (dgl(feat=np.array([[0.0], [1.0], [3.0]])), "_N/feat|(3, 1)|4 nodes"),
    "mask overlap": (dgl(val_mask=np.array([0, 1, 1, 0])), "_N/val_mask, row 1|train_mask"),
    "without masks": (
        dgl(train_mask=None, val_mask=None, test_mask=None),
        "_N/train_mask|no node type has a train_mask",
    ),
}
_FILES: Cases = {
    "planetoid directory missing": (
        lambda p: {"format": "planetoid", "path": str(p / "nowhere"), "name": "cora"},
        "nowhere",
    ),
    "planetoid path is a file": (
        _bare(lambda f: f.write_bytes(b"x"), "planetoid", name="cora"),
        "input",
    ),
    "npz missing": (lambda p: {"format": "npz", "path": str(p / "gone.npz")}, "gone.npz"),
    "npz is a directory": (_bare(Path.mkdir, "npz"), "input|directory"),
    "npz empty": (_bare(Path.touch, "npz"), "input|empty"),
    "npz is text": (
        _bare(lambda f: f.write_text("0 1\n1 2\n"), "npz"),
        "input|not a complete NumPy archive",
    ),
    "npz truncated": (lambda p: _cut(write_npz(p), 0.5), "tiny.npz|truncated"),
    "npz array missing": (npz(edges=None), "tiny.npz|no array edges|node_labels"),
    "npz damaged header": (_npy_header_bomb, "tiny.npz"),
    "dgl missing": (lambda p: {"format": "dgl", "path": str(p / "gone.dgl")}, "gone.dgl"),
    "dgl is a directory": (_bare(Path.mkdir, "dgl"), "input|directory"),
    "dgl garbage": (
        _bare(lambda f: f.write_bytes(bytes(range(256)) * 40), "dgl"),
        "input|dgl.save_graphs",
    ),
    "dgl truncated": (lambda p: _cut(write_dgl(p), 0.95), "tiny.dgl|truncated"),
    "dgl header only": (lambda p: _cut(write_dgl(p), 0.1), "tiny.dgl|truncated"),
    "dgl index out of range": (lambda p: {**write_dgl(p), "index": 3}, "tiny.dgl|graph.index is 3"),
}
MALFORMED: Cases = _FILES | {
    f"{kind} {name}": (build, place + fragments)
    for kind, place, cases in (
        ("planetoid", "ind.tiny.", _PLANETOID),
        ("npz", "tiny.npz: ", _NPZ),
        ("dgl", "tiny.dgl: ", _DGL),
    )
    for name, (build, fragments) in cases.items()
}
