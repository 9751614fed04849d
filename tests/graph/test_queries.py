"""Tables that are queries give the graph of their results, read nothing else and write nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from raygnn.config.graph import TablesGraph
from raygnn.errors import DataError
from raygnn.graph.sources import digest, load_graph, reading_bytes
from tests.graph.test_outofcore import assert_as_in_memory, out_of_core
from tests.support.builders import assert_refused
from tests.support.tables_builder import write_table

SPENT = "select name, sum(amount) as spent, count(*) as n from 'payments/*.csv' group by name"
ITEM = {"files": "items.csv", "id": "sku"}
PAYMENTS = {"files": "payments/*.csv", "source": "name", "target": "sku"}


def write_payments(directory: Path, sql: str = SPENT, **others: Any) -> TablesGraph:
    """Write payments in two files, items in one, and customers as a query."""
    customer = {"sql": sql, "id": "name", "features": {"feat": ["spent", "n"]}}
    customer["splits"] = {"train": 1.0}
    spec = {
        "nodes": {"item": ITEM, "customer": customer},
        "edges": {"customer:paid:item": PAYMENTS},
    }
    for path, value in others.items():
        section, name = path.split("__")
        spec[section][name] = value
    (directory / "shop.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    first = {"name": ["carl", "anna"], "sku": [1001, 1002], "amount": [2, 1.5]}
    write_table(directory / "payments/1.csv", first)
    write_table(directory / "payments/2.csv", {"name": ["anna"], "sku": [1001], "amount": [0.25]})
    write_table(directory / "items.csv", {"sku": [1001, 1002], "price": [9.5, 1.0]})
    return TablesGraph(format="tables", path=directory / "shop.yaml")


def test_a_query_in_place_of_files(tmp_path: Path) -> None:
    data = load_graph(write_payments(tmp_path))
    assert data.ids["customer"].to_pylist() == ["anna", "carl"]
    assert data.nodes["customer"].data["feat"].tolist() == [[1.75, 2], [2, 1]]
    edges = data.edges["customer", "paid", "item"]
    assert (edges.src.tolist(), edges.dst.tolist()) == ([1, 0, 0], [0, 1, 0])


def test_names_of_other_tables(tmp_path: Path) -> None:
    """A query may name other tables by type, relation or full key, whatever files they have, and
    earlier queries; a name defined within the query hides them."""
    (tmp_path / "more").mkdir()
    write_table(tmp_path / "more/3.parquet", {"name": ["ben"], "sku": [1002], "amount": [4.0]})
    likes = """with best as (select name, arg_max(sku, amount) as sku from Paid group by all),
        ITEM as (select 1 as x)
        select best.* from best join customer using (name)
        semi join "customer:paid:item" p on p.sku = best.sku, item -- all of them;"""
    paid = "select name, sum(amount) as spent, count(*) as n from paid group by name; "
    graph = write_payments(tmp_path, paid)
    spec = yaml.safe_load((tmp_path / "shop.yaml").read_text())
    spec["edges"] = {
        "customer:paid:item": {**PAYMENTS, "files": ["payments/*.csv", "more/*.parquet"]},
        "customer:likes:item": {"sql": likes, "source": "name", "target": "sku"},
    }
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    data = load_graph(graph)
    assert data.ids["customer"].to_pylist() == ["anna", "ben", "carl"]
    edges = data.edges["customer", "likes", "item"]
    assert (edges.src.tolist(), edges.dst.tolist()) == ([0, 1, 2], [1, 1, 0])


def test_files_of_functions_and_types_of_results(tmp_path: Path) -> None:
    """Exact numbers of any width, and ids of 128 bits, are read as from other tables."""
    sql = """select name, sum(sku::bigint) as spent, max(amount::decimal(9, 2)) as n, 'é' as other
        from read_csv('payments/*.csv', header = true, all_varchar = true) group by name"""
    data = load_graph(write_payments(tmp_path, sql))
    assert data.nodes["customer"].data["feat"].tolist() == [[2003, 1.5], [1001, 2]]
    one = "6ccd780c-baba-1026-9564-5b8c656024db"
    ids = {"sql": f"select '{one}'::uuid as id from item limit 1", "id": "id"}
    assert load_graph(write_payments(tmp_path, nodes__id=ids)).ids["id"].to_pylist() == [one]


def test_directories_change_no_column(tmp_path: Path) -> None:
    """What is before = in the name of a directory may be the name of a column."""
    (tmp_path / "name=ben").mkdir()
    write_table(tmp_path / "name=ben/1.parquet", {"name": ["anna"], "spent": [2.0], "n": [1]})
    graph = write_payments(tmp_path, "select * from 'name=ben/1.parquet' union all "
                           "select name, 1.0, 1 from paid where name = 'carl'")  # fmt: skip
    assert load_graph(graph).ids["customer"].to_pylist() == ["anna", "carl"]


def test_the_same_rows_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not depend on the number of threads, sums of floats included."""
    random = np.random.default_rng(0)
    graph = write_payments(tmp_path)
    for at in range(2):
        names = [f"u{n}" for n in random.integers(0, 9_000, 70_000)]
        amounts = random.random(70_000) * 10.0 ** random.integers(-9, 9, 70_000)
        columns = {"name": names, "sku": [1001] * 70_000, "amount": amounts.tolist()}
        write_table(tmp_path / f"payments/{at}.parquet", columns)
    spec = yaml.safe_load((tmp_path / "shop.yaml").read_text())
    spec["nodes"]["customer"]["sql"] = SPENT.replace("csv", "parquet")
    spec["edges"]["customer:paid:item"]["files"] = "payments/*.parquet"
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    read = []
    for threads in ("1", "4", "4"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        read.append(load_graph(graph))
    ids = read[0].ids["customer"].to_pylist()
    assert ids == sorted(ids)
    for other in read[1:]:
        assert other.ids["customer"].to_pylist() == ids
        feat = other.nodes["customer"].data["feat"]
        assert feat.tobytes() == read[0].nodes["customer"].data["feat"].tobytes()


def test_out_of_core(tmp_path: Path) -> None:
    assert_as_in_memory(write_payments(tmp_path), tmp_path, 2)


def test_the_digest_is_of_the_query_and_of_its_files(tmp_path: Path) -> None:
    graph = write_payments(tmp_path, f"{SPENT} union all select 'x', 0, 0 from 'extra.csv'")
    write_table(tmp_path / "extra.csv", {"x": [1]})
    write_table(tmp_path / "unread.csv", {"x": [1]})
    digests = [digest(graph)]
    assert reading_bytes(graph) > 0
    write_table(tmp_path / "unread.csv", {"x": [2]})
    assert digest(graph) == digests[0]
    write_table(tmp_path / "extra.csv", {"x": [2]})
    digests.append(digest(graph))
    write_table(tmp_path / "payments/3.csv", {"name": ["z"], "sku": [1001], "amount": [1]})
    digests.append(digest(graph))
    digests.append(
        digest(write_payments(tmp_path, f"{SPENT} union all select 'x', 0, 1 from paid"))
    )
    assert len(set(digests)) == 4


def test_rows_of_a_query_are_named(tmp_path: Path) -> None:
    """A message names the row of a query's result, in memory and out of core."""
    sql = "select name, 1 as spent, nullif(count(*), 2) as n from paid group by name order by n"
    graph = write_payments(tmp_path, sql)
    place = f"the query of nodes.customer in {tmp_path}/shop.yaml, row 1, column 'n'"
    assert_refused(lambda: load_graph(graph), [place])
    assert_refused(lambda: out_of_core(graph, tmp_path / "p", 2), [place])
    twice = write_payments(tmp_path, "select 'a' as name, range as spent, 1 as n from range(3)")
    place = f"'a' is repeated; it is in the query of nodes.customer in {tmp_path}/shop.yaml, row 1"
    assert_refused(lambda: load_graph(twice), [place, "row 2"])


REFUSED = {
    "copy (select 1 as name) to 'x.csv'": ["not a single SELECT"],
    "with x as (copy (select 1) to 'payments/1.csv') select 1": ["not a single SELECT"],
    "with x as (insert into paid values (1) returning 1) select 1": ["not a single SELECT"],
    "attach 'x.db'": ["not a single SELECT"],
    "install httpfs": ["not a single SELECT"],
    "set threads = 1": ["not a single SELECT"],
    "select 1 as name; select 2 as name": ["not a single SELECT"],
    "-- nothing": ["not a single SELECT"],
    "select 1 as name into other": ['at or near "into"', "after 'select 1 as name "],
    "selec 1": ['at or near "selec"'],
    "select * from read_text('/etc/passwd')": ["Permission Error", "/etc/passwd"],
    "select * from read_csv('/etc/passwd')": ["'/etc/passwd' is neither a table"],
    "select * from read_csv('/etc/pass' || 'wd')": ["/etc/pass"],
    "select * from query('select * from read_csv(''/etc/passwd'')')": ["/etc/passwd"],
    "select * from glob('/etc/*')": ["Permission Error"],
    "select * from '/etc/x.csv'": ["'/etc/x.csv' is outside"],
    "select * from 'payments/../../x.csv'": ["'payments/../../x.csv' is outside"],
    "select * from read_parquet('../x.parquet')": ["'../x.parquet' is outside"],
    "select * from 'https://example.com/x.csv'": ["'https://example.com/x.csv' is outside"],
    "select * from 'none.csv'": ["none.csv", "does not exist"],
    "select * from 'none/*.csv'": ["no file matches"],
    "select * from custmer": ["'custmer' is neither a table", "did you mean customer?"],
    "select * from customer": ["it names nodes.customer, which is not an earlier query"],
    "select * from bought": ["it names edges.customer:bought:item, which is not an earlier query"],
    "select * from twice": ["2 tables are called 'twice'"],
    "select nme from paid": ['"nme" not found', "nodes.customer.sql"],
    "select distinct name, 1 as n from paid": ["no column 'spent'", "there are: 'name', 'n'"],
    "select name, 1 as spent, 2 as n from paid where amount > 99": ["returns no rows"],
    "select name::int as name, 1 as spent, 1 as n from paid": ["Could not convert", "carl"],
}


@pytest.mark.parametrize("sql", REFUSED)
def test_invalid_queries_are_refused(sql: str, tmp_path: Path) -> None:
    (root := tmp_path / "in").mkdir()
    write_table(tmp_path / "x.csv", {"secret": [1]})
    bought = {**PAYMENTS, "files": (), "sql": "select * from customer"}
    others = {f"edges__{etype}": PAYMENTS for etype in ("customer:twice:item", "item:twice:item")}
    graph = write_payments(root, sql, **{"edges__customer:bought:item": bought}, **others)
    text = (root / "shop.yaml").read_text().replace("    files: []\n", "")
    (root / "shop.yaml").write_text(text)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file()}
    assert_refused(lambda: load_graph(graph), [str(root), *REFUSED[sql]])
    after = {file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file()}
    assert after == before


def test_files_or_sql(tmp_path: Path) -> None:
    for item, fragments in {
        "both": ({**ITEM, "sql": "select 1"}, ["nodes.item", "files and sql are both set"]),
        "neither": ({"id": "sku"}, ["nodes.item", "neither files nor sql is set"]),
        "delimiter": ({"id": "x", "sql": "select 1", "delimiter": ";"}, ["sql is set"]),
    }.values():
        graph = write_payments(tmp_path, nodes__item=item)
        assert_refused(lambda graph=graph: load_graph(graph), fragments)


def test_tables_in_an_object_store_are_no_part_of_a_query(tmp_path: Path) -> None:
    graph = write_payments(
        tmp_path, nodes__item={**ITEM, "files": f"{tmp_path.as_uri()}/items.csv"}
    )
    load_graph(graph)
    write_payments(
        tmp_path,
        "select name, 1 as spent, 1 as n from paid, item",
        nodes__item={**ITEM, "files": f"{tmp_path.as_uri()}/items.csv"},
    )
    with pytest.raises(DataError, match=r"nodes.item is in an object store"):
        load_graph(graph)
