"""The cache of a node: made once, whole or not at all, shared, trimmed, mended."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from raygnn.config.execution import StagingConfig
from raygnn.config.load import load_config
from raygnn.errors import DataError
from raygnn.graph.partition.layout import read_meta
from raygnn.graph.sources import check_weights
from raygnn.graph.staging.node_cache import CacheEntry, Draft, Stage
from raygnn.graph.staging.parts import _write_table
from raygnn.graph.staging.shard import load_shard
from tests.support.graphs import partitioned, typed_graph

SPAN = (0, 2)


def numbers(draft: Draft) -> None:
    draft.append("x", np.arange(1000, dtype=np.int32))


def get(stage: Stage, number: int = 0, build: Callable[[Draft], None] = numbers) -> CacheEntry:
    return stage.entry("some", SPAN, {"number": number}, build)


def refuse(draft: Draft) -> None:
    raise AssertionError("it is there already")


def names(stage: Stage) -> list[str]:
    return sorted(path.name for path in stage.root.iterdir())


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "stage")


# --- entries -------------------------------------------------------------------------------------


def test_an_entry_is_built_once(stage: Stage) -> None:
    one = get(stage)
    again = get(stage, build=refuse)
    assert one.path == again.path
    assert len(names(stage)) == 1
    for entry in (one, again):
        assert entry.array("x").tolist() == list(range(1000))
    assert np.array_equal(np.fromfile(one.file("x"), np.int32), np.arange(1000))
    facts = json.loads((one.path / "stage.json").read_text())
    assert facts["made_from"]["number"] == 0
    assert facts["arrays"]["x"]["dtype"] == "int32"
    assert facts["arrays"]["x"]["shape"] == [1000]
    assert facts["arrays"]["x"]["bytes"] == one.file("x").stat().st_size
    assert get(stage, 1).path != one.path
    assert stage.entry("other", SPAN, {"number": 0}, numbers).path != one.path
    assert stage.entry("some", (0, 1), {"number": 0}, numbers).path != one.path


def test_arrays_of_every_kind(stage: Stage) -> None:
    arrays = {
        str(dtype).removeprefix("torch."): torch.arange(12).view(2, 2, 3).to(dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool)
    }
    arrays["none"] = torch.empty(0, 3)

    def build(draft: Draft) -> None:
        for name, values in arrays.items():
            draft.append(name, values[:0])
            for row in values:
                draft.append(name, row.unsqueeze(0))

    entry = get(stage, build=build)
    for name, values in arrays.items():
        found = entry.tensor(name)
        assert found.dtype == values.dtype
        assert torch.equal(found, values)
        before = entry.file(name).read_bytes()
        found.zero_()  # a copy of the page
        assert entry.file(name).read_bytes() == before
        assert torch.equal(entry.tensor(name), values)
        with pytest.raises(ValueError, match="read-only"):
            entry.array(name)[...] = 1


def test_only_for_this_user(stage: Stage, tmp_path: Path) -> None:
    get(stage)
    assert stage.root.stat().st_mode & 0o777 == 0o700
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    link = tmp_path / "link"
    link.symlink_to(theirs)
    if os.getuid() == 0:
        os.chown(theirs, 12345, 12345)
        for place in (theirs, link):
            with pytest.raises(DataError, match="another user") as error:
                get(Stage(place))
            assert error.value.where == str(place)
            assert "staging.path" in str(error.value)
        assert not list(theirs.iterdir())


def test_the_staging_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    default = Stage.from_config(StagingConfig())
    assert default.root == tmp_path / f"raygnn-{os.getuid()}"
    assert default.max_bytes is None
    job = {"name": "a", "graph": {"format": "planted", "nodes": 100}, "model": {"kind": "gcn"}}
    config = load_config({**job, "staging": {"path": str(tmp_path / "b"), "max_gb": 1.5}})
    chosen = Stage.from_config(config.staging)
    assert (chosen.root, chosen.max_bytes) == (tmp_path / "b", 1_500_000_000)


def test_a_build_that_fails(stage: Stage) -> None:
    def build(draft: Draft) -> None:
        numbers(draft)
        raise DataError("bad input")

    with pytest.raises(DataError, match="bad input"):
        get(stage, build=build)
    assert names(stage) == []
    get(stage)


def break_size(path: Path) -> None:
    os.truncate(path / "0.bin", 50)


def break_facts(path: Path) -> None:
    (path / "stage.json").write_text('{"version": 2, "arrays": {"x": 3}}')


def lead_out(path: Path) -> None:
    facts = json.loads((path / "stage.json").read_text())
    facts["arrays"]["x"]["file"] = "../../outside/0.bin"
    (path / "stage.json").write_text(json.dumps(facts))


def replace_by_link(path: Path) -> None:
    """Move an entry out of the cache, and leave a link."""
    outside = path.parent.parent / "outside" if path.is_dir() else path.parents[2] / "outside"
    outside.mkdir()
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (break_size, "0.bin has 50 bytes, expected"),
    "a file missing": (lambda path: (path / "0.bin").unlink(), "0.bin"),
    "facts missing": (lambda path: (path / "stage.json").unlink(), "stage.json"),
    "facts empty": (lambda path: (path / "stage.json").write_bytes(b""), "stage.json is damaged"),
    "facts no text": (
        lambda path: (path / "stage.json").write_bytes(b"\xff\xfe"),
        "stage.json is damaged",
    ),
    "facts that are others": (break_facts, ""),
    "another version": (
        lambda path: (path / "stage.json").write_text('{"version": 99}'),
        "stage.json is damaged",
    ),
    "a link in its place": (replace_by_link, "symbolic link"),
    "facts that are a link": (lambda path: replace_by_link(path / "stage.json"), "symbolic link"),
    "a file that is a link": (lambda path: replace_by_link(path / "0.bin"), "expected"),
    "a file elsewhere": (lead_out, "stage.json is damaged"),
    "facts that never end": (lambda path: replace_by_pipe(path / "stage.json"), "is damaged"),
    "a file that never ends": (lambda path: replace_by_pipe(path / "0.bin"), "has 0 bytes"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_entry_is_made_again(
    case: str, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    change, said = DAMAGE[case]
    path = get(stage).path
    change(path)
    with caplog.at_level(logging.WARNING, "raygnn"):
        entry = get(stage)
    assert entry.array("x").tolist() == list(range(1000))
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert said in record.getMessage()
    get(stage, build=refuse)
    assert names(stage) == [path.name]


def test_targets_of_links_stay(stage: Stage, tmp_path: Path) -> None:
    """Targets of links are neither removed to free space nor written to."""
    stage.max_bytes = 1
    path, outside = get(stage).path, tmp_path / "outside"
    replace_by_link(path)
    (outside / "thesis.txt").write_text("x" * 10_000)
    (stage.root / f".{path.name}.tmp-0").symlink_to(outside)
    before = {file: file.read_bytes() for file in outside.rglob("*") if file.is_file()}
    entry = get(stage)
    other = get(stage, 1)
    assert entry.path.is_dir()
    assert not entry.path.is_symlink()
    assert {file: file.read_bytes() for file in outside.rglob("*") if file.is_file()} == before
    assert set(names(stage)) == {entry.path.name, other.path.name}


def test_a_lock_that_is_a_link_is_refused(stage: Stage, tmp_path: Path) -> None:
    path = get(stage).path
    shutil.rmtree(path)
    (tmp_path / "thesis.txt").write_text("x")
    (stage.root / f".{path.name}.lock").symlink_to(tmp_path / "thesis.txt")
    with pytest.raises(DataError, match=r"(?s)cannot be written: .*staging\.path"):
        get(stage)
    assert (tmp_path / "thesis.txt").read_text() == "x"


# --- several workers -----------------------------------------------------------------------------

WORKER = """
import os, sys, time
from pathlib import Path
import numpy as np
from raygnn.graph.staging.node_cache import Stage
root, work, wait = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])

