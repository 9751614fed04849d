"""Tensors of files' rows, of memory that processes share, and of memory of one."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raygnn.errors import DataError, TrainingError
from raygnn.graph import available_memory
from raygnn.graph.outofcore.disk_graph import store
from raygnn.graph.staging.mapped import PAGE, FileRows, large_pages, map_table, use_large_pages
from raygnn.graph.staging.node_cache import Stage
from raygnn.graph.staging.shard import load_shard
from tests.support.graphs import partitioned, random_graph

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def save(file: Path, table: torch.Tensor) -> torch.Tensor:
    store(file, table)
    return table


def mappings(file: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]


def mapped(file: Path, table: torch.Tensor, first: int, rows: int, spare: int) -> torch.Tensor:
    """Map some rows of a file with ``table``, with memory right behind them."""
    pieces = [FileRows(first, file, first, rows)]
    return map_table(table.dtype, table.shape[1:], first + rows + spare, pieces)[first:]


@pytest.mark.parametrize("first", [1, 100, 5000])
def test_rows_within_a_page(first: int, tmp_path: Path) -> None:
    """A rank with a fraction of a part maps its rows to the beginning of its table."""
    store(tmp_path / "t", table := torch.arange(60_000.0).view(-1, 6))
    found = map_table(table.dtype, (6,), 4000, [FileRows(0, tmp_path / "t", first, 4000)])
    assert torch.equal(found, table[first : first + 4000])


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[tuple[int, int]], int, int]:
    """Return equal tables with a window of rows of each, cached rows, and spare ones."""
    tail = draw(st.sampled_from([(), (1,), (3,), (100,), (5, 7), (0,), (1024,)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(DTYPES))
    tables, chosen = [], []
    for _ in range(draw(st.integers(1, 3))):
        num = draw(st.one_of(st.integers(0, 5), st.integers(0, 9000)))
        first = draw(st.integers(0, num))
        tables.append(torch.randint(0, 100, (num, *tail), generator=generator).to(dtype))
        chosen.append((first, draw(st.one_of(st.just(num - first), st.integers(0, num - first)))))
    sizes = st.one_of(st.integers(0, 3), st.integers(0, 3000))
    return tables, chosen, draw(sizes), draw(sizes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(window=windows(), several=st.booleans())
def test_any_windows(
    window: tuple[list[torch.Tensor], list[tuple[int, int]], int, int],
    several: bool,
    tmp_path: Path,
) -> None:
    tables, chosen, cached, spare = window
    pieces, end = [], 0
    for number, (table, (first, rows)) in enumerate(zip(tables, chosen)):
        store(file := tmp_path / f"t{number}", table)
        at = (end // PAGE + 2) * PAGE * (number > 0) + first % PAGE
        pieces.append(FileRows(at, file, first, rows))
        end = at + rows
    cache = (end // PAGE + 2) * PAGE
    room = ((cache + cached) // PAGE + 2) * PAGE
    before = [piece.file.read_bytes() for piece in pieces]
    dtype, tail = tables[0].dtype, tables[0].shape[1:]
    handle = os.memfd_create("table") if several else None
    if handle is not None:
        os.truncate(handle, room * dtype.itemsize * tail.numel())
    place = dtype, tail, room + spare, pieces
    found, again = (map_table(*place, shared=room, handle=handle) for _ in range(2))
    assert found.dtype == dtype
    assert found.shape == (room + spare, *tail)
    assert found.is_contiguous()
    assert not found.numel() or found.data_ptr() % found.element_size() == 0

    def shows_files(table: torch.Tensor) -> bool:
        return all(
            torch.equal(table[p.at : p.at + p.rows], rows[p.first : p.first + p.rows])
            for p, rows in zip(pieces, tables)
        )

    assert shows_files(found)
    for part in (slice(cache, cache + cached), slice(room, None)):
        assert not found[part].any()
        found[part] = 1
    assert shows_files(found)
    assert (again[cache : cache + cached] == several).all()  # all processes see a write
    assert not again[room:].any()  # but not here
    for piece in pieces:
        found[piece.at : piece.at + piece.rows] = 1
    assert shows_files(again)
    assert [piece.file.read_bytes() for piece in pieces] == before
    del found, again
    assert not mappings(tmp_path)
    if handle is not None:
        os.close(handle)


def test_memory_that_is_shared_gets_large_pages() -> None:
    if not large_pages(True):
        pytest.skip("this system has none")
    handle, size = os.memfd_create("large"), 8 << 20
    os.truncate(handle, size)
    table = map_table(torch.uint8, (1024,), size // 1024, shared=size // 1024, handle=handle)
    table.random_()
    before = table.clone()
    assert use_large_pages(table)
    assert torch.equal(table, before)
    os.close(handle)
    smaps = Path("/proc/self/smaps").read_text()
    assert re.search(r"memfd:large.*?ShmemPmdMapped: +8192 kB", smaps, re.S)


def test_one_index_reaches_both(tmp_path: Path) -> None:
    table = torch.randn(1000, 33)
    file = tmp_path / "t"
    found = mapped(file, save(file, table), 100, 500, 50)
    found[500:] = torch.randn(50, 33)
    joined = torch.cat([table[100:600], found[500:].clone()])
    index = torch.randint(0, 550, (4000,))
    assert torch.equal(found.index_select(0, index), joined[index])
    offsets = torch.arange(0, 4000, 10)
    bag, wanted = (
        torch.nn.functional.embedding_bag(index, weight, offsets, mode="mean")
        for weight in (found, joined)
    )
    assert torch.equal(bag, wanted)


def test_freed_with_the_last_view(tmp_path: Path) -> None:
    file = tmp_path / "t"
    store(file, torch.randn(100, 8))
    lines = len(Path("/proc/self/maps").read_text().splitlines())

    class Kept:
        pass

    kept = Kept()
    alive = weakref.ref(kept)
    piece = FileRows(0, file, 0, 100, keep=kept)
    found = map_table(torch.float32, (8,), 110, [piece])
    del piece
    del kept
    view = found[5:7].view(-1)
    del found
    gc.collect()
    assert mappings(file)
    assert alive() is not None
    del view
    gc.collect()
    assert not mappings(file)
    assert alive() is None
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= lines + 1


@pytest.mark.parametrize("scarce", [False, True])
def test_nothing_is_read_ahead_where_memory_is_scarce(
    scarce: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feature rows above 0.6 of the memory, and a rank's edges above 0.15, are not read ahead."""
    meta = partitioned(random_graph(600, features=64), tmp_path, 2)
    shard = load_shard(meta, 0, 1, replicated=False, stage=Stage(tmp_path / "stage"))
    (rows,), layout = shard.topology.values(), shard.layout("_N", [0])
    just = (int(600 * 64 * 4 / 0.6), "table"), (int(rows.src.nbytes / 0.15), "src")
    for size, kind in just:
        available = size // 2 if scarce else 2 * size
        monkeypatch.setattr(available_memory, "memory", lambda size=available: (size, size))
        if kind == "table":
            table = shard.table("_N", ["feat"], torch.float32, layout)
            address = table.data_ptr()
        else:
            again = load_shard(meta, 0, 1, replicated=False, stage=Stage(tmp_path / "stage"))
            (rows,) = again.topology.values()
            address = rows.src.ctypes.data
        assert ("rr" in flags(address)) == scarce, kind


