"""Files of a partition: damage is named, and nothing crashes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raygnn.errors import DataError, InputError
from raygnn.graph.arrays import csr_rows
from raygnn.graph.dgl import dgl
from raygnn.graph.partition import dgl_format
from raygnn.graph.partition.dgl_format import read_tensors, write_graph, write_tensors
from raygnn.graph.partition.layout import PartitionMeta, read_meta
from raygnn.graph.partition.read import read_in_edges
from raygnn.graph.sources.library_graphs import graph_data
from tests.support.builders import assert_not_imported, write_homogeneous
from tests.support.graphs import partitioned, typed_graph
from tests.support.parted import load_part, verify


@pytest.fixture
def meta(tmp_path: Path) -> PartitionMeta:
    """A typed partition that raygnn wrote."""
    return partitioned(typed_graph(30, 12), tmp_path, 2)


@pytest.fixture
def foreign(meta: PartitionMeta) -> Path:
    """The same partition as another tool would write it: no manifest, no original ids."""
    (meta.directory / "raygnn.json").unlink()
    for files in meta.files:
        for path in (files.orig_nids, files.orig_eids):
            assert path is not None
            path.unlink()
    return meta.config_file


def edit(config: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(config.read_text())
    change(values)
    config.write_text(json.dumps(values))


# --- descriptions --------------------------------------------------------------------------------


def test_the_description(meta: PartitionMeta) -> None:
    for path in (meta.directory, meta.config_file, str(meta.directory)):
        assert read_meta(path).digest == meta.digest == "0" * 64
    assert meta.num_parts == len(meta.files) == 2
    assert meta.num_nodes("item") == 30
    assert meta.num_edges(("user", "buys", "item")) == 120
    for ranges in (*meta.node_ranges.values(), *meta.edge_ranges.values()):
        assert ranges.shape == (2, 2)
        assert ranges[0, 0] == 0
        assert ranges[0, 1] == ranges[1, 0]
    for files in meta.files:
        assert len(files.all()) == 5
        assert all(path.is_file() for path in files.all())


def test_descriptions_need_no_torch(meta: PartitionMeta) -> None:
    assert_not_imported(
        "from raygnn.graph.partition.layout import read_meta\n"
        f"assert read_meta({str(meta.directory)!r}).num_parts == 2",
        *("torch", "dgl", "ray"),
    )


def test_other_json_files_beside_it(foreign: Path) -> None:
    (foreign.parent / "new_label_map.json").write_text('{"0": 1}')  # as GraphStorm leaves
    assert read_meta(foreign.parent).config_file == foreign
    shutil.copy(foreign, foreign.with_name("another.json"))
    with pytest.raises(DataError, match="holds 2 partitions"):
        read_meta(foreign.parent)
    assert read_meta(foreign).num_parts == 2


def put(values: dict[str, Any], path: Iterable[str | int], to: Any) -> None:
    """Replace an entry with a function's result; GONE removes it."""
    *above, last = path
    section: Any = values
    for key in above:
        section = section[key]
    if to is GONE:
        del section[last]
    else:
        section[last] = to(section[last]) if callable(to) else to


