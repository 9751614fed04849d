"""Tables of databases are read as files with the same rows are, once, and never written to."""

from __future__ import annotations

import gc
import os
import socket
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import duckdb
import numpy as np
import pandas as pd
import pytest
import yaml

from raygnn.config.graph import TablesGraph
from raygnn.errors import CapabilityError, DataError, InputError
from raygnn.graph.outofcore.divide import make_partition
from raygnn.graph.outofcore.workspace import in_turn
from raygnn.graph.sources import digest, load_graph, reading_bytes
from raygnn.graph.tables import databases
from raygnn.graph.tables.databases import Database
from raygnn.graph.tables.proposal import propose
from tests.graph.test_outofcore import assert_as_in_memory, contents, missing, out_of_core
from tests.graph.test_proposal import keys_of
from tests.support.builders import assert_refused
from tests.support.postgres import PASSWORD, Server, free_port, postgres
from tests.support.tables_builder import write_table

pytestmark = pytest.mark.long

pytest.importorskip("pyarrow", minversion="19")  # as the extra has it
pytest.importorskip("adbc_driver_sqlite")
pytest.importorskip("adbc_driver_postgresql")

URL = "env:DATABASE_URL"
USERS = [("carl", 3, 2.5), ("anna", 1, None), ("ben", 2, 1.5)]
BOUGHT = {"name": ["carl", "anna", "ben"], "sku": [1001, 1002, 1001], "amount": [2.0, 1.0, 4.0]}
SPENT = "select u.*, sum(amount) as spent from user u join 'bought.csv' using (name) group by all"


def write_sqlite(file: Path, rows: list[tuple[Any, ...]] | None = None) -> None:
    """Write users and the items that they named last, in SQLite."""
    file.unlink(missing_ok=True)
    with closing(sqlite3.connect(file)) as database:
        database.execute("create table users (name text, age integer, income real)")
        database.executemany("insert into users values (?, ?, ?)", rows or USERS)
        database.execute("create table empty (name text)")
        database.commit()


