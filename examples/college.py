"""Messages between students as tables: CollegeMsg of SNAP (https://snap.stanford.edu/data), of
Panzarasa, Opsahl & Carley 2009, whose lines are source, target and seconds since 1970.

    python examples/college.py CollegeMsg.txt DIRECTORY
    raygnn train jobs/college-links.yaml --set graph.path=DIRECTORY/tables.yaml

Nothing is known of the students, so each has the number 1: what tells who writes to whom next is
who wrote when.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

TABLES = """\
nodes:
  student: {files: students.csv, id: student, features: {feat: one}}
edges:
  student:wrote:student:
    {files: messages.csv, source: source, target: target, time: at, reverse: heard_from}
"""


def write(messages: Path, directory: Path) -> Path:
    """Write ``students.csv``, ``messages.csv`` and ``tables.yaml``, whose path is returned."""
    directory.mkdir(parents=True, exist_ok=True)
    source, target, at = np.loadtxt(messages, dtype=np.int64).T
    students = np.unique([source, target])
    _csv(directory / "students.csv", student=students, one=np.ones_like(students))
    _csv(directory / "messages.csv", source=source, target=target, at=at)
    (directory / "tables.yaml").write_text(TABLES)
    return directory / "tables.yaml"


def _csv(file: Path, **columns: np.ndarray) -> None:
    pyarrow.csv.write_csv(pa.table(columns), file)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    write(Path(sys.argv[1]), Path(sys.argv[2]))
