"""Files of torch.save that are not what OGB wrote: refused, nothing run, little memory taken."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from raygnn.errors import DataError
from raygnn.graph.sources.pickles import SavedArrays
from tests.hostile import Runs, bombs


def array_pickle(shape: bytes) -> bytes:
    """A protocol-2 pickle of {"edge": a float32 array of the shape (opcodes), without data}."""
    start = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02f4K\x00K\x01\x87R"
    state = b"(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return b"\x80\x02}U\x04edge" + start + b"(K\x01" + shape + dtype + state + b"\x89U\x00tbs."


HUGE = b"\x8a\x06\x00\x00\x00\x00\x00\x10"  # LONG1: 2^44
CASES: dict[str, tuple[bytes | Runs, str]] = {
    "runs a command": (Runs(os.system, "touch owned"), "refused.*system"),
    "evaluates": (Runs(eval, "open('owned', 'w')"), "refused.*eval"),
    "runs a command by INST": (b"(S'true'\nios\nsystem\n.", "refused.*os.system"),
    "changes a name": (b"\x80\x02cnumpy\nndarray\n}U\x01aK\x01sb.", "not a whole pickle"),
    "a deep key": (b"\x80\x02})" + b"\x85" * 150_000 + b"K\x00s.", "more than 1000 tuples"),
    "deep lists": (b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", "a dict of arrays"),
    "a huge memo": (b"\x80\x02]r\xfe\xff\xff\x7f.", "the memo index 2147483646"),
    "a huge array": (array_pickle(HUGE + b"K\x02\x86"), "17592186044416"),
    "an array of objects": (
        pickle.dumps({"edge": np.array([Runs(os.system, "touch owned")])}),
        "refused.*system",
    ),
    "truncated": (pickle.dumps({"edge": np.arange(9)})[:-9], "not a whole pickle"),
}


def write(file: Path, content: bytes | Runs) -> Path:
    data = content if isinstance(content, bytes) else pickle.dumps(content, 2)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("edges/data.pkl", data)
    return file


@pytest.mark.parametrize("name", CASES)
def test_hostile_files_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, match = CASES[name]
    file = write(tmp_path / "train.pt", content)
    with pytest.raises(DataError, match=match) as caught:
        SavedArrays(file).numbers("edge")
    assert "train.pt" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["train.pt"]


def test_bombs_are_refused(tmp_path: Path) -> None:
    """In archives, and after one another as torch wrote them before 1.6."""
    for name, bomb in bombs(tmp_path / "marker").items():
        older = tmp_path / f"{name} older.pt"
        older.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + bomb)
        for file in (write(tmp_path / f"{name}.pt", bomb), older):
            with pytest.raises(DataError, match=r"\.pt: "):
                SavedArrays(file)
    assert not (tmp_path / "marker").exists()


def test_hostile_files_take_neither_time_nor_memory(tmp_path: Path) -> None:
    """In a process with 1 GiB more than it starts with: a segmentation fault or a huge
    allocation would end it."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from raygnn.errors import DataError\n"
        "from raygnn.graph.sources.pickles import SavedArrays\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, size + 2**30))\n"
        "for file in sys.argv[1:]:\n"
        "    try:\n"
        "        SavedArrays(Path(file)).numbers('edge')\n"
        "    except DataError:\n"
        "        print('refused')\n"
    )
    files = [
        str(write(tmp_path / f"{number}.pt", content))
        for number, (content, _) in enumerate(CASES.values())
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *files], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["refused"] * len(files), done.stderr[-2000:]
    assert done.returncode == 0
