"""Timed edges as tables, from lines of source, target and seconds: CollegeMsg of SNAP
(https://snap.stanford.edu/data), of Panzarasa, Opsahl & Carley 2009, and edits of Wikipedia pages
by users, of JODIE (Kumar, Zhang & Leskovec 2019), where sources and targets are of two kinds.

    python examples/college.py CollegeMsg.txt DIRECTORY
    raygnn train jobs/college-links.yaml --set graph.path=DIRECTORY/tables.yaml

The nodes have no features, so each has the number 1: the model predicts from earlier edges and
their times.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

MESSAGES = """\
nodes:
  student: {files: student.csv, id: id, features: {feat: one}}
edges:
  student:wrote:student:
    {files: edges.csv, source: source, target: target, time: at, reverse: heard_from}
"""
EDITS = """\
nodes:
  user: {files: user.csv, id: id, features: {feat: one}}
  page: {files: page.csv, id: id, features: {feat: one}}
edges:
  user:edited:page:
    {files: edges.csv, source: source, target: target, time: at, reverse: edited_by}
"""


def write(lines: Path, directory: Path) -> Path:
    """Write the tables and ``tables.yaml``, whose path is returned."""
    directory.mkdir(parents=True, exist_ok=True)
    source, target, at = np.loadtxt(lines, dtype=np.int64).T
    nodes = {"user": np.unique(source), "page": np.unique(target)}
    two_kinds = not np.intersect1d(*nodes.values()).size
    if not two_kinds:
        nodes = {"student": np.union1d(*nodes.values())}
    for ntype, ids in nodes.items():
        _csv(directory / f"{ntype}.csv", id=ids, one=np.ones_like(ids))
    _csv(directory / "edges.csv", source=source, target=target, at=at)
    (directory / "tables.yaml").write_text(EDITS if two_kinds else MESSAGES)
    return directory / "tables.yaml"


def _csv(file: Path, **columns: np.ndarray) -> None:
    pyarrow.csv.write_csv(pa.table(columns), file)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    write(Path(sys.argv[1]), Path(sys.argv[2]))