GONE = object()
LONG = "a very long path"
# path of an entry, its new value, the key that the message names, and its text
BAD: dict[str, tuple[str, Any, str, str]] = {
    "no parts": ("num_parts", GONE, "num_parts", "None"),
    "parts as text": ("num_parts", "2", "num_parts", "'2'"),
    "parts as bool": ("num_parts", True, "num_parts", "True"),
    "zero parts": ("num_parts", 0, "num_parts", "0"),
    "endless parts": ("num_parts", 10**12, "num_parts", "1000000000000"),
    "more parts than ranges": ("num_parts", 3, "node_map.item", "3 id ranges"),
    "no node map": ("node_map", GONE, "node_map", "no id ranges"),
    "node map by file": ("node_map", "node_map.npy", "node_map", "no id ranges"),
    "a type left out": ("node_map user", GONE, "node_map", "expected"),
    "ranges of text": ("node_map item", ["a", "b"], "node_map.item", "not a"),
    "ranges of halves": ("node_map item", [[0, 1.5], [1.5, 3]], "node_map.item", "not a list"),
    "uneven ranges": ("node_map item", [[0, 1], [2]], "node_map.item", "not a"),
    "ranges of bool": ("node_map item", [[False, True], [True, True]], "node_map.item", "not a"),
    "huge ids": ("node_map item", [[0, 2**70], [0, 1]], "node_map.item", "not"),
    "a range backwards": ("node_map item 0", lambda row: row[::-1], "node_map", "follow"),
    "a gap": ("edge_map user:buys:item 1", lambda row: row[::-1], "edge_map", "follow"),
    "another total": ("num_nodes", 7, "num_nodes", "is 7"),
    "types out of number": ("ntypes user", 5, "ntypes", "number"),
    "types twice": ("ntypes user", 0, "ntypes", "number"),
    "types as list": ("ntypes", ["item", "user"], "ntypes", "number"),
    "old edge types": (
        "etypes",
        {"also": 0, "buys": 1, "bought_by": 2},
        "etypes",
        "source type:relation:destination type",
    ),
    "unknown ends": ("ntypes", {"item": 0, "us": 1}, "etypes", "not in ntypes"),
    "a part left out": ("part-1", GONE, "part-1", "missing"),
    "a part of text": ("part-1", "part1", "part-1", "missing"),
    "a file left out": ("part-0 node_feats", GONE, "part-0.node_feats", "missing"),
    "a path outside": ("part-0 part_graph", "../../etc/passwd", "part-0.part_graph", "leads out"),
    "a path from the root": ("part-0 part_graph", "/etc/passwd", "part-0.part_graph", "leads out"),
    "an impossible path": ("part-0 part_graph", "a\0b", "part-0.part_graph", "no file name"),
    LONG: ("part-0 part_graph", "a" * 5000, "part-0.part_graph", ""),
    "only GraphBolt's graph": ("part-0", {"part_graph_graphbolt": "g.pt"}, "part-0", "GraphBolt"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_json_that_is_wrong(case: str, foreign: Path) -> None:
    path, to, key, said = BAD[case]
    steps = [int(step) if step.isdigit() else step for step in path.split()]
    edit(foreign, lambda values: put(values, steps, to))
    with pytest.raises(DataError) as error:
        read_meta(foreign)
    assert str(foreign) in str(error.value) or case == LONG
    assert error.value.where
    assert key in error.value.where or case == LONG
    assert said in error.value.what
    assert error.value.remedy


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"num_parts": ', "\0\0\0", "[" * 100_000, "{}"]
)
def test_files_that_are_no_json(text: str, foreign: Path) -> None:
    foreign.write_text(text)
    for path in (foreign, foreign.parent):
        with pytest.raises(DataError) as error:
            read_meta(path)
        assert str(foreign.parent) in str(error.value)


def test_a_link_out_of_the_directory(foreign: Path, tmp_path: Path) -> None:
    graph = foreign.parent / "part0" / "graph.dgl"
    graph.rename(tmp_path / "elsewhere.dgl")
    graph.symlink_to(tmp_path / "elsewhere.dgl")
    with pytest.raises(DataError, match="leads out"):
        read_meta(foreign)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no partition here"):
        read_meta(tmp_path / "missing")
    with pytest.raises(DataError, match="holds no partition"):
        read_meta(tmp_path)


@pytest.mark.parametrize(
    ("path", "to"),
    [(["files", "part1/graph.dgl"], GONE), (["parts", 1, "splits"], {}), (["checksum"], GONE)],
    ids=["a file left out", "no splits in a part", "no checksum"],
)
def test_a_manifest_that_is_damaged(path: list[str | int], to: object, meta: PartitionMeta) -> None:
    """The files are intact; a wrong entry might not be noticed until later, if at all."""
    file = meta.directory / "raygnn.json"
    edit(file, lambda manifest: put(manifest, path, to))
    with pytest.raises(DataError, match="describe the partition: its content has changed") as error:
        read_meta(meta.directory)
    assert error.value.where == str(file)
    assert "partition the graph again" in (error.value.remedy or "")


def test_a_manifest_of_another_version(meta: PartitionMeta) -> None:
    file = meta.directory / "raygnn.json"
    edit(file, lambda manifest: manifest.update(layout=99))
    with pytest.raises(DataError, match="layout version 99") as error:
        read_meta(meta.directory)
    assert error.value.where == str(file)


def test_a_json_with_other_ranges(meta: PartitionMeta) -> None:
    """It has the size of the partition's json, and does not contradict itself."""
    bound = int(meta.node_map["item"][0, 1])
    text = meta.config_file.read_text().replace(f" {bound}", f" {bound - 1}")
    meta.config_file.write_text(text)
    with pytest.raises(DataError, match="has changed since it was written"):
        read_meta(meta.directory)


# --- damaged files -------------------------------------------------------------------------------


def test_a_file_of_another_size_or_content(meta: PartitionMeta) -> None:
    path = meta.files[1].node_feats
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with pytest.raises(
        DataError, match=f"has {len(good) - 1} bytes, expected {len(good)}"
    ) as error:
        read_meta(meta.directory)
    assert error.value.where == str(path)
    with pytest.raises(DataError, match="bytes, expected"):
        verify(meta)
    path.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    with pytest.raises(DataError, match="has changed") as error:
        verify(read_meta(meta.directory))
    assert error.value.where == str(path)
    verify(meta, parts=[0])
    path.unlink()
    for check in (lambda: read_meta(meta.directory), lambda: verify(meta)):
        with pytest.raises(DataError) as error:
            check()
        assert str(path) in str(error.value)


FILES = ("graph.dgl", "node_feat.dgl", "edge_feat.dgl", "orig_nids.dgl")


@pytest.mark.parametrize("mapped", [1, 1 << 24])
@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_anywhere(
    name: str, mapped: int, meta: PartitionMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dgl_format, "_MAPPED", mapped)
    (meta.directory / "raygnn.json").unlink()
    bare = read_meta(meta.directory)
    path = meta.directory / "part0" / name
    good = path.read_bytes()
    for length in {0, 1, 7, 8, 15, 16, len(good) - 1, *range(0, len(good), 97)} - {len(good)}:
        path.write_bytes(good[:length])
        with pytest.raises(DataError) as error:
            verify(bare, [0])
        assert error.value.where == str(path), length
    path.write_bytes(good + b"x")
    with pytest.raises(DataError, match="goes on"):
        verify(bare, [0])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> PartitionMeta:
    """A partition that is restored after each example."""
    return partitioned(typed_graph(30, 12), tmp_path_factory.mktemp("shared"), 2)


@settings(max_examples=120)
@given(
    name=st.sampled_from(FILES),
    hits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1),
)
def test_garbled_files_never_do_more_than_raise(
    name: str, hits: list[tuple[float, int]], shared: PartitionMeta
) -> None:
    path = shared.directory / "part0" / name
    good = path.read_bytes()
    bad = bytearray(good)
    # the header of a graph file ends at 4096; nearly all of it is padding
    skip = 4096 if name == "graph.dgl" else 0
    for place, value in hits:
        bad[skip + int(place * (len(bad) - 1 - skip))] = value
    path.write_bytes(bad)
    try:
        with contextlib.suppress(DataError):
            verify(replace(shared, manifest=None), [0])
    finally:
        path.write_bytes(good)


