"""Hostile and odd table files give the right graph or one clear error, in memory and out of core.

Each case is a table of nodes, with edges beside it. Nothing is written before an error, and neither
memory nor disk grows with what a file claims to be.
"""

from __future__ import annotations

import gzip
import os
import resource
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from raygnn.config.graph import TablesGraph
from raygnn.graph.outofcore.graph_stages import read_graph
from raygnn.graph.outofcore.workspace import Workspace, in_turn
from raygnn.graph.sources import load_graph
from raygnn.graph.tables.ids import StoredIds
from raygnn.graph.tables.proposal import propose
from raygnn.graph.tables.table_stages import in_memory
from tests.graph.test_outofcore import out_of_core
from tests.support.builders import assert_refused
from tests.support.hostile import tree

pytestmark = [pytest.mark.timeout(60), pytest.mark.long]

MEMORY = 1 << 30  # bytes that reading may take beyond those of the process before it
WRITTEN = 1 << 26  # bytes of a file that may be written
BIG = 10 << 30

Maker = Callable[[Path], object]
Files = dict[str, bytes | pa.Table | Maker]
Graph = tuple[list[Any], list[Any], list[tuple[int, int]]]  # ids, features, edges
Case = tuple[bytes | pa.Table | Files, Graph | list[str]] | tuple[Any, Any, dict[str, Any]]

TEXT = "id,x\na,1\nb,2\n"
PLAIN = TEXT.encode()
RIGHT: Graph = (["a", "b"], [1, 2], [(0, 1)])
LOOP = {"e.csv": b"s,t\nb,b\n"}  # edges beside nodes of which one has another id
LONG = "a value has more than 2,000,000 characters"
PACKED = ["n.csv.gz", "cannot be read: zlib"]
NOT_TEXT = ["n.csv, line 1", "not UTF-8"]


def loop(content: bytes | pa.Table) -> Files:
    return {("n.csv" if isinstance(content, bytes) else "n.parquet"): content, **LOOP}


def valued(text: str) -> bytes:
    """Nodes of which the second has this feature, as text."""
    return f"id,x\na,1\nb,{text}\n".encode()


def bad_value(text: str, shown: str | None = None) -> Case:
    shown = repr(text.strip('"')) if shown is None else shown
    return valued(text), ["n.csv, row 2 (line 3), column 'x'", shown]


def typed(x: Any, kind: Any = None, **columns: Any) -> pa.Table:
    """Nodes in Parquet with features of a type."""
    ids = columns.pop("id", ["a", "b"])
    return pa.table({"id": ids, "x": pa.array(x, kind), **columns})


def bad_type(x: Any, kind: Any, *words: str) -> Case:
    return typed(x, kind), ["n.parquet, row 1, column 'x'", *words]


def timed(values: Any, kind: Any, expected: list[int] | list[str]) -> Case:
    """Nodes with times, which are a feature too: the part that `expected` lists."""
    keys = {"time": "t"}
    if isinstance(expected[0], str):
        return typed([1, 2], t=pa.array(values, kind)), expected, keys
    return typed([1, 2], t=pa.array(values, kind)), (*RIGHT[:2], RIGHT[2], expected), keys


def parquet(table: pa.Table, change: Callable[[bytes], bytes], **options: Any) -> Files:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return {"n.parquet": change(sink.getvalue().to_pybytes())}


def written(table: pa.Table, **options: Any) -> Files:
    return {"n.parquet": lambda path: pq.write_table(table, path, **options)}


def sparse(head: bytes) -> Maker:
    def make(path: Path) -> None:
        path.write_bytes(head)
        os.truncate(path, BIG)

    return make


