"""Check-ins of Gowalla as tables, from the files of LightGCN (He et al., SIGIR 2020): train.txt,
valid.txt and test.txt, whose lines are a user and then places.

    python examples/gowalla.py DIRECTORY_OF_TXT_FILES DIRECTORY
    raygnn train jobs/gowalla-lightgcn.yaml --set graph.path=DIRECTORY/tables.yaml

Files without valid.txt are read, too. all.yaml trains on train.txt and valid.txt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

TABLES = """\
nodes:
  user: {files: users.csv, id: user}
  place: {files: places.csv, id: place}
edges:
  user:visited:place:
    {files: visits.csv, source: user, target: place, reverse: visited_by, split: fold,
     split_words: {train: train, valid: VALID, test: test}}
"""


def write(texts: Path, directory: Path) -> None:
    """Write ``users.csv``, ``places.csv``, ``visits.csv``, ``tables.yaml`` and ``all.yaml``."""
    directory.mkdir(parents=True, exist_ok=True)
    columns: dict[str, list] = {"user": [], "place": [], "fold": []}
    for fold in ("train", "valid", "test"):
        file = texts / f"{fold}.txt"
        for line in file.read_text().splitlines() if file.exists() else ():
            user, *places = map(int, line.split())
            for place in places:
                for name, value in zip(columns, (user, place, fold)):
                    columns[name].append(value)
    pyarrow.csv.write_csv(pa.table(columns), directory / "visits.csv")
    for name in ("user", "place"):
        ids = pa.table({name: sorted(set(columns[name]))})
        pyarrow.csv.write_csv(ids, directory / f"{name}s.csv")
    (directory / "tables.yaml").write_text(TABLES.replace("VALID", "val"))
    (directory / "all.yaml").write_text(TABLES.replace("VALID", "train"))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    write(Path(sys.argv[1]), Path(sys.argv[2]))