def test_hostile_lengths_allocate_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.dgl"
    write_tensors(path, {"x": torch.arange(3)})
    good = path.read_bytes()
    huge = (2**62).to_bytes(8, "little")
    for at in range(0, len(good) - 8):
        path.write_bytes(good[:at] + huge + good[at + 8 :])
        with contextlib.suppress(DataError):
            assert sum(tensor.nbytes for tensor in read_tensors(path).values()) <= len(good)
    rows, nbytes = (n.to_bytes(8, "little") for n in (2**50, 2**53))
    path.write_bytes(good[: -8 * 5] + rows + nbytes + good[-8 * 3 :])  # in harmony, but absent
    with pytest.raises(DataError, match="cut short"):
        read_tensors(path)


def test_contents_that_contradict_the_json(meta: PartitionMeta) -> None:
    def swap(values: dict[str, Any]) -> None:
        values["part-0"], values["part-1"] = values["part-1"], values["part-0"]

    (meta.directory / "raygnn.json").unlink()
    edit(meta.config_file, swap)
    with pytest.raises(DataError) as error:
        load_part(read_meta(meta.directory), 0)
    assert error.value.where
    assert "part1" in error.value.where


@pytest.mark.dgl
def test_a_graph_file_that_is_no_part(meta: PartitionMeta, tmp_path: Path) -> None:
    bare = replace(meta, manifest=None)
    path = str(meta.files[0].graph)
    plain = dgl().rand_graph(4, 4)
    for graphs in ([plain], [plain, plain], [dgl().heterograph({("a", "r", "b"): ([0], [0])})]):
        dgl().save_graphs(path, graphs)
        with pytest.raises(DataError, match="does not hold") as error:
            load_part(bare, 0)
        assert error.value.where == path
    missing = replace(bare, files=[replace(bare.files[0], graph=tmp_path / "gone"), bare.files[1]])
    with pytest.raises(InputError, match="cannot be opened"):
        load_part(missing, 0)