def flags(address: int) -> list[str]:
    """Return the kernel's flags of the mapping that contains an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no such mapping")


def test_spare_rows_cost_nothing_until_they_are_used(tmp_path: Path) -> None:
    file = tmp_path / "t"
    array = save(file, torch.randn(10, 256))
    found = mapped(file, array, 0, 10, 1 << 30)  # a tebibyte
    found[-1] = 7
    found[1 << 29] = 8
    assert found[-1, 0] == 7
    assert not found[-2].any()


SHARE = """
import sys, re, torch
from pathlib import Path
from raygnn.graph.staging.mapped import FileRows, map_table
file = Path(sys.argv[1])
found = map_table(torch.float32, (32,), 201_000, [FileRows(3, file, 3, 200_000)])
found[3:200_003].sum()
found[200_003:] = 1
print("ready", flush=True)
sys.stdin.readline()
seen = {}
inside = False
for line in Path("/proc/self/smaps").read_text().splitlines():
    if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
        inside = str(file) in line
    elif inside:
        name, value = line.split(":")[0], line.split()[1]
        seen[name] = seen.get(name, 0) + int(value) if value.isdigit() else 0
print(*(seen[n] for n in ("Rss", "Pss", "Private_Dirty", "Private_Clean")))
"""


def test_processes_share_the_pages(tmp_path: Path) -> None:
    file = tmp_path / "t"
    store(file, torch.randn(200_010, 32))  # 25 MB
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SHARE, str(file)]
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
        one = processes[0]
        assert one.stdin
        assert one.stdout
        one.stdin.write("\n")
        one.stdin.flush()
        rss, pss, dirty, clean = (int(text) for text in one.stdout.readline().split())
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=30)
    assert rss > 24_000
    assert pss < 0.6 * rss
    assert dirty <= 8  # the page that both kinds of rows share
    assert clean < 1000


def test_rows_that_are_not_there(tmp_path: Path) -> None:
    file = tmp_path / "t"
    array = save(file, torch.randn(100, 4))
    for damage, message in ((_cut, "cut short"), (Path.unlink, "cannot be read: No such file")):
        damage(file)
        with pytest.raises(DataError, match=message) as error:
            mapped(file, array, 0, 100, 1)
        assert error.value.where == str(file)


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def test_no_address_space(tmp_path: Path) -> None:
    file = tmp_path / "t"
    array = save(file, torch.randn(100, 4))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TrainingError, match=re.escape("Cannot allocate memory")) as error:
        mapped(file, array, 0, 100, 1 << 50)
    assert error.value.remedy
    assert len(os.listdir("/proc/self/fd")) == before
    assert not mappings(file)
