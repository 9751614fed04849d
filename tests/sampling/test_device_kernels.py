"""The kernels of a GPU against the CPU's: on the CPU by Triton's interpreter, and compiled for a
GPU, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raygnn.sampling import drawing, kernels
from raygnn.sampling.device import device_kernels
from tests.support.builders import stored

KEYS = st.integers(0, 2**64 - 1)


def graph(
    seed: int, narrow: bool, isolated: float = 0.2
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return lists, keys of their rows, and rows to sample, some of them without edges."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 120))
    degree = rng.integers(0, 40, count) * (rng.random(count) >= isolated)
    indptr = np.concatenate([[0], np.cumsum(degree)]).astype(np.int64)
    kind = np.int32 if narrow else np.int64
    src = rng.integers(0, 10_000, indptr[-1]).astype(kind)
    rows = rng.integers(-1, count, int(rng.integers(0, 200)))
    return indptr, src, rng.permutation(count).astype(kind), rows


def lists_of(indptr: Any, src: Any, keys: Any, rows: Any) -> drawing.RowLists:
    span = drawing.spans(stored(indptr, np.int64), rows)
    return drawing.RowLists(*span, stored(src, np.int32), keys[rows].astype(np.int32))


@settings(max_examples=15)
@given(st.integers(0, 999), st.booleans(), st.integers(0, 40), st.booleans(), KEYS)
def test_rows_draw_what_they_draw_on_the_cpu(
    seed: int, narrow: bool, fanout: int, replace: bool, key: int
) -> None:
    indptr, src, keys, rows = graph(seed, narrow)
    cut = lists_of(indptr, src, keys, rows)
    ends, expected, _ = drawing.sample_rows(cut, fanout, replace, np.uint64(key), False)
    lists = [torch.from_numpy(array) for array in (indptr, src, keys, rows)]
    _, out_indptr = device_kernels.spans(lists[0], lists[3], fanout, replace)
    drawn = device_kernels.draw_rows(*lists, out_indptr, fanout, replace, key)
    assert out_indptr.tolist() == ends.tolist()
    assert drawn[: ends[-1]].tolist() == expected.tolist()
    assert (drawn[ends[-1] :] == -1).all()


@pytest.mark.parametrize("fanout", [1, 2, 64, 200])
def test_lists_longer_than_a_fanout(fanout: int) -> None:
    """Floyd's method is exact for lists just longer than a fanout, and for far longer ones."""
    degree = np.array([fanout + 1, fanout, 3 * fanout, max(0, fanout - 1), 100_000])
    indptr = np.concatenate([[0], np.cumsum(degree)])
    src, rows = np.arange(indptr[-1], dtype=np.int32), np.array([4, 0, 1, 2, 3, 4])
    keys = np.arange(5)
    cut = lists_of(indptr, src, keys, rows)
    key = 2**63 + 5
    expected = drawing.sample_rows(cut, fanout, False, np.uint64(key), False)
    lists = [torch.from_numpy(array) for array in (indptr, src, keys, rows)]
    _, out_indptr = device_kernels.spans(lists[0], lists[3], fanout, False)
    drawn = device_kernels.draw_rows(*lists, out_indptr, fanout, False, key)
    assert drawn[: len(expected[1])].tolist() == expected[1].tolist()


