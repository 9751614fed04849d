"""Partitions in places that pyarrow.fs opens."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import fs

from raygnn.config.load import load_config
from raygnn.config.places import Uri
from raygnn.errors import ConfigError, DataError
from raygnn.graph.partition.layout import PartitionMeta, read_meta
from raygnn.graph.partition.make import find_partition
from raygnn.graph.partition.read import table
from raygnn.graph.staging.node_cache import Stage
from raygnn.graph.staging.shard import load_shard
from raygnn.preflight.partition_facts import partition_facts, stored_files
from raygnn.preflight.probe import probe_local
from raygnn.storage import remote
from raygnn.storage.remote import RemotePath, any_path, within
from tests.support.graphs import partitioned, typed_graph
from tests.support.parted import load_part, verify

SECRET = "s3://AKIDKEY:s3cr%2Fet@bucket/some%20where?region=eu&session_token=t0ken"
HIDDEN = ("AKIDKEY", "s3cr", "t0ken")
MODEL = {"kind": "sage", "hidden": 8}


@pytest.fixture
def meta(tmp_path: Path) -> PartitionMeta:
    return partitioned(typed_graph(40, 12), tmp_path, 2)


def uri(path: Path) -> str:
    return f"file://{path}"


@pytest.fixture
def bucket(meta: PartitionMeta, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory that stands for the root of the object store behind SECRET; counts openings."""
    root = meta.directory.parent / "store"
    shutil.copytree(meta.directory, root / "bucket" / "some where")
    inner = fs.SubTreeFileSystem(str(root), fs.LocalFileSystem())
    monkeypatch.setattr(remote, "_open", lambda *_: (inner, "bucket/some where"))
    return root / "bucket" / "some where"


def test_the_same_as_a_directory(meta: PartitionMeta, tmp_path: Path) -> None:
    for place in (meta.directory, meta.config_file):
        found = read_meta(uri(Path(str(place))))
        assert found.digest == meta.digest
        assert str(found.directory) == uri(Path(str(meta.directory)))
        assert stored_files(found).sizes == stored_files(meta).sizes
        assert table(found) == table(meta)
        verify(found)
        for part in range(2):
            ours, theirs = load_part(meta, part), load_part(found, part)
            for etype, csc in ours.csc.items():
                assert torch.equal(csc.src, theirs.csc[etype].src)
    found = read_meta(Uri(uri(Path(str(meta.directory)))))
    here, there = (
        load_shard(each, 1, 2, replicated=False, stage=Stage(tmp_path / str(number)))
        for number, each in enumerate((meta, found))
    )
    for etype, rows in here.topology.items():
        assert np.array_equal(rows.src, there.topology[etype].src)
        assert np.array_equal(rows.indptr, there.topology[etype].indptr)
    assert torch.equal(here.node_data["item"]["feat"], there.node_data["item"]["feat"])


def test_without_a_manifest(meta: PartitionMeta) -> None:
    (meta.directory / "raygnn.json").unlink()
    place = uri(Path(str(meta.directory)))
    before = read_meta(place).digest
    assert read_meta(place).digest == before
    file = Path(str(meta.files[0].graph))
    file.write_bytes(file.read_bytes() + b"x")
    assert read_meta(place).digest != before