# --- DGL's formats -------------------------------------------------------------------------------


@pytest.mark.dgl
def test_we_write_what_dgl_writes(tmp_path: Path) -> None:
    src, dst = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 1, 0, 2])
    ndata = {"x": torch.randn(4, 2).bfloat16()}
    edata = {"w": torch.arange(4, dtype=torch.int16)}
    write_homogeneous(tmp_path / "ours.dgl", 4, src, dst, ndata, edata)
    graph = dgl().graph((src, dst), num_nodes=4)
    graph.ndata.update(ndata)
    graph.edata.update(edata)
    dgl().save_graphs(str(tmp_path / "theirs.dgl"), [graph])
    ours, theirs = ((tmp_path / f"{name}.dgl").read_bytes() for name in ("ours", "theirs"))
    assert ours[:32] == theirs[:32]
    assert ours[4096:] == theirs[4096:]  # DGL writes uninitialised memory between them
    ends = {
        ("user", "buys", "item"): (torch.tensor([0, 2]), torch.tensor([1, 0])),
        ("item", "bought", "user"): (torch.tensor([1, 0]), torch.tensor([0, 2])),
        ("user", "knows", "user"): (torch.tensor([1]), torch.tensor([2])),
    }
    graph = dgl().heterograph(ends, {"item": 2, "user": 4})
    graph.nodes["item"].data["x"] = torch.randn(2, 3)
    graph.edges["knows"].data["at"] = torch.tensor([7])
    dgl().save_graphs(str(tmp_path / "theirs.dgl"), [graph])
    write_graph(tmp_path / "ours.dgl", graph_data(graph))
    ours, theirs = ((tmp_path / f"{name}.dgl").read_bytes() for name in ("ours", "theirs"))
    assert ours[4096:] == theirs[4096:]
    tensors = {"a/x": torch.randn(3, 2), "e": torch.zeros(0, 3), "m": torch.ones(2).bool()}
    for name in tensors:  # DGL writes them in an order of its own
        written = write_tensors(tmp_path / "ours.dgl", {name: tensors[name]})
        dgl().data.utils.save_tensors(str(tmp_path / "theirs.dgl"), {name: tensors[name]})
        assert (tmp_path / "ours.dgl").read_bytes() == (tmp_path / "theirs.dgl").read_bytes()
        assert written.bytes == os.path.getsize(tmp_path / "ours.dgl")
    write_tensors(tmp_path / "all.dgl", tensors)
    loaded = dgl().data.utils.load_tensors(str(tmp_path / "all.dgl"))
    assert all(torch.equal(loaded[n], tensors[n].to(loaded[n].dtype)) for n in tensors)
    for none in ({}, tensors):
        dgl().data.utils.save_tensors(str(tmp_path / "t.dgl"), none)
        assert read_tensors(tmp_path / "t.dgl").keys() == none.keys()
    with pytest.raises(ValueError, match="complex64"):
        write_tensors(tmp_path / "c.dgl", {"c": torch.zeros(1, dtype=torch.complex64)})