def build(draft):
    with open(root.parent / "builds", "a") as file:
        file.write("x")
    draft.append("y", np.zeros(1))
    print("building", flush=True)
    exec(work)
    draft.append("x", np.arange(1000, dtype=np.int32))

entry = Stage(root, wait=wait).entry("some", (0, 2), {"number": 0}, build)
assert entry.array("x").sum() == 499500
print("done", flush=True)
"""


def worker(stage: Stage, work: str = "time.sleep(0.5)", wait: float = 60) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, str(stage.root), work, str(wait)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def builds(stage: Stage) -> int:
    return len((stage.root.parent / "builds").read_text())


def test_processes_wait_for_one(stage: Stage) -> None:
    workers = [worker(stage) for _ in range(4)]
    for each in workers:
        out, err = each.communicate(timeout=60)
        assert out.endswith("done\n"), err
    assert builds(stage) == 1
    assert len(names(stage)) == 1


def test_threads_wait_for_one(stage: Stage) -> None:
    built, found = [], []

    def build(draft: Draft) -> None:
        built.append(1)
        time.sleep(0.2)
        numbers(draft)

    threads = [
        threading.Thread(target=lambda: found.append(get(stage, build=build))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(built) == 1
    assert [entry.array("x")[-1] for entry in found] == [999] * 6


def test_a_waiting_process_replaces_a_dead_builder(stage: Stage) -> None:
    first = worker(stage, "time.sleep(600)")
    assert first.stdout
    assert first.stdout.readline() == "building\n"
    second = worker(stage, "pass")
    time.sleep(0.5)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    out, err = second.communicate(timeout=60)
    assert out.endswith("done\n"), err
    assert builds(stage) == 2
    assert len(names(stage)) == 1  # nothing of the first


def test_waiting_ends(stage: Stage) -> None:
    first = worker(stage, "time.sleep(600)")
    try:
        assert first.stdout
        assert first.stdout.readline() == "building\n"
        hasty = Stage(stage.root, wait=0.2)
        with pytest.raises(DataError, match=f"process {first.pid} has been") as error:
            get(hasty, build=refuse)
        assert error.value.remedy
        assert str(stage.root) in str(error.value.where)
    finally:
        first.kill()
        first.communicate(timeout=60)


def test_files_of_dead_builders_are_removed(stage: Stage) -> None:
    dead = worker(stage, "os._exit(1)")
    dead.communicate(timeout=60)
    assert any(".tmp-" in name for name in names(stage))
    busy = worker(Stage(stage.root), "time.sleep(600)")
    try:
        assert busy.stdout
        assert busy.stdout.readline() == "building\n"
        entry = get(stage, 1)  # another entry; the busy one's files stay
        left = [name for name in names(stage) if ".tmp-" in name]
        assert len(left) == 1
        assert (stage.root / left[0] / "0.bin").exists()
    finally:
        busy.kill()
        busy.communicate(timeout=60)
    get(stage, 2)
    assert len(names(stage)) == 2
    assert all(not name.startswith(".") for name in names(stage))
    assert entry.array("x")[3] == 3


# --- room ----------------------------------------------------------------------------------------


def used(path: Path, seconds_ago: float) -> None:
    then = time.time() - seconds_ago
    os.utime(path / "stage.json", (then, then))


def test_the_least_recently_used_entry_is_removed(stage: Stage) -> None:
    stage.max_bytes = 3 * 4600  # three entries
    paths = [get(stage, n).path for n in range(3)]
    for path, ago in zip(paths, (100, 300, 200)):
        used(path, ago)
    paths.append(get(stage, 3).path)
    assert set(names(stage)) == {paths[n].name for n in (0, 2, 3)}
    get(stage, 0)  # a use
    used(paths[3], 50)
    get(stage, 4)
    assert paths[0].exists()
    assert not paths[2].exists()


def test_entries_in_use_are_kept(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.max_bytes = 1
    entry = get(stage, 0)
    array = entry.array("x")[5:]
    path = entry.path
    del entry  # the array keeps it
    used(path, 1000)
    with caplog.at_level(logging.WARNING, "raygnn"):
        other = get(stage, 1)
    assert path.exists()
    assert "are in use" in caplog.text
    del array
    get(stage, 2)
    assert not path.exists()
    assert other.path.exists()


def test_only_entries_are_removed(stage: Stage) -> None:
    stage.root.mkdir()
    (stage.root / "mine").mkdir()
    (stage.root / "mine" / "thesis.txt").write_text("x" * 10_000)
    (stage.root / ".some.tmp-1").write_text("")
    stage.max_bytes = 1
    get(stage, 0)
    get(stage, 1)
    assert {"mine", ".some.tmp-1"} < set(names(stage))
    assert len(names(stage)) == 3


# --- disks ---------------------------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    place = tmp_path / "mounted"
    place.mkdir()

    def run(*options: str) -> Path:
        if os.getuid() or not shutil.which("mount"):
            pytest.skip("only root may mount")
        done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no mounts here: {done.stderr}")
        return place

    yield run
    subprocess.run(["umount", "-l", str(place)], capture_output=True)


def test_a_full_disk(mount: Callable[..., Path]) -> None:
    place = mount("-t", "tmpfs", "-o", "size=64k", "tmpfs")
    stage = Stage(place / "stage")

    def build(draft: Draft) -> None:
        draft.append("x", np.arange(10**6))

    with pytest.raises(DataError, match="No space left on device") as error:
        get(stage, build=build)
    assert "staging.path" in str(error.value)
    assert error.value.remedy
    assert "larger disk" in error.value.remedy
    assert names(stage) == []
    get(stage)  # a small one fits


def test_a_quota(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(handle: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fsync)
        with pytest.raises(DataError, match="quota") as error:
            get(stage)
    assert "larger disk" in str(error.value)
    assert names(stage) == []


def test_a_disk_that_is_read_only(mount: Callable[..., Path], tmp_path: Path) -> None:
    stage = Stage(tmp_path / "stage")
    get(stage)
    place = mount("--bind", str(tmp_path / "stage"))
    subprocess.run(["mount", "-o", "remount,ro,bind", str(place)], check=True)
    bound = Stage(place)
    assert get(bound, build=refuse).array("x")[7] == 7  # existing entries can be used
    with pytest.raises(DataError, match="Read-only file system") as error:
        get(bound, 1)
    assert error.value.where == str(place)
    assert "staging.path" in str(error.value)


def test_a_place_that_can_not_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for place in (file, file / "below"):
        with pytest.raises(DataError, match=r"(?s)cannot be written: .*staging\.path"):
            get(Stage(place))


# --- partitions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["graph.dgl", "node_feat.dgl", "edge_feat.dgl", "orig_nids.dgl"])
def test_a_file_that_has_changed_is_not_staged(name: str, tmp_path: Path) -> None:
    data = typed_graph(40, 12)
    for frame in data.edges.values():
        frame.data["w"] = np.ones(frame.num)
    meta = partitioned(data, tmp_path, 2)
    file = meta.directory / "part1" / name
    good = file.read_bytes()
    stage = Stage(tmp_path / "stage")
    for place in (len(good) - 40, len(good) // 2):
        bad = bytearray(good)
        bad[place] ^= 1
        file.write_bytes(bad)
        with pytest.raises(DataError) as error:
            load_shard(
                read_meta(meta.directory), 0, 1, replicated=True, stage=stage, edge_arrays=["w"]
            )
        assert error.value.where == str(file)
        left = {entry.split("-")[0] for entry in names(stage)}
        assert left == ({"topology"} if name == "node_feat.dgl" else set())
    file.write_bytes(good)
    load_shard(meta, 0, 1, replicated=True, stage=stage, edge_arrays=["w"])


def test_a_disk_that_cannot_be_read_is_not_blamed_on_the_cache(tmp_path: Path) -> None:
    meta = partitioned(typed_graph(40, 12), tmp_path, 2)
    file = meta.directory / "part1" / "graph.dgl"
    file.unlink()
    with pytest.raises(DataError, match="No such file") as error:
        load_shard(meta, 0, 1, replicated=True, stage=Stage(tmp_path / "stage"))
    assert error.value.where == str(file)


def test_features_that_the_dtype_can_not_hold_are_refused(tmp_path: Path) -> None:
    class Sink:
        def append(self, *_: object) -> None:
            pass

    for large, name in ((1e300, "float32"), (1e10, "float16")):
        rows = torch.full((4, 2), 1.0, dtype=torch.float64)
        arrays = {"edge/a:b:c/amount": rows}
        _write_table(Sink(), arrays, getattr(torch, name))  # type: ignore[arg-type]
        for bad, message in ((large, f"{large:g} do not fit {name}"), (math.nan, "one is nan")):
            rows[2, 1] = bad
            with pytest.raises(DataError, match=re.escape(message)) as error:
                _write_table(Sink(), arrays, getattr(torch, name))  # type: ignore[arg-type]
            assert error.value.where == "array 'amount' of a:b:c"


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_no_probabilities_are_refused(bad: float) -> None:
    weights = torch.tensor([0.0, 1.0, 3.0])
    check_weights("w", ("_N", "_E", "_N"), weights)
    check_weights("w", ("_N", "_E", "_N"), weights[:0])
    weights[1] = bad
    with pytest.raises(DataError, match="negative or not finite"):
        check_weights("w", ("_N", "_E", "_N"), weights)
    with pytest.raises(DataError, match="one weight for each edge"):
        check_weights("w", ("_N", "_E", "_N"), weights.unsqueeze(1).expand(3, 2))