def test_only_what_is_needed_is_read(
    meta: PartitionMeta, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    whole = remote._Raw.__init__

    def counting(self: Any, path: RemotePath, file: Any) -> None:
        opened.append(path.path.removeprefix("bucket/some where/"))
        whole(self, path, file)

    monkeypatch.setattr(remote._Raw, "__init__", counting)
    stage = Stage(tmp_path / "stage")
    found = read_meta(SECRET)
    assert all(name.endswith(".json") for name in opened)
    opened.clear()
    load_shard(found, 1, 2, replicated=False, stage=stage)
    files = ["graph.dgl", "node_feat.dgl", "orig_nids.dgl", "orig_nids.dgl"]
    assert sorted(opened) == [f"part1/{name}" for name in files]
    opened.clear()
    load_shard(found, 1, 2, replicated=False, stage=stage)
    assert not opened


def test_damage_is_found(meta: PartitionMeta, bucket: Path, tmp_path: Path) -> None:
    file = bucket / "part1" / "node_feat.dgl"
    good = file.read_bytes()
    found = read_meta(SECRET)
    file.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    with pytest.raises(DataError, match="has changed") as error:
        load_shard(found, 1, 2, replicated=True, stage=Stage(tmp_path / "stage"))
    assert error.value.where == "s3://***@bucket/some where/part1/node_feat.dgl"
    file.write_bytes(good[:-1])
    with pytest.raises(DataError, match="bytes, expected"):
        read_meta(SECRET)
    with pytest.raises(DataError, match=r"node_feat\.dgl"):
        load_shard(found, 1, 2, replicated=True, stage=Stage(tmp_path / "stage"))
    file.unlink()
    for look in (
        lambda: read_meta(SECRET),
        lambda: load_shard(found, 1, 2, replicated=True, stage=Stage(tmp_path / "stage")),
    ):
        with pytest.raises(DataError, match="part1/node_feat") as error:
            look()
        assert not any(secret in str(error.value) for secret in HIDDEN)


def test_a_job_finds_it(meta: PartitionMeta, bucket: Path, tmp_path: Path) -> None:
    config = load_config(
        {"name": "a", "storage": str(tmp_path), "partition": {"path": SECRET}, "model": MODEL}
    )
    found = find_partition(config, 2)
    assert isinstance(found, PartitionMeta)
    facts = partition_facts(config, found)
    (node,) = probe_local(config, found).nodes
    assert node.partition_files == facts.files
    assert node.partition_fingerprint == facts.fingerprint
    shown = repr((config, facts, found)) + str(config.to_dict()) + str(found.config_file)
    assert not any(secret in shown for secret in HIDDEN)
    assert pickle.loads(pickle.dumps(config)).partition.path.text == SECRET  # the ranks need it


def test_none_is_made_there(tmp_path: Path) -> None:
    place = uri(tmp_path / "none")
    graph = {"format": "planted", "nodes": 100}
    job = {"name": "a", "storage": str(tmp_path), "partition": {"path": place}, "model": MODEL}
    with pytest.raises(ConfigError, match="none can be built there") as error:
        find_partition(load_config({**job, "graph": graph}), 2)
    assert "copy" in str(error.value.remedy)
    assert "partition.path" in str(error.value.where)
    with pytest.raises(ConfigError, match="no partition at file://"):
        find_partition(load_config(job), 2)
    with pytest.raises(DataError, match="no partition here"):
        read_meta(place)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("bad", ["http://me:pass@host/x", "s3://", "ftp://a/b", "s3://me:pass@"])
def test_other_uris_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"name": "a", "partition": {"path": bad}, "model": MODEL})
    assert "partition.path" in str(error.value)
    assert "pass" not in str(error.value)


def test_errors_of_the_store_hide_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> Any:
        raise OSError(f"AWS Error for {text}: key AKIDKEY, secret s3cr/et, token t0ken, region eu")

    monkeypatch.setattr("pyarrow.fs.FileSystem", SimpleNamespace(from_uri=fail))
    with pytest.raises(DataError, match=r"AWS Error .* region eu") as error:
        read_meta(SECRET)
    assert not any(secret in str(error.value) for secret in HIDDEN)
    assert error.value.__cause__ is None
    assert error.value.where == "s3://***@bucket/some%20where"


def test_shown_without_credentials() -> None:
    for text, shown in (
        (SECRET, "s3://***@bucket/some%20where"),
        ("s3://bucket/a", "s3://bucket/a"),
        ("abfs://box@account.host/a?secret=1", "abfs://***@account.host/a"),
        ("file:///a/b", "file:///a/b"),
        ("hdfs://me@host:80/a", "hdfs://***@host:80/a"),
    ):
        assert str(Uri(text)) == shown
        assert repr(Uri(text)) == f"Uri({shown!r})"


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.json").write_text("{}")
    there = any_path(uri(tmp_path))
    assert isinstance(there, RemotePath)
    assert isinstance(any_path(tmp_path), Path)
    file = there / "a" / "x.json"
    assert (file.name, file.stem, file.parent) == ("x.json", "x", there / "a")
    assert file.with_name("y") == there / "a" / "y"
    assert [file.exists(), file.is_file(), file.is_dir(), file.parent.is_dir()] == [1, 1, 0, 1]
    assert not (there / "b").exists()
    assert file.stat().st_size == 2
    assert (there / "a").glob("*.json") == [file]
    assert (there / "a").glob("*.txt") == []
    assert file.read_text() == "{}"
    with pytest.raises(DataError, match="cannot be opened"):
        (there / "b").read_bytes()
    assert within(file, there) == "a/x.json"
    assert within(there / ".." / "c", there) is None
    assert within(there / "a" / "..", there) == "."
    again = pickle.loads(pickle.dumps(there.listed()))
    assert again == there
    assert again.seen is None
    assert (there.listed() / "a" / "x.json").stat() == file.stat()
