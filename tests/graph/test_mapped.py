"""Tensors that begin in a file and end in memory."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import weakref
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raygnn.errors import DataError, TrainingError
from raygnn.graph.arrays import dtype_name
from raygnn.graph.staging.mapped import map_rows
from raygnn.graph.staging.node_cache import Draft, StoredArray

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


def save(file: Path, table: torch.Tensor) -> StoredArray:
    with closing(Draft(file.parent)) as draft:
        draft.array("x", dtype_name(table), tuple(table.shape)).append(table)
        draft.finish({})
    (file.parent / "0.npy").rename(file)
    facts = json.loads((file.parent / "stage.json").read_text())
    return StoredArray.model_validate(facts["arrays"]["x"])


def mappings(file: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]


@st.composite
def windows(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, int]:
    """A table, a window of its rows, and how many are to be appended."""
    tail = draw(st.sampled_from([(), (1,), (3,), (100,), (5, 7), (0,), (1024,)]))
    num = draw(st.one_of(st.integers(0, 5), st.integers(0, 3000)))
    first = draw(st.integers(0, num))
    rows = draw(st.one_of(st.just(num - first), st.integers(0, num - first)))
    spare = draw(st.one_of(st.integers(0, 3), st.integers(0, 3000)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randint(0, 100, (num, *tail), generator=generator)
    return values.to(draw(st.sampled_from(DTYPES))), first, rows, spare


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(window=windows())
def test_any_window(window: tuple[torch.Tensor, int, int, int], tmp_path: Path) -> None:
    table, first, rows, spare = window
    file = tmp_path / "t.npy"
    array = save(file, table)
    before = file.read_bytes()
    found = map_rows(file, array, first, rows, spare)
    assert found.dtype == table.dtype
    assert found.shape == (rows + spare, *table.shape[1:])
    assert found.is_contiguous()
    assert not found.numel() or found.data_ptr() % found.element_size() == 0
    assert torch.equal(found[:rows], table[first : first + rows])
    if found.numel():
        assert not found[rows:].any()
    found.fill_(1)
    assert found.bool().all()
    assert file.read_bytes() == before
    again = map_rows(file, array, first, rows, spare)
    assert torch.equal(again[:rows], table[first : first + rows])
    assert len(mappings(file)) == bool(found.numel() and rows) + bool(again.numel() and rows)
    del found, again
    assert not mappings(file)


def test_one_index_reaches_both(tmp_path: Path) -> None:
    table = torch.randn(1000, 33)
    file = tmp_path / "t.npy"
    found = map_rows(file, save(file, table), 100, 500, 50)
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
    file = tmp_path / "t.npy"
    array = save(file, torch.randn(100, 8))
    lines = len(Path("/proc/self/maps").read_text().splitlines())

    class Kept:
        pass

    kept = Kept()
    alive = weakref.ref(kept)
    found = map_rows(file, array, 0, 100, 10, keep=kept)
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


def test_spare_rows_cost_nothing_until_they_are_used(tmp_path: Path) -> None:
    file = tmp_path / "t.npy"
    array = save(file, torch.randn(10, 256))
    found = map_rows(file, array, 0, 10, 1 << 30)  # a tebibyte
    found[-1] = 7
    found[1 << 29] = 8
    assert found[-1, 0] == 7
    assert not found[-2].any()


SHARE = """
import sys, re, torch
from pathlib import Path
from raygnn.graph.staging.mapped import map_rows
from raygnn.graph.staging.node_cache import StoredArray
file = Path(sys.argv[1])
array = StoredArray.model_validate_json(sys.argv[2])
found = map_rows(file, array, 3, 200_000, 1000)
found[:200_000].sum()
found[200_000:] = 1
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
    file = tmp_path / "t.npy"
    array = save(file, torch.randn(200_010, 32))  # 25 MB
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SHARE, str(file), array.model_dump_json()]
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


@pytest.mark.parametrize("resident", [False, True])
def test_rows_that_are_not_there(resident: bool, tmp_path: Path) -> None:
    file = tmp_path / "t.npy"
    array = save(file, torch.randn(100, 4))
    for first, rows, spare in ((0, 101, 0), (100, 1, 0), (-1, 1, 0), (0, -1, 0), (0, 0, -1)):
        with pytest.raises(ValueError, match="rows"):
            map_rows(file, array, first, rows, spare, resident=resident)
    for damage, message in ((_cut, "cut short"), (Path.unlink, "cannot be read: No such file")):
        damage(file)
        with pytest.raises(DataError, match=message) as error:
            map_rows(file, array, 0, 100, 1, resident=resident)
        assert error.value.where == str(file)


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def test_no_address_space(tmp_path: Path) -> None:
    file = tmp_path / "t.npy"
    array = save(file, torch.randn(100, 4))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TrainingError, match=re.escape("Cannot allocate memory")) as error:
        map_rows(file, array, 0, 100, 1 << 50)
    assert error.value.remedy
    assert len(os.listdir("/proc/self/fd")) == before
    assert not mappings(file)