@settings(max_examples=15)
@given(st.integers(0, 999), st.booleans())
def test_all_of_a_list(seed: int, narrow: bool) -> None:
    indptr, src, keys, rows = graph(seed, narrow)
    cut = lists_of(indptr, src, keys, rows)
    ends, expected, _ = drawing.sample_rows(cut, drawing.ALL, False, np.uint64(7), False)
    places = torch.from_numpy(indptr), torch.from_numpy(rows)
    start, out_indptr = device_kernels.spans(*places, drawing.ALL, False)
    assert out_indptr.tolist() == ends.tolist()
    whole = device_kernels.all_of(torch.from_numpy(src), start, out_indptr, int(ends[-1]))
    assert whole.tolist() == expected.tolist()


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 60), unique=True, max_size=40),
    st.lists(st.integers(0, 60), max_size=80),
    st.lists(st.integers(0, 80), max_size=5),
)
def test_numbers_are_those_of_the_cpu(known: list[int], ids: list[int], holes: list[int]) -> None:
    """Numbers follow the first appearance after the known ids; -1 is no id anywhere."""
    nodes, local = kernels.relabel(np.array(known, np.int64), np.array(ids, np.int64))
    padded = list(ids)
    for hole in holes:
        padded.insert(hole, -1)
    some, numbers, count = device_kernels.relabel(
        torch.tensor(known, dtype=torch.int64), torch.tensor(padded, dtype=torch.int64)
    )
    assert int(count) == len(nodes)
    assert some[: len(nodes)].tolist() == nodes.tolist()
    kept = torch.tensor(padded, dtype=torch.int64) >= 0
    assert numbers[kept].tolist() == local.tolist()


@pytest.mark.parametrize("shape", [(), (1,), (3,), (100,), (300,), (2, 5)])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.int8, torch.int8)])
@pytest.mark.parametrize("cached", [False, True])
def test_rows_are_read_where_they_lie(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype], cached: bool
) -> None:
    rng = torch.Generator().manual_seed(3)
    table = torch.randint(-99, 99, (50, *shape), generator=rng).to(dtypes[0])
    index = torch.randint(0, 50, (37,), generator=rng)
    near = slots = None
    if cached:  # rows unlike the table's show which one was read
        chosen = torch.arange(0, 50, 3)
        slots = torch.full((50,), -1, dtype=torch.int32)
        slots[chosen] = torch.arange(len(chosen), dtype=torch.int32).flip(0)
        near = table[chosen.flip(0)] + 1
        table_of = table.clone()
        table_of[chosen] += 1
    else:
        table_of = table
    out = device_kernels.gather(table, index, dtypes[1], near, slots)
    assert out.dtype == dtypes[1]
    assert torch.equal(out, table_of[index].to(dtypes[1]))
    assert not len(device_kernels.gather(table, index[:0], dtypes[1], near, slots))


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from raygnn.sampling.device import device_kernels as k

def ptx(kernel, types, **constants):
    types |= dict.fromkeys(constants, "constexpr")
    target = GPUTarget("cuda", 90, 32)
    made = triton.compile(ASTSource(kernel, types, constants), target=target)
    assert made.asm["cubin"]
    return made.asm["ptx"]

draw = {"indptr": "*i64", "src": "*i32", "keys": "*i32", "rows": "*i64", "out_indptr": "*i64",
        "out": "*i64", "count": "i32", "key": "i64"}
for fanout, rows, lanes in ((1, 1024, 1), (15, 64, 16), (1024, 1, 1024)):
    for replace in (False, True):
        sizes = dict(FANOUT=fanout, ROWS=rows, LANES=lanes)
        text = ptx(k._draw, dict(draw), REPLACE=replace, **sizes)
        assert "shr.s64" not in text and "shr.u64" in text  # random numbers have no sign
        assert "st.global" in text
spans = {"indptr": "*i64", "rows": "*i64", "start": "*i64", "take": "*i64", "count": "i32"}
for fanout in (-1, 10):
    ptx(k._spans, dict(spans), FANOUT=fanout, REPLACE=fanout > 0, TILE=1024)
for table, out in (("*fp32", "*bf16"), ("*i8", "*i8"), ("*bf16", "*bf16"), ("*i32", "*i64")):
    types = {"table": table, "near": table, "out": out}
    types |= {"slots": "*i32", "index": "*i64", "count": "i32"}
    for near in (False, True):
        ptx(k._gather, dict(types), WIDTH=100, SOME_NEAR=near, ROWS=8, LANES=128)
print("compiled")
"""


def test_the_kernels_compile_for_a_gpu() -> None:
    """Triton's own compiler produces machine code for an H100."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip().endswith("compiled"), done.stderr