def write_shop(directory: Path, sql: str = "select * from users", url: str = URL) -> TablesGraph:
    """Write users in a database, items and edges in files, and a query that joins them."""
    user = {"sql": sql, "url": url, "id": "name", "splits": {"train": 1.0}}
    user["features"] = {"feat": ["age", {"column": "income", "impute": "mean"}]}
    best = {"sql": SPENT, "id": "name", "features": {"feat": ["age", "spent"]}}
    nodes = {"user": user, "item": {"files": "items.csv", "id": "sku"}, "best": best}
    bought = {"files": "bought.csv", "source": "name", "target": "sku"}
    spec = {"nodes": nodes, "edges": {"user:bought:item": bought}}
    (directory / "shop.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    write_table(directory / "items.csv", {"sku": [1001, 1002]})
    write_table(directory / "bought.csv", BOUGHT)
    return again(directory)


def again(directory: Path) -> TablesGraph:
    """Return the graph as the next command has it."""
    return TablesGraph(format="tables", path=directory / "shop.yaml")


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary files go with the graph, or with the error."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    yield
    if databases._READ or list((tmp_path / "tmp").iterdir()):  # of a graph or error in a cycle
        gc.collect()
    assert not list((tmp_path / "tmp").iterdir())
    assert not databases._READ


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users in SQLite, and a description of them."""
    write_sqlite(tmp_path / "shop.db")
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path}/shop.db")
    write_shop(tmp_path)


@pytest.mark.usefixtures("shop")
def test_a_database_joins_files(tmp_path: Path) -> None:
    shop = again(tmp_path)
    data = load_graph(shop)
    assert data.ids["user"].to_pylist() == ["anna", "ben", "carl"]
    assert data.nodes["user"].data["feat"].tolist() == [[1, 2], [2, 1.5], [3, 2.5]]
    edges = data.edges["user", "bought", "item"]
    assert (edges.src.tolist(), edges.dst.tolist()) == ([2, 0, 1], [0, 1, 0])
    assert data.nodes["best"].data["feat"].tolist() == [[1, 1], [2, 4], [3, 2]]
    assert reading_bytes(shop) > 0
    relative = write_shop(tmp_path, url="sqlite:///shop.db")
    assert load_graph(relative).ids["user"].to_pylist() == ["anna", "ben", "carl"]
    assert_as_in_memory(shop, tmp_path, 2)
    out_of_core(shop, tmp_path / "shared", 2, on_another_node)


def on_another_node(function: Any, tasks: Any) -> Iterator[tuple[int, Any]]:
    """Run tasks as a node does that does not see this process's temporary files."""
    assert tempfile.gettempdir() not in repr(tasks)
    yield from in_turn(function, tasks)


@pytest.mark.usefixtures("shop")
def test_a_graph_reads_its_queries_once(tmp_path: Path) -> None:
    """The digest is of the rows in any order; what changes meanwhile is for the next command."""
    first = digest(shop := again(tmp_path))
    write_sqlite(tmp_path / "shop.db", USERS[::-1])
    assert digest(again(tmp_path)) == first
    write_sqlite(tmp_path / "shop.db", [*USERS, ("dora", 4, 4.5)])
    assert digest(shop) == first
    assert load_graph(shop).nodes["user"].num == 3
    assert digest(later := again(tmp_path)) != first
    assert load_graph(later).nodes["user"].num == 4


REFUSED = {
    "select * from usr": ["nodes.user.sql: no such table: usr\n"],
    "select nme from users": ["no such column: nme"],
    "select * from empty": ["the query returns no rows"],
    "delete from users returning *": ["nodes.user.sql", "syntax error"],
    "attach 'other.db' as o": ["syntax error"],
    "select 1 as name; select 2": ["syntax error"],
    "select name, age from users": ["the query of nodes.user in", "no column 'income'"],
    "select name, age, age / 0 as income from users": ["the query of nodes.user", "income"],
    "select name, 'old' as age, income from users": ["the query of nodes.user in", "'old'"],
    "selec 1": ["syntax error"],
    # types are those of the first rows
    "with recursive n(i) as (select 0 union all select i + 1 from n where i < 40000) "
    "select i as name, 1 as income, case when i < 30000 then i else 'x' end as age from n": [
        "nodes.user.sql",
        "Type mismatch in column 2",
        "cast",
    ],
}


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize("sql", REFUSED)
def test_wrong_queries(sql: str, tmp_path: Path) -> None:
    before = (tmp_path / "shop.db").read_bytes()
    graph = write_shop(tmp_path, sql)
    assert_refused(lambda: load_graph(graph), [f"{tmp_path}/shop.yaml", *REFUSED[sql]])
    assert (tmp_path / "shop.db").read_bytes() == before
    assert not (tmp_path / "other.db").exists()


@pytest.mark.usefixtures("shop")
def test_a_sqlite_file_is_not_written_to(tmp_path: Path) -> None:
    with (
        closing(Database(URL, tmp_path, "here").connection) as connection,
        connection.cursor() as cursor,
        pytest.raises(Exception, match="readonly database"),
    ):
        cursor.execute("delete from users").fetchall()


WRONG = {
    "": ["DATABASE_URL is not set", "postgresql://USER"],
    "hunter2": ["DATABASE_URL is not a database URL"],
    "mysql://u:hunter2@h/d": ["DATABASE_URL is not a database URL"],
    "postgresql://u:hunter2/x@h/d": ["not a database URL", "%2F"],
    "postgresql://u:hunter2%zz@h/d": ["not a database URL"],
    "postgresql://u:hunter2@127.0.0.1:1/d": ["nodes.user.url", "refused", "127.0.0.1"],
    "postgresql://u@127.0.0.1:1/d?password=hunter2": ["refused"],
    "postgresql://u:hunter2@127.0.0.1:1/d?hunter2=1": ['"***"'],
    "sqlite:///none.db": ["none.db", "does not exist"],
}


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize("value", WRONG)
def test_wrong_urls(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", value)
    assert_refused(lambda: load_graph(again(tmp_path)), WRONG[value])
    with pytest.raises(InputError) as caught:
        propose(URL, tmp_path)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["postgresql://u:hunter2@h/d", "sqlite://x", "env:", "env:a b"])
def test_urls_with_passwords_are_not_written_down(url: str, tmp_path: Path) -> None:
    for read in (lambda: load_graph(write_shop(tmp_path, url=url)), lambda: propose(url, tmp_path)):
        assert_refused(read, ["password", "env:DATABASE_URL"])
        with pytest.raises(InputError) as caught:
            read()
        assert "hunter2" not in str(caught.value)


def test_a_url_needs_a_query(tmp_path: Path) -> None:
    graph = write_shop(tmp_path)
    text = (tmp_path / "shop.yaml").read_text()
    (tmp_path / "shop.yaml").write_text(
        text.replace("sql: select * from users", "files: users.csv")
    )
    assert_refused(lambda: load_graph(graph), ["nodes.user.url", "nodes.user.sql is null"])


@pytest.mark.usefixtures("shop")
def test_a_driver_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adbc_driver_sqlite.dbapi", None)
    with pytest.raises(CapabilityError, match=r"pip install .raygnn\[databases\]"):
        load_graph(again(tmp_path))


# --- PostgreSQL


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres() as started:
        yield started


@pytest.fixture
def database(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("DATABASE_URL", server.uri)
    return server


def read_types(directory: Path, columns: str, **table: Any) -> Any:
    one = {"sql": f"select 1 as id, {columns}", "url": URL, "id": "id", **table}
    other = {"sql": "select 1 as id, 1 as one", "url": URL, "id": "id", "keys": {"one": "one"}}
    spec = {"nodes": {"one": one, "other": other}}
    (directory / "shop.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    return load_graph(again(directory), needs_masks=False).nodes["one"].data


TYPES = {  # the value of a feature, by expression
    "12.5::numeric(9, 2)": 12.5,
    "'1e3'::numeric": 1000,
    "true": 1,
    "7::smallint": 7,
    "0.5::real": 0.5,
    "array[1, 2, 3]::float8[]": [1, 2, 3],
}
TIMES = {  # microseconds
    "timestamptz '2024-05-01 12:00+02'": 1714557600_000000,
    "timestamp '2024-05-01 10:00'": 1714557600_000000,
    "date '2024-05-01'": 1714521600_000000,
    "'2024-05-01 10:00'::text": 1714557600_000000,
}
WORDS = {
    "'x'::mood": "x",
    "'x'::varchar(3)": "x",
    "'x'::char(1)": "x",
    "'6ccd780c-baba-1026-9564-5b8c656024db'::uuid": "6ccd780c-baba-1026-9564-5b8c656024db",
    "'{\"a\": 1}'::jsonb": '{"a": 1}',
    "'[1]'::json": "[1]",
}


@pytest.mark.usefixtures("database")
def test_types(server: Server, tmp_path: Path) -> None:
    server.run("create type mood as enum ('x', 'y')")
    columns = [*TYPES, *TIMES, *WORDS]
    names = {expression: f"c{at}" for at, expression in enumerate(columns)}
    selected = ", ".join(f"{expression} as {name}" for expression, name in names.items())
    time = {"column": names[next(iter(TIMES))]}
    features: dict[str, Any] = {f"f{names[one]}": names[one] for one in TYPES}
    zero = {"since": "1970-01-01"}
    features |= {f"f{names[one]}": {"column": names[one], **zero} for one in TIMES}
    words = {f"w{names[one]}": names[one] for one in WORDS}
    table = {"features": features, "categories": words, "time": time}
    data = read_types(tmp_path, selected, **table)
    for expression, value in TYPES.items():
        assert data[f"f{names[expression]}"].ravel().tolist() == np.ravel(value).tolist()
    for expression, micros in TIMES.items():
        found = data[f"f{names[expression]}"].item()
        assert found == np.float32(micros / 86400_000000), expression
    assert data["time"].tolist() == [next(iter(TIMES.values()))]
    graph = again(tmp_path)
    meanings = load_graph(graph, needs_masks=False).names
    for expression, word in WORDS.items():
        assert meanings[f"one/w{names[expression]}"] == [word], expression


OTHERS = ["interval '1 day'", "point '(1, 2)'", "int4range(1, 2)", "array[1.5]::numeric[]"]


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize("expression", OTHERS)
def test_types_that_tables_do_not_have(expression: str, tmp_path: Path) -> None:
    fragments = ["nodes.one.sql", "column 'x' has the unsupported type", "cast(x as text)"]
    assert_refused(lambda: read_types(tmp_path, f"{expression} as x"), fragments)
    assert read_types(tmp_path, f"({expression})::text as x") == {}


def load_f1(server: Server, data: Path) -> None:
    """Load the tables of races, their rows in another order than that of the files."""
    kinds = {"DOUBLE": "float8", "VARCHAR": "text"}
    statements = ["drop schema public cascade; create schema public;"]
    for file in sorted(data.glob("*.csv")):
        described = duckdb.sql(f"describe from '{file}'").fetchall()
        columns = ", ".join(f'"{name}" {kinds.get(kind, kind)}' for name, kind, *_ in described)
        statements += [
            f"create temp table t ({columns});",
            f"\\copy t from '{file}' (format csv, header)",
            f"create table {file.stem} as select * from t order by random(); drop table t;",
        ]
    server.run("\n".join(statements))


@pytest.fixture(scope="module")
def of_files(data_dir: Path) -> str:
    """The description that is proposed of the files of races."""
    return propose(str(data_dir / "f1"), data_dir)


def test_f1(database: Server, of_files: str, data_dir: Path, tmp_path: Path) -> None:
    """The description that is proposed of a database, and the partition, are those of files."""
    data = data_dir / "f1"
    load_f1(database, data)
    found = propose(URL, tmp_path)
    assert PASSWORD not in found
    assert keys_of(found) == keys_of(of_files)
    described, parts = yaml.safe_load(found), {}
    for name, table in described["nodes"].items():
        assert table["sql"] == f'select * from "{name}"'
    (tmp_path / "shop.yaml").write_text(found)
    from_files = {
        name: {**{k: v for k, v in table.items() if k != "url"},
               "sql": f"select * from '{data}/{name}.csv'"}
        for name, table in described["nodes"].items()
    }  # fmt: skip
    (tmp_path / "files").mkdir()
    written = yaml.safe_dump({"nodes": from_files}, sort_keys=False)
    os.symlink(data, tmp_path / "files" / "f1")
    (tmp_path / "files" / "shop.yaml").write_text(written.replace(f"{data}/", "f1/"))
    for directory in (tmp_path, tmp_path / "files"):
        made = missing(directory / "partition", 2)
        make_partition(made, load_graph(again(directory), needs_masks=False))
        parts[directory] = contents(directory / "partition")
        parts[directory].pop("raygnn.json")
    assert len(set(map(str, map(sorted, parts.values())))) == 1
    assert parts[tmp_path] == parts[tmp_path / "files"]


def test_awkward_tables(database: Server, tmp_path: Path) -> None:
    """Columns of types that tables do not have are left out, and names are quoted."""
    database.run(
        """drop schema public cascade; create schema public; create schema "O";
        create table "a/b" ("I d" int, "select" float8, since interval); create view v as select 1;
        create table "O"."a/b" (id int); insert into "O"."a/b" values (1); create table c (x int);
        insert into "a/b" values (1, 2, '1 day'), (2, 3, null);"""
    )
    text = propose(URL, tmp_path)
    nodes = yaml.safe_load(text)["nodes"]
    queries = {name: table["sql"] for name, table in nodes.items()}
    assert queries == {
        "a_b": 'select "I d", "select" from "a/b"',
        "a_b_": 'select * from "O"."a/b"',
    }
    assert nodes["a_b"]["id"] == "I d"


def test_tables_of_sqlite(of_files: str, data_dir: Path, tmp_path: Path) -> None:
    """Text that is dates becomes times in SQLite, which has no type for them."""
    with closing(sqlite3.connect(tmp_path / "f1.db")) as database:
        for file in (data_dir / "f1").glob("*.csv"):
            pd.read_csv(file).to_sql(file.stem, database, index=False)
        database.execute("create table empty (name integer primary key autoincrement)")
        database.execute("insert into empty values (1)")
        database.execute("delete from empty")  # which leaves a table of SQLite's own
        database.commit()
    text = propose(f"sqlite:///{tmp_path}/f1.db", tmp_path)
    assert keys_of(text) == keys_of(of_files)
    nodes, wanted = (yaml.safe_load(one)["nodes"] for one in (text, of_files))
    assert nodes.keys() == wanted.keys()
    for name, table in wanted.items():
        assert nodes[name].get("time") == table.get("time")
    (tmp_path / "shop.yaml").write_text(text)
    assert load_graph(again(tmp_path), needs_masks=False).nodes["results"].num == 26_559


def write_pair(server: Server, directory: Path, second: str = "select * from b") -> TablesGraph:
    server.run("drop schema public cascade; create schema public; create sequence s")
    server.run("create table a as select 1 as id; create table b as select 1 as id, 1 as a")
    nodes = {
        "a": {"sql": "select * from a", "url": URL, "id": "id", "splits": {"train": 1.0}},
        "b": {"sql": second, "url": URL, "id": "id", "keys": {"a": "a"}},
    }
    (directory / "shop.yaml").write_text(yaml.safe_dump({"nodes": nodes}, sort_keys=False))
    return again(directory)


def test_one_snapshot(database: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are written while tables are read are in none of them."""
    graph, read = write_pair(database, tmp_path), Database.read

    def slowly(self: Database, *args: Any) -> int:
        rows = read(self, *args)
        database.run("insert into a values (2); insert into b values (2, 2)")
        return rows

    monkeypatch.setattr(Database, "read", slowly)
    assert load_graph(graph).nodes["b"].num == 1


def test_a_database_is_not_written_to(database: Server, tmp_path: Path) -> None:
    remedy = "one SELECT that does not write"
    for sql, fragment in {
        "select nextval('s') as id, 1 as a": "b.sql: cannot execute nextval() in a read-only trans",
        "delete from b returning *": 'b.sql: syntax error at or near "from"',
        "with x as (delete from b returning *) select * from x": "must be at the top level",
        f"copy b to '{tmp_path}/b.csv'": "b.sql: syntax error",
        "select 1 as id, 1 as a; delete from b": 'b.sql: syntax error at or near ";"',
        "select 1) as q; delete from b; select * from (select 1": "multiple commands",
        "set transaction read write": "b.sql: syntax error",
        "commit": "b.sql: syntax error",
        "select * from c": 'b.sql: relation "c" does not exist',
        "select x from b -- no": 'b.sql: column "x" does not exist',
    }.items():
        graph = write_pair(database, tmp_path, sql)
        assert_refused(lambda graph=graph: load_graph(graph), [f"{tmp_path}", fragment, remedy])
        database.run("do $$ begin assert (select count(*) from b) = 1; end $$;")


def test_servers_that_refuse_or_do_not_answer(
    database: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = write_pair(database, tmp_path)
    wrong = database.uri.replace(quote(PASSWORD, safe=""), "hunter3")
    monkeypatch.setenv("DATABASE_URL", wrong)
    assert_refused(lambda: load_graph(graph), ["password authentication failed", "nodes.a.url"])
    with socket.create_server(("127.0.0.1", free_port())) as silent:
        port = silent.getsockname()[1]
        uri = f"postgresql://owner:hunter3@127.0.0.1:{port}/postgres?connect_timeout=2"
        monkeypatch.setenv("DATABASE_URL", uri)
        with pytest.raises(DataError, match="timeout") as caught:
            load_graph(graph)
    assert "hunter3" not in str(caught.value)
