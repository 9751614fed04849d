"""A small shop as tables, right and with one thing wrong."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from raygnn.config.graph import TablesGraph

SPEC: dict[str, Any] = {
    "nodes": {
        "user": {
            "files": "users.csv",
            "id": "name",
            "features": {"feat": ["age", "income"]},
            "label": "class",
            "split": "fold",
        },
        "item": {
            "files": ["items.csv"],
            "id": "sku",
            "features": {"feat": "price"},
            "categories": {"brand": "brand"},
        },
    },
    "edges": {
        "user:bought:item": {
            "files": "bought.csv",
            "source": "name",
            "target": "sku",
            "weight": "amount",
            "time": "at",
        }
    },
}
TABLES: dict[str, dict[str, list[Any]]] = {
    "users": {
        "name": ["anna", "ben", "carl"],
        "age": [34.0, 51.0, 28.0],
        "income": [2.5, 1.5, 3.5],
        "class": ["no", "yes", None],
        "fold": ["train", "val", None],
    },
    "items": {"sku": [1001, 1002], "price": [9.5, 1.0], "brand": ["b", "a"]},
    "bought": {
        "name": ["anna", "carl", "ben"],
        "sku": [1002, 1002, 1001],
        "amount": [1.0, 2.0, 0.5],
        "at": [3, 1, 2],
    },
}


def write_table(file: Path, columns: dict[str, list[Any]]) -> None:
    """Write a table in the format that the file name implies."""
    file.parent.mkdir(exist_ok=True, parents=True)
    if file.suffix == ".parquet":
        pq.write_table(pa.table(columns), file)
    else:
        frame = pd.DataFrame({name: pd.Series(v, dtype=object) for name, v in columns.items()})
        frame.to_csv(file, index=False, sep="\t" if ".tsv" in file.name else ",")


def write_shop(
    directory: Path,
    kind: str = "csv",
    spec: dict[str, Any] | None = None,
    raw: Mapping[str, bytes | None] | None = None,
    **tables: Any,
) -> TablesGraph:
    """The shop with other columns, by table: ``users={"age": [1, 2, 3]}``; None leaves one out.
    ``raw`` are the contents of whole files; None leaves one out."""
    text = yaml.safe_dump(spec or SPEC, sort_keys=False).replace(".csv", f".{kind}")
    (directory / "shop.yaml").write_text(text)
    for name, columns in TABLES.items():
        changed = {**columns, **tables.get(name, {})}
        whole = {column: values for column, values in changed.items() if values is not None}
        write_table(directory / f"{name}.{kind}", whole)
    for file, content in (raw or {}).items():
        if content is None:
            (directory / file).unlink()
        else:
            (directory / file).write_bytes(content)
    return TablesGraph(format="tables", path=directory / "shop.yaml")


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the description with one key changed, such as ``nodes user id``; None removes it."""
    spec = copy.deepcopy(SPEC)
    *parents, last = path.split()
    section = spec
    for key in parents:
        section = section[key]
    if value is None:
        del section[last]
    else:
        section[last] = value
    return spec