def packed_bomb(head: bytes, block: bytes) -> Maker:
    """A gz of 10 GiB in members that repeat a block."""

    def make(path: Path) -> None:
        member = gzip.compress(block * (2**24 // len(block)), 1)
        path.write_bytes(gzip.compress(head) + member * (BIG // 2**24))

    return make


def bad_sum(data: bytes) -> bytes:
    packed = bytearray(gzip.compress(data))
    packed[-8] ^= 1
    return bytes(packed)


def linked(target: str) -> Maker:
    return lambda path: path.symlink_to(target)


def named(name: str, expected: Graph | list[str] = RIGHT) -> Case:
    """Nodes in a file of this name."""
    return {name: PLAIN}, expected, {"files": name}


LISTS = pa.list_(pa.float32())
TABLE = typed([1, 2])
NESTED = pa.array([{"a": 1}, {"a": 2}])
CASES: dict[str, Case] = {
    # encodings
    "UTF-16": (TEXT.encode("utf-16"), NOT_TEXT),
    "UTF-16 without a BOM": (TEXT.encode("utf-16-le"), NOT_TEXT),
    "UTF-32": (TEXT.encode("utf-32"), NOT_TEXT),
    "latin-1 in the name of a column that is not used": ("id,x,é\na,1,\n".encode("latin-1"),
        NOT_TEXT),
    "latin-1 in a column that is not used": ("id,x,é\na,1,\nb,2,".encode() + b"\xe9\n", RIGHT),
    "latin-1 in an id": (b"id,x\na,1\n\xe9,2\n", ["n.csv, row 2 (line 3)", "not UTF-8"]),
    "latin-1 in a quoted id": (b'id,x\na,1\n"\xe9",2\n', ["row 2 (line 3)", "not UTF-8"]),
    "a surrogate": (b"id,x\na,1\n\xed\xa0\x80,2\n", ["n.csv, row 2 (line 3)", "not UTF-8"]),
    "a BOM": (b"\xef\xbb\xbf" + PLAIN, RIGHT),
    "a BOM in a gz": ({"n.csv.gz": gzip.compress(b"\xef\xbb\xbf" + PLAIN)}, RIGHT),
    "a BOM before a quoted name": (b'\xef\xbb\xbf"id",x\na,1\nb,2\n', RIGHT),
    "two BOMs": (b"\xef\xbb\xbf" * 2 + PLAIN, ["n.csv", "no column 'id'", "'\\ufeffid'"]),
    "NUL in an id": (loop(b"id,x\na\0c,1\nb,2\n"), (["a\0c", "b"], [1, 2], [(1, 1)])),
    "NUL in a number": bad_value("2\0", "'2\\x00'"),
    # quotes
    "an unclosed quote at the end": (b'id,x\na,1\n"b,2\n', ["n.csv", "quote is not closed"]),
    "a line end in an id": (loop(b'id,x\n"a\nc",1\nb,2\n'), (["a\nc", "b"], [1, 2], [(1, 1)])),
    "a line end in a name": (b'id,"n\no",x\na,0,1\nb,0,2\n', RIGHT),
    "doubled quotes": (loop(b'id,x\n"a""c",1\nb,2\n'), (['a"c', "b"], [1, 2], [(1, 1)])),
    "a quote within": (loop(b'id,x\na"c,1\nb,2\n'), (['a"c', "b"], [1, 2], [(1, 1)])),
    "a blank before a quote": (b'id,x\n "a",1\nb, "2"\n', RIGHT),
    "a blank after a quote, and no value at the end": (b'id,x,y\na,1,"z" \nb,2,""\n', RIGHT),
    "a separator in other quotes": (b"id,x\n'a,b',1\n", ["n.csv, row 1 (line 2)", "3 columns"]),
    "a quote that is escaped": (b'id,x\na,1\n"a\\"c",2\n',
        ["n.csv, after line 2", "expected after"]),
    "an unclosed quote": (b'id,x\na,1\n"b,2\nc,3\n', ["n.csv", "quote is not closed"]),
    "an unclosed quote in a column that is not used": (b'id,x,y\na,1,"z\nb,2,y\n',
        ["n.csv", "quote is not closed"]),
    "an unclosed quote after two": (b'id,x\na"c,1\nb,"2""\n', ["n.csv", "quote is not closed"]),
    "an unclosed quote after a blank": (b'id,x\na,1\n "b,2\n', ["n.csv", "quote is not closed"]),
    "a long value, and a blank before the last quote": (
        b'id,x,y\na,1,"' + b"y" * 200_000 + b'"\nb,2,"z "\n', RIGHT),
    "an empty value at the end": (b'id,x,y\n"a","1",""\n"b","2",""\n', RIGHT),
    "text after a quoted value": (b'id,x\na,1\n"b"c,2\n',
        ["n.csv, after line 2", "expected after"]),
    "a number after a line end in an id": (b'id,x\n"a\nc",1\nb,y\n',
        ["n.csv, row 2 (line 4), column 'x'", "'y'"]),
    # lines
    "a short line": (b"id,x\na,1\nb\n", ["n.csv, row 2 (line 3)", "1 columns, expected 2: 'b'"]),
    "a long line": (b"id,x\na,1\nb,2,3\n", ["n.csv, row 2 (line 3)", "3 columns, expected 2"]),
    "a line of 3 MB": (b"id,x\na,1\n%b,%b\n" % (b"b" * 1_500_000, b"2" * 1_500_000),
        ["n.csv, row 2 (line 3)", "the line has 3,000,001 bytes, at most 2,000,000"]),
    "a file that ends in an empty value": (b'id,x,y\na,1,0\nb,""', ["row 2 (line 3)", "2 columns"]),
    "a separator at the end of a line": (b"id,x\na,1,\nb,2\n", RIGHT),
    "a separator at the end of all lines": (b"id,x,\na,1,\nb,2,\n", RIGHT),
    "empty lines": (b"\n\nid,x\n\na,1\n\n\nb,2\n\n", RIGHT),
    "a line of blanks": (b"id,x\na,1\n  \nb,2\n", ["n.csv, row 2 (line 3)", "1 columns"]),
    "more names than values": (b"id,x,y\na,1\nb,2\n", ["row 1 (line 2)", "2 columns, expected 3"]),
    "more values than names": (b"id\na,1\nb,2\n", ["row 1 (line 2)", "2 columns, expected 1"]),
    "CR": (PLAIN.replace(b"\n", b"\r"), RIGHT),
    "CRLF": (PLAIN.replace(b"\n", b"\r\n"), RIGHT),
    "no last line end": (PLAIN[:-1], RIGHT),
    "CRLF, and no last line end": (PLAIN.replace(b"\n", b"\r\n")[:-2], RIGHT),
    "LF, then CRLF": (b"id,x\na,1\nb,2\r\n", ["n.csv", "line ends differ"]),
    "CRLF, then LF": (b"id,x\r\na,1\r\nb,2\n", ["n.csv", "line ends differ"]),
    "CR, then LF": (b"id,x\ra,1\rb,2\n", ["n.csv", "line ends differ"]),
    "only names": (b"id,x\n", ["e.csv, row 1", "there is no n 'a'"]),
    "names without a line end": (b"id,x", ["e.csv, row 1", "there is no n 'a'"]),
    # separators
    "tabs in a .csv": (PLAIN.replace(b",", b"\t"), ["n.csv", "no column 'id'", "delimiter"]),
    "semicolons": (PLAIN.replace(b",", b";"), ["n.csv", "no column 'id'", "delimiter"]),
    "semicolons that are named": (PLAIN.replace(b",", b";"), RIGHT, {"delimiter": ";"}),
    "a decimal comma": (b"id;x\na;1,5\n", ["n.csv, row 1 (line 2), column 'x'", "'1,5'"],
        {"delimiter": ";"}),
    "commas in a .tsv": ({"n.tsv": PLAIN}, ["n.tsv", "no column 'id'", "delimiter"]),
    "a backslash separates": (PLAIN.replace(b",", b"\\"), RIGHT, {"delimiter": "\\"}),
    "a single quote separates": (PLAIN.replace(b",", b"'"), RIGHT, {"delimiter": "'"}),
    "NUL separates": (PLAIN.replace(b",", b"\0"), RIGHT, {"delimiter": "\0"}),
    "a comma in a feature": bad_value('"[1, 2]"', "'[1, 2]'"),
    # numbers
    **{f"the number {text}": bad_value(text) for text in ("0x10", "1_000", '"1,000"', "١", "1e",
        "1.5.2", "1 2", "NA", "1d", "--1")},
    "the number 1e400": bad_value("1e400", "inf"),
    "the number nan": bad_value("nan", "nan"),
    "the number -Infinity": bad_value("-Infinity", "inf"),
    **{f"the number {text!r} is read": (valued(text), (["a", "b"], [1, number], [(0, 1)])) for text,
        number in (("1e3", 1000), ("TRUE", 1), ("false", 0), ("1e-400", 0), ("007", 7))},
    # ids
    "ids with leading zeros": ({"n.csv": b"id,x\n007,1\n7,2\n", "e.csv": b"s,t\n007,7\n"},
        (["007", "7"], [1, 2], [(0, 1)])),
    "ids 1.0 and ends 1": ({"n.csv": b"id,x\n1.0,1\n2.0,2\n", "e.csv": b"s,t\n1,2\n"},
        ["e.csv, row 1 (line 2), column 's'", "there is no n '1'"]),
    "ids 1 and ends 1.0": ({"n.csv": b"id,x\n1,1\n2,2\n", "e.csv": b"s,t\n1,2\n1.0,2\n"},
        ["e.csv, row 2 (line 3), column 's'", "'1.0' is text"]),
    "ids above 2^63": ({"n.csv": b"id,x\n1,1\n18446744073709551615,2\n",
        "e.csv": b"s,t\n1,18446744073709551615\n"},
        (["1", "18446744073709551615"], [1, 2], [(0, 1)])),
    "ids below 0": ({"n.csv": b"id,x\n-1,1\n-2,2\n", "e.csv": b"s,t\n-1,-2\n"},
        ([-1, -2], [1, 2], [(0, 1)])),
    "an end with a blank": ({"n.csv": PLAIN, "e.csv": b"s,t\na,b \n"},
        ["e.csv, row 1 (line 2), column 't'", "there is no n 'b '"]),
    "an empty end in quotes": ({"n.csv": PLAIN, "e.csv": b's,t\na,""\n'},
        ["e.csv, row 1 (line 2), column 't'", "there is no n ''"]),
    "an empty id in quotes": (b'id,x\n"",1\n',
        ["n.csv, row 1 (line 2), column 'id'", "empty text"]),
    "ids in two files": ({"n1.csv": PLAIN, "n2.csv": b"id,x\nc,1\na,2\n"},
        ["n2.csv, row 2 (line 3), column 'id'", "n1.csv, row 1 (line 2)"], {"files": "n*.csv"}),
    "an id as a number and as text": ({"n1.parquet": typed([1, 2], id=[1, 2]),
        "n2.csv": b"id,x\nc,1\n2,2\n"},
        ["n2.csv, row 2 (line 3), column 'id'", "n1.parquet, row 2"], {"files": "n*"}),
    # names of columns
    "empty names": (b"id,,x,\na,0,1,0\nb,0,2,0\n", RIGHT),
    "names that differ by case": (b"ID,id,X,x\n8,a,9,1\n8,b,9,2\n", RIGHT),
    "names of Parquet that differ by case": (pa.table({"ID": [8, 8], "id": ["a", "b"], "X": [9, 9],
        "x": [1, 2]}), RIGHT),
    "a name that another begins with": (pa.table({"id.no": ["c", "d"], "x": [1, 2]}),
        ["n.parquet", "no column 'id'", "'id.no'"]),
    "a name with a dot beside one without": (typed([1, 2], **{"x.y": [3, 4], "id.no": [5, 6]}),
        RIGHT),
    "blanks around names": (b" id ,x\t\na,1\nb,2\n", RIGHT),
    "names that differ by blanks": (b"id, id,x\na,b,1\n", ["n.csv", "2 columns 'id'"]),
    "a line of names of 2 MB": (b"id,x," + b",".join(b"%d" % n for n in range(300_000)) + b"\n",
        ["n.csv", "header line", "1 MiB"]),
    "no line of names": (b"a,1\nb,2\n", ["n.csv", "no column 'id'", "'a'"]),
    "an empty file": (b"", ["n.csv", "empty"]),
    "empty lines alone": (b"\n\n", ["n.csv", "no header line with column names"]),
    "a name that is missing": (b"id,y\na,1\n", ["n.csv", "no column 'x'", "'y'"]),
    "a name that is there twice": (b"id,x,x\na,1,1\n", ["n.csv", "2 columns 'x'"]),
    # several files
    "columns in another order": ({"n1.csv": b"id,x\na,1\n", "n2.csv": b"x,y,id\n2,0,b\n",
        "n3.parquet": typed([3], id=["c"])}, (["a", "b", "c"], [1, 2, 3], [(0, 1)]),
        {"files": "n*"}),
    "a column that one file lacks": ({"n1.csv": PLAIN, "n2.csv": b"id,y\nc,1\n"},
        ["n2.csv", "no column 'x'"], {"files": "n*.csv"}),
    "a number in one file and a list in another": ({"n1.csv": PLAIN,
        "n2.parquet": typed([[1.0, 2.0]], id=["c"])},
        ["n2.parquet, row 1, column 'x'", "2 numbers, expected 1"], {"files": "n*"}),
    # no plain file
    "a directory": ({"n.csv": Path.mkdir}, ["n.csv", "directory"]),
    "a FIFO": ({"n.csv": os.mkfifo}, ["n.csv", "not a regular file"]),
    "a FIFO of edges": ({"n.csv": PLAIN, "e.csv": os.mkfifo}, ["e.csv", "not a regular file"]),
    "a link to itself": ({"n.csv": linked("n.csv")}, ["n.csv", "symbolic links"]),
    "a link to nothing": ({"n.csv": linked("none.csv")}, ["n.csv", "does not exist"]),
    "a link": ({"n.csv": linked("there.txt"), "there.txt": PLAIN}, RIGHT),
    "a device": ({"n.csv": linked("/dev/zero")}, ["n.csv", "not a regular file"]),
    "a name that is too long": ({}, ["the file can not be read: File name too long"],
        {"files": "n" * 300 + ".csv"}),
    "NUL in a file name": ({}, ["null byte"], {"files": "n\0.csv"}),
    "NUL in a pattern": ({}, ["null byte"], {"files": "n\0/*.csv"}),
    "10 GiB of zeros after names": ({"n.csv": sparse(b"id,x\n")}, ["n.csv", LONG]),
    "10 GiB of zeros after rows": ({"n.csv": sparse(PLAIN)}, ["n.csv", LONG]),
    "10 GiB of zeros": ({"n.csv": sparse(b"")}, NOT_TEXT),
    "10 GiB of zeros as gz": ({"n.csv.gz": sparse(b"")}, PACKED),
    "10 GiB of zeros after gz": ({"n.csv.gz": sparse(gzip.compress(PLAIN))}, PACKED),
    "10 GiB of zeros as Parquet": ({"n.parquet": sparse(b"PAR1")}, ["n.parquet", "Parquet"]),
    "10 GiB of zeros as edges": ({"n.csv": PLAIN, "e.csv": sparse(b"s,t\na,b\n")}, ["e.csv", LONG]),
    # names of files
    "a quote in a file name": named("n'.csv"),
    "brackets in a file name": named("n[1]{2}.csv"),
    "a wildcard in a file name": ({"n*.csv": PLAIN, "na.csv": b"id,x\nc,1\n"}, RIGHT,
        {"files": "n*.csv"}),
    "a question mark in a file name": named("n?.csv"),
    "percent signs in a file name": named("n%20%s.csv"),
    "a backslash in a file name": named("n\\1.csv"),
    "a line end in a file name": named("n\n.csv"),
    "a file name that is not UTF-8": ({os.fsdecode(b"n\xff.csv"): PLAIN},
        ["n\\xff.csv", "path is not UTF-8"], {"files": "n*.csv"}),
    "a column of DuckDB's in the path": named("c0=7/n.csv"),
    "a column in the path": ({"x=1/n.parquet": pa.table({"id": ["a", "b"]})},
        ["x=1/n.parquet", "no column 'x'"], {"files": "*/n.parquet"}),
    # another format than the name says
    "Parquet called .csv": ({"n.csv": lambda path: pq.write_table(TABLE, path)}, NOT_TEXT),
    "gz called .csv": (gzip.compress(PLAIN), NOT_TEXT),
    "zstd called .csv": (pa.compress(PLAIN, "zstd", asbytes=True), NOT_TEXT),
    "CSV called .gz": ({"n.csv.gz": PLAIN}, ["n.csv.gz", "cannot be read: zlib"]),
    "CSV called .parquet": ({"n.parquet": PLAIN}, ["n.parquet", "not a complete Parquet file"]),
    "gz called .parquet": ({"n.parquet": gzip.compress(PLAIN)}, ["n.parquet", "not a complete"]),
    "zstd": ({"n.csv.zst": pa.compress(PLAIN, "zstd", asbytes=True)}, ["n.csv.zst", "unpack it"]),
    # gz
    "gz": ({"n.csv.gz": gzip.compress(PLAIN)}, RIGHT),
    "gz of two members": ({"n.csv.gz": gzip.compress(PLAIN[:7]) + gzip.compress(PLAIN[7:])}, RIGHT),
    "gz with an empty member": ({"n.csv.gz": gzip.compress(b"") + gzip.compress(PLAIN)}, RIGHT),
    "gz with zeros at its end": ({"n.csv.gz": gzip.compress(PLAIN) + bytes(99)}, PACKED),
    "gz with garbage at its end": ({"n.csv.gz": gzip.compress(PLAIN) + b"xyz"}, PACKED),
    "gz without its end": ({"n.csv.gz": gzip.compress(PLAIN)[:-9]},
        ["n.csv.gz", "cannot be read: Truncated"]),
    "gz without its sum": ({"n.csv.gz": gzip.compress(PLAIN)[:-4]},
        ["n.csv.gz", "cannot be read: Truncated"]),
    "gz with another sum after 1 MiB": ({"n.csv.gz": bad_sum(PLAIN + b"".join(b"u%d,%d\n" % (n,
        n) for n in range(120_000)))}, ["n.csv.gz, after line", "cannot be read: zlib"]),
    "gz with another sum": ({"n.csv.gz": bad_sum(PLAIN)}, PACKED),
    "gz of another value": ({"n.csv.gz": gzip.compress(PLAIN, 0).replace(b"b,2", b"b,3")}, PACKED),
    "gz of 10 GiB of names": ({"n.csv.gz": packed_bomb(b"", b"x")}, ["n.csv.gz", "header line"]),
    "gz of 10 GiB in a line": ({"n.csv.gz": packed_bomb(b"id,x\n", b"1")}, ["n.csv.gz", LONG]),
    "gz of 10 GiB in a last line": ({"n.csv.gz": packed_bomb(PLAIN, b"1")}, ["n.csv.gz", LONG]),
    # Parquet
    "a struct": (typed(NESTED), ["n.parquet, row 1, column 'x'", "struct"]),
    "a map": bad_type([[("a", 1)], []], pa.map_(pa.string(), pa.int64()), "map"),
    "a list of lists": bad_type([[[1.0]], [[2.0]]], pa.list_(LISTS), "list"),
    "a list of texts": (typed([["1.0"], ["b"]]), ["n.parquet, row 2, column 'x'", "'b'"]),
    "lists that differ": (typed([[1.0], [1.0, 2.0]]),
        ["row 2, column 'x'", "2 numbers, expected 1"]),
    "a list with a null": (typed([[1.0], [None]]), ["row 2, column 'x'", "no number"]),
    "a list that is null": (typed([[1.0], None]), ["row 2, column 'x'", "no value"]),
    "an empty list": (typed([[], []], LISTS), ["row 1, column 'x'", "0 numbers"]),
    "lists": (typed([[1.0], [2.0]], pa.large_list(pa.float64())), RIGHT),
    "ids that are lists": (typed([1, 2], id=[["a"], ["b"]]),
        ["n.parquet, row 1, column 'id'", "list"]),
    "decimals": (typed([Decimal("1.00"), Decimal("2.00")]), RIGHT),
    "ids that are decimals": (typed([1, 2], id=[Decimal(1), Decimal(2)]),
        ["column 'id'", "decimal"]),
    "uint64 above 2^63": (typed([1, 2**64 - 1], pa.uint64()),
        (["a", "b"], [1, float(2**64)], [(0, 1)])),
    "ids above 2^63 in Parquet": (typed([1, 2], id=pa.array([1, 2**63], pa.uint64())),
        ["n.parquet, row 2, column 'id'", "9223372036854775808"]),
    "float16": (typed(np.array([1, 2], np.float16)), RIGHT),
    "float16 with a NaN": (typed(np.array([1, np.nan], np.float16)), ["row 2, column 'x'", "nan"]),
    "float16 that is filled": (typed(np.array([1, np.nan], np.float16)), RIGHT,
        {"features": {"feat": {"column": "x", "impute": 2}}}),
    "a dictionary": (typed([1, 2], id=pa.array(["a", "b"]).dictionary_encode()), RIGHT),
    "a dictionary of numbers": (typed(pa.array([1.0, 2.0]).dictionary_encode()), RIGHT),
    "durations": bad_type([1, 2], pa.duration("us"), "duration"),
    "dates as features": bad_type([1, 2], pa.date32(), "date32", "parts or since"),
    "bytes": (typed([b"1", b"\xff"]), ["n.parquet, row 2, column 'x'", "xff"]),
    "bytes of one length": bad_type([b"1", b"2"], pa.binary(1), "fixed_size_binary"),
    "ids that are bytes": (typed([1, 2], id=[b"a", b"b"]), ["column 'id'", "binary"]),
    "ids that are true or false": (typed([1, 2], id=[True, False]), ["column 'id'", "bool"]),
    "nulls alone": (typed([None, None]), ["n.parquet, row 1, column 'x'", "no number"]),
    "ids that are null": (typed([1, 2], id=pa.nulls(2)), ["row 1, column 'id'", "no value"]),
    "views of text": (typed([1, 2], id=pa.array(["a", "b"], pa.string_view())), RIGHT),
    "text that is not UTF-8": (parquet(typed([1, 2], id=["a", "bbb"]),
        lambda d: d.replace(b"bbb", b"\xff\xff\xff"), use_dictionary=False, compression="none"),
        ["n.parquet", "UTF"]),
    "no rows": (TABLE.slice(0, 0), ["e.csv, row 1", "there is no n 'a'"]),
    "no row groups": (written(TABLE.slice(0, 0), row_group_size=1),
        ["e.csv, row 1", "there is no n 'a'"]),
    "no columns": (pa.table({}), ["n.parquet", "no column 'id'", "none"]),
    "half a Parquet file": (parquet(TABLE, lambda d: d[: len(d) // 2]),
        ["n.parquet", "not a complete"]),
    "a damaged footer": (parquet(TABLE, lambda d: d[:-200] + bytes(192) + d[-8:]),
        ["n.parquet", "not a complete Parquet file"]),
    "a footer larger than the file": (parquet(TABLE,
        lambda d: d[:-8] + b"\xff\xff\xff\x7f" + d[-4:]),
        ["n.parquet", "not a complete Parquet file"]),
    "a damaged page": (parquet(TABLE, lambda d: d[:4] + bytes(60) + d[64:]),
        ["n.parquet", "not a complete Parquet file"]),
    # times
    "times before 1970": timed([-1, 1], pa.timestamp("s"), [-(10**6), 10**6]),
    "dates before 1970": timed([-1, 1], pa.date32(), [-86_400 * 10**6, 86_400 * 10**6]),
    "nanoseconds before 1970": timed([-1, 1], pa.timestamp("ns"), [-1, 0]),
    "nanoseconds in a time zone": timed([-1, 1], pa.timestamp("ns", "Europe/Berlin"), [-1, 0]),
    "nanoseconds in no known time zone": timed([-1, 1], pa.timestamp("ns", "Mars/Olympus"),
        [-1, 0]),
    "a date in the far future": timed([1, 2**31 - 1], pa.date32(),
        ["row 2, column 't'", "2147483647"]),
    "a time in the far future": timed([1, 2**62], pa.timestamp("ms"),
        ["row 2, column 't'", str(2**62)]),
    "times of a day": timed([1, 2], pa.time64("us"), ["row 1, column 't'", "time64"]),
    "durations as times": timed([1, 2], pa.duration("us"), ["row 1, column 't'", "duration"]),
    "no times": timed([None, None], pa.timestamp("s"), ["row 1, column 't'", "no value"]),
    "int96 of the year 9999": (written(typed([1, 2],
        t=pa.array([0, 253402300799], pa.timestamp("s"))), use_deprecated_int96_timestamps=True),
        (*RIGHT, [0, 253402300799 * 10**6]), {"time": "t"}),
    "times with a zone and without one": ({"n1.parquet": typed([1], id=["a"],
        t=pa.array([1], pa.timestamp("us"))),
        "n2.parquet": typed([2], id=["b"], t=pa.array([1], pa.timestamp("us", "UTC")))},
        ["n2.parquet, row 1, column 't'", "timestamp[us, tz=UTC]", "time zone, or none"],
        {"files": "n*", "time": "t"}),
}  # fmt: skip
# Both engines read files alike, and refuse the same; each puts a graph together in its own way.
RUNS = [(name, "memory") for name in CASES]
RUNS += [(name, "disk") for name, case in CASES.items() if isinstance(case[1], tuple)]


def build(directory: Path, case: Case) -> TablesGraph:
    content, keys = case[0], case[2] if len(case) > 2 else {}
    if isinstance(content, (bytes, pa.Table)):
        content = {"n.csv" if isinstance(content, bytes) else "n.parquet": content}
    files: Files = {"e.csv": b"s,t\na,b\n", **content}
    for name, what in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(what, bytes):
            path.write_bytes(what)
        elif isinstance(what, pa.Table):
            pq.write_table(what, path)
        else:
            what(path)
    of_nodes = next((name for name in files if name.startswith("n")), "n.csv")
    nodes = {"files": of_nodes, "id": "id", "features": {"feat": "x"}, "splits": {"train": 1.0}}
    edges = {"files": "e.csv", "source": "s", "target": "t"}
    if "sql" in keys:
        del nodes["files"]
    described = {"nodes": {"n": {**nodes, **keys}}, "edges": {"n:to:n": edges}}
    (directory / "g.yaml").write_text(yaml.safe_dump(described, sort_keys=False))
    return TablesGraph(format="tables", path=directory / "g.yaml")


def reading(graph: TablesGraph, engine: str, directory: Path) -> Callable[[], object]:
    if engine == "memory":
        return lambda: load_graph(graph)
    return lambda: out_of_core(graph, directory / "p", 1)


@pytest.fixture
def limited() -> Iterator[None]:
    """Limit the memory of the process, and the size of the files that it writes."""
    held = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
    limits = {resource.RLIMIT_DATA: held + MEMORY, resource.RLIMIT_FSIZE: WRITTEN}
    before = {kind: resource.getrlimit(kind) for kind in limits}
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, before[kind][1]))
    yield
    for kind, limit in before.items():
        resource.setrlimit(kind, limit)


@pytest.mark.parametrize(("name", "engine"), RUNS)
def test_hostile_tables(
    name: str, engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    case = CASES[name]
    graph = build(tmp_path, case)
    request.getfixturevalue("limited")
    before = tree(tmp_path)
    if isinstance(case[1], tuple):
        if engine == "memory":
            data = load_graph(graph)
        else:
            (tmp_path / "work").mkdir()
            work = Workspace(tmp_path / "work", in_turn, lambda _: None)
            data = in_memory(read_graph(graph, work, needs_masks=True, trains=True))
        ids, feat, edges, *times = case[1]
        assert data.ids["n"].to_pylist() == ids
        assert data.nodes["n"].data["feat"][:, 0].tolist() == feat
        found = data.edges["n", "to", "n"]
        assert list(zip(found.src.tolist(), found.dst.tolist(), strict=True)) == edges
        assert not times or data.nodes["n"].data["time"].tolist() == times[0]
        return
    assert_refused(reading(graph, engine, tmp_path), case[1])
    after = tree(tmp_path)
    assert {name: after[name] for name in after if not name.startswith(".p.stages")} == before


@pytest.mark.parametrize("engine", ["memory", "disk"])
@pytest.mark.parametrize("now", [b"id,x\na,1\n", PLAIN + b"c,3\n", None])
def test_a_file_that_changes_while_it_is_read(
    now: bytes | None, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, file, read = build(tmp_path, (PLAIN, RIGHT)), tmp_path / "n.csv", StoredIds.read

    def read_and_change(*arguments: Any) -> list[int]:
        starts = read(*arguments)
        if now is None:
            file.unlink()
        else:
            file.write_bytes(now)
        return starts

    monkeypatch.setattr(StoredIds, "read", read_and_change)
    what = "does not exist" if now is None else "changed while it was read"
    assert_refused(reading(graph, engine, tmp_path), ["n.csv", what])
    assert not (tmp_path / "p").exists()


def test_odd_files_of_queries_and_proposals(tmp_path: Path) -> None:
    """They mean a file by its name, whatever characters that has, and do not wait for a FIFO."""
    (tmp_path / "n[1].csv").write_bytes(PLAIN)
    (tmp_path / "n1.csv").write_bytes(b"id,x\nc,3\n")
    (tmp_path / "e.csv").write_bytes(b"s,t\na,b\n")
    data = load_graph(build(tmp_path, ({}, RIGHT, {"sql": "select * from 'n[1].csv'"})))
    assert data.ids["n"].to_pylist() == ["a", "b"]
    (tmp_path / "n1.csv").unlink()
    assert "files: n[1].csv" in propose(str(tmp_path), tmp_path)
    os.mkfifo(tmp_path / "n1.csv")
    assert_refused(lambda: propose(str(tmp_path), tmp_path), ["n1.csv", "not a regular file"])