ARRAYS = {
    "scalar": np.array(1.5),
    "empty": np.empty((0, 3), np.float16),
    "cube": np.arange(24, dtype=np.int32).reshape(2, 3, 4),
    "transposed": np.arange(6, dtype=np.int8).reshape(2, 3).T,
    "every other": np.arange(6)[::2],
    "bytes": np.arange(3, dtype=np.uint8),
}


@pytest.mark.dgl
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_every_kind_come_back(name: str, tmp_path: Path) -> None:
    array = ARRAYS[name]
    path = tmp_path / "t.dgl"
    for each in (array, torch.from_numpy(array)):
        write_tensors(path, {"x": each})
        found = read_tensors(path)["x"]
        assert isinstance(found, np.ndarray)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
        assert found.flags.writeable  # torch would warn
        if array.ndim:  # DGL writes a scalar as we do, but reads it from uninitialised memory
            loaded = dgl().data.utils.load_tensors(str(path))["x"]
            assert torch.equal(loaded, torch.from_numpy(array))
    write_tensors(path, {"x": torch.from_numpy(array).bfloat16()})
    brain = read_tensors(path)["x"]
    assert torch.equal(torch.as_tensor(brain), torch.from_numpy(array).bfloat16())


def test_large_arrays_are_mapped(
    meta: PartitionMeta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays are mapped at any offset of a file and still hashed, and the file is unchanged."""
    lists = read_in_edges(meta, 0)
    monkeypatch.setattr(dgl_format, "_MAPPED", 1)
    for etype, edges in read_in_edges(meta, 0).items():
        assert np.array_equal(edges.src, lists[etype].src)
        assert np.array_equal(edges.indptr, lists[etype].indptr)
    arrays = {
        "odd": np.arange(1000, 1005),
        "half": np.ones((3, 2), np.float16),
        "none": np.empty(0),
    }
    path = tmp_path / "t.dgl"
    facts, good = write_tensors(path, arrays), path.read_bytes()
    for name, array in read_tensors(path, facts).items():
        assert isinstance(array, np.ndarray)
        assert np.array_equal(array, arrays[name])
        assert isinstance(array.base, np.memmap) == (name != "none")
        array[:] = 7
    assert path.read_bytes() == good
    path.write_bytes(good.replace(b"\xec\x03", b"\xed\x03"))
    with pytest.raises(DataError, match="has changed"):
        read_tensors(path, facts)


def test_only_bfloat16_needs_torch(tmp_path: Path) -> None:
    write_tensors(tmp_path / "plain.dgl", {"x": np.arange(3), "half": np.ones(2, np.float16)})
    assert_not_imported(
        "from pathlib import Path\n"
        "from raygnn.graph.partition.dgl_format import read_tensors\n"
        f"read_tensors(Path({str(tmp_path / 'plain.dgl')!r}))",
        *("torch", "dgl", "ray"),
    )


def test_row_pointers() -> None:
    for dtype in (np.int32, np.int64):
        assert csr_rows(np.array([0, 2, 2, 3], dtype), 3, DataError).tolist() == [0, 0, 2]
        assert csr_rows(np.array([0], dtype), 0, DataError).tolist() == []
        far = np.iinfo(dtype).max
        for bad in ([], [0, 2], [1, 3], [0, 2, 1, 3], [0, far, -2, 3]):  # the last wraps around
            with pytest.raises(DataError, match="row pointers"):
                csr_rows(np.array(bad, dtype), 3, DataError)
