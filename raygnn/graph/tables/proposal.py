"""Propose the YAML of a directory or database: ids, foreign keys, times, features."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import yaml

from raygnn.errors import DataError
from raygnn.graph.data import MASKS
from raygnn.graph.sources.input_files import check_file
from raygnn.graph.tables.databases import export
from raygnn.graph.tables.queries import quoted, scan
from raygnn.graph.tables.reader import Connection, connect, is_table

_WORDS = 1000  # distinct values of a category, at most
_DANGLING = 0.1  # fraction of a foreign key's values that are no ids, at most
_ID = r"(?:(?:^|_)(?i:id|key|code|sku)|(?<=[a-z0-9])(?:Id|ID|Key|Code))$"
_TIME = "date|time|day|(^|_)at$|created|when"
_BIRTH = "birth|born|dob"
_SORTS = {
    "integer": "U?(BIG|SMALL|TINY)?INT(EGER)?",
    "number": r"DOUBLE|FLOAT|DECIMAL\([^\[]*|U?HUGEINT|BOOLEAN",
    "moment": "DATE|TIMESTAMP( WITH TIME ZONE|_[A-Z]*)?",
    "text": "VARCHAR|UUID",
}
_DATE = r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d(:?\d\d)?)?)?"
_HEAD = """# Proposed from the tables in {}: check it, above all what is after '#'.
# A job reads it with `graph: {{format: tables, path: THIS}}`. To predict a column, write
# `label: COLUMN` and `splits: {{train: 0.8, val: 0.1}}` at its table, remove the column from
# features and categories, and set `task: {{ntype: TABLE}}` in the job.
nodes:
"""


@dataclass
class _Column:
    name: str
    sort: str  # integer, number, text, moment, or its type in DuckDB
    values: int  # not null
    distinct: int


@dataclass
class _Proposed:
    """A table, and the proposal for it."""

    name: str
    given: dict[str, str]  # files, or sql and url
    rows: int
    columns: dict[str, _Column]
    id: str | None = None
    keys: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def stem(self) -> str:
        return _stem(self.name)


def propose(source: str, base: Path) -> str:
    """Return the proposed YAML for the CSV and Parquet files in a directory, or for a database
    (``env:NAME`` or ``sqlite:///FILE``). ``base``: directory that paths are relative to. Raises
    DataError if there are no tables, or one cannot be read."""
    tables: list[_Proposed] = []
    remedy = "name a directory with tables, or a database: env:DATABASE_URL"
    with TemporaryDirectory(prefix="raygnn-") as place, connect(Path(place)) as connection:
        if source.startswith("env:") or "://" in source:
            given = export(source, base, Path(place))
        else:
            if not Path(source).is_dir():
                raise DataError("there is no such directory", where=source, remedy=remedy)
            files = [one for one in sorted(Path(source).absolute().glob("*")) if is_table(one)]
            given = {file: {"files": os.path.relpath(file, base)} for file in files}
        if not given:
            message = "there are no CSV or Parquet files, or no tables with rows"
            raise DataError(message, where=source, remedy=remedy)
        for file, keys in given.items():
            check_file(file)
            try:
                tables.append(_counted(connection, file, keys, [one.name for one in tables]))
            except duckdb.Error as error:
                message = " ".join(str(error).split())[:300]
                instead = "correct the file, or move it elsewhere"
                raise DataError(message, where=str(file), remedy=instead) from None
        for table in tables:
            _find_id(table, tables)
        for table in tables:
            for column in table.columns.values():
                _find_key(connection, table, column, tables)
    return _HEAD.format(source) + "".join(f"{line}\n" for t in tables for line in _lines(t))


def _counted(connection: Connection, file: Path, given: Any, taken: Sequence[str]) -> _Proposed:
    """Load a file, and count the values of its columns; text columns of dates are times."""
    name = _array(file.name.partition(".")[0], taken)
    connection.execute(f"create table {quoted(name)} as {scan([file])}")
    kinds = connection.execute(f"describe {quoted(name)}").fetchall()
    counts = ", ".join(
        f"count({(c := quoted(k[0]))}), count(distinct {c}), "
        f"count(*) filter (regexp_full_match({c}::varchar, '{_DATE}'))"
        for k in kinds
    )
    rows, *found = connection.execute(f"select count(*), {counts} from {quoted(name)}").fetchone()
    numbers = zip(found[::3], found[1::3], found[2::3], strict=True)
    columns = {}
    for (column, kind, *_), (values, distinct, dates) in zip(kinds, numbers, strict=True):
        sorts = [sort for sort, types in _SORTS.items() if re.fullmatch(types, kind)]
        sort = "moment" if 0 < values == dates else [*sorts, kind.lower()][0]
        columns[column] = _Column(column, sort, values, distinct)
    return _Proposed(name, given, rows, columns)


def _find_id(table: _Proposed, tables: Sequence[_Proposed]) -> None:
    """Choose the id column: a unique column with a name of an id, or else a unique first column."""
    unique = [
        column.name
        for column in table.columns.values()
        if column.values == column.distinct == table.rows and column.sort in ("integer", "text")
    ]
    others = {other.stem for other in tables if other is not table}
    own = [name for name in unique if re.search(_ID, name) and _stem(name) in ("", table.stem)]
    free = [name for name in unique if _stem(name) not in others]
    likely = [name for name in free if re.search(_ID, name)]
    likely += [name for name in free if name == next(iter(table.columns))]
    table.id = next(iter([*own, *likely]), None)
    if not own:
        unsure = f"{table.id} is unique, but is it the id?" if likely else "none is found: by row"
        table.notes.append(f"id: {unsure}")


def _find_key(
    connection: Connection, table: _Proposed, column: _Column, tables: Sequence[_Proposed]
) -> None:
    """Find the table that a column refers to, by its name and by containment of its values."""
    name, stem, maybe = column.name, _stem(column.name), list[str]()
    for other in tables:
        of = other.columns.get(other.id or "")
        if of is None or of is column or of.sort != column.sort or not column.values:
            continue
        called = other is not table and (
            stem in (other.stem, f"{other.stem}id")
            or name == other.id != "id"
            or (name != table.id and len(other.stem) > 2 and stem.endswith(other.stem))
        )
        if called or (re.search(_ID, name) and name != table.id):
            (alone,) = connection.execute(
                f"select count(distinct k.{quoted(name)}) from {quoted(table.name)} k "
                f"anti join {quoted(other.name)} o on k.{quoted(name)} = o.{quoted(of.name)}"
            ).fetchone()
            if called and alone <= _DANGLING * column.distinct:
                drop = {"table": other.name, "missing": "drop"}
                table.keys[name] = drop if alone else other.name
            if called and alone:
                table.notes.append(f"{name}: {alone:,} of its values are no {other.name}")
            if not called and not alone:
                maybe.append(other.name)
    if maybe and name not in table.keys:
        table.notes.append(f"{name}: its values are ids of {', '.join(maybe)}; a key, by chance?")


def _lines(table: _Proposed) -> Iterator[str]:
    features, categories, times, notes = [], dict[str, Any](), list[str](), table.notes
    few = min(_WORDS, table.rows // 2)
    for column in table.columns.values():
        name = column.name
        if name == table.id or name in table.keys:
            continue
        if column.distinct > 1 and column.sort == "moment":
            times.append(name)
        elif column.distinct > 1 and (
            column.sort == "number" or (column.sort == "integer" and not re.search(_ID, name))
        ):
            missing = {"impute": "median"} if column.values < table.rows else {}
            features.append({"column": name, **missing, "scale": "standard"})
        elif column.sort in ("text", "integer") and 1 < column.distinct <= few:
            array = _array(name, ["feat", "label", "time", *MASKS, *categories])
            categories[array] = {"column": name, "unknown": "bucket"}
        else:
            notes.append(f"{name}: not used, {column.distinct:,} values ({column.sort})")
    whole = [name for name in times if table.columns[name].values == table.rows]
    called = [name for name in whole if re.search(_TIME, name, re.I)]
    time = next((one for one in (called or whole) if not re.search(_BIRTH, one, re.I)), None)
    since = {"since": time or "2000-01-01", "scale": "standard"}
    notes += [f"features: {_yaml({'column': n, **since})}" for n in times if n != time]
    yield f"  {table.name}:"
    yield from (f"    # {' '.join(note.split())}" for note in notes)
    for key, value in {**table.given, "id": table.id, "keys": table.keys}.items():
        if value:
            yield f"    {key}: {_yaml(value)}"
    if time:
        yield f"    time: {_yaml(time)}"
    if features:
        yield "    features:\n      feat:"
        yield from (f"        - {_yaml(feature)}" for feature in features)
    if categories:
        yield "    categories:"
        yield from (f"      {name}: {_yaml(of)}" for name, of in categories.items())


def _stem(name: str) -> str:
    """Return a name in lower case and singular, without a suffix such as Id."""
    return re.sub(r"[\W_]", "", re.sub(_ID, "", name)).lower().removesuffix("s")


def _array(name: str, taken: Sequence[str]) -> str:
    """Return a valid name for a type or array that is not taken."""
    name = re.sub(r"[^\w.-]", "_", name)[:90]
    name = name if re.match(r"[^\W\d_]", name) else f"of_{name}"
    return _array(f"{name}_", taken) if name in taken else name


def _yaml(value: Any) -> str:
    dumped = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return dumped.removesuffix("...\n").strip()
