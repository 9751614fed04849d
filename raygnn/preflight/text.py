"""A report as people read it, in the width that there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from raygnn.preflight.findings import Finding
from raygnn.preflight.report import Report


class Table(NamedTuple):
    """To be shown as one."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]

    @property
    def width(self) -> int:
        """Columns of characters that it takes with no cell folded, between blanks and lines."""
        cells = zip(self.columns, *self.rows)
        return sum(max(map(len, column)) + 3 for column in cells) + 1


def nodes(report: Report, width: int) -> Iterator[Table | str]:
    """The nodes that answered, and how the ranks on them will communicate: tables where they fit,
    else a line per node and per variable. What all nodes have alike is said once, before."""
    if all(node.problem for node in report.nodes):
        return  # that is a finding
    alike, table = _layout(report)
    if alike:
        yield alike
    if table is not None and table.width <= width:
        yield table
    elif table is not None:
        for row in table.rows:
            yield _line(table.columns[1:], f"node {row[0]}", row[1:])
    if report.of_job:
        yield from _communication(report, width)


def finding(found: Finding) -> str:
    """What it says, by whom, and the remedy."""
    remedy = f"\n  → {found.remedy}" if found.remedy else ""
    return f"{found.severity} [{found.check}]: {found}{remedy}"


def _layout(report: Report) -> tuple[str, Table | None]:
    """What is said once, and a table of what is not: none for a single node."""
    rows = report.rows()
    if len(rows) == 1:
        (row,) = rows
        return _line(Report.COLUMNS[1:], f"node {row[0]}", row[1:]), None
    there = [row for node, row in zip(report.nodes, rows) if not node.problem]
    same = [len(set(column)) == 1 for column in zip(*there)]
    usual = {i for i in Report.COMPARED if same[i]}
    alike = [(Report.COLUMNS[i], there[0][i]) for i in sorted(usual)]
    kept = [
        i
        for i in range(len(Report.COLUMNS))
        if i not in usual and (i == 0 or any(row[i] for row in there))
    ]
    columns = [Report.COLUMNS[i] for i in kept]
    shown = [
        tuple(row[i] for i in kept)
        if not node.problem
        else (row[0], "no facts", *[""] * (len(kept) - 2))[: len(kept)]
        for node, row in zip(report.nodes, rows)
    ]
    names, cells = [name for name, _ in alike], [cell for _, cell in alike]
    line = _line(names, f"all {len(there)} nodes", cells)
    return (line if alike else ""), Table("nodes", columns, shown)


def _communication(report: Report, width: int) -> Iterator[Table | str]:
    comm, names = report.comm, {node.id: node.node for node in report.nodes}
    title = f"communication: {comm.backend}, {comm.why}"
    rows = comm.rows(names)
    columns: tuple[str, ...] = ("node", "variable", "value", "reason")
    if all(row[0] == "all" for row in rows):
        columns, rows = columns[1:], [row[1:] for row in rows]
    table = Table(title, columns, rows)
    if rows and table.width <= width:
        yield table
        return
    yield title
    for *node, variable, value, reason in rows:
        place = f"{node[0]}: " if node else ""
        yield f"  {place}{variable}={value} ({reason})"


def _line(columns: Sequence[str], name: str, cells: Sequence[str]) -> str:
    listed = [f"{column} {cell}" for column, cell in zip(columns, cells) if cell]
    return f"{name}: {', '.join(listed)}"
